//! The largest page at the first touch, on the running kernel: 1 GiB from a pool, 2 MiB of a file, and what becomes of
//! them. Ordinary memory stands for giant pages in the tests of all that may go wrong; one test takes a real one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use crate::faults::{self, AlteredHost, VM, backing, join, mark, skip, touch, wait_for, word};
use crate::turn_at_the_pools;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::first_touch::{GiantSource, PageCounts, PagesNow, place_before_loading};
use wideleaf_memory::giant_maker::GiantMaker;
use wideleaf_memory::kernel::GiantMappings as _;
use wideleaf_memory::numa::placement::NodePolicy;
use wideleaf_memory::pool::{HugetlbPools, NotMade};
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_memory::{FirstTouch, FirstTouchReport, GuestRam, Kernel, LinuxHost};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSize, VmId, WindowIndex};

const WINDOWS_PER_GIANT: u64 = 512;

fn anon(bytes: Bytes) -> Arc<GuestRam> {
    faults::map_of(&[(Bytes::ZERO, bytes)], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap())
}

fn host() -> Arc<dyn Kernel> {
    Arc::new(LinuxHost::open().unwrap())
}

/// A pool of giant pages with this number of free ones, in files of the test.
fn pool(free: u64) -> (tempfile::TempDir, HugetlbPools) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB");
    std::fs::create_dir_all(&folder).unwrap();
    for (name, value) in
        [("nr_hugepages", free), ("free_hugepages", free), ("resv_hugepages", 0), ("surplus_hugepages", 0)]
    {
        std::fs::write(folder.join(name), format!("{value}\n")).unwrap();
    }
    let pools = HugetlbPools::at(root.path());
    (root, pools)
}

fn always(size: PageSize) -> impl FnMut(VmId, WindowIndex) -> PageSize + Send + 'static {
    move |_, _| size
}

/// The service over `ram`, with every answer 1g.
fn giants(kernel: Arc<dyn Kernel>, ram: &Arc<GuestRam>, source: GiantSource) -> FirstTouch {
    FirstTouch::start(kernel, vec![(VM, ram.clone())], Some(source), always(PageSize::Giant1G)).unwrap()
}

fn in_thread<T: Send + 'static>(
    ram: &Arc<GuestRam>,
    work: impl FnOnce(&GuestRam) -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let ram = ram.clone();
    std::thread::spawn(move || work(&ram))
}

fn stop(service: FirstTouch) -> FirstTouchReport {
    let report = join(std::thread::spawn(move || service.stop()));
    let sum = report.answered_4k + report.answered_2m + report.answered_1g + report.huge_refused();
    assert_eq!((report.asked, &report.gave_up), (sum, &None), "{report:?}");
    report
}

/// Touches a page of some windows of a giant, all of which must read zero, and checks every mark afterwards.
fn touches(ram: &Arc<GuestRam>, windows: impl IntoIterator<Item = u64>) {
    let windows: Vec<u64> = windows.into_iter().collect();
    let threads: Vec<_> = windows.iter().copied().map(|w| in_thread(ram, move |ram| touch(ram, w, 7))).collect();
    assert_eq!(threads.into_iter().map(join).sum::<u64>(), 0, "memory that was never touched reads zero");
    for window in windows {
        assert_eq!(word(ram, window, 7).load(Ordering::Relaxed), mark(window, 7), "window {window}");
    }
}

/// Makes a giant page when the test says so.
#[derive(Debug)]
struct Prompted(Mutex<Receiver<Result<GiantFile, NotMade>>>);

impl GiantMaker for Prompted {
    fn left(&self) -> u64 {
        1
    }

    fn make(&self, _: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
        self.0.lock().recv().unwrap_or_else(|_| Err(NotMade::elsewhere("other", "the test has ended")))
    }
}

fn prompted() -> (Sender<Result<GiantFile, NotMade>>, Arc<dyn GiantMaker>) {
    let (prompt, prompts) = channel();
    (prompt, Arc::new(Prompted(Mutex::new(prompts))))
}

#[test]
fn threads_all_over_an_untouched_giant_find_one_page_there() {
    if skip() {
        return;
    }
    let (_root, pools) = pool(2);
    let ram = anon(gib(2) + mib(4));
    let service = giants(Arc::new(AlteredHost::with_ordinary_giants()), &ram, GiantSource { pools, maker: None });
    touches(&ram, [3, 77, 300, 511]);
    assert!(
        ram.claims().is_on_giant_page(WindowIndex::new(0)) && !ram.claims().is_on_giant_page(WindowIndex::new(512))
    );
    touches(&ram, [600]);
    // Behind the second giant: no whole giant of RAM.
    touches(&ram, [1024]);
    let report = stop(service);
    assert_eq!((report.asked, report.answered_1g, report.answered_2m), (3, 2, 1), "{report:?}");
    assert_eq!(report.giant_refused, BTreeMap::from([("giant_not_all_ram", 1)]));
    assert_eq!(report.regions[0].at_first, PageCounts { windows_4k: 0, windows_2m: 1, giants: 2 });
    assert_eq!(backing(&ram, 1024), (512, Backing::Huge2M));
}

