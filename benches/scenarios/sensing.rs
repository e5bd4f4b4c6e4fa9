//! Slow-down of a guest by sensing: the same large, sparse guest twice, under `auto` with all its sensors and under
//! `never` with none, after everything is promoted. Both have their RAM on huge pages from the start, so that sensing
//! is the only difference.
//!
//! ```text
//!   auto   ████····████····████····      GUPS over a small part of a large RAM, taking turns of a second:
//!   never  ····████····████····████      a second is the longest pause between two of the manager's ticks
//! ```
//!
//! The manager also senses a paused guest. Its CPU time is therefore measured first, while its guest runs and
//! the other is paused.
//!
//! `cargo bench -p wideleaf-benches --bench sensing [-- LOG2_WORDS SETS RAM_GIB]` (default 24, which is 128 MiB, 3
//! and 16; needs KVM)

use std::process::ExitCode;
use std::time::{Duration, Instant};

use wideleaf_benches::coverage::{NEARLY_ALL, host_coverage};
use wideleaf_benches::guest::{Guest, GuestSetup, take_turns};
use wideleaf_benches::managed::{Managed, policy};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::ManagerReport;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, PageSize};

const TURNS_MAX: u32 = 12;
const SLICE: Duration = Duration::from_secs(1);
/// Time to settle: after 1.3 s without work the manager's ticks are as far apart as possible, and its sensors
/// have visited all windows.
const SETTLING: Duration = Duration::from_secs(5);
/// Duration of the measurement of a manager's CPU time.
const CPU_TIME: Duration = Duration::from_secs(10);
/// Duration of each guest's updates by its own clock, which also runs while the guest is paused. Two measurements of
/// CPU time and the turns take 54 s.
const UPDATE_TIME: Duration = Duration::from_secs(80);

/// Targets: the guest and the host each lose at most 1 %.
const SLOWDOWN_MAX: f64 = 0.01;
const CPU_SHARE_MAX: f64 = 0.01;

const ARMS: [&str; 2] = ["auto", "never"];
const AUTO: usize = 0;
const NEVER: usize = 1;

/// A guest with its manager. The manager ends first.
struct ManagedGuest {
    managed: Managed,
    guest: Guest,
}

impl ManagedGuest {
    /// Starts a guest and its manager, waits until it updates a table on huge pages, and leaves it paused.
    fn prepare(arm: &str, log2_words: u32, memory: Bytes, waiting: &Waiting) -> Result<ManagedGuest, ScenarioError> {
        let table = Bytes::new(8 << log2_words);
        let setup = GuestSetup {
            memory,
            backing: BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages"),
            cmdline: format!("kernel=gups log2_words={log2_words} seconds={} progress_ms=50", UPDATE_TIME.as_secs()),
            slot_bytes: None,
        };
        warm_host_memory(table + mib(64)).expect("memory to warm");
        let guest = Guest::start(&setup);
        guest.updates_begin(waiting)?;
        if host_coverage(guest.ram(), guest.region("table")) < NEARLY_ALL {
            return Err(ScenarioError::Skipped("this machine gives MADV_HUGEPAGE no huge pages".into()));
        }
        let managed = Managed::start(&guest, policy(arm));
        guest.pause();
        Ok(ManagedGuest { managed, guest })
    }

    /// Share of one CPU that the guest's manager and sensors use while it runs and the other guest is paused.
    fn cpu_share(&self, waiting: &Waiting) -> Result<f64, ScenarioError> {
        self.guest.resume();
        waiting.pass(SETTLING)?;
        let threads = self.managed.threads();
        let (began, before) = (Instant::now(), threads.cpu_use()?);
        waiting.pass(CPU_TIME)?;
        let share = threads.cpu_use()?.since(before).ran.as_secs_f64() / began.elapsed().as_secs_f64();
        self.guest.pause();
        Ok(share)
    }

    /// Ends the manager and lets the guest run to its end.
    fn retire(self) -> (Guest, ManagerReport) {
        let report = self.managed.stop();
        self.guest.resume();
        (self.guest, report)
    }
}

/// Results of a pair of guests.
struct Set {
    turns: Vec<Vec<f64>>,
    /// CPU shares of the managers, by arm.
    cpu_shares: Vec<f64>,
    /// Reports of the managers, by arm.
    reports: Vec<ManagerReport>,
}

