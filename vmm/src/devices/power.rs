//! ACPI's power management ports (ACPI 6.5, 4.8.3): the guest switches itself off there, and hears of its power button.
//!
//! ```text
//!   [`PowerButton::press`] ─▶ status ∧ enabled ─▶ the line of the interrupt is high ─▶ the guest's ACPI reads the status
//!                              ▲                                                          │
//!                              └───────── a 1 in each bit that was seen clears it ────────┘ and the line falls
//! ```
//!
//! The line is as high as the registers say, at any time: an interrupt that comes while the guest is busy with the one before is not lost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wideleaf_protocol::port::{ACPI_PM1A_CONTROL, ACPI_POWER_OFF};

use super::bus::{BusEvent, PortDevice};
use crate::kvm::KvmError;
use crate::x86::acpi::{POWER_CONTROL_OFFSET, POWER_PORTS};

const _: () = assert!(POWER_PORTS + POWER_CONTROL_OFFSET == ACPI_PM1A_CONTROL, "our guests write where QEMU has it");

/// From the first port to the register that enables events; status is in front of it.
const ENABLE_OFFSET: u16 = 2;
/// Power management events are ACPI's, not firmware's.
const ACPI_IS_ON: u8 = 1;
/// `PWRBTN_STS` and `PWRBTN_EN` (4.8.3.1.1, 4.8.3.1.2), the only event that ever comes.
const POWER_BUTTON: u16 = 1 << 8;

/// Makes the line of the interrupt high or low.
pub type InterruptLine = Box<dyn Fn(bool) -> Result<(), KvmError> + Send>;

/// Why a button was pressed in vain.
#[derive(Debug, thiserror::Error)]
pub enum PressError {
    /// Nobody would hear of it.
    #[error("its guest listens to no power button (Linux does with its module `button`)")]
    NobodyListens,
    /// KVM does not interrupt the guest.
    #[error("the power button does not reach its guest: {0}")]
    Kvm(#[from] KvmError),
}

#[derive(Default)]
struct Registers {
    status: u16,
    enabled: u16,
    /// `None` where there are no interrupt controllers.
    line: Option<InterruptLine>,
}

impl Registers {
    fn is_listening(&self) -> bool {
        self.line.is_some() && self.enabled & POWER_BUTTON != 0
    }

    fn set_line(&self) -> Result<(), KvmError> {
        self.line.as_ref().map_or(Ok(()), |line| line(self.status & self.enabled != 0))
    }
}

/// The button of a machine. Clones are the same button.
#[derive(Clone)]
pub struct PowerButton(Arc<Mutex<Registers>>);

impl PowerButton {
    /// Whether the guest has enabled the button's event: its kernel has a driver for it. What that does is the guest's matter.
    pub fn is_listening(&self) -> bool {
        self.lock().is_listening()
    }

    /// Asks the guest to switch itself off. A paused guest hears of it when it is resumed.
    ///
    /// # Errors
    /// [`PressError`]; then the guest does not hear of it.
    pub fn press(&self) -> Result<(), PressError> {
        let mut registers = self.lock();
        if !registers.is_listening() {
            return Err(PressError::NobodyListens);
        }
        registers.status |= POWER_BUTTON;
        Ok(registers.set_line()?)
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        // Two words, each changed in one step: a panic elsewhere leaves them true.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for PowerButton {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PowerButton").field("is_listening", &self.is_listening()).finish_non_exhaustive()
    }
}

/// The event block, in which any event can be enabled and the button's alone comes; and the control block, which says that ACPI is on and by
/// which the guest switches itself off.
#[derive(Debug)]
pub struct PowerManagement(PowerButton);

impl PowerManagement {
    /// With the line of [`crate::x86::acpi::SCI`]; without one there is no button.
    pub fn new(line: Option<InterruptLine>) -> PowerManagement {
        PowerManagement(PowerButton(Arc::new(Mutex::new(Registers { line, ..Registers::default() }))))
    }

    /// The button, for who presses it.
    pub fn button(&self) -> PowerButton {
        self.0.clone()
    }

    /// Says so where the line stays: the next kernel would hear of an event that is none.
    fn set_line(registers: &Registers) {
        if let Err(error) = registers.set_line() {
            tracing::warn!(%error, "the line of the power management interrupt stays as it was");
        }
    }

    fn write_event(&self, offset: u16, word: u16) {
        let mut registers = self.0.lock();
        match offset {
            0 => registers.status &= !word,
            ENABLE_OFFSET => registers.enabled = word,
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

    /// Also the press that nobody has heard of.
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
            seen.lock().unwrap().push(is_high);
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
    fn an_event_that_is_enabled_reads_as_enabled() {
        let (mut power, button, levels) = machine();
        // The global lock, as Linux's ACPI enables it and looks whether it took.
        power.write(2, &[0x20, 0x00]);
        assert_eq!(registers(&mut power), [0, 0, 0x20, 0, 1, 0]);
        let mut enabled = [0xff; 8];
        power.read(2, &mut enabled);
        assert_eq!(enabled, [0x20, 0, 1, 0, 0, 0, 0, 0]);
        assert!(!button.is_listening(), "of the button it has heard nothing");
        assert!(!levels.lock().unwrap().contains(&true));
    }

    #[test]
    fn a_press_is_seen_until_the_guest_says_that_it_saw_it() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x20, 0x01]);
        assert!(button.is_listening());
        button.press().unwrap();
        button.press().unwrap();
        assert_eq!(registers(&mut power), [0, 1, 0x20, 1, 1, 0]);
        // Another event's bit clears nothing of it.
        power.write(0, &[0xff, 0xfe]);
        assert_eq!(registers(&mut power)[..2], [0, 1]);
        power.write(0, &[0x00, 0x01]);
        assert_eq!(registers(&mut power)[..2], [0, 0]);
        assert_eq!(*levels.lock().unwrap(), [false, true, true, true, false]);
    }

    #[test]
    fn what_is_disabled_while_it_is_pressed_lowers_the_line_and_comes_when_it_is_enabled() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x00, 0x01]);
        button.press().unwrap();
        power.write(2, &[0x00, 0x00]);
        power.write(2, &[0x00, 0x01]);
        assert_eq!(*levels.lock().unwrap(), [false, true, false, true]);
    }

    #[test]
    fn after_a_reset_nobody_listens_and_nothing_was_pressed() {
        let (mut power, button, levels) = machine();
        power.write(2, &[0x00, 0x01]);
        button.press().unwrap();
        power.reset();
        assert!(!button.is_listening());
        assert_eq!(levels.lock().unwrap().last(), Some(&false));
        power.write(2, &[0x00, 0x01]);
        assert_eq!(levels.lock().unwrap().last(), Some(&false), "the next kernel is not asked by what was before it");
    }

    #[test]
    fn a_button_that_nobody_listens_to_is_not_pressed() {
        let (mut power, button, levels) = machine();
        assert!(matches!(button.press(), Err(PressError::NobodyListens)));
        assert_eq!((registers(&mut power)[..2].to_vec(), levels.lock().unwrap().len()), (vec![0, 0], 0));
        // Nor one without an interrupt, whatever the guest enables.
        let mut without = PowerManagement::new(None);
        without.write(2, &[0xff, 0xff]);
        assert!(matches!(without.button().press(), Err(PressError::NobodyListens)));
    }
}
