//! Who may do something to which part of guest RAM. Moving a giant copies a gibibyte while the guest runs: a window that somebody
//! took aside meanwhile would be missing from the copy, and a dirty log that somebody else fetched would hide what to copy
//! again. So whoever touches guest RAM or its dirty logs claims it first, and the guard of a claim lasts as long as the work.
//!
//! ```text
//!                      windows, one by one             a slot's dirty log             the giant whole
//!   who                Aside, the loop                 hold, sensors of writes        GiantPages
//!   free giant         yes, any number                 yes, any number                yes, if nobody else is there
//!   being moved        refused: UnderWay               refused: UnderWay              refused: UnderWay
//!   on a giant page    refused: OnGiantPage            yes                            yes: it may go back
//! ```
//!
//! A refused caller does not wait; it comes back later. The claims belong to [`crate::GuestRam`], so that everything
//! that reaches the memory reaches the same ones.
//!
//! Claims on windows are counted, not exclusive: they keep giants away from windows and windows from giants, and not
//! two actuators from the same window. What keeps those apart:
//!
//! - Two actions of the manager: its plan has one action a window and tick (`WindowState`), and one loop acts on a VM.
//! - A swap or a release, and a sample, each with pages aside: [`crate::aside::Aside`] has one stay a window. Of two of
//!   them, or of another userfaultfd, the kernel refuses the second registration (`EBUSY`).
//! - Collapse and split, and pages aside: the kernel does not collapse a watched window that has holes, and a hole is no
//!   part of a huge page.
//! - A release, a balloon and a reset, which discard pages: a lock ([`crate::given_back::GivenBack`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wideleaf_policies::{Backing, Gpa, GpaRange, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::second_level::SlotId;
use crate::sensors::host_backing::WindowBacking;
use crate::side_mapping::{GIANT, GiantPage};

/// How often somebody looks again because a giant was exchanged while they looked: an exchange takes 0.3 ms, and between two
/// of them a gibibyte is copied.
const LOOKS_MAX: u32 = 4;

/// The claims on one VM's RAM. See the module.
#[derive(Debug, Default)]
pub struct Claims {
    giants: Mutex<BTreeMap<Gpa, Giant>>,
    /// Exchanges of a giant's mapping, begun and ended.
    exchanges_begun: AtomicU64,
    exchanges_ended: AtomicU64,
    /// Memslots whose dirty log a manager has switched on. See [`crate::second_level::own_logs`].
    own_logs: Mutex<BTreeSet<SlotId>>,
}

#[derive(Debug, Default)]
struct Giant {
    /// Claims on a part of it.
    parts: u32,
    is_under_way: bool,
    /// The page it is on. It belongs to the RAM and not to who moved it there, so that whoever comes later knows of it.
    page: Option<Arc<GiantPage>>,
}

/// A giant that is not there to be worked on window by window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiantInUse {
    /// Its first address.
    pub start: Gpa,
    /// It is being moved.
    pub is_under_way: bool,
    /// It is on a giant page; while it is moved back it still is.
    pub is_on_giant_page: bool,
}

/// Why a claim is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Claimed {
    /// It is part of a giant that is being moved.
    #[error("1 GiB around it is being moved: try again when that is done")]
    UnderWay,
    /// It is part of a giant page.
    #[error("it is part of a giant page: demote that first")]
    OnGiantPage,
    /// Somebody is at work on a part of this giant.
    #[error("{0} windows or slots of this giant are being worked on: try again")]
    InParts(u32),
}

impl Claimed {
    /// What that means to who wanted to act.
    pub fn result(self) -> OutcomeResult {
        match self {
            Claimed::UnderWay => OutcomeResult::Skipped(Skip::GiantUnderWay),
            Claimed::OnGiantPage => OutcomeResult::Skipped(Skip::NoMechanism),
            Claimed::InParts(_) => OutcomeResult::Refused(Refusal::Busy),
        }
    }
}

impl Claims {
    /// Claims a window against the moving of its giant: its pages may be moved, exchanged, split or given back while
    /// the answer lives. Another caller may claim it too; see the module.
    ///
    /// # Errors
    /// [`Claimed::UnderWay`] and [`Claimed::OnGiantPage`].
    pub fn window(self: &Arc<Self>, window: WindowIndex) -> Result<PartClaim, Claimed> {
        let mut giants = self.giants();
        let giant = giants.entry(giant_of(window)).or_default();
        match giant {
            Giant { is_under_way: true, .. } => Err(Claimed::UnderWay),
            Giant { page: Some(_), .. } => Err(Claimed::OnGiantPage),
            _ => {
                giant.parts += 1;
                Ok(PartClaim { claims: Arc::clone(self), giants: vec![giant_of(window)] })
            }
        }
    }

