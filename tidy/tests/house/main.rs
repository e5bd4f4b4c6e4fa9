//! The repository is as CONTRIBUTING.md says.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cycles;
mod decisions;
mod dependencies;
mod documents;
mod english;
mod refusals;
mod size;
mod supply_chain;

use std::fs;
use std::path::{Path, PathBuf};

/// The repository's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A text file of the repository.
struct Text {
    /// Its path from the repository's folder.
    path: String,
    text: String,
}

/// All files of the repository with one of these extensions (an empty one: a script without), but for what git
/// ignores and what is another party's text: tables of publications, licences, recorded results.
fn texts(extensions: &[&str]) -> Vec<Text> {
    let root = root();
    let mut texts = Vec::new();
    for entry in ignore::WalkBuilder::new(&root).hidden(false).require_git(false).build() {
        let entry = entry.unwrap();
        let path = entry.path().strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let extension = Path::new(&path).extension().map_or("", |extension| extension.to_str().unwrap());
        // Seeds of fuzz targets are bytes in the format of their target.
        let others = [".git/", "LICENSE", "target/", "benches/results/", "fuzz/seeds/"];
        let is_ours = !others.iter().any(|start| path.starts_with(start));
        if is_ours && entry.file_type().is_some_and(|kind| kind.is_file()) && extensions.contains(&extension) {
            // Captured data may be bytes.
            texts.extend(fs::read_to_string(entry.path()).ok().map(|text| Text { path, text }));
        }
    }
    assert!(texts.len() > 20, "found {} files only in {}", texts.len(), root.display());
    texts.sort_by(|a, b| a.path.cmp(&b.path));
    texts
}
