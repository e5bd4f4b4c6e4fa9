//! A wrapper of a host in which calls fail at random, as [`crate::testing::fault_injection`] decides; so do those of
//! the movers that it opens. A failed call has done nothing, or the first part of its range, as on a real host.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, Gpa, Hva, Moment, NodeId, PageSize};

use crate::host::{Advice, Host, HostError, PageRun};
use crate::kernel::{GiantMappings, Kernel, Userfaultfds};
use crate::mover::linux::{MoverError, OpenMover};
use crate::numa::placement::NodePolicy;
use crate::region::GuestRam;
use crate::sensors::minor_faults::{MinorFaultsError, OpenMinorFaults};
use crate::side_mapping::{GiantFile, SideContents, SideMapping};
use crate::testing::failing_minor_faults::FailingMinorFaults;
use crate::testing::failing_mover::FailingMover;
use crate::testing::fault_injection::{Fate, FaultInjection};

/// Wraps a host; see the module. A late failure has done the first half of its range.
#[derive(Debug)]
pub struct FailingHost<H> {
    real: H,
    faults: Arc<FaultInjection>,
}

impl<H: Kernel> FailingHost<H> {
    /// `faults` decides which calls to `real` fail.
    pub fn new(real: H, faults: Arc<FaultInjection>) -> FailingHost<H> {
        FailingHost { real, faults }
    }

    fn refuse(&self, what: &'static str, errnos: &[i32]) -> Result<(), HostError> {
        self.faults.refuse(what, errnos).map_err(|source| HostError { what, source })
    }

    /// Calls `real` with the whole range, or with a part of it before an error.
    fn over(
        &self,
        what: &'static str,
        errnos: &[i32],
        bytes: Bytes,
        mut real: impl FnMut(Bytes) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let source = match self.faults.fate(what, errnos) {
            Fate::Fine => return real(bytes),
            Fate::Early(error) => error,
            Fate::Late(error) => {
                real(PageSize::Base4K.bytes() * (bytes.pages(PageSize::Base4K) / 2))?;
                error
            }
        };
        Err(HostError { what, source })
    }
}

/// Errors of madvise(2), by advice.
fn errnos(advice: Advice) -> &'static [i32] {
    match advice {
        Advice::HugePage | Advice::NoHugePage | Advice::Cold => &[libc::EAGAIN, libc::ENOMEM],
        Advice::Collapse => &[libc::EAGAIN, libc::EBUSY, libc::EINVAL, libc::ENOMEM],
        Advice::PopulateRead | Advice::PopulateWrite => &[libc::EFAULT, libc::EHWPOISON, libc::ENOMEM],
    }
}

/// Errors of `PAGEMAP_SCAN` that do not depend on its arguments (Documentation/admin-guide/mm/pagemap.rst).
const SCAN_ERRNOS: &[i32] = &[libc::EINTR, libc::ENOMEM];

impl<H: Kernel> Host for FailingHost<H> {
    fn is_own(&self) -> bool {
        self.real.is_own()
    }

    fn now(&self) -> Moment {
        self.real.now()
    }

    fn thread_cpu_time(&self) -> Duration {
        self.real.thread_cpu_time()
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        self.over("advise", errnos(advice), bytes, |bytes| match bytes {
            Bytes::ZERO => Ok(()),
            bytes => self.real.advise(start, bytes, advice),
        })
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        self.over("scan", SCAN_ERRNOS, bytes, |bytes| self.real.scan(start, bytes, runs))
    }

    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        self.over("scan_occupied", SCAN_ERRNOS, bytes, |bytes| self.real.scan_occupied(start, bytes, runs))
    }

    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError> {
        self.refuse("is_one_mapping", &[libc::EIO, libc::ENOMEM])?;
        self.real.is_one_mapping(start, bytes)
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        self.refuse("read_text", &[libc::EACCES, libc::EIO, libc::ENOENT])?;
        self.real.read_text(path)
    }

    fn nodes_of(&self, pages: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> Result<(), HostError> {
        self.refuse("nodes_of", &[libc::EPERM, libc::ENOMEM])?;
        self.real.nodes_of(pages, nodes)
    }

    fn move_to_node(&self, pages: &[Hva], node: NodeId) -> Result<(), HostError> {
        self.refuse("move_to_node", &[libc::EBUSY, libc::ENOMEM, libc::EACCES])?;
        self.real.move_to_node(pages, node)
    }

    fn threads(&self) -> Result<Vec<u32>, HostError> {
        self.refuse("threads", &[libc::EACCES])?;
        self.real.threads()
    }

    fn sleep(&self, time: Duration) {
        self.real.sleep(time);
    }
}

