//! A tick of the manager with nothing to do, over a VM of 10,000 windows in use: between two scans, and with one. In
//! windows per second.

use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize, PolicyChoice, VmId};

const WINDOWS: u64 = 10_000;

/// A loop over RAM with one page in each window, so that each has backing. It has made its first ticks.
fn manager(policy: &str) -> ManagerLoop {
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).expect("20 GiB have an end");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let ram = GuestRam::map(&[range], backing).expect("address space");
    let words = ram.words(ram.ranges()[0]);
    words.iter().step_by(1 << 18).for_each(|word| word.store(1, std::sync::atomic::Ordering::Relaxed));
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let policy = PolicyChoice::parse(policy).expect("it is in the list").make();
    let vm = ManagedVm::new(VmId(0), ram, None);
    let mut manager = ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default());
    (0..3).for_each(|_| _ = manager.tick());
    manager
}

fn tick(c: &mut Criterion) {
    let mut group = c.benchmark_group("tick");
    group.throughput(Throughput::Elements(WINDOWS)).measurement_time(Duration::from_secs(5));
    for policy in ["never", "thp"] {
        let mut manager = manager(policy);
        group.bench_function(policy, |b| b.iter(|| manager.tick()));
    }
    group.finish();
}

criterion_group!(benches, tick);
criterion_main!(benches);
