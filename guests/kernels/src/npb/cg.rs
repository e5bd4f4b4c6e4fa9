//! CG: the smallest eigenvalue of a random sparse matrix by inverse power iteration, each step 25 conjugate gradients.
//!
//! ```text
//!   A = Σ sizeᵢ·vᵢ·vᵢᵀ + (rcond − shift)·I     vᵢ sparse and random, rows with sorted columns
//!   repeat: solve A·z = x (25 steps)           zeta = shift + 1 / (x·z)           x = z / ‖z‖
//! ```
//!
//! Nearly all of the time is in A·p: values and columns stream past, and `p[column]` is a gather from all over a
//! vector.

use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::random::{Random, SEED};
use crate::arena::{Layout, Place, Typed, prefetch_behind};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{deal, ranges, split, sum};
use crate::report::{self, COMPUTE, Compared, INIT, VERIFY};
use crate::rounds::{Progress, progress_ms};
use crate::{Arena, KernelError, Platform};

/// CG in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.cg"),
    summary: "NPB CG: conjugate gradients on a random sparse matrix, gathers from a vector",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[
    Class::PARAMETER,
    Parameter {
        name: "progress_ms",
        default: "250",
        unit: "ms",
        meaning: "minimum time between two progress lines, which count conjugate gradients, 10 or more; 0 prints none",
    },
];

/// Steps of one solution, as in the NPB.
const STEPS: u32 = 25;
/// Reciprocal of the matrix's condition number.
const RCOND: f64 = 0.1;
/// Value of vᵢ at index i.
const DIAGONAL: f64 = 0.5;
/// Largest relative error of zeta that the NPB passes.
const TOLERANCE: f64 = 1e-10;
/// Number of sums accumulated in parallel: an addition waits four cycles for the one before.
const LANES: usize = 4;

/// Prefetch distance of the values: about two rows of class A. Without prefetching CG of class A ran at 0.79 of the
/// rate on a shared AMD EPYC; with 512, 4096 and 8192 bytes the gain was smaller.
const AHEAD_BYTES: usize = 2048;
/// Prefetch distance of the columns: the same number of entries.
const COLUMNS_AHEAD_BYTES: usize = AHEAD_BYTES / size_of::<f64>() * size_of::<u32>();

/// Sizes and reference value of a class.
#[derive(Clone, Copy)]
struct Problem {
    rows: usize,
    /// Number of entries drawn for each vᵢ; the one at i may be added.
    drawn: usize,
    iterations: u32,
    shift: f64,
    zeta: f64,
}

const fn problem(class: Class) -> Problem {
    let (rows, drawn, iterations, shift, zeta) = match class {
        Class::S => (1400, 7, 15, 10.0, 8.597_177_507_864_8),
        Class::W => (7000, 8, 15, 12.0, 10.362_595_087_124),
        Class::A => (14_000, 11, 15, 20.0, 17.130_235_054_029),
        Class::B => (75_000, 13, 75, 60.0, 22.712_745_482_631),
        Class::C => (150_000, 15, 75, 110.0, 28.973_605_592_845),
    };
    Problem { rows, drawn, iterations, shift, zeta }
}

impl Problem {
    /// Largest total number of entries of all vᵢ.
    const fn entries_max(&self) -> usize {
        self.rows * (self.drawn + 1)
    }

    /// Largest number of entries of the matrix: each vᵢ contributes the square of its own.
    const fn nonzeros_max(&self) -> usize {
        self.entries_max() * (self.drawn + 1)
    }

    /// Operations of a run, by the NPB's formula.
    fn operations(&self) -> f64 {
        let entries = (self.drawn * (self.drawn + 1)) as f64;
        let per_row = 3.0 + entries + f64::from(STEPS) * (5.0 + entries) + 3.0;
        2.0 * f64::from(self.iterations) * self.rows as f64 * per_row
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let problem = problem(Class::from_parameters(parameters)?);
    progress_ms(parameters, report::PROGRESS_MS)?;
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &problem)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let problem = problem(class);
    let progress_ms = progress_ms(parameters, report::PROGRESS_MS)?;
    report::problem(platform, class, &[problem.rows], problem.iterations);
    solve(platform, arena, problem, progress_ms)
}

