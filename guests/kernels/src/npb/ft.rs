//! FT: a partial differential equation solved by Fourier transforms of a cube. ∂u/∂t = α·∇²u is an independent
//! decay of every coefficient of the transform.
//!
//! ```text
//!   random numbers ─▶ transform along x, y, z ─▶ u0
//!   t times:  u0 *= twiddle,  u1 = u0 ─▶ back along z, y, x ─▶ u1 ─▶ checksum of 1024 numbers
//!
//!   u0, u1, twiddle:  plane z ─▶ rows y ─▶ nx numbers and one more, so that a column uses many cache sets
//! ```
//!
//! Along x memory is read sequentially. Along y a block of lines takes a piece of every row of a plane, and along z
//! a piece of every plane, 1 MiB apart in class A: with pages of 4 KiB each piece is a page of its own.

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::fourier::{Block, Column, Complex, Direction, LINES, fill_with_roots};
use super::random::{Random, SEED};
use crate::arena::{Layout, Place, Typed};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges};
use crate::planes::deal_rows;
use crate::report::{self, COMPUTE, INIT, VERIFY};
use crate::{Arena, KernelError, Platform};

/// FT in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.ft"),
    summary: "NPB FT: Fourier transforms of a cube, strides of a row and of a plane",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER];

/// Coefficient α of the equation.
const ALPHA: f64 = 1e-6;
/// Numbers of u1 in a checksum.
const CHECKED: usize = 1024;
/// Largest relative error of a checksum that the NPB passes.
const TOLERANCE: f64 = 1e-12;

/// Sizes and reference values of a class.
#[derive(Clone, Copy)]
struct Problem {
    /// Numbers along x, y and z.
    size: Size,
    /// Expected checksums, one for each step.
    checksums: &'static [Complex],
}

const fn problem(class: Class) -> Problem {
    let (x, y, z, checksums) = match class {
        Class::S => (64, 64, 64, CHECKSUMS_S),
        Class::W => (128, 128, 32, CHECKSUMS_W),
        Class::A => (256, 256, 128, CHECKSUMS_A),
        Class::B => (512, 256, 256, CHECKSUMS_B),
        Class::C => (512, 512, 512, CHECKSUMS_C),
    };
    Problem { size: Size { x, y, z }, checksums }
}

impl Problem {
    /// Operations of a run, by the NPB's formula.
    fn operations(&self) -> f64 {
        let numbers = self.size.numbers() as f64;
        let log = libm::log(numbers);
        let per_step = 5.23518 + 7.21113 * log;
        numbers * (14.8157 + 7.19641 * log + per_step * self.checksums.len() as f64)
    }
}

/// Numbers along each dimension. Blocks of lines divide x and y.
#[derive(Clone, Copy)]
struct Size {
    x: usize,
    y: usize,
    z: usize,
}

impl Size {
    const fn numbers(self) -> usize {
        self.x * self.y * self.z
    }

    /// Numbers from one row to the next.
    const fn row(self) -> usize {
        self.x + 1
    }

    /// Numbers from one plane to the next.
    const fn plane(self) -> usize {
        self.row() * self.y
    }

    /// The planes of each vCPU, for writing.
    fn planes<T>(self, field: &mut [T], members: usize) -> impl Iterator<Item = &mut [T]> {
        cut(field, ranges(self.z, members).map(move |range| range.len() * self.plane()))
    }

