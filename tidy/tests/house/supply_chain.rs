//! The crates of others that are built into our programs: each from the registry that Cargo.lock names, under a
//! licence that allows what we do. `deny.toml` says the same to cargo-deny, which also knows of advisories.

use std::process::Command;

use serde::Deserialize;
use spdx::{Expression, LicenseItem};

use super::root;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version=1", "--filter-platform=x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).unwrap();
    assert!(metadata.packages.len() > 100, "{} packages only", metadata.packages.len());
    metadata.packages
}

/// The licences that `deny.toml` allows.
fn allowed() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("deny.toml")).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let names = table["licenses"]["allow"].as_array().unwrap();
    names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[test]
fn each_crate_has_a_licence_that_is_allowed() {
    let allowed = allowed();
    for Package { name, version, license, .. } in packages() {
        let license = license.unwrap_or_else(|| panic!("{name} {version} names no licence"));
        // Older manifests write a slash between alternatives.
        let license = license.replace('/', " OR ");
        let expression = Expression::parse(&license).unwrap_or_else(|error| panic!("{name} {version}: {error}"));
        let is_allowed = expression.evaluate(|requirement| match &requirement.license {
            LicenseItem::Spdx { id, .. } => allowed.iter().any(|name| name == id.name),
            LicenseItem::Other { .. } => false,
        });
        assert!(is_allowed, "{name} {version} is under {license}, which deny.toml does not allow");
    }
}

#[test]
fn each_crate_of_others_is_from_a_registry() {
    for Package { name, version, source, .. } in packages() {
        let is_ours = source.is_none() && name.starts_with("wideleaf");
        let is_from_registry = source.as_ref().is_some_and(|source| source.starts_with("registry+"));
        assert!(is_ours || is_from_registry, "{name} {version} is from {source:?}, not from a registry");
    }
}
