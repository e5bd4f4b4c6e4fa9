//! Whatever fails while windows are moved, the guest finds every page it wrote when it sees them again. On the fake
//! mover, which fails at every single call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use parking_lot::{Condvar, Mutex};
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::claims::{Claimed, Claims};
use wideleaf_memory::detached::{Aside, AsideError};
use wideleaf_memory::mover::{ALL_PAGES, ASIDE_SLOTS, Mover, Place, READY_SLOTS};
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, AccessSensor, Seen};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_mover::{FakeMover, Touch};
use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Gpa, OutcomeResult, Refusal, Skip, WindowIndex};

const ERRORS: [Errno; 4] = [Errno::EAGAIN, Errno::EBUSY, Errno::ENOMEM, Errno::EINVAL];
/// Upper bound of the calls of these sequences.
const CALLS_MAX: u64 = 3000;

const W: WindowIndex = WindowIndex::new(3);
/// Giant that contains all windows of these tests.
const GIANT: Gpa = Gpa::new(0);

pub(crate) struct Bed {
    pub mover: Arc<FakeMover>,
    pub host: Arc<FakeHost>,
    pub aside: Arc<Aside>,
    pub claims: Arc<Claims>,
}

impl Bed {
    pub fn new() -> Bed {
        let (mover, host, claims) = (Arc::<FakeMover>::default(), Arc::<FakeHost>::default(), Arc::<Claims>::default());
        let aside = Arc::new(Aside::new(host.clone(), mover.clone(), claims.clone()));
        Bed { mover, host, aside, claims }
    }

    fn sensor(&self) -> AccessSensor {
        AccessSensor::new(self.aside.clone(), AccessConfig::default())
    }

    pub fn swapper(&self) -> Swapper {
        Swapper::new(self.aside.clone())
    }

    /// Asserts that all pages are back and right, and that no window is watched.
    pub fn assert_at_rest(&self) {
        assert!(self.mover.is_intact(), "{:?}", self.aside.report());
        assert_eq!(self.mover.pages_aside(), 0, "{:?}", self.aside.report());
        assert!(!self.mover.is_anything_watched(), "{:?}", self.aside.report());
        assert_eq!(self.mover.waiting(), 0);
        assert!(self.claims.giant(GIANT).is_ok(), "no claim is left");
    }

    pub fn is_huge(&self, window: WindowIndex) -> bool {
        self.mover.look(Place::Guest(window)).unwrap().is_huge
    }
}

/// Touches a page, whether the guest then waits or not.
pub(crate) fn touch(bed: &Bed, window: WindowIndex, page: u16) {
    let _: Touch = bed.mover.touch(window, page);
}

/// Three windows: all base pages, base pages with holes, and huge.
pub(crate) fn three_windows(bed: &Bed) -> [WindowIndex; 3] {
    let windows = [1, 2, 3].map(WindowIndex::new);
    bed.mover.write(windows[0], ALL_PAGES);
    bed.mover.write(windows[1], 100..300);
    bed.mover.write(windows[2], ALL_PAGES);
    bed.mover.make_huge(windows[2]);
    windows
}

#[test]
fn a_touched_window_comes_back_whole_and_is_counted_once() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &windows);
    // Both vCPUs touch window 3, one of them a hole of window 2; neither touches window 1.
    for (window, page) in [(3, 7), (3, 500), (2, 0)] {
        assert_eq!(bed.mover.touch(WindowIndex::new(window), page), Touch::Waits);
    }
    bed.aside.serve().unwrap();
    assert_eq!(bed.mover.touch(windows[2], 7), Touch::Wrote, "it came back before the sample ended");
    let sample = sensor.finish(bed.host.as_ref());
    assert_eq!(
        sample.rows.iter().map(|(_, seen)| *seen).collect::<Vec<_>>(),
        [Seen::Untouched, Seen::Touched, Seen::Touched]
    );
    assert_eq!((sample.cost.windows, sample.cost.events), (3, 2));
    assert!(bed.is_huge(windows[2]), "the huge page was not split");
    bed.assert_at_rest();
}

