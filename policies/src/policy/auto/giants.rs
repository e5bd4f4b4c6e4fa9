//! When `auto` asks for a page of 1 GiB, and when it gives one back (parameter `giant`).
//!
//! ```text
//!   each window of the giant:  misses/s left on its huge page × cycles that a shorter walk saves      (walk/cost.rs)
//!   all of them                at most the part of one CPU's time that these walks could take
//!
//!   ask when   256 windows are hot,  and  (saved/s over the time that each has been hot, at most the horizon)
//!              - bloat  ≥  measured cost of the copy × hysteresis × caution
//!
//!     windows, 2 MiB each ──best return, a page free, nothing else to do──▶ giant ──┐
//!        ▲                                                                          │ idle at all samples, and another
//!        └── must pay for the way back too, from then on ◀── given back ◀───────────┘ lacks its page, or host short
//! ```
//!
//! A giant saves no misses unless the guest itself maps 1 GiB; walks get shorter by one level. Its entry in the nested
//! TLB and in the caches of the walk replaces 512 entries. A few hot windows keep theirs in those caches anyway, so
//! half of the windows must be hot. Under shadow paging nothing is saved, so nothing is asked for.
//!
//! A copy of 1 GiB takes as long as those of 512 windows, so it waits until the budget is full: all windows that pay
//! for 2 MiB come first. There is at most one in a plan, since giants are moved one at a time.
//!
//! A giant page of a pool goes back to the pool, so giving it back takes host memory. While the host is short, one
//! giant is given back if there is room for two, and the next one only if as much memory is available then as before.
//! Zero pages are not copied, so a giant with many of them brings memory, and so does a page that was made.

use core::ops::Range;

use alloc::vec::Vec;

use super::super::{WINDOWS_PER_GIANT, rows_of_giant};
use super::Auto;
use super::judge::{Judge, cycles_over_ms};
use super::memory::{Memory, is_idle};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::missing;
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::{Backing, HostMemory, Snapshot, VmId, VmSnapshot};
use crate::units::{Bytes, Moment, PageSize, WindowIndex};

/// Number of hot windows from which on a giant is worth a look: a half. With fewer, the entries of the huge pages stay
/// in the caches of the walk.
const HOT_WINDOWS_LEAST: usize = WINDOWS_PER_GIANT / 2;

/// Memory that must be available before a giant is given back while the host is short: its copy, and as much again.
const ROOM_TO_GIVE_BACK: Bytes = Bytes::new(2 * PageSize::Giant1G.bytes().get());

/// Giants as `auto` knows them.
#[derive(Clone, Debug, Default)]
pub(super) struct Giants {
    /// Whether giant pages may be asked for.
    pub may_ask: bool,
    /// First windows of the giants that were given back and not promoted since.
    returned: Vec<(VmId, WindowIndex)>,
    /// Memory that was available when a giant was last given back during this shortage.
    available_before: Option<Bytes>,
    /// Number of giants asked for.
    pub asked: u64,
    /// Number of giants that are or were on a giant page by this policy.
    pub promoted: u64,
    /// Number of giants moved back to huge pages.
    pub given_back: u64,
}

/// A giant that pays for its promotion.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    vm: VmId,
    first: WindowIndex,
    /// Return of the cost in percent.
    percent: u64,
}

impl Giants {
    /// No giant was asked for yet.
    pub fn new(may_ask: bool) -> Giants {
        Giants { may_ask, ..Giants::default() }
    }

    /// Counts outcomes, and forgets that a giant was given back once it is on a giant page again.
    pub fn learn(&mut self, outcome: &Outcome) {
        if outcome.result != OutcomeResult::Done {
            return;
        }
        let giant = (outcome.action.vm(), outcome.action.window());
        match outcome.action {
            Action::Promote { to: PageSize::Giant1G, .. } => {
                self.promoted += 1;
                self.returned.retain(|returned| *returned != giant);
            }
            Action::Demote { to: PageSize::Huge2M, .. } => {
                self.given_back += 1;
                self.returned.push(giant);
            }
            _ => {}
        }
    }

