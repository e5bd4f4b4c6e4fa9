//! The hot set of a guest of `wideleaf run`, seen from outside: its windows by the process's page tables.
//!
//! ```text
//!   /proc/PID/maps   base: a multiple of 1 GiB from which on RAM is mapped without a gap ─▶ base + guest address
//!   /proc/PID/pagemap                                                                     └─▶ huge, base or missing
//! ```

use std::time::Instant;

use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::{ProcessHost, RamRange};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Backing, Bytes, GpaRange, Hva, PageSize};

use super::Look;

/// First guest address without RAM: the devices' place below 4 GiB.
const HOLE_START: Bytes = gib(3);

/// A hot set. Its place in the process is looked for until it is found.
pub(super) struct HotSet {
    pid: u32,
    ranges: Vec<GpaRange>,
    memory: Bytes,
    found: Option<(ProcessHost, Hva)>,
    sensor: HostBackingSensor,
}

impl HotSet {
    /// The hot set of a guest with this RAM in the process.
    pub(super) fn of(pid: u32, ranges: &[GpaRange], memory_mib: u64) -> HotSet {
        let sensor = HostBackingSensor::default();
        HotSet { pid, ranges: ranges.to_vec(), memory: mib(memory_mib), found: None, sensor }
    }

    /// Looks at it; `None` before RAM is mapped, and after the end of the process.
    pub(super) fn look(&mut self, began: Instant) -> Option<Look> {
        if self.found.is_none() {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).ok()?;
            let base = base_of(&maps, self.memory.min(HOLE_START))?;
            self.found = Some((ProcessHost::open(self.pid).ok()?, base));
        }
        let (host, base) = self.found.as_ref()?;
        let at_s = began.elapsed().as_secs_f64();
        let mut look = Look { at_s, windows: 0, windows_large: 0, base_mib: 0.0, huge_mib: 0.0 };
        for gpa in &self.ranges {
            let range = RamRange { gpa: *gpa, hva: *base + Bytes::new(gpa.start().get()) };
            for window in self.sensor.sample(host, range, None).ok()? {
                let resident = (PageSize::Base4K.bytes() * u64::from(window.resident)).get() as f64;
                let is_large = matches!(window.backing, Backing::Huge2M | Backing::Giant1G);
                look.windows += u64::from(window.resident > 0);
                look.windows_large += u64::from(is_large);
                let place = if is_large { &mut look.huge_mib } else { &mut look.base_mib };
                *place += resident / super::super::wideleaf_run::MIB;
            }
        }
        // A process that ends loses its RAM first.
        (look.base_mib + look.huge_mib > 0.0).then_some(look)
    }
}

/// Address of guest RAM: a multiple of 1 GiB, from which on this size is mapped private, readable and writable, in any
/// number of mappings (proc_pid_maps(5)).
fn base_of(maps: &str, bytes: Bytes) -> Option<Hva> {
    let mut run: Option<(u64, u64)> = None;
    let mut longest: Option<(u64, u64)> = None;
    for (start, end) in maps.lines().filter_map(private_mapping) {
        run = match run {
            Some((first, last)) if last == start => Some((first, end)),
            _ => Some((start, end)),
        };
        // RAM may follow other memory without a gap.
        let (first, last) = run?;
        let base = first.next_multiple_of(PageSize::Giant1G.bytes().get());
        if last.saturating_sub(base) >= bytes.get() && longest.is_none() {
            longest = Some((base, last));
        }
    }
    longest.map(|(base, _)| Hva::new(base))
}

/// Start and end of a mapping that is private, readable and writable.
fn private_mapping(line: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
    rest.starts_with("rw-p").then_some(())?;
    Some((hexadecimal(start)?, hexadecimal(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_found_in_several_mappings_at_a_multiple_of_a_gibibyte() {
        let maps = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0    [heap]
7f0000200000-7f0040000000 ---p 00000000 00:00 0
7f0040000000-7f0050000000 rw-p 00000000 00:00 0
7f0050000000-7f0080000000 rw-p 10000000 fd:00 77   /srv/saved/memory
7f0080000000-7f0090000000 ---p 00000000 00:00 0
7ffe00000000-7ffe00021000 rw-p 00000000 00:00 0    [stack]
";
        assert_eq!(base_of(maps, gib(1)), Some(Hva::new(0x7f00_4000_0000)));
        assert_eq!(base_of(maps, gib(2)), None);
        assert_eq!(base_of("", gib(1)), None);
        let behind = "7f003fe00000-7f0080000000 rw-p 00000000 00:00 0\n";
        assert_eq!(base_of(behind, gib(1)), Some(Hva::new(0x7f00_4000_0000)), "other memory lies before it");
    }
}
