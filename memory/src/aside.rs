//! Windows taken aside for a while, and never lost: the pages of a window are moved to where nobody sees them, and moved
//! back (or better ones in their place) before anybody who touched it meanwhile goes on.
//!
//! ```text
//!               hold                   leave                touched: [`Aside::serve`]
//!   [in place] ──────▶ [InHand(slot)] ──────▶ [Away(slot)] ──────────────────────────▶ [Touched]
//!    ▲  ▲  ▲               │     │             │     │                                   ▲    │
//!    │  │  └─ replace_with,┘     │             │     │ refused, even to copy it back     │    │
//!    │  │     or dropped         │             │     ▼                                   │    │
//!    │  │                        │ dropped,    │    [Stuck(slot)]  nobody is woken,      │    │
//!    │  │                        └─ refused ───│───▶ │    │        retried until it works│    │
//!    │  └───────────────── bring_back ─────────┘     │    └─ touched ───────────────────┘    │
//!    ├────────────────────────────────── retried ────┘                                       │
//!    └────────────────────────────────── bring_back: "it was touched" ───────────────────────┘
//! ```
//!
//! [`Aside::set_aside`] is hold and leave: a window that was touched in between is brought back as it is left. A swap is hold and
//! replace_with, and a window in hand that is dropped is moved back. A release holds only the pages of a window that
//! looked zero, and gives them back to the host from there ([`crate::actuators::release`]).
//!
//! The kernel moves no page that a device has pinned (`EBUSY`): it clears the page table's entry, looks whether the
//! page is pinned, and puts the entry back if so (`folio_maybe_dma_pinned`, mm/userfaultfd.c). So a page that is aside
//! cannot be written by a transfer that began before, and none can begin.
//!
//! Only windows that are aside are watched, so memory that was never touched faults natively. One lock covers where each window
//! is. It is held while touched windows are moved back (0.1 ms each), so that no step of that has to be looked at twice; it is not
//! held while a window is in somebody's hand. Until they let go of it, it and its slot are theirs alone, and several threads take
//! aside, copy and replace windows at once. A touch of such a window is noted and answered by whoever has it.
//!
//! What cannot be moved back (a page that a forked child shares, or that is pinned) is copied back. Where that fails too,
//! for want of memory, its waiters stay asleep and it is tried again. A guest that waits is better than one that reads zeroes.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, PipeReader, PipeWriter};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_policies::{Moment, OutcomeResult, Refusal, Skip, WindowIndex};

use crate::claims::{Claimed, Claims, PartClaim};
use crate::host::{Host, HostError};
use crate::mover::linux::{LinuxMover, MoverError};
use crate::mover::{ALL_PAGES, ASIDE_SLOTS, Mover, Place};
use crate::region::GuestRam;
use crate::sandboxed::{ThreadWork, thread_starts};

/// How often a move of one window that is answered `EAGAIN` (a page is locked, or on its way elsewhere) is tried again...
const STALLS_MAX: u32 = 32;
/// ...and after how long: what holds a page for longer than some milliseconds in all, holds it for long.
const STALL_PAUSE: Duration = Duration::from_micros(50);
/// How soon, while nothing else happens, stuck windows are tried again. Where none are, this is what the thread costs: a
/// look at a lock and at a descriptor.
const STUCK_RETRY: Duration = Duration::from_millis(50);
/// How often in a row it may be impossible to find out who waits before the service ends...
const SERVE_ATTEMPTS: u32 = 20;
/// ...and how long between two attempts: descriptors stay readable, and whoever waits goes on waiting.
const SERVE_RETRY: Duration = Duration::from_millis(1);
/// How often they are tried when the service ends.
const CLOSE_ATTEMPTS: u32 = 20;

/// One VM's windows that are aside. See the module.
pub struct Aside {
    host: Arc<dyn Host>,
    mover: Arc<dyn Mover>,
    claims: Arc<Claims>,
    rooms: Mutex<Rooms>,
    /// Somebody let go of a window.
    let_go: Condvar,
}

