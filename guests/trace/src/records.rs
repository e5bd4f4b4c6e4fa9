//! Encoding of records: a line is written as its distance from the last line of one of eight streams.
//!
//! ```text
//!   token   7 6 5 │ 4       │ 3 2 1  │ 0           heads (lines), per block, all 0 at first
//!           small │ repeats │ stream │ write       ┌────┬────┬────┬───┐
//!                                                  │ a  │ col│ x  │ … │   line = heads[stream] + distance
//!   small 0…6: distance −3 … +3, zig-zag           └────┴────┴────┴───┘   heads[stream] = line
//!   small 7:   a zig-zag varint follows
//!   repeats 1: a varint of (repeats − 2) follows; otherwise repeats is 1
//! ```
//!
//! Reason for the streams: a loop over several arrays touches them in turn, so the distance from the last access is
//! always large, while the distance from the last access of the same array is 0 or 1. The writer chooses the stream
//! of a record, at no cost to the reader.

use crate::{Access, GRANULE_BYTES};

/// Number of streams. BT, LU and MG walk more arrays and rows at once, but most of those are close to each other.
const STREAMS: usize = 8;
/// Largest distance, in lines, from a stream's last line at which a line belongs to it: the lines of a 4 KiB page.
/// A larger jump goes to the stream that has been silent longest, since it would disturb a stream in use.
const NEAR: u64 = 64;
/// Value of a token's `small` that announces a varint.
const FAR: u64 = 7;

const WRITE: u8 = 1;
const REPEATED: u8 = 1 << 4;

/// Limit of the line numbers: addresses of up to 2^57 bytes, the reach of five levels of tables.
pub const LINES_MAX: u64 = 1 << 51;
/// Largest record in bytes: token, a varint of 52 bits, a varint of 32 bits.
pub const RECORD_BYTES_MAX: usize = 1 + 8 + 5;

/// Writes the records of one block.
#[derive(Debug, Default)]
pub struct Encoder {
    heads: [u64; STREAMS],
    /// Time of each stream's last use, in records.
    used: [u64; STREAMS],
    now: u64,
}

impl Encoder {
    /// Appends a record. Its address is a multiple of the granule and below [`LINES_MAX`] granules; its repeats are
    /// at least 1.
    pub fn encode(&mut self, access: &Access, bytes: &mut Vec<u8>) {
        let line = access.address / u64::from(GRANULE_BYTES);
        let stream = self.stream_of(line);
        let distance = zigzag(line.wrapping_sub(self.heads[stream]).cast_signed());
        self.heads[stream] = line;
        self.now += 1;
        self.used[stream] = self.now;

        let repeated = if access.repeats > 1 { REPEATED } else { 0 };
        let write = if access.is_write { WRITE } else { 0 };
        bytes.push((distance.min(FAR) as u8) << 5 | repeated | (stream as u8) << 1 | write);
        if distance >= FAR {
            put_varint(distance, bytes);
        }
        if access.repeats > 1 {
            put_varint(u64::from(access.repeats - 2), bytes);
        }
    }

    /// The stream with the nearest last line, or the one that has been silent longest if none is near.
    fn stream_of(&self, line: u64) -> usize {
        let (mut nearest, mut distance, mut oldest) = (0, u64::MAX, 0);
        for stream in 0..STREAMS {
            let away = line.abs_diff(self.heads[stream]);
            if away < distance {
                (nearest, distance) = (stream, away);
            }
            if self.used[stream] < self.used[oldest] {
                oldest = stream;
            }
        }
        if distance <= NEAR { nearest } else { oldest }
    }
}

