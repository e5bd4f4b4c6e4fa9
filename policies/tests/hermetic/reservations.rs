//! Reserved frames: when a reservation becomes large, and which are broken for a shortage.

use wideleaf_policies::policy::{POLICIES, PolicyInfo, RamStart};
use wideleaf_policies::reservations::LeftPages;
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Bytes, HostMemory, Moment, Reservations, VmId, WindowIndex};

use crate::drawn::{Desk, of, seconds, used, vm};

/// The reservations under `choice`, with windows of VM 0 reserved in this order, a second apart.
fn reserved(choice: &str, windows: &[u64]) -> Reservations {
    let mut book = Reservations::new(Desk::new(choice).0.reserves().expect("it reserves"));
    for (second, window) in (0..).zip(windows) {
        book.reserve(VmId(0), WindowIndex::new(*window), seconds(second));
    }
    book
}

/// No limit on the number of reservations that may be broken at once.
const ALL: usize = usize::MAX;

fn queue(book: &Reservations) -> Vec<u64> {
    book.queue().map(|(_, window)| window.get()).collect()
}

/// Touches `pages` more pages of a window of VM 0. Returns whether it becomes large.
fn touch(book: &mut Reservations, window: u64, pages: u16, at: u64) -> bool {
    book.populate(VmId(0), WindowIndex::new(window), pages, seconds(at))
}

#[test]
fn only_one_policy_reserves_frames_and_it_plans_nothing() {
    let reserving = |info: &&PolicyInfo| info.with_defaults().reserves().is_some();
    let names: Vec<_> = POLICIES.iter().filter(reserving).map(|info| info.name).collect();
    let mut desk = Desk::new("reservation");
    assert_eq!((names, desk.0.ram_start()), (vec!["reservation"], RamStart::OnReservableFrames));
    assert_eq!(desk.plan(&of(vec![vm(0, "fsh")]), seconds(1)), []);
}

#[test]
fn a_reservation_becomes_large_with_its_512th_page_and_leaves_the_queue() {
    let mut book = reserved("reservation", &[3]);
    let large: Vec<u16> = (1..=512).filter(|_| touch(&mut book, 3, 1, 1)).collect();
    assert_eq!(large, [512]);
    assert_eq!((queue(&book), book.unpopulated()), (vec![], Bytes::ZERO));
}

#[test]
fn a_partly_filled_window_never_becomes_large() {
    let mut book = reserved("reservation", &[3]);
    assert!(!touch(&mut book, 3, 511, 1));
    assert_eq!((queue(&book), book.unpopulated()), (vec![3], kib(4)));
}

#[test]
fn with_a_threshold_of_64_the_64th_page_makes_it_large() {
    let mut book = reserved("reservation:threshold=64", &[3]);
    assert_eq!([63, 1, 1].map(|pages| touch(&mut book, 3, pages, 1)), [false, true, false]);
}

/// `4 1 9`, then 4 is touched: `1 9 4`, then 1 within the tick in which it was queued: no change.
#[test]
fn a_change_puts_a_reservation_at_the_tail_once_a_tick() {
    let mut book = reserved("reservation", &[4, 1, 9]);
    assert_eq!(queue(&book), [4, 1, 9]);
    touch(&mut book, 4, 1, 3);
    assert_eq!(queue(&book), [1, 9, 4]);
    touch(&mut book, 1, 1, 1);
    assert_eq!(queue(&book), [1, 9, 4]);
}

