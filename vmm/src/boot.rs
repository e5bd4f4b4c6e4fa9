//! From a configuration to a runnable VM, in numbered steps.
//!
//! ```text
//!   1  read the image and say what it is      before KVM is touched and, by [`BootImage`], before RAM is mapped
//!   2  open KVM, ask what the CPU can do
//!   3  create the VM with its memslots        before any interrupt controller: 16 times faster
//!   4  interrupt controllers and timer        not for the direct entry: its guests have no interrupts
//!   5  image, tables and boot data into RAM   see [`load`]
//!   6  vCPUs with CPUID and registers
//!   7  devices
//! ```
//!
//! A machine that boots again after a reset repeats step 5, and sets vCPUs, interrupt controllers and
//! devices back: [`reboot`]. A machine that continues from a snapshot has its state in place of steps 1, 5 and the
//! registers of 6: [`restore`].
//!
//! The way to the guest's first byte is short on purpose; [`SetupTimes`] records the time of each step.

pub mod free_ram;
pub mod image;
pub mod load;
pub mod reboot;
pub mod restore;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::input_file::InputFile;
use wideleaf_memory::second_level::detect_paging;
use wideleaf_memory::{GuestRam, Paging};
use wideleaf_policies::units::gib;
use wideleaf_policies::{Bytes, Gpa, PageSize};
use wideleaf_protocol::elf_note::notes;
use wideleaf_protocol::port;

use crate::config::{ImageSource, VmConfig};
use crate::devices::bus::Bus;
use crate::devices::exit_port::{ExitPort, FaultPort};
use crate::devices::legacy::{CLOCK_PORTS, ClockMemory, KEYBOARD_PORTS, KeyboardController, ResetRegister};
use crate::devices::line_port::LinePort;
use crate::devices::power::{InterruptLine, PowerButton, PowerManagement};
use crate::devices::serial::{SERIAL_GSI, SerialInterrupt, SerialPort};
use crate::devices::virtio::transport::{DriverSeen, NOTIFY_OFFSET, Workers};
use crate::devices::virtio::{DEVICES_MAX, DeviceThreads, Interrupt, Place, Transport, VirtioDevice};
use crate::dma::DeviceMemory;
use crate::hardware::Hardware;
use crate::kvm::guest_memory::GuestMemoryError;
use crate::kvm::saved::{LateState, SavedVcpu};
use crate::kvm::{GuestMemory, KvmError, KvmSystem, Vcpu, Vm};
use crate::run_loop::OnReset;
use crate::x86::cpuid::Timing;
use crate::x86::{acpi, cpuid, fault_report, layout, registers};
use image::{Image, ImageError};
use load::Loaded;
use reboot::Reboot;

