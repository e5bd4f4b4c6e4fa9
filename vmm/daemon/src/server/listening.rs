//! The socket's file: whose it is, whether somebody listens there already, and who may connect.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::config::SocketConfig;
use crate::peer::{Access, Peer};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon has it.
    #[error("another wideleafd (pid {pid}) is listening at {}: stop it first, or give this one another socket.path", path.display())]
    Taken {
        /// The other.
        pid: u32,
        /// Of the socket.
        path: PathBuf,
    },
    /// There is something else.
    #[error("{} is no socket: move it away, or give this daemon another socket.path", path.display())]
    NoSocket {
        /// Which.
        path: PathBuf,
    },
    /// The group does not exist.
    #[error("{0}")]
    NoGroup(String),
    /// The kernel refused.
    #[error("cannot listen at {}: {source}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A socket that only those may connect to who are meant to.
///
/// Until its mode is set, the new file has what the umask leaves, which for a service is no write permission for others, and writing is
/// what connecting takes (unix(7)).
pub(super) fn bind(config: &SocketConfig, access: &Access) -> Result<UnixListener, ListenError> {
    let gid = access.gid().map_err(ListenError::NoGroup)?;
    let path = &config.path;
    clear(path)?;
    let at = |source| ListenError::Socket { path: path.clone(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(at)?;
    }
    let listener = UnixListener::bind(path).map_err(at)?;
    std::os::unix::fs::chown(path, None, gid).map_err(at)?;
    fs::set_permissions(path, fs::Permissions::from_mode(config.mode)).map_err(at)?;
    listener.set_nonblocking(true).map_err(at)?;
    Ok(listener)
}

/// Removes a socket that nobody listens at.
fn clear(path: &Path) -> Result<(), ListenError> {
    let at = |source| ListenError::Socket { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(at(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NoSocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        // A listener's credentials are those of who called listen(2).
        Ok(stream) => Err(ListenError::Taken { pid: Peer::of(&stream).map_err(at)?.pid, path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(at),
        Err(error) => Err(at(error)),
    }
}
