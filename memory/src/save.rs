//! Saves RAM while the guest runs: all pages once, then those that the guest and its devices wrote meanwhile, round by
//! round, until what is left can be written during a short pause.
//!
//! ```text
//!   logs on ─▶ round 1: all pages in use ─▶ logs: 9 000 pages ─▶ round 2 ─▶ logs: 700 ─▶ … fits into the pause
//!                                                                                              │
//!   logs off ◀─ caller resumes ◀─ caller takes the machine's state ◀─ the last pages ◀─ caller pauses
//! ```
//!
//! Logs begin with all pages set where KVM can, and each window's bits are cleared right before it is copied, so that
//! large mappings stay until then (`logs`).
//!
//! Where the changes are found:
//! - writes of vCPUs and devices: the dirty logs of all memslots ([`SecondLevel::take_dirty_log`]);
//! - pages that the guest gives back (balloon, reports), which become zero without a write: the book of given-back
//!   memory notes them ([`crate::guest_freed`]).
//!
//! What the caller must do:
//! - The manager rests during the whole save ([`crate::Manager::ask_to_rest`]), and no other part switches the dirty
//!   logs. The saver claims every window in place and every log, so a manager that does not rest cannot take a window
//!   aside: it is refused. A window that is aside when the save begins fails the save.
//! - The machine is not reset during the save: [`crate::actuators::clear`] refuses while windows are claimed.
//! - The closure pauses the VM ([`SecondLevel::pause`], which stops vCPUs and devices), takes the machine's state,
//!   calls [`LastPages::write`] and resumes the VM, also after an error. What can be done before the pause it does
//!   first, and puts the pause off ([`LastPages::put_off`]).
//!
//! Memory that was never touched costs nothing: it is neither read nor allocated. Pages in the host's swap are read,
//! and so come back into memory. Where a log has been cleared, KVM maps 4 KiB pages, and the next write to each page is
//! a fault; the host's huge pages stay whole.

use std::collections::BTreeMap;
use std::io;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use wideleaf_policies::{Bytes, Moment, PageSet, PageSize, WindowIndex};

use crate::claims::PartClaim;
use crate::host::{Host, HostError};
use crate::region::GuestRam;
use crate::second_level::{FaultCounters, SecondLevel, SecondLevelError};

mod convergence;
mod logs;
mod round;
mod used;

pub use round::SaveRound;

use convergence::{Convergence, InPause, NextStep};
use logs::Logs;
use round::{Job, Rounds};
use used::Used;

/// Pages by window.
type PagesByWindow = BTreeMap<WindowIndex, PageSet>;

/// The place where pages go. Called from several threads.
pub trait SaveSink: Send + Sync {
    /// Stores these pages of a window (bit p of `pages`: page p), replacing what was stored of them. `data` is the
    /// whole window, 2 MiB; bytes of other pages are undefined. Pages of zeroes are forgotten, not stored.
    ///
    /// # Errors
    /// The reason why it cannot store them; the save ends.
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()>;
}

/// What to do if the guest writes faster than the sink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BeyondBound {
    /// The save ends with [`SaveError::PauseTooLong`], which says how long the pause would be. The default: the bound
    /// is a promise to the guest's users, and an operator that reads the error can choose a longer one.
    #[default]
    Refuse,
    /// The guest is paused for as long as its last pages need, and the report says so.
    PauseLonger,
    /// The last pages are left to the caller ([`LastPages::write_or_leave`]), which keeps RAM as it is: post-copy.
    Leave {
        /// Number of rounds after which they are left even if further rounds would help; `None`: none. A pause that is
        /// put off comes after another round all the same.
        after_rounds: Option<NonZeroU32>,
    },
}

/// Pages of a window that were not saved before the pause, nor in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftPages {
    /// Window of the pages.
    pub window: WindowIndex,
    /// Pages that RAM has.
    pub pages: PageSet,
    /// Pages that RAM has not: they are zero now.
    pub zero: PageSet,
}

