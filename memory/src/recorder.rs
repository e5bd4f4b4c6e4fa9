//! Writes what the loop sees, plans and does to a file, in the form of [`wideleaf_policies::recording`].
//!
//! ```text
//!   loop ── snapshot, plan, outcomes ──▶ [ bytes of this tick ] ── end of the tick: one write ──▶ file
//! ```
//!
//! A recording never ends the loop: behind the first write that fails nothing more is written, since half a frame may
//! be there already, and what is lost is counted. Whole ticks are written, so that a process that is killed leaves all but its
//! last tick.

use std::io::{self, Write};
use std::sync::Arc;

use wideleaf_policies::recording::{Encoder, Header, TooManyWindows, VmHeader};
use wideleaf_policies::{BudgetLimits, Moment, Outcome, PlannedAction, Snapshot};

use crate::manager::ManagedVm;

/// Where a recording goes, and what is worth knowing of this host.
pub struct RecordTo {
    /// A file. A slow one delays the loop: it writes once a tick.
    pub file: Box<dyn Write + Send>,
    /// Facts about host and guest by name, for whoever reads the recording.
    pub facts: Vec<(String, String)>,
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
    file: Box<dyn Write + Send>,
    encoder: Encoder,
    /// Not written yet.
    tick: Vec<u8>,
    frames_in_tick: u64,
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
        Ok(Recorder { file: to.file, encoder, tick, frames_in_tick: 0, report: RecorderReport::default() })
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

    /// Writes what has come together.
    pub fn end_of_tick(&mut self) {
        let frames = std::mem::take(&mut self.frames_in_tick);
        if self.report.error.is_none() {
            self.report.error = self.file.write_all(&self.tick).err().map(Arc::new);
        }
        match &self.report.error {
            None => {
                self.report.frames += frames;
                self.report.bytes += self.tick.len() as u64;
            }
            Some(_) => self.report.frames_lost += frames,
        }
        self.tick.clear();
    }

    /// Marks the end, and closes the file.
    pub fn finish(mut self) -> RecorderReport {
        self.end_of_tick();
        self.encoder.end(&mut self.tick);
        if self.report.error.is_none() {
            self.report.error = self.file.write_all(&self.tick).and_then(|()| self.file.flush()).err().map(Arc::new);
        }
        if self.report.error.is_none() {
            self.report.bytes += self.tick.len() as u64;
        }
        self.report
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
