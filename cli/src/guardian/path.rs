//! The child that removes a run's cgroup or socket when the run has ended in any way (`guardian.rs`). It touches this
//! one path.

use std::path::PathBuf;

use clap::Args;
use wideleaf_run::failure::Failure;
use wideleaf_run::guardian::path::remove_at_the_end;

/// Arguments of the child that removes a run's cgroup or socket.
#[derive(Debug, Args)]
pub struct HoldPathArgs {
    /// An empty folder (for example a cgroup) or a socket
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
}

/// The child: waits until its standard input ends, then removes the folder or the socket.
///
/// # Errors
/// [`Failure::Host`] if it cannot be removed.
pub fn main(args: &HoldPathArgs) -> Result<(), Failure> {
    remove_at_the_end(&args.path)
}
