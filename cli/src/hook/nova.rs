//! The flavor of an OpenStack instance: Nova writes it into the metadata of the domain that it starts.
//!
//! ```xml
//! <metadata>
//!   <nova:instance xmlns:nova="http://openstack.org/xmlns/libvirt/nova/1.1">
//!     <nova:flavor name="m1.large"> … </nova:flavor>
//!   </nova:instance>
//! </metadata>
//! ```
//!
//! Nova's names of domains (`instance-0000000e`) say nothing, so rules of wideleafd's configuration may name a flavor.
//! Source: class `LibvirtConfigGuestMetaNovaInstance` of nova/virt/libvirt/config.py.

use super::xml::Element;

/// Namespaces of Nova's metadata, of all releases, begin like this and end with a version.
const NAMESPACE_STEM: &str = "http://openstack.org/xmlns/libvirt/nova/";

/// Longest flavor that is read, in bytes: Nova's database has columns of 255 characters.
const FLAVOR_MAX: usize = 4 * 255;

/// The flavor of this domain; `None` where Nova did not start it.
pub fn flavor(domain: &Element) -> Option<String> {
    let metadata = domain.child("metadata")?;
    let of_nova =
        |element: &&Element, name: &str| element.name == name && element.namespace.starts_with(NAMESPACE_STEM);
    let instance = metadata.children.iter().find(|child| of_nova(child, "instance"))?;
    let flavor = instance.children.iter().find(|child| of_nova(child, "flavor"))?;
    let name = flavor.attribute("name").filter(|name| !name.is_empty() && name.len() <= FLAVOR_MAX);
    name.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The domain of an instance as Nova 26 starts it.
    const INSTANCE: &str = include_str!("../../tests/domains/nova.xml");

    fn flavor_in(metadata: &str) -> Option<String> {
        let text = format!("<domain><metadata>{metadata}</metadata></domain>");
        flavor(&Element::parse(&text).expect("a document"))
    }

    #[test]
    fn the_flavor_of_an_instance_is_read() {
        assert_eq!(flavor(&Element::parse(INSTANCE).expect("a document")).as_deref(), Some("db.large"));
    }

    #[test]
    fn earlier_and_later_versions_of_the_metadata_have_it_too() {
        for version in ["1.0", "1.1", "1.2"] {
            let xml = format!(
                "<i:instance xmlns:i='{NAMESPACE_STEM}{version}'><i:flavor name='m1.small' id='1'/></i:instance>"
            );
            assert_eq!(flavor_in(&xml).as_deref(), Some("m1.small"), "{version}");
        }
    }

    #[test]
    fn what_nova_did_not_write_is_no_flavor() {
        let name = "x".repeat(2000);
        let long = format!("<n:instance xmlns:n='{NAMESPACE_STEM}1.1'><n:flavor name='{name}'/></n:instance>");
        for xml in [
            "",
            "<instance><flavor name='m1.small'/></instance>",
            "<n:instance xmlns:n='urn:another'><n:flavor name='m1.small'/></n:instance>",
            "<n:instance xmlns:n='http://openstack.org/xmlns/libvirt/nova/1.1'><n:name>m1.small</n:name></n:instance>",
            "<n:instance xmlns:n='http://openstack.org/xmlns/libvirt/nova/1.1'><n:flavor name=''/></n:instance>",
            &long,
        ] {
            assert_eq!(flavor_in(xml), None, "{xml}");
        }
        assert_eq!(flavor(&Element::parse("<domain/>").expect("a document")), None);
    }
}
