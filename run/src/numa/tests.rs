//! Plans for a host with two nodes, of which the files are in a temporary folder: this machine is not asked.

use super::*;

use wideleaf_policies::units::{gib, mib};

use crate::spec::numa::NumaArg;

/// A host with two nodes of two CPUs: 8 GiB with 2 free and 1 to reclaim, and 4 GiB with 3 free; 512 pages of 2 MiB are
/// free in the pool of node 1. This process may run on CPUs 0 to 3.
fn host() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    let put = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    };
    let node = "sys/devices/system/node";
    put(&format!("{node}/online"), "0-1\n");
    put(&format!("{node}/has_memory"), "0-1\n");
    for (number, cpus, total, free, files, pages) in [(0, "0-1", 8, 2, 1, 0), (1, "2-3", 4, 3, 0, 512)] {
        put(&format!("{node}/node{number}/cpulist"), cpus);
        let line = |name: &str, gib: u64| format!("Node {number} {name} {} kB\n", gib << 20);
        let meminfo = [
            line("MemTotal:", total),
            line("MemFree:", free),
            line("Active(file):", files),
            line("Inactive(file):", 0),
            line("SReclaimable:", 0),
        ];
        put(&format!("{node}/node{number}/meminfo"), &meminfo.concat());
        put(&format!("{node}/node{number}/distance"), if number == 0 { "10 21" } else { "21 10" });
        for folder in [format!("{node}/node{number}/hugepages"), "sys/kernel/mm/hugepages".to_owned()] {
            let pool = format!("{folder}/hugepages-2048kB");
            let pages = if folder.starts_with("sys/kernel") { 512 } else { pages };
            for (name, value) in [("nr_hugepages", pages), ("free_hugepages", pages), ("surplus_hugepages", 0)] {
                put(&format!("{pool}/{name}"), &format!("{value}\n"));
            }
            put(&format!("{pool}/resv_hugepages"), "0\n");
            put(&format!("{pool}/nr_overcommit_hugepages"), "0\n");
        }
    }
    put("proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\n");
    root
}

fn backing(kind: BackingKind, page: PageSize) -> BackingConfig {
    BackingConfig::new(kind, page).expect("it exists")
}

fn anon() -> BackingConfig {
    backing(BackingKind::Anon, PageSize::Base4K)
}

fn spec(memory: Bytes, vcpus: u8, cells: &[&str]) -> RunSpec {
    let cell = |text: &&str| match text.parse().expect("it is a cell") {
        NumaArg::Cell(cell) => *cell,
        other => panic!("{other:?} is no cell"),
    };
    let numa = match cells {
        [] => NumaSpec::Auto,
        cells => NumaSpec::Cells(cells.iter().map(cell).collect()),
    };
    RunSpec { vcpus, numa, ..RunSpec::of_kernel("gups", "", memory, anon()) }
}

fn planned(spec: &RunSpec) -> NumaPlan {
    plan(spec, false, anon(), host().path()).expect("the host has it")
}

fn refused(spec: &RunSpec) -> String {
    plan(spec, false, anon(), host().path()).expect_err("it is refused").to_string()
}

fn nodes(plan: &NumaPlan) -> Vec<String> {
    let of = |part: &PlacedPart| format!("{} {}", part.policy.mode.name(), part.policy.nodes);
    plan.placement.parts().iter().map(of).collect()
}

#[test]
fn a_host_with_one_node_is_left_alone() {
    let root = host();
    std::fs::write(root.path().join("sys/devices/system/node/has_memory"), "0\n").expect("a file");
    let plan = plan(&spec(gib(1), 1, &[]), false, anon(), root.path()).expect("nothing to refuse");
    assert!(plan.placement.is_none() && plan.said.is_none() && !plan.binds_vcpus() && !plan.has_nodes);
}

#[test]
fn without_cells_the_node_with_the_most_room_is_preferred_and_said() {
    let plan = planned(&spec(gib(1), 2, &[]));
    // 3 GiB on either: the lower number.
    assert_eq!(nodes(&plan), ["preferred 0"]);
    assert_eq!(
        plan.said.as_deref(),
        Some(
            "wideleaf: the guest's memory comes from node 0 as long as that has some (3 GiB available for 1 GiB), and \
             its vCPUs run on its CPUs 0-1; --numa off leaves both to the kernel"
        )
    );
    assert!(plan.cells.is_empty(), "the guest sees no nodes");
    for (memory, vcpus) in [(gib(4), 1), (gib(1), 3)] {
        let plan = planned(&spec(memory, vcpus, &[]));
        assert!(plan.placement.is_none() && !plan.binds_vcpus());
        let said = plan.said.expect("it is said");
        assert!(said.contains("no node of this host has room") && said.contains("node 1 has 3 GiB available of 4 GiB"));
    }
    let off = RunSpec { numa: NumaSpec::Off, ..spec(gib(1), 1, &[]) };
    assert!(planned(&off).placement.is_none() && planned(&off).said.is_none());
}

