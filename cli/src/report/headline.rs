//! The first line of a report: how the run ended, the guest's large pages and their time, the cost, and whether the
//! guest found its memory correct.
//!
//! ```text
//!   success: 510 of 510 windows on 2 MiB pages after 1.9 s; cost 4.1 s of CPU; no wrong word in 5662310400
//!   timed out: 512 MiB of 1 GiB on 2 MiB pages after 3.2 s; cost 85 ms of CPU
//! ```
//!
//! Unknown facts are left out: a guest without a verification is not called correct.

use wideleaf_policies::Bytes;

use wideleaf_run::report::{Counters, ManagerSummary, RamAtEnd, RunReport, Verification};

/// Kernels that compare each word of their memory with its only valid value. All other kernels of the table check
/// results.
const WORD_CHECKERS: [&str; 7] = ["balloon", "devices", "disk", "gups", "net", "pattern", "phases"];

/// Beginning of the manager's reason for having no pages of 1 GiB.
const NO_GIANT_PAGES: &str = "pages of 1 GiB: ";

/// One line for people, from the rest of the report. `wants_giants`: whether a policy of the run may request
/// pages of 1 GiB.
pub fn headline(report: &RunReport, wants_giants: bool) -> String {
    let mut parts = Vec::new();
    parts.extend(without_giants(report, wants_giants));
    parts.extend(coverage(report));
    parts.push(format!("cost {} of CPU", seconds(report.manager.cpu_s)));
    let verification = report.verification.as_ref().filter(|found| found.says_something());
    parts.extend(verification.map(|found| checked(report, found)));
    format!("{}: {}", report.outcome, parts.join("; "))
}

/// The reason why a policy that wants pages of 1 GiB got none.
fn without_giants(report: &RunReport, wants_giants: bool) -> Option<String> {
    let has_none = report.ram_at_end.is_none_or(|ram| ram.counters.host_1g_bytes == 0);
    (wants_giants && has_none).then(|| format!("nothing is on 1 GiB pages: {}", why_no_giant(&report.manager)))
}

/// Amount of memory on large pages: windows of the guest's data if the guest reported their place, else all RAM. The
/// time is that of all RAM, since the samples tell no regions apart: the guest's data were large by then.
fn coverage(report: &RunReport) -> Option<String> {
    let ram = report.ram_at_end?;
    let all_large = large_bytes(&ram);
    let windows: u64 = report.regions.iter().map(|region| region.windows).sum();
    let large: u64 = report.regions.iter().map(|region| region.windows_host_large).sum();
    let (what, has_large) = if windows > 0 {
        (format!("{large} of {windows} windows"), large > 0)
    } else {
        (format!("{} of {}", Bytes::new(all_large), Bytes::new(report.setup.memory_bytes)), all_large > 0)
    };
    let pages = match (ram.counters.host_2m_bytes, ram.counters.host_1g_bytes) {
        (_, 0) => "2 MiB pages",
        (0, _) => "1 GiB pages",
        (_, _) => "2 MiB and 1 GiB pages",
    };
    let when = has_large.then(|| reached(&report.manager, all_large)).flatten();
    Some(format!("{what} on {pages}{}", when.unwrap_or_else(|| " at the end".to_owned())))
}

fn checked(report: &RunReport, found: &Verification) -> String {
    let kernel = report.hello.as_ref().map_or("", |hello| hello.kernel.as_str());
    let what = match (WORD_CHECKERS.contains(&kernel), wideleaf_kernels::registry::by_name(kernel)) {
        (true, _) => "word",
        (false, Some(_)) => "result",
        (false, None) => "word or result",
    };
    match found {
        Verification { passed: true, errors: 0, checked, .. } => format!("no wrong {what} in {checked}"),
        Verification { passed: true, errors, checked, .. } => {
            format!("verified, with {errors} wrong {what}s in {checked}, which its rule allows")
        }
        Verification { errors, checked, .. } => format!("WRONG: {errors} of {checked} {what}s"),
    }
}

/// RAM on pages of 2 MiB and more, in bytes.
fn large_bytes(ram: &RamAtEnd) -> u64 {
    ram.counters.host_2m_bytes + ram.counters.host_1g_bytes
}

/// Time at which this amount of RAM was first on large pages, according to the manager's samples.
fn reached(manager: &ManagerSummary, large_bytes: u64) -> Option<String> {
    let is_reached = |counters: &Counters| counters.host_2m_bytes + counters.host_1g_bytes >= large_bytes;
    let first = manager.samples.iter().position(|sample| is_reached(&sample.counters))?;
    Some(match first {
        0 => " from the start".to_owned(),
        _ => format!(" after {}", seconds(manager.samples[first].at_s)),
    })
}

/// Reason why no page of 1 GiB holds guest RAM: the manager's reason, or else the results of its attempts.
fn why_no_giant(manager: &ManagerSummary) -> String {
    if let Some(why) = manager.unanswered.iter().find_map(|line| line.strip_prefix(NO_GIANT_PAGES)) {
        return why.to_owned();
    }
    let of_giants =
        manager.outcomes.iter().filter_map(|(name, count)| Some((name.strip_prefix("giant_promote.")?, count)));
    let mut at_first = manager.first_touch_regions.iter().flat_map(|region| &region.refused);
    if let Some((why, _)) = at_first.find(|(why, _)| why.starts_with("giant_")) {
        return format!("the first touch ended as {why}");
    }
    match of_giants.filter(|(result, _)| *result != "done").max_by_key(|(_, count)| **count) {
        Some((result, count)) => format!("{count} attempts ended as {result}"),
        None => "the manager made no attempt; it needs a whole GiB of guest RAM that begins at a multiple of 1 GiB"
            .to_owned(),
    }
}

