//! Runs several `wideleaf run` at once, each with its own manager. Each has its own budget, or all share that of a
//! wideleafd that serves only them.
//!
//! ```text
//!   temporary folder ─ wideleafd.toml, control.sock, state.json ─▶ wideleafd ◀── registers, obeys ── wideleaf run × n
//!                                                                     └ CPU time
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_experiments::definition::{BudgetOf, GuestAmongOthers};
use wideleaf_experiments::disturbance::DAEMON_CPU_S;
use wideleaf_experiments::each_guest::{AT_THE_SAME_TIME, AT_THE_SAME_TIME_MIN_PERCENT, OfGuest};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::report::common_sections::number;
use wideleaf_experiments::results::Measured;

use super::wideleaf_run;
use ::wideleaf_run::failure::Failure;
use ::wideleaf_run::interrupts::Interrupts;
use ::wideleaf_run::report::RunReport;
use ::wideleaf_run::undo::TemporaryFolder;
use shared_time::{SharedTime, TimedPart};
use wideleaf::child;
use wideleaf_policies::PageSize;

pub(super) mod in_qemu;
pub(super) mod shared_time;

/// The daemon's program, in the folder of this program.
pub(in crate::experiment) const DAEMON: &str = "wideleafd";
/// A daemon that does not listen within this time never will.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Mechanism, in the report of a run, by which a manager moves a window to base pages and gives its huge page back.
const VACATE: &str = "vacate";

/// Runs all of them until they end. A daemon that ends before them makes the run a failure: what they then did was
/// without its budget.
pub(super) fn run(
    guests: &[GuestAmongOthers],
    budget: BudgetOf,
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    let daemon = match budget {
        BudgetOf::Each => None,
        BudgetOf::All => Some(Daemon::start(interrupts)?),
    };
    run_beside(daemon, guests, timeout, interrupts)
}

fn run_beside(
    mut daemon: Option<Daemon>,
    guests: &[GuestAmongOthers],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    let management = daemon.as_ref().map_or(vec!["--no-daemon".to_owned()], |daemon| {
        vec!["--daemon".to_owned(), daemon.socket().display().to_string()]
    });
    let began = Instant::now();
    let one = |guest: &GuestAmongOthers| {
        let arguments = [&["run".to_owned()], &guest.arguments[..], &management].concat();
        let report = child::run(&arguments, timeout, interrupts);
        let ended_s = began.elapsed().as_secs_f64();
        report
            .and_then(|report| GuestRun::of(&guest.name, &report, ended_s))
            .map_err(|failure| failure.during(&guest.name))
    };
    let mut together = together(guests, all(guests, one)?);
    daemon.as_mut().map_or(Ok(()), Daemon::check)?;
    if let Some(cpu) = daemon.as_ref().and_then(Daemon::cpu_time) {
        *together.metrics.entry(Metric::ManagerCpuS).or_default() += cpu.as_secs_f64();
        together.told.insert(DAEMON_CPU_S.to_owned(), cpu.as_secs_f64());
    }
    Ok(together)
}

/// Runs all of them at once, each in a thread. Returns the first failure in their order, when all have ended.
fn all<G: Sync>(guests: &[G], one: impl Fn(&G) -> Result<GuestRun, Failure> + Sync) -> Result<Vec<GuestRun>, Failure> {
    let one = &one;
    let ended: Vec<Result<GuestRun, Failure>> = thread::scope(|scope| {
        let running: Vec<_> = guests.iter().map(|guest| scope.spawn(move || one(guest))).collect();
        running.into_iter().map(|run| run.join().expect("a run returns its failure")).collect()
    });
    ended.into_iter().collect()
}

/// A guest after its run.
#[derive(Clone, Debug, Default)]
struct GuestRun {
    name: String,
    measured: Measured,
    /// Its timed part, if its report has one.
    timed: Option<TimedPart>,
}

impl GuestRun {
    fn of(name: &str, report: &RunReport, ended_s: f64) -> Result<GuestRun, Failure> {
        let measured = wideleaf_run::verified(report)?;
        let measured = Measured { told: told(name, report, &measured), ..measured };
        Ok(GuestRun { name: name.to_owned(), measured, timed: TimedPart::of(report, ended_s) })
    }

