//! Records every load and store of a benchmark kernel: the kernels, compiled with a call before each of them, as a process of their own, whose
//! accesses this process encodes and writes.
//!
//! ```text
//!   this process                                     the kernel's, from memory: no file of it exists
//!   ────────────                                     ─────────────────────────
//!   record ── standard input, never written to ────▶ ends with it, whatever happens here
//!     ▲  └──▶ TraceWriter ─▶ out                      load, store ─▶ in the arena? ─▶ buffer
//!     └──────────── frames: accesses, lines ◀────────────────────────────────────────┘
//! ```
//!
//! Two processes, so that what encodes and compresses is compiled as everything else, and has a CPU of its own where there are two.

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

/// The program, which `program/` is the source of.
static RECORDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/recorded"));

/// What is to be recorded.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Its parameters, as on a command line.
    pub parameters: &'a str,
    /// Iterations of its timed part at most; all where there is nothing.
    pub iterations: Option<u32>,
    /// The one phase that is recorded; all of them where there is nothing.
    pub phase: Option<&'a str>,
    /// The recording ends once the trace is longer than so many bytes; then it is cut, and at most a block longer.
    pub bytes_max: Option<u64>,
}

/// How far a recording is, for whoever watches it.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The kernel's phase.
    pub phase: &'a str,
    /// What has been recorded.
    pub totals: &'a Totals,
    /// Bytes of the trace.
    pub bytes: u64,
    /// Steps of the timed part that are done, of how many, where the kernel has said so.
    pub steps: Option<(u64, u64)>,
}

/// What was recorded.
#[derive(Debug)]
pub struct Recorded<W> {
    /// The trace's header.
    pub header: Header,
    /// The trace's totals.
    pub totals: Totals,
    /// Whether the kernel found its own result right; nothing where it was not to come to its result.
    pub is_verified: Option<bool>,
    /// Where it went.
    pub out: W,
}

impl Request<'_> {
    /// Bytes that the kernel works on.
    ///
    /// # Errors
    /// [`RecordError::Parameters`] where its parameters cannot be, or say that it takes as much as there is.
    pub fn arena_bytes(&self) -> Result<u64, RecordError> {
        let refused = |error: KernelError<'_>| RecordError::Parameters(error.to_string());
        let line = self.line();
        match self.kernel.memory_for(&line, 1).map_err(refused)? {
            MemoryNeed::Bytes(bytes) => Ok(bytes.next_multiple_of(8)),
            MemoryNeed::AllThereIs => {
                let why = "it takes as much memory as there is; say how much with bytes=";
                Err(RecordError::Parameters(why.to_owned()))
            }
        }
    }

    fn line(&self) -> String {
        format!("{KEY_KERNEL}={} {}", self.kernel.name, self.parameters).trim_end().to_owned()
    }
}

/// Runs the kernel and writes its trace to `out`. `watch` is called some times a second and more; when it returns false, the recording ends
/// with [`RecordError::Interrupted`]. In every case the kernel's process has ended when this returns. What has been written by then is no
/// trace after an error.
///
/// # Errors
/// [`RecordError`].
pub fn record<W: Write>(
    request: &Request<'_>,
    out: W,
    watch: &mut dyn FnMut(&Progress<'_>) -> bool,
) -> Result<Recorded<W>, RecordError> {
    let line = request.line();
    let mut tape = Tape::new(request, &line, request.arena_bytes()?, out)?;
    let mut process = Process::start(RECORDED, request.iterations, &line)?;
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

/// The trace that is being written.
struct Tape<'a, W> {
    request: &'a Request<'a>,
    header: Header,
    /// There is none before the first phase: by then the kernel has said what its class is.
    out: Option<W>,
    writer: Option<TraceWriter<W>>,
    phase: String,
    steps: Option<(u64, u64)>,
    /// The record that came last, which the next frame may go on with. So no border of a frame, which may be anywhere, is in the trace.
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
            parameters: request.parameters.to_owned(),
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

    /// A line of the kernel.
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
                        // Full at the same place, however the kernel's process has cut it.
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
