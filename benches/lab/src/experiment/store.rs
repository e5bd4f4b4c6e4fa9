//! The file of results. It is complete after every run: no run is lost, however the experiment ends. All its runs are
//! of one build on one machine, and those of one round of a case are of one session.
//!
//! ```text
//!   create: no file, or an empty one ─┐
//!   resume: another build or machine  ├─▶ Store ── add, after each run ──▶ a new file, renamed over the old one
//!           is refused; failed runs ──┘
//!           become earlier failures
//! ```

use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use wideleaf_experiments::definition::Experiment;
use wideleaf_experiments::report::Report;
use wideleaf_experiments::results::{Environment, FORMAT, Results, Run};
use wideleaf_experiments::schedule;
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::experiment::against;
use crate::experiment::environment;
use crate::experiment::failures::Failures;
use wideleaf_run::failure::Failure;
use wideleaf_run::output_file::{OutputFile, new_file_in};

/// Largest file of results that is read: a thousand rounds of the longest experiment are some tens of MiB.
const RESULTS_MAX: Bytes = mib(512);

/// Content of a file of results.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stored {
    /// The results; their fields come first in the file.
    #[serde(flatten)]
    pub results: Results,
    /// Failed runs of all sessions, and those of rounds that a later session made again.
    #[serde(flatten)]
    pub failures: Failures,
}

impl Stored {
    /// The report, which begins with earlier failures.
    pub(super) fn report(&self) -> Report {
        let mut report = Report::of(&self.results);
        report.lead.splice(0..0, self.failures.lead());
        report
    }

    /// Whether no run was made yet.
    fn is_unused(&self) -> bool {
        self.results.runs.is_empty() && self.failures.is_empty()
    }
}

/// A growing file of results.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    /// The present file, locked: a second session would replace the runs of this one.
    file: File,
    stored: Stored,
    /// Remark on a session that continues others. The file gets it with the session's first run.
    continued: Option<String>,
    /// Begin of the session in seconds of the experiment's running time. Runs before it are of earlier sessions.
    began_s: f64,
}

impl Store {
    /// Creates a new file and tries it at once, so that a typo does not cost an hour of runs. A file with content is
    /// not replaced: it may have such an hour.
    pub(super) fn create(path: Option<&Path>, experiment: Experiment) -> Result<Store, Failure> {
        let now = now();
        let dated = || PathBuf::from(format!("{}-{}.json", experiment.name, now.replace([':', '-'], "")));
        let path = OutputFile::open_file("--output", &path.map_or_else(dated, Path::to_path_buf))?.path().to_owned();
        if has_content(&path) {
            let shown = path.display();
            return Err(Failure::Output(format!(
                "cannot write --output {shown}: it exists and is not empty; continue it with --resume {shown}, or name \
                a new file"
            )));
        }
        let results = Results {
            wideleaf_experiment: FORMAT,
            environment: environment::capture(),
            started: now.clone(),
            ended: now,
            elapsed_s: 0.0,
            is_complete: false,
            runs: vec![],
            experiment,
        };
        let stored = Stored { results, failures: Failures::default() };
        Ok(Store { file: write(&path, &stored)?, path, stored, continued: None, began_s: 0.0 })
    }

    /// Opens the file of an unfinished experiment of this build on this machine. Its failed runs are made again, since
    /// the cause of the failure may be gone, and stay in the file as earlier failures.
    pub(super) fn resume(path: &Path, name: &str) -> Result<Store, Failure> {
        Store::resume_on(path, name, environment::capture())
    }

