//! `wideleaf demo`: the gain of live promotion, as a small experiment. Three arms take turns, each a `wideleaf run`
//! in its own process, over several rounds. Results are medians of ratios within a round.
//!
//! | arm | RAM |
//! |---|---|
//! | base | 4 KiB pages, never promoted |
//! | promoted | 4 KiB pages, promoted to 2 MiB while GUPS runs |
//! | hugetlb | 2 MiB pages from the pool from the start (THP if no pool is available) |
//! | native | as hugetlb, in a process instead of a guest (only if there is a guest to compare with) |
//!
//! Host memory is kept warm until the promotion is over. If the host is itself a VM, touching frames that were free
//! for a few seconds costs ten times as much, and the demo would measure that instead.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::Cell;
use serde::{Deserialize, Serialize};
use wideleaf_measure::order::arms_of_round;
use wideleaf_measure::statistics::{Better, Comparison, Interval, Spread, ratios_within_rounds};
use wideleaf_memory::warming::{warm_copy_bytes_per_second, warm_host_memory};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::environment::Environment;
use wideleaf_run::failure::Failure;
use wideleaf_run::guest;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::{Gaps, Phase, RunReport};
use wideleaf_run::setup::evidence;

use crate::child;
use crate::guardian::pool::HeldPool;
use crate::options::FormatArg;
use crate::output::Output;
use crate::progress::visible_bar;
use crate::report::rate;
use crate::table::{number, table};

const DEMO_EXAMPLES: &str = "\
Examples:
  In guests if /dev/kvm is usable, otherwise natively:
    wideleaf demo

  A table of 1 GiB, natively in any case:
    wideleaf demo --log2-words 27 --native

  The whole report of every run, for programs:
    wideleaf demo --rounds 9 --format json --output demo.json";

/// Arguments of `wideleaf demo`.
#[derive(Args, Debug)]
#[command(after_long_help = DEMO_EXAMPLES)]
pub struct DemoArgs {
    /// Size of the table: 2^N words of 8 bytes (25 is 256 MiB). Each run has 256 MiB of RAM more than its table
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = clap::value_parser!(u8).range(20..=30))]
    pub log2_words: u8,

    /// Number of runs of each arm (a way to back RAM); the arms take turns, and a run takes some seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Run natively even if /dev/kvm is usable
    #[arg(long)]
    pub native: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// The promoted arm first runs this long on base pages, so that both stretches are visible.
const POLICY_DELAY: Duration = Duration::from_millis(500);

/// Time for which host memory is kept warm after the policy may act: enough for the default table at the budget's rate.
const WARM_AFTER_DELAY: Duration = Duration::from_millis(500);

/// Start of the judged time in all arms: neither the promotion nor the warming falls into it.
const JUDGED_FROM: Duration = Duration::from_millis(1_050);
const _: () = assert!(
    JUDGED_FROM.as_millis() > POLICY_DELAY.as_millis() + WARM_AFTER_DELAY.as_millis(),
    "warming uses a core that the guest may share"
);

/// RAM of a run in addition to its table.
const BESIDE_TABLE: Bytes = mib(256);

/// Below this ratio of huge pages from the start, live promotion has little to show.
const SMALL_GAIN: f64 = 1.2;
/// Table of 2 GiB, with a clear gain: its page tables, 4 MiB with base pages, fit in no core's own cache. On one EPYC
/// the ratio was 1.7 with it, and 1.1 with the default table.
const CLEAR_GAIN_LOG2_WORDS: u8 = 28;

/// An arm that takes longer than this hangs.
const ARM_TIMEOUT: Duration = Duration::from_secs(300);

/// Result of the whole demo.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct DemoReport {
    /// Mode of the runs: `guest` or `native`.
    pub mode: String,
    /// Reason why the runs are native, if they are.
    pub why_native: Option<String>,
    /// Paging of the guests.
    pub paging: String,
    /// Number of words in the table, as log2.
    pub log2_words: u8,
    /// Warm copy speed of the machine, in the same run.
    pub memcpy_gib_per_s: f64,
    /// Arms, in the order of their turns.
    pub arms: Vec<Arm>,
    /// Comparisons within rounds.
    pub ratios: Vec<Ratio>,
    /// Machine that was measured.
    pub environment: Environment,
}

