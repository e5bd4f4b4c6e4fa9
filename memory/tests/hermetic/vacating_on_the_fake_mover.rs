//! Whatever fails while windows are vacated and their huge pages are moved to other windows, the guest finds every page
//! it wrote. On the fake mover, which fails at every single call.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::moving_on_the_fake_mover::{Bed, three_windows, touch, with_every_call_failing};
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::mover::{ALL_PAGES, ASIDE_SLOTS, Place, READY_SLOTS};
use wideleaf_memory::numa::placement::Source;
use wideleaf_memory::testing::fake_mover::Touch;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, OutcomeResult, Refusal, Skip, WindowIndex};

const DONE: OutcomeResult = OutcomeResult::Done;
const COLD: WindowIndex = WindowIndex::new(3);
const HOT: WindowIndex = WindowIndex::new(4);

impl Bed {
    /// A cold window on a huge page and a hot one on base pages, all of both written.
    fn with_a_pair() -> Bed {
        let bed = Bed::new();
        bed.add_cold(COLD);
        bed.mover.write(HOT, ALL_PAGES);
        bed
    }

    fn add_cold(&self, window: WindowIndex) {
        self.mover.write(window, ALL_PAGES);
        self.mover.make_huge(window);
    }

    fn vacate(&self, swapper: &mut Swapper, window: WindowIndex) -> OutcomeResult {
        swapper.vacate(self.host.as_ref(), window).result
    }

    fn swap(&self, swapper: &mut Swapper, window: WindowIndex) -> OutcomeResult {
        swapper.swap(self.host.as_ref(), window).result
    }
}

#[test]
fn a_huge_page_goes_from_one_window_to_another_and_none_is_made() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    let vacated = swapper.vacate(bed.host.as_ref(), COLD);
    assert_eq!((vacated.result, vacated.cost.copied), (DONE, mib(2)));
    assert!(!bed.is_huge(COLD) && swapper.has_vacated());
    assert_eq!(bed.swap(&mut swapper, HOT), DONE);
    assert!(bed.is_huge(HOT) && !swapper.has_vacated());
    assert_eq!(bed.mover.populates(), 0, "no huge page is asked for, not even for a trial");
    assert!(!bed.mover.may_be_huge(COLD) && bed.mover.may_be_huge(HOT));
    swapper.give_back_vacated();
    bed.assert_at_rest();
}

#[test]
fn a_window_with_holes_reads_zero_there_on_the_page_of_another_window() {
    let bed = Bed::new();
    let [_, holed, huge] = three_windows(&bed);
    let mut swapper = bed.swapper();
    assert_eq!([bed.vacate(&mut swapper, huge), bed.swap(&mut swapper, holed)], [DONE; 2]);
    assert!(bed.is_huge(holed));
    bed.mover.write(holed, ALL_PAGES); // compares each page with its written value, or with zero
    bed.assert_at_rest();
}

/// Even windows get their pages from one source, odd ones from another, as on interleaved RAM.
fn alternate(window: WindowIndex) -> Source {
    Source::new((window.get() % 2) as u16)
}

#[test]
fn windows_of_another_source_get_none_of_the_pages_that_are_ready() {
    let bed = Bed::new();
    bed.mover.place(alternate);
    let mut swapper = bed.swapper();
    let windows = (0..2 * u64::from(READY_SLOTS)).map(WindowIndex::new);
    for window in windows.clone() {
        bed.mover.write(window, ALL_PAGES);
        swapper.refill().expect("there are huge pages");
        assert_eq!(bed.swap(&mut swapper, window), DONE, "{window}");
    }
    assert_eq!(bed.mover.misplaced(), 0, "each page came from its window's nodes");
    // Pages of vacated windows, for windows of both sources.
    for window in windows {
        let others = [window.get() + 101, window.get() + 200].map(WindowIndex::new);
        assert_eq!(bed.vacate(&mut swapper, window), DONE, "{window}");
        for other in others {
            bed.mover.write(other, ALL_PAGES);
            assert_eq!(bed.swap(&mut swapper, other), DONE, "{other}");
        }
    }
    assert_eq!(bed.mover.misplaced(), 0, "and so do pages that windows left");
    drop(swapper);
    bed.assert_at_rest();
}