#[test]
fn a_shortage_breaks_the_reservations_changed_longest_ago_and_no_more_than_needed() {
    let mut book = reserved("reservation", &[4, 1, 9]);
    touch(&mut book, 4, 100, 3);
    // 2048 MiB, of which 1741 are in use (85 %): 614 must become free again, as 70 % is 1434
    let short =
        |available| Some(HostMemory { total: mib(2048), available, giant_pages_free: 0, ..HostMemory::default() });
    assert_eq!(book.to_break(short(mib(308)), ALL), [], "84.96 % is not yet short");
    let broken: Vec<_> = book.to_break(short(mib(307)), ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!(broken, [1, 9, 4], "all of them; the one touched last comes last");
    let mut book = reserved("reservation:break_from=85,break_to=85", &[4, 1, 9]);
    let broken: Vec<_> = book.to_break(short(mib(304)), ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!((broken, queue(&book)), (vec![4, 1], vec![9]), "308 MiB are enough");
    assert_eq!(book.unpopulated(), mib(2));
    assert_eq!(book.populated(VmId(0), WindowIndex::new(4)), None, "a broken reservation is no longer kept");
}

/// Rounds of two; after the first round 9 is touched and 7 reserved.
#[test]
fn rounds_of_breaking_follow_the_current_order_of_the_queue() {
    let mut book = reserved("reservation", &[4, 1, 9, 2]);
    let round =
        |book: &mut Reservations| book.to_break(used(99), 2).iter().map(|(_, window)| window.get()).collect::<Vec<_>>();
    assert_eq!((round(&mut book), queue(&book)), (vec![4, 1], vec![9, 2]));
    assert_eq!(book.unpopulated(), mib(4), "reservations that are not broken yet stay");
    touch(&mut book, 9, 1, 3);
    book.reserve(VmId(0), WindowIndex::new(7), seconds(4));
    assert_eq!([round(&mut book), round(&mut book)], [vec![2, 9], vec![7]]);
}

#[test]
fn without_the_hosts_memory_no_reservation_is_broken() {
    let mut book = reserved("reservation", &[4]);
    assert_eq!(book.to_break(used(99), ALL).len(), 1, "the host is still short");
    book.reserve(VmId(0), WindowIndex::new(1), Moment::START);
    assert_eq!(book.to_break(None, ALL), []);
    assert_eq!(book.to_break(used(99), ALL).len(), 1);
}

#[test]
fn a_large_window_is_never_broken() {
    let mut book = reserved("reservation", &[4]);
    assert_eq!(book.to_break(None, ALL), []);
    assert!(touch(&mut book, 4, 512, 1));
    assert_eq!(book.to_break(used(99), ALL), []);
}

/// Gives back `populated` populated and `unpopulated` reserved pages of a window of VM 0. Returns whether it is still
/// reserved.
fn give_back(book: &mut Reservations, window: u64, populated: u16, unpopulated: u16, at: u64) -> bool {
    book.depopulate(VmId(0), WindowIndex::new(window), LeftPages { populated, unpopulated }, seconds(at))
}

#[test]
fn giving_pages_back_makes_a_reservation_partial_and_the_last_page_ends_it() {
    let window = WindowIndex::new(4);
    let mut book = reserved("reservation", &[4, 1]);
    assert!(touch(&mut book, 4, 512, 2));
    assert!(give_back(&mut book, 4, 2, 0, 3));
    assert_eq!((queue(&book), book.unpopulated()), (vec![1, 4], mib(2)), "their two frames are the host's");
    assert_eq!((book.populated(VmId(0), window), book.absent(VmId(0), window)), (Some(510), 2));
    book.refill(VmId(0), window, 2);
    assert_eq!(book.unpopulated(), mib(2) + kib(8));
    assert!(touch(&mut book, 4, 2, 4), "it is large again with the last page");
    assert!(!give_back(&mut book, 4, 512, 0, 5), "it is reserved no more");
    assert_eq!((book.populated(VmId(0), window), book.unpopulated()), (None, mib(2)));
    book.reserve(VmId(0), window, seconds(6));
}

#[test]
fn a_window_with_pages_given_back_is_not_large_before_they_are_used_again() {
    let mut book = reserved("reservation:threshold=64", &[4]);
    assert!(!touch(&mut book, 4, 60, 1));
    assert!(give_back(&mut book, 4, 1, 3, 2));
    assert_eq!(book.unpopulated(), kib(4) * (512 - 60 - 3));
    assert!(!touch(&mut book, 4, 100, 3), "159 pages are populated, but a large page would take the four again");
    book.refill(VmId(0), WindowIndex::new(4), 4);
    assert!(touch(&mut book, 4, 4, 4));
}

#[test]
fn what_the_guest_touched_while_a_window_was_large_counts_as_populated() {
    let mut book = reserved("reservation:threshold=64", &[4]);
    assert!(touch(&mut book, 4, 64, 1));
    book.demote(VmId(0), WindowIndex::new(4), seconds(2));
    assert_eq!((book.populated(VmId(0), WindowIndex::new(4)), book.unpopulated()), (Some(512), Bytes::ZERO));
    assert!(give_back(&mut book, 4, 500, 0, 3), "12 pages are left that the guest may use");
    assert!(!give_back(&mut book, 4, 12, 0, 4));
}

/// Given-back frames are the host's already: breaking `4` frees 512 - 100 - 300 pages, and a window that was given
/// back whole has no turn any more.
#[test]
fn breaking_counts_only_frames_that_are_still_reserved() {
    let mut book = reserved("reservation:break_from=85,break_to=85", &[4, 1, 9]);
    touch(&mut book, 4, 400, 1);
    assert!(give_back(&mut book, 4, 300, 0, 1));
    touch(&mut book, 1, 1, 1);
    assert!(!give_back(&mut book, 1, 1, 0, 1));
    touch(&mut book, 9, 1, 3);
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 9], kib(4) * (112 + 511)));
    // 2048 MiB, of which 1741 are 85 %: 307 MiB must be available, and 304 are; 4 adds 0.4 MiB, and 9 adds 2.
    let short =
        Some(HostMemory { total: mib(2048), available: mib(304), giant_pages_free: 0, ..HostMemory::default() });
    let broken: Vec<_> = book.to_break(short, ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!((broken, book.unpopulated()), (vec![4, 9], Bytes::ZERO));
}