#[test]
fn a_huge_page_stays_whole_in_a_slot_that_held_base_pages_before() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    // One slot, two windows: base pages leave a page table in it.
    for window in [windows[0], windows[2]] {
        bed.aside.set_aside(window).unwrap();
        bed.aside.bring_back(window).unwrap();
    }
    assert!(bed.is_huge(windows[2]));
    bed.assert_at_rest();
}

/// A huge window that may be huge, as after a promotion.
fn make_huge(bed: &Bed, window: WindowIndex) {
    bed.mover.write(window, ALL_PAGES);
    bed.mover.make_huge(window);
    bed.mover.allow_huge(window).unwrap();
}

#[test]
fn touches_ask_for_no_huge_page_while_they_are_short() {
    let bed = Bed::new();
    make_huge(&bed, W);
    let mut sensor = bed.sensor();
    for (is_short, may_ask) in [(false, true), (true, false), (true, false), (false, true)] {
        sensor.note_shortage(is_short);
        sensor.start(bed.host.as_ref(), &[W]);
        assert_eq!(bed.mover.may_be_huge(W), may_ask, "short: {is_short}");
        assert_eq!(bed.mover.touch(W, 7), Touch::Waits);
        assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Touched)]);
        assert!(bed.is_huge(W), "short: {is_short}");
    }
    bed.assert_at_rest();
}

#[test]
fn no_window_of_a_giant_that_is_being_moved_is_marked() {
    let bed = Bed::new();
    make_huge(&bed, W);
    let mut sensor = bed.sensor();
    sensor.note_shortage(true);
    let giant = bed.claims.giant(GIANT).unwrap();
    sensor.start(bed.host.as_ref(), &[W]);
    assert!(bed.mover.may_be_huge(W), "a mark would be a mapping of its own");
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Unknown("busy"))]);
    drop(giant);
    bed.assert_at_rest();
}

#[test]
fn a_sensor_that_ends_leaves_its_mark_on_no_window_that_is_still_huge() {
    let bed = Bed::new();
    let [huge, vacated] = [W, WindowIndex::new(4)];
    [huge, vacated].into_iter().for_each(|window| make_huge(&bed, window));
    let mut sensor = bed.sensor();
    sensor.note_shortage(true);
    sensor.start(bed.host.as_ref(), &[huge, vacated]);
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(huge, Seen::Untouched), (vacated, Seen::Untouched)]);
    assert_eq!(bed.swapper().vacate(bed.host.as_ref(), vacated).result, OutcomeResult::Done);
    assert_eq!([huge, vacated].map(|window| bed.mover.may_be_huge(window)), [false; 2]);
    drop(sensor);
    assert_eq!([huge, vacated].map(|window| bed.mover.may_be_huge(window)), [true, false]);
    bed.assert_at_rest();
}

#[test]
fn a_kernel_that_keeps_page_tables_is_known_after_three_windows() {
    let bed = Bed::new();
    bed.mover.keep_tables();
    let mut sensor = bed.sensor();
    sensor.note_shortage(true);
    let marked = [0, 1, 2, 3].map(WindowIndex::new).map(|window| {
        make_huge(&bed, window);
        sensor.start(bed.host.as_ref(), &[window]);
        let is_marked = !bed.mover.may_be_huge(window);
        bed.mover.touch(window, 7);
        sensor.finish(bed.host.as_ref());
        is_marked
    });
    assert_eq!(marked, [true, true, true, false]);
    bed.assert_at_rest();
}

#[test]
fn a_window_is_sampled_although_it_cannot_be_marked() {
    let bed = Bed::new();
    make_huge(&bed, W);
    let mut sensor = bed.sensor();
    sensor.note_shortage(true);
    // The next call is the look at the window, and the one after it the mark.
    bed.mover.fail_call(1, libc::ENOMEM);
    sensor.start(bed.host.as_ref(), &[W]);
    assert!(bed.mover.may_be_huge(W));
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Untouched)]);
    bed.assert_at_rest();
}

#[test]
fn an_unanswered_touch_is_counted_at_the_end() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &[W]);
    let mut pages = ALL_PAGES;
    assert!(pages.any(|page| bed.mover.touch(W, page) == Touch::Waits));
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Touched)]);
    bed.assert_at_rest();
}

