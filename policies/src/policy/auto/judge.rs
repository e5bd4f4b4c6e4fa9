//! Benefit against cost: whether a window is worth its huge page, in cycles.

use core::time::Duration;

use super::memory::Memory;
use crate::bucket::bucket_of;
use crate::budget::Cost;
use crate::candidates::missing;
use crate::parameter_table::Parameters;
use crate::snapshot::{AccessHistory, GuestMapping, VmSnapshot};
use crate::units::{Moment, PageSize};
use crate::walk::cost::WalkCost;
use crate::walk::share::AssumedMisses;

/// Highest return in percent of a window without proof: in a bucket below that of the smallest return that
/// `hysteresis` allows.
const BLIND_MAX: u64 = 95;
const _: () = assert!(bucket_of(BLIND_MAX) < bucket_of(100), "proven windows come first");

/// Values used to compare benefit and cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prices {
    walk: WalkCost,
    /// Cycles saved per miss with a huge page, by the guest's mapping: each plan needs them for each window.
    saved_per_miss: [u64; GuestMapping::ALL.len()],
    pub misses: AssumedMisses,
    pub horizon_ms: u64,
    pub bloat_price: u64,
    pub hysteresis_percent: u64,
}

/// Cycles of this number of milliseconds. A plan asks for each window, and a `Duration` would cost a division each.
pub(super) fn cycles_over_ms(per_second: u64, ms: u64) -> u64 {
    per_second.saturating_mul(ms) / 1000
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1000).saturating_add(u64::from(time.subsec_millis()))
}

impl Prices {
    /// Prices of these parameters, with the prior of a walk's cost.
    pub fn new(parameters: &Parameters) -> Prices {
        let prices = Prices {
            walk: WalkCost::PRIOR,
            saved_per_miss: [0; _],
            misses: AssumedMisses { most: parameters.number("misses_max"), per_s: parameters.number("misses_per_s") },
            horizon_ms: parameters.number("horizon_s") * 1000,
            bloat_price: parameters.number("bloat_price"),
            hysteresis_percent: parameters.number("hysteresis"),
        };
        prices.with_walk(WalkCost::PRIOR)
    }

    /// The same with this cost of a walk.
    #[must_use]
    pub fn with_walk(self, walk: WalkCost) -> Prices {
        let saved_per_miss = GuestMapping::ALL.map(|guest| walk.saved_per_miss(guest, PageSize::Huge2M));
        Prices { walk, saved_per_miss, ..self }
    }

    /// Cost of a walk.
    pub fn walk(&self) -> &WalkCost {
        &self.walk
    }

    /// Cycles saved per miss with a huge page.
    pub fn saved_per_miss(&self, guest: GuestMapping) -> u64 {
        self.saved_per_miss[guest as usize]
    }

    /// Cost in cycles, at least one, because it is a divisor.
    pub fn cycles(&self, cost: Cost) -> u64 {
        let microseconds = u64::try_from(cost.cpu.as_micros()).unwrap_or(u64::MAX);
        microseconds.saturating_mul(self.walk.per_microsecond()).max(1)
    }

    pub fn benefit_per_s(&self, access: AccessHistory, present: u16, guest: GuestMapping) -> u64 {
        self.misses.per_s(access, present) * self.saved_per_miss(guest)
    }

    /// The bucket of a window without proof: nearly full windows that the guest may be using, the aligned ones
    /// first. These buckets lie below those of any required return.
    pub fn bucket_when_blind(&self, vm: &VmSnapshot, row: usize, resident_min: u16) -> Option<u16> {
        let saved = self.saved_per_miss(vm.guest_mapping[row]);
        (saved > 0 && vm.resident[row] >= resident_min.max(1)).then(|| bucket_of(saved.min(BLIND_MAX)))
    }

    /// Largest benefit of a window: that of a full one without proof.
    pub fn benefit_max_per_s(&self, guest: GuestMapping) -> u64 {
        self.misses.most * self.saved_per_miss(guest)
    }

    /// Cycles of a core in a second.
    pub fn core_per_s(&self) -> u64 {
        self.walk.per_microsecond() * 1_000_000
    }

    /// Whether a promotion of this window can save more than its bloat costs, however often the window is touched.
    pub fn may_pay_for_bloat(&self, vm: &VmSnapshot, row: usize) -> bool {
        let saved = self.misses.most_of(vm.resident[row]) * self.saved_per_miss(vm.guest_mapping[row]);
        saved > self.bloat_per_s(missing(vm, row))
    }

    pub fn bloat_per_s(&self, missing: u16) -> u64 {
        u64::from(missing) * self.bloat_price
    }

