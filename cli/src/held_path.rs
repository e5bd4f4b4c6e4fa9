//! What a run makes outside its memory, a cgroup (v2) or a socket, and that is gone again however its process ends, also if it is killed
//! outright, and though in its sandbox it may remove nothing.
//!
//! ```text
//!   wideleaf run ── standard input, never written to ──▶ wideleaf hold-path, outside the sandbox and the cgroup
//!     │                                                    waits
//!     └ ends: the kernel closes the pipe ────────────────▶ removes the folder or the socket, and ends
//! ```
//!
//! The process goes back to where it came from by a file that it opened before its sandbox: the kernel asks for the rights of who opened
//! it (cgroup-v2, "Delegation Containment").

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::unistd::{AccessFlags, access};
use wideleaf_memory::capabilities::Capability;

use crate::args::HoldPathArgs;
use crate::failure::Failure;

/// The file through which a process joins a cgroup.
const PROCESSES: &str = "cgroup.procs";

/// What is mounted where.
const MOUNTS: &str = "/proc/self/mounts";

const NONE: &str = "no cgroup2 is mounted here";

/// How often and how long a folder is tried that still has a dying process in it.
const TRY_EVERY: Duration = Duration::from_millis(10);
const TRIES: u32 = 500;

/// This process is in a cgroup, until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldCgroup {
    /// Where it came from.
    before: File,
    /// Removes the folder, where it is new.
    holder: Option<HeldPath>,
}

/// A folder or a socket that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct HeldPath(Child);

impl HeldCgroup {
    /// Joins the cgroup at `path`, which is absolute or counted from where cgroups are mounted. It is made if it is not there.
    ///
    /// # Errors
    /// [`Failure::Host`] in one line; nothing is made then.
    pub(crate) fn join(path: &Path) -> Result<HeldCgroup, Failure> {
        let said = |why: &dyn std::fmt::Display| Failure::Host(format!("--cgroup {}: {why}", path.display()));
        let mounts = fs::read_to_string(MOUNTS).map_err(|error| said(&error))?;
        let root =
            mounted_at(&mounts).ok_or_else(|| said(&format_args!("{NONE}; mount one, or leave --cgroup out")))?;
        let folder = root.join(path);
        if !folder.starts_with(&root) || folder.components().any(|part| part.as_os_str() == "..") {
            return Err(said(&format_args!("cgroups (v2) are in {}; name one of them", root.display())));
        }
        let here = fs::read_to_string("/proc/self/cgroup").map_err(|error| said(&error))?;
        let here = here.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let before =
            open(&root.join(here)).map_err(|error| said(&format_args!("cannot come back from it: {error}")))?;
        let holder = match fs::create_dir(&folder) {
            Ok(()) => Some(HeldPath::hold(&folder).map_err(|error| {
                let _ = fs::remove_dir(&folder);
                said(&error)
            })?),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            Err(error) => return Err(said(&format_args!("cannot make it: {error}"))),
        };
        // From here on dropping it removes what was made.
        let held = HeldCgroup { before, holder };
        let joined = open(&folder).and_then(|mut processes| processes.write_all(b"0"));
        joined.map_err(|error| said(&format_args!("cannot join it: {error}")))?;
        Ok(held)
    }
}

/// The doctor's row of `--cgroup`.
pub(crate) fn cgroups() -> Capability {
    let found = fs::read_to_string(MOUNTS).map_err(|error| format!("{MOUNTS}: {error}")).and_then(|mounts| {
        let root = mounted_at(&mounts).ok_or(NONE)?;
        let why_not = |errno| format!("{}: this user can make no cgroup there: {errno}", root.display());
        access(&root, AccessFlags::W_OK).map_err(why_not)?;
        Ok(root.display().to_string())
    });
    Capability::new("cgroup_v2", "--cgroup is refused: a guest's limits are those of who starts it", found)
}

impl Drop for HeldCgroup {
    fn drop(&mut self) {
        if let Err(error) = self.before.write_all(b"0") {
            tracing::error!("the process stays in its cgroup: {error}");
        }
        // Empty now: it can go.
        drop(self.holder.take());
    }
}

impl HeldPath {
    /// Starts what removes `path`. Of a cgroup, before this process joins it: the child is in no cgroup that goes.
    pub(crate) fn hold(path: &Path) -> io::Result<HeldPath> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("hold-path").arg(path).stdin(Stdio::piped()).stdout(Stdio::null());
        // Ctrl-C in a terminal is for the group that has it: this child ends after us.
        command.process_group(0).spawn().map(HeldPath)
    }
}

impl Drop for HeldPath {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if let Err(error) = self.0.wait() {
            tracing::error!("what removes a path does not end: {error}");
        }
    }
}

/// Where the first cgroup2 is mounted (proc(5), `/proc/pid/mounts`).
fn mounted_at(mounts: &str) -> Option<PathBuf> {
    let fields = |line: &str| line.split(' ').take(3).map(str::to_owned).collect::<Vec<_>>();
    let found = mounts.lines().map(fields).find(|fields| fields.get(2).is_some_and(|kind| kind == "cgroup2"));
    found.map(|fields| PathBuf::from(&fields[1]))
}

fn open(folder: &Path) -> io::Result<File> {
    File::options().write(true).open(folder.join(PROCESSES))
}

/// The child: waits until its standard input ends, and removes the folder, or the socket.
///
/// # Errors
/// [`Failure::Host`] where it stays.
pub fn main(args: &HoldPathArgs) -> Result<(), Failure> {
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    let path = &args.path;
    let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let remove = if is_socket { |path: &Path| fs::remove_file(path) } else { |path: &Path| fs::remove_dir(path) };
    let mut tries = 0;
    while let Err(error) = remove(path) {
        tries += 1;
        if error.kind() == io::ErrorKind::NotFound {
            break;
        }
        if tries == TRIES {
            return Err(Failure::Host(format!("{} stays: {error}", path.display())));
        }
        std::thread::sleep(TRY_EVERY);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_where_the_second_version_is_mounted() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mounted_at(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mounted_at("proc /proc proc rw 0 0\n"), None);
    }
}
