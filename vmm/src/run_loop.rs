//! The vCPU thread: its states, its reaction to each exit, and its pause and stop by other threads.
//!
//! ```text
//!                 kicked, pause wanted
//!      Running ────────────────────────▶ Paused
//!        │  ▲                              │ │
//!        │  └──────────────────────────────┘ │ stop wanted
//!        │     last pause undone             │
//!        │ guest ended, stop wanted, error   │
//!        └───────────────▶ Finished ◀────────┘
//! ```
//!
//! Other threads never change a vCPU's state: they write their request under the lock of [`RunControl`] and kick.
//! The vCPU's own thread reads it under the same lock, and changes the state. No request is lost, and `Paused`
//! means that this thread is not in `KVM_RUN` and will not enter it before it is resumed.

pub(crate) mod control;
mod exit;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_sregs;
use kvm_ioctls::VcpuExit;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::second_level::{ControlRegisters, PagingMode};
use wideleaf_policies::{CpuList, Gpa};

use crate::devices::{Bus, BusEvent};
use crate::kvm::saved::{LateState, SavedTsc, SavedVcpu};
use crate::kvm::{GuestMemory, KvmError, Vcpu};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::x86::fault_report::FaultFrame;

pub use control::{OnReset, PAUSE_WAIT_MAX, RunControl, SaveVcpusError, VcpuState};
pub use exit::{GuestExit, RegisterDump};

use control::{Reset, VcpuRecord};

/// Length of a pause after which the guest's clock is marked as stopped. Linux's watchdog takes a CPU for hung after
/// 20 seconds by default (Documentation/admin-guide/lockup-watchdogs.rst); a mark costs one call.
const MARKED_FROM: Duration = Duration::from_secs(1);

/// A vCPU without a thread.
pub(crate) struct WaitingVcpu {
    pub(crate) vcpu: Vcpu,
    /// State to which a reset sets it back, where a reset is not the end.
    pub(crate) fresh: Option<SavedVcpu>,
    /// Rest of its state, where it continues from a snapshot.
    pub(crate) late: Option<LateState>,
}

/// A vCPU and everything that its thread needs.
pub(crate) struct VcpuThread {
    vcpu: Vcpu,
    /// State to restore at a reset, and number of the reset at which it was last restored.
    fresh: Option<SavedVcpu>,
    put_back_at: u64,
    /// Rest of the state of a snapshot, to set before the vCPU runs.
    late: Option<LateState>,
    /// Numbers of the model-specific registers that KVM lists.
    msrs: Arc<[u32]>,
    control: Arc<RunControl>,
    bus: Arc<Bus>,
    memory: Arc<GuestMemory>,
    /// CPUs of the host on which it runs; empty for all that the process may use.
    cpus: CpuList,
    /// Whether the latest entry tries an access again.
    is_second_try: bool,
}

/// The result of an exit.
enum AfterExit {
    /// Enter the guest again.
    Enter,
    /// Read the requests of other threads.
    ReadRequests,
    /// Report that the guest has ended.
    End(GuestExit),
}

/// An exit with a report that needs the vCPU's registers, so that the borrow of the vCPU must end first.
enum Ending {
    Event(BusEvent),
    Shutdown,
    InternalError,
    FailEntry { reason: u64, host_cpu: u32 },
    RunFailed { errno: i32 },
    Halted,
    Unexpected(String),
}

impl VcpuThread {
    /// `msrs` are the model-specific registers that KVM lists.
    pub(crate) fn new(
        WaitingVcpu { vcpu, fresh, late }: WaitingVcpu,
        msrs: Arc<[u32]>,
        control: Arc<RunControl>,
        bus: Arc<Bus>,
        memory: Arc<GuestMemory>,
    ) -> VcpuThread {
        let (cpus, is_second_try) = (CpuList::default(), false);
        VcpuThread { vcpu, fresh, put_back_at: 0, late, msrs, control, bus, memory, cpus, is_second_try }
    }

    /// The same, on these CPUs of the host; none: on all that the process may use.
    pub(crate) fn on_cpus(self, cpus: CpuList) -> VcpuThread {
        VcpuThread { cpus, ..self }
    }

