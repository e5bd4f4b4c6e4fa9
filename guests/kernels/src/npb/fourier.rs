//! Fourier transforms of blocks of lines, each line a power of two long, as FT needs them along every dimension.
//!
//! ```text
//!   LINES lines of the field ─ put ─▶ columns ─ pass ─▶ spare ─ pass ─▶ columns … ─ get ─▶ back
//!
//!   column p   │ real parts at place p of all lines │ imaginary parts │     one root serves all lanes of a column
//! ```
//!
//! The passes are those of Stockham's variant, by decimation in frequency: each reads one buffer and writes the
//! other, and the order comes out right without a permutation of bits. A pass has radix 4; the last one has radix 2
//! if the length is not a power of four. (Van Loan, "Computational Frameworks for the Fast Fourier Transform", SIAM
//! 1992, 1.7 and 2.4.)

use core::f64::consts::TAU;

/// A complex number: real part, imaginary part.
pub type Complex = [f64; 2];

/// Lines of a block. Two buffers of 256 columns stay in a second-level cache of 256 KiB. A block's part of a row
/// along x, 256 bytes, is whole cache lines except at the ends. 8 lines are as fast, 32 a fifth slower (class A on
/// an EPYC).
pub const LINES: usize = 16;

/// Numbers of two adjacent lines: one register of baseline x86-64. Arithmetic on whole pairs compiles to one
/// instruction each. A loop over lanes does not, since the compiler cannot see that the columns it writes do not
/// overlap.
type Pair = [f64; 2];
const PAIRS: usize = LINES / 2;

/// Numbers of all lines of a block at one place: the real parts, the imaginary parts.
pub type Column = [[Pair; PAIRS]; 2];

/// Direction of a transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// `y[k] = Σ x[j]·exp(+2πi·jk/n)`, the NPB's direction 1.
    Forward,
    /// `y[k] = Σ x[j]·exp(−2πi·jk/n)`: the forward transform with real and imaginary parts exchanged before and
    /// after.
    Backward,
}

/// Fills `roots` with exp(2πi·k/n), where n is their number.
pub fn fill_with_roots(roots: &mut [Complex]) {
    let step = TAU / roots.len() as f64;
    for (index, root) in roots.iter_mut().enumerate() {
        let angle = step * index as f64;
        *root = [libm::cos(angle), libm::sin(angle)];
    }
}

/// A block of lines: filled place by place, transformed, read place by place.
#[derive(Debug)]
pub struct Block<'b> {
    direction: Direction,
    /// Roots of unity of an order that is a multiple of the length.
    roots: &'b [Complex],
    columns: &'b mut [Column],
    spare: &'b mut [Column],
}

impl<'b> Block<'b> {
    /// Creates a block of lines of `length` numbers in a `buffer` that has room for two.
    ///
    /// # Panics
    /// Panics if the buffer is too short, or if `length` is not a power of two from 4 to the number of `roots`.
    pub fn new(direction: Direction, length: usize, roots: &'b [Complex], buffer: &'b mut [Column]) -> Self {
        let is_possible = length >= 4 && length.is_power_of_two() && roots.len().is_multiple_of(length);
        assert!(is_possible, "no transform of {length} numbers with {} roots", roots.len());
        let (columns, rest) = buffer.split_at_mut(length);
        Self { direction, roots, columns, spare: &mut rest[..length] }
    }

    /// Sets the numbers of the lines at `place`.
    #[inline]
    pub fn put(&mut self, place: usize, numbers: &[Complex; LINES]) {
        let [real, imaginary] = ordered(self.direction, self.columns[place].each_mut());
        for (two, (real, imaginary)) in numbers.as_chunks().0.iter().zip(real.iter_mut().zip(imaginary)) {
            [*real, *imaginary] = transposed(*two);
        }
    }

    /// Reads the numbers of the lines at `place`.
    #[inline]
    pub fn get(&self, place: usize, numbers: &mut [Complex; LINES]) {
        let [real, imaginary] = ordered(self.direction, self.columns[place].each_ref());
        for (two, (real, imaginary)) in numbers.as_chunks_mut().0.iter_mut().zip(real.iter().zip(imaginary)) {
            *two = transposed([*real, *imaginary]);
        }
    }

    /// Sets the numbers of line `line` from `place` on.
    #[inline]
    pub fn put_line(&mut self, line: usize, place: usize, numbers: &[Complex]) {
        for (index, number) in numbers.iter().enumerate() {
            let [real, imaginary] = ordered(self.direction, self.columns[place + index].each_mut());
            [real[line / 2][line % 2], imaginary[line / 2][line % 2]] = *number;
        }
    }

