//! The balloon as a driver, well-behaved or not, sees it: through registers and rings in memory, backed by RAM
//! of this process.

use wideleaf_policies::units::{kib, mib};

use super::super::test_driver::{Driver, Piece, RAM_BYTES};
use super::*;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATISTICS: usize = 2;
const REPORTS: usize = 3;

/// Address of the driver's buffers, away from its rings and from the pages of the tests.
const BUFFER: u64 = 0x10_0000;
/// First page of window 2 and of window 3, which contain no ring.
const PAGES: [u32; 2] = [1024, 1536];
const PAGE_BYTES: u64 = 4096;
const TELLS: u64 = 1 << feature::MUST_TELL_HOST;
const ALL: u64 = TELLS | 1 << feature::STATS_VQ | 1 << feature::PAGE_REPORTING | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A driver with these features, and RAM where each page from 1024 on holds its own number.
fn started(features: u64) -> (Driver, BalloonHandle) {
    let device = Balloon::new(Bytes::new(RAM_BYTES), Bytes::ZERO).unwrap();
    let handle = device.handle();
    let mut driver = Driver::new(Box::new(device));
    driver.start(features);
    for page in PAGES[0]..2048 {
        driver.set_bytes(u64::from(page) * PAGE_BYTES, &page.to_le_bytes());
    }
    (driver, handle)
}

fn give(driver: &mut Driver, queue: usize, pages: impl IntoIterator<Item = u32>) {
    let bytes: Vec<u8> = pages.into_iter().flat_map(u32::to_le_bytes).collect();
    driver.set_bytes(BUFFER, &bytes);
    let used = driver.request(queue, &[Piece::read(BUFFER, bytes.len() as u32)]);
    assert_eq!(used.written, 0);
}

fn number_in(driver: &Driver, page: u32) -> u32 {
    u32::from_le_bytes(driver.bytes(u64::from(page) * PAGE_BYTES, 4).try_into().unwrap())
}

/// Waits for the effect of another thread; the test fails where it does not come.
fn wait_until(is_so: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_so() {
        assert!(std::time::Instant::now() < end, "the expected state does not come");
        std::thread::yield_now();
    }
}

#[test]
fn the_target_is_in_the_configuration_and_the_driver_says_what_it_holds() {
    let (mut driver, handle) = started(ALL);
    assert_eq!(driver.config::<8>(0), [0; 8]);
    handle.set_target(mib(4)).unwrap();
    assert_eq!(driver.config::<4>(0), 1024_u32.to_le_bytes());
    use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_INTERRUPT_STATUS};
    assert_eq!(driver.register(VIRTIO_MMIO_INTERRUPT_STATUS), 2, "the configuration changed");
    driver.set_register(VIRTIO_MMIO_CONFIG + 4, 7);
    assert_eq!((handle.actual(), driver.config::<4>(4)), (kib(28), 7_u32.to_le_bytes()));
    // The driver cannot write the target, and there is nothing behind.
    driver.set_register(VIRTIO_MMIO_CONFIG, 99);
    driver.set_register(VIRTIO_MMIO_CONFIG + 8, 99);
    assert_eq!((handle.target(), driver.config::<4>(8)), (mib(4), [0; 4]));
    let too_large = handle.set_target(mib(9)).unwrap_err();
    assert_eq!(too_large.to_string(), "a balloon of 9 MiB is more than the guest's RAM, 8 MiB");
    driver.reset();
    assert_eq!((handle.actual(), handle.target()), (Bytes::ZERO, mib(4)));
}

#[test]
fn a_target_is_rounded_down_to_whole_pages() {
    let (mut driver, handle) = started(ALL);
    handle.set_target(kib(7)).unwrap();
    assert_eq!((handle.target(), driver.config::<4>(0)), (kib(4), 1_u32.to_le_bytes()));
}

#[test]
fn inflated_pages_are_released_and_deflated_pages_work_again() {
    let (mut driver, handle) = started(ALL);
    give(&mut driver, INFLATE, (PAGES[0]..PAGES[0] + 8).step_by(2));
    let seen: Vec<_> = (PAGES[0]..PAGES[0] + 8).map(|page| number_in(&driver, page)).collect();
    assert_eq!(seen, [0, 1025, 0, 1027, 0, 1029, 0, 1031]);
    give(&mut driver, DEFLATE, [PAGES[0], PAGES[0] + 2]);
    driver.set_bytes(u64::from(PAGES[0]) * PAGE_BYTES, &[9]);
    assert_eq!(number_in(&driver, PAGES[0]), 9);
    let pages = handle.report().pages;
    assert_eq!((pages.inflated, pages.released, pages.deflated, pages.inflated_now), (4, 4, 2, 2));
}

