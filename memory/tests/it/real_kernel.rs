//! The mechanisms on the running kernel. Tests that it cannot run are skipped with a reason; `WIDELEAF_REQUIRE` (a
//! list, here `hugetlb` and `hugetlb1g`) turns such a skip into a failure.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::{collapse_in_some_attempts, steady_backing, turn_at_the_pools};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig};
use wideleaf_memory::pool::{Granted, HugetlbPools, OnShortage, PoolLease, Request};
use wideleaf_memory::{GuestRam, Kernel, LinuxHost};
use wideleaf_policies::geometry::is_congruent;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, OutcomeResult, PageSize, Skip, VmId, WindowIndex, policy};

fn range(start: Bytes, bytes: Bytes) -> GpaRange {
    GpaRange::new(Gpa::new(start.get()), bytes).unwrap()
}

fn map(layout: &[GpaRange], kind: BackingKind, page: PageSize) -> Arc<GuestRam> {
    GuestRam::map(layout, BackingConfig::new(kind, page).unwrap()).unwrap()
}

fn populate(ram: &GuestRam) {
    prefault(&LinuxHost::open().unwrap(), ram.ranges(), 2, &|_| ControlFlow::Continue(())).unwrap();
}

fn backing(ram: &GuestRam, window: u64) -> (u16, Backing) {
    let fixed = (ram.backing().kind() == BackingKind::Hugetlb).then_some(ram.backing().start_page());
    steady_backing(&LinuxHost::open().unwrap(), ram.ranges()[0], fixed, WindowIndex::new(window))
}

/// A lease of pool pages, or `None` with the reason to skip printed.
fn lease(size: PageSize, pages: u64, requirement: &str) -> Option<PoolLease> {
    match HugetlbPools::of_this_machine().lease(size, pages) {
        Ok(lease) => Some(lease),
        Err(error) => {
            let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == requirement), "WIDELEAF_REQUIRE={required}, and {error}");
            println!("skipped: {error}");
            None
        }
    }
}

#[test]
fn guest_and_host_addresses_are_equal_modulo_one_gibibyte() {
    let layout = [range(Bytes::ZERO, mib(64)), range(gib(4), mib(32))];
    let ram = map(&layout, BackingKind::Anon, PageSize::Base4K);
    for piece in ram.ranges() {
        assert!(is_congruent(piece.gpa.start(), piece.hva, PageSize::Giant1G), "{piece:?}");
    }
    assert_eq!(ram.hva(Gpa::new(gib(4).get() + 5)), Some(ram.ranges()[1].hva + Bytes::new(5)));
    assert_eq!(ram.hva(Gpa::new(gib(1).get())), None, "the hole is not RAM");
}

#[test]
fn pages_in_many_runs_are_each_reported_once() {
    // More runs than one step of the kernel's scan holds (512), than one call of ours fetches (1024), and both.
    for pages in [511, 512, 513, 600, 1023, 1024, 1025, 1600, 2047] {
        let ram = map(&[range(Bytes::ZERO, mib(16))], BackingKind::Anon, PageSize::Base4K);
        // Every second page: no two adjacent pages form a run.
        ram.words(ram.ranges()[0]).chunks(1024).take(pages).for_each(|pair| pair[0].store(1, Ordering::Relaxed));
        let mut runs = Vec::new();
        LinuxHost::open().unwrap().scan(ram.base(), ram.bytes(), &mut runs).unwrap();
        assert_eq!(runs.len(), pages);
        assert!(runs.windows(2).all(|pair| pair[0].start + pair[0].bytes < pair[1].start), "{pages}: they ascend");
    }
}

#[test]
fn ram_that_starts_with_base_pages_has_base_pages_and_collapses() {
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let ram = map(&[range(Bytes::ZERO, mib(8))], kind, PageSize::Base4K);
        let host = LinuxHost::open().unwrap();
        assert_eq!(backing(&ram, 1), (0, Backing::Unbacked));
        let hole = collapse_window(&host, ram.ranges()[0], WindowIndex::new(1));
        assert_eq!(hole.result, OutcomeResult::Skipped(Skip::NotResident), "a hole is not filled");
        populate(&ram);
        assert_eq!(backing(&ram, 1), (512, Backing::Base4K), "{}", kind.name());
        let collapse = collapse_in_some_attempts(&host, ram.ranges()[0], 1).result;
        assert_eq!(collapse, OutcomeResult::Done, "{}", kind.name());
        assert_eq!(backing(&ram, 1), (512, Backing::Huge2M));
        assert_eq!(backing(&ram, 2), (512, Backing::Base4K), "its neighbour is unchanged");
        let again = collapse_window(&host, ram.ranges()[0], WindowIndex::new(1));
        assert_eq!(again.result, OutcomeResult::Skipped(Skip::AlreadyDone));
    }
}

#[test]
fn ram_that_starts_with_huge_pages_has_them_after_prefault() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !enabled.contains("[madvise]") && !enabled.contains("[always]") {
        println!("skipped: transparent_hugepage/enabled is {enabled:?}");
        return;
    }
    let ram = map(&[range(Bytes::ZERO, mib(16))], BackingKind::Anon, PageSize::Huge2M);
    populate(&ram);
    let huge = (0..8).filter(|window| backing(&ram, *window) == (512, Backing::Huge2M)).count();
    assert!(huge >= 7, "{huge} of 8 windows are huge; a fragmented host may miss one");
}

