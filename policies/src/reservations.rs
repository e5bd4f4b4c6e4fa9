//! Reservations of frames: 2 MiB reserved at the first touch of a window and used page by page (Navarro et al.,
//! OSDI '02; FreeBSD's `vm_reserv`, one level). Once enough of a window is populated, it becomes large in place,
//! without a copy.
//!
//! ```text
//!   first touch of an empty window ◀──────────────────────────────────────────────────────────────┐
//!        │                     `threshold` pages populated, and none absent                       │
//!        ▼                                │                                                       │
//!    [Partial] ───────────────────────────┴──────────────▶ [Whole]  one huge entry; not queued    │
//!        │  ▲ each change: to the tail                        │                                   │
//!        │  └──────────── demoted: a page was given back ─────┘                                   │
//!        │                                                                                        │
//!        ├─ the last populated page was given back: all frames go, and the reservation ends ──────┤
//!        ▼ the host is short, and it is the first with unused frames                              │
//!     Broken: the frames that hold nothing go back, the others stay as base pages                 │
//!        └─ all of them were given back ──────────────────────────────────────────────────────────┘
//!
//!   queue   head, changed longest ago ──▶ w4  w1  w9 ◀── tail, changed last
//! ```
//!
//! A page of a reserved window is populated (the guest uses it), unpopulated (its frame is reserved) or absent (the
//! guest gave it back, and its frame is the host's). FreeBSD keeps the frame of a freed page in its reservation; here
//! the balloon asks for the frame itself, so it goes.
//!
//! Breaking a reservation loses no data: only frames that hold none go back. A large window is not broken. A
//! reservation costs memory only while the host has some to spare.
//!
//! This module decides and keeps the records. Its caller maps, promotes, demotes and gives back accordingly.

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

/// Upper ends of the ages by which partial reservations are counted, in seconds since their last change; the last
/// group has no end. A second is a burst of touches, ten the phase of a program.
pub const PARTIAL_AGES_S: [u64; 3] = [1, 10, 60];

/// Number of groups of ages.
pub const AGE_GROUPS: usize = PARTIAL_AGES_S.len() + 1;

/// A window with reserved frames.
type Key = (VmId, WindowIndex);

/// Pages of a reserved window that its guest gave back, by their state before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftPages {
    /// Number of populated pages.
    pub populated: u16,
    /// Number of pages with a reserved frame that were not populated.
    pub unpopulated: u16,
}

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
    /// Pages that were given back; they have no frame.
    absent: u16,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Partial; queued at this turn, and changed last at this moment.
    Queued { turn: u64, since: Moment },
    /// Populated enough to be large.
    Whole,
}

