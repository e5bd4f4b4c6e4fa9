//! The command line as types. Parsing starts nothing on the machine and opens no file, so that `--help` and every message about a
//! wrong argument work anywhere.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use wideleaf_memory::BackingKind;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::spec::Fallback;

use crate::attach::AttachArgs;
use crate::guests::{DetachArgs, ListArgs, ReloadArgs, SetArgs, VmArgs};
use crate::hook::HookArgs;
use crate::kernels::{self, KernelsArgs};
use crate::options::{FormatArg, parse_duration, parse_some_bytes, parse_timeout};
use crate::policy_arg::{PolicyArg, no_policy};
use crate::run::devices::DeviceArgs;
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
    Info(VmArgs),
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
}

const POOL_EXAMPLES: &str = "\
Examples:
  The pools, by NUMA node, and the users of their pages:
    wideleaf pool list

  8 GiB more in pages of 2 MiB on node 0: first show what would be written, then do it (as root):
    wideleaf pool reserve --size 2m --bytes 8G --node 0 --dry-run
    wideleaf pool reserve --size 2m --bytes 8G --node 0

  Up to 4 giant pages, or as many as are available:
    wideleaf pool reserve --size 1g --pages 4 --at-most

  Give all free pages back to the host:
    wideleaf pool release --size 2m --all-unused

A change stays until it is undone or the machine reboots. To have the pages after every boot, put
`hugepagesz=1G hugepages=N` on the kernel's command line, which is also the most reliable way to get
1 GiB pages. For 2 MiB pages, set vm.nr_hugepages in sysctl.conf.";

/// Arguments of `wideleaf pool`.
#[derive(Args, Debug)]
#[command(after_long_help = POOL_EXAMPLES)]
pub struct PoolArgs {
    /// Action on the pools
    #[command(subcommand)]
    pub command: PoolCommand,
}

/// Subcommands of `wideleaf pool`.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Show the pools by size and NUMA node, the processes that use their pages, and the hugetlbfs mounts
    List(PoolListArgs),
    /// Make a pool larger by a number of free pages: all of them or none
    Reserve(PoolReserveArgs),
    /// Make a pool smaller, by free pages that are not reserved
    Release(PoolReleaseArgs),
}

/// Arguments of `wideleaf pool list`.
#[derive(Args, Debug)]
pub struct PoolListArgs {
    /// Only the pool of this page size
    #[arg(long, value_name = "2m|1g", value_parser = parse_pool_size)]
    pub size: Option<PageSize>,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// The folder that holds `sys/` and `proc/`
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,
}

/// Arguments of `wideleaf pool reserve`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("amount").required(true), after_long_help = POOL_EXAMPLES)]
pub struct PoolReserveArgs {
    /// Pool to change, and how
    #[command(flatten)]
    pub change: PoolChangeArgs,

    /// Number of pages
    #[arg(long, value_name = "N", group = "amount", value_parser = clap::value_parser!(u64).range(1..))]
    pub pages: Option<u64>,

    /// Amount of memory, rounded up to whole pages: a number with K, M, G or T (powers of 1024), or bytes
    #[arg(long, value_name = "SIZE", group = "amount", value_parser = parse_some_bytes)]
    pub bytes: Option<Bytes>,

    /// If free memory does not suffice, take as many pages as possible, at least one
    #[arg(long)]
    pub at_most: bool,
}

/// Arguments of `wideleaf pool release`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("amount").required(true), after_long_help = POOL_EXAMPLES)]
pub struct PoolReleaseArgs {
    /// Pool to change, and how
    #[command(flatten)]
    pub change: PoolChangeArgs,

    /// Number of pages
    #[arg(long, value_name = "N", group = "amount", value_parser = clap::value_parser!(u64).range(1..))]
    pub pages: Option<u64>,

    /// All free pages, except those that wideleafd keeps for a domain that is about to start
    #[arg(long, group = "amount")]
    pub all_unused: bool,

    /// Socket of wideleafd, which knows the pages that are kept [default: /run/wideleaf/control.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Arguments that `reserve` and `release` share.
#[derive(Args, Debug)]
pub struct PoolChangeArgs {
    /// Page size of the pool
    #[arg(long, value_name = "2m|1g", value_parser = parse_pool_size)]
    pub size: PageSize,

