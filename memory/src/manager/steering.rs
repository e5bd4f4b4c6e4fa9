//! Commands to a running loop: whether to act, within which limits, and at which price of huge pages. Read at each tick
//! and before each action.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
use wideleaf_policies::market::{ALLOWED_FOR, Allowances};
use wideleaf_policies::{BudgetLimits, HugePagePrice, Moment};

use super::{ManagedVm, OutOfReach};
use crate::gate::{GateState, LeftAlone};

/// Commands of the loop's users; see the module.
#[derive(Debug, Default)]
pub(super) struct Steering {
    is_paused: AtomicBool,
    /// Whether another process makes free blocks for the whole host.
    is_supplied: AtomicBool,
    /// Number of free huge pages that no tick knows of yet.
    promised: AtomicU64,
    /// New limits that the loop has not taken over yet.
    limits: Mutex<Option<BudgetLimits>>,
    /// New part of the time out of reach that the loop has not taken over yet.
    out_of_reach: Mutex<Option<OutOfReach>>,
    price: Mutex<Price>,
    /// Shared by collapses that unmap a window meanwhile, exclusive for callers that need every window in its place.
    collapses: RwLock<()>,
}

/// Price of huge pages on the whole host.
#[derive(Debug, Default)]
struct Price {
    /// The price; `None`: the policy finds its own.
    now: Option<HugePagePrice>,
    /// Allowance that no tick has seen yet.
    new: u64,
    /// Allowances that earlier ticks have seen.
    seen: Allowances,
}

impl Steering {
    pub fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }

    pub fn set_supplied(&self, is_supplied: bool) {
        self.is_supplied.store(is_supplied, Ordering::Relaxed);
    }

    pub fn promise(&self, pages: u64) {
        self.promised.fetch_add(pages, Ordering::Relaxed);
    }

    /// Whether there is a promise that no tick knows of yet.
    pub fn has_promise(&self) -> bool {
        self.promised.load(Ordering::Relaxed) > 0
    }

    /// Takes the promised pages, once.
    pub fn take_promised(&self) -> u64 {
        self.promised.swap(0, Ordering::Relaxed)
    }

    pub fn is_supplied(&self) -> bool {
        self.is_supplied.load(Ordering::Relaxed)
    }

    pub fn set_limits(&self, limits: BudgetLimits) {
        *self.limits.lock() = Some(limits);
    }

    /// Takes the new limits, once.
    pub fn take_limits(&self) -> Option<BudgetLimits> {
        self.limits.lock().take()
    }

    pub fn set_out_of_reach(&self, part: OutOfReach) {
        *self.out_of_reach.lock() = Some(part);
    }

    /// Takes the new part, once.
    pub fn take_out_of_reach(&self) -> Option<OutOfReach> {
        self.out_of_reach.lock().take()
    }

    /// Sets the price. Its allowance adds to earlier ones, which end with the price.
    pub fn set_price(&self, now: Option<HugePagePrice>) {
        let mut price = self.lock_price();
        price.now = now;
        match now {
            Some(HugePagePrice { cycles_per_s, may_vacate, .. }) if cycles_per_s > 0 || may_vacate > 0 => {
                price.new = price.new.saturating_add(may_vacate);
            }
            _ => (price.new, price.seen) = (0, Allowances::default()),
        }
    }

    /// Price for the tick of this moment, with all that is left of the allowances.
    pub fn take_price(&self, moment: Moment) -> Option<HugePagePrice> {
        let mut price = self.lock_price();
        let (now, new) = (moment.since_start(), std::mem::take(&mut price.new));
        price.seen.add(now, new);
        let may_vacate = price.seen.pages(now, ALLOWED_FOR);
        price.now.map(|price| HugePagePrice { may_vacate, ..price })
    }

    /// Whether windows may give their huge pages back since the latest tick.
    pub fn has_new_allowance(&self) -> bool {
        self.lock_price().new > 0
    }

    /// Counts a window that gave its huge page back for another VM.
    pub fn vacated(&self) {
        self.lock_price().seen.take(1);
    }

    fn lock_price(&self) -> MutexGuard<'_, Price> {
        self.price.lock()
    }

    /// Calls `collapse` while no caller needs every window in its place. Several threads may collapse at the same time.
    pub fn unseen<T>(&self, collapse: impl FnOnce() -> T) -> T {
        let _turn = self.collapses.read();
        collapse()
    }

    /// While the returned value exists, no window is unmapped for its collapse.
    pub fn in_place(&self) -> RwLockWriteGuard<'_, ()> {
        self.collapses.write()
    }

    /// Whether a VM may be acted on now: its gate's state, or closed while the manager is paused.
    pub fn gate_state(&self, vm: &ManagedVm) -> GateState {
        match vm.gate.as_ref().map_or(GateState::Open, |gate| gate.state()) {
            GateState::Open if self.is_paused.load(Ordering::Relaxed) => GateState::Closed(LeftAlone::Asked),
            state => state,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: Moment = Moment::START;

    #[test]
    fn an_allowance_is_new_until_a_tick_and_shrinks_with_each_window_that_was_vacated() {
        let steering = Steering::default();
        steering.vacated();
        assert_eq!((steering.take_price(NOW), steering.has_new_allowance()), (None, false));
        let price = |may_vacate| HugePagePrice { cycles_per_s: 9, may_vacate, free: Some(3) };
        steering.set_price(Some(price(1)));
        assert!(steering.has_new_allowance());
        assert_eq!((steering.take_price(NOW), steering.has_new_allowance()), (Some(price(1)), false));
        (0..2).for_each(|_| steering.vacated());
        assert_eq!(steering.take_price(NOW), Some(price(0)));
        steering.set_price(Some(price(0)));
        assert!(!steering.has_new_allowance(), "a price alone brings no tick forward");
    }

    #[test]
    fn allowances_add_up_until_there_is_no_price() {
        let steering = Steering::default();
        let price = |cycles_per_s, may_vacate| Some(HugePagePrice { cycles_per_s, may_vacate, free: None });
        let mut left = |now| {
            steering.set_price(now);
            steering.take_price(NOW).map(|price| price.may_vacate)
        };
        assert_eq!([price(9, 5), price(8, 0), price(8, 3), price(7, 0)].map(&mut left), [5, 5, 8, 8].map(Some));
        assert_eq!([price(0, 0), price(7, 0)].map(&mut left), [0, 0].map(Some));
        assert_eq!([price(7, 2), None, price(7, 0)].map(left), [Some(2), None, Some(0)]);
    }

    #[test]
    fn each_allowance_ends_some_time_after_the_tick_that_saw_it() {
        let steering = Steering::default();
        let price = |may_vacate| Some(HugePagePrice { cycles_per_s: 9, may_vacate, free: None });
        let left_after = |ms: u64| {
            let moment = NOW + Duration::from_millis(ms);
            steering.take_price(moment).map_or(0, |price| price.may_vacate)
        };
        steering.set_price(price(5));
        assert_eq!(left_after(1_000), 5);
        steering.set_price(price(2));
        assert_eq!([left_after(3_000), left_after(3_999), left_after(4_000), left_after(6_000)], [7, 7, 2, 0]);
    }
}
