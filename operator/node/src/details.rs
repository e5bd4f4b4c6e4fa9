//! The annotation `wideleaf.io/status` of a VMI or a pod: facts about its guest for programs, as compact JSON.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use wideleaf_control::view::{Care, Explanation, Guarantee, VmView};

use crate::amounts::OLD_SCAN_S;
use crate::annotations::Requested;
use crate::verdict::{Verdict, first_reason};

/// Name of the annotation.
pub const STATUS: &str = "wideleaf.io/status";

/// Change of the coverage that is news, in percent points.
const NEWS_PERCENT: f64 = 1.0;

/// Facts about a guest. Readers ignore unknown fields, and fields may be added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Details {
    /// Name of the guest for wideleafd.
    pub guest: String,
    /// Node that runs the guest.
    pub node: String,
    /// Share of its present memory in huge pages, in percent with one decimal; left out where it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage_percent: Option<f64>,
    /// Share of its present memory that is enough, in percent.
    pub goal_percent: f64,
    /// Memory in pages of 4 KiB, in MiB rounded down.
    #[serde(default)]
    pub base_4k_mib: u64,
    /// Memory in pages of 2 MiB, in MiB.
    #[serde(default)]
    pub huge_2m_mib: u64,
    /// Memory in pages of 1 GiB, in MiB.
    #[serde(default)]
    pub giant_1g_mib: u64,
    /// Time of the scan that the memory is from, RFC 3339 in whole minutes, rounded down; left out for a scan of less
    /// than a minute ago, and where that is unknown. A time, since an annotation stays for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scanned: Option<String>,
    /// Reason of the condition, for programs.
    pub reason: String,
    /// First reason for memory that is not in huge pages, and what would change it; left out without such memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explanation: Option<String>,
    /// `managed`, `off`, `unmanaged`, or why it is left alone.
    pub care: String,
    /// Policy in force; left out where wideleafd does not manage the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Guarantee in force.
    pub guarantee: String,
    /// Policy that annotations ask for; the agent unsets it when they no longer do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_policy: Option<String>,
    /// Guarantee that annotations ask for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_guarantee: Option<String>,
    /// Part of the time out of reach that annotations ask for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_out_of_reach: Option<String>,
    /// Time at which the condition's status changed last, RFC 3339; left out by programs that have no condition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<String>,
}

impl Details {
    /// Facts about a guest. Memory is rounded so that a guest at rest has the same text.
    pub fn of(
        node: &str,
        guest: &VmView,
        explanation: Option<&Explanation>,
        verdict: &Verdict,
        asked: &Requested,
    ) -> Details {
        let percent = |share: u32| f64::from(share / 10) / 10.0;
        let backing = guest.backing.unwrap_or_default();
        let why = explanation.and_then(first_reason);
        Details {
            guest: guest.name.clone(),
            node: node.to_owned(),
            coverage_percent: guest.coverage().map(percent),
            goal_percent: percent(crate::verdict::goal(guest.guarantee)),
            base_4k_mib: backing.base_4k >> 20,
            huge_2m_mib: backing.huge_2m >> 20,
            giant_1g_mib: backing.giant_1g >> 20,
            scanned: None,
            reason: verdict.reason.clone(),
            explanation: why.map(|reason| format!("{} windows: {}", reason.windows, reason.text)),
            care: match &guest.care {
                Care::Unmanaged => "unmanaged".into(),
                Care::Managed => "managed".into(),
                Care::Off => "off".into(),
                Care::LeftAlone { reason } => format!("left alone: {reason}"),
            },
            policy: guest.policy.clone(),
            guarantee: guest.guarantee.to_string(),
            asked_policy: asked.policy.clone(),
            asked_guarantee: asked.guarantee.map(|guarantee| guarantee.to_string()),
            asked_out_of_reach: asked.out_of_reach.clone(),
            changed: None,
        }
    }

    /// The same facts, from a scan of `scan_age_s` seconds ago; `now` is the time of this node's clock.
    #[must_use]
    pub fn scanned(self, scan_age_s: Option<f64>, now: Timestamp) -> Details {
        let age = scan_age_s.filter(|age| *age >= OLD_SCAN_S);
        let at = age.and_then(|age| now.checked_sub(SignedDuration::try_from_secs_f64(age).ok()?).ok());
        let minute = |at: Timestamp| Timestamp::from_second(at.as_second().div_euclid(60) * 60).ok();
        Details { scanned: at.and_then(minute).map(|at| at.to_string()), ..self }
    }

    /// Age of the scan at `now` in seconds, where it was old when this was written.
    pub fn scan_age_s(&self, now: Timestamp) -> Option<f64> {
        let at: Timestamp = self.scanned.as_deref()?.parse().ok()?;
        Some(now.duration_since(at).as_secs_f64())
    }

