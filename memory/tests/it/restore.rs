//! Guest RAM that is filled while threads use it, on the running kernel. Without permission for userfaultfd these tests
//! are skipped with the reason; `WIDELEAF_REQUIRE=userfaultfd` turns the skip into a failure.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::faults::{VM, WORDS_PER_WINDOW, backing, join, map_of, skip, wait_for};
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::claims::Claimed;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::restore::{
    Background, FillFailure, GuestIsGone, ReadError, RestoreConfig, RestoreError, RestoreReport, Restorer, SavedRam,
    SavedWindow,
};
use wideleaf_memory::{FirstTouch, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSet, PageSize, PerTenThousand, WindowIndex};

const WORDS_PER_PAGE: usize = 512;
const PAGES: u16 = 512;

/// The word of a snapshot at this place: never zero.
fn saved_word(window: u64, word: usize) -> u64 {
    let mixed = (window << 20 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29) | 1
}

/// Trouble with reading a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Damaged,
    Unreadable,
    Panic,
}

/// RAM that is not stored anywhere: each word is made from its place.
#[derive(Default)]
struct Saved {
    windows: BTreeMap<u64, SavedWindow>,
    trouble: Mutex<BTreeMap<u64, (Trouble, u32)>>,
    reads: Mutex<Vec<u64>>,
    /// Windows of which the first read does not return before this is emptied.
    held: Mutex<BTreeSet<u64>>,
    let_go: Condvar,
    pause: Duration,
}

impl Saved {
    fn of(windows: impl IntoIterator<Item = (u64, SavedWindow)>) -> Saved {
        Saved { windows: windows.into_iter().collect(), ..Saved::default() }
    }

    fn has(&self, window: u64, page: u16) -> bool {
        self.windows.get(&window).is_some_and(|saved| saved.pages.contains(page))
    }

    /// The word that the guest must see.
    fn expected(&self, window: u64, word: usize) -> u64 {
        if self.has(window, (word / WORDS_PER_PAGE) as u16) { saved_word(window, word) } else { 0 }
    }

    fn trouble(self, window: u64, trouble: Trouble, times: u32) -> Saved {
        self.trouble.lock().insert(window, (trouble, times));
        self
    }

    fn order(&self) -> Vec<u64> {
        self.reads.lock().clone()
    }

    fn let_go(&self) {
        self.held.lock().clear();
        self.let_go.notify_all();
    }
}

impl SavedRam for Saved {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        self.windows.get(&window.get()).copied().unwrap_or_default()
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        let number = window.get();
        let is_first = {
            let mut reads = self.reads.lock();
            reads.push(number);
            reads.iter().filter(|read| **read == number).count() == 1
        };
        std::thread::sleep(self.pause);
        if is_first {
            let mut held = self.held.lock();
            self.let_go.wait_while(&mut held, |held| held.contains(&number));
        }
        for page in self.windows[&number].pages.iter() {
            let first = usize::from(page) * WORDS_PER_PAGE;
            for (word, bytes) in into.as_chunks_mut::<8>().0[first..first + WORDS_PER_PAGE].iter_mut().enumerate() {
                *bytes = saved_word(number, first + word).to_le_bytes();
            }
        }
        let trouble = {
            let mut trouble = self.trouble.lock();
            let of = trouble.get_mut(&number).filter(|(_, times)| *times > 0);
            of.map(|(trouble, times)| {
                *times -= 1;
                *trouble
            })
        };
        let file = "memory".to_owned();
        match trouble {
            Some(Trouble::Damaged) => Err(ReadError::Damaged { window, page: 7, file }),
            Some(Trouble::Unreadable) => {
                Err(ReadError::Io { window, file, source: std::io::Error::from_raw_os_error(5) })
            }
            Some(Trouble::Panic) => panic!("as a test of what comes after"),
            None => Ok(()),
        }
    }
}

fn full(was_huge: bool) -> SavedWindow {
    SavedWindow { pages: PageSet::ALL, was_huge, ..SavedWindow::default() }
}

