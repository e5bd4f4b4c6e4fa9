//! Arguments of `wideleaf run`, other than those for devices.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use wideleaf_control::view::Guarantee;
use wideleaf_memory::BackingKind;
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::migration::Address;
use wideleaf_run::spec::numa::NumaArg;
use wideleaf_run::spec::{Fallback, Prefetch, RestorePages, RestoreReads};

use super::devices::DeviceArgs;
use crate::kernels;
use crate::options::{FormatArg, parse_duration, parse_some_bytes, parse_timeout};
use crate::policy_arg::{PolicyArg, no_policy};

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

  A Linux guest with two NUMA cells, each on a node of the host:
    wideleaf run ./vmlinuz --initrd ./initrd.img --memory 8G --vcpus 4 \
        --numa 'id=0,cpus=[0-1],memory=4G,host-nodes=[0]' --numa 'id=1,cpus=[2-3],memory=4G,host-nodes=[1]'

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
    wideleaf run --config vm.toml --cmdline 'console=ttyS0' --console

  A VM that is saved while it runs, and continued from its snapshot:
    wideleaf run gups --cmdline 'log2_words=26' --control-socket vm.sock &
    wideleaf vm vm.sock snapshot saved
    wideleaf run --restore saved

  A VM that moves to another run while it works; its first run ends, and the second one has its result:
    wideleaf run --incoming unix:move.sock &
    wideleaf vm vm.sock migrate unix:move.sock

  The same over ssh, with a pipe for the answers:
    mkfifo back
    wideleaf vm vm.sock migrate stdio < back | ssh host wideleaf run --incoming stdio --output result.txt > back";

/// End of `wideleaf run --help`: the built-in kernels, from the table that runs them, and examples.
fn after_run_help() -> String {
    let title = "Built-in kernels, with the memory they need by class; `wideleaf kernels NAME` shows their parameters:";
    format!("{title}\n{}\n{RUN_EXAMPLES}", kernels::one_line_each())
}

/// Options that a snapshot, or the run that a VM comes from, has already decided.
const OF_THE_SAVED_VM: [&str; 13] = [
    "workload",
    "native",
    "cmdline",
    "class",
    "initrd",
    "memory",
    "vcpus",
    "backing",
    "host_page",
    "guest_page",
    "prefault",
    "make_giant_pages",
    "on_reset",
];

/// Arguments of `wideleaf run`.
#[derive(Args, Debug)]
#[command(after_long_help = after_run_help())]
pub struct RunArgs {
    /// A built-in kernel (--help lists them), or a file: an ELF image with a PVH entry, a bzImage or a vmlinux
    // Optional only for `--policy help`, and with --config, because the file may name it.
    #[arg(value_name = "KERNEL|IMAGE", required_unless_present_any = ["policy", "config", "restore", "incoming"])]
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

    /// Continue the VM that `wideleaf vm SOCKET snapshot FOLDER` saved, with the kernel, RAM, vCPUs and devices that it
    /// had; its memory is read while it already runs. Options about the host, as --policy or --control-socket, may be
    /// other ones; so may devices, if they have the same kinds and sizes
    #[arg(long, value_name = "FOLDER", conflicts_with_all = OF_THE_SAVED_VM)]
    pub restore: Option<PathBuf>,

    /// Order in which a restored guest first touched its memory: record it beside the snapshot at the end of this run,
    /// use a recorded one, or no such order
    #[arg(long, value_enum, default_value = "use")]
    pub prefetch: PrefetchArg,

    /// Way in which the snapshot is read
    #[arg(long, value_enum, default_value = "auto")]
    pub restore_reads: RestoreReadsArg,

    /// Read at most this amount a second of memory that the guest has not touched yet [default: as fast as possible]
    #[arg(long, value_name = "SIZE", value_parser = parse_some_bytes)]
    pub restore_rate: Option<Bytes>,

    /// Way in which a restored guest gets the pages of its memory
    #[arg(long, value_enum, default_value = "auto")]
    pub restore_pages: RestorePagesArg,

