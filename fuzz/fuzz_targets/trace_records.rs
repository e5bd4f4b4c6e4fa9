//! The records of a trace's block, behind checksum and compression. The readable part is written, and read again
//! the same.
//!
//! ```text
//!   input = count (2 bytes) │ log2 of the lines (1 byte) │ records
//! ```
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_trace::records::{Encoder, LINES_MAX, decode};

fuzz_target!(|bytes: &[u8]| {
    let Some(([low, high, log2_lines], records)) = bytes.split_first_chunk() else { return };
    let (count, lines) = (usize::from(u16::from_le_bytes([*low, *high])), (1 << (log2_lines % 64)).min(LINES_MAX));
    let mut accesses = Vec::new();
    if decode(records, count, lines, &mut accesses).is_none() {
        return;
    }
    let (mut encoder, mut written, mut again) = (Encoder::default(), Vec::new(), Vec::new());
    accesses.iter().for_each(|access| encoder.encode(access, &mut written));
    decode(&written, count, lines, &mut again).expect("it was just written");
    assert_eq!(accesses, again);
});
