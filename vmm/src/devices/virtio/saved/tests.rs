//! Devices with work under way that are saved, and continue on another machine and on this one.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_STATUS};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use super::*;
use crate::devices::bus::MemoryDevice as _;
use crate::devices::virtio::balloon::{Balloon, BalloonHandle, feature};
use crate::devices::virtio::block::{Block, DiskImage, DiskOptions};
use crate::devices::virtio::net::{Link, Net, NetConfig, Offload};
use crate::devices::virtio::rng::Entropy;
use crate::devices::virtio::test_driver::{Driver, Piece, RAM_BYTES};
use crate::devices::virtio::vsock::packet::{HEADER_BYTES, HOST_CID, Header, Operation, Ports};
use crate::devices::virtio::vsock::{HostSocket, Vsock};

/// Address of the tests' buffers.
const AT: u64 = 0x20_0000;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const BOTH: [u64; 2] = [0, EVENT_IDX];

fn nothing() {}

// ---- disk -----------------------------------------------------------------------------------------------------------

const DISK_BYTES: u64 = 4 << 20;
/// Requests of one sector each: header, data and status at 0x400 a request, in three descriptors.
const REQUESTS: u16 = 85;
const REQUEST_BYTES: u64 = 0x400;

fn disk_at(path: &Path) -> Box<Block> {
    let options = DiskOptions { path: path.to_owned(), is_read_only: false, id: Some("tested".into()) };
    Box::new(Block::new(DiskImage::open(&options).unwrap()))
}

fn new_disk(folder: &tempfile::TempDir) -> std::path::PathBuf {
    let path = folder.path().join("disk");
    let content: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(&path, content).unwrap();
    path
}

/// Offers the request of this number: even ones read their sector, odd ones write 0xff into it.
fn offer_request(driver: &mut Driver, n: u16) {
    let at = AT + u64::from(n) * REQUEST_BYTES;
    let (kind, data) = match n % 2 {
        0 => (VIRTIO_BLK_T_IN, Piece::write(at + 16, 512)),
        _ => (VIRTIO_BLK_T_OUT, Piece::read(at + 16, 512)),
    };
    driver.set_bytes(at, &[&kind.to_le_bytes()[..], &[0; 4], &u64::from(n).to_le_bytes()].concat());
    driver.set_bytes(at + 16, &[0xff; 512]);
    driver.set_bytes(at + 528, &[0xaa]);
    driver.offer(0, n * 3, &[Piece::read(at, 16), data, Piece::write(at + 528, 1)]);
}

/// Takes all requests from `done` on that the device hands back, in any number of steps, and checks them and the disk.
fn assert_all_done(driver: &mut Driver, done: u16, disk: &Path) {
    for n in done..REQUESTS {
        assert_eq!(driver.wait_used(0).head, u32::from(n) * 3, "each once, in order");
    }
    let disk = File::open(disk).unwrap();
    for n in 0..REQUESTS {
        let at = AT + u64::from(n) * REQUEST_BYTES;
        let mut sector = [0; 512];
        disk.read_exact_at(&mut sector, u64::from(n) * 512).unwrap();
        let expected = if n % 2 == 0 { [n as u8; 512] } else { [0xff; 512] };
        assert_eq!((sector, driver.bytes(at + 528, 1)[0]), (expected, 0), "request {n}");
        assert_eq!(driver.bytes(at + 16, 512), expected, "request {n}");
    }
    assert_eq!(driver.used_index(0), REQUESTS);
}

