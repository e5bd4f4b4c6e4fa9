//! A record of the pages that a guest gave back, in the code "the book": a bit for each base page, and the rules for
//! its use. It belongs to [`crate::GuestRam`], so that devices write it and the manager reads it. It has the state of
//! pages and touches no memory: [`crate::actuators::give_back`] releases the pages.
//!
//! ```text
//!             inflate                       released                        present again (touched, or was aside)
//!   in use ──────────▶ [inflated, kept] ──────────▶ [inflated, released] ────────────────▶ [inflated, kept]
//!      ▲                     └────────── deflate ───────────┘
//!      ├──────────────────────────────────────┘
//!      │             reported, and released at once
//!      ├────────────────────────────────────────────▶ [reported]
//!      └───────────────────────── present again ───────────┘
//! ```
//!
//! An inflated page belongs to the host until the guest deflates it, so it may be released later. A reported page was
//! free at the time of the report, but may be in use a moment later: one that was kept then is not in the book. The
//! book takes 200 bytes for each window with given-back pages, and nothing for the others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{GivenBackRules, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

/// Pages that one VM gave back.
#[derive(Debug, Default)]
pub struct GivenBack {
    book: Mutex<GivenBackPages>,
    /// Held by the only thread that may discard pages: a search for zero pages relies on those it saw.
    discarding: Mutex<()>,
    is_short: AtomicBool,
}

/// The record ("the book") while it is locked: a page in it stays given back, and a deflate waits.
#[derive(Debug, Default)]
pub struct GivenBackPages {
    windows: BTreeMap<WindowIndex, Pages>,
    rules: GivenBackRules,
    counters: GivenBackCounters,
    /// Pages that were released, or may have been, since a save last asked; `None` while no save runs.
    noted: Option<BTreeMap<WindowIndex, PageSet>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pages {
    inflated: PageSet,
    reported: PageSet,
    /// Those of the inflated pages that were released.
    released: PageSet,
    /// Whether to check the window again: another part was at work on it, a check failed, its pages came back, or it is
    /// on no large page any more.
    is_due: bool,
}

/// Counters, in base pages unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct GivenBackCounters {
    /// Pages given to the balloon.
    pub inflated: u64,
    /// Pages taken from the balloon.
    pub deflated: u64,
    /// Pages reported as free.
    pub reported: u64,
    /// Pages released to the host that were in memory. A page that the guest never touched frees nothing.
    pub released: u64,
    /// Pages left in place when they were given back, because releasing them would have broken a larger page, or could
    /// not be done then.
    pub kept: u64,
    /// Number of huge pages that were split because the host was short.
    pub split_windows: u64,
    /// Pages inflated although the balloon had them already.
    pub inflated_twice: u64,
    /// Pages deflated although the balloon did not have them.
    pub deflated_absent: u64,
    /// Pages outside RAM, or not in a whole window of it; they are ignored.
    pub outside_ram: u64,
    /// Number of checks of a window that was claimed by another part.
    pub busy: u64,
    /// Number of checks and releases that the kernel refused.
    pub failed: u64,
    /// Pages in the balloon now.
    pub inflated_now: u64,
    /// Maximum number of pages in the balloon at any time.
    pub inflated_at_most: u64,
    /// Those of the pages in the balloon now that are still in memory, as far as known.
    pub kept_now: u64,
}

impl GivenBack {
    /// Locks the record.
    pub fn book(&self) -> MutexGuard<'_, GivenBackPages> {
        // Each bit has a meaning of its own, so the book is consistent after a panic elsewhere.
        self.book.lock()
    }

    /// Excludes all other threads from releasing memory of this RAM while the guard exists. Taken before the book,
    /// never by its holder.
    pub(crate) fn discarding(&self) -> MutexGuard<'_, ()> {
        self.discarding.lock()
    }

    /// Whether the host is short of memory, as the manager reports it.
    pub fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Reports whether the host is short of memory.
    pub fn set_short(&self, is_short: bool) {
        self.is_short.store(is_short, Ordering::Relaxed);
    }

    /// Counters, with the pages still in memory.
    pub fn counters(&self) -> GivenBackCounters {
        let book = self.book();
        let kept = |pages: &Pages| u64::from(pages.inflated.without(pages.released).len());
        GivenBackCounters { kept_now: book.windows.values().map(kept).sum(), ..book.counters }
    }
}

