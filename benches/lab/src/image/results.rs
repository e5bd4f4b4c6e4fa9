//! Reads the log of a guest's serial console: finds the protocol lines among those of Linux and its firmware.
//!
//! ```text
//!   [    1.9] Run /init as init process
//!   @wideleaf hello version=1 kernel=npb.cg …   ◀─ earlier lines belong to an earlier run
//!   @wideleaf begin phase=program tsc=…
//!   hello, world                                ◀─ the program's
//!   @wideleaf end phase=program tsc=…
//!   @wideleaf exit code=0                       ◀─ without it the guest did not get to its end
//! ```
//!
//! A log does not have the host's observations of the guest, so the report has less than that of `wideleaf run`.
//! Its parts have the same names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use wideleaf::report::{FigureBlock, rate, write_gaps, write_results, write_verification};
use wideleaf::table::{number, table};
use wideleaf_protocol::linux::PROGRAM_PHASE;
use wideleaf_protocol::{ExitCode, Message, Mismatch, Name, PROTOCOL_VERSION, Status, parse};
use wideleaf_run::failure::Failure;
use wideleaf_run::outcome::{outcome_of, verdict};
use wideleaf_run::report::{Figure, Gaps, Hello, Measurement, Problem, Verification};
use wideleaf_run::session::{rate_over, seconds_of};
use wideleaf_run::text::clean;

/// Most bytes that are read of a log: a serial line of 115200 baud takes a day for them.
pub const LOG_BYTES_MAX: u64 = 1 << 30;

/// Report of a guest from its output.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GuestReport {
    /// Message of the kernel that said hello.
    #[serde(flatten)]
    pub hello: Hello,
    /// Problem that it solved, for a built-in kernel with classes. An older guest does not report it.
    pub problem: Option<Problem>,
    /// How the run ended: `success`, or the guest's reason.
    pub outcome: String,
    /// Main figure of the run, for a built-in kernel with a known clock. It is among `results` too.
    pub figure: Option<Figure>,
    /// The guest's own verification, if it has one.
    pub verification: Option<Verification>,
    /// The guest's own measurements, by name.
    pub results: BTreeMap<String, Measurement>,
    /// Timed parts, in order.
    pub phases: Vec<GuestPhase>,
    /// Times for which each vCPU was kept from its work.
    pub gaps: Vec<Gaps>,
    /// Output of a program, line by line.
    pub program_output: Vec<String>,
}

/// A timed part of the run.
#[derive(Clone, Debug, Serialize)]
pub struct GuestPhase {
    /// Name of the part.
    pub name: String,
    /// Length by the guest's clock, in seconds; `None` if it did not end, or the clock's frequency is unknown.
    pub seconds: Option<f64>,
    /// Units of work done, from the last progress line.
    pub units: u64,
    /// Units of work per second from the begin to that line.
    pub rate_per_s: Option<f64>,
    #[serde(skip)]
    begin_tsc: u64,
}

impl GuestPhase {
    fn new(name: &str, begin_tsc: u64) -> GuestPhase {
        GuestPhase { name: name.to_owned(), seconds: None, units: 0, rate_per_s: None, begin_tsc }
    }
}

/// State of the reading so far.
#[derive(Default)]
struct Reading {
    report: GuestReport,
    tsc_hz: u64,
    is_program_running: bool,
    mismatch: Option<String>,
    panic: Option<String>,
    exit: Option<ExitCode>,
    has_ours: bool,
}

impl GuestReport {
    /// Reads a log. If it has several runs, the last counts.
    ///
    /// # Errors
    /// [`Failure::Input`] if it has no protocol line; [`Failure::GuestCrashed`] if the run has no end or a line is
    /// malformed; otherwise the guest's own reason.
    pub fn of_log(text: &str) -> Result<GuestReport, Failure> {
        let mut reading = Reading::default();
        for line in text.lines() {
            reading.read(line)?;
        }
        reading.end()
    }

    /// Checks that the guest found its results correct.
    ///
    /// # Errors
    /// [`Failure::GuestFailed`] otherwise.
    pub fn judge(&self) -> Result<(), Failure> {
        verdict(&self.outcome, self.verification.as_ref(), &self.results)
    }

