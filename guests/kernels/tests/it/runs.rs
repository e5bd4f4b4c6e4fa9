//! Whole runs on native threads, started like from the command line: their output, and how they end.
use std::sync::atomic::{AtomicU64, Ordering};

use crate::runner::{has, run, run_with};
use wideleaf_kernels::registry::find;
use wideleaf_kernels::test_pattern::{FIRST_GENERATION, PAGE_WORDS, word};
use wideleaf_kernels::{Arena, KERNELS, KernelError};
use wideleaf_protocol::{CommandLine, ExitCode, Message};

#[test]
fn gups_passes_on_one_thread_with_no_error_at_all() {
    for rounds in [1, 2, 3] {
        let (code, lines) = run(1, 1 << 7, &format!("gups log2_words=16 rounds={rounds}"));
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        assert!(has(&lines, "verify status=pass errors=0 checked=65536"));
        assert!(has(&lines, &format!("result name=updates value={}.0", rounds * 262_144)));
        // One batch is 128 updates.
        assert!(has(&lines, &format!("gaps vcpu=0 count={}", rounds * 2048)));
    }
}

#[test]
fn gups_prints_its_lines_in_the_order_a_host_relies_on() {
    let (_, lines) = run(1, 1 << 7, "gups log2_words=16 progress_ms=0");
    let verbs: Vec<_> = lines.iter().map(|line| line.split(' ').nth(1).unwrap_or_default()).collect();
    let expected = "hello region begin end begin end result result result result gaps begin end verify exit";
    assert_eq!(verbs.join(" "), expected);
}

#[test]
fn gups_on_several_threads_stays_within_hpccs_one_percent() {
    for threads in [2, 3] {
        let (code, lines) = run(threads, 1 << 11, "kernel=gups log2_words=20");
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        assert!(has(&lines, "verify status=pass"));
        assert!(has(&lines, &format!("gaps vcpu={}", threads - 1)));
    }
}

#[test]
fn gups_for_a_second_runs_whole_rounds_and_reports_on_the_way() {
    let (code, lines) = run(1, 1 << 7, "gups log2_words=16 seconds=1 progress_ms=50");
    assert_eq!(code, ExitCode::Success, "{lines:#?}");
    let progress = lines.iter().filter(|line| line.contains(" progress phase=update ")).count();
    // At most 20 a second; a loaded machine may give fewer.
    assert!((2..=21).contains(&progress), "{progress} progress lines");
    assert!(has(&lines, "verify status=pass errors=0"));
}

#[test]
fn gups_on_one_thread_tolerates_no_wrong_word() {
    let damage = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == "update") {
            arena.words()[7].fetch_xor(1, Ordering::Relaxed);
        }
    };
    let (code, lines) = run_with(1, 0, 1 << 7, "gups log2_words=16", damage);
    assert_eq!(code, ExitCode::VerificationFailed);
    assert!(has(&lines, "verify status=fail errors=1 checked=65536"), "{lines:#?}");
}

/// Runs GUPS on two threads, sets `words` to zero after its updates, and returns the exit code.
fn gups_with_zeroes(line: &str, windows: usize, words: impl Iterator<Item = usize> + Clone + Sync) -> ExitCode {
    let damage = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == "update") {
            words.clone().for_each(|index| arena.words()[index].store(0, Ordering::Relaxed));
        }
    };
    run_with(2, 0, windows << 9, line, damage).0
}

#[test]
fn gups_on_several_threads_finds_a_lost_page_although_it_is_less_than_hpccs_one_percent() {
    assert_eq!(gups_with_zeroes("gups log2_words=20", 4, 512..1024), ExitCode::VerificationFailed);
    // Half of it on each side of the border between the two threads' words.
    let page = (1 << 19) - 256..(1 << 19) + 256;
    assert_eq!(gups_with_zeroes("gups log2_words=20", 4, page), ExitCode::VerificationFailed);
}

