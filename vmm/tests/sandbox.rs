//! The sandbox refuses forbidden actions: each is tried in its own process, from each kind of thread.
//!
//! ```text
//!   test ─▶ this same program again, told what to try and as which thread ─▶ the sandbox, then the attempt
//!     ▲                                                                        │
//!     └── killed by SIGSYS and one line that names the call, or refused with EACCES, or a line that it succeeded
//! ```
//!
//! The file is a program without the usual test harness: that runs tests in threads, and only a process with a
//! single thread can enter a sandbox. Names select tests as usual; without a name all run.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the attempts make calls that no safe function makes")]

#[path = "it/tiny.rs"]
mod tiny;

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::time::Duration;

use wideleaf_vmm::sandbox::{Sandbox, SandboxConfig, SandboxError, ThreadKind, before_first_thread};

/// Environment variable of a child: its attempt and the kind of its thread, as `NAME KIND`.
const ATTEMPT: &str = "WIDELEAF_SANDBOX_ATTEMPT";
/// Output of a child after an attempt that succeeded.
const SUCCEEDED: &str = "succeeded";
/// Output of a child after an attempt that the kernel refused; the child lives on.
const REFUSED: &str = "refused";

/// Kinds of threads in a run; all except the process itself, which starts them.
fn threads() -> impl Iterator<Item = ThreadKind> {
    ThreadKind::ALL.into_iter().filter(|kind| *kind != ThreadKind::Process)
}

/// The expected end of an attempt.
#[derive(Clone, Copy, PartialEq)]
enum ExpectedEnd {
    /// The process dies, and the line names this call.
    Killed(&'static str),
    /// The call answers with an error.
    Refused,
    /// The call is part of that thread's work.
    Works,
}

use ExpectedEnd::{Killed, Refused, Works};

/// An attempt: its name, the attempt itself (true if it worked), and its end for a kind of thread.
type Attempt = (&'static str, fn() -> bool, fn(ThreadKind) -> ExpectedEnd);

fn is_ok(answer: libc::c_long) -> bool {
    answer >= 0
}

fn raw(call: libc::c_long, arguments: [libc::c_long; 6]) -> bool {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: every call below is given numbers, null pointers, or literals that live for ever.
    is_ok(unsafe { libc::syscall(call, a, b, c, d, e, f) })
}

fn map(protection: libc::c_int) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(null_mut(), 4096, protection, flags, -1, 0) };
    address != libc::MAP_FAILED
}