struct Rooms {
    stays: BTreeMap<WindowIndex, Stay>,
    /// On each window that is aside: a giant of which a part is aside must not be moved.
    claims: BTreeMap<WindowIndex, PartClaim>,
    free: Vec<u16>,
    /// Slots whose old pages could not be given back yet.
    unclean: VecDeque<u16>,
    is_closed: bool,
    report: AsideReport,
}

/// Where a window is on its way. The drawing is above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stay {
    /// Whoever holds it moves it, and nobody else.
    InHand {
        slot: u16,
        /// Whether somebody was heard to wait for it.
        is_touched: bool,
    },
    Away(u16),
    Stuck {
        slot: u16,
        /// Whether somebody will ask if it was touched.
        is_awaited: bool,
    },
    /// At this time, as far as whoever touched it was heard.
    Touched(Moment),
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AsideReport {
    /// Windows set aside, those for a swap included.
    pub set_aside: u64,
    /// Of these, moved back because they were touched.
    pub touched: u64,
    /// Of these, replaced by a huge page.
    pub replaced: u64,
    /// Pages that could only be copied back.
    pub copied_pages: u64,
    /// Times that a window could not be brought back at once.
    pub stuck: u64,
}

/// Why a window is not taken aside, or not back.
#[derive(Debug, thiserror::Error)]
pub enum AsideError {
    /// The service has ended.
    #[error("windows are no longer moved: the service has ended")]
    Closed,
    /// As many as can be are aside.
    #[error("{ASIDE_SLOTS} windows are aside already: bring some back first")]
    Full,
    /// It is aside already, or its touch has not been asked for.
    #[error("{0} is aside already")]
    AlreadyAside(WindowIndex),
    /// It is not.
    #[error("{0} is not aside")]
    NotAside(WindowIndex),
    /// Its giant is somebody else's.
    #[error("{0} cannot be taken aside: {1}")]
    Claimed(WindowIndex, Claimed),
    /// The kernel refused. The window is where it was, or is stuck and tried again.
    #[error(transparent)]
    Host(#[from] HostError),
}

impl AsideError {
    /// What that means to an actuator that wanted to take a window aside.
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

/// What to do with a page that the kernel does not move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refused {
    Stop,
    LeaveThePage,
}

/// Pages that the kernel did not move, and that are where they were.
#[derive(Debug, Default)]
pub(crate) struct Unmoved {
    /// The number of them.
    pub pages: u16,
    /// Why the first of them was not moved.
    pub why: Option<HostError>,
    /// What was left to be moved then: where there is no page there is nothing to try, and to try costs a system call.
    left: Vec<Range<u16>>,
}

impl Unmoved {
    /// The first page from `from` on that was left to be moved.
    fn next_left(&self, from: u16) -> Option<u16> {
        self.left.iter().find(|run| from < run.end).map(|run| run.start.max(from))
    }
}

impl Aside {
    /// Nobody is aside yet. Whoever makes one sees that [`Aside::serve`] is called when somebody waits: see
    /// [`WindowMover`]. `claims` are those of the RAM that `mover` moves.
    pub fn new(host: Arc<dyn Host>, mover: Arc<dyn Mover>, claims: Arc<Claims>) -> Aside {
        let free = (0..ASIDE_SLOTS).rev().collect();
        let rooms = Rooms {
            stays: BTreeMap::new(),
            claims: BTreeMap::new(),
            free,
            unclean: VecDeque::new(),
            is_closed: false,
            report: AsideReport::default(),
        };
        Aside { host, mover, claims, rooms: Mutex::new(rooms), let_go: Condvar::new() }
    }

    /// Takes a window aside until somebody touches it or it is brought back. What is missing of it stays missing.
    ///
    /// # Errors
    /// [`AsideError`]; the window is in place then, or stuck (see the module).
    pub fn set_aside(&self, window: WindowIndex) -> Result<(), AsideError> {
        self.hold(window)?.leave();
        Ok(())
    }

