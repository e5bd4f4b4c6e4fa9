//! A run, in three states. Each owns its guards, declared in the order in which they are given back.
//!
//! ```text
//!   RunSpec ─▶ Prepared ──────────▶ Running ──────────▶ Over ────────────▶ Finished
//!              files and RAM exist;  guest, console,     guest is gone;     report, and the failure
//!              sandbox is planned    manager, sockets    manager still is   that the end stands for
//! ```
//!
//! Each state has a file with what leads out of it: `opening`, `starting`, `running`, `over`. The order of all steps is
//! in the log (`guards.rs`), and a test of the command line compares it.

mod opening;
mod over;
mod running;
mod starting;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use wideleaf_memory::block_supply::SupplyRules;
use wideleaf_memory::manager::{AccessesBefore, ManagerConfig, OutOfReach};
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{BackingConfig, GuestRam, LinuxHost};
use wideleaf_vmm::devices::virtio::VirtioDevice;
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use crate::control_socket::ControlSocket;
use crate::devices::WatchedDevices;
use crate::engine::opening::{Claim, Memory, Opened};
use crate::environment::stolen_ms;
use crate::failure::Failure;
use crate::front_end::{FrontEnd, NoProgress, Progress, Quiet, ThreadBegin, Work};
use crate::guardian::cgroup;
use crate::guardian::giant_pages::HeldGiantMaker;
use crate::guardian::path::HeldPath;
use crate::guards::{Noted, step};
use crate::guest::GuestPlan;
use crate::interrupts::Interrupts;
use crate::migration::Incoming;
use crate::output_file::OutputFile;
use crate::report::RunReport;
use crate::sandboxed;
use crate::session::Session;
use crate::snapshot::restoring::Restoring;
use crate::spec::{Console, RunSpec};

/// Name of the fact in a recording with the table of TLB miss costs that its policy used.
pub const WALK_COST_FACT: &str = "walk_cost";

/// A run that has begun and ended.
#[derive(Debug)]
pub struct Finished {
    /// Report of what was observed, with the outcome.
    pub report: RunReport,
    /// Failure that the end stands for, if any: a crash, a timeout or an interrupt.
    pub end: Result<(), Failure>,
}

/// Runs `spec` until it ends, and shows nothing.
///
/// # Errors
/// [`Failure`], also if the run was stopped or its guest crashed. The guest is then gone and its memory released.
pub fn execute(spec: &RunSpec, interrupts: &Interrupts, process_start: Instant) -> Result<RunReport, Failure> {
    let Finished { report, end } = run(spec, Arc::new(Quiet), interrupts, process_start)?;
    end.map(|()| report)
}

/// Runs `spec` until it ends or is stopped, and reports what was observed in either case.
///
/// # Errors
/// [`Failure`] of a run that did not begin, or of a guest that refused its arguments: then there is nothing to report.
/// The guest is gone and its memory released.
pub fn run(
    spec: &RunSpec,
    front: Arc<dyn FrontEnd>,
    interrupts: &Interrupts,
    process_start: Instant,
) -> Result<Finished, Failure> {
    Prepared::new(spec, None, front, interrupts)?.start()?.wait()?.report(process_start)
}

/// Runs a VM that comes from another run, which `spec` describes together with this host's options, like [`run`].
///
/// # Errors
/// [`Failure`] as well if it does not come; it then goes on where it is.
pub fn run_incoming(
    spec: &RunSpec,
    incoming: &Arc<Incoming>,
    front: Arc<dyn FrontEnd>,
    interrupts: &Interrupts,
    process_start: Instant,
) -> Result<Finished, Failure> {
    let running = Prepared::new(spec, Some(incoming.clone()), front, interrupts).and_then(Prepared::start);
    running.inspect_err(|why| incoming.refuse(&why.to_string()))?.wait()?.report(process_start)
}

/// A run with its files, its RAM and a planned sandbox.
struct Prepared<'a> {
    spec: &'a RunSpec,
    interrupts: &'a Interrupts,
    front: Arc<dyn FrontEnd>,
    stolen_before_ms: u64,
    walk: ChosenWalkCost,
    config: ManagerConfig,
    backing: BackingConfig,
    /// Reason why the backing differs from the requested one, if it does.
    fallback: Option<String>,
    /// Reason why the host could not meet the guarantee at the start, if it could not.
    short_of_guarantee: Option<String>,
    // From here on in the order in which they are given back: the reverse of the order in which they are taken.
    session: Arc<Session>,
    progress: Arc<dyn Progress>,
    record: Option<File>,
    host: Arc<LinuxHost>,
    _ram_noted: Noted,
    ram: Arc<GuestRam>,
    socket: Option<ControlSocket>,
    _claim: Claim,
    sandbox: Option<Arc<Sandbox>>,
    plan: Option<GuestPlan>,
    /// Snapshot that the guest continues, if it does.
    restoring: Option<Arc<Restoring>>,
    /// Run that the guest comes from, if it does.
    incoming: Option<Arc<Incoming>>,
    /// Samples of accesses that came with a guest that continues; empty once the manager has them.
    accesses_before: Vec<AccessesBefore>,
    giant_maker: Option<HeldGiantMaker>,
    /// Why the loader's giant is not on a page of 1 GiB, if the policy wanted one there.
    giant_before_loading: Option<String>,
    _held: Vec<HeldPath>,
    /// Observable parts of the devices, until the drivers are known.
    watched: WatchedDevices,
    /// Devices for the machine; empty once it has them.
    devices: Vec<Box<dyn VirtioDevice>>,
}

