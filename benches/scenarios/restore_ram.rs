//! How fast saved RAM arrives while threads touch it at random: windows moved in whole, windows copied, pages copied.
//! No guest: threads of this process touch one word of each page, window by window in random order, as a guest that
//! needs all of its memory at once. The image is a file in the page cache.
//!
//! The arms take turns. Before them: the time until a guest may run, by the size of its RAM, of which nothing is in
//! memory.
//!
//! `cargo bench -p wideleaf-benches --bench restore_ram [-- MIB ROUNDS]` (default 1024 and 6; needs userfaultfd)

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::Figures;
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::restore::{Background, ReadError, RestoreConfig, Restorer, SavedRam, SavedWindow};
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::testing::page_copies::PageCopies;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const WORDS_PER_WINDOW: usize = WINDOW.as_usize() / 8;

/// An image in a file without a name.
struct Image(File);

impl SavedRam for Image {
    fn window(&self, _: WindowIndex) -> SavedWindow {
        SavedWindow { pages: PageSet::ALL, was_huge: true, ..SavedWindow::default() }
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        let read = self.0.read_exact_at(into, window.start().get());
        read.map_err(|source| ReadError::Io { window, file: "the image".to_owned(), source })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    MovedByFaults,
    MovedWithBackground,
    CopiedByFaults,
    PagesCopied,
}

const ARMS: [(Arm, &str); 4] = [
    (Arm::MovedByFaults, "moved by faults"),
    (Arm::MovedWithBackground, "moved, and in the background"),
    (Arm::CopiedByFaults, "windows copied by faults"),
    (Arm::PagesCopied, "pages copied by faults"),
];
const PAGES_COPIED: usize = 3;

/// Result of one run of an arm.
struct Run {
    /// Rate until every page was touched, in GiB/s.
    speed: f64,
    /// Number of faults that were answered.
    faults: u64,
    /// Number of windows on huge pages afterwards.
    huge: usize,
    /// Waits of touches in microseconds: median, 99th percentile, longest. Copies of pages do not time theirs.
    waits_us: Option<[u64; 3]>,
}

fn main() -> ExitCode {
    scenario::run("restore_ram", measure)
}

fn measure(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let bytes = mib(u64::from(arguments.count(0, 1024)?));
    let rounds = arguments.count(1, 6)?;
    let starts = starts_of_large_ram()?;
    let image = Arc::new(Image(image(bytes)));
    let turn = |arm: usize, number: u32| -> Result<Run, ScenarioError> {
        waiting.pass(Duration::ZERO)?;
        warm_host_memory(bytes + mib(64)).expect("memory to warm");
        Ok(run(ARMS[arm].0, &image, bytes, u64::from(number)))
    };
    let rounds = (1..=rounds).map(|number| round(ARMS.len(), number, |arm| turn(arm, number)));
    let rounds = rounds.collect::<Result<Vec<Vec<Run>>, ScenarioError>>()?;
    let (count, spread) = (rounds.len(), spread_in_words(rounds.len()));
    let title = format!("{bytes} in random order, medians of {count} rounds, {spread}");
    let windows = bytes.get() / WINDOW.get();
    Ok(Figures::of(title)
        .table(speeds(&rounds))
        .table(ratios(&rounds))
        .table(starts)
        .note(format!("of {windows} windows; the longest wait is that of all rounds")))
}

fn speeds(rounds: &[Vec<Run>]) -> Table {
    let others = vec!["faults", "huge windows after", "wait, p50", "wait, p99", "longest wait"];
    let mut table = Table::new(["arm"], [columns("speed", rounds.len()), others].concat());
    for (arm, (_, name)) in ARMS.into_iter().enumerate() {
        let all = |of: &dyn Fn(&Run) -> f64| rounds.iter().map(|round| of(&round[arm])).collect::<Vec<f64>>();
        let waits = |at: usize, of: fn(Vec<f64>) -> f64| {
            let times = rounds.iter().map(|round| Some(round[arm].waits_us?[at] as f64)).collect::<Option<Vec<f64>>>();
            let untimed = || Cell::missing("copies of pages are not timed");
            times.map_or_else(untimed, |times| Cell::number(of(times), 0, "us"))
        };
        let longest = |times: Vec<f64>| times.into_iter().fold(0.0, f64::max);
        let counts = [
            Cell::number(median(all(&|run| run.faults as f64)), 0, ""),
            Cell::number(median(all(&|run| run.huge as f64)), 0, ""),
            waits(0, median),
            waits(1, median),
            waits(2, longest),
        ];
        let speed = SpreadMedian::of(&all(&|run| run.speed)).cells(2, "GiB/s");
        table.row([vec![name.into()], speed, counts.to_vec()].concat());
    }
    table
}

/// Speeds in each round, as ratios to that of copied pages.
fn ratios(rounds: &[Vec<Run>]) -> Table {
    let mut table = Table::new(["ratio within a round"], columns("speed", rounds.len()));
    for (arm, (_, name)) in ARMS.into_iter().enumerate().take(PAGES_COPIED) {
        let ratios: Vec<f64> = rounds.iter().map(|round| round[arm].speed / round[PAGES_COPIED].speed).collect();
        let name = format!("{name} : {}", ARMS[PAGES_COPIED].1);
        table.row([vec![name.into()], SpreadMedian::of(&ratios).cells(1, "")].concat());
    }
    table
}

/// Time until a guest may run, by the size of its RAM: nothing of it is in memory.
fn starts_of_large_ram() -> Result<Table, ScenarioError> {
    let image = Arc::new(Image(tempfile::tempfile().expect("a file")));
    let mut table = Table::new(["RAM"], ["mapped", "all windows registered"]);
    for size in [gib(1), gib(16), gib(64)] {
        let began = Instant::now();
        let ram = ram(size);
        let mapped = began.elapsed();
        let config = RestoreConfig { background: Background::Off, ..RestoreConfig::default() };
        let started = Restorer::start(ram, image.clone(), config);
        let restorer = started.map_err(|error| ScenarioError::Skipped(error.to_string()))?;
        let ms = |time: Duration| Cell::number(time.as_secs_f64() * 1e3, 2, "ms");
        table.row([size.to_string().into(), ms(mapped), ms(restorer.report().start)]);
        restorer.abandon(wideleaf_memory::restore::GuestIsGone);
    }
    Ok(table)
}

fn ram(bytes: Bytes) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), bytes).expect("fits");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    GuestRam::map(&[range], backing).expect("addresses")
}

