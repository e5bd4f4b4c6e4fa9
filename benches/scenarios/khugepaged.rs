//! Time until a hot set is on huge pages: `auto` compared with the host's own khugepaged, and the CPU
//! time of both afterwards.
//!
//! ```text
//!   guest       fill ████│ pass pass pass pass pass …        checks and rewrites every word of its hot set
//!                        │◀──── time to 99 % on 2M ────▶│◀─ idle: 10 s of CPU time ─▶│
//!   auto, let in at once ▲ activated
//!   auto, idling         │ has been active without work since before the fill
//!   khugepaged           ▲ MADV_HUGEPAGE
//! ```
//!
//! In all arms the hot set is filled into base pages (RAM is marked `MADV_NOHUGEPAGE`), and the clock starts with the
//! first pass. For khugepaged, all of RAM is then marked `MADV_HUGEPAGE`. The hot set lies at the lowest addresses,
//! which khugepaged reaches first, and no other RAM is populated. khugepaged has no manager beside it. The bench
//! changes its settings for the time of an arm and restores them, also after a panic or Ctrl-C. Other processes with
//! memory for khugepaged on this machine slow it down. khugepaged runs at the lowest priority, so on a busy machine
//! its times depend more on the other load than on khugepaged. On a free machine it would use the time that it ran
//! plus the time that it waited to run.
//!
//! `cargo bench -p wideleaf-benches --bench khugepaged [-- HOT_MIB REPETITIONS REPETITIONS_AT_DEFAULTS LIMIT_S]`
//! (default 64, 5, 1 and 180; needs KVM, root, and THP that `MADV_HUGEPAGE` enables)

use std::process::ExitCode;
use std::time::{Duration, Instant};

use wideleaf_benches::coverage::{host_coverage, is_nearly_all_large};
use wideleaf_benches::cpu::{CpuUse, Threads};
use wideleaf_benches::guest::{Guest, GuestSetup};
use wideleaf_benches::managed::{Managed, policy};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::SpreadMedian;
use wideleaf_benches::times_to_event::Times;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::arms_of_round;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::host::Advice;
use wideleaf_memory::khugepaged::{Khugepaged, Settings, SettingsLease};
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, Host, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, GpaRange, PageSize, PerTenThousand};

/// RAM beyond the hot set.
const BESIDE_HOT: Bytes = mib(64);
/// Interval between two measurements of coverage. One measurement of 64 MiB of base pages takes 0.25 ms.
const PACE: Duration = Duration::from_millis(5);
/// Duration of the measurement of CPU time after all work is done.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// Time without work after which the manager's ticks are as far apart as possible: 10 ms doubled up to a
/// second is 1.3 s.
const IDLING_FOR: Duration = Duration::from_secs(3);
/// Shift between repetitions, so that the guest's phases do not coincide with the manager's ticks.
const SHIFT: Duration = Duration::from_millis(370);

/// Targets of the bench.
const TIMES_DEFAULTS_MIN: f64 = 50.0;
const OF_FASTEST_MIN: f64 = 0.8;
const OF_FASTEST_CPU_MAX: f64 = 0.1;

/// The promoter of an arm, and the time of its activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// `auto`, activated when the hot phase starts.
    LetIn,
    /// `auto`, active long before the hot phase.
    Idling,
    /// The host's khugepaged with these settings.
    Host(Settings),
}

const ARMS: [(&str, Arm); 4] = [
    ("auto, let in at once", Arm::LetIn),
    ("auto, idling", Arm::Idling),
    ("khugepaged, fastest", Arm::Host(Settings::FASTEST)),
    ("khugepaged, defaults", Arm::Host(Settings::DEFAULTS)),
];
const LET_IN: usize = 0;
const IDLING: usize = 1;
const FASTEST: usize = 2;
const DEFAULTS: usize = 3;

/// Results of one hot phase.
struct Run {
    /// Time from the start of the phase until nearly all is on huge pages; `None` if the limit came first.
    took: Option<Duration>,
    /// Coverage at the end of that time, or at the limit.
    reached: PerTenThousand,
    /// CPU time until then.
    cpu: Duration,
    /// CPU use after promotion, if it was completed.
    idle: Option<Idle>,
}