#[test]
fn every_request_of_a_disk_is_done_once_here_and_on_the_other_machine() {
    const ROUNDS_MAX: usize = 200;
    let (mut round, mut was_in_the_middle) = (0, false);
    while round < 20 || !was_in_the_middle {
        assert!(round < ROUNDS_MAX, "no round saved a disk with requests left");
        let folder = tempfile::tempdir().unwrap();
        let (path, copy) = (new_disk(&folder), folder.path().join("copy"));
        let mut driver = Driver::new(disk_at(&path));
        driver.start(1 << VIRTIO_BLK_F_FLUSH | BOTH[round % 2]);
        (0..REQUESTS).for_each(|n| offer_request(&mut driver, n));
        // The disk works meanwhile; each round it is at another request.
        let done = round as u16 % 20;
        for n in 0..done {
            assert_eq!(driver.wait_used(0).head, u32::from(n) * 3);
        }
        let saved = driver.save(|| assert_eq!(std::fs::copy(&path, &copy).unwrap(), DISK_BYTES));
        let SavedQueue { next_available, next_used, .. } = saved.0.queues[0];
        assert_eq!(next_available, next_used, "a request that was taken is completed");
        was_in_the_middle |= next_used < REQUESTS;
        let mut other = driver.continued(disk_at(&copy), &saved).unwrap();
        assert_all_done(&mut other, done, &copy);
        assert_all_done(&mut driver, done, &path);
        round += 1;
    }
}

#[test]
fn a_disk_that_continues_begins_nothing_before_it_is_told_to_look() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (new_disk(&folder), folder.path().join("copy"));
    let mut driver = Driver::new(disk_at(&path));
    driver.start(1 << VIRTIO_BLK_F_FLUSH);
    let (saved, _) = driver.save(|| assert_eq!(std::fs::copy(&path, &copy).unwrap(), DISK_BYTES));
    // The device of that moment, in RAM with requests that it has not seen: it is reset, or would work on them while
    // RAM is copied.
    driver.reset();
    (0..REQUESTS).for_each(|n| offer_request(&mut driver, n));
    let with_requests = (saved, driver.bytes(0, RAM_BYTES as usize));
    let before = std::fs::read(&copy).unwrap();
    let mut held = driver.continued_held(disk_at(&copy), &with_requests).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    held.reset();
    assert!(std::fs::read(&copy).unwrap() == before, "it has written");
    drop(held);
    let mut other = driver.continued(disk_at(&copy), &with_requests).unwrap();
    assert_all_done(&mut other, 0, &copy);
}

#[test]
fn a_disk_is_refused_that_is_another_or_was_written_since() {
    let folder = tempfile::tempdir().unwrap();
    let path = new_disk(&folder);
    let mut driver = Driver::new(disk_at(&path));
    driver.start(0);
    let copy = folder.path().join("copy");
    let saved = driver.save(|| assert_eq!(std::fs::copy(&path, &copy).unwrap(), DISK_BYTES));
    driver.reset();
    let idle = Driver::new(Box::new(Entropy::default()));
    let refused = |device: Box<Block>| idle.continued(device, &saved).err().map(|error| error.to_string());
    assert_eq!(refused(disk_at(&copy)), None, "a copy");

    let shorter = folder.path().join("shorter");
    std::fs::write(&shorter, [0; 512]).unwrap();
    assert!(refused(disk_at(&shorter)).unwrap().contains("size in bytes is 512, and was 4194304"));
    let other = DiskOptions { path: copy.clone(), is_read_only: false, id: Some("other".into()) };
    assert!(refused(Box::new(Block::new(DiskImage::open(&other).unwrap()))).unwrap().contains("name is other"));
    let read_only = DiskOptions { path: copy, is_read_only: true, id: Some("tested".into()) };
    assert!(refused(Box::new(Block::new(DiskImage::open(&read_only).unwrap()))).is_some());

    drop(driver);
    assert_eq!(refused(disk_at(&path)), None, "the disk itself, as it was");
    let written = File::options().write(true).open(&path).unwrap();
    let before = written.metadata().unwrap().modified().unwrap();
    while written.metadata().unwrap().modified().unwrap() == before {
        written.write_all_at(&[1], 0).unwrap();
    }
    assert!(refused(disk_at(&path)).unwrap().contains("written after the snapshot"));
}

