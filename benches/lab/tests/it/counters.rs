//! The CPU's own counters at the door where the kernel has them, perf_event_open(2): `counters/fake_counters.c` answers
//! there instead of the kernel, because the development machines have none.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;
use tempfile::TempDir;
use wideleaf_testing::c_program::compiled;
use wideleaf_testing::scratch::Scratch;

/// The folder of the program that runs a command with counters, and its path.
static FAKE_COUNTERS: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/counters/fake_counters.c");
    let program = compiled(&source, folder.path());
    (folder, program)
});

/// Runs the laboratory's program where counters can be opened, or fail with this errno.
fn with_counters(errno: Option<&str>, arguments: &[&str]) -> (Scratch, String) {
    let scratch = Scratch::of(&FAKE_COUNTERS.1);
    let errno = errno.map(|number| vec!["--errno", number]).unwrap_or_default();
    let all = [&errno[..], &[env!("CARGO_BIN_EXE_wideleaf-lab")], arguments].concat();
    let output = scratch.wideleaf(&all).assert().success();
    let said = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    (scratch, said)
}

const PREDICT: [&str; 5] = ["predict", "gups", "--log2-words=16", "--rounds=1", "--format=json"];

/// Whether the table of events has this machine's CPU.
fn is_known(pmu: &Value) -> bool {
    let pmu = pmu.as_str().unwrap();
    assert!(pmu.contains("not run on hardware yet") || pmu.starts_with("no table of events for "), "{pmu}");
    !pmu.starts_with("no table")
}

#[test]
fn a_prediction_counts_the_walks_of_its_measured_part() {
    let (_, said) = with_counters(None, &PREDICT);
    let report: Value = serde_json::from_str(&said).unwrap();
    if !is_known(&report["pmu"]) {
        println!("skipped: {}", report["pmu"]);
        return;
    }
    let count = |name: &str| report["prediction"]["counted"][name].as_u64().unwrap();
    // 3000 cycles and 30 walks in a microsecond of some hundred: the counters are not read at the same moment.
    let cycles_a_walk = count("cycles") as f64 / count("walks") as f64;
    assert!((5.0..2000.0).contains(&cycles_a_walk), "{cycles_a_walk}");
}

/// Walks of the timed part of a run of GUPS; `None` if none were counted.
fn walks_of_gups(errno: Option<&str>, place: &[&str]) -> Option<Value> {
    let gups = ["run", "gups", "--cmdline=log2_words=16", "--memory=64M", "--count-walks", "--format=json"];
    let (_, said) = with_counters(errno, &[&gups[..], place].concat());
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["verification"]["passed"], true);
    let phases = report["phases"].as_array().unwrap();
    phases.iter().find(|phase| phase["name"] == "update").unwrap().get("walks").cloned()
}

#[test]
fn a_run_counts_the_walks_of_its_guest_or_process_between_the_marks_of_its_timed_part() {
    let (_, said) = with_counters(None, &PREDICT);
    let report: Value = serde_json::from_str(&said).unwrap();
    if !is_known(&report["pmu"]) {
        println!("skipped: {}", report["pmu"]);
        return;
    }
    let has_kvm = Path::new("/dev/kvm").exists();
    let places = [&["--native"][..], &["--no-daemon"]].into_iter().take(if has_kvm { 2 } else { 1 });
    for place in places {
        let walks = walks_of_gups(None, place).unwrap_or_else(|| panic!("{place:?}: they are counted"));
        let count = |name: &str| walks[name].as_u64().unwrap() as f64;
        // 3000 cycles and 30 walks in a microsecond of each counter: they are not read at the same moment.
        assert!((5.0..2000.0).contains(&(count("cycles") / count("walks"))), "{place:?}: {walks}");
        assert_eq!(walks_of_gups(Some("13"), place), None, "{place:?}");
    }
    assert_eq!(walks_of_gups(Some("2"), &["--native"]), None);
}

#[test]
fn without_counters_a_prediction_is_whole_and_says_why_they_are_missing() {
    for (errno, reason) in [("13", "run as root, or `sysctl kernel.perf_event_paranoid=1`"), ("2", "no such counter")] {
        let (_, said) = with_counters(Some(errno), &PREDICT);
        let report: Value = serde_json::from_str(&said).unwrap();
        assert!(report["pmu"].as_str().unwrap().contains(reason), "{}", report["pmu"]);
        assert_eq!(report["prediction"]["counted"], Value::Null);
        assert!(report["prediction"]["visits"].as_u64() > Some(0), "{report}");
    }
}

#[test]
fn the_page_of_evidence_names_the_events_or_the_reason_without_them() {
    let evidence = ["experiment", "run", "evidence", "--budget=1s", "--output=e.json", "--html=e.html"];
    let page = |errno| {
        let (scratch, _) = with_counters(errno, &evidence);
        let results: Value = serde_json::from_slice(&std::fs::read(scratch.path("e.json")).unwrap()).unwrap();
        (results["environment"].clone(), std::fs::read_to_string(scratch.path("e.html")).unwrap())
    };
    let no_pmu = "There is no PMU here";
    let (environment, html) = page(None);
    assert_eq!(environment["has_pmu"], true);
    is_known(&environment["walk_events"]);
    assert!(!html.contains(no_pmu) && html.contains("own events of page walks"), "{environment}");
    let (environment, html) = page(Some("13"));
    assert_eq!(environment["has_pmu"], false);
    assert!(html.contains(no_pmu) && html.contains("sysctl kernel.perf_event_paranoid=1"), "{environment}");
}
