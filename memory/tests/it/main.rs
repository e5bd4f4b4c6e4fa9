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

use parking_lot::{Mutex, MutexGuard};

/// Waits up to a minute, for a busy machine.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let has_come = (0..60_000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(1));
        is_so()
    });
    assert!(has_come, "waited a minute");
}

/// The machine's hugetlb pools: tests that take pages of them or compare their counters take turns.
fn turn_at_the_pools() -> MutexGuard<'static, ()> {
    static POOLS: Mutex<()> = Mutex::new(());
    POOLS.lock()
}