    /// Only on this NUMA node [default: wherever the kernel finds pages]
    #[arg(long, value_name = "K")]
    pub node: Option<u32>,

    /// Show what would be written where, and what it requires; write nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// The folder that holds `sys/` and `proc/`
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,
}

/// Arguments of `wideleaf completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to complete for
    pub shell: clap_complete::Shell,
}

/// Arguments of `wideleaf man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder to write to
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Arguments of the child that holds the pool for a demo.
#[derive(Debug, Args)]
pub struct HoldPoolArgs {
    /// Number of 2 MiB pages
    #[arg(long, value_name = "N")]
    pub pages: u64,

    /// The folder that holds `sys/`
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub root: PathBuf,
}

/// Arguments of the child that removes a run's cgroup or socket.
#[derive(Debug, Args)]
pub struct HoldPathArgs {
    /// An empty folder (for example a cgroup) or a socket
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
}

const RUN_EXAMPLES: &str = "\
Examples:
  GUPS in a guest: RAM starts on base pages and is promoted while the guest runs, if that pays off:
    wideleaf run gups --memory 1G --cmdline 'log2_words=26'

  The same kernel in a process instead of a guest, never promoted:
    wideleaf run --native gups --memory 1G --cmdline 'log2_words=26' --policy never

  A disk of 1 GiB that the guest writes, and random bytes:
    truncate -s 1G disk.img
    wideleaf run vmlinux --initrd initrd --disk disk.img --rng

  Two vCPUs that check every word of their RAM for 30 seconds, on the hugetlb pool, as JSON:
    wideleaf run pattern --vcpus 2 --cmdline 'seconds=30' --backing hugetlb --host-page 2m --format json

  NPB CG of class B on two vCPUs, in as much RAM as it needs:
    wideleaf run npb.cg --class B --vcpus 2

  As another user, in an empty folder as root directory (as root):
    wideleaf run gups --user nobody --jail /var/empty --no-daemon

  A Linux kernel with an initrd:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --cmdline 'console=ttyS0 panic=-1' --timeout 2m

  The same, with `reboot` in the guest rebooting it:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --cmdline 'console=ttyS0' --on-reset restart --console

  The same options in a file, and run from it with more memory:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --print-config > vm.toml
    wideleaf run --config vm.toml --memory 1G

  Its serial port on this terminal:
    wideleaf run --config vm.toml --cmdline 'console=ttyS0' --console";

/// End of `wideleaf run --help`: the built-in kernels, from the table that runs them, and examples.
fn after_run_help() -> String {
    let title = "Built-in kernels, with the memory they need by class; `wideleaf kernels NAME` shows their parameters:";
    format!("{title}\n{}\n{RUN_EXAMPLES}", kernels::one_line_each())
}

/// Arguments of `wideleaf run`.
#[derive(Args, Debug)]
#[command(after_long_help = after_run_help())]
pub struct RunArgs {
    /// A built-in kernel (--help lists them), or a file: an ELF image with a PVH entry, a bzImage or a vmlinux
    // Optional only for `--policy help`, and with --config, because the file may name it.
    #[arg(value_name = "KERNEL|IMAGE", required_unless_present_any = ["policy", "config"])]
    pub workload: Option<String>,

    /// Read options from this TOML file: a key for each long option, `workload` for the kernel or image. Options on
    /// the command line win. Paths in the file are relative to its folder
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print these options as a file for --config, and exit
    #[arg(long)]
    pub print_config: bool,

    /// Text that --print-config prints.
    #[arg(skip)]
    pub effective: Option<String>,

    /// Run the built-in kernel in this process instead of in a guest: the baseline, without second-level page tables
    #[arg(long)]
    pub native: bool,

    /// The guest's command line; for a built-in kernel its parameters, for example `log2_words=25`
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub cmdline: String,

    /// Problem size, for kernels that have classes; the same as class= in --cmdline
    #[arg(long, value_name = "LETTER")]
    pub class: Option<String>,

