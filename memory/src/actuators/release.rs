//! Release: base pages of a window that hold only zeroes go back to the host while the guest runs, and no
//! write is lost.
//!
//! ```text
//!   look: any zero pages? ─no─▶ skipped            no waiting
//!     │ yes: a huge page is split first, which may already free them (see `split.rs`)
//!   take these aside ─▶ look again, where nothing can write them ─▶ discard those still zero ─▶ the others go back
//!   └── pinned: stays ──────────── a thread or a vCPU that touches the window waits ─────────────────────────────┘
//! ```
//!
//! Fate of a byte that is written during the release:
//!
//! - Through page tables (vCPUs, device threads, the kernel's own copying): a page that is aside is in no table of
//!   the guest. A store to it faults and waits until the window is whole again, since the window is registered for
//!   missing pages first. So no store lands in a fresh page while the old one is aside.
//! - Through a pin (a disk read straight into guest RAM, vhost, VFIO): the kernel does not move a pinned page
//!   (`UFFDIO_MOVE`, `EBUSY`). It checks for pins after it has cleared the page-table entry, from which all pins
//!   come. The page stays in place. Write protection, which this module used before, does not stop such a writer: it
//!   began before the protection.
//! - Through a reference that is no pin (`FOLL_GET` without `FOLL_PIN`, which few file systems still take for direct
//!   reads: 9p without a cache, NFS and Ceph with `O_DIRECT`): the kernel cannot tell, and such a write is lost, here
//!   as in a swap. `memory/README.md`, "pinned pages", has the table of all actuators.
//!
//! A page that was written between the two scans goes back with its contents. If the kernel cannot put it back, the
//! window is stuck ([`crate::detached`]): the guest waits for it and does not read zeroes.
//!
//! A kernel without `UFFDIO_MOVE` (before Linux 6.8) releases nothing: there is no [`Aside`].

use std::ops::Range;
use std::time::Duration;

use wideleaf_policies::{Backing, Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::actuators::split::split_window;
use crate::backing::BackingKind;
use crate::detached::{Aside, AsideError, Held, Unmoved};
use crate::host::{Host, HostError};
use crate::mover::Place;
use crate::region::RamRange;
use crate::sensors::host_backing::window_backing;

/// A release that was tried, or found unnecessary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Result of the release. `Done`: at least one page went. `Refused(Busy)`: none went, and at least one is pinned.
    pub result: OutcomeResult,
    /// CPU time of all steps; a release copies nothing.
    pub cost: Cost,
    /// Time from taking the first page aside to the end: no thread waited longer. Includes the time of a
    /// split before that.
    pub unavailable: Duration,
    /// Bytes that the host got back: pages that were discarded or went with the split, and are absent afterwards.
    pub freed: Bytes,
    /// Bytes of pages that looked zero and that the kernel did not move: a device has them pinned, or a child
    /// process shares them.
    pub unmoved: Bytes,
    /// Whether a huge page was split for it. The window then has base pages, whatever the result.
    pub was_split: bool,
    /// Bytes of guest memory that were read to find zeroes.
    pub read: Bytes,
}

/// Releases the zero pages of one window of `range`, a range of the RAM that `aside` moves. That RAM is anonymous: a
/// hugetlb page cannot be released in parts, and the pages of a memfd belong to the file.
///
/// The window must have no other userfaultfd (`Refused(Busy)`). Nothing else may discard pages of the window at the
/// same time: see [`crate::guest_freed::GivenBack`].
pub fn release_window(aside: &Aside, host: &dyn Host, range: RamRange, window: WindowIndex) -> Release {
    let began_cpu = host.thread_cpu_time();
    let mut release = Attempt { aside, host, range, window, done: Release::nothing() };
    let result = release.run().unwrap_or_else(|refused| refused);
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    Release { result, cost: Cost { cpu, ..Cost::default() }, ..release.done }
}

