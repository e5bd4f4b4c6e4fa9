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
//! An external guest buys and holds huge pages, but gives none back: no call from outside takes one out of a window.

use std::time::Duration;

use wideleaf_policies::market::{Bidder, clearing_price};
use wideleaf_policies::{Bids, HugePagePrice, PageSize};

use super::vm::{Hands, Vm};
use super::{Engine, SharedCare, Table, told_if_free};

/// Least time between two clearings, of which each takes some 4 us for a VM.
const CLEARED_EVERY: Duration = Duration::from_millis(200);

/// Time after which a page that a VM may give back counts as given to a bidder, or as never given: a loop acts at once,
/// and a buyer notices a free block within half a second and reports each second.
const COMING_FOR: Duration = Duration::from_secs(3);

/// State of the market.
#[derive(Debug, Default)]
pub(super) struct Market {
    /// Price on the whole host, in cycles per second at weight 1; `None` while huge pages are not short.
    price: Option<u64>,
    /// Number of pages that VMs may give back and that no bidder has got yet.
    coming: u64,
    /// Time of the latest permission.
    granted_at: Duration,
    /// Number of windows that wanted a page at the latest clearing, and its time.
    wanted: u64,
    cleared_at: Duration,
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
    /// Clears the market again while it is open, after a VM of `wideleaf run` has reported its bids.
    pub(super) fn clear_market_again(&mut self, now: Duration) {
        if self.market.price.is_some() && now.saturating_sub(self.market.cleared_at) >= CLEARED_EVERY {
            self.clear_market(now);
        }
    }

    /// Sets the price of each VM. Returns the managers of this daemon that have to know theirs.
    fn clear_market(&mut self, now: Duration) -> Vec<(SharedCare, Option<HugePagePrice>)> {
        let was_open = self.market.price.is_some();
        // Kept pages are counted out by each manager that was refused one; the least is the latest.
        let free = self.vms.values().filter_map(|vm| vm.offer.as_ref()?.free).min();
        let nothing = Bids::default();
        let bidder = |vm| bidder(vm, &nothing);
        let bidders: Vec<Bidder<'_>> = self.vms.values().map(bidder).collect();
        let coming = self.market.coming(now, bidders.iter().map(|bidder| bidder.bids.wanted()).sum());
        let cleared = free.map(|free| clearing_price(&bidders, free, coming));
        self.market.price = cleared.as_ref().map(|clearing| clearing.price);
        let prices = cleared.map(|clearing| clearing.of_vms).unwrap_or_default();
        self.market.grant(now, prices.iter().map(|price| price.may_vacate).sum());
        for (index, vm) in self.vms.values_mut().enumerate() {
            let untold = vm.price.map_or(0, |price| price.may_vacate);
            let with_untold = |price: &HugePagePrice| HugePagePrice { may_vacate: price.may_vacate + untold, ..*price };
            vm.price = prices.get(index).map(with_untold);
        }
        let is_told = was_open || self.market.price.is_some();
        self.vms.values().filter(|_| is_told).filter_map(|vm| Some((vm.care()?, vm.price))).collect()
    }
}

impl Market {
    /// Number of pages that are coming, where `wanted` windows want one: if that is fewer than at the latest clearing,
    /// the others have got it.
    fn coming(&mut self, now: Duration, wanted: u64) -> u64 {
        let got = std::mem::replace(&mut self.wanted, wanted).saturating_sub(wanted);
        self.cleared_at = now;
        self.coming = match now.saturating_sub(self.granted_at) < COMING_FOR {
            true => self.coming.saturating_sub(got),
            false => 0,
        };
        self.coming
    }

    /// Notes the number of pages that may be given back.
    fn grant(&mut self, now: Duration, pages: u64) {
        if pages > 0 {
            (self.coming, self.granted_at) = (self.coming + pages, now);
        }
    }
}

fn bidder<'a>(vm: &'a Vm, nothing: &'a Bids) -> Bidder<'a> {
    let bids = vm.offer.as_ref().map_or(nothing, |offer| &offer.bids);
    let can_trade = matches!(vm.hands, Hands::Registered(_));
    Bidder { bids, weight: vm.wanted.weight, spare: spare(vm), can_trade }
}

/// Number of huge pages that a VM can give back without falling below its guarantee.
fn spare(vm: &Vm) -> u64 {
    let Hands::Registered(_) = vm.hands else { return 0 };
    let Some(share) = vm.wanted.guarantee.share() else { return u64::MAX };
    let Some(backing) = vm.backing() else { return 0 };
    let guaranteed = (u128::from(backing.resident()) * u128::from(share)).div_ceil(10_000) as u64;
    (backing.huge_2m + backing.giant_1g).saturating_sub(guaranteed) / PageSize::Huge2M.bytes().get()
}
