//! Guest RAM on reserved frames, on the running kernel. Without permission for userfaultfd these tests are skipped
//! with the reason; `WIDELEAF_REQUIRE=userfaultfd` turns the skip into a failure. Without `CAP_SYS_ADMIN` they pass
//! too, with promotions that copy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::faults::{AlteredHost, Meminfo, VM, backing, join, map_of, mark, skip, touch, wait_for, word};
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerError, RESERVATION};
use wideleaf_memory::reserved_frames::{self, ReservedFramesError};
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::{GuestRam, LinuxHost, ReservedFrames, ReservedFramesReport};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{
    Backing, Bytes, Gpa, GpaRange, PageSize, PerTenThousand, PolicyChoice, ReservationRules, VmId,
};

fn map(windows: u64) -> Arc<GuestRam> {
    map_of(&[(Bytes::ZERO, mib(2) * windows)], BackingConfig::reservable())
}

/// Rules: a window becomes large with `threshold` pages; reservations are broken from 85 % of host memory on.
fn rules(threshold: u16) -> ReservationRules {
    ReservationRules { threshold, break_from: PerTenThousand::of(85, 100), break_to: PerTenThousand::of(70, 100) }
}

const MUCH: &str = "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n";
const PLENTY: Meminfo = Meminfo::Says(MUCH);
/// All memory is in use, so that everything that can be given back must be.
const SHORT: Meminfo = Meminfo::Says("MemTotal: 1000000 kB\nMemAvailable: 0 kB\n");

fn host() -> Arc<AlteredHost> {
    Arc::new(AlteredHost::with_memory(PLENTY))
}

fn start(ram: &Arc<GuestRam>, threshold: u16) -> ReservedFrames {
    ReservedFrames::start(host(), vec![(VM, ram.clone())], rules(threshold)).unwrap()
}

/// Touches these pages in a thread of its own, and waits for it; all read zero before.
fn touch_all(ram: &Arc<GuestRam>, window: u64, pages: impl Iterator<Item = usize> + Send + 'static) {
    let ram = ram.clone();
    assert_eq!(join(std::thread::spawn(move || pages.map(|page| touch(&ram, window, page)).sum::<u64>())), 0);
}

fn holds_marks(ram: &GuestRam, window: u64, mut pages: impl Iterator<Item = usize>) -> bool {
    pages.all(|page| word(ram, window, page).load(Ordering::Relaxed) == mark(window, page))
}

fn stop(service: ReservedFrames) -> ReservedFramesReport {
    let report = join(std::thread::spawn(move || service.stop()));
    assert_eq!(report.gave_up, None, "{report:?}");
    println!("an answer takes {} us (median); {report:?}", report.answer_ns.value_at_quantile(0.5) / 1000);
    report
}

#[test]
fn a_window_becomes_large_with_its_last_page_and_a_partly_filled_one_never() {
    if skip() {
        return;
    }
    let ram = map(3);
    let service = start(&ram, 512);
    touch_all(&ram, 0, 0..511);
    assert_eq!(backing(&ram, 0), (511, Backing::Base4K), "one page is missing");
    assert_eq!(service.report().unpopulated, kib(4));
    touch_all(&ram, 0, 511..512);
    touch_all(&ram, 1, (0..512).step_by(2));
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M));
    assert_eq!(backing(&ram, 1), (256, Backing::Base4K));
    assert_eq!(backing(&ram, 2), (0, Backing::Unbacked));
    let report = stop(service);
    assert_eq!((report.reserved, report.populated, report.promoted), (2, 768, 1), "{report:?}");
    assert_eq!((report.unpopulated, report.unpopulated_at_most), (mib(1), mib(2) - kib(4)));
    assert!(holds_marks(&ram, 0, 0..512) && holds_marks(&ram, 1, (0..512).step_by(2)));
    touch_all(&ram, 1, (1..512).step_by(2)); // after the end the kernel answers
}

/// Asserts that no window was collapsed, where this process may make a file of huge folios.
fn assert_nothing_was_copied(report: &ReservedFramesReport) {
    match reserved_frames::probe() {
        Ok(_) => assert_eq!(report.by_collapse, 0, "{report:?}"),
        Err(why) => println!("skipped, in part: {why}"),
    }
}

