//! Builds the freestanding guest program (a workspace of its own in `freestanding/`) and leaves it in `OUT_DIR`.
//!
//! It is built for the host's own target, with a code model and an ABI that suit a freestanding x86-64 program. The
//! boot code provides the target's other assumptions (SSE2, a red zone).

use std::path::{Path, PathBuf};

use inner_cargo::{Inner, required, rerun_if_changed};

#[path = "../inner_cargo.rs"]
mod inner_cargo;

/// Inputs that make the image out of date when they change, relative to this package.
const INPUTS: [&str; 11] = [
    "build.rs",
    "../inner_cargo.rs",
    "freestanding/Cargo.toml",
    "freestanding/Cargo.lock",
    "freestanding/link.ld",
    "freestanding/src",
    "../protocol/Cargo.toml",
    "../protocol/src",
    "../kernels/Cargo.toml",
    "../kernels/src",
    // The crates inside inherit their version and lints from the outer workspace.
    "../../Cargo.toml",
];

fn main() {
    rerun_if_changed(&INPUTS);
    let package = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    let flags = flags(&package);
    let inner = Inner {
        package: &package.join("freestanding"),
        program: "wideleaf-guest",
        flags: &flags,
        variables: &[],
        cold: &[],
    };
    inner.build_as("wideleaf-guest.elf");
}

/// Flags of the image only: a static executable at fixed addresses, without any start-up file or library.
/// `crt-static` makes no sense without a libc.
fn flags(package: &Path) -> Vec<String> {
    let mut flags: Vec<String> =
        ["-Crelocation-model=static", "-Ctarget-feature=-crt-static", "-Cforce-unwind-tables=no"]
            .map(String::from)
            .to_vec();
    // Panic lines name files relative to guest-tests; the image contains no path of the build machine.
    if let Some(guest_tests) = package.parent() {
        flags.push(format!("--remap-path-prefix={}/=", guest_tests.display()));
    }
    let script = format!("-Wl,-T{}", package.join("freestanding/link.ld").display());
    // A page size of 4 KiB keeps the linker from padding segments to 2 MiB. No build id, so that equal sources give
    // equal images.
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
