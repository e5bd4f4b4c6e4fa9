//! From exec to the guest's first byte on its serial port, against QEMU's microvm with the same image and the same
//! RAM, neither prefaulted. Not a criterion bench: the two take turns, so that a machine that changes its speed
//! changes it for both, and the median of the pairwise ratios is what counts.
//!
//! `cargo bench -p wideleaf-benches --bench boot`

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wideleaf_benches::ratio::median;

const ROUNDS: usize = 31;
/// QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM and then may not set it on some AMD hosts.
const CPU: &str = "host,arch-capabilities=off";
const MEMORY: &str = "512M";
const CMDLINE: &str = "kernel=gups log2_words=10";

/// Time from spawn to the guest's first byte on standard output; the process is then killed.
fn first_byte(mut command: Command) -> Duration {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let began = Instant::now();
    let mut child = command.spawn().expect("it was found a moment ago");
    let mut byte = [0];
    let pipe = child.stdout.as_mut().expect("piped");
    pipe.read_exact(&mut byte).expect("the guest prints a line before it ends");
    let took = began.elapsed();
    let _ = child.kill();
    let _ = child.wait();
    took
}

fn wideleaf(program: &Path, image: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("run").arg(image).args(["--memory", MEMORY, "--cmdline", CMDLINE, "--policy", "never", "--console"]);
    command
}

fn qemu(image: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-M", "microvm", "-accel", "kvm", "-cpu", CPU, "-m", MEMORY, "-nodefaults", "-no-user-config"])
        .args(["-no-reboot", "-display", "none", "-serial", "stdio"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-append", CMDLINE, "-kernel"])
        .arg(image);
    command
}

fn main() {
    // `cargo test --benches` runs this too; it measures only when asked to.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let skip = |why: &str| println!("boot: skipped: {why}");
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return skip("there is no usable /dev/kvm");
    }
    if Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("qemu-system-x86_64 is not installed");
    }
    let Some(program) = find_wideleaf() else {
        return skip("the wideleaf program is not built: cargo build --release -p wideleaf");
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let image = folder.path().join("guest.elf");
    wideleaf_guest_image::write_to(&image).expect("a file");

    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (a, b) = (first_byte(wideleaf(&program, &image)), first_byte(qemu(&image)));
        ours.push(a.as_secs_f64() * 1e3);
        theirs.push(b.as_secs_f64() * 1e3);
        ratios.push(b.as_secs_f64() / a.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    let (lowest, highest) = (ratios[0], ratios[ROUNDS - 1]);
    let (ours, theirs, ratio) = (median(ours), median(theirs), median(ratios));
    println!("boot: exec to the guest's first byte, {MEMORY} of RAM, medians of {ROUNDS} alternating rounds");
    println!("boot: wideleaf {ours:.2} ms, qemu microvm {theirs:.2} ms, qemu : wideleaf {ratio:.2}");
    println!("boot: ratio from {lowest:.2} to {highest:.2}");
}

/// The release build of the program, beside this bench's own target folder.
fn find_wideleaf() -> Option<std::path::PathBuf> {
    let bench = std::env::current_exe().ok()?;
    let program = bench.parent()?.parent()?.join("wideleaf");
    program.exists().then_some(program)
}