    /// Claims the dirty log of a memslot, which may cover several giants: it may be switched and fetched while the answer
    /// lives.
    ///
    /// # Errors
    /// [`Claimed::UnderWay`].
    pub fn dirty_log(self: &Arc<Self>, slot: GpaRange) -> Result<PartClaim, Claimed> {
        let mut giants = self.giants();
        let first = slot.start().align_down(PageSize::Giant1G);
        let covered: Vec<Gpa> =
            (0..(slot.end() - first).get().div_ceil(GIANT.get())).map(|i| first + GIANT * i).collect();
        if covered.iter().any(|giant| giants.get(giant).is_some_and(|giant| giant.is_under_way)) {
            return Err(Claimed::UnderWay);
        }
        covered.iter().for_each(|giant| giants.entry(*giant).or_default().parts += 1);
        Ok(PartClaim { claims: Arc::clone(self), giants: covered })
    }

    /// Claims a giant whole, to move it.
    ///
    /// # Errors
    /// [`Claimed::UnderWay`] and [`Claimed::InParts`].
    pub fn giant(self: &Arc<Self>, giant: Gpa) -> Result<GiantClaim, Claimed> {
        let mut giants = self.giants();
        let state = giants.entry(giant).or_default();
        match state {
            Giant { is_under_way: true, .. } => Err(Claimed::UnderWay),
            Giant { parts: parts @ 1.., .. } => Err(Claimed::InParts(*parts)),
            _ => {
                state.is_under_way = true;
                Ok(GiantClaim { claims: Arc::clone(self), giant })
            }
        }
    }

    /// Whether a window is part of a giant that is being moved.
    pub fn is_under_way(&self, window: WindowIndex) -> bool {
        self.giants().get(&giant_of(window)).is_some_and(|giant| giant.is_under_way)
    }

    /// Whether a window is part of a page that a giant was put on. While that is moved back, it still is.
    pub fn is_on_giant_page(&self, window: WindowIndex) -> bool {
        self.giants().get(&giant_of(window)).is_some_and(|giant| giant.page.is_some())
    }

    /// The number of claims on windows and logs now. While the manager rests and devices stand still, each is of a
    /// window whose pages are aside and cannot be brought back yet ([`crate::aside`]).
    pub(crate) fn parts_in_work(&self) -> u32 {
        self.giants().values().map(|giant| giant.parts).sum()
    }

    /// The giants that are being moved or on a giant page, ascending.
    pub fn giants_in_use(&self) -> Vec<GiantInUse> {
        let giants = self.giants();
        let used = giants.iter().filter(|(_, giant)| giant.is_under_way || giant.page.is_some());
        let in_use = |(start, giant): (&Gpa, &Giant)| GiantInUse {
            start: *start,
            is_under_way: giant.is_under_way,
            is_on_giant_page: giant.page.is_some(),
        };
        used.map(in_use).collect()
    }

    /// What a window's backing is, given what the page tables say: they tell huge from small, not 2 MiB from 1 GiB.
    pub fn known(&self, seen: WindowBacking) -> WindowBacking {
        let is_giant = seen.backing.is_large() && self.is_on_giant_page(seen.window);
        WindowBacking { backing: if is_giant { Backing::Giant1G } else { seen.backing }, ..seen }
    }

    /// Looks at guest RAM's page tables, and again where a giant was exchanged meanwhile: for a moment it has no page.
    pub fn steadily<T>(&self, mut look: impl FnMut() -> T) -> T {
        for _ in 1..LOOKS_MAX {
            let ended = self.exchanges_ended.load(Ordering::SeqCst);
            let seen = look();
            if self.exchanges_begun.load(Ordering::SeqCst) == ended {
                return seen;
            }
        }
        look()
    }

    /// The memslots whose dirty log is a manager's own, for whoever switches one.
    pub(crate) fn own_logs(&self) -> MutexGuard<'_, BTreeSet<SlotId>> {
        // A panic elsewhere leaves the set true.
        self.own_logs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn giants(&self) -> MutexGuard<'_, BTreeMap<Gpa, Giant>> {
        // Every change is one assignment: a panic elsewhere leaves the table true.
        self.giants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn giant_of(window: WindowIndex) -> Gpa {
    window.start().align_down(PageSize::Giant1G)
}

/// A claim on a window, or on a slot's dirty log. Dropped, it ends.
#[derive(Debug)]
#[must_use = "a claim lasts as long as its guard"]
pub struct PartClaim {
    claims: Arc<Claims>,
    giants: Vec<Gpa>,
}

impl Drop for PartClaim {
    fn drop(&mut self) {
        let mut giants = self.claims.giants();
        for giant in &self.giants {
            giants.entry(*giant).or_default().parts -= 1;
        }
    }
}

/// A claim on a giant. Dropped, it ends; in a panic it stays, since nobody knows how far the move came.
#[derive(Debug)]
#[must_use = "a claim lasts as long as its guard"]
pub struct GiantClaim {
    claims: Arc<Claims>,
    giant: Gpa,
}

impl GiantClaim {
    /// Which.
    pub fn giant(&self) -> Gpa {
        self.giant
    }

    /// Whether it is a claim on the RAM that has these claims.
    pub(crate) fn is_of(&self, claims: &Arc<Claims>) -> bool {
        Arc::ptr_eq(&self.claims, claims)
    }

