//! Files of a pool with arbitrary contents: errors, never a panic, and no write without a parsed number.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use wideleaf_memory::pool::{HugetlbPools, OnShortage, Release, Request};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};

const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
const NODE: &str = "sys/devices/system/node/node0";
const NUMBERS: [&str; 5] =
    ["nr_hugepages", "free_hugepages", "resv_hugepages", "surplus_hugepages", "nr_overcommit_hugepages"];
const TEXTS: [&str; 7] = [
    "proc/buddyinfo",
    "proc/pagetypeinfo",
    "proc/mounts",
    "proc/7/status",
    "proc/7/smaps",
    "proc/7/comm",
    "sys/devices/system/node/node0/meminfo",
];

/// Contents of a number's file: mostly numbers, also those at which arithmetic overflows.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0u64..100).prop_map(|n| format!("{n}\n")),
        2 => Just(u64::MAX.to_string()),
        1 => any::<u64>().prop_map(|n| n.to_string()),
        1 => "\\PC{0,12}",
    ]
}

/// Lines made of words that such files have, with numbers that do not fit.
fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        4 => any::<u64>().prop_map(|n| n.to_string()),
        2 => Just(u64::MAX.to_string()),
        6 => prop::sample::select(vec![
            "Node 0, zone Normal", "Node 0, zone Normal, type Movable", "Page block order: 9",
            "\n", "\n", " ", " kB\n", ">100000",
            "Number of blocks type Unmovable Movable Reclaimable\n", "HugetlbPages:", "KernelPageSize:  2048 kB\n",
            "Private_Hugetlb:  ", "Shared_Hugetlb: ", "Active(file): ", "Inactive(file): ",
            "none /a\\040b hugetlbfs pagesize=",
        ])
        .prop_map(str::to_owned),
        1 => "\\PC{0,8}",
    ];
    prop::collection::vec(word, 0..40).prop_map(|words| words.join(" "))
}

fn put(root: &Path, name: &str, text: &str) {
    fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
    fs::write(root.join(name), text).unwrap();
}

/// Calls every query of a pool. Any answer is accepted.
fn ask_everything(pools: &HugetlbPools, pages: u64, node: Option<u32>) {
    let size = PageSize::Huge2M;
    let texts = [
        pools.status(size).map(|status| format!("{status:?} {}", status.available())),
        pools.check(size, mib(2)).map(|()| String::new()),
        pools.check(size, Bytes::new(u64::MAX)).map(|()| String::new()),
        pools.room(node).map(|room| room.iter().map(ToString::to_string).collect()),
        pools.mounts().map(|mounts| format!("{mounts:?}")),
        pools.plan_release(&Release { size, pages: Some(pages), node }, 0).map(|plan| format!("{plan:?}")),
        pools.release(&Release { size, pages: None, node }).map(|returned| format!("{returned:?}")),
        pools.lease(size, pages).map(|lease| format!("{lease:?}")),
    ];
    texts.into_iter().filter_map(Result::err).for_each(|error| assert!(!error.to_string().is_empty()));
    assert!(!format!("{:?} {}", pools.holders(), pools.holders().pages(size)).is_empty());
    for on_shortage in [OnShortage::Refuse, OnShortage::TakeFewer] {
        let request = Request { size, pages, node, on_shortage };
        let planned = pools.plan_reserve(&request).map(|plan| plan.after);
        match pools.reserve(&request) {
            Ok(mut granted) => {
                assert!(granted.pages() <= pages && planned.is_ok());
                let _ = pools.give_back(&mut granted);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_tree_is_answered(
        numbers in prop::collection::vec(number(), 8),
        texts in prop::collection::vec(text(), TEXTS.len()),
        absent in prop::option::of(0usize..8),
        pages in prop_oneof![0u64..50, Just(u64::MAX)],
        node in prop_oneof![Just(None), (0u32..2).prop_map(Some)],
    ) {
        let tree = tempfile::tempdir().unwrap();
        let in_pool = NUMBERS.iter().map(|name| format!("{POOL}/{name}"));
        let on_node = ["nr_hugepages", "free_hugepages", "surplus_hugepages"].iter();
        let on_node = on_node.map(|name| format!("{NODE}/hugepages/hugepages-2048kB/{name}"));
        for (i, (name, number)) in in_pool.chain(on_node).zip(&numbers).enumerate() {
            if absent != Some(i) {
                put(tree.path(), &name, number);
            }
        }
        TEXTS.iter().zip(&texts).for_each(|(name, text)| put(tree.path(), name, text));
        ask_everything(&HugetlbPools::at(tree.path()), pages, node);
    }
}

#[test]
fn bytes_that_are_not_text_are_malformed() {
    let tree = tempfile::tempdir().unwrap();
    NUMBERS.iter().for_each(|name| put(tree.path(), &format!("{POOL}/{name}"), "0\n"));
    fs::write(tree.path().join(POOL).join("free_hugepages"), [0xff, 0xfe]).unwrap();
    let error = HugetlbPools::at(tree.path()).status(PageSize::Huge2M).unwrap_err().to_string();
    assert!(error.contains("free_hugepages: expected a number"), "{error}");
}
