//! The host's side: a Unix socket that host programs connect to, and others, named after it, that the guest
//! is connected to.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
#[cfg(test)]
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

/// The socket that programs of the host connect to. It is removed when this is dropped.
#[derive(Debug)]
pub struct HostSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket, so that no other file is removed.
    file: (u64, u64),
    /// Whether the next program finds no descriptor left.
    #[cfg(test)]
    pub(super) is_full: Arc<AtomicBool>,
}

/// The reasons why the socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum HostSocketError {
    /// Another program listens there.
    #[error("cannot create the socket {0}: another program listens there; use one path per guest")]
    Taken(PathBuf),
    /// The path exists and is not a socket.
    #[error("cannot create the socket {0}: the path exists and is not a socket; remove it or use another")]
    NoSocket(PathBuf),
    /// The kernel refused a call.
    #[error("cannot create the socket {path}: {source}")]
    Host {
        /// Path of the socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl HostSocket {
    /// Listens at `path`. A socket there without a listener is replaced.
    ///
    /// # Errors
    /// [`HostSocketError`]; the existing file stays.
    pub fn listen(path: &Path) -> Result<HostSocket, HostSocketError> {
        let host = |source| HostSocketError::Host { path: path.to_owned(), source };
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(host(error)),
            Ok(there) if !there.file_type().is_socket() => return Err(HostSocketError::NoSocket(path.to_owned())),
            Ok(_) => match dial(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(host)?
                }
                Ok(_) => return Err(HostSocketError::Taken(path.to_owned())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(HostSocketError::Taken(path.to_owned()));
                }
                Err(error) => return Err(host(error)),
            },
        }
        let listener = UnixListener::bind(path).map_err(host)?;
        let is_ready = listener.set_nonblocking(true).and_then(|()| path.symlink_metadata());
        let file = is_ready.inspect_err(|_| drop(std::fs::remove_file(path))).map_err(host)?;
        Ok(HostSocket {
            listener,
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
            #[cfg(test)]
            is_full: Arc::default(),
        })
    }

    /// Accepts the next program that has connected. Neither this call nor the accepted socket blocks.
    ///
    /// # Errors
    /// The kernel's error, `WouldBlock` among them.
    pub fn accept(&self) -> io::Result<UnixStream> {
        #[cfg(test)]
        if self.is_full.swap(false, Ordering::Relaxed) {
            return Err(nix::Error::EMFILE.into());
        }
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }

    /// Connects to the host program that waits for the guest's connections to `port`: at the path
    /// with `_PORT` appended.
    ///
    /// # Errors
    /// The kernel's error; `WouldBlock` where the program's backlog is full.
    pub fn dial_port(&self, port: u32) -> io::Result<UnixStream> {
        let mut path = OsString::from(&self.path);
        path.push(format!("_{port}"));
        dial(Path::new(&path))
    }
}

impl AsRawFd for HostSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}

impl Drop for HostSocket {
    fn drop(&mut self) {
        if self.path.symlink_metadata().is_ok_and(|file| (file.dev(), file.ino()) == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Connects without waiting; `UnixStream::connect` would wait where the other side is slow to accept.
fn dial(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let end: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(end.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(UnixStream::from(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_with_a_listener_is_refused_and_one_without_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        let first = HostSocket::listen(&path).unwrap();
        assert!(matches!(HostSocket::listen(&path), Err(HostSocketError::Taken(_))));
        drop(first);
        assert!(!path.exists(), "the socket is removed at the end");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a listener of the standard library leaves its socket behind");
        drop(HostSocket::listen(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_not_a_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(HostSocket::listen(&path), Err(HostSocketError::NoSocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        let absent = folder.path().join("no-folder/guest");
        assert!(HostSocket::listen(&absent).unwrap_err().to_string().starts_with("cannot create the socket "));
    }

    #[test]
    fn a_file_that_replaced_the_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        let socket = HostSocket::listen(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(socket);
        assert!(path.exists());
    }
}
