//! Speed of a guest over time while `auto` promotes its memory: how far it falls, and what the promotion costs over
//! half a minute.
//!
//! ```text
//!   arm       2 s, not counted   30 s that count
//!   auto      ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄│▃▃▄▅▆▇███████████████████   base pages; │ the manager starts
//!   hugetlb   ████████████████│█████████████████████████   2 MiB pages of the pool, no manager
//!                              └┴ slowest 100 ms
//! ```
//!
//! GUPS touches all of its table at random, so that it waits for nearly each window that is out of its reach. The first
//! seconds give the speed that the guest had on base pages; the clock starts with the manager, so that they do not
//! count as its cost. Speeds are updates per second of the guest's clock between marks of progress, at most every
//! 20 ms. The slowest 100 ms of `hugetlb`, which nothing promotes, are those of the machine itself.
//!
//! `cargo bench -p wideleaf-benches --bench dip [-- ROUNDS LOG2_WORDS]` (default 6 and 25; needs KVM and the right to
//! lease hugetlb pages)

use std::process::ExitCode;
use std::time::Duration;

use wideleaf_benches::coverage::{NEARLY_ALL, host_coverage};
use wideleaf_benches::guest::{Guest, GuestSetup};
use wideleaf_benches::managed::{Managed, policy};
use wideleaf_benches::moved::{rate, slowest};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, ManagerReport};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};

/// Time for which the guest runs before the clock starts.
const BEFORE: Duration = Duration::from_secs(2);
/// Time that counts.
const COUNTED: Duration = Duration::from_secs(30);
/// Duration of the guest's updates: a little longer than both.
const UPDATE_TIME: Duration = Duration::from_secs(34);
const _: () = assert!(UPDATE_TIME.as_secs() > BEFORE.as_secs() + COUNTED.as_secs());

/// Target: share of the guest's speed before the manager that no 100 ms falls below.
const SLOWEST_MIN: f64 = 0.5;
/// Target: as good as huge pages from the start, but for the 2 % that count as equal in reports.
const SPEED_MIN: f64 = 0.98;

/// An arm: backing of the guest's RAM, and the policy of its manager if it has one.
struct Arm {
    name: &'static str,
    kind: BackingKind,
    page: PageSize,
    policy: Option<&'static str>,
}

const ARMS: [Arm; 2] = [
    Arm { name: "auto", kind: BackingKind::Anon, page: PageSize::Base4K, policy: Some("auto") },
    Arm { name: "hugetlb", kind: BackingKind::Hugetlb, page: PageSize::Huge2M, policy: None },
];
const AUTO: usize = 0;
const HUGETLB: usize = 1;

/// Speeds of one guest, in updates per second, and what its manager did.
struct Run {
    /// Speed before the clock starts.
    before: f64,
    /// Speed over the time that counts.
    counted: f64,
    /// Speed in its slowest 100 ms.
    slowest: f64,
    /// Report of the manager, if there is one.
    report: Option<ManagerReport>,
}

impl Run {
    /// Speed in the slowest 100 ms as a share of that before the clock starts.
    fn dip(&self) -> f64 {
        self.slowest / self.before
    }

    /// Time from the manager's start to the end of its last promotion, in seconds.
    fn promoted_after_s(&self) -> Option<f64> {
        Some(self.report.as_ref()?.last_done_at?.since_start().as_secs_f64())
    }
}

/// RAM for the table and for the rest of the guest.
fn memory(log2_words: u32) -> Bytes {
    Bytes::new(8 << log2_words) + mib(256)
}