/// Pseudo-random bytes, so that nothing is zero.
fn image(bytes: Bytes) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    let mut state = 1_u64;
    let mut window = vec![0_u8; WINDOW.as_usize()];
    for _ in 0..bytes.get() / WINDOW.get() {
        for word in window.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *word = (state | 1).to_le_bytes();
        }
        file.write_all(&window).expect("room for the image");
    }
    file
}

fn run(arm: Arm, image: &Arc<Image>, bytes: Bytes, seed: u64) -> Run {
    let ram = ram(bytes);
    let speed = |took: Duration| bytes.get() as f64 / gib(1).get() as f64 / took.as_secs_f64();
    if arm == Arm::PagesCopied {
        let image = image.clone();
        let read = move |page: Gpa, into: &mut [u8]| image.0.read_exact_at(into, page.get()).expect("it is in memory");
        let copies = PageCopies::start(ram.clone(), read).expect("userfaultfd");
        let speed = speed(touch_all(&ram, bytes, seed));
        return Run { speed, huge: huge_windows(&ram), faults: copies.stop(), waits_us: None };
    }
    let background = if arm == Arm::MovedWithBackground { Background::Unlimited } else { Background::Off };
    let config = RestoreConfig { background, may_move: arm != Arm::CopiedByFaults, ..RestoreConfig::default() };
    let restorer = Restorer::start(ram.clone(), image.clone(), config).expect("userfaultfd");
    let speed = speed(touch_all(&ram, bytes, seed));
    let huge = huge_windows(&ram);
    let report = restorer.report();
    let waits_us = [0.5, 0.99, 1.0].map(|quantile| report.fault_ns.value_at_quantile(quantile) / 1000);
    while !restorer.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Run { speed, huge, faults: report.by_fault, waits_us: Some(waits_us) }
}

fn touch_all(ram: &GuestRam, bytes: Bytes, seed: u64) -> Duration {
    let count = bytes.get() / WINDOW.get();
    let mut order: Vec<u64> = (0..count).collect();
    let mut state = seed * 2 + 1;
    for end in (1..order.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        order.swap(end, (state >> 33) as usize % (end + 1));
    }
    let words = ram.words(ram.ranges()[0]);
    let began = Instant::now();
    for window in order {
        let first = window as usize * WORDS_PER_WINDOW;
        let read = words[first..first + WORDS_PER_WINDOW].iter().step_by(512).map(|word| word.load(Ordering::Relaxed));
        assert!(read.fold(u64::MAX, u64::min) > 0, "no word of the image is zero");
    }
    began.elapsed()
}

fn huge_windows(ram: &GuestRam) -> usize {
    let host = LinuxHost::open().expect("/proc is mounted");
    let mut sensor = HostBackingSensor::default();
    let seen = sensor.sample(&host, ram.ranges()[0], None).expect("PAGEMAP_SCAN");
    seen.filter(|window| window.backing == Backing::Huge2M).count()
}
