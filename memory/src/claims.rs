//! Claims on parts of guest RAM. Moving a giant copies a gibibyte while the guest runs: a window that another thread
//! took aside would be missing from the copy, and a dirty log that another thread fetched would hide pages to copy
//! again. So a thread claims guest RAM or its dirty logs before it touches them, and the guard of the claim lasts as
//! long as the work.
//!
//! ```text
//!                      windows, one by one             a slot's dirty log             the giant whole
//!   claimed by         Aside, the loop                 hold, sensors of writes        GiantPages
//!   free giant         yes, any number                 yes, any number                yes, if it has no claims
//!   being moved        refused: UnderWay               refused: UnderWay              refused: UnderWay
//!   on a giant page    refused: OnGiantPage            yes                            yes: it may go back
//! ```
//!
//! Windows that a restore ([`crate::restore`]) has not filled yet are refused to all of them, and so is their giant:
//! their contents are in a file and not in memory.
//!
//! A refused caller does not wait; it comes back later. The claims belong to [`crate::GuestRam`], so that all users
//! of the memory share them.
//!
//! A window in place and a window aside exclude each other. While pages that a guest gave back are processed, the
//! window is neither moved nor unmapped for a sample. While it is, none of its pages are given back: they are not
//! where the guest sees them.
//!
//! ```text
//!   window_in_place   give back: balloon, reports, reserved frames    any number, if no pages are aside
//!   window_aside      swap, release, access sensors                   any number, if none is in place
//! ```
//!
//! Apart from that, claims on windows are counted, not exclusive: they exclude giants from windows and windows from
//! giants, but not two actuators from the same window. Other rules exclude those:
//!
//! - Two actions of the manager: its plan has one action for each window and tick (`WindowState`), and one loop acts
//!   on a VM.
//! - A swap or a release, and a sample, each with pages aside: [`crate::detached::Aside`] allows one state for each
//!   window. For two such instances, or another userfaultfd, the kernel refuses the second registration (`EBUSY`).
//! - Collapse and split, and pages aside: the kernel does not collapse a watched window that has holes, and a hole is
//!   not part of a huge page.
//! - A release, a balloon and a reset, which discard pages: a lock ([`crate::guest_freed::GivenBack`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Backing, Gpa, GpaRange, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::giant_page::{GIANT, GiantPage};
use crate::second_level::SlotId;
use crate::sensors::host_backing::WindowBacking;

/// Maximum number of scans of a caller because a giant was exchanged during one: an exchange takes 0.3 ms, and a
/// gibibyte is copied between two of them.
const LOOKS_MAX: u32 = 4;

/// The claims on one VM's RAM. See the module.
#[derive(Debug, Default)]
pub struct Claims {
    giants: Mutex<BTreeMap<Gpa, Giant>>,
    /// Number of begun exchanges of a giant's mapping; the next counter has the ended ones.
    exchanges_begun: AtomicU64,
    exchanges_ended: AtomicU64,
    /// Memslots with a dirty log that a manager has switched on. See [`crate::second_level::own_logs`].
    own_logs: Mutex<BTreeSet<SlotId>>,
}

#[derive(Debug, Default)]
struct Giant {
    /// Number of claims on a part of it.
    parts: u32,
    is_under_way: bool,
    /// Those of its windows that are claimed for a use that excludes another one.
    windows: BTreeMap<WindowIndex, Claimants>,
    /// A bit for each of its windows that a restore has not filled yet.
    unfilled: [u64; WORDS_OF_WINDOWS],
    /// The page it is on. It belongs to the RAM and not to the thread that moved the giant, so that all later users
    /// know of it.
    page: Option<Arc<GiantPage>>,
}

/// Number of 64-bit words with a bit for each window of a giant.
const WORDS_OF_WINDOWS: usize = PageSize::Giant1G.bytes().pages(PageSize::Huge2M) as usize / 64;

/// Use of a window that excludes the other use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowUse {
    /// Its pages stay where the guest sees them.
    InPlace,
    /// Its pages are out of the guest's reach.
    Aside,
}

/// The claims on a window for one of the two uses.
#[derive(Clone, Copy, Debug)]
struct Claimants {
    of: WindowUse,
    /// Number of these claims, at least 1.
    count: u32,
}

/// A giant that cannot be worked on window by window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiantInUse {
    /// First guest-physical address of the giant.
    pub start: Gpa,
    /// Whether it is being moved.
    pub is_under_way: bool,
    /// Whether it is on a giant page, also while it is moved back.
    pub is_on_giant_page: bool,
}

