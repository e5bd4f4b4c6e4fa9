//! One decision for the huge pages of a host: each VM's policy bids for them, and a price clears all bids.
//!
//! ```text
//!   cycles/s        wants one    holds one
//!   saved by a   8 M  ██                       served
//!   huge page    4 M  ████         ███         served            price: the benefit of the last bidder served
//!                2 M  █████                 ─── 2 M ───          that one and those above it are served
//!                1 M  ███          █
//!                0.5 M             ██          gives back        at most half of the price (HYSTERESIS)
//!                0                 ██████      gives back        as many as the buyers lack, the coldest first
//! ```
//!
//! A bid is the number of cycles per second that a huge page saves in one window. So the price is the same for a VM
//! with many hot windows and for one with few, and no VM has to know of another.
//!
//! - **Within a VM first**: a VM with buyers and cold windows of its own trades them within itself, where a page
//!   changes hands without going back to the host. Others give only what buyers lack beyond that.
//! - **Weights**: a VM of weight *w* bids *w* times its benefit, as shares do in ESX (Waldspurger, OSDI '02).
//! - **Guarantees**: a VM gives back at most what it can spare ([`Bidder::spare`]). Its pages beyond that serve its own
//!   buyers, whatever others would pay: no other VM can have them.
//! - **Idle memory**: Ingens (OSDI '16) and ESX tax it, so that the share of an idle VM shrinks. A price does it
//!   without a tax: an idle window saves nothing, so it holds a huge page only while no buyer lacks one, whatever VM it
//!   belongs to. The tax of a VM with as many idle windows as another is the same, and a busy window is never taxed
//!   for an idle neighbour.
//! - **Order**: HawkEye (ASPLOS '19) promotes the most accessed regions of all processes first, in buckets. So do bids.
//! - **No swings**: no more is given back than buyers lack beyond the free pages, and only where a buyer pays at least
//!   [`HYSTERESIS`] times what the holder loses.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use crate::bucket::{BUCKETS, bucket_of, lowest_of};
use crate::huge_page_price::HugePagePrice;
use crate::units::{Bytes, PageSize, PerTenThousand};

/// Smallest factor between the benefits of a buyer and of the window that gives its huge page back. Benefits are
/// estimates: misses are assumed from the time to a touch, so twice as much is the least difference to act on.
pub const HYSTERESIS: u64 = 2;

/// Time for which a VM may give back a page for others, from when its loop was told: it acts at once, unless its
/// windows are in use.
pub const ALLOWED_FOR: Duration = Duration::from_secs(3);

/// Time after which such a page counts as given to a bidder, or as never given. It is longer than all that comes
/// between: a VM is told within a second, has [`ALLOWED_FOR`], and a buyer notices a free block within half a second
/// and reports within a whole one. A page that is asked for again sooner would be given twice.
pub const COMING_FOR: Duration = Duration::from_secs(6);
const _: () = assert!(COMING_FOR.as_millis() > 1_000 + ALLOWED_FOR.as_millis() + 500 + 1_000);

/// One part in `MARGIN` of a VM's resident memory stays large beyond its guarantee. Without it, a few new base pages
/// would leave a VM below its guarantee that has given all the rest: it would then be promoted whatever the price, and
/// give the same pages again.
const MARGIN: u64 = 32;

/// Number of huge pages that a VM can give back and keep this share of its resident memory large, with a margin.
pub fn spare(large: Bytes, resident: Bytes, share: PerTenThousand) -> u64 {
    let whole = u128::from(PerTenThousand::ALL.get());
    let guaranteed = (u128::from(resident.get()) * u128::from(share.get())).div_ceil(whole) as u64;
    let kept = guaranteed.saturating_add(resident.get() / MARGIN);
    large.get().saturating_sub(kept) / PageSize::Huge2M.bytes().get()
}

/// The benefit as it counts in bids: rounded down by at most 12.5 %, because no sensor is more precise.
pub const fn bid(cycles_per_s: u64) -> u64 {
    lowest_of(bucket_of(cycles_per_s))
}

/// Number of windows by benefit: of those that want a huge page, and of those that could give one back.
#[derive(Clone, PartialEq, Eq)]
pub struct Bids {
    wanted: [u32; BUCKETS],
    held: [u32; BUCKETS],
}

