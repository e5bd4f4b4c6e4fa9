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
use wideleaf_benches::scenario::{Arguments, ScenarioError, run};
use wideleaf_benches::spread_median::SpreadMedian;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::arms_of_round;
use wideleaf_measure::statistics::{Spread, median, ratios_within_rounds};
use wideleaf_measure::table::{Cell, Table};
use wideleaf_testing::tiny_guest::prints_one_byte;

const ROUNDS: u32 = 31;
const MEMORY: &str = "512M";
const CMDLINE: &str = "kernel=gups log2_words=10";
/// Targets: our speed with the small image in comparison with QEMU, and our time with the guest image, which the first
/// release started in 6.0 ms.
const TIMES_QEMU_MIN: f64 = 5.0;
const OURS_MAX_MS: f64 = 1.3 * 6.0;
/// Names of the two images.
const SMALL: &str = "five instructions";
const OURS: &str = "wideleaf's guest image";

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

/// A command to time: its image and program, what starts it, and the arm that it is compared with.
struct Arm<'a> {
    image: &'static str,
    program: String,
    command: Box<dyn Fn() -> Command + 'a>,
    of: Option<usize>,
}

impl<'a> Arm<'a> {
    fn new(image: &'static str, program: &str, of: Option<usize>, command: impl Fn() -> Command + 'a) -> Arm<'a> {
        Arm { image, program: program.into(), command: Box::new(command), of }
    }
}

/// An arm's median time, and its ratio to the arm that it is compared with.
fn row(arm: &Arm<'_>, times: &[Vec<f64>], index: usize) -> [Cell; 5] {
    let ratios = arm.of.map(|of| ratios_within_rounds(&times[index], &times[of]));
    let [ratio, range] = match ratios.and_then(|ratios| Spread::of(&ratios)) {
        None => ["", ""].map(Cell::from),
        Some(Spread { median, lowest, highest }) => [Cell::number(median, 2, ""), Cell::range(lowest, highest, 2, "")],
    };
    let time = Cell::number(median(times[index].clone()), 2, "ms");
    [arm.image.into(), arm.program.as_str().into(), time, ratio, range]
}

/// Targets of the first three arms.
fn bars(times: &[Vec<f64>]) -> [Bar; 2] {
    let ratio = SpreadMedian::of(&ratios_within_rounds(&times[1], &times[0]));
    [
        ratio.bar(&format!("{SMALL}, qemu microvm : wideleaf"), 2, "", Limit::AtLeast(TIMES_QEMU_MIN)),
        SpreadMedian::of(&times[2]).bar(&format!("{OURS}, wideleaf"), 2, "ms", Limit::AtMost(OURS_MAX_MS)),
    ]
}

fn main() -> ExitCode {
    run("boot", |arguments, _| experiment(arguments))
}

fn experiment(arguments: &Arguments) -> Result<Figures, ScenarioError> {
    let rounds = arguments.count(0, ROUNDS)?;
    let other = arguments.text(1).map(Path::new);
    let beside = BesideQemu::new(MEMORY)?;
    let small_image = beside.folder().join("small.elf");
    std::fs::write(&small_image, prints_one_byte()).expect("a file of a temporary folder");
    let (beside, small_image) = (&beside, &small_image);
    let mut arms = vec![
        Arm::new(SMALL, "wideleaf", None, || beside.wideleaf_with(small_image, "")),
        Arm::new(SMALL, "qemu microvm", Some(0), || beside.qemu_with(small_image, "")),
        Arm::new(OURS, "wideleaf", None, || beside.wideleaf(CMDLINE)),
        Arm::new(OURS, "qemu microvm", Some(2), || beside.qemu(CMDLINE)),
    ];
    if let Some(program) = other {
        let name = program.display().to_string();
        arms.push(Arm::new(OURS, &name, Some(2), move || beside.wideleaf_of(program, CMDLINE)));
    }
    let mut times = vec![Vec::new(); arms.len()];
    for round in 1..=rounds {
        for index in arms_of_round(arms.len(), round) {
            times[index].push(first_byte((arms[index].command)()).as_secs_f64() * 1e3);
        }
    }
    let mut table = Table::new(["image", "program"], ["time", ": wideleaf", "range"]);
    for (index, arm) in arms.iter().enumerate() {
        table.row(row(arm, &times, index));
    }
    let title = format!("exec to the guest's first byte, {MEMORY} of RAM, medians of {rounds} alternating rounds");
    Ok(Figures::of(title).table(table).bars(bars(&times)))
}