fn run(arm: &Arm, log2_words: u32, waiting: &Waiting) -> Result<Run, ScenarioError> {
    let setup = GuestSetup {
        memory: memory(log2_words),
        backing: BackingConfig::new(arm.kind, arm.page).expect("a backing with this page size"),
        cmdline: format!("kernel=gups log2_words={log2_words} seconds={} progress_ms=20", UPDATE_TIME.as_secs()),
        slot_bytes: None,
    };
    warm_host_memory(setup.memory * 2).expect("memory to warm");
    let guest = Guest::start(&setup);
    guest.updates_begin(waiting)?;
    waiting.pass(BEFORE)?;
    let before = guest.marks();
    let managed = arm.policy.map(|name| Managed::start(&guest, policy(name)));
    waiting.pass(COUNTED)?;
    let marks = guest.marks();
    let report = managed.map(Managed::stop);
    let coverage = host_coverage(guest.ram(), guest.region("table"));
    guest.finish(waiting)?;
    if coverage < NEARLY_ALL {
        let percent = coverage.as_fraction() * 100.0;
        return Err(ScenarioError::Failed(format!(
            "cannot judge a promotion: {percent:.0} % of the table is on huge pages after {} s; free huge pages and \
             run the bench again",
            COUNTED.as_secs()
        )));
    }
    let counted = &marks[before.len() - 1..];
    let speeds = (rate(&before), rate(counted), slowest(counted));
    let (Some(before), Some(counted), Some(slowest)) = speeds else {
        return Err(ScenarioError::Failed(format!("the guest of {} printed no marks of its progress", arm.name)));
    };
    Ok(Run { before, counted, slowest, report })
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (rounds, log2_words) = (arguments.count(0, 6)?, arguments.number(1, 25)?);
    needs_kvm()?;
    let pages = memory(log2_words).pages(PageSize::Huge2M);
    let lease = HugetlbPools::of_this_machine().lease(PageSize::Huge2M, pages);
    let _lease = lease.map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let of_round = |number| round(ARMS.len(), number, |arm| run(&ARMS[arm], log2_words, waiting));
    let rounds = (1..=rounds).map(of_round).collect::<Result<Vec<_>, _>>()?;
    Ok(figures(log2_words, &rounds))
}

fn figures(log2_words: u32, rounds: &[Vec<Run>]) -> Figures {
    let count = rounds.len();
    let of_arm = |arm: usize, of: &dyn Fn(&Run) -> f64| rounds.iter().map(|runs| of(&runs[arm])).collect::<Vec<_>>();
    let lowest = |arm: usize| of_arm(arm, &Run::dip).into_iter().fold(f64::INFINITY, f64::min);
    let in_millions = |arm: usize, of: &dyn Fn(&Run) -> f64| SpreadMedian::of(&of_arm(arm, &|run| of(run) / 1e6));
    let spread_columns = [
        columns("before", count),
        columns("over 30 s", count),
        columns("slowest 100 ms : before", count),
        vec!["lowest of all", "promoted after"],
    ]
    .concat();
    let mut speeds = Table::new(["arm"], spread_columns);
    for (index, arm) in ARMS.iter().enumerate() {
        let promoted: Vec<f64> = rounds.iter().filter_map(|runs| runs[index].promoted_after_s()).collect();
        let promoted = match promoted.len() {
            0 => Cell::missing("nothing is promoted"),
            _ => Cell::number(median(promoted), 2, "s"),
        };
        speeds.row(
            [
                vec![arm.name.into()],
                in_millions(index, &|run| run.before).cells(2, "M/s"),
                in_millions(index, &|run| run.counted).cells(2, "M/s"),
                SpreadMedian::of(&of_arm(index, &Run::dip)).cells(3, ""),
                vec![Cell::number(lowest(index), 3, ""), promoted],
            ]
            .concat(),
        );
    }
    let ratios: Vec<f64> = rounds.iter().map(|runs| runs[AUTO].counted / runs[HUGETLB].counted).collect();
    let mut ratio = Table::new(["ratio within a round"], columns("speed over 30 s", count));
    ratio.row([vec!["auto : hugetlb".into()], SpreadMedian::of(&ratios).cells(3, "")].concat());
    let what = format!("auto, slowest 100 ms : before, lowest of {count}:");
    Figures::of(format!("GUPS, 2^{log2_words} words, while it is promoted"))
        .table(speeds)
        .table(ratio)
        .note(format!(
            "medians of {count} rounds, {}; the clock starts with the manager; all tables verified",
            spread_in_words(count)
        ))
        .bars([
            Bar::new(what, Cell::number(lowest(AUTO), 3, ""), Limit::AtLeast(SLOWEST_MIN)),
            SpreadMedian::of(&ratios).bar("auto : hugetlb, over 30 s", 3, "", Limit::AtLeast(SPEED_MIN)),
        ])
}

fn main() -> ExitCode {
    scenario::run("dip", experiment)
}
