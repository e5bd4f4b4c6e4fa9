//! Network throughput of a guest: our virtio-net on a tap and that of QEMU's microvm on the same tap (`vhost=off`),
//! with the same driver.
//!
//! ```text
//!   sent       guest ─▶ tap ─▶ the host's stack, without a listener
//!   received   this bench ─ UDP, at most what the tap holds ─▶ tap ─▶ guest, which checks every word
//! ```
//!
//! The tap is in a network namespace of the bench. The machine's interfaces are neither visible nor changed, and the
//! namespace ends with the bench. This needs root and the kernel's taps.
//!
//! `cargo bench -p wideleaf-benches --bench net -- [ROUNDS]`, after `cargo build --release -p wideleaf`

use std::fs;
use std::io::Read as _;
use std::net::UdpSocket;
use std::process::{Child, Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use wideleaf_benches::beside_qemu::{BesideQemu, Figure, Program, compared, in_turns, results};
use wideleaf_benches::scenario::{Arguments, ScenarioError, Waiting, run};
use wideleaf_kernels::test_pattern::{FIRST_GENERATION, word};
use wideleaf_measure::figures::Figures;

const ROUNDS: u32 = 11;
const MEMORY: &str = "128M";
const FRAME_BYTES: usize = 1500;
const CMDLINE: &str = "kernel=net frames=200000 receive=200000 bytes=1500";
const HEADERS_BYTES: usize = 14 + 20 + 8;
const FIGURES: [(&str, &str); 2] = [("sent", "frames/s"), ("received", "frames/s")];
/// Minimum ratio of our speed to QEMU's in each figure.
const PROMISE: f64 = 0.8;

const TAP: &str = "wl-bench";
const MAC: &str = "02:00:00:00:00:07";
const GUEST: &str = "10.77.0.2:7777";
/// Number of frames on their way to the guest: less than the tap's queue holds (1000), more than the card's (256).
const AHEAD: u64 = 512;
/// Number of frames between two reads of the counters.
const BURST: u64 = 64;
/// Time without progress after which frames on their way are lost: no VMM had the tap.
const LOST_AFTER: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    run("net", experiment)
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let rounds = arguments.count(0, ROUNDS)?;
    let beside = BesideQemu::new(MEMORY)?;
    let socket = network()?;
    let rounds = in_turns(rounds, |program| match program {
        Program::Wideleaf => figures(ours(&beside), &socket, waiting),
        Program::Qemu => figures(qemu(&beside), &socket, waiting),
    })?;
    let title = format!("{CMDLINE}; QEMU: tap, vhost=off; medians of {} alternating rounds", rounds.len());
    let mut figures = Figure::all(FIGURES, &rounds);
    figures.extend(figures.clone().into_iter().zip(["sent bytes", "received bytes"]).map(|(figure, name)| {
        let mib =
            |frames: Vec<f64>| frames.iter().map(|frames| frames * FRAME_BYTES as f64 / f64::from(1 << 20)).collect();
        Figure { name, unit: "MiB/s", ours: mib(figure.ours), theirs: mib(figure.theirs) }
    }));
    Ok(compared(title, &figures, PROMISE))
}

/// A network namespace of this process with the tap, and the host's socket in it.
fn network() -> Result<UdpSocket, ScenarioError> {
    let no_tap =
        |why: std::io::Error| ScenarioError::Skipped(format!("no tap: {why}; needs root, iproute2 and /dev/net/tun"));
    fs::metadata("/dev/net/tun").map_err(no_tap)?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| no_tap(errno.into()))?;
    for arguments in [
        format!("tuntap add dev {TAP} mode tap"),
        // The tap sends no frames of its own: IPv6 neighbours and routers are not searched.
        format!("link set {TAP} addrgenmode none"),
        format!("addr add 10.77.0.1/24 dev {TAP}"),
        format!("link set {TAP} up"),
        format!("neigh add 10.77.0.2 lladdr {MAC} dev {TAP} nud permanent"),
    ] {
        let status = Command::new("ip").args(arguments.split(' ')).status().map_err(no_tap)?;
        assert!(status.success(), "ip {arguments}");
    }
    UdpSocket::bind("10.77.0.1:7777").map_err(no_tap)
}

fn ours(beside: &BesideQemu) -> Command {
    let mut command = beside.wideleaf(CMDLINE);
    command.arg("--no-daemon").arg(format!("--net=tap={TAP},mac={MAC}"));
    command
}

fn qemu(beside: &BesideQemu) -> Command {
    let mut command = beside.qemu(CMDLINE);
    command.arg("-netdev").arg(format!("tap,id=net,ifname={TAP},script=no,downscript=no,vhost=off"));
    command.arg("-device").arg(format!("virtio-net-device,netdev=net,mac={MAC}"));
    command
}

/// Figures of one guest. The bench sends it frames until it ends.
fn figures(mut command: Command, socket: &UdpSocket, waiting: &Waiting) -> Result<[f64; 2], ScenarioError> {
    let mut child = command.spawn().expect("the program was found a moment ago");
    let is_over = AtomicBool::new(false);
    let console = std::thread::scope(|scope| {
        scope.spawn(|| send_frames(socket, &is_over));
        let console = console_of(&mut child);
        is_over.store(true, Ordering::Relaxed);
        console
    });
    let _ = child.wait();
    // Ctrl-C also ends the guest.
    waiting.pass(Duration::ZERO)?;
    Ok(results(&console, FIGURES.map(|(name, _)| name)))
}

fn console_of(child: &mut Child) -> String {
    let mut console = Vec::new();
    let read = child.stdout.as_mut().expect("piped").read_to_end(&mut console);
    read.expect("a pipe can be read");
    String::from_utf8_lossy(&console).into_owned()
}

/// Keeps the tap's queue filled, but never overfills it.
fn send_frames(socket: &UdpSocket, is_over: &AtomicBool) {
    let mut frame = vec![0; FRAME_BYTES - HEADERS_BYTES];
    let (mut number, mut on_their_way) = (0, 0);
    let (mut taken, mut moved) = (taken_by_guest(), Instant::now());
    while !is_over.load(Ordering::Relaxed) {
        let now = taken_by_guest();
        if now != taken {
            on_their_way = u64::saturating_sub(on_their_way, now - taken);
            (taken, moved) = (now, Instant::now());
        } else if moved.elapsed() > LOST_AFTER {
            (on_their_way, moved) = (0, Instant::now());
        }
        if on_their_way + BURST > AHEAD {
            std::thread::yield_now();
            continue;
        }
        for _ in 0..BURST {
            for (index, bytes) in frame.chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&word(number * 256 + index as u64, FIRST_GENERATION).to_le_bytes());
            }
            // Without a VMM on the tap the frame is refused or dropped.
            let _ = socket.send_to(&frame, GUEST);
            number += 1;
        }
        on_their_way += BURST;
    }
}

/// Number of frames that left the tap on the guest's side, or were dropped there.
fn taken_by_guest() -> u64 {
    let interfaces = fs::read_to_string("/proc/thread-self/net/dev").expect("/proc is mounted");
    let line = interfaces.lines().find_map(|line| line.trim_start().strip_prefix(TAP)?.strip_prefix(':'));
    let numbers: Vec<u64> = line.expect("the tap exists").split_whitespace().flat_map(str::parse).collect();
    // Eight columns for frames from the guest, then bytes, packets, errors, drops for frames to it.
    numbers[9] + numbers[11]
}
