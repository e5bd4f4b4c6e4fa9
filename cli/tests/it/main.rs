//! The command line's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command_line;
mod config_file;
mod console;
mod control_socket;
mod devices;
mod disk;
mod external_guests;
mod flood;
mod giant;
mod guards;
mod guest;
mod help;
mod hook;
mod host;
mod kernels;
mod migration;
mod moved_disks;
mod operator;
mod paths;
mod policies_distinguished;
mod pool;
mod post_copy;
mod power_button;
mod program;
mod recover;
mod registered;
mod restart;
mod sandboxed;
mod snapshot;
mod tlbcost;
mod top_screen;
mod unread;

use parking_lot::{Mutex, MutexGuard};

/// The machine's hugetlb pool of 2 MiB pages: tests that take pages of it or compare its counters take turns.
fn turn_at_the_pool() -> MutexGuard<'static, ()> {
    static POOL: Mutex<()> = Mutex::new(());
    POOL.lock()
}
