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
//! The guest is not trusted: registers take any access at any time, queues lie where the guest says and hold what it likes. What it breaks
//! ends as `DEVICE_NEEDS_RESET` for itself.

pub mod balloon;
pub mod block;
pub mod counters;
pub mod interrupt;
pub mod io_thread;
pub mod net;
pub mod pieces;
pub mod queue;
pub mod rng;
#[cfg(test)]
mod test_driver;
pub mod threads;
pub mod transport;
pub mod used;
pub mod vsock;

use std::sync::Arc;

pub use interrupt::Interrupt;
pub use io_thread::{IoThread, Subscription};
pub use queue::{ActiveQueue, BrokenQueue};
pub use threads::DeviceThreads;
pub use transport::Transport;
use wideleaf_policies::{Bytes, Gpa, GpaRange};

use crate::dma::DeviceMemory;

/// What a device is to its driver (Virtual I/O Device 1.2, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A network card.
    Net = 1,
    /// A disk.
    Block = 2,
    /// A source of random bytes.
    Entropy = 4,
    /// Memory given back to the host.
    Balloon = 5,
    /// Sockets between guest and host.
    Vsock = 19,
}

/// A device behind its registers. Its configuration is read and written on the thread of whichever vCPU does so; it is activated and reset
/// where [`DeviceThreads`] does that, and hands its queues to a thread. It never touches guest RAM on a vCPU's thread.
pub trait VirtioDevice: Send {
    /// What it is.
    fn kind(&self) -> DeviceKind;

    /// The features it offers beside `VIRTIO_F_VERSION_1`.
    fn features(&self) -> u64;

    /// The most entries of each of its queues: powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads its configuration; what is beyond it stays as it is, which is zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes its configuration. Most devices have nothing that can be written.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver is ready: from now on the queues are served.
    ///
    /// # Errors
    /// [`ActivateError`]; the driver is told that the device needs a reset.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Serves no queue any more when it returns, as if it had never been activated. Also called where it was not.
    fn reset(&mut self);
}

/// What an activated device works with.
#[derive(Debug)]
pub struct Activation {
    /// Guest RAM.
    pub memory: DeviceMemory,
    /// What the driver took of the features.
    pub features: u64,
    /// All queues of the device, those that the driver left alone without a ring.
    pub queues: Vec<ActiveQueue>,
    /// How the driver learns of what was done.
    pub interrupt: Arc<Interrupt>,
    /// The thread that serves all devices which have none of their own.
    pub io_thread: Arc<IoThread>,
    /// Starts one of its own.
    pub threads: Arc<DeviceThreads>,
}

impl Activation {
    /// Whether the driver took a feature, by its bit.
    pub fn has(&self, feature: u32) -> bool {
        self.features >> feature & 1 == 1
    }
}

/// Why a device cannot start its work.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver left a queue alone that the device cannot be without.
    #[error("the driver did not set up queue {0}")]
    NoQueue(usize),
    /// A thread, an event, a file descriptor could not be had.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// Where the registers of a device are, and which interrupt is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First address of its registers.
    pub start: Gpa,
    /// Input of the IOAPIC.
    pub gsi: u32,
}

impl Place {
    /// Of the device of this number.
    pub const fn of(number: usize) -> Place {
        Place { start: Gpa::new(FIRST.get() + number as u64 * REGISTERS.get()), gsi: FIRST_GSI + number as u32 }
    }

    /// The addresses of its registers.
    pub fn registers(self) -> GpaRange {
        GpaRange::new(self.start, REGISTERS).expect("the hole ends far below the last address")
    }
}

/// Bytes of a device's registers: a page, so that each can be mapped for itself.
pub const REGISTERS: Bytes = Bytes::new(0x1000);

/// Where the first device is: in the hole below 4 GiB, under the interrupt controllers.
pub const FIRST: Gpa = Gpa::new(0xd000_0000);

/// The first input of the IOAPIC that is no ISA line.
const FIRST_GSI: u32 = 16;

/// Devices of a VM: KVM's IOAPIC has 24 inputs.
pub const DEVICES_MAX: usize = 8;