/// All bids of one benefit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Benefit of each of these windows, in cycles per second.
    pub cycles_per_s: u64,
    /// Number of windows that want a huge page.
    pub wanted: u32,
    /// Number of windows that hold a huge page and could give it back.
    pub held: u32,
}

/// Returns bids of no window.
impl Default for Bids {
    fn default() -> Bids {
        Bids { wanted: [0; BUCKETS], held: [0; BUCKETS] }
    }
}

impl core::fmt::Debug for Bids {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.levels()).finish()
    }
}

impl Bids {
    /// Removes all bids.
    pub fn clear(&mut self) {
        *self = Bids::default();
    }

    /// Adds a window that wants a huge page. One without any benefit wants none.
    pub fn want(&mut self, cycles_per_s: u64) {
        if cycles_per_s > 0 {
            count(&mut self.wanted, bucket_of(cycles_per_s), 1);
        }
    }

    /// Adds a window that holds a huge page with this benefit, and could give it back.
    pub fn hold(&mut self, cycles_per_s: u64) {
        count(&mut self.held, bucket_of(cycles_per_s), 1);
    }

    /// Number of windows that want a huge page.
    pub fn wanted(&self) -> u64 {
        self.wanted.iter().map(|windows| u64::from(*windows)).sum()
    }

    /// Number of windows that could give one back.
    pub fn held(&self) -> u64 {
        self.held.iter().map(|windows| u64::from(*windows)).sum()
    }

    /// The benefits with at least one window, ascending.
    pub fn levels(&self) -> impl Iterator<Item = Level> + '_ {
        let level = |(bucket, (wanted, held)): (usize, (&u32, &u32))| Level {
            cycles_per_s: lowest_of(bucket as u16),
            wanted: *wanted,
            held: *held,
        };
        self.wanted.iter().zip(&self.held).enumerate().map(level).filter(|level| level.wanted | level.held > 0)
    }

    /// The bids with these levels, as [`Bids::levels`] returns them.
    pub fn of_levels(levels: impl IntoIterator<Item = Level>) -> Bids {
        let mut bids = Bids::default();
        for Level { cycles_per_s, wanted, held } in levels {
            let bucket = bucket_of(cycles_per_s);
            if cycles_per_s > 0 {
                count(&mut bids.wanted, bucket, wanted);
            }
            count(&mut bids.held, bucket, held);
        }
        bids
    }
}

fn count(counts: &mut [u32; BUCKETS], bucket: u16, windows: u32) {
    let of_bucket = &mut counts[usize::from(bucket)];
    *of_bucket = of_bucket.saturating_add(windows);
}

fn weighted(bucket: u16, weight: u32) -> u16 {
    bucket_of(lowest_of(bucket).saturating_mul(weight.into()))
}

/// One VM in a clearing.
#[derive(Clone, Copy, Debug)]
pub struct Bidder<'a> {
    /// Bids of its policy.
    pub bids: &'a Bids,
    /// Factor on its benefits, not zero.
    pub weight: u32,
    /// Largest number of huge pages that it may be asked to give back: none from a VM below its guarantee, nor where no
    /// mechanism takes a huge page out of a window.
    pub spare: u64,
    /// Whether its windows can trade within the VM: not where no mechanism takes a huge page out of one.
    pub can_trade: bool,
}

/// The price that clears the bids of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clearing {
    /// Weighted benefit of the last bidder served, in cycles per second; 0 while free pages suffice.
    pub price: u64,
    /// Number of windows that give their page to a window of their own VM, at most.
    pub within: u64,
    /// Price and allowance of each VM, in the order given.
    pub of_vms: Vec<HugePagePrice>,
}