#[test]
fn frames_that_lie_together_are_not_copied() {
    if skip() {
        return;
    }
    let ram = map(4);
    let service = start(&ram, 64);
    (0..4).for_each(|window| touch_all(&ram, window, 0..64));
    assert!((0..4).all(|window| backing(&ram, window) == (512, Backing::Huge2M)));
    let report = stop(service);
    assert_eq!((report.promoted, report.unpopulated), (4, Bytes::ZERO));
    assert_nothing_was_copied(&report);
}

#[test]
fn two_threads_in_the_same_windows_lose_nothing() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 16;
    let ram = map(WINDOWS);
    let service = start(&ram, 512);
    let both = Arc::new(Barrier::new(2));
    // The same pages from both ends: each is written by both threads, with the same word.
    let orders: [fn(usize) -> usize; 2] = [|page| page, |page| 511 - page];
    let threads = orders.map(|order| {
        let (ram, both) = (ram.clone(), both.clone());
        std::thread::spawn(move || {
            for window in 0..WINDOWS {
                both.wait();
                for page in (0..512).map(order) {
                    let before = touch(&ram, window, page);
                    assert!(before == 0 || before == mark(window, page), "{before:#x} in page {page} of {window}");
                }
            }
        })
    });
    threads.into_iter().for_each(join);
    assert!((0..WINDOWS).all(|window| holds_marks(&ram, window, 0..512)));
    let report = stop(service);
    assert_eq!((report.reserved, report.promoted, report.populated), (WINDOWS, WINDOWS, WINDOWS * 512), "{report:?}");
    assert!((0..WINDOWS).all(|window| backing(&ram, window) == (512, Backing::Huge2M)));
}

#[test]
fn a_shortage_gives_back_only_untouched_frames() {
    if skip() {
        return;
    }
    let ram = map(3);
    let host = host();
    let service = ReservedFrames::start(host.clone(), vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 0, 0..512);
    touch_all(&ram, 1, (0..512).step_by(2));
    touch_all(&ram, 2, 7..8);
    *host.meminfo.lock() = SHORT;
    wait_for("the second break", || service.report().broken == 2);
    let report = service.report();
    assert_eq!(report.unpopulated, Bytes::ZERO, "{report:?}");
    assert_eq!(report.given_back, mib(1) + mib(2) - kib(4), "{report:?}");
    assert!(holds_marks(&ram, 0, 0..512) && holds_marks(&ram, 1, (0..512).step_by(2)) && holds_marks(&ram, 2, 7..8));
    // Frames that were given back read zero and come as base pages; a broken window stays small even when full.
    touch_all(&ram, 1, (1..512).step_by(2));
    assert_eq!((backing(&ram, 0), backing(&ram, 1)), ((512, Backing::Huge2M), (512, Backing::Base4K)));
    assert!(holds_marks(&ram, 1, 0..512));
    assert_eq!(stop(service).promoted, 1);
}

/// A guest's way to give back memory.
fn give_back(ram: &Arc<GuestRam>) -> GiveBack {
    GiveBack::new(Arc::new(LinuxHost::open().unwrap()), ram.clone()).unwrap()
}

fn gpa(window: u64, page: u64) -> Gpa {
    Gpa::new(0) + mib(2) * window + kib(4) * page
}

fn pages(window: u64, pages: std::ops::Range<u64>) -> GpaRange {
    GpaRange::new(gpa(window, pages.start), kib(4) * (pages.end - pages.start)).unwrap()
}

/// Memory that the file behind guest RAM has, by the process's own count of shared memory in these ranges.
fn resident(ram: &GuestRam) -> (Bytes, Bytes) {
    let smaps = LinuxHost::open().unwrap().read_text("/proc/self/smaps").unwrap();
    let memory = resident_memory(&smaps, &[(ram.base(), ram.bytes())]).unwrap();
    (memory.guest_ram, memory.guest_ram_thp)
}

