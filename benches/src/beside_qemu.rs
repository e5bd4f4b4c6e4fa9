//! Our VMM and QEMU's microvm with the same image, command line and RAM, which take turns: a machine that changes its speed changes it for both.
//!
//! ```text
//!   round   wideleaf run guest.elf …      ─▶ results by the guest's clock ─┐
//!           qemu-system-x86_64 -M microvm ─▶ the same                     ─┴▶ wideleaf : qemu, one ratio a round, and their median
//! ```

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use wideleaf_protocol::{Message, Status, parse};

use crate::experiment::{Ended, needs_kvm, number, table};
use wideleaf_experiments::statistics::median;

/// QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM and then may not set it on some AMD hosts.
const CPU: &str = "host,arch-capabilities=off";
const QEMU: &str = "qemu-system-x86_64";

/// Both programs, and the image.
#[derive(Debug)]
pub struct BesideQemu {
    program: PathBuf,
    folder: TempDir,
    memory: &'static str,
}

impl BesideQemu {
    /// For guests with so much RAM.
    ///
    /// # Errors
    /// [`Ended::Skipped`] where KVM or one of the programs is missing.
    ///
    /// # Panics
    /// Where the image cannot be written.
    pub fn new(memory: &'static str) -> Result<BesideQemu, Ended> {
        needs_kvm()?;
        if Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_err() {
            return Err(Ended::Skipped(format!("{QEMU} is not installed")));
        }
        let beside =
            BesideQemu { program: program()?, folder: tempfile::tempdir().expect("a temporary folder"), memory };
        wideleaf_guest_image::write_to(&beside.image()).expect("a file");
        Ok(beside)
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("guest.elf")
    }

    /// Where files of the bench may be.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The image in a guest of ours: its console is standard output.
    pub fn wideleaf(&self, cmdline: &str) -> Command {
        self.wideleaf_of(&self.program, cmdline)
    }

    /// The same by another build of our program.
    pub fn wideleaf_of(&self, program: &Path, cmdline: &str) -> Command {
        self.wideleaf_boots(program, &self.image(), cmdline)
    }

    /// Another image in a guest of ours.
    pub fn wideleaf_with(&self, image: &Path, cmdline: &str) -> Command {
        self.wideleaf_boots(&self.program, image, cmdline)
    }

    fn wideleaf_boots(&self, program: &Path, image: &Path, cmdline: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("run").arg(image).args(["--memory", self.memory, "--cmdline", cmdline]);
        command.args(["--policy", "never", "--console"]);
        quiet(command)
    }

    /// The same in a microvm of QEMU's, with virtio devices of version 1.
    pub fn qemu(&self, cmdline: &str) -> Command {
        self.qemu_with(&self.image(), cmdline)
    }

    /// Another image in a microvm of QEMU's.
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

/// The release build of our program, beside the bench's own target folder.
///
/// # Errors
/// [`Ended::Skipped`] where there is none.
pub fn program() -> Result<PathBuf, Ended> {
    let bench = std::env::current_exe().ok();
    let program = bench.and_then(|bench| Some(bench.parent()?.parent()?.join("wideleaf"))).filter(|path| path.exists());
    program.ok_or(Ended::Skipped("the wideleaf program is not built: cargo build --release -p wideleaf".into()))
}

/// The results with these names that a guest printed. It has to have found all words right.
///
/// # Panics
/// Where it has not, or one is missing: with all that it printed.
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

/// A result of both, round by round; more is better.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it is.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Ours.
    pub ours: Vec<f64>,
    /// QEMU's.
    pub theirs: Vec<f64>,
}

impl Figure {
    /// Of rounds that have, in the same place, the results of both.
    pub fn all<const N: usize>(names: [(&'static str, &'static str); N], rounds: &[[[f64; N]; 2]]) -> Vec<Figure> {
        let of = |who: usize, index: usize| rounds.iter().map(|round| round[who][index]).collect();
        let figure = |(index, (name, unit))| Figure { name, unit, ours: of(0, index), theirs: of(1, index) };
        names.into_iter().enumerate().map(figure).collect()
    }

    /// Ours by theirs, each round for itself, in rising order.
    pub fn ratios(&self) -> Vec<f64> {
        let mut ratios: Vec<_> = self.ours.iter().zip(&self.theirs).map(|(ours, theirs)| ours / theirs).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }
}

/// Prints a line for each figure, and whether its median ratio is as good as promised.
pub fn print(figures: &[Figure], promise: f64) {
    let mut table = table(&["figure", "unit", "wideleaf", "qemu", "wideleaf : qemu", "range", "promise"]);
    for figure in figures {
        let ratios = figure.ratios();
        let range = format!("{:.2} - {:.2}", ratios[0], ratios[ratios.len() - 1]);
        let ratio = median(ratios);
        let met = if ratio >= promise { "met" } else { "MISSED" };
        table.add_row([
            figure.name.into(),
            figure.unit.into(),
            number(format!("{:.0}", median(figure.ours.clone()))),
            number(format!("{:.0}", median(figure.theirs.clone()))),
            number(format!("{ratio:.2}")),
            number(range),
            format!("{promise}: {met}").into(),
        ]);
    }
    println!("{table}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_a_ratio_for_each_round() {
        let rounds = [[[10.0, 1.0], [5.0, 2.0]], [[9.0, 1.0], [9.0, 1.0]]];
        let figures = Figure::all([("read", "MiB/s"), ("write", "MiB/s")], &rounds);
        assert_eq!((figures[0].ratios(), figures[1].ratios()), (vec![1.0, 2.0], vec![0.5, 1.0]));
    }

    #[test]
    #[should_panic(expected = "a guest failed")]
    fn a_guest_that_has_not_verified_has_no_results() {
        results("@wideleaf result name=sent value=1.0 unit=frames/s\n", ["sent"]);
    }
}
