//! Deciding at the page fault, on the running kernel. Without permission for userfaultfd these tests are skipped
//! with the reason; `WIDELEAF_REQUIRE=userfaultfd` turns the skip into a failure.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::faults::{
    self, AlteredHost, Meminfo, PATIENCE, VM, WORDS_PER_WINDOW, backing, join, mark, skip, touch, word,
};
use crate::turn_at_the_pools;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::first_touch::{FirstTouchError, RegisterError};
use wideleaf_memory::host::Advice;
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerError};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{FirstTouch, FirstTouchReport, GuestRam, Kernel, LinuxHost};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{Backing, Budget, Bytes, Moment, PageSize, Plan, Policy, Snapshot, VmId, WindowIndex};

fn map_of(layout: &[(Bytes, Bytes)], kind: BackingKind, page: PageSize) -> Arc<GuestRam> {
    faults::map_of(layout, BackingConfig::new(kind, page).unwrap())
}

fn map(windows: u64) -> Arc<GuestRam> {
    map_of(&[(Bytes::ZERO, mib(2) * windows)], BackingKind::Anon, PageSize::Base4K)
}

fn host() -> Arc<dyn Kernel> {
    Arc::new(LinuxHost::open().unwrap())
}

fn start(
    ram: &Arc<GuestRam>,
    decide: impl FnMut(VmId, WindowIndex) -> PageSize + Send + 'static,
) -> Result<FirstTouch, FirstTouchError> {
    FirstTouch::start(host(), vec![(VM, ram.clone())], None, decide)
}

fn even_windows_huge(_: VmId, window: WindowIndex) -> PageSize {
    if window.get().is_multiple_of(2) { PageSize::Huge2M } else { PageSize::Base4K }
}

fn in_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(work)
}

fn stop(service: FirstTouch) -> FirstTouchReport {
    let report = join(in_thread(move || service.stop()));
    let sum = report.answered_4k + report.answered_2m + report.answered_1g + report.huge_refused();
    assert_eq!(report.asked, sum, "{report:?}");
    report
}

#[test]
fn the_policy_is_asked_once_for_each_window_and_its_answer_is_used() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 32;
    const TOUCHED: u64 = 24;
    const PAGES: [usize; 3] = [3, 200, 511];
    let ram = map(WINDOWS);
    let asked = Arc::<Mutex<BTreeMap<u64, u64>>>::default();
    let service = {
        let asked = asked.clone();
        start(&ram, move |vm, window| {
            assert_eq!(vm, VM);
            *asked.lock().entry(window.get()).or_default() += 1;
            even_windows_huge(vm, window)
        })
        .unwrap()
    };
    // All threads touch all windows, each beginning at another one, each page by one thread.
    let begin = Arc::new(Barrier::new(PAGES.len()));
    let threads: Vec<_> = PAGES
        .into_iter()
        .enumerate()
        .map(|(number, page)| {
            let (ram, begin) = (ram.clone(), begin.clone());
            in_thread(move || {
                begin.wait();
                let first = number as u64 * TOUCHED / PAGES.len() as u64;
                (first..first + TOUCHED).map(|window| touch(&ram, window % TOUCHED, page)).sum::<u64>()
            })
        })
        .collect();
    assert_eq!(threads.into_iter().map(join).sum::<u64>(), 0, "memory that was never touched reads zero");
    assert_eq!(*asked.lock(), (0..TOUCHED).map(|window| (window, 1)).collect());
    for window in 0..TOUCHED {
        let expected = if window % 2 == 0 { (512, Backing::Huge2M) } else { (3, Backing::Base4K) };
        assert_eq!(backing(&ram, window), expected, "window {window}");
    }
    assert!((TOUCHED..WINDOWS).all(|window| backing(&ram, window) == (0, Backing::Unbacked)));

    let report = stop(service);
    assert_eq!((report.asked, report.answered_2m, report.answered_4k), (24, 12, 12), "{report:?}");
    assert_eq!((report.huge_refused(), report.zero_pages, &report.gave_up), (0, 0, &None));
    println!("an answer takes {} us (median); {report:?}", report.answer_ns.value_at_quantile(0.5) / 1000);
    for (window, page) in (0..TOUCHED).flat_map(|window| PAGES.map(|page| (window, page))) {
        assert_eq!(word(&ram, window, page).load(Ordering::Relaxed), mark(window, page));
    }
    assert_eq!(touch(&ram, TOUCHED, 0), 0, "after the end the kernel answers");
    assert_eq!(backing(&ram, TOUCHED), (1, Backing::Base4K));
}