/// Clears the bids of all VMs of a host with `free` huge pages. `coming`: pages that windows were asked to give back
/// before and that no bidder has got since; the lack is smaller by their number. Linear in the number of VMs.
///
/// Below the price, no bidder is served. Those above it get the free pages and the pages that are given back. The last
/// ones, with the price itself as their benefit, are served as far as the pages go.
///
/// # Panics
/// If a weight is zero.
pub fn clearing_price(bidders: &[Bidder<'_>], free: u64, coming: u64) -> Clearing {
    if bidders.iter().map(|bidder| bidder.bids.wanted()).sum::<u64>() <= free {
        let no_price = HugePagePrice { free: Some(free), ..HugePagePrice::default() };
        return Clearing { price: 0, within: 0, of_vms: alloc::vec![no_price; bidders.len()] };
    }
    let mut parties: Vec<Party> = bidders.iter().map(Party::of).collect();
    let wanted = sums(parties.iter().map(|party| &party.wanted));
    let supply = Supply::of(sums(parties.iter().map(|party| &party.held)), free);
    let (bucket, served) = match wanted.iter().sum::<u64>() <= free {
        true => (0, 0),
        false => last_served(&wanted, &supply),
    };
    let (price, coldest) = (lowest_of(bucket), supply.coldest_below(bucket));
    let mut within = 0;
    if price > 0 {
        within = parties.iter_mut().map(|party| party.trade_within(bucket, coldest)).sum();
    }
    let lack = served.saturating_sub(free.saturating_add(coming).saturating_add(within));
    let allowances = share_out(&parties, coldest, lack);
    let of_vm = |((bidder, party), may_vacate): ((&Bidder<'_>, &Party), u64)| {
        // Rounded up: no bid below the price reaches it.
        let on_host = price.div_ceil(bidder.weight.into());
        let cycles_per_s = match party.own {
            Some(own) if served == 0 => own.cycles_per_s,
            Some(own) => own.cycles_per_s.min(on_host),
            None => on_host,
        };
        HugePagePrice { cycles_per_s, may_vacate, free: Some(free) }
    };
    within += parties.iter().filter_map(|party| party.own).map(|own| own.trades).sum::<u64>();
    Clearing { price, within, of_vms: bidders.iter().zip(&parties).zip(allowances).map(of_vm).collect() }
}

/// Trades within a VM by pages that it cannot spare.
#[derive(Clone, Copy)]
struct OwnTrades {
    trades: u64,
    /// Benefit of the last window that gets a page so, in the VM's own cycles per second.
    cycles_per_s: u64,
}

/// What one VM wants of the host and can spare, by weighted benefit.
struct Party {
    /// Windows that want a page and get none by `own`.
    wanted: [u32; BUCKETS],
    /// The coldest windows, as many as it can spare.
    held: [u32; BUCKETS],
    own: Option<OwnTrades>,
    can_trade: bool,
}

impl Party {
    fn of(bidder: &Bidder<'_>) -> Party {
        let (mut spared, mut kept, mut left) = ([0; BUCKETS], bidder.bids.held, bidder.spare);
        for (spared, kept) in spared.iter_mut().zip(&mut kept) {
            *spared = left.min(u64::from(*kept)) as u32;
            *kept -= *spared;
            left -= u64::from(*spared);
        }
        let mut wanted = bidder.bids.wanted;
        let mut own = None;
        if bidder.can_trade && kept.iter().any(|windows| *windows > 0) {
            let (bucket, trades) = last_served(&sums([&wanted].into_iter()), &Supply::of(sums([&kept].into_iter()), 0));
            take(wanted.iter_mut().rev(), trades);
            own = (trades > 0).then_some(OwnTrades { trades, cycles_per_s: lowest_of(bucket) });
        }
        let of_weight = |windows: &[u32; BUCKETS]| {
            let mut all = [0; BUCKETS];
            for (bucket, windows) in windows.iter().enumerate().filter(|(_, windows)| **windows > 0) {
                count(&mut all, weighted(bucket as u16, bidder.weight), *windows);
            }
            all
        };
        Party { wanted: of_weight(&wanted), held: of_weight(&spared), own, can_trade: bidder.can_trade }
    }

    /// Sets aside the coldest windows for the buyers of the VM itself. `price`: bucket of the last buyer that is
    /// served, `coldest`: number of buckets that give to it. Returns the number of trades.
    fn trade_within(&mut self, price: u16, coldest: usize) -> u64 {
        if !self.can_trade {
            return 0;
        }
        let sum = |windows: &[u32]| windows.iter().map(|windows| u64::from(*windows)).sum::<u64>();
        let trades = sum(&self.wanted[usize::from(price)..]).min(sum(&self.held[..coldest]));
        take(self.held[..coldest].iter_mut(), trades);
        trades
    }
}

/// Takes this number of windows off, those of the first buckets first.
fn take<'a>(buckets: impl Iterator<Item = &'a mut u32>, mut windows: u64) {
    for of_bucket in buckets {
        let taken = windows.min(u64::from(*of_bucket));
        *of_bucket -= taken as u32;
        windows -= taken;
    }
}

/// Number of windows of each bucket.
fn sums<'a>(parts: impl Iterator<Item = &'a [u32; BUCKETS]>) -> [u64; BUCKETS] {
    let mut sums = [0; BUCKETS];
    parts.for_each(|part| sums.iter_mut().zip(part).for_each(|(sum, windows)| *sum += u64::from(*windows)));
    sums
}

