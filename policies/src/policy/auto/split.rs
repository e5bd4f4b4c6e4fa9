//! Which huge windows `auto` gives up while the host is short of memory, by the arithmetic of its promotions.
//!
//! ```text
//!   used       = 512 - zero pages
//!   gain/s     = zero pages × bloat_price
//!   lost/s     = benefit/s of the used pages on a huge page     (not measured for this window: the most possible)
//!
//!   idle at all samples:
//!     release when (gain/s - lost/s) × horizon  ≥  cost of a release × hysteresis
//!   in use:
//!     release when (gain/s - lost/s) × time for which the pages have stayed zero, at most the horizon
//!                                               ≥  (cost of a release + a copy) × hysteresis
//!
//!   idle at all samples, no zero pages worth a release:
//!     gain/s   = used pages × bloat_price / RECLAIM_PRICE_PART
//!     demote when (gain/s - lost/s) × horizon  ≥  (cost of a split + a copy) × hysteresis
//! ```
//!
//! A guest that fills a window takes its zero pages one fault at a time, so those of a window in use must have stayed
//! zero for as long as they need to pay.
//!
//! Where a window cannot be demoted alone, the first demotion shows it (`demotions.rs`), and is the only one.
//!
//! Both split the page; the actions differ in what is free afterwards. A release gives all zero pages back, on every
//! kernel that moves pages, and reads the window for that. A demotion frees nothing by itself where no page is zero.
//! But from then on the kernel sees the accesses of each base page and can reclaim cold ones, and a balloon or a free
//! page report gives back single ones. Zero pages are memory at once, so they come first, the best return first. Cold
//! windows follow, the longest cold first, and only as many as the kernel takes: while [`COLD_STOCK`] demoted windows
//! have all their pages, no further one is demoted. On a host without swap it ends there.
//!
//! A window that was given up is promoted again by proof only, and must then pay for its next split too. So one with a
//! benefit near the price of its zero pages stays as it is, large or small:
//!
//! ```text
//!   the busiest window of a guest, by used pages:   0 ── released ── 60   as it is   71 ── promoted ── 512
//! ```
//!
//! While huge pages have a price too, cold windows go to the market: a vacated window frees a whole huge page. Those of
//! a VM of which none can be vacated, as of an attached guest, are demoted all the same. So are those that no buyer has
//! wanted for ten seconds.

use core::ops::ControlFlow;

use alloc::vec::Vec;

use super::Auto;
use super::judge::{Judge, Prices, milliseconds};
use super::memory::{GivenUp, Memory, is_idle, used};
use crate::action::{Action, Plan};
use crate::bucket::bucket_of;
use crate::budget::Budget;
use crate::candidates::{Place, is_demotable};
use crate::demotions::Demotions;
use crate::outcome::{Outcome, OutcomeResult, Skip};
use crate::rank::Ranking;
use crate::snapshot::{Backing, Snapshot, VmId, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment, PageSize};

/// A page that the kernel can reclaim has this part of the price of a free one: it becomes free only if the kernel
/// finds it cold, and has swap. With an eighth, a window with 296 pages in use pays for its split and for a copy back
/// within the default horizon, and a smaller one does not.
const RECLAIM_PRICE_PART: u64 = 8;

/// Number of samples that a window must have before it is given up.
const SAMPLES_LEAST: u8 = 4;

/// Largest number of cold windows demoted in one plan: 3 ms of splits, so that a hot window that looks cold by a
/// fault of the sensor is one of few.
const COLD_IN_A_PLAN: usize = 16;

/// Number of demoted windows of which the kernel has taken no page, from which on no further one is demoted. They are
/// 128 MiB, more than a kernel reclaims between two plans.
const COLD_STOCK: usize = 64;

/// What `auto` knows about splits, and the candidates of a plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Splits {
    /// Windows with zero pages, the best return best.
    with_zeroes: Ranking,
    /// Windows without that are cold, the longest cold best.
    cold: Ranking,
    demotions: Demotions,
    /// VMs of which no mechanism splits a huge page.
    fixed: Vec<VmId>,
    /// Number of releases planned for windows in use.
    pub in_use: u64,
    /// Number of cold windows demoted.
    pub demoted: u64,
}

