//! Huge pages of the host: while the kernel refuses them to a VM, the bids of all VMs are cleared, each second and
//! whenever a VM reports its bids.
//!
//! ```text
//!   a loop was refused a page ─▶ each VM bids ─▶ clearing_price, by weight ─▶ price of each VM ─▶ its policy obeys
//!                                                     ▲       ▲                  └─▶ windows that may be vacated ─┐
//!   guarantee ─▶ pages that a VM can spare ───────────┘       └── pages that are coming ◀─────────────────────────┘
//!   no refusal any more ─▶ no price: each policy decides alone
//! ```
//!
//! On a host with several NUMA nodes, the VMs of each node are cleared among themselves, and so are those on several
//! nodes: a page of another node would be vacated for nothing.
//!
//! An external guest buys and holds huge pages, but gives none back: no call from outside takes one out of a window.
//! Nor does a VM that may copy nothing, since its memory has to stay as small as it is.

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::market::{Allowances, Bidder, COMING_FOR, Clearing, clearing_price, spare};
use wideleaf_policies::{Bids, Bytes, HugePagePrice, NodeId, PerTenThousand};

use super::supplying::waiting;
use super::vm::{Hands, Vm};
use super::{Engine, Table, told_if_free};
use crate::guests::ProcessId;

/// Least time between two clearings, of which each takes some 4 us for a VM.
pub(super) const CLEARED_EVERY: Duration = Duration::from_millis(200);

/// State of the market.
#[derive(Debug, Default)]
pub(super) struct Market {
    /// What is known of each NUMA node with VMs, and under `None` of the VMs on several nodes.
    nodes: BTreeMap<Option<NodeId>, NodeMarket>,
    cleared_at: Duration,
}

/// Part of the market with the VMs of one NUMA node: a page of another node is of no use to them.
#[derive(Debug, Default)]
struct NodeMarket {
    /// Price in cycles per second at weight 1; `None` while huge pages are not short.
    price: Option<u64>,
    /// Pages that VMs may give back and that no bidder has got yet.
    coming: Allowances,
    /// Number of windows of each VM that wanted a page at the latest clearing.
    wanted: BTreeMap<ProcessId, u64>,
}

impl Market {
    /// Price of a huge page, in cycles per second at weight 1; 0 while they are not short. With several NUMA nodes the
    /// highest one.
    pub(super) fn price(&self) -> u64 {
        self.nodes.values().filter_map(|node| node.price).max().unwrap_or(0)
    }

    fn is_open(&self) -> bool {
        self.nodes.values().any(|node| node.price.is_some())
    }
}

impl Engine {
    /// Finds the price of huge pages and tells all managers of this daemon, also that it has ended.
    pub(super) fn clear_market(&self, now: Duration) {
        {
            let mut table = self.table();
            table.drop_old_offers();
            table.clear_market(now);
        }
        // A manager that replaced another one, as at a change of policy, knows no price yet.
        let may_be_news = |vm: &Vm| vm.price.is_some() || vm.has_price;
        let of_vm = |(process, vm): (&_, &Vm)| Some((*process, vm.care().filter(|_| may_be_news(vm))?, vm.price));
        let to_tell: Vec<_> = self.table().vms.iter().filter_map(of_vm).collect();
        for (process, care, price) in to_tell {
            // A busy one is told in a second.
            if told_if_free(&care, |care| care.set_huge_page_price(price)).is_some()
                && let Some(vm) = self.table().vms.get_mut(&process)
            {
                vm.has_price = price.is_some();
            }
        }
    }
}

impl Table {
    /// Clears the market again while it is open, after a VM of `wideleaf run` has reported its bids. Managers of this
    /// daemon know the price after the next second's clearing.
    pub(super) fn clear_market_again(&mut self, now: Duration) {
        if self.market.is_open() && now.saturating_sub(self.market.cleared_at) >= CLEARED_EVERY {
            self.clear_market(now);
        }
    }

    /// Called once a second.
    fn drop_old_offers(&mut self) {
        for vm in self.vms.values_mut() {
            vm.offer.take_if(|offer| !offer.grow_older());
        }
    }

