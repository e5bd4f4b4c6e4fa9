//! Reservations of frames: 2 MiB reserved at the first touch of a window and used page by page (Navarro et al.,
//! OSDI '02; FreeBSD's `vm_reserv`, one level). Once enough of a window is populated, it becomes large in place,
//! without a copy.
//!
//! ```text
//!   first touch of an empty window
//!        │                     `threshold` pages populated
//!        ▼                                │
//!    [Partial] ───────────────────────────┴──────────────▶ [Whole]  one huge entry; no longer in the queue
//!        │  ▲ each change: to the tail                        │
//!        │  └──────────────── a page was given back ──────────┘     at 0 pages there is no reservation any more
//!        ▼ the host is short, and it is the head
//!     Broken: the frames that hold nothing go back, the others stay as base pages; it is never reserved again
//!
//!   queue   head, changed longest ago ──▶ w4  w1  w9 ◀── tail, changed last
//! ```
//!
//! Breaking a reservation loses no data: only frames that the guest never touched go back. A reservation costs
//! memory only while the host has some to spare.
//!
//! This module decides and keeps the records. Its caller maps, promotes and gives back accordingly.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use crate::snapshot::{HostMemory, VmId};
use crate::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, PerTenThousand, WindowIndex};
use crate::watermark::Watermark;

/// Rules for making a reservation large, and for breaking one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRules {
    /// Number of populated base pages that makes a window large, 1 to 512.
    pub threshold: u16,
    /// Share of host memory in use from which on reservations are broken.
    pub break_from: PerTenThousand,
    /// Share of host memory in use below which breaking stops.
    pub break_to: PerTenThousand,
}

/// Minimum time between two moves of a window to the tail when it changes often (FreeBSD's `PARTPOPSLOP`: one tick,
/// 1 ms at its usual 1000 Hz). The order matters for pressure that lasts seconds.
const QUEUE_SLOP: Duration = Duration::from_millis(1);

/// A window with reserved frames.
type Key = (VmId, WindowIndex);

/// All reservations, and the queue of the partly populated ones.
#[derive(Clone, Debug)]
pub struct Reservations {
    threshold: u16,
    shortage: Watermark,
    held: BTreeMap<Key, Held>,
    /// Partial reservations by turn; the first was changed longest ago.
    queue: BTreeMap<u64, Key>,
    next_turn: u64,
    /// Number of reserved base pages in partial reservations that are not populated.
    unpopulated: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    populated: u16,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Partial; queued at this turn and moment.
    Queued { turn: u64, since: Moment },
    /// Populated enough to be large.
    Whole,
}

impl Reservations {
    /// Makes an empty set of reservations.
    ///
    /// # Panics
    /// If the threshold is not a number of pages that a window can have.
    pub fn new(rules: ReservationRules) -> Reservations {
        let ReservationRules { threshold, break_from, break_to } = rules;
        assert!((1..=BASE_PAGES_PER_WINDOW).contains(&threshold), "{threshold} of {BASE_PAGES_PER_WINDOW} pages");
        Reservations {
            threshold,
            shortage: Watermark::new(break_from, break_to),
            held: BTreeMap::new(),
            queue: BTreeMap::new(),
            next_turn: 0,
            unpopulated: 0,
        }
    }

    /// Records that frames were reserved for an empty window; none of its pages is populated yet.
    ///
    /// # Panics
    /// If the window already has a reservation.
    pub fn reserve(&mut self, vm: VmId, window: WindowIndex, now: Moment) {
        let place = self.enqueue((vm, window), now);
        let before = self.held.insert((vm, window), Held { populated: 0, place });
        assert!(before.is_none(), "{vm}: {window} is reserved already");
        self.unpopulated += u64::from(BASE_PAGES_PER_WINDOW);
    }

