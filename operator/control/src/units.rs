//! Units of figures in JSON, for all parts of the protocols.

/// Memory in bytes, as a number in JSON.
pub type ByteCount = u64;
