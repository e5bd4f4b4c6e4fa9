//! Writing a trace as a stream.
//!
//! ```text
//!   push ─▶ encoder ─▶ plain bytes ──(block full, or another phase)──▶ deflate ─▶ checksum ─▶ out
//! ```

use std::io::Write;

use flate2::{Compress, Compression, FlushCompress, Status};

use crate::block::{BLOCK_HEADER_BYTES, BlockHeader, Kind, PHASE_BYTES_MAX, PLAIN_MAX, RECORDS_MAX, STORED_MAX};
use crate::error::TraceError;
use crate::records::{Encoder, LINES_MAX};
use crate::{Access, GRANULE_BYTES, Header, Totals};

/// Writes one trace. Holds one block, whatever the length.
#[derive(Debug)]
pub struct TraceWriter<W> {
    out: W,
    /// Number of bytes written.
    at: u64,
    arena_bytes: u64,
    encoder: Encoder,
    /// Encoded records of the current block, and their number.
    plain: Vec<u8>,
    records: u32,
    stored: Vec<u8>,
    deflate: Compress,
    totals: Totals,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace. Every block is one `write`, so a file needs no buffer around it.
    ///
    /// # Errors
    /// [`TraceError::Unrecordable`] if the header does not fit its format; [`TraceError::Write`].
    pub fn create(out: W, header: &Header) -> Result<Self, TraceError> {
        if header.arena_bytes > LINES_MAX * u64::from(GRANULE_BYTES) {
            return Err(TraceError::Unrecordable("the arena is larger than any address space"));
        }
        let bytes = header.to_bytes().ok_or(TraceError::Unrecordable("a name or the parameters are too long"))?;
        let mut writer = Self {
            out,
            at: 0,
            arena_bytes: header.arena_bytes,
            encoder: Encoder::default(),
            plain: Vec::with_capacity(PLAIN_MAX),
            records: 0,
            stored: Vec::with_capacity(STORED_MAX),
            // The fastest level: the compressible part is the repetition of whole loops, which it finds too.
            deflate: Compress::new(Compression::fast(), false),
            totals: Totals::default(),
        };
        writer.write(&bytes)?;
        Ok(writer)
    }

    /// Begins the kernel's phase of this name. The following records belong to it until the next phase.
    ///
    /// # Errors
    /// [`TraceError::Unrecordable`] if the name is longer than [`PHASE_BYTES_MAX`]; [`TraceError::Write`].
    pub fn phase(&mut self, name: &str) -> Result<(), TraceError> {
        if name.len() > PHASE_BYTES_MAX {
            return Err(TraceError::Unrecordable("the name of a phase is too long"));
        }
        self.end_block()?;
        self.write_block(Kind::Phase, 0, name.len() as u32, name.as_bytes())
    }

    /// Appends a record.
    ///
    /// # Errors
    /// [`TraceError::Write`] if a block cannot be written.
    ///
    /// # Panics
    /// Panics if the address is not a multiple of the granule or not in the arena, or if the repeats are 0.
    pub fn push(&mut self, access: &Access) -> Result<(), TraceError> {
        let is_line = access.address.is_multiple_of(u64::from(GRANULE_BYTES));
        assert!(is_line && access.address < self.arena_bytes && access.repeats > 0, "{access:?} is not a record");
        self.encoder.encode(access, &mut self.plain);
        self.totals.count(access);
        self.records += 1;
        if self.records as usize == RECORDS_MAX { self.end_block() } else { Ok(()) }
    }

    /// Totals of all records so far.
    pub const fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Number of bytes written so far, without the records since the last block.
    pub const fn bytes(&self) -> u64 {
        self.at
    }

    /// Writes the remaining records and the end. `is_cut`: the recording ends before the kernel does. Returns the
    /// totals and the output.
    ///
    /// # Errors
    /// [`TraceError::Write`] if a block cannot be written.
    pub fn finish(mut self, is_cut: bool) -> Result<(Totals, W), TraceError> {
        self.end_block()?;
        self.totals.is_cut = is_cut;
        let payload = self.totals.to_bytes();
        self.write_block(Kind::End, 0, payload.len() as u32, &payload)?;
        let at = self.at;
        self.out.flush().map_err(|source| TraceError::Write { at, source })?;
        Ok((self.totals, self.out))
    }

    /// Compresses and writes the records of the block, if there are any.
    fn end_block(&mut self) -> Result<(), TraceError> {
        if self.records == 0 {
            return Ok(());
        }
        let mut stored = std::mem::take(&mut self.stored);
        stored.clear();
        self.deflate.reset();
        let status = self.deflate.compress_vec(&self.plain, &mut stored, FlushCompress::Finish);
        assert!(matches!(status, Ok(Status::StreamEnd)), "{STORED_MAX} bytes hold any block: {status:?}");

        let written = self.write_block(Kind::Records, self.records, self.plain.len() as u32, &stored);
        (self.stored, self.encoder, self.records) = (stored, Encoder::default(), 0);
        self.plain.clear();
        written
    }

    fn write_block(&mut self, kind: Kind, records: u32, plain: u32, payload: &[u8]) -> Result<(), TraceError> {
        let header = BlockHeader { kind, records, stored: payload.len() as u32, plain };
        let mut block = Vec::with_capacity(BLOCK_HEADER_BYTES + payload.len());
        block.extend_from_slice(&header.to_bytes(payload));
        block.extend_from_slice(payload);
        self.write(&block)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), TraceError> {
        self.out.write_all(bytes).map_err(|source| TraceError::Write { at: self.at, source })?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}
