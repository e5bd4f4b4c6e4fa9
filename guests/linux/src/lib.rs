//! `/init` of a Linux guest as bytes: a static program for x86-64 that runs a kernel of `wideleaf-kernels`, or any other static
//! program, as the only job of the machine, prints the lines of `wideleaf-protocol` on the console, and switches the machine off.
//!
//! The program itself is the package `init/`, built by this package's build script. `wideleaf image linux` puts it into an
//! initramfs; what it reads there and on the Linux command line is in `wideleaf_protocol::linux`.

/// The ELF file.
pub static INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/init"));
