//! Compiles programs in C that tests run in a guest, in a lab or around the program under test.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a static program into the folder, under the name of its source. Each machine that builds this workspace has
/// `cc`: it links.
///
/// # Panics
/// Panics if it does not compile.
pub fn compiled(source: &Path, folder: &Path) -> PathBuf {
    let program = folder.join(source.file_stem().expect("a source has a name"));
    let status = Command::new("cc").args(["-static", "-O1", "-Wall", "-o"]).arg(&program).arg(source).status();
    assert!(status.expect("cc starts").success(), "{} compiles", source.display());
    program
}
