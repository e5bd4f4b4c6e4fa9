//! The pod of a process, from the path of its control group.
//!
//! ```text
//!   cgroupfs   /kubepods/burstable/pod0f4a6b53-…/<container>
//!   systemd    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f4a6b53_….slice/crio-<container>.scope
//!   mixed      /system.slice/containerd.service/kubepods-burstable-pod0f4a6b53_….slice:cri-containerd:<container>
//! ```
//!
//! Source: kubelet, `pkg/kubelet/cm/cgroup_manager_linux.go` and `pkg/kubelet/cm/pod_container_manager_linux.go`. A pod
//! of the class Guaranteed has no folder of its class. A container can make control groups below its own, with any
//! names, so the first pod in a path counts.

/// Marks the kubelet's part of the tree, in both drivers.
const KUBEPODS: &str = "kubepods";

/// UID of the pod that has this control group, with hyphens; `None` outside of pods.
pub fn pod_uid(path: &str) -> Option<String> {
    let mut is_kubelets = false;
    for segment in path.split('/') {
        // `SLICE:RUNTIME:CONTAINER` of a runtime without systemd, under a parent that the kubelet names for systemd.
        let segment = segment.split(':').next().unwrap_or_default();
        let name = segment.strip_suffix(".slice").unwrap_or(segment);
        let names_kubelet = name.split('-').any(|part| part == KUBEPODS);
        is_kubelets |= names_kubelet;
        let uid = match name.strip_prefix("pod") {
            Some(uid) if is_kubelets => Some(uid),
            _ if names_kubelet => name.split_once("-pod").map(|(_, uid)| uid),
            _ => None,
        };
        if let Some(uid) = uid.and_then(known_form) {
            return Some(uid);
        }
    }
    None
}

/// A UID: of the API server, with hyphens that systemd's driver writes as underscores; or the hash of a static pod.
fn known_form(text: &str) -> Option<String> {
    let uid = text.replace('_', "-");
    let is_hex = |part: &str| part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let lengths: Vec<usize> = uid.split('-').map(str::len).collect();
    let is_uid = matches!(lengths[..], [8, 4, 4, 4, 12] | [32]) && uid.split('-').all(is_hex);
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10";

    #[test]
    fn both_drivers_all_classes_and_runtimes_are_known() {
        let slice = UID.replace('-', "_");
        let container = "3ffd2b6b2d0c4b0e9a1ac8f3be5f0d5b5a0b2f9b6f4a7c1d8e9f0a1b2c3d4e5f";
        let of_kind = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice";
        for path in [
            // cgroupfs: Guaranteed, Burstable, BestEffort; v1 and v2 have the same paths
            format!("/kubepods/pod{UID}/{container}"),
            format!("/kubepods/burstable/pod{UID}/{container}"),
            format!("/kubepods/besteffort/pod{UID}/{container}"),
            format!("/kubelet/kubepods/burstable/pod{UID}/{container}"),
            // systemd: containerd, CRI-O, Docker
            format!("/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{container}.scope"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/crio-{container}.scope"
            ),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{slice}.slice/docker-{container}.\
                 scope"
            ),
            format!("{of_kind}/kubelet-kubepods-burstable-pod{slice}.slice/cri-containerd-{container}.scope"),
            // containers with control groups of their own below
            format!("/kubepods.slice/kubepods-pod{slice}.slice/crio-{container}.scope/container"),
            format!("/kubepods/pod{UID}/{container}/machine/qemu-1-default_db.libvirt-qemu/emulator"),
            // containerd without systemd under a parent with systemd's names
            format!("/system.slice/containerd.service/kubepods-burstable-pod{slice}.slice:cri-containerd:{container}"),
            format!("/kubepods-burstable-pod{slice}.slice:cri-containerd:{container}"),
            // the pod itself
            format!("/kubepods/burstable/pod{UID}"),
        ] {
            assert_eq!(pod_uid(&path).as_deref(), Some(UID), "{path}");
        }
        let hash = "84c98d1b3a0f4a6b539ad54b9e8f2d3c";
        assert_eq!(
            pod_uid(&format!("/kubepods/burstable/pod{hash}/{container}")).as_deref(),
            Some(hash),
            "static pods"
        );
    }

    #[test]
    fn a_control_group_outside_of_pods_has_none() {
        for path in [
            "",
            "/",
            "/user.slice/user-1000.slice/session-1.scope",
            "/machine.slice/machine-qemu\\x2d1\\x2ddb.scope",
            "/machine/qemu-2-t1.libvirt-qemu",
            "/kubepods",
            "/kubepods/burstable",
            "/kubepods/pod",
            "/kubepods/podcast/x",
            "/kubepods/pod0f4a6b53-9ad5-4b9e-8f2d",
            "/kubepods/pod0F4A6B53-9AD5-4B9E-8F2D-3C1D5A8F2B10",
            "/system.slice/pod0f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10",
        ] {
            assert_eq!(pod_uid(path), None, "{path:?}");
        }
    }

    #[test]
    fn a_container_cannot_claim_another_pod_by_the_name_of_a_group_below_its_own() {
        let other = "ffffffff-ffff-ffff-ffff-ffffffffffff";
        let path = format!("/kubepods/pod{UID}/c/kubepods/pod{other}/d");
        assert_eq!(pod_uid(&path).as_deref(), Some(UID));
    }
}
