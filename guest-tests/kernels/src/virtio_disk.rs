//! A driver of a virtio disk in a few lines: finds it, starts it, keeps some requests under way, and polls (Virtual I/O Device 1.2, 3.1.1 and
//! 4.2). It needs no interrupts, which a guest in ring 3 has not.
//!
//! ```text
//!   queue words  │ descriptors, 3 per slot │ available ring │ used ring │ headers, 2 words per slot │ status, a word per slot │
//!   slot s       header ─▶ data ─▶ status      one request at a time, always in the same descriptors
//! ```
//!
//! All of it are words of the arena: the pages beneath the rings are as much under test as those of the data.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::Platform;

/// Requests under way at once.
pub const SLOTS: usize = 16;
/// Entries of the queue: a power of two that holds three descriptors for each slot.
const ENTRIES: u64 = 64;
const _: () = assert!(3 * SLOTS as u64 <= ENTRIES);

/// Where the parts of the queue begin, in words.
const AVAILABLE: usize = 2 * ENTRIES as usize;
const USED: usize = AVAILABLE + 64;
const HEADERS: usize = USED + 128;
const STATUS: usize = HEADERS + 2 * SLOTS;
/// Words that the queue takes.
pub const QUEUE_WORDS: usize = 512;
const _: () = assert!(STATUS + SLOTS <= QUEUE_WORDS);

/// Bytes of a sector, as all positions are counted.
pub const SECTOR_BYTES: u64 = 512;

/// What is asked of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From disk to memory.
    Read = 0,
    /// From memory to disk.
    Write = 1,
    /// What was written lasts.
    Flush = 4,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What.
    pub kind: Kind,
    /// From which sector on.
    pub sector: u64,
    /// Where in memory.
    pub address: u64,
    /// How much, whole sectors.
    pub bytes: u32,
}

/// A disk at work.
pub struct Disk<'m> {
    platform: &'m dyn Platform,
    registers: u64,
    /// [`QUEUE_WORDS`] of the arena.
    queue: &'m [AtomicU64],
    /// Requests offered and taken back, as the rings count them.
    offered: u16,
    taken: u16,
    sectors: u64,
}

/// What may be wrong with a disk, as one says it to a user.
pub type Fault = &'static str;

const NO_DISK: Fault = "there is no virtio disk: run it as a guest with --disk FILE";
const REFUSED: Fault = "the disk refuses its driver";
const BROKEN: Fault = "the disk needs a reset";
const FAILED: Fault = "the disk failed a request";

// Registers (4.2.2).
const MAGIC: u64 = 0;
const VERSION: u64 = 4;
const DEVICE: u64 = 8;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_HALF: u64 = 0x24;
const QUEUE_SELECTED: u64 = 0x30;
const QUEUE_ENTRIES_MAX: u64 = 0x34;
const QUEUE_ENTRIES: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const DEVICE_STATUS: u64 = 0x70;
const QUEUE_TABLE: u64 = 0x80;
const QUEUE_AVAILABLE: u64 = 0x90;
const QUEUE_USED: u64 = 0xa0;
const CONFIGURATION: u64 = 0x100;

const IS_DRIVEN: u32 = 1 | 2;
const FEATURES_OK: u32 = 8;
const DRIVER_OK: u32 = 4;
const NEEDS_RESET: u32 = 64;
/// FLUSH, so that the device need not make each write last by itself (5.2.6.2).
const FEATURES: [u32; 2] = [1 << 9, 1];

const NEXT: u64 = 1;
const DEVICE_WRITES: u64 = 2;

/// Looks at the used ring between two at the device's status, which are exits to the VMM.
const LOOKS_PER_STATUS: u32 = 1 << 22;

impl<'m> Disk<'m> {
    /// Starts the first disk that the machine has, with its queue in these words, the first of which is at `address`.
    ///
    /// # Errors
    /// [`Fault`] where there is none, or it does not start.
    pub fn start(platform: &'m dyn Platform, queue: &'m [AtomicU64], address: u64) -> Result<Self, Fault> {
        let devices = platform.devices();
        let places = (0..devices.count).map(|index| devices.first + index * devices.stride);
        let is_disk = |at: &u64| {
            let register = |register| platform.read_register(at + register);
            register(MAGIC) == u32::from_le_bytes(*b"virt") && register(VERSION) == 2 && register(DEVICE) == 2
        };
        let registers = places.into_iter().find(is_disk).ok_or(NO_DISK)?;
        let mut disk = Self { platform, registers, queue: &queue[..QUEUE_WORDS], offered: 0, taken: 0, sectors: 0 };
        disk.initialize(address)?;
        Ok(disk)
    }