    fn latest(&mut self, phase: Name<'_>) -> Option<&mut GuestPhase> {
        self.phases.iter_mut().rev().find(|open| open.name == phase.as_str())
    }

    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        let mut out = String::new();
        let Hello { kernel, vcpus, guest_page, entry } = &self.hello;
        let worker = self.hello.worker();
        let _ = writeln!(out, "{kernel}\n  {worker}s: {vcpus}, {guest_page} pages requested, started through {entry}");
        if !self.phases.is_empty() {
            let mut phases = table(&["phase", "seconds", "rate"]);
            for phase in &self.phases {
                let seconds = phase.seconds.map_or("-".into(), |seconds| format!("{seconds:.3}"));
                let rate = phase.rate_per_s.filter(|_| phase.units > 0).map_or("-".into(), rate);
                phases.add_row([phase.name.as_str().into(), number(seconds), number(rate)]);
            }
            let _ = writeln!(out, "{phases}");
        }
        write_results(&mut out, &self.results);
        write_gaps(&mut out, &self.gaps);
        for line in &self.program_output {
            let _ = writeln!(out, "  | {}", clean(line));
        }
        if let Some(figure) = &self.figure {
            let GuestReport { hello, problem, results, verification, .. } = self;
            let (problem, verification) = (problem.as_ref(), verification.as_ref());
            FigureBlock { hello, problem, figure, results, verification }.write(&mut out);
        }
        write_verification(&mut out, self.verification.as_ref());
        let _ = writeln!(out, "  outcome: {}", self.outcome);
        out
    }
}

impl Reading {
    fn read(&mut self, line: &str) -> Result<(), Failure> {
        match parse(line) {
            None if self.is_program_running => self.report.program_output.push(line.trim_end().to_owned()),
            None => {}
            Some(Ok(message)) => self.take(message)?,
            Some(Err(error)) => {
                let what = "the guest wrote a malformed line";
                return Err(Failure::GuestCrashed(format!("{what}: {error}: {line}")));
            }
        }
        Ok(())
    }

    fn take(&mut self, message: Message<'_>) -> Result<(), Failure> {
        self.has_ours = true;
        let report = &mut self.report;
        match message {
            Message::Hello { version, .. } if version != PROTOCOL_VERSION => {
                let what = format!(
                    "cannot read the guest's lines: their version is {version}, this program reads {PROTOCOL_VERSION}"
                );
                return Err(Failure::Input(what));
            }
            Message::Hello { kernel, vcpus, guest_page, tsc_hz, entry, .. } => {
                let hello = Hello::new(kernel, vcpus, guest_page, entry);
                let report = GuestReport { hello, ..GuestReport::default() };
                *self = Reading { report, tsc_hz, has_ours: true, ..Reading::default() };
            }
            Message::Problem { class, size, iterations } => {
                report.problem = Some(Problem::new(class, size, iterations));
            }
            Message::Begin { phase, tsc } => {
                self.is_program_running = phase == PROGRAM_PHASE;
                report.phases.push(GuestPhase::new(phase.as_str(), tsc));
            }
            Message::Progress { phase, tsc, done, .. } => {
                if let Some(open) = report.latest(phase) {
                    open.units = done;
                    open.rate_per_s = rate_over(done, tsc.saturating_sub(open.begin_tsc), self.tsc_hz);
                }
            }
            Message::End { phase, tsc } => {
                self.is_program_running = false;
                if let Some(open) = report.latest(phase) {
                    open.seconds = seconds_of(tsc.saturating_sub(open.begin_tsc), self.tsc_hz);
                }
            }
            Message::Result { name, value, unit } => {
                report.results.insert(name.to_string(), Measurement { value, unit: unit.to_string() });
            }
            Message::Gaps { vcpu, count, p50_ns, p99_ns, p999_ns, max_ns } => {
                report.gaps.push(Gaps { vcpu, count, p50_ns, p99_ns, p999_ns, max_ns });
            }
            Message::Mismatch(Mismatch { address, expected, found, kind }) => {
                self.mismatch = Some(format!("at {address:#x}: expected {expected:#x}, found {found:#x} ({kind})"));
            }
            Message::Verify { status, errors, checked } => {
                let passed = status == Status::Pass;
                report.verification = Some(Verification { passed, errors, checked, first_mismatch: None });
            }
            Message::Panic { message } => self.panic = Some(message.to_owned()),
            Message::Exit { code } => self.exit = Some(code),
            // An address of the guest is useless without the guest.
            Message::Region { .. } => {}
        }
        Ok(())
    }

