//! Every kernel is recorded: it verifies its result, its accesses are the expected ones, and a second recording is
//! the same.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::collections::{BTreeMap, HashSet};

use wideleaf_kernels::registry::by_name;
use wideleaf_kernels::{KERNELS, Kernel};
use wideleaf_recorder::{RecordError, Recorded, Request, record};
use wideleaf_trace::{Access, TraceReader};

fn request<'a>(kernel: &'a str, parameters: &'a str) -> Request<'a> {
    let kernel: &Kernel = by_name(kernel).expect("a kernel of ours");
    Request { kernel, parameters, threads: 1, iterations: None, phase: None, bytes_max: None }
}

fn recorded(request: &Request<'_>) -> Recorded<Vec<u8>> {
    record(request, Vec::new(), &mut |_| true).unwrap_or_else(|error| panic!("{}: {error}", request.parameters))
}

/// Loads and stores by phase, and the touched lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    phases: BTreeMap<String, (u64, u64)>,
    lines: HashSet<u64>,
}

fn read(bytes: &[u8]) -> Found {
    let (mut reader, mut block, mut found) = (TraceReader::open(bytes).unwrap(), Vec::new(), Found::default());
    while reader.next_block(&mut block).unwrap() {
        let (reads, writes) = found.phases.entry(reader.phase().to_owned()).or_default();
        for Access { address, is_write, repeats } in &block {
            *(if *is_write { &mut *writes } else { &mut *reads }) += u64::from(*repeats);
            found.lines.insert(*address / 64);
        }
    }
    found
}

/// Parameters of a short run that does not go by time; `None` if the kernel has no such run.
fn small(kernel: &Kernel) -> Option<&'static str> {
    match kernel.name.as_str() {
        // It measures time, and repeats until its measurements agree.
        "latency" => None,
        "phases" => Some("hot=2M range=4M sparse=2M cold=2M constant=2M passes=1"),
        _ if kernel.classes.is_empty() => Some(kernel.quick),
        _ => Some("class=S"),
    }
}

#[test]
fn every_kernel_can_be_recorded_and_two_recordings_of_it_are_the_same() {
    for kernel in KERNELS {
        let Some(parameters) = small(kernel) else { continue };
        // Long enough to see its accesses, short enough to run twice.
        let iterations =
            matches!(kernel.name.as_str(), "npb.bt" | "npb.cg" | "npb.ft" | "npb.lu" | "npb.sp").then_some(2);
        let request = Request { kernel, parameters, threads: 1, iterations, phase: None, bytes_max: None };
        let (one, other) = (recorded(&request), recorded(&request));
        assert!(one.totals.accesses() > 10_000, "{}: {:?}", kernel.name, one.totals);
        assert!(one.out == other.out, "{}: two recordings differ", kernel.name);
        // A kernel that was not to finish has no result, neither right nor wrong.
        assert_eq!(one.is_verified, if iterations.is_some() { None } else { Some(true) }, "{}", kernel.name);
        let found = read(&one.out);
        let accesses: u64 = found.phases.values().map(|(reads, writes)| reads + writes).sum();
        assert_eq!(accesses, one.totals.accesses(), "{}", kernel.name);
        assert!(found.lines.iter().all(|line| line * 64 < one.header.arena_bytes), "{}", kernel.name);
    }
}

#[test]
fn every_kernel_of_class_s_gives_its_published_result_while_it_is_recorded() {
    for kernel in KERNELS.iter().filter(|kernel| !kernel.classes.is_empty()) {
        // The recorded part is small, but every load and store is checked.
        let request = Request { phase: Some("verify"), ..request(kernel.name.as_str(), "class=S") };
        let recorded = recorded(&request);
        assert_eq!(recorded.is_verified, Some(true), "{}", kernel.name);
        let phases = read(&recorded.out).phases;
        assert!(phases.keys().all(|phase| phase == "verify"), "{}: {phases:?}", kernel.name);
    }
}

/// Rows and entries of the matrix of class S, and products with it in an iteration: 25 steps, and the residual
/// after them.
const CG_S: (u64, u64, u64) = (1400, 78_148, 26);

#[test]
fn the_loads_of_cg_are_those_of_its_products() {
    let iterations = 3;
    let request = Request { iterations: Some(iterations), phase: Some("compute"), ..request("npb.cg", "class=S") };
    let recorded = recorded(&request);
    assert_eq!((recorded.header.iterations, recorded.header.class_iterations), (iterations, 15));
    let (reads, _) = read(&recorded.out).phases["compute"];
    // Loads of each entry: its column, the number in that column of the vector, and its value; two values may be
    // one load of 16 bytes. Loads of each row: its start, and the operands of a step's dot products and sums.
    let (rows, entries, products) = CG_S;
    let all_entries = entries * products * u64::from(iterations);
    let (least, most) = (all_entries * 5 / 2, all_entries * 3 + 16 * rows * products * u64::from(iterations));
    assert!((least..most).contains(&reads), "{reads} loads, expected {least} and up to {most}");
}

