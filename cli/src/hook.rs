//! `wideleaf hook`: libvirt reports its guests through a script that it runs when a guest starts, has started or is
//! gone.
//!
//! ```text
//!   libvirtd ──▶ /etc/libvirt/hooks/qemu.d/wideleaf ──▶ wideleaf hook run NAME OPERATION … ──▶ wideleafd
//!    waits       the script that `install` writes        reads the XML, asks, never waits long
//!
//!   prepare begin     Prepare { pages of the hugetlb pool }   waits for the answer; may refuse if a guarantee is
//!                                                             requested, and refuses metadata with a mistake
//!   started begin     Started { pid, settings }               does not wait
//!   reconnect begin   the same: libvirtd was restarted, and kills the guest if its hook fails
//!   release end       Release                                 does not wait
//!   anything else     nothing; for `restore` and `migrate` standard output would replace the XML
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | [`call`] | actions when libvirt calls |
//! | [`domain`], [`metadata`], [`xml`] | a domain's request, from its XML |
//! | [`nova`] | the flavor of an OpenStack instance |
//! | `last_caller`, `libvirtd` | the libvirtd that has run the hook |
//! | `journal` | a line in the host's log |
//! | [`script`] | the script: written and removed |
//! | [`status`] | check whether the hook works |
//!
//! libvirt: "Hooks for specific system management" (hooks.html), and the observed behaviour of libvirt 9.0.

pub mod call;
pub mod domain;
mod journal;
mod last_caller;
mod libvirtd;
pub mod metadata;
pub mod nova;
pub mod script;
pub mod status;
pub mod xml;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use wideleaf_control::protocol::SOCKET_PATH;
use wideleaf_run::failure::Failure;

use crate::guests::settings::absolute;
use crate::options::FormatArg;

const EXAMPLES: &str = "\
Examples:
  Show what would be written, write it, check whether libvirtd runs it:
    wideleaf hook install --dry-run
    sudo wideleaf hook install
    wideleaf hook status

  In a domain's XML (virsh edit), its request; all attributes are optional:
    <metadata>
      <wideleaf:memory xmlns:wideleaf='urn:wideleaf:memory:1' policy='auto' guarantee='95%' pool='yes'/>
    </metadata>";

const STATUS_CODES: &str = "\
Exit codes:
   0  the hook is installed, and libvirtd runs it or will when it starts
  10  it is not installed: absent, not executable, or a foreign file is in its place
  11  it is of another version, or for another program or socket
  12  libvirtd started before the hook was installed, and does not run it yet";

/// Arguments of `wideleaf hook`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct HookArgs {
    /// Action on the hook
    #[command(subcommand)]
    command: HookCommand,
}

#[derive(Debug, Subcommand)]
enum HookCommand {
    /// Write the script that libvirt runs; a foreign file is never overwritten
    Install(ChangeArgs),
    /// Remove the script
    Uninstall(ChangeArgs),
    /// Show whether the script is installed and whether the running libvirtd runs it
    #[command(after_help = STATUS_CODES)]
    Status(StatusArgs),
    /// Process a call of the script
    #[command(hide = true)]
    Run(RunArgs),
}

/// Arguments of `install` and `uninstall`.
#[derive(Args, Debug)]
pub struct ChangeArgs {
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    place: Place,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    #[command(flatten)]
    place: Place,
}

#[derive(Args, Debug)]
struct Place {
    /// The folder that holds `etc/` and `proc/`: for tests and packages
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    root: PathBuf,

    /// Socket of the daemon [default: that of the installed script; without one, /run/wideleaf/control.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Place {
    /// libvirtd runs the script in a folder of its own.
    fn absolute_socket(&self) -> Result<Option<PathBuf>, Failure> {
        self.socket.as_deref().map(|path| absolute(path, "--socket")).transpose()
    }
}

/// Arguments of `run`: those that libvirt passes to a hook. The domain's XML is on standard input.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Socket of the daemon
    #[arg(long, value_name = "PATH", default_value = SOCKET_PATH)]
    pub socket: PathBuf,

    /// The folder that holds `dev/`, `proc/` and `run/`
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,

    /// Name of the domain
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Event of the domain
    #[arg(value_name = "OPERATION")]
    pub operation: String,

    /// Further arguments of libvirt, now or in other versions
    #[arg(value_name = "MORE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub more: Vec<OsString>,
}

/// Runs the subcommand `hook`.
///
/// # Errors
/// [`Failure::Host`] if libvirt is absent, a script is foreign, or a guest must not start.
pub fn main(args: &HookArgs) -> Result<(), Failure> {
    match &args.command {
        HookCommand::Install(args) => {
            script::install(&args.place.root, args.place.absolute_socket()?.as_deref(), args.dry_run)
        }
        HookCommand::Uninstall(args) => script::uninstall(&args.place.root, args.dry_run),
        HookCommand::Status(args) => {
            status::main(&args.place.root, args.place.absolute_socket()?.as_deref(), args.format)
        }
        HookCommand::Run(args) => call::main(args),
    }
}
