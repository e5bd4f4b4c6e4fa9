//! The door to the pools' files: what is behind it are numbers that change under us, which a test has to be able to cause.

use std::fmt::Debug;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Reads and writes whole files.
pub(super) trait PoolFiles: Debug + Send + Sync {
    /// What the file holds. Bytes that are no UTF-8 are replaced: no number is among them.
    fn read(&self, path: &Path) -> io::Result<String>;

    /// Sets what the file holds. It has to exist: the kernel makes its files, we do not.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
}

/// The kernel's own files, or those of a captured tree.
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
