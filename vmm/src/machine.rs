//! A running VM: its threads, its devices and its end. A [`Machine`] owns all of them; dropping it stops the guest and
//! joins its threads, so that no guest code runs afterwards.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::CpuId;
use wideleaf_memory::actuators::clear::Pages;
use wideleaf_memory::{GuestRam, SecondLevel};

use crate::boot::reboot::{Reboot, RebootError};
use crate::boot::{self, BootError, BootImage, SetupTimes, Stopwatch};
use crate::config::VmConfig;
use crate::devices::serial::SerialPort;
use crate::devices::virtio::transport::DriverSeen;
use crate::devices::{Bus, BusCounters, BusWatch, PowerButton, SerialSink};
use crate::dma::DeviceMemory;
pub use crate::hardware::Hardware;
use crate::kvm::{GuestMemory, KvmSecondLevel, Vm};
use crate::run_loop::{GuestExit, OnReset, RunControl, VcpuState, VcpuThread, WaitingVcpu};
use crate::sandbox::{Entered, Sandbox};
use crate::state::{MachineState, REST_WAIT_MAX, RestoreError, SaveError, kind_name};

mod saver;

pub use saver::MachineSaver;

/// Interval of checks of a stop flag, because a signal handler that sets it wakes no thread. Each check wakes the
/// waiting thread for as long as the guest runs, and a signal takes effect after half of this on average.
const STOP_FLAG_INTERVAL: Duration = Duration::from_millis(100);

/// Limits of [`Machine::wait`]. The default waits forever.
#[derive(Clone, Copy, Debug, Default)]
pub struct WaitLimits<'a> {
    /// Longest time to wait.
    pub timeout: Option<Duration>,
    /// Flag that ends the wait when it becomes true.
    pub stop: Option<&'a AtomicBool>,
}

/// A VM with running vCPU threads. Dropping it stops and joins them, and closes everything.
pub struct Machine {
    vm: Arc<Vm>,
    memory: DeviceMemory,
    control: Arc<RunControl>,
    second_level: Arc<KvmSecondLevel>,
    bus: Arc<Bus>,
    serial: SerialPort,
    power_button: PowerButton,
    drivers: Vec<DriverSeen>,
    threads: Vec<JoinHandle<()>>,
    started: Instant,
    setup: SetupTimes,
    entry_name: &'static str,
    tsc_hz: Option<u64>,
    cpuids: Vec<CpuId>,
    reboot: Option<Reboot>,
    entered: Option<Entered>,
}

impl Machine {
    /// Builds a VM without devices and starts its vCPUs; `ram` as in [`Hardware`], `sink` receives its lines.
    ///
    /// # Errors
    /// [`BootError`]; then nothing runs.
    pub fn start(config: &VmConfig, ram: Arc<GuestRam>, sink: SerialSink) -> Result<Machine, BootError> {
        let started = Instant::now();
        let mut watch = Stopwatch::start();
        let image = BootImage::read(config)?;
        watch.lap("image");
        let hardware = Hardware { ram, output: sink.into(), devices: Vec::new(), sandbox: None };
        Machine::build(config, &image, hardware, started, watch)
    }

    /// Builds a VM from an image that was read before, and starts its vCPUs. If there is a sandbox, the process
    /// enters it before the first vCPU runs, and every vCPU's thread has its own filter.
    ///
    /// # Errors
    /// [`BootError`]; then nothing runs. Where the sandbox could not be entered, the process may be
    /// partly restricted.
    pub fn start_image(config: &VmConfig, image: &BootImage, hardware: Hardware) -> Result<Machine, BootError> {
        Machine::build(config, image, hardware, Instant::now(), Stopwatch::start())
    }

    fn build(
        config: &VmConfig,
        image: &BootImage,
        hardware: Hardware,
        started: Instant,
        mut watch: Stopwatch,
    ) -> Result<Machine, BootError> {
        let (sandbox, has_devices) = (hardware.sandbox.clone(), !hardware.devices.is_empty());
        let prepared = boot::prepare(config, image, hardware, &mut watch)?;
        let msrs = Arc::clone(&prepared.msrs);
        let (mut machine, vcpus) = Machine::assemble(prepared, sandbox.as_ref(), has_devices, started, &mut watch)?;
        machine.run(config, vcpus, &msrs, sandbox.as_ref())?;
        watch.lap("threads");
        machine.setup = watch.stop();
        Ok(machine)
    }