/// A window with these pages, on base pages.
fn sparse(pages: impl IntoIterator<Item = u16>) -> SavedWindow {
    SavedWindow { pages: pages.into_iter().collect(), ..SavedWindow::default() }
}

fn anon(windows: u64) -> Arc<GuestRam> {
    ram(windows, BackingKind::Anon, PageSize::Base4K)
}

fn ram(windows: u64, kind: BackingKind, page: PageSize) -> Arc<GuestRam> {
    map_of(&[(Bytes::ZERO, mib(2) * windows)], BackingConfig::new(kind, page).unwrap())
}

fn restore(ram: &Arc<GuestRam>, saved: &Arc<Saved>, config: RestoreConfig) -> Restorer {
    Restorer::start(ram.clone(), saved.clone(), config).unwrap()
}

/// Options for a restore in which no window may fail: a thread that touches such a window would wait for ever.
fn config() -> RestoreConfig {
    let on_failure = |failure: &FillFailure| {
        // Past the capture of the test's output, which ends with the process.
        let _ = writeln!(std::io::stderr(), "{failure}");
        std::process::abort();
    };
    RestoreConfig { on_failure: Some(Box::new(on_failure)), ..RestoreConfig::default() }
}

fn word(ram: &GuestRam, window: u64, word: usize) -> &AtomicU64 {
    &ram.words(ram.ranges()[0])[window as usize * WORDS_PER_WINDOW + word]
}

fn read(ram: &GuestRam, window: u64, at: usize) -> u64 {
    word(ram, window, at).load(Ordering::Relaxed)
}

/// Compares all of a window.
fn check_window(ram: &GuestRam, saved: &Saved, window: u64) {
    for at in 0..WORDS_PER_WINDOW {
        assert_eq!(read(ram, window, at), saved.expected(window, at), "window {window}, word {at}");
    }
}

fn finish(restorer: Restorer) -> RestoreReport {
    wait_for("the end of the restore", || restorer.is_finished());
    restorer.report()
}

/// Whether all windows that are to be huge must be: unless the host had too few huge pages, or the kernel does not
/// move them whole.
fn must_be_huge(report: &RestoreReport) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let version: Vec<u32> = release.split(['.', '-']).map_while(|part| part.parse().ok()).take(2).collect();
    if version < vec![6, 14] {
        return false; // it keeps empty page tables, or does not move pages
    }
    assert_eq!(report.not_huge, report.no_huge_page, "a page that was ready arrives whole: {report:?}");
    report.no_huge_page == 0
}

#[test]
fn every_byte_is_right_and_every_window_as_large_as_it_was() {
    if skip() {
        return;
    }
    // window   0: huge   1: nothing   2: every third page   3: huge, half of it zero   then the same again
    let ram = anon(32);
    let saved = Arc::new(Saved::of((0..32).filter(|window| window % 4 != 1).map(|window| {
        let saved = match window % 4 {
            0 => full(true),
            2 => sparse((0..PAGES).step_by(3)),
            _ => SavedWindow { pages: (0..256).collect(), was_huge: true, ..SavedWindow::default() },
        };
        (window, saved)
    })));
    let restorer = restore(&ram, &saved, config());
    (0..32).rev().for_each(|window| check_window(&ram, &saved, window));
    let report = finish(restorer);
    assert_eq!(report.progress.filled_windows, 24, "{report:?}");
    assert_eq!(report.progress.filled_bytes, report.progress.stored_bytes);
    assert_eq!(report.by_fault + report.by_background, 24, "{report:?}");
    assert_eq!((report.huge + report.not_huge, report.base), (16, 8), "{report:?}");
    if must_be_huge(&report) {
        for window in (0..32).filter(|window| [0, 3].contains(&(window % 4))) {
            assert_eq!(backing(&ram, window), (PAGES, Backing::Huge2M), "window {window}, {report:?}");
        }
    }
    (0..32).filter(|window| window % 4 == 2).for_each(|window| {
        // Reading holes maps the shared zero page, which is no page of the guest's.
        assert_eq!(backing(&ram, window), (171, Backing::Base4K), "window {window}");
    });
    println!("{report:?}, p99 {} us", report.fault_ns.value_at_quantile(0.99) / 1000);
}