#[test]
fn a_page_in_the_making_keeps_only_its_own_giant_waiting() {
    if skip() {
        return;
    }
    let (_root, pools) = pool(0);
    let (prompt, maker) = prompted();
    let kernel = Arc::new(AlteredHost::with_ordinary_giants());
    // Window 512 is the begin of a giant that is not all RAM.
    let ram = anon(gib(1) + mib(4));
    let service = giants(kernel.clone(), &ram, GiantSource { pools, maker: Some(maker) });
    let waiting: Vec<_> = [1, 200].map(|window| in_thread(&ram, move |ram| touch(ram, window, 7))).into();
    wait_for("the touches", || service.report().regions[0].faults >= 2);
    touches(&ram, [512]);
    assert!(waiting.iter().all(|thread| !thread.is_finished()), "they wait for the page");
    assert!(prompt.send(Ok(kernel.create_giant().unwrap())).is_ok());
    assert_eq!(waiting.into_iter().map(join).sum::<u64>(), 0);
    for window in [1, 200] {
        assert_eq!(word(&ram, window, 7).load(Ordering::Relaxed), mark(window, 7));
    }
    let report = stop(service);
    assert_eq!((report.asked, report.answered_1g, report.answered_2m), (2, 1, 1), "{report:?}");
    assert_eq!((report.giant_pages_made, report.waited_for_giant), (1, 1));
}

#[test]
fn without_a_page_the_touches_of_a_giant_get_huge_pages_and_the_reason_is_counted_once() {
    if skip() {
        return;
    }
    let ram = anon(gib(1));
    let (_root, pools) = pool(0);
    let (prompt, maker) = prompted();
    assert!(prompt.send(Err(NotMade::elsewhere("no_room", "no room"))).is_ok());
    let service = giants(host(), &ram, GiantSource { pools, maker: Some(maker) });
    touches(&ram, [0, 1, 2]);
    let report = stop(service);
    assert_eq!((report.asked, report.answered_2m), (3, 3), "{report:?}");
    assert_eq!(report.giant_refused, BTreeMap::from([("giant_not_made", 1)]));
    assert_eq!(report.regions[0].refused, report.giant_refused);
    let now = PagesNow { pages_2m: 3, ..PagesNow::default() };
    assert_eq!((report.regions[0].at_first.windows_2m, report.regions[0].now), (3, Some(now)));
}

#[test]
fn a_giant_with_a_touched_or_given_back_part_is_no_first_touch() {
    if skip() {
        return;
    }
    let ram = anon(gib(2));
    touch(&ram, 9, 0);
    ram.given_back().book().inflate(Gpa::new(0) + gib(1) + mib(8));
    let (_root, pools) = pool(2);
    let service = giants(host(), &ram, GiantSource { pools, maker: None });
    touches(&ram, [0, 9, WINDOWS_PER_GIANT]);
    let report = stop(service);
    assert_eq!(report.giant_refused, BTreeMap::from([("giant_touched", 1), ("giant_given_back", 1)]));
    assert_eq!((report.answered_2m, report.backed_before), (2, 1), "{report:?}");
    assert_eq!(word(&ram, 9, 0).load(Ordering::Relaxed), mark(9, 0));
}

#[test]
fn a_giant_that_cannot_be_mapped_is_mapped_anew_and_every_touch_answered() {
    if skip() {
        return;
    }
    let ram = anon(gib(1));
    let (_root, pools) = pool(1);
    let kernel = Arc::new(AlteredHost::with_ordinary_giants());
    kernel.map_over_fails.store(1, Ordering::Relaxed);
    let service = giants(kernel, &ram, GiantSource { pools, maker: None });
    touches(&ram, [5, 6, 500]);
    let report = stop(service);
    assert_eq!(report.giant_refused, BTreeMap::from([("giant_not_mapped", 1)]), "{report:?}");
    assert_eq!((report.answered_1g, report.huge_refused()), (0, 1));
    assert_eq!([5, 6, 500].map(|window| backing(&ram, window)), [(1, Backing::Base4K); 3]);
    assert!(!ram.claims().is_on_giant_page(WindowIndex::new(0)));
}

