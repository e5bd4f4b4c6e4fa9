//! Windows taken aside for a while, and never lost. The pages of a window are moved out of the guest's reach, and
//! moved back (or a huge page put in their place) before any thread that touched the window continues.
//!
//! ```text
//!               hold                   leave                touched: [`Aside::serve`]
//!   [in place] ──────▶ [InHand(slot)] ──────▶ [Away(slot)] ──────────────────────────▶ [Touched]
//!    ▲  ▲  ▲               │     │             │     │                                   ▲    │
//!    │  │  └─ replace_with,┘     │             │     │ refused, even to copy it back     │    │
//!    │  │     or dropped         │             │     ▼                                   │    │
//!    │  │                        │ dropped,    │    [Stuck(slot)]  no thread is woken,   │    │
//!    │  │                        └─ refused ───│───▶ │    │        retried until it works│    │
//!    │  └───────────────── bring_back ─────────┘     │    └─ touched ───────────────────┘    │
//!    ├────────────────────────────────── retried ────┘                                       │
//!    └────────────────────────────────── bring_back: "it was touched" ───────────────────────┘
//! ```
//!
//! [`Aside::set_aside`] is hold and leave: a window that was touched in between comes back as it is left. A swap is
//! hold, copy and replace_with, with a huge page or (to vacate a window) with base pages. The old pages stay in the
//! slot, which is the caller's until it gives them back. A window in hand that is dropped is moved back. A release
//! holds only those pages of a window that looked zero, and gives them back to the host from there
//! ([`crate::actuators::release`]).
//!
//! The kernel moves no page that a device has pinned (`EBUSY`): it clears the page-table entry, checks whether the
//! page is pinned, and then puts the entry back (`folio_maybe_dma_pinned`, mm/userfaultfd.c). So a transfer that
//! began before cannot write a page that is aside, and no new one can begin.
//!
//! Only windows that are aside are watched, so memory that was never touched faults natively. One lock covers the
//! state of each window. It is held while touched windows are moved back (0.1 ms each), so that no step can be
//! interrupted. It is not held while a window is in hand: until the holding thread lets go, the window and its slot
//! are exclusive to it, and several threads take aside, copy and replace windows at the same time. A touch of such a
//! window is noted, and answered by the thread that holds it.
//!
//! Pages that cannot be moved back (shared with a forked child, or pinned) are copied back. If that fails too, for
//! want of memory, the waiting threads stay asleep and it is tried again. A guest that waits is better than one
//! that reads zeroes.

use std::collections::{BTreeMap, VecDeque};
use std::io::{PipeWriter, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_policies::{Moment, OutcomeResult, Refusal, Skip, WindowIndex};

use crate::claims::{Claimed, Claims, PartClaim};
use crate::host::{Host, HostError};
use crate::mover::{ALL_PAGES, ASIDE_SLOTS, Mover, Place};
use crate::region::GuestRam;

mod answering;

pub use answering::WindowMover;

/// Maximum number of retries of one window's move after `EAGAIN` (a page is locked, or on its way elsewhere).
const STALLS_MAX: u32 = 32;
/// Time between these retries: a page that is not free after some milliseconds in all is busy for long.
const STALL_PAUSE: Duration = Duration::from_micros(50);
/// Time to the next retry of stuck windows while nothing else happens.
const STUCK_RETRY: Duration = Duration::from_millis(50);
/// Number of runs up to which each is moved by itself: a call takes as long as the search of a few dozen holes.
const RUNS_MOST: usize = 8;
/// Number of retries of stuck windows when the service ends.
const CLOSE_ATTEMPTS: u32 = 20;

/// The windows of one VM that are aside. See the module.
pub struct Aside {
    host: Arc<dyn Host>,
    mover: Arc<dyn Mover>,
    claims: Arc<Claims>,
    inner: Mutex<Inner>,
    /// Signalled when a thread lets go of a window.
    let_go: Condvar,
}

struct Inner {
    windows: BTreeMap<WindowIndex, WindowState>,
    /// Claim on each window that is aside: a giant with a part aside must not be moved.
    claims: BTreeMap<WindowIndex, PartClaim>,
    free: Vec<u16>,
    /// Slots with old pages that could not be given back yet.
    unclean: VecDeque<u16>,
    is_closed: bool,
    retry: RetryRequest,
    report: AsideReport,
}

/// Request to the thread that answers touches: a window is stuck, and has to be retried.
#[derive(Default)]
struct RetryRequest {
    /// Pipe that the thread reads. It holds one byte at most, so that no write waits.
    pipe: Option<PipeWriter>,
    /// Whether the thread has been asked since a window was stuck. It retries until none is.
    is_sent: bool,
}

impl RetryRequest {
    fn send(&mut self) {
        if !self.is_sent {
            // Fails where the thread has ended, which brings everything back at its end.
            self.is_sent = self.pipe.as_mut().is_some_and(|pipe| pipe.write_all(&[0]).is_ok());
        }
    }
}

/// State of a window on its way. The drawing is above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowState {
    /// Exclusive to the thread that holds it and moves it.
    InHand {
        slot: u16,
        /// Whether a thread is known to wait for it.
        is_touched: bool,
    },
    Away(u16),
    Stuck {
        slot: u16,
        /// Whether a caller will ask if it was touched.
        is_awaited: bool,
    },
    /// Touched at this time, as far as known.
    Touched(Moment),
}

