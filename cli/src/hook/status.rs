//! `wideleaf hook status`: checks whether the running libvirtd runs the script.
//!
//! libvirtd checks for hooks only once, when it starts; it reads their contents each time. So a script that is
//! younger than libvirtd is not run, unless there was another hook before. Restarting libvirtd leaves guests
//! running. The exit code also says what is wrong.
//!
//! | libvirtd runs the script if | because |
//! |---|---|
//! | this libvirtd has called it (`last_caller`) | that is proof, even if files were changed since |
//! | a hook for QEMU is older than this libvirtd | libvirtd has seen it; `install` keeps the time of a renewed script |

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use wideleaf_run::failure::{Failure, HookFault};

use super::script::{self, ScriptFile};
use super::{last_caller, libvirtd};
use crate::options::FormatArg;
use crate::output::Output;

/// State of the script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptState {
    /// No file at the place.
    Absent,
    /// A foreign file at the place.
    Foreign,
    /// A wideleaf script that is not executable, so that libvirt skips it.
    NotExecutable,
    /// A wideleaf script for another program or socket, or of another version.
    Other,
    /// The script that `install` would write now.
    Current,
}

/// Whether libvirtd runs hooks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HookUse {
    /// No libvirtd runs: the next one will.
    NoDaemon,
    /// It started when there was a hook.
    Yes,
    /// It started before there was any hook.
    NotYet,
}

/// Output of `status`.
#[derive(Clone, Debug, Serialize)]
pub struct HookStatus {
    /// Path of the script.
    pub path: PathBuf,
    /// State of the script.
    pub script: ScriptState,
    /// Whether libvirtd runs it.
    pub libvirtd: HookUse,
}

/// Runs the subcommand `status`.
///
/// # Errors
/// [`Failure::Hook`] if the hook does not work; [`Failure`] if the script cannot be read, or the result not be written.
pub fn main(root: &Path, asked: Option<&Path>, format: FormatArg) -> Result<(), Failure> {
    let output = Output::open(format, None)?;
    let status =
        HookStatus { path: script::path(root), script: state(root, asked)?, libvirtd: seen(root, SystemTime::now()) };
    let fault = status.fault();
    output.write(&status, HookStatus::to_table)?;
    fault.map_or(Ok(()), |fault| Err(fault.into()))
}

