//! The manager's effect on an external QEMU guest that another process started on base pages.
//!
//! ```text
//!   speed       attached   GUPS ████████│ attach ▒▒▒▒▒▒│████████  rate before : rate after, and the stalls of updates
//!               control    GUPS ████████│              │████████  the same times, without attaching
//!   khugepaged  attached, the host's khugepaged at its fastest and at its defaults: time to 99 % huge, CPU time
//! ```
//!
//! `speed`: a library keeps QEMU's advice to use huge pages from the kernel (`wideleaf_testing::qemu_guest`), so
//! RAM starts on base pages. Arms take turns, with one guest each, and each guest checks its table at its end. Before
//! the clock starts, both arms fill twice the guest's memory with huge pages, so that the promotion finds warm ones.
//! `khugepaged`: the guest starts on huge pages, the default in QEMU. Once it is full, the bench splits each huge
//! page from outside, so that khugepaged may collapse it again. The clock starts when less than 5 % is on huge pages,
//! and if that does not come, the bench fails. A run that ends at its limit is counted, and in no median.
//!
//! `cargo bench -p wideleaf-benches --bench attached [-- speed|khugepaged [ROUNDS] [LOG2_WORDS or MIB]]` (default
//! speed, 5 rounds, 2^28 words; khugepaged: 64 MiB; needs QEMU, KVM and root)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_attach::Places;
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_attach::{find, ram};
use wideleaf_benches::coverage::{HARDLY_ANY, NEARLY_ALL, needs_base_pages};
use wideleaf_benches::cpu::{CpuUse, Threads};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_benches::times_to_event::Times;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::arms_of_round;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host, HostError};
use wideleaf_memory::khugepaged::{Khugepaged, Settings as KhugepagedSettings};
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, RamRange};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSize, PerTenThousand, PolicyChoice};
use wideleaf_protocol::{Message, parse};
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};

/// RAM beyond the table.
const BESIDE_TABLE: Bytes = mib(64);
/// Time over which a rate is measured.
const MEASURED: Duration = Duration::from_secs(3);
/// Time limit for a promotion. The control arm waits as long as the last promotion took.
const PROMOTION_LIMIT: Duration = Duration::from_secs(60);
const PACE: Duration = Duration::from_millis(5);
/// Time limit for a guest's phases. Verifying 1 GiB on base pages takes half a minute.
const GUEST_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for khugepaged. At its defaults it needs 40 s for 64 MiB once it has reached them.
const KHUGEPAGED_LIMIT: Duration = Duration::from_secs(240);
/// Maximum number of attempts to split all huge pages: a page that is busy at that moment stays huge.
const SPLIT_TRIES_MAX: u32 = 5;

/// Targets of the bench.
const SPEED_UP_MIN: f64 = 1.3;
const GAP_MAX_MS: f64 = 2.0;
/// Targets of `khugepaged`, those of the bench of that name.
const TIMES_DEFAULTS_MIN: f64 = 50.0;
const OF_FASTEST_MIN: f64 = 0.8;

/// Results of one guest.
struct Run {
    before: f64,
    after: f64,
    gap_p99_ns: f64,
    gap_max_ns: f64,
}

/// Results of one promotion.
struct Promotion {
    /// Time to 99 %, or to the limit.
    took: Duration,
    is_late: bool,
    reached: f64,
    window_p99_ms: f64,
    window_max_ms: f64,
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    needs_kvm()?;
    match arguments.word(0, &["speed", "khugepaged"], "speed or khugepaged")? {
        0 => speed(arguments.count(1, 5)?, arguments.number(2, 28)?, waiting),
        _ => khugepaged(arguments.count(1, 3)?, mib(arguments.number(2, 64)?), waiting),
    }
}

