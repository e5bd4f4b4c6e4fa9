//! What is left of the PC: the few ports Linux insists on where there is no ACPI.

use wideleaf_protocol::port::{ACPI_PM1A_CONTROL, ACPI_POWER_OFF};

use super::bus::{BusEvent, PortDevice};
use crate::x86::acpi::{POWER_CONTROL_OFFSET, POWER_PORTS, RESET_VALUE};

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

/// ACPI's power management ports (ACPI 6.5, 4.8.3.1, 4.8.3.2): no event ever, but an event that the guest enables counts as enabled; and
/// a control register, where QEMU's machines have it, that says that ACPI is on and by which the guest switches itself off.
#[derive(Debug, Default)]
pub struct PowerManagement {
    enabled_events: [u8; 2],
}

const _: () = assert!(POWER_PORTS + POWER_CONTROL_OFFSET == ACPI_PM1A_CONTROL, "our guests write where QEMU has it");

/// From the first port to the register that enables events; status is in front of it.
const ENABLE_OFFSET: u16 = 2;
/// Power management events are ACPI's, not firmware's: there is none.
const ACPI_IS_ON: u8 = 1;

impl PortDevice for PowerManagement {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        let [low, high] = self.enabled_events;
        let registers = [0, 0, low, high, ACPI_IS_ON, 0];
        for (byte, register) in data.iter_mut().zip(registers.iter().skip(offset.into()).chain(std::iter::repeat(&0))) {
            *byte = *register;
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        let word = data.first_chunk().map(|word| u16::from_le_bytes(*word));
        match (offset, word) {
            (ENABLE_OFFSET, Some(word)) => self.enabled_events = word.to_le_bytes(),
            (POWER_CONTROL_OFFSET, Some(word)) if word & ACPI_POWER_OFF == ACPI_POWER_OFF => return BusEvent::PowerOff,
            _ => {}
        }
        BusEvent::None
    }
}

/// The reset register: the bit that resets the CPU does so when it is set (Intel ICH datasheets, "RST_CNT").
#[derive(Debug)]
pub struct ResetRegister;

const RESETS: u8 = 1 << 2;

const _: () = assert!(RESET_VALUE & RESETS != 0, "what the tables say to write does reset");

impl PortDevice for ResetRegister {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, data: &[u8]) -> BusEvent {
        if data.first().is_some_and(|byte| byte & RESETS != 0) { BusEvent::Reset } else { BusEvent::None }
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
        let mut power = PowerManagement::default();
        assert_eq!(power.write(4, &[0x00, 0x20]), BusEvent::PowerOff);
        // A kernel keeps the bit that says ACPI is on.
        assert_eq!(power.write(4, &[0x01, 0x20]), BusEvent::PowerOff);
        assert_eq!(power.write(4, &[0x00, 0x00]), BusEvent::None);
        assert_eq!(power.write(2, &[0x00, 0x20]), BusEvent::None);
    }

    #[test]
    fn an_event_that_is_enabled_reads_as_enabled_and_never_comes() {
        let mut power = PowerManagement::default();
        // The global lock, as Linux's ACPI enables it and looks whether it took.
        power.write(2, &[0x20, 0x00]);
        let mut registers = [0xff; 8];
        power.read(0, &mut registers);
        assert_eq!(registers, [0, 0, 0x20, 0, 1, 0, 0, 0]);
        let mut enabled = [0xff; 2];
        power.read(2, &mut enabled);
        assert_eq!(enabled, [0x20, 0]);
    }

    #[test]
    fn the_reset_register_resets_with_the_cpus_bit_alone() {
        // As Linux does it: first which kind of reset, then the reset.
        assert_eq!(ResetRegister.write(0, &[0x02]), BusEvent::None);
        assert_eq!(ResetRegister.write(0, &[0x06]), BusEvent::Reset);
        assert_eq!(ResetRegister.write(0, &[]), BusEvent::None);
    }
}
