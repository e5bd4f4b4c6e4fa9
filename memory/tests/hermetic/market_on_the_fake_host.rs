//! Huge pages that are short: the policy sees their supply or price, and its bids are seen from outside.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host as _};
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::sensors::free_blocks::BUDDYINFO;
use wideleaf_memory::sensors::outside_heat::{Heat, HeatRegion, HeatSource, LatestHeat};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_policies::policy::{Needs, Policy, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Bids, Budget, Bytes, Gpa, GpaRange, HugePagePrice, HugePages, Hva, Moment, PageSize, PerTenThousand, Plan,
    PolicyChoice, Snapshot, VmId,
};

pub(crate) const RAM_AT: Hva = Hva::new(1 << 40);
pub(crate) const WINDOWS: u64 = 8;

pub(crate) fn ram() -> RamRange {
    RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: RAM_AT }
}

/// A host with memory, of which `free` blocks of 2 MiB are free.
fn set_free(host: &FakeHost, free: u64) {
    host.set_text(BUDDYINFO, &format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {free} 0\n"));
}

/// RAM of which the first half is on huge pages.
fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.set_text("/proc/meminfo", "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n");
    set_free(&host, 3);
    let half = mib(2) * (WINDOWS / 2);
    host.make_present(RAM_AT, half, true);
    host.make_present(RAM_AT + half, half, false);
    Arc::new(host)
}

fn vm(heat: Option<Arc<dyn HeatSource>>) -> ManagedVm {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    ManagedVm { heat, ..ManagedVm::external(VmId(0), vec![ram()], backing, None) }
}

/// A policy that keeps the supplies of huge pages that it saw, each once in a row.
struct SeesSupply(Box<dyn Policy>, Arc<Mutex<Vec<HugePages>>>);

impl Policy for SeesSupply {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn needs(&self) -> Needs {
        Needs { host_memory: true, ..self.0.needs() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let mut seen = self.1.lock();
        if let Some(host) = snapshot.host.filter(|host| seen.last() != Some(&host.huge_pages)) {
            seen.push(host.huge_pages);
        }
        drop(seen);
        self.0.plan(snapshot, now, budget, plan);
    }

    fn bids(&self) -> Option<&Bids> {
        self.0.bids()
    }
}

/// A monitor outside: the first half of the RAM is idle, the other half is used.
pub(crate) struct HalfIdle;

impl HeatSource for HalfIdle {
    fn latest(&self) -> Option<LatestHeat<Arc<Heat>>> {
        let region = |first: u64, rate| HeatRegion {
            start: RAM_AT + mib(2) * first,
            end: RAM_AT + mib(2) * (first + 4),
            rate: PerTenThousand::new(rate),
        };
        let heat = Arc::new(Heat::new(vec![region(0, 0), region(4, 10_000)]));
        // A reading of the moment, each time.
        static READINGS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = READINGS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Some(LatestHeat { number, age: Duration::ZERO, heat })
    }

    fn why_not(&self) -> Option<String> {
        None
    }
}

fn refuse_huge_pages(host: &FakeHost) {
    host.fail_advice(Advice::Collapse, libc::ENOMEM, u64::MAX);
}

/// Runs `ticks` ticks, a second apart.
pub(crate) fn run(work: &mut ManagerLoop, host: &FakeHost, ticks: u32) {
    for _ in 0..ticks {
        work.tick();
        host.sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_policy_sees_plenty_until_a_refusal_then_the_new_blocks_and_a_price_from_outside_before_both() {
    let (host, seen) = (host(), Arc::<Mutex<Vec<HugePages>>>::default());
    refuse_huge_pages(&host);
    let policy = SeesSupply(by_name("greedy").unwrap().with_defaults(), seen.clone());
    let manager = Manager::spawn(host.clone(), vec![vm(None)], Box::new(policy), ManagerConfig::default()).unwrap();
    manager.activate();
    // The supplies from the first that is like this on.
    let sees = |is_it: fn(&HugePages) -> bool| {
        for _ in 0..60_000 {
            let seen = seen.lock();
            if let Some(first) = seen.iter().position(is_it) {
                return seen[..=first].to_vec();
            }
            drop(seen);
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("not seen, but {:?}", seen.lock());
    };
    // The three blocks are the kernel's reserve.
    assert_eq!(sees(|now| *now != HugePages::Plenty), [HugePages::Plenty, HugePages::Scarce { free: 0 }]);
    // A tick under way that has counted before may ask for the two new ones. It is refused, and they are reserve then.
    let sees_two_new = |free| {
        set_free(&host, free);
        let ended = manager.live().ticks;
        let has_seen = || seen.lock().contains(&HugePages::Scarce { free: 2 });
        while !has_seen() && manager.live().ticks < ended + 2 {
            manager.activate(); // a tick at once
            std::thread::sleep(Duration::from_millis(1));
        }
        has_seen()
    };
    assert!((5..100).step_by(2).any(sees_two_new), "{:?}", seen.lock());
    let price = HugePagePrice { cycles_per_s: 7, may_vacate: 2, free: Some(90) };
    manager.set_huge_page_price(Some(price));
    let Some(HugePages::Priced(seen_price)) = sees(|now| matches!(now, HugePages::Priced(_))).pop() else {
        panic!("there is a price")
    };
    // It counts the free blocks itself: none, once the kernel has refused these two as well.
    assert!(seen_price.free.is_some_and(|free| free <= 2), "{seen_price:?}");
    assert_eq!(HugePagePrice { free: price.free, ..seen_price }, price);
    assert!(matches!(manager.live().huge_pages, HugePages::Scarce { .. }), "its own supply is told all the same");
    seen.lock().clear();
    manager.set_huge_page_price(None);
    sees(|now| matches!(now, HugePages::Scarce { .. }));
}

#[test]
fn auto_bids_while_huge_pages_are_short_and_asks_memory_that_cannot_move_once() {
    let host = host();
    let policy = PolicyChoice::parse("auto:resident_min=100").unwrap().make();
    // One page short of full, so that no window is promoted without proof.
    (4..WINDOWS).for_each(|window| host.make_absent(RAM_AT + mib(2) * window, Bytes::new(4096)));
    refuse_huge_pages(&host);
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(Arc::new(HalfIdle)))], policy, ManagerConfig::default());
    run(&mut work, &host, 2);
    assert_eq!((work.live().huge_pages, work.live().bids.is_none()), (HugePages::Plenty, true));
    run(&mut work, &host, 30);
    let live = work.live();
    let bids = live.bids.clone().expect("the kernel has refused a huge page");
    assert_eq!((live.huge_pages, bids.wanted() > 0), (HugePages::Scarce { free: 0 }, true));
    // This memory is another process's: no window of it can give its page back.
    let vacated = |result| live.outcomes.get(&("none", result)).copied().unwrap_or(0);
    assert!((1..=4).contains(&vacated("skipped_no_mechanism")), "{:?}", live.outcomes);
    assert_eq!((bids.held(), host.huge_windows()), (0, WINDOWS / 2));
}