fn speed(rounds: u32, log2_words: u32, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let memory = Bytes::new(8 << log2_words) + BESIDE_TABLE;
    let (mut attached, mut control, mut promotions) = (Vec::new(), Vec::new(), Vec::<Promotion>::new());
    for round in 1..=rounds {
        for is_attached in arms_of_round(2, round).map(|arm| arm == 0) {
            let took = promotions.last().map_or(Duration::from_secs(2), |promotion| promotion.took);
            warm_host_memory(memory + memory).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
            let mut guest =
                start(memory, QemuRam::AnonymousOnBasePages, &format!("kernel=gups log2_words={log2_words}"))?;
            waiting.until("its updates", GUEST_LIMIT, PACE, || guest.said().marks.len() > 1)?;
            let before = rate(&guest, waiting)?;
            let reserve = WarmReserve::of(memory)?;
            let manager = if is_attached {
                let (manager, promotion) = promote(&guest, reserve, waiting)?;
                promotions.push(promotion);
                Some(manager)
            } else {
                stand_by(reserve, took, waiting)?;
                None
            };
            let after = rate(&guest, waiting)?;
            guest.wait_until("its verification", |said| said.has_passed.is_some());
            assert_eq!(guest.said().has_passed, Some(true), "the guest's table is intact");
            drop(manager);
            let (gap_p99_ns, gap_max_ns) = gaps(&guest);
            let run = Run { before, after, gap_p99_ns, gap_max_ns };
            if is_attached { &mut attached } else { &mut control }.push(run);
        }
    }
    Ok(figures_of_speed(log2_words, [&attached, &control], &promotions))
}

fn start(memory: Bytes, ram: QemuRam, cmdline: &str) -> Result<QemuGuest, ScenarioError> {
    let setup = QemuSetup::new("attached", memory, ram, cmdline);
    QemuGuest::start(&setup).map_err(|error| ScenarioError::Skipped(format!("QEMU: {error}")))
}

/// Updates per second, measured from now on.
fn rate(guest: &QemuGuest, waiting: &Waiting) -> Result<f64, ScenarioError> {
    let first = guest.said().marks.len();
    waiting.pass(MEASURED)?;
    let rate = guest.said().rate_from(first);
    Ok(rate.expect("the guest reports its progress twenty times a second"))
}

fn attach(guest: &QemuGuest) -> Result<Attached, ScenarioError> {
    let cannot = |error: &dyn std::fmt::Display| ScenarioError::Skipped(format!("cannot attach: {error}"));
    let process = find::with_pid(&Places::default(), guest.pid()).map_err(|error| cannot(&error))?;
    let policy = PolicyChoice::parse("auto").expect("auto is in the table");
    let settings = Settings { policy: Some(policy), qmp: Some(guest.qmp()), ..Settings::default() };
    Attached::start(process, settings).map_err(|error| cannot(&error))
}

fn promote(
    guest: &QemuGuest,
    mut reserve: WarmReserve,
    waiting: &Waiting,
) -> Result<(Attached, Promotion), ScenarioError> {
    let began = Instant::now();
    let manager = attach(guest)?;
    let coverage = || manager.view().coverage().unwrap_or(0);
    let is_done = waiting.comes(PROMOTION_LIMIT, PACE, || {
        let coverage = coverage();
        reserve.give_back(f64::from(coverage) / 1e4);
        coverage >= 9_900
    })?;
    let took = began.elapsed();
    let unavailable = manager.view().work.expect("the guest is managed").unavailable;
    let reached = f64::from(coverage()) / 100.0;
    let [window_p99_ms, window_max_ms] = [unavailable.p99_s, unavailable.max_s].map(|seconds| seconds * 1e3);
    Ok((manager, Promotion { took, is_late: !is_done, reached, window_p99_ms, window_max_ms }))
}

/// What the control arm does while the other one promotes: the same memory is taken and released over the same time.
fn stand_by(mut reserve: WarmReserve, took: Duration, waiting: &Waiting) -> Result<(), ScenarioError> {
    let began = Instant::now();
    waiting.comes(took, PACE, || {
        reserve.give_back(began.elapsed().as_secs_f64() / took.as_secs_f64());
        false
    })?;
    Ok(())
}

/// Warm huge pages of this process, released shortly before the promotion allocates them.
///
/// On a machine that returns free memory to its own host, free memory goes cold within two seconds. A promotion takes
/// longer, and the first touch of a cold frame takes 5 ms, ten times a promotion. The reserve releases every other
/// huge page: the kernel does not merge a page with a neighbour that is in use, and it hands out whole free pages
/// before it splits merged ones.
struct WarmReserve {
    pages: Vec<Arc<GuestRam>>,
    _neighbours: Vec<Arc<GuestRam>>,
    total: usize,
}

