//! A kick takes a vCPU out of the guest, from any thread, without a lost wakeup.
//!
//! ```text
//!   other thread                              vCPU thread
//!   immediate_exit = 1 ──┐                    … in the guest:          the signal ends KVM_RUN (EINTR)
//!   signal its thread  ──┘                    … between two KVM_RUNs:  the next one sees the flag (EINTR)
//!                                             EINTR → looks at what is wanted, then immediate_exit = 0
//! ```
//!
//! The flag is set before the signal is sent, so one of the two always finds the vCPU (KVM API, 5 "The kvm_run
//! structure", `immediate_exit`). The signal handler itself does nothing: no thread-local pointer, nothing to race.
#![expect(
    unsafe_code,
    reason = "the flag is a byte of a page shared with the kernel, and signals go to threads by number"
)]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::Duration;

use kvm_bindings::kvm_run;
use libc::clockid_t;
use nix::time::ClockId;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Number of the kick signal, counted from `SIGRTMIN`: the first free one. The default action of any other signal
/// would end the process, or the signal already has a meaning.
const SIGNAL_ABOVE_SIGRTMIN: c_int = 1;

/// Number of bytes of a `kvm_run` that are mapped here: the flag is at its beginning.
const RUN_PAGE_BYTES: usize = 4096;
const _: () = assert!(offset_of!(kvm_run, immediate_exit) < RUN_PAGE_BYTES, "the flag is on the first page");

/// Value for a vCPU that no thread runs.
const NO_THREAD: i32 = 0;

/// The handle by which other threads take one vCPU out of the guest.
///
/// It has its own mapping of the vCPU's `kvm_run` page, so it may outlive the vCPU.
#[derive(Debug)]
pub struct Kicker {
    run_page: NonNull<c_void>,
    thread: AtomicI32,
}

/// CPU time of a thread by ticks of the kernel's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickedTime {
    /// All of it, with the time in the guest.
    pub all: Duration,
    /// That in the kernel, without the time in the guest.
    pub system: Duration,
}

// SAFETY: the mapping is owned, unmapped once on drop, and reached through an atomic only.
unsafe impl Send for Kicker {}
// SAFETY: as above; every method takes `&self` and touches nothing but atomics.
unsafe impl Sync for Kicker {}

