//! Writes what the loop sees, plans and does to a file, in the form of [`wideleaf_policies::recording`].
//!
//! ```text
//!   loop ── snapshot, plan, outcomes ──▶ [ bytes of this tick ] ── end of the tick: one write ──▶ file
//! ```
//!
//! A recording never ends the loop: behind the first write that fails nothing more is written, since half a frame may
//! be there already, and what is lost is counted. Whole ticks are written, so that a process that is killed leaves all but its
//! last ticks: the last one, and those that a slow file has not taken yet.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use wideleaf_policies::recording::{Encoder, Header, TooManyWindows, VmHeader};
use wideleaf_policies::{BudgetLimits, Moment, Outcome, PlannedAction, Snapshot};

use crate::manager::ManagedVm;

/// Where a recording goes, and what is worth knowing of this host.
pub struct RecordTo {
    /// A file. One that is a [`Write`] delays the loop as long as each write takes.
    pub file: Box<dyn RecordFile>,
    /// Facts about host and guest by name, for whoever reads the recording.
    pub facts: Vec<(String, String)>,
}

/// A file that takes bytes and may write them later.
pub trait RecordFile: Send {
    /// Takes all of these bytes, to be written behind those before.
    ///
    /// # Errors
    /// Why it does not, or did not write those before: nothing more is given to it then.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// How many bytes of those that it took are written.
    fn written(&self) -> u64;

    /// Waits until all are written, or will not be.
    ///
    /// # Errors
    /// Why they are not.
    fn finish(&mut self) -> io::Result<()>;
}

/// What is taken is written.
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

/// What became of a recording.
#[derive(Clone, Debug, Default)]
pub struct RecorderReport {
    /// Snapshots, plans and outcomes that are in the file.
    pub frames: u64,
    /// Those that are not.
    pub frames_lost: u64,
    /// Length of the file, as far as it is whole.
    pub bytes: u64,
    /// The first write that failed.
    pub error: Option<Arc<io::Error>>,
}

/// An open recording.
pub(crate) struct Recorder {
    encoder: Encoder,
    /// Bytes and frames of this tick, not given to the file yet.
    tick: Vec<u8>,
    frames_in_tick: u64,
    ticks: Ticks,
}

/// Ticks that were given to the file.
struct Ticks {
    file: Box<dyn RecordFile>,
    /// Bytes that the file has taken, and of what it has not written yet where each tick ends, with its frames.
    taken: u64,
    behind: VecDeque<(u64, u64)>,
    report: RecorderReport,
}

impl Recorder {
    /// Begins a recording; what is wrong with the file is seen at the end of the first tick.
    ///
    /// # Errors
    /// [`TooManyWindows`] where the format does not hold so many.
    pub fn start(
        to: RecordTo,
        policy: &str,
        limits: BudgetLimits,
        vms: &[ManagedVm],
    ) -> Result<Recorder, TooManyWindows> {
        let header =
            Header { policy: policy.to_owned(), limits, vms: vms.iter().map(vm_header).collect(), facts: to.facts };
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

    /// Gives what has come together to the file.
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

fn vm_header(vm: &ManagedVm) -> VmHeader {
    VmHeader {
        vm: vm.id,
        backing: vm.backing.kind().name().to_owned(),
        start_page: vm.backing.start_page(),
        ranges: vm.ranges.iter().map(|range| range.gpa).collect(),
    }
}