#[test]
fn holes_of_a_sparse_window_stay_holes_and_the_kernel_fills_them_at_their_touch() {
    if skip() {
        return;
    }
    let ram = anon(4);
    let saved = Arc::new(Saved::of([(1, sparse([0, 9, 10, 511])), (2, full(true))]));
    let report = finish(restore(&ram, &saved, config()));
    assert_eq!((report.by_background, report.base), (2, 1));
    assert_eq!(backing(&ram, 1), (4, Backing::Base4K));
    assert_eq!([0, 3].map(|window| backing(&ram, window)), [(0, Backing::Unbacked); 2], "nothing is stored there");
    word(&ram, 1, 100 * WORDS_PER_PAGE).store(5, Ordering::Relaxed);
    assert_eq!(backing(&ram, 1), (5, Backing::Base4K));
}

/// Threads write and read random places while RAM is filled: each has its own words, and must find what it wrote, and
/// before that what was saved.
fn hammer(ram: &Arc<GuestRam>, saved: &Arc<Saved>, threads: u64, windows: u64, seed: u64) {
    let begin = Arc::new(Barrier::new(threads as usize));
    let handles: Vec<_> = (0..threads)
        .map(|thread| {
            let (ram, saved, begin) = (ram.clone(), saved.clone(), begin.clone());
            std::thread::spawn(move || {
                let mut random = seed.wrapping_mul(64) + thread + 1;
                let mut next = || {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random
                };
                let mut written = BTreeMap::new();
                begin.wait();
                for _ in 0..500 {
                    let window = next() % windows;
                    let line = next() as usize % (WORDS_PER_WINDOW / threads as usize);
                    let at = line * threads as usize + thread as usize;
                    let expected = written.get(&(window, at)).copied().unwrap_or_else(|| saved.expected(window, at));
                    let value = next();
                    assert_eq!(read(&ram, window, at), expected, "window {window}, word {at}");
                    if value % 2 == 0 {
                        word(&ram, window, at).store(value, Ordering::Relaxed);
                        written.insert((window, at), value);
                    }
                }
                written
            })
        })
        .collect();
    let mut written = BTreeMap::new();
    handles.into_iter().for_each(|handle| written.extend(join(handle)));
    for window in 0..windows {
        for at in 0..WORDS_PER_WINDOW {
            let expected = written.get(&(window, at)).copied().unwrap_or_else(|| saved.expected(window, at));
            assert_eq!(read(ram, window, at), expected, "window {window}, word {at}");
        }
    }
}

fn mixed(windows: u64, seed: u64) -> Arc<Saved> {
    Arc::new(Saved::of((0..windows).filter_map(|window| {
        let kind = (seed + window * 7) % 5;
        let saved = match kind {
            0 | 1 => full(true),
            2 => full(false),
            3 => sparse((0..PAGES).filter(|page| (u64::from(*page) * 31 + seed) % 7 < 2)),
            _ => return None,
        };
        Some((window, saved))
    })))
}

#[test]
fn sixty_four_threads_at_random_places_lose_no_word_in_any_of_thirty_rounds() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 12;
    let (mut huge, mut not_huge, mut worst) = (0, 0, 0);
    for round in 0..30 {
        let (ram, saved) = (anon(WINDOWS), mixed(WINDOWS, round));
        let options = match round % 3 {
            0 => config(),
            1 => RestoreConfig { background: Background::Off, ..config() },
            _ => RestoreConfig { threads: NonZeroUsize::new(8).unwrap(), ..config() },
        };
        let restorer = restore(&ram, &saved, options);
        hammer(&ram, &saved, 64, WINDOWS, round + 1);
        let report = finish(restorer);
        assert_eq!(report.progress.filled_windows, report.progress.stored_windows, "round {round}: {report:?}");
        for (window, of) in saved.windows.iter().filter(|_| must_be_huge(&report)) {
            if of.was_huge {
                assert_eq!(backing(&ram, *window), (PAGES, Backing::Huge2M), "round {round}, window {window}");
            }
        }
        huge += report.huge;
        not_huge += report.not_huge;
        worst = worst.max(report.fault_ns.max());
    }
    println!("{huge} huge at once, {not_huge} collapsed; longest wait {} us", worst / 1000);
}

