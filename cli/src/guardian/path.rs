//! The child that removes a run's cgroup or socket.

use wideleaf_run::failure::Failure;
use wideleaf_run::guardian::path::remove_at_the_end;

use crate::args::HoldPathArgs;

/// The child: waits until its standard input ends, then removes the folder or the socket.
///
/// # Errors
/// [`Failure::Host`] if it cannot be removed.
pub fn main(args: &HoldPathArgs) -> Result<(), Failure> {
    remove_at_the_end(&args.path)
}