fn make_executable() -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: as above.
    let address = unsafe { libc::mmap(null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    // SAFETY: the page is ours, and nothing is in it.
    unsafe { libc::mprotect(address, 4096, libc::PROT_READ | libc::PROT_EXEC) == 0 }
}

/// Frees this much memory in small pieces, which are not mappings of their own, so that a heap shrinks.
fn free_much_memory() -> bool {
    let pieces: Vec<_> = (0..64).map(|_| vec![1_u8; 64 << 10]).collect();
    pieces.iter().all(|piece| piece[0] == 1)
}

fn opens(path: &str) -> bool {
    fs::File::open(path).is_ok()
}

/// Locks standard input, an open file.
fn lock_a_file() -> bool {
    let kind = (libc::F_RDLCK as _, libc::SEEK_SET as _);
    let lock = libc::flock { l_type: kind.0, l_whence: kind.1, l_start: 0, l_len: 0, l_pid: 0 };
    let lock = libc::c_long::try_from(std::ptr::from_ref(&lock).addr()).unwrap();
    raw(libc::SYS_fcntl, [0, libc::F_OFD_SETLK.into(), lock, 0, 0, 0])
}

const FORBIDDEN: &[Attempt] = &[
    (
        "run_another_program",
        || raw(libc::SYS_execve, [c"/bin/true".as_ptr() as _, 0, 0, 0, 0, 0]),
        |_| Killed("execve"),
    ),
    ("become_another_process", || raw(libc::SYS_fork, [0; 6]), |_| Killed("fork")),
    ("start_a_process_by_clone", || raw(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0, 0, 0, 0]), |_| Killed("clone")),
    (
        "start_a_process_by_clone3",
        || raw(libc::SYS_clone3, [null::<u8>() as _, 0, 0, 0, 0, 0]),
        |kind| if matches!(kind, ThreadKind::Manager | ThreadKind::Save) { Refused } else { Killed("435") },
    ),
    ("trace_a_process", || raw(libc::SYS_ptrace, [libc::PTRACE_ATTACH.into(), 1, 0, 0, 0, 0]), |_| Killed("ptrace")),
    ("read_another_process", || raw(libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]), |_| Killed("process_vm_readv")),
    ("signal_another_process", || raw(libc::SYS_kill, [1, 0, 0, 0, 0, 0]), |_| Killed("kill")),
    ("signal_a_thread_of_another_process", || raw(libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]), |_| Killed("tgkill")),
    (
        "make_a_socket_of_the_internet",
        || raw(libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0, 0, 0, 0]),
        |_| Killed("socket"),
    ),
    (
        "make_a_socket_of_this_host",
        || UnixStream::connect("/no-listener").is_err_and(|error| error.kind() == ErrorKind::NotFound),
        |kind| if kind == ThreadKind::Status { Works } else { Killed("socket") },
    ),
    ("map_code", || map(libc::PROT_READ | libc::PROT_EXEC), |_| Killed("mmap")),
    ("make_data_executable", make_executable, |_| Killed("mprotect")),
    ("make_a_namespace", || raw(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0, 0, 0]), |_| Killed("unshare")),
    ("mount", || raw(libc::SYS_mount, [0; 6]), |_| Killed("mount")),
    (
        "set_a_memory_policy",
        // Of no bytes: the kernel has nothing to change.
        || raw(libc::SYS_mbind, [0; 6]),
        |kind| if matches!(kind, ThreadKind::Manager | ThreadKind::Faults) { Works } else { Killed("mbind") },
    ),
    (
        "bind_itself_to_no_cpu",
        || raw(libc::SYS_sched_setaffinity, [0; 6]),
        |kind| if kind == ThreadKind::Vcpu { Refused } else { Killed("sched_setaffinity") },
    ),
    ("bind_another_thread", || raw(libc::SYS_sched_setaffinity, [1, 0, 0, 0, 0, 0]), |_| Killed("sched_setaffinity")),
    (
        "let_other_threads_run_first",
        || raw(libc::SYS_setpriority, [libc::PRIO_PROCESS.into(), 0, 19, 0, 0, 0]),
        |kind| if kind == ThreadKind::Manager { Works } else { Killed("setpriority") },
    ),
    (
        "change_the_priority_of_another_thread",
        || raw(libc::SYS_setpriority, [libc::PRIO_PROCESS.into(), 1, 19, 0, 0, 0]),
        |_| Killed("setpriority"),
    ),
    (
        "change_the_priority_of_a_user",
        || raw(libc::SYS_setpriority, [libc::PRIO_USER.into(), 0, 19, 0, 0, 0]),
        |_| Killed("setpriority"),
    ),
    (
        "ask_for_the_node_of_its_own_memory",
        || raw(libc::SYS_move_pages, [0; 6]),
        |kind| if matches!(kind, ThreadKind::Manager | ThreadKind::Faults) { Works } else { Killed("move_pages") },
    ),
    (
        "ask_for_the_nodes_of_another_process",
        || raw(libc::SYS_move_pages, [1, 0, 0, 0, 0, 0]),
        |_| Killed("move_pages"),
    ),
    ("change_the_user", || raw(libc::SYS_setuid, [0; 6]), |_| Killed("setuid")),
    (
        "handle_a_signal_anew",
        || raw(libc::SYS_rt_sigaction, [libc::SIGSYS.into(), 0, 0, 8, 0, 0]),
        |_| Killed("rt_sigaction"),
    ),
    ("submit_calls_through_a_ring", || raw(libc::SYS_io_uring_setup, [1, 0, 0, 0, 0, 0]), |_| Killed("io_uring_setup")),
    ("load_a_program_into_the_kernel", || raw(libc::SYS_bpf, [0; 6]), |_| Killed("bpf")),
    ("watch_the_kernel", || raw(libc::SYS_perf_event_open, [0, 0, -1, -1, 0, 0]), |_| Killed("perf_event_open")),
    (
        "type_into_a_terminal",
        || raw(libc::SYS_ioctl, [0, libc::TIOCSTI as _, c"x".as_ptr() as _, 0, 0, 0]),
        |_| Killed("ioctl"),
    ),
    (
        "make_a_virtual_machine",
        // KVM_CREATE_VM.
        || raw(libc::SYS_ioctl, [0, 0xae01, 0, 0, 0, 0]),
        |_| Killed("ioctl"),
    ),
    (
        "run_a_vcpu",
        // KVM_RUN on standard input, which is not a vCPU: only the permission of the request matters.
        || raw(libc::SYS_ioctl, [0, 0xae80, 0, 0, 0, 0]),
        |kind| if kind == ThreadKind::Vcpu { Refused } else { Killed("ioctl") },
    ),
    (
        "open_a_file_of_the_host",
        || opens("/etc/passwd"),
        |kind| if matches!(kind, ThreadKind::Io | ThreadKind::Console) { Killed("openat") } else { Refused },
    ),
    (
        "open_the_memory_of_another_process",
        || opens("/proc/1/mem") || opens("/proc/1/environ"),
        |kind| if matches!(kind, ThreadKind::Io | ThreadKind::Console) { Killed("openat") } else { Refused },
    ),
    (
        "make_a_file",
        || fs::File::create("/tmp/wideleaf-sandbox-made").is_ok(),
        |kind| match kind {
            ThreadKind::Main | ThreadKind::Process => Refused,
            _ => Killed("openat"),
        },
    ),
    (
        "change_a_setting_of_the_host",
        || fs::OpenOptions::new().write(true).open("/sys/kernel/mm/transparent_hugepage/enabled").is_ok(),
        |kind| match kind {
            ThreadKind::Main | ThreadKind::Process => Refused,
            _ => Killed("openat"),
        },
    ),
    ("lock_a_file", lock_a_file, |kind| {
        if matches!(kind, ThreadKind::Save | ThreadKind::Control) { Works } else { Killed("fcntl") }
    }),
    (
        "shorten_a_file",
        // No file, so that none is shortened.
        || raw(libc::SYS_ftruncate, [-1, 0, 0, 0, 0, 0]),
        |kind| if matches!(kind, ThreadKind::Manager | ThreadKind::Save) { Refused } else { Killed("ftruncate") },
    ),
    ("free_much_memory", free_much_memory, |_| Works),
    ("take_random_bytes", || wideleaf_vmm::sys::random::fill(&mut [0; 5000]).is_ok(), |_| Works),
    (
        "read_what_the_manager_reads",
        || {
            let mut files = ["/proc/self/smaps", "/proc/meminfo", "/proc/vmstat"].into_iter();
            files.all(opens) && opens("/sys/kernel/mm/transparent_hugepage/enabled")
        },
        |kind| if matches!(kind, ThreadKind::Io | ThreadKind::Console) { Killed("openat") } else { Works },
    ),
];

