//! What `auto` does while huge pages are short: it bids, obeys the price, and lets cold windows give theirs back.
//!
//! ```text
//!   hot, on base pages, pays for promotion and for a window that gives its page back ──▶ wants one ─┐
//!   large and idle at the latest samples ──────────────────────────────────────────────▶ holds one ─┤ bids
//!                                                                                                   ▼
//!   price: from outside, for all VMs of the host; or else of these bids and the free pages ◀── clearing_price
//!     │
//!     ├─▶ promoted: only by proof, and only what saves at least the price
//!     └─▶ vacated: the coldest first, each worth at most half of the price: one for each window promoted, and as many
//!                  more as other VMs are to get
//!
//!   plan:  Vacate(cold)  Promote(hot)  Vacate(cold)  Promote(hot)  …  Vacate(cold): for another VM
//! ```
//!
//! While there are plenty of huge pages, the market is closed and changes no plan. A window that gave its page back
//! gets another one only by proof of heat, never because it is full: no window goes to and fro. A bidder counts as hot
//! only up to its newest sample, and only if that saw a touch. Otherwise the page of a cold window goes to one that was
//! hot seconds ago and is cold as well by now.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::audit::{Audit, Kind};
use super::judge::Judge;
use super::memory::Memory;
use crate::account::host_backing;
use crate::action::Action;
use crate::bucket::{BUCKETS, bucket_of};
use crate::candidates::{Place, is_demotable};
use crate::huge_page_price::HugePagePrice;
use crate::locality;
use crate::market::{Bidder, Bids, COMING_FOR, HYSTERESIS, Level, bid, clearing_price, spare};
use crate::node::NodeId;
use crate::rank::Ranking;
use crate::snapshot::{AccessHistory, Backing, HugePages, Snapshot, VmId, VmSnapshot};
use crate::units::{Moment, PerTenThousand, WindowIndex};

/// Number of newest samples without a touch after which a large window may give its huge page back. A sample watches
/// for 10 to 80 ms. If touches come at random times, a window with 40 of them a second passes two samples of 40 ms once
/// in 25 times (e^-3.2). Fewer touches save little ([`Judge::worth_of_large`]), and a wrong decision costs two moves:
/// the window comes back as soon as it is proven hot. A release of zero pages waits for a full history.
const GIVES_AFTER_SAMPLES: u8 = 2;

/// Time after which a VM with cold windows has no buyer for them: by then one that other VMs lack would have been
/// asked for again. An attached guest is never asked.
const WANTED_WITHIN: Duration = Duration::from_secs(10);
const _: () = assert!(WANTED_WITHIN.as_millis() > COMING_FOR.as_millis());

/// The market as `auto` knows it since its latest plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Market {
    is_open: bool,
    bids: Bids,
    price: HugePagePrice,
    /// Price from outside in cycles per second; 0 without such a price.
    told: u64,
    /// Whether other VMs bid too, so that their pages may come to these windows.
    has_others: bool,
    /// Number of free huge pages, if known.
    free: Option<u64>,
    /// Largest number of windows that may be vacated for other windows of these VMs.
    trades: u64,
    /// Windows that could give their page back, the coldest best.
    cold: Ranking,
    /// VMs of which no window can be vacated.
    immovable: Vec<VmId>,
    demand: Demand,
    supply: Supply,
    /// Latest plan at which a buyer wanted a page of a cold window, or at which there was no price.
    wanted_at: Moment,
}

/// Huge pages that windows could have, and windows that want one, as of the latest plan.
#[derive(Clone, Copy, Debug, Default)]
struct Supply {
    /// Number of pages that are free, or that cold windows of these VMs hold.
    pages: u64,
    wanted: u64,
}

/// When demand rose: large windows that were sampled before may have become cold since.
#[derive(Clone, Copy, Debug, Default)]
struct Demand {
    /// Largest number of windows of these VMs that wanted a huge page, since it was last less than half of that.
    peak: u64,
    had_price: bool,
    rose_at: Moment,
    /// Moment of the latest plan.
    now: Moment,
}

impl Demand {
    fn update(&mut self, wanted: u64, has_price: bool, now: Moment) {
        let is_rising = wanted > self.peak || (has_price && !self.had_price);
        if is_rising {
            self.rose_at = now;
        }
        if is_rising || wanted < self.peak / 2 {
            self.peak = wanted;
        }
        (self.had_price, self.now) = (has_price, now);
    }

