//! The state of each window, and which thread fills it. One lock covers all of it, and no call of the kernel is made
//! under it.
//!
//! ```text
//!                 touched, or its turn                    read and checked               placed
//!   [Waiting] ───────────────────────▶ [Reading(claim)] ────────────────▶ [Placing] ──────────────▶ [LetGo]
//!      ▲  ▲            panicked           │   │   │                          │  │ mappings run short
//!      │  └───────────────────────────────┘   │   │ corrupt, unreadable      │  └────▶ [Kept] ── at the end ──▶ LetGo
//!      │               overdue, once          │   ▼                          ▼
//!      └──────────────────────────────────────┘ [Failed] ◀───────────────────┘ no memory
//!   [Zero]     nothing is stored, but it is registered ── touched ──▶ Placing
//!   [LetGo]    the kernel answers touches: filled, or nothing was stored
//! ```
//!
//! A claim has a number. A thread that is overdue and comes back finds that its claim is not the window's any more,
//! and leaves the window alone: the guest may have written it since.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_policies::Moment;

use super::rows::Row;

/// Maximum number of borders between windows of different kinds, each a border of two mappings of the process, at
/// which windows are still let go one by one. A quarter of what a process may have (`vm.max_map_count`, 65530).
const BORDERS_MAX: usize = 16_384;

/// Maximum number of claims on a window that end in a panic or become overdue. Then the window counts as failed, or
/// is left to its last reader: each further one could be lost to the same place.
const LOSSES_MAX: u8 = 2;

/// Number of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim(u32);

/// Number of a serving thread.
pub(super) type Worker = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    LetGo,
    Zero,
    Waiting,
    Reading(Claim),
    Placing {
        /// Whether the window has contents.
        is_stored: bool,
    },
    Kept,
    Failed,
}

/// Kind of a window's mapping: two neighbours of different kinds are two mappings of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapping {
    /// Registered with the userfaultfd.
    Registered,
    /// Not registered, and for base pages.
    Base,
    /// Not registered, and marked for huge pages.
    Huge,
}

/// What to do for a thread that has touched a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// Fill the window: the claim is the caller's.
    Fill(Claim),
    /// Let the window go: nothing is stored.
    LetGo,
    /// Answer the page alone, with zeroes.
    Page,
    /// Wake the thread: the page is there, or the kernel makes it.
    Wake,
    /// Another thread fills the window, and wakes all.
    Wait,
    /// The window has failed: the thread waits until the VM ends.
    Never,
}

/// What is left of a window's filling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// The kernel answers its touches, and it has this kind of mapping.
    LetGo(Mapping),
    /// It is filled, and still registered.
    Kept,
    /// It cannot be filled.
    Failed,
}

/// A claim that was taken from its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdue {
    pub row: Row,
    pub worker: Worker,
    pub waited: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Reader {
    row: Row,
    worker: Worker,
    since: Moment,
    /// Whether it was named as overdue, and keeps its claim because there were too many.
    is_named: bool,
}

/// The states of all windows.
#[derive(Debug)]
pub(super) struct WindowStates {
    table: Mutex<Table>,
    /// Signalled when no window is being placed any more.
    placed: Condvar,
}

#[derive(Debug)]
struct Table {
    states: Vec<State>,
    mappings: Vec<Mapping>,
    /// Rows at which a range of RAM begins: they have no left neighbour.
    firsts: Vec<Row>,
    borders: usize,
    readers: BTreeMap<Claim, Reader>,
    /// Claims on a window that ended in a panic or became overdue.
    losses: BTreeMap<Row, u8>,
    /// Times at which threads touched a window that another thread was filling.
    waiting: BTreeMap<Row, Vec<Moment>>,
    next_claim: u32,
    /// Number of stored windows that are not filled.
    left: usize,
    placing: usize,
    /// Windows in the order in which the background fills them, if that is known.
    order: Option<Vec<u32>>,
    is_sorting: bool,
    next: usize,
    /// Windows that a thread gave back without filling them.
    returned: VecDeque<Row>,
    /// Windows that the background has in hand.
    behind: Vec<Row>,
    is_closed: bool,
}

impl WindowStates {
    /// A table of `count` windows: those in `registered` are registered, and of these `stored` have contents. The
    /// others have the mapping `other`.
    pub(super) fn new(
        count: usize,
        firsts: Vec<Row>,
        registered: &[Range<Row>],
        stored: impl Fn(Row) -> bool,
        other: Mapping,
    ) -> WindowStates {
        let (mut states, mut mappings) = (vec![State::LetGo; count], vec![other; count]);
        for row in registered.iter().cloned().flatten() {
            states[row] = if stored(row) { State::Waiting } else { State::Zero };
            mappings[row] = Mapping::Registered;
        }
        let left = states.iter().filter(|state| **state == State::Waiting).count();
        let mut table = Table {
            states,
            mappings,
            firsts,
            borders: 0,
            readers: BTreeMap::new(),
            losses: BTreeMap::new(),
            waiting: BTreeMap::new(),
            next_claim: 0,
            left,
            placing: 0,
            order: None,
            is_sorting: false,
            next: 0,
            returned: VecDeque::new(),
            behind: Vec::new(),
            is_closed: false,
        };
        table.borders = (0..count).map(|row| table.borders_at(row)).sum();
        WindowStates { table: Mutex::new(table), placed: Condvar::new() }
    }

