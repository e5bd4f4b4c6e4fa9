//! What a domain's metadata say about its memory: settings for wideleafd, and whether its start may grow the hugetlb
//! pool. Reading touches nothing and never fails: what is not understood is a mistake, in words for the operator.
//!
//! ```xml
//! <metadata>
//!   <wideleaf:memory xmlns:wideleaf="urn:wideleaf:memory:1" policy="auto" guarantee="95%" pool="yes"/>
//! </metadata>
//! ```
//!
//! libvirt keeps an element of any namespace there and never checks it, so that only this module can find a typing
//! error. Everything in wideleaf's namespace that is not understood is a mistake, and keeps the domain from
//! starting: an operator that wrote `garantee="95%"` would otherwise rely on a guarantee that does not exist.

use std::path::Path;

use wideleaf_attach::refuse::refuse_policy;
use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_memory::manager::{OutOfReach, OutOfReachError};
use wideleaf_policies::PolicyChoice;

use super::xml::Element;

/// The namespace, with the number of its version.
pub const NAMESPACE: &str = "urn:wideleaf:memory:1";

/// Common beginning of all versions of the namespace: another ending is another version, or a typing error.
const NAMESPACE_STEM: &str = "urn:wideleaf:";

/// Name of the element.
const ELEMENT: &str = "memory";

/// Names of its attributes.
const ATTRIBUTES: [&str; 6] = ["policy", "guarantee", "pool", "out-of-reach", "collapse-shared", "qmp"];

/// Names at least this similar are taken for typing errors: clap's limit for subcommands and options.
const SIMILARITY_MIN: f64 = 0.7;

/// What a domain's metadata ask for, apart from pages of pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryMetadata {
    /// Settings for the daemon, unchanged.
    pub settings: Settings,
    /// Whether pages may be added to the hugetlb pool for it.
    pub may_grow_pool: bool,
    /// Mistakes, each with its correction, one per line. They are not in `settings`.
    pub mistakes: Vec<String>,
}

impl Default for MemoryMetadata {
    fn default() -> MemoryMetadata {
        MemoryMetadata { settings: Settings::default(), may_grow_pool: true, mistakes: Vec::new() }
    }
}

impl MemoryMetadata {
    /// Reads the metadata of this domain.
    pub fn of(domain: &Element) -> MemoryMetadata {
        let mut metadata = MemoryMetadata::default();
        let mut has_element = false;
        for element in domain.child("metadata").into_iter().flat_map(|element| &element.children) {
            match element.namespace.as_str() {
                NAMESPACE if element.name != ELEMENT => metadata.mistakes.push(unknown_element(&element.name)),
                NAMESPACE if has_element => {
                    metadata.mistakes.push(format!("there is a second <{ELEMENT}>: remove one"))
                }
                NAMESPACE => {
                    has_element = true;
                    metadata.read(element);
                }
                other if other.starts_with(NAMESPACE_STEM) => metadata.mistakes.push(unknown_namespace(other)),
                _ => {}
            }
        }
        metadata
    }

    fn read(&mut self, element: &Element) {
        for (name, value) in &element.attributes {
            if let Err(mistake) = self.take(name, value) {
                self.mistakes.push(mistake);
            }
        }
        let inside =
            |child: &Element| format!("<{ELEMENT}> has no elements inside: write {}=\"…\" as an attribute", child.name);
        self.mistakes.extend(element.children.iter().map(inside));
    }

    fn take(&mut self, name: &str, value: &str) -> Result<(), String> {
        let is_wrong = |why: String| format!("{name}={value:?}: {why}");
        let settings = &mut self.settings;
        match name {
            "policy" => settings.policy = Some(policy(value).map_err(is_wrong)?),
            "guarantee" => settings.guarantee = Some(guarantee(value).map_err(is_wrong)?),
            "qmp" => settings.qmp = Some(absolute(value).map_err(is_wrong)?.into()),
            "out-of-reach" => settings.out_of_reach = Some(out_of_reach(value).map_err(is_wrong)?),
            "collapse-shared" => settings.collapse_shared = Some(yes_or_no(value).map_err(is_wrong)?),
            "pool" => self.may_grow_pool = yes_or_no(value).map_err(is_wrong)?,
            _ => return Err(unknown_attribute(name)),
        }
        Ok(())
    }

    /// Guarantee that the domain requests.
    pub fn guarantee(&self) -> Guarantee {
        self.settings.guarantee.as_deref().and_then(|text| text.parse().ok()).unwrap_or_default()
    }
}

/// A policy that an external guest can have, in the words of the metadata: the daemon would refuse any other at
/// `started`, when libvirt no longer shows the reason.
fn policy(text: &str) -> Result<String, String> {
    if text != "off" {
        let choice = PolicyChoice::parse(text).map_err(|error| format!("{error}; or off"))?;
        refuse_policy(&choice).map_or(Ok(()), Err)?;
    }
    Ok(text.to_owned())
}

fn guarantee(text: &str) -> Result<String, String> {
    let read = text.parse().map_err(|error: GuaranteeError| error.to_string());
    read.map(|_: Guarantee| text.to_owned())
}

fn out_of_reach(text: &str) -> Result<String, String> {
    let read = text.parse().map_err(|error: OutOfReachError| error.to_string());
    read.map(|_: OutOfReach| text.to_owned())
}

fn absolute(text: &str) -> Result<&Path, String> {
    Some(Path::new(text)).filter(|path| path.is_absolute()).ok_or_else(|| "write an absolute path".to_owned())
}

