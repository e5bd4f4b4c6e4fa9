//! Giant pages under a guest that writes: duration of the pauses of its vCPUs and speed of the move of 1
//! GiB onto one pool page, by the guest's rate of writes. This is not a criterion bench, because each
//! swap of a live guest differs.
//!
//! ```text
//!   guest   fill ██│ pass ░ pass ░ pass ░ …   checks and rewrites all words of its pattern; ░ paused by a move
//!                  ▲ promote │ demote │ promote … a last whole pass, in which the guest finds all of its words
//! ```
//!
//! A word that a move lost, or a guest that a move left stopped, ends the bench. The pause is judged by the longest
//! of all moves in one direction, also of those that were given up.
//!
//! `cargo bench -p wideleaf-benches --bench giant` (needs KVM and a page of 1 GiB)

use std::process::ExitCode;
use std::time::Duration;

use wideleaf_benches::guest::{Guest, GuestSetup};
use wideleaf_benches::scenario::{self, ScenarioError, Waiting, needs_kvm};
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::statistics::quantile;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Gpa, OutcomeResult, PageSize};

const SWAPS: usize = 20;
const GIANT: Gpa = Gpa::new(0);
/// Time between two swaps, in which the guest runs on large pages again.
const REST: Duration = Duration::from_millis(300);

/// Target of the bench.
const PAUSE_MAX_MS: f64 = 3.0;

/// A guest that has filled its pattern and rewrites it.
fn start(pattern: &str, waiting: &Waiting) -> Result<Guest, ScenarioError> {
    let guest = Guest::start(&GuestSetup {
        memory: gib(1) + mib(64),
        backing: BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages"),
        cmdline: format!("kernel=pattern bytes={pattern} passes=1000000"),
        slot_bytes: Some(gib(1)),
    });
    guest.begin_of("pass", waiting)?;
    Ok(guest)
}

/// Moves of one guest's giant, there and back in turns.
struct Moves {
    there: Vec<GiantSwap>,
    back: Vec<GiantSwap>,
}

impl Moves {
    fn of(guest: &Guest, pools: &HugetlbPools, waiting: &Waiting) -> Result<Moves, ScenarioError> {
        let host = LinuxHost::open().expect("/proc is mounted");
        let site = SwapSite { host: &host, ram: guest.ram(), second_level: guest.second_level().as_ref() };
        let giants = GiantPages::new(pools.clone(), false, SwapLimits::default());
        let mut moves = Moves { there: Vec::new(), back: Vec::new() };
        for _ in 0..SWAPS {
            moves.there.push(survived(giants.promote(site, GIANT)));
            waiting.pass(REST)?;
            moves.back.push(survived(giants.demote(site, GIANT, PageSize::Huge2M)));
            waiting.pass(REST)?;
        }
        Ok(moves)
    }
}

fn survived(swap: GiantSwap) -> GiantSwap {
    assert!(!swap.is_stuck && swap.panicked.is_none(), "a move left the guest stopped: {swap:?}");
    swap
}

fn pause_ms(swap: &GiantSwap) -> f64 {
    swap.unavailable.as_secs_f64() * 1e3
}

fn done(swaps: &[GiantSwap]) -> Vec<&GiantSwap> {
    swaps.iter().filter(|swap| swap.result == OutcomeResult::Done).collect()
}

/// Figures of all swaps in one direction.
fn table(caption: &str, swaps: &[GiantSwap]) -> Table {
    let done = done(swaps);
    let mut table = Table::new(["figure"], ["min", "median", "p90", "max"]);
    let mut row = |name: &str, unit: &str, of: &dyn Fn(&GiantSwap) -> f64| {
        let values: Vec<f64> = done.iter().map(|swap| of(swap)).collect();
        let cells = [0.0, 0.5, 0.9, 1.0].map(|share| match quantile(&values, share) {
            Some(value) => Cell::number(value, 2, unit),
            None => Cell::missing("no swap was done"),
        });
        table.row(std::iter::once(Cell::from(name)).chain(cells));
    };
    row("pause", "ms", &pause_ms);
    row("whole swap", "ms", &|swap| swap.elapsed.as_secs_f64() * 1e3);
    row("CPU", "ms", &|swap| swap.cost.cpu.as_secs_f64() * 1e3);
    row("copied", "GiB/s", &|swap| swap.cost.copied.get() as f64 / gib(1).get() as f64 / swap.elapsed.as_secs_f64());
    row("pages written", "1/s", &|swap| swap.written_pages as f64 / swap.elapsed.as_secs_f64());
    row("rounds", "", &|swap| f64::from(swap.rounds));
    row("pauses", "", &|swap| f64::from(swap.pauses));
    table.captioned(format!("{caption}: {} of {} done", done.len(), swaps.len()))
}

/// Target for the longest pause of all swaps in one direction; missed if none was done.
fn bar(caption: &str, swaps: &[GiantSwap]) -> Bar {
    let longest = swaps.iter().map(pause_ms).fold(0.0, f64::max);
    let longest =
        if done(swaps).is_empty() { Cell::missing("no swap was done") } else { Cell::number(longest, 2, "ms") };
    Bar::new(format!("{caption}: longest pause of {}:", swaps.len()), longest, Limit::AtMost(PAUSE_MAX_MS))
}

fn main() -> ExitCode {
    scenario::run("giant", |_, waiting| measure(waiting))
}

fn measure(waiting: &Waiting) -> Result<Figures, ScenarioError> {
    needs_kvm()?;
    let pools = HugetlbPools::of_this_machine();
    let _lease = pools.lease(PageSize::Giant1G, 1).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    warm_host_memory(gib(3)).expect("memory to warm");
    let mut figures = Figures::of("moves of 1 GiB onto a giant page and back, under a guest with one vCPU");
    for pattern in ["16M", "900M"] {
        let guest = start(pattern, waiting)?;
        let Moves { there, back } = Moves::of(&guest, &pools, waiting)?;
        guest.check_all_words(waiting)?;
        guest.stop();
        for (direction, swaps) in [("onto a giant page", there), ("and back", back)] {
            let caption = format!("a guest that rewrites {pattern} of its RAM, {direction}");
            figures = figures.table(table(&caption, &swaps)).bars([bar(&caption, &swaps)]);
        }
    }
    Ok(figures.note("the guests found each of their words in a last pass"))
}