#[test]
fn cells_get_their_nodes_and_vcpus_their_cpus() {
    let plan = planned(&spec(
        gib(4),
        2,
        &["id=0,cpus=0,memory=2G,host-nodes=0", "id=1,cpus=1,memory=2G,host-nodes=1,policy=preferred,host-cpus=3"],
    ));
    // The second cell lies over the hole.
    assert_eq!(nodes(&plan), ["bind 0", "preferred 1", "preferred 1"]);
    let cpus: Vec<String> = plan.vcpu_cpus.iter().map(ToString::to_string).collect();
    assert_eq!(cpus, ["0-1", "3"]);
    assert_eq!(plan.cells[0].distances, [10, 20]);
    assert_eq!(plan.only_node(), None);
}

#[test]
fn the_only_cell_has_all_that_is_not_said() {
    let plan = planned(&spec(gib(1), 2, &["id=0,host-nodes=[0-1],policy=interleave"]));
    assert_eq!((nodes(&plan), plan.cells[0].memory), (vec!["interleave 0-1".to_owned()], gib(1)));
    assert_eq!(plan.cells[0].vcpus.to_string(), "0-1");
    let plan = planned(&spec(gib(1), 2, &["id=0"]));
    assert!(plan.placement.is_none() && !plan.binds_vcpus(), "the guest's own cells alone");
}

#[test]
fn a_distance_holds_for_the_way_back_unless_that_has_its_own() {
    let with = |second: &str| {
        let second = format!("id=1,cpus=1,memory=512M{second}");
        let plan = planned(&spec(gib(1), 2, &["id=0,cpus=0,memory=512M,distances=[1@31]", &second]));
        plan.cells.into_iter().map(|cell| cell.distances).collect::<Vec<_>>()
    };
    assert_eq!(with(""), [[10, 31], [31, 10]]);
    assert_eq!(with(",distances=[0@41]"), [[10, 31], [41, 10]]);
}

#[test]
fn what_the_host_does_not_have_is_refused_with_the_numbers() {
    let one = |more: &str| refused(&spec(gib(1), 1, &[&format!("id=0,{more}")]));
    assert_eq!(one("host-nodes=3"), "cannot use --numa: cell 0 asks for node 3, and this host has memory on node 0-1");
    assert_eq!(
        one("host-nodes=1,host-cpus=9"),
        "cannot use --numa: cell 0 asks for CPU 9, and this process may run on CPU 0-3"
    );
    assert_eq!(
        refused(&spec(gib(4), 1, &["id=0,host-nodes=1"])),
        "cannot place cell 0 on node 1: 4 GiB are needed, and 3 GiB are available (node 1: 3 GiB free and 0 B to \
         reclaim of 4 GiB); use other nodes, less memory, or policy=preferred"
    );
    let preferred = spec(gib(4), 1, &["id=0,host-nodes=1,policy=preferred"]);
    assert_eq!(nodes(&planned(&preferred)), ["preferred 1", "preferred 1"]);
}

#[test]
fn cells_that_fit_one_by_one_and_not_together_are_refused() {
    let two = spec(gib(4), 2, &["id=0,cpus=0,memory=2G,host-nodes=1", "id=1,cpus=1,memory=2G,host-nodes=1"]);
    assert!(refused(&two).starts_with("cannot place cell 0-1 on node 1: 4 GiB are needed, and 3 GiB are available"));
    let all = spec(gib(7), 2, &["id=0,cpus=0,memory=3G,host-nodes=1", "id=1,cpus=1,memory=4G,host-nodes=0-1"]);
    assert!(refused(&all).starts_with("cannot place cell 0-1 on node 0-1: 7 GiB are needed, and 6 GiB are available"));
}

#[test]
fn the_pool_is_counted_by_node() {
    let backing = backing(BackingKind::Hugetlb, PageSize::Huge2M);
    let on = |node: u16, memory| {
        let text = format!("id=0,host-nodes={node}");
        let spec = RunSpec { backing, ..spec(memory, 1, &[&text]) };
        plan(&spec, false, backing, host().path())
    };
    let placed = on(1, gib(1)).expect("512 pages are free there");
    assert!(placed.must_populate(backing) && !placed.must_populate(anon()));
    assert_eq!(placed.only_node(), Some(NodeId(1)));
    let refused = on(0, mib(2)).expect_err("none is free there").to_string();
    assert!(refused.contains("2 MiB are needed, and 0 B are available (node 0: 0 B in free 2m pages of"), "{refused}");
}