#[test]
fn absent_windows_and_windows_beyond_the_limit_are_not_taken() {
    let bed = Bed::new();
    let windows: Vec<_> = (0..u64::from(ASIDE_SLOTS) + 2).map(WindowIndex::new).collect();
    windows[1..].iter().for_each(|window| bed.mover.write(*window, 0..1));
    // The fake host counts pauses as CPU time.
    let config = AccessConfig { cpu_max: Duration::from_secs(1), ..AccessConfig::default() };
    let mut sensor = AccessSensor::new(bed.aside.clone(), config);
    sensor.start(bed.host.as_ref(), &windows);
    assert!(matches!(bed.aside.set_aside(windows[1]), Err(AsideError::AlreadyAside(_))));
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), windows[1]).result, OutcomeResult::Refused(Refusal::Busy));
    let rows = sensor.finish(bed.host.as_ref()).rows;
    assert_eq!(rows[0].1, Seen::Unknown("not_resident"));
    assert!(rows[1..64].iter().all(|(_, seen)| *seen == Seen::Untouched));
    assert_eq!([rows[64].1, rows[65].1], [Seen::Unknown("over_budget"); 2]);
    bed.assert_at_rest();
}

#[test]
fn a_sample_takes_no_more_than_its_time() {
    let bed = Bed::new();
    let windows: Vec<_> = (0..20).map(WindowIndex::new).collect();
    windows.iter().for_each(|window| bed.mover.write(*window, 0..1));
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &windows);
    // Ten milliseconds; a window takes one on the fake host.
    assert_eq!(sensor.finish(bed.host.as_ref()).cost.windows, 10);
    bed.assert_at_rest();
}

#[test]
fn a_dropped_or_restarted_sample_gives_its_windows_back() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &windows);
    sensor.start(bed.host.as_ref(), &windows[..1]);
    assert!(bed.is_huge(windows[2]) && !bed.aside.is_aside(windows[2]));
    drop(sensor);
    bed.assert_at_rest();
}

#[test]
fn a_service_that_ends_during_a_sample_brings_all_windows_back() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &windows);
    bed.mover.touch(windows[0], 0);
    bed.aside.close();
    bed.assert_at_rest();
    let rows = sensor.finish(bed.host.as_ref()).rows;
    assert!(rows.iter().all(|(_, seen)| *seen == Seen::Unknown("service_ended")), "{rows:?}");
    assert!(sensor.why_it_ended().is_some());
    assert!(matches!(bed.aside.set_aside(W), Err(AsideError::Closed)));
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), W).result, OutcomeResult::Skipped(Skip::AlreadyDone));
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), windows[0]).result, OutcomeResult::Skipped(Skip::Stopping));
}

#[test]
fn a_page_that_does_not_move_back_is_copied_back() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.aside.set_aside(W).unwrap();
    // Slots are assigned in order.
    [0, 17, 511].into_iter().for_each(|page| bed.mover.pin(Place::Aside(0), page));
    assert!(bed.aside.bring_back(W).unwrap().is_none());
    assert_eq!(bed.aside.report().copied_pages, 3);
    bed.assert_at_rest();
}

#[test]
fn a_page_that_does_not_move_leaves_the_window_where_it_is() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.mover.pin(Place::Guest(W), 300);
    let error = bed.aside.set_aside(W).expect_err("pinned");
    assert!(matches!(error, AsideError::Host(error) if error.refusal() == Refusal::Busy));
    bed.assert_at_rest();
}

#[test]
fn while_all_calls_fail_the_guest_waits_and_then_has_all_pages() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    for window in windows {
        bed.aside.set_aside(window).unwrap();
        bed.mover.touch(window, 200);
    }
    let answered = bed.aside.serve();
    assert!(answered.is_ok());
    windows.into_iter().for_each(|window| assert!(bed.aside.bring_back(window).unwrap().is_some()));
    bed.assert_at_rest();

    windows.into_iter().for_each(|window| bed.aside.set_aside(window).unwrap());
    bed.mover.fail_all(Some(Errno::ENOMEM as i32));
    assert!(bed.aside.serve().is_err());
    assert!(windows.iter().all(|window| bed.aside.bring_back(*window).is_err()));
    assert!(bed.mover.is_anything_watched(), "the guest must not see the holes");
    bed.mover.fail_all(None);
    bed.aside.serve().unwrap(); // as the thread does periodically
    bed.assert_at_rest();
}