fn config() -> SandboxConfig {
    SandboxConfig {
        daemon: Some("/no-listener".into()),
        has_control_socket: true,
        has_console: true,
        has_nodes: true,
        binds_vcpus: true,
        ..SandboxConfig::default()
    }
}

/// Value of [`ATTEMPT`] for a child that only prints its remaining rights.
const KEPT: &str = "kept";

/// Value of [`ATTEMPT`] for a child that takes the state of a VM in the sandbox.
const SAVED: &str = "saved";

/// Takes the state of a VM in the sandbox, in a thread like that of the control socket.
fn save_a_vm() {
    use std::sync::Arc;
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::{Bytes, PageSize, units::mib};
    use wideleaf_vmm::boot::BootImage;
    use wideleaf_vmm::devices::virtio::balloon::Balloon;
    use wideleaf_vmm::devices::virtio::block::{Block, DiskImage, DiskLocks, DiskOptions};
    use wideleaf_vmm::devices::{SerialOutput, SerialSink};
    use wideleaf_vmm::{Hardware, HostLimits, ImageSource, Machine, VmConfig, VmOptions};

    before_first_thread();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let path = file.path().to_owned();
    let disk = Block::new(DiskImage::open(&DiskOptions { path, is_read_only: false, id: None }).unwrap());
    let locks = DiskLocks::of([disk.image()]);
    // The sandbox does not let it remove the file later.
    file.close().unwrap();
    let balloon = Balloon::new(mib(16), Bytes::ZERO).unwrap();
    // jmp $, with interrupt controllers.
    let image = ImageSource::Bytes(tiny::image(&[0xeb, 0xfe]).into());
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let mut options = VmOptions { memory: mib(16), vcpus: 2, ..VmOptions::new(image, backing) };
    options.entry = wideleaf_vmm::config::EntryChoice::Pvh;
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
    let sandbox = Arc::new(Sandbox::plan(self::config()).unwrap());
    let sink: SerialSink = Box::new(|_| {});
    let output = SerialOutput::from(sink);
    let hardware =
        Hardware { ram, output, devices: vec![Box::new(disk), Box::new(balloon)], sandbox: Some(sandbox.clone()) };
    let machine = Machine::start_image(&config, &BootImage::read(&config).unwrap(), hardware).unwrap();
    let state = std::thread::scope(|scope| {
        let save = || {
            sandbox.enter_thread(ThreadKind::Save).unwrap();
            assert!(machine.saver().flush_disks(Duration::from_secs(60), &|| true).unwrap());
            machine.second_level().pause().unwrap();
            let state = machine.save_state();
            // Another run was to have it, and has not.
            locks.give_up().unwrap();
            locks.take().unwrap();
            machine.second_level().resume().unwrap();
            state.map_err(|error| error.to_string())
        };
        scope.spawn(save).join().unwrap()
    });
    machine.stop();
    let state = state.unwrap();
    assert_eq!((state.vcpus.len(), state.devices.len(), state.interrupts.is_some()), (2, 2, true));
    std::io::stdout().write_all(SUCCEEDED.as_bytes()).unwrap();
}