/// The reasons why a VM cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The image (or initrd) does not exist.
    #[error("cannot read {what} {}: it does not exist", path.display())]
    Missing {
        /// Kind of the file: "image" or "initrd".
        what: &'static str,
        /// The path that was tried.
        path: PathBuf,
    },
    /// The image (or initrd) cannot be read.
    #[error("cannot read {what} {}: {source}", path.display())]
    Unreadable {
        /// Kind of the file: "image" or "initrd".
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The image cannot be booted.
    #[error("cannot boot image {image}: it {source}")]
    Image {
        /// The refused image.
        image: ImageSource,
        /// Reason of the refusal.
        source: ImageError,
    },
    /// The initrd does not fit.
    #[error(
        "cannot place initrd {} of {bytes}: there is room for {room} between the image and {limit}; use more \
         --memory", path.display()
    )]
    InitrdTooLarge {
        /// Path of the initrd.
        path: PathBuf,
        /// Size of the initrd.
        bytes: Bytes,
        /// Size of the room.
        room: Bytes,
        /// First address behind the room.
        limit: Gpa,
    },
    /// The kernel would cut the command line off.
    #[error("cannot pass a command line of {bytes} bytes: the kernel takes at most {max} bytes; shorten --cmdline")]
    CmdlineTooLong {
        /// Length of the command line, in bytes.
        bytes: usize,
        /// Longest one by the kernel's own header, in bytes.
        max: u32,
    },
    /// An initrd for a guest that takes none.
    #[error("cannot pass an initrd: a directly started image takes no initrd; leave --initrd out")]
    InitrdForDirect,
    /// The page tables do not fit.
    #[error(
        "cannot place the page tables: image and {page} tables need memory up to {end}, guest RAM below the hole ends \
         at {ram_end}; use more --memory or larger guest pages"
    )]
    NoRoomForTables {
        /// Size of the guest's pages.
        page: PageSize,
        /// First address behind the tables.
        end: Gpa,
        /// End of RAM below the hole.
        ram_end: Gpa,
    },
    /// The RAM is not the one the configuration describes.
    #[error("cannot use guest RAM of {ram}: the configuration says {config}")]
    OtherRam {
        /// Size of the given RAM.
        ram: Bytes,
        /// Size in the configuration.
        config: Bytes,
    },
    /// The guest's physical addresses are too short.
    #[error(
        "cannot use RAM up to {end}: guests of this host have {bits} bits of physical address ({max}); use less \
         --memory"
    )]
    AddressesTooShort {
        /// End of RAM.
        end: Gpa,
        /// Number of address bits of a guest's CPU.
        bits: u32,
        /// Memory that these bits address.
        max: Bytes,
    },
    /// The guest's CPU lacks the page size.
    #[error("cannot use {page} guest pages: this host's guests do not have them; use --guest-page 2m")]
    NoSuchGuestPage {
        /// The missing page size.
        page: PageSize,
    },
    /// KVM refused a request.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// RAM could not be shown to the loader.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
    /// A part of the VMM's data could not be written into RAM.
    #[error("cannot write {what} into guest RAM: {source}")]
    Write {
        /// Name of the part.
        what: &'static str,
        /// Reason of the failure.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A thread could not be created.
    #[error("cannot start the thread of vcpu {vcpu}: {source}")]
    Thread {
        /// Number of the thread's vCPU.
        vcpu: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process could not be restricted.
    #[error("cannot enter the sandbox: {0}; --no-sandbox runs without one")]
    Sandbox(#[from] crate::sandbox::SandboxError),
    /// The thread that starts device threads could not be started itself.
    #[error("cannot start a thread for the devices: {0}")]
    DeviceThreads(io::Error),
    /// The event of an interrupt or of a queue could not be created.
    #[error("cannot create an event for a device: {0}")]
    Event(io::Error),
    /// The VM has fewer interrupts than devices.
    #[error("cannot give the VM {devices} devices: it has at most {DEVICES_MAX}; leave some out")]
    TooManyDevices {
        /// Number of requested devices.
        devices: usize,
    },
    /// The sensor of guest RAM could not be opened.
    #[error(transparent)]
    Host(wideleaf_memory::host::HostError),
    /// The CPUID leaves do not fit KVM's table.
    #[error("cannot describe the CPU: {0:?}")]
    Cpuid(vmm_sys_util::fam::Error),
}

/// Duration of each step of the setup.
#[derive(Clone, Debug, Default)]
pub struct SetupTimes {
    /// Name and duration, in order.
    pub steps: Vec<(&'static str, Duration)>,
}

impl SetupTimes {
    /// Duration of all steps together.
    pub fn total(&self) -> Duration {
        self.steps.iter().map(|(_, time)| *time).sum()
    }
}

pub(crate) struct Stopwatch {
    lap_start: Instant,
    times: SetupTimes,
}

impl Stopwatch {
    pub(crate) fn start() -> Stopwatch {
        Stopwatch { lap_start: Instant::now(), times: SetupTimes::default() }
    }

    pub(crate) fn lap(&mut self, step: &'static str) {
        let now = Instant::now();
        let time = now - self.lap_start;
        tracing::debug!(step, us = time.as_micros() as u64, "setup");
        self.times.steps.push((step, time));
        self.lap_start = now;
    }

    pub(crate) fn stop(self) -> SetupTimes {
        self.times
    }
}

/// A VM that is ready except for its vCPUs' threads.
pub(crate) struct Prepared {
    pub(crate) vm: Arc<Vm>,
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) memory: DeviceMemory,
    pub(crate) bus: Arc<Bus>,
    pub(crate) device_threads: Arc<DeviceThreads>,
    pub(crate) serial: SerialPort,
    pub(crate) power_button: PowerButton,
    pub(crate) drivers: Vec<DriverSeen>,
    pub(crate) paging: Paging,
    pub(crate) entry_name: &'static str,
    pub(crate) tsc_hz: Option<u64>,
    /// Numbers of the model-specific registers that KVM lists.
    pub(crate) msrs: Arc<[u32]>,
    /// CPUID of each vCPU.
    pub(crate) cpuids: Vec<CpuId>,
    /// State that another boot needs; `None` where a reset ends the run.
    pub(crate) reboot: Option<Reboot>,
    /// State of each vCPU as it was created, by vCPU, where there is `reboot`.
    pub(crate) fresh: Vec<SavedVcpu>,
    /// Rest of each vCPU's state, by vCPU, where the machine continues from a snapshot.
    pub(crate) late: Vec<LateState>,
}

/// An image that was read and can be booted in the RAM of its configuration. Reading it needs neither KVM nor that
/// RAM, so a bad image is found before either costs anything.
///
/// Clones share their memory.
#[derive(Clone, Debug)]
pub struct BootImage {
    bytes: Arc<Cow<'static, [u8]>>,
    image: Image,
    /// Content of the initrd, read where the machine may boot again: the file may have changed by then, and a
    /// sandbox could not open it.
    initrd: Option<Arc<[u8]>>,
}

impl BootImage {
    /// Reads the image: step 1.
    ///
    /// # Errors
    /// [`BootError::Missing`], [`BootError::Unreadable`], [`BootError::Image`],
    /// [`BootError::InitrdForDirect`], [`BootError::CmdlineTooLong`].
    pub fn read(config: &VmConfig) -> Result<BootImage, BootError> {
        let bytes = read_image(config.image())?;
        let of_image = |source| BootError::Image { image: config.image().clone(), source };
        let image = image::identify(&bytes, config.entry()).map_err(of_image)?;
        match &image {
            Image::Direct { .. } if config.initrd().is_some() => return Err(BootError::InitrdForDirect),
            Image::Direct { segments, .. } | Image::Pvh { segments, .. } => {
                image::check_placement(segments, &config.ram_layout()).map_err(of_image)?;
            }
            Image::BzImage { header, .. } => check_cmdline(config.cmdline(), header.cmdline_size)?,
        }
        let wanted = config.initrd().filter(|_| config.on_reset() == OnReset::Restart);
        let read = |path| {
            let file = InputFile::open(path).and_then(|file| file.read(config.memory()));
            file.map_err(|error| file_error("initrd", path, error.into()))
        };
        let initrd = wanted.map(read).transpose()?.map(Arc::from);
        Ok(BootImage { bytes: Arc::new(bytes), image, initrd })
    }

    /// Whether this is a kernel that does not come up where KVM emulates ring 0
    /// ([`wideleaf_memory::second_level::emulates_guest_kernels`]): a bzImage, or an ELF file with a Linux note.
    /// Other images have a kernel of their own that may be small enough.
    pub fn needs_whole_cpu(&self) -> bool {
        match self.image {
            Image::Direct { .. } => false,
            Image::Pvh { .. } => notes(&self.bytes).any(|note| note.owner == b"Linux"),
            Image::BzImage { .. } => true,
        }
    }
}

/// Runs all steps except the first.
pub(crate) fn prepare(
    config: &VmConfig,
    boot_image: &BootImage,
    Hardware { ram, output, devices, .. }: Hardware,
    watch: &mut Stopwatch,
) -> Result<Prepared, BootError> {
    let image = &boot_image.image;
    let is_direct = matches!(image, Image::Direct { .. });

    // 2 to 4. KVM, the VM, its interrupts.
    let mut bare = BareVm::create(config, ram, devices.len(), is_direct, watch)?;
    let serial = SerialPort::new(bare.take_serial_interrupt(), output);
    let BareVm { system, supported, memory, vm, .. } = &bare;

    // 5. Guest memory, except what needs a vCPU's answer.
    let device_count = devices.len();
    let mut loaded = load::load(config, boot_image, memory, device_count)?;
    watch.lap("load");

    // 6. vCPUs.
    let vcpus = bare.create_vcpus(config)?;
    watch.lap("vcpus");
    // A host with an unstable counter reports no frequency; the guest then has to run without it.
    let tsc_khz = tsc_khz(&vcpus);
    let tsc_hz = tsc_khz.map(|khz| u64::from(khz) * 1000);
    load::write_boot_data(config, memory, &mut loaded, tsc_hz, device_count)?;
    let timing = timing(system, is_direct, tsc_khz);
    let mut cpuids = Vec::with_capacity(vcpus.len());
    for vcpu in &vcpus {
        let cpuid = cpuid::for_vcpu(supported, vcpu.index(), config.vcpus(), timing).map_err(BootError::Cpuid)?;
        vcpu.set_cpuid(&cpuid)?;
        set_registers(vcpu, &loaded, cpuid::avx_xcr0(&cpuid))?;
        cpuids.push(cpuid);
    }
    watch.lap("registers");

    // A directly started guest has no means to reset its machine.
    let is_the_end = is_direct || config.on_reset() == OnReset::Stop;
    let msrs: Arc<[u32]> = system.msrs()?.into();
    let (mut reboot, mut fresh) = (None, Vec::new());
    if !is_the_end {
        fresh = vcpus.iter().map(|vcpu| SavedVcpu::take(vcpu, &msrs)).collect::<Result<_, _>>()?;
        reboot = Some(Reboot::new(config, boot_image, device_count, vm)?);
        watch.lap("kept for a reset");
    }

    // 7. Devices.
    let connected = bare.connect(serial, devices, is_direct)?;
    watch.lap("devices");
    Ok(connected.prepared(vcpus, image.name(), tsc_hz, KeptState { msrs, cpuids, reboot, fresh, late: Vec::new() }))
}

/// The results of steps 2 to 4.
struct BareVm {
    system: KvmSystem,
    supported: CpuId,
    paging: Paging,
    memory: Arc<GuestMemory>,
    vm: Arc<Vm>,
    serial_interrupt: SerialInterrupt,
}

impl BareVm {
    fn create(
        config: &VmConfig,
        ram: Arc<GuestRam>,
        devices: usize,
        is_direct: bool,
        watch: &mut Stopwatch,
    ) -> Result<BareVm, BootError> {
        if devices > DEVICES_MAX {
            return Err(BootError::TooManyDevices { devices });
        }
        // 2. KVM and the CPU.
        let system = KvmSystem::open()?;
        let supported = system.supported_cpuid()?;
        check_cpu(config, &supported, is_direct)?;
        check_ram(config, &ram)?;
        let paging = detect_paging(Path::new("/sys")).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot detect the paging mode; assuming shadow paging");
            Paging::Shadow
        });
        watch.lap("kvm");

        // 3. The VM.
        let memory = Arc::new(GuestMemory::new(Arc::clone(&ram))?);
        let vm = Vm::create(&system, ram, config.slot_bytes())?;
        watch.lap("vm");

        // 4. Interrupts.
        let serial_interrupt = if is_direct { SerialInterrupt::None } else { create_interrupts(&vm)? };
        watch.lap("interrupts");
        Ok(BareVm { system, supported, paging, memory, vm, serial_interrupt })
    }

    fn create_vcpus(&self, config: &VmConfig) -> Result<Vec<Vcpu>, BootError> {
        let created = (0..config.vcpus()).map(|index| Ok(Vcpu::create(&self.vm, index)?));
        created.collect()
    }

    fn take_serial_interrupt(&mut self) -> SerialInterrupt {
        std::mem::replace(&mut self.serial_interrupt, SerialInterrupt::None)
    }

    /// Connects the serial port and all other devices: step 7.
    fn connect(
        self,
        serial: SerialPort,
        devices: Vec<Box<dyn VirtioDevice>>,
        is_direct: bool,
    ) -> Result<ConnectedVm, BootError> {
        let BareVm { paging, memory, vm, .. } = self;
        let power = PowerManagement::new((!is_direct).then(|| power_interrupt(&vm)));
        let power_button = power.button();
        let mut bus = create_bus(&serial, power, is_direct.then(|| Arc::clone(&memory)));
        let memory = DeviceMemory::new(memory);
        let device_threads = Arc::new(DeviceThreads::default());
        let workers = Workers::new(Arc::clone(&device_threads));
        let drivers = place_devices(&vm, &mut bus, &memory, devices, &workers, !is_direct)?;
        Ok(ConnectedVm { paging, memory, vm, serial, power_button, bus: Arc::new(bus), device_threads, drivers })
    }
}

