//! A guest in memory that exchanges data with programs of the host over real sockets.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::connection::ROOM_BYTES;
use super::connections::CONNECTIONS_MAX;
use super::packet::{HEADER_BYTES, HOST_CID, Header, NO_MORE_SENT, NOTHING_MORE, Operation, Ports, STREAM};
use super::*;
use crate::devices::virtio::test_driver::{Driver, Piece, RAM_BYTES};

const CID: u32 = 7;
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
/// Address of the guest's receive buffers: pages from here on, each in the descriptor of its number.
const BUFFERS_AT: u64 = 0x10_0000;
const BUFFER_BYTES: u32 = 4096;
const BUFFERS: u16 = 64;
/// Address of the packets that the guest sends: header and data.
const HEADER_AT: u64 = 0x30_0000;
const DATA_AT: u64 = 0x31_0000;

struct Guest {
    driver: Driver,
    handle: VsockHandle,
    folder: tempfile::TempDir,
    /// Whether the next program finds no descriptor left.
    is_full: Arc<AtomicBool>,
}

fn guest() -> Guest {
    let mut guest = guest_without_buffers();
    guest.offer_buffers();
    guest
}

fn guest_without_buffers() -> Guest {
    let folder = tempfile::tempdir().unwrap();
    let device = Vsock::new(CID, HostSocket::listen(&folder.path().join("v")).unwrap());
    let (handle, is_full) = (device.handle(), Arc::clone(&device.host.is_full));
    let mut driver = Driver::new(Box::new(device));
    driver.start(1 << VIRTIO_VSOCK_F_STREAM);
    Guest { driver, handle, folder, is_full }
}

fn ports(host: u32, guest: u32) -> Ports {
    Ports { host, guest }
}

impl Guest {
    fn path(&self) -> PathBuf {
        self.folder.path().join("v")
    }

    /// Starts a program that waits for the guest at a port.
    fn waits_at(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.folder.path().join(format!("v_{port}"))).unwrap()
    }

    /// Starts a program that sends its line.
    fn program(&self, line: &str) -> UnixStream {
        let mut stream = UnixStream::connect(self.path()).unwrap();
        stream.write_all(line.as_bytes()).unwrap();
        stream
    }

    fn offer_buffers(&mut self) {
        (0..BUFFERS).for_each(|n| self.offer_buffer(n));
    }

    fn offer_buffer(&mut self, n: u16) {
        let at = BUFFERS_AT + u64::from(n) * u64::from(BUFFER_BYTES);
        self.driver.offer(TO_GUEST, n, &[Piece::write(at, BUFFER_BYTES)]);
    }

    fn header(ports: Ports, operation: Operation) -> Header {
        let Ports { host, guest } = ports;
        let to_guest = Header::to_guest(u64::from(CID), ports, operation);
        let (from_cid, to_cid) = (u64::from(CID), HOST_CID);
        Header { from_cid, to_cid, from_port: guest, to_port: host, room: 1 << 20, ..to_guest }
    }

    fn send_packet(&mut self, header: &Header, data: &[u8]) {
        self.driver.set_bytes(HEADER_AT, &header.to_bytes());
        self.driver.set_bytes(DATA_AT, data);
        let pieces = [Piece::read(HEADER_AT, HEADER_BYTES as u32), Piece::read(DATA_AT, data.len() as u32)];
        self.driver.request(FROM_GUEST, &pieces);
    }

    fn send(&mut self, ports: Ports, operation: Operation) {
        self.send_packet(&Self::header(ports, operation), &[]);
    }

    fn send_data(&mut self, ports: Ports, data: &[u8]) {
        let header = Header { bytes: data.len() as u32, ..Self::header(ports, Operation::Data) };
        self.send_packet(&header, data);
    }

    /// Receives the next packet for the guest, and offers its buffer again.
    fn next(&mut self) -> (Header, Vec<u8>) {
        let used = self.driver.wait_used(TO_GUEST);
        let at = BUFFERS_AT + u64::from(used.head) * u64::from(BUFFER_BYTES);
        let bytes = self.driver.bytes(at, used.written as usize);
        let (header, data) = bytes.split_first_chunk().expect("a header at least");
        let header = Header::read(header);
        assert_eq!((header.from_cid, header.to_cid, header.bytes as usize), (HOST_CID, u64::from(CID), data.len()));
        self.offer_buffer(used.head as u16);
        (header, data.to_vec())
    }

    fn next_is(&mut self, operation: Operation) -> (Header, Vec<u8>) {
        let (header, data) = self.next();
        assert_eq!(Operation::from_number(header.operation), Some(operation), "{header:?}");
        (header, data)
    }

    /// Connects the guest to a program that waits at a port.
    fn connected(&mut self, ports: Ports) -> UnixStream {
        let waits = self.waits_at(ports.host);
        self.send(ports, Operation::Request);
        self.next_is(Operation::Response);
        waits.accept().unwrap().0
    }
}

