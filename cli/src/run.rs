//! `wideleaf run`: from arguments to a report, in numbered steps.
//!
//! 1. arguments, image and output file are checked: nothing on the host has changed yet
//! 2. RAM: the hugetlb pool is checked, the mapping made, and prefaulted if requested
//! 3. the manager and the guest (or the native kernel) start; the guest is registered with wideleafd, if it listens
//! 4. wait for the guest, the timeout, or Ctrl-C
//! 5. the report

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use console::GuestConsole;
use control_socket::{ControlSocket, Controlled, ControlledVm};
use devices::{DeviceArgs, Devices};
use guards::{Noted, step};
use guest::Outside;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use policy_switch::PolicySwitch;
use recording::QueuedFile;
use registered::Registered;
use restarts::Restarts;
use sandboxed::SandboxSpec;
use wideleaf_attach::live_view::OwnGuest;
use wideleaf_control::protocol::SOCKET_PATH;
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::registry::{KernelNames, MemoryNeed, by_name};
use wideleaf_kernels::{Arena, Kernel, native};
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::pool::{HugetlbPools, PoolError};
use wideleaf_memory::recorder::RecordTo;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, Host as _, LinuxHost, Manager};
use wideleaf_policies::policy::{POLICIES, RamStart};
use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize, PolicyChoice, VmId};
use wideleaf_protocol::linux::EXIT_STATUS;
use wideleaf_protocol::{Entry, ExitCode, GuestPage};
use wideleaf_vmm::HostLimits;
use wideleaf_vmm::config::{self, ConfigError};
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use crate::args::{BackingArg, FallbackArg, FormatArg, PolicyArg, RunArgs};
use crate::environment::{Environment, memory_available_kib, stolen_ms};
use crate::failure::Failure;
use crate::held_path::HeldCgroup;
use crate::interrupts::Interrupts;
use crate::output::{NamedPlace, Output, is_standard_output, print, refuse_standard_output, say};
use crate::report::{Measurement, RunReport, Setup, Verification, prose_table};
use crate::session::{Observed, Session, summarize};
use crate::stderr::{self, BarTerminal};

/// Interval at which the thread that waits for a native kernel checks the clock and the interrupts.
const WAIT_STEP: Duration = Duration::from_millis(20);

/// Name of the fact in a recording with the table of TLB miss costs that its policy used.
pub const WALK_COST_FACT: &str = "walk_cost";

/// Kernel or image to run.
#[derive(Clone, Debug)]
pub enum Workload {
    /// A built-in kernel, in the embedded guest image or natively.
    Kernel(&'static str),
    /// A file: an ELF image with a PVH entry, a bzImage or a vmlinux.
    Image(PathBuf),
}

/// A run with checked arguments.
#[derive(Clone)]
pub struct RunSpec {
    /// Kernel or image to run.
    pub workload: Workload,
    /// Whether it runs in this process instead of in a guest.
    pub is_native: bool,
    /// Command line of the guest or kernel.
    pub cmdline: String,
    /// File with the initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Devices of the guest.
    pub devices: DeviceArgs,
    /// Size of guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs, or of threads of a native kernel.
    pub vcpus: u8,
    /// Memory that backs guest RAM.
    pub backing: BackingConfig,
    /// Page size of the guest's tables.
    pub guest_page: PageSize,
    /// Policy of the manager.
    pub policy: PolicyChoice,
    /// Delay before the policy may act.
    pub policy_delay: Option<Duration>,
    /// Whether all RAM is faulted in first.
    pub is_prefaulted: bool,
    /// Action when the pool is too small.
    pub fallback: FallbackArg,
    /// File that records what the manager observes, plans and does.
    pub record: Option<PathBuf>,
    /// Time after which the guest is stopped.
    pub timeout: Option<Duration>,
    /// Action when the guest resets its machine.
    pub on_reset: OnReset,
    /// Place of the guest's serial console.
    pub console: Console,
    /// Socket of the wideleafd that the guest registers with, if it listens; `None`: no registration.
    pub daemon: Option<PathBuf>,
    /// Control socket of the VM itself.
    pub control_socket: Option<PathBuf>,
    /// Permanent restrictions of the guest's process while it runs. They apply to all else that this process would do.
    pub sandbox: Option<SandboxSpec>,
}

/// Place of the guest's serial console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// Standard input and output, byte by byte.
    Here,
    /// Standard error, for all lines that are no results of a kernel.
    Others,
    /// No console output at all.
    Nothing,
}

