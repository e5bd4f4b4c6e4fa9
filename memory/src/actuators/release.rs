//! Release: base pages of a window that hold only zeroes go back to the host, while the guest runs and without losing a
//! write.
//!
//! ```text
//!   look: any zero pages? ─no─▶ skipped            nobody waits
//!     │ yes: a huge page is split first, which may already free them (see `split.rs`)
//!   protect ─▶ look again at these ─▶ discard those still zero ─▶ un-protect
//!   └────────────────────── a writer waits ───────────────────┘ then writes, into a fresh zero page if need be
//! ```
//!
//! Between the second look and the discard no store can come: the pages are write-protected through userfaultfd, also
//! for a vCPU, whose mapping KVM drops with the protection. A write that KVM or the kernel makes through a page it has
//! pinned would not be seen; nothing in wideleaf pins guest memory. A device of this process that reads a file into a protected page waits
//! in its system call as a vCPU does.

use std::io;
use std::time::Duration;

use wideleaf_policies::{
    Backing, Bytes, Cost, Gpa, GpaRange, Hva, OutcomeResult, PageSize, Refusal, Skip, WindowIndex,
};

use crate::actuators::split::split_window;
use crate::backing::BackingKind;
use crate::host::{Host, HostError};
use crate::region::{GuestRam, RamRange};
use crate::sensors::host_backing::window_backing;
use crate::sensors::zero_pages::{window_zero_pages, zero_pages_of};
use crate::sys::write_protect::Protection;

/// A release that was tried, or found needless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// What came of it. `Done`: at least one page went.
    pub result: OutcomeResult,
    /// CPU time of everything; nothing is copied.
    pub cost: Cost,
    /// Time from the protection to its end: no writer had to wait longer. A huge page was split before that, which
    /// takes its own time and is in here too.
    pub unavailable: Duration,
    /// Memory the host has back: pages that were discarded, or went with the split, and are not present afterwards.
    pub freed: Bytes,
    /// Whether a huge page was split for it. The window has base pages now, whatever the result.
    pub was_split: bool,
    /// Bytes of guest memory read in search of zeroes.
    pub read: Bytes,
}

/// Releases the zero pages of one window of `range`, which is a range of `ram`.
///
/// Only anonymous RAM: a hugetlb page is one, and pages of a memfd can be written through other mappings, which the
/// protection of this one does not stop.
///
/// Whoever else has a userfaultfd on the window must let go first (`Refused(Busy)`). Nobody else may discard pages of the
/// window meanwhile: a page that is not there when the window is protected could be filled without waiting. The
/// manager's thread is the only one that discards.
pub fn release_window(host: &dyn Host, ram: &GuestRam, range: RamRange, window: WindowIndex) -> Release {
    release_through(&LinuxDoor { ram }, host, ram, range, window)
}

fn release_through(door: &dyn Door, host: &dyn Host, ram: &GuestRam, range: RamRange, window: WindowIndex) -> Release {
    let began_cpu = host.thread_cpu_time();
    let mut release = Attempt { door, host, ram, range, window, done: Release::nothing() };
    let result = match ram.backing().kind() {
        BackingKind::Hugetlb | BackingKind::Memfd => OutcomeResult::Skipped(Skip::NoMechanism),
        BackingKind::Anon => release.run(),
    };
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
            was_split: false,
            read: Bytes::ZERO,
        }
    }
}

/// What a release asks of the kernel beyond [`Host`].
trait Door {
    /// Makes present pages of a window protectable. Dropping the result ends all protection.
    fn register(&self, start: Hva) -> io::Result<Box<dyn WindowProtection + '_>>;

    /// Gives back pages that are zero and protected.
    fn discard(&self, pages: GpaRange) -> io::Result<()>;
}

trait WindowProtection {
    fn set(&self, is_protected: bool) -> io::Result<()>;
}

impl WindowProtection for Protection {
    fn set(&self, is_protected: bool) -> io::Result<()> {
        Protection::set(self, is_protected)
    }
}

struct LinuxDoor<'a> {
    ram: &'a GuestRam,
}

impl Door for LinuxDoor<'_> {
    fn register(&self, start: Hva) -> io::Result<Box<dyn WindowProtection + '_>> {
        Ok(Box::new(Protection::register(start, PageSize::Huge2M.bytes())?))
    }

    fn discard(&self, pages: GpaRange) -> io::Result<()> {
        self.ram.discard_pages(pages)
    }
}

struct Attempt<'a> {
    door: &'a dyn Door,
    host: &'a dyn Host,
    ram: &'a GuestRam,
    range: RamRange,
    window: WindowIndex,
    done: Release,
}

