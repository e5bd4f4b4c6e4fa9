//! The effect of each policy on four kinds of memory: `phases`, natively, and the large windows of each set in the
//! report. Each policy is distinguished by a line in [`ROWS`].

use std::ops::RangeInclusive;

use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_policies::policy::POLICIES;

/// 18 windows: 8 in which the hot span moves, 4 sparse ones, 4 cold ones, 2 constantly written ones. Two seconds are
/// about twenty ticks of the manager; a policy that promotes all windows needs one.
const CMDLINE: &str = "--cmdline=hot=4M range=16M sparse=8M cold=8M constant=4M phases=4 phase_ms=500";
/// Sets with their numbers of windows, in the order of [`Row::large`].
const SETS: [(&str, u64); 4] = [("hot_range", 8), ("sparse", 4), ("cold", 4), ("constant", 2)];
/// Bloat of promoting one sparse window: all of its pages except the touched one.
const BLOAT_OF_SPARSE_WINDOW: u64 = 511 * 4096;

/// Expected effect of one policy on each set.
struct Row {
    /// Argument of `--policy`, with parameters if its default pace is too slow for the test.
    policy: &'static str,
    /// Number of large windows at the end in each of [`SETS`].
    large: [RangeInclusive<u64>; 4],
    /// Bytes that are resident only because their page is large.
    bloat: RangeInclusive<u64>,
}

const ROWS: &[Row] = &[
    Row { policy: "never", large: [0..=0, 0..=0, 0..=0, 0..=0], bloat: 0..=0 },
    Row {
        policy: "greedy",
        large: [8..=8, 4..=4, 4..=4, 2..=2],
        bloat: 4 * BLOAT_OF_SPARSE_WINDOW..=4 * BLOAT_OF_SPARSE_WINDOW,
    },
    // Full windows are promoted (a busy window may be refused until the end), sparse windows never.
    Row { policy: "utilization", large: [6..=8, 0..=0, 3..=4, 1..=2], bloat: 0..=0 },
    // Promoted in place, as they are filled; sparse windows only hold their frames.
    Row { policy: "reservation", large: [8..=8, 0..=0, 4..=4, 2..=2], bloat: 0..=0 },
    Row { policy: "auto", large: [6..=8, 0..=0, 3..=4, 1..=2], bloat: 0..=0 },
    // All of it is backed before the first touch, so there is no bloat afterwards.
    Row { policy: "prealloc", large: [8..=8, 4..=4, 4..=4, 2..=2], bloat: 0..=0 },
    Row { policy: "at-fault", large: [8..=8, 4..=4, 4..=4, 2..=2], bloat: 0..=0 },
    // Eight windows per wake-up, in address order, and the next wake-up comes after ten seconds.
    Row { policy: "thp", large: [7..=8, 0..=0, 0..=0, 0..=0], bloat: 0..=0 },
    Row { policy: "thp:scan_sleep_ms=100,max_ptes_none=64", large: [6..=8, 0..=0, 3..=4, 1..=2], bloat: 0..=0 },
    // One page per window is below the lowest bucket, and below half a window.
    Row { policy: "coverage", large: [6..=8, 0..=0, 3..=4, 1..=2], bloat: 0..=0 },
    Row { policy: "aligned", large: [6..=8, 0..=0, 3..=4, 1..=2], bloat: 0..=0 },
    // Used windows, full or sparse, but not idle ones; the fill may still be in the first samples.
    Row { policy: "schemes", large: [1..=8, 1..=4, 0..=2, 1..=2], bloat: 1..=4 * BLOAT_OF_SPARSE_WINDOW },
    // 64 MiB contain no whole giant page, so the result is that of greedy.
    Row {
        policy: "giant",
        large: [8..=8, 4..=4, 4..=4, 2..=2],
        bloat: 4 * BLOAT_OF_SPARSE_WINDOW..=4 * BLOAT_OF_SPARSE_WINDOW,
    },
];

/// Policies with a row that holds only if accesses can be sampled.
const NEED_ACCESS: &[&str] = &["schemes"];

fn name_of(policy: &str) -> &str {
    policy.split(':').next().unwrap_or(policy)
}

/// Report of a run under `policy`. The policy acts no sooner than the first phase. By then everything is filled, and
/// only the sparse set can bloat.
fn report(policy: &str) -> Value {
    report_with(policy, &[])
}

