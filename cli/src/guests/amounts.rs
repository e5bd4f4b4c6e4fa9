//! Amounts of memory and shares as text, as all tables show them.

use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

/// Text in place of a value that does not apply.
pub const NOTHING: &str = "-";

/// Text in place of an unknown figure; a note has the reason.
pub const UNKNOWN: &str = "?";

/// As [`bytes`], or the mark for an unknown figure.
pub fn known_bytes(known: Option<u64>) -> String {
    known.map_or(UNKNOWN.to_owned(), bytes)
}

/// A share as text, like `71.3 %`.
pub fn percent(share: Option<u32>) -> String {
    share.map_or(NOTHING.to_owned(), |share| format!("{:.1} %", f64::from(share) / 100.0))
}

/// Size in GiB or MiB with about three digits, to be read at a glance. Less than 1 MiB is in KiB.
pub fn bytes(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    const MIB: u64 = mib(1).get();
    match bytes {
        0 => "0".to_owned(),
        GIB.. if bytes.is_multiple_of(GIB) => format!("{} GiB", bytes / GIB),
        GIB.. => format!("{:.1} GiB", bytes as f64 / GIB as f64),
        MIB.. => format!("{} MiB", bytes / MIB),
        _ => Bytes::new(bytes).to_string(),
    }
}
