//! Swap compared with collapse and `memcpy`: 64 MiB each, warm, on base pages, in turns.
//!
//! ```text
//!   window 0  swap     (huge pages prepared before, as the manager does while it waits: a row of its own)
//!   window 1  collapse
//!   buffer    memcpy of 2 MiB
//!   window 2  swap …
//! ```
//!
//! Then one thread and two threads swap all windows of fresh RAM in turns, including the preparation
//! of the huge pages. The one thread is first in odd pairs, the two threads are in even ones.
//!
//! This is not a criterion bench. On a machine with a speed that changes from moment to moment, it compares times of
//! one turn, not totals taken seconds apart.
//!
//! `cargo bench -p wideleaf-benches --bench swap`

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use wideleaf_benches::populated_ram;
use wideleaf_benches::scenario::{self, ScenarioError};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::mover::READY_SLOTS;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, OutcomeResult, PageSize, WindowIndex};

/// Number of sets, each with new memory.
const SETS: usize = 8;
/// Memory that each of the three copies in a set.
const BYTES: Bytes = mib(64);
const WINDOW: Bytes = PageSize::Huge2M.bytes();
/// Number of pairs of bursts, by one thread and by two.
const BURSTS: u32 = 16;

/// Times of one turn.
struct Turn {
    swap: Duration,
    /// Time in the swap in which the window is unavailable to the guest.
    unavailable: Duration,
    /// Time to prepare one huge page: the mean of the batch of this turn's page.
    refill: Duration,
    collapse: Duration,
    memcpy: Duration,
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let began = Instant::now();
    let result = work();
    (began.elapsed(), result)
}

/// Turns of one set. Turns with a window that could not become huge (a page was busy) are left out.
fn run_set(host: &Arc<LinuxHost>) -> Vec<Turn> {
    // All memory must be warm, or the bench measures an outer hypervisor: RAM, both buffers, and the
    // huge pages of both.
    warm_host_memory(BYTES * 6).expect("memory to warm");
    let ram = populated_ram(BYTES * 2);
    let (source, mut target) = (vec![1_u8; BYTES.as_usize()], vec![2_u8; BYTES.as_usize()]);
    let mover = WindowMover::start(host.clone(), ram.clone()).expect("the mover was probed");
    let mut swapper = Swapper::new(mover.aside().clone());
    let windows: Vec<WindowIndex> = ram.ranges()[0].gpa.windows().collect();
    let (pairs, _) = windows.as_chunks::<2>();
    let mut refill = Duration::ZERO;
    let buffers = source.chunks(WINDOW.as_usize()).zip(target.chunks_mut(WINDOW.as_usize()));
    let turns = pairs.iter().zip(buffers).enumerate().filter_map(|(turn, (pair, (source, target)))| {
        if turn % usize::from(READY_SLOTS) == 0 {
            let (took, ready) = timed(|| swapper.refill());
            refill = took / ready.expect("huge pages") as u32;
        }
        let (swap, swapped) = timed(|| swapper.swap(host.as_ref(), pair[0]));
        let (collapse, collapsed) = timed(|| collapse_window(host.as_ref(), ram.ranges()[0], pair[1]));
        let (memcpy, ()) = timed(|| target.copy_from_slice(black_box(source)));
        let is_done = [swapped.result, collapsed.result] == [OutcomeResult::Done; 2];
        is_done.then_some(Turn { swap, unavailable: swapped.unavailable, refill, collapse, memcpy })
    });
    let turns = turns.collect();
    black_box(&target);
    turns
}

/// Numbers of threads of a pair of bursts.
const THREADS: [u16; 2] = [1, 2];

/// Times of swapping all windows of fresh RAM.
#[derive(Clone, Copy)]
struct Burst {
    took: Duration,
    /// CPU time of all threads.
    cpu: Duration,
}

/// Swaps all windows of fresh RAM with `threads` threads, each taking the next window. `None` if a window
/// could not become huge.
fn burst(host: &Arc<LinuxHost>, threads: u16) -> Option<Burst> {
    warm_host_memory(BYTES * 2).expect("memory to warm");
    let ram = populated_ram(BYTES);
    let mover = WindowMover::start(host.clone(), ram.clone()).expect("the mover was probed");
    let mut swappers = Swapper::several(mover.aside(), threads);
    let windows: Vec<WindowIndex> = ram.ranges()[0].gpa.windows().collect();
    let next = AtomicUsize::new(0);
    let (took, swaps) = timed(|| {
        std::thread::scope(|scope| {
            let work = |swapper: &mut Swapper| {
                let mine = std::iter::from_fn(|| windows.get(next.fetch_add(1, Ordering::Relaxed)));
                mine.map(|window| swapper.swap(host.as_ref(), *window)).collect::<Vec<_>>()
            };
            let threads: Vec<_> = swappers.iter_mut().map(|swapper| scope.spawn(move || work(swapper))).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("a swap does not panic")).collect::<Vec<_>>()
        })
    });
    let are_done = swaps.iter().all(|swap| swap.result == OutcomeResult::Done);
    are_done.then(|| Burst { took, cpu: swaps.iter().map(|swap| swap.cost.cpu).sum() })
}

