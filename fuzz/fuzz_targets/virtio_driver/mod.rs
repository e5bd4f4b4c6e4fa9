//! A driver in memory that does what libFuzzer's bytes say: accesses to registers and configuration, descriptors, rings, contents of RAM.
//!
//! ```text
//!   bytes ─▶ step after step ─▶ registers, RAM ◀─▶ the device on its threads
//! ```
//!
//! It begins with a start by the book, so that most inputs reach the queues; the bytes may undo it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};
use wideleaf_vmm::devices::bus::MemoryDevice;
use wideleaf_vmm::devices::virtio::transport::Workers;
use wideleaf_vmm::devices::virtio::{Interrupt, Transport, VirtioDevice};
use wideleaf_vmm::dma::DeviceMemory;
use wideleaf_vmm::kvm::GuestMemory;

const RAM_BYTES: u64 = 2 << 20;
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x3000;
const USED: u64 = 0x4000;
/// Entries of the queue, fewer than any device's: rings wrap around soon.
const ENTRIES: u16 = 16;
/// Looks at the used ring after a notification: a chain that nobody hands back is no finding.
const LOOKS: u32 = 2000;

const QUEUE_NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const CONFIGURATION: u64 = 0x100;

/// Lets the bytes drive the device, which offers these features beside version 1, and stops it.
pub fn drive(device: Box<dyn VirtioDevice>, features: u32, bytes: &[u8]) {
    let queues = device.queue_sizes().len();
    let layout = [GpaRange::new(Gpa::new(0), mib(RAM_BYTES >> 20)).expect("it does not wrap")];
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("the plainest there is");
    let ram = GuestRam::map(&layout, backing).expect("there is memory");
    let memory = DeviceMemory::new(Arc::new(GuestMemory::new(ram).expect("it is one range")));
    let event = || EventFd::new(EFD_NONBLOCK).expect("there are descriptors");
    let kicks = (0..queues).map(|_| event()).collect();
    let transport = Transport::new(device, memory.clone(), Workers::default(), Interrupt::new(None), kicks);
    let mut driver = Driver { transport, memory, offered: 0 };
    driver.start(features);
    let mut steps = Steps(bytes);
    while driver.step(&mut steps, features).is_some() {}
    driver.transport.stop();
}

struct Driver {
    transport: Transport,
    memory: DeviceMemory,
    offered: u16,
}

/// What is left of the bytes.
struct Steps<'b>(&'b [u8]);

impl<'b> Steps<'b> {
    fn take(&mut self, count: usize) -> Option<&'b [u8]> {
        let (now, later) = self.0.split_at_checked(count)?;
        self.0 = later;
        Some(now)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn word(&mut self) -> Option<u32> {
        self.take(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four were taken")))
    }
}

impl Driver {
    fn step(&mut self, steps: &mut Steps<'_>, features: u32) -> Option<()> {
        match steps.byte()? % 9 {
            0 => {
                let (register, value) = (steps.byte()?, steps.word()?);
                self.write(u64::from(register) & !3, value);
            }
            1 => {
                let mut data = vec![0; usize::from(steps.byte()? % 9)];
                self.transport.read(u64::from(steps.word()? % 0x1000), &mut data);
            }
            2 => {
                let offset = u64::from(steps.byte()?);
                let bytes = usize::from(steps.byte()? % 9);
                self.transport.write(CONFIGURATION + offset, steps.take(bytes)?);
            }
            3 => {
                let at = u64::from(steps.word()?) % (RAM_BYTES - 256);
                let bytes = usize::from(steps.byte()?);
                let bytes = steps.take(bytes)?;
                let _ = self.memory.access().write_slice(bytes, GuestAddress(at));
            }
            4 => {
                let entry = u64::from(steps.byte()?) % u64::from(ENTRIES);
                let (address, len, flags, next) = (steps.word()?, steps.word()?, steps.byte()?, steps.byte()?);
                self.set_descriptor(entry, u64::from(address), len, u16::from(flags), u16::from(next));
            }
            // A request by the book: header, data, status.
            5 => {
                let header = steps.take(16)?;
                let (bytes, flags) = (steps.word()? % (1 << 18), u16::from(steps.byte()?) & 2 | 1);
                let _ = self.memory.access().write_slice(header, GuestAddress(0x8000));
                self.set_descriptor(0, 0x8000, 16, 1, 1);
                self.set_descriptor(1, 0x1_0000, bytes, flags, 2);
                self.set_descriptor(2, 0x9000, 1, 2, 0);
                self.offer(0);
            }
            6 => {
                let head = steps.byte()?;
                self.offer(u16::from(head));
            }
            7 => self.write(STATUS, 0),
            _ => self.start(features),
        }
        Some(())
    }

    fn write(&mut self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    fn start(&mut self, features: u32) {
        self.write(STATUS, 0);
        self.offered = 0;
        let _ = self.memory.access().write_slice(&[0; 0x4000], GuestAddress(TABLE));
        let steps = [
            (STATUS, 3),
            (0x24, 0),
            (0x20, features),
            (0x24, 1),
            (0x20, 1),
            (STATUS, 11),
            (0x30, 0),
            (0x38, u32::from(ENTRIES)),
            (0x80, TABLE as u32),
            (0x90, AVAILABLE as u32),
            (0xa0, USED as u32),
            (0x44, 1),
            (STATUS, 15),
        ];
        steps.into_iter().for_each(|(register, value)| self.write(register, value));
    }

    fn set_descriptor(&self, entry: u64, address: u64, len: u32, flags: u16, next: u16) {
        let words = [address, u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48];
        let _ = self.memory.access().write_obj(words, GuestAddress(TABLE + 16 * entry));
    }

    /// Offers a chain, notifies the device, and gives it a while.
    fn offer(&mut self, head: u16) {
        let access = self.memory.access();
        let slot = AVAILABLE + 4 + 2 * u64::from(self.offered % ENTRIES);
        let _ = access.write_obj(head, GuestAddress(slot));
        self.offered = self.offered.wrapping_add(1);
        let _ = access.store(self.offered, GuestAddress(AVAILABLE + 2), Ordering::Release);
        drop(access);
        self.write(QUEUE_NOTIFY, 0);
        for _ in 0..LOOKS {
            let used: u16 = self.memory.access().load(GuestAddress(USED + 2), Ordering::Acquire).unwrap_or(0);
            if used == self.offered {
                break;
            }
            std::thread::yield_now();
        }
    }
}
