//! Tells the program its source revision, because results of experiments name it.

use std::process::Command;

fn main() {
    println!("cargo::rustc-env=WIDELEAF_REVISION={}", git(&["describe", "--always", "--dirty", "--abbrev=12"]));
    // `--dirty` depends on the sources of all crates that are built in.
    for folder in ["benches", "cli", "guests", "measure", "memory", "operator", "policies", "run", "snapshot", "vmm"] {
        println!("cargo::rerun-if-changed=../../{folder}");
    }
    for file in ["HEAD", "logs/HEAD", "index"] {
        let path = git(&["rev-parse", "--git-path", file]);
        if std::path::Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}

/// Output of git, or empty without git or a repository (as in a source package).
fn git(arguments: &[&str]) -> String {
    let output = Command::new("git").args(arguments).output();
    let said = output.ok().filter(|output| output.status.success());
    said.and_then(|output| String::from_utf8(output.stdout).ok()).map(|text| text.trim().to_owned()).unwrap_or_default()
}