    /// Brings a window back that [`Aside::set_aside`] took. Returns when it was touched meanwhile, `None` if it was not, which is
    /// exact: a touch that came before is counted, also when it is not answered yet (of up to 1024 threads that wait at
    /// once).
    ///
    /// # Errors
    /// [`AsideError`]; a window that cannot be brought back yet is stuck (see the module).
    pub fn bring_back(&self, window: WindowIndex) -> Result<Option<Moment>, AsideError> {
        let mut rooms = self.rooms();
        let answered = self.answer_all(&mut rooms);
        let touched = match rooms.stays.get(&window).copied() {
            None | Some(Stay::InHand { .. }) => return Err(AsideError::NotAside(window)),
            Some(Stay::Away(slot)) => self.restore(&mut rooms, window, slot, false).map(|()| None)?,
            Some(Stay::Stuck { slot, .. }) => {
                self.restore(&mut rooms, window, slot, false).map(|()| Some(self.host.now()))?
            }
            Some(Stay::Touched(at)) => {
                rooms.stays.remove(&window);
                Some(at)
            }
        };
        answered?; // who waits is not known, so nor is whether it was touched; but it is back
        Ok(touched)
    }

    /// Brings back what was touched, and wakes whoever touched it. Tries again what is stuck.
    ///
    /// # Errors
    /// [`HostError`] where it cannot be found out who waits.
    pub fn serve(&self) -> Result<(), HostError> {
        let mut rooms = self.rooms();
        let answered = self.answer_all(&mut rooms);
        self.retry_stuck(&mut rooms);
        answered
    }

    /// Ends it: everything is brought back, and nothing more is taken. Waits for what is in somebody's hand, which is a bounded
    /// number of moves and a copy.
    pub fn close(&self) {
        let mut rooms = self.rooms();
        rooms.is_closed = true;
        // First, since some of them will be aside then, or stuck.
        let let_go = self.let_go.wait_while(rooms, |rooms| rooms.has_in_hand());
        rooms = let_go.unwrap_or_else(PoisonError::into_inner);
        for (window, stay) in rooms.stays.clone() {
            if let Stay::Away(slot) | Stay::Stuck { slot, .. } = stay {
                let _ = self.restore(&mut rooms, window, slot, false); // is stuck then, and counted
            }
        }
        drop(rooms);
        self.clean();
        let mut rooms = self.rooms();
        for _ in 0..CLOSE_ATTEMPTS {
            if !rooms.has_stuck() {
                return;
            }
            self.host.sleep(STUCK_RETRY);
            self.retry_stuck(&mut rooms);
        }
        tracing::error!("windows of guest RAM cannot be brought back; the guest waits for them");
    }

    /// Whether the window's pages are aside: to everybody else it looks like a hole.
    pub fn is_aside(&self, window: WindowIndex) -> bool {
        self.rooms().stays.get(&window).is_some_and(|stay| !matches!(stay, Stay::Touched(_)))
    }

    /// Claims a window, for what happens to it before and after it is aside.
    pub(crate) fn claim(&self, window: WindowIndex) -> Result<PartClaim, Claimed> {
        self.claims.window(window)
    }

    /// What was counted so far.
    pub fn report(&self) -> AsideReport {
        self.rooms().report
    }

    /// The pages, for the actuators.
    pub(crate) fn mover(&self) -> &dyn Mover {
        self.mover.as_ref()
    }

    /// Takes a window aside for as long as the answer lives. Others can be held at the same time.
    pub(crate) fn hold(&self, window: WindowIndex) -> Result<Held<'_>, AsideError> {
        let held = self.begin_hold(window)?;
        self.make_way(Place::Guest(window), held.place());
        self.move_pages(Place::Guest(window), held.place(), ALL_PAGES, Refused::Stop)?;
        self.rooms().report.set_aside += 1;
        Ok(held)
    }

    /// As [`Aside::hold`], of these pages of the window alone. Those that the kernel does not move stay where they are.
    /// A thread or a vCPU that touches one of the others waits, as does one that touches a hole of the window.
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

