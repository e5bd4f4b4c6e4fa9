//! Source of the views of the host's VMs: the daemon, or the processes in /proc without one.
//!
//! ```text
//!   --socket PATH ─────────────────────▶ the daemon there, or an error
//!   no --socket, a daemon ─────────────▶ the daemon
//!   no --socket, no daemon ────────────▶ the processes themselves: read-only, and each view says what is missing
//!   no --socket, the socket is closed
//!   to this user ──────────────────────▶ the same, with a line on standard error: a daemon may be behind it
//!   --no-daemon ───────────────────────▶ the same, without trying the socket
//! ```

pub mod processes;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wideleaf_control::client::{self, ClientError};
use wideleaf_control::protocol::{Answer, Request, SOCKET_PATH, Settings};
use wideleaf_control::view::{DaemonView, Explanation, VmView, WindowMap};
use wideleaf_run::failure::Failure;

use crate::output::say;
use processes::{Processes, WithoutDaemon};

/// The option `--socket`, with `--wait`.
#[derive(Args, Clone, Debug)]
pub struct SocketArg {
    /// Socket of wideleafd [default: /run/wideleaf/control.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Seconds to wait for each of wideleafd's replies [default: 5, and 10 for changes]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub wait: Option<u64>,
}

impl SocketArg {
    /// The path, given or by default.
    pub fn path(&self) -> &Path {
        self.socket.as_deref().unwrap_or(Path::new(SOCKET_PATH))
    }

    /// Asks the daemon, which must be present.
    ///
    /// # Errors
    /// [`Failure::Host`] if it is absent, [`Failure::Usage`] if it refuses.
    pub fn ask(&self, request: Request) -> Result<Answer, Failure> {
        self.reply(request).map_err(too_late)
    }

    /// Asks the daemon, and returns the client's error.
    ///
    /// # Errors
    /// [`ClientError`] of the exchange.
    pub fn reply(&self, request: Request) -> Result<Answer, ClientError> {
        client::ask_within(self.path(), request, self.wait.map(Duration::from_secs))
    }

    /// Whether this only means that there is no daemon, and none was named.
    pub fn may_do_without(&self, error: &ClientError) -> bool {
        self.socket.is_none() && matches!(error, ClientError::NoDaemon { .. })
    }
}

/// The options `--socket` and `--no-daemon` of commands that only read.
#[derive(Args, Clone, Debug)]
pub struct SourceArg {
    #[command(flatten)]
    socket: SocketArg,

    /// Read the processes themselves, without asking a daemon
    #[arg(long, conflicts_with = "socket")]
    no_daemon: bool,
}

impl SourceArg {
    /// Returns the source of views.
    ///
    /// # Errors
    /// [`Failure::Host`] if a daemon is present but does not answer, or if `--socket` names none.
    pub fn source(&self) -> Result<Box<dyn Source>, Failure> {
        if self.no_daemon {
            return Ok(Box::new(Processes::because(WithoutDaemon::NotAsked)));
        }
        match self.socket.reply(Request::Daemon) {
            Ok(Answer::Daemon(_)) => Ok(Box::new(Daemon { socket: self.socket.clone() })),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => {
                let why = self.instead_of(error).map_err(too_late)?;
                if let WithoutDaemon::NotPermitted(_) = why {
                    say(format_args!("wideleaf: {why}"));
                }
                Ok(Box::new(Processes::because(why)))
            }
        }
    }

    /// Reason for reading the processes instead, if the error allows that.
    fn instead_of(&self, error: ClientError) -> Result<WithoutDaemon, ClientError> {
        match error {
            ClientError::NoDaemon { path } if self.socket.socket.is_none() => Ok(WithoutDaemon::Absent(path)),
            ClientError::NotPermitted { path } if self.socket.socket.is_none() => Ok(WithoutDaemon::NotPermitted(path)),
            error => Err(error),
        }
    }
}

/// Failure of a request, with the remedy for a late reply.
pub fn too_late(error: ClientError) -> Failure {
    match error {
        ClientError::Silent { .. } => Failure::Host(format!("{error}; use --wait SECONDS to wait longer")),
        error => error.into(),
    }
}

/// A host and its VMs.
#[derive(Debug, Serialize)]
pub struct HostReport {
    /// Name of the source.
    pub source: String,
    /// The daemon, if there is one.
    pub daemon: Option<DaemonView>,
    /// All VMs of the host.
    pub vms: Vec<VmView>,
    /// Reasons why more VMs may exist.
    pub notes: Vec<String>,
}

