//! The metrics for Prometheus in OpenMetrics' text form: one table of families, each with its name, its help and
//! the source of its rows.
//!
//! Every row of a VM has the labels `vm`, `uuid` and `pid`. Two guests may have one name and no UUID, and two rows
//! with the same labels make Prometheus refuse the whole scrape.
//!
//! Counters and histograms begin at zero with each daemon, as Prometheus expects of a process that starts anew
//! ([`ScrapedVm::counted`]). `wideleaf info` has the totals over all daemons.

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use wideleaf_control::view::{Care, DaemonView, NodeView, PAUSE_BOUNDS_S, Quantiles, RecoveriesView, VmView, WorkView};
use wideleaf_control::vm::PastSavesView;
use wideleaf_memory::block_supply::SupplyReport;
use wideleaf_memory::pool::PoolStatus;
use wideleaf_policies::Bytes;

mod endpoint;
mod exchange;
mod format;

pub use endpoint::MetricsServer;

/// Data of one scrape.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// The managed VMs.
    pub vms: Vec<ScrapedVm>,
    /// View of the daemon.
    pub daemon: DaemonView,
    /// Resident memory of the daemon in bytes, where the kernel reports it.
    pub resident: Option<Bytes>,
    /// The host's hugetlb pools.
    pub pools: Vec<PoolStatus>,
    /// Price of a huge page at weight 1, in cycles per second; 0 while they are not short.
    pub huge_page_price: u64,
    /// Counters of the supply of free blocks, since the daemon's start.
    pub supply: SupplyReport,
}

/// A managed VM in a scrape.
#[derive(Clone, Debug)]
pub struct ScrapedVm {
    /// View of the VM.
    pub view: VmView,
    /// Counters since this daemon, or the VM's own process, took it. A row of these never drops except to zero.
    pub counted: Option<WorkView>,
    /// Its windows by the reason why they are not large, and [`LARGE`].
    pub windows: BTreeMap<String, u64>,
    /// Whether it meets its guarantee, or has at least not been reported as missing it.
    pub is_guarantee_met: bool,
    /// Whether it is promoted at once until it meets its guarantee.
    pub is_guarantee_pursued: bool,
}

/// Label of windows in large pages, beside the reasons of the others.
pub const LARGE: &str = "large";

/// Upper bound on the reasons of a VM: a run reports its own, and each is a series. There are fewer in this release.
const REASONS_MAX: usize = 64;

/// One family of metrics.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Name as registered; a counter's rows end in `_total`.
    pub name: &'static str,
    /// Meaning, with its unit.
    pub help: &'static str,
    rows: Rows,
}

/// Source and type of the rows.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Gauge(fn(&Scrape) -> Vec<Row<f64>>),
    Counter(fn(&Scrape) -> Vec<Row<f64>>),
    Histogram(fn(&Scrape) -> Vec<Row<Quantiles>>),
}

