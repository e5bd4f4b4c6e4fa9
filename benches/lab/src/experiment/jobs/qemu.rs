//! Runs the built-in image as a QEMU guest: its console output, and the backing of its RAM as seen from outside.
//!
//! ```text
//!   exec ──▶ first line ─▶ region lines ─▶ begin ─▶ … ─▶ end ─▶ exit line   console: each line with the time it came
//!              │ start time                  ▲ looks at RAM, every 50 ms ▲   series, coverage of regions, resident RAM
//! ```

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use wideleaf_attach::Places;
use wideleaf_attach::find;
use wideleaf_attach::ram::{self, RamPiece};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::peers::{Guest, QEMU, QemuRam};
use wideleaf_experiments::results::{Measured, Sample};
use wideleaf_kernels::native::measure_tsc_hz;
use wideleaf_memory::ProcessHost;
use wideleaf_memory::sensors::host_backing::{HostBackingSensor, WindowBacking};
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange};
use wideleaf_protocol::{Message, parse};

use super::wideleaf_run::{COVERED_PERCENT, MIB, is_timed};
use crate::image::results::{GuestPhase, GuestReport};
use wideleaf::child;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::undo::TemporaryFolder;

/// Interval between two samples of RAM: a sample of 512 MiB on base pages takes 2 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time over which the frequency of the clock is measured, to 0.01 %.
const CLOCK_MEASURED_OVER: Duration = Duration::from_millis(50);
/// Most bytes that are read from a console: a kernel prints some kilobytes.
const CONSOLE_BYTES_MAX: u64 = 64 << 20;

/// Runs QEMU until it ends.
pub(super) fn run(
    guest: &Guest,
    ram: QemuRam,
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    Ok(watched(guest, ram, LOOK_EVERY, timeout, interrupts)?.measured())
}

