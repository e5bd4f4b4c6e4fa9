//! A socket's file: whether somebody listens there already, and who may connect.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::peer::Peer;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketFileError {
    /// Somebody listens there.
    #[error("{who} (pid {pid}) is listening at {}: stop it first, or {remedy}", path.display())]
    Taken {
        /// What listens there, most likely.
        who: &'static str,
        /// The other.
        pid: u32,
        /// Of the socket.
        path: PathBuf,
        /// How to have another place.
        remedy: &'static str,
    },
    /// There is something else.
    #[error("{} is no socket: move it away, or {remedy}", path.display())]
    NoSocket {
        /// Which.
        path: PathBuf,
        /// How to have another place.
        remedy: &'static str,
    },
    /// The kernel refused.
    #[error("cannot listen at {}: {source}; {remedy}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// How to have another place.
        remedy: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A socket that is about to be.
#[derive(Clone, Copy, Debug)]
pub struct SocketFile<'a> {
    /// Where.
    pub path: &'a Path,
    /// Permission bits.
    pub mode: u32,
    /// Its group; `None`: this process's.
    pub gid: Option<u32>,
    /// Whether its folder is made where there is none.
    pub makes_folder: bool,
    /// What listens there already if somebody does, in words.
    pub who: &'static str,
    /// How to have another place, in words.
    pub remedy: &'static str,
}

impl SocketFile<'_> {
    /// A socket that only those may connect to who are meant to.
    ///
    /// Until its mode is set, the new file has what the umask leaves, which for a service is no write permission for others, and writing is
    /// what connecting takes (unix(7)).
    ///
    /// # Errors
    /// [`SocketFileError`], with who listens there if somebody does.
    pub fn bind(&self) -> Result<UnixListener, SocketFileError> {
        let SocketFile { path, mode, gid, .. } = *self;
        self.clear()?;
        let at = |source| self.failed(source);
        if let Some(folder) = path.parent().filter(|_| self.makes_folder) {
            fs::create_dir_all(folder).map_err(at)?;
        }
        let listener = UnixListener::bind(path).map_err(at)?;
        std::os::unix::fs::chown(path, None, gid).map_err(at)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(at)?;
        listener.set_nonblocking(true).map_err(at)?;
        Ok(listener)
    }

    /// The kernel's answer, with where that was.
    pub fn failed(&self, source: io::Error) -> SocketFileError {
        SocketFileError::Socket { path: self.path.to_owned(), remedy: self.remedy, source }
    }

    /// Removes a socket that nobody listens at.
    fn clear(&self) -> Result<(), SocketFileError> {
        let SocketFile { path, who, remedy, .. } = *self;
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(SocketFileError::NoSocket { path: path.to_owned(), remedy });
            }
            Ok(_) => {}
        }
        match UnixStream::connect(path) {
            // A listener's credentials are those of who called listen(2).
            Ok(stream) => {
                let pid = Peer::of(&stream).map_err(|error| self.failed(error))?.pid;
                Err(SocketFileError::Taken { who, pid, path: path.to_owned(), remedy })
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(|error| self.failed(error))
            }
            Err(error) => Err(self.failed(error)),
        }
    }
}