type Labels = Vec<(&'static str, String)>;
type Row<T> = (Labels, T);

impl Family {
    /// Name of the family's rows.
    pub fn row_name(&self) -> String {
        match self.rows {
            Rows::Counter(_) => format!("{}_total", self.name),
            Rows::Gauge(_) | Rows::Histogram(_) => self.name.to_owned(),
        }
    }
}

const fn gauge(name: &'static str, help: &'static str, rows: fn(&Scrape) -> Vec<Row<f64>>) -> Family {
    Family { name, help, rows: Rows::Gauge(rows) }
}

const fn counter(name: &'static str, help: &'static str, rows: fn(&Scrape) -> Vec<Row<f64>>) -> Family {
    Family { name, help, rows: Rows::Counter(rows) }
}

/// All families of metrics.
pub const FAMILIES: &[Family] = &[
    gauge("wideleaf_vm_backing_bytes", "Guest memory by the size of the host's pages behind it", |scrape| {
        each_vm(scrape, |vm| {
            let sizes =
                vm.backing.map(|backing| [backing.unbacked, backing.base_4k, backing.huge_2m, backing.giant_1g]);
            sizes.map_or(Vec::new(), |sizes| by("size", &["unbacked", "4k", "2m", "1g"], sizes))
        })
    }),
    gauge("wideleaf_vm_second_level_bytes", "Guest memory by the size of KVM's mappings of it", |scrape| {
        each_vm(scrape, |vm| {
            let mapped =
                vm.mapping.map(|mapping| [mapping.pages_4k << 12, mapping.pages_2m << 21, mapping.pages_1g << 30]);
            mapped.map_or(Vec::new(), |sizes| by("size", &["4k", "2m", "1g"], sizes))
        })
    }),
    gauge("wideleaf_vm_page_tables_bytes", "Page tables of the VM's process, without KVM's", |scrape| {
        each_vm(scrape, |vm| one(vm.page_tables.and_then(|tables| tables.process).map(|bytes| bytes as f64)))
    }),
    gauge(
        "wideleaf_vm_node_bytes",
        "Resident guest memory by NUMA node and page size; hosts with several nodes",
        |scrape| each_vm(scrape, |vm| of_nodes(vm, node_bytes)),
    ),
    gauge("wideleaf_vm_node_vcpus", "vCPUs by the NUMA node where they ran last; hosts with several nodes", |scrape| {
        each_vm(scrape, |vm| of_nodes(vm, |node| vec![(Vec::new(), f64::from(node.vcpus))]))
    }),
    gauge(
        "wideleaf_vm_local_memory_ratio",
        "Share of guest memory on NUMA nodes where its vCPUs ran last; hosts with several nodes",
        |scrape| each_vm(scrape, |vm| one(vm.numa.as_ref().and_then(|numa| numa.local_share).map(ratio))),
    ),
    gauge("wideleaf_vm_coverage_ratio", "Share of resident guest memory in pages of 2 MiB or more", |scrape| {
        each_vm(scrape, |vm| one(vm.coverage().map(ratio)))
    }),
    gauge(
        "wideleaf_vm_scan_age_seconds",
        "Time since the latest scan of all windows, the largest age of backing, coverage and windows by reason",
        |scrape| each_vm(scrape, |vm| one(vm.scan_age_s)),
    ),
    gauge("wideleaf_vm_windows", "Windows of 2 MiB by the reason why they are not large, and large ones", |scrape| {
        let row = |(reason, windows): (&String, &u64)| (vec![("reason", reason.clone())], *windows as f64);
        each(scrape, |vm| vm.windows.iter().take(REASONS_MAX).map(row).collect())
    }),
    gauge(
        "wideleaf_vm_misaligned_bytes",
        "Guest memory that can never be huge for its address or file offset",
        |scrape| each_vm(scrape, |vm| one(vm.backing.map(|backing| backing.misaligned as f64))),
    ),
    counter("wideleaf_vm_actions", "Actions by mechanism and outcome", |scrape| each_counted(scrape, actions)),
    Family {
        name: "wideleaf_vm_unavailable_seconds",
        help: "Time that windows were out of the guest's reach during an action",
        rows: Rows::Histogram(|scrape| each_counted(scrape, |work| vec![(Vec::new(), work.unavailable.clone())])),
    },
    gauge("wideleaf_vm_bloat_bytes", "Memory that became resident only because its page is large", |scrape| {
        each_work(scrape, |work| one(Some(work.bloat as f64)))
    }),
    counter("wideleaf_vm_copied_bytes", "Guest memory copied by promotions", |scrape| {
        each_counted(scrape, |work| one(Some(work.copied as f64)))
    }),
    counter("wideleaf_vm_budget_refusals", "Actions that the budget refused", |scrape| {
        each_counted(scrape, |work| one(Some(work.budget_refusals as f64)))
    }),
    gauge("wideleaf_vm_swapped_bytes", "Guest memory that is swapped out, where known", |scrape| {
        each_vm(scrape, |vm| one(vm.saved.swapped.map(|bytes| bytes as f64)))
    }),
    gauge("wideleaf_vm_merged_bytes", "Memory of the VM's process that is merged with equal memory (KSM)", |scrape| {
        each_vm(scrape, |vm| one(vm.saved.merged.map(|bytes| bytes as f64)))
    }),
    counter("wideleaf_vm_kernel_windows", "Windows that the kernel made large or split, not the manager", |scrape| {
        each_counted(scrape, |work| {
            let rows = work.by_kernel.iter();
            rows.map(|(change, count)| (vec![("change", change.clone())], *count as f64)).collect()
        })
    }),
    counter("wideleaf_vm_sensor_failures", "Failures of sensors, by name", |scrape| {
        each_counted(scrape, |work| {
            let rows = work.sensor_failures.iter();
            rows.map(|(sensor, count)| (vec![("sensor", sensor.clone())], *count as f64)).collect()
        })
    }),
    gauge(
        "wideleaf_vm_walk_share_ratio",
        "Share of the time of one CPU that the guest's page walks take, by estimate",
        |scrape| each_work(scrape, |work| one(work.walk_share.map(ratio))),
    ),
    gauge(
        "wideleaf_vm_recovery_seconds",
        "Time from the end of the latest event until 99 % of what was large before was large again",
        |scrape| {
            each_work(scrape, |work| {
                let rows = work.recoveries.iter();
                rows.filter_map(|(event, of)| Some((vec![("event", event.clone())], of.last_s?))).collect()
            })
        },
    ),
    counter("wideleaf_vm_recoveries", "Recoveries of large pages after an event, by event and outcome", |scrape| {
        each_counted(scrape, recoveries)
    }),
    counter("wideleaf_vm_saves", "Snapshots and migrations of a registered run, by kind and outcome", |scrape| {
        each_counted(scrape, |work| work.saves.iter().flat_map(saves).collect())
    }),
    gauge(
        "wideleaf_vm_snapshot_pause_seconds",
        "Pause of the guest in the latest snapshot of a registered run",
        |scrape| each_saves(scrape, |saves| saves.last_pause_ms),
    ),
    gauge(
        "wideleaf_vm_snapshot_system_seconds",
        "CPU time of the vCPUs in the kernel while the latest snapshot was taken, before the pause",
        |scrape| each_saves(scrape, |saves| saves.last_before_pause.map(|before| before.system_ms)),
    ),
    gauge(
        "wideleaf_vm_failed_save_system_seconds",
        "CPU time of the vCPUs in the kernel during the latest snapshot or migration that failed",
        |scrape| each_saves(scrape, |saves| saves.last_failed.map(|paid| paid.system_ms)),
    ),
    gauge(
        "wideleaf_vm_arrival_downtime_seconds",
        "Time for which no guest ran when a registered run came from another run",
        |scrape| each_saves(scrape, |saves| saves.arrival_downtime_ms),
    ),
    gauge(
        "wideleaf_vm_arrival_system_seconds",
        "CPU time of the vCPUs in the kernel of the source while a registered run was moved here, before the pause",
        |scrape| each_saves(scrape, |saves| saves.arrival_before_pause.map(|before| before.system_ms)),
    ),
    gauge("wideleaf_vm_recovering", "1 while windows are brought back after an event", |scrape| {
        each_work(scrape, |work| one(Some(f64::from(u8::from(work.is_recovering)))))
    }),
    gauge(
        "wideleaf_vm_guarantee_met",
        "1 unless the VM is below its guarantee for longer than the grace time",
        |scrape| each_promised(scrape, |vm| vm.is_guarantee_met),
    ),
    gauge(
        "wideleaf_vm_guarantee_pursued",
        "1 while the VM has priority and is promoted at once, because it was below its guarantee",
        |scrape| each_promised(scrape, |vm| vm.is_guarantee_pursued),
    ),
    gauge("wideleaf_vm_left_alone", "1 while nothing is done to the VM, with the reason", |scrape| {
        each_vm(scrape, |vm| match &vm.care {
            Care::LeftAlone { reason } => vec![(vec![("reason", reason.clone())], 1.0)],
            _ => Vec::new(),
        })
    }),
    counter("wideleaf_daemon_cpu_seconds", "CPU time of the daemon, actions included", |scrape| {
        one(Some(scrape.daemon.cpu_s))
    }),
    gauge("wideleaf_daemon_resident_bytes", "Resident memory of the daemon", |scrape| {
        one(scrape.resident.map(|resident| resident.get() as f64))
    }),
    gauge("wideleaf_daemon_uptime_seconds", "Uptime of the daemon", |scrape| one(Some(scrape.daemon.uptime_s))),
    gauge("wideleaf_daemon_vms", "Managed VMs", |scrape| one(Some(scrape.daemon.vms as f64))),
    gauge(
        "wideleaf_daemon_copy_limit_bytes_per_second",
        "Guest memory that may be copied per second, over all VMs",
        |scrape| one(Some(scrape.daemon.copy_per_second as f64)),
    ),
    gauge("wideleaf_host_free_bytes", "Memory of the host that is available without swapping", |scrape| {
        one(Some(scrape.daemon.host_free as f64))
    }),
    gauge(
        "wideleaf_host_second_level_tables_bytes",
        "Second-level page tables of the whole host: the kernel has no number for one VM",
        |scrape| {
            // Every VM's view has this number of the host; they differ by their age alone.
            let of_host = |vm: &ScrapedVm| vm.view.page_tables.and_then(|tables| tables.second_level_of_host);
            one(scrape.vms.iter().find_map(of_host).map(|bytes| bytes as f64))
        },
    ),
    gauge(
        "wideleaf_host_node_free_huge_pages",
        "Pages of 2 MiB in free blocks, and free pages of the pool of 1 GiB, by NUMA node; hosts with several nodes",
        |scrape| of_host_nodes(scrape, |node| by("size", &["2m", "1g"], [node.free_2m, node.free_1g])),
    ),
    gauge(
        "wideleaf_host_node_page_tables_bytes",
        "Page tables by NUMA node: of all processes, and second-level ones of all VMs; hosts with several nodes",
        |scrape| of_host_nodes(scrape, node_tables),
    ),
    gauge("wideleaf_host_short", "1 while the host is short of memory and no promotion may take more", |scrape| {
        one(Some(f64::from(u8::from(scrape.daemon.is_host_short))))
    }),
    gauge(
        "wideleaf_host_huge_page_price_cycles_per_second",
        "Cycles per second that a huge page has to save in a window of a VM of weight 1; 0 while huge pages suffice",
        |scrape| one(Some(scrape.huge_page_price as f64)),
    ),
    counter(
        "wideleaf_supply_blocks",
        "Requests for blocks of 2 MiB ahead of need: made by compaction, found free, refused by the kernel",
        |scrape| {
            let SupplyReport { made, found, refused, .. } = scrape.supply;
            by("result", &["made", "found", "refused"], [made, found, refused])
        },
    ),
    counter("wideleaf_supply_cpu_seconds", "CPU time of the thread that makes free blocks of 2 MiB", |scrape| {
        one(Some(scrape.supply.cpu.as_secs_f64()))
    }),
    counter("wideleaf_supply_moved_pages", "Base pages that the kernel moved while blocks were made", |scrape| {
        one(Some(scrape.supply.moved_pages as f64))
    }),
    counter("wideleaf_supply_unseen_blocks", "Blocks made or found that /proc/buddyinfo does not count", |scrape| {
        one(Some(scrape.supply.unseen as f64))
    }),
    counter("wideleaf_supply_stops", "Times that pressure stopped the making of blocks, by reason", |scrape| {
        let rows = scrape.supply.stopped.iter();
        rows.map(|(reason, times)| (vec![("reason", (*reason).to_owned())], *times as f64)).collect()
    }),
    gauge("wideleaf_pool_pages", "Pages of the hugetlb pools by state; node=\"all\" is the whole host", |scrape| {
        scrape.pools.iter().flat_map(pool).collect()
    }),
];

fn ratio(ten_thousandths: u32) -> f64 {
    f64::from(ten_thousandths) / 10_000.0
}

fn one<T>(value: Option<T>) -> Vec<Row<T>> {
    value.map(|value| (Vec::new(), value)).into_iter().collect()
}

fn by<const N: usize>(label: &'static str, names: &[&str; N], values: [u64; N]) -> Vec<Row<f64>> {
    names.iter().zip(values).map(|(name, value)| (vec![(label, (*name).to_owned())], value as f64)).collect()
}

fn labels(vm: &VmView) -> Labels {
    vec![("vm", vm.name.clone()), ("uuid", vm.uuid.clone().unwrap_or_default()), ("pid", vm.pid.to_string())]
}

/// Rows of each node of a VM.
fn of_nodes(vm: &VmView, rows: impl Fn(&NodeView) -> Vec<Row<f64>>) -> Vec<Row<f64>> {
    let label = |node: &NodeView| ("node", node.node.to_string());
    let of = |node: &NodeView| -> Vec<Row<f64>> {
        rows(node).into_iter().map(|(more, value)| ([vec![label(node)], more].concat(), value)).collect()
    };
    vm.numa.iter().flat_map(|numa| &numa.nodes).flat_map(of).collect()
}

/// Rows of each node of the host. Every VM's view has these numbers; they differ by their age alone.
fn of_host_nodes(scrape: &Scrape, rows: impl Fn(&NodeView) -> Vec<Row<f64>>) -> Vec<Row<f64>> {
    let with_nodes = scrape.vms.iter().find(|vm| vm.view.numa.is_some());
    with_nodes.map(|vm| of_nodes(&vm.view, rows)).unwrap_or_default()
}

fn node_bytes(node: &NodeView) -> Vec<Row<f64>> {
    let base_4k = node.memory.saturating_sub(node.huge_2m + node.giant_1g);
    by("size", &["4k", "2m", "1g"], [base_4k, node.huge_2m, node.giant_1g])
}

fn node_tables(node: &NodeView) -> Vec<Row<f64>> {
    let kinds = [("process", node.page_tables), ("second_level", node.second_level_tables)];
    let known = kinds.into_iter().filter_map(|(kind, bytes)| Some((kind, bytes?)));
    known.map(|(kind, bytes)| (vec![("kind", kind.to_owned())], bytes as f64)).collect()
}

fn each_vm<T>(scrape: &Scrape, rows: impl Fn(&VmView) -> Vec<Row<T>>) -> Vec<Row<T>> {
    each(scrape, |vm| rows(&vm.view))
}

/// Rows of VMs with a guarantee.
fn each_promised(scrape: &Scrape, is_so: impl Fn(&ScrapedVm) -> bool) -> Vec<Row<f64>> {
    let promised = scrape.vms.iter().filter(|vm| vm.view.guarantee.share().is_some());
    promised.map(|vm| (labels(&vm.view), f64::from(u8::from(is_so(vm))))).collect()
}

/// Rows of state, over all daemons.
fn each_work<T>(scrape: &Scrape, rows: impl Fn(&WorkView) -> Vec<Row<T>>) -> Vec<Row<T>> {
    each(scrape, |vm| vm.view.work.as_ref().map_or(Vec::new(), &rows))
}

/// A row of seconds for each VM that was saved or moved, by its milliseconds.
fn each_saves(scrape: &Scrape, ms: fn(&PastSavesView) -> Option<f64>) -> Vec<Row<f64>> {
    each_work(scrape, |work| one(work.saves.as_ref().and_then(ms).map(|ms| ms / 1e3)))
}

/// A migration that succeeds ends its run: the run to which the VM has come counts it.
fn saves(past: &PastSavesView) -> Vec<Row<f64>> {
    let row = |kind: &str, outcome: &str, count: u64| {
        (vec![("kind", kind.to_owned()), ("outcome", outcome.to_owned())], count as f64)
    };
    vec![
        row("snapshot", "done", past.snapshots),
        row("snapshot", "failed", past.snapshots_failed),
        row("migration", "done", past.migrations),
        row("migration", "failed", past.migrations_failed),
    ]
}

/// Rows of counters, of this daemon.
fn each_counted<T>(scrape: &Scrape, rows: impl Fn(&WorkView) -> Vec<Row<T>>) -> Vec<Row<T>> {
    each(scrape, |vm| vm.counted.as_ref().map_or(Vec::new(), &rows))
}

fn each<T>(scrape: &Scrape, rows: impl Fn(&ScrapedVm) -> Vec<Row<T>>) -> Vec<Row<T>> {
    let of = |vm: &ScrapedVm| -> Vec<Row<T>> {
        rows(vm).into_iter().map(|(more, value)| ([labels(&vm.view), more].concat(), value)).collect()
    };
    scrape.vms.iter().flat_map(of).collect()
}

fn actions(work: &WorkView) -> Vec<Row<f64>> {
    let of =
        |mechanism: &String, outcome: &String| vec![("mechanism", mechanism.clone()), ("outcome", outcome.clone())];
    let results = work.outcomes.iter();
    results
        .flat_map(|(mechanism, outcomes)| {
            outcomes.iter().map(move |(outcome, count)| (of(mechanism, outcome), *count as f64))
        })
        .collect()
}

fn recoveries(work: &WorkView) -> Vec<Row<f64>> {
    let of = |(event, of): (&String, &RecoveriesView)| {
        let row =
            |outcome: &str, count: u64| (vec![("event", event.clone()), ("outcome", outcome.to_owned())], count as f64);
        [row("done", of.done), row("cut_off", of.cut_off)]
    };
    work.recoveries.iter().flat_map(of).collect()
}

fn pool(pool: &PoolStatus) -> Vec<Row<f64>> {
    let labels =
        |node: String, state: &str| vec![("size", pool.size.to_string()), ("node", node), ("state", state.to_owned())];
    let whole = [("total", pool.total), ("free", pool.free), ("reserved", pool.reserved), ("surplus", pool.surplus)];
    let whole = whole.map(|(state, pages)| (labels("all".to_owned(), state), pages as f64));
    let nodes = pool.nodes.iter().flat_map(|node| {
        let states = [("total", node.total), ("free", node.free), ("surplus", node.surplus)];
        states.map(|(state, pages)| (labels(node.node.to_string(), state), pages as f64))
    });
    whole.into_iter().chain(nodes).collect()
}

/// The text of a scrape, in OpenMetrics' form.
pub fn text(scrape: Scrape) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => text,
        Err(fmt::Error) => unreachable!("writing to a String does not fail"),
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in FAMILIES {
            match family.rows {
                Rows::Gauge(rows) => encode_rows(&mut encoder, family, rows(self), Gauge)?,
                Rows::Counter(rows) => encode_rows(&mut encoder, family, rows(self), Counter)?,
                Rows::Histogram(rows) => encode_rows(&mut encoder, family, rows(self), Histogram)?,
            }
        }
        Ok(())
    }
}

