//! The sandbox of a run: from arguments to the restrictions of the process, and their report.
//!
//! ```text
//!   --user, --jail, --output, --daemon ─▶ SandboxSpec ─▶ planned, before there is RAM ─▶ entered by the machine, before a vCPU runs
//!                                                          │                                ─▶ entered by each thread as it begins
//!   --no-sandbox ─▶ none, and a line that says so          └ userfaultfd's device stays open
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wideleaf_memory::sandboxed::{ThreadWork, keep_userfaultfd, on_thread_start};
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::sandbox::{DeviceNeeds, Entered, Sandbox, SandboxConfig, SandboxError, ThreadKind, User};

use super::guards::step;
use super::{Console, RunSpec};
use crate::args::RunArgs;
use crate::failure::Failure;
use crate::output::say;

/// Warning of `--no-sandbox`.
const WITHOUT: &str = "wideleaf: --no-sandbox: a guest that breaks out into this process has all rights of its user: \
    files, network, programs";

/// Settings of a run's sandbox.
#[derive(Clone, Debug, Default)]
pub struct SandboxSpec {
    /// User to become.
    pub user: Option<User>,
    /// Folder that becomes the root directory.
    pub jail: Option<PathBuf>,
    /// Whether the run is refused if this host's kernel lacks a part.
    pub must_be_complete: bool,
    /// Folder of the result: files can be made nowhere else.
    pub output_folder: Option<PathBuf>,
}

/// Restrictions of a run's process, in its report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Sandboxed {
    /// Restrictions in force.
    pub layers: Vec<String>,
    /// Remaining capabilities, each with its reason.
    pub capabilities_kept: Vec<String>,
    /// Restrictions that this host's kernel lacks.
    pub missing: Vec<String>,
}

impl SandboxSpec {
    /// Settings from the arguments; `None` without a sandbox.
    ///
    /// # Errors
    /// [`Failure::Usage`] if there is no such user.
    pub(super) fn new(args: &RunArgs) -> Result<Option<SandboxSpec>, Failure> {
        if args.native {
            return Ok(None);
        }
        if args.no_sandbox {
            say(WITHOUT);
            return Ok(None);
        }
        let user = args.user.as_deref().map(str::parse).transpose();
        let user =
            user.map_err(|error: wideleaf_vmm::sandbox::user::UserError| Failure::Usage(format!("--user: {error}")))?;
        let must_be_complete = args.require_sandbox;
        Ok(Some(SandboxSpec { user, jail: args.jail.clone(), must_be_complete, output_folder: None }))
    }

    /// Prepares what can be entered later. From now on the manager's threads enter as they begin.
    pub(super) fn plan(&self, run: &RunSpec) -> Result<Arc<Sandbox>, Failure> {
        let config = SandboxConfig {
            writable: self.output_folder.iter().cloned().collect(),
            daemon: run.daemon.clone(),
            devices: DeviceNeeds { connects: run.devices.vsock.is_some(), gives_back: run.devices.balloon.is_some() },
            has_control_socket: run.control_socket.is_some(),
            boots_again: run.on_reset == OnReset::Restart,
            has_console: run.console == Console::Here,
            // From then on no part of it needs a privilege.
            keeps_ptrace: keep_userfaultfd().is_err(),
            user: self.user,
            jail: self.jail.clone(),
            must_be_complete: self.must_be_complete,
        };
        let sandbox = Arc::new(Sandbox::plan(config).map_err(failure)?);
        let of_manager = Arc::clone(&sandbox);
        let is_first = on_thread_start(move |work| {
            let kind = match work {
                ThreadWork::Loop => ThreadKind::Manager,
                ThreadWork::Faults => ThreadKind::Faults,
            };
            enter(&of_manager, kind);
        });
        step("sandbox planned");
        assert!(is_first, "a process is in one sandbox at most: `wideleaf run` plans it once");
        Ok(sandbox)
    }

    /// Checks that the process can write its result from inside the sandbox: later the result would be lost.
    pub(super) fn check_output(&self) -> Result<(), Failure> {
        let Some(folder) = &self.output_folder else { return Ok(()) };
        let tried = tempfile::Builder::new().prefix(".wideleaf-").tempfile_in(folder);
        let whom = self.user.map_or("this user".to_owned(), |user| format!("user {user}"));
        let cannot = |error: std::io::Error| {
            let (folder, kind) = (folder.display(), error.kind());
            Failure::Output(format!(
                "cannot write --output: in its sandbox {whom} cannot write in {folder}: {kind}; name another folder"
            ))
        };
        tried.map(drop).map_err(cannot)
    }
}

/// Restricts the calling thread, and panics if that fails: the thread must not continue unrestricted.
pub(super) fn enter(sandbox: &Sandbox, kind: ThreadKind) {
    if let Err(error) = sandbox.enter_thread(kind) {
        panic!("cannot restrict {kind}: {error}");
    }
    if kind == ThreadKind::Main {
        step("main thread restricted");
    }
}

fn failure(error: SandboxError) -> Failure {
    match error {
        SandboxError::User(error) => Failure::Usage(format!("--user: {error}")),
        SandboxError::Jail(error) => Failure::Usage(format!("--jail: {error}")),
        error => Failure::Host(format!("cannot set up the sandbox: {error}; use --no-sandbox to run without one")),
    }
}

impl From<&Entered> for Sandboxed {
    fn from(entered: &Entered) -> Sandboxed {
        let Entered { kept, missing, layers } = entered;
        let capabilities_kept = kept.iter().map(|(capability, why)| format!("{capability}: {why}")).collect();
        Sandboxed { layers: layers.clone(), capabilities_kept, missing: missing.clone() }
    }
}
