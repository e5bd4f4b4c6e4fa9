//! Recording a run and simulating policies on it, natively: runs anywhere.

use std::fs;

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use predicates::prelude::*;
use serde_json::Value;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;

/// Arguments of a run that is longer than the manager's first pause between samples, also if other
/// builds share the machine.
const RUN: [&str; 6] =
    ["run", "--native", "gups", "--cmdline=log2_words=20 seconds=1", "--memory=64M", "--format=json"];

/// Records a run under `policy` into `f`, and returns its report.
fn record(scratch: &Scratch, policy: &str) -> Value {
    let run = scratch.wideleaf(&[&RUN[..], &["--policy", policy, "--record", "f"]].concat()).assert().success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

fn simulate(scratch: &Scratch, more: &[&str]) -> Value {
    let arguments = [&["simulate", "--recording=f", "--format=json"], more].concat();
    let output = scratch.wideleaf(&arguments).assert().success().stderr("").get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

#[test]
fn greedy_on_a_recording_of_greedy_promotes_the_same() {
    let scratch = new_scratch();
    let run = record(&scratch, "greedy");
    let done = &run["manager"]["outcomes"]["collapse.done"];
    assert!(done.as_u64().is_some_and(|windows| windows >= 4), "a table of 8 MiB is 4 windows: {run}");
    assert_eq!(run["manager"]["recording"]["bytes"], fs::metadata(scratch.path("f")).unwrap().len());
    let found = simulate(&scratch, &["--policy=greedy"]);
    let (recorded, again) = (&found["recorded"], &found["simulated"][0]);
    assert_eq!(recorded["policy"], "greedy (recorded)");
    assert_eq!(&recorded["outcomes"]["promote_2m.done"], done);
    assert_eq!(recorded["copied_bytes"], run["manager"]["copied_bytes"]);
    for same in ["outcomes", "copied_bytes", "cpu_s", "bloat_bytes", "host_coverage_2m"] {
        assert_eq!(recorded[same], again[same], "{same}");
    }
    assert_eq!(found["recording"]["is_closed"], true);
    assert_eq!(found["recording"]["ticks"], run["manager"]["ticks"]);
    assert_eq!(found["recording"]["facts"]["workload"], "gups");
}

#[test]
fn never_on_a_recording_of_greedy_promotes_nothing() {
    let scratch = new_scratch();
    record(&scratch, "greedy");
    let found = simulate(&scratch, &["--policy=never"]);
    let never = &found["simulated"][0];
    assert_eq!(never["outcomes"], serde_json::json!({}));
    assert_eq!((&never["copied_bytes"], &never["host_coverage_2m_at_end_bp"]), (&0.into(), &0.into()));
}

#[test]
fn greedy_on_a_recording_of_never_promotes_the_touched_windows() {
    let scratch = new_scratch();
    record(&scratch, "never");
    let found = simulate(&scratch, &["--policy=greedy"]);
    assert_eq!(found["recorded"]["outcomes"], serde_json::json!({}));
    assert!(found["simulated"][0]["outcomes"]["promote_2m.done"].as_u64().unwrap() >= 4);
}

#[test]
fn without_a_policy_all_policies_are_compared_and_every_run_gives_the_same() {
    let scratch = new_scratch();
    record(&scratch, "greedy");
    let all = simulate(&scratch, &[]);
    let names: Vec<&str> = all["simulated"].as_array().unwrap().iter().map(|s| s["policy"].as_str().unwrap()).collect();
    let known: Vec<&str> = wideleaf_policies::policy::POLICIES.iter().map(|policy| policy.name).collect();
    assert_eq!(names, known);
    assert_eq!(all, simulate(&scratch, &[]));
    let table = scratch.wideleaf(&["simulate", "--recording=f"]).assert().success().stderr("");
    let words = ["greedy (recorded)", "never", "promote_2m.done", "host coverage 2m over time"];
    words.iter().fold(table, |table, word| table.stdout(predicate::str::contains(*word)));
}

#[test]
fn a_recording_can_be_written_to_every_path_that_an_output_can() {
    let scratch = new_scratch();
    fs::create_dir(scratch.path("folder")).unwrap();
    let to = |path| [&RUN[..], &["--record", path]].concat();
    scratch.refuses(&to("folder"), 7, &["cannot write --record ", "folder: it is a folder"]);
    scratch.refuses(&to("nowhere/f"), 7, &["cannot write --record nowhere/f: there is no folder nowhere"]);
    scratch.file("f", b"what was there");
    let both = [&to("f")[..], &["--output=./f"]].concat();
    scratch.refuses(&both, 2, &["--record and --output are both ./f; name two files"]);
    scratch.wideleaf(&to("f")).assert().success().stderr("");
    assert!(fs::read(scratch.path("f")).unwrap().starts_with(&wideleaf_policies::recording::MAGIC));
    let mut names = scratch.names();
    names.sort_unstable();
    assert_eq!(names, ["f", "folder"]);
}

#[test]
fn a_full_disk_leaves_the_result_and_is_a_failure() {
    let scratch = new_scratch();
    let run = scratch.wideleaf(&[&RUN[..], &["--record=/dev/full"]].concat()).assert().code(7);
    let words = ["cannot write --record /dev/full: No space left", "frames are missing"];
    let run = words.iter().fold(run, |run, word| run.stderr(predicate::str::contains(*word)));
    let report: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert_eq!((&report["outcome"], &report["manager"]["recording"]["bytes"]), (&"success".into(), &0.into()));
}

#[test]
fn an_interrupted_run_leaves_a_closed_recording() {
    let scratch = new_scratch();
    let long = "--cmdline=log2_words=20 seconds=3600";
    let arguments = ["run", "--native", "gups", long, "--memory=64M", "--timeout=5m", "--record=f"];
    let mut run = Running::start(&scratch, &arguments);
    run.wait_for("comm", |name| name.trim() == "kernel");
    run.signal(Signal::SIGINT);
    assert_eq!(run.end().0, Some(130));
    assert_eq!(scratch.names(), ["f"]);
    assert_eq!(simulate(&scratch, &[])["recording"]["is_closed"], true);
}

#[test]
fn a_truncated_recording_is_simulated_up_to_its_end() {
    let scratch = new_scratch();
    record(&scratch, "greedy");
    let bytes = fs::read(scratch.path("f")).unwrap();
    scratch.file("f", &bytes[..bytes.len() - 3]); // within the last snapshot: the end mark is two bytes
    let found = simulate(&scratch, &[]);
    assert_eq!(found["recording"]["is_closed"], false);
    assert!(found["recording"]["cut_off_at_bytes"].as_u64().unwrap() < bytes.len() as u64 - 3);
    let table = scratch.wideleaf(&["simulate", "--recording=f"]).assert().success();
    table.stdout(predicate::str::contains("cut off after byte"));
}

#[test]
fn a_file_that_is_not_a_recording_gives_one_clear_line() {
    let scratch = new_scratch();
    record(&scratch, "never");
    let bytes = fs::read(scratch.path("f")).unwrap();
    let refuses = |content: &[u8], words: &[&str]| {
        scratch.file("f", content);
        scratch.refuses(&["simulate", "--recording=f"], 3, &[&["--recording f: "], words].concat());
    };
    refuses(b"", &["not a recording of wideleaf"]);
    refuses(b"{\"setup\": {}}", &["not a recording of wideleaf"]);
    refuses(&bytes[..30], &["cut off after byte 8"]);
    let mut other = bytes.clone();
    other[8] = 9;
    refuses(&other, &["a recording of version 9; this program reads versions 2 to 7"]);
    refuses(&[&bytes[..bytes.len() - 2], &[9, 0]].concat(), &["damaged at byte", "9 is not a valid kind of frame"]);
    scratch.refuses(&["simulate", "--recording=gone"], 3, &["--recording gone: No such file"]);
    scratch.refuses(&["simulate", "--recording=."], 3, &["--recording .: it is a folder"]);
    scratch.refuses(&["simulate", "--recording=/dev/null"], 3, &["/dev/null: it is a character device"]);
}

#[test]
fn what_to_simulate_must_be_said() {
    let scratch = new_scratch();
    scratch.refuses(&["simulate", "--policy=greedy"], 2, &["cannot simulate: no input is named; use --recording FILE"]);
    let wrong = scratch.wideleaf(&["simulate"]).assert().code(2).stdout("");
    wrong.stderr(predicate::str::contains("--recording <FILE>"));
    let list = scratch.wideleaf(&["simulate", "--policy=help"]).assert().success();
    list.stdout(predicate::str::contains("greedy"));
    let nope = scratch.wideleaf(&["simulate", "--recording=f", "--policy=nope"]).assert().code(2);
    nope.stderr(predicate::str::contains("never, prealloc, at-fault, greedy"));
}
