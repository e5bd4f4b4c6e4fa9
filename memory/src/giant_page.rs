//! A page of 1 GiB of the hugetlb pool, held by a file.

use std::fs::File;

#[cfg(any(test, feature = "testing"))]
use nix::unistd::{Whence, lseek};
use wideleaf_policies::{Bytes, PageSize};

use crate::pool::PoolLease;
use crate::sys::mapping::{MapError, create_memfd};

/// The size of a giant page, in bytes.
pub const GIANT: Bytes = PageSize::Giant1G.bytes();

/// A file that holds one giant page. The page goes back to the pool when the file is closed and nothing maps it.
#[derive(Debug)]
pub struct GiantFile(File);

impl GiantFile {
    /// A page of the hugetlb pool; it is taken when the file is mapped.
    pub(crate) fn of_pool() -> Result<GiantFile, MapError> {
        create_memfd(GIANT, Some(PageSize::Giant1G)).map(GiantFile)
    }

    /// Descriptor of the file.
    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Ordinary memory in its place, for the fake host.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn of_ordinary_memory() -> Result<GiantFile, MapError> {
        create_memfd(GIANT, None).map(GiantFile)
    }

    /// The base pages of ordinary memory with data, by their offsets in the giant (lseek(2), `SEEK_DATA`).
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn occupied(&self) -> Vec<Bytes> {
        let seek = |from: u64, whence| lseek(&self.0, from as i64, whence).ok().map(|at| at as u64);
        let extents = std::iter::successors(Some(0..0), |before| {
            let start = seek(before.end, Whence::SeekData)?;
            Some(start..seek(start, Whence::SeekHole)?)
        });
        extents.flat_map(|extent| extent.step_by(PageSize::Base4K.bytes().as_usize())).map(Bytes::new).collect()
    }
}

/// The page of a giant, and the growth of the pool for it.
#[derive(Debug)]
pub struct GiantPage {
    // Dropped before the lease: the pool shrinks when the page is back.
    file: GiantFile,
    _lease: Option<PoolLease>,
}

impl GiantPage {
    pub(crate) fn new(file: GiantFile, lease: Option<PoolLease>) -> GiantPage {
        GiantPage { file, _lease: lease }
    }

    /// The file that holds it.
    pub(crate) fn file(&self) -> &GiantFile {
        &self.file
    }
}