#[test]
fn a_swap_makes_a_window_huge_and_its_holes_zero() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let mut swapper = bed.swapper();
    assert_eq!(swapper.refill().unwrap(), usize::from(READY_SLOTS));
    let [whole, holed, huge] = windows.map(|window| swapper.swap(bed.host.as_ref(), window));
    assert_eq!((whole.result, whole.bloat), (OutcomeResult::Done, Bytes::ZERO));
    assert_eq!((holed.result, holed.bloat), (OutcomeResult::Done, kib(4) * 312));
    assert_eq!((huge.result, huge.cost.copied), (OutcomeResult::Skipped(Skip::AlreadyDone), Bytes::ZERO));
    assert!(windows.into_iter().all(|window| bed.is_huge(window)));
    let hole = swapper.swap(bed.host.as_ref(), WindowIndex::new(9)).result;
    assert_eq!(hole, OutcomeResult::Skipped(Skip::NotResident));
    bed.mover.write(windows[1], 0..100);
    bed.assert_at_rest();
}

#[test]
fn pages_that_are_swapped_out_are_no_bloat() {
    let bed = Bed::new();
    bed.mover.write(W, 0..500);
    bed.mover.swap_out(W, 100..400);
    let swap = bed.swapper().swap(bed.host.as_ref(), W);
    assert_eq!((swap.result, swap.bloat), (OutcomeResult::Done, kib(4) * 12));
    bed.mover.write(W, ALL_PAGES);
    bed.assert_at_rest();
}

#[test]
fn more_windows_are_swapped_than_pages_were_ready() {
    let bed = Bed::new();
    let mut swapper = bed.swapper();
    for window in (0..u64::from(READY_SLOTS) * 3).map(WindowIndex::new) {
        bed.mover.write(window, ALL_PAGES);
        assert_eq!(swapper.swap(bed.host.as_ref(), window).result, OutcomeResult::Done);
    }
    bed.assert_at_rest();
}

#[test]
fn a_window_that_cannot_be_taken_aside_for_want_of_memory_is_no_shortage_of_huge_pages() {
    // The next calls: look, allow huge pages, watch, look at the pages to move, move.
    for call in 0..5 {
        let bed = Bed::new();
        bed.mover.write(W, ALL_PAGES);
        let mut swapper = bed.swapper();
        swapper.refill().unwrap();
        bed.mover.fail_call(call, libc::ENOMEM);
        let result = swapper.swap(bed.host.as_ref(), W).result;
        // Some looks are best effort.
        assert_ne!(result, OutcomeResult::Refused(Refusal::NoHugePage), "call {call}");
        assert!(call > 2 || result == OutcomeResult::Refused(Refusal::Other(libc::ENOMEM)), "call {call}: {result:?}");
        bed.assert_at_rest();
    }
}

/// Bringing back present pages one by one already takes some 1500 calls; the giving back comes after them.
const CALLS_OF_A_FAILED_SWAP: u64 = 2000;

#[test]
fn an_unused_copy_does_not_show_in_the_holes_of_a_later_window() {
    const THREADS: usize = 2;
    thread::scope(|scope| {
        for first in 0..THREADS as u64 {
            let calls = (first..CALLS_OF_A_FAILED_SWAP).step_by(THREADS);
            scope.spawn(move || calls.for_each(later_windows_are_right_if_the_giving_back_fails_at));
        }
    });
}

/// The page that is used first does not move in, and one more call fails: for some `call` the one that gives it back.
fn later_windows_are_right_if_the_giving_back_fails_at(call: u64) {
    const NEVER: u64 = 1 << 40;
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let mut swapper = bed.swapper();
    swapper.refill().unwrap();
    bed.mover.pin(Place::Ready(0), 511);
    bed.mover.fail_call(call, Errno::EINVAL as i32);
    let result = swapper.swap(bed.host.as_ref(), W).result;
    assert!(matches!(result, OutcomeResult::Refused(_)), "{result:?}");
    bed.mover.fail_call(NEVER, 0);
    swapper.refill().unwrap();
    bed.aside.serve().unwrap();
    bed.assert_at_rest();
    // As many as there are slots, so that its slot is used again.
    for window in (10..10 + u64::from(READY_SLOTS)).map(WindowIndex::new) {
        bed.mover.write(window, 100..300);
        // If the first swap failed early, the first attempt here meets the page that does not move in.
        let mut attempts = (0..2).map(|_| swapper.swap(bed.host.as_ref(), window).result);
        assert!(attempts.any(|result| result == OutcomeResult::Done), "call {call}");
        bed.mover.write(window, ALL_PAGES); // compares each page with its written value, or with zero
    }
    bed.assert_at_rest();
}