#[test]
fn without_must_tell_host_pages_are_released_at_once_or_never() {
    let (mut driver, handle) = started(0);
    give(&mut driver, INFLATE, (PAGES[0]..PAGES[0] + 4).rev());
    assert_eq!(number_in(&driver, PAGES[0] + 3), 0);
    let pages = handle.report().pages;
    assert_eq!((pages.reported, pages.released, pages.inflated_now), (4, 4, 0));
    give(&mut driver, DEFLATE, [PAGES[0]]);
    assert_eq!(handle.report().pages.deflated, 1);
}

#[test]
fn reports_release_whole_pages_in_ram_and_nothing_else() {
    let (mut driver, handle) = started(ALL);
    let window = u64::from(PAGES[1]) * PAGE_BYTES;
    // All of window 3 except half a page at both ends; a range outside RAM; a range that the device may not write.
    let pieces = [
        Piece::write(window + 2048, (2 << 20) - PAGE_BYTES as u32),
        Piece::write(u64::MAX - 100, 50),
        Piece::write(RAM_BYTES, PAGE_BYTES as u32),
        Piece::write(window, 100),
    ];
    assert_eq!(driver.request(REPORTS, &pieces).written, 0);
    let seen = [PAGES[1], PAGES[1] + 1, PAGES[1] + 510, PAGES[1] + 511].map(|page| number_in(&driver, page));
    assert_eq!(seen, [PAGES[1], 0, 0, PAGES[1] + 511]);
    let pages = handle.report().pages;
    assert_eq!((pages.reported, pages.released, pages.outside_ram), (510, 510, 1));
    driver.request(REPORTS, &[Piece::read(window, PAGE_BYTES as u32)]);
    assert_eq!((number_in(&driver, PAGES[1]), handle.report().chains_malformed), (PAGES[1], 1));
}

#[test]
fn a_report_of_more_than_a_gibibyte_is_cut() {
    let (mut driver, handle) = started(ALL);
    let window = u64::from(PAGES[1]) * PAGE_BYTES;
    driver.request(REPORTS, &[Piece::write(window, 2 << 20), Piece::write(window, 1 << 30)]);
    assert_eq!((number_in(&driver, PAGES[1]), handle.report().reports_cut), (0, 1));
}

#[test]
fn a_report_of_more_runs_than_the_queue_has_room_for_is_cut() {
    const TABLE: u64 = BUFFER;
    const INDIRECT: u16 = 4;
    let (mut driver, handle) = started(ALL);
    let runs = QUEUE_SIZES[3] as u32 + 1;
    let run = |n: u32| {
        let address = u64::from(PAGES[1] + n) * PAGE_BYTES;
        let flags = if n + 1 < runs { 1 | 2 } else { 2_u64 };
        [address.to_le_bytes(), (PAGE_BYTES | flags << 32 | u64::from(n + 1) << 48).to_le_bytes()].concat()
    };
    driver.set_bytes(TABLE, &(0..runs).flat_map(run).collect::<Vec<u8>>());
    driver.set_descriptor(REPORTS, 0, (TABLE, 16 * runs), INDIRECT, 0);
    driver.make_available(REPORTS, 0);
    driver.wait_used(REPORTS);
    let last = PAGES[1] + runs - 1;
    assert_eq!((number_in(&driver, last - 1), number_in(&driver, last)), (0, last));
    assert_eq!((handle.report().pages.reported, handle.report().reports_cut), (u64::from(runs) - 1, 1));
}

#[test]
fn without_statistics_the_reports_are_the_third_queue() {
    let (mut driver, handle) = started(TELLS | 1 << feature::PAGE_REPORTING);
    driver.request(STATISTICS, &[Piece::write(u64::from(PAGES[1]) * PAGE_BYTES, PAGE_BYTES as u32)]);
    assert_eq!((number_in(&driver, PAGES[1]), handle.report().pages.released), (0, 1));
}

#[test]
fn statistics_come_on_request() {
    let (mut driver, handle) = started(ALL);
    let offer = |driver: &mut Driver, free: u64| {
        driver.set_bytes(BUFFER, &[[4, 0].as_slice(), &free.to_le_bytes()].concat());
        driver.offer(STATISTICS, 0, &[Piece::read(BUFFER, 10)]);
    };
    assert_eq!(handle.report().guest_age_ms, None);
    offer(&mut driver, 4096);
    wait_until(|| handle.report().guest.0.get("free_bytes") == Some(&4096));
    assert_eq!(driver.used_index(STATISTICS), 0, "the buffer waits for a request");
    handle.ask_statistics();
    driver.wait_used(STATISTICS);
    offer(&mut driver, 8192);
    wait_until(|| handle.report().guest.0.get("free_bytes") == Some(&8192));
    assert_eq!(handle.report().statistics, 2);
    assert!(handle.report().guest_age_ms.is_some());
}

