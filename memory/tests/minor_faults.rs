//! Accesses of memfd and hugetlb RAM by minor faults, on the running kernel. If userfaultfd does not report them
//! these tests are skipped with the reason; `WIDELEAF_REQUIRE=uffd_minor` (and `hugetlb`) turns the skip into a
//! failure.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::unmapped_collapse::UnmappedCollapse;
use wideleaf_memory::pool::{HugetlbPools, PoolLease};
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, Seen};
use wideleaf_memory::sensors::host_backing::window_backing;
use wideleaf_memory::sensors::minor_faults::{MinorFaultSensor, MinorFaultsError, OpenMinorFaults};
use wideleaf_memory::sensors::resident::pages_in_use;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::sampled_pages::SAMPLED_PAGES;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Gpa, GpaRange, OutcomeResult, PageSize, Skip, WindowIndex};

const WINDOWS: u64 = 8;
const WORDS_PER_WINDOW: u64 = PageSize::Huge2M.bytes().get() / 8;
const TOUCHED: [u64; 2] = [2, 5];
const UNPACED: AccessConfig = AccessConfig { pace: Duration::ZERO, cpu_max: Duration::from_secs(10) };

/// The found value, or `None` with the reason printed.
fn found<T>(found: Result<T, impl std::fmt::Display>, requirement: &str) -> Option<T> {
    let why = match found {
        Ok(found) => return Some(found),
        Err(why) => why,
    };
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == requirement), "WIDELEAF_REQUIRE={required}, and {why}");
    println!("skipped: {why}");
    None
}

/// RAM with its index in every word, and the lease of its pool.
struct Bed {
    host: LinuxHost,
    ram: Arc<GuestRam>,
    sensor: MinorFaultSensor,
    _lease: Option<PoolLease>,
}

impl Bed {
    /// Memfd RAM in base pages, or hugetlb RAM; `None` if that is not available.
    fn new(kind: BackingKind) -> Option<Bed> {
        let is_hugetlb = kind == BackingKind::Hugetlb;
        let page = if is_hugetlb { PageSize::Huge2M } else { PageSize::Base4K };
        let lease = is_hugetlb.then(|| HugetlbPools::of_this_machine().lease(page, WINDOWS)).transpose();
        let lease = found(lease, "hugetlb")?;
        let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
        let ram = GuestRam::map(&[range], BackingConfig::new(kind, page).unwrap()).unwrap();
        for (number, word) in ram.words(ram.ranges()[0]).iter().enumerate() {
            word.store(number as u64, Ordering::Relaxed);
        }
        let sensor = found(MinorFaultSensor::start(ram.clone(), UNPACED), "uffd_minor")?;
        Some(Bed { host: LinuxHost::open().unwrap(), ram, sensor, _lease: lease })
    }

    fn start(&mut self) {
        let windows: Vec<_> = (0..WINDOWS).map(WindowIndex::new).collect();
        self.sensor.start(&self.host, &windows);
    }

    fn finish(&mut self) -> Vec<Seen> {
        self.sensor.finish(&self.host).rows.into_iter().map(|(_, seen)| seen).collect()
    }

    /// Reads a word of each page of the windows of [`TOUCHED`], since only some base pages of a window are watched.
    fn touch(&self) {
        let words = self.ram.words(self.ram.ranges()[0]);
        for window in TOUCHED {
            let of_window = window * WORDS_PER_WINDOW..(window + 1) * WORDS_PER_WINDOW;
            for number in of_window.skip(5).step_by(512) {
                assert_eq!(words[number as usize].load(Ordering::Relaxed), number);
            }
        }
    }

    fn backing(&self, window: u64) -> (u16, Backing) {
        let fixed = (self.ram.backing().kind() == BackingKind::Hugetlb).then_some(PageSize::Huge2M);
        let row = window_backing(&self.host, self.ram.ranges()[0], fixed, WindowIndex::new(window)).unwrap();
        (row.resident, row.backing)
    }

