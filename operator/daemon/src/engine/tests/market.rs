//! The bids of all VMs of a host, cleared together.

use wideleaf_control::protocol::{BidsReport, PriceOfHugePage};
use wideleaf_control::view::{NodeView, NumaView};
use wideleaf_policies::HugePagePrice;
use wideleaf_policies::market::bid;

use super::super::market::CLEARED_EVERY;
use super::*;

/// Cycles per second that a hot window saves.
const HOT: u64 = bid(3_400_000);

/// Bids of a VM: these levels, and the number of free pages if its manager was refused one.
fn bids(free: Option<u64>, levels: &[(u64, u32, u32)]) -> BidsReport {
    BidsReport { free, levels: levels.to_vec() }
}

/// A run with its own connection, which has a number as the process has.
pub(super) struct Run<'a> {
    bench: &'a Bench,
    view: Box<VmView>,
}

impl<'a> Run<'a> {
    pub(super) fn register(bench: &'a Bench, pid: u32, name: &str, huge: Bytes) -> Run<'a> {
        let mut view = own_view(pid);
        view.name = name.into();
        view.backing = Some(BackingView { huge_2m: huge.get(), ..BackingView::default() });
        let run = Run { bench, view };
        run.ask(Request::Register { vm: run.view.clone(), live: LiveReport::default() });
        run
    }

    fn connection(&self) -> ConnectionId {
        ConnectionId::new(self.view.pid.into())
    }

    fn ask(&self, request: Request) -> Option<PriceOfHugePage> {
        let peer = Peer { pid: self.view.pid, uid: 0, gid: 0 };
        match self.bench.service.answer(self.connection(), peer, request) {
            Reply::Ok(answer) => match *answer {
                Answer::Limits(limits) => limits.huge_page,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    /// Reports these bids. Returns the price, as the run is told.
    pub(super) fn exchanges(&self, bids: Option<BidsReport>) -> Option<PriceOfHugePage> {
        let live = LiveReport { bids: bids.map(Box::new), ..LiveReport::default() };
        self.ask(Request::Status { vm: self.view.clone(), live })
    }

    /// Reports these bids. Returns the price and the allowance.
    fn tells(&self, bids: Option<BidsReport>) -> Option<(u64, u64)> {
        let price = self.exchanges(bids);
        price.map(|PriceOfHugePage { cycles_per_s, may_vacate, .. }| (cycles_per_s, may_vacate))
    }
}

#[test]
fn a_cold_vm_vacates_once_exactly_what_the_hot_one_lacks() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let (wants, holds) = (bids(Some(2), &[(HOT, 10, 0)]), bids(None, &[(0, 0, 50)]));
    bench.tick_at(1);
    assert_eq!((hot.tells(Some(wants.clone())), cold.tells(None)), (None, None), "no VM had bids a second ago");
    bench.tick_at(2);
    // A price, so that it bids from now on.
    assert_eq!(cold.tells(Some(holds.clone())), Some((HOT, 0)));
    bench.tick_at(3);
    assert_eq!([&cold, &cold].map(|run| run.tells(Some(holds.clone()))), [Some((HOT, 8)), Some((HOT, 0))]);
    assert_eq!(hot.tells(Some(wants.clone())), Some((HOT, 0)));
    // What it gave back may not have been taken and reported yet.
    for second in 4..=8 {
        bench.tick_at(second);
        assert_eq!(cold.tells(Some(holds.clone())), Some((HOT, 0)), "second {second}");
    }
    bench.tick_at(9);
    assert_eq!(cold.tells(Some(holds.clone())), Some((HOT, 8)), "the buyer lacks them still");
    assert_eq!(bench.engine.scrape().huge_page_price, HOT);
    let notes = |name: &str| bench.list().into_iter().find(|vm| vm.name == name).map(|vm| vm.notes);
    let note = "huge pages are short on this host: a window of this VM gets one if that saves 3.15 M cycles/s";
    assert_eq!(notes("hot"), Some(vec![note.to_owned()]));
    // The buyer has its pages, and no manager was refused one since.
    hot.tells(None);
    bench.tick_at(10);
    assert_eq!((cold.tells(Some(holds)), bench.engine.scrape().huge_page_price), (None, 0));
}

#[test]
fn a_vm_that_reports_late_is_not_asked_again_while_it_may_still_give() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let holds = bids(None, &[(0, 0, 50)]);
    hot.tells(Some(bids(Some(0), &[(HOT, 10, 0)])));
    cold.tells(Some(holds.clone()));
    let allowed_at = |second| {
        bench.tick_at(second);
        cold.tells(Some(holds.clone())).map_or(0, |(_, may_vacate)| may_vacate)
    };
    bench.tick_at(10);
    // It hears of them a second later, and its loop may give them for three seconds from then on.
    assert_eq!(allowed_at(11), 10);
    let later: Vec<u64> = (12..=15).map(allowed_at).collect();
    assert_eq!(later, [0; 4], "no page is given twice");
}

#[test]
fn nothing_is_vacated_for_a_vm_that_reports_no_more() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let holds = bids(None, &[(0, 0, 90)]);
    hot.tells(Some(bids(Some(0), &[(HOT, 10, 0)])));
    cold.tells(Some(holds.clone()));
    let told_at = |second| {
        bench.tick_at(second);
        cold.tells(Some(holds.clone())).map(|(_, may_vacate)| may_vacate)
    };
    let told: Vec<Option<u64>> = (1..=30).map(told_at).collect();
    let (priced, after) = told.split_at(10);
    assert_eq!(priced.iter().flatten().sum::<u64>(), 20, "twice, since it may have been slow");
    assert_eq!(after, [None; 20]);
    assert!(bench.list().iter().any(|vm| vm.name == "hot"), "it is still there");
}

#[test]
fn every_vm_is_told_how_many_pages_are_free() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let free_after = |second, free, wanted| {
        hot.tells(Some(bids(Some(free), &[(HOT, wanted, 0)])));
        bench.tick_at(second);
        [&hot, &cold].map(|run| {
            let status = Request::Status { vm: run.view.clone(), live: LiveReport::default() };
            run.ask(status).map(|price| (price.cycles_per_s > 0, price.free))
        })
    };
    assert_eq!(free_after(1, 4, 10), [Some((true, Some(4))); 2]);
    assert_eq!(free_after(2, 12, 10), [Some((false, Some(12))); 2], "without a price as well");
}