    fn resume_on(path: &Path, name: &str, here: Environment) -> Result<Store, Failure> {
        // After each run a new file replaces it.
        let path = OutputFile::open_file("--resume", path)?.path().to_owned();
        let file = lock(&path)?;
        let mut stored = read(&path)?;
        let cannot = |why: &str| Failure::Usage(format!("cannot resume {}: {why}", path.display()));
        let has = &stored.results.experiment.name;
        if has != name {
            return Err(cannot(&format!("it has results of {has}, not of {name}")));
        }
        if let Some(why) = against::changed(&stored.results.experiment) {
            return Err(cannot(&format!(
                "the program of its --against has changed ({why}); put that build back, or move the file away and \
                 begin anew"
            )));
        }
        if stored.is_unused() {
            (stored.results.environment, stored.results.started) = (here, now());
            return Ok(Store { path, file, stored, continued: None, began_s: 0.0 });
        }
        let differences = environment::differences(&stored.results.environment, &here).join("; ");
        if !differences.is_empty() {
            return Err(cannot(&format!(
                "its runs are of another build, machine or setting ({differences}); move the file away and begin anew"
            )));
        }
        let has_failed = stored.failures.take(&mut stored.results.runs);
        let continued = Some(format!("changes between sessions: continued on {}", day()));
        let began_s = stored.results.elapsed_s;
        let mut store = Store { path, file, stored, continued, began_s };
        if has_failed {
            // At once: no later failure may lose them.
            store.stored.results.is_complete = false;
            store.write()?;
        }
        Ok(store)
    }

    /// Results in the file so far.
    pub(super) fn results(&self) -> &Results {
        &self.stored.results
    }

    /// All that is in the file so far.
    pub(super) fn stored(&self) -> &Stored {
        &self.stored
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds one run, made `elapsed_s` after the experiment began.
    pub(super) fn add(&mut self, run: Run, elapsed_s: f64) -> Result<(), Failure> {
        self.set_aside_earlier_runs_beside(&run);
        let results = &mut self.stored.results;
        let not_controlled = &mut results.environment.not_controlled;
        not_controlled.extend(self.continued.take().filter(|remark| !not_controlled.contains(remark)));
        results.runs.push(run);
        results.ended = now();
        results.elapsed_s = elapsed_s;
        results.is_complete = schedule::left(&results.experiment, &results.runs).is_empty();
        self.write()
    }

    /// Takes runs of earlier sessions out of the round of this one, so that they are made again: arms are compared
    /// within a round, and the machine may have changed between sessions. A failed run is compared with none.
    fn set_aside_earlier_runs_beside(&mut self, run: &Run) {
        let Stored { results: Results { experiment, runs, .. }, failures } = &mut self.stored;
        if run.measured().is_none() || run.is_exact(experiment) {
            return;
        }
        let is_earlier = |other: &mut Run| {
            let is_of_row = other.case == run.case && other.round == run.round;
            is_of_row && other.at_s < self.began_s && !other.is_exact(experiment)
        };
        failures.set_aside(runs.extract_if(.., is_earlier).collect());
    }

    /// Adds one run in which the guest failed. That stays in the file.
    pub(super) fn add_guest_failure(&mut self, run: Run, elapsed_s: f64) -> Result<(), Failure> {
        self.stored.failures.count_guest();
        self.add(run, elapsed_s)
    }

    /// Ends the experiment's own time: the results are complete if every case has its first round.
    pub(super) fn complete(&mut self) -> Result<(), Failure> {
        let results = &mut self.stored.results;
        let left = schedule::left(&results.experiment, &results.runs);
        results.is_complete = left.iter().all(|turn| turn.round > 1);
        self.write()
    }

    /// The failure, with the command that continues the experiment.
    pub(super) fn with_way_to_go_on(&self, failure: Failure) -> Failure {
        let (results, path) = (self.results(), self.path.display());
        let (made, name) = (results.runs.len(), &results.experiment.name);
        let all = schedule::turns(&results.experiment).len();
        let hint = format!(
            "{made} of {all} runs are in {path}; continue with `wideleaf-lab experiment run {name} --resume {path}`"
        );
        if let Failure::Interrupted = failure {
            wideleaf::output::say(format_args!("{hint}"));
            return failure;
        }
        failure.during(&hint)
    }

    /// Replaces the old file by a new one when that is complete.
    fn write(&mut self) -> Result<(), Failure> {
        self.file = write(&self.path, &self.stored)?;
        Ok(())
    }
}

/// Puts a new file in place when that is complete. It is locked before that, so that the path always has a locked file.
fn write(path: &Path, stored: &Stored) -> Result<File, Failure> {
    let cannot = |error: std::io::Error| Failure::Output(format!("cannot write {}: {error}", path.display()));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = new_file_in(folder).map_err(cannot)?;
    let mut writer = BufWriter::new(&mut *file);
    serde_json::to_writer(&mut writer, stored).map_err(|error| cannot(error.into()))?;
    writer.write_all(b"\n").and_then(|()| writer.flush()).map_err(cannot)?;
    drop(writer);
    file.sync_data().map_err(cannot)?;
    // A file system without locks takes results too.
    let _ = file.try_lock();
    file.persist(path).map_err(cannot)
}

/// Locks the file of results until the returned file is dropped, or is replaced by a locked one.
fn lock(path: &Path) -> Result<File, Failure> {
    let shown = path.display();
    // For writing too: NFS locks no other file.
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|error| Failure::Input(format!("cannot resume {shown}: {error}")))?;
    let is_locked = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    let inode = |is: fs::Metadata| (is.dev(), is.ino());
    // Another session has replaced the file since it was opened here, and has locked the new one.
    let is_replaced = fs::metadata(path).map(inode).ok() != file.metadata().map(inode).ok();
    if is_locked || is_replaced {
        return Err(Failure::Usage(format!("cannot resume {shown}: another session writes to it; wait for its end")));
    }
    Ok(file)
}

