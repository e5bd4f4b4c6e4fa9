//! The service of reserved frames, called from the test's own thread: RAM is real, and one kind of call to its file
//! fails. Tests that need a userfaultfd are skipped with the reason.

use super::frames::GivenBack;
use super::reserving::{BREAKS_AT_ONCE, Pages};
use super::*;
use crate::faults::Service;
use nix::poll::PollTimeout;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use wideleaf_policies::units::kib;
use wideleaf_policies::{PageSet, WindowIndex};

#[test]
fn holes_are_the_reserved_pages_that_hold_nothing() {
    // page    0  1 ... 9  10  11 ... 510  511
    //         x  -     -   x   -       -   x
    let window = WindowIndex::new(3);
    let mut pages = Pages::default();
    for page in [0, 10, 511] {
        pages.populated.insert(page);
    }
    let hole = |first: u64, pages: u64| GpaRange::new(window.start() + kib(4) * first, kib(4) * pages).expect("fits");
    assert_eq!(pages.holes(window), [hole(1, 9), hole(11, 500)]);
    assert_eq!(Pages::default().holes(window), [hole(0, 512)]);
    pages.absent.insert(1);
    assert_eq!(pages.holes(window), [hole(2, 8), hole(11, 500)], "a page that was given back has no frame");
    pages.populated = PageSet::ALL;
    assert_eq!(pages.holes(window), []);
}

/// The file behind guest RAM, with one kind of call that always fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failing {
    Look,
    TakeWindow,
    /// The kernel takes base pages, without an error.
    OnePage,
    GiveBack,
}

impl Failing {
    fn fail(self, at: Failing) -> io::Result<()> {
        if self == at { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
    }
}

impl Frames for Failing {
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool> {
        self.fail(Failing::Look)?;
        FileFrames::default().has_nothing(ram, window)
    }

    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()> {
        self.fail(Failing::TakeWindow)?;
        FileFrames::default().take(ram, pages)
    }

    fn are_one_page(&mut self, _: &dyn Host, _: &GuestRam, _: WindowIndex) -> Option<bool> {
        if *self == Failing::OnePage { Some(false) } else { None }
    }

    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack {
        match self.fail(Failing::GiveBack) {
            Ok(()) => FileFrames::default().give_back(ram, pages),
            // Some of several holes are given back before it fails; a single one is not.
            Err(error) => {
                let (first, _) = pages.split_at(pages.len() / 2);
                GivenBack { refused: Some(error), ..FileFrames::default().give_back(ram, first) }
            }
        }
    }
}

/// Rules: large with all pages populated; the host is always short.
const ALWAYS_SHORT: ReservationRules =
    ReservationRules { threshold: 512, break_from: PerTenThousand::new(0), break_to: PerTenThousand::new(0) };

fn ram(windows: u64) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), PageSize::Huge2M.bytes() * windows).expect("fits");
    GuestRam::map(&[range], BackingConfig::reservable()).expect("memory")
}

/// A service in this thread, which answers nothing by itself. `None`, with the reason, without a userfaultfd.
fn reserving(ram: &Arc<GuestRam>, rules: ReservationRules, frames: Box<dyn Frames>) -> Option<Reserving> {
    let uffd = Userfaultfd::open_for_minor_faults().inspect_err(|error| println!("skipped: {error}")).ok()?;
    let host = Arc::new(LinuxHost::open().expect("there is /proc"));
    let vms = [(VmId(0), ram.clone())];
    Some(Reserving {
        faults: Faults::register(uffd, &vms, Mode::MissingOrMinor, State::Untouched).expect("free"),
        book: Reservations::new(rules),
        next_look_at_host: host.now(),
        not_given_back: Bytes::ZERO,
        counted: Counted::default(),
        requests: Requests::new().expect("a pipe"),
        host,
        frames,
    })
}

/// The word at the begin of a page of the first window.
fn word(ram: &GuestRam, page: usize) -> &AtomicU64 {
    &ram.words(ram.ranges()[0])[page * 512]
}

