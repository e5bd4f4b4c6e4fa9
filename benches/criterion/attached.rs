//! What the manager does for a guest of QEMU's that somebody else started on base pages.
//!
//! ```text
//!   speed       attached   GUPS ████████│ attach ▒▒▒▒▒▒│████████  rate before : rate after, and how long updates were kept waiting
//!               control    GUPS ████████│              │████████  the same times, nobody attaches
//!   khugepaged  attached, the host's khugepaged at its fastest, and at its defaults: time to 99 % on huge pages, and CPU time
//! ```
//!
//! `speed`: QEMU's advice to use huge pages is kept from the kernel by a library (`wideleaf_guest_tests::qemu_guest`), so RAM starts on base
//! pages; arms take turns, a guest each, and each guest checks its table at its end. `khugepaged`: the guest starts on huge pages
//! as QEMU's do, and each is split from outside once it is full, so that khugepaged may have it back; the clock starts then.
//!
//! `cargo bench -p wideleaf-benches --bench attached [-- speed|khugepaged [ROUNDS] [LOG2_WORDS or MIB]]` (default speed, 5 rounds, 2^28
//! words; khugepaged: 64 MiB; needs QEMU, KVM and root)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_attach::process::Places;
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_attach::{find, ram};
use wideleaf_benches::cpu::Threads;
use wideleaf_benches::experiment::{self, Arguments, Ended, Waiting, bar, machine, needs_kvm, number, table};
use wideleaf_experiments::statistics::{Interval, bootstrap_median, median};
use wideleaf_guest_tests::qemu_guest::{QemuGuest, QemuRam, QemuSetup};
use wideleaf_memory::host::linux::warm_host_memory;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::khugepaged::{Khugepaged, Settings as KhugepagedSettings};
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, RamRange};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSize, PolicyChoice};
use wideleaf_protocol::{Message, parse};

/// RAM beside the table.
const BESIDE_TABLE: Bytes = mib(64);
/// A rate is taken over so long.
const MEASURED: Duration = Duration::from_secs(3);
/// Longer is not waited for a promotion; the control arm waits as long as the last one took.
const PROMOTION_LIMIT: Duration = Duration::from_secs(60);
const PACE: Duration = Duration::from_millis(5);
/// A gibibyte on base pages is verified in half a minute.
const GUEST_LIMIT: Duration = Duration::from_secs(300);
/// khugepaged at its defaults comes through 64 MiB in 40 s once it has come to them.
const KHUGEPAGED_LIMIT: Duration = Duration::from_secs(240);

/// The promises.
const SPEED_UP_MIN: f64 = 1.3;
const GAP_MAX_MS: f64 = 2.0;

/// What one guest showed.
struct Run {
    before: f64,
    after: f64,
    gap_p99_ns: f64,
    gap_max_ns: f64,
}

