//! Host backing of a region, in windows per second. Base pages are the slow case (512 entries per window), huge pages
//! the fast one (one entry).

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_benches::populated_ram;
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_policies::units::mib;

fn snapshot(c: &mut Criterion) {
    let host = LinuxHost::open().expect("/proc is mounted");
    let ram = populated_ram(mib(256));
    let range = ram.ranges()[0];
    let mut sensor = HostBackingSensor::default();
    let mut group = c.benchmark_group("snapshot");
    group.throughput(Throughput::Elements(range.gpa.windows().len() as u64));
    let mut measure = |name: &str| {
        group.bench_function(name, |b| {
            b.iter(|| {
                sensor.sample(&host, range, None).expect("a scan").map(|row| u64::from(row.resident)).sum::<u64>()
            });
        });
    };
    measure("256 MiB in base pages");
    for window in range.gpa.windows() {
        collapse_window(&host, range, window);
    }
    measure("256 MiB in huge pages");
    group.finish();
}

criterion_group!(benches, snapshot);
criterion_main!(benches);