/// A VM with its devices, and without its vCPUs.
struct ConnectedVm {
    paging: Paging,
    memory: DeviceMemory,
    vm: Arc<Vm>,
    serial: SerialPort,
    power_button: PowerButton,
    bus: Arc<Bus>,
    device_threads: Arc<DeviceThreads>,
    drivers: Vec<DriverSeen>,
}

/// State for a later reset or snapshot.
struct KeptState {
    msrs: Arc<[u32]>,
    cpuids: Vec<CpuId>,
    reboot: Option<Reboot>,
    fresh: Vec<SavedVcpu>,
    late: Vec<LateState>,
}

impl ConnectedVm {
    fn prepared(self, vcpus: Vec<Vcpu>, entry_name: &'static str, tsc_hz: Option<u64>, kept: KeptState) -> Prepared {
        let ConnectedVm { paging, memory, vm, serial, power_button, bus, device_threads, drivers } = self;
        let KeptState { msrs, cpuids, reboot, fresh, late } = kept;
        Prepared {
            vm,
            vcpus,
            memory,
            bus,
            device_threads,
            serial,
            power_button,
            drivers,
            paging,
            entry_name,
            tsc_hz,
            msrs,
            cpuids,
            reboot,
            fresh,
            late,
        }
    }
}

fn tsc_khz(vcpus: &[Vcpu]) -> Option<u32> {
    vcpus.first().and_then(|vcpu| vcpu.tsc_khz().ok()).filter(|khz| *khz != 0)
}

