//! MG: a periodic Poisson equation on n³ points by multigrid, four or twenty V-cycles.
//!
//! ```text
//!   level   256³  v − A·u = r ─┐                                              ┌─▶ u += Q·u, r = v − A·u, u += S·r
//!           128³               └─▶ r = P·r ─┐                    ┌─▶ u = Q·u, r −= A·u, u += S·r
//!            ⋮                              └─▶ …             … ─┘
//!             2³                                └─▶ u = S·r ─┘
//!
//!   memory  u │ 258³ │ 130³ │ … │ 4³ │   v │ 258³ │   r │ 258³ │ 130³ │ … │ 4³ │    a layer of ghosts around each grid
//! ```
//!
//! A, S, P and Q are stencils of 27 points: nine rows stream past for every row that is written. Each vCPU has
//! whole planes of every grid. The ghosts repeat the points of the opposite side; every operator renews them.

use core::array;
use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::random::{Random, SEED};
use crate::arena::{Layout, Place, Typed, prefetch_behind};
use crate::copy;
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges, sum};
use crate::report::{self, COMPUTE, Compared, INIT, VERIFY};
use crate::vectors::{self, Vectorized};
use crate::{Arena, KernelError, Platform};

/// MG in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.mg"),
    summary: "NPB MG: multigrid, stencils of 27 points on grids of many sizes",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER];

/// Points with +1 in the right-hand side, and as many with −1.
const CHARGES: usize = 10;
/// Operations per point and cycle in the NPB's rate.
const OPERATIONS_PER_POINT: f64 = 58.0;
/// Largest relative error of the norm that the NPB passes.
const TOLERANCE: f64 = 1e-8;
/// Longest row, of class C's 512³, with its ghosts: the length of one row's sums.
const ROW_LEN_MAX: usize = 512 + 2;
/// Numbers in a cache line.
const LINE_LEN: usize = 8;
/// Number of sums accumulated in parallel: an addition waits four cycles for the one before.
const LANES: usize = 4;

/// Weights of a stencil's points: the centre, its 6 neighbours at faces, 12 at edges and 8 at corners.
type Weights = [f64; 4];

/// The operator −A, the negative Laplacian: the residual is v + (−A)·u.
const MINUS_A: Weights = [8.0 / 3.0, 0.0, -1.0 / 6.0, -1.0 / 12.0];
/// Smoother S for the classes S, W and A.
const SMOOTHER_A: Weights = [-3.0 / 8.0, 1.0 / 32.0, -1.0 / 64.0, 0.0];
/// Smoother S for the classes from B on.
const SMOOTHER_B: Weights = [-3.0 / 17.0, 1.0 / 33.0, -1.0 / 61.0, 0.0];

/// Sizes and reference value of a class.
#[derive(Clone, Copy)]
struct Problem {
    /// log₂ of the points along an edge of the finest grid.
    log2_edge: u32,
    cycles: u32,
    smoother: Weights,
    /// Norm of the last residual.
    norm: f64,
}

const fn problem(class: Class) -> Problem {
    let (log2_edge, cycles, smoother, norm) = match class {
        Class::S => (5, 4, SMOOTHER_A, 0.530_770_700_573_4e-4),
        Class::W => (7, 4, SMOOTHER_A, 0.646_732_937_533_9e-5),
        Class::A => (8, 4, SMOOTHER_A, 0.243_336_530_906_9e-5),
        Class::B => (8, 20, SMOOTHER_B, 0.180_056_440_135_5e-5),
        Class::C => (9, 20, SMOOTHER_B, 0.570_673_228_574_0e-6),
    };
    Problem { log2_edge, cycles, smoother, norm }
}

impl Problem {
    /// Points of the finest grid, without ghosts.
    const fn points(&self) -> usize {
        1 << (3 * self.log2_edge)
    }

    /// Operations of a run, by the NPB's formula.
    fn operations(&self) -> f64 {
        OPERATIONS_PER_POINT * f64::from(self.cycles) * self.points() as f64
    }

    /// The grid of 2^`log2_edge` points along an edge, within the slice of all levels.
    fn level(&self, log2_edge: u32) -> Level {
        let start = (log2_edge + 1..=self.log2_edge).map(|finer| Shape::new(finer).len()).sum();
        Level { shape: Shape::new(log2_edge), start }
    }

