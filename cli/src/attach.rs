//! `wideleaf attach`: puts an external guest under wideleafd's management, or manages it itself while it runs.
//!
//! ```text
//!   --dry-run ──────────────────────────────▶ what would be done, a line each
//!   --foreground, or no daemon is there ────▶ the manager, in this process until Ctrl-C or the guest's end
//!   else ───────────────────────────────────▶ the daemon
//! ```

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Args;
use wideleaf_attach::find;
use wideleaf_attach::session::{self, Attached};
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::protocol::{Request, Settings, Target};
use wideleaf_control::view::Guarantee;
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::PolicyChoice;
use wideleaf_run::engine::walk_cost;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::policy_switch::OFF;
use wideleaf_run::text::clean;

use crate::guests::settings::{PolicyOrOff, absolute, parse_path};
use crate::guests::tables;
use crate::options::FormatArg;
use crate::output::{Output, say};
use crate::vm_source::{SocketArg, too_late, vm_of};

/// Interval at which a guest that is managed from here is checked for its end, and this process for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Policy of a guest if neither the user nor a daemon chooses one.
const DEFAULT_POLICY: &str = "auto";

const ATTACH_EXAMPLES: &str = "\
The guest runs on; nothing in it or in its VMM has to change. `wideleaf detach` ends the management. Without a daemon,
and with --foreground, this command manages the guest itself until Ctrl-C (exit code 130) or until the guest ends,
and then shows its actions.

Examples:
  Show what would be done:
    wideleaf attach web --dry-run

  A libvirt domain, under the policy that wideleafd's configuration names:
    wideleaf attach web

  A process, only observed:
    wideleaf attach 4711 --policy off

  The guest behind a QEMU monitor, which is then also asked for the exact RAM map:
    wideleaf attach --qmp /run/web.qmp --policy coverage --guarantee 95%";

/// Arguments of `wideleaf attach`.
#[derive(Args, Debug)]
#[command(after_long_help = ATTACH_EXAMPLES)]
pub struct AttachArgs {
    /// Process id of the VMM, or name or UUID of a libvirt domain
    #[arg(value_name = "PID|DOMAIN", required_unless_present = "qmp")]
    target: Option<String>,

    /// QEMU monitor (QMP socket) that has no other client: it names the guest, or gives details of the guest that
    /// is named
    #[arg(long, value_name = "SOCKET", value_parser = parse_path)]
    qmp: Option<PathBuf>,

    /// Policy as for `wideleaf run`, or `off` to only observe the guest [default: from wideleafd's configuration,
    /// else auto]
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]", value_parser = PolicyOrOff::parse)]
    policy: Option<PolicyOrOff>,

    /// Share of the guest's present memory to keep in large pages, or bestEffort; a lower share is reported
    /// [default: from wideleafd's configuration]
    #[arg(long, value_name = "SHARE")]
    guarantee: Option<Guarantee>,

    /// Largest part of any 100 ms for which memory may be out of the guest's reach while pages change their size, from
    /// 1% to 100% (no limit) [default: from wideleafd's configuration, else 30%]
    #[arg(long, value_name = "PERCENT")]
    out_of_reach: Option<OutOfReach>,

    /// Also collapse shared memory, which stops the guest for 15 to 30 ms per window, and longer where other work keeps
    /// the host's processors
    #[arg(long)]
    collapse_shared: bool,

    /// Show what would be done; change nothing
    #[arg(long, conflicts_with = "foreground")]
    dry_run: bool,

    /// Manage the guest from this command, even if a daemon listens
    #[arg(long)]
    foreground: bool,

    #[command(flatten)]
    socket: SocketArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
}

impl AttachArgs {
    /// The request to the daemon.
    ///
    /// # Errors
    /// [`Failure::Usage`] if a file that the policy names cannot be used, or no guest is named.
    fn request(&self) -> Result<AttachRequest, Failure> {
        let settings = Settings {
            policy: self.policy.as_ref().map(|policy| policy.read("--policy")).transpose()?,
            guarantee: self.guarantee.map(|guarantee| guarantee.to_string()),
            out_of_reach: self.out_of_reach.map(|part| part.to_string()),
            collapse_shared: self.collapse_shared.then_some(true),
            qmp: self.qmp.as_deref().map(|path| absolute(path, "--qmp")).transpose()?,
            ..Settings::default()
        };
        // A number is a process id. If a domain's name is a number, its UUID names it.
        let target = match (&self.target, &settings.qmp) {
            (Some(text), _) => text.parse().map_or_else(|_| Target::Domain(text.clone()), Target::Pid),
            (None, Some(path)) => Target::Qmp(path.clone()),
            (None, None) => {
                let why = "cannot attach: no guest is named; name a process, a libvirt domain or --qmp SOCKET";
                return Err(Failure::Usage(why.into()));
            }
        };
        let (guarantee, out_of_reach) = (self.guarantee.unwrap_or_default(), self.out_of_reach.unwrap_or_default());
        Ok(AttachRequest { target, settings, guarantee, out_of_reach })
    }
}

