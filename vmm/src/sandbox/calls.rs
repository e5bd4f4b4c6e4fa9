//! The system calls of each kind of thread, and their permitted arguments. A guest that takes over a thread can ask
//! the kernel for nothing else.
//!
//! ```text
//!                 EVERY     what Rust's runtime and the C library do in any thread, at its begin and its end
//!                   │
//!      ┌────────────┼────────┬──────────┬───────────┬──────────┬─────────┐
//!    vcpu        manager   faults     status       io        main        │ each on top of the process's own
//!    KVM_RUN     madvise   uffd       the daemon's  disks,   the report  │ filter, which is all of these together
//!    READING     memslots  files of   one socket    sockets  READING     │ and what starts them: in force from before
//!    uffd        READING   RAM                               uffd        │ the first vCPU runs
//!                starts threads that answer faults                       │
//! ```
//!
//! The numbers of the calls are x86-64's; another ABI of the same kernel (`int 0x80`, x32) also ends the process.
//! The lists were made by reading the code and by running all policies on all backings until nothing was missing.
//! Calls that are only needed before the guest runs are in no list.

use std::collections::BTreeMap;
use std::fmt;

use kvm_bindings::{
    kvm_clear_dirty_log, kvm_clock_data, kvm_debugregs, kvm_dirty_log, kvm_irq_level, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msrs, kvm_nested_state, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_translation,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use libc::c_long;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{BackendError, SeccompCondition as Condition, SeccompRule};

use super::SandboxConfig;
use crate::kvm::saved::tsc::GET_DEVICE_ATTR;

/// The purpose of a thread, which decides its permitted calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// The process: all other kinds together, and the calls that start their threads.
    Process,
    /// Waits for the guest's end and writes the report.
    Main,
    /// Runs a vCPU, and handles its exits and the lines of its console.
    Vcpu,
    /// The manager's loop; copies windows, moves giants.
    Manager,
    /// Answers the page faults of the guest.
    Faults,
    /// Serves a device: files and sockets that are open already.
    Io,
    /// Reports the guest's status to the daemon.
    Status,
    /// Answers on the VM's own control socket.
    Control,
    /// Saves the VM into files that are open already.
    Save,
    /// Reads input typed for the guest, and writes the guest's output.
    Console,
}

impl ThreadKind {
    /// All kinds of threads.
    pub const ALL: [ThreadKind; 10] = [
        ThreadKind::Process,
        ThreadKind::Main,
        ThreadKind::Vcpu,
        ThreadKind::Manager,
        ThreadKind::Faults,
        ThreadKind::Io,
        ThreadKind::Status,
        ThreadKind::Control,
        ThreadKind::Save,
        ThreadKind::Console,
    ];

