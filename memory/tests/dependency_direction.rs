//! The dependencies of the crates: `vmm → memory → policies`, one way; only the command line embeds the guest's
//! side.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::path::Path;

/// The crates of this workspace that `folder`'s crate depends on outside tests.
fn ours(folder: &str) -> BTreeSet<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    ["dependencies", "build-dependencies"]
        .iter()
        .filter_map(|kind| manifest.get(*kind)?.as_table())
        .flat_map(|dependencies| dependencies.keys().cloned())
        .filter(|name| name.starts_with("wideleaf"))
        .collect()
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
fn vmm_depends_on_memory_policies_and_the_lines_it_shares_with_the_guest() {
    assert_eq!(ours("vmm"), names(&["memory", "policies", "protocol"]));
}

#[test]
fn external_guests_are_managed_without_a_vmm_of_ours() {
    assert_eq!(ours("vmm/control"), names(&[]));
    assert_eq!(ours("vmm/attach"), names(&["control", "memory", "policies"]));
    assert_eq!(ours("vmm/daemon"), names(&["attach", "control", "memory", "policies"]));
}

#[test]
fn the_guests_side_knows_nothing_of_the_host() {
    assert_eq!(ours("guest-tests/protocol"), names(&[]));
    assert_eq!(ours("guest-tests/kernels"), names(&["protocol"]));
    assert_eq!(ours("guest-tests/trace"), names(&[]));
    assert_eq!(ours("guest-tests/recorder"), names(&["kernels", "protocol", "trace"]));
    assert_eq!(ours("guest-tests/recorder/program"), names(&["kernels", "protocol"]));
    assert!(ours("guest-tests/image").is_disjoint(&names(&["vmm", "memory", "policies"])));
    // A Linux guest maps its memory like a host, but is not a host.
    assert_eq!(ours("guest-tests/linux"), names(&[]));
    assert_eq!(ours("guest-tests/linux/init"), names(&["kernels", "memory", "policies", "protocol"]));
}

#[test]
fn unsafe_code_is_in_its_few_modules_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let allowed = [
        "memory/src/sys",
        "vmm/src/kvm",
        "vmm/src/sys",
        "vmm/src/sandbox/violation.rs",
        "vmm/tests/sandbox.rs",
        "policies/src/walk/sets/vector.rs",
        "guest-tests/image/freestanding",
        "guest-tests/kernels/src/arena.rs",
        "guest-tests/kernels/src/planes.rs",
        "guest-tests/kernels/src/team.rs",
        "guest-tests/recorder/program/src/callbacks.rs",
    ];
    let mut folders: Vec<_> = ["policies", "memory", "vmm", "guest-tests", "benches"].map(|f| root.join(f)).into();
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
                let block = ["unsafe", " {"].concat();
                assert!(!text.contains(&block), "{relative} has an unsafe block; {allowed:?} are the allowed places");
            }
        }
    }
    assert!(files > 20, "checked only {files} files");
}