fn timing(system: &KvmSystem, is_direct: bool, tsc_khz: Option<u32>) -> Timing {
    if is_direct {
        Timing { tsc_khz, has_deadline_timer: false }
    } else {
        // These guests have kvmclock, and interrupt controllers.
        Timing { tsc_khz: None, has_deadline_timer: system.has_deadline_timer() }
    }
}

/// The size limit of an image. A vmlinux with all its debug information has about 1 GiB, and a guest has at most 3
/// GiB below the hole.
const IMAGE_BYTES_MAX: Bytes = gib(3);

fn check_cmdline(cmdline: &str, max: u32) -> Result<(), BootError> {
    let bytes = cmdline.len();
    if bytes as u64 <= u64::from(max) { Ok(()) } else { Err(BootError::CmdlineTooLong { bytes, max }) }
}

fn read_image(source: &ImageSource) -> Result<Cow<'static, [u8]>, BootError> {
    match source {
        ImageSource::Bytes(bytes) => Ok(bytes.clone()),
        ImageSource::File(path) => {
            let file = InputFile::open(path).and_then(|file| file.read(IMAGE_BYTES_MAX));
            file.map(Cow::Owned).map_err(|error| file_error("image", path, error.into()))
        }
    }
}

fn file_error(what: &'static str, path: &Path, source: io::Error) -> BootError {
    match source.kind() {
        io::ErrorKind::NotFound => BootError::Missing { what, path: path.to_owned() },
        _ => BootError::Unreadable { what, path: path.to_owned(), source },
    }
}