fn touch_page(service: &mut Reserving, ram: &GuestRam, page: u64) {
    let touch = service.faults.find(ram.base() + kib(4) * page).expect("it is RAM");
    service.answer(touch).expect("there is memory");
}

fn set_of(pages: impl IntoIterator<Item = u16>) -> PageSet {
    pages.into_iter().fold(PageSet::default(), |mut set, page| {
        set.insert(page);
        set
    })
}

#[test]
fn pages_that_cannot_be_punched_stay_in_their_reservation_and_lose_nothing_else() {
    let (ram, window) = (ram(1), WindowIndex::new(0));
    let Some(mut service) = reserving(&ram, ALWAYS_SHORT, Box::new(Failing::GiveBack)) else { return };
    for page in 0..5 {
        touch_page(&mut service, &ram, page);
        word(&ram, page as usize).store(page + 1, Ordering::Relaxed);
    }
    // Of the two holes the first is punched before the call fails.
    let error = service.give_back(VmId(0), window, set_of([0, 3])).expect_err("the second hole is refused");
    assert!(error.to_string().contains("FALLOC_FL_PUNCH_HOLE"), "{error}");
    assert_eq!((service.book.populated(VmId(0), window), service.book.absent(VmId(0), window)), (Some(5), 0));
    touch_page(&mut service, &ram, 0);
    let words = [0, 1, 2, 3, 4].map(|page| word(&ram, page).load(Ordering::Relaxed));
    assert_eq!(words, [0, 2, 3, 4, 5], "only a page that the guest gave back was cleared");
}

#[test]
fn a_window_loses_pages_gets_new_frames_for_them_and_ends_with_the_last_one() {
    let (ram, window) = (ram(1), WindowIndex::new(0));
    let Some(mut service) = reserving(&ram, ALWAYS_SHORT, Box::new(FileFrames::default())) else { return };
    for page in 0..4 {
        touch_page(&mut service, &ram, page);
        word(&ram, page as usize).store(page + 1, Ordering::Relaxed);
    }
    service.give_back(VmId(0), window, set_of([1, 2, 7])).expect("it can be punched");
    let of_book = |service: &Reserving| (service.book.populated(VmId(0), window), service.book.absent(VmId(0), window));
    assert_eq!(of_book(&service), (Some(2), 3));
    service.give_back(VmId(0), window, set_of([2, 7])).expect("there is nothing left to do");
    assert_eq!(of_book(&service), (Some(2), 3), "a page is given back once");
    touch_page(&mut service, &ram, 2);
    assert_eq!((of_book(&service), word(&ram, 2).load(Ordering::Relaxed)), ((Some(3), 2), 0));
    assert_eq!([0, 3].map(|page| word(&ram, page).load(Ordering::Relaxed)), [1, 4]);
    service.give_back(VmId(0), window, set_of([0, 2, 3])).expect("it can be punched");
    assert_eq!((of_book(&service), ram.file_bytes().expect("it is open")), ((None, 0), Bytes::ZERO));
    touch_page(&mut service, &ram, 9);
    assert_eq!(of_book(&service), (Some(1), 0), "reserved anew");
    assert_eq!(service.counted.read(|report| (report.reserved, report.ended)), (2, 1));
}

#[test]
fn pages_outside_ram_are_refused() {
    let ram = ram(1);
    let Some(mut service) = reserving(&ram, ALWAYS_SHORT, Box::new(FileFrames::default())) else { return };
    assert!(service.give_back(VmId(0), WindowIndex::new(1), PageSet::ALL).is_err());
    assert!(service.give_back(VmId(1), WindowIndex::new(0), PageSet::ALL).is_err());
}