    /// Name of such a thread in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ThreadKind::Process => "the process",
            ThreadKind::Main => "the main thread",
            ThreadKind::Vcpu => "a vCPU's thread",
            ThreadKind::Manager => "the manager",
            ThreadKind::Faults => "the thread that answers faults",
            ThreadKind::Io => "a device's thread",
            ThreadKind::Status => "the thread that tells the daemon",
            ThreadKind::Control => "a thread of the control socket",
            ThreadKind::Save => "the thread that saves the VM",
            ThreadKind::Console => "a thread of the console",
        }
    }

    fn tables(self) -> &'static [Table] {
        match self {
            ThreadKind::Process => &[
                EVERY, READING, REPORT, KVM_RUN, BUTTON, OWN_RAM, DIRTY_LOGS, THREADS, MANAGER, RAM_FILE, DEVICES,
                ACTIVATING, ENTERING, STARTING, TERMINAL,
            ],
            ThreadKind::Main => &[EVERY, READING, REPORT, OWN_RAM, RAM_FILE, TERMINAL],
            ThreadKind::Vcpu => &[EVERY, READING, KVM_RUN, BUTTON, OWN_RAM, TERMINAL],
            ThreadKind::Manager => &[EVERY, READING, DIRTY_LOGS, THREADS, MANAGER, OWN_RAM, RAM_FILE, ENTERING],
            ThreadKind::Faults => &[EVERY, READING, OWN_RAM, RAM_FILE, WAKING],
            ThreadKind::Io => &[EVERY, DEVICES],
            ThreadKind::Status => &[EVERY, READING, OWN_RAM, DAEMON],
            ThreadKind::Control => &[EVERY, READING, OWN_RAM, ANSWERING, BUTTON],
            ThreadKind::Save => &[EVERY, READING, DIRTY_LOGS, THREADS, OWN_RAM, SAVING_VM, SAVING_FILES, WAKING],
            ThreadKind::Console => &[EVERY, TERMINAL, CONSOLE, BUTTON],
        }
    }
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Condition on the arguments under which a call is allowed.
#[derive(Clone, Copy, Debug)]
enum Allow {
    /// Arguments of any value.
    Any,
    /// The argument of this index, counted from 0, has this 32-bit value.
    Is(u8, u64),
    /// The bits (second number) of the argument have these values (third number), in 32 bits.
    Bits(u8, u64, u64),
    /// The first argument is this process.
    ThisProcess,
    /// All of these.
    All(&'static [Allow]),
}

type Table = &'static [(c_long, Allow)];

/// `mmap(2)`, `mprotect(2)`: only memory that the program was loaded with can be executable.
const NOT_EXECUTABLE: Allow = Allow::Bits(2, libc::PROT_EXEC as u64, 0);

/// `openat(2)`: existing files, only for reading.
const TO_READ: Allow =
    Allow::Bits(2, (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY) as u64, 0);

/// Calls that Rust and the C library make in any thread, and harmless calls: on the thread's own memory and
/// descriptors, and time.
const EVERY: Table = &[
    (libc::SYS_read, Allow::Any),
    (libc::SYS_write, Allow::Any),
    (libc::SYS_readv, Allow::Any),
    (libc::SYS_writev, Allow::Any),
    (libc::SYS_close, Allow::Any),
    (libc::SYS_poll, Allow::Any),
    (libc::SYS_ppoll, Allow::Any),
    (libc::SYS_futex, Allow::Any),
    (libc::SYS_clock_gettime, Allow::Any),
    (libc::SYS_clock_nanosleep, Allow::Any),
    (libc::SYS_nanosleep, Allow::Any),
    (libc::SYS_restart_syscall, Allow::Any),
    (libc::SYS_sched_yield, Allow::Any),
    (libc::SYS_sched_getaffinity, Allow::Any),
    (libc::SYS_getrandom, Allow::Any),
    // A panic's backtrace asks for the current folder.
    (libc::SYS_getcwd, Allow::Any),
    (libc::SYS_getpid, Allow::Any),
    (libc::SYS_gettid, Allow::Any),
    (libc::SYS_tgkill, Allow::ThisProcess),
    (libc::SYS_rt_sigreturn, Allow::Any),
    (libc::SYS_rt_sigprocmask, Allow::Any),
    (libc::SYS_sigaltstack, Allow::Any),
    (libc::SYS_set_robust_list, Allow::Any),
    (libc::SYS_rseq, Allow::Any),
    (libc::SYS_brk, Allow::Any),
    (libc::SYS_mmap, NOT_EXECUTABLE),
    (libc::SYS_mprotect, NOT_EXECUTABLE),
    (libc::SYS_mremap, Allow::Any),
    (libc::SYS_munmap, Allow::Any),
    (libc::SYS_madvise, Allow::Any),
    (libc::SYS_prctl, Allow::Is(0, libc::PR_SET_NAME as u64)),
    (libc::SYS_prctl, Allow::Is(0, libc::PR_GET_NAME as u64)),
    (libc::SYS_prctl, Allow::Is(0, libc::PR_SET_VMA as u64)),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_GETFD as u64)),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_SETFD as u64)),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_GETFL as u64)),
    (libc::SYS_exit, Allow::Any),
    (libc::SYS_exit_group, Allow::Any),
];

