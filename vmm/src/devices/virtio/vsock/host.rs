//! The host's side: a Unix socket that programs of the host connect to, and others, named after it, that the guest is connected to.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

/// The socket that programs of the host connect to. It is removed when this is dropped.
#[derive(Debug)]
pub struct HostSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode, so that nothing but it is removed.
    file: (u64, u64),
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum HostSocketError {
    /// Somebody listens there.
    #[error("{0} is another program's socket, which listens: name a path of its own for each guest")]
    Taken(PathBuf),
    /// There is something else.
    #[error("{0} is there already and is no socket: it is not replaced")]
    NoSocket(PathBuf),
    /// The kernel said no.
    #[error("cannot make the socket {path}: {source}")]
    Host {
        /// Its path.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl HostSocket {
    /// Listens at `path`. A socket there that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// [`HostSocketError`]; what is there stays.
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
        Ok(HostSocket { listener, path: path.to_owned(), file: (file.dev(), file.ino()) })
    }

    /// The next program that has connected; neither does waiting for it, nor does it wait.
    ///
    /// # Errors
    /// The kernel's, `WouldBlock` among them.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }

    /// Connects to the program of the host that waits for connections of the guest to `port`: at the path with `_PORT` behind it.
    ///
    /// # Errors
    /// The kernel's; `WouldBlock` where too many wait there.
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

/// Connects without waiting, which `UnixStream::connect` does where the other side is slow to accept.
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
    fn a_socket_that_somebody_listens_at_is_refused_and_a_dead_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        let first = HostSocket::listen(&path).unwrap();
        assert!(matches!(HostSocket::listen(&path), Err(HostSocketError::Taken(_))));
        drop(first);
        assert!(!path.exists(), "it is removed at the end");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a listener of others leaves it behind");
        drop(HostSocket::listen(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(HostSocket::listen(&path), Err(HostSocketError::NoSocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        let absent = folder.path().join("no-folder/guest");
        assert!(HostSocket::listen(&absent).unwrap_err().to_string().starts_with("cannot make the socket "));
    }

    #[test]
    fn what_took_the_place_of_the_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest");
        let socket = HostSocket::listen(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(socket);
        assert!(path.exists());
    }
}
