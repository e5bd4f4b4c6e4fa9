//! ACPI's power management ports (ACPI 6.5, 4.8.3): the guest switches itself off there, and sees presses of
//! its power button.
//!
//! ```text
//!   [`PowerButton::press`] ─▶ status ∧ enabled ─▶ the interrupt's line is high ─▶ the guest's ACPI reads the status
//!                              ▲                                                     │
//!                              └───────── a 1 in each bit that was seen clears it ───┘ and the line falls
//! ```
//!
//! The line always follows the registers: an interrupt that comes while the guest handles the one before
//! is not lost.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_protocol::port::{ACPI_ENABLE_OFFSET, ACPI_PM1A_CONTROL, ACPI_POWER_BUTTON, ACPI_POWER_OFF};

use super::bus::{BusEvent, PortDevice};
use crate::kvm::KvmError;
use crate::x86::acpi::{POWER_CONTROL_OFFSET, POWER_PORTS};

const _: () = assert!(POWER_PORTS + POWER_CONTROL_OFFSET == ACPI_PM1A_CONTROL, "our guests write to QEMU's port");

/// Flag in the control register: ACPI, not firmware, receives power management events.
const ACPI_IS_ON: u8 = 1;

/// Sets the line of the interrupt high or low.
pub type InterruptLine = Box<dyn Fn(bool) -> Result<(), KvmError> + Send>;

/// The reasons why a press of the button had no effect.
#[derive(Debug, thiserror::Error)]
pub enum PressError {
    /// No driver in the guest would receive the event.
    #[error(
        "the guest listens to no power button (Linux does with its module `button`, built-in kernels with `seconds=`)"
    )]
    NobodyListens,
    /// KVM cannot interrupt the guest.
    #[error("cannot send the power button's event to the guest: {0}")]
    Kvm(#[from] KvmError),
}

#[derive(Default)]
struct Registers {
    status: u16,
    enabled: u16,
    /// Interrupt line; `None` where there are no interrupt controllers, and the guest polls the status.
    line: Option<InterruptLine>,
}

impl Registers {
    fn is_listening(&self) -> bool {
        self.enabled & ACPI_POWER_BUTTON != 0
    }

    fn set_line(&self) -> Result<(), KvmError> {
        self.line.as_ref().map_or(Ok(()), |line| line(self.status & self.enabled != 0))
    }
}

/// The registers in a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedPower {
    /// Events that the guest has not acknowledged.
    status: u16,
    /// Events that the guest has enabled.
    enabled: u16,
}

/// The button of a machine. Clones are the same button.
#[derive(Clone)]
pub struct PowerButton(Arc<Mutex<Registers>>);

impl PowerButton {
    /// Whether the guest has enabled the button's event: its kernel has a driver for it. The driver's reaction is
    /// up to the guest.
    pub fn is_listening(&self) -> bool {
        self.lock().is_listening()
    }

    /// Asks the guest to switch itself off. A paused guest receives the event when it is resumed.
    ///
    /// # Errors
    /// [`PressError`]; then the guest does not receive the event.
    pub fn press(&self) -> Result<(), PressError> {
        let mut registers = self.lock();
        if !registers.is_listening() {
            return Err(PressError::NobodyListens);
        }
        registers.status |= ACPI_POWER_BUTTON;
        Ok(registers.set_line()?)
    }

    /// State of the registers, for a snapshot.
    pub fn saved(&self) -> SavedPower {
        let registers = self.lock();
        SavedPower { status: registers.status, enabled: registers.enabled }
    }

    /// Takes over the state of a snapshot.
    ///
    /// # Errors
    /// [`KvmError`] where KVM does not set the interrupt's line.
    pub fn restore(&self, saved: SavedPower) -> Result<(), KvmError> {
        let mut registers = self.lock();
        (registers.status, registers.enabled) = (saved.status & ACPI_POWER_BUTTON, saved.enabled);
        registers.set_line()
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        // Two words, each changed in one step, so they are valid after a panic elsewhere.
        self.0.lock()
    }
}

impl std::fmt::Debug for PowerButton {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PowerButton").field("is_listening", &self.is_listening()).finish_non_exhaustive()
    }
}

/// The event block and the control block. The guest can enable any event, and only the button's ever comes. The
/// control block says that ACPI is on, and the guest switches itself off by it.
#[derive(Debug)]
pub struct PowerManagement(PowerButton);

impl PowerManagement {
    /// Uses the line of [`crate::x86::acpi::SCI`]; without one the guest polls the button's status.
    pub fn new(line: Option<InterruptLine>) -> PowerManagement {
        PowerManagement(PowerButton(Arc::new(Mutex::new(Registers { line, ..Registers::default() }))))
    }

    /// The button, for the part of the VMM that presses it.
    pub fn button(&self) -> PowerButton {
        self.0.clone()
    }

    /// Logs a line that could not be set: the next kernel would receive an event that did not happen.
    fn set_line(registers: &Registers) {
        if let Err(error) = registers.set_line() {
            tracing::warn!(%error, "cannot set the line of the power management interrupt; it stays as it was");
        }
    }

    fn write_event(&self, offset: u16, word: u16) {
        let mut registers = self.0.lock();
        match offset {
            0 => registers.status &= !word,
            ACPI_ENABLE_OFFSET => registers.enabled = word,
            _ => return,
        }
        Self::set_line(&registers);
    }
}

