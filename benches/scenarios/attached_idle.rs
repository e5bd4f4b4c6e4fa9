//! Cost of an idle wideleafd: many stopped QEMU guests, all of them managed. Time of a list, with a daemon and without.
//!
//! ```text
//!   30 guests ─▶ lists without a daemon ─▶ the others ─▶ wideleafd manages ─▶ settles ─▶ CPU time in a minute
//!                                                                           resident memory · scrapes · lists
//! ```
//!
//! `cargo build --release -p wideleaf -p wideleaf-daemon && cargo bench -p wideleaf-benches --bench attached_idle [--
//! GUESTS [SECONDS]]` (default 50 guests of 64 MiB, 60 s; needs QEMU, KVM and root)

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use wideleaf_benches::beside_qemu::program;
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::SpreadMedian;
use wideleaf_control::client;
use wideleaf_control::protocol::{Answer, Request};
use wideleaf_control::view::Care;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_policies::units::mib;
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};

/// Time after which promotions are over and every loop is at its longest pause.
const SETTLES_IN: Duration = Duration::from_secs(30);
const SCRAPES: usize = 50;
/// Number of lists from the daemon, and without one.
const LISTS: usize = 20;
/// Guests when lists are made without a daemon: those of the target.
const LISTED: usize = 30;

/// Targets of the bench.
const CPU_MAX_PERCENT: f64 = 1.0;
const RESIDENT_MAX_MIB: f64 = 30.0;
const SCRAPE_MAX_MS: f64 = 20.0;
const LIST_MAX_MS: f64 = 200.0;

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    needs_kvm()?;
    let (guests_wanted, seconds) = (arguments.number(0, 50)?, arguments.number(1, 60)?);
    let start = |numbers: Range<usize>| numbers.map(|number| standing(number, waiting)).collect::<Result<Vec<_>, _>>();
    let mut guests = start(0..guests_wanted.min(LISTED))?;
    let (listed, alone) = (guests.len(), lists(waiting, list_without_daemon)?);
    guests.extend(start(listed..guests_wanted)?);
    let folder = tempfile::tempdir().map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let daemon = Daemon::start(folder.path())?;
    let socket = folder.path().join("control.sock");
    let managed = || match client::ask(&socket, Request::List) {
        Ok(Answer::Vms(vms)) => vms.iter().filter(|vm| vm.care == Care::Managed).count(),
        _ => 0,
    };
    waiting.until("all guests under management", Duration::from_secs(120), Duration::from_millis(200), || {
        managed() >= guests.len()
    })?;
    waiting.pass(SETTLES_IN)?;
    let (began, before) = (Instant::now(), daemon.cpu_s());
    waiting.pass(Duration::from_secs(seconds))?;
    let (after, seconds) = (daemon.cpu_s(), began.elapsed().as_secs_f64());
    let mut threads = Table::new(["thread of wideleafd"], ["CPU, of one core"]);
    let mut cpu_percent = 0.0;
    for (name, cpu_s) in &after {
        let percent = (cpu_s - before.get(name).unwrap_or(&0.0)) / seconds * 100.0;
        threads.row([name.as_str().into(), Cell::number(percent, 2, "%")]);
        cpu_percent += percent;
    }
    let resident = daemon.resident_mib();
    let mut scrapes = Vec::new();
    for _ in 0..SCRAPES {
        scrapes.push(daemon.scrape_ms()?);
        waiting.pass(Duration::from_millis(100))?;
    }
    let asked = lists(waiting, || match managed() {
        managed if managed >= guests.len() => Ok(()),
        managed => Err(ScenarioError::Failed(format!("the list has {managed} managed guests"))),
    })?;
    let longest = scrapes.iter().copied().fold(0.0, f64::max);
    let mut all = Table::new(["figure"], ["value"]);
    all.row(["CPU, of one core".into(), Cell::number(cpu_percent, 2, "%")]);
    all.row(["resident memory".into(), Cell::number(resident, 1, "MiB")]);
    all.row([format!("scrape, median of {SCRAPES}").into(), Cell::number(median(scrapes.clone()), 1, "ms")]);
    all.row(["longest scrape".into(), Cell::number(longest, 1, "ms")]);
    let figures = Figures::of(format!("{} stopped QEMU guests, {seconds:.0} s", guests.len()))
        .table(all)
        .table(threads)
        .bar("CPU", Cell::number(cpu_percent, 2, "% of one core"), Limit::AtMost(CPU_MAX_PERCENT))
        .bar("resident", Cell::number(resident, 1, "MiB"), Limit::AtMost(RESIDENT_MAX_MIB))
        .bars([SpreadMedian::of(&scrapes).bar("scrape", 1, "ms", Limit::AtMost(SCRAPE_MAX_MS))])
        .bars([list_bar(&asked, &format!("list of {} guests by the daemon", guests.len()))])
        .bars([list_bar(&alone, &format!("list of {listed} guests without a daemon"))]);
    Ok(figures)
}

