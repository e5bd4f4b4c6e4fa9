//! Planning over snapshots of 16 GiB, 256 GiB and 4 TiB of guest RAM, in windows per second. Half of the windows are
//! candidates, touched at 11 of 16 samples for an hour, and the budget allows them all. This is the longest possible
//! plan; a live tick stops at the budget, much sooner. As in the manager, policy and plan keep their allocations from
//! tick to tick. Policies that plan nothing are not measured.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    AccessHistory, Backing, Budget, BudgetLimits, Bytes, Moment, PageSize, PerTenThousand, Plan, Snapshot, VmId,
    VmSnapshot, WindowIndex, WindowRow,
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

criterion_group!(benches, planning);
criterion_main!(benches);
