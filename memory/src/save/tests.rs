//! The saver on a fake host and a fake second level, with real memory for RAM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Gpa, GpaRange};

use super::*;
use crate::testing::fake_host::FakeHost;
use crate::testing::fake_second_level::FakeSecondLevel;
use crate::{BackingConfig, BackingKind};

/// Four windows, two memslots of two windows each.
struct Guest {
    ram: Arc<GuestRam>,
    host: FakeHost,
    second_level: FakeSecondLevel,
}

/// A sink that keeps what it gets, and does something at each call.
#[derive(Default)]
struct Kept<'a> {
    /// First byte of each stored page, by window and page.
    pages: Mutex<BTreeMap<(u64, u16), u8>>,
    calls: AtomicU64,
    at_call: Option<&'a (dyn Fn(u64) -> io::Result<()> + Sync)>,
}

impl SaveSink for Kept<'_> {
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        assert_eq!(data.len(), 2 << 20);
        for page in pages.iter() {
            self.pages.lock().insert((window.get(), page), data[usize::from(page) * 4096]);
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        self.at_call.map_or(Ok(()), |at_call| at_call(call))
    }
}

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa::new(0) + mib(start), mib(bytes)).expect("fits")
}

fn page(number: u64) -> Gpa {
    Gpa::new(0) + kib(4) * number
}

/// Limits with one thread: the fakes count calls.
fn limits() -> SaveLimits {
    SaveLimits { threads: NonZeroUsize::MIN, ..SaveLimits::default() }
}

impl Guest {
    fn new() -> Guest {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("exists");
        let ram = GuestRam::map(&[range(0, 8)], backing).expect("eight mebibytes");
        Guest { ram, host: FakeHost::default(), second_level: FakeSecondLevel::new(&[range(0, 4), range(4, 4)]) }
    }

    /// The guest writes a byte at the start of a page.
    fn write(&self, number: u64, byte: u8) {
        self.host.make_present(self.ram.base() + kib(4) * number, kib(4), false);
        self.ram.words(self.ram.ranges()[0])[number as usize * 512].store(byte.into(), Ordering::Relaxed);
        self.second_level.write(page(number));
    }

    fn saver<'a>(&'a self, sink: &'a dyn SaveSink) -> Saver<'a> {
        Saver { ram: &self.ram, host: &self.host, second_level: &self.second_level, sink }
    }

    fn save(&self, sink: &dyn SaveSink, limits: &SaveLimits) -> Result<SaveReport, SaveError> {
        self.save_with(sink, limits, &AtomicBool::new(false))
    }

    fn save_with(
        &self,
        sink: &dyn SaveSink,
        limits: &SaveLimits,
        cancel: &AtomicBool,
    ) -> Result<SaveReport, SaveError> {
        let saved = self.saver(sink).save(limits, cancel, &|_| (), |last| {
            self.second_level.pause()?;
            let written = last.write(Duration::ZERO);
            self.second_level.resume()?;
            written
        });
        saved.map(|((), report)| report)
    }

    fn logged(&self) -> Vec<u32> {
        self.second_level.slots().iter().filter(|slot| slot.is_dirty_logged).map(|slot| slot.id.0).collect()
    }

    /// Nothing of a save is left: logs, claims, notes.
    fn is_as_before(&self) -> bool {
        let notes_were_off = self.ram.given_back().book().begin_notes();
        self.ram.given_back().book().end_notes();
        self.logged().is_empty() && self.ram.claims().parts_in_work() == 0 && notes_were_off
    }
}

fn kept(pages: &[((u64, u16), u8)]) -> BTreeMap<(u64, u16), u8> {
    pages.iter().copied().collect()
}

