//! The meaning of a run's end: its outcome, for the report, and the failure that it stands for, for the exit code.

use std::collections::BTreeMap;

use wideleaf_protocol::ExitCode;
use wideleaf_protocol::linux::EXIT_STATUS;

use crate::failure::Failure;
use crate::report::{Measurement, Verification};
use crate::session::Observed;
use crate::spec::RunSpec;

/// How the guest ended, as the waiting thread saw it.
#[derive(Debug)]
pub enum Ended {
    /// The guest ended by itself, with this code.
    Exit(u8),
    /// The guest crashed; the text describes the crash.
    Crashed(String),
    /// The timeout ended it.
    TimedOut,
    /// A signal ended it.
    Interrupted,
    /// A request on its control socket or console ended it.
    Asked,
    /// It has moved to another run, where it continues.
    Migrated,
    /// The guest reset itself, and its machine could not be restored; the text has the reason.
    NotBootedAgain(String),
}

/// Outcome of a VM that was stopped on purpose: not an error.
pub const STOPPED: &str = "stopped";

/// Outcome of a VM that continues in another run: not an error.
pub const MIGRATED: &str = "migrated";

/// The meaning of a run's end.
#[derive(Debug)]
pub struct Judged {
    /// Outcome for the report, one line.
    pub outcome: String,
    /// All that is known about a crash.
    pub crash: Option<String>,
    /// Failure that the end stands for, if any. Wrong words that the guest found are in the report instead.
    pub end: Result<(), Failure>,
}

impl Judged {
    fn ended(outcome: &str, end: Result<(), Failure>) -> Judged {
        Judged { outcome: outcome.to_owned(), crash: None, end }
    }

    /// The first line of `how` describes the crash; registers follow.
    fn crashed(how: String) -> Judged {
        let outcome = format!("crashed: {}", how.lines().next().unwrap_or_default());
        Judged { outcome, crash: Some(how.clone()), end: Err(Failure::GuestCrashed(how)) }
    }
}

/// Judges the end of a run, for its report and its exit code.
///
/// # Errors
/// [`Failure`] if the guest refused its arguments: nothing ran.
pub fn judge(spec: &RunSpec, ended: Ended, observed: &Observed) -> Result<Judged, Failure> {
    let judged = match ended {
        Ended::TimedOut => Judged::ended("timed out", Err(Failure::TimedOut(spec.timeout.unwrap_or_default()))),
        Ended::Interrupted => Judged::ended("interrupted", Err(Failure::Interrupted)),
        Ended::Asked => Judged::ended(STOPPED, Ok(())),
        Ended::Migrated => Judged::ended(MIGRATED, Ok(())),
        Ended::NotBootedAgain(why) => Judged::ended("not booted again", Err(Failure::Host(why))),
        Ended::Crashed(how) => Judged::crashed(how),
        Ended::Exit(_) if observed.kernel_panic.is_some() => {
            let why = observed.kernel_panic.as_deref().unwrap_or_default();
            Judged::crashed(format!("the guest's kernel panicked: {why}"))
        }
        // Only if the guest ended by itself: otherwise its last line may simply be cut off.
        Ended::Exit(_) if !observed.malformed.is_empty() => {
            let line = &observed.malformed[0];
            Judged::crashed(format!("the guest wrote a malformed line: {line}"))
        }
        Ended::Exit(_) if observed.has_begun && observed.exit.is_none() => {
            Judged::crashed("the guest ended without an exit line".to_owned())
        }
        // Only the exit line of a Linux guest has its exit code: the guest switches the machine off.
        Ended::Exit(code) => match observed.exit.or(ExitCode::from_port_value(code)) {
            Some(code) => match outcome_of(code, observed.panic.as_deref(), &spec.workload_name(), "--cmdline") {
                Ok(outcome) => Judged::ended(&outcome, Ok(())),
                Err(Failure::GuestCrashed(how)) => Judged::crashed(how),
                Err(refused) => return Err(refused),
            },
            None => {
                let failure = Failure::GuestFailed(format!("the guest ended with exit code {code}"));
                Judged::ended(&format!("exit code {code}"), Err(failure))
            }
        },
    };
    Ok(judged)
}

/// Meaning of an exit code, with the guest's reason if it gave one. `arguments` is the user's name for its command
/// line.
pub fn outcome_of(code: ExitCode, panic: Option<&str>, name: &str, arguments: &str) -> Result<String, Failure> {
    match (code, panic) {
        (ExitCode::Success | ExitCode::VerificationFailed | ExitCode::ProgramFailed, _) => Ok(code.to_string()),
        (ExitCode::BadArguments, Some(why)) => Err(Failure::Usage(format!("{arguments}: {why}"))),
        (ExitCode::Unsupported, Some(why)) => Err(Failure::Input(format!("{name} cannot run: {why}"))),
        (_, Some(why)) => Err(Failure::GuestCrashed(format!("the guest panicked: {why}"))),
        (_, None) => Err(Failure::GuestCrashed(format!("the guest ended: {code}"))),
    }
}

/// Checks that the guest found its memory correct, and that the program of a Linux guest ended successfully.
///
/// # Errors
/// [`Failure::GuestFailed`] otherwise.
pub fn verdict(
    outcome: &str,
    verification: Option<&Verification>,
    results: &BTreeMap<String, Measurement>,
) -> Result<(), Failure> {
    if let Some(Verification { errors, checked, .. }) = verification.filter(|verification| !verification.passed) {
        return Err(Failure::GuestFailed(format!(
            "verification failed: {errors} of {checked} words or results are wrong"
        )));
    }
    match results.get(EXIT_STATUS.as_str()).filter(|status| status.value != 0.0) {
        Some(status) => Err(Failure::GuestFailed(format!("the program ended with status {}", status.value))),
        None if [STOPPED, MIGRATED].contains(&outcome) || outcome == ExitCode::Success.to_string() => Ok(()),
        None => Err(Failure::GuestFailed(format!("the guest ended: {outcome}"))),
    }
}
