//! The child that makes pages of 1 GiB for a run: the run's own sandbox does not let it change the host's pools. The
//! child ends with its parent (`guardian.rs`).

use clap::Args;
use wideleaf_run::failure::Failure;
use wideleaf_run::guardian::giant_pages::make_for_parent;

/// Arguments of the child that makes pages of 1 GiB for a run.
#[derive(Debug, Args)]
pub struct MakeGiantPagesArgs {
    /// Descriptors of the parent: a memfd for each page
    #[arg(value_name = "DESCRIPTOR", required = true)]
    pub descriptors: Vec<i32>,
}

/// The child: makes a page for each line of its standard input, until that ends.
///
/// # Errors
/// [`Failure::Host`] if the parent's files or the pipes fail.
pub fn main(args: &MakeGiantPagesArgs) -> Result<(), Failure> {
    make_for_parent(&args.descriptors)
}
