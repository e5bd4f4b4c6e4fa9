//! The sandbox of a VM's process: once the guest runs, the process can only do what running the guest requires.
//!
//! ```text
//!   plan ─────────▶ enter_process ──────────────────────────────────▶ enter_thread(kind), in each thread
//!   filters made    jail, user, capabilities, no new privileges,      a narrower filter on top: a thread may what
//!   files opened    Landlock, the filter of all threads               its work takes
//!   nothing done    one thread is there; all later ones inherit it
//! ```
//!
//! | layer | restricts | file |
//! |---|---|---|
//! | jail | files, mounts, network interfaces, IPC objects: only those that it was given | [`jail`] |
//! | user | root's identity is given up | [`user`] |
//! | capabilities | all, except those named in [`Entered`]; new privileges by `execve` | [`capabilities`] |
//! | files | files, except the manager's and the report's folder; TCP; signals to other processes | [`files`] |
//! | calls | every system call, and every argument, that is not in the thread's list | [`calls`], [`seccomp`] |
//!
//! A call that is not in the list ends the process ([`violation`] names it in one line). All restrictions are
//! irreversible: a process cannot leave a filter or a Landlock domain, or regain a dropped capability. `THREATS.md`
//! lists the threats that each layer covers, and those that none covers.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wideleaf_memory::allocator::{arenas, use_one_arena};

pub mod calls;
pub mod capabilities;
pub mod files;
pub mod jail;
pub mod probe;
pub mod seccomp;
pub mod user;
pub mod violation;

pub use calls::ThreadKind;
use capabilities::Capability;
use files::Files;
use seccomp::Filters;
pub use user::User;

/// Prepares the process for a sandbox. A program that starts a thread before it plans its sandbox calls this before
/// that thread: even a thread that has ended leaves an arena of the allocator, in which a later thread would open files
/// that its filter forbids ([`SandboxError::Arenas`]).
pub fn before_first_thread() {
    use_one_arena();
}

/// The rights that a sandbox must leave, beside those of every guest.
#[derive(Clone, Debug, Default)]
pub struct SandboxConfig {
    /// Folders in which files may be created, written and renamed: the report's.
    pub writable: Vec<PathBuf>,
    /// Socket of the daemon that receives the guest's status; `None` forbids all sockets.
    pub daemon: Option<PathBuf>,
    /// Devices that need more than open files and sockets.
    pub devices: DeviceNeeds,
    /// Whether clients may connect to the VM's own control socket.
    pub has_control_socket: bool,
    /// Whether a reset leads to another boot, which sets the initial state again.
    pub boots_again: bool,
    /// Whether the VM continues from a snapshot: each vCPU's thread then sets the guest's clock.
    pub continues: bool,
    /// Whether memory policies are set while the guest runs: on a machine with several NUMA nodes.
    pub has_nodes: bool,
    /// Whether threads of vCPUs are bound to CPUs.
    pub binds_vcpus: bool,
    /// Whether the guest uses this terminal: its settings are restored at the end.
    pub has_console: bool,
    /// Whether to keep the capability for the userfaultfd system call, which hosts without unprivileged userfaultfd
    /// require. Not needed where their device is kept open ([`wideleaf_memory::sandboxed::keep_userfaultfd`]).
    pub keeps_ptrace: bool,
    /// User to change to.
    pub user: Option<User>,
    /// Empty folder that becomes the root of everything that the process sees.
    pub jail: Option<PathBuf>,
    /// Whether a kernel that cannot apply every restriction is an error ([`SandboxError::Incomplete`]) instead of a
    /// line of the report.
    pub must_be_complete: bool,
}

/// Work of device threads beside reading and writing open files.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceNeeds {
    /// Whether the guest's connections go to sockets of the host.
    pub connects: bool,
    /// Whether memory that the guest gives back is examined and released.
    pub gives_back: bool,
}