/// Counters of windows and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AsideReport {
    /// Number of windows set aside, including those for a swap.
    pub set_aside: u64,
    /// Number of those that were moved back because they were touched.
    pub touched: u64,
    /// Number of those that got other pages: a huge page, or base pages.
    pub replaced: u64,
    /// Number of pages that could only be copied back.
    pub copied_pages: u64,
    /// Number of times that a window could not be brought back at once.
    pub stuck: u64,
}

/// Why a window is not taken aside or not brought back.
#[derive(Debug, thiserror::Error)]
pub enum AsideError {
    /// The service has ended.
    #[error("cannot move windows: the service has ended")]
    Closed,
    /// All slots are in use.
    #[error("cannot take a window aside: {ASIDE_SLOTS} are aside already; bring some back first")]
    Full,
    /// The window is aside already, or its touch has not been asked for.
    #[error("cannot take {0} aside: it is aside already")]
    AlreadyAside(WindowIndex),
    /// The window is not aside.
    #[error("cannot bring {0} back: it is not aside")]
    NotAside(WindowIndex),
    /// Another part has claimed it or its giant.
    #[error("cannot take {0} aside: {1}")]
    Claimed(WindowIndex, Claimed),
    /// The kernel refused. The window is where it was, or is stuck and will be retried.
    #[error(transparent)]
    Host(#[from] HostError),
}

impl AsideError {
    /// Result for an actuator that wanted to take a window aside.
    pub(crate) fn result(self) -> OutcomeResult {
        match self {
            AsideError::Closed => OutcomeResult::Skipped(Skip::Stopping),
            AsideError::Full | AsideError::AlreadyAside(_) => OutcomeResult::Refused(Refusal::Busy),
            AsideError::Claimed(_, claimed) => claimed.result(),
            AsideError::NotAside(_) => unreachable!("it was to be taken aside"),
            AsideError::Host(error) => (&error).into(),
        }
    }
}

/// Reaction to a page that the kernel does not move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refused {
    Stop,
    LeaveThePage,
}

/// Pages that the kernel did not move and that are still in place.
#[derive(Debug, Default)]
pub(crate) struct Unmoved {
    /// Number of such pages.
    pub pages: u16,
    /// Error for the first of them.
    pub why: Option<HostError>,
    /// Pages left to move at that time: other places hold no page, and each attempt there would cost a system call.
    left: Vec<Range<u16>>,
}

impl Unmoved {
    /// The first page from `from` on that was left to move.
    fn next_left(&self, from: u16) -> Option<u16> {
        first_page(&self.left, from)
    }
}

/// The first page of these runs from `from` on.
fn first_page(runs: &[Range<u16>], from: u16) -> Option<u16> {
    runs.iter().find(|run| from < run.end).map(|run| run.start.max(from))
}

