//! Guest RAM on reserved frames, on the kernel this runs on. Without permission for userfaultfd these tests are skipped with
//! the reason; `WIDELEAF_REQUIRE=userfaultfd` turns the skip into a failure. Without `CAP_SYS_ADMIN` they pass too, with
//! promotions that copy.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod faults;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use faults::{Meddling, Meminfo, VM, backing, join, map_of, mark, skip, touch, wait_for, word};
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerError};
use wideleaf_memory::reserved_frames::{self, ReservedFramesError};
use wideleaf_memory::{GuestRam, ReservedFrames, ReservedFramesReport};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{Backing, Bytes, PageSize, PerTenThousand, PolicyChoice, ReservationRules, VmId};

fn map(windows: u64) -> Arc<GuestRam> {
    map_of(&[(Bytes::ZERO, mib(2) * windows)], BackingConfig::reservable())
}

/// Large with so many pages; broken from 85 % of host memory on.
fn rules(threshold: u16) -> ReservationRules {
    ReservationRules { threshold, break_from: PerTenThousand::of(85, 100), break_to: PerTenThousand::of(70, 100) }
}

const PLENTY: Meminfo = Meminfo::Says("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n");
/// All of it is in use, so that everything must be given back that can be.
const SHORT: Meminfo = Meminfo::Says("MemTotal: 1000000 kB\nMemAvailable: 0 kB\n");

fn host() -> Arc<Meddling> {
    Arc::new(Meddling::with_memory(PLENTY))
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
    match reserved_frames::probe() {
        Ok(_) => assert_eq!(report.by_collapse, 0, "{report:?}"),
        Err(why) => println!("skipped, in part: {why}"),
    }
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
fn a_shortage_gives_back_what_was_never_touched_and_nothing_else() {
    if skip() {
        return;
    }
    let ram = map(3);
    let host = host();
    let service = ReservedFrames::start(host.clone(), vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 0, 0..512);
    touch_all(&ram, 1, (0..512).step_by(2));
    touch_all(&ram, 2, 7..8);
    *host.meminfo.lock().unwrap() = SHORT;
    wait_for("the second break", || service.report().broken == 2);
    let report = service.report();
    assert_eq!(report.unpopulated, Bytes::ZERO, "{report:?}");
    assert_eq!(report.given_back, mib(1) + mib(2) - kib(4), "{report:?}");
    assert!(holds_marks(&ram, 0, 0..512) && holds_marks(&ram, 1, (0..512).step_by(2)) && holds_marks(&ram, 2, 7..8));
    // What was given back reads zero and comes as base pages; even full, a broken window stays small.
    touch_all(&ram, 1, (1..512).step_by(2));
    assert_eq!((backing(&ram, 0), backing(&ram, 1)), ((512, Backing::Huge2M), (512, Backing::Base4K)));
    assert!(holds_marks(&ram, 1, 0..512));
    assert_eq!(stop(service).promoted, 1);
}

#[test]
fn without_a_look_at_the_host_nothing_is_broken_and_that_is_counted() {
    if skip() {
        return;
    }
    let ram = map(1);
    let host = host();
    *host.meminfo.lock().unwrap() = Meminfo::Absent;
    let service = ReservedFrames::start(host, vec![(VM, ram.clone())], rules(512)).unwrap();
    touch_all(&ram, 0, 0..1);
    wait_for("a look", || service.report().refused.contains_key("refused_other"));
    assert_eq!(stop(service).broken, 0);
}

#[test]
fn a_window_with_something_in_it_gets_no_reservation() {
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
        Meddling::with_memory(PLENTY).swallowing(Advice::HugePage, u64::MAX, nix::errno::Errno::EINVAL as i32);
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
fn ram_that_was_not_mapped_for_it_is_refused_with_the_remedy() {
    for (kind, page) in [(BackingKind::Memfd, PageSize::Base4K), (BackingKind::Anon, PageSize::Base4K)] {
        let ram = map_of(&[(Bytes::ZERO, mib(2))], BackingConfig::new(kind, page).unwrap());
        let error = ReservedFrames::start(host(), vec![(VM, ram)], rules(512)).expect_err("refused");
        assert!(matches!(error, ReservedFramesError::NotReservable(VM)), "{error}");
        assert!(error.to_string().contains("use --backing memfd"), "{error}");
    }
}

#[test]
fn a_manager_serves_a_policy_that_reserves_and_says_why_where_it_can_not() {
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
    let report = join(std::thread::spawn(move || manager.stop()));
    let frames = report.reserved_frames.unwrap();
    assert_eq!((frames.reserved, frames.promoted, frames.unpopulated), (2, 1, mib(2) - kib(252)), "{frames:?}");
    let last = report.samples[0].1.last().unwrap().host;
    assert_eq!((last.huge_2m, last.base_4k), (mib(2), kib(252)), "what is reserved only is not resident");
}