#[test]
fn cells_that_contradict_the_run_are_refused() {
    let two = |first: &str, second: &str| refused(&spec(gib(1), 2, &[first, second]));
    assert_eq!(
        two("id=0,cpus=0,memory=1G", "id=1,cpus=1,memory=1G"),
        "cannot use --numa: the cells have 2 GiB together, and --memory is 1 GiB"
    );
    assert_eq!(
        two("id=0,cpus=0-1,memory=512M", "id=1,cpus=1,memory=512M"),
        "cannot use --numa: vCPU 1 is in cell 0 and in cell 1: name it once"
    );
    assert_eq!(
        two("id=0,cpus=0,memory=512M", "id=1,memory=512M"),
        "cannot use --numa: the vCPUs 1 of 2 are in no cell: name them with cpus="
    );
    assert!(two("id=0,memory=1G", "id=0").contains("there are two cells 0: number them from 0"));
    assert!(two("id=0,memory=1G", "id=2").contains("there is a cell 2 and no cell 1: number them from 0"));
    assert!(
        two("id=0,memory=1G,distances=[5@20]", "id=1").contains("has a distance to cell 5, and the last cell is 1")
    );
}

#[test]
fn a_vm_that_continues_keeps_its_cells_without_its_nodes() {
    let spec = spec(gib(1), 1, &["id=0,host-nodes=7"]);
    let plan = plan(&spec, true, anon(), host().path()).expect("it is said, not refused");
    assert_eq!((plan.cells.len(), plan.placement.is_none(), plan.binds_vcpus()), (1, true, false));
    let said = plan.said.expect("it is said");
    assert!(
        said.starts_with("wideleaf: cell 0 asks for node 7, and this host has memory on node 0-1; the guest keeps")
    );
}

#[test]
fn a_saved_vms_cells_may_get_other_nodes_but_not_other_memory() {
    let cells = |text: &str| spec(gib(1), 1, &[text]).numa;
    let saved = cells("id=0,cpus=0,memory=1G,host-nodes=0");
    check_same_cells(&saved, &cells("id=0,cpus=0,memory=1G,host-nodes=1,policy=preferred"))
        .expect("the guest sees the same");
    let why = check_same_cells(&saved, &cells("id=0,cpus=0,memory=512M")).expect_err("the guest knows its memory");
    assert!(why.to_string().starts_with("cannot give the VM other cells than it has (1)"), "{why}");
    assert!(check_same_cells(&NumaSpec::Auto, &NumaSpec::Off).is_ok());
}

/// Latencies of reads and writes from each cell to each, in nanoseconds; none for a cell without figures.
fn latencies_ns(plan: &NumaPlan) -> Vec<Vec<[u16; 2]>> {
    let of = |access: &wideleaf_vmm::cells::Access| [access.read_latency_ns, access.write_latency_ns];
    plan.cells.iter().map(|cell| cell.access.iter().map(of).collect()).collect()
}

#[test]
fn written_figures_hold_for_the_way_back_unless_that_has_its_own() {
    let with = |second: &str| {
        let second = format!("id=1,cpus=1,memory=512M{second}");
        planned(&spec(gib(1), 2, &["id=0,cpus=0,memory=512M,latencies=[0@90,1@140],bandwidths=[0@4]", &second]))
    };
    let plan = with("");
    assert_eq!(latencies_ns(&plan), [[[90, 90], [140, 140]], [[140, 140], [0, 0]]]);
    let bandwidths: Vec<u32> = plan.cells[0].access.iter().map(|access| access.read_bandwidth_mb_s).collect();
    assert_eq!(bandwidths, [4, 0], "what no cell names is unknown");
    assert_eq!(latencies_ns(&with(",latencies=[0@150,1@91]")), [[[90, 90], [140, 140]], [[150, 150], [91, 91]]]);
    assert!(planned(&spec(gib(1), 1, &["id=0"])).cells[0].access.is_empty(), "nothing is told without figures");
}

