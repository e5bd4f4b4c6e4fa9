//! GUPS is HPCC's RandomAccess, bit by bit.
//!
//! The expected numbers come from HPCC's own functions (RandomAccess/utility.c and the single-CPU kernel of hpcc
//! 1.5), run once outside this project.
use std::sync::atomic::{AtomicU64, Ordering};

use wideleaf_kernels::Arena;
use wideleaf_kernels::gups::{Streams, batches_per_round, count_errors, fill, starts, step};
use wideleaf_kernels::rounds::part;

fn table(log2_words: u32) -> Vec<u64> {
    vec![0; 1 << log2_words]
}

#[test]
fn starts_gives_hpccs_elements() {
    let expected = [
        (0, 0x1),
        (1, 0x2),
        (2, 0x4),
        (63, 0x8000_0000_0000_0000),
        (64, 0x7),
        (65, 0xe),
        (127, 0x8000_0000_0000_0009),
        (128, 0x15),
        (1000, 0xb6b6_db00_0000_0103),
        (1_048_576, 0x0000_0001_0001_0111),
        (4_194_304, 0x0000_0001_0001_0013),
        (33_554_432, 0x0000_0001_0000_0005),
        (134_217_728, 0x114),
        (1_073_741_824, 0x0000_0001_0001_0007),
        (1_317_624_576_693_539_400, 0x8000_0000_0000_0003),
        (1_317_624_576_693_539_401, 0x1),
    ];
    for (n, element) in expected {
        assert_eq!(starts(n), element, "starts({n})");
    }
}

#[test]
fn starts_agrees_with_stepping() {
    let elements = std::iter::successors(Some(1), |a| Some(step(*a)));
    for (n, element) in (0..5000).zip(elements) {
        assert_eq!(starts(n), element, "starts({n})");
    }
}

/// The known properties of HPCC's table after its updates.
struct Hpcc {
    log2_words: u32,
    xor: u64,
    weighted_sum: u64,
    untouched: usize,
    first: u64,
    second: u64,
    last: u64,
    stream_0_end: u64,
    stream_127_end: u64,
}

/// Runs one round with the work of `vcpus` vCPUs, one after the other, compares it with HPCC, and undoes it.
fn assert_round_is_hpccs(vcpus: usize, expected: &Hpcc) {
    let mut words = table(expected.log2_words);
    let arena = Arena::from_words(&mut words);
    let table = arena.words();
    let length = table.len() as u64;
    let batches = batches_per_round(length);
    fill(table, 0..length);
    for vcpu in 0..vcpus {
        let ends = Streams::new(part(batches, vcpu, vcpus)).run(table, |_| ());
        // The last part ends where the whole sequence ends.
        if vcpu == vcpus - 1 {
            assert_eq!(ends[127], expected.stream_127_end);
        }
        if vcpus == 1 {
            assert_eq!(ends[0], expected.stream_0_end);
        }
    }

    let value = |index: usize| table[index].load(Ordering::Relaxed);
    let indexed = || table.iter().map(|word| word.load(Ordering::Relaxed)).zip(0u64..);
    assert_eq!(indexed().fold(0, |sum, (word, _)| sum ^ word), expected.xor);
    let weighted = indexed().fold(0u64, |sum, (word, i)| sum.wrapping_add(word.wrapping_mul(2 * i + 1)));
    assert_eq!(weighted, expected.weighted_sum);
    assert_eq!(indexed().filter(|(word, i)| word == i).count(), expected.untouched);
    let ends = (value(0), value(1), value(table.len() - 1));
    assert_eq!(ends, (expected.first, expected.second, expected.last));

    assert_eq!(count_errors(table, 0..length), length - expected.untouched as u64);
    Streams::new(0..batches).run(table, |_| ());
    assert_eq!(count_errors(table, 0..length), 0);
}

const LOG2_10: Hpcc = Hpcc {
    log2_words: 10,
    xor: 0xffff_ffff_ffff_ffe1,
    weighted_sum: 0xc619_840d_943d_e51f,
    untouched: 661,
    first: 0x4aea_db0b_8169_a800,
    second: 0x7630_60ed_d63e_0800,
    last: 0x3ff,
    stream_0_end: 0x0000_0001_0000_0000,
    stream_127_end: 0x13,
};

