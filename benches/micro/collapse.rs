//! Collapse of 64 MiB of warm anonymous memory, window by window like the manager (read, advise, collapse, read
//! again), compared with `memcpy` of the same bytes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_benches::populated_ram;
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_policies::OutcomeResult;
use wideleaf_policies::units::mib;

fn collapse(c: &mut Criterion) {
    let bytes = mib(64);
    let host = LinuxHost::open().expect("/proc is mounted");
    let mut group = c.benchmark_group("collapse");
    group.throughput(Throughput::Bytes(bytes.get())).sample_size(20).measurement_time(Duration::from_secs(8));
    group.bench_function("window by window", |b| {
        b.iter_custom(|iterations| {
            let mut took = Duration::ZERO;
            for _ in 0..iterations {
                // Memory on both sides of the copy must be warm. Otherwise the bench measures the hypervisor below.
                warm_host_memory(bytes + bytes).expect("memory to warm");
                let ram = populated_ram(bytes);
                let windows = ram.ranges()[0].gpa.windows();
                let began = Instant::now();
                let done = windows
                    .filter(|window| collapse_window(&host, ram.ranges()[0], *window).result == OutcomeResult::Done)
                    .count();
                took += began.elapsed();
                assert!(done >= 30, "{done} of 32 windows collapsed: the machine is short of huge pages");
            }
            took
        });
    });
    group.bench_function("memcpy", |b| {
        let (source, mut target) = (vec![1_u8; bytes.as_usize()], vec![2_u8; bytes.as_usize()]);
        b.iter(|| {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
        });
    });
    group.finish();
}

criterion_group!(benches, collapse);
criterion_main!(benches);
