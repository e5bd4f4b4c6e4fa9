//! The folder of a VM's snapshot: written while the guest runs, put in its place whole or not at all, and read as
//! input that may be hostile. `docs/snapshot-format.md` describes its files byte by byte.
//!
//! ```text
//!   DIR/machine.json   machine and CPU state, configuration; text of the VMM, opaque here
//!   DIR/windows        index: RAM layout, id, base; per window: stored pages, page size, heat, age; checksums
//!   DIR/memory         page p of window w at byte w * 2 MiB + p * 4 KiB; sparse, without pages of zeroes
//!
//!   client   Writing::create ─── the three files, open ──▶ VM's process: WindowsWriter::write … finish
//!            Writing::finish ◀── "done" ──────────────────┘   fsync, exchange with the folder that was there
//!
//!   client   Files::open ─────── all files, open ────────▶ VM's process: Opened::from_files, Opened::read
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`folder`] | [`Writing`]: temporary folder, lock, replacement; [`Files`]: opening a snapshot and its bases |
//! | [`writer`] | [`WindowsWriter`]: thread-safe, takes pages again and again until the guest is paused |
//! | [`opened`] | [`Opened`]: the reader |
//! | `index` | the file `windows` |
//!
//! This crate knows no KVM and no guest RAM. It uses windows, pages and addresses of `wideleaf-policies` only.

#![forbid(unsafe_code)]

pub mod error;
mod files;
pub mod folder;
mod id;
mod index;
mod layout;
pub mod opened;
mod pages;
pub mod writer;

pub use error::{OpenError, Problem, ReadError, SaveError};
pub use folder::{Caching, Files, Finished, Layer, NewFiles, Writing};
pub use id::SnapshotId;
pub use index::{DEPTH_MAX, MACHINE_BYTES_MAX};
pub use opened::{Opened, SavedWindow};
pub use pages::is_zero;
pub use writer::{Base, WindowNotes, WindowsWriter, Written};

/// Version of the format that this crate writes and reads.
pub const VERSION: u32 = 1;
/// Name of the file with machine state and configuration.
pub const MACHINE_FILE: &str = "machine.json";
/// Name of the index of windows.
pub const WINDOWS_FILE: &str = "windows";
/// Name of the file with the pages.
pub const MEMORY_FILE: &str = "memory";
/// Name of a file that a restore may add: the order in which the guest first touched its windows. No part of the saved
/// VM; a snapshot with it is replaced as one without.
pub const TOUCHES_FILE: &str = "touches";
/// Names of the files that every snapshot has.
pub const FILE_NAMES: [&str; 3] = [MACHINE_FILE, WINDOWS_FILE, MEMORY_FILE];

/// Fills a few bytes with random numbers of the kernel.
fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    // Up to 256 bytes come whole (getrandom(2)).
    debug_assert!(bytes.len() <= 256, "{} bytes may come in parts", bytes.len());
    Ok(rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()).map(drop)?)
}
