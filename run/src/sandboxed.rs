//! The sandbox of a run: from its specification to the restrictions of the process, and their report.
//!
//! ```text
//!   user, jail, result, daemon ─▶ SandboxSpec ─▶ planned, before there is RAM ─┬─▶ entered by the machine, before a
//!   no sandbox ─▶ none                           userfaultfd's device is kept  │   vCPU runs
//!                                                                              └─▶ entered by each thread as it begins
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wideleaf_memory::sandboxed::{ThreadWork, keep_userfaultfd, on_thread_start};
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::sandbox::{DeviceNeeds, Entered, Sandbox, SandboxConfig, SandboxError, ThreadKind};

use crate::failure::Failure;
use crate::guards::step;
use crate::numa::NumaPlan;
use crate::spec::{Console, RunSpec, SandboxSpec};

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

/// Prepares what can be entered later; `continues`: the guest was saved, or comes from another run. From now on the
/// manager's threads enter as they begin.
pub fn plan(spec: &SandboxSpec, run: &RunSpec, continues: bool, numa: &NumaPlan) -> Result<Arc<Sandbox>, Failure> {
    let config = SandboxConfig {
        writable: spec.output_folder.iter().cloned().collect(),
        daemon: run.daemon.clone(),
        devices: DeviceNeeds { connects: run.devices.vsock.is_some(), gives_back: run.devices.balloon.is_some() },
        has_control_socket: run.control_socket.is_some(),
        boots_again: run.on_reset == OnReset::Restart,
        continues,
        has_nodes: numa.has_nodes || !numa.placement.is_none(),
        binds_vcpus: numa.binds_vcpus(),
        has_console: run.console == Console::Bytes,
        // From then on no part of it needs a privilege.
        keeps_ptrace: keep_userfaultfd().is_err(),
        user: spec.user,
        jail: spec.jail.clone(),
        must_be_complete: spec.must_be_complete,
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
pub fn check_output(spec: &SandboxSpec) -> Result<(), Failure> {
    let Some(folder) = &spec.output_folder else { return Ok(()) };
    // Without a name (`O_TMPFILE`), so that a process that is killed now leaves nothing.
    let tried = tempfile::tempfile_in(folder);
    let user = spec.user.map_or("this user".to_owned(), |user| format!("user {user}"));
    let cannot = |error: std::io::Error| {
        let (folder, kind) = (folder.display(), error.kind());
        Failure::Output(format!(
            "cannot write --output: in its sandbox {user} cannot write in {folder}: {kind}; name another folder"
        ))
    };
    tried.map(drop).map_err(cannot)
}

/// Restricts the calling thread, and panics if that fails: the thread must not continue unrestricted.
pub fn enter(sandbox: &Sandbox, kind: ThreadKind) {
    if let Err(error) = sandbox.enter_thread(kind) {
        panic!("cannot restrict {kind}: {error}");
    }
    if kind == ThreadKind::Main {
        step("main thread restricted");
    }
}

fn failure(error: SandboxError) -> Failure {
    match error {
        SandboxError::User(error) => Failure::Usage(format!("cannot use --user: {error}")),
        SandboxError::Jail(error) => Failure::Usage(format!("cannot use --jail: {error}")),
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