/// Runs the subcommand `run`.
///
/// # Errors
/// [`Failure`]; nothing is left behind.
pub fn main(args: RunArgs, process_start: Instant) -> Result<(), Failure> {
    let policy = match &args.policy {
        Some(PolicyArg::Help) => return list_policies(),
        Some(PolicyArg::Use(policy)) => policy.clone(),
        None => default_policy(args.backing),
    };
    let mut spec = RunSpec::new(&args, policy)?;
    if let Some(text) = &args.effective {
        return print(text);
    }
    if let Some(path) = args.record.as_ref().filter(|_| args.record == args.output) {
        return Err(Failure::Usage(format!("--record and --output are both {}: name two files", path.display())));
    }
    let output = args.output.as_deref().filter(|path| !is_standard_output(path));
    args.record.as_deref().map_or(Ok(()), |path| refuse_standard_output("--record", path))?;
    if args.console && output.is_none() && args.format == FormatArg::Json {
        return Err(Failure::Usage(
            "--console gives standard output to the guest: say where the JSON goes with --output".into(),
        ));
    }
    // In this order: once the output's temporary file exists, a signal no longer ends this process without removing it.
    let interrupts = Interrupts::install()?;
    stderr::queue();
    let output = match (args.console, output) {
        (true, None) => None,
        (_, path) => Some(Output::open(args.format, path)?),
    };
    if let (Some(sandbox), Some(output)) = (&mut spec.sandbox, &output) {
        sandbox.output_folder = output.folder().map(Path::to_owned);
    }
    let cgroup = args.cgroup.as_deref().map(HeldCgroup::join).transpose()?;
    let Finished { report, end } = finish(&spec, &interrupts, process_start)?;
    drop(cgroup);
    interrupts.end_at_the_next();
    let to_table = |report: &RunReport| report.to_table(args.verbose);
    let written = match output {
        Some(output) => output.write(&report, to_table),
        None => {
            say(to_table(&report));
            Ok(())
        }
    };
    let kept = written.and_then(|()| check_recording(&spec, &report));
    match (end, kept) {
        (Ok(()), kept) => kept?,
        (end, Ok(())) => end?,
        // The exit code says how the run ended; the loss of its result is reported as well.
        (end, Err(lost)) => {
            say(format_args!("wideleaf: {lost}"));
            end?;
        }
    }
    verdict(&report.outcome, report.verification.as_ref(), &report.results)
}

/// Checks that the guest found its memory correct, and that the program of a Linux guest ended successfully.
///
/// # Errors
/// [`Failure::GuestFailed`] otherwise.
pub fn verdict(
    outcome: &str,
    verification: Option<&Verification>,
    results: &BTreeMap<String, Measurement>,
) -> Result<(), Failure> {
    if let Some(Verification { errors, checked, .. }) = verification.filter(|verification| !verification.passed) {
        return Err(Failure::GuestFailed(format!(
            "verification failed: {errors} of {checked} words or results are wrong"
        )));
    }
    match results.get(EXIT_STATUS.as_str()).filter(|status| status.value != 0.0) {
        Some(status) => Err(Failure::GuestFailed(format!("the program ended with status {}", status.value))),
        None if outcome == STOPPED || outcome == ExitCode::Success.to_string() => Ok(()),
        None => Err(Failure::GuestFailed(format!("the guest ended: {outcome}"))),
    }
}

/// Checks that the recording is complete in its file.
fn check_recording(spec: &RunSpec, report: &RunReport) -> Result<(), Failure> {
    let (Some(path), Some(recording)) = (&spec.record, &report.manager.recording) else {
        return Ok(());
    };
    match &recording.error {
        None => Ok(()),
        Some(error) => Err(Failure::Output(format!(
            "cannot write --record {}: {error}; the last {} of {} frames are missing",
            path.display(),
            recording.frames_lost,
            recording.frames + recording.frames_lost
        ))),
    }
}

/// Prints the list of `--policy help`.
///
/// # Errors
/// [`Failure::Output`] if it could not be written.
pub fn list_policies() -> Result<(), Failure> {
    let mut policies = prose_table(&["policy", "what it does"]);
    let mut parameters = prose_table(&["policy", "parameter", "default", "unit", "meaning"]);
    for policy in POLICIES {
        policies.add_row([policy.name, policy.summary]);
        for info in policy.parameters {
            parameters.add_row([policy.name, info.name, &info.default_text(), info.unit, info.meaning]);
        }
    }
    let how = "To set parameters: --policy thp:max_ptes_none=64,scan_sleep_ms=1000, or from a file:\n\
        --policy schemes:rules=@FILE";
    print(&format!("{policies}\n\n{how}\n{parameters}\n"))
}

