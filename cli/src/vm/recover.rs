//! `wideleaf vm SOCKET recover ADDRESS`: continues a migration that lost its connection while pages followed the guest.
//!
//! ```text
//!   at the target: recover --incoming ADDRESS            at the source: recover ADDRESS
//!   takes one connection      ◀────────────────────────  connects
//!   passes it to the VM                                  passes it to the VM
//!                                  pages come
//!   shows the result                                     shows the result; that run ends
//! ```

use std::os::fd::AsFd as _;
use std::path::Path;

use clap::Args;
use wideleaf_control::vm::{VmAnswer, VmRequest, VmStatus, ask};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::migration::{Address, ConnectionEnds};

use crate::options::FormatArg;
use crate::output::say;
use crate::report::moved::{migrated, recovered};
use crate::vm::progress::{ResultOutput, ask_for_long, other_answer};

/// Arguments of `wideleaf vm SOCKET recover`.
#[derive(Args, Debug)]
pub struct RecoverArgs {
    /// Address at which the two sides meet: unix:PATH, tcp:HOST:PORT, or stdio for standard input and output, with the
    /// result on standard error
    #[arg(value_name = "ADDRESS")]
    address: Address,

    /// This VM is the target, where the guest runs: wait at the address. Without it, this VM is the source
    #[arg(long)]
    incoming: bool,
}

/// Continues the migration of the VM at this socket.
///
/// # Errors
/// [`Failure`] in one line; both sides are then as before.
pub fn main(socket: &Path, args: &RecoverArgs, format: FormatArg) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?.also_at_hangup()?;
    let output = ResultOutput::open(&args.address, format)?;
    check(socket, args.incoming)?;
    let (ends, with) = meet(args, &interrupts)?;
    let request = VmRequest::Recover { with, is_target: args.incoming };
    let passed = [ends.reader.as_fd(), ends.writer.as_fd()];
    match ask_for_long(socket, request, [&passed, &[]], "recovering", &interrupts)?.0 {
        VmAnswer::Migrated(moved) => output.show(&moved, migrated(&moved)),
        VmAnswer::Recovered(view) => output.show(&view, recovered(&view)),
        _ => Err(other_answer(socket)),
    }
}

/// Refuses what the VM would refuse, before a connection is made.
fn check(socket: &Path, is_target: bool) -> Result<(), Failure> {
    let VmAnswer::Status(VmStatus { cut_off, saving, doubt, .. }) = ask(socket, VmRequest::Status)? else {
        return Ok(());
    };
    match is_target {
        // Pages may still be expected over a connection that is dead without a sign.
        true if cut_off.is_none() && saving.is_none() => Err(Failure::Input(
            "cannot recover the VM: no page of its RAM is missing here; leave --incoming out at the source of a \
             migration"
                .to_owned(),
        )),
        false if doubt.is_none() && saving.is_none() => Err(Failure::Input(
            "cannot recover the VM: it is not paused after a migration; add --incoming at the target".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// The connection, and the name of the other side.
fn meet(args: &RecoverArgs, interrupts: &Interrupts) -> Result<(ConnectionEnds, String), Failure> {
    if args.incoming {
        return args.address.accept(interrupts, &|place| say(format!("wideleaf: waiting for the source at {place}")));
    }
    let remedy = format!("start `wideleaf vm SOCKET recover --incoming {}` there first", args.address);
    args.address.connect(&remedy).map(|ends| (ends, args.address.to_string()))
}
