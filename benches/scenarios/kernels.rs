//! Speed of the benchmark kernels: alone, in a guest, on two vCPUs, on small and on large pages.
//!
//! ```text
//!   speed    native, 2 MiB                       compared with the best published implementations on such a machine
//!   guest    native, 2 MiB  ⇄  guest, 2 MiB in 2 MiB      cost of our second level
//!   vcpus    guest, 1 vCPU  ⇄  guest, 2 vCPUs             scaling
//!   pages    native, 4 KiB  ⇄  native, 2 MiB              gain of large pages
//!   verify   native, 2 MiB  ⇄  guest, 2 MiB in 2 MiB      class A of all NPB, B of four: published values
//!   tlb      both, 4 KiB and 2 MiB                       the levels that `latency` finds: entries, cost of a miss
//! ```
//!
//! Arms of one kernel take turns. Each run has RAM that was faulted in before, after the host's memory was warmed.
//! Ratios are those of rates within a round. Every run verifies itself, and a failed verification ends the bench.
//!
//! `cargo bench -p wideleaf-benches --bench kernels -- speed|guest|vcpus|pages|verify|tlb [ROUNDS] [KERNEL]` (default
//! `speed`, 5 rounds (`verify`: 1) and all kernels; all but `speed` and `pages` need KVM). The references were
//! measured in other runs than ours: NPB 3.4.1 in Fortran and its ports in C++ and Rust at -O3 for the baseline
//! instruction set, HPCC 1.5.0, Sweep3D 2.2b, on an AMD EPYC with 2 MiB pages. They are accurate to 20 %.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_kernels::registry::{self, Kernel, MemoryNeed};
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::{arms_of_round, round};
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::kernel::{Pages, least_ram};
use wideleaf_run::report::RunReport;
use wideleaf_run::spec::RunSpec;

/// One way to run a kernel.
#[derive(Clone, Copy)]
struct Arm {
    name: &'static str,
    is_native: bool,
    page: PageSize,
    vcpus: u8,
}

const NATIVE_4K: Arm = Arm { name: "native, 4k", is_native: true, page: PageSize::Base4K, vcpus: 1 };
const GUEST_4K: Arm = Arm { name: "guest, 2m in 4k", is_native: false, page: PageSize::Base4K, vcpus: 1 };
const NATIVE_2M: Arm = Arm { name: "native, 2m", is_native: true, page: PageSize::Huge2M, vcpus: 1 };
const GUEST_2M: Arm = Arm { name: "guest, 2m in 2m", is_native: false, page: PageSize::Huge2M, vcpus: 1 };
const GUEST_2M_TWICE: Arm = Arm { name: "guest, 2 vCPUs", is_native: false, page: PageSize::Huge2M, vcpus: 2 };

/// A kernel with its parameters and the expected result: a rate, or a ratio of two arms.
struct Work {
    kernel: &'static str,
    parameters: &'static str,
    expected: Expected,
}

#[derive(Clone, Copy)]
enum Expected {
    /// Rate in Mop/s of the best references: the slower and the faster one.
    Rate(f64, f64),
    /// Ratio of the second arm's rate to the first arm's, from the references: the lower and the higher one.
    Ratio(f64, f64),
    /// A minimum for the ratio.
    AtLeast(f64),
    /// No expectation; the ratio is only shown.
    SpreadMedian,
}

/// Minimum rate relative to the slower of the best references.
const SPEED_MIN: f64 = 0.9;
/// Maximum difference between a ratio and the reference's.
const RATIO_NEAR: f64 = 0.08;

struct Comparison {
    name: &'static str,
    rounds: u32,
    arms: &'static [Arm],
    works: &'static [Work],
}

const fn work(kernel: &'static str, parameters: &'static str, expected: Expected) -> Work {
    Work { kernel, parameters, expected }
}