/// Decodes exactly `count` records from all of `bytes` and appends them. `None` if the bytes are not such records,
/// or if a line is not below `lines`; the caller must then discard the appended records.
pub fn decode(bytes: &[u8], count: usize, lines: u64, accesses: &mut Vec<Access>) -> Option<()> {
    let mut heads = [0_u64; STREAMS];
    let mut rest = bytes;
    for _ in 0..count {
        let token = take(&mut rest)?;
        let stream = usize::from(token >> 1) % STREAMS;
        let small = u64::from(token >> 5);
        let distance = if small == FAR { take_varint(&mut rest)? } else { small };
        let line = heads[stream].checked_add_signed(unzigzag(distance)).filter(|line| *line < lines)?;
        heads[stream] = line;
        let repeats = if token & REPEATED == 0 { 1 } else { take_varint(&mut rest)?.checked_add(2)? };
        accesses.push(Access {
            address: line * u64::from(GRANULE_BYTES),
            is_write: token & WRITE != 0,
            repeats: u32::try_from(repeats).ok()?,
        });
    }
    rest.is_empty().then_some(())
}

/// Maps 0, −1, 1, −2, … to 0, 1, 2, 3, ….
const fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63).cast_unsigned()
}

const fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -((number & 1).cast_signed())
}

/// Writes seven bits a byte, the lowest first; the top bit is set if more follow.
fn put_varint(mut number: u64, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    // Nine bytes have 63 bits: more than any written number, and no shift overflows.
    for shift in (0..63).step_by(7) {
        let byte = take(rest)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn take(rest: &mut &[u8]) -> Option<u8> {
    let (first, behind) = rest.split_first()?;
    *rest = behind;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: u64, is_write: bool, repeats: u32) -> Access {
        Access { address: line * u64::from(GRANULE_BYTES), is_write, repeats }
    }

    fn encoded(accesses: &[Access]) -> Vec<u8> {
        let (mut encoder, mut bytes) = (Encoder::default(), Vec::new());
        accesses.iter().for_each(|access| encoder.encode(access, &mut bytes));
        bytes
    }

    #[test]
    fn the_bytes_are_those_of_the_documentation() {
        // Line 1 for stream 0, which is near: distance +1 is 2 in zig-zag. Then 200: far from all, so the stream
        // that has been silent longest, number 1, takes it as 400 = 0b11_0010000. Then 199, a store repeated five
        // times: distance −1 is 1, 5 − 2 = 3.
        let bytes = encoded(&[at(1, false, 1), at(200, false, 1), at(199, true, 5)]);
        assert_eq!(bytes, [2 << 5, 7 << 5 | 1 << 1, 0x90, 0x03, 1 << 5 | 1 << 4 | 1 << 1 | 1, 3]);
    }

    #[test]
    fn a_loop_over_several_arrays_takes_a_byte_a_record_once_it_runs() {
        let arrays = [0, 1 << 20, 5 << 20, 9 << 20];
        let accesses: Vec<_> = (0..1000).flat_map(|i| arrays.map(|array| at(array + i / 8, array == 0, 1))).collect();
        let bytes = encoded(&accesses);
        assert!(bytes.len() <= accesses.len() + 3 * 4, "{} bytes for {} records", bytes.len(), accesses.len());
    }

    #[test]
    fn the_outermost_values_come_back() {
        let accesses = [at(LINES_MAX - 1, true, u32::MAX), at(0, false, 1), at(LINES_MAX - 1, false, 2)];
        let bytes = encoded(&accesses);
        assert!(bytes.len() <= accesses.len() * RECORD_BYTES_MAX);
        let mut back = Vec::new();
        decode(&bytes, 3, LINES_MAX, &mut back).expect("they are records");
        assert_eq!(back, accesses);
    }

    #[test]
    fn too_few_bytes_too_many_and_lines_outside_are_refused() {
        let bytes = encoded(&[at(900, false, 7)]);
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length], 1, LINES_MAX, &mut Vec::new()).is_none());
        }
        assert!(decode(&bytes, 0, LINES_MAX, &mut Vec::new()).is_none());
        assert!(decode(&bytes, 1, 900, &mut Vec::new()).is_none());
        assert!(decode(&bytes, 1, 901, &mut Vec::new()).is_some());
        assert!(decode(&[1 << 5], 1, LINES_MAX, &mut Vec::new()).is_none(), "a line before the first");
        assert!(decode(&[0xff; 20], 1, LINES_MAX, &mut Vec::new()).is_none(), "a varint without an end");
    }
}
