//! A small driver of a virtio disk: it keeps some requests in flight and polls (Virtual I/O Device 1.2, 5.2).
//!
//! ```text
//!   words   │ queue │ headers, 2 words per slot │ status, a word per slot │
//!   slot s  header ─▶ data ─▶ status      one request at a time, always in the same descriptors
//! ```

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Platform;
use crate::virtio::{BROKEN, Buffer, Device, Fault, Kind as DeviceKind, Queue, queue_words};

/// Number of requests in flight at once.
pub const SLOTS: usize = 16;
/// Entries of the queue: a power of two that holds three descriptors for each slot.
const ENTRIES: u64 = 64;
const _: () = assert!(3 * SLOTS as u64 <= ENTRIES);

/// Offset of the parts behind the ring, in words.
const HEADERS: usize = queue_words(ENTRIES);
const STATUS: usize = HEADERS + 2 * SLOTS;
/// Words of the queue, the headers and the status.
pub const QUEUE_WORDS: usize = 512;
const _: () = assert!(STATUS + SLOTS <= QUEUE_WORDS);

/// Bytes of a sector, the unit of all positions.
pub const SECTOR_BYTES: u64 = 512;
const HEADER_BYTES: u32 = 16;

/// FLUSH, so that the device need not make each write durable by itself (5.2.6.2).
const FEATURES: u32 = 1 << 9;

const FAILED: Fault = "the disk failed a request";

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read from disk to memory.
    Read = 0,
    /// Write from memory to disk.
    Write = 1,
    /// Make earlier writes durable.
    Flush = 4,
}

/// One request to the disk.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Kind of the request.
    pub kind: Kind,
    /// Number of the first sector.
    pub sector: u64,
    /// Address in memory.
    pub address: u64,
    /// Length in bytes, whole sectors.
    pub bytes: u32,
}

/// A running disk.
pub struct Disk<'m> {
    queue: Queue<'m>,
    /// [`QUEUE_WORDS`] of the arena.
    words: &'m [AtomicU64],
    address: u64,
    sectors: u64,
}

impl<'m> Disk<'m> {
    /// Starts the machine's first disk, with its queue in these words, the first of which is at `address`.
    ///
    /// # Errors
    /// [`Fault`] if there is no disk, or if it does not start.
    pub fn start(platform: &'m dyn Platform, words: &'m [AtomicU64], address: u64) -> Result<Self, Fault> {
        let device = Device::begin(platform, DeviceKind::Disk, FEATURES)?;
        let queue = device.queue(0, ENTRIES, words, address)?;
        device.start()?;
        let sectors = u64::from(device.configuration(0)) | u64::from(device.configuration(4)) << 32;
        Ok(Self { queue, words: &words[..QUEUE_WORDS], address, sectors })
    }

    /// Size of the disk in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Carries out all of these requests, several at once and in any order.
    ///
    /// # Errors
    /// [`Fault`] if the disk fails a request, or answers one that was not made; other requests may have been done.
    pub fn carry_out(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<(), Fault> {
        let mut requests = requests.into_iter().fuse();
        let mut is_busy = [false; SLOTS];
        loop {
            while let Some(slot) = is_busy.iter().position(|busy| !busy)
                && let Some(request) = requests.next()
            {
                self.offer(slot, request);
                is_busy[slot] = true;
            }
            if is_busy == [false; SLOTS] {
                return Ok(());
            }
            let head = self.queue.wait()?.head;
            let slot = is_busy.get_mut((head / 3) as usize).filter(|_| head.is_multiple_of(3)).ok_or(BROKEN)?;
            if !core::mem::take(slot) {
                return Err(BROKEN);
            }
            if self.words[STATUS + (head / 3) as usize].load(Ordering::Relaxed) as u8 != 0 {
                return Err(FAILED);
            }
        }
    }

    fn offer(&mut self, slot: usize, Request { kind, sector, address, bytes }: Request) {
        let first = 3 * slot as u64;
        let header = HEADERS + 2 * slot;
        let status = STATUS + slot;
        let place = |word: usize| self.address + 8 * word as u64;
        self.words[header].store(kind as u64, Ordering::Relaxed);
        self.words[header + 1].store(sector, Ordering::Relaxed);
        self.words[status].store(0xff, Ordering::Relaxed);
        // Without data the header links directly to the status.
        let second = if bytes == 0 { first + 2 } else { first + 1 };
        let of_header = Buffer { address: place(header), bytes: HEADER_BYTES, is_written: false };
        let of_data = Buffer { address, bytes, is_written: kind == Kind::Read };
        let of_status = Buffer { address: place(status), bytes: 1, is_written: true };
        self.queue.describe(first, of_header, Some(second));
        self.queue.describe(first + 1, of_data, Some(first + 2));
        self.queue.describe(first + 2, of_status, None);
        self.queue.offer(first);
    }
}
