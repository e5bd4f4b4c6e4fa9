//! What `auto` does while huge pages are short: it bids, obeys the price, and lets cold windows give theirs back.
//!
//! ```text
//!   hot, on base pages, pays for promotion and for a window that gives its page back ──▶ wants one ─┐
//!   large and idle at the latest samples ──────────────────────────────────────────────▶ holds one ─┤ bids
//!                                                                                                   ▼
//!   price: from outside, for all VMs of the host; or else of these bids and the free pages ◀── clearing_price
//!     │
//!     ├─▶ promoted: only by proof, and only what saves at least the price
//!     └─▶ vacated: as many as the price allows, the coldest first, each worth at most half of the price
//!
//!   plan:  Vacate(cold)  Promote(hot)  Vacate(cold)  Promote(hot)  …  Vacate(cold): for another VM
//! ```
//!
//! While there are plenty of huge pages, the market is closed and changes no plan. A window that gave its page back
//! gets another one only by proof of heat, never because it is full: no window goes to and fro.

use core::ops::ControlFlow;

use alloc::vec::Vec;

use super::audit::Kind;
use super::{Auto, Judge, Memory};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::{Place, is_demotable, is_promotable, missing};
use crate::expectations::Expectations;
use crate::market::{Bidder, Bids, HYSTERESIS, HugePagePrice, bid, clearing_price};
use crate::rank::{BUCKETS, Ranking, bucket_of};
use crate::snapshot::{AccessHistory, Backing, HugePages, Snapshot, VmId, VmSnapshot};
use crate::units::Moment;
use crate::window_memory::WindowMemory;

/// Number of newest samples without a touch after which a large window may give its huge page back. Fewer than for a
/// release of zero pages: a wrong decision costs two moves, and the window comes back as soon as it is proven hot. More
/// than for a cold window that is only not promoted.
const GIVES_AFTER_SAMPLES: u8 = 4;

/// The market as `auto` knows it since its latest plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Market {
    is_open: bool,
    bids: Bids,
    price: HugePagePrice,
    /// Windows that could give their page back, the coldest best.
    cold: Ranking,
    /// VMs of which no window can be vacated.
    immovable: Vec<VmId>,
}

impl Market {
    /// Price in cycles per second.
    pub fn price(&self) -> u64 {
        self.price.cycles_per_s
    }

    /// Whether a huge page has a price now.
    pub fn has_price(&self) -> bool {
        self.price() > 0
    }

    /// Whether a window that saves `per_s` cycles per second may have a huge page.
    pub fn serves(&self, per_s: u64) -> bool {
        bid(per_s) >= self.price()
    }

    /// Bids as of the latest plan; `None` while the market is closed.
    pub fn bids(&self) -> Option<&Bids> {
        self.is_open.then_some(&self.bids)
    }

    /// Whether the window may turn out to be cold, and a buyer would pay for its huge page.
    pub fn hurries(&self, vm: &VmSnapshot, row: usize) -> bool {
        let access = vm.access[row];
        let may_be_cold = access.was_touched() != Some(true) && !is_idle_of_late(access);
        self.has_price() && may_be_cold && vm.backing[row] == Backing::Huge2M && !self.immovable.contains(&vm.vm)
    }

    /// Notes that this VM's memory cannot be moved to base pages.
    pub fn cannot_vacate(&mut self, vm: VmId) {
        if !self.immovable.contains(&vm) {
            self.immovable.push(vm);
        }
    }

    fn close(&mut self) {
        if self.is_open {
            (self.is_open, self.price) = (false, HugePagePrice::default());
            self.bids.clear();
            self.cold.clear();
        }
    }

    fn hold(&mut self, per_s: u64, place: Place) {
        self.bids.hold(per_s);
        self.cold.push(BUCKETS as u16 - 1 - bucket_of(per_s), place);
    }

    /// Price of these bids alone: the policy knows of no other VM.
    fn clear_alone(&self, free: u64) -> HugePagePrice {
        let all = Bidder { bids: &self.bids, weight: 1, spare: u64::MAX };
        clearing_price(&[all], free).of_vms[0]
    }
}

