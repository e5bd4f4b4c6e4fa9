//! The common part of the drivers for virtio devices behind memory: finding a device, starting it, its queues
//! (Virtual I/O Device 1.2, 2.7, 3.1.1 and 4.2). The drivers poll and disable interrupts, since a guest in ring 3
//! has none.
//!
//! ```text
//!   begin: found, reset, features ─▶ queue, for each ─▶ start
//!   offer ─▶ available ring ─▶ device ─▶ used ring ─▶ take
//!
//!   words of a queue  │ descriptors, 2 words each │ available ring │ used ring │
//! ```
//!
//! All queues are words of the arena: the pages beneath the rings are under test just like those of the data.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::{KernelError, Platform};

/// A fault of a device, as a message to the user.
pub type Fault = &'static str;

/// Type of the device that a driver is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A network card.
    Net = 1,
    /// A virtio disk.
    Disk = 2,
    /// A balloon, which gives memory back to the host.
    Balloon = 5,
    /// Sockets to the host.
    Sockets = 19,
}

impl Kind {
    const fn missing(self) -> Fault {
        match self {
            Kind::Net => "no virtio network card found; run the kernel in a guest with --net tap=NAME",
            Kind::Disk => "no virtio disk found; run the kernel in a guest with --disk FILE",
            Kind::Balloon => "no balloon found; run the kernel in a guest with --balloon",
            Kind::Sockets => "no virtio sockets found; run the kernel in a guest with --vsock cid=N,socket=PATH",
        }
    }
}

const REFUSED: Fault = "the device refuses its driver";
/// The device reports an error that a conforming device never does.
pub const BROKEN: Fault = "the device needs a reset";

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
/// `VIRTIO_F_VERSION_1`, in the upper half.
const VERSION_1: u32 = 1;

/// Polls of the used ring between two readings of the device's status, which are exits to the VMM.
const LOOKS_PER_STATUS: u32 = 1 << 22;

/// A device and its registers.
#[derive(Clone, Copy)]
pub struct Device<'m> {
    platform: &'m dyn Platform,
    registers: u64,
}

impl<'m> Device<'m> {
    /// Finds the machine's first device of this kind and negotiates its features: `features` of the lower half, and
    /// version 1.
    ///
    /// # Errors
    /// [`Fault`] if there is no such device, or if it wants other features.
    pub fn begin(platform: &'m dyn Platform, kind: Kind, features: u32) -> Result<Self, Fault> {
        let devices = platform.devices();
        let mut places = (0..devices.count).map(|index| devices.first + index * devices.stride);
        let is_meant = |at: &u64| {
            let register = |register| platform.read_register(at + register);
            register(MAGIC) == u32::from_le_bytes(*b"virt") && register(VERSION) == 2 && register(DEVICE) == kind as u32
        };
        let device = Self { platform, registers: places.find(is_meant).ok_or(kind.missing())? };
        device.write(DEVICE_STATUS, 0);
        device.write(DEVICE_STATUS, IS_DRIVEN);
        for (half, features) in (0..).zip([features, VERSION_1]) {
            device.write(DRIVER_FEATURES_HALF, half);
            device.write(DRIVER_FEATURES, features);
        }
        device.write(DEVICE_STATUS, IS_DRIVEN | FEATURES_OK);
        if device.read(DEVICE_STATUS) & FEATURES_OK == 0 { Err(REFUSED) } else { Ok(device) }
    }

