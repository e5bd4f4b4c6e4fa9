//! Files straight into guest RAM and out of it: one system call for many buffers, nothing copied in between.
//!
//! `vm-memory` reads and writes one buffer at a time at a file's own position. Disks want many, at a position of their own.
#![expect(
    unsafe_code,
    reason = "guest memory is never a slice of bytes, and nix takes nothing else for preadv and pwritev"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::Bitmap;

use crate::dma::log::DeviceLogSlice;

/// A piece of guest RAM.
pub type GuestSlice<'a> = VolatileSlice<'a, DeviceLogSlice<'a>>;

/// Most slices of one call: the kernel's `UIO_MAXIOV`.
pub const SLICES_MAX: usize = 1024;

/// Reads from `offset` of the file into the slices, one after another, and logs what was written. How many bytes there were: fewer than there
/// is room for at the file's end, or where a buffer cannot be reached.
///
/// # Errors
/// The kernel's (`preadv(2)`); then the slices may have been written in part.
pub fn read_at(file: &File, slices: &[GuestSlice<'_>], offset: u64) -> io::Result<usize> {
    let offset = offset_of(offset)?;
    let vectors = vectors(slices);
    // SAFETY: each vector is the whole of a slice, which is mapped and writable for as long as its lifetime; nothing in this process has a
    // reference into guest RAM; there are at most SLICES_MAX vectors, and the descriptor is open.
    let read = unsafe { libc::preadv(file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, offset) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error());
    // A call that failed may have written some of it all the same.
    let mut left = *read.as_ref().unwrap_or(&usize::MAX);
    for slice in slices {
        let written = left.min(slice.len());
        slice.bitmap().mark_dirty(0, written);
        left -= written;
    }
    read
}

/// Writes the slices, one after another, to `offset` of the file. How many bytes were written.
///
/// # Errors
/// The kernel's (`pwritev(2)`).
pub fn write_at(file: &File, slices: &[GuestSlice<'_>], offset: u64) -> io::Result<usize> {
    let offset = offset_of(offset)?;
    let vectors = vectors(slices);
    // SAFETY: as for reading; the kernel only reads what the vectors name, and the guest may change it meanwhile.
    let written = unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, offset) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

fn vectors(slices: &[GuestSlice<'_>]) -> Vec<libc::iovec> {
    let vector =
        |slice: &GuestSlice<'_>| libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() };
    slices.iter().take(SLICES_MAX).map(vector).collect()
}

fn offset_of(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
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
    fn what_is_read_is_where_it_belongs_and_in_the_log() {
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
    fn what_is_written_comes_from_all_slices() {
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
