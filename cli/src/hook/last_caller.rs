//! Proof that a libvirtd runs the hook: the hook itself records the libvirtd that called it.
//!
//! ```text
//!   /run/wideleaf/hook-called   "PID START\n", START in clock ticks since boot; a boot ends the file and that libvirtd
//! ```

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::libvirtd::{self, Libvirtd};

/// Mode that lets `wideleaf hook status` of any user read it.
const MODE: u32 = 0o644;

fn path(root: &Path) -> PathBuf {
    root.join("run/wideleaf/hook-called")
}

/// Records the caller. If the file cannot be written (the daemon's package makes the folder), `status` relies on
/// the age of the script.
pub fn record(root: &Path) {
    let Some(caller) = libvirtd::caller(&root.join("proc")) else { return };
    if read(root) != Some(caller) {
        let written = write(&path(root), caller);
        drop(written);
    }
}

/// The libvirtd that called last.
pub fn read(root: &Path) -> Option<Libvirtd> {
    let text = fs::read_to_string(path(root)).ok()?;
    let (pid, started_at) = text.trim().split_once(' ')?;
    Some(Libvirtd { pid: pid.parse().ok()?, started_at: started_at.parse().ok()? })
}

fn write(path: &Path, Libvirtd { pid, started_at }: Libvirtd) -> io::Result<()> {
    let mut file = NamedTempFile::new_in(path.parent().unwrap_or(path))?;
    writeln!(file, "{pid} {started_at}")?;
    file.as_file().set_permissions(Permissions::from_mode(MODE))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}
