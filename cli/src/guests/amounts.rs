//! Amounts of memory, shares and ages as text, as all tables show them.

use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

/// Text in place of a value that does not apply.
pub const NOTHING: &str = "-";

/// Text in place of an unknown figure; a note has the reason.
pub const UNKNOWN: &str = "?";

/// Most VMs that are named in one line; the others are counted.
pub const NAMED_MAX: usize = 4;

/// Age from which a table of several VMs tells that a scan is old, in seconds. A guest at rest is scanned more often as
/// long as it has no more than 32 GiB in base pages, at 9 us for each of 16,384 windows.
pub const OLD_SCAN_S: f64 = 60.0;

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

/// A line that names the VMs with a scan of [`OLD_SCAN_S`] ago or before, the oldest first; `None` without such a VM.
/// `vms`: name, and age of the scan in seconds.
pub fn old_scans(vms: impl IntoIterator<Item = (String, Option<f64>)>) -> Option<String> {
    let with_age = vms.into_iter().filter_map(|(name, age)| Some((name, age?)));
    let mut old: Vec<(String, f64)> = with_age.filter(|(_, age)| *age >= OLD_SCAN_S).collect();
    old.sort_by(|one, other| other.1.total_cmp(&one.1));
    let named: Vec<_> = old.iter().take(NAMED_MAX).map(|(name, age)| format!("{name} {age:.0} s")).collect();
    let more = match old.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!old.is_empty()).then(|| format!("scanned a minute ago or before: {}{more}", named.join(", ")))
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
    fn vms_with_an_old_scan_are_named_from_the_oldest_on_and_the_fifth_is_counted() {
        let line = |ages: &[Option<f64>]| old_scans(ages.iter().enumerate().map(|(vm, age)| (format!("vm{vm}"), *age)));
        assert_eq!(line(&[Some(0.0), Some(59.9), None]), None);
        let two = "scanned a minute ago or before: vm2 4711 s, vm0 60 s";
        assert_eq!(line(&[Some(60.0), None, Some(4711.4), Some(1.0)]).as_deref(), Some(two));
        let seven = line(&[61.0, 62.0, 63.0, 64.0, 65.0, 66.0, 67.0].map(Some));
        let shown = "scanned a minute ago or before: vm6 67 s, vm5 66 s, vm4 65 s, vm3 64 s and 3 more";
        assert_eq!(seven.as_deref(), Some(shown));
    }

    #[test]
    fn only_the_whole_is_a_hundred_percent_and_only_nothing_is_zero() {
        let shown = [0, 1, 15, 7130, 9994, 9999, 10_000, 20_000].map(|share| percent(Some(share)));
        assert_eq!(shown, ["0.0 %", "0.1 %", "0.1 %", "71.3 %", "99.9 %", "99.9 %", "100.0 %", "200.0 %"]);
    }
}