#[test]
fn bidders_that_come_later_are_served_at_once_and_the_earlier_ones_not_twice() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let holds = bids(None, &[(0, 0, 50)]);
    let allowed = |second, wanted| {
        hot.tells(Some(bids(Some(0), &[(HOT, wanted, 0)])));
        cold.tells(Some(holds.clone()));
        bench.tick_at(second);
        cold.tells(Some(holds.clone())).map(|(_, may_vacate)| may_vacate)
    };
    assert_eq!([allowed(10, 10), allowed(11, 14)], [10, 4].map(Some));
    // Six have got one. What is left of the first allowance, four, ends after six seconds, and then the second one.
    assert_eq!([allowed(12, 8), allowed(16, 11), allowed(17, 11)], [0, 7, 4].map(Some));
    assert_eq!(allowed(23, 11), Some(11), "all have ended");
}

#[test]
fn a_buyer_that_has_ended_got_no_page_and_one_that_came_does_not_hide_those_that_were_got() {
    let bench = Bench::new("");
    let [hot, cold, other] =
        [(1, "hot"), (2, "cold"), (3, "other")].map(|(pid, name)| Run::register(&bench, pid, name, mib(200)));
    let holds = bids(None, &[(0, 0, 90)]);
    let wants = |run: &Run<'_>, wanted| {
        run.tells(Some(bids(Some(0), &[(HOT, wanted, 0)])));
    };
    let allowed_at = |second| {
        bench.tick_at(second);
        cold.tells(Some(holds.clone())).map(|(_, may_vacate)| may_vacate)
    };
    cold.tells(Some(holds.clone()));
    wants(&hot, 10);
    wants(&other, 5);
    assert_eq!(allowed_at(10), Some(15));
    bench.service.closed(hot.connection());
    assert_eq!(allowed_at(11), Some(0));
    // Those that the first one wanted are coming, for whichever VM wants them.
    wants(&other, 15);
    assert_eq!(allowed_at(12), Some(0));
    wants(&other, 9);
    let late = Run::register(&bench, 4, "late", mib(200));
    wants(&late, 6);
    assert_eq!(allowed_at(13), Some(6), "six have got one, and six others want one");
}

#[test]
fn an_allowance_that_a_vm_was_not_told_yet_is_not_lost() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let wants = |wanted| hot.tells(Some(bids(Some(0), &[(HOT, wanted, 0)])));
    cold.tells(Some(bids(None, &[(0, 0, 50)])));
    wants(10);
    bench.tick_at(10);
    wants(13);
    bench.tick_at(11);
    assert_eq!(cold.tells(None), Some((HOT, 13)));
}

#[test]
fn while_free_pages_suffice_the_price_is_zero_and_no_window_is_vacated() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    let (wants, holds) = (bids(Some(10), &[(HOT, 10, 0)]), bids(None, &[(0, 0, 50)]));
    hot.tells(Some(wants.clone()));
    cold.tells(Some(holds.clone()));
    bench.tick_at(1);
    assert_eq!((hot.tells(Some(wants)), cold.tells(Some(holds))), (Some((0, 0)), Some((0, 0))));
}