impl Held {
    /// Number of reserved frames without data.
    fn unpopulated(self) -> u64 {
        u64::from(BASE_PAGES_PER_WINDOW - self.absent - self.populated)
    }
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
        assert!(!self.held.contains_key(&(vm, window)), "{vm}: {window} is reserved already");
        self.put_partial((vm, window), 0, 0, now);
    }

    /// Records that `pages` more pages of a reserved window are populated. Returns whether that makes it large now.
    ///
    /// # Panics
    /// If the window has no reservation, or fewer than `pages` unpopulated frames are left.
    pub fn populate(&mut self, vm: VmId, window: WindowIndex, pages: u16, now: Moment) -> bool {
        let key = (vm, window);
        let held = self.take(key);
        let populated = held.populated + pages;
        assert!(u64::from(pages) <= held.unpopulated(), "{vm}: {window} has {populated} pages populated");
        let is_whole = populated >= self.threshold && held.absent == 0;
        match held.place {
            Place::Whole => self.put(key, Held { populated, ..held }),
            Place::Queued { .. } if is_whole => self.put(key, Held { populated, absent: 0, place: Place::Whole }),
            Place::Queued { turn, since } if now.since(since) < QUEUE_SLOP => {
                self.put(key, Held { populated, absent: held.absent, place: Place::Queued { turn, since } });
            }
            Place::Queued { .. } => self.put_partial(key, populated, held.absent, now),
        }
        is_whole && matches!(held.place, Place::Queued { .. })
    }

    /// Records that frames were taken again for `pages` pages of a reserved window that were given back. They are
    /// not populated yet.
    ///
    /// # Panics
    /// If the window has no reservation, or fewer pages are absent.
    pub fn refill(&mut self, vm: VmId, window: WindowIndex, pages: u16) {
        let held = self.take((vm, window));
        assert!(pages <= held.absent, "{vm}: {window} has {} pages absent, not {pages}", held.absent);
        self.put((vm, window), Held { absent: held.absent - pages, ..held });
    }

    /// Records that a large window has base pages again. All its pages count as populated from now on: what the guest
    /// touched while it was large is not known.
    ///
    /// # Panics
    /// If the window is not large.
    pub fn demote(&mut self, vm: VmId, window: WindowIndex, now: Moment) {
        let held = self.take((vm, window));
        assert!(matches!(held.place, Place::Whole), "{vm}: {window} is not large");
        self.put_partial((vm, window), BASE_PAGES_PER_WINDOW, 0, now);
    }

    /// Records that the guest gave back pages of a reserved window, and that the host has their frames. A large window
    /// becomes partial again. Returns whether the reservation continues: with no populated page left it ends, the
    /// rest of its frames are to go back, and the window may be reserved anew.
    ///
    /// # Panics
    /// If the window has no reservation, or fewer such pages.
    pub fn depopulate(&mut self, vm: VmId, window: WindowIndex, left: LeftPages, now: Moment) -> bool {
        let held = self.take((vm, window));
        let LeftPages { populated, unpopulated } = left;
        assert!(populated <= held.populated, "{vm}: {window} has {} pages populated, not {populated}", held.populated);
        assert!(u64::from(unpopulated) <= held.unpopulated(), "{vm}: {window} has fewer frames than {unpopulated}");
        let absent = held.absent + populated + unpopulated;
        let populated = held.populated - populated;
        if populated > 0 {
            self.put_partial((vm, window), populated, absent, now);
        }
        populated > 0
    }

    /// Ends a reservation, if there is one: its window is on base pages from now on.
    pub fn end(&mut self, vm: VmId, window: WindowIndex) {
        if self.held.contains_key(&(vm, window)) {
            self.take((vm, window));
        }
    }

    /// Removes and returns the reservations to break: from the head of the queue on, as many as the host's shortage
    /// requires, and at most `at_most`. The bound lets the caller serve other faults in between, because breaking
    /// takes time. One without an unused frame is left alone: breaking it would free nothing, and its window would not
    /// become large again. Empty if the host's memory is unknown.
    pub fn to_break(&mut self, host: Option<HostMemory>, at_most: usize) -> Vec<(VmId, WindowIndex)> {
        let mut broken = Vec::new();
        let Some(mut host) = host else { return broken };
        while broken.len() < at_most && self.shortage.update(Some(host)) {
            let frees = |key: &&Key| self.held[*key].unpopulated() > 0;
            let Some(key) = self.queue.values().find(frees).copied() else { break };
            let held = self.take(key);
            host.available += PageSize::Base4K.bytes() * held.unpopulated();
            broken.push(key);
        }
        broken
    }

    /// Number of populated pages of the window; `None` if it has no reservation.
    pub fn populated(&self, vm: VmId, window: WindowIndex) -> Option<u16> {
        self.held.get(&(vm, window)).map(|held| held.populated)
    }

    /// Number of pages of a reserved window that were given back and have no frame; 0 without a reservation.
    pub fn absent(&self, vm: VmId, window: WindowIndex) -> u16 {
        self.held.get(&(vm, window)).map_or(0, |held| held.absent)
    }

    /// Whether the window is large.
    pub fn is_whole(&self, vm: VmId, window: WindowIndex) -> bool {
        self.held.get(&(vm, window)).is_some_and(|held| matches!(held.place, Place::Whole))
    }

    /// Reserved memory that is not populated: the memory that breaking all partial reservations would give back.
    /// The host counts it as used, but no window counts it as resident.
    pub fn unpopulated(&self) -> Bytes {
        PageSize::Base4K.bytes() * self.unpopulated
    }

    /// Partial reservations; the first that has an unused frame is the next to be broken.
    pub fn queue(&self) -> impl Iterator<Item = (VmId, WindowIndex)> {
        self.queue.values().copied()
    }

    /// Number of partial reservations by the time since their last change; see [`PARTIAL_AGES_S`].
    pub fn partial_by_age(&self, now: Moment) -> [u64; AGE_GROUPS] {
        let mut counts = [0; AGE_GROUPS];
        for held in self.queue.values().filter_map(|key| self.held.get(key)) {
            if let Place::Queued { since, .. } = held.place {
                let age = now.since(since);
                let group = PARTIAL_AGES_S.iter().position(|end| age < Duration::from_secs(*end));
                counts[group.unwrap_or(AGE_GROUPS - 1)] += 1;
            }
        }
        counts
    }

    /// Takes a reservation out of the records and the queue.
    fn take(&mut self, key: Key) -> Held {
        let (vm, window) = key;
        let held = self.held.remove(&key).unwrap_or_else(|| panic!("{vm}: {window} is not reserved"));
        if let Place::Queued { turn, .. } = held.place {
            self.queue.remove(&turn);
            self.unpopulated -= held.unpopulated();
        }
        held
    }

    fn put(&mut self, key: Key, held: Held) {
        if let Place::Queued { turn, .. } = held.place {
            self.queue.insert(turn, key);
            self.unpopulated += held.unpopulated();
        }
        self.held.insert(key, held);
    }

    /// At the tail of the queue.
    fn put_partial(&mut self, key: Key, populated: u16, absent: u16, now: Moment) {
        let turn = self.next_turn;
        self.next_turn += 1;
        self.put(key, Held { populated, absent, place: Place::Queued { turn, since: now } });
    }
}
