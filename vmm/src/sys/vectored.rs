//! `readv(2)` into pieces of guest RAM and `writev(2)` from them, and the same at a position of a file. A frame,
//! a message or a disk's request passes between a file descriptor and RAM in one call and without a copy by the
//! VMM. `vm-memory` reads into one piece at a time, which splits data that must stay whole, and only at the
//! file's current position.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::Bitmap;
use vm_memory::volatile_memory::PtrGuardMut;

use crate::dma::log::DeviceLogSlice;

/// Bytes of guest RAM that are contiguous in the guest and in this process.
pub type Piece<'a> = VolatileSlice<'a, DeviceLogSlice<'a>>;

/// Largest number of pieces in one call: `UIO_MAXIOV` (include/uapi/linux/uio.h), less one for the spill.
pub const PIECES_MAX: usize = 1023;

/// Reads once: fills `pieces` in order, then `spill`. Returns the number of bytes; written pages are logged.
///
/// # Errors
/// The kernel's error, `WouldBlock` among them.
///
/// # Panics
/// If there are more than [`PIECES_MAX`] pieces.
pub fn read(from: BorrowedFd<'_>, pieces: &[Piece<'_>], spill: &mut [u8]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, mut vectors) = vectors(pieces);
    vectors.push(libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
    // SAFETY: each vector but the last is mapped guest RAM, kept so by the view that the pieces borrow, and no Rust
    // reference into it exists; the last is a slice that is ours alone. The kernel writes within their lengths. The
    // descriptor is open while it is borrowed.
    let read = unsafe { libc::readv(from.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) };
    log_read(pieces, result(read))
}

/// Reads once from `offset` of the file: fills `pieces` in order. Returns the number of bytes, which is less than
/// requested at the file's end, or where a piece cannot be reached. Written pages are logged.
///
/// # Errors
/// The kernel's error (`preadv(2)`).
///
/// # Panics
/// As for [`read()`].
pub fn read_at(from: &File, pieces: &[Piece<'_>], offset: u64) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let offset = offset_of(offset)?;
    let (_guards, vectors) = vectors(pieces);
    // SAFETY: as in `read`.
    let read = unsafe { libc::preadv(from.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, offset) };
    log_read(pieces, result(read))
}

/// Writes once: `pieces` in order. Returns the number of bytes that were accepted.
///
/// # Errors
/// The kernel's error, `WouldBlock` among them.
///
/// # Panics
/// If there are more than [`PIECES_MAX`] pieces.
pub fn write(to: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, vectors) = vectors(pieces);
    // SAFETY: as in `read`; the kernel only reads, and that the guest may write there meanwhile changes what is
    // sent and nothing else.
    let written = unsafe { libc::writev(to.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) };
    result(written)
}

/// Writes like [`write()`], to `offset` of a file.
///
/// # Errors
/// The kernel's error (`pwritev(2)`).
///
/// # Panics
/// As for [`write()`].
pub fn write_at(to: &File, pieces: &[Piece<'_>], offset: u64) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let offset = offset_of(offset)?;
    let (_guards, vectors) = vectors(pieces);
    // SAFETY: as in `write`.
    let written = unsafe { libc::pwritev(to.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, offset) };
    result(written)
}

/// Writes like [`write()`] to a socket, without `SIGPIPE` where the other end has closed.
///
/// # Errors
/// As for [`write()`].
///
/// # Panics
/// As for [`write()`].
pub fn send(to: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> io::Result<usize> {
    assert!(pieces.len() <= PIECES_MAX, "{} pieces", pieces.len());
    let (_guards, mut vectors) = vectors(pieces);
    // SAFETY: all zeroes is a message without an address, buffers and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), vectors.len());
    // SAFETY: as in `write`; the message has no pointers but those to the vectors, which live until the call returns.
    let sent = unsafe { libc::sendmsg(to.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    result(sent)
}

/// The vectors of the pieces; the guards keep the pointers valid.
fn vectors(pieces: &[Piece<'_>]) -> (Vec<PtrGuardMut>, Vec<libc::iovec>) {
    let guards: Vec<_> = pieces.iter().map(Piece::ptr_guard_mut).collect();
    let mut vectors = Vec::with_capacity(pieces.len() + 1);
    vectors.extend(guards.iter().map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() }));
    (guards, vectors)
}

/// The result of a call; its error number must still be set.
fn result(bytes: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

fn offset_of(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn log_read(pieces: &[Piece<'_>], read: io::Result<usize>) -> io::Result<usize> {
    match &read {
        Ok(bytes) => mark(pieces, *bytes),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        // The call may have failed midway.
        Err(_) => mark(pieces, usize::MAX),
    }
    read
}

/// Marks the pages of the first bytes as written.
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};
    use std::sync::Arc;

    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    use super::*;
    use crate::kvm::GuestMemory;

    fn memory() -> GuestMemory {
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).unwrap()];
        let ram = GuestRam::map(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
        GuestMemory::new(ram).unwrap()
    }

    #[test]
    fn read_bytes_land_in_their_pieces_and_in_the_log() {
        let memory = Arc::new(memory());
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let view = memory.view();
        let slice = |at: u64, bytes| view.get_slice(GuestAddress(at), bytes).unwrap();
        let read = read_at(&file, &[slice(0x1ffe, 4), slice(0x8000, 3), slice(0x9000, 8)], 2).unwrap();
        assert_eq!(read, 8, "the file ends");
        let mut found = [0; 4];
        view.read_slice(&mut found, GuestAddress(0x1ffe)).unwrap();
        assert_eq!(&found, b"2345");
        view.read_slice(&mut found, GuestAddress(0x8000)).unwrap();
        assert_eq!(&found, b"678\0");
        let log = memory.take_device_log(GpaRange::new(Gpa::new(0), mib(2)).unwrap());
        assert_eq!(log[0], 1 << 1 | 1 << 2 | 1 << 8 | 1 << 9);
    }

    #[test]
    fn a_write_takes_the_bytes_of_all_slices() {
        let memory = memory();
        let mut file = tempfile::tempfile().unwrap();
        let view = memory.view();
        view.write_slice(b"abcd", GuestAddress(0x1ffe)).unwrap();
        let slice = |at: u64, bytes| view.get_slice(GuestAddress(at), bytes).unwrap();
        assert_eq!(write_at(&file, &[slice(0x2000, 2), slice(0x1ffe, 2)], 1).unwrap(), 4);
        let mut text = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut text).unwrap();
        assert_eq!(text, b"\0cdab");
        assert!(write_at(&file, &[slice(0, 1)], u64::MAX).is_err());
    }
}