    /// Initial RAM disk for a Linux kernel
    #[arg(long, value_name = "FILE", conflicts_with = "native")]
    pub initrd: Option<PathBuf>,

    /// Devices of the guest
    #[command(flatten)]
    pub devices: DeviceArgs,

    /// Guest RAM, in whole pages: a number with K, M, G or T (powers of 1024), or bytes [default: 1G, or the need
    /// of the built-in kernel if that is more]
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    pub memory: Option<Bytes>,

    /// Number of virtual CPUs; with --native, of threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vcpus: u8,

    /// Memory that backs guest RAM [default: anon; with --policy reservation memfd]
    #[arg(long, value_enum)]
    pub backing: Option<BackingArg>,

    /// Size of the host pages that back RAM at the start [default: 4k; with --backing hugetlb 2m]
    #[arg(long, value_name = "4k|2m|1g", value_parser = PageSize::parse)]
    pub host_page: Option<PageSize>,

    /// Page size of the guest's own page tables, for images that support the choice
    #[arg(long, value_name = "4k|2m|1g", default_value = "2m", value_parser = PageSize::parse, conflicts_with = "native")]
    pub guest_page: PageSize,

    /// Policy that chooses which windows (2 MiB of guest RAM) become large pages, and when. `--policy help` lists
    /// the policies and their parameters; @FILE as a value reads it from a file [default: auto; with --backing
    /// hugetlb pages do not change: never]
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]", value_parser = parse_policy)]
    pub policy: Option<PolicyOrHelp>,

    /// Delay of the policy's first action after the guest's timed part has begun: a number of seconds, or one with
    /// ms, s, m or h [default: the policy may act from the guest's start]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub policy_delay: Option<Duration>,

    /// Fault in all guest RAM before the guest starts
    #[arg(long)]
    pub prefault: bool,

    /// Action when the hugetlb pool is too small: fail, or use transparent huge pages instead
    #[arg(long, value_enum, default_value = "fail")]
    pub fallback: FallbackArg,

    /// Connect the guest's serial port to this terminal, or to standard input and output if they are no terminal.
    /// Ctrl-A x stops the VM, Ctrl-A h shows help. The result goes to standard error, or to --output. Without
    /// --console, the guest's lines other than results go to standard error
    #[arg(long, conflicts_with = "native")]
    pub console: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Also show in the table the policies' counters of their own decisions, and the assumed cost of a TLB miss;
    /// JSON always has both
    #[arg(long, short)]
    pub verbose: bool,

    /// Record to this file the manager's observations, plans and actions, for `wideleaf-lab simulate`; the file is kept
    /// even if the run fails
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,

    /// Register the guest with the wideleafd at this socket, which lists it and gives it a share of its budget. If
    /// no daemon listens, the run manages the guest alone until one does [default: /run/wideleaf/control.sock]
    #[arg(long, value_name = "SOCKET", conflicts_with = "native")]
    pub daemon: Option<PathBuf>,

    /// Do not register the guest with wideleafd: for measurements, which must not share a budget with other guests
    #[arg(long, conflicts_with = "daemon")]
    pub no_daemon: bool,

    /// Socket over which programs pause, resume, stop or query this VM: `wideleaf vm SOCKET status`. Only the user
    /// that runs the VM, and root, may connect. The file is removed at the end
    #[arg(long, value_name = "SOCKET", conflicts_with = "native")]
    pub control_socket: Option<PathBuf>,

    /// Stop the guest after this time, with its report and exit code 6: a number of seconds, or one with ms, s, m
    /// or h [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
    pub timeout: Option<Duration>,

    /// Action when the guest resets: end the run, or boot the same image again in the same memory with the same
    /// devices. Ten resets within a minute end the run, with exit code 5
    #[arg(long, value_enum, default_value = "stop", conflicts_with = "native")]
    pub on_reset: OnResetArg,

    /// Do not restrict this process while the guest runs: a guest that breaks out then has all rights of its user
    #[arg(long, conflicts_with_all = ["native", "user", "jail"])]
    pub no_sandbox: bool,

    /// Refuse to run the guest if this host's kernel cannot fully restrict the process (Landlock, Linux 6.12)
    #[arg(long, conflicts_with_all = ["native", "no_sandbox"])]
    pub require_sandbox: bool,

    /// Become this user before the guest runs: a name or a number, optionally followed by :GROUP; requires root
    #[arg(long, value_name = "USER[:GROUP]", conflicts_with = "native")]
    pub user: Option<String>,

    /// Make this empty folder the root directory before the guest runs, without network; the process then sees only
    /// what the run needs; requires root
    #[arg(long, value_name = "FOLDER", conflicts_with = "native")]
    pub jail: Option<PathBuf>,

    /// Run in this cgroup (v2), a path below the cgroup mount; a new cgroup is removed at the end
    #[arg(long, value_name = "PATH", conflicts_with = "native")]
    pub cgroup: Option<PathBuf>,
}