const COMPARISONS: [Comparison; 6] = [
    Comparison {
        name: "speed",
        rounds: 5,
        arms: &[NATIVE_2M],
        works: &[
            work("npb.bt", "class=A", Expected::Rate(5800.0, 6900.0)),
            work("npb.cg", "class=A", Expected::Rate(2800.0, 3100.0)),
            work("npb.ep", "class=A", Expected::Rate(198.0, 198.0)),
            work("npb.ft", "class=A", Expected::Rate(5200.0, 5200.0)),
            work("npb.is", "class=A", Expected::Rate(157.0, 170.0)),
            work("npb.lu", "class=A", Expected::Rate(7650.0, 8600.0)),
            work("npb.mg", "class=A", Expected::Rate(4100.0, 4600.0)),
            work("npb.sp", "class=A", Expected::Rate(6200.0, 6400.0)),
        ],
    },
    Comparison {
        name: "guest",
        rounds: 5,
        arms: &[NATIVE_2M, GUEST_2M],
        works: &[
            work("npb.bt", "class=W", Expected::AtLeast(0.95)),
            work("npb.cg", "class=A", Expected::AtLeast(0.95)),
            work("npb.ep", "class=W", Expected::AtLeast(0.95)),
            work("npb.ft", "class=A", Expected::AtLeast(0.95)),
            work("npb.is", "class=A", Expected::AtLeast(0.95)),
            work("npb.lu", "class=W", Expected::AtLeast(0.95)),
            work("npb.mg", "class=A", Expected::AtLeast(0.95)),
            work("npb.sp", "class=W", Expected::AtLeast(0.95)),
            work("gups", "log2_words=25", Expected::AtLeast(0.95)),
            work("stream", "words=20000000", Expected::AtLeast(0.95)),
            work("sweep3d", "n=50", Expected::AtLeast(0.95)),
            work("amr", "passes=8", Expected::AtLeast(0.95)),
            work("eos", "passes=4", Expected::AtLeast(0.95)),
        ],
    },
    Comparison {
        name: "vcpus",
        rounds: 5,
        arms: &[GUEST_2M, GUEST_2M_TWICE],
        works: &[
            work("npb.cg", "class=A", Expected::SpreadMedian),
            work("npb.mg", "class=A", Expected::SpreadMedian),
            work("npb.ft", "class=A", Expected::SpreadMedian),
            work("npb.lu", "class=A", Expected::SpreadMedian),
        ],
    },
    Comparison {
        name: "pages",
        rounds: 5,
        arms: &[NATIVE_4K, NATIVE_2M],
        works: &[
            work("gups", "log2_words=26", Expected::Ratio(1.5, 1.5)),
            work("npb.cg", "class=B", Expected::Ratio(1.2, 1.3)),
            work("npb.mg", "class=A", Expected::Ratio(1.2, 1.2)),
            work("npb.is", "class=C buckets=0", Expected::Ratio(1.16, 1.16)),
            work("sweep3d", "n=150", Expected::Ratio(1.11, 1.11)),
        ],
    },
    Comparison {
        name: "verify",
        rounds: 1,
        arms: &[NATIVE_2M, GUEST_2M],
        works: &[
            work("npb.bt", "class=A", Expected::SpreadMedian),
            work("npb.cg", "class=A", Expected::SpreadMedian),
            work("npb.ep", "class=A", Expected::SpreadMedian),
            work("npb.ft", "class=A", Expected::SpreadMedian),
            work("npb.is", "class=A buckets=0", Expected::SpreadMedian),
            work("npb.is", "class=A buckets=1", Expected::SpreadMedian),
            work("npb.lu", "class=A", Expected::SpreadMedian),
            work("npb.mg", "class=A", Expected::SpreadMedian),
            work("npb.sp", "class=A", Expected::SpreadMedian),
            work("npb.cg", "class=B", Expected::SpreadMedian),
            work("npb.ft", "class=B", Expected::SpreadMedian),
            work("npb.is", "class=B buckets=0", Expected::SpreadMedian),
            work("npb.is", "class=B buckets=1", Expected::SpreadMedian),
            work("npb.mg", "class=B", Expected::SpreadMedian),
        ],
    },
    Comparison {
        name: "tlb",
        rounds: 3,
        arms: &[NATIVE_4K, NATIVE_2M, GUEST_4K, GUEST_2M],
        works: &[work("latency", "", Expected::SpreadMedian)],
    },
];

/// Name of the comparison with levels instead of a figure as its result.
const TLB: &str = "tlb";
/// Maximum number of TLB levels in the results of `latency`.
const LEVELS_MAX: usize = 4;