impl GivenBackPages {
    /// The rules in force.
    pub fn rules(&self) -> GivenBackRules {
        self.rules
    }

    /// Sets the rules from now on.
    pub fn set_rules(&mut self, rules: GivenBackRules) {
        self.rules = rules;
    }

    /// The counters, to be changed.
    pub(crate) fn counters(&mut self) -> &mut GivenBackCounters {
        &mut self.counters
    }

    /// Whether nothing is given back.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// Records that the guest gives a page to the balloon. Returns whether the page is new there.
    pub fn inflate(&mut self, page: Gpa) -> bool {
        let pages = self.windows.entry(WindowIndex::containing(page)).or_default();
        let is_new = pages.inflated.insert(page_of_window(page));
        pages.released.remove(page_of_window(page));
        pages.reported.remove(page_of_window(page));
        self.counters.inflated += u64::from(is_new);
        self.counters.inflated_now += u64::from(is_new);
        self.counters.inflated_at_most = self.counters.inflated_at_most.max(self.counters.inflated_now);
        self.counters.inflated_twice += u64::from(!is_new);
        is_new
    }

    /// Records that the guest takes a page from the balloon. Returns whether it was there.
    pub fn deflate(&mut self, page: Gpa) -> bool {
        let (window, number) = (WindowIndex::containing(page), page_of_window(page));
        let pages = self.windows.entry(window).or_default();
        let (was_inflated, was_reported) = (pages.inflated.remove(number), pages.reported.remove(number));
        pages.released.remove(number);
        self.drop_if_empty(window);
        let was_there = was_inflated || was_reported;
        self.counters.inflated_now -= u64::from(was_inflated);
        self.counters.deflated += u64::from(was_there);
        self.counters.deflated_absent += u64::from(!was_there);
        was_there
    }

    /// Empties the balloon: its driver is gone, and the next one uses all memory.
    pub fn forget_inflated(&mut self) {
        self.counters.inflated_now = 0;
        self.windows.retain(|_, pages| {
            *pages = Pages { reported: pages.reported, ..Pages::default() };
            !pages.reported.is_empty()
        });
    }

    /// Forgets all pages: the machine was reset, and its guest has all its memory.
    pub(crate) fn forget_all(&mut self) {
        self.counters.inflated_now = 0;
        self.windows.clear();
    }

    /// Number of given-back base pages of a window.
    pub fn count(&self, window: WindowIndex) -> u16 {
        self.windows.get(&window).map_or(0, |pages| pages.all().len())
    }

    /// Whether more of a window is given back than a large page may occupy again.
    pub fn is_given_back(&self, window: WindowIndex) -> bool {
        self.count(window) > self.rules.tolerated
    }

    /// Whether that holds for any window in a range.
    pub fn is_any_given_back(&self, range: GpaRange) -> bool {
        let windows = WindowIndex::containing(range.start())..WindowIndex::containing(range.end());
        self.windows.range(windows).any(|(_, pages)| pages.all().len() > self.rules.tolerated)
    }

    /// The pages in the balloon as runs of neighbours, ascending.
    pub fn inflated_runs(&self) -> Vec<GpaRange> {
        let page = PageSize::Base4K.bytes();
        let mut runs: Vec<GpaRange> = Vec::new();
        for (window, pages) in &self.windows {
            for number in (0..BASE_PAGES_PER_WINDOW).filter(|number| pages.inflated.contains(*number)) {
                let start = window.start() + page * u64::from(number);
                let joined = runs.last_mut().filter(|run| run.end() == start);
                let (first, bytes) = joined.as_ref().map_or((start, page), |run| (run.start(), run.bytes() + page));
                let run = GpaRange::new(first, bytes).expect("pages of RAM lie below the last address");
                match joined {
                    Some(last) => *last = run,
                    None => runs.push(run),
                }
            }
        }
        runs
    }

    /// The inflated pages of a window.
    pub(crate) fn inflated(&self, window: WindowIndex) -> PageSet {
        self.windows.get(&window).map(|pages| pages.inflated).unwrap_or_default()
    }

