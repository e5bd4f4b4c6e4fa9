//! A guest at its disk: our VMM's and QEMU's microvm, the same image with the same driver, the same file in the page cache. Not a criterion
//! bench: the two take turns, and the median of the pairwise ratios is what counts.
//!
//! ```text
//!   round   wideleaf run guest.elf --disk FILE  ─▶ MiB/s and requests/s by the guest's clock ─┐
//!           qemu-system-x86_64 … virtio-blk     ─▶ the same                                 ─┴▶ wideleaf : qemu
//! ```
//!
//! `cargo bench -p wideleaf-benches --bench disk -- [ROUNDS]`, after `cargo build --release -p wideleaf`

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use wideleaf_benches::ratio::median;
use wideleaf_protocol::{Message, Status, parse};

const ROUNDS: usize = 11;
/// QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM and then may not set it on some AMD hosts.
const CPU: &str = "host,arch-capabilities=off";
const MEMORY: &str = "256M";
const CMDLINE: &str = "kernel=disk bytes=64M passes=4 requests=20000";
const DISK_BYTES: u64 = 64 << 20;
/// What the kernel says, and how much of QEMU's speed is promised of each.
const FIGURES: [(&str, &str); 4] = [
    ("sequential_write", "MiB/s"),
    ("sequential_read", "MiB/s"),
    ("random_write", "requests/s"),
    ("random_read", "requests/s"),
];
const PROMISE: f64 = 0.8;

/// The figures of a round, ours and QEMU's.
type Round = ([f64; 4], [f64; 4]);

fn wideleaf(program: &Path, image: &Path, disk: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("run").arg(image).args(["--memory", MEMORY, "--cmdline", CMDLINE, "--policy", "never", "--no-daemon"]);
    // The guest's lines come out on standard error.
    command.arg("--console").arg("--disk").arg(disk).stderr(Stdio::piped()).stdout(Stdio::null());
    command
}

fn qemu(image: &Path, disk: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-M", "microvm", "-accel", "kvm", "-cpu", CPU, "-m", MEMORY, "-nodefaults", "-no-user-config"])
        .args(["-no-reboot", "-display", "none", "-serial", "stdio", "-global", "virtio-mmio.force-legacy=false"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-device", "virtio-blk-device,drive=disk", "-drive"])
        .arg(format!("file={},if=none,id=disk,format=raw", disk.display()))
        .args(["-append", CMDLINE, "-kernel"])
        .arg(image)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// The figures of one run, in the order of [`FIGURES`]. Every word has to come back right.
fn figures(mut command: Command) -> [f64; 4] {
    let output = command.stdin(Stdio::null()).output().expect("it was found a moment ago");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let mut figures = [f64::NAN; 4];
    let mut has_passed = false;
    for message in text.lines().filter_map(|line| parse(line)?.ok()) {
        match message {
            Message::Result { name, value, .. } => {
                if let Some(index) = FIGURES.iter().position(|(figure, _)| name == **figure) {
                    figures[index] = value;
                }
            }
            Message::Verify { status, .. } => has_passed = status == Status::Pass,
            _ => {}
        }
    }
    assert!(has_passed && figures.iter().all(|figure| figure.is_finite()), "a guest failed:\n{text}");
    figures
}

fn main() {
    // `cargo test --benches` runs this too; it measures only when asked to.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let skip = |why: &str| println!("disk: skipped: {why}");
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return skip("there is no usable /dev/kvm");
    }
    if Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("qemu-system-x86_64 is not installed");
    }
    let Some(program) = find_wideleaf() else {
        return skip("the wideleaf program is not built: cargo build --release -p wideleaf");
    };
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(ROUNDS);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let image = folder.path().join("guest.elf");
    wideleaf_guest_image::write_to(&image).expect("a file");
    let disk = folder.path().join("disk.img");
    std::fs::write(&disk, vec![0; DISK_BYTES as usize]).expect("a file");

    let runs: Vec<_> =
        (0..rounds).map(|_| (figures(wideleaf(&program, &image, &disk)), figures(qemu(&image, &disk)))).collect();
    println!("disk: {CMDLINE}, medians of {rounds} alternating rounds");
    for (index, (name, unit)) in FIGURES.iter().enumerate() {
        let of = |pick: &dyn Fn(&Round) -> f64| runs.iter().map(pick).collect::<Vec<_>>();
        let (ours, theirs) = (of(&|run| run.0[index]), of(&|run| run.1[index]));
        let ratios = of(&|run| run.0[index] / run.1[index]);
        let (lowest, highest) = ratios.iter().fold((f64::MAX, f64::MIN), |(low, high), r| (low.min(*r), high.max(*r)));
        let ratio = median(ratios);
        let met = if ratio >= PROMISE { "met" } else { "missed" };
        println!(
            "disk: {name}: wideleaf {:.0} {unit}, qemu microvm {:.0} {unit}, wideleaf : qemu {ratio:.2} \
             ({lowest:.2} to {highest:.2}), at least {PROMISE}: {met}",
            median(ours),
            median(theirs)
        );
    }
}

/// The release build of the program, beside this bench's own target folder.
fn find_wideleaf() -> Option<PathBuf> {
    let bench = std::env::current_exe().ok()?;
    let program = bench.parent()?.parent()?.join("wideleaf");
    program.exists().then_some(program)
}
