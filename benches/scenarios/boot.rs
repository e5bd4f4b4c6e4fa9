//! Time from exec to the guest's first byte on its serial port, compared with QEMU's microvm with the same image and
//! the same RAM, neither prefaulted. This is not a criterion bench: the programs take turns, so that changes of the
//! machine's speed affect all, and the result is the median of the pairwise ratios.
//!
//! There are two images: one of five instructions, which shows the time of the VMMs themselves, and wideleaf's guest
//! image. QEMU starts the second image in ring 0, wideleaf in ring 3. If this host's KVM emulates ring 0, most of
//! QEMU's time with it is that emulation, which is not a property of QEMU.
//!
//! `cargo bench -p wideleaf-benches --bench boot -- [ROUNDS [PROGRAM]]`, after `cargo build --release -p wideleaf`.
//! PROGRAM is another build of wideleaf, for instance of an earlier revision, which takes turns with the other two.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use wideleaf_benches::beside_qemu::BesideQemu;
use wideleaf_benches::experiment::{Arguments, Ended, run};
use wideleaf_guest_tests::tiny_guest::prints_one_byte;
use wideleaf_measure::statistics::median;

const ROUNDS: usize = 31;
const MEMORY: &str = "512M";
const CMDLINE: &str = "kernel=gups log2_words=10";

/// Time from spawn to the guest's first byte on standard output; the process is then killed.
fn first_byte(mut command: Command) -> Duration {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let began = Instant::now();
    let mut child = command.spawn().expect("the program was found a moment ago");
    let mut byte = [0];
    let pipe = child.stdout.as_mut().expect("piped");
    pipe.read_exact(&mut byte).expect("the guest prints a line before it ends");
    let took = began.elapsed();
    let _ = child.kill();
    let _ = child.wait();
    took
}

/// Times in milliseconds, round by round.
#[derive(Default)]
struct Arm(Vec<f64>);

impl Arm {
    fn time(&mut self, command: Command) {
        self.0.push(first_byte(command).as_secs_f64() * 1e3);
    }

    /// Prints the comparison with the first arm, `ours`.
    fn print(&self, name: &str, ours: &Arm) {
        let mut ratios: Vec<_> = self.0.iter().zip(&ours.0).map(|(theirs, ours)| theirs / ours).collect();
        ratios.sort_by(f64::total_cmp);
        let (lowest, highest) = (ratios[0], ratios[ratios.len() - 1]);
        let (theirs, ratio) = (median(self.0.clone()), median(ratios));
        println!("boot: {name} {theirs:.2} ms, {name} : wideleaf {ratio:.2} ({lowest:.2} to {highest:.2})");
    }
}

fn main() -> ExitCode {
    run("boot", |arguments, _| experiment(arguments))
}

fn experiment(arguments: &Arguments) -> Result<(), Ended> {
    let rounds: usize = arguments.number(0, ROUNDS)?;
    let other = arguments.text(1).map(Path::new);
    let beside = BesideQemu::new(MEMORY)?;
    let small_image = beside.folder().join("small.elf");
    std::fs::write(&small_image, prints_one_byte()).expect("a file of a temporary folder");
    let (mut ours, mut theirs, mut others) = (Arm::default(), Arm::default(), Arm::default());
    let (mut ours_small, mut theirs_small) = (Arm::default(), Arm::default());
    for _ in 0..rounds {
        ours_small.time(beside.wideleaf_with(&small_image, ""));
        theirs_small.time(beside.qemu_with(&small_image, ""));
        ours.time(beside.wideleaf(CMDLINE));
        if let Some(program) = other {
            others.time(beside.wideleaf_of(program, CMDLINE));
        }
        theirs.time(beside.qemu(CMDLINE));
    }
    println!("boot: exec to the guest's first byte, {MEMORY} of RAM, medians of {rounds} alternating rounds");
    println!("boot: image of five instructions: wideleaf {:.2} ms", median(ours_small.0.clone()));
    theirs_small.print("qemu microvm", &ours_small);
    println!("boot: wideleaf's guest image: wideleaf {:.2} ms", median(ours.0.clone()));
    theirs.print("qemu microvm", &ours);
    if let Some(program) = other {
        others.print(&program.display().to_string(), &ours);
    }
    Ok(())
}