/// Limits of a save.
#[derive(Clone, Debug)]
pub struct SaveLimits {
    /// Maximum length of the guest's pause, with the time in which the caller takes the machine's state.
    pub pause: Duration,
    /// Part of the pause that is kept for the machine's state.
    pub state: Duration,
    /// Maximum number of bytes read and written per second while the guest runs; `None`: as fast as the sink.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Number of threads that read and write.
    pub threads: NonZeroUsize,
    /// Maximum number of rounds while the guest runs.
    pub rounds_max: u32,
    /// What to do after the last round if the pause would be too long.
    pub beyond: BeyondBound,
}

impl Default for SaveLimits {
    fn default() -> SaveLimits {
        SaveLimits {
            pause: Duration::from_millis(20),
            state: Duration::from_millis(5),
            bytes_per_second: None,
            threads: NonZeroUsize::MIN.saturating_add(1),
            rounds_max: 30,
            beyond: BeyondBound::Refuse,
        }
    }
}

/// How far a save is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveProgress {
    /// Number of the round, from 1 on.
    pub round: u32,
    /// Number of pages of this round that were written.
    pub done: u64,
    /// Number of pages of this round.
    pub of: u64,
}

/// What a save did.
#[derive(Clone, Debug, Default)]
pub struct SaveReport {
    /// Rounds while the guest ran.
    pub rounds: Vec<SaveRound>,
    /// The last pages, during the pause.
    pub last: SaveRound,
    /// Time that the caller named at [`LastPages::write`], and from that call until the caller's closure returned: the
    /// guest's pause, as far as the closure does nothing else behind the resume.
    pub pause: Duration,
    /// Time of the whole save.
    pub duration: Duration,
    /// Number of pauses that were broken off, because the guest wrote more before them than was expected, or because
    /// the machine's state took too long.
    pub broken_off: u32,
    /// Whether the pause was at most as long as the limit.
    pub is_bound_met: bool,
    /// Time in which all dirty logs were switched on.
    pub logs_start: Duration,
    /// Number of dirty logs that were switched on without a change of KVM's mappings: KVM maps 4 KiB pages there as
    /// each window's turn comes.
    pub logs_began_set: u32,
    /// Number of memslots with a dirty log that could not be switched off: KVM maps 4 KiB pages there.
    pub logs_left_on: u32,
    /// Windows on pages larger than 4 KiB when the save began.
    pub page_sizes: BTreeMap<WindowIndex, PageSize>,
    /// What KVM did for the guest before the pause; `None` where KVM does not count it, or a vCPU ended.
    pub before_pause: Option<BeforePause>,
}

/// What KVM did for a guest that ran while it was saved.
///
/// All of the guest's faults and exits are counted, also those that it has without a save: first touches, devices.
/// Under shadow paging each address space of the guest has its own faults at the same page. With EPT and its log of
/// modified pages in the CPU, a write is no fault, and the CPU leaves the guest once for 512 of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeforePause {
    /// Time from before the dirty logs were switched on until right before the last pause, with pauses that were
    /// broken off.
    pub time: Duration,
    /// What was counted in that time.
    pub counters: FaultCounters,
}

impl SaveReport {
    /// Bytes of RAM that were read, in all rounds and in the pause.
    pub fn read(&self) -> Bytes {
        let pages = self.rounds.iter().chain([&self.last]).map(|round| round.pages).sum();
        PageSize::Base4K.bytes() * pages
    }
}