/// Why a claim is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Claimed {
    /// It is part of a giant that is being moved.
    #[error("cannot claim it: the 1 GiB around it is being moved; try again later")]
    UnderWay,
    /// It is part of a giant page.
    #[error("cannot claim it: it is part of a giant page; demote that first")]
    OnGiantPage,
    /// A restore has not filled it yet: it, or a window of the giant.
    #[error("cannot claim it: the restore of its contents is under way; try again when they are there")]
    NotFilled,
    /// Its pages are aside.
    #[error("cannot claim it: its pages are aside; try again when they are back")]
    Aside,
    /// Pages that its guest gave back are being processed.
    #[error("cannot claim it: pages that its guest gave back are being processed; try again later")]
    InPlace,
    /// Other threads work on parts of this giant.
    #[error("cannot claim the giant: {0} of its windows or slots are being worked on; try again")]
    InParts(u32),
}

impl Claimed {
    /// Result for an actuator that wanted to act.
    pub fn result(self) -> OutcomeResult {
        match self {
            Claimed::UnderWay => OutcomeResult::Skipped(Skip::GiantUnderWay),
            Claimed::OnGiantPage => OutcomeResult::Skipped(Skip::NoMechanism),
            Claimed::NotFilled => OutcomeResult::Skipped(Skip::NotResident),
            Claimed::Aside | Claimed::InPlace | Claimed::InParts(_) => OutcomeResult::Refused(Refusal::Busy),
        }
    }
}

impl Claims {
    /// Claims a window against the moving of its giant: its pages may be moved, exchanged, split or given back while
    /// the claim exists. Another caller may claim it too; see the module.
    ///
    /// # Errors
    /// [`Claimed::UnderWay`] and [`Claimed::OnGiantPage`].
    pub fn window(self: &Arc<Self>, window: WindowIndex) -> Result<PartClaim, Claimed> {
        self.claim_window(window, None)
    }

    /// Claims a window like [`Claims::window`], and keeps its pages in place while the claim exists: they may be given
    /// back.
    ///
    /// # Errors
    /// The same, and [`Claimed::Aside`].
    pub fn window_in_place(self: &Arc<Self>, window: WindowIndex) -> Result<PartClaim, Claimed> {
        self.claim_window(window, Some(WindowUse::InPlace))
    }

    /// Claims a window like [`Claims::window`], to take its pages out of the guest's reach while the claim exists.
    ///
    /// # Errors
    /// The same, and [`Claimed::InPlace`].
    pub fn window_aside(self: &Arc<Self>, window: WindowIndex) -> Result<PartClaim, Claimed> {
        self.claim_window(window, Some(WindowUse::Aside))
    }

    fn claim_window(self: &Arc<Self>, window: WindowIndex, of: Option<WindowUse>) -> Result<PartClaim, Claimed> {
        let mut giants = self.giants();
        let giant = giants.entry(giant_of(window)).or_default();
        match giant {
            Giant { is_under_way: true, .. } => return Err(Claimed::UnderWay),
            Giant { page: Some(_), .. } => return Err(Claimed::OnGiantPage),
            _ if giant.is_unfilled(window) => return Err(Claimed::NotFilled),
            _ => {}
        }
        if let Some(of) = of {
            let claimants = giant.windows.entry(window).or_insert(Claimants { of, count: 0 });
            match (claimants.of, of) {
                (WindowUse::Aside, WindowUse::InPlace) => return Err(Claimed::Aside),
                (WindowUse::InPlace, WindowUse::Aside) => return Err(Claimed::InPlace),
                _ => claimants.count += 1,
            }
        }
        giant.parts += 1;
        let used = of.map(|_| window);
        Ok(PartClaim { claims: Arc::clone(self), giants: vec![giant_of(window)], used })
    }