fn check_cpu(config: &VmConfig, supported: &CpuId, is_direct: bool) -> Result<(), BootError> {
    let bits = cpuid::physical_address_bits(supported);
    let end = config.ram_layout().last().map(|range| range.end()).unwrap_or_default();
    if bits < 64 && end.get() > 1 << bits {
        return Err(BootError::AddressesTooShort { end, bits, max: Bytes::new(1 << bits) });
    }
    if is_direct && !cpuid::has_page_size(supported, config.guest_page()) {
        return Err(BootError::NoSuchGuestPage { page: config.guest_page() });
    }
    Ok(())
}

fn check_ram(config: &VmConfig, ram: &GuestRam) -> Result<(), BootError> {
    let is_as_configured = ram.ranges().iter().map(|range| range.gpa).eq(config.ram_layout());
    if is_as_configured { Ok(()) } else { Err(BootError::OtherRam { ram: ram.bytes(), config: config.memory() }) }
}

fn create_interrupts(vm: &Vm) -> Result<SerialInterrupt, BootError> {
    vm.set_identity_map_and_tss(layout::KVM_IDENTITY_MAP, layout::KVM_TSS)?;
    vm.create_irqchip()?;
    vm.create_pit()?;
    let event = EventFd::new(EFD_NONBLOCK).map_err(BootError::Event)?;
    vm.register_irqfd(&event, SERIAL_GSI)?;
    Ok(SerialInterrupt::Event(event))
}

