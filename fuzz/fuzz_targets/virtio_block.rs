//! Input: a guest's use of its disk: registers, configuration, rings, chains and headers. The length of the disk's file
//! does not change, a read-only disk is not written, and afterwards a driver that follows the rules is served. The file
//! is a temporary one.
#![no_main]

mod virtio_driver;

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tempfile::NamedTempFile;
use virtio_driver::{BUFFERS_AT, Driver, Input, NEXT, STEPS_MAX, WRITE};
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::block::{Block, DiskImage, DiskOptions};

const DISK_BYTES: u64 = 64 << 10;
const HEADER_AT: u64 = BUFFERS_AT;
const STATUS_AT: u64 = BUFFERS_AT + 0x100;
const DATA_AT: u64 = BUFFERS_AT + 0x1000;
/// Kinds of requests (Virtual I/O Device 1.2, section 5.2.6), by number.
const READ: u32 = 0;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

static FILE: OnceLock<NamedTempFile> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let file = FILE.get_or_init(|| {
        let file = NamedTempFile::new().expect("there is a folder for such files");
        file.as_file().set_len(DISK_BYTES).expect("there is room");
        file
    });
    let mut input = Input(bytes);
    let is_read_only = input.byte() & 1 != 0;
    let options = DiskOptions { path: file.path().to_owned(), is_read_only, id: None };
    let device = Block::new(DiskImage::open(&options).expect("it has no other user"));
    let (offered, counters) = (device.features(), device.counters());
    let mut driver = Driver::alone(Box::new(device));
    driver.start(input.features(offered));
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.0[0] {
            0xc0.. => request(&mut driver, &mut input),
            _ => driver.step(&mut input, offered),
        }
    }
    // After any input, a driver that follows the rules is served.
    driver.start(0);
    ask(&mut driver, READ, 0, (DATA_AT, 512), WRITE);
    assert!(driver.is_served(0));
    let status: u8 = driver.memory.access().read_obj(GuestAddress(STATUS_AT)).expect("it is in RAM");
    assert_eq!(status, 0, "it was read");
    assert_eq!(file.as_file().metadata().expect("it is open").len(), DISK_BYTES, "no request makes it longer");
    let statistics = counters.statistics();
    assert!(!is_read_only || (statistics.writes, statistics.discards, statistics.zeroings) == (0, 0, 0));
});

/// A well-formed request of any kind, mostly for existing sectors.
fn request(driver: &mut Driver, input: &mut Input<'_>) {
    let kind = u32::from(input.byte() & 0xf);
    let (sector, bytes) = (u64::from(input.word()) % 160, u32::from(input.word()) << (input.byte() % 8));
    if kind != DISCARD && kind != WRITE_ZEROES {
        let flags = if kind == 1 { 0 } else { WRITE };
        return ask(driver, kind, sector, (DATA_AT, bytes), flags);
    }
    let (segments, flags) = (1 + u32::from(input.byte() & 3), u32::from(input.byte() & 3));
    for n in 0..segments {
        let segment = [&sector.to_le_bytes()[..], &(bytes % 160).to_le_bytes(), &flags.to_le_bytes()].concat();
        driver.put(DATA_AT + 16 * u64::from(n), &segment);
    }
    ask(driver, kind, 0, (DATA_AT, 16 * segments), 0);
}

fn ask(driver: &mut Driver, kind: u32, sector: u64, data: (u64, u32), flags: u16) {
    let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
    driver.put(HEADER_AT, &header);
    driver.put(STATUS_AT, &[0xaa]);
    driver.describe(0, 0, (HEADER_AT, 16), NEXT, 1);
    driver.describe(0, 1, data, NEXT | flags, 2);
    driver.describe(0, 2, (STATUS_AT, 1), WRITE, 0);
    driver.offer(0, 0);
    driver.notify(0);
}
