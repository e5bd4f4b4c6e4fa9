//! Length of the pauses in which guests at work are saved and moved, and a guest's speed around its move.
//!
//! ```text
//!   pattern   run ─ save ─ migrate ─▶ run ─ save ─ migrate ─▶ run …      pause, downtime
//!   GUPS      run ─ migrate ─▶ run                                      a new guest for each move
//! ```
//!
//! `pattern` rewrites 24,400 pages/s over 512 MiB with two vCPUs. A save and a migration of it may pause it for as long
//! as their targets say, and are refused otherwise. GUPS writes too fast for such a pause. It moves in a pause as long
//! as needed, and with post-copy, in turns. Its speed counts before the rounds, in the slowest 0.1 s of them, and 2 s
//! after the switch.
//!
//! All runs are processes of this host, and the connection is a Unix socket: source, target and guest share its CPUs.
//! Guests are ended at work, so they are not verified; tests do that.
//!
//! `cargo bench -p wideleaf-benches --bench moves [-- MOVES ROUNDS]` (default 24 saves and migrations of `pattern`, and
//! 6 rounds of GUPS; needs KVM), after `cargo build --release -p wideleaf`

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use wideleaf_benches::beside_qemu::program;
use wideleaf_benches::moved::{Mark, MovedSpeeds};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_control::vm::{MigratedView, SavedView};
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::quantile;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_run::report::RunReport;

/// Target: longest pause of a save in milliseconds, which is also what a save may need.
const PAUSE_MS_MAX: u32 = 20;
/// Target: longest time without a guest of a migration in milliseconds, which is also what a migration may need.
const DOWNTIME_MS_MAX: u32 = 50;
/// Target: share of its speed before the rounds that GUPS has 2 s after the switch.
const SPEED_MIN: f64 = 0.95;

const PATTERN: [&str; 4] =
    ["pattern", "--vcpus=2", "--memory=640M", "--cmdline=bytes=512M pages_per_second=24400 seconds=3600"];
/// Some lines of progress come in 0.1 s, and a report keeps those of all of its time.
const GUPS: [&str; 3] = ["gups", "--memory=384M", "--cmdline=log2_words=25 progress_ms=25 seconds=3600"];
/// Name of its timed part.
const UPDATES: &str = "update";
/// Options of every run; the timeout ends guests of a bench that was killed.
const OPTIONS: [&str; 4] = ["--policy=auto", "--no-daemon", "--timeout=30m", "--format=json"];

/// Time for which a guest is in its timed part before it is saved or moved: its memory is on huge pages then.
const WARM_UP: Duration = Duration::from_secs(3);
/// Time for which `pattern` works between two saves or migrations.
const BETWEEN: Duration = Duration::from_millis(500);
/// Time for which GUPS works after its move.
const AFTERWARDS: Duration = Duration::from_millis(3500);

/// Longest wait for a run to answer or to end.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two looks at a run.
const PACE: Duration = Duration::from_millis(20);
/// Exit code of a client if its request was refused.
const REFUSED: i32 = 4;

/// Way in which GUPS moves.
struct MoveMethod {
    name: &'static str,
    options: &'static [&'static str],
}

const WAYS: [MoveMethod; 2] = [
    MoveMethod { name: "in a pause as long as needed", options: &["--pause=10s"] },
    MoveMethod { name: "with post-copy, pause of 50 ms", options: &["--pause=50ms", "--postcopy=when-needed"] },
];

fn main() -> ExitCode {
    scenario::run("moves", experiment)
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (moves, rounds) = (arguments.count(0, 24)?, arguments.count(1, 6)?);
    needs_kvm()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = Place { program: program("wideleaf", "wideleaf")?, folder, runs: std::cell::Cell::new(0), waiting };
    let [saves, migrations] = in_turn(&place, moves)?;
    let gups: Vec<Vec<Moved>> = (1..=rounds)
        .map(|number| round(WAYS.len(), number, |way| Moved::measure(&place, &WAYS[way])))
        .collect::<Result<_, ScenarioError>>()?;
    let refused = Cell::count(saves.refused + migrations.refused);
    Ok(Figures::of("Saves and migrations of guests at work, between processes of one host")
        .table(pauses(&saves, &migrations))
        .table(speeds(&gups))
        .note(format!(
            "pattern: two vCPUs, 24400 pages/s over 512 MiB, {moves} saves and migrations in turn; GUPS: one vCPU, 256 \
             MiB, medians of {rounds} rounds, {}, ratios within a run",
            spread_in_words(rounds as usize)
        ))
        .bars([saves.bar("longest pause of a save", PAUSE_MS_MAX)])
        .bars([migrations.bar("longest downtime of a migration", DOWNTIME_MS_MAX)])
        .bar("saves and migrations that were refused for their pause", refused, Limit::AtMost(0.0))
        .bars(WAYS.iter().enumerate().map(|(way, MoveMethod { name, .. })| {
            let what = format!("GUPS moved {name}, speed 2 s after : before");
            after(&gups, way).bar(&what, 3, "", Limit::AtLeast(SPEED_MIN))
        })))
}

