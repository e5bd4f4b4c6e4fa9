//! Our VMM and QEMU's microvm with the same image, command line and RAM, in turns, so that changes of the
//! machine's speed affect both.
//!
//! ```text
//!   round   wideleaf run guest.elf …      ─▶ results by the guest's clock ─┐
//!           qemu-system-x86_64 -M microvm ─▶ the same                     ─┴▶ wideleaf : qemu per round, their median
//! ```

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use wideleaf_protocol::{Message, Status, parse};

use crate::scenario::{ScenarioError, needs_kvm};
use crate::spread_median::SpreadMedian;
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::order::round;
use wideleaf_measure::statistics::{Spread, median, ratios_within_rounds};
use wideleaf_measure::table::{Cell, Table};

/// CPU model for QEMU. QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM, and on some AMD hosts it then may not set it.
const CPU: &str = "host,arch-capabilities=off";
const QEMU: &str = "qemu-system-x86_64";

/// Both programs and the guest image.
#[derive(Debug)]
pub struct BesideQemu {
    program: PathBuf,
    folder: TempDir,
    memory: &'static str,
}

impl BesideQemu {
    /// The programs for guests with `memory` of RAM.
    ///
    /// # Errors
    /// [`ScenarioError::Skipped`] if KVM or one of the programs is missing.
    ///
    /// # Panics
    /// If the image cannot be written.
    pub fn new(memory: &'static str) -> Result<BesideQemu, ScenarioError> {
        needs_kvm()?;
        if Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_err() {
            return Err(ScenarioError::Skipped(format!("{QEMU} is not installed")));
        }
        let beside = BesideQemu {
            program: program("wideleaf", "wideleaf")?,
            folder: tempfile::tempdir().expect("a temporary folder"),
            memory,
        };
        wideleaf_guest_image::write_to(&beside.image()).expect("a file");
        Ok(beside)
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("guest.elf")
    }

    /// Folder for files of the bench.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Command for our guest with the image; its console is standard output.
    pub fn wideleaf(&self, cmdline: &str) -> Command {
        self.wideleaf_of(&self.program, cmdline)
    }

    /// Command for our guest with another build of our program.
    pub fn wideleaf_of(&self, program: &Path, cmdline: &str) -> Command {
        self.wideleaf_boots(program, &self.image(), cmdline)
    }

    /// Command for our guest with another image.
    pub fn wideleaf_with(&self, image: &Path, cmdline: &str) -> Command {
        self.wideleaf_boots(&self.program, image, cmdline)
    }

    fn wideleaf_boots(&self, program: &Path, image: &Path, cmdline: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("run").arg(image).args(["--memory", self.memory, "--cmdline", cmdline]);
        command.args(["--policy", "never", "--console"]);
        quiet(command)
    }

    /// Command for QEMU's microvm with the image, with virtio devices of version 1.
    pub fn qemu(&self, cmdline: &str) -> Command {
        self.qemu_with(&self.image(), cmdline)
    }

    /// Command for QEMU's microvm with another image.
    pub fn qemu_with(&self, image: &Path, cmdline: &str) -> Command {
        let mut command = Command::new(QEMU);
        command
            .args(["-M", "microvm", "-accel", "kvm", "-cpu", CPU, "-m", self.memory, "-nodefaults", "-no-user-config"])
            .args(["-no-reboot", "-display", "none", "-serial", "stdio"])
            .args(["-global", "virtio-mmio.force-legacy=false"])
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-append", cmdline, "-kernel"])
            .arg(image);
        quiet(command)
    }
}

fn quiet(mut command: Command) -> Command {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// Path of the release build of one of our programs, in the bench's own target folder; `package` is the one it is of.
///
/// # Errors
/// [`ScenarioError::Skipped`] if there is no such file.
pub fn program(name: &str, package: &str) -> Result<PathBuf, ScenarioError> {
    let bench = std::env::current_exe().ok();
    let program = bench.and_then(|bench| Some(bench.parent()?.parent()?.join(name))).filter(|path| path.exists());
    program
        .ok_or_else(|| ScenarioError::Skipped(format!("{name} is not built; run cargo build --release -p {package}")))
}

/// Values of the named results in a guest's output. The guest must have verified its result.
///
/// # Panics
/// If the verification is missing or failed, or a result is missing; the message has all of the output.
pub fn results<const N: usize>(console: &str, names: [&str; N]) -> [f64; N] {
    let mut results = [f64::NAN; N];
    let mut has_passed = false;
    for message in console.lines().filter_map(|line| parse(line)?.ok()) {
        match message {
            Message::Result { name, value, .. } => {
                if let Some(index) = names.iter().position(|wanted| name == **wanted) {
                    results[index] = value;
                }
            }
            Message::Verify { status, .. } => has_passed = status == Status::Pass,
            _ => {}
        }
    }
    assert!(has_passed && results.iter().all(|result| result.is_finite()), "a guest failed:\n{console}");
    results
}

/// A program of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Our own VMM.
    Wideleaf,
    /// QEMU with its microvm.
    Qemu,
}

