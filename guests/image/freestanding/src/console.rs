//! The serial line, and all ways in which the program ends: a failure prints its reason and its code as lines of the
//! protocol, and then writes the exit port. A lock keeps the lines of several vCPUs apart.

#![expect(
    unsafe_code,
    reason = "boot.s sends a vCPU here by name after an exception; the VMM reads a piece of a line at its address"
)]

use core::cell::UnsafeCell;
use core::fmt::{self, Write as _};
use core::hint::spin_loop;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};

use wideleaf_kernels::text::FixedText;
use wideleaf_protocol::direct::{LINE_PIECE_BYTES_MAX, LinePiece};
use wideleaf_protocol::{Entry, ExitCode, Message, port};

use crate::machine::{self, entry, in8, out_address, out8, out16};

/// Bytes that a 16550 takes at once if its line status reports an empty transmitter. QEMU drops bytes while its
/// reader is slow, so after a PVH start the status is read once for that many bytes.
const FIFO_BYTES: u32 = 16;
/// Bit of the line status: the transmitter can take bytes. It is also set if no device answers (0xff).
const TRANSMITTER_EMPTY: u8 = 0x20;
/// Most reads of the line status before a byte is written anyway. After some seconds a lost line is better than
/// silence.
const STATUS_READS_MAX: u32 = 1 << 20;
/// Most turns that a dying vCPU waits for another vCPU's line to end.
const LOCK_TURNS_MAX: u32 = 1 << 24;

static IS_LOCKED: AtomicBool = AtomicBool::new(false);
static BYTES_IN_FIFO: AtomicU32 = AtomicU32::new(0);
/// Set when the program has begun to die: no ordinary line follows.
static IS_DYING: AtomicBool = AtomicBool::new(false);

/// Address of the line port; 0 on a VMM without one.
static LINE_PORT: AtomicU16 = AtomicU16::new(0);

/// The piece that the VMM reads. Only the vCPU that holds the lock of the lines touches it.
struct SharedPiece(UnsafeCell<LinePiece>);

// SAFETY: one vCPU at a time, by the lock.
unsafe impl Sync for SharedPiece {}

static PIECE: SharedPiece = SharedPiece(UnsafeCell::new(LinePiece { length: 0, bytes: [0; LINE_PIECE_BYTES_MAX] }));

/// Takes the line port from the boot data. A number above the highest port means that the VMM has no line port.
pub fn set_line_port(port: u64) {
    LINE_PORT.store(u16::try_from(port).unwrap_or(0), Ordering::Relaxed);
}

/// Switches the FIFO on. Only after a PVH start; the line of a direct start always takes a byte.
pub fn init() {
    const FIFO_CONTROL: u16 = port::SERIAL + 2;
    const FIFO_ENABLE_AND_CLEAR: u8 = 0x07;
    if entry() == Entry::Pvh {
        out8(FIFO_CONTROL, FIFO_ENABLE_AND_CLEAR);
    }
}

/// Prints one line of the protocol.
pub fn emit(message: &Message<'_>) {
    note(format_args!("{message}"));
}

/// Prints a line outside the protocol, for a human reader of the console.
pub fn note(text: fmt::Arguments<'_>) {
    while IS_LOCKED.swap(true, Ordering::Acquire) || IS_DYING.load(Ordering::Relaxed) {
        spin_loop();
    }
    match LINE_PORT.load(Ordering::Relaxed) {
        0 => print(format_args!("{text}\n")),
        port => {
            // SAFETY: this vCPU holds the lock until the writer is dropped.
            let mut line = Pieces { piece: unsafe { &mut *PIECE.0.get() }, port };
            // As in `print`.
            let _ = writeln!(line, "{text}");
            line.give_out();
        }
    }
    IS_LOCKED.store(false, Ordering::Release);
}

