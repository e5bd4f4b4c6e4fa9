//! Common parts of the scenarios, which are benches with their own `main`: start and end, waiting, printing.
//!
//! ```text
//!   arguments ─▶ scenario ─▶ Figures ─▶ standard output: a table, or JSON with `-- --json`
//!                      └───▶ error ───▶ one line: skipped (success); interrupted, late, failed, bad argument (failure)
//! ```
//!
//! Standard output has only the result; lines about progress belong on standard error.
//!
//! Leases of pools and settings are values on the stack of [`run`]'s `scenario` and are returned on drop. For this
//! reason no function here ends the process: Ctrl-C sets a flag, each wait checks it and returns
//! [`ScenarioError::Interrupted`], and a panic unwinds.

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use wideleaf_measure::environment::{Environment, stolen_ms};
use wideleaf_measure::figures::Figures;
use wideleaf_memory::khugepaged::KhugepagedError;

/// Maximum number of lines in a failure message.
const LINES_MAX: usize = 5;

/// Maximum length of such a line in bytes.
const LINE_MAX: usize = 200;

/// Reason why a scenario has no result.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// This machine lacks a requirement.
    #[error("skipped: {0}")]
    Skipped(String),
    /// Ctrl-C or `SIGTERM` ended the scenario.
    #[error("interrupted")]
    Interrupted,
    /// An argument is not valid.
    #[error("argument {number}: {text:?} is not {expected}")]
    Argument {
        /// Position of the argument, from one.
        number: usize,
        /// Text of the argument.
        text: String,
        /// Description of a valid argument.
        expected: &'static str,
    },
    /// A step failed, for the reason in this line.
    #[error("{0}")]
    Failed(String),
    /// An expected event did not happen within its limit.
    #[error("{what} did not come within {} s", limit.as_secs())]
    TooLate {
        /// Name of the event.
        what: &'static str,
        /// Time limit of the wait.
        limit: Duration,
    },
}

impl From<KhugepagedError> for ScenarioError {
    fn from(error: KhugepagedError) -> ScenarioError {
        ScenarioError::Skipped(error.to_string())
    }
}

/// Runs a scenario if `cargo bench` asks for it (`cargo test --benches` runs the same program), and prints its
/// figures: a table for people, or JSON with `--json`. Adds the name, and the machine as it was at the start. If there
/// are no figures, prints the reason instead. A skip is not a failure.
pub fn run(name: &str, scenario: impl FnOnce(&Arguments, &Waiting) -> Result<Figures, ScenarioError>) -> ExitCode {
    let CommandLine { is_asked_for, form, arguments } = CommandLine::parse(std::env::args().skip(1));
    if !is_asked_for {
        return ExitCode::SUCCESS;
    }
    in_five_lines(name, || {
        let (environment, stolen_before) = (Environment::capture(), stolen_ms());
        let result = scenario(&arguments, &Waiting::until_interrupted());
        let steal_ms = stolen_ms().saturating_sub(stolen_before);
        let environment = Environment { steal_ms, ..environment };
        let said =
            PrintedResult::of(name, form, result.map(|figures| Figures { name: name.into(), environment, ..figures }));
        print!("{}", said.on_stdout);
        eprint!("{}", said.on_stderr);
        if said.is_success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    })
}

/// Form of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Table,
    Json,
}

/// Command line of a scenario.
#[derive(Debug)]
struct CommandLine {
    /// Whether `cargo bench` runs the program.
    is_asked_for: bool,
    form: Form,
    arguments: Arguments,
}

impl CommandLine {
    /// Words that begin with `--` are options; other options than `--bench` and `--json` are those of criterion, which
    /// `cargo bench` gives to all benches.
    fn parse(words: impl Iterator<Item = String>) -> CommandLine {
        let (options, given): (Vec<_>, Vec<_>) = words.partition(|word| word.starts_with("--"));
        let has = |option: &str| options.iter().any(|given| given == option);
        let form = if has("--json") { Form::Json } else { Form::Table };
        CommandLine { is_asked_for: has("--bench"), form, arguments: Arguments(given) }
    }
}

