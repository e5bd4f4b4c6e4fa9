//! Predictable words are all different, and encode their origin.
use proptest::prelude::*;
use wideleaf_kernels::rounds::part;
use wideleaf_kernels::test_pattern::{Written, classify, origin, word};
use wideleaf_protocol::message::MismatchKind;

proptest! {
    #[test]
    fn a_word_tells_its_index_and_generation(index in 0..1u64 << 40, generation in 1..1u64 << 24) {
        prop_assert_eq!(origin(word(index, generation)), (index, generation));
        prop_assert_ne!(word(index, generation), 0);
    }

    #[test]
    fn parts_cover_everything_once(total in 0..1u64 << 45, count in 1..17usize) {
        let mut end = 0;
        for index in 0..count {
            let range = part(total, index, count);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.end - range.start <= total.div_ceil(count as u64));
            end = range.end;
        }
        prop_assert_eq!(end, total);
    }
}

#[test]
fn a_wrong_word_is_described_by_its_origin() {
    let written = Written { words: 1000, newest_generation: 6 };
    let found = |value| classify(value, 100, 5, written);
    assert_eq!(found(0), MismatchKind::Zero);
    assert_eq!(found(word(100, 4)), MismatchKind::Stale);
    assert_eq!(found(word(101, 5)), MismatchKind::Elsewhere);
    assert_eq!(found(word(101, 6)), MismatchKind::Elsewhere);
    // A generation that no run has reached, a word outside the memory, a value of no generation.
    assert_eq!(found(word(101, 7)), MismatchKind::Foreign);
    assert_eq!(found(word(1000, 5)), MismatchKind::Foreign);
    assert_eq!(found(word(100, 5) ^ 1), MismatchKind::Foreign);
}