/// A window that was large and lost some pages to a balloon has no unused frame.
#[test]
fn a_reservation_that_would_free_nothing_is_not_broken_and_becomes_large_again() {
    let mut book = reserved("reservation", &[4, 1]);
    assert!(touch(&mut book, 4, 512, 1));
    assert!(give_back(&mut book, 4, 100, 0, 2));
    touch(&mut book, 1, 1, 3);
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 1], kib(4) * 511));
    assert_eq!(book.to_break(used(99), ALL), [(VmId(0), WindowIndex::new(1))]);
    assert_eq!(book.to_break(used(99), ALL), [], "the host is still short");
    book.refill(VmId(0), WindowIndex::new(4), 100);
    assert_eq!(book.to_break(used(50), ALL), [], "its frames are unused, but the host has enough");
    assert!(touch(&mut book, 4, 100, 4));
}

#[test]
fn partial_reservations_are_counted_by_the_time_since_their_last_change() {
    let mut book = reserved("reservation", &[4, 1, 9, 2, 5]);
    assert!(touch(&mut book, 2, 512, 50), "a large window is not partial");
    touch(&mut book, 9, 1, 99);
    touch(&mut book, 1, 1, 70);
    // at 100: 9 changed a second ago, 1 30 seconds ago, 4 and 5 at 0 and 4
    assert_eq!(book.partial_by_age(seconds(100)), [0, 1, 1, 2]);
    assert_eq!(book.partial_by_age(seconds(99)), [1, 0, 1, 2]);
}

/// A window that was broken, or never became large, has no reservation: it may get a new one.
#[test]
fn a_reservation_that_ended_can_be_made_again() {
    let mut book = reserved("reservation", &[4, 1]);
    book.end(VmId(0), WindowIndex::new(4));
    book.end(VmId(0), WindowIndex::new(77));
    assert_eq!((queue(&book), book.unpopulated()), (vec![1], mib(2)));
    assert_eq!(book.to_break(used(99), ALL).len(), 1);
    for window in [4, 1] {
        book.reserve(VmId(0), WindowIndex::new(window), seconds(5));
    }
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 1], mib(4)));
}
