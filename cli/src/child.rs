//! Runs `wideleaf` in a child process. Comparisons start each run in a fresh process, and a native kernel cannot be
//! ended otherwise.
//!
//! ```text
//!   arguments ─▶ spawn ─▶ wait, Ctrl-C kills it ─▶ its report from a temporary file, or its failure
//! ```

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use signal_hook::consts::{SIGHUP, SIGINT, SIGSYS, SIGTERM};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;
use wideleaf_run::undo::TemporaryFolder;

use crate::program;

const SETPRIV: &str = "setpriv";

/// Runs this program with these arguments, which begin with `run`, for at most this time.
///
/// # Errors
/// As [`run_program`].
pub fn run(arguments: &[String], timeout: Duration, interrupts: &Interrupts) -> Result<RunReport, Failure> {
    run_program(&this_program()?, arguments, timeout, interrupts)
}

/// Runs a `wideleaf`, perhaps of another revision.
///
/// # Errors
/// Its [`Failure`], or the reason why it could not run; neither a process nor a file is left. A guest that found
/// wrong words is not an error here: the report says so.
pub fn run_program(
    program: &Path,
    arguments: &[String],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<RunReport, Failure> {
    let limit = ["--timeout".to_owned(), format!("{}s", timeout.as_secs())];
    // The run ends itself in time. At a timeout it is killed without a signal to end, because a native kernel does
    // not react.
    let end = End { after: None, grace: Duration::ZERO };
    report(program, &[arguments, &limit].concat(), &end, interrupts)
}

/// Runs `wideleaf` with these arguments and returns its JSON. After `timeout` it is asked to end, then killed.
///
/// # Errors
/// Those of [`run`].
pub fn json<T: DeserializeOwned>(
    arguments: &[String],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<T, Failure> {
    /// Time that the child has to end its own children.
    const GRACE: Duration = Duration::from_secs(10);
    report(&this_program()?, arguments, &End { after: Some(timeout), grace: GRACE }, interrupts)
}

fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::Host(format!("cannot find this program: {error}")))
}

fn report<T: DeserializeOwned>(
    program: &Path,
    arguments: &[String],
    end: &End,
    interrupts: &Interrupts,
) -> Result<T, Failure> {
    let host = |what: &str, error: &dyn std::fmt::Display| Failure::Host(format!("cannot {what}: {error}"));
    let folder = TemporaryFolder::new().map_err(|error| host("make a temporary folder", &error))?;
    let (file, words) = (folder.path().join("run.json"), folder.path().join("words"));
    let stderr = File::create(&words).map_err(|error| host("make a temporary file", &error))?;
    let mut command = Command::new(program);
    command.args(arguments).args(["--format", "json", "--output"]).arg(&file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let status = wait(&mut command, end, interrupts).map_err(|error| host("start a run", &error))?;
    interrupts.check()?;
    let named = |what: &str| format!("wideleaf {}: {what}", arguments.join(" "));
    let Some(status) = status else {
        return Err(Failure::took_longer_than(end.after.unwrap_or_default(), &named("it")));
    };
    match status.code() {
        Some(0 | 1) if file.exists() => read_report(&file),
        code => {
            let words = std::fs::read_to_string(&words).unwrap_or_default();
            let message = named(program::reason(&words));
            Err(match (code, status.signal()) {
                (Some(code), _) => Failure::from_exit_code(code, message),
                // Ctrl-C, before the child could tell.
                (None, Some(SIGINT | SIGTERM | SIGHUP)) => Failure::Interrupted,
                // The child has reported the reason itself.
                (None, Some(SIGSYS)) => Failure::Host(message),
                (None, signal) => Failure::Host(named(&killed_by(signal.unwrap_or_default()))),
            })
        }
    }
}

/// What a child's end by this signal means.
fn killed_by(signal: i32) -> String {
    let remedy = match Signal::try_from(signal) {
        Ok(Signal::SIGKILL) => "; the host may be short of memory: see `dmesg`, and choose a smaller size",
        Ok(Signal::SIGBUS) => "; the host had no page left for its memory: choose a smaller size",
        _ => "",
    };
    let name = Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |signal| signal.to_string());
    format!("{name} killed it{remedy}")
}

/// Becomes the program and its arguments, if the parent still is the process with the first argument as its id.
const IF_PARENT_LIVES: &str = r#"[ "$PPID" = "$1" ] || exit 1; shift; exec "$@""#;

/// An external program that the kernel kills when the thread that starts it ends for any reason: `setpriv` of
/// util-linux requests that (`PR_SET_PDEATHSIG`). A request that comes after this process was killed has no effect, so
/// a shell then compares its parent with this process, and becomes the program. Without `setpriv` the program runs
/// directly, and a `SIGKILL` of this process leaves it running.
pub fn that_ends_with_us(program: &Path) -> Command {
    let has_setpriv = Command::new(SETPRIV).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !has_setpriv.is_ok_and(|status| status.success()) {
        return Command::new(program);
    }
    let mut command = Command::new(SETPRIV);
    command.args(["--pdeathsig", "KILL", "--", "sh", "-c", IF_PARENT_LIVES, "sh"]);
    command.arg(std::process::id().to_string()).arg(program);
    command
}