    /// Replaces the figure of the whole timed part by that of the time in which all guests were at work. A guest
    /// without progress in that time has no figure.
    fn judge_in(&mut self, shared: Option<SharedTime>) {
        let whole = self.measured.metrics.remove(&Metric::Figure);
        let in_time = |time: SharedTime| Some(whole? * time.speed_to_whole(self.timed.as_ref()?)?);
        let figure = shared.and_then(in_time);
        let second_half = shared.map(SharedTime::second_half).and_then(in_time);
        self.measured.metrics.extend(figure.map(|figure| (Metric::Figure, figure)));
        let told = [(OfGuest::Figure, figure), (OfGuest::FigureOfSecondHalf, second_half)];
        self.measured.told.extend(told.into_iter().filter_map(|(what, value)| Some((what.name(&self.name), value?))));
    }
}

/// One result for all, judged by the time in which they were at work together.
fn together(guests: &[GuestAmongOthers], mut ended: Vec<GuestRun>) -> Measured {
    let parts = ended.iter().map(|one| one.timed.clone()).collect::<Option<Vec<_>>>();
    let shared = parts.and_then(|parts| SharedTime::of(&parts));
    let counts = shared.filter(|shared| shared.percent() >= AT_THE_SAME_TIME_MIN_PERCENT);
    ended.iter_mut().for_each(|one| one.judge_in(counts));
    let each: Vec<Measured> = ended.into_iter().map(|one| one.measured).collect();
    let mut all = added_up(guests, &each);
    all.told.extend(shared.map(|shared| (AT_THE_SAME_TIME.to_owned(), shared.percent())));
    all
}

/// One result for all: their costs added up, and the gains of the guests that are judged.
fn added_up(guests: &[GuestAmongOthers], each: &[Measured]) -> Measured {
    const ADDED_UP: [Metric; 5] =
        [Metric::ResidentMib, Metric::BloatMib, Metric::CopiedMib, Metric::ManagerCpuS, Metric::Refusals];
    let all = |metric: Metric| each.iter().filter_map(move |one| one.metrics.get(&metric).copied());
    let judged = |metric: Metric| {
        let of = guests.iter().zip(each).filter(|(guest, _)| guest.is_judged);
        of.map(|(_, one)| one.metrics.get(&metric).copied()).collect::<Option<Vec<f64>>>().filter(|v| !v.is_empty())
    };
    let longest = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
    let mut metrics: BTreeMap<Metric, f64> =
        ADDED_UP.into_iter().map(|metric| (metric, all(metric).fold(0.0, |sum, one| sum + one))).collect();
    metrics.extend(judged(Metric::Figure).map(|figures| (Metric::Figure, figures.iter().sum())));
    metrics.extend(judged(Metric::Figure).and_then(|figures| Some((Metric::Fairness, fairness(&figures)?))));
    metrics.extend(judged(Metric::Seconds).map(|seconds| (Metric::Seconds, longest(seconds))));
    // Absent if one guest never reached it.
    metrics.extend(judged(Metric::TimeToCoverageS).map(|times| (Metric::TimeToCoverageS, longest(times))));
    let lowest = |values: Vec<f64>| values.into_iter().fold(100.0, f64::min);
    metrics.extend(judged(Metric::CoveragePercent).map(|shares| (Metric::CoveragePercent, lowest(shares))));
    let notes = guests.iter().zip(each).map(|(guest, one)| note(guest, one)).collect();
    let told = each.iter().flat_map(|one| one.told.clone()).collect();
    Measured { metrics, notes, told, ..Measured::default() }
}