/// Whether the path is that of a file which is not empty.
pub(super) fn has_content(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|is| is.len() > 0)
}

/// Reads a file of results.
pub(super) fn read(path: &Path) -> Result<Stored, Failure> {
    let shown = path.display();
    let read = InputFile::open_stream(path).and_then(|file| file.read(RESULTS_MAX));
    let text = read.map_err(|error| Failure::Input(format!("cannot read {shown}: {error}")))?;
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| Failure::Input(format!("cannot read {shown}: it is not a file of results: {error}")))?;
    match value.get("wideleaf_experiment").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(FORMAT) => stored_in(value)
            .map_err(|error| Failure::Input(format!("cannot read {shown}: damaged, or from another build: {error}"))),
        Some(version) => Err(Failure::Input(format!(
            "cannot read {shown}: its format is {version}, and this program reads format {FORMAT}; use the version of \
            wideleaf that wrote it"
        ))),
        None => Err(Failure::Input(format!(
            "cannot read {shown}: it is not a file of results of `wideleaf-lab experiment run`"
        ))),
    }
}

fn stored_in(value: serde_json::Value) -> serde_json::Result<Stored> {
    let failures = Failures::deserialize(&value)?;
    Ok(Stored { results: serde_json::from_value(value)?, failures })
}

/// The day of [`now`].
fn day() -> String {
    now().split('T').next().unwrap_or_default().to_owned()
}