/// Why a save ended. The logs are off, and the guest runs if the caller's closure has resumed it.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The caller cancelled it.
    #[error("the save was cancelled")]
    Cancelled,
    /// The sink failed.
    #[error("cannot store {window}: {source}")]
    Sink {
        /// Index of the window.
        window: WindowIndex,
        /// Error of the sink.
        source: io::Error,
    },
    /// The guest writes faster than the sink.
    #[error(
        "cannot save within a pause of {bound:?}: after {rounds} rounds, {pages} pages that the guest keeps writing \
         need about {needed:?}; allow a longer pause, or save to a faster disk"
    )]
    PauseTooLong {
        /// Limit of the pause.
        bound: Duration,
        /// Number of rounds.
        rounds: u32,
        /// Number of pages left.
        pages: u64,
        /// Expected length of the pause.
        needed: Duration,
    },
    /// The machine's state alone takes longer than the pause.
    #[error(
        "cannot save within a pause of {bound:?}: the devices were at rest and their disks flushed only after \
         {took:?}; allow a longer pause, or let the guest write less to its disks"
    )]
    StateTooLong {
        /// Limit of the pause.
        bound: Duration,
        /// Time of the latest pause before its last pages.
        took: Duration,
    },
    /// The pause is broken off or put off. The closure resumes the VM and returns this; the save goes on.
    #[error("the pause of the guest was put off; the save goes on")]
    GoesOn,
    /// Pages of a window cannot be read where the guest sees them.
    #[error("cannot save RAM: {window} is being moved; let the manager rest, and try again")]
    Moving {
        /// Index of the window.
        window: WindowIndex,
    },
    /// The contents of a window are in a snapshot's file, and not in memory.
    #[error(
        "cannot save RAM: {window} is in a snapshot's file and not in memory; wait for the end of the restore, or, \
         with --restore-pages mapped, restore with --restore-pages auto"
    )]
    NotFilled {
        /// Index of the window.
        window: WindowIndex,
    },
    /// Another save of this RAM runs.
    #[error("cannot save RAM: another save is under way; wait for its end")]
    UnderWay,
    /// Some RAM has no memslot, so no log would have its writes.
    #[error("cannot save RAM: {window} is in no memslot, so its writes cannot be logged")]
    NoSlot {
        /// Index of the window.
        window: WindowIndex,
    },
    /// KVM's side failed.
    #[error("cannot save RAM: {0}")]
    SecondLevel(#[from] SecondLevelError),
    /// The host's side failed.
    #[error("cannot save RAM: {0}")]
    Host(#[from] HostError),
    /// The caller's closure failed.
    #[error("cannot save the machine's state: {0}")]
    State(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The caller's closure returned without the last pages.
    #[error("the last pages of RAM were not saved")]
    NoLastPages,
}

/// The parts of a VM that a save needs.
#[derive(Clone, Copy)]
pub struct Saver<'a> {
    /// RAM of the guest, mapped in this process.
    pub ram: &'a GuestRam,
    /// Address space of this process.
    pub host: &'a dyn Host,
    /// KVM's side of the VM, unguarded: the logs of the saver are those of another part for the manager.
    pub second_level: &'a dyn SecondLevel,
    /// Place for the pages.
    pub sink: &'a dyn SaveSink,
}

impl Saver<'_> {
    /// Saves all RAM; see the module. `cancel` is looked at between windows, until the pause. `progress` is called by
    /// this thread, between windows and while it waits for the limit of bytes per second. `at_pause` is called again if
    /// [`LastPages`] has said [`SaveError::GoesOn`]: it then resumes the VM and returns that error, and the save goes
    /// on in rounds.
    ///
    /// # Errors
    /// [`SaveError`]. The sink's contents are then incomplete.
    pub fn save<T>(
        &self,
        limits: &SaveLimits,
        cancel: &AtomicBool,
        progress: &dyn Fn(SaveProgress),
        mut at_pause: impl FnMut(LastPages<'_>) -> Result<T, SaveError>,
    ) -> Result<(T, SaveReport), SaveError> {
        let began = self.host.now();
        let _in_place = self.claim_windows()?;
        let _notes = Notes::begin(self.ram)?;
        let counted = self.second_level.fault_counters().ok();
        let starting = self.host.now();
        let logs = Logs::start(self.second_level, self.ram)?;
        let logs_start = self.host.now().since(starting);
        let rounds = Rounds::new(*self, limits, cancel, progress);
        let mut used = Used::all(self.host, self.ram)?;
        if logs.began_set() > 0 {
            logs.clear_unused(&used.pages)?;
            // A page that was written before its bit was cleared is among these.
            used = Used::all(self.host, self.ram)?;
        }
        let left = used.pages.into_iter().map(|(window, pages)| Job::reading(window, pages)).collect();
        let mut running = Running { saver: *self, logs, rounds, convergence: Convergence::new(limits), left };
        let (state, Done { lasted, asked_at, last }, before_pause) = loop {
            running.until_pause()?;
            // Outside the pause, since this is a call to the kernel for each vCPU.
            let before_pause = self.before_pause(starting, counted);
            let mut done = None;
            let state = at_pause(LastPages(&mut |step| running.take_last_step(step, &mut done)));
            if !running.convergence.goes_on() {
                break (state?, done.ok_or(SaveError::NoLastPages)?, before_pause);
            }
        };
        let pause = lasted + self.host.now().since(asked_at);
        let report = SaveReport {
            last,
            pause,
            is_bound_met: pause <= limits.pause,
            broken_off: running.convergence.broken_off(),
            logs_start,
            logs_began_set: running.logs.began_set(),
            rounds: running.convergence.into_rounds(),
            logs_left_on: running.logs.stop(),
            duration: self.host.now().since(began),
            page_sizes: used.page_sizes,
            before_pause,
        };
        Ok((state, report))
    }

    fn before_pause(&self, since: Moment, counted: Option<FaultCounters>) -> Option<BeforePause> {
        let counters = self.second_level.fault_counters().ok()?.since(counted?)?;
        Some(BeforePause { time: self.host.now().since(since), counters })
    }

    /// Keeps all windows where the guest sees them. Windows on a giant page are: the logs' claims keep it.
    fn claim_windows(&self) -> Result<Vec<PartClaim>, SaveError> {
        use crate::claims::Claimed;
        let mut claims = Vec::new();
        for window in used::windows(self.ram) {
            match self.ram.claims().window_in_place(window) {
                Ok(claim) => claims.push(claim),
                Err(Claimed::OnGiantPage) => {}
                Err(Claimed::NotFilled) => return Err(SaveError::NotFilled { window }),
                Err(_) => return Err(SaveError::Moving { window }),
            }
        }
        Ok(claims)
    }

    /// Pages that changed since the last call, in any way, ascending by window.
    fn changed(&self, logs: &Logs<'_>) -> Result<Vec<Job>, SaveError> {
        let written = logs.take()?.into_iter().map(|(window, pages)| Job::reading(window, pages)).collect();
        let released = self.ram.given_back().book().take_notes();
        let released = released.into_iter().map(|(window, pages)| {
            // An absent page reads zero, and is not touched: that would allocate it in a file.
            let used = used::of_window(self.host, self.ram, window)?;
            Ok(Job { window, read: pages.and(used), zero: pages.without(used) })
        });
        Ok(round::merged(released.collect::<Result<_, SaveError>>()?, written))
    }
}

/// A save under way.
struct Running<'a> {
    saver: Saver<'a>,
    logs: Logs<'a>,
    rounds: Rounds<'a>,
    convergence: Convergence<'a>,
    /// Pages to be saved.
    left: Vec<Job>,
}

