//! `wideleaf run`: saved through its control socket, continued by `--restore`, and never saved. The snapshot is in a
//! temporary folder, which is removed with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf::vm::snapshot::{SnapshotArgs, save_vm};
use wideleaf::{child, program};
use wideleaf_control::vm::{VmAnswer, VmRequest, VmStatus, ask};
use wideleaf_experiments::restoring::{
    DISK_MIB, FILLED_S, HOT_MIB, PAUSE_MS, RestoredGuest, SAVE_ROUNDS, SAVE_S, STORED_MIB, WAIT_MAX_US, WAIT_P50_US,
    WAIT_P99_US,
};
use wideleaf_policies::{Bytes, Gpa, GpaRange};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::{RestoredReport, RunReport};
use wideleaf_run::undo::TemporaryFolder;

use super::file::disk_mib;
use super::hot_set::HotSet;
use super::{BESIDE, Continued, Look, PACE};
use crate::experiment::jobs::wideleaf_run::MIB;

/// Exit code of a run that its `--timeout` ended.
const TIMED_OUT: i32 = 6;
/// Interval between two looks at the hot set: a look at 512 MiB of base pages takes 2 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval at which a guest is asked for its phase.
const PHASE_EVERY: Duration = Duration::from_millis(50);
/// Longest pause of a save: these guests write all of their memory, and are not to be refused.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Length of the run that records the order of first touches in addition to what is watched: the background waits for a
/// second without any.
const RECORDED_FOR: Duration = Duration::from_secs(2);
/// Names of the files of a snapshot (docs/snapshot-format.md).
const FILES: [&str; 3] = ["memory", "windows", "machine.json"];

/// A snapshot, and where its guest has its hot set.
#[derive(Debug)]
pub(super) struct Snapshot {
    place: TemporaryFolder,
    hot: Vec<GpaRange>,
    told: Vec<(&'static str, f64)>,
    is_recorded: bool,
}

impl Snapshot {
    fn folder(&self) -> PathBuf {
        self.place.path().join("saved")
    }

    /// Path of the file with the pages.
    pub(super) fn memory(&self) -> PathBuf {
        self.folder().join(FILES[0])
    }