    /// Its size in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Does all of these requests, some of them at once and in any order.
    ///
    /// # Errors
    /// [`Fault`] where the disk fails one or answers what was not asked; others may have been done.
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
            let slot = self.wait()?;
            if !core::mem::take(&mut is_busy[slot]) {
                return Err(BROKEN);
            }
            if self.queue[STATUS + slot].load(Ordering::Relaxed) as u8 != 0 {
                return Err(FAILED);
            }
        }
    }

    fn read(&self, register: u64) -> u32 {
        self.platform.read_register(self.registers + register)
    }

    fn write(&self, register: u64, value: u32) {
        self.platform.write_register(self.registers + register, value);
    }

    fn initialize(&mut self, address: u64) -> Result<(), Fault> {
        self.write(DEVICE_STATUS, 0);
        self.write(DEVICE_STATUS, IS_DRIVEN);
        for (half, features) in (0..).zip(FEATURES) {
            self.write(DRIVER_FEATURES_HALF, half);
            self.write(DRIVER_FEATURES, features);
        }
        self.write(DEVICE_STATUS, IS_DRIVEN | FEATURES_OK);
        self.write(QUEUE_SELECTED, 0);
        if self.read(DEVICE_STATUS) & FEATURES_OK == 0 || u64::from(self.read(QUEUE_ENTRIES_MAX)) < ENTRIES {
            return Err(REFUSED);
        }
        self.lay_out(address);
        self.write(QUEUE_ENTRIES, ENTRIES as u32);
        for (register, first) in [(QUEUE_TABLE, 0), (QUEUE_AVAILABLE, AVAILABLE), (QUEUE_USED, USED)] {
            let at = address + 8 * first as u64;
            self.write(register, at as u32);
            self.write(register + 4, (at >> 32) as u32);
        }
        self.write(QUEUE_READY, 1);
        self.write(DEVICE_STATUS, IS_DRIVEN | FEATURES_OK | DRIVER_OK);
        self.sectors = u64::from(self.read(CONFIGURATION)) | u64::from(self.read(CONFIGURATION + 4)) << 32;
        if self.read(DEVICE_STATUS) & NEEDS_RESET == 0 { Ok(()) } else { Err(REFUSED) }
    }

    /// The descriptors as they always are: only data and direction change. No interrupts are wanted (2.7.7).
    fn lay_out(&self, address: u64) {
        self.queue.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.queue[AVAILABLE].store(1, Ordering::Relaxed);
        for slot in 0..SLOTS {
            let first = 3 * slot as u64;
            self.describe(first, address + 8 * (HEADERS + 2 * slot) as u64, 16, NEXT, first + 1);
            self.describe(first + 2, address + 8 * (STATUS + slot) as u64, 1, DEVICE_WRITES, 0);
        }
    }

    fn describe(&self, descriptor: u64, address: u64, bytes: u32, flags: u64, next: u64) {
        let words = &self.queue[2 * descriptor as usize..];
        words[0].store(address, Ordering::Relaxed);
        words[1].store(u64::from(bytes) | flags << 32 | next << 48, Ordering::Relaxed);
    }

    fn offer(&mut self, slot: usize, Request { kind, sector, address, bytes }: Request) {
        let first = 3 * slot as u64;
        self.queue[HEADERS + 2 * slot].store(kind as u64, Ordering::Relaxed);
        self.queue[HEADERS + 2 * slot + 1].store(sector, Ordering::Relaxed);
        self.queue[STATUS + slot].store(0xff, Ordering::Relaxed);
        let direction = if kind == Kind::Read { DEVICE_WRITES } else { 0 };
        // Without data the header leads straight to the status.
        let second = if bytes == 0 { first + 2 } else { first + 1 };
        self.describe(first + 1, address, bytes, NEXT | direction, first + 2);
        self.queue[2 * first as usize + 1].store(16 | NEXT << 32 | second << 48, Ordering::Relaxed);
        let entry = u64::from(self.offered) % ENTRIES;
        self.set_half_word(AVAILABLE, 2 + entry, first as u16);
        self.offered = self.offered.wrapping_add(1);
        // The device must not see the index before what it stands for (2.7.13.3).
        fence(Ordering::Release);
        self.set_half_word(AVAILABLE, 1, self.offered);
        // And whether it sleeps is looked at after it could see it (2.7.10).
        fence(Ordering::SeqCst);
        if self.queue[USED].load(Ordering::Relaxed) & 1 == 0 {
            self.write(QUEUE_NOTIFY, 0);
        }
    }

    /// Waits for the next request that is done; its slot.
    fn wait(&mut self) -> Result<usize, Fault> {
        let mut looks = 0u32;
        while (self.queue[USED].load(Ordering::Acquire) >> 16) as u16 == self.taken {
            spin_loop();
            looks += 1;
            if looks.is_multiple_of(LOOKS_PER_STATUS) && self.read(DEVICE_STATUS) & NEEDS_RESET != 0 {
                return Err(BROKEN);
            }
            looks %= LOOKS_PER_STATUS;
        }
        // Element e begins in the upper half of word e: behind flags and index.
        let entry = u64::from(self.taken) % ENTRIES;
        let head = self.queue[USED + entry as usize].load(Ordering::Relaxed) >> 32;
        self.taken = self.taken.wrapping_add(1);
        let slot = (head / 3) as usize;
        if head.is_multiple_of(3) && slot < SLOTS { Ok(slot) } else { Err(BROKEN) }
    }

    /// Writes 16 bits of a ring that only the driver writes.
    fn set_half_word(&self, ring: usize, index: u64, value: u16) {
        let (word, shift) = (&self.queue[ring + (index / 4) as usize], index % 4 * 16);
        let others = word.load(Ordering::Relaxed) & !(0xffff << shift);
        word.store(others | u64::from(value) << shift, Ordering::Relaxed);
    }
}