fn now() -> String {
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    now.format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use wideleaf_experiments::definition::{Arm, Case, Cell, Job};
    use wideleaf_experiments::metric::Metric;
    use wideleaf_experiments::results::{Measured, RunOutcome};

    use super::*;

    const CASE: &str = "GUPS";

    /// Two rounds of one arm.
    fn experiment() -> Experiment {
        let cells = vec![Cell::of(Job::run(&["gups"], 1.0))];
        Experiment {
            name: "e".into(),
            title: "By hand".into(),
            question: "Which?".into(),
            source: None,
            rounds: 2,
            arms: vec![Arm { name: "auto".into(), summary: String::new() }],
            cases: vec![Case { name: CASE.into(), unit: "GUP/s".into(), working_set_mib: 1, cells }],
        }
    }

    fn run(round: u32, outcome: RunOutcome) -> Run {
        Run { case: CASE.into(), arm: "auto".into(), round, at_s: 0.0, took_s: 1.0, load_1m: 0.0, outcome }
    }

    fn measured(round: u32) -> Run {
        run(round, RunOutcome::Measured(Measured::default()))
    }

    fn failed(round: u32, why: &str) -> Run {
        run(round, RunOutcome::Failed(why.into()))
    }

    /// A folder, and a new file of results in it.
    fn new_file() -> (tempfile::TempDir, PathBuf, Store) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("results.json");
        let store = Store::create(Some(&path), experiment()).expect("the file is new");
        (folder, path, store)
    }

    fn resume_in(path: &Path, change: impl FnOnce(&mut Environment)) -> Result<Store, String> {
        let mut here = read(path).expect("it is there").results.environment;
        change(&mut here);
        Store::resume_on(path, "e", here).map_err(|failure| failure.to_string())
    }

    #[test]
    fn results_with_runs_are_resumed_only_by_their_build_on_their_machine() {
        let (_folder, path, mut store) = new_file();
        store.add(measured(1), 1.0).expect("stored");
        drop(store);
        let why = resume_in(&path, |here| "1.0 (other)".clone_into(&mut here.wideleaf)).expect_err("another build");
        assert!(why.starts_with("cannot resume ") && why.contains(" there, 1.0 (other) here)"), "{why}");
        assert!(why.ends_with("; move the file away and begin anew") && !why.contains('\n'), "{why}");
        let why = resume_in(&path, |here| "Other".clone_into(&mut here.cpu)).expect_err("another machine");
        assert!(why.contains("CPU: ") && why.contains("Other here"), "{why}");
        let mut store = resume_in(&path, |here| here.load_1m += 1.0).expect("load may differ");
        store.add(measured(2), 2.0).expect("stored");
        let not_controlled = read(&path).expect("whole").results.environment.not_controlled;
        assert!(not_controlled.iter().any(|what| what.starts_with("changes between sessions: continued on 20")));
    }

    #[test]
    fn an_experiment_without_a_first_round_of_each_case_is_not_complete_when_its_own_time_ends() {
        let (_folder, path, mut store) = new_file();
        let is_complete = || read(&path).expect("whole").results.is_complete;
        store.complete().expect("stored");
        assert!(!is_complete(), "nothing was run");
        store.add(measured(1), 1.0).expect("stored");
        assert!(!is_complete(), "its time has not ended");
        store.complete().expect("stored");
        assert!(is_complete(), "a shorter experiment");
    }

    #[test]
    fn results_without_runs_are_of_the_machine_that_makes_the_first() {
        let (_folder, path, _) = new_file();
        let mut store = resume_in(&path, |here| "Other".clone_into(&mut here.cpu)).expect("nothing is mixed");
        store.add(measured(1), 1.0).expect("stored");
        let environment = read(&path).expect("whole").results.environment;
        assert_eq!(environment.cpu, "Other");
        assert!(!environment.not_controlled.concat().contains("sessions"), "{environment:?}");
    }

    #[test]
    fn results_of_two_programs_are_resumed_only_with_the_same_other_program() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("results.json");
        Store::create(Some(&path), experiment().against("/bin/true", "wideleaf 1.0")).expect("the file is new");
        let why = resume_in(&path, |_| ()).expect_err("no wideleaf is there any more");
        assert!(why.contains("--against has changed (/bin/true: its --version does not name wideleaf); "), "{why}");
    }

    #[test]
    fn a_failure_stays_in_the_file_and_in_the_report_when_its_run_is_made_again() {
        let (_folder, path, mut store) = new_file();
        store.add(failed(1, "no pages were left"), 1.0).expect("stored");
        store.add_guest_failure(failed(2, "the guest found 3 wrong words"), 2.0).expect("stored");
        drop(store);
        // Twice: the first may be interrupted before it makes a run.
        for _ in 0..2 {
            let resumed = resume_in(&path, |_| ()).expect("the same");
            assert!(resumed.results().runs.is_empty() && !resumed.results().is_complete);
        }
        let mut store = resume_in(&path, |_| ()).expect("the same");
        (1..=2).for_each(|round| store.add(measured(round), 3.0).expect("stored"));
        let stored = read(&path).expect("whole");
        assert!(stored.results.is_complete && stored.results.runs.iter().all(|run| run.measured().is_some()));
        let lead = stored.report().lead;
        assert!(lead[0].starts_with("In 1 run the guest found wrong words"), "{lead:?}");
        assert!(lead[1].starts_with("2 runs failed before a --resume"), "{lead:?}");
        for why in ["GUPS, auto, round 1: no pages were left", "round 2: the guest found 3 wrong words"] {
            assert!(lead[1].contains(why), "{lead:?}");
        }
        assert!(stored.failures.check_guests().is_err(), "good later runs do not undo it");
    }

    /// Results of one session that ended in the middle of the second round, and are resumed.
    fn resumed_in_a_round(jobs: [Job; 2]) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("results.json");
        let mut experiment = experiment();
        experiment.arms.push(Arm { name: "never".into(), summary: String::new() });
        experiment.cases[0].cells = jobs.map(Cell::of).into();
        let mut store = Store::create(Some(&path), experiment).expect("the file is new");
        for (arm, round, at_s) in [("never", 1, 0.0), ("auto", 1, 1.0), ("auto", 2, 2.0)] {
            store.add(of_arm(arm, round, at_s, 1.0), at_s + 1.0).expect("stored");
        }
        drop(store);
        (folder, resume_in(&path, |_| ()).expect("the same"))
    }

    fn of_arm(arm: &str, round: u32, at_s: f64, figure: f64) -> Run {
        let measured = Measured { metrics: [(Metric::Figure, figure)].into(), ..Measured::default() };
        Run { arm: arm.into(), at_s, ..run(round, RunOutcome::Measured(measured)) }
    }

    #[test]
    fn no_ratio_is_between_two_sessions() {
        let (_folder, mut store) = resumed_in_a_round([Job::run(&["gups"], 1.0), Job::run(&["gups"], 1.0)]);
        let ratios = |store: &Store| store.results().ratios(CASE, "auto", "never", Metric::Figure);
        let failed = Run { arm: "never".into(), at_s: 10.0, ..failed(2, "no pages were left") };
        store.add(failed, 11.0).expect("stored");
        assert_eq!(store.results().runs.len(), 4, "a failed run costs no other");
        let path = store.path().to_owned();
        drop(store);
        let mut store = resume_in(&path, |_| ()).expect("the same");
        store.add(of_arm("never", 2, 11.0, 5.0), 12.0).expect("stored");
        assert_eq!(ratios(&store), [1.0]);
        let left = schedule::left(&store.results().experiment, &store.results().runs);
        assert_eq!(left.iter().map(|turn| (turn.arm, turn.round)).collect::<Vec<_>>(), [(0, 2)]);
        store.add(of_arm("auto", 2, 12.0, 10.0), 13.0).expect("stored");
        assert_eq!(ratios(&store), [1.0, 2.0]);
        let stored = read(&path).expect("whole");
        assert!(stored.results.is_complete);
        let lead = stored.report().lead;
        assert!(lead[1].starts_with("1 run was made again after a --resume"), "{lead:?}");
    }

    #[test]
    fn a_run_that_every_session_makes_alike_is_made_once() {
        let (_folder, mut store) = resumed_in_a_round([Job::tlbcost(&["tlbcost"], 1.0), Job::run(&["gups"], 1.0)]);
        store.add(of_arm("never", 2, 10.0, 1.0), 11.0).expect("stored");
        assert_eq!(store.results().runs.len(), 4);
    }

    #[test]
    fn two_sessions_do_not_write_to_one_file() {
        let (_folder, path, mut store) = new_file();
        let refused = || {
            let why = resume_in(&path, |_| ()).expect_err("in use");
            assert!(why.ends_with("results.json: another session writes to it; wait for its end"), "{why}");
        };
        refused();
        store.add(measured(1), 1.0).expect("stored");
        refused();
        drop(store);
        let _resumed = resume_in(&path, |_| ()).expect("free again");
        refused();
    }

    #[test]
    fn a_file_of_an_older_build_has_no_earlier_failures() {
        let (_folder, path, store) = new_file();
        fs::write(&path, serde_json::to_string(store.results()).expect("JSON")).expect("written");
        assert!(read(&path).expect("the same format").is_unused());
    }

    #[test]
    fn existing_results_are_not_replaced_and_an_empty_file_is() {
        let (_folder, path, mut store) = new_file();
        store.add(measured(1), 1.0).expect("stored");
        let before = fs::read(&path).expect("readable");
        let failure = Store::create(Some(&path), experiment()).expect_err("it has results");
        assert_eq!(failure.exit_code(), 7);
        let (why, shown) = (failure.to_string(), path.display());
        assert!(why.contains(&format!("continue it with --resume {shown}, or name a new file")), "{why}");
        assert_eq!(fs::read(&path).expect("readable"), before);
        fs::write(&path, "").expect("writable");
        assert!(Store::create(Some(&path), experiment()).is_ok());
    }
}
