//! Split and release on the running kernel: the page tables and the resident memory change accordingly, and writers
//! that work on the same windows lose nothing. Tests that the host cannot run are skipped with a reason.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{collapse_in_some_attempts, steady_backing};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::release::{Release, release_window};
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::host::Host;
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::sensors::zero_pages::window_zero_pages;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, OutcomeResult, PageSize, Skip, WindowIndex};

const WINDOWS: u64 = 8;
const WORDS_PER_PAGE: usize = 512;

fn ram(kind: BackingKind) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(kind, PageSize::Base4K).unwrap()).unwrap();
    prefault(&LinuxHost::open().unwrap(), ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
    ram
}

fn words(ram: &GuestRam) -> &[AtomicU64] {
    ram.words(ram.ranges()[0])
}

fn backing(ram: &GuestRam, window: WindowIndex) -> (u16, Backing) {
    steady_backing(&LinuxHost::open().unwrap(), ram.ranges()[0], None, window)
}

fn resident(ram: &GuestRam) -> Bytes {
    let smaps = LinuxHost::open().unwrap().read_text("/proc/self/smaps").unwrap();
    resident_memory(&smaps, &[(ram.base(), ram.bytes())]).unwrap().guest_ram
}

fn collapse(host: &LinuxHost, ram: &GuestRam, window: WindowIndex) -> OutcomeResult {
    collapse_in_some_attempts(host, ram.ranges()[0], window.get()).result
}

/// A mover for zero pages; if they cannot be moved, prints why.
fn mover(ram: &Arc<GuestRam>) -> Option<WindowMover> {
    probe().inspect_err(|why| println!("skipped: {why}")).ok()?;
    Some(WindowMover::start(Arc::new(LinuxHost::open().unwrap()), ram.clone()).unwrap())
}

fn release(mover: &WindowMover, host: &LinuxHost, ram: &GuestRam, window: WindowIndex) -> Release {
    release_window(mover.aside(), host, ram.ranges()[0], window)
}

#[test]
fn a_split_window_has_base_pages_and_its_contents_and_collapses_again() {
    let (ram, host, window) = (ram(BackingKind::Anon), LinuxHost::open().unwrap(), WindowIndex::new(3));
    words(&ram).iter().zip(1..).for_each(|(word, n)| word.store(n, Ordering::Relaxed));
    for _ in 0..10 {
        assert_eq!(collapse(&host, &ram, window), OutcomeResult::Done);
        assert_eq!(backing(&ram, window), (512, Backing::Huge2M));
        let split = split_window(&host, BackingKind::Anon, ram.ranges()[0], window);
        assert_eq!(split.result, OutcomeResult::Done);
        assert_eq!(backing(&ram, window), (512, Backing::Base4K));
    }
    let again = split_window(&host, BackingKind::Anon, ram.ranges()[0], window).result;
    assert_eq!(again, OutcomeResult::Skipped(Skip::AlreadyDone));
    assert!(words(&ram).iter().zip(1..).all(|(word, n)| word.load(Ordering::Relaxed) == n));
}

#[test]
fn a_split_gives_back_at_most_the_zero_pages_and_says_how_many() {
    let (ram, host, window) = (ram(BackingKind::Anon), LinuxHost::open().unwrap(), WindowIndex::new(0));
    words(&ram).iter().step_by(WORDS_PER_PAGE * 2).for_each(|word| word.store(1, Ordering::Relaxed));
    assert_eq!(collapse(&host, &ram, window), OutcomeResult::Done);
    let before = resident(&ram);
    let split = split_window(&host, BackingKind::Anon, ram.ranges()[0], window);
    assert_eq!(split.result, OutcomeResult::Done);
    // Kernels before 6.12 keep them.
    assert!(split.freed == Bytes::ZERO || split.freed == mib(1), "{}", split.freed);
    assert_eq!(resident(&ram), before.saturating_sub(split.freed));
}

#[test]
fn memfd_ram_is_neither_split_nor_taken_aside_for_a_release() {
    let (ram, host) = (ram(BackingKind::Memfd), Arc::new(LinuxHost::open().unwrap()));
    let none = OutcomeResult::Skipped(Skip::NoMechanism);
    let range = ram.ranges()[0];
    assert_eq!(split_window(host.as_ref(), BackingKind::Memfd, range, WindowIndex::new(0)).result, none);
    assert!(WindowMover::start(host, ram).is_err());
}

#[test]
fn searching_zero_pages_fills_no_hole() {
    let range = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let host = LinuxHost::open().unwrap();
    let look = || window_zero_pages(&host, &ram, ram.ranges()[0], WindowIndex::new(0)).unwrap();
    assert_eq!((look().pages(), look().read), (0, Bytes::ZERO));
    words(&ram)[0].store(0, Ordering::Relaxed);
    words(&ram)[WORDS_PER_PAGE].store(1, Ordering::Relaxed);
    assert_eq!((look().pages(), look().read), (1, kib(4) + Bytes::new(8)));
    assert_eq!(backing(&ram, WindowIndex::new(0)), (2, Backing::Base4K));
    assert_eq!(resident(&ram), kib(8));
}

