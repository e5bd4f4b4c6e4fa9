//! A socket's file: whether somebody listens there already, and who may connect.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::peer::Peer;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon has it.
    #[error("another wideleafd (pid {pid}) is listening at {}: stop it first, or give this daemon another {key}", path.display())]
    Taken {
        /// The other.
        pid: u32,
        /// Of the socket.
        path: PathBuf,
        /// What the configuration calls it.
        key: &'static str,
    },
    /// There is something else.
    #[error("{} is no socket: move it away, or give this daemon another {key}", path.display())]
    NoSocket {
        /// Which.
        path: PathBuf,
        /// What the configuration calls it.
        key: &'static str,
    },
    /// The group does not exist.
    #[error("{0}")]
    NoGroup(String),
    /// The kernel refused.
    #[error("cannot listen at {}: {source}; give this daemon another {key}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// What the configuration calls it.
        key: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("cannot serve metrics at {address}: {source}; give metrics.listen another address, or \"off\"")]
    Metrics {
        /// Where.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A socket that is about to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SocketFile<'a> {
    pub(crate) path: &'a Path,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Its group; `None`: this process's.
    pub(crate) gid: Option<u32>,
    /// What the configuration calls the path.
    pub(crate) key: &'static str,
}

impl SocketFile<'_> {
    /// A socket that only those may connect to who are meant to.
    ///
    /// Until its mode is set, the new file has what the umask leaves, which for a service is no write permission for others, and writing is
    /// what connecting takes (unix(7)).
    pub(crate) fn bind(&self) -> Result<UnixListener, ListenError> {
        let SocketFile { path, mode, gid, .. } = *self;
        self.clear()?;
        let at = |source| self.failed(source);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(at)?;
        }
        let listener = UnixListener::bind(path).map_err(at)?;
        std::os::unix::fs::chown(path, None, gid).map_err(at)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(at)?;
        listener.set_nonblocking(true).map_err(at)?;
        Ok(listener)
    }

    /// The kernel's answer, with where that was.
    pub(crate) fn failed(&self, source: io::Error) -> ListenError {
        ListenError::Socket { path: self.path.to_owned(), key: self.key, source }
    }

    /// Removes a socket that nobody listens at.
    fn clear(&self) -> Result<(), ListenError> {
        let SocketFile { path, key, .. } = *self;
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(ListenError::NoSocket { path: path.to_owned(), key });
            }
            Ok(_) => {}
        }
        match UnixStream::connect(path) {
            // A listener's credentials are those of who called listen(2).
            Ok(stream) => {
                let pid = Peer::of(&stream).map_err(|error| self.failed(error))?.pid;
                Err(ListenError::Taken { pid, path: path.to_owned(), key })
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(|error| self.failed(error))
            }
            Err(error) => Err(self.failed(error)),
        }
    }
}