impl RunSpec {
    fn new(args: &RunArgs, policy: PolicyChoice) -> Result<RunSpec, Failure> {
        let Some(name) = args.workload.as_deref() else {
            let what = format!("a built-in kernel ({}) or an image file", KernelNames::ALL);
            return Err(Failure::Usage(format!("nothing to run: name {what}; `wideleaf run --help` has examples")));
        };
        let kernel = by_name(name);
        if kernel.is_none() && args.native {
            let names = KernelNames::ALL;
            let hint = kernel::meant(name);
            return Err(Failure::Usage(format!(
                "cannot run {name:?} with --native: it is not a built-in kernel ({names}){hint}"
            )));
        }
        let on_reset = restarts::on_reset(args, &policy)?;
        let ram_start = policy.make().ram_start();
        let backing = backing_of(args, ram_start)?;
        let (workload, cmdline, memory) = match kernel {
            Some(kernel) => {
                let cmdline = kernel::with_class(kernel, args.class.as_deref(), &args.cmdline)?;
                let memory = kernel::ram_for(kernel, &cmdline, args, backing.granule())?;
                (Workload::Kernel(kernel.name.as_str()), cmdline, memory)
            }
            None if args.class.is_some() => return Err(kernel::no_classes(name)),
            None => {
                let memory = args.memory.unwrap_or(kernel::MEMORY_DEFAULT);
                (Workload::Image(PathBuf::from(name)), args.cmdline.clone(), memory)
            }
        };
        Ok(RunSpec {
            workload,
            is_native: args.native,
            cmdline,
            initrd: args.initrd.clone(),
            devices: args.devices.clone(),
            memory,
            vcpus: args.vcpus,
            backing,
            guest_page: args.guest_page,
            policy,
            policy_delay: args.policy_delay,
            is_prefaulted: args.prefault || ram_start == RamStart::HugeAndPrefaulted,
            fallback: args.fallback,
            record: args.record.clone(),
            timeout: args.timeout,
            on_reset,
            console: if args.console { Console::Here } else { Console::Others },
            daemon: (!args.no_daemon).then(|| args.daemon.clone().unwrap_or_else(|| SOCKET_PATH.into())),
            control_socket: args.control_socket.clone(),
            sandbox: SandboxSpec::new(args)?,
        })
    }

    /// The guest's whole command line: first the part for the image, then the user's.
    fn guest_cmdline(&self) -> String {
        match self.workload {
            Workload::Kernel(name) => kernel::line(name, &self.cmdline),
            Workload::Image(_) => self.cmdline.clone(),
        }
    }

    fn kernel(&self) -> Option<&'static Kernel> {
        match self.workload {
            Workload::Kernel(name) => by_name(name),
            Workload::Image(_) => None,
        }
    }

    fn class(&self) -> Option<Class> {
        kernel::class_of(self.kernel()?, &self.cmdline)
    }

    /// RAM that the kernel needs, in bytes; `None` for an image, and for a kernel that uses all RAM.
    fn memory_needed_bytes(&self) -> Option<u64> {
        match kernel::memory_needed(self.kernel()?, &self.cmdline, self.vcpus) {
            Ok(MemoryNeed::Bytes(bytes)) => Some(bytes),
            Ok(MemoryNeed::AllThereIs) | Err(_) => None,
        }
    }

    fn workload_name(&self) -> String {
        match &self.workload {
            Workload::Kernel(name) => (*name).to_owned(),
            Workload::Image(path) => path.display().to_string(),
        }
    }
}

/// The policy if the user names none: `auto`. With hugetlb backing it is `never`: there is nothing to decide, and
/// monitoring would still cost the guest time.
fn default_policy(backing: Option<BackingArg>) -> PolicyChoice {
    let name = if backing == Some(BackingArg::Hugetlb) { "never" } else { "auto" };
    PolicyChoice::parse(name).expect("both are in the list")
}

