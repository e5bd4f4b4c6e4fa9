//! The machine's power button, which ends a timed run early. The image has no interrupts: it polls the button.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_kernels::team::ticks;
use wideleaf_protocol::port::{ACPI_ENABLE_OFFSET, ACPI_POWER_BUTTON};

use crate::machine::{in16, out16};

/// Reads of the button's register in a second, at most: each is an exit to the VMM.
const LOOKS_PER_SECOND: u64 = 10;

/// The button of a machine that was started directly, or none.
pub struct PowerButton {
    /// Port of the status register; `None` where there is no button.
    status_port: Option<u16>,
    /// Ticks between two looks at the register.
    interval: u64,
    next_look: AtomicU64,
    was_pressed: AtomicBool,
}

impl PowerButton {
    /// The button with its status register at this port; none at 0, or beyond the highest port.
    pub fn new(status_port: u64, tsc_hz: u64) -> Self {
        Self {
            status_port: u16::try_from(status_port).ok().filter(|port| *port != 0),
            interval: tsc_hz / LOOKS_PER_SECOND,
            next_look: AtomicU64::new(0),
            was_pressed: AtomicBool::new(false),
        }
    }

    /// Enables the button's event: the VMM refuses a press before.
    pub fn enable(&self) {
        if let Some(port) = self.status_port {
            out16(port + ACPI_ENABLE_OFFSET, ACPI_POWER_BUTTON);
        }
    }

    /// Whether the button was pressed at the latest look, or before.
    pub fn was_pressed(&self) -> bool {
        let (Some(port), now) = (self.status_port, ticks()) else { return false };
        if now >= self.next_look.load(Ordering::Relaxed) {
            self.next_look.store(now.saturating_add(self.interval), Ordering::Relaxed);
            if in16(port) & ACPI_POWER_BUTTON != 0 {
                self.was_pressed.store(true, Ordering::Relaxed);
            }
        }
        self.was_pressed.load(Ordering::Relaxed)
    }
}
