//! A disk as its driver, well-behaved or not, sees it.

use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tempfile::NamedTempFile;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::super::test_driver::{Driver, Piece, RAM_BYTES, Used};
use super::request::{FAILED, OK};
use super::*;
use crate::devices::bus::MemoryDevice;

const HEADER: u64 = 0x10_0000;
const STATUS: u64 = 0x10_1000;
const DATA: u64 = 0x20_0000;
const UNSUPPORTED: u8 = VIRTIO_BLK_S_UNSUPP as u8;
const NOT_WRITTEN: u8 = 0xaa;
const DISK_BYTES: u64 = 4 << 20;
const ALL: u64 =
    1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES | 1 << VIRTIO_RING_F_EVENT_IDX;

struct Disk {
    driver: Driver,
    counters: Arc<DiskCounters>,
    image: Arc<DiskImage>,
    file: NamedTempFile,
}

fn disk_with(is_read_only: bool, features: u64) -> Disk {
    let file = NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 % 251) as u8 + 1).collect();
    file.as_file().write_all_at(&content, 0).unwrap();
    let options = DiskOptions { path: file.path().to_owned(), is_read_only, id: Some("tested".into()) };
    let device = Block::new(DiskImage::open(&options).unwrap());
    let (counters, image) = (device.counters(), device.image());
    let mut driver = Driver::new(Box::new(device));
    driver.start(features);
    Disk { driver, counters, image, file }
}

fn disk() -> Disk {
    disk_with(false, ALL)
}

/// A flush of a disk that hangs until it is told to end.
struct HungFlush {
    go_on: Sender<()>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl HungFlush {
    fn of(disk: &Disk) -> HungFlush {
        let ((begins, begun), (go_on, goes_on)) = (channel(), channel());
        let image = Arc::clone(&disk.image);
        let thread = std::thread::spawn(move || {
            image.flush_by(|_| {
                begins.send(()).unwrap();
                goes_on.recv().map_err(std::io::Error::other)
            })
        });
        begun.recv().unwrap();
        HungFlush { go_on, thread }
    }

    fn ends(self) {
        self.go_on.send(()).unwrap();
        self.thread.join().unwrap().unwrap();
    }
}

/// Ends the VM of a disk that does not stop.
fn end(mut disk: Disk) {
    let (said, heard) = channel();
    std::thread::spawn(move || {
        MemoryDevice::stop(&mut disk.driver.transport, Instant::now() + Duration::from_millis(10));
        drop(disk);
        said.send(()).unwrap();
    });
    heard.recv_timeout(Duration::from_secs(60)).expect("the VM does not end");
}

impl Disk {
    fn set_header(&self, kind: u32, sector: u64) {
        let header: Vec<u8> = kind.to_le_bytes().into_iter().chain([0; 4]).chain(sector.to_le_bytes()).collect();
        self.driver.set_bytes(HEADER, &header);
        self.driver.set_bytes(STATUS, &[NOT_WRITTEN]);
    }

    /// Sends a request of a header, these buffers, and a status byte, and returns the status.
    fn ask(&mut self, kind: u32, sector: u64, data: &[Piece]) -> (u8, Used) {
        self.set_header(kind, sector);
        let mut pieces = vec![Piece::read(HEADER, 16)];
        pieces.extend(data);
        pieces.push(Piece::write(STATUS, 1));
        let used = self.driver.request(0, &pieces);
        (self.driver.bytes(STATUS, 1)[0], used)
    }

    /// Sends a DISCARD or WRITE_ZEROES of one segment.
    fn ask_zero(&mut self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
        let range: Vec<u8> =
            sector.to_le_bytes().into_iter().chain(sectors.to_le_bytes()).chain(flags.to_le_bytes()).collect();
        self.driver.set_bytes(DATA, &range);
        self.ask(kind, 0, &[Piece::read(DATA, 16)]).0
    }

