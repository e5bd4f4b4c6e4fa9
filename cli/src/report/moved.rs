//! Lines about a guest that was saved, or moved from one run to another, and what that cost it.

use wideleaf_control::vm::{BeforePauseView, MigratedView, PostCopyView};
use wideleaf_policies::Bytes;
use wideleaf_run::report::ArrivedReport;

/// Where a guest has gone.
pub fn migrated(moved: &MigratedView) -> String {
    let MigratedView { to, sent_bytes, rounds, downtime_ms, seconds, .. } = moved;
    let huge = |bytes: u64| Bytes::new(bytes).to_string();
    let at_target = moved.huge_bytes_at_target.map_or("unknown".to_owned(), huge);
    format!(
        "migrated to {to}: {} in {seconds:.2} s and {rounds} rounds, no guest ran for {downtime_ms:.1} ms; on pages of \
         2 MiB and more: {} at first, {} at the switch, {at_target} at the target{}{}",
        Bytes::new(*sent_bytes),
        huge(moved.huge_bytes_before),
        huge(moved.huge_bytes_at_switch),
        before_pause(moved.before_pause.as_ref()),
        moved.post_copy.as_ref().map_or(String::new(), followed),
    )
}

/// A guest that has all of its RAM since pages came over another connection.
pub fn recovered(view: &PostCopyView) -> String {
    format!("all of the RAM is here{}", followed(view))
}

/// What KVM did for a guest before it paused, if that is known.
pub fn before_pause(before: Option<&BeforePauseView>) -> String {
    before.map_or(String::new(), |before| format!("; {}", paid(before, "before the pause")))
}

/// What KVM did for a guest until a moment that `until` names.
pub fn paid(paid: &BeforePauseView, until: &str) -> String {
    let BeforePauseView { seconds, system_ms, faults, exits } = paid;
    format!(
        "in the {seconds:.2} s {until} its vCPUs spent {system_ms:.0} ms in KVM and the kernel, with {faults} faults \
         and {exits} exits"
    )
}

/// RAM that followed a guest.
fn followed(view: &PostCopyView) -> String {
    let PostCopyView { windows_by_touch, windows_in_background, wait_p50_us, wait_p99_us, wait_max_us, .. } = view;
    let (missing, ms) = (Bytes::new(view.missing_bytes), |us: &f64| us / 1e3);
    let lost = match view.connections_lost {
        0 => String::new(),
        1 => ", one connection lost".to_owned(),
        lost => format!(", {lost} connections lost"),
    };
    let when = view.seconds.map_or("until it ended".to_owned(), |seconds| format!("within {seconds:.2} s"));
    format!(
        "; {missing} followed {when}, {windows_by_touch} windows at a touch and {windows_in_background} before, waits \
         of {:.2} ms (p50), {:.2} ms (p99), {:.2} ms (max){lost}",
        ms(wait_p50_us),
        ms(wait_p99_us),
        ms(wait_max_us),
    )
}

/// Where a guest came from.
pub fn arrived(arrived: &ArrivedReport) -> String {
    let ArrivedReport { from, received_bytes, seconds, huge_bytes, base_bytes, source, .. } = arrived;
    let of_source = source.map_or(String::new(), |source| {
        let (rounds, ms) = (source.rounds, source.downtime_ms);
        let before = Bytes::new(source.huge_bytes_at_switch);
        format!(
            ", in {rounds} rounds, no guest ran for {ms:.1} ms; {before} were on pages of 2 MiB and more there{}",
            before_pause(source.before_pause.as_ref()),
        )
    });
    format!(
        "came from {from}: {} in {seconds:.2} s{of_source}; {} of {} are on such pages here{}",
        Bytes::new(*received_bytes),
        Bytes::new(*huge_bytes),
        Bytes::new(huge_bytes + base_bytes),
        arrived.post_copy.as_ref().map_or(String::new(), followed),
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
        let paid = BeforePauseView { seconds: 1.25, system_ms: 184.4, faults: 31_200, exits: 31_950 };
        let said = "; in the 1.25 s before the pause its vCPUs spent 184 ms in KVM and the kernel, with 31200 faults \
                    and 31950 exits";
        let with = MigratedView { before_pause: Some(paid), ..moved.clone() };
        assert_eq!(migrated(&with), migrated(&moved) + said);
        let source = Some(Left { downtime_ms: 12.25, rounds: 2, huge_bytes_at_switch: 4 << 20, ..Left::default() });
        let report = ArrivedReport {
            from: "stdio".to_owned(),
            received_bytes: 3 << 20,
            huge_bytes: 2 << 20,
            base_bytes: 1 << 20,
            source,
            ..ArrivedReport::default()
        };
        assert_eq!(
            arrived(&report),
            "came from stdio: 3 MiB in 0.00 s, in 2 rounds, no guest ran for 12.2 ms; 4 MiB were on pages of 2 MiB and \
             more there; 2 MiB of 3 MiB are on such pages here"
        );
        let source = source.map(|source| Left { before_pause: Some(paid), ..source });
        let with = ArrivedReport { source, ..report.clone() };
        assert!(arrived(&with).contains(&format!("more there{said}; 2 MiB of 3 MiB")), "{}", arrived(&with));
        let post_copy = PostCopyView {
            seconds: Some(0.5),
            missing_bytes: 4 << 20,
            windows_by_touch: 3,
            windows_in_background: 2,
            wait_p50_us: 310.0,
            wait_p99_us: 1200.0,
            wait_max_us: 1250.0,
            ..PostCopyView::default()
        };
        let end = "; 4 MiB followed within 0.50 s, 3 windows at a touch and 2 before, waits of 0.31 ms (p50), 1.20 ms \
                   (p99), 1.25 ms (max)";
        let with = ArrivedReport { post_copy: Some(post_copy), ..report.clone() };
        assert_eq!(arrived(&with), arrived(&report) + end);
        assert!(!arrived(&ArrivedReport { source: None, ..report }).contains("rounds"), "the source did not say");
    }
}