#[test]
fn a_damaged_window_is_never_seen_and_all_others_are_served() {
    if skip() {
        return;
    }
    for trouble in [Trouble::Damaged, Trouble::Unreadable] {
        let ram = anon(6);
        let saved = Arc::new(Saved::of((0..6).map(|window| (window, full(true)))).trouble(3, trouble, u32::MAX));
        let told = Arc::<Mutex<Vec<FillFailure>>>::default();
        let on_failure = {
            let told = told.clone();
            move |failure: &FillFailure| told.lock().push(failure.clone())
        };
        let config = RestoreConfig { on_failure: Some(Box::new(on_failure)), ..RestoreConfig::default() };
        let restorer = restore(&ram, &saved, config);
        let has_read = Arc::new(AtomicBool::new(false));
        let victim = {
            let (ram, has_read) = (ram.clone(), has_read.clone());
            std::thread::spawn(move || {
                let found = read(&ram, 3, 77);
                has_read.store(true, Ordering::SeqCst);
                found
            })
        };
        [0, 1, 2, 4, 5].into_iter().for_each(|window| check_window(&ram, &saved, window));
        wait_for("the failure", || restorer.failure().is_some());
        wait_for("the others", || restorer.progress().filled_windows == 5);
        let failure = restorer.failure().unwrap();
        let named = failure.to_string();
        assert!(named.contains("window 3") && named.contains("memory"), "{named}");
        assert_eq!(*told.lock(), [failure], "it is told once");
        assert!(!restorer.is_finished());
        // It sleeps until the VM ends: here, until the test says that nothing uses its RAM.
        assert!(!has_read.load(Ordering::SeqCst), "no byte of it was seen");
        let report = restorer.abandon(GuestIsGone);
        join(victim);
        assert_eq!((report.progress.failed_windows, report.progress.filled_windows), (1, 5), "{report:?}");
    }
}

#[test]
fn dropping_a_restore_that_is_not_finished_leaves_waiting_threads_asleep() {
    if skip() {
        return;
    }
    let ram = anon(2);
    let saved = Arc::new(Saved::of([(0, full(true)), (1, full(true))]).trouble(1, Trouble::Damaged, u32::MAX));
    let restorer = restore(&ram, &saved, RestoreConfig::default());
    wait_for("the failure", || restorer.failure().is_some() && restorer.progress().filled_windows == 1);
    drop(restorer);
    let has_read = Arc::new(AtomicBool::new(false));
    {
        let (ram, has_read) = (ram.clone(), has_read.clone());
        // It sleeps until the test's process ends.
        std::thread::spawn(move || {
            read(&ram, 1, 0);
            has_read.store(true, Ordering::SeqCst);
        });
    }
    check_window(&ram, &saved, 0);
    // Another userfaultfd cannot have the window: it is registered still.
    let again = Restorer::start(ram.clone(), saved.clone(), RestoreConfig::default());
    assert!(matches!(again, Err(RestoreError::NotEmpty(_))), "{again:?}");
    let first = FirstTouch::start(Arc::new(LinuxHost::open().unwrap()), vec![(VM, ram)], None, |_, _| PageSize::Base4K);
    assert!(first.is_err(), "the RAM is registered");
    assert!(!has_read.load(Ordering::SeqCst));
}