/// The backing that the user chose, completed by the policy's needs.
fn backing_of(args: &RunArgs, ram_start: RamStart) -> Result<BackingConfig, Failure> {
    let chosen = args.backing.map(BackingKind::from);
    if ram_start == RamStart::OnReservableFrames {
        let is_fit =
            matches!((chosen, args.host_page), (None | Some(BackingKind::Memfd), None | Some(PageSize::Base4K)));
        return is_fit.then(BackingConfig::reservable).ok_or_else(|| {
            let remedy = "use --backing memfd --host-page 4k, or omit both";
            Failure::Usage(format!(
                "cannot reserve frames with this RAM: the policy needs memfd RAM on 4k pages; {remedy}"
            ))
        });
    }
    let kind = chosen.unwrap_or(BackingKind::Anon);
    let start_page = args.host_page.unwrap_or(match (kind, ram_start) {
        (BackingKind::Hugetlb, _) | (_, RamStart::HugeAndPrefaulted) => PageSize::Huge2M,
        (BackingKind::Anon | BackingKind::Memfd, _) => PageSize::Base4K,
    });
    BackingConfig::new(kind, start_page).map_err(|error| Failure::Usage(error.to_string()))
}

/// How the guest ended, as the waiting thread saw it.
pub enum Ended {
    /// The guest ended by itself, with this code.
    Exit(u8),
    /// The guest crashed; the text describes the crash.
    Crashed(String),
    /// The timeout ended it.
    TimedOut,
    /// A signal ended it.
    Interrupted,
    /// A request on its control socket or console ended it.
    Asked,
    /// The guest reset itself, and its machine could not be restored; the text has the reason.
    NotBootedAgain(String),
}

/// Outcome of a VM that was stopped on purpose: not an error.
const STOPPED: &str = "stopped";

/// A run that has begun and ended.
struct Finished {
    /// Report of what was observed, with the outcome.
    report: RunReport,
    /// Failure that the end stands for, if any: a crash, a timeout or an interrupt.
    end: Result<(), Failure>,
}

/// Runs `spec` until it ends.
///
/// # Errors
/// [`Failure`], also if the run was stopped or its guest crashed. The guest is then gone and its memory released.
pub fn execute(spec: &RunSpec, interrupts: &Interrupts, process_start: Instant) -> Result<RunReport, Failure> {
    let Finished { report, end } = finish(spec, interrupts, process_start)?;
    end.map(|()| report)
}

