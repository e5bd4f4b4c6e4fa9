//! The serial port: a 16550 that sends its output, line by line, to a sink.
//!
//! ```text
//!   guest ── data ──▶ bytes ──▶ lines ──▶ the sinks
//!   guest ◀── 64 bytes ◀── the console; [`SerialPort::is_listened_to`] tells when a driver keeps them
//! ```
//!
//! The sink runs in the thread of the vCPU that wrote the line's last byte, while that vCPU is out of the
//! guest. Host values that the sink reads (counters above all) thus belong to the moment between two
//! instructions of the guest.

use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::bus::{BusEvent, PortDevice};
use crate::kvm::saved::Digits;

/// Receives each line that the guest prints, without its line end. An unfinished last line comes when
/// the guest ends.
pub type SerialSink = Box<dyn FnMut(&[u8]) + Send>;

/// The sinks of the guest's output.
pub struct SerialOutput {
    /// Sink of complete lines.
    pub lines: SerialSink,
    /// Sink of bytes as they come, before they are lines.
    pub bytes: Option<SerialSink>,
}

impl From<SerialSink> for SerialOutput {
    fn from(lines: SerialSink) -> SerialOutput {
        SerialOutput { lines, bytes: None }
    }
}

/// The interrupt of the first serial port of a PC.
pub const SERIAL_GSI: u32 = 4;

/// Length limit of a line, in bytes. A longer line is emitted in pieces, so that a guest cannot fill our memory.
pub const LINE_BYTES_MAX: usize = 4096;

/// The way in which the port interrupts the guest.
#[derive(Debug)]
pub enum SerialInterrupt {
    /// No interrupts: there are no interrupt controllers.
    None,
    /// An event that KVM turns into [`SERIAL_GSI`].
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

    /// Does nothing: the device flushes after each byte, and the sink receives lines.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The port in a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedSerial {
    /// Divisor latch, in register order: low and high byte.
    divisor: [u8; 2],
    /// Registers: interrupt enable, interrupt identification, line control, line status, modem control, modem status,
    /// scratch.
    registers: [u8; 7],
    /// Typed bytes that the guest has not read.
    typed: Digits,
    /// Bytes of the line that has no end yet. A sink of bytes has received them already.
    line: Digits,
    /// Whether the guest has begun to listen.
    is_listened_to: bool,
}

impl SavedSerial {
    fn state(&self) -> SerialState {
        let [
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = self.registers;
        SerialState {
            baud_divisor_low: self.divisor[0],
            baud_divisor_high: self.divisor[1],
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: self.typed.0.clone(),
        }
    }
}

type Uart = Serial<SerialInterrupt, NoEvents, LineWriter>;

/// Register numbers, as offsets from the first port.
mod register {
    pub const DATA: u16 = 0;
    pub const INTERRUPT_ENABLE: u16 = 1;
    pub const INTERRUPT_IDENTIFICATION: u16 = 2;
    pub const LINE_CONTROL: u16 = 3;
    pub const MODEM_CONTROL: u16 = 4;
    pub const LINE_STATUS: u16 = 5;
    pub const SCRATCH: u16 = 7;
}

/// Enable bit of the interrupt for received data.
const RECEIVED: u8 = 1;

/// All interrupt enable bits. Linux's driver sets them for a moment when it probes the kind of port (`autoconfig`
/// in drivers/tty/serial/8250/8250_port.c), and touches no other register of the port meanwhile.
const ALL_INTERRUPTS: u8 = 0xf;

/// Bit of the line control register that turns the first two registers into the divisor.
const DIVISOR_LATCH: u8 = 0x80;

/// Number of polls for input in a row, without another access to the port, after which the guest counts as
/// listening. A driver that opens its port reads both registers once in a row, and drops the input
/// (`serial8250_do_startup`). A driver that writes polls once for each byte.
const POLLS: u32 = 16;

/// Whether the guest listens for input, by interrupts or by polling.
#[derive(Debug, Default)]
struct Listening {
    has_begun: bool,
    /// Number of polls for input in a row.
    polls: u32,
}

impl Listening {
    /// Records an access that has left the port in this state.
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

    /// Writes and reads the registers like a guest that restores them. The port cannot be created anew, because the
    /// console also owns it.
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
        // A pending interrupt of the old kernel is dropped.
        self.uart.read(register::INTERRUPT_IDENTIFICATION as u8);
        self.listening = Listening::default();
    }

