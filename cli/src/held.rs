//! Something of the host's that is given back however this process ends, also if it is killed outright: a child has it for as long as a pipe
//! from here to it is open, and the kernel closes that pipe in every case.
//!
//! ```text
//!   wideleaf demo ── standard input, never written to ──▶ wideleaf hold-pool, hold-khugepaged, hold-fragments
//!         ▲                                                  takes it
//!         └──────────── "held", or nothing ──────────────────┘
//!        ends: the pipe is closed ─────────────────────────▶ gives it back, and ends
//! ```

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use crate::failure::Failure;
use crate::program;

/// What the child says once it has it; more may follow in that line.
const HELD: &str = "held";

/// Had until this is dropped or the process ends.
#[derive(Debug)]
pub struct Held {
    child: Child,
    said: String,
}

impl Held {
    /// Starts the hidden subcommand that takes it, and waits until it has.
    ///
    /// # Errors
    /// The reason why it cannot be had, in a line.
    pub fn start(arguments: &[&str]) -> Result<Held, String> {
        let text = |error: io::Error| format!("cannot start `wideleaf {}`: {error}", arguments.join(" "));
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal is for the group that has it: this child ends after us.
        let mut child = command.process_group(0).spawn().map_err(text)?;
        let mut line = String::new();
        let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        match (read, line.trim_end().strip_prefix(HELD)) {
            (Some(Ok(_)), Some(said)) => Ok(Held { child, said: said.trim().to_owned() }),
            _ => {
                let words = child.wait_with_output().map_err(text)?.stderr;
                let words = String::from_utf8_lossy(&words);
                // What it logged before is not why.
                Err(program::reason(&words).to_owned())
            }
        }
    }

    /// What the child said of what it has; empty where there is nothing to be said.
    pub fn said(&self) -> &str {
        &self.said
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait() {
            tracing::error!("what holds something of the host's does not end: {error}");
        }
    }
}

/// In the child: says that it has it, and returns when nobody wants it any more.
///
/// # Errors
/// [`Failure::Host`] where standard input cannot be read.
pub fn until_nobody_wants_it(said: &str) -> Result<(), Failure> {
    // Whoever asked may be gone already; then the input has ended as well.
    let _ = writeln!(io::stdout(), "{}", format!("{HELD} {said}").trim_end()).and_then(|()| io::stdout().flush());
    io::copy(&mut io::stdin(), &mut io::sink())
        .map(drop)
        .map_err(|error| Failure::Host(format!("standard input: {error}")))
}
