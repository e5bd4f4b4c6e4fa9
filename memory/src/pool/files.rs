//! Interface to the files of the hugetlb pools: whole files are read and written, and nothing else of the host is
//! touched. Other processes change the numbers at any time, and a test can do so between two calls.

use std::fmt::Debug;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Reads and writes whole files.
pub(super) trait PoolFiles: Debug + Send + Sync {
    /// Reads a file. Bytes that are not UTF-8 are replaced: no number contains any.
    fn read(&self, path: &Path) -> io::Result<String>;

    /// Writes a file, which must exist: the kernel makes its files.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
}

/// Files of the kernel, or of a captured tree.
#[derive(Debug)]
pub(super) struct KernelFiles;

impl PoolFiles for KernelFiles {
    fn read(&self, path: &Path) -> io::Result<String> {
        fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        fs::File::options().write(true).truncate(true).open(path)?.write_all(text.as_bytes())
    }
}