fn solve<'a>(
    platform: &dyn Platform,
    arena: &Arena<'_>,
    problem: Problem,
    progress_ms: u64,
) -> Result<(), KernelError<'a>> {
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &problem);
    let (name, lasting) = (Name::literal("matrix"), places.lasting_bytes);
    let mut typed = report::claim_with_temporary(platform, arena, &layout, name, lasting)?;
    let (mut iteration, _) = report::phase(platform, INIT, || {
        let (matrix, vectors) = places.take(&mut typed, &problem);
        let mut iteration = PowerIteration { platform, shift: problem.shift, matrix, vectors };
        iteration.restart();
        iteration.step(|_| ());
        iteration.restart();
        iteration
    });
    let (found, ticks) = report::phase(platform, COMPUTE, || {
        let iterations = platform.steps_of(problem.iterations);
        let gradients = |iterations: u32| u64::from(iterations) * u64::from(STEPS);
        let progress = Progress::new(platform, COMPUTE, gradients(iterations), progress_ms);
        let step = |done: u32| iteration.step(|more| progress.note(gradients(done) + u64::from(more)));
        (0..iterations).map(step).last().unwrap_or_default()
    });
    report::rate(platform, problem.operations(), ticks);
    let nonzeros = iteration.matrix.values.len();
    report::result(platform, Name::literal("nonzeros"), nonzeros as f64, Name::literal("entries"));
    report::result(platform, Name::literal("residual"), found.residual, Name::literal("1"));
    verify(platform, &problem, found.zeta)
}

fn verify<'a>(platform: &dyn Platform, problem: &Problem, zeta: f64) -> Result<(), KernelError<'a>> {
    let check = Compared {
        name: Name::literal("zeta"),
        reference_name: Name::literal("zeta_reference"),
        value: zeta,
        reference: problem.zeta,
        tolerance: TOLERANCE,
    };
    let (is_right, _) = report::phase(platform, VERIFY, || {
        check.emit(platform);
        check.is_right()
    });
    report::verdict(platform, u64::from(!is_right), 1)
}

/// Places of the slices: the matrix, the vectors, and temporary memory for making the matrix.
struct Places {
    values: Place<f64>,
    columns: Place<u32>,
    row_starts: Place<u32>,
    vectors: [Place<f64>; 5],
    /// Bytes of all of the above, which every step uses.
    lasting_bytes: u64,
    sparse: [SparsePlaces; 2],
    row: [Place<f64>; 2],
    last_row: Place<u32>,
}

/// Places of a list of sparse vectors.
struct SparsePlaces {
    values: Place<f64>,
    indices: Place<u32>,
    starts: Place<u32>,
}

impl Places {
    fn new(layout: &mut Layout, problem: &Problem) -> Self {
        let (rows, nonzeros, entries) =
            (problem.rows as u64, problem.nonzeros_max() as u64, problem.entries_max() as u64);
        Self {
            values: layout.place(nonzeros),
            columns: layout.place(nonzeros),
            row_starts: layout.place(rows + 1),
            vectors: [(); 5].map(|()| layout.place(rows)),
            lasting_bytes: layout.needed(),
            sparse: [(); 2].map(|()| SparsePlaces {
                values: layout.place(entries),
                indices: layout.place(entries),
                starts: layout.place(rows + 1),
            }),
            row: [(); 2].map(|()| layout.place(rows)),
            last_row: layout.place(rows),
        }
    }

    /// Takes all slices and makes the matrix.
    fn take<'m>(self, typed: &mut Typed<'m>, problem: &Problem) -> (Matrix<'m>, Vectors<'m>) {
        let (values, columns, starts) =
            (typed.take(self.values), typed.take(self.columns), typed.take(self.row_starts));
        let [x, z, p, q, r] = self.vectors.map(|place| typed.take(place));
        let [mut sparse, mut by_row] = self.sparse.map(|places| Sparse {
            values: typed.take(places.values),
            indices: typed.take(places.indices),
            starts: typed.take(places.starts),
        });
        let [sizes, sums] = self.row.map(|place| typed.take(place));
        sparse.draw(problem);
        by_row.transpose(&sparse);
        fill_with_powers(sizes, libm::pow(RCOND, 1.0 / problem.rows as f64));
        let row = Row { sums, last_row: typed.take(self.last_row) };
        let maker = Maker { sparse: &sparse, by_row: &by_row, sizes, diagonal: RCOND - problem.shift };
        (maker.make(row, values, columns, starts), Vectors { x, z, p, q, r })
    }
}