#[test]
fn a_driver_reads_its_address() {
    let mut guest = guest();
    assert_eq!(guest.driver.config::<12>(0), [CID as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.driver.config::<4>(u64::MAX - 0x1000), [0; 4]);
}

#[test]
fn a_program_reaches_a_port_of_the_guest() {
    let mut guest = guest();
    let mut program = guest.program("CONNECT 52\nearly");
    let (request, _) = guest.next_is(Operation::Request);
    assert_eq!((request.to_port, request.kind, request.room), (52, STREAM, ROOM_BYTES as u32));
    let ports = ports(request.from_port, 52);
    guest.send(ports, Operation::Response);
    let said = format!("OK {}\n", ports.host);
    let mut heard = vec![0; said.len()];
    program.read_exact(&mut heard).unwrap();
    assert_eq!(heard, said.as_bytes());
    assert_eq!(guest.next_is(Operation::Data).1, b"early");
    guest.send_data(ports, b"hello");
    let mut heard = [0; 5];
    program.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    program.write_all(b"bye").unwrap();
    drop(program);
    assert_eq!(guest.next_is(Operation::Data).1, b"bye");
    // The device may read the end of the data before it sees that the program reads nothing more either.
    while guest.next_is(Operation::Shutdown).0.flags != NOTHING_MORE {}
    guest.send(ports, Operation::Reset);
    let counters = guest.handle.counters();
    assert_eq!((counters.from_host, counters.to_host_bytes, counters.to_guest_bytes), (1, 5, 8));
}

#[test]
fn the_guest_reaches_a_program_and_its_end_is_confirmed() {
    let mut guest = guest();
    let ports = ports(1234, 99);
    let mut program = guest.connected(ports);
    guest.send_data(ports, b"question");
    program.write_all(b"answer").unwrap();
    assert_eq!(guest.next_is(Operation::Data).1, b"answer");
    let shutdown = Header { flags: NOTHING_MORE, ..Guest::header(ports, Operation::Shutdown) };
    guest.send_packet(&shutdown, &[]);
    guest.next_is(Operation::Reset);
    let mut heard = String::new();
    program.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "question");
    guest.send_data(ports, b"late");
    guest.next_is(Operation::Reset);
}

#[test]
fn each_direction_ends_independently() {
    let mut guest = guest();
    let ports = ports(1234, 99);
    let mut program = guest.connected(ports);
    program.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.next_is(Operation::Shutdown).0.flags, NO_MORE_SENT);
    guest.send_data(ports, b"still");
    let shutdown = Header { flags: NO_MORE_SENT, ..Guest::header(ports, Operation::Shutdown) };
    guest.send_packet(&shutdown, &[]);
    let mut heard = String::new();
    program.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "still");
}

#[test]
fn a_program_that_stops_writing_and_then_closes_ends_one_direction_and_then_the_other() {
    let mut guest = guest();
    let program = guest.connected(ports(1234, 99));
    program.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.next_is(Operation::Shutdown).0.flags, NO_MORE_SENT);
    drop(program);
    assert_eq!(guest.next_is(Operation::Shutdown).0.flags, NOTHING_MORE);
}

#[test]
fn a_packet_of_an_unknown_connection_is_reset_and_a_reset_is_not_answered() {
    let mut guest = guest();
    guest.send(ports(1, 2), Operation::Request);
    let (reset, _) = guest.next_is(Operation::Reset);
    assert_eq!((reset.from_port, reset.to_port), (1, 2));
    guest.send(ports(3, 4), Operation::Reset);
    guest.send_data(ports(5, 6), b"lost");
    assert_eq!(guest.next_is(Operation::Reset).0.from_port, 5);
    let other_kind = Header { kind: 2, ..Guest::header(ports(7, 8), Operation::Request) };
    guest.send_packet(&other_kind, &[]);
    assert_eq!(guest.next_is(Operation::Reset).0.kind, 2);
    assert_eq!(guest.handle.counters().refused, 2);
}

#[test]
fn packets_for_other_addresses_and_malformed_packets_are_dropped() {
    let mut guest = guest();
    let good = Guest::header(ports(1, 2), Operation::Request);
    guest.send_packet(&Header { to_cid: 3, ..good }, &[]);
    guest.send_packet(&Header { from_cid: u64::MAX, ..good }, &[]);
    guest.send_packet(&Header { bytes: 2, ..good }, b"1");
    guest.send_packet(&Header { bytes: u32::MAX, ..good }, b"1");
    guest.driver.request(FROM_GUEST, &[Piece::read(HEADER_AT, HEADER_BYTES as u32 - 1)]);
    guest.driver.request(FROM_GUEST, &[Piece::write(HEADER_AT, 100)]);
    assert_eq!(guest.handle.counters().malformed, 6);
    assert_eq!(guest.driver.used_index(TO_GUEST), 0);
}