    /// Whether a sample of this age, in seconds, was taken before demand rose.
    fn is_newer_than(&self, age_s: u16) -> bool {
        u64::from(age_s) > self.now.since(self.rose_at).as_secs()
    }
}

impl Market {
    /// Price in cycles per second.
    pub fn price(&self) -> u64 {
        self.price.cycles_per_s
    }

    /// Whether a huge page has a price now.
    fn has_price(&self) -> bool {
        self.price() > 0
    }

    /// Whether cold windows are kept for buyers: of these VMs, or of other VMs that have asked for windows of late.
    pub fn keeps_cold(&self) -> bool {
        let is_at_work = self.has_price() || self.price.may_vacate > 0;
        is_at_work && self.demand.now.since(self.wanted_at) < WANTED_WITHIN
    }

    /// Whether a window may have a huge page that saves this many cycles per second, if that is any.
    pub fn serves(&self, per_s: impl FnOnce() -> Option<u64>) -> bool {
        !self.has_price() || per_s().is_some_and(|per_s| bid(per_s) >= self.price())
    }

    /// Number of huge pages beyond those of vacated windows for which it is worth to ask: those that are free, and one
    /// more, since the manager asks the kernel once in a while all the same.
    pub fn pages(&self) -> u64 {
        self.free.map_or(u64::MAX, |free| free.saturating_add(1))
    }

    /// Largest number of windows to vacate for other windows of these VMs, and for other VMs.
    pub fn to_vacate(&self) -> (u64, usize) {
        (self.trades, usize::try_from(self.price.may_vacate).unwrap_or(usize::MAX))
    }

    /// Whether windows without proof may have huge pages.
    pub fn serves_without_proof(&self) -> bool {
        !self.has_price()
    }

    /// Number of windows at the latest plan that pay for their cost, but not the price of a huge page.
    pub fn priced_out(&self) -> u64 {
        let below = |level: &Level| level.cycles_per_s < self.price();
        self.bids.levels().filter(below).map(|level| u64::from(level.wanted)).sum()
    }

    /// Bids as of the latest plan; `None` while the market is closed.
    pub fn bids(&self) -> Option<&Bids> {
        self.is_open.then_some(&self.bids)
    }

    /// Whether a sample of the window is worth more than usual: of one on base pages that may be a buyer, while there
    /// is a page for it or other VMs may give one, and of a large one that may have become cold. That is known before
    /// the first buyer is proven, so that it can be vacated for it at once. A large one that was hot is sampled again
    /// only while the known cold ones do not suffice.
    ///
    /// A window on base pages is sampled again after as many seconds as it has had samples with the same result: a
    /// buyer is proven by a second touch, and what was idle so far may have become hot where pages are left.
    pub fn hurries(&self, vm: &VmSnapshot, row: usize) -> bool {
        let (access, age_s) = (vm.access[row], vm.access_quality[row].age_s);
        let Supply { pages, wanted } = self.supply;
        let is_due = || age_s >= access.same_samples().into();
        self.is_open
            && match (vm.backing[row], access.was_touched()) {
                (Backing::Base4K, None) => pages > 0 || self.has_others,
                (Backing::Base4K, Some(true)) => pages > 0 && is_due(),
                (Backing::Base4K, Some(false)) => pages > wanted && is_due(),
                (Backing::Huge2M, _) if !self.may_vacate(vm.vm) => false,
                (Backing::Huge2M, Some(true)) => self.has_price() && pages < wanted && self.demand.is_newer_than(age_s),
                (Backing::Huge2M, _) => {
                    // A result for a whole region does not show that this one is cold.
                    !is_idle_of_late(access) || !vm.access_quality[row].is_of_this_window()
                }
                (Backing::Unbacked | Backing::Giant1G, _) => false,
            }
    }

    /// Notes that this VM's memory cannot be moved to base pages.
    pub fn cannot_vacate(&mut self, vm: VmId) {
        if self.may_vacate(vm) {
            self.immovable.push(vm);
        }
    }

    /// Whether windows of this VM may be vacated, as far as that is known.
    pub fn may_vacate(&self, vm: VmId) -> bool {
        !self.immovable.contains(&vm)
    }

    /// Begins a plan without bids; they are accepted unless there are plenty of huge pages.
    pub fn open(&mut self, huge_pages: HugePages) {
        let was_open = core::mem::replace(&mut self.is_open, huge_pages != HugePages::Plenty);
        self.free = match huge_pages {
            HugePages::Scarce { free } => Some(free),
            HugePages::Priced(price) => price.free,
            HugePages::Plenty => None,
        };
        self.has_others = matches!(huge_pages, HugePages::Priced(_));
        self.told = if let HugePages::Priced(price) = huge_pages { price.cycles_per_s } else { 0 };
        if was_open {
            self.price = HugePagePrice::default();
            self.bids.clear();
            self.cold.clear();
        }
    }