impl Attempt<'_> {
    fn run(&mut self) -> OutcomeResult {
        self.try_run().unwrap_or_else(|error| (&error).into())
    }

    fn try_run(&mut self) -> Result<OutcomeResult, HostError> {
        let before = window_backing(self.host, self.range, None, self.window)?;
        if before.backing == Backing::Unbacked {
            return Ok(OutcomeResult::Skipped(Skip::NotResident));
        }
        let mut candidates = self.look()?;
        if candidates.is_empty() {
            return Ok(OutcomeResult::Skipped(Skip::AlreadyDone));
        }
        if before.backing.is_large() {
            // A part of a huge page that is unmapped stays allocated until memory is short: split it for good.
            let split = split_window(self.host, BackingKind::Anon, self.range, self.window);
            self.done.unavailable = split.unavailable;
            if split.result != OutcomeResult::Done {
                return Ok(split.result);
            }
            self.done.was_split = true;
            self.done.freed = split.freed;
            candidates = self.look()?;
        }
        if !candidates.is_empty() {
            self.release(&candidates)?;
        }
        Ok(match self.done.freed {
            Bytes::ZERO => OutcomeResult::Refused(Refusal::NotObserved),
            _ => OutcomeResult::Done,
        })
    }

    /// Present pages that are zero now, and may be written at any time.
    fn look(&mut self) -> Result<Vec<GpaRange>, HostError> {
        let found = window_zero_pages(self.host, self.ram, self.range, self.window)?;
        self.done.read += found.read;
        Ok(found.runs)
    }

    /// Releases those pages of `candidates` that are still zero under protection.
    fn release(&mut self, candidates: &[GpaRange]) -> Result<(), HostError> {
        let protection = self.door.register(self.hva(self.window.start())).map_err(refused("userfaultfd"))?;
        let began = self.host.now();
        let discarded = self.discard_zero_pages(&*protection, candidates);
        let unprotected = protection.set(false);
        drop(protection); // whoever still waits, because un-protecting failed, is woken by this
        self.done.unavailable += self.host.now().since(began);
        discarded.and(unprotected.map_err(refused("UFFDIO_WRITEPROTECT")))
    }

    /// Protects the window, gives back what is zero, and counts what is absent then.
    fn discard_zero_pages(
        &mut self,
        protection: &dyn WindowProtection,
        candidates: &[GpaRange],
    ) -> Result<(), HostError> {
        protection.set(true).map_err(refused("UFFDIO_WRITEPROTECT"))?;
        let zero = zero_pages_of(self.ram, self.range, candidates.iter().copied());
        self.done.read += zero.read;
        for run in &zero.runs {
            self.door.discard(*run).map_err(refused("madvise(MADV_DONTNEED)"))?;
            self.done.freed += self.absent(*run)?;
        }
        Ok(())
    }

    /// How much of a run is not present.
    fn absent(&self, run: GpaRange) -> Result<Bytes, HostError> {
        let mut present = Vec::new();
        self.host.scan(self.hva(run.start()), run.bytes(), &mut present)?;
        Ok(run.bytes().saturating_sub(present.iter().map(|page| page.bytes).sum()))
    }

    fn hva(&self, gpa: Gpa) -> Hva {
        self.range.hva + (gpa - self.range.gpa.start())
    }
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| HostError { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackingConfig;
    use crate::fake_calls::FakeCalls;
    use crate::host::Advice;
    use crate::host::fake::FakeHost;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, Mutex};
    use wideleaf_policies::units::{kib, mib};

    const WINDOW: WindowIndex = WindowIndex::new(1);
    const WORDS_PER_PAGE: usize = 512;
    /// Every fourth page is in use.
    const ZERO_PAGES: u64 = 384;

    /// Real memory under a fake kernel: discarded pages are zeroed and leave the fake host, protection is counted.
    struct FakeDoor {
        ram: Arc<GuestRam>,
        host: FakeHost,
        calls: Mutex<FakeCalls>,
        protections: Mutex<i32>,
    }

    struct FakeProtection<'a>(&'a FakeDoor);

    impl FakeDoor {
        fn new(kind: BackingKind, is_huge: bool) -> FakeDoor {
            let backing = BackingConfig::new(kind, PageSize::Base4K).expect("exists");
            let layout = GpaRange::new(Gpa::new(0), mib(4)).expect("fits");
            let ram = GuestRam::map(&[layout], backing).expect("four mebibytes");
            for page in (512..1024).step_by(4) {
                ram.words(ram.ranges()[0])[page * WORDS_PER_PAGE].store(page as u64, Ordering::Relaxed);
            }
            let host = FakeHost::default();
            host.make_present(ram.base() + mib(2), mib(2), is_huge);
            FakeDoor { ram, host, calls: Mutex::default(), protections: Mutex::new(0) }
        }

        fn enter(&self) -> io::Result<()> {
            self.calls.lock().expect("no test panics in a call").enter()
        }

        fn release(&self) -> Release {
            release_through(self, &self.host, &self.ram, self.ram.ranges()[0], WINDOW)
        }

        fn assert_nothing_is_lost_and_nobody_waits(&self) {
            for page in (512..1024).step_by(4) {
                let word = self.ram.words(self.ram.ranges()[0])[page * WORDS_PER_PAGE].load(Ordering::Relaxed);
                assert_eq!(word, page as u64);
            }
            assert_eq!(*self.protections.lock().expect("no test panics in a call"), 0);
        }
    }

    impl Door for FakeDoor {
        fn register(&self, _: Hva) -> io::Result<Box<dyn WindowProtection + '_>> {
            self.enter()?;
            *self.protections.lock().expect("no test panics in a call") += 1;
            Ok(Box::new(FakeProtection(self)))
        }

        fn discard(&self, pages: GpaRange) -> io::Result<()> {
            self.enter()?;
            self.host.make_absent(self.ram.base() + (pages.start() - Gpa::new(0)), pages.bytes());
            self.ram.discard_pages(pages)
        }
    }

    impl WindowProtection for FakeProtection<'_> {
        fn set(&self, _: bool) -> io::Result<()> {
            self.0.enter()
        }
    }

    impl Drop for FakeProtection<'_> {
        fn drop(&mut self) {
            *self.0.protections.lock().expect("no test panics in a call") -= 1;
        }
    }

    #[test]
    fn the_zero_pages_of_a_window_go_and_the_others_stay() {
        for is_huge in [false, true] {
            let door = FakeDoor::new(BackingKind::Anon, is_huge);
            let release = door.release();
            assert_eq!(release.result, OutcomeResult::Done);
            assert_eq!((release.freed, release.was_split), (kib(4) * ZERO_PAGES, is_huge));
            assert!(release.read > kib(8) * ZERO_PAGES, "each zero page is read twice");
            door.assert_nothing_is_lost_and_nobody_waits();
            let again = door.release();
            assert_eq!((again.result, again.freed), (OutcomeResult::Skipped(Skip::AlreadyDone), Bytes::ZERO));
        }
    }

    #[test]
    fn ram_that_is_absent_or_has_no_such_mechanism_is_left_alone() {
        let door = FakeDoor::new(BackingKind::Anon, false);
        door.host.make_absent(door.ram.base() + mib(2), mib(2));
        assert_eq!(door.release().result, OutcomeResult::Skipped(Skip::NotResident));
        let door = FakeDoor::new(BackingKind::Memfd, false);
        assert_eq!(door.release().result, OutcomeResult::Skipped(Skip::NoMechanism));
    }

    #[test]
    fn a_huge_page_that_does_not_split_is_not_released() {
        let door = FakeDoor::new(BackingKind::Anon, true);
        door.host.fail_advice(Advice::Cold, libc::EBUSY, 1);
        let release = door.release();
        assert_eq!(release.result, OutcomeResult::Refused(Refusal::Busy));
        assert_eq!((release.freed, release.was_split), (Bytes::ZERO, false));
    }

    #[test]
    fn each_call_of_the_door_that_fails_is_a_refusal_and_loses_nothing() {
        // register, protect, 128 discards, un-protect
        for call in [0, 1, 2, 66, 129, 130] {
            let door = FakeDoor::new(BackingKind::Anon, false);
            door.calls.lock().expect("no test panics in a call").fail(call, libc::EBUSY);
            let release = door.release();
            assert_eq!(release.result, OutcomeResult::Refused(Refusal::Busy), "call {call}");
            let runs_discarded = call.saturating_sub(2).min(128);
            assert_eq!(release.freed, kib(12) * runs_discarded, "call {call}: what went is counted");
            door.assert_nothing_is_lost_and_nobody_waits();
        }
    }

    #[test]
    fn each_scan_that_fails_is_a_refusal_and_loses_nothing() {
        // look, look for present pages, then one after each of 128 discards
        for call in [0, 1, 2, 129] {
            let door = FakeDoor::new(BackingKind::Anon, false);
            door.host.fail_call(call, libc::EBUSY);
            assert_eq!(door.release().result, OutcomeResult::Refused(Refusal::Busy), "call {call}");
            door.assert_nothing_is_lost_and_nobody_waits();
        }
    }
}
