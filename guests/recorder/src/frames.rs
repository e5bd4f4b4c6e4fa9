//! Reads the frames that the kernel's process sends on its standard output. A frame that is cut off ends the stream;
//! the process's exit tells why.

use std::io::{ErrorKind, Read};

use wideleaf_protocol::recording::{ACCESSES, FRAME_HEADER_BYTES, PAYLOAD_MAX, Packed, frame_of};
use wideleaf_trace::{Access, GRANULE_BYTES};

use crate::RecordError;

const _: () = assert!(Packed::LINE_BYTES == GRANULE_BYTES as u64, "both sides use the same line size");

/// Reads frames, one at a time.
pub struct Frames<R> {
    input: R,
    payload: Vec<u8>,
}

/// A frame from the process.
pub enum Frame<'p, I> {
    /// Accesses, in their order.
    Accesses(I),
    /// A line of the protocol.
    Line(&'p str),
}

impl<R: Read> Frames<R> {
    /// Creates a reader of frames.
    pub fn new(input: R) -> Self {
        Self { input, payload: vec![0; PAYLOAD_MAX] }
    }

    /// Reads the next frame; `None` at the end. If the process ends within a frame, that frame is dropped: the
    /// process's exit gives the reason.
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

/// Fills the bytes. Returns false if the input ends before.
fn fill(input: &mut impl Read, bytes: &mut [u8]) -> Result<bool, RecordError> {
    match input.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(RecordError::Read(error)),
    }
}
