//! What a VM takes of the host's memory beside its guest's RAM, with every device there is and a guest that works on its disk.
//!
//! ```text
//!   wideleaf run disk --disk --net --vsock --balloon --rng --console --control-socket
//!     └ its process, and those that remove its sockets: /proc/PID/smaps, less the ranges that `statistics` names as guest RAM
//! ```
//!
//! Counted is anonymous memory, private and shared, that is present: what would not be there without this VM. The program's own pages are the
//! page cache's, and shared by all VMs; they are printed beside it. What KVM takes in the kernel (its tables of guest RAM) is in neither.
//! Where the tap cannot be had (it takes root) there is no card, and a line says so.
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
use wideleaf_benches::experiment::{Ended, bar, needs_kvm, number, run, table};
use wideleaf_control::vm::{VmAnswer, VmRequest, ask};
use wideleaf_protocol::{Message, parse};

const KIB_MAX: u64 = 8 << 10;
const DISK_BYTES: u64 = 16 << 20;
/// Passes of the guest over its disk: some seconds.
const SETTLED_AFTER: u64 = 20;

fn main() -> ExitCode {
    run("footprint", |_, _| experiment())
}

fn experiment() -> Result<(), Ended> {
    needs_kvm()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = fs::File::create(folder.path().join("disk.img")).expect("a file");
    file.set_len(DISK_BYTES).expect("a file");
    let mut vm = Vm(start(&program()?, folder.path()));
    let console = BufReader::new(vm.0.stdout.take().expect("piped"));
    assert!(console.lines().map_while(Result::ok).any(|line| is_at_work(&line)), "the guest ended, or never worked");
    let statistics = match ask(&folder.path().join("vm.sock"), VmRequest::Statistics) {
        Ok(VmAnswer::Statistics(statistics)) => statistics,
        other => panic!("a VM has statistics: {other:?}"),
    };
    let ram: Vec<Range<u64>> = statistics.vm.ram.iter().map(|ram| ram.hva..ram.hva + ram.bytes).collect();
    let taken = processes(vm.0.id()).into_iter().map(|pid| (pid, taken(pid, &ram))).collect::<Vec<_>>();
    print(&taken);
    Ok(())
}

/// Whether a line says that the guest has gone over its disk so often that all that a VM sets up once is there.
fn is_at_work(line: &str) -> bool {
    matches!(parse(line), Some(Ok(Message::Progress { done: SETTLED_AFTER.., .. })))
}

/// A VM that does not outlive the bench.
struct Vm(Child);

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(program: &Path, folder: &Path) -> Child {
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
    // A tap in a network of our own: the machine's is neither seen nor changed.
    match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) if Path::new("/dev/net/tun").exists() => drop(command.arg("--net=tap=wl-footprint")),
        _ => println!("footprint: without a network card: taps take root and /dev/net/tun"),
    }
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().expect("it was found a moment ago")
}

/// A process, then its children.
fn processes(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        children.flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
    [vec![pid], children].concat()
}

/// KiB of a process, by what they are.
#[derive(Default)]
struct Taken {
    anonymous: BTreeMap<String, u64>,
    /// Pages of files, the program's above all.
    of_files: u64,
}

impl Taken {
    fn sum(&self) -> u64 {
        self.anonymous.values().sum()
    }
}

fn taken(pid: u32, ram: &[Range<u64>]) -> Taken {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process is there, and ours");
    let mut taken = Taken::default();
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

/// What a mapping is, by the first line of it; nothing for guest RAM.
fn name_of(line: &str, ram: &[Range<u64>]) -> Option<String> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap_or(0));
    if ram.iter().any(|ram| ram.start < end && start < ram.end) {
        return None;
    }
    let path = line.split_whitespace().nth(5).unwrap_or("");
    let last = path.rsplit('/').next().unwrap_or(path);
    Some(match path {
        "" => format!("memory of the allocator and of threads' stacks, in mappings of {}", size((end - start) >> 10)),
        _ => last.to_owned(),
    })
}

fn size(kib: u64) -> String {
    if kib < 1 << 10 { "less than 1 MiB".into() } else { format!("{} MiB", kib >> 10) }
}

fn print(processes: &[(u32, Taken)]) {
    let mut table = table(&["process", "anonymous memory", "KiB"]);
    for (index, (pid, taken)) in processes.iter().enumerate() {
        let who = if index == 0 { "the VM's".to_owned() } else { format!("removes a path ({pid})") };
        for (name, kib) in &taken.anonymous {
            table.add_row([who.clone().into(), name.into(), number(kib)]);
        }
    }
    println!("{table}");
    let sum: u64 = processes.iter().map(|(_, taken)| taken.sum()).sum();
    let of_files: u64 = processes.iter().map(|(_, taken)| taken.of_files).sum();
    println!("footprint: {sum} KiB beyond guest RAM in {} processes, and {of_files} KiB of files", processes.len());
    println!("{}", bar(&format!("{KIB_MAX} KiB at most with all devices"), sum <= KIB_MAX));
}
