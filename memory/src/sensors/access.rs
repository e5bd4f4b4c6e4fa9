//! Detects which windows of anonymous RAM the guest touches, for reading or writing. A few windows at a time are
//! taken aside: a huge page whole, and a few pages of a window on base pages ([`wideleaf_policies::sampled_pages`]).
//! The first touch of each brings them back and is counted; the untouched ones come back at the end. For any anonymous
//! RAM, and huge pages stay whole.
//!
//! ```text
//!   Rotation       [ 0  1  2  3 | 4  5  6  7 | 8  9 … ]     a share of the guest in each interval, never all of it
//!                    └─ start ─┘
//!   in a sample      away  away  away  away                 1 ms between two, so that no stall follows the next
//!   the guest              touches 1
//!   finish           no    yes   no    no
//! ```
//!
//! **Shortage.** In a mapping for huge pages, a thread that touches an empty window asks for a huge page *before* the
//! kernel looks whether the window is watched (`__do_huge_pmd_anonymous_page`, mm/huge_memory.c), and drops it again.
//! On a host without free huge pages that is a compaction of its memory, in the guest's time. So a huge window is
//! marked `MADV_NOHUGEPAGE` before it is taken while huge pages are short: the touch asks for a page table, which goes
//! before the huge page comes back. Where it stays (before Linux 6.14), no further window is marked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wideleaf_policies::{Moment, WindowIndex, sampled_pages};

use crate::detached::{Aside, AsideError};
use crate::host::Host;
use crate::mover::{ASIDE_SLOTS, Mover, Place, runs_of};
pub use crate::sensors::access_sample::{AccessConfig, AccessCost, AccessSample, AccessSampler, Seen};

/// Number of marked windows in a row that came back on base pages, from which on the kernel counts as one that keeps
/// page tables (before Linux 6.14). A single one may be chance: a second thread that touches the window in the moment
/// in which it comes back makes another table.
const KEPT_SMALL_MAX: u32 = 3;

/// Huge windows that are marked `MADV_NOHUGEPAGE`, so that touches of them ask for no huge page.
#[derive(Debug, Default)]
struct Marks {
    is_short: bool,
    windows: BTreeSet<WindowIndex>,
    /// Number of the latest marked windows that came back on base pages.
    small_in_a_row: u32,
}

impl Marks {
    /// Marks a huge window that is going to be taken, or takes its mark off when there are huge pages again. Best
    /// effort: without it a touch takes longer.
    fn prepare(&mut self, mover: &dyn Mover, window: WindowIndex) {
        let marked = match self.is_short && self.small_in_a_row < KEPT_SMALL_MAX {
            true => mover.forbid_huge(window).map(|()| self.windows.insert(window)),
            false if self.windows.remove(&window) => mover.allow_huge(window).map(|()| true),
            false => return,
        };
        if let Err(error) = marked {
            tracing::debug!("{window}: {error}");
        }
    }

    /// Notes how a touched window came back.
    fn learn(&mut self, mover: &dyn Mover, window: WindowIndex) {
        if self.windows.contains(&window)
            && let Ok(look) = mover.look(Place::Guest(window))
        {
            self.small_in_a_row = if look.is_huge { 0 } else { self.small_in_a_row + 1 };
        }
    }
}

/// Takes samples of one VM's anonymous RAM.
#[derive(Debug)]
pub struct AccessSensor {
    aside: Arc<Aside>,
    config: AccessConfig,
    /// Windows of the present sample: the moment since which each is aside, or why it is not.
    taken: Vec<(WindowIndex, Result<Moment, &'static str>)>,
    cost: AccessCost,
    /// Number of windows taken so far.
    turns: u64,
    marks: Marks,
}

impl AccessSensor {
    /// A sensor without a sample under way.
    pub fn new(aside: Arc<Aside>, config: AccessConfig) -> AccessSensor {
        AccessSensor {
            aside,
            config,
            taken: Vec::new(),
            cost: AccessCost::default(),
            turns: 0,
            marks: Marks::default(),
        }
    }