#[test]
fn gups_on_several_threads_finds_a_window_with_a_few_lost_words_in_each_page() {
    // As of a copy that was taken too early. Of 32 windows, one is far above the mean.
    let one_window = ((5 << 18)..(6 << 18)).step_by(32);
    assert_eq!(gups_with_zeroes("gups log2_words=23", 32, one_window), ExitCode::VerificationFailed);
}

#[test]
fn gups_on_several_threads_tolerates_hpccs_one_percent_all_over_the_table() {
    let scattered = (0..1 << 20).step_by(128);
    assert_eq!(gups_with_zeroes("gups log2_words=20", 4, scattered), ExitCode::Success);
}

#[test]
fn gups_touches_one_page_of_each_sparse_window_and_checks_it() {
    // A table of half a window, then, from the next window on, two sparse ones.
    let touched = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::Verify { .. }) {
            let pages = arena.words()[1 << 18..].chunks(512);
            let is_touched = |page: &&[AtomicU64]| page.iter().any(|word| word.load(Ordering::Relaxed) != 0xdead_beef);
            assert_eq!(pages.filter(is_touched).count(), 2);
        }
    };
    // One thread: with two, an update of the table may be lost.
    let (code, lines) = run_with(1, 0, 3 << 9, "gups log2_words=17 sparse=5M", touched);
    assert_eq!(code, ExitCode::Success, "{lines:#?}");
    assert!(has(&lines, "region name=sparse"), "{lines:#?}");
    assert!(has(&lines, &format!("verify status=pass errors=0 checked={}", (1 << 17) + 2 * 512)), "{lines:#?}");
    let (code, _) = run(1, (3 << 9) - 1, "gups log2_words=17 sparse=5M");
    assert_eq!(code, ExitCode::Unsupported, "the second window is not whole");
}

#[test]
fn gups_tolerates_no_wrong_sparse_word_with_any_number_of_threads() {
    let damage = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == "update") {
            arena.words()[(1 << 18) + 7].fetch_xor(1, Ordering::Relaxed);
        }
    };
    let (code, lines) = run_with(2, 0, 2 << 9, "gups log2_words=17 sparse=2M", damage);
    assert_eq!(code, ExitCode::VerificationFailed, "{lines:#?}");
}

#[test]
fn gups_without_a_known_clock_reports_ticks_and_no_seconds() {
    let (code, lines) = run_with(1, 0, 1 << 7, "gups log2_words=16", |_, _| ());
    assert_eq!(code, ExitCode::Success);
    assert!(has(&lines, "result name=ticks"));
    assert!(!has(&lines, "result name=gups") && !has(&lines, "gaps"), "{lines:#?}");
}

#[test]
fn pattern_passes_on_whole_memory_and_on_a_part_of_it() {
    for (threads, bytes, checked) in [(1, "", 64 * 512 * 5), (2, "bytes=100K", 25 * 512 * 5), (3, "", 64 * 512 * 5)] {
        let (code, lines) = run(threads, 64, &format!("pattern passes=4 {bytes}"));
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        assert!(has(&lines, &format!("verify status=pass errors=0 checked={checked}")), "{lines:#?}");
        assert!(has(&lines, "result name=passes value=4.0"));
    }
}

#[test]
fn pattern_for_a_second_keeps_its_lines_apart() {
    let (code, lines) = run(2, 4096, "pattern seconds=1");
    assert_eq!(code, ExitCode::Success, "{lines:#?}");
    let progress = lines.iter().filter(|line| line.contains(" progress phase=pass ")).count();
    assert!((1..=21).contains(&progress), "{progress} progress lines");
}

#[test]
fn pattern_rewrites_no_more_pages_in_a_second_than_its_limit() {
    for threads in [1, 2] {
        let (code, lines) = run(threads, 64, "pattern passes=2 pages_per_second=640");
        assert_eq!(code, ExitCode::Success, "{lines:#?}");
        let seconds = lines.iter().find_map(|line| line.split_once("result name=seconds value=")?.1.split(' ').next());
        let seconds: f64 = seconds.and_then(|value| value.parse().ok()).expect("the run says how long it took");
        assert!(seconds >= 0.19, "128 pages, at most 640 a second, in {seconds} s");
    }
}