#[test]
fn of_several_threads_the_first_is_recorded_with_its_part_of_the_work() {
    let of = |threads| {
        let request = Request { threads, iterations: Some(1), phase: Some("compute"), ..request("npb.cg", "class=S") };
        recorded(&request)
    };
    let (one, four, again) = (of(1), of(4), of(4));
    assert!(four.out == again.out, "the order of the other threads leaves no trace");
    let part = four.totals.accesses() as f64 / one.totals.accesses() as f64;
    assert!((0.2..0.35).contains(&part), "{part} of the accesses");
}

#[test]
fn with_several_threads_too_every_result_is_right() {
    for (kernel, parameters) in [("npb.lu", "class=S"), ("amr", "blocks=4 variables=5"), ("eos", "blocks=4 passes=1")] {
        let recorded = recorded(&Request { threads: 3, ..request(kernel, parameters) });
        assert_eq!(recorded.is_verified, Some(true), "{kernel}");
    }
}

#[test]
fn the_updates_of_gups_are_a_load_and_a_store_each() {
    let recorded = recorded(&Request { phase: Some("update"), ..request("gups", "log2_words=12 rounds=3") });
    // 4 updates a word and round. The streams' starts are on the stack.
    let updates = (3 * 4) << 12;
    assert_eq!(read(&recorded.out).phases["update"], (updates, updates));
}

#[test]
fn the_loops_of_stream_are_counted_to_the_element() {
    let recorded = recorded(&Request { phase: Some("compute"), ..request("stream", "words=4096 times=3") });
    let (reads, writes) = read(&recorded.out).phases["compute"];
    // Copy moves lines. Scale loads one word an element and stores one, add and triad load two and store one: two
    // words are one access of 16 bytes.
    let (lines, pairs) = (4096 / 8, 4096 / 2);
    assert_eq!((reads, writes), (3 * (lines + 5 * pairs), 3 * (lines + 3 * pairs)));
}

#[test]
fn zeroed_memory_is_recorded_too() {
    // Block moves zero the arena's slices, each line with one store: half a mebibyte of numbers are 16,384 lines.
    let recorded = recorded(&Request { phase: Some("init"), ..request("npb.ep", "class=S") });
    let expected = Found { phases: BTreeMap::from([("init".into(), (0, 16_384))]), lines: (0..16_384).collect() };
    assert_eq!(read(&recorded.out), expected);
}

#[test]
fn a_limit_cuts_the_recording_and_the_trace_says_so() {
    let whole = recorded(&request("gups", "log2_words=16"));
    let cut = recorded(&Request { bytes_max: Some(100_000), ..request("gups", "log2_words=16") });
    assert!(cut.totals.is_cut && !whole.totals.is_cut && cut.is_verified.is_none());
    assert!((100_000..whole.out.len() / 2).contains(&cut.out.len()), "{} of {}", cut.out.len(), whole.out.len());
    read(&cut.out);
}

#[test]
fn impossible_recordings_are_refused() {
    let refused = |request: Request<'_>| match record(&request, Vec::new(), &mut |_| true) {
        Ok(recorded) => panic!("{}: {:?}", request.parameters, recorded.totals),
        Err(error) => error,
    };
    let iterations = Some(1);
    let none = refused(Request { iterations, ..request("gups", "log2_words=10") });
    assert!(matches!(none, RecordError::NoIterations), "{none}");
    let phase = refused(Request { phase: Some("nonsense"), ..request("gups", "log2_words=10") });
    assert!(matches!(phase, RecordError::NoPhase(_)), "{phase}");
    for (kernel, parameters) in [("gups", "log2_words=10 seconds=1"), ("phases", "")] {
        let time = refused(request(kernel, parameters));
        assert!(matches!(time, RecordError::ByTime), "{kernel} {parameters}: {time}");
    }
    for (kernel, parameters) in [("pattern", ""), ("gups", "log2_words=3"), ("npb.cg", "class=Z")] {
        let error = refused(request(kernel, parameters));
        assert!(matches!(error, RecordError::Parameters(_)), "{kernel} {parameters}: {error}");
    }
    for threads in [0, 17] {
        let error = refused(Request { threads, ..request("npb.cg", "class=S") });
        assert!(matches!(error, RecordError::Parameters(_)), "{threads} threads: {error}");
    }
}

#[test]
fn the_watch_function_can_end_a_recording() {
    let mut calls = 0;
    let ended = record(&request("npb.ft", "class=W"), Vec::new(), &mut |_| {
        calls += 1;
        calls < 10
    });
    assert!(matches!(ended, Err(RecordError::Interrupted)));
}
