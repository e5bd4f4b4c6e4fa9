//! Planning over snapshots of 16 GiB, 256 GiB and 4 TiB of guest RAM, in windows per second. Half of the windows are
//! candidates, touched at 11 of 16 samples for an hour, and the budget allows them all. This is the longest possible
//! plan; a live tick stops at the budget, much sooner. As in the manager, policy and plan keep their allocations from
//! tick to tick. Policies that plan nothing are not measured.
//!
//! `one decision for a host` is 4 TiB of guests in 64 VMs without a free huge page: each VM's `auto` bids and plans at
//! the price of the second before, and all bids are cleared. The loops of a host do this side by side; here it is the
//! sum.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_policies::market::{Bidder, Bids, clearing_price};
use wideleaf_policies::policy::{POLICIES, by_name};
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    AccessHistory, Backing, Budget, BudgetLimits, Bytes, HostMemory, HugePagePrice, HugePages, Moment, PageSize,
    PerTenThousand, Plan, Policy, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

fn snapshot(ram: Bytes) -> Snapshot {
    let windows = ram.pages(PageSize::Huge2M);
    let mut vm = VmSnapshot::with_capacity(VmId(0), windows as usize);
    for window in 0..windows {
        let backing = if window % 2 == 0 { Backing::Huge2M } else { Backing::Base4K };
        let access = AccessHistory::from_parts(0b1011_0111_1010_1011, AccessHistory::SAMPLES_MAX);
        vm.push(WindowRow { access, ..WindowRow::new(WindowIndex::new(window), 512, backing) });
    }
    Snapshot { vms: vec![vm], ..Snapshot::default() }
}

const LIMITS: BudgetLimits = BudgetLimits {
    copy_per_second: Bytes::new(u64::MAX / 4),
    cpu_share: PerTenThousand::new(u32::MAX),
    burst: Duration::from_secs(3600),
};

/// Time between two plans: longer than any policy sleeps, and long enough for a window to be hot.
const BETWEEN_PLANS: Duration = Duration::from_secs(3600);

const PLAN_NOTHING: [&str; 4] = ["never", "prealloc", "at-fault", "reservation"];

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("planning");
    for (name, ram) in [("16 GiB", gib(16)), ("256 GiB", gib(256)), ("4 TiB", gib(4096))] {
        let snapshot = snapshot(ram);
        group.throughput(Throughput::Elements(ram.pages(PageSize::Huge2M)));
        for policy in POLICIES.iter().filter(|policy| !PLAN_NOTHING.contains(&policy.name)) {
            group.bench_with_input(BenchmarkId::new(policy.name, name), &snapshot, |b, snapshot| {
                let (mut policy, mut plan, mut now) =
                    (policy.with_defaults(), Plan::with_bound(usize::MAX), Moment::START);
                b.iter(|| {
                    now = now + BETWEEN_PLANS;
                    plan.clear();
                    policy.plan(snapshot, now, &mut Budget::new(LIMITS, now), &mut plan);
                    plan.actions().len()
                });
            });
        }
    }
    group.finish();
}

const VMS: u64 = 64;

/// One VM of a host without a free huge page.
struct Loop {
    policy: Box<dyn Policy>,
    snapshot: Snapshot,
    plan: Plan,
    price: HugePagePrice,
}

impl Loop {
    /// A quarter of the windows is large and idle, a quarter large and touched, half on base pages and touched.
    fn new(vm: u64) -> Loop {
        let mut snapshot = snapshot(gib(4096 / VMS));
        for (row, access) in snapshot.vms[0].access.iter_mut().enumerate() {
            *access = if row % 4 == 0 {
                AccessHistory::from_parts(0, AccessHistory::SAMPLES_MAX)
            } else {
                // From 16 touches a second to 16 000.
                access.with_touches_per_s(Some(16 << ((row as u64 / 4 + vm) % 10)))
            };
        }
        let policy = by_name("auto").expect("it is in the list").with_defaults();
        Loop { policy, snapshot, plan: Plan::default(), price: HugePagePrice::default() }
    }

    fn plan(&mut self, now: Moment) -> usize {
        let huge_pages = HugePages::Priced(self.price);
        let host = HostMemory { total: gib(8192), available: gib(4096), giant_pages_free: 0, huge_pages };
        self.snapshot.host = Some(host);
        self.plan.clear();
        self.policy.plan(&self.snapshot, now, &mut Budget::new(BudgetLimits::default(), now), &mut self.plan);
        self.plan.actions().len()
    }
}

fn one_decision_for_a_host(c: &mut Criterion) {
    let mut loops: Vec<Loop> = (0..VMS).map(Loop::new).collect();
    let mut now = Moment::START;
    let mut group = c.benchmark_group("one decision for a host");
    group.throughput(Throughput::Elements(gib(4096).pages(PageSize::Huge2M)));
    group.bench_function("bids, prices and plans of 64 VMs", |b| {
        b.iter(|| {
            now = now + Duration::from_secs(1);
            let planned: usize = loops.iter_mut().map(|one| one.plan(now)).sum();
            let bids: Vec<&Bids> = loops.iter().filter_map(|one| one.policy.bids()).collect();
            let bidders: Vec<Bidder<'_>> =
                bids.into_iter().map(|bids| Bidder { bids, weight: 1, spare: u64::MAX, can_trade: true }).collect();
            let clearing = clearing_price(&bidders, 0, 0);
            loops.iter_mut().zip(clearing.of_vms).for_each(|(one, price)| one.price = price);
            planned
        });
    });
    group.bench_function("prices alone", |b| {
        let bids: Vec<&Bids> = loops.iter().filter_map(|one| one.policy.bids()).collect();
        let bidders: Vec<Bidder<'_>> =
            bids.into_iter().map(|bids| Bidder { bids, weight: 1, spare: u64::MAX, can_trade: true }).collect();
        b.iter(|| clearing_price(&bidders, 0, 0));
    });
    group.finish();
}

criterion_group!(benches, planning, one_decision_for_a_host);
criterion_main!(benches);
