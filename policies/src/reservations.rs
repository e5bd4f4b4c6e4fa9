//! Reservations of frames: 2 MiB set aside at the first touch of a window and used page by page (Navarro et al., OSDI '02;
//! FreeBSD's `vm_reserv`, one level). Once enough of a window is populated it becomes large where it is, without a copy.
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
//! Nothing is lost by breaking: only frames that the guest never touched go back. A reservation is a promise that costs
//! memory only while the host has some to spare.
//!
//! This is the book that decides; whoever keeps it maps, promotes and gives back as it says.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use crate::snapshot::{HostMemory, VmId};
use crate::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, PerTenThousand, WindowIndex};
use crate::watermark::Watermark;

/// When a reservation becomes large, and when one is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRules {
    /// Populated base pages that make a window large: 1 to 512.
    pub threshold: u16,
    /// Reservations are broken from this share of host memory in use on...
    pub break_from: PerTenThousand,
    /// ...until it is less than this.
    pub break_to: PerTenThousand,
}

/// A window that goes through many changes at once is moved to the tail once in this time (FreeBSD's `PARTPOPSLOP`: one
/// tick, 1 ms at its usual 1000 Hz). The order is for pressure that lasts seconds.
const QUEUE_SLOP: Duration = Duration::from_millis(1);

/// A window with frames of its own.
type Key = (VmId, WindowIndex);

/// All reservations there are, and the queue of those that are partly populated.
#[derive(Clone, Debug)]
pub struct Reservations {
    threshold: u16,
    shortage: Watermark,
    held: BTreeMap<Key, Held>,
    /// Partial ones by their turn: the first was changed longest ago.
    queue: BTreeMap<u64, Key>,
    next_turn: u64,
    /// Reserved base pages that hold nothing, of partial ones.
    unpopulated: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    populated: u16,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Partial, with this turn since then.
    Queued { turn: u64, since: Moment },
    /// Large.
    Whole,
}

impl Reservations {
    /// None yet.
    ///
    /// # Panics
    /// Where the threshold is no number of pages that a window can have.
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

    /// Frames were set aside for a window in which nothing was; none of its pages is populated yet.
    ///
    /// # Panics
    /// Where it has a reservation.
    pub fn reserve(&mut self, vm: VmId, window: WindowIndex, now: Moment) {
        let place = self.enqueue((vm, window), now);
        let before = self.held.insert((vm, window), Held { populated: 0, place });
        assert!(before.is_none(), "{vm}: {window} is reserved already");
        self.unpopulated += u64::from(BASE_PAGES_PER_WINDOW);
    }

    /// So many more pages of a reserved window are populated. Whether that makes it large, now.
    ///
    /// # Panics
    /// Where it has no reservation, or fewer pages than that are left.
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

    /// So many pages of a reserved window were given back. What was large is partial again; with no page left the
    /// reservation ends, and the window may be reserved anew.
    ///
    /// # Panics
    /// Where it has no reservation, or fewer pages.
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

    /// Which reservations to break: from the head of the queue on, as many as give back what the host is short of, but no
    /// more than `at_most`: breaking one takes time, and who was told of so many may have others to serve before the next.
    /// They are in the book no longer. None without a look at the host.
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

    /// Pages of the window that are populated; `None` where it has no reservation.
    pub fn populated(&self, vm: VmId, window: WindowIndex) -> Option<u16> {
        self.held.get(&(vm, window)).map(|held| held.populated)
    }

    /// Reserved memory that holds nothing: what breaking all partial reservations would give back. It is in use for the
    /// host, and in no window's resident pages.
    pub fn unpopulated(&self) -> Bytes {
        PageSize::Base4K.bytes() * self.unpopulated
    }

    /// Partial reservations, the next to be broken first.
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