    fn file_bytes(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        self.file.as_file().read_exact_at(&mut data, at).unwrap();
        data
    }
}

#[test]
fn the_driver_reads_the_properties_of_the_disk() {
    let mut disk = disk();
    assert_eq!(u64::from_le_bytes(disk.driver.config(0)), DISK_BYTES / 512);
    assert_eq!(u32::from_le_bytes(disk.driver.config(12)), 254, "seg_max");
    assert_eq!(u32::from_le_bytes(disk.driver.config(20)), 512, "blk_size");
    assert_eq!(u32::from_le_bytes(disk.driver.config(36)), ZEROED_SECTORS_MAX, "max_discard_sectors");
    assert_eq!(disk.driver.config::<8>(1 << 20), [0; 8]);
    assert_eq!(disk.driver.config::<8>(u64::from(u32::MAX)), [0; 8]);
    let (status, used) = disk.ask(VIRTIO_BLK_T_GET_ID, 0, &[Piece::write(DATA, 20)]);
    assert_eq!((status, used.written, &disk.driver.bytes(DATA, 7)[..]), (OK, 21, &b"tested\0"[..]));
}

#[test]
fn a_read_returns_the_content_of_the_file() {
    let mut disk = disk();
    // 3 MiB in buffers of odd sizes: several pieces, with borders inside sectors.
    let buffers = [
        Piece::write(DATA, 1_000_000),
        Piece::write(DATA + 0x10_0001, 2_145_728 - 3),
        Piece::write(DATA + 0x40_0000, 3),
    ];
    let (status, used) = disk.ask(VIRTIO_BLK_T_IN, 8, &buffers);
    assert_eq!((status, used.written), (OK, 3_145_729));
    let mut found = disk.driver.bytes(DATA, 1_000_000);
    found.extend(disk.driver.bytes(DATA + 0x10_0001, 2_145_725));
    found.extend(disk.driver.bytes(DATA + 0x40_0000, 3));
    assert!(found == disk.file_bytes(4096, 3_145_728));
    let statistics = disk.counters.statistics();
    assert_eq!((statistics.reads, statistics.read_bytes), (1, 3_145_728));
}

#[test]
fn a_write_changes_its_bytes_of_the_file_and_no_others() {
    let mut disk = disk();
    let before = disk.file_bytes(0, DISK_BYTES as usize);
    disk.driver.set_bytes(DATA, &[7; 1024]);
    let (status, used) = disk.ask(VIRTIO_BLK_T_OUT, 3, &[Piece::read(DATA, 700), Piece::read(DATA, 324)]);
    assert_eq!((status, used.written), (OK, 1));
    let mut after = before;
    after[3 * 512..5 * 512].fill(7);
    assert!(disk.file_bytes(0, DISK_BYTES as usize) == after);
    assert_eq!(disk.ask(VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
    assert_eq!(disk.counters.statistics().flushes, 1);
}

#[test]
fn header_and_status_may_lie_in_any_buffers() {
    let mut disk = disk();
    disk.set_header(VIRTIO_BLK_T_IN, 1);
    let pieces =
        [Piece::read(HEADER, 3), Piece::read(HEADER + 3, 0), Piece::read(HEADER + 3, 13), Piece::write(DATA, 513)];
    assert_eq!(disk.driver.request(0, &pieces).written, 513);
    let mut expected = disk.file_bytes(512, 512);
    expected.push(OK);
    assert!(disk.driver.bytes(DATA, 513) == expected);
}

#[test]
fn a_request_beyond_the_end_or_of_partial_sectors_fails_and_moves_nothing() {
    let mut disk = disk();
    let end = DISK_BYTES / 512;
    let (sector, two) = ([Piece::write(DATA, 512)], [Piece::write(DATA, 1024)]);
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, end - 1, &sector).0, OK);
    for (sector, pieces) in [(end, &sector), (end - 1, &two), (u64::MAX, &sector), (u64::MAX / 512, &two)] {
        let (status, used) = disk.ask(VIRTIO_BLK_T_IN, sector, pieces);
        assert_eq!((status, used.written), (FAILED, 0), "sector {sector}");
    }
    assert_eq!(disk.ask(VIRTIO_BLK_T_OUT, end, &[Piece::read(DATA, 512)]).0, FAILED);
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 511)]).0, FAILED);
    assert_eq!(disk.ask(VIRTIO_BLK_T_OUT, 0, &[Piece::read(DATA, 513)]).0, FAILED);
    let statistics = disk.counters.statistics();
    assert_eq!((statistics.refused_beyond_end, statistics.refused_malformed, statistics.writes), (5, 2, 0));
}

