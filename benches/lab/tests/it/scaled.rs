//! Steady-state samples against recordings: per word of an iteration, a sample must miss the TLB as often as the
//! kernel that it stands for. The machine is K8: its TLB is so small that programs of some MiB miss it.

use wideleaf_kernels::registry::by_name;
use wideleaf_lab::simulate::scaled::{Cg, Mg, Part, Scaled, Stream, Sweep};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_recorder::{Request, record};
use wideleaf_simulator::streams::Access;
use wideleaf_simulator::{AddressSpace, Counts, Simulator, machine};
use wideleaf_trace::TraceReader;

/// Largest relative difference of misses. Left out of a sample are loops with less than a hundredth of the words, and
/// what one loop leaves in the TLB for the next.
const TOLERANCE: f64 = 0.1;

/// Misses of the first level, and of both levels of the TLB.
type Misses = [f64; 2];

fn misses(counts: &Counts) -> Misses {
    let both = counts.data_misses();
    [counts.tlb_hits[1] + both, both].map(|count| count as f64)
}

fn simulator(bytes: Bytes) -> Simulator {
    Simulator::new(machine("k8").expect("it is in the list"), AddressSpace::native(bytes, PageSize::Base4K))
}

/// Misses of a phase of a recording.
fn of_phase(kernel: &str, parameters: &str, iterations: Option<u32>, phase: &str) -> Misses {
    let kernel = by_name(kernel).expect("it is in the table");
    let request = Request { kernel, parameters, threads: 1, iterations, phase: Some(phase), bytes_max: None };
    let trace = record(&request, Vec::new(), &mut |_| true).expect("it runs anywhere").out;
    let mut reader = TraceReader::open(trace.as_slice()).expect("a whole trace");
    let mut simulator = simulator(Bytes::new(reader.header().arena_bytes));
    let mut block = Vec::new();
    while reader.next_block(&mut block).expect("a whole trace") {
        simulator.run(block.iter().map(|&wideleaf_trace::Access { address, is_write, repeats }| Access {
            address,
            is_write,
            repeats,
        }));
    }
    misses(simulator.counts())
}

/// Misses of one iteration of a recording: those of two without those of one.
fn of_iteration(kernel: &str, parameters: &str) -> Misses {
    let [one, two] = [1, 2].map(|iterations| of_phase(kernel, parameters, Some(iterations), "compute"));
    [two[0] - one[0], two[1] - one[1]]
}

/// Misses of an iteration by its samples.
fn of_samples(scaled: Scaled) -> Misses {
    let mut simulator = simulator(scaled.bytes);
    let mut sums = [0.0; 2];
    for Part { words, lines, mut accesses, .. } in scaled.parts {
        simulator.run(accesses.by_ref().take(lines));
        simulator.reset_counts();
        simulator.run(accesses.take(lines));
        let counts = simulator.counts();
        let of_part = misses(counts).map(|misses| misses / counts.accesses as f64 * words);
        sums = [sums[0] + of_part[0], sums[1] + of_part[1]];
    }
    sums
}

fn assert_alike(what: &str, sampled: Misses, recorded: Misses) {
    println!("{what}: sampled {sampled:.0?}, recorded {recorded:.0?}");
    for (sampled, recorded) in sampled.into_iter().zip(recorded) {
        assert!(recorded > 10_000.0, "{what}: too few misses to compare: {recorded}");
        let error = sampled / recorded - 1.0;
        assert!(error.abs() <= TOLERANCE, "{what}: {sampled:.0} sampled, {recorded:.0} recorded: {error:+.3}");
    }
}

#[test]
fn cg_misses_as_its_recording() {
    // Class W has 508,402 entries.
    let scaled = Cg { rows: 7000, row_entries: 73 }.scaled();
    assert_alike("CG W", of_samples(scaled), of_iteration("npb.cg", "class=W"));
}

#[test]
fn mg_misses_as_its_recording() {
    let scaled = Mg { edge: 128 }.scaled();
    assert_alike("MG W", of_samples(scaled), of_iteration("npb.mg", "class=W"));
}

#[test]
fn stream_misses_as_its_recording() {
    let scaled = Stream { words: 1 << 20 }.scaled();
    assert_alike("STREAM of 24 MiB", of_samples(scaled), of_iteration("stream", "words=1048576 times=2"));
}

#[test]
fn sweep3d_misses_as_its_recording() {
    let scaled = Sweep { n: 48 }.scaled();
    assert_alike("Sweep3D of 48 cells", of_samples(scaled), of_iteration("sweep3d", "n=48"));
}

#[test]
fn gups_misses_as_its_recording() {
    let recorded = of_phase("gups", "log2_words=21", None, "update");
    assert_alike("GUPS of 16 MiB", of_samples(Scaled::gups(1 << 21)), recorded);
}
