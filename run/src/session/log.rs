//! What one boot of a guest has said, within bounds, and what becomes of it: the phases, regions and results of a
//! report. It asks nothing of the host.

use std::collections::BTreeMap;
use std::time::Instant;

use wideleaf_memory::manager::ManagerReport;
use wideleaf_policies::{Bytes, GpaRange, Moment};
use wideleaf_protocol::{Entry, ExitCode};

use super::limits::{DroppedMessages, Mark, Marks, RESULTS_MAX, begin_of};
use crate::report::{Counters, Figure, Gaps, Hello, Measurement, Phase, Problem, Region, Verification, VmmCost, Walks};

/// A stretch between `begin` and `end`.
pub(super) struct PhaseLog {
    pub(super) name: String,
    pub(super) began_at: Moment,
    pub(super) begin_tsc: u64,
    pub(super) end_tsc: Option<u64>,
    pub(super) at_begin: Counters,
    pub(super) at_end: Option<Counters>,
    pub(super) is_complete: bool,
    pub(super) marks: Marks,
    pub(super) walks: Option<Walks>,
}

#[derive(Default)]
pub(super) struct Log {
    pub(super) entry: Option<Entry>,
    pub(super) hello: Option<Hello>,
    pub(super) problem: Option<Problem>,
    pub(super) tsc_hz: u64,
    pub(super) phases: Vec<PhaseLog>,
    pub(super) regions: Vec<(String, GpaRange)>,
    pub(super) regions_seen: Vec<Region>,
    pub(super) results: BTreeMap<String, Measurement>,
    pub(super) gaps: Vec<Gaps>,
    pub(super) verification: Option<Verification>,
    pub(super) mismatch: Option<String>,
    pub(super) panic: Option<String>,
    pub(super) kernel_panic: Option<String>,
    pub(super) exit: Option<ExitCode>,
    pub(super) malformed: Vec<String>,
    pub(super) cut: DroppedMessages,
    /// Counters of the latest observation; they also stand for observations that were skipped.
    pub(super) latest: Counters,
    pub(super) resident_beyond_guest_ram: Option<Bytes>,
    pub(super) first_line_at: Option<Instant>,
}

impl Log {
    /// Keeps a finite result: JSON has no other numbers. The latest of a name counts.
    pub(super) fn keep_result(&mut self, name: &str, result: Measurement) {
        if result.value.is_finite() && (self.results.len() < RESULTS_MAX || self.results.contains_key(name)) {
            self.results.insert(begin_of(name).to_owned(), result);
        } else {
            self.cut.count("results", 1);
        }
    }

    fn figure(&self) -> Option<Figure> {
        Figure::of(&self.hello.as_ref()?.kernel, &self.results)
    }

    /// Takes out what the guest reported, with the rates before and after the manager's actions.
    pub(super) fn observed(&mut self, manager: Option<&ManagerReport>, process_start: Instant) -> Observed {
        let tsc_hz = self.tsc_hz;
        let phases = self.phases.iter().map(|phase| phase.report(tsc_hz, manager)).collect();
        let mut verification = self.verification.take();
        if let Some(verification) = &mut verification {
            verification.first_mismatch = self.mismatch.take();
        }
        Observed {
            phases,
            regions: std::mem::take(&mut self.regions_seen),
            figure: self.figure(),
            hello: self.hello.take(),
            problem: self.problem.take(),
            results: std::mem::take(&mut self.results),
            gaps: std::mem::take(&mut self.gaps),
            verification,
            panic: self.panic.take(),
            kernel_panic: self.kernel_panic.take(),
            exit: self.exit,
            has_begun: self.first_line_at.is_some(),
            malformed: std::mem::take(&mut self.malformed),
            cut: self.cut.by_name(),
            vmm: VmmCost {
                resident_beyond_guest_ram_bytes: self.resident_beyond_guest_ram.map(Bytes::get),
                first_byte_ms: self
                    .first_line_at
                    .filter(|_| self.entry != Some(Entry::Native))
                    .map(|at| at.duration_since(process_start).as_secs_f64() * 1e3),
            },
        }
    }
}

