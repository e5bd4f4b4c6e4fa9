//! Swap of 64 MiB of warm anonymous memory, window by window (look, take aside, copy, move in, look again), beside collapse
//! and `memcpy` of the same bytes. Huge pages are made ready by the batch: the first row leaves that out, as a manager does
//! it while it waits; the second has it in.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use wideleaf_benches::populated_ram;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::aside::{WindowMover, probe};
use wideleaf_memory::host::linux::warm_host_memory;
use wideleaf_memory::mover::READY_SLOTS;
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, OutcomeResult, WindowIndex};

const BYTES: Bytes = mib(64);
/// Of 32: a machine that is short of huge pages measures something else.
const DONE_MIN: usize = 30;

/// What is in the time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refill {
    Before,
    Timed,
}

/// Memory on both sides of the copy must be warm, or the outer hypervisor is measured.
fn warm_ram() -> (Arc<GuestRam>, Vec<WindowIndex>) {
    warm_host_memory(BYTES + BYTES).expect("memory to warm");
    let ram = populated_ram(BYTES);
    let windows = ram.ranges()[0].gpa.windows().collect();
    (ram, windows)
}

fn swap_all(host: &Arc<LinuxHost>, refill: Refill) -> Duration {
    let (ram, windows) = warm_ram();
    let mover = WindowMover::start(host.clone(), ram).expect("it was probed");
    let mut swapper = Swapper::new(mover.aside().clone());
    let (mut took, mut done) = (Duration::ZERO, 0);
    for batch in windows.chunks(usize::from(READY_SLOTS)) {
        let refilling = Instant::now();
        swapper.refill().expect("huge pages");
        let began = if refill == Refill::Timed { refilling } else { Instant::now() };
        done +=
            batch.iter().filter(|window| swapper.swap(host.as_ref(), **window).result == OutcomeResult::Done).count();
        took += began.elapsed();
    }
    assert!(done >= DONE_MIN, "{done} of 32 windows swapped");
    took
}

fn collapse_all(host: &LinuxHost) -> Duration {
    let (ram, windows) = warm_ram();
    let began = Instant::now();
    let collapse = |window: &&WindowIndex| collapse_window(host, ram.ranges()[0], **window).result;
    let done = windows.iter().filter(|window| collapse(window) == OutcomeResult::Done).count();
    let took = began.elapsed();
    assert!(done >= DONE_MIN, "{done} of 32 windows collapsed");
    took
}

fn swap(c: &mut Criterion) {
    if let Err(why) = probe() {
        println!("swap: skipped: {why}");
        return;
    }
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let mut group = c.benchmark_group("swap");
    group.throughput(Throughput::Bytes(BYTES.get())).sample_size(20).measurement_time(Duration::from_secs(8));
    let repeat = |iterations: u64, once: &dyn Fn() -> Duration| (0..iterations).map(|_| once()).sum();
    group.bench_function("swap", |b| b.iter_custom(|n| repeat(n, &|| swap_all(&host, Refill::Before))));
    group.bench_function("swap with refill", |b| b.iter_custom(|n| repeat(n, &|| swap_all(&host, Refill::Timed))));
    group.bench_function("collapse", |b| b.iter_custom(|n| repeat(n, &|| collapse_all(&host))));
    group.bench_function("memcpy", |b| {
        let (source, mut target) = (vec![1_u8; BYTES.as_usize()], vec![2_u8; BYTES.as_usize()]);
        b.iter(|| {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
        });
    });
    group.finish();
}

criterion_group!(benches, swap);
criterion_main!(benches);