#[test]
fn a_guest_gets_no_more_than_it_has_room_for() {
    let mut guest = guest();
    let ports = ports(1234, 99);
    let waits = guest.waits_at(1234);
    let small = |passed, operation| Header { room: 10, passed, ..Guest::header(ports, operation) };
    guest.send_packet(&small(0, Operation::Request), &[]);
    guest.next_is(Operation::Response);
    let mut program = waits.accept().unwrap().0;
    program.write_all(&[1; 25]).unwrap();
    assert_eq!(guest.next_is(Operation::Data).1.len(), 10);
    guest.next_is(Operation::CreditRequest);
    // The guest claims that more has passed than was ever sent.
    guest.send_packet(&small(1000, Operation::CreditUpdate), &[]);
    guest.send_packet(&small(6, Operation::CreditUpdate), &[]);
    assert_eq!(guest.next_is(Operation::Data).1.len(), 6);
    guest.next_is(Operation::CreditRequest);
    guest.send_packet(&small(16, Operation::CreditUpdate), &[]);
    assert_eq!(guest.next_is(Operation::Data).1.len(), 9);
}

#[test]
fn a_guest_that_sends_beyond_its_credit_loses_only_that_connection() {
    let mut guest = guest();
    let (greedy, other) = (ports(1, 1), ports(2, 2));
    let _slow = guest.connected(greedy);
    let mut program = guest.connected(other);
    let data = vec![0; 64 << 10];
    while guest.handle.counters().over_credit == 0 {
        guest.send_data(greedy, &data);
    }
    while guest.next().0.operation != Operation::Reset as u16 {}
    guest.send_data(other, b"alive");
    let mut heard = [0; 5];
    program.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"alive");
}

#[test]
fn a_guest_that_keeps_to_its_credit_gets_everything_through_a_slow_program() {
    const BYTES: usize = 2 << 20;
    let mut guest = guest();
    let ports = ports(1, 1);
    let mut program = guest.connected(ports);
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        program.read_to_end(&mut all).unwrap();
        all
    });
    let data: Vec<u8> = (0..BYTES).map(|n| (n / 7 % 253) as u8).collect();
    let (mut sent, mut passed) = (0, 0);
    while sent < BYTES {
        let bytes = (ROOM_BYTES - (sent - passed)).min(60_000).min(BYTES - sent);
        if bytes == 0 {
            passed = guest.next_is(Operation::CreditUpdate).0.passed as usize;
            continue;
        }
        guest.send_data(ports, &data[sent..sent + bytes]);
        sent += bytes;
    }
    guest.send_packet(&Header { flags: NOTHING_MORE, ..Guest::header(ports, Operation::Shutdown) }, &[]);
    assert!(reader.join().unwrap() == data, "every byte, in order");
}

#[test]
fn data_sent_before_the_guest_closed_the_connection_reaches_a_slow_program() {
    let mut guest = guest();
    let ports = ports(1, 1);
    let waits = guest.waits_at(1);
    guest.send(ports, Operation::Request);
    guest.next_is(Operation::Response);
    let mut program = waits.accept().unwrap().0;
    let mut sent = Vec::new();
    // Until the program's socket is full, and the rest is buffered here.
    while guest.handle.counters().to_host_bytes == sent.len() as u64 {
        let data: Vec<u8> = (0..60_000).map(|n| ((sent.len() + n) / 7 % 253) as u8).collect();
        guest.send_data(ports, &data);
        sent.extend(data);
    }
    guest.send_packet(&Header { flags: NOTHING_MORE, ..Guest::header(ports, Operation::Shutdown) }, &[]);
    guest.send(ports, Operation::Reset);
    // The ports are free again.
    guest.send(ports, Operation::Request);
    while guest.next().0.operation != Operation::Response as u16 {}
    let mut heard = Vec::new();
    program.read_to_end(&mut heard).unwrap();
    assert!(heard == sent, "{} of {} bytes", heard.len(), sent.len());
}

#[test]
fn connections_are_bounded() {
    let mut guest = guest();
    let waits = guest.waits_at(1);
    let mut programs = Vec::new();
    for n in 0..CONNECTIONS_MAX as u32 {
        guest.send(ports(1, n), Operation::Request);
        guest.next_is(Operation::Response);
        programs.push(waits.accept().unwrap());
    }
    guest.send(ports(1, 1 << 20), Operation::Request);
    guest.next_is(Operation::Reset);
    // A connection that has ended, without the guest's confirmation, makes room.
    programs.pop();
    guest.next_is(Operation::Shutdown);
    guest.send(ports(1, 1 << 20), Operation::Request);
    let mut got = [guest.next().0, guest.next().0].map(|header| header.operation);
    got.sort_unstable();
    assert_eq!(got, [Operation::Response as u16, Operation::Reset as u16]);
}

