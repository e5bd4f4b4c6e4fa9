//! The cgroup (v2) of `wideleaf run --cgroup`: the process joins it, and makes it where it is missing. At the end the
//! process returns to its former cgroup and removes the one that it made. A child removes it where the process is
//! killed ([`HeldPath`]).
//!
//! The way back is a file that the process opened before its sandbox: the kernel checks the rights of the process that
//! opened it (cgroup-v2, "Delegation Containment").

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};
use wideleaf_memory::capabilities::Capability;

use super::path::HeldPath;
use crate::failure::Failure;
use crate::guards::Noted;

/// File of a cgroup through which a process joins it.
const PROCESSES: &str = "cgroup.procs";

/// File with the mounts of this process.
const MOUNTS: &str = "/proc/self/mounts";

/// Why no cgroup can be joined on a host with version 1 alone.
const NOT_MOUNTED: &str = "no cgroup2 is mounted here";

/// The cgroup that this process is in until this is dropped.
#[derive(Debug)]
pub struct HeldCgroup {
    /// File of the previous cgroup.
    before: File,
    /// Child that removes the folder, if the folder is new.
    holder: Option<HeldPath>,
    _noted: Noted,
}

impl HeldCgroup {
    /// Joins the cgroup at `path`, which is absolute or relative to the cgroup mount. A missing cgroup is made.
    ///
    /// # Errors
    /// [`Failure::Host`] in one line; nothing is made then.
    pub fn join(path: &Path) -> Result<HeldCgroup, Failure> {
        let refused =
            |why: &dyn std::fmt::Display| Failure::Host(format!("cannot use --cgroup {}: {why}", path.display()));
        let mounts = fs::read_to_string(MOUNTS).map_err(|error| refused(&error))?;
        let root =
            mounted_at(&mounts).ok_or_else(|| refused(&format_args!("{NOT_MOUNTED}; mount one, or omit --cgroup")))?;
        let folder = root.join(path);
        if !folder.starts_with(&root) || folder.components().any(|part| part.as_os_str() == "..") {
            return Err(refused(&format_args!(
                "it is not a cgroup: cgroups (v2) are in {}; name one of them",
                root.display()
            )));
        }
        let here = fs::read_to_string("/proc/self/cgroup").map_err(|error| refused(&error))?;
        let here = here.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let before =
            open(&root.join(here)).map_err(|error| refused(&format_args!("cannot return from it: {error}")))?;
        let holder = match fs::create_dir(&folder) {
            Ok(()) => Some(HeldPath::hold(&folder).map_err(|error| {
                let _ = fs::remove_dir(&folder);
                refused(&error)
            })?),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            Err(error) => return Err(refused(&format_args!("cannot make it: {error}"))),
        };
        // From here on dropping it removes the new cgroup.
        let held = HeldCgroup { before, holder, _noted: Noted::taken("cgroup") };
        let joined = open(&folder).and_then(|mut processes| processes.write_all(b"0"));
        joined.map_err(|error| refused(&format_args!("cannot join it: {error}")))?;
        Ok(held)
    }
}

/// Whether a cgroup limits the memory of this process (cgroup-v2, `memory.max` and `memory.high`): its own one, or one
/// above. What cannot be read is no limit.
pub fn is_memory_limited() -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cgroup = read("/proc/self/cgroup");
    let here = cgroup.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    mounted_at(&read(MOUNTS)).is_some_and(|root| has_limit(&root, here))
}

fn has_limit(root: &Path, here: &str) -> bool {
    let is_limit = |file: PathBuf| fs::read_to_string(file).is_ok_and(|limit| limit.trim() != "max");
    let folders = Path::new(here).ancestors().map(|folder| root.join(folder));
    folders.flat_map(|folder| ["memory.max", "memory.high"].map(|name| folder.join(name))).any(is_limit)
}

/// The doctor's row for `--cgroup`.
pub fn cgroups() -> Capability {
    let found = fs::read_to_string(MOUNTS).map_err(|error| format!("{MOUNTS}: {error}")).and_then(|mounts| {
        let root = mounted_at(&mounts).ok_or(NOT_MOUNTED)?;
        let why_not = |errno| format!("{}: this user cannot make a cgroup there: {errno}", root.display());
        access(&root, AccessFlags::W_OK).map_err(why_not)?;
        Ok(root.display().to_string())
    });
    Capability::new("cgroup_v2", "--cgroup is refused: a guest has the limits of the process that starts it", found)
}

impl Drop for HeldCgroup {
    fn drop(&mut self) {
        if let Err(error) = self.before.write_all(b"0") {
            tracing::error!("cannot leave the cgroup: {error}");
        }
        // The cgroup is empty now and can be removed.
        drop(self.holder.take());
    }
}

/// Mount point of the first cgroup2 (proc(5), `/proc/pid/mounts`).
fn mounted_at(mounts: &str) -> Option<PathBuf> {
    let fields = |line: &str| line.split(' ').take(3).map(str::to_owned).collect::<Vec<_>>();
    let found = mounts.lines().map(fields).find(|fields| fields.get(2).is_some_and(|kind| kind == "cgroup2"));
    found.map(|fields| PathBuf::from(&fields[1]))
}

fn open(folder: &Path) -> io::Result<File> {
    File::options().write(true).open(folder.join(PROCESSES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_any_cgroup_above_limits_the_memory() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = root.path().join("machine/guest");
        fs::create_dir_all(&folder).expect("made");
        let put = |path: &str, limit: &str| fs::write(root.path().join(path), limit).expect("written");
        let is_limited = || has_limit(root.path(), "machine/guest");
        assert!(!is_limited(), "without the memory controller there is no such file");
        put("machine/guest/memory.max", "max\n");
        put("machine/memory.high", "max\n");
        assert!(!is_limited());
        put("machine/memory.high", "1073741824\n");
        assert!(is_limited() && !has_limit(root.path(), ""));
        put("machine/memory.high", "max\n");
        put("machine/guest/memory.max", "1073741824\n");
        assert!(is_limited());
    }

    #[test]
    fn cgroups_are_found_at_the_mount_of_version_two() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mounted_at(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mounted_at("proc /proc proc rw 0 0\n"), None);
    }
}