/// The same, with this interval between two samples of RAM. Returns everything that was observed.
pub(super) fn watched(
    guest: &Guest,
    ram: QemuRam,
    look_every: Duration,
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<EndedGuest, Failure> {
    let host = |what: &str, error: &dyn std::fmt::Display| Failure::Host(format!("cannot {what}: {error}"));
    let folder = TemporaryFolder::new().map_err(|error| host("make a temporary folder", &error))?;
    let (image, words) = (folder.path().join("guest.elf"), folder.path().join("words"));
    wideleaf_guest_image::write_to(&image).map_err(|error| host("write the guest's image", &error))?;
    let stderr = fs::File::create(&words).map_err(|error| host("make a temporary file", &error))?;
    let mut command = child::that_ends_with_us(Path::new(QEMU));
    command.args(guest.qemu_arguments(ram, &image.display().to_string()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
    let began = Instant::now();
    let mut qemu = Qemu(command.spawn().map_err(|error| host("start QEMU", &error))?);
    let lines = listen(qemu.0.stdout.take().expect("a pipe was asked for"));
    let seen = Watch::of(qemu.0.id());
    let seen = seen.until_it_ends(&lines, look_every, began + timeout, interrupts)?;
    let seen = seen.ok_or_else(|| Failure::took_longer_than(timeout, "the guest under QEMU"))?;
    qemu.0.wait().map_err(|error| host("wait for QEMU", &error))?;
    let report = GuestReport::of_log(&seen.log()).map_err(|failure| {
        let words = fs::read_to_string(&words).unwrap_or_default();
        failure.during(words.trim().lines().last().unwrap_or(QEMU))
    })?;
    report.judge()?;
    Ok(EndedGuest { report, seen, began })
}

/// The guest with the frequency of its clock, which QEMU does not tell it: a guest that measures it against QEMU's
/// timer cannot on a busy host.
pub(super) fn with_clock(guest: &Guest) -> Guest {
    let mut guest = guest.clone();
    write!(guest.cmdline, " tsc_hz={}", measure_tsc_hz(CLOCK_MEASURED_OVER)).expect("a string takes all text");
    guest
}

/// A process that does not outlive this one.
#[derive(Debug)]
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        // It has ended, or is no longer wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Receives each line with its arrival time, until the console is closed.
pub(super) fn listen(console: ChildStdout) -> Receiver<(Instant, String)> {
    let (sender, lines) = mpsc::channel();
    let work = move || {
        for line in BufReader::new(console.take(CONSOLE_BYTES_MAX)).split(b'\n').map_while(Result::ok) {
            if sender.send((Instant::now(), String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    };
    std::thread::spawn(work);
    lines
}

#[cfg(test)]
impl RamSample {
    /// A look that found this.
    pub(super) fn of_windows(at: Instant, backing: HostBacking, windows: u64, windows_large: u64) -> RamSample {
        RamSample { at, backing, windows, windows_large, resident: None }
    }
}

/// Observer of the QEMU process and its console.
pub(super) struct Watch {
    pid: u32,
    ram: Vec<RamPiece>,
    host: Option<ProcessHost>,
    sensor: HostBackingSensor,
}

/// Everything that was observed.
#[derive(Debug, Default)]
struct Observations {
    lines: Vec<(Instant, String)>,
    looks: Vec<RamSample>,
    /// Names of the kernel's sets of data.
    sets: Vec<String>,
    /// What each look found of them, in their order.
    of_sets: Vec<Vec<SetBacking>>,
}

/// Windows of one set of the kernel's data, and the number of large ones among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SetBacking {
    pub(super) windows: u64,
    pub(super) windows_large: u64,
}

/// A guest that has ended.
#[derive(Debug)]
pub(super) struct EndedGuest {
    report: GuestReport,
    seen: Observations,
    began: Instant,
}

/// State of RAM at one instant.
#[derive(Clone, Copy, Debug)]
pub(super) struct RamSample {
    /// Time of the sample.
    pub(super) at: Instant,
    /// All guest RAM.
    pub(super) backing: HostBacking,
    /// Number of windows of the kernel's data, and the number of large ones among them.
    pub(super) windows: u64,
    pub(super) windows_large: u64,
    resident: Option<Bytes>,
}

impl Watch {
    /// Observer of this process.
    pub(super) fn of(pid: u32) -> Watch {
        Watch { pid, ram: vec![], host: None, sensor: HostBackingSensor::default() }
    }

    /// Samples RAM and reads the console until it is closed; `None` at a timeout.
    fn until_it_ends(
        mut self,
        lines: &Receiver<(Instant, String)>,
        look_every: Duration,
        deadline: Instant,
        interrupts: &Interrupts,
    ) -> Result<Option<Observations>, Failure> {
        let mut seen = Observations::default();
        let mut data = Vec::new();
        let mut next_look = Instant::now();
        loop {
            interrupts.check()?;
            match lines.recv_timeout(next_look.saturating_duration_since(Instant::now())) {
                Ok((at, line)) => {
                    if let Some((name, range)) = region(&line) {
                        seen.sets.push(name);
                        data.push(range);
                    }
                    seen.lines.push((at, line));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(Some(seen)),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some((look, of_sets)) = self.look_at_sets(&data) {
                        seen.looks.push(look);
                        seen.of_sets.push(of_sets);
                    }
                    next_look = Instant::now() + look_every;
                }
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
        }
    }

    /// Samples RAM; `None` before the process has RAM, or after it has lost it.
    pub(super) fn look(&mut self, data: &[GpaRange]) -> Option<RamSample> {
        self.look_at_sets(data).map(|(look, _)| look)
    }

    /// The same, with what was found of each set of data.
    fn look_at_sets(&mut self, data: &[GpaRange]) -> Option<(RamSample, Vec<SetBacking>)> {
        if self.ram.is_empty() {
            let process = find::with_pid(&Places::default(), self.pid).ok()?;
            self.ram = ram::map(&process, None).pieces;
            self.host = ProcessHost::open(self.pid).ok();
        }
        let host = self.host.as_ref()?;
        let at = Instant::now();
        let mut look = RamSample { at, backing: HostBacking::default(), windows: 0, windows_large: 0, resident: None };
        let mut of_sets = vec![SetBacking::default(); data.len()];
        for piece in &self.ram {
            for WindowBacking { window, resident, backing } in
                self.sensor.sample(host, piece.range, piece.kind.fixed_page()).ok()?
            {
                look.backing.add_window(resident, backing);
                if let Some(set) = data.iter().position(|range| range.windows().any(|of| of == window)) {
                    of_sets[set].windows += 1;
                    of_sets[set].windows_large += u64::from(matches!(backing, Backing::Huge2M | Backing::Giant1G));
                }
            }
        }
        look.windows = of_sets.iter().map(|of| of.windows).sum();
        look.windows_large = of_sets.iter().map(|of| of.windows_large).sum();
        look.resident = resident(&fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?);
        // A process that ends loses its RAM first.
        (look.backing.resident() > Bytes::ZERO).then_some((look, of_sets))
    }
}

/// Region of the kernel's data that a line reports, with its name.
fn region(line: &str) -> Option<(String, GpaRange)> {
    match parse(line)?.ok()? {
        Message::Region { name, address, bytes } => {
            Some((name.as_str().to_owned(), GpaRange::new(Gpa::new(address), Bytes::new(bytes))?))
        }
        _ => None,
    }
}

/// `VmRSS`, which excludes pages of the hugetlb pool, plus `HugetlbPages` (proc_pid_status(5)).
fn resident(status: &str) -> Option<Bytes> {
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some(Bytes::new((of("VmRSS")? + of("HugetlbPages").unwrap_or(0)) * 1024))
}

impl Observations {
    fn log(&self) -> String {
        self.lines.iter().map(|(_, line)| format!("{line}\n")).collect()
    }

    /// Arrival time of the line that begins or ends a phase.
    fn when(&self, is_it: impl Fn(&Message<'_>) -> bool) -> Option<Instant> {
        let is_that = |line: &str| parse(line).is_some_and(|message| message.is_ok_and(|message| is_it(&message)));
        self.lines.iter().find(|(_, line)| is_that(line)).map(|(at, _)| *at)
    }
}

impl EndedGuest {
    /// Lines of its console, with the time at which each came.
    pub(super) fn lines(&self) -> &[(Instant, String)] {
        &self.seen.lines
    }

    /// Its timed part: the longest with work that is neither set-up nor a check.
    pub(super) fn timed(&self) -> Option<&GuestPhase> {
        let timed = self.report.phases.iter().filter(|phase| is_timed(&phase.name));
        let seconds = |phase: &&GuestPhase| phase.seconds.unwrap_or(0.0);
        timed.max_by(|a, b| seconds(a).total_cmp(&seconds(b)))
    }

    /// Arrival times of the lines that begin and end the timed part.
    fn begin_and_end(&self) -> [Option<Instant>; 2] {
        let name = self.timed().map(|phase| phase.name.as_str());
        [
            self.seen.when(|m| matches!(m, Message::Begin { phase, .. } if Some(phase.as_str()) == name)),
            self.seen.when(|m| matches!(m, Message::End { phase, .. } if Some(phase.as_str()) == name)),
        ]
    }

    /// Its sets of data by name, as the last look before the end of the timed part found them. Empty without a look.
    pub(super) fn sets(&self) -> Vec<(&str, SetBacking)> {
        let [_, Some(end)] = self.begin_and_end() else { return vec![] };
        let last = self.seen.looks.iter().rposition(|look| look.at <= end);
        let of_sets = last.map_or(&[][..], |last| &self.seen.of_sets[last]);
        self.seen.sets.iter().map(String::as_str).zip(of_sets.iter().copied()).collect()
    }

    /// Measurements from the guest's output and the samples together.
    pub(super) fn measured(&self) -> Measured {
        let EndedGuest { report, seen, began } = self;
        let timed = self.timed();
        let [begin, end] = self.begin_and_end();
        let mut measured = Measured::default();
        let mut put = |metric, value: Option<f64>| measured.metrics.extend(value.map(|value| (metric, value)));
        put(Metric::Figure, report.figure.as_ref().map(|figure| figure.value));
        put(Metric::Seconds, report.results.get("seconds").map(|s| s.value).or(timed.and_then(|phase| phase.seconds)));
        let first = seen.lines.iter().find(|(_, line)| parse(line).is_some());
        put(Metric::FirstByteMs, first.map(|(at, _)| (*at - *began).as_secs_f64() * 1e3));
        let covered = |look: &&RamSample| look.windows > 0;
        let percent = |look: &RamSample| look.windows_large as f64 * 100.0 / look.windows as f64;
        let last = end.and_then(|end| seen.looks.iter().rfind(|look| look.at <= end));
        put(Metric::ResidentMib, last.and_then(|look| look.resident).map(|bytes| bytes.get() as f64 / MIB));
        put(Metric::CoveragePercent, last.filter(covered).map(percent));
        let reached = seen.looks.iter().filter(covered).find(|look| percent(look) >= COVERED_PERCENT);
        let after = |at: Instant| begin.map(|begin| at.saturating_duration_since(begin).as_secs_f64());
        put(Metric::TimeToCoverageS, reached.and_then(|look| after(look.at)));
        put(Metric::GapP99Us, report.gaps.iter().map(|gap| gap.p99_ns as f64 / 1e3).reduce(f64::max));
        put(Metric::GapMaxUs, report.gaps.iter().map(|gap| gap.max_ns as f64 / 1e3).reduce(f64::max));
        measured.series =
            begin.map(|begin| seen.looks.iter().map(|look| sample(look, begin)).collect()).unwrap_or_default();
        measured
    }
}

fn sample(look: &RamSample, begin: Instant) -> Sample {
    let mib = |bytes: Bytes| bytes.get() as f64 / MIB;
    let before = begin.saturating_duration_since(look.at).as_secs_f64();
    Sample {
        at_s: look.at.saturating_duration_since(begin).as_secs_f64() - before,
        base_mib: mib(look.backing.base_4k),
        huge_mib: mib(look.backing.huge_2m),
        giant_mib: mib(look.backing.giant_1g),
        rate_per_s: None,
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::units::mib;

    use super::*;

    const CONSOLE: &str = "\
@wideleaf hello version=1 kernel=gups vcpus=1 guest_page=2m tsc_hz=1000 entry=pvh
@wideleaf region name=table address=0x400000 bytes=8388608
@wideleaf begin phase=init tsc=0
@wideleaf end phase=init tsc=9000
@wideleaf begin phase=update tsc=9000
@wideleaf end phase=update tsc=11000
@wideleaf result name=gups value=0.05 unit=GUP/s
@wideleaf verify status=pass errors=0 checked=1
@wideleaf exit code=0
";

    /// A line every 100 ms, and a sample between two of them. `large` is the number of large windows, of the
    /// table's four, in each.
    fn seen(began: Instant, large: &[u64]) -> Observations {
        let at = |ms: usize| began + Duration::from_millis(ms as u64);
        let lines = CONSOLE.lines().enumerate().map(|(index, line)| (at(100 * (index + 1)), line.to_owned()));
        let look = |(index, large): (usize, &u64)| {
            let backing = HostBacking { huge_2m: mib(2) * *large, ..HostBacking::default() };
            let resident = Some(mib(100 + index as u64));
            RamSample { at: at(100 * index + 50), backing, windows: 4, windows_large: *large, resident }
        };
        let looks = large.iter().enumerate().map(look).collect();
        let of_sets = large.iter().map(|large| vec![SetBacking { windows: 4, windows_large: *large }]).collect();
        Observations { lines: lines.collect(), looks, sets: vec!["table".into()], of_sets }
    }

    fn ended(began: Instant, large: &[u64]) -> EndedGuest {
        let seen = seen(began, large);
        EndedGuest { report: GuestReport::of_log(&seen.log()).expect("a whole run"), seen, began }
    }

    #[test]
    fn samples_count_from_the_begin_of_the_timed_part_to_its_end() {
        let began = Instant::now();
        // The timed part is `update`, although `init` is longer: its lines are the fifth and the sixth.
        let ended = ended(began, &[0, 0, 0, 0, 3, 4, 1]);
        let measured = ended.measured();
        let value = |metric| measured.metrics.get(&metric).map(|value| (value * 1e3).round() / 1e3);
        assert_eq!(value(Metric::FirstByteMs), Some(100.0));
        assert_eq!((value(Metric::Figure), value(Metric::Seconds)), (Some(0.05), Some(2.0)));
        // The sample at 550 ms is the last before the end at 600, and the first with all four windows; the begin
        // was at 500.
        assert_eq!((value(Metric::CoveragePercent), value(Metric::TimeToCoverageS)), (Some(100.0), Some(0.05)));
        assert_eq!(value(Metric::ResidentMib), Some(105.0));
        assert_eq!(measured.series.len(), 7);
        assert!((measured.series[0].at_s + 0.45).abs() < 1e-9, "times before the begin are negative");
        assert_eq!(
            ended.sets(),
            [("table", SetBacking { windows: 4, windows_large: 4 })],
            "at the end of the timed part"
        );
    }

    #[test]
    fn coverage_that_is_never_reached_has_no_time() {
        let began = Instant::now();
        let metrics = ended(began, &[0, 0, 0, 0, 3, 3]).measured().metrics;
        assert_eq!(metrics.get(&Metric::CoveragePercent), Some(&75.0));
        assert_eq!(metrics.get(&Metric::TimeToCoverageS), None);
    }

    #[test]
    fn pages_of_the_pool_are_resident_as_well() {
        assert_eq!(resident("Name:\tqemu\nVmRSS:\t    1024 kB\nHugetlbPages:\t    2048 kB\n"), Some(mib(3)));
        assert_eq!(resident("VmRSS:\t 4 kB\n"), Some(Bytes::new(4096)));
        assert_eq!(resident("Name:\tqemu\n"), None, "a zombie has none");
    }
}
