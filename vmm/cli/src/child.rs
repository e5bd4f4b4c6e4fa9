//! A `wideleaf run` in a process of its own: what compares runs starts each of them fresh, and a native kernel cannot be ended otherwise.
//!
//! ```text
//!   arguments ─▶ spawn ─▶ wait, Ctrl-C kills it ─▶ its report from a file of ours, or its one line and exit code as our failure
//! ```

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use signal_hook::consts::SIGSYS;

use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::report::RunReport;

/// Runs this program with these arguments, which begin with `run`, and this time at most.
///
/// # Errors
/// As [`run_program`].
pub(crate) fn run(arguments: &[String], timeout: Duration, interrupts: &Interrupts) -> Result<RunReport, Failure> {
    let program =
        std::env::current_exe().map_err(|error| Failure::Host(format!("cannot find this program: {error}")))?;
    run_program(&program, arguments, timeout, interrupts)
}

/// Runs a `wideleaf`, perhaps of another revision.
///
/// # Errors
/// Its [`Failure`], or that it could not be run; neither it nor a file of it is left. A run whose guest found wrong words is none: its
/// report says so.
pub(crate) fn run_program(
    program: &Path,
    arguments: &[String],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<RunReport, Failure> {
    let host = |what: &str, error: &dyn std::fmt::Display| Failure::Host(format!("cannot {what}: {error}"));
    let folder = tempfile::tempdir().map_err(|error| host("make a temporary folder", &error))?;
    let (file, words) = (folder.path().join("run.json"), folder.path().join("words"));
    let stderr = File::create(&words).map_err(|error| host("make a temporary file", &error))?;
    let mut command = Command::new(program);
    command.args(arguments).args(["--timeout", &format!("{}s", timeout.as_secs())]);
    command.args(["--format", "json", "--output"]).arg(&file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let status = wait(&mut command, interrupts).map_err(|error| host("start a run", &error))?;
    interrupts.check()?;
    match status.code() {
        Some(0 | 1) if file.exists() => read_report(&file),
        code => {
            let words = std::fs::read_to_string(&words).unwrap_or_default();
            let why = words.trim().rsplit("wideleaf: ").next().unwrap_or_default();
            let message = format!("wideleaf {}: {why}", arguments.join(" "));
            Err(match code {
                Some(6) => Failure::TimedOut(timeout),
                // It says why itself; nobody interrupted it.
                None if status.signal() == Some(SIGSYS) => Failure::Host(message),
                code => Failure::from_exit_code(code.unwrap_or(130), message),
            })
        }
    }
}

/// Runs it to its end. Ctrl-C in a terminal reaches it as well; a `kill` of this process alone does not, and it must not outlive us.
fn wait(command: &mut Command, interrupts: &Interrupts) -> std::io::Result<ExitStatus> {
    const LOOK_EVERY: Duration = Duration::from_millis(10);
    let mut child = command.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupts.is_set() {
            // What it has, memory and a file in our temporary folder, goes with it.
            child.kill()?;
            return child.wait();
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn read_report(file: &Path) -> Result<RunReport, Failure> {
    let failure =
        |error: &dyn std::fmt::Display| Failure::Output(format!("the report of a run is unreadable: {error}"));
    let text = std::fs::read_to_string(file).map_err(|error| failure(&error))?;
    serde_json::from_str(&text).map_err(|error| failure(&error))
}