#[test]
fn without_a_huge_page_no_window_is_taken_aside() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.mover.run_short(0..u64::MAX);
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), W).result, OutcomeResult::Refused(Refusal::NoHugePage));
    assert_eq!((bed.aside.report().set_aside, bed.mover.may_be_huge(W)), (0, false));
    bed.assert_at_rest();
}

#[test]
fn a_huge_page_that_is_split_while_moving_in_is_not_reported_as_done() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let mut swapper = bed.swapper();
    swapper.refill().unwrap();
    bed.mover.limit_moves(100); // the kernel stops half-way: it must split the page to continue
    assert_eq!(swapper.swap(bed.host.as_ref(), W).result, OutcomeResult::Refused(Refusal::NotObserved));
    bed.assert_at_rest();
}

#[test]
fn a_kernel_that_keeps_page_tables_is_detected_before_a_window_is_touched() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.mover.keep_tables();
    let mut swapper = bed.swapper();
    for _ in 0..3 {
        let result = swapper.swap(bed.host.as_ref(), W).result;
        assert_eq!(result, OutcomeResult::Refused(Refusal::Other(libc::EOPNOTSUPP)));
    }
    assert_eq!((bed.aside.report().set_aside, bed.is_huge(W)), (0, false));
    assert!(!bed.mover.may_be_huge(W), "its mark is lifted only for a swap, not for an attempt");
    bed.assert_at_rest();
}

/// Shortages of huge pages of every start and length in populates: longer than the detection of kept page tables
/// takes.
fn shortages() -> impl Iterator<Item = std::ops::Range<u64>> {
    (0..12).flat_map(|first| (1..12).map(move |populates| first..first + populates))
}

/// Results of the swaps of a window, one attempt after the other.
fn attempts(bed: &Bed, attempts: usize) -> Vec<OutcomeResult> {
    let mut swapper = bed.swapper();
    (0..attempts).map(|_| swapper.swap(bed.host.as_ref(), W).result).collect()
}

#[test]
fn a_shortage_of_huge_pages_is_not_taken_for_a_kernel_that_keeps_page_tables() {
    for shortage in shortages() {
        let bed = Bed::new();
        bed.mover.write(W, ALL_PAGES);
        bed.mover.run_short(shortage.clone());
        // An attempt populates at least once: the last one comes after the longest shortage.
        let results = attempts(&bed, 12);
        let ended = results.iter().position(|result| *result == OutcomeResult::Done).expect("the shortage ends");
        let before = &results[..ended];
        assert!(before.iter().all(|result| *result == OutcomeResult::Refused(Refusal::NoHugePage)), "{shortage:?}");
        bed.assert_at_rest();
    }
}

#[test]
fn a_kernel_that_keeps_page_tables_is_detected_despite_a_shortage() {
    for shortage in shortages() {
        let bed = Bed::new();
        bed.mover.write(W, ALL_PAGES);
        bed.mover.keep_tables();
        bed.mover.run_short(shortage.clone());
        let results = attempts(&bed, usize::from(READY_SLOTS));
        assert_eq!(results.last(), Some(&OutcomeResult::Refused(Refusal::Other(libc::EOPNOTSUPP))), "{shortage:?}");
        assert_eq!((bed.aside.report().set_aside, bed.mover.may_be_huge(W)), (0, false), "{shortage:?}");
        bed.assert_at_rest();
    }
}

#[test]
fn one_swapper_s_finding_about_page_tables_reaches_the_others() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let mut populates = Vec::new();
    for (mut swapper, window) in Swapper::several(&bed.aside, 2).into_iter().zip(windows) {
        let before = bed.mover.populates();
        assert_eq!(swapper.swap(bed.host.as_ref(), window).result, OutcomeResult::Done);
        populates.push(bed.mover.populates() - before);
    }
    assert_eq!(populates, [3, 1], "two in the trial slot, and the page itself");
    bed.assert_at_rest();
}