/// Numbers of one guest by their names.
fn told(guest: &str, report: &RunReport, measured: &Measured) -> BTreeMap<String, f64> {
    let of_guest = [
        (OfGuest::FigureOfWhole, measured.metrics.get(&Metric::Figure).copied()),
        (OfGuest::ManagerCpuS, Some(report.manager.cpu_s)),
        (OfGuest::Vacated, Some(vacated(&report.manager.outcomes) as f64)),
    ];
    let mib = |windows: u64| (windows * PageSize::Huge2M.bytes().get()) as f64 / wideleaf_run::MIB;
    let of_sets = report.regions.iter().flat_map(|set| {
        let huge = (OfGuest::HugeMib(&set.name), Some(mib(set.windows_host_large)));
        [(OfGuest::SetMib(&set.name), Some(mib(set.windows))), huge]
    });
    let sensors = report.manager.sensors.iter();
    let of_sensors = sensors.map(|(sensor, work)| (OfGuest::SensorCpuS(sensor), Some(work.cpu_s)));
    let all = of_guest.into_iter().chain(of_sets).chain(of_sensors);
    all.filter_map(|(what, value)| Some((what.name(guest), value?))).collect()
}

/// Number of windows of which the manager gave back the huge page.
fn vacated(outcomes: &BTreeMap<String, u64>) -> u64 {
    outcomes.get(&format!("{VACATE}.done")).copied().unwrap_or(0)
}

/// The lowest figure divided by the highest: 1 is fair.
fn fairness(figures: &[f64]) -> Option<f64> {
    let highest = figures.iter().copied().reduce(f64::max).filter(|highest| *highest > 0.0)?;
    Some(figures.iter().copied().reduce(f64::min)? / highest)
}

/// One guest as a sentence.
fn note(guest: &GuestAmongOthers, one: &Measured) -> String {
    let of = |metric: Metric| one.metrics.get(&metric).map_or("unknown".to_owned(), |value| number(*value));
    let whole = one.told.get(&OfGuest::FigureOfWhole.name(&guest.name));
    let whole = whole.map_or("unknown".to_owned(), |value| number(*value));
    let (coverage, resident) = (of(Metric::CoveragePercent), of(Metric::ResidentMib));
    format!("{}: figure of its whole timed part {whole}, coverage {coverage} %, resident {resident} MiB.", guest.name)
}

/// A wideleafd for one job. Dropping it ends the daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
    folder: TemporaryFolder,
}

impl Daemon {
    /// Starts a daemon in its own folder, and waits until it listens.
    pub(super) fn start(interrupts: &Interrupts) -> Result<Daemon, Failure> {
        let program = program()
            .ok_or_else(|| Failure::Host(format!("cannot find {DAEMON}: it is not in the folder of this program")))?;
        let cannot = |what: &str, error: std::io::Error| Failure::Host(format!("cannot {what}: {error}"));
        let folder = TemporaryFolder::new().map_err(|error| cannot("make a temporary folder", error))?;
        let file = folder.path().join("wideleafd.toml");
        fs::write(&file, configuration(folder.path())).map_err(|error| cannot("write a temporary file", error))?;
        let words =
            File::create(folder.path().join("words")).map_err(|error| cannot("write a temporary file", error))?;
        let mut command = child::that_ends_with_us(&program);
        command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(words);
        let child = command.spawn().map_err(|error| cannot("start wideleafd", error))?;
        let mut daemon = Daemon { child, folder };
        let began = Instant::now();
        while UnixStream::connect(daemon.socket()).is_err() {
            interrupts.check()?;
            let has_ended = daemon.child.try_wait().map_err(|error| cannot("wait for wideleafd", error))?.is_some();
            if has_ended || began.elapsed() > LISTENS_WITHIN {
                let last = daemon.last_words();
                return Err(Failure::Host(format!("cannot use {DAEMON}: it does not listen: {last}")));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(daemon)
    }

    /// Checks that it still runs.
    ///
    /// # Errors
    /// [`Failure::Host`] with its last words.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        let status = self.child.try_wait();
        match status.map_err(|error| Failure::Host(format!("cannot wait for {DAEMON}: {error}")))? {
            None => Ok(()),
            Some(status) => Err(Failure::Host(format!(
                "cannot use this run: {DAEMON} ended before its guests, with {status}: {}; make it again with --resume",
                self.last_words()
            ))),
        }
    }

    fn last_words(&self) -> String {
        let words = fs::read_to_string(self.folder.path().join("words")).unwrap_or_default();
        words.lines().last().unwrap_or("it printed nothing").to_owned()
    }

    /// Path of its control socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("control.sock")
    }

