//! A driver in memory for the tests of devices. It uses the registers, lays out rings and chains as the test asks,
//! valid or not, and waits for the chains that the device hands back.
//!
//! ```text
//!   queue q:  table at (q + 1) * 0x1_0000, avail ring 0x4000 behind, used ring 0x8000 behind
//!   buffers:  from 0x10_0000 on
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_DRIVER_FEATURES, VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_NUM_MAX,
    VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL, VIRTIO_MMIO_QUEUE_USED_LOW, VIRTIO_MMIO_STATUS,
};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};

use super::transport::Workers;
use super::{Interrupt, RestoreDeviceError, SavedDevice, Transport, VirtioDevice};
use crate::devices::bus::MemoryDevice as _;
use crate::dma::DeviceMemory;
use crate::kvm::GuestMemory;

/// Size of RAM in bytes, from address zero on.
pub const RAM_BYTES: u64 = 8 << 20;

/// Time limit for a device before the test fails: not a claim, only an end.
const PATIENCE: Duration = Duration::from_secs(60);

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    address: u64,
    bytes: u32,
    is_written: bool,
}

impl Piece {
    /// A buffer that the device reads.
    pub fn read(address: u64, bytes: u32) -> Piece {
        Piece { address, bytes, is_written: false }
    }

    /// A buffer that the device writes.
    pub fn write(address: u64, bytes: u32) -> Piece {
        Piece { address, bytes, is_written: true }
    }
}

/// A chain that the device handed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// First descriptor of the chain.
    pub head: u32,
    /// Number of bytes that the device claims to have written.
    pub written: u32,
}

/// The driver: see the module.
pub struct Driver {
    pub transport: Transport,
    pub memory: DeviceMemory,
    /// Numbers of chains offered and of chains taken back, for each queue.
    indices: Vec<(u16, u16)>,
    sizes: Vec<u16>,
}