impl<H: Kernel> GiantMappings for FailingHost<H> {
    fn create_giant(&self) -> Result<GiantFile, HostError> {
        self.refuse("create_giant", &[libc::EMFILE, libc::ENOMEM])?;
        self.real.create_giant()
    }

    fn fill_giant(&self, page: &GiantFile, policy: Option<&NodePolicy>) -> Result<(), HostError> {
        self.refuse("fill_giant", &[libc::ENOSPC])?;
        self.real.fill_giant(page, policy)
    }

    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError> {
        self.refuse("map_aside", &[libc::ENOMEM])?;
        self.real.map_aside(contents)
    }

    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError> {
        self.refuse("move_aside", &[libc::ENOMEM])?;
        self.real.move_aside(ram, giant, to)
    }

    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError> {
        self.refuse("move_in", &[libc::ENOMEM])?;
        self.real.move_in(from, ram, giant)
    }

    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError> {
        self.refuse("map_over", &[libc::ENOMEM])?;
        self.real.map_over(ram, giant, page)
    }
}

impl<H: Kernel> Userfaultfds for FailingHost<H> {
    fn open_mover(&self, ram: Arc<GuestRam>) -> Result<OpenMover, MoverError> {
        let OpenMover { mover, touches } = self.real.open_mover(ram)?;
        Ok(OpenMover { mover: Arc::new(FailingMover::new(mover, self.faults.clone())), touches })
    }

    fn open_minor_faults(&self, ram: Arc<GuestRam>) -> Result<OpenMinorFaults, MinorFaultsError> {
        let OpenMinorFaults { faults, touches, claims } = self.real.open_minor_faults(ram)?;
        let faults = Arc::new(FailingMinorFaults::new(faults, self.faults.clone()));
        Ok(OpenMinorFaults { faults, touches, claims })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;

    const START: Hva = Hva::new(1 << 40);

    fn failing(one_in: u64, seed: u64) -> FailingHost<FakeHost> {
        let real = FakeHost::default();
        real.make_present(START, mib(2), false);
        FailingHost::new(real, Arc::new(FaultInjection::new(seed, one_in)))
    }

    #[test]
    fn without_injected_faults_it_is_the_real_host() {
        let (host, mut runs) = (failing(0, 1), Vec::new());
        host.scan(START, mib(2), &mut runs).expect("nothing fails");
        assert_eq!(runs.iter().map(|run| run.bytes).sum::<Bytes>(), mib(2));
    }

    #[test]
    fn a_failed_scan_has_seen_nothing_or_half() {
        let mut seen = [0; 2];
        for seed in 0..64 {
            let (host, mut runs) = (failing(1, seed), Vec::new());
            let error = host.scan(START, mib(2), &mut runs).expect_err("one call in one fails");
            assert!(SCAN_ERRNOS.contains(&error.source.raw_os_error().expect("an errno")));
            match runs.iter().map(|run| run.bytes).sum::<Bytes>() {
                Bytes::ZERO => seen[0] += 1,
                half => seen[usize::from(half == mib(1))] += 1,
            }
        }
        assert!(seen.iter().all(|times| *times > 8), "{seen:?}");
    }
}
