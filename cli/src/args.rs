//! What a person types, as types. Nothing here touches the machine, so `--help` and every message about a wrong
//! argument work anywhere.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use wideleaf_memory::BackingKind;
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice, PolicyError};

use crate::attach::AttachArgs;
use crate::guests::{DetachArgs, ListArgs, ReloadArgs, SetArgs, VmArgs};
use crate::hook::HookArgs;
use crate::kernels;
use crate::run::devices::DeviceArgs;
use crate::suggest::did_you_mean;
use crate::tlbcost::TlbCostArgs;
use crate::top::TopArgs;
use crate::vm::VmSocketArgs;

/// Runs guests whose pages grow under them.
#[derive(Debug, Parser)]
#[command(name = "wideleaf", version, max_term_width = 110, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
First steps:
  wideleaf doctor       what this host can do
  wideleaf demo         what live promotion is worth here
  wideleaf run --help   all about one run, with examples
  wideleaf kernels      the built-in kernels, their classes and the memory they need
  wideleaf pool list    the hugetlb pools and who has their pages

Exit codes:
    0  done, and the guest verified its memory; or it was stopped over its control socket or by Ctrl-A x
    1  the guest found a wrong word or result, or said that it failed
    2  an argument makes no sense, or wideleafd refuses what was asked
    3  the image, the initrd, the configuration or the recording can not be used
    4  the host lacks something: KVM, a hugetlb page, memory, wideleafd
    5  the guest crashed: triple fault, panic, an instruction KVM could not run
    6  the guest did not end within --timeout
    7  the result or the recording could not be written, of a run that ended by itself
   10  `hook status`: the hook is not installed
   11  `hook status`: the hook is of another version, or for another program or socket
   12  `hook status`: libvirtd does not run the hook yet
  130  interrupted (Ctrl-C, SIGTERM); a second one ends it at once, without a report

`wideleaf run` writes its whole report also where it ends with 1, 5, 6 or 130, with how it ended; not where its
guest did not begin or refused its arguments.

Environment:
    WIDELEAF_LOG  what to log on standard error, for instance `debug` or `wideleaf_memory=trace`";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a benchmark kernel, a guest image or a Linux kernel under a memory policy
    Run(Box<RunArgs>),
    /// Show what live promotion does: GUPS on base pages, promoted while it runs, and on huge pages from the start
    Demo(DemoArgs),
    /// Show the built-in kernels: classes, memory, parameters, the figure that stands for a run
    Kernels(KernelsArgs),
    /// Show what this host can do for guests and their pages, and why not
    Doctor(DoctorArgs),
    /// Measure what a TLB miss costs here, and what 2 MiB pages would gain by that
    #[command(name = "tlbcost")]
    TlbCost(TlbCostArgs),
    /// Show all VMs of this host: what backs their RAM, who looks after it
    List(ListArgs),
    /// Show all about one VM
    Info(VmArgs),
    /// Show why windows of a VM are not in large pages, and what would change it
    Explain(VmArgs),
    /// Change the policy or the guarantee of a VM that wideleafd manages
    Set(SetArgs),
    /// Pause, resume, stop or ask one VM over the control socket of its `wideleaf run`
    Vm(VmSocketArgs),
    /// Put a guest that somebody else started under wideleafd's management
    Attach(AttachArgs),
    /// Leave a VM to itself: wideleafd does nothing more for it
    Detach(DetachArgs),
    /// Let wideleafd read its configuration again
    Reload(ReloadArgs),
    /// Watch the VMs of this host: coverage, the map of one's memory, promotions as they happen
    Top(TopArgs),
    /// Let libvirt tell wideleafd of its guests: install the hook, take it away, see whether it works
    Hook(HookArgs),
    /// Show the hugetlb pools and who has their pages; make one larger, or smaller by pages that nobody has
    Pool(PoolArgs),
    /// Print what a shell completes: wideleaf completions bash > /etc/bash_completion.d/wideleaf
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder: what a package does
    #[command(hide = true)]
    Man(ManArgs),
    /// Hold room in the hugetlb pool until standard input ends: what a demo starts, so that it cannot keep it
    #[command(hide = true)]
    HoldPool(HoldPoolArgs),
    /// Remove a cgroup when standard input ends: what a run in a new one starts, so that it cannot leave it behind
    #[command(hide = true)]
    HoldPath(HoldPathArgs),
}

