//! How fast saved RAM arrives while threads touch it at random: windows moved in whole, windows copied, pages copied.
//! No guest: threads of this process touch one word of each page, window by window in random order, as a guest that
//! needs all of its memory at once. The image is a file in the page cache.
//!
//! ```text
//!   restore_ram [MiB [rounds]]     1024 and 5, unless given
//! ```
//!
//! The arms take turns. Each line: GiB/s of one arm in all rounds, windows on huge pages, and the longest answers.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use wideleaf_measure::order::arms_of_round;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::restore::{Background, ReadError, RestoreConfig, Restorer, SavedRam, SavedWindow};
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::testing::page_copies::PageCopies;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const WORDS_PER_WINDOW: usize = WINDOW.as_usize() / 8;

/// An image in a file without a name.
struct Image(File);

impl SavedRam for Image {
    fn window(&self, _: WindowIndex) -> SavedWindow {
        SavedWindow { pages: PageSet::ALL, was_huge: true, ..SavedWindow::default() }
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        let read = self.0.read_exact_at(into, window.start().get());
        read.map_err(|source| ReadError::Io { window, file: "the image".to_owned(), source })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    MovedByFaults,
    MovedWithBackground,
    CopiedByFaults,
    PagesCopied,
}

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let bytes = mib(numbers.first().copied().unwrap_or(1024));
    let rounds = numbers.get(1).map_or(5, |rounds| (*rounds as u32).max(1));
    start_of_large_ram();
    let image = Arc::new(Image(image(bytes)));
    let arms = [Arm::MovedByFaults, Arm::MovedWithBackground, Arm::CopiedByFaults, Arm::PagesCopied];
    let mut speeds = arms.map(|_| Vec::new());
    for round in 0..rounds {
        for index in arms_of_round(arms.len(), round + 1) {
            let (arm, speeds) = (arms[index], &mut speeds[index]);
            warm_host_memory(bytes + mib(64)).expect("memory to warm");
            let (took, huge, longest) = run(arm, &image, bytes, u64::from(round));
            let speed = bytes.get() as f64 / gib(1).get() as f64 / took.as_secs_f64();
            println!("{arm:?}: {speed:.2} GiB/s, {huge} of {} windows huge, {longest}", bytes.get() / WINDOW.get());
            speeds.push(speed);
        }
    }
    for (arm, mut speeds) in arms.into_iter().zip(speeds) {
        speeds.sort_by(f64::total_cmp);
        println!(
            "{arm:?}: median {:.2} GiB/s ({:.2} - {:.2})",
            speeds[speeds.len() / 2],
            speeds[0],
            speeds[speeds.len() - 1]
        );
    }
}

/// Time until a guest may run, by the size of its RAM: nothing of it is in memory.
fn start_of_large_ram() {
    let image = Arc::new(Image(tempfile::tempfile().expect("a file")));
    for size in [gib(1), gib(16), gib(64)] {
        let began = Instant::now();
        let ram = ram(size);
        let mapped = began.elapsed();
        let config = RestoreConfig { background: Background::Off, ..RestoreConfig::default() };
        let restorer = Restorer::start(ram, image.clone(), config).expect("userfaultfd");
        println!("{size}: mapped in {mapped:?}, all windows registered in {:?}", restorer.report().start);
        restorer.abandon(wideleaf_memory::restore::GuestIsGone);
    }
}

fn ram(bytes: Bytes) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), bytes).expect("fits");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    GuestRam::map(&[range], backing).expect("addresses")
}

/// Pseudo-random bytes, so that nothing is zero.
fn image(bytes: Bytes) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    let mut state = 1_u64;
    let mut window = vec![0_u8; WINDOW.as_usize()];
    for _ in 0..bytes.get() / WINDOW.get() {
        for word in window.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *word = (state | 1).to_le_bytes();
        }
        file.write_all(&window).expect("room for the image");
    }
    file
}

/// Time until every page was touched; huge windows afterwards; the longest waits.
fn run(arm: Arm, image: &Arc<Image>, bytes: Bytes, seed: u64) -> (Duration, usize, String) {
    let ram = ram(bytes);
    if arm == Arm::PagesCopied {
        let image = image.clone();
        let read = move |page: Gpa, into: &mut [u8]| image.0.read_exact_at(into, page.get()).expect("it is in memory");
        let copies = PageCopies::start(ram.clone(), read).expect("userfaultfd");
        let took = touch_all(&ram, bytes, seed);
        return (took, huge_windows(&ram), format!("{} faults", copies.stop()));
    }
    let background = if arm == Arm::MovedWithBackground { Background::Unlimited } else { Background::Off };
    let config = RestoreConfig { background, may_move: arm != Arm::CopiedByFaults, ..RestoreConfig::default() };
    let restorer = Restorer::start(ram.clone(), image.clone(), config).expect("userfaultfd");
    let took = touch_all(&ram, bytes, seed);
    let huge = huge_windows(&ram);
    let report = restorer.report();
    let us = |quantile| report.fault_ns.value_at_quantile(quantile) / 1000;
    let waits = format!("{} faults, p50 {} p99 {} max {} us", report.by_fault, us(0.5), us(0.99), us(1.0));
    while !restorer.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
    (took, huge, waits)
}

fn touch_all(ram: &GuestRam, bytes: Bytes, seed: u64) -> Duration {
    let count = bytes.get() / WINDOW.get();
    let mut order: Vec<u64> = (0..count).collect();
    let mut state = seed * 2 + 1;
    for end in (1..order.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        order.swap(end, (state >> 33) as usize % (end + 1));
    }
    let words = ram.words(ram.ranges()[0]);
    let began = Instant::now();
    for window in order {
        let first = window as usize * WORDS_PER_WINDOW;
        let read = words[first..first + WORDS_PER_WINDOW].iter().step_by(512).map(|word| word.load(Ordering::Relaxed));
        assert!(read.fold(u64::MAX, u64::min) > 0, "no word of the image is zero");
    }
    began.elapsed()
}

fn huge_windows(ram: &GuestRam) -> usize {
    let host = LinuxHost::open().expect("/proc is mounted");
    let mut sensor = HostBackingSensor::default();
    let seen = sensor.sample(&host, ram.ranges()[0], None).expect("PAGEMAP_SCAN");
    seen.filter(|window| window.backing == Backing::Huge2M).count()
}