    /// Longest line, in numbers.
    fn longest(self) -> usize {
        self.x.max(self.y).max(self.z)
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let problem = problem(Class::from_parameters(parameters)?);
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, problem.size, vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let problem = problem(class);
    let Size { x, y, z } = problem.size;
    report::problem(platform, class, &[x, y, z], problem.checksums.len() as u32);
    solve(platform, arena, problem)
}

fn solve<'a>(platform: &dyn Platform, arena: &Arena<'_>, problem: Problem) -> Result<(), KernelError<'a>> {
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, problem.size, platform.vcpus());
    let mut typed = report::claim(platform, arena, &layout, Name::literal("cube"))?;
    let (mut cube, _) = report::phase(platform, INIT, || {
        let mut cube = Cube::new(platform, problem.size, places, &mut typed);
        cube.start();
        cube
    });
    let (found, ticks) = report::phase(platform, COMPUTE, || {
        cube.start();
        let steps = report::steps(platform, problem.checksums.len() as u32);
        steps.zip(problem.checksums).fold(Found::default(), |found, (_, reference)| found.with(cube.step(), *reference))
    });
    report::rate(platform, problem.operations(), ticks);
    report::phase(platform, VERIFY, || found.emit(platform));
    report::verdict(platform, found.wrong, problem.checksums.len() as u64)
}

/// Results of the steps so far.
#[derive(Clone, Copy, Default)]
struct Found {
    last: Complex,
    last_reference: Complex,
    largest_error: f64,
    wrong: u64,
}

impl Found {
    /// Adds the result of one more step. A checksum that is not a number is wrong.
    fn with(self, checksum: Complex, reference: Complex) -> Self {
        let difference = libm::hypot(checksum[0] - reference[0], checksum[1] - reference[1]);
        let error = difference / libm::hypot(reference[0], reference[1]);
        let is_right = error <= TOLERANCE;
        Self {
            last: checksum,
            last_reference: reference,
            largest_error: self.largest_error.max(error),
            wrong: self.wrong + u64::from(!is_right),
        }
    }

    fn emit(&self, platform: &dyn Platform) {
        let value = |name, value| report::result(platform, Name::literal(name), value, Name::literal("1"));
        value("checksum_re", self.last[0]);
        value("checksum_re_reference", self.last_reference[0]);
        value("checksum_im", self.last[1]);
        value("checksum_im_reference", self.last_reference[1]);
        value("largest_error", self.largest_error);
    }
}

/// Places of the slices in the arena.
struct Places {
    u0: Place<Complex>,
    u1: Place<Complex>,
    twiddle: Place<f64>,
    decay: Place<f64>,
    roots: Place<Complex>,
    buffers: Place<Column>,
}

impl Places {
    fn new(layout: &mut Layout, size: Size, members: usize) -> Self {
        let (padded, longest) = ((size.plane() * size.z) as u64, size.longest() as u64);
        Self {
            u0: layout.place(padded),
            u1: layout.place(padded),
            twiddle: layout.place(padded),
            decay: layout.place(size.x as u64),
            roots: layout.place(longest),
            buffers: layout.place(2 * longest * members as u64),
        }
    }
}

/// The cube and its transform.
struct Cube<'p, 'm> {
    transform: Transform<'p, 'm>,
    /// Transform of the solution.
    u0: &'m mut [Complex],
    /// Solution at the current step.
    u1: &'m mut [Complex],
    /// Factor by which each coefficient decays in a step.
    twiddle: &'m mut [f64],
    /// The factor of `twiddle` that depends on x.
    decay: &'m mut [f64],
}

impl<'p, 'm> Cube<'p, 'm> {
    fn new(platform: &'p dyn Platform, size: Size, places: Places, typed: &mut Typed<'m>) -> Self {
        let (u0, u1, twiddle) = (typed.take(places.u0), typed.take(places.u1), typed.take(places.twiddle));
        let decay = typed.take(places.decay);
        let (roots, buffers) = (typed.take(places.roots), typed.take(places.buffers));
        Self { transform: Transform { platform, size, roots, buffers }, u0, u1, twiddle, decay }
    }

    /// Sets up twiddle, random numbers, roots, and the transform of the numbers. The numbers are drawn in place of
    /// their transform; the NPB draws them in u1 and moves them with the last pass.
    fn start(&mut self) {
        self.fill_twiddle();
        self.draw();
        fill_with_roots(self.transform.roots);
        self.transform.forward(self.u0);
    }

