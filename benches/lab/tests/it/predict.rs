//! `wideleaf-lab predict` as a person types it. What it measures depends on the machine's load, so what is checked
//! holds either way.

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use serde_json::Value;
use wideleaf_testing::scratch::{Running, Scratch};

fn report_of(scratch: &Scratch, arguments: &[&str]) -> Value {
    let all = [&["predict", "--format=json"], arguments].concat();
    let output = scratch.wideleaf(&all).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// A prediction that ran to its end is complete, whatever the machine's load did to its numbers.
fn is_whole(report: &Value) {
    let prediction = &report["prediction"];
    let number = |name: &str| prediction[name].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&number("share_bound")), "{prediction}");
    assert!(number("pace_ns") > 0.0 && number("visits") >= number("replayed"), "{prediction}");
    let paces = prediction["paces"].as_array().unwrap();
    let ways: Vec<_> = paces.iter().map(|pace| pace["way"].to_string().replace('"', "")).collect();
    let chains = ["{chains:1}", "{chains:2}", "{chains:4}", "{chains:8}", "{chains:16}"];
    assert_eq!(ways, [&chains[..], &["free", "{ahead:16}", "{ahead:64}", "{ahead:128}", "asked"]].concat());
    assert!(
        paces.iter().all(|pace| pace["base_ns"].as_f64().unwrap() > 0.0 && pace["huge_ns"].as_f64().unwrap() > 0.0)
    );
    let saved = ["low", "median", "high"].map(|name| prediction["saved"][name].as_f64().unwrap());
    assert!(saved.is_sorted() && saved[2] < 1.0, "{prediction}");
}

#[test]
fn gups_is_predicted_from_all_of_its_updates() {
    let scratch = new_scratch();
    let report = report_of(&scratch, &["gups", "--log2-words=16", "--rounds=1"]);
    is_whole(&report);
    // 262,144 updates, each a load and a store of one line. The number is computed from HPCC's sequence alone, which
    // has 128 related streams: a ninth of the updates return to a line that is still remembered.
    let visits = report["prediction"]["visits"].as_u64().unwrap();
    assert_eq!(visits, 233_302);
    assert_eq!(report["prediction"]["replayed"], visits);
    assert_eq!(report["prediction"]["iterations"], serde_json::json!([0, 0]));
    assert_eq!(scratch.names(), [""; 0], "nothing is left behind");
}

#[test]
fn a_benchmark_with_iterations_is_predicted_from_one_iteration() {
    let report = report_of(&new_scratch(), &["npb.mg", "--class=S", "--rounds=1"]);
    is_whole(&report);
    let iterations = report["prediction"]["iterations"].as_array().unwrap();
    assert_eq!(iterations[1], 4, "the class has four");
    assert!(report["prediction"]["visits"].as_u64().unwrap() > 10_000, "{report}");
}

#[test]
fn a_prediction_names_the_assumptions_of_its_bound() {
    let scratch = new_scratch();
    let arguments = ["predict", "npb.is", "--class=S", "--rounds=1"];
    let output = scratch.wideleaf(&arguments).assert().success().stderr("");
    let said = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    for words in [
        "predicted, ",
        "one after another",
        "all at once",
        "prefetched 64 visits ahead",
        "in the kernel",
        "Assumed: ",
        "windows of its memory",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}

#[test]
fn an_interrupted_prediction_leaves_nothing() {
    let scratch = new_scratch();
    let mut run = Running::start(&scratch, &["predict", "npb.cg", "--class=A", "--output=result"]);
    run.wait_for("comm", |name| name == "kernel\n");
    let process = run.0.id();
    run.signal(Signal::SIGINT);
    assert_eq!(run.end(), (Some(130), "wideleaf-lab: interrupted\n".to_owned()));
    assert_eq!(scratch.names(), [""; 0]);
    assert_eq!(children_of(process), [0; 0]);
}

#[test]
fn an_interrupted_recording_ends_its_process() {
    let scratch = new_scratch();
    let run = Running::start(&scratch, &["predict", "npb.cg", "--class=A", "--output=result"]);
    let process = run.0.id();
    let recorder = loop {
        if let [recorder, ..] = children_of(process)[..] {
            break recorder;
        }
        std::thread::yield_now();
    };
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end(), (Some(130), "wideleaf-lab: interrupted\n".to_owned()));
    assert_eq!(scratch.names(), [""; 0]);
    assert!(!std::path::Path::new(&format!("/proc/{recorder}")).exists());
}

/// Processes with this parent (proc(5): the fourth field of `stat`).
fn children_of(parent: u32) -> Vec<u32> {
    let parent_of = |process: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(|process| parent_of(*process) == Some(parent)).collect()
}

#[test]
fn what_cannot_be_predicted_is_refused_in_one_line() {
    let scratch = new_scratch();
    scratch.refuses(&["predict", "nothing"], 2, &["no such kernel", "wideleaf kernels"]);
    scratch.refuses(&["predict", "gups", "--class", "A"], 2, &["gups has no classes"]);
    scratch.refuses(&["predict", "gups", "--log2-words", "60"], 2, &["log2_words"]);
}