    /// Numbers in the grids of all levels.
    fn len_of_all(&self) -> usize {
        self.level(COARSEST).range().end
    }
}

/// log₂ of the edge of the coarsest level, 2³ points.
const COARSEST: u32 = 1;

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let problem = problem(Class::from_parameters(parameters)?);
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &problem)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let problem = problem(class);
    report::problem(platform, class, &[1 << problem.log2_edge; 3], problem.cycles);
    solve(platform, arena, problem)
}

fn solve<'a>(platform: &dyn Platform, arena: &Arena<'_>, problem: Problem) -> Result<(), KernelError<'a>> {
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &problem);
    let mut typed = report::claim(platform, arena, &layout, Name::literal("grids"))?;
    let (mut grids, _) = report::phase(platform, INIT, || {
        let mut grids = places.take(&mut typed, platform, problem);
        grids.set_charges();
        grids.subtract_from_right_side();
        grids.cycle();
        grids.subtract_from_right_side();
        grids.u.fill(0.0);
        grids
    });
    let (norm, ticks) = report::phase(platform, COMPUTE, || {
        grids.subtract_from_right_side();
        grids.norm();
        for _ in report::steps(platform, problem.cycles) {
            grids.cycle();
            grids.subtract_from_right_side();
        }
        grids.norm()
    });
    report::rate(platform, problem.operations(), ticks);
    verify(platform, &problem, norm)
}

fn verify<'a>(platform: &dyn Platform, problem: &Problem, norm: f64) -> Result<(), KernelError<'a>> {
    let check = Compared {
        name: Name::literal("norm"),
        reference_name: Name::literal("norm_reference"),
        value: norm,
        reference: problem.norm,
        tolerance: TOLERANCE,
    };
    let (is_right, _) = report::phase(platform, VERIFY, || {
        check.emit(platform);
        check.is_right()
    });
    report::verdict(platform, u64::from(!is_right), 1)
}

/// Shape of a cubic grid with its ghosts: consecutive rows make a plane, consecutive planes the grid.
#[derive(Clone, Copy)]
struct Shape {
    /// Points along an edge, including the two ghosts: the points of a row, the rows of a plane, and the planes.
    edge: usize,
}

impl Shape {
    const fn new(log2_edge: u32) -> Self {
        Self { edge: (1 << log2_edge) + 2 }
    }

    const fn inner(self) -> usize {
        self.edge - 2
    }

    const fn plane_len(self) -> usize {
        self.edge * self.edge
    }

    const fn len(self) -> usize {
        self.edge * self.edge * self.edge
    }

    fn row(self, grid: &[f64], plane: usize, row: usize) -> &[f64] {
        &grid[(plane * self.edge + row) * self.edge..][..self.edge]
    }

    /// The rows `row − 1`, `row` and `row + 1` of the planes `plane − 1`, `plane` and `plane + 1`.
    fn rows_around(self, grid: &[f64], plane: usize, row: usize) -> [[&[f64]; 3]; 3] {
        array::from_fn(|p| array::from_fn(|r| self.row(grid, plane + p - 1, row + r - 1)))
    }

    /// Sets the ghosts of one row: each is the last point but one of the opposite side.
    fn close_row(self, row: &mut [f64]) {
        row[0] = row[self.inner()];
        row[self.inner() + 1] = row[1];
    }

    /// Sets the two ghost rows of a plane after its other rows are closed.
    fn close_plane(self, plane: &mut [f64]) {
        self.close_ends(plane, self.edge);
    }

    /// Sets the two ghost planes of a grid after its other planes are closed.
    fn close_grid(self, grid: &mut [f64]) {
        self.close_ends(grid, self.plane_len());
    }

    /// Sets the first and the last of a series of `edge` parts.
    fn close_ends(self, parts: &mut [f64], part_len: usize) {
        copy::copy_within(parts, self.inner() * part_len, 0, part_len);
        copy::copy_within(parts, part_len, (self.inner() + 1) * part_len, part_len);
    }
}

/// Place of the grid of one level.
#[derive(Clone, Copy)]
struct Level {
    shape: Shape,
    /// Offset in the slice of all levels; the finest begins at 0.
    start: usize,
}