    /// Claims a window, gives it a slot and watches it. Nothing is moved yet.
    fn begin_hold(&self, window: WindowIndex) -> Result<Held<'_>, AsideError> {
        self.clean();
        let slot = self.take_in_hand(window)?;
        let mut held = Held { aside: self, window, slot, began: self.host.now(), state: Holding::NotBegun };
        self.mover.watch(window)?;
        held.state = Holding::Moved;
        Ok(held)
    }

    /// Claims a window and gives it a slot. Nothing is moved yet.
    fn take_in_hand(&self, window: WindowIndex) -> Result<u16, AsideError> {
        let mut rooms = self.rooms();
        if rooms.is_closed {
            return Err(AsideError::Closed);
        }
        if rooms.stays.contains_key(&window) {
            return Err(AsideError::AlreadyAside(window));
        }
        let claim = self.claims.window(window).map_err(|claimed| AsideError::Claimed(window, claimed))?;
        let slot = rooms.free.pop().ok_or(AsideError::Full)?;
        rooms.claims.insert(window, claim);
        rooms.stays.insert(window, Stay::InHand { slot, is_touched: false });
        Ok(slot)
    }

    /// A panic under the lock leaves the map as it was between two steps; the pages must come back all the same.
    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer_all(&self, rooms: &mut Rooms) -> Result<(), HostError> {
        let mut touches = Vec::new();
        let mut answered = self.mover.read_touches(&mut touches);
        for window in touches {
            match rooms.stays.get(&window).copied() {
                Some(Stay::Away(slot)) => self.bring_back_touched(rooms, window, slot),
                Some(Stay::InHand { slot, .. }) => {
                    rooms.stays.insert(window, Stay::InHand { slot, is_touched: true });
                }
                // Who waits for a stuck window waits on.
                Some(Stay::Stuck { .. }) => {}
                // It came back between the touch and the reading of it.
                Some(Stay::Touched(_)) | None => answered = answered.and(self.mover.wake(window)),
            }
        }
        answered
    }

    fn bring_back_touched(&self, rooms: &mut Rooms, window: WindowIndex, slot: u16) {
        rooms.report.touched += 1;
        let _ = self.restore(rooms, window, slot, true); // is stuck then, and counted
    }

    fn retry_stuck(&self, rooms: &mut Rooms) {
        for (window, stay) in rooms.stays.clone() {
            if let Stay::Stuck { slot, is_awaited } = stay {
                let _ = self.restore(rooms, window, slot, is_awaited); // is stuck again
            }
        }
    }

    /// Brings the pages of a window back, then lets whoever waits go on. If that fails, by an error or a panic, the window is
    /// stuck.
    fn restore(&self, rooms: &mut Rooms, window: WindowIndex, slot: u16, is_awaited: bool) -> Result<(), HostError> {
        rooms.stays.insert(window, Stay::Stuck { slot, is_awaited });
        let back = self.return_pages(window, slot, &mut rooms.report).and_then(|()| self.mover.unwatch(window));
        match back {
            Ok(()) => {
                rooms.free.push(slot);
                rooms.is_in_place(window);
                if is_awaited {
                    rooms.stays.insert(window, Stay::Touched(self.host.now()));
                }
            }
            Err(ref error) => {
                tracing::warn!("{window} is not back yet: {error}");
                rooms.report.stuck += 1;
            }
        }
        back
    }

    /// Moves all pages back, and copies those that do not move. Afterwards nothing is aside.
    ///
    /// A page that is in place already got there by an earlier attempt: the guest may have written it since, so the one in
    /// place is the right one and a copy of it that is still aside is old.
    fn return_pages(&self, window: WindowIndex, slot: u16, report: &mut AsideReport) -> Result<(), HostError> {
        let (guest, aside) = (Place::Guest(window), Place::Aside(slot));
        self.make_way(aside, guest);
        self.move_pages(aside, guest, ALL_PAGES, Refused::LeaveThePage)?;
        // One that cannot be copied now does not keep the others away.
        let copies =
            self.mover.held(aside)?.into_iter().flatten().map(|page| self.return_page(window, slot, page, report));
        copies.fold(Ok(()), Result::and)
    }

    /// Copies a page back that does not move.
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

    /// Sees to it that a huge page can be moved whole: no page table may be where it goes. If the table stays the
    /// page is split, and its contents are the same.
    fn make_way(&self, from: Place, to: Place) {
        if self.mover.look(from).is_ok_and(|look| look.is_huge) {
            let _ = self.drop_page_table(to);
        }
    }

    /// Gives back the page table of a watched place that holds nothing.
    fn drop_page_table(&self, place: Place) -> Result<(), HostError> {
        if self.mover.held(place)?.is_empty() { self.mover.discard(place, ALL_PAGES) } else { Ok(()) }
    }

    /// Gives back the old pages of windows that were replaced; only then can others move there. One slot at a time: the rest is
    /// there for whoever else needs one.
    fn clean(&self) {
        let unclean = self.rooms().unclean.len();
        for _ in 0..unclean {
            let Some(slot) = self.rooms().unclean.pop_front() else { return };
            let mut cleaning = Cleaning { aside: self, slot, is_clean: false };
            cleaning.is_clean = self.mover.discard(Place::Aside(slot), ALL_PAGES).is_ok();
        }
    }

    /// Moves pages of a window, however many steps that takes.
    fn move_pages(
        &self,
        from: Place,
        to: Place,
        mut pages: Range<u16>,
        refused: Refused,
    ) -> Result<Unmoved, HostError> {
        let (mut stalls, mut unmoved) = (0, Unmoved::default());
        while !pages.is_empty() {
            match self.mover.move_pages(from, to, pages.clone()) {
                Ok(moved) => pages.start += moved.max(1),
                Err(error) if error.source.raw_os_error() == Some(libc::EAGAIN) && stalls < STALLS_MAX => {
                    stalls += 1;
                    self.host.sleep(STALL_PAUSE);
                }
                Err(error) if refused == Refused::LeaveThePage => {
                    unmoved.pages += 1;
                    if unmoved.why.is_none() {
                        unmoved.left = self.mover.held(from)?;
                        unmoved.why = Some(error);
                    }
                    pages.start = unmoved.next_left(pages.start + 1).unwrap_or(pages.end);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(unmoved)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        self.close();
        if self.rooms().has_stuck() {
            // Closing the userfaultfd would wake whoever waits, and they would read zeroes.
            std::mem::forget(Arc::clone(&self.mover));
            std::mem::forget(std::mem::take(&mut self.rooms().claims));
        }
    }
}

impl Rooms {
    fn has_stuck(&self) -> bool {
        self.stays.values().any(|stay| matches!(stay, Stay::Stuck { .. }))
    }

    fn has_in_hand(&self) -> bool {
        self.stays.values().any(|stay| matches!(stay, Stay::InHand { .. }))
    }

    fn is_in_place(&mut self, window: WindowIndex) {
        self.stays.remove(&window);
        self.claims.remove(&window);
    }
}

/// A slot whose old pages are being given back. Dropped, it is free, or as unclean as before, in a panic too.
struct Cleaning<'a> {
    aside: &'a Aside,
    slot: u16,
    is_clean: bool,
}

impl Drop for Cleaning<'_> {
    fn drop(&mut self) {
        let mut rooms = self.aside.rooms();
        if self.is_clean {
            rooms.free.push(self.slot);
        } else {
            rooms.unclean.push_back(self.slot);
        }
    }
}

