//! Device accesses to guest RAM, made visible to the manager: a device writes past KVM, so KVM's logs do not
//! contain its writes.
//!
//! ```text
//!   device ─▶ DeviceMemory::access ─▶ [`gate`] open? ─▶ RAM, and a bit for each page written in [`log`]
//!                                        │                                    │
//!   SecondLevel::pause  ─ closes it ─────┘      SecondLevel::take_dirty_log ◀─┘ with KVM's own bits
//! ```
//!
//! A part of the VMM that moves a page can thus treat a device like another vCPU: it is paused with the vCPUs, and
//! its writes are in the same log.

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
    /// RAM behind its own gate.
    pub fn new(memory: Arc<GuestMemory>) -> DeviceMemory {
        DeviceMemory { memory, gate: Arc::default() }
    }

    /// Waits until the VM is not paused, and delays a pause until the access is dropped. Hold it for one request at
    /// most, and never take it on a vCPU's thread. Where the VM is gone, the calling thread ends ([`Gate::enter`]).
    pub fn access(&self) -> Access<'_> {
        Access { _inside: self.gate.enter(), view: self.memory.view() }
    }

    /// The gate, for the code that pauses the VM.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// The RAM behind the gate.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

/// The view of RAM while it may be used. `vm-memory` logs writes through it; `view().get_slice(..)` returns slices
/// into which files are read (`ReadVolatile`), which are logged too.
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
