//! Small markets by number, and what holds for all of them.

use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

/// Bids of windows with these benefits.
fn bids(wanted: &[u64], held: &[u64]) -> Bids {
    let mut bids = Bids::default();
    wanted.iter().for_each(|benefit| bids.want(*benefit));
    held.iter().for_each(|benefit| bids.hold(*benefit));
    bids
}

/// A VM of weight 1 that may give back all that it holds.
fn plain(bids: &Bids) -> Bidder<'_> {
    Bidder { bids, weight: 1, spare: u64::MAX, can_trade: true }
}

fn allowances(clearing: &Clearing) -> Vec<u64> {
    clearing.of_vms.iter().map(|of| of.may_vacate).collect()
}

const HOT: u64 = 1 << 20;

#[test]
fn the_price_is_zero_while_free_pages_suffice() {
    let (buyer, idle) = (bids(&[HOT; 10], &[]), bids(&[], &[0; 50]));
    let clearing = clearing_price(&[plain(&buyer), plain(&idle)], 10, 0);
    let nothing = HugePagePrice { free: Some(10), ..HugePagePrice::default() };
    assert_eq!(clearing, Clearing { price: 0, within: 0, of_vms: Vec::from([nothing; 2]) });
    assert_eq!(clearing_price(&[], 0, 0), Clearing::default());
}

#[test]
fn cold_windows_give_exactly_what_the_buyers_lack() {
    // 10 buyers, 3 free pages: 7 of the 50 idle windows give theirs back.
    let (buyer, idle) = (bids(&[HOT; 10], &[]), bids(&[], &[0; 50]));
    let clearing = clearing_price(&[plain(&buyer), plain(&idle)], 3, 0);
    assert_eq!((clearing.price, allowances(&clearing)), (HOT, Vec::from([0, 7])));
    assert!(clearing.of_vms.iter().all(|of| of.free == Some(3)), "pages that are coming are not free");
}

#[test]
fn a_vm_serves_its_own_buyers_first_and_others_give_the_rest() {
    let (both, idle) = (bids(&[HOT; 10], &[0; 4]), bids(&[], &[0; 50]));
    let clearing = clearing_price(&[plain(&both), plain(&idle)], 1, 0);
    assert_eq!((clearing.within, allowances(&clearing)), (4, Vec::from([0, 5])));
    // What it has beyond its own buyers it gives like the others, in proportion.
    let (rich, buyer) = (bids(&[HOT; 2], &[0; 52]), bids(&[HOT; 10], &[]));
    let clearing = clearing_price(&[plain(&rich), plain(&buyer), plain(&idle)], 0, 0);
    assert_eq!((clearing.within, allowances(&clearing)), (2, Vec::from([5, 0, 5])));
    // A window that is worth more than half of the price gives its page to none.
    let warm = bids(&[HOT; 2], &[HOT / 4, HOT * 3 / 4]);
    assert_eq!(clearing_price(&[plain(&warm)], 0, 0).within, 1);
    // A guarantee keeps a VM from giving, and not from its own trades.
    let clearing = clearing_price(&[Bidder { spare: 0, ..plain(&both) }], 0, 0);
    assert_eq!((clearing.within, allowances(&clearing)), (4, Vec::from([0])));
    let external = Bidder { spare: 0, can_trade: false, ..plain(&both) };
    let clearing = clearing_price(&[external, plain(&idle)], 0, 0);
    assert_eq!((clearing.within, allowances(&clearing)), (0, Vec::from([0, 10])));
}