#[test]
fn pages_outside_ram_and_repeated_pages_are_counted() {
    let (mut driver, handle) = started(ALL);
    give(&mut driver, INFLATE, [PAGES[0], PAGES[0], u32::MAX, 2048]);
    give(&mut driver, DEFLATE, [PAGES[0], PAGES[0], u32::MAX]);
    driver.request(INFLATE, &[Piece::read(RAM_BYTES, 16)]);
    driver.request(INFLATE, &[Piece::write(BUFFER, 16)]);
    driver.request(INFLATE, &[Piece::read(BUFFER, 3)]);
    let BalloonReport { pages, chains_malformed, requests, .. } = handle.report();
    assert_eq!((pages.inflated, pages.inflated_twice, pages.deflated, pages.deflated_absent), (1, 1, 1, 1));
    assert_eq!((pages.outside_ram, chains_malformed, requests), (3, 1, 5));
}

#[test]
fn too_many_page_numbers_in_a_buffer_break_the_device_until_a_reset() {
    let (mut driver, handle) = started(ALL);
    driver.offer(INFLATE, 0, &[Piece::read(BUFFER, 4 * 4097)]);
    driver.wait_for_needs_reset();
    driver.reset();
    driver.start(ALL);
    give(&mut driver, INFLATE, [PAGES[0]]);
    assert_eq!(handle.report().pages.inflated_now, 1);
    driver.claim_available(DEFLATE, 200);
    driver.wait_for_needs_reset();
}

#[test]
fn a_reset_gives_all_memory_back_to_the_guest() {
    let (mut driver, handle) = started(ALL);
    give(&mut driver, INFLATE, PAGES[0]..PAGES[0] + 100);
    driver.reset();
    let pages = handle.report().pages;
    assert_eq!((pages.inflated_now, pages.inflated, pages.inflated_at_most), (0, 100, 100));
    driver.set_bytes(u64::from(PAGES[0]) * PAGE_BYTES, &[5]);
    driver.start(ALL);
    give(&mut driver, INFLATE, [PAGES[0] + 1]);
    assert_eq!((number_in(&driver, PAGES[0]), handle.report().pages.inflated_now), (5, 1));
}

#[test]
fn without_its_queues_it_cannot_start() {
    let device = Balloon::new(Bytes::new(RAM_BYTES), Bytes::ZERO).unwrap();
    let mut driver = Driver::new(Box::new(device));
    driver.start(ALL);
    assert!(!driver.needs_reset());
    driver.reset();
    use virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS;
    driver.set_register(VIRTIO_MMIO_STATUS, 1 | 2);
    driver.set_register(virtio_bindings::virtio_mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    driver.set_register(virtio_bindings::virtio_mmio::VIRTIO_MMIO_DRIVER_FEATURES, 1);
    driver.set_register(VIRTIO_MMIO_STATUS, 1 | 2 | 8);
    driver.set_register(VIRTIO_MMIO_STATUS, 1 | 2 | 8 | 4);
    assert!(driver.needs_reset());
}

/// Chains of any shape in all queues: each is answered, or the device asks for a reset, after which
/// it serves again.
#[test]
fn any_chain_is_answered_or_the_device_asks_for_a_reset() {
    let (mut driver, handle) = started(ALL);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        // Marsaglia's xorshift: the same chains each time.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let (mut answers, mut resets) = (0, 0);
    for round in 0..400 {
        let queue = [INFLATE, DEFLATE, REPORTS][random(3) as usize];
        let noise: Vec<u8> = (0..512).map(|_| random(256) as u8).collect();
        driver.set_bytes(BUFFER, &noise);
        let pieces = 1 + random(4) as u16;
        for n in 0..pieces {
            let address =
                [BUFFER, RAM_BYTES - random(9000), random(u64::MAX), u64::MAX - random(9000)][random(4) as usize];
            // Rings, buffer and device are in the first windows, so reports name only later addresses.
            let address = if queue == REPORTS { address.max(u64::from(PAGES[0]) * PAGE_BYTES) } else { address };
            let bytes = [random(600), random(1 << 32), 0, 4 * random(5000)][random(4) as usize] as u32;
            // Mostly a chain that continues, sometimes a loop or a link out of the table.
            let next = if random(16) == 0 { random(70) as u16 } else { n + 1 };
            let goes_on = u16::from(n + 1 < pieces || random(32) == 0);
            driver.set_descriptor(queue, n, (address, bytes), goes_on | (2 * random(2) as u16), next);
        }
        let before = driver.used_index(queue);
        driver.make_available(queue, 0);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while driver.used_index(queue) == before && !driver.needs_reset() {
            assert!(std::time::Instant::now() < end, "round {round}: neither an answer nor a request for a reset");
            std::thread::yield_now();
        }
        if driver.needs_reset() {
            resets += 1;
            driver.reset();
            driver.start(ALL);
        } else {
            answers += 1;
        }
    }
    assert!(answers > 100 && resets > 0, "{answers} answers, {resets} resets: one of the two cases did not occur");
    driver.reset();
    driver.start(ALL);
    give(&mut driver, DEFLATE, PAGES[0]..PAGES[0] + 16);
    give(&mut driver, INFLATE, PAGES[0]..PAGES[0] + 16);
    assert_eq!(handle.report().pages.inflated_now, 16);
}