/// A VM's part of a host with two nodes: all of its vCPUs run on one, and this share of its memory is there, in
/// percent.
pub(super) fn numa(node: u16, percent: u64) -> NumaView {
    let of = |number| NodeView {
        node: number,
        may_use: true,
        vcpus: if number == node { 2 } else { 0 },
        memory: mib(if number == node { percent } else { 100 - percent }).get(),
        ..NodeView::default()
    };
    NumaView { nodes: vec![of(0), of(1)], ..NumaView::default() }
}

#[test]
fn a_vm_gives_a_page_only_to_one_on_its_own_numa_node() {
    let bench = Bench::new("");
    let mut runs = [(1, "hot"), (2, "near"), (3, "far"), (4, "spread")]
        .map(|(pid, name)| Run::register(&bench, pid, name, mib(200)));
    for (run, (node, percent)) in runs.iter_mut().zip([(1, 100), (1, 80), (0, 100), (1, 79)]) {
        run.view.numa = Some(numa(node, percent));
    }
    let [hot, near, far, spread] = &runs;
    let holds = |cycles_per_s| Some(bids(None, &[(cycles_per_s, 0, 50)]));
    hot.tells(Some(bids(Some(0), &[(HOT, 10, 0)])));
    near.tells(holds(bid(5_000)));
    far.tells(holds(0));
    spread.tells(holds(0));
    bench.tick_at(10);
    assert_eq!([far.tells(holds(0)), spread.tells(holds(0))], [None, None], "pages are not short on their nodes");
    assert_eq!(near.tells(None), Some((HOT, 10)));
    assert_eq!(bench.engine.scrape().huge_page_price, HOT);
    assert_eq!(hot.exchanges(None).map(|price| (price.cycles_per_s, price.free)), Some((HOT, Some(0))));
}

#[test]
fn each_numa_node_has_a_price_of_its_own_and_the_highest_one_is_reported() {
    let bench = Bench::new("");
    let mut runs = [(1, "here"), (2, "there")].map(|(pid, name)| Run::register(&bench, pid, name, mib(200)));
    for (run, node) in runs.iter_mut().zip([0, 1]) {
        run.view.numa = Some(numa(node, 100));
    }
    let cold = bid(100_000);
    runs[0].tells(Some(bids(Some(2), &[(cold, 5, 0)])));
    runs[1].tells(Some(bids(Some(0), &[(HOT, 5, 0)])));
    bench.tick_at(10);
    let told = |run: &Run<'_>| run.exchanges(None).map(|price| (price.cycles_per_s, price.free));
    assert_eq!(bench.engine.scrape().huge_page_price, HOT);
    assert_eq!(runs.each_ref().map(told), [Some((cold, Some(2))), Some((HOT, Some(0)))]);
}

#[test]
fn a_vm_gives_no_page_of_its_guarantee() {
    // All resident memory is 200 MiB: 180 of them are guaranteed, and a part in 32 is the margin.
    let given = |huge| {
        let bench = Bench::new("[[vm]]\nname = \"cold\"\nguarantee = \"90%\"");
        let hot = Run::register(&bench, 1, "hot", mib(0));
        let mut cold = Run::register(&bench, 2, "cold", huge);
        cold.view.backing.as_mut().expect("it is known").base_4k = mib(200).get() - huge.get();
        let mut given = [0, 0, 0];
        for (second, given) in (10..).zip(&mut given) {
            // More windows want one each second, and views show nothing of what was given back.
            hot.tells(Some(bids(Some(0), &[(HOT, 5 * (second as u32 - 9), 0)])));
            cold.tells(Some(bids(None, &[(0, 0, 70)])));
            bench.tick_at(second);
            *given = cold.tells(None).expect("huge pages are short").1;
        }
        given
    };
    assert_eq!([200, 189, 186, 100].map(|huge| given(mib(huge))), [[5, 1, 0], [1, 0, 0], [0; 3], [0; 3]]);
}

#[test]
fn a_run_gives_no_page_of_its_own_guarantee() {
    let bench = Bench::new("");
    let hot = Run::register(&bench, 1, "hot", mib(0));
    let mut cold = Run::register(&bench, 2, "cold", mib(200));
    cold.view.guarantee = "90%".parse().expect("a guarantee");
    hot.tells(Some(bids(Some(0), &[(HOT, 50, 0)])));
    cold.tells(Some(bids(None, &[(0, 0, 70)])));
    bench.tick_at(10);
    assert_eq!(cold.tells(None), Some((HOT, 6)));
}

