//! Encoding and decoding of numbers, texts, times and blocks. The reader returns an error for missing bytes.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::{DecodeError, TIME_MAX};
use crate::units::Moment;

pub(super) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

pub(super) fn put_time(out: &mut Vec<u8>, time: Duration) {
    put_number(out, time.min(TIME_MAX).as_nanos() as u64);
}

pub(super) fn put_moment(out: &mut Vec<u8>, moment: Moment) {
    put_time(out, moment.since_start());
}

/// Reads one block, from its first byte to its last.
pub(super) struct Reader<'a> {
    /// All bytes up to the end of the block.
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A reader of `bytes[at..]`.
    pub fn new(bytes: &'a [u8], at: usize) -> Reader<'a> {
        Reader { bytes, at }
    }

    /// Offset of the next byte.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// Number of bytes not read yet.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// A length, and a reader of the bytes of that length after it; `None` if some of them are missing.
    pub fn block(&mut self) -> Result<Option<Reader<'a>>, DecodeError> {
        let length = match self.number() {
            Err(DecodeError::WrongLength { .. }) => return Ok(None),
            length => length?,
        };
        let Some(end) = usize::try_from(length).ok().filter(|length| *length <= self.left()) else {
            return Ok(None);
        };
        let block = Reader { bytes: &self.bytes[..self.at + end], at: self.at };
        self.at += end;
        Ok(Some(block))
    }

    /// Checks that the block has been read to its end.
    pub fn finish(&self) -> Result<(), DecodeError> {
        if self.left() == 0 { Ok(()) } else { Err(DecodeError::WrongLength { offset: self.at }) }
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        let byte = *self.bytes.get(self.at).ok_or(DecodeError::WrongLength { offset: self.at })?;
        self.at += 1;
        Ok(byte)
    }

    pub fn number(&mut self) -> Result<u64, DecodeError> {
        let offset = self.at;
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(DecodeError::OutOfRange { offset, what: "number of 64 bits", value: number })
    }

    /// A number of at most `max`.
    pub fn number_to(&mut self, what: &'static str, max: u64) -> Result<u64, DecodeError> {
        let offset = self.at;
        let value = self.number()?;
        if value <= max { Ok(value) } else { Err(DecodeError::OutOfRange { offset, what, value }) }
    }

    /// One of `values`, by its index.
    pub fn one_of<T: Copy>(&mut self, what: &'static str, values: &[T]) -> Result<T, DecodeError> {
        Ok(values[self.number_to(what, values.len() as u64 - 1)? as usize])
    }

    /// A list: a count, and that number of elements. Each has at least one byte, so no count makes the reader
    /// allocate more elements than the block has bytes.
    pub fn list<T>(
        &mut self,
        what: &'static str,
        mut element: impl FnMut(&mut Reader<'a>) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = self.number_to(what, self.left() as u64)?;
        (0..count).map(|_| element(self)).collect()
    }

    pub fn text(&mut self) -> Result<String, DecodeError> {
        let length = self.number_to("length of a text", self.left() as u64)? as usize;
        let offset = self.at;
        let bytes = self.bytes.get(offset..offset + length).ok_or(DecodeError::WrongLength { offset })?;
        self.at += length;
        core::str::from_utf8(bytes).map(str::to_owned).map_err(|_| DecodeError::NoText { offset })
    }

    pub fn time(&mut self) -> Result<Duration, DecodeError> {
        Ok(Duration::from_nanos(self.number_to("time in nanoseconds", TIME_MAX.as_nanos() as u64)?))
    }

    pub fn moment(&mut self) -> Result<Moment, DecodeError> {
        Ok(Moment::after_start(self.time()?))
    }
}
