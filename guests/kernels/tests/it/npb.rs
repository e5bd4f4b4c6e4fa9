//! The NAS Parallel Benchmarks on native threads: classes S and W give the published values for any number of
//! threads.
use crate::runner::{has, run, run_with};
use wideleaf_protocol::ExitCode;

/// 4 KiB pages that hold class W of every kernel with two threads: MG's grids take 57 MiB and up to 2 MiB to their
/// first border.
const PAGES: usize = 64 << 8;

/// The reference's order is slower, and class S also covers the split between two threads.
const REFERENCE: &[(&str, usize)] = &[("S", 1), ("S", 2), ("W", 1)];

/// Runs classes S and W on one and on two threads.
fn passes(kernel: &str, verified: &str) {
    passes_in(&[("S", 1), ("S", 2), ("W", 1), ("W", 2)], kernel, verified);
}

fn passes_in(runs: &[(&str, usize)], kernel: &str, verified: &str) {
    for &(class, threads) in runs {
        let (code, lines) = run(threads, PAGES, &format!("{kernel} class={class}"));
        assert_eq!(code, ExitCode::Success, "class {class}, {threads} threads: {lines:#?}");
        assert!(has(&lines, &format!("verify status=pass {verified}")), "{lines:#?}");
        assert!(has(&lines, "result name=seconds") && has(&lines, "result name=mops"), "{lines:#?}");
    }
}

#[test]
fn ep_gives_the_published_sums() {
    passes("npb.ep", "errors=0 checked=3");
}

#[test]
fn is_gives_the_published_ranks_with_and_without_buckets() {
    passes("npb.is buckets=0", "errors=0 checked=51");
    passes("npb.is buckets=1", "errors=0 checked=51");
}

#[test]
fn cg_gives_the_published_eigenvalue() {
    passes("npb.cg", "errors=0 checked=1");
}

#[test]
fn ft_gives_the_published_checksums() {
    passes("npb.ft", "errors=0 checked=6");
}

#[test]
fn the_checksums_of_ft_do_not_depend_on_the_number_of_threads() {
    let checksums = |threads| {
        let (_, mut lines) = run(threads, PAGES, "npb.ft");
        lines.retain(|line| line.contains("name=checksum"));
        lines
    };
    assert_eq!(checksums(1).len(), 4);
    assert_eq!(checksums(1), checksums(3));
}

#[test]
fn mg_gives_the_published_norm() {
    passes("npb.mg", "errors=0 checked=1");
}

#[test]
fn lu_gives_the_published_norms_and_integral_in_both_orders() {
    passes("npb.lu", "errors=0 checked=11");
    passes_in(REFERENCE, "npb.lu order=reference", "errors=0 checked=11");
}

#[test]
fn bt_gives_the_published_norms_in_both_orders() {
    passes("npb.bt", "errors=0 checked=10");
    passes_in(REFERENCE, "npb.bt order=reference", "errors=0 checked=10");
}

#[test]
fn sp_gives_the_published_norms_in_both_orders() {
    passes("npb.sp", "errors=0 checked=10");
    passes_in(REFERENCE, "npb.sp order=reference", "errors=0 checked=10");
}

#[test]
fn the_matrix_of_cg_has_as_many_entries_as_the_npbs() {
    for (class, nonzeros) in [("S", 78148), ("W", 508_402)] {
        let (_, lines) = run(1, PAGES, &format!("npb.cg class={class}"));
        assert!(has(&lines, &format!("result name=nonzeros value={nonzeros}.0")), "{lines:#?}");
    }
}

#[test]
fn a_number_of_threads_that_divides_nothing_passes_too() {
    // npb.cg has over a thousand barriers. Threads that never yielded took minutes for that on two busy CPUs.
    for kernel in ["npb.ep", "npb.is buckets=0", "npb.is buckets=1", "npb.mg", "npb.bt", "npb.sp", "npb.cg"] {
        let (code, lines) = run(3, PAGES, kernel);
        assert_eq!(code, ExitCode::Success, "{kernel}: {lines:#?}");
    }
}

