//! Open files that a client passes to a server with its request (`SCM_RIGHTS`, unix(7)): a VM in its sandbox writes
//! only into files that it was given, and never needs a path.
//!
//! A server that takes no files reads its connections by read(2), with which the kernel closes passed files.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Most files with one request: those of a snapshot, and two for each of the folders that it is based on.
pub const FILES_MAX: usize = 64;

/// Sends the first bytes of a request with open files. Returns the number of bytes sent, at least one.
///
/// # Errors
/// The error of `sendmsg(2)`.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let is_fit = files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files));
    if !is_fit || files.len() > FILES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more files than a request may have"));
    }
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Receives bytes, and appends the files that came with them. The kernel closes files for which there is no space.
pub(crate) fn receive(stream: &UnixStream, buffer: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_arrive_with_the_bytes_and_are_closed_by_a_plain_read() {
        let (client, server) = UnixStream::pair().expect("a pair of sockets");
        let (mut reader, writer) = io::pipe().expect("a pipe");
        assert_eq!(send(&client, b"a", &[writer.as_fd()]).expect("there is room"), 1);
        let (mut buffer, mut files) = ([0; 8], Vec::new());
        assert_eq!(receive(&server, &mut buffer, &mut files).expect("a byte"), 1);
        File::from(files.pop().expect("a file")).write_all(b"through").expect("the pipe is open");

        send(&client, b"b", &[writer.as_fd()]).expect("there is room");
        assert_eq!((&server).read(&mut buffer).expect("a byte"), 1);
        drop(writer);
        let mut said = String::new();
        reader.read_to_string(&mut said).expect("all its writers are closed");
        assert_eq!(said, "through");
    }

    #[test]
    fn more_files_than_a_request_may_have_are_refused_before_they_are_sent() {
        let (client, _server) = UnixStream::pair().expect("a pair of sockets");
        let files = [client.as_fd(); FILES_MAX + 1];
        assert_eq!(send(&client, b"a", &files).expect_err("too many").kind(), io::ErrorKind::InvalidInput);
    }
}
