//! One budget, many VMs: the share of each for the next second.
//!
//! ```text
//!   total ├────────────── busy VMs, by weight ──────────────┤─ idle VMs, by weight ─┤
//!         0                                              15/16                     1
//!   all are idle, or none is: one part for all
//! ```
//!
//! The unused part of idle VMs goes to those that have work. A reserve lets an idle VM begin at once, and it then
//! counts as busy from the next second on. All shares are rounded down, so their sum never exceeds the total.

use std::time::Duration;

use wideleaf_policies::units::mib;
use wideleaf_policies::{BudgetLimits, Bytes, PerTenThousand};

/// Input of one VM to the sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Weight of the VM, not zero.
    pub weight: u32,
    /// Whether it did something, or was refused something, in the last second.
    pub is_busy: bool,
    /// Upper bound on its copies, in bytes per second.
    pub copy_per_second_max: Option<Bytes>,
}

/// Inverse of the reserve for idle VMs while others are busy. At 2 GiB/s it is 128 MiB/s for all of them, more than
/// they need in the second until the next sharing to show that there is work.
const IDLE_PART: u64 = 16;

/// The most expensive single action, which every share must be able to pay for at some time: a window of shared
/// memory takes 15 to 30 ms and copies 2 MiB. Twice that, since an estimate may be wrong.
const ACTION_COPY: Bytes = mib(4);
const ACTION_CPU: Duration = Duration::from_millis(60);

/// Longest time to save up for one action. A share that takes longer is useless, and a debt of that length would
/// never be noticed.
const BURST_MAX: Duration = Duration::from_secs(60);

/// The shares in the order of `claims`. Their sum is at most `total`. A share is zero only if `total` has less than
/// one byte, or one ten thousandth of a core, for it.
pub fn parts(total: BudgetLimits, claims: &[Claim]) -> Vec<BudgetLimits> {
    let weights = |busy: bool| -> u64 {
        claims.iter().filter(|claim| claim.is_busy == busy).map(|claim| u64::from(claim.weight)).sum()
    };
    let (busy, idle) = (weights(true), weights(false));
    let for_idle = if busy == 0 { IDLE_PART } else { 1 };
    let for_busy = if idle == 0 { IDLE_PART } else { IDLE_PART - 1 };
    let part_of = |claim: &Claim| {
        let (sixteenths, all) = if claim.is_busy { (for_busy, busy) } else { (for_idle, idle) };
        Part { of: sixteenths * u64::from(claim.weight), parts: IDLE_PART * all }
    };
    claims.iter().map(|claim| limits(total, part_of(claim), claim.copy_per_second_max)).collect()
}

/// The share `of / parts` of the whole.
#[derive(Clone, Copy)]
struct Part {
    of: u64,
    parts: u64,
}

impl Part {
    fn take(self, whole: u64) -> u64 {
        (u128::from(whole) * u128::from(self.of) / u128::from(self.parts)) as u64
    }
}

fn limits(total: BudgetLimits, part: Part, copy_per_second_max: Option<Bytes>) -> BudgetLimits {
    let copy = Bytes::new(part.take(total.copy_per_second.get()));
    let copy_per_second = copy_per_second_max.map_or(copy, |max| copy.min(max));
    let cpu_share = PerTenThousand::new(part.take(u64::from(total.cpu_share.get())) as u32);
    BudgetLimits { copy_per_second, cpu_share, burst: burst(total.burst, copy_per_second, cpu_share) }
}

