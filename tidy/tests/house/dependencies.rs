//! The house: `vmm → memory → policies`, one way; only the command line embeds the guest's side.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use regex::Regex;

use super::root;

/// The floors of the house, from the ground up: a crate may use what is in its own folder and in folders before it.
const FLOORS: [&str; 14] = [
    "policies",
    "memory",
    "snapshot",
    "guests",
    "vmm",
    "testing",
    "operator",
    "measure",
    "run",
    "cli",
    "guest-tests",
    "fleet",
    "benches",
    "fuzz",
];

/// Kinds of dependencies of a program, and all of them.
const BUILT_IN: [&str; 2] = ["dependencies", "build-dependencies"];
const ALL: [&str; 3] = ["dependencies", "build-dependencies", "dev-dependencies"];

fn manifest(folder: &str) -> toml::Table {
    let text = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
    text.parse().unwrap()
}

/// The crates of this workspace that a manifest names in these ways, for all targets or for some.
fn ours_in(manifest: &toml::Table, kinds: &[&str]) -> BTreeSet<String> {
    let targets = manifest.get("target").and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::values);
    let tables = targets.filter_map(toml::Value::as_table).chain([manifest]);
    let dependencies = tables.flat_map(|table| kinds.iter().filter_map(move |kind| table.get(*kind)?.as_table()));
    let names = dependencies.flat_map(|dependencies| dependencies.keys().cloned());
    names.filter(|name| name.starts_with("wideleaf")).collect()
}

/// The crates of this workspace that `folder`'s crate depends on in these ways.
fn ours_by(folder: &str, kinds: &[&str]) -> BTreeSet<String> {
    ours_in(&manifest(folder), kinds)
}

/// The crates of this workspace that `folder`'s crate depends on outside tests.
fn ours(folder: &str) -> BTreeSet<String> {
    ours_by(folder, &BUILT_IN)
}

/// Folders of all crates, by the crate's name.
fn folders() -> BTreeMap<String, String> {
    let workspace: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let dependencies = workspace["workspace"]["dependencies"].as_table().unwrap();
    let path = |dependency: &toml::Value| Some(dependency.get("path")?.as_str()?.to_owned());
    dependencies.iter().filter_map(|(name, dependency)| Some((name.clone(), path(dependency)?))).collect()
}

#[test]
fn no_crate_uses_a_folder_above_its_own() {
    let workspace: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let members = workspace["workspace"]["members"].as_array().unwrap().iter().map(|member| member.as_str().unwrap());
    let folders = folders();
    let floor = |folder: &str| {
        let first = folder.split('/').next().unwrap();
        FLOORS.iter().position(|floor| *floor == first)
    };
    let mut arrows = 0;
    for member in members.chain(["fuzz", "guests/image/freestanding"]).filter(|member| *member != "tidy") {
        let own = floor(member).unwrap_or_else(|| panic!("{member} is on no floor of the house"));
        // A crate may name itself, to test itself with another feature.
        for used in ours_by(member, &ALL) {
            let folder = &folders[&used];
            arrows += 1;
            assert!(
                floor(folder).is_some_and(|floor| floor <= own),
                "{member} uses {used}, which is in {folder}, above it"
            );
        }
    }
    assert!(arrows > 60, "{arrows} arrows only");
}

#[test]
fn a_dependency_for_one_target_is_seen() {
    let manifest = "[dependencies]\nwideleaf-a = '1'\n[target.'cfg(unix)'.dependencies]\nwideleaf-b = '1'\n\
                    [target.x.dev-dependencies]\nwideleaf-c = '1'\nnix = '1'";
    let manifest: toml::Table = manifest.parse().unwrap();
    assert_eq!(ours_in(&manifest, &BUILT_IN), names(&["a", "b"]));
    assert_eq!(ours_in(&manifest, &ALL), names(&["a", "b", "c"]));
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| format!("wideleaf-{name}")).collect()
}

#[test]
fn policies_depends_on_nothing_of_ours() {
    assert_eq!(ours("policies"), names(&[]));
}

#[test]
fn memory_depends_on_policies_alone() {
    assert_eq!(ours("memory"), names(&["policies"]));
}