impl Level {
    const fn range(self) -> Range<usize> {
        self.start..self.start + self.shape.len()
    }
}

/// Places of the slices in the arena.
struct Places {
    u: Place<f64>,
    v: Place<f64>,
    r: Place<f64>,
}

impl Places {
    fn new(layout: &mut Layout, problem: &Problem) -> Self {
        let (all, finest) = (problem.len_of_all() as u64, Shape::new(problem.log2_edge).len() as u64);
        Self { u: layout.place(all), v: layout.place(finest), r: layout.place(all) }
    }

    fn take<'p, 'm>(self, typed: &mut Typed<'m>, platform: &'p dyn Platform, problem: Problem) -> Grids<'p, 'm> {
        let (u, v, r) = (typed.take(self.u), typed.take(self.v), typed.take(self.r));
        Grids { platform, problem, u, v, r }
    }
}

/// The grids, named as in the method's usual description.
struct Grids<'p, 'm> {
    platform: &'p dyn Platform,
    problem: Problem,
    /// The solution, and the corrections of the coarser levels.
    u: &'m mut [f64],
    /// The right-hand side.
    v: &'m mut [f64],
    /// The residuals of all levels.
    r: &'m mut [f64],
}

impl Grids<'_, '_> {
    fn finest(&self) -> Level {
        self.problem.level(self.problem.log2_edge)
    }

    /// Sets the charges. The NPB puts them at the extremes of a random field.
    fn set_charges(&mut self) {
        let shape = self.finest().shape;
        let extremes = Extremes::of_field(self.platform, shape.inner());
        for (extreme, charge) in [(extremes.largest, 1.0), (extremes.smallest, -1.0)] {
            for [i, j, k] in extreme.positions(shape.inner()) {
                self.v[((k + 1) * shape.edge + j + 1) * shape.edge + i + 1] = charge;
            }
        }
        for plane in self.v.chunks_exact_mut(shape.plane_len()) {
            plane.chunks_exact_mut(shape.edge).for_each(|row| shape.close_row(row));
            shape.close_plane(plane);
        }
        shape.close_grid(self.v);
    }

    /// Runs one V-cycle: down with the residuals, up with the corrections.
    fn cycle(&mut self) {
        let finest = self.problem.log2_edge;
        for coarse in (COARSEST..finest).rev() {
            self.restrict(coarse);
        }
        self.u[self.problem.level(COARSEST).range()].fill(0.0);
        self.smooth(COARSEST);
        for fine in COARSEST + 1..finest {
            self.u[self.problem.level(fine).range()].fill(0.0);
            self.interpolate(fine);
            self.subtract(fine);
            self.smooth(fine);
        }
        self.interpolate(finest);
        self.subtract_from_right_side();
        self.smooth(finest);
    }

    /// Computes r = v − A·u on the finest level.
    fn subtract_from_right_side(&mut self) {
        let Level { shape, .. } = self.finest();
        let range = self.finest().range();
        let residual = Residual { u: &self.u[range.clone()], v: Some(self.v) };
        for_planes(self.platform, shape, &mut self.r[range], &residual);
    }

    /// Computes r −= A·u on a level.
    fn subtract(&mut self, log2_edge: u32) {
        let level = self.problem.level(log2_edge);
        let residual = Residual { u: &self.u[level.range()], v: None };
        for_planes(self.platform, level.shape, &mut self.r[level.range()], &residual);
    }

    /// Computes u += S·r on a level.
    fn smooth(&mut self, log2_edge: u32) {
        let level = self.problem.level(log2_edge);
        let smoother = Smoother { r: &self.r[level.range()], weights: &self.problem.smoother };
        for_planes(self.platform, level.shape, &mut self.u[level.range()], &smoother);
    }

    /// Computes r = P·r, from the next finer level to this one.
    fn restrict(&mut self, log2_edge: u32) {
        let (coarse, fine) = (self.problem.level(log2_edge), self.problem.level(log2_edge + 1));
        let (finer, coarser) = self.r.split_at_mut(coarse.start);
        let restriction = Restriction { fine: fine.shape, r: &finer[fine.range()] };
        for_planes(self.platform, coarse.shape, &mut coarser[..coarse.shape.len()], &restriction);
    }