#[test]
fn pages_that_a_vm_cannot_spare_serve_its_own_buyers_whatever_others_pay() {
    let guaranteed = bids(&[4 * HOT, 4 * HOT, 2 * HOT, HOT], &[0, 0, HOT, 2 * HOT]);
    let external = bids(&[8 * HOT], &[]);
    let clear = |spare, free| {
        let of_guaranteed = Bidder { spare, ..plain(&guaranteed) };
        let of_external = Bidder { spare: 0, can_trade: false, ..plain(&external) };
        let clearing = clearing_price(&[of_guaranteed, of_external], free, 0);
        let prices: Vec<u64> = clearing.of_vms.iter().map(|of| of.cycles_per_s / HOT).collect();
        (clearing.price / HOT, prices, clearing.within, allowances(&clearing))
    };
    // Its two best windows get the idle pages, the next one that of a window worth half as much.
    assert_eq!(clear(0, 0), (8, [2, 8].into(), 3, [0, 0].into()));
    // One page, the coldest, is for the external guest: the second best window gets that of the warmest.
    assert_eq!(clear(1, 0), (8, [4, 8].into(), 2, [1, 0].into()));
    // With free pages for all of the rest, the host has no price.
    assert_eq!(clear(0, 2), (0, [2, 0].into(), 3, [0, 0].into()));
    assert_eq!(clear(0, 5), (0, [0, 0].into(), 0, [0, 0].into()));
}

#[test]
fn a_vm_spares_what_its_guarantee_and_the_margin_leave() {
    let mib = |mib: u64| Bytes::new(mib << 20);
    let spare = |large, share| spare(mib(large), mib(320), PerTenThousand::new(share));
    // A half is 160 MiB, and a part in 32 is 10 MiB.
    assert_eq!([320, 174, 173, 172, 170, 0].map(|large| spare(large, 5_000)), [75, 2, 1, 1, 0, 0]);
    assert_eq!([9_687, 9_688, 10_000].map(|share| spare(320, share)), [0, 0, 0]);
}

#[test]
fn each_allowance_ends_by_itself_and_the_oldest_is_used_first() {
    let mut allowances = Allowances::default();
    let ms = Duration::from_millis;
    allowances.add(ms(0), 5);
    allowances.add(ms(1_000), 3);
    let left = |allowances: &mut Allowances, at| allowances.pages(ms(at), ALLOWED_FOR);
    assert_eq!([1_000, 2_999, 3_000, 3_999, 4_000].map(|at| left(&mut allowances, at)), [8, 8, 3, 3, 0]);
    allowances.add(ms(5_000), 5);
    allowances.add(ms(6_000), 3);
    allowances.take(6);
    assert_eq!([6_000, 8_000, 9_000].map(|at| left(&mut allowances, at)), [2, 2, 0]);
}

#[test]
fn pages_that_are_coming_are_not_asked_for_again_and_change_no_price() {
    let (buyer, idle) = (bids(&[HOT; 10], &[]), bids(&[], &[0; 50]));
    let cleared = [0, 4, 10, 11].map(|coming| clearing_price(&[plain(&buyer), plain(&idle)], 0, coming));
    assert_eq!(
        cleared.each_ref().map(|clearing| (clearing.price, allowances(clearing)[1])),
        [10, 6, 0, 0].map(|n| (HOT, n))
    );
}

#[test]
fn the_last_bidder_served_sets_the_price() {
    // Two pages are free: the window of 8 and one of those with 4 get them.
    let buyer = bids(&[8, 4, 4, 2, 1].map(|times| times * HOT), &[]);
    let prices = [0, 1, 2, 3, 4, 5].map(|free| clearing_price(&[plain(&buyer)], free, 0).price / HOT);
    assert_eq!(prices, [8, 8, 4, 4, 2, 0]);
}

#[test]
fn a_window_gives_its_page_only_to_one_that_saves_twice_as_much() {
    let buyer = bids(&[2 * HOT], &[]);
    let given = [HOT, HOT + HOT / 8].map(|held| {
        let holder = bids(&[], &[held]);
        allowances(&clearing_price(&[plain(&buyer), plain(&holder)], 0, 0))[1]
    });
    assert_eq!(given, [1, 0]);
}

#[test]
fn the_coldest_windows_give_first_whichever_vm_has_them() {
    let buyer = bids(&[HOT; 3], &[]);
    let (warm, cold) = (bids(&[], &[HOT / 4; 9]), bids(&[], &[0, 0]));
    let clearing = clearing_price(&[plain(&buyer), plain(&warm), plain(&cold)], 0, 0);
    assert_eq!(allowances(&clearing), [0, 1, 2]);
}