    /// Claims the dirty log of a memslot, which may cover several giants: it may be switched and fetched while
    /// the claim exists.
    ///
    /// # Errors
    /// [`Claimed::UnderWay`] during such a move.
    pub fn dirty_log(self: &Arc<Self>, slot: GpaRange) -> Result<PartClaim, Claimed> {
        let mut giants = self.giants();
        let first = slot.start().align_down(PageSize::Giant1G);
        let covered: Vec<Gpa> =
            (0..(slot.end() - first).get().div_ceil(GIANT.get())).map(|i| first + GIANT * i).collect();
        if covered.iter().any(|giant| giants.get(giant).is_some_and(|giant| giant.is_under_way)) {
            return Err(Claimed::UnderWay);
        }
        covered.iter().for_each(|giant| giants.entry(*giant).or_default().parts += 1);
        Ok(PartClaim { claims: Arc::clone(self), giants: covered, used: None })
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
            _ if state.has_unfilled() => Err(Claimed::NotFilled),
            _ => {
                state.is_under_way = true;
                Ok(GiantClaim { claims: Arc::clone(self), giant })
            }
        }
    }

    /// Keeps every user away from windows that a restore will fill, until [`Claims::filled`].
    pub(crate) fn begin_filling(&self, windows: impl IntoIterator<Item = WindowIndex>) {
        let mut giants = self.giants();
        for windows in windows.into_iter().collect::<Vec<_>>().chunk_by(|a, b| giant_of(*a) == giant_of(*b)) {
            let unfilled = &mut giants.entry(giant_of(windows[0])).or_default().unfilled;
            for (word, bit) in windows.iter().map(|window| place_in_giant(*window)) {
                unfilled[word] |= bit;
            }
        }
    }

    /// The window has its contents, or the restore has been abandoned: it may be claimed from now on.
    pub(crate) fn filled(&self, window: WindowIndex) {
        if let Some(giant) = self.giants().get_mut(&giant_of(window)) {
            let (word, bit) = place_in_giant(window);
            giant.unfilled[word] &= !bit;
        }
    }

    /// Whether windows wait for a restore to fill them.
    pub(crate) fn is_filling(&self) -> bool {
        self.giants().values().any(Giant::has_unfilled)
    }

    /// Whether a window is part of a giant that is being moved.
    pub fn is_under_way(&self, window: WindowIndex) -> bool {
        self.giants().get(&giant_of(window)).is_some_and(|giant| giant.is_under_way)
    }

    /// Whether a window is part of a giant page, also while that is moved back.
    pub fn is_on_giant_page(&self, window: WindowIndex) -> bool {
        self.giants().get(&giant_of(window)).is_some_and(|giant| giant.page.is_some())
    }

    /// Number of claims on windows and logs now. While the manager rests and devices are stopped, each belongs to a
    /// window with pages that are aside and cannot be brought back yet ([`crate::detached`]).
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

    /// Corrects a window's backing from the page tables, which distinguish huge from small, but not 2 MiB from 1 GiB.
    pub fn known(&self, seen: WindowBacking) -> WindowBacking {
        let is_giant = seen.backing.is_large() && self.is_on_giant_page(seen.window);
        WindowBacking { backing: if is_giant { Backing::Giant1G } else { seen.backing }, ..seen }
    }

    /// Scans guest RAM's page tables, again if a giant was exchanged during the scan: it has no page for a moment.
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

    /// The memslots with a dirty log of a manager; locked against switching.
    pub(crate) fn own_logs(&self) -> MutexGuard<'_, BTreeSet<SlotId>> {
        // Every change is complete in itself, so the set is consistent after a panic elsewhere.
        self.own_logs.lock()
    }

    fn giants(&self) -> MutexGuard<'_, BTreeMap<Gpa, Giant>> {
        // Every change is one assignment, so the table is consistent after a panic elsewhere.
        self.giants.lock()
    }
}

impl Giant {
    fn is_unfilled(&self, window: WindowIndex) -> bool {
        let (word, bit) = place_in_giant(window);
        self.unfilled[word] & bit != 0
    }

    fn has_unfilled(&self) -> bool {
        self.unfilled != [0; WORDS_OF_WINDOWS]
    }
}

/// Word and bit of a window in the sets of its giant.
fn place_in_giant(window: WindowIndex) -> (usize, u64) {
    let number = (window.start() - giant_of(window)).pages(PageSize::Huge2M);
    (number as usize / 64, 1 << (number % 64))
}

fn giant_of(window: WindowIndex) -> Gpa {
    window.start().align_down(PageSize::Giant1G)
}

/// A claim on a window, or on a slot's dirty log. It ends on drop.
#[derive(Debug)]
#[must_use = "a claim lasts as long as its guard"]
pub struct PartClaim {
    claims: Arc<Claims>,
    giants: Vec<Gpa>,
    /// Window that it claims for one of the two uses.
    used: Option<WindowIndex>,
}

impl Drop for PartClaim {
    fn drop(&mut self) {
        let mut giants = self.claims.giants();
        for giant in &self.giants {
            giants.entry(*giant).or_default().parts -= 1;
        }
        let Some(window) = self.used else { return };
        let windows = &mut giants.entry(giant_of(window)).or_default().windows;
        if let Some(claimants) = windows.get_mut(&window) {
            claimants.count -= 1;
            if claimants.count == 0 {
                windows.remove(&window);
            }
        }
    }
}

/// A claim on a giant. It ends on drop, but stays after a panic, since the state of the move is then unknown.
#[derive(Debug)]
#[must_use = "a claim lasts as long as its guard"]
pub struct GiantClaim {
    claims: Arc<Claims>,
    giant: Gpa,
}

impl GiantClaim {
    /// First guest-physical address of the giant.
    pub fn giant(&self) -> Gpa {
        self.giant
    }

