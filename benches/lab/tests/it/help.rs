//! Help of the laboratory's commands, refused times, and the names of numbers in its results.

use crate::program::new_scratch;
use clap::{Command, CommandFactory as _};
use predicates::prelude::*;
use serde_json::Value;
use wideleaf::moved_commands::{IN_LAB, PREDICT};
use wideleaf_lab::args::Cli;
use wideleaf_testing::json::numbers_without_unit;

/// Words that lead to each command below this one, hidden commands too.
fn paths(command: &Command) -> Vec<Vec<String>> {
    let below = |below: &Command| {
        let name = below.get_name().to_owned();
        let rests = [vec![Vec::new()], paths(below)].concat();
        rests.into_iter().map(move |rest| [vec![name.clone()], rest].concat())
    };
    command.get_subcommands().flat_map(below).collect()
}

#[test]
fn every_command_has_help() {
    let scratch = new_scratch();
    let paths = paths(&Cli::command());
    for path in &paths {
        let arguments: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let shown = scratch.wideleaf(&arguments).assert().success().stderr("").get_output().stdout.clone();
        let text = String::from_utf8(shown).unwrap();
        assert!(text.contains(&format!("\nUsage: wideleaf-lab {}", path.join(" "))), "{arguments:?}: {text}");
        assert!(!text.starts_with("Usage:"), "{arguments:?} does not say what it does: {text}");
    }
    assert!(paths.len() > 20, "{paths:?}");
}

#[test]
fn the_commands_that_wideleaf_refers_to_are_here() {
    let program = Cli::command();
    for name in [&IN_LAB[..], &[PREDICT]].concat() {
        assert!(program.find_subcommand(name).is_some_and(|command| !command.is_hide_set()), "{name}");
    }
}

#[test]
fn help_has_examples_and_the_words_of_a_linux_guest() {
    let scratch = new_scratch();
    for (arguments, words) in [
        (&["simulate", "--help"][..], "Examples:"),
        (&["predict", "--help"], "Examples:"),
        (&["image", "linux", "--help"], "wideleaf.page=4k|thp|2m|1g"),
        (&["--help"], "First steps:"),
    ] {
        scratch.wideleaf(arguments).assert().success().stdout(predicate::str::contains(words));
    }
}

#[test]
fn the_list_has_the_experiments_and_then_the_scenarios_with_their_command() {
    let list = new_scratch().wideleaf(&["experiment", "list"]).assert().success();
    let text = String::from_utf8(list.get_output().stdout.clone()).unwrap();
    let (experiments, scenarios) = text.split_once("\nScenarios, run in the source folder:\n").unwrap();
    assert!(experiments.contains("two-dimensional") && !experiments.contains("half_sparse"), "{text}");
    for word in ["half_sparse", "cargo bench", "4 min"] {
        assert!(scenarios.contains(word), "no {word:?} in {scenarios}");
    }
}

#[test]
fn a_budget_of_no_time_is_refused() {
    let wrong = ["experiment", "run", "quick", "--budget", "0s"];
    let refused = new_scratch().wideleaf(&wrong).assert().code(2).stdout("");
    refused.stderr(predicate::str::contains("the time is zero: omit --budget"));
}

#[test]
fn every_number_of_a_simulation_in_json_has_its_unit_in_its_name() {
    let scratch = new_scratch();
    let run = ["run", "--native", "gups", "--cmdline=log2_words=16", "--memory", "64M", "--record=f"];
    scratch.wideleaf(&run).assert().success();
    let simulated = scratch.wideleaf(&["simulate", "--recording=f", "--format=json"]).assert().success();
    let simulation: Value = serde_json::from_slice(&simulated.get_output().stdout).unwrap();
    assert_eq!(numbers_without_unit("", &simulation), [""; 0]);
}

#[test]
fn an_unknown_log_level_is_refused_in_one_line() {
    let scratch = new_scratch();
    let refused = scratch.wideleaf(&["experiment", "list"]).env("WIDELEAF_LOG", "wideleaf=loud").assert().code(2);
    refused.stderr(predicate::str::starts_with("wideleaf-lab: cannot use WIDELEAF_LOG=wideleaf=loud: "));
}
