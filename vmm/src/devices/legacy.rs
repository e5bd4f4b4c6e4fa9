//! What is left of the PC: the few ports Linux insists on where there is no ACPI.

use wideleaf_protocol::port::{ACPI_PM1A_CONTROL, ACPI_POWER_OFF};

use super::bus::{BusEvent, PortDevice};
use crate::x86::acpi::{POWER_CONTROL_OFFSET, POWER_PORTS};

/// The keyboard controller, without a keyboard: its status is "idle", and its reset command resets (IBM PC AT technical
/// reference; Linux, `reboot=k`).
#[derive(Debug)]
pub struct KeyboardController;

/// First and last port: data at the first, status and command at the last.
pub const KEYBOARD_PORTS: std::ops::RangeInclusive<u16> = 0x60..=0x64;
const COMMAND_OFFSET: u16 = 4;
const COMMAND_RESET: u8 = 0xfe;

impl PortDevice for KeyboardController {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        if offset == COMMAND_OFFSET && data.first() == Some(&COMMAND_RESET) { BusEvent::Reset } else { BusEvent::None }
    }
}

/// The clock's memory, all zeroes. With ones, which an absent device reads as, Linux takes the clock for busy and waits
/// a second for it.
#[derive(Debug)]
pub struct ClockMemory;

/// Its index and data ports.
pub const CLOCK_PORTS: std::ops::RangeInclusive<u16> = 0x70..=0x71;

impl PortDevice for ClockMemory {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, _: &[u8]) -> BusEvent {
        BusEvent::None
    }
}

/// ACPI's power management ports: no event ever, a timer that stands still, and a control register by which the guest
/// switches itself off, where QEMU's machines have it.
#[derive(Debug)]
pub struct PowerManagement;

const _: () = assert!(POWER_PORTS + POWER_CONTROL_OFFSET == ACPI_PM1A_CONTROL, "our guests write where QEMU has it");

impl PortDevice for PowerManagement {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        let word = data.first_chunk().map_or(0, |word| u16::from_le_bytes(*word));
        let is_off = offset == POWER_CONTROL_OFFSET && word & ACPI_POWER_OFF == ACPI_POWER_OFF;
        if is_off { BusEvent::PowerOff } else { BusEvent::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reset_command_resets() {
        assert_eq!(KeyboardController.write(4, &[0xfe]), BusEvent::Reset);
        assert_eq!(KeyboardController.write(4, &[0xad]), BusEvent::None);
        assert_eq!(KeyboardController.write(0, &[0xfe]), BusEvent::None);
        let mut status = [0xff];
        KeyboardController.read(4, &mut status);
        assert_eq!(status, [0], "no input is pending, the output buffer is free");
    }

    #[test]
    fn only_the_power_off_word_switches_off() {
        assert_eq!(PowerManagement.write(4, &[0x00, 0x20]), BusEvent::PowerOff);
        // A kernel keeps the bit that says ACPI is on.
        assert_eq!(PowerManagement.write(4, &[0x01, 0x20]), BusEvent::PowerOff);
        assert_eq!(PowerManagement.write(4, &[0x00, 0x00]), BusEvent::None);
        assert_eq!(PowerManagement.write(2, &[0x00, 0x20]), BusEvent::None);
    }
}