/// The kernel's files, and all else that is opened for reading: Landlock decides which files.
const READING: Table = &[
    (libc::SYS_openat, TO_READ),
    (libc::SYS_statx, Allow::Any),
    (libc::SYS_newfstatat, Allow::Any),
    (libc::SYS_fstat, Allow::Any),
    (libc::SYS_lseek, Allow::Any),
    (libc::SYS_pread64, Allow::Any),
    (libc::SYS_getdents64, Allow::Any),
    (libc::SYS_readlink, Allow::Any),
    (libc::SYS_readlinkat, Allow::Any),
];

/// A result file that is renamed over its predecessor; the release of the claim to this guest; the wait for
/// resources held for this process.
const REPORT: Table = &[
    (libc::SYS_openat, Allow::Any),
    (libc::SYS_unlink, Allow::Any),
    (libc::SYS_unlinkat, Allow::Any),
    (libc::SYS_renameat, Allow::Any),
    (libc::SYS_renameat2, Allow::Any),
    (libc::SYS_flock, Allow::Any),
    (libc::SYS_wait4, Allow::Any),
    (libc::SYS_waitid, Allow::Any),
];

/// KVM's ioctl type (linux/kvm.h).
const KVM: u8 = 0xae;

/// Calls on a vCPU. The rest of KVM's interface is used before the guest runs.
const KVM_RUN: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_none!(KVM, 0x80))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x81, size_of::<kvm_regs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x83, size_of::<kvm_sregs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0x85, size_of::<kvm_translation>()))),
    // Asks whether an event is in delivery; also for a snapshot.
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x9f, size_of::<kvm_vcpu_events>()))),
    // Marks the guest's clock as stopped, after a long pause.
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_none!(KVM, 0xad))),
];

/// Sets the clock of a vCPU that continues from a snapshot, in its own thread.
const CONTINUING: Table =
    &[(libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x89, size_of::<kvm_msrs>())))];

/// Reads a vCPU's state in its own thread, for a snapshot. Numbers as in [`PUTTING_BACK`].
const SAVING_VCPU: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0x88, size_of::<kvm_msrs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x8e, size_of::<kvm_lapic_state>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x98, size_of::<kvm_mp_state>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0xa1, size_of::<kvm_debugregs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0xa4, size_of::<kvm_xsave>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0xa6, size_of::<kvm_xcrs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0xbe, size_of::<kvm_nested_state>()))),
    (libc::SYS_ioctl, Allow::Is(1, GET_DEVICE_ATTR)),
];

/// Reads the state of interrupt controllers, timer and clock, in the thread that takes a snapshot.
const SAVING_VM: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0x62, size_of::<kvm_irqchip>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x9f, size_of::<kvm_pit_state2>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x7c, size_of::<kvm_clock_data>()))),
];

/// Restores a vCPU's initial state in its own thread, where a reset leads to another boot. Numbers of linux/kvm.h;
/// those of lists and of growing states contain the size of their header.
const PUTTING_BACK: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x82, size_of::<kvm_regs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x84, size_of::<kvm_sregs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0x88, size_of::<kvm_msrs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x89, size_of::<kvm_msrs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x8f, size_of::<kvm_lapic_state>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x99, size_of::<kvm_mp_state>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xa0, size_of::<kvm_vcpu_events>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xa2, size_of::<kvm_debugregs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0xa4, size_of::<kvm_xsave>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xa5, size_of::<kvm_xsave>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xa7, size_of::<kvm_xcrs>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xbf, size_of::<kvm_nested_state>()))),
];

/// Restores the rest of the machine, in the thread that waits for the guest: interrupt controllers and their timer.
const BOOTING_AGAIN: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_read!(KVM, 0x63, size_of::<kvm_irqchip>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0xa0, size_of::<kvm_pit_state2>()))),
];

/// The line of the power button's interrupt: a press sets it high, and a vCPU that has seen it sets it low.
const BUTTON: Table =
    &[(libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x61, size_of::<kvm_irq_level>())))];

/// Size of `struct pm_scan_arg` of linux/fs.h.
const PAGEMAP_SCAN_BYTES: usize = 96;

