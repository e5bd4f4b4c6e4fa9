//! NUMA nodes of pages, threads and moves on the real kernel. A machine with one node has the calls too; there the only
//! node is the answer.

use wideleaf_memory::actuators::move_to_node::move_window;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::numa::seen::NodesSeen;
use wideleaf_memory::sensors::vcpu_nodes::VcpuNodes;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Gpa, GpaRange, NodeId, OutcomeResult, PageSize, Skip, WindowIndex};

/// The node on which a new page of this thread is, or why this kernel has none.
fn first_node() -> Option<NodeId> {
    let nodes = NodesSeen::through(&LinuxHost::open().unwrap()).unwrap();
    if nodes.nodes.is_empty() {
        println!("skipped: this kernel has no NUMA nodes");
    }
    nodes.nodes.first().map(|node| node.id)
}

fn ram() -> std::sync::Arc<GuestRam> {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    GuestRam::map(&[GpaRange::new(Gpa::new(0), mib(4)).unwrap()], backing).unwrap()
}

#[test]
fn the_kernel_tells_the_nodes_of_present_pages_to_the_process_and_to_others() {
    if first_node().is_none() {
        return;
    }
    let (ram, host) = (ram(), LinuxHost::open().unwrap());
    host.advise(ram.base(), mib(2), Advice::PopulateWrite).unwrap();
    let pages = [ram.base(), ram.base() + kib(4), ram.base() + mib(2)];
    let known = NodesSeen::through(&host).unwrap();
    let of_self = ProcessHost::open(std::process::id()).unwrap();
    for host in [&host as &dyn Host, &of_self] {
        let mut nodes = Vec::new();
        host.nodes_of(&pages, &mut nodes).unwrap();
        assert!(nodes[..2].iter().all(|node| node.is_some_and(|node| known.node(node).is_some())), "{nodes:?}");
        assert_eq!(nodes[2], None, "it was never touched");
    }
    let mut nodes = Vec::new();
    let many = vec![ram.base(); 10_000];
    host.nodes_of(&many, &mut nodes).unwrap();
    assert_eq!((nodes.len(), nodes.iter().filter(|node| node.is_some()).count()), (10_000, 10_000));
}

#[test]
fn a_window_on_the_wrong_node_moves_whole_with_its_contents_and_one_at_home_stays() {
    let Some(there) = first_node() else { return };
    let (ram, host) = (ram(), LinuxHost::open().unwrap());
    host.advise(ram.base(), mib(2), Advice::PopulateWrite).unwrap();
    let moved = |window| move_window(&host, ram.ranges()[0], ram.backing(), WindowIndex::new(window), there);
    let result = moved(0).result;
    // The page may have been made on another node of this machine.
    assert!([OutcomeResult::Done, OutcomeResult::Skipped(Skip::AlreadyDone)].contains(&result), "{result}");
    assert_eq!(moved(0).result, OutcomeResult::Skipped(Skip::AlreadyDone));
    assert_eq!(moved(1).result, OutcomeResult::Skipped(Skip::NotResident));
    let pages: Vec<_> = (0..512).map(|page| ram.base() + kib(4) * page).collect();
    host.move_to_node(&pages, there).unwrap();
    let nowhere = host.move_to_node(&pages, NodeId(1023)).unwrap_err();
    assert!(nowhere.source.raw_os_error().is_some_and(|errno| [libc::ENODEV, libc::EACCES].contains(&errno)));
}

#[test]
fn a_thread_with_the_name_of_a_vcpu_is_found_on_its_node() {
    if first_node().is_none() {
        return;
    }
    let (host, of_self) = (LinuxHost::open().unwrap(), ProcessHost::open(std::process::id()).unwrap());
    let nodes = NodesSeen::through(&host).unwrap();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let vcpu = std::thread::Builder::new().name("vcpu0".into()).spawn(move || ended.recv()).unwrap();
    // The thread takes its name as it begins.
    while VcpuNodes::look(&host, &nodes).unwrap().by_node.is_empty() {
        std::thread::yield_now();
    }
    let seen = VcpuNodes::look(&of_self, &nodes).unwrap();
    assert_eq!(seen.by_node.iter().map(|(_, vcpus)| *vcpus).sum::<u16>(), 1);
    drop(end);
    assert!(vcpu.join().unwrap().is_err());
}
