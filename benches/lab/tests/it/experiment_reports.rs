//! Reports and comparisons of existing results, without any run.

use std::collections::BTreeMap;
use std::fs;

use crate::program::new_scratch;
use predicates::prelude::*;
use wideleaf_experiments::definition::{Arm, Case, Cell, Experiment, Job};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::{Environment, FORMAT, Measured, Results, Run, RunOutcome, Sample};
use wideleaf_testing::scratch::Scratch;

/// Six rounds of two arms; `auto` is `ratio` times as fast as `base`.
pub fn results(name: &str, ratio: f64) -> Results {
    let arm = |name: &str| Arm { name: name.into(), summary: format!("arm {name}") };
    let job = || Cell::of(Job::run(&["gups"], 1.0));
    let experiment = Experiment {
        name: name.into(),
        title: "By hand".into(),
        question: "Which?".into(),
        source: None,
        rounds: 6,
        arms: vec![arm("base"), arm("auto")],
        cases: vec![Case { name: "GUPS".into(), unit: "GUP/s".into(), working_set_mib: 1, cells: vec![job(), job()] }],
    };
    let run = |(round, arm): (u32, &str)| {
        let figure = f64::from(round) * if arm == "auto" { ratio } else { 1.0 };
        let series = vec![Sample { huge_mib: 2.0, base_mib: 2.0, ..Sample::default() }];
        let measured = Measured { metrics: BTreeMap::from([(Metric::Figure, figure)]), series, ..Measured::default() };
        let outcome = RunOutcome::Measured(measured);
        Run { case: "GUPS".into(), arm: arm.into(), round, at_s: 0.0, took_s: 1.0, load_1m: 0.0, outcome }
    };
    let turns = (1..=6).flat_map(|round| ["base", "auto"].map(|arm| (round, arm)));
    Results {
        wideleaf_experiment: FORMAT,
        runs: turns.map(run).collect(),
        experiment,
        environment: Environment::default(),
        started: "2026-01-01T00:00:00Z".into(),
        ended: "2026-01-01T00:01:00Z".into(),
        elapsed_s: 60.0,
        is_complete: true,
    }
}

pub fn file(scratch: &Scratch, name: &str, results: &Results) {
    scratch.file(name, &serde_json::to_vec(results).unwrap());
}