#[test]
fn a_thread_that_panics_is_named_and_another_one_fills_its_window() {
    if skip() {
        return;
    }
    let ram = anon(8);
    let saved = Arc::new(Saved::of((0..8).map(|window| (window, full(true)))).trouble(5, Trouble::Panic, 1));
    let restorer = restore(&ram, &saved, config());
    (0..8).rev().for_each(|window| check_window(&ram, &saved, window));
    let report = finish(restorer);
    assert_eq!((report.progress.filled_windows, report.failures.len()), (8, 0), "{report:?}");
    let [lost] = report.lost_threads.as_slice() else { panic!("{report:?}") };
    assert!(lost.contains("restore-") && lost.contains("window 5"), "{lost}");
}

#[test]
fn a_window_at_which_every_thread_panics_fails_and_the_last_thread_serves_the_others() {
    if skip() {
        return;
    }
    let ram = anon(8);
    let saved = Saved::of((0..8).map(|window| (window, full(true))));
    let saved = saved.trouble(2, Trouble::Panic, u32::MAX).trouble(4, Trouble::Panic, u32::MAX);
    let saved = Arc::new(saved);
    let restorer = restore(&ram, &saved, RestoreConfig::default());
    [0, 1, 3, 5, 6, 7].into_iter().for_each(|window| check_window(&ram, &saved, window));
    wait_for("both failures", || restorer.progress().failed_windows == 2);
    let report = restorer.abandon(GuestIsGone);
    assert_eq!(report.progress.filled_windows, 6, "{report:?}");
    let failed: BTreeSet<u64> = report.failures.iter().map(|failure| failure.window.get()).collect();
    assert_eq!(failed, BTreeSet::from([2, 4]));
    assert_eq!(report.lost_threads.len(), 4, "two panics at each: {report:?}");
}

#[test]
fn a_read_that_does_not_return_is_taken_over_and_its_late_result_is_not_used() {
    if skip() {
        return;
    }
    let ram = anon(4);
    let saved = Saved { held: Mutex::new(BTreeSet::from([1])), ..Saved::of((0..4).map(|of| (of, full(true)))) };
    let saved = Arc::new(saved);
    // Much longer than a thread waits for a processor, however busy the machine is.
    let options = RestoreConfig { overdue_after: Duration::from_secs(2), ..config() };
    let restorer = restore(&ram, &saved, options);
    check_window(&ram, &saved, 1);
    (0..WORDS_PER_WINDOW).for_each(|at| word(&ram, 1, at).store(at as u64, Ordering::Relaxed));
    (0..4).filter(|window| *window != 1).for_each(|window| check_window(&ram, &saved, window));
    saved.let_go();
    let report = finish(restorer);
    assert_eq!(report.progress.filled_windows, 4, "{report:?}");
    assert!(report.lost_threads.iter().any(|lost| lost.contains("reading window 1")), "{report:?}");
    assert!((0..WORDS_PER_WINDOW).all(|at| read(&ram, 1, at) == at as u64), "what the guest wrote stays");
}

#[test]
fn touched_windows_come_first_and_recorded_ones_before_hot_ones() {
    if skip() {
        return;
    }
    let ram = anon(8);
    let hot = |heat| SavedWindow { heat: PerTenThousand::new(heat), ..full(true) };
    let windows = [0, 0, 0, 0, 0, 700, 9000, 0].map(hot).into_iter().enumerate();
    let saved = Arc::new(Saved::of(windows.map(|(window, of)| (window as u64, of))));
    let first = [4, 2].map(WindowIndex::new).to_vec();
    let options = RestoreConfig { threads: NonZeroUsize::MIN, first, ..config() };
    let report = finish(restore(&ram, &saved, options));
    assert_eq!(saved.order(), [4, 2, 6, 5, 0, 1, 3, 7]);
    assert_eq!((report.by_background, report.by_fault), (8, 0));
}

#[test]
fn a_touched_window_does_not_wait_for_the_budget_of_the_background() {
    if skip() {
        return;
    }
    let ram = anon(8);
    let saved = Arc::new(Saved::of((0..8).map(|window| (window, full(true)))));
    // A window in some minutes.
    let background = Background::PerSecond(Bytes::new(10_000));
    let restorer = restore(&ram, &saved, RestoreConfig { background, ..config() });
    (0..8).rev().for_each(|window| check_window(&ram, &saved, window));
    let report = finish(restorer);
    assert!(report.by_background <= 1 && report.by_fault >= 7, "{report:?}");
}