    /// Computes u += Q·u, from the next coarser level to this one. The ghosts are ordinary points here.
    fn interpolate(&mut self, log2_edge: u32) {
        let (fine, coarse) = (self.problem.level(log2_edge), self.problem.level(log2_edge - 1));
        let (finer, coarser) = self.u.split_at_mut(coarse.start);
        let (pair_len, members) = (2 * fine.shape.plane_len(), self.platform.vcpus());
        let pairs = || ranges(fine.shape.edge / 2, members);
        let parts = cut(&mut finer[fine.range()], pairs().map(|range| range.len() * pair_len)).zip(pairs());
        let coarse_u = &coarser[..coarse.shape.len()];
        deal(self.platform, parts, |_, (planes, range)| {
            vectors::run(Interpolation { fine: fine.shape, planes, range, coarse: coarse.shape, u: coarse_u });
        });
    }

    /// Computes √(Σ r² / n³) on the finest level.
    fn norm(&self) -> f64 {
        let shape = self.finest().shape;
        let r = &self.r[self.finest().range()];
        let squares = deal(self.platform, ranges(shape.inner(), self.platform.vcpus()), |_, planes| {
            let rows = planes.flat_map(|k| (1..=shape.inner()).map(move |j| shape.row(r, k + 1, j)));
            rows.map(|row| sum_of_squares(&row[1..=shape.inner()])).sum()
        });
        libm::sqrt(sum(squares) / self.problem.points() as f64)
    }
}

/// An operator that computes a plane of a grid from another grid.
trait Operator: Sync {
    /// Computes plane k of a grid of this shape, and closes its rows. Inlined, so that its loops are compiled for the
    /// vectors of [`Planes::run`].
    fn compute(&self, shape: Shape, k: usize, plane: &mut [f64]);
}

/// Applies an operator to every plane between the two ghost planes, each on the vCPU it belongs to, and sets the
/// ghosts of the grid.
fn for_planes(platform: &dyn Platform, shape: Shape, grid: &mut [f64], operator: &impl Operator) {
    let plane_len = shape.plane_len();
    let ranges = || ranges(shape.inner(), platform.vcpus());
    let parts = cut(&mut grid[plane_len..], ranges().map(|range| range.len() * plane_len)).zip(ranges());
    deal(platform, parts, |_, (planes, range)| vectors::run(Planes { operator, shape, planes, range }));
    shape.close_grid(grid);
}

/// The planes of one vCPU.
struct Planes<'a, O> {
    operator: &'a O,
    shape: Shape,
    planes: &'a mut [f64],
    /// Numbers of the planes, counted from the first that is no ghost.
    range: Range<usize>,
}

impl<O: Operator> Vectorized for Planes<'_, O> {
    #[inline(always)]
    fn run<const W: usize>(self) {
        for (k, plane) in self.range.zip(self.planes.chunks_exact_mut(self.shape.plane_len())) {
            self.operator.compute(self.shape, k + 1, plane);
            self.shape.close_plane(plane);
        }
    }
}

/// The residual: r = v − A·u, or r −= A·u without a `v`.
struct Residual<'a> {
    u: &'a [f64],
    v: Option<&'a [f64]>,
}

impl Operator for Residual<'_> {
    #[inline(always)]
    fn compute(&self, shape: Shape, k: usize, plane: &mut [f64]) {
        let mut terms = Terms::new(shape);
        for (j, row) in inner_rows(shape, plane) {
            let v = self.v.map(|v| shape.row(v, k, j));
            prefetch_row(row);
            v.into_iter().for_each(prefetch_row);
            terms.of(shape.rows_around(self.u, k, j), minus_a);
            match v {
                Some(v) => terms.add(v, row),
                None => terms.add_to(row),
            }
            shape.close_row(row);
        }
    }
}

/// The terms of −A; neighbours at faces have no weight.
#[inline(always)]
fn minus_a(centre: f64, faces: f64, edges: f64) -> [f64; 2] {
    let [of_centre, _, of_edges, of_corners] = MINUS_A;
    [of_centre * centre + of_edges * edges, of_edges * faces + of_corners * edges]
}

/// The smoother: u += S·r.
struct Smoother<'a> {
    r: &'a [f64],
    weights: &'a Weights,
}

