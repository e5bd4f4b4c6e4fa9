//! The NAS Parallel Benchmarks on native threads: classes S and W give the published values, whoever computes them.
mod runner;

use std::sync::{Mutex, PoisonError};

use runner::{has, run, run_with};
use wideleaf_protocol::ExitCode;

/// 4 KiB pages that hold class W of every kernel with two threads: CG's matrix takes 8 MiB.
const PAGES: usize = 16 << 8;

/// One test at a time: the members of a team spin, and two teams on two CPUs would wait for each other's time slices.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs classes S and W on one and on two threads.
fn passes(kernel: &str, verified: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (class, threads) in [("S", 1), ("S", 2), ("W", 1), ("W", 2)] {
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
fn the_matrix_of_cg_has_as_many_entries_as_the_npbs() {
    for (class, nonzeros) in [("S", 78148), ("W", 508_402)] {
        let (_, lines) = run(1, PAGES, &format!("npb.cg class={class}"));
        assert!(has(&lines, &format!("result name=nonzeros value={nonzeros}.0")), "{lines:#?}");
    }
}

#[test]
fn a_number_of_threads_that_divides_nothing_passes_too() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for kernel in ["npb.ep", "npb.is buckets=0", "npb.is buckets=1"] {
        let (code, lines) = run(3, PAGES, kernel);
        assert_eq!(code, ExitCode::Success, "{kernel}: {lines:#?}");
    }
}

#[test]
fn a_small_arena_is_refused_before_anything_is_touched() {
    for kernel in ["npb.ep", "npb.is", "npb.cg"] {
        let (code, lines) = run(1, 16, &format!("{kernel} class=C"));
        assert_eq!(code, ExitCode::Unsupported, "{kernel}: {lines:#?}");
        let verbs: Vec<_> = lines.iter().map(|line| line.split(' ').nth(1).unwrap_or_default()).collect();
        assert_eq!(verbs, ["hello", "panic", "exit"], "{kernel}: {lines:#?}");
    }
}

#[test]
fn the_lines_come_in_the_order_a_host_relies_on() {
    let (_, lines) = run(1, PAGES, "npb.is");
    let verbs = lines.iter().map(|line| line.split(' ').nth(1).unwrap_or_default());
    // On a busy machine there may be time for one.
    let verbs: Vec<_> = verbs.filter(|verb| *verb != "progress").collect();
    assert_eq!(verbs.join(" "), "hello region begin end begin end result result begin end verify exit");
}

#[test]
fn the_timed_part_says_between_its_steps_how_far_it_is() {
    // By a clock of 1000 ticks a second every step takes longer than the least time between two lines.
    for (kernel, line) in [("npb.is", "done=9 total=10"), ("npb.cg", "done=14 total=15"), ("npb.ep", "total=256")] {
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
