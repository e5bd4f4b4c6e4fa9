//! A socket's file: whether another process listens there already, and which users may connect.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
#[cfg(test)]
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};

use crate::peer::Peer;

/// Reason for a missing socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketFileError {
    /// Another process listens there.
    #[error("cannot listen at {}: {owner} (pid {pid}) is listening there; stop it first, or {remedy}", path.display())]
    Taken {
        /// Program that most likely listens there.
        owner: &'static str,
        /// Process id of the listener.
        pid: u32,
        /// Path of the socket.
        path: PathBuf,
        /// Way to choose another path.
        remedy: &'static str,
    },
    /// Another process listens there and accepts no connection.
    #[error(
        "cannot listen at {}: {owner} is listening there and accepts no connection; end it first, or {remedy}",
        path.display()
    )]
    Hangs {
        /// Program that most likely listens there.
        owner: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// Way to choose another path.
        remedy: &'static str,
    },
    /// Another kind of file is there.
    #[error("cannot listen at {}: it is not a socket; move it away, or {remedy}", path.display())]
    NoSocket {
        /// Path of that file.
        path: PathBuf,
        /// Way to choose another path.
        remedy: &'static str,
    },
    /// The kernel refused the socket.
    #[error("cannot listen at {}: {source}; {remedy}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Way to choose another path.
        remedy: &'static str,
        /// Error from the kernel.
        source: io::Error,
    },
}

/// A socket to be created.
#[derive(Clone, Copy, Debug)]
pub struct SocketFile<'a> {
    /// Path of the socket.
    pub path: &'a Path,
    /// Permission bits of the file.
    pub mode: u32,
    /// Group of the file; `None`: that of this process.
    pub gid: Option<u32>,
    /// Whether to create a missing folder.
    pub makes_folder: bool,
    /// Program that would listen there already, in words.
    pub owner: &'static str,
    /// Way to choose another path, in words.
    pub remedy: &'static str,
}

impl SocketFile<'_> {
    /// Binds a socket that only the intended users may connect to.
    ///
    /// Until its mode is set, the new file has what the umask leaves. For a service that is no write permission for
    /// other users, and connecting takes write permission (unix(7)).
    ///
    /// # Errors
    /// [`SocketFileError`], which names the process that listens there already.
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

    /// The kernel's error, with the path.
    pub fn failed(&self, source: io::Error) -> SocketFileError {
        SocketFileError::Socket { path: self.path.to_owned(), remedy: self.remedy, source }
    }

    /// Removes a socket without a listener.
    fn clear(&self) -> Result<(), SocketFileError> {
        let SocketFile { path, owner, remedy, .. } = *self;
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(SocketFileError::NoSocket { path: path.to_owned(), remedy });
            }
            Ok(_) => {}
        }
        match connect_within(path, None) {
            // A listener's credentials are those of the process that called listen(2).
            Ok(stream) => {
                let pid = Peer::of(&stream).map_err(|error| self.failed(error))?.pid;
                Err(SocketFileError::Taken { owner, pid, path: path.to_owned(), remedy })
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(|error| self.failed(error))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(SocketFileError::Hangs { owner, path: path.to_owned(), remedy })
            }
            Err(error) => Err(self.failed(error)),
        }
    }
}

/// The file of a socket that this process has bound.
#[derive(Debug)]
pub struct OwnSocket {
    path: PathBuf,
    /// Device and number of the file, which no other file has while the socket is open.
    identity: Option<(u64, u64)>,
}

impl OwnSocket {
    /// The file that [`SocketFile::bind`] has just made at `path`.
    pub fn at(path: &Path) -> OwnSocket {
        OwnSocket { path: path.to_owned(), identity: identity(path) }
    }

    /// Removes the file. Another process may have bound a socket of its own there since, after a user removed this
    /// one: that stays.
    pub fn remove(self) {
        if self.identity.is_none() || identity(&self.path) != self.identity {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::error!("cannot remove {}: {error}", self.path.display());
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Connects to a socket. A listener with a full queue accepts no connection, and connect(2) alone would wait for it
/// without a bound. The error is then [`io::ErrorKind::WouldBlock`], after `timeout`; `None`: at once.
pub(crate) fn connect_within(path: &Path, timeout: Option<Duration>) -> io::Result<UnixStream> {
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(socket);
    match timeout {
        // It also bounds connect(2) (socket(7)).
        Some(_) => stream.set_write_timeout(timeout)?,
        None => stream.set_nonblocking(true)?,
    }
    let address = UnixAddr::new(path)?;
    loop {
        match socket::connect(stream.as_raw_fd(), &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A listener with a full queue, and the connection in it.
#[cfg(test)]
pub(crate) fn full_listener(path: &Path) -> (OwnedFd, UnixStream) {
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(path).expect("a short path")).expect("bound");
    socket::listen(&socket, socket::Backlog::new(0).expect("a backlog")).expect("it listens");
    let waiting = UnixStream::connect(path).expect("the queue has one place");
    (socket, waiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_that_accepts_no_connection_keeps_its_socket_and_delays_no_start() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.sock");
        let (_listener, _waiting) = full_listener(&path);
        let (owner, remedy) = ("another wideleafd", "choose another path");
        let file = SocketFile { path: &path, mode: 0o600, gid: None, makes_folder: false, owner, remedy };
        let error = file.bind().expect_err("one listens already").to_string();
        assert!(error.contains(": another wideleafd is listening there") && error.ends_with(remedy), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn a_socket_that_another_process_has_put_in_its_place_is_not_removed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.sock");
        let bind = || {
            let (owner, remedy) = ("another wideleafd", "choose another path");
            let file = SocketFile { path: &path, mode: 0o600, gid: None, makes_folder: false, owner, remedy };
            (file.bind().expect("the path is free"), OwnSocket::at(&path))
        };
        let (_first, of_first) = bind();
        fs::remove_file(&path).expect("it is there");
        of_first.remove();
        let (_second, of_second) = bind();
        fs::rename(&path, folder.path().join("elsewhere")).expect("it is there");
        let (_third, of_third) = bind();
        of_second.remove();
        assert!(path.exists());
        of_third.remove();
        assert!(!path.exists());
    }
}
