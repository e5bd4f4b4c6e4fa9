//! Reasons why a guest cannot be managed, with their remedies.

use wideleaf_memory::deadline::NoAnswer;
use wideleaf_memory::host::HostError;
use wideleaf_memory::manager::ManagerError;

use crate::process::NEEDED_TO_ACT;

/// Reason why a guest cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The policy cannot manage this guest.
    #[error("{0}")]
    Policy(String),
    /// The guest has a manager of its own.
    #[error("process {0} is `wideleaf run`, which manages its guest itself: set the policy there")]
    ManagesItself(u32),
    /// Another process has attached it, or it is a VMM under another name that manages its guest itself.
    #[error(
        "process {0} has a manager already, its own or one that another process attached: leave it to that one, or \
         detach it there"
    )]
    HasManager(u32),
    /// Its memory cannot be read or advised.
    #[error("cannot manage process {pid}: {source} (needs {NEEDED_TO_ACT})")]
    Host {
        /// Id of the process.
        pid: u32,
        /// Error from the kernel.
        source: HostError,
    },
    /// What backs its memory cannot be seen, as before Linux 6.7 (`PAGEMAP_SCAN`): all of it would seem absent.
    #[error("cannot see what backs the memory of process {pid}: {source} (needs Linux 6.7 and {NEEDED_TO_ACT})")]
    Unseen {
        /// Id of the process.
        pid: u32,
        /// Error from the kernel.
        source: HostError,
    },
    /// The process has ended.
    #[error("process {0} has ended")]
    Gone(u32),
    /// The process does not answer.
    #[error("process {pid} {why}; try again once it does")]
    NoAnswer {
        /// Id of the process.
        pid: u32,
        /// What it does instead, in words that follow its name.
        why: String,
    },
    /// Its RAM was not found.
    #[error("cannot find the RAM of process {pid}: {why}")]
    NoRam {
        /// Id of the process.
        pid: u32,
        /// Reason in words.
        why: String,
    },
    /// The manager cannot be started.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

pub(super) fn silent(pid: u32, no_answer: &NoAnswer) -> AttachError {
    AttachError::NoAnswer { pid, why: no_answer.to_string() }
}