fn run_set(log2_words: u32, memory: Bytes, waiting: &Waiting) -> Result<Set, ScenarioError> {
    let players = ARMS
        .iter()
        .map(|arm| ManagedGuest::prepare(arm, log2_words, memory, waiting))
        .collect::<Result<Vec<_>, _>>()?;
    let cpu_shares = players.iter().map(|player| player.cpu_share(waiting)).collect::<Result<_, _>>()?;
    let guests: Vec<&Guest> = players.iter().map(|player| &player.guest).collect();
    let turns = take_turns(&guests, TURNS_MAX, SLICE, waiting)?;
    let (guests, reports): (Vec<Guest>, _) = players.into_iter().map(ManagedGuest::retire).unzip();
    guests.into_iter().try_for_each(|guest| guest.finish(waiting))?;
    Ok(Set { turns, cpu_shares, reports })
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (log2_words, sets) = (arguments.number(0, 24)?, arguments.count(1, 3)?);
    let memory = gib(arguments.number(2, 16)?);
    needs_kvm()?;
    let sets = (0..sets).map(|_| run_set(log2_words, memory, waiting)).collect::<Result<Vec<_>, _>>()?;
    if sets.iter().all(|set| set.turns.is_empty()) {
        return Err(ScenarioError::TooLate { what: "the first turn", limit: UPDATE_TIME });
    }
    let table = Bytes::new(8 << log2_words);
    Ok(figures(format!("GUPS over {table} of {memory} of RAM, all of it on huge pages"), &sets))
}

fn figures(title: String, sets: &[Set]) -> Figures {
    let turns: Vec<Vec<Vec<f64>>> = sets.iter().map(|set| set.turns.clone()).collect();
    let set_count = turns.iter().filter(|set| !set.is_empty()).count();
    let cpu_percents = |arm: usize| sets.iter().map(|set| set.cpu_shares[arm] * 100.0).collect::<Vec<_>>();
    let mut arms = Table::new(["arm"], ["updates", "manager and sensors, of a CPU", "ticks", "promotions"]);
    for (index, arm) in ARMS.iter().enumerate() {
        let rates = turns.iter().flatten().map(|turn| turn[index] / 1e6).collect();
        let sum = |of: &dyn Fn(&ManagerReport) -> u64| sets.iter().map(|set| of(&set.reports[index])).sum::<u64>();
        arms.row([
            (*arm).into(),
            Cell::number(median(rates), 2, "M/s"),
            Cell::number(median(cpu_percents(index)), 3, "%"),
            Cell::count(sum(&|report| report.ticks)),
            Cell::count(sum(&|report| report.done("collapse") + report.done("swap"))),
        ]);
    }
    let ratio = SpreadMedian::ratio_within_turns(&turns, AUTO, NEVER);
    let mut speed = Table::new(["ratio within a turn"], columns("speed", set_count));
    speed.row([vec!["auto : never".into()], ratio.cells(4, "")].concat());
    let count: usize = turns.iter().map(Vec::len).sum();
    let (slice_s, spread) = (SLICE.as_secs(), spread_in_words(set_count));
    let (lost_percent, used_percent) =
        (ratio.map(|ratio| (1.0 - ratio) * 100.0), SpreadMedian::of(&cpu_percents(AUTO)));
    let (lost_max, used_max) = (Limit::AtMost(SLOWDOWN_MAX * 100.0), Limit::AtMost(CPU_SHARE_MAX * 100.0));
    Figures::of(title)
        .table(arms)
        .table(sensors(sets))
        .table(speed)
        .note(format!("medians of {count} turns of {slice_s} s in {set_count} sets of guests, {spread}"))
        .bars([lost_percent.bar("slow-down", 2, "%", lost_max)])
        .bars([used_percent.bar("manager and sensors", 2, "% of a CPU", used_max)])
}

/// Work of the sensors other than the host backing, over all sets.
fn sensors(sets: &[Set]) -> Table {
    let mut rows = Table::new(["sensor of auto"], ["samples", "windows", "guest waited", "CPU, in the loop's thread"]);
    let names = sets.iter().flat_map(|set| set.reports[AUTO].sensor_costs.keys().copied());
    for name in names.collect::<std::collections::BTreeSet<_>>() {
        let costs = || sets.iter().filter_map(|set| set.reports[AUTO].sensor_costs.get(name));
        rows.row([
            name.into(),
            Cell::count(costs().map(|cost| cost.samples).sum()),
            Cell::count(costs().map(|cost| cost.windows).sum()),
            Cell::count(costs().map(|cost| cost.waits).sum()),
            Cell::number(costs().map(|cost| cost.cpu.as_secs_f64() * 1e3).sum(), 1, "ms"),
        ]);
    }
    rows
}

fn main() -> ExitCode {
    scenario::run("sensing", experiment)
}
