//! Files that documents and comments name exist: targets of links in Markdown, and paths in back-ticks that begin with
//! a folder of the repository. Each file of Rust says first what it is for. Reads the repository; touches nothing.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;

use super::{Text, root, texts};

/// A relative link of Markdown, without its anchor.
static LINK: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\]\(([^)#\s]+)").unwrap());

/// A path in back-ticks, with at least one folder.
static PATH: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"`([\w.-]+/[\w./-]*)`").unwrap());

/// Documents about the past: their paths were right on their day. Their links must resolve.
const HISTORY: [&str; 2] = ["CHANGELOG.md", "docs/decisions.md"];

/// The first group of all matches, each with the number of its line.
fn found(pattern: &Regex, text: &str) -> Vec<(usize, String)> {
    let of_line = |(at, line): (usize, &str)| {
        let found = pattern.captures_iter(line).map(|found| (at + 1, found[1].to_owned()));
        found.collect::<Vec<_>>()
    };
    text.lines().enumerate().flat_map(of_line).collect()
}

/// The named files that do not exist, a line for each. `NAME` in a path stands for any name.
fn missing(text: &Text, folders: &BTreeSet<String>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut named = Vec::new();
    if text.path.ends_with(".md") {
        let folder = Path::new(&text.path).parent().unwrap();
        let is_file = |target: &str| !target.contains("://") && !target.starts_with("mailto:");
        let links = found(&LINK, &text.text).into_iter().filter(|(_, target)| is_file(target));
        named.extend(links.map(|(line, target)| (line, folder.join(target).to_str().unwrap().to_owned())));
    }
    if !HISTORY.contains(&&*text.path) {
        let is_ours = |path: &str| path.split('/').next().is_some_and(|folder| folders.contains(folder));
        let paths = found(&PATH, &text.text).into_iter();
        named.extend(paths.filter(|(_, path)| is_ours(path) && !path.contains("NAME")));
    }
    let missing = named.into_iter().filter(|(_, path)| !exists(path));
    missing.map(|(line, path)| format!("{}:{line}: {path}", text.path)).collect()
}

/// The folders of the repository that these texts are in.
fn folders(texts: &[Text]) -> BTreeSet<String> {
    texts.iter().filter_map(|text| Some(text.path.split_once('/')?.0.to_owned())).collect()
}

#[test]
fn files_that_documents_and_comments_name_exist() {
    let texts = texts(&["md", "rs", "toml"]);
    let folders = folders(&texts);
    let exists = |path: &str| root().join(path).exists();
    let missing: Vec<String> = texts.iter().flat_map(|text| missing(text, &folders, exists)).collect();
    assert!(missing.is_empty(), "these lines name files that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn each_file_of_rust_begins_with_its_purpose() {
    // Tests beside their code have the head of that code.
    let is_of_tests = |text: &Text| text.path.ends_with("/tests.rs");
    let has_head = |text: &Text| text.text.starts_with("//! ");
    let texts = texts(&["rs"]);
    let without = texts.iter().filter(|text| !has_head(text) && !is_of_tests(text)).map(|text| text.path.as_str());
    let without: Vec<&str> = without.collect();
    assert!(
        without.is_empty(),
        "write purpose, guarantee and what it may touch at the head of:\n{}",
        without.join("\n")
    );
}

#[test]
fn a_link_is_relative_to_its_document_and_a_path_to_the_repository() {
    let document = "[a](b.md#c) [d](https://e/f)\n`cats/gone.rs`, `cats/NAME.rs`, `sys/kernel`, `cats`, `cats/b.md`";
    let text = |path: &str| Text { path: path.to_owned(), text: document.to_owned() };
    let folders = BTreeSet::from(["cats".to_owned()]);
    let missing_in = |path: &str| missing(&text(path), &folders, |path| path == "cats/b.md");
    assert_eq!(missing_in("cats/a.md"), ["cats/a.md:2: cats/gone.rs"]);
    assert_eq!(missing_in("README.md"), ["README.md:1: b.md", "README.md:2: cats/gone.rs"]);
    assert_eq!(missing_in("cats/a.rs"), ["cats/a.rs:2: cats/gone.rs"]);
    assert_eq!(missing_in("CHANGELOG.md"), ["CHANGELOG.md:1: b.md"]);
}