/// Requests of this type on a userfaultfd, which concern memory of this process, and `USERFAULTFD_IOC_NEW` on its
/// device (linux/userfaultfd.h). Bits 8 to 15 of a request are its type.
const USERFAULTFD: Allow = Allow::Bits(1, 0xff00, 0xaa00);

/// Reads the backing of RAM and KVM's mappings; takes windows out of the guest's reach, answers faults, brings windows
/// back. All of it concerns this process's memory.
const OWN_RAM: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(b'f', 16, PAGEMAP_SCAN_BYTES))),
    (libc::SYS_ioctl, USERFAULTFD),
    // The first thread that needs it opens the file of KVM's statistics, which has the sizes of its mappings.
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_none!(KVM, 0xce))),
];

/// `setpriority(2)`: of the calling thread alone. Without a capability it can only be lowered.
const OWN_PRIORITY: Allow = Allow::All(&[Allow::Is(0, libc::PRIO_PROCESS as u64), Allow::Is(1, 0)]);

/// Dirty logs of memslots.
const DIRTY_LOGS: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x46, size_of::<kvm_userspace_memory_region>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_write!(KVM, 0x42, size_of::<kvm_dirty_log>()))),
    (libc::SYS_ioctl, Allow::Is(1, nix::request_code_readwrite!(KVM, 0xc0, size_of::<kvm_clear_dirty_log>()))),
];

/// Threads that this one starts.
const THREADS: Table = &[
    (libc::SYS_clone, OWN_THREAD),
    // Another filter answers with ENOSYS: the flags are in memory, where no filter sees them.
    (libc::SYS_clone3, Allow::Any),
];

/// Files of a snapshot, which a client has passed, and disks of which the guest's writes are made durable.
const SAVING_FILES: Table = &[
    (libc::SYS_pwrite64, Allow::Any),
    (libc::SYS_pwritev, Allow::Any),
    (libc::SYS_fallocate, Allow::Any),
    (libc::SYS_ftruncate, Allow::Any),
    (libc::SYS_fsync, Allow::Any),
    (libc::SYS_fdatasync, Allow::Any),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_DUPFD_CLOEXEC as u64)),
    // The locks of disks pass to the run to which the VM moves, and come back where it does not.
    (libc::SYS_fcntl, Allow::Is(1, libc::F_OFD_SETLK as u64)),
];

/// The manager's changes: giants, and its own threads, of which one makes free blocks of memory and lets all others
/// run first.
const MANAGER: Table = &[
    (libc::SYS_memfd_create, Allow::Any),
    (libc::SYS_ftruncate, Allow::Any),
    (libc::SYS_pipe2, Allow::Any),
    (libc::SYS_setpriority, OWN_PRIORITY),
];

/// `clone(2)`: a thread of this process, without a new namespace.
const OWN_THREAD: Allow = {
    let of_threads = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND;
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    Allow::Bits(0, (of_threads | namespaces | libc::CLONE_PTRACE) as u64, of_threads as u64)
};

/// Frames of the file behind guest RAM, taken and given back.
const RAM_FILE: Table = &[(libc::SYS_fallocate, Allow::Any)];

/// Disks, sockets and events that are already open. No request of `ioctl(2)`: a disk is a file, and a tap device is
/// set up earlier.
const DEVICES: Table = &[
    (libc::SYS_pread64, Allow::Any),
    (libc::SYS_pwrite64, Allow::Any),
    (libc::SYS_preadv, Allow::Any),
    (libc::SYS_pwritev, Allow::Any),
    (libc::SYS_lseek, Allow::Any),
    (libc::SYS_fstat, Allow::Any),
    (libc::SYS_statx, Allow::Any),
    (libc::SYS_fsync, Allow::Any),
    (libc::SYS_fdatasync, Allow::Any),
    (libc::SYS_fallocate, Allow::Any),
    (libc::SYS_epoll_create1, Allow::Any),
    (libc::SYS_epoll_ctl, Allow::Any),
    (libc::SYS_epoll_wait, Allow::Any),
    (libc::SYS_epoll_pwait, Allow::Any),
    (libc::SYS_eventfd2, Allow::Any),
    (libc::SYS_recvfrom, Allow::Any),
    (libc::SYS_sendto, Allow::Any),
    (libc::SYS_recvmsg, Allow::Any),
    (libc::SYS_sendmsg, Allow::Any),
    (libc::SYS_accept4, Allow::Any),
    (libc::SYS_shutdown, Allow::Any),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_SETFL as u64)),
];

