//! What the compiler calls before every load and store of this program, and in place of every block move.
//!
//! ```text
//!   __memprof_load(address) ──▶ in the arena? ──no──▶ back
//!                                    │yes
//!                                    ▼
//!                         the line of the access before, and the same kind? ──yes──▶ one more
//!                                    │no
//!                                    ▼
//!                         buffer ──(full)──▶ standard output
//! ```
//!
//! LLVM's pass `memprof` (lib/Transforms/Instrumentation/MemProfInstrumentation.cpp) puts in the calls, behind all optimisation: what is
//! seen is what the CPU is told to do, but for registers that are spilled to the stack. It leaves out functions whose name begins with
//! `__memprof_`, so these do not call themselves. All other parts of this program have calls too, and are not recorded because they stay out
//! of the arena.
#![expect(unsafe_code, reason = "functions of fixed names that the compiler calls, three of which move memory")]

use std::fs::File;
use std::io::Write;
use std::process::exit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use wideleaf_protocol::recording::{ACCESSES, ENDED_LOST, PAYLOAD_MAX, Packed, frame_header};

/// Where the arena begins, and its length: 0 as long as nothing is recorded.
static START: AtomicU64 = AtomicU64::new(0);
static LENGTH: AtomicU64 = AtomicU64::new(0);

/// The access that came last, and how many more of the same. [`NONE`] before the first.
static LAST: AtomicU64 = AtomicU64::new(NONE);
static MORE: AtomicU32 = AtomicU32::new(0);
/// No access: `Packed::one` leaves the bits of the repeats 0.
const NONE: u64 = u64::MAX;

/// Records of a frame.
const CAPACITY: usize = PAYLOAD_MAX / size_of::<u64>();
/// Records that are not written yet, and how many. One thread alone uses them; as atomics they need no `unsafe`, and their relaxed loads and
/// stores are plain moves.
static BUFFER: [AtomicU64; CAPACITY] = [const { AtomicU64::new(0) }; CAPACITY];
static FILLED: AtomicUsize = AtomicUsize::new(0);
/// Standard output, without its buffer.
static OUT: OnceLock<File> = OnceLock::new();

/// From now on the accesses of these bytes are written to `out`.
///
/// # Panics
/// When it is called twice, or a record has no room for the last line.
pub fn begin(start: u64, length: u64, out: File) {
    assert!(length <= Packed::BYTES_MAX, "an arena of {length} bytes has more lines than a record can name");
    assert!(OUT.set(out).is_ok(), "one recording a process");
    START.store(start, Ordering::Relaxed);
    LENGTH.store(length, Ordering::Relaxed);
}

/// Writes a frame, behind all that was recorded before.
pub fn write_frame(kind: u32, payload: &[u8]) {
    let last = LAST.swap(NONE, Ordering::Relaxed);
    if last != NONE {
        keep(Packed(last).with_more(MORE.load(Ordering::Relaxed)));
    }
    write_kept();
    write(kind, payload);
}

#[inline(always)]
fn record(address: u64, is_write: bool) {
    let offset = address.wrapping_sub(START.load(Ordering::Relaxed));
    if offset >= LENGTH.load(Ordering::Relaxed) {
        return;
    }
    let this = Packed::one(offset, is_write).0;
    let (last, more) = (LAST.load(Ordering::Relaxed), MORE.load(Ordering::Relaxed));
    if this == last && more < Packed::REPEATS_MAX - 1 {
        MORE.store(more + 1, Ordering::Relaxed);
        return;
    }
    LAST.store(this, Ordering::Relaxed);
    MORE.store(0, Ordering::Relaxed);
    if last != NONE {
        keep(Packed(last).with_more(more));
    }
}

#[inline(always)]
fn keep(packed: Packed) {
    let filled = FILLED.load(Ordering::Relaxed);
    BUFFER[filled].store(packed.0.to_le(), Ordering::Relaxed);
    FILLED.store(filled + 1, Ordering::Relaxed);
    if filled + 1 == CAPACITY {
        write_kept();
    }
}

#[cold]
#[inline(never)]
fn write_kept() {
    let filled = FILLED.swap(0, Ordering::Relaxed);
    if filled > 0 {
        let start = BUFFER.as_ptr().cast::<u8>();
        // SAFETY: the first `filled` words of a static are initialised and mapped for ever, bytes need no alignment, and nobody writes them
        // meanwhile: the one thread that records is here, and what it calls stays out of the arena.
        let bytes = unsafe { std::slice::from_raw_parts(start, filled * size_of::<u64>()) };
        write(ACCESSES, bytes);
    }
}

fn write(kind: u32, payload: &[u8]) {
    let Some(mut out) = OUT.get() else { return };
    let written = out.write_all(&frame_header(kind, payload.len() as u32)).and_then(|()| out.write_all(payload));
    if written.is_err() {
        // Whoever reads has gone: nobody is left to tell.
        exit(i32::from(ENDED_LOST));
    }
}

/// One load and one store for each piece that lies in one line of both. A side outside the arena cuts no pieces: where the stack begins is
/// another in every process. A move from nowhere (`None`) is a store alone.
#[inline(always)]
fn record_move(to: u64, from: Option<u64>, bytes: u64) {
    let from = from.filter(|from| is_inside(*from));
    let is_stored = is_inside(to);
    if from.is_none() && !is_stored {
        return;
    }
    let rest_of_line = |address: u64| Packed::LINE_BYTES - address % Packed::LINE_BYTES;
    let mut done = 0;
    while done < bytes {
        let mut piece = bytes - done;
        if let Some(from) = from {
            piece = piece.min(rest_of_line(from + done));
            record(from + done, false);
        }
        if is_stored {
            piece = piece.min(rest_of_line(to + done));
            record(to + done, true);
        }
        done += piece;
    }
}

#[inline(always)]
fn is_inside(address: u64) -> bool {
    address.wrapping_sub(START.load(Ordering::Relaxed)) < LENGTH.load(Ordering::Relaxed)
}

/// The compiler's: a load of any width from here is next.
#[unsafe(no_mangle)]
extern "C" fn __memprof_load(address: u64) {
    record(address, false);
}

/// The compiler's: a store of any width, or an atomic change, is next.
#[unsafe(no_mangle)]
extern "C" fn __memprof_store(address: u64) {
    record(address, true);
}

/// `memcpy`, recorded.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, Some(from.addr() as u64), bytes as u64);
    // SAFETY: the caller's promises are those of memcpy.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    to
}

/// `memmove`, recorded.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, Some(from.addr() as u64), bytes as u64);
    // SAFETY: the caller's promises are those of memmove.
    unsafe { ptr::copy(from, to, bytes) };
    to
}

/// `memset`, recorded.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, None, bytes as u64);
    // SAFETY: the caller's promises are those of memset; it sets the low byte of `value`.
    unsafe { ptr::write_bytes(to, value as u8, bytes) };
    to
}

/// The compiler's: what every function that has calls reads first. With the calls nothing is done with it.
#[unsafe(no_mangle)]
static __memprof_shadow_memory_dynamic_address: u64 = 0;
