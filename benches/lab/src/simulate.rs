//! `wideleaf-lab simulate`: runs policies on recorded or generated data instead of on a running guest.
//!
//! ```text
//!   --recording FILE   snapshots of a manager   ──▶ recorded: each policy's actions there, and their cost
//!   --trace FILE       accesses of a kernel     ─┐
//!   --trace gups:…     accesses of a generator  ─┴▶ traced: each machine's TLB misses, under each policy
//! ```

mod args;
pub mod generated;
pub mod machines;
pub mod plot;
pub mod recorded;
pub mod report;
pub mod scaled;
pub mod source;
pub mod sweep3d;
pub mod traced;

pub use args::{MachinesArg, PoliciesArg, SimulateArgs};

use wideleaf::output::Output;
use wideleaf::run::list_policies;
use wideleaf_policies::PolicyChoice;
use wideleaf_run::failure::Failure;

/// Runs the subcommand `simulate`.
///
/// # Errors
/// [`Failure`] if the input is missing or unusable, or the result could not be written.
pub fn main(args: &SimulateArgs) -> Result<(), Failure> {
    let policies = match &args.policy {
        Some(PoliciesArg::Help) => return list_policies(),
        Some(PoliciesArg::Use(policies)) => {
            policies.iter().map(|policy| policy.choice("--policy")).collect::<Result<Vec<PolicyChoice>, Failure>>()?
        }
        None => Vec::new(),
    };
    if let Some(MachinesArg::Help) = args.machine {
        return machines::list(Output::open(args.format, args.output.as_deref())?);
    }
    match (&args.recording, &args.trace) {
        (Some(recording), _) => {
            recorded::main(recording, &policies, Output::open(args.format, args.output.as_deref())?)
        }
        (None, Some(source)) if source == "help" => generated::list(),
        (None, Some(source)) => traced::main(source, &policies, args),
        (None, None) => Err(Failure::Usage(
            "cannot simulate: no input is named; use --recording FILE of `wideleaf run --record FILE`, or --trace, a \
             file or a stream (--trace help)"
                .into(),
        )),
    }
}