#[test]
fn a_later_pair_needs_no_new_base_pages() {
    let bed = Bed::new();
    let mut swapper = bed.swapper();
    let window = WindowIndex::new;
    for pair in 0..u64::from(ASIDE_SLOTS) + 1 {
        bed.add_cold(window(2 * pair));
        bed.mover.write(window(2 * pair + 1), ALL_PAGES);
        let results = [bed.vacate(&mut swapper, window(2 * pair)), bed.swap(&mut swapper, window(2 * pair + 1))];
        assert_eq!(results, [DONE; 2], "pair {pair}");
        assert_eq!((bed.mover.base_pages(), bed.mover.populates()), (512, 0), "pair {pair}");
        assert!(!bed.is_huge(window(2 * pair)) && bed.is_huge(window(2 * pair + 1)), "pair {pair}");
    }
    swapper.give_back_vacated();
    assert_eq!(bed.mover.pages_staged(), 0);
    bed.assert_at_rest();
}

#[test]
fn a_window_on_base_pages_or_without_pages_is_left_alone() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    let hole = WindowIndex::new(9);
    assert_eq!(bed.vacate(&mut swapper, HOT), OutcomeResult::Skipped(Skip::AlreadyDone));
    assert_eq!(bed.vacate(&mut swapper, hole), OutcomeResult::Skipped(Skip::NotResident));
    assert_eq!((bed.mover.calls(), bed.aside.report().set_aside), (2, 0), "they are looked at");
    bed.assert_at_rest();
}

#[test]
fn a_shortage_of_base_pages_changes_nothing() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    bed.mover.fail_call(1, libc::ENOMEM); // the call after the look
    let vacated = swapper.vacate(bed.host.as_ref(), COLD);
    assert_eq!(vacated.result, OutcomeResult::Refused(Refusal::Other(libc::ENOMEM)), "it lacks no huge page");
    assert_eq!((vacated.cost.copied, bed.aside.report().set_aside), (Bytes::ZERO, 0));
    assert!(bed.is_huge(COLD) && !swapper.has_vacated());
    bed.assert_at_rest();
    assert_eq!(bed.vacate(&mut swapper, COLD), DONE, "later there are some");
}

#[test]
fn a_pinned_page_keeps_its_window_where_it_is() {
    let bed = Bed::with_a_pair();
    bed.mover.pin(Place::Guest(COLD), 7);
    let mut swapper = bed.swapper();
    assert_eq!(bed.vacate(&mut swapper, COLD), OutcomeResult::Refused(Refusal::Busy));
    assert!(!swapper.has_vacated());
    swapper.give_back_vacated();
    bed.assert_at_rest();
}

#[test]
fn a_window_of_which_some_base_pages_arrived_keeps_what_the_guest_writes_to_them() {
    let bed = Bed::with_a_pair();
    bed.add_cold(WindowIndex::new(5));
    let mut swapper = bed.swapper();
    bed.mover.pin(Place::Base(0), 300);
    assert_eq!(bed.vacate(&mut swapper, COLD), OutcomeResult::Refused(Refusal::Busy));
    bed.mover.write(COLD, ALL_PAGES);
    bed.assert_at_rest();
    swapper.give_back_vacated();
    assert_eq!(bed.mover.pages_staged(), 0);
    assert_eq!(bed.vacate(&mut swapper, WindowIndex::new(5)), DONE);
    assert_eq!(bed.swap(&mut swapper, HOT), DONE);
    swapper.give_back_vacated();
    bed.assert_at_rest();
}

#[test]
fn a_page_that_no_swap_uses_is_given_back() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    assert_eq!(bed.vacate(&mut swapper, COLD), DONE);
    assert_eq!(bed.mover.pages_aside(), 512);
    swapper.give_back_vacated();
    assert!(!swapper.has_vacated());
    bed.assert_at_rest();
    assert_eq!(bed.swap(&mut swapper, HOT), DONE);
    assert!(bed.mover.populates() > 0, "that swap makes its own page");
    bed.assert_at_rest();
}

#[test]
fn a_swapper_with_all_of_its_pages_ready_gives_a_further_one_back_at_once() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    assert_eq!(swapper.refill().unwrap(), usize::from(READY_SLOTS));
    assert_eq!(bed.vacate(&mut swapper, COLD), DONE);
    assert!(!bed.is_huge(COLD) && !swapper.has_vacated());
    bed.assert_at_rest();
    assert_eq!(bed.swap(&mut swapper, HOT), DONE, "with one of the ready pages");
}

#[test]
fn a_huge_page_that_is_split_on_its_way_is_not_reported_as_done() {
    let bed = Bed::with_a_pair();
    bed.mover.limit_moves(100); // the kernel stops half-way: it must split the page to continue
    let mut swapper = bed.swapper();
    assert_eq!(bed.vacate(&mut swapper, COLD), OutcomeResult::Refused(Refusal::NotObserved));
    assert!(!swapper.has_vacated());
    bed.assert_at_rest();
}

