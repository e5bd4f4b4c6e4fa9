//! Many parallel runs of `wideleaf run`, as on a real host: guests that check every word of their memory under one
//! policy after another, guests with a slow disk that pins the pages it fills, and hostile guests. They are killed
//! at random, by any signal, at any time.
//!
//! ```text
//!   lane 0   pattern, auto ──▶ ok │ hostile ✗ kill │ pattern, greedy ──▶ ok │ …
//!   lane 1   disk, coverage ─▶ ok │ pattern ✗ TERM │ hostile ──▶ timeout   │ …      until the time is over
//!   lane 2   hostile ──▶ error    │ …
//!   at the end: no process, no file, no pool page, no setting is left; no guest found a wrong word; no run panicked
//! ```
//!
//! Takes 20 s; `WIDELEAF_SOAK_SECONDS` sets the duration. `WIDELEAF_SOAK_SEED` repeats the choices of a run, not
//! its timing. Needs KVM.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PageSize;
use wideleaf_testing::programs::wideleaf;
use wideleaf_testing::slow_disk::SlowDisk;
use wideleaf_testing::tiny_guest::{direct, image, prints_for_ever, pvh};
use wideleaf_testing::{has_kvm, number_from_environment};

const SECONDS_DEFAULT: u64 = 20;
/// Number of parallel runs, more than a small machine has processors.
const LANES: u64 = 3;
/// Longest time for a run to end, by itself or after a signal: far more than it needs on a busy machine.
const ENDS_WITHIN: Duration = Duration::from_secs(120);
/// Time limit after which a killed process is gone from `/proc`, and its resources are free.
const GONE_WITHIN: Duration = Duration::from_secs(20);

/// Bytes of a slow disk: some windows.
const DISK_BYTES: usize = 12 << 20;
/// Duration of a transfer, long enough for the manager to meet pinned pages.
const TRANSFER_TAKES: Duration = Duration::from_millis(1);

/// Policies that promote, split, sample and release in different ways.
const POLICIES: [&str; 9] = [
    "auto",
    "greedy",
    "utilization",
    "thp:scan_sleep_ms=50",
    "at-fault",
    "reservation:threshold=64",
    "coverage:recover_from=1,recover_to=0,zero_pages_min=1",
    "schemes:rules=min max 5% max min max promote; min max min max min max demote",
    "schemes:rules=min max 5% max min max promote; min max 0% 0% min max release",
];

/// Texts that a hostile guest prints for ever.
const FLOODS: [&str; 4] = [
    "@wideleaf \n",
    "@wideleaf begin phase=a tsc=1\n@wideleaf end phase=a tsc=2\n",
    "@wideleaf result name=a value=1 unit=s\n@wideleaf region name=a address=0x0 bytes=4096\n",
    "\x1b]0;title\x07\x1b[2J and no end of line ",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pattern,
    Disk,
    Hostile,
}

/// Fate of a run while it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Not disturbed: it ends by itself, or by its `--timeout`.
    Left,
    /// Killed by this signal, after this time.
    Signalled(Signal, Duration),
}

/// Results of all runs together.
#[derive(Debug, Default)]
struct Tally {
    ends: BTreeMap<(Kind, String), u64>,
    words_checked: u64,
    outcomes: BTreeMap<String, u64>,
}

impl Tally {
    fn add(&mut self, kind: Kind, status: ExitStatus, report: Option<&Value>) {
        let end = status.code().map_or_else(|| format!("signal {:?}", status.signal()), |code| format!("exit {code}"));
        *self.ends.entry((kind, end)).or_default() += 1;
        let Some(report) = report else { return };
        self.words_checked += report["verification"]["checked"].as_u64().unwrap_or(0);
        let outcomes = report["manager"]["outcomes"].as_object();
        for (name, count) in outcomes.into_iter().flatten() {
            *self.outcomes.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
    }
}

/// One lane: runs one after another, each in a folder of its own.
struct Lane<'a> {
    program: &'a Path,
    dice: fastrand::Rng,
    tally: &'a Mutex<Tally>,
}