impl<'a> Prepared<'a> {
    /// Opens and checks everything that needs no guest. The process has one thread while the sandbox is planned.
    fn new(
        spec: &'a RunSpec,
        incoming: Option<Arc<Incoming>>,
        front: Arc<dyn FrontEnd>,
        interrupts: &'a Interrupts,
    ) -> Result<Prepared<'a>, Failure> {
        let stolen_before_ms = stolen_ms();
        if spec.sandbox.is_none() {
            serve_lines(&*front, None)?;
        }
        let (walk, config) = (walk_cost(), manager_config(spec.out_of_reach));
        let mut opened = Opened::open(spec, incoming, &*front)?;
        interrupts.stand_down();
        let sandbox = opened.plan_sandbox(spec)?;
        let memory = Memory::map(spec, &opened)?;
        opened.receive(spec, &memory, interrupts)?;
        memory.populate(spec, &opened, &*front, interrupts)?;
        // The sandbox allows what is opened and asked of the host from here on.
        let record = opened.record.take().map(OutputFile::begin).transpose()?;
        let progress = progress_of(spec, &*front);
        let session =
            Session::new(memory.host.clone(), memory.ram.clone(), spec.policy_delay, front.clone(), progress.clone());
        opened.said.take().into_iter().for_each(|said| session.begin_with(said));
        Ok(Prepared {
            spec,
            interrupts,
            front,
            stolen_before_ms,
            walk,
            config,
            backing: opened.chosen.backing,
            fallback: opened.chosen.fallback,
            short_of_guarantee: opened.short_of_guarantee,
            progress,
            session,
            record,
            host: memory.host,
            _ram_noted: memory.ram_noted,
            ram: memory.ram,
            socket: memory.socket,
            _claim: memory.claim,
            sandbox,
            plan: opened.plan,
            restoring: opened.restoring,
            incoming: opened.incoming,
            accesses_before: opened.accesses_before,
            giant_maker: opened.giant_maker,
            giant_before_loading: memory.giant_before_loading,
            devices: opened.devices,
            watched: opened.watched,
            _held: opened.held,
        })
    }
}

/// Progress of the guest on the terminal, unless its console has standard output.
fn progress_of(spec: &RunSpec, front: &dyn FrontEnd) -> Arc<dyn Progress> {
    match spec.console {
        Console::Bytes => Arc::new(NoProgress),
        Console::Lines | Console::Nothing => front.progress(Work::Guest(&spec.workload_name())),
    }
}

/// Lets the front end write its lines, inside the sandbox if there is one.
fn serve_lines(front: &dyn FrontEnd, sandbox: Option<&Arc<Sandbox>>) -> Result<(), Failure> {
    front.serve(begin_console(sandbox))?;
    step("standard error served");
    Ok(())
}

/// First action of a thread that only writes, or reads the console.
fn begin_console(sandbox: Option<&Arc<Sandbox>>) -> ThreadBegin {
    let sandbox = sandbox.cloned();
    Arc::new(move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Console)))
}

/// Cost of a TLB miss; a measurement that cannot be used is reported once.
pub fn walk_cost() -> ChosenWalkCost {
    let walk = ChosenWalkCost::read(Path::new("/"));
    walk.note.iter().for_each(|note| tracing::warn!("{note}"));
    walk
}

/// At most half of the CPUs, and at most four, copy at once. The guest needs the other half, and four saturate the
/// memory of most hosts. Without a daemon the run makes free blocks by itself, unless a cgroup limits its memory:
/// blocks that it holds for a moment would drive out pages of the guest.
fn manager_config(out_of_reach: Option<OutOfReach>) -> ManagerConfig {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let copy_threads = (cpus / 2).clamp(1, 4) as u16;
    let supply = (!cgroup::is_memory_limited()).then(SupplyRules::default);
    ManagerConfig { copy_threads, out_of_reach: out_of_reach.unwrap_or_default(), supply, ..ManagerConfig::default() }
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::PerTenThousand;

    use super::*;

    #[test]
    fn the_manager_keeps_to_the_part_of_the_time_that_the_run_says() {
        let tenth = OutOfReach::nearest_to(PerTenThousand::new(1_000));
        assert_eq!(manager_config(Some(tenth)).out_of_reach, tenth);
        assert_eq!(manager_config(None).out_of_reach, ManagerConfig::default().out_of_reach);
    }
}