/// A window that is aside while this lives. Dropped, it is moved back.
pub(crate) struct Held<'a> {
    aside: &'a Aside,
    window: WindowIndex,
    slot: u16,
    began: Moment,
    state: Holding,
}

/// How far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holding {
    /// It is not watched, and all pages are in place.
    NotBegun,
    /// Pages of it may be anywhere.
    Moved,
    /// It is nobody's any more, or waits in its slot.
    LetGo,
}

impl Held<'_> {
    /// Where its pages are.
    pub(crate) fn place(&self) -> Place {
        Place::Aside(self.slot)
    }

    /// Puts the huge page of a ready slot in the window's place; the old pages are given back. Returns how long the window
    /// was out of the guest's reach.
    pub(crate) fn replace_with(mut self, ready: u16) -> Result<Duration, HostError> {
        let Held { aside, window, slot, .. } = self;
        aside.drop_page_table(Place::Guest(window))?;
        aside.move_pages(Place::Ready(ready), Place::Guest(window), ALL_PAGES, Refused::Stop)?;
        aside.mover.unwatch(window)?;
        let unavailable = aside.host.now().since(self.began);
        self.let_go(|rooms| {
            rooms.is_in_place(window);
            rooms.unclean.push_back(slot);
            rooms.report.replaced += 1;
        });
        aside.clean();
        Ok(unavailable)
    }

    /// Moves everything back that is still in its slot. Returns how long the window was out of the guest's reach. Where
    /// it fails the window is stuck: it is counted and tried again.
    pub(crate) fn put_back(mut self) -> Result<Duration, HostError> {
        let Held { aside, window, slot, began, .. } = self;
        let mut back = Ok(());
        self.let_go(|rooms| back = aside.restore(rooms, window, slot, false));
        back.map(|()| aside.host.now().since(began))
    }

    /// Leaves it aside, or brings it back at once where somebody touched it while it went.
    fn leave(mut self) {
        let Held { aside, window, slot, .. } = self;
        self.let_go(|rooms| {
            let was = rooms.stays.insert(window, Stay::Away(slot));
            if matches!(was, Some(Stay::InHand { is_touched: true, .. })) {
                aside.bring_back_touched(rooms, window, slot);
            }
        });
    }

    fn let_go(&mut self, settle: impl FnOnce(&mut Rooms)) {
        self.state = Holding::LetGo;
        let mut rooms = self.aside.rooms();
        self.aside.let_go.notify_all(); // who waits goes on when the lock is free, also if this panics
        settle(&mut rooms);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let Held { aside, window, slot, state, .. } = *self;
        match state {
            Holding::LetGo => {}
            Holding::NotBegun => self.let_go(|rooms| {
                rooms.is_in_place(window);
                rooms.free.push(slot);
            }),
            // It is stuck if that fails, and counted.
            Holding::Moved => self.let_go(|rooms| drop(aside.restore(rooms, window, slot, false))),
        }
    }
}