    /// Reads the numbers of line `line` from `place` on.
    #[inline]
    pub fn get_line(&self, line: usize, place: usize, numbers: &mut [Complex]) {
        for (index, number) in numbers.iter_mut().enumerate() {
            let [real, imaginary] = ordered(self.direction, self.columns[place + index].each_ref());
            *number = [real[line / 2][line % 2], imaginary[line / 2][line % 2]];
        }
    }

    /// Transforms all lines.
    pub fn transform(&mut self) {
        let length = self.columns.len();
        // `width` transforms are interleaved; the rest of each is `length / width` long.
        let mut width = 1;
        while length / width > 4 {
            pass(self.columns, self.spare, width, self.roots);
            core::mem::swap(&mut self.columns, &mut self.spare);
            width *= 4;
        }
        let last_pass = if length / width == 4 { last_pass_of_4 } else { last_pass_of_2 };
        last_pass(self.columns, self.spare);
        core::mem::swap(&mut self.columns, &mut self.spare);
    }
}

/// Real and imaginary parts, exchanged for the backward transform.
#[inline(always)]
fn ordered<T>(direction: Direction, [one, other]: [T; 2]) -> [T; 2] {
    if direction == Direction::Forward { [one, other] } else { [other, one] }
}

/// Runs a pass of radix 4 over transforms that are interleaved `width` columns wide: it combines columns a quarter
/// of the source apart, and its results are `width` columns apart.
fn pass(source: &[Column], target: &mut [Column], width: usize, roots: &[Complex]) {
    let quarter = source.len() / 4;
    let step = roots.len() / (source.len() / width);
    for (place, target) in target.chunks_exact_mut(4 * width).enumerate() {
        let roots = [1, 2, 3].map(|power| roots[power * place * step]);
        for index in 0..width {
            let source = [0, 1, 2, 3].map(|part| &source[part * quarter + place * width + index]);
            let target = target.get_disjoint_mut([0, 1, 2, 3].map(|part| part * width + index));
            butterflies(source, target.expect("four widths are one chunk"), |[zero, one, two, three]| {
                [zero, times(one, roots[0]), times(two, roots[1]), times(three, roots[2])]
            });
        }
    }
}

/// Runs the last pass over four numbers of each transform: all roots are 1.
fn last_pass_of_4(source: &[Column], target: &mut [Column]) {
    let quarter = source.len() / 4;
    for index in 0..quarter {
        let places = [0, 1, 2, 3].map(|part| part * quarter + index);
        let target = target.get_disjoint_mut(places).expect("four quarters are all");
        butterflies(places.map(|place| &source[place]), target, |results| results);
    }
}

/// Runs the last pass over two numbers of each transform.
fn last_pass_of_2(source: &[Column], target: &mut [Column]) {
    let half = source.len() / 2;
    let ((a, b), (sums, differences)) = (source.split_at(half), target.split_at_mut(half));
    for ((a, b), (sum, difference)) in a.iter().zip(b).zip(sums.iter_mut().zip(differences)) {
        for pair in 0..PAIRS {
            let (a, b) = (numbers(a, pair), numbers(b, pair));
            set(sum, pair, plus(a, b));
            set(difference, pair, minus(a, b));
        }
    }
}

/// Transforms four numbers in all lines and passes the results through `finish`.
#[inline(always)]
fn butterflies(source: [&Column; 4], target: [&mut Column; 4], finish: impl Fn([Numbers; 4]) -> [Numbers; 4]) {
    let [zero, one, two, three] = target;
    for pair in 0..PAIRS {
        let results = finish(transform_of_4(source.map(|column| numbers(column, pair))));
        set(zero, pair, results[0]);
        set(one, pair, results[1]);
        set(two, pair, results[2]);
        set(three, pair, results[3]);
    }
}

/// Complex numbers of two lines: real parts, imaginary parts.
type Numbers = [Pair; 2];

#[inline(always)]
fn numbers(column: &Column, pair: usize) -> Numbers {
    [column[0][pair], column[1][pair]]
}

#[inline(always)]
fn set(column: &mut Column, pair: usize, numbers: Numbers) {
    [column[0][pair], column[1][pair]] = numbers;
}

/// Computes `y[k] = Σ x[j]·iʲᵏ`.
#[inline(always)]
fn transform_of_4([a, b, c, d]: [Numbers; 4]) -> [Numbers; 4] {
    let (even_sum, even_difference) = (plus(a, c), minus(a, c));
    let (odd_sum, [real, imaginary]) = (plus(b, d), minus(b, d));
    // i times the odd difference is (−imaginary, real).
    let one = [pair_minus(even_difference[0], imaginary), pair_plus(even_difference[1], real)];
    let three = [pair_plus(even_difference[0], imaginary), pair_minus(even_difference[1], real)];
    [plus(even_sum, odd_sum), one, minus(even_sum, odd_sum), three]
}

