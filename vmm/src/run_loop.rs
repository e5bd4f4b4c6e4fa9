//! The vCPU thread: its states, what it does with each exit, and how others pause and stop it.
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
//! A guest that resets its machine, where that is to boot again, has all vCPUs paused until somebody has put the rest of the machine back; then
//! each vCPU's thread puts its own vCPU back, and when the last one has, all go on:
//!
//! ```text
//!   Reset::No ── a vCPU's write, [`RunControl::ask_for_reset`] ─▶ Wanted ── all paused: [`RunControl::wait`] says so ─▶ the machine is put back
//!      ▲                                                                                                              │
//!      └────────────────────────────── each vCPU is put back, paused still ◀── PuttingBack ◀──────────────────────────┘
//! ```
//!
//! Others never change a vCPU's state: they say what they want under the lock of [`RunControl`] and kick; the vCPU's own
//! thread looks, under the same lock, and changes. So no wish is lost, and `Paused` means that this thread is not in
//! `KVM_RUN` and will not be before somebody resumes it.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuExit;
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::second_level::SecondLevelError;
use wideleaf_policies::Gpa;

use crate::devices::{Bus, BusEvent};
use crate::kvm::fresh::FreshVcpu;
use crate::kvm::vcpu::InternalError;
use crate::kvm::{GuestMemory, Kicker, KvmError, Vcpu};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::x86::fault_report::{FaultFrame, exception_name};

/// How long [`RunControl::pause`] waits. A vCPU leaves the guest within microseconds of the signal; what takes longer is
/// a page fault of the host (a giant page is zeroed in 0.1 to 0.3 s) or a slow serial sink.
pub const PAUSE_WAIT_MAX: Duration = Duration::from_secs(2);

/// How long a kick may take to show before it is repeated. On hardware one is enough; in the NPT lab, whose processors are
/// emulated, about one in ten thousand was seen to do nothing, and the vCPU stayed in the guest.
const KICK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Where a vCPU's thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuState {
    /// In the guest, or handling an exit, or about to enter.
    Running,
    /// Waiting to be resumed; not in the guest.
    Paused,
    /// It will never enter the guest again.
    Finished,
}

/// The registers of a vCPU, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegisterDump {
    /// Instruction pointer.
    pub rip: u64,
    /// Flags.
    pub rflags: u64,
    /// RAX RBX RCX RDX RSI RDI RBP RSP R8 … R15.
    pub general: [u64; 16],
    /// CR0, CR2, CR3, CR4.
    pub control: [u64; 4],
    /// Extended features.
    pub efer: u64,
    /// Selectors of CS and SS.
    pub segments: [u16; 2],
    /// The bytes at RIP, as far as they could be read.
    pub code: Vec<u8>,
}

impl RegisterDump {
    fn new(regs: &kvm_regs, sregs: &kvm_sregs) -> RegisterDump {
        let kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags } =
            *regs;
        RegisterDump {
            rip,
            rflags,
            general: [rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15],
            control: [sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4],
            efer: sregs.efer,
            segments: [sregs.cs.selector, sregs.ss.selector],
            code: Vec::new(),
        }
    }

    /// The stack pointer.
    pub fn rsp(&self) -> u64 {
        self.general[7]
    }

    /// The address of the last page fault.
    pub fn cr2(&self) -> u64 {
        self.control[1]
    }

    /// Whether these are the registers of a CPU after its reset: what SVM leaves of a triple fault.
    fn is_reset(&self) -> bool {
        self.rip == 0xfff0 && self.segments[0] == 0xf000
    }
}

