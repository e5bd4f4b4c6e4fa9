//! A search for guests by a process that may open no more files. A program of its own, since the limit is that of the
//! whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use wideleaf_attach::{Places, find};

/// Number of files that the process may open.
const FILES: u64 = 64;

#[test]
fn a_search_without_free_files_fails_and_does_not_call_guests_ended() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, FILES, most).unwrap();
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    for free in 0..2 {
        let refused = find::all(&Places::default()).unwrap_err().to_string();
        assert!(refused.contains("Too many open files"), "{free} free: {refused}");
        taken.pop();
    }
    drop(taken);
    find::all(&Places::default()).unwrap();
}