/// What was done to one guest.
struct Promotion {
    took: Duration,
    reached: f64,
    window_p99_ms: f64,
    window_max_ms: f64,
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<(), Ended> {
    needs_kvm()?;
    match arguments.word(0, &["speed", "khugepaged"], "speed or khugepaged")? {
        0 => speed(arguments.number(1, 5)?, arguments.number(2, 28)?, waiting),
        _ => khugepaged(arguments.number(1, 3)?, mib(arguments.number(2, 64)?), waiting),
    }
}

fn speed(rounds: usize, log2_words: u32, waiting: &Waiting) -> Result<(), Ended> {
    let memory = Bytes::new(8 << log2_words) + BESIDE_TABLE;
    let (mut attached, mut control, mut promotions) = (Vec::new(), Vec::new(), Vec::<Promotion>::new());
    for round in 0..rounds {
        let is_attached_first = round % 2 == 0;
        for is_attached in [is_attached_first, !is_attached_first] {
            let took = promotions.last().map_or(Duration::from_secs(2), |promotion| promotion.took);
            warm_host_memory(memory + memory).map_err(|error| Ended::Skipped(error.to_string()))?;
            let mut guest =
                start(memory, QemuRam::AnonymousOnBasePages, &format!("kernel=gups log2_words={log2_words}"))?;
            waiting.until("its updates", GUEST_LIMIT, PACE, || guest.said().marks.len() > 1)?;
            let before = rate(&guest, waiting)?;
            let manager = if is_attached {
                let (manager, promotion) = promote(&guest, memory, waiting)?;
                promotions.push(promotion);
                Some(manager)
            } else {
                waiting.pass(took)?;
                None
            };
            let after = rate(&guest, waiting)?;
            guest.wait_until("its verification", |said| said.has_passed.is_some());
            assert_eq!(guest.said().has_passed, Some(true), "the guest's table is as it left it");
            drop(manager);
            let (gap_p99_ns, gap_max_ns) = gaps(&guest);
            let run = Run { before, after, gap_p99_ns, gap_max_ns };
            if is_attached { &mut attached } else { &mut control }.push(run);
        }
    }
    report_speed(&attached, &control, &promotions);
    Ok(())
}

fn start(memory: Bytes, ram: QemuRam, cmdline: &str) -> Result<QemuGuest, Ended> {
    let setup = QemuSetup::new("attached", memory, ram, cmdline);
    QemuGuest::start(&setup).map_err(|error| Ended::Skipped(format!("QEMU: {error}")))
}

/// Updates per second over the time to come.
fn rate(guest: &QemuGuest, waiting: &Waiting) -> Result<f64, Ended> {
    let first = guest.said().marks.len();
    waiting.pass(MEASURED)?;
    let rate = guest.said().rate_from(first);
    Ok(rate.expect("a guest that says twenty times a second how far it is"))
}

fn attach(guest: &QemuGuest) -> Result<Attached, Ended> {
    let cannot = |error: &dyn std::fmt::Display| Ended::Skipped(format!("cannot attach: {error}"));
    let process = find::with_pid(&Places::default(), guest.pid()).map_err(|error| cannot(&error))?;
    let policy = PolicyChoice::parse("auto").expect("it is in the table");
    let settings = Settings { policy: Some(policy), qmp: Some(guest.qmp()), ..Settings::default() };
    Attached::start(process, settings).map_err(|error| cannot(&error))
}

fn promote(guest: &QemuGuest, memory: Bytes, waiting: &Waiting) -> Result<(Attached, Promotion), Ended> {
    let mut reserve = WarmReserve::of(memory)?;
    let began = Instant::now();
    let manager = attach(guest)?;
    let coverage = || manager.view().coverage().unwrap_or(0);
    waiting.comes(PROMOTION_LIMIT, PACE, || {
        let coverage = coverage();
        reserve.give_back(f64::from(coverage) / 1e4);
        coverage >= 9_900
    })?;
    let took = began.elapsed();
    let unavailable = manager.view().work.expect("it is managed").unavailable;
    let reached = f64::from(coverage()) / 100.0;
    let promotion =
        Promotion { took, reached, window_p99_ms: unavailable.p99_s * 1e3, window_max_ms: unavailable.max_s * 1e3 };
    Ok((manager, promotion))
}

/// Warm huge pages of this process, given back a little ahead of what takes them.
///
/// Free memory goes cold within two seconds on a machine that gives it back to its own host, and a promotion takes longer. A cold
/// frame's first touch takes 5 ms, ten times a promotion. Every other huge page is given back: one whose neighbour stays is
/// not merged with it, and the kernel hands out whole free ones before it splits merged ones.
struct WarmReserve {
    pages: Vec<Arc<GuestRam>>,
    _neighbours: Vec<Arc<GuestRam>>,
    total: usize,
}

impl WarmReserve {
    /// So many are free before anybody takes one: what a promotion takes until its coverage is looked at again.
    const AHEAD: usize = 512;

    fn of(memory: Bytes) -> Result<Self, Ended> {
        let cannot = |error: &dyn std::fmt::Display| Ended::Skipped(format!("no warm memory: {error}"));
        let host = LinuxHost::open().map_err(|error| cannot(&error))?;
        let huge = PageSize::Huge2M.bytes();
        let range = GpaRange::new(Gpa::new(0), huge).expect("it is not empty");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages");
        let page = || {
            let ram = GuestRam::map(&[range], backing).map_err(|error| cannot(&error))?;
            host.advise(ram.base(), huge, Advice::PopulateWrite).map_err(|error| cannot(&error))?;
            Ok::<_, Ended>(ram)
        };
        let total = memory.get().div_ceil(huge.get()) as usize;
        let pairs = (0..total).map(|_| Ok((page()?, page()?))).collect::<Result<Vec<_>, Ended>>()?;
        let (pages, neighbours) = pairs.into_iter().unzip();
        let mut reserve = Self { pages, _neighbours: neighbours, total };
        reserve.give_back(0.0);
        Ok(reserve)
    }