fn list_bar(times_ms: &[f64], what: &str) -> Bar {
    SpreadMedian::of(times_ms).bar(what, 1, "ms", Limit::AtMost(LIST_MAX_MS))
}

/// Times of lists in milliseconds.
fn lists(waiting: &Waiting, list: impl Fn() -> Result<(), ScenarioError>) -> Result<Vec<f64>, ScenarioError> {
    let mut times = Vec::new();
    for _ in 0..LISTS {
        let began = Instant::now();
        list()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        waiting.pass(Duration::from_millis(100))?;
    }
    Ok(times)
}

/// Runs `wideleaf list` once, as a user does.
fn list_without_daemon() -> Result<(), ScenarioError> {
    let list =
        Command::new(program("wideleaf", "wideleaf")?).args(["list", "--no-daemon"]).stdin(Stdio::null()).output();
    let list = list.map_err(|error| ScenarioError::Skipped(format!("wideleaf: {error}")))?;
    let text = String::from_utf8_lossy(&list.stdout);
    match list.status.success() && text.contains("idle-0") {
        true => Ok(()),
        false => Err(ScenarioError::Failed(format!("no list: {text}{}", String::from_utf8_lossy(&list.stderr)))),
    }
}

/// A guest that has filled its RAM and is stopped.
fn standing(number: usize, waiting: &Waiting) -> Result<QemuGuest, ScenarioError> {
    let line = "kernel=pattern bytes=33554432 passes=1000000";
    let setup = QemuSetup::new(&format!("idle-{number}"), mib(64), QemuRam::Anonymous, line);
    let guest = QemuGuest::start(&setup).map_err(|error| ScenarioError::Skipped(format!("QEMU: {error}")))?;
    let limit = Duration::from_secs(60);
    waiting.until("its first pass", limit, Duration::from_millis(10), || !guest.said().marks.is_empty())?;
    guest.stop_vcpus().map_err(|error| ScenarioError::Skipped(format!("QEMU's monitor: {error}")))?;
    Ok(guest)
}

/// A wideleafd that is killed when dropped.
struct Daemon {
    child: Child,
    metrics: SocketAddr,
}

impl Daemon {
    fn start(folder: &Path) -> Result<Daemon, ScenarioError> {
        let skipped = |error: std::io::Error| ScenarioError::Skipped(format!("wideleafd: {error}"));
        // A free port: the listener that found it is closed at once.
        let metrics = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(skipped)?;
        let config = folder.join("wideleafd.toml");
        let text = format!(
            "[socket]\npath = \"{0}/control.sock\"\n[metrics]\nlisten = \"{metrics}\"\n[state]\npath = \
             \"{0}/state.json\"\n[attach]\nautomatic = [\"idle-*\"]\ninterval = \"10s\"\n",
            folder.display()
        );
        fs::write(&config, text).map_err(skipped)?;
        let mut command = Command::new(program("wideleafd", "wideleaf-daemon")?);
        let child = command.arg("--config").arg(config).stdin(Stdio::null()).spawn().map_err(skipped)?;
        Ok(Daemon { child, metrics })
    }

    /// CPU time in seconds, by thread name.
    fn cpu_s(&self) -> BTreeMap<String, f64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("wideleafd is alive");
        let ran = |path: PathBuf| {
            let (name, times) =
                (fs::read_to_string(path.join("comm")).ok()?, fs::read_to_string(path.join("schedstat")).ok()?);
            Some((name.trim().to_owned(), times.split_whitespace().next()?.parse::<f64>().ok()? / 1e9))
        };
        let mut by_name = BTreeMap::new();
        for (name, seconds) in tasks.filter_map(|task| ran(task.ok()?.path())) {
            *by_name.entry(name).or_default() += seconds;
        }
        by_name
    }

    fn resident_mib(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("wideleafd is alive");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("every process has this line");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0
    }

    fn scrape_ms(&self) -> Result<f64, ScenarioError> {
        let began = Instant::now();
        let mut text = String::new();
        let scraped = TcpStream::connect(self.metrics).and_then(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
            stream.read_to_string(&mut text)
        });
        scraped.map_err(|error| ScenarioError::Skipped(format!("no metrics: {error}")))?;
        assert!(text.contains("wideleaf_vm_backing_bytes"), "{text}");
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn main() -> ExitCode {
    scenario::run("attached_idle", experiment)
}
