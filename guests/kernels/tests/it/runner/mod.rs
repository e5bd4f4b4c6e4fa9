//! A kernel's whole run on native threads for the tests of this folder: its exit code and its lines.
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use wideleaf_kernels::Arena;
use wideleaf_kernels::native::{self, measure_tsc_hz};
use wideleaf_kernels::registry::{self, Started};
use wideleaf_protocol::{Entry, ExitCode, GuestPage, Message, parse};

const WINDOW_PAGES: usize = 512;
const STARTED: Started = Started { entry: Entry::Native, guest_page: GuestPage::Base4K };

/// Serialises runs: the members of a team spin, and two teams on two CPUs would wait for each other's time slices.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a command line, alone, in an arena of `pages` 4 KiB pages that begins, like a guest's, at a 2 MiB border;
/// `meddle` sees every line before the kernel goes on.
pub fn run_with(
    threads: usize,
    tsc_hz: u64,
    pages: usize,
    line: &str,
    meddle: impl Fn(&Message<'_>, &Arena<'_>) + Sync,
) -> (ExitCode, Vec<String>) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut words = vec![0xdead_beef; (pages + WINDOW_PAGES) * 512];
    let border = words.as_ptr().align_offset(WINDOW_PAGES * 4096);
    let arena = Arena::from_words(&mut words[border..border + pages * 512]);
    let lines = Mutex::new(Vec::new());
    let sink = Box::new(|message: &Message<'_>| {
        lines.lock().unwrap_or_else(PoisonError::into_inner).push(message.to_string());
        meddle(message, &arena);
    });
    let code = native::run(threads, tsc_hz, sink, |platform| registry::run(platform, &arena, line, STARTED));
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    for line in &lines {
        assert!(matches!(parse(line), Some(Ok(_))), "malformed line {line}");
    }
    (code, lines)
}

/// As [`run_with`], with a clock and without meddling.
pub fn run(threads: usize, pages: usize, line: &str) -> (ExitCode, Vec<String>) {
    run_with(threads, measure_tsc_hz(Duration::from_millis(5)), pages, line, |_, _| ())
}

/// Whether one of our lines begins with this.
pub fn has(lines: &[String], beginning: &str) -> bool {
    lines.iter().any(|line| line["@wideleaf ".len()..].starts_with(beginning))
}
