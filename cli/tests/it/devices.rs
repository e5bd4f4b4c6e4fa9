//! `--net`, `--vsock` and `--balloon` with a guest that drives them, in the sandbox and in a jail. Every word arrives
//! intact, and no thread makes a system call that its list does not allow. Needs KVM; taps and jails need root.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use crate::program::new_scratch;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::geteuid;
use serde_json::Value;
use wideleaf_kernels::test_pattern::{FIRST_GENERATION, word};
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::{Need, has_kvm, is_there};

/// Options that restrict a run: the defaults, and as much as root can.
const DEFAULT: &[&str] = &[];
const JAILED: &[&str] = &["--jail=jail", "--user=64999:64999"];

/// Time limit of the waits for another process.
const PATIENCE: Duration = Duration::from_secs(60);

fn ways() -> impl Iterator<Item = &'static [&'static str]> {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("skipped: only root can have a jail: run the test as root");
    }
    [DEFAULT, JAILED].into_iter().filter(move |way| is_root || way.is_empty())
}

/// Starts a guest with this kernel and this device.
fn start(scratch: &Scratch, kernel: &str, cmdline: &str, device: &str, way: &[&str]) -> Running {
    if !scratch.path("jail").exists() {
        fs::create_dir(scratch.path("jail")).unwrap();
    }
    let cmdline = format!("--cmdline={cmdline}");
    // An unprivileged user cannot write into the test's folder, so the result is on standard output.
    let of_run = ["run", kernel, "--memory=64M", "--no-daemon", "--format=json", "--timeout=5m"];
    Running::start(scratch, &[&of_run[..], &[cmdline.as_str(), device], way].concat())
}

/// Counters of the device after a run that succeeded and used it.
fn end(mut running: Running) -> Value {
    let mut report = String::new();
    running.0.stdout.take().unwrap().read_to_string(&mut report).unwrap();
    let (code, said) = running.end();
    assert_eq!(code, Some(0), "{said}{report}");
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["verification"]["passed"], Value::Bool(true), "{report}");
    assert!(report["setup"]["sandbox"]["layers"].as_array().is_some_and(|layers| !layers.is_empty()), "{report}");
    let device = &report["devices"][0];
    assert_eq!(device["has_driver"], Value::Bool(true), "{device}");
    device["counters"].clone()
}

// Network card, on a tap in the test's own network namespace. The frames are those
// of the kernel (guest-tests/kernels/src/net.rs).

const FRAMES: u64 = 1000;
const FRAME_BYTES: usize = 600;
const HEADERS_BYTES: usize = 14 + 20 + 8;
const MAC: &str = "02:00:00:00:00:07";

fn payload(frame: u64) -> Vec<u8> {
    let words = (0..(FRAME_BYTES - HEADERS_BYTES) as u64 / 8).map(|index| word(frame * 256 + index, FIRST_GENERATION));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.resize(FRAME_BYTES - HEADERS_BYTES, 0);
    bytes
}

/// Runs `test` in its own network namespace, or prints why it cannot.
fn in_a_network_of_its_own(test: impl FnOnce() + Send) {
    let has_network = || -> Result<(), String> {
        fs::metadata("/dev/net/tun").map_err(|error| format!("/dev/net/tun: {error}"))?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("a network namespace needs root: {error}"))?;
        let ip = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        ip.map(drop).map_err(|error| format!("ip (Debian: iproute2): {error}"))
    };
    // The namespace applies to the thread and to the programs that it starts.
    let run = || {
        if has_kvm() && is_there(Need::Tap, has_network()) {
            test();
        }
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// A persistent tap, and the host's socket on it.
fn tap(name: &str) -> UdpSocket {
    ip(&format!("tuntap add dev {name} mode tap"));
    ip(&format!("addr add 10.77.0.1/24 dev {name}"));
    ip(&format!("link set {name} up"));
    ip(&format!("neigh add 10.77.0.2 lladdr {MAC} dev {name} nud permanent"));
    let socket = UdpSocket::bind("0.0.0.0:7777").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // All frames fit into the buffer, so late reads lose none.
    setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20)).unwrap();
    socket
}