    /// CPU time of the daemon so far: the sum over its threads (`schedstat`, first number, in nanoseconds).
    pub(super) fn cpu_time(&self) -> Option<Duration> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).ok()?.flatten();
        let of = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
        };
        Some(tasks.filter_map(of).sum())
    }
}

#[cfg(test)]
impl Daemon {
    /// A shell with these commands instead of a daemon.
    pub(super) fn of_shell(commands: &str) -> Daemon {
        let folder = TemporaryFolder::new().expect("a temporary folder");
        let words = File::create(folder.path().join("words")).expect("it is new");
        let mut shell = std::process::Command::new("sh");
        let child = shell.args(["-c", commands]).stdin(Stdio::null()).stderr(words).spawn().expect("a shell");
        Daemon { child, folder }
    }

    /// A daemon that has ended.
    pub(super) fn ended(last_words: &str) -> Daemon {
        let mut daemon = Daemon::of_shell(&format!("echo first >&2; echo '{last_words}' >&2; exit 3"));
        daemon.child.wait().expect("it ends");
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All its files in this folder, no external guests, and defaults for the rest.
fn configuration(folder: &Path) -> String {
    let path = |name: &str| folder.join(name);
    format!(
        "[socket]\npath = {:?}\n[state]\npath = {:?}\n[metrics]\nlisten = \"off\"\n[attach]\nautomatic = \"none\"\n",
        path("control.sock"),
        path("state.json")
    )
}

/// The daemon's program, if it was built with this one.
pub(in crate::experiment) fn program() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?.with_file_name(DAEMON);
    program.is_file().then_some(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::wideleaf_run::report::{Phase, SensorSummary};

    fn guest(name: &str, is_judged: bool) -> GuestAmongOthers {
        GuestAmongOthers { name: name.into(), is_judged, arguments: vec![] }
    }

    fn measured(metrics: &[(Metric, f64)]) -> Measured {
        Measured { metrics: metrics.iter().copied().collect(), ..Measured::default() }
    }

    #[test]
    fn a_daemon_that_ended_before_its_guests_fails_their_run_in_its_last_words() {
        let interrupts = Interrupts::install().expect("handlers");
        let run = |daemon| run_beside(daemon, &[], Duration::from_secs(1), &interrupts);
        let why = run(Some(Daemon::ended("out of memory"))).expect_err("it has ended").to_string();
        assert!(why.contains("wideleafd ended before its guests, with exit status: 3: out of memory"), "{why}");
        assert!(run(Some(Daemon::of_shell("exec sleep 600"))).is_ok(), "it runs");
        assert!(run(None).is_ok(), "each guest has its own budget");
    }

    #[test]
    fn costs_count_for_all_guests_and_gains_for_those_that_are_judged() {
        let guests = [guest("hot a", true), guest("hot b", true), guest("idle", false)];
        let each = [
            measured(&[(Metric::Figure, 3.0), (Metric::BloatMib, 1.0), (Metric::TimeToCoverageS, 0.5)]),
            measured(&[(Metric::Figure, 4.0), (Metric::BloatMib, 2.0), (Metric::TimeToCoverageS, 0.75)]),
            measured(&[(Metric::Figure, 1e9), (Metric::BloatMib, 4.0)]),
        ];
        let together = added_up(&guests, &each);
        let value = |metric| together.metrics.get(&metric).copied();
        assert_eq!((value(Metric::Figure), value(Metric::Fairness)), (Some(7.0), Some(0.75)));
        assert_eq!((value(Metric::BloatMib), value(Metric::TimeToCoverageS)), (Some(7.0), Some(0.75)));
        assert_eq!(together.notes.len(), 3);
    }

    #[test]
    fn time_to_coverage_is_unknown_if_one_guest_never_reached_it() {
        let guests = [guest("hot a", true), guest("hot b", true)];
        let each = [measured(&[(Metric::TimeToCoverageS, 0.5)]), measured(&[])];
        assert_eq!(added_up(&guests, &each).metrics.get(&Metric::TimeToCoverageS), None);
    }

    #[test]
    fn each_guest_has_numbers_of_its_own() {
        let region = |name: &str, windows, large| ::wideleaf_run::report::Region {
            name: name.into(),
            address: 0,
            bytes: windows << 21,
            windows,
            windows_host_large: large,
        };
        let mut report =
            RunReport { regions: vec![region("hot_range", 8, 6), region("cold", 4, 0)], ..RunReport::default() };
        report.manager.cpu_s = 0.25;
        let access = SensorSummary {
            samples: 1,
            windows: 9,
            latest_windows: 9,
            ticks_without: 0,
            claimed: 0,
            not_run: 0,
            waits: 0,
            cpu_s: 0.125,
        };
        report.manager.sensors = [("access".to_owned(), access)].into();
        report.manager.outcomes = [("vacate.done".to_owned(), 3), ("vacate.refused_busy".to_owned(), 9)].into();
        let one = measured(&[(Metric::Figure, 3.0)]);
        let each = ["hot a", "hot b"].map(|name| Measured { told: told(name, &report, &one), ..one.clone() });
        let told = added_up(&[guest("hot a", true), guest("hot b", true)], &each).told;
        let value = |what: OfGuest<'_>, of: &str| told.get(&what.name(of)).copied();
        for of in ["hot a", "hot b"] {
            let numbers = [OfGuest::FigureOfWhole, OfGuest::Vacated, OfGuest::ManagerCpuS];
            assert_eq!(numbers.map(|what| value(what, of)), [3.0, 3.0, 0.25].map(Some));
            assert_eq!(value(OfGuest::SensorCpuS("access"), of), Some(0.125));
            assert_eq!(["hot_range", "cold"].map(|set| value(OfGuest::HugeMib(set), of)), [Some(12.0), Some(0.0)]);
            assert_eq!(["hot_range", "cold"].map(|set| value(OfGuest::SetMib(set), of)), [Some(16.0), Some(8.0)]);
        }
    }

    /// A guest with a timed part of 100 units in its first second, and 300 in its second one.
    fn ended(name: &str, ended_s: f64) -> GuestRun {
        let progress = vec![(0.5, 50), (1.0, 100), (1.5, 250), (2.0, 400)];
        let phase = Phase { name: "update".into(), seconds: 2.0, rate_per_s: 200.0, progress, ..Phase::default() };
        let report = RunReport { phases: vec![phase], ..RunReport::default() };
        let measured = measured(&[(Metric::Figure, 0.02)]);
        let measured = Measured { told: told(name, &report, &measured), ..measured };
        GuestRun { name: name.into(), measured, timed: TimedPart::of(&report, ended_s) }
    }

    #[test]
    fn guests_are_judged_by_the_time_in_which_all_are_at_work() {
        let guests = [guest("hot a", true), guest("hot b", true)];
        let of = |second_ended_s: f64| together(&guests, vec![ended("hot a", 2.0), ended("hot b", second_ended_s)]);
        let at_once = of(3.0);
        let value = |what: OfGuest<'_>, of: &str| at_once.told.get(&what.name(of)).copied();
        // While both are at work, the first is in its fast second and the second in its slow one.
        assert_eq!([OfGuest::Figure, OfGuest::FigureOfWhole].map(|what| value(what, "hot a")), [0.03, 0.02].map(Some));
        assert_eq!([OfGuest::Figure, OfGuest::FigureOfWhole].map(|what| value(what, "hot b")), [0.01, 0.02].map(Some));
        assert_eq!(value(OfGuest::FigureOfSecondHalf, "hot b"), Some(0.01));
        assert_eq!((at_once.metrics[&Metric::Figure], at_once.told[AT_THE_SAME_TIME]), (0.04, 50.0));

        let apart = of(3.9);
        assert!((apart.told[AT_THE_SAME_TIME] - 5.0).abs() < 1e-9, "{apart:?}");
        assert_eq!(apart.metrics.get(&Metric::Figure), None, "too little time together");
        assert_eq!(apart.told.get(&OfGuest::Figure.name("hot a")), None);
        assert_eq!(apart.told[&OfGuest::FigureOfWhole.name("hot a")], 0.02);
    }

    #[test]
    fn guests_that_did_nothing_have_no_fairness() {
        assert_eq!(fairness(&[0.0, 0.0]), None);
        assert_eq!(fairness(&[]), None);
        assert_eq!(fairness(&[2.0, 2.0]), Some(1.0));
    }
}
