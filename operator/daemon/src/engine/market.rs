//! Huge pages of the host: while the kernel refuses them to a VM, the bids of all VMs are cleared once a second.
//!
//! ```text
//!   a loop was refused a page ─▶ each VM bids ─▶ clearing_price, by weight ─▶ price of each VM ─▶ its policy obeys
//!                                                     ▲                          └─▶ every GRANT_EVERY: how many
//!   guarantee ─▶ pages that a VM can spare ───────────┘                               windows may be vacated
//!   no refusal any more ─▶ no price: each policy decides alone
//! ```
//!
//! An external guest buys and holds huge pages, but gives none back: no call from outside takes one out of a window.

use std::time::Duration;

use wideleaf_policies::market::{Bidder, clearing_price};
use wideleaf_policies::{Bids, HugePagePrice, PageSize};

use super::vm::{Hands, Vm};
use super::{Engine, SharedCare, Table, told_if_free};

/// Time between two permissions to vacate. A page that was given back at one is taken and reported before the next: a
/// run asks each second, its loop acts at once, and a buyer notices a free block within half a second and reports each
/// second. So no page is given back twice for one buyer.
const GRANT_EVERY: Duration = Duration::from_secs(3);

/// State of the market.
#[derive(Debug, Default)]
pub(super) struct Market {
    /// Price on the whole host, in cycles per second at weight 1; `None` while huge pages are not short.
    price: Option<u64>,
    granted_at: Option<Duration>,
}

impl Market {
    /// Price of a huge page, in cycles per second at weight 1; 0 while they are not short.
    pub(super) fn price(&self) -> u64 {
        self.price.unwrap_or(0)
    }
}

impl Engine {
    /// Finds the price of huge pages and tells all managers.
    pub(super) fn clear_market(&self, now: Duration) {
        let told_so = self.table().clear_market(now);
        for (care, price) in told_so {
            // A busy one gets the price of the next second.
            let _ = told_if_free(&care, |care| care.set_huge_page_price(price));
        }
    }
}

impl Table {
    /// Sets the price of each VM. Returns the managers of this daemon that have to know theirs.
    fn clear_market(&mut self, now: Duration) -> Vec<(SharedCare, Option<HugePagePrice>)> {
        let was_open = self.market.price.is_some();
        // Kept pages are counted out by each manager that was refused one; the least is the latest.
        let free = self.vms.values().filter_map(|vm| vm.offer.as_ref()?.free).min();
        let nothing = Bids::default();
        let bidder = |vm| bidder(vm, &nothing);
        let bidders: Vec<Bidder<'_>> = self.vms.values().map(bidder).collect();
        let cleared = free.map(|free| clearing_price(&bidders, free));
        self.market.price = cleared.as_ref().map(|clearing| clearing.price);
        let mut prices = cleared.map(|clearing| clearing.of_vms).unwrap_or_default();
        if !self.market.may_grant(now, &prices) {
            prices.iter_mut().for_each(|price| price.may_vacate = 0);
        }
        for (index, vm) in self.vms.values_mut().enumerate() {
            vm.price = prices.get(index).copied();
        }
        let is_told = was_open || self.market.price.is_some();
        self.vms.values().filter(|_| is_told).filter_map(|vm| Some((vm.care()?, vm.price))).collect()
    }
}

impl Market {
    fn may_grant(&mut self, now: Duration, prices: &[HugePagePrice]) -> bool {
        let is_due = self.granted_at.is_none_or(|at| now.saturating_sub(at) >= GRANT_EVERY);
        let is_granted = is_due && prices.iter().any(|price| price.may_vacate > 0);
        if is_granted {
            self.granted_at = Some(now);
        }
        is_granted
    }
}

fn bidder<'a>(vm: &'a Vm, nothing: &'a Bids) -> Bidder<'a> {
    let bids = vm.offer.as_ref().map_or(nothing, |offer| &offer.bids);
    Bidder { bids, weight: vm.wanted.weight, spare: spare(vm) }
}

/// Number of huge pages that a VM can give back without falling below its guarantee.
fn spare(vm: &Vm) -> u64 {
    let Hands::Registered(_) = vm.hands else { return 0 };
    let Some(share) = vm.wanted.guarantee.share() else { return u64::MAX };
    let Some(backing) = vm.backing() else { return 0 };
    let guaranteed = (u128::from(backing.resident()) * u128::from(share)).div_ceil(10_000) as u64;
    (backing.huge_2m + backing.giant_1g).saturating_sub(guaranteed) / PageSize::Huge2M.bytes().get()
}