/// What a scenario prints at its end.
#[derive(Debug, PartialEq, Eq)]
struct PrintedResult {
    on_stdout: String,
    on_stderr: String,
    is_success: bool,
}

impl PrintedResult {
    /// A program that reads JSON finds the figures or nothing on standard output.
    fn of(name: &str, form: Form, result: Result<Figures, ScenarioError>) -> PrintedResult {
        let is_success = matches!(result, Ok(_) | Err(ScenarioError::Skipped(_)));
        let (on_stdout, on_stderr) = match (result, form) {
            (Ok(figures), Form::Table) => (format!("{figures}\n"), String::new()),
            (Ok(figures), Form::Json) => {
                let json = serde_json::to_string_pretty(&figures).expect("figures have only names as keys");
                (json + "\n", String::new())
            }
            (Err(ended), Form::Table) => (format!("{name}: {}\n", shortened(&ended.to_string())), String::new()),
            (Err(ended), Form::Json) => (String::new(), format!("{name}: {}\n", shortened(&ended.to_string()))),
        };
        PrintedResult { on_stdout, on_stderr, is_success }
    }
}

/// Does the work of a bench. A panic unwinds and so returns all leases. The panic message has at most
/// `LINES_MAX` lines: the location, the first line of the reason, and its last lines, which come from the
/// program that the bench waited for.
pub fn in_five_lines(name: &str, work: impl FnOnce() -> ExitCode) -> ExitCode {
    let bench = name.to_owned();
    panic::set_hook(Box::new(move |info| {
        let place = info.location().map_or(String::new(), |at| format!(" at {}:{}", at.file(), at.line()));
        let said = info.payload_as_str().unwrap_or("a panic without message");
        eprintln!("{bench}: failed{place}: {}", shortened(said));
    }));
    // The closure's borrowed values are not used afterwards.
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or(ExitCode::FAILURE)
}

/// The first line and the last lines of a text, each shortened to the length of a terminal line.
fn shortened(text: &str) -> String {
    let short = |line: &str| {
        let line = line.trim_end();
        let end = line.floor_char_boundary(LINE_MAX);
        if end < line.len() { format!("{}...", &line[..end]) } else { line.to_owned() }
    };
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let Some((first, rest)) = lines.split_first() else { return String::new() };
    let last = &rest[rest.len().saturating_sub(LINES_MAX - 1)..];
    let all = std::iter::once(short(first)).chain(last.iter().map(|line| format!("  {}", short(line))));
    all.collect::<Vec<_>>().join("\n")
}

/// Checks that guests can run on this host.
///
/// # Errors
/// [`ScenarioError::Skipped`] if they cannot.
pub fn needs_kvm() -> Result<(), ScenarioError> {
    let kvm = fs::File::options().read(true).write(true).open("/dev/kvm");
    kvm.map(drop).map_err(|error| ScenarioError::Skipped(format!("/dev/kvm: {error}")))
}

/// Arguments after `--`.
#[derive(Debug)]
pub struct Arguments(Vec<String>);

impl Arguments {
    /// The number at `index`, or `default` if the argument is absent.
    ///
    /// # Errors
    /// [`ScenarioError::Argument`] if the argument is not a number.
    pub fn number<N: FromStr>(&self, index: usize, default: N) -> Result<N, ScenarioError> {
        let Some(text) = self.0.get(index) else { return Ok(default) };
        text.parse().map_err(|_| ScenarioError::Argument {
            number: index + 1,
            text: text.clone(),
            expected: "a number",
        })
    }

    /// The number of rounds or sets at `index`: a median needs at least one.
    ///
    /// # Errors
    /// [`ScenarioError::Argument`] if the argument is not such a number.
    pub fn count(&self, index: usize, default: u32) -> Result<u32, ScenarioError> {
        let text = || self.text(index).unwrap_or_default().to_owned();
        match self.number(index, default)? {
            0 => Err(ScenarioError::Argument { number: index + 1, text: text(), expected: "a number of at least 1" }),
            count => Ok(count),
        }
    }