fn state(root: &Path, asked: Option<&Path>) -> Result<ScriptState, Failure> {
    let found = script::find(root)?;
    let wanted = script::socket_for(asked, &found).map(|socket| script::text(&socket)).transpose()?;
    Ok(match found {
        ScriptFile::Nothing => ScriptState::Absent,
        ScriptFile::Foreign => ScriptState::Foreign,
        ScriptFile::Ours(_) if !is_executable(&script::path(root)) => ScriptState::NotExecutable,
        ScriptFile::Ours(text) if wanted.is_some_and(|wanted| text == wanted) => ScriptState::Current,
        ScriptFile::Ours(_) => ScriptState::Other,
    })
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Whether this libvirtd has run the hook, or a hook for QEMU is older than it.
fn seen(root: &Path, now: SystemTime) -> HookUse {
    let Some(libvirtd) = libvirtd::running(&root.join("proc")) else { return HookUse::NoDaemon };
    if last_caller::read(root) == Some(libvirtd) {
        return HookUse::Yes;
    }
    let hooks = script::path(root);
    let folder = hooks.parent().unwrap_or(&hooks);
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let single = folder.with_extension("");
    let started = libvirtd.started(&root.join("proc"), now);
    let is_older = |path: &PathBuf| {
        let written = fs::metadata(path).and_then(|file| file.modified()).ok();
        written.zip(started).is_some_and(|(written, started)| written <= started)
    };
    let has_older = files.chain([single]).filter(|path| is_executable(path)).any(|path| is_older(&path));
    if has_older { HookUse::Yes } else { HookUse::NotYet }
}

impl HookStatus {
    /// The first fault to repair. A missing libvirtd is not a fault: some are started only on demand.
    fn fault(&self) -> Option<HookFault> {
        match (&self.script, &self.libvirtd) {
            (ScriptState::Absent | ScriptState::Foreign | ScriptState::NotExecutable, _) => {
                Some(HookFault::NotInstalled)
            }
            (ScriptState::Other, _) => Some(HookFault::OutOfDate),
            (ScriptState::Current, HookUse::NotYet) => Some(HookFault::NotRun),
            (ScriptState::Current, HookUse::NoDaemon | HookUse::Yes) => None,
        }
    }

    /// The status as a table for people.
    pub fn to_table(&self) -> String {
        let script = match self.script {
            ScriptState::Absent => "not installed: run `wideleaf hook install`",
            ScriptState::Foreign => "a foreign file is there: move it away",
            ScriptState::NotExecutable => "not executable, so libvirt skips it: run `wideleaf hook install`",
            ScriptState::Other => {
                "installed for another program or socket, or by another version: run `wideleaf hook install`"
            }
            ScriptState::Current => "installed",
        };
        let libvirtd = match self.libvirtd {
            HookUse::NoDaemon => "not running; it will look for hooks when it starts",
            HookUse::Yes => "runs it",
            HookUse::NotYet => {
                "there was no hook when it started: restart libvirtd once after the installation; running guests are \
                not affected"
            }
        };
        format!("script    {}: {script}\nlibvirtd  {libvirtd}\n", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, Permissions};
    use std::time::Duration;

    /// A host on which one process started 100 s after boot, 400 s ago.
    fn host(process: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir_all(root.path().join("proc/7")).expect("a process");
        fs::write(root.path().join("proc/uptime"), "500.00 900.00\n").expect("a file");
        let stat = format!("7 ({process}) S 1 {} 10000 55 66\n", "0 ".repeat(17).trim_end());
        fs::write(root.path().join("proc/7/stat"), stat).expect("a file");
        fs::create_dir_all(root.path().join("etc/libvirt/hooks/qemu.d")).expect("a folder");
        root
    }

    /// Adds a hook of this age, executable or not.
    fn add_hook(root: &Path, name: &str, age_s: u64, mode: u32) -> SystemTime {
        let now = SystemTime::now();
        let path = root.join("etc/libvirt/hooks").join(name);
        let file = File::create(&path).expect("a file");
        file.set_permissions(Permissions::from_mode(mode)).expect("a mode");
        file.set_modified(now - Duration::from_secs(age_s)).expect("a time");
        now
    }

    #[test]
    fn a_hook_that_is_younger_than_libvirtd_is_not_run_yet() {
        let root = host("libvirtd");
        let now = add_hook(root.path(), "qemu.d/wideleaf", 399, 0o755);
        assert_eq!(seen(root.path(), now), HookUse::NotYet);
    }

    #[test]
    fn one_hook_from_before_is_enough_for_all() {
        for (process, older) in [("libvirtd", "qemu.d/wideleaf"), ("virtqemud", "qemu.d/other"), ("libvirtd", "qemu")] {
            let root = host(process);
            add_hook(root.path(), "qemu.d/wideleaf", 1, 0o755);
            let now = add_hook(root.path(), older, 401, 0o755);
            assert_eq!(seen(root.path(), now), HookUse::Yes, "{older}");
        }
    }

    #[test]
    fn a_libvirtd_that_has_called_the_hook_runs_it_even_if_the_script_is_young() {
        let root = host("libvirtd");
        let now = add_hook(root.path(), "qemu.d/wideleaf", 1, 0o755);
        fs::create_dir_all(root.path().join("run/wideleaf")).expect("a folder");
        for (calling, expected) in [
            ("7 10000", HookUse::Yes),
            ("7 9999", HookUse::NotYet),
            ("8 10000", HookUse::NotYet),
            ("?", HookUse::NotYet),
        ] {
            fs::write(root.path().join("run/wideleaf/hook-called"), calling).expect("a file");
            assert_eq!(seen(root.path(), now), expected, "{calling}");
        }
    }

    #[test]
    fn a_file_that_is_not_executable_is_not_a_hook() {
        let root = host("libvirtd");
        let now = add_hook(root.path(), "qemu.d/wideleaf", 401, 0o644);
        assert_eq!(seen(root.path(), now), HookUse::NotYet);
    }

    #[test]
    fn each_fault_has_its_own_exit_code() {
        let code = |script, libvirtd| {
            let status = HookStatus { path: PathBuf::new(), script, libvirtd };
            status.fault().map_or(0, |fault| Failure::from(fault).exit_code())
        };
        for script in [ScriptState::Absent, ScriptState::Foreign, ScriptState::NotExecutable] {
            assert_eq!(code(script, HookUse::Yes), 10);
        }
        assert_eq!((code(ScriptState::Other, HookUse::Yes), code(ScriptState::Current, HookUse::NotYet)), (11, 12));
        assert_eq!([HookUse::Yes, HookUse::NoDaemon].map(|seen| code(ScriptState::Current, seen)), [0, 0]);
    }

    #[test]
    fn a_host_without_libvirtd_is_recognised() {
        let root = host("virtlogd) (x");
        let now = add_hook(root.path(), "qemu.d/wideleaf", 401, 0o755);
        assert_eq!(seen(root.path(), now), HookUse::NoDaemon);
    }
}
