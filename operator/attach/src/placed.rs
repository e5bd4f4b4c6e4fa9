//! NUMA nodes that a guest's memory backends name: QEMU's `host-nodes=` and `policy=`, which libvirt writes for
//! `<numatune>`.
//!
//! ```text
//!   query-memdev, or -object memory-backend-…  ─▶ a policy for each backend ─▶ Placed: what managers may choose
//!                                                                              and sentences for people
//! ```

use serde_json::Value;
use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy};
use wideleaf_policies::NodeSet;

/// What the policies of a guest's memory say together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Nodes to which all of the memory is bound; `None`: it may be anywhere.
    pub bound_to: Option<NodeSet>,
    /// Whether they say where each page lies, so that managers have no choice: they differ, or pages interleave.
    pub fixes_nodes: bool,
    /// The policies, a sentence for each backend, where they are not one bound set.
    pub sentences: Vec<String>,
}

impl Placed {
    /// The placement by the policies of these backends, each with its name. One may come several times, as for RAM in
    /// several pieces.
    pub fn of<'a>(backends: impl Iterator<Item = (&'a str, Option<NodePolicy>)>) -> Placed {
        let mut known: Vec<(&str, Option<NodePolicy>)> = Vec::new();
        for backend in backends {
            if !known.contains(&backend) {
                known.push(backend);
            }
        }
        let policies = || known.iter().map(|(_, policy)| *policy);
        let Some(first) = policies().next() else { return Placed::default() };
        let is_one = policies().all(|policy| policy == first);
        let bound: Option<Vec<NodeSet>> = policies().map(bound_nodes).collect();
        let bound_to = bound.map(|sets| sets.iter().fold(NodeSet::EMPTY, |all, nodes| all.union(nodes)));
        let takes_turns = first.is_some_and(|policy| policy.mode == MemoryMode::Interleave);
        let is_one_bound_set = is_one && bound_to.is_some();
        let sentence = |(name, policy): &(&str, Option<NodePolicy>)| policy.map(|policy| sentence(name, &policy));
        Placed {
            bound_to,
            fixes_nodes: !is_one || takes_turns,
            sentences: known.iter().filter(|_| !is_one_bound_set).filter_map(sentence).collect(),
        }
    }
}

fn bound_nodes(policy: Option<NodePolicy>) -> Option<NodeSet> {
    policy.filter(|policy| policy.mode == MemoryMode::Bind).map(|policy| policy.nodes)
}

fn sentence(name: &str, policy: &NodePolicy) -> String {
    let nodes = format!("node{} {}", if policy.nodes.len() == 1 { "" } else { "s" }, policy.nodes);
    let how = match policy.mode {
        MemoryMode::Bind => format!("comes from {nodes} alone"),
        MemoryMode::Preferred => format!("comes from {nodes} as long as there is some"),
        MemoryMode::Interleave => format!("comes from {nodes} in turn"),
    };
    let mode = policy.mode.name();
    format!("its memory {name} {how} (QEMU's host-nodes= with policy={mode}; libvirt's <numatune>)")
}

/// Policy of a backend with these values of `host-nodes`, each a list, and this `policy`; `None` for the kernel's own.
pub(crate) fn policy<'a>(host_nodes: impl Iterator<Item = &'a str>, policy: Option<&str>) -> Option<NodePolicy> {
    let mode = MemoryMode::by_name(policy?)?;
    let sets: Option<Vec<NodeSet>> = host_nodes.map(|list| list.parse().ok()).collect();
    let nodes = sets?.iter().fold(NodeSet::EMPTY, |all, nodes| all.union(nodes));
    (!nodes.is_empty()).then_some(NodePolicy { mode, nodes })
}

/// Policy of the backend with that name in QEMU's answer to `query-memdev`.
pub(crate) fn policy_of(backends: &Value, name: &str) -> Option<NodePolicy> {
    let backend = backends.as_array()?.iter().find(|backend| backend["id"].as_str() == Some(name))?;
    let nodes: Vec<String> = backend["host-nodes"].as_array()?.iter().map(Value::to_string).collect();
    policy(nodes.iter().map(String::as_str), backend["policy"].as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(mode: MemoryMode, nodes: &str) -> Option<NodePolicy> {
        Some(NodePolicy { mode, nodes: nodes.parse().expect("a list") })
    }

    fn placed(backends: &[(&str, Option<NodePolicy>)]) -> (Option<String>, bool, usize) {
        let Placed { bound_to, fixes_nodes, sentences } = Placed::of(backends.iter().copied());
        (bound_to.map(|nodes| nodes.to_string()), fixes_nodes, sentences.len())
    }

    #[test]
    fn memory_that_one_policy_binds_is_bound_and_parts_that_differ_have_fixed_nodes() {
        use MemoryMode::{Bind, Interleave, Preferred};
        let (first, second) = (of(Bind, "0"), of(Bind, "1"));
        assert_eq!(placed(&[]), (None, false, 0));
        assert_eq!(placed(&[("ram", None), ("dimm", None)]), (None, false, 0));
        assert_eq!(placed(&[("ram", first), ("ram", first)]), (Some("0".into()), false, 0));
        assert_eq!(placed(&[("a", first), ("b", second)]), (Some("0-1".into()), true, 2));
        assert_eq!(placed(&[("a", first), ("dimm", None)]), (None, true, 1));
        assert_eq!(placed(&[("ram", of(Interleave, "0-1"))]), (None, true, 1));
        assert_eq!(placed(&[("ram", of(Preferred, "1"))]), (None, false, 1));
    }

    #[test]
    fn a_sentence_names_the_backend_the_nodes_and_the_option() {
        let said = |mode, nodes| Placed::of([("m1", of(mode, nodes)), ("m2", None)].into_iter()).sentences;
        assert_eq!(
            said(MemoryMode::Bind, "1"),
            ["its memory m1 comes from node 1 alone (QEMU's host-nodes= with policy=bind; libvirt's <numatune>)"]
        );
        assert!(said(MemoryMode::Preferred, "1")[0].contains("from node 1 as long as there is some"));
        assert!(said(MemoryMode::Interleave, "0-1")[0].contains("from nodes 0-1 in turn"));
    }

    #[test]
    fn qemus_answer_has_the_policy_of_each_backend() {
        let answer = json!([
            {"id": "m0", "size": 1 << 30, "host-nodes": [0, 2], "policy": "interleave"},
            {"id": "m1", "size": 1 << 30, "host-nodes": [], "policy": "default"},
        ]);
        assert_eq!(policy_of(&answer, "m0"), of(MemoryMode::Interleave, "0,2"));
        assert_eq!((policy_of(&answer, "m1"), policy_of(&answer, "m2")), (None, None));
        assert_eq!(policy_of(&json!({}), "m0"), None);
    }

    #[test]
    fn a_policy_without_nodes_or_of_an_unknown_kind_is_ignored() {
        let of_lists = |lists: &[&str], mode| policy(lists.iter().copied(), mode);
        assert_eq!(of_lists(&["0", "2-3"], Some("bind")), of(MemoryMode::Bind, "0,2-3"));
        assert_eq!(of_lists(&[], Some("bind")), None);
        assert_eq!(of_lists(&["0"], Some("local")), None);
        assert_eq!(of_lists(&["0"], None), None);
        assert_eq!(of_lists(&["zero"], Some("bind")), None);
    }
}
