//! The guest of a run: from its specification to a machine, and from a machine's end to its meaning.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::capabilities::Capability;
use wideleaf_memory::input_file::InputFile;
use wideleaf_memory::restore::{FillFailure, OnFailure};
use wideleaf_memory::second_level::{detect_paging, emulates_guest_kernels};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, SecondLevel};
use wideleaf_policies::{Bytes, GpaRange, PageSize};
use wideleaf_vmm::boot::BootImage;
use wideleaf_vmm::devices::virtio::VirtioDevice;
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::devices::virtio::transport::DriverSeen;
use wideleaf_vmm::devices::{SerialOutput, SerialSink};
use wideleaf_vmm::kvm::memslot::default_slot_bytes;
use wideleaf_vmm::kvm::{KvmSecondLevel, KvmSystem};
use wideleaf_vmm::run_loop::RunControl;
use wideleaf_vmm::sandbox::Sandbox;
use wideleaf_vmm::x86::cpuid::has_page_size;
use wideleaf_vmm::{
    GuestExit, Hardware, HostLimits, ImageSource, Machine, MachineState, RestoreError, VmConfig, VmOptions, WaitLimits,
};

use crate::failure::Failure;
use crate::front_end::FrontEnd;
use crate::guards::Noted;
use crate::interrupts::Interrupts;
use crate::kernel;
use crate::numa::NumaPlan;
use crate::outcome::Ended;
use crate::restarts::{NoRestart, Restarts};
use crate::sandboxed::Sandboxed;
use crate::session::Session;
use crate::snapshot::restoring::Restoring;
use crate::spec::{Console, RunSpec, Workload};

/// A guest with arguments and an image that are valid on this host; it does not exist yet.
pub struct GuestPlan {
    config: VmConfig,
    begin: GuestStart,
    /// Paging of the guest: `ept`, `npt` or `shadow`.
    pub paging: &'static str,
}

/// Beginning of a guest.
enum GuestStart {
    /// At the entry of this image.
    Boot(BootImage),
    /// Where it was saved.
    Restored { machine: Box<MachineState>, filling: Arc<Restoring> },
    /// Where it stands still in another run, once its state has come, with the locks of its disks.
    Arrived(Option<(Box<MachineState>, DiskLocks)>),
}

/// A guest with vCPUs and devices that stand still until another run has given it up. Dropped, it ends without having
/// run.
struct Held(Mutex<Option<HeldParts>>);

struct HeldParts {
    control: Arc<RunControl>,
    second_level: Arc<KvmSecondLevel>,
    disks: DiskLocks,
}

impl Held {
    fn of(machine: &Machine, begin: &GuestStart) -> Held {
        let GuestStart::Arrived(Some((_, disks))) = begin else { return Held(Mutex::default()) };
        let (control, second_level) = (machine.control(), machine.kvm_second_level().clone());
        Held(Mutex::new(Some(HeldParts { control, second_level, disks: disks.clone() })))
    }

    fn take(&self) -> Option<HeldParts> {
        self.0.lock().take()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(HeldParts { control, second_level, disks }) = self.take() {
            // What the guest had asked of its devices is the source's to do.
            disks.abandon();
            second_level.end_devices();
            control.stop(GuestExit::Stopped);
        }
    }
}

/// A running guest, or one that is held.
pub struct RunningGuest {
    held: Held,
    machine: Machine,
    _noted: Noted,
}

/// Reason why no guest can run here, if so.
pub fn why_no_kvm() -> Option<String> {
    KvmSystem::open().err().map(|error| error.to_string())
}

/// Kind of second-level paging on this host.
///
/// # Errors
/// [`Failure::Host`] if it cannot be determined.
pub fn paging_name() -> Result<&'static str, Failure> {
    detect_paging(Path::new("/sys")).map(|paging| paging.name()).map_err(|error| Failure::Host(error.to_string()))
}