/// Fills a slice with 1, `ratio`, `ratio`², ….
fn fill_with_powers(powers: &mut [f64], ratio: f64) {
    let mut power = 1.0;
    for place in powers {
        *place = power;
        power *= ratio;
    }
}

/// A list of sparse vectors.
struct Sparse<'m> {
    values: &'m mut [f64],
    indices: &'m mut [u32],
    /// Index at which each vector begins, and the end of the last.
    starts: &'m mut [u32],
}

impl Sparse<'_> {
    fn range(&self, vector: usize) -> Range<usize> {
        self.starts[vector] as usize..self.starts[vector + 1] as usize
    }

    /// Indices and values of one vector.
    fn entries(&self, vector: usize) -> impl Iterator<Item = (u32, f64)> {
        let range = self.range(vector);
        self.indices[range.clone()].iter().copied().zip(self.values[range].iter().copied())
    }

    /// Draws the vᵢ, in the order of the NPB's random numbers.
    fn draw(&mut self, problem: &Problem) {
        let mut random = Random::new(SEED);
        // The NPB draws one number before the matrix.
        random.next_bits();
        let mut end = 0;
        for row in 0..problem.rows {
            self.starts[row] = end as u32;
            end = self.draw_one(&mut random, problem, end);
            end = self.set_diagonal(row as u32, end);
        }
        self.starts[problem.rows] = end as u32;
    }

    /// Draws the entries of one vector behind `start`. It draws again if an index is out of range or taken; fewer
    /// than half are out of range, so this ends.
    fn draw_one(&mut self, random: &mut Random, problem: &Problem, start: usize) -> usize {
        let range = problem.rows.next_power_of_two() as f64;
        let mut end = start;
        while end < start + problem.drawn {
            let (value, index) = (random.next_number(), (range * random.next_number()) as u32);
            if (index as usize) < problem.rows && !self.indices[start..end].contains(&index) {
                (self.values[end], self.indices[end]) = (value, index);
                end += 1;
            }
        }
        end
    }

    /// Sets the entry at `row` of the vector with the last entries before `end`.
    fn set_diagonal(&mut self, row: u32, end: usize) -> usize {
        let start = self.starts[row as usize] as usize;
        let found = self.indices[start..end].iter().position(|index| *index == row);
        let place = found.map_or(end, |position| start + position);
        (self.values[place], self.indices[place]) = (DIAGONAL, row);
        end.max(place + 1)
    }

    /// Lists for each row which of the `vectors` have an entry there, in their order, with its value.
    fn transpose(&mut self, vectors: &Sparse<'_>) {
        let count = self.starts.len() - 1;
        let end = vectors.starts[count] as usize;
        for index in &vectors.indices[..end] {
            self.starts[*index as usize] += 1;
        }
        // Running sums give the ends; filling from the last vector to the first turns them into the starts.
        let mut sum = 0;
        for start in &mut *self.starts {
            sum += *start;
            *start = sum;
        }
        for vector in (0..count).rev() {
            for (index, value) in vectors.entries(vector) {
                self.starts[index as usize] -= 1;
                let place = self.starts[index as usize] as usize;
                (self.values[place], self.indices[place]) = (value, vector as u32);
            }
        }
    }
}

/// One row under construction.
struct Row<'m> {
    /// The sum in each column.
    sums: &'m mut [f64],
    /// The last row, counted from 1, that used that column.
    last_row: &'m mut [u32],
}

/// The inputs from which the matrix is made.
struct Maker<'s, 'm> {
    sparse: &'s Sparse<'m>,
    by_row: &'s Sparse<'m>,
    sizes: &'s [f64],
    /// Number added to every entry on the diagonal.
    diagonal: f64,
}