#[test]
fn a_read_only_disk_reports_it_and_refuses_writes() {
    let mut disk = disk_with(true, 1 << VIRTIO_BLK_F_RO);
    let before = disk.file_bytes(0, 4096);
    assert_eq!(disk.ask(VIRTIO_BLK_T_OUT, 0, &[Piece::read(DATA, 512)]).0, FAILED);
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 512)]).0, OK);
    assert!(disk.file_bytes(0, 4096) == before);
    assert_eq!(disk.counters.statistics().refused_read_only, 1);
}

#[test]
fn an_unknown_request_is_unsupported() {
    let mut disk = disk();
    for kind in [2, 14, 24, u32::MAX] {
        assert_eq!(disk.ask(kind, 0, &[Piece::write(DATA, 512)]).0, UNSUPPORTED);
    }
    // A driver cannot request a feature that it did not accept.
    let mut plain = disk_with(false, 0);
    assert_eq!(plain.ask_zero(VIRTIO_BLK_T_DISCARD, 0, 8, 0), UNSUPPORTED);
}

#[test]
fn discards_give_back_pieces_and_write_zeroes_clears_them() {
    let mut disk = disk();
    assert_eq!(disk.ask_zero(VIRTIO_BLK_T_WRITE_ZEROES, 1, 3, 1), OK);
    assert_eq!(disk.file_bytes(512, 1536), vec![0; 1536]);
    assert_eq!((disk.file_bytes(0, 1)[0], disk.file_bytes(2048, 1)[0]), (1, 5), "the neighbouring bytes are unchanged");
    assert_eq!(disk.ask_zero(VIRTIO_BLK_T_WRITE_ZEROES, 4096, 8, 0), OK);
    assert_eq!(disk.file_bytes(4096 * 512, 4096), vec![0; 4096]);
    assert_eq!(disk.ask_zero(VIRTIO_BLK_T_DISCARD, 64, 8, 0), OK);
    assert_eq!(disk.file_bytes(0, DISK_BYTES as usize).len() as u64, DISK_BYTES, "the length is unchanged");
    for (flags, kind) in [(1, VIRTIO_BLK_T_DISCARD), (2, VIRTIO_BLK_T_DISCARD), (2, VIRTIO_BLK_T_WRITE_ZEROES)] {
        assert_eq!(disk.ask_zero(kind, 0, 8, flags), UNSUPPORTED);
    }
    for (sector, sectors) in [(DISK_BYTES / 512, 1), (0, u32::MAX), (u64::MAX, 1)] {
        assert_eq!(disk.ask_zero(VIRTIO_BLK_T_WRITE_ZEROES, sector, sectors, 0), FAILED);
    }
    assert_eq!(disk.ask(VIRTIO_BLK_T_DISCARD, 0, &[Piece::read(DATA, 17)]).0, FAILED);
    assert_eq!(disk.ask(VIRTIO_BLK_T_DISCARD, 0, &[]).0, FAILED);
    assert_eq!(disk.ask(VIRTIO_BLK_T_DISCARD, 0, &[Piece::read(DATA, 16 * 33)]).0, FAILED);
}

