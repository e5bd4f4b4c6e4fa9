//! What windows of all VMs lack, as the daemon tells the supply of free blocks.

use wideleaf_control::protocol::BidsReport;
use wideleaf_policies::PerTenThousand;

use super::market::numa;
use super::*;

/// Registers a run that reports these bids, and this number of windows that wait by their reason.
fn report(bench: &Bench, pid: u32, bids: Option<BidsReport>, waiting: u64) {
    let reason = Reason { name: "backing_off_no_huge_page".into(), windows: waiting, text: String::new() };
    let explanation = Explanation { reasons: vec![reason], ..Explanation::default() };
    let live =
        LiveReport { explanation: Some(Box::new(explanation)), bids: bids.map(Box::new), ..LiveReport::default() };
    let (vm, peer) = (own_view(pid), Peer { pid, uid: 0, gid: 0 });
    let reply = bench.service.answer(ConnectionId::new(pid.into()), peer, Request::Register { vm, live });
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
}

fn demand_at(bench: &Bench, second: u64) -> SupplyDemand {
    bench.tick_at(second);
    *bench.supply.demand.lock()
}

/// Reports the run's state again. Returns the number of free pages that it is told of.
fn promised(bench: &Bench, pid: u32, bids: Option<BidsReport>) -> u64 {
    let live = LiveReport { bids: bids.map(Box::new), ..LiveReport::default() };
    let (vm, peer) = (own_view(pid), Peer { pid, uid: 0, gid: 0 });
    match bench.service.answer(ConnectionId::new(pid.into()), peer, Request::Status { vm, live }) {
        Reply::Ok(answer) => match *answer {
            Answer::Limits(limits) => limits.free_huge_pages,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_that_no_manager_can_see_are_shared_out_by_the_windows_that_wait_and_told_once() {
    let bench = Bench::new("");
    let bids = |wanted| Some(BidsReport { free: Some(0), levels: vec![(1 << 20, wanted, 3)] });
    for (pid, wanted) in [(1, 30), (2, 10), (3, 0)] {
        report(&bench, pid, bids(wanted), 0);
    }
    bench.supply.unseen.store(10, Ordering::Relaxed);
    bench.tick_at(1);
    let told = |wanted: [u32; 3]| [1, 2, 3].map(|pid| promised(&bench, pid, bids(wanted[pid as usize - 1])));
    let first = told([30, 10, 0]);
    assert_eq!((first.iter().sum::<u64>(), first[2]), (10, 0));
    assert!((7..=8).contains(&first[0]), "{first:?}");
    bench.tick_at(2);
    assert_eq!(told([1, 1, 0]), [0; 3]);
    bench.supply.unseen.store(20, Ordering::Relaxed);
    bench.tick_at(3);
    assert_eq!(told([0; 3]), [1, 1, 0], "no more than wait");
}

#[test]
fn windows_that_wait_are_added_up_over_the_vms_with_a_refused_manager() {
    let bench = Bench::new("");
    assert_eq!(demand_at(&bench, 1), SupplyDemand::default());
    let bids = |free, wanted| Some(BidsReport { free, levels: vec![(1 << 20, wanted, 3)] });
    report(&bench, 1, bids(Some(9), 10), 2);
    // No bids: its policy has none.
    report(&bench, 2, Some(BidsReport { free: Some(4), levels: Vec::new() }), 5);
    // Its manager was not refused a page.
    report(&bench, 3, bids(None, 100), 100);
    let expected = SupplyDemand { windows: 15, free: 4, keeps_reserve: true, ..SupplyDemand::default() };
    assert_eq!(demand_at(&bench, 2), expected);
    assert_eq!(bench.engine.scrape().supply.made, 7);
}

#[test]
fn the_supply_knows_a_shortage_of_memory_and_the_configured_bounds() {
    let supply = "[supply]\ncpu_share = \"2.5%\"\nlow_blocks = 3\nhigh_blocks = 100";
    let bench = Bench::new(&format!("[host]\nlow_free = \"1G\"\nhigh_free = \"2G\"\n{supply}"));
    bench.available.store(mib(512).get(), Ordering::Relaxed);
    assert!(demand_at(&bench, 1).is_host_short);
    let SupplyRules { cpu, low, high, .. } = *bench.supply.rules.lock();
    assert_eq!((cpu, low, high), (PerTenThousand::new(250), 3, 100));
}

#[test]
fn a_reserve_is_kept_for_a_while_after_a_window_waited_and_only_while_pages_are_short() {
    let kept = |config: &str, seconds: &[(u64, Option<u64>, u32)]| -> Vec<bool> {
        let bench = Bench::new(config);
        let bids = |free, wanted| Some(BidsReport { free, levels: vec![(1 << 20, wanted, 3)] });
        report(&bench, 1, bids(Some(0), 0), 0);
        let kept = |&(second, free, wanted)| {
            promised(&bench, 1, bids(free, wanted));
            demand_at(&bench, second).keeps_reserve
        };
        seconds.iter().map(kept).collect()
    };
    let waits = [(1, Some(0), 0), (2, Some(0), 5), (11, Some(2), 0), (12, Some(2), 0)];
    let ends = [(20, Some(0), 1), (21, None, 0)];
    let seconds = [&waits[..], &ends].concat();
    assert_eq!(kept("[supply]\nreserve_for = \"10s\"", &seconds), [false, true, true, false, true, false]);
    assert_eq!(kept("[supply]\nreserve_for = \"0s\"", &seconds), [false; 6]);
}

/// Registers a run on this node, or on several with `None`. Its manager was refused a page, and this number of its
/// windows want one.
fn report_on(bench: &Bench, pid: u32, node: Option<u16>, wanted: u32) {
    let bids = BidsReport { free: Some(0), levels: vec![(1 << 20, wanted, 3)] };
    let live = LiveReport { bids: Some(Box::new(bids)), ..LiveReport::default() };
    let mut vm = own_view(pid);
    vm.numa = node.map(|node| numa(node, 100));
    let peer = Peer { pid, uid: 0, gid: 0 };
    let reply = bench.service.answer(ConnectionId::new(pid.into()), peer, Request::Register { vm, live });
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
}

#[test]
fn blocks_are_wanted_on_the_nodes_where_windows_wait_if_each_vm_is_on_one() {
    let bench = Bench::new("");
    let wanted_at = |second| demand_at(&bench, second).nodes.to_string();
    report_on(&bench, 1, Some(1), 0);
    assert_eq!(wanted_at(1), "1", "a reserve would be kept there");
    report_on(&bench, 2, Some(0), 2);
    assert_eq!(wanted_at(2), "0", "a window waits");
    report_on(&bench, 3, Some(1), 5);
    assert_eq!(wanted_at(3), "0-1");
    report_on(&bench, 4, None, 1);
    assert_eq!(wanted_at(4), "", "its windows may be anywhere");
}