/// Saves or migrations of one guest.
#[derive(Default)]
struct Pauses {
    /// Times without a running guest, in milliseconds.
    ms: Vec<f64>,
    /// Numbers of passes over RAM.
    rounds: Vec<f64>,
    /// Durations in seconds.
    seconds: Vec<f64>,
    /// Number of those that were refused for their pause.
    refused: u64,
}

impl Pauses {
    /// Adds one, which `None` says was refused: its time without a guest, number of passes, and duration.
    fn add(&mut self, one: Option<(f64, u32, f64)>) {
        let Some((ms, rounds, seconds)) = one else {
            self.refused += 1;
            return;
        };
        self.ms.push(ms);
        self.rounds.push(f64::from(rounds));
        self.seconds.push(seconds);
    }

    fn row(&self, name: &str) -> Vec<Cell> {
        let cell = |values: &[f64], share: f64, decimals: usize, unit: &str| {
            let value = quantile(values, share);
            value.map_or_else(|| Cell::missing("all were refused"), |value| Cell::number(value, decimals, unit))
        };
        vec![
            name.into(),
            Cell::count(self.ms.len() as u64),
            Cell::count(self.refused),
            cell(&self.ms, 0.5, 1, "ms"),
            cell(&self.ms, 0.99, 1, "ms"),
            cell(&self.ms, 1.0, 1, "ms"),
            cell(&self.rounds, 0.5, 0, ""),
            cell(&self.seconds, 0.5, 2, "s"),
        ]
    }

    fn bar(&self, what: &str, ms_max: u32) -> Bar {
        let longest = quantile(&self.ms, 1.0).unwrap_or(f64::NAN);
        Bar::new(what, Cell::number(longest, 1, "ms"), Limit::AtMost(f64::from(ms_max)))
    }
}

/// Saves and moves `pattern` in turn, this often.
fn in_turn(place: &Place<'_>, moves: u32) -> Result<[Pauses; 2], ScenarioError> {
    let [mut saves, mut migrations] = [Pauses::default(), Pauses::default()];
    let folder = place.folder.path().join("saved").display().to_string();
    let mut run = place.start_until(&PATTERN, "pass")?;
    for _ in 0..moves {
        let saved = run.save(&folder, &format!("--pause={PAUSE_MS_MAX}ms"))?;
        saves.add(saved.map(|saved| (saved.pause_ms, saved.rounds, saved.seconds)));
        place.waiting.pass(BETWEEN)?;
        let mut target = place.wait_for_a_guest()?;
        let moved = run.migrate(&target, &[&format!("--pause={DOWNTIME_MS_MAX}ms")])?;
        if moved.is_some() {
            run.report()?;
            target.answers()?;
            run = target;
        }
        migrations.add(moved.map(|moved| (moved.downtime_ms, moved.rounds, moved.seconds)));
        place.waiting.pass(BETWEEN)?;
    }
    run.stop()?;
    Ok([saves, migrations])
}

fn pauses(saves: &Pauses, migrations: &Pauses) -> Table {
    let numbers = ["done", "refused", "without a guest, p50", "p99", "longest", "rounds, p50", "takes, p50"];
    let mut table = Table::new(["pattern"], numbers);
    table.row(saves.row("save"));
    table.row(migrations.row("migration"));
    table
}

/// A move of GUPS.
struct Moved {
    speeds: MovedSpeeds,
    downtime_ms: f64,
    /// Length of the rounds, in seconds.
    rounds_s: f64,
}