/// Indices of the words of a page.
fn page_words(page: usize) -> std::ops::Range<usize> {
    page * PAGE_WORDS as usize..(page + 1) * PAGE_WORDS as usize
}

/// Damages the memory when the fill is done, lets the passes run, and returns the mismatch line and the exit code.
fn mismatch_after(threads: usize, damage: impl Fn(&Arena<'_>) + Sync) -> (String, ExitCode) {
    let meddle = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::End { phase, .. } if *phase == "fill") {
            damage(arena);
        }
    };
    let (code, lines) = run_with(threads, 0, 16, "pattern passes=5", meddle);
    assert!(has(&lines, "verify status=fail"), "{lines:#?}");
    // It stops after the pass that found it.
    assert!(has(&lines, "result name=passes value=1.0"), "{lines:#?}");
    let line = lines.iter().find(|line| line.contains(" mismatch ")).cloned();
    (line.unwrap_or_default(), code)
}

#[test]
fn pattern_finds_one_corrupted_bit_and_says_where() {
    for threads in [1, 2] {
        let (line, code) = mismatch_after(threads, |arena| {
            arena.words()[1234].fetch_xor(1 << 40, Ordering::Relaxed);
        });
        assert_eq!(code, ExitCode::VerificationFailed);
        let expected = word(1234, FIRST_GENERATION);
        let values = format!("expected={expected:#x} found={:#x}", expected ^ 1 << 40);
        assert!(line.contains(&values) && line.ends_with("kind=foreign"), "{line}");
    }
}

#[test]
fn pattern_finds_a_zeroed_page() {
    let (line, _) = mismatch_after(2, |arena| {
        page_words(3).for_each(|index| arena.words()[index].store(0, Ordering::Relaxed));
    });
    assert!(line.ends_with("found=0x0 kind=zero"), "{line}");
}

#[test]
fn pattern_finds_two_swapped_pages() {
    let (line, _) = mismatch_after(2, |arena| {
        for (one, other) in page_words(4).zip(page_words(5)) {
            let value = arena.words()[one].load(Ordering::Relaxed);
            arena.words()[one].store(arena.words()[other].swap(value, Ordering::Relaxed), Ordering::Relaxed);
        }
    });
    assert!(line.ends_with("kind=elsewhere"), "{line}");
}