#[test]
fn reads_beyond_the_end_of_a_shortened_file_fail_instead_of_returning_zeroes() {
    let mut disk = disk();
    disk.file.as_file().set_len(4096 + 100).unwrap();
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 4096)]).0, OK);
    for sector in [8, 9, 1000] {
        let (status, used) = disk.ask(VIRTIO_BLK_T_IN, sector, &[Piece::write(DATA, 512)]);
        assert_eq!((status, used.written), (FAILED, 0), "sector {sector}");
    }
    assert_eq!(disk.counters.statistics().failed_short, 3);
}

#[test]
fn buffers_outside_ram_fail_with_a_status() {
    let mut disk = disk();
    for address in [RAM_BYTES, RAM_BYTES - 256, u64::MAX - 255] {
        let (status, used) = disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(address, 512)]);
        assert_eq!((status, used.written), (FAILED, 0), "{address:#x}");
    }
    disk.set_header(VIRTIO_BLK_T_IN, 0);
    let without_status = [Piece::read(HEADER, 16), Piece::write(DATA, 512), Piece::write(RAM_BYTES, 1)];
    assert_eq!(disk.driver.request(0, &without_status).written, 0);
    let header_nowhere = [Piece::read(RAM_BYTES, 16), Piece::write(DATA, 512), Piece::write(STATUS, 1)];
    disk.driver.request(0, &header_nowhere);
    assert_eq!(disk.driver.bytes(STATUS, 1), [FAILED]);
    assert_eq!(disk.counters.statistics().failed_no_ram, 3);
}

#[test]
fn malformed_chains_come_back_with_a_status_where_they_have_room_for_it() {
    let mut disk = disk();
    disk.set_header(VIRTIO_BLK_T_IN, 0);
    // A header that is too short; a header behind a writable buffer; only the status.
    let chains: [&[Piece]; 3] = [
        &[Piece::read(HEADER, 15), Piece::write(STATUS, 1)],
        &[Piece::write(DATA, 512), Piece::read(HEADER, 16), Piece::write(STATUS, 1)],
        &[Piece::write(STATUS, 1)],
    ];
    for chain in chains {
        disk.driver.set_bytes(STATUS, &[NOT_WRITTEN]);
        assert_eq!(disk.driver.request(0, chain).written, 0);
        assert_eq!(disk.driver.bytes(STATUS, 1), [FAILED]);
    }
    // No room for a status: only a header, and a writable buffer without bytes.
    assert_eq!(disk.driver.request(0, &[Piece::read(HEADER, 16)]).written, 0);
    assert_eq!(disk.driver.request(0, &[Piece::read(HEADER, 16), Piece::write(STATUS, 0)]).written, 0);
    assert_eq!(disk.counters.statistics().refused_malformed, 5);
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 512)]).0, OK, "the disk still serves");
}

#[test]
fn a_chain_with_a_loop_ends() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    let mut disk = disk();
    disk.set_header(VIRTIO_BLK_T_IN, 0);
    disk.driver.set_descriptor(0, 0, (HEADER, 16), NEXT, 1);
    disk.driver.set_descriptor(0, 1, (DATA, 512), NEXT | WRITE, 1);
    disk.driver.make_available(0, 0);
    disk.driver.wait_used(0);
    // A successor that is not a descriptor.
    disk.driver.set_descriptor(0, 1, (DATA, 512), NEXT | WRITE, 9999);
    disk.driver.make_available(0, 0);
    disk.driver.wait_used(0);
    assert_eq!(disk.counters.statistics().refused_malformed, 2);
    // A head that is not a descriptor breaks the queue itself.
    disk.driver.make_available(0, 9999);
    disk.driver.wait_for_needs_reset();
    disk.driver.reset();
    disk.driver.start(ALL);
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 512)]).0, OK);
}

