//! Collapse of shared memory (memfd) of this process, during which only threads that touch the window wait.
//!
//! `MADV_COLLAPSE` of file pages removes the mappings of all 512 pages one by one (`collapse_file`, mm/khugepaged.c).
//! KVM has to forget each of them (`mmu_notifier`), and interrupts all vCPUs for it: the whole guest stops for as
//! long. So this actuator removes the window's mapping in one call first. A userfaultfd keeps threads from mapping its
//! pages again before the collapse. The file keeps the pages, so nothing is copied beside the collapse itself.
//!
//! ```text
//!   watch ──▶ unmap ──▶ MADV_COLLAPSE ──▶ stop watching, wake
//!             once      nothing is mapped   threads that touched the window continue on the huge page
//! ```
//!
//! The descriptor is not polled: all threads that wait are woken at the end of the collapse, however that ends, also by
//! a panic. If the kernel refuses to wake them, the descriptor is closed, which does. Another process's memory cannot
//! be unmapped from outside (`process_madvise_remote_valid`, mm/madvise.c).

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{PageSize, WindowIndex};

use super::collapse::{Collapse, collapse};
use super::reshape::Holes;
use crate::claims::{Claims, PartClaim};
use crate::host::{Advice, Host, HostError, PageRun};
use crate::mover::ALL_PAGES;
use crate::region::RamRange;
use crate::sensors::minor_faults::MinorFaults;

/// Unmaps windows of one VM's memfd RAM for their collapse; see the module.
pub struct UnmappedCollapse {
    /// `None` once closed: windows are collapsed while they are mapped.
    faults: Mutex<Option<Arc<dyn MinorFaults>>>,
    /// Claims of the RAM: a window with pages that are being given back stays mapped.
    claims: Arc<Claims>,
}

impl UnmappedCollapse {
    /// Over faults that no other user has. `claims` are those of the RAM behind it.
    pub fn new(faults: Arc<dyn MinorFaults>, claims: Arc<Claims>) -> UnmappedCollapse {
        UnmappedCollapse { faults: Mutex::new(Some(faults)), claims }
    }

    /// Collapses one window like [`collapse_window`](super::collapse::collapse_window). `keeps_holes`: a window with
    /// absent pages stays as it is. A window that cannot be unmapped now is collapsed while it is mapped.
    pub fn run(&self, host: &dyn Host, range: RamRange, window: WindowIndex, keeps_holes: bool) -> Collapse {
        let holes = if keeps_holes { Holes::Kept } else { Holes::Filled };
        let within = |call: &dyn Fn() -> Result<(), HostError>| match self.unmap(host, range, window) {
            Some(unmapped) => unmapped.until(call),
            None => call(),
        };
        collapse(&within, host, range, window, holes)
    }

    /// Unmaps a window, if that is possible now.
    fn unmap<'a>(&'a self, host: &'a dyn Host, range: RamRange, window: WindowIndex) -> Option<Unmapped<'a>> {
        let faults = self.lock().clone()?;
        let _claim = self.claims.window_aside(window).ok()?;
        let (start, mut mapped) = (range.hva + (window.start() - range.gpa.start()), Vec::new());
        host.scan(start, PageSize::Huge2M.bytes(), &mut mapped).ok()?;
        faults.watch(window).ok()?;
        let unmapped = Unmapped { collapse: self, host, faults, window, mapped, is_collapsed: false, _claim };
        // After an error it may be unmapped in part; the drop maps it again.
        unmapped.faults.unmap(window, ALL_PAGES).ok()?;
        Some(unmapped)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn MinorFaults>>> {
        self.faults.lock()
    }
}

/// A window that is not mapped, until this is dropped. Threads that touch it wait.
struct Unmapped<'a> {
    collapse: &'a UnmappedCollapse,
    host: &'a dyn Host,
    faults: Arc<dyn MinorFaults>,
    window: WindowIndex,
    /// Pages that were mapped before.
    mapped: Vec<PageRun>,
    /// Whether the window is mapped again, as a huge page.
    is_collapsed: bool,
    /// Until all pages are mapped again: the guest gives none of them back meanwhile.
    _claim: PartClaim,
}

impl Unmapped<'_> {
    /// Makes the call, and maps the window again.
    fn until(mut self, call: &dyn Fn() -> Result<(), HostError>) -> Result<(), HostError> {
        let answer = call();
        self.is_collapsed = answer.is_ok();
        answer
    }

    /// Stops watching by any means: a guest that waits for ever is worse than slow collapses. Returns whether this
    /// thread may touch the window at once: a closed descriptor may have other users, until their collapses end.
    fn let_go(&self) -> bool {
        let Err(error) = self.faults.unwatch(self.window) else { return true };
        // The window may not stay watched, since no thread answers its faults.
        tracing::error!(
            "windows of shared memory are mapped during their collapse from now on: cannot stop watching {} other \
             than by closing the userfaultfd: {error}",
            self.window
        );
        *self.collapse.lock() = None;
        false
    }
}

