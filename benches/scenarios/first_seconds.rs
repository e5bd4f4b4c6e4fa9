//! Speed of short guests under `auto` and under `never`: what observing a guest costs in its first seconds, when
//! nothing was gained yet. Each run is a new guest, from its boot to its end, with the sensors that its policy asks
//! for.
//!
//! ```text
//!   round 1   never ████████│  auto ██░█████│      the guest's own rate over its timed part; ░ the sensors' work
//!   round 2   auto  ██░█████│  never ████████│     the first arm alternates
//! ```
//!
//! | case | why it gains nothing |
//! |---|---|
//! | GUPS, guest 4k | the guest itself maps base pages; under shadow paging `auto` promotes none of its windows |
//! | LU W | 16 MiB, half a million updates of it in 0.8 s: few TLB misses |
//! | EP W | 1 MiB, 0.3 s: nearly no TLB misses |
//!
//! Beside the ratio there are the counts that do not depend on the machine's other work: windows that the access sensor
//! took aside, touches that waited for it, CPU time of the manager, and the price that a second-level fault had in the
//! sensor's budget.
//!
//! `cargo bench -p wideleaf-benches --bench first_seconds [-- ROUNDS CASE]` (default 30 and all cases; CASE is `gups`,
//! `npb.lu` or `npb.ep`; needs KVM)

use std::process::ExitCode;
use std::time::{Duration, Instant};

use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_kernels::registry::{self, Kernel, MemoryNeed};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::policy::by_name;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::kernel::{Pages, least_ram};
use wideleaf_run::report::{ManagerSummary, RunReport};
use wideleaf_run::spec::RunSpec;

/// Target: share of its speed under `never` that a guest has under `auto`.
const SPEED_MIN: f64 = 0.99;

const ARMS: [&str; 2] = ["never", "auto"];
const NEVER: usize = 0;
const AUTO: usize = 1;

/// A guest that gains nothing by large pages.
struct Case {
    name: &'static str,
    kernel: &'static str,
    parameters: &'static str,
    guest_page: PageSize,
}

const CASES: [Case; 3] = [
    Case {
        name: "GUPS, guest 4k",
        kernel: "gups",
        parameters: "log2_words=24 seconds=2",
        guest_page: PageSize::Base4K,
    },
    Case { name: "LU W", kernel: "npb.lu", parameters: "class=W", guest_page: PageSize::Huge2M },
    Case { name: "EP W", kernel: "npb.ep", parameters: "class=W", guest_page: PageSize::Huge2M },
];

/// Runs of a case: of each round, by arm.
struct Rounds(Vec<Vec<RunReport>>);

impl Rounds {
    /// Speed under `auto` as a share of that under `never`, within rounds.
    fn speed(&self, figure: &str) -> SpreadMedian {
        let rate = |report: &RunReport| report.results[figure].value;
        let ratio = |reports: &Vec<RunReport>| rate(&reports[AUTO]) / rate(&reports[NEVER]);
        SpreadMedian::of(&self.0.iter().map(ratio).collect::<Vec<_>>())
    }

    /// Median of a count of the manager over the rounds.
    fn of_manager(&self, arm: usize, of: impl Fn(&ManagerSummary) -> f64) -> f64 {
        median(self.0.iter().map(|reports| of(&reports[arm].manager)).collect())
    }
}

fn kernel(case: &Case) -> &'static Kernel {
    registry::by_name(case.kernel).expect("the kernels above are in the table")
}