/// Shares of one CPU after all work is done.
#[derive(Clone, Copy, Debug)]
struct Idle {
    ran: f64,
    wanted: f64,
}

/// The promoter, which is alive until the run is over.
enum Promoter {
    Ours(Managed),
    Hosts(Threads, #[expect(dead_code, reason = "restores the settings when dropped")] SettingsLease),
}

impl Promoter {
    fn threads(&self) -> &Threads {
        match self {
            Promoter::Ours(managed) => managed.threads(),
            Promoter::Hosts(threads, _) => threads,
        }
    }
}

/// A guest with a hot phase that starts at `began`, and the promoter from then on.
struct HotGuest {
    promoter: Promoter,
    guest: Guest,
    hot: GpaRange,
    began: Instant,
    use_before: CpuUse,
}

impl HotGuest {
    fn start(arm: Arm, hot: Bytes, repetition: u32, waiting: &Waiting) -> Result<HotGuest, ScenarioError> {
        let setup = GuestSetup {
            memory: hot + BESIDE_HOT,
            backing: BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages"),
            cmdline: format!("kernel=pattern bytes={} passes=1000000", hot.get()),
            slot_bytes: None,
        };
        warm_host_memory(setup.memory).expect("memory to warm");
        let guest = Guest::start(&setup);
        let promoter = match arm {
            Arm::LetIn => Promoter::Ours(Managed::prepare(&guest, policy("auto"))),
            Arm::Idling => Promoter::Ours(idle(&guest, repetition, waiting)?),
            Arm::Host(settings) => {
                let lease = Khugepaged::of_this_machine().lease(settings)?;
                Promoter::Hosts(Threads::of_kernel("khugepaged")?, lease)
            }
        };
        let began = guest.begin_of("pass", waiting)?;
        let use_before = promoter.threads().cpu_use()?;
        match (arm, &promoter) {
            (Arm::LetIn, Promoter::Ours(managed)) => managed.activate(),
            (Arm::Host(_), _) => permit_huge_pages(&guest),
            _ => {}
        }
        Ok(HotGuest { hot: guest.region("pattern"), promoter, guest, began, use_before })
    }

    fn run(self, limit: Duration, waiting: &Waiting) -> Result<Run, ScenarioError> {
        let windows = self.hot.bytes().pages(PageSize::Huge2M);
        let ram = self.guest.ram();
        let is_large = || is_nearly_all_large(ram, self.hot, self.guest.second_level().as_ref(), windows);
        let took = waiting.comes(limit, PACE, is_large)?.then(|| self.began.elapsed());
        let threads = self.promoter.threads();
        let cpu = threads.cpu_use()?.since(self.use_before).ran;
        let reached = host_coverage(ram, self.hot);
        let idle = took.map(|_| idle_use(threads, waiting)).transpose()?;
        drop(self.promoter);
        self.guest.stop();
        Ok(Run { took, reached, cpu, idle })
    }
}

/// A manager that has had no work for long, because its guest was paused before it touched its hot set.
fn idle(guest: &Guest, repetition: u32, waiting: &Waiting) -> Result<Managed, ScenarioError> {
    guest.pause();
    let managed = Managed::start(guest, policy("auto"));
    waiting.pass(IDLING_FOR + SHIFT * repetition)?;
    // If the host is a virtual machine, memory that was free for two seconds may have returned to the machine below.
    warm_host_memory(guest.ram().bytes()).expect("memory to warm");
    guest.resume();
    Ok(managed)
}

fn permit_huge_pages(guest: &Guest) {
    let host = LinuxHost::open().expect("/proc is mounted");
    for range in guest.ram().ranges() {
        let advice = host.advise(range.hva, range.gpa.bytes(), Advice::HugePage);
        advice.expect("any anonymous memory may be marked");
    }
}

fn idle_use(threads: &Threads, waiting: &Waiting) -> Result<Idle, ScenarioError> {
    let (began, before) = (Instant::now(), threads.cpu_use()?);
    waiting.pass(IDLE_TIME)?;
    let used = threads.cpu_use()?.since(before);
    let share = |time: Duration| time.as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Idle { ran: share(used.ran), wanted: share(used.wanted()) })
}

