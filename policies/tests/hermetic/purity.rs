//! This crate only decides: no dependency, no `std`, no `unsafe`.

use std::path::{Path, PathBuf};

#[test]
fn there_is_no_dependency() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = text.parse().expect("a manifest is TOML");
    for kind in ["dependencies", "build-dependencies", "target"] {
        assert!(!manifest.contains_key(kind), "[{kind}] is not allowed in the crate that only decides");
    }
}

#[test]
fn the_crate_is_no_std_and_no_file_allows_unsafe() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let text = std::fs::read_to_string(source.join("lib.rs")).expect("a crate root");
    for attribute in ["#![no_std]", "#![forbid(unsafe_code)]"] {
        assert!(text.contains(attribute), "{attribute} is gone");
    }
    assert!(!text.contains("extern crate std"));
    let files = files_that_say("unsafe_code", &source);
    assert_eq!(files, [source.join("lib.rs")]);
}

fn files_that_say(what: &str, folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of the crate") {
        let path = entry.expect("an entry of it").path();
        if path.is_dir() {
            files.append(&mut files_that_say(what, &path));
        } else if std::fs::read_to_string(&path).expect("a file of the crate").contains(what) {
            files.push(path);
        }
    }
    files
}