/// How a child is ended.
struct End {
    /// Timeout; `None` if the child watches the clock itself.
    after: Option<Duration>,
    /// Time that the child has to end after a request.
    grace: Duration,
}

/// Waits for the child's end, or ends it silently at its timeout. Ctrl-C in a terminal also reaches the child; a
/// `kill` of this process alone does not, and the child must not outlive this process.
fn wait(command: &mut Command, end: &End, interrupts: &Interrupts) -> std::io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    let mut child = command.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if interrupts.is_set() || end.after.is_some_and(|limit| began.elapsed() > limit) {
            // Its memory and its file in the temporary folder go with it.
            stop(&mut child, end.grace)?;
            return Ok(None);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Asks the child to end, and kills it if it has not ended within `grace`.
fn stop(child: &mut Child, grace: Duration) -> std::io::Result<ExitStatus> {
    let asked = Instant::now();
    if !grace.is_zero() {
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM)?;
    }
    while asked.elapsed() < grace {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(LOOK_EVERY);
    }
    child.kill()?;
    child.wait()
}

fn read_report<T: DeserializeOwned>(file: &Path) -> Result<T, Failure> {
    let failure = |error: &dyn std::fmt::Display| Failure::Output(format!("cannot read the report of a run: {error}"));
    let text = std::fs::read_to_string(file).map_err(|error| failure(&error))?;
    serde_json::from_str(&text).map_err(|error| failure(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_report_is_a_failure_that_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("run.json");
        for text in ["", "{", "{\"verification\": 3}", "[]"] {
            std::fs::write(&file, text).expect("written");
            let failure = read_report::<RunReport>(&file).expect_err("not a report");
            assert!(failure.to_string().starts_with("cannot read the report of a run: "), "{failure}");
        }
    }

    /// Failure of a run of a script in place of the program.
    fn failure_of(script: &str) -> Failure {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("program");
        std::fs::write(&program, script).expect("written");
        // A shell reads it: a file that was just written may still be open for writing in a child of another test.
        let arguments = [program.display().to_string()];
        let interrupts = Interrupts::install().expect("installed");
        run_program(Path::new("/bin/sh"), &arguments, Duration::from_secs(60), &interrupts).expect_err("no report")
    }

    #[test]
    fn a_child_that_a_signal_killed_was_not_interrupted() {
        for (signal, words) in [("KILL", "SIGKILL killed it; the host may be short of memory"), ("SEGV", "SIGSEGV")] {
            let failure = failure_of(&format!("kill -{signal} $$"));
            assert_eq!(failure.exit_code(), 4, "{failure}");
            assert!(failure.to_string().contains(words), "{failure}");
        }
        assert_eq!(failure_of("exit 130").exit_code(), 130);
    }

    #[test]
    fn a_child_that_took_too_long_is_named_with_its_limit() {
        let failure = failure_of("echo 'wideleaf: the guest did not end within 60s (--timeout)' >&2; exit 6");
        assert_eq!(failure.exit_code(), 6, "{failure}");
        let text = failure.to_string();
        assert!(text.starts_with("wideleaf /") && text.contains("--timeout 60s: the guest did not end"), "{text}");
        let (interrupts, after) = (Interrupts::install().expect("installed"), Some(Duration::ZERO));
        let end = End { after, grace: Duration::ZERO };
        let arguments = ["-c", "sleep 60"].map(str::to_owned);
        let failure = report::<RunReport>(Path::new("/bin/sh"), &arguments, &end, &interrupts).expect_err("it sleeps");
        assert_eq!((failure.exit_code(), failure.to_string().contains("--timeout)")), (6, false), "{failure}");
    }

    #[test]
    fn a_child_that_ignores_the_signal_is_killed_and_one_that_obeys_may_end_itself() {
        let start = |script: &str| {
            let mut command = Command::new("sh");
            // The child reports when its trap is set.
            command.args(["-c", script]).stdout(Stdio::piped());
            let mut child = command.spawn().expect("a shell");
            let mut ready = [0];
            std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut ready).expect("it reports");
            child
        };
        let mut deaf = start("trap '' TERM; printf r; while :; do sleep 0.05; done");
        let status = stop(&mut deaf, Duration::from_millis(200)).expect("ended");
        assert_eq!(status.signal(), Some(signal_hook::consts::SIGKILL));
        let mut polite = start("trap 'exit 7' TERM; printf r; while :; do sleep 0.05; done");
        assert_eq!(stop(&mut polite, Duration::from_secs(60)).expect("ended").code(), Some(7));
    }
}