impl Aside {
    /// No window is aside yet. The caller must call [`Aside::serve`] when a thread waits, and repeatedly while a window
    /// is stuck: see [`WindowMover`]. `claims` are those of the RAM that `mover` moves.
    pub fn new(host: Arc<dyn Host>, mover: Arc<dyn Mover>, claims: Arc<Claims>) -> Aside {
        let free = (0..ASIDE_SLOTS).rev().collect();
        let inner = Inner {
            windows: BTreeMap::new(),
            claims: BTreeMap::new(),
            free,
            unclean: VecDeque::new(),
            is_closed: false,
            retry: RetryRequest::default(),
            report: AsideReport::default(),
        };
        Aside { host, mover, claims, inner: Mutex::new(inner), let_go: Condvar::new() }
    }

    /// Takes a window aside until it is touched or brought back. Missing pages stay missing.
    ///
    /// # Errors
    /// [`AsideError`]; the window is in place then, or stuck (see the module).
    pub fn set_aside(&self, window: WindowIndex) -> Result<(), AsideError> {
        self.hold(window)?.leave();
        Ok(())
    }

    /// Takes these pages of a window aside until one of them, or a missing page of the window, is touched, or until it
    /// is brought back. The guest has the other pages all the time.
    ///
    /// # Errors
    /// [`AsideError`]; the window is in place then, or stuck (see the module). An error of the kernel means that it
    /// moved none of the pages.
    pub fn set_pages_aside(&self, window: WindowIndex, runs: &[Range<u16>]) -> Result<(), AsideError> {
        let (held, unmoved) = self.hold_pages(window, runs)?;
        let all = runs.iter().map(Range::len).sum::<usize>();
        if let Some(why) = unmoved.why.filter(|_| usize::from(unmoved.pages) == all) {
            return Err(why.into());
        }
        self.inner().report.set_aside += 1;
        held.leave();
        Ok(())
    }

    /// Brings a window back that was set aside, or pages of it. Returns the time of a touch in between, or `None`
    /// without one. This is exact: an earlier touch counts even if it is not answered yet (for up to 1024 threads that
    /// wait at the same time).
    ///
    /// # Errors
    /// [`AsideError`]; a window that cannot be brought back yet is stuck (see the module).
    pub fn bring_back(&self, window: WindowIndex) -> Result<Option<Moment>, AsideError> {
        let mut inner = self.inner();
        let answered = self.answer_all(&mut inner);
        let touched = match inner.windows.get(&window).copied() {
            None | Some(WindowState::InHand { .. }) => return Err(AsideError::NotAside(window)),
            Some(WindowState::Away(slot)) => self.restore(&mut inner, window, slot, false).map(|()| None)?,
            Some(WindowState::Stuck { slot, .. }) => {
                self.restore(&mut inner, window, slot, false).map(|()| Some(self.host.now()))?
            }
            Some(WindowState::Touched(at)) => {
                inner.windows.remove(&window);
                Some(at)
            }
        };
        answered?; // the waiting threads, and so a touch, are unknown; but it is back
        Ok(touched)
    }

    /// Brings back touched windows, and wakes the threads that touched them. Retries stuck windows.
    ///
    /// # Errors
    /// [`HostError`] if the waiting threads cannot be determined.
    pub fn serve(&self) -> Result<(), HostError> {
        let mut inner = self.inner();
        let answered = self.answer_all(&mut inner);
        self.retry_stuck(&mut inner);
        answered
    }

    /// Ends the service: brings everything back, and takes no more windows. Waits for windows in hand, which takes a
    /// bounded number of moves and a copy.
    pub fn close(&self) {
        let mut inner = self.inner();
        inner.is_closed = true;
        // First, since some of them will be aside or stuck then.
        self.let_go.wait_while(&mut inner, |inner| inner.has_in_hand());
        for (window, state) in inner.windows.clone() {
            if let WindowState::Away(slot) | WindowState::Stuck { slot, .. } = state {
                let _ = self.restore(&mut inner, window, slot, false); // on an error it is stuck, and counted
            }
        }
        drop(inner);
        self.clean();
        let mut inner = self.inner();
        for _ in 0..CLOSE_ATTEMPTS {
            if !inner.has_stuck() {
                return;
            }
            self.host.sleep(STUCK_RETRY);
            self.retry_stuck(&mut inner);
        }
        tracing::error!("windows of guest RAM cannot be brought back; the guest waits for them");
    }