#[test]
fn stopping_lets_the_waiters_of_a_giant_go() {
    if skip() {
        return;
    }
    for end in [|service: FirstTouch| drop(service.stop()), |service: FirstTouch| drop(service)] {
        let ram = anon(gib(1));
        let (_root, pools) = pool(0);
        let (_prompt, maker) = prompted();
        let service = giants(host(), &ram, GiantSource { pools, maker: Some(maker) });
        let waiting: Vec<_> = [1, 2, 3].map(|window| in_thread(&ram, move |ram| touch(ram, window, 7))).into();
        wait_for("the touches", || service.report().regions[0].faults >= 3);
        join(std::thread::spawn(move || end(service)));
        assert_eq!(waiting.into_iter().map(join).sum::<u64>(), 0);
        assert_eq!(backing(&ram, 2), (1, Backing::Base4K), "the kernel answered");
    }
}

#[test]
fn a_giant_of_the_pool_is_there_at_the_first_touch_and_goes_back_to_the_pool() {
    if skip() {
        return;
    }
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    let Ok(before) = pools.status(PageSize::Giant1G) else {
        println!("skipped: no hugetlb pool of 1g pages in this kernel");
        return;
    };
    let lease = match pools.lease(PageSize::Giant1G, 1) {
        Ok(lease) => lease,
        Err(error) => {
            let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|word| word == "hugetlb1g"), "WIDELEAF_REQUIRE={required}, and {error}");
            println!("skipped: {error}");
            return;
        }
    };
    let ram = anon(gib(1));
    let service = giants(host(), &ram, GiantSource { pools: pools.clone(), maker: None });
    touches(&ram, [0, 100, 511]);
    let report = stop(service);
    if report.giant_refused.contains_key("giant_too_late") {
        println!("skipped: this host needs more than 10 s to clear a page of 1 GiB");
        return;
    }
    let now = PagesNow { pages_1g: 1, ..PagesNow::default() };
    assert_eq!((report.answered_1g, report.regions[0].now), (1, Some(now)), "{report:?}");
    drop((ram, lease));
    assert_eq!(pools.status(PageSize::Giant1G).unwrap(), before);
}

#[test]
fn a_giant_is_put_there_before_a_loader_touches_it_and_the_service_leaves_it() {
    if skip() {
        return;
    }
    let kernel: Arc<dyn Kernel> = Arc::new(AlteredHost::with_ordinary_giants());
    let (_root, pools) = pool(1);
    let source = GiantSource { pools, maker: None };
    let ram = anon(gib(1) + mib(4));
    place_before_loading(kernel.as_ref(), &ram, Gpa::new(0), &source).unwrap();
    assert_eq!(touch(&ram, 17, 3), 0, "the loader writes");
    let service = giants(kernel, &ram, source);
    touches(&ram, [0, 511, 513]);
    let report = stop(service);
    assert_eq!((report.giant_before, report.asked, report.answered_2m), (1, 1, 1), "{report:?}");
    assert_eq!(report.regions[0].at_first, PageCounts { windows_4k: 0, windows_2m: 1, giants: 1 });
    assert_eq!(word(&ram, 17, 3).load(Ordering::Relaxed), mark(17, 3));
}

#[test]
fn a_window_demoted_by_its_guest_stays_on_base_pages_for_good() {
    if skip() {
        return;
    }
    let ram = anon(mib(4));
    let service = FirstTouch::start(host(), vec![(VM, ram.clone())], None, always(PageSize::Huge2M)).unwrap();
    touches(&ram, [0, 1]);
    assert_eq!([0, 1].map(|window| backing(&ram, window)), [(512, Backing::Huge2M); 2]);
    // The touches go on before the service has looked at their windows; it would make a split one huge again.
    wait_for("both answers", || service.report().answered_2m == 2);
    // The guest fills the window, so that a split finds no zero page, and gives an eighth of it back.
    (1..512).for_each(|page| _ = touch(&ram, 1, page));
    let given: Vec<Gpa> = (0..64).map(|page| Gpa::new(0) + mib(2) + kib(4) * page).collect();
    let give_back = GiveBack::new(Arc::new(LinuxHost::open().unwrap()), ram.clone()).unwrap();
    ram.given_back().set_short(true);
    give_back.inflate(given.iter().copied());
    assert_eq!(backing(&ram, 1), (512 - 64, Backing::Base4K));
    let demoted = |report: &FirstTouchReport| report.regions[0].now.unwrap().demoted_2m;
    assert_eq!(demoted(&service.report()), 1);
    // It takes them again, and all of the window is in use: still no huge page.
    give_back.deflate(given);
    (0..64).for_each(|page| assert_eq!(touch(&ram, 1, page), 0, "released"));
    assert_eq!(backing(&ram, 1), (512, Backing::Base4K));
    // All of it goes and comes back: the mark stays.
    let all = (0..512).map(|page| Gpa::new(0) + mib(2) + kib(4) * page);
    give_back.inflate(all.clone());
    assert_eq!(backing(&ram, 1), (0, Backing::Unbacked));
    give_back.deflate(all);
    assert_eq!(touch(&ram, 1, 0), 0);
    assert_eq!(backing(&ram, 1), (1, Backing::Base4K));
    let report = stop(service);
    assert_eq!((demoted(&report), report.regions[0].at_first.windows_2m), (1, 2), "{report:?}");
    assert_eq!(backing(&ram, 0), (512, Backing::Huge2M), "its neighbour");
}

