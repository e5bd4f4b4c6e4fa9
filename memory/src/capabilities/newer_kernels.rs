//! Rows about what newer kernels changed for large pages.
//!
//! ```text
//!   page_tables_freed   6.14   behaviour: one page in each of some windows, all dropped again; do page tables go too?
//!   giant_surplus       6.19   the limit of surplus pages of 1 GiB takes the number that it has
//!   khugepaged_mthp     7.2    khugepaged counts its collapses to sizes between 4 KiB and 2 MiB, size by size
//! ```

use std::fs;
use std::path::Path;

use wideleaf_policies::PageSize;

use super::Capability;
use crate::page_tables_freed::page_tables_freed;
use crate::pool::{HugetlbPools, MakingMethod, NodeMemory};
use crate::thp_settings::chosen_setting;

/// Counter of khugepaged by size, which came with collapse to these sizes ("mm/khugepaged: add per-order mTHP
/// collapse failure statistics"; Documentation/admin-guide/mm/transhuge.rst).
const COLLAPSE_COUNTER: &str = "stats/collapse_exceed_none_pte";

/// The rows; `root` contains `sys/` and `proc/`.
pub(super) fn rows(root: &Path) -> Vec<Capability> {
    vec![
        Capability::new(
            "page_tables_freed",
            "promotion by collapse alone: a huge page that is moved under a page table is split",
            page_tables_freed(root),
        ),
        Capability::new(
            "giant_surplus",
            "--make-giant-pages makes pages of 1 GiB by a larger nr_hugepages, which needs root as well",
            giant_surplus(&HugetlbPools::at(root)),
        ),
        Capability::new(
            "khugepaged_mthp",
            "khugepaged collapses to 2 MiB or not at all; the manager counts any smaller page as a base page",
            khugepaged_mthp(root),
        ),
    ]
}

fn giant_surplus(pools: &HugetlbPools) -> Result<String, String> {
    let size = PageSize::Giant1G;
    let made_by = pools.made_by(size).map_err(|error| error.to_string())?;
    let room = pools.room(None).map_err(|error| error.to_string())?;
    let most = room.iter().map(|node: &NodeMemory| node.pages_of_free_memory(size)).fold(0, u64::saturating_add);
    let most = format!("at most {most} pages fit in free memory; only trying shows how many are contiguous");
    match made_by {
        MakingMethod::Surplus => Ok(format!("nr_overcommit_hugepages takes a limit for 1 GiB; {most}")),
        MakingMethod::Growth => Err(format!("nr_overcommit_hugepages takes no limit for 1 GiB (EINVAL); {most}")),
    }
}

/// Sizes below 2 MiB to which khugepaged may collapse, with their settings.
fn khugepaged_mthp(root: &Path) -> Result<String, String> {
    let folder = root.join("sys/kernel/mm/transparent_hugepage");
    let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let size = |name: &str| name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok();
    let mut sizes: Vec<u64> = entries.filter_map(|entry| size(entry.ok()?.file_name().to_str()?)).collect();
    sizes.sort_unstable();
    let of = |size: u64| folder.join(format!("hugepages-{size}kB"));
    let smaller = sizes.into_iter().filter(|size| *size < PageSize::Huge2M.bytes().get() >> 10);
    let counted: Vec<u64> = smaller.filter(|size| of(*size).join(COLLAPSE_COUNTER).exists()).collect();
    if counted.is_empty() {
        return Err("khugepaged counts no collapse to a size below 2 MiB".to_owned());
    }
    let is_on = |size: &u64| chosen_setting(&of(*size).join("enabled")).is_ok_and(|setting| setting != "never");
    let on: Vec<String> = counted.iter().filter(|size| is_on(size)).map(|size| format!("{size} KiB")).collect();
    Ok(match on.as_slice() {
        [] => "khugepaged could collapse to sizes below 2 MiB; none is switched on".to_owned(),
        on => format!("khugepaged may collapse to {}; the manager counts them as base pages", on.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::{FakeKernel, FakeNode, State};
    use std::path::PathBuf;

    #[test]
    fn the_limit_of_surplus_giants_is_asked_without_a_change() {
        let node = FakeNode { whole: 3, ..FakeNode::default() };
        for has_giant_surplus in [false, true] {
            let state =
                State { nodes: vec![node], overcommit: 2, is_giant: true, has_giant_surplus, ..State::default() };
            let kernel = FakeKernel::new(state.clone());
            let found = giant_surplus(&kernel.pools());
            let text = found.clone().unwrap_or_else(|why| why);
            assert!(text.contains("at most 3 pages fit in free memory"), "{text}");
            assert_eq!((found.is_ok(), kernel.state()), (has_giant_surplus, state));
        }
        let kernel = FakeKernel::new(State { nodes: vec![node], is_giant: true, ..State::default() });
        kernel.refuse_writes_to("nr_overcommit_hugepages");
        let why = giant_surplus(&kernel.pools()).expect_err("not root");
        assert!(why.starts_with("cannot write ") && why.ends_with("takes root and a writable /sys"), "{why}");
    }

    /// A tree with these sizes in KiB, with or without khugepaged's counter, and their settings.
    fn thp_tree(sizes: &[(u64, bool, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().expect("a temporary folder");
        for (size, has_counter, enabled) in sizes {
            let folder: PathBuf = tree.path().join(format!("sys/kernel/mm/transparent_hugepage/hugepages-{size}kB"));
            fs::create_dir_all(folder.join("stats")).expect("a folder");
            fs::write(folder.join("enabled"), enabled).expect("a file");
            if *has_counter {
                fs::write(folder.join(COLLAPSE_COUNTER), "0\n").expect("a file");
            }
        }
        tree
    }

    #[test]
    fn khugepaged_collapses_to_the_sizes_that_it_counts_and_that_are_on() {
        let (never, always) = ("always inherit madvise [never]\n", "[always] inherit madvise never\n");
        let of = |sizes: &[(u64, bool, &str)]| khugepaged_mthp(thp_tree(sizes).path());
        let with = of(&[(64, true, always), (16, true, always), (32, true, never), (2048, true, always)]);
        let text = "khugepaged may collapse to 16 KiB, 64 KiB; the manager counts them as base pages";
        assert_eq!(with, Ok(text.into()));
        assert!(of(&[(64, true, never)]).expect("it could").ends_with("none is switched on"));
        assert!(of(&[(64, false, always), (2048, true, always)]).is_err(), "Linux 6.18 has the sizes alone");
        assert!(khugepaged_mthp(Path::new("/nowhere")).is_err());
    }
}