#[test]
fn the_hosts_figures_are_those_of_the_nodes_of_vcpus_and_memory() {
    let host = host();
    for (name, text) in [("node1", ""), ("read_latency", "95\n"), ("write_latency", "99\n")] {
        let folder = host.path().join("sys/devices/system/node/node1/access1/initiators");
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join(name), text).expect("a file");
    }
    let plan = |spec: &RunSpec, continues| plan(spec, continues, anon(), host.path());
    let two = |first: &str, second: &str| {
        let first = format!("id=0,cpus=0,memory=512M,host-nodes=0{first}");
        spec(gib(1), 2, &[&first, &format!("id=1,cpus=1,memory=512M,host-nodes=1{second}")])
    };
    // Node 1 tells its figure for its own CPUs; from node 0 nothing is known.
    let known = plan(&two("", ",latencies=host"), false).expect("the host tells it");
    assert_eq!(latencies_ns(&known), [vec![], vec![[0, 0], [95, 99]]]);
    let remote = two(",latencies=host", "");
    let why = plan(&remote, false).expect_err("nothing is known").to_string();
    assert_eq!(
        why,
        "cannot use --numa: cell 0 has latencies=host, and this host's kernel tells none from the CPUs of its vCPUs to \
         the node of a cell (node*/access*/initiators in sysfs); write them, as in latencies=[0@90]"
    );
    let kept = plan(&remote, true).expect("a guest that continues goes on");
    assert!(kept.said.as_ref().is_some_and(|said| said.contains("the guest is told none of them when it resets")));
    assert_eq!(nodes(&kept), ["bind 0", "bind 1"]);
    // vCPUs on CPUs of both nodes, and vCPUs that may run anywhere, are of no node that the figure is for.
    assert!(plan(&two("", ",latencies=host,host-cpus=[1-2]"), false).is_err());
    let anywhere = spec(gib(1), 1, &["id=0,latencies=host"]);
    assert!(plan(&anywhere, false).is_err());
    assert!(plan(&two("", ",bandwidths=host"), false).is_err(), "the host has no bandwidth");
}

#[test]
fn figures_of_no_vcpu_of_no_cell_and_without_the_own_are_refused() {
    let first = |more: &str| refused(&spec(gib(1), 1, &[&format!("id=0,{more}")]));
    assert_eq!(first("latencies=[1@9]"), "cannot use --numa: cell 0 has latencies= for cell 1, and the last cell is 0");
    assert_eq!(first("latencies=[0@9,0@8]"), "cannot use --numa: cell 0 has latencies= for cell 0 twice");
    let two = |first: &str| refused(&spec(gib(1), 1, &[first, "id=1,memory=512M,bandwidths=[1@9]"]));
    assert_eq!(
        two("id=0,cpus=0,memory=512M,latencies=[1@9]"),
        "cannot use --numa: cell 0 has latencies= without its own memory: add 0@90, with its figure"
    );
    assert_eq!(
        two("id=0,cpus=0,memory=512M"),
        "cannot use --numa: cell 1 has bandwidths= and no vCPUs: write bandwidths= at the cells with the vCPUs that \
         use its memory"
    );
}

#[test]
fn a_cell_may_start_on_huge_pages_beside_one_on_base_pages() {
    let two = |first: &str, policy: &str| {
        let first = format!("id=0,cpus=0,memory=512M,host-nodes=0{first}");
        let policy = wideleaf_policies::PolicyChoice::parse(policy).expect("it exists");
        RunSpec { policy, ..spec(gib(1), 1, &[&first, "id=1,memory=512M,page-size=4k"]) }
    };
    plan(&two(",page-size=2m", "auto"), false, anon(), host().path()).expect("it is possible");
    let why = |first: &str, policy: &str, backing: BackingConfig| {
        let spec = two(first, policy);
        plan(&spec, false, backing, host().path()).expect_err("it is refused").to_string()
    };
    assert_eq!(
        why(",page-size=1g", "auto", anon()),
        "cannot use --numa: cell 0 has page-size=1g, which the hugetlb pool alone has; use --backing hugetlb \
         --host-page 1g for all cells"
    );
    let at_fault = why(",page-size=2m", "at-fault", anon());
    assert!(at_fault.contains("cell 0 has page-size=2m, and the policy decides at each first touch"), "{at_fault}");
    let huge = why("", "auto", backing(BackingKind::Anon, PageSize::Huge2M));
    assert!(huge.contains("cell 1 has page-size=4k, and all RAM starts on 2m pages"), "{huge}");
    let pool = why(",page-size=2m", "auto", backing(BackingKind::Hugetlb, PageSize::Giant1G));
    assert!(pool.contains("cell 0 has page-size=2m, and the hugetlb pool of all RAM has 1g pages"), "{pool}");
}
