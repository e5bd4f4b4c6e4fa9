//! This crate decides and does nothing else: no dependency, no `std`, no `unsafe`.

use std::path::Path;

#[test]
fn there_is_no_dependency() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = text.parse().expect("a manifest is TOML");
    for kind in ["dependencies", "build-dependencies", "target"] {
        assert!(!manifest.contains_key(kind), "[{kind}] does not belong into the crate that only decides");
    }
}

#[test]
fn the_crate_says_no_std_and_forbids_unsafe() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).expect("a crate root");
    for attribute in ["#![no_std]", "#![forbid(unsafe_code)]"] {
        assert!(text.contains(attribute), "{attribute} is gone");
    }
    assert!(!text.contains("extern crate std"));
}
