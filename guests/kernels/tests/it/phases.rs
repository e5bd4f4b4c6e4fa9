//! Phases: its sets lie where it says, every word is known at any time, and damage to any set is detected.
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::runner::{has, run, run_with};
use proptest::prelude::*;
use wideleaf_kernels::Arena;
use wideleaf_kernels::native::measure_tsc_hz;
use wideleaf_kernels::phases::{Layout, Scattered, Set, Sizes, WINDOW_WORDS, generation_of_touched};
use wideleaf_kernels::rounds::part;
use wideleaf_kernels::test_pattern::{FIRST_GENERATION, PAGE_WORDS, word};
use wideleaf_protocol::{ExitCode, Message};

/// The smallest run with a moving hot span and a sparse set of two windows: 14 MiB.
const SMALL: &str = "hot=2M range=4M sparse=4M cold=2M constant=4M";
const SMALL_SIZES: Sizes = Sizes { hot: 1, range: 2, sparse: 2, cold: 1, constant: 2 };
/// 4 KiB pages of all its sets.
const SMALL_PAGES: usize = 7 * 512;

fn small() -> Layout {
    Layout::new(SMALL_SIZES)
}

proptest! {
    #[test]
    fn sets_lie_side_by_side_in_whole_windows(
        hot in 1..9u64, spans in 1..65u64, sparse in 0..50u64, cold in 0..50u64, constant in 0..50u64,
    ) {
        let layout = Layout::new(Sizes { hot, range: hot * spans, sparse, cold, constant });
        let mut next = 0;
        for set in layout.sets() {
            prop_assert_eq!(set.first_window, next);
            next += set.windows;
            for page in [0, set.pages().saturating_sub(1)].into_iter().filter(|page| *page < set.pages()) {
                let window = set.page(page) / WINDOW_WORDS;
                prop_assert!((set.first_window..next).contains(&window) && set.page(page).is_multiple_of(PAGE_WORDS));
            }
        }
        prop_assert_eq!(layout.words(), next * WINDOW_WORDS);
        prop_assert_eq!(layout.spans(), spans);
    }

    #[test]
    fn a_touched_word_has_as_many_generations_as_passes_that_rewrote_it(word in 0..PAGE_WORDS, passes in 0..5000u64) {
        let rewritten = (0..passes).filter(|pass| pass % PAGE_WORDS == word).count() as u64;
        prop_assert_eq!(generation_of_touched(word, passes), FIRST_GENERATION + rewritten);
    }
}

#[test]
fn a_pass_meets_every_hot_word_once_however_it_is_shared() {
    for (windows, vcpus) in [(1, 1), (2, 3), (3, 2), (5, 16)] {
        let words = windows * WINDOW_WORDS;
        let mut met = vec![0; words as usize];
        for vcpu in 0..vcpus {
            Scattered::new(windows, part(words, vcpu, vcpus)).for_each(|word| met[word as usize] += 1);
        }
        assert!(met.iter().all(|times| *times == 1), "{windows} windows, {vcpus} vCPUs");
    }
}

#[test]
fn a_pass_leaves_a_page_at_once_and_returns_at_no_fixed_distance() {
    let pages: Vec<_> = Scattered::new(1, 0..WINDOW_WORDS).map(|word| word / PAGE_WORDS).collect();
    let returns = |distance: usize| pages.iter().zip(&pages[distance..]).filter(|(page, later)| page == later).count();
    // A random order gives one in 512, which is 512 of 2^18; a stride has all of them at some distances and none at
    // the others.
    let most = (1..4096).map(returns).max();
    assert!(most.is_some_and(|most| most < 4 * 512), "{most:?} returns at one distance");
}

#[test]
fn the_hot_span_moves_by_its_own_size_and_comes_round() {
    let layout = Layout::new(Sizes { hot: 2, range: 6, ..SMALL_SIZES });
    let windows = |phase: u64| layout.hot_in(phase).start / WINDOW_WORDS..layout.hot_in(phase).end / WINDOW_WORDS;
    assert_eq!([0, 1, 2, 3].map(windows), [0..2, 2..4, 4..6, 0..2]);
}

