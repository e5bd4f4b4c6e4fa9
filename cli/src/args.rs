//! The command line: its commands and exit codes. Each command's module has its arguments. Parsing starts nothing on
//! the machine and opens no file, so that `--help` and every message about a wrong argument work anywhere.

use clap::{Parser, Subcommand};

use crate::attach::AttachArgs;
use crate::demo::DemoArgs;
use crate::doctor::DoctorArgs;
use crate::guardian::giant_pages::MakeGiantPagesArgs;
use crate::guardian::path::HoldPathArgs;
use crate::guardian::pool::HoldPoolArgs;
use crate::guests::{DetachArgs, InfoArgs, ListArgs, ReloadArgs, SetArgs, VmArgs};
use crate::hook::HookArgs;
use crate::kernels::KernelsArgs;
use crate::manual::{CompletionsArgs, ManArgs};
use crate::pool::args::PoolArgs;
use crate::run::args::RunArgs;
use crate::tlbcost::TlbCostArgs;
use crate::top::TopArgs;
use crate::vm::VmSocketArgs;

/// Run guests and manage the page sizes of their memory while they run.
#[derive(Debug, Parser)]
#[command(name = "wideleaf", version, max_term_width = 110, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// Command to run
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
First steps:
  wideleaf doctor       what this host can do
  wideleaf demo         what live promotion is worth here
  wideleaf run --help   all about one run, with examples
  wideleaf kernels      the built-in kernels, their classes and the memory they need
  wideleaf pool list    the hugetlb pools and the processes that use their pages

Exit codes:
    0  done, and the guest verified its memory; or stopped over the control socket or with Ctrl-A x
    1  the guest found a wrong word or result, or reported a failure
    2  an argument is invalid, or wideleafd refuses the request
    3  the image, the initrd, the configuration or the recording cannot be used
    4  the host lacks something: KVM, a hugetlb page, memory, wideleafd
    5  the guest crashed: triple fault, panic, or an instruction that KVM could not run
    6  the guest did not end within --timeout
    7  the run ended by itself, but its result or recording could not be written
   10  `hook status`: the hook is not installed
   11  `hook status`: the installed hook is of another version, or for another program or socket
   12  `hook status`: libvirtd does not run the hook yet
  130  interrupted (Ctrl-C, SIGTERM); a second signal ends the program at once, without a report

With the exit codes 1, 5, 6 and 130, `wideleaf run` still writes its whole report, which says how the run ended.
It writes none if the guest did not begin or refused its arguments.

Environment:
    WIDELEAF_LOG  log filter for standard error, for example `debug` or `wideleaf_memory=trace`";

/// Subcommands of `wideleaf`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a benchmark kernel, a guest image or a Linux kernel under a memory policy
    Run(Box<RunArgs>),
    /// Demonstrate live promotion: GUPS on base pages, promoted while it runs, and on huge pages from the start
    Demo(DemoArgs),
    /// List the built-in kernels: classes, memory, parameters, and the main figure of a run
    Kernels(KernelsArgs),
    /// Show what this host can do for guests and their pages, and the reason for each missing feature
    Doctor(DoctorArgs),
    /// Measure the cost of a TLB miss on this host, and estimate the gain of 2 MiB pages
    #[command(name = "tlbcost")]
    TlbCost(TlbCostArgs),
    /// List all VMs of this host: what backs their RAM, and which manager they have
    List(ListArgs),
    /// Show all details of one VM
    Info(InfoArgs),
    /// Explain why windows of a VM are not in large pages, and what would change it
    Explain(VmArgs),
    /// Change the policy or the guarantee of a VM that wideleafd manages
    Set(SetArgs),
    /// Pause, resume, stop or query one VM over the control socket of its `wideleaf run`
    Vm(VmSocketArgs),
    /// Put an external guest (started by another program) under wideleafd's management
    Attach(AttachArgs),
    /// Stop managing a VM: wideleafd leaves its pages as they are
    Detach(DetachArgs),
    /// Make wideleafd read its configuration again
    Reload(ReloadArgs),
    /// Watch the VMs of this host: coverage, the map of one VM's memory, promotions as they happen
    Top(TopArgs),
    /// Install, remove or check the hook with which libvirt reports its guests to wideleafd
    Hook(HookArgs),
    /// Show the hugetlb pools and the users of their pages; make a pool larger, or smaller by its free pages
    Pool(PoolArgs),
    /// Print the completion script of a shell: wideleaf completions bash > /etc/bash_completion.d/wideleaf
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder (used by packages)
    #[command(hide = true)]
    Man(ManArgs),
    /// Hold pages of the hugetlb pool until standard input ends; a demo starts this, so that the pool is restored
    /// in any case
    #[command(hide = true)]
    HoldPool(HoldPoolArgs),
    /// Remove a cgroup when standard input ends; a run in a new cgroup starts this, so that none is left behind
    #[command(hide = true)]
    HoldPath(HoldPathArgs),
    /// Make pages of 1 GiB for a run until standard input ends; a run with --make-giant-pages starts this, because its
    /// sandbox lets it change no pool
    #[command(hide = true)]
    MakeGiantPages(MakeGiantPagesArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