    /// Whether the window is large, idle at its latest samples, these are of the window itself, and it can be vacated.
    pub fn may_offer(&self, vm: &VmSnapshot, row: usize, now: Moment) -> bool {
        self.is_open
            && is_demotable(vm, row, now)
            && is_idle_of_late(vm.access[row])
            && vm.access_quality[row].is_of_this_window()
            && self.may_vacate(vm.vm)
    }

    /// Bids for a window that may be offered.
    pub fn hold(&mut self, per_s: u64, place: Place) {
        self.bids.hold(per_s);
        self.cold.push(BUCKETS as u16 - 1 - bucket_of(per_s), place);
    }

    /// Whether a window that needs a huge page may have one, as far as measured gains are known. No window waits for a
    /// trial while huge pages have a price: what a trial promotes would be decided by the pages that are given back.
    pub fn admits(&self, audit: &mut Audit, place: Place, window: WindowIndex, kind: Kind, per_s: u64) -> bool {
        let index = place.vm as usize;
        match self.demand.had_price {
            true => !audit.is_stopped(index, kind),
            false => audit.admits(index, window, kind, per_s),
        }
    }

    /// Bids for a window on base pages, if that also pays for a window that gives its huge page back.
    pub fn want(&mut self, per_s: u64, pays_for_vacate: impl FnOnce() -> bool) {
        if self.is_open && pays_for_vacate() {
            self.bids.want(per_s);
        }
    }

    /// Whether a window that saves this many cycles per second, if it is proven, may have a huge page, as far as the
    /// price is known before the last bid.
    pub fn could_serve(&self, per_s: Option<u64>) -> bool {
        self.told == 0 || per_s.is_some_and(|per_s| bid(per_s) >= self.told)
    }

    /// The windows that may give their huge page back now.
    pub fn vacating<'a>(&'a self, snapshot: &'a Snapshot) -> Vacating<'a, impl Iterator<Item = Place> + 'a> {
        Vacating {
            snapshot,
            coldest: self.cold.best_first(),
            seen: 0,
            cheap: self.givers_to(self.price()),
            passed: BTreeMap::new(),
            spare: snapshot.vms.iter().map(spare_of).collect(),
        }
    }

    /// Number of the coldest windows that are worth little enough to give their page to one that saves this many cycles
    /// per second.
    pub fn givers_to(&self, per_s: u64) -> usize {
        let is_worth_little = |level: &Level| per_s > 0 && level.cycles_per_s <= per_s / HYSTERESIS;
        self.bids.levels().filter(is_worth_little).map(|level| level.held as usize).sum()
    }

    /// Finds the price, after the last bid. `spare`: number of huge pages that these VMs can give back.
    pub fn set_price(&mut self, huge_pages: HugePages, spare: u64, now: Moment) {
        (self.price, self.trades) = match huge_pages {
            HugePages::Plenty => (HugePagePrice::default(), 0),
            HugePages::Scarce { free } => self.clear_alone(free, spare),
            HugePages::Priced(price) => (price, u64::MAX),
        };
        let has_buyer = self.bids.levels().any(|level| level.wanted > 0 && level.cycles_per_s >= self.price());
        if has_buyer || self.price.may_vacate > 0 || !self.demand.had_price {
            self.wanted_at = now;
        }
        let (wanted, pages) = (self.bids.wanted(), self.free.unwrap_or(0).saturating_add(self.bids.held()));
        self.supply = Supply { pages, wanted };
        self.demand.update(wanted, self.has_price(), now);
    }

    /// Price of these bids alone, and the number of trades: the policy knows of no other VM.
    fn clear_alone(&self, free: u64, spare: u64) -> (HugePagePrice, u64) {
        let all = Bidder { bids: &self.bids, weight: 1, spare, can_trade: true };
        let price = clearing_price(&[all], free, 0).of_vms[0];
        let is_served = |level: &Level| price.cycles_per_s > 0 && level.cycles_per_s >= price.cycles_per_s;
        let served: u64 = self.bids.levels().filter(is_served).map(|level| u64::from(level.wanted)).sum();
        (price, served.saturating_sub(free))
    }
}