#[test]
fn a_run_that_may_copy_nothing_gives_none_back_and_others_do() {
    let bench = Bench::new("[[vm]]\nname = \"full\"\nbloat_max = \"4M\"");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 3, "cold", mib(200)));
    let mut full = Run::register(&bench, 2, "full", mib(200));
    full.view.work = Some(WorkView { bloat: mib(4).get(), ..WorkView::default() });
    bench.tick_at(9);
    hot.tells(Some(bids(Some(0), &[(HOT, 10, 0)])));
    full.tells(Some(bids(None, &[(0, 0, 50)])));
    cold.tells(Some(bids(None, &[(bid(5_000), 0, 50)])));
    bench.tick_at(10);
    assert_eq!([full.tells(None), cold.tells(None)], [Some((HOT, 0)), Some((HOT, 10))]);
}

#[test]
fn a_manager_that_wants_no_page_any_more_holds_no_other_back() {
    let bench = Bench::new("");
    let (served, other) = (Run::register(&bench, 1, "served", mib(200)), Run::register(&bench, 2, "other", mib(0)));
    let told = |second, wanted| {
        served.tells(Some(bids(Some(0), &[(HOT, wanted, 50)])));
        other.tells(Some(bids(None, &[(HOT, 10, 0)])));
        bench.tick_at(second);
        let price = other.ask(Request::Status { vm: other.view.clone(), live: LiveReport::default() });
        price.map(|PriceOfHugePage { cycles_per_s, free, .. }| (cycles_per_s, free))
    };
    assert_eq!(told(10, 0), Some((0, None)), "it may ask for as many as it likes");
    assert_eq!(told(11, 1), Some((HOT, Some(0))));
}

#[test]
fn a_vm_of_more_weight_pays_less() {
    let bench = Bench::new("[[vm]]\nname = \"heavy\"\nweight = 4");
    let runs = [Run::register(&bench, 1, "light", mib(0)), Run::register(&bench, 2, "heavy", mib(0))];
    let wants = bids(Some(6), &[(HOT, 5, 0)]);
    for run in &runs {
        run.tells(Some(wants.clone()));
    }
    bench.tick_at(1);
    // Six pages for ten windows: those of the heavy VM are served, and one of the light one's.
    assert_eq!(runs.each_ref().map(|run| run.tells(Some(wants.clone()))), [Some((HOT, 0)), Some((HOT / 4, 0))]);
    let fewer = bids(Some(5), &[(HOT, 5, 0)]);
    for run in &runs {
        run.tells(Some(fewer.clone()));
    }
    bench.tick_at(2);
    assert_eq!(runs.each_ref().map(|run| run.tells(None)), [Some((4 * HOT, 0)), Some((HOT, 0))]);
}

#[test]
fn an_external_guest_pays_the_price_and_gives_no_page_back() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    let run = Run::register(&bench, 1, "cold", mib(200));
    let set = |bids| bench.guests.change(10, |guest| guest.bids = bids);
    set(Some(bids(Some(0), &[(0, 0, 90), (HOT, 7, 0)])));
    run.tells(Some(bids(None, &[(0, 0, 50)])));
    bench.tick_at(1);
    let price = |may_vacate| Some(HugePagePrice { cycles_per_s: HOT, may_vacate, free: Some(0) });
    assert_eq!((bench.guests.guest(10).price, run.tells(None)), (price(0), Some((HOT, 7))));
    set(None);
    bench.tick_at(2);
    assert_eq!((bench.guests.guest(10).price, run.tells(None)), (None, None));
}

#[test]
fn an_external_guest_is_told_that_the_price_has_ended_whenever_that_is_known() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    let run = Run::register(&bench, 1, "hot", mib(0));
    let wants = || bids(Some(0), &[(HOT, 10, 0)]);
    let opens_at = |second| {
        run.tells(Some(wants()));
        bench.tick_at(second);
        assert!(bench.guests.guest(10).price.is_some());
    };
    // The run's report ends it between two ticks.
    opens_at(0);
    thread::sleep(CLEARED_EVERY);
    assert_eq!(run.tells(None), None);
    bench.tick_at(1);
    assert_eq!(bench.guests.guest(10).price, None);

    // The guest is busy at the tick that ends it.
    opens_at(2);
    let care = bench.engine.table().vms.values().find_map(Vm::care).expect("it is attached");
    let busy = care.lock();
    run.tells(None);
    bench.tick_at(3);
    assert!(bench.guests.guest(10).price.is_some(), "it is not told yet");
    drop(busy);
    bench.tick_at(4);
    assert_eq!(bench.guests.guest(10).price, None);
}

#[test]
fn the_bids_of_a_vm_end_with_its_connection() {
    let bench = Bench::new("");
    let (hot, cold) = (Run::register(&bench, 1, "hot", mib(0)), Run::register(&bench, 2, "cold", mib(200)));
    hot.tells(Some(bids(Some(0), &[(HOT, 10, 0)])));
    cold.tells(Some(bids(None, &[(0, 0, 50)])));
    bench.service.closed(hot.connection());
    bench.tick_at(1);
    assert_eq!(cold.tells(None), None);
}
