//! A run, in three states. Each owns its guards, declared in the order in which they are given back.
//!
//! ```text
//!   RunSpec ─▶ Prepared ──────────▶ Running ──────────▶ Over ────────────▶ Finished
//!              files and RAM exist;  guest, console,     guest is gone;     report, and the failure
//!              sandbox is planned    manager, sockets    manager still is   that the end stands for
//! ```
//!
//! `opening.rs` has the first steps. The order of all steps is in the log (`guards.rs`), and a test of the command line
//! compares it.

mod opening;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use wideleaf_attach::host_clock::HostClock;
use wideleaf_attach::live_view::OwnGuest;
use wideleaf_attach::numa::of_live as nodes_of_live;
use wideleaf_control::view::NumaView;
use wideleaf_control::vm::MigratedView;
use wideleaf_memory::block_supply::SupplyRules;
use wideleaf_memory::manager::{AccessesBefore, ManagedVm, ManagerConfig, ManagerLoop, OutOfReach};
use wideleaf_memory::recorder::RecordTo;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{BackingConfig, GuestRam, Host as _, LinuxHost, Manager, SecondLevel};
use wideleaf_policies::{PerTenThousand, VmId};
use wideleaf_vmm::devices::virtio::VirtioDevice;
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use crate::control_socket::{ControlSocket, Controlled, ControlledVm};
use crate::devices::WatchedDevices;
use crate::engine::opening::{Claim, Memory, Opened};
use crate::environment::{Environment, stolen_ms};
use crate::failure::Failure;
use crate::front_end::{FrontEnd, GuestConsole, NoProgress, Progress, Quiet, ThreadBegin, Work};
use crate::guarantee::WatchedGuarantee;
use crate::guardian::cgroup;
use crate::guardian::giant_pages::HeldGiantMaker;
use crate::guardian::path::HeldPath;
use crate::guards::{Noted, step};
use crate::guest::{Fill, GuestPlan, Outside, RunningGuest};
use crate::interrupts::Interrupts;
use crate::migration::Incoming;
use crate::outcome::{Ended, Judged, judge};
use crate::output_file::OutputFile;
use crate::past_saves::{Arrival, AskArrival, PastSaves};
use crate::policy_switch::PolicySwitch;
use crate::recording::QueuedFile;
use crate::registered::{OwnOptions, Registered};
use crate::report::{GuaranteeReport, Left, RamAtEnd, RestoredReport, RunReport, Setup};
use crate::restarts::Restarts;
use crate::sandboxed::Sandboxed;
use crate::save_thread::SavingThread;
use crate::session::{Observed, Session};
use crate::setup::setup;
use crate::snapshot::parts::SavedParts;
use crate::snapshot::restoring::Restoring;
use crate::snapshot::restoring::teardown::Teardown;
use crate::spec::{Console, RunSpec};
use crate::summary::summarise;
use crate::users_pause::UsersPause;
use crate::{native, sandboxed};

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

    fn start(mut self) -> Result<Running<'a>, Failure> {
        match self.plan.take() {
            None => self.start_native(),
            Some(plan) => self.start_guest(plan),
        }
    }

    fn start_native(mut self) -> Result<Running<'a>, Failure> {
        let manager = self.start_manager(None)?;
        self.session.attach(None, Some(manager));
        let watched = Arc::new(std::mem::take(&mut self.watched));
        let work = Working::Native;
        Ok(Running { work, paging: "none", environment: Environment::capture(), sandboxed: None, watched, of: self })
    }

    fn start_guest(mut self, plan: GuestPlan) -> Result<Running<'a>, Failure> {
        let spec = self.spec;
        let is_console = spec.console == Console::Bytes;
        let mut console = is_console.then(|| self.front.open_console(self.interrupts)).transpose()?;
        let bytes = console.as_ref().map(|console| console.sink());
        let (sandbox, fill) = (self.sandbox.clone(), self.incoming.clone().map(|incoming| self.fill(incoming)));
        let outside = Outside { bytes, devices: std::mem::take(&mut self.devices), sandbox, fill };
        let guest = plan.start(self.ram.clone(), &self.session, &self.front, spec.console, outside)?;
        let watched = Arc::new(std::mem::take(&mut self.watched).driven_by(guest.drivers()));
        let kvm = guest.second_level();
        let begun = serve_lines(&*self.front, self.sandbox.as_ref())
            .and_then(|()| match &mut console {
                Some(console) => console.begin(guest.machine(), begin_console(self.sandbox.as_ref())),
                None => Ok(()),
            })
            .and_then(|()| spec.sandbox.as_ref().map_or(Ok(()), sandboxed::check_output))
            .and_then(|()| self.start_manager(Some(kvm.clone())));
        // Otherwise a vCPU that waits for the manager with its line would keep a stopped guest from ending.
        let manager = begun.inspect_err(|_| self.session.attach(None, None))?;
        self.session.attach(Some(kvm), Some(manager));
        let policy = Arc::new(PolicySwitch::new(spec.policy.clone(), self.walk.cost));
        let past = self.past_saves();
        let saving = self.serve_socket(&guest, &policy, &watched, &past)?;
        let registration = self.register(&policy, past.clone());
        let (guarantee, short) = (spec.guarantee, self.short_of_guarantee.take());
        let kept = WatchedGuarantee::start(guarantee, short, &policy, &self.session, &self.front, self.sandbox.clone());
        // The environment is read while the guest starts: reading some files takes as long as the start itself.
        let environment = Environment::capture();
        let teardown = self.start_teardown()?;
        self.sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Main));
        let sandboxed = guest.sandboxed();
        if let Some(incoming) = &self.incoming
            && let Err(why) = incoming.switch(&guest, &|| self.session.counters_now(), self.interrupts)
        {
            // Its devices may wait for RAM that does not come now: the source must not wait for them.
            incoming.refuse(&why.to_string());
            drop((kept, registration, saving));
            self.tear_down(teardown, guest);
            return Err(why);
        }
        if self.incoming.is_some() {
            past.count_arrival();
        }
        let paging = plan.paging;
        // The plan is given back with the sandbox.
        self.plan = Some(plan);
        let _registration = registration;
        let work = GuestWork { saving, guest, teardown, console, _registration, policy, kept };
        let work = Working::Guest(Box::new(work));
        Ok(Running { work, paging, environment, sandboxed, watched, of: self })
    }

    /// Record of the saves of this guest, with the figures of its source where it comes from another run.
    fn past_saves(&self) -> PastSaves {
        let arrival = self.incoming.as_ref().map(|incoming| {
            let incoming = Arc::downgrade(incoming);
            let figures = move || {
                let Left { downtime_ms, before_pause, .. } = incoming.upgrade()?.figures_of_source()?;
                Some(Arrival { downtime_ms, before_pause })
            };
            Arc::new(figures) as AskArrival
        });
        PastSaves::new(arrival)
    }

    /// Starts the thread that drops a guest of which a part of RAM may not come. It does what the main thread would.
    fn start_teardown(&self) -> Result<Option<Teardown<RunningGuest>>, Failure> {
        if self.restoring.is_none() && self.incoming.is_none() {
            return Ok(None);
        }
        let sandbox = self.sandbox.clone();
        let begin = move || {
            let entered = sandbox.iter().try_for_each(|sandbox| sandbox.enter_thread(ThreadKind::Main));
            entered.unwrap_or_else(|error| panic!("cannot restrict the thread that takes the guest apart: {error}"));
        };
        Teardown::start(begin)
            .map(Some)
            .map_err(|error| Failure::Host(format!("cannot start the thread that takes the guest apart: {error}")))
    }

    /// Drops the guest, unless a part of its RAM is lost: a device may sleep in a touch of RAM that will not come, and
    /// only the end of the process ends it.
    fn tear_down(&self, teardown: Option<Teardown<RunningGuest>>, guest: RunningGuest) {
        let has_lost_ram = || {
            self.restoring.as_ref().is_some_and(|restoring| restoring.has_failed())
                || self.incoming.as_ref().is_some_and(|incoming| incoming.has_failed())
        };
        match teardown {
            Some(teardown) => _ = teardown.tear_down(guest, has_lost_ram),
            None => drop(guest),
        }
    }

    /// Completes the RAM of a guest that comes from another run.
    fn fill(&self, incoming: Arc<Incoming>) -> Fill {
        let (sandbox, session) = (self.sandbox.clone(), self.session.clone());
        let may_recover = self.spec.control_socket.is_some();
        Box::new(move |ram, on_failure| {
            let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Faults));
            let count = Box::new(move || session.counters_now());
            incoming.begin_filling(ram, on_failure, may_recover, begin, count)
        })
    }

    fn start_manager(&mut self, second_level: Option<Arc<dyn SecondLevel>>) -> Result<Manager, Failure> {
        let progress = Some(self.session.readings());
        let guarantee = PerTenThousand::new(self.spec.guarantee.share().unwrap_or(0));
        let accesses_before = std::mem::take(&mut self.accesses_before);
        let vm = ManagedVm {
            progress,
            guarantee,
            accesses_before,
            ..ManagedVm::new(VmId(0), self.ram.clone(), second_level)
        };
        let policy = self.spec.policy.make_for(&self.walk.cost);
        let mut work = ManagerLoop::new(self.host.clone(), vec![vm], policy, self.config);
        if let Some(giant_maker) = &self.giant_maker {
            work = work.with_giant_maker(giant_maker.maker());
        }
        if let Some(why) = self.giant_before_loading.take() {
            work = work.without_giant_page(&why);
        }
        if let Some(file) = self.record.take() {
            let begin = begin_console(self.sandbox.as_ref());
            let file = QueuedFile::start(file, move || begin());
            let file = file.map_err(|error| Failure::Host(format!("cannot start the thread of --record: {error}")))?;
            let to = RecordTo { file: Box::new(file), facts: facts(self.spec, &self.walk) };
            work = work.recorded(to).map_err(|error| Failure::Usage(format!("cannot record (--record): {error}")))?;
        }
        Manager::spawn_loop(work).map_err(|error| Failure::Host(error.to_string()))
    }

    /// Answers clients of the VM's control socket, if it has one. The thread that saves the VM at a client's request
    /// ends before the guest's memory does.
    fn serve_socket(
        &mut self,
        guest: &RunningGuest,
        policy: &Arc<PolicySwitch>,
        watched: &Arc<WatchedDevices>,
        past: &PastSaves,
    ) -> Result<Option<Arc<SavingThread>>, Failure> {
        if self.socket.is_none() {
            return Ok(None);
        }
        let pause = Arc::new(UsersPause::new(guest.machine(), watched.locks().clone()));
        let saving = Arc::new(self.start_saving(guest, policy, &pause, watched.locks(), past)?);
        let parts = Controlled {
            pause,
            saving: Arc::downgrade(&saving),
            past: past.clone(),
            restoring: self.restoring.clone(),
            arriving: self.incoming.clone(),
            session: Arc::downgrade(&self.session),
            policy: policy.clone(),
            guest: OwnGuest::of_this_process(&self.ram, HostClock::showing(self.host.now())),
            devices: watched.clone(),
            workload: self.spec.workload_name(),
        };
        if let Some(socket) = &mut self.socket {
            socket.serve(ControlledVm::new(guest.machine(), parts), self.sandbox.as_ref());
        }
        Ok(Some(saving))
    }

    fn start_saving(
        &self,
        guest: &RunningGuest,
        policy: &Arc<PolicySwitch>,
        pause: &Arc<UsersPause>,
        disks: &DiskLocks,
        past: &PastSaves,
    ) -> Result<SavingThread, Failure> {
        let parts = SavedParts {
            ram: self.ram.clone(),
            host: self.host.clone(),
            second_level: guest.machine().kvm_second_level().clone(),
            machine: guest.machine().saver(),
            control: guest.machine().control(),
            session: Arc::downgrade(&self.session),
            pause: pause.clone(),
            policy: policy.clone(),
            restoring: self.restoring.clone(),
            disks: disks.clone(),
            is_arriving: {
                let incoming = self.incoming.clone();
                Box::new(move || incoming.as_ref().is_some_and(|incoming| incoming.is_filling()))
            },
            past: past.clone(),
            spec: self.spec.clone(),
        };
        let sandbox = self.sandbox.clone();
        let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Save));
        SavingThread::start(parts, begin)
            .map_err(|error| Failure::Host(format!("cannot start the thread that saves the VM: {error}")))
    }

    fn register(&self, policy: &Arc<PolicySwitch>, past: PastSaves) -> Option<Registered> {
        let socket = self.spec.daemon.as_ref()?;
        let guest = OwnGuest::of_this_process(&self.ram, HostClock::showing(self.host.now()));
        let own = OwnOptions { guarantee: self.spec.guarantee, out_of_reach: self.spec.out_of_reach };
        Some(Registered::start(socket, policy, guest, own, past, &self.session, self.sandbox.clone()))
    }
}