/// One way to back RAM, with its runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Arm {
    /// Name of the arm.
    pub name: String,
    /// Description of the arm.
    pub summary: String,
    /// Arguments of `wideleaf` for each run.
    pub arguments: Vec<String>,
    /// Reports, one per round.
    pub runs: Vec<RunReport>,
}

/// Ratio of one arm to another, round by round.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Ratio {
    /// Names of the two arms.
    pub name: String,
    /// Median over the rounds.
    pub median: f64,
    /// Lowest ratio of a round.
    pub lowest: f64,
    /// Highest ratio of a round.
    pub highest: f64,
    /// 95 % interval of the median, if there are enough rounds for one.
    #[serde(default)]
    pub interval: Option<Interval>,
}

/// Runs the subcommand `demo`.
///
/// # Errors
/// [`Failure`]; no pool page, file or process is left.
pub fn main(args: &DemoArgs) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let report = run_all(args, &interrupts)?;
    output.write(&report, DemoReport::to_table)?;
    let failed = report.arms.iter().flat_map(|arm| &arm.runs).filter(|run| !is_verified(run)).count();
    if failed > 0 {
        return Err(Failure::GuestFailed(format!("{failed} runs did not pass their verification")));
    }
    Ok(())
}

fn is_verified(run: &RunReport) -> bool {
    run.verification.as_ref().is_some_and(|verification| verification.passed)
}

fn run_all(args: &DemoArgs, interrupts: &Interrupts) -> Result<DemoReport, Failure> {
    let why_native = if args.native { Some("requested with --native".to_owned()) } else { guest::why_no_kvm() };
    let is_native = why_native.is_some();
    let paging = if is_native { "none" } else { guest::paging_name()? };
    let environment = Environment::capture();
    let table_bytes = Bytes::new(8 << args.log2_words);
    let ram = table_bytes + BESIDE_TABLE;
    let pool = HeldPool::lease(ram.pages(PageSize::Huge2M));
    let mut arms = arms(args.log2_words, ram, is_native, pool.is_ok());
    if let Err(why) = &pool {
        tracing::warn!("cannot use the hugetlb pool for the hugetlb arm: {why}; using THP from the start instead");
    }

    let bar = visible_bar(u64::from(args.rounds) * arms.len() as u64, "{bar:30} {pos}/{len} runs, {msg} [{elapsed}]");
    bar.enable_steady_tick(Duration::from_millis(200));
    for round in 1..=args.rounds {
        for arm in arms_of_round(arms.len(), round) {
            let arm = &mut arms[arm];
            interrupts.check()?;
            bar.set_message(format!("round {round}: {}", arm.name));
            arm.runs.push(run_arm(&arm.arguments, ram + table_bytes, interrupts)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let memcpy = warm_copy_bytes_per_second(mib(256)) / f64::from(1 << 30);
    let ratios = ratios(&arms);
    Ok(DemoReport {
        mode: if is_native { "native" } else { "guest" }.into(),
        why_native,
        paging: paging.into(),
        log2_words: args.log2_words,
        memcpy_gib_per_s: memcpy,
        arms,
        ratios,
        environment,
    })
}

fn arms(log2_words: u8, ram: Bytes, is_native: bool, has_pool: bool) -> Vec<Arm> {
    let hugetlb = if has_pool {
        ("2 MiB pages of the hugetlb pool from the start", ["--backing", "hugetlb", "--host-page", "2m"])
    } else {
        ("2 MiB transparent huge pages from the start", ["--backing", "anon", "--host-page", "2m"])
    };
    let delay = format!("{}ms", POLICY_DELAY.as_millis());
    let arm = |name: &str, summary: &str, extra: &[&str], is_native: bool| {
        let mut arguments: Vec<String> = vec!["run".into(), "gups".into()];
        arguments.extend(is_native.then(|| "--native".to_owned()));
        arguments.extend(["--cmdline".into(), format!("log2_words={log2_words}")]);
        arguments.extend(["--memory".into(), ram.get().to_string()]);
        arguments.extend(extra.iter().map(|argument| (*argument).to_owned()));
        Arm { name: name.into(), summary: summary.into(), arguments, runs: Vec::new() }
    };
    let promoted = ["--host-page", "4k", "--policy", "greedy", "--policy-delay", &delay];
    let from_start: Vec<&str> = hugetlb.1.into_iter().chain(["--policy", "never"]).collect();
    let mut arms = vec![
        arm("base", "4 KiB pages, never promoted", &["--host-page", "4k", "--policy", "never"], is_native),
        arm("promoted", "4 KiB pages, promoted to 2 MiB while it runs", &promoted, is_native),
        arm("hugetlb", hugetlb.0, &from_start, is_native),
    ];
    if !is_native {
        arms.push(arm("native", "as hugetlb, in a process instead of a guest", &from_start, true));
    }
    arms
}

/// Runs one arm in its own process, with host memory kept warm until its promotion is over.
fn run_arm(arguments: &[String], working_set: Bytes, interrupts: &Interrupts) -> Result<RunReport, Failure> {
    warm_host_memory(working_set).map_err(|error| Failure::Host(format!("cannot warm host memory: {error}")))?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            while !is_over.load(Ordering::Relaxed) && began.elapsed() < POLICY_DELAY + WARM_AFTER_DELAY {
                std::thread::sleep(Duration::from_millis(200));
                if let Err(error) = warm_host_memory(mib(256)) {
                    tracing::warn!("cannot keep host memory warm: {error}");
                }
            }
        });
        let report = child::run(arguments, ARM_TIMEOUT, interrupts);
        is_over.store(true, Ordering::Relaxed);
        report
    })
}