/// Runs `spec` until it ends or is stopped, and reports what was observed in either case.
///
/// # Errors
/// [`Failure`] of a run that did not begin, or of a guest that refused its arguments: then there is nothing to report.
/// The guest is gone and its memory released.
fn finish(spec: &RunSpec, interrupts: &Interrupts, process_start: Instant) -> Result<Finished, Failure> {
    let stolen_before = stolen_ms();
    if spec.sandbox.is_none() {
        serve_stderr(None)?;
    }
    let walk = walk_cost();
    let record = spec.record.as_deref().map(|path| NamedPlace::open("--record", path)).transpose()?;
    let (devices, watched, _held) = Devices::open(&spec.devices, spec.memory)?.hand_over();
    check_memory(spec)?;
    let (backing, fallback) = choose_backing(spec)?;
    let plan = if spec.is_native { None } else { Some(guest::plan(spec, backing)?) };
    // The process has one thread while the sandbox is planned.
    interrupts.stand_down();
    let sandbox = spec.sandbox.as_ref().map(|sandbox| sandbox.plan(spec)).transpose()?;
    let layout = plan.as_ref().map_or_else(|| native_layout(spec.memory), |plan| Ok(plan.layout()))?;
    // This happens before a guest exists that a daemon could find. The daemon also recognises this process by the
    // program's name, which any process may imitate. If the kernel does not lock that file, the name has to
    // suffice.
    let _claim = (ProcessHost::claim_this_one(), Noted::taken("claim"));
    let mut socket = spec.control_socket.as_deref().map(ControlSocket::open).transpose()?;
    let ram = map_ram(&layout, backing)?;
    let _ram_noted = Noted::taken("RAM");
    let host = Arc::new(LinuxHost::open().map_err(|error| Failure::Host(error.to_string()))?);
    if spec.is_prefaulted {
        check_available(spec.memory, backing)?;
        prefault_ram(&host, &ram, interrupts)?;
    }
    // The sandbox allows what is opened and asked of the host from here on.
    let mut record = record.map(NamedPlace::begin).transpose()?;
    let config = manager_config();
    let bar = progress_bar(spec);
    let session = Session::new(host.clone(), ram.clone(), spec.policy_delay, bar.clone());
    let mut manager = |second_level| {
        let vm = ManagedVm::new(VmId(0), ram.clone(), second_level);
        let mut work = ManagerLoop::new(host.clone(), vec![vm], spec.policy.make_for(&walk.cost), config);
        if let Some(file) = record.take() {
            let file = QueuedFile::start(file, begin_writing(sandbox.as_ref()));
            let file = file.map_err(|error| Failure::Host(format!("cannot start the thread of --record: {error}")))?;
            let to = RecordTo { file: Box::new(file), facts: facts(spec, &walk) };
            work = work.recorded(to).map_err(|error| Failure::Usage(format!("cannot record (--record): {error}")))?;
        }
        Manager::spawn_loop(work).map_err(|error| Failure::Host(error.to_string()))
    };
    // The environment is read while the guest starts: reading some files takes as long as the start itself.
    let (ended, resets, ram_at_end, mut environment, sandboxed, watched, console_bytes_lost) = match &plan {
        None => {
            session.attach(None, Some(manager(None)?));
            let environment = Environment::capture();
            let ended = run_native(spec, &ram, &session, interrupts)?;
            (ended, 0, session.at_end(), environment, None, Arc::new(watched), 0)
        }
        Some(plan) => {
            let mut console = (spec.console == Console::Here).then(|| GuestConsole::open(interrupts)).transpose()?;
            let bytes = console.as_ref().map(GuestConsole::sink);
            let outside = Outside { bytes, devices, sandbox: sandbox.clone() };
            let guest = plan.start(ram.clone(), &session, spec.console, outside)?;
            let watched = Arc::new(watched.driven_by(guest.drivers()));
            let kvm = guest.second_level();
            let begun = serve_stderr(sandbox.as_ref())
                .and_then(|()| console.as_mut().map_or(Ok(()), |it| it.begin(guest.machine(), sandbox.as_ref())))
                .and_then(|()| spec.sandbox.as_ref().map_or(Ok(()), SandboxSpec::check_output))
                .and_then(|()| manager(Some(kvm.clone())));
            // Otherwise a vCPU that waits for the manager with its line would keep a stopped guest from ending.
            let manager = begun.inspect_err(|_| session.attach(None, None))?;
            session.attach(Some(kvm), Some(manager));
            let policy = Arc::new(PolicySwitch::new(spec.policy.clone(), walk.cost));
            if let Some(socket) = &mut socket {
                let parts = Controlled {
                    session: Arc::downgrade(&session),
                    policy: policy.clone(),
                    guest: OwnGuest::of_this_process(&ram, opened_at(&host)),
                    devices: watched.clone(),
                    workload: spec.workload_name(),
                };
                socket.serve(ControlledVm::new(guest.machine(), parts), sandbox.as_ref());
            }
            let told = |socket: &PathBuf| Registered::start(socket, &policy, &host, &ram, &session, sandbox.clone());
            let _registered = spec.daemon.as_ref().map(told);
            let environment = Environment::capture();
            sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Main));
            let sandboxed = guest.sandboxed();
            let restarts = Restarts::new(&session, &policy, spec.is_prefaulted);
            let (ended, resets) = guest.wait(spec.timeout, interrupts, restarts);
            let ram_at_end = session.at_end();
            drop(guest);
            let console_bytes_lost = console.map_or(0, GuestConsole::end);
            (ended, resets, ram_at_end, environment, sandboxed, watched, console_bytes_lost)
        }
    };
    bar.finish_and_clear();
    let manager_report = session.stop_manager();
    let mut observed = session.observed(manager_report.as_ref(), process_start);
    let is_at_request = matches!(ended, Ended::TimedOut | Ended::Interrupted | Ended::Asked);
    stderr::settle(|| is_at_request || interrupts.is_set());
    step("standard error settled");
    for (what, count) in [("console_bytes", console_bytes_lost), ("stderr_lines", stderr::lines_lost())] {
        if count > 0 {
            observed.cut.insert(what.to_owned(), count);
        }
    }
    let paging = plan.as_ref().map_or("none", |plan| plan.paging);
    let devices = watched.reports();
    let Judged { outcome, crash, end } = judge(spec, ended, &observed)?;
    environment.steal_ms = stolen_ms() - stolen_before;
    let Observed { hello, problem, phases, regions, figure, results, gaps, verification, vmm, cut, .. } = observed;
    let mut report = RunReport {
        headline: String::new(),
        setup: Setup {
            walk_cost: walk.to_string(),
            sandbox: sandboxed,
            ..setup(spec, backing, paging, fallback, &environment)
        },
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
        manager: manager_report.as_ref().map(summarize).unwrap_or_default(),
        devices,
        cut,
        vmm,
        environment,
    };
    report.headline = report.make_headline(spec.policy.make().largest_page() == PageSize::Giant1G);
    Ok(Finished { report, end })
}

