//! Copies that compile to loops of moves everywhere. Without the barriers the compiler would call `memcpy`, which
//! differs between the native build and the guest image, and would distort a comparison of the two.

use core::hint::black_box;

/// Numbers moved at once: 64 bytes, the cache line of every x86-64.
const LINE: usize = 8;

/// Copies numbers to a slice of the same length.
///
/// # Panics
/// Panics if the lengths differ.
pub fn copy(from: &[f64], to: &mut [f64]) {
    assert_eq!(from.len(), to.len(), "as many numbers there as here");
    let (from_lines, from_rest) = from.as_chunks::<LINE>();
    let (to_lines, to_rest) = to.as_chunks_mut::<LINE>();
    for (from, to) in from_lines.iter().zip(to_lines) {
        *to = *from;
        black_box(to);
    }
    for (from, to) in from_rest.iter().zip(to_rest) {
        *to = *from;
        black_box(to);
    }
}

/// Copies `length` numbers from place `from` to place `to` of the same slice.
///
/// # Panics
/// Panics if the two overlap, or if the slice is too short.
pub fn copy_within(numbers: &mut [f64], from: usize, to: usize, length: usize) {
    let (low, high) = numbers.split_at_mut(from.max(to));
    let (low, high) = (&mut low[from.min(to)..][..length], &mut high[..length]);
    if from < to { copy(low, high) } else { copy(high, low) }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// Length of a line and a rest.
    const LENGTH: usize = LINE + 3;

    #[test]
    fn numbers_are_copied_up_and_down() {
        for (from, to) in [(0, LENGTH), (LENGTH, 0), (1, LENGTH + 4)] {
            let before: Vec<f64> = (0..2 * LENGTH + 5).map(|number| number as f64).collect();
            let mut after = before.clone();
            copy_within(&mut after, from, to, LENGTH);
            let mut expected = before.clone();
            expected[to..to + LENGTH].copy_from_slice(&before[from..from + LENGTH]);
            assert_eq!(after, expected, "from {from} to {to}");
        }
    }
}