    /// The moment since which it is aside, or why it is not.
    fn take(&mut self, host: &dyn Host, window: WindowIndex) -> Result<Moment, &'static str> {
        if self.aside.is_aside(window) {
            return Err("busy"); // it would look like a hole
        }
        match self.aside.mover().look(Place::Guest(window)) {
            Ok(look) if look.resident == 0 => return Err("not_resident"),
            Ok(look) if look.is_huge => {
                // A mark is a mapping of its own: not within a giant that is being moved as one.
                let _claim = self.aside.claim(window).map_err(|_| "busy")?;
                self.marks.prepare(self.aside.mover(), window);
                self.aside.set_aside(window).map_err(|error| reason(&error))?;
            }
            Ok(_) => self.take_some_pages(window)?,
            Err(_) => return Err("refused"),
        }
        Ok(host.now())
    }

    fn take_some_pages(&self, window: WindowIndex) -> Result<(), &'static str> {
        let held = self.aside.mover().held(Place::Guest(window)).map_err(|_| "refused")?;
        let pages = runs_of(sampled_pages::choose(&held, self.turns));
        self.aside.set_pages_aside(window, &pages).map_err(|error| reason(&error))
    }

    /// Result for a window, and its moment: of the touch, or now.
    fn bring_back(&mut self, host: &dyn Host, window: WindowIndex) -> (Seen, Moment) {
        match self.aside.bring_back(window) {
            Ok(Some(touched_at)) => {
                self.marks.learn(self.aside.mover(), window);
                (Seen::Touched, touched_at)
            }
            Ok(None) => (Seen::Untouched, host.now()),
            Err(error) => (Seen::Unknown(reason(&error)), host.now()),
        }
    }

    fn give_back(&mut self) {
        self.cost = AccessCost::default();
        for (window, _) in std::mem::take(&mut self.taken).into_iter().filter(|(_, taken)| taken.is_ok()) {
            let _ = self.aside.bring_back(window); // on an error the window is stuck, and tried again
        }
    }
}

impl AccessSampler for AccessSensor {
    /// Takes [`AccessConfig::pace`] for each window, and fewer windows while a swap is under way.
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]) {
        self.give_back();
        let began_cpu = host.thread_cpu_time();
        let used = || host.thread_cpu_time().saturating_sub(began_cpu);
        for (number, window) in windows.iter().enumerate() {
            let is_paid = number < usize::from(ASIDE_SLOTS) && used() < self.config.cpu_max;
            let taken = if is_paid { self.take(host, *window) } else { Err("over_budget") };
            self.taken.push((*window, taken));
            if taken.is_ok() {
                self.turns += 1;
                self.cost.windows += 1;
                host.sleep(self.config.pace);
            }
        }
        self.cost.cpu += used();
    }

    fn note_shortage(&mut self, is_short: bool) {
        self.marks.is_short = is_short;
    }

    fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let mut cost = std::mem::take(&mut self.cost);
        let (mut rows, mut watched_for) = (Vec::with_capacity(self.taken.len()), BTreeMap::new());
        for (window, taken) in std::mem::take(&mut self.taken) {
            let seen = taken.map_or_else(Seen::Unknown, |since| {
                let (seen, until) = self.bring_back(host, window);
                watched_for.insert(window, until.since(since));
                seen
            });
            rows.push((window, seen));
        }
        cost.events = rows.iter().filter(|(_, seen)| *seen == Seen::Touched).count() as u64;
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
        AccessSample { rows, watched_for, cost, ..AccessSample::default() }
    }

    fn why_it_ended(&self) -> Option<String> {
        self.aside.is_closed().then(|| "windows are not moved any more; the log has the reason".to_owned())
    }
}

impl Drop for AccessSensor {
    fn drop(&mut self) {
        self.give_back();
        self.marks.is_short = false;
        for window in self.marks.windows.clone() {
            let Ok(_claim) = self.aside.claim(window) else { continue };
            let is_huge = self.aside.mover().look(Place::Guest(window)).is_ok_and(|look| look.is_huge);
            // A window that is not huge any more keeps its mark: the manager may have split it.
            if is_huge {
                self.marks.prepare(self.aside.mover(), window);
            }
        }
    }
}

fn reason(error: &AsideError) -> &'static str {
    match error {
        AsideError::Closed | AsideError::NotAside(_) => "service_ended",
        AsideError::Full | AsideError::AlreadyAside(_) | AsideError::Claimed(..) => "busy",
        AsideError::Host(_) => "refused",
    }
}
