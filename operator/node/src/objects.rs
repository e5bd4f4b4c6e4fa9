//! The parts of pods and VMIs that count for the agent. All else of an object is dropped when it arrives, so that a
//! node with many pods costs little memory.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;

use crate::PREFIX;
use crate::annotations::Annotations;
use crate::figures::RESOURCE;

/// Label of a VMI with the node that runs it (KubeVirt, `NodeNameLabel`).
pub const NODE_LABEL: &str = "kubevirt.io/nodeName";

/// Label of a pod with the UID of its VMI (KubeVirt, `CreatedByLabel`).
pub(crate) const CREATED_BY: &str = "kubevirt.io/created-by";

/// Annotation of a pod with the name of its VMI (KubeVirt, `DomainAnnotation`).
const DOMAIN: &str = "kubevirt.io/domain";

/// Label of a pod with the name of its VMI (KubeVirt, deprecated there).
const VM_NAME: &str = "vm.kubevirt.io/name";

/// Kind of a VMI.
pub const VMI_KIND: &str = "VirtualMachineInstance";

/// Group and version of VMIs.
pub const VMI_API: &str = "kubevirt.io/v1";

/// Plural of VMIs in paths.
pub const VMI_PLURAL: &str = "virtualmachineinstances";

/// The resource of VMIs.
pub fn vmi_resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", VMI_KIND);
    ApiResource::from_gvk_with_plural(&kind, VMI_PLURAL)
}

/// Name and identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// UID, which no later object of that name has.
    pub uid: String,
}

impl Identity {
    fn of(metadata: &ObjectMeta) -> Option<Identity> {
        let ObjectMeta { namespace, name, uid, .. } = metadata;
        Some(Identity { namespace: namespace.clone()?, name: name.clone()?, uid: uid.clone()? })
    }
}

/// VMI that a pod names as its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmiOfPod {
    /// UID of the VMI, where the pod has it.
    pub uid: Option<String>,
    /// Name of the VMI in the pod's namespace, where the pod has it.
    pub name: Option<String>,
}

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Identity of the pod.
    pub identity: Identity,
    /// Its annotations of this project.
    pub annotations: Annotations,
    /// Its VMI; `None` for a pod without one.
    pub vmi: Option<VmiOfPod>,
    /// GiB of [`RESOURCE`] that its containers request.
    pub requested_gib: u64,
    /// Whether all of its containers have ended.
    pub has_ended: bool,
}

impl PodFacts {
    /// The facts of a pod; `None` without an identity, which the API server always gives.
    pub fn of(pod: &Pod) -> Option<PodFacts> {
        let metadata = &pod.metadata;
        let label = |name: &str| metadata.labels.as_ref().and_then(|labels| labels.get(name)).cloned();
        let annotation = |name: &str| metadata.annotations.as_ref().and_then(|of| of.get(name)).cloned();
        let owner = metadata.owner_references.iter().flatten().find(|owner| owner.kind == VMI_KIND);
        let vmi = VmiOfPod {
            uid: label(CREATED_BY).or_else(|| owner.map(|owner| owner.uid.clone())),
            name: owner.map(|owner| owner.name.clone()).or_else(|| annotation(DOMAIN)).or_else(|| label(VM_NAME)),
        };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        Some(PodFacts {
            identity: Identity::of(metadata)?,
            annotations: ours(metadata),
            vmi: (vmi != VmiOfPod::default()).then_some(vmi),
            requested_gib: requested_gib(pod),
            has_ended: matches!(phase, Some("Succeeded" | "Failed")),
        })
    }
}

/// Requests of all containers together. Containers that run before the others (init containers) are not added.
fn requested_gib(pod: &Pod) -> u64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref()?.get(RESOURCE));
    requests.filter_map(|quantity| quantity_bytes(&quantity.0)).fold(0, u64::saturating_add)
}