    /// Index in `words` of the argument at `index`, or 0 if the argument is absent.
    ///
    /// # Errors
    /// [`ScenarioError::Argument`] if the argument is not in `words`.
    pub fn word(&self, index: usize, words: &[&str], expected: &'static str) -> Result<usize, ScenarioError> {
        let Some(text) = self.0.get(index) else { return Ok(0) };
        let found = words.iter().position(|word| word == text);
        found.ok_or_else(|| ScenarioError::Argument { number: index + 1, text: text.clone(), expected })
    }

    /// The argument at `index`, if present.
    pub fn text(&self, index: usize) -> Option<&str> {
        self.0.get(index).map(String::as_str)
    }
}

/// Waits that a signal ends early.
#[derive(Debug)]
pub struct Waiting {
    is_interrupted: Arc<AtomicBool>,
}

impl Waiting {
    /// Interval between two checks of the flag.
    const STEP: Duration = Duration::from_millis(50);

    /// Installs handlers for `SIGINT` and `SIGTERM`.
    ///
    /// # Panics
    /// If the kernel refuses a handler, which is not expected.
    pub fn until_interrupted() -> Waiting {
        let is_interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&is_interrupted)).expect("both signals can be handled");
        }
        Waiting { is_interrupted }
    }

    /// Flag that a signal sets.
    pub fn flag(&self) -> &AtomicBool {
        &self.is_interrupted
    }

    /// Waits for `time`.
    ///
    /// # Errors
    /// [`ScenarioError::Interrupted`], soon after a signal.
    pub fn pass(&self, time: Duration) -> Result<(), ScenarioError> {
        let began = Instant::now();
        loop {
            if self.is_interrupted.load(Ordering::Relaxed) {
                return Err(ScenarioError::Interrupted);
            }
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            sleep(left.min(Self::STEP));
        }
    }

    /// Checks `is_there` every `pace`. Returns whether it became true within `limit`.
    ///
    /// # Errors
    /// [`ScenarioError::Interrupted`], soon after a signal.
    pub fn comes(
        &self,
        limit: Duration,
        pace: Duration,
        mut is_there: impl FnMut() -> bool,
    ) -> Result<bool, ScenarioError> {
        let began = Instant::now();
        while !is_there() {
            if began.elapsed() >= limit {
                return Ok(false);
            }
            self.pass(pace)?;
        }
        Ok(true)
    }

    /// Like [`Waiting::comes`], for an event `what` that must happen.
    ///
    /// # Errors
    /// [`ScenarioError::TooLate`] if it does not happen, and the errors of [`Waiting::comes`].
    pub fn until(
        &self,
        what: &'static str,
        limit: Duration,
        pace: Duration,
        is_there: impl FnMut() -> bool,
    ) -> Result<(), ScenarioError> {
        if self.comes(limit, pace, is_there)? { Ok(()) } else { Err(ScenarioError::TooLate { what, limit }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_measure::figures::Limit;
    use wideleaf_measure::table::Cell;

    fn figures() -> Figures {
        Figures::of("one run").bar("speed", Cell::number(0.5, 1, ""), Limit::AtLeast(1.0))
    }

    #[test]
    fn json_is_an_option_and_numbers_are_arguments() {
        let parsed = |words: &[&str]| CommandLine::parse(words.iter().map(|word| (*word).to_owned()));
        let line = parsed(&["1", "--json", "2", "--bench"]);
        assert_eq!((line.is_asked_for, line.form, line.arguments.0), (true, Form::Json, vec!["1".into(), "2".into()]));
        let line = parsed(&["1"]);
        assert_eq!((line.is_asked_for, line.form), (false, Form::Table));
    }

    #[test]
    fn a_bar_that_is_missed_is_said_and_is_no_failure() {
        let said = PrintedResult::of("made up", Form::Table, Ok(figures()));
        assert!(said.is_success && said.on_stdout.contains("MISSED: speed 0.5, at least 1"), "{said:?}");
        let said = PrintedResult::of("made up", Form::Json, Ok(figures()));
        let read: Figures = serde_json::from_str(&said.on_stdout).expect("JSON of figures");
        assert_eq!((read, said.on_stderr.as_str(), said.is_success), (figures(), "", true));
    }

    #[test]
    fn a_scenario_that_fails_prints_no_json_and_a_skip_is_no_failure() {
        let said = |form, ended| PrintedResult::of("made up", form, Err(ended));
        let failed = said(Form::Json, ScenarioError::Interrupted);
        assert_eq!((failed.on_stdout.as_str(), failed.on_stderr.as_str()), ("", "made up: interrupted\n"));
        assert!(!failed.is_success && !said(Form::Table, ScenarioError::Interrupted).is_success);
        let skipped = said(Form::Json, ScenarioError::Skipped("no KVM".into()));
        assert_eq!((skipped.on_stdout.as_str(), skipped.is_success), ("", true));
        let failed = said(Form::Table, ScenarioError::Failed("cannot split".into()));
        assert_eq!((failed.on_stdout.as_str(), failed.is_success), ("made up: cannot split\n", false));
        assert_eq!(said(Form::Table, ScenarioError::Skipped("no KVM".into())).on_stdout, "made up: skipped: no KVM\n");
    }

    #[test]
    fn an_invalid_number_is_named() {
        let arguments = Arguments(vec!["26".into(), "many".into()]);
        assert_eq!(arguments.number(0, 25).expect("a number"), 26);
        assert_eq!(arguments.number(2, 7).expect("the default"), 7);
        let error = arguments.number(1, 3).expect_err("not a number").to_string();
        assert_eq!(error, "argument 2: \"many\" is not a number");
        assert_eq!((arguments.count(0, 5).ok(), arguments.count(2, 5).ok()), (Some(26), Some(5)));
        let error = Arguments(vec!["0".into()]).count(0, 5).expect_err("no round").to_string();
        assert_eq!(error, "argument 1: \"0\" is not a number of at least 1");
        assert_eq!(arguments.word(1, &["few", "many"], "few or many").expect("a word"), 1);
        assert_eq!(arguments.word(2, &["few", "many"], "few or many").expect("the first"), 0);
        let error = arguments.word(0, &["few", "many"], "few or many").expect_err("no such word").to_string();
        assert_eq!(error, "argument 1: \"26\" is not few or many");
    }

    #[test]
    fn a_failure_message_has_the_first_line_and_the_last_ones() {
        let console: String = (0..1000).map(|line| format!("line {line} {}\n", "x".repeat(300))).collect();
        let told = shortened(&format!("no verification came\n\n{console}"));
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!((lines.len(), lines[0]), (LINES_MAX, "no verification came"));
        assert!(lines[1].starts_with("  line 996 ") && lines[4].starts_with("  line 999 "), "{told}");
        assert!(lines.iter().all(|line| line.len() <= LINE_MAX + 5), "{told}");
        assert_eq!(shortened("one word"), "one word");
    }

    #[test]
    fn a_panic_of_a_bench_is_a_failure() {
        assert_eq!(in_five_lines("made up", || panic!("it went wrong")), ExitCode::FAILURE);
        assert_eq!(in_five_lines("made up", || ExitCode::SUCCESS), ExitCode::SUCCESS);
    }

    #[test]
    fn a_wait_ends_after_a_signal() {
        let waiting = Waiting { is_interrupted: Arc::new(AtomicBool::new(true)) };
        assert!(matches!(waiting.pass(Duration::from_secs(3600)), Err(ScenarioError::Interrupted)));
        let forever = waiting.until("nothing", Duration::from_secs(3600), Duration::from_secs(3600), || false);
        assert!(matches!(forever, Err(ScenarioError::Interrupted)));
    }

    #[test]
    fn an_event_that_does_not_happen_is_named() {
        let waiting = Waiting { is_interrupted: Arc::default() };
        let error = waiting.until("the end", Duration::ZERO, Duration::ZERO, || false).expect_err("it never comes");
        assert_eq!(error.to_string(), "the end did not come within 0 s");
    }
}