impl Drop for Unmapped<'_> {
    fn drop(&mut self) {
        let is_to_map = self.let_go() && !self.is_collapsed;
        // After a collapse the kernel has mapped the huge page. A page that cannot be mapped now is mapped by the
        // next touch; until then it counts as absent.
        for run in self.mapped.iter().filter(|_| is_to_map) {
            if let Err(error) = self.host.advise(run.start, run.bytes, Advice::PopulateRead) {
                tracing::warn!("cannot map {} before its next touch: {error}", self.window);
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_minor_faults::FakeMinorFaults;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, Hva, OutcomeResult, Refusal};

    const WINDOW: WindowIndex = WindowIndex::new(0);

    struct Bed {
        host: Arc<FakeHost>,
        faults: Arc<FakeMinorFaults>,
        claims: Arc<Claims>,
        range: RamRange,
        collapse: UnmappedCollapse,
    }

    impl Bed {
        /// One window in base pages, of a file.
        fn new() -> Bed {
            let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2)).expect("fits"), hva: Hva::new(1 << 40) };
            let host = Arc::<FakeHost>::default();
            host.be_of_a_file();
            host.make_present(range.hva, mib(2), false);
            let faults = Arc::new(FakeMinorFaults::new(host.clone(), range));
            let claims = Arc::<Claims>::default();
            let collapse = UnmappedCollapse::new(FakeMinorFaults::open(&faults), claims.clone());
            Bed { host, faults, claims, range, collapse }
        }

        fn run(&self) -> OutcomeResult {
            self.collapse.run(self.host.as_ref(), self.range, WINDOW, false).result
        }

        /// Present pages of the window that is not unmapped.
        fn pages(&self) -> Vec<PageRun> {
            let mut runs = Vec::new();
            self.host.scan(self.range.hva, mib(2), &mut runs).expect("the fake scans");
            assert!(!self.faults.is_anything_watched() && self.faults.waiting() == 0);
            assert!(self.claims.window_in_place(WINDOW).is_ok(), "no claim is left");
            runs
        }

        fn assert_is_whole(&self, is_huge: bool) {
            let whole = PageRun { start: self.range.hva, bytes: mib(2), is_huge };
            assert_eq!(self.pages(), [whole]);
        }
    }

    #[test]
    fn a_window_is_unmapped_while_it_is_collapsed() {
        let bed = Bed::new();
        let (host, range) = (bed.host.clone(), bed.range);
        let unmapped = bed.collapse.unmap(host.as_ref(), range, WINDOW).expect("it can be unmapped");
        assert!(!bed.host.has_page(range.hva, mib(2)) && bed.faults.is_anything_watched());
        assert!(bed.faults.touch(WINDOW), "a thread that touches it waits");
        let collapsed = unmapped.until(&|| host.advise(range.hva, mib(2), Advice::Collapse));
        assert!(collapsed.is_ok());
        bed.assert_is_whole(true);
        assert_eq!(bed.run(), OutcomeResult::Skipped(wideleaf_policies::Skip::AlreadyDone));
    }

    #[test]
    fn a_huge_page_is_made_ready_for_each_collapse_and_for_none_that_is_not_tried() {
        let bed = Bed::new();
        bed.host.fail_advice(Advice::Collapse, libc::EBUSY, 1);
        for ready in [1, 2, 2] {
            bed.run();
            assert_eq!(bed.host.made_ready(), ready);
        }
    }

    #[test]
    fn a_window_with_pages_that_are_being_given_back_stays_mapped() {
        let bed = Bed::new();
        let given_back = bed.claims.window_in_place(WINDOW).expect("free");
        assert!(bed.collapse.unmap(bed.host.as_ref(), bed.range, WINDOW).is_none());
        assert_eq!(bed.run(), OutcomeResult::Done);
        drop(given_back);
        bed.assert_is_whole(true);
    }

    #[test]
    fn a_window_that_the_kernel_does_not_collapse_is_mapped_again() {
        let bed = Bed::new();
        bed.host.fail_advice(Advice::Collapse, libc::EBUSY, 1);
        assert_eq!(bed.run(), OutcomeResult::Refused(Refusal::Busy));
        bed.assert_is_whole(false);
        assert_eq!(bed.run(), OutcomeResult::Done);
        bed.assert_is_whole(true);
    }

    #[test]
    fn no_thread_waits_and_every_page_is_mapped_whichever_call_fails() {
        for call in 0..3 {
            let bed = Bed::new();
            bed.faults.fail_calls(call, 1, libc::ENOMEM);
            assert_eq!(bed.run(), OutcomeResult::Done, "call {call}");
            bed.assert_is_whole(true);
        }
    }

    #[test]
    fn faults_that_cannot_wake_threads_are_closed_and_windows_are_collapsed_while_they_are_mapped() {
        let bed = Bed::new();
        // watch, unmap, unwatch.
        bed.faults.fail_calls(2, 1, libc::ENOMEM);
        bed.host.fail_advice(Advice::Collapse, libc::EBUSY, 1);
        assert_eq!(bed.run(), OutcomeResult::Refused(Refusal::Busy));
        assert_eq!(bed.pages(), [], "pages come back at the next touch");
        assert!(!bed.faults.touch(WINDOW), "which does not wait");
        assert!(bed.collapse.unmap(bed.host.as_ref(), bed.range, WINDOW).is_none());
        assert_eq!(bed.run(), OutcomeResult::Done);
        bed.assert_is_whole(true);
    }

    #[test]
    fn a_panic_during_the_collapse_wakes_every_thread() {
        let bed = Bed::new();
        let touched = std::panic::AssertUnwindSafe(|| {
            let unmapped = bed.collapse.unmap(bed.host.as_ref(), bed.range, WINDOW).expect("it can be unmapped");
            assert!(bed.faults.touch(WINDOW));
            let _ = unmapped.until(&|| panic!("as by a defect"));
        });
        assert!(std::panic::catch_unwind(touched).is_err());
        bed.assert_is_whole(false);
    }
}
