//! The sandbox of a VM's process: once the guest runs, the process can do what a guest's life takes, and nothing else.
//!
//! ```text
//!   plan ─────────▶ enter_process ──────────────────────────────────▶ enter_thread(kind), in each thread
//!   filters made    jail, user, capabilities, no new privileges,      a narrower filter on top: a thread may what
//!   files opened    Landlock, the filter of all threads               its work takes
//!   nothing done    one thread is there; all later ones inherit it
//! ```
//!
//! | layer | what it takes away | file |
//! |---|---|---|
//! | jail | every file, mount, network interface, IPC object that it was not given | [`jail`] |
//! | user | root's identity | [`user`] |
//! | capabilities | all of them, or all but those named in [`Entered`]; new privileges by `execve` | [`capabilities`] |
//! | files | every file but those that the manager reads and the report's folder; TCP; signals to others | [`files`] |
//! | calls | every system call, and every argument, that is not in the thread's list | [`calls`], [`seccomp`] |
//!
//! A call that is not in the list ends the process ([`violation`] says in one line which). All of it is irreversible: there is no
//! way out of a filter, a Landlock domain or a dropped capability. `THREATS.md` says what each layer is against, and what none is.

use std::path::PathBuf;

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

use crate::sys::allocator::use_one_arena;

/// What a sandbox is to leave, beside a guest's life.
#[derive(Clone, Debug, Default)]
pub struct SandboxConfig {
    /// Folders in which files may be made, written and renamed: the report's.
    pub writable: Vec<PathBuf>,
    /// The socket of a daemon that is told of the guest; without one no socket can be made at all.
    pub daemon: Option<PathBuf>,
    /// Which devices need more than files and sockets that are open.
    pub devices: DeviceNeeds,
    /// Whether somebody may connect to a socket of the VM's own.
    pub has_control_socket: bool,
    /// Whether a reset of the machine is not the end: what was set before the guest ran is set again.
    pub boots_again: bool,
    /// Whether the guest has this terminal, whose settings are to be as before at the end.
    pub has_console: bool,
    /// Userfaultfds are opened by their system call, which takes this capability where the host does not permit it to everybody.
    /// Not needed where their device is kept open ([`wideleaf_memory::sandboxed::keep_userfaultfd`]).
    pub keeps_ptrace: bool,
    /// Whom to become.
    pub user: Option<User>,
    /// An empty folder that becomes the root of all the process sees.
    pub jail: Option<PathBuf>,
    /// Whether a kernel that cannot restrict all of it is an error ([`SandboxError::Incomplete`]) instead of a line
    /// of the report.
    pub must_be_complete: bool,
}

/// What the threads of devices do beside reading and writing what is open.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceNeeds {
    /// The guest's connections go to sockets of the host.
    pub connects: bool,
    /// What the guest gives back is looked at and released.
    pub gives_back: bool,
}

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Threads that are there already would stay outside.
    #[error(
        "the process has {0} threads when it enters its sandbox, and only the one that enters is inside: start the others afterwards"
    )]
    NotAlone(usize),
    /// A filter that does not compile.
    #[error("the list of system calls of {kind} is no filter: {source}")]
    Filter {
        /// Whose.
        kind: ThreadKind,
        /// Why not.
        source: seccompiler::BackendError,
    },
    /// The kernel refuses a filter.
    #[error("the kernel takes no filter of system calls: {0}")]
    Seccomp(#[from] seccompiler::Error),
    /// The kernel refuses a set of files.
    #[error("the kernel takes no Landlock rules: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// Capabilities stay.
    #[error("cannot drop capabilities: {0}")]
    Capabilities(#[from] caps::errors::CapsError),
    /// A call on the way in failed.
    #[error("{what}: {source}")]
    Call {
        /// What was to be done, and with what.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Who can not be become.
    #[error(transparent)]
    User(#[from] user::UserError),
    /// Where nobody can be jailed.
    #[error(transparent)]
    Jail(#[from] jail::JailError),
    /// The kernel lacks a part, and the sandbox had to be complete.
    #[error("cannot restrict the guest's process wholly: {0}; use a newer kernel, or do without --require-sandbox")]
    Incomplete(String),
}

/// A sandbox that can be entered.
#[derive(Debug)]
pub struct Sandbox {
    config: SandboxConfig,
    filters: Filters,
    files: Files,
}

/// What a process that is inside has and has not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entered {
    /// Capabilities that are left, each with its reason.
    pub kept: Vec<(Capability, &'static str)>,
    /// What is not restricted because the kernel can not, and why.
    pub missing: Vec<String>,
    /// The layers, in words.
    pub layers: Vec<String>,
}

impl Sandbox {
    /// Compiles the filters and opens the files. Nothing is restricted yet, but that threads to come allocate from the same arena as this one
    /// ([`use_one_arena`]): for a process that has none yet.
    ///
    /// # Errors
    /// [`SandboxError`] where the sandbox that is asked for can not be had here.
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

    /// Restricts the calling thread, which has to be the only one, and all that it starts from now on.
    ///
    /// # Errors
    /// [`SandboxError`]; the process may be restricted in part then, and has to end.
    pub fn enter_process(&self) -> Result<Entered, SandboxError> {
        alone()?;
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
        layers.push("system calls by kind of thread".into());
        Ok(Entered { kept, missing, layers })
    }

    /// Restricts the calling thread further, to what its work takes, and whatever threads it starts. After
    /// [`Sandbox::enter_process`].
    ///
    /// # Errors
    /// [`SandboxError`]; the thread may do no more of its work then.
    pub fn enter_thread(&self, kind: ThreadKind) -> Result<(), SandboxError> {
        violation::name_this_thread(kind);
        self.filters.enter_thread(kind)
    }
}

fn complete(must_be: bool, missing: &[String]) -> Result<(), SandboxError> {
    if must_be && !missing.is_empty() { Err(SandboxError::Incomplete(missing.join("; "))) } else { Ok(()) }
}

/// A thread that is there already would not be restricted: capabilities and Landlock are of threads.
fn alone() -> Result<(), SandboxError> {
    let threads = std::fs::read_dir("/proc/self/task");
    let threads = threads.map_err(call("count the threads of this process in /proc/self/task"))?.count();
    if threads == 1 { Ok(()) } else { Err(SandboxError::NotAlone(threads)) }
}

/// The guest's memory does not end up in a file on the host, whatever ends the process.
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
    fn what_the_kernel_lacks_is_an_error_only_where_the_sandbox_must_be_complete() {
        let missing = ["files are not restricted".to_owned()];
        assert!(complete(false, &missing).is_ok() && complete(true, &[]).is_ok());
        let refused = complete(true, &missing).expect_err("a part is missing").to_string();
        assert!(refused.contains("files are not restricted; use a newer kernel"), "{refused}");
    }
}