impl Driver {
    /// A driver of `device`, which it has not started.
    pub fn new(device: Box<dyn VirtioDevice>) -> Driver {
        let layout = [GpaRange::new(Gpa::new(0), mib(RAM_BYTES >> 20)).unwrap()];
        let ram = GuestRam::map(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
        let memory = DeviceMemory::new(Arc::new(GuestMemory::new(ram).unwrap()));
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let sizes = device.queue_sizes().to_vec();
        let kicks = sizes.iter().map(|_| event()).collect();
        let transport =
            Transport::new(device, memory.clone(), Workers::default(), Interrupt::new(Some(event())), kicks);
        Driver { transport, memory, indices: vec![(0, 0); sizes.len()], sizes }
    }

    /// Takes the device's state as a snapshot does, as text and back, and RAM at that moment. `meanwhile` runs while
    /// the device rests.
    pub fn save(&self, meanwhile: impl FnOnce()) -> (SavedDevice, Vec<u8>) {
        let gate = self.memory.gate();
        assert!(gate.close(PATIENCE) && gate.drain());
        let (saved, rest) = self.transport.save(Instant::now() + PATIENCE).unwrap();
        assert!(gate.drained(PATIENCE));
        let mut ram = vec![0; RAM_BYTES as usize];
        self.memory.memory().view().read_slice(&mut ram, GuestAddress(0)).unwrap();
        meanwhile();
        drop(rest);
        gate.open();
        let text = serde_json::to_string(&saved).unwrap();
        (serde_json::from_str(&text).unwrap(), ram)
    }

    /// This driver on another machine: a copy of its RAM, and `device` in the saved state.
    ///
    /// # Errors
    /// The device's error, where it refuses the state.
    pub fn continued(
        &self,
        device: Box<dyn VirtioDevice>,
        saved: &(SavedDevice, Vec<u8>),
    ) -> Result<Driver, RestoreDeviceError> {
        let driver = self.continued_held(device, saved)?;
        driver.kick_queues();
        Ok(driver)
    }

    /// Makes the device look at its queues.
    pub fn kick_queues(&self) {
        self.transport.kick_queues();
    }

    /// The same with a device that was not told to look at its queues.
    ///
    /// # Errors
    /// The device's error, where it refuses the state.
    pub fn continued_held(
        &self,
        device: Box<dyn VirtioDevice>,
        (saved, ram): &(SavedDevice, Vec<u8>),
    ) -> Result<Driver, RestoreDeviceError> {
        let mut driver = Driver::new(device);
        driver.set_bytes(0, ram);
        driver.indices = self.indices.clone();
        driver.transport.restore(saved)?;
        Ok(driver)
    }

    /// Reads a register of the device.
    pub fn register(&mut self, register: u32) -> u32 {
        let mut data = [0xaa; 4];
        self.transport.read(u64::from(register), &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register of the device.
    pub fn set_register(&mut self, register: u32, value: u32) {
        self.transport.write(u64::from(register), &value.to_le_bytes());
    }

    /// Reads the configuration at `offset`.
    pub fn config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.transport.read(u64::from(VIRTIO_MMIO_CONFIG) + offset, &mut data);
        data
    }

    /// Starts the device by all steps of section 3.1.1, with every queue; `features` beside version 1.
    pub fn start(&mut self, features: u64) {
        const DRIVER: u32 = 1 | 2;
        self.set_register(VIRTIO_MMIO_STATUS, DRIVER);
        let features = features | 1 << VIRTIO_F_VERSION_1;
        for half in [0, 1] {
            self.set_register(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.set_register(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set_register(VIRTIO_MMIO_STATUS, DRIVER | VIRTIO_CONFIG_S_FEATURES_OK);
        assert_ne!(self.register(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_FEATURES_OK, 0, "{features:#x} were refused");
        for queue in 0..self.sizes.len() {
            self.set_up_queue(queue);
        }
        self.set_register(VIRTIO_MMIO_STATUS, DRIVER | VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
    }

    /// Resets the device; when this returns, nothing of the device runs.
    pub fn reset(&mut self) {
        self.set_register(VIRTIO_MMIO_STATUS, 0);
    }

    /// Whether the device has asked for a reset.
    pub fn needs_reset(&mut self) -> bool {
        self.register(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// Waits until the device asks for a reset.
    pub fn wait_for_needs_reset(&mut self) {
        let end = Instant::now() + PATIENCE;
        while !self.needs_reset() {
            assert!(Instant::now() < end, "the device does not notice that its queue is broken");
            std::thread::yield_now();
        }
    }

    /// Offers a chain of these buffers, each in the next descriptor from `head` on, and notifies the device.
    pub fn offer(&mut self, queue: usize, head: u16, pieces: &[Piece]) {
        let last = pieces.len() - 1;
        for (n, piece) in pieces.iter().enumerate() {
            let flags = if n < last { NEXT } else { 0 } | if piece.is_written { WRITE } else { 0 };
            let next = head + n as u16 + 1;
            self.set_descriptor(queue, head + n as u16, (piece.address, piece.bytes), flags, next);
        }
        self.make_available(queue, head);
    }

    /// Writes a descriptor with any content.
    pub fn set_descriptor(&self, queue: usize, n: u16, (address, bytes): (u64, u32), flags: u16, next: u16) {
        let at = table(queue) + 16 * u64::from(n);
        let view = self.memory.access();
        view.write_obj(address, GuestAddress(at)).unwrap();
        view.write_obj(bytes, GuestAddress(at + 8)).unwrap();
        view.write_obj(flags, GuestAddress(at + 12)).unwrap();
        view.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Offers the chain that begins at a descriptor, and notifies the device.
    pub fn make_available(&mut self, queue: usize, head: u16) {
        let offered = self.indices[queue].0;
        let slot = avail(queue) + 4 + 2 * u64::from(offered % self.sizes[queue]);
        self.memory.access().write_obj(head, GuestAddress(slot)).unwrap();
        self.indices[queue].0 = offered.wrapping_add(1);
        self.claim_available(queue, offered.wrapping_add(1));
    }

    /// Claims that `chains` chains were offered since the start, and notifies the device.
    pub fn claim_available(&mut self, queue: usize, chains: u16) {
        self.memory
            .access()
            .store(chains, GuestAddress(avail(queue) + 2), std::sync::atomic::Ordering::Release)
            .unwrap();
        self.set_register(VIRTIO_MMIO_QUEUE_NOTIFY, queue as u32);
    }

    /// Waits for the next chain that the device hands back.
    pub fn wait_used(&mut self, queue: usize) -> Used {
        let taken = self.indices[queue].1;
        let end = Instant::now() + PATIENCE;
        while self.used_index(queue) == taken {
            assert!(Instant::now() < end, "the device does not hand the chain back");
            assert!(!self.needs_reset(), "the device needs a reset");
            std::thread::yield_now();
        }
        self.indices[queue].1 = taken.wrapping_add(1);
        let at = used(queue) + 4 + 8 * u64::from(taken % self.sizes[queue]);
        let view = self.memory.access();
        Used { head: view.read_obj(GuestAddress(at)).unwrap(), written: view.read_obj(GuestAddress(at + 4)).unwrap() }
    }

    /// Number of chains that were handed back since the start.
    pub fn used_index(&self, queue: usize) -> u16 {
        self.memory.access().load(GuestAddress(used(queue) + 2), std::sync::atomic::Ordering::Acquire).unwrap()
    }

    /// Offers a chain in the first descriptors and waits until the device hands it back.
    pub fn request(&mut self, queue: usize, pieces: &[Piece]) -> Used {
        self.offer(queue, 0, pieces);
        self.wait_used(queue)
    }

    /// Reads bytes of RAM.
    pub fn bytes(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        self.memory.access().read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }

    /// Writes into RAM.
    pub fn set_bytes(&self, address: u64, data: &[u8]) {
        self.memory.access().write_slice(data, GuestAddress(address)).unwrap();
    }

    fn set_up_queue(&mut self, queue: usize) {
        self.set_register(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
        let size = self.register(VIRTIO_MMIO_QUEUE_NUM_MAX);
        self.set_register(VIRTIO_MMIO_QUEUE_NUM, size);
        self.set_register(VIRTIO_MMIO_QUEUE_DESC_LOW, table(queue) as u32);
        self.set_register(VIRTIO_MMIO_QUEUE_AVAIL_LOW, avail(queue) as u32);
        self.set_register(VIRTIO_MMIO_QUEUE_USED_LOW, used(queue) as u32);
        let view = self.memory.access();
        view.write_slice(&[0; 0xc000], GuestAddress(table(queue))).unwrap();
        drop(view);
        self.indices[queue] = (0, 0);
        self.set_register(VIRTIO_MMIO_QUEUE_READY, 1);
    }
}

fn table(queue: usize) -> u64 {
    (queue as u64 + 1) * 0x1_0000
}

fn avail(queue: usize) -> u64 {
    table(queue) + 0x4000
}

fn used(queue: usize) -> u64 {
    table(queue) + 0x8000
}
