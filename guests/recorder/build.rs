//! Builds the kernels as a program (the package in `program/`) with a compiler-inserted call before every load and
//! store, and leaves it in `OUT_DIR`.

use std::path::{Path, PathBuf};

use inner_cargo::{Inner, required, rerun_if_changed};

#[path = "../inner_cargo.rs"]
mod inner_cargo;

/// Inputs that make the program out of date when they change, relative to this package.
const INPUTS: [&str; 10] = [
    "build.rs",
    "../inner_cargo.rs",
    "program/Cargo.toml",
    "program/src",
    "../protocol/Cargo.toml",
    "../protocol/src",
    "../kernels/Cargo.toml",
    "../kernels/src",
    "../../Cargo.toml",
    // The program links crates in the versions that are locked here.
    "../../Cargo.lock",
];

fn main() {
    rerun_if_changed(&INPUTS);
    let package = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    let variables = [
        ("CARGO_PROFILE_RELEASE_STRIP", "symbols"),
        ("CARGO_PROFILE_RELEASE_DEBUG", "none"),
        // One codegen unit per crate: the calls are inserted last, and no optimisation runs across them afterwards.
        ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
        ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ];
    let program = package.join("program");
    let inner = Inner {
        package: &program,
        program: "wideleaf-recorded",
        flags: &flags(&package),
        variables: &variables,
        cold: &[],
    };
    inner.build_as("recorded");
}

/// Flags for the compiler's calls, static, and without any path of the build machine. No option for a newer CPU: the
/// baseline of x86-64 has no vectors of more than 16 bytes, so an access is a word or two. The program keeps the
/// kernels from wider ones.
fn flags(package: &Path) -> Vec<String> {
    // LLVM's own names: the pass, and the option for calls instead of inline counters.
    let mut flags = [
        "-Cpasses=memprof",
        "-Cllvm-args=-memprof-use-callbacks",
        "-Ctarget-feature=+crt-static",
        "-Clink-arg=-Wl,--build-id=none",
    ]
    .map(String::from)
    .to_vec();
    let ours = package.ancestors().nth(2).map(Path::to_owned);
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let remapped = ours.into_iter().chain(cargo_home);
    flags.extend(remapped.map(|folder| format!("--remap-path-prefix={}/=", folder.display())));
    flags
}