const LOG2_16: Hpcc = Hpcc {
    log2_words: 16,
    xor: 0xffff_ffff_ffff_fe19,
    weighted_sum: 0x4548_73e5_08d2_e8f9,
    untouched: 5934,
    first: 0x308f_0dd9_1bce_0000,
    second: 0x8d2e_6978_d224_0000,
    last: 0xce46_748f_9978_0000,
    stream_0_end: 0x0000_0001_0000_0006,
    stream_127_end: 0x117,
};

const LOG2_20: Hpcc = Hpcc {
    log2_words: 20,
    xor: 0xffff_fffe_0001_ffe1,
    weighted_sum: 0x3c40_c182_aada_84cb,
    untouched: 32475,
    first: 0x1040_ea69_3d20_0000,
    second: 0x9867_0b6e_efd0_0001,
    last: 0x3fa7_f0d2_feb0_0000,
    stream_0_end: 0x0000_0001_0000_0101,
    stream_127_end: 0x0000_0001_0001_0013,
};

const LOG2_22: Hpcc = Hpcc {
    log2_words: 22,
    xor: 0xffff_ffff_fffe_0001,
    weighted_sum: 0x280c_4aa4_859e_e7af,
    untouched: 98409,
    first: 0x154b_3760_0600_0000,
    second: 0xd3d7_acbf_74c0_0001,
    last: 0x6cd3_0feb_13ff_ffff,
    stream_0_end: 0x0000_0001_0000_0014,
    stream_127_end: 0x0000_0000_0001_0003,
};

const LOG2_25: Hpcc = Hpcc {
    log2_words: 25,
    xor: 0x1e6,
    weighted_sum: 0x6391_23aa_a3b7_63ca,
    untouched: 662_215,
    first: 0x3efb_4019_5000_0000,
    second: 0x402e_864a_5400_0001,
    last: 0xcb8d_b503_89ff_ffff,
    stream_0_end: 0x0000_0001_0001_0111,
    stream_127_end: 0x114,
};

const LOG2_26: Hpcc = Hpcc {
    log2_words: 26,
    xor: 0x1_fe1e,
    weighted_sum: 0x403a_a8e5_7cdd_8be6,
    untouched: 1_291_229,
    first: 0xd821_d7d3_0400_0000,
    second: 0xf2d6_cefb_9c00_0000,
    last: 0x4cae_f44a_b000_0000,
    stream_0_end: 0x0000_0001_0001_0106,
    stream_127_end: 0x0001_0110,
};

#[test]
fn a_round_on_one_vcpu_leaves_hpccs_table() {
    for expected in [LOG2_10, LOG2_16, LOG2_20, LOG2_22] {
        assert_round_is_hpccs(1, &expected);
    }
}

#[test]
fn a_round_split_over_vcpus_without_lost_updates_leaves_the_same_table() {
    for vcpus in [2, 3, 16] {
        assert_round_is_hpccs(vcpus, &LOG2_10);
        assert_round_is_hpccs(vcpus, &LOG2_16);
    }
}

#[test]
fn updates_restricted_to_disjoint_words_are_together_the_whole_round() {
    let mut words = table(16);
    let arena = Arena::from_words(&mut words);
    let table = arena.words();
    let batches = batches_per_round(1 << 16);
    fill(table, 0..1 << 16);
    Streams::new(0..batches).run(table, |_| ());
    for vcpu in 0..3 {
        Streams::new(0..batches).run_within(table, part(1 << 16, vcpu, 3), |_| ());
    }
    assert_eq!(count_errors(table, 0..1 << 16), 0);
}

#[test]
#[ignore = "half a gigabyte and some ten seconds; run with --release -- --ignored"]
fn a_round_on_the_large_tables_leaves_hpccs() {
    assert_round_is_hpccs(1, &LOG2_25);
    assert_round_is_hpccs(1, &LOG2_26);
}

#[test]
fn the_whole_table_counts_as_wrong_when_it_was_never_filled() {
    let words: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(u64::MAX)).collect();
    assert_eq!(count_errors(&words, 0..1024), 1024);
}