    /// Whether it is a claim on the RAM that has these claims.
    pub(crate) fn is_of(&self, claims: &Arc<Claims>) -> bool {
        Arc::ptr_eq(&self.claims, claims)
    }

    /// Runs an exchange of the giant's mapping, which a scan must not take for a hole. It must not panic: the
    /// exchange would then never count as ended.
    pub(crate) fn exchanging<T>(&self, exchange: impl FnOnce() -> T) -> T {
        self.claims.exchanges_begun.fetch_add(1, Ordering::SeqCst);
        let result = exchange();
        self.claims.exchanges_ended.fetch_add(1, Ordering::SeqCst);
        result
    }

    /// The giant page it is on, if any.
    pub(crate) fn page(&self) -> Option<Arc<GiantPage>> {
        self.claims.giants().get(&self.giant)?.page.clone()
    }

    /// Records that it is on this page now, or on none.
    pub(crate) fn moved_to(&self, page: Option<Arc<GiantPage>>) {
        self.claims.giants().entry(self.giant).or_default().page = page;
    }

    /// Keeps the claim for ever: the guest is stopped, and its memory stays as it is.
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
    fn a_giant_on_the_move_excludes_only_its_own_windows_and_logs() {
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
    fn a_window_aside_and_a_window_in_place_exclude_each_other() {
        let claims = claims();
        let aside = claims.window_aside(IN_FIRST).expect("free");
        assert_eq!(claims.window_in_place(IN_FIRST).expect_err("its pages are aside"), Claimed::Aside);
        let beside = claims.window_in_place(IN_SECOND).expect("another window");
        let other_work = claims.window(IN_FIRST).expect("neither of the two uses");
        drop(aside);
        let in_place = [0, 1].map(|_| claims.window_in_place(IN_FIRST).expect("no page is aside any more"));
        assert_eq!(claims.window_aside(IN_FIRST).expect_err("pages are given back"), Claimed::InPlace);
        let [first, second] = in_place;
        drop(first);
        assert_eq!(claims.window_aside(IN_FIRST).expect_err("one claim is left"), Claimed::InPlace);
        assert_eq!(claims.parts_in_work(), 3);
        drop((second, beside, other_work));
        assert!(claims.window_aside(IN_FIRST).is_ok() && claims.parts_in_work() == 0);
    }

    #[test]
    fn windows_that_a_restore_has_not_filled_are_refused_to_all_users_and_so_is_their_giant() {
        let claims = claims();
        claims.begin_filling([IN_FIRST, IN_SECOND]);
        assert!(claims.is_filling());
        let uses = [Claims::window, Claims::window_in_place, Claims::window_aside];
        for of in uses {
            assert_eq!(of(&claims, IN_FIRST).expect_err("it has no contents"), Claimed::NotFilled);
            assert!(of(&claims, WindowIndex::new(5)).is_ok(), "its neighbours have theirs");
        }
        assert_eq!(claims.giant(FIRST).expect_err("a part of it"), Claimed::NotFilled);
        assert_eq!(Claimed::NotFilled.result(), OutcomeResult::Skipped(Skip::NotResident));
        claims.filled(IN_FIRST);
        assert!(claims.window(IN_FIRST).is_ok() && claims.giant(FIRST).is_ok());
        assert_eq!(claims.window(IN_SECOND).expect_err("not yet"), Claimed::NotFilled);
        claims.filled(IN_SECOND);
        assert!(!claims.is_filling());
    }

    #[test]
    fn two_threads_never_have_a_window_aside_and_in_place_at_the_same_time() {
        const ROUNDS: u32 = 20_000;
        let claims = claims();
        let has = [AtomicU64::new(0), AtomicU64::new(0)];
        let work = |mine: usize| {
            for _ in 0..ROUNDS {
                let claimed = if mine == 0 { claims.window_aside(IN_FIRST) } else { claims.window_in_place(IN_FIRST) };
                let Ok(_claim) = claimed else { continue };
                has[mine].store(1, Ordering::SeqCst);
                assert_eq!(has[1 - mine].load(Ordering::SeqCst), 0, "the other use goes on");
                has[mine].store(0, Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| work(0));
            scope.spawn(|| work(1));
        });
    }

    #[test]
    fn a_giant_is_not_moved_while_a_part_of_it_is_claimed() {
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
        let page = GiantPage::of_pool(GiantFile::of_ordinary_memory().expect("it takes no memory yet"));
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
    fn after_a_panic_of_its_mover_a_giant_stays_claimed() {
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
    fn a_scan_during_an_exchange_is_repeated() {
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
        assert_eq!(giant.exchanging(|| claims.steadily(|| looks.replace(0))), 0, "and does not repeat for ever");
    }
}