    /// Runs the vCPU until it finishes, inside the sandbox if there is one.
    pub(crate) fn run(mut self, sandbox: Option<&Sandbox>) {
        let kicker = &self.control.kickers[self.index()];
        kicker.bind_to_this_thread();
        let (control, bus) = (Arc::clone(&self.control), Arc::clone(&self.bus));
        let guard = FinishGuard { control, bus, vcpu: self.vcpu.index() };
        self.bind_to_cpus();
        if let Some(Err(error)) = sandbox.map(|sandbox| sandbox.enter_thread(ThreadKind::Vcpu)) {
            self.control.stop(GuestExit::NoSandbox { vcpu: self.vcpu.index(), why: error.to_string() });
        }
        if let Some(Err(error)) = self.late.take().map(|late| late.set(&self.vcpu)) {
            self.control.stop(GuestExit::NotContinued { vcpu: self.vcpu.index(), why: error.to_string() });
        }
        let mut state = self.requested_state();
        loop {
            state = match state {
                VcpuState::Running => self.running(),
                VcpuState::Paused => self.paused(),
                VcpuState::Finished => break,
            };
        }
        let paging = self.paging();
        self.control.lock().vcpus[self.index()].paging = paging;
        drop(guard);
    }

    fn index(&self) -> usize {
        self.vcpu.index() as usize
    }

    /// Has the thread run on its CPUs alone from now on (`sched_setaffinity(2)`). They were there when the run was
    /// planned: where the kernel refuses them now, the guest runs on others.
    fn bind_to_cpus(&self) {
        if self.cpus.is_empty() {
            return;
        }
        let mut set = CpuSet::new();
        let bound = self.cpus.iter().try_for_each(|cpu| set.set(cpu.into()));
        if let Err(error) = bound.and_then(|()| sched_setaffinity(Pid::from_raw(0), &set)) {
            tracing::warn!("cannot bind vCPU {} to the CPUs {} of this host: {error}", self.index(), self.cpus);
        }
    }

    /// Enters the guest until another thread has a request or the guest ends.
    fn running(&mut self) -> VcpuState {
        self.control.enters();
        loop {
            match self.enter_once() {
                AfterExit::Enter => {}
                AfterExit::ReadRequests => return self.requested_state(),
                AfterExit::End(exit) => {
                    self.control.stop(exit);
                    return VcpuState::Finished;
                }
            }
        }
    }

    /// Waits until the last pause is undone and no reset is under way; during a reset it restores its vCPU, for a
    /// snapshot it takes the vCPU's state.
    fn paused(&mut self) -> VcpuState {
        let (paging, since) = (self.paging(), Instant::now());
        let (index, control) = (self.index(), Arc::clone(&self.control));
        let mut inner = control.lock();
        inner.vcpus[index] = VcpuRecord { state: VcpuState::Paused, paging };
        control.changed.notify_all();
        loop {
            if matches!(inner.reset, Reset::PuttingBack { .. }) && self.put_back_at != inner.resets {
                self.put_back_at = inner.resets;
                drop(inner);
                self.put_back();
                inner = control.lock();
                continue;
            }
            if inner.saving.as_ref().is_some_and(|saved| saved[index].is_none()) {
                drop(inner);
                let saved = self.save();
                inner = control.lock();
                if let Some(all) = &mut inner.saving {
                    all[index] = Some(saved);
                }
                control.changed.notify_all();
                continue;
            }
            let next = control.next_state(&mut inner, index);
            if next != VcpuState::Paused {
                if since.elapsed() >= MARKED_FROM {
                    self.vcpu.mark_clock_stopped();
                }
                // The guard reports the end, after all work is done.
                inner.vcpus[index].state = VcpuState::Running;
                inner.vcpus[index].paging = None;
                return next;
            }
            control.changed.wait(&mut inner);
        }
    }

    /// Restores the vCPU's state before its first instruction. Another `KVM_RUN`, which a kick ended, has completed
    /// its last exit.
    fn put_back(&mut self) {
        let fresh = self.fresh.as_ref().expect("the state was saved because a reset is not the end");
        if let Err(error) = fresh.put_back(&self.vcpu) {
            return self.control.stop(GuestExit::NotPutBack { vcpu: self.vcpu.index(), why: error.to_string() });
        }
        let (paging, index) = (self.paging(), self.index());
        let mut inner = self.control.lock();
        inner.vcpus[index].paging = paging;
        if let Reset::PuttingBack { left } = &mut inner.reset {
            *left -= 1;
        }
        self.control.changed.notify_all();
    }

    fn save(&self) -> Result<(SavedVcpu, SavedTsc), KvmError> {
        Ok((SavedVcpu::take(&self.vcpu, &self.msrs)?, SavedTsc::take(&self.vcpu)?))
    }