impl PortDevice for PowerManagement {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        let registers = self.0.lock();
        let [[status, status_high], [enabled, enabled_high]] =
            [registers.status, registers.enabled].map(u16::to_le_bytes);
        let all = [status, status_high, enabled, enabled_high, ACPI_IS_ON, 0];
        for (byte, register) in data.iter_mut().zip(all.iter().skip(offset.into()).chain(std::iter::repeat(&0))) {
            *byte = *register;
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        let Some(word) = data.first_chunk().map(|word| u16::from_le_bytes(*word)) else { return BusEvent::None };
        if offset == POWER_CONTROL_OFFSET && word & ACPI_POWER_OFF == ACPI_POWER_OFF {
            return BusEvent::PowerOff;
        }
        self.write_event(offset, word);
        BusEvent::None
    }

    /// Also drops a press that the guest has not seen.
    fn reset(&mut self) {
        let mut registers = self.0.lock();
        (registers.status, registers.enabled) = (0, 0);
        Self::set_line(&registers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine's ports, its button, and the levels that its line was set to.
    fn machine() -> (PowerManagement, PowerButton, Arc<Mutex<Vec<bool>>>) {
        let levels = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&levels);
        let power = PowerManagement::new(Some(Box::new(move |is_high| {
            seen.lock().push(is_high);
            Ok(())
        })));
        let button = power.button();
        (power, button, levels)
    }

    fn registers(power: &mut PowerManagement) -> [u8; 6] {
        let mut registers = [0xff; 6];
        power.read(0, &mut registers);
        registers
    }

    #[test]
    fn only_the_power_off_word_switches_off() {
        let (mut power, _, _) = machine();
        assert_eq!(power.write(4, &[0x00, 0x20]), BusEvent::PowerOff);
        // A kernel keeps the bit that says ACPI is on.
        assert_eq!(power.write(4, &[0x01, 0x20]), BusEvent::PowerOff);
        assert_eq!(power.write(4, &[0x00, 0x00]), BusEvent::None);
        assert_eq!(power.write(2, &[0x00, 0x20]), BusEvent::None);
        assert_eq!(power.write(4, &[0x20]), BusEvent::None);
    }

    #[test]
    fn an_enabled_event_reads_as_enabled() {
        let (mut power, button, levels) = machine();
        // The global lock: Linux's ACPI enables it and reads it back.
        power.write(2, &[0x20, 0x00]);
        assert_eq!(registers(&mut power), [0, 0, 0x20, 0, 1, 0]);
        let mut enabled = [0xff; 8];
        power.read(2, &mut enabled);
        assert_eq!(enabled, [0x20, 0, 1, 0, 0, 0, 0, 0]);
        assert!(!button.is_listening(), "the button's event is not enabled");
        assert!(!levels.lock().contains(&true));
    }

    #[test]
    fn a_press_is_visible_until_the_guest_acknowledges_it() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x20, 0x01]);
        assert!(button.is_listening());
        button.press().unwrap();
        button.press().unwrap();
        assert_eq!(registers(&mut power), [0, 1, 0x20, 1, 1, 0]);
        // The bit of another event does not clear it.
        power.write(0, &[0xff, 0xfe]);
        assert_eq!(registers(&mut power)[..2], [0, 1]);
        power.write(0, &[0x00, 0x01]);
        assert_eq!(registers(&mut power)[..2], [0, 0]);
        assert_eq!(*levels.lock(), [false, true, true, true, false]);
    }

    #[test]
    fn disabling_a_pressed_button_lowers_the_line_and_enabling_it_raises_the_line() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x00, 0x01]);
        button.press().unwrap();
        power.write(2, &[0x00, 0x00]);
        power.write(2, &[0x00, 0x01]);
        assert_eq!(*levels.lock(), [false, true, false, true]);
    }

    #[test]
    fn a_reset_disables_the_event_and_drops_a_press() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x00, 0x01]);
        button.press().unwrap();
        power.reset();
        assert!(!button.is_listening());
        assert_eq!(levels.lock().last(), Some(&false));
        power.write(2, &[0x00, 0x01]);
        assert_eq!(levels.lock().last(), Some(&false), "the next kernel does not see the press of the previous one");
    }

    #[test]
    fn a_press_that_the_guest_has_not_seen_is_there_after_a_restore() {
        let (mut power, button, _) = machine();
        power.write(2, &[0x00, 0x01]);
        button.press().unwrap();
        let (mut other, other_button, levels) = machine();
        other_button.restore(button.saved()).unwrap();
        assert_eq!((registers(&mut other), other_button.is_listening()), (registers(&mut power), true));
        assert_eq!(*levels.lock(), [true]);
        other.write(0, &[0x00, 0x01]);
        assert_eq!(*levels.lock(), [true, false]);
    }

    #[test]
    fn a_press_without_a_listening_guest_is_refused() {
        let (mut power, button, levels) = machine();
        assert!(matches!(button.press(), Err(PressError::NobodyListens)));
        assert_eq!((registers(&mut power)[..2].to_vec(), levels.lock().len()), (vec![0, 0], 0));
    }

    #[test]
    fn a_guest_without_interrupts_polls_a_press() {
        let mut power = PowerManagement::new(None);
        assert!(matches!(power.button().press(), Err(PressError::NobodyListens)));
        power.write(2, &[0x00, 0x01]);
        power.button().press().unwrap();
        assert_eq!(registers(&mut power), [0, 1, 0, 1, 1, 0]);
    }
}