impl Operator for Smoother<'_> {
    #[inline(always)]
    fn compute(&self, shape: Shape, k: usize, plane: &mut [f64]) {
        let mut terms = Terms::new(shape);
        let &[of_centre, of_faces, of_edges, _] = self.weights;
        for (j, row) in inner_rows(shape, plane) {
            prefetch_row(row);
            // Neighbours at corners have no weight.
            terms.of(shape.rows_around(self.r, k, j), |centre, faces, edges| {
                [of_centre * centre + of_faces * faces + of_edges * edges, of_faces * centre + of_edges * faces]
            });
            terms.add_to(row);
            shape.close_row(row);
        }
    }
}

/// Weights of the restriction P.
const RESTRICTION: Weights = [1.0 / 2.0, 1.0 / 4.0, 1.0 / 8.0, 1.0 / 16.0];

/// The restriction by full weighting: every second point of every second row of every second plane, with half of
/// each neighbour in each of the three directions.
struct Restriction<'a> {
    fine: Shape,
    r: &'a [f64],
}

impl Operator for Restriction<'_> {
    #[inline(always)]
    fn compute(&self, shape: Shape, k: usize, plane: &mut [f64]) {
        let mut terms = Terms::new(self.fine);
        let [of_centre, of_faces, of_edges, of_corners] = RESTRICTION;
        for (j, row) in inner_rows(shape, plane) {
            terms.of(self.fine.rows_around(self.r, 2 * k, 2 * j), |centre, faces, edges| {
                let middle = of_centre * centre + of_faces * faces + of_edges * edges;
                [middle, of_faces * centre + of_edges * faces + of_corners * edges]
            });
            terms.every_second(row);
            shape.close_row(row);
        }
    }
}

/// Asks for a row's cache lines, for the loop after the one that follows. The sums between take long enough for them to
/// arrive, and the processor looks no further ahead by itself than some hundred instructions.
#[inline(always)]
fn prefetch_row(row: &[f64]) {
    for line in row.chunks(LINE_LEN) {
        prefetch_behind(&line[0], 0);
    }
}

/// The rows of a plane without the two ghost rows, with their numbers.
fn inner_rows(shape: Shape, plane: &mut [f64]) -> impl Iterator<Item = (usize, &mut [f64])> {
    plane.chunks_exact_mut(shape.edge).enumerate().skip(1).take(shape.inner())
}

/// What each cross section along a row of a grid adds to the stencils around its own middle and around the middles
/// beside it.
///
/// ```text
///   edge   face   edge        seen from the middle;
///   face  centre  face        one step aside a centre is a face, a face an edge, an edge a corner
///   edge   face   edge
/// ```
struct Terms {
    /// Points of the row, including the ghosts.
    len: usize,
    middle: [f64; ROW_LEN_MAX],
    beside: [f64; ROW_LEN_MAX],
}

impl Terms {
    #[inline(always)]
    fn new(shape: Shape) -> Self {
        Self { len: shape.edge, middle: [0.0; ROW_LEN_MAX], beside: [0.0; ROW_LEN_MAX] }
    }

    /// Computes the terms of nine rows: `weigh` gets the centre and the sums of faces and of edges of a cross section,
    /// and returns the terms for its middle and for those beside it.
    #[inline(always)]
    fn of(&mut self, rows: [[&[f64]; 3]; 3], weigh: impl Fn(f64, f64, f64) -> [f64; 2]) {
        let (middle, beside) = (&mut self.middle[..self.len], &mut self.beside[..self.len]);
        let [[e0, f0, e1], [f1, c, f2], [e2, f3, e3]] = rows.map(|plane| plane.map(|row| &row[..middle.len()]));
        for i in 0..middle.len() {
            let (faces, edges) = ((f0[i] + f3[i]) + (f1[i] + f2[i]), (e0[i] + e1[i]) + (e2[i] + e3[i]));
            [middle[i], beside[i]] = weigh(c[i], faces, edges);
        }
    }

    /// For each point that is no ghost: its own term, and those of the points before and behind it.
    #[inline(always)]
    fn parts(&self) -> [&[f64]; 3] {
        let inner = self.len - 2;
        [&self.middle[1..=inner], &self.beside[..inner], &self.beside[2..2 + inner]]
    }

