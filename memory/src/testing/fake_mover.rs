//! A mover in memory for tests: a page is a number, the guest's pages are recorded, and every call can be made to
//! fail. Whenever the guest can see a window, it is compared with the record.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, PageSize, WindowIndex};

use crate::host::HostError;
use crate::mover::{self, ALL_PAGES, Mover, Place, PlaceBacking};
use crate::numa::placement::Source;
use crate::testing::fake_calls::FakeCalls;
use crate::testing::fake_pages::{FakePages, Page};

/// A fake mover; see the module.
pub struct FakeMover {
    state: Mutex<State>,
    meanwhile: Mutex<Option<Meanwhile>>,
    before_move: Mutex<Option<Meanwhile>>,
    emptying: Mutex<Option<Emptying>>,
    after_search: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// Contents of a page that was made ready and not written.
const UNDEFINED: u64 = u64::MAX;

/// Event during a copy, or before a move.
type Meanwhile = Arc<dyn Fn() + Send + Sync>;

/// Event while all of a slot aside is given back, and the errno to answer.
type Emptying = Arc<dyn Fn() -> Option<i32> + Send + Sync>;

#[derive(Debug)]
struct State {
    /// Contents of each existing page.
    pages: FakePages,
    huge: BTreeSet<Place>,
    /// Places with a page table, to which no huge page can be moved.
    tables: BTreeSet<Place>,
    /// Latest write of the guest to each of its pages.
    written: FakePages,
    last_written: u64,
    watched: BTreeSet<WindowIndex>,
    touches: Vec<WindowIndex>,
    waiting: u64,
    lost: Vec<Page>,
    /// Pages that cannot be moved from their place.
    pinned: BTreeSet<Page>,
    /// Pages that the next move from their place does, and does not count.
    uncounted: Option<(Place, Range<u16>)>,
    /// Pages that are not present until they are touched or moved.
    swapped: BTreeSet<Page>,
    pages_per_move: u16,
    /// Windows without the mark that forbids huge pages.
    may_be_huge: BTreeSet<WindowIndex>,
    populates: u64,
    /// Number of base pages made ready.
    base_pages: u64,
    /// Number of huge pages that were given back whole.
    huge_given_back: u64,
    /// Numbers of the populates that bring base pages.
    short_populates: Range<u64>,
    keeps_tables: bool,
    /// Source of each window's pages.
    source_of: fn(WindowIndex) -> Source,
    /// Sources of the pages in slots.
    sources: BTreeMap<Place, Source>,
    /// Number of moves that gave a window pages of another source than its own.
    misplaced: u64,
    calls: FakeCalls,
    has_failed_for_good: Option<i32>,
}

/// Result of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The guest wrote and continued.
    Wrote,
    /// The guest waits.
    Waits,
}

impl Default for FakeMover {
    fn default() -> FakeMover {
        FakeMover {
            state: Mutex::new(State {
                pages: FakePages::default(),
                huge: BTreeSet::new(),
                tables: BTreeSet::new(),
                written: FakePages::default(),
                last_written: 0,
                watched: BTreeSet::new(),
                touches: Vec::new(),
                waiting: 0,
                lost: Vec::new(),
                pinned: BTreeSet::new(),
                uncounted: None,
                swapped: BTreeSet::new(),
                pages_per_move: BASE_PAGES_PER_WINDOW,
                may_be_huge: BTreeSet::new(),
                populates: 0,
                base_pages: 0,
                huge_given_back: 0,
                short_populates: 0..0,
                keeps_tables: false,
                source_of: |_| Source::default(),
                sources: BTreeMap::new(),
                misplaced: 0,
                calls: FakeCalls::default(),
                has_failed_for_good: None,
            }),
            meanwhile: Mutex::default(),
            before_move: Mutex::default(),
            emptying: Mutex::default(),
            after_search: Mutex::default(),
        }
    }
}

impl fmt::Debug for FakeMover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakeMover")
    }
}