    /// Frees what is wanted next by somebody who has taken this share.
    fn give_back(&mut self, share: f64) {
        let taken = (share * self.total as f64) as usize;
        self.pages.truncate(self.total.saturating_sub(taken + Self::AHEAD));
    }
}

/// Of the guest's batches of 128 updates: 99 % took no longer, and the longest.
fn gaps(guest: &QemuGuest) -> (f64, f64) {
    let said = guest.said();
    let gaps = |line: &String| match parse(line) {
        Some(Ok(Message::Gaps { p99_ns, max_ns, .. })) => Some((p99_ns as f64, max_ns as f64)),
        _ => None,
    };
    said.lines.iter().find_map(gaps).expect("GUPS tells its gaps before its verification")
}

fn report_speed(attached: &[Run], control: &[Run], promotions: &[Promotion]) {
    let gain = |runs: &[Run]| interval(runs.iter().map(|run| run.after / run.before));
    let median_of = |runs: &[Run], of: fn(&Run) -> f64| median(runs.iter().map(of).collect());
    let mut rows = table(&["arm", "before", "after", "after : before", "gap 99 %", "longest gap"]);
    for (name, runs) in [("attached", attached), ("control", control)] {
        let mega = |of: fn(&Run) -> f64| number(format!("{:.1} M/s", median_of(runs, of) / 1e6));
        rows.add_row([
            name.into(),
            mega(|run| run.before),
            mega(|run| run.after),
            number(show(&gain(runs))),
            number(format!("{:.1} us", median_of(runs, |run| run.gap_p99_ns) / 1e3)),
            number(format!("{:.2} ms", median_of(runs, |run| run.gap_max_ns) / 1e6)),
        ]);
    }
    println!("{rows}");
    let of_promotions = |of: fn(&Promotion) -> f64| median(promotions.iter().map(of).collect());
    let window_p99 = of_promotions(|promotion| promotion.window_p99_ms);
    println!(
        "  medians of {} rounds; all guests verified their table. To {:.1} % on huge pages in {:.2} s; a window on the host's \
         side for {window_p99:.2} ms (99 %), {:.2} ms at most",
        attached.len(),
        of_promotions(|promotion| promotion.reached),
        of_promotions(|promotion| promotion.took.as_secs_f64()),
        of_promotions(|promotion| promotion.window_max_ms),
    );
    let speed_up = gain(attached).median;
    println!(
        "{}",
        bar(&format!("speed after : before {speed_up:.3}, at least {SPEED_UP_MIN}"), speed_up >= SPEED_UP_MIN)
    );
    println!(
        "{}",
        bar(
            &format!("host's time for a window, 99 %: {window_p99:.2} ms, at most {GAP_MAX_MS}"),
            window_p99 <= GAP_MAX_MS
        )
    );
    let gap = (median_of(attached, |run| run.gap_p99_ns) - median_of(control, |run| run.gap_p99_ns)) / 1e6;
    println!(
        "{}",
        bar(&format!("guest's gap, 99 %, less the control's: {gap:.4} ms, at most {GAP_MAX_MS}"), gap <= GAP_MAX_MS)
    );
    println!("  {}", machine());
}

fn interval(values: impl Iterator<Item = f64>) -> Interval {
    bootstrap_median(&[values.collect()])
}

fn show(interval: &Interval) -> String {
    format!("{:.3} ({:.3} - {:.3})", interval.median, interval.low, interval.high)
}

/// Who promotes.
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
/// It takes minutes: once is enough for a factor of hundreds.
const DEFAULTS: usize = 2;

fn khugepaged(rounds: usize, hot: Bytes, waiting: &Waiting) -> Result<(), Ended> {
    let mut runs: [Vec<Taken>; PROMOTERS.len()] = Default::default();
    for round in 0..rounds {
        for (index, (_, promoter)) in PROMOTERS.into_iter().enumerate() {
            if index != DEFAULTS || round == 0 {
                runs[index].push(time_to_huge(promoter, hot, waiting)?);
            }
        }
    }
    let mut rows = table(&["arm", "runs", "to 99 % on 2m", "CPU until then", "reached"]);
    for ((name, _), runs) in PROMOTERS.iter().zip(&runs) {
        rows.add_row([
            (*name).into(),
            number(runs.len()),
            number(format!("{:.3} s", median(runs.iter().map(|run| run.took.as_secs_f64()).collect()))),
            number(format!("{:.1} ms", median(runs.iter().map(|run| run.cpu.as_secs_f64() * 1e3).collect()))),
            number(format!("{:.1} %", median(runs.iter().map(|run| run.reached * 100.0).collect()))),
        ]);
    }
    println!("{rows}\n  medians; {hot} hot, of a guest that checks and rewrites it; {}", machine());
    Ok(())
}

/// One arm's time.
struct Taken {
    took: Duration,
    cpu: Duration,
    reached: f64,
}

fn time_to_huge(promoter: Promoter, hot: Bytes, waiting: &Waiting) -> Result<Taken, Ended> {
    let memory = hot + BESIDE_TABLE;
    warm_host_memory(memory + memory).map_err(|error| Ended::Skipped(error.to_string()))?;
    let line = format!("kernel=pattern bytes={} passes=1000000", hot.get());
    let mut guest = start(memory, QemuRam::Anonymous, &line)?;
    guest.check_all_words();
    let outside = Outside::of(&guest)?;
    outside.split_all();
    warm_host_memory(memory).map_err(|error| Ended::Skipped(error.to_string()))?;
    let began = Instant::now();
    let is_there = || outside.coverage() >= 0.99;
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
        Promoter::Attached => wideleaf_benches::cpu::CpuUse::default(),
        Promoter::Khugepaged(_) => threads.cpu_use()?,
    };
    waiting.comes(KHUGEPAGED_LIMIT, PACE, is_there)?;
    let took = began.elapsed();
    let cpu = threads.cpu_use()?.since(before).ran;
    let reached = outside.coverage();
    guest.check_all_words();
    Ok(Taken { took, cpu, reached })
}

