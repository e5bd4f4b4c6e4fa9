//! The effect of a forbidden system call: one line on standard error, and the process's death by `SIGSYS`.
//!
//! ```text
//!   call not in the list ─▶ SIGSYS in that thread ─▶ handler: the line ─▶ forbidden again, and SIGSYS is blocked now
//!                                                                         ─▶ the kernel ends the process
//! ```
//!
//! The handler may interrupt the thread anywhere, so it only does what is safe there (signal-safety(7)): arithmetic
//! on its own stack, reading the path of an `openat`, and one `write(2)`. An attacker that has taken over the thread
//! and blocks the signal also dies by it, without the line (signal(7): a blocked signal that the kernel forces is not
//! held back).
#![expect(
    unsafe_code,
    reason = "a signal handler receives a pointer, writes without the library, and calls the kernel by number"
)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};

use vmm_sys_util::signal::register_signal_handler;

use super::{SandboxError, ThreadKind, call};

thread_local! {
    /// Constant at first and without a destructor: reading it in a handler allocates nothing and locks nothing.
    static KIND: Cell<ThreadKind> = const { Cell::new(ThreadKind::Process) };
}

/// Names of calls that an exploit makes first, or that a list may lack; for other calls the line has
/// only the number.
const NAMES: &[(libc::c_long, &str)] = &[
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_bind, "bind"),
    (libc::SYS_bpf, "bpf"),
    (libc::SYS_capset, "capset"),
    (libc::SYS_chmod, "chmod"),
    (libc::SYS_chroot, "chroot"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_dup, "dup"),
    (libc::SYS_dup2, "dup2"),
    (libc::SYS_dup3, "dup3"),
    (libc::SYS_execve, "execve"),
    (libc::SYS_execveat, "execveat"),
    (libc::SYS_fallocate, "fallocate"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_fork, "fork"),
    (libc::SYS_ftruncate, "ftruncate"),
    (libc::SYS_get_mempolicy, "get_mempolicy"),
    (libc::SYS_getdents64, "getdents64"),
    (libc::SYS_init_module, "init_module"),
    (libc::SYS_io_uring_setup, "io_uring_setup"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_kill, "kill"),
    (libc::SYS_listen, "listen"),
    (libc::SYS_mbind, "mbind"),
    (libc::SYS_memfd_create, "memfd_create"),
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_mount, "mount"),
    (libc::SYS_move_pages, "move_pages"),
    (libc::SYS_mprotect, "mprotect"),
    (libc::SYS_open, "open"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_openat2, "openat2"),
    (libc::SYS_perf_event_open, "perf_event_open"),
    (libc::SYS_personality, "personality"),
    (libc::SYS_pidfd_open, "pidfd_open"),
    (libc::SYS_pipe2, "pipe2"),
    (libc::SYS_pkey_mprotect, "pkey_mprotect"),
    (libc::SYS_prctl, "prctl"),
    (libc::SYS_process_vm_readv, "process_vm_readv"),
    (libc::SYS_process_vm_writev, "process_vm_writev"),
    (libc::SYS_ptrace, "ptrace"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_rt_sigaction, "rt_sigaction"),
    (libc::SYS_sched_setaffinity, "sched_setaffinity"),
    (libc::SYS_seccomp, "seccomp"),
    (libc::SYS_set_mempolicy, "set_mempolicy"),
    (libc::SYS_setns, "setns"),
    (libc::SYS_setpriority, "setpriority"),
    (libc::SYS_setuid, "setuid"),
    (libc::SYS_socket, "socket"),
    (libc::SYS_socketpair, "socketpair"),
    (libc::SYS_tgkill, "tgkill"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unshare, "unshare"),
    (libc::SYS_userfaultfd, "userfaultfd"),
    (libc::SYS_vfork, "vfork"),
];

/// Longest end of a path in the line.
const PATH_SHOWN_MAX: usize = 60;

/// Installs the handler of the signal.
pub(super) fn say_what_was_called() -> Result<(), SandboxError> {
    // All other signals wait while the handler runs: nothing comes between the line and the end.
    register_signal_handler(libc::SIGSYS, on_forbidden_call)
        .map_err(|errno| call("handle SIGSYS")(std::io::Error::from_raw_os_error(errno.errno())))
}

/// Sets the name of the calling thread in the line.
pub(super) fn name_this_thread(kind: ThreadKind) {
    KIND.set(kind);
}

/// The part `_sigsys` of `siginfo_t` (asm-generic/siginfo.h): behind three numbers and their padding are the
/// address of the instruction, the call, and the architecture.
#[repr(C)]
struct SigsysInfo {
    _signo_errno_code: [c_int; 4],
    _address: u64,
    number: c_int,
    _arch: u32,
}

