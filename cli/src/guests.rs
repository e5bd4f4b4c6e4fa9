//! `wideleaf list`, `info`, `explain`, `set`, `detach` and `reload`: what an operator asks about the VMs of a host, and says about them.
//!
//! ```text
//!   list, info, explain ──▶ Source (the daemon, or a look at the processes) ──▶ tables | JSON
//!   set, detach, reload ──▶ the daemon ──▶ what is the case afterwards
//! ```

pub mod settings;
pub mod tables;

use clap::Args;
use wideleaf_control::protocol::{Request, Settings};

use crate::args::FormatArg;
use crate::failure::Failure;
use crate::output::{Output, print};
use crate::source::{SocketArg, SourceArg, done, vm_of};
use settings::Setting;

const LIST_EXAMPLES: &str = "\
Without a daemon, where its socket is closed to this user, and with --no-daemon it looks at the processes itself:
read-only, and it says which figures are missing and what would bring them.

In JSON sizes are bytes, times are seconds, and shares (cpu_share, coverage, walk_share) are ten thousandths: 5000 is
50 %.

Examples:
  All VMs of this host:
    wideleaf list

  Of a daemon that listens elsewhere, for programs:
    wideleaf list --socket /run/other/control.sock --format json

  Names of the VMs with less than half of their memory in large pages:
    wideleaf list --format json | jq -r '.vms[] | select(.backing.huge_2m < .backing.base_4k) | .name'";

/// `wideleaf list`.
#[derive(Args, Debug)]
#[command(after_long_help = LIST_EXAMPLES)]
pub struct ListArgs {
    #[command(flatten)]
    source: SourceArg,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

const VM_EXAMPLES: &str = "\
Examples:
  By name, by process id, for programs:
    wideleaf info web
    wideleaf explain 4711
    wideleaf info web --format json";

/// `wideleaf info` and `wideleaf explain`.
#[derive(Args, Debug)]
#[command(after_long_help = VM_EXAMPLES)]
pub struct VmArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    #[command(flatten)]
    source: SourceArg,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

const SET_EXAMPLES: &str = "\
What is not named stays as it is. wideleafd remembers it until it is set again or the VM is detached.

  policy=NAME[:KEY=VALUE,...]   as for `wideleaf run` (`--policy help` lists them), or off: the VM is only looked at
  guarantee=best-effort|95%     the share of its present memory to have in large pages; less than that is reported
  collapse-shared=yes|no        whether shared memory may be collapsed, which stops the guest for 15 to 30 ms a window
  qmp=PATH                      a monitor of QEMU's that nobody else is connected to

The last two are settled when a guest is attached: to change them now, `wideleaf detach` it, and attach it with
--collapse-shared or --qmp.

A KEY= with nothing behind it is unset: it is as wideleafd's configuration says, the last two from the next time that the
guest is attached.

Examples:
  Promote what is used most, and tell when less than 95 % of it is in large pages:
    wideleaf set web policy=coverage guarantee=95%

  Leave it as it is:
    wideleaf set web policy=off

  As the configuration says again:
    wideleaf set web policy= guarantee=";

/// `wideleaf set`.
#[derive(Args, Debug)]
#[command(after_long_help = SET_EXAMPLES)]
pub struct SetArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    /// What to change; --help lists what there is
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = Setting::parse)]
    changes: Vec<Setting>,

    #[command(flatten)]
    socket: SocketArg,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

/// `wideleaf detach`.
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    #[command(flatten)]
    socket: SocketArg,
}

/// `wideleaf reload`.
#[derive(Args, Debug)]
pub struct ReloadArgs {
    #[command(flatten)]
    socket: SocketArg,
}

/// Runs `wideleaf list`.
///
/// # Errors
/// [`Failure`].
pub fn list(args: &ListArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let report = args.source.source()?.host()?;
    output.write(&report, tables::host)
}

/// Runs `wideleaf info`.
///
/// # Errors
/// [`Failure`].
pub fn info(args: &VmArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let vm = args.source.source()?.vm(&args.vm)?;
    output.write(&vm, tables::vm)
}

/// Runs `wideleaf explain`.
///
/// # Errors
/// [`Failure`].
pub fn explain(args: &VmArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let explanation = args.source.source()?.explanation(&args.vm)?;
    output.write(&explanation, tables::explanation)
}

/// Runs `wideleaf set`.
///
/// # Errors
/// [`Failure`].
pub fn set(args: &SetArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let mut changes = Settings::default();
    args.changes.iter().for_each(|setting| setting.clone().put_into(&mut changes));
    let vm = vm_of(args.socket.ask(Request::Set { vm: args.vm.clone(), changes })?)?;
    output.write(&vm, |vm| format!("{}\n", tables::care_line(vm)))
}

/// Runs `wideleaf detach`.
///
/// # Errors
/// [`Failure`].
pub fn detach(args: &DetachArgs) -> Result<(), Failure> {
    done(args.socket.ask(Request::Detach { vm: args.vm.clone() })?)?;
    print(&format!("{} is left to itself; its pages stay as they are\n", tables::clean(&args.vm)))
}

/// Runs `wideleaf reload`.
///
/// # Errors
/// [`Failure`].
pub fn reload(args: &ReloadArgs) -> Result<(), Failure> {
    done(args.socket.ask(Request::Reload)?)?;
    print("wideleafd has read its configuration again\n")
}