    /// Those of the inflated pages that may still be in memory.
    pub(crate) fn kept(&self, window: WindowIndex) -> PageSet {
        self.windows.get(&window).map(|pages| pages.inflated.without(pages.released)).unwrap_or_default()
    }

    /// Records that these pages were released just now, of which that number were in memory. Those that are not
    /// inflated were reported.
    pub(crate) fn mark_released(&mut self, window: WindowIndex, released: PageSet, in_memory: u16) {
        let pages = self.windows.entry(window).or_default();
        pages.released = pages.released.with(released.and(pages.inflated));
        pages.reported = pages.reported.with(released.without(pages.inflated));
        pages.is_due = false;
        self.counters.released += u64::from(in_memory);
    }

    /// Begins to note released pages for a save: a release changes what the guest reads, and no dirty log has it.
    /// Returns `false`, and changes nothing, if another save has begun.
    pub(crate) fn begin_notes(&mut self) -> bool {
        let is_first = self.noted.is_none();
        self.noted.get_or_insert_default();
        is_first
    }

    /// Notes pages that are about to be released.
    pub(crate) fn note_release(&mut self, window: WindowIndex, pages: PageSet) {
        if let Some(noted) = &mut self.noted {
            let of_window = noted.entry(window).or_default();
            *of_window = of_window.with(pages);
        }
    }

    /// The pages noted since the last call.
    pub(crate) fn take_notes(&mut self) -> BTreeMap<WindowIndex, PageSet> {
        self.noted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Ends the notes of a save.
    pub(crate) fn end_notes(&mut self) {
        self.noted = None;
    }

    /// Sets whether this window is to be checked again.
    pub(crate) fn set_due(&mut self, window: WindowIndex, is_due: bool) {
        if let Some(pages) = self.windows.get_mut(&window) {
            pages.is_due = is_due;
        }
    }

    /// Records that no large page holds the window: pages that were kept for one can be released.
    pub(crate) fn set_not_large(&mut self, window: WindowIndex) {
        if let Some(pages) = self.windows.get_mut(&window) {
            pages.is_due |= !pages.inflated.without(pages.released).is_empty();
        }
    }

    /// Whether the number of present pages shows that a released page of the window is present again.
    pub(crate) fn contradicts(&self, window: WindowIndex, resident: u16) -> bool {
        let absent = BASE_PAGES_PER_WINDOW - resident;
        self.windows.get(&window).is_some_and(|pages| pages.reported.with(pages.released).len() > absent)
    }

    /// Records that these pages of a window are present: inflated ones can be released again, reported ones
    /// are in use.
    pub(crate) fn settle(&mut self, window: WindowIndex, present: PageSet) {
        let Some(pages) = self.windows.get_mut(&window) else { return };
        pages.is_due |= !pages.released.and(present).is_empty();
        pages.released = pages.released.without(present);
        pages.reported = pages.reported.without(present);
        self.drop_if_empty(window);
    }

    /// Windows with given-back pages, ascending.
    pub(crate) fn windows(&self) -> impl Iterator<Item = WindowIndex> + '_ {
        self.windows.keys().copied()
    }

    /// At most `most` windows to check again, from `from` on: those that are due and, while memory is short, all that
    /// have pages to release.
    pub(crate) fn to_look_at(&self, from: WindowIndex, is_short: bool, most: usize) -> Vec<WindowIndex> {
        let has_enough =
            |pages: &Pages| is_short && pages.inflated.without(pages.released).len() >= self.rules.split_from.max(1);
        let wanted = self.windows.range(from..).filter(|(_, pages)| pages.is_due || has_enough(pages));
        wanted.map(|(window, _)| *window).take(most).collect()
    }

    fn drop_if_empty(&mut self, window: WindowIndex) {
        if self.windows.get(&window).is_some_and(|pages| pages.all().is_empty()) {
            self.windows.remove(&window);
        }
    }
}

impl Pages {
    fn all(&self) -> PageSet {
        self.inflated.with(self.reported)
    }
}

fn page_of_window(page: Gpa) -> u16 {
    ((page - WindowIndex::containing(page).start()).get() / PageSize::Base4K.bytes().get()) as u16
}

#[cfg(test)]
mod tests;