#[test]
fn first_touches_are_recorded_in_their_order_also_of_windows_without_contents_there() {
    if skip() {
        return;
    }
    let ram = anon(6);
    let saved = Arc::new(Saved::of((0..6).map(|window| (window, full(true)))));
    let restorer = restore(&ram, &saved, RestoreConfig { record: true, ..config() });
    [3, 0, 5].into_iter().for_each(|window| check_window(&ram, &saved, window));
    let touched = restorer.first_touches();
    assert_eq!(touched, [3, 0, 5].map(WindowIndex::new));
    finish(restorer);
}

#[test]
fn ram_with_alternating_windows_takes_a_bounded_number_of_mappings() {
    if skip() {
        return;
    }
    const WINDOWS: u64 = 8192;
    let ram = anon(WINDOWS);
    let saved = Arc::new(Saved::of((0..WINDOWS).step_by(2).map(|window| (window, sparse([1])))));
    let options = RestoreConfig { background: Background::Off, ..config() };
    let restorer = restore(&ram, &saved, options);
    let report = restorer.report();
    assert!(report.stretches <= 1024, "{report:?}");
    assert!(report.zero_windows >= WINDOWS / 2 - 1024, "{report:?}");
    // A window without contents between two others reads zero, and is the kernel's afterwards.
    let zero = (1..WINDOWS).step_by(2).find(|window| read(&ram, *window, 5 * WORDS_PER_PAGE) != 0);
    assert_eq!(zero, None);
    word(&ram, 1, 5 * WORDS_PER_PAGE).store(1, Ordering::Relaxed);
    (0..WINDOWS).step_by(2).for_each(|window| assert_eq!(read(&ram, window, 512), saved_word(window, 512)));
    let report = finish(restorer);
    assert_eq!(report.progress.filled_windows, WINDOWS / 2, "{report:?}");
}

#[test]
fn a_window_that_is_not_filled_is_left_alone_by_every_other_part() {
    if skip() {
        return;
    }
    let ram = anon(1024);
    let saved = Saved { held: Mutex::new(BTreeSet::from([1])), ..Saved::of([(1, full(true)), (2, full(true))]) };
    let saved = Arc::new(saved);
    let options = RestoreConfig { overdue_after: Duration::from_secs(600), ..config() };
    let restorer = restore(&ram, &saved, options);
    check_window(&ram, &saved, 2);
    wait_for("the other window", || restorer.progress().filled_windows == 1);
    let (unfilled, filled) = (WindowIndex::new(1), WindowIndex::new(2));
    let claims = ram.claims();
    assert_eq!(claims.window(unfilled).unwrap_err(), Claimed::NotFilled);
    assert_eq!(claims.window_in_place(unfilled).unwrap_err(), Claimed::NotFilled);
    assert_eq!(claims.window_aside(unfilled).unwrap_err(), Claimed::NotFilled);
    assert_eq!(claims.giant(Gpa::new(0)).map(drop).unwrap_err(), Claimed::NotFilled);
    assert!(claims.window(filled).is_ok() && claims.giant(WindowIndex::new(512).start()).is_ok());
    let clear = wideleaf_memory::actuators::clear::clear;
    let released = wideleaf_memory::actuators::clear::Pages::Released;
    let host = LinuxHost::open().unwrap();
    let refused = clear(&host, &ram, released).expect_err("contents would come back later").to_string();
    assert!(refused.contains("restore"), "{refused}");
    saved.let_go();
    finish(restorer);
    assert!(claims.window_aside(unfilled).is_ok() && claims.giant(Gpa::new(0)).is_ok());
    check_window(&ram, &saved, 1);
    clear(&host, &ram, released).unwrap();
    assert_eq!(read(&ram, 1, 0), 0);
}

