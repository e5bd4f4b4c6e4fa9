//! `wideleaf simulate`: policies on what was recorded or generated instead of on a guest that runs.
//!
//! ```text
//!   --recording FILE   snapshots of a manager   ──▶ recorded: what each policy would have done there, and its cost
//!   --trace FILE       accesses of a kernel     ─┐
//!   --trace gups:…     accesses of a generator  ─┴▶ traced: what each machine's TLB makes of them, under each policy
//! ```

mod args;
pub mod generated;
pub mod machines;
pub mod plot;
pub mod recorded;
pub mod report;
pub mod source;
pub mod sweep3d;
pub mod traced;

pub use args::{MachinesArg, PoliciesArg, SimulateArgs};

use wideleaf::failure::Failure;
use wideleaf::output::Output;
use wideleaf::run::list_policies;

/// Runs the subcommand.
///
/// # Errors
/// [`Failure`] where there is nothing to simulate, it can not be used, or the result not written.
pub fn main(args: &SimulateArgs) -> Result<(), Failure> {
    let policies = match &args.policy {
        Some(PoliciesArg::Help) => return list_policies(),
        Some(PoliciesArg::Use(policies)) => policies.as_slice(),
        None => &[],
    };
    if let Some(MachinesArg::Help) = args.machine {
        return machines::list(Output::open(args.format, args.output.as_deref())?);
    }
    match (&args.recording, &args.trace) {
        (Some(recording), _) => {
            recorded::main(recording, policies, Output::open(args.format, args.output.as_deref())?)
        }
        (None, Some(source)) if source == "help" => generated::list(),
        (None, Some(source)) => traced::main(source, policies, args),
        (None, None) => Err(Failure::Usage(
            "say what to simulate: --recording FILE, from `wideleaf run --record FILE`, or --trace, a file or a stream \
             (--trace help)"
                .into(),
        )),
    }
}