impl WarmReserve {
    /// Number of free pages ahead of the promotion: enough until its coverage is read again.
    const AHEAD: usize = 512;

    fn of(memory: Bytes) -> Result<Self, ScenarioError> {
        let cannot = |error: &dyn std::fmt::Display| ScenarioError::Skipped(format!("no warm memory: {error}"));
        let host = LinuxHost::open().map_err(|error| cannot(&error))?;
        let huge = PageSize::Huge2M.bytes();
        let range = GpaRange::new(Gpa::new(0), huge).expect("the range is not empty");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages");
        let page = || {
            let ram = GuestRam::map(&[range], backing).map_err(|error| cannot(&error))?;
            host.advise(ram.base(), huge, Advice::PopulateWrite).map_err(|error| cannot(&error))?;
            Ok::<_, ScenarioError>(ram)
        };
        let total = memory.get().div_ceil(huge.get()) as usize;
        let pairs = (0..total).map(|_| Ok((page()?, page()?))).collect::<Result<Vec<_>, ScenarioError>>()?;
        let (pages, neighbours) = pairs.into_iter().unzip();
        let mut reserve = Self { pages, _neighbours: neighbours, total };
        reserve.give_back(0.0);
        Ok(reserve)
    }

    /// Releases the pages that a promotion needs next after it has reached this share.
    fn give_back(&mut self, share: f64) {
        let taken = (share * self.total as f64) as usize;
        self.pages.truncate(self.total.saturating_sub(taken + Self::AHEAD));
    }
}

/// p99 and maximum duration of the guest's batches of 128 updates.
fn gaps(guest: &QemuGuest) -> (f64, f64) {
    let said = guest.said();
    let gaps = |line: &String| match parse(line) {
        Some(Ok(Message::Gaps { p99_ns, max_ns, .. })) => Some((p99_ns as f64, max_ns as f64)),
        _ => None,
    };
    said.lines.iter().find_map(gaps).expect("GUPS reports its gaps before its verification")
}

fn figures_of_speed(log2_words: u32, [attached, control]: [&[Run]; 2], promotions: &[Promotion]) -> Figures {
    let rounds = attached.len();
    let gain = |runs: &[Run]| SpreadMedian::of(&runs.iter().map(|run| run.after / run.before).collect::<Vec<_>>());
    let median_of = |runs: &[Run], of: fn(&Run) -> f64| median(runs.iter().map(of).collect());
    let names = [vec!["before", "after"], columns("after : before", rounds), vec!["gap p99", "longest gap"]].concat();
    let mut rows = Table::new(["arm"], names);
    for (name, runs) in [("attached", attached), ("control", control)] {
        let mega = |of: fn(&Run) -> f64| Cell::number(median_of(runs, of) / 1e6, 1, "M/s");
        let mut row = vec![name.into(), mega(|run| run.before), mega(|run| run.after)];
        row.extend(gain(runs).cells(3, ""));
        row.push(Cell::number(median_of(runs, |run| run.gap_p99_ns) / 1e3, 1, "us"));
        row.push(Cell::number(median_of(runs, |run| run.gap_max_ns) / 1e6, 2, "ms"));
        rows.row(row);
    }
    let limit_s = PROMOTION_LIMIT.as_secs();
    Figures::of(format!("speed: GUPS, 2^{log2_words} words, before and after attach"))
        .table(rows)
        .table(table_of_promotions(promotions))
        .note(format!("medians of {rounds} rounds, {}; all guests verified their table", spread_in_words(rounds)))
        .note(format!("late: not 99 % on huge pages within {limit_s} s; later than all others in the median"))
        .bars([gain(attached).bar("speed after : before", 3, "", Limit::AtLeast(SPEED_UP_MIN))])
        .bars(bars_of_gaps([attached, control], promotions))
}