#[test]
fn a_vm_gives_no_more_than_it_can_spare() {
    let (buyer, idle) = (bids(&[HOT; 8], &[]), bids(&[], &[0; 20]));
    let given = [0, 5].map(|spare| {
        let clearing = clearing_price(&[plain(&buyer), Bidder { spare, ..plain(&idle) }], 0, 0);
        (clearing.price, allowances(&clearing)[1])
    });
    assert_eq!(given, [(HOT, 0), (HOT, 5)]);
}

#[test]
fn a_weight_counts_as_that_many_times_the_benefit() {
    // One page is free. At equal weights the second VM's window saves more; at weight 4 the first VM's is served.
    let [first, second] = [bids(&[HOT], &[]), bids(&[2 * HOT], &[])];
    let prices = [1, 4].map(|weight| {
        let clearing = clearing_price(&[Bidder { weight, ..plain(&first) }, plain(&second)], 1, 0);
        clearing.of_vms.iter().map(|of| of.cycles_per_s).collect::<Vec<_>>()
    });
    assert_eq!(prices[0], [2 * HOT, 2 * HOT]);
    assert_eq!(prices[1], [HOT, 4 * HOT]);
}

#[test]
fn bids_survive_as_a_list_of_levels() {
    let bids = bids(&[1, 1, 9, HOT, u64::MAX], &[0, 9, 1 << 30]);
    assert_eq!(Bids::of_levels(bids.levels()), bids);
    assert_eq!((bids.wanted(), bids.held(), bids.levels().count()), (5, 3, 6));
    assert!(Bids::of_levels([Level { cycles_per_s: 0, wanted: 3, held: 0 }]).wanted() == 0, "no benefit, no bid");
}

fn benefit() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0_u64), 4 => 0_u64..8_000_000, 1 => any::<u64>()]
}

#[derive(Clone, Debug)]
struct AnyVm {
    bids: Bids,
    weight: u32,
    spare: u64,
}

impl AnyVm {
    fn bidder(&self) -> Bidder<'_> {
        Bidder { bids: &self.bids, weight: self.weight, spare: self.spare, can_trade: true }
    }
}

fn any_vm() -> impl Strategy<Value = AnyVm> {
    let windows = || prop::collection::vec(benefit(), 0..30);
    (windows(), windows(), 1_u32..1000, 0_u64..40).prop_map(|(wanted, held, weight, spare)| AnyVm {
        bids: bids(&wanted, &held),
        weight,
        spare,
    })
}

fn any_host() -> impl Strategy<Value = Vec<AnyVm>> {
    prop::collection::vec(any_vm(), 0..8)
}

fn clear(host: &[AnyVm], free: u64) -> Clearing {
    clearing_price(&host.iter().map(AnyVm::bidder).collect::<Vec<_>>(), free, 0)
}

/// Windows of a VM that want a page and with a benefit that fulfils `is_served`.
fn wanting(vm: &AnyVm, is_served: impl Fn(u64) -> bool) -> u64 {
    vm.bids.levels().filter(|level| is_served(level.cycles_per_s)).map(|level| u64::from(level.wanted)).sum()
}

