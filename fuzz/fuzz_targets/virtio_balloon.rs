//! Input: a guest's use of its balloon: inflating, deflating, reports and statistics, while the target changes and the
//! host is short of memory. The counters never contradict each other, and afterwards a driver that follows the rules
//! loses only the pages that it gives. Guest RAM is anonymous memory of this process.
#![no_main]

mod virtio_driver;

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_driver::{BUFFERS_AT, Driver, Input, NEXT, RAM_BYTES, STEPS_MAX, WRITE};
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::host::{Advice, Host as _};
use wideleaf_policies::{Bytes, WindowIndex};
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::balloon::Balloon;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATISTICS: usize = 2;
const REPORTS: usize = 3;

const PAGE_BYTES: u64 = 4096;
const PAGES: u64 = RAM_BYTES / PAGE_BYTES;
/// First page of the second window: rings and buffers are in the first.
const FIRST_PAGE: u64 = 512;
/// Maximum page numbers in a buffer: more than the device accepts.
const NUMBERS_MAX: u64 = 5000;

fuzz_target!(|bytes: &[u8]| {
    let device = Balloon::new(Bytes::new(RAM_BYTES), Bytes::ZERO).expect("a balloon of zero bytes fits");
    let (handle, offered) = (device.handle(), device.features());
    let mut driver = Driver::alone(Box::new(device));
    let host = Arc::new(LinuxHost::open().expect("it is Linux"));
    let ram = Arc::clone(driver.memory.memory().ram());
    let manager = GiveBack::new(host.clone(), Arc::clone(&ram)).expect("it has no other user");
    if bytes.last().is_some_and(|byte| byte & 1 != 0) {
        // A part of a huge page is kept, or the page is split while the host is short of memory.
        host.advise(ram.base(), Bytes::new(RAM_BYTES), Advice::HugePage).expect("it is anonymous");
        (FIRST_PAGE..PAGES).step_by(512).for_each(|page| driver.put(page * PAGE_BYTES, &[1]));
    }
    let mut input = Input(bytes);
    driver.start(input.features(offered));
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.0[0] {
            0xa0..0xc0 => give(&mut driver, &mut input),
            0xc0..0xe0 => report(&mut driver, &mut input),
            0xe0..0xe8 => say(&mut driver, &mut input),
            0xe8.. => {
                ram.given_back().set_short(input.byte() & 1 != 0);
                let _ = handle.set_target(Bytes::new(u64::from(input.word()) * PAGE_BYTES));
                handle.ask_statistics();
                let _ = manager.look_again(WindowIndex::new(0), 4);
            }
            _ => driver.step(&mut input, offered),
        }
        let pages = handle.report().pages;
        assert!(pages.kept_now <= pages.inflated_now && pages.inflated_now <= PAGES, "{pages:?}");
    }
    // After any input, a driver that follows the rules is served, and loses only the pages that it gave.
    driver.start(offered);
    let pages = [FIRST_PAGE, FIRST_PAGE + 1, FIRST_PAGE + 2];
    pages.iter().for_each(|page| driver.put(page * PAGE_BYTES, &[7]));
    let before = handle.report().pages;
    assert_eq!(before.inflated_now, 0, "a reset empties the balloon");
    for queue in [INFLATE, DEFLATE] {
        give_pages(&mut driver, queue, &[pages[1]]);
        assert!(driver.is_served(queue));
    }
    let after = handle.report().pages;
    assert_eq!((after.inflated, after.deflated), (before.inflated + 1, before.deflated + 1));
    let byte =
        |page: u64| -> u8 { driver.memory.access().read_obj(GuestAddress(page * PAGE_BYTES)).expect("it is in RAM") };
    assert_eq!((byte(pages[0]), byte(pages[2])), (7, 7));
});

/// Inflates or deflates, mostly with pages that exist.
fn give(driver: &mut Driver, input: &mut Input<'_>) {
    let queue = if input.byte() & 1 == 0 { INFLATE } else { DEFLATE };
    let first = FIRST_PAGE + u64::from(input.word()) % (PAGES - FIRST_PAGE);
    let count = (u64::from(input.byte()) << (input.byte() % 6)).min(NUMBERS_MAX);
    let stride = u64::from(input.byte() & 3);
    let numbers: Vec<u64> = (0..count).map(|n| first + n * stride).collect();
    give_pages(driver, queue, &numbers);
}

fn give_pages(driver: &mut Driver, queue: usize, pages: &[u64]) {
    let numbers: Vec<u8> = pages.iter().flat_map(|page| (*page as u32).to_le_bytes()).collect();
    driver.put(BUFFERS_AT, &numbers);
    driver.describe(queue, 0, (BUFFERS_AT, numbers.len() as u32), 0, 0);
    driver.offer(queue, 0);
    driver.notify(queue);
}

/// Reports runs of free pages, mostly behind the first window.
fn report(driver: &mut Driver, input: &mut Input<'_>) {
    let runs = u16::from(input.byte() & 3) + 1;
    for n in 0..runs {
        let first = FIRST_PAGE + u64::from(input.word()) % (PAGES - FIRST_PAGE);
        let (bytes, scale) = (u32::from(input.word()), input.byte() % 8);
        let next = if n + 1 < runs { NEXT } else { 0 };
        driver.describe(REPORTS, n, (first * PAGE_BYTES, bytes << scale), WRITE | next, n + 1);
    }
    driver.offer(REPORTS, 0);
    driver.notify(REPORTS);
}

/// Sends statistics of any kind.
fn say(driver: &mut Driver, input: &mut Input<'_>) {
    let bytes = usize::from(input.byte() & 7) * 10 + usize::from(input.byte() & 1);
    let pairs = input.bytes(bytes).to_vec();
    driver.put(BUFFERS_AT, &pairs);
    driver.describe(STATISTICS, 0, (BUFFERS_AT, pairs.len() as u32), 0, 0);
    driver.offer(STATISTICS, 0);
    driver.notify(STATISTICS);
}
