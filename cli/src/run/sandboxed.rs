//! The sandbox of a run: from arguments to what the process is restricted to, and what the report says of it.
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

use super::{Console, RunSpec};
use crate::args::RunArgs;
use crate::failure::Failure;
use crate::output::say;

/// What `--no-sandbox` says.
const WITHOUT: &str = "wideleaf: --no-sandbox: a guest that breaks out into this process has all that its user may: files, network, programs";

/// What a run asks of its sandbox.
#[derive(Clone, Debug, Default)]
pub struct SandboxSpec {
    /// Whom to become.
    pub user: Option<User>,
    /// What becomes the root of all it sees.
    pub jail: Option<PathBuf>,
    /// Whether a part that this host's kernel lacks refuses the run.
    pub must_be_complete: bool,
    /// Where its result is put: nowhere else can a file be made.
    pub output_folder: Option<PathBuf>,
}

/// What restricts a run's process, in its report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Sandboxed {
    /// What holds.
    pub layers: Vec<String>,
    /// Capabilities that are left, each with its reason.
    pub capabilities_kept: Vec<String>,
    /// What this host's kernel cannot restrict.
    pub missing: Vec<String>,
}

impl SandboxSpec {
    /// As the arguments say; `None` where there is to be no sandbox.
    ///
    /// # Errors
    /// [`Failure::Usage`] where there is no such user.
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

    /// Makes ready what can be entered later. Threads of the manager enter as they begin, from now on.
    pub(super) fn plan(&self, run: &RunSpec) -> Result<Arc<Sandbox>, Failure> {
        let config = SandboxConfig {
            writable: self.output_folder.iter().cloned().collect(),
            daemon: run.daemon.clone(),
            devices: DeviceNeeds { connects: run.devices.vsock.is_some(), gives_back: run.devices.balloon.is_some() },
            has_control_socket: run.control_socket.is_some(),
            boots_again: run.on_reset == OnReset::Restart,
            has_console: run.console == Console::Here,
            // Then nothing of it takes a right any more.
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
        assert!(is_first, "a process is in one sandbox at most: `wideleaf run` plans it once");
        Ok(sandbox)
    }

    /// Whether the result can be put where it is to go, now that the process is inside: later it would be lost.
    pub(super) fn check_output(&self) -> Result<(), Failure> {
        let Some(folder) = &self.output_folder else { return Ok(()) };
        let tried = tempfile::Builder::new().prefix(".wideleaf-").tempfile_in(folder);
        let whom = self.user.map_or("this user".to_owned(), |user| format!("user {user}"));
        let cannot = |error: std::io::Error| {
            let (folder, kind) = (folder.display(), error.kind());
            Failure::Output(format!(
                "--output: in its sandbox {whom} cannot write in {folder}: {kind}; name another folder"
            ))
        };
        tried.map(drop).map_err(cannot)
    }
}

/// Restricts the calling thread, which ends where that fails: what it would do next is not to be done unrestricted.
pub(super) fn enter(sandbox: &Sandbox, kind: ThreadKind) {
    if let Err(error) = sandbox.enter_thread(kind) {
        panic!("{kind} cannot be restricted: {error}");
    }
}

fn failure(error: SandboxError) -> Failure {
    match error {
        SandboxError::User(error) => Failure::Usage(format!("--user: {error}")),
        SandboxError::Jail(error) => Failure::Usage(format!("--jail: {error}")),
        error => Failure::Host(format!("no sandbox: {error}; --no-sandbox runs without one")),
    }
}

impl From<&Entered> for Sandboxed {
    fn from(entered: &Entered) -> Sandboxed {
        let Entered { kept, missing, layers } = entered;
        let capabilities_kept = kept.iter().map(|(capability, why)| format!("{capability}: {why}")).collect();
        Sandboxed { layers: layers.clone(), capabilities_kept, missing: missing.clone() }
    }
}
