//! Input: use of a socket device by a guest that ignores the rules and by programs of the host that send anything.
//! Afterwards a driver that follows the rules gets its answer, and no queue is broken by it. The sockets lie in a
//! temporary folder.
#![no_main]

mod virtio_driver;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

use libfuzzer_sys::fuzz_target;
use virtio_driver::{BUFFERS_AT, Driver, Input, STEPS_MAX, WRITE, settle};
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::vsock::packet::{HEADER_BYTES, HOST_CID, Header, STREAM};
use wideleaf_vmm::devices::virtio::vsock::{HostSocket, Vsock};

const CID: u32 = 3;
/// Port on which a program waits for the guest.
const PORT: u32 = 1;
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
/// Maximum number of programs at once.
const PROGRAMS_MAX: usize = 8;

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("v");
    let waits = UnixListener::bind(folder.path().join(format!("v_{PORT}"))).expect("a socket");
    waits.set_nonblocking(true).expect("it is one");
    let device = Vsock::new(CID, HostSocket::listen(&path).expect("a socket"));
    let (handle, offered) = (device.handle(), device.features());
    let mut driver = Driver::new(Box::new(device));
    let mut input = Input(bytes);
    driver.start(input.features(offered));
    let mut programs: Vec<UnixStream> = Vec::new();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.0[0] {
            0x80..0xc0 => packet(&mut driver, &mut input),
            0xc0..0xd0 => {
                input.byte();
                let program = UnixStream::connect(&path).expect("it listens");
                program.set_nonblocking(true).expect("it is a socket");
                let _ = (&program).write(format!("CONNECT {}\n", input.byte() % 4).as_bytes());
                programs.push(program);
                settle();
            }
            0xd0..0xf0 => {
                let which = usize::from(input.byte() & 7);
                let said = input.byte();
                if let Some(mut program) = programs.get(which) {
                    let _ = program.read(&mut vec![0; usize::from(said) * 64]);
                    let _ = program.write(input.bytes(usize::from(said)));
                }
                settle();
            }
            0xf0.. => {
                input.byte();
                if !programs.is_empty() {
                    programs.remove(usize::from(input.byte()) % programs.len());
                }
                settle();
            }
            _ => driver.step(&mut input, offered),
        }
        while let Ok((program, _)) = waits.accept() {
            let _ = program.set_nonblocking(true);
            programs.push(program);
        }
        programs.truncate(PROGRAMS_MAX);
    }
    drop(programs);
    // After any input, a driver that follows the rules is served.
    driver.start(0);
    let broken = handle.counters().broken_queues;
    driver.describe(TO_GUEST, 0, (BUFFERS_AT, 4096), WRITE, 0);
    driver.offer(TO_GUEST, 0);
    send(&mut driver, &header(PORT + 1, 9, 1), &[]);
    assert!(driver.is_served(FROM_GUEST) && driver.is_served(TO_GUEST), "a reset is the answer");
    assert_eq!(handle.counters().broken_queues, broken);
});

fn header(host_port: u32, guest_port: u32, operation: u16) -> Header {
    Header {
        from_cid: u64::from(CID),
        to_cid: HOST_CID,
        from_port: guest_port,
        to_port: host_port,
        bytes: 0,
        kind: STREAM,
        operation,
        flags: 0,
        room: 0x1_0000,
        passed: 0,
    }
}

/// A well-formed packet, mostly about a few ports, with a buffer for the answer.
fn packet(driver: &mut Driver, input: &mut Input<'_>) {
    let operation = u16::from(input.byte() & 0xf);
    let ports = input.byte();
    // Ports that the host assigned are high.
    let host = if ports & 4 == 0 { u32::from(ports & 3) } else { (1 << 30) + u32::from(ports & 3) };
    let data = u32::from(input.byte()) << 7;
    let mut header = header(host, u32::from(ports >> 4 & 3), operation);
    (header.flags, header.bytes) = (u32::from(ports >> 6), if operation == 5 { data } else { 0 });
    (header.room, header.passed) = (u32::from(input.word()) << 4, u32::from(input.byte()));
    driver.describe(TO_GUEST, 0, (BUFFERS_AT, 4096), WRITE, 0);
    driver.offer(TO_GUEST, 0);
    send(driver, &header, &vec![7; header.bytes as usize]);
}

fn send(driver: &mut Driver, header: &Header, data: &[u8]) {
    const SENT_AT: u64 = BUFFERS_AT + 0x2_0000;
    driver.put(SENT_AT, &header.to_bytes());
    driver.put(SENT_AT + HEADER_BYTES as u64, data);
    driver.describe(FROM_GUEST, 0, (SENT_AT, (HEADER_BYTES + data.len()) as u32), 0, 0);
    driver.offer(FROM_GUEST, 0);
    driver.notify(FROM_GUEST);
}