fn set_registers(vcpu: &Vcpu, loaded: &Loaded, avx_xcr0: Option<u64>) -> Result<(), KvmError> {
    let index = vcpu.index();
    let new = vcpu.sregs()?;
    let (system, general) = match *loaded {
        Loaded::Direct { entry, tables, .. } => (
            registers::direct_system(new, tables.root, index, avx_xcr0.is_some()),
            registers::direct(entry, layout::DIRECT_BOOT, index),
        ),
        // The other vCPUs wait for the first one's startup interrupt, as on every PC.
        Loaded::Pvh { .. } | Loaded::Linux64 { .. } if index > 0 => return Ok(()),
        Loaded::Pvh { entry } => (registers::pvh_system(new), registers::pvh(entry, layout::START_INFO)),
        Loaded::Linux64 { entry, tables } => {
            (registers::linux64_system(new, tables.root), registers::linux64(entry, layout::ZERO_PAGE))
        }
    };
    vcpu.set_sregs(&system)?;
    vcpu.set_regs(&general)?;
    vcpu.set_fpu(&registers::fpu())?;
    match (loaded, avx_xcr0) {
        (Loaded::Direct { .. }, Some(xcr0)) => vcpu.set_xcr0(xcr0),
        (Loaded::Direct { .. }, None) => Ok(()),
        _ => set_firmware_msrs(vcpu),
    }
}

/// Sets the MSRs that firmware would set: fast string operations, and write-back memory by default (SDM vol. 4,
/// IA32_MISC_ENABLE; vol. 3, 11.11.2.1).
fn set_firmware_msrs(vcpu: &Vcpu) -> Result<(), KvmError> {
    const IA32_MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
    const ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;
    let entries = [(IA32_MISC_ENABLE, FAST_STRINGS), (IA32_MTRR_DEF_TYPE, ENABLED_WRITE_BACK)]
        .map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() });
    if let Ok(msrs) = Msrs::from_entries(&entries) {
        let taken = vcpu.set_msrs(&msrs)?;
        if taken < entries.len() {
            // Both only improve speed; a KVM that knows neither still boots.
            tracing::debug!(taken, "KVM did not take all firmware MSRs");
        }
    }
    Ok(())
}

/// Gives each device its registers, its interrupt, and an event for each of its queues. Returns the flags that show
/// whether each device's driver has come, in the order of the devices.
fn place_devices(
    vm: &Vm,
    bus: &mut Bus,
    memory: &DeviceMemory,
    devices: Vec<Box<dyn VirtioDevice>>,
    workers: &Workers,
    has_interrupts: bool,
) -> Result<Vec<DriverSeen>, BootError> {
    let mut drivers = Vec::new();
    let event = || EventFd::new(EFD_NONBLOCK).map_err(BootError::Event);
    for (number, device) in devices.into_iter().enumerate() {
        let place = Place::of(number);
        let line = has_interrupts.then(event).transpose()?;
        if let Some(line) = &line {
            vm.register_irqfd(line, place.gsi)?;
        }
        let mut kicks = Vec::new();
        for queue in 0..device.queue_sizes().len() as u32 {
            let kick = event()?;
            vm.register_ioeventfd(&kick, place.start + NOTIFY_OFFSET, queue)?;
            kicks.push(kick);
        }
        let transport = Transport::new(device, memory.clone(), workers.clone(), Interrupt::new(line), kicks);
        drivers.push(transport.driver_seen());
        bus.insert_memory(place.registers(), Box::new(transport));
    }
    Ok(drivers)
}

