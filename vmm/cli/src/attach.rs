//! `wideleaf attach`: puts a guest that somebody else started under wideleafd's management.

use std::path::PathBuf;

use clap::Args;
use wideleaf_control::protocol::{Request, Settings, Target};
use wideleaf_control::view::{Guarantee, GuaranteeError};

use crate::args::FormatArg;
use crate::failure::Failure;
use crate::guests::settings::{parse_path, parse_policy};
use crate::guests::tables;
use crate::output::Output;
use crate::source::{SocketArg, vm_of};

const ATTACH_EXAMPLES: &str = "\
The guest runs on; nothing in it or in its VMM has to change. `wideleaf detach` leaves it to itself again.

Examples:
  A libvirt domain, under the policy that wideleafd's configuration names:
    wideleaf attach web

  A process, only looked at:
    wideleaf attach 4711 --policy off

  What runs behind a monitor of QEMU's, which is then also asked for the exact RAM map:
    wideleaf attach --qmp /run/web.qmp --policy coverage --guarantee 95%";

/// `wideleaf attach`.
#[derive(Args, Debug)]
#[command(after_long_help = ATTACH_EXAMPLES)]
pub struct AttachArgs {
    /// Process id of the VMM, or name or UUID of a libvirt domain
    #[arg(value_name = "PID|DOMAIN", required_unless_present = "qmp")]
    target: Option<String>,

    /// A monitor of QEMU's that nobody else is connected to: names the guest, or is asked about the one that is named
    #[arg(long, value_name = "SOCKET", value_parser = parse_path)]
    qmp: Option<PathBuf>,

    /// A policy as for `wideleaf run`, or off: it is only looked at [default: as wideleafd's configuration says]
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]", value_parser = parse_policy)]
    policy: Option<String>,

    /// The share of its present memory to have in large pages, or best-effort; less is reported [default: as
    /// wideleafd's configuration says]
    #[arg(long, value_name = "SHARE", value_parser = parse_guarantee)]
    guarantee: Option<Guarantee>,

    /// Collapse shared memory too, which stops the guest for 15 to 30 ms a window
    #[arg(long)]
    collapse_shared: bool,

    #[command(flatten)]
    socket: SocketArg,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

fn parse_guarantee(text: &str) -> Result<Guarantee, GuaranteeError> {
    text.parse()
}

impl AttachArgs {
    /// A number is a process id: whose domain is called like one names it by its UUID.
    fn target(&self) -> Result<Target, Failure> {
        match (&self.target, &self.qmp) {
            (Some(text), _) => Ok(text.parse().map_or_else(|_| Target::Domain(text.clone()), Target::Pid)),
            (None, Some(path)) => Ok(Target::Qmp(path.clone())),
            (None, None) => Err(Failure::Usage("name a process, a libvirt domain or --qmp SOCKET".into())),
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            policy: self.policy.clone(),
            guarantee: self.guarantee.map(|guarantee| guarantee.to_string()),
            collapse_shared: self.collapse_shared.then_some(true),
            qmp: self.qmp.clone(),
        }
    }
}

/// Runs the subcommand.
///
/// # Errors
/// [`Failure`].
pub fn main(args: &AttachArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let request = Request::Attach { target: args.target()?, settings: args.settings() };
    let vm = vm_of(args.socket.ask(request)?)?;
    output.write(&vm, |vm| format!("{}\n", tables::care_line(vm)))
}
