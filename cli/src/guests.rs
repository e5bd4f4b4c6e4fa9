//! `wideleaf list`, `info`, `explain`, `set`, `detach` and `reload`: an operator's queries and requests about the
//! VMs of a host.
//!
//! ```text
//!   list, info, explain ──▶ Source (the daemon, or the processes in /proc) ──▶ tables | JSON | a page in HTML
//!   set, detach, reload ──▶ the daemon ──▶ the state afterwards
//! ```

pub mod amounts;
pub mod html_page;
pub mod map_text;
pub mod nodes;
pub mod settings;
pub mod tables;

use std::path::{Path, PathBuf};

use clap::Args;
use wideleaf_control::protocol::{Request, Settings};
use wideleaf_run::failure::Failure;
use wideleaf_run::text::clean;

use crate::options::FormatArg;
use crate::output::{Output, Place, print};
use crate::vm_source::{SocketArg, SourceArg, done, vm_of};
use html_page::Page;
use settings::Setting;

const LIST_EXAMPLES: &str = "\
Without a daemon, if its socket is closed to this user, or with --no-daemon, the command reads the processes itself:
read-only, with a note for each missing figure and its remedy.

A line below the table names the VMs that were scanned a minute ago or before; JSON has `scan_age_s` of each.

In JSON, sizes are bytes, times are seconds, and shares (cpu_share, coverage, walk_share) are ten-thousandths: 5000 is
50 %.

Examples:
  All VMs of this host:
    wideleaf list

  From a daemon that listens elsewhere, for programs:
    wideleaf list --socket /run/other/control.sock --format json

  Names of the VMs with less than half of their memory in large pages:
    wideleaf list --format json | jq -r '.vms[] | select(.backing | .huge_2m + .giant_1g < .base_4k) | .name'";

/// Arguments of `wideleaf list`.
#[derive(Args, Debug)]
#[command(after_long_help = LIST_EXAMPLES)]
pub struct ListArgs {
    #[command(flatten)]
    source: SourceArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

const VM_EXAMPLES: &str = "\
Examples:
  By name, by process id, for programs:
    wideleaf explain web
    wideleaf explain 4711
    wideleaf explain web --format json";

/// Arguments of `wideleaf explain`.
#[derive(Args, Debug)]
#[command(after_long_help = VM_EXAMPLES)]
pub struct VmArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    #[command(flatten)]
    source: SourceArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

const SET_EXAMPLES: &str = "\
Settings that are not named stay. wideleafd remembers them until they are set again or the VM is detached.

  policy=NAME[:KEY=VALUE,...]   as for `wideleaf run` (`--policy help` lists them), or off: the VM is only observed
  guarantee=bestEffort|95%      share of its present memory to keep in large pages; a lower share is reported
  out-of-reach=1%..100%         largest part of any 100 ms for which memory may be out of the guest's reach while
                                pages change their size; 100%: no limit
  collapse-shared=yes|no        whether to collapse shared memory, which stops the guest for 15 to 30 ms per window,
                                and longer where other work keeps the host's processors
  qmp=PATH                      a QEMU monitor (QMP socket) that has no other client

The last two apply when a guest is attached. To change them now, `wideleaf detach` the guest, and attach it with
--collapse-shared or --qmp.

An empty value (KEY=) unsets a setting: wideleafd's configuration then applies, for the last two from the next time
that the guest is attached.

Examples:
  Promote the most used memory, and report when less than 95 % of it is in large pages:
    wideleaf set web policy=coverage guarantee=95%

  Leave the pages as they are:
    wideleaf set web policy=off

  Use the configuration again:
    wideleaf set web policy= guarantee=";

/// Arguments of `wideleaf set`.
#[derive(Args, Debug)]
#[command(after_long_help = SET_EXAMPLES)]
pub struct SetArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    /// Settings to change; --help lists them
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = Setting::parse)]
    changes: Vec<Setting>,

    #[command(flatten)]
    socket: SocketArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

