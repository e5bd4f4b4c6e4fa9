//! A page of 1 GiB of the hugetlb pool, held by a file: as long as the file is open, no other process gets the page,
//! and it goes back to the pool when the file is closed and nothing maps it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use wideleaf_policies::{Bytes, PageSize};

use crate::host::HostError;
use crate::sys::mapping::create_memfd;

/// The size of a giant page, in bytes.
pub const GIANT: Bytes = PageSize::Giant1G.bytes();

/// A file that holds one giant page. The page goes back to the pool when the file is closed and nothing maps it.
#[derive(Debug)]
pub struct GiantFile(File);

impl GiantFile {
    /// A page of the hugetlb pool; it is taken when the file is mapped.
    ///
    /// # Errors
    /// [`HostError`] where the kernel has no such pages.
    pub fn of_pool() -> Result<GiantFile, HostError> {
        Ok(create_memfd(GIANT, Some(PageSize::Giant1G)).map(GiantFile)?)
    }

    /// An open file of that size on a hugetlbfs of giant pages, from another process perhaps.
    ///
    /// # Errors
    /// An error of the kernel, or `InvalidInput` for a file of another size.
    pub fn from_file(file: File) -> io::Result<GiantFile> {
        let bytes = file.metadata()?.len();
        if bytes != GIANT.get() {
            let why = format!("a file of {bytes} bytes holds no page of 1 GiB");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(GiantFile(file))
    }

    /// Takes the page from the pool now; the kernel clears it (`fallocate(2)`). Faults and changes of mappings go on
    /// meanwhile, which is not so where a touch of a mapping takes it: that holds the lock of all mappings of the
    /// process for as long as the clearing takes.
    ///
    /// # Errors
    /// `ENOSPC` where the pool has none.
    pub(crate) fn fill(&self) -> io::Result<()> {
        Ok(fallocate(&self.0, FallocateFlags::empty(), 0, GIANT.get() as libc::off_t)?)
    }

    /// Descriptor of the file.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Ordinary memory in its place, for the fake host.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn of_ordinary_memory() -> Result<GiantFile, HostError> {
        Ok(create_memfd(GIANT, None).map(GiantFile)?)
    }

    /// The base pages with data, by their offsets in the giant (lseek(2), `SEEK_DATA`): all pages of a giant page.
    pub(crate) fn occupied(&self) -> impl Iterator<Item = Bytes> {
        let seek = |from: u64, whence| lseek(&self.0, from as i64, whence).ok().map(|at| at as u64);
        let extents = std::iter::successors(Some(0..0), move |before| {
            let start = seek(before.end, Whence::SeekData)?;
            Some(start..seek(start, Whence::SeekHole)?)
        });
        extents.flat_map(|extent| extent.step_by(PageSize::Base4K.bytes().as_usize())).map(Bytes::new)
    }
}

/// The page of a giant.
#[derive(Debug)]
pub struct GiantPage {
    // Dropped first: the page counts as given back when it is.
    file: GiantFile,
    /// Whether data were copied to it.
    is_used: AtomicBool,
    _made: Option<MadePageCount>,
}

impl GiantPage {
    /// A page that the pool had.
    pub(crate) fn of_pool(file: GiantFile) -> GiantPage {
        GiantPage { file, is_used: AtomicBool::new(false), _made: None }
    }

    /// A page that was made because it was wanted; `given_back` counts its end.
    pub(crate) fn made(file: GiantFile, given_back: &Arc<AtomicU64>) -> GiantPage {
        let made = MadePageCount { given_back: given_back.clone() };
        GiantPage { _made: Some(made), ..GiantPage::of_pool(file) }
    }

    /// The file that holds it.
    pub(crate) fn file(&self) -> &GiantFile {
        &self.file
    }

    /// Notes that data are copied to it from now on. Returns whether that was so before: then it must be cleared.
    pub(crate) fn begin_use(&self) -> bool {
        self.is_used.swap(true, Ordering::Relaxed)
    }
}

/// Counts the end of a page that was made.
#[derive(Debug)]
struct MadePageCount {
    given_back: Arc<AtomicU64>,
}

impl Drop for MadePageCount {
    fn drop(&mut self) {
        self.given_back.fetch_add(1, Ordering::Relaxed);
    }
}