/// Damages the memory at the mark of the last of three passes, for the final check to find.
fn mismatch_at_last_pass(damage: impl Fn(&Arena<'_>) + Sync) -> String {
    let meddle = |message: &Message<'_>, arena: &Arena<'_>| {
        if matches!(message, Message::Progress { phase, done: 3, .. } if *phase == "pass") {
            damage(arena);
        }
    };
    let (code, lines) = run_with(2, 0, 16, "pattern passes=3", meddle);
    assert_eq!(code, ExitCode::VerificationFailed);
    lines.into_iter().find(|line| line.contains(" mismatch ")).unwrap_or_default()
}

#[test]
fn pattern_finds_a_stale_page() {
    // After three passes every word is of the fourth generation; this page goes back to the third.
    let line = mismatch_at_last_pass(|arena| {
        for index in page_words(6) {
            arena.words()[index].store(word(index as u64, FIRST_GENERATION + 2), Ordering::Relaxed);
        }
    });
    assert!(line.ends_with("kind=stale"), "{line}");
}

#[test]
fn pattern_finds_a_torn_page_with_a_stale_second_half() {
    let line = mismatch_at_last_pass(|arena| {
        for index in page_words(6).skip(256) {
            arena.words()[index].store(word(index as u64, FIRST_GENERATION), Ordering::Relaxed);
        }
    });
    assert!(line.ends_with("kind=stale"), "{line}");
}

#[test]
fn wrong_arguments_end_with_one_clear_line() {
    let kernels = KERNELS.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>().join(", ");
    let cases = [
        ("", &*format!("no kernel named; give kernel=NAME, where NAME is {kernels}")),
        ("kernel=linpack", &format!("unknown kernel \"linpack\"; choose one of {kernels}")),
        ("gups words=5", "unknown parameter words=; choose one of log2_words, rounds, seconds, sparse, progress_ms"),
        ("gups log2_words=9", "log2_words=9: expected a count from 10 to 40"),
        ("gups log2_words=big", "log2_words=big: expected a count from 10 to 40"),
        ("gups rounds=1 seconds=1", "rounds= and seconds= exclude each other"),
        ("pattern passes=1 seconds=1", "passes= and seconds= exclude each other"),
        ("phases passes=1 phase_ms=1", "passes= and phase_ms= exclude each other"),
        ("npb.cg class=D", "class=D: expected one of S, W, A, B, C"),
        ("gups fast", "command line: \"fast\" is not key=value (only the first word may be a kernel's name)"),
        ("pattern passes=0", "passes=0: expected a count from 1 to 16777214"),
    ];
    for (line, message) in cases {
        let (code, lines) = run(1, 16, line);
        assert_eq!(code, ExitCode::BadArguments, "{line}");
        let last_two = [format!("@wideleaf panic message={message}"), "@wideleaf exit code=2".to_owned()];
        assert_eq!(lines[lines.len() - 2..], last_two, "{line}");
        let refused = CommandLine::new(line).ok().and_then(|line| find(line).ok());
        if let Some(kernel) = refused {
            let error = kernel.memory_for(line, 1).expect_err("refused before the start too");
            assert_eq!(error.to_string(), message, "{line}");
        }
    }
}

#[test]
fn no_refusal_is_cut_even_if_it_repeats_a_long_word() {
    let word = "x".repeat(1000);
    let mut cases = vec![word.clone(), format!("gups {word}"), format!("gups {word}=1 {word}=2"), String::new()];
    for kernel in KERNELS {
        cases.push(format!("{} {word}=1", kernel.name));
        cases.extend(kernel.parameters.iter().map(|parameter| format!("{} {}={word}", kernel.name, parameter.name)));
    }
    for line in cases {
        let (code, lines) = run(1, 16, &line);
        assert_eq!(code, ExitCode::BadArguments, "{line}");
        let whole = match CommandLine::new(&line).map_err(KernelError::CommandLine).and_then(find) {
            Ok(kernel) => kernel.memory_for(&line, 1).expect_err("refused before the start too").to_string(),
            Err(error) => error.to_string(),
        };
        assert_eq!(lines[lines.len() - 2], format!("@wideleaf panic message={whole}"));
    }
}

#[test]
fn a_request_beyond_the_machine_is_unsupported_and_not_a_bad_argument() {
    let (code, lines) = run(1, 16, "gups log2_words=20");
    assert_eq!(code, ExitCode::Unsupported);
    assert!(has(&lines, "panic message=needs 8 MiB of memory, but has 64 KiB"), "{lines:#?}");
    let (code, _) = run_with(1, 0, 16, "pattern seconds=1", |_, _| ());
    assert_eq!(code, ExitCode::Unsupported);
}

#[test]
fn every_parameter_of_every_kernel_is_taken_by_its_kernel_and_checked_before_it_starts() {
    for kernel in KERNELS {
        for parameter in kernel.parameters {
            let line = format!("{} {}=x", kernel.name, parameter.name);
            let (code, lines) = run(1, 16, &line);
            assert_eq!(code, ExitCode::BadArguments, "{line}");
            let refusal = format!("{}=x: expected", parameter.name);
            assert!(has(&lines, &format!("panic message={refusal}")), "{lines:#?}");
            let before = kernel.memory_for(&line, 1).map_err(|error| error.to_string());
            assert!(before.as_ref().is_err_and(|error| error.starts_with(&refusal)), "{line}: {before:?}");
        }
    }
}

#[test]
fn a_class_is_a_letter_in_upper_or_lower_case() {
    for kernel in KERNELS.iter().filter(|kernel| !kernel.classes.is_empty()) {
        let memory = |line| kernel.memory_for(line, 1);
        assert!(memory("class=a").is_ok(), "{}", kernel.name);
        assert_eq!(memory("class=a"), memory("class=A"), "{}", kernel.name);
    }
}