/// Figures (rates) of all runs of a kernel, by round, then by arm.
struct Rounds {
    figures: Vec<Vec<f64>>,
}

impl Rounds {
    /// Ratio of the second arm's rate to the first arm's.
    fn speed_up(&self) -> SpreadMedian {
        SpreadMedian::of(&self.figures.iter().map(|arms| arms[1] / arms[0]).collect::<Vec<_>>())
    }

    fn figure(&self, arm: usize) -> SpreadMedian {
        SpreadMedian::of(&self.figures.iter().map(|arms| arms[arm]).collect::<Vec<_>>())
    }
}

fn kernel(name: &str) -> &'static Kernel {
    registry::by_name(name).expect("the kernels above are in the table")
}

fn run(work: &Work, arm: Arm, interrupts: &Interrupts) -> Result<RunReport, ScenarioError> {
    let need = kernel(work.kernel).memory_for(work.parameters, usize::from(arm.vcpus));
    let Ok(MemoryNeed::Bytes(bytes)) = need else { panic!("{}: {need:?}", work.kernel) };
    let guest_page = PageSize::Huge2M;
    let pages = Pages { host: arm.page, guest: (!arm.is_native).then_some(guest_page) };
    let memory = least_ram(Bytes::new(bytes), pages).map_err(|failure| ScenarioError::Skipped(failure.to_string()))?;
    let backing = BackingConfig::new(BackingKind::Anon, arm.page).expect("anonymous RAM has both sizes");
    let spec = RunSpec {
        is_native: arm.is_native,
        vcpus: arm.vcpus,
        guest_page,
        is_prefaulted: true,
        ..RunSpec::of_kernel(kernel(work.kernel).name.as_str(), work.parameters, memory, backing)
    };
    warm_host_memory(memory).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let report = execute(&spec, interrupts, Instant::now());
    let report =
        report.map_err(|failure| ScenarioError::Skipped(format!("{} {}: {failure}", work.kernel, arm.name)))?;
    let is_right = report.verification.as_ref().is_some_and(|verification| verification.passed);
    assert!(is_right, "{} {}: {:?}", work.kernel, arm.name, report.verification);
    Ok(report)
}

fn measure(work: &Work, arms: &[Arm], rounds: u32, interrupts: &Interrupts) -> Result<Rounds, ScenarioError> {
    let mut measured = Rounds { figures: Vec::new() };
    let figure = kernel(work.kernel).figure.name;
    for number in 1..=rounds {
        let reports = round(arms.len(), number, |arm| run(work, arms[arm], interrupts))?;
        measured.figures.push(reports.iter().map(|report| report.results[figure.as_str()].value).collect());
    }
    Ok(measured)
}

/// The expectation and whether it is met; `None` without expectation.
fn judge(work: &Work, measured: &Rounds) -> Option<Bar> {
    let name = format!("{} {}", work.kernel, work.parameters);
    Some(match work.expected {
        Expected::Rate(slower, faster) => {
            let (rate, unit) = (measured.figure(0), kernel(work.kernel).figure.unit.as_str());
            let what = format!("{name}, references {slower:.0} to {faster:.0}");
            rate.bar(&what, 0, unit, Limit::AtLeast(SPEED_MIN * slower))
        }
        Expected::Ratio(low, high) => {
            let what = format!("{name}, references {low} to {high}");
            measured.speed_up().bar(&what, 3, "", Limit::Between(low - RATIO_NEAR, high + RATIO_NEAR))
        }
        Expected::AtLeast(least) => measured.speed_up().bar(&name, 3, "", Limit::AtLeast(least)),
        Expected::SpreadMedian => return None,
    })
}

