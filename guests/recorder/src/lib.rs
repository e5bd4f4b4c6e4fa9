//! Records every load and store of a benchmark kernel. The kernels, compiled with a call before each access, run as
//! a process of their own. This process encodes and writes their accesses.
//!
//! ```text
//!   this process                                     the kernel's, from memory, without a file
//!   ────────────                                     ─────────────────────────
//!   record ── standard input, never written to ────▶ ends with it, whatever happens here
//!     ▲  └──▶ TraceWriter ─▶ out                      load, store ─▶ in the arena? ─▶ buffer
//!     └──────────── frames: accesses, lines ◀────────────────────────────────────────┘
//! ```
//!
//! With two processes, the encoder is compiled without the calls, and uses a second CPU if there is one.

mod error;
mod frames;
mod process;

use std::io::Write;

use wideleaf_kernels::registry::MemoryNeed;
use wideleaf_kernels::{Kernel, KernelError};
use wideleaf_protocol::arguments::KEY_KERNEL;
use wideleaf_protocol::{CommandLine, Message, Status};
use wideleaf_trace::{Access, Header, Totals, TraceWriter};

pub use error::RecordError;
use frames::{Frame, Frames};
use process::Process;

/// The program, built from `program/`.
static RECORDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/recorded"));

/// A request to record a kernel.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Kernel to record.
    pub kernel: &'a Kernel,
    /// Its parameters, as on a command line.
    pub parameters: &'a str,
    /// Number of threads that share its work, at least one. The accesses of the first are recorded; the parameters in
    /// the header of the trace then end with `threads=`.
    pub threads: usize,
    /// Maximum number of iterations of its timed part; `None` for all.
    pub iterations: Option<u32>,
    /// The one phase to record; `None` for all.
    pub phase: Option<&'a str>,
    /// Limit of the trace in bytes. A longer recording is cut, and exceeds the limit by at most a block.
    pub bytes_max: Option<u64>,
}

/// Progress of a recording, for the caller's `watch`.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Current phase of the kernel.
    pub phase: &'a str,
    /// Totals recorded so far.
    pub totals: &'a Totals,
    /// Bytes of the trace.
    pub bytes: u64,
    /// Finished steps of the timed part, and their total, if the kernel has reported them.
    pub steps: Option<(u64, u64)>,
}

/// A finished recording.
#[derive(Debug)]
pub struct Recorded<W> {
    /// Header of the trace.
    pub header: Header,
    /// Totals of the trace.
    pub totals: Totals,
    /// Whether the kernel verified its own result; `None` if it was not to finish.
    pub is_verified: Option<bool>,
    /// Output that the trace was written to.
    pub out: W,
}

impl Request<'_> {
    /// Size of the kernel's arena in bytes.
    ///
    /// # Errors
    /// [`RecordError::Parameters`] if its parameters are invalid, or if it takes all available memory.
    pub fn arena_bytes(&self) -> Result<u64, RecordError> {
        let refused = |error: KernelError<'_>| RecordError::Parameters(error.to_string());
        if self.threads == 0 {
            return Err(RecordError::Parameters("it needs a thread; use at least one".to_owned()));
        }
        let line = self.line();
        match self.kernel.memory_for(&line, self.threads).map_err(refused)? {
            MemoryNeed::Bytes(bytes) => Ok(bytes.next_multiple_of(8)),
            MemoryNeed::AllThereIs => {
                let why = "it takes all available memory; set its size with bytes=";
                Err(RecordError::Parameters(why.to_owned()))
            }
        }
    }

    fn line(&self) -> String {
        format!("{KEY_KERNEL}={} {}", self.kernel.name, self.parameters).trim_end().to_owned()
    }
}

/// Runs the kernel and writes its trace to `out`. It calls `watch` a few times a second or more often; if that
/// returns false, the recording ends with [`RecordError::Interrupted`]. In every case the kernel's process has
/// ended on return. After an error the bytes in `out` are not a valid trace.
///
/// # Errors
/// [`RecordError`] if the kernel cannot be run or the trace cannot be written.
pub fn record<W: Write>(
    request: &Request<'_>,
    out: W,
    watch: &mut dyn FnMut(&Progress<'_>) -> bool,
) -> Result<Recorded<W>, RecordError> {
    let line = request.line();
    let mut tape = Tape::new(request, &line, request.arena_bytes()?, out)?;
    let mut process = Process::start(RECORDED, request.iterations, request.threads, &line)?;
    let mut frames = Frames::new(process.output());
    loop {
        match frames.next()? {
            None => break,
            Some(Frame::Accesses(words)) => tape.accesses(words)?,
            Some(Frame::Line(text)) => tape.line(text)?,
        }
        if tape.is_full() {
            drop(process);
            return tape.finish(true);
        }
        if !watch(&tape.progress()) {
            return Err(RecordError::Interrupted);
        }
    }
    process.end(tape.last_words())?;
    tape.finish(false)
}

/// The trace under construction.
struct Tape<'a, W> {
    request: &'a Request<'a>,
    header: Header,
    /// `None` before the first phase: by then the kernel has reported its class.
    out: Option<W>,
    writer: Option<TraceWriter<W>>,
    phase: String,
    steps: Option<(u64, u64)>,
    /// The last record, which the next frame may continue. So the borders of frames, which may be anywhere, do not
    /// show in the trace.
    pending: Option<Access>,
    is_verified: Option<bool>,
    has_seen_phase: bool,
    last_words: String,
}

