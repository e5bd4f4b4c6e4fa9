//! The kernel's compactions of the whole host since boot, from `/proc/vmstat` (proc_vmstat(5); "Monitoring usage" in
//! Documentation/admin-guide/mm/transhuge.rst).

use crate::host::Host;

/// Path of the file.
pub(crate) const VMSTAT: &str = "/proc/vmstat";

/// Number of requests from which on their results say something about the next one.
const ENOUGH: u64 = 32;

/// Counters since boot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compactions {
    /// Number of requests that compacted.
    requests: u64,
    /// Number of them that got a block; `None` where the kernel does not say.
    successful: Option<u64>,
    /// Number of pages moved for any reason.
    pub moved: u64,
}

impl Compactions {
    pub fn read(host: &dyn Host) -> Compactions {
        let text = host.read_text(VMSTAT).unwrap_or_default();
        let counter = |name: &str| {
            let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            values.next()?.parse().ok()
        };
        Compactions {
            requests: counter("compact_stall").unwrap_or(0),
            successful: counter("compact_success"),
            moved: counter("pgmigrate_success").unwrap_or(0),
        }
    }

    /// Whether compaction made the block of a request. Without counters it may have.
    pub fn made_one_since(&self, before: &Compactions) -> bool {
        self.successful.zip(before.successful).is_none_or(|(now, before)| now > before)
    }

    /// Whether half of the requests on this host have had their block, as far as that is known.
    pub fn mostly_succeed(&self) -> bool {
        self.requests >= ENOUGH && self.successful.is_some_and(|successful| successful >= self.requests / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;

    #[test]
    fn half_of_many_requests_with_a_block_are_a_success() {
        let mostly_succeed = |vmstat: &str| {
            let host = FakeHost::default();
            host.set_text(VMSTAT, vmstat);
            Compactions::read(&host).mostly_succeed()
        };
        let of = |requests: u64, successful: u64| {
            mostly_succeed(&format!("compact_stall {requests}\ncompact_fail 9\ncompact_success {successful}\n"))
        };
        assert_eq!([of(31, 31), of(32, 16), of(100, 49), of(100, 50)], [false, true, false, true]);
        assert_eq!([mostly_succeed(""), mostly_succeed("compact_stall 100\n")], [false, false]);
    }
}
