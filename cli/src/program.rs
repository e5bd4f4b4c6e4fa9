//! The frame of a program: what is set up before a command runs, and what is said where it fails.
//!
//! ```text
//!   main ──▶ limits ──▶ log ──▶ command ──▶ exit code, and one line on standard error where it failed
//! ```

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use wideleaf_run::failure::Failure;
use wideleaf_run::text::clean;

use crate::{limits, stderr};

/// What the line of a failure begins with, by program.
const PREFIXES: [&str; 2] = ["wideleaf: ", "wideleaf-lab: "];

/// Runs a program's work, and prints one line that begins with `name` where it fails.
pub fn run(name: &'static str, work: fn() -> Result<(), Failure>) -> ExitCode {
    stderr::set_program(name);
    // This function's frame is small so that a stack that is too small is still large enough for the message.
    let result = limits::prepare().and_then(|()| work());
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failed(name, &failure),
    };
    stderr::end();
    code
}

/// Starts the log on standard error. `WIDELEAF_LOG` sets its levels: one for all, or one for each `target=level`.
///
/// # Errors
/// [`Failure::Usage`] if `WIDELEAF_LOG` cannot be parsed.
pub fn start_log() -> Result<(), Failure> {
    let filter = match std::env::var("WIDELEAF_LOG") {
        Ok(text) => text.parse::<Targets>().map_err(|error| {
            let example = "write a level such as debug, or wideleaf_memory=trace";
            Failure::Usage(format!("cannot use WIDELEAF_LOG={text}: {error}; {example}"))
        })?,
        // It logs each wrong write to a device's registers, so that a driver could fill the log; the devices tell of
        // the first few.
        Err(_) => Targets::new().with_default(LevelFilter::WARN).with_target("virtio_queue", LevelFilter::OFF),
    };
    // Where standard error is closed, the subscriber would fail to print that it failed to print, and panic.
    let lines = tracing_subscriber::fmt::layer().with_writer(|| stderr::Log).without_time();
    let lines = lines.with_ansi(std::io::stderr().is_terminal()).log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(())
}

fn failed(name: &str, failure: &Failure) -> ExitCode {
    // A failure may quote what a guest printed, and a file's name.
    let text = failure.to_string();
    let lines: Vec<String> = text.lines().map(clean).collect();
    stderr::say(format_args!("{name}: {}", lines.join("\n")));
    ExitCode::from(failure.exit_code())
}

/// Why a program of ours failed, from what it printed on standard error: its last line with its name, without the name.
/// Log lines come
/// before it.
pub fn reason(stderr: &str) -> &str {
    let text = stderr.trim();
    let after = |prefix: &&str| text.rfind(prefix).map(|at| at + prefix.len());
    PREFIXES.iter().filter_map(after).max().map_or(text, |at| &text[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_what_follows_the_last_name_of_a_program() {
        assert_eq!(reason("WARN something\nwideleaf: cannot run: no KVM\n"), "cannot run: no KVM");
        assert_eq!(reason("wideleaf-lab: wideleaf: both\n"), "both");
        assert_eq!(reason("killed"), "killed");
        assert_eq!(reason(""), "");
    }
}
