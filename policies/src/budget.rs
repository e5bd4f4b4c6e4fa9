//! Limits on the manager's work: bytes copied per second and a share of one CPU, over all VMs of the host together.
//!
//! Each of the two has a bucket, which time fills and plans empty. A plan takes the cost that it *expects*. When
//! the action is done, the difference to its *actual* cost is settled, and an action that took longer than expected
//! leaves a debt that the next intervals pay. So the rates hold over time even if an estimate is wrong.
//!
//! ```text
//!   now ──▶ refill ──▶ [ copy ███████░░░ ]  ── try_take(estimate) ──▶ plan
//!                      [ cpu  ████░░░░░░ ]  ◀── settle(estimate, actual) ── outcome
//! ```

use core::time::Duration;

use crate::units::{Bytes, Moment, PerTenThousand};

/// Actual or expected cost of an action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Guest memory copied, in bytes.
    pub copied: Bytes,
    /// CPU time used, on one CPU.
    pub cpu: Duration,
}

/// The rates that a budget keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetLimits {
    /// Guest memory that may be copied per second.
    pub copy_per_second: Bytes,
    /// Share of one CPU that the manager's actions may use.
    pub cpu_share: PerTenThousand,
    /// Largest unused allowance kept for a burst, as time at full rate.
    pub burst: Duration,
}

impl Default for BudgetLimits {
    /// 2 GiB/s and half a CPU, with bursts of 250 ms: a gibibyte of RAM is promoted in well under two seconds, and
    /// a guest that shares the core keeps at least half of it. Collapse itself runs at about 3.5 GiB/s.
    fn default() -> BudgetLimits {
        BudgetLimits {
            copy_per_second: crate::units::gib(2),
            cpu_share: PerTenThousand::new(5_000),
            burst: Duration::from_millis(250),
        }
    }
}

/// The rate that ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetSpent {
    /// Bytes copied per second.
    Copy,
    /// Share of one CPU.
    Cpu,
}

/// The allowance that is left. It is signed: a debt is below zero.
#[derive(Clone, Debug)]
pub struct Budget {
    limits: BudgetLimits,
    copy_left: i128,
    cpu_left_ns: i128,
    refilled_at: Moment,
    refusals: u64,
}

const NANOS_PER_SECOND: u128 = 1_000_000_000;

impl Budget {
    /// Makes a budget that is full at `now`.
    pub fn new(limits: BudgetLimits, now: Moment) -> Budget {
        let mut budget = Budget { limits, copy_left: 0, cpu_left_ns: 0, refilled_at: now, refusals: 0 };
        budget.copy_left = budget.copy_burst();
        budget.cpu_left_ns = budget.cpu_burst_ns();
        budget
    }

    /// Rates that this budget keeps.
    pub fn limits(&self) -> BudgetLimits {
        self.limits
    }

    /// Changes the rates. Savings beyond a burst at the new rates are lost; a debt stays.
    pub fn set_limits(&mut self, limits: BudgetLimits) {
        self.limits = limits;
        self.copy_left = self.copy_left.min(self.copy_burst());
        self.cpu_left_ns = self.cpu_left_ns.min(self.cpu_burst_ns());
    }

    /// Adds what the time since the last call allows, up to one burst.
    pub fn refill(&mut self, now: Moment) {
        let elapsed = now.since(self.refilled_at);
        self.refilled_at = now;
        self.copy_left = (self.copy_left + self.copy_in(elapsed)).min(self.copy_burst());
        self.cpu_left_ns = (self.cpu_left_ns + self.cpu_ns_in(elapsed)).min(self.cpu_burst_ns());
    }

    /// Takes the whole `cost`, or nothing.
    ///
    /// # Errors
    /// The rate that does not allow the cost now.
    pub fn try_take(&mut self, cost: Cost) -> Result<(), BudgetSpent> {
        let (copied, cpu_ns) = (i128::from(cost.copied.get()), cost.cpu.as_nanos() as i128);
        let spent = if copied > self.copy_left.max(0) {
            BudgetSpent::Copy
        } else if cpu_ns > self.cpu_left_ns.max(0) {
            BudgetSpent::Cpu
        } else {
            self.copy_left -= copied;
            self.cpu_left_ns -= cpu_ns;
            return Ok(());
        };
        self.refusals += 1;
        Err(spent)
    }

    /// Takes `cost` as [`Budget::try_take`] does. A cost above a whole burst would never be granted, so it is
    /// borrowed: only while both allowances are full, so that there is one such action at a time, and the intervals
    /// after it pay the debt. This serves actions that cannot be divided: 1 GiB pages, and any action expected to
    /// take that long.
    ///
    /// # Errors
    /// The rate that does not allow the cost now.
    pub fn try_borrow(&mut self, cost: Cost) -> Result<(), BudgetSpent> {
        let is_full = self.copy_left == self.copy_burst() && self.cpu_left_ns == self.cpu_burst_ns();
        let has_rates = self.copy_burst() > 0 && self.cpu_burst_ns() > 0;
        if is_full && has_rates {
            self.settle(Cost::default(), cost);
            return Ok(());
        }
        self.try_take(cost)
    }