    /// Runs an exchange of the giant's mapping, which others must not take for a hole. It must not panic: it would never be
    /// over to them.
    pub(crate) fn exchanging<T>(&self, exchange: impl FnOnce() -> T) -> T {
        self.claims.exchanges_begun.fetch_add(1, Ordering::SeqCst);
        let result = exchange();
        self.claims.exchanges_ended.fetch_add(1, Ordering::SeqCst);
        result
    }

    /// The page it is on.
    pub(crate) fn page(&self) -> Option<Arc<GiantPage>> {
        self.claims.giants().get(&self.giant)?.page.clone()
    }

    /// It is on this page now, or on none.
    pub(crate) fn moved_to(&self, page: Option<Arc<GiantPage>>) {
        self.claims.giants().entry(self.giant).or_default().page = page;
    }

    /// Nobody may touch this giant ever again: the guest stands still, and its memory stays as it is.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for GiantClaim {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.claims.giants().entry(self.giant).or_default().is_under_way = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::side_mapping::GiantFile;
    use std::cell::Cell;
    use wideleaf_policies::Bytes;
    use wideleaf_policies::units::{gib, mib};

    const FIRST: Gpa = Gpa::new(0);
    const IN_FIRST: WindowIndex = WindowIndex::new(511);
    const IN_SECOND: WindowIndex = WindowIndex::new(512);

    fn claims() -> Arc<Claims> {
        Arc::default()
    }

    fn slot(start: Bytes, bytes: Bytes) -> GpaRange {
        GpaRange::new(Gpa::new(0) + start, bytes).expect("fits")
    }

    #[test]
    fn a_giant_that_is_moved_excludes_its_windows_and_its_logs_and_no_others() {
        let claims = claims();
        let giant = claims.giant(FIRST).expect("free");
        assert_eq!(claims.window(IN_FIRST).expect_err("it is moved"), Claimed::UnderWay);
        assert_eq!(claims.dirty_log(slot(mib(64), mib(64))).expect_err("it is fetched"), Claimed::UnderWay);
        assert_eq!(claims.dirty_log(slot(Bytes::ZERO, gib(2))).expect_err("a part is fetched"), Claimed::UnderWay);
        assert_eq!(claims.giant(FIRST).expect_err("it is moved"), Claimed::UnderWay);
        assert!(claims.window(IN_SECOND).is_ok() && claims.dirty_log(slot(gib(1), gib(1))).is_ok());
        drop(giant);
        assert!(claims.window(IN_FIRST).is_ok() && claims.dirty_log(slot(mib(64), mib(64))).is_ok());
    }

    #[test]
    fn a_giant_is_not_moved_while_somebody_works_on_a_part_of_it() {
        let claims = claims();
        let window = claims.window(IN_FIRST).expect("free");
        let log = claims.dirty_log(slot(Bytes::ZERO, gib(2))).expect("free");
        assert_eq!(claims.giant(FIRST).expect_err("in parts"), Claimed::InParts(2));
        assert_eq!(claims.giant(FIRST + gib(1)).expect_err("the log covers it too"), Claimed::InParts(1));
        drop((window, log));
        assert!(claims.giant(FIRST).is_ok());
    }

    #[test]
    fn a_window_on_a_giant_page_is_left_alone_until_it_is_back() {
        let claims = claims();
        let page = GiantPage::new(GiantFile::of_ordinary_memory().expect("it takes no memory yet"), None);
        claims.giant(FIRST).expect("free").moved_to(Some(Arc::new(page)));
        assert_eq!(claims.window(IN_FIRST).expect_err("one page"), Claimed::OnGiantPage);
        assert!(claims.dirty_log(slot(Bytes::ZERO, gib(1))).is_ok(), "the second level may be held all the same");
        let seen = |window, backing| claims.known(WindowBacking { window, resident: 512, backing }).backing;
        assert_eq!(seen(IN_FIRST, Backing::Huge2M), Backing::Giant1G);
        assert_eq!(seen(IN_FIRST, Backing::Base4K), Backing::Base4K, "the page tables have the last word");
        assert_eq!(seen(IN_SECOND, Backing::Huge2M), Backing::Huge2M);
        claims.giant(FIRST).expect("it may go back").moved_to(None);
        assert!(claims.window(IN_FIRST).is_ok());
    }

    #[test]
    fn a_giant_whose_mover_panicked_stays_claimed() {
        let claims = claims();
        let giant = claims.giant(FIRST).expect("free");
        let mover = std::thread::spawn(move || {
            let _giant = giant;
            panic!("as a test of what comes after");
        });
        assert!(mover.join().is_err());
        assert!(claims.is_under_way(IN_FIRST));
    }

    #[test]
    fn who_looks_while_a_giant_is_exchanged_looks_again() {
        let (claims, looks) = (claims(), Cell::new(0));
        let giant = claims.giant(FIRST).expect("free");
        let look = || {
            looks.set(looks.get() + 1);
            if looks.get() == 1 {
                giant.exchanging(|| ());
            }
            looks.get()
        };
        assert_eq!(claims.steadily(look), 2);
        assert_eq!(giant.exchanging(|| claims.steadily(|| looks.replace(0))), 0, "and does not look for ever");
    }
}