const POOL_EXAMPLES: &str = "\
Examples:
  What there is, on which NUMA node, and who has it:
    wideleaf pool list

  8 GiB more in pages of 2 MiB on node 0: what would be written and what it takes, then the same for good (as root):
    wideleaf pool reserve --size 2m --bytes 8G --node 0 --dry-run
    wideleaf pool reserve --size 2m --bytes 8G --node 0

  As many of 4 giant pages as there are:
    wideleaf pool reserve --size 1g --pages 4 --at-most

  All that nobody has, back to the host:
    wideleaf pool release --size 2m --all-unused

A change stays until it is undone or the machine boots. For every boot: `hugepagesz=1G hugepages=N` on the kernel's command
line, which is also the surest way to 1 GiB pages; vm.nr_hugepages in sysctl.conf for 2 MiB pages.";

/// `wideleaf pool`.
#[derive(Args, Debug)]
#[command(after_long_help = POOL_EXAMPLES)]
pub struct PoolArgs {
    /// What to do with them.
    #[command(subcommand)]
    pub command: PoolCommand,
}

/// The subcommands of `wideleaf pool`.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Show the pools by size and NUMA node, the processes that have pages of them, and where hugetlbfs is mounted
    List(PoolListArgs),
    /// Make a pool larger, so that nobody has so many pages more: all of them or none
    Reserve(PoolReserveArgs),
    /// Make a pool smaller, by pages that nobody has and that are promised to nobody
    Release(PoolReleaseArgs),
}

/// `wideleaf pool list`.
#[derive(Args, Debug)]
pub struct PoolListArgs {
    /// Only the pool of this page size
    #[arg(long, value_name = "2m|1g", value_parser = parse_pool_size)]
    pub size: Option<PageSize>,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// The folder that holds `sys/` and `proc/`
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,
}

/// `wideleaf pool reserve`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("amount").required(true), after_long_help = POOL_EXAMPLES)]
pub struct PoolReserveArgs {
    /// Which pool, and whether it is tried
    #[command(flatten)]
    pub change: PoolChangeArgs,

    /// How many pages
    #[arg(long, value_name = "N", group = "amount", value_parser = clap::value_parser!(u64).range(1..))]
    pub pages: Option<u64>,

    /// How much memory, in whole pages (rounded up): a number with K, M, G or T behind it (powers of 1024), or bytes
    #[arg(long, value_name = "SIZE", group = "amount", value_parser = parse_some_bytes)]
    pub bytes: Option<Bytes>,

    /// Take as many as can be made of free memory, where these are fewer; at least one
    #[arg(long)]
    pub at_most: bool,
}

/// `wideleaf pool release`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("amount").required(true), after_long_help = POOL_EXAMPLES)]
pub struct PoolReleaseArgs {
    /// Which pool, and whether it is tried
    #[command(flatten)]
    pub change: PoolChangeArgs,

    /// How many pages
    #[arg(long, value_name = "N", group = "amount", value_parser = clap::value_parser!(u64).range(1..))]
    pub pages: Option<u64>,

    /// All pages that nobody has, and that are kept for no domain that is about to start
    #[arg(long, group = "amount")]
    pub all_unused: bool,

    /// Where wideleafd listens, which knows what is kept [default: /run/wideleaf/control.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// What both ways to change a pool have in common.
#[derive(Args, Debug)]
pub struct PoolChangeArgs {
    /// Page size of the pool
    #[arg(long, value_name = "2m|1g", value_parser = parse_pool_size)]
    pub size: PageSize,

    /// Only on this NUMA node [default: wherever the kernel finds pages]
    #[arg(long, value_name = "K")]
    pub node: Option<u32>,

    /// Say what would be written where, and what it takes; write nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// The folder that holds `sys/` and `proc/`
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,
}

/// `wideleaf completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// `wideleaf man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Where to
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Arguments of what holds the pool for a demo.
#[derive(Debug, Args)]
pub struct HoldPoolArgs {
    /// Pages of 2 MiB
    #[arg(long, value_name = "N")]
    pub pages: u64,

    /// The folder that holds `sys/`
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub root: PathBuf,
}

/// Arguments of what removes a run's cgroup.
#[derive(Debug, Args)]
pub struct HoldPathArgs {
    /// An empty folder, a cgroup's say, or a socket
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
}

const RUN_EXAMPLES: &str = "\
Examples:
  GUPS in a guest whose RAM starts on base pages and is promoted while it runs, where that pays:
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