/// [`Aside`] over a VM's own RAM, and the thread that answers touches. Dropped, everything is brought back and whoever
/// waits goes on, whoever else has a share of [`WindowMover::aside`].
#[derive(Debug)]
pub struct WindowMover {
    aside: Arc<Aside>,
    /// Dropping it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl WindowMover {
    /// Opens a userfaultfd and starts the thread. No memory is watched until a window is taken aside.
    ///
    /// # Errors
    /// [`MoverError`]: only anonymous RAM can be moved, by a kernel that has `UFFDIO_MOVE` and permits it.
    pub fn start(host: Arc<dyn Host>, ram: Arc<GuestRam>) -> Result<WindowMover, MoverError> {
        let no_thread = |source| HostError { what: "start the thread that moves windows", source };
        let claims = ram.claims().clone();
        let mover = Arc::new(LinuxMover::open(ram)?);
        let door = host.mover_door(mover.clone());
        let aside = Arc::new(Aside::new(host, door, claims));
        let (stopped, stop) = io::pipe().map_err(no_thread)?;
        let closes = CloseAtTheEnd(aside.clone());
        let thread = std::thread::Builder::new()
            .name("window-mover".into())
            .spawn(move || {
                thread_starts(ThreadWork::Faults);
                if let Err(error) = answer_until(&stopped, &closes.0, mover.as_ref()) {
                    tracing::error!("windows are no longer moved: {error}");
                }
            })
            .map_err(no_thread)?;
        Ok(WindowMover { aside, stop: Some(stop), thread: Some(thread) })
    }

