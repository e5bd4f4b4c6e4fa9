//! The alerts, evaluated by Prometheus' own tool.

use std::path::Path;
use std::process::Command;

use wideleaf_testing::{Need, is_there};

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

/// Whether promtool is installed. Prints why not, or fails where `WIDELEAF_REQUIRE` names it.
fn can_run() -> bool {
    let version = Command::new("promtool").arg("--version").output();
    is_there(Need::Promtool, version.map(drop).map_err(|error| format!("promtool: {error}")))
}

fn promtool(arguments: &[&str]) -> String {
    let output = Command::new("promtool").args(arguments).current_dir(PACKAGING).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn each_alert_fires_when_it_should_and_not_before() {
    if !can_run() {
        return;
    }
    promtool(&["test", "rules", "alerts-test.yaml"]);
    let rules = promtool(&["check", "rules", "alerts.yaml"]);
    let tested = std::fs::read_to_string(Path::new(PACKAGING).join("alerts-test.yaml")).unwrap();
    let rules_text = std::fs::read_to_string(Path::new(PACKAGING).join("alerts.yaml")).unwrap();
    let names: Vec<&str> = rules_text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(rules.contains(&format!("{} rules found", names.len())), "{rules}");
    for name in names {
        // Once where nothing is wrong, and once where it fires.
        assert!(tested.matches(name).count() >= 2, "{name} has no test");
    }
}

#[test]
fn a_rule_that_says_another_thing_is_noticed() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(Path::new(PACKAGING).join(name)).unwrap();
    let changed = read("alerts.yaml").replace("wideleaf_vm_guarantee_met == 0", "wideleaf_vm_guarantee_met == 2");
    std::fs::write(folder.path().join("alerts.yaml"), changed).unwrap();
    std::fs::write(folder.path().join("alerts-test.yaml"), read("alerts-test.yaml")).unwrap();
    let test = folder.path().join("alerts-test.yaml");
    let output = Command::new("promtool").args(["test", "rules"]).arg(test).output().unwrap();
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
