//! The pod of a guest and its VMI.
//!
//! ```text
//!   guest ── control group ──▶ pod UID ──▶ pod ── label, owner, annotation ──▶ VMI of this node
//!     └───── no pod in it, and its name is NAMESPACE_NAME ─────────────────────▶ VMI of this node
//! ```
//!
//! A process chooses its name, and the kernel knows its control group: the name counts only for guests outside of pods.

use wideleaf_control::view::{VmView, Vmm};

use crate::cgroup;
use crate::objects::{PodFacts, VmiFacts};
use crate::store::{Objects, VmiApi};

/// Object that has a guest's condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A VMI that runs on this node, with its pod.
    Vmi(Box<VmiFacts>, Option<Box<PodFacts>>),
    /// A pod without a VMI.
    Pod(Box<PodFacts>),
    /// A pod with a VMI that runs on another node: a migration has not arrived, or has left.
    Elsewhere(Box<PodFacts>),
}

impl Place {
    /// The pod of the guest, where it is known.
    pub fn pod(&self) -> Option<&PodFacts> {
        match self {
            Place::Vmi(_, pod) => pod.as_deref(),
            Place::Pod(pod) | Place::Elsewhere(pod) => Some(pod),
        }
    }
}

/// Place of a guest; `None` for a guest that belongs to no pod of this node.
pub fn place(guest: &VmView, objects: &Objects) -> Option<Place> {
    let Some(uid) = guest.cgroup.as_deref().and_then(cgroup::pod_uid) else { return by_name(guest, objects) };
    let pod = Box::new(objects.pods.get(&uid)?.clone());
    let Some(named) = &pod.vmi else { return Some(Place::Pod(pod)) };
    if !matches!(objects.vmi_api, VmiApi::Present { .. }) {
        return Some(Place::Pod(pod));
    }
    let of_name = || {
        let name = named.name.as_deref()?;
        objects.vmis.all().find(|vmi| vmi.identity.name == name && vmi.identity.namespace == pod.identity.namespace)
    };
    let vmi = match &named.uid {
        Some(uid) => objects.vmis.get(uid).filter(|vmi| vmi.identity.namespace == pod.identity.namespace),
        None => of_name(),
    };
    Some(match vmi {
        Some(vmi) => Place::Vmi(Box::new(vmi.clone()), Some(pod)),
        None => Place::Elsewhere(pod),
    })
}

fn by_name(guest: &VmView, objects: &Objects) -> Option<Place> {
    // A namespace has no underscore (RFC 1123).
    let (namespace, name) = guest.name.split_once('_').filter(|_| guest.vmm == Vmm::Qemu)?;
    let is_meant = |vmi: &&VmiFacts| vmi.identity.namespace == namespace && vmi.identity.name == name;
    let vmi = objects.vmis.all().find(is_meant)?;
    let pod = vmi.pods.iter().find_map(|uid| objects.pods.get(uid));
    Some(Place::Vmi(Box::new(vmi.clone()), pod.cloned().map(Box::new)))
}