impl Running<'_> {
    /// Runs rounds until what is left is for the pause.
    fn until_pause(&mut self) -> Result<(), SaveError> {
        loop {
            let round = self.rounds.run(&self.left, &self.logs)?;
            let asked = self.saver.host.now();
            self.left = self.saver.changed(&self.logs)?;
            let asking = self.saver.host.now().since(asked);
            match self.convergence.after(round, count(&self.left), asking) {
                NextStep::Round => {}
                NextStep::Pause => return Ok(()),
                NextStep::Refuse(error) => return Err(error),
            }
        }
    }

    /// Saves what is left while the guest is paused, or returns it; or the rounds go on.
    fn take_last_step(&mut self, step: LastStep, done: &mut Option<Done>) -> Result<Vec<LeftPages>, SaveError> {
        let lasted = match step {
            LastStep::Write { lasted } => lasted,
            LastStep::BreakOff { lasted } => {
                self.convergence.break_off(Some(lasted));
                return Err(SaveError::GoesOn);
            }
            LastStep::PutOff => {
                self.convergence.put_off();
                return Err(SaveError::GoesOn);
            }
        };
        let asked_at = self.saver.host.now();
        self.left = round::merged(std::mem::take(&mut self.left), self.saver.changed(&self.logs)?);
        let (last, left) = match self.convergence.in_pause(count(&self.left), lasted) {
            InPause::BreakOff => return Err(SaveError::GoesOn),
            InPause::Write => (self.rounds.run_paused(&self.left)?, Vec::new()),
            InPause::Leave => {
                let left = |job: &Job| LeftPages { window: job.window, pages: job.read, zero: job.zero };
                (SaveRound::default(), self.left.iter().map(left).collect())
            }
        };
        *done = Some(Done { lasted, asked_at, last });
        Ok(left)
    }
}