    fn paging(&self) -> Option<PagingMode> {
        let of = |sregs: kvm_sregs| {
            let kvm_sregs { cr0, cr3, cr4, efer, .. } = sregs;
            PagingMode::of(ControlRegisters { cr0, cr3, cr4, efer })
        };
        self.vcpu.sregs().ok().map(of)
    }

    fn requested_state(&self) -> VcpuState {
        let mut inner = self.control.lock();
        self.control.next_state(&mut inner, self.index())
    }

    fn enter_once(&mut self) -> AfterExit {
        let was_second_try = std::mem::take(&mut self.is_second_try);
        let ending = match self.vcpu.run() {
            Ok(VcpuExit::IoOut(port, data)) => match self.bus.write_port(port, data) {
                BusEvent::None => return AfterExit::Enter,
                // Enters KVM once more: that completes this exit, and the kick prevents any further instruction.
                BusEvent::Reset if self.control.ask_for_reset() => return AfterExit::Enter,
                event => Ending::Event(event),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                self.bus.read_port(port, data);
                return AfterExit::Enter;
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.bus.read_memory(Gpa::new(address), data);
                return AfterExit::Enter;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.bus.write_memory(Gpa::new(address), data);
                return AfterExit::Enter;
            }
            Ok(VcpuExit::Intr) => return AfterExit::ReadRequests,
            Err(errno) if matches!(errno.errno(), libc::EINTR | libc::EAGAIN) => return AfterExit::ReadRequests,
            Ok(VcpuExit::Shutdown) => Ending::Shutdown,
            Ok(VcpuExit::InternalError) => Ending::InternalError,
            Ok(VcpuExit::FailEntry(reason, host_cpu)) => Ending::FailEntry { reason, host_cpu },
            Ok(VcpuExit::Hlt) => Ending::Halted,
            Ok(VcpuExit::MemoryFault { .. }) => Ending::RunFailed { errno: libc::EFAULT },
            Ok(other) => Ending::Unexpected(format!("{other:?}")),
            Err(errno) => Ending::RunFailed { errno: errno.errno() },
        };
        if matches!(ending, Ending::InternalError) && !was_second_try && self.has_mistaken_delivery() {
            tracing::debug!(
                "vCPU {}: KVM took a delivered event for one in delivery; it is entered again",
                self.index()
            );
            self.is_second_try = true;
            return AfterExit::Enter;
        }
        AfterExit::End(self.explain(ending))
    }

    /// Whether KVM reports an event that it could not deliver, and has none: then the guest's access, which has had no
    /// effect, may be tried again.
    ///
    /// KVM from 6.14 on looks at the event's type in a VMCB's EXITINTINFO and not at the valid bit
    /// (`svm_check_emulate_instruction` in arch/x86/kvm/svm/svm.c). QEMU as a host with SVM leaves the type of a
    /// delivered event there (`cpu_vmexit` in target/i386/tcg). A device's register that is the next thing to be
    /// accessed after an exception of KVM's, such as a late page's, would end the guest.
    fn has_mistaken_delivery(&mut self) -> bool {
        self.vcpu.internal_error().is_delivery() && self.vcpu.is_event_in_delivery().is_ok_and(|is_there| !is_there)
    }

    fn explain(&mut self, ending: Ending) -> GuestExit {
        let vcpu = self.vcpu.index();
        match ending {
            Ending::Event(BusEvent::Exit(code)) => GuestExit::ExitPort(code),
            Ending::Event(BusEvent::Reset) => GuestExit::Reset,
            Ending::Event(BusEvent::PowerOff) => GuestExit::PowerOff,
            Ending::Event(BusEvent::Fault) => self.explain_fault(),
            Ending::Event(BusEvent::None) => GuestExit::Unexpected { vcpu, exit: "port write".to_owned() },
            Ending::Shutdown => GuestExit::Shutdown { vcpu, registers: self.dump() },
            Ending::InternalError => {
                let error = self.vcpu.internal_error();
                GuestExit::InternalError { vcpu, error, registers: self.dump() }
            }
            Ending::FailEntry { reason, host_cpu } => {
                GuestExit::FailEntry { vcpu, reason, host_cpu, registers: self.dump() }
            }
            Ending::RunFailed { errno } => GuestExit::RunFailed { vcpu, errno, registers: self.dump() },
            Ending::Halted => GuestExit::Halted { vcpu },
            Ending::Unexpected(exit) => GuestExit::Unexpected { vcpu, exit },
        }
    }