#[test]
fn a_first_touch_that_only_reads_is_decided_too() {
    if skip() {
        return;
    }
    let ram = map(2);
    let service = start(&ram, even_windows_huge).unwrap();
    let sum = {
        let ram = ram.clone();
        join(in_thread(move || (0..2).map(|window| word(&ram, window, 9).load(Ordering::Relaxed)).sum::<u64>()))
    };
    let report = stop(service);
    assert_eq!((sum, report.asked), (0, 2));
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M), "not the huge zero page");
    assert_eq!(backing(&ram, 1), (0, Backing::Unbacked), "the zero page holds nothing");
}

#[test]
fn two_threads_at_one_window_ask_once() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 64;
    let ram = map(WINDOWS);
    let asked = Arc::new(AtomicU64::new(0));
    let service = {
        let asked = asked.clone();
        start(&ram, move |vm, window| {
            asked.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(200)); // so that the other one arrives during this decision
            even_windows_huge(vm, window)
        })
        .unwrap()
    };
    let both = Arc::new(Barrier::new(2));
    let threads = [7, 8].map(|page| {
        let (ram, both) = (ram.clone(), both.clone());
        in_thread(move || {
            for window in 0..WINDOWS {
                both.wait();
                assert_eq!(touch(&ram, window, page), 0);
            }
        })
    });
    threads.into_iter().for_each(join);
    let report = stop(service);
    println!("{report:?}");
    assert_eq!((asked.load(Ordering::Relaxed), report.asked), (WINDOWS, WINDOWS));
    assert_eq!(report.answered_4k, WINDOWS / 2, "{report:?}");
    for (window, page) in (0..WINDOWS).flat_map(|window| [(window, 7), (window, 8)]) {
        assert_eq!(word(&ram, window, page).load(Ordering::Relaxed), mark(window, page));
    }
}

#[test]
fn faults_of_the_kernel_are_decided_like_any_other() {
    if skip() {
        return;
    }
    // Populating faults through the same path as KVM_RUN does: get_user_pages, in kernel mode.
    let ram = map(4);
    let service = start(&ram, even_windows_huge).unwrap();
    let base = ram.base();
    join(in_thread(move || host().advise(base, mib(8), Advice::PopulateWrite).unwrap()));
    assert_eq!([0, 1, 2, 3].map(|window| backing(&ram, window)), {
        let (huge, base) = ((512, Backing::Huge2M), (512, Backing::Base4K));
        [huge, base, huge, base]
    });
    assert_eq!(stop(service).asked, 4);
}

#[test]
fn all_ranges_of_all_vms_are_served() {
    if skip() {
        return;
    }
    let first = map_of(&[(Bytes::ZERO, mib(4)), (gib(4), mib(4))], BackingKind::Anon, PageSize::Base4K);
    let second = map(2);
    let asked = Arc::<Mutex<Vec<(VmId, u64)>>>::default();
    let service = {
        let asked = asked.clone();
        let vms = vec![(VmId(0), first.clone()), (VmId(1), second.clone())];
        FirstTouch::start(host(), vms, None, move |vm, window| {
            asked.lock().push((vm, window.get()));
            PageSize::Huge2M
        })
        .unwrap()
    };
    {
        let (first, second) = (first.clone(), second.clone());
        join(in_thread(move || {
            first.words(first.ranges()[1])[WORDS_PER_WINDOW].store(1, Ordering::Relaxed);
            touch(&second, 1, 0);
            touch(&first, 0, 0);
        }));
    }
    stop(service);
    // 4 GiB is window 2048, the one behind it 2049.
    assert_eq!(*asked.lock(), [(VmId(0), 2049), (VmId(1), 1), (VmId(0), 0)]);
    assert_eq!(backing(&first, 2049), (512, Backing::Huge2M));
    assert_eq!(backing(&first, 2048), (0, Backing::Unbacked));
}