    /// Whether a giant that no guest uses may be given back, if no other giant lacks its page.
    fn has_room(&self, host: HostMemory, is_short: bool) -> bool {
        let has_gained = self.available_before.is_none_or(|before| host.available >= before);
        is_short && host.available >= ROOM_TO_GIVE_BACK && has_gained
    }
}

impl Judge {
    /// Return of a giant's promotion in percent, if it suffices.
    fn return_of_giant(&self, vm: &VmSnapshot, rows: Range<usize>, memory: &[Memory], cost: u64) -> Option<u64> {
        let (mut saved, mut spent_per_s, mut hot) = (0_u64, 0_u64, 0);
        for row in rows.clone().filter(|row| vm.backing[*row] == Backing::Huge2M) {
            let Some(hot_for_ms) = self.hot_for_ms(&memory[row]) else { continue };
            let (walk, guest) = (self.prices.walk(), vm.guest_mapping[row]);
            let misses = self.prices.misses.per_s(vm.access[row], memory[row].used(vm, row));
            let per_s = walk.saved_of(guest, PageSize::Huge2M, PageSize::Giant1G, misses);
            saved = saved.saturating_add(cycles_over_ms(per_s, hot_for_ms.min(self.prices.horizon_ms)));
            spent_per_s = spent_per_s.saturating_add(walk.spent_on(guest, PageSize::Huge2M, misses));
            hot += usize::from(per_s > 0);
        }
        let of_cpu = self.prices.core_per_s();
        let possible = |cycles: u64| match spent_per_s > of_cpu {
            true => (u128::from(cycles) * u128::from(of_cpu) / u128::from(spent_per_s)) as u64,
            false => cycles,
        };
        let bloat_per_s = rows.map(|row| self.prices.bloat_per_s(missing(vm, row))).sum::<u64>();
        let net = possible(saved).checked_sub(cycles_over_ms(bloat_per_s, self.prices.horizon_ms))?;
        let percent = net.saturating_mul(100) / cost;
        (hot >= HOT_WINDOWS_LEAST && percent >= self.asked_percent).then_some(percent)
    }
}

impl Auto {
    /// Asks for the giant that pays best, or gives one back that no guest uses.
    pub(super) fn move_giants(
        &mut self,
        snapshot: &Snapshot,
        now: Moment,
        is_short: bool,
        budget: &mut Budget,
        plan: &mut Plan,
    ) {
        let Some(host) = snapshot.host.filter(|_| self.giants.may_ask) else { return };
        if !is_short {
            self.giants.available_before = None;
        }
        let cold = find_giants(snapshot, |vm, rows| is_cold_giant(vm, rows, now)).next();
        // Where no page is free, a giant that wants one matters only if another could give it.
        let looks = !is_short && (host.giant_pages_free > 0 || cold.is_some());
        let best = if looks { self.best_giant(snapshot, now, cold.is_some(), host, plan) } else { None };
        match (best, cold) {
            (Some(best), _) if host.giant_pages_free > 0 => self.ask_for(best, budget, plan),
            (lacking, Some((index, rows))) if lacking.is_some() || self.giants.has_room(host, is_short) => {
                let available_before = is_short.then_some(host.available);
                self.give_back(snapshot, (index, rows), available_before, budget, plan);
            }
            _ => {}
        }
    }