#[test]
fn on_a_kernel_that_keeps_page_tables_a_traded_window_keeps_its_contents() {
    let bed = Bed::with_a_pair();
    bed.mover.keep_tables();
    let mut swapper = bed.swapper();
    let _: OutcomeResult = bed.vacate(&mut swapper, COLD);
    assert_ne!(bed.swap(&mut swapper, HOT), DONE, "its page table splits the page");
    swapper.give_back_vacated();
    bed.assert_at_rest();
    // Once that is known, no window is taken aside for a page that arrives nowhere.
    let other = WindowIndex::new(5);
    bed.mover.write(other, ALL_PAGES);
    assert_eq!(bed.swap(&mut swapper, other), OutcomeResult::Refused(Refusal::Other(libc::EOPNOTSUPP)));
    bed.add_cold(WindowIndex::new(6));
    assert_eq!(bed.vacate(&mut swapper, WindowIndex::new(6)), OutcomeResult::Skipped(Skip::NoMechanism));
    bed.assert_at_rest();
}

#[test]
fn a_thread_that_touches_a_window_while_it_is_vacated_continues_on_base_pages() {
    let bed = Bed::with_a_pair();
    let (mover, aside) = (bed.mover.clone(), bed.aside.clone());
    bed.mover.while_copying(move || {
        assert_eq!(mover.touch(COLD, 7), Touch::Waits);
        aside.serve().unwrap();
        assert_eq!(mover.touch(COLD, 8), Touch::Waits, "it is still on its way");
    });
    let mut swapper = bed.swapper();
    assert_eq!(bed.vacate(&mut swapper, COLD), DONE);
    assert_eq!(bed.mover.waiting(), 0);
    bed.mover.write(COLD, ALL_PAGES);
    swapper.give_back_vacated();
    bed.assert_at_rest();
}

#[test]
fn no_failing_call_of_a_trade_loses_a_byte() {
    with_every_call_failing(|bed, [whole, holed, huge]| {
        let mut swapper = bed.swapper();
        // There and on: each window gets the page in turn, and the last one gets pages that a swap left.
        for (from, to) in [(huge, whole), (whole, holed), (holed, huge)] {
            let _ = bed.vacate(&mut swapper, from);
            touch(bed, from, 150);
            let _ = bed.swap(&mut swapper, to);
            touch(bed, to, 150);
            let _ = bed.aside.serve();
        }
        swapper.give_back_vacated();
    });
}

#[test]
fn no_failing_call_of_two_trades_at_once_loses_a_byte() {
    with_every_call_failing(|bed, [whole, holed, huge]| {
        let other = WindowIndex::new(9);
        bed.add_cold(other);
        std::thread::scope(|scope| {
            let swappers = Swapper::several(&bed.aside, 2);
            for (mut swapper, (from, to)) in swappers.into_iter().zip([(huge, whole), (other, holed)]) {
                scope.spawn(move || {
                    let _ = bed.vacate(&mut swapper, from);
                    let _ = bed.swap(&mut swapper, to);
                });
            }
            [whole, holed, huge, other].into_iter().for_each(|window| touch(bed, window, 150));
            let _ = bed.aside.serve();
        });
    });
}

#[test]
fn a_trade_that_panics_loses_no_byte_and_keeps_no_slot() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    for _ in 0..ASIDE_SLOTS + 1 {
        bed.mover.while_copying(|| panic!("an injected panic"));
        catch_unwind(AssertUnwindSafe(|| bed.vacate(&mut swapper, COLD))).expect_err("it panics");
        bed.assert_at_rest();
        bed.mover.while_copying(|| ());
        assert_eq!(bed.vacate(&mut swapper, COLD), DONE);
        bed.mover.while_copying(|| panic!("an injected panic"));
        catch_unwind(AssertUnwindSafe(|| bed.swap(&mut swapper, HOT))).expect_err("it panics");
        assert!(!swapper.has_vacated(), "a page with a part of a copy is used for no other window");
        swapper.give_back_vacated();
        bed.assert_at_rest();
        bed.mover.make_huge(COLD);
    }
}

#[test]
fn no_window_of_a_moving_giant_or_with_pages_that_are_given_back_is_vacated() {
    let bed = Bed::with_a_pair();
    let mut swapper = bed.swapper();
    let giant = bed.claims.giant(Gpa::new(0)).unwrap();
    assert_eq!(bed.vacate(&mut swapper, COLD), OutcomeResult::Skipped(Skip::GiantUnderWay));
    drop(giant);
    let given_back = bed.claims.window_in_place(COLD).unwrap();
    assert_eq!(bed.vacate(&mut swapper, COLD), OutcomeResult::Refused(Refusal::Busy));
    drop(given_back);
    assert!(bed.is_huge(COLD));
    assert_eq!(bed.vacate(&mut swapper, COLD), DONE);
}
