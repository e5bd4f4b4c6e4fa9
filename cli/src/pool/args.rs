//! Arguments of `wideleaf pool`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use wideleaf_policies::{Bytes, PageSize};

use crate::options::{FormatArg, parse_some_bytes};

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
1 GiB pages. For 2 MiB pages, set vm.nr_hugepages in sysctl.conf; where
default_hugepagesz=1G is on the command line, that counts 1 GiB pages, so put
`hugepagesz=2M hugepages=N` on the command line.";

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

    /// Number of pages; 0 only undoes what a killed process left that made pages for a run (--make-giant-pages), as any
    /// change of a pool does first
    #[arg(long, value_name = "N", group = "amount")]
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

/// As [`PageSize::parse`], without base pages, which have no pool.
fn parse_pool_size(text: &str) -> Result<PageSize, &'static str> {
    match PageSize::parse(text) {
        Ok(size @ (PageSize::Huge2M | PageSize::Giant1G)) => Ok(size),
        _ => Err("the hugetlb pools have pages of two sizes: write 2m or 1g"),
    }
}
