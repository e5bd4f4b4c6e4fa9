//! How a device tells its driver that something was done.

use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// The interrupt of one device, shared by its registers and by what serves its queues.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    /// [`VIRTIO_CONFIG_S_NEEDS_RESET`], or zero.
    needs_reset: AtomicU32,
    /// KVM raises the interrupt for it; `None` where the VM has no interrupt controllers and its guest polls.
    line: Option<EventFd>,
}

impl Interrupt {
    /// An interrupt that `line` raises.
    pub fn new(line: Option<EventFd>) -> Interrupt {
        Interrupt { status: AtomicU32::new(0), needs_reset: AtomicU32::new(0), line }
    }

    /// Buffers of a queue were used.
    pub fn used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// The configuration changed.
    pub fn configuration_changed(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// The device cannot go on: the driver broke one of its queues, or the host failed it.
    pub fn needs_reset(&self) {
        self.needs_reset.store(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::Release);
        self.configuration_changed();
    }

    /// Why it was raised, as the register has it.
    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// What the device adds to the status that its driver set.
    pub(super) fn device_status(&self) -> u32 {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// The driver has seen these reasons.
    pub(super) fn acknowledge(&self, reasons: u32) {
        self.status.fetch_and(!reasons, Ordering::AcqRel);
    }

    /// As at the begin.
    pub(super) fn reset(&self) {
        self.status.store(0, Ordering::Release);
        self.needs_reset.store(0, Ordering::Release);
    }

    fn raise(&self, reason: u32) {
        self.status.fetch_or(reason, Ordering::AcqRel);
        if let Some(line) = &self.line {
            // The counter would have to be full, and then the interrupt is on its way already.
            let _ = line.write(1);
        }
    }
}
