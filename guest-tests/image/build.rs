//! Builds the freestanding guest program (a workspace of its own in `freestanding/`) and leaves it in `OUT_DIR`.
//!
//! The inner cargo must not inherit anything from the outer one: not its flags (`crt-static` makes no sense without a libc),
//! not its wrappers (clippy's would only check), not its job server or target directory (they would wait for each other).

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The only target that is sure to be installed, because the host's own crates are built for it. Its code model and ABI suit
/// a freestanding x86-64 program; what it assumes beyond (SSE2, a red zone) the boot code provides.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What a change of makes the image out of date, relative to this package.
const INPUTS: [&str; 9] = [
    "build.rs",
    "freestanding/Cargo.toml",
    "freestanding/Cargo.lock",
    "freestanding/link.ld",
    "freestanding/src",
    "../protocol/Cargo.toml",
    "../protocol/src",
    "../kernels/Cargo.toml",
    "../kernels/src",
];

fn main() {
    let package = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(required("OUT_DIR"));
    for input in INPUTS {
        println!("cargo::rerun-if-changed={}", package.join(input).display());
    }
    // The crates inside inherit their version and lints from the outer workspace.
    println!("cargo::rerun-if-changed={}", package.join("../../Cargo.toml").display());

    let workspace = package.join("freestanding");
    let target_dir = out.join("freestanding");
    let mut cargo = Command::new(required("CARGO"));
    cargo
        .current_dir(&workspace)
        .args(["build", "--release", "--locked", "--offline", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target_dir);
    for (name, _) in env::vars_os() {
        if is_outer_cargos(&name) {
            cargo.env_remove(name);
        }
    }
    // This variable takes the place of every rustflags setting in every configuration file.
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags(&package).join("\u{1f}"));

    let output = match cargo.output() {
        Ok(output) => output,
        Err(error) => stop(&format!("cannot start cargo for the freestanding image: {error}")),
    };
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        stop(&format!("the freestanding image does not build ({}):\n{text}", workspace.display()));
    }
    let built = target_dir.join(TARGET).join("release/wideleaf-guest");
    let image = out.join("wideleaf-guest.elf");
    if let Err(error) = std::fs::copy(&built, &image) {
        stop(&format!("cannot copy {} to {}: {error}", built.display(), image.display()));
    }
}

/// Flags for the image alone: a static executable at fixed addresses, without any start-up file or library.
fn flags(package: &Path) -> Vec<String> {
    let mut flags: Vec<String> =
        ["-Crelocation-model=static", "-Ctarget-feature=-crt-static", "-Cforce-unwind-tables=no"]
            .map(String::from)
            .to_vec();
    // Panic lines name files as seen from guest-tests; no path of the machine that built it gets into the image.
    if let Some(guest_tests) = package.parent() {
        flags.push(format!("--remap-path-prefix={}/=", guest_tests.display()));
    }
    let script = format!("-Wl,-T{}", package.join("freestanding/link.ld").display());
    // A page size of 4 KiB keeps the segments from being padded to 2 MiB; no build id, so that equal sources give equal images.
    let link = [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        &script,
        "-Wl,-zmax-page-size=4096",
        "-Wl,--build-id=none",
    ];
    flags.extend(link.map(|argument| format!("-Clink-arg={argument}")));
    flags
}

/// Whether a variable was set by the outer cargo or for it.
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
    // Where registries and toolchains are is the user's, not the build's.
    const KEPT: [&str; 1] = ["CARGO_HOME"];
    let Some(name) = name.to_str() else { return false };
    let is_listed = NAMES.contains(&name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning));
    is_listed && !KEPT.contains(&name)
}

fn required(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| stop(&format!("cargo did not set {name}: {error}")))
}

/// Ends the build with every line of the reason shown.
fn stop(reason: &str) -> ! {
    for line in reason.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1)
}
