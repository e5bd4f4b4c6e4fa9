//! Results of machines for accesses: one struct, read by programs as JSON and by people as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use comfy_table::{Cell, Table};
use serde::Serialize;
use wideleaf_policies::{Bytes, Moment, PageSize, PerTenThousand};
use wideleaf_simulator::Simulator;
use wideleaf_simulator::counts::{References, Served};
use wideleaf_simulator::simulated::{HistorySample, Managed};

use super::args::SimulateArgs;
use super::source::SourceInfo;
use wideleaf::table::{number, table};
use wideleaf_run::text::clean;

/// Number of cycles in a second of simulated time.
const CYCLES_PER_S: f64 = 2e9;

/// All simulations of one trace.
#[derive(Debug, Serialize)]
pub struct TracedReport {
    /// Trace that was simulated.
    pub trace: TraceInfo,
    /// Settings of the simulations.
    pub setup: TracedSetup,
    /// Results by machine and page choice, in the order of the arguments.
    pub results: Vec<TracedResult>,
}

/// Facts about the accesses.
#[derive(Debug, Serialize)]
pub struct TraceInfo {
    /// Kernel, or kind of stream.
    pub kernel: String,
    /// Class of the kernel; empty if it has no classes.
    pub class: String,
    /// Parameters of the kernel or stream.
    pub parameters: String,
    /// Memory that it accesses, in bytes.
    pub arena_bytes: u64,
    /// Number of recorded iterations; 0 if the kernel has none.
    pub iterations: u32,
    /// Number of iterations of the class.
    pub class_iterations: u32,
    /// Whether the recording ended before the kernel did, or the simulation before the recording (`--accesses`).
    pub is_cut: bool,
}

/// The other arguments.
#[derive(Debug, Serialize)]
pub struct TracedSetup {
    /// Page size of the guest's tables; `None` for a process.
    pub guest_page: Option<&'static str>,
    /// Levels of the page tables in each dimension.
    pub levels: u8,
    /// Whether another thread uses half of the core.
    pub is_core_shared: bool,
    /// What lies on the NUMA node of the other socket: `guest-tables`, `host-tables`, `data`.
    pub remote: Vec<&'static str>,
    /// Memory of the thread's NUMA node, of two, in bytes; `None`: the host has one node.
    pub local_memory_bytes: Option<u64>,
    /// Simulated time between two plans, in seconds.
    pub interval_s: f64,
    /// Cycles of simulated time, at 2 GHz, from one access to the next.
    pub cycles_per_access: u64,
}

/// One machine, under one policy or on one page size.
#[derive(Debug, Serialize)]
pub struct TracedResult {
    /// Name of the machine.
    pub machine: &'static str,
    /// Size of the host's pages, or the policy that chooses it.
    pub pages: String,
    /// Number of loads and stores.
    pub accesses: u64,
    /// Number of accesses found in the TLB, by its level.
    pub tlb_hits: [u64; 2],
    /// Number of TLB misses.
    pub misses: u64,
    /// Misses by the size of the entry that they created.
    pub misses_by_page: BTreeMap<&'static str, u64>,
    /// Misses per access.
    pub misses_per_access: f64,
    /// Number of table entries that walks read.
    pub references: u64,
    /// References per miss.
    pub references_per_miss: f64,
    /// References by the place where walks found them.
    pub references_by_place: BTreeMap<&'static str, u64>,
    /// References by dimension.
    pub references_by_dimension: BTreeMap<&'static str, u64>,
    /// Cycles of walks, one reference after another.
    pub cycles_of_walks: u64,
    /// Cycles of walks per access.
    pub cycles_of_walks_per_access: f64,
    /// Cycles of walks that read the host's tables.
    pub cycles_of_host_walks: u64,
    /// Share of the host's tables in the cycles of walks, 0 to 1.
    pub host_share_of_walk_cycles: f64,
    /// Number of table entries that walks read from another NUMA node.
    pub remote_references: u64,
    /// Number of data lines from another NUMA node.
    pub remote_data: u64,
    /// Cycles of hits in the second level of the TLB.
    pub cycles_of_tlb: u64,
    /// Number of times that all translations were dropped because a page had changed.
    pub flushes: u64,
    /// Memory of the tables of the guest, or of the process, at the end, in bytes.
    pub guest_tables_bytes: u64,
    /// Memory of the tables of the host at the end, in bytes; 0 for a process.
    pub host_tables_bytes: u64,
    /// Work of the policy; `None` if pages are fixed.
    pub policy: Option<PolicySide>,
    /// Results over time.
    pub history: Vec<HistoryPoint>,
    #[serde(skip)]
    is_cut: bool,
}

