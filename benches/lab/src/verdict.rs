//! The end of a command that judges guests and writes a result.

use wideleaf::output::say;
use wideleaf_run::failure::Failure;

/// The verdict on the guests, or else the failure of writing. The exit code reports a guest that failed even if its
/// result is lost; the loss is reported as well.
///
/// # Errors
/// The first of both.
pub fn verdict_first(verdict: Result<(), Failure>, written: Result<(), Failure>) -> Result<(), Failure> {
    if let (Err(_), Err(lost)) = (&verdict, &written) {
        say(format_args!("wideleaf-lab: {lost}"));
    }
    verdict.and(written)
}