#[test]
fn a_shortage_breaks_a_few_reservations_between_answers_and_the_oldest_first() {
    const WINDOWS: u64 = BREAKS_AT_ONCE as u64 * 2 + 2;
    let ram = ram(WINDOWS);
    let Some(mut service) = reserving(&ram, ALWAYS_SHORT, Box::new(FileFrames::default())) else { return };
    for window in (0..WINDOWS).rev().map(WindowIndex::new) {
        let touch = service.faults.find_window(VmId(0), window).expect("it is RAM");
        service.answer(touch).expect("there is memory");
    }
    for left in [BREAKS_AT_ONCE + 2, 2, 0] {
        assert_eq!(service.patience(), PollTimeout::ZERO, "it continues as soon as waiting threads are answered");
        service.between_answers();
        let queue: Vec<_> = service.book.queue().map(|(_, window)| window.get() as usize).collect();
        assert_eq!(queue, (0..left).rev().collect::<Vec<_>>(), "reserved last to first, and broken in that order");
    }
    assert_eq!(service.patience(), PollTimeout::NONE, "nothing is left to break");
}

#[test]
fn the_last_partial_reservation_that_ends_leaves_none_in_the_report() {
    let (ram, window) = (ram(1), WindowIndex::new(0));
    let rules = ReservationRules { break_from: PerTenThousand::new(10_000), ..ALWAYS_SHORT };
    let Some(mut service) = reserving(&ram, rules, Box::new(FileFrames::default())) else { return };
    touch_page(&mut service, &ram, 0);
    let partial = |service: &Reserving| service.counted.read(|report| report.partial_by_age.iter().sum::<u64>());
    service.between_answers();
    assert_eq!((partial(&service), service.patience() == PollTimeout::NONE), (1, false));
    service.give_back(VmId(0), window, set_of([0])).expect("it can be punched");
    service.between_answers();
    assert_eq!((partial(&service), service.patience()), (0, PollTimeout::NONE), "no later look will come");
}

/// Touches the first page of a window of such a service, and waits until it has broken the reservation, if
/// there is one.
fn touched_with(failing: Failing) -> Option<ReservedFramesReport> {
    let ram = ram(1);
    let host = Arc::new(LinuxHost::open().expect("there is /proc"));
    let vms = vec![(VmId(0), ram.clone())];
    let service = match ReservedFrames::start_with(host, vms, ALWAYS_SHORT, Box::new(failing)) {
        Ok(service) => service,
        Err(error) => {
            println!("skipped: {error}");
            return None;
        }
    };
    let word = &ram.words(ram.ranges()[0])[0];
    let touch = |word: &AtomicU64| word.swap(42, Ordering::Relaxed);
    assert_eq!(std::thread::scope(|scope| scope.spawn(|| touch(word)).join()).expect("it writes"), 0);
    /// A minute, in milliseconds: a thread that waits longer waits for ever.
    const LOOKS_MAX: usize = 60_000;
    let is_over = || failing != Failing::GiveBack || !service.report().refused.is_empty();
    assert!((0..LOOKS_MAX).any(|_| is_over() || {
        std::thread::sleep(Duration::from_millis(1));
        false
    }));
    let report = service.stop();
    assert_eq!(word.load(Ordering::Relaxed), 42);
    Some(report)
}

#[test]
fn without_free_frames_base_pages_are_used() {
    let Some(report) = touched_with(Failing::TakeWindow) else { return };
    assert_eq!((report.reserved, report.refused["refused_no_huge_page"], report.gave_up), (0, 1, None));
}

#[test]
fn a_reservation_without_a_huge_page_fails_and_holds_no_frames() {
    let Some(report) = touched_with(Failing::OnePage) else { return };
    assert_eq!((report.reserved, report.p_failures, report.gave_up), (0, 1, None));
    assert_eq!((report.populated, report.unpopulated), (0, Bytes::ZERO));
}

#[test]
fn a_file_that_cannot_be_read_ends_the_service_and_no_thread_waits() {
    let Some(report) = touched_with(Failing::Look) else { return };
    assert!(report.gave_up.is_some_and(|why| why.contains("os error 12")));
}

#[test]
fn frames_that_cannot_be_given_back_are_counted_and_the_window_is_let_go() {
    let Some(report) = touched_with(Failing::GiveBack) else { return };
    assert_eq!((report.reserved, report.broken, report.refused["refused_no_huge_page"]), (1, 0, 1), "{report:?}");
    // One page was touched, and the hole after it was not given back: it still counts as in use.
    assert_eq!((report.given_back, report.unpopulated), (Bytes::ZERO, kib(4) * 511), "{report:?}");
}