/// Work of a policy.
#[derive(Debug, Serialize)]
pub struct PolicySide {
    /// Number of its plans.
    pub plans: u64,
    /// Actions by `action.result`.
    pub outcomes: BTreeMap<String, u64>,
    /// Number of times that the budget refused an action.
    pub budget_refusals: u64,
    /// Guest memory copied, in bytes.
    pub copied_bytes: u64,
    /// Cycles that actions took, at 2 GHz, in parallel to the guest.
    pub cycles_of_actions: u64,
    /// Resident bytes at the end.
    pub resident_at_end_bytes: u64,
    /// Resident bytes at the end that were never touched: present only because pages are large.
    pub bloat_at_end_bytes: u64,
    /// Maximum of these bytes at any time.
    pub bloat_at_most_bytes: u64,
    /// `host_coverage_2m` at the end, in basis points.
    pub host_coverage_2m_at_end_bp: u32,
    /// Mean of `host_coverage_2m`, in basis points.
    pub host_coverage_2m_mean_bp: u32,
    /// Own counters of the policy.
    pub figures: BTreeMap<&'static str, u64>,
}

/// State at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HistoryPoint {
    /// Simulated time, in seconds.
    pub at_s: f64,
    /// Number of accesses so far.
    pub accesses: u64,
    /// Number of misses so far.
    pub misses: u64,
    /// `host_coverage_2m` in basis points; `None` if pages are fixed.
    pub host_coverage_2m_bp: Option<u32>,
    /// Bytes present but never touched; `None` if pages are fixed.
    pub bloat_bytes: Option<u64>,
}

impl TraceInfo {
    pub(super) fn new(info: &SourceInfo, results: &[TracedResult]) -> TraceInfo {
        TraceInfo {
            kernel: info.kernel.clone(),
            class: info.class.clone(),
            parameters: info.parameters.clone(),
            arena_bytes: info.arena.get(),
            iterations: info.iterations.0,
            class_iterations: info.iterations.1,
            is_cut: results.iter().any(|result| result.is_cut),
        }
    }
}

impl TracedSetup {
    pub(super) fn new(args: &SimulateArgs) -> TracedSetup {
        TracedSetup {
            guest_page: (!args.native).then(|| args.guest_page.name()),
            levels: args.levels,
            is_core_shared: args.smt,
            remote: args.remote_places(),
            local_memory_bytes: args.local_memory.map(Bytes::get),
            interval_s: args.interval.as_secs_f64(),
            cycles_per_access: args.cycles_per_access,
        }
    }
}

impl TracedResult {
    pub(super) fn new(
        machine: &'static str,
        pages: String,
        simulator: &Simulator,
        policy: Option<PolicySide>,
        history: Vec<HistoryPoint>,
        is_cut: bool,
    ) -> TracedResult {
        let counts = simulator.counts();
        let [guest_tables, host_tables] = simulator.space().table_bytes();
        let misses = counts.data_misses();
        let dimensions = [
            ("guest", &counts.guest),
            ("host_of_tables", &counts.host_of_tables),
            ("host_of_data", &counts.host_of_data),
        ];
        let sum = |part: &dyn Fn(&References) -> u64| dimensions.iter().map(|(_, references)| part(references)).sum();
        let served = |place: fn(&Served) -> u64| sum(&|references| place(&references.read));
        let by_place: [(&str, u64); 6] = [
            ("walk_cache", sum(&|references| references.skipped_by_walk_cache)),
            ("nested_tlb", sum(&|references| references.skipped_by_nested_tlb)),
            ("l1", served(|read| read.caches[0])),
            ("l2", served(|read| read.caches[1])),
            ("l3", served(|read| read.caches[2])),
            ("memory", served(|read| read.memory)),
        ];
        let per = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        TracedResult {
            machine,
            pages,
            accesses: counts.accesses,
            tlb_hits: counts.tlb_hits,
            misses,
            misses_by_page: PageSize::ALL.iter().map(|page| (page.name(), counts.misses_of(*page))).collect(),
            misses_per_access: per(misses, counts.accesses),
            references: counts.references(),
            references_per_miss: per(counts.references(), misses),
            references_by_place: by_place.into_iter().collect(),
            references_by_dimension: dimensions.map(|(name, references)| (name, references.read.total())).into(),
            cycles_of_walks: counts.cycles_of_walks,
            cycles_of_walks_per_access: per(counts.cycles_of_walks, counts.accesses),
            cycles_of_host_walks: counts.cycles_of_host,
            host_share_of_walk_cycles: counts.share_of_host(),
            remote_references: counts.remote_references,
            remote_data: counts.remote_data,
            cycles_of_tlb: counts.cycles_of_tlb,
            flushes: counts.flushes,
            guest_tables_bytes: guest_tables.get(),
            host_tables_bytes: host_tables.get(),
            policy,
            history,
            is_cut,
        }
    }
}

