//! Free blocks of 2 MiB: once a second the daemon says what the windows of all VMs lack. For a while after the last one
//! waited, and while a manager still knows that pages are short, some are kept ready for the next.
//!
//! ```text
//!   a VM's manager was refused a page ─▶ its windows that wait, by bids or reasons ─▶ sum of all VMs ──┐
//!                                     └▶ blocks that became free since ─▶ least of all VMs ────────────┴─▶ supply
//! ```
//!
//! On a host with several NUMA nodes, blocks are made on those where windows wait, if each VM is on one of them.
//!
//! There is one supply for the host: managers of external guests have none, and a `wideleaf run` lets its own one rest
//! while it is registered.

use std::time::Duration;

use wideleaf_memory::block_supply::SupplyDemand;
use wideleaf_memory::explain::WhyNot;
use wideleaf_policies::{NodeSet, Refusal};

use super::vm::Vm;
use super::{Engine, SharedCare, Table, told_if_free};

impl Engine {
    /// Says what windows lack, within the configured bounds, and tells managers of blocks that they cannot see.
    pub(super) fn want_blocks(&self, now: Duration) {
        let unseen = self.doors.supply.report().unseen;
        let (demand, rules, promised) = {
            let mut table = self.table();
            (table.demand_at(now), table.config.supply.rules(), table.promise(unseen))
        };
        self.doors.supply.set_rules(rules);
        self.doors.supply.want(demand);
        for (care, pages) in promised {
            // A busy one misses them: they stay free, and a later round finds them.
            let _ = told_if_free(&care, |care| care.promise_huge_pages(pages));
        }
    }
}

impl Table {
    /// The demand of this second, with a reserve if it is kept.
    fn demand_at(&mut self, now: Duration) -> SupplyDemand {
        let demand = self.demand();
        if demand.windows > 0 {
            self.waited_at = Some(now);
        }
        let is_kept = |at| now.saturating_sub(at) < self.config.supply.reserve_for;
        // Without such a manager, no number of free blocks is known, nor that they are short.
        let is_short = self.refused().next().is_some();
        SupplyDemand { keeps_reserve: is_short && self.waited_at.is_some_and(is_kept), ..demand }
    }

    fn demand(&self) -> SupplyDemand {
        let windows = self.refused().map(|(vm, _)| waiting(vm)).sum();
        // As for the price: the least is the latest.
        let free = self.refused().map(|(_, free)| free).min().unwrap_or(0);
        let nodes = self.nodes_short_of_pages();
        SupplyDemand { windows, free, is_host_short: self.host.is_short, keeps_reserve: false, nodes }
    }

    /// NUMA nodes of the VMs with windows that wait, or else of those that were refused a page; empty if some of them
    /// are on several nodes.
    fn nodes_short_of_pages(&self) -> NodeSet {
        let is_any_waiting = self.refused().any(|(vm, _)| waiting(vm) > 0);
        let short = self.refused().filter(|(vm, _)| !is_any_waiting || waiting(vm) > 0);
        short.map(|(vm, _)| vm.node()).collect::<Option<NodeSet>>().unwrap_or_default()
    }

    /// VMs with a manager that was refused a page, and the number of blocks that have become free for it since.
    fn refused(&self) -> impl Iterator<Item = (&Vm, u64)> {
        self.vms.values().filter_map(|vm| Some((vm, vm.offer.as_ref()?.free?)))
    }

    /// Shares out the blocks that `/proc/buddyinfo` does not count, by the number of windows that wait. `unseen`: all
    /// of them since the daemon's start. Returns the managers of this daemon that are to be told, each with its part.
    fn promise(&mut self, unseen: u64) -> Vec<(SharedCare, u64)> {
        let mut left = unseen.saturating_sub(std::mem::replace(&mut self.known_unseen, unseen));
        let mut windows_left = self.demand().windows;
        let mut promised = Vec::new();
        for vm in self.vms.values_mut().filter(|vm| vm.offer.as_ref().is_some_and(|offer| offer.free.is_some())) {
            let windows = waiting(vm);
            // Of the windows not yet looked at, so that rounding loses none.
            let pages = (u128::from(left) * u128::from(windows)).checked_div(windows_left.into()).unwrap_or(0) as u64;
            let pages = pages.min(windows);
            (left, windows_left) = (left - pages, windows_left - windows);
            match vm.care() {
                Some(care) if pages > 0 => promised.push((care, pages)),
                _ => vm.promised += pages,
            }
        }
        promised
    }
}

/// Number of windows of a VM that wait for a huge page. Where the policy does not bid, their reason says it.
pub(super) fn waiting(vm: &Vm) -> u64 {
    let bid = vm.offer.as_ref().map_or(0, |offer| offer.bids.wanted());
    let by_reason = vm.windows_by_reason();
    bid.max(by_reason.get(WhyNot::backing_off(Refusal::NoHugePage).name()).copied().unwrap_or(0))
}
