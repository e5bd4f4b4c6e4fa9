//! Deciding at the page fault in a process that may have no more mappings (`vm.max_map_count`). It is a file of its
//! own, because the limit is the process's.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::first_touch::probe;
use wideleaf_memory::host::Advice;
use wideleaf_memory::sensors::host_backing::window_backing;
use wideleaf_memory::{FirstTouch, GuestRam, Kernel, LinuxHost};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSize, VmId, WindowIndex};

fn map(bytes: Bytes) -> Arc<GuestRam> {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    GuestRam::map(&[GpaRange::new(Gpa::new(0), bytes).unwrap()], backing).unwrap()
}

#[test]
fn a_window_that_cannot_be_released_is_answered_page_by_page() {
    if let Err(error) = probe() {
        let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|r| r == "userfaultfd"), "WIDELEAF_REQUIRE={required}, and {error}");
        println!("skipped: {error}");
        return;
    }
    const PAGES: usize = 4;
    let ram = map(mib(10));
    let asked = Arc::new(AtomicU64::new(0));
    let host: Arc<dyn Kernel> = Arc::new(LinuxHost::open().unwrap());
    let service = {
        let asked = asked.clone();
        let decide = move |_, window: WindowIndex| {
            asked.fetch_add(1, Ordering::Relaxed);
            if window.get() == 1 { PageSize::Huge2M } else { PageSize::Base4K }
        };
        FirstTouch::start(host.clone(), vec![(VmId(0), ram.clone())], None, decide).unwrap()
    };
    // Every second page of other memory gets different advice: each such page is one more mapping, until the limit.
    let filler = map(gib(8));
    let mut pages = (0..gib(8).pages(PageSize::Base4K)).step_by(2);
    let refused = pages.find(|page| host.advise(filler.base() + kib(4) * *page, kib(4), Advice::HugePage).is_err());
    if refused.is_none() {
        println!("skipped: vm.max_map_count is more than this test can use up");
        return;
    }
    // Windows in the middle: releasing one would cut the mapping in three.
    let words = ram.words(ram.ranges()[0]);
    let at = |window: usize, page: usize| &words[((window << 21) + (page << 12)) / size_of::<u64>()];
    for (window, page) in [1, 3].into_iter().flat_map(|window| (0..PAGES).map(move |page| (window, page))) {
        assert_eq!(at(window, page).swap(page as u64 + 1, Ordering::Relaxed), 0);
    }
    let report = service.report();
    drop(filler);
    let after = service.stop();
    let read = [1, 3].map(|window| [0, 1, 2, 3].map(|page| at(window, page).load(Ordering::Relaxed)));
    assert_eq!(read, [[1, 2, 3, 4]; 2]);
    assert_eq!((asked.load(Ordering::Relaxed), report.asked), (2, 2), "once a window, not once a page");
    assert_eq!(report.huge_refused(), 1, "{report:?}");
    println!("{:?}", report.by_name().collect::<Vec<_>>());
    assert!(report.zero_pages >= 1, "{report:?}");
    assert_eq!(after.gave_up, None);
    for window in [1, 3] {
        let row = window_backing(host.as_ref(), ram.ranges()[0], None, WindowIndex::new(window)).unwrap();
        assert_eq!((row.resident, row.backing), (PAGES as u16, Backing::Base4K));
    }
}
