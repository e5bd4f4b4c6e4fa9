//! Disk throughput of a guest: our virtio-blk and that of QEMU's microvm, with the same driver and the same file in
//! the host's page cache.
//!
//! Both use write-back: the guest's writes are in the host's page cache until it flushes (QEMU: `cache=writeback`).
//! QEMU serves the requests in its threads (`aio=threads`, its default) or with `io_uring`, by argument.
//!
//! `cargo bench -p wideleaf-benches --bench disk -- [ROUNDS [threads|io_uring]]`, after `cargo
//! build --release -p wideleaf`

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use wideleaf_benches::beside_qemu::{BesideQemu, Figure, Program, compared, in_turns, results};
use wideleaf_benches::scenario::{Arguments, ScenarioError, Waiting, run};
use wideleaf_measure::figures::Figures;

const ROUNDS: u32 = 11;
const MEMORY: &str = "256M";
const CMDLINE: &str = "kernel=disk bytes=64M passes=4 requests=20000";
const DISK_BYTES: usize = 64 << 20;
const FIGURES: [(&str, &str); 4] = [
    ("sequential_write", "MiB/s"),
    ("sequential_read", "MiB/s"),
    ("random_write", "requests/s"),
    ("random_read", "requests/s"),
];
const WAYS: [&str; 2] = ["threads", "io_uring"];
/// Minimum ratio of our speed to QEMU's in each figure.
const PROMISE: f64 = 0.8;

fn main() -> ExitCode {
    run("disk", experiment)
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let rounds = arguments.count(0, ROUNDS)?;
    let way = WAYS[arguments.word(1, &WAYS, "threads or io_uring")?];
    let beside = BesideQemu::new(MEMORY)?;
    let file = beside.folder().join("disk.img");
    // The file is written, not only extended, so that no block must be allocated while a guest waits.
    std::fs::write(&file, vec![0; DISK_BYTES]).expect("a file");
    let rounds = in_turns(rounds, |program| match program {
        Program::Wideleaf => figures(ours(&beside, &file), waiting),
        Program::Qemu => figures(qemu(&beside, &file, way), waiting),
    })?;
    let title = format!("{CMDLINE}; QEMU: cache=writeback, aio={way}; medians of {} alternating rounds", rounds.len());
    Ok(compared(title, &Figure::all(FIGURES, &rounds), PROMISE))
}

fn ours(beside: &BesideQemu, file: &Path) -> Command {
    let mut command = beside.wideleaf(CMDLINE);
    command.arg("--no-daemon").arg("--disk").arg(file);
    command
}

fn qemu(beside: &BesideQemu, file: &Path, way: &str) -> Command {
    let mut command = beside.qemu(CMDLINE);
    let drive = format!("file={},if=none,id=disk,format=raw,cache=writeback,aio={way}", file.display());
    command.args(["-device", "virtio-blk-device,drive=disk", "-drive", &drive]);
    command
}

fn figures(mut command: Command, waiting: &Waiting) -> Result<[f64; 4], ScenarioError> {
    let output = command.output().expect("the program was found a moment ago");
    // Ctrl-C also ends the guest.
    waiting.pass(Duration::ZERO)?;
    Ok(results(&String::from_utf8_lossy(&output.stdout), FIGURES.map(|(name, _)| name)))
}