impl PolicySide {
    pub(super) fn of(managed: &Managed) -> PolicySide {
        let (tally, samples) = (managed.tally(), managed.history().samples());
        let outcomes = tally.actions.iter().map(|((action, result), n)| (format!("{action}.{result}"), *n));
        let bloat = || samples.iter().map(|sample| sample.bloat().get());
        PolicySide {
            plans: managed.plans(),
            outcomes: outcomes.collect(),
            budget_refusals: tally.budget_refusals.unwrap_or(0),
            copied_bytes: tally.copied.get(),
            cycles_of_actions: (tally.cpu.as_secs_f64() * CYCLES_PER_S) as u64,
            resident_at_end_bytes: tally.resident_at_end.get(),
            bloat_at_end_bytes: bloat().next_back().unwrap_or(0),
            bloat_at_most_bytes: bloat().max().unwrap_or(0),
            host_coverage_2m_at_end_bp: tally.coverage_at_end().get(),
            host_coverage_2m_mean_bp: tally.coverage_mean().get(),
            figures: managed.policy().figures().into_iter().collect(),
        }
    }
}

impl HistoryPoint {
    pub(super) fn of(sample: &HistorySample) -> HistoryPoint {
        HistoryPoint {
            host_coverage_2m_bp: Some(sample.coverage().get()),
            bloat_bytes: Some(sample.bloat().get()),
            ..HistoryPoint::of_misses(sample.at, sample.accesses, sample.misses)
        }
    }

    pub(super) fn of_misses(at: Moment, accesses: u64, misses: u64) -> HistoryPoint {
        let at_s = at.since_start().as_secs_f64();
        HistoryPoint { at_s, accesses, misses, host_coverage_2m_bp: None, bloat_bytes: None }
    }
}

impl TracedReport {
    /// A table for people, with a column per simulation.
    pub fn to_table(&self) -> String {
        let mut rows = Rows::of(&self.results);
        self.add_misses(&mut rows);
        self.add_references(&mut rows);
        self.add_walks(&mut rows);
        if self.results.iter().any(|result| result.policy.is_some()) {
            self.add_policies(&mut rows);
        }
        format!("{}{}\n", self.heading(), rows.table)
    }

    fn add_misses(&self, rows: &mut Rows<'_>) {
        rows.add("accesses", |result| result.accesses.to_string());
        rows.add("TLB misses per access", |result| format!("{:.5}", result.misses_per_access));
        for page in PageSize::ALL.map(PageSize::name) {
            if self.results.iter().any(|result| result.misses_by_page[page] > 0) {
                rows.add(&format!("misses, {page} entries"), |result| result.misses_by_page[page].to_string());
            }
        }
        rows.add("hits in the second level", |result| per(result.tlb_hits[1], result.accesses));
    }

    fn add_references(&self, rows: &mut Rows<'_>) {
        rows.add("references per walk", |result| format!("{:.2}", result.references_per_miss));
        for (place, name) in [
            ("l1", "  found in L1"),
            ("l2", "  found in L2"),
            ("l3", "  found in L3"),
            ("memory", "  found in memory"),
            ("walk_cache", "saved by the walk cache"),
            ("nested_tlb", "saved by the nested TLB"),
        ] {
            rows.add(name, |result| {
                format!("{:.2}", result.references_by_place[place] as f64 / result.misses.max(1) as f64)
            });
        }
        if self.results.iter().any(|result| result.remote_references > 0) {
            rows.add("from the other node", |result| {
                format!("{:.2}", result.remote_references as f64 / result.misses.max(1) as f64)
            });
        }
        let of_a_guest = self.setup.guest_page.is_some();
        let tables = if of_a_guest { "tables of the guest" } else { "tables of the process" };
        rows.add(tables, |result| Bytes::new(result.guest_tables_bytes).to_string());
        if of_a_guest {
            rows.add("tables of the host", |result| Bytes::new(result.host_tables_bytes).to_string());
        }
    }