/// Connections to programs of this host that wait for a guest's connections.
const CONNECTING: Table = &[
    (libc::SYS_socket, Allow::Is(0, libc::AF_UNIX as u64)),
    (libc::SYS_connect, Allow::Any),
    (libc::SYS_getsockopt, Allow::Any),
    (libc::SYS_ioctl, Allow::Is(1, libc::FIONBIO)),
];

/// Calls of a device when its driver comes or goes, on the thread that starts all others: the offloads of a tap, a
/// second descriptor of an event.
const ACTIVATING: Table = &[
    (libc::SYS_ioctl, Allow::Is(1, libc::TUNSETOFFLOAD)),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_DUPFD_CLOEXEC as u64)),
];

/// Successive connections to the daemon.
const DAEMON: Table = &[
    (libc::SYS_socket, Allow::Is(0, libc::AF_UNIX as u64)),
    (libc::SYS_connect, Allow::Any),
    (libc::SYS_setsockopt, Allow::Any),
    (libc::SYS_getsockopt, Allow::Any),
    (libc::SYS_sendto, Allow::Any),
    (libc::SYS_recvfrom, Allow::Any),
    (libc::SYS_shutdown, Allow::Any),
    (libc::SYS_fcntl, Allow::Is(1, libc::F_DUPFD_CLOEXEC as u64)),
    (libc::SYS_ioctl, Allow::Is(1, libc::FIONBIO)),
];

/// Connections to the VM's own socket, which is already open.
const ANSWERING: Table = &[
    (libc::SYS_accept4, Allow::Any),
    (libc::SYS_getsockopt, Allow::Any),
    (libc::SYS_sendto, Allow::Any),
    (libc::SYS_recvfrom, Allow::Any),
    // Open files come with a request to save the VM.
    (libc::SYS_recvmsg, Allow::Any),
    // An operator resumes a VM after its disks were given up for a run that does not have it.
    (libc::SYS_fcntl, Allow::Is(1, libc::F_OFD_SETLK as u64)),
    (libc::SYS_ioctl, Allow::Is(1, libc::FIONBIO)),
];

/// A byte over a socket pair wakes a thread: one that has to end, one that receives signals, or one that sends replies.
const WAKING: Table = &[(libc::SYS_sendto, Allow::Any)];

/// As [`WAKING`], for the thread that reads the terminal and restores its settings at the end.
const CONSOLE: Table =
    &[(libc::SYS_sendto, Allow::Any), (libc::SYS_recvfrom, Allow::Any), (libc::SYS_ioctl, Allow::Is(1, libc::TCSETS))];

/// A progress bar, and the check for a terminal.
const TERMINAL: Table =
    &[(libc::SYS_ioctl, Allow::Is(1, libc::TCGETS)), (libc::SYS_ioctl, Allow::Is(1, libc::TIOCGWINSZ))];

/// A thread that answers faults enters its own filter, and has a userfaultfd. Some are started with the guest;
/// others serve a sensor that a policy needs later, and the manager starts them. A filter is only ever added, so
/// this takes nothing back.
const ENTERING: Table = &[
    (libc::SYS_seccomp, Allow::Any),
    (libc::SYS_prctl, Allow::Is(0, libc::PR_SET_NO_NEW_PRIVS as u64)),
    (libc::SYS_userfaultfd, Allow::Any),
];

/// Memory policies of this process, where the machine has several NUMA nodes or the guest is placed on some: of new
/// memory for guest RAM; the nodes of its own pages, and their moves to another one (`move_pages(2)` of process 0).
const NODES: Table = &[
    (libc::SYS_mbind, Allow::Any),
    (libc::SYS_set_mempolicy, Allow::Any),
    (libc::SYS_get_mempolicy, Allow::Any),
    (libc::SYS_move_pages, Allow::Is(0, 0)),
];