#[test]
fn an_abandoned_restore_lets_all_ram_go() {
    if skip() {
        return;
    }
    let ram = anon(16);
    let saved = Arc::new(Saved::of((0..16).map(|window| (window, full(true)))));
    let options = RestoreConfig { background: Background::Off, ..config() };
    let restorer = restore(&ram, &saved, options);
    check_window(&ram, &saved, 9);
    let report = restorer.abandon(GuestIsGone);
    assert_eq!(report.progress.filled_windows, 1);
    assert_eq!(read(&ram, 3, 3), 0, "the kernel answers");
    assert!(ram.claims().window_aside(WindowIndex::new(4)).is_ok());
}

#[test]
fn memory_of_files_and_of_the_pool_is_filled_too() {
    if skip() {
        return;
    }
    let _turn = crate::turn_at_the_pools();
    let lease = HugetlbPools::of_this_machine().lease(PageSize::Huge2M, 6);
    for (kind, page) in [(BackingKind::Memfd, PageSize::Base4K), (BackingKind::Hugetlb, PageSize::Huge2M)] {
        let backing_of = BackingConfig::new(kind, page).unwrap();
        let layout = [GpaRange::new(Gpa::new(0), mib(12)).unwrap()];
        let ram = match GuestRam::map(&layout, backing_of) {
            Ok(ram) => ram,
            Err(error) => {
                println!("skipped: {}: {error}; {:?}", kind.name(), lease.as_ref().err());
                continue;
            }
        };
        let saved = Arc::new(Saved::of([(0, full(true)), (2, sparse((5..400).step_by(5))), (4, full(false))]));
        let restorer = restore(&ram, &saved, config());
        hammer(&ram, &saved, 4, 6, 1);
        let report = finish(restorer);
        assert_eq!(report.progress.filled_windows, 3, "{report:?}");
        assert_eq!(report.huge, if kind == BackingKind::Hugetlb { 3 } else { 0 }, "{report:?}");
    }
}

#[test]
fn ram_that_cannot_be_restored_is_refused_with_the_reason() {
    if skip() {
        return;
    }
    let saved = Arc::new(Saved::of([(0, full(true))]));
    let refusal = |ram: &Arc<GuestRam>| {
        Restorer::start(ram.clone(), saved.clone(), config()).expect_err("it cannot be").to_string()
    };
    let used = anon(2);
    word(&used, 1, 0).store(1, Ordering::Relaxed);
    assert!(refusal(&used).contains("has pages already"), "{}", refusal(&used));
    let reserved = map_of(&[(Bytes::ZERO, mib(2))], BackingConfig::reservable());
    assert!(refusal(&reserved).contains("reserved frames"), "{}", refusal(&reserved));
    let owned = anon(1);
    let _words = owned.exclusive_words(owned.ranges()[0]).unwrap();
    assert!(refusal(&owned).contains("one owner"), "{}", refusal(&owned));

    let decided = anon(2);
    let host = Arc::new(LinuxHost::open().unwrap());
    let service = FirstTouch::start(host, vec![(VM, decided.clone())], None, |_, _| PageSize::Base4K).unwrap();
    assert!(refusal(&decided).contains("--policy"), "{}", refusal(&decided));
    service.stop();
    finish(restore(&decided, &saved, config()));
}

#[test]
fn ram_that_starts_on_huge_pages_is_filled_and_untouched_parts_start_huge() {
    if skip() {
        return;
    }
    let ram = ram(6, BackingKind::Anon, PageSize::Huge2M);
    let saved = Arc::new(Saved::of([(1, full(true)), (3, sparse([4]))]));
    let report = finish(restore(&ram, &saved, config()));
    [1, 3].into_iter().for_each(|window| check_window(&ram, &saved, window));
    word(&ram, 5, 0).store(1, Ordering::Relaxed);
    if must_be_huge(&report) {
        assert_eq!(backing(&ram, 1), (PAGES, Backing::Huge2M), "{report:?}");
    }
    assert!([1, PAGES].contains(&backing(&ram, 5).0), "a huge page, if the host has one");
    assert_eq!(backing(&ram, 3), (1, Backing::Base4K));
}

