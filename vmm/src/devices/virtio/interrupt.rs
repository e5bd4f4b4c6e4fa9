//! How a device tells its driver that something was done.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// How often it is said that a driver broke its device.
const SAID_MAX: u32 = 3;

/// The interrupt of one device, shared by its registers and by what serves its queues.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    /// [`VIRTIO_CONFIG_S_NEEDS_RESET`], or zero.
    needs_reset: AtomicU32,
    /// How often the driver broke it, over all resets.
    breakages: AtomicU32,
    /// KVM raises the interrupt for it; `None` where the VM has no interrupt controllers and its guest polls.
    line: Option<EventFd>,
}

impl Interrupt {
    /// An interrupt that `line` raises.
    pub fn new(line: Option<EventFd>) -> Interrupt {
        let zero = || AtomicU32::new(0);
        Interrupt { status: zero(), needs_reset: zero(), breakages: zero(), line }
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

    /// The driver broke the device: [`Interrupt::needs_reset`], and why. That is said a few times and then no more, for a driver may do it as
    /// often as it likes, and the host's log is not its to fill.
    pub fn broken(&self, device: &dyn fmt::Display, why: &dyn fmt::Display) {
        let before = self.breakages.fetch_add(1, Ordering::Relaxed);
        if before < SAID_MAX {
            let last = if before + 1 == SAID_MAX { "; it is not said again" } else { "" };
            tracing::warn!("{device} needs a reset: {why}{last}");
        }
        self.needs_reset();
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing::span;

    use super::*;

    /// Counts what is said.
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
    fn a_driver_that_breaks_its_device_again_and_again_does_not_fill_the_log() {
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
