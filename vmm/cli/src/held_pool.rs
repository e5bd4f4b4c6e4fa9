//! Room in the hugetlb pool that is given back however this process ends, also if it is killed outright: a child holds the
//! lease for as long as a pipe from here to it is open, and the kernel closes that pipe in every case.
//!
//! ```text
//!   wideleaf demo ── standard input, never written to ──▶ wideleaf hold-pool
//!         ▲                                                  takes the lease
//!         └──────────── "held", or nothing ──────────────────┘
//!        ends: the pipe is closed ─────────────────────────▶ gives it back, and ends
//! ```

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PageSize;

use crate::args::HoldPoolArgs;
use crate::failure::Failure;

/// What the child says once it holds the lease.
const HELD: &str = "held";
/// How its last words begin if it does not: `main` writes them.
const PREFIX: &str = "wideleaf: ";

/// Room for pages of 2 MiB, until this is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct HeldPool(Child);

impl HeldPool {
    /// Makes room for so many pages more.
    ///
    /// # Errors
    /// The reason why it cannot be had.
    pub(crate) fn lease(pages: u64) -> Result<HeldPool, String> {
        let text = |error: io::Error| format!("cannot start what holds the pool: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(["hold-pool", "--pages", &pages.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal is for the group that has it: this child ends after us.
        let mut child = command.process_group(0).spawn().map_err(text)?;
        let mut said = [0; HELD.len()];
        match child.stdout.take().map(|mut stdout| stdout.read_exact(&mut said)) {
            Some(Ok(())) if said == *HELD.as_bytes() => Ok(HeldPool(child)),
            _ => {
                let words = child.wait_with_output().map_err(text)?.stderr;
                let words = String::from_utf8_lossy(&words);
                Err(words.trim().trim_start_matches(PREFIX).to_owned())
            }
        }
    }
}

impl Drop for HeldPool {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if let Err(error) = self.0.wait() {
            tracing::error!("what holds the pool does not end: {error}");
        }
    }
}

/// The child: runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] where the lease cannot be had.
pub fn main(args: &HoldPoolArgs) -> Result<(), Failure> {
    let pools = HugetlbPools::at(&args.root);
    let lease = pools.lease(PageSize::Huge2M, args.pages).map_err(|error| Failure::Host(error.to_string()))?;
    // Whoever asked may be gone already; then the input has ended as well.
    let _ = io::stdout().write_all(HELD.as_bytes()).and_then(|()| io::stdout().flush());
    let ended = io::copy(&mut io::stdin(), &mut io::sink());
    drop(lease);
    ended.map(drop).map_err(|error| Failure::Host(format!("standard input: {error}")))
}