/// A VirtualMachineInstance (VMI).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmiFacts {
    /// Identity of the VMI.
    pub identity: Identity,
    /// Its annotations of this project.
    pub annotations: Annotations,
    /// Memory of the guest in bytes; `None` where neither the guest's memory nor a request is given.
    pub memory: Option<u64>,
    /// Whether its memory comes from hugetlb pages of the kubelet.
    pub has_pool_pages: bool,
    /// Whether its latest migration is over, with or without success; `None` where there was none.
    pub is_migration_over: Option<bool>,
    /// Whether its guest migrates now: the migration has begun, and is not over.
    pub is_migrating: bool,
    /// UIDs of its pods. During a migration there are two.
    pub pods: Vec<String>,
}

impl VmiFacts {
    /// The facts of a VMI as the API server or virt-handler has it; `None` without an identity.
    pub fn of(vmi: &DynamicObject) -> Option<VmiFacts> {
        let (spec, status) = (&vmi.data["spec"]["domain"], &vmi.data["status"]);
        let quantity = |value: &Value| value.as_str().and_then(quantity_bytes).or_else(|| value.as_u64());
        let migration = &status["migrationState"];
        let is_set = |name: &str| migration[name].as_bool().unwrap_or(false);
        let is_over = is_set("completed") || is_set("failed");
        Some(VmiFacts {
            identity: Identity::of(&vmi.metadata)?,
            annotations: ours(&vmi.metadata),
            memory: quantity(&spec["memory"]["guest"]).or_else(|| quantity(&spec["resources"]["requests"]["memory"])),
            has_pool_pages: spec["memory"]["hugepages"].is_object(),
            is_migration_over: migration.is_object().then_some(is_over),
            is_migrating: migration["startTimestamp"].is_string() && !is_over,
            pods: status["activePods"].as_object().map(|pods| pods.keys().cloned().collect()).unwrap_or_default(),
        })
    }

    /// Name of its guest for libvirt and QEMU (KubeVirt, `VMINamespaceKeyFunc`).
    pub fn guest_name(&self) -> String {
        format!("{}_{}", self.identity.namespace, self.identity.name)
    }
}