#[test]
fn a_large_window_that_loses_pages_is_demoted_and_becomes_large_again_when_it_is_full() {
    if skip() {
        return;
    }
    let ram = map(2);
    let service = start(&ram, 512);
    (0..2).for_each(|window| touch_all(&ram, window, 0..512));
    assert_eq!(resident(&ram), (mib(4), mib(4)));
    let balloon = give_back(&ram);
    balloon.inflate((3..10).map(|page| gpa(0, page)));
    assert_eq!((backing(&ram, 0), backing(&ram, 1)), ((505, Backing::Base4K), (512, Backing::Huge2M)));
    assert_eq!(resident(&ram), (mib(4) - kib(28), mib(2)), "the others are mapped again at once");
    assert!(holds_marks(&ram, 0, (0..3).chain(10..512)) && holds_marks(&ram, 1, 0..512));
    let report = service.report();
    assert_eq!((report.promoted, report.demoted, report.freed_for_guest), (2, 1, kib(28)), "{report:?}");
    let counters = ram.given_back().counters();
    assert_eq!((counters.released, counters.kept, counters.failed, counters.busy), (7, 0, 0, 0));
    // Reported pages of the same window, then the guest uses all of them again: they read zero.
    balloon.report(pages(0, 100..200));
    assert_eq!(backing(&ram, 0), (405, Backing::Base4K));
    balloon.deflate((3..10).map(|page| gpa(0, page)));
    touch_all(&ram, 0, (3..10).chain(100..199));
    assert_eq!(backing(&ram, 0), (511, Backing::Base4K), "one is missing");
    touch_all(&ram, 0, 199..200);
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M));
    assert!(holds_marks(&ram, 0, 0..512) && holds_marks(&ram, 1, 0..512));
    assert_eq!(resident(&ram), (mib(4), mib(4)));
    let report = stop(service);
    assert_eq!((report.reserved, report.promoted, report.demoted, report.ended), (2, 3, 1, 0), "{report:?}");
    assert_eq!((report.by_collapse, report.unpopulated), (1, Bytes::ZERO), "new frames, so a copy: {report:?}");
}

#[test]
fn a_window_that_is_given_back_whole_leaves_memory_and_is_reserved_anew() {
    if skip() {
        return;
    }
    let ram = map(3);
    let service = start(&ram, 512);
    (0..2).for_each(|window| touch_all(&ram, window, 0..512));
    touch_all(&ram, 2, 0..100);
    let balloon = give_back(&ram);
    balloon.report(pages(0, 0..512));
    // The balloon's driver gives it in pieces; the last one takes the untouched frames with it.
    for part in [pages(2, 0..60), pages(2, 60..100)] {
        balloon.report(part);
    }
    assert_eq!([0, 1, 2].map(|window| backing(&ram, window).0), [0, 512, 0]);
    let report = service.report();
    assert_eq!((report.demoted, report.ended, report.freed_for_guest), (1, 2, mib(4)), "{report:?}");
    assert_eq!(report.unpopulated, Bytes::ZERO);
    [0, 2].into_iter().for_each(|window| touch_all(&ram, window, 0..512));
    assert!((0..3).all(|window| backing(&ram, window) == (512, Backing::Huge2M)));
    assert!((0..3).all(|window| holds_marks(&ram, window, 0..512)));
    let report = stop(service);
    assert_eq!((report.reserved, report.promoted, report.demoted), (5, 4, 1), "{report:?}");
    assert_nothing_was_copied(&report);
}

#[test]
fn untouched_pages_that_the_guest_gives_back_take_their_frames_along() {
    if skip() {
        return;
    }
    let ram = map(1);
    let service = start(&ram, 64);
    touch_all(&ram, 0, 0..10);
    let balloon = give_back(&ram);
    balloon.report(pages(0, 5..105));
    let report = service.report();
    assert_eq!((report.freed_for_guest, report.unpopulated), (kib(400), kib(4) * (512 - 105)), "{report:?}");
    touch_all(&ram, 0, (5..50).chain(105..200));
    assert_eq!(backing(&ram, 0), (145, Backing::Base4K), "a large page would take 55 pages again");
    touch_all(&ram, 0, 50..105);
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M));
    assert!(holds_marks(&ram, 0, 0..200));
    assert_eq!(stop(service).promoted, 1);
}

