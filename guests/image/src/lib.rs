//! The freestanding guest program as bytes: one static ELF file that QEMU, our VMM and other PVH loaders boot.
//!
//! It runs the kernels of `wideleaf-kernels` in ring 3 on up to 16 vCPUs, prints its lines on the first serial port
//! and ends through the exit port. `wideleaf-protocol` defines the lines, the ports and the two entries. This
//! package's README has a drawing of how it boots. The program itself is the nested workspace `freestanding/`,
//! built by this package's build script.

use std::fs;
use std::io;
use std::path::Path;

/// The ELF file of the image.
pub static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wideleaf-guest.elf"));

/// Writes [`IMAGE`] to a file, for a VMM that takes a path.
pub fn write_to(path: &Path) -> io::Result<()> {
    fs::write(path, IMAGE)
}
