//! A request as its driver laid it out, checked before any part of it is executed.
//!
//! ```text
//!   the device reads                          the device writes
//!   ┌──────┬──────────┬────────┬─────────┐   ┌─────────┬────────┐
//!   │ type │ reserved │ sector │  data   │   │  data   │ status │      in whatever buffers the driver likes (2.7.4)
//!   └──────┴──────────┴────────┴─────────┘   └─────────┴────────┘
//!     4      4          8                                 1
//! ```

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{QUEUE_SIZES, SECTOR_BYTES, ZEROED_SECTORS_MAX, ZEROED_SEGMENTS_MAX};
use crate::devices::virtio::queue::Chain;
use crate::kvm::guest_memory::GuestView;

const HEADER_BYTES: usize = 16;
/// Size of a segment of a DISCARD or WRITE_ZEROES: sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;

/// A piece of memory that a chain names; its address may be anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// First address of the piece.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
}

/// A sequence of buffers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Buffers(Vec<Buffer>);

/// The operation that the driver requests.
#[derive(Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read from this position into these buffers.
    Read(u64, Buffers),
    /// Write these buffers to this position.
    Write(u64, Buffers),
    /// Make all earlier writes durable.
    Flush,
    /// Put the disk's name into these buffers.
    Id(Buffers),
    /// Give back these pieces of the disk.
    Discard(Vec<Range>),
    /// Make these pieces zero.
    WriteZeroes(Vec<Range>),
}

/// A piece of the disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it may become a hole.
    pub may_unmap: bool,
}

/// The reasons why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The chain has no whole header, no end, or no whole sectors.
    Malformed,
    /// The request reaches beyond the end of the disk.
    BeyondEnd,
    /// The disk is read-only.
    ReadOnly,
    /// The kind of request, or a flag, is unknown.
    Unsupported,
}

impl Refusal {
    /// Status byte for the driver (5.2.6).
    pub fn status(self) -> u8 {
        match self {
            Refusal::Unsupported => VIRTIO_BLK_S_UNSUPP as u8,
            Refusal::Malformed | Refusal::BeyondEnd | Refusal::ReadOnly => VIRTIO_BLK_S_IOERR as u8,
        }
    }
}

/// Status byte of a completed request.
pub const OK: u8 = VIRTIO_BLK_S_OK as u8;
/// Status byte of a failed request.
pub const FAILED: u8 = VIRTIO_BLK_S_IOERR as u8;

/// The limits that a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Whether it cannot be written.
    pub is_read_only: bool,
    /// Whether the driver accepted DISCARD.
    pub has_discard: bool,
    /// Whether it accepted WRITE_ZEROES.
    pub has_write_zeroes: bool,
}

/// A request and the place of its answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Requested operation, or the reason of its refusal.
    pub operation: Result<Operation, Refusal>,
    /// Address of the status byte; `None` where the chain has no writable byte.
    pub status: Option<u64>,
}

impl Request {
    /// Reads and checks a request. It trusts nothing in the chain, and looks at no more buffers than the
    /// queue has entries.
    pub fn read(chain: Chain<'_>, limits: Limits) -> Request {
        let memory = chain.memory();
        let ChainBuffers { readable, mut writable, is_whole } = ChainBuffers::of(chain.clone());
        let status = writable.split_last_byte();
        let operation = match (is_whole, status) {
            (true, Some(_)) => operation(memory, readable, writable, limits),
            _ => Err(Refusal::Malformed),
        };
        Request { operation, status }
    }
}

/// The buffers of a chain.
struct ChainBuffers {
    readable: Buffers,
    writable: Buffers,
    /// Whether the chain has an end, within bounds, and no readable buffer behind a writable one (2.7.4.2).
    is_whole: bool,
}

impl ChainBuffers {
    fn of(chain: Chain<'_>) -> ChainBuffers {
        let most = usize::from(QUEUE_SIZES[0]);
        let (mut readable, mut writable) = (Buffers::default(), Buffers::default());
        // If the iteration stops at a descriptor with a successor, the chain has a loop or an invalid descriptor.
        let (mut has_end, mut is_in_order, mut count) = (false, true, 0);
        for descriptor in chain.take(most + 1) {
            count += 1;
            has_end = !descriptor.has_next();
            let buffer = Buffer { address: descriptor.addr().0, bytes: descriptor.len() };
            if descriptor.is_write_only() {
                writable.0.push(buffer);
            } else {
                is_in_order &= writable.0.is_empty();
                readable.0.push(buffer);
            }
        }
        ChainBuffers { readable, writable, is_whole: has_end && is_in_order && count <= most }
    }
}

