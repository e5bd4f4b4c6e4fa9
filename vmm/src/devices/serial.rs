//! The serial port: a 16550 whose output goes, line by line, to a sink.
//!
//! The sink runs in the thread of the vCPU that wrote the line's last byte, while that vCPU is out of the guest: what the
//! sink reads of the host (counters above all) belongs to the moment between two instructions of the guest.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::bus::{BusEvent, PortDevice};

/// Gets each line the guest prints, without its line end. A last line that was not ended comes when the guest ends.
pub type SerialSink = Box<dyn FnMut(&[u8]) + Send>;

/// Where what the guest prints goes.
pub struct SerialOutput {
    /// Its lines.
    pub lines: SerialSink,
    /// Its bytes as they come, before they are lines.
    pub bytes: Option<SerialSink>,
}

impl From<SerialSink> for SerialOutput {
    fn from(lines: SerialSink) -> SerialOutput {
        SerialOutput { lines, bytes: None }
    }
}

/// The interrupt of the first serial port of a PC.
pub const SERIAL_GSI: u32 = 4;

/// A line longer than this is given out in pieces: a guest must not fill our memory.
pub const LINE_BYTES_MAX: usize = 4096;

/// How the port interrupts the guest.
#[derive(Debug)]
pub enum SerialInterrupt {
    /// Not at all: there are no interrupt controllers.
    None,
    /// By an event that KVM turns into [`SERIAL_GSI`].
    Event(EventFd),
}

impl Trigger for SerialInterrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        match self {
            SerialInterrupt::None => Ok(()),
            SerialInterrupt::Event(event) => event.write(1),
        }
    }
}

/// Collects bytes into lines.
struct LineWriter {
    output: SerialOutput,
    line: Vec<u8>,
    first_byte: Arc<OnceLock<Instant>>,
}

impl LineWriter {
    fn push(&mut self, byte: u8) {
        if self.first_byte.get().is_none() {
            // Only this thread, which holds the device's lock, ever sets it.
            let _ = self.first_byte.set(Instant::now());
        }
        if let Some(bytes) = &mut self.output.bytes {
            bytes(&[byte]);
        }
        if byte == b'\n' {
            if self.line.last() == Some(&b'\r') {
                self.line.pop();
            }
            self.give_out();
            return;
        }
        self.line.push(byte);
        if self.line.len() == LINE_BYTES_MAX {
            self.give_out();
        }
    }

    fn give_out(&mut self) {
        (self.output.lines)(&self.line);
        self.line.clear();
    }

    fn finish(&mut self) {
        if !self.line.is_empty() {
            self.give_out();
        }
    }
}

impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().for_each(|byte| self.push(*byte));
        Ok(bytes.len())
    }

    /// The device flushes after each byte; lines are what is given out.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Uart = Serial<SerialInterrupt, NoEvents, LineWriter>;

/// The port. Clones are the same port: one is on the bus, one with whoever types.
#[derive(Clone)]
pub struct SerialPort {
    uart: Arc<Mutex<Uart>>,
    first_byte: Arc<OnceLock<Instant>>,
}

impl SerialPort {
    /// A port that gives what the guest prints to `output`.
    pub fn new(interrupt: SerialInterrupt, output: SerialOutput) -> SerialPort {
        let first_byte = Arc::new(OnceLock::new());
        let writer = LineWriter { output, line: Vec::with_capacity(256), first_byte: Arc::clone(&first_byte) };
        SerialPort { uart: Arc::new(Mutex::new(Serial::new(interrupt, writer))), first_byte }
    }

    /// When the guest wrote its first byte, if it has.
    pub fn first_byte(&self) -> Option<Instant> {
        self.first_byte.get().copied()
    }

    /// Types into the guest. Gives back how many bytes its receive buffer of 64 had room for.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        let mut uart = self.lock();
        let bytes = &bytes[..bytes.len().min(uart.fifo_capacity())];
        uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SerialPort").field("first_byte", &self.first_byte()).finish_non_exhaustive()
    }
}

impl PortDevice for SerialPort {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        let mut uart = self.lock();
        data.iter_mut().for_each(|byte| *byte = uart.read(offset as u8));
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        let mut uart = self.lock();
        for byte in data {
            if let Err(error) = uart.write(offset as u8, *byte) {
                tracing::warn!(offset, %error, "the serial port cannot interrupt the guest");
            }
        }
        BusEvent::None
    }

    fn flush(&mut self) {
        self.lock().writer_mut().finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> (SerialPort, Arc<Mutex<Vec<Vec<u8>>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let sink: SerialSink = Box::new(move |line| sink.lock().unwrap().push(line.to_vec()));
        (SerialPort::new(SerialInterrupt::None, sink.into()), lines)
    }

    #[test]
    fn lines_come_whole_and_without_their_ends() {
        let (mut port, lines) = port();
        assert_eq!(port.first_byte(), None);
        for byte in b"one\r\ntwo\n\nthr" {
            port.write(0, &[*byte]);
        }
        assert_eq!(*lines.lock().unwrap(), [b"one".to_vec(), b"two".to_vec(), b"".to_vec()]);
        assert!(port.first_byte().is_some());
        port.flush();
        port.flush();
        assert_eq!(lines.lock().unwrap().len(), 4, "the last line comes once");
        assert_eq!(lines.lock().unwrap()[3], b"thr");
    }

    #[test]
    fn a_string_instruction_is_many_bytes() {
        let (mut port, lines) = port();
        port.write(0, b"at once\n");
        assert_eq!(*lines.lock().unwrap(), [b"at once".to_vec()]);
    }

    #[test]
    fn bytes_come_as_they_are_written_and_with_all_their_ends() {
        let (seen, (_, lines)) = (Arc::new(Mutex::new(Vec::new())), port());
        let (bytes_to, lines_to) = (Arc::clone(&seen), Arc::clone(&lines));
        let output = SerialOutput {
            lines: Box::new(move |line| lines_to.lock().unwrap().push(line.to_vec())),
            bytes: Some(Box::new(move |bytes| bytes_to.lock().unwrap().extend_from_slice(bytes))),
        };
        let mut port = SerialPort::new(SerialInterrupt::None, output);
        port.write(0, b"login: ");
        assert_eq!((seen.lock().unwrap().as_slice(), lines.lock().unwrap().len()), (&b"login: "[..], 0));
        port.write(0, b"\r\n\xff");
        assert_eq!(*seen.lock().unwrap(), b"login: \r\n\xff");
        assert_eq!(*lines.lock().unwrap(), [b"login: ".to_vec()]);
    }

    #[test]
    fn an_endless_line_comes_in_pieces() {
        let (mut port, lines) = port();
        port.write(0, &vec![b'x'; LINE_BYTES_MAX + 1]);
        port.flush();
        let lengths: Vec<usize> = lines.lock().unwrap().iter().map(Vec::len).collect();
        assert_eq!(lengths, [LINE_BYTES_MAX, 1]);
    }

    #[test]
    fn the_transmitter_is_always_ready() {
        let (mut port, _) = port();
        let mut status = [0];
        port.read(5, &mut status);
        assert_eq!(status[0] & 0x20, 0x20);
    }

    #[test]
    fn what_is_typed_can_be_read_until_the_buffer_is_full() {
        let (mut port, _) = port();
        assert_eq!(port.type_in(b"ls"), 2);
        let mut byte = [0];
        port.read(0, &mut byte);
        assert_eq!(byte, [b'l']);
        assert_eq!(port.type_in(&[b'x'; 100]), 63);
    }
}