#[test]
fn a_sparse_window_has_one_page_and_not_always_the_same() {
    let sparse = Layout::new(Sizes { sparse: 600, ..SMALL_SIZES }).sparse;
    let page_of_window = |page: u64| sparse.page(page) % WINDOW_WORDS / PAGE_WORDS;
    assert_eq!(sparse.pages(), 600);
    assert_eq!([0, 1, 511, 512].map(page_of_window), [0, 1, 511, 0]);
    assert!((0..600).all(|page| sparse.page(page) / WINDOW_WORDS == sparse.first_window + page));
}

#[test]
fn phases_passes_with_one_and_more_threads_also_when_the_span_comes_round() {
    for threads in [1, 2, 3] {
        let (code, lines) = run(threads, SMALL_PAGES, &format!("phases {SMALL} phases=3 passes=2"));
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        // The checks are 6 passes over 2^18 hot words, 2 sparse and 1024 constant pages; then 5 full windows and 2
        // pages.
        let checked = 6 * (262_144 + 2 + 1024) + 5 * 262_144 + 2 * 512;
        assert!(has(&lines, &format!("verify status=pass errors=0 checked={checked}")), "{lines:#?}");
        assert!(has(&lines, "result name=updates value=1572864.0 unit=updates"), "{lines:#?}");
        assert!(has(&lines, &format!("gaps vcpu={}", threads - 1)), "{lines:#?}");
    }
}

#[test]
fn phases_prints_its_lines_in_the_order_a_host_relies_on() {
    let (_, lines) = run(1, SMALL_PAGES, &format!("phases {SMALL} passes=1"));
    let is_progress = |line: &&String| line.contains(" progress ");
    // The line at a phase's end always appears; others appear only on a slow machine.
    assert!(lines.iter().filter(is_progress).any(|line| line.contains("phase=hot1 ") && line.contains("done=262144 ")));
    let verbs: Vec<_> =
        lines.iter().filter(|line| !is_progress(line)).map(|line| line.split(' ').nth(1).unwrap_or_default()).collect();
    let expected = "hello region region region region begin end begin end result begin end result \
                    result result result gaps begin end verify exit";
    assert_eq!(verbs.join(" "), expected);
    for line in ["begin phase=hot0", "end phase=hot0", "result name=hot0", "begin phase=hot1", "result name=hot1"] {
        assert!(has(&lines, line), "no {line} in {lines:#?}");
    }
}

/// Names of the parts of a run in their order.
fn parts_of(lines: &[String]) -> Vec<&str> {
    lines.iter().filter_map(|line| line.split(" begin phase=").nth(1)?.split(' ').next()).collect()
}

#[test]
fn the_cold_set_is_filled_and_read_before_the_other_sets_or_read_after_all_are_filled() {
    for threads in [1, 3] {
        for (line, parts) in [
            ("cold=2M", ["fill", "hot0", "verify"].as_slice()),
            ("cold=2M cold_ms=5", &["fill", "cold", "hot0", "verify"]),
            ("cold=2M first=hot cold_ms=0", &["fill", "hot0", "verify"]),
            ("cold=2M first=cold", &["cold", "fill", "hot0", "verify"]),
            ("cold=4M first=cold cold_ms=5", &["cold", "fill", "hot0", "verify"]),
            ("cold=0 first=cold cold_ms=5", &["cold", "fill", "hot0", "verify"]),
        ] {
            let (code, lines) =
                run(threads, SMALL_PAGES, &format!("phases hot=2M sparse=2M constant=0 passes=1 range=2M {line}"));
            assert_eq!((code, parts_of(&lines).as_slice()), (ExitCode::Success, parts), "{line}: {lines:#?}");
        }
    }
}