#[test]
fn a_broken_reservation_is_made_again_once_the_guest_gave_back_its_pages() {
    if skip() {
        return;
    }
    let ram = map(1);
    let host = host();
    let service = ReservedFrames::start(host.clone(), vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 0, 0..100);
    *host.meminfo.lock() = SHORT;
    wait_for("a break", || service.report().broken == 1);
    *host.meminfo.lock() = PLENTY;
    let balloon = give_back(&ram);
    balloon.report(pages(0, 0..99));
    touch_all(&ram, 0, 200..300);
    assert_eq!(service.report().reserved, 1, "it has pages");
    // Read first: the break has split the folio, and its pages are mapped by their next touch.
    assert!(holds_marks(&ram, 0, (99..100).chain(200..300)));
    assert_eq!(backing(&ram, 0), (101, Backing::Base4K));
    balloon.report(pages(0, 0..512));
    assert_eq!(backing(&ram, 0), (0, Backing::Unbacked));
    touch_all(&ram, 0, 0..512);
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M));
    let report = stop(service);
    assert_eq!((report.reserved, report.broken, report.promoted, report.demoted), (2, 1, 1, 0), "{report:?}");
}

#[test]
fn pressure_breaks_the_reservation_populated_longest_ago_first_and_no_large_one() {
    if skip() {
        return;
    }
    let ram = map(4);
    let host = host();
    let service = ReservedFrames::start(host.clone(), vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 3, 0..512);
    touch_all(&ram, 0, 0..10);
    touch_all(&ram, 1, 0..10);
    std::thread::sleep(Duration::from_millis(5));
    touch_all(&ram, 0, 10..20); // to the tail
    wait_for("both by age", || service.report().partial_by_age.iter().sum::<u64>() == 2);
    // 70 % of 10 000 kB in use is the aim: after one break of 502 pages and its 2008 kB there is enough.
    *host.meminfo.lock() = Meminfo::SaysOnce("MemTotal: 10000 kB\nMemAvailable: 1400 kB\n", MUCH);
    wait_for("a break", || service.report().broken == 1);
    touch_all(&ram, 0, 20..512);
    touch_all(&ram, 1, 10..512);
    let backings = [0, 1, 3].map(|window| backing(&ram, window).1);
    assert_eq!(backings, [Backing::Huge2M, Backing::Base4K, Backing::Huge2M]);
    assert!([0, 1, 3].into_iter().all(|window| holds_marks(&ram, window, 0..512)));
    assert_eq!(stop(service).broken, 1);
}

#[test]
fn without_a_service_given_back_pages_go_as_those_of_ordinary_memory_do() {
    if skip() {
        return;
    }
    let ram = map(2);
    let service = start(&ram, 512);
    (0..2).for_each(|window| touch_all(&ram, window, 0..512));
    stop(service);
    let balloon = give_back(&ram);
    balloon.report(pages(0, 0..512));
    balloon.inflate((0..10).map(|page| gpa(1, page)));
    assert_eq!((backing(&ram, 0).0, backing(&ram, 1)), (0, (512, Backing::Huge2M)));
    assert!(holds_marks(&ram, 1, 0..512));
    touch_all(&ram, 0, 0..512);
}