    /// A thread waits for a page of this window.
    pub(super) fn touched(&self, row: Row, worker: Worker, now: Moment) -> Touched {
        let mut table = self.table();
        match table.states[row] {
            State::LetGo => Touched::Wake,
            _ if table.is_closed => Touched::Wait,
            State::Zero => {
                table.begin_placing(row, false);
                Touched::LetGo
            }
            State::Waiting => Touched::Fill(table.claim(row, worker, now)),
            State::Reading(_) | State::Placing { .. } => {
                table.waiting.entry(row).or_default().push(now);
                Touched::Wait
            }
            State::Kept => Touched::Page,
            State::Failed => Touched::Never,
        }
    }

    /// Whether the window's stored pages are still being waited for, so that one of them may be copied alone.
    pub(super) fn lacks_pages(&self, row: Row) -> bool {
        let table = self.table();
        !table.is_closed && matches!(table.states[row], State::Waiting | State::Reading(_))
    }

    /// The next window of the background, if a thread may fill one now. `order`: makes the order of rows, once.
    pub(super) fn next_of_background(
        &self,
        worker: Worker,
        now: Moment,
        order: impl FnOnce() -> Vec<u32>,
    ) -> Option<(Row, Claim)> {
        {
            let mut table = self.table();
            if table.is_closed || table.left == 0 || !table.may_fill_behind() {
                return None;
            }
            if table.order.is_some() {
                return table.claim_behind(worker, now);
            }
            table.is_sorting = true;
        }
        // Sorting takes milliseconds: without the lock, for which touches wait.
        let order = order();
        let mut table = self.table();
        (table.order, table.is_sorting) = (Some(order), false);
        table.claim_behind(worker, now)
    }

    /// Whether the claim still holds. If so, it becomes the right to place the window's pages, which no other thread
    /// can take away.
    pub(super) fn begin_placing(&self, row: Row, claim: Claim) -> bool {
        let mut table = self.table();
        table.readers.remove(&claim);
        let holds = !table.is_closed && table.states[row] == State::Reading(claim);
        if holds {
            table.begin_placing(row, true);
        }
        holds
    }

    /// Whether the window may get a mapping of its own.
    pub(super) fn may_cut(&self) -> bool {
        self.table().borders < BORDERS_MAX
    }

    /// Ends the placing of a window. Returns when threads touched it meanwhile, which wait no longer.
    pub(super) fn settle(&self, row: Row, settled: Settled) -> Vec<Moment> {
        let mut table = self.table();
        table.placing -= 1;
        let waited = table.waiting.remove(&row).unwrap_or_default();
        table.end(row, settled);
        self.placed.notify_all();
        waited
    }

    /// Ends a claim on a window that cannot be read. Returns whether it still held.
    pub(super) fn cannot_read(&self, row: Row, claim: Claim) -> bool {
        let mut table = self.table();
        table.readers.remove(&claim);
        let holds = table.states[row] == State::Reading(claim);
        if holds {
            table.end(row, Settled::Failed);
        }
        holds
    }

    /// Ends whatever this thread had in hand when it panicked. Returns the window, and whether it has failed: pages
    /// were being placed, or it was the second panic there.
    pub(super) fn panicked(&self, worker: Worker, placing: Option<Row>) -> Option<(Row, bool)> {
        let mut table = self.table();
        table.is_sorting = false;
        if let Some(row) = placing.filter(|row| matches!(table.states[*row], State::Placing { .. })) {
            table.placing -= 1;
            table.end(row, Settled::Failed);
            self.placed.notify_all();
            return Some((row, true));
        }
        let (claim, reader) =
            table.readers.iter().find(|(_, reader)| reader.worker == worker).map(|(c, r)| (*c, *r))?;
        table.readers.remove(&claim);
        (table.states[reader.row] == State::Reading(claim)).then(|| {
            let has_failed = table.lose(reader.row) >= LOSSES_MAX;
            if has_failed {
                table.end(reader.row, Settled::Failed);
            } else {
                table.give_back(reader.row);
            }
            (reader.row, has_failed)
        })
    }