/// A source of facts about VMs. A `name` is a VM's name, its process id or its UUID.
pub trait Source: Send {
    /// All VMs that it knows.
    ///
    /// # Errors
    /// [`Failure::Host`] if it no longer answers.
    fn host(&self) -> Result<HostReport, Failure>;

    /// The VM of that name.
    ///
    /// # Errors
    /// [`Failure::Usage`] if no VM has that name, or more than one.
    fn vm(&self, name: &str) -> Result<VmView, Failure>;

    /// Reasons why its windows are not huge.
    ///
    /// # Errors
    /// Those of [`Source::vm`].
    fn explanation(&self, name: &str) -> Result<Explanation, Failure>;

    /// Backing of each of its windows.
    ///
    /// # Errors
    /// Those of [`Source::vm`].
    fn windows(&self, name: &str) -> Result<WindowMap, Failure>;

    /// Changes its settings.
    ///
    /// # Errors
    /// Those of [`Source::vm`]; [`Failure::Host`] if no daemon manages VMs.
    fn set(&self, name: &str, changes: Settings) -> Result<VmView, Failure>;
}

/// A daemon that has answered once.
struct Daemon {
    socket: SocketArg,
}

impl Source for Daemon {
    fn host(&self) -> Result<HostReport, Failure> {
        let source = format!("wideleafd at {}", self.socket.path().display());
        let daemon = match self.socket.ask(Request::Daemon)? {
            Answer::Daemon(daemon) => Some(daemon),
            other => return Err(unexpected(&other)),
        };
        match self.socket.ask(Request::List)? {
            Answer::Vms(vms) => Ok(HostReport { source, daemon, vms, notes: Vec::new() }),
            other => Err(unexpected(&other)),
        }
    }

    fn vm(&self, name: &str) -> Result<VmView, Failure> {
        vm_of(self.socket.ask(Request::Info { vm: name.into() })?)
    }

    fn explanation(&self, name: &str) -> Result<Explanation, Failure> {
        match self.socket.ask(Request::Explain { vm: name.into() })? {
            Answer::Explanation(explanation) => Ok(explanation),
            other => Err(unexpected(&other)),
        }
    }

    fn windows(&self, name: &str) -> Result<WindowMap, Failure> {
        match self.socket.ask(Request::Windows { vm: name.into() })? {
            Answer::Windows(map) => Ok(map),
            other => Err(unexpected(&other)),
        }
    }

    fn set(&self, name: &str, changes: Settings) -> Result<VmView, Failure> {
        vm_of(self.socket.ask(Request::Set { vm: name.into(), changes })?)
    }
}

/// The VM of an answer that must contain one.
///
/// # Errors
/// [`Failure::Host`] if the answer is of another kind.
pub fn vm_of(answer: Answer) -> Result<VmView, Failure> {
    match answer {
        Answer::Vm(vm) => Ok(*vm),
        other => Err(unexpected(&other)),
    }
}

/// Checks that an answer is the confirmation.
///
/// # Errors
/// [`Failure::Host`] if the answer is of another kind.
pub fn done(answer: Answer) -> Result<(), Failure> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// An answer to another question.
fn unexpected(answer: &Answer) -> Failure {
    let kind = match answer {
        Answer::Done => "nothing",
        Answer::Daemon(_) => "itself",
        Answer::Vms(_) => "all VMs",
        Answer::Rooms(_) => "rooms in the pools",
        Answer::Vm(_) => "one VM",
        Answer::Explanation(_) => "an explanation",
        Answer::Windows(_) => "windows",
        Answer::Limits(_) => "limits",
    };
    Failure::Host(format!(
        "cannot use wideleafd's answer: it answered another question (with {kind}); is it of another version?"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processes_are_read_if_no_daemon_can_be_asked_and_none_was_named() {
        let source = |socket: Option<&str>| SourceArg {
            socket: SocketArg { socket: socket.map(PathBuf::from), wait: None },
            no_daemon: false,
        };
        let path = || PathBuf::from("/s");
        let instead = |socket, error| source(socket).instead_of(error).map_err(|error| error.to_string());
        assert_eq!(instead(None, ClientError::NoDaemon { path: path() }), Ok(WithoutDaemon::Absent(path())));
        assert_eq!(instead(None, ClientError::NotPermitted { path: path() }), Ok(WithoutDaemon::NotPermitted(path())));
        for named in [ClientError::NoDaemon { path: path() }, ClientError::NotPermitted { path: path() }] {
            assert!(instead(Some("/s"), named).is_err(), "the named daemon is required");
        }
        let busy = ClientError::Silent { timeout: client::QUESTION_TIMEOUT };
        assert!(instead(None, busy).is_err(), "a daemon is present");
    }
}