/// Geometric mean of the ratios of all rates to the middle of their references.
fn geometric_mean(works: &[(&Work, Rounds)]) -> Option<f64> {
    let ratios = works.iter().map(|(work, measured)| match work.expected {
        Expected::Rate(slower, faster) => Some(measured.figure(0).median() / f64::midpoint(slower, faster)),
        _ => None,
    });
    let logarithms: Vec<f64> = ratios.map(|ratio| ratio.map(f64::ln)).collect::<Option<_>>()?;
    Some((logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp())
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let names = COMPARISONS.map(|comparison| comparison.name);
    let comparison = &COMPARISONS[arguments.word(0, &names, "speed, guest, vcpus, pages, verify or tlb")?];
    let rounds = arguments.count(1, comparison.rounds)?;
    let only = arguments.text(2);
    let works: Vec<&Work> =
        comparison.works.iter().filter(|work| only.is_none_or(|only| work.kernel == only)).collect();
    if let (Some(text), []) = (only, &works[..]) {
        return Err(ScenarioError::Argument { number: 3, text: text.into(), expected: "a kernel of this comparison" });
    }
    if comparison.arms.iter().any(|arm| !arm.is_native) {
        needs_kvm()?;
    }
    let interrupts = Interrupts::install().map_err(|failure| ScenarioError::Skipped(failure.to_string()))?;
    if comparison.name == TLB {
        return levels(comparison, rounds, &interrupts, waiting);
    }
    let mut all = Vec::new();
    for work in works {
        waiting.pass(Duration::ZERO)?;
        all.push((work, measure(work, comparison.arms, rounds, &interrupts)?));
    }
    Ok(figures(comparison, rounds, &all))
}

fn figures(comparison: &Comparison, rounds: u32, all: &[(&Work, Rounds)]) -> Figures {
    let arms = comparison.arms.iter().map(|arm| arm.name);
    let ratio = (comparison.arms.len() > 1).then_some("second : first");
    let mut rows = Table::new(["kernel"], arms.chain(ratio).flat_map(|name| columns(name, rounds as usize)));
    for (work, measured) in all {
        let unit = kernel(work.kernel).figure.unit.as_str();
        let mut row: Vec<Cell> = vec![format!("{} {}", work.kernel, work.parameters).into()];
        row.extend((0..comparison.arms.len()).flat_map(|arm| {
            let figure = measured.figure(arm);
            figure.cells(if figure.median() < 10.0 { 4 } else { 1 }, unit)
        }));
        row.extend(ratio.into_iter().flat_map(|_| measured.speed_up().cells(3, "")));
        rows.row(row);
    }
    let mean = geometric_mean(all).filter(|_| all.len() > 1).map(|mean| {
        let what = "geometric mean of the medians, relative to the middle of the references:";
        Bar::new(what, Cell::number(mean, 3, ""), Limit::AtLeast(1.0))
    });
    Figures::of(comparison.name)
        .table(rows)
        .note(format!("medians of {rounds} rounds, {}; all runs verified", spread_in_words(rounds as usize)))
        .bars(all.iter().filter_map(|(work, measured)| judge(work, measured)).chain(mean))
}

/// Levels that `latency` finds in each arm, run by run.
fn levels(
    comparison: &Comparison,
    rounds: u32,
    interrupts: &Interrupts,
    waiting: &Waiting,
) -> Result<Figures, ScenarioError> {
    let mut rows = Table::new(["arm"], ["level", "entries", "miss", "miss in ticks", "spread", "agreed"]);
    for index in (1..=rounds).flat_map(|round| arms_of_round(comparison.arms.len(), round)) {
        let arm = &comparison.arms[index];
        waiting.pass(Duration::ZERO)?;
        let found = run(&comparison.works[0], *arm, interrupts)?.results;
        let result = |name: &str| found.get(name).map(|result| result.value);
        for level in 1..=LEVELS_MAX {
            let (Some(entries), Some(ns)) = (result(&format!("entries{level}")), result(&format!("miss{level}")))
            else {
                continue;
            };
            let ticks = |name: &str| result(&format!("{name}{level}")).unwrap_or(f64::NAN);
            rows.row([
                arm.name.into(),
                Cell::count(level as u64),
                Cell::number(entries, 0, ""),
                Cell::number(ns, 2, "ns"),
                Cell::number(ticks("miss_ticks"), 1, "ticks"),
                Cell::number(ticks("spread_ticks"), 1, "ticks"),
                Cell::number(result("matches").unwrap_or(0.0), 0, "of 3"),
            ]);
        }
    }
    Ok(Figures::of(format!("{TLB}: pointer chases, {rounds} runs of each arm in turn")).table(rows))
}

fn main() -> ExitCode {
    scenario::run("kernels", experiment)
}