#[test]
fn the_file_of_a_snapshot_knows_neither_guest_ram_nor_the_vmm() {
    assert_eq!(ours("snapshot"), names(&["policies"]));
}

#[test]
fn vmm_depends_on_memory_policies_and_the_lines_it_shares_with_the_guest() {
    assert_eq!(ours("vmm"), names(&["memory", "policies", "protocol"]));
}

#[test]
fn measure_depends_on_nothing_of_ours() {
    assert_eq!(ours("measure"), names(&[]));
}

#[test]
fn external_guests_are_managed_without_a_vmm_of_ours() {
    assert_eq!(ours("operator/control"), names(&[]));
    assert_eq!(ours("operator/attach"), names(&["control", "memory", "policies"]));
    assert_eq!(ours("operator/daemon"), names(&["attach", "control", "memory", "policies"]));
    // The agent of Kubernetes has no privilege: it reaches guests through the daemon's socket alone.
    assert_eq!(ours("operator/node"), names(&["control", "policies"]));
}

#[test]
fn the_guests_side_knows_nothing_of_the_host() {
    assert_eq!(ours("guests/protocol"), names(&[]));
    assert_eq!(ours("guests/kernels"), names(&["protocol"]));
    assert_eq!(ours("guests/trace"), names(&[]));
    assert_eq!(ours("guests/recorder"), names(&["kernels", "protocol", "trace"]));
    assert_eq!(ours("guests/recorder/program"), names(&["kernels", "protocol"]));
    assert!(ours("guests/image").is_disjoint(&names(&["vmm", "memory", "policies"])));
    // A Linux guest maps its memory as a host does, and is no host.
    assert_eq!(ours("guests/linux"), names(&[]));
    assert_eq!(ours("guests/linux/init"), names(&["kernels", "memory", "policies", "protocol"]));
}

/// Whether code, other than comments, has a block, a function, an implementation or an attribute that is unsafe.
fn has_unsafe_code(text: &str) -> bool {
    static COMMENT: LazyLock<Regex> = LazyLock::new(|| Regex::new("(?m)//.*$").unwrap());
    static UNSAFE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\bunsafe\b\s*[{(a-z]").unwrap());
    UNSAFE.is_match(&COMMENT.replace_all(text, ""))
}

#[test]
fn every_form_of_unsafe_code_is_seen() {
    for code in ["unsafe { f() }", "unsafe{f()}", "unsafe impl A for B {}", "pub unsafe fn f()", "#[unsafe(no_mangle)]"]
    {
        assert!(has_unsafe_code(code), "{code}");
    }
    for text in ["// SAFETY: unsafe { f() }", "//! no `unsafe` fn", "#![deny(unsafe_code)]", "'unsafe-inline'"] {
        assert!(!has_unsafe_code(text), "{text}");
    }
}

#[test]
fn unsafe_code_is_in_its_few_modules_only() {
    let root = root();
    let allowed = [
        "memory/src/sys",
        "vmm/src/kvm",
        "vmm/src/sys",
        "vmm/src/sandbox/violation.rs",
        "vmm/tests/sandbox.rs",
        "benches/simulator/src/sets/vector.rs",
        "guests/image/freestanding",
        "guests/kernels/src/arena.rs",
        "guests/kernels/src/planes.rs",
        "guests/kernels/src/team.rs",
        "guests/kernels/src/vectors.rs",
        "guests/recorder/program/src/callbacks.rs",
    ];
    let floors = FLOORS.iter().filter(|floor| **floor != "fuzz");
    let mut folders: Vec<_> = floors.map(|floor| root.join(floor)).filter(|folder| folder.is_dir()).collect();
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let relative = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            let is_allowed = allowed.iter().any(|allowed| relative.starts_with(allowed));
            if path.is_dir() && path.file_name().unwrap() != "target" {
                folders.push(path);
            } else if relative.ends_with(".rs") && !is_allowed {
                files += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!has_unsafe_code(&text), "{relative} has unsafe code; {allowed:?} are the places for it");
            }
        }
    }
    assert!(files > 20, "looked at {files} files only");
}