    /// Whether the window's pages are aside: for all other parts it looks like a hole.
    pub fn is_aside(&self, window: WindowIndex) -> bool {
        self.inner().windows.get(&window).is_some_and(|state| !matches!(state, WindowState::Touched(_)))
    }

    /// Whether the service has ended, so that no window is taken any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.inner().is_closed
    }

    /// Claims a window, for work on it before and after it is aside.
    pub(crate) fn claim(&self, window: WindowIndex) -> Result<PartClaim, Claimed> {
        self.claims.window(window)
    }

    /// Counts so far.
    pub fn report(&self) -> AsideReport {
        self.inner().report
    }

    /// Gives the pages of a slot back that [`Aside::exchange`] left to the caller. The slot is free afterwards.
    pub(crate) fn give_back(&self, slot: u16) {
        self.inner().unclean.push_back(slot);
        self.clean();
    }

    /// Mover of the pages, for the actuators.
    pub(crate) fn mover(&self) -> &dyn Mover {
        self.mover.as_ref()
    }

    /// Takes a window aside for as long as the returned value exists. Other windows can be held at the same time.
    pub(crate) fn hold(&self, window: WindowIndex) -> Result<Held<'_>, AsideError> {
        let held = self.begin_hold(window)?;
        self.make_way(Place::Guest(window), held.place());
        self.move_pages(Place::Guest(window), held.place(), ALL_PAGES, Refused::Stop)?;
        self.inner().report.set_aside += 1;
        Ok(held)
    }

    /// Puts the pages of a populated place behind a window, with the window's contents: takes the window aside, copies
    /// it, moves the copies in. Returns the time that the window was out of the guest's reach, and the slot with the
    /// old pages, which is the caller's until [`Aside::give_back`]. On an error the window keeps its contents, or is
    /// stuck.
    pub(crate) fn exchange(&self, window: WindowIndex, new: Place) -> Result<(Duration, u16), OutcomeResult> {
        let held = self.hold(window).map_err(AsideError::result)?;
        self.exchange_held(held, new)
    }

    /// The same with pages that have other contents. A window with a hole, which would get some of these, is refused:
    /// pages may be given back until it is out of reach.
    pub(crate) fn exchange_full(&self, window: WindowIndex, new: Place) -> Result<(Duration, u16), OutcomeResult> {
        let held = self.hold(window).map_err(AsideError::result)?;
        let pages = self.mover.held(held.place()).map_err(|error| OutcomeResult::from(&error))?;
        if pages.iter().map(Range::len).sum::<usize>() < ALL_PAGES.len() {
            return Err(OutcomeResult::Refused(Refusal::Busy));
        }
        self.exchange_held(held, new)
    }

    fn exchange_held(&self, held: Held<'_>, new: Place) -> Result<(Duration, u16), OutcomeResult> {
        let refused = |error: HostError| OutcomeResult::from(&error);
        self.mover.copy_all(held.place(), new).map_err(refused)?;
        held.replace_with(new).map_err(refused)
    }

    /// Like [`Aside::hold`], for these pages of the window alone. Pages that the kernel does not move stay in place.
    /// A thread or a vCPU that touches one of the others waits, and so does one that touches a hole of the window.
    pub(crate) fn hold_pages(
        &self,
        window: WindowIndex,
        runs: &[Range<u16>],
    ) -> Result<(Held<'_>, Unmoved), AsideError> {
        let held = self.begin_hold(window)?;
        let mut unmoved = Unmoved::default();
        for run in runs {
            let here = self.move_pages(Place::Guest(window), held.place(), run.clone(), Refused::LeaveThePage)?;
            unmoved.pages += here.pages;
            unmoved.why = unmoved.why.or(here.why);
        }
        Ok((held, unmoved))
    }

    /// Claims a window, gives it a slot and watches it. Moves nothing yet.
    fn begin_hold(&self, window: WindowIndex) -> Result<Held<'_>, AsideError> {
        self.clean();
        let slot = self.take_in_hand(window)?;
        let mut held = Held { aside: self, window, slot, began: self.host.now(), state: Holding::NotBegun };
        self.mover.watch(window)?;
        held.state = Holding::Moved;
        Ok(held)
    }

    /// Claims a window and gives it a slot. Moves nothing yet.
    fn take_in_hand(&self, window: WindowIndex) -> Result<u16, AsideError> {
        let mut inner = self.inner();
        if inner.is_closed {
            return Err(AsideError::Closed);
        }
        if inner.windows.contains_key(&window) {
            return Err(AsideError::AlreadyAside(window));
        }
        let claim = self.claims.window_aside(window).map_err(|claimed| AsideError::Claimed(window, claimed))?;
        let slot = inner.free.pop().ok_or(AsideError::Full)?;
        inner.claims.insert(window, claim);
        inner.windows.insert(window, WindowState::InHand { slot, is_touched: false });
        Ok(slot)
    }

    /// A panic under the lock leaves the map as it was between two steps; the pages must come back all the same.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn answer_all(&self, inner: &mut Inner) -> Result<(), HostError> {
        let mut touches = Vec::new();
        let mut answered = self.mover.read_touches(&mut touches);
        for window in touches {
            match inner.windows.get(&window).copied() {
                Some(WindowState::Away(slot)) => self.bring_back_touched(inner, window, slot),
                Some(WindowState::InHand { slot, .. }) => {
                    inner.windows.insert(window, WindowState::InHand { slot, is_touched: true });
                }
                // Threads that wait for a stuck window keep waiting.
                Some(WindowState::Stuck { .. }) => {}
                // It came back between the touch and the reading of it.
                Some(WindowState::Touched(_)) | None => answered = answered.and(self.mover.wake(window)),
            }
        }
        answered
    }

    fn bring_back_touched(&self, inner: &mut Inner, window: WindowIndex, slot: u16) {
        inner.report.touched += 1;
        let _ = self.restore(inner, window, slot, true); // on an error it is stuck, and counted
    }

    fn retry_stuck(&self, inner: &mut Inner) {
        for (window, state) in inner.windows.clone() {
            if let WindowState::Stuck { slot, is_awaited } = state {
                let _ = self.restore(inner, window, slot, is_awaited); // on an error it is stuck again
            }
        }
    }

    /// Brings the pages of a window back, then wakes the waiting threads. On an error or a panic, the
    /// window is stuck.
    fn restore(&self, inner: &mut Inner, window: WindowIndex, slot: u16, is_awaited: bool) -> Result<(), HostError> {
        inner.windows.insert(window, WindowState::Stuck { slot, is_awaited });
        let mut attempt = Attempt { inner, has_failed: true };
        let back = self.return_pages(window, slot, &mut attempt.inner.report).and_then(|()| self.mover.unwatch(window));
        attempt.has_failed = back.is_err();
        drop(attempt);
        match back {
            Ok(()) => {
                inner.free.push(slot);
                inner.is_in_place(window);
                inner.retry.is_sent &= inner.has_stuck();
                if is_awaited {
                    inner.windows.insert(window, WindowState::Touched(self.host.now()));
                }
            }
            Err(ref error) => {
                tracing::warn!("{window} is not back yet: {error}");
                inner.report.stuck += 1;
            }
        }
        back
    }

    /// Moves all pages back, and copies those that do not move. Afterwards nothing is aside.
    ///
    /// A page that is in place already was moved by an earlier attempt. The guest may have written it since: the page
    /// in place is the right one, and a copy of it that is still aside is old.
    fn return_pages(&self, window: WindowIndex, slot: u16, report: &mut AsideReport) -> Result<(), HostError> {
        let (guest, aside) = (Place::Guest(window), Place::Aside(slot));
        self.make_way(aside, guest);
        for run in self.worth_moving(aside) {
            self.move_pages(aside, guest, run, Refused::LeaveThePage)?;
        }
        // A page that cannot be copied now does not stop the others.
        let copies =
            self.mover.held(aside)?.into_iter().flatten().map(|page| self.return_page(window, slot, page, report));
        copies.fold(Ok(()), Result::and)
    }

    /// Runs with all pages of a slot. The kernel does some work for each page of a move, even for a missing one.
    fn worth_moving(&self, aside: Place) -> Vec<Range<u16>> {
        let held = self.mover.held(aside).ok();
        held.filter(|runs| runs.len() <= RUNS_MOST).unwrap_or_else(|| vec![ALL_PAGES])
    }

    /// Copies a page back that cannot be moved.
    fn return_page(
        &self,
        window: WindowIndex,
        slot: u16,
        page: u16,
        report: &mut AsideReport,
    ) -> Result<(), HostError> {
        let (guest, aside) = (Place::Guest(window), Place::Aside(slot));
        match self.mover.copy_page(aside, guest, page) {
            Ok(()) => report.copied_pages += 1,
            Err(error) if error.source.raw_os_error() == Some(libc::EEXIST) => {}
            Err(error) => return Err(error),
        }
        self.mover.discard(aside, page..page + 1)
    }

    /// Ensures that a huge page can be moved whole: there must be no page table at its target. If the table stays the
    /// page is split, with the same contents.
    fn make_way(&self, from: Place, to: Place) {
        if self.mover.look(from).is_ok_and(|look| look.is_huge) {
            let _ = self.drop_page_table(to);
        }
    }

    /// Gives back the page table of a watched place without pages.
    fn drop_page_table(&self, place: Place) -> Result<(), HostError> {
        if self.mover.held(place)?.is_empty() { self.mover.discard(place, ALL_PAGES) } else { Ok(()) }
    }

    /// Gives back the old pages of replaced windows; only then are their slots usable. One slot at a time: the rest
    /// stays available to other threads.
    fn clean(&self) {
        let unclean = self.inner().unclean.len();
        for _ in 0..unclean {
            let Some(slot) = self.inner().unclean.pop_front() else { return };
            let mut cleaning = Cleaning { aside: self, slot, is_clean: false };
            cleaning.is_clean = self.mover.discard(Place::Aside(slot), ALL_PAGES).is_ok();
        }
    }

    /// Moves pages of a window, in as many steps as that takes.
    ///
    /// A page that is at its target and no longer at its source was moved. Linux 6.18 does not count the pages that it
    /// moves after it has waited for one (in migration, say), and then stops at them (`move_pages` in
    /// mm/userfaultfd.c keeps the `EAGAIN` of the wait).
    fn move_pages(
        &self,
        from: Place,
        to: Place,
        mut pages: Range<u16>,
        refused: Refused,
    ) -> Result<Unmoved, HostError> {
        let (mut stalls, mut unmoved) = (0, Unmoved::default());
        while !pages.is_empty() {
            let error = match self.mover.move_pages(from, to, pages.clone()) {
                Ok(moved) => {
                    pages.start += moved.max(1);
                    continue;
                }
                Err(error) => error,
            };
            let errno = error.source.raw_os_error();
            if errno == Some(libc::EAGAIN) && stalls < STALLS_MAX {
                stalls += 1;
                self.host.sleep(STALL_PAUSE);
            } else if refused == Refused::LeaveThePage {
                if unmoved.why.is_none() {
                    unmoved.left = self.mover.held(from)?;
                }
                if unmoved.next_left(pages.start) == Some(pages.start) {
                    unmoved.pages += 1;
                    unmoved.why.get_or_insert(error);
                }
                pages.start = unmoved.next_left(pages.start + 1).unwrap_or(pages.end);
            } else if errno == Some(libc::EEXIST) {
                match first_page(&self.mover.held(from)?, pages.start) {
                    Some(page) if page == pages.start => return Err(error),
                    next => pages.start = next.map_or(pages.end, |page| page.min(pages.end)),
                }
            } else {
                return Err(error);
            }
        }
        Ok(unmoved)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        self.close();
        if self.inner().has_stuck() {
            // Closing the userfaultfd would wake the waiting threads, which would read zeroes.
            std::mem::forget(Arc::clone(&self.mover));
            std::mem::forget(std::mem::take(&mut self.inner().claims));
        }
    }
}