    /// Sets exp(−4α·π²·(x² + y² + z²)), with coordinates from −n/2 on.
    fn fill_twiddle(&mut self) {
        let (platform, size) = (self.transform.platform, self.transform.size);
        fill_with_decay(self.decay);
        let decay = &*self.decay;
        let parts = size.planes(self.twiddle, platform.vcpus());
        deal(platform, parts.zip(ranges(size.z, platform.vcpus())), |_, (twiddle, range)| {
            for (plane, z) in twiddle.chunks_exact_mut(size.plane()).zip(range) {
                for (y, row) in plane.chunks_exact_mut(size.row()).enumerate() {
                    let of_row = libm::exp(exponent(y, size.y) + exponent(z, size.z));
                    row.iter_mut().zip(decay).for_each(|(twiddle, of_x)| *twiddle = of_row * of_x);
                }
            }
        });
    }

    /// Draws the numbers of the generator, row by row, as one stream through all planes.
    fn draw(&mut self) {
        let (platform, size) = (self.transform.platform, self.transform.size);
        let parts = size.planes(self.u0, platform.vcpus());
        deal(platform, parts.zip(ranges(size.z, platform.vcpus())), |_, (u0, range)| {
            let mut random = Random::new(SEED).skip((2 * size.x * size.y * range.start) as u64);
            for row in u0.chunks_exact_mut(size.row()) {
                random.fill(row[..size.x].as_flattened_mut());
            }
        });
    }

    /// Runs one step in time. Returns its checksum.
    fn step(&mut self) -> Complex {
        self.evolve();
        self.transform.backward(self.u1);
        self.checksum()
    }

    /// Lets the coefficients decay; u1 gets a copy to be transformed back.
    fn evolve(&mut self) {
        let (platform, size) = (self.transform.platform, self.transform.size);
        let members = platform.vcpus();
        let parts = size.planes(self.u0, members).zip(size.planes(self.u1, members)).zip(ranges(size.z, members));
        let twiddle = &*self.twiddle;
        deal(platform, parts, |_, ((u0, u1), range)| {
            let twiddle = &twiddle[range.start * size.plane()..range.end * size.plane()];
            for ((u0, u1), twiddle) in u0.iter_mut().zip(u1).zip(twiddle) {
                *u0 = u0.map(|part| part * twiddle);
                *u1 = *u0;
            }
        });
    }

    /// The sum of 1024 numbers of u1 from all over the cube, divided by the number of points, since the transforms
    /// are not normalised.
    fn checksum(&self) -> Complex {
        let size = self.transform.size;
        let numbers = (1..=CHECKED).map(|index| {
            let (x, y, z) = (index % size.x, 3 * index % size.y, 5 * index % size.z);
            self.u1[z * size.plane() + y * size.row() + x]
        });
        let sum = numbers.fold([0.0; 2], |sum, number| [sum[0] + number[0], sum[1] + number[1]]);
        sum.map(|part| part / size.numbers() as f64)
    }
}

/// Contribution of one coordinate to the exponent of twiddle.
fn exponent(index: usize, count: usize) -> f64 {
    use core::f64::consts::PI;
    let coordinate = ((index + count / 2) % count) as f64 - (count / 2) as f64;
    -4.0 * ALPHA * PI * PI * coordinate * coordinate
}

fn fill_with_decay(decay: &mut [f64]) {
    let count = decay.len();
    decay.iter_mut().enumerate().for_each(|(index, decay)| *decay = libm::exp(exponent(index, count)));
}

/// In-place transform of a cube, block of lines by block of lines.
struct Transform<'p, 'm> {
    platform: &'p dyn Platform,
    size: Size,
    roots: &'m mut [Complex],
    /// The two buffers of a block, for each vCPU.
    buffers: &'m mut [Column],
}

impl Transform<'_, '_> {
    fn forward(&mut self, field: &mut [Complex]) {
        self.along_x(field, Direction::Forward);
        self.along_y(field, Direction::Forward);
        self.along_z(field, Direction::Forward);
    }