fn power_interrupt(vm: &Arc<Vm>) -> InterruptLine {
    // An owner of the button may keep it longer than the VM lives; a weak reference does not keep the VM alive.
    let vm = Arc::downgrade(vm);
    Box::new(move |is_high| vm.upgrade().map_or(Ok(()), |vm| vm.set_interrupt_line(acpi::SCI.into(), is_high)))
}

/// The bus with the devices behind ports. A direct guest's line port reads its memory.
fn create_bus(serial: &SerialPort, power: PowerManagement, memory_of_direct: Option<Arc<GuestMemory>>) -> Bus {
    const SERIAL_PORTS: u16 = 8;
    let mut bus = Bus::new();
    bus.insert(port::SERIAL..=port::SERIAL + (SERIAL_PORTS - 1), Box::new(serial.clone()));
    bus.insert(port::EXIT..=port::EXIT, Box::new(ExitPort));
    bus.insert(acpi::POWER_PORTS..=acpi::POWER_PORTS_LAST, Box::new(power));
    if let Some(memory) = memory_of_direct {
        bus.insert(port::LINE..=port::LINE, Box::new(LinePort::new(serial.clone(), memory)));
        bus.insert(fault_report::PORT..=fault_report::PORT, Box::new(FaultPort));
    } else {
        bus.insert(KEYBOARD_PORTS, Box::new(KeyboardController));
        bus.insert(CLOCK_PORTS, Box::new(ClockMemory));
        bus.insert(acpi::RESET_PORT..=acpi::RESET_PORT, Box::new(ResetRegister));
    }
    bus
}

#[cfg(test)]
mod tests {
    use super::image::tests as tests_of_image;
    use super::*;
    use crate::config::{HostLimits, VmOptions};
    use wideleaf_memory::{BackingConfig, BackingKind};

    fn read(bytes: Vec<u8>, cmdline: String) -> Result<BootImage, BootError> {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("base pages");
        let mut options = VmOptions::new(ImageSource::Bytes(bytes.into()), backing);
        options.cmdline = cmdline;
        BootImage::read(&VmConfig::new(options, &HostLimits::none()).expect("a VM"))
    }

    /// A bzImage with this limit on the length of its command line.
    fn bzimage(cmdline_max: u32) -> Vec<u8> {
        let mut bytes = vec![0; 2048];
        bytes[0x1f1] = 1;
        bytes[0x1f4] = 64;
        bytes[0x201] = 0x6a;
        bytes[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        bytes[0x211] = 1;
        bytes[0x236] = 1;
        bytes[0x238..0x23c].copy_from_slice(&cmdline_max.to_le_bytes());
        bytes
    }

    #[test]
    fn a_command_line_that_the_kernel_would_cut_off_is_refused() {
        let with_cmdline = |taken, length| read(bzimage(taken), "x".repeat(length));
        assert!(with_cmdline(255, 255).is_ok());
        let error = with_cmdline(255, 256).expect_err("one byte too many").to_string();
        assert_eq!(
            error,
            "cannot pass a command line of 256 bytes: the kernel takes at most 255 bytes; shorten --cmdline"
        );
        assert!(with_cmdline(2047, 2048).is_err() && with_cmdline(4096, 4095).is_ok());
    }

    #[test]
    fn linux_in_either_format_needs_a_whole_cpu_and_a_small_kernel_does_not() {
        let needs = |bytes| read(bytes, String::new()).expect("an image").needs_whole_cpu();
        let code: &[(u64, u64, &[u8])] = &[(0x20_0000, 0x1000, b"code")];
        let linux = [tests_of_image::pvh_note(0x20_0000), tests_of_image::note("Linux", 0x100, &[0; 4])].concat();
        assert!(needs(bzimage(255)) && needs(tests_of_image::elf(code, &linux)));
        assert!(!needs(tests_of_image::elf(code, &tests_of_image::pvh_note(0x20_0000))));
        assert!(!needs(tests_of_image::direct_image()));
    }
}
