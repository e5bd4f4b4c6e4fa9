//! Whether a restore reads a snapshot through the host's page cache or past it.
//!
//! ```text
//!   cached   through it: what is not there comes from the disk, and stays for other VMs of the snapshot
//!   direct   past it: each page is copied once, and no page of the host is taken for the cache
//!   auto     `cached` if half of it is there or the kernel does not say, `direct` otherwise
//! ```
//!
//! One answer holds for the whole restore: a snapshot was saved or restored lately, or it was not.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use wideleaf_memory::cached_pages;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_snapshot::{Caching, Files, Layer, OpenError, Opened};

use crate::failure::Failure;
use crate::spec::{RestorePages, RestoreReads, RunSpec};

/// Size of the blocks by which `stat(2)` counts what a file has on its disk.
const STAT_BLOCK: Bytes = Bytes::new(512);

/// Opens the snapshot for the restore that is described. Returns also the way in which it is read.
///
/// # Errors
/// [`Failure::Input`] for a folder that is no snapshot.
pub(super) fn open(folder: &Path, spec: &RunSpec) -> Result<(Opened, RestoreReads), Failure> {
    open_files(folder, spec)
        .and_then(|(files, reads)| Ok((Opened::from_files(files)?, reads)))
        .map_err(|error| Failure::Input(error.to_string()))
}

fn open_files(folder: &Path, spec: &RunSpec) -> Result<(Files, RestoreReads), OpenError> {
    let through_it = || Ok((Files::open(folder, Caching::PageCache)?, RestoreReads::Cached));
    let past_it = || Ok((Files::open(folder, Caching::Direct)?, RestoreReads::Direct));
    match spec.restore_reads {
        RestoreReads::Cached => through_it(),
        RestoreReads::Direct => past_it(),
        // Single pages would each wait for the disk, and a mapping is one of the page cache.
        RestoreReads::Auto if spec.restore_pages != RestorePages::Auto => through_it(),
        RestoreReads::Auto => {
            let cached = through_it()?;
            // A file system may have no `O_DIRECT`.
            if is_mostly_cached(&cached.0.layers) { Ok(cached) } else { past_it().or(Ok(cached)) }
        }
    }
}

/// Whether half of what these files have on their disks is in the page cache, or the kernel does not say.
fn is_mostly_cached(layers: &[Layer]) -> bool {
    let (mut cached, mut stored) = (Bytes::ZERO, Bytes::ZERO);
    for Layer { memory, .. } in layers {
        let (Ok(pages), Ok(metadata)) = (cached_pages(memory), memory.metadata()) else { return true };
        cached += PageSize::Base4K.bytes() * pages;
        stored += STAT_BLOCK * metadata.blocks();
    }
    cached * 2 >= stored
}