fn table_of_promotions(promotions: &[Promotion]) -> Table {
    let median_of = |of: fn(&Promotion) -> f64| median(promotions.iter().map(of).collect());
    let times = promotions.iter().map(|promotion| (!promotion.is_late).then_some(promotion.took));
    let columns = Times::columns("after").into_iter();
    let mut table = Table::new([], columns.chain(["on huge pages", "host's time per window, p99", "max"]));
    table.row(Times::of(times, PROMOTION_LIMIT).cells().into_iter().chain([
        Cell::number(median_of(|promotion| promotion.reached), 1, "%"),
        Cell::number(median_of(|promotion| promotion.window_p99_ms), 2, "ms"),
        Cell::number(median_of(|promotion| promotion.window_max_ms), 2, "ms"),
    ]));
    table
}

fn bars_of_gaps([attached, control]: [&[Run]; 2], promotions: &[Promotion]) -> [Bar; 2] {
    let windows: Vec<f64> = promotions.iter().map(|promotion| promotion.window_p99_ms).collect();
    let both = attached.iter().zip(control);
    let gaps: Vec<f64> = both.map(|(run, control)| (run.gap_p99_ns - control.gap_p99_ns) / 1e6).collect();
    let most = Limit::AtMost(GAP_MAX_MS);
    [
        SpreadMedian::of(&windows).bar("host's time per window, p99", 2, "ms", most),
        SpreadMedian::of(&gaps).bar("guest's gap p99, less the control's of that round", 4, "ms", most),
    ]
}

/// The promoter of an arm.
#[derive(Clone, Copy)]
enum Promoter {
    Attached,
    Khugepaged(KhugepagedSettings),
}

const PROMOTERS: [(&str, Promoter); 3] = [
    ("attached", Promoter::Attached),
    ("khugepaged, fastest", Promoter::Khugepaged(KhugepagedSettings::FASTEST)),
    ("khugepaged, defaults", Promoter::Khugepaged(KhugepagedSettings::DEFAULTS)),
];
const ATTACHED: usize = 0;
const FASTEST: usize = 1;
/// Index of the arm at defaults. It takes minutes, and one run is enough for a factor of hundreds.
const DEFAULTS: usize = 2;

fn khugepaged(rounds: u32, hot: Bytes, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let mut runs: [Vec<ArmResult>; PROMOTERS.len()] = Default::default();
    for round in 1..=rounds {
        for index in arms_of_round(PROMOTERS.len(), round) {
            if index != DEFAULTS || round == 1 {
                runs[index].push(time_to_huge(PROMOTERS[index].1, hot, waiting)?);
            }
        }
    }
    Ok(figures_of_khugepaged(hot, &runs))
}

fn figures_of_khugepaged(hot: Bytes, runs: &[Vec<ArmResult>; PROMOTERS.len()]) -> Figures {
    let times: Vec<Times> =
        runs.iter().map(|runs| Times::of(runs.iter().map(|run| run.took), KHUGEPAGED_LIMIT)).collect();
    let columns = Times::columns("to 99 % on 2m").into_iter();
    let mut rows = Table::new(["arm"], columns.chain(["CPU until then", "reached"]));
    for (((name, _), runs), times) in PROMOTERS.iter().zip(runs).zip(&times) {
        let done = runs.iter().filter(|run| run.took.is_some());
        let cpu_ms: Vec<f64> = done.map(|run| run.cpu.as_secs_f64() * 1e3).collect();
        let reached = runs.iter().map(|run| run.reached.as_fraction()).fold(1.0, f64::min);
        let mut row = vec![Cell::from(*name)];
        row.extend(times.cells());
        row.extend([times.median_of(&cpu_ms, 1, "ms"), Cell::number(reached * 100.0, 1, "%")]);
        rows.row(row);
    }
    let ours = &times[ATTACHED];
    let limit_s = KHUGEPAGED_LIMIT.as_secs();
    Figures::of(format!("khugepaged: {hot} of hot memory in a guest that checks and rewrites it"))
        .table(rows)
        .note("a late run counts as later than all others, and has no CPU time; reached: minimum of all runs")
        .note(format!("late: not 99 % on huge pages within {limit_s} s; less than 5 % when the clock started"))
        .bars(ours.speed_bar("attached : khugepaged at its defaults, speed", &times[DEFAULTS], TIMES_DEFAULTS_MIN))
        .bars(ours.speed_bar("attached : khugepaged at its fastest, speed", &times[FASTEST], OF_FASTEST_MIN))
}