    /// Builds a VM that continues where another one was saved ([`Machine::save_state`]), and starts its vCPUs. No image
    /// is read, and nothing is written into RAM. The content of RAM may still come while the guest runs: this call
    /// touches no page of it. Then vCPUs, KVM on their threads, and devices on theirs use RAM through the mapping of
    /// `hardware.ram`, and wait for the answers to their faults.
    /// `config` is the saved VM's; its image and command line have no effect.
    ///
    /// `before_first_access` is called inside the sandbox, before any of them: whatever fills RAM begins there.
    ///
    /// The guest's clocks continue where they stopped, so its time of day is late by the time in between.
    ///
    /// # Errors
    /// [`RestoreError`]; then nothing runs. Where the sandbox could not be entered, the process may be partly
    /// restricted.
    pub fn start_restored(
        config: &VmConfig,
        state: &MachineState,
        hardware: Hardware,
        before_first_access: impl FnOnce(&Arc<RunControl>) -> Result<(), String>,
    ) -> Result<Machine, RestoreError> {
        let before = |machine: &Machine| before_first_access(&machine.control).map_err(RestoreError::Ram);
        Machine::restored(config, state, hardware, before, false)
    }

    /// The same for a VM that moves, with RAM that is complete or is being filled: vCPUs and devices stand still until
    /// the caller resumes them ([`SecondLevel::resume`]), so that nothing of the guest runs here while another host may
    /// still run it. What the drivers had asked for is not begun before either: no disk is written.
    ///
    /// # Errors
    /// [`RestoreError`]; then nothing runs.
    pub fn start_held(
        config: &VmConfig,
        state: &MachineState,
        hardware: Hardware,
        before_first_access: impl FnOnce(&Arc<RunControl>) -> Result<(), String>,
    ) -> Result<Machine, RestoreError> {
        let before = |machine: &Machine| before_first_access(&machine.control).map_err(RestoreError::Ram);
        Machine::restored(config, state, hardware, before, true)
    }

    fn restored(
        config: &VmConfig,
        state: &MachineState,
        hardware: Hardware,
        before_first_access: impl FnOnce(&Machine) -> Result<(), RestoreError>,
        is_held: bool,
    ) -> Result<Machine, RestoreError> {
        let (started, mut watch) = (Instant::now(), Stopwatch::start());
        let (sandbox, has_devices) = (hardware.sandbox.clone(), !hardware.devices.is_empty());
        let prepared = boot::restore::prepare(config, state, hardware, &mut watch)?;
        let msrs = Arc::clone(&prepared.msrs);
        let (mut machine, vcpus) = Machine::assemble(prepared, sandbox.as_ref(), has_devices, started, &mut watch)?;
        before_first_access(&machine)?;
        watch.lap("RAM");
        machine.bus.restore_devices(&state.devices).map_err(|(number, source)| {
            let kind = kind_name(state.devices[number].device.kind());
            RestoreError::Device { number, kind, source }
        })?;
        watch.lap("restored devices");
        if is_held {
            machine.hold()?;
        }
        // The devices' threads could not end behind a closed gate, and what they would do is the other host's.
        let ran = machine.run(config, vcpus, &msrs, sandbox.as_ref());
        ran.inspect_err(|_| {
            if is_held {
                machine.memory.gate().end()
            }
        })?;
        machine.bus.kick_queues();
        watch.lap("threads");
        machine.setup = watch.stop();
        Ok(machine)
    }

    /// Holds devices, which wait for the gate as they begin, and vCPUs, which have no threads yet.
    fn hold(&self) -> Result<(), RestoreError> {
        if !self.memory.gate().close(REST_WAIT_MAX) {
            let busy = "cannot hold the VM until it may run here: a device does not come to rest; try again";
            return Err(RestoreError::Ram(busy.to_owned()));
        }
        self.control.begin_paused();
        Ok(())
    }

    /// Builds the machine except for its vCPUs' threads, and enters the sandbox.
    fn assemble(
        prepared: boot::Prepared,
        sandbox: Option<&Arc<Sandbox>>,
        has_devices: bool,
        started: Instant,
        watch: &mut Stopwatch,
    ) -> Result<(Machine, Vec<WaitingVcpu>), BootError> {
        let boot::Prepared {
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
            msrs: _,
            cpuids,
            reboot,
            fresh,
            late,
        } = prepared;
        let kickers = vcpus.iter().map(crate::kvm::Vcpu::kicker).collect::<Result<Vec<_>, _>>()?;
        let on_reset = if reboot.is_some() { OnReset::Restart } else { OnReset::Stop };
        let control = RunControl::new(kickers, on_reset);
        let second_level = KvmSecondLevel::new(paging, Arc::clone(&vm), Arc::clone(&control), memory.clone());
        let second_level = Arc::new(second_level.watching(&vcpus));
        let mut machine = Machine {
            vm,
            memory,
            control,
            second_level,
            bus,
            serial,
            power_button,
            drivers,
            threads: Vec::with_capacity(vcpus.len()),
            started,
            setup: SetupTimes::default(),
            entry_name,
            tsc_hz,
            cpuids,
            reboot,
            entered: None,
        };
        watch.lap("control");
        // No thread is started before this line: it would stay outside the sandbox.
        machine.entered = sandbox.map(|sandbox| sandbox.enter_process()).transpose()?;
        if let Some(sandbox) = sandbox.filter(|_| has_devices) {
            let begun = device_threads.begin_in(Arc::clone(sandbox), Arc::clone(&machine.control));
            begun.map_err(BootError::DeviceThreads)?;
        }
        watch.lap("sandbox");
        let (mut fresh, mut late) = (fresh.into_iter(), late.into_iter());
        let waiting = |vcpu| WaitingVcpu { vcpu, fresh: fresh.next(), late: late.next() };
        Ok((machine, vcpus.into_iter().map(waiting).collect()))
    }

