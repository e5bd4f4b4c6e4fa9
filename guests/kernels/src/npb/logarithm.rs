//! The natural logarithm in a form that compilers vectorise: no table, no branch, baseline instructions only.
//!
//! ```text
//!   x = 2ᵏ·m, m in [√½, √2)      ln x = k·ln 2 + 2·(s + s³/3 + s⁵/5 + …),  s = (m − 1) / (m + 1)
//! ```

use core::f64::consts::LN_2;

/// Bits of √½, rounded down to the upper half: the lower bound of m.
const HALF_ROOT: u64 = 0x3fe6_a09e << 32;
const ONE: u64 = 0x3ff0_0000 << 32;
const MANTISSA_BITS: u32 = 52;
const MANTISSA: u64 = (1 << MANTISSA_BITS) - 1;
/// Bits of 2⁵². With a small integer in its mantissa it is 2⁵² + that integer: a conversion that every x86-64 has
/// for two lanes.
const TWO_52_BITS: u64 = (1023 + 52) << MANTISSA_BITS;
const TWO_52: f64 = (1_u64 << MANTISSA_BITS) as f64;
const EXPONENT_BIAS: f64 = 1023.0;
/// Number of terms of the series: |s| is at most 0.1716, so the first omitted term is less than 2⁻⁵³ of the first.
const TERMS: usize = 10;
/// The coefficients 2/3, 2/5, …, from the last to the first.
const COEFFICIENTS: [f64; TERMS] = {
    let mut coefficients = [0.0; TERMS];
    let mut index = 0;
    while index < TERMS {
        coefficients[index] = 2.0 / (2 * (TERMS - index) + 1) as f64;
        index += 1;
    }
    coefficients
};

/// Computes ln x for a normal positive number, to about 10⁻¹⁶ of the larger of 1 and the result.
#[inline(always)]
pub fn ln(x: f64) -> f64 {
    let shifted = x.to_bits().wrapping_add(ONE - HALF_ROOT);
    let exponent = f64::from_bits(TWO_52_BITS | shifted >> MANTISSA_BITS) - (TWO_52 + EXPONENT_BIAS);
    let fraction = f64::from_bits((shifted & MANTISSA) + HALF_ROOT) - 1.0;
    let s = fraction / (2.0 + fraction);
    let square = s * s;
    let mut series = 0.0;
    for coefficient in COEFFICIENTS {
        series = (series + coefficient) * square;
    }
    exponent * LN_2 + (2.0 * s + s * series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_equals_the_library_s_from_the_least_square_to_one() {
        let mut x = 1.0;
        while x > 1e-28 {
            let (ours, known) = (ln(x), libm::log(x));
            assert!((ours - known).abs() <= 3e-16 * known.abs().max(1.0), "ln {x}: {ours} instead of {known}");
            x *= 0.999_37;
        }
    }
}