impl Inner {
    fn has_stuck(&self) -> bool {
        self.windows.values().any(|state| matches!(state, WindowState::Stuck { .. }))
    }

    fn has_in_hand(&self) -> bool {
        self.windows.values().any(|state| matches!(state, WindowState::InHand { .. }))
    }

    fn is_in_place(&mut self, window: WindowIndex) {
        self.windows.remove(&window);
        self.claims.remove(&window);
    }
}

/// An attempt to bring a window back. On drop, also in a panic, a retry is requested unless the attempt succeeded.
struct Attempt<'a> {
    inner: &'a mut Inner,
    has_failed: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.has_failed {
            self.inner.retry.send();
        }
    }
}

/// A slot with old pages that are being given back. On drop, also in a panic, it is free, or unclean as before.
struct Cleaning<'a> {
    aside: &'a Aside,
    slot: u16,
    is_clean: bool,
}

impl Drop for Cleaning<'_> {
    fn drop(&mut self) {
        let mut inner = self.aside.inner();
        if self.is_clean {
            inner.free.push(self.slot);
        } else {
            inner.unclean.push_back(self.slot);
        }
    }
}

/// A window that is aside while this exists. Dropping it moves it back.
pub(crate) struct Held<'a> {
    aside: &'a Aside,
    window: WindowIndex,
    slot: u16,
    began: Moment,
    state: Holding,
}

