//! `wideleaf tlbcost` as a person types it: a small measurement in a process, the same in a guest and kept, and what is refused before anything
//! runs. Whether three runs agree depends on the machine's load, so what is checked holds either way.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[expect(dead_code, reason = "other tests use the rest of it")]
mod program;

use nix::sys::signal::Signal;
use program::{Running, Scratch};
use serde_json::Value;
use wideleaf_guest_tests::has_kvm;

fn report_of(scratch: &Scratch, arguments: &[&str]) -> Value {
    let all = [&["tlbcost", "--format=json"], arguments].concat();
    let output = scratch.wideleaf(&all).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// A cell tells levels exactly where three runs agreed, and stops at ten.
fn is_honest(cell: &Value) {
    let (agreed, runs, levels) = (&cell["agreed"], cell["runs"].as_u64().unwrap(), cell["levels"].as_array().unwrap());
    assert_eq!(*agreed == true, !levels.is_empty(), "{cell}");
    assert!((3..=10).contains(&runs) && (*agreed == true || runs == 10), "{cell}");
    for level in levels {
        let [low, median, high] = ["lowest", "median", "highest"].map(|name| level["miss_ns"][name].as_f64().unwrap());
        assert!(0.0 < low && low <= median && median <= high, "{cell}");
        assert_eq!(level["reach_bytes"].as_u64().unwrap(), level["entries"].as_u64().unwrap() * 4096, "{cell}");
    }
}

#[test]
fn a_process_is_measured_until_its_runs_agree_or_it_says_that_they_did_not() {
    let scratch = Scratch::new();
    let report = report_of(&scratch, &["--native", "--host-page=4k", "--bytes=1M"]);
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(
        (cells.len(), &cells[0]["place"], &cells[0]["entry_page"]),
        (1, &"native".into(), &"4k".into()),
        "{report}"
    );
    is_honest(&cells[0]);
    assert_eq!(report["method"], "calibrated");
    assert!(report["walk_cost"].as_str().unwrap().contains("cycles a TLB miss at 4k over 4k"), "{report}");
    assert_eq!(scratch.names(), [""; 0], "nothing is left behind");
}

#[test]
fn pages_that_are_not_to_be_had_are_skipped_with_the_reason() {
    let report = report_of(&Scratch::new(), &["--native", "--host-page=1g"]);
    let why = report["cells"][0]["skipped"].as_str().unwrap();
    // Without a pool that is the reason, and with one that a chase of 1 GiB pages needs eight of them.
    assert!(why.contains("1 GiB") || why.contains("hugepages-1048576kB"), "{why}");
}

#[test]
fn what_agreed_in_a_guest_is_kept_and_what_did_not_is_not() {
    if !has_kvm() {
        return;
    }
    let scratch = Scratch::new();
    let path = scratch.path("cost.json");
    let save = format!("--save={}", path.display());
    // 1 MiB shows no more than one level, so there is no cost of a whole miss to keep, and no file.
    let arguments = ["tlbcost", "--guest", "--guest-page=4k", "--host-page=4k", "--bytes=1M", &save];
    scratch.refuses(&arguments, 4, &["nothing was saved", "--bytes"]);
}

/// A prediction that ran to its end is whole, whatever the machine's load made of its figures.
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
    let scratch = Scratch::new();
    let report = report_of(&scratch, &["--predict=gups", "--log2-words=16", "--rounds=1"]);
    is_whole(&report);
    // 262,144 updates, each a load and a store of one line. Reckoned from HPCC's sequence alone, whose 128 streams are related: a ninth of
    // them come again to a line that is among those kept in mind.
    let visits = report["prediction"]["visits"].as_u64().unwrap();
    assert_eq!(visits, 233_302);
    assert_eq!(report["prediction"]["replayed"], visits);
    assert_eq!(report["prediction"]["iterations"], serde_json::json!([0, 0]));
    assert_eq!(scratch.names(), [""; 0], "nothing is left behind");
}

#[test]
fn a_benchmark_with_iterations_is_predicted_from_one_of_them() {
    let report = report_of(&Scratch::new(), &["--predict=npb.mg", "--class=S", "--rounds=1"]);
    is_whole(&report);
    let iterations = report["prediction"]["iterations"].as_array().unwrap();
    assert_eq!(iterations[1], 4, "the class has four");
    assert!(report["prediction"]["visits"].as_u64().unwrap() > 10_000, "{report}");
}

#[test]
fn a_prediction_says_what_its_bound_assumes() {
    let scratch = Scratch::new();
    let arguments = ["tlbcost", "--predict=npb.is", "--class=S", "--rounds=1"];
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
fn a_prediction_that_is_interrupted_leaves_nothing() {
    let scratch = Scratch::new();
    let mut run = Running::start(&scratch, &["tlbcost", "--predict=npb.cg", "--class=A", "--output=result"]);
    run.wait_for("comm", |name| name == "kernel\n");
    let process = run.0.id();
    run.signal(Signal::SIGINT);
    assert_eq!(run.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
    assert_eq!(scratch.names(), [""; 0]);
    assert_eq!(children_of(process), [0; 0]);
}

#[test]
fn an_interrupted_recording_takes_its_process_along() {
    let scratch = Scratch::new();
    let run = Running::start(&scratch, &["tlbcost", "--predict=npb.cg", "--class=A", "--output=result"]);
    let process = run.0.id();
    let recorder = loop {
        if let [recorder, ..] = children_of(process)[..] {
            break recorder;
        }
        std::thread::yield_now();
    };
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
    assert_eq!(scratch.names(), [""; 0]);
    assert!(!std::path::Path::new(&format!("/proc/{recorder}")).exists());
}

/// Processes whose parent is this one (proc(5): the fourth field of `stat`).
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
fn what_cannot_be_is_refused_in_one_line() {
    let scratch = Scratch::new();
    scratch.refuses(&["tlbcost", "--predict", "nothing"], 2, &["no such kernel", "wideleaf kernels"]);
    scratch.refuses(&["tlbcost", "--predict", "gups", "--class", "A"], 2, &["gups has no classes"]);
    scratch.refuses(&["tlbcost", "--predict", "gups", "--log2-words", "60"], 2, &["log2_words"]);
    scratch.refuses(&["tlbcost", "--vm", "no-such-vm"], 2, &["no-such-vm"]);
    scratch.refuses(&["tlbcost", "--native", "--output", "/nowhere/at/all"], 7, &["/nowhere"]);
}

#[test]
fn guests_without_kvm_are_refused() {
    if !has_kvm() {
        Scratch::new().refuses(&["tlbcost", "--guest"], 4, &["cannot run a guest here", "--native"]);
    }
}
