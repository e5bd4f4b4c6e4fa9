//! A card on a real tap, in the test's own network namespace: no interface of the machine is seen or changed, and
//! the namespace ends with the thread.

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};

use super::*;

const HOST: [u8; 4] = [10, 77, 0, 1];
const GUEST: [u8; 4] = [10, 77, 0, 2];
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const PORT: u16 = 7777;

/// Runs `test` in its own network namespace, or prints why it cannot; `WIDELEAF_REQUIRE=tap` turns the skip
/// into a failure.
fn in_a_network_of_its_own(test: impl FnOnce() + Send) {
    let why_not = || -> Result<(), String> {
        std::fs::metadata("/dev/net/tun").map_err(|error| format!("/dev/net/tun: {error}"))?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("a network namespace needs root: {error}"))?;
        let ip = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        ip.map(drop).map_err(|error| format!("ip (Debian: iproute2): {error}"))
    };
    // The namespace belongs to a thread, and this thread also runs other tests.
    let run = || match why_not() {
        Ok(()) => test(),
        Err(why) => {
            let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|need| need == "tap"), "a tap is required: {why}");
            eprintln!("skipped, no tap: {why}");
        }
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// A card on the tap `name`, with one long buffer in each of 32 chains.
fn card_on(tap: Tap) -> (Driver, NetHandle) {
    let config = NetConfig { mac: "02:00:00:00:00:07".parse().unwrap(), mtu: tap.mtu() };
    let net = Net::new(Arc::new(tap), config);
    let handle = net.handle();
    let mut driver = Driver::new(Box::new(net));
    let tso = 1 << VIRTIO_NET_F_GUEST_TSO4 | 1 << VIRTIO_NET_F_HOST_TSO4;
    driver.start(MERGEABLE | 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_GUEST_CSUM | tso);
    for n in 0..32 {
        driver.offer(RX, n, &[Piece::write(AT + u64::from(n) * 0x1_0000, 0x1_0000)]);
    }
    (driver, handle)
}

/// Waits for the next frame that `is_it` accepts, with its header. Other frames, which a host sends
/// unasked, are skipped.
fn wait_for(driver: &mut Driver, is_it: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    loop {
        let used = driver.wait_used(RX);
        let frame = driver.bytes(AT + u64::from(used.head) * 0x1_0000, used.written as usize);
        if is_it(&frame[HEADER_BYTES..]) {
            return frame;
        }
    }
}

fn is_arp_for_guest(frame: &[u8]) -> bool {
    frame[12..14] == [8, 6] && frame[20..22] == [0, 1] && frame[38..42] == GUEST
}

fn is_udp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 17
}

/// The ARP answer for the guest's address (RFC 826).
fn arp_answer(question: &[u8]) -> Vec<u8> {
    let asker = &question[6..12];
    let head = [asker, &GUEST_MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]].concat();
    [&head[..], &GUEST_MAC, &GUEST, asker, &HOST].concat()
}

fn checksum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])));
    let sum = words.fold(u64::from(start), |sum, word| sum + u64::from(word));
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

/// A UDP frame of the guest that leaves its checksum to the carrier. The header says where the checksum goes, and
/// its field holds the sum of the addresses.
fn udp_frame(to: &[u8], payload: &[u8]) -> Vec<u8> {
    let udp_bytes = 8 + payload.len() as u16;
    let mut ip =
        [&[0x45, 0][..], &(20 + udp_bytes).to_be_bytes(), &[0, 0, 0x40, 0, 64, 17, 0, 0], &GUEST, &HOST].concat();
    let sum = !checksum(&ip, 0);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let pseudo = checksum(&[&GUEST[..], &HOST, &[0, 17], &udp_bytes.to_be_bytes()].concat(), 0);
    let port = PORT.to_be_bytes();
    let udp = [&port[..], &port, &udp_bytes.to_be_bytes(), &pseudo.to_be_bytes(), payload].concat();
    // NEEDS_CSUM; the checksum covers bytes from 34 on, and goes to offset 6 from there.
    let header = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];
    [&header[..], to, &GUEST_MAC, &[8, 0], &ip, &udp].concat()
}

fn send_frame(driver: &mut Driver, frame: &[u8]) {
    const SENT_AT: u64 = 0x60_0000;
    driver.set_bytes(SENT_AT, frame);
    driver.request(TX, &[Piece::read(SENT_AT, frame.len() as u32)]);
}

#[test]
fn host_and_guest_exchange_frames_over_a_tap_that_ends_with_the_card() {
    in_a_network_of_its_own(|| {
        let tap = Tap::open("wl-test0").unwrap();
        assert!(tap.is_made());
        ip("addr add 10.77.0.1/24 dev wl-test0");
        let (mut driver, handle) = card_on(tap);
        let socket = UdpSocket::bind(("10.77.0.1", PORT)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.send_to(b"to the guest", ("10.77.0.2", PORT)).unwrap();
        let question = wait_for(&mut driver, is_arp_for_guest)[HEADER_BYTES..].to_vec();
        send_frame(&mut driver, &[&[0; HEADER_BYTES][..], &arp_answer(&question)].concat());
        let frame = wait_for(&mut driver, is_udp);
        assert!(frame.ends_with(b"to the guest"));
        assert_eq!((frame[0], frame[10]), (1, 1), "its checksum is left out, it is in one buffer");
        send_frame(&mut driver, &udp_frame(&question[6..12], b"to the host"));
        let mut heard = [0; 64];
        let (bytes, from) = socket.recv_from(&mut heard).unwrap();
        assert_eq!((&heard[..bytes], from.ip().to_string().as_str()), (&b"to the host"[..], "10.77.0.2"));
        // The kernel refuses a header that points beyond its frame.
        let mut wrong = udp_frame(&question[6..12], b"never");
        wrong[6..8].copy_from_slice(&[0xff, 0xff]);
        send_frame(&mut driver, &wrong);
        assert_eq!(handle.counters().malformed, 1);
        drop(driver);
        assert!(nix::net::if_::if_nametoindex("wl-test0").is_err(), "the tap ended with the card");
    });
}

#[test]
fn an_existing_tap_is_opened_and_stays() {
    in_a_network_of_its_own(|| {
        ip("tuntap add dev wl-test1 mode tap");
        ip("link set wl-test1 mtu 9000");
        let tap = Tap::open("wl-test1").unwrap();
        assert_eq!((tap.is_made(), tap.mtu()), (false, 9000));
        assert!(matches!(Tap::open("wl-test1"), Err(TapError::Taken { .. })));
        assert!(matches!(Tap::open("lo"), Err(TapError::NoTap { .. })));
        drop(tap);
        assert!(nix::net::if_::if_nametoindex("wl-test1").is_ok());
    });
}

#[test]
fn a_card_is_down_once_its_tap_is_deleted() {
    in_a_network_of_its_own(|| {
        let (mut driver, _) = card_on(Tap::open("wl-test2").unwrap());
        assert_eq!(driver.config::<2>(6), [1, 0]);
        ip("link delete wl-test2");
        wait_until_down(&mut driver);
        send_frame(&mut driver, &[0; 100]);
        assert!(!driver.needs_reset());
        // The guest boots again.
        driver.reset();
        driver.start(MERGEABLE);
        send_frame(&mut driver, &[0; 100]);
        assert_eq!((driver.needs_reset(), driver.config::<2>(6)), (false, [0, 0]));
    });
}
