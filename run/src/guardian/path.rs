//! A folder or a socket that a run makes outside its memory. It is removed however the process ends, even by
//! SIGKILL, although the sandbox lets the process remove nothing.
//!
//! ```text
//!   wideleaf run ── standard input, never written to ──▶ wideleaf hold-path, outside the sandbox and the cgroup
//!     │                                                    waits
//!     └ ends: the kernel closes the pipe ────────────────▶ removes the folder or the socket, and ends
//! ```
//!
//! The child is this program with the hidden subcommand `hold-path`, which calls [`remove_at_the_end`].

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use crate::failure::Failure;
use crate::guards::Noted;

/// Interval, and time limit below, for removing a folder that still has a dying process in it.
const TRY_EVERY: Duration = Duration::from_millis(10);
const TRIES: u32 = 500;

/// A folder or a socket that is removed when this is dropped.
#[derive(Debug)]
pub struct HeldPath(Child, #[expect(dead_code, reason = "notes its end when dropped")] Noted);

impl HeldPath {
    /// Starts the child that removes `path`. For a cgroup, before this process joins it: the child must not be in it.
    pub fn hold(path: &Path) -> io::Result<HeldPath> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("hold-path").arg(path).stdin(Stdio::piped()).stdout(Stdio::null());
        // Ctrl-C in a terminal reaches the foreground group: this child must end after this process.
        command.process_group(0).spawn().map(|child| HeldPath(child, Noted::taken("path")))
    }
}

impl Drop for HeldPath {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        match self.0.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => tracing::error!("the process that removes a path ended with {status}: it may still be there"),
            Err(error) => tracing::error!("cannot end the process that removes a path: {error}"),
        }
    }
}

/// The child: waits until its standard input ends, then removes the folder or the socket.
///
/// # Errors
/// [`Failure::Host`] if it cannot be removed.
pub fn remove_at_the_end(path: &Path) -> Result<(), Failure> {
    super::outlive_signals();
    let held = identity(path);
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    // Another run may have replaced the socket of a dead one.
    if held.is_some() && identity(path) != held {
        return Ok(());
    }
    let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let remove = if is_socket { |path: &Path| fs::remove_file(path) } else { |path: &Path| fs::remove_dir(path) };
    let mut tries = 0;
    while let Err(error) = remove(path) {
        tries += 1;
        if error.kind() == io::ErrorKind::NotFound {
            break;
        }
        if tries == TRIES {
            return Err(Failure::Host(format!("cannot remove {}: {error}", path.display())));
        }
        std::thread::sleep(TRY_EVERY);
    }
    Ok(())
}

/// What tells a file from a later one at the same path: numbers of files are used again. `None`: there is no file.
fn identity(path: &Path) -> Option<(u64, u64, Option<SystemTime>)> {
    let file = fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.created().ok()))
}