impl FakeMover {
    /// Writes pages of a window in place, like the guest.
    pub fn write(&self, window: WindowIndex, pages: Range<u16>) {
        pages.for_each(|page| assert_eq!(self.touch(window, page), Touch::Wrote));
    }

    /// Makes pages of a window to which the guest wrote only zeroes.
    pub fn write_zeroes(&self, window: WindowIndex, pages: Range<u16>) {
        let mut state = self.state();
        for at in pages.map(|page| (Place::Guest(window), page)) {
            state.tables.insert(at.0);
            state.pages.insert(at, 0);
            state.written.insert(at, 0);
        }
    }

    /// Makes a fully written window one huge page.
    pub fn make_huge(&self, window: WindowIndex) {
        let mut state = self.state();
        state.tables.remove(&Place::Guest(window));
        state.huge.insert(Place::Guest(window));
    }

    /// Writes a page, like the guest. A missing page that is not watched is a zero page.
    pub fn touch(&self, window: WindowIndex, page: u16) -> Touch {
        let mut state = self.state();
        let at = (Place::Guest(window), page);
        if state.pages.get(at).is_none() {
            state.tables.insert(at.0);
            if state.watched.contains(&window) {
                state.touches.push(window);
                state.waiting += 1;
                return Touch::Waits;
            }
        }
        state.compare(at);
        state.swapped.remove(&at);
        state.last_written += 1;
        let value = state.last_written;
        state.pages.insert(at, value);
        state.written.insert(at, value);
        Touch::Wrote
    }

    /// Makes a page of this place immovable (`EBUSY`).
    pub fn pin(&self, place: Place, page: u16) {
        self.state().pinned.insert((place, page));
    }

    /// Makes the next move of these pages end before them with `EEXIST`, although it moves them: like Linux 6.18 after
    /// a wait for the first of them.
    pub fn lose_count(&self, from: Place, pages: Range<u16>) {
        self.state().uncounted = Some((from, pages));
    }

    /// Swaps out written pages of a window.
    pub fn swap_out(&self, window: WindowIndex, pages: Range<u16>) {
        self.state().swapped.extend(pages.map(|page| (Place::Guest(window), page)));
    }

    /// Makes moves do at most this number of pages each.
    pub fn limit_moves(&self, pages: u16) {
        self.state().pages_per_move = pages;
    }

    /// Makes the populates with these numbers, counted from the first of all, bring base pages.
    pub fn run_short(&self, populates: Range<u64>) {
        self.state().short_populates = populates;
    }

    /// Has windows get their pages from these sources.
    pub fn place(&self, source_of: fn(WindowIndex) -> Source) {
        self.state().source_of = source_of;
    }

    /// Number of moves that gave a window pages of another source than its own.
    pub fn misplaced(&self) -> u64 {
        self.state().misplaced
    }

    /// Number of populates so far.
    pub fn populates(&self) -> u64 {
        self.state().populates
    }

    /// Number of base pages that were made ready so far.
    pub fn base_pages(&self) -> u64 {
        self.state().base_pages
    }

    /// Number of huge pages that were given back to the host so far.
    pub fn huge_given_back(&self) -> u64 {
        self.state().huge_given_back
    }

    /// Whether the mark that forbids huge pages was lifted from a window.
    pub fn may_be_huge(&self, window: WindowIndex) -> bool {
        self.state().may_be_huge.contains(&window)
    }

    /// Behaves like a kernel before Linux 6.14: a page table stays when its last page is given back.
    pub fn keep_tables(&self) {
        self.state().keeps_tables = true;
    }

    /// Makes the `call`-th call from now on (the next is 0) fail with `errno`, once.
    pub fn fail_call(&self, call: u64, errno: i32) {
        self.state().calls.fail(call, errno);
    }

    /// Makes every call from now on fail with `errno`, or none.
    pub fn fail_all(&self, errno: Option<i32>) {
        self.state().has_failed_for_good = errno;
    }