proptest! {
    #[test]
    fn a_vm_that_cannot_spare_its_pages_pays_no_more_than_it_would_alone(host in any_host(), free in 0_u64..60) {
        let clearing = clear(&host, free);
        for (vm, of) in host.iter().zip(&clearing.of_vms).filter(|(vm, _)| vm.spare == 0) {
            let alone = clearing_price(&[AnyVm { weight: 1, ..vm.clone() }.bidder()], 0, 0);
            prop_assert!(alone.within == 0 || of.cycles_per_s <= alone.of_vms[0].cycles_per_s);
        }
    }

    #[test]
    fn never_more_bidders_are_served_than_there_are_pages(host in any_host(), free in 0_u64..60) {
        let clearing = clear(&host, free);
        let given: u64 = allowances(&clearing).iter().sum();
        let all: u64 = host.iter().map(|vm| vm.bids.wanted()).sum();
        // Those above the price are all served, and nothing is given back that no bidder takes.
        let weighted = |vm: &AnyVm| {
            let level = |level: Level| {
                let cycles_per_s = level.cycles_per_s.saturating_mul(vm.weight.into());
                Level { cycles_per_s, ..level }
            };
            AnyVm { bids: Bids::of_levels(vm.bids.levels().map(level)), ..vm.clone() }
        };
        let above: u64 = host.iter().map(|vm| wanting(&weighted(vm), |benefit| benefit > clearing.price)).sum();
        let moved = given + clearing.within;
        prop_assert!(above <= free + moved, "{above} served with {free} free and {moved} given");
        prop_assert!(given == 0 || free + moved <= all, "{given} of {moved} given back, {free} free, {all} wanted");
    }

    #[test]
    fn no_vm_gives_what_it_lacks_or_may_not_spare(host in any_host(), free in 0_u64..60) {
        let clearing = clear(&host, free);
        for (vm, of) in host.iter().zip(&clearing.of_vms) {
            let limit = of.cycles_per_s / HYSTERESIS;
            let is_cold = |level: &Level| level.cycles_per_s <= limit;
            let cold: u64 = vm.bids.levels().filter(is_cold).map(|level| u64::from(level.held)).sum();
            prop_assert!(of.may_vacate <= vm.spare && of.may_vacate <= vm.bids.held());
            prop_assert!(vm.weight > 1 || of.may_vacate <= cold, "{} of {cold} cold ones", of.may_vacate);
        }
    }

    #[test]
    fn more_free_pages_never_raise_the_price_nor_take_more_pages_back(host in any_host(), free in 0_u64..60) {
        // Each VM only buys or only gives: trades within a VM do not depend on free pages.
        let only = |vm: &AnyVm, wants: bool| {
            let levels = vm.bids.levels().map(|level| match wants {
                true => Level { held: 0, ..level },
                false => Level { wanted: 0, ..level },
            });
            AnyVm { bids: Bids::of_levels(levels), ..vm.clone() }
        };
        let host: Vec<_> = host.iter().flat_map(|vm| [only(vm, true), only(vm, false)]).collect();
        let [before, after] = [free, free + 1].map(|free| clear(&host, free));
        prop_assert!(after.price <= before.price);
        let [before, after] = [before, after].map(|clearing| allowances(&clearing).iter().sum::<u64>());
        prop_assert!(after <= before);
    }

    #[test]
    fn a_bid_below_a_vms_price_is_one_below_the_hosts(host in any_host(), free in 0_u64..60) {
        // A VM that can spare all it holds has no price of its own.
        let host: Vec<_> = host.into_iter().map(|vm| AnyVm { spare: u64::MAX, ..vm }).collect();
        let clearing = clear(&host, free);
        for (vm, of) in host.iter().zip(&clearing.of_vms) {
            for Level { cycles_per_s, .. } in vm.bids.levels() {
                let is_below = bid(cycles_per_s.saturating_mul(vm.weight.into())) < clearing.price;
                prop_assert_eq!(cycles_per_s < of.cycles_per_s, is_below, "{} at weight {}", cycles_per_s, vm.weight);
            }
        }
    }

    #[test]
    fn equal_vms_give_equally_and_a_heavier_one_pays_less_and_gives_no_more(
        vm in any_vm(), others in any_host(), free in 0_u64..60, heavier in 2_u32..50,
    ) {
        let twins = [&[vm.clone(), vm.clone()], others.as_slice()].concat();
        let twins = clear(&twins, free).of_vms;
        prop_assert!(twins[0].may_vacate.abs_diff(twins[1].may_vacate) <= 1);
        let heavy = AnyVm { weight: vm.weight * heavier, ..vm.clone() };
        let pair = clear(&[&[heavy, vm], others.as_slice()].concat(), free).of_vms;
        prop_assert!(pair[0].cycles_per_s <= pair[1].cycles_per_s);
        prop_assert!(pair[0].may_vacate <= pair[1].may_vacate + 1);
    }
}
