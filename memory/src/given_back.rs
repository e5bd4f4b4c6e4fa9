//! The book of what a guest gave back: a bit for each base page, and what may be done with it. It belongs to [`crate::GuestRam`], so that
//! devices write it and the manager reads it; nothing here touches memory (see [`crate::actuators::give_back`]).
//!
//! ```text
//!             inflate                       released                        present again (a touch, pages that were aside)
//!   in use ──────────▶ [inflated, kept] ──────────▶ [inflated, released] ────────────────▶ [inflated, kept]
//!      ▲                     └────────── deflate ───────────┘
//!      ├──────────────────────────────────────┘
//!      │             reported, and released at once
//!      ├────────────────────────────────────────────▶ [reported]
//!      └───────────────────────── present again ───────────┘
//! ```
//!
//! An inflated page is ours until the guest deflates it: it may be released later. A reported page was free when it was reported, and
//! nothing is known of it a moment later: what was kept then is not in the book. Room: 200 bytes for each window of which something is given
//! back, and none for the others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{GivenBackRules, Gpa, GpaRange, PageSize, WindowIndex};

/// What one VM gave back.
#[derive(Debug, Default)]
pub struct GivenBack {
    book: Mutex<Book>,
    /// Whoever gives pages back to the host is alone in that: who looks for zero pages relies on those it saw.
    discarding: Mutex<()>,
    is_short: AtomicBool,
}

/// The book itself, while it is locked: a page that is in it stays so, and a deflate waits.
#[derive(Debug, Default)]
pub struct Book {
    windows: BTreeMap<WindowIndex, Pages>,
    rules: GivenBackRules,
    counters: GivenBackCounters,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pages {
    inflated: PageSet,
    reported: PageSet,
    /// Of the inflated ones.
    released: PageSet,
    /// Somebody else was at work on the window, or its pages came back: it is to be looked at again.
    is_due: bool,
}

/// What was counted, in base pages where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct GivenBackCounters {
    /// Given to the balloon.
    pub inflated: u64,
    /// Taken from it again.
    pub deflated: u64,
    /// Reported as free.
    pub reported: u64,
    /// Given to the host.
    pub released: u64,
    /// Left where they were, because a larger page would have been broken for them.
    pub kept: u64,
    /// Huge pages that were split because the host was short.
    pub split_windows: u64,
    /// Inflated though the balloon had them already.
    pub inflated_twice: u64,
    /// Deflated though the balloon did not have them.
    pub deflated_in_vain: u64,
    /// Outside RAM, or not of a whole window of it: nothing was done.
    pub outside_ram: u64,
    /// Looks at a window that was somebody else's at that moment.
    pub busy: u64,
    /// Looks and releases that the kernel refused.
    pub failed: u64,
    /// In the balloon now.
    pub inflated_now: u64,
    /// In the balloon, at any time, at most.
    pub inflated_at_most: u64,
    /// Of those in the balloon now, still in memory as far as is known.
    pub kept_now: u64,
}

impl GivenBack {
    /// The book.
    pub fn book(&self) -> MutexGuard<'_, Book> {
        // Every change is of bits that mean something each for itself: a panic elsewhere leaves them true.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody else gives memory of this RAM back to the host while the answer lives. Asked before the book, and not by who has it.
    pub(crate) fn discarding(&self) -> MutexGuard<'_, ()> {
        self.discarding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the host is short of memory, as who looks after it says.
    pub fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Says whether the host is short of memory.
    pub fn set_short(&self, is_short: bool) {
        self.is_short.store(is_short, Ordering::Relaxed);
    }

    /// What was counted, and how much is in the balloon.
    pub fn counters(&self) -> GivenBackCounters {
        let book = self.book();
        let kept = |pages: &Pages| u64::from(pages.inflated.without(pages.released).count());
        GivenBackCounters { kept_now: book.windows.values().map(kept).sum(), ..book.counters }
    }
}

impl Book {
    /// By which rules.
    pub fn rules(&self) -> GivenBackRules {
        self.rules
    }

    /// These rules from now on.
    pub fn set_rules(&mut self, rules: GivenBackRules) {
        self.rules = rules;
    }

    /// What is counted.
    pub(crate) fn counters(&mut self) -> &mut GivenBackCounters {
        &mut self.counters
    }

    /// Whether nothing is given back.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// The guest gives a page to the balloon. Whether it had it.
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

    /// The guest takes a page from the balloon. Whether it was there.
    pub fn deflate(&mut self, page: Gpa) -> bool {
        let (window, number) = (WindowIndex::containing(page), page_of_window(page));
        let pages = self.windows.entry(window).or_default();
        let (was_inflated, was_reported) = (pages.inflated.remove(number), pages.reported.remove(number));
        pages.released.remove(number);
        self.drop_if_empty(window);
        let was_there = was_inflated || was_reported;
        self.counters.inflated_now -= u64::from(was_inflated);
        self.counters.deflated += u64::from(was_there);
        self.counters.deflated_in_vain += u64::from(!was_there);
        was_there
    }

    /// The balloon is empty: its driver is gone, and who comes after it uses all memory.
    pub fn forget_inflated(&mut self) {
        self.counters.inflated_now = 0;
        self.windows.retain(|_, pages| {
            *pages = Pages { reported: pages.reported, ..Pages::default() };
            !pages.reported.is_empty()
        });
    }

    /// Nothing is given back any more: the machine was reset, and its guest has all its memory.
    pub(crate) fn forget_all(&mut self) {
        self.counters.inflated_now = 0;
        self.windows.clear();
    }