  As another user, who sees an empty folder and nothing else (as root):
    wideleaf run gups --user nobody --jail /var/empty --no-daemon

  A Linux kernel with an initrd:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --cmdline 'console=ttyS0 panic=-1' --timeout 2m

  The same, and `reboot` in the guest reboots it:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --cmdline 'console=ttyS0' --on-reset restart --console

  The same options in a file, and run from it with more memory:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 512M --print-config > vm.toml
    wideleaf run --config vm.toml --memory 1G

  Its serial port on this terminal:
    wideleaf run --config vm.toml --cmdline 'console=ttyS0' --console";

/// What `wideleaf run --help` ends with: the built-in kernels, from the table that runs them, and examples.
fn after_run_help() -> String {
    let title = "Built-in kernels, with the memory they need by class; `wideleaf kernels NAME` has their parameters:";
    format!("{title}\n{}\n{RUN_EXAMPLES}", kernels::one_line_each())
}

/// `wideleaf run`.
#[derive(Args, Debug)]
#[command(after_long_help = after_run_help())]
pub struct RunArgs {
    /// A built-in kernel (--help lists them), or a file: an ELF image with a PVH entry, a bzImage or a vmlinux
    // Optional only for `--policy help`, and where a file may say it.
    #[arg(value_name = "KERNEL|IMAGE", required_unless_present_any = ["policy", "config"])]
    pub workload: Option<String>,

    /// Take options from this TOML file: a key for each long option, `workload` for what runs; those typed here win. Paths in it begin at
    /// its folder
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print these options as a file for --config, and end
    #[arg(long)]
    pub print_config: bool,

    /// What --print-config prints.
    #[arg(skip)]
    pub effective: Option<String>,

    /// Run the built-in kernel in this process instead of in a guest: the baseline, without a guest's second page tables
    #[arg(long)]
    pub native: bool,

    /// The guest's command line; for a built-in kernel its parameters, like `log2_words=25`
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub cmdline: String,

    /// Size of the problem, for kernels that have classes; the same as class= in --cmdline
    #[arg(long, value_name = "LETTER")]
    pub class: Option<String>,

    /// Initial RAM disk for a Linux kernel
    #[arg(long, value_name = "FILE", conflicts_with = "native")]
    pub initrd: Option<PathBuf>,

    /// Its devices
    #[command(flatten)]
    pub devices: DeviceArgs,

    /// Guest RAM, whole pages: a number with K, M, G or T behind it (powers of 1024), or bytes [default: 1G, or what the
    /// built-in kernel needs where that is more]
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    pub memory: Option<Bytes>,

    /// Virtual CPUs; native: threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vcpus: u8,

    /// What stands behind guest RAM [default: anon; with --policy reservation memfd]
    #[arg(long, value_enum)]
    pub backing: Option<BackingArg>,

    /// Page size the host backs RAM with at the start [default: 4k; with --backing hugetlb 2m]
    #[arg(long, value_name = "4k|2m|1g", value_parser = PageSize::parse)]
    pub host_page: Option<PageSize>,

    /// Page size of the guest's own page tables, for images that let it be chosen
    #[arg(long, value_name = "4k|2m|1g", default_value = "2m", value_parser = PageSize::parse, conflicts_with = "native")]
    pub guest_page: PageSize,

    /// Which windows (2 MiB of guest RAM) become large pages, and when; `--policy help` lists the policies and what may
    /// be set of them; @FILE for a value takes it from a file [default: auto; with --backing hugetlb, whose pages stay as they are, never]
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]", value_parser = parse_policy)]
    pub policy: Option<PolicyArg>,

    /// Let the policy act no sooner than this after the guest's timed part has begun: a number of seconds, or one
    /// with ms, s, m or h behind it [default: it may act from the guest's start]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub policy_delay: Option<Duration>,

    /// Fault all guest RAM in before the guest starts
    #[arg(long)]
    pub prefault: bool,

    /// What to do when the hugetlb pool is short: fail, or use transparent huge pages instead
    #[arg(long, value_enum, default_value = "fail")]
    pub fallback: FallbackArg,

    /// Have the guest's serial port on this terminal, or on standard input and output where these are none: Ctrl-A x stops the VM, Ctrl-A h
    /// has help; the result goes to standard error, or to --output. Without it, lines that are no results of a kernel go to standard error
    #[arg(long, conflicts_with = "native")]
    pub console: bool,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result there instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Show in the table too what policies counted of their own decisions, and what a TLB miss counts as; JSON always
    /// has both
    #[arg(long, short)]
    pub verbose: bool,