    fn assert_all_is(&self, backing: Backing) {
        for window in 0..WINDOWS {
            assert_eq!(self.backing(window), (512, backing), "window {window}");
        }
        let words = self.ram.words(self.ram.ranges()[0]);
        let lost = words.iter().enumerate().filter(|(number, word)| word.load(Ordering::Relaxed) != *number as u64);
        assert_eq!(lost.count(), 0, "words are lost");
    }
}

fn seen_where_touched() -> Vec<Seen> {
    (0..WINDOWS).map(|window| if TOUCHED.contains(&window) { Seen::Touched } else { Seen::Untouched }).collect()
}

#[test]
fn touched_windows_of_memfd_ram_are_distinguished_from_idle_ones() {
    let Some(mut bed) = Bed::new(BackingKind::Memfd) else { return };
    for _ in 0..3 {
        bed.start();
        assert_eq!(bed.backing(0), (512 - SAMPLED_PAGES, Backing::Base4K), "some pages are unmapped");
        bed.touch();
        assert_eq!(bed.finish(), seen_where_touched());
        bed.assert_all_is(Backing::Base4K);
    }
}

#[test]
fn a_sample_does_not_change_the_count_of_memory_in_use() {
    let Some(mut bed) = Bed::new(BackingKind::Memfd) else { return };
    let before = pages_in_use(&bed.host, [bed.ram.as_ref()]).unwrap();
    assert!(before >= WINDOWS * 512, "the file's pages are in it: {before}");
    // Parallel tests take less than a window; a sample unmaps and remaps eight.
    let is_as_before = |bed: &Bed| pages_in_use(&bed.host, [bed.ram.as_ref()]).unwrap().abs_diff(before) < 512;
    bed.start();
    assert!(is_as_before(&bed), "away");
    bed.touch();
    assert!(is_as_before(&bed), "touched");
    bed.finish();
    assert!(is_as_before(&bed), "back");
}

#[test]
fn huge_folios_of_memfd_ram_are_mapped_whole_before_and_after() {
    let Some(mut bed) = Bed::new(BackingKind::Memfd) else { return };
    for window in (0..WINDOWS).map(WindowIndex::new) {
        /// A page that another process inspects is busy for an instant.
        const ATTEMPTS: usize = 50;
        let collapse = || collapse_window(&bed.host, bed.ram.ranges()[0], window).result;
        assert!((0..ATTEMPTS).any(|_| collapse() == OutcomeResult::Done), "{window}");
    }
    bed.start();
    bed.touch();
    for window in TOUCHED {
        assert_eq!(bed.backing(window), (512, Backing::Huge2M), "already at the touch");
    }
    assert_eq!(bed.finish(), seen_where_touched());
    bed.assert_all_is(Backing::Huge2M);
}

#[test]
fn touched_windows_of_hugetlb_ram_are_distinguished_from_idle_ones() {
    let Some(mut bed) = Bed::new(BackingKind::Hugetlb) else { return };
    for _ in 0..3 {
        bed.start();
        assert_eq!(bed.backing(0), (0, Backing::Unbacked), "it is unmapped");
        bed.touch();
        assert_eq!(bed.finish(), seen_where_touched());
        bed.assert_all_is(Backing::Huge2M);
    }
}

#[test]
fn a_touch_of_a_hole_of_the_file_is_seen_and_fills_one_page() {
    let Some(bed) = Bed::new(BackingKind::Memfd) else { return };
    let range = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
    let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap();
    let ram = GuestRam::map(&[range], backing).unwrap();
    ram.words(ram.ranges()[0])[0].store(1, Ordering::Relaxed);
    let mut sensor = MinorFaultSensor::start(ram.clone(), UNPACED).unwrap();
    sensor.start(&bed.host, &[WindowIndex::new(0)]);
    ram.words(ram.ranges()[0])[100 * 512].store(2, Ordering::Relaxed);
    assert_eq!(sensor.finish(&bed.host).rows, [(WindowIndex::new(0), Seen::Touched)]);
    let row = window_backing(&bed.host, ram.ranges()[0], None, WindowIndex::new(0)).unwrap();
    assert_eq!(row.resident, 2);
}