/// Ends the program with a panic line that gives the reason, and this exit code.
pub fn fail(code: ExitCode, reason: fmt::Arguments<'_>) -> ! {
    if IS_DYING.swap(true, Ordering::Relaxed) {
        // Another vCPU is dying already, or this one failed while dying. Its own line may never end, so only the
        // exit counts.
        exit(code);
    }
    let mut turns = 0;
    while IS_LOCKED.swap(true, Ordering::Acquire) && turns < LOCK_TURNS_MAX {
        turns += 1;
        spin_loop();
    }
    if turns == LOCK_TURNS_MAX {
        // The panic may come in the middle of another vCPU's line.
        print(format_args!("\n"));
    }
    let text = FixedText::new(reason);
    print(format_args!("{}\n", Message::Panic { message: text.as_str() }));
    print(format_args!("{}\n", Message::Exit { code }));
    exit(code)
}

/// Ends the program: exit port, then power-off, then halt, in a loop.
pub fn exit(code: ExitCode) -> ! {
    out8(port::EXIT, code.port_value());
    out16(port::ACPI_PM1A_CONTROL, port::ACPI_POWER_OFF);
    loop {
        spin_loop();
    }
}

/// Reports the exception that ended the program. Ring 0 has recorded it and sent this vCPU here, on a stack of its
/// own.
#[unsafe(no_mangle)]
extern "C" fn exception_main() -> ! {
    let read = |value: &core::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
    let vector = read(&machine::exception_vector);
    fail(
        ExitCode::Exception,
        format_args!(
            "exception {vector} ({}), error code {:#x}, rip {:#x}, rsp {:#x}, cr2 {:#x}",
            exception_name(vector),
            read(&machine::exception_error),
            read(&machine::exception_rip),
            read(&machine::exception_rsp),
            read(&machine::exception_cr2),
        ),
    )
}

const fn exception_name(vector: u64) -> &'static str {
    match vector {
        0 => "divide error",
        1 => "debug",
        2 => "non-maskable interrupt",
        3 => "breakpoint",
        6 => "invalid opcode",
        7 => "no floating point",
        8 => "double fault",
        10 => "invalid task segment",
        11 => "segment not present",
        12 => "stack fault",
        13 => "general protection",
        14 => "page fault",
        16 => "x87 floating point",
        17 => "alignment check",
        18 => "machine check",
        19 => "SIMD floating point",
        _ => "unknown",
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    match info.location() {
        Some(location) => {
            // The location comes first, since the message may exceed the length of a line.
            fail(ExitCode::Panic, format_args!("{}:{}: {}", location.file(), location.line(), info.message()))
        }
        None => fail(ExitCode::Panic, format_args!("{}", info.message())),
    }
}

/// Prints without checking the lock.
fn print(text: fmt::Arguments<'_>) {
    // Neither our `write_str` nor any of our Display implementations fails.
    let _ = Serial.write_fmt(text);
}

/// Writes a line in pieces, by one exit each.
struct Pieces<'a> {
    piece: &'a mut LinePiece,
    port: u16,
}

impl Pieces<'_> {
    fn give_out(&mut self) {
        // The image and its memory lie below 4 GiB.
        out_address(self.port, (&raw const *self.piece).expose_provenance() as u32);
        self.piece.length = 0;
    }
}

impl fmt::Write for Pieces<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.piece.length as usize == LINE_PIECE_BYTES_MAX {
                self.give_out();
            }
            self.piece.bytes[self.piece.length as usize] = byte;
            self.piece.length += 1;
        }
        Ok(())
    }
}

struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(put);
        Ok(())
    }
}

fn put(byte: u8) {
    if entry() == Entry::Pvh {
        let waiting = BYTES_IN_FIFO.load(Ordering::Relaxed);
        if waiting == 0 {
            let is_empty = |_: &u32| in8(port::SERIAL_LINE_STATUS) & TRANSMITTER_EMPTY != 0;
            let _ = (0..STATUS_READS_MAX).find(is_empty);
        }
        BYTES_IN_FIFO.store((waiting + 1) % FIFO_BYTES, Ordering::Relaxed);
    }
    out8(port::SERIAL, byte);
}
