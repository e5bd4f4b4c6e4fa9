//! Writes the snapshots, plans and outcomes of the loop to a file, in the form of [`wideleaf_policies::recording`].
//!
//! ```text
//!   loop ── snapshot, plan, outcomes ──▶ [ bytes of this tick ] ── end of the tick: one write ──▶ file
//! ```
//!
//! A recording never ends the loop. After the first failed write nothing more is written, since half a frame may be
//! there already, and the lost frames are counted. Only whole ticks are written, so that a killed process loses only
//! its last ticks: the last one, and those that a slow file has not taken yet.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use wideleaf_policies::recording::{Encoder, Header, TooManyWindows, VmHeader};
use wideleaf_policies::{BudgetLimits, Moment, Outcome, PlannedAction, Snapshot};

/// Target of a recording, with facts about this host.
pub struct RecordTo {
    /// File for the recording. One that is a [`Write`] delays the loop by the time of each write.
    pub file: Box<dyn RecordFile>,
    /// Facts about host and guest by name, for readers of the recording.
    pub facts: Vec<(String, String)>,
}

/// A file that takes bytes and may write them later.
pub trait RecordFile: Send {
    /// Takes all of these bytes, to be written after the earlier ones.
    ///
    /// # Errors
    /// Why these bytes are not taken, or earlier ones not written: then it gets no more bytes.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Number of bytes written, of those taken.
    fn written(&self) -> u64;

    /// Waits until all bytes are written, or cannot be.
    ///
    /// # Errors
    /// Why they cannot be written.
    fn finish(&mut self) -> io::Result<()>;
}

/// Bytes are written when they are taken.
impl<W: Write + Send> RecordFile for W {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn written(&self) -> u64 {
        u64::MAX
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flush()
    }
}

/// State of a recording.
#[derive(Clone, Debug, Default)]
pub struct RecorderReport {
    /// Number of snapshots, plans and outcomes in the file.
    pub frames: u64,
    /// Number of those that were lost.
    pub frames_lost: u64,
    /// Length of the complete part of the file, in bytes.
    pub bytes: u64,
    /// Error of the first failed write.
    pub error: Option<Arc<io::Error>>,
}

/// An open recording.
pub(crate) struct Recorder {
    encoder: Encoder,
    /// Bytes and frames of this tick that the file has not got yet.
    tick: Vec<u8>,
    frames_in_tick: u64,
    ticks: Ticks,
}

/// Ticks that the file has got.
struct Ticks {
    file: Box<dyn RecordFile>,
    /// Number of bytes taken; then, for each unwritten tick, its end in bytes and its frames.
    taken: u64,
    behind: VecDeque<(u64, u64)>,
    report: RecorderReport,
}

impl Recorder {
    /// Begins a recording; an error of the file appears at the end of the first tick.
    ///
    /// # Errors
    /// [`TooManyWindows`] if there are more windows than the format can hold.
    pub fn start(
        to: RecordTo,
        policy: &str,
        limits: BudgetLimits,
        vms: Vec<VmHeader>,
    ) -> Result<Recorder, TooManyWindows> {
        let header = Header { policy: policy.to_owned(), limits, vms, facts: to.facts };
        let mut tick = Vec::new();
        let encoder = Encoder::start(&header, &mut tick)?;
        let ticks = Ticks { file: to.file, taken: 0, behind: VecDeque::new(), report: RecorderReport::default() };
        Ok(Recorder { encoder, tick, frames_in_tick: 0, ticks })
    }

    pub fn snapshot(&mut self, at: Moment, snapshot: &Snapshot) {
        self.encoder.snapshot(at, snapshot, &mut self.tick);
        self.frames_in_tick += 1;
    }

    pub fn plan(&mut self, now: Moment, actions: &[PlannedAction]) {
        self.encoder.plan(now, actions, &mut self.tick);
        self.frames_in_tick += 1;
    }

    pub fn outcome(&mut self, mechanism: &str, outcome: &Outcome) {
        self.encoder.outcome(mechanism, outcome, &mut self.tick);
        self.frames_in_tick += 1;
    }

    /// Passes the bytes of the tick to the file.
    pub fn end_of_tick(&mut self) {
        self.ticks.put(&self.tick, std::mem::take(&mut self.frames_in_tick));
        self.tick.clear();
    }

    /// Marks the end, and closes the file.
    pub fn finish(mut self) -> RecorderReport {
        self.end_of_tick();
        self.encoder.end(&mut self.tick);
        self.ticks.put(&self.tick, 0);
        self.ticks.finish()
    }
}

impl Ticks {
    fn put(&mut self, tick: &[u8], frames: u64) {
        if self.report.error.is_none() {
            self.report.error = self.file.put(tick).err().map(Arc::new);
        }
        if self.report.error.is_none() {
            self.taken += tick.len() as u64;
            self.behind.push_back((self.taken, frames));
        } else {
            self.report.frames_lost += frames;
        }
        self.see_what_is_written();
    }

    fn finish(mut self) -> RecorderReport {
        if let Err(error) = self.file.finish() {
            self.report.error.get_or_insert(Arc::new(error));
        }
        self.see_what_is_written();
        self.report.frames_lost += self.behind.iter().map(|(_, frames)| frames).sum::<u64>();
        self.report
    }

    fn see_what_is_written(&mut self) {
        let written = self.file.written();
        while let Some((end, frames)) = self.behind.pop_front_if(|(end, _)| *end <= written) {
            self.report.frames += frames;
            self.report.bytes = end;
        }
    }
}
