//! Planning over snapshots of 16 GiB, 256 GiB and 4 TiB of guest RAM, in windows per second. Half of the windows are
//! candidates, and the budget allows them all: the longest a plan can take. (A live tick stops at the budget, much
//! sooner. `never` looks at nothing and is not measured.)

use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    Backing, Budget, BudgetLimits, Bytes, Moment, PageSize, PerTenThousand, Plan, Snapshot, VmId, VmSnapshot,
    WindowIndex, WindowRow,
};

fn snapshot(ram: Bytes) -> Snapshot {
    let windows = ram.pages(PageSize::Huge2M);
    let mut vm = VmSnapshot::with_capacity(VmId(0), windows as usize);
    for window in 0..windows {
        let backing = if window % 2 == 0 { Backing::Huge2M } else { Backing::Base4K };
        vm.push(WindowRow::new(WindowIndex::new(window), 512, backing));
    }
    Snapshot { vms: vec![vm], ..Snapshot::default() }
}

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("planning");
    for (name, ram) in [("16 GiB", gib(16)), ("256 GiB", gib(256)), ("4 TiB", gib(4096))] {
        let snapshot = snapshot(ram);
        group.throughput(Throughput::Elements(ram.pages(PageSize::Huge2M)));
        for policy in POLICIES.iter().filter(|policy| policy.name != "never") {
            group.bench_with_input(BenchmarkId::new(policy.name, name), &snapshot, |b, snapshot| {
                let limits = BudgetLimits {
                    copy_per_second: Bytes::new(u64::MAX / 4),
                    cpu_share: PerTenThousand::new(u32::MAX),
                    burst: Duration::from_secs(3600),
                };
                b.iter_batched_ref(
                    || (policy.with_defaults(), Budget::new(limits, Moment::START), Plan::with_bound(usize::MAX)),
                    |(policy, budget, plan)| policy.plan(snapshot, Moment::START, budget, plan),
                    BatchSize::LargeInput,
                );
            });
        }
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);