    /// Replaces an estimate that was taken by the action's actual cost. May leave a debt.
    pub fn settle(&mut self, estimate: Cost, actual: Cost) {
        self.copy_left += i128::from(estimate.copied.get()) - i128::from(actual.copied.get());
        self.cpu_left_ns += estimate.cpu.as_nanos() as i128 - actual.cpu.as_nanos() as i128;
    }

    /// Number of costs that were refused.
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    fn copy_in(&self, time: Duration) -> i128 {
        (u128::from(self.limits.copy_per_second.get()) * time.as_nanos() / NANOS_PER_SECOND) as i128
    }

    fn cpu_ns_in(&self, time: Duration) -> i128 {
        (u128::from(self.limits.cpu_share.get()) * time.as_nanos() / 10_000) as i128
    }

    fn copy_burst(&self) -> i128 {
        self.copy_in(self.limits.burst)
    }

    fn cpu_burst_ns(&self) -> i128 {
        self.cpu_ns_in(self.limits.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::mib;

    const LIMITS: BudgetLimits = BudgetLimits {
        copy_per_second: mib(100),
        cpu_share: PerTenThousand::new(1_000), // 100 ms of CPU per second
        burst: Duration::from_secs(1),
    };

    fn at(ms: u64) -> Moment {
        Moment::after_start(Duration::from_millis(ms))
    }

    fn cost(copied: Bytes, cpu_ms: u64) -> Cost {
        Cost { copied, cpu: Duration::from_millis(cpu_ms) }
    }

    #[test]
    fn savings_never_exceed_one_burst() {
        let mut budget = Budget::new(LIMITS, at(0));
        budget.refill(at(60_000));
        assert_eq!(budget.try_take(cost(mib(100), 0)), Ok(()));
        assert_eq!(budget.try_take(cost(Bytes::new(1), 0)), Err(BudgetSpent::Copy));
    }

    #[test]
    fn new_rates_hold_from_now_on_and_a_debt_stays() {
        let mut budget = Budget::new(LIMITS, at(0));
        budget.set_limits(BudgetLimits { copy_per_second: mib(10), ..LIMITS });
        assert_eq!(budget.try_take(cost(mib(11), 0)), Err(BudgetSpent::Copy));
        budget.settle(Cost::default(), cost(mib(30), 0)); // 10 MiB were saved up: 20 of debt
        budget.set_limits(LIMITS);
        budget.refill(at(200)); // 100 MiB a second again: 20 of them pay the debt
        assert_eq!(budget.try_take(cost(Bytes::new(1), 0)), Err(BudgetSpent::Copy));
    }

    #[test]
    fn each_rate_refuses_on_its_own() {
        let mut budget = Budget::new(LIMITS, at(0));
        assert_eq!(budget.try_take(cost(mib(1), 101)), Err(BudgetSpent::Cpu));
        assert_eq!(budget.try_take(cost(mib(101), 1)), Err(BudgetSpent::Copy));
        assert_eq!(budget.try_take(cost(mib(100), 100)), Ok(()));
        assert_eq!(budget.refusals(), 2);
    }

    #[test]
    fn a_cost_above_a_burst_is_borrowed_once_and_paid_back() {
        let mut budget = Budget::new(LIMITS, at(0));
        let giant = cost(mib(300), 10);
        assert_eq!(budget.try_borrow(giant), Ok(()));
        assert_eq!(budget.try_borrow(giant), Err(BudgetSpent::Copy));
        budget.refill(at(2_000)); // 100 MiB were there, 300 are taken, 200 come back: nothing is left
        assert_eq!(budget.try_take(cost(Bytes::new(1), 0)), Err(BudgetSpent::Copy));
        budget.refill(at(3_000));
        assert_eq!(budget.try_borrow(giant), Ok(()));
        let mut nothing = Budget::new(BudgetLimits { copy_per_second: Bytes::ZERO, ..LIMITS }, at(0));
        assert_eq!(nothing.try_borrow(giant), Err(BudgetSpent::Copy));
    }

    #[test]
    fn a_debt_is_paid_before_anything_new_is_granted() {
        let mut budget = Budget::new(LIMITS, at(0));
        let estimate = cost(mib(50), 50);
        assert_eq!(budget.try_take(estimate), Ok(()));
        budget.settle(estimate, cost(mib(50), 200)); // 50 ms were left, 150 more were used: 100 ms of debt
        budget.refill(at(1_000)); // +100 ms: the debt is gone, nothing is left
        assert_eq!(budget.try_take(cost(Bytes::ZERO, 1)), Err(BudgetSpent::Cpu));
        budget.refill(at(1_100));
        assert_eq!(budget.try_take(cost(Bytes::ZERO, 10)), Ok(()));
    }
}