impl<'a, W: Write> Tape<'a, W> {
    fn new(request: &'a Request<'a>, line: &str, arena_bytes: u64, out: W) -> Result<Self, RecordError> {
        let parameters = CommandLine::new(line).map_err(|error| RecordError::Parameters(error.to_string()))?;
        let class = parameters.value("class").filter(|_| !request.kernel.classes.is_empty());
        let header = Header {
            kernel: request.kernel.name.to_string(),
            class: class.unwrap_or_default().to_ascii_uppercase(),
            parameters: match request.threads {
                1 => request.parameters.to_owned(),
                threads => format!("{} threads={threads}", request.parameters).trim_start().to_owned(),
            },
            arena_bytes,
            iterations: request.iterations.unwrap_or(0),
            class_iterations: 0,
        };
        Ok(Self {
            request,
            header,
            out: Some(out),
            writer: None,
            phase: String::new(),
            steps: None,
            pending: None,
            is_verified: None,
            has_seen_phase: false,
            last_words: String::new(),
        })
    }

    /// Handles a line of the kernel.
    fn line(&mut self, text: &str) -> Result<(), RecordError> {
        match wideleaf_protocol::parse(text) {
            Some(Ok(Message::Problem { class, iterations, .. })) => {
                self.header.class = class.to_string();
                self.header.class_iterations = iterations;
                self.header.iterations = self.request.iterations.map_or(iterations, |most| most.min(iterations));
            }
            Some(Ok(Message::Begin { phase, .. })) => self.begin(phase.as_str())?,
            Some(Ok(Message::Progress { done, total, .. })) => self.steps = Some((done, total)),
            Some(Ok(Message::Verify { status, .. })) => self.is_verified = Some(status == Status::Pass),
            Some(Ok(Message::Panic { message })) => message.clone_into(&mut self.last_words),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return Err(RecordError::Garbled),
        }
        Ok(())
    }

    fn begin(&mut self, phase: &str) -> Result<(), RecordError> {
        self.put_pending()?;
        phase.clone_into(&mut self.phase);
        self.steps = None;
        if self.is_wanted() {
            self.has_seen_phase = true;
            self.writer()?.phase(phase)?;
        }
        Ok(())
    }

    /// Whether the current phase is recorded.
    fn is_wanted(&self) -> bool {
        self.request.phase.is_none_or(|wanted| wanted == self.phase)
    }

    fn accesses(&mut self, words: impl Iterator<Item = Access>) -> Result<(), RecordError> {
        if !self.is_wanted() {
            return Ok(());
        }
        for access in words {
            match &mut self.pending {
                Some(pending) if (pending.address, pending.is_write) == (access.address, access.is_write) => {
                    match pending.repeats.checked_add(access.repeats) {
                        Some(repeats) => pending.repeats = repeats,
                        // The trace is full at the same place, wherever the kernel's process has cut its frames.
                        None => {
                            let rest = access.repeats - (u32::MAX - pending.repeats);
                            pending.repeats = u32::MAX;
                            self.put_pending()?;
                            self.pending = Some(Access { repeats: rest, ..access });
                        }
                    }
                }
                _ => {
                    self.put_pending()?;
                    self.pending = Some(access);
                }
            }
        }
        Ok(())
    }

    fn put_pending(&mut self) -> Result<(), RecordError> {
        if let Some(access) = self.pending.take() {
            if access.address >= self.header.arena_bytes {
                return Err(RecordError::Garbled);
            }
            self.writer()?.push(&access)?;
        }
        Ok(())
    }

    fn writer(&mut self) -> Result<&mut TraceWriter<W>, RecordError> {
        if let Some(out) = self.out.take() {
            self.writer = Some(TraceWriter::create(out, &self.header)?);
        }
        self.writer.as_mut().ok_or(RecordError::Garbled)
    }

    fn progress(&self) -> Progress<'_> {
        const NOTHING: &Totals = &Totals { records: 0, reads: 0, writes: 0, is_cut: false };
        let (totals, bytes) = self.writer.as_ref().map_or((NOTHING, 0), |writer| (writer.totals(), writer.bytes()));
        Progress { phase: &self.phase, totals, bytes, steps: self.steps }
    }

    fn is_full(&self) -> bool {
        self.request.bytes_max.is_some_and(|most| self.progress().bytes >= most)
    }

    fn last_words(&self) -> &str {
        &self.last_words
    }

    fn finish(mut self, is_cut: bool) -> Result<Recorded<W>, RecordError> {
        self.put_pending()?;
        if let (Some(phase), false) = (self.request.phase, self.has_seen_phase) {
            return Err(RecordError::NoPhase(phase.to_owned()));
        }
        self.writer()?;
        let Some(writer) = self.writer else { return Err(RecordError::Garbled) };
        let (totals, out) = writer.finish(is_cut)?;
        let is_verified = self.is_verified.filter(|_| !is_cut);
        Ok(Recorded { header: self.header, totals, is_verified, out })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the program headers (elf(5)): 64 bits, little endian.
    #[test]
    fn the_program_starts_on_a_machine_without_a_dynamic_linker() {
        const PT_INTERP: u32 = 3;
        let word = |at: usize| u64::from_le_bytes(RECORDED[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| usize::from(u16::from_le_bytes([RECORDED[at], RECORDED[at + 1]]));
        let (table, size, count) = (word(0x20) as usize, half(0x36), half(0x38));
        let kind = |header: usize| word(table + header * size) as u32;
        assert!(count > 0 && (0..count).all(|header| kind(header) != PT_INTERP), "{count} program headers");
    }
}
