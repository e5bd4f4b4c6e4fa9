//! Reading a trace as a stream. The reader trusts no data before checking its checksum, and no length before
//! checking its limit.

use std::io::{ErrorKind, Read};

use flate2::{Decompress, FlushDecompress, Status};

use crate::block::{BLOCK_HEADER_BYTES, BlockHeader, Kind, checksum};
use crate::error::TraceError;
use crate::header::{Fixed, STRINGS_MAX};
use crate::records::decode;
use crate::{Access, GRANULE_BYTES, Header, Totals};

/// Reads one trace. Holds one block, whatever the file's length and contents.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: Input<R>,
    header: Header,
    /// Phase of the last block.
    phase: String,
    payload: Vec<u8>,
    plain: Vec<u8>,
    inflate: Decompress,
    /// Totals read so far.
    totals: Totals,
    is_over: bool,
}

impl<R: Read> TraceReader<R> {
    /// Reads the header. Each block takes at least two calls of `read`, so a file needs no buffer around it.
    ///
    /// # Errors
    /// Every [`TraceError`] except those of writing.
    pub fn open(input: R) -> Result<Self, TraceError> {
        let mut input = Input { input, at: 0 };
        let mut fixed = [0; Fixed::BYTES];
        let length = input.read_up_to(&mut fixed)?;
        let fixed = Fixed::from_bytes(&fixed[..length])?;
        let mut rest = [0; STRINGS_MAX + 4];
        let rest = &mut rest[..fixed.strings_bytes() + 4];
        input.read_all(rest)?;
        Ok(Self {
            input,
            header: fixed.header(rest)?,
            phase: String::new(),
            payload: Vec::new(),
            plain: Vec::new(),
            inflate: Decompress::new(false),
            totals: Totals::default(),
            is_over: false,
        })
    }

    /// Description of the recorded run.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// The kernel's phase of the last block's accesses; empty before the first one.
    pub fn phase(&self) -> &str {
        &self.phase
    }

    /// Number of bytes read from the file.
    pub const fn bytes(&self) -> u64 {
        self.input.at
    }

    /// Totals read so far; those of the whole trace once [`Self::next_block`] has returned false.
    pub const fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Replaces the contents of `accesses` by those of the next block, at least one and at most
    /// [`RECORDS_MAX`](crate::block::RECORDS_MAX). Returns false at the end of the trace, after checking the
    /// totals.
    ///
    /// # Errors
    /// Every [`TraceError`] except those of writing. `accesses` is then empty, and no further block will come.
    pub fn next_block(&mut self, accesses: &mut Vec<Access>) -> Result<bool, TraceError> {
        accesses.clear();
        if self.is_over {
            return Ok(false);
        }
        // A reader that has failed stays at its end, whatever the later calls.
        self.is_over = true;
        loop {
            let at = self.input.at;
            let damaged = |what| TraceError::Damaged { at, what };
            let header = self.read_block().map_err(|problem| problem.at(at))?;
            match header.kind {
                Kind::Records => {
                    let lines = self.header.arena_bytes.div_ceil(u64::from(GRANULE_BYTES));
                    if self.unpack(header.plain).is_none() {
                        return Err(damaged("records that cannot be decompressed"));
                    }
                    if decode(&self.plain, header.records as usize, lines, accesses).is_none() {
                        accesses.clear();
                        return Err(damaged("invalid records, or records outside the arena"));
                    }
                    accesses.iter().for_each(|access| self.totals.count(access));
                    self.is_over = false;
                    return Ok(true);
                }
                Kind::Phase => match str::from_utf8(&self.payload) {
                    Ok(name) => name.clone_into(&mut self.phase),
                    Err(_) => return Err(damaged("the name of a phase is not UTF-8")),
                },
                Kind::End => {
                    let totals = Totals::from_bytes(&self.payload).ok_or(damaged("invalid totals"))?;
                    if (Totals { is_cut: totals.is_cut, ..self.totals }) != totals {
                        return Err(damaged("the totals do not match the records"));
                    }
                    self.totals = totals;
                    let end = self.input.at;
                    let behind = self.input.read_up_to(&mut [0])?;
                    let what = "there are bytes after the end of the trace";
                    return if behind == 0 { Ok(false) } else { Err(TraceError::Damaged { at: end, what }) };
                }
            }
        }
    }

    /// Reads the next block into `payload`.
    fn read_block(&mut self) -> Result<BlockHeader, Problem> {
        let mut bytes = [0; BLOCK_HEADER_BYTES];
        self.input.read_all(&mut bytes)?;
        let (header, expected) = BlockHeader::from_bytes(&bytes)?;
        self.payload.resize(header.stored as usize, 0);
        self.input.read_all(&mut self.payload)?;
        if checksum(&bytes[..16], &self.payload) != expected {
            return Err(Problem::Damage("its checksum is wrong"));
        }
        Ok(header)
    }

    /// Decompresses `payload` into `plain`; `None` if it has another length, or if part of the payload is unused.
    fn unpack(&mut self, plain: u32) -> Option<()> {
        self.plain.resize(plain as usize, 0);
        self.inflate.reset(false);
        let status = self.inflate.decompress(&self.payload, &mut self.plain, FlushDecompress::Finish).ok()?;
        let is_all =
            self.inflate.total_in() == self.payload.len() as u64 && self.inflate.total_out() == u64::from(plain);
        (status == Status::StreamEnd && is_all).then_some(())
    }
}

/// Reason why a block was not read.
enum Problem {
    Input(TraceError),
    Damage(&'static str),
}

impl Problem {
    fn at(self, at: u64) -> TraceError {
        match self {
            Self::Input(error) => error,
            Self::Damage(what) => TraceError::Damaged { at, what },
        }
    }
}

impl From<TraceError> for Problem {
    fn from(error: TraceError) -> Self {
        Self::Input(error)
    }
}

impl From<&'static str> for Problem {
    fn from(what: &'static str) -> Self {
        Self::Damage(what)
    }
}

/// The input, and the offset up to which it has been read.
#[derive(Debug)]
struct Input<R> {
    input: R,
    at: u64,
}

impl<R: Read> Input<R> {
    fn read_all(&mut self, bytes: &mut [u8]) -> Result<(), TraceError> {
        if self.read_up_to(bytes)? == bytes.len() { Ok(()) } else { Err(TraceError::Truncated { at: self.at }) }
    }

    /// Fills the bytes as far as the input goes. Returns the number of bytes.
    fn read_up_to(&mut self, bytes: &mut [u8]) -> Result<usize, TraceError> {
        let mut length = 0;
        while length < bytes.len() {
            match self.input.read(&mut bytes[length..]) {
                Ok(0) => break,
                Ok(read) => (length, self.at) = (length + read, self.at + read as u64),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(TraceError::Read { at: self.at, source }),
            }
        }
        Ok(length)
    }
}