/// `sched_setaffinity(2)` of the calling thread: a vCPU that is bound to CPUs.
const OWN_AFFINITY: Table = &[(libc::SYS_sched_setaffinity, Allow::Is(0, 0))];

/// Call for the first thread that the process starts.
const STARTING: Table = &[(libc::SYS_rt_sigaction, Allow::Is(0, SIGNAL_OF_THE_LIBRARY))];

/// Signal by which the C library informs all threads of a change of user (nptl(7), "the second real-time signal"):
/// it sets the handler when it starts its first thread.
const SIGNAL_OF_THE_LIBRARY: u64 = 33;

/// The rules of a kind. For each call, one of its rules must hold; a call without rules is always permitted.
pub(super) fn rules(kind: ThreadKind, config: &SandboxConfig) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut tables = kind.tables().to_vec();
    if matches!(kind, ThreadKind::Process | ThreadKind::Main) && config.has_console {
        tables.push(CONSOLE);
    }
    if config.has_console {
        // Any thread may receive a signal, and then informs the thread that handles signals.
        tables.push(WAKING);
    }
    if config.boots_again {
        match kind {
            ThreadKind::Process => tables.extend([PUTTING_BACK, BOOTING_AGAIN]),
            ThreadKind::Vcpu => tables.push(PUTTING_BACK),
            ThreadKind::Main => tables.extend([BOOTING_AGAIN, BUTTON]),
            _ => {}
        }
    }
    if config.has_nodes && matches!(kind, ThreadKind::Process | ThreadKind::Manager | ThreadKind::Faults) {
        tables.push(NODES);
    }
    if config.binds_vcpus && matches!(kind, ThreadKind::Process | ThreadKind::Vcpu) {
        tables.push(OWN_AFFINITY);
    }
    if config.continues && matches!(kind, ThreadKind::Process | ThreadKind::Vcpu) {
        tables.push(CONTINUING);
    }
    if config.has_control_socket {
        // A client may ask for a snapshot.
        match kind {
            ThreadKind::Process => tables.extend([SAVING_VCPU, SAVING_VM, SAVING_FILES]),
            ThreadKind::Vcpu => tables.push(SAVING_VCPU),
            _ => {}
        }
    }
    if matches!(kind, ThreadKind::Process | ThreadKind::Io) && config.devices.connects {
        tables.push(CONNECTING);
    }
    if kind == ThreadKind::Io && config.devices.gives_back {
        tables.extend([READING, OWN_RAM]);
    }
    if kind == ThreadKind::Process && config.daemon.is_some() {
        tables.push(DAEMON);
    }
    match kind {
        ThreadKind::Process if config.has_control_socket => tables.push(ANSWERING),
        ThreadKind::Main if config.has_control_socket => tables.push(WAKING),
        _ => {}
    }
    let calls = || tables.iter().flat_map(|table| table.iter());
    let mut rules = BTreeMap::<i64, Vec<SeccompRule>>::new();
    for (call, with) in calls() {
        let of_call = rules.entry(*call).or_default();
        let may_always = calls().any(|(other, with)| other == call && matches!(with, Allow::Any));
        if !may_always {
            of_call.push(SeccompRule::new(with.conditions()?)?);
        }
    }
    Ok(rules)
}

impl Allow {
    /// The conditions that must hold together.
    fn conditions(self) -> Result<Vec<Condition>, BackendError> {
        let condition = match self {
            Allow::All(several) => {
                let each = several.iter().map(|with| with.conditions()).collect::<Result<Vec<_>, _>>()?;
                return Ok(each.concat());
            }
            Allow::Any => Condition::new(0, Qword, MaskedEq(0), 0),
            Allow::Is(argument, number) => Condition::new(argument, Dword, Eq, number & u64::from(u32::MAX)),
            Allow::Bits(argument, mask, value) => Condition::new(argument, Dword, MaskedEq(mask), value),
            Allow::ThisProcess => Condition::new(0, Dword, Eq, u64::from(std::process::id())),
        };
        Ok(vec![condition?])
    }
}