#[test]
fn threads_that_use_memory_while_their_neighbours_and_their_own_pages_are_given_back_lose_nothing() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 4;
    /// Pages that stay in use in each window; the others are given back again and again.
    const KEPT: std::ops::Range<usize> = 200..300;
    const ROUNDS: u64 = 40;
    let ram = map(WINDOWS);
    let service = start(&ram, 512);
    (0..WINDOWS).for_each(|window| touch_all(&ram, window, 0..512));
    let is_over = Arc::new(AtomicBool::new(false));
    let user = {
        let (ram, is_over) = (ram.clone(), is_over.clone());
        // Counts up in the kept pages: a lost write would show at once.
        std::thread::spawn(move || {
            let mut turns = 0_u64;
            while turns == 0 || !is_over.load(Ordering::Relaxed) {
                for (window, page) in (0..WINDOWS).flat_map(|window| KEPT.map(move |page| (window, page))) {
                    let expected = if turns == 0 { mark(window, page) } else { turns };
                    assert_eq!(word(&ram, window, page).swap(turns + 1, Ordering::Relaxed), expected);
                }
                turns += 1;
            }
            turns
        })
    };
    let intruder = {
        let (ram, is_over) = (ram.clone(), is_over.clone());
        // Touches pages that are being given back: each reads zero, or what was written.
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                for (window, page) in (0..WINDOWS).flat_map(|window| [3, 77, 500].map(|page| (window, page))) {
                    let before = touch(&ram, window, page);
                    assert!(before == 0 || before == mark(window, page), "{before:#x}");
                }
            }
        })
    };
    let balloon = give_back(&ram);
    let giver = {
        let (ram, balloon) = (ram.clone(), balloon);
        std::thread::spawn(move || {
            for round in 0..ROUNDS {
                let window = round % WINDOWS;
                balloon.report(pages(window, 0..200));
                balloon.report(pages(window, 300..512));
                // All of it is used again, and the window becomes large again.
                (0..200).chain(300..512).for_each(|page| {
                    touch(&ram, window, page);
                });
            }
        })
    };
    join(giver);
    is_over.store(true, Ordering::Relaxed);
    let (turns, ()) = (join(user), join(intruder));
    assert!(
        (0..WINDOWS)
            .all(|window| KEPT.into_iter().all(|page| word(&ram, window, page).load(Ordering::Relaxed) == turns))
    );
    let report = stop(service);
    println!("{turns} turns");
    assert!(report.promoted > WINDOWS && report.demoted > 0, "{report:?}");
    let large = (0..WINDOWS).filter(|window| backing(&ram, *window).1 == Backing::Huge2M).count() as u64;
    assert_eq!(report.promoted - report.demoted, large, "{report:?}");
    assert!(!report.refused.contains_key("refused_other"), "{report:?}");
}

#[test]
fn without_a_reading_of_the_host_nothing_is_broken_and_that_is_counted() {
    if skip() {
        return;
    }
    let ram = map(1);
    let host = host();
    *host.meminfo.lock() = Meminfo::Absent;
    let service = ReservedFrames::start(host, vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 0, 0..1);
    wait_for("a look", || service.report().refused.contains_key("refused_other"));
    assert_eq!(stop(service).broken, 0);
}

#[test]
fn a_window_with_contents_gets_no_reservation() {
    if skip() {
        return;
    }
    let ram = map(2);
    touch(&ram, 0, 5);
    let service = start(&ram, 1);
    touch_all(&ram, 0, 6..7);
    touch_all(&ram, 1, 6..7);
    let report = stop(service);
    assert_eq!((report.backed_before, report.reserved, report.promoted), (1, 1, 1), "{report:?}");
    assert_eq!((backing(&ram, 0), backing(&ram, 1)), ((2, Backing::Base4K), (512, Backing::Huge2M)));
    assert!(holds_marks(&ram, 0, 5..7));
}

#[test]
fn a_promotion_that_is_refused_leaves_base_pages_and_is_counted() {
    if skip() {
        return;
    }
    let ram = map(1);
    let refusing =
        AlteredHost::with_memory(PLENTY).swallowing(Advice::HugePage, u64::MAX, nix::errno::Errno::EINVAL as i32);
    let service = ReservedFrames::start(refusing, vec![(VM, ram.clone())], rules(2)).unwrap();
    touch_all(&ram, 0, 0..4);
    let report = stop(service);
    assert_eq!((report.promoted, report.refused["refused_not_eligible"]), (0, 1), "{report:?}");
    assert_eq!(backing(&ram, 0), (4, Backing::Base4K));
    assert!(holds_marks(&ram, 0, 0..4));
}