#[test]
fn every_frame_of_a_guest_reaches_the_host_and_every_frame_of_the_host_the_guest() {
    in_a_network_of_its_own(|| {
        let socket = tap("wl-cli0");
        for way in ways() {
            let scratch = new_scratch();
            let cmdline = format!("frames={FRAMES} receive={FRAMES} bytes={FRAME_BYTES}");
            let mut run = start(&scratch, "net", &cmdline, &format!("--net=tap=wl-cli0,mac={MAC}"), way);
            let mut heard = [0; 2048];
            for frame in 0..FRAMES {
                let bytes = socket.recv(&mut heard).unwrap();
                assert_eq!(heard[..bytes], payload(frame)[..], "frame {frame}, {way:?}");
            }
            // Frames that arrive before the guest listens are dropped if the tap is full.
            for frame in 0.. {
                if run.0.try_wait().unwrap().is_some() {
                    break;
                }
                // The send is refused after the run has released the tap.
                let _ = socket.send_to(&payload(frame), "10.77.0.2:7777");
            }
            let counters = end(run);
            assert_eq!(counters["sent_frames"], FRAMES, "{counters}");
            assert!(counters["received_frames"].as_u64().unwrap() >= FRAMES, "{counters}");
            assert_eq!([&counters["malformed"], &counters["broken_queues"]], [0, 0], "{counters}");
        }
    });
}

#[test]
fn deleting_a_tap_ends_neither_the_guest_nor_its_run() {
    in_a_network_of_its_own(|| {
        let socket = tap("wl-cli1");
        let scratch = new_scratch();
        let cmdline = format!("frames=1 receive=1 bytes={FRAME_BYTES}");
        let mut run = start(&scratch, "net", &cmdline, "--net=tap=wl-cli1", DEFAULT);
        socket.recv(&mut [0; 2048]).unwrap();
        ip("link delete wl-cli1");
        let mut lines = BufReader::new(run.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("a network card's link has ended")));
        run.signal(Signal::SIGTERM);
        assert_eq!(lines.collect::<Vec<_>>(), ["wideleaf: interrupted"]);
        assert_eq!(run.0.wait().unwrap().code(), Some(130));
    });
}

#[test]
fn a_tap_that_a_run_creates_ends_with_it() {
    in_a_network_of_its_own(|| {
        let scratch = new_scratch();
        let counters = end(start(&scratch, "net", "frames=300", "--net=tap=wl-cli2", DEFAULT));
        // The kernel refuses frames that come before the link is up.
        let done = ["sent_frames", "refused"].map(|name| counters[name].as_u64().unwrap());
        assert_eq!(done.iter().sum::<u64>(), 300, "{counters}");
        let interfaces = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        assert!(!interfaces.contains("wl-cli2"), "{interfaces}");
    });
}

// Sockets of the host and the guest.

/// More bytes than either side buffers.
const BYTES: usize = 300_000;

/// Connects to the guest's port as soon as the guest listens.
fn connect(scratch: &Scratch, run: &mut Running) -> UnixStream {
    let stream = loop {
        if let Ok(stream) = UnixStream::connect(scratch.path("v.sock")) {
            break stream;
        }
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
        std::thread::yield_now();
    };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    (&stream).write_all(b"CONNECT 1024\n").unwrap();
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') {
        let mut byte = [0];
        (&stream).read_exact(&mut byte).unwrap();
        answer.extend(byte);
    }
    assert!(answer.starts_with(b"OK "), "{}", String::from_utf8_lossy(&answer));
    stream
}