impl Maker<'_, '_> {
    /// Makes the matrix, row by row, in slices that have room for it.
    fn make<'m>(
        &self,
        mut row: Row<'_>,
        values: &'m mut [f64],
        columns: &'m mut [u32],
        starts: &'m mut [u32],
    ) -> Matrix<'m> {
        let mut end = 0;
        for index in 0..self.sizes.len() {
            let start = end;
            end = self.add_up(index, &mut row, columns, start);
            columns[start..end].sort_unstable();
            let sums = columns[start..end].iter().map(|column| row.sums[*column as usize]);
            values[start..end].iter_mut().zip(sums).for_each(|(value, sum)| *value = sum);
            starts[index + 1] = end as u32;
        }
        Matrix { values: &values[..end], columns: &columns[..end], starts }
    }

    /// Adds up the contributions of all vᵢ to a row, and lists its columns from `start` on. Returns the end of the
    /// list.
    fn add_up(&self, index: usize, row: &mut Row<'_>, columns: &mut [u32], start: usize) -> usize {
        let mut end = start;
        for (vector, at_row) in self.by_row.entries(index) {
            let vector = vector as usize;
            let scale = self.sizes[vector] * at_row;
            for (column, value) in self.sparse.entries(vector) {
                let place = column as usize;
                if row.last_row[place] != index as u32 + 1 {
                    row.last_row[place] = index as u32 + 1;
                    row.sums[place] = 0.0;
                    columns[end] = column;
                    end += 1;
                }
                let is_own = place == index && vector == index;
                row.sums[place] += value * scale + if is_own { self.diagonal } else { 0.0 };
            }
        }
        end
    }
}

/// A sparse matrix stored by rows.
struct Matrix<'m> {
    values: &'m [f64],
    columns: &'m [u32],
    /// Index at which each row begins, and the end of the last.
    starts: &'m [u32],
}

impl Matrix<'_> {
    /// Multiplies these rows by `vector`.
    fn multiply(&self, rows: Range<usize>, vector: &[f64], product: &mut [f64]) {
        for (borders, result) in self.starts[rows.start..=rows.end].windows(2).zip(product) {
            let row = borders[0] as usize..borders[1] as usize;
            *result = sparse_dot(&self.values[row.clone()], &self.columns[row], vector);
        }
    }
}

/// The product of a sparse row and a vector.
#[inline]
fn sparse_dot(values: &[f64], columns: &[u32], vector: &[f64]) -> f64 {
    let (value_lanes, value_rest) = values.as_chunks::<LANES>();
    let (column_lanes, column_rest) = columns.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (values, columns) in value_lanes.iter().zip(column_lanes) {
        prefetch_behind(values, AHEAD_BYTES);
        prefetch_behind(columns, COLUMNS_AHEAD_BYTES);
        for lane in 0..LANES {
            sums[lane] += values[lane] * vector[columns[lane] as usize];
        }
    }
    let rest: f64 = value_rest.iter().zip(column_rest).map(|(value, column)| value * vector[*column as usize]).sum();
    sums.iter().sum::<f64>() + rest
}

/// The product of two vectors.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    let (one_lanes, one_rest) = one.as_chunks::<LANES>();
    let (other_lanes, other_rest) = other.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (one, other) in one_lanes.iter().zip(other_lanes) {
        for lane in 0..LANES {
            sums[lane] += one[lane] * other[lane];
        }
    }
    let rest: f64 = one_rest.iter().zip(other_rest).map(|(one, other)| one * other).sum();
    sums.iter().sum::<f64>() + rest
}

/// The vectors, named as in the method's usual description.
struct Vectors<'m> {
    x: &'m mut [f64],
    z: &'m mut [f64],
    p: &'m mut [f64],
    q: &'m mut [f64],
    r: &'m mut [f64],
}

/// Result of a step of the power iteration.
#[derive(Clone, Copy, Default)]
struct Estimate {
    zeta: f64,
    residual: f64,
}

/// The inverse power iteration.
struct PowerIteration<'p, 'm> {
    platform: &'p dyn Platform,
    shift: f64,
    matrix: Matrix<'m>,
    vectors: Vectors<'m>,
}

impl PowerIteration<'_, '_> {
    /// Restarts with x = (1, …, 1).
    fn restart(&mut self) {
        self.vectors.x.fill(1.0);
    }