/// Huge pages that are free, or could be given back to a buyer with a given benefit.
struct Supply {
    free: u64,
    /// Number of windows of each bucket or below it that could give their page back.
    givers_to: [u64; BUCKETS],
}

impl Supply {
    fn of(mut held: [u64; BUCKETS], free: u64) -> Supply {
        let mut sum = 0;
        for windows in &mut held {
            sum += *windows;
            *windows = sum;
        }
        Supply { free, givers_to: held }
    }

    /// Number of the lowest buckets that give to a buyer of this bucket.
    fn coldest_below(&self, buyer: u16) -> usize {
        let most = lowest_of(buyer) / HYSTERESIS;
        usize::from(bucket_of(most)) + 1
    }

    fn to(&self, buyer: u16) -> u64 {
        self.free.saturating_add(self.givers_to[self.coldest_below(buyer) - 1])
    }
}

/// Pages that VMs may give back for others, each for the same time.
#[derive(Clone, Debug, Default)]
pub struct Allowances {
    /// Time of each allowance, and what is left of it, the oldest first.
    left: VecDeque<(Duration, u64)>,
}

impl Allowances {
    /// Adds an allowance of this number of pages.
    pub fn add(&mut self, now: Duration, pages: u64) {
        if pages > 0 {
            self.left.push_back((now, pages));
        }
    }

    /// Takes pages off, those of the oldest allowance first.
    pub fn take(&mut self, mut pages: u64) {
        for (_, left) in &mut self.left {
            let taken = pages.min(*left);
            *left -= taken;
            pages -= taken;
        }
    }

    /// Number of pages that are left, where each is there `for_time`: [`ALLOWED_FOR`] for the VM itself,
    /// [`COMING_FOR`] for the others.
    pub fn pages(&mut self, now: Duration, for_time: Duration) -> u64 {
        self.left.retain(|(at, pages)| *pages > 0 && now.saturating_sub(*at) < for_time);
        self.left.iter().map(|(_, pages)| pages).sum()
    }
}

/// Bucket of the last buyer that is served, and the number of those served. Where no page is available, it is the
/// highest bucket: the first page that becomes free goes to the best buyer.
fn last_served(wanted: &[u64; BUCKETS], supply: &Supply) -> (u16, u64) {
    let buckets = (0..BUCKETS as u16).rev().filter(|bucket| wanted[usize::from(*bucket)] > 0);
    let (mut above, mut last) = (0, None);
    for bucket in buckets {
        let supplied = supply.to(bucket);
        if above >= supplied {
            return last.unwrap_or((bucket, 0));
        }
        above += wanted[usize::from(bucket)];
        last = Some((bucket, above.min(supplied)));
    }
    last.unwrap_or_default()
}

/// Number of pages that each VM gives, `lack` in all: the coldest first, and within a bucket in proportion to what each
/// has of it.
fn share_out(givers: &[Party], buckets: usize, mut lack: u64) -> Vec<u64> {
    let mut given = alloc::vec![0; givers.len()];
    for bucket in 0..buckets {
        let all: u64 = givers.iter().map(|giver| u64::from(giver.held[bucket])).sum();
        let taken = lack.min(all);
        let part = |windows: u64| (u128::from(taken) * u128::from(windows) / u128::from(all)) as u64;
        let mut seen = 0;
        for (given, giver) in given.iter_mut().zip(givers).filter(|(_, giver)| giver.held[bucket] > 0) {
            let before = part(seen);
            seen += u64::from(giver.held[bucket]);
            *given += part(seen) - before;
        }
        lack -= taken;
        if lack == 0 {
            break;
        }
    }
    given
}

#[cfg(test)]
mod tests;