    fn backward(&mut self, field: &mut [Complex]) {
        self.along_z(field, Direction::Backward);
        self.along_y(field, Direction::Backward);
        self.along_x(field, Direction::Backward);
    }

    /// Transforms along x: blocks are neighbouring rows.
    fn along_x(&mut self, field: &mut [Complex], direction: Direction) {
        /// Numbers that are moved of one row before those of the next: two cache lines full, so that the written
        /// columns stay in the first-level cache.
        const PIECE: usize = 8;
        let Self { platform, size, roots, buffers } = self;
        let parts = size.planes(field, platform.vcpus());
        deal(*platform, parts.zip(buffers.chunks_exact_mut(2 * size.longest())), |_, (field, buffer)| {
            let mut block = Block::new(direction, size.x, roots, buffer);
            for rows in field.chunks_exact_mut(LINES * size.row()) {
                for x in (0..size.x).step_by(PIECE) {
                    for (line, row) in rows.chunks_exact(size.row()).enumerate() {
                        block.put_line(line, x, &row[x..x + PIECE]);
                    }
                }
                block.transform();
                for x in (0..size.x).step_by(PIECE) {
                    for (line, row) in rows.chunks_exact_mut(size.row()).enumerate() {
                        block.get_line(line, x, &mut row[x..x + PIECE]);
                    }
                }
            }
        });
    }

    /// Transforms along y: blocks are neighbouring columns of a plane.
    fn along_y(&mut self, field: &mut [Complex], direction: Direction) {
        let Self { platform, size, roots, buffers } = self;
        let parts = size.planes(field, platform.vcpus());
        deal(*platform, parts.zip(buffers.chunks_exact_mut(2 * size.longest())), |_, (field, buffer)| {
            let mut block = Block::new(direction, size.y, roots, buffer);
            for plane in field.chunks_exact_mut(size.plane()) {
                for x in (0..size.x).step_by(LINES) {
                    for (y, row) in plane.chunks_exact(size.row()).enumerate() {
                        block.put(y, piece(row, x));
                    }
                    block.transform();
                    for (y, row) in plane.chunks_exact_mut(size.row()).enumerate() {
                        block.get(y, piece_mut(row, x));
                    }
                }
            }
        });
    }

    /// Transforms along z: blocks are neighbours in a row, through all planes.
    fn along_z(&mut self, field: &mut [Complex], direction: Direction) {
        let Self { platform, size, roots, buffers } = self;
        let parts = deal_rows(field, size.y, size.row(), ranges(size.y, platform.vcpus()));
        deal(*platform, parts.zip(buffers.chunks_exact_mut(2 * size.longest())), |_, (mut field, buffer)| {
            let mut block = Block::new(direction, size.z, roots, buffer);
            for y in field.rows() {
                for x in (0..size.x).step_by(LINES) {
                    for z in 0..size.z {
                        block.put(z, piece(field.row(z, y), x));
                    }
                    block.transform();
                    for z in 0..size.z {
                        block.get(z, piece_mut(field.row_mut(z, y), x));
                    }
                }
            }
        });
    }
}

/// A block's part of a row from x on.
fn piece(row: &[Complex], x: usize) -> &[Complex; LINES] {
    row[x..].first_chunk().expect("blocks divide a row")
}

fn piece_mut(row: &mut [Complex], x: usize) -> &mut [Complex; LINES] {
    row[x..].first_chunk_mut().expect("blocks divide a row")
}

