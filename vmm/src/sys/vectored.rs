//! `readv(2)` into pieces of guest RAM and `writev(2)` from them: a frame or a message goes between a file descriptor and RAM in one call and
//! without a copy of ours. `vm-memory` reads into one piece at a time, which splits what must stay whole.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::Bitmap;
use vm_memory::volatile_memory::PtrGuardMut;

use crate::dma::log::DeviceLogSlice;

/// Some bytes of guest RAM that lie together on both sides.
pub type Piece<'a> = VolatileSlice<'a, DeviceLogSlice<'a>>;

/// The most pieces of one call: `UIO_MAXIOV` (include/uapi/linux/uio.h), less one for what does not fit the others.
pub const PIECES_MAX: usize = 1023;

/// Reads once: fills `pieces` in their order, then `spill`. How many bytes there were; pages written are in the log.
///
/// # Errors
/// The kernel's, `WouldBlock` among them.
///
/// # Panics
/// Where there are more than [`PIECES_MAX`] pieces.
pub fn read(from: BorrowedFd<'_>, pieces: &[Piece<'_>], spill: &mut [u8]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, mut vectors) = vectors(pieces);
    vectors.push(libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
    // SAFETY: each vector but the last is mapped guest RAM, kept so by the view that the pieces borrow, and nobody has references into it;
    // the last is a slice that is ours alone. The kernel writes within their lengths. The descriptor is open while it is borrowed.
    let read = unsafe { libc::readv(from.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error());
    match &read {
        Ok(bytes) => mark(pieces, *bytes),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        // It may have failed in the middle.
        Err(_) => mark(pieces, usize::MAX),
    }
    read
}

/// Writes once: `pieces` in their order. How many bytes were taken.
///
/// # Errors
/// The kernel's, `WouldBlock` among them.
///
/// # Panics
/// Where there are more than [`PIECES_MAX`] pieces.
pub fn write(to: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, vectors) = vectors(pieces);
    // SAFETY: as in `read`; the kernel only reads, and that the guest may write there meanwhile changes what is sent and nothing else.
    let written = unsafe { libc::writev(to.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// The same to a socket, without `SIGPIPE` where nobody reads any more.
///
/// # Errors
/// As [`write()`].
///
/// # Panics
/// As [`write()`].
pub fn send(to: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, mut vectors) = vectors(pieces);
    // SAFETY: all zeroes is a message without an address, buffers and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), vectors.len());
    // SAFETY: as in `write`; the message has no pointers but those to the vectors, which live until the call returns.
    let sent = unsafe { libc::sendmsg(to.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// The guards keep the pointers good.
fn vectors(pieces: &[Piece<'_>]) -> (Vec<PtrGuardMut>, Vec<libc::iovec>) {
    let guards: Vec<_> = pieces.iter().map(Piece::ptr_guard_mut).collect();
    let mut vectors = Vec::with_capacity(pieces.len() + 1);
    vectors.extend(guards.iter().map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() }));
    (guards, vectors)
}

/// The first bytes of the pieces were written.
fn mark(pieces: &[Piece<'_>], mut bytes: usize) {
    for piece in pieces {
        if bytes == 0 {
            return;
        }
        let here = bytes.min(piece.len());
        piece.bitmap().mark_dirty(0, here);
        bytes -= here;
    }
}