/// Progress of holding a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holding {
    /// The window is not watched, and all pages are in place.
    NotBegun,
    /// Its pages may be anywhere.
    Moved,
    /// The thread has let go of it: it is in place, or waits in its slot.
    LetGo,
}

impl Held<'_> {
    /// Place of its pages.
    pub(crate) fn place(&self) -> Place {
        Place::Aside(self.slot)
    }

    /// Puts the pages of another place, copies of its own, in the window's place. Returns the time that the window was
    /// out of the guest's reach, and the slot with the old pages. The slot is the caller's until [`Aside::give_back`].
    ///
    /// If only some of the new pages arrive, the guest may write those at once: they are the right ones, and only the
    /// others come back from the slot.
    fn replace_with(mut self, new: Place) -> Result<(Duration, u16), HostError> {
        let Held { aside, window, slot, .. } = self;
        aside.drop_page_table(Place::Guest(window))?;
        aside.move_pages(new, Place::Guest(window), ALL_PAGES, Refused::Stop)?;
        aside.mover.unwatch(window)?;
        let unavailable = aside.host.now().since(self.began);
        self.let_go(|inner| {
            inner.is_in_place(window);
            inner.report.replaced += 1;
        });
        Ok((unavailable, slot))
    }

    /// Moves everything back that is still in its slot. Returns the time that the window was out of the guest's
    /// reach. On an error the window is stuck: it is counted and retried.
    pub(crate) fn put_back(mut self) -> Result<Duration, HostError> {
        let Held { aside, window, slot, began, .. } = self;
        let mut back = Ok(());
        self.let_go(|inner| back = aside.restore(inner, window, slot, false));
        back.map(|()| aside.host.now().since(began))
    }

    /// Leaves it aside, or brings it back at once if it was touched on its way.
    fn leave(mut self) {
        let Held { aside, window, slot, .. } = self;
        self.let_go(|inner| {
            let was = inner.windows.insert(window, WindowState::Away(slot));
            if matches!(was, Some(WindowState::InHand { is_touched: true, .. })) {
                aside.bring_back_touched(inner, window, slot);
            }
        });
    }

    fn let_go(&mut self, settle: impl FnOnce(&mut Inner)) {
        self.state = Holding::LetGo;
        let mut inner = self.aside.inner();
        self.aside.let_go.notify_all(); // waiters continue when the lock is free, also after a panic here
        settle(&mut inner);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let Held { aside, window, slot, state, .. } = *self;
        match state {
            Holding::LetGo => {}
            Holding::NotBegun => self.let_go(|inner| {
                inner.is_in_place(window);
                inner.free.push(slot);
            }),
            // On an error it is stuck, and counted.
            Holding::Moved => self.let_go(|inner| drop(aside.restore(inner, window, slot, false))),
        }
    }
}