    /// Runs `work` in the middle of every copy of a window, on the copying thread. It may panic.
    pub fn while_copying(&self, work: impl Fn() + Send + Sync + 'static) {
        *self.meanwhile() = Some(Arc::new(work));
    }

    /// Runs `work` before every move of pages, on the moving thread: time may pass there.
    pub fn before_moving(&self, work: impl Fn() + Send + Sync + 'static) {
        *self.before_move.lock() = Some(Arc::new(work));
    }

    /// Runs `work` whenever all of a slot aside is given back. It may panic. If it returns an errno, that
    /// is the answer.
    pub fn while_emptying(&self, work: impl Fn() -> Option<i32> + Send + Sync + 'static) {
        *self.emptying() = Some(Arc::new(work));
    }

    /// Runs `work` once, when the next search for zero pages has ended.
    pub fn after_looking_for_zeroes(&self, work: impl FnOnce() + Send + 'static) {
        *self.after_search.lock() = Some(Box::new(work));
    }

    /// Whether a page of the guest is present.
    pub fn is_there(&self, window: WindowIndex, page: u16) -> bool {
        self.state().pages.get((Place::Guest(window), page)).is_some()
    }

    /// The number of present pages of a window.
    pub fn pages_of(&self, window: WindowIndex) -> usize {
        self.state().pages.of(Place::Guest(window)).count()
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls.made()
    }

    /// Number of waiting touches.
    pub fn waiting(&self) -> u64 {
        self.state().waiting
    }

    /// Whether any window is watched.
    pub fn is_anything_watched(&self) -> bool {
        !self.state().watched.is_empty()
    }

    /// Whether the guest has all its writes, and never saw other data.
    pub fn is_intact(&self) -> bool {
        let state = self.state();
        let is_there = |(at, value): (Page, u64)| state.pages.get(at).unwrap_or(0) == value;
        state.lost.is_empty() && state.written.all().all(is_there)
    }

    /// Number of pages aside.
    pub fn pages_aside(&self) -> usize {
        self.pages_in(|place| matches!(place, Place::Aside(_)))
    }

    /// Number of pages in the slots for base pages.
    pub fn pages_staged(&self) -> usize {
        self.pages_in(|place| matches!(place, Place::Base(_)))
    }

    fn pages_in(&self, is_there: impl Fn(Place) -> bool) -> usize {
        self.state().pages.all().filter(|((place, _), _)| is_there(*place)).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn meanwhile(&self) -> MutexGuard<'_, Option<Meanwhile>> {
        self.meanwhile.lock()
    }

    fn emptying(&self) -> MutexGuard<'_, Option<Emptying>> {
        self.emptying.lock()
    }

    fn enter(&self, what: &'static str) -> Result<MutexGuard<'_, State>, HostError> {
        let mut state = self.state();
        let entered = match state.has_failed_for_good {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => state.calls.enter(),
        };
        entered.map_err(|source| HostError { what, source })?;
        Ok(state)
    }
}

fn fail<T>(what: &'static str, errno: i32) -> Result<T, HostError> {
    Err(HostError { what, source: io::Error::from_raw_os_error(errno) })
}

impl State {
    /// Compares a page that the guest sees with its latest write.
    fn compare(&mut self, at: Page) {
        let found = self.pages.get(at);
        let is_right = match self.written.get(at) {
            Some(value) if value != 0 => found == Some(value),
            // A page that is not there reads zero.
            Some(_) | None => found.is_none_or(|zero| zero == 0),
        };
        if !is_right {
            self.lost.push(at);
        }
    }

    fn is_empty(&self, place: Place) -> bool {
        self.pages.of(place).next().is_none()
    }

    fn is_watched(&self, place: Place) -> bool {
        match place {
            Place::Guest(window) => self.watched.contains(&window),
            Place::Aside(_) => true,
            Place::Ready(_) | Place::Base(_) => false,
        }
    }