fn run(case: &Case, arm: &str, interrupts: &Interrupts) -> Result<RunReport, ScenarioError> {
    let need = kernel(case).memory_for(case.parameters, 1);
    let Ok(MemoryNeed::Bytes(bytes)) = need else { panic!("{}: {need:?}", case.name) };
    let pages = Pages { host: PageSize::Base4K, guest: Some(case.guest_page) };
    let memory = least_ram(Bytes::new(bytes), pages).map_err(|failure| ScenarioError::Skipped(failure.to_string()))?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let spec = RunSpec {
        guest_page: case.guest_page,
        policy: by_name(arm).expect("both policies are in the table").into(),
        ..RunSpec::of_kernel(kernel(case).name.as_str(), case.parameters, memory, backing)
    };
    warm_host_memory(memory).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let report = execute(&spec, interrupts, Instant::now());
    let report = report.map_err(|failure| ScenarioError::Skipped(format!("{} under {arm}: {failure}", case.name)))?;
    let is_right = report.verification.as_ref().is_some_and(|verification| verification.passed);
    assert!(is_right, "{} under {arm}: {:?}", case.name, report.verification);
    Ok(report)
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let rounds = arguments.count(0, 30)?;
    let only = arguments.text(1);
    let cases: Vec<&Case> = CASES.iter().filter(|case| only.is_none_or(|only| case.kernel == only)).collect();
    if let (Some(text), []) = (only, &cases[..]) {
        return Err(ScenarioError::Argument { number: 2, text: text.into(), expected: "gups, npb.lu or npb.ep" });
    }
    needs_kvm()?;
    let interrupts = Interrupts::install().map_err(|failure| ScenarioError::Skipped(failure.to_string()))?;
    let mut measured: Vec<Rounds> = cases.iter().map(|_| Rounds(Vec::new())).collect();
    for number in 1..=rounds {
        for (case, measured) in cases.iter().zip(&mut measured) {
            waiting.pass(Duration::ZERO)?;
            measured.0.push(round(ARMS.len(), number, |arm| run(case, ARMS[arm], &interrupts))?);
        }
    }
    Ok(figures(rounds as usize, &cases, &measured))
}

fn figures(rounds: usize, cases: &[&Case], measured: &[Rounds]) -> Figures {
    let mut speeds = Table::new(["guest"], [vec!["never"], columns("auto : never", rounds)].concat());
    let mut work = Table::new(
        ["guest under auto"],
        ["ticks", "windows aside", "guest waited", "promotions", "manager's CPU", "never's", "price of a fault"],
    );
    let mut bars = Vec::new();
    for (case, measured) in cases.iter().zip(measured) {
        let figure = &kernel(case).figure;
        let speed = measured.speed(figure.name.as_str());
        let never = median(measured.0.iter().map(|arms| arms[NEVER].results[figure.name.as_str()].value).collect());
        let decimals = if never < 10.0 { 4 } else { 1 };
        let never = Cell::number(never, decimals, figure.unit.as_str());
        speeds.row([vec![case.name.into(), never], speed.cells(4, "")].concat());
        let access = |of: &dyn Fn(u64, u64) -> u64| {
            measured.of_manager(AUTO, |manager| {
                manager.sensors.get("access").map_or(0.0, |sensor| of(sensor.windows, sensor.waits) as f64)
            })
        };
        let cpu_ms = |arm: usize| measured.of_manager(arm, |manager| manager.cpu_s * 1e3);
        let done = |manager: &ManagerSummary, what: &str| manager.outcomes.get(what).copied().unwrap_or(0);
        let promotions = |of: &ManagerSummary| (done(of, "swap.done") + done(of, "collapse.done")) as f64;
        let price_us = |manager: &ManagerSummary| manager.fault_price.as_ref().map_or(0.0, |price| price.us);
        work.row([
            case.name.into(),
            Cell::number(measured.of_manager(AUTO, |manager| manager.ticks as f64), 0, ""),
            Cell::number(access(&|windows, _| windows), 0, ""),
            Cell::number(access(&|_, waits| waits), 0, "times"),
            Cell::number(measured.of_manager(AUTO, promotions), 0, ""),
            Cell::number(cpu_ms(AUTO), 2, "ms"),
            Cell::number(cpu_ms(NEVER), 2, "ms"),
            Cell::number(measured.of_manager(AUTO, price_us), 2, "us"),
        ]);
        let what = format!("{}, auto : never", case.name);
        bars.push(speed.bar(&what, 4, "", Limit::AtLeast(SPEED_MIN)));
    }
    Figures::of("New guests that gain nothing by large pages, on base pages at the start")
        .table(speeds)
        .table(work)
        .note(format!(
            "medians of {rounds} rounds, ratios within rounds; {}; all runs verified",
            spread_in_words(rounds)
        ))
        .bars(bars)
}

fn main() -> ExitCode {
    scenario::run("first_seconds", experiment)
}