/// Whether this host can move windows: moves the pages of one away and back. Returns the duration.
///
/// # Errors
/// The reason why not.
pub fn probe() -> Result<Duration, String> {
    use crate::host::{Advice, linux::LinuxHost};
    use crate::{BackingConfig, BackingKind};
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    let reason = |error: &dyn std::error::Error| error.to_string();
    let host = Arc::new(LinuxHost::open().map_err(|error| reason(&error))?);
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let range = GpaRange::new(Gpa::new(0), PageSize::Huge2M.bytes()).expect("one window fits");
    let ram = GuestRam::map(&[range], backing).map_err(|error| reason(&error))?;
    host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite).map_err(|error| reason(&error))?;
    let mover = WindowMover::start(host.clone(), ram).map_err(|error| reason(&error))?;
    let (window, began) = (WindowIndex::new(0), host.now());
    mover.aside().set_aside(window).map_err(|error| reason(&error))?;
    mover.aside().bring_back(window).map_err(|error| reason(&error))?;
    Ok(host.now().since(began))
}

impl std::fmt::Debug for Aside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aside").field("report", &self.report()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numa::placement::Source;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_mover::FakeMover;
    use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

    const WINDOW: WindowIndex = WindowIndex::new(3);

    #[test]
    fn a_page_that_cannot_be_copied_back_does_not_stop_the_others() {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, ALL_PAGES);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        aside.set_aside(WINDOW).expect("nothing fails yet");
        let place = Place::Aside(0);
        let held = || mover.held(place).expect("nothing fails any more").into_iter().flatten().collect::<Vec<u16>>();
        (1..4).for_each(|page| mover.pin(place, page));
        // Read the touches, look, list the pages; move page 0, fail at page 1; list the pages left; fail at pages 2 and
        // 3, move the rest; list the pages left; copy page 1.
        mover.fail_call(10, libc::ENOMEM);
        aside.bring_back(WINDOW).expect_err("a page is left");
        assert_eq!(held(), [1]);
        aside.serve().expect("nothing fails any more");
        assert_eq!((held(), aside.report().copied_pages), (vec![], 3));
    }

    #[test]
    fn pages_that_the_kernel_moved_and_did_not_count_are_moved() {
        for (uncounted, hole) in [(0..5, 0..0), (40..70, 200..300), (500..512, 0..0)] {
            let mover = Arc::new(FakeMover::default());
            mover.write(WINDOW, 0..hole.start);
            mover.write(WINDOW, hole.end..512);
            let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
            let present = || mover.held(Place::Guest(WINDOW)).expect("nothing fails").into_iter().flatten();
            let before: Vec<u16> = present().collect();
            mover.lose_count(Place::Guest(WINDOW), uncounted.clone());
            aside.set_aside(WINDOW).expect("they have moved");
            assert_eq!((present().count(), mover.pages_aside()), (0, before.len()));
            mover.lose_count(Place::Aside(0), uncounted);
            aside.bring_back(WINDOW).expect("they have moved");
            assert!(mover.is_intact() && present().eq(before));
            assert_eq!(aside.report().copied_pages, 0);
        }
    }

    /// Exchanges a full window for a huge page that is ready, and returns the result and the number of calls.
    fn exchanged(failing: Option<u64>) -> (Result<(), OutcomeResult>, u64, Arc<FakeMover>) {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, ALL_PAGES);
        mover.populate(0, Source::default()).expect("nothing fails yet");
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        failing.into_iter().for_each(|call| mover.fail_call(call, libc::ENOMEM));
        let before = mover.calls();
        let result = aside.exchange(WINDOW, Place::Ready(0)).map(drop);
        (result, mover.calls() - before, mover)
    }

    #[test]
    fn pages_that_are_in_both_places_take_no_scan_each() {
        let (result, calls, _) = exchanged(None);
        assert_eq!(result, Ok(()));
        let end_of_watch = calls - 1;
        let (result, calls_until_back, mover) = exchanged(Some(end_of_watch));
        assert_eq!(result, Err(OutcomeResult::Refused(Refusal::NoHugePage)));
        assert!(mover.is_intact() && mover.pages_aside() == 0);
        // A move, a copy and a discard for each page.
        let for_pages = 3 * u64::from(BASE_PAGES_PER_WINDOW);
        assert!(calls_until_back - calls < for_pages + 20, "{calls_until_back} calls");
    }

    #[test]
    fn a_window_with_a_hole_gets_no_pages_with_other_contents() {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, 0..511);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        let busy = OutcomeResult::Refused(Refusal::Busy);
        assert_eq!(aside.exchange_full(WINDOW, Place::Ready(0)), Err(busy));
        assert!(mover.is_intact() && mover.pages_aside() == 0);
        let held = mover.held(Place::Guest(WINDOW)).expect("nothing fails");
        assert_eq!(held.into_iter().flatten().count(), 511, "the hole is one still");
    }
}