/// A time for people, with at least two digits.
fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.1} s"),
        s if s >= 0.01 => format!("{:.0} ms", s * 1e3),
        s => format!("{:.1} ms", s * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_run::report::{Hello, Region, SampleAt};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn large(mib: u64) -> Counters {
        Counters { host_2m_bytes: mib * MIB, ..Counters::default() }
    }

    /// A guest of 1 GiB that had 512 MiB on 2 MiB pages at the end, all of them two seconds after its start.
    fn report() -> RunReport {
        let samples = [(0.0, 0), (1.0, 256), (2.0, 512), (3.0, 512)];
        let samples = samples.map(|(at_s, mib)| SampleAt { at_s, counters: large(mib) });
        let mut report = RunReport {
            outcome: "success".into(),
            ram_at_end: Some(RamAtEnd { counters: large(512), host_unbacked_bytes: 512 * MIB }),
            manager: ManagerSummary { samples: samples.into(), cpu_s: 0.085, ..ManagerSummary::default() },
            ..RunReport::default()
        };
        report.setup.memory_bytes = 1 << 30;
        report
    }

    #[test]
    fn a_guest_without_a_verification_or_with_one_of_nothing_is_not_called_correct() {
        let without = report();
        let line = "success: 512 MiB of 1 GiB on 2 MiB pages after 2.0 s; cost 85 ms of CPU";
        assert_eq!(headline(&without, false), line);
        let nothing = Verification { passed: true, errors: 0, checked: 0, first_mismatch: None };
        let of_nothing = RunReport { verification: Some(nothing), ..without };
        assert_eq!(headline(&of_nothing, false), line);
        assert!(!crate::report::to_table(&of_nothing, false).contains("verification"));
    }

    #[test]
    fn a_kernel_that_reports_the_place_of_its_data_is_counted_in_windows_that_were_large_by_then() {
        let mut report = report();
        let region = |windows, windows_host_large| Region {
            address: 0,
            name: "table".into(),
            bytes: windows * 2 * MIB,
            windows,
            windows_host_large,
        };
        report.regions = vec![region(200, 128), region(10, 0)];
        report.hello = Some(Hello { kernel: "pattern".into(), ..Hello::default() });
        report.verification = Some(Verification { passed: true, errors: 0, checked: 99, first_mismatch: None });
        report.manager.cpu_s = 4.14;
        report.outcome = "timed out".into();
        // The 256 MiB that were large after 1 s may all be other memory.
        let line = "timed out: 128 of 210 windows on 2 MiB pages after 2.0 s; cost 4.1 s of CPU; no wrong word in 99";
        assert_eq!(headline(&report, false), line);
    }

    #[test]
    fn wrong_words_and_results_are_reported() {
        let mut report = report();
        let mut ends_with = |kernel: &str, passed, errors, end: &str| {
            report.hello = Some(Hello { kernel: kernel.into(), ..Hello::default() });
            report.verification = Some(Verification { passed, errors, checked: 50, first_mismatch: None });
            let line = headline(&report, false);
            assert!(line.ends_with(end), "{line}");
        };
        ends_with("gups", false, 3, "; WRONG: 3 of 50 words");
        ends_with("npb.cg", true, 0, "; no wrong result in 50");
        ends_with("gups", true, 1, "; verified, with 1 wrong words in 50, which its rule allows");
        ends_with("foreign", true, 0, "; no wrong word or result in 50");
    }

    #[test]
    fn a_policy_for_giants_without_any_says_so_first_with_the_reason() {
        let mut report = report();
        report.manager.unanswered = vec!["pages of 1 GiB: the pool has none".into()];
        let starts_with = |report: &RunReport, start: &str| {
            let line = headline(report, true);
            assert!(line.starts_with(start), "{line}");
        };
        starts_with(&report, "success: nothing is on 1 GiB pages: the pool has none; 512 MiB of 1 GiB on ");
        report.manager.unanswered.clear();
        report.manager.outcomes = [("giant_promote.refused_no_memory".to_owned(), 7)].into();
        starts_with(&report, "success: nothing is on 1 GiB pages: 7 attempts ended as refused_no_memory; ");
        report.manager.outcomes.clear();
        starts_with(&report, "success: nothing is on 1 GiB pages: the manager made no attempt; ");
        report.ram_at_end = Some(RamAtEnd {
            counters: Counters { host_1g_bytes: 1 << 30, ..Counters::default() },
            host_unbacked_bytes: 0,
        });
        starts_with(&report, "success: 1 GiB of 1 GiB on 1 GiB pages at the end; ");
    }

    #[test]
    fn memory_that_is_large_at_the_first_sample_was_so_from_the_start() {
        let mut report = report();
        report.manager.samples[0].counters = large(512);
        assert!(headline(&report, false).contains(" on 2 MiB pages from the start; "));
        report.ram_at_end = None;
        assert_eq!(headline(&report, false), "success: cost 85 ms of CPU");
    }
}
