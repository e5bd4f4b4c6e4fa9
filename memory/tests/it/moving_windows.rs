//! Windows are sampled and swapped on the running kernel, while threads write and check every word of them. If
//! windows cannot be moved these tests are skipped with the reason; `WIDELEAF_REQUIRE=uffd_move` turns the skip
//! into a failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::{moves, steady_backing};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, AccessSensor, Seen};
use wideleaf_memory::sensors::access_regions::{AccessRegions, RegionSample};
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::sampled_pages::SAMPLED_PAGES;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, Moment, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

const WORDS_PER_WINDOW: usize = 2 << 20 >> 3;
const WORDS_PER_PAGE: usize = 4096 >> 3;

/// Samples without pacing or a CPU limit.
const UNPACED: AccessConfig = AccessConfig { pace: Duration::ZERO, cpu_max: Duration::MAX };

fn map(windows: u64) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), mib(2) * windows).unwrap();
    GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap()
}

fn host() -> Arc<LinuxHost> {
    Arc::new(LinuxHost::open().unwrap())
}

fn windows(numbers: std::ops::Range<u64>) -> Vec<WindowIndex> {
    numbers.map(WindowIndex::new).collect()
}

fn words(ram: &GuestRam) -> &[AtomicU64] {
    ram.words(ram.ranges()[0])
}

fn backing(ram: &GuestRam, window: u64) -> (u16, Backing) {
    steady_backing(host().as_ref(), ram.ranges()[0], None, WindowIndex::new(window))
}

