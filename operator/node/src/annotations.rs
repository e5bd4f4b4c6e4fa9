//! Annotations by which the owner of a VM asks for huge pages.
//!
//! | annotation | value |
//! |---|---|
//! | `wideleaf.io/huge-pages` | `bestEffort` or `guaranteed`, KubeVirt's words |
//! | `wideleaf.io/guarantee` | a share like `95%`; alone also all forms of `wideleaf set VM guarantee=` |
//! | `wideleaf.io/policy` | a policy as of `wideleaf set VM policy=`, or `off` |
//! | `wideleaf.io/out-of-reach` | a part as of `wideleaf set VM out-of-reach=`, like `10%` |
//!
//! A VMI's annotations go before those of its pod. An invalid one counts as if it were not there, and is reported.

use std::collections::BTreeMap;

use wideleaf_control::protocol::{SettingName, Settings};
use wideleaf_control::view::Guarantee;

/// Annotation with KubeVirt's word for the kind of the request.
pub const HUGE_PAGES: &str = "wideleaf.io/huge-pages";

/// Annotation with the share of memory to reach.
pub const GUARANTEE: &str = "wideleaf.io/guarantee";

/// Annotation with the name of a policy.
pub const POLICY: &str = "wideleaf.io/policy";

/// Annotation with the largest part of the time for which memory may be out of the guest's reach.
pub const OUT_OF_REACH: &str = "wideleaf.io/out-of-reach";

/// Upper bound on the length of a value, in bytes: no policy with all of its parameters is longer.
const VALUE_BYTES_MAX: usize = 512;

/// Annotations of an object.
pub type Annotations = BTreeMap<String, String>;

/// Settings that annotations ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    /// Policy as on the command line; `None` where no annotation names one.
    pub policy: Option<String>,
    /// Coverage to reach; `None` where no annotation names one.
    pub guarantee: Option<Guarantee>,
    /// Largest part of any 100 ms for which memory may be out of the guest's reach, as on the command line; `None`
    /// where no annotation names one.
    pub out_of_reach: Option<String>,
}

impl Requested {
    /// What a VM requests: from the annotations of its VMI, then of its pod. Mistakes are a line each.
    pub fn of(vmi: Option<&Annotations>, pod: Option<&Annotations>) -> (Requested, Vec<String>) {
        let mut mistakes = Vec::new();
        let mut value = |name: &str| {
            let text = [vmi, pod].into_iter().flatten().find_map(|annotations| annotations.get(name))?.trim();
            let is_usable = !text.is_empty() && text.len() <= VALUE_BYTES_MAX && !text.contains(char::is_control);
            if !is_usable {
                mistakes.push(format!("annotation {name} is empty, or has control characters or more than 512 bytes"));
            }
            is_usable.then(|| text.to_owned())
        };
        let (policy, kind, share, out_of_reach) =
            (value(POLICY), value(HUGE_PAGES), value(GUARANTEE), value(OUT_OF_REACH));
        let guarantee = guarantee(kind.as_deref(), share.as_deref());
        let guarantee = guarantee.unwrap_or_else(|mistake| {
            mistakes.push(mistake);
            None
        });
        (Requested { policy, guarantee, out_of_reach }, mistakes)
    }

    /// Whether annotations ask for anything.
    pub fn is_any(&self) -> bool {
        *self != Requested::default()
    }

    /// Whether annotations ask for a manager, and not only for how it works.
    pub fn asks_for_care(&self) -> bool {
        self.policy.is_some() || self.guarantee.is_some()
    }

    /// Settings for wideleafd. A setting that annotations asked for before and no longer ask for is unset.
    pub fn settings(&self, before: &Requested) -> Settings {
        let is_over = [
            (before.policy.is_some() && self.policy.is_none(), SettingName::Policy),
            (before.guarantee.is_some() && self.guarantee.is_none(), SettingName::Guarantee),
            (before.out_of_reach.is_some() && self.out_of_reach.is_none(), SettingName::OutOfReach),
        ];
        Settings {
            policy: self.policy.clone(),
            guarantee: self.guarantee.map(|guarantee| guarantee.to_string()),
            out_of_reach: self.out_of_reach.clone(),
            unset: is_over.into_iter().filter_map(|(is_over, name)| is_over.then_some(name)).collect(),
            ..Settings::default()
        }
    }

    /// Whether a start that cannot meet the guarantee is to be refused.
    pub fn prevents_start(&self) -> bool {
        self.guarantee.is_some_and(Guarantee::prevents_start)
    }
}