fn encode_rows<T, M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    family: &Family,
    rows: Vec<Row<T>>,
    metric: impl Fn(T) -> M,
) -> fmt::Result {
    let mut rows = rows.into_iter().map(|(labels, value)| (labels, metric(value))).peekable();
    let Some((_, first)) = rows.peek() else { return Ok(()) };
    let mut family = encoder.encode_descriptor(family.name, family.help, None, first.metric_type())?;
    rows.try_for_each(|(labels, metric)| metric.encode(family.encode_family(&labels)?))
}

struct Gauge(f64);
struct Counter(f64);
struct Histogram(Quantiles);

impl EncodeMetric for Gauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&self.0)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl EncodeMetric for Counter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_counter::<Labels, f64, f64>(&self.0, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

impl EncodeMetric for Histogram {
    /// The view has counts at or below each bound. The encoder adds its buckets up itself, so it
    /// gets the differences.
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Histogram(Quantiles { count, sum_s, at_most, .. }) = self;
        let bounded = PAUSE_BOUNDS_S.into_iter().zip(at_most.iter().copied());
        let mut below = 0;
        let buckets: Vec<(f64, u64)> = bounded
            .chain([(f64::INFINITY, *count)])
            .map(|(bound, up_to)| {
                let within = up_to.saturating_sub(below);
                below = up_to.max(below);
                (bound, within)
            })
            .collect();
        encoder.encode_histogram::<Labels>(*sum_s, *count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests;