impl Lane<'_> {
    fn run_one(&mut self) {
        let folder = tempfile::tempdir().unwrap();
        // Without FUSE there is no slow disk, and a guest without a disk runs instead.
        let disk = if self.dice.u8(0..4) == 0 { SlowDisk::mount(DISK_BYTES, TRANSFER_TAKES) } else { None };
        let (kind, arguments) = match &disk {
            Some(disk) => (Kind::Disk, self.disk(disk)),
            None if self.dice.bool() => (Kind::Hostile, self.hostile(&folder)),
            None => (Kind::Pattern, self.pattern()),
        };
        let fate = self.fate();
        println!("{arguments:?} {fate:?}");
        let mut run = Run::start(self.program, &folder, &arguments);
        if let Fate::Signalled(signal, after) = fate {
            std::thread::sleep(after);
            run.signal(signal);
        }
        let is_unprepared = run.is_unprepared;
        let end = run.end();
        self.judge(kind, fate, is_unprepared, &end, &arguments);
        assert_nothing_is_left(&folder, &arguments);
        self.tally.lock().add(kind, end.status, end.report.as_ref());
    }

    fn pattern(&mut self) -> Vec<String> {
        let policy = POLICIES[self.dice.usize(0..POLICIES.len())];
        let may_be_memfd = policy == "at-fault" && self.dice.bool();
        let backing = if policy.starts_with("reservation") || may_be_memfd { "memfd" } else { "anon" };
        let seconds = self.dice.u8(1..6);
        let cmdline = format!("seconds={seconds}");
        let words = ["pattern", "--memory", "64M", "--vcpus", "2", "--policy", policy, "--backing", backing];
        words.map(String::from).into_iter().chain(["--cmdline".into(), cmdline]).collect()
    }

    fn disk(&mut self, disk: &SlowDisk) -> Vec<String> {
        let policy = POLICIES[self.dice.usize(0..POLICIES.len())];
        let may_be_memfd = policy == "at-fault" && self.dice.bool();
        let backing = if policy.starts_with("reservation") || may_be_memfd { "memfd" } else { "anon" };
        let path = disk.path();
        let cmdline = "bytes=12M seconds=3 requests=500";
        let words = ["disk", "--memory", "40M", "--vcpus", "2", "--policy", policy, "--backing", backing];
        let disk = ["--disk", path.to_str().unwrap(), "--cmdline", cmdline];
        words.into_iter().chain(disk).map(String::from).collect()
    }

    fn hostile(&mut self, folder: &TempDir) -> Vec<String> {
        let bytes = match self.dice.u8(0..3) {
            0 => prints_for_ever(FLOODS[self.dice.usize(0..FLOODS.len())].as_bytes()),
            is_direct => {
                let code: Vec<u8> = std::iter::repeat_with(|| self.dice.u8(..)).take(0x800).collect();
                image(&if is_direct == 1 { direct() } else { pvh() }, &code)
            }
        };
        let path = folder.path().join("hostile.elf");
        fs::write(&path, bytes).unwrap();
        let words = ["--memory", "64M", "--timeout", "3s", "--policy", "auto"];
        [path.to_str().unwrap()].iter().chain(&words).map(|word| (*word).to_owned()).collect()
    }

    fn fate(&mut self) -> Fate {
        let after = Duration::from_millis(self.dice.u64(0..4_000));
        match self.dice.u8(0..4) {
            0 => Fate::Signalled(Signal::SIGKILL, after),
            1 => Fate::Signalled(Signal::SIGTERM, after),
            _ => Fate::Left,
        }
    }

    /// Asserts that an undisturbed run ends as it should, and every other by its signal, or before that.
    fn judge(&self, kind: Kind, fate: Fate, is_unprepared: bool, end: &End, arguments: &[String]) {
        let said = &end.standard_error;
        assert!(!said.contains("panicked at"), "{arguments:?}: {said}");
        let signal = end.status.signal();
        let is_killed = match fate {
            Fate::Signalled(sent, _) => signal == Some(sent as i32) && (sent == Signal::SIGKILL || is_unprepared),
            Fate::Left => false,
        };
        assert!(signal.is_none() || is_killed, "{arguments:?} {fate:?}: ended by signal {signal:?}: {said}");
        if let Some(report) = &end.report {
            assert_eq!(report["verification"]["errors"].as_u64().unwrap_or(0), 0, "{arguments:?}: {report}");
        }
        if kind != Kind::Hostile && fate == Fate::Left {
            assert_eq!(end.status.code(), Some(0), "{arguments:?}: {said}");
            let report = end.report.as_ref().expect("a run that ended has a report");
            assert!(report["verification"]["checked"].as_u64() > Some(0), "{report}");
        }
    }
}

/// A run, and its output.
struct Run {
    child: Child,
    standard_output: std::thread::JoinHandle<String>,
    standard_error: std::thread::JoinHandle<String>,
    /// Whether the process had no handler yet when it was sent a signal: then it has begun nothing.
    is_unprepared: bool,
}