impl fmt::Display for RegisterDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 16] = [
            "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", "r8 ", "r9 ", "r10", "r11", "r12", "r13", "r14",
            "r15",
        ];
        let [cr0, cr2, cr3, cr4] = self.control;
        let [cs, ss] = self.segments;
        write!(f, "rip={:#018x} rflags={:#x} cs={cs:#x} ss={ss:#x}", self.rip, self.rflags)?;
        for (index, (name, value)) in NAMES.into_iter().zip(self.general).enumerate() {
            f.write_str(if index % 4 == 0 { "\n" } else { " " })?;
            write!(f, "{name}={value:#018x}")?;
        }
        write!(f, "\ncr0={cr0:#x} cr2={cr2:#x} cr3={cr3:#x} cr4={cr4:#x} efer={:#x}", self.efer)?;
        if !self.code.is_empty() {
            f.write_str("\ncode at rip:")?;
            for byte in &self.code {
                write!(f, " {byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// How a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestExit {
    /// It wrote this code to the exit port.
    ExitPort(u32),
    /// It reset the machine. Where it is to boot again all vCPUs are paused for that, and nothing has ended.
    Reset,
    /// It reset the machine, and a vCPU could not be put back.
    NotPutBack {
        /// Which vCPU.
        vcpu: u32,
        /// Why not.
        why: String,
    },
    /// It switched the machine off.
    PowerOff,
    /// A directly started guest did something the CPU refused.
    Fault {
        /// Which vCPU.
        vcpu: u32,
        /// Which exception.
        vector: u64,
        /// Its error code.
        error_code: u64,
        /// The registers at the fault.
        registers: Box<RegisterDump>,
    },
    /// A triple fault.
    Shutdown {
        /// Which vCPU.
        vcpu: u32,
        /// The registers, as far as the CPU kept them.
        registers: Box<RegisterDump>,
    },
    /// KVM could not go on.
    InternalError {
        /// Which vCPU.
        vcpu: u32,
        /// What KVM said.
        error: InternalError,
        /// The registers.
        registers: Box<RegisterDump>,
    },
    /// The CPU refused to enter the guest.
    FailEntry {
        /// Which vCPU.
        vcpu: u32,
        /// The hardware's reason.
        reason: u64,
        /// On which CPU of the host.
        host_cpu: u32,
        /// The registers.
        registers: Box<RegisterDump>,
    },
    /// `KVM_RUN` failed.
    RunFailed {
        /// Which vCPU.
        vcpu: u32,
        /// The error number.
        errno: i32,
        /// The registers.
        registers: Box<RegisterDump>,
    },
    /// It halted where nothing can wake it.
    Halted {
        /// Which vCPU.
        vcpu: u32,
    },
    /// An exit nobody asked KVM for.
    Unexpected {
        /// Which vCPU.
        vcpu: u32,
        /// Which exit.
        exit: String,
    },
    /// The thread of a vCPU panicked, most likely in a serial sink.
    ThreadLost {
        /// Which vCPU.
        vcpu: u32,
    },
    /// The thread of a vCPU could not be restricted, and so did not run it.
    NoSandbox {
        /// Which vCPU.
        vcpu: u32,
        /// Why not.
        why: String,
    },
    /// Somebody stopped it.
    Stopped,
    /// It did not end in time.
    TimedOut,
}

impl fmt::Display for GuestExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestExit::ExitPort(code) => write!(f, "the guest ended with code {code}"),
            GuestExit::Reset => f.write_str("the guest asked for a reset"),
            GuestExit::NotPutBack { vcpu, why } => {
                write!(f, "vcpu {vcpu}: the guest reset its machine, and this vCPU stays as it was: {why}")
            }
            GuestExit::PowerOff => f.write_str("the guest switched itself off"),
            GuestExit::Fault { vcpu, vector, error_code, registers } => {
                write!(f, "vcpu {vcpu}: {} (error code {error_code:#x})", exception_name(*vector))?;
                if *vector == PAGE_FAULT {
                    write!(f, " at address {:#x}", registers.cr2())?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::Shutdown { vcpu, registers } => {
                write!(f, "vcpu {vcpu}: triple fault")?;
                if registers.is_reset() {
                    f.write_str(" (this CPU keeps no registers of one: below is the state after its reset)")?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::InternalError { vcpu, error, registers } => {
                write!(f, "vcpu {vcpu}: KVM cannot go on: {error}")?;
                if let Some(hint) = error.hint() {
                    write!(f, "\n{hint}")?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::FailEntry { vcpu, reason, host_cpu, registers } => {
                write!(
                    f,
                    "vcpu {vcpu}: the CPU refused to enter the guest: reason {reason:#x} on CPU {host_cpu}\n{registers}"
                )
            }
            GuestExit::RunFailed { vcpu, errno, registers } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "vcpu {vcpu}: KVM_RUN failed: {error}")?;
                if *errno == libc::EFAULT {
                    f.write_str(
                        "\nguest RAM is not accessible on the host: no huge page left in the pool, or it was unmapped",
                    )?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::Halted { vcpu } => write!(f, "vcpu {vcpu}: halted where no interrupt can wake it"),
            GuestExit::Unexpected { vcpu, exit } => write!(f, "vcpu {vcpu}: unexpected exit {exit}"),
            GuestExit::ThreadLost { vcpu } => write!(f, "vcpu {vcpu}: its thread panicked"),
            GuestExit::NoSandbox { vcpu, why } => write!(f, "vcpu {vcpu}: its thread is not in the sandbox: {why}"),
            GuestExit::Stopped => f.write_str("stopped"),
            GuestExit::TimedOut => f.write_str("the guest did not end in time"),
        }
    }
}

const PAGE_FAULT: u64 = 14;

/// What is wanted of the vCPUs of one VM, and where they are.
#[derive(Debug)]
pub struct RunControl {
    inner: Mutex<Inner>,
    /// Something in `inner` changed.
    changed: Condvar,
    kickers: Vec<Kicker>,
    on_reset: OnReset,
}

/// What a reset of the machine is to lead to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReset {
    /// The end.
    #[default]
    Stop,
    /// A boot from the same image, in the same RAM, with the same devices.
    Restart,
}

/// How far the machine is with a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reset {
    No,
    /// vCPUs are to be paused.
    Wanted,
    /// So many vCPUs are to be put back still.
    PuttingBack {
        left: usize,
    },
}

#[derive(Debug)]
struct Inner {
    /// Pauses not yet undone.
    pauses: u32,
    reset: Reset,
    /// How often vCPUs were put back, or began to be.
    resets: u64,
    /// All vCPUs are to finish; why is in `exit`.
    is_stopping: bool,
    exit: Option<GuestExit>,
    /// How many vCPUs will never write to a device again.
    silent: usize,
    vcpus: Vec<VcpuRecord>,
}

#[derive(Clone, Copy, Debug)]
struct VcpuRecord {
    state: VcpuState,
    /// CR3, since the vCPU was last paused or finished.
    page_table_root: Option<u64>,
}

impl RunControl {
    /// For one vCPU per kicker; all of them are about to run.
    pub fn new(kickers: Vec<Kicker>, on_reset: OnReset) -> Arc<RunControl> {
        let vcpus = vec![VcpuRecord { state: VcpuState::Running, page_table_root: None }; kickers.len()];
        let inner = Inner { pauses: 0, reset: Reset::No, resets: 0, is_stopping: false, exit: None, silent: 0, vcpus };
        Arc::new(RunControl { inner: Mutex::new(inner), changed: Condvar::new(), kickers, on_reset })
    }

    /// Resets the machine, as soon as who waits for it ([`RunControl::wait`]) has seen to it; `false` where a reset ends this one, or
    /// something has ended it.
    pub fn ask_for_reset(&self) -> bool {
        let mut inner = self.lock();
        if self.on_reset == OnReset::Stop || inner.is_stopping {
            return false;
        }
        // Who asks while another reset is under way has it.
        if inner.reset == Reset::No {
            inner.reset = Reset::Wanted;
            self.kick_running(&inner);
            self.changed.notify_all();
        }
        true
    }

    /// What a reset leads to.
    pub fn on_reset(&self) -> OnReset {
        self.on_reset
    }

    /// How often the machine was reset and went on.
    pub fn resets(&self) -> u64 {
        self.lock().resets
    }

    /// Has each vCPU's thread put its vCPU back, and then all of them go on, unless they are paused by others. They are paused, by
    /// [`RunControl::ask_for_reset`]. Where one cannot be put back, or somebody stops the VM meanwhile, it ends.
    pub(crate) fn put_back(&self) {
        let mut inner = self.lock();
        assert_eq!(inner.reset, Reset::Wanted, "vCPUs are put back while a reset is under way");
        inner.reset = Reset::PuttingBack { left: inner.vcpus.len() };
        inner.resets += 1;
        self.changed.notify_all();
        while !inner.is_stopping && inner.reset != (Reset::PuttingBack { left: 0 }) {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.reset = Reset::No;
        self.changed.notify_all();
    }

    /// Takes all vCPUs out of the guest; see [`wideleaf_memory::SecondLevel::pause`].
    ///
    /// From a serial sink, which runs in a vCPU's thread, that vCPU counts as paused: it is out of the guest and will
    /// look before it enters again.
    ///
    /// # Errors
    /// [`SecondLevelError::PauseTimedOut`] after [`PAUSE_WAIT_MAX`]; then none is paused.
    pub fn pause(&self) -> Result<(), SecondLevelError> {
        let started = Instant::now();
        let mut inner = self.lock();
        inner.pauses += 1;
        self.kick_running(&inner);
        loop {
            let Some(vcpu) = self.first_in_guest(&inner) else { return Ok(()) };
            let waited = started.elapsed();
            let Some(left) = PAUSE_WAIT_MAX.checked_sub(waited) else {
                inner.pauses -= 1;
                self.changed.notify_all();
                return Err(SecondLevelError::PauseTimedOut { vcpu, waited_ms: waited.as_millis() as u64 });
            };
            let slice = left.min(KICK_AGAIN_AFTER);
            (inner, _) = self.changed.wait_timeout(inner, slice).unwrap_or_else(PoisonError::into_inner);
            self.kick_running(&inner);
        }
    }

    /// Undoes one [`RunControl::pause`].
    ///
    /// # Errors
    /// [`SecondLevelError::WrongState`] where nothing was paused.
    pub fn resume(&self) -> Result<(), SecondLevelError> {
        let mut inner = self.lock();
        inner.pauses = inner.pauses.checked_sub(1).ok_or(SecondLevelError::WrongState("the vcpus are not paused"))?;
        if inner.pauses == 0 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// CR3 of each vCPU.
    ///
    /// # Errors
    /// [`SecondLevelError::WrongState`] unless all are paused or finished.
    pub fn page_table_roots(&self) -> Result<Vec<u64>, SecondLevelError> {
        let inner = self.lock();
        // A vCPU that was resumed and has not looked yet is still `Paused`, and may be gone before the answer is used.
        let is_still = inner.vcpus.iter().all(|vcpu| match vcpu.state {
            VcpuState::Running => false,
            VcpuState::Paused => inner.pauses > 0,
            VcpuState::Finished => true,
        });
        let roots = inner.vcpus.iter().map(|vcpu| vcpu.page_table_root).collect::<Option<Vec<u64>>>();
        roots.filter(|_| is_still).ok_or(SecondLevelError::WrongState("pause the vcpus before their CR3 is asked for"))
    }

    /// Where each vCPU is.
    pub fn states(&self) -> Vec<VcpuState> {
        self.lock().vcpus.iter().map(|vcpu| vcpu.state).collect()
    }

    /// Why it ends, once it does.
    pub fn exit(&self) -> Option<GuestExit> {
        self.lock().exit.clone()
    }

    /// Whether all vCPUs are to finish.
    pub fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Ends the VM, for this reason unless there is one already.
    pub fn stop(&self, reason: GuestExit) {
        let mut inner = self.lock();
        inner.exit.get_or_insert(reason);
        inner.is_stopping = true;
        self.kick_running(&inner);
        self.changed.notify_all();
    }

    /// Waits until all vCPUs have finished, or are paused for a reset ([`GuestExit::Reset`]), at most this long; `None` where they have not.
    pub fn wait(&self, at_most: Option<Duration>) -> Option<GuestExit> {
        let deadline = at_most.and_then(|time| Instant::now().checked_add(time));
        let mut inner = self.lock();
        loop {
            if inner.vcpus.iter().all(|vcpu| vcpu.state == VcpuState::Finished) {
                return Some(inner.exit.clone().unwrap_or(GuestExit::Stopped));
            }
            let is_out = |vcpu: &VcpuRecord| vcpu.state != VcpuState::Running;
            if inner.is_reset_wanted() && inner.vcpus.iter().all(is_out) {
                return Some(GuestExit::Reset);
            }
            let left = match deadline {
                None => Duration::MAX,
                Some(deadline) => deadline.checked_duration_since(Instant::now())?,
            };
            let slice = if inner.wants_all_out() { left.min(KICK_AGAIN_AFTER) } else { left };
            (inner, _) = self.changed.wait_timeout(inner, slice).unwrap_or_else(PoisonError::into_inner);
            if inner.wants_all_out() {
                self.kick_running(&inner);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here panics half-way: each change is one assignment.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kicks whoever may be in the guest. The lock is held: nobody can enter unseen.
    fn kick_running(&self, inner: &Inner) {
        for (vcpu, kicker) in inner.vcpus.iter().zip(&self.kickers) {
            if vcpu.state == VcpuState::Running {
                kicker.kick();
            }
        }
    }

    fn first_in_guest(&self, inner: &Inner) -> Option<usize> {
        inner
            .vcpus
            .iter()
            .zip(&self.kickers)
            .position(|(vcpu, kicker)| vcpu.state == VcpuState::Running && !kicker.is_this_thread())
    }

    /// What the vCPU is to do next. Only its own thread asks; the answer is its new state.
    fn next_state(&self, inner: &mut Inner, vcpu: usize) -> VcpuState {
        let state = match (inner.is_stopping, inner.pauses, inner.reset) {
            (true, ..) => VcpuState::Finished,
            (false, 0, Reset::No) => VcpuState::Running,
            (false, ..) => VcpuState::Paused,
        };
        if state == VcpuState::Running {
            self.kickers[vcpu].clear();
        }
        state
    }
}

impl Inner {
    fn is_reset_wanted(&self) -> bool {
        !self.is_stopping && self.reset == Reset::Wanted
    }

    fn wants_all_out(&self) -> bool {
        self.is_stopping || self.reset == Reset::Wanted
    }
}

/// A vCPU and all its thread needs.
pub(crate) struct VcpuThread {
    vcpu: Vcpu,
    /// To put it back at a reset, and at which of them it was put back last.
    fresh: Option<FreshVcpu>,
    put_back_at: u64,
    control: Arc<RunControl>,
    bus: Arc<Bus>,
    memory: Arc<GuestMemory>,
}

/// What an exit leads to.
enum Next {
    /// Back into the guest.
    Enter,
    /// Somebody wants something.
    Look,
    /// The guest has ended.
    End(GuestExit),
}

/// An exit that needs the vCPU's registers, and therefore its borrow to end first.
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
    /// `fresh` where a reset is not the end.
    pub(crate) fn new(
        vcpu: Vcpu,
        fresh: Option<FreshVcpu>,
        control: Arc<RunControl>,
        bus: Arc<Bus>,
        memory: Arc<GuestMemory>,
    ) -> VcpuThread {
        VcpuThread { vcpu, fresh, put_back_at: 0, control, bus, memory }
    }

    /// Runs the vCPU until it finishes, in the sandbox where there is one.
    pub(crate) fn run(mut self, sandbox: Option<&Sandbox>) {
        let kicker = &self.control.kickers[self.index()];
        kicker.bind_to_this_thread();
        let guard = FinishGuard { control: Arc::clone(&self.control), vcpu: self.vcpu.index() };
        if let Some(Err(error)) = sandbox.map(|sandbox| sandbox.enter_thread(ThreadKind::Vcpu)) {
            self.control.stop(GuestExit::NoSandbox { vcpu: self.vcpu.index(), why: error.to_string() });
        }
        let mut state = self.look();
        loop {
            state = match state {
                VcpuState::Running => self.running(),
                VcpuState::Paused => self.paused(),
                VcpuState::Finished => break,
            };
        }
        self.finished();
        drop(guard);
    }

    fn index(&self) -> usize {
        self.vcpu.index() as usize
    }

    /// Enters the guest until somebody wants something or the guest ends.
    fn running(&mut self) -> VcpuState {
        loop {
            match self.enter_once() {
                Next::Enter => {}
                Next::Look => return self.look(),
                Next::End(exit) => {
                    self.control.stop(exit);
                    return VcpuState::Finished;
                }
            }
        }
    }

    /// Waits until the last pause is undone and no reset is under way, in which it does its part.
    fn paused(&mut self) -> VcpuState {
        let root = self.root();
        let (index, control) = (self.index(), Arc::clone(&self.control));
        let mut inner = control.lock();
        inner.vcpus[index] = VcpuRecord { state: VcpuState::Paused, page_table_root: root };
        control.changed.notify_all();
        loop {
            if matches!(inner.reset, Reset::PuttingBack { .. }) && self.put_back_at != inner.resets {
                self.put_back_at = inner.resets;
                drop(inner);
                self.put_back();
                inner = control.lock();
                continue;
            }
            let next = control.next_state(&mut inner, index);
            if next != VcpuState::Paused {
                // Finishing is said by `finished`, when nothing is left to do.
                inner.vcpus[index].state = VcpuState::Running;
                inner.vcpus[index].page_table_root = None;
                return next;
            }
            inner = control.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As it was before its first instruction. Its last exit was seen to by another `KVM_RUN`, the one that a kick ended.
    fn put_back(&mut self) {
        let fresh = self.fresh.as_ref().expect("where a reset is not the end its vCPUs can be put back");
        if let Err(error) = fresh.put_back(&self.vcpu) {
            return self.control.stop(GuestExit::NotPutBack { vcpu: self.vcpu.index(), why: error.to_string() });
        }
        let (root, index) = (self.root(), self.index());
        let mut inner = self.control.lock();
        inner.vcpus[index].page_table_root = root;
        if let Reset::PuttingBack { left } = &mut inner.reset {
            *left -= 1;
        }
        self.control.changed.notify_all();
    }

    fn root(&self) -> Option<u64> {
        self.vcpu.sregs().ok().map(|sregs| sregs.cr3)
    }

    /// The last one gives out what devices hold back: sooner, another vCPU might still be in the middle of a line. The
    /// guard says the rest.
    fn finished(&mut self) {
        let (root, index) = (self.root(), self.index());
        let mut inner = self.control.lock();
        inner.vcpus[index].page_table_root = root;
        inner.silent += 1;
        let is_last = inner.silent == inner.vcpus.len();
        drop(inner);
        if is_last {
            self.bus.flush();
        }
    }

    fn look(&self) -> VcpuState {
        let mut inner = self.control.lock();
        self.control.next_state(&mut inner, self.index())
    }

    fn enter_once(&mut self) -> Next {
        let ending = match self.vcpu.run() {
            Ok(VcpuExit::IoOut(port, data)) => match self.bus.write_port(port, data) {
                BusEvent::None => return Next::Enter,
                // Into KVM once more, which ends what is left of this exit, and with the kick on its way no further.
                BusEvent::Reset if self.control.ask_for_reset() => return Next::Enter,
                event => Ending::Event(event),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                self.bus.read_port(port, data);
                return Next::Enter;
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.bus.read_memory(Gpa::new(address), data);
                return Next::Enter;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.bus.write_memory(Gpa::new(address), data);
                return Next::Enter;
            }
            Ok(VcpuExit::Intr) => return Next::Look,
            Err(errno) if matches!(errno.errno(), libc::EINTR | libc::EAGAIN) => return Next::Look,
            Ok(VcpuExit::Shutdown) => Ending::Shutdown,
            Ok(VcpuExit::InternalError) => Ending::InternalError,
            Ok(VcpuExit::FailEntry(reason, host_cpu)) => Ending::FailEntry { reason, host_cpu },
            Ok(VcpuExit::Hlt) => Ending::Halted,
            Ok(VcpuExit::MemoryFault { .. }) => Ending::RunFailed { errno: libc::EFAULT },
            Ok(other) => Ending::Unexpected(format!("{other:?}")),
            Err(errno) => Ending::RunFailed { errno: errno.errno() },
        };
        Next::End(self.explain(ending))
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

    /// The registers now are those of the stub; the frame it pushed has the guest's.
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

    /// The registers, or zeroes where KVM does not give them any more.
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

/// Says `Finished` however the thread ends, so that nobody waits for a thread that panicked.
struct FinishGuard {
    control: Arc<RunControl>,
    vcpu: u32,
}

impl Drop for FinishGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.stop(GuestExit::ThreadLost { vcpu: self.vcpu });
        }
        let index = self.vcpu as usize;
        let mut inner = self.control.lock();
        inner.vcpus[index].state = VcpuState::Finished;
        // Under the lock: nobody signals a thread that is gone.
        self.control.kickers[index].unbind();
        self.control.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// A control for this many vCPUs without threads; memfds stand in for their `kvm_run` pages.
    fn control(vcpus: usize) -> Arc<RunControl> {
        let kicker = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            Kicker::new(file.as_raw_fd()).unwrap()
        };
        RunControl::new((0..vcpus).map(|_| kicker()).collect(), OnReset::Restart)
    }

    fn set_state(control: &RunControl, vcpu: usize, state: VcpuState) {
        control.lock().vcpus[vcpu] = VcpuRecord { state, page_table_root: Some(0x1000 * vcpu as u64) };
        control.changed.notify_all();
    }

    #[test]
    fn a_pause_returns_when_the_last_vcpu_is_out() {
        let control = control(2);
        set_state(&control, 0, VcpuState::Finished);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while control.lock().pauses == 0 {
                    std::thread::yield_now();
                }
                set_state(&control, 1, VcpuState::Paused);
            });
            control.pause().unwrap();
        });
        assert_eq!(control.page_table_roots().unwrap(), [0, 0x1000]);
    }

    #[test]
    fn a_pause_that_takes_too_long_is_undone_and_says_who_did_not_leave() {
        let control = control(2);
        set_state(&control, 0, VcpuState::Paused);
        let error = control.pause().unwrap_err();
        assert!(matches!(error, SecondLevelError::PauseTimedOut { vcpu: 1, .. }), "{error}");
        assert_eq!(control.lock().pauses, 0);
    }

    #[test]
    fn pauses_nest() {
        let control = control(1);
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        control.pause().unwrap();
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
        assert!(matches!(control.resume(), Err(SecondLevelError::WrongState(_))));
    }

    #[test]
    fn a_stop_wins_over_a_pause_and_the_first_reason_stays() {
        let control = control(1);
        control.lock().pauses = 1;
        control.stop(GuestExit::ExitPort(3));
        control.stop(GuestExit::TimedOut);
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Finished);
        set_state(&control, 0, VcpuState::Finished);
        assert_eq!(control.wait(None), Some(GuestExit::ExitPort(3)));
    }

    #[test]
    fn waiting_ends_with_its_time() {
        assert_eq!(control(1).wait(Some(Duration::from_millis(1))), None);
    }

    #[test]
    fn a_reset_is_seen_when_the_last_vcpu_is_out_and_none_runs_before_all_are_put_back() {
        let control = control(2);
        assert!(control.ask_for_reset() && control.ask_for_reset());
        set_state(&control, 0, VcpuState::Paused);
        assert_eq!(control.wait(Some(Duration::from_millis(1))), None, "vcpu 1 is in the guest");
        set_state(&control, 1, VcpuState::Paused);
        assert_eq!(control.wait(None), Some(GuestExit::Reset));
        std::thread::scope(|scope| {
            scope.spawn(|| control.put_back());
            for left in [2, 1] {
                while control.lock().reset != (Reset::PuttingBack { left }) {
                    std::thread::yield_now();
                }
                assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
                control.lock().reset = Reset::PuttingBack { left: left - 1 };
                control.changed.notify_all();
            }
        });
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
        assert_eq!(control.resets(), 1);
    }

    #[test]
    fn a_vm_that_was_paused_by_somebody_stays_so_over_a_reset() {
        let control = control(1);
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        assert!(control.ask_for_reset());
        control.lock().reset = Reset::No;
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
    }

    #[test]
    fn a_stop_wins_over_a_reset_and_nobody_waits_for_vcpus_that_end() {
        let control = control(1);
        assert!(control.ask_for_reset());
        control.stop(GuestExit::Stopped);
        assert!(!control.ask_for_reset());
        control.put_back();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Finished);
        set_state(&control, 0, VcpuState::Finished);
        assert_eq!(control.wait(None), Some(GuestExit::Stopped));
    }

    #[test]
    fn tables_are_shown_while_a_pause_lasts_and_no_longer() {
        let control = control(1);
        let is_refused = || matches!(control.page_table_roots(), Err(SecondLevelError::WrongState(_)));
        assert!(is_refused(), "running");
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        assert_eq!(control.page_table_roots().unwrap(), [0]);
        control.resume().unwrap();
        assert!(is_refused(), "resumed, and its thread has not looked yet");
        set_state(&control, 0, VcpuState::Finished);
        assert!(!is_refused(), "finished");
    }

    #[test]
    fn a_page_fault_names_its_address() {
        let registers = RegisterDump { rip: 0x20_0010, control: [0, 0xdead_0000, 0, 0], ..Default::default() };
        let exit = GuestExit::Fault { vcpu: 1, vector: 14, error_code: 6, registers: Box::new(registers) };
        let text = exit.to_string();
        assert!(text.starts_with("vcpu 1: #PF page fault (error code 0x6) at address 0xdead0000\nrip=0x"), "{text}");
    }

    #[test]
    fn a_triple_fault_without_registers_says_so() {
        let registers = RegisterDump { rip: 0xfff0, segments: [0xf000, 0], ..Default::default() };
        let text = GuestExit::Shutdown { vcpu: 0, registers: Box::new(registers) }.to_string();
        assert!(text.contains("keeps no registers"), "{text}");
    }
}