/// The hot memory of a guest, seen from outside.
struct Outside {
    host: Arc<ProcessHost>,
    hot: RamRange,
}

impl Outside {
    fn of(guest: &QemuGuest) -> Result<Outside, Ended> {
        let cannot = |error: &dyn std::fmt::Display| Ended::Skipped(format!("cannot look at QEMU: {error}"));
        let process = find::with_pid(&Places::default(), guest.pid()).map_err(|error| cannot(&error))?;
        let hot = guest.said().regions["pattern"];
        let ram = ram::map(&process, None);
        let hot = ram.pieces.iter().find_map(|piece| piece.range.part(hot));
        let hot = hot.ok_or_else(|| Ended::Skipped("its RAM was not found".into()))?;
        let host = ProcessHost::open(guest.pid()).map_err(|error| cannot(&error))?;
        Ok(Outside { host: Arc::new(host), hot })
    }

    /// Makes base pages of every huge page.
    fn split_all(&self) {
        for window in self.hot.gpa.windows() {
            let start = self.hot.hva + (window.start() - self.hot.gpa.start());
            // What is not huge, or busy just now, stays as it is: what is left of it is in the figures of all arms.
            let _ = self.host.advise(start, PageSize::Base4K.bytes(), Advice::Cold);
        }
    }

    /// The share of its windows that are huge.
    fn coverage(&self) -> f64 {
        let mut sensor = HostBackingSensor::default();
        let rows = sensor.sample(self.host.as_ref(), self.hot, None).expect("QEMU is alive");
        let (windows, huge) =
            rows.fold((0, 0), |(windows, huge), row| (windows + 1, huge + u32::from(row.backing == Backing::Huge2M)));
        f64::from(huge) / f64::from(windows.max(1))
    }
}

fn main() -> ExitCode {
    experiment::run("attached", experiment)
}