#[test]
fn a_guest_that_takes_no_packets_is_not_served_and_loses_nothing() {
    const PACKETS: u32 = 300;
    let mut guest = guest_without_buffers();
    let header = |n| Guest::header(ports(1, n), Operation::Data).to_bytes();
    // The guest fills the queue again and again, until the device takes no more.
    let mut offered = 0;
    while offered < 256 {
        guest.driver.set_bytes(HEADER_AT, &header(offered));
        guest.driver.request(FROM_GUEST, &[Piece::read(HEADER_AT, HEADER_BYTES as u32)]);
        offered += 1;
    }
    for n in offered..PACKETS {
        let at = HEADER_AT + u64::from(n) * 64;
        guest.driver.set_bytes(at, &header(n));
        guest.driver.offer(FROM_GUEST, (n - offered) as u16, &[Piece::read(at, HEADER_BYTES as u32)]);
    }
    assert_eq!(u32::from(guest.driver.used_index(FROM_GUEST)), offered);
    guest.offer_buffers();
    for n in 0..PACKETS {
        assert_eq!(guest.next_is(Operation::Reset).0.to_port, n);
    }
}

#[test]
fn a_program_with_an_invalid_line_is_disconnected() {
    let mut guest = guest();
    for line in ["HELLO\n", "CONNECT x\n", "CONNECT 99999999999999999999\n", "\n"] {
        assert_eq!(guest.program(line).read(&mut [0; 8]).unwrap_or(0), 0, "{line:?}");
    }
    // A program is also disconnected if the guest refuses its connection.
    let mut program = guest.program("CONNECT 9\n");
    let (request, _) = guest.next_is(Operation::Request);
    guest.send(ports(request.from_port, 9), Operation::Reset);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(guest.handle.counters().refused, 5);
}

#[test]
fn programs_that_find_no_descriptor_left_are_accepted_after_the_next_one_has_connected() {
    let mut guest = guest_without_buffers();
    let end = Instant::now() + Duration::from_secs(60);
    let _programs = [1, 2].map(|port| {
        guest.is_full.store(true, Ordering::Relaxed);
        let program = guest.program(&format!("CONNECT {port}\n"));
        while guest.is_full.load(Ordering::Relaxed) {
            assert!(Instant::now() < end, "the device does not notice program {port}");
            std::thread::yield_now();
        }
        program
    });
    let _last = guest.program("CONNECT 3\n");
    guest.offer_buffers();
    let mut ports = [(); 3].map(|()| guest.next_is(Operation::Request).0.to_port);
    ports.sort_unstable();
    assert_eq!(ports, [1, 2, 3]);
}

#[test]
fn a_reset_ends_all_connections_and_the_next_driver_gets_new_ones() {
    let mut guest = guest();
    let mut program = guest.connected(ports(1, 1));
    guest.driver.reset();
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    guest.driver.start(1 << VIRTIO_VSOCK_F_STREAM);
    guest.offer_buffers();
    let _program = guest.program("CONNECT 5\n");
    guest.next_is(Operation::Request);
    let path = guest.path();
    drop(guest.driver);
    assert!(!path.exists(), "the socket is removed with the device");
}

#[test]
fn a_guest_that_breaks_a_queue_must_reset_and_then_is_served() {
    let breaks: [fn(&mut Driver); 4] = [
        |driver| driver.offer(FROM_GUEST, 0, &[Piece::read(RAM_BYTES - 8, 100)]),
        |driver| driver.claim_available(FROM_GUEST, QUEUE_SIZES[1] + 1),
        |driver| driver.make_available(FROM_GUEST, QUEUE_SIZES[1]),
        |driver| {
            driver.offer(TO_GUEST, 0, &[Piece::write(BUFFERS_AT, HEADER_BYTES as u32)]);
            let data = Guest::header(ports(1, 1), Operation::Data).to_bytes();
            driver.set_bytes(HEADER_AT, &data);
            driver.offer(FROM_GUEST, 0, &[Piece::read(HEADER_AT, HEADER_BYTES as u32)]);
        },
    ];
    for break_it in breaks {
        let mut guest = guest_without_buffers();
        break_it(&mut guest.driver);
        guest.driver.wait_for_needs_reset();
        assert_eq!(guest.handle.counters().broken_queues, 1);
        guest.driver.reset();
        guest.driver.start(0);
        guest.offer_buffers();
        let _program = guest.program("CONNECT 5\n");
        guest.next_is(Operation::Request);
    }
}