#[test]
fn only_pages_in_use_are_read_and_swapped_ones_are_among_them() {
    let guest = Guest::new();
    guest.write(0, 1);
    guest.write(1023, 2);
    guest.write(600, 3);
    guest.host.swap_out(guest.ram.base() + kib(4) * 1500, kib(8));
    let sink = Kept::default();
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    let expected = [((0, 0), 1), ((1, 88), 3), ((1, 511), 2), ((2, 476), 0), ((2, 477), 0)];
    assert_eq!(*sink.pages.lock(), kept(&expected));
    assert_eq!((report.rounds.len(), report.rounds[0].pages, report.rounds[0].windows), (1, 5, 3));
    assert_eq!((report.last.pages, report.is_bound_met, report.read()), (0, true, kib(20)));
    assert!(guest.is_as_before());
}

#[test]
fn a_page_that_is_written_during_the_save_is_saved_again() {
    let guest = Guest::new();
    (0..4).for_each(|window| guest.write(window * 512, 1));
    // Calls 0 to 3 are the first round. What is written in it is left for the pause.
    let at_call = |call| {
        if call == 2 {
            guest.write(0, 2); // a window that was saved
            guest.write(3 * 512, 3); // a window that comes
            guest.write(700, 4); // a page that was not in use
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    let expected = [((0, 0), 2), ((1, 0), 1), ((1, 188), 4), ((2, 0), 1), ((3, 0), 3)];
    assert_eq!(*sink.pages.lock(), kept(&expected));
    assert_eq!((report.rounds.len(), report.last.pages), (1, 3));
}

#[test]
fn a_page_that_is_given_back_during_the_save_becomes_zero() {
    let guest = Guest::new();
    guest.write(0, 1);
    guest.write(1, 2);
    let at_call = |call| {
        if call == 0 {
            // As `actuators::give_back` does: noted, then released. One page is in use again at once.
            let pages = PageSet::from_iter([0, 1]);
            guest.ram.given_back().book().note_release(WindowIndex::new(0), pages);
            guest.host.make_absent(guest.ram.base(), kib(4));
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    assert_eq!(*sink.pages.lock(), kept(&[((0, 0), 0), ((0, 1), 2)]));
    assert_eq!(report.last.pages, 2);
    assert!(guest.is_as_before());
}

#[test]
fn windows_on_huge_pages_are_in_the_report() {
    let guest = Guest::new();
    guest.host.make_present(guest.ram.base() + mib(2), mib(2), true);
    guest.write(0, 1);
    let sink = Kept::default();
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    assert_eq!(report.page_sizes, [(WindowIndex::new(1), PageSize::Huge2M)].into());
}

#[test]
fn after_any_failed_call_nothing_of_the_save_is_left() {
    // Second level: on, on, log, log, pause, log, log, resume. Switching off is tried twice.
    for call in 0..8 {
        let guest = Guest::new();
        guest.write(0, 1);
        guest.second_level.fail_call(call, libc::EIO);
        let error = guest.save(&Kept::default(), &limits()).expect_err("a call fails");
        assert!(error.to_string().contains("fake"), "call {call}: {error}");
        assert!(guest.is_as_before(), "call {call}");
        guest.save(&Kept::default(), &limits()).expect("nothing fails any more");
    }
    // Host: the scan of pages in use, the scan of page sizes.
    for call in 0..2 {
        let guest = Guest::new();
        guest.host.fail_call(call, libc::ENOMEM);
        assert!(matches!(guest.save(&Kept::default(), &limits()), Err(SaveError::Host(_))));
        assert!(guest.is_as_before(), "call {call}");
    }
}

#[test]
fn a_log_that_cannot_be_switched_off_is_tried_again() {
    let guest = Guest::new();
    guest.second_level.fail_call(8, libc::EIO);
    let report = guest.save(&Kept::default(), &limits()).expect("the save is done");
    assert_eq!((report.logs_left_on, guest.logged()), (0, vec![]));
}

#[test]
fn a_sink_that_fails_ends_the_save_with_its_reason_in_the_round_and_in_the_pause() {
    for failing in [0, 1, 4] {
        let guest = Guest::new();
        (0..4).for_each(|window| guest.write(window * 512, 1));
        let at_call = |call| {
            guest.write(512, 2);
            if call == failing { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        };
        let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
        let error = guest.save(&sink, &limits()).expect_err("the sink fails");
        let SaveError::Sink { window, source } = &error else { panic!("{error}") };
        // Call 4 is the only one in the pause.
        assert_eq!((window.get(), source.kind()), (failing % 3, io::ErrorKind::StorageFull));
        assert!(guest.is_as_before());
    }
}

#[test]
fn a_cancelled_save_ends_before_the_next_window() {
    let guest = Guest::new();
    (0..4).for_each(|window| guest.write(window * 512, 1));
    let cancel = AtomicBool::new(false);
    let at_call = |call| {
        cancel.store(call == 1, Ordering::Relaxed);
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    assert!(matches!(guest.save_with(&sink, &limits(), &cancel), Err(SaveError::Cancelled)));
    assert_eq!(sink.calls.load(Ordering::Relaxed), 2);
    assert!(guest.is_as_before());
}

#[test]
fn a_guest_that_writes_faster_than_the_sink_is_not_paused_for_longer_unless_allowed() {
    let run = |beyond| {
        let guest = Guest::new();
        (0..2048).for_each(|page| guest.write(page, 1));
        // The guest writes all pages of a window while the sink writes it, 100 ms for each.
        let at_call = |call: u64| {
            guest.host.sleep(Duration::from_millis(100));
            (0..512).for_each(|page| guest.write(call % 4 * 512 + page, call as u8));
            Ok(())
        };
        let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
        let done = guest.save(&sink, &SaveLimits { beyond, ..limits() });
        assert!(guest.is_as_before());
        done
    };
    let error = run(BeyondBound::Refuse).expect_err("the bound cannot be met");
    let SaveError::PauseTooLong { rounds, pages, needed, .. } = error else { panic!("{error}") };
    assert_eq!((rounds, pages), (4, 2048));
    assert!(needed > Duration::from_millis(400), "{needed:?}");
    let report = run(BeyondBound::PauseLonger).expect("it is allowed");
    assert_eq!((report.rounds.len(), report.last.pages, report.is_bound_met), (4, 2048, false));
    assert_eq!(report.pause, Duration::from_millis(400));
}

#[test]
fn a_pause_before_which_the_guest_wrote_too_much_is_broken_off() {
    // The sink takes 11 ms for a window. While it is being stopped, the guest writes 1024 more.
    let run = |bad_pauses: u32, beyond| {
        let guest = Guest::new();
        (0..1024).for_each(|page| guest.write(page, 1));
        let at_call = |_| {
            guest.host.sleep(Duration::from_millis(11));
            Ok(())
        };
        let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
        let (mut pauses, limits) = (0, SaveLimits { beyond, ..limits() });
        let saved = guest.saver(&sink).save(&limits, &AtomicBool::new(false), &|_| (), |last| {
            pauses += 1;
            if pauses <= bad_pauses {
                (0..1024).for_each(|page| guest.write(page, 1 + pauses as u8));
            }
            last.write(Duration::ZERO)
        });
        assert!(guest.is_as_before());
        (pauses, saved.map(|((), report)| (report, sink.pages.into_inner())))
    };
    let (pauses, saved) = run(2, BeyondBound::Refuse);
    let (report, pages) = saved.expect("the third pause is calm");
    assert_eq!((pauses, report.broken_off, report.rounds.len(), report.is_bound_met), (3, 2, 3, true));
    assert!(pages.len() == 1024 && pages.values().all(|byte| *byte == 3), "the last bytes are saved");
    let (pauses, saved) = run(9, BeyondBound::Refuse);
    assert!(matches!(saved, Err(SaveError::PauseTooLong { .. })) && pauses == 3);
    let (pauses, saved) = run(9, BeyondBound::PauseLonger);
    let (report, _) = saved.expect("it may take longer");
    assert_eq!((pauses, report.broken_off, report.last.pages, report.is_bound_met), (4, 3, 1024, false));
}

#[test]
fn a_pause_that_is_put_off_comes_after_another_round_with_what_was_written_meanwhile() {
    let guest = Guest::new();
    guest.write(0, 1);
    let (sink, mut calls) = (Kept::default(), 0);
    let saved = guest.saver(&sink).save(&limits(), &AtomicBool::new(false), &|_| (), |last| {
        calls += 1;
        if calls == 1 {
            // As the guest writes during a flush of its disk.
            guest.write(0, 2);
            return Err(last.put_off());
        }
        guest.write(1, 3);
        last.write(Duration::ZERO)
    });
    let ((), report) = saved.expect("nothing fails");
    assert_eq!((calls, report.rounds.len(), report.rounds[1].pages, report.last.pages), (2, 2, 0, 2));
    assert_eq!((report.broken_off, report.is_bound_met), (0, true));
    assert_eq!(*sink.pages.lock(), kept(&[((0, 0), 2), ((0, 1), 3)]));
    assert!(guest.is_as_before());
}

#[test]
fn what_kvm_did_for_the_guest_is_counted_from_before_the_logs_until_the_pause_that_holds() {
    let guest = Guest::new();
    let counted = |faults, ms| {
        let system_time = Duration::from_millis(ms);
        let counters = FaultCounters { faults, exits: 2 * faults, system_time, ..FaultCounters::default() };
        guest.second_level.set_fault_counters(counters);
    };
    let at_call = |_| {
        guest.host.sleep(Duration::from_millis(40));
        counted(1500, 31);
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let save = || {
        let mut calls = 0;
        let saved = guest.saver(&sink).save(&limits(), &AtomicBool::new(false), &|_| (), |last| {
            calls += 1;
            if calls == 1 {
                counted(1700, 36);
                return Err(last.put_off());
            }
            // In the pause.
            counted(9000, 99);
            last.write(Duration::ZERO)
        });
        saved.expect("nothing fails").1.before_pause
    };
    guest.write(0, 1);
    assert_eq!(save(), None, "this KVM does not count them until it is asked for");
    counted(1000, 11);
    let system_time = Duration::from_millis(25);
    let counters = FaultCounters { faults: 700, exits: 1400, system_time, ..FaultCounters::default() };
    assert_eq!(save(), Some(BeforePause { time: Duration::from_millis(40), counters }));
    counted(2000, 50);
    assert_eq!(save(), None, "a vCPU has ended");
}

#[test]
fn a_machine_of_which_the_state_takes_longer_than_the_pause_is_paused_three_times_and_refused() {
    let run = |slow_pauses: u32, takes_no_state: bool| {
        let guest = Guest::new();
        guest.write(0, 1);
        let (sink, mut pauses) = (Kept::default(), 0);
        let saved = guest.saver(&sink).save(&limits(), &AtomicBool::new(false), &|_| (), |last| {
            pauses += 1;
            let lasted = Duration::from_millis(if pauses <= slow_pauses { 30 } else { 7 });
            if takes_no_state && pauses <= slow_pauses { Err(last.break_off(lasted)) } else { last.write(lasted) }
        });
        assert!(guest.is_as_before());
        (pauses, saved.map(|((), report)| report))
    };
    for takes_no_state in [false, true] {
        let (pauses, saved) = run(2, takes_no_state);
        let report = saved.expect("the third pause is short");
        assert_eq!((pauses, report.broken_off, report.pause), (3, 2, Duration::from_millis(7)));
        let (pauses, saved) = run(9, takes_no_state);
        let Err(SaveError::StateTooLong { took, .. }) = saved else { panic!("{saved:?}") };
        assert_eq!((pauses, took), (3, Duration::from_millis(30)));
    }
}

#[test]
fn the_limit_of_bytes_per_second_holds_while_the_guest_runs() {
    let guest = Guest::new();
    (0..2048).for_each(|page| guest.write(page, 1));
    let limits = SaveLimits { bytes_per_second: NonZeroU64::new(16 << 20), ..limits() };
    let report = guest.save(&Kept::default(), &limits).expect("nothing fails");
    assert_eq!(report.rounds[0].duration, Duration::from_millis(500), "8 MiB at 16 MiB/s");
}

#[test]
fn a_save_is_cancelled_also_while_it_waits_for_its_limit() {
    let guest = Guest::new();
    (0..1024).for_each(|page| guest.write(page, 1));
    // A window takes 32 s.
    let limits = SaveLimits { bytes_per_second: NonZeroU64::new(64 << 10), ..limits() };
    let (cancel, reports) = (AtomicBool::new(false), AtomicU64::new(0));
    let progress = |_| {
        if reports.fetch_add(1, Ordering::Relaxed) == 1 {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let saved = guest.saver(&Kept::default()).save(&limits, &cancel, &progress, |last| last.write(Duration::ZERO));
    assert!(matches!(saved, Err(SaveError::Cancelled)), "{saved:?}");
    assert_eq!(guest.host.now().since_start(), round::NAP_MAX, "by the host's clock");
}

#[test]
fn progress_counts_the_pages_of_each_round() {
    let guest = Guest::new();
    guest.write(0, 1);
    guest.write(512, 1);
    guest.write(513, 1);
    let seen = Mutex::new(Vec::new());
    let at_call = |call| {
        if call == 1 {
            guest.write(2000, 1);
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let progress = |progress: SaveProgress| seen.lock().push((progress.round, progress.done, progress.of));
    let cancel = AtomicBool::new(false);
    guest.saver(&sink).save(&limits(), &cancel, &progress, |last| last.write(Duration::ZERO)).expect("nothing fails");
    assert_eq!(*seen.lock(), [(1, 1, 3), (1, 3, 3), (2, 1, 1)]);
}

#[test]
fn logs_of_the_manager_are_borrowed_and_all_other_logs_refused() {
    let guest = Guest::new();
    let [held, other] =
        guest.second_level.slots().try_into().map(|slots: [_; 2]| slots.map(|slot| slot.id)).expect("two");
    guest.second_level.set_dirty_log(held, true).expect("it is off");
    guest.ram.claims().own_logs().insert(held);
    guest.write(0, 1);
    let at_call = |_| {
        assert!(!guest.ram.claims().own_logs().contains(&held), "for the manager it is a foreign log");
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    assert_eq!(report.last.pages, 0, "what was logged before the save is not written again");
    assert!(guest.ram.claims().own_logs().contains(&held) && guest.logged() == [held.0]);

    guest.second_level.set_dirty_log(other, true).expect("it is off");
    let error = guest.save(&Kept::default(), &limits()).expect_err("it belongs to a migration");
    assert!(matches!(error, SaveError::SecondLevel(SecondLevelError::OfOthers(slot)) if slot == other), "{error}");
    assert!(guest.ram.claims().own_logs().contains(&held) && guest.logged() == [held.0, other.0]);
}

#[test]
fn what_cannot_be_saved_now_is_refused_before_a_page_is_read() {
    let guest = Guest::new();
    guest.write(0, 1);
    let refused = |guest: &Guest| {
        let sink = Kept::default();
        let error = guest.save(&sink, &limits()).expect_err("it is refused");
        assert_eq!(sink.calls.load(Ordering::Relaxed), 0);
        error.to_string()
    };
    let aside = guest.ram.claims().window_aside(WindowIndex::new(2)).expect("it is free");
    let moving = "cannot save RAM: window 2 is being moved; let the manager rest, and try again";
    assert_eq!(refused(&guest), moving);
    drop(aside);
    guest.ram.given_back().book().begin_notes();
    assert_eq!(refused(&guest), "cannot save RAM: another save is under way; wait for its end");
    guest.ram.given_back().book().end_notes();
    let giant = guest.ram.claims().giant(Gpa::new(0)).expect("it is free");
    assert!(refused(&guest).contains("window 0 is being moved"));
    drop(giant);
    guest.ram.claims().begin_filling([WindowIndex::new(1)]);
    let not_filled = refused(&guest);
    assert!(not_filled.contains("window 1 is in a snapshot's file") && !not_filled.contains("moved"), "{not_filled}");
    guest.ram.claims().filled(WindowIndex::new(1));
    let without_slot = Guest { second_level: FakeSecondLevel::new(&[range(0, 4)]), ..guest };
    assert_eq!(refused(&without_slot), "cannot save RAM: window 2 is in no memslot, so its writes cannot be logged");
    assert!(without_slot.is_as_before());
}

#[test]
fn no_window_is_taken_aside_during_a_save() {
    let guest = Guest::new();
    guest.write(0, 1);
    let at_call = |_| {
        assert!(guest.ram.claims().window_aside(WindowIndex::new(3)).is_err());
        assert!(guest.ram.claims().giant(Gpa::new(0)).is_err());
        assert!(guest.ram.claims().window_in_place(WindowIndex::new(3)).is_ok(), "a balloon may go on");
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    guest.save(&sink, &limits()).expect("nothing fails");
    assert!(guest.ram.claims().window_aside(WindowIndex::new(3)).is_ok());
}

#[test]
fn a_closure_that_fails_or_forgets_the_last_pages_fails_the_save() {
    let guest = Guest::new();
    let (sink, cancel) = (Kept::default(), AtomicBool::new(false));
    let error = guest.saver(&sink).save(&limits(), &cancel, &|_| (), |_| Ok(())).expect_err("they are not saved");
    assert!(matches!(error, SaveError::NoLastPages));
    let error = guest.saver(&sink).save(&limits(), &cancel, &|_| (), |last| {
        last.write(Duration::ZERO)?;
        Err::<(), _>(SaveError::State("no such register".into()))
    });
    assert_eq!(error.expect_err("the closure fails").to_string(), "cannot save the machine's state: no such register");
    assert!(guest.is_as_before());
}

#[test]
fn a_closure_that_fails_after_a_pause_that_was_broken_off_fails_the_save_too() {
    let guest = Guest::new();
    (0..1024).for_each(|page| guest.write(page, 1));
    // The sink takes 11 ms for a window: what is written before the first pause does not fit.
    let at_call = |_| {
        guest.host.sleep(Duration::from_millis(11));
        Ok(())
    };
    let (sink, mut pauses) = (Kept { at_call: Some(&at_call), ..Kept::default() }, 0);
    let saved = guest.saver(&sink).save(&limits(), &AtomicBool::new(false), &|_| (), |last| {
        pauses += 1;
        assert!(pauses <= 2, "the second one ended the save");
        if pauses == 2 {
            return Err(SaveError::State("a vCPU does not stop".into()));
        }
        (0..1024).for_each(|page| guest.write(page, 2));
        last.write(Duration::ZERO)
    });
    let error = saved.expect_err("the second pause fails");
    assert_eq!((pauses, error.to_string()), (2, "cannot save the machine's state: a vCPU does not stop".into()));
    assert!(guest.is_as_before());
}

/// A guest of which the logs begin with all pages set.
fn guest_with_full_logs() -> Guest {
    let guest = Guest::new();
    guest.second_level.start_logs_set();
    guest
}

#[test]
fn a_log_that_begins_set_is_cleared_window_by_window_as_they_are_copied() {
    let guest = guest_with_full_logs();
    (0..3).for_each(|window| guest.write(window * 512, 1));
    guest.write(1, 1);
    let seen = Mutex::new(Vec::new());
    let at_call = |call| {
        seen.lock().push(guest.second_level.logged_pages());
        if call == 0 {
            // One page that was copied, one that was not in use, one that is still to come.
            [0, 1700, 1024].into_iter().for_each(|page| guest.write(page, 2));
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let report = guest.save(&sink, &limits()).expect("nothing fails");
    // Unused pages were cleared at the start, and each window's right before its copy; the last two are in the pause.
    assert_eq!(*seen.lock(), [2, 3, 2, 2, 2]);
    assert_eq!((report.logs_began_set, report.last.pages), (2, 2));
    let expected = [((0, 0), 2), ((0, 1), 1), ((1, 0), 1), ((2, 0), 2), ((3, 164), 2)];
    assert_eq!(*sink.pages.lock(), kept(&expected));
    assert!(guest.is_as_before());
}

#[test]
fn a_failing_clear_ends_the_save_and_leaves_no_log_on() {
    for call in 0..8 {
        let guest = guest_with_full_logs();
        (0..4).for_each(|window| guest.write(window * 512, 1));
        guest.second_level.fail_call(call, libc::EIO);
        let error = guest.save(&Kept::default(), &limits()).expect_err("one call fails");
        assert!(matches!(error, SaveError::SecondLevel(_)), "call {call}: {error}");
        assert!(guest.is_as_before(), "call {call}");
    }
}

#[test]
fn slots_that_begin_inside_a_window_are_cleared_there_alone() {
    let borders = [(0, 3 << 20), (3 << 20, 5 << 20)];
    let slots = borders.map(|(start, bytes)| GpaRange::new(Gpa::new(start), Bytes::new(bytes)).expect("fits"));
    let guest = Guest { second_level: FakeSecondLevel::new(&slots), ..Guest::new() };
    guest.second_level.start_logs_set();
    (0..1024).for_each(|page| guest.write(page, 1));
    let at_call = |call| {
        if call == 0 {
            [0, 767, 768, 1023].into_iter().for_each(|page| guest.write(page, 2));
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    guest.save(&sink, &limits()).expect("nothing fails");
    let pages = sink.pages.lock();
    let written = pages.iter().filter(|(_, byte)| **byte == 2).map(|(place, _)| *place).collect::<Vec<_>>();
    assert_eq!((pages.len(), written), (1024, vec![(0, 0), (1, 255), (1, 256), (1, 511)]));
}

#[test]
fn pages_that_do_not_fit_are_left_with_the_guest_paused() {
    let guest = guest_with_full_logs();
    (0..2048).for_each(|page| guest.write(page, 1));
    let at_call = |call: u64| {
        guest.host.sleep(Duration::from_millis(100));
        (0..512).for_each(|page| guest.write(call % 4 * 512 + page, 2));
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let limits = SaveLimits { beyond: BeyondBound::Leave { after_rounds: NonZeroU32::new(2) }, ..limits() };
    let saved = guest.saver(&sink).save(&limits, &AtomicBool::new(false), &|_| (), |last| {
        let left = last.write_or_leave(Duration::ZERO)?;
        assert!(guest.ram.claims().window_aside(WindowIndex::new(0)).is_err(), "RAM stays as it is");
        Ok(left)
    });
    let (left, report) = saved.expect("nothing fails");
    assert_eq!((report.rounds.len(), report.last.pages), (2, 0));
    let found: Vec<_> = left.iter().map(|left| (left.window.get(), left.pages, left.zero)).collect();
    assert_eq!(found, (0..4).map(|window| (window, PageSet::ALL, PageSet::EMPTY)).collect::<Vec<_>>());
    assert!(guest.is_as_before());
}

#[test]
fn a_page_that_is_given_back_and_written_again_before_its_turn_is_read_in_a_later_round() {
    let guest = guest_with_full_logs();
    (0..300).chain(512..812).for_each(|page| guest.write(page, 1));
    let at_call = |call| {
        guest.host.sleep(Duration::from_millis(100));
        match call {
            // Window 1, in the first round: the second one has window 0 first, then this page as a zero.
            1 => {
                guest.ram.given_back().book().note_release(WindowIndex::new(1), PageSet::from_iter([88]));
                guest.host.make_absent(guest.ram.base() + kib(4) * 600, kib(4));
                (0..300).for_each(|page| guest.write(page, 2));
            }
            2 => guest.write(600, 9),
            _ => {}
        }
        Ok(())
    };
    let sink = Kept { at_call: Some(&at_call), ..Kept::default() };
    let report = guest.save(&sink, &SaveLimits { beyond: BeyondBound::PauseLonger, ..limits() }).expect("it ends");
    assert!(report.rounds.len() >= 2, "{report:?}");
    let pages = sink.pages.lock();
    assert_eq!([(0, 0), (1, 88), (1, 89)].map(|place| pages[&place]), [2, 9, 1]);
}
