//! A host resource that is released however this process ends, even by SIGKILL. A child holds it while a pipe from
//! this process is open, and the kernel closes that pipe in every case.
//!
//! ```text
//!   wideleaf demo       ── standard input, never written to ──▶ wideleaf hold-pool
//!   wideleaf-lab                                                wideleaf-lab hold-khugepaged, hold-fragments, …
//!         ▲                                                  takes it
//!         └──────────── "held", or nothing ──────────────────┘
//!        ends: the pipe is closed ─────────────────────────▶ gives it back, and ends
//! ```

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use wideleaf_run::failure::Failure;

use crate::program;

pub mod giant_pages;
pub mod path;
pub mod pool;

/// First word of the child's output once it holds the resource; more may follow in that line.
const HELD: &str = "held";

/// The resource, held until this is dropped or the process ends.
#[derive(Debug)]
pub struct Held {
    child: Child,
    said: String,
}

impl Held {
    /// Starts the hidden subcommand that takes the resource, and waits until it has.
    ///
    /// # Errors
    /// The reason why it is not available, in one line.
    pub fn start(arguments: &[&str]) -> Result<Held, String> {
        let text = |error: io::Error| format!("cannot start `wideleaf {}`: {error}", arguments.join(" "));
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal reaches the foreground group: this child must end after this process.
        let mut child = command.process_group(0).spawn().map_err(text)?;
        let mut line = String::new();
        let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        match (read, line.trim_end().strip_prefix(HELD)) {
            (Some(Ok(_)), Some(said)) => Ok(Held { child, said: said.trim().to_owned() }),
            _ => {
                let words = child.wait_with_output().map_err(text)?.stderr;
                let words = String::from_utf8_lossy(&words);
                // Earlier log lines are not the reason.
                Err(program::reason(&words).to_owned())
            }
        }
    }

    /// The child's description of the resource; empty if it gives no description.
    pub fn said(&self) -> &str {
        &self.said
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait() {
            tracing::error!("cannot end the process that holds a host resource: {error}");
        }
    }
}

/// In the child: reports that it holds the resource, and returns when the parent closes the pipe.
///
/// # Errors
/// [`Failure::Host`] if standard input cannot be read.
pub fn until_input_ends(said: &str) -> Result<(), Failure> {
    // The parent may have ended already; then the input has ended as well.
    let _ = writeln!(io::stdout(), "{}", format!("{HELD} {said}").trim_end()).and_then(|()| io::stdout().flush());
    io::copy(&mut io::stdin(), &mut io::sink())
        .map(drop)
        .map_err(|error| Failure::Host(format!("cannot read standard input: {error}")))
}
