//! Snapshots of a run: what belongs to it beside RAM, saving it at a client's request, and continuing it.
//!
//! ```text
//!   wideleaf vm SOCKET snapshot FOLDER ── open files ──▶ control socket ──▶ [`saving`]'s thread
//!                                                          manager rests · RAM in rounds · pause · machine · resume
//!   wideleaf run --restore FOLDER ──▶ [`restoring`] ──▶ RAM is registered, the machine gets its state, the guest runs
//!                                                          RAM is filled while it runs
//! ```

use std::path::Path;

use serde::{Deserialize, Serialize};
use wideleaf_snapshot::{Caching, Opened};
use wideleaf_vmm::MachineState;

use crate::failure::Failure;
use crate::session::SavedSession;
use crate::spec::RunSpec;
use accesses::SavedAccesses;

pub(crate) mod accesses;
mod page_cache;
pub mod parts;
pub mod restoring;
pub mod saving;
mod touches;

/// Version of `machine.json`. Another version of a part of it has its own number.
const VERSION: u32 = 1;

/// Content of `machine.json`, written.
#[derive(Serialize)]
struct Saved<'a> {
    version: u32,
    /// Release that saved it.
    wideleaf: &'a str,
    /// Specification of the run, with the policy that it had at the end.
    spec: &'a RunSpec,
    /// What the guest has said.
    session: SavedSession,
    /// What the manager knew of the guest's accesses.
    accesses: &'a SavedAccesses,
    /// vCPUs, chips and devices.
    machine: &'a MachineState,
}

/// Content of `machine.json`, read.
#[derive(Deserialize)]
pub struct SavedRun {
    /// Specification of the run.
    pub spec: RunSpec,
    /// What the guest has said.
    pub session: SavedSession,
    /// What the manager knew of the guest's accesses.
    #[serde(default)]
    pub(crate) accesses: SavedAccesses,
    /// vCPUs, chips and devices.
    pub machine: MachineState,
}

/// The version alone: its meaning is the same in all versions.
#[derive(Deserialize)]
struct Version {
    version: u32,
    wideleaf: String,
}

/// Specification of the run that was saved in this folder.
///
/// # Errors
/// [`Failure::Input`] for a folder that is no snapshot, or one of another version.
pub fn saved_spec(folder: &Path) -> Result<RunSpec, Failure> {
    let opened = Opened::open(folder, Caching::PageCache).map_err(|error| Failure::Input(error.to_string()))?;
    Ok(read(folder, &opened)?.spec)
}

fn read(folder: &Path, opened: &Opened) -> Result<SavedRun, Failure> {
    parse(opened.machine(), &|why| Failure::Input(format!("cannot restore {}: {why}", folder.display())))
}

/// Reads the content of `machine.json`, from a folder or from a connection. `cannot` says what is impossible then.
///
/// # Errors
/// One of `cannot`, for another version and for malformed content.
pub(crate) fn parse(text: &[u8], cannot: &dyn Fn(String) -> Failure) -> Result<SavedRun, Failure> {
    let malformed = |error: serde_json::Error| cannot(format!("`machine.json` is malformed: {error}"));
    let Version { version, wideleaf } = serde_json::from_slice(text).map_err(malformed)?;
    if version != VERSION {
        return Err(cannot(format!(
            "wideleaf {wideleaf} saved it with version {version} of `machine.json`, this one reads version {VERSION}; \
             restore it with the release that saved it"
        )));
    }
    serde_json::from_slice(text).map_err(malformed)
}

/// Content of `machine.json`.
pub(crate) fn saved_text(
    spec: &RunSpec,
    session: SavedSession,
    accesses: &SavedAccesses,
    machine: &MachineState,
) -> Result<Vec<u8>, String> {
    let saved = Saved { version: VERSION, wideleaf: env!("CARGO_PKG_VERSION"), spec, session, accesses, machine };
    serde_json::to_vec(&saved).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_version_is_refused_with_the_release_that_saved_it_whatever_else_it_has() {
        for version in [0, VERSION + 1] {
            let text = format!(r#"{{"version":{version},"wideleaf":"9.1.0","shape":["of",9]}}"#);
            let refused = parse(text.as_bytes(), &Failure::Input).err().expect("it is not of this version").to_string();
            let told = format!("9.1.0 saved it with version {version} of `machine.json`, this one reads version 1; ");
            assert!(refused.contains(&(told + "restore it")), "{refused}");
        }
    }

    #[test]
    fn a_state_without_a_version_and_one_without_its_parts_are_malformed() {
        for text in ["{}", r#"{"version":1,"wideleaf":"1.0.0"}"#, "\u{0}"] {
            let refused = parse(text.as_bytes(), &Failure::Input).err().expect("it is not whole").to_string();
            assert!(refused.contains("`machine.json` is malformed"), "{refused}");
        }
    }
}
