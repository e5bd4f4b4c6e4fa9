//! Policies that ask for what only our own VMM can do.

use wideleaf_policies::policy::RamStart;
use wideleaf_policies::{PageSize, PolicyChoice};

/// Why a policy is of no use for a guest of others; `None` where it is of use. What other policies miss there (exact access heat,
/// holding windows at 4 KiB, giving back zero pages) they do without.
pub fn refuse_policy(choice: &PolicyChoice) -> Option<String> {
    let policy = choice.make();
    let why = if policy.decides_at_first_touch() {
        "it decides at the first touch, which only the VMM itself hears of (userfaultfd)"
    } else if policy.reserves().is_some() {
        "it sets frames aside in RAM that the VMM itself has to map so"
    } else if policy.ram_start() == RamStart::HugeAndPrefaulted {
        "it prepares RAM before the guest runs, and this one runs already"
    } else if policy.largest_page() == PageSize::Giant1G {
        "it moves pages of 1 GiB into the guest's mappings, which only the VMM itself can do"
    } else {
        return None;
    };
    Some(format!(
        "the policy {choice} is for guests of `wideleaf run` alone: {why}; auto, coverage, thp and others will do"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_our_own_vmm_is_refused() {
        let is_refused = |name: &str| refuse_policy(&PolicyChoice::parse(name).expect("it exists")).is_some();
        for name in ["at-fault", "reservation", "prealloc", "giant"] {
            assert!(is_refused(name), "{name}");
        }
        for name in ["auto", "coverage", "thp", "utilization", "greedy", "schemes", "never"] {
            assert!(!is_refused(name), "{name}");
        }
    }
}
