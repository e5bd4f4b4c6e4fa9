//! The condition of a guest: whether enough of its present memory is in huge pages, and why not.
//!
//! | status | reason |
//! |---|---|
//! | `True` | `Covered` |
//! | `False` | the most frequent reason of `wideleaf explain`, as `BackingOffNoHugePage`; `NotCovered` without one |
//! | `Unknown` | `NothingPresent`, `NotVisible`, `NoGuest`, `WideleafdSilent` |

use serde::Serialize;
use wideleaf_control::view::{BackingView, Care, Explanation, Guarantee, Reason, VmView};

/// Type of the condition on a VMI. On a pod it has the prefix of this project.
pub const CONDITION: &str = "HugePagesCovered";

/// Share of present memory that is enough without a guarantee, in ten thousandths: that of `guaranteed` without a
/// number.
const ENOUGH: u32 = 9_500;

/// Upper bound on a message, in characters. The API server allows 32,768 bytes; a table shows a line.
const MESSAGE_MAX: usize = 512;

/// Upper bound on a reason, in characters (API conventions of Kubernetes).
const REASON_MAX: usize = 128;

/// Reasons of `wideleaf explain` for memory that is not present: none of it counts as not covered.
const NOT_PRESENT: [&str; 1] = ["never_touched"];

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Status {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// The condition is not known.
    Unknown,
}

impl Status {
    /// Word of Kubernetes.
    pub const fn word(self) -> &'static str {
        match self {
            Status::True => "True",
            Status::False => "False",
            Status::Unknown => "Unknown",
        }
    }
}

/// Condition of one guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it is covered.
    pub status: Status,
    /// Reason for programs, in CamelCase.
    pub reason: String,
    /// Reason for people, one line.
    pub message: String,
}

impl Verdict {
    fn unknown(reason: &str, message: impl Into<String>) -> Verdict {
        Verdict { status: Status::Unknown, reason: reason.into(), message: line(message) }
    }

    /// No guest runs in the pod that had one.
    pub fn no_guest() -> Verdict {
        Verdict::unknown("NoGuest", "wideleafd finds no guest of this pod")
    }

    /// wideleafd does not answer the agent.
    pub fn silent(why: &str) -> Verdict {
        Verdict::unknown("WideleafdSilent", why)
    }

    /// Condition of a guest. `explanation`: where it is known, the first reason is in it.
    pub fn of(guest: &VmView, explanation: Option<&Explanation>) -> Verdict {
        let Some(backing) = guest.backing else {
            let why = guest.notes.first().map_or("wideleafd cannot see what backs its memory", String::as_str);
            return Verdict::unknown("NotVisible", why);
        };
        let Some(coverage) = backing.coverage() else {
            return Verdict::unknown("NothingPresent", "none of its memory is present yet");
        };
        let amounts = amounts(coverage, &backing);
        if coverage >= goal(guest.guarantee) {
            return Verdict { status: Status::True, reason: "Covered".into(), message: amounts };
        }
        let first = explanation.and_then(first_reason);
        let reason = first.map_or_else(|| "NotCovered".to_owned(), |reason| camel_case(&reason.name));
        let why = match (&guest.care, first) {
            (Care::LeftAlone { reason }, _) => format!("; it is left alone: {reason}"),
            (Care::Unmanaged, _) => "; wideleafd does not manage it".to_owned(),
            (Care::Off, _) => "; its policy is off".to_owned(),
            (Care::Managed, Some(reason)) => format!("; {} windows: {}", reason.windows, reason.text),
            (Care::Managed, None) => String::new(),
        };
        Verdict { status: Status::False, reason, message: line(format!("{amounts}{why}")) }
    }
}

/// Share of present memory that is enough, in ten thousandths.
pub fn goal(guarantee: Guarantee) -> u32 {
    guarantee.share().unwrap_or(ENOUGH)
}

/// The most frequent reason for present memory that is not large.
pub fn first_reason(explanation: &Explanation) -> Option<&Reason> {
    explanation.reasons.iter().find(|reason| !NOT_PRESENT.contains(&reason.name.as_str()) && reason.windows > 0)
}

/// The share in whole percent, rounded down, and GiB by page size.
fn amounts(coverage: u32, backing: &BackingView) -> String {
    let gib = |bytes: u64| bytes as f64 / (1 << 30) as f64;
    let BackingView { base_4k, huge_2m, giant_1g, .. } = *backing;
    format!(
        "{} % of present memory is in huge pages: {:.1} GiB in 2 MiB, {:.1} GiB in 1 GiB, {:.1} GiB in 4 KiB",
        coverage / 100,
        gib(huge_2m),
        gib(giant_1g),
        gib(base_4k)
    )
}

