//! The number by which a snapshot on a base names that base.

use std::fmt;
use std::io;

/// A number that names one snapshot: 128 random bits. A snapshot saved on a base names the base by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub(crate) [u8; 16]);

impl SnapshotId {
    /// A new id from the kernel's random numbers (getrandom(2)).
    ///
    /// # Errors
    /// If the kernel has none.
    pub fn random() -> io::Result<SnapshotId> {
        let mut bytes = [0; 16];
        crate::random(&mut bytes)?;
        Ok(SnapshotId(bytes))
    }
}

impl fmt::Display for SnapshotId {
    /// 32 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
