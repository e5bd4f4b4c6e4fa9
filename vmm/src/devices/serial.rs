//! The serial port: a 16550 whose output goes, line by line, to a sink.
//!
//! ```text
//!   guest ── data ──▶ bytes ──▶ lines ──▶ the sinks
//!   guest ◀── 64 bytes ◀── who types; [`SerialPort::is_listened_to`] tells when a driver would not drop them any more
//! ```
//!
//! The sink runs in the thread of the vCPU that wrote the line's last byte, while that vCPU is out of the guest: what the
//! sink reads of the host (counters above all) belongs to the moment between two instructions of the guest.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use vm_superio::serial::{NoEvents, SerialState};
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

/// Registers, by their places behind the first port.
mod register {
    pub const DATA: u16 = 0;
    pub const INTERRUPT_ENABLE: u16 = 1;
    pub const INTERRUPT_IDENTIFICATION: u16 = 2;
    pub const LINE_CONTROL: u16 = 3;
    pub const MODEM_CONTROL: u16 = 4;
    pub const LINE_STATUS: u16 = 5;
    pub const SCRATCH: u16 = 7;
}

/// The interrupt that says that there is something to read.
const RECEIVED: u8 = 1;

/// Every interrupt there is. Linux's driver enables them for a moment when it looks what kind of port this is (`autoconfig` in
/// drivers/tty/serial/8250/8250_port.c), and touches nothing else of the port meanwhile.
const ALL_INTERRUPTS: u8 = 0xf;

/// With this bit of the line control, the first two registers are the divisor.
const DIVISOR_LATCH: u8 = 0x80;

/// Whoever asks for input so often, and for nothing else of the port in between, waits for it. A driver that opens its port reads both
/// registers once in a row, and drops what was there (`serial8250_do_startup`); who writes looks whether it may, once for each byte.
const POLLS: u32 = 16;

/// Whether somebody in the guest listens, by interrupts or by asking again and again.
#[derive(Debug, Default)]
struct Listening {
    has_begun: bool,
    /// Looks for input in a row.
    polls: u32,
}

impl Listening {
    /// After an access that has left the port like this.
    fn see(&mut self, offset: u16, is_read: bool, port: &SerialState) {
        let is_divisor = port.line_control & DIVISOR_LATCH != 0;
        let is_poll = is_read && (offset == register::LINE_STATUS || (offset == register::DATA && !is_divisor));
        self.polls = if is_poll { self.polls + 1 } else { 0 };
        let may_be_probed = offset == register::INTERRUPT_ENABLE && port.interrupt_enable == ALL_INTERRUPTS;
        let is_enabled = port.interrupt_enable & RECEIVED != 0 && !may_be_probed;
        self.has_begun |= is_enabled || self.polls >= POLLS;
    }
}

struct Port {
    uart: Uart,
    listening: Listening,
}

impl Port {
    fn has_seen(&mut self, offset: u16, is_read: bool) {
        if !self.listening.has_begun {
            self.listening.see(offset, is_read, &self.uart.state());
        }
    }

    /// Written and read as by a guest that leaves the port as it found it: the port itself cannot be had anew, for who types has it too.
    fn reset(&mut self) {
        let fresh = SerialState::default();
        self.uart.writer_mut().finish();
        self.set(register::LINE_CONTROL, fresh.line_control | DIVISOR_LATCH);
        self.set(register::DATA, fresh.baud_divisor_low);
        self.set(register::INTERRUPT_ENABLE, fresh.baud_divisor_high);
        self.set(register::LINE_CONTROL, fresh.line_control);
        for _ in 0..self.uart.state().in_buffer.len() {
            self.uart.read(register::DATA as u8);
        }
        self.set(register::INTERRUPT_ENABLE, fresh.interrupt_enable);
        self.set(register::MODEM_CONTROL, fresh.modem_control);
        self.set(register::SCRATCH, fresh.scratch);
        // What was to be interrupted for is over.
        self.uart.read(register::INTERRUPT_IDENTIFICATION as u8);
        self.listening = Listening::default();
    }

    fn set(&mut self, register: u16, value: u8) {
        if let Err(error) = self.uart.write(register as u8, value) {
            tracing::warn!(register, %error, "a register of the serial port stays as it was");
        }
    }
}

/// The port. Clones are the same port: one is on the bus, one with whoever types.
#[derive(Clone)]
pub struct SerialPort {
    port: Arc<Mutex<Port>>,
    first_byte: Arc<OnceLock<Instant>>,
}

impl SerialPort {
    /// A port that gives what the guest prints to `output`.
    pub fn new(interrupt: SerialInterrupt, output: SerialOutput) -> SerialPort {
        let first_byte = Arc::new(OnceLock::new());
        let writer = LineWriter { output, line: Vec::with_capacity(256), first_byte: Arc::clone(&first_byte) };
        let port = Port { uart: Serial::new(interrupt, writer), listening: Listening::default() };
        SerialPort { port: Arc::new(Mutex::new(port)), first_byte }
    }

