//! Rows about NUMA nodes: none on a host with one node, except for whether the kernel tells of page tables.

use std::path::Path;

use wideleaf_policies::{Bytes, PageSize};

use super::{Capability, one_window};
use crate::host::{Host, linux::LinuxHost};
use crate::numa::seen::{NodeSeen, NodesSeen};

/// Consequence without an answer of `move_pages(2)`.
const UNSEEN: &str = "where guests' memory lies is not known: no window is placed or moved by node";

pub(super) fn rows(root: &Path) -> Vec<Capability> {
    let nodes = match NodesSeen::below(root) {
        Ok(nodes) if nodes.are_several() => nodes,
        Ok(_) => return Vec::new(),
        Err(why) => return vec![Capability::new("numa", UNSEEN, Err(why.to_string()))],
    };
    let each: Vec<String> = nodes.nodes.iter().map(|node| node_text(node, &nodes)).collect();
    vec![
        Capability::new("numa", UNSEEN, Ok(each.join("; "))),
        Capability::new("page_nodes", UNSEEN, probe_page_nodes()),
        Capability::new(
            "page_tables_by_node",
            "where page tables lie is not shown",
            tables_text(&nodes).ok_or_else(|| "no PageTables in the nodes' meminfo".to_owned()),
        ),
    ]
}

fn node_text(node: &NodeSeen, nodes: &NodesSeen) -> String {
    let pools = node.pools.iter().map(|pool| format!(", {} of {} pages of {} free", pool.free, pool.total, pool.size));
    let farthest = nodes.nodes.iter().filter_map(|other| nodes.distance(node.id, other.id)).max();
    let distance = farthest.map_or(String::new(), |distance| format!(", distance up to {distance}"));
    let cpus = if node.cpus.is_empty() { "no CPU".to_owned() } else { format!("CPUs {}", node.cpus) };
    format!(
        "{}: {cpus}, {} of {} free, {} blocks of 2 MiB free{}{distance}",
        node.id,
        node.free,
        node.total,
        node.free_2m,
        pools.collect::<String>()
    )
}

fn tables_text(nodes: &NodesSeen) -> Option<String> {
    let of = |node: &NodeSeen| {
        let second_level = node.second_level_tables.map_or("unknown".to_owned(), |bytes| bytes.to_string());
        Some(format!("{}: {}, KVM's {second_level}", node.id, node.page_tables?))
    };
    let each: Vec<String> = nodes.nodes.iter().filter(|node| node.total > Bytes::ZERO).filter_map(of).collect();
    (!each.is_empty()).then(|| format!("of the whole host, no number for one guest: {}", each.join("; ")))
}

/// Asks for the node of a page of our own.
fn probe_page_nodes() -> Result<String, String> {
    let ram = one_window(crate::backing::BackingKind::Anon)?;
    let host = LinuxHost::open().map_err(|error| error.to_string())?;
    let mut nodes = Vec::new();
    host.nodes_of(&[ram.base(), ram.base() + PageSize::Base4K.bytes()], &mut nodes)
        .map_err(|error| error.to_string())?;
    match nodes.as_slice() {
        [Some(node), _] => Ok(format!("move_pages: a new page is on {node}")),
        _ => Err("move_pages does not tell the node of a present page".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::two_nodes::TWO_NODES;

    fn root_with(files: impl Iterator<Item = (&'static str, &'static str)>) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let file = root.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("folders");
            std::fs::write(file, text).expect("a file");
        }
        root
    }

    #[test]
    fn a_host_with_two_nodes_has_rows_and_one_with_one_node_has_none() {
        let rows_of = |root: &tempfile::TempDir| rows(root.path());
        let two = rows_of(&root_with(TWO_NODES.all()));
        assert_eq!(two.iter().map(|row| row.name).collect::<Vec<_>>(), ["numa", "page_nodes", "page_tables_by_node"]);
        assert!(two[0].detail.contains("node 1: CPUs 2-3,6-7"), "{}", two[0].detail);
        assert!(two[0].detail.contains("0 blocks of 2 MiB free, 0 of 64 pages of 2m free"), "{}", two[0].detail);
        assert!(two[2].detail.contains("KVM's 512 KiB"), "{}", two[2].detail);
        let one = TWO_NODES.all().map(|(path, text)| (path, if path.ends_with("/online") { "0\n" } else { text }));
        assert!(rows_of(&root_with(one)).is_empty());
        assert!(rows_of(&root_with(std::iter::empty())).is_empty());
    }

    #[test]
    fn a_node_that_cannot_be_read_is_a_row_with_the_reason() {
        let without = TWO_NODES.all().filter(|(path, _)| !path.ends_with("node1/meminfo"));
        let rows = rows(root_with(without).path());
        assert_eq!((rows.len(), rows[0].is_available), (1, false));
    }
}