    fn set(&mut self, register: u16, value: u8) {
        if let Err(error) = self.uart.write(register as u8, value) {
            tracing::warn!(register, %error, "cannot reset a register of the serial port; it stays as it was");
        }
    }
}

/// The serial port. Clones are the same port: one is on the bus, one belongs to the console.
#[derive(Clone)]
pub struct SerialPort {
    port: Arc<Mutex<Port>>,
    first_byte: Arc<OnceLock<Instant>>,
}

impl SerialPort {
    /// Creates a port that sends the guest's output to `output`.
    pub fn new(interrupt: SerialInterrupt, output: SerialOutput) -> SerialPort {
        let first_byte = Arc::new(OnceLock::new());
        let writer = LineWriter { output, line: Vec::with_capacity(256), first_byte: Arc::clone(&first_byte) };
        let port = Port { uart: Serial::new(interrupt, writer), listening: Listening::default() };
        SerialPort { port: Arc::new(Mutex::new(port)), first_byte }
    }

    /// Creates a port that continues from a snapshot; a pending interrupt comes again. `None` where the state is one
    /// that no port can be in.
    pub fn restored(interrupt: SerialInterrupt, output: SerialOutput, saved: &SavedSerial) -> Option<SerialPort> {
        if saved.line.0.len() >= LINE_BYTES_MAX {
            return None;
        }
        let first_byte = Arc::new(OnceLock::new());
        let writer = LineWriter { output, line: saved.line.0.clone(), first_byte: Arc::clone(&first_byte) };
        let uart = Serial::from_state(&saved.state(), interrupt, NoEvents, writer).ok()?;
        let listening = Listening { has_begun: saved.is_listened_to, polls: 0 };
        Some(SerialPort { port: Arc::new(Mutex::new(Port { uart, listening })), first_byte })
    }

    /// State of the port, for a snapshot; no vCPU runs.
    pub fn saved(&self) -> SavedSerial {
        let port = self.lock();
        let state = port.uart.state();
        SavedSerial {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            registers: [
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            typed: Digits(state.in_buffer),
            line: Digits(port.uart.writer().line.clone()),
            is_listened_to: port.listening.has_begun,
        }
    }

    /// Adds bytes to the guest's output, as if the guest had written them one by one.
    pub fn put(&self, bytes: &[u8]) {
        let mut port = self.lock();
        bytes.iter().for_each(|byte| port.uart.writer_mut().push(*byte));
    }

    /// Time of the guest's first byte, if there was one.
    pub fn first_byte(&self) -> Option<Instant> {
        self.first_byte.get().copied()
    }

    /// Types into the guest. Returns the number of bytes that its receive buffer of 64 had room for.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        let uart = &mut self.lock().uart;
        let bytes = &bytes[..bytes.len().min(uart.fifo_capacity())];
        uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// Whether the guest has begun to listen. A driver may drop earlier input when it opens the port.
    pub fn is_listened_to(&self) -> bool {
        self.lock().listening.has_begun
    }

    fn lock(&self) -> MutexGuard<'_, Port> {
        self.port.lock()
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

    /// An unfinished line is emitted: the next byte belongs to another kernel.
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
        let sink: SerialSink = Box::new(move |line| sink.lock().push(line.to_vec()));
        (SerialPort::new(SerialInterrupt::None, sink.into()), lines)
    }

    #[test]
    fn lines_come_whole_and_without_their_ends() {
        let (mut port, lines) = port();
        assert_eq!(port.first_byte(), None);
        for byte in b"one\r\ntwo\n\nthr" {
            port.write(0, &[*byte]);
        }
        assert_eq!(*lines.lock(), [b"one".to_vec(), b"two".to_vec(), b"".to_vec()]);
        assert!(port.first_byte().is_some());
        port.flush();
        port.flush();
        assert_eq!(lines.lock().len(), 4, "the last line comes once");
        assert_eq!(lines.lock()[3], b"thr");
    }

    #[test]
    fn a_string_instruction_writes_all_its_bytes() {
        let (mut port, lines) = port();
        port.write(0, b"at once\n");
        assert_eq!(*lines.lock(), [b"at once".to_vec()]);
    }