    /// When the guest wrote its first byte, if it has.
    pub fn first_byte(&self) -> Option<Instant> {
        self.first_byte.get().copied()
    }

    /// Types into the guest. Gives back how many bytes its receive buffer of 64 had room for.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        let uart = &mut self.lock().uart;
        let bytes = &bytes[..bytes.len().min(uart.fifo_capacity())];
        uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// Whether somebody in the guest has begun to listen. What is typed before a driver may drop when it opens the port.
    pub fn is_listened_to(&self) -> bool {
        self.lock().listening.has_begun
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SerialPort").field("first_byte", &self.first_byte()).finish_non_exhaustive()
    }
}

impl PortDevice for SerialPort {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        let mut port = self.lock();
        for byte in data {
            *byte = port.uart.read(offset as u8);
            port.has_seen(offset, true);
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
        let mut port = self.lock();
        for byte in data {
            if let Err(error) = port.uart.write(offset as u8, *byte) {
                tracing::warn!(offset, %error, "the serial port cannot interrupt the guest");
            }
            port.has_seen(offset, false);
        }
        BusEvent::None
    }

    fn flush(&mut self) {
        self.lock().uart.writer_mut().finish();
    }

    /// A line that the guest did not end is given out: what comes next is another kernel's.
    fn reset(&mut self) {
        self.lock().reset();
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

    /// As `in` and `out` do it: a register and what is written to it, or that it is read.
    fn access(port: &mut SerialPort, accesses: &[(u16, Option<u8>)]) {
        for (register, written) in accesses {
            match written {
                Some(byte) => drop(port.write(*register, &[*byte])),
                None => port.read(*register, &mut [0]),
            }
        }
    }

    #[test]
    fn a_driver_listens_from_when_it_has_opened_the_port() {
        let (mut port, _) = port();
        // What Linux does: looks what it is, sets its speed, prints, drops what is there.
        let probes =
            [(1, None), (1, Some(0)), (1, None), (1, Some(0xf)), (1, None), (1, Some(0)), (2, None), (4, None)];
        let sets_speed =
            [(3, Some(0x83)), (0, Some(1)), (1, Some(0)), (0, None), (1, Some(1)), (1, Some(0)), (3, Some(3))];
        let prints = [(5, None), (0, Some(b'x')), (5, None), (0, Some(b'y')), (5, None)];
        let drops = [(2, Some(7)), (2, Some(0)), (5, None), (0, None), (2, None), (6, None)];
        for _ in 0..POLLS {
            for accesses in [&probes[..], &sets_speed, &prints, &drops, &drops] {
                access(&mut port, accesses);
                assert!(!port.is_listened_to(), "{accesses:?}");
            }
        }
        access(&mut port, &[(1, Some(5))]);
        assert!(port.is_listened_to());
        access(&mut port, &[(1, Some(0))]);
        assert!(port.is_listened_to(), "it masks its interrupts while it prints");
    }

    #[test]
    fn after_a_reset_the_port_is_as_at_the_start() {
        let (mut port, lines) = port();
        let at_start = port.lock().uart.state();
        port.write(0, b"cut o");
        // Another speed, loopback, a byte of scratch, all interrupts; then input that nobody reads.
        access(
            &mut port,
            &[(3, Some(0x83)), (0, Some(1)), (1, Some(2)), (3, Some(0x1b)), (1, Some(0xf)), (7, Some(9))],
        );
        access(&mut port, &[(4, Some(0x1f)), (0, Some(b'x')), (4, Some(0x0b))]);
        port.type_in(b"ls\n");
        assert!(port.is_listened_to());
        port.reset();
        assert_eq!(port.lock().uart.state(), at_start);
        assert!(!port.is_listened_to(), "who is typed to then may drop it");
        assert_eq!(*lines.lock().unwrap(), [b"cut o".to_vec()]);
    }

    #[test]
    fn who_enables_all_interrupts_and_goes_on_listens() {
        let (mut port, _) = port();
        access(&mut port, &[(1, Some(0xf)), (1, None)]);
        assert!(!port.is_listened_to());
        access(&mut port, &[(4, Some(8))]);
        assert!(port.is_listened_to());
    }

    #[test]
    fn who_asks_again_and_again_listens() {
        for asked in [[(5, None), (5, None)], [(5, None), (0, None)]] {
            let (mut port, _) = port();
            let mut rounds = 0;
            while !port.is_listened_to() {
                access(&mut port, &asked);
                rounds += 1;
                assert!(rounds <= POLLS / 2, "{asked:?}");
            }
        }
    }
}
