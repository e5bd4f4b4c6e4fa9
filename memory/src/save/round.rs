//! One round of a save: some pages of some windows are copied out of RAM and given to the sink, by several threads. RAM
//! is only read. While the guest runs, the bit of a page is cleared in the log before the page is copied, so that a
//! later write of the guest is in the next round.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::{GpaRange, Moment, PageSet, PageSize, WindowIndex};

use super::logs::Logs;
use super::{SaveError, SaveLimits, SaveProgress, Saver};
use crate::region::GuestRam;

const PAGE_BYTES: usize = PageSize::Base4K.bytes().as_usize();
const WINDOW_BYTES: usize = PageSize::Huge2M.bytes().as_usize();
/// Longest sleep for the limit of bytes per second: a cancelled save ends within it.
pub(super) const NAP_MAX: Duration = Duration::from_millis(20);

/// What one round did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SaveRound {
    /// Number of pages that were read and given to the sink.
    pub pages: u64,
    /// Number of windows that they are in.
    pub windows: u64,
    /// Time of the round.
    pub duration: Duration,
}

/// Pages of one window to be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub window: WindowIndex,
    /// Pages that are read from RAM.
    pub read: PageSet,
    /// Pages that RAM does not have: they are zero, and not read.
    pub zero: PageSet,
}

impl Job {
    pub fn reading(window: WindowIndex, pages: PageSet) -> Job {
        Job { window, read: pages, zero: PageSet::EMPTY }
    }

    /// Number of its pages.
    pub fn pages(&self) -> u64 {
        u64::from(self.read.len()) + u64::from(self.zero.len())
    }
}

/// Both lists as one, ascending by window. What the later list says of a page counts.
pub(super) fn merged(earlier: Vec<Job>, later: Vec<Job>) -> Vec<Job> {
    let mut jobs: BTreeMap<WindowIndex, Job> = earlier.into_iter().map(|job| (job.window, job)).collect();
    for job in later {
        let of_window = jobs.entry(job.window).or_insert(Job::reading(job.window, PageSet::EMPTY));
        of_window.read = of_window.read.without(job.zero).with(job.read);
        of_window.zero = of_window.zero.without(job.read).with(job.zero);
    }
    jobs.into_values().collect()
}

/// Runs the rounds of one save, with the same buffers.
pub(super) struct Rounds<'a> {
    saver: Saver<'a>,
    limits: &'a SaveLimits,
    cancel: &'a AtomicBool,
    progress: &'a dyn Fn(SaveProgress),
    buffers: Vec<Vec<u8>>,
    /// Number of the round.
    number: u32,
}

/// One round, as its threads share it.
struct Shared<'a> {
    saver: Saver<'a>,
    /// Logs in which pages are cleared before they are copied; none while the guest is paused.
    logs: Option<&'a Logs<'a>>,
    jobs: &'a [Job],
    next: AtomicUsize,
    done: AtomicU64,
    began: Moment,
    /// Limit of bytes per second.
    pace: Option<u64>,
    /// Ends the round early, if it is set by the caller.
    cancel: Option<&'a AtomicBool>,
    failed: Mutex<Option<SaveError>>,
    is_over: AtomicBool,
}

