//! Traces through the command line: recording, reading, refusals, and the remains of an incomplete recording. The
//! trace's format and the recorder have their own tests.

use std::fs;
use std::path::Path;
use std::thread::yield_now;

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use predicates::prelude::*;
use serde_json::Value;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;

/// Arguments of a recording that ends soon.
const RECORD: [&str; 6] = ["trace", "record", "npb.cg", "--class=s", "--iterations=1", "--output=f"];
/// Arguments of a recording that runs until the test ends it.
const LONG: [&str; 5] = ["trace", "record", "npb.ft", "--class=A", "--output=f"];

fn json(scratch: &Scratch, arguments: &[&str]) -> Value {
    let output = scratch.wideleaf(&[arguments, &["--format=json"]].concat()).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

#[test]
fn the_trace_matches_the_report_of_its_recording() {
    let scratch = new_scratch();
    let recorded = json(&scratch, &RECORD);
    assert_eq!((&recorded["kernel"], &recorded["class"]), (&"npb.cg".into(), &"S".into()));
    assert_eq!((&recorded["iterations"], &recorded["class_iterations"]), (&1.into(), &15.into()));
    assert_eq!(recorded["is_verified"], Value::Null, "of one iteration there is no result");
    assert_eq!(recorded["bytes"], fs::metadata(scratch.path("f")).unwrap().len());

    let read = json(&scratch, &["trace", "info", "f"]);
    for same in ["kernel", "class", "bytes", "iterations", "class_iterations", "is_cut"] {
        assert_eq!(read[same], recorded[same], "{same}");
    }
    for same in ["records", "reads", "writes"] {
        assert_eq!(read["totals"][same], recorded[same], "{same}");
        let of_phases = read["phases"].as_array().unwrap().iter().map(|phase| phase[same].as_u64().unwrap());
        assert_eq!(read["totals"][same], of_phases.sum::<u64>(), "{same}");
    }
    let number = |of: &str| read["touched"][of].as_u64().unwrap();
    let (lines, pages) = (number("lines"), number("pages_4k"));
    assert!(pages <= lines && lines <= 64 * pages, "{read}");
    assert!(lines * 64 <= read["arena_bytes"].as_u64().unwrap().next_multiple_of(64), "{read}");
    assert_eq!(
        read["arena_bytes"].as_u64().unwrap().div_ceil(2 << 20),
        number("pages_2m"),
        "its vectors are everywhere"
    );
}

#[test]
fn the_reports_of_recording_and_trace_are_readable() {
    let scratch = new_scratch();
    let recorded = scratch.wideleaf(&RECORD).assert().success();
    recorded.stdout(predicate::str::contains("f: npb.cg.S, ").and(predicate::str::contains("result was not checked")));
    let read = scratch.wideleaf(&["trace", "info", "f"]).assert().success();
    read.stdout(predicate::str::contains("1 of 15 iterations").and(predicate::str::contains("│ compute")));
}

#[test]
fn a_limit_and_a_phase_make_a_trace_shorter() {
    let scratch = new_scratch();
    let gups = ["trace", "record", "gups", "--cmdline=log2_words=16", "--output=f"];
    let recorded = json(&scratch, &[&gups[..], &["--phase=verify"]].concat());
    assert_eq!((&recorded["is_verified"], &recorded["is_cut"]), (&true.into(), &false.into()));
    let phases = json(&scratch, &["trace", "info", "f"])["phases"].clone();
    assert_eq!((phases.as_array().unwrap().len(), &phases[0]["name"]), (1, &"verify".into()));
    let cut = json(&scratch, &[&gups[..], &["--limit=100K"]].concat());
    assert_eq!((&cut["is_verified"], &cut["is_cut"]), (&Value::Null, &true.into()));
    assert_eq!(json(&scratch, &["trace", "info", "f"])["is_cut"], true);
}

#[test]
fn an_invalid_recording_gives_one_clear_line_and_leaves_nothing() {
    let scratch = new_scratch();
    let refuses = |arguments: &[&str], code, words: &[&str]| {
        scratch.refuses(&[&["trace", "record"], arguments].concat(), code, words);
    };
    let quick = "--cmdline=log2_words=10";
    refuses(&["npb.dc", "-of"], 2, &["cannot record \"npb.dc\": there is no such kernel", "npb.cg"]);
    refuses(&["npb.cg", "--class=Z", "-of"], 2, &["no class \"Z\""]);
    refuses(&["gups", "--cmdline=words=1", "-of"], 2, &["unknown parameter words="]);
    refuses(&["pattern", "-of"], 2, &["set its size with bytes="]);
    refuses(&["gups", quick, "--iterations=1", "-of"], 2, &["--iterations: ", "has no iterations"]);
    refuses(&["gups", quick, "--phase=compute", "-of"], 2, &["--phase: ", "no phase \"compute\""]);
    refuses(&["gups", quick, "-ogone/f"], 7, &["--output gone/f", "no folder"]);
    refuses(&["gups", "--cmdline=log2_words=20", "-o/dev/full"], 7, &["cannot write /dev/full", "No space left"]);
    refuses(&["gups", "--cmdline=log2_words=10 seconds=1", "-of"], 2, &["--cmdline: ", "goes by time", "rounds="]);
}

#[test]
fn a_file_that_is_not_a_complete_trace_gives_one_clear_line() {
    let scratch = new_scratch();
    scratch.wideleaf(&RECORD).assert().success();
    let bytes = fs::read(scratch.path("f")).unwrap();
    let refuses = |content: &[u8], words: &[&str]| {
        scratch.file("f", content);
        scratch.refuses(&["trace", "info", "f"], 3, &[&["f: "], words].concat());
    };
    refuses(b"", &["not a trace"]);
    refuses(&bytes[..bytes.len() - 1], &[&format!("ends at byte {}", bytes.len() - 1)]);
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    refuses(&damaged, &["damaged at byte ", "its checksum is wrong"]);
    refuses(&[&bytes[..8], &[7], &bytes[9..]].concat(), &["version 7", "record it again"]);
    scratch.refuses(&["trace", "info", "gone"], 3, &["gone: No such file"]);
}

/// Starts the long recording and waits for the kernel's process. Also returns its id.
fn started(scratch: &Scratch) -> (Running, String) {
    let mut recording = Running::start(scratch, &LONG);
    let kernel = recording.wait_for("children", |children| !children.trim().is_empty());
    (recording, kernel)
}

/// Whether a process runs. A zombie, which has ended but not been waited for, does not.
fn runs(process: &str) -> bool {
    let status = fs::read_to_string(Path::new("/proc").join(process).join("status"));
    status.is_ok_and(|status| status.lines().any(|line| line.starts_with("State:") && !line.contains('Z')))
}

#[test]
fn an_interrupted_recording_leaves_neither_file_nor_process() {
    let scratch = new_scratch();
    let (recording, kernel) = started(&scratch);
    recording.signal(Signal::SIGINT);
    let (code, said) = recording.end();
    assert_eq!((code, said.as_str()), (Some(130), "wideleaf-lab: interrupted\n"));
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    assert!(!runs(&kernel));
}

#[test]
fn the_kernel_does_not_outlive_a_recording_killed_with_sigkill() {
    let scratch = new_scratch();
    let (recording, kernel) = started(&scratch);
    recording.signal(Signal::SIGKILL);
    recording.end();
    while runs(&kernel) {
        yield_now();
    }
    assert!(!scratch.names().contains(&"f".to_owned()));
}