/// Touches windows of memfd RAM: even ones are answered 2m, odd ones 4k, and window 4 was touched before.
fn touch_file(config: BackingConfig) -> (Arc<GuestRam>, FirstTouchReport) {
    let ram = faults::map_of(&[(Bytes::ZERO, mib(12))], config);
    touch(&ram, 4, 9);
    let even_huge = |_, window: WindowIndex| {
        if window.get().is_multiple_of(2) { PageSize::Huge2M } else { PageSize::Base4K }
    };
    let service = FirstTouch::start(host(), vec![(VM, ram.clone())], None, even_huge).unwrap();
    touches(&ram, [0, 1, 2, 4]);
    let report = stop(service);
    assert_eq!((report.asked, report.answered_4k, report.answered_2m), (3, 1, 2), "{report:?}");
    assert_eq!((report.backed_before, report.huge_refused()), (1, 0), "{report:?}");
    assert_eq!([0, 2].map(|window| backing(&ram, window)), [(512, Backing::Huge2M); 2]);
    assert_eq!([1, 3, 5].map(|window| backing(&ram, window).0), [1, 0, 0]);
    assert_eq!(word(&ram, 4, 9).load(Ordering::Relaxed), mark(4, 9), "no word of it is lost");
    assert_eq!(touch(&ram, 5, 0), 0, "after the end the kernel answers");
    (ram, report)
}

#[test]
fn a_file_of_huge_folios_gives_whole_windows_at_the_fault_without_a_copy() {
    if skip() {
        return;
    }
    let (ram, report) = touch_file(BackingConfig::of_huge_folios());
    println!("{report:?}");
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: no file of huge folios without root");
        return;
    }
    assert_eq!(report.by_collapse, 0, "{report:?}");
    assert_eq!(
        backing(&ram, 1),
        (1, Backing::Base4K),
        "a file of huge folios gives base pages where they are asked for"
    );
}

#[test]
fn windows_of_an_ordinary_memfd_become_huge_too() {
    if skip() {
        return;
    }
    let (_, report) = touch_file(BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap());
    println!("{report:?}");
}

#[test]
fn memfd_ram_has_no_giants_and_says_so() {
    if skip() {
        return;
    }
    let ram = faults::map_of(&[(Bytes::ZERO, gib(1))], BackingConfig::of_huge_folios());
    let (_root, pools) = pool(1);
    let service = giants(host(), &ram, GiantSource { pools, maker: None });
    touches(&ram, [0, 1]);
    let report = stop(service);
    assert_eq!((report.answered_2m, report.giant_refused["giant_not_anonymous"]), (2, 1), "{report:?}");
    let why = place_before_loading(&AlteredHost::with_ordinary_giants(), &ram, Gpa::new(0), &source_of(1)).unwrap_err();
    assert!(why.contains("only anonymous RAM on 4k pages"), "{why}");
}

fn source_of(free: u64) -> GiantSource {
    GiantSource { pools: pool(free).1, maker: None }
}

/// The bounds of a range of RAM in the report are those of the RAM.
#[test]
fn each_range_of_each_vm_has_its_own_counts() {
    if skip() {
        return;
    }
    let layout = [(Bytes::ZERO, mib(4)), (gib(4), mib(4))];
    let first = faults::map_of(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap());
    let second = faults::map_of(&[(Bytes::ZERO, mib(4))], BackingConfig::of_huge_folios());
    let vms = vec![(VmId(0), first.clone()), (VmId(1), second.clone())];
    let service = FirstTouch::start(host(), vms, None, always(PageSize::Huge2M)).unwrap();
    touches(&first, [0]);
    touches(&second, [0, 1]);
    let report = stop(service);
    let of = |start: Bytes, bytes| GpaRange::new(Gpa::new(0) + start, bytes).unwrap();
    let seen: Vec<_> = report.regions.iter().map(|r| (r.vm.0, r.gpa, r.at_first.windows_2m, r.faults > 0)).collect();
    let expected = [
        (0, of(Bytes::ZERO, mib(4)), 1, true),
        (0, of(gib(4), mib(4)), 0, false),
        (1, of(Bytes::ZERO, mib(4)), 2, true),
    ];
    assert_eq!(seen, expected);
}