fn ours(metadata: &ObjectMeta) -> Annotations {
    let all: Option<&BTreeMap<String, String>> = metadata.annotations.as_ref();
    let ours = all.into_iter().flatten().filter(|(name, _)| name.starts_with(PREFIX));
    ours.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A quantity of Kubernetes (`64Mi`, `1.5G`, `2e9`) as a whole number, rounded down; `None` for any other text, and for
/// negative ones. Source: apimachinery, `pkg/api/resource/quantity.go`.
pub fn quantity_bytes(text: &str) -> Option<u64> {
    const SUFFIXES: [(&str, f64); 14] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
    ];
    let text = text.trim();
    let scaled = SUFFIXES.iter().find_map(|(suffix, scale)| Some((text.strip_suffix(suffix)?, *scale)));
    let (number, scale) = scaled.unwrap_or((text, 1.0));
    let is_plain = number.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-'));
    let value = number.parse::<f64>().ok().filter(|_| is_plain)? * scale;
    (value.is_finite() && (0.0..1.8e19).contains(&value)).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities_of_all_forms_are_bytes() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("1024", Some(1024)),
            ("64Mi", Some(64 << 20)),
            ("1.5Gi", Some(3 << 29)),
            ("2G", Some(2_000_000_000)),
            ("2e9", Some(2_000_000_000)),
            ("1500m", Some(1)),
            ("1Ti", Some(1 << 40)),
            ("-1", None),
            ("", None),
            ("Gi", None),
            ("inf", None),
            ("NaN", None),
            ("1 Gi", None),
            ("1e30", None),
            ("0x10", None),
        ] {
            assert_eq!(quantity_bytes(text), bytes, "{text:?}");
        }
    }

    fn pod(metadata: Value, containers: Value) -> PodFacts {
        let mut metadata = metadata;
        metadata["name"] = "virt-launcher-db-x".into();
        metadata["namespace"] = "shop".into();
        metadata["uid"] = "p-1".into();
        let pod = json!({"metadata": metadata, "spec": {"containers": containers}});
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("it has an identity")
    }

    #[test]
    fn a_pod_names_its_vmi_by_label_owner_or_annotation() {
        let vmi = |metadata| pod(metadata, json!([])).vmi;
        let of = |uid: Option<&str>, name: Option<&str>| {
            Some(VmiOfPod { uid: uid.map(str::to_owned), name: name.map(str::to_owned) })
        };
        assert_eq!(vmi(json!({})), None);
        assert_eq!(vmi(json!({"labels": {CREATED_BY: "v-1"}})), of(Some("v-1"), None));
        let owner = json!([{"apiVersion": VMI_API, "kind": VMI_KIND, "name": "db", "uid": "v-1"}]);
        assert_eq!(vmi(json!({"ownerReferences": owner})), of(Some("v-1"), Some("db")));
        assert_eq!(vmi(json!({"annotations": {DOMAIN: "db"}})), of(None, Some("db")));
        assert_eq!(vmi(json!({"labels": {VM_NAME: "db"}})), of(None, Some("db")));
        let replicas = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "db", "uid": "r-1"}]);
        assert_eq!(vmi(json!({"ownerReferences": replicas})), None);
    }

    #[test]
    fn requests_of_containers_are_added_and_other_annotations_are_dropped() {
        let with = |gib: &str| json!({"name": "c", "resources": {"requests": {RESOURCE: gib, "memory": "9Gi"}}});
        let facts = pod(
            json!({"annotations": {"wideleaf.io/policy": "off", "other": "x"}}),
            json!([with("2"), with("3"), {"name": "side"}]),
        );
        assert_eq!(facts.requested_gib, 5);
        assert_eq!(facts.annotations.into_iter().collect::<Vec<_>>(), [("wideleaf.io/policy".into(), "off".into())]);
    }

    fn vmi(data: Value) -> VmiFacts {
        let mut vmi = data;
        vmi["metadata"] = json!({"name": "db", "namespace": "shop", "uid": "v-1"});
        VmiFacts::of(&serde_json::from_value(vmi).expect("an object")).expect("it has an identity")
    }

    #[test]
    fn the_memory_of_a_vmi_is_that_of_the_guest_else_the_request() {
        let of = |domain: Value| vmi(json!({"spec": {"domain": domain}}));
        assert_eq!(of(json!({})).memory, None);
        let request = json!({"requests": {"memory": "1Gi"}});
        assert_eq!(of(json!({"resources": request})).memory, Some(1 << 30));
        let both = of(json!({"memory": {"guest": "2Gi"}, "resources": request}));
        assert_eq!((both.memory, both.has_pool_pages), (Some(2 << 30), false));
        assert!(of(json!({"memory": {"guest": "2Gi", "hugepages": {"pageSize": "2Mi"}}})).has_pool_pages);
    }

    #[test]
    fn a_vmi_has_a_migration_that_is_over_or_not() {
        let of = |state: Value| vmi(json!({"status": {"migrationState": state}})).is_migration_over;
        assert_eq!(vmi(json!({})).is_migration_over, None);
        assert_eq!(of(json!({"targetNode": "n2"})), Some(false));
        assert_eq!(of(json!({"completed": true})), Some(true));
        assert_eq!(of(json!({"failed": true})), Some(true));
        let migrates = |state: Value| vmi(json!({"status": {"migrationState": state}})).is_migrating;
        let began = "2026-11-30T02:00:00Z";
        assert!(migrates(json!({"startTimestamp": began, "completed": false})) && !migrates(json!({})));
        assert!(!migrates(json!({"startTimestamp": began, "failed": true})) && !migrates(json!({"targetNode": "n2"})));
        assert_eq!(vmi(json!({"status": {"activePods": {"p-1": "n1"}}})).pods, ["p-1"]);
    }
}
