//! The buffers of a chain as pieces of guest RAM, in order, so that one system call can read or write them all.
//!
//! A driver may cut a message into buffers in any way (Virtual I/O Device 1.2, section 2.7.4), so headers are found
//! by their offset and may lie across pieces.

use virtio_queue::desc::split::Descriptor;
use vm_memory::GuestMemoryBackend as _;

use super::BrokenQueue;
use crate::kvm::guest_memory::GuestView;
pub use crate::sys::vectored::{PIECES_MAX, Piece};

/// Adds the buffers to `into`, and returns their total length in bytes.
///
/// # Errors
/// [`BrokenQueue`] where a buffer is not within RAM, or where there are more pieces than [`PIECES_MAX`],
/// empty buffers included.
pub fn collect<'a>(
    buffers: impl Iterator<Item = Descriptor>,
    view: &'a GuestView,
    into: &mut Vec<Piece<'a>>,
) -> Result<usize, BrokenQueue> {
    let (before, mut bytes) = (into.len(), 0);
    for (number, buffer) in buffers.enumerate() {
        // A buffer may lie across ranges of RAM, and then consists of several pieces.
        for piece in view.get_slices(buffer.addr(), buffer.len() as usize) {
            let piece = piece.map_err(virtio_queue::Error::GuestMemory)?;
            bytes += piece.len();
            into.push(piece);
        }
        if number >= PIECES_MAX || into.len() - before > PIECES_MAX {
            return Err(virtio_queue::Error::InvalidChain.into());
        }
    }
    Ok(bytes)
}

/// Copies bytes from an offset, as far as the pieces reach, and returns their number.
pub fn read_at(pieces: &[Piece<'_>], offset: usize, to: &mut [u8]) -> usize {
    let mut done = 0;
    for piece in from(pieces, offset) {
        done += piece.copy_to(&mut to[done..]);
    }
    done
}

/// Copies `bytes` to an offset, as far as the pieces reach, and returns their number. Written pages are logged.
pub fn write_at(pieces: &[Piece<'_>], offset: usize, bytes: &[u8]) -> usize {
    let mut done = 0;
    for piece in from(pieces, offset) {
        let here = piece.len().min(bytes.len() - done);
        piece.copy_from(&bytes[done..done + here]);
        done += here;
        if done == bytes.len() {
            break;
        }
    }
    done
}

/// The pieces from an offset on.
pub fn from<'a>(pieces: &[Piece<'a>], offset: usize) -> impl Iterator<Item = Piece<'a>> {
    let mut skip = offset;
    pieces.iter().filter_map(move |piece| {
        let here = skip.min(piece.len());
        skip -= here;
        piece.offset(here).ok().filter(|rest| !rest.is_empty())
    })
}

/// The first `bytes` of the pieces.
pub fn up_to<'a>(pieces: impl Iterator<Item = Piece<'a>>, bytes: usize) -> impl Iterator<Item = Piece<'a>> {
    let mut left = bytes;
    pieces.map_while(move |piece| {
        let here = left.min(piece.len());
        left -= here;
        (here > 0).then(|| piece.subslice(0, here).ok())?
    })
}
