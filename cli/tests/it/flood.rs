//! A guest that prints one kind of line forever, in a process with limited memory. The process keeps no more after a
//! minute of output than after a second. `WIDELEAF_FLOOD_SECONDS` is the duration for each kind [default: 2]. Needs
//! KVM (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::migration::AMONG_QUESTIONS;
use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_policies::units::mib;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::tiny_guest::prints_for_ever;

/// Limit for the private memory of the process beyond its guest's 64 MiB: code, stacks of its threads (2 MiB
/// each), and kept lines.
const MAY_HAVE: u64 = mib(64 + 192).get();

/// Limit for the growth while a kind of line is printed for the test's duration.
const MAY_GROW: u64 = mib(24).get();

/// Seconds after which each kind exceeds its bound, also if each byte costs 0.1 ms.
const SURELY_BEYOND: u64 = 30;

/// Lines of each kind, with many names, and the report's key for lines that were not kept.
fn kinds() -> Vec<(&'static str, String, &'static str)> {
    let many = |line: &dyn Fn(usize) -> String| (0..1500).map(line).collect::<String>();
    vec![
        ("malformed", many(&|number| format!("@wideleaf {number}\n")), "malformed_lines"),
        ("begin", many(&|number| format!("@wideleaf begin phase=p{number} tsc=1\n")), "phases"),
        (
            "begin and end",
            many(&|number| format!("@wideleaf begin phase=p{number} tsc=1\n@wideleaf end phase=p{number} tsc=2\n")),
            "phases",
        ),
        ("end", "@wideleaf end phase=p tsc=2\n".to_owned(), "ends_of_no_phase"),
        (
            "progress",
            "@wideleaf begin phase=p tsc=1\n".to_owned()
                + &many(&|number| format!("@wideleaf progress phase=p tsc={number} done={number} total=2000\n")),
            "progress_marks",
        ),
        ("region", many(&|number| format!("@wideleaf region name=r{number} address=0x0 bytes=2097152\n")), "regions"),
        ("result", many(&|number| format!("@wideleaf result name=n{number} value=1 unit=s\n")), "results"),
        (
            "gaps",
            many(&|number| format!("@wideleaf gaps vcpu={number} count=1 p50_ns=1 p99_ns=1 p999_ns=1 max_ns=1\n")),
            "gaps",
        ),
        ("panic", many(&|number| format!("@wideleaf panic message=m{number}\n")), ""),
        (
            "its own",
            many(&|number| format!("line {number} of a guest with a standard error that is not read\n")),
            "stderr_lines",
        ),
        ("no end", "x".repeat(4096), "stderr_lines"),
    ]
}

fn seconds() -> u64 {
    std::env::var("WIDELEAF_FLOOD_SECONDS").map_or(2, |text| text.parse().expect("a number of seconds"))
}

/// Private memory of the process without its guest's.
fn private_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn no_kind_of_line_makes_the_memory_of_a_run_grow_without_limit() {
    if !has_kvm() {
        return;
    }
    for (kind, text, cut) in kinds() {
        let scratch = new_scratch();
        scratch.file("image", &prints_for_ever(text.as_bytes()));
        let limited = format!("ulimit -d {} && exec \"$0\" \"$@\"", MAY_HAVE >> 10);
        let mut command = Command::new("sh");
        command.args(["-c", &limited]).arg(scratch.program()).current_dir(scratch.path("."));
        command.args(["run", "image", "--memory=64M", "--policy=never", "--no-daemon", "--format=json"]);
        command.args(["--control-socket=vm.sock", "--output=result.json"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = Running(command.spawn().unwrap());
        while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
            assert_eq!(run.0.try_wait().unwrap(), None, "{kind}: it ended before it listened");
            std::thread::sleep(AMONG_QUESTIONS);
        }
        // By then, lines have filled all bounds together.
        std::thread::sleep(Duration::from_secs(1));
        let (before, begin) = (private_bytes(run.0.id()), Instant::now());
        while begin.elapsed() < Duration::from_secs(seconds()) {
            assert_eq!(run.0.try_wait().unwrap(), None, "{kind}: it runs on");
            std::thread::sleep(Duration::from_millis(50));
        }
        let after = private_bytes(run.0.id());
        println!("{kind}: {} KiB, then {} KiB after {} s", before >> 10, after >> 10, seconds());
        assert!(after <= before + MAY_GROW, "{kind}: from {before} to {after} bytes");
        scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
        assert_eq!(run.0.wait().unwrap().code(), Some(0), "{kind}");
        let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result.json")).unwrap()).unwrap();
        println!("{kind}: not kept {}", report["cut"]);
        let is_counted = cut.is_empty() || report["cut"][cut].as_u64() > Some(0);
        assert!(is_counted || seconds() < SURELY_BEYOND, "{kind}: {}", report["cut"]);
    }
}