/// The part of GUPS that is measured.
fn update(run: &RunReport) -> Option<&Phase> {
    run.phases.iter().find(|phase| phase.name == "update")
}

/// Judged speed of an arm: updates per second of the guest's clock from [`JUDGED_FROM`] on, or from the end of the
/// promotion if that is later.
fn judged_rate(run: &RunReport) -> f64 {
    let Some(phase) = update(run) else { return 0.0 };
    let promoted_at = run.manager.last_done_at_s.map_or(0.0, |at| at - phase.began_at_s);
    let from = JUDGED_FROM.as_secs_f64().max(promoted_at);
    match (phase.progress.iter().find(|(at, _)| *at >= from), phase.progress.last()) {
        (Some((from, done_from)), Some((to, done_to))) if to > from => (done_to - done_from) as f64 / (to - from),
        _ => phase.rate_per_s, // over before that: the table is too small to show a promotion
    }
}

fn ratios(arms: &[Arm]) -> Vec<Ratio> {
    let rates = |name: &str| {
        let arm = arms.iter().find(|arm| arm.name == name)?;
        Some(arm.runs.iter().map(judged_rate).collect::<Vec<_>>())
    };
    [("promoted", "base"), ("promoted", "hugetlb"), ("hugetlb", "base"), ("hugetlb", "native")]
        .into_iter()
        .filter_map(|(a, b)| {
            let ratios = ratios_within_rounds(&rates(a)?, &rates(b)?);
            let Spread { median, lowest, highest } = Spread::of(&ratios)?;
            let comparison = Comparison::of(&ratios, Better::Higher);
            let interval = comparison.filter(|it| it.pairs >= Comparison::PAIRS_MIN).map(|it| it.interval);
            Some(Ratio { name: format!("{a} : {b}"), median, lowest, highest, interval })
        })
        .collect()
}

fn over_runs(arm: &Arm, value: impl Fn(&RunReport) -> Option<f64>) -> Option<Spread> {
    Spread::of(&arm.runs.iter().filter_map(value).collect::<Vec<_>>())
}

