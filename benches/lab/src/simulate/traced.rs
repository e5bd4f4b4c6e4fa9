//! `wideleaf-lab simulate --trace`: accesses through the TLBs of machines, on fixed pages or on pages that policies
//! choose.
//!
//! ```text
//!                    ┌─ thread ── source from its start ──▶ policy on a simulated host ──▶ machine ──┐
//!   machines × arms ─┼─ thread ── …                                                                  ├─▶ report, plot
//!                    └─ …            as many as there are CPUs                                       ┘
//! ```

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::ProgressBar;
use wideleaf_policies::policy::RamStart;
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice};
use wideleaf_simulator::calibrated::{Calibration, walk_cost};
use wideleaf_simulator::simulated::{Clock, HostConfig, LocalNode, Managed};
use wideleaf_simulator::simulator::Options;
use wideleaf_simulator::space::ARENA_MAX;
use wideleaf_simulator::{AddressSpace, Machine, Paging, Simulator, streams};
use wideleaf_trace::Access;

use super::args::{MachinesArg, Remote, SimulateArgs};
use super::report::{HistoryPoint, PolicySide, TraceInfo, TracedReport, TracedResult, TracedSetup};
use super::source::{Blocks, Source, SourceInfo};
use super::{machines, plot};
use wideleaf::output::Output;
use wideleaf::progress::visible_bar;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::output_file::{OutputFile, refuse_standard_output};
use wideleaf_run::same_file::refuse_one_file_for_two;

/// Choice of the host's pages.
#[derive(Clone, Debug)]
enum Arm {
    /// Fixed: all of them have this size.
    Fixed(PageSize),
    /// Chosen by a policy.
    Managed(PolicyChoice),
}

/// One simulation of the product.
struct Combination {
    machine: &'static Machine,
    arm: Arm,
}

/// Settings that all simulations share.
struct Setting<'a> {
    source: &'a Source,
    arena: Bytes,
    args: &'a SimulateArgs,
}

/// Most points in a history of fixed pages.
const POINTS_MAX: usize = 2048;

/// Runs the simulation of a trace.
///
/// # Errors
/// [`Failure`] if arguments contradict each other, the trace is unusable, or a result could not be written.
pub fn main(source: &str, policies: &[PolicyChoice], args: &SimulateArgs) -> Result<(), Failure> {
    let machines = match &args.machine {
        Some(MachinesArg::Use(machines)) => machines.as_slice(),
        Some(MachinesArg::Help) => return machines::list(Output::open(args.format, args.output.as_deref())?),
        None => {
            let why = "cannot simulate: no machine is named; use --machine NAME (--machine help lists them)";
            return Err(Failure::Usage(why.into()));
        }
    };
    let too_flat = machines.iter().find(|machine| u32::from(args.levels) > machine.levels_max.value);
    if let Some(Machine { name, levels_max, .. }) = too_flat {
        let most = levels_max.value;
        return Err(Failure::Usage(format!(
            "cannot use --levels {}: {name} walks tables of at most {most} levels",
            args.levels
        )));
    }
    if let Some(machine) = machines.iter().find(|machine| args.smt && machine.threads.value == 1) {
        let why = format!("a core of {} has one thread; leave out --smt or the machine", machine.name);
        return Err(Failure::Usage(format!("cannot use --smt: {why}")));
    }
    if args.native && args.remote.contains(&Remote::HostTables) {
        return Err(Failure::Usage(
            "cannot use --remote host-tables with --native: a process has one table, guest-tables".into(),
        ));
    }
    let written = [("--plot", args.plot.as_deref()), ("--output", args.output.as_deref())];
    refuse_one_file_for_two([("--trace", Path::new(source))], written)?;
    let source = Source::parse(source)?;
    let info = source.open()?.info;
    check_memory(&info, args)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let plot = args.plot.as_deref().map(open_plot).transpose()?;

    let setting = Setting { source: &source, arena: info.arena, args };
    let results = setting.run_all(&combinations(machines, policies, &args.host_page))?;
    let report = TracedReport { trace: TraceInfo::new(&info, &results), setup: TracedSetup::new(args), results };
    if let Some(plot) = plot {
        plot.put(plot::svg(&report).as_bytes())?;
    }
    output.write(&report, TracedReport::to_table)
}

fn open_plot(path: &Path) -> Result<OutputFile, Failure> {
    refuse_standard_output("--plot", path)?;
    OutputFile::open("--plot", path)
}