    fn add_walks(&self, rows: &mut Rows<'_>) {
        rows.add("walk cycles per access", |result| format!("{:.3}", result.cycles_of_walks_per_access));
        if self.setup.guest_page.is_some() {
            let share = |result: &TracedResult| format!("{:.1} %", 100.0 * result.host_share_of_walk_cycles);
            rows.add("  share of the host's tables", share);
        }
        if self.results.iter().any(|result| result.remote_data > 0) {
            rows.add("data from the other node", |result| per(result.remote_data, result.accesses));
        }
    }

    fn add_policies(&self, rows: &mut Rows<'_>) {
        let bytes = |bytes: u64| Bytes::new(bytes).to_string();
        rows.add_of_policy("host coverage 2m at the end", |side| share(side.host_coverage_2m_at_end_bp));
        rows.add_of_policy("host coverage 2m over time", |side| share(side.host_coverage_2m_mean_bp));
        rows.add_of_policy("bloat at the end", |side| bytes(side.bloat_at_end_bytes));
        rows.add_of_policy("bloat at most", |side| bytes(side.bloat_at_most_bytes));
        rows.add_of_policy("resident at the end", |side| bytes(side.resident_at_end_bytes));
        rows.add_of_policy("plans", |side| side.plans.to_string());
        rows.add_of_policy("copied", |side| bytes(side.copied_bytes));
        rows.add_of_policy("cycles of the actions", |side| side.cycles_of_actions.to_string());
        let sides = self.results.iter().filter_map(|result| result.policy.as_ref());
        let names: BTreeSet<&String> = sides.flat_map(|side| side.outcomes.keys()).collect();
        for name in names {
            rows.add_of_policy(name, |side| side.outcomes.get(name).unwrap_or(&0).to_string());
        }
    }

    fn heading(&self) -> String {
        let TraceInfo { kernel, class, parameters, arena_bytes, iterations, class_iterations, is_cut } = &self.trace;
        let names: Vec<&str> =
            [kernel, class, parameters].into_iter().map(String::as_str).filter(|s| !s.is_empty()).collect();
        let mut out = format!("{}: {}", clean(&names.join(" ")), Bytes::new(*arena_bytes));
        if *class_iterations > 0 {
            let _ = write!(out, ", {iterations} of {class_iterations} iterations");
        }
        if *is_cut {
            out += ", incomplete";
        }
        let TracedSetup { guest_page, levels, is_core_shared, remote, .. } = &self.setup;
        let _ = match guest_page {
            Some(page) => write!(out, "\n  in a guest on {page} pages, {levels} + {levels} levels of page tables"),
            None => write!(out, "\n  in a process, {levels} levels of page tables"),
        };
        out += if *is_core_shared { ", with a shared core" } else { "" };
        if !remote.is_empty() {
            let _ = write!(out, ", {} on the other node", remote.join(" and "));
        }
        out += "; simulated\n";
        out
    }
}

/// A table with a column per simulation.
struct Rows<'a> {
    results: &'a [TracedResult],
    table: Table,
}

impl<'a> Rows<'a> {
    /// The head of a table with these columns.
    fn of(results: &'a [TracedResult]) -> Rows<'a> {
        let columns = results.iter().map(|result| format!("{}\n{}", result.machine, result.pages));
        let header: Vec<String> = std::iter::once("machine\npages".to_owned()).chain(columns).collect();
        Rows { results, table: table(&header.iter().map(String::as_str).collect::<Vec<_>>()) }
    }

    fn add(&mut self, name: &str, value: impl Fn(&TracedResult) -> String) {
        let values = self.results.iter().map(|result| number(value(result)));
        self.table.add_row(std::iter::once(Cell::new(name)).chain(values));
    }

    /// Adds a row about the policies; a simulation of fixed pages has a dash in it.
    fn add_of_policy(&mut self, name: &str, value: impl Fn(&PolicySide) -> String) {
        self.add(name, |result| result.policy.as_ref().map_or("-".to_owned(), &value));
    }
}

fn per(part: u64, whole: u64) -> String {
    format!("{:.5}", part as f64 / whole.max(1) as f64)
}

fn share(bp: u32) -> String {
    PerTenThousand::new(bp).to_string()
}
