//! Host resources that another process gives back however this one ends: cgroups, sockets, pages of 1 GiB. That
//! process is a child, which waits for the end of a pipe from its parent.

pub mod cgroup;
pub mod giant_pages;
pub mod path;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// In the child: signals that end a whole service or session do not end this process. Its work is left to do when its
/// parent ends, and the end of its input then ends it.
pub fn outlive_signals() {
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        if let Err(error) = signal_hook::flag::register(signal, Arc::<AtomicBool>::default()) {
            tracing::warn!("signal {signal} would end the process that gives host resources back: {error}");
        }
    }
}