    /// Settings that an earlier agent has passed on for this guest.
    pub fn asked(&self) -> Requested {
        let guarantee = self.asked_guarantee.as_deref().and_then(|text| text.parse::<Guarantee>().ok());
        let (policy, out_of_reach) = (self.asked_policy.clone(), self.asked_out_of_reach.clone());
        Requested { policy, guarantee, out_of_reach }
    }

    /// Whether a reader learns something new after `before`: amounts that moved a little are not news, nor is an older
    /// or newer scan.
    pub fn is_news_after(&self, before: &Details) -> bool {
        let resident = |of: &Details| of.base_4k_mib + of.huge_2m_mib + of.giant_1g_mib;
        let (now, was) = (resident(self), resident(before));
        let percent = |of: &Details| of.coverage_percent.unwrap_or(-1.0);
        let has_moved = (percent(self) - percent(before)).abs() >= NEWS_PERCENT || now.abs_diff(was) * 20 > was;
        let words = |of: &Details| {
            let Details { guest, node, reason, care, policy, guarantee, .. } = of.clone();
            (guest, node, reason, care, policy, guarantee, of.asked())
        };
        has_moved || words(self) != words(before)
    }

    /// The annotation's value.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses an annotation's value; `None` for that of another program.
    pub fn parse(text: &str) -> Option<Details> {
        serde_json::from_str(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matching::tests::guest;

    #[test]
    fn an_annotation_comes_back_as_it_was_written() {
        let (policy, guarantee) = (Some("auto".into()), Some(Guarantee::Coverage(9_500)));
        let asked = Requested { policy, guarantee, out_of_reach: Some("12.5%".into()) };
        let guest = guest("shop_db", None);
        let details = Details::of("n1", &guest, None, &Verdict::of(&guest, None), &asked);
        assert_eq!(Details::parse(&details.text()), Some(details.clone()));
        assert_eq!(details.asked(), asked);
        assert_eq!((details.coverage_percent, details.huge_2m_mib, details.base_4k_mib), (Some(75.0), 3072, 1024));
        assert!(details.text().len() < 512 && !details.text().contains('\n'), "{}", details.text());
    }

    #[test]
    fn a_percent_or_a_twentieth_of_the_memory_is_news_and_less_is_not() {
        let guest = guest("shop_db", None);
        let before = Details::of("n1", &guest, None, &Verdict::of(&guest, None), &Requested::default());
        let with = |change: &dyn Fn(&mut Details)| {
            let mut after = before.clone();
            change(&mut after);
            after.is_news_after(&before)
        };
        assert!(!with(&|_| {}));
        assert!(!with(&|after| after.coverage_percent = Some(75.9)));
        assert!(with(&|after| after.coverage_percent = Some(76.0)) && with(&|after| after.coverage_percent = None));
        assert!(!with(&|after| after.base_4k_mib += 204) && with(&|after| after.base_4k_mib += 205));
        assert!(with(&|after| after.reason = "Holes".into()) && with(&|after| after.policy = None));
        assert!(with(&|after| after.asked_guarantee = Some("95%".into())));
        assert!(with(&|after| after.asked_out_of_reach = Some("10%".into())));
        assert!(!with(&|after| after.explanation = Some("513 windows: of 512".into())));
    }

    #[test]
    fn a_scan_of_a_minute_ago_or_before_has_a_time_that_stays_and_is_no_news() {
        let guest = guest("shop_db", None);
        let details = Details::of("n1", &guest, None, &Verdict::of(&guest, None), &Requested::default());
        let now: Timestamp = "2026-11-30T16:31:20Z".parse().expect("a time");
        let later = now + SignedDuration::from_secs(300);
        let scanned = |age, now| details.clone().scanned(age, now);
        for (age, now, expected) in [
            (None, now, None),
            (Some(59.9), now, None),
            (Some(80.0), now, Some("2026-11-30T16:30:00Z")),
            (Some(80.9), now, Some("2026-11-30T16:29:00Z")),
            (Some(380.0), later, Some("2026-11-30T16:30:00Z")),
            (Some(f64::NAN), now, None),
            (Some(f64::INFINITY), now, None),
            (Some(1e300), now, None),
        ] {
            assert_eq!(scanned(age, now).scanned.as_deref(), expected, "{age:?}");
        }
        let old = scanned(Some(80.0), now);
        assert_eq!(Details::parse(&old.text()), Some(old.clone()));
        assert!(!old.is_news_after(&details) && !details.is_news_after(&old));
        assert_eq!((old.scan_age_s(later), details.scan_age_s(later)), (Some(380.0), None));
        let foreign = Details { scanned: Some("yesterday".into()), ..details.clone() };
        assert_eq!(foreign.scan_age_s(later), None);
    }

    #[test]
    fn text_of_other_programs_is_not_read() {
        for text in ["", "{}", "[]", "{\"guest\":1}"] {
            assert_eq!(Details::parse(text), None, "{text:?}");
        }
    }
}