    /// Share of the cost, in cycles, that comes back within the horizon, in percent.
    pub fn return_percent(&self, per_second: u64, hot_for_ms: u64, cost: u64) -> u64 {
        let gain = cycles_over_ms(per_second, hot_for_ms.min(self.horizon_ms));
        gain.saturating_mul(100) / cost
    }
}

/// Costs in cycles, and the required return, as of one plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judge {
    pub prices: Prices,
    pub copy: u64,
    pub recovery: u64,
    pub vacate: u64,
    pub release: u64,
    pub split: u64,
    pub giant: u64,
    pub giant_back: u64,
    pub move_2m: u64,
    pub asked_percent: u64,
    pub now: Moment,
    /// The same in nanoseconds from the manager's start.
    pub now_ns: u64,
}

impl Judge {
    /// Cycles per second that a promotion saves beyond its bloat; `None` where the bloat costs more.
    pub fn net_per_s(&self, vm: &VmSnapshot, row: usize) -> Option<u64> {
        let benefit = self.prices.benefit_per_s(vm.access[row], vm.resident[row], vm.guest_mapping[row]);
        benefit.checked_sub(self.prices.bloat_per_s(missing(vm, row)))
    }

    /// Benefit of a window, if it is known to pay for its promotion. Counts a hot one that does not pay for its bloat.
    pub fn proof(&self, window: &Memory, vm: &VmSnapshot, row: usize, sparse: &mut u64) -> Option<Proof> {
        let hot_for_ms = self.hot_for_ms(window)?;
        let Some(per_s) = self.net_per_s(vm, row) else {
            *sparse += 1;
            return None;
        };
        let return_percent = self.prices.return_percent(per_s, hot_for_ms, self.cost(window, vm, row));
        (return_percent >= self.asked_percent).then_some(Proof { per_s, return_percent })
    }

    /// Whether a window with this benefit also pays for another one that gives its huge page back, by what its samples
    /// have seen.
    pub fn pays_for_vacate(&self, window: &Memory, vm: &VmSnapshot, row: usize, per_s: u64) -> bool {
        self.is_seen_to_pay((window, vm, row), per_s, self.copy(window).saturating_add(self.vacate))
    }

    /// Benefit of a window that pays by what its samples have seen; `None` if it does not.
    pub fn seen_per_s(&self, window: &Memory, vm: &VmSnapshot, row: usize) -> Option<u64> {
        let cost = self.cost(window, vm, row);
        self.net_per_s(vm, row).filter(|per_s| self.is_seen_to_pay((window, vm, row), *per_s, cost))
    }

    /// Whether a window pays this cost by the time from its first touch to its newest sample, if that saw one too. A
    /// page that others want must not go to a window that was hot seconds ago.
    fn is_seen_to_pay(&self, (window, vm, row): (&Memory, &VmSnapshot, usize), per_s: u64, cost: u64) -> bool {
        let age_ms = u64::from(vm.access_quality[row].age_s) * 1000;
        let hot_for_ms = self.hot_for_ms(window).filter(|_| vm.access[row].was_touched() == Some(true));
        hot_for_ms.is_some_and(|hot_for_ms| {
            let gain = cycles_over_ms(per_s, hot_for_ms.saturating_sub(age_ms).min(self.prices.horizon_ms));
            gain.saturating_mul(100) >= cost.saturating_mul(self.asked_percent)
        })
    }

    /// Time in milliseconds for which every sample of the window has seen a touch; `None` where it is not hot.
    pub fn hot_for_ms(&self, window: &Memory) -> Option<u64> {
        Some(self.now_ns.saturating_sub(window.hot_since_ns()?) / 1_000_000)
    }

    fn cost(&self, window: &Memory, vm: &VmSnapshot, row: usize) -> u64 {
        if vm.is_held[row] { self.recovery } else { self.copy(window) }
    }

    fn copy(&self, window: &Memory) -> u64 {
        self.copy.saturating_add(if window.was_split() { self.split } else { 0 })
    }
}

/// Benefit of a window that pays for its promotion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Proof {
    /// Cycles per second that the promotion saves beyond its bloat.
    pub per_s: u64,
    /// Share of the cost that comes back within the horizon, in percent.
    pub return_percent: u64,
}

/// Whether a window without proof may be in use. One with a touch in its latest sample is no worse than one without
/// samples. Nor is one that shares its result with many others.
pub(super) fn may_be_used(vm: &VmSnapshot, row: usize) -> bool {
    vm.access[row].was_touched().unwrap_or(true) || !vm.access_quality[row].is_of_this_window()
}