    /// Record what the manager sees, plans and does there, for `wideleaf simulate`; the file is also there where the run
    /// fails
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,

    /// Tell the wideleafd at this socket of the guest: it is listed, and shares the daemon's budget; where nobody listens, now or
    /// later, the run is on its own [default: /run/wideleaf/control.sock]
    #[arg(long, value_name = "SOCKET", conflicts_with = "native")]
    pub daemon: Option<PathBuf>,

    /// Tell no wideleafd of the guest: for measurements, which another guest's share of the budget must not change
    #[arg(long, conflicts_with = "daemon")]
    pub no_daemon: bool,

    /// Listen there for who wants to pause, resume, stop or ask about this VM: `wideleaf vm SOCKET status`; only the user who runs it,
    /// and root, may. The file is removed at the end
    #[arg(long, value_name = "SOCKET", conflicts_with = "native")]
    pub control_socket: Option<PathBuf>,

    /// End the guest after this time, with its report and exit code 6: a number of seconds, or one with ms, s, m or h
    /// behind it [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
    pub timeout: Option<Duration>,

    /// What a guest's reset leads to: the end of the run, or another boot of the same image in the same memory with the same devices, as often
    /// as it resets; ten within a minute end it, with exit code 5
    #[arg(long, value_enum, default_value = "stop", conflicts_with = "native")]
    pub on_reset: OnResetArg,

    /// Do not restrict this process once the guest runs: a guest that breaks out has all of its user's rights
    #[arg(long, conflicts_with_all = ["native", "user", "jail"])]
    pub no_sandbox: bool,

    /// Refuse to run the guest where this host's kernel cannot restrict the process wholly (Landlock, Linux 6.12)
    #[arg(long, conflicts_with_all = ["native", "no_sandbox"])]
    pub require_sandbox: bool,

    /// Become this user before the guest runs: a name, a number, or either with :GROUP behind it; takes root
    #[arg(long, value_name = "USER[:GROUP]", conflicts_with = "native")]
    pub user: Option<String>,

    /// See nothing but what the run needs before the guest runs: an empty folder becomes its root, with no network; takes root
    #[arg(long, value_name = "FOLDER", conflicts_with = "native")]
    pub jail: Option<PathBuf>,

    /// Run in this cgroup (v2), a path in the folder where they are mounted; a new one is removed at the end
    #[arg(long, value_name = "PATH", conflicts_with = "native")]
    pub cgroup: Option<PathBuf>,
}

/// `--on-reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnResetArg {
    /// The run ends, with the report
    Stop,
    /// The guest boots again
    Restart,
}

const KERNELS_EXAMPLES: &str = "\
Examples:
  All of them:
    wideleaf kernels

  One, with its parameters:
    wideleaf kernels npb.is

  All about all of them, for programs:
    wideleaf kernels --format json";

/// `wideleaf kernels`.
#[derive(Args, Debug)]
#[command(after_long_help = KERNELS_EXAMPLES)]
pub struct KernelsArgs {
    /// Only this one, with its parameters
    #[arg(value_name = "KERNEL")]
    pub kernel: Option<String>,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

const DEMO_EXAMPLES: &str = "\
Examples:
  In guests where there is a usable /dev/kvm, natively elsewhere:
    wideleaf demo

  A table of 1 GiB, natively in any case:
    wideleaf demo --log2-words 27 --native

  Every run's whole report, for programs:
    wideleaf demo --rounds 9 --format json --output demo.json";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  What is there, and what is done without the rest:
    wideleaf doctor

  Whether KVM maps guests as it should; exit code 1 where it does not:
    wideleaf doctor --mappings

  The same, for programs:
    wideleaf doctor --mappings --format json";

/// `wideleaf demo`.
#[derive(Args, Debug)]
#[command(after_long_help = DEMO_EXAMPLES)]
pub struct DemoArgs {
    /// Table of 2^N words of 8 bytes: 25 is 256 MiB. Each run has 256 MiB of RAM more than its table
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = clap::value_parser!(u8).range(20..=30))]
    pub log2_words: u8,

    /// How often each arm (a way to back RAM) runs; the arms take turns, a run takes some seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Run natively even where there is a usable /dev/kvm
    #[arg(long)]
    pub native: bool,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result there instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// `wideleaf doctor`.
