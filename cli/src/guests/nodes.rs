//! A VM by NUMA node, as text: shown only on hosts with several nodes.

use std::fmt::Write as _;

use comfy_table::Cell;
use wideleaf_control::view::{NodeView, NumaView, VmView};

use super::amounts::{UNKNOWN, bytes, known_bytes, percent};
use crate::table::{number, table};

/// Share of its memory that is local, as a cell of `wideleaf list`.
pub fn local(vm: &VmView) -> String {
    let share = vm.numa.as_ref().and_then(|numa| numa.local_share);
    share.map_or(UNKNOWN.to_owned(), |share| percent(Some(share)))
}

/// One line: the local share, and the memory on each node.
pub fn line(numa: &NumaView) -> String {
    let local = numa
        .local_share
        .map_or("local share unknown (no vCPU found)".to_owned(), |share| format!("{} local", percent(Some(share))));
    let on = numa.nodes.iter().map(|node| format!("node {}: {}", node.node, bytes(node.memory)));
    let unknown = (numa.unknown > 0).then(|| format!("not asked yet: {}", bytes(numa.unknown)));
    [local].into_iter().chain(on).chain(unknown).collect::<Vec<_>>().join(", ")
}

/// Table of `wideleaf info`: a row for each node, and what limits the VM.
pub fn write(out: &mut String, numa: &NumaView) {
    let header =
        ["node", "vCPUs", "memory", "on 2m", "on 1g", "free 2m", "free 1g", "may use", "host's tables", "KVM's tables"];
    let mut rows = table(&header);
    for node in &numa.nodes {
        rows.add_row(row(node));
    }
    let _ = writeln!(out, "\n{rows}");
    out.push_str("  free: blocks of 2 MiB and pages of the pool of 1 GiB; page tables: of all processes and all VMs\n");
    for sentence in numa.explanation() {
        let _ = writeln!(out, "  {}", wideleaf_run::text::clean(&sentence));
    }
}

fn row(node: &NodeView) -> [Cell; 10] {
    [
        number(node.node),
        number(node.vcpus),
        number(bytes(node.memory)),
        number(bytes(node.huge_2m)),
        number(bytes(node.giant_1g)),
        number(node.free_2m),
        number(node.free_1g),
        Cell::new(if node.may_use { "yes" } else { "no" }),
        number(known_bytes(node.page_tables)),
        number(known_bytes(node.second_level_tables)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numa() -> NumaView {
        let node = |node, vcpus, memory, free_2m| NodeView {
            node,
            vcpus,
            memory,
            free_2m,
            may_use: node == 1,
            ..NodeView::default()
        };
        NumaView {
            nodes: vec![node(0, 0, 38 << 20, 512), node(1, 2, 62 << 20, 0)],
            unknown: 4 << 20,
            local_share: Some(6_200),
            limits: vec!["its cpuset permits memory of node 1 alone".into()],
        }
    }

    #[test]
    fn the_line_has_the_local_share_and_the_memory_of_each_node() {
        assert_eq!(line(&numa()), "62.0 % local, node 0: 38 MiB, node 1: 62 MiB, not asked yet: 4 MiB");
        let without = NumaView { local_share: None, unknown: 0, ..numa() };
        assert_eq!(line(&without), "local share unknown (no vCPU found), node 0: 38 MiB, node 1: 62 MiB");
    }

    #[test]
    fn the_table_has_a_row_for_each_node_and_names_shortage_and_limit() {
        let mut out = String::new();
        write(&mut out, &numa());
        assert!(
            out.contains("node 1 has 0 free blocks of 2 MiB; node 0 has 512: its limits keep it from those"),
            "{out}"
        );
        assert!(out.contains("its cpuset permits memory of node 1 alone"), "{out}");
        assert_eq!(out.lines().filter(|line| line.contains("MiB") && line.contains('?')).count(), 2, "{out}");
    }
}