#[test]
fn a_slot_that_cannot_be_given_back_yet_is_usable_while_another_slot_is_tried() {
    let bed = Bed::new();
    let window = |number: u16| WindowIndex::new(u64::from(number));
    (0..ASIDE_SLOTS + 2).for_each(|number| bed.mover.write(window(number), ALL_PAGES));
    // The old pages of two windows stay in their slots, and all other slots hold windows.
    bed.mover.while_emptying(|| Some(libc::EAGAIN));
    let mut swapper = bed.swapper();
    for number in [0, 1] {
        assert_eq!(swapper.swap(bed.host.as_ref(), window(number)).result, OutcomeResult::Done);
    }
    (2..ASIDE_SLOTS).for_each(|number| bed.aside.set_aside(window(number)).unwrap());
    // While one of the two is given back for a window, another thread takes another window aside.
    let (aside, turns) = (bed.aside.clone(), AtomicUsize::new(0));
    bed.mover.while_emptying(move || {
        if turns.fetch_add(1, Ordering::Relaxed) == 0 {
            aside.set_aside(window(ASIDE_SLOTS)).unwrap();
        }
        None
    });
    bed.aside.set_aside(window(ASIDE_SLOTS + 1)).unwrap();
    assert!((2..ASIDE_SLOTS + 2).all(|number| bed.aside.is_aside(window(number))));
    bed.aside.close();
    bed.assert_at_rest();
}

#[test]
fn a_panic_while_slots_are_given_back_loses_none() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.mover.while_emptying(|| panic!("an injected panic"));
    let mut swapper = bed.swapper();
    catch_unwind(AssertUnwindSafe(|| swapper.swap(bed.host.as_ref(), W))).expect_err("it panics");
    bed.mover.while_emptying(|| None);
    let windows: Vec<_> = (0..u64::from(ASIDE_SLOTS)).map(|number| WindowIndex::new(10 + number)).collect();
    windows.iter().for_each(|window| bed.aside.set_aside(*window).unwrap());
    assert!(matches!(bed.aside.set_aside(W), Err(AsideError::Full)));
    windows.iter().for_each(|window| assert!(bed.aside.bring_back(*window).unwrap().is_none()));
    bed.assert_at_rest();
}

/// Runs `work` with each of its calls failing once with each error, and at each length of moves; afterwards all
/// pages must be back, at the latest when the service ends.
pub(crate) fn with_every_call_failing(work: impl Fn(&Bed, [WindowIndex; 3])) {
    for pages_per_move in [512, 100] {
        for errno in ERRORS {
            let mut call = 0;
            loop {
                let bed = Bed::new();
                let windows = three_windows(&bed);
                bed.mover.limit_moves(pages_per_move);
                let before = bed.mover.calls();
                bed.mover.fail_call(call, errno as i32);
                work(&bed, windows);
                let calls = bed.mover.calls() - before;
                assert!(bed.mover.is_intact() || bed.mover.is_anything_watched(), "call {call}: {errno}");
                bed.aside.close();
                bed.assert_at_rest();
                if calls <= call {
                    break;
                }
                call += 1;
                assert!(call < CALLS_MAX);
            }
        }
    }
}

#[test]
fn no_failing_call_of_a_sample_loses_a_byte() {
    for is_short in [false, true] {
        with_every_call_failing(|bed, windows| {
            let mut sensor = bed.sensor();
            sensor.note_shortage(is_short);
            sensor.start(bed.host.as_ref(), &windows);
            for pages in [0..150, 150..151, 151..512] {
                let touches = pages.flat_map(|page| windows.map(|window| (window, page)));
                touches.for_each(|(window, page)| touch(bed, window, page));
                let _ = bed.aside.serve();
            }
            let sample = sensor.finish(bed.host.as_ref());
            assert!(sample.rows.iter().all(|(_, seen)| *seen != Seen::Untouched), "{sample:?}");
        });
    }
}

#[test]
fn no_failing_call_of_a_swap_loses_a_byte() {
    with_every_call_failing(|bed, windows| {
        let mut swapper = bed.swapper();
        let _ = swapper.refill();
        for window in windows {
            let _ = swapper.swap(bed.host.as_ref(), window);
            touch(bed, window, 150);
            let _ = bed.aside.serve();
        }
    });
}

