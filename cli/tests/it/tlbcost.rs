//! The user's view of `wideleaf tlbcost`: a small measurement in a process, the same in a guest with a saved
//! result, and refusals before any run. The machine's load decides whether three runs agree, so the checks
//! hold in either case.

use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Scratch;

fn report_of(scratch: &Scratch, arguments: &[&str]) -> Value {
    let all = [&["tlbcost", "--format=json"], arguments].concat();
    let output = scratch.wideleaf(&all).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// A cell has levels if and only if three runs agreed, and stops after ten runs.
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
fn a_process_is_measured_until_its_runs_agree_or_the_report_says_that_they_did_not() {
    let scratch = new_scratch();
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
fn unavailable_pages_are_skipped_with_the_reason() {
    let report = report_of(&new_scratch(), &["--native", "--host-page=1g"]);
    let why = report["cells"][0]["skipped"].as_str().unwrap();
    // Without a pool, that is the reason. With a pool, the reason is that a chase of 1 GiB pages needs eight of them.
    assert!(why.contains("1 GiB") || why.contains("hugepages-1048576kB"), "{why}");
}

#[test]
fn a_guests_cost_is_saved_only_if_its_runs_agreed() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let path = scratch.path("cost.json");
    let save = format!("--save={}", path.display());
    // 1 MiB shows at most one level, so there is no cost of a whole miss to save, and no file.
    let arguments = ["tlbcost", "--guest", "--guest-page=4k", "--host-page=4k", "--bytes=1M", &save];
    let ended = scratch.wideleaf(&[&arguments[..], &["--format=json"]].concat()).assert().code(4);
    let stderr = String::from_utf8(ended.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("nothing was saved") && stderr.contains("--bytes"), "{stderr}");
    let report: Value = serde_json::from_slice(&ended.get_output().stdout).unwrap();
    assert_eq!((report["cells"].as_array().unwrap().len(), &report["saved"]), (1, &Value::Null), "what was measured");
    assert!(!path.exists());
}

#[test]
fn invalid_arguments_are_refused_in_one_line() {
    let scratch = new_scratch();
    scratch.refuses(&["tlbcost", "--vm", "no-such-vm"], 2, &["no-such-vm"]);
    scratch.refuses(&["tlbcost", "--native", "--output", "/nowhere/at/all"], 7, &["/nowhere"]);
}

#[test]
fn guests_without_kvm_are_refused() {
    if !has_kvm() {
        new_scratch().refuses(&["tlbcost", "--guest"], 4, &["cannot run a guest here", "--native"]);
    }
}