const CHECKSUMS_S: &[Complex] = &[
    [554.608_700_496_4, 484.536_333_197_8],
    [554.638_540_918_9, 486.530_426_951_1],
    [554.614_840_617_1, 488.391_072_233_6],
    [554.542_360_741_5, 490.127_316_904_6],
    [554.425_503_962_4, 491.747_585_799_3],
    [554.268_341_190_2, 493.259_724_494_1],
];
const CHECKSUMS_W: &[Complex] = &[
    [567.361_217_894_4, 529.324_684_917_5],
    [563.143_688_527_1, 528.214_998_662_9],
    [559.402_408_997_0, 527.099_655_803_7],
    [556.069_804_702_0, 526.002_790_492_5],
    [553.089_899_125_0, 524.940_084_563_3],
    [550.415_973_453_8, 523.921_224_708_6],
];
const CHECKSUMS_A: &[Complex] = &[
    [504.673_500_819_3, 511.404_790_551_0],
    [505.941_231_973_4, 509.880_966_643_3],
    [506.937_689_628_7, 509.814_404_221_3],
    [507.789_286_847_4, 510.133_613_075_9],
    [508.523_309_539_1, 510.491_465_519_4],
    [509.148_709_995_9, 510.791_784_280_3],
];
const CHECKSUMS_B: &[Complex] = &[
    [517.764_357_157_9, 507.780_345_859_7],
    [515.452_129_126_3, 508.824_943_159_9],
    [514.640_922_864_9, 509.620_891_265_9],
    [514.237_875_621_3, 510.102_338_761_9],
    [513.962_666_773_7, 510.397_661_061_7],
    [513.742_346_008_2, 510.594_801_980_2],
    [513.554_705_687_8, 510.740_416_578_3],
    [513.391_092_546_6, 510.857_657_366_1],
    [513.247_070_539_0, 510.957_727_852_3],
    [513.119_772_998_4, 511.046_030_448_3],
    [513.007_031_928_3, 511.125_243_380_0],
    [512.907_053_703_2, 511.196_807_771_8],
    [512.818_288_350_2, 511.261_623_306_4],
    [512.739_373_338_3, 511.320_360_555_1],
    [512.669_106_202_0, 511.373_592_809_3],
    [512.606_427_600_4, 511.421_846_054_8],
    [512.550_407_657_0, 511.465_613_976_0],
    [512.500_233_172_0, 511.505_359_596_6],
    [512.455_195_184_6, 511.541_513_040_7],
    [512.414_677_002_9, 511.574_469_221_1],
];
const CHECKSUMS_C: &[Complex] = &[
    [519.507_870_745_7, 514.901_969_923_8],
    [515.542_217_113_4, 512.757_820_199_7],
    [514.467_802_222_2, 512.225_184_751_4],
    [514.015_059_432_8, 512.109_028_901_8],
    [513.755_042_681_0, 512.114_368_582_4],
    [513.581_105_672_8, 512.149_676_456_8],
    [513.456_934_316_5, 512.187_092_189_3],
    [513.365_197_566_1, 512.219_325_032_2],
    [513.295_519_280_5, 512.245_473_579_4],
    [513.241_047_173_8, 512.266_364_960_3],
    [513.197_114_167_9, 512.283_087_982_7],
    [513.160_520_571_6, 512.296_586_971_8],
    [513.129_073_419_4, 512.307_592_744_5],
    [513.101_272_031_4, 512.316_648_655_3],
    [513.076_090_819_5, 512.324_154_168_5],
    [513.052_829_592_3, 512.330_403_759_9],
    [513.031_010_777_3, 512.335_616_797_6],
    [513.010_309_013_3, 512.339_959_221_1],
    [512.990_502_933_3, 512.343_558_898_5],
    [512.971_442_110_9, 512.346_516_400_8],
];

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    #[test]
    fn a_wrong_checksum_is_found() {
        const WRONG: &[Complex] = &[CHECKSUMS_S[0], [554.638_540_918_9, 486.530_426_952_1]];
        // Two windows more than class S needs: its grids begin at window borders, wherever the arena begins.
        let mut words = vec![0; 5 << 19];
        let arena = Arena::from_words(&mut words);
        let wrong = Problem { checksums: WRONG, ..problem(Class::S) };
        let end = native::run(2, 0, Box::new(|_| ()), |platform| solve(platform, &arena, wrong));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 2 })), "{end:?}");
    }
}
