//! A card between a driver in memory and a pair of sockets that keep frames separate, as a tap does.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use event_manager::{EventManager, SubscriberOps as _};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use parking_lot::Mutex;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INTERRUPT_STATUS;

use super::*;
use crate::devices::virtio::test_driver::{Driver, Piece, RAM_BYTES};

mod real_tap;

const RX: usize = 0;
const TX: usize = 1;
const MERGEABLE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
/// Address of the tests' buffers.
const AT: u64 = 0x10_0000;
const HEADER: [u8; HEADER_BYTES] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0xaa, 0xbb];

struct Wire {
    end: OwnedFd,
    offload: Mutex<Option<Offload>>,
    /// Whether it takes no settings any more, like a tap that was deleted.
    is_deleted: AtomicBool,
}

impl Wire {
    fn new(end: OwnedFd) -> Wire {
        Wire { end, offload: Mutex::default(), is_deleted: AtomicBool::default() }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

impl Link for Wire {
    fn set_offload(&self, offload: Offload) -> io::Result<()> {
        if self.is_deleted.load(Ordering::Relaxed) {
            return Err(Errno::EBADFD.into());
        }
        *self.offload.lock() = Some(offload);
        Ok(())
    }
}

/// A card that has not been started, and the far end of its cable.
struct Card {
    driver: Driver,
    wire: Arc<Wire>,
    far: Option<OwnedFd>,
    handle: NetHandle,
}

fn ends() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap()
}

fn config() -> NetConfig {
    NetConfig { mac: "02:00:00:00:00:07".parse().unwrap(), mtu: 1400 }
}

fn card() -> Card {
    let (end, far) = ends();
    let wire = Arc::new(Wire::new(end));
    let net = Net::new(wire.clone(), config());
    let handle = net.handle();
    Card { driver: Driver::new(Box::new(net)), wire, far: Some(far), handle }
}

fn started(features: u64) -> Card {
    let mut card = card();
    card.driver.start(features);
    card
}

impl Card {
    fn far(&self) -> i32 {
        self.far.as_ref().unwrap().as_raw_fd()
    }

    /// Sends a frame with its header to the guest.
    fn arrive(&self, frame: &[u8]) {
        let whole = [&HEADER[..], frame].concat();
        assert_eq!(send(self.far(), &whole, MsgFlags::empty()).unwrap(), whole.len());
    }