/// A run with a running guest or native kernel.
struct Running<'a> {
    // In the order in which they are given back.
    work: Working,
    /// Paging of the guest: `ept`, `npt` or `shadow`; `none` for a native run.
    paging: &'static str,
    environment: Environment,
    sandboxed: Option<Sandboxed>,
    watched: Arc<WatchedDevices>,
    of: Prepared<'a>,
}

/// The running part.
enum Working {
    /// A kernel in threads of this process, which the waiting thread starts.
    Native,
    /// A guest in KVM.
    Guest(Box<GuestWork>),
}

/// Guards of a running guest, in the order in which they are given back.
struct GuestWork {
    /// Before the guest: a save under way is cancelled.
    saving: Option<Arc<SavingThread>>,
    guest: RunningGuest,
    /// Drops the guest, where a part of its RAM may still be lost.
    teardown: Option<Teardown<RunningGuest>>,
    console: Option<Box<dyn GuestConsole>>,
    _registration: Option<Registered>,
    policy: Arc<PolicySwitch>,
    kept: Option<WatchedGuarantee>,
}

impl<'a> Running<'a> {
    /// Waits for the end of the guest or kernel, the timeout or an interrupt. Afterwards the guest is gone.
    fn wait(self) -> Result<Over<'a>, Failure> {
        let Running { of, work, paging, environment, sandboxed, watched } = self;
        let (mut migrated, mut first_entry) = (None, None);
        let (ended, resets, ram_at_end, console_bytes_lost, guarantee) = match work {
            Working::Native => {
                let ended = native::run(of.spec, &of.ram, &of.session, of.interrupts)?;
                (ended, 0, of.session.at_end(), 0, None)
            }
            Working::Guest(work) => {
                let GuestWork { saving, guest, teardown, console, _registration, policy, kept } = *work;
                let restarts = Restarts::new(&of.session, &policy, of.spec.is_prefaulted);
                let (ended, resets) = guest.wait(of.spec.timeout, of.interrupts, restarts);
                migrated = saving.and_then(SavingThread::end);
                let ended = if migrated.is_some() { Ended::Migrated } else { ended };
                of.incoming.iter().for_each(|incoming| incoming.give_up());
                let ram_at_end = of.session.at_end();
                first_entry = guest.machine().control().first_entry();
                of.tear_down(teardown, guest);
                let guarantee = kept.map(|kept| kept.report(ram_at_end.as_ref()));
                (ended, resets, ram_at_end, console.map_or(0, GuestConsole::end), guarantee)
            }
        };
        Ok(Over {
            ended,
            resets,
            migrated,
            first_entry,
            ram_at_end,
            numa: of.session.live().and_then(|live| nodes_of_live(&live)),
            guarantee,
            console_bytes_lost,
            paging,
            environment,
            sandboxed,
            watched,
            of,
        })
    }
}