impl Judge {
    /// Cycles per second that a large window saves.
    pub(super) fn worth_of_large(&self, window: &Memory, vm: &VmSnapshot, row: usize) -> u64 {
        self.prices.benefit_per_s(vm.access[row], window.used(vm, row), vm.guest_mapping[row])
    }
}

/// A window that needs a huge page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buyer {
    /// Index of its VM.
    pub vm: u32,
    /// NUMA node from which the page has to come; `None`: from any.
    pub node: Option<NodeId>,
}

/// VM and NUMA node of a huge page, as far as the node is known.
type Holder = (u32, Option<NodeId>);

/// Windows that may give their huge page back, the coldest first: to a window of their own VM, or, as far as that can
/// spare it, of another. On a host with several NUMA nodes, to one that needs a page of that node.
pub(super) struct Vacating<'a, C> {
    snapshot: &'a Snapshot,
    coldest: C,
    /// Number of windows that were taken from `coldest`.
    seen: usize,
    /// Number of the coldest windows that give theirs at the present price.
    cheap: usize,
    /// Windows that could not give theirs to an earlier buyer, each with its number among the coldest.
    passed: BTreeMap<Holder, VecDeque<(usize, Place)>>,
    /// Number of pages that each VM can still spare.
    spare: Vec<u64>,
}

impl<C: Iterator<Item = Place>> Vacating<'_, C> {
    /// Whether there is one for this buyer.
    pub fn has_one_for(&mut self, buyer: Buyer) -> bool {
        self.find(Some(buyer), self.cheap).is_some()
    }

    /// The next one for this buyer at the present price.
    pub fn next_for(&mut self, buyer: Buyer) -> Option<Place> {
        self.next(Some(buyer), self.cheap)
    }

    /// The next one for this buyer among the `givers` coldest windows, whatever the price.
    pub fn next_of(&mut self, buyer: Buyer, givers: usize) -> Option<Place> {
        self.next(Some(buyer), givers)
    }

    /// The next one for another process.
    pub fn next_for_others(&mut self) -> Option<Place> {
        self.next(None, self.cheap)
    }

    fn next(&mut self, buyer: Option<Buyer>, givers: usize) -> Option<Place> {
        let holder = self.find(buyer, givers)?;
        let (_, place) = self.passed.get_mut(&holder)?.pop_front()?;
        if buyer.is_none_or(|buyer| buyer.vm != place.vm) {
            self.spare[place.vm as usize] -= 1;
        }
        Some(place)
    }

    /// Holder of the coldest window that gives its page to this buyer, or to another process. That window is then the
    /// first of the holder's passed ones.
    fn find(&mut self, buyer: Option<Buyer>, givers: usize) -> Option<Holder> {
        let snapshot = self.snapshot;
        let Vacating { coldest, seen, passed, spare, .. } = self;
        let gives = |(vm, node): Holder| {
            let is_own = buyer.is_some_and(|buyer| buyer.vm == vm);
            // Other processes are told of the shortage of the node on which this VM runs.
            let wanted = buyer.map_or_else(|| locality::only_node(&snapshot.vms[vm as usize]), |buyer| buyer.node);
            (is_own || spare[vm as usize] > 0) && (wanted.is_none() || node.is_none() || node == wanted)
        };
        let first = |(holder, windows): (&Holder, &VecDeque<(usize, Place)>)| {
            let (number, _) = windows.front()?;
            (*number < givers && gives(*holder)).then_some((*number, *holder))
        };
        if let Some((_, holder)) = passed.iter().filter_map(first).min() {
            return Some(holder);
        }
        while *seen < givers {
            let place = coldest.next()?;
            let (vm, row) = place.of(snapshot);
            let holder = (place.vm, vm.node[row].most());
            passed.entry(holder).or_default().push_back((*seen, place));
            *seen += 1;
            if gives(holder) {
                return Some(holder);
            }
        }
        None
    }
}

/// Number of huge pages that a VM can give to others without falling below its guarantee.
pub(super) fn spare_of(vm: &VmSnapshot) -> u64 {
    if vm.guarantee == PerTenThousand::new(0) {
        return u64::MAX;
    }
    let backing = host_backing(vm);
    spare(backing.huge_2m + backing.giant_1g, backing.resident(), vm.guarantee)
}

/// The request that the window of this row gives its huge page back.
pub(super) fn vacate(place: Place, snapshot: &Snapshot) -> Action {
    let (vm, row) = place.of(snapshot);
    Action::Vacate { vm: vm.vm, window: vm.windows[row] }
}

fn is_idle_of_late(access: AccessHistory) -> bool {
    access.idle_samples() >= GIVES_AFTER_SAMPLES
}