/// Starts the thread that writes to standard error, inside the sandbox if there is one.
fn serve_stderr(sandbox: Option<&Arc<Sandbox>>) -> Result<(), Failure> {
    stderr::serve(begin_writing(sandbox))
        .map_err(|error| Failure::Host(format!("cannot start the thread for standard error: {error}")))?;
    step("standard error served");
    Ok(())
}

/// First action of a thread that only writes.
fn begin_writing(sandbox: Option<&Arc<Sandbox>>) -> impl FnOnce() + Send + 'static {
    let sandbox = sandbox.cloned();
    move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Console))
}

/// Wall-clock time at which that host's clock began.
fn opened_at(host: &LinuxHost) -> SystemTime {
    SystemTime::now() - host.now().since_start()
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

/// The meaning of a run's end.
struct Judged {
    /// Outcome for the report, one line.
    outcome: String,
    /// All that is known about a crash.
    crash: Option<String>,
    /// Failure that the end stands for, if any. Wrong words that the guest found are in the report instead.
    end: Result<(), Failure>,
}

impl Judged {
    fn ended(outcome: &str, end: Result<(), Failure>) -> Judged {
        Judged { outcome: outcome.to_owned(), crash: None, end }
    }

    /// The first line of `how` describes the crash; registers follow.
    fn crashed(how: String) -> Judged {
        let outcome = format!("crashed: {}", how.lines().next().unwrap_or_default());
        Judged { outcome, crash: Some(how.clone()), end: Err(Failure::GuestCrashed(how)) }
    }
}

/// Judges the end of a run, for its report and its exit code.
///
/// # Errors
/// [`Failure`] if the guest refused its arguments: nothing ran.
fn judge(spec: &RunSpec, ended: Ended, observed: &Observed) -> Result<Judged, Failure> {
    let judged = match ended {
        Ended::TimedOut => Judged::ended("timed out", Err(Failure::TimedOut(spec.timeout.unwrap_or_default()))),
        Ended::Interrupted => Judged::ended("interrupted", Err(Failure::Interrupted)),
        Ended::Asked => Judged::ended(STOPPED, Ok(())),
        Ended::NotBootedAgain(why) => Judged::ended("not booted again", Err(Failure::Host(why))),
        Ended::Crashed(how) => Judged::crashed(how),
        Ended::Exit(_) if observed.kernel_panic.is_some() => {
            let why = observed.kernel_panic.as_deref().unwrap_or_default();
            Judged::crashed(format!("the guest's kernel panicked: {why}"))
        }
        // Only if the guest ended by itself: otherwise its last line may simply be cut off.
        Ended::Exit(_) if !observed.malformed.is_empty() => {
            let line = &observed.malformed[0];
            Judged::crashed(format!("the guest wrote a malformed line: {line}"))
        }
        Ended::Exit(_) if observed.has_begun && observed.exit.is_none() => {
            Judged::crashed("the guest ended without an exit line".to_owned())
        }
        // Only the exit line of a Linux guest has its exit code: the guest switches the machine off.
        Ended::Exit(code) => match observed.exit.or(ExitCode::from_port_value(code)) {
            Some(code) => match outcome_of(code, observed.panic.as_deref(), &spec.workload_name(), "--cmdline") {
                Ok(outcome) => Judged::ended(&outcome, Ok(())),
                Err(Failure::GuestCrashed(how)) => Judged::crashed(how),
                Err(refused) => return Err(refused),
            },
            None => {
                let failure = Failure::GuestFailed(format!("the guest ended with exit code {code}"));
                Judged::ended(&format!("exit code {code}"), Err(failure))
            }
        },
    };
    Ok(judged)
}

/// Meaning of an exit code, with the guest's reason if it gave one. `arguments` is the user's name for its command
/// line.
pub fn outcome_of(code: ExitCode, panic: Option<&str>, name: &str, arguments: &str) -> Result<String, Failure> {
    match (code, panic) {
        (ExitCode::Success | ExitCode::VerificationFailed | ExitCode::ProgramFailed, _) => Ok(code.to_string()),
        (ExitCode::BadArguments, Some(why)) => Err(Failure::Usage(format!("{arguments}: {why}"))),
        (ExitCode::Unsupported, Some(why)) => Err(Failure::Input(format!("{name} cannot run: {why}"))),
        (_, Some(why)) => Err(Failure::GuestCrashed(format!("the guest panicked: {why}"))),
        (_, None) => Err(Failure::GuestCrashed(format!("the guest ended: {code}"))),
    }
}

fn setup(
    spec: &RunSpec,
    backing: BackingConfig,
    paging: &str,
    fallback: Option<String>,
    environment: &Environment,
) -> Setup {
    Setup {
        workload: spec.workload_name(),
        cmdline: spec.cmdline.clone(),
        class: spec.class().map(|class| class.to_string()),
        mode: if spec.is_native { "native" } else { "guest" }.into(),
        paging: paging.into(),
        evidence: evidence(paging, environment.is_virtual).into(),
        memory_bytes: spec.memory.get(),
        memory_needed_bytes: spec.memory_needed_bytes(),
        vcpus: u32::from(spec.vcpus),
        backing: backing.kind().name().into(),
        host_page: backing.start_page().name().into(),
        guest_page: match (&spec.workload, spec.is_native) {
            (_, true) => Some("none".to_owned()),
            (Workload::Kernel(_), false) => Some(spec.guest_page.name().to_owned()),
            (Workload::Image(_), false) => None,
        },
        policy: spec.policy.to_string(),
        fallback,
        walk_cost: String::new(),
        sandbox: None,
    }
}

/// What a speed that was measured under this paging is evidence of.
pub fn evidence(paging: &str, is_virtual: bool) -> &'static str {
    match (paging, is_virtual) {
        ("shadow", _) => "shadow paging: mapping sizes are real, but speeds say nothing about EPT/NPT",
        ("none", true) => "no second level of wideleaf, but this host is itself a VM: not a one-dimensional baseline",
        ("none", false) => "no second level: a one-dimensional baseline",
        (_, true) => "two-dimensional paging inside a VM: evidence of function only, not of hardware speed",
        (_, false) => "two-dimensional paging in hardware",
    }
}

