//! Host memory of a VM beyond its guest's RAM, with all devices and a guest that works on its disk.
//!
//! ```text
//!   wideleaf run disk --disk --net --vsock --balloon --rng --console --control-socket
//!     └ its process, and those that remove its sockets: /proc/PID/smaps without guest RAM (by `statistics`)
//! ```
//!
//! The result is the present anonymous memory, private and shared: memory that would not exist without this VM. The
//! pages of the program itself belong to the page cache and are shared by all VMs; they are printed separately.
//! Neither includes KVM's memory in the kernel (its tables of guest RAM). Without the right to create a tap (it takes
//! root) there is no network card, and a line says so.
//!
//! `cargo bench -p wideleaf-benches --bench footprint`, after `cargo build --release -p wideleaf`

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use nix::sched::{CloneFlags, unshare};
use wideleaf_benches::beside_qemu::program;
use wideleaf_benches::scenario::{ScenarioError, needs_kvm, run};
use wideleaf_control::vm::{VmAnswer, VmRequest, ask};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::table::{Cell, Table};
use wideleaf_protocol::{Message, parse};

const KIB_MAX: u64 = 8 << 10;
const DISK_BYTES: u64 = 16 << 20;
/// Passes of the guest over its disk before the measurement, some seconds.
const SETTLED_AFTER: u64 = 20;

fn main() -> ExitCode {
    run("footprint", |_, _| experiment())
}

fn experiment() -> Result<Figures, ScenarioError> {
    needs_kvm()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = fs::File::create(folder.path().join("disk.img")).expect("a file");
    file.set_len(DISK_BYTES).expect("a file");
    let (child, has_card) = start(&program("wideleaf", "wideleaf")?, folder.path());
    let mut vm = Vm(child);
    let console = BufReader::new(vm.0.stdout.take().expect("piped"));
    assert!(console.lines().map_while(Result::ok).any(|line| is_at_work(&line)), "the guest ended or did no work");
    let statistics = match ask(&folder.path().join("vm.sock"), VmRequest::Statistics) {
        Ok(VmAnswer::Statistics(statistics)) => statistics,
        other => panic!("a VM has statistics: {other:?}"),
    };
    let ram: Vec<Range<u64>> = statistics.vm.ram.iter().map(|ram| ram.hva..ram.hva + ram.bytes).collect();
    let taken = processes(vm.0.id()).into_iter().map(|pid| (pid, taken(pid, &ram))).collect::<Vec<_>>();
    let figures = figures(&taken);
    Ok(if has_card { figures } else { figures.note("without a network card: a tap needs root and /dev/net/tun") })
}

/// Whether a line says that the guest has made enough passes over its disk that all one-time set-up of a VM is done.
fn is_at_work(line: &str) -> bool {
    matches!(parse(line), Some(Ok(Message::Progress { done: SETTLED_AFTER.., .. })))
}

/// A VM that is killed when dropped.
struct Vm(Child);

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a VM. Returns also whether it has a network card.
fn start(program: &Path, folder: &Path) -> (Child, bool) {
    let mut command = Command::new(program);
    command.args([
        "run",
        "disk",
        "--cmdline=bytes=16M seconds=600",
        "--memory=256M",
        "--no-daemon",
        "--console",
        "--timeout=5m",
    ]);
    command.args(["--disk=disk.img", "--vsock=cid=3,socket=v.sock", "--balloon", "--rng", "--control-socket=vm.sock"]);
    // The tap is in a network namespace of the bench, so the machine's network is neither visible nor changed.
    let has_card = unshare(CloneFlags::CLONE_NEWNET).is_ok() && Path::new("/dev/net/tun").exists();
    if has_card {
        command.arg("--net=tap=wl-footprint");
    }
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    (command.spawn().expect("the program was found a moment ago"), has_card)
}

/// A process, then its children.
fn processes(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        children.flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
    [vec![pid], children].concat()
}

/// Memory of a process in KiB, by kind.
#[derive(Default)]
struct ProcessMemory {
    anonymous: BTreeMap<String, u64>,
    /// Pages of files, mostly the program's.
    of_files: u64,
}

impl ProcessMemory {
    fn sum(&self) -> u64 {
        self.anonymous.values().sum()
    }
}

fn taken(pid: u32, ram: &[Range<u64>]) -> ProcessMemory {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process exists and is ours");
    let mut taken = ProcessMemory::default();
    let mut mapping = Some(String::new());
    for line in smaps.lines() {
        let Some((name, value)) = line.split_once(": ").filter(|(name, _)| !name.contains(' ')) else {
            mapping = name_of(line, ram);
            continue;
        };
        let Some(mapping) = &mapping else { continue };
        let kib = || value.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
        match name {
            "Anonymous" => *taken.anonymous.entry(mapping.clone()).or_default() += kib(),
            "Rss" => taken.of_files += kib(),
            _ => {}
        }
    }
    taken.of_files -= taken.sum();
    taken.anonymous.retain(|_, kib| *kib > 0);
    taken
}

/// Name of a mapping from its first line; `None` for guest RAM.
fn name_of(line: &str, ram: &[Range<u64>]) -> Option<String> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap_or(0));
    if ram.iter().any(|ram| ram.start < end && start < ram.end) {
        return None;
    }
    let path = line.split_whitespace().nth(5).unwrap_or("");
    let last = path.rsplit('/').next().unwrap_or(path);
    Some(match path {
        "" => format!("allocator and thread stacks, in mappings of {}", size((end - start) >> 10)),
        _ => last.to_owned(),
    })
}

fn size(kib: u64) -> String {
    if kib < 1 << 10 { "less than 1 MiB".into() } else { format!("{} MiB", kib >> 10) }
}

fn figures(processes: &[(u32, ProcessMemory)]) -> Figures {
    let size_of = |kib: u64| Cell::number(kib as f64, 0, "KiB");
    let mut table = Table::new(["process", "anonymous memory"], ["size"]);
    for (index, (pid, taken)) in processes.iter().enumerate() {
        let process = if index == 0 { "the VM's".to_owned() } else { format!("removes a path ({pid})") };
        for (name, kib) in &taken.anonymous {
            table.row([process.clone().into(), name.as_str().into(), size_of(*kib)]);
        }
    }
    let sum: u64 = processes.iter().map(|(_, taken)| taken.sum()).sum();
    let of_files: u64 = processes.iter().map(|(_, taken)| taken.of_files).sum();
    let count = processes.len();
    let mut sums = Table::new(["all processes"], ["size"]);
    sums.row(["anonymous memory beyond guest RAM".into(), size_of(sum)]);
    sums.row(["pages of files".into(), size_of(of_files)]);
    Figures::of(format!("{sum} KiB beyond guest RAM in {count} processes, and {of_files} KiB of files"))
        .table(table)
        .table(sums)
        .bar("with all devices", size_of(sum), Limit::AtMost(KIB_MAX as f64))
}