/// Time to save up a small share, so that it suffices for one action: a bucket smaller than the smallest action
/// would never be used.
fn burst(at_least: Duration, copy_per_second: Bytes, cpu_share: PerTenThousand) -> Duration {
    let copy_ns = (u128::from(ACTION_COPY.get()) * 1_000_000_000).checked_div(u128::from(copy_per_second.get()));
    let cpu_ns = (ACTION_CPU.as_nanos() * 10_000).checked_div(u128::from(cpu_share.get()));
    let needed_ns = copy_ns.max(cpu_ns).unwrap_or(0).min(BURST_MAX.as_nanos());
    at_least.max(Duration::from_nanos(needed_ns as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_policies::units::{gib, kib};
    use wideleaf_policies::{Budget, Cost, Moment};

    fn claim(weight: u32, is_busy: bool) -> Claim {
        Claim { weight, is_busy, copy_per_second_max: None }
    }

    fn total(copy_per_second: Bytes, cpu_share: u32) -> BudgetLimits {
        BudgetLimits { copy_per_second, cpu_share: PerTenThousand::new(cpu_share), ..BudgetLimits::default() }
    }

    fn copies(parts: &[BudgetLimits]) -> Vec<Bytes> {
        parts.iter().map(|part| part.copy_per_second).collect()
    }

    #[test]
    fn the_share_of_idle_vms_goes_to_busy_ones_by_weight() {
        let whole = total(mib(1600), 10_000);
        let parts = parts(whole, &[claim(1, true), claim(2, true), claim(5, false), claim(5, false)]);
        assert_eq!(copies(&parts), [mib(500), mib(1000), mib(50), mib(50)]);
        assert_eq!(parts[1].cpu_share.get(), 6_250); // 10,000 × 15/16 × 2/3
    }

    #[test]
    fn without_a_mix_of_busy_and_idle_vms_there_is_no_reserve() {
        let whole = total(mib(1600), 10_000);
        for is_busy in [true, false] {
            assert_eq!(copies(&parts(whole, &[claim(1, is_busy), claim(3, is_busy)])), [mib(400), mib(1200)]);
        }
        assert!(parts(whole, &[]).is_empty());
    }

    #[test]
    fn a_vms_own_bound_is_kept() {
        let bounded = Claim { copy_per_second_max: Some(mib(10)), ..claim(1, true) };
        assert_eq!(copies(&parts(total(mib(100), 100), &[bounded])), [mib(10)]);
    }

    /// 50 VMs on the default budget: 1 % of a core each, of which 250 ms are 2.5 ms, and a window of shared
    /// memory takes 17.
    #[test]
    fn a_small_part_is_saved_up_until_it_pays_for_one_action() {
        let part = parts(BudgetLimits::default(), &[claim(1, true); 50])[0];
        let mut budget = Budget::new(part, Moment::after_start(Duration::ZERO));
        assert!(budget.try_take(Cost { copied: mib(2), cpu: Duration::from_millis(17) }).is_ok());
    }

    fn any_claim() -> impl Strategy<Value = Claim> {
        (1..=1_000_u32, any::<bool>(), proptest::option::of(1..=gib(8).get()))
            .prop_map(|(weight, is_busy, max)| Claim { weight, is_busy, copy_per_second_max: max.map(Bytes::new) })
    }

    proptest! {
        #[test]
        fn the_shares_never_exceed_the_total_and_none_is_zero(
            claims in proptest::collection::vec(any_claim(), 0..64),
            copy in kib(1024).get()..=gib(64).get(),
            cpu in 0..=10_000_u32,
        ) {
            let whole = total(Bytes::new(copy), cpu);
            let parts = parts(whole, &claims);
            prop_assert_eq!(parts.len(), claims.len());
            prop_assert!(parts.iter().map(|part| part.copy_per_second.get()).sum::<u64>() <= copy);
            prop_assert!(parts.iter().map(|part| part.cpu_share.get()).sum::<u32>() <= cpu);
            prop_assert!(parts.iter().all(|part| part.copy_per_second > Bytes::ZERO && part.burst >= whole.burst));
            prop_assert!(parts.iter().all(|part| part.burst <= BURST_MAX));
        }

        #[test]
        fn one_busy_vm_never_has_less_than_an_idle_one_of_its_weight(
            idle in proptest::collection::vec(1..=1_000_u32, 0..64),
        ) {
            let others: Vec<Claim> = idle.iter().map(|weight| claim(*weight, false)).collect();
            let claims = [&[claim(1, true), claim(1, false)], others.as_slice()].concat();
            let parts = parts(total(gib(2), 5_000), &claims);
            prop_assert!(parts[0].copy_per_second >= parts[1].copy_per_second);
        }
    }
}