#[test]
fn stopping_lets_every_waiter_go() {
    if skip() {
        return;
    }
    // The policy is slow, and the service is stopped at its first question: one thread waits for the answer, the
    // others for their turn.
    const THREADS: u64 = 8;
    for end in [|service: FirstTouch| drop(service.stop()), |service: FirstTouch| drop(service)] {
        let ram = map(THREADS * 4);
        let (question, first_question) = mpsc::channel();
        let service = start(&ram, move |vm, window| {
            let _ = question.send(());
            std::thread::sleep(Duration::from_millis(50));
            even_windows_huge(vm, window)
        })
        .unwrap();
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let ram = ram.clone();
                in_thread(move || (0..4).map(|i| touch(&ram, thread * 4 + i, 0)).sum::<u64>())
            })
            .collect();
        first_question.recv_timeout(PATIENCE).unwrap();
        join(in_thread(move || end(service)));
        assert_eq!(threads.into_iter().map(join).sum::<u64>(), 0);
        for window in 0..THREADS * 4 {
            assert_eq!(word(&ram, window, 0).load(Ordering::Relaxed), mark(window, 0));
        }
    }
}

#[test]
fn starting_and_stopping_under_load_loses_no_thread() {
    if skip() {
        return;
    }
    const THREADS: u64 = 4;
    const WINDOWS_EACH: u64 = 64;
    let ram = map(THREADS * WINDOWS_EACH);
    let is_done = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let ram = ram.clone();
            in_thread(move || {
                for window in thread * WINDOWS_EACH..(thread + 1) * WINDOWS_EACH {
                    for page in (0..512).step_by(32) {
                        assert_eq!(touch(&ram, window, page), 0);
                        assert_eq!(word(&ram, window, page).load(Ordering::Relaxed), mark(window, page));
                    }
                    std::thread::sleep(Duration::from_micros(500)); // so that the service starts and stops many times
                }
            })
        })
        .collect();
    let cycles = {
        let (ram, is_done) = (ram.clone(), is_done.clone());
        in_thread(move || {
            let mut cycles = 0;
            while !is_done.load(Ordering::Relaxed) {
                let service = start(&ram, even_windows_huge).unwrap();
                std::thread::sleep(Duration::from_micros(200));
                assert_eq!(stop(service).gave_up, None);
                cycles += 1;
            }
            cycles
        })
    };
    for thread in threads {
        join(thread);
    }
    is_done.store(true, Ordering::Relaxed);
    println!("started and stopped {} times", join(cycles));
    for (window, page) in
        (0..THREADS * WINDOWS_EACH).flat_map(|window| (0..512).step_by(32).map(move |page| (window, page)))
    {
        assert_eq!(word(&ram, window, page).load(Ordering::Relaxed), mark(window, page));
    }
}

#[test]
fn a_policy_that_panics_leaves_the_memory_to_the_kernel() {
    if skip() {
        return;
    }
    let ram = map(4);
    let service = start(&ram, |_, _| panic!("this panic is part of the test")).unwrap();
    {
        let ram = ram.clone();
        assert_eq!(join(in_thread(move || (0..4).map(|window| touch(&ram, window, 1)).sum::<u64>())), 0);
    }
    let report = join(in_thread(move || service.stop()));
    assert_eq!(report.gave_up.as_deref(), Some("the policy panicked"));
    assert!((0..4).all(|window| backing(&ram, window) == (1, Backing::Base4K)));
}