#[test]
fn a_thread_that_waits_when_the_sensor_ends_continues() {
    let Some(bed) = Bed::new(BackingKind::Memfd) else { return };
    let ram = bed.ram.clone();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let words = ram.words(ram.ranges()[0]);
            while !is_over.load(Ordering::Relaxed) {
                for (number, word) in words.iter().enumerate().step_by(512) {
                    assert_eq!(word.load(Ordering::Relaxed), number as u64, "a word is lost");
                }
            }
        });
        let Bed { mut sensor, host, .. } = bed;
        let windows: Vec<_> = (0..WINDOWS).map(WindowIndex::new).collect();
        for _ in 0..20 {
            sensor.start(&host, &windows);
            drop(sensor);
            sensor = MinorFaultSensor::start(ram.clone(), UNPACED).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn anonymous_ram_and_giant_pages_are_refused() {
    let map = |kind, page| {
        let range = GpaRange::new(Gpa::new(0), PageSize::Giant1G.bytes()).unwrap();
        GuestRam::map(&[range], BackingConfig::new(kind, page).unwrap())
    };
    let anonymous = map(BackingKind::Anon, PageSize::Base4K).unwrap();
    assert!(matches!(MinorFaultSensor::start(anonymous, UNPACED), Err(MinorFaultsError::Anonymous)));
    // Without a giant page to map there is nothing to refuse.
    if let Ok(giant) = map(BackingKind::Hugetlb, PageSize::Giant1G) {
        assert!(matches!(MinorFaultSensor::start(giant, UNPACED), Err(MinorFaultsError::PagesTooLarge(_))));
    }
}

#[test]
fn threads_that_touch_windows_during_their_collapse_lose_no_word_and_continue() {
    let Some(bed) = Bed::new(BackingKind::Memfd) else { return };
    let OpenMinorFaults { faults, claims, .. } = OpenMinorFaults::of(bed.ram.clone()).unwrap();
    let collapse = UnmappedCollapse::new(faults, claims);
    let is_over = AtomicBool::new(false);
    let touch = || {
        let words = bed.ram.words(bed.ram.ranges()[0]);
        loop {
            for (number, word) in words.iter().enumerate().step_by(61) {
                assert_eq!(word.fetch_add(1, Ordering::Relaxed), number as u64, "word {number}");
                word.fetch_sub(1, Ordering::Relaxed);
            }
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        let toucher = scope.spawn(touch);
        for window in (0..WINDOWS).map(WindowIndex::new) {
            // Pages on their way between a touch and its mapping are busy.
            let attempt = || collapse.run(&bed.host, bed.ram.ranges()[0], window, false).result;
            let mut results = (0..1000).map(|_| attempt());
            assert!(results.any(|result| result == OutcomeResult::Done), "{window}");
        }
        is_over.store(true, Ordering::Relaxed);
        toucher.join().unwrap();
    });
    bed.assert_all_is(Backing::Huge2M);
}

#[test]
fn a_window_with_a_hole_in_the_file_stays_as_it_is_where_holes_are_kept() {
    let Some(bed) = Bed::new(BackingKind::Memfd) else { return };
    let range = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
    let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap();
    let ram = GuestRam::map(&[range], backing).unwrap();
    ram.words(ram.ranges()[0])[0].store(7, Ordering::Relaxed);
    let OpenMinorFaults { faults, claims, .. } = OpenMinorFaults::of(ram.clone()).unwrap();
    let collapse = UnmappedCollapse::new(faults, claims);
    let run = |keeps_holes| collapse.run(&bed.host, ram.ranges()[0], WindowIndex::new(0), keeps_holes);
    assert_eq!(run(true).result, OutcomeResult::Skipped(Skip::Hole));
    let filled = run(false);
    assert_eq!((filled.result, filled.bloat), (OutcomeResult::Done, PageSize::Base4K.bytes() * 511));
    assert_eq!(ram.words(ram.ranges()[0])[0].load(Ordering::Relaxed), 7);
}
