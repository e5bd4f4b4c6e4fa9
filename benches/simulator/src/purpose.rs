//! Why a line is read: its counts are kept apart by that.

/// Reason for reading a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An entry of the guest's tables, or of the native ones.
    Guest,
    /// An entry of the host's tables, to find the guest's.
    HostOfTables,
    /// An entry of the host's tables, to find the page.
    HostOfData,
    /// A load or a store.
    Data,
}

impl Purpose {
    /// Number of purposes.
    pub(crate) const ALL: usize = 4;
}