impl Auto {
    /// Bids, and finds the price. Nothing while there are plenty of huge pages.
    pub(super) fn go_to_market(&mut self, snapshot: &Snapshot, now: Moment, is_short: bool) {
        self.market.close();
        let huge_pages = snapshot.host.map_or(HugePages::Plenty, |host| host.huge_pages);
        if huge_pages == HugePages::Plenty {
            return;
        }
        self.market.is_open = true;
        self.bid(snapshot, now, is_short);
        self.market.price = match huge_pages {
            HugePages::Plenty => HugePagePrice::default(),
            HugePages::Scarce { free } => self.market.clear_alone(free),
            HugePages::Priced(price) => price,
        };
    }

    fn bid(&mut self, snapshot: &Snapshot, now: Moment, is_short: bool) {
        let judge = self.judge(now);
        let Auto { prices, expectations, memory, market, turns, audit, .. } = self;
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let gains_nothing = || audit.is_stopped(place.vm as usize, Kind::of(vm, row));
            let window = memory.of_vm(place.vm as usize)[row];
            let is_released = || is_short && prices.pays_to_release(expectations, vm, row);
            if is_cold(vm, row, now) && !market.immovable.contains(&vm.vm) && !is_released() {
                market.hold(value_of_large(&judge, window, vm, row), place);
            } else if !(is_short && missing(vm, row) > 0)
                && let Some(per_s) = wants(&judge, window, vm, row)
                && !gains_nothing()
            {
                market.bids.want(per_s);
            }
            ControlFlow::Continue(())
        });
    }

    /// The windows that are to give their huge page back now, the coldest first.
    pub(super) fn coldest(&mut self, snapshot: &Snapshot) -> Vec<Place> {
        let HugePagePrice { cycles_per_s: price, may_vacate } = self.market.price;
        if may_vacate == 0 {
            return Vec::new();
        }
        let judge = self.judge(self.planned_at);
        let most = usize::try_from(may_vacate).unwrap_or(usize::MAX);
        let Auto { market, memory, .. } = self;
        let is_worth_little = |place: &Place| {
            let (vm, row) = place.of(snapshot);
            bid(value_of_large(&judge, memory.of_vm(place.vm as usize)[row], vm, row)) <= price / HYSTERESIS
        };
        market.cold.best_first().iter().copied().filter(is_worth_little).take(most).collect()
    }
}

/// Puts the request into the plan, and notes that the window gave its page back.
pub(super) fn vacate(
    place: Place,
    snapshot: &Snapshot,
    expectations: &Expectations,
    memory: &mut WindowMemory<Memory>,
    budget: &mut Budget,
    plan: &mut Plan,
) -> ControlFlow<()> {
    let (vm, row) = place.of(snapshot);
    let action = Action::Vacate { vm: vm.vm, window: vm.windows[row] };
    expectations.request(action, false, budget, plan)?;
    memory.of_vm(place.vm as usize)[row].was_vacated = true;
    ControlFlow::Continue(())
}

/// Whether the window is large, idle at its latest samples, and these are of the window itself.
fn is_cold(vm: &VmSnapshot, row: usize, now: Moment) -> bool {
    is_demotable(vm, row, now) && is_idle_of_late(vm.access[row]) && vm.access_quality[row].is_of_this_window()
}

fn is_idle_of_late(access: AccessHistory) -> bool {
    access.idle_samples() >= GIVES_AFTER_SAMPLES
}

/// Cycles per second that a large window saves.
fn value_of_large(judge: &Judge, window: Memory, vm: &VmSnapshot, row: usize) -> u64 {
    let used = if window.resident_before > 0 { window.resident_before } else { vm.resident[row] };
    judge.prices.benefit_per_s(vm.access[row], used, vm.guest_mapping[row])
}

/// Cycles per second that a window would save, if it is proven that they also pay for a window that gives its huge
/// page back.
fn wants(judge: &Judge, window: Memory, vm: &VmSnapshot, row: usize) -> Option<u64> {
    let hot_since = window.hot_since?;
    if !is_promotable(vm, row, judge.now) || vm.backing[row].is_large() {
        return None;
    }
    let per_s = judge.net_per_s(vm, row)?;
    judge.sufficient_percent(per_s, hot_since, judge.copy + judge.vacate).map(|_| per_s)
}