impl Release {
    fn nothing() -> Release {
        Release {
            result: OutcomeResult::Skipped(Skip::AlreadyDone),
            cost: Cost::default(),
            unavailable: Duration::ZERO,
            freed: Bytes::ZERO,
            unmoved: Bytes::ZERO,
            was_split: false,
            read: Bytes::ZERO,
        }
    }
}

struct Attempt<'a> {
    aside: &'a Aside,
    host: &'a dyn Host,
    range: RamRange,
    window: WindowIndex,
    done: Release,
}

impl Attempt<'_> {
    fn run(&mut self) -> Result<OutcomeResult, OutcomeResult> {
        let before = window_backing(self.host, self.range, None, self.window).map_err(refused)?;
        if before.backing == Backing::Unbacked {
            return Ok(OutcomeResult::Skipped(Skip::NotResident));
        }
        let mut candidates = self.look()?;
        if candidates.is_empty() {
            return Ok(OutcomeResult::Skipped(Skip::AlreadyDone));
        }
        if before.backing.is_large() {
            // An unmapped part of a huge page stays allocated until memory is short: split the page for good.
            let split = split_window(self.host, BackingKind::Anon, self.range, self.window);
            self.done.unavailable = split.unavailable;
            if split.result != OutcomeResult::Done {
                return Ok(split.result);
            }
            self.done.was_split = true;
            self.done.freed = split.freed;
            candidates = self.look()?;
        }
        let unmoved = if candidates.is_empty() { Unmoved::default() } else { self.release(&candidates)? };
        Ok(match (self.done.freed, unmoved.why) {
            (Bytes::ZERO, Some(why)) => refused(why),
            (Bytes::ZERO, None) => OutcomeResult::Refused(Refusal::NotObserved),
            _ => OutcomeResult::Done,
        })
    }

    /// Runs of present pages that are zero now; the guest may write them at any time.
    fn look(&mut self) -> Result<Vec<Range<u16>>, OutcomeResult> {
        self.zero_pages(Place::Guest(self.window))
    }

    fn zero_pages(&mut self, place: Place) -> Result<Vec<Range<u16>>, OutcomeResult> {
        let (runs, read) = self.aside.mover().zero_pages(place).map_err(refused)?;
        self.done.read += read;
        Ok(runs)
    }

    /// Releases those pages of `candidates` that are still zero once they are aside. Returns the pages that could
    /// not be moved.
    fn release(&mut self, candidates: &[Range<u16>]) -> Result<Unmoved, OutcomeResult> {
        let (held, unmoved) = self.aside.hold_pages(self.window, candidates).map_err(AsideError::result)?;
        self.done.unmoved = PageSize::Base4K.bytes() * u64::from(unmoved.pages);
        let discarded = self.discard_zero_pages(&held);
        let back = held.put_back().map_err(refused);
        self.done.unavailable += *back.as_ref().unwrap_or(&Duration::ZERO);
        discarded.and(back.map(|_| unmoved))
    }

    /// Releases and counts the zero pages among those that are aside.
    fn discard_zero_pages(&mut self, held: &Held<'_>) -> Result<(), OutcomeResult> {
        let place = held.place();
        for run in self.zero_pages(place)? {
            let bytes = PageSize::Base4K.bytes() * run.len() as u64;
            self.aside.mover().discard(place, run).map_err(refused)?;
            self.done.freed += bytes;
        }
        Ok(())
    }
}

