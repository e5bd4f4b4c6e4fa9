//! The port by which a guest ends itself: QEMU's `isa-debug-exit` without the shift, so that the same image
//! ends under both.

use super::bus::{BusEvent, PortDevice};

/// The exit port. A write of one, two or four bytes is the code, little-endian.
#[derive(Debug)]
pub struct ExitPort;

impl PortDevice for ExitPort {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, data: &[u8]) -> BusEvent {
        let mut code = [0; 4];
        let bytes = data.len().min(code.len());
        code[..bytes].copy_from_slice(&data[..bytes]);
        BusEvent::Exit(u32::from_le_bytes(code))
    }
}

/// The port of the direct entry's fault stubs ([`crate::x86::fault_report`]).
#[derive(Debug)]
pub struct FaultPort;

impl PortDevice for FaultPort {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, _: &[u8]) -> BusEvent {
        BusEvent::Fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_as_wide_as_the_write() {
        assert_eq!(ExitPort.write(0, &[3]), BusEvent::Exit(3));
        assert_eq!(ExitPort.write(0, &[0x34, 0x12]), BusEvent::Exit(0x1234));
        assert_eq!(ExitPort.write(0, &[0x78, 0x56, 0x34, 0x12]), BusEvent::Exit(0x1234_5678));
    }
}
