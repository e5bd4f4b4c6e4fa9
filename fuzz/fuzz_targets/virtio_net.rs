//! Input: use of a network card by a driver that ignores the rules, and frames of any length from its link. Afterwards
//! a driver that follows the rules sends one frame, which arrives whole. The link is a pair of sockets in this process.
#![no_main]

mod virtio_driver;

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use virtio_driver::{BUFFERS_AT, Driver, Input, STEPS_MAX, settle};
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::net::{Link, Mac, Net, NetConfig, Offload};

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

const TX: usize = 1;

fuzz_target!(|bytes: &[u8]| {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let (end, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("a pair of sockets");
    let net = Net::new(Arc::new(Wire(end)), NetConfig { mac: Mac::of("fuzz", "net"), mtu: 1500 });
    let (handle, offered) = (net.handle(), net.features());
    let mut driver = Driver::new(Box::new(net));
    let mut input = Input(bytes);
    driver.start(input.features(offered));
    let mut frame = vec![0; 0x2_0000];
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        if input.0[0] >= 0xe0 {
            let bytes = usize::from(input.byte() & 0x1f) << (input.byte() % 12);
            let _ = send(far.as_raw_fd(), &frame[..bytes.clamp(1, frame.len())], MsgFlags::MSG_NOSIGNAL);
            settle();
        } else {
            driver.step(&mut input, offered);
        }
        while recv(far.as_raw_fd(), &mut frame, MsgFlags::empty()).is_ok() {}
    }
    // After any input, a driver that follows the rules is served.
    driver.start(0);
    while recv(far.as_raw_fd(), &mut frame, MsgFlags::empty()).is_ok() {}
    let before = handle.counters();
    driver.put(BUFFERS_AT, &[0; 100]);
    driver.describe(TX, 0, (BUFFERS_AT, 100), 0, 0);
    driver.offer(TX, 0);
    driver.notify(TX);
    assert!(driver.is_served(TX));
    let after = handle.counters();
    assert_eq!((after.sent_frames, after.broken_queues), (before.sent_frames + 1, before.broken_queues));
    assert_eq!(recv(far.as_raw_fd(), &mut frame, MsgFlags::empty()), Ok(100));
});