#[test]
fn an_empty_snapshot_is_restored_at_once() {
    if skip() {
        return;
    }
    let ram = anon(4);
    let restorer = restore(&ram, &Arc::new(Saved::default()), config());
    assert!(restorer.is_finished());
    assert_eq!(read(&ram, 2, 2), 0);
}

/// The word that RAM has before missing pages come.
fn earlier_word(window: u64, word: usize) -> u64 {
    !saved_word(window, word)
}

/// RAM of four windows with contents everywhere.
fn ram_with_contents(page: PageSize) -> Arc<GuestRam> {
    let ram = ram(4, BackingKind::Anon, page);
    ram.share().unwrap();
    for window in 0..4 {
        (0..WORDS_PER_WINDOW).for_each(|at| word(&ram, window, at).store(earlier_word(window, at), Ordering::Relaxed));
    }
    ram
}

/// A window of which only these pages are missing.
fn partly(pages: impl IntoIterator<Item = u16>) -> SavedWindow {
    SavedWindow { was_huge: true, has_others: true, ..sparse(pages) }
}

#[test]
fn missing_pages_come_and_all_other_pages_stay_as_they_were() {
    if skip() {
        return;
    }
    for page in [PageSize::Base4K, PageSize::Huge2M] {
        let ram = ram_with_contents(page);
        // window   0: all is missing   1: some pages are   2: nothing is   3: one page is
        let saved = Arc::new(Saved::of([(0, full(true)), (1, partly((0..PAGES).step_by(5))), (3, partly([511]))]));
        let restorer = Restorer::start_partial(ram.clone(), saved.clone(), config()).unwrap();
        for window in (0..4).rev() {
            for at in 0..WORDS_PER_WINDOW {
                let is_missing = saved.has(window, (at / WORDS_PER_PAGE) as u16);
                let expected = if is_missing { saved_word(window, at) } else { earlier_word(window, at) };
                assert_eq!(read(&ram, window, at), expected, "{page:?}: window {window}, word {at}");
            }
        }
        wait_for("the end of the restore", || restorer.is_finished());
        let report = restorer.report();
        assert_eq!((report.progress.filled_windows, report.failures.len()), (3, 0), "{report:?}");
        assert_eq!(report.progress.filled_bytes, PageSize::Base4K.bytes() * (512 + 103 + 1));
        assert_eq!(saved.order().len(), 3, "no window is read twice");
        if report.no_huge_page == 0 && report.not_huge == 2 {
            assert_eq!(backing(&ram, 0), (PAGES, Backing::Huge2M), "{report:?}");
            assert_eq!(report.collapsed, 2, "windows with other pages are collapsed: {report:?}");
        }
    }
}

#[test]
fn a_background_that_begins_later_leaves_touches_to_be_answered_at_once() {
    if skip() {
        return;
    }
    let ram = ram_with_contents(PageSize::Base4K);
    let saved = Arc::new(Saved::of((0..4).map(|window| (window, full(true)))));
    let begins = Arc::<AtomicBool>::default();
    let config = RestoreConfig { background_from: Some(begins.clone()), ..config() };
    let restorer = Restorer::start_partial(ram.clone(), saved.clone(), config).unwrap();
    check_window(&ram, &saved, 2);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(saved.order(), [2], "only what was touched");
    begins.store(true, Ordering::Release);
    let report = finish(restorer);
    assert_eq!((report.by_fault, report.by_background), (1, 3));
    (0..4).for_each(|window| check_window(&ram, &saved, window));
}

#[test]
fn only_anonymous_ram_can_be_completed() {
    if skip() {
        return;
    }
    let memfd = ram(2, BackingKind::Memfd, PageSize::Base4K);
    assert!(matches!(Restorer::check_partial(&memfd), Err(RestoreError::NotAnonymous)));
    let started = Restorer::start_partial(memfd, Arc::new(Saved::default()), config());
    assert!(matches!(started, Err(RestoreError::NotAnonymous)));
    Restorer::check_partial(&anon(2)).unwrap();
}