/// KVM's part of the doctor's table.
pub fn capabilities() -> Vec<Capability> {
    let row = Capability::new;
    let system = KvmSystem::open().map_err(|error| error.to_string());
    let on_system = |ask: &dyn Fn(&KvmSystem) -> Result<String, String>| match &system {
        Ok(system) => ask(system),
        Err(_) => Err("KVM is not usable".to_owned()),
    };
    let paging = paging_name().map_err(|error| error.to_string());
    vec![
        row(
            "kvm",
            "`run` and `demo` work only natively (--native); the labs have KVM in software",
            system.as_ref().map(|kvm| format!("/dev/kvm, {} memslots", kvm.memslots_max())).map_err(Clone::clone),
        ),
        row(
            "two_dimensional",
            "mapping sizes are real, but speeds say nothing about EPT/NPT",
            on_system(&|_| match paging.clone()? {
                "shadow" => Err("KVM shadows the guest's page tables".into()),
                name => Ok(name.to_owned()),
            }),
        ),
        row(
            "guest_kernels",
            "Linux does not reach user space; images with a wideleaf note run at full speed",
            on_system(&|_| {
                if emulates_guest_kernels(Path::new("/")) {
                    return Err("kvm_pvm emulates what a guest executes in ring 0, and lacks instructions".into());
                }
                Ok("run by the CPU".into())
            }),
        ),
        row(
            "kvm_stats",
            "no mapping counters: promotion is checked only on the host's side",
            on_system(&|kvm| {
                kvm.has_binary_stats().then(|| "KVM_GET_STATS_FD".into()).ok_or("needs Linux 5.14".into())
            }),
        ),
        row(
            "whole_nx_huge_pages",
            "KVM breaks huge pages that the guest executes (iTLB multihit); data are not affected",
            nx_huge_pages(Path::new("/sys")),
        ),
    ]
}