    /// One step of the power iteration. Calls `after(n)` when n conjugate gradients are done.
    fn step(&mut self, after: impl Fn(u32)) -> Estimate {
        let mut rho = self.start();
        for done in 1..=STEPS {
            rho = self.descend(rho);
            after(done);
        }
        let residual = self.residual();
        let (x, z) = (&*self.vectors.x, &*self.vectors.z);
        let (platform, members) = (self.platform, self.platform.vcpus());
        let x_z = sum(deal(platform, ranges(x.len(), members), |_, rows| dot(&x[rows.clone()], &z[rows])));
        let z_z = sum(deal(platform, ranges(x.len(), members), |_, rows| dot(&z[rows.clone()], &z[rows])));
        let scale = 1.0 / libm::sqrt(z_z);
        deal(platform, split(self.vectors.x, members).zip(ranges(z.len(), members)), |_, (x, rows)| {
            x.iter_mut().zip(&z[rows]).for_each(|(x, z)| *x = scale * z);
        });
        Estimate { zeta: self.shift + 1.0 / x_z, residual }
    }

    /// Sets z = 0, r = p = x. Returns r·r.
    fn start(&mut self) -> f64 {
        let (platform, members) = (self.platform, self.platform.vcpus());
        let Vectors { x, z, p, r, .. } = &mut self.vectors;
        let rows = ranges(x.len(), members);
        let parts = split(z, members).zip(split(p, members)).zip(split(r, members)).zip(rows);
        let x = &**x;
        sum(deal(platform, parts, |_, (((z, p), r), rows)| {
            z.fill(0.0);
            p.copy_from_slice(&x[rows.clone()]);
            r.copy_from_slice(&x[rows]);
            dot(r, r)
        }))
    }

    /// Runs one step of conjugate gradients from ρ = r·r. Returns the next ρ.
    fn descend(&mut self, rho: f64) -> f64 {
        let (platform, members) = (self.platform, self.platform.vcpus());
        let matrix = &self.matrix;
        let Vectors { z, p, q, r, .. } = &mut self.vectors;
        let rows = || ranges(matrix.starts.len() - 1, members);

        let all_p = &**p;
        let p_q = sum(deal(platform, split(q, members).zip(rows()), |_, (q, rows)| {
            matrix.multiply(rows.clone(), all_p, q);
            dot(&all_p[rows], q)
        }));
        let alpha = rho / p_q;
        let q = &**q;
        let next_rho =
            sum(deal(platform, split(z, members).zip(split(r, members)).zip(rows()), |_, ((z, r), rows)| {
                z.iter_mut().zip(&all_p[rows.clone()]).for_each(|(z, p)| *z += alpha * p);
                r.iter_mut().zip(&q[rows]).for_each(|(r, q)| *r -= alpha * q);
                dot(r, r)
            }));
        let (beta, r) = (next_rho / rho, &**r);
        deal(platform, split(p, members).zip(rows()), |_, (p, rows)| {
            p.iter_mut().zip(&r[rows]).for_each(|(p, r)| *p = r + beta * *p);
        });
        next_rho
    }

    /// Computes ‖x − A·z‖, with A·z in r. It is part of what the NPB times.
    fn residual(&mut self) -> f64 {
        let (platform, members) = (self.platform, self.platform.vcpus());
        let (matrix, x, z) = (&self.matrix, &*self.vectors.x, &*self.vectors.z);
        let parts = split(self.vectors.r, members).zip(ranges(z.len(), members));
        let squares = deal(platform, parts, |_, (r, rows)| {
            matrix.multiply(rows.clone(), z, r);
            r.iter().zip(&x[rows]).map(|(r, x)| (x - r) * (x - r)).sum()
        });
        libm::sqrt(sum(squares))
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    #[test]
    fn a_wrong_zeta_is_found() {
        let mut words = vec![0; 1 << 19];
        let arena = Arena::from_words(&mut words);
        let wrong = Problem { zeta: 8.597_177_51, ..problem(Class::S) };
        let end = native::run(1, 0, Box::new(|_| ()), |platform| solve(platform, &arena, wrong, 0));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 1 })), "{end:?}");
    }
}