    /// Sets up a queue in these words, the first of which is at `address`.
    ///
    /// # Errors
    /// [`Fault`] if the device has no queue of this number and size.
    pub fn queue(self, number: u32, entries: u64, words: &'m [AtomicU64], address: u64) -> Result<Queue<'m>, Fault> {
        self.write(QUEUE_SELECTED, number);
        if u64::from(self.read(QUEUE_ENTRIES_MAX)) < entries {
            return Err(REFUSED);
        }
        let queue =
            Queue { device: self, number, entries, words: &words[..queue_words(entries)], offered: 0, taken: 0 };
        queue.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        queue.set_half_word(queue.available(), 0, NO_INTERRUPTS);
        self.write(QUEUE_ENTRIES, entries as u32);
        for (register, first) in [(QUEUE_TABLE, 0), (QUEUE_AVAILABLE, queue.available()), (QUEUE_USED, queue.used())] {
            let at = address + 8 * first as u64;
            self.write(register, at as u32);
            self.write(register + 4, (at >> 32) as u32);
        }
        self.write(QUEUE_READY, 1);
        Ok(queue)
    }

    /// Starts the device.
    ///
    /// # Errors
    /// [`Fault`] if it cannot start.
    pub fn start(self) -> Result<(), Fault> {
        self.write(DEVICE_STATUS, IS_DRIVEN | FEATURES_OK | DRIVER_OK);
        if self.needs_reset() { Err(REFUSED) } else { Ok(()) }
    }

    /// Reads a word of its configuration.
    pub fn configuration(self, offset: u64) -> u32 {
        self.read(CONFIGURATION + offset)
    }

    /// Writes a word of its configuration.
    pub fn set_configuration(self, offset: u64, value: u32) {
        self.write(CONFIGURATION + offset, value);
    }

    fn needs_reset(self) -> bool {
        self.read(DEVICE_STATUS) & NEEDS_RESET != 0
    }

    fn read(self, register: u64) -> u32 {
        self.platform.read_register(self.registers + register)
    }

    fn write(self, register: u64, value: u32) {
        self.platform.write_register(self.registers + register, value);
    }
}

/// Flag of the available ring: `VIRTQ_AVAIL_F_NO_INTERRUPT` (2.7.6).
const NO_INTERRUPTS: u16 = 1;
/// Flag of the used ring: `VIRTQ_USED_F_NO_NOTIFY` (2.7.8).
const NO_NOTIFICATIONS: u64 = 1;

const NEXT: u64 = 1;
const DEVICE_WRITES: u64 = 2;

/// Words of a queue with this number of entries: descriptors, available ring, used ring.
pub const fn queue_words(entries: u64) -> usize {
    (2 * entries + available_words(entries) + entries + 1) as usize
}

/// Flags, index, an entry of two bytes each, and two unused bytes.
const fn available_words(entries: u64) -> u64 {
    (2 * entries + 6).div_ceil(8)
}

/// A running queue.
pub struct Queue<'m> {
    device: Device<'m>,
    number: u32,
    entries: u64,
    words: &'m [AtomicU64],
    /// Chains offered and taken back, modulo 2^16 as in the rings.
    offered: u16,
    taken: u16,
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Whether the device writes the buffer; otherwise it reads it.
    pub is_written: bool,
}

/// A chain that the device has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Index of its first descriptor.
    pub head: u64,
    /// Number of bytes that the device wrote.
    pub bytes: u32,
}

impl Queue<'_> {
    fn available(&self) -> usize {
        2 * self.entries as usize
    }

    fn used(&self) -> usize {
        self.available() + available_words(self.entries) as usize
    }

    /// Sets a descriptor to `buffer` and to its successor `next`.
    pub fn describe(&self, descriptor: u64, buffer: Buffer, next: Option<u64>) {
        let words = &self.words[2 * descriptor as usize..];
        let direction = if buffer.is_written { DEVICE_WRITES } else { 0 };
        let flags = direction | if next.is_some() { NEXT } else { 0 };
        words[0].store(buffer.address, Ordering::Relaxed);
        words[1].store(u64::from(buffer.bytes) | flags << 32 | next.unwrap_or(0) << 48, Ordering::Relaxed);
    }

    /// Offers the chain that begins at `head`, and notifies the device if it sleeps.
    pub fn offer(&mut self, head: u64) {
        let entry = u64::from(self.offered) % self.entries;
        self.set_half_word(self.available(), 2 + entry, head as u16);
        self.offered = self.offered.wrapping_add(1);
        // The device must see the descriptor before the index (2.7.13.3).
        fence(Ordering::Release);
        self.set_half_word(self.available(), 1, self.offered);
        // The check whether it sleeps must follow the publication (2.7.10).
        fence(Ordering::SeqCst);
        if self.words[self.used()].load(Ordering::Relaxed) & NO_NOTIFICATIONS == 0 {
            self.device.write(QUEUE_NOTIFY, self.number);
        }
    }

    /// Whether the device has finished a chain, so that [`Queue::wait`] does not wait.
    pub fn has_used(&self) -> bool {
        (self.words[self.used()].load(Ordering::Acquire) >> 16) as u16 != self.taken
    }

    /// Waits for the next finished chain.
    ///
    /// # Errors
    /// [`Fault`] if the device gives up, or names an invalid chain.
    pub fn wait(&mut self) -> Result<Used, Fault> {
        let mut looks = 0u32;
        while !self.has_used() {
            spin_loop();
            looks = (looks + 1) % LOOKS_PER_STATUS;
            if looks == 0 && self.device.needs_reset() {
                return Err(BROKEN);
            }
        }
        // Behind flags and index, element e begins in the upper half of word e.
        let element = self.used() + usize::from(self.taken) % self.entries as usize;
        let [head, bytes] = [element, element + 1].map(|at| self.words[at].load(Ordering::Relaxed));
        self.taken = self.taken.wrapping_add(1);
        let used = Used { head: head >> 32, bytes: bytes as u32 };
        if used.head < self.entries { Ok(used) } else { Err(BROKEN) }
    }

    /// Writes 16 bits of a ring that only the driver writes.
    fn set_half_word(&self, ring: usize, index: u64, value: u16) {
        let (word, shift) = (&self.words[ring + (index / 4) as usize], index % 4 * 16);
        let others = word.load(Ordering::Relaxed) & !(0xffff << shift);
        word.store(others | u64::from(value) << shift, Ordering::Relaxed);
    }
}

/// Turns a fault into a kernel error.
pub fn device_error<'a>(what: Fault) -> KernelError<'a> {
    KernelError::Device { what }
}