/// A meeting point of threads.
#[derive(Default)]
struct Meeting {
    here: Mutex<usize>,
    came: Condvar,
}

impl Meeting {
    /// Waits until `expected` threads are here. A wait beyond the time limit fails the test instead of hanging it.
    fn of(&self, expected: usize) {
        const PATIENCE: Duration = Duration::from_secs(60);
        let mut here = self.here.lock();
        *here += 1;
        self.came.notify_all();
        let waited = self.came.wait_while_for(&mut here, |here| *here < expected, PATIENCE);
        assert!(!waited.timed_out(), "the others cannot come while one is here");
    }
}

#[test]
fn two_windows_are_copied_at_the_same_time() {
    let (bed, meeting) = (Bed::new(), Meeting::default());
    let windows = three_windows(&bed);
    bed.mover.while_copying(move || meeting.of(2));
    std::thread::scope(|scope| {
        for (mut swapper, window) in Swapper::several(&bed.aside, 2).into_iter().zip(windows) {
            let host = bed.host.as_ref();
            scope.spawn(move || assert_eq!(swapper.swap(host, window).result, OutcomeResult::Done));
        }
    });
    assert!(bed.is_huge(windows[0]) && bed.is_huge(windows[1]));
    bed.assert_at_rest();
}

#[test]
fn a_thread_that_touches_a_window_during_its_swap_continues_when_it_is_large() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let (mover, aside) = (bed.mover.clone(), bed.aside.clone());
    bed.mover.while_copying(move || {
        assert_eq!(mover.touch(W, 7), Touch::Waits);
        aside.serve().unwrap();
        assert_eq!(mover.touch(W, 8), Touch::Waits, "it is still on its way");
    });
    // The touches left a page table, which may split it.
    let _: OutcomeResult = bed.swapper().swap(bed.host.as_ref(), W).result;
    bed.mover.write(W, ALL_PAGES);
    bed.assert_at_rest();
    assert_eq!(bed.aside.report().touched, 0, "it was not sampled");
}

#[test]
fn neighbours_are_sampled_during_a_swap() {
    let bed = Bed::new();
    let windows = three_windows(&bed);
    let (mover, aside, copies) = (bed.mover.clone(), bed.aside.clone(), AtomicUsize::new(0));
    bed.mover.while_copying(move || {
        copies.fetch_add(1, Ordering::Relaxed);
        aside.set_aside(windows[2]).unwrap();
        assert_eq!(mover.touch(windows[2], 3), Touch::Waits);
        aside.serve().unwrap();
        assert_eq!(mover.touch(windows[2], 3), Touch::Wrote, "no thread waits for the copy of another window");
        assert!(aside.bring_back(windows[2]).unwrap().is_some());
        assert!(matches!(aside.set_aside(windows[0]), Err(AsideError::AlreadyAside(_))));
        assert!(matches!(aside.bring_back(windows[0]), Err(AsideError::NotAside(_))), "it belongs to another user");
    });
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), windows[0]).result, OutcomeResult::Done);
    bed.assert_at_rest();
}

#[test]
fn a_service_that_ends_during_a_swap_waits_for_the_window_and_brings_it_back_if_needed() {
    for does_move_in in [true, false] {
        let bed = Bed::new();
        bed.mover.write(W, ALL_PAGES);
        let mut swapper = bed.swapper();
        swapper.refill().unwrap();
        let closing: Arc<Mutex<Option<std::thread::JoinHandle<()>>>> = Arc::default();
        let (mover, aside, closes) = (bed.mover.clone(), bed.aside.clone(), closing.clone());
        bed.mover.while_copying(move || {
            let aside_too = aside.clone();
            *closes.lock() = Some(std::thread::spawn(move || aside_too.close()));
            // `Closed` comes before all other results: then it has begun, and waits.
            while !matches!(aside.set_aside(WindowIndex::new(99)), Err(AsideError::Closed)) {
                let _ = aside.bring_back(WindowIndex::new(99));
                std::thread::yield_now();
            }
            if !does_move_in {
                mover.pin(Place::Ready(0), 0);
                // The calls: copy, scan and giving back of the page table, the failing move in; the way back:
                // check, list, move, and this.
                mover.fail_call(7, libc::ENOMEM);
            }
        });
        let result = swapper.swap(bed.host.as_ref(), W).result;
        assert_eq!(result == OutcomeResult::Done, does_move_in, "{result:?}");
        closing.lock().take().unwrap().join().unwrap();
        assert_eq!(bed.aside.report().stuck, u64::from(!does_move_in));
        bed.assert_at_rest();
    }
}

