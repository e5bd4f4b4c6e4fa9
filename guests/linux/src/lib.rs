//! `/init` of a Linux guest as bytes: a static program for x86-64. As the only job of the machine it runs a kernel
//! of `wideleaf-kernels`, or any other static program. It prints the lines of `wideleaf-protocol` on the console
//! and switches the machine off.
//!
//! The program itself is the package `init/`, built by this package's build script. `wideleaf-lab image linux` puts it
//! into an initramfs. `wideleaf_protocol::linux` defines its input there and on the Linux command line.

/// The ELF file of `/init`.
pub static INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/init"));