    /// Sets a row to `base` and the terms of its points.
    #[inline(always)]
    fn add(&self, base: &[f64], row: &mut [f64]) {
        let [middle, before, behind] = self.parts();
        let (base, row) = (&base[1..=middle.len()], &mut row[1..=middle.len()]);
        for i in 0..row.len() {
            row[i] = base[i] + (middle[i] + (before[i] + behind[i]));
        }
    }

    /// Adds to each point of a row its terms.
    #[inline(always)]
    fn add_to(&self, row: &mut [f64]) {
        let [middle, before, behind] = self.parts();
        let row = &mut row[1..=middle.len()];
        for i in 0..row.len() {
            row[i] += middle[i] + (before[i] + behind[i]);
        }
    }

    /// Sets a coarse row to the terms of every second point.
    #[inline(always)]
    fn every_second(&self, row: &mut [f64]) {
        let [middle, before, behind] = self.parts().map(|part| part.as_chunks::<2>().0);
        let row = &mut row[1..=middle.len()];
        for i in 0..row.len() {
            row[i] = middle[i][1] + (before[i][1] + behind[i][1]);
        }
    }
}

/// Pairs of fine planes of one vCPU. They get the trilinear interpolation of the coarse planes k and k + 1: a point
/// on a coarse point takes its value, one between two takes half of each.
struct Interpolation<'a> {
    fine: Shape,
    planes: &'a mut [f64],
    /// Numbers k of the coarse planes.
    range: Range<usize>,
    coarse: Shape,
    u: &'a [f64],
}

impl Vectorized for Interpolation<'_> {
    #[inline(always)]
    fn run<const W: usize>(self) {
        for (k, pair) in self.range.zip(self.planes.chunks_exact_mut(2 * self.fine.plane_len())) {
            interpolate_planes(self.fine, pair, self.coarse, self.u, k);
        }
    }
}

#[inline(always)]
fn interpolate_planes(shape: Shape, planes: &mut [f64], coarse: Shape, grid: &[f64], k: usize) {
    let mut sums = [0.0; ROW_LEN_MAX];
    let sums = &mut sums[..coarse.edge];
    let (even, odd) = planes.split_at_mut(shape.plane_len());
    let row_pairs = even.chunks_exact_mut(2 * shape.edge).zip(odd.chunks_exact_mut(2 * shape.edge));
    for (j, (even, odd)) in row_pairs.enumerate() {
        let [below, above] = [k, k + 1].map(|k| [j, j + 1].map(|j| coarse.row(grid, k, j)));
        let (even_even, even_odd) = even.split_at_mut(shape.edge);
        let (odd_even, odd_odd) = odd.split_at_mut(shape.edge);
        stretch(even_even, below[0], 1.0);
        add_rows(sums, below[0], below[1]);
        stretch(even_odd, sums, 1.0 / 2.0);
        add_rows(sums, below[0], above[0]);
        stretch(odd_even, sums, 1.0 / 2.0);
        add_four_rows(sums, below, above);
        stretch(odd_odd, sums, 1.0 / 4.0);
    }
}

#[inline(always)]
fn add_rows(sums: &mut [f64], one: &[f64], other: &[f64]) {
    sums.iter_mut().zip(one).zip(other).for_each(|((sum, one), other)| *sum = one + other);
}

#[inline(always)]
fn add_four_rows(sums: &mut [f64], below: [&[f64]; 2], above: [&[f64]; 2]) {
    let len = sums.len();
    let ([a, b], [c, d]) = (below.map(|row| &row[..len]), above.map(|row| &row[..len]));
    for i in 0..len {
        sums[i] = (a[i] + b[i]) + (c[i] + d[i]);
    }
}

/// Adds to a fine row the points of a coarse one, and between them their means, all times `weight`.
#[inline(always)]
fn stretch(row: &mut [f64], coarse: &[f64], weight: f64) {
    let (pairs, _) = row.as_chunks_mut::<2>();
    let len = pairs.len();
    let (here, next) = (&coarse[..len], &coarse[1..=len]);
    for i in 0..len {
        pairs[i][0] += weight * here[i];
        pairs[i][1] += weight / 2.0 * (here[i] + next[i]);
    }
}