    /// Pages that are there already keep their source.
    fn populate_from(&mut self, place: Place, from: Source) {
        if ALL_PAGES.clone().all(|page| self.pages.get((place, page)).is_none()) {
            self.sources.insert(place, from);
        }
    }

    /// Follows the source of pages that are moved.
    fn move_source(&mut self, from: Place, to: Place) {
        match (from, to) {
            (Place::Guest(window), _) => drop(self.sources.insert(to, (self.source_of)(window))),
            (_, Place::Guest(window)) => {
                let is_its_own = self.sources.get(&from).is_none_or(|source| *source == (self.source_of)(window));
                self.misplaced += u64::from(!is_its_own);
            }
            _ => {}
        }
    }

    fn move_page(&mut self, from: Page, to: Page) -> Result<(), i32> {
        if let Some((_, pages)) = self.uncounted.take_if(|(place, pages)| (*place, pages.start) == from) {
            pages.for_each(|page| self.move_page((from.0, page), (to.0, page)).expect("nothing is in its way"));
        }
        if self.pages.get(to).is_some() {
            return Err(libc::EEXIST);
        }
        if self.pinned.contains(&from) {
            return Err(libc::EBUSY);
        }
        if let Some(value) = self.pages.remove(from) {
            self.swapped.remove(&from);
            self.pages.insert(to, value);
        }
        Ok(())
    }
}

