//! The frames that the kernel's process sends.

use std::io::{ErrorKind, Read};

use wideleaf_protocol::recording::{ACCESSES, FRAME_HEADER_BYTES, PAYLOAD_MAX, Packed, frame_of};
use wideleaf_trace::{Access, GRANULE_BYTES};

use crate::RecordError;

const _: () = assert!(Packed::LINE_BYTES == GRANULE_BYTES as u64, "both sides name the same lines");

/// Reads frames, one at a time.
pub struct Frames<R> {
    input: R,
    payload: Vec<u8>,
}

/// A frame.
pub enum Frame<'p, I> {
    /// Accesses, in their order.
    Accesses(I),
    /// A line of the protocol.
    Line(&'p str),
}

impl<R: Read> Frames<R> {
    /// Frames from here.
    pub fn new(input: R) -> Self {
        Self { input, payload: vec![0; PAYLOAD_MAX] }
    }

    /// The next one; nothing when there will be no more. A process that ends within a frame has said nothing with it: its end says why.
    pub fn next(&mut self) -> Result<Option<Frame<'_, impl Iterator<Item = Access>>>, RecordError> {
        let mut header = [0; FRAME_HEADER_BYTES];
        if !fill(&mut self.input, &mut header)? {
            return Ok(None);
        }
        let (kind, length) = frame_of(header).ok_or(RecordError::Garbled)?;
        let payload = &mut self.payload[..length];
        if !fill(&mut self.input, payload)? {
            return Ok(None);
        }
        if kind == ACCESSES {
            let words = payload.as_chunks().0.iter().map(|word| Packed(u64::from_le_bytes(*word)));
            return Ok(Some(Frame::Accesses(words.map(|packed| Access {
                address: packed.line() * Packed::LINE_BYTES,
                is_write: packed.is_write(),
                repeats: packed.repeats(),
            }))));
        }
        let text = str::from_utf8(payload).map_err(|_| RecordError::Garbled)?;
        Ok(Some(Frame::Line(text)))
    }
}

/// Fills the bytes; false where the input ends before.
fn fill(input: &mut impl Read, bytes: &mut [u8]) -> Result<bool, RecordError> {
    match input.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(RecordError::Read(error)),
    }
}
