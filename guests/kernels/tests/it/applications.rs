//! STREAM, Sweep3D, the adaptive mesh, the equation of state and the latencies on native threads: they verify
//! themselves for any number of threads.
use crate::runner::{has, run, run_with};
use wideleaf_protocol::ExitCode;

/// 4 KiB pages of 32 MiB, which hold Sweep3D's 50³ cells with two threads.
const PAGES: usize = 32 << 8;

/// Runs a line on that many threads, and expects it to pass with `verified` checks.
fn passes(threads: usize, line: &str, verified: &str) -> Vec<String> {
    let (code, lines) = run(threads, PAGES, line);
    assert_eq!(code, ExitCode::Success, "{line}, {threads} threads: {lines:#?}");
    assert!(has(&lines, &format!("verify status=pass errors=0 checked={verified}")), "{line}: {lines:#?}");
    lines
}

/// The value of a result.
fn value(lines: &[String], name: &str) -> f64 {
    let begin = format!("@wideleaf result name={name} value=");
    let rest =
        lines.iter().find_map(|line| line.strip_prefix(&begin)).unwrap_or_else(|| panic!("no {name}: {lines:#?}"));
    rest.split(' ')
        .next()
        .and_then(|value| value.parse().ok())
        .unwrap_or_else(|| panic!("{name} is not a number: {rest}"))
}

#[test]
fn stream_passes_and_says_how_large_its_arrays_are() {
    for threads in [1, 2] {
        let lines = passes(threads, "stream words=100003 times=5", "3");
        for name in ["copy", "scale", "add", "triad"] {
            let [least, average, most] = ["min", "avg", "max"].map(|kind| value(&lines, &format!("{name}_{kind}")));
            assert!(0.0 < least && least <= average && average <= most, "{lines:#?}");
            let bytes = if name == "copy" || name == "scale" { 16.0 } else { 24.0 };
            let rate = bytes * 100_003.0 / least / 1e6;
            assert!((value(&lines, name) / rate - 1.0).abs() < 1e-9, "{name}: {lines:#?}");
        }
        if has(&lines, "result name=cache ") {
            let caches = 100_003.0 * 8.0 / value(&lines, "cache");
            assert_eq!(value(&lines, "caches_per_array"), caches, "size of an array in multiples of the last cache");
        }
    }
}

#[test]
fn sweep3d_gives_the_reference_s_numbers_for_50_cells() {
    for threads in [1, 2] {
        // Large blocks, so that threads that share a CPU seldom wait for each other.
        let lines = passes(threads, "sweep3d n=50 mk=25", "33");
        assert_eq!(value(&lines, "fixups"), 58704.0);
    }
}

#[test]
fn sweep3d_of_another_size_keeps_its_neutrons() {
    let lines = passes(1, "sweep3d n=17 mk=4 mmi=2", "1");
    assert!(value(&lines, "imbalance").abs() < 1e-10, "{lines:#?}");
}

#[test]
fn every_number_and_sum_of_the_mesh_is_right() {
    for (threads, line, checked) in [
        (1, "amr blocks=16 passes=3", 16 * 512 * 12 + 3 * 12),
        (2, "amr blocks=16 passes=3", 16 * 512 * 12 + 3 * 12),
        (2, "amr blocks=5 cells=5 guards=3 variables=7 passes=6", 5 * 125 * 7 + 6 * 7),
        (2, "amr blocks=1 cells=2 variables=1 passes=1", 8 + 1),
    ] {
        let lines = passes(threads, line, &checked.to_string());
        assert!(value(&lines, "updates") > 0.0 && value(&lines, "gathers") > 0.0, "{lines:#?}");
    }
}

#[test]
fn every_zone_of_the_equation_of_state_and_every_point_of_its_table_is_right() {
    let table = 541 * 201;
    for (threads, line, zones) in [
        (1, "eos blocks=8 passes=2", 8 * 512),
        (2, "eos blocks=8 passes=2", 8 * 512),
        (3, "eos blocks=5 cells=3 guards=2 variables=10 passes=3", 5 * 27),
    ] {
        let lines = passes(threads, line, &(zones + table).to_string());
        assert!(value(&lines, "zones") > 0.0 && (3.0..6.0).contains(&value(&lines, "lookups")), "{lines:#?}");
    }
}

#[test]
fn latencies_are_reported_for_every_footprint() {
    let lines = passes(1, "latency bytes=1M rounds=1", "82");
    for spots in [8, 64, 240, 256] {
        assert!(value(&lines, &format!("pages{spots}")) > 0.0 && value(&lines, &format!("dense{spots}")) > 0.0);
    }
    assert!(!has(&lines, "result name=pages288"), "{lines:#?}");
    assert_eq!(value(&lines, "load"), value(&lines, "pages256"));
    assert_eq!((value(&lines, "rounds"), value(&lines, "matches")), (1.0, 0.0));
}

#[test]
fn without_a_known_clock_latencies_are_in_ticks() {
    let (code, lines) = run_with(1, 0, PAGES, "latency bytes=256K rounds=1", |_, _| ());
    assert_eq!(code, ExitCode::Success, "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("name=pages64 ") && line.ends_with(" unit=ticks")), "{lines:#?}");
}

#[test]
fn invalid_parameters_are_refused_with_the_valid_ones() {
    for (line, message) in [
        ("sweep3d mmi=4", "mmi=4: expected one of 1, 2, 3, 6"),
        ("sweep3d n=20 mk=21", "mk=21: expected a count from 1 to 20"),
        ("sweep3d n=15", "n=15: expected a count from 16 to 400"),
        ("stream times=1", "times=1: expected a count from 2 to 250"),
        ("amr cells=3 guards=4", "guards=4: expected a count from 2 to 3"),
        ("eos variables=9", "variables=9: expected a count from 10 to 64"),
        ("latency bytes=16K", "bytes=16K: expected a size in bytes (K, M, G, T) from 32768 to "),
    ] {
        let (code, lines) = run(1, PAGES, line);
        assert_eq!(code, ExitCode::BadArguments, "{line}");
        assert!(has(&lines, &format!("panic message={message}")), "{line}: {lines:#?}");
    }
}
