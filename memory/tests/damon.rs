//! The kernel's own monitor on this machine's own memory. If it cannot observe a process's addresses, the test is
//! skipped with the reason; `WIDELEAF_REQUIRE=damon` turns the skip into a failure.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::sensors::access::{AccessSampler, Seen};
use wideleaf_memory::sensors::damon::DamonSensor;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize, WindowIndex};

const WINDOWS: u64 = 16;
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn the_kernels_monitor_distinguishes_the_busy_half_from_the_idle_one_and_is_given_back() {
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let host = LinuxHost::open().unwrap();
    host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite).unwrap();
    let mut sensor = match DamonSensor::start(Path::new("/"), ram.ranges()) {
        Ok(sensor) => sensor,
        Err(error) => {
            let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "damon"), "WIDELEAF_REQUIRE={required}, and {error}");
            return println!("skipped: {error}");
        }
    };
    let windows: Vec<_> = (0..WINDOWS).map(WindowIndex::new).collect();
    // A region reaches over the middle now and then: the two windows there may appear as either.
    let is_right = |window: WindowIndex, seen: Seen| match window.get() * 2 / WINDOWS {
        _ if (WINDOWS / 2 - 1..=WINDOWS / 2).contains(&window.get()) => true,
        0 => seen == Seen::Touched,
        _ => seen == Seen::Untouched,
    };
    let is_over = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        scope.spawn(|| {
            let words = ram.words(ram.ranges()[0]);
            while !is_over.load(Ordering::Relaxed) {
                words[..words.len() / 2].iter().step_by(512).for_each(|word| {
                    word.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        let began = Instant::now();
        let mut sample = || {
            sensor.start(&host, &windows);
            std::thread::sleep(Duration::from_millis(200));
            sensor.finish(&host).rows
        };
        let mut rows = sample();
        while !rows.iter().all(|(window, seen)| is_right(*window, *seen)) && began.elapsed() < TIMEOUT {
            rows = sample();
        }
        is_over.store(true, Ordering::Relaxed);
        rows
    });
    assert!(last.iter().all(|(window, seen)| is_right(*window, *seen)), "{last:?}");
    drop(sensor);
    let left = host.read_text("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds").unwrap();
    assert_eq!(left.trim(), "0");
}