fn the_thread_of_the_control_socket_takes_the_state_of_a_vm() {
    if !tiny::has_kvm() {
        return;
    }
    let (signal, out, err) = run_child(SAVED);
    assert_eq!((signal, out.as_str()), (None, SUCCEEDED), "{err}");
}

/// Values of [`ATTEMPT`] for a child in which a thread has allocated memory and ended, with and without preparation.
const PREPARED: &str = "prepared";
const UNPREPARED: &str = "unprepared";

/// Value of [`ATTEMPT`] for a child of which another thread ends while it enters the sandbox.
const LEFT: &str = "left by a thread";

/// The child, with a second thread that has not ended yet.
fn while_a_thread_ends() {
    before_first_thread();
    std::thread::spawn(|| std::thread::sleep(Duration::from_millis(200)));
    child("free_much_memory Main");
}

/// The child with an earlier thread: a prepared one then frees much memory in the kind of thread that may open no file.
fn after_an_earlier_thread(is_prepared: bool) {
    if is_prepared {
        before_first_thread();
    }
    assert_eq!(std::thread::spawn(|| vec![1_u8; 64]).join().unwrap().len(), 64);
    if is_prepared {
        return child("free_much_memory Io");
    }
    println!("{}", Sandbox::plan(config()).unwrap().enter_process().unwrap_err());
}

/// The child: enters the sandbox, and makes the attempt.
fn child(said: &str) {
    if let PREPARED | UNPREPARED = said {
        return after_an_earlier_thread(said == PREPARED);
    }
    if said == LEFT {
        return while_a_thread_ends();
    }
    if said == SAVED {
        return save_a_vm();
    }
    if said == KEPT {
        let sandbox = Sandbox::plan(SandboxConfig { keeps_ptrace: true, ..config() }).unwrap();
        let entered = sandbox.enter_process().unwrap();
        return println!("{:?} {}", entered.kept, entered.layers.join(", "));
    }
    let (name, kind) = said.split_once(' ').unwrap();
    let (_, attempt, _) = FORBIDDEN.iter().find(|(of, ..)| *of == name).unwrap();
    let kind = threads().find(|of| format!("{of:?}") == kind).unwrap();
    let sandbox = Sandbox::plan(config()).unwrap();
    sandbox.enter_process().unwrap();
    let attempt = || {
        sandbox.enter_thread(kind).unwrap();
        let answer = if attempt() { SUCCEEDED } else { REFUSED };
        std::io::stdout().write_all(answer.as_bytes()).unwrap();
    };
    // As in a run, the main thread is the only one that is not started.
    match kind {
        ThreadKind::Main => attempt(),
        _ => std::thread::scope(|scope| scope.spawn(attempt).join().unwrap()),
    }
}

/// The result of an attempt: the signal, its standard output and its standard error.
fn tried(name: &str, kind: ThreadKind) -> (Option<i32>, String, String) {
    run_child(&format!("{name} {kind:?}"))
}

fn run_child(said: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ATTEMPT, said).env("RUST_BACKTRACE", "0");
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (child.wait().unwrap().signal(), out, err)
}

