//! Arguments of `wideleaf-lab simulate`, and the syntax of its lists.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use wideleaf::options::{FormatArg, parse_some_bytes, parse_timeout};
use wideleaf::policy_arg::PolicyArg;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_simulator::simulator::Distances;
use wideleaf_simulator::{Machine, machine, machines};

const EXAMPLES: &str = "\
With --recording, the guest is the recorded one: its accesses stay the same, whatever its pages. Costs are those of the
recorded actions. So the result shows a policy's actions and their cost, but not the gain of the guest.

With --trace, the accesses are those of the kernel, TLBs and walks are those of a model of the machine, and policies run
on a simulated host, in simulated time. So the result shows how often each machine misses. Cycles of walks are the
model's: it does not say how many of them a real machine hides.

Examples:
  Record a run, then see the actions of every policy in it:
    wideleaf run gups --policy greedy --record gups.rec
    wideleaf-lab simulate --recording gups.rec

  GUPS with 256 MiB on an Opteron, natively, on base pages and on huge ones:
    wideleaf-lab simulate --trace gups:log2_words=25 --machine k8 --native --host-page 4k,2m

  GUPS in a guest that began on the wrong NUMA node, under two policies:
    wideleaf-lab simulate --trace gups:log2_words=24 --machine skylake-sp --policy greedy,auto --local-memory 0

  A recorded kernel in a guest with base pages, under two policies on two machines, with a plot over time:
    wideleaf-lab simulate --trace cg.A.trace --machine skylake-sp,zen4 --policy reservation,auto --plot cg.svg";

/// Arguments of `wideleaf-lab simulate`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct SimulateArgs {
    /// Recording that `wideleaf run --record` wrote
    // The input is checked later: --policy help and --machine help need none.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["trace", "policy", "machine"],
          conflicts_with = "trace")]
    pub recording: Option<PathBuf>,

    /// Accesses: a file of `wideleaf-lab trace record`, or a generated stream such as gups:log2_words=25; `--trace
    /// help` lists the streams
    #[arg(long, value_name = "FILE|STREAM")]
    pub trace: Option<String>,

    /// Policies to simulate, separated by commas; `--policy help` lists them [default: for a recording all, for a
    /// trace none: the host's pages are those of --host-page]
    #[arg(long, value_name = "NAME", value_parser = parse_policies)]
    pub policy: Option<PoliciesArg>,

    /// Machines to simulate, separated by commas; `--machine help` lists them with their sources
    #[arg(long, value_name = "NAME", value_parser = parse_machines, conflicts_with = "recording")]
    pub machine: Option<MachinesArg>,

    /// Page size of the guest's own tables: 4k, 2m or 1g
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = PageSize::parse,
          conflicts_with = "recording")]
    pub guest_page: PageSize,

    /// Fixed page sizes of the host, each of which is simulated too: 4k, 2m or 1g, separated by commas [default: 4k
    /// without --policy]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = PageSize::parse,
          conflicts_with = "recording")]
    pub host_page: Vec<PageSize>,

    /// Simulate a process instead of a guest: one table to walk, and pages of --host-page or of the policy
    #[arg(long, conflicts_with_all = ["recording", "guest_page"])]
    pub native: bool,

    /// Levels of the guest's and the host's page tables: 4 or 5
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(4..=5),
          conflicts_with = "recording")]
    pub levels: u8,

    /// Memory of the simulated host [default: twice the need of the trace, so that it is never short]
    #[arg(long, value_name = "SIZE", value_parser = parse_some_bytes, conflicts_with = "recording")]
    pub memory: Option<Bytes>,

    /// Number of giant pages that policies can use
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "recording")]
    pub giant_pages: u64,

    /// Let another thread of the core use half of its TLBs and caches
    #[arg(long, conflicts_with = "recording")]
    pub smt: bool,

    /// What lies on the NUMA node of the other socket, 2.1 times as far away, separated by commas
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',', conflicts_with = "recording")]
    pub remote: Vec<Remote>,

    /// Simulate a host with two NUMA nodes: the thread's has this memory for the trace, filled by first touches, and
    /// the other one has the rest. Policies see where windows lie
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, requires = "policy",
          conflicts_with_all = ["recording", "host_page", "remote", "giant_pages"])]
    pub local_memory: Option<Bytes>,

    /// Number of free blocks of 2 MiB on the thread's node [default: never short]
    #[arg(long, value_name = "N", requires = "local_memory")]
    pub local_huge_pages: Option<u64>,

    /// Simulated time between two plans of a policy
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = parse_timeout,
          conflicts_with = "recording")]
    pub interval: Duration,

    /// Cycles of simulated time, at 2 GHz, from one access to the next. With more of them a short trace stands for
    /// a long run
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1_000_000),
          conflicts_with = "recording")]
    pub cycles_per_access: u64,

    /// Stop after this number of accesses
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "recording")]
    pub accesses: Option<u64>,

    /// Draw coverage, bloat and misses over time into this file, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "recording")]
    pub plot: Option<PathBuf>,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Memory that may lie on another NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Remote {
    /// Page tables of the guest, or native ones.
    GuestTables,
    /// Page tables of the host.
    HostTables,
    /// Data of loads and stores.
    Data,
}

