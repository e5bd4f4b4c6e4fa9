//! What a trade takes: 64 cold windows on huge pages give them to 64 hot ones on base pages, pair by pair.
//!
//! ```text
//!   pair 0   vacate a cold window   (512 base pages are made)              swap the hot one onto its page
//!   pair 1   vacate the next one    (onto the pages that pair 0 left)      swap …
//!   pair 2   as pair 0: everything was given back before
//!   …
//!   between  collapse of a window, for comparison
//! ```
//!
//! This is not a criterion bench, for the same reason as `swap`.
//!
//! `cargo bench -p wideleaf-benches --bench trade`

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_benches::populated_ram;
use wideleaf_benches::scenario::{self, ScenarioError};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::table::Table;
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::swap::{Swap, Swapper};
use wideleaf_memory::actuators::vacate::Vacate;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, OutcomeResult, WindowIndex};

/// Number of sets, each with new memory.
const SETS: usize = 6;
/// Number of pairs of a set.
const PAIRS: u64 = 64;
/// Memory of all cold windows, or of all hot ones.
const BYTES: Bytes = mib(2 * PAIRS);

/// Both halves of a trade, and a collapse beside them.
struct Pair {
    vacate: Vacate,
    swap: Swap,
    collapse: Duration,
    /// Whether the base pages were those that the pair before left.
    has_used_pages: bool,
}

impl Pair {
    fn cpu(&self) -> Duration {
        self.vacate.cost.cpu + self.swap.cost.cpu
    }
}

/// Pairs of one set. Pairs of which a part was not done (a page was busy) are left out.
fn run_set(host: &Arc<LinuxHost>) -> Result<Vec<Pair>, ScenarioError> {
    // Cold, hot, and collapsed windows; and the huge pages of the first and the last.
    warm_host_memory(BYTES * 5).map_err(|why| ScenarioError::Skipped(why.to_string()))?;
    let ram = populated_ram(BYTES * 3);
    let collapse = |window| collapse_window(host.as_ref(), ram.ranges()[0], WindowIndex::new(window));
    if (0..PAIRS).any(|cold| collapse(cold).result != OutcomeResult::Done) {
        return Err(ScenarioError::Skipped(format!("this machine has fewer than {PAIRS} huge pages")));
    }
    let mover = WindowMover::start(host.clone(), ram.clone()).map_err(|why| ScenarioError::Skipped(why.to_string()))?;
    let mut swapper = Swapper::new(mover.aside().clone());
    let pairs = (0..PAIRS).filter_map(|pair| {
        let has_used_pages = pair % 2 == 1;
        let vacate = swapper.vacate(host.as_ref(), WindowIndex::new(pair));
        let swap = swapper.swap(host.as_ref(), WindowIndex::new(PAIRS + pair));
        if has_used_pages {
            swapper.give_back_vacated();
        }
        let collapse = collapse(2 * PAIRS + pair);
        let is_done = [vacate.result, swap.result, collapse.result] == [OutcomeResult::Done; 3];
        is_done.then_some(Pair { vacate, swap, collapse: collapse.unavailable, has_used_pages })
    });
    Ok(pairs.collect())
}

fn main() -> ExitCode {
    scenario::run("trade", |_, _| measure())
}

fn measure() -> Result<Figures, ScenarioError> {
    probe().map_err(|why| ScenarioError::Skipped(why.to_string()))?;
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let sets = (0..SETS).map(|_| run_set(&host)).collect::<Result<Vec<_>, ScenarioError>>()?;
    let pairs = sets.iter().flatten().count();
    if pairs == 0 {
        return Err(ScenarioError::Skipped("no window could be traded (empty page tables go since Linux 6.14)".into()));
    }
    let shown = |is_of: &dyn Fn(&Pair) -> bool, of: &dyn Fn(&Pair) -> f64| {
        let of_set = |set: &Vec<Pair>| set.iter().filter(|pair| is_of(pair)).map(of).collect();
        SpreadMedian::of_sets(&sets.iter().map(of_set).collect::<Vec<_>>())
    };
    let all = |_: &Pair| true;
    let full_sets = sets.iter().filter(|set| !set.is_empty()).count();
    let mut times = Table::new(["part of a pair"], columns("time", full_sets));
    let mut row = |name: &str, is_of: &dyn Fn(&Pair) -> bool, of: &dyn Fn(&Pair) -> Duration| {
        let us = shown(is_of, &|pair| of(pair).as_secs_f64() * 1e6);
        times.row([vec![name.into()], us.cells(0, "us")].concat());
    };
    row("cold window out of reach", &all, &|pair| pair.vacate.unavailable);
    row("hot window out of reach", &all, &|pair| pair.swap.unavailable);
    row("CPU of a pair, base pages made", &|pair| !pair.has_used_pages, &Pair::cpu);
    row("CPU of a pair, base pages of the pair before", &|pair| pair.has_used_pages, &Pair::cpu);
    row("collapse: window out of reach", &all, &|pair| pair.collapse);

    let mut figures =
        Figures::of(format!("{pairs} pairs in {full_sets} sets, medians, {}", spread_in_words(full_sets)));
    figures = figures.table(times);
    for (name, of) in [("cold", 0), ("hot", 1)] {
        let ratio = shown(&all, &|pair| {
            let unavailable = [pair.vacate.unavailable, pair.swap.unavailable][of];
            unavailable.as_secs_f64() / pair.collapse.as_secs_f64()
        });
        let what = format!("{name} window out of reach : collapse");
        figures = figures.bars([ratio.bar(&what, 2, "", Limit::AtMost(0.5))]);
    }
    Ok(figures)
}