fn each_kind_of_thread_is_stopped() {
    for (name, _, ends) in FORBIDDEN {
        for kind in threads() {
            let (signal, out, err) = tried(name, kind);
            match ends(kind) {
                Killed(call) => {
                    assert_eq!((signal, out.as_str()), (Some(libc::SIGSYS), ""), "{name} as {kind}: {err}");
                    let words = format!("wideleaf: the sandbox ends the guest: {kind} made the system call {call} ");
                    assert!(err.starts_with(&words) && err.lines().count() == 1, "{name} as {kind}: {err:?}");
                }
                Refused => assert_eq!((signal, out.as_str(), err.as_str()), (None, REFUSED, ""), "{name} as {kind}"),
                Works => assert_eq!((signal, out.as_str(), err.as_str()), (None, SUCCEEDED, ""), "{name} as {kind}"),
            }
        }
    }
    assert!(!Path::new("/tmp/wideleaf-sandbox-made").exists());
}

/// Checks that only the sandbox causes the refusals.
fn without_a_sandbox_the_same_things_are_not_stopped() {
    let harmless =
        ["map_code", "make_data_executable", "make_a_socket_of_the_internet", "open_a_file_of_the_host", "make_a_file"];
    for (name, attempt, _) in FORBIDDEN.iter().filter(|(name, ..)| harmless.contains(name)) {
        assert!(attempt(), "{name}");
    }
    fs::remove_file("/tmp/wideleaf-sandbox-made").unwrap();
}

fn a_process_with_a_second_thread_does_not_enter() {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || ended.recv());
    let refused = Sandbox::plan(config()).unwrap().enter_process();
    assert!(matches!(refused, Err(SandboxError::NotAlone(2))), "{refused:?}");
    drop(end);
    assert!(other.join().unwrap().is_err());
}

/// The kernel lists a thread for a short time after others have joined it.
fn a_process_enters_as_soon_as_its_other_threads_have_ended() {
    assert_eq!(run_child(LEFT), (None, SUCCEEDED.to_owned(), String::new()));
}

/// An arena outlives its thread. A thread that took it over would open a file to shrink it, and die by its filter.
fn a_process_with_an_earlier_threads_arena_does_not_enter_and_a_prepared_one_has_none() {
    let (signal, out, err) = run_child(UNPREPARED);
    assert_eq!((signal, err.as_str()), (None, ""));
    assert!(out.starts_with("an earlier thread left an arena of the allocator, one of 2: call sandbox::"), "{out}");
    assert_eq!(run_child(PREPARED), (None, SUCCEEDED.to_owned(), String::new()), "as a device's thread");
}

fn a_capability_that_is_kept_is_named_with_its_reason() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: only root has a capability to keep: run the test as root");
    }
    let (signal, out, err) = run_child(KEPT);
    assert_eq!((signal, err.as_str()), (None, ""));
    assert!(out.starts_with("[(CAP_SYS_PTRACE, \"userfaultfd(2) is opened"), "{out}");
    assert!(out.contains("no capabilities but CAP_SYS_PTRACE"), "{out}");
}

/// A test: its name and its function.
type Claim = (&'static str, fn());

const CLAIMS: &[Claim] = &[
    ("each_kind_of_thread_is_stopped", each_kind_of_thread_is_stopped),
    ("without_a_sandbox_the_same_things_are_not_stopped", without_a_sandbox_the_same_things_are_not_stopped),
    (
        "a_process_with_an_earlier_threads_arena_does_not_enter_and_a_prepared_one_has_none",
        a_process_with_an_earlier_threads_arena_does_not_enter_and_a_prepared_one_has_none,
    ),
    ("a_capability_that_is_kept_is_named_with_its_reason", a_capability_that_is_kept_is_named_with_its_reason),
    (
        "the_thread_of_the_control_socket_takes_the_state_of_a_vm",
        the_thread_of_the_control_socket_takes_the_state_of_a_vm,
    ),
    ("a_process_with_a_second_thread_does_not_enter", a_process_with_a_second_thread_does_not_enter),
    (
        "a_process_enters_as_soon_as_its_other_threads_have_ended",
        a_process_enters_as_soon_as_its_other_threads_have_ended,
    ),
];

fn main() {
    if let Ok(said) = std::env::var(ATTEMPT) {
        return child(&said);
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for (name, claim) in
        CLAIMS.iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|part| name.contains(part)))
    {
        claim();
        println!("test {name} ... ok");
    }
}