/// The value of a word in a generation; never zero.
fn value(index: usize, generation: u64) -> u64 {
    ((generation << 40) | (index as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(ram: &GuestRam, words_of: std::ops::Range<usize>) {
    for (index, word) in words(ram)[words_of.clone()].iter().enumerate() {
        word.store(value(words_of.start + index, 0), Ordering::Relaxed);
    }
}

/// Number of words of the range that differ from what `fill` wrote.
fn wrong(ram: &GuestRam, words_of: std::ops::Range<usize>) -> usize {
    words_of.filter(|index| words(ram)[*index].load(Ordering::Relaxed) != value(*index, 0)).count()
}

/// Whether this kernel gives empty page tables back (Linux 6.14). If not, a huge page that is moved may be split.
fn gives_page_tables_back() -> bool {
    let (ram, host) = (map(1), host());
    fill(&ram, 0..1);
    let mover = WindowMover::start(host.clone(), ram).unwrap();
    let swap = Swapper::new(mover.aside().clone()).swap(host.as_ref(), WindowIndex::new(0));
    swap.result != OutcomeResult::Refused(Refusal::NotObserved)
}

fn window_words(window: usize) -> std::ops::Range<usize> {
    window * WORDS_PER_WINDOW..(window + 1) * WORDS_PER_WINDOW
}

#[test]
fn the_number_of_events_is_that_of_touched_windows() {
    if moves::are_missing() {
        return;
    }
    const WINDOWS: u64 = 48;
    let (ram, host) = (map(WINDOWS), host());
    fill(&ram, 0..WINDOWS as usize * WORDS_PER_WINDOW);
    // A third of the windows are huge.
    let is_huge = |window: u64| window.is_multiple_of(3);
    let made: Vec<bool> = (0..WINDOWS)
        .map(|w| {
            is_huge(w)
                && collapse_window(host.as_ref(), ram.ranges()[0], WindowIndex::new(w)).result == OutcomeResult::Done
        })
        .collect();
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut sensor = AccessSensor::new(mover.aside().clone(), UNPACED);
    // While huge pages are short, no touch asks for one, and the huge windows stay huge all the same.
    let samples =
        [(0, false), (16, false), (WINDOWS as usize, false), (WINDOWS as usize, true), (16, true), (16, false)];
    for (touched, is_short) in samples {
        sensor.note_shortage(is_short);
        sensor.start(host.as_ref(), &windows(0..WINDOWS));
        // A word of each page, since only some pages of a window in base pages are watched; reads and writes are both
        // touches.
        for first in (0..touched * WORDS_PER_WINDOW).step_by(2 * WORDS_PER_PAGE) {
            assert_eq!(words(&ram)[first].load(Ordering::Relaxed), value(first, 0));
            words(&ram)[first + WORDS_PER_PAGE].store(value(first + WORDS_PER_PAGE, 0), Ordering::Relaxed);
        }
        let sample = sensor.finish(host.as_ref());
        assert_eq!((sample.cost.windows, sample.cost.events), (WINDOWS, touched as u64));
        let seen = |(_, seen): &(WindowIndex, Seen)| *seen == Seen::Touched;
        assert!(sample.rows[..touched].iter().all(seen) && !sample.rows[touched..].iter().any(seen), "{sample:?}");
    }
    let is_kept = |(window, was_huge): (usize, bool)| (backing(&ram, window as u64).1 == Backing::Huge2M) == was_huge;
    assert!(made.into_iter().enumerate().all(is_kept) || !gives_page_tables_back(), "huge pages stay whole");
    assert_eq!(wrong(&ram, 0..words(&ram).len()), 0);
    println!("{:?}", mover.aside().report());
}

#[test]
fn what_is_used_of_64_gib_is_found_by_samples_of_regions() {
    if moves::are_missing() {
        return;
    }
    const WINDOWS: usize = 32 << 10;
    /// What half a per cent of a core pays for in a second, and in a minute, at a third of a millisecond each.
    const SAMPLES: usize = 15;
    const SAMPLES_A_MINUTE: usize = 60 * SAMPLES;
    const USED: std::ops::Range<usize> = 20_000..22_500;
    let (ram, host) = (map(WINDOWS as u64), host());
    // One page of each window is there.
    let word = |window: usize| &words(&ram)[window * WORDS_PER_WINDOW];
    (0..WINDOWS).for_each(|window| word(window).store(value(window, 0), Ordering::Relaxed));
    let is_as_written = |window: usize| word(window).load(Ordering::Relaxed) == value(window, 0);
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut sensor = AccessSensor::new(mover.aside().clone(), UNPACED);
    let (all, mut regions) = (windows(0..WINDOWS as u64), AccessRegions::new(WINDOWS, SAMPLES_A_MINUTE));
    let (mut samples, mut cpu) = (0, Duration::ZERO);
    for second in 0..600 {
        let share = regions.next_share(&all, &all, SAMPLES);
        sensor.start(host.as_ref(), &share);
        let mut used = share.iter().map(|window| window.get() as usize).filter(|window| USED.contains(window));
        assert!(used.all(is_as_written));
        let sample = sensor.finish(host.as_ref());
        (samples, cpu) = (samples + sample.cost.windows, cpu + sample.cost.cpu);
        for (window, seen) in sample.rows {
            let (row, was_touched) = (window.get() as usize, seen == Seen::Touched);
            assert_eq!(seen, if USED.contains(&row) { Seen::Touched } else { Seen::Untouched }, "{window}");
            let at = Moment::after_start(Duration::from_secs(second));
            let watched_for = sample.watched_for.get(&window).copied();
            regions.add(RegionSample { row, was_touched, watched_for, at });
        }
    }
    let (mut seen, mut wrong) = (0, 0);
    for heat in regions.heat() {
        let used = heat.rows.clone().filter(|row| USED.contains(row)).count();
        let is_used = heat.history.was_touched() == Some(true);
        seen += heat.rows.len();
        wrong += if is_used { heat.rows.len() - used } else { used };
    }
    println!("{samples} samples in {cpu:?}; {} regions; {wrong} of {seen} windows wrong", regions.number());
    assert!(seen == WINDOWS && wrong <= WINDOWS / 100, "{wrong} of {seen} windows");
    assert!((0..WINDOWS).all(is_as_written));
}

#[test]
fn a_touch_by_the_kernel_is_a_touch() {
    if moves::are_missing() {
        return;
    }
    // Populating faults through the same path as KVM_RUN does: get_user_pages, in kernel mode.
    let (ram, host) = (map(2), host());
    fill(&ram, 0..words(&ram).len());
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
    sensor.start(host.as_ref(), &windows(0..2));
    host.advise(ram.ranges()[0].hva + mib(2), mib(2), Advice::PopulateWrite).unwrap();
    let seen: Vec<Seen> = sensor.finish(host.as_ref()).rows.into_iter().map(|(_, seen)| seen).collect();
    assert_eq!(seen, [Seen::Untouched, Seen::Touched]);
    assert_eq!(wrong(&ram, 0..words(&ram).len()), 0);
}

#[test]
fn the_guest_has_most_pages_of_a_sampled_window_all_the_time() {
    if moves::are_missing() {
        return;
    }
    let (ram, host) = (map(1), host());
    fill(&ram, 0..words(&ram).len());
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
    let present = || backing(&ram, 0);
    for _ in 0..20 {
        sensor.start(host.as_ref(), &windows(0..1));
        assert_eq!(present(), (512 - SAMPLED_PAGES, Backing::Base4K));
        let seen: Vec<Seen> = sensor.finish(host.as_ref()).rows.into_iter().map(|(_, seen)| seen).collect();
        assert_eq!((seen, present()), (vec![Seen::Untouched], (512, Backing::Base4K)));
    }
    assert_eq!(wrong(&ram, 0..words(&ram).len()), 0);
}

#[test]
fn a_swapped_window_is_huge_and_its_holes_are_zero() {
    if moves::are_missing() {
        return;
    }
    if !gives_page_tables_back() {
        println!(
            "skipped: this kernel keeps empty page tables (before Linux 6.14), which split huge pages that move in"
        );
        return;
    }
    let (ram, host) = (map(4), host());
    fill(&ram, window_words(0));
    let half = WORDS_PER_WINDOW..WORDS_PER_WINDOW + WORDS_PER_WINDOW / 2;
    fill(&ram, half.clone());
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut swapper = Swapper::new(mover.aside().clone());
    if let Err(error) = swapper.refill() {
        println!("skipped: {error}");
        return;
    }
    let mut swap = |window| swapper.swap(host.as_ref(), WindowIndex::new(window));
    let (whole, holed) = (swap(0), swap(1));
    assert_eq!((whole.result, whole.bloat, whole.cost.copied), (OutcomeResult::Done, Bytes::ZERO, mib(2)));
    assert_eq!((holed.result, holed.bloat), (OutcomeResult::Done, mib(1)));
    assert_eq!(swap(0).result, OutcomeResult::Skipped(Skip::AlreadyDone));
    assert_eq!(swap(2).result, OutcomeResult::Skipped(Skip::NotResident));
    assert_eq!(
        [0, 1, 2].map(|w| backing(&ram, w)),
        [(512, Backing::Huge2M), (512, Backing::Huge2M), (0, Backing::Unbacked)]
    );
    assert_eq!(wrong(&ram, window_words(0)) + wrong(&ram, half.clone()), 0);
    assert!(words(&ram)[half.end..2 * WORDS_PER_WINDOW].iter().all(|word| word.load(Ordering::Relaxed) == 0));
}

#[test]
fn a_service_dropped_during_a_sample_leaves_no_thread_waiting_and_loses_no_word() {
    if moves::are_missing() {
        return;
    }
    const WINDOWS: usize = 8;
    for _ in 0..20 {
        let (ram, host) = (map(WINDOWS as u64), host());
        fill(&ram, 0..WINDOWS * WORDS_PER_WINDOW);
        let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
        let mut sensor = AccessSensor::new(mover.aside().clone(), UNPACED);
        sensor.start(host.as_ref(), &windows(0..WINDOWS as u64));
        let reader = {
            let ram = ram.clone();
            std::thread::spawn(move || wrong(&ram, 0..words(&ram).len()))
        };
        drop(mover);
        assert_eq!(reader.join().unwrap(), 0);
        let rows = sensor.finish(host.as_ref()).rows;
        let is_one_of = |seen| matches!(seen, Seen::Touched | Seen::Unknown("service_ended"));
        assert!(rows.iter().all(|(_, seen)| is_one_of(*seen)), "{rows:?}");
        assert!((0..WINDOWS as u64).all(|window| backing(&ram, window) == (512, Backing::Base4K)));
    }
}

#[test]
fn memory_that_is_not_anonymous_is_refused_with_the_reason() {
    let range = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap()).unwrap();
    let error = WindowMover::start(host(), ram).expect_err("memfd");
    assert!(error.to_string().contains("--backing anon"), "{error}");
}

/// Checks and rewrites its words, pass after pass, at least once: every word has its value of the last pass.
fn write_and_check(ram: &GuestRam, words_of: std::ops::Range<usize>, is_over: &AtomicBool) {
    let mut generation = 0;
    while generation == 0 || !is_over.load(Ordering::Relaxed) {
        for index in words_of.clone() {
            let found = words(ram)[index].swap(value(index, generation + 1), Ordering::Relaxed);
            assert_eq!(found, value(index, generation), "word {index} in generation {generation}");
        }
        generation += 1;
    }
}

/// Swaps windows, each swapper in a thread of its own, neighbours at the same time. Returns the number of swaps.
fn swap_at_once(host: &Arc<LinuxHost>, swappers: &mut [Swapper], windows: &[WindowIndex]) -> u64 {
    let threads = swappers.len();
    std::thread::scope(|scope| {
        let swaps = |(first, swapper): (usize, &mut Swapper)| {
            let _ = swapper.refill(); // missing pages are made on demand, or the swap is refused
            let swap = |window: &&WindowIndex| swapper.swap(host.as_ref(), **window).result == OutcomeResult::Done;
            windows.iter().skip(first).step_by(threads).filter(swap).count() as u64
        };
        let threads: Vec<_> = swappers.iter_mut().enumerate().map(|each| scope.spawn(move || swaps(each))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

/// One round: fresh RAM in base pages, two writers in it, all of it sampled in turns while two threads swap it.
fn sample_and_swap_under_writers(host: &Arc<LinuxHost>) -> (u64, u64) {
    const WINDOWS: usize = 24;
    let ram = map(WINDOWS as u64);
    // The last window is half resident: its second half stays a hole until it is swapped.
    let end = WINDOWS * WORDS_PER_WINDOW - WORDS_PER_WINDOW / 2;
    fill(&ram, 0..end);
    let is_over = Arc::new(AtomicBool::new(false));
    let writers = [0..end / 2, end / 2..end].map(|words_of| {
        let (ram, is_over) = (ram.clone(), is_over.clone());
        std::thread::spawn(move || write_and_check(&ram, words_of, &is_over))
    });

    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut swappers = Swapper::several(mover.aside(), 2);
    let mut sensor = AccessSensor::new(mover.aside().clone(), UNPACED);
    let mut rotation = Rotation::default();
    let all = windows(0..WINDOWS as u64);
    let (mut sampled, mut swapped) = (0, 0);
    for _ in 0..6 {
        sensor.start(host.as_ref(), &rotation.next_share(&all, 8));
        sampled += sensor.finish(host.as_ref()).cost.windows;
        swapped += swap_at_once(host, &mut swappers, &rotation.next_share(&all, 8));
    }
    // Every other window has pages aside when the service ends.
    sensor.start(host.as_ref(), &all.iter().copied().step_by(2).collect::<Vec<_>>());
    drop(mover);
    is_over.store(true, Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert!(words(&ram)[end..].iter().all(|word| word.load(Ordering::Relaxed) == 0), "former holes are zero");
    (sampled, swapped)
}

#[test]
fn two_writers_lose_nothing_while_windows_are_sampled_and_swapped_thousands_of_times() {
    if moves::are_missing() {
        return;
    }
    const ROUNDS: u64 = 50;
    let host = host();
    let (sampled, swapped) = (0..ROUNDS)
        .map(|_| sample_and_swap_under_writers(&host))
        .reduce(|one, other| (one.0 + other.0, one.1 + other.1))
        .unwrap();
    println!("{sampled} windows sampled, {swapped} swapped");
    assert_eq!(sampled, ROUNDS * 48, "6 samples of 8 windows each");
}