/// State of the mitigation that splits executable huge pages (Documentation/admin-guide/hw-vuln/multihit.rst).
fn nx_huge_pages(sys: &Path) -> Result<String, String> {
    let path = sys.join("module/kvm/parameters/nx_huge_pages");
    match std::fs::read_to_string(&path).map(|text| text.trim().to_owned()) {
        Ok(off) if off == "N" || off == "never" => Ok(format!("nx_huge_pages={off}")),
        Ok(on) => Err(format!("nx_huge_pages={on}")),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Warning before the start of such a guest, which takes minutes to reach its crash.
const EMULATED_KERNEL: &str = "wideleaf: warning: this host's KVM (kvm_pvm) emulates guest kernels and lacks many of \
                               their instructions: Linux does not reach user space here; use a host with VT-x or SVM";

/// Checks everything about the guest that needs no memory.
pub fn plan(
    spec: &RunSpec,
    backing: BackingConfig,
    numa: &NumaPlan,
    front: &dyn FrontEnd,
) -> Result<GuestPlan, Failure> {
    let image = match &spec.workload {
        Workload::Kernel(_) => ImageSource::Bytes(IMAGE.into()),
        Workload::Image(path) => {
            InputFile::open(path).map_err(|error| kernel::no_image(path, &error))?;
            ImageSource::File(path.clone())
        }
    };
    if let Some(initrd) = &spec.initrd {
        let opened = InputFile::open(initrd);
        opened.map_err(|error| Failure::Input(format!("cannot read --initrd {}: {error}", initrd.display())))?;
    }
    let config = config(spec, image, backing, numa)?;
    let image = BootImage::read(&config).map_err(from_boot_error)?;
    KvmSystem::open().map_err(|error| Failure::Host(format!("{error}; or use --native")))?;
    if image.needs_whole_cpu() && emulates_guest_kernels(Path::new("/")) {
        front.say(EMULATED_KERNEL);
    }
    Ok(GuestPlan { config, begin: GuestStart::Boot(image), paging: paging_name()? })
}

/// The same for a guest that continues where it was saved: no image is read.
pub fn plan_restored(
    spec: &RunSpec,
    backing: BackingConfig,
    numa: &NumaPlan,
    machine: MachineState,
    filling: Arc<Restoring>,
) -> Result<GuestPlan, Failure> {
    let config = config(spec, ImageSource::Bytes((&[]).into()), backing, numa)?;
    KvmSystem::open().map_err(|error| Failure::Host(error.to_string()))?;
    let begin = GuestStart::Restored { machine: Box::new(machine), filling };
    Ok(GuestPlan { config, begin, paging: paging_name()? })
}

/// The same for a guest that comes from another run: its state follows with [`GuestPlan::arrived`].
pub fn plan_incoming(spec: &RunSpec, backing: BackingConfig, numa: &NumaPlan) -> Result<GuestPlan, Failure> {
    let config = config(spec, ImageSource::Bytes((&[]).into()), backing, numa)?;
    KvmSystem::open().map_err(|error| Failure::Host(error.to_string()))?;
    Ok(GuestPlan { config, begin: GuestStart::Arrived(None), paging: paging_name()? })
}

fn config(spec: &RunSpec, image: ImageSource, backing: BackingConfig, numa: &NumaPlan) -> Result<VmConfig, Failure> {
    let mut options = VmOptions::new(image, backing);
    options.memory = spec.memory;
    options.vcpus = u32::from(spec.vcpus);
    options.guest_page = spec.guest_page;
    options.cmdline = spec.guest_cmdline();
    options.initrd = spec.initrd.clone();
    options.slot_bytes = slot_bytes(spec, backing);
    options.on_reset = spec.on_reset;
    options.cells = numa.cells.clone();
    options.vcpu_cpus = numa.vcpu_cpus.clone();
    Ok(VmConfig::new(options, &HostLimits::read(Path::new("/proc")))?)
}

/// Memslots that can hold a giant page if the policy may make giants, so that KVM can map them as such; otherwise
/// the size that suits the backing. The price is that at least a gibibyte is held at 4 KiB.
fn slot_bytes(spec: &RunSpec, backing: BackingConfig) -> Option<Bytes> {
    let largest = spec.policy.make().largest_page();
    let may_be_giant =
        backing.kind() == BackingKind::Anon && largest == PageSize::Giant1G && spec.memory >= largest.bytes();
    may_be_giant.then(|| default_slot_bytes(spec.memory, largest))
}

/// Begins to fill RAM that is not complete; the callback is called for a window that does not come. An error is one
/// line.
pub type Fill = Box<dyn FnOnce(Arc<GuestRam>, OnFailure) -> Result<(), String>>;

/// Resources from outside that a guest gets.
#[derive(Default)]
pub struct Outside {
    /// Sink for the bytes of its serial port.
    pub bytes: Option<SerialSink>,
    /// Devices, in the order in which the guest finds them.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    /// Restrictions of its process.
    pub sandbox: Option<Arc<Sandbox>>,
    /// Called before the first access to the RAM of a guest that has come from another run.
    pub fill: Option<Fill>,
}

impl GuestPlan {
    /// Ranges of guest RAM.
    pub fn layout(&self) -> Vec<GpaRange> {
        self.config.ram_layout()
    }

    /// Completes the plan of a guest that has come from another run.
    pub fn arrived(&mut self, machine: MachineState, disks: DiskLocks) {
        self.begin = GuestStart::Arrived(Some((Box::new(machine), disks)));
    }

    /// Builds the guest in `ram` and starts it, or holds it if it has come from another run; its protocol lines go to
    /// `session`, other lines to `front`.
    pub fn start(
        &self,
        ram: Arc<GuestRam>,
        session: &Arc<Session>,
        front: &Arc<dyn FrontEnd>,
        console: Console,
        outside: Outside,
    ) -> Result<RunningGuest, Failure> {
        let (lines, front) = (session.clone(), front.clone());
        let sink = move |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            let is_ours = lines.on_line(&line);
            match console {
                Console::Lines if !is_ours => front.guest_line(&line),
                Console::Lines | Console::Bytes | Console::Nothing => {}
            }
        };
        let Outside { bytes, devices, sandbox, fill } = outside;
        let output = SerialOutput { lines: Box::new(sink), bytes };
        let hardware = Hardware { ram, output, devices, sandbox };
        let machine = match &self.begin {
            GuestStart::Boot(image) => Machine::start_image(&self.config, image, hardware).map_err(from_boot_error)?,
            GuestStart::Restored { machine, filling } => continued(&self.config, machine, hardware, filling)?,
            GuestStart::Arrived(machine) => {
                let (machine, _) = machine.as_ref().expect("it is planned, received and started in this order");
                arrived(&self.config, machine, hardware, fill)?
            }
        };
        tracing::debug!("set up in {:?}: {:?}", machine.setup_times().total(), machine.setup_times().steps);
        let held = Held::of(&machine, &self.begin);
        Ok(RunningGuest { held, machine, _noted: Noted::taken("guest") })
    }
}

/// Starts a guest where it was saved. Its RAM is filled from before its first instruction on, and it ends where a part
/// of RAM cannot be read.
fn continued(
    config: &VmConfig,
    state: &MachineState,
    hardware: Hardware,
    filling: &Restoring,
) -> Result<Machine, Failure> {
    let ram = hardware.ram.clone();
    let fill = |control: &Arc<RunControl>| {
        let control = control.clone();
        let end = move |failure: &FillFailure| control.stop(GuestExit::RamLost(failure.to_string()));
        filling.begin_filling(ram, Box::new(end))
    };
    Machine::start_restored(config, state, hardware, fill).map_err(from_restore_error)
}

/// Builds a guest that has come from another run, and holds it. What is missing of its RAM comes from before its first
/// access on, and it ends where a part does not come.
fn arrived(
    config: &VmConfig,
    state: &MachineState,
    hardware: Hardware,
    fill: Option<Fill>,
) -> Result<Machine, Failure> {
    let ram = hardware.ram.clone();
    let begin = |control: &Arc<RunControl>| {
        let control = control.clone();
        let end = move |failure: &FillFailure| control.stop(GuestExit::RamLost(failure.to_string()));
        fill.map_or(Ok(()), |fill| fill(ram, Box::new(end)))
    };
    Machine::start_held(config, state, hardware, begin).map_err(from_restore_error)
}

fn from_restore_error(error: RestoreError) -> Failure {
    match error {
        RestoreError::Boot(error) => from_boot_error(error),
        RestoreError::Kvm(_) | RestoreError::Ram(_) => Failure::Host(error.to_string()),
        error => Failure::Input(error.to_string()),
    }
}

fn from_boot_error(error: wideleaf_vmm::boot::BootError) -> Failure {
    use wideleaf_vmm::boot::BootError;
    let text = error.to_string();
    match error {
        BootError::Kvm(_)
        | BootError::Memory(_)
        | BootError::Thread { .. }
        | BootError::Event(_)
        | BootError::Sandbox(_) => Failure::Host(text),
        _ => Failure::Input(text),
    }
}

impl RunningGuest {
    /// Lets a guest that is held run.
    ///
    /// # Errors
    /// One line; it then never runs.
    pub fn release(&self) -> Result<(), String> {
        self.held.take().map_or(Ok(()), |held| held.second_level.resume().map_err(|error| error.to_string()))
    }

    /// KVM's mappings of its RAM.
    pub fn second_level(&self) -> Arc<dyn SecondLevel> {
        self.machine.second_level()
    }

    /// Restrictions of its process.
    pub fn sandboxed(&self) -> Option<Sandboxed> {
        self.machine.sandbox().map(Sandboxed::from)
    }

    /// State of its devices' drivers, in order.
    pub fn drivers(&self) -> &[DriverSeen] {
        self.machine.drivers()
    }

    /// Waits for the guest's end, or stops it at the timeout or an interrupt; the timeout covers all its boots.
    /// Afterwards no vCPU runs, and KVM still has the VM. Returns how it ended, and the number of further boots.
    pub fn wait(&self, timeout: Option<Duration>, interrupts: &Interrupts, mut restarts: Restarts<'_>) -> (Ended, u64) {
        let began = Instant::now();
        let mut left = timeout;
        loop {
            let exit = self.machine.wait(WaitLimits { timeout: left, stop: Some(interrupts.flag()) });
            if exit != GuestExit::Reset || !self.machine.may_reboot() {
                return (Self::ended(exit, interrupts), self.machine.resets());
            }
            if let Err(why) = restarts.restart(&self.machine) {
                self.machine.stop();
                let ended = match why {
                    NoRestart::Loop(_) => Ended::Crashed(why.to_string()),
                    NoRestart::Failed(_) => Ended::NotBootedAgain(why.to_string()),
                };
                return (ended, self.machine.resets());
            }
            left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        }
    }

    fn ended(exit: GuestExit, interrupts: &Interrupts) -> Ended {
        match exit {
            GuestExit::ExitPort(code) => Ended::Exit(u8::try_from(code).unwrap_or(u8::MAX)),
            GuestExit::Reset | GuestExit::PowerOff => Ended::Exit(0),
            GuestExit::Stopped if interrupts.is_set() => Ended::Interrupted,
            GuestExit::Stopped => Ended::Asked,
            GuestExit::TimedOut => Ended::TimedOut,
            crash => Ended::Crashed(crash.to_string()),
        }
    }

    /// The machine, beside the waiting thread.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The machine, for a caller that observes the guest while it runs.
    pub fn into_machine(self) -> Machine {
        self.machine
    }
}

/// Page sizes that a guest may use for its own tables on this host.
///
/// # Errors
/// [`Failure::Host`] if no guest can run here.
pub fn guest_pages() -> Result<Vec<PageSize>, Failure> {
    let cpuid = KvmSystem::open().and_then(|kvm| kvm.supported_cpuid());
    let cpuid = cpuid.map_err(|error| Failure::Host(error.to_string()))?;
    Ok(PageSize::ALL.into_iter().filter(|size| has_page_size(&cpuid, *size)).collect())
}
