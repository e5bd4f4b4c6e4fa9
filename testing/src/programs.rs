//! Finds the programs of this workspace for tests that start them, and has cargo build those that are missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The executable that `cargo test` or `cargo build` has made, or makes now, with the profile of this test. Beside
/// a test's executable cargo also lists the programs that the test may start.
///
/// # Panics
/// Panics if it cannot be built.
pub fn built(arguments: &[&str], is_test: bool) -> PathBuf {
    if let Some(program) = listed(arguments, is_test) {
        return program;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(arguments)
        .args(["--locked", "--offline", "--quiet", "--message-format=json"])
        .stdin(Stdio::null())
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["profile"]["test"] == is_test)
        .find_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)))
        .unwrap_or_else(|| panic!("cargo {arguments:?} makes no executable"))
}

/// The command line's program, `wideleaf`.
///
/// # Panics
/// Panics if it cannot be built.
pub fn wideleaf() -> PathBuf {
    std::env::var_os("WIDELEAF_BIN")
        .map_or_else(|| built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false), PathBuf::from)
}

/// The executable in the list that `WIDELEAF_BUILT` names, if there is one: `guest-tests/suite` builds all programs at
/// once and lists them. A cargo for one package would choose other features of its dependencies and build them again.
fn listed(arguments: &[&str], is_test: bool) -> Option<PathBuf> {
    let list = std::fs::read_to_string(std::env::var_os("WIDELEAF_BUILT")?).expect("the list of the suite");
    let after = |options: &[&str]| {
        let at = arguments.iter().position(|argument| options.contains(argument))?;
        arguments.get(at + 1).copied()
    };
    let package = after(&["-p"])?;
    let wanted = [package, if is_test { "test" } else { "bin" }, after(&["--bin", "--test"]).unwrap_or(package)];
    list.lines().find_map(|line| {
        let (program, path) = line.rsplit_once('\t')?;
        program.split('\t').eq(wanted).then(|| PathBuf::from(path))
    })
}
