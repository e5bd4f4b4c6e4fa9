//! The remaining parts of a PC: the few ports that Linux requires where there is no ACPI.

use super::bus::{BusEvent, PortDevice};
use crate::x86::acpi::RESET_VALUE;

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

/// The clock's memory, all zeroes. An absent device reads as ones, by which Linux takes the clock for busy and
/// waits a second for it.
#[derive(Debug)]
pub struct ClockMemory;

/// Index and data ports of the clock.
pub const CLOCK_PORTS: std::ops::RangeInclusive<u16> = 0x70..=0x71;

impl PortDevice for ClockMemory {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, _: &[u8]) -> BusEvent {
        BusEvent::None
    }
}

/// The reset register: a write that sets the bit of the CPU's reset resets it (Intel ICH datasheets, "RST_CNT").
#[derive(Debug)]
pub struct ResetRegister;

const RESETS: u8 = 1 << 2;

const _: () = assert!(RESET_VALUE & RESETS != 0, "the value in the tables resets the machine");

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
    fn the_reset_register_resets_with_the_cpu_bit_only() {
        // Linux first writes the kind of reset, then the reset.
        assert_eq!(ResetRegister.write(0, &[0x02]), BusEvent::None);
        assert_eq!(ResetRegister.write(0, &[0x06]), BusEvent::Reset);
        assert_eq!(ResetRegister.write(0, &[]), BusEvent::None);
    }
}