#[test]
fn faults_of_the_kernel_are_served_and_every_range_of_every_vm() {
    if skip() {
        return;
    }
    // Populating faults through the same path as KVM_RUN does: get_user_pages, in kernel mode.
    let first = map_of(&[(Bytes::ZERO, mib(4)), (gib(4), mib(4))], BackingConfig::reservable());
    let second = map(1);
    let vms = vec![(VmId(0), first.clone()), (VmId(1), second.clone())];
    let service = ReservedFrames::start(host(), vms, rules(512)).unwrap();
    for start in [first.ranges()[1].hva + mib(2), second.base()] {
        join(std::thread::spawn(move || host().advise(start, mib(2), Advice::PopulateWrite).unwrap()));
    }
    assert_eq!((backing(&first, 2049), backing(&second, 0)), ((512, Backing::Huge2M), (512, Backing::Huge2M)));
    assert_eq!((backing(&first, 2048), backing(&first, 1)), ((0, Backing::Unbacked), (0, Backing::Unbacked)));
    assert_eq!(stop(service).reserved, 2);
}

#[test]
fn starting_and_stopping_under_load_loses_no_thread() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 48;
    let ram = map(WINDOWS);
    let toucher = {
        let ram = ram.clone();
        std::thread::spawn(move || {
            for window in 0..WINDOWS {
                for page in 0..512 {
                    assert_eq!(touch(&ram, window, page), 0);
                }
            }
        })
    };
    let mut cycles = 0;
    while !toucher.is_finished() {
        let service = start(&ram, 64);
        std::thread::sleep(Duration::from_micros(500));
        stop(service);
        cycles += 1;
    }
    join(toucher);
    println!("started and stopped {cycles} times");
    assert!((0..WINDOWS).all(|window| holds_marks(&ram, window, 0..512)));
}

#[test]
fn unsuitable_ram_is_refused_with_the_remedy() {
    for (kind, page) in [(BackingKind::Memfd, PageSize::Base4K), (BackingKind::Anon, PageSize::Base4K)] {
        let ram = map_of(&[(Bytes::ZERO, mib(2))], BackingConfig::new(kind, page).unwrap());
        let error = ReservedFrames::start(host(), vec![(VM, ram)], rules(512)).expect_err("refused");
        assert!(matches!(error, ReservedFramesError::NotReservable(VM)), "{error}");
        assert!(error.to_string().contains("use --backing memfd"), "{error}");
    }
}

#[test]
fn a_manager_serves_a_policy_that_reserves_or_says_why_it_cannot() {
    let reservation = || PolicyChoice::parse("reservation:threshold=64").unwrap().make();
    let anonymous = map_of(&[(Bytes::ZERO, mib(2))], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap());
    let unmapped = ManagedVm { ram: None, ..ManagedVm::new(VM, map(1), None) };
    for (vm, why) in [(ManagedVm::new(VM, anonymous, None), "--backing memfd"), (unmapped, "mapped in this process")] {
        let error = Manager::spawn(host(), vec![vm], reservation(), ManagerConfig::default()).err().unwrap();
        assert!(matches!(error, ManagerError::ReservedFrames { policy: "reservation", .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
    if skip() {
        return;
    }
    let ram = map(4);
    let vm = ManagedVm::new(VM, ram.clone(), None);
    let manager = Manager::spawn(host(), vec![vm], reservation(), ManagerConfig::default()).unwrap();
    manager.activate();
    touch_all(&ram, 0, 0..64);
    touch_all(&ram, 1, 0..63);
    wait_for("the counters of the service", || {
        let outcomes = &manager.live().outcomes;
        let of = |name| outcomes.get(&(RESERVATION, name)).copied();
        manager.activate();
        (of("reserved"), of("promoted"), of("demoted")) == (Some(2), Some(1), None)
    });
    let report = join(std::thread::spawn(move || manager.stop()));
    let frames = report.reserved_frames.unwrap();
    assert_eq!((frames.reserved, frames.promoted, frames.unpopulated), (2, 1, mib(2) - kib(252)), "{frames:?}");
    let last = report.samples[0].1.last().unwrap().host;
    assert_eq!((last.huge_2m, last.base_4k), (mib(2), kib(252)), "merely reserved frames are not resident");
}