/// Results of both programs in each round, ours first. The program that runs first changes from round to round.
///
/// # Errors
/// The first error of a run.
///
/// # Panics
/// Never: a round has two results.
pub fn in_turns<const N: usize>(
    rounds: u32,
    mut run: impl FnMut(Program) -> Result<[f64; N], ScenarioError>,
) -> Result<Vec<[[f64; N]; 2]>, ScenarioError> {
    let programs = [Program::Wideleaf, Program::Qemu];
    let mut one = |number| {
        let results = round(programs.len(), number, |index| run(programs[index]))?;
        Ok(results.try_into().expect("two programs"))
    };
    (1..=rounds).map(&mut one).collect()
}

/// A result of both programs, round by round; more is better.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Name of the figure.
    pub name: &'static str,
    /// Unit of the figure.
    pub unit: &'static str,
    /// Our values, by round.
    pub ours: Vec<f64>,
    /// QEMU's values, by round.
    pub theirs: Vec<f64>,
}

impl Figure {
    /// Figures from rounds; each round has our results and QEMU's in the order of `names`.
    pub fn all<const N: usize>(names: [(&'static str, &'static str); N], rounds: &[[[f64; N]; 2]]) -> Vec<Figure> {
        let of = |program: usize, index: usize| rounds.iter().map(|round| round[program][index]).collect();
        let figure = |(index, (name, unit))| Figure { name, unit, ours: of(0, index), theirs: of(1, index) };
        names.into_iter().enumerate().map(figure).collect()
    }
}

/// A table with a row for each figure that has rounds, and a bar for its median ratio.
pub fn compared(title: String, figures: &[Figure], promise: f64) -> Figures {
    let mut table = Table::new(["figure"], ["wideleaf", "qemu", "wideleaf : qemu", "range"]);
    let mut bars = Vec::new();
    for Figure { name, unit, ours, theirs } in figures {
        let ratios = ratios_within_rounds(ours, theirs);
        let Some(Spread { median: ratio, lowest, highest }) = Spread::of(&ratios) else { continue };
        table.row([
            (*name).into(),
            Cell::number(median(ours.clone()), 0, unit),
            Cell::number(median(theirs.clone()), 0, unit),
            Cell::number(ratio, 2, ""),
            Cell::range(lowest, highest, 2, ""),
        ]);
        let what = format!("{name}, wideleaf : qemu");
        bars.push(SpreadMedian::of(&ratios).bar(&what, 2, "", Limit::AtLeast(promise)));
    }
    Figures::of(title).table(table).bars(bars)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_compared_round_by_round_and_judged() {
        let rounds = [[[10.0, 1.0], [5.0, 2.0]], [[9.0, 1.0], [9.0, 1.0]]];
        let figures = Figure::all([("read", "MiB/s"), ("write", "MiB/s")], &rounds);
        assert_eq!((&figures[0].ours, &figures[0].theirs), (&vec![10.0, 9.0], &vec![5.0, 9.0]));
        let compared = compared("a guest twice".into(), &figures, 0.8);
        let row = ["read", "10 MiB/s", "7 MiB/s", "1.50", "1.00 - 2.00"];
        assert_eq!(compared.tables[0].rows[0].iter().map(Cell::to_string).collect::<Vec<_>>(), row);
        let bars: Vec<String> = compared.bars.iter().map(ToString::to_string).collect();
        let told = [
            "met:    read, wideleaf : qemu, range 1.00 - 2.00, median 1.50, at least 0.8",
            "MISSED: write, wideleaf : qemu, range 0.50 - 1.00, median 0.75, at least 0.8",
        ];
        assert_eq!(bars, told);
    }

    #[test]
    #[should_panic(expected = "a guest failed")]
    fn a_guest_without_verification_has_no_results() {
        results("@wideleaf result name=sent value=1.0 unit=frames/s\n", ["sent"]);
    }
}