#[test]
fn a_manager_thread_promotes_resident_memory_and_only_that() {
    let ram = map(&[range(Bytes::ZERO, mib(64))], BackingKind::Anon, PageSize::Base4K);
    let host: Arc<dyn Kernel> = Arc::new(LinuxHost::open().unwrap());
    host.advise(ram.base(), mib(32), Advice::PopulateWrite).unwrap();
    let greedy = policy::by_name("greedy").unwrap().with_defaults();
    let vm = ManagedVm::new(VmId(0), ram.clone(), None);
    let manager = Manager::spawn(host, vec![vm], greedy, ManagerConfig::default()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(backing(&ram, 0).1, Backing::Base4K, "it waits until it is activated");
    manager.activate();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while (0..16).any(|window| backing(&ram, window).1 != Backing::Huge2M) {
        assert!(std::time::Instant::now() < deadline, "16 windows are not huge after 20 s");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let report = manager.stop();
    assert_eq!(report.done("collapse"), 16);
    assert_eq!(report.bloat, Bytes::ZERO);
    assert!((16..32).all(|window| backing(&ram, window).1 == Backing::Unbacked));
    let last = report.samples[0].1.last().unwrap().host;
    assert_eq!((last.huge_2m, last.base_4k, last.unbacked), (mib(32), Bytes::ZERO, mib(32)));
}

#[test]
fn hugetlb_ram_takes_pool_pages_and_gives_them_back() {
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    for (size, pages, requirement) in [(PageSize::Huge2M, 4, "hugetlb"), (PageSize::Giant1G, 1, "hugetlb1g")] {
        let Ok(before) = pools.status(size) else { continue };
        let Some(lease) = lease(size, pages, requirement) else { continue };
        let ram = map(&[range(Bytes::ZERO, size.bytes() * pages)], BackingKind::Hugetlb, size);
        populate(&ram);
        let expected = if size == PageSize::Giant1G { Backing::Giant1G } else { Backing::Huge2M };
        assert_eq!(backing(&ram, 1), (512, expected));
        drop(ram);
        drop(lease);
        assert_eq!(pools.status(size).unwrap(), before, "{size}: the pool is as it was");
    }
}

/// Pages of the real pool, given back even if a test panics.
struct Reserved(HugetlbPools, Granted);

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = self.0.give_back(&mut self.1);
    }
}

#[test]
fn reserved_pages_are_present_before_they_are_mapped_and_their_holder_is_seen() {
    const PAGES: u64 = 4;
    let _turn = turn_at_the_pools();
    let (pools, size) = (HugetlbPools::of_this_machine(), PageSize::Huge2M);
    // Other processes may lease pages at the same time: one undisturbed attempt is enough, since a leak shows in
    // each.
    const ATTEMPTS: u32 = 20;
    let is_as_before = || {
        let before = pools.status(size).unwrap();
        let request = Request { size, pages: PAGES, node: None, on_shortage: OnShortage::Refuse };
        let mut reserved = Reserved(pools.clone(), pools.reserve(&request).unwrap());
        let with = pools.status(size).unwrap();
        let ram = map(&[range(Bytes::ZERO, size.bytes() * PAGES)], BackingKind::Hugetlb, size);
        populate(&ram);
        let ours = pools
            .holders()
            .of(size)
            .find(|holder| holder.pid == std::process::id())
            .map(|ours| ours.private + ours.shared);
        drop(ram);
        let returned = pools.give_back(&mut reserved.1).unwrap();
        let is_there = (with.free, with.total) == (before.free + PAGES, before.total + PAGES);
        is_there && ours == Some(PAGES) && returned.now == PAGES && pools.status(size).unwrap() == before
    };
    if lease(size, 0, "hugetlb").is_none() {
        return;
    }
    assert!((0..ATTEMPTS).any(|_| is_as_before()));
}

#[test]
fn a_pool_that_is_short_is_refused_when_mapped_and_not_at_a_fault() {
    let _turn = turn_at_the_pools();
    let Ok(pool) = HugetlbPools::of_this_machine().status(PageSize::Huge2M) else {
        println!("skipped: no hugetlb pool of 2m pages in this kernel");
        return;
    };
    let bytes = mib(2) * (pool.available() + 1);
    let config = BackingConfig::new(BackingKind::Hugetlb, PageSize::Huge2M).unwrap();
    let error = GuestRam::map(&[range(Bytes::ZERO, bytes)], config).expect_err("one page more than the pool has");
    assert!(error.to_string().starts_with("cannot map"), "{error}");
    let short = HugetlbPools::of_this_machine().check(PageSize::Huge2M, bytes).expect_err("the check sees it before");
    assert!(short.to_string().contains("is 1 short"), "{short}");
}

#[test]
fn populating_memory_that_is_not_there_is_an_error() {
    let ram = map(&[range(Bytes::ZERO, mib(2))], BackingKind::Anon, PageSize::Base4K);
    let host = LinuxHost::open().unwrap();
    let behind = ram.base() + mib(2); // the address reservation: PROT_NONE
    assert!(host.advise(behind, mib(2), Advice::PopulateWrite).is_err());
}

#[test]
fn an_invalid_layout_is_refused() {
    let config = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let refuse = |layout: &[GpaRange]| GuestRam::map(layout, config).expect_err("refused").to_string();
    assert!(refuse(&[]).contains("empty"));
    assert!(refuse(&[range(Bytes::ZERO, mib(3))]).contains("whole number of 2m pages"));
    assert!(refuse(&[range(mib(4), mib(4)), range(Bytes::ZERO, mib(4))]).contains("ascend"));
}