    fn end(mut self) -> Result<GuestReport, Failure> {
        if !self.has_ours {
            let remedy = "for a Linux guest, add console=ttyS0 to its command line";
            return Err(Failure::Input(format!(
                "cannot find results in the log: it has no line of a wideleaf guest; {remedy}"
            )));
        }
        let no_end = || Failure::GuestCrashed("the log has no exit line: the guest crashed, or was stopped".to_owned());
        let exit = self.exit.ok_or_else(no_end)?;
        // A guest that refuses its command line has not started a kernel.
        let kernel = &self.report.hello.kernel;
        let name = if kernel.is_empty() { "the guest" } else { kernel };
        self.report.outcome = outcome_of(exit, self.panic.as_deref(), name, "the Linux command line")?;
        self.report.figure = Figure::of(kernel, &self.report.results);
        if let Some(verification) = &mut self.report.verification {
            verification.first_mismatch = self.mismatch;
        }
        Ok(self.report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CG: &str = "\
SeaBIOS (version 1.16)\r
[    0.000000] Linux version 6.12\r
@wideleaf hello version=1 kernel=npb.cg vcpus=2 guest_page=2m tsc_hz=1000000 entry=linux\r
@wideleaf problem class=A size=14000 iterations=15\r
@wideleaf region name=matrix address=0x7f0000000000 bytes=1048576\r
@wideleaf begin phase=compute tsc=1000000\r
[    2.100000] random: crng init done\r
@wideleaf progress phase=compute tsc=2000000 done=30 total=60\r
@wideleaf progress phase=compute tsc=3000000 done=60 total=60\r
@wideleaf end phase=compute tsc=4000000\r
@wideleaf result name=mops value=12.5 unit=Mop/s\r
@wideleaf verify status=pass errors=0 checked=1\r
@wideleaf exit code=0\r
[    4.000000] reboot: Power down\r
";

    fn refused(log: &str) -> (u8, String) {
        let failure = GuestReport::of_log(log).expect_err("refused");
        (failure.exit_code(), failure.to_string())
    }

    #[test]
    fn protocol_lines_are_found_among_those_of_linux() {
        let report = GuestReport::of_log(CG).expect("a whole run");
        let Hello { kernel, vcpus, guest_page, .. } = &report.hello;
        assert_eq!((kernel.as_str(), *vcpus, guest_page.as_str()), ("npb.cg", 2, "2m"));
        let phase = &report.phases[0];
        assert_eq!((phase.name.as_str(), phase.seconds, phase.units), ("compute", Some(3.0), 60));
        // Of the first two of its three seconds: work after the last progress line was not reported.
        assert_eq!(phase.rate_per_s, Some(30.0));
        assert_eq!(report.results["mops"].value, 12.5);
        assert_eq!((report.outcome.as_str(), report.program_output.len()), ("success", 0));
        report.judge().expect("verified");
        let table = report.to_table();
        assert!(table.contains("mops: 12.500000 Mop/s") && table.contains("30.0 /s"), "{table}");
    }

    #[test]
    fn a_line_belongs_to_the_phase_that_it_names() {
        let begin = "@wideleaf begin phase=check tsc=4000000";
        let late = "@wideleaf progress phase=compute tsc=3000000 done=80 total=80";
        let log = CG.replace("@wideleaf end", &format!("{begin}\n{late}\n@wideleaf end"));
        let report = GuestReport::of_log(&log).expect("a whole run");
        let phases = report.phases.iter().map(|phase| (phase.name.as_str(), phase.seconds, phase.rate_per_s));
        let expected = [("compute", Some(3.0), Some(40.0)), ("check", None, None)];
        assert_eq!(phases.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_figure_of_a_built_in_kernel_stands_for_the_run() {
        let report = GuestReport::of_log(CG).expect("a whole run");
        let figure = report.figure.as_ref().expect("it is among the results");
        assert_eq!((figure.name.as_str(), figure.value, figure.unit.as_str()), ("mops", 12.5, "Mop/s"));
        let block = [
            "  npb.cg",
            "    class          A",
            "    size           14000",
            "    iterations     15",
            "    threads        2",
            "    mops           12.500 Mop/s",
            "    per thread     6.250 Mop/s",
            "    verification   SUCCESSFUL",
        ];
        assert!(report.to_table().contains(&block.join("\n")), "{}", report.to_table());
        let program = GuestReport::of_log(&CG.replace("kernel=npb.cg", "kernel=program")).expect("a whole run");
        assert!(program.figure.is_none());
    }

    #[test]
    fn the_log_of_an_older_guest_is_read_and_has_no_class() {
        let (before, line) = CG.split_once("@wideleaf problem").expect("a new guest says its problem");
        let (_, after) = line.split_once('\n').expect("it is a line");
        let older = format!("{before}{after}");
        // The class of the previous run is not its own.
        for log in [older.clone(), CG.to_owned() + &older] {
            let report = GuestReport::of_log(&log).expect("a whole run");
            assert_eq!(report.problem, None);
            assert!(report.to_table().contains("  npb.cg\n    threads        2\n"), "{}", report.to_table());
        }
    }

    #[test]
    fn of_several_runs_in_a_log_the_last_counts() {
        let failed = CG.replace("status=pass errors=0", "status=fail errors=1").replace("code=0", "code=1");
        GuestReport::of_log(&(failed.clone() + CG)).expect("a whole run").judge().expect("verified");
        let failure =
            GuestReport::of_log(&(CG.to_owned() + &failed)).expect("a whole run").judge().expect_err("not verified");
        assert_eq!(
            (failure.exit_code(), failure.to_string()),
            (1, "verification failed: 1 of 1 words or results are wrong".to_owned())
        );
    }

    #[test]
    fn a_log_without_protocol_lines_or_without_an_end_is_not_a_success() {
        let (code, line) = refused("[    0.000000] Linux version 6.12\n");
        assert!(code == 3 && line.contains("console=ttyS0"), "{code}: {line}");
        let (code, line) = refused(CG.split("@wideleaf exit").next().expect("what is before"));
        assert!(code == 5 && line.contains("no exit line"), "{code}: {line}");
        let (code, line) = refused(&CG.replace("begin phase=compute", "begin pha[    2.1] usb"));
        assert!(code == 5 && line.contains("a malformed line"), "{code}: {line}");
        let lost = CG.replace("@wideleaf verify", "verify").replace("code=0", "code=1");
        let failure = GuestReport::of_log(&lost).expect("a whole run").judge().expect_err("not verified");
        assert_eq!((failure.exit_code(), failure.to_string()), (1, "the guest ended: verification failed".to_owned()));
        let (code, line) = refused(&CG.replace("version=1 ", "version=7 "));
        assert!(code == 3 && line.contains("their version is 7, this program reads 1"), "{code}: {line}");
    }

    #[test]
    fn the_guests_reason_is_reported() {
        let log =
            |code| format!("@wideleaf panic message=wideleaf.page=16k: expected 4k\n@wideleaf exit code={code}\n");
        assert_eq!(refused(&log(2)), (2, "the Linux command line: wideleaf.page=16k: expected 4k".to_owned()));
        assert_eq!(refused(&log(3)).0, 5);
        assert_eq!(refused(&log(5)).0, 3);
    }

    #[test]
    fn a_programs_output_and_status_are_reported() {
        let begin = "@wideleaf hello version=1 kernel=program vcpus=1 guest_page=4k tsc_hz=0 entry=linux\n\
            @wideleaf begin phase=program tsc=1\n";
        let end = "@wideleaf end phase=program tsc=2\n@wideleaf result name=exit_status value=3.0 unit=status\n\
            @wideleaf exit code=6\n";
        let report = GuestReport::of_log(&format!("a\n{begin} one\n\n two \r\n{end}b\n")).expect("a whole run");
        assert_eq!(report.program_output, [" one", "", " two"]);
        let titled = GuestReport::of_log(&format!("{begin}\x1b]0;title\x07\n{end}")).expect("a whole run");
        assert_eq!(titled.program_output, ["\x1b]0;title\x07"], "JSON has it as it is");
        assert!(titled.to_table().contains("  | ?]0;title?\n"), "a terminal does not");
        let failure = report.judge().expect_err("it failed");
        assert_eq!((failure.exit_code(), failure.to_string()), (1, "the program ended with status 3".to_owned()));
    }
}
