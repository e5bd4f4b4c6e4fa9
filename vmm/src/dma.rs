//! What devices do to guest RAM, kept where the manager sees it: a device writes past KVM, so nothing of KVM's logs it.
//!
//! ```text
//!   device ─▶ DeviceMemory::access ─▶ [`gate`] open? ─▶ RAM, and a bit for each page written in [`log`]
//!                                        │                                    │
//!   SecondLevel::pause  ─ closes it ─────┘      SecondLevel::take_dirty_log ◀─┘ with KVM's own bits
//! ```
//!
//! So to whoever moves a page, a device is one more vCPU: it is paused with them, and its writes are in the same log.

use std::ops::Deref;
use std::sync::Arc;

pub mod gate;
pub mod log;

pub use gate::{Gate, Inside};
pub use log::DeviceLog;

use crate::kvm::GuestMemory;
use crate::kvm::guest_memory::GuestView;

/// Guest RAM as a device reaches it.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    memory: Arc<GuestMemory>,
    gate: Arc<Gate>,
}

impl DeviceMemory {
    /// RAM behind a gate of its own.
    pub fn new(memory: Arc<GuestMemory>) -> DeviceMemory {
        DeviceMemory { memory, gate: Arc::default() }
    }

    /// Waits until the VM is not paused, and keeps a pause waiting until the access is dropped: for one request, and no longer than it
    /// takes. Never on a vCPU's thread.
    pub fn access(&self) -> Access<'_> {
        Access { _inside: self.gate.enter(), view: self.memory.view() }
    }

    /// The gate, for who pauses the VM.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// The RAM.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

/// The view of RAM while it may be used. What is written through it is logged by `vm-memory`; `view().get_slice(..)` gives slices into which
/// files are read (`ReadVolatile`), logged too.
#[derive(Debug)]
pub struct Access<'a> {
    _inside: Inside<'a>,
    view: &'a GuestView,
}

impl Deref for Access<'_> {
    type Target = GuestView;

    fn deref(&self) -> &Self::Target {
        self.view
    }
}
