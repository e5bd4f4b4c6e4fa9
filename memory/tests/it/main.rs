//! The host's side of guest memory: on fakes, and on the kernel this runs on.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod external_guests;
mod faults;
mod first_touch;
mod first_touch_sizes;
mod giant_swap;
mod give_back;
mod hostile_pools;
mod made_pages;
mod manager_makes_giants;
mod manager_moves_giants;
mod manager_senses;
mod mixed_sizes;
mod moves;
mod moving_windows;
mod numa;
mod other_process;
mod page_nodes;
mod policy_switch;
mod process_host;
mod real_kernel;
mod recorder;
mod release_and_split;
mod reserved_frames;
mod restore;
mod saving;
mod short_of_memory;
mod trades;

use std::thread::sleep;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::Host;
use wideleaf_memory::actuators::collapse::{Collapse, collapse_window};
use wideleaf_memory::manager::ManagerLoop;
use wideleaf_memory::region::RamRange;
use wideleaf_memory::sensors::host_backing::window_backing;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, OutcomeResult, PageSize, Refusal, WindowIndex};

/// Waits up to a minute, for a busy machine.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let has_come = (0..60_000).any(|_| {
        sleep(Duration::from_millis(1));
        is_so()
    });
    assert!(has_come, "waited a minute");
}

/// Ticks until a condition holds, or for a minute. All windows are scanned at some of the ticks alone, after a hundred
/// times what a scan takes.
fn tick_until(work: &mut ManagerLoop, mut holds: impl FnMut(&ManagerLoop) -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds(work) {
        if Instant::now() > end {
            return false;
        }
        work.tick();
        sleep(Duration::from_millis(1));
    }
    true
}

/// Collapses a window. Collapse answers EAGAIN or EBUSY while a page is on its way to an LRU list, and EINVAL while the
/// kernel moves one to another frame. The manager backs off, and a test asks again.
fn collapse_in_some_attempts(host: &dyn Host, range: RamRange, window: u64) -> Collapse {
    const ATTEMPTS: usize = 50;
    let attempt = || collapse_window(host, range, WindowIndex::new(window));
    for _ in 1..ATTEMPTS {
        let collapse = attempt();
        if !matches!(collapse.result, OutcomeResult::Refused(Refusal::Busy | Refusal::NotEligible)) {
            return collapse;
        }
        sleep(Duration::from_millis(20));
    }
    attempt()
}

/// Pages of a window and their size, as of a look at which the kernel moves none of them to another frame: such a page
/// is not present for that moment, and counts as swapped.
fn steady_backing(host: &dyn Host, range: RamRange, fixed: Option<PageSize>, window: WindowIndex) -> (u16, Backing) {
    const LOOKS_MAX: usize = 1_000;
    let start = range.hva + (window.start() - range.gpa.start());
    let mut seen = (0, Backing::Unbacked);
    for _ in 0..LOOKS_MAX {
        let row = window_backing(host, range, fixed, window).unwrap();
        seen = (row.resident, row.backing);
        let mut occupied = Vec::new();
        host.scan_occupied(start, PageSize::Huge2M.bytes(), &mut occupied).unwrap();
        let pages: u64 = occupied.iter().map(|run| run.bytes.pages(PageSize::Base4K)).sum();
        if row.resident == BASE_PAGES_PER_WINDOW || u64::from(row.resident) == pages {
            break;
        }
        sleep(Duration::from_millis(1));
    }
    seen
}

/// The machine's hugetlb pools: tests that take pages of them or compare their counters take turns.
fn turn_at_the_pools() -> MutexGuard<'static, ()> {
    static POOLS: Mutex<()> = Mutex::new(());
    POOLS.lock()
}
