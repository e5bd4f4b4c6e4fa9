//! Lines about a guest that moved from one run to another.

use wideleaf_control::vm::MigratedView;
use wideleaf_policies::Bytes;
use wideleaf_run::report::ArrivedReport;

/// Where a guest has gone.
pub fn migrated(moved: &MigratedView) -> String {
    let MigratedView { to, sent_bytes, rounds, downtime_ms, seconds, .. } = moved;
    let huge = |bytes: u64| Bytes::new(bytes).to_string();
    let at_target = moved.huge_bytes_at_target.map_or("unknown".to_owned(), huge);
    format!(
        "migrated to {to}: {} in {seconds:.2} s and {rounds} rounds, no guest ran for {downtime_ms:.1} ms; on pages of \
         2 MiB and more: {} at first, {} at the switch, {at_target} at the target",
        Bytes::new(*sent_bytes),
        huge(moved.huge_bytes_before),
        huge(moved.huge_bytes_at_switch),
    )
}

/// Where a guest came from.
pub fn arrived(arrived: &ArrivedReport) -> String {
    let ArrivedReport { from, received_bytes, seconds, huge_bytes, base_bytes, source, .. } = arrived;
    let of_source = source.map_or(String::new(), |source| {
        let (rounds, ms) = (source.rounds, source.downtime_ms);
        let before = Bytes::new(source.huge_bytes_at_switch);
        format!(", in {rounds} rounds, no guest ran for {ms:.1} ms; {before} were on pages of 2 MiB and more there")
    });
    format!(
        "came from {from}: {} in {seconds:.2} s{of_source}; {} of {} are on such pages here",
        Bytes::new(*received_bytes),
        Bytes::new(*huge_bytes),
        Bytes::new(huge_bytes + base_bytes),
    )
}

#[cfg(test)]
mod tests {
    use wideleaf_run::report::Left;

    use super::*;

    #[test]
    fn both_sides_say_how_long_no_guest_ran_and_what_was_large() {
        let moved = MigratedView {
            to: "unix:a".to_owned(),
            sent_bytes: 3 << 20,
            rounds: 2,
            downtime_ms: 12.25,
            seconds: 1.5,
            huge_bytes_before: 2 << 20,
            ..MigratedView::default()
        };
        assert_eq!(
            migrated(&moved),
            "migrated to unix:a: 3 MiB in 1.50 s and 2 rounds, no guest ran for 12.2 ms; on pages of 2 MiB and more: \
             2 MiB at first, 0 B at the switch, unknown at the target"
        );
        let source = Left { downtime_ms: 12.25, rounds: 2, huge_bytes_at_switch: 4 << 20, ..Left::default() };
        let report = ArrivedReport {
            from: "stdio".to_owned(),
            received_bytes: 3 << 20,
            huge_bytes: 2 << 20,
            base_bytes: 1 << 20,
            source: Some(source),
            ..ArrivedReport::default()
        };
        assert_eq!(
            arrived(&report),
            "came from stdio: 3 MiB in 0.00 s, in 2 rounds, no guest ran for 12.2 ms; 4 MiB were on pages of 2 MiB and \
             more there; 2 MiB of 3 MiB are on such pages here"
        );
        assert!(!arrived(&ArrivedReport { source: None, ..report }).contains("rounds"), "the source did not say");
    }
}