fn check_memory(info: &SourceInfo, args: &SimulateArgs) -> Result<(), Failure> {
    let arena = info.arena;
    if arena == Bytes::ZERO || arena > ARENA_MAX {
        return Err(Failure::Input(format!(
            "cannot simulate a trace of {arena} of memory: the limits are one byte and {ARENA_MAX}"
        )));
    }
    match args.memory {
        Some(memory) if memory < arena => Err(Failure::Usage(format!(
            "cannot use --memory {memory}: the trace accesses {arena}; give the host at least that amount"
        ))),
        _ => Ok(()),
    }
}

/// Fixed sizes first, then policies, on each machine; base pages by default.
fn combinations(machines: &[&'static Machine], policies: &[PolicyChoice], pages: &[PageSize]) -> Vec<Combination> {
    let fixed = if pages.is_empty() && policies.is_empty() { &[PageSize::Base4K] } else { pages };
    let arms = || fixed.iter().map(|page| Arm::Fixed(*page)).chain(policies.iter().cloned().map(Arm::Managed));
    machines.iter().flat_map(|machine| arms().map(|arm| Combination { machine, arm })).collect()
}

impl Setting<'_> {
    fn run_all(&self, combinations: &[Combination]) -> Result<Vec<TracedResult>, Failure> {
        let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
        let bar =
            visible_bar(BAR_STEPS * combinations.len() as u64, "{spinner} simulating {wide_bar} {percent}% {eta}");
        let next = AtomicUsize::new(0);
        // The first failure counts: simulations that it stops fail later, for that reason only.
        let failed = OnceLock::new();
        let results: Vec<_> = combinations.iter().map(|_| OnceLock::new()).collect();
        let is_over = || failed.get().is_some() || interrupts.is_set();
        let work = || {
            while let Some((combination, place)) = {
                let number = next.fetch_add(1, Ordering::Relaxed);
                combinations.get(number).zip(results.get(number)).filter(|_| !is_over())
            } {
                match self.run(combination, &Progress::new(&bar), &is_over) {
                    Ok(result) => drop(place.set(result)),
                    Err(failure) => drop(failed.set(failure)),
                }
            }
        };
        let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        std::thread::scope(|scope| {
            (0..cpus.min(combinations.len())).for_each(|_| drop(scope.spawn(work)));
        });
        bar.finish_and_clear();
        interrupts.check()?;
        match failed.into_inner() {
            Some(failure) => Err(failure),
            None => Ok(results.into_iter().filter_map(OnceLock::into_inner).collect()),
        }
    }

    fn run(&self, of: &Combination, progress: &Progress, is_over: &dyn Fn() -> bool) -> Result<TracedResult, Failure> {
        let mut blocks = self.source.open()?;
        let policy = match &of.arm {
            Arm::Fixed(_) => None,
            Arm::Managed(choice) => Some(choice.make_for(&self.walk_cost(of.machine))),
        };
        let prefaulted = policy.as_ref().is_some_and(|policy| policy.ram_start() == RamStart::HugeAndPrefaulted);
        let mut simulator = Simulator::with_options(of.machine, self.space(&of.arm, prefaulted), self.options());
        let mut managed = policy.map(|policy| Managed::new(self.host(), policy, &mut simulator));
        let (points, is_limited) = self.feed(&mut blocks, &mut simulator, managed.as_mut(), progress, is_over)?;
        let history = match &managed {
            Some(managed) => managed.history().samples().iter().map(HistoryPoint::of).collect(),
            None => points,
        };
        Ok(TracedResult::new(
            of.machine.name,
            match &of.arm {
                Arm::Fixed(page) => page.name().to_owned(),
                Arm::Managed(choice) => choice.to_string(),
            },
            &simulator,
            managed.as_ref().map(PolicySide::of),
            history,
            is_limited || blocks.is_cut(),
        ))
    }

    /// Cost of a miss on that machine over the memory of the trace, for policies.
    fn walk_cost(&self, machine: &Machine) -> WalkCost {
        let SimulateArgs { native: is_native, levels, .. } = *self.args;
        let paging = Paging { guest_levels: levels, host_levels: levels };
        let calibration = Calibration { footprint: self.arena, paging, is_native, options: self.options() };
        walk_cost(machine, &calibration)
    }

    fn options(&self) -> Options {
        Options { is_core_shared: self.args.smt, distances: self.args.distances(), ..Options::default() }
    }

    /// Under a policy everything begins on base pages, except memory and tables that are large before the guest runs.
    fn space(&self, arm: &Arm, is_prefaulted: bool) -> AddressSpace {
        let SimulateArgs { native, guest_page, levels, .. } = *self.args;
        let host = match arm {
            Arm::Fixed(page) => *page,
            Arm::Managed(_) => PageSize::Base4K,
        };
        if native {
            return AddressSpace::native_with_levels(self.arena, host, levels);
        }
        let paging = Paging { guest_levels: levels, host_levels: levels };
        let mut space = AddressSpace::nested(self.arena, guest_page, host, paging);
        if is_prefaulted {
            space.set_host_of_tables(PageSize::Huge2M);
        }
        space
    }

    fn host(&self) -> HostConfig {
        let args = self.args;
        // A policy changes a process's own pages: there are no larger guest pages to consider.
        let guest_page = if args.native { PageSize::Huge2M } else { args.guest_page };
        let config = HostConfig::new(self.arena, guest_page);
        let huge_pages = args.local_huge_pages.unwrap_or(u64::MAX);
        HostConfig {
            local_node: args.local_memory.map(|memory| LocalNode { memory, huge_pages }),
            memory: args.memory.unwrap_or(config.memory),
            giant_pages: args.giant_pages,
            clock: Clock { cycles_per_access: args.cycles_per_access },
            interval: args.interval,
            ..config
        }
    }

    /// Feeds all accesses, or the requested number. Returns misses over time, and whether the limit was reached.
    fn feed(
        &self,
        blocks: &mut Blocks,
        simulator: &mut Simulator,
        mut managed: Option<&mut Managed>,
        progress: &Progress,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(Vec<HistoryPoint>, bool), Failure> {
        let clock = Clock { cycles_per_access: self.args.cycles_per_access };
        let limit = self.args.accesses.unwrap_or(u64::MAX);
        let (mut block, mut points, mut done) = (Vec::new(), Vec::new(), 0);
        while done < limit && blocks.next(&mut block)? {
            done += cut(&mut block, limit - done);
            match managed.as_deref_mut() {
                // Pages may change between any two accesses.
                Some(managed) => {
                    for access in &block {
                        managed.access(access.address, access.repeats, simulator);
                        simulator.access_repeated(access.address, access.is_write, access.repeats);
                    }
                }
                None => simulator.run(block.iter().map(|&Access { address, is_write, repeats }| streams::Access {
                    address,
                    is_write,
                    repeats,
                })),
            }
            points.push(HistoryPoint::of_misses(clock.moment(done), done, simulator.counts().data_misses()));
            thin_out(&mut points);
            progress.set(blocks.share_done().max(done as f64 / limit as f64));
            if is_over() {
                return Err(Failure::Interrupted);
            }
        }
        if let Some(managed) = managed {
            managed.end(simulator);
        }
        progress.set(1.0);
        Ok((points, done >= limit))
    }
}

/// Shortens a block to this number of accesses. Returns the remaining number.
fn cut(block: &mut Vec<Access>, most: u64) -> u64 {
    let mut sum = 0;
    block.retain_mut(|access| {
        let left = most - sum;
        access.repeats = u32::try_from(left).map_or(access.repeats, |left| access.repeats.min(left));
        sum += u64::from(access.repeats);
        access.repeats > 0
    });
    sum
}

/// Keeps every second point whenever there are too many; the last one stays.
fn thin_out(points: &mut Vec<HistoryPoint>) {
    if points.len() > POINTS_MAX {
        let mut number = points.len();
        points.retain(|_| {
            number -= 1;
            number.is_multiple_of(2)
        });
    }
}

/// Steps of the bar per simulation.
const BAR_STEPS: u64 = 1000;

/// One simulation's part of the bar.
struct Progress<'a> {
    bar: &'a ProgressBar,
    shown: std::cell::Cell<u64>,
}

impl Progress<'_> {
    fn new(bar: &ProgressBar) -> Progress<'_> {
        Progress { bar, shown: std::cell::Cell::new(0) }
    }

    fn set(&self, share: f64) {
        let steps = ((share * BAR_STEPS as f64) as u64).min(BAR_STEPS);
        self.bar.inc(steps.saturating_sub(self.shown.get()));
        self.shown.set(steps.max(self.shown.get()));
    }
}
