//! The generator of the NPB: x ← a·x mod 2⁴⁶ with a = 5¹³, a number of (0, 1) being x·2⁻⁴⁶.
//!
//! The low 46 bits of a wrapping 64-bit product are those of the full product, so integers give exactly the numbers
//! of the NPB's floating-point version. The initial state is never returned: the first number is that of a·seed.

/// The multiplier 5¹³.
pub const MULTIPLIER: u64 = 1_220_703_125;
/// Seed of CG and IS.
pub const SEED: u64 = 314_159_265;
const BITS: u32 = 46;
const MASK: u64 = (1 << BITS) - 1;
/// The unit 2⁻⁴⁶: exact, like its product with a state.
const UNIT: f64 = 1.0 / (1_u64 << BITS) as f64;
/// Streams that [`Random::fill`] interleaves: a product takes three or four cycles, and one can begin in each.
const STREAMS: usize = 4;

/// A state of the generator.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator that continues after `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed & MASK)
    }

    /// The state after `count` more numbers, in about log2(count) steps.
    pub const fn skip(self, count: u64) -> Self {
        Self(multiply(self.0, power(count)))
    }

    /// Advances to the next state, 46 bits.
    #[inline]
    pub const fn next_bits(&mut self) -> u64 {
        self.0 = multiply(self.0, MULTIPLIER);
        self.0
    }

    /// Returns the next number of (0, 1).
    #[inline]
    pub const fn next_number(&mut self) -> f64 {
        to_number(self.next_bits())
    }

    /// Fills `numbers` with the next numbers.
    pub fn fill(&mut self, numbers: &mut [f64]) {
        const STRIDE: u64 = power(STREAMS as u64);
        let mut chunks = numbers.chunks_exact_mut(STREAMS);
        let mut states = [1, 2, 3, 4].map(|ahead| multiply(self.0, power(ahead)));
        for chunk in &mut chunks {
            self.0 = states[STREAMS - 1];
            for (number, state) in chunk.iter_mut().zip(&mut states) {
                *number = to_number(*state);
                *state = multiply(*state, STRIDE);
            }
        }
        chunks.into_remainder().iter_mut().for_each(|number| *number = self.next_number());
    }
}

const fn multiply(a: u64, b: u64) -> u64 {
    a.wrapping_mul(b) & MASK
}

/// Computes aⁿ mod 2⁴⁶ by squaring.
const fn power(mut n: u64) -> u64 {
    let (mut result, mut square) = (1, MULTIPLIER);
    while n > 0 {
        if n & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    result
}

/// Converts through a signed integer, for which baseline x86-64 has an instruction; 46 bits have no sign.
#[inline]
const fn to_number(state: u64) -> f64 {
    state as i64 as f64 * UNIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_states_are_those_of_the_npb() {
        let mut random = Random::new(SEED);
        let states = [0; 5].map(|_| random.next_bits());
        assert_eq!(states, [55909509111989, 61155031930969, 45573031421645, 55279057169489, 1250169187877]);
        let mut random = Random::new(271_828_183);
        assert_eq!([0; 3].map(|_| random.next_bits()), [32883653486115, 55063727434591, 39106144873291]);
    }

    #[test]
    fn the_first_numbers_are_those_of_the_npb() {
        let mut random = Random::new(SEED);
        let numbers = [0; 3].map(|_| random.next_number());
        assert_eq!(numbers, [0.794_521_911_188_738_3, 0.869_065_273_874_539_9, 0.647_631_728_464_332_9]);
    }

    #[test]
    fn powers_of_the_multiplier_are_those_of_the_npb() {
        let known = [
            (4, 19553204341953),
            (8, 32768037506049),
            (12, 51505369759745),
            (16, 1185214627841),
            (17, 62362532446209),
            (20, 40403910787073),
        ];
        for (log2, value) in known {
            assert_eq!(power(1 << log2), value, "a^(2^{log2})");
        }
    }

    #[test]
    fn skipping_a_million_numbers_ends_where_drawing_them_does() {
        let mut random = Random::new(SEED);
        (0..1_000_000).for_each(|_| _ = random.next_bits());
        assert_eq!(random.0, 50447193586593);
        assert_eq!(Random::new(SEED).skip(1_000_000).0, random.0);
    }

    #[test]
    fn filling_gives_the_same_numbers_as_drawing_for_all_lengths() {
        let (mut one, mut other) = (Random::new(SEED), Random::new(SEED));
        for length in [0, 1, 3, 4, 5, 64] {
            let mut numbers = [0.0; 64];
            one.fill(&mut numbers[..length]);
            numbers[..length].iter().for_each(|number| assert_eq!(*number, other.next_number()));
        }
    }
}