#[test]
fn a_disk_that_does_not_finish_a_request_refuses_the_snapshot_and_continues() {
    let folder = tempfile::tempdir().unwrap();
    let path = new_disk(&folder);
    let mut driver = Driver::new(disk_at(&path));
    driver.start(1 << VIRTIO_BLK_F_FLUSH);
    let memory = driver.memory.clone();
    (0..REQUESTS).for_each(|n| offer_request(&mut driver, n));
    // The gate is closed and not drained, so a request that the disk has begun does not end.
    assert!(memory.gate().close(Duration::from_secs(60)));
    let used = || -> u16 {
        let index = GuestAddress(0x1_8002);
        memory.memory().view().read_obj(index).unwrap()
    };
    let (end, mut is_under_way) = (Instant::now() + Duration::from_secs(60), false);
    while used() < REQUESTS && !is_under_way {
        assert!(Instant::now() < end, "the disk begins no request");
        is_under_way = driver.transport.save(Instant::now() + Duration::from_millis(1)).is_err();
    }
    memory.gate().open();
    assert_all_done(&mut driver, 0, &path);
}

// ---- random bytes ---------------------------------------------------------------------------------------------------

#[test]
fn a_request_for_random_bytes_that_waits_is_served_on_the_other_machine() {
    for features in BOTH {
        let mut driver = Driver::new(Box::new(Entropy::default()));
        driver.start(features);
        for n in 0..100 {
            assert_eq!(driver.request(0, &[Piece::write(AT, 16)]).written, 16, "{n}");
        }
        let (state, ram) = driver.save(nothing);
        // A request that came after the device had come to rest lies in the ring only.
        let mut ring = driver.continued(Box::new(Entropy::default()), &(state.clone(), ram)).unwrap();
        ring.reset();
        ring.set_descriptor(0, 7, (AT + 0x1000, 32), 2, 0);
        ring.make_available(0, 7);
        let saved = (state, ring.bytes(0, RAM_BYTES as usize));
        let mut other = driver.continued(Box::new(Entropy::default()), &saved).unwrap();
        let used = other.wait_used(0);
        assert_eq!((used.head, used.written), (7, 32));
        assert_ne!(other.bytes(AT + 0x1000, 32), [0; 32]);
        assert_eq!(driver.request(0, &[Piece::write(AT, 16)]).written, 16, "the saved one serves on");
    }
}

// ---- network card ---------------------------------------------------------------------------------------------------

struct Wire(OwnedFd);

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Link for Wire {
    fn set_offload(&self, _: Offload) -> io::Result<()> {
        Ok(())
    }
}

const RX: usize = 0;
const TX: usize = 1;
const FRAME_HEADER: [u8; 12] = [0; 12];

