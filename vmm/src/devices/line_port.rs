//! The line port: a directly started guest gives out whole pieces of lines with one exit each.
//!
//! ```text
//!   guest ─ out 32 bits: address ─▶ [`LinePiece`] in RAM: length, bytes ─▶ [`SerialPort`]'s sinks
//! ```
//!
//! By the serial port alone a line of 70 bytes is 70 exits; on shadow paging in a virtual machine they took a guest
//! 5.8 ms beside other work. The port reads guest RAM, at an address and of a length that the guest chooses: what is no
//! piece within RAM is ignored. It writes nothing, and keeps no state but that it has warned.

use std::sync::Arc;

use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_protocol::direct::LINE_PIECE_BYTES_MAX;

use super::bus::{BusEvent, PortDevice};
use super::serial::SerialPort;
use crate::kvm::GuestMemory;

/// Length of a piece's first field, in bytes.
const LENGTH_BYTES: u64 = 4;

/// The line port.
#[derive(Debug)]
pub struct LinePort {
    serial: SerialPort,
    memory: Arc<GuestMemory>,
    has_warned: bool,
}

impl LinePort {
    /// A port that adds pieces in `memory` to the output of `serial`.
    pub fn new(serial: SerialPort, memory: Arc<GuestMemory>) -> LinePort {
        LinePort { serial, memory, has_warned: false }
    }

    /// Gives out the piece at this address; `None` if no piece is there.
    fn take(&self, address: u32) -> Option<()> {
        let address = u64::from(address);
        // A vCPU's thread reads like the vCPU itself, so it does not wait at the devices' gate.
        let view = self.memory.view();
        let length: u32 = view.read_obj(GuestAddress(address)).ok()?;
        let mut bytes = [0; LINE_PIECE_BYTES_MAX];
        let bytes = bytes.get_mut(..length as usize)?;
        view.read_slice(bytes, GuestAddress(address + LENGTH_BYTES)).ok()?;
        self.serial.put(bytes);
        Some(())
    }
}

impl PortDevice for LinePort {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u16, data: &[u8]) -> BusEvent {
        let address = <[u8; 4]>::try_from(data).ok().map(u32::from_le_bytes);
        if address.and_then(|address| self.take(address)).is_none() && !self.has_warned {
            self.has_warned = true;
            tracing::warn!(
                ?address,
                "cannot print what the guest gave to its line port: no piece of a line is there; it is left out, and \
                 later ones will be without a warning"
            );
        }
        BusEvent::None
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    use super::*;
    use crate::devices::serial::{SerialInterrupt, SerialSink};

    const RAM_BYTES: u32 = 4 << 20;

    fn port() -> (LinePort, Arc<Mutex<Vec<Vec<u8>>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let sink: SerialSink = Box::new(move |line| sink.lock().push(line.to_vec()));
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), mib(4)).unwrap()], backing).unwrap();
        let memory = Arc::new(GuestMemory::new(ram).unwrap());
        (LinePort::new(SerialPort::new(SerialInterrupt::None, sink.into()), memory), lines)
    }

    fn give(port: &mut LinePort, address: u32, length: u32, bytes: &[u8]) {
        let view = port.memory.view();
        view.write_obj(length, GuestAddress(address.into())).unwrap();
        view.write_slice(bytes, GuestAddress(u64::from(address) + LENGTH_BYTES)).unwrap();
        assert_eq!(port.write(0, &address.to_le_bytes()), BusEvent::None);
    }

    #[test]
    fn pieces_become_lines_at_their_ends() {
        let (mut port, lines) = port();
        give(&mut port, 0x1000, 4, b"one\nbeyond");
        give(&mut port, 0x2000, 3, b"two");
        assert_eq!(*lines.lock(), [b"one".to_vec()], "a line ends by its end alone");
        give(&mut port, RAM_BYTES - 16, 12, b" more\nthree\n");
        assert_eq!(lines.lock()[1..], [b"two more".to_vec(), b"three".to_vec()]);
    }

    #[test]
    fn what_is_no_piece_in_ram_is_left_out() {
        let (mut port, lines) = port();
        let view = port.memory.view();
        view.write_obj(LINE_PIECE_BYTES_MAX as u32 + 1, GuestAddress(0x1000)).unwrap();
        view.write_obj(u32::MAX, GuestAddress(0x2000)).unwrap();
        view.write_obj(5_u32, GuestAddress(u64::from(RAM_BYTES) - 8)).unwrap();
        for address in [0x1000, 0x2000, RAM_BYTES - 8, RAM_BYTES - 2, RAM_BYTES, u32::MAX] {
            assert_eq!(port.write(0, &address.to_le_bytes()), BusEvent::None);
        }
        for narrow in [&b"a"[..], b"ab", b"abcdefgh"] {
            assert_eq!(port.write(0, narrow), BusEvent::None);
        }
        give(&mut port, 0, 3, b"ok\n");
        assert_eq!(*lines.lock(), [b"ok".to_vec()]);
    }
}
