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

/// A share as text, like `71.3 %`. Only the whole is 100.0 %, and only nothing is 0.0 %.
pub fn percent(share: Option<u32>) -> String {
    share.map_or(NOTHING.to_owned(), |share| {
        let percent = f64::from(share) / 100.0;
        let shown = if (1..10_000).contains(&share) { percent.clamp(0.1, 99.9) } else { percent };
        format!("{shown:.1} %")
    })
}

/// Age of what a view says of windows: the time since the scan of all of them, in seconds.
pub fn scanned(scan_age_s: Option<f64>) -> String {
    const TENTHS_BELOW: f64 = 10.0;
    match scan_age_s {
        Some(age) if age < TENTHS_BELOW => format!("scanned {age:.1} s ago"),
        Some(age) => format!("scanned {age:.0} s ago"),
        None => "time of the scan not known".to_owned(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_tenths_only_where_they_matter() {
        let shown = [Some(0.04), Some(9.94), Some(72.4), Some(720.0), None].map(scanned);
        assert_eq!(shown[..3], ["scanned 0.0 s ago", "scanned 9.9 s ago", "scanned 72 s ago"]);
        assert_eq!(shown[3..], ["scanned 720 s ago", "time of the scan not known"]);
    }

    #[test]
    fn only_the_whole_is_a_hundred_percent_and_only_nothing_is_zero() {
        let shown = [0, 1, 15, 7130, 9994, 9999, 10_000, 20_000].map(|share| percent(Some(share)));
        assert_eq!(shown, ["0.0 %", "0.1 %", "0.1 %", "71.3 %", "99.9 %", "99.9 %", "100.0 %", "200.0 %"]);
    }
}