    /// Receives the guest's next frame with its header.
    fn leave(&self) -> Vec<u8> {
        let mut frame = vec![0; FRAME_BYTES_MAX + 1];
        loop {
            match recv(self.far(), &mut frame, MsgFlags::empty()) {
                Ok(bytes) => return frame[..bytes].to_vec(),
                Err(Errno::EAGAIN) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits until a counter has the expected value.
    fn wait_until(&self, is_so: impl Fn(NetCounters) -> bool) {
        while !is_so(self.handle.counters()) {
            std::thread::yield_now();
        }
    }

    /// Receives a frame in one buffer, with its header.
    fn received(&mut self, address: u64) -> Vec<u8> {
        let used = self.driver.wait_used(RX);
        self.driver.bytes(address, used.written as usize)
    }
}

/// Waits until the status in the card's configuration says that its link is down.
fn wait_until_down(driver: &mut Driver) {
    while driver.config::<2>(6) != [0, 0] {
        std::thread::yield_now();
    }
}

/// The header before a frame that fills this number of buffers.
fn header(buffers: u8) -> [u8; HEADER_BYTES] {
    let mut header = HEADER;
    header[10..].copy_from_slice(&[buffers, 0]);
    header
}

fn frame(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n % 251) as u8).collect()
}

#[test]
fn a_driver_reads_address_link_and_mtu() {
    let mut card = card();
    let config: [u8; 16] = card.driver.config(0);
    assert_eq!(config, [2, 0, 0, 0, 0, 7, 1, 0, 1, 0, 0x78, 5, 0, 0, 0, 0]);
    assert_eq!(card.driver.config::<4>(10), [0x78, 5, 0, 0]);
    assert_eq!(card.driver.config::<4>(u64::from(u32::MAX)), [0; 4]);
}

#[test]
fn the_link_learns_the_offloads_that_the_guest_accepts() {
    let card = started(1 << VIRTIO_NET_F_GUEST_CSUM | 1 << VIRTIO_NET_F_GUEST_TSO6);
    assert_eq!(*card.wire.offload.lock(), Some(Offload { checksum: true, tcp4: false, tcp6: true }));
}

#[test]
fn a_frame_of_the_guest_leaves_whole_from_any_number_of_buffers() {
    let mut card = started(0);
    let whole = [&HEADER[..], &frame(100)].concat();
    card.driver.set_bytes(AT, &whole[..5]);
    card.driver.set_bytes(AT + 0x1000, &whole[5..20]);
    card.driver.set_bytes(AT + 0x2ffe, &whole[20..]);
    let pieces = [Piece::read(AT, 5), Piece::read(AT + 0x1000, 15), Piece::read(AT, 0), Piece::read(AT + 0x2ffe, 92)];
    card.driver.request(TX, &pieces);
    assert_eq!(card.leave(), whole);
    let counters = card.handle.counters();
    assert_eq!((counters.sent_frames, counters.sent_bytes), (1, 100));
}

#[test]
fn a_frame_for_the_guest_lies_behind_its_header() {
    let mut card = started(0);
    card.driver.offer(RX, 0, &[Piece::write(AT, 11), Piece::write(AT + 0x1000, 2000)]);
    card.arrive(&frame(60));
    let used = card.driver.wait_used(RX);
    assert_eq!((used.head, used.written), (0, 72));
    let got = [card.driver.bytes(AT, 11), card.driver.bytes(AT + 0x1000, 61)].concat();
    assert_eq!(got, [&header(1)[..], &frame(60)].concat());
    assert_ne!(card.driver.register(VIRTIO_MMIO_INTERRUPT_STATUS) & 1, 0);
    let log = card.driver.memory.memory().take_device_log(card.driver.memory.memory().ram().ranges()[0].gpa);
    assert_eq!(log[4] & 0b11, 0b11, "both pages were written, and the log has it");
}

#[test]
fn a_long_frame_takes_several_buffers_and_leaves_the_rest() {
    let mut card = started(MERGEABLE);
    for n in 0..5 {
        card.driver.offer(RX, n, &[Piece::write(AT + u64::from(n) * 0x1000, 64)]);
    }
    card.arrive(&frame(130));
    card.arrive(&frame(20));
    let used: Vec<_> = (0..4).map(|_| card.driver.wait_used(RX)).map(|used| (used.head, used.written)).collect();
    assert_eq!(used, [(0, 64), (1, 64), (2, 14), (3, 32)]);
    let long = [card.driver.bytes(AT, 64), card.driver.bytes(AT + 0x1000, 64), card.driver.bytes(AT + 0x2000, 14)];
    assert_eq!(long.concat(), [&header(3)[..], &frame(130)].concat());
    assert_eq!(card.driver.bytes(AT + 0x3000, 32), [&header(1)[..], &frame(20)].concat());
    assert_eq!(card.driver.used_index(RX), 4, "the fifth was given back to the queue");
}

#[test]
fn frames_wait_in_the_link_until_there_are_buffers() {
    for features in [0, MERGEABLE, MERGEABLE | 1 << VIRTIO_RING_F_EVENT_IDX] {
        let mut card = started(features);
        (1..=3).for_each(|n| card.arrive(&frame(n * 10)));
        card.wait_until(|counters| counters.waits_for_buffers > 0);
        for n in 1..=3 {
            card.driver.offer(RX, 0, &[Piece::write(AT, 2000)]);
            assert_eq!(card.received(AT), [&header(1)[..], &frame(n * 10)].concat());
        }
        assert_eq!(card.handle.counters().received_frames, 3);
    }
}

#[test]
fn a_frame_that_exceeds_the_present_buffers_waits_for_more() {
    let mut card = started(MERGEABLE);
    card.driver.offer(RX, 0, &[Piece::write(AT, 50)]);
    card.arrive(&frame(100));
    card.wait_until(|counters| counters.waits_for_buffers > 0);
    assert_eq!(card.driver.used_index(RX), 0);
    card.driver.offer(RX, 1, &[Piece::write(AT + 50, 20)]);
    card.driver.offer(RX, 2, &[Piece::write(AT + 70, 50)]);
    let used: Vec<_> = (0..3).map(|_| card.driver.wait_used(RX).written).collect();
    assert_eq!(used, [50, 20, 42]);
    assert_eq!(card.driver.bytes(AT, 112), [&header(3)[..], &frame(100)].concat());
}

#[test]
fn a_frame_too_long_for_a_driver_is_dropped_and_the_next_arrives() {
    let mut card = started(0);
    card.driver.offer(RX, 0, &[Piece::write(AT, 50)]);
    card.arrive(&frame(100));
    card.arrive(&frame(10));
    assert_eq!(card.received(AT), [&header(1)[..], &frame(10)].concat());
    assert_eq!(card.handle.counters().too_long, 1);
}

#[test]
fn a_frame_too_long_for_the_whole_queue_is_dropped() {
    let mut card = started(MERGEABLE);
    for n in 0..QUEUE_SIZES[RX] {
        card.driver.offer(RX, n, &[Piece::write(AT, 13)]);
    }
    card.arrive(&frame(4000));
    card.arrive(&frame(1));
    assert_eq!(card.received(AT), [&header(1)[..], &frame(1)].concat());
    assert_eq!(card.handle.counters().too_long, 1);
}

#[test]
fn frames_wait_in_the_queue_until_the_link_has_room() {
    for features in [0, 1 << VIRTIO_RING_F_EVENT_IDX] {
        let mut card = started(features);
        // 256 frames of 4 KiB: more than a socket has room for (net.core.wmem_default is 208 KiB).
        for n in 0..256_u16 {
            let at = AT + u64::from(n) * 0x1000;
            card.driver.set_bytes(at, &[&HEADER[..], &n.to_le_bytes()].concat());
            card.driver.offer(TX, n, &[Piece::read(at, 4096)]);
        }
        card.wait_until(|counters| counters.waits_for_link > 0);
        for n in 0..256_u16 {
            assert_eq!(card.leave()[HEADER_BYTES..][..2], n.to_le_bytes());
        }
        card.wait_until(|counters| counters.sent_frames == 256);
    }
}

#[test]
fn invalid_frames_are_counted_and_the_next_valid_one_leaves() {
    let mut card = started(0);
    card.driver.request(TX, &[Piece::read(AT, 0)]);
    card.driver.request(TX, &[Piece::read(AT, HEADER_BYTES as u32)]);
    card.driver.request(TX, &[Piece::read(AT, 0x2_0000)]);
    card.driver.request(TX, &[Piece::write(AT, 100)]);
    // A loop that repeats the queue's descriptors forever.
    card.driver.set_descriptor(TX, 0, (AT, 1000), 1, 1);
    card.driver.set_descriptor(TX, 1, (AT, 1000), 1, 0);
    card.driver.make_available(TX, 0);
    card.driver.wait_used(TX);
    assert_eq!(card.handle.counters().malformed, 5);
    card.driver.request(TX, &[Piece::read(AT, 100)]);
    assert_eq!(card.leave().len(), 100);
}

#[test]
fn a_driver_that_breaks_a_queue_must_reset_and_then_is_served() {
    let breaks: [fn(&mut Driver); 7] = [
        |driver| driver.offer(TX, 0, &[Piece::read(RAM_BYTES - 8, 100)]),
        |driver| driver.offer(TX, 0, &[Piece::read(u64::MAX - 8, 100)]),
        |driver| driver.make_available(TX, QUEUE_SIZES[TX]),
        |driver| driver.claim_available(TX, QUEUE_SIZES[TX] + 1),
        |driver| driver.claim_available(RX, QUEUE_SIZES[RX] + 1),
        |driver| driver.offer(RX, 0, &[Piece::write(AT, HEADER_BYTES as u32 - 1)]),
        |driver| driver.offer(RX, 0, &[Piece::write(RAM_BYTES, 2000)]),
    ];
    for (n, break_it) in breaks.into_iter().enumerate() {
        let mut card = started(0);
        break_it(&mut card.driver);
        card.driver.wait_for_needs_reset();
        assert_eq!(card.handle.counters().broken_queues, 1, "{n}");
        card.driver.reset();
        card.driver.start(0);
        card.driver.request(TX, &[Piece::read(AT, 100)]);
        assert_eq!(card.leave().len(), 100);
    }
}

#[test]
fn an_indirect_table_that_never_ends_is_bounded() {
    let mut card = started(1 << VIRTIO_RING_F_INDIRECT_DESC);
    // A table of 2048 empty descriptors, each naming the next.
    const TABLE: u64 = AT + 0x10_0000;
    for n in 0..2048_u16 {
        let descriptor =
            [&AT.to_le_bytes()[..], &[0; 4], &1_u16.to_le_bytes(), &((n + 1) % 2048).to_le_bytes()].concat();
        card.driver.set_bytes(TABLE + 16 * u64::from(n), &descriptor);
    }
    card.driver.set_descriptor(TX, 0, (TABLE, 16 * 2048), 4, 0);
    card.driver.make_available(TX, 0);
    card.driver.wait_for_needs_reset();
}

/// Keeps the activation of a card, for a test that serves it step by step.
struct KeptActivation(Net, Arc<Mutex<Option<Activation>>>);

impl VirtioDevice for KeptActivation {
    fn kind(&self) -> DeviceKind {
        self.0.kind()
    }
    fn features(&self) -> u64 {
        self.0.features()
    }
    fn queue_sizes(&self) -> &[u16] {
        self.0.queue_sizes()
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.0.read_config(offset, data);
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        *self.1.lock() = Some(activation);
        Ok(())
    }
    fn reset(&mut self) {}
    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        self.0.rest(until)
    }
    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError> {
        self.0.restore(state)
    }
}

#[test]
fn a_flood_in_both_directions_is_served_in_turns() {
    const FRAMES: u16 = 200;
    let (end, far) = ends();
    let net = || Net::new(Arc::new(Wire::new(end.try_clone().unwrap())), config());
    let kept = Arc::default();
    let mut driver = Driver::new(Box::new(KeptActivation(net(), Arc::clone(&kept))));
    driver.start(0);
    let served = net();
    let worker = served.worker(kept.lock().take().unwrap()).unwrap();
    let mut thread = EventManager::<Worker>::new().unwrap();
    thread.add_subscriber(worker);
    for n in 0..FRAMES {
        driver.offer(RX, n, &[Piece::write(AT, 100)]);
        driver.offer(TX, n, &[Piece::read(AT, 100)]);
        send(far.as_raw_fd(), &[1; 80], MsgFlags::empty()).unwrap();
    }
    let mut before = 0;
    while before < 2 * u64::from(FRAMES) {
        thread.run_with_timeout(0).unwrap();
        let NetCounters { received_frames, sent_frames, .. } = served.handle().counters();
        // One turn of each queue for each of the two events that it may have at once.
        let now = received_frames + sent_frames;
        assert!(now > before && now - before <= 3 * 64, "{before} to {now} frames in one turn");
        before = now;
    }
}

#[test]
fn nothing_is_served_after_a_reset() {
    let mut card = started(0);
    card.driver.offer(RX, 0, &[Piece::write(AT, 2000)]);
    card.driver.reset();
    card.arrive(&frame(10));
    assert_eq!(card.handle.counters().received_frames, 0);
    card.driver.start(0);
    card.driver.offer(RX, 0, &[Piece::write(AT, 2000)]);
    assert_eq!(card.received(AT), [&header(1)[..], &frame(10)].concat());
}

#[test]
fn a_link_that_ends_is_down() {
    let mut card = started(0);
    drop(card.far.take());
    wait_until_down(&mut card.driver);
    while card.driver.register(VIRTIO_MMIO_INTERRUPT_STATUS) & 2 == 0 {
        std::thread::yield_now();
    }
    assert!(!card.driver.needs_reset());
}

#[test]
fn a_card_with_a_deleted_link_serves_its_next_driver_and_is_down() {
    let mut card = started(0);
    drop(card.far.take());
    wait_until_down(&mut card.driver);
    card.wire.is_deleted.store(true, Ordering::Relaxed);
    card.driver.reset();
    card.driver.start(0);
    card.driver.request(TX, &[Piece::read(AT, 100)]);
    assert_eq!(card.handle.counters().refused, 1);
    assert_eq!((card.driver.needs_reset(), card.driver.config::<2>(6)), (false, [0, 0]));
}

#[test]
fn a_link_that_was_deleted_before_the_driver_came_is_down() {
    let mut card = card();
    card.wire.is_deleted.store(true, Ordering::Relaxed);
    card.driver.start(0);
    assert_eq!((card.driver.needs_reset(), card.driver.config::<2>(6)), (false, [0, 0]));
    assert_ne!(card.driver.register(VIRTIO_MMIO_INTERRUPT_STATUS) & 2, 0);
}