#[test]
fn every_read_of_the_cold_set_is_a_check() {
    let checked = |line: &str| {
        let (code, lines) = run(2, SMALL_PAGES, &format!("phases {SMALL} passes=1 {line}"));
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        let checked = lines.iter().find_map(|line| line.split(" checked=").nth(1)?.parse::<u64>().ok());
        checked.expect("a line of the verification")
    };
    // Each vCPU reads a batch at least.
    assert!(checked("cold_ms=20") >= checked("cold_ms=0") + 2 * 128);
}

#[test]
fn a_wrong_word_of_the_cold_set_is_found_while_it_is_read_and_the_first_pass_is_the_last() {
    let damage = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == "fill") {
            let first_read = Scattered::new(1, 0..1).next().expect("a word");
            arena.words()[(small().cold.page(0) + first_read) as usize].store(0, Ordering::Relaxed);
        }
    };
    let hz = measure_tsc_hz(Duration::from_millis(5));
    let (code, lines) = run_with(1, hz, SMALL_PAGES, &format!("phases {SMALL} passes=3 cold_ms=1"), damage);
    assert_eq!(code, ExitCode::VerificationFailed);
    assert!(has(&lines, "result name=updates value=262144.0 "), "{lines:#?}");
}

#[test]
fn regions_are_the_four_sets_and_an_empty_one_has_none() {
    let regions = |line: &str| {
        let (_, lines) = run(1, SMALL_PAGES, line);
        let field = |line: &str, at: usize| line.split(' ').nth(at).unwrap_or_default().to_owned();
        let regions = lines.iter().filter(|line| line.contains(" region "));
        regions.map(|line| field(line, 2) + " " + &field(line, 4)).collect::<Vec<_>>()
    };
    let all = ["name=hot_range bytes=4194304", "name=sparse bytes=4194304", "name=cold bytes=2097152"];
    assert_eq!(regions(&format!("phases {SMALL} passes=1"))[..3], all);
    // The remainder of a size that is not whole windows, or of a range that is not whole spans, is unused.
    let rounded = ["name=hot_range bytes=4194304", "name=cold bytes=2097152"];
    assert_eq!(regions("phases hot=4M range=7M sparse=0 cold=3M constant=1M passes=1"), rounded);
}

#[test]
fn phases_by_time_needs_a_clock_and_by_passes_does_not() {
    let (code, lines) = run(1, SMALL_PAGES, &format!("phases {SMALL} phase_ms=100"));
    assert_eq!(code, ExitCode::Success, "{lines:#?}");
    let (code, _) = run_with(1, 0, SMALL_PAGES, &format!("phases {SMALL}"), |_, _| ());
    assert_eq!(code, ExitCode::Unsupported);
    let (code, lines) = run_with(1, 0, SMALL_PAGES, &format!("phases {SMALL} passes=1"), |_, _| ());
    assert_eq!(code, ExitCode::Success);
    assert!(has(&lines, "result name=ticks") && !has(&lines, "result name=hot"), "{lines:#?}");
    let (code, _) = run_with(1, 0, SMALL_PAGES, &format!("phases {SMALL} passes=1 cold_ms=1"), |_, _| ());
    assert_eq!(code, ExitCode::Unsupported);
}

#[test]
fn phases_refuses_impossible_parameters_and_says_how_much_memory_it_needs() {
    let cases = [
        ("hot=4M range=2M", "range=2M: expected a size in bytes (K, M, G, T) from 4194304 to 268435456"),
        ("hot=1M", "hot=1M: expected a size in bytes (K, M, G, T) from 2097152 to 1099511627776"),
        ("hot=2M range=256M", "range=256M: expected a size in bytes (K, M, G, T) from 2097152 to 134217728"),
        ("phases=1001", "phases=1001: expected a count from 1 to 1000"),
        ("passes=1 phase_ms=1", "passes= and phase_ms= exclude each other"),
        ("first=warm", "first=warm: expected one of hot, cold"),
    ];
    for (line, message) in cases {
        let (code, lines) = run(1, 16, &format!("phases {line}"));
        assert_eq!(code, ExitCode::BadArguments, "{line}");
        assert!(has(&lines, &format!("panic message={message}")), "{lines:#?}");
    }
    // 64 MiB for the range of the hot span, 64 sparse, 64 cold, 32 constant.
    let (code, lines) = run(1, 16, "phases");
    assert_eq!(code, ExitCode::Unsupported);
    assert!(has(&lines, "panic message=needs 224 MiB of memory, but has 64 KiB;"), "{lines:#?}");
}