fn refused(error: HostError) -> OutcomeResult {
    (&error).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Advice;
    use crate::mover::ALL_PAGES;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_mover::{FakeMover, Touch};
    use std::sync::Arc;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange, Hva};

    const WINDOW: WindowIndex = WindowIndex::new(1);
    /// Every fourth page is in use.
    const ZERO_PAGES: u64 = 384;
    const IN_USE: usize = 4;

    /// A window with every fourth page in use, and zeroes in the others.
    struct Guest {
        host: Arc<FakeHost>,
        mover: Arc<FakeMover>,
        aside: Aside,
    }

    impl Guest {
        fn new(is_huge: bool) -> Guest {
            let (host, mover) = (Arc::<FakeHost>::default(), Arc::<FakeMover>::default());
            mover.write_zeroes(WINDOW, ALL_PAGES);
            ALL_PAGES.step_by(IN_USE).for_each(|page| mover.write(WINDOW, page..page + 1));
            host.make_present(Guest::range().hva + mib(2), mib(2), is_huge);
            let aside = Aside::new(host.clone(), mover.clone(), Arc::default());
            Guest { host, mover, aside }
        }

        fn range() -> RamRange {
            RamRange { gpa: GpaRange::new(Gpa::new(0), mib(4)).expect("fits"), hva: Hva::new(1 << 40) }
        }

        fn release(&self) -> Release {
            release_window(&self.aside, self.host.as_ref(), Guest::range(), WINDOW)
        }

        fn assert_nothing_is_lost_and_no_thread_waits(&self, when: &str) {
            self.mover.fail_all(None);
            self.aside.serve().expect("nothing fails any more");
            assert!(self.mover.is_intact(), "{when}");
            assert!(!self.mover.is_anything_watched() && self.mover.pages_aside() == 0, "{when}");
            assert_eq!(self.mover.waiting(), 0, "{when}");
        }
    }

    fn busy() -> OutcomeResult {
        OutcomeResult::Refused(Refusal::Busy)
    }

    #[test]
    fn the_zero_pages_of_a_window_go_and_the_others_stay() {
        for is_huge in [false, true] {
            let guest = Guest::new(is_huge);
            let release = guest.release();
            assert_eq!(release.result, OutcomeResult::Done);
            assert_eq!((release.freed, release.was_split), (kib(4) * ZERO_PAGES, is_huge));
            assert_eq!(release.unmoved, Bytes::ZERO);
            assert!(release.read >= kib(8) * ZERO_PAGES, "each zero page is read twice");
            guest.assert_nothing_is_lost_and_no_thread_waits("released");
            let again = guest.release();
            assert_eq!((again.result, again.freed), (OutcomeResult::Skipped(Skip::AlreadyDone), Bytes::ZERO));
        }
    }

    #[test]
    fn ram_that_is_absent_is_left_alone() {
        let guest = Guest::new(false);
        guest.host.make_absent(Guest::range().hva + mib(2), mib(2));
        assert_eq!(guest.release().result, OutcomeResult::Skipped(Skip::NotResident));
        assert_eq!(guest.mover.calls(), 0, "the kernel is not asked");
    }

    #[test]
    fn a_huge_page_that_does_not_split_is_not_released() {
        let guest = Guest::new(true);
        guest.host.fail_advice(Advice::Cold, libc::EBUSY, 1);
        let release = guest.release();
        assert_eq!((release.result, release.freed, release.was_split), (busy(), Bytes::ZERO, false));
    }

    #[test]
    fn a_pinned_page_stays_and_the_others_go() {
        // page  0     1     2       3     4
        //      used  zero  pinned  zero  used
        let guest = Guest::new(false);
        guest.mover.pin(Place::Guest(WINDOW), 2);
        let release = guest.release();
        assert_eq!(release.result, OutcomeResult::Done);
        assert_eq!((release.freed, release.unmoved), (kib(4) * (ZERO_PAGES - 1), kib(4)));
        assert!(guest.mover.is_there(WINDOW, 2), "the transfer ends in the page that the guest has");
        guest.assert_nothing_is_lost_and_no_thread_waits("released");
    }

    #[test]
    fn a_window_with_all_its_zero_pages_pinned_is_busy() {
        let guest = Guest::new(false);
        ALL_PAGES.for_each(|page| guest.mover.pin(Place::Guest(WINDOW), page));
        let release = guest.release();
        assert_eq!((release.result, release.freed), (busy(), Bytes::ZERO));
        assert_eq!(release.unmoved, kib(4) * ZERO_PAGES);
        guest.assert_nothing_is_lost_and_no_thread_waits("refused");
    }

    #[test]
    fn a_page_that_is_written_between_the_looks_goes_back_with_its_contents() {
        let guest = Guest::new(false);
        let mover = guest.mover.clone();
        guest.mover.after_looking_for_zeroes(move || mover.write(WINDOW, 1..4));
        let release = guest.release();
        assert_eq!((release.result, release.freed), (OutcomeResult::Done, kib(4) * (ZERO_PAGES - 3)));
        assert!((1..4).all(|page| guest.mover.is_there(WINDOW, page)));
        guest.assert_nothing_is_lost_and_no_thread_waits("released");
    }

    #[test]
    fn a_write_to_a_page_that_is_aside_waits_until_the_window_is_whole() {
        let guest = Guest::new(false);
        let held = guest.aside.hold_pages(WINDOW, std::slice::from_ref(&(1..4))).expect("nothing fails").0;
        assert_eq!(guest.mover.touch(WINDOW, 2), Touch::Waits, "no fresh page takes the write");
        assert_eq!(guest.mover.touch(WINDOW, 4), Touch::Wrote, "a page that is not aside is the guest's");
        held.put_back().expect("nothing fails");
        assert_eq!(guest.mover.touch(WINDOW, 2), Touch::Wrote);
        guest.assert_nothing_is_lost_and_no_thread_waits("put back");
    }

    #[test]
    fn each_call_that_fails_loses_nothing_and_what_went_is_counted() {
        let calls = {
            let guest = Guest::new(false);
            guest.release();
            guest.mover.calls()
        };
        assert!(calls > 2 * 128, "128 runs are moved and discarded: {calls} calls");
        for errno in [libc::EBUSY, libc::ENOMEM] {
            for call in 0..calls {
                let guest = Guest::new(false);
                guest.mover.fail_call(call, errno);
                let release = guest.release();
                // A page that is not moved is left, and the others go.
                let is_done =
                    release.result == OutcomeResult::Done && release.freed + release.unmoved == kib(4) * ZERO_PAGES;
                let is_refused = matches!(release.result, OutcomeResult::Refused(_));
                assert!(is_done || is_refused, "call {call}: {release:?}");
                guest.assert_nothing_is_lost_and_no_thread_waits(&format!("call {call}, errno {errno}"));
                let gone = kib(4) * (512 - guest.mover.pages_of(WINDOW) as u64);
                assert_eq!(release.freed, gone, "call {call}, errno {errno}");
            }
        }
    }

    #[test]
    fn a_window_that_does_not_go_back_keeps_its_writers_waiting_until_it_does() {
        let guest = Guest::new(false);
        let mover = guest.mover.clone();
        // Written between the looks, so that pages have to go back; which fails from then on.
        guest.mover.after_looking_for_zeroes(move || mover.write(WINDOW, 1..4));
        let held = guest.aside.hold_pages(WINDOW, std::slice::from_ref(&(1..4))).expect("nothing fails yet").0;
        guest.mover.fail_all(Some(libc::ENOMEM));
        held.put_back().expect_err("nothing moves");
        assert_eq!(guest.mover.touch(WINDOW, 2), Touch::Waits);
        assert!(guest.aside.is_aside(WINDOW), "it is stuck, and tried again");
        guest.assert_nothing_is_lost_and_no_thread_waits("tried again");
    }

    #[test]
    fn each_scan_that_fails_is_a_refusal_and_loses_nothing() {
        let guest = Guest::new(false);
        guest.host.fail_call(0, libc::EBUSY);
        assert_eq!(guest.release().result, busy());
        guest.assert_nothing_is_lost_and_no_thread_waits("refused");
    }
}
