//! The interrupt by which a device notifies its driver: its reasons, and the mark of a device that needs a reset. Any
//! thread may raise it.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// Largest number of log lines about a driver that broke its device.
const SAID_MAX: u32 = 3;

/// The interrupt of one device, shared by its registers and by the threads that serve its queues.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    /// Either [`VIRTIO_CONFIG_S_NEEDS_RESET`], or zero.
    needs_reset: AtomicU32,
    /// Number of times that the driver broke the device, over all resets.
    breakages: AtomicU32,
    /// Event by which KVM raises the interrupt; `None` where the VM has no interrupt controllers and
    /// its guest polls.
    line: Option<EventFd>,
}

impl Interrupt {
    /// Creates an interrupt that `line` raises.
    pub fn new(line: Option<EventFd>) -> Interrupt {
        let zero = || AtomicU32::new(0);
        Interrupt { status: zero(), needs_reset: zero(), breakages: zero(), line }
    }

    /// Reports that buffers of a queue were used.
    pub fn used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// Reports that the configuration changed.
    pub fn configuration_changed(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Marks the device as broken: the driver broke one of its queues, or the host failed it.
    pub fn needs_reset(&self) {
        self.needs_reset.store(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::Release);
        self.configuration_changed();
    }

    /// Marks the device as broken by its driver ([`Interrupt::needs_reset`]), and logs the reason. Only the first
    /// few times are logged: a driver could otherwise fill the host's log.
    pub fn broken(&self, device: &dyn fmt::Display, why: &dyn fmt::Display) {
        let before = self.breakages.fetch_add(1, Ordering::Relaxed);
        if before < SAID_MAX {
            let last = if before + 1 == SAID_MAX { "; further ones are not logged" } else { "" };
            tracing::warn!("{device} needs a reset: {why}{last}");
        }
        self.needs_reset();
    }

    /// Reasons of the interrupt, as in the register.
    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// Bits that the device adds to the driver's status.
    pub(super) fn device_status(&self) -> u32 {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Clears the reasons that the driver has acknowledged.
    pub(super) fn acknowledge(&self, reasons: u32) {
        self.status.fetch_and(!reasons, Ordering::AcqRel);
    }

    /// Takes over the state of a snapshot. Reasons that the driver has not acknowledged raise the interrupt again: it
    /// may have been on its way, and a driver that finds no reason ignores it.
    pub(super) fn restore(&self, status: u32, needs_reset: bool) {
        if needs_reset {
            self.needs_reset.store(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::Release);
        }
        if status != 0 {
            self.raise(status & (VIRTIO_MMIO_INT_VRING | VIRTIO_MMIO_INT_CONFIG));
        }
    }

    /// Sets the state back to the machine's start.
    pub(super) fn reset(&self) {
        self.status.store(0, Ordering::Release);
        self.needs_reset.store(0, Ordering::Release);
    }

    fn raise(&self, reason: u32) {
        self.status.fetch_or(reason, Ordering::AcqRel);
        if let Some(line) = &self.line {
            // The write fails only if the event's counter is full; then the interrupt is already on its way.
            let _ = line.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing::span;

    use super::*;

    /// Counts the logged lines.
    struct Lines(Arc<AtomicU32>);

    impl tracing::Subscriber for Lines {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn a_driver_that_breaks_its_device_repeatedly_does_not_fill_the_log() {
        let (interrupt, lines) = (Interrupt::new(None), Arc::new(AtomicU32::new(0)));
        tracing::subscriber::with_default(Lines(Arc::clone(&lines)), || {
            for _ in 0..100 {
                interrupt.broken(&"a disk", &"its ring has more entries than it has room for");
                assert_eq!(interrupt.device_status(), VIRTIO_CONFIG_S_NEEDS_RESET);
                interrupt.reset();
            }
        });
        assert_eq!(lines.load(Ordering::Relaxed), SAID_MAX);
    }
}