impl SimulateArgs {
    /// Names of what lies on the other node, each once.
    pub fn remote_places(&self) -> Vec<&'static str> {
        let all = [(Remote::GuestTables, "guest-tables"), (Remote::HostTables, "host-tables"), (Remote::Data, "data")];
        all.into_iter().filter(|(place, _)| self.remote.contains(place)).map(|(_, name)| name).collect()
    }

    /// Distances of tables and data.
    pub fn distances(&self) -> Distances {
        let distance = |of| if self.remote.contains(&of) { Distances::OTHER_SOCKET } else { Distances::LOCAL };
        Distances {
            guest_tables: distance(Remote::GuestTables),
            host_tables: distance(Remote::HostTables),
            data: distance(Remote::Data),
        }
    }
}

/// Argument of `--policy`.
#[derive(Clone, Debug)]
pub enum PoliciesArg {
    /// List the policies and exit.
    Help,
    /// Use these policies.
    Use(Vec<PolicyArg>),
}

/// Argument of `--machine`.
#[derive(Clone, Debug)]
pub enum MachinesArg {
    /// List the machines and exit.
    Help,
    /// Use these machines.
    Use(Vec<&'static Machine>),
}

fn parse_policies(text: &str) -> Result<PoliciesArg, String> {
    if text == "help" {
        return Ok(PoliciesArg::Help);
    }
    let parse = |one: String| PolicyArg::parse(&one).map_err(|error| error.to_string());
    split_policies(text).into_iter().map(parse).collect::<Result<_, _>>().map(PoliciesArg::Use)
}

/// A comma separates policies, and the parameters of one: a part `key=value` belongs to the policy before it.
fn split_policies(text: &str) -> Vec<String> {
    let mut policies: Vec<String> = Vec::new();
    for part in text.split(',') {
        let is_setting = part.split_once('=').is_some_and(|(key, _)| !key.contains(':'));
        match policies.last_mut().filter(|_| is_setting) {
            Some(policy) => {
                policy.push(',');
                policy.push_str(part);
            }
            None => policies.push(part.to_owned()),
        }
    }
    policies
}

fn parse_machines(text: &str) -> Result<MachinesArg, String> {
    if text == "help" {
        return Ok(MachinesArg::Help);
    }
    let choose = |name: &str| {
        let names = || machines().iter().map(|machine| machine.name).collect::<Vec<_>>().join(", ");
        machine(name).ok_or_else(|| format!("there is no machine {name:?}; the machines are {}", names()))
    };
    text.split(',').map(choose).collect::<Result<_, _>>().map(MachinesArg::Use)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_separates_policies_and_the_parameters_of_one() {
        let split = |text| split_policies(text);
        assert_eq!(split("never,greedy"), ["never", "greedy"]);
        let two = split("thp:max_ptes_none=64,scan_sleep_ms=10,auto");
        assert_eq!(two, ["thp:max_ptes_none=64,scan_sleep_ms=10", "auto"]);
        assert_eq!(split("auto:horizon_s=5,thp:pages_to_scan=512"), ["auto:horizon_s=5", "thp:pages_to_scan=512"]);
        assert!(matches!(parse_policies("never,thp:max_ptes_none=64"), Ok(PoliciesArg::Use(list)) if list.len() == 2));
        assert!(parse_policies("never,").is_err_and(|error| error.starts_with("there is no policy \"\"")));
    }

    #[test]
    fn an_unknown_machine_is_refused_with_the_known_ones() {
        assert!(matches!(parse_machines("k8"), Ok(MachinesArg::Use(list)) if list[0].name == "k8"));
        let error = parse_machines("k8,z80").expect_err("no such machine");
        assert!(error.starts_with("there is no machine \"z80\"; the machines are madison, k8, "), "{error}");
    }
}
