//! Help of every command, and what becomes of commands that `wideleaf` once had.

use clap::{Command, CommandFactory as _};
use wideleaf::args::Cli;
use wideleaf::moved_commands::PREDICT;
use wideleaf_kernels::KERNELS;

use crate::program::new_scratch;

/// Visible commands of the last version without `wideleaf-lab`.
const FORMER: [&str; 21] = [
    "run",
    "demo",
    "experiment",
    "kernels",
    "simulate",
    "trace",
    "doctor",
    "tlbcost",
    "image",
    "list",
    "info",
    "explain",
    "set",
    "vm",
    "attach",
    "detach",
    "reload",
    "top",
    "hook",
    "pool",
    "completions",
];

/// Words that lead to each command below this one, hidden commands too. `any` stands for a positional argument.
fn paths(command: &Command) -> Vec<Vec<String>> {
    let mut paths_below = Vec::new();
    for below in command.get_subcommands() {
        let mut path: Vec<String> = command.get_positionals().map(|_| "any".to_owned()).collect();
        path.push(below.get_name().to_owned());
        paths_below.extend(paths(below).into_iter().map(|rest| [&path[..], &rest].concat()));
        paths_below.push(path);
    }
    paths_below
}

#[test]
fn every_command_has_help() {
    let scratch = new_scratch();
    let paths = paths(&Cli::command());
    for path in &paths {
        let arguments: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let shown = scratch.wideleaf(&arguments).assert().success().stderr("").get_output().stdout.clone();
        let text = String::from_utf8(shown).unwrap();
        let usage = text.lines().find_map(|line| line.strip_prefix("Usage: wideleaf ")).unwrap_or_default();
        assert!(usage.split(' ').any(|word| Some(word) == path.last().map(String::as_str)), "{arguments:?}: {text}");
        assert!(!text.starts_with("Usage:"), "{arguments:?} does not say what it does: {text}");
    }
    assert!(paths.len() > 30, "{paths:?}");
}

#[test]
fn help_has_exit_codes_examples_and_the_tables_of_kernels_and_policies() {
    let scratch = new_scratch();
    let help = |arguments: &[&str]| {
        let output = scratch.wideleaf(arguments).assert().success().stderr("").get_output().stdout.clone();
        String::from_utf8(output).unwrap()
    };
    assert!(help(&["--help"]).contains("Exit codes:"));
    let run = help(&["run", "--help"]);
    assert!(run.contains("Examples:"));
    for kernel in KERNELS {
        assert!(run.contains(&format!("  {}: ", kernel.name)), "{run}");
        let details = help(&["kernels", kernel.name.as_str()]);
        assert!(
            kernel.parameters.iter().all(|parameter| details.contains(&format!(" {}= ", parameter.name))),
            "{details}"
        );
    }
    assert!(help(&["demo", "--help"]).contains("Examples:"));
    assert!(help(&["doctor", "--help"]).contains("Examples:"));
    let policies = help(&["run", "--policy", "help"]);
    assert!(policies.contains("never") && policies.contains("greedy"), "{policies}");
    assert_eq!(help(&["run", "gups", "--policy", "help"]), policies);
}

#[test]
fn a_former_command_still_exists_or_its_refusal_names_the_present_one() {
    let scratch = new_scratch();
    let present = Cli::command();
    for name in FORMER.into_iter().filter(|name| present.find_subcommand(name).is_none()) {
        let now = format!("run `wideleaf-lab {name}`");
        for arguments in [&[name][..], &[name, "list"], &[name, "--help"], &["help", name]] {
            scratch.refuses(arguments, 2, &[&now]);
        }
    }
    let now = format!("run `wideleaf-lab {PREDICT}`");
    for arguments in [&["tlbcost", "--predict", "gups", "--log2-words=26"][..], &["tlbcost", "--predict=gups"]] {
        scratch.refuses(arguments, 2, &[&now]);
    }
    // The names mean nothing elsewhere.
    for arguments in [&["pool", "trace"][..], &["tlbcost", "--image"]] {
        let wrong = scratch.wideleaf(arguments).assert().code(2).get_output().stderr.clone();
        assert!(String::from_utf8(wrong).unwrap().starts_with("error: un"), "{arguments:?}");
    }
}