    /// Sets the price of each VM.
    fn clear_market(&mut self, now: Duration) {
        self.market.cleared_at = now;
        let mut by_node: BTreeMap<Option<NodeId>, Vec<(ProcessId, &mut Vm)>> = BTreeMap::new();
        for (process, vm) in &mut self.vms {
            by_node.entry(vm.node()).or_default().push((*process, vm));
        }
        let nodes = &mut self.market.nodes;
        nodes.retain(|node, _| by_node.contains_key(node));
        by_node.into_iter().for_each(|(node, mut vms)| nodes.entry(node).or_default().clear(now, &mut vms));
    }
}

impl NodeMarket {
    /// Sets the price of these VMs.
    fn clear(&mut self, now: Duration, vms: &mut [(ProcessId, &mut Vm)]) {
        let offers = || vms.iter().filter_map(|(_, vm)| Some((&**vm, vm.offer.as_ref()?.free?)));
        let is_open = offers().next().is_some();
        // Kept pages are counted out by each manager that was refused one; the least is the latest. One that wants no
        // page any more has none counted out.
        let free = offers().filter(|(vm, _)| waiting(vm) > 0).map(|(_, free)| free).min();
        let nothing = Bids::default();
        let bidders: Vec<Bidder<'_>> = vms.iter().map(|(_, vm)| bidder(vm, &nothing)).collect();
        let wanted = bidders.iter().map(|bidder| bidder.bids.wanted());
        let coming = self.coming(now, vms.iter().map(|(process, _)| *process).zip(wanted).collect());
        // Without a manager that waits, no other is held back; all sample what may be sold, for the next that waits.
        let cleared = is_open.then(|| match free {
            Some(free) => clearing_price(&bidders, free, coming),
            None => Clearing { of_vms: vec![HugePagePrice::default(); bidders.len()], ..Clearing::default() },
        });
        if cleared.is_none() {
            // Managers drop what they may give when they hear that there is no price.
            self.coming = Allowances::default();
        }
        self.price = cleared.as_ref().map(|clearing| clearing.price);
        let prices = cleared.map(|clearing| clearing.of_vms).unwrap_or_default();
        let mut all_allowed = 0;
        for (index, (_, vm)) in vms.iter_mut().enumerate() {
            let untold = vm.price.map_or(0, |price| price.may_vacate);
            let left = spare_of(vm).saturating_sub(vm.allowed.pages(now, COMING_FOR));
            vm.price = prices.get(index).map(|price| {
                let allowed = price.may_vacate.min(left);
                vm.allowed.add(now, allowed);
                all_allowed += allowed;
                HugePagePrice { may_vacate: allowed + untold, ..*price }
            });
        }
        self.coming.add(now, all_allowed);
    }

    /// Number of pages that are coming, where this number of windows of each VM want one: if those of VMs that were
    /// there at the latest clearing want fewer, they have got the others. A VM that has ended has got none.
    fn coming(&mut self, now: Duration, wanted: BTreeMap<ProcessId, u64>) -> u64 {
        let before = std::mem::replace(&mut self.wanted, wanted);
        let both = before.iter().filter_map(|(process, before)| Some((before, self.wanted.get(process)?)));
        let (before, after) = both.fold((0_u64, 0_u64), |(before, after), (was, is)| (before + was, after + is));
        self.coming.take(before.saturating_sub(after));
        self.coming.pages(now, COMING_FOR)
    }
}

fn bidder<'a>(vm: &'a Vm, nothing: &'a Bids) -> Bidder<'a> {
    let bids = vm.offer.as_ref().map_or(nothing, |offer| &offer.bids);
    Bidder { bids, weight: vm.wanted.weight, spare: spare_of(vm), can_trade: can_vacate(vm) }
}

fn can_vacate(vm: &Vm) -> bool {
    matches!(vm.hands, Hands::Registered(_)) && vm.may_grow
}

/// Number of huge pages that a VM can give back without falling below its guarantees, the configured one and its own,
/// according to its latest view.
fn spare_of(vm: &Vm) -> u64 {
    if !can_vacate(vm) {
        return 0;
    }
    let Some(share) = vm.guaranteed_share() else { return u64::MAX };
    let Some(backing) = vm.backing() else { return 0 };
    let large = Bytes::new(backing.huge_2m + backing.giant_1g);
    spare(large, Bytes::new(backing.resident()), PerTenThousand::new(share))
}