    fn best_giant(
        &mut self,
        snapshot: &Snapshot,
        now: Moment,
        is_any_cold: bool,
        host: HostMemory,
        plan: &Plan,
    ) -> Option<Candidate> {
        let judge = self.judge(now);
        let Auto { memory, giants, .. } = self;
        let candidates =
            find_giants(snapshot, |vm, rows| may_be_giant(vm, rows.clone(), now) && !is_named(vm, rows, plan));
        let candidates = candidates.filter_map(|(index, rows)| {
            let vm = &snapshot.vms[index];
            let (id, first) = (vm.vm, vm.windows[rows.start]);
            // One that needs the page of another pays for that one's way back, and so does one that came back itself.
            let pays_for_return = giants.returned.contains(&(id, first)) || host.giant_pages_free == 0 && is_any_cold;
            let cost = judge.giant + if pays_for_return { judge.giant_back } else { 0 };
            let percent = judge.return_of_giant(vm, rows, memory.of_vm(index), cost)?;
            Some(Candidate { vm: id, first, percent })
        });
        // Of several with the same return the first.
        candidates.reduce(|best, next| if next.percent > best.percent { next } else { best })
    }

    fn ask_for(&mut self, best: Candidate, budget: &mut Budget, plan: &mut Plan) {
        let promote = Action::Promote { vm: best.vm, window: best.first, to: PageSize::Giant1G };
        self.giants.asked += u64::from(self.expectations.request(promote, false, budget, plan).is_continue());
    }

    /// Requests it. Its windows have to prove anew that they are hot. `available_before`: while the host is short.
    fn give_back(
        &mut self,
        snapshot: &Snapshot,
        (index, rows): (usize, Range<usize>),
        available_before: Option<Bytes>,
        budget: &mut Budget,
        plan: &mut Plan,
    ) {
        let vm = &snapshot.vms[index];
        let demote = Action::Demote { vm: vm.vm, window: vm.windows[rows.start], to: PageSize::Huge2M };
        if self.expectations.request(demote, false, budget, plan).is_continue() {
            self.memory.of_vm(index)[rows].iter_mut().for_each(Memory::forget_hot);
            self.giants.available_before = available_before;
        }
    }
}

/// The whole giants of all VMs with this property, as index of the VM and rows.
fn find_giants<'a>(
    snapshot: &'a Snapshot,
    has: impl Fn(&VmSnapshot, Range<usize>) -> bool + Copy + 'a,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    snapshot.vms.iter().enumerate().flat_map(move |(index, vm)| {
        let mut next = 0;
        let giants = core::iter::from_fn(move || {
            let rows = (next < vm.len()).then(|| rows_of_giant(vm, next))?;
            next = rows.end;
            Some(rows)
        });
        let is_whole = |rows: &Range<usize>| rows.len() == WINDOWS_PER_GIANT;
        giants.filter(is_whole).filter(move |rows| has(vm, rows.clone())).map(move |rows| (index, rows))
    })
}

/// Whether the rows of one giant may become one page. Some of them, also the first, may be empty.
fn may_be_giant(vm: &VmSnapshot, mut rows: Range<usize>, now: Moment) -> bool {
    let is_free = |row: usize| vm.ready_at[row] <= now && !vm.is_held[row] && !vm.is_given_back(row);
    let is_smaller = |row: usize| vm.backing[row] != Backing::Giant1G;
    rows.all(|row| is_smaller(row) && is_free(row))
}

/// Whether the rows are one giant page that the guest has not used at any sample, each of its windows.
fn is_cold_giant(vm: &VmSnapshot, mut rows: Range<usize>, now: Moment) -> bool {
    vm.backing[rows.start] == Backing::Giant1G
        && rows.all(|row| {
            let is_cold = is_idle(vm.access[row]) && vm.access_quality[row].is_of_this_window();
            vm.backing[row] == Backing::Giant1G && !vm.is_held[row] && vm.ready_at[row] <= now && is_cold
        })
}

/// Whether the plan has an action on one of these windows.
fn is_named(vm: &VmSnapshot, rows: Range<usize>, plan: &Plan) -> bool {
    let windows = vm.windows[rows.start]..=vm.windows[rows.end - 1];
    plan.actions().iter().any(|planned| planned.action.vm() == vm.vm && windows.contains(&planned.action.window()))
}
