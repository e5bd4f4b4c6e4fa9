//! What a domain's metadata say about its memory:
//!
//! ```xml
//! <metadata>
//!   <wideleaf:memory xmlns:wideleaf="urn:wideleaf:memory:1" policy="auto" guarantee="95%" pool="yes"/>
//! </metadata>
//! ```
//!
//! libvirt keeps an element of any namespace there and never looks at it. What is not understood is said, and otherwise as if it
//! were not there: a typing error must not keep a guest from starting. A guarantee is the exception, since a domain that asks
//! for one asks not to be started without it.

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Guarantee, GuaranteeError};

use super::xml::Element;

/// The namespace, with the number of its version.
pub const NAMESPACE: &str = "urn:wideleaf:memory:1";

/// What a domain wants of us, beside pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// For the daemon, word by word.
    pub settings: Settings,
    /// Whether room may be made for it in the hugetlb pool.
    pub may_grow_pool: bool,
    /// What was not understood, a line each.
    pub odd: Vec<String>,
}

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes { settings: Settings::default(), may_grow_pool: true, odd: Vec::new() }
    }
}

impl Wishes {
    /// What this domain says.
    pub fn of(domain: &Element) -> Wishes {
        let metadata = domain.child("metadata").into_iter().flat_map(|metadata| &metadata.children);
        let mut wishes = Wishes::default();
        for element in metadata.filter(|element| element.namespace == NAMESPACE) {
            if element.name == "memory" {
                element.attributes.iter().for_each(|(name, value)| wishes.add(name, value));
            } else {
                wishes.odd.push(format!("metadata: unknown element <{}>; there is <memory>", element.name));
            }
        }
        wishes
    }

    fn add(&mut self, name: &str, value: &str) {
        let settings = &mut self.settings;
        match (name, yes_or_no(value)) {
            ("policy", _) => settings.policy = Some(value.to_owned()),
            ("guarantee", _) => settings.guarantee = Some(value.to_owned()),
            ("qmp", _) => settings.qmp = Some(value.into()),
            ("collapse-shared", Some(may)) => settings.collapse_shared = Some(may),
            ("pool", Some(may)) => self.may_grow_pool = may,
            ("collapse-shared" | "pool", None) => {
                self.odd.push(format!("metadata: {name}={value:?}: expected yes or no"));
            }
            _ => self.odd.push(format!(
                "metadata: unknown attribute {name}; there is policy, guarantee, pool, collapse-shared, qmp"
            )),
        }
    }

    /// What it is to reach.
    ///
    /// # Errors
    /// [`GuaranteeError`] where it asks for something that can not be read, and so not be kept.
    pub fn guarantee(&self) -> Result<Guarantee, GuaranteeError> {
        self.settings.guarantee.as_deref().map_or(Ok(Guarantee::BestEffort), str::parse)
    }
}

fn yes_or_no(value: &str) -> Option<bool> {
    match value {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(metadata: &str) -> Wishes {
        let text = format!("<domain><metadata xmlns:w='{NAMESPACE}'>{metadata}</metadata></domain>");
        Wishes::of(&Element::parse(&text).expect("a document"))
    }

    #[test]
    fn a_domain_that_says_nothing_wants_no_guarantee_and_may_have_room() {
        let nothing = Wishes::of(&Element::parse("<domain/>").expect("a document"));
        assert_eq!(nothing, Wishes::default());
        assert_eq!((nothing.guarantee(), nothing.may_grow_pool), (Ok(Guarantee::BestEffort), true));
        assert_eq!(wishes("<memory xmlns='urn:somebody' pool='no'/>"), nothing, "somebody else's element");
    }

    #[test]
    fn every_attribute_is_understood() {
        let said = wishes("<w:memory policy='off' guarantee='95%' pool='no' collapse-shared='yes' qmp='/run/vm.qmp'/>");
        let settings = Settings {
            policy: Some("off".into()),
            guarantee: Some("95%".into()),
            collapse_shared: Some(true),
            qmp: Some("/run/vm.qmp".into()),
            ..Settings::default()
        };
        assert_eq!(said, Wishes { settings, may_grow_pool: false, odd: Vec::new() });
        assert_eq!(said.guarantee(), Ok(Guarantee::Coverage(9_500)));
        assert!(wishes("<w:memory guarantee='much'/>").guarantee().is_err());
    }

    #[test]
    fn what_is_not_understood_is_said_and_the_rest_counts() {
        let said = wishes("<w:memory colour='red' pool='perhaps' policy='auto'/><w:cpu/>");
        assert_eq!(said.settings.policy.as_deref(), Some("auto"));
        assert!(said.may_grow_pool);
        assert_eq!(said.odd.len(), 3, "{:?}", said.odd);
        assert!(said.odd[0].contains("colour") && said.odd[1].contains("yes or no") && said.odd[2].contains("<cpu>"));
    }
}