/// The last pages, once they are saved or left.
struct Done {
    /// Length of the pause before them.
    lasted: Duration,
    asked_at: Moment,
    last: SaveRound,
}

/// What the caller does when only a pause is left.
enum LastStep {
    /// The guest has been paused for this long: the last pages come.
    Write { lasted: Duration },
    /// The guest has been paused for this long, and has no state.
    BreakOff { lasted: Duration },
    /// The guest runs.
    PutOff,
}

/// The pages that are left when the guest is paused, or is about to be.
pub struct LastPages<'a>(&'a mut dyn FnMut(LastStep) -> Result<Vec<LeftPages>, SaveError>);

impl LastPages<'_> {
    /// Writes them in a pause that has lasted for this long. Neither vCPUs nor devices run from before this call until
    /// the VM is resumed.
    ///
    /// # Errors
    /// [`SaveError`] of the sink or of the logs; [`SaveError::GoesOn`] at once if they do not fit into the pause any
    /// more.
    pub fn write(self, lasted: Duration) -> Result<(), SaveError> {
        if self.write_or_leave(lasted)?.is_empty() { Ok(()) } else { Err(SaveError::NoLastPages) }
    }

    /// The same; with [`BeyondBound::Leave`], pages that do not fit into the pause are returned and not written. The
    /// caller's closure returns once RAM is not needed any more, and the VM is not resumed before.
    ///
    /// # Errors
    /// As [`LastPages::write`].
    pub fn write_or_leave(self, lasted: Duration) -> Result<Vec<LeftPages>, SaveError> {
        (self.0)(LastStep::Write { lasted })
    }

    /// Breaks off a pause that has lasted for this long, and in which the machine's state cannot be taken in time. The
    /// closure resumes the VM and returns the result.
    pub fn break_off(self, lasted: Duration) -> SaveError {
        (self.0)(LastStep::BreakOff { lasted }).err().unwrap_or(SaveError::NoLastPages)
    }

    /// Asks for another round before the pause: the guest has run on while the closure did something that took a while.
    /// The closure returns the result.
    pub fn put_off(self) -> SaveError {
        (self.0)(LastStep::PutOff).err().unwrap_or(SaveError::NoLastPages)
    }
}

/// Notes of the pages that a guest gives back during a save. Dropped, they end.
struct Notes<'a>(&'a GuestRam);

impl Notes<'_> {
    fn begin(ram: &GuestRam) -> Result<Notes<'_>, SaveError> {
        if ram.given_back().book().begin_notes() { Ok(Notes(ram)) } else { Err(SaveError::UnderWay) }
    }
}

impl Drop for Notes<'_> {
    fn drop(&mut self) {
        self.0.given_back().book().end_notes();
    }
}

/// Windows of `ram` that are on pages larger than 4 KiB now, with the size of their page.
///
/// # Errors
/// [`HostError`] if this process's page tables cannot be read.
pub fn page_sizes(host: &dyn Host, ram: &GuestRam) -> Result<BTreeMap<WindowIndex, PageSize>, HostError> {
    Used::sizes(host, ram)
}

/// Copies pages of a window to their places in `into`, 2 MiB. The guest stands still, or writes them meanwhile.
///
/// # Panics
/// If one of them is no RAM.
pub fn read_pages(ram: &GuestRam, window: WindowIndex, pages: PageSet, into: &mut [u8]) {
    round::read(ram, window, pages, into);
}

fn count(jobs: &[Job]) -> u64 {
    jobs.iter().map(Job::pages).sum()
}

#[cfg(test)]
mod tests;