    #[test]
    fn bytes_come_as_they_are_written_with_their_line_ends() {
        let (seen, (_, lines)) = (Arc::new(Mutex::new(Vec::new())), port());
        let (bytes_to, lines_to) = (Arc::clone(&seen), Arc::clone(&lines));
        let output = SerialOutput {
            lines: Box::new(move |line| lines_to.lock().push(line.to_vec())),
            bytes: Some(Box::new(move |bytes| bytes_to.lock().extend_from_slice(bytes))),
        };
        let mut port = SerialPort::new(SerialInterrupt::None, output);
        port.write(0, b"login: ");
        assert_eq!((seen.lock().as_slice(), lines.lock().len()), (&b"login: "[..], 0));
        port.write(0, b"\r\n\xff");
        assert_eq!(*seen.lock(), b"login: \r\n\xff");
        assert_eq!(*lines.lock(), [b"login: ".to_vec()]);
    }

    #[test]
    fn an_endless_line_comes_in_pieces() {
        let (mut port, lines) = port();
        port.write(0, &vec![b'x'; LINE_BYTES_MAX + 1]);
        port.flush();
        let lengths: Vec<usize> = lines.lock().iter().map(Vec::len).collect();
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

    /// Performs accesses like `in` and `out`: a register and the written value, or `None` for a read.
    fn access(port: &mut SerialPort, accesses: &[(u16, Option<u8>)]) {
        for (register, written) in accesses {
            match written {
                Some(byte) => drop(port.write(*register, &[*byte])),
                None => port.read(*register, &mut [0]),
            }
        }
    }

    #[test]
    fn a_driver_listens_after_it_has_opened_the_port() {
        let (mut port, _) = port();
        // Linux probes the port, sets its speed, prints, and drops pending input.
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
        // Another speed, loopback, a byte of scratch, all interrupts; then input that the guest does not read.
        access(
            &mut port,
            &[(3, Some(0x83)), (0, Some(1)), (1, Some(2)), (3, Some(0x1b)), (1, Some(0xf)), (7, Some(9))],
        );
        access(&mut port, &[(4, Some(0x1f)), (0, Some(b'x')), (4, Some(0x0b))]);
        port.type_in(b"ls\n");
        assert!(port.is_listened_to());
        port.reset();
        assert_eq!(port.lock().uart.state(), at_start);
        assert!(!port.is_listened_to(), "the next driver may drop input");
        assert_eq!(*lines.lock(), [b"cut o".to_vec()]);
    }

    #[test]
    fn a_restored_port_has_its_registers_its_input_and_the_begin_of_a_line() {
        let (mut port, _) = port();
        access(&mut port, &[(3, Some(0x83)), (0, Some(1)), (1, Some(2)), (3, Some(0x1b)), (7, Some(9)), (1, Some(5))]);
        port.type_in(b"ls");
        port.write(0, b"half a l");
        let text = serde_json::to_string(&port.saved()).unwrap();
        let saved: SavedSerial = serde_json::from_str(&text).unwrap();
        let (event, lines) = (EventFd::new(0).unwrap(), Arc::new(Mutex::new(Vec::new())));
        let (interrupt, sink) = (SerialInterrupt::Event(event.try_clone().unwrap()), Arc::clone(&lines));
        let sink: SerialSink = Box::new(move |line| sink.lock().push(line.to_vec()));
        let mut restored = SerialPort::restored(interrupt, sink.into(), &saved).unwrap();
        assert_eq!((restored.saved(), restored.is_listened_to()), (saved, true));
        assert_eq!(event.read().unwrap(), 1, "the input interrupts again");
        restored.write(0, b"ine\n");
        assert_eq!(*lines.lock(), [b"half a line".to_vec()]);
        let mut input = [0; 2];
        restored.read(0, &mut input);
        assert_eq!(&input, b"ls");
    }

    #[test]
    fn a_port_that_cannot_be_is_not_restored() {
        let restored = |typed: usize, line: usize| {
            let saved = SavedSerial { typed: Digits(vec![0; typed]), line: Digits(vec![0; line]), ..port().0.saved() };
            let sink: SerialSink = Box::new(|_| {});
            SerialPort::restored(SerialInterrupt::None, sink.into(), &saved).is_some()
        };
        assert!(restored(64, LINE_BYTES_MAX - 1));
        assert!(!restored(65, 0) && !restored(0, LINE_BYTES_MAX));
    }

    #[test]
    fn a_guest_that_enables_all_interrupts_and_continues_listens() {
        let (mut port, _) = port();
        access(&mut port, &[(1, Some(0xf)), (1, None)]);
        assert!(!port.is_listened_to());
        access(&mut port, &[(4, Some(8))]);
        assert!(port.is_listened_to());
    }

    #[test]
    fn a_guest_that_polls_repeatedly_listens() {
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