impl Kicker {
    /// Creates the handle for the vCPU behind `vcpu_fd`.
    ///
    /// # Errors
    /// The kernel's error, where the page cannot be mapped or the signal handler cannot be set.
    pub fn new(vcpu_fd: RawFd) -> io::Result<Kicker> {
        set_handler_once()?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing. Offset 0 of a vCPU's file is its
        // `kvm_run` (KVM API, 4.5 `KVM_GET_VCPU_MMAP_SIZE`), which is at least one page long.
        let page = unsafe { libc::mmap(null_mut(), RUN_PAGE_BYTES, protection, libc::MAP_SHARED, vcpu_fd, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let run_page = NonNull::new(page).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Kicker { run_page, thread: AtomicI32::new(NO_THREAD) })
    }

    /// Records that the calling thread runs the vCPU from now on.
    pub fn bind_to_this_thread(&self) {
        self.thread.store(this_thread(), Ordering::SeqCst);
    }

    /// Records that no thread runs the vCPU any more; signals stop.
    pub fn unbind(&self) {
        self.thread.store(NO_THREAD, Ordering::SeqCst);
    }

    /// Whether the calling thread is the one that runs the vCPU.
    pub fn is_this_thread(&self) -> bool {
        self.thread.load(Ordering::SeqCst) == this_thread()
    }

    /// Makes the current `KVM_RUN`, or else the next one, return with `EINTR`. The caller holds the lock that also
    /// guards the state that the vCPU then reads.
    pub fn kick(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
        let thread = self.thread.load(Ordering::SeqCst);
        if thread == NO_THREAD {
            return;
        }
        // SAFETY: getpid cannot fail and touches no memory.
        let process = unsafe { libc::getpid() };
        // SAFETY: tgkill takes three numbers. The thread is one of this process (it was its own gettid), and is not
        // gone: it unbinds under the lock that the caller holds before it ends. Were the number reused all the same,
        // the signal would run the empty handler there.
        unsafe { libc::syscall(libc::SYS_tgkill, process, thread, kick_signal()) };
    }

    /// Lets the next `KVM_RUN` enter the guest again. The vCPU's thread calls it, under the same
    /// lock as [`Kicker::kick`].
    pub fn clear(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
    }

    /// Whether it was kicked, and has not been cleared since.
    #[cfg(test)]
    pub(crate) fn is_kicked(&self) -> bool {
        self.immediate_exit().load(Ordering::SeqCst) != 0
    }

    /// CPU time of the vCPU's thread since it began, by whole ticks of the kernel's timer, which charges each to the
    /// mode that it finds; `None` where no thread runs the vCPU.
    ///
    /// The clock has no name, but a number: the thread's, and the kind of time (clock_getcpuclockid(3); Linux,
    /// `include/linux/posix-timers_types.h`). It needs no file, so it can be read in the sandbox.
    ///
    /// # Errors
    /// The kernel's error, where the thread has ended.
    pub fn ticked_time(&self) -> io::Result<Option<TickedTime>> {
        /// User and system time together.
        const CPUCLOCK_PROF: clockid_t = 0;
        /// User time, with the time in the guest.
        const CPUCLOCK_VIRT: clockid_t = 1;
        let (user, all) = (self.clock(CPUCLOCK_VIRT)?, self.clock(CPUCLOCK_PROF)?);
        Ok(all.zip(user).map(|(all, user)| TickedTime { all, system: all.saturating_sub(user) }))
    }

    /// CPU time that the vCPU's thread has used since it began, in the guest and in the kernel, to the nanosecond;
    /// `None` where no thread runs the vCPU.
    ///
    /// # Errors
    /// The kernel's error, where the thread has ended.
    pub fn cpu_time(&self) -> io::Result<Option<Duration>> {
        /// Time on a core, as the scheduler counts it.
        const CPUCLOCK_SCHED: clockid_t = 2;
        self.clock(CPUCLOCK_SCHED)
    }

    /// Reads one of the clocks of the vCPU's thread.
    fn clock(&self, kind: clockid_t) -> io::Result<Option<Duration>> {
        const CPUCLOCK_PERTHREAD: clockid_t = 4;
        let thread = self.thread.load(Ordering::SeqCst);
        if thread == NO_THREAD {
            return Ok(None);
        }
        Ok(Some(ClockId::from_raw(!thread << 3 | CPUCLOCK_PERTHREAD | kind).now()?.into()))
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        let offset = offset_of!(kvm_run, immediate_exit);
        // SAFETY: the offset lies in the page that is mapped while `self` lives.
        let flag = unsafe { self.run_page.cast::<u8>().add(offset) };
        // SAFETY: valid and aligned for a byte; the other users of the byte are the kernel, and kvm-ioctls only in
        // `set_kvm_immediate_exit`, which no code here calls.
        unsafe { AtomicU8::from_ptr(flag.as_ptr()) }
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        // SAFETY: the page was mapped by `new` with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.run_page.as_ptr(), RUN_PAGE_BYTES) };
    }
}

fn kick_signal() -> c_int {
    SIGRTMIN() + SIGNAL_ABOVE_SIGRTMIN
}

/// Number of this thread. By the system call: std declares `gettid` as weak, and a static program that is linked as a
/// whole would then have none.
fn this_thread() -> i32 {
    nix::unistd::gettid().as_raw()
}

extern "C" fn do_nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {}

/// Sets the handler for the whole process, once. It is set without `SA_RESTART`, because its
/// purpose is to interrupt.
fn set_handler_once() -> io::Result<()> {
    static OUTCOME: OnceLock<Result<(), i32>> = OnceLock::new();
    OUTCOME
        .get_or_init(|| register_signal_handler(kick_signal(), do_nothing).map_err(|errno| errno.errno()))
        .map_err(io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    /// A memfd stands in for a vCPU: a page that can be mapped.
    fn page() -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(RUN_PAGE_BYTES as u64).unwrap();
        file
    }

    #[test]
    fn a_kick_sets_the_flag_and_interrupts_the_bound_thread() {
        let file = page();
        let kicker = Arc::new(Kicker::new(file.as_raw_fd()).unwrap());
        let (ready, is_ready) = channel();
        let sleeper = std::thread::spawn({
            let kicker = Arc::clone(&kicker);
            move || {
                kicker.bind_to_this_thread();
                ready.send(()).unwrap();
                // Sleeps until a signal comes: returns -1 (EINTR), never 0.
                // SAFETY: no descriptors are given, and no timeout.
                unsafe { libc::poll(null_mut(), 0, 60_000) }
            }
        });
        is_ready.recv().unwrap();
        // The thread may be between its message and the sleep: kick until it has ended, because a second kick must
        // not hurt. Kick slowly: real-time signals queue, and a thread that receives them faster than it handles
        // them never ends.
        while !sleeper.is_finished() {
            kicker.kick();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(kicker.immediate_exit().load(Ordering::SeqCst), 1);
        assert_eq!(sleeper.join().unwrap(), -1);
        kicker.clear();
        assert_eq!(kicker.immediate_exit().load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_kick_without_a_thread_only_sets_the_flag() {
        let file = page();
        let kicker = Kicker::new(file.as_raw_fd()).unwrap();
        kicker.kick();
        assert_eq!(kicker.immediate_exit().load(Ordering::SeqCst), 1);
        assert!(!kicker.is_this_thread());
    }

    #[test]
    fn a_vcpu_that_cannot_be_mapped_is_an_error() {
        assert!(Kicker::new(-1).is_err());
    }
}