/// Pod of this node that runs a VMI, whether or not one of its guests is known.
pub fn pod_of<'a>(vmi: &VmiFacts, objects: &'a Objects) -> Option<&'a PodFacts> {
    let is_named = |pod: &&PodFacts| vmi.pods.contains(&pod.identity.uid);
    let names_it = |pod: &&PodFacts| {
        pod.identity.namespace == vmi.identity.namespace
            && pod.vmi.as_ref().is_some_and(|named| match &named.uid {
                Some(uid) => *uid == vmi.identity.uid,
                None => named.name.as_ref() == Some(&vmi.identity.name),
            })
    };
    let all = || objects.pods.all().filter(|pod| !pod.has_ended);
    all().find(is_named).or_else(|| all().find(names_it))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::objects::{Identity, VmiOfPod};
    use kube::runtime::watcher::Event;
    use std::collections::BTreeMap;
    use wideleaf_control::view::{BackingView, Care, Guarantee, SavedView};

    pub(crate) const POD: &str = "0f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10";

    pub(crate) fn guest(name: &str, cgroup: Option<&str>) -> VmView {
        VmView {
            name: name.to_owned(),
            uuid: None,
            pid: 4711,
            started_at: 1,
            vmm: Vmm::Qemu,
            cgroup: cgroup.map(str::to_owned),
            care: Care::Managed,
            policy: Some("auto".into()),
            guarantee: Guarantee::BestEffort,
            ram: Vec::new(),
            backing: Some(BackingView { huge_2m: 3 << 30, base_4k: 1 << 30, ..BackingView::default() }),
            scan_age_s: Some(1.5),
            mapping: None,
            page_tables: None,
            numa: None,
            guest_pages: None,
            saved: SavedView::default(),
            work: None,
            notes: Vec::new(),
        }
    }

    pub(crate) fn identity(name: &str, uid: &str) -> Identity {
        Identity { namespace: "shop".into(), name: name.into(), uid: uid.into() }
    }

    pub(crate) fn pod(vmi: Option<VmiOfPod>) -> PodFacts {
        let identity = identity("virt-launcher-db-x", POD);
        PodFacts { identity, annotations: BTreeMap::new(), vmi, requested_gib: 0, has_ended: false }
    }

    pub(crate) fn vmi() -> VmiFacts {
        VmiFacts {
            identity: identity("db", "v-1"),
            annotations: BTreeMap::new(),
            memory: Some(4 << 30),
            has_pool_pages: false,
            is_migration_over: None,
            is_migrating: false,
            pods: vec![POD.into()],
        }
    }

    pub(crate) fn objects(pods: &[PodFacts], vmis: &[VmiFacts], vmi_api: VmiApi) -> Objects {
        let mut objects = Objects { vmi_api, ..Objects::default() };
        for pod in pods {
            objects.pods.take(Event::InitApply(pod.clone()), |pod| Some((pod.identity.uid.clone(), pod.clone())));
        }
        objects.pods.take(Event::<()>::InitDone, |()| None);
        for vmi in vmis {
            objects.vmis.take(Event::InitApply(vmi.clone()), |vmi| Some((vmi.identity.uid.clone(), vmi.clone())));
        }
        objects.vmis.take(Event::<()>::InitDone, |()| None);
        objects
    }

    const WITH_VMIS: VmiApi = VmiApi::Present { has_status: false };

    fn of(uid: Option<&str>, name: Option<&str>) -> Option<VmiOfPod> {
        Some(VmiOfPod { uid: uid.map(str::to_owned), name: name.map(str::to_owned) })
    }

    fn in_pod() -> String {
        format!("/kubepods/burstable/pod{POD}/c")
    }

    #[test]
    fn a_guest_of_a_pod_with_a_vmi_of_this_node_belongs_to_that_vmi() {
        for named in [of(Some("v-1"), None), of(None, Some("db")), of(Some("v-1"), Some("other"))] {
            let objects = objects(&[pod(named.clone())], &[vmi()], WITH_VMIS);
            let place = place(&guest("any", Some(&in_pod())), &objects);
            assert_eq!(place, Some(Place::Vmi(Box::new(vmi()), Some(Box::new(pod(named))))));
        }
    }

    #[test]
    fn a_guest_of_a_pod_without_a_vmi_belongs_to_the_pod() {
        let facts = objects(&[pod(None)], &[vmi()], WITH_VMIS);
        let guest = guest("shop_db", Some(&in_pod()));
        assert_eq!(place(&guest, &facts), Some(Place::Pod(Box::new(pod(None)))), "its name does not count");
        let named = pod(of(Some("v-1"), None));
        let without = objects(std::slice::from_ref(&named), &[], VmiApi::Absent);
        assert_eq!(place(&guest, &without), Some(Place::Pod(Box::new(named))), "the cluster has no VMIs");
    }

    #[test]
    fn while_a_migration_has_not_arrived_the_vmi_is_elsewhere() {
        for named in [of(Some("v-2"), None), of(None, Some("web"))] {
            let facts = pod(named);
            let objects = objects(std::slice::from_ref(&facts), &[vmi()], WITH_VMIS);
            let place = place(&guest("shop_web", Some(&in_pod())), &objects);
            assert_eq!(place, Some(Place::Elsewhere(Box::new(facts))));
        }
    }

    #[test]
    fn a_label_cannot_claim_a_vmi_of_another_namespace() {
        let mut other = pod(of(Some("v-1"), Some("db")));
        other.identity.namespace = "evil".into();
        let objects = objects(std::slice::from_ref(&other), &[vmi()], WITH_VMIS);
        assert_eq!(place(&guest("shop_db", Some(&in_pod())), &objects), Some(Place::Elsewhere(Box::new(other))));
    }

    #[test]
    fn a_name_counts_for_qemu_guests_outside_of_pods_alone() {
        let objects = objects(&[pod(None)], &[vmi()], WITH_VMIS);
        let expected = Some(Place::Vmi(Box::new(vmi()), Some(Box::new(pod(None)))));
        for outside in [None, Some("/machine.slice/db.scope")] {
            assert_eq!(place(&guest("shop_db", outside), &objects), expected);
            assert_eq!(place(&guest("shop_web", outside), &objects), None);
            assert_eq!(place(&guest("db", outside), &objects), None);
        }
        let of_another = VmView { vmm: Vmm::Other, ..guest("shop_db", None) };
        assert_eq!(place(&of_another, &objects), None);
        let unknown_pod = "/kubepods/podffffffff-ffff-ffff-ffff-ffffffffffff/c";
        assert_eq!(place(&guest("shop_db", Some(unknown_pod)), &objects), None, "its pod is not of this node");
    }
}