/// `backing_off_no_huge_page` as `BackingOffNoHugePage`.
fn camel_case(name: &str) -> String {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    let word = |part: &str| {
        let (first, rest) = part.split_at(1);
        first.to_ascii_uppercase() + rest
    };
    let joined: String = parts.map(word).collect::<String>().chars().take(REASON_MAX).collect();
    // A reason begins with a letter (API conventions).
    if joined.starts_with(|c: char| c.is_ascii_alphabetic()) { joined } else { "NotCovered".to_owned() }
}

/// A line without control characters, of bounded length.
fn line(text: impl Into<String>) -> String {
    text.into().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MESSAGE_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matching::tests::guest;

    fn backing(huge_2m: u64, base_4k: u64) -> Option<BackingView> {
        Some(BackingView { huge_2m, base_4k, ..BackingView::default() })
    }

    fn why(names: &[(&str, u64)]) -> Explanation {
        let reason = |(name, windows): &(&str, u64)| Reason {
            name: (*name).into(),
            windows: *windows,
            text: format!("text of {name}"),
        };
        Explanation { reasons: names.iter().map(reason).collect(), ..Explanation::default() }
    }

    #[test]
    fn a_guest_is_covered_from_its_guarantee_on_and_without_one_from_95_percent_on() {
        let status = |guarantee, huge, base| {
            Verdict::of(&VmView { guarantee, backing: backing(huge, base), ..guest("db", None) }, None).status
        };
        for (guarantee, huge, base, expected) in [
            (Guarantee::BestEffort, 95, 5, Status::True),
            (Guarantee::BestEffort, 94, 6, Status::False),
            (Guarantee::Sought(5_000), 50, 50, Status::True),
            (Guarantee::Coverage(9_900), 98, 2, Status::False),
            (Guarantee::Coverage(9_900), 0, 0, Status::Unknown),
        ] {
            assert_eq!(status(guarantee, huge, base), expected, "{guarantee} {huge} {base}");
        }
    }

    #[test]
    fn a_message_has_percent_amounts_and_the_first_reason_of_present_memory() {
        let explanation = why(&[("never_touched", 900), ("backing_off_no_huge_page", 512)]);
        let verdict = Verdict::of(&guest("db", None), Some(&explanation));
        assert_eq!((verdict.status, verdict.reason.as_str()), (Status::False, "BackingOffNoHugePage"));
        assert_eq!(
            verdict.message,
            "75 % of present memory is in huge pages: 3.0 GiB in 2 MiB, 0.0 GiB in 1 GiB, 1.0 GiB in 4 KiB; 512 \
             windows: text of backing_off_no_huge_page"
        );
        let off = Verdict::of(&VmView { care: Care::Off, ..guest("db", None) }, None);
        assert!(off.message.ends_with("; its policy is off") && off.reason == "NotCovered", "{off:?}");
        let held = VmView { care: Care::LeftAlone { reason: "it is being\nmigrated".into() }, ..guest("db", None) };
        assert!(Verdict::of(&held, None).message.ends_with("left alone: it is being migrated"));
    }

    #[test]
    fn what_cannot_be_seen_is_unknown_and_says_why() {
        let hidden = VmView { backing: None, notes: vec!["it has ended".into()], ..guest("db", None) };
        let verdict = Verdict::of(&hidden, None);
        assert_eq!((verdict.status, verdict.reason.as_str()), (Status::Unknown, "NotVisible"));
        assert_eq!(verdict.message, "it has ended");
        let absent = VmView { backing: backing(0, 0), ..guest("db", None) };
        assert_eq!(Verdict::of(&absent, None).reason, "NothingPresent");
    }

    #[test]
    fn a_reason_is_one_word_in_camel_case_whatever_the_daemon_calls_it() {
        for (name, reason) in [
            ("not_chosen", "NotChosen"),
            ("holes", "Holes"),
            ("a-b c", "ABC"),
            ("", "NotCovered"),
            ("7_up", "NotCovered"),
            ("über", "Ber"),
        ] {
            assert_eq!(camel_case(name), reason, "{name:?}");
        }
        assert_eq!(camel_case(&"x".repeat(500)).len(), REASON_MAX);
        assert_eq!(line("y".repeat(5_000)).chars().count(), MESSAGE_MAX);
    }
}