impl Mover for FakeMover {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.enter("fake watch")?.watched.insert(window);
        Ok(())
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        let mut state = self.enter("fake unwatch")?;
        state.watched.remove(&window);
        state.waiting = 0;
        let place = Place::Guest(window);
        let written: Vec<u16> = state.written.of(place).map(|(page, _)| page).collect();
        written.into_iter().for_each(|page| state.compare((place, page)));
        Ok(())
    }

    fn wake(&self, _: WindowIndex) -> Result<(), HostError> {
        self.enter("fake wake").map(drop)
    }

    fn move_pages(&self, from: Place, to: Place, pages: Range<u16>) -> Result<u16, HostError> {
        const WHAT: &str = "fake move";
        let before = self.before_move.lock().clone();
        before.iter().for_each(|work| work());
        let mut state = self.enter(WHAT)?;
        if !state.is_watched(to) {
            return fail(WHAT, libc::EINVAL);
        }
        state.move_source(from, to);
        let is_pinned = state.pinned.iter().any(|(place, _)| *place == from);
        let is_whole = pages == ALL_PAGES && state.is_empty(to) && !state.tables.contains(&to) && !is_pinned;
        if state.huge.remove(&from) && is_whole && state.pages_per_move == BASE_PAGES_PER_WINDOW {
            state.huge.insert(to);
        } else {
            state.tables.extend([from, to]);
        }
        for (moved, page) in (0..state.pages_per_move).zip(pages.clone()) {
            match state.move_page((from, page), (to, page)) {
                Err(errno) if moved == 0 => return fail(WHAT, errno),
                Err(_) => return Ok(moved),
                Ok(()) => {}
            }
        }
        Ok((pages.len() as u16).min(state.pages_per_move))
    }

    fn copy_page(&self, from: Place, to: Place, page: u16) -> Result<(), HostError> {
        const WHAT: &str = "fake copy of a page";
        let mut state = self.enter(WHAT)?;
        if state.pages.get((to, page)).is_some() {
            return fail(WHAT, libc::EEXIST);
        }
        let value = state.pages.get((from, page)).expect("the page to copy exists");
        state.pages.insert((to, page), value);
        Ok(())
    }

    fn copy_all(&self, from: Place, to: Place) -> Result<(), HostError> {
        let meanwhile = self.meanwhile().clone();
        meanwhile.iter().for_each(|work| work());
        let mut state = self.enter("fake copy")?;
        let copied: Vec<(u16, u64)> = state.pages.of(from).collect();
        copied.into_iter().for_each(|(page, value)| state.pages.insert((to, page), value));
        Ok(())
    }

    fn clear(&self, place: Place) -> Result<(), HostError> {
        let mut state = self.enter("fake clear")?;
        assert_eq!(state.pages.of(place).count(), ALL_PAGES.len(), "a store to a missing page waits or makes one");
        ALL_PAGES.for_each(|page| state.pages.insert((place, page), 0));
        Ok(())
    }

    fn discard(&self, place: Place, pages: Range<u16>) -> Result<(), HostError> {
        const WHAT: &str = "fake discard";
        let emptying = self.emptying().clone().filter(|_| matches!(place, Place::Aside(_)) && pages == ALL_PAGES);
        if let Some(errno) = emptying.and_then(|work| work()) {
            return fail(WHAT, errno);
        }
        let mut state = self.enter(WHAT)?;
        for page in pages.clone() {
            state.pages.remove((place, page));
            state.pinned.remove(&(place, page));
        }
        if pages != ALL_PAGES {
            if state.huge.remove(&place) {
                state.tables.insert(place);
            }
        } else {
            state.huge_given_back += u64::from(state.huge.remove(&place));
            if !state.keeps_tables {
                state.tables.remove(&place);
            }
        }
        Ok(())
    }

    fn held(&self, place: Place) -> Result<Vec<Range<u16>>, HostError> {
        let state = self.enter("fake scan")?;
        Ok(mover::runs_of(state.pages.of(place).map(|(page, _)| page)))
    }

    fn occupied(&self, place: Place) -> Result<u16, HostError> {
        Ok(self.enter("fake scan")?.pages.of(place).count() as u16)
    }

    fn zero_pages(&self, place: Place) -> Result<(Vec<Range<u16>>, Bytes), HostError> {
        let state = self.enter("fake search for zeroes")?;
        let zeroes = state.pages.of(place).filter(|(_, value)| *value == 0);
        let runs = mover::runs_of(zeroes.map(|(page, _)| page));
        let read = PageSize::Base4K.bytes() * state.pages.of(place).count() as u64;
        drop(state);
        let after = self.after_search.lock().take();
        after.into_iter().for_each(|work| work());
        Ok((runs, read))
    }

    fn look(&self, place: Place) -> Result<PlaceBacking, HostError> {
        let state = self.enter("fake look")?;
        let is_present = |(page, _): &(u16, u64)| !state.swapped.contains(&(place, *page));
        let resident = state.pages.of(place).filter(is_present).count() as u16;
        Ok(PlaceBacking { resident, is_huge: state.huge.contains(&place) })
    }

    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        self.enter("fake advice")?.may_be_huge.insert(window);
        Ok(())
    }

    fn forbid_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        self.enter("fake advice")?.may_be_huge.remove(&window);
        Ok(())
    }

    fn source_of(&self, window: WindowIndex) -> Source {
        (self.state().source_of)(window)
    }

    fn populate_base(&self, slot: u16, from: Source) -> Result<(), HostError> {
        let mut state = self.enter("fake populate of base pages")?;
        let place = Place::Base(slot);
        state.populate_from(place, from);
        let missing: Vec<u16> = ALL_PAGES.filter(|page| state.pages.get((place, *page)).is_none()).collect();
        state.base_pages += missing.len() as u64;
        missing.into_iter().for_each(|page| state.pages.insert((place, page), UNDEFINED));
        state.tables.insert(place);
        Ok(())
    }

    fn populate(&self, slot: u16, from: Source) -> Result<(), HostError> {
        let mut state = self.enter("fake populate")?;
        let place = Place::Ready(slot);
        state.populate_from(place, from);
        for page in ALL_PAGES {
            if state.pages.get((place, page)).is_none() {
                state.pages.insert((place, page), 0);
            }
        }
        let is_short = state.short_populates.contains(&state.populates);
        state.populates += 1;
        if is_short || state.tables.contains(&place) {
            state.tables.insert(place);
        } else {
            state.huge.insert(place);
        }
        Ok(())
    }

    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        touches.append(&mut self.enter("fake read")?.touches);
        Ok(())
    }
}