fn guarantee(kind: Option<&str>, share: Option<&str>) -> Result<Option<Guarantee>, String> {
    let of = |name: &str, text: &str| {
        text.parse::<Guarantee>().map_err(|error| format!("annotation {name} counts as not there: {error}"))
    };
    match (kind, share) {
        (None, None) => Ok(None),
        (None, Some(share)) => of(GUARANTEE, share).map(Some),
        (Some(kind @ ("bestEffort" | "guaranteed")), None) => of(HUGE_PAGES, kind).map(Some),
        (Some(kind @ ("bestEffort" | "guaranteed")), Some(share)) if share.ends_with('%') && !share.contains(':') => {
            of(GUARANTEE, &format!("{kind}:{share}")).map(Some)
        }
        (Some("bestEffort" | "guaranteed"), Some(share)) => Err(format!(
            "annotation {GUARANTEE} counts as not there: {share:?} is not a share like 95%, which it must be beside \
             {HUGE_PAGES}"
        )),
        (Some(kind), _) => Err(format!(
            "annotations {HUGE_PAGES} and {GUARANTEE} count as not there: {kind:?} is neither bestEffort nor guaranteed"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> Annotations {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read(pairs: &[(&str, &str)]) -> (Requested, Vec<String>) {
        Requested::of(Some(&annotations(pairs)), None)
    }

    #[test]
    fn kind_and_share_make_one_guarantee() {
        for (pairs, guarantee) in [
            (&[(HUGE_PAGES, "bestEffort")][..], Some(Guarantee::BestEffort)),
            (&[(HUGE_PAGES, "guaranteed")], Some(Guarantee::Coverage(9_500))),
            (&[(HUGE_PAGES, "bestEffort"), (GUARANTEE, "90%")], Some(Guarantee::Sought(9_000))),
            (&[(HUGE_PAGES, "guaranteed"), (GUARANTEE, " 99.5% ")], Some(Guarantee::Coverage(9_950))),
            (&[(GUARANTEE, "90%")], Some(Guarantee::Coverage(9_000))),
            (&[(GUARANTEE, "bestEffort:90%")], Some(Guarantee::Sought(9_000))),
            (&[(POLICY, "coverage")], None),
        ] {
            let (requested, mistakes) = read(pairs);
            assert_eq!((requested.guarantee, mistakes), (guarantee, Vec::new()), "{pairs:?}");
        }
    }

    #[test]
    fn an_invalid_annotation_is_reported_and_counts_as_not_there() {
        for pairs in [
            &[(HUGE_PAGES, "maybe")][..],
            &[(GUARANTEE, "lots")],
            &[(HUGE_PAGES, "guaranteed"), (GUARANTEE, "bestEffort:90%")],
            &[(HUGE_PAGES, "guaranteed"), (GUARANTEE, "101%")],
            &[(HUGE_PAGES, "besteffort"), (GUARANTEE, "90%")],
            &[(POLICY, "")],
            &[(OUT_OF_REACH, "10%\n20%")],
            &[(POLICY, "auto\nset")],
            &[(POLICY, &"x".repeat(513))],
        ] {
            let (requested, mistakes) = read(pairs);
            assert_eq!(requested, Requested::default(), "{pairs:?}");
            assert!(mistakes.len() == 1 && mistakes[0].contains("wideleaf.io/"), "{mistakes:?}");
            assert!(!mistakes[0].contains('\n'), "{mistakes:?}");
        }
    }

    #[test]
    fn a_vmis_annotation_goes_before_that_of_its_pod_one_by_one() {
        let of_pod = annotations(&[(GUARANTEE, "50%"), (POLICY, "off"), (OUT_OF_REACH, "20%")]);
        let (requested, _) =
            Requested::of(Some(&annotations(&[(GUARANTEE, "90%"), (OUT_OF_REACH, "5%")])), Some(&of_pod));
        let (policy, guarantee) = (Some("off".into()), Some(Guarantee::Coverage(9_000)));
        assert_eq!(requested, Requested { policy, guarantee, out_of_reach: Some("5%".into()) });
    }

    #[test]
    fn a_request_that_is_over_is_unset_and_one_that_never_was_is_left_to_the_daemon() {
        let (before, _) = read(&[(GUARANTEE, "90%"), (POLICY, "off"), (OUT_OF_REACH, "10%")]);
        assert!(before.asks_for_care() && !Requested::default().is_any());
        let (how, _) = read(&[(OUT_OF_REACH, "10%")]);
        assert!(how.is_any() && !how.asks_for_care());
        let settings = before.settings(&Requested::default());
        assert_eq!((settings.policy.as_deref(), settings.guarantee.as_deref()), (Some("off"), Some("90%")));
        assert_eq!(settings.out_of_reach.as_deref(), Some("10%"));
        assert_eq!(settings.unset, []);
        let over = Requested::default().settings(&before);
        assert_eq!(over.unset, [SettingName::Policy, SettingName::Guarantee, SettingName::OutOfReach]);
        assert_eq!(Requested::default().settings(&Requested::default()), Settings::default());
    }
}