    /// Figures of the save.
    pub(super) fn told(&self) -> &[(&'static str, f64)] {
        &self.told
    }

    /// Records the order of first touches, unless that was done.
    pub(super) fn record(&mut self, work: &RestoredGuest, interrupts: &Interrupts) -> Result<(), Failure> {
        if self.is_recorded {
            return Ok(());
        }
        let watched = Duration::from_millis(work.watched_ms) + RECORDED_FOR;
        let timeout = format!("{}ms", watched.as_millis());
        let folder = self.folder().display().to_string();
        let arguments = ["run", "--restore", &folder, "--prefetch", "record", "--no-daemon", "--timeout", &timeout];
        let mut run = Run::start(&arguments)?;
        run.until_it_ends(watched + BESIDE, interrupts, |_| ())?;
        let report = run.report(TIMED_OUT)?;
        match report.restored.is_some_and(|restored| restored.touches_recorded > 0) {
            true => self.is_recorded = true,
            false => return Err(Failure::GuestFailed("a restored guest recorded no first touch".into())),
        }
        Ok(())
    }
}

/// A `wideleaf run` with its files. Dropping it ends it.
struct Run {
    child: Child,
    began: Instant,
    place: TemporaryFolder,
}

impl Drop for Run {
    fn drop(&mut self) {
        // It has ended, or is no longer wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    fn start(arguments: &[&str]) -> Result<Run, Failure> {
        let cannot = |what: &str, error: std::io::Error| Failure::Host(format!("cannot {what}: {error}"));
        let place = TemporaryFolder::new().map_err(|error| cannot("make a temporary folder", error))?;
        let program = std::env::current_exe().map_err(|error| cannot("find this program", error))?;
        let words = File::create(place.path().join("words")).map_err(|error| cannot("make a temporary file", error))?;
        let mut command = child::that_ends_with_us(&program);
        command.args(arguments).args(["--format", "json", "--output"]).arg(place.path().join("run.json"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(words);
        let began = Instant::now();
        let child = command.spawn().map_err(|error| cannot("start a run", error))?;
        Ok(Run { child, began, place })
    }

    /// Calls `each` now and then until the process has ended.
    fn until_it_ends(
        &mut self,
        at_most: Duration,
        interrupts: &Interrupts,
        mut each: impl FnMut(Instant),
    ) -> Result<(), Failure> {
        while self.goes_on()? {
            interrupts.check()?;
            if self.began.elapsed() > at_most {
                return Err(Failure::took_longer_than(at_most, "the run"));
            }
            each(self.began);
            thread::sleep(PACE);
        }
        Ok(())
    }

    /// Waits until the guest has worked in its phase for as long as it should.
    fn until_it_works(
        &mut self,
        work: &RestoredGuest,
        socket: &Path,
        at_most: Duration,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        let works = Duration::from_millis(work.works_ms);
        while self.goes_on()? {
            interrupts.check()?;
            if self.began.elapsed() > at_most {
                return Err(Failure::took_longer_than(at_most, &format!("the guest's way to phase {}", work.phase)));
            }
            // The socket is there a moment after the start.
            if let Ok(VmAnswer::Status(VmStatus { phase: Some(phase), .. })) = ask(socket, VmRequest::Status)
                && phase.name == work.phase
                && phase.since_s >= works.as_secs_f64()
            {
                return Ok(());
            }
            thread::sleep(PHASE_EVERY);
        }
        self.report(0).and(Err(Failure::Host(format!(
            "cannot save the guest: it ended before it had worked in phase {} for {works:?}",
            work.phase
        ))))
    }

    fn goes_on(&mut self) -> Result<bool, Failure> {
        let ended = self.child.try_wait();
        ended.map(|status| status.is_none()).map_err(|error| Failure::Host(format!("cannot wait for a run: {error}")))
    }

    /// The report of a run that has ended with this code.
    fn report(&mut self, wanted: i32) -> Result<RunReport, Failure> {
        let status = self.child.wait().map_err(|error| Failure::Host(format!("cannot wait for a run: {error}")))?;
        let cannot = |why: &dyn std::fmt::Display| Failure::Host(format!("cannot use a run: {why}"));
        if status.code() != Some(wanted) {
            let words = fs::read_to_string(self.place.path().join("words")).unwrap_or_default();
            return Err(ended(status, program::reason(&words)));
        }
        let text = fs::read_to_string(self.place.path().join("run.json")).map_err(|error| cannot(&error))?;
        serde_json::from_str(&text).map_err(|error| cannot(&error))
    }
}

/// Failure of a run that ended otherwise than it should.
fn ended(status: ExitStatus, reason: &str) -> Failure {
    let why = format!("cannot use a run: it ended with {status}: {reason}");
    match status.code() {
        // The guest failed, or crashed.
        Some(code @ (1 | 5)) => Failure::from_exit_code(code, why),
        _ => Failure::Host(why),
    }
}

/// Runs the guest until it works in its phase, and saves it at its end.
pub(super) fn save(work: &RestoredGuest, interrupts: &Interrupts) -> Result<Snapshot, Failure> {
    let place = TemporaryFolder::new();
    let place = place.map_err(|error| Failure::Host(format!("cannot make a temporary folder: {error}")))?;
    let socket = place.path().join("vm.sock");
    let (own, path) = (work.guest.arguments(), socket.display().to_string());
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let options = ["--policy", "auto", "--no-daemon", "--control-socket", &path];
    let mut run = Run::start(&[&["run"], &own[..], &options].concat())?;
    let at_most = Duration::from_millis(work.saved_within_ms) + BESIDE;
    run.until_it_works(work, &socket, at_most, interrupts)?;
    let folder = place.path().join("saved");
    let how = SnapshotArgs { folder: folder.clone(), base: None, pause: PAUSE_MAX, stop: true };
    let saved = save_vm(&socket, &how, interrupts)?;
    run.until_it_ends(at_most, interrupts, |_| ())?;
    let report = run.report(0)?;
    check_phase(work, &report)?;
    let files = FILES.map(|name| folder.join(name));
    let told = vec![
        (STORED_MIB, saved.stored_bytes as f64 / MIB),
        (DISK_MIB, disk_mib(files.iter().map(PathBuf::as_path))),
        (PAUSE_MS, saved.pause_ms),
        (SAVE_ROUNDS, f64::from(saved.rounds)),
        (SAVE_S, saved.seconds),
    ];
    Ok(Snapshot { hot: hot_set(work, &report)?, place, told, is_recorded: false })
}

/// Checks that the guest was in its phase when it was saved.
fn check_phase(work: &RestoredGuest, report: &RunReport) -> Result<(), Failure> {
    let phase = report.phases.last();
    if phase.is_some_and(|phase| phase.name == work.phase && !phase.is_complete && !phase.progress.is_empty()) {
        return Ok(());
    }
    let was = phase.map_or("none", |phase| phase.name.as_str());
    Err(Failure::Host(format!(
        "cannot use the saved guest: it was not at work in phase {} when it was saved, but in {was}; run it on a \
         machine with less other work",
        work.phase
    )))
}

/// Places of the regions that are the hot set.
fn hot_set(work: &RestoredGuest, report: &RunReport) -> Result<Vec<GpaRange>, Failure> {
    let named = report.regions.iter().filter(|region| work.hot.contains(&region.name));
    let range =
        |region: &wideleaf_run::report::Region| GpaRange::new(Gpa::new(region.address), Bytes::new(region.bytes));
    let hot: Vec<GpaRange> = named.filter_map(range).collect();
    match hot.len() == work.hot.len() {
        true => Ok(hot),
        false => Err(Failure::GuestFailed(format!("the guest did not name its regions {}", work.hot.join(", ")))),
    }
}

/// Continues the snapshot in the way of the work.
pub(super) fn restore(work: &RestoredGuest, saved: &Snapshot, interrupts: &Interrupts) -> Result<Continued, Failure> {
    let folder = saved.folder().display().to_string();
    let timeout = work.timeout();
    let options = work.way.options().expect("it is a way of `run --restore`");
    let arguments = [&["run", "--restore", &folder, "--no-daemon", "--timeout", &timeout], options].concat();
    let (report, looks) = watched(work, &arguments, &saved.hot, interrupts)?;
    let restored = report.restored.ok_or_else(|| Failure::GuestFailed("the run restored nothing".into()))?;
    // Its regions may have pages that hold nothing.
    let stored = saved.told.iter().find(|(name, _)| *name == STORED_MIB).map_or(f64::INFINITY, |(_, mib)| *mib);
    let told = told_of(&restored).into_iter().chain([(HOT_MIB, mebibytes(&saved.hot).min(stored))]).collect();
    Ok(Continued { marks: restored.progress, looks, told })
}

fn told_of(restored: &RestoredReport) -> Vec<(&'static str, f64)> {
    let RestoredReport { wait_p50_us, wait_p99_us, wait_max_us, filled_s, .. } = *restored;
    let waits = [(WAIT_P50_US, wait_p50_us), (WAIT_P99_US, wait_p99_us), (WAIT_MAX_US, wait_max_us)];
    // A mapped file has no thread that answers.
    let waits = waits.into_iter().filter(|_| wait_max_us > 0.0);
    waits.chain(filled_s.map(|seconds| (FILLED_S, seconds))).collect()
}

fn mebibytes(ranges: &[GpaRange]) -> f64 {
    ranges.iter().map(|range| range.bytes().get()).sum::<u64>() as f64 / MIB
}

/// Runs the guest from its start: its marks count from the begin of its manager, some milliseconds after its process.
pub(super) fn never_saved(work: &RestoredGuest, interrupts: &Interrupts) -> Result<Continued, Failure> {
    let (own, timeout) = (work.guest.arguments(), work.timeout());
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let options = ["--policy", "auto", "--no-daemon", "--timeout", &timeout];
    let (report, looks) = watched(work, &[&["run"], &own[..], &options].concat(), &[], interrupts)?;
    check_phase(work, &report)?;
    let phase = report.phases.last().expect("it was checked");
    let marks = phase.progress.iter().map(|(at_s, done)| (phase.began_at_s + at_s, *done)).collect();
    let hot = hot_set(work, &report)?;
    Ok(Continued { marks, looks, told: vec![(HOT_MIB, mebibytes(&hot))] })
}

/// Runs until the timeout, and looks at the hot set meanwhile.
fn watched(
    work: &RestoredGuest,
    arguments: &[&str],
    hot: &[GpaRange],
    interrupts: &Interrupts,
) -> Result<(RunReport, Vec<Look>), Failure> {
    let mut run = Run::start(arguments)?;
    let mut set = HotSet::of(run.child.id(), hot, work.guest.memory_mib);
    let (mut looks, mut next) = (Vec::new(), run.began);
    let look = |began: Instant| {
        if Instant::now() >= next {
            looks.extend(set.look(began));
            next = Instant::now() + LOOK_EVERY;
        }
    };
    run.until_it_ends(Duration::from_millis(work.watched_ms) + BESIDE, interrupts, look)?;
    Ok((run.report(TIMED_OUT)?, looks))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;
    use wideleaf_experiments::peers::Guest;
    use wideleaf_experiments::restoring::{Cache, Way};
    use wideleaf_run::report::{Counters, Phase, Region};

    fn work() -> RestoredGuest {
        RestoredGuest {
            guest: Guest::new("phases", "", 64),
            phase: "hot0".into(),
            hot: vec!["hot_range".into(), "constant".into()],
            way: Way::Moved,
            cache: Cache::Warm,
            works_ms: 10,
            saved_within_ms: 10,
            watched_ms: 10,
        }
    }

    fn report(phase: &str, regions: &[&str]) -> RunReport {
        let phase = Phase {
            name: phase.into(),
            seconds: 1.0,
            began_at_s: 0.0,
            at_begin: Counters::default(),
            at_end: Counters::default(),
            is_complete: false,
            units: 1,
            rate_per_s: 1.0,
            rate_before_promotion_per_s: None,
            rate_after_promotion_per_s: None,
            progress: vec![(0.5, 1)],
            walks: None,
        };
        let region = |name: &&str| Region {
            name: (*name).into(),
            address: 4 << 20,
            bytes: 2 << 20,
            windows: 1,
            windows_host_large: 0,
        };
        let regions = regions.iter().map(region).collect();
        RunReport { phases: vec![phase], regions, ..RunReport::default() }
    }

    #[test]
    fn a_guest_that_was_not_in_its_phase_or_has_no_hot_set_is_refused() {
        let good = report("hot0", &["hot_range", "sparse", "constant"]);
        assert!(check_phase(&work(), &good).is_ok());
        let hot = hot_set(&work(), &good).expect("both are there");
        assert_eq!((hot.len(), mebibytes(&hot)), (2, 4.0));
        let early = check_phase(&work(), &report("fill", &[])).expect_err("it was filling").to_string();
        assert!(early.contains("when it was saved, but in fill"), "{early}");
        let none = hot_set(&work(), &report("hot0", &["hot_range"])).expect_err("one is missing").to_string();
        assert!(none.contains("hot_range, constant"), "{none}");
    }

    #[test]
    fn a_run_that_ended_otherwise_is_a_failure_of_its_guest_or_of_the_host() {
        let code = |status: i32| ended(ExitStatus::from_raw(status), "why").exit_code();
        assert_eq!([1 << 8, 5 << 8, 4 << 8, 9].map(code), [1, 5, 4, 4], "9 is a signal");
    }

    #[test]
    fn a_mapped_file_tells_no_waits() {
        assert_eq!(told_of(&RestoredReport::default()), []);
        let filled = RestoredReport { wait_max_us: 9.0, filled_s: Some(0.5), ..RestoredReport::default() };
        assert_eq!(told_of(&filled).len(), 4);
    }
}