/// Damages the memory at the end of phase `when`, and returns the exit code and all lines.
fn run_damaged(threads: usize, when: &str, damage: impl Fn(&Arena<'_>) + Sync) -> (ExitCode, Vec<String>) {
    let meddle = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == when) {
            damage(arena);
        }
    };
    run_with(threads, 0, SMALL_PAGES, &format!("phases {SMALL} phases=4 passes=1"), meddle)
}

fn sets_of_small() -> impl Strategy<Value = Set> {
    (0..4usize).prop_map(|set| small().sets()[set])
}

proptest! {
    // Each case is a whole run of some 30 ms.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn one_flipped_byte_in_any_set_at_any_time_is_found_and_named(
        set in sets_of_small(),
        page in any::<prop::sample::Index>(),
        byte in 0..PAGE_WORDS * 8,
        flip in 1..=255u8,
        when in prop::sample::select(&["fill", "hot0", "hot1", "hot2"]),
        threads in 1..3usize,
    ) {
        let index = set.page(page.index(set.pages() as usize) as u64) + byte / 8;
        let (code, lines) = run_damaged(threads, when, |arena| {
            arena.words()[index as usize].fetch_xor(u64::from(flip) << (byte % 8 * 8), Ordering::Relaxed);
        });
        prop_assert_eq!(code, ExitCode::VerificationFailed);
        let mismatch = lines.iter().find(|line| line.contains(" mismatch ")).expect("a mismatch line");
        prop_assert!(has(&lines, "verify status=fail errors=1 "), "{:#?}", lines);
        let address = |line: &str, key: &str| {
            let hex = line.split(key).nth(1).and_then(|rest| rest.split(' ').next()).map(str::to_owned);
            u64::from_str_radix(hex.unwrap_or_default().trim_start_matches("0x"), 16).unwrap_or(0)
        };
        let start = lines.iter().find(|line| line.contains("region name=hot_range ")).expect("a region line");
        prop_assert_eq!(address(mismatch, "address="), address(start, "address=") + index * 8);
    }
}

#[test]
fn a_span_that_went_back_to_its_fill_is_found_stale_when_it_is_hot_again() {
    let (code, lines) = run_damaged(2, "hot1", |arena| {
        let slots = arena.words().iter().zip(0..).take(WINDOW_WORDS as usize);
        slots.for_each(|(slot, index)| slot.store(word(index, FIRST_GENERATION), Ordering::Relaxed));
    });
    assert_eq!(code, ExitCode::VerificationFailed);
    let mismatch = lines.iter().find(|line| line.contains(" mismatch "));
    assert!(mismatch.is_some_and(|line| line.ends_with("kind=stale")), "{lines:#?}");
    // The pass that found it was the last.
    assert!(!has(&lines, "begin phase=hot3"), "{lines:#?}");
}

#[test]
fn a_touched_page_that_was_dropped_is_found_in_the_sparse_set_and_in_the_constant_one() {
    for set in [small().sparse, small().constant] {
        let (code, lines) = run_damaged(1, "hot0", |arena| {
            let first = set.page(1) as usize;
            let page = &arena.words()[first..first + PAGE_WORDS as usize];
            page.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        });
        assert_eq!(code, ExitCode::VerificationFailed);
        let mismatch = lines.iter().find(|line| line.contains(" mismatch "));
        assert!(mismatch.is_some_and(|line| line.ends_with("kind=zero")), "{lines:#?}");
    }
}