/// Runs before the pool is checked: a number of missing pages is no help if the RAM would end inside a page.
fn check_memory(spec: &RunSpec) -> Result<(), Failure> {
    let pages = [(spec.backing.granule(), "host")];
    config::check_memory(spec.memory, &pages, &HostLimits::read(Path::new("/proc"))).map_err(from_config_error)
}

fn from_config_error(error: ConfigError) -> Failure {
    match error {
        ConfigError::MoreThanHost { .. } => Failure::Host(error.to_string()),
        _ => Failure::Usage(error.to_string()),
    }
}

/// At most half of the CPUs, and at most four, copy at once. The guest needs the other half, and four saturate the
/// memory of most hosts.
fn manager_config() -> ManagerConfig {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    ManagerConfig { copy_threads: (cpus / 2).clamp(1, 4) as u16, ..ManagerConfig::default() }
}

fn choose_backing(spec: &RunSpec) -> Result<(BackingConfig, Option<String>), Failure> {
    let backing = spec.backing;
    if backing.kind() != BackingKind::Hugetlb {
        return Ok((backing, None));
    }
    let Err(error) = HugetlbPools::of_this_machine().check(backing.start_page(), spec.memory) else {
        return Ok((backing, None));
    };
    if spec.fallback == FallbackArg::Fail {
        let remedy = if matches!(error, PoolError::Short(_)) { ", or use --fallback thp" } else { "" };
        return Err(Failure::Host(format!("{error}{remedy}")));
    }
    let thp = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM can start huge");
    Ok((thp, Some(format!("anonymous RAM with transparent huge pages, because: {error}"))))
}

fn map_ram(layout: &[GpaRange], backing: BackingConfig) -> Result<Arc<GuestRam>, Failure> {
    GuestRam::map(layout, backing).map_err(|error| match error {
        wideleaf_memory::region::RamError::Misaligned { .. } => Failure::Usage(format!("--memory: {error}")),
        other => Failure::Host(other.to_string()),
    })
}