/// A card, and the far end of its cable.
fn card(mac: &str) -> (Box<Net>, OwnedFd) {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let (end, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    (Box::new(Net::new(Arc::new(Wire(end)), NetConfig { mac: mac.parse().unwrap(), mtu: 1400 })), far)
}

fn arrive(far: &OwnedFd, n: u8) {
    send(far.as_raw_fd(), &[&FRAME_HEADER[..], &[n; 60]].concat(), MsgFlags::empty()).unwrap();
}

fn leave(far: &OwnedFd) -> Vec<u8> {
    let mut frame = vec![0; 2000];
    loop {
        match recv(far.as_raw_fd(), &mut frame, MsgFlags::empty()) {
            Ok(bytes) => return frame[FRAME_HEADER.len()..bytes].to_vec(),
            Err(Errno::EAGAIN) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_card_with_buffers_in_its_ring_receives_and_sends_on_the_other_machine() {
    for features in [0, EVENT_IDX, EVENT_IDX | 1 << VIRTIO_NET_F_MRG_RXBUF] {
        let (device, far) = card("02:00:00:00:00:07");
        let mut driver = Driver::new(device);
        driver.start(features);
        for n in 0..40 {
            driver.offer(RX, n, &[Piece::write(AT + u64::from(n) * 0x1000, 2000)]);
        }
        for n in 0..20 {
            arrive(&far, n);
            let used = driver.wait_used(RX);
            assert_eq!((used.head, used.written), (u32::from(n), 72));
        }
        driver.set_bytes(AT, &[9; 80]);
        driver.request(TX, &[Piece::read(AT, 80)]);
        assert_eq!(leave(&far), [9; 68]);
        let saved = driver.save(nothing);
        assert_eq!((saved.0.queues[RX].next_available, saved.0.queues[RX].next_used), (20, 20));

        let (device, other_far) = card("02:00:00:00:00:07");
        let mut other = driver.continued(device, &saved).unwrap();
        for (driver, far) in [(&mut other, &other_far), (&mut driver, &far)] {
            for n in 20..40 {
                arrive(far, n);
                let used = driver.wait_used(RX);
                assert_eq!((used.head, used.written), (u32::from(n), 72));
                assert_eq!(driver.bytes(AT + u64::from(n) * 0x1000 + 12, 60), [n; 60]);
            }
            driver.set_bytes(AT, &[7; 80]);
            driver.request(TX, &[Piece::read(AT, 80)]);
            assert_eq!(leave(far), [7; 68]);
            assert_ne!(driver.register(VIRTIO_MMIO_INTERRUPT_STATUS) & 1, 0);
        }
        let refused = driver.continued(card("02:00:00:00:00:08").0, &saved).err().unwrap().to_string();
        assert!(refused.contains("address is 02:00:00:00:00:08"), "{refused}");
    }
}

// ---- sockets --------------------------------------------------------------------------------------------------------

const CID: u32 = 7;
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
const EVENTS: usize = 2;

fn sockets(folder: &tempfile::TempDir, cid: u32) -> Box<Vsock> {
    Box::new(Vsock::new(cid, HostSocket::listen(&folder.path().join("v")).unwrap()))
}

fn send_packet(driver: &mut Driver, operation: Operation, data: &[u8]) {
    let ports = Ports { host: 52, guest: 1000 };
    let (from_cid, to_cid) = (u64::from(CID), HOST_CID);
    let to_guest = Header::to_guest(u64::from(CID), ports, operation);
    let header = Header { from_cid, to_cid, from_port: 1000, to_port: 52, room: 1 << 20, ..to_guest };
    driver.set_bytes(AT, &Header { bytes: data.len() as u32, ..header }.to_bytes());
    driver.set_bytes(AT + HEADER_BYTES as u64, data);
    driver.request(FROM_GUEST, &[Piece::read(AT, (HEADER_BYTES + data.len()) as u32)]);
}

fn next_operation(driver: &mut Driver) -> Option<Operation> {
    let used = driver.wait_used(TO_GUEST);
    let bytes = driver.bytes(AT + 0x1000 * (u64::from(used.head) + 1), HEADER_BYTES);
    Operation::from_number(Header::read(bytes.first_chunk().unwrap()).operation)
}

#[test]
fn connections_end_on_the_other_machine_and_continue_on_this_one() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let listener = UnixListener::bind(here.path().join("v_52")).unwrap();
    let mut driver = Driver::new(sockets(&here, CID));
    driver.start(EVENT_IDX);
    (0..16).for_each(|n| driver.offer(TO_GUEST, n, &[Piece::write(AT + 0x1000 * (u64::from(n) + 1), 0x1000)]));
    driver.set_bytes(AT + 0x8_0000, &[0xff; 8]);
    driver.offer(EVENTS, 0, &[Piece::write(AT + 0x8_0000, 8)]);
    send_packet(&mut driver, Operation::Request, &[]);
    assert_eq!(next_operation(&mut driver), Some(Operation::Response));
    let mut program: UnixStream = listener.accept().unwrap().0;
    let saved = driver.save(nothing);

    let mut after = driver.continued(sockets(&there, CID), &saved).unwrap();
    let event = after.wait_used(EVENTS);
    assert_eq!((event.head, event.written, after.bytes(AT + 0x8_0000, 4)), (0, 4, vec![0; 4]), "transport reset");
    // A driver that still believes in the connection learns that it has ended.
    send_packet(&mut after, Operation::Data, b"lost");
    assert_eq!(next_operation(&mut after), Some(Operation::Reset));

    send_packet(&mut driver, Operation::Data, b"still here");
    let mut heard = [0; 10];
    program.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"still here");
    assert_eq!(driver.used_index(EVENTS), 0);
    program.write_all(b"answer").unwrap();
    assert_eq!(next_operation(&mut driver), Some(Operation::Data));
    drop(after);
    let refused = driver.continued(sockets(&there, CID + 1), &saved).err().unwrap().to_string();
    assert!(refused.contains("address is 8, and was 7"), "{refused}");
}

#[test]
fn the_end_of_connections_is_reported_when_the_driver_has_a_buffer() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut driver = Driver::new(sockets(&here, CID));
    driver.start(0);
    let saved = driver.save(nothing);
    let mut other = driver.continued(sockets(&there, CID), &saved).unwrap();
    for n in 0..3 {
        other.offer(EVENTS, n, &[Piece::write(AT + 8 * u64::from(n), 8)]);
    }
    assert_eq!(other.wait_used(EVENTS).head, 0);
    // It is reported once.
    other.offer(TO_GUEST, 0, &[Piece::write(AT + 0x1000, 0x1000)]);
    send_packet(&mut other, Operation::Data, b"?");
    other.wait_used(TO_GUEST);
    assert_eq!(other.used_index(EVENTS), 1);
}

// ---- balloon --------------------------------------------------------------------------------------------------------

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATISTICS: usize = 2;

fn balloon() -> (Box<Balloon>, BalloonHandle) {
    let device = Balloon::new(Bytes::new(RAM_BYTES), Bytes::ZERO).unwrap();
    let handle = device.handle();
    (Box::new(device), handle)
}

fn give(driver: &mut Driver, queue: usize, pages: impl IntoIterator<Item = u32>) {
    let bytes: Vec<u8> = pages.into_iter().flat_map(u32::to_le_bytes).collect();
    driver.set_bytes(AT, &bytes);
    driver.request(queue, &[Piece::read(AT, bytes.len() as u32)]);
}

#[test]
fn a_balloon_has_its_pages_and_the_statistics_buffer_on_the_other_machine() {
    let (device, handle) = balloon();
    let mut driver = Driver::new(device);
    driver.start(1 << feature::MUST_TELL_HOST | 1 << feature::STATS_VQ | 1 << feature::PAGE_REPORTING | EVENT_IDX);
    handle.set_target(mib(1)).unwrap();
    give(&mut driver, INFLATE, (1024..1030).chain(1536..1540));
    // A change of the size asks for statistics. That is served before the first buffer of them: the deflate queue,
    // which is ready later and for the first time, comes after it.
    driver.set_register(virtio_bindings::virtio_mmio::VIRTIO_MMIO_CONFIG + 4, 10);
    give(&mut driver, DEFLATE, [1024]);
    give(&mut driver, INFLATE, [1024]);
    // A buffer comes back when new statistics are wanted; the next one waits.
    driver.offer(STATISTICS, 0, &[Piece::read(AT + 0x1000, 10)]);
    let wait_for_statistics = |count| {
        while handle.report().statistics < count {
            std::thread::yield_now();
        }
    };
    wait_for_statistics(1);
    handle.ask_statistics();
    driver.wait_used(STATISTICS);
    driver.offer(STATISTICS, 1, &[Piece::read(AT + 0x1000, 10)]);
    wait_for_statistics(2);
    let saved = driver.save(nothing);
    let expected = SavedBalloon {
        target_pages: 256,
        actual_pages: 10,
        inflated: vec![(1024, 6), (1536, 4)],
        statistics_held: Some(1),
    };
    assert_eq!(saved.0.device, DeviceState::Balloon(expected));

    let (device, other_handle) = balloon();
    let mut other = driver.continued(device, &saved).unwrap();
    assert_eq!((other_handle.target(), other_handle.actual()), (mib(1), Bytes::new(40960)));
    for (driver, handle) in [(&mut other, &other_handle), (&mut driver, &handle)] {
        assert_eq!(handle.report().pages.inflated_now, 10);
        give(driver, DEFLATE, 1024..1026);
        assert_eq!((handle.report().pages.inflated_now, handle.report().pages.deflated_absent), (8, 0));
        handle.ask_statistics();
        assert_eq!(driver.wait_used(STATISTICS).head, 1);
    }
}

#[test]
fn pages_of_a_balloon_outside_ram_or_out_of_order_harm_nothing() {
    let (device, _) = balloon();
    let mut driver = Driver::new(device);
    driver.start(1 << feature::MUST_TELL_HOST);
    let (saved, ram) = driver.save(nothing);
    let with = |inflated: Vec<(u64, u64)>, target_pages| {
        let device = DeviceState::Balloon(SavedBalloon { inflated, target_pages, ..SavedBalloon::default() });
        let (new, handle) = balloon();
        let continued = driver.continued(new, &(SavedDevice { device, ..saved.clone() }, ram.clone()));
        continued.map(|_driver| handle.report().pages.inflated_now)
    };
    let end = RAM_BYTES / 4096;
    assert_eq!(with(vec![(end - 1, 1 << 40)], 0).unwrap(), 1, "only the part in RAM");
    assert_eq!(with(vec![(end, 1), (end + 5, u64::MAX / 4096 - end - 5)], 0).unwrap(), 0);
    for damaged in [vec![(7, 2), (8, 1)], vec![(9, 1), (7, 1)], vec![(u64::MAX, 1)], vec![(1, u64::MAX)]] {
        assert!(matches!(with(damaged, 0), Err(RestoreDeviceError::Damaged(_))));
    }
    assert!(with(Vec::new(), u32::MAX).is_err(), "a target beyond RAM");
}

// ---- registers ------------------------------------------------------------------------------------------------------

#[test]
fn a_driver_that_is_not_ready_finds_its_registers_as_it_left_them() {
    let mut driver = Driver::new(Box::new(Entropy::default()));
    let new = || Box::new(Entropy::default());
    driver.set_register(VIRTIO_MMIO_STATUS, 1 | 2);
    let saved = driver.save(nothing);
    let mut other = driver.continued(new(), &saved).unwrap();
    assert_eq!(other.register(VIRTIO_MMIO_STATUS), 3);
    // It goes on from there, and resets as it likes.
    other.start(EVENT_IDX);
    assert_eq!(other.request(0, &[Piece::write(AT, 16)]).written, 16);
    other.reset();
    assert_eq!(other.register(VIRTIO_MMIO_STATUS), 0);
}

#[test]
fn a_device_that_waits_for_a_reset_still_does() {
    let mut driver = Driver::new(Box::new(Entropy::default()));
    driver.start(0);
    driver.claim_available(0, 65);
    driver.wait_for_needs_reset();
    let saved = driver.save(nothing);
    let mut other = driver.continued(Box::new(Entropy::default()), &saved).unwrap();
    assert!(other.needs_reset());
    other.reset();
    other.start(0);
    assert_eq!(other.request(0, &[Piece::write(AT, 16)]).written, 16);
}

#[test]
fn impossible_states_are_refused() {
    let mut driver = Driver::new(Box::new(Entropy::default()));
    driver.start(0);
    let (saved, ram) = driver.save(nothing);
    let refused = |change: &dyn Fn(&mut SavedDevice)| {
        let mut changed = saved.clone();
        change(&mut changed);
        driver.continued(Box::new(Entropy::default()), &(changed, ram.clone())).is_err()
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|saved| saved.device = DeviceState::Vsock { cid: 3 }), "another kind");
    assert!(refused(&|saved| saved.features |= 1 << 63), "a feature that is not offered");
    assert!(refused(&|saved| saved.queues.clear()));
    assert!(refused(&|saved| saved.queues.push(saved.queues[0])));
    assert!(refused(&|saved| saved.queues[0].entries_max = 128));
    assert!(refused(&|saved| saved.queues[0].entries = 3));
    assert!(refused(&|saved| saved.queues[0].entries = 128));
    assert!(refused(&|saved| saved.queues[0].descriptors = 7), "not aligned");
    assert!(refused(&|saved| saved.queues[0].used = !0xfff), "outside RAM");
    assert!(refused(&|saved| saved.queues[0].is_ready = false), "a queue that the device needs");
    // A position that the ring contradicts is the driver's error, as if it had written the ring.
    let mut changed = saved.clone();
    changed.queues[0].next_available = 0x8000;
    let mut other = driver.continued(Box::new(Entropy::default()), &(changed, ram.clone())).unwrap();
    other.wait_for_needs_reset();
}