#[derive(Args, Debug)]
#[command(after_long_help = DOCTOR_EXAMPLES)]
pub struct DoctorArgs {
    /// Also run small guests and compare KVM's mapping counters with what they should be (needs KVM, half a minute)
    #[arg(long)]
    pub mappings: bool,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// `--backing`.
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

/// `--fallback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FallbackArg {
    /// Refuse to start
    Fail,
    /// Anonymous memory that starts with transparent huge pages
    Thp,
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// For people
    Table,
    /// For programs
    Json,
}

/// `--policy`.
#[derive(Clone, Debug)]
pub enum PolicyArg {
    /// List the policies and end.
    Help,
    /// Use this one.
    Use(PolicyChoice),
}

fn parse_policy(text: &str) -> Result<PolicyArg, String> {
    match text {
        "help" => Ok(PolicyArg::Help),
        text => PolicyChoice::parse(&with_files(text)?).map(PolicyArg::Use).map_err(|error| no_policy(&error)),
    }
}

/// Why a policy cannot be had, with the name that was probably meant.
pub fn no_policy(error: &PolicyError) -> String {
    let hint = match error {
        PolicyError::UnknownPolicy { name } => did_you_mean(name, POLICIES.iter().map(|policy| policy.name)),
        PolicyError::UnknownKey { key, known, .. } => did_you_mean(key, known.iter().copied()),
        _ => String::new(),
    };
    format!("{error}{hint}")
}

/// As [`PageSize::parse`]; base pages have no pool.
fn parse_pool_size(text: &str) -> Result<PageSize, &'static str> {
    match PageSize::parse(text) {
        Ok(size @ (PageSize::Huge2M | PageSize::Giant1G)) => Ok(size),
        _ => Err("there are pools of two page sizes: write 2m or 1g"),
    }
}

/// As [`Bytes::parse`], and not nothing.
pub fn parse_some_bytes(text: &str) -> Result<Bytes, String> {
    match Bytes::parse(text).map_err(|error| error.to_string())? {
        Bytes::ZERO => Err("no memory at all".into()),
        bytes => Ok(bytes),
    }
}

/// `name:key=value,…` with the contents of FILE for each value that is `@FILE`.
pub fn with_files(text: &str) -> Result<String, String> {
    let Some((name, settings)) = text.split_once(':') else { return Ok(text.to_owned()) };
    let settings = settings.split(',').map(|setting| match setting.split_once("=@") {
        Some((key, path)) => Ok(format!("{key}={}", lines_of(path)?)),
        None => Ok(setting.to_owned()),
    });
    Ok(format!("{name}:{}", settings.collect::<Result<Vec<String>, String>>()?.join(",")))
}

/// The longest file that is a policy's value: the rules of `schemes` are some lines.
const VALUE_FILE_MAX: Bytes = mib(1);

/// The lines of a file with ; between them, without comments (from # on) and what is empty.
fn lines_of(path: &str) -> Result<String, String> {
    let text = InputFile::open_stream(Path::new(path)).and_then(|file| file.read_text(VALUE_FILE_MAX));
    let text = text.map_err(|error| format!("cannot read {path}: {error}"))?;
    if text.contains(',') {
        return Err(format!("{path} has a comma: no parameter of a policy takes one"));
    }
    let line = |line: &str| line.split('#').next().unwrap_or("").trim().trim_end_matches(';').trim_end().to_owned();
    let lines: Vec<String> = text.lines().map(line).filter(|line| !line.is_empty()).collect();
    Ok(lines.join("; "))
}

/// Parses `250ms`, `10s`, `2m`, `1h`. A bare number is seconds, as timeout(1) and sleep(1) have it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const FORM: &str =
        "not a time: write a whole number of seconds, or one with ms, s, m or h behind it (10, 250ms, 2m)";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| FORM)?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1_000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err(FORM.into()),
    };
    milliseconds.map(Duration::from_millis).ok_or_else(|| "longer than time itself".into())
}

/// As [`parse_duration`], and not zero.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    some_time(text, "leave --timeout out to wait for ever")
}

/// As [`parse_duration`], and not zero, with what to do instead.
pub fn some_time(text: &str, remedy: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err(format!("no time at all: {remedy}")),
        time => Ok(time),
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

    #[test]
    fn times_have_a_unit() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert!(parse_timeout("0s").is_err());
        assert_eq!(parse_duration("5"), Ok(Duration::from_secs(5)));
        for wrong in ["", "s", "-1s", "1.5s", "1 s", "99999999999999999999s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