/// A run after the end of its guest; its manager, its session and its RAM still exist.
struct Over<'a> {
    ended: Ended,
    /// Number of boots after the first.
    resets: u64,
    /// Run in which the guest continues, if it does.
    migrated: Option<MigratedView>,
    /// When a vCPU first entered the guest, if one has.
    first_entry: Option<Instant>,
    ram_at_end: Option<RamAtEnd>,
    /// Memory and vCPUs by NUMA node at the end; `None` on a host with one node.
    numa: Option<NumaView>,
    guarantee: Option<GuaranteeReport>,
    console_bytes_lost: u64,
    paging: &'static str,
    environment: Environment,
    sandboxed: Option<Sandboxed>,
    watched: Arc<WatchedDevices>,
    of: Prepared<'a>,
}

impl Over<'_> {
    /// Stops the manager and reports what was observed. Without the headline, which is for people.
    fn report(self, process_start: Instant) -> Result<Finished, Failure> {
        // The preparation is bound first, so that it is given back last.
        let Over { of, ended, resets, migrated, ram_at_end, numa, guarantee, console_bytes_lost, paging, .. } = self;
        let (mut environment, sandboxed, watched) = (self.environment, self.sandboxed, self.watched);
        let first_entry = self.first_entry;
        of.progress.finish();
        let manager = of.session.stop_manager();
        let mut observed = of.session.observed(manager.as_ref(), process_start);
        let is_at_request = matches!(ended, Ended::TimedOut | Ended::Interrupted | Ended::Asked | Ended::Migrated);
        let lines_lost = of.front.settle(&|| is_at_request || of.interrupts.is_set());
        step("standard error settled");
        for (what, count) in [("console_bytes", console_bytes_lost), ("stderr_lines", lines_lost)] {
            if count > 0 {
                observed.cut.insert(what.to_owned(), count);
            }
        }
        let devices = watched.reports();
        let progress = of.session.progress_here(process_start);
        let restored = of.restoring.as_ref().and_then(|restoring| restoring.end());
        let first_entry_ms = first_entry.map(|at| at.saturating_duration_since(process_start).as_secs_f64() * 1e3);
        let restored = restored.map(|restored| RestoredReport { progress, first_entry_ms, ..restored });
        of.incoming.iter().for_each(|incoming| incoming.end());
        let Judged { outcome, crash, end } = judge(of.spec, ended, &observed)?;
        environment.steal_ms = stolen_ms().saturating_sub(of.stolen_before_ms);
        let Observed { hello, problem, phases, regions, figure, results, gaps, verification, vmm, cut, .. } = observed;
        let setup = setup(of.spec, of.backing, paging, of.fallback.clone(), &environment);
        let report = RunReport {
            headline: String::new(),
            setup: Setup { walk_cost: of.walk.to_string(), sandbox: sandboxed, ..setup },
            hello,
            problem,
            outcome,
            crash,
            resets,
            figure,
            verification,
            results,
            phases,
            gaps,
            regions,
            ram_at_end,
            numa,
            restored,
            migrated,
            arrived: of.incoming.as_ref().map(|incoming| incoming.report()),
            guarantee,
            manager: manager.as_ref().map(summarise).unwrap_or_default(),
            devices,
            cut,
            vmm,
            environment,
        };
        Ok(Finished { report, end })
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

/// Facts about the run, for its recording.
fn facts(spec: &RunSpec, walk: &ChosenWalkCost) -> Vec<(String, String)> {
    let Environment { kernel, cpu, cpus, thp_enabled, is_virtual, wideleaf, .. } = Environment::capture();
    let facts = [
        ("workload", spec.workload_name()),
        ("cmdline", spec.cmdline.clone()),
        ("mode", if spec.is_native { "native" } else { "guest" }.to_owned()),
        ("kernel", kernel),
        ("cpu", cpu),
        ("cpus", cpus.to_string()),
        ("thp_enabled", thp_enabled),
        ("is_virtual", is_virtual.to_string()),
        ("wideleaf", wideleaf),
        (WALK_COST_FACT, walk.cost.to_string()),
    ];
    facts.map(|(name, value)| (name.to_owned(), value)).to_vec()
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
    use super::*;

    #[test]
    fn the_manager_keeps_to_the_part_of_the_time_that_the_run_says() {
        let tenth = OutOfReach::nearest_to(PerTenThousand::new(1_000));
        assert_eq!(manager_config(Some(tenth)).out_of_reach, tenth);
        assert_eq!(manager_config(None).out_of_reach, ManagerConfig::default().out_of_reach);
    }
}