struct End {
    status: ExitStatus,
    report: Option<Value>,
    standard_error: String,
}

/// Whether a process has a handler for a signal (`SigCgt` of proc_pid_status(5)).
fn catches(process: u32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    mask & (1 << (signal as i32 - 1)) != 0
}

impl Run {
    fn start(program: &Path, folder: &TempDir, arguments: &[String]) -> Run {
        let mut command = Command::new(program);
        command.arg("run").args(arguments).args(["--format", "json", "--no-daemon"]);
        command.current_dir(folder).env("TMPDIR", folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let standard_output = read_all(child.stdout.take().unwrap());
        let standard_error = read_all(child.stderr.take().unwrap());
        Run { child, standard_output, standard_error, is_unprepared: false }
    }

    /// Sends a signal, but not to a run that has ended: its number may be another process's by then.
    fn signal(&mut self, signal: Signal) {
        if self.child.try_wait().unwrap().is_none() {
            self.is_unprepared = !catches(self.child.id(), signal);
            kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        }
    }

    fn end(mut self) -> End {
        let deadline = Instant::now() + ENDS_WITHIN;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() >= deadline {
                self.child.kill().unwrap();
                panic!("it does not end: {}", self.standard_error.join().unwrap());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let standard_output = self.standard_output.join().unwrap();
        let report = serde_json::from_str(&standard_output).ok();
        End { status, report, standard_error: self.standard_error.join().unwrap() }
    }
}

/// Reads the beginning of a pipe's output; the rest is read and dropped, as a hostile guest prints for ever.
fn read_all(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
    const KEPT_MAX: u64 = 4 << 20;
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.by_ref().take(KEPT_MAX).read_to_end(&mut bytes).unwrap();
        std::io::copy(&mut pipe, &mut std::io::sink()).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Asserts that no process works in the folder of a run, and that it contains no file but its image.
fn assert_nothing_is_left(folder: &TempDir, arguments: &[String]) {
    wait_until(
        || processes_in(folder.path()).is_empty(),
        || format!("{arguments:?} leaves processes behind: {:?}", processes_in(folder.path())),
    );
    let names = || fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names().filter(|name| name != "hostile.elf").collect();
    assert!(left.is_empty(), "{arguments:?} leaves files behind: {left:?}");
}

fn processes_in(folder: &Path) -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    processes.filter(|process| fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder))).collect()
}

fn wait_until(is_so: impl Fn() -> bool, or: impl Fn() -> String) {
    let deadline = Instant::now() + GONE_WITHIN;
    while !is_so() {
        assert!(Instant::now() < deadline, "{}", or());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The host's THP settings, by file.
fn thp_settings() -> BTreeMap<PathBuf, String> {
    const FOLDERS: [&str; 2] =
        ["/sys/kernel/mm/transparent_hugepage", "/sys/kernel/mm/transparent_hugepage/khugepaged"];
    let files = FOLDERS.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
    let paths = files.filter_map(|entry| Some(entry.ok()?.path()));
    // These two files count khugepaged's work.
    let is_setting = |path: &PathBuf| !path.ends_with("pages_collapsed") && !path.ends_with("full_scans");
    paths.filter(is_setting).filter_map(|path| Some((path.clone(), fs::read_to_string(path).ok()?))).collect()
}

#[test]
fn runs_that_are_killed_at_random_beside_hostile_guests_lose_and_leave_nothing() {
    if !has_kvm() {
        return;
    }
    let seconds = number_from_environment("WIDELEAF_SOAK_SECONDS").unwrap_or(SECONDS_DEFAULT);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_environment("WIDELEAF_SOAK_SEED").unwrap_or_else(now);
    println!("WIDELEAF_SOAK_SEED={seed}");
    let program = wideleaf();
    let pool = || HugetlbPools::of_this_machine().status(PageSize::Huge2M).ok();
    let (pool_before, settings_before) = (pool(), thp_settings());
    let tally = Mutex::new(Tally::default());
    let deadline = Instant::now() + Duration::from_secs(seconds);

    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let mut lane =
                Lane { program: &program, dice: fastrand::Rng::with_seed(seed.wrapping_add(lane)), tally: &tally };
            scope.spawn(move || {
                while Instant::now() < deadline {
                    lane.run_one();
                }
            });
        }
    });

    let tally = tally.into_inner();
    println!("{tally:#?}");
    assert!(tally.words_checked > 0, "guests checked their memory");
    wait_until(|| pool() == pool_before, || format!("the pool was {pool_before:?} and is {:?}", pool()));
    assert_eq!(thp_settings(), settings_before);
}