#[test]
fn the_policy_is_not_asked_about_a_window_with_contents() {
    if skip() {
        return;
    }
    let ram = map(3);
    touch(&ram, 0, 5);
    assert_eq!(word(&ram, 1, 5).load(Ordering::Relaxed), 0, "a read: the zero page is there");
    let service = start(&ram, |_, _| PageSize::Huge2M).unwrap();
    {
        let ram = ram.clone();
        join(in_thread(move || {
            assert_eq!(word(&ram, 0, 5).load(Ordering::Relaxed), mark(0, 5), "a present page is not a first touch");
            for window in 0..3 {
                assert_eq!(touch(&ram, window, 6), 0);
            }
        }));
    }
    let report = stop(service);
    assert_eq!((report.asked, report.backed_before), (1, 2), "{report:?}");
    assert_eq!(word(&ram, 0, 5).load(Ordering::Relaxed), mark(0, 5), "and no word of it is lost");
    assert_eq!((backing(&ram, 0), backing(&ram, 1)), ((2, Backing::Base4K), (1, Backing::Base4K)));
    assert_eq!(backing(&ram, 2), (512, Backing::Huge2M));
}

/// The real host, with the next uses of this advice not passed on, with this errno (0: "done").
fn meddling(advice: Advice, times: u64, errno: i32) -> Arc<dyn Kernel> {
    AlteredHost::with_memory(Meminfo::AsItIs).swallowing(advice, times, errno)
}

/// Touches one window on this host, after the answer 2m.
fn touch_one_on(host: Arc<dyn Kernel>) -> (Arc<GuestRam>, FirstTouchReport) {
    let ram = map(1);
    let service = FirstTouch::start(host, vec![(VM, ram.clone())], None, |_, _| PageSize::Huge2M).unwrap();
    {
        let ram = ram.clone();
        assert_eq!(join(in_thread(move || touch(&ram, 0, 3))), 0);
    }
    let report = stop(service);
    assert_eq!(word(&ram, 0, 3).load(Ordering::Relaxed), mark(0, 3));
    (ram, report)
}

#[test]
fn an_advice_that_is_refused_is_counted_and_the_window_stays_at_base_pages() {
    if skip() {
        return;
    }
    let (ram, report) = touch_one_on(meddling(Advice::HugePage, u64::MAX, nix::errno::Errno::EINVAL as i32));
    assert_eq!(report.refused, BTreeMap::from([("refused_not_eligible", 1)]), "{report:?}");
    assert_eq!(backing(&ram, 0), (1, Backing::Base4K));
}

#[test]
fn if_the_fault_brings_no_huge_page_the_collapse_does() {
    if skip() {
        return;
    }
    // The first advice is dropped, so the fault meets a mapping for base pages; the collapse advises again. A page
    // on its way to an LRU list makes a collapse answer EAGAIN: then another window has to show it.
    const ATTEMPTS: u32 = 20;
    let mut attempts = (0..ATTEMPTS).map(|_| touch_one_on(meddling(Advice::HugePage, 1, 0)));
    let (ram, report) = attempts.find(|(_, report)| report.by_collapse == 1).expect("one of 20 is collapsed");
    assert_eq!((report.answered_2m, report.huge_refused()), (1, 0));
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M));
}

#[test]
fn without_a_huge_page_the_window_stays_at_base_pages() {
    if skip() {
        return;
    }
    // Every advice is dropped: the fault brings base pages, and the collapse is refused under the mark.
    let (ram, report) = touch_one_on(meddling(Advice::HugePage, u64::MAX, 0));
    assert_eq!(report.refused, BTreeMap::from([("refused_not_eligible", 1)]), "{report:?}");
    assert_eq!(backing(&ram, 0), (1, Backing::Base4K));
}