    /// The current registers are those of the stub; the frame that it pushed has the guest's.
    fn explain_fault(&self) -> GuestExit {
        let vcpu = self.vcpu.index();
        let mut registers = self.dump();
        let Ok(frame) = FaultFrame::read(self.memory.view(), registers.rsp()) else {
            return GuestExit::Unexpected { vcpu, exit: format!("fault report without a frame\n{registers}") };
        };
        registers.rip = frame.rip;
        registers.rflags = frame.rflags;
        registers.general[7] = frame.rsp;
        registers.segments = [frame.cs as u16, frame.ss as u16];
        registers.code = self.read_code(frame.rip);
        GuestExit::Fault { vcpu, vector: frame.vector, error_code: frame.error_code, registers }
    }

    /// The registers, or zeroes where KVM cannot return them.
    fn dump(&self) -> Box<RegisterDump> {
        let registers = || -> Result<RegisterDump, KvmError> {
            let mut dump = RegisterDump::new(&self.vcpu.regs()?, &self.vcpu.sregs()?);
            dump.code = self.read_code(dump.rip);
            Ok(dump)
        };
        Box::new(registers().unwrap_or_default())
    }

    /// The first bytes of the instruction at `rip`, if its page is mapped and RAM.
    fn read_code(&self, rip: u64) -> Vec<u8> {
        const INSTRUCTION_BYTES_MAX: u64 = 15;
        let bytes_on_page = 4096 - rip % 4096;
        let mut code = vec![0; INSTRUCTION_BYTES_MAX.min(bytes_on_page) as usize];
        let gpa = self.vcpu.translate(rip).ok().flatten();
        match gpa.map(|gpa| self.memory.view().read_slice(&mut code, GuestAddress(gpa))) {
            Some(Ok(())) => code,
            _ => Vec::new(),
        }
    }
}

/// Finishes the vCPU however the thread ends, so that no thread waits for one that panicked. The last one flushes the
/// devices; earlier, another vCPU might still be in the middle of a line.
struct FinishGuard {
    control: Arc<RunControl>,
    bus: Arc<Bus>,
    vcpu: u32,
}

impl FinishGuard {
    /// Whether this vCPU is the last one that could write to a device.
    fn falls_silent(&self) -> bool {
        let mut inner = self.control.lock();
        inner.silent += 1;
        inner.silent == inner.vcpus.len()
    }
}

impl Drop for FinishGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.stop(GuestExit::ThreadLost { vcpu: self.vcpu });
        }
        if self.falls_silent() {
            // A device that panics, perhaps for the second time, must not keep the end from being reported.
            drop(catch_unwind(AssertUnwindSafe(|| self.bus.flush())));
        }
        let index = self.vcpu as usize;
        let mut inner = self.control.lock();
        inner.vcpus[index].state = VcpuState::Finished;
        // Under the lock, so that no thread signals one that has ended.
        self.control.kickers[index].unbind();
        self.control.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::control::threadless::control;
    use super::*;
    use crate::devices::bus::PortDevice;

    /// Counts its flushes, and panics in each.
    struct Fragile(Arc<AtomicU32>);

    impl PortDevice for Fragile {
        fn read(&mut self, _: u16, _: &mut [u8]) {}
        fn write(&mut self, _: u16, _: &[u8]) -> BusEvent {
            BusEvent::None
        }
        fn flush(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("it is fragile");
        }
    }

    #[test]
    fn the_last_vcpu_flushes_the_devices_also_where_its_thread_or_an_earlier_one_panics() {
        for panics in [[false, false], [true, false], [false, true], [true, true]] {
            let (control, flushes) = (control(2), Arc::default());
            let mut bus = Bus::new();
            bus.insert(0x60..=0x60, Box::new(Fragile(Arc::clone(&flushes))));
            let bus = Arc::new(bus);
            for (vcpu, panics) in (0..).zip(panics) {
                assert_eq!(flushes.load(Ordering::Relaxed), 0, "another vCPU may write");
                let guard = FinishGuard { control: Arc::clone(&control), bus: Arc::clone(&bus), vcpu };
                let thread = std::thread::spawn(move || {
                    let _guard = guard;
                    assert!(!panics, "this thread is lost");
                });
                assert_eq!(thread.join().is_err(), panics);
            }
            assert_eq!(flushes.load(Ordering::Relaxed), 1, "{panics:?}");
            assert_eq!(control.states(), [VcpuState::Finished; 2]);
        }
    }
}
