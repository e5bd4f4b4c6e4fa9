//! Functions that the compiler calls before every load and store of this program, and instead of every block move.
//!
//! ```text
//!   __memprof_load(address) ──▶ in the arena, by the thread that is recorded? ──no──▶ back
//!                                    │yes
//!                                    ▼
//!                         the line of the access before, and the same kind? ──yes──▶ one more
//!                                    │no
//!                                    ▼
//!                         buffer ──(full)──▶ standard output
//! ```
//!
//! LLVM's pass `memprof` (lib/Transforms/Instrumentation/MemProfInstrumentation.cpp) inserts the calls after all
//! optimisation, so the recording has the accesses of the final code, except registers that are spilled to the
//! stack. The pass leaves out functions with names that begin with `__memprof_`, so these do not call themselves.
//! All other parts of this program have calls too, but are not recorded because they stay out of the arena.
#![expect(unsafe_code, reason = "functions of fixed names that the compiler calls, three of which move memory")]

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::process::exit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use wideleaf_protocol::recording::{ACCESSES, ENDED_LOST, PAYLOAD_MAX, Packed, frame_header};

/// Start of the arena, and its length: 0 while nothing is recorded.
static START: AtomicU64 = AtomicU64::new(0);
static LENGTH: AtomicU64 = AtomicU64::new(0);

/// The last access, and the number of its repeats. [`NONE`] before the first.
static LAST: AtomicU64 = AtomicU64::new(NONE);
static MORE: AtomicU32 = AtomicU32::new(0);
/// Value for no access: `Packed::one` leaves the bits of the repeats 0.
const NONE: u64 = u64::MAX;

/// Number of records in a frame.
const CAPACITY: usize = PAYLOAD_MAX / size_of::<u64>();
thread_local! {
    /// Whether the accesses of this thread are recorded: of one thread, so that the order of the others leaves no
    /// trace.
    static IS_RECORDED: Cell<bool> = const { Cell::new(false) };
}

/// Records that are not written yet, and their number. Only one thread uses them. As atomics they need no `unsafe`,
/// and their relaxed loads and stores are plain moves.
static BUFFER: [AtomicU64; CAPACITY] = [const { AtomicU64::new(0) }; CAPACITY];
static FILLED: AtomicUsize = AtomicUsize::new(0);
/// Standard output, without a buffer.
static OUT: OnceLock<File> = OnceLock::new();

/// Starts writing the accesses of these bytes to `out`.
///
/// # Panics
/// Panics if it is called twice, or if a record has no room for the last line.
pub fn begin(start: u64, length: u64, out: File) {
    assert!(length <= Packed::BYTES_MAX, "an arena of {length} bytes has more lines than a record can name");
    assert!(OUT.set(out).is_ok(), "only one recording per process");
    START.store(start, Ordering::Relaxed);
    LENGTH.store(length, Ordering::Relaxed);
}

/// Records the calling thread from now on.
pub fn record_this_thread() {
    IS_RECORDED.set(true);
}

/// Writes a frame, after all records so far.
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
    // The second question may itself load, and be asked again for that load: by then the first has the answer.
    if offset >= LENGTH.load(Ordering::Relaxed) || !IS_RECORDED.get() {
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
        // SAFETY: the first `filled` words of a static are initialised and mapped for ever, bytes need no
        // alignment, and no thread writes them during the call: the one thread that records is here, and the code
        // that it calls stays out of the arena.
        let bytes = unsafe { std::slice::from_raw_parts(start, filled * size_of::<u64>()) };
        write(ACCESSES, bytes);
    }
}

fn write(kind: u32, payload: &[u8]) {
    let Some(mut out) = OUT.get() else { return };
    let written = out.write_all(&frame_header(kind, payload.len() as u32)).and_then(|()| out.write_all(payload));
    if written.is_err() {
        // The reader is gone: no process is left to inform.
        exit(i32::from(ENDED_LOST));
    }
}

/// Records one load and one store for each piece that lies in one line of both sides. A side outside the arena cuts
/// no pieces, since the stack begins at a different address in every process. A move from nowhere (`None`) is a
/// store only.
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

/// Called by the compiler's code before a load of any width.
#[unsafe(no_mangle)]
extern "C" fn __memprof_load(address: u64) {
    record(address, false);
}

/// Called by the compiler's code before a store of any width, or an atomic change.
#[unsafe(no_mangle)]
extern "C" fn __memprof_store(address: u64) {
    record(address, true);
}

/// Records and executes `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, Some(from.addr() as u64), bytes as u64);
    // SAFETY: the caller's promises are those of memcpy.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    to
}

/// Records and executes `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, Some(from.addr() as u64), bytes as u64);
    // SAFETY: the caller's promises are those of memmove.
    unsafe { ptr::copy(from, to, bytes) };
    to
}

/// Records and executes `memset`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __memprof_memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    record_move(to.addr() as u64, None, bytes as u64);
    // SAFETY: the caller's promises are those of memset; it sets the low byte of `value`.
    unsafe { ptr::write_bytes(to, value as u8, bytes) };
    to
}

/// Read first by every function that has calls. In the mode with calls its value has no effect.
#[unsafe(no_mangle)]
static __memprof_shadow_memory_dynamic_address: u64 = 0;
