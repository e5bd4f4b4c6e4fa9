//! Virtio devices behind memory-mapped registers (Virtual I/O Device 1.2, section 4.2), version 2, split queues.
//!
//! ```text
//!   vCPU ── mov ──▶ [`transport`]: registers, status, negotiation ── activate, reset ──▶ a [`VirtioDevice`]
//!     │                                                                                     │ its queues
//!     └── QueueNotify ── KVM_IOEVENTFD ─────── kick ───────▶ [`io_thread`], or a thread of its own
//!                                                               │ chain by chain, through [`crate::dma`]
//!   IOAPIC ◀── KVM_IRQFD ── [`interrupt`] ◀─────── used ────────┘
//! ```
//!
//! The guest is not trusted: registers take any access at any time, and queues lie at any address with any content.
//! An error of the guest ends as `DEVICE_NEEDS_RESET` and harms only that guest.

mod activate_error;
pub mod balloon;
pub mod block;
pub mod counters;
pub mod interrupt;
pub mod io_thread;
mod kind;
pub mod net;
pub mod pieces;
pub mod queue;
pub mod rng;
pub mod saved;
pub mod service;
#[cfg(test)]
mod test_driver;
pub mod threads;
pub mod transport;
pub mod used;
pub mod vsock;

use std::sync::Arc;
use std::time::Instant;

pub use activate_error::ActivateError;
pub use interrupt::Interrupt;
pub use io_thread::{IoThread, Subscription};
pub use kind::DeviceKind;
pub use queue::{ActiveQueue, BrokenQueue};
pub use saved::{DeviceState, NotAtRest, Rest, RestoreDeviceError, SavedDevice};
pub use threads::DeviceThreads;
pub use transport::Transport;
use wideleaf_policies::{Bytes, Gpa, GpaRange};

use crate::dma::DeviceMemory;

/// Makes the guest's writes to a device durable, and returns the device's state.
pub type Flusher = Box<dyn FnOnce() -> std::io::Result<DeviceState> + Send>;

/// A device behind its registers. Any vCPU's thread reads and writes its configuration. [`DeviceThreads`] activates
/// and resets it, and it hands its queues to a thread. It never touches guest RAM on a vCPU's thread.
pub trait VirtioDevice: Send {
    /// Kind of the device.
    fn kind(&self) -> DeviceKind;

    /// Features that it offers beside `VIRTIO_F_VERSION_1`.
    fn features(&self) -> u64;

    /// Largest number of entries of each of its queues, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads its configuration; bytes of `data` beyond its end stay zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes its configuration. Most devices have nothing that can be written.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver is ready: from now on the queues are served.
    ///
    /// # Errors
    /// [`ActivateError`]; the driver learns that the device needs a reset.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops serving all queues before it returns, as if it had never been activated. Also called on a device that
    /// is not active.
    fn reset(&mut self);

    /// Stops the service between two pieces of work, until the result is dropped, and returns its state; that of a
    /// device with a flusher is the flusher's result. No vCPU runs, and the gate lets devices pass.
    ///
    /// # Errors
    /// [`NotAtRest`], where a piece of work does not end by `until`; then the service continues.
    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest>;

    /// Work that makes the guest's writes durable and returns the device's state, for a thread that may wait; `None`
    /// where there are no writes.
    fn flusher(&self) -> Option<Flusher> {
        None
    }

    /// Takes over the saved state of a device of this kind, before it is activated. The queues that it is activated
    /// with then have the positions of the saved ones.
    ///
    /// # Errors
    /// [`RestoreDeviceError`] where this is not the device that the guest knows.
    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError>;
}

/// The resources of an activated device.
#[derive(Debug)]
pub struct Activation {
    /// Guest RAM, as devices access it.
    pub memory: DeviceMemory,
    /// Features that the driver accepted.
    pub features: u64,
    /// All queues of the device; a queue that the driver did not set up has no ring.
    pub queues: Vec<ActiveQueue>,
    /// Interrupt that tells the driver of finished work.
    pub interrupt: Arc<Interrupt>,
    /// Thread that serves all devices without a thread of their own.
    pub io_thread: Arc<IoThread>,
    /// Service that starts a thread for this device.
    pub threads: Arc<DeviceThreads>,
}

impl Activation {
    /// Whether the driver accepted a feature, by its bit.
    pub fn has(&self, feature: u32) -> bool {
        self.features >> feature & 1 == 1
    }
}

/// Addresses of a device's registers, and its interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First address of its registers.
    pub start: Gpa,
    /// Input of the IOAPIC.
    pub gsi: u32,
}

impl Place {
    /// Place of the device with this number.
    pub const fn of(number: usize) -> Place {
        Place { start: Gpa::new(FIRST.get() + number as u64 * REGISTERS.get()), gsi: FIRST_GSI + number as u32 }
    }

    /// The addresses of its registers.
    pub fn registers(self) -> GpaRange {
        GpaRange::new(self.start, REGISTERS).expect("the hole ends far below the last address")
    }
}

/// Size of a device's registers in bytes: a page, so that each can be mapped separately.
pub const REGISTERS: Bytes = Bytes::new(0x1000);

/// Address of the first device: in the hole below 4 GiB, under the interrupt controllers.
pub const FIRST: Gpa = Gpa::new(0xd000_0000);

/// First input of the IOAPIC that is not an ISA line.
const FIRST_GSI: u32 = 16;

/// Largest number of devices of a VM: KVM's IOAPIC has 24 inputs.
pub const DEVICES_MAX: usize = 8;
