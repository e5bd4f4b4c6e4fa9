//! Two managed VMs, from their bids to the price of the daemon and back to actions.
//!
//! ```text
//!   hot loop  ── bids ──▶ table of the market ── price, may vacate ──▶ cold loop ── gives back ──▶ free blocks ─┐
//!      ▲                                                                                                        │
//!      └──────────────────────────────── each collapse takes one ◀──────────────────────────────────────────────┘
//! ```

use wideleaf_attach::live_view;
use wideleaf_control::protocol::PriceOfHugePage;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::mover::{ALL_PAGES, Mover as _, Place, PlaceBacking};
use wideleaf_memory::region::{GuestRam, RamRange};
use wideleaf_memory::sensors::outside_heat::{Heat, HeatRegion, HeatSource, LatestHeat};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_mover::FakeMover;
use wideleaf_policies::{Gpa, GpaRange, HugePagePrice, Hva, PageSize, PerTenThousand, PolicyChoice, VmId, WindowIndex};

use super::market::Run;
use super::*;

/// Number of windows of the hot guest, and of the cold one.
const HOT_WINDOWS: u64 = 4;
const COLD_WINDOWS: u64 = 8;

fn windows(number: u64) -> GpaRange {
    GpaRange::new(Gpa::new(0), mib(2) * number).expect("they fit")
}

fn anonymous() -> BackingConfig {
    BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("it exists")
}

fn managed(host: &Arc<FakeHost>, vm: ManagedVm) -> ManagerLoop {
    let policy = PolicyChoice::parse("auto:resident_min=100").expect("a policy").make();
    ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default())
}

/// A monitor that finds all of this RAM used, and the number of its readings.
struct AllUsed(RamRange, AtomicU64);

impl HeatSource for AllUsed {
    fn latest(&self) -> Option<LatestHeat<Arc<Heat>>> {
        let AllUsed(ram, readings) = self;
        let used = HeatRegion { start: ram.hva, end: ram.hva + ram.gpa.bytes(), rate: PerTenThousand::ALL };
        let number = readings.fetch_add(1, Ordering::Relaxed);
        Some(LatestHeat { number, age: Duration::ZERO, heat: Arc::new(Heat::new(vec![used])) })
    }

    fn why_not(&self) -> Option<String> {
        None
    }
}

/// A guest on base pages, all used. Each window is one page short of full, so that none is promoted without proof.
fn hot_guest(host: &Arc<FakeHost>) -> ManagerLoop {
    let ram = RamRange { gpa: windows(HOT_WINDOWS), hva: Hva::new(1 << 40) };
    host.make_present(ram.hva, ram.gpa.bytes(), false);
    (0..HOT_WINDOWS).for_each(|window| host.make_absent(ram.hva + mib(2) * window, PageSize::Base4K.bytes()));
    let heat: Arc<dyn HeatSource> = Arc::new(AllUsed(ram, AtomicU64::new(0)));
    managed(host, ManagedVm { heat: Some(heat), ..ManagedVm::external(VmId(0), vec![ram], anonymous(), None) })
}

/// A guest on huge pages, none used.
struct ColdGuest {
    host: Arc<FakeHost>,
    mover: Arc<FakeMover>,
    ram: Arc<GuestRam>,
    work: ManagerLoop,
    /// Number of its huge pages that are free blocks of the host by now.
    given: u64,
}

impl ColdGuest {
    fn new(host: &Arc<FakeHost>) -> ColdGuest {
        let ram = GuestRam::map(&[windows(COLD_WINDOWS)], anonymous()).expect("there are addresses");
        let mover = Arc::<FakeMover>::default();
        for window in (0..COLD_WINDOWS).map(WindowIndex::new) {
            mover.write(window, ALL_PAGES);
            mover.make_huge(window);
        }
        host.make_present(ram.base(), ram.bytes(), true);
        host.move_with(mover.clone());
        let work = managed(host, ManagedVm::new(VmId(0), ram.clone(), None));
        ColdGuest { host: host.clone(), mover, ram, work, given: 0 }
    }

    fn tick(&mut self) {
        self.work.tick();
        let on_base_pages = PlaceBacking { resident: 512, is_huge: false };
        for window in 0..COLD_WINDOWS {
            if self.mover.look(Place::Guest(WindowIndex::new(window))).expect("no call fails") == on_base_pages {
                self.host.make_present(self.ram.base() + mib(2) * window, mib(2), false);
            }
        }
        let given = self.mover.huge_given_back();
        self.host.set_free_blocks(self.host.free_blocks() + given - self.given);
        self.given = given;
    }
}

/// Reports the bids of a loop, and sets the price that the daemon has for it. Returns the price.
fn exchange(work: &ManagerLoop, run: &Run<'_>) -> u64 {
    let said = run.exchanges(live_view::bids(&work.live()));
    let price = said.map(|said| {
        let PriceOfHugePage { cycles_per_s, may_vacate, free } = said;
        HugePagePrice { cycles_per_s, may_vacate, free }
    });
    work.set_huge_page_price(price);
    price.map_or(0, |price| price.cycles_per_s)
}

/// A hot and a cold guest for 80 seconds, which report each time that this number of quarters of a second has passed.
fn trade_with_reports_each(quarters: u64) {
    let (bench, host) = (Bench::new(""), Arc::<FakeHost>::default());
    host.set_text("/proc/meminfo", "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n");
    host.set_free_blocks(0);
    let (mut hot, mut cold) = (hot_guest(&host), ColdGuest::new(&host));
    let [hot_run, cold_run] = [(1, "hot"), (2, "cold")].map(|(pid, name)| Run::register(&bench, pid, name, mib(0)));
    let mut highest = 0;
    for quarter in 1..=4 * 80_u64 {
        hot.tick();
        cold.tick();
        host.sleep(Duration::from_millis(250));
        // Each loop alone for half a minute: by then the hot one has bids, and no page.
        if quarter <= 4 * 30 {
            assert_eq!((hot.report().done("collapse"), cold.work.report().done("vacate")), (0, 0), "quarter {quarter}");
            continue;
        }
        if quarter.is_multiple_of(4) {
            bench.tick_at(quarter / 4);
        }
        if quarter.is_multiple_of(quarters) {
            highest = highest.max(exchange(&hot, &hot_run));
            exchange(&cold.work, &cold_run);
        }
    }
    let done = (hot.report().done("collapse"), cold.work.report().done("vacate"));
    assert_eq!(done, (HOT_WINDOWS, HOT_WINDOWS), "reports each {quarters}: {:?}", cold.work.report().outcomes);
    assert_eq!((host.huge_windows(), host.free_blocks()), (COLD_WINDOWS, 0), "none was made or lost");
    assert!(highest > 0, "there was a price");
    assert_eq!(bench.engine.scrape().huge_page_price, 0, "and it has ended");
    cold.work.finish();
    // Compares each page with what was written.
    (0..COLD_WINDOWS).for_each(|window| cold.mover.write(WindowIndex::new(window), ALL_PAGES));
}

/// Runs report four times a second while there is a price, and each second without one.
#[test]
fn a_hot_guest_gets_the_pages_that_a_cold_one_gives_at_the_price_of_their_bids() {
    [1, 4].into_iter().for_each(trade_with_reports_each);
}