impl Buffers {
    /// Total length in bytes. A chain has less than 4 GiB (2.7.5.2), which its iterator guarantees.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|buffer| u64::from(buffer.bytes)).sum()
    }

    /// The buffers from a byte on, each shortened to its remaining part.
    pub fn from(&self, mut skipped: u64) -> impl Iterator<Item = Buffer> {
        self.0.iter().filter_map(move |buffer| {
            let skip = skipped.min(u64::from(buffer.bytes));
            skipped -= skip;
            let bytes = buffer.bytes - skip as u32;
            (bytes > 0).then_some(Buffer { address: buffer.address.wrapping_add(skip), bytes })
        })
    }

    /// Takes the last byte off, and returns its address.
    fn split_last_byte(&mut self) -> Option<u64> {
        while self.0.last().is_some_and(|buffer| buffer.bytes == 0) {
            self.0.pop();
        }
        let last = self.0.last_mut()?;
        last.bytes -= 1;
        last.address.checked_add(u64::from(last.bytes))
    }

    /// Takes the first `N` bytes off.
    fn split_first<const N: usize>(&mut self, memory: &GuestView) -> Option<[u8; N]> {
        let mut data = [0; N];
        self.copy_to(memory, &mut data)?;
        self.0 = self.from(N as u64).collect();
        Some(data)
    }

    /// Fills `data` with the first bytes; `None` where there are fewer, or where they lie outside RAM.
    fn copy_to(&self, memory: &GuestView, data: &mut [u8]) -> Option<()> {
        let mut filled = 0;
        for buffer in self.from(0) {
            let piece = (buffer.bytes as usize).min(data.len() - filled);
            memory.read_slice(&mut data[filled..filled + piece], GuestAddress(buffer.address)).ok()?;
            filled += piece;
            if filled == data.len() {
                return Some(());
            }
        }
        data.is_empty().then_some(())
    }
}

fn operation(
    memory: &GuestView,
    mut readable: Buffers,
    writable: Buffers,
    limits: Limits,
) -> Result<Operation, Refusal> {
    let header: [u8; HEADER_BYTES] = readable.split_first(memory).ok_or(Refusal::Malformed)?;
    let kind = word(&header[..4]);
    let sector = double(&header[8..]);
    match kind {
        VIRTIO_BLK_T_IN => Ok(Operation::Read(limits.position(sector, writable.bytes())?, writable)),
        VIRTIO_BLK_T_OUT => {
            limits.check_writable()?;
            Ok(Operation::Write(limits.position(sector, readable.bytes())?, readable))
        }
        VIRTIO_BLK_T_FLUSH => Ok(Operation::Flush),
        VIRTIO_BLK_T_GET_ID => Ok(Operation::Id(writable)),
        VIRTIO_BLK_T_DISCARD if limits.has_discard => Ok(Operation::Discard(ranges(memory, &readable, limits, false)?)),
        VIRTIO_BLK_T_WRITE_ZEROES if limits.has_write_zeroes => {
            Ok(Operation::WriteZeroes(ranges(memory, &readable, limits, true)?))
        }
        _ => Err(Refusal::Unsupported),
    }
}

/// Reads the segments of a DISCARD or WRITE_ZEROES. Unknown flags, and the unmap flag of a DISCARD, are
/// not supported (5.2.6.2).
fn ranges(memory: &GuestView, data: &Buffers, limits: Limits, can_unmap: bool) -> Result<Vec<Range>, Refusal> {
    const UNMAP: u32 = virtio_bindings::virtio_blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
    limits.check_writable()?;
    let bytes = usize::try_from(data.bytes()).unwrap_or(usize::MAX);
    if bytes == 0 || !bytes.is_multiple_of(RANGE_BYTES) || bytes / RANGE_BYTES > ZEROED_SEGMENTS_MAX as usize {
        return Err(Refusal::Malformed);
    }
    let mut raw = vec![0; bytes];
    data.copy_to(memory, &mut raw).ok_or(Refusal::Malformed)?;
    let range = |raw: &[u8]| {
        let (sector, sectors, flags) = (double(&raw[..8]), word(&raw[8..12]), word(&raw[12..]));
        if flags & !UNMAP != 0 || flags & UNMAP != 0 && !can_unmap {
            return Err(Refusal::Unsupported);
        }
        if sectors > ZEROED_SECTORS_MAX {
            return Err(Refusal::Malformed);
        }
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        Ok(Range { offset: limits.position(sector, bytes)?, bytes, may_unmap: flags & UNMAP != 0 })
    };
    raw.chunks_exact(RANGE_BYTES).map(range).collect()
}

impl Limits {
    /// Byte position of a sector, if it and `bytes` from there on are on the disk.
    fn position(self, sector: u64, bytes: u64) -> Result<u64, Refusal> {
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(Refusal::Malformed);
        }
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Refusal::BeyondEnd)?;
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if is_inside { Ok(offset) } else { Err(Refusal::BeyondEnd) }
    }

    fn check_writable(self) -> Result<(), Refusal> {
        if self.is_read_only { Err(Refusal::ReadOnly) } else { Ok(()) }
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("the caller cuts four bytes"))
}

fn double(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("the caller cuts eight bytes"))
}