/// Argument of `--on-reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnResetArg {
    /// The run ends, with the report
    Stop,
    /// The guest boots again
    Restart,
}

const DEMO_EXAMPLES: &str = "\
Examples:
  In guests if /dev/kvm is usable, otherwise natively:
    wideleaf demo

  A table of 1 GiB, natively in any case:
    wideleaf demo --log2-words 27 --native

  The whole report of every run, for programs:
    wideleaf demo --rounds 9 --format json --output demo.json";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  What is available, and what replaces the rest:
    wideleaf doctor

  Whether KVM maps guests as expected; exit code 1 if it does not:
    wideleaf doctor --mappings

  The same, for programs:
    wideleaf doctor --mappings --format json";

/// Arguments of `wideleaf demo`.
#[derive(Args, Debug)]
#[command(after_long_help = DEMO_EXAMPLES)]
pub struct DemoArgs {
    /// Size of the table: 2^N words of 8 bytes (25 is 256 MiB). Each run has 256 MiB of RAM more than its table
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = clap::value_parser!(u8).range(20..=30))]
    pub log2_words: u8,

    /// Number of runs of each arm (a way to back RAM); the arms take turns, and a run takes some seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Run natively even if /dev/kvm is usable
    #[arg(long)]
    pub native: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `wideleaf doctor`.
#[derive(Args, Debug)]
#[command(after_long_help = DOCTOR_EXAMPLES)]
pub struct DoctorArgs {
    /// Also run small guests and compare KVM's mapping counters with the expected ones (needs KVM, half a minute)
    #[arg(long)]
    pub mappings: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// Argument of `--backing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackingArg {
    /// Private anonymous memory
    Anon,
    /// Shared memory of a memfd
    Memfd,
    /// Pages of the hugetlb pool
    Hugetlb,
}

impl From<BackingArg> for BackingKind {
    fn from(arg: BackingArg) -> BackingKind {
        match arg {
            BackingArg::Anon => BackingKind::Anon,
            BackingArg::Memfd => BackingKind::Memfd,
            BackingArg::Hugetlb => BackingKind::Hugetlb,
        }
    }
}

/// Argument of `--fallback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FallbackArg {
    /// Refuse to start
    Fail,
    /// Use anonymous memory that starts with transparent huge pages
    Thp,
}

impl From<FallbackArg> for Fallback {
    fn from(arg: FallbackArg) -> Fallback {
        match arg {
            FallbackArg::Fail => Fallback::Fail,
            FallbackArg::Thp => Fallback::Thp,
        }
    }
}

/// Argument of `--policy`.
#[derive(Clone, Debug)]
pub enum PolicyOrHelp {
    /// List the policies and exit.
    Help,
    /// Use this policy.
    Use(PolicyArg),
}

fn parse_policy(text: &str) -> Result<PolicyOrHelp, String> {
    match text {
        "help" => Ok(PolicyOrHelp::Help),
        text => PolicyArg::parse(text).map(PolicyOrHelp::Use).map_err(|error| no_policy(&error)),
    }
}

/// As [`PageSize::parse`], without base pages, which have no pool.
fn parse_pool_size(text: &str) -> Result<PageSize, &'static str> {
    match PageSize::parse(text) {
        Ok(size @ (PageSize::Huge2M | PageSize::Giant1G)) => Ok(size),
        _ => Err("the hugetlb pools have pages of two sizes: write 2m or 1g"),
    }
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