fn yes_or_no(value: &str) -> Result<bool, String> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("write yes or no".to_owned()),
    }
}

fn unknown_attribute(name: &str) -> String {
    let nearest = ATTRIBUTES.into_iter().map(|known| (strsim::jaro(name, known), known));
    let nearest = nearest.filter(|(similarity, _)| *similarity >= SIMILARITY_MIN).max_by(|a, b| a.0.total_cmp(&b.0));
    let did_you_mean = nearest.map_or(String::new(), |(_, known)| format!(" did you mean {known}?"));
    format!("unknown attribute {name}:{did_you_mean} the attributes are {}", ATTRIBUTES.join(", "))
}

fn unknown_element(name: &str) -> String {
    format!("unknown element <{name}>: the only element is <{ELEMENT}>")
}

fn unknown_namespace(name: &str) -> String {
    format!("unknown namespace {name}: this wideleaf knows {NAMESPACE}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(metadata: &str) -> MemoryMetadata {
        let text = format!("<domain><metadata xmlns:w='{NAMESPACE}'>{metadata}</metadata></domain>");
        MemoryMetadata::of(&Element::parse(&text).expect("a document"))
    }

    #[test]
    fn a_domain_without_metadata_has_no_guarantee_and_may_grow_the_pool() {
        let nothing = MemoryMetadata::of(&Element::parse("<domain/>").expect("a document"));
        assert_eq!(nothing, MemoryMetadata::default());
        assert_eq!((nothing.guarantee(), nothing.may_grow_pool), (Guarantee::BestEffort, true));
        assert_eq!(parsed("<memory xmlns='urn:another' pool='no'/>"), nothing, "an element of another program");
    }

    #[test]
    fn every_attribute_is_understood() {
        let said = parsed(
            "<w:memory policy='off' guarantee='95%' pool='no' out-of-reach='10%' collapse-shared='yes'
                       qmp='/run/vm.qmp'/>",
        );
        let settings = Settings {
            policy: Some("off".into()),
            guarantee: Some("95%".into()),
            out_of_reach: Some("10%".into()),
            collapse_shared: Some(true),
            qmp: Some("/run/vm.qmp".into()),
            ..Settings::default()
        };
        assert_eq!(said, MemoryMetadata { settings, may_grow_pool: false, mistakes: Vec::new() });
        assert_eq!(said.guarantee(), Guarantee::Coverage(9_500));
    }

    #[test]
    fn a_misspelt_attribute_is_a_mistake_with_the_intended_one() {
        for (written, meant) in [
            ("garantee", "guarantee"),
            ("Policy", "policy"),
            ("out_of_reach", "out-of-reach"),
            ("collapse_shared", "collapse-shared"),
            ("pol", "pool"),
            ("w:guarantee", "guarantee"),
        ] {
            let said = parsed(&format!("<w:memory {written}='95%'/>"));
            let mistake =
                format!("unknown attribute {written}: did you mean {meant}? the attributes are policy, guarantee, ");
            assert!(said.mistakes.len() == 1 && said.mistakes[0].starts_with(&mistake), "{:?}", said.mistakes);
            assert_eq!(said.settings, Settings::default());
        }
        let nothing_like_it = parsed("<w:memory colour='red'/>").mistakes;
        assert!(
            nothing_like_it[0].starts_with("unknown attribute colour: the attributes are policy,"),
            "{nothing_like_it:?}"
        );
    }

    #[test]
    fn an_invalid_value_is_a_mistake_with_the_valid_values() {
        for (attribute, right) in [
            ("policy='autp'", "or off"),
            ("policy='giant'", "only for guests of `wideleaf run`"),
            ("policy=''", "or off"),
            ("guarantee='much'", "is not a guarantee"),
            ("pool='perhaps'", "write yes or no"),
            ("out-of-reach='0%'", "write a number from 1 to 100 and a %"),
            ("collapse-shared='1'", "write yes or no"),
            ("qmp='vm.qmp'", "write an absolute path"),
        ] {
            let said = parsed(&format!("<w:memory {attribute}/>"));
            let (name, _) = attribute.split_once('=').expect("name and value");
            let [mistake] = said.mistakes.as_slice() else { panic!("{attribute}: {:?}", said.mistakes) };
            assert!(mistake.starts_with(name) && mistake.contains(right), "{mistake}");
            assert_eq!((said.settings, said.may_grow_pool), (Settings::default(), true), "{attribute}");
        }
    }

    #[test]
    fn unknown_elements_of_the_namespace_are_mistakes_and_the_rest_counts() {
        let said = parsed(
            "<w:memory policy='auto'><w:guarantee>95%</w:guarantee></w:memory><w:memory pool='no'/><w:cpu/>
             <memory xmlns='urn:wideleaf:memory:2' guarantee='95%'/><memory xmlns='urn:wideleaf' guarantee='95%'/>",
        );
        assert_eq!((said.settings.policy.as_deref(), said.may_grow_pool), (Some("auto"), true));
        let [inside, second, element, namespace] = said.mistakes.as_slice() else { panic!("{:?}", said.mistakes) };
        assert!(inside.contains("write guarantee=") && second.contains("a second <memory>"), "{inside}; {second}");
        assert!(element.contains("<cpu>") && namespace.contains("urn:wideleaf:memory:2"), "{element}; {namespace}");
    }
}