/// Sends bytes and reads them back, while the guest reads as fast as it writes.
fn exchange(stream: &UnixStream) {
    let sent: Vec<u8> = (0..BYTES as u64 / 8).flat_map(|index| word(index, FIRST_GENERATION).to_le_bytes()).collect();
    let mut back = vec![0; sent.len()];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| { &*stream }.write_all(&sent).unwrap());
        { stream }.read_exact(&mut back).unwrap();
        writer.join().unwrap();
    });
    assert!(sent == back, "{} bytes came back, not the same", back.len());
}

#[test]
fn a_guest_returns_the_bytes_that_programs_of_the_host_send_it() {
    if !has_kvm() {
        return;
    }
    for way in ways() {
        let scratch = new_scratch();
        let mut run = start(&scratch, "vsock", "connections=2", "--vsock=cid=3,socket=v.sock", way);
        let stream = connect(&scratch, &mut run);
        exchange(&stream);
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!((&stream).read(&mut [0]).unwrap(), 0, "the guest ends its side too");
        // A client that closes without sending.
        drop(connect(&scratch, &mut run));
        let counters = end(run);
        assert_eq!([&counters["from_host"], &counters["to_host_bytes"]], [2, BYTES as u64], "{way:?}: {counters}");
        assert_eq!([&counters["malformed"], &counters["over_credit"]], [0, 0], "{counters}");
        assert_eq!(scratch.names(), ["jail"], "the socket is removed");
    }
}

#[test]
fn a_guest_that_connects_reaches_a_program_of_the_host_except_from_a_jail() {
    if !has_kvm() {
        return;
    }
    for way in ways() {
        let scratch = new_scratch();
        let listener = UnixListener::bind(scratch.path("v.sock_9000")).unwrap();
        let run = start(&scratch, "vsock", "connect=9000 connections=1", "--vsock=cid=3,socket=v.sock", way);
        if way.is_empty() {
            let (stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            exchange(&stream);
        }
        let counters = end(run);
        let came = u64::from(way.is_empty());
        assert_eq!([&counters["from_guest"], &counters["refused"]], [came, 1 - came], "{way:?}: {counters}");
    }
}

#[test]
fn a_connected_program_does_not_keep_a_run_from_ending() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let mut run = start(&scratch, "vsock", "connections=9", "--vsock=cid=3,socket=v.sock", DEFAULT);
    let stream = connect(&scratch, &mut run);
    exchange(&stream);
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
    assert_eq!((&stream).read(&mut [0]).unwrap_or(0), 0, "its connection ends");
}

#[test]
fn stopping_a_vm_with_sockets_over_its_control_socket_succeeds() {
    if !has_kvm() {
        return;
    }
    for way in ways() {
        let scratch = new_scratch();
        let way = [way, &["--control-socket=vm.sock"]].concat();
        let mut run = start(&scratch, "vsock", "connections=9", "--vsock=cid=3,socket=v.sock", &way);
        let stream = connect(&scratch, &mut run);
        exchange(&stream);
        scratch.wideleaf(&["vm", "vm.sock", "statistics"]).assert().success();
        scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
        let (code, said) = run.end();
        assert_eq!((code, said.as_str()), (Some(0), ""), "{way:?}");
        assert_eq!(scratch.names(), ["jail"], "both sockets are removed");
    }
}

// Balloon of the guest.

#[test]
fn the_host_has_the_balloons_pages_until_the_guest_takes_them_back() {
    if !has_kvm() {
        return;
    }
    for way in ways() {
        let scratch = new_scratch();
        let counters = end(start(&scratch, "balloon", "bytes=16M passes=3", "--balloon", way));
        // Every other window of 16 MiB.
        assert_eq!(counters["pages_inflated_at_most"], 4 * 512, "{way:?}: {counters}");
        assert_eq!([&counters["pages_inflated"], &counters["pages_deflated"]], [3 * 4 * 512; 2], "{counters}");
        assert!(counters["pages_released"].as_u64().unwrap() > 0, "{counters}");
        assert_eq!([&counters["chains_malformed"], &counters["pages_failed"]], [0, 0], "{counters}");
    }
}