#[inline(always)]
fn plus(a: Numbers, b: Numbers) -> Numbers {
    [pair_plus(a[0], b[0]), pair_plus(a[1], b[1])]
}

#[inline(always)]
fn minus(a: Numbers, b: Numbers) -> Numbers {
    [pair_minus(a[0], b[0]), pair_minus(a[1], b[1])]
}

#[inline(always)]
fn times(a: Numbers, root: Complex) -> Numbers {
    let scaled = |pair: Pair, factor: f64| pair.map(|number| number * factor);
    [pair_minus(scaled(a[0], root[0]), scaled(a[1], root[1])), pair_plus(scaled(a[0], root[1]), scaled(a[1], root[0]))]
}

#[inline(always)]
fn pair_plus(a: Pair, b: Pair) -> Pair {
    [a[0] + b[0], a[1] + b[1]]
}

#[inline(always)]
fn pair_minus(a: Pair, b: Pair) -> Pair {
    [a[0] - b[0], a[1] - b[1]]
}

/// Two complex numbers as their real parts and their imaginary parts, and back.
#[inline(always)]
fn transposed([a, b]: [[f64; 2]; 2]) -> [[f64; 2]; 2] {
    [[a[0], b[0]], [a[1], b[1]]]
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;

    /// Transforms LINES lines of pseudo-random numbers. Returns the numbers and the transforms.
    fn transformed(direction: Direction, length: usize) -> (Vec<Vec<Complex>>, Vec<Vec<Complex>>) {
        let mut random = crate::npb::random::Random::new(crate::npb::random::SEED);
        // The numbers are around 0: their last bits are alike, so that a large sum of them would be rounded to one
        // side.
        let mut number = || random.next_number() - 0.5;
        let lines: Vec<Vec<Complex>> =
            (0..LINES).map(|_| (0..length).map(|_| [number(), number()]).collect()).collect();
        let mut roots = vec![[0.0; 2]; 2 * length];
        fill_with_roots(&mut roots);
        let mut buffer = vec![[[[0.0; 2]; PAIRS]; 2]; 2 * length + 1];
        let mut block = Block::new(direction, length, &roots, &mut buffer);
        lines.iter().enumerate().for_each(|(line, numbers)| block.put_line(line, 0, numbers));
        block.transform();
        let mut results = vec![vec![[0.0; 2]; length]; LINES];
        results.iter_mut().enumerate().for_each(|(line, numbers)| block.get_line(line, 0, numbers));
        (lines, results)
    }

    /// One number of a transform, by its definition.
    fn defined(numbers: &[Complex], index: usize, sign: f64) -> Complex {
        let step = sign * TAU / numbers.len() as f64;
        numbers.iter().enumerate().fold([0.0; 2], |sum, (place, number)| {
            let angle = step * (place * index % numbers.len()) as f64;
            let root = [libm::cos(angle), libm::sin(angle)];
            [sum[0] + number[0] * root[0] - number[1] * root[1], sum[1] + number[0] * root[1] + number[1] * root[0]]
        })
    }

    #[test]
    fn a_transform_is_the_sum_that_defines_it_for_all_lengths_of_the_classes() {
        for (length, (direction, sign)) in [4, 8, 32, 64, 128, 256, 512]
            .into_iter()
            .flat_map(|length| [(Direction::Forward, 1.0), (Direction::Backward, -1.0)].map(|way| (length, way)))
        {
            let (lines, results) = transformed(direction, length);
            for index in [0, 1, 2, length / 2 - 1, length / 2, length - 1] {
                let (expected, found) = (defined(&lines[5], index, sign), results[5][index]);
                let error = libm::hypot(expected[0] - found[0], expected[1] - found[1]);
                assert!(error < 1e-12, "{length} {direction:?} {index}: {error:e}");
            }
        }
    }

    #[test]
    fn writing_by_place_equals_writing_by_line() {
        let roots = [[1.0, 0.0]; 4];
        let mut buffer = [[[[0.0; 2]; PAIRS]; 2]; 8];
        let mut block = Block::new(Direction::Backward, 4, &roots, &mut buffer);
        let numbers: [Complex; LINES] = core::array::from_fn(|lane| [lane as f64, -(lane as f64)]);
        block.put(3, &numbers);
        let mut line = [[0.0; 2]; 4];
        block.get_line(7, 0, &mut line);
        assert_eq!(line, [[0.0; 2], [0.0; 2], [0.0; 2], [7.0, -7.0]]);
        block.put_line(7, 3, &[[1.0, 2.0]]);
        let mut read = [[0.0; 2]; LINES];
        block.get(3, &mut read);
        assert_eq!((read[6], read[7]), ([6.0, -6.0], [1.0, 2.0]));
    }
}