/// The reasons why a sandbox cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Existing threads would stay outside.
    #[error(
        "the process already has {0} threads, and only the calling one would be restricted: start the others afterwards"
    )]
    NotAlone(usize),
    /// Threads that have ended left arenas of the allocator. A later thread would take one over, and die when the
    /// allocator opens a file to shrink it.
    #[error(
        "an earlier thread left an arena of the allocator, one of {0}: call sandbox::before_first_thread before the \
         process starts its first thread"
    )]
    Arenas(usize),
    /// A filter cannot be compiled.
    #[error("cannot compile the system call filter of {kind}: {source}")]
    Filter {
        /// Kind of the thread.
        kind: ThreadKind,
        /// Reason of the failure.
        source: seccompiler::BackendError,
    },
    /// The kernel refuses a filter of system calls.
    #[error("cannot install a filter of system calls: {0}")]
    Seccomp(#[from] seccompiler::Error),
    /// The kernel refuses a set of file rules.
    #[error("cannot install Landlock rules: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// Capabilities could not be dropped.
    #[error("cannot drop capabilities: {0}")]
    Capabilities(#[from] caps::errors::CapsError),
    /// A call on the way into the sandbox failed.
    #[error("{what}: {source}")]
    Call {
        /// Description of the call.
        what: String,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The process cannot change to the user.
    #[error(transparent)]
    User(#[from] user::UserError),
    /// The jail cannot be created.
    #[error(transparent)]
    Jail(#[from] jail::JailError),
    /// The kernel lacks a restriction, and the sandbox had to be complete.
    #[error("cannot restrict the guest's process completely: {0}; use a newer kernel, or leave --require-sandbox out")]
    Incomplete(String),
}

/// A sandbox that can be entered.
#[derive(Debug)]
pub struct Sandbox {
    config: SandboxConfig,
    filters: Filters,
    files: Files,
}

/// The remaining rights and the restrictions of a process in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entered {
    /// Capabilities that remain, each with its reason.
    pub kept: Vec<(Capability, &'static str)>,
    /// Restrictions that this kernel cannot apply, with the reason.
    pub missing: Vec<String>,
    /// Names of the active layers.
    pub layers: Vec<String>,
}

impl Sandbox {
    /// Compiles the filters and opens the files. Nothing is restricted yet, but later threads allocate from the
    /// same arena as this one. A process that has had other threads calls [`before_first_thread`] before them.
    ///
    /// # Errors
    /// [`SandboxError`] where the requested sandbox is not available here.
    pub fn plan(config: SandboxConfig) -> Result<Sandbox, SandboxError> {
        if let Some(jail) = &config.jail {
            jail::check(jail)?;
        }
        if let Some(user) = &config.user {
            user::check(user)?;
        }
        use_one_arena();
        let filters = Filters::compile(&config)?;
        let files = Files::open(&config);
        Ok(Sandbox { config, filters, files })
    }

    /// Restricts the calling thread, which must be the only one, and all threads that it starts from now on.
    ///
    /// # Errors
    /// [`SandboxError`]; the process may then be partly restricted, and has to end.
    pub fn enter_process(&self) -> Result<Entered, SandboxError> {
        alone()?;
        in_one_arena()?;
        violation::say_what_was_called()?;
        no_core()?;
        let mut layers = Vec::new();
        if let Some(jail) = &self.config.jail {
            jail::enter(jail, &self.config)?;
            layers.push(format!("jail {}", jail.display()));
        }
        let kept = capabilities::kept(&self.config);
        if let Some(user) = &self.config.user {
            user::become_user(user, !kept.is_empty())?;
            layers.push(format!("user {user}"));
        }
        layers.push(capabilities::drop_all_but(&kept)?);
        let (restricted, missing) = self.files.restrict()?;
        complete(self.config.must_be_complete, &missing)?;
        layers.extend(restricted);
        self.filters.enter_process()?;
        ENTERED.store(true, Ordering::Relaxed);
        layers.push("system calls by kind of thread".into());
        Ok(Entered { kept, missing, layers })
    }

    /// Restricts the calling thread further, to the calls of its work, and all threads that it starts.
    /// Called after [`Sandbox::enter_process`].
    ///
    /// # Errors
    /// [`SandboxError`]; then the thread must do none of its work.
    pub fn enter_thread(&self, kind: ThreadKind) -> Result<(), SandboxError> {
        violation::name_this_thread(kind);
        self.filters.enter_thread(kind)
    }
}

fn complete(must_be: bool, missing: &[String]) -> Result<(), SandboxError> {
    if must_be && !missing.is_empty() { Err(SandboxError::Incomplete(missing.join("; "))) } else { Ok(()) }
}

static ENTERED: AtomicBool = AtomicBool::new(false);

/// Whether this process has entered its sandbox. A panic hook must then name no functions of a backtrace: the standard
/// library opens the program's file for that, as the standard hook does with `RUST_BACKTRACE=1`.
pub fn is_entered() -> bool {
    ENTERED.load(Ordering::Relaxed)
}

/// Time in which a thread that has been joined must have left the process. Under load the kernel ends it late.
const LEAVES_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Checks for other threads: they would not be restricted, because capabilities and Landlock belong to threads.
///
/// A thread can be joined as soon as the kernel clears its ID (`CLONE_CHILD_CLEARTID`, clone(2)), and is listed until
/// the kernel has also ended it. So it may still be listed here, and this function waits for it.
fn alone() -> Result<(), SandboxError> {
    let threads = || std::fs::read_dir("/proc/self/task").map(Iterator::count);
    let count = || threads().map_err(call("count the threads of this process in /proc/self/task"));
    let began = Instant::now();
    loop {
        match count()? {
            1 => return Ok(()),
            others if began.elapsed() >= LEAVES_WITHIN => return Err(SandboxError::NotAlone(others)),
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Checks that all threads will allocate from one arena. A C library that does not tell the number of its arenas has
/// none per thread.
fn in_one_arena() -> Result<(), SandboxError> {
    match arenas() {
        Some(count) if count > 1 => Err(SandboxError::Arenas(count)),
        _ => Ok(()),
    }
}

/// Prevents the guest's memory from landing in a file on the host, whatever ends the process.
fn no_core() -> Result<(), SandboxError> {
    use nix::sys::resource::{Resource, setrlimit};
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(|errno| call("forbid core files")(errno.into()))
}

fn call(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> SandboxError {
    move |source| SandboxError::Call { what: format!("cannot {}", what.into()), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_restriction_is_an_error_only_where_the_sandbox_must_be_complete() {
        let missing = ["files are not restricted".to_owned()];
        assert!(complete(false, &missing).is_ok() && complete(true, &[]).is_ok());
        let refused = complete(true, &missing).expect_err("a part is missing").to_string();
        assert!(refused.contains("files are not restricted; use a newer kernel"), "{refused}");
    }
}