impl<'a> Rounds<'a> {
    pub fn new(
        saver: Saver<'a>,
        limits: &'a SaveLimits,
        cancel: &'a AtomicBool,
        progress: &'a dyn Fn(SaveProgress),
    ) -> Rounds<'a> {
        // Written once, so that no page of them is missing during the pause.
        let buffers = (0..limits.threads.get()).map(|_| vec![0xff; WINDOW_BYTES]).collect();
        Rounds { saver, limits, cancel, progress, buffers, number: 0 }
    }

    /// Runs a round while the guest runs.
    ///
    /// # Errors
    /// [`SaveError`] of the sink or the logs, or [`SaveError::Cancelled`].
    pub fn run(&mut self, jobs: &[Job], logs: &Logs<'_>) -> Result<SaveRound, SaveError> {
        let pace = self.limits.bytes_per_second.map(|limit| limit.get());
        let round = self.run_with(jobs, Some(logs), pace, Some(self.cancel));
        if self.cancel.load(Ordering::Relaxed) { Err(SaveError::Cancelled) } else { round }
    }

    /// Runs the last round, as fast as possible and to its end.
    ///
    /// # Errors
    /// [`SaveError`] of the sink.
    pub fn run_paused(&mut self, jobs: &[Job]) -> Result<SaveRound, SaveError> {
        self.run_with(jobs, None, None, None)
    }

    fn run_with(
        &mut self,
        jobs: &[Job],
        logs: Option<&Logs<'_>>,
        pace: Option<u64>,
        cancel: Option<&AtomicBool>,
    ) -> Result<SaveRound, SaveError> {
        self.number += 1;
        let pages: u64 = jobs.iter().map(Job::pages).sum();
        let report = |done| (self.progress)(SaveProgress { round: self.number, done, of: pages });
        let shared = Shared {
            saver: self.saver,
            logs,
            jobs,
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            began: self.saver.host.now(),
            pace,
            cancel,
            failed: Mutex::default(),
            is_over: AtomicBool::new(false),
        };
        // A thread for fewer windows costs more than it brings.
        let helpers = self.buffers.len().min(jobs.len() / 4 + 1) - 1;
        let (own, others) = self.buffers.split_at_mut(1);
        std::thread::scope(|scope| {
            others.iter_mut().take(helpers).for_each(|buffer| {
                scope.spawn(|| shared.work(buffer, |_| ()));
            });
            shared.work(&mut own[0], report);
        });
        if helpers > 0 {
            report(shared.done.load(Ordering::Relaxed));
        }
        match shared.failed.into_inner() {
            Some(error) => Err(error),
            None => {
                let duration = self.saver.host.now().since(shared.began);
                Ok(SaveRound { pages: shared.done.into_inner(), windows: jobs.len() as u64, duration })
            }
        }
    }
}

impl Shared<'_> {
    /// Saves windows until none is left, or the round ends early.
    fn work(&self, buffer: &mut [u8], report: impl Fn(u64)) {
        while !self.is_over.load(Ordering::Relaxed) && !self.is_cancelled() {
            let Some(job) = self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(error) = self.save(job, buffer) {
                return self.fail(error);
            }
            let done = self.done.fetch_add(job.pages(), Ordering::Relaxed) + job.pages();
            report(done);
            self.keep_pace(done, || report(self.done.load(Ordering::Relaxed)));
        }
    }

    fn save(&self, job: &Job, buffer: &mut [u8]) -> Result<(), SaveError> {
        let pages = job.read.with(job.zero);
        // Not of the pages of zeroes: one that was written since is read in the next round.
        self.logs.map_or(Ok(()), |logs| logs.clear(job.window, job.read))?;
        read(self.saver.ram, job.window, job.read, buffer);
        job.zero.runs().for_each(|run| buffer[bytes_of(&run)].fill(0));
        let written = self.saver.sink.write(job.window, &pages, buffer);
        written.map_err(|source| SaveError::Sink { window: job.window, source })
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// The first error counts.
    fn fail(&self, error: SaveError) {
        self.is_over.store(true, Ordering::Relaxed);
        self.failed.lock().get_or_insert(error);
    }

    /// Sleeps until the round may have done this many pages. `report` is called between the naps, so that the caller
    /// can cancel the save in them.
    fn keep_pace(&self, done: u64, report: impl Fn()) {
        let Some(pace) = self.pace else { return };
        let due = Duration::from_secs_f64((done * PAGE_BYTES as u64) as f64 / pace as f64);
        loop {
            let early = due.saturating_sub(self.saver.host.now().since(self.began));
            if early.is_zero() || self.is_cancelled() || self.is_over.load(Ordering::Relaxed) {
                return;
            }
            self.saver.host.sleep(early.min(NAP_MAX));
            report();
        }
    }
}

/// Copies pages of a window to their places in `into`.
pub(super) fn read(ram: &GuestRam, window: WindowIndex, pages: PageSet, into: &mut [u8]) {
    for run in pages.runs() {
        ram.copy_into(gpa_range(window, &run), &mut into[bytes_of(&run)]);
    }
}

fn bytes_of(run: &Range<u16>) -> Range<usize> {
    usize::from(run.start) * PAGE_BYTES..usize::from(run.end) * PAGE_BYTES
}

fn gpa_range(window: WindowIndex, run: &Range<u16>) -> GpaRange {
    let page = PageSize::Base4K.bytes();
    let bytes = page * u64::from(run.end - run.start);
    GpaRange::new(window.start() + page * u64::from(run.start), bytes).expect("a window ends before the last address")
}