/// Checks that the host has this amount of memory available. If it has not, prefaulting does not fail: the kernel
/// kills processes, and not only this one. A pool already has its pages.
fn check_available(memory: Bytes, backing: BackingConfig) -> Result<(), Failure> {
    let available = kib(memory_available_kib());
    if backing.kind() == BackingKind::Hugetlb || memory <= available {
        return Ok(());
    }
    let remedy = "use less --memory, or omit --prefault";
    Err(Failure::Host(format!("cannot prefault {memory} of guest RAM: the host has {available} available; {remedy}")))
}

fn prefault_ram(host: &LinuxHost, ram: &GuestRam, interrupts: &Interrupts) -> Result<(), Failure> {
    let bar = visible_bar(ram.bytes().get(), "prefault {bar:30} {bytes}/{total_bytes}");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_chunk = |bytes: Bytes| {
        bar.inc(bytes.get());
        if interrupts.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let result = prefault(host, ram.ranges(), threads, &on_chunk);
    bar.finish_and_clear();
    result.map_err(|error| Failure::Host(format!("cannot prefault {} of guest RAM: {error}", ram.bytes())))?;
    interrupts.check()
}

/// A progress bar on a terminal; hidden anywhere else.
pub fn visible_bar(length: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("the templates are literals of this program");
    let terminal = ProgressDrawTarget::term_like(Box::new(BarTerminal::default()));
    ProgressBar::with_draw_target(Some(length), terminal).with_style(style)
}

fn progress_bar(spec: &RunSpec) -> ProgressBar {
    if spec.console == Console::Here {
        return ProgressBar::hidden();
    }
    let bar = visible_bar(0, "{spinner} {prefix} {msg} {wide_bar} {percent}%");
    bar.set_prefix(spec.workload_name());
    bar
}

/// Runs the kernel in threads of this process. They cannot be killed: at a timeout the process ends while they
/// still run, so a native run has a process of its own.
fn run_native(
    spec: &RunSpec,
    ram: &Arc<GuestRam>,
    session: &Arc<Session>,
    interrupts: &Interrupts,
) -> Result<Ended, Failure> {
    /// Accurate to one part in 50 000.
    const TSC_MEASURED_OVER: Duration = Duration::from_millis(50);
    let guest_page = GuestPage::from_bytes(PageSize::Base4K.bytes().get()).expect("x86 has 4 KiB pages");
    let (line, threads) = (spec.guest_cmdline(), usize::from(spec.vcpus));
    let (ram, lines) = (ram.clone(), session.clone());
    let (sender, receiver) = mpsc::channel();
    let work = move || {
        let tsc_hz = native::measure_tsc_hz(TSC_MEASURED_OVER);
        let code = native::run(threads, tsc_hz, Box::new(|message| lines.on_message(message)), |platform| {
            let words = ram.exclusive_words(ram.ranges()[0]);
            let mut words = words.expect("the words of this RAM are taken once");
            let arena = Arena::from_words(words.as_mut_slice());
            let started = wideleaf_kernels::registry::Started { entry: Entry::Native, guest_page };
            wideleaf_kernels::registry::run(platform, &arena, &line, started)
        });
        let _ = sender.send(code);
    };
    let thread = std::thread::Builder::new().name("kernel".into()).spawn(work);
    let thread = thread.map_err(|error| Failure::Host(format!("cannot start the kernel's thread: {error}")))?;
    let deadline = spec.timeout.map(|timeout| Instant::now() + timeout);
    loop {
        match receiver.recv_timeout(WAIT_STEP) {
            Ok(code) => {
                let _ = thread.join();
                return Ok(Ended::Exit(code.port_value()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if interrupts.is_set() {
                    return Ok(Ended::Interrupted);
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(Ended::TimedOut);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Ok(Ended::Crashed("the native kernel panicked".into()));
            }
        }
    }
}

pub mod config_file;
mod console;
mod control_socket;
pub mod devices;
pub mod guards;
pub mod guest;
pub mod kernel;
mod policy_switch;
mod recording;
mod registered;
mod restarts;
pub mod sandboxed;

/// RAM of a native kernel: one piece.
pub fn native_layout(memory: Bytes) -> Result<Vec<GpaRange>, Failure> {
    let range = GpaRange::new(Gpa::new(0), memory);
    range
        .map(|range| vec![range])
        .ok_or_else(|| Failure::Usage(format!("cannot use --memory {memory}: it does not fit in 64 bits")))
}