impl Splits {
    fn may_split(&self, vm: &VmSnapshot) -> bool {
        !self.fixed.contains(&vm.vm)
    }

    fn may_demote(&self, vm: &VmSnapshot) -> bool {
        self.may_split(vm) && self.demotions.may_demote(vm)
    }

    /// Looks at what the first demotions have done.
    pub fn observe(&mut self, snapshot: &Snapshot) {
        self.demotions.observe(snapshot);
    }

    /// Whether the demotion of this window held its whole memslot, so that it is taken back.
    pub fn is_taken_back(&self, vm: &VmSnapshot, row: usize) -> bool {
        vm.is_held[row] && self.demotions.held(vm) == Some(row)
    }

    /// Learns what the VM's RAM allows, and counts.
    pub fn learn(&mut self, outcome: &Outcome) {
        self.demotions.learn(outcome);
        let vm = outcome.action.vm();
        match (outcome.action, outcome.result) {
            (Action::Demote { to: PageSize::Base4K, .. }, OutcomeResult::Done) => self.demoted += 1,
            (
                Action::Release { .. } | Action::Demote { to: PageSize::Base4K, .. },
                OutcomeResult::Skipped(Skip::NoMechanism),
            ) if !self.fixed.contains(&vm) => self.fixed.push(vm),
            _ => {}
        }
    }

    /// Return of releasing the window's zero pages, in percent, if it suffices.
    pub fn of_release(&self, judge: &Judge, window: &Memory, vm: &VmSnapshot, row: usize) -> Option<u64> {
        let zero = vm.zero[row].filter(|zero| *zero > 0 && self.may_split(vm))?;
        if is_idle(vm.access[row]) {
            let offer = Offer { gain_per_s: judge.prices.bloat_per_s(zero), cost: judge.release };
            return judge.return_of_giving_up(vm, row, offer, judge.prices.horizon_ms);
        }
        let stayed = zero.min(window.zeroes);
        let offer = Offer { gain_per_s: judge.prices.bloat_per_s(stayed), cost: judge.release + judge.copy };
        judge.return_of_giving_up(vm, row, offer, milliseconds(window.zeroes_stayed(judge.now)))
    }

    /// Whether demoting the cold window pays.
    fn pays_to_demote(&self, judge: &Judge, vm: &VmSnapshot, row: usize) -> bool {
        let is_cold = is_idle(vm.access[row]) && vm.access_quality[row].is_of_this_window();
        let gain_per_s = judge.prices.bloat_per_s(used(vm, row)) / RECLAIM_PRICE_PART;
        let offer = Offer { gain_per_s, cost: judge.split + judge.copy };
        is_cold && self.may_demote(vm) && judge.return_of_giving_up(vm, row, offer, judge.prices.horizon_ms).is_some()
    }
}

impl Prices {
    /// Largest number of cycles per second that the huge page may save in this window: by its own samples, or where
    /// they do not measure it, as if it were the busiest.
    fn at_risk_per_s(&self, vm: &VmSnapshot, row: usize) -> u64 {
        let (access, guest) = (vm.access[row], vm.guest_mapping[row]);
        let is_measured = is_idle(access) || access.touches_per_s().is_some();
        if is_measured && vm.access_quality[row].is_of_this_window() {
            self.benefit_per_s(access, used(vm, row), guest)
        } else {
            let misses = self.misses.most * u64::from(used(vm, row)) / u64::from(BASE_PAGES_PER_WINDOW);
            misses * self.saved_per_miss(guest)
        }
    }
}

/// What is gained if a huge page is given up, and the cost of it in cycles.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// Worth of the memory in cycles per second.
    gain_per_s: u64,
    cost: u64,
}

