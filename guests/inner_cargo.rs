//! For build scripts: runs a nested cargo to build a program for embedding. Each of them includes this file.
//!
//! The inner cargo must not inherit anything from the outer one: its flags are for other programs, its wrappers may
//! only check (clippy), and with a shared job server or target directory the two would wait for each other.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target that is always installed, because the host's own crates are built for it.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A program that an inner cargo builds.
pub struct Inner<'a> {
    /// Folder of the package.
    pub package: &'a Path,
    /// Name of the program.
    pub program: &'a str,
    /// Flags for rustc. They replace every rustflags setting in every configuration file.
    pub flags: &'a [String],
    /// Additional environment variables.
    pub variables: &'a [(&'a str, &'a str)],
    /// Packages that take long to optimise and run only for a moment: they are not optimised in a debug build.
    pub cold: &'a [&'a str],
}

impl Inner<'_> {
    /// Builds the program and leaves it in `OUT_DIR` under `name`. A failure ends the outer build with the reason.
    pub fn build_as(&self, name: &str) {
        let out = PathBuf::from(required("OUT_DIR"));
        if is_for_lints() {
            return leave_empty(&out.join(name));
        }
        let target_dir = out.join(self.program);
        let mut cargo = Command::new(required("CARGO"));
        cargo
            .current_dir(self.package)
            .args(["build", "--release", "--locked", "--offline", "--target", TARGET])
            .arg("--target-dir")
            .arg(&target_dir);
        if required("PROFILE") == "debug" {
            for package in self.cold {
                cargo.arg("--config").arg(format!("profile.release.package.{package}.opt-level=0"));
            }
        }
        for (variable, _) in env::vars_os() {
            if is_outer_cargos(&variable) {
                cargo.env_remove(variable);
            }
        }
        cargo.env("CARGO_ENCODED_RUSTFLAGS", self.flags.join("\u{1f}")).envs(self.variables.iter().copied());

        let output = match cargo.output() {
            Ok(output) => output,
            Err(error) => stop(&format!("cannot start cargo for {}: {error}", self.program)),
        };
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            stop(&format!("{} does not build ({}):\n{text}", self.program, self.package.display()));
        }
        let (built, wanted) = (target_dir.join(TARGET).join("release").join(self.program), out.join(name));
        if let Err(error) = std::fs::copy(&built, &wanted) {
            stop(&format!("cannot copy {} to {}: {error}", built.display(), wanted.display()));
        }
    }
}

/// Whether cargo runs for clippy. Nothing that such a build embeds ever runs, and cargo keeps the files of such a build
/// apart from those of other builds.
fn is_for_lints() -> bool {
    let wrapper = env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    wrapper.is_some_and(|wrapper| wrapper.file_stem() == Some(OsStr::new("clippy-driver")))
}

fn leave_empty(path: &Path) {
    if let Err(error) = std::fs::write(path, []) {
        stop(&format!("cannot write {}: {error}", path.display()));
    }
}

/// Declares the inputs that make the program out of date, relative to the package of the build script.
pub fn rerun_if_changed(inputs: &[&str]) {
    let package = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    for input in inputs {
        println!("cargo::rerun-if-changed={}", package.join(input).display());
    }
}

/// Whether the outer cargo set a variable, or it was set for the outer cargo.
fn is_outer_cargos(name: &OsStr) -> bool {
    const NAMES: [&str; 14] = [
        "RUSTC",
        "RUSTDOC",
        "RUSTFLAGS",
        "RUSTDOCFLAGS",
        "TARGET",
        "HOST",
        "NUM_JOBS",
        "OPT_LEVEL",
        "PROFILE",
        "DEBUG",
        "OUT_DIR",
        "MAKEFLAGS",
        "MFLAGS",
        "CLIPPY_ARGS",
    ];
    const BEGINNINGS: [&str; 5] = ["CARGO_", "__CARGO", "RUSTC_", "DEP_", "CLIPPY_"];
    // Variables with the places of registries and toolchains are the user's and stay.
    const KEPT: [&str; 1] = ["CARGO_HOME"];
    let Some(name) = name.to_str() else { return false };
    let is_listed = NAMES.contains(&name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning));
    is_listed && !KEPT.contains(&name)
}

/// A variable that cargo sets for every build script.
pub fn required(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| stop(&format!("cargo did not set {name}: {error}")))
}

/// Ends the build and shows every line of the reason.
fn stop(reason: &str) -> ! {
    for line in reason.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1)
}