extern "C" fn on_forbidden_call(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler that is set with SA_SIGINFO a valid siginfo_t, which for SIGSYS has this
    // shape and is larger; no other code refers to it.
    let number = unsafe { (*info.cast::<SigsysInfo>()).number };
    let mut line = Line::default();
    line.add("wideleaf: the sandbox ends the guest: ");
    line.add(KIND.try_with(Cell::get).unwrap_or(ThreadKind::Process).name());
    line.add(" made the system call ");
    let name = NAMES.iter().find(|(of, _)| *of == libc::c_long::from(number));
    line.add(name.map_or("", |(_, name)| name));
    line.add(if name.is_some() { " (" } else { "" });
    line.add_number(number.unsigned_abs());
    line.add(if name.is_some() { ")" } else { "" });
    if libc::c_long::from(number) == libc::SYS_openat {
        line.add(" of ");
        // SAFETY: the kernel gives the handler the thread's registers, which no other code refers to.
        let path = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RSI as usize] };
        // SAFETY: the second argument of openat(2) is the address of a path that ends with a zero byte. A thread that
        // gives another address dies of reading it, without the line.
        line.add_path(unsafe { CStr::from_ptr(path as *const c_char) });
    }
    line.add(" that its filter forbids; report it if the guest is trusted; --no-sandbox runs it unrestricted\n");
    if takes_a_line(libc::STDERR_FILENO) {
        // SAFETY: the bytes are on this stack and as many as said. What is written, and whether, makes no difference
        // to what follows.
        unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length) };
    }
    // SIGSYS is blocked while its handler runs, so that this forbidden call is the end.
    // SAFETY: a call without arguments that no list has; it is never made.
    unsafe { libc::syscall(libc::SYS_vhangup) };
    // If no filter is active, another process sent the signal: it ends the process like any other.
    // SAFETY: ends the process, running nothing of it.
    unsafe { libc::_exit(128 + libc::SIGSYS) };
}

/// Whether a line can be written to `file` without waiting for a reader: the process must end, read or not.
fn takes_a_line(file: c_int) -> bool {
    let mut files = [libc::pollfd { fd: file, events: libc::POLLOUT, revents: 0 }];
    // SAFETY: one entry, on this stack, as many as said; the call is safe in a handler (signal-safety(7)) and in every
    // thread's list.
    unsafe { libc::poll(files.as_mut_ptr(), 1, 0) > 0 }
}

/// A line of bounded length, on the stack. Bytes that do not fit are cut off.
struct Line {
    bytes: [u8; 320],
    length: usize,
}

impl Default for Line {
    fn default() -> Line {
        Line { bytes: [0; 320], length: 0 }
    }
}

impl Line {
    fn add(&mut self, text: &str) {
        for (place, byte) in self.bytes[self.length..].iter_mut().zip(text.bytes()) {
            *place = byte;
            self.length += 1;
        }
    }

    /// The last bytes of a path, with a `?` for each that is not a printable character of ASCII.
    fn add_path(&mut self, path: &CStr) {
        let bytes = path.to_bytes();
        let shown = &bytes[bytes.len().saturating_sub(PATH_SHOWN_MAX)..];
        self.add(if shown.len() < bytes.len() { "..." } else { "" });
        for byte in shown {
            let printable = if byte.is_ascii_graphic() { *byte } else { b'?' };
            self.add(std::str::from_utf8(&[printable]).unwrap_or_default());
        }
    }

    fn add_number(&mut self, number: u32) {
        let mut digits = [0; 10];
        let mut left = number;
        let mut first = digits.len();
        while first == digits.len() || left > 0 {
            first -= 1;
            digits[first] = b'0' + (left % 10) as u8;
            left /= 10;
        }
        self.add(std::str::from_utf8(&digits[first..]).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    fn line(number: u32) -> String {
        let mut line = Line::default();
        line.add("call ");
        line.add_number(number);
        String::from_utf8(line.bytes[..line.length].to_vec()).unwrap()
    }

    #[test]
    fn a_number_is_written_with_all_its_digits() {
        assert_eq!([line(0), line(59), line(u32::MAX)], ["call 0", "call 59", "call 4294967295"]);
    }

    #[test]
    fn a_path_is_shown_by_its_end_and_only_as_printable_characters() {
        let shown = |path: &CStr| {
            let mut line = Line::default();
            line.add_path(path);
            String::from_utf8(line.bytes[..line.length].to_vec()).unwrap()
        };
        assert_eq!(shown(c"/proc/sys/vm/overcommit_memory"), "/proc/sys/vm/overcommit_memory");
        assert_eq!(shown(c"/a b\x1b[2J\xff"), "/a?b?[2J?");
        let long = CString::new(format!("/{}/end", "x".repeat(200))).unwrap();
        assert_eq!(shown(&long), format!("...{}/end", "x".repeat(PATH_SHOWN_MAX - 4)));
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_off() {
        let mut line = Line::default();
        (0..100).for_each(|_| line.add("words "));
        assert_eq!(line.length, line.bytes.len());
    }

    #[test]
    fn the_call_number_is_at_the_kernels_offset() {
        // asm-generic/siginfo.h on 64 bits: the union begins at 16, and _syscall is behind an address.
        assert_eq!(std::mem::offset_of!(SigsysInfo, number), 24);
        assert!(size_of::<SigsysInfo>() <= size_of::<libc::siginfo_t>());
    }
}