    /// Base pages of a window that are given back.
    pub fn count(&self, window: WindowIndex) -> u16 {
        self.windows.get(&window).map_or(0, |pages| pages.all().count())
    }

    /// Whether so much of a window is given back that a large page must not take it again.
    pub fn is_given_back(&self, window: WindowIndex) -> bool {
        self.count(window) > self.rules.tolerated
    }

    /// Whether that is so of any window in a range.
    pub fn is_any_given_back(&self, range: GpaRange) -> bool {
        let windows = WindowIndex::containing(range.start())..WindowIndex::containing(range.end());
        self.windows.range(windows).any(|(_, pages)| pages.all().count() > self.rules.tolerated)
    }

    /// The inflated pages of a window.
    pub(crate) fn inflated(&self, window: WindowIndex) -> PageSet {
        self.windows.get(&window).map(|pages| pages.inflated).unwrap_or_default()
    }

    /// Those of them that may still be in memory.
    pub(crate) fn kept(&self, window: WindowIndex) -> PageSet {
        self.windows.get(&window).map(|pages| pages.inflated.without(pages.released)).unwrap_or_default()
    }

    /// These pages were released just now. Those that are not inflated were reported.
    pub(crate) fn mark_released(&mut self, window: WindowIndex, released: PageSet) {
        let pages = self.windows.entry(window).or_default();
        pages.released = pages.released.with(released.and(pages.inflated));
        pages.reported = pages.reported.with(released.without(pages.inflated));
        pages.is_due = false;
        self.counters.released += u64::from(released.count());
    }

    /// Look at this window again, or no more until something changes.
    pub(crate) fn set_due(&mut self, window: WindowIndex, is_due: bool) {
        if let Some(pages) = self.windows.get_mut(&window) {
            pages.is_due = is_due;
        }
    }

    /// Whether a page of a window that is not to be in memory must be there, since so many are.
    pub(crate) fn contradicts(&self, window: WindowIndex, resident: u16) -> bool {
        let absent = BASE_PAGES_PER_WINDOW - resident;
        self.windows.get(&window).is_some_and(|pages| pages.reported.with(pages.released).count() > absent)
    }

    /// These pages of a window are in memory: of the inflated ones the host can have them again, the reported ones are in use.
    pub(crate) fn settle(&mut self, window: WindowIndex, present: PageSet) {
        let Some(pages) = self.windows.get_mut(&window) else { return };
        pages.is_due |= !pages.released.and(present).is_empty();
        pages.released = pages.released.without(present);
        pages.reported = pages.reported.without(present);
        self.drop_if_empty(window);
    }

    /// The windows of which something is given back, ascending.
    pub(crate) fn windows(&self) -> impl Iterator<Item = WindowIndex> + '_ {
        self.windows.keys().copied()
    }

    /// Some windows to look at again, from `from` on: those that are due, and while memory is short all that have pages to give.
    pub(crate) fn to_look_at(&self, from: WindowIndex, is_short: bool, most: usize) -> Vec<WindowIndex> {
        let has_enough =
            |pages: &Pages| is_short && pages.inflated.without(pages.released).count() >= self.rules.split_from.max(1);
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

const WORDS: usize = BASE_PAGES_PER_WINDOW as usize / u64::BITS as usize;

/// Some base pages of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSet([u64; WORDS]);

impl PageSet {
    /// The pages of `range` that lie in `window`, and there from end to end.
    pub fn of_range(window: WindowIndex, range: GpaRange) -> PageSet {
        let mut set = PageSet::default();
        let page = PageSize::Base4K.bytes();
        let pages = (0..BASE_PAGES_PER_WINDOW).filter(|number| {
            let start = window.start() + page * u64::from(*number);
            range.start() <= start && start + page <= range.end()
        });
        pages.for_each(|number| {
            set.insert(number);
        });
        set
    }

    /// Whether it was not there.
    pub fn insert(&mut self, page: u16) -> bool {
        let (word, bit) = place(page);
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    /// Whether it was there.
    pub fn remove(&mut self, page: u16) -> bool {
        let (word, bit) = place(page);
        let was_there = self.0[word] & bit != 0;
        self.0[word] &= !bit;
        was_there
    }

    pub fn contains(&self, page: u16) -> bool {
        let (word, bit) = place(page);
        self.0[word] & bit != 0
    }

    pub fn count(&self) -> u16 {
        self.0.iter().map(|word| word.count_ones() as u16).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    #[must_use]
    pub fn with(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    #[must_use]
    pub fn and(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    #[must_use]
    pub fn without(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// Runs of neighbours, ascending, by the addresses they have in `window`.
    pub fn runs(self, window: WindowIndex) -> Vec<GpaRange> {
        let page = PageSize::Base4K.bytes();
        let mut runs: Vec<GpaRange> = Vec::new();
        for number in (0..BASE_PAGES_PER_WINDOW).filter(|number| self.contains(*number)) {
            let start = window.start() + page * u64::from(number);
            let begin = match runs.last() {
                Some(run) if run.end() == start => runs.pop().expect("it is there").start(),
                _ => start,
            };
            runs.push(GpaRange::new(begin, start + page - begin).expect("a window ends before the last address"));
        }
        runs
    }
}

fn place(page: u16) -> (usize, u64) {
    (usize::from(page) / u64::BITS as usize, 1 << (u32::from(page) % u64::BITS))
}

#[cfg(test)]
mod tests;
