//! The user's view of `wideleaf-lab experiment`: finished runs are kept, however the experiment ends.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::new_scratch;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;
use wideleaf_testing::scratch::Running;

/// Arguments of three runs per round, half a second each.
const SHORT: [&str; 5] = ["experiment", "run", "quick", "--case", "EP W"];

fn results(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Number of runs in a file; zero if there is no file yet.
fn runs(path: &Path) -> usize {
    if path.exists() { results(path)["runs"].as_array().unwrap().len() } else { 0 }
}

fn wait_for_runs(path: &Path, wanted: usize) {
    let began = Instant::now();
    while runs(path) < wanted {
        assert!(began.elapsed() < Duration::from_secs(120), "no {wanted} runs in {}", path.display());
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_short_experiment_has_a_run_of_each_arm_and_describes_its_machine() {
    let scratch = new_scratch();
    let run = scratch.wideleaf(&[&SHORT[..], &["--rounds=1", "--output=quick.json"]].concat()).assert().code(0);
    let text = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    for words in ["auto : base", "EP W", "fewer than six pairs", "not controlled"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let results = results(&scratch.path("quick.json"));
    assert_eq!(results["is_complete"], true);
    let arms: Vec<_> = results["runs"].as_array().unwrap().iter().map(|run| run["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["base", "auto", "huge"]);
    let figures =
        results["runs"].as_array().unwrap().iter().map(|run| &run["outcome"]["measured"]["metrics"]["figure"]);
    assert!(
        figures.clone().all(|figure| figure.as_f64().is_some_and(|figure| figure > 0.0)),
        "{:?}",
        figures.collect::<Vec<_>>()
    );
    assert_eq!(scratch.names(), ["quick.json"], "nothing else is left");
}

#[test]
fn an_interrupted_experiment_keeps_its_runs_and_resumes_with_the_others() {
    let scratch = new_scratch();
    let file = scratch.path("quick.json");
    let running = Running::start(&scratch, &[&SHORT[..], &["--rounds=4", "--output=quick.json"]].concat());
    wait_for_runs(&file, 2);
    running.signal(Signal::SIGINT);
    let (code, words) = running.end();
    assert_eq!(code, Some(130), "{words}");
    assert!(words.contains("continue with `wideleaf-lab experiment run quick --resume quick.json`"), "{words}");
    let (before, made) = (results(&file), runs(&file));
    assert!((2..12).contains(&made), "{made}");
    assert_eq!(scratch.names(), ["quick.json"]);

    scratch.wideleaf(&["experiment", "run", "quick", "--resume=quick.json"]).assert().code(0);
    let after = results(&file);
    assert_eq!((runs(&file), &after["is_complete"]), (12, &Value::Bool(true)));
    let whole_rounds = made - made % 3;
    let (kept, of_broken_round) = before["runs"].as_array().unwrap().split_at(whole_rounds);
    assert_eq!(&after["runs"].as_array().unwrap()[..whole_rounds], kept, "what was run is as it was");
    let aside = after["set_aside"].as_array().map_or(&[][..], Vec::as_slice);
    assert_eq!(aside, of_broken_round, "made again in the second session, and not lost");
    assert_eq!(after["started"], before["started"]);
}

#[test]
fn a_resumed_experiment_repeats_a_failed_run() {
    let scratch = new_scratch();
    let file = scratch.path("quick.json");
    scratch.wideleaf(&[&SHORT[..], &["--rounds=1", "--output=quick.json"]].concat()).assert().code(0);
    let mut before = results(&file);
    before["runs"][1]["outcome"] = serde_json::json!({ "failed": "no pages were left" });
    fs::write(&file, before.to_string()).unwrap();
    scratch.wideleaf(&["experiment", "run", "quick", "--resume=quick.json"]).assert().code(0);
    let after = results(&file);
    let all = after["runs"].as_array().unwrap();
    let was_measured = |arm: &str| all.iter().any(|run| run["arm"] == arm && run["outcome"]["measured"].is_object());
    assert!(all.len() == 3 && ["base", "auto", "huge"].into_iter().all(was_measured), "{after}");
}

#[test]
fn results_of_another_build_or_machine_are_not_resumed_and_no_results_are_replaced() {
    let scratch = new_scratch();
    let file = scratch.path("quick.json");
    scratch.wideleaf(&[&SHORT[..], &["--rounds=1", "--output=quick.json"]].concat()).assert().code(0);
    let same = scratch.wideleaf(&["experiment", "run", "quick", "--resume=quick.json"]).assert().code(0);
    same.stderr(predicates::str::contains("nothing was run: the results are of 20"));
    let again = [&SHORT[..], &["--output=quick.json"]].concat();
    scratch.refuses(&again, 7, &["cannot write --output", "quick.json: it exists", "--resume", "name a new file"]);
    let mut other = results(&file);
    other["environment"]["wideleaf"] = "1.0 (abc)".into();
    other["environment"]["thp"][0] = "sometimes".into();
    fs::write(&file, other.to_string()).unwrap();
    let words = ["cannot resume", "build: 1.0 (abc) there, ", "THP: sometimes, ", "move the file away and begin anew"];
    scratch.refuses(&["experiment", "run", "quick", "--resume=quick.json"], 2, &words);
    assert_eq!(results(&file), other, "the file is as it was");
}

#[test]
fn evidence_of_another_machine_is_not_presented_as_new() {
    let scratch = new_scratch();
    let mut other = crate::experiment_reports::results("evidence", 1.5);
    other.environment.cpu = "Another CPU".into();
    crate::experiment_reports::file(&scratch, "wideleaf-evidence.json", &other);
    let words = ["cannot resume", "wideleaf-evidence.json", "CPU: Another CPU there, ", "begin anew"];
    scratch.refuses(&["experiment", "evidence"], 2, &words);
}

#[test]
fn a_budget_ends_an_experiment_between_two_rounds_and_the_report_says_that_it_is_incomplete() {
    let scratch = new_scratch();
    let arguments = [&SHORT[..], &["--rounds=500", "--budget=4s", "--output=quick.json"]].concat();
    let run = scratch.wideleaf(&arguments).assert().code(0);
    let text = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    assert!(text.contains("This is not all of it"), "{text}");
    let made = runs(&scratch.path("quick.json"));
    assert!(made >= 3 && made.is_multiple_of(3), "whole rounds, not {made} runs");
}

#[test]
fn an_experiment_with_a_built_in_time_limit_is_complete_after_that_limit_also_when_resumed() {
    let scratch = new_scratch();
    let file = scratch.path("quick.json");
    scratch.wideleaf(&[&SHORT[..], &["--budget=4s", "--output=quick.json"]].concat()).assert().code(0);
    let mut before = results(&file);
    assert_eq!(before["is_complete"], false);
    before["elapsed_s"] = serde_json::json!(1000.0);
    fs::write(&file, before.to_string()).unwrap();
    let resumed = scratch.wideleaf(&["experiment", "run", "quick", "--resume=quick.json"]).assert().code(0);
    let text = String::from_utf8(resumed.get_output().stdout.clone()).unwrap();
    assert!(!text.contains("This is not all of it"), "{text}");
    let after = results(&file);
    assert_eq!((&after["runs"], &after["is_complete"]), (&before["runs"], &Value::Bool(true)));
}

/// A file system of 64 KiB. A few runs fit, also twice while the file is replaced; a hundred do not.
struct Small(std::path::PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_loses_no_stored_run() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: only root may mount the small file system of this test");
    }
    let scratch = new_scratch();
    let folder = scratch.path("small");
    fs::create_dir(&folder).unwrap();
    mount(Some("none"), &folder, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
    let _small = Small(folder.clone());
    let file = folder.join("quick.json");
    let arguments = [&SHORT[..], &["--rounds=100", "--output=small/quick.json"]].concat();
    let (code, words) = Running::start(&scratch, &arguments).end();
    assert_eq!(code, Some(7), "{words}");
    for word in ["No space left", "--resume small/quick.json"] {
        assert!(words.contains(word), "no {word:?} in {words}");
    }
    assert!(runs(&file) > 0, "the file is whole");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "and alone");
}

#[test]
fn an_arm_that_is_named_runs_beside_the_first_and_no_other_does() {
    let scratch = new_scratch();
    let run = scratch.wideleaf(&[&SHORT[..], &["--arm=huge", "--dry-run"]].concat()).assert().code(0);
    let text = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    let arms: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("EP W, ")?.split(':').next()).collect();
    assert_eq!(arms, ["base", "huge"], "{text}");
}

#[test]
fn an_invalid_experiment_or_file_is_refused_in_one_line() {
    let scratch = new_scratch();
    scratch.refuses(&["experiment", "run", "qick"], 2, &["cannot find the experiment \"qick\"", "did you mean quick?"]);
    scratch.refuses(&["experiment", "run", "quick", "--case=EP Z"], 2, &["cannot run --case \"EP Z\"", "EP W"]);
    let words = ["cannot run --arm \"hugh\"", "the arms are base; auto; huge"];
    scratch.refuses(&["experiment", "run", "quick", "--arm=hugh"], 2, &words);
    scratch.refuses(
        &["experiment", "run", "quick", "--output=no/such/folder.json"],
        7,
        &["cannot write --output no/such/folder.json"],
    );
    scratch.refuses(&["experiment", "report", "missing.json"], 3, &["cannot read missing.json"]);
    let other = scratch.file("other.json", b"{\"wideleaf_experiment\": 99}");
    scratch.refuses(&["experiment", "report", &other], 3, &["its format is 99", "format 1"]);
    let foreign = scratch.file("foreign.json", b"{\"figure\": 1}");
    scratch.refuses(&["experiment", "report", &foreign], 3, &["is not a file of results"]);
    let broken = scratch.file("broken.json", b"{\"wideleaf_experiment\": 1");
    scratch.refuses(&["experiment", "run", "quick", "--resume", &broken], 3, &["broken.json"]);
}