/// Results of one arm.
struct ArmResult {
    /// Time to 99 %; `None` if the limit came first.
    took: Option<Duration>,
    cpu: Duration,
    reached: PerTenThousand,
}

fn time_to_huge(promoter: Promoter, hot: Bytes, waiting: &Waiting) -> Result<ArmResult, ScenarioError> {
    let memory = hot + BESIDE_TABLE;
    warm_host_memory(memory + memory).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let line = format!("kernel=pattern bytes={} passes=1000000", hot.get());
    let mut guest = start(memory, QemuRam::Anonymous, &line)?;
    guest.check_all_words();
    let outside = Outside::of(&guest)?;
    let refusal = outside.split_all();
    warm_host_memory(memory).map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    needs_base_pages(outside.coverage(), refusal.map(|error| error.to_string()).as_deref())?;
    let began = Instant::now();
    let is_there = || outside.coverage() >= NEARLY_ALL;
    let (threads, _held): (Threads, Box<dyn std::any::Any>) = match promoter {
        Promoter::Attached => {
            let (attached, threads) = Threads::started_by(|| attach(&guest));
            (threads, Box::new(attached?))
        }
        Promoter::Khugepaged(settings) => {
            let lease = Khugepaged::of_this_machine().lease(settings)?;
            (Threads::of_kernel("khugepaged")?, Box::new(lease))
        }
    };
    let before = match promoter {
        Promoter::Attached => CpuUse::default(),
        Promoter::Khugepaged(_) => threads.cpu_use()?,
    };
    let took = waiting.comes(KHUGEPAGED_LIMIT, PACE, is_there)?.then(|| began.elapsed());
    let cpu = threads.cpu_use()?.since(before).ran;
    let reached = outside.coverage();
    guest.check_all_words();
    Ok(ArmResult { took, cpu, reached })
}

/// Hot memory of a guest, accessed from outside.
struct Outside {
    host: Arc<ProcessHost>,
    hot: RamRange,
}

impl Outside {
    fn of(guest: &QemuGuest) -> Result<Outside, ScenarioError> {
        let cannot = |error: &dyn std::fmt::Display| ScenarioError::Skipped(format!("cannot inspect QEMU: {error}"));
        let process = find::with_pid(&Places::default(), guest.pid()).map_err(|error| cannot(&error))?;
        let hot = guest.said().regions["pattern"];
        let ram = ram::map(&process, None);
        let hot = ram.pieces.iter().find_map(|piece| piece.range.part(hot));
        let hot = hot.ok_or_else(|| ScenarioError::Skipped("cannot find QEMU's guest RAM".into()))?;
        let host = ProcessHost::open(guest.pid()).map_err(|error| cannot(&error))?;
        Ok(Outside { host: Arc::new(host), hot })
    }

    /// Splits every huge page into base pages, and tries again while a page is busy. Returns what the kernel last
    /// refused.
    fn split_all(&self) -> Option<HostError> {
        let mut refusal = None;
        for _ in 0..SPLIT_TRIES_MAX {
            let splits = self.hot.gpa.windows().filter_map(|window| {
                let start = self.hot.hva + (window.start() - self.hot.gpa.start());
                self.host.advise(start, PageSize::Base4K.bytes(), Advice::Cold).err()
            });
            refusal = splits.last();
            if self.coverage() < HARDLY_ANY {
                break;
            }
        }
        refusal
    }

    /// Share of the windows that are on huge pages.
    fn coverage(&self) -> PerTenThousand {
        let mut sensor = HostBackingSensor::default();
        let rows = sensor.sample(self.host.as_ref(), self.hot, None).expect("QEMU is alive");
        let (windows, huge) =
            rows.fold((0, 0), |(windows, huge), row| (windows + 1, huge + u64::from(row.backing == Backing::Huge2M)));
        PerTenThousand::of(huge, windows)
    }
}

fn main() -> ExitCode {
    scenario::run("attached", experiment)
}