impl DemoReport {
    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        // The first line says what the numbers below are evidence of.
        let mut out = format!("{}\n", evidence(&self.paging, self.environment.is_virtual));
        if let Some(why) = &self.why_native {
            let _ = writeln!(out, "Running natively, not in a guest: {why}");
        }
        self.write_arms(&mut out);
        self.write_ratios(&mut out);
        self.write_promotion(&mut out);
        let Environment { cpu, cpus, kernel, thp_enabled, load_1m, .. } = &self.environment;
        let _ = writeln!(
            out,
            "\nMeasured on {cpus} x {cpu}, kernel {kernel}, THP {thp_enabled}, paging {}, load {load_1m} at the start.",
            self.paging
        );
        let stolen: u64 = self.arms.iter().flat_map(|arm| &arm.runs).map(|run| run.environment.steal_ms).sum();
        let _ = writeln!(out, "The hypervisor stole {stolen} ms of CPU time during all runs together.");
        let _ = writeln!(out, "Not controlled: CPU frequency, other load on the machine and on its host.");
        out
    }

    fn write_arms(&self, out: &mut String) {
        let mut arms = table(&[
            "arm",
            "updates, whole run",
            "judged (lowest - highest)",
            "table on 2m",
            "KVM 2m",
            "gap p99",
            "verified",
        ]);
        for arm in &self.arms {
            let whole = over_runs(arm, |run| update(run).map(|phase| phase.rate_per_s));
            let judged = over_runs(arm, |run| Some(judged_rate(run)));
            let gap = over_runs(arm, |run| run.gaps.first().map(|gap| gap.p99_ns as f64 / 1e3));
            let region = arm.runs.last().and_then(|run| run.regions.first());
            let kvm = arm.runs.last().and_then(|run| update(run)?.at_end.kvm);
            let verified = arm.runs.iter().filter(|run| is_verified(run)).count();
            arms.add_row([
                Cell::new(&arm.name),
                number(whole.map_or("-".into(), |whole| rate(whole.median))),
                number(judged.map_or("-".into(), |Spread { median, lowest, highest }| {
                    format!("{} ({} - {})", rate(median), rate(lowest), rate(highest))
                })),
                number(region.map_or("-".into(), |r| format!("{} of {}", r.windows_host_large, r.windows))),
                number(kvm.map_or("-".into(), |kvm| kvm.pages_2m.to_string())),
                number(gap.map_or("-".into(), |gap| format!("{:.1} us", gap.median))),
                number(format!("{verified} of {}", arm.runs.len())),
            ]);
        }
        let _ = writeln!(out, "{arms}");
        for arm in &self.arms {
            let _ = writeln!(out, "  {:8} {}", arm.name, arm.summary);
        }
        let _ = writeln!(
            out,
            "  gap p99: 99th percentile of the time for a batch of 128 updates (stalls); base is the control: never \
            promoted"
        );
        let _ = writeln!(out, "  judged: from {:.2} s on, after the promotion", JUDGED_FROM.as_secs_f64());
    }

    fn write_ratios(&self, out: &mut String) {
        let rounds = self.arms.first().map_or(0, |arm| arm.runs.len());
        let mut ratios = table(&["ratio within a round", "median", "lowest", "highest"]);
        for Ratio { name, median, lowest, highest, .. } in &self.ratios {
            let three = |value: &f64| number(format!("{value:.3}"));
            ratios.add_row([Cell::new(name), three(median), three(lowest), three(highest)]);
        }
        let _ = writeln!(out, "\n{ratios}\n  {rounds} rounds, arms alternating");
        for (name, interval) in self.ratios.iter().filter_map(|ratio| Some((&ratio.name, ratio.interval?))) {
            let _ = writeln!(out, "  {name}: {interval}, median and 95 % interval");
        }
        if let Some(gain) = self.small_gain() {
            let _ = writeln!(
                out,
                "  With this table even huge pages from the start gain little ({:+.0} %): its page tables fit in this \
                CPU's\n  caches. A larger one shows more: --log2-words {CLEAR_GAIN_LOG2_WORDS} takes {} of RAM.",
                (gain - 1.0) * 100.0,
                Bytes::new(8 << CLEAR_GAIN_LOG2_WORDS) + BESIDE_TABLE
            );
        }
    }

    /// Gain of huge pages from the start over base pages, if it is small and a larger table would show more.
    fn small_gain(&self) -> Option<f64> {
        let gain = self.ratios.iter().find(|ratio| ratio.name == "hugetlb : base")?.median;
        (gain < SMALL_GAIN && self.log2_words < CLEAR_GAIN_LOG2_WORDS).then_some(gain)
    }

    /// The last promoted run: the manager's actions, the times for which windows were unavailable, and the rate
    /// over time.
    fn write_promotion(&self, out: &mut String) {
        let Some(promoted) = self.arms.iter().find(|arm| arm.name == "promoted") else { return };
        let speed = over_runs(promoted, |run| run.manager.copy_gib_per_s);
        if let Some(Spread { median, lowest, highest }) = speed {
            let _ = writeln!(
                out,
                "\nPromotion copied at {median:.2} GiB/s ({lowest:.2} - {highest:.2}); memcpy of warm memory runs at \
                {:.2} GiB/s here.",
                self.memcpy_gib_per_s
            );
        }
        let Some(run) = promoted.runs.last() else { return };
        if let Some(times) = &run.manager.unavailable {
            let _ = writeln!(out, "Time for which a window was unavailable to the guest (last promoted run):");
            let most = times.buckets.iter().map(|(_, count)| *count).max().unwrap_or(1);
            for (up_to_us, count) in &times.buckets {
                let _ = writeln!(out, "  up to {up_to_us:>8.0} us {count:>5} {}", bar_of(*count, most, 40));
            }
        }
        self.write_gaps(out, promoted);
        if let Some(phase) = update(run) {
            write_rates(out, run, phase);
        }
    }

    /// Effect of promotion on the guest's gaps, minus the machine's own gaps in the base arm.
    fn write_gaps(&self, out: &mut String, promoted: &Arm) {
        type Kind = fn(&Gaps) -> u64;
        let Some(base) = self.arms.iter().find(|arm| arm.name == "base") else { return };
        let gap = |arm: &Arm, value: Kind| {
            over_runs(arm, |run| run.gaps.iter().map(|gap| value(gap) as f64 / 1e3).reduce(f64::max))
        };
        let kinds: [(&str, Kind); 3] =
            [("p99", |gap| gap.p99_ns), ("p99.9", |gap| gap.p999_ns), ("max", |gap| gap.max_ns)];
        let _ = writeln!(out, "Time for 128 updates, promoted minus base (medians of the runs):");
        for (name, value) in kinds {
            if let (Some(with), Some(without)) = (gap(promoted, value), gap(base, value)) {
                let (with, without) = (with.median, without.median);
                let _ = writeln!(out, "  {name:8} {with:>9.1} us minus {without:>9.1} us: {:>+9.1} us", with - without);
            }
        }
    }
}