impl Moved {
    fn measure(place: &Place<'_>, way: &MoveMethod) -> Result<Moved, ScenarioError> {
        let mut source = place.start_until(&GUPS, UPDATES)?;
        let target = place.wait_for_a_guest()?;
        let moved = source.migrate(&target, way.options)?;
        let moved = moved.ok_or_else(|| ScenarioError::Failed(format!("GUPS did not move {}", way.name)))?;
        let source = source.report()?;
        place.waiting.pass(AFTERWARDS)?;
        let target = target.stop()?;
        let followed_s = moved.post_copy.as_ref().and_then(|view| view.seconds).unwrap_or(0.0);
        let rounds_s = moved.seconds - moved.downtime_ms / 1e3 - followed_s;
        let left_s = updates(&source).last().map_or(0.0, |(at_s, _)| *at_s);
        let speeds = MovedSpeeds::of(updates(&target), left_s, rounds_s);
        let too_few = "GUPS made too few marks of progress; run it on a machine with less other work";
        let speeds = speeds.ok_or_else(|| ScenarioError::Failed(too_few.into()))?;
        Ok(Moved { speeds, downtime_ms: moved.downtime_ms, rounds_s })
    }

    fn slowest(&self) -> f64 {
        self.speeds.slowest / self.speeds.before
    }

    fn after(&self) -> f64 {
        self.speeds.after / self.speeds.before
    }
}

/// Progress of the updates.
fn updates(report: &RunReport) -> &[Mark] {
    report.phases.last().filter(|phase| phase.name == UPDATES).map_or(&[][..], |phase| &phase.progress)
}

fn of_way(gups: &[Vec<Moved>], way: usize, of: impl Fn(&Moved) -> f64) -> SpreadMedian {
    SpreadMedian::of(&gups.iter().map(|ways| of(&ways[way])).collect::<Vec<_>>())
}

fn after(gups: &[Vec<Moved>], way: usize) -> SpreadMedian {
    of_way(gups, way, Moved::after)
}

fn speeds(gups: &[Vec<Moved>]) -> Table {
    let names = ["speed before", "slowest 0.1 s of rounds : before", "2 s after : before", "downtime", "rounds take"];
    let numbers = names.map(|name| columns(name, gups.len())).concat();
    let mut table = Table::new(["GUPS moved"], numbers);
    for (way, MoveMethod { name, .. }) in WAYS.iter().enumerate() {
        let cells = [
            of_way(gups, way, |moved| moved.speeds.before / 1e6).cells(1, "M/s"),
            of_way(gups, way, Moved::slowest).cells(3, ""),
            after(gups, way).cells(3, ""),
            of_way(gups, way, |moved| moved.downtime_ms).cells(1, "ms"),
            of_way(gups, way, |moved| moved.rounds_s).cells(2, "s"),
        ];
        table.row([vec![(*name).into()], cells.concat()].concat());
    }
    table
}

/// Folder of all runs.
struct Place<'a> {
    program: PathBuf,
    folder: TempDir,
    /// Number of runs so far.
    runs: std::cell::Cell<u32>,
    waiting: &'a Waiting,
}

impl Place<'_> {
    /// Starts a guest, and waits until it has been in this phase for some time.
    fn start_until(&self, arguments: &[&str], phase: &str) -> Result<Run<'_>, ScenarioError> {
        let mut run = self.spawn(self.runs.get(), &[arguments, &["--console"]].concat());
        run.answers()?;
        let begin = format!(" begin phase={phase} ");
        self.waiting.until("the timed part of a guest", LIMIT, PACE, || run.text("console").contains(&begin))?;
        self.waiting.pass(WARM_UP)?;
        Ok(run)
    }

    /// Starts a run to which a guest can move.
    fn wait_for_a_guest(&self) -> Result<Run<'_>, ScenarioError> {
        let number = self.runs.get();
        let address = format!("unix:{}", self.file(number, "move").display());
        let run = self.spawn(number, &["--incoming", &address]);
        let does_wait = || run.text("words").contains("waiting for a VM at");
        self.waiting.until("a run that waits for a guest", LIMIT, PACE, does_wait)?;
        Ok(run)
    }

    fn spawn(&self, number: u32, arguments: &[&str]) -> Run<'_> {
        self.runs.set(number + 1);
        let file = |ending: &str| File::create(self.file(number, ending)).expect("a file of a temporary folder");
        let mut command = Command::new(&self.program);
        command.arg("run").args(arguments).args(OPTIONS);
        command.arg("--control-socket").arg(self.file(number, "sock"));
        command.arg("--output").arg(self.file(number, "json"));
        command.stdin(Stdio::null()).stdout(file("console")).stderr(file("words"));
        Run { place: self, number, child: command.spawn().expect("the program was found a moment ago") }
    }

    fn file(&self, number: u32, ending: &str) -> PathBuf {
        self.folder.path().join(format!("{number}.{ending}"))
    }
}