    /// Starts the vCPUs' threads.
    fn run(
        &mut self,
        config: &VmConfig,
        vcpus: Vec<WaitingVcpu>,
        msrs: &Arc<[u32]>,
        sandbox: Option<&Arc<Sandbox>>,
    ) -> Result<(), BootError> {
        for waiting in vcpus {
            let index = waiting.vcpu.index();
            let thread = VcpuThread::new(
                waiting,
                Arc::clone(msrs),
                Arc::clone(&self.control),
                Arc::clone(&self.bus),
                Arc::clone(self.memory.memory()),
            )
            .on_cpus(config.cpus_of(index));
            let sandbox = sandbox.cloned();
            let handle = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .spawn(move || thread.run(sandbox.as_deref()))
                .map_err(|source| BootError::Thread { vcpu: index, source })?;
            self.threads.push(handle);
        }
        Ok(())
    }

    /// Takes the state of everything but RAM: see [`MachineSaver::save_state`].
    ///
    /// # Errors
    /// Those of that function.
    pub fn save_state(&self) -> Result<MachineState, SaveError> {
        self.saver().save_state(REST_WAIT_MAX)
    }

    /// Makes the devices look at their rings when it is called, as if their drivers had notified them. Does nothing
    /// after the machine's end, and does not delay that.
    pub fn queue_kicker(&self) -> impl Fn() + Send + Sync + use<> {
        let bus = Arc::downgrade(&self.bus);
        move || bus.upgrade().iter().for_each(|bus| bus.kick_queues())
    }

    /// The means to save this machine, for a thread beside the one that waits.
    pub fn saver(&self) -> MachineSaver {
        MachineSaver {
            vm: Arc::clone(&self.vm),
            memory: self.memory.clone(),
            control: Arc::clone(&self.control),
            bus: Arc::clone(&self.bus),
            serial: self.serial.clone(),
            power_button: self.power_button.clone(),
            drivers: self.drivers.clone(),
            cpuids: self.cpuids.clone(),
            entry_name: self.entry_name,
            tsc_hz: self.tsc_hz,
        }
    }

    /// The manager's access to KVM's side of this VM. It stays valid after the machine is gone.
    pub fn second_level(&self) -> Arc<dyn SecondLevel> {
        Arc::clone(&self.second_level) as Arc<dyn SecondLevel>
    }

    /// The same access with its full type, which has the rest of KVM's statistics.
    pub fn kvm_second_level(&self) -> &Arc<KvmSecondLevel> {
        &self.second_level
    }