#[test]
fn resident_memory_falls_by_the_reported_release_and_the_words_stay() {
    let (ram, host) = (ram(BackingKind::Anon), LinuxHost::open().unwrap());
    let Some(mover) = mover(&ram) else { return };
    for page in (0..words(&ram).len()).step_by(WORDS_PER_PAGE * 8) {
        words(&ram)[page].store(page as u64 + 1, Ordering::Relaxed);
    }
    assert_eq!(collapse(&host, &ram, WindowIndex::new(1)), OutcomeResult::Done);
    let before = resident(&ram);
    let released: Vec<Release> =
        (0..WINDOWS).map(|window| release(&mover, &host, &ram, WindowIndex::new(window))).collect();
    let freed: Bytes = released.iter().map(|release| release.freed).sum();
    assert!(released.iter().all(|release| release.result == OutcomeResult::Done), "{released:?}");
    assert_eq!(released.iter().filter(|release| release.was_split).count(), 1);
    assert_eq!(freed, kib(4) * (448 * WINDOWS), "64 of 512 pages of each window are in use");
    assert_eq!(resident(&ram), before.saturating_sub(freed));
    for page in (0..words(&ram).len()).step_by(WORDS_PER_PAGE * 8) {
        assert_eq!(words(&ram)[page].load(Ordering::Relaxed), page as u64 + 1);
    }
}

/// Keeps writing to all words of its half of each window in turn. It fills pages with words that only it knows,
/// checks them, and zeroes them again, so that every page is zero at times and in use at others.
/// Each is checked at least once.
fn write_and_check(ram: &GuestRam, half: usize, is_over: &AtomicBool) {
    /// Number of words of a page that are written: the last ones, so that the search for zeroes has to reach them.
    const WRITTEN: usize = 4;
    let pages: Vec<&[AtomicU64]> =
        words(ram).chunks(WORDS_PER_PAGE).skip(half).step_by(2).map(|page| &page[WORDS_PER_PAGE - WRITTEN..]).collect();
    let mut pass = 0;
    while pass < 2 || !is_over.load(Ordering::Relaxed) {
        pass += 1;
        for (number, page) in pages.iter().enumerate() {
            let is_zero_now = (number as u64 + pass).is_multiple_of(3);
            for (word, n) in page.iter().zip(1..) {
                let expected = |pass: u64| match (number as u64 + pass).is_multiple_of(3) || pass == 0 {
                    true => 0,
                    false => pass << 32 | (number as u64) << 8 | n,
                };
                let found = word.load(Ordering::Relaxed);
                assert_eq!(found, expected(pass - 1), "page {number} of half {half}, word {n}, pass {pass}");
                word.store(if is_zero_now { 0 } else { expected(pass) }, Ordering::Relaxed);
            }
        }
    }
}

#[test]
fn writers_lose_nothing_while_windows_are_released_split_and_collapsed() {
    const ROUNDS: u64 = 200;
    let (ram, host, is_over) = (ram(BackingKind::Anon), LinuxHost::open().unwrap(), AtomicBool::new(false));
    let Some(mover) = mover(&ram) else { return };
    let mut done = Done::default();
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|half| {
            let (ram, is_over) = (&ram, &is_over);
            scope.spawn(move || write_and_check(ram, half, is_over))
        });
        for round in 0..ROUNDS {
            for window in 0..WINDOWS {
                meddle(&mover, &host, &ram, WindowIndex::new(window), round + window, &mut done);
            }
            if writers.iter().any(|writer| writer.is_finished()) {
                break; // it has found a wrong word: the join reports it
            }
        }
        is_over.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    println!("{done:?}");
    assert!(done.collapses > 100 && done.splits > 100, "{done:?}");
    assert!(done.releases_of_huge > 100 && done.releases_of_base > 100, "{done:?}");
}

/// Actions on windows under the writers.
#[derive(Debug, Default)]
struct Done {
    collapses: u64,
    splits: u64,
    releases_of_huge: u64,
    releases_of_base: u64,
    freed: Bytes,
}

/// One step of four: collapse; split; collapse and release; release.
fn meddle(mover: &WindowMover, host: &LinuxHost, ram: &GuestRam, window: WindowIndex, step: u64, done: &mut Done) {
    let is_done = |result: OutcomeResult| u64::from(result == OutcomeResult::Done);
    let step = step % 4;
    if step == 0 || step == 2 {
        done.collapses += is_done(collapse_window(host, ram.ranges()[0], window).result);
    }
    if step == 1 {
        done.splits += is_done(split_window(host, BackingKind::Anon, ram.ranges()[0], window).result);
    }
    if step >= 2 {
        let release = release(mover, host, ram, window);
        done.freed += release.freed;
        *if release.was_split { &mut done.releases_of_huge } else { &mut done.releases_of_base } +=
            is_done(release.result);
    }
}
