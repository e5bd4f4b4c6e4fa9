//! Reasons why windows are not huge, in words: the same from a manager and from a survey.

use std::collections::BTreeMap;

use wideleaf_control::view::Reason;
use wideleaf_memory::explain::WhyNot;

/// The reasons as views show them, most windows first.
pub(crate) fn reasons(counts: &BTreeMap<WhyNot, u64>) -> Vec<Reason> {
    let reason = |(why, windows): (&WhyNot, &u64)| Reason {
        name: why.name().to_owned(),
        windows: *windows,
        text: why.to_string(),
    };
    let mut reasons: Vec<_> = counts.iter().map(reason).collect();
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.windows));
    reasons
}