#[test]
fn a_swap_that_panics_brings_its_window_back_and_keeps_no_slot() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let mut swapper = bed.swapper();
    bed.mover.while_copying(|| panic!("an injected panic"));
    for _ in 0..ASIDE_SLOTS + 1 {
        catch_unwind(AssertUnwindSafe(|| swapper.swap(bed.host.as_ref(), W))).expect_err("it panics");
        bed.assert_at_rest();
    }
    bed.mover.while_copying(|| ());
    assert_eq!(swapper.refill().unwrap(), usize::from(READY_SLOTS));
    assert_eq!(swapper.swap(bed.host.as_ref(), W).result, OutcomeResult::Done);
    bed.assert_at_rest();
}

#[test]
fn no_failing_call_of_two_swaps_at_once_loses_a_byte() {
    with_every_call_failing(|bed, windows| {
        let swappers = Swapper::several(&bed.aside, 2);
        std::thread::scope(|scope| {
            for (mut swapper, first) in swappers.into_iter().zip([0, 1]) {
                let swap = move |window: WindowIndex| swapper.swap(bed.host.as_ref(), window);
                scope.spawn(move || windows.into_iter().skip(first).step_by(2).map(swap).count());
            }
            windows.into_iter().for_each(|window| touch(bed, window, 150));
            let _ = bed.aside.serve();
        });
    });
}

#[test]
fn a_giant_with_a_window_aside_or_stuck_is_not_moved() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    bed.aside.set_aside(W).unwrap();
    assert_eq!(bed.claims.giant(GIANT).unwrap_err(), Claimed::InParts(1));
    bed.mover.fail_call(0, libc::ENOMEM);
    let _ = bed.aside.bring_back(W); // whether it is stuck or not:
    assert_eq!(bed.claims.giant(GIANT).is_ok(), !bed.aside.is_aside(W), "a window that is not back is claimed");
    bed.aside.serve().unwrap();
    bed.assert_at_rest();
}

#[test]
fn no_window_of_a_moving_giant_is_taken_aside_swapped_or_sampled() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let giant = bed.claims.giant(GIANT).unwrap();
    assert!(matches!(bed.aside.set_aside(W), Err(AsideError::Claimed(W, Claimed::UnderWay))));
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), W).result, OutcomeResult::Skipped(Skip::GiantUnderWay));
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &[W]);
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Unknown("busy"))]);
    assert!(!bed.mover.is_anything_watched());
    drop(giant);
    bed.aside.set_aside(W).unwrap();
    bed.aside.bring_back(W).unwrap();
    bed.assert_at_rest();
}

#[test]
fn no_window_with_pages_that_are_given_back_is_taken_aside_swapped_or_sampled() {
    let bed = Bed::new();
    bed.mover.write(W, ALL_PAGES);
    let given_back = bed.claims.window_in_place(W).unwrap();
    assert!(matches!(bed.aside.set_aside(W), Err(AsideError::Claimed(W, Claimed::InPlace))));
    assert_eq!(bed.swapper().swap(bed.host.as_ref(), W).result, OutcomeResult::Refused(Refusal::Busy));
    let mut sensor = bed.sensor();
    sensor.start(bed.host.as_ref(), &[W]);
    assert_eq!(sensor.finish(bed.host.as_ref()).rows, [(W, Seen::Unknown("busy"))]);
    assert!(!bed.mover.is_anything_watched());
    drop(given_back);
    bed.aside.set_aside(W).unwrap();
    assert_eq!(bed.claims.window_in_place(W).unwrap_err(), Claimed::Aside);
    bed.aside.bring_back(W).unwrap();
    assert!(bed.claims.window_in_place(W).is_ok());
    bed.assert_at_rest();
}