    /// Records that `pages` more pages of a reserved window are populated. Returns whether that makes it large now.
    ///
    /// # Panics
    /// If the window has no reservation, or fewer than `pages` are left.
    pub fn populate(&mut self, vm: VmId, window: WindowIndex, pages: u16, now: Moment) -> bool {
        let held = self.take((vm, window));
        let populated = held.populated + pages;
        assert!(populated <= BASE_PAGES_PER_WINDOW, "{vm}: {window} has {populated} pages populated");
        let Place::Queued { turn, since } = held.place else {
            self.held.insert((vm, window), Held { populated, place: Place::Whole });
            return false;
        };
        self.unpopulated -= u64::from(pages);
        let is_whole = populated >= self.threshold;
        let place = if is_whole {
            self.queue.remove(&turn);
            self.unpopulated -= u64::from(BASE_PAGES_PER_WINDOW - populated);
            Place::Whole
        } else if now.since(since) < QUEUE_SLOP {
            held.place
        } else {
            self.queue.remove(&turn);
            self.enqueue((vm, window), now)
        };
        self.held.insert((vm, window), Held { populated, place });
        is_whole
    }

    /// Records that the guest gave back `pages` pages of a reserved window. A large window becomes partial again.
    /// With no page left the reservation ends, and the window may be reserved anew.
    ///
    /// # Panics
    /// If the window has no reservation, or fewer pages.
    pub fn depopulate(&mut self, vm: VmId, window: WindowIndex, pages: u16, now: Moment) {
        let held = self.take((vm, window));
        assert!(pages <= held.populated, "{vm}: {window} has {} pages populated, not {pages}", held.populated);
        if let Place::Queued { turn, .. } = held.place {
            self.queue.remove(&turn);
            self.unpopulated -= u64::from(BASE_PAGES_PER_WINDOW - held.populated);
        }
        let populated = held.populated - pages;
        if populated > 0 {
            let place = self.enqueue((vm, window), now);
            self.unpopulated += u64::from(BASE_PAGES_PER_WINDOW - populated);
            self.held.insert((vm, window), Held { populated, place });
        }
    }

    /// Removes and returns the reservations to break: from the head of the queue on, as many as the host's shortage
    /// requires, and at most `at_most`. The bound lets the caller serve other faults in between, because breaking
    /// takes time. Empty if the host's memory is unknown.
    pub fn to_break(&mut self, host: Option<HostMemory>, at_most: usize) -> Vec<(VmId, WindowIndex)> {
        let mut broken = Vec::new();
        let Some(mut host) = host else { return broken };
        while broken.len() < at_most && self.shortage.update(Some(host)) {
            let Some((_, key)) = self.queue.pop_first() else { break };
            let held = self.take(key);
            let unpopulated = u64::from(BASE_PAGES_PER_WINDOW - held.populated);
            self.unpopulated -= unpopulated;
            host.available += PageSize::Base4K.bytes() * unpopulated;
            broken.push(key);
        }
        broken
    }

    /// Number of populated pages of the window; `None` if it has no reservation.
    pub fn populated(&self, vm: VmId, window: WindowIndex) -> Option<u16> {
        self.held.get(&(vm, window)).map(|held| held.populated)
    }

    /// Reserved memory that is not populated: the memory that breaking all partial reservations would give back.
    /// The host counts it as used, but no window counts it as resident.
    pub fn unpopulated(&self) -> Bytes {
        PageSize::Base4K.bytes() * self.unpopulated
    }

    /// Partial reservations; the first is the next to be broken.
    pub fn queue(&self) -> impl Iterator<Item = (VmId, WindowIndex)> {
        self.queue.values().copied()
    }

    fn take(&mut self, key: Key) -> Held {
        let (vm, window) = key;
        self.held.remove(&key).unwrap_or_else(|| panic!("{vm}: {window} is not reserved"))
    }

    fn enqueue(&mut self, key: Key, now: Moment) -> Place {
        let turn = self.next_turn;
        self.next_turn += 1;
        self.queue.insert(turn, key);
        Place::Queued { turn, since: now }
    }
}