impl Judge {
    /// Return of the cost in percent within this time, at most the horizon, if it suffices. Caution about promotions is
    /// none about their end.
    fn return_of_giving_up(&self, vm: &VmSnapshot, row: usize, offer: Offer, time_ms: u64) -> Option<u64> {
        if vm.access[row].samples() < SAMPLES_LEAST {
            return None;
        }
        let net = offer.gain_per_s.checked_sub(self.prices.at_risk_per_s(vm, row))?;
        let percent = self.prices.return_percent(net, time_ms, offer.cost);
        (percent >= self.prices.hysteresis_percent).then_some(percent)
    }
}

/// Whether the window was demoted, and the kernel has taken no page of it.
fn is_in_stock(window: &Memory, vm: &VmSnapshot, row: usize) -> bool {
    let is_whole = vm.resident[row] >= window.resident_after;
    window.given_up == GivenUp::Cold && vm.backing[row] == Backing::Base4K && is_whole
}

impl Auto {
    /// Gives up the huge windows with a memory that is worth more than their walks.
    pub(super) fn split(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let stock = self.rank_splits(snapshot, now);
        if self.release_best(snapshot, budget, plan).is_continue() {
            let most = COLD_STOCK.saturating_sub(stock).min(COLD_IN_A_PLAN);
            let _full_or_spent = self.demote_coldest(snapshot, most, budget, plan);
        }
    }

    /// Finds the candidates. Returns the number of demoted windows that the kernel has left as they are.
    fn rank_splits(&mut self, snapshot: &Snapshot, now: Moment) -> usize {
        let judge = self.judge(now);
        let Auto { splits, memory, turns, market, .. } = self;
        splits.with_zeroes.clear();
        splits.cold.clear();
        let mut stock = 0;
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let window = &memory.of_vm(place.vm as usize)[row];
            if !is_demotable(vm, row, now) {
                stock += usize::from(is_in_stock(window, vm, row));
            } else if let Some(percent) = splits.of_release(&judge, window, vm, row) {
                splits.with_zeroes.push(bucket_of(percent), place);
            } else if (!market.keeps_cold() || !market.may_vacate(vm.vm)) && splits.pays_to_demote(&judge, vm, row) {
                splits.cold.push(bucket_of(window.cold_for_s(now).into()), place);
            }
            ControlFlow::Continue(())
        });
        stock
    }

    fn release_best(&mut self, snapshot: &Snapshot, budget: &mut Budget, plan: &mut Plan) -> ControlFlow<()> {
        let Auto { splits, expectations, giving, .. } = self;
        for place in splits.with_zeroes.best_first() {
            let (vm, row) = place.of(snapshot);
            expectations.request(Action::Release { vm: vm.vm, window: vm.windows[row] }, false, budget, plan)?;
            splits.in_use += u64::from(!is_idle(vm.access[row]));
            giving.planned(vm, row, GivenUp::ZeroPages);
        }
        ControlFlow::Continue(())
    }

    fn demote_coldest(
        &mut self,
        snapshot: &Snapshot,
        most: usize,
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> ControlFlow<()> {
        let Auto { splits: Splits { cold, demotions, .. }, expectations, giving, .. } = self;
        let mut left = most;
        for place in cold.best_first() {
            if left == 0 {
                break;
            }
            let (vm, row) = place.of(snapshot);
            if demotions.request(vm, row, expectations, budget, plan)? {
                giving.planned(vm, row, GivenUp::Cold);
                left -= 1;
            }
        }
        ControlFlow::Continue(())
    }

    /// Requests the windows with a demotion that held their memslot.
    pub(super) fn take_back(&self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let _full_or_spent = self.splits.demotions.take_back(snapshot, now, &self.expectations, budget, plan);
    }

    /// Splits huge windows that several NUMA nodes share, where a window can be split alone.
    pub(super) fn split_shared(&mut self, shared: &[Place], snapshot: &Snapshot, budget: &mut Budget, plan: &mut Plan) {
        let Auto { splits, expectations, giving, nodes, .. } = self;
        let _full_or_spent = shared.iter().try_for_each(|place| {
            let (vm, row) = place.of(snapshot);
            if splits.may_split(vm) && splits.demotions.request(vm, row, expectations, budget, plan)? {
                giving.planned(vm, row, GivenUp::Shared);
                nodes.split += 1;
            }
            ControlFlow::Continue(())
        });
    }
}