#[test]
fn a_report_has_every_form_and_links_to_its_pictures() {
    let scratch = new_scratch();
    file(&scratch, "r.json", &results("by-hand", 1.5));
    let report = |more: &[&str]| scratch.wideleaf(&[&["experiment", "report", "r.json"], more].concat()).assert();
    report(&[]).success().stderr("").stdout(predicate::str::contains("1.500 (1.500 - 1.500)"));
    let arguments = ["--format=markdown", "--output=r.md", "--html=r.html", "--svg=pictures"];
    report(&arguments).success().stderr("").stdout("");
    let markdown = fs::read_to_string(scratch.path("r.md")).unwrap();
    assert!(markdown.contains("| GUPS | 1.500 (1.500 - 1.500) |"), "{markdown}");
    let mut names: Vec<_> = fs::read_dir(scratch.path("pictures"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["01-ratios.svg", "02-coverage-GUPS.svg"]);
    for name in &names {
        assert!(markdown.contains(&format!("](<pictures/{name}>)")), "{name} in {markdown}");
        let svg = fs::read_to_string(scratch.path("pictures").join(name)).unwrap();
        assert!(fs::read_to_string(scratch.path("r.html")).unwrap().contains(&svg), "the same picture");
    }
}

#[test]
fn unwritable_paths_are_refused_before_any_file_is_read_or_written() {
    let scratch = new_scratch();
    file(&scratch, "r.json", &results("by-hand", 1.5));
    let refuses = |more: &[&str], code, words: &[&str]| {
        scratch.refuses(&[&["experiment", "report", "r.json"], more].concat(), code, words);
    };
    refuses(&["--svg=no/pictures"], 7, &["cannot write --svg no/pictures: there is no folder no"]);
    refuses(&["--svg=r.json"], 7, &["cannot write --svg r.json: it is not a folder"]);
    refuses(&["--html=no/r.html", "--svg=pictures"], 7, &["cannot write --html no/r.html"]);
    refuses(&["--html=x", "--output=x"], 2, &["--output and --html are both x; name two files"]);
    scratch.refuses(&["experiment", "run", "quick", "--html=no/r.html"], 7, &["cannot write --html no/r.html"]);
}

#[test]
fn a_report_does_not_replace_results_or_another_report() {
    let scratch = new_scratch();
    file(&scratch, "r.json", &results("by-hand", 1.5));
    let before = fs::read(scratch.path("r.json")).unwrap();
    let html = ["the results and --html are both ./r.json; name two files"];
    scratch.refuses(&["experiment", "report", "r.json", "--html=./r.json"], 2, &html);
    scratch.refuses(&["experiment", "compare", "r.json", "r.json", "--html=./r.json"], 2, &html);
    scratch.refuses(&["experiment", "run", "quick", "--resume=r.json", "--html=./r.json"], 2, &html);
    scratch.refuses(&["experiment", "run", "quick", "--output=r.json", "--html=./r.json"], 2, &html);
    let output = ["the results and --output are both ./r.json"];
    scratch.refuses(&["experiment", "report", "r.json", "--output=./r.json"], 2, &output);
    assert_eq!(fs::read(scratch.path("r.json")).unwrap(), before);
    let two = ["--output and --html are both ./x"];
    scratch.refuses(&["experiment", "report", "r.json", "--output=x", "--html=./x"], 2, &two);
    let plot = ["simulate", "--machine=k8", "--trace", "gups:log2_words=10", "--output=x", "--plot=./x"];
    scratch.refuses(&plot, 2, &["--plot and --output are both x; name two files"]);
    let trace = ["simulate", "--machine=k8", "--trace=r.json", "--output=./r.json"];
    scratch.refuses(&trace, 2, &["--trace and --output are both ./r.json"]);
}

#[test]
fn two_results_of_one_experiment_are_compared_and_two_experiments_are_not() {
    let scratch = new_scratch();
    file(&scratch, "a.json", &results("by-hand", 1.5));
    file(&scratch, "b.json", &results("by-hand", 1.6));
    file(&scratch, "other.json", &results("other", 1.5));
    let compare = |b: &str| scratch.wideleaf(&["experiment", "compare", "a.json", b]).assert().success().stderr("");
    compare("a.json").stdout(predicate::str::contains("intervals overlap in 1 of 1 rows"));
    let apart = compare("b.json");
    let words = ["intervals overlap in 0 of 1 rows", "1.500 (1.500 - 1.500)", "1.600 (1.600 - 1.600)", "apart"];
    words.iter().fold(apart, |apart, word| apart.stdout(predicate::str::contains(*word)));
    let words = ["A has results of by-hand, B of other", "choose results of the same experiment"];
    scratch.refuses(&["experiment", "compare", "a.json", "other.json"], 2, &words);
    let mut old = serde_json::to_value(results("by-hand", 1.5)).unwrap();
    old["wideleaf_experiment"] = 99.into();
    scratch.file("old.json", &serde_json::to_vec(&old).unwrap());
    let words = ["old.json: its format is 99", "use the version of wideleaf that wrote it"];
    scratch.refuses(&["experiment", "compare", "a.json", "old.json"], 3, &words);
}

#[test]
fn a_full_disk_does_not_hide_that_a_guest_failed() {
    let scratch = new_scratch();
    let log = "@wideleaf hello version=1 kernel=gups vcpus=1 guest_page=4k tsc_hz=0 entry=linux\n\
        @wideleaf verify status=fail errors=1 checked=9\n@wideleaf exit code=1\n";
    scratch.file("log", log.as_bytes());
    let read = scratch.wideleaf(&["image", "results", "log", "--output=/dev/full"]).assert().code(1);
    let lost = predicate::str::contains("wideleaf-lab: cannot write --output /dev/full: No space left");
    read.stderr(lost.and(predicate::str::contains("verification failed: 1 of 9")));
}

#[test]
fn the_other_program_of_a_comparison_must_be_a_wideleaf() {
    let scratch = new_scratch();
    let against =
        |program: &str| ["experiment", "run", "quick", "--dry-run", "--against", program].map(str::to_owned).to_vec();
    let refuses = |program: &str, words: &[&str]| {
        let arguments = against(program);
        scratch.refuses(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), 2, words);
    };
    refuses("nowhere", &["--against nowhere", "name another build of wideleaf"]);
    refuses("/bin/true", &["its --version does not name wideleaf"]);
    let program = scratch.program().into_os_string().into_string().unwrap();
    let arguments = against(&program);
    let dry = scratch.wideleaf(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).assert().success();
    let canonical = fs::canonicalize(&program).unwrap().display().to_string();
    dry.stdout(predicate::str::contains("base (B): ").and(predicate::str::contains(format!("{canonical} run "))));
    let arguments = ["experiment", "run", "scarce", "--dry-run", "--against", &program];
    scratch.refuses(&arguments, 2, &["scarce has no `wideleaf run` on this host", "name another experiment"]);
    assert!(scratch.names().is_empty());
}