fn bar_of(value: u64, most: u64, width: u64) -> String {
    "█".repeat((value * width).div_ceil(most.max(1)) as usize)
}

/// The rate over time as rows of bars, with the promotion marked.
fn write_rates(out: &mut String, run: &RunReport, phase: &Phase) {
    const ROWS: usize = 16;
    let step = phase.seconds / ROWS as f64;
    let done_at = |seconds: f64| {
        let after = phase.progress.partition_point(|(at, _)| *at < seconds);
        let (to, from) = (phase.progress.get(after), after.checked_sub(1).map_or((0.0, 0), |i| phase.progress[i]));
        let Some((at, done)) = to else { return from.1 as f64 };
        let share = if *at > from.0 { (seconds - from.0) / (at - from.0) } else { 1.0 };
        from.1 as f64 + share * (*done as f64 - from.1 as f64)
    };
    let rates: Vec<f64> =
        (0..ROWS).map(|row| (done_at((row + 1) as f64 * step) - done_at(row as f64 * step)) / step).collect();
    let most = rates.iter().copied().fold(1.0, f64::max);
    let _ = writeln!(out, "Updates per second over the last promoted run:");
    for (row, value) in rates.iter().enumerate() {
        let (from, to) = (row as f64 * step, (row + 1) as f64 * step);
        let within = |at: Option<f64>| at.is_some_and(|at| (from..to).contains(&(at - phase.began_at_s)));
        let note = match (within(run.manager.first_done_at_s), within(run.manager.last_done_at_s)) {
            (true, true) => "  ◀ promoted",
            (true, false) => "  ◀ promotion begins",
            (false, true) => "  ◀ promotion is over",
            (false, false) => "",
        };
        let _ = writeln!(out, "  {from:>6.2} s {:>11} {}{note}", rate(*value), bar_of(*value as u64, most as u64, 40));
    }
}
