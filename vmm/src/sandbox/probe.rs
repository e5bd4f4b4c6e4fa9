//! The sandbox layers that this host supports, for `wideleaf doctor`: each layer that some hosts lack is tested
//! with the kernel.

use std::path::Path;
use std::thread;

use caps::{CapSet, Capability as Right};
use landlock::{AccessFs, LandlockStatus, Ruleset, RulesetAttr as _, RulesetError};
use wideleaf_memory::capabilities::Capability;

use super::files::{NEWEST_ABI, RIGHTS};

/// Returns one row for each layer. `root` is the folder that contains `proc/`, for layers that are read from files.
pub fn probe(root: &Path) -> Vec<Capability> {
    vec![
        Capability::new("seccomp", "no sandbox: `run` needs --no-sandbox", seccomp(root)),
        Capability::new(
            "landlock",
            "only --user and --jail limit the files that a guest's process may open",
            landlock(),
        ),
        Capability::new("jail", "--jail is refused", jail(root)),
    ]
}

/// The answers that our filters give (Documentation/userspace-api/seccomp_filter.rst, "Sysctls").
fn seccomp(root: &Path) -> Result<String, String> {
    const ANSWERS: [&str; 3] = ["allow", "trap", "errno"];
    let path = root.join("proc/sys/kernel/seccomp/actions_avail");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    match ANSWERS.iter().find(|answer| !text.split_whitespace().any(|word| word == **answer)) {
        None => Ok(format!("filters that answer {}", ANSWERS.join(", "))),
        Some(missing) => Err(format!("filters cannot answer {missing} here, only {}", text.trim())),
    }
}

/// Tries Landlock in a thread that then ends: a restriction belongs to the thread that asks for it.
fn landlock() -> Result<String, String> {
    let restrict = || -> Result<LandlockStatus, RulesetError> {
        Ok(Ruleset::default().handle_access(AccessFs::Execute)?.create()?.restrict_self()?.landlock)
    };
    let status =
        thread::spawn(restrict).join().map_err(|_| "its trial panicked")?.map_err(|error| error.to_string())?;
    match status {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            let version = kernel_abi.map_or_else(|| effective_abi.to_string(), |abi| abi.to_string());
            let is_whole = effective_abi >= RIGHTS;
            let less = format!(": files, but not all of TCP, devices and signals, which need {NEWEST_ABI}");
            Ok(format!("ABI {version}{}", if is_whole { "" } else { &less }))
        }
        LandlockStatus::NotEnabled => Err("not among the LSMs at boot".into()),
        LandlockStatus::NotImplemented => Err("needs Linux 5.13 with CONFIG_SECURITY_LANDLOCK".into()),
    }
}

/// Namespaces (namespaces(7)) and the right to mount.
fn jail(root: &Path) -> Result<String, String> {
    let namespaces = [("mnt", "mount"), ("net", "network"), ("ipc", "IPC"), ("uts", "UTS")];
    if let Some((_, missing)) = namespaces.iter().find(|(file, _)| !root.join("proc/self/ns").join(file).exists()) {
        return Err(format!("this kernel has no {missing} namespaces"));
    }
    match caps::has_cap(None, CapSet::Effective, Right::CAP_SYS_ADMIN) {
        Ok(true) => Ok(format!("{} namespaces", namespaces.map(|(_, name)| name).join(", "))),
        Ok(false) => Err("needs root: mounts need CAP_SYS_ADMIN".into()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_available_where_the_kernel_has_all_their_answers() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("proc/sys/kernel/seccomp");
        assert!(seccomp(root.path()).expect_err("nothing is there").contains("actions_avail"));
        std::fs::create_dir_all(&folder).expect("it is ours");
        let says = |text: &str| {
            std::fs::write(folder.join("actions_avail"), text).expect("it is ours");
            seccomp(root.path())
        };
        assert!(says("kill_process kill_thread trap errno user_notif trace log allow\n").is_ok());
        let missing = says("kill_thread errno allow\n").expect_err("one is missing");
        assert_eq!(missing, "filters cannot answer trap here, only kill_thread errno allow");
    }

    #[test]
    fn a_probe_of_landlock_does_not_restrict_its_caller() {
        let _ = landlock();
        assert!(std::process::Command::new("/bin/true").status().is_ok(), "the probe did not restrict this thread");
    }

    #[test]
    fn a_jail_needs_its_namespaces() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(jail(root.path()), Err("this kernel has no mount namespaces".into()));
    }
}
