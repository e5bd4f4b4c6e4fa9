//! Builds `/init` (the package in `init/`) as a static program without a table of symbols, and leaves it in `OUT_DIR`.

use std::path::{Path, PathBuf};

use inner_cargo::{Inner, required, rerun_if_changed};

#[path = "../inner_cargo.rs"]
mod inner_cargo;

/// Inputs that make the program out of date when they change, relative to this package.
const INPUTS: [&str; 14] = [
    "build.rs",
    "../inner_cargo.rs",
    "init/Cargo.toml",
    "init/src",
    "../protocol/Cargo.toml",
    "../protocol/src",
    "../kernels/Cargo.toml",
    "../kernels/src",
    "../../memory/Cargo.toml",
    "../../memory/src",
    "../../policies/Cargo.toml",
    "../../policies/src",
    "../../Cargo.toml",
    // The program links crates in the versions that are locked here.
    "../../Cargo.lock",
];

fn main() {
    rerun_if_changed(&INPUTS);
    let package = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    let variables = [("CARGO_PROFILE_RELEASE_STRIP", "symbols"), ("CARGO_PROFILE_RELEASE_DEBUG", "none")];
    let inner = Inner {
        package: &package.join("init"),
        program: "wideleaf-init",
        flags: &flags(&package),
        variables: &variables,
        cold: &["wideleaf-memory", "wideleaf-policies", "nix", "serde_json"],
    };
    inner.build_as("init");
}

/// Static, and without a path of the build machine, so that equal sources give equal programs.
fn flags(package: &Path) -> Vec<String> {
    let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned(), "-Clink-arg=-Wl,--build-id=none".to_owned()];
    let ours = package.ancestors().nth(2).map(Path::to_owned);
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let remapped = ours.into_iter().chain(cargo_home);
    flags.extend(remapped.map(|folder| format!("--remap-path-prefix={}/=", folder.display())));
    flags
}