    /// Takes windows aside and brings them back.
    pub fn aside(&self) -> &Arc<Aside> {
        &self.aside
    }
}

impl Drop for WindowMover {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that moves windows panicked; it brought everything back first");
        }
    }
}

/// However the thread ends: stopped, failed or panicked.
struct CloseAtTheEnd(Arc<Aside>);

impl Drop for CloseAtTheEnd {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Answers whenever `touched` is readable. One failure is an accident (no memory, a signal); many in a row are the end.
fn answer_until(stop: &PipeReader, aside: &Aside, touched: &impl AsFd) -> io::Result<()> {
    let timeout = PollTimeout::try_from(STUCK_RETRY).expect("some milliseconds are a timeout");
    let mut failures = 0;
    loop {
        let mut fds = [touched.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if fds[1].any().unwrap_or(true) {
            return Ok(());
        }
        failures = match aside.serve() {
            Ok(()) => 0,
            Err(error) if failures + 1 == SERVE_ATTEMPTS => return Err(io::Error::other(error)),
            Err(error) => {
                tracing::warn!("who waits is asked for again: {error}");
                aside.host.sleep(SERVE_RETRY);
                failures + 1
            }
        };
    }
}

/// Whether this host can move windows: moves the pages of one away and back. Returns how long that took.
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
    use crate::host::fake::FakeHost;
    use crate::mover::fake::{FakeMover, Touch};

    const WINDOW: WindowIndex = WindowIndex::new(3);

    /// A window is aside and somebody waits for it. Returns how the service ends whose descriptor is always readable, and the
    /// mover.
    fn served(prepare: impl FnOnce(&FakeMover)) -> (io::Result<()>, Arc<FakeMover>) {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, ALL_PAGES);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        aside.set_aside(WINDOW).expect("nothing fails yet");
        assert_eq!(mover.touch(WINDOW, 0), Touch::Waits);
        prepare(&mover);
        let (stopped, stop) = io::pipe().expect("a pipe");
        let (readable, _writer) = {
            let (reader, mut writer) = io::pipe().expect("a pipe");
            io::Write::write_all(&mut writer, &[0]).expect("there is room for a byte");
            (reader, writer)
        };
        let ended = std::thread::scope(|scope| {
            let service = scope.spawn(|| answer_until(&stopped, &aside, &readable));
            while mover.waiting() > 0 && !service.is_finished() {
                std::thread::yield_now();
            }
            drop(stop);
            service.join().expect("it does not panic")
        });
        (ended, mover)
    }

    #[test]
    fn a_page_that_cannot_be_copied_back_does_not_keep_the_others_away() {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, ALL_PAGES);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        aside.set_aside(WINDOW).expect("nothing fails yet");
        let place = Place::Aside(0);
        let held = || mover.held(place).expect("nothing fails any more").into_iter().flatten().collect::<Vec<u16>>();
        (1..4).for_each(|page| mover.pin(place, page));
        // Read who waits, look, move page 0, fail at page 1; see what is left; fail at pages 2 and 3, the rest; see
        // what is left; copy page 1.
        mover.fail_call(9, libc::ENOMEM);
        aside.bring_back(WINDOW).expect_err("a page is left");
        assert_eq!(held(), [1]);
        aside.serve().expect("nothing fails any more");
        assert_eq!((held(), aside.report().copied_pages), (vec![], 3));
    }

    #[test]
    fn one_failure_to_see_who_waits_does_not_end_the_service() {
        let (ended, mover) = served(|mover| mover.fail_call(0, libc::EINTR));
        assert!(ended.is_ok() && mover.waiting() == 0, "{ended:?}");
    }

    #[test]
    fn a_service_that_never_sees_who_waits_ends() {
        let (ended, mover) = served(|mover| mover.fail_all(Some(libc::EIO)));
        assert!(ended.is_err() && mover.waiting() == 1, "{ended:?}");
        mover.fail_all(None);
    }
}