    /// Wait for a VM that `wideleaf vm SOCKET migrate ADDRESS` sends, with its kernel, RAM and vCPUs, and run it here:
    /// unix:PATH and tcp:HOST:PORT listen there for one connection; stdio is standard input and output. Name the
    /// devices that it has, if any; a disk that the guest writes must be the same file on both sides. A TCP connection
    /// is neither encrypted nor authenticated: use it in a network that you trust, or stdio through ssh
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = OF_THE_SAVED_VM, conflicts_with = "restore")]
    pub incoming: Option<Address>,

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

    /// A NUMA cell that the guest sees, and its place on this host; repeat it for each cell. `id=N` numbers the cells
    /// from 0. `cpus=[LIST]` are its vCPUs, `memory=SIZE` its RAM: the cells together have all, and the only one may
    /// leave both out. `host-nodes=[LIST]` are nodes of the host for its memory, by `policy=bind` (these alone, the
    /// default), `preferred` or `interleave`. Its vCPUs run on the CPUs of these nodes, or on `host-cpus=[LIST]`.
    /// `page-size=2m` lets it start on huge pages where RAM starts on 4k ones.
    /// `distances=[CELL@DISTANCE,...]` are 10 to itself and 20 to others by default. `latencies=[CELL@NS,...]` and
    /// `bandwidths=[CELL@MB/S,...]` tell what its vCPUs get from the memory of cells; `host` takes those of the host.
    /// `auto` prefers the node of the host with the most room for the whole guest, if there are several nodes; `off`
    /// leaves memory and vCPUs to the kernel [default: auto]
    #[arg(long, value_name = "CELL|auto|off", conflicts_with = "native")]
    pub numa: Vec<NumaArg>,

    /// Memory that backs guest RAM [default: anon; with --policy reservation memfd]
    #[arg(long, value_enum)]
    pub backing: Option<BackingArg>,

    /// Size of the host pages that back RAM at the start [default: 4k; with --backing hugetlb 2m]
    #[arg(long, value_name = "4k|2m|1g", value_parser = PageSize::parse)]
    pub host_page: Option<PageSize>,

    /// Page size of the guest's own page tables, for images that support the choice
    #[arg(long, value_name = "4k|2m|1g", default_value = "2m", value_parser = PageSize::parse)]
    #[arg(conflicts_with = "native")]
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

    /// Largest part of any 100 ms for which the policy may keep memory out of the guest's reach while pages change
    /// their size, from 1% to 100% (no limit). With less, the guest keeps more of its speed meanwhile, and becomes
    /// large later. If wideleafd names a smaller part, that counts [default: that of wideleafd, or 30%]
    #[arg(long, value_name = "PERCENT")]
    pub out_of_reach: Option<OutOfReach>,

    /// Share of the guest's present memory to keep in large pages: `guaranteed:95%`, or `95%` (the run is refused if
    /// the host lacks the memory), `bestEffort:95%` (that is only reported) or `bestEffort`. Below it, --policy makes
    /// room for `greedy` until the share is reached [default: bestEffort]
    #[arg(long, value_name = "GUARANTEE", default_value = "bestEffort", hide_default_value = true)]
    #[arg(conflicts_with = "native")]
    pub guarantee: Guarantee,

    /// Fault in all guest RAM before the guest starts
    #[arg(long)]
    pub prefault: bool,

    /// Action when the hugetlb pool is too small: fail, or use transparent huge pages instead
    #[arg(long, value_enum, default_value = "fail")]
    pub fallback: FallbackArg,

    /// Make at most this number of pages of 1 GiB where the hugetlb pool has too few free ones, for --policy giant,
    /// --policy auto:giant=1 or at-fault:giant=1, or --backing hugetlb --host-page 1g. The kernel then moves other
    /// memory of this host, for up to some seconds a page, beside the guest. The pool's settings are restored, and the
    /// pages go back to the host, however the run ends; requires root
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(0..=1024), conflicts_with = "native")]
    pub make_giant_pages: u16,

    /// Connect the guest's serial port to this terminal, or to standard input and output if they are no terminal.
    /// Ctrl-A x stops the VM, Ctrl-A h shows help. The result goes to standard error, or to --output. Without
    /// --console, the guest's lines other than results go to standard error
    #[arg(long, conflicts_with = "native")]
    pub console: bool,

    /// Count page walks in the timed parts by the CPU's own counters, for experiments
    #[arg(long, hide = true)]
    pub count_walks: bool,

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
    /// no daemon that admits this user listens, the run manages the guest alone until one does
    /// [default: /run/wideleaf/control.sock]
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

/// Argument of `--prefetch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrefetchArg {
    /// Fill memory in the recorded order, if there is one
    Use,
    /// Record the order of this run
    Record,
    /// Fill memory by its heat alone
    Off,
}

impl From<PrefetchArg> for Prefetch {
    fn from(arg: PrefetchArg) -> Prefetch {
        match arg {
            PrefetchArg::Use => Prefetch::Use,
            PrefetchArg::Record => Prefetch::Record,
            PrefetchArg::Off => Prefetch::Off,
        }
    }
}

/// Argument of `--restore-reads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RestoreReadsArg {
    /// Through the host's page cache if half of the snapshot is there, past it otherwise
    Auto,
    /// Through the page cache: what is read stays there for other VMs of the snapshot
    Cached,
    /// Past the page cache (O_DIRECT)
    Direct,
}

impl From<RestoreReadsArg> for RestoreReads {
    fn from(arg: RestoreReadsArg) -> RestoreReads {
        match arg {
            RestoreReadsArg::Auto => RestoreReads::Auto,
            RestoreReadsArg::Cached => RestoreReads::Cached,
            RestoreReadsArg::Direct => RestoreReads::Direct,
        }
    }
}

/// Argument of `--restore-pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RestorePagesArg {
    /// Huge pages where the guest had them, moved in whole; base pages elsewhere
    Auto,
    /// Copies of 4 KiB, page by page, as other VMMs do: for comparison, and for hosts without UFFDIO_MOVE
    #[value(name = "4k")]
    Base,
    /// A private mapping of the snapshot's file: no thread, base pages for what is written, no checksum; the file must
    /// not change while the guest runs. For comparison, and for hosts without a userfaultfd
    Mapped,
}

impl From<RestorePagesArg> for RestorePages {
    fn from(arg: RestorePagesArg) -> RestorePages {
        match arg {
            RestorePagesArg::Auto => RestorePages::Auto,
            RestorePagesArg::Base => RestorePages::Base,
            RestorePagesArg::Mapped => RestorePages::Mapped,
        }
    }
}

/// Argument of `--on-reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnResetArg {
    /// The run ends, with the report
    Stop,
    /// The guest boots again
    Restart,
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