#[test]
fn unsuitable_memory_is_refused_with_the_reason() {
    if skip() {
        return;
    }
    let refuse = |kind, page| {
        let ram = map_of(&[(Bytes::ZERO, mib(2))], kind, page);
        start(&ram, |_, _| PageSize::Huge2M).expect_err("refused").to_string()
    };
    assert!(refuse(BackingKind::Memfd, PageSize::Huge2M).contains("starts with 2m pages"));
    assert!(refuse(BackingKind::Anon, PageSize::Huge2M).contains("starts with 2m pages"));
    let _turn = turn_at_the_pools();
    match HugetlbPools::of_this_machine().lease(PageSize::Huge2M, 1) {
        Ok(_lease) => assert!(refuse(BackingKind::Hugetlb, PageSize::Huge2M).contains("its pages have one size")),
        Err(error) => println!("skipped for hugetlb RAM: {error}"),
    }
}

#[test]
fn memory_with_a_service_is_refused_and_keeps_its_service() {
    if skip() {
        return;
    }
    let ram = map(2);
    let service = start(&ram, |_, _| PageSize::Huge2M).unwrap();
    let error = start(&ram, |_, _| PageSize::Base4K).expect_err("only one userfaultfd per mapping");
    assert!(matches!(error, FirstTouchError::Register(RegisterError { vm: VM, .. })), "{error}");
    {
        let ram = ram.clone();
        join(in_thread(move || touch(&ram, 1, 0)));
    }
    assert_eq!(stop(service).answered_2m, 1);
}

/// A policy that decides at the first touch and plans nothing.
struct AtTheFault;

impl Policy for AtTheFault {
    fn name(&self) -> &'static str {
        "at_the_fault"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {}

    fn decides_at_first_touch(&self) -> bool {
        true
    }

    fn first_touch(&mut self, vm: VmId, window: WindowIndex) -> PageSize {
        even_windows_huge(vm, window)
    }
}

#[test]
fn a_manager_asks_a_policy_that_decides_at_the_fault() {
    if skip() {
        return;
    }
    let ram = map(8);
    let vm = ManagedVm::new(VM, ram.clone(), None);
    let manager = Manager::spawn(host(), vec![vm], Box::new(AtTheFault), ManagerConfig::default()).unwrap();
    manager.activate();
    {
        let ram = ram.clone();
        join(in_thread(move || (0..6).map(|window| touch(&ram, window, 0)).sum::<u64>()));
    }
    let report = join(in_thread(move || manager.stop()));
    let counters: BTreeMap<_, _> = report.first_touch.as_ref().unwrap().by_name().collect();
    assert_eq!((counters["asked"], counters["answered_2m"], counters["answered_4k"]), (6, 3, 3));
    let last = report.samples[0].1.last().unwrap().host;
    assert_eq!((last.huge_2m, last.base_4k, last.unbacked), (mib(6), kib(12), mib(10) - kib(12)));
}

#[test]
fn a_manager_says_why_its_policy_cannot_decide_at_the_fault() {
    let ram = map_of(&[(Bytes::ZERO, mib(2))], BackingKind::Anon, PageSize::Huge2M);
    let unmapped = ManagedVm { ram: None, ..ManagedVm::new(VM, ram.clone(), None) };
    for (vm, why) in [(ManagedVm::new(VM, ram, None), "--host-page 4k"), (unmapped, "mapped in this process")] {
        let error = Manager::spawn(host(), vec![vm], Box::new(AtTheFault), ManagerConfig::default()).err().unwrap();
        assert!(matches!(error, ManagerError::FirstTouch { policy: "at_the_fault", .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn a_policy_that_does_not_decide_at_the_fault_costs_no_fault_anything() {
    let ram = map(1);
    let vm = ManagedVm::new(VM, ram, None);
    let never = wideleaf_policies::policy::by_name("never").unwrap().with_defaults();
    let manager = Manager::spawn(host(), vec![vm], never, ManagerConfig::default()).unwrap();
    assert!(manager.stop().first_touch.is_none());
}