    /// Takes claims away that are older than `after`, so that another thread reads these windows: once for each
    /// window. Each claim is returned once.
    pub(super) fn take_overdue(&self, now: Moment, after: Duration) -> Vec<Overdue> {
        let mut table = self.table();
        let is_overdue = |reader: &Reader| !reader.is_named && now.since(reader.since) >= after;
        let overdue: Vec<(Claim, Reader)> =
            table.readers.iter().filter(|(_, reader)| is_overdue(reader)).map(|(c, r)| (*c, *r)).collect();
        let mut taken = Vec::new();
        for (claim, reader) in overdue {
            let row = reader.row;
            if table.states[row] != State::Reading(claim) {
                table.readers.remove(&claim);
                continue;
            }
            if table.lose(row) < LOSSES_MAX {
                table.readers.remove(&claim);
                table.give_back(row);
            } else if let Some(reader) = table.readers.get_mut(&claim) {
                reader.is_named = true;
                table.remove_behind(row);
            }
            taken.push(Overdue { row, worker: reader.worker, waited: now.since(reader.since) });
        }
        taken
    }

    /// Number of stored windows that are neither filled nor failed.
    pub(super) fn left(&self) -> usize {
        self.table().left
    }

    /// Windows that are registered and of which the kernel may answer the touches from now on, since all of the stored
    /// ones are filled or failed. They count as let go from now on.
    pub(super) fn rest_to_let_go(&self) -> Vec<Row> {
        let mut table = self.table();
        let is_rest = |state: &State| matches!(state, State::Zero | State::Kept);
        let rows: Vec<Row> = (0..table.states.len()).filter(|row| is_rest(&table.states[*row])).collect();
        rows.iter().for_each(|row| table.states[*row] = State::LetGo);
        rows
    }

    /// Ends all filling. Waits until no window is being placed any more. Returns the windows that are still registered.
    pub(super) fn close(&self) -> Vec<Row> {
        let mut table = self.table();
        table.is_closed = true;
        self.placed.wait_while(&mut table, |table| table.placing > 0);
        (0..table.states.len()).filter(|row| table.states[*row] != State::LetGo).collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing under this lock calls code of others, and each step leaves the table consistent.
        self.table.lock()
    }
}

impl Table {
    fn claim(&mut self, row: Row, worker: Worker, since: Moment) -> Claim {
        let claim = Claim(self.next_claim);
        self.next_claim += 1;
        self.states[row] = State::Reading(claim);
        self.readers.insert(claim, Reader { row, worker, since, is_named: false });
        claim
    }

    fn begin_placing(&mut self, row: Row, is_stored: bool) {
        self.states[row] = State::Placing { is_stored };
        self.placing += 1;
    }

    /// Whether a window may be filled that no thread waits for: one at a time, and a second one while the guest waits
    /// for the first, so that its CPU is idle. No more, since a touch that comes meanwhile waits behind them.
    fn may_fill_behind(&self) -> bool {
        let in_hand = self.readers.len() + self.placing;
        !self.is_sorting && (self.behind.is_empty() || in_hand == 1 && !self.waiting.is_empty())
    }

    fn claim_behind(&mut self, worker: Worker, since: Moment) -> Option<(Row, Claim)> {
        let row = self.next_waiting()?;
        self.behind.push(row);
        Some((row, self.claim(row, worker, since)))
    }

    fn remove_behind(&mut self, row: Row) {
        self.behind.retain(|of| *of != row);
    }

    fn next_waiting(&mut self) -> Option<Row> {
        while let Some(row) = self.returned.pop_front() {
            if self.states[row] == State::Waiting {
                return Some(row);
            }
        }
        let order = self.order.as_ref()?;
        while let Some(row) = order.get(self.next) {
            self.next += 1;
            if self.states[*row as usize] == State::Waiting {
                return Some(*row as usize);
            }
        }
        None
    }

    /// Counts a lost claim on a window. Returns their number.
    fn lose(&mut self, row: Row) -> u8 {
        let losses = self.losses.entry(row).or_default();
        *losses = losses.saturating_add(1);
        *losses
    }

    fn give_back(&mut self, row: Row) {
        self.remove_behind(row);
        self.states[row] = State::Waiting;
        self.returned.push_back(row);
    }

    /// Ends the filling of a window, with or without contents.
    fn end(&mut self, row: Row, settled: Settled) {
        self.remove_behind(row);
        self.left -= usize::from(self.states[row] != State::Placing { is_stored: false });
        match settled {
            Settled::LetGo(mapping) => {
                self.states[row] = State::LetGo;
                self.set_mapping(row, mapping);
            }
            Settled::Kept => self.states[row] = State::Kept,
            Settled::Failed => {
                self.states[row] = State::Failed;
                self.waiting.remove(&row);
            }
        }
    }

    /// Counts the borders between mappings anew, which change only beside this row.
    fn set_mapping(&mut self, row: Row, mapping: Mapping) {
        let before = self.borders_at(row) + self.borders_at(row + 1);
        self.mappings[row] = mapping;
        let now = self.borders_at(row) + self.borders_at(row + 1);
        self.borders = (self.borders + now).saturating_sub(before);
    }

    /// Number of borders between a row and the one before it, 0 or 1.
    fn borders_at(&self, row: Row) -> usize {
        let is_inside = row > 0 && row < self.mappings.len() && self.firsts.binary_search(&row).is_err();
        usize::from(is_inside && self.mappings[row] != self.mappings[row - 1])
    }
}

#[cfg(test)]
mod tests;