    /// RAM of the guest.
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.vm.ram()
    }

    /// RAM of the guest, for readers and writers of guest addresses.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.memory.memory()
    }

    /// Waits until the guest and all its vCPUs have ended. If a limit comes first, stops the VM.
    ///
    /// Where a reset is not the end ([`OnReset::Restart`]), [`GuestExit::Reset`] means that all vCPUs stand still,
    /// until [`Machine::put_back`] and [`Machine::reboot`] are called.
    pub fn wait(&self, limits: WaitLimits<'_>) -> GuestExit {
        wait(&self.control, limits)
    }

    /// Sets everything except the vCPUs back, after [`Machine::wait`] returned [`GuestExit::Reset`]; the manager of
    /// its RAM must rest. `pages` decides about the present pages of RAM. After the return, no more line of the
    /// previous boot comes.
    ///
    /// # Errors
    /// [`RebootError`]; the caller must then stop the machine.
    ///
    /// # Panics
    /// If a reset is the end of this machine.
    pub fn put_back(&self, pages: Pages) -> Result<(), RebootError> {
        let reboot = self.reboot.as_ref().expect("only a machine that may boot again stands still for it");
        reboot.prepare(&self.vm, &self.bus, &self.memory, self.vm.ram(), pages)
    }

    /// Sets the vCPUs back and resumes them, after [`Machine::put_back`]. The next [`Machine::wait`] reports a stop
    /// in the meantime, and a vCPU that cannot be set back.
    pub fn reboot(&self) {
        self.control.put_back();
    }

    /// Whether a reset of the machine is not the end.
    pub fn may_reboot(&self) -> bool {
        self.reboot.is_some()
    }

    /// Number of boots after the first one.
    pub fn resets(&self) -> u64 {
        self.control.resets()
    }

    /// Stops the VM and waits until no vCPU runs. Returns how it ended, which may have happened before the call.
    pub fn stop(&self) -> GuestExit {
        end(&self.control, GuestExit::Stopped)
    }

    /// State of each vCPU.
    pub fn vcpu_states(&self) -> Vec<VcpuState> {
        self.control.states()
    }

    /// Types into the guest's serial port. Returns the number of bytes that it had room for.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        self.serial.type_in(bytes)
    }

    /// The guest's serial port, for a thread that types into it beside the one that waits.
    pub fn serial(&self) -> SerialPort {
        self.serial.clone()
    }

    /// The machine's power button, which asks the guest to switch itself off.
    pub fn power_button(&self) -> PowerButton {
        self.power_button.clone()
    }

    /// The control that pauses, resumes and ends the VM, for threads beside the one that waits.
    pub fn control(&self) -> Arc<RunControl> {
        Arc::clone(&self.control)
    }

    /// Handle on the counters of the bus.
    pub fn bus(&self) -> BusWatch {
        self.bus.watch()
    }

    /// Time when [`Machine::start`] began.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Time from the beginning of [`Machine::start`] to the guest's first byte on the serial port, if
    /// there was one.
    pub fn first_byte_after(&self) -> Option<Duration> {
        self.serial.first_byte().map(|at| at - self.started)
    }

    /// Duration of each step of the start.
    pub fn setup_times(&self) -> &SetupTimes {
        &self.setup
    }

    /// Restrictions and remaining rights of the sandbox, if the VM runs in one.
    pub fn sandbox(&self) -> Option<&Entered> {
        self.entered.as_ref()
    }

    /// Progress of the driver of each device, in the order of [`Hardware::devices`]; readable also after the
    /// machine is gone.
    pub fn drivers(&self) -> &[DriverSeen] {
        &self.drivers
    }

    /// Numbers of accesses to ports and addresses without a device.
    pub fn bus_counters(&self) -> BusCounters {
        self.bus.counters()
    }

    /// Name of the image's entry that was used: `direct`, `pvh` or `bzimage`.
    pub fn entry_name(&self) -> &'static str {
        self.entry_name
    }

    /// Frequency of the guest's time stamp counter in Hz, if KVM reports it.
    pub fn tsc_hz(&self) -> Option<u64> {
        self.tsc_hz
    }
}

/// See [`Machine::wait`].
fn wait(control: &RunControl, limits: WaitLimits<'_>) -> GuestExit {
    let deadline = limits.timeout.and_then(|time| Instant::now().checked_add(time));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = match (left, limits.stop) {
            (left, None) => left,
            (None, Some(_)) => Some(STOP_FLAG_INTERVAL),
            (Some(left), Some(_)) => Some(left.min(STOP_FLAG_INTERVAL)),
        };
        if let Some(exit) = control.wait(slice) {
            return exit;
        }
        if limits.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return end(control, GuestExit::Stopped);
        }
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return end(control, GuestExit::TimedOut);
        }
    }
}

fn end(control: &RunControl, reason: GuestExit) -> GuestExit {
    control.stop(reason.clone());
    control.wait(None).unwrap_or(reason)
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.threads.len() == self.control.states().len() {
            self.stop();
        } else {
            // The start failed midway: some vCPUs have no thread, and would never be reported as finished.
            self.control.stop(GuestExit::Stopped);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has reported it as `GuestExit::ThreadLost`.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("entry", &self.entry_name)
            .field("vcpus", &self.vcpu_states())
            .field("setup", &self.setup)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::resource::{UsageWho, getrusage};

    use super::*;
    use crate::run_loop::control::threadless::{control, set_state};

    #[test]
    fn a_thread_that_waits_for_an_idle_guest_sleeps_nearly_all_the_time() {
        /// Number of times that this thread has slept.
        fn sleeps() -> i64 {
            getrusage(UsageWho::RUSAGE_THREAD).unwrap().voluntary_context_switches()
        }
        let (control, stop) = (control(1), AtomicBool::new(false));
        let (exit, slept, took) = std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let (before, began) = (sleeps(), Instant::now());
                let exit = wait(&control, WaitLimits { timeout: None, stop: Some(&stop) });
                (exit, sleeps() - before, began.elapsed())
            });
            std::thread::sleep(Duration::from_secs(1));
            stop.store(true, Ordering::Relaxed);
            while !control.is_stopping() {
                std::thread::yield_now();
            }
            set_state(&control, 0, VcpuState::Finished);
            waits.join().unwrap()
        });
        assert_eq!(exit, GuestExit::Stopped);
        assert!(slept as u128 <= 5 + took.as_millis() / 50, "it woke {slept} times in {took:?}");
    }
}