#[test]
fn requests_that_arrive_together_are_all_answered_in_order() {
    const REQUESTS: u16 = 64;
    let mut disk = disk();
    for n in 0..REQUESTS {
        let (header, status, data) = (HEADER + 16 * u64::from(n), STATUS + u64::from(n), DATA + 4096 * u64::from(n));
        let text: Vec<u8> =
            VIRTIO_BLK_T_IN.to_le_bytes().into_iter().chain([0; 4]).chain(u64::from(n).to_le_bytes()).collect();
        disk.driver.set_bytes(header, &text);
        disk.driver.offer(0, 3 * n, &[Piece::read(header, 16), Piece::write(data, 512), Piece::write(status, 1)]);
    }
    for n in 0..REQUESTS {
        assert_eq!(disk.driver.wait_used(0), Used { head: 3 * u32::from(n), written: 513 });
        assert!(disk.driver.bytes(DATA + 4096 * u64::from(n), 512) == disk.file_bytes(512 * u64::from(n), 512));
    }
}

#[test]
fn a_reset_under_load_returns_and_the_disk_serves_again() {
    let mut disk = disk();
    for round in 0..8 {
        for n in 0..32 {
            disk.set_header(VIRTIO_BLK_T_IN, 0);
            let pieces = [Piece::read(HEADER, 16), Piece::write(DATA, 2 << 20), Piece::write(STATUS, 1)];
            disk.driver.offer(0, 3 * n, &pieces);
        }
        disk.driver.reset();
        disk.driver.start(ALL);
        assert_eq!(disk.ask(VIRTIO_BLK_T_IN, round, &[Piece::write(DATA, 512)]).0, OK);
    }
}

#[test]
fn a_large_request_lets_the_vm_pause_between_its_pieces() {
    let mut disk = disk();
    let gate = Arc::clone(disk.driver.memory.gate());
    disk.set_header(VIRTIO_BLK_T_IN, 0);
    let pieces = [Piece::read(HEADER, 16), Piece::write(DATA, DISK_BYTES as u32), Piece::write(STATUS, 1)];
    disk.driver.offer(0, 0, &pieces);
    assert!(gate.close(crate::run_loop::PAUSE_WAIT_MAX));
    // Nothing moves while the gate is closed, and everything afterwards.
    gate.open();
    assert_eq!(disk.driver.wait_used(0).written as u64, DISK_BYTES + 1);
    assert!(disk.driver.bytes(DATA, DISK_BYTES as usize) == disk.file_bytes(0, DISK_BYTES as usize));
}

#[test]
fn a_vm_that_ends_while_paused_for_good_does_not_wait_for_its_disk() {
    let mut disk = disk();
    assert!(disk.driver.memory.gate().close(crate::run_loop::PAUSE_WAIT_MAX));
    // The disk's thread wakes, and waits at the gate.
    disk.driver.set_register(virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    end(disk);
}

#[test]
fn a_vm_that_ends_does_not_wait_for_a_disk_of_which_the_file_hangs() {
    let mut disk = disk();
    let hung = HungFlush::of(&disk);
    // The guest's own flush waits for that one.
    disk.set_header(VIRTIO_BLK_T_FLUSH, 0);
    disk.driver.offer(0, 0, &[Piece::read(HEADER, 16), Piece::write(STATUS, 1)]);
    std::thread::sleep(Duration::from_millis(5));
    end(disk);
    hung.ends();
}

#[test]
fn a_disk_that_rests_leaves_a_request_in_the_ring_until_it_goes_on() {
    let mut disk = disk();
    disk.image.set_resting(true);
    disk.set_header(VIRTIO_BLK_T_OUT, 1);
    disk.driver.set_bytes(DATA, &[0xee; 512]);
    disk.driver.offer(0, 0, &[Piece::read(HEADER, 16), Piece::read(DATA, 512), Piece::write(STATUS, 1)]);
    std::thread::sleep(std::time::Duration::from_millis(5));
    assert_eq!((disk.driver.used_index(0), disk.file_bytes(512, 512)), (0, vec![2; 512]));
    disk.image.set_resting(false);
    disk.driver.kick_queues();
    disk.driver.wait_used(0);
    assert_eq!((disk.driver.bytes(STATUS, 1)[0], disk.file_bytes(512, 512)), (OK, vec![0xee; 512]));
}

#[test]
fn a_save_gives_up_on_a_flush_that_hangs_and_the_disk_goes_on() {
    let mut disk = disk();
    let hung = HungFlush::of(&disk);
    let refused = MemoryDevice::save(&disk.driver.transport, Instant::now() + Duration::from_millis(200));
    assert!(matches!(refused, Err(NotAtRest::Busy)));
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 512)]).0, OK);
    hung.ends();
    let (saved, _) = disk.driver.save(|| ());
    assert!(matches!(saved.device, DeviceState::Block(_)));
}