/// A guest, and how it is to be managed: by the daemon, or in the same way by this process.
struct AttachRequest {
    target: Target,
    settings: Settings,
    guarantee: Guarantee,
    out_of_reach: OutOfReach,
}

impl AttachRequest {
    fn guest(&self) -> Result<VmProcess, Failure> {
        Ok(find::resolve(&Places::default(), &self.target)?)
    }

    /// Checks that nothing is asked for that only wideleafd can do.
    fn check_without_daemon(&self) -> Result<(), Failure> {
        let Some(_) = self.guarantee.share() else { return Ok(()) };
        Err(Failure::Usage(format!(
            "cannot keep a guarantee of {} without wideleafd: start it, or omit --guarantee",
            self.guarantee
        )))
    }

    /// The same settings for a manager in this process.
    fn session(&self) -> Result<session::Settings, Failure> {
        let policy = match self.settings.policy.as_deref().unwrap_or(DEFAULT_POLICY) {
            OFF => None,
            text => Some(PolicyChoice::parse(text).map_err(|error| Failure::Usage(error.to_string()))?),
        };
        Ok(session::Settings {
            policy,
            may_collapse_shared: self.settings.collapse_shared.unwrap_or(false),
            qmp: self.settings.qmp.clone(),
            out_of_reach: self.out_of_reach,
            walk: walk_cost().cost,
            ..session::Settings::default()
        })
    }
}

/// Runs the subcommand `attach`.
///
/// # Errors
/// [`Failure`] of the request, or of the management.
pub fn main(args: &AttachArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let attach = args.request()?;
    if args.dry_run {
        let plan = session::plan(&attach.guest()?, &attach.session()?)?;
        return output.write(&plan, |lines| lines.iter().map(|line| clean(line) + "\n").collect());
    }
    if args.foreground {
        attach.check_without_daemon()?;
        return manage(&attach, output);
    }
    let request = Request::Attach { target: attach.target.clone(), settings: attach.settings.clone() };
    match args.socket.reply(request) {
        Ok(answer) => output.write(&vm_of(answer)?, |vm| format!("{}\n", tables::care_line(vm))),
        Err(error) if args.socket.may_do_without(&error) => {
            attach.check_without_daemon()?;
            say(format_args!("{error}; until then this command manages the guest"));
            manage(&attach, output)
        }
        Err(error) => Err(too_late(error)),
    }
}

/// Manages the guest until it ends or the user interrupts, then shows the manager's actions.
fn manage(attach: &AttachRequest, output: Output) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?;
    let attached = Attached::start(attach.guest()?, attach.session()?)?;
    say(tables::care_line(&attached.view()));
    while !interrupts.is_set() && !attached.has_ended() {
        thread::sleep(LOOK_EVERY);
    }
    let view = attached.view();
    attached.stop();
    output.write(&view, |view| tables::vm(view, None))?;
    interrupts.check()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::args::{Cli, Command};

    #[test]
    fn a_manager_in_this_process_has_the_part_of_the_time_that_a_daemon_would_be_asked_for() {
        let request =
            |arguments: &[&str]| match Cli::parse_from([&["wideleaf", "attach", "4711"], arguments].concat()).command {
                Command::Attach(args) => args.request().expect("a guest is named"),
                _ => panic!("it is `attach`"),
            };
        let part = |arguments: &[&str]| {
            let asked = request(arguments);
            let here = asked.session().expect("the policy exists").out_of_reach;
            (asked.settings.out_of_reach, here.to_string())
        };
        assert_eq!(part(&["--out-of-reach=12.5%"]), (Some("12.50%".to_owned()), "12.50%".to_owned()));
        assert_eq!(part(&[]), (None, "30%".to_owned()));
    }
}