#[test]
fn a_small_arena_is_refused_before_anything_is_touched() {
    for kernel in ["npb.ep", "npb.is", "npb.cg", "npb.ft", "npb.mg", "npb.lu", "npb.bt", "npb.sp"] {
        let (code, lines) = run(1, 16, &format!("{kernel} class=C"));
        assert_eq!(code, ExitCode::Unsupported, "{kernel}: {lines:#?}");
        let verbs: Vec<_> = lines.iter().map(|line| line.split(' ').nth(1).unwrap_or_default()).collect();
        assert_eq!(verbs, ["hello", "problem", "panic", "exit"], "{kernel}: {lines:#?}");
    }
}

#[test]
fn cg_names_apart_what_it_uses_all_the_time_and_what_only_made_its_matrix() {
    let (_, lines) = run(1, PAGES, "npb.cg class=S");
    let regions: Vec<_> = lines.iter().filter(|line| line.contains(" region ")).collect();
    let [matrix, temporary] = regions[..] else { panic!("{regions:#?}") };
    assert!(matrix.contains("name=matrix ") && temporary.contains("name=temporary "), "{regions:#?}");
    let number = |line: &str, key: &str| {
        let value = line.split(' ').find_map(|field| field.strip_prefix(key)).expect(key);
        value.strip_prefix("0x").map_or_else(|| value.parse(), |hex| u64::from_str_radix(hex, 16)).expect(key)
    };
    let [address, bytes] = ["address=", "bytes="].map(|key| number(matrix, key));
    assert_eq!(number(temporary, "address="), address + bytes, "{regions:#?}");
    // Rows of class S; 12 bytes for each of at most 1400 * 64 entries, the starts of rows, and five vectors.
    let rows = 1400;
    assert!((12 * 64 * rows + 44 * rows..12 * 64 * rows + 45 * rows + 512).contains(&bytes), "{bytes}");
}

#[test]
fn the_lines_come_in_the_order_a_host_relies_on() {
    let (_, lines) = run(1, PAGES, "npb.is");
    let verbs = lines.iter().map(|line| line.split(' ').nth(1).unwrap_or_default());
    // A busy machine may have time for only one.
    let verbs: Vec<_> = verbs.filter(|verb| *verb != "progress").collect();
    assert_eq!(verbs.join(" "), "hello problem region begin end begin end result result begin end verify exit");
}

#[test]
fn size_and_iterations_of_class_a_are_the_npbs() {
    let problems = [
        ("npb.bt", "size=64x64x64 iterations=200"),
        ("npb.cg", "size=14000 iterations=15"),
        // 2^(28 + 1) numbers; the NPB says 0 iterations.
        ("npb.ep", "size=536870912 iterations=0"),
        ("npb.ft", "size=256x256x128 iterations=6"),
        ("npb.is", "size=8388608 iterations=10"),
        ("npb.lu", "size=64x64x64 iterations=250"),
        ("npb.mg", "size=256x256x256 iterations=4"),
        ("npb.sp", "size=64x64x64 iterations=400"),
    ];
    for (kernel, problem) in problems {
        // The line comes before the refusal.
        let (_, lines) = run(1, 16, &format!("{kernel} class=A"));
        assert!(has(&lines, &format!("problem class=A {problem}")), "{lines:#?}");
    }
}

#[test]
fn the_timed_part_reports_its_progress_between_steps() {
    // By a clock of 1000 ticks a second every step takes longer than the minimum time between two lines.
    let ends = [
        ("npb.is", "done=9 total=10"),
        ("npb.cg", "done=375 total=375"),
        ("npb.ep", "total=256"),
        ("npb.ft", "done=5 total=6"),
        ("npb.mg", "done=3 total=4"),
        ("npb.lu", "done=49 total=50"),
        ("npb.bt", "done=59 total=60"),
        ("npb.sp", "done=99 total=100"),
    ];
    for (kernel, line) in ends {
        let (code, lines) = run_with(1, 1000, PAGES, &format!("{kernel} class=S"), |_, _| ());
        assert_eq!(code, ExitCode::Success);
        let progress = lines.iter().rfind(|line| line.contains(" progress phase=compute "));
        assert!(progress.is_some_and(|last| last.ends_with(line)), "{kernel}: {lines:#?}");
    }
}

#[test]
fn without_a_known_clock_there_are_ticks_and_no_rate() {
    let (code, lines) = run_with(1, 0, PAGES, "npb.is", |_, _| ());
    assert_eq!(code, ExitCode::Success);
    assert!(has(&lines, "result name=ticks") && !has(&lines, "result name=mops"), "{lines:#?}");
}