#[test]
fn a_flush_behind_one_that_hangs_keeps_neither_the_thread_that_begins_it_nor_the_disk() {
    let mut disk = disk();
    let hung = HungFlush::of(&disk);
    let flushing = MemoryDevice::start_flush(&disk.driver.transport).unwrap().expect("it is a disk");
    assert!(matches!(flushing.recv_timeout(Duration::from_millis(20)), Err(RecvTimeoutError::Timeout)));
    assert_eq!(disk.ask(VIRTIO_BLK_T_IN, 0, &[Piece::write(DATA, 512)]).0, OK);
    hung.ends();
    let flushed = flushing.recv_timeout(Duration::from_secs(60)).expect("it goes on");
    assert!(matches!(flushed, Ok(DeviceState::Block(_))));
}

#[test]
fn a_request_after_the_lock_was_given_up_changes_nothing_and_has_no_answer() {
    let mut disk = disk();
    let before = disk.file_bytes(0, 512);
    disk.image.give_up().unwrap();
    let woken = disk.counters.statistics().wake_ups;
    disk.driver.set_bytes(DATA, &[0xff; 512]);
    disk.set_header(VIRTIO_BLK_T_OUT, 0);
    let pieces = [Piece::read(HEADER, 16), Piece::read(DATA, 512), Piece::write(STATUS, 1)];
    disk.driver.offer(0, 0, &pieces);
    while disk.counters.statistics().wake_ups == woken {
        std::thread::yield_now();
    }
    // It has taken the request by then, or sees it before it ends.
    disk.driver.reset();
    assert_eq!((disk.driver.bytes(STATUS, 1)[0], disk.file_bytes(0, 512)), (NOT_WRITTEN, before));
    assert_eq!(disk.counters.statistics().failed_host, 0);
    disk.image.take().unwrap();
    disk.driver.start(ALL);
    assert_eq!(disk.ask(VIRTIO_BLK_T_OUT, 0, &[Piece::read(DATA, 512)]).0, OK);
    assert_eq!(disk.file_bytes(0, 512), vec![0xff; 512]);
}

#[test]
fn a_disk_that_was_abandoned_waits_although_a_request_lies_in_the_ring() {
    let mut disk = disk();
    disk.image.abandon();
    let before = disk.counters.statistics().wake_ups;
    disk.set_header(VIRTIO_BLK_T_IN, 0);
    disk.driver.offer(0, 0, &[Piece::read(HEADER, 16), Piece::write(DATA, 512), Piece::write(STATUS, 1)]);
    let end = Instant::now() + Duration::from_secs(60);
    for wake_ups in 1..=3 {
        while disk.counters.statistics().wake_ups < before + wake_ups {
            assert!(Instant::now() < end, "it does not wait for its driver");
            std::thread::yield_now();
        }
        disk.driver.kick_queues();
    }
    assert_eq!((disk.driver.used_index(0), disk.driver.bytes(STATUS, 1)[0]), (0, NOT_WRITTEN));
}
