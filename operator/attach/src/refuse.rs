//! Policies that work only in our own VMM.

use wideleaf_policies::policy::RamStart;
use wideleaf_policies::{PageSize, PolicyChoice};

/// Reason why a policy cannot manage an external guest; `None` for one that can. Other policies do without what is
/// missing there: exact access heat, holding windows at 4 KiB, giving back zero pages.
pub fn refuse_policy(choice: &PolicyChoice) -> Option<String> {
    let policy = choice.make();
    let why = if policy.decides_at_first_touch() {
        "it decides at first touch, which only the VMM itself can observe (userfaultfd)"
    } else if policy.reserves().is_some() {
        "it reserves frames in RAM, which only the VMM itself can map that way"
    } else if policy.ram_start() == RamStart::HugeAndPrefaulted {
        "it prepares RAM before the guest runs, and this guest runs already"
    } else if policy.largest_page() == PageSize::Giant1G {
        "it moves pages of 1 GiB into the guest's mappings, which only the VMM itself can do"
    } else {
        return None;
    };
    Some(format!(
        "the policy {choice} works only for guests of `wideleaf run`: {why}; choose auto, coverage, thp or another one"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_policies_that_need_our_own_vmm_are_refused() {
        let is_refused = |name: &str| refuse_policy(&PolicyChoice::parse(name).expect("it exists")).is_some();
        for name in ["at-fault", "reservation", "prealloc", "giant", "auto:giant=1"] {
            assert!(is_refused(name), "{name}");
        }
        for name in ["auto", "coverage", "thp", "utilization", "greedy", "schemes", "never"] {
            assert!(!is_refused(name), "{name}");
        }
    }
}