fn report_with(policy: &str, more: &[&str]) -> Value {
    let scratch = new_scratch();
    let delayed = ["--policy", policy, "--policy-delay=1ms"];
    let native = ["run", "--native", "phases", CMDLINE, "--memory=64M", "--timeout=5m", "--format=json"];
    let output = scratch.wideleaf(&[&native[..], &delayed, more].concat()).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// Whether this host can run a policy; if not, the reason is printed.
fn can_run(policy: &str) -> bool {
    let probed = wideleaf_memory::first_touch::probe();
    let why = probed.err().filter(|_| policy == "reservation");
    why.inspect(|why| println!("skipped {policy}: {why}")).is_none()
}

/// A run has the effect of this row; if not, says what is another.
fn fits(Row { policy, large, bloat }: &Row) -> Result<(), String> {
    let report = report(policy);
    assert_eq!(report["verification"]["passed"], true, "{policy}");
    let unanswered = report["manager"]["unanswered"].as_array().unwrap();
    if NEED_ACCESS.contains(policy) && !unanswered.is_empty() {
        println!("skipped, {policy} sees no accesses here: {unanswered:?}");
        return Ok(());
    }
    let regions = report["regions"].as_array().unwrap();
    assert_eq!(regions.len(), SETS.len(), "{policy}: {regions:?}");
    for ((region, (name, windows)), large) in regions.iter().zip(SETS).zip(large) {
        assert_eq!((&region["name"], &region["windows"]), (&name.into(), &windows.into()), "{policy}");
        let found = region["windows_host_large"].as_u64().unwrap();
        if !large.contains(&found) {
            return Err(format!("{policy}: {found} of {windows} windows of {name} are large, not {large:?}"));
        }
    }
    let bloated = report["manager"]["bloat_bytes"].as_u64().unwrap();
    if bloat.contains(&bloated) { Ok(()) } else { Err(format!("{policy}: {bloated} bytes of bloat, not {bloat:?}")) }
}

#[test]
fn each_policy_has_the_effect_of_its_row_on_each_set() {
    for row in ROWS.iter().filter(|row| can_run(row.policy)) {
        // Beside other tests a manager may have missed its ticks in the two seconds.
        if let Err(before) = fits(row) {
            fits(row).unwrap_or_else(|again| panic!("{again}; and before that, {before}"));
        }
    }
}

#[test]
fn at_fault_has_the_effect_of_its_row_on_memfd_ram_too() {
    if let Err(why) = wideleaf_memory::first_touch::probe() {
        return println!("skipped: {why}");
    }
    let Row { large, .. } = ROWS.iter().find(|row| row.policy == "at-fault").unwrap();
    let report = report_with("at-fault", &["--backing=memfd"]);
    assert_eq!(report["verification"]["passed"], true);
    assert_eq!(report["setup"]["backing"], "memfd");
    let found = |region: &Value| region["windows_host_large"].as_u64().unwrap();
    let found: Vec<u64> = report["regions"].as_array().unwrap().iter().map(found).collect();
    assert!(found.iter().zip(large).all(|(found, large)| large.contains(found)), "{found:?}, not {large:?}");
    // Each window by its fault, and none copied: the file gives 2 MiB in one piece (to root).
    let manager = &report["manager"];
    assert_eq!(manager["outcomes"]["first_touch.answered_2m"], 18, "{manager}");
    if nix::unistd::geteuid().is_root() {
        assert_eq!(manager["outcomes"]["first_touch.by_collapse"], Value::Null, "{manager}");
    }
    let region = &manager["first_touch_regions"][0];
    assert_eq!((&region["pages_2m_at_first"], &region["now"]["pages_2m"]), (&18.into(), &18.into()), "{region}");
    assert_eq!((&region["faults"], &region["now"]["demoted_2m"]), (&18.into(), &0.into()), "{region}");
}

#[test]
fn every_policy_has_a_row() {
    for policy in POLICIES {
        assert!(ROWS.iter().any(|row| name_of(row.policy) == policy.name), "{}", policy.name);
    }
}

#[test]
fn the_report_has_a_phase_with_its_rate_for_each_position_of_the_hot_span() {
    let report = report("never");
    let phases = report["phases"].as_array().unwrap();
    let names: Vec<_> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["fill", "hot0", "hot1", "hot2", "hot3", "verify"]);
    for name in &names[1..5] {
        let measured = &report["results"][name];
        assert!(measured["value"].as_f64().unwrap() > 0.0 && measured["unit"] == "updates/s", "{name}: {measured}");
    }
}