/// A `wideleaf run`. Dropping it ends it.
struct Run<'a> {
    place: &'a Place<'a>,
    number: u32,
    child: Child,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // It has ended, or is not wanted any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run<'_> {
    /// Text that it has printed: its `words` are what it says, its `console` what the guest says.
    fn text(&self, ending: &str) -> String {
        fs::read_to_string(self.place.file(self.number, ending)).unwrap_or_default()
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until its VM answers.
    fn answers(&mut self) -> Result<(), ScenarioError> {
        let waiting = self.place.waiting;
        let mut has_ended = false;
        waiting.until("an answer of a run", LIMIT, PACE, || {
            has_ended = self.has_ended();
            has_ended || self.client(&["status"]).status.success()
        })?;
        if has_ended { Err(self.failed("a run ended before its time")) } else { Ok(()) }
    }

    /// Output of a client of its VM.
    fn client(&self, arguments: &[&str]) -> Output {
        let mut client = Command::new(&self.place.program);
        client.arg("vm").arg(self.place.file(self.number, "sock")).args(arguments).stdin(Stdio::null());
        client.output().expect("the program was found a moment ago")
    }

    /// The client's JSON; `None` if the VM refused the request because of the pause.
    fn ask(&self, arguments: &[&str]) -> Result<Option<Vec<u8>>, ScenarioError> {
        let Output { status, stdout, stderr } = self.client(&[arguments, &["--format=json"]].concat());
        // Ctrl-C also ends the client.
        self.place.waiting.pass(Duration::ZERO)?;
        let said = String::from_utf8_lossy(&stderr);
        match status.code() {
            Some(0) => Ok(Some(stdout)),
            Some(REFUSED) if said.contains("longer") && said.contains("pause") => Ok(None),
            _ => Err(ScenarioError::Failed(format!("{} failed with {status}: {said}", arguments[0]))),
        }
    }

    fn save(&self, folder: &str, pause: &str) -> Result<Option<SavedView>, ScenarioError> {
        let json = self.ask(&["snapshot", folder, pause])?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|error| unreadable(&error))
    }

    fn migrate(&self, to: &Run<'_>, options: &[&str]) -> Result<Option<MigratedView>, ScenarioError> {
        let address = format!("unix:{}", to.place.file(to.number, "move").display());
        let json = self.ask(&[&["migrate", &address], options].concat())?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|error| unreadable(&error))
    }

    /// Ends the guest. Returns the report.
    fn stop(mut self) -> Result<RunReport, ScenarioError> {
        let stopped = self.client(&["stop", "--how=kill"]);
        self.place.waiting.pass(Duration::ZERO)?;
        match stopped.status.success() {
            true => self.report(),
            false => Err(self.failed("a guest could not be ended")),
        }
    }

    /// Waits for the end of the run. Returns its report.
    fn report(&mut self) -> Result<RunReport, ScenarioError> {
        let waiting = self.place.waiting;
        waiting.until("the end of a run", LIMIT, PACE, || self.has_ended())?;
        if !self.child.wait().is_ok_and(|status| status.success()) {
            return Err(self.failed("a run failed"));
        }
        let json = fs::read(self.place.file(self.number, "json")).unwrap_or_default();
        serde_json::from_slice(&json).map_err(|error| unreadable(&error))
    }

    fn failed(&self, what: &str) -> ScenarioError {
        ScenarioError::Failed(format!("{what}: {}", self.text("words")))
    }
}

fn unreadable(error: &serde_json::Error) -> ScenarioError {
    ScenarioError::Failed(format!("cannot read what wideleaf reported: {error}; build it anew"))
}