/// Content of a run's lines, after the guest has ended.
pub struct Observed {
    /// Message of the kernel that said hello.
    pub hello: Option<Hello>,
    /// Problem that the kernel solves, if it has classes.
    pub problem: Option<Problem>,
    /// Timed parts of the run.
    pub phases: Vec<Phase>,
    /// Regions of the guest's data.
    pub regions: Vec<Region>,
    /// Main measurement of the run, for a built-in kernel.
    pub figure: Option<Figure>,
    /// All measurements of the guest, by name.
    pub results: BTreeMap<String, Measurement>,
    /// Gaps that the guest measured, by vCPU.
    pub gaps: Vec<Gaps>,
    /// Verification by the guest.
    pub verification: Option<Verification>,
    /// Message of the guest's panic, if it panicked.
    pub panic: Option<String>,
    /// Reason of its Linux kernel's panic, if any.
    pub kernel_panic: Option<String>,
    /// Exit code in its `exit` line.
    pub exit: Option<ExitCode>,
    /// Whether at least one protocol line came.
    pub has_begun: bool,
    /// First lines that begin like protocol lines but are malformed, without control characters.
    pub malformed: Vec<String>,
    /// Number of messages that were not kept, by kind.
    pub cut: BTreeMap<String, u64>,
    /// Memory and time that the VMM used.
    pub vmm: VmmCost,
}

/// Reason of a Linux kernel's panic, if this line reports one (kernel/panic.c).
pub(super) fn kernel_panic(line: &str) -> Option<String> {
    const SAYS: &str = "Kernel panic - not syncing: ";
    const CHARACTERS_MAX: usize = 200;
    let (_, why) = line.split_once(SAYS)?;
    Some(why.chars().filter(|character| !character.is_control()).take(CHARACTERS_MAX).collect())
}

impl PhaseLog {
    fn report(&self, tsc_hz: u64, manager: Option<&ManagerReport>) -> Phase {
        let end_tsc = self.end_tsc.or(self.marks.last().map(|mark| mark.tsc)).unwrap_or(self.begin_tsc);
        // In ticks, if the clock's frequency is unknown.
        let hz_or_one = tsc_hz.max(1) as f64;
        let seconds = end_tsc.saturating_sub(self.begin_tsc) as f64 / hz_or_one;
        let units = self.marks.last().map_or(0, |mark| mark.done);
        let first_done = manager.and_then(|manager| manager.first_done_at);
        let last_done = manager.and_then(|manager| manager.last_done_at);
        let start = Mark { at: self.began_at, tsc: self.begin_tsc, done: 0 };
        let before = first_done.and_then(|first| self.marks.all().iter().rev().find(|mark| mark.at <= first));
        let after = last_done.and_then(|last| {
            // If a promotion was over before the phase began, the whole phase ran on its result.
            if last <= self.began_at { Some(&start) } else { self.marks.all().iter().find(|mark| mark.at >= last) }
        });
        Phase {
            name: self.name.clone(),
            seconds,
            began_at_s: self.began_at.since_start().as_secs_f64(),
            at_begin: self.at_begin,
            at_end: self.at_end.unwrap_or(self.at_begin),
            is_complete: self.is_complete,
            units,
            rate_per_s: self.marks.last().and_then(|last| rate_between(&start, last, tsc_hz)).unwrap_or(0.0),
            rate_before_promotion_per_s: before.and_then(|mark| rate_between(&start, mark, tsc_hz)),
            rate_after_promotion_per_s: after
                .and_then(|mark| self.marks.last().and_then(|last| rate_between(mark, last, tsc_hz))),
            progress: self
                .marks
                .all()
                .iter()
                .map(|mark| (mark.tsc.saturating_sub(self.begin_tsc) as f64 / hz_or_one, mark.done))
                .collect(),
            walks: self.walks,
        }
    }
}

/// Units per second between two marks, by the guest's clock; `None` if they are too close to be meaningful.
fn rate_between(from: &Mark, to: &Mark, tsc_hz: u64) -> Option<f64> {
    rate_over(to.done.saturating_sub(from.done), to.tsc.saturating_sub(from.tsc), tsc_hz)
}

/// Units per second over a number of ticks; `None` if they are too few to be meaningful.
pub fn rate_over(units: u64, ticks: u64, tsc_hz: u64) -> Option<f64> {
    /// A progress mark is late by at most one line's exit, tens of microseconds: 1 % of this.
    const SHORTEST_S: f64 = 0.01;
    seconds_of(ticks, tsc_hz).filter(|seconds| *seconds >= SHORTEST_S).map(|seconds| units as f64 / seconds)
}

/// Ticks of the guest's clock in seconds; `None` if its frequency is unknown.
pub fn seconds_of(ticks: u64, tsc_hz: u64) -> Option<f64> {
    (tsc_hz > 0).then(|| ticks as f64 / tsc_hz as f64)
}