/// Times of an arm's runs.
fn times(runs: &[Run], limit: Duration) -> Times {
    Times::of(runs.iter().map(|run| run.took), limit)
}

/// A share of one CPU in each run with completed promotion.
fn idle_shares(runs: &[Run], of: fn(Idle) -> f64) -> Vec<f64> {
    runs.iter().filter_map(|run| run.idle).map(of).collect()
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let hot = mib(arguments.number(0, 64)?);
    let (often, at_defaults) = (arguments.number(1, 5)?, arguments.number(2, 1)?);
    let limit = Duration::from_secs(arguments.number(3, 180)?);
    needs_kvm()?;
    let settings = Khugepaged::of_this_machine().settings()?;
    let mut runs: [Vec<Run>; ARMS.len()] = Default::default();
    for repetition in 0..often.max(at_defaults) {
        for index in arms_of_round(ARMS.len(), repetition + 1) {
            let times = if index == DEFAULTS { at_defaults } else { often };
            if repetition < times {
                runs[index].push(HotGuest::start(ARMS[index].1, hot, repetition, waiting)?.run(limit, waiting)?);
            }
        }
    }
    Ok(figures(format!("{hot} hot; the host's settings before: {settings:?}"), &runs, limit))
}

fn figures(title: String, runs: &[Vec<Run>; ARMS.len()], limit: Duration) -> Figures {
    let columns = Times::columns("to 99 % on 2m").into_iter();
    let mut rows = Table::new(["arm"], columns.chain(["reached", "CPU until then", "idle CPU", "wanted"]));
    for ((name, _), runs) in ARMS.iter().zip(runs).filter(|(_, runs)| !runs.is_empty()) {
        let times = times(runs, limit);
        let reached = runs.iter().map(|run| run.reached.as_fraction()).fold(1.0, f64::min);
        let done = runs.iter().filter(|run| run.took.is_some());
        let cpu_ms: Vec<f64> = done.map(|run| run.cpu.as_secs_f64() * 1e3).collect();
        let percent = |of: fn(Idle) -> f64| {
            let percents: Vec<f64> = idle_shares(runs, of).iter().map(|share| share * 100.0).collect();
            times.median_of(&percents, 2, "%")
        };
        let mut row = vec![Cell::from(*name)];
        row.extend(times.cells());
        row.extend([Cell::number(reached * 100.0, 1, "%"), times.median_of(&cpu_ms, 1, "ms")]);
        row.extend([percent(|idle| idle.ran), percent(|idle| idle.wanted)]);
        rows.row(row);
    }
    Figures::of(title)
        .table(rows)
        .note(format!(
            "late: not done within {} s; such a run is later than all others and has no CPU time; reached: minimum of \
             all runs",
            limit.as_secs()
        ))
        .note(format!(
            "idle CPU: share of one CPU over {} s, while the guest works; wanted: including the time ready to run but \
             waiting",
            IDLE_TIME.as_secs()
        ))
        .bars(bars(runs, limit))
}

fn bars(runs: &[Vec<Run>; ARMS.len()], limit: Duration) -> Vec<Bar> {
    let mut bars = Vec::new();
    let times = |arm: usize| times(&runs[arm], limit);
    for (arm, name) in [(LET_IN, "let in at once"), (IDLING, "idling")] {
        for (other, least, of) in [(DEFAULTS, TIMES_DEFAULTS_MIN, "defaults"), (FASTEST, OF_FASTEST_MIN, "its fastest")]
        {
            bars.extend(times(arm).speed_bar(&format!("auto, {name}: speed, of {of}"), &times(other), least));
        }
    }
    // The manager also completes its work on a busy machine; khugepaged never finishes.
    let ours = idle_shares(&runs[LET_IN], |idle| idle.ran);
    let theirs = idle_shares(&runs[FASTEST], |idle| idle.wanted);
    if !ours.is_empty() && !theirs.is_empty() {
        let what = "idle CPU, auto : wanted by khugepaged's fastest";
        bars.push(SpreadMedian::unpaired_ratio(&ours, &theirs).bar(what, 3, "", Limit::AtMost(OF_FASTEST_CPU_MAX)));
    }
    bars
}

fn main() -> ExitCode {
    scenario::run("khugepaged", experiment)
}