/// Arguments of `wideleaf detach`.
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    #[command(flatten)]
    socket: SocketArg,
}

/// Arguments of `wideleaf reload`.
#[derive(Args, Debug)]
pub struct ReloadArgs {
    #[command(flatten)]
    socket: SocketArg,
}

const INFO_EXAMPLES: &str = "\
--html writes one page with all of `info` and `explain` and a map of every window. The page is complete in itself, runs
no script, and replaces an existing file once it is whole.

Examples:
  By name, by process id, for programs:
    wideleaf info web
    wideleaf info 4711
    wideleaf info web --format json

  A page for a browser:
    wideleaf info web --html web.html";

/// Arguments of `wideleaf info`.
#[derive(Args, Debug)]
#[command(after_long_help = INFO_EXAMPLES)]
pub struct InfoArgs {
    /// Name, process id or libvirt UUID of the VM, as `wideleaf list` shows them
    #[arg(value_name = "VM")]
    vm: String,

    /// Write a page in HTML with the facts, the reasons and the map of its windows to this file (- for standard output)
    #[arg(long, value_name = "FILE", conflicts_with = "format")]
    html: Option<PathBuf>,

    #[command(flatten)]
    source: SourceArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

/// Runs `wideleaf list`.
///
/// # Errors
/// [`Failure`] of the query, or of the output.
pub fn list(args: &ListArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let report = args.source.source()?.host()?;
    output.write(&report, tables::host)
}

/// Runs `wideleaf info`.
///
/// # Errors
/// [`Failure`] of the query, or of the output.
pub fn info(args: &InfoArgs) -> Result<(), Failure> {
    if let Some(path) = &args.html {
        return write_page(args, path);
    }
    let output = Output::open(args.format, None)?;
    let source = args.source.source()?;
    let vm = source.vm(&args.vm)?;
    output.write(&vm, |vm| tables::vm(vm, source.explanation(&vm.pid.to_string()).ok().as_ref()))
}

/// Writes the page. Its place is tried before the VM is asked.
fn write_page(args: &InfoArgs, path: &Path) -> Result<(), Failure> {
    let place = Place::open("--html", path)?;
    let source = args.source.source()?;
    let vm = source.vm(&args.vm)?;
    // By its process: names need not be unique, and the parts are of one VM.
    let pid = vm.pid.to_string();
    let (explanation, windows) = (source.explanation(&pid), source.windows(&pid));
    place.put(&Page { vm: &vm, explanation: &explanation, windows: &windows }.html())
}

/// Runs `wideleaf explain`.
///
/// # Errors
/// [`Failure`] of the query, or of the output.
pub fn explain(args: &VmArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let explanation = args.source.source()?.explanation(&args.vm)?;
    output.write(&explanation, tables::explanation)
}

/// Runs `wideleaf set`.
///
/// # Errors
/// [`Failure`] of the request, or of the output.
pub fn set(args: &SetArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let mut changes = Settings::default();
    args.changes.iter().try_for_each(|setting| setting.clone().put_into(&mut changes))?;
    let vm = vm_of(args.socket.ask(Request::Set { vm: args.vm.clone(), changes })?)?;
    output.write(&vm, |vm| format!("{}\n", tables::care_line(vm)))
}

/// Runs `wideleaf detach`.
///
/// # Errors
/// [`Failure`] of the request, or of the output.
pub fn detach(args: &DetachArgs) -> Result<(), Failure> {
    done(args.socket.ask(Request::Detach { vm: args.vm.clone() })?)?;
    print(&format!("{} is no longer managed; its pages stay as they are\n", clean(&args.vm)))
}

/// Runs `wideleaf reload`.
///
/// # Errors
/// [`Failure`] of the request, or of the output.
pub fn reload(args: &ReloadArgs) -> Result<(), Failure> {
    done(args.socket.ask(Request::Reload)?)?;
    print("wideleafd has read its configuration again\n")
}