fn sum_of_squares(numbers: &[f64]) -> f64 {
    let (lanes, rest) = numbers.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for numbers in lanes {
        for lane in 0..LANES {
            sums[lane] += numbers[lane] * numbers[lane];
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|number| number * number).sum::<f64>()
}

/// The largest of the numbers seen, and their places.
#[derive(Clone, Copy)]
struct Largest {
    /// Numbers with their places, the largest first.
    found: [(f64, usize); CHARGES],
}

impl Largest {
    const fn new() -> Self {
        Self { found: [(f64::NEG_INFINITY, 0); CHARGES] }
    }

    #[inline]
    fn offer(&mut self, number: f64, place: usize) {
        if number > self.found[CHARGES - 1].0 {
            self.insert(number, place);
        }
    }

    #[cold]
    fn insert(&mut self, number: f64, place: usize) {
        let rank = self.found.partition_point(|(found, _)| *found >= number);
        self.found[rank..].rotate_right(1);
        self.found[rank] = (number, place);
    }

    /// The places as coordinates in a cube of `edge` points along an edge: the point in its row, the row, the
    /// plane.
    fn positions(self, edge: usize) -> [[usize; 3]; CHARGES] {
        self.found.map(|(_, place)| [place % edge, place / edge % edge, place / edge / edge])
    }
}

/// Places of the extremes of a random field.
#[derive(Clone, Copy)]
struct Extremes {
    largest: Largest,
    /// The numbers with the opposite sign: the smallest first.
    smallest: Largest,
}

impl Extremes {
    /// Finds the extremes of the NPB's random field of `edge`³ points, drawn row by row.
    fn of_field(platform: &dyn Platform, edge: usize) -> Self {
        let rows = ranges(edge * edge, platform.vcpus());
        let found = deal(platform, rows, |_, rows| Self::of_rows(edge, rows));
        let mut extremes = Self { largest: Largest::new(), smallest: Largest::new() };
        for part in found.into_iter().flatten() {
            part.largest.found.into_iter().for_each(|(number, place)| extremes.largest.offer(number, place));
            part.smallest.found.into_iter().for_each(|(number, place)| extremes.smallest.offer(number, place));
        }
        extremes
    }

    fn of_rows(edge: usize, rows: Range<usize>) -> Self {
        let mut extremes = Self { largest: Largest::new(), smallest: Largest::new() };
        let mut random = Random::new(SEED).skip((rows.start * edge) as u64);
        let mut numbers = [0.0; ROW_LEN_MAX];
        let numbers = &mut numbers[..edge];
        for row in rows {
            random.fill(numbers);
            for (i, number) in numbers.iter().enumerate() {
                extremes.largest.offer(*number, row * edge + i);
                extremes.smallest.offer(-number, row * edge + i);
            }
        }
        extremes
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::string::String;
    use std::{format, vec};

    use super::*;
    use crate::native;

    /// The places of the largest and of the smallest numbers, as text.
    fn positions(members: usize, edge: usize) -> [String; 2] {
        let extremes = native::run(members, 0, Box::new(|_| ()), |platform| Extremes::of_field(platform, edge));
        [extremes.largest, extremes.smallest]
            .map(|extreme| extreme.positions(edge).map(|[i, j, k]| format!("{i},{j},{k}")).join(" "))
    }

    #[test]
    fn the_charges_are_where_the_npb_has_them() {
        let class_s = [
            "7,1,20 19,29,31 2,0,3 4,22,3 1,16,21 21,31,6 12,15,12 30,4,25 28,0,28 17,26,17",
            "0,11,2 13,8,17 5,14,0 4,28,15 12,2,1 5,17,8 20,19,11 26,15,31 8,25,22 7,14,26",
        ];
        let class_w = [
            "113,85,50 127,45,32 14,110,118 34,21,100 29,17,109 27,48,11 80,90,20 26,84,73 39,32,1 115,86,20",
            "15,22,123 102,117,59 14,121,75 109,87,121 9,1,21 95,34,54 38,126,12 92,83,35 70,2,64 114,103,5",
        ];
        for members in [1, 3] {
            assert_eq!(positions(members, 32), class_s);
            assert_eq!(positions(members, 128), class_w);
        }
    }

    #[test]
    fn an_operator_gives_each_neighbour_its_weight() {
        const SMOOTHER: Weights = [5.0, 1.0, 2.0, 0.0];
        let shape = Shape::new(2);
        let mut grid = vec![0.0; shape.len()];
        grid[(2 * shape.edge + 2) * shape.edge + 2] = 1.0;
        let base = vec![7.0; shape.len()];
        let check = |operator: &dyn Fn(usize, &mut [f64]), begin: f64, [centre, face, edge, corner]: Weights| {
            let beside = [[edge, face, edge], [face, centre, face]];
            for (k, expected) in [(2, beside), (3, [[corner, edge, corner], [edge, face, edge]])] {
                let mut plane = vec![begin; shape.plane_len()];
                operator(k, &mut plane);
                let row = |j| [1, 2, 3].map(|i| plane[j * shape.edge + i]);
                assert_eq!([row(1), row(2)], expected.map(|row| row.map(|weight| 7.0 + weight)), "plane {k}");
            }
        };
        let set = Residual { u: &grid, v: Some(&base) };
        check(&|k, plane| set.compute(shape, k, plane), 0.0, MINUS_A);
        let add = Residual { u: &grid, v: None };
        check(&|k, plane| add.compute(shape, k, plane), 7.0, MINUS_A);
        let smoother = Smoother { r: &grid, weights: &SMOOTHER };
        check(&|k, plane| smoother.compute(shape, k, plane), 7.0, SMOOTHER);
    }

    #[test]
    fn wide_and_narrow_vectors_give_the_same_bits() {
        let shape = Shape::new(3);
        let mut grid = vec![0.0; shape.len()];
        Random::new(SEED).fill(&mut grid);
        let operator = Smoother { r: &grid, weights: &SMOOTHER_A };
        let begin = || vec![1.0; shape.plane_len() * shape.inner()];
        let (mut widest, mut narrow) = (begin(), begin());
        let planes = |planes| Planes { operator: &operator, shape, planes, range: 0..shape.inner() };
        vectors::run(planes(&mut widest));
        planes(&mut narrow).run::<{ vectors::NARROW }>();
        assert_eq!(widest, narrow);
        assert_ne!(widest, begin());
    }

    #[test]
    fn interpolation_is_exact_for_a_linear_field() {
        let (fine, coarse) = (Shape::new(2), Shape::new(1));
        let at = |shape: Shape, scale: f64| {
            move |place: usize| {
                let (i, j, k) = (place % shape.edge, place / shape.edge % shape.edge, place / shape.edge / shape.edge);
                scale * (1.0 + i as f64 + 10.0 * j as f64 + 100.0 * k as f64) - scale
            }
        };
        let grid: vec::Vec<_> = (0..coarse.len()).map(at(coarse, 2.0)).collect();
        let mut planes = vec![0.0; 2 * fine.plane_len()];
        interpolate_planes(fine, &mut planes, coarse, &grid, 0);
        let expected: vec::Vec<_> = (0..planes.len()).map(at(fine, 1.0)).collect();
        assert_eq!(planes, expected);
    }

    #[test]
    fn restriction_keeps_a_constant_times_four() {
        let (fine, coarse) = (Shape::new(2), Shape::new(1));
        let grid = vec![1.0; fine.len()];
        let mut plane = vec![0.0; coarse.plane_len()];
        Restriction { fine, r: &grid }.compute(coarse, 1, &mut plane);
        coarse.close_plane(&mut plane);
        assert_eq!(plane, [4.0; 16]);
    }

    #[test]
    fn ghosts_repeat_the_other_side() {
        let shape = Shape::new(1);
        let mut row = [0.0, 1.0, 2.0, 0.0];
        shape.close_row(&mut row);
        assert_eq!(row, [2.0, 1.0, 2.0, 1.0]);
        let mut plane: [f64; 16] = array::from_fn(|place| (place / 4) as f64);
        shape.close_plane(&mut plane);
        assert_eq!([plane[0], plane[15]], [2.0, 1.0]);
    }

    #[test]
    fn a_wrong_norm_is_found() {
        let mut words = vec![0; 1 << 19];
        let arena = Arena::from_words(&mut words);
        let wrong = Problem { norm: 0.530_770_71e-4, ..problem(Class::S) };
        let end = native::run(1, 0, Box::new(|_| ()), |platform| solve(platform, &arena, wrong));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 1 })), "{end:?}");
    }
}