/// Gain and cost of a second thread: times, and their ratio.
fn compare_threads(host: &Arc<LinuxHost>) -> [Table; 2] {
    let pair = |number| round(THREADS.len(), number, |arm| burst(host, THREADS[arm]).ok_or(()));
    let bursts: Vec<Vec<Burst>> = (1..=BURSTS).filter_map(|number| pair(number).ok()).collect();
    let windows = BYTES.pages(PageSize::Huge2M) as f64;
    let mut times = Table::new([], ["threads", "per window", "CPU per window"]);
    for (arm, threads) in THREADS.into_iter().enumerate() {
        let us = |of: fn(&Burst) -> Duration| {
            median(bursts.iter().map(|pair| of(&pair[arm]).as_secs_f64() * 1e6 / windows).collect())
        };
        let (took, cpu) = (us(|burst| burst.took), us(|burst| burst.cpu));
        times.row([Cell::count(threads.into()), Cell::number(took, 0, "us"), Cell::number(cpu, 0, "us")]);
    }
    let ratio = |pair: &Vec<Burst>| pair[0].took.as_secs_f64() / pair[1].took.as_secs_f64();
    let ratio = SpreadMedian::of(&bursts.iter().map(ratio).collect::<Vec<_>>());
    let mut speed = Table::new(["ratio within a pair"], [columns("speed", bursts.len()), vec!["pairs"]].concat());
    let pairs = vec![Cell::count(bursts.len() as u64)];
    speed.row([vec!["two threads : one".into()], ratio.cells(2, ""), pairs].concat());
    [times, speed]
}

fn main() -> ExitCode {
    scenario::run("swap", |_, _| measure())
}

fn measure() -> Result<Figures, ScenarioError> {
    probe().map_err(|why| ScenarioError::Skipped(why.to_string()))?;
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let sets: Vec<Vec<Turn>> = (0..SETS).map(|_| run_set(&host)).collect();
    let full_sets = sets.iter().filter(|set| !set.is_empty()).count();
    if full_sets == 0 {
        return Err(ScenarioError::Failed(
            "cannot compare swaps: no window became huge; free some memory first".into(),
        ));
    }
    let shown = |of: &dyn Fn(&Turn) -> f64| {
        SpreadMedian::of_sets(&sets.iter().map(|set| set.iter().map(of).collect()).collect::<Vec<_>>())
    };

    type Part = fn(&Turn) -> Duration;
    let parts: [(&str, Part); 6] = [
        ("swap", |turn| turn.swap),
        ("unavailable in swap", |turn| turn.unavailable),
        ("preparation", |turn| turn.refill),
        ("swap + preparation", |turn| turn.swap + turn.refill),
        ("collapse", |turn| turn.collapse),
        ("memcpy", |turn| turn.memcpy),
    ];
    let mut speeds = Table::new(["part"], [columns("speed", full_sets), vec!["per window"]].concat());
    for (name, of) in parts {
        let seconds = shown(&|turn| of(turn).as_secs_f64());
        let speed = seconds.map(|seconds| WINDOW.get() as f64 / f64::from(1 << 30) / seconds);
        let per_window = vec![Cell::number(seconds.median() * 1e6, 0, "us")];
        speeds.row([vec![name.into()], speed.cells(2, "GiB/s"), per_window].concat());
    }
    let (turns, spread) = (sets.iter().flatten().count(), spread_in_words(full_sets));
    let mut figures = Figures::of(format!("{turns} turns in {full_sets} sets, medians, {spread}")).table(speeds);
    for (name, of, least) in [("collapse", parts[4].1, 1.2), ("memcpy", parts[5].1, 0.5)] {
        let ratio = shown(&|turn| of(turn).as_secs_f64() / turn.swap.as_secs_f64());
        figures = figures.bars([ratio.bar(&format!("speed of swap : {name}"), 2, "", Limit::AtLeast(least))]);
    }
    Ok(compare_threads(&host).into_iter().fold(figures, Figures::table))
}
