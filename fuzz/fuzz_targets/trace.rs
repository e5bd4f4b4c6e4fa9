//! A trace of loads and stores: unchanged, and with correct checksums for its blocks, so that the code behind them
//! is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_trace::block::{BLOCK_HEADER_BYTES, checksum};
use wideleaf_trace::{GRANULE_BYTES, TraceError, TraceReader};

/// Bytes of a header before its strings.
const FIXED_BYTES: usize = 40;

fuzz_target!(|bytes: &[u8]| {
    let _ = read(bytes);
    let _ = read(&mended(bytes));
});

fn read(bytes: &[u8]) -> Result<(), TraceError> {
    let mut reader = TraceReader::open(bytes)?;
    let (mut records, mut block) = (0, Vec::new());
    while reader.next_block(&mut block)? {
        assert!(!block.is_empty(), "a block has a record");
        for access in &block {
            let is_in_arena = access.address < reader.header().arena_bytes;
            assert!(is_in_arena && access.address % u64::from(GRANULE_BYTES) == 0 && access.repeats > 0, "{access:?}");
        }
        records += block.len() as u64;
    }
    assert_eq!((reader.totals().records, reader.bytes()), (records, bytes.len() as u64));
    Ok(())
}

/// The bytes with every checksum correct by the format (the README of `guests/trace`).
fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut mended = bytes.to_vec();
    let _ = mend(&mut mended);
    mended
}

/// Corrects the checksums; ends with `None` at the end of the bytes.
fn mend(bytes: &mut [u8]) -> Option<()> {
    let lengths: usize = [32, 34, 36].iter().filter_map(|at| u16_at(bytes, *at)).map(usize::from).sum();
    let strings_end = FIXED_BYTES + lengths;
    let sum = checksum(bytes.get(..FIXED_BYTES)?, bytes.get(FIXED_BYTES..strings_end)?);
    let mut at = put(bytes, strings_end, sum)?;
    loop {
        let stored = u32::from(u16_at(bytes, at + 8)?) | u32::from(u16_at(bytes, at + 10)?) << 16;
        let end = at + BLOCK_HEADER_BYTES + stored as usize;
        let sum = checksum(bytes.get(at..at + 16)?, bytes.get(at + BLOCK_HEADER_BYTES..end)?);
        put(bytes, at + 16, sum)?;
        at = end;
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Writes a checksum and returns the offset behind it.
fn put(bytes: &mut [u8], at: usize, sum: u32) -> Option<usize> {
    bytes.get_mut(at..at + 4)?.copy_from_slice(&sum.to_le_bytes());
    Some(at + 4)
}
