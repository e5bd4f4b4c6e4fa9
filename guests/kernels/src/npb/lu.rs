//! LU: the flow of [`flow`] by symmetric successive over-relaxation, two sweeps through all points a step.
//!
//! ```text
//!   rsd = L(u) − forcing
//!   up      v = D⁻¹·(dt·rsd − ω·(A·v(z−1) + B·v(y−1) + C·v(x−1)))      x, y, z rising
//!   down    v −= D⁻¹·ω·(A·v(z+1) + B·v(y+1) + C·v(x+1))                x, y, z falling
//!   u += v / (ω·(2 − ω))
//! ```
//!
//! A, B, C and D are 5×5 blocks, different at each point. Only their products with a vector are needed. The
//! Jacobians have closed forms, so a product with A, B or C is computed from the flow without the 25 numbers. D has
//! only the viscous parts, which makes it lower triangular: its elimination is a forward substitution. So no work
//! arrays of blocks are needed beside the fields.
//!
//! A sweep needs three neighbours that it has passed before. Several vCPUs go through it as a
//! [`wavefront`](crate::wavefront).

use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::flow::{
    self, C1, C2, C3C4, C1345, COMPONENTS, DIFFUSION, ERROR_NAMES, Factors, Grid, OWN_AXIS, Point, RESIDUAL_NAMES,
};
use super::order::Order;
#[cfg(feature = "std")]
use super::reference;
use crate::arena::{Layout, Place, Typed};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges};
use crate::report::{self, COMPUTE, Compared, INIT, VERIFY};
use crate::wavefront::{Direction, Front, Wavefront};
use crate::{Arena, KernelError, Platform};

/// LU in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.lu"),
    summary: "NPB LU: relaxation of a flow, sweeps that need three neighbours",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER, Order::PARAMETER];

/// Factor of over-relaxation, ω.
pub(super) const OMEGA: f64 = 1.2;
/// Largest relative error that the NPB passes.
const TOLERANCE: f64 = 1e-8;
/// Number of checks: norms of the residual and of the error, and the surface integral.
const CHECKS: u64 = 2 * COMPONENTS as u64 + 1;
/// A velocity's viscosity, along all three axes together.
const OWN_AXES: f64 = OWN_AXIS + 2.0;
/// A component's diffusion, along all three axes together.
const DIFFUSIONS: f64 = DIFFUSION[0] + DIFFUSION[1] + DIFFUSION[2];

/// Sizes and reference values of a class.
#[derive(Clone, Copy)]
struct Problem {
    grid: Grid,
    steps: u32,
    dt: f64,
    residual: Point,
    error: Point,
    integral: f64,
}

const fn problem(class: Class) -> Problem {
    match class {
        Class::S => Problem {
            grid: Grid { edge: 12 },
            steps: 50,
            dt: 0.5,
            residual: [
                0.016_196_343_210_976_703,
                0.002_197_674_516_482_132,
                0.001_517_992_765_339_918_5,
                0.001_502_958_443_599_432_3,
                0.034_264_073_155_896_46,
            ],
            error: [
                0.000_642_233_199_579_609_2,
                8.414_434_204_734_792e-5,
                5.858_826_961_648_518_7e-5,
                5.847_422_259_515_735e-5,
                0.001_310_334_791_411_129_4,
            ],
            integral: 7.841_892_886_593_708,
        },
        Class::W => Problem {
            grid: Grid { edge: 33 },
            steps: 300,
            dt: 0.0015,
            residual: [12.365_116_381_92, 1.317_228_477_799, 2.550_120_713_095, 2.326_187_750_252, 28.267_994_441_89],
            error: [
                0.486_787_714_421_6,
                0.050_646_528_809_82,
                0.092_818_181_019_6,
                0.085_701_265_427_33,
                1.084_277_417_792,
            ],
            integral: 11.613_993_110_23,
        },
        Class::A => Problem {
            grid: Grid { edge: 64 },
            steps: 250,
            dt: 2.0,
            residual: [
                779.021_076_066_893_7,
                63.402_765_259_692_87,
                194.992_497_272_924_8,
                178.453_011_604_185_38,
                1_838.476_034_946_424_8,
            ],
            error: [
                29.964_085_685_471_943,
                2.819_457_636_500_335,
                7.347_341_269_877_474,
                6.713_922_568_777_705,
                70.715_315_688_392_58,
            ],
            integral: 26.030_925_604_886_278,
        },
        Class::B => Problem {
            grid: Grid { edge: 102 },
            steps: 250,
            dt: 2.0,
            residual: [
                3_553.267_296_998_273_7,
                262.147_507_953_106_9,
                883.337_218_509_521_9,
                778.127_747_394_252_7,
                7_308.796_959_254_531,
            ],
            error: [
                114.011_763_802_127_09,
                8.109_896_365_542_157,
                28.480_597_317_698_308,
                25.905_394_567_832_94,
                260.549_075_048_574_14,
            ],
            integral: 47.887_162_703_308_23,
        },
        Class::C => Problem {
            grid: Grid { edge: 162 },
            steps: 250,
            dt: 2.0,
            residual: [
                10_376.698_032_353_785,
                892.212_458_801_008_6,
                2_562.388_145_826_608_7,
                2_191.943_438_578_314_3,
                17_807.805_726_106_12,
            ],
            error: [
                215.986_399_716_949_28,
                15.578_955_923_986_36,
                54.131_886_307_720_78,
                48.226_264_315_404_54,
                455.902_910_043_250_36,
            ],
            integral: 66.640_455_357_218_13,
        },
    }
}

impl Problem {
    /// Operations of a run, by the NPB's formula.
    fn operations(&self) -> f64 {
        let n = self.grid.edge as f64;
        f64::from(self.steps) * (1984.77 * n * n * n - 10923.3 * n * n + 27770.9 * n - 144_010.0)
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let (problem, order) = (problem(Class::from_parameters(parameters)?), Order::from_parameters(parameters)?);
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &problem.grid, order, vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let (problem, order) = (problem(class), Order::from_parameters(parameters)?);
    report::problem(platform, class, &[problem.grid.edge; 3], problem.steps);
    solve(platform, arena, problem, order)
}

fn solve<'a>(
    platform: &dyn Platform,
    arena: &Arena<'_>,
    problem: Problem,
    order: Order,
) -> Result<(), KernelError<'a>> {
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &problem.grid, order, platform.vcpus());
    let mut typed = report::claim(platform, arena, &layout, Name::literal("fields"))?;
    let (mut fields, _) = report::phase(platform, INIT, || {
        let mut fields = places.take(&mut typed, platform, &problem);
        fields.set_forcing();
        fields.restart();
        fields.step();
        fields.restart();
        fields
    });
    let (residual, ticks) = report::phase(platform, COMPUTE, || {
        report::steps(platform, problem.steps).for_each(|_| fields.step());
        flow::interior_norm(platform, &fields.grid, fields.rsd)
    });
    report::rate(platform, problem.operations(), ticks);
    let (wrong, _) = report::phase(platform, VERIFY, || verify(platform, &problem, &fields, residual));
    report::verdict(platform, wrong, CHECKS)
}

/// Compares the results with the published ones. Returns the number of wrong ones.
fn verify(platform: &dyn Platform, problem: &Problem, fields: &Fields<'_, '_>, residual: Point) -> u64 {
    let grid = &fields.grid;
    let error = flow::error_norm(platform, grid, fields.u, grid.interior());
    let integral = Compared {
        name: Name::literal("integral"),
        reference_name: Name::literal("integral_reference"),
        value: surface_integral(grid, fields.u),
        reference: problem.integral,
        tolerance: TOLERANCE,
    };
    integral.emit(platform);
    flow::compare(platform, &RESIDUAL_NAMES, residual, problem.residual)
        + flow::compare(platform, &ERROR_NAMES, error, problem.error)
        + u64::from(!integral.is_right())
}

/// Integral of the pressure over the faces of a box, by the trapezoidal rule (xci): a quarter of the sum over all
/// squares of the values at their corners.
fn surface_integral(grid: &Grid, u: &[Point]) -> f64 {
    let last = grid.edge - 1;
    // The NPB's box differs slightly between the three axes.
    let sides = [1..last, 1..last - 1, 2..last];
    let pressure = |point| {
        let u = &u[grid.place(point)];
        C2 * (u[4] - flow::kinetic_energy(u))
    };
    let faces = (0..3).flat_map(|axis| [(axis, sides[axis].start), (axis, sides[axis].end - 1)]);
    let sum: f64 = faces.map(|(axis, at)| sum_over_face(&sides, axis, at, pressure)).sum();
    let spacing = grid.position(1);
    sum * spacing * spacing / 4.0
}

/// Sum over the squares of a face across `axis` of the values at their corners: an inner point is a corner of four
/// of them.
fn sum_over_face(sides: &[Range<usize>; 3], axis: usize, at: usize, value: impl Fn([usize; 3]) -> f64) -> f64 {
    let [one, other] = [[1, 2], [0, 2], [0, 1]][axis];
    let squares = |side: &Range<usize>, index| if index == side.start || index + 1 == side.end { 1.0 } else { 2.0 };
    let points = sides[one].clone().flat_map(|i| sides[other].clone().map(move |j| (i, j)));
    let at_point = |(i, j)| {
        let mut point = [at; 3];
        (point[one], point[other]) = (i, j);
        squares(&sides[one], i) * squares(&sides[other], j) * value(point)
    };
    points.map(at_point).sum()
}

/// Places of the slices in the arena.
struct Places {
    order: Order,
    points: [Place<f64>; 3],
    scalars: [Place<f64>; 2],
    work: Place<f64>,
}

impl Places {
    #[cfg_attr(
        not(feature = "std"),
        expect(unused_variables, reason = "only the reference's order needs memory per vCPU")
    )]
    fn new(layout: &mut Layout, grid: &Grid, order: Order, vcpus: usize) -> Self {
        let (place, work): (fn(&mut Layout, u64) -> Place<f64>, _) = match order {
            Order::Fused => (Layout::place, 0),
            // As in the NPB's common blocks: no gaps.
            #[cfg(feature = "std")]
            Order::Reference => (Layout::place_behind, reference::lu::work(grid, vcpus)),
        };
        Self {
            order,
            points: [(); 3].map(|()| place(layout, grid.numbers())),
            scalars: [(); 2].map(|()| place(layout, grid.places() as u64)),
            work: place(layout, work as u64),
        }
    }

    fn take<'p, 'm>(self, typed: &mut Typed<'m>, platform: &'p dyn Platform, problem: &Problem) -> Fields<'p, 'm> {
        let [u, rsd, forcing] = self.points.map(|place| typed.take(place).as_chunks_mut().0);
        let [kinetic, rho_i] = self.scalars.map(|place| typed.take(place));
        let (order, work) = (self.order, typed.take(self.work));
        Fields { order, platform, grid: problem.grid, dt: problem.dt, u, rsd, forcing, kinetic, rho_i, work }
    }
}

/// The fields, named as in the NPB.
pub(super) struct Fields<'p, 'm> {
    order: Order,
    pub(super) platform: &'p dyn Platform,
    pub(super) grid: Grid,
    pub(super) dt: f64,
    /// State of the flow.
    pub(super) u: &'m mut [Point],
    /// Residual of the equations, and during a step its change of `u`. 0 on the faces.
    pub(super) rsd: &'m mut [Point],
    /// Operator L of the known solution. 0 on the faces.
    pub(super) forcing: &'m mut [Point],
    /// Kinetic energy at each point.
    pub(super) kinetic: &'m mut [f64],
    /// Reciprocal of the density, 1/ρ.
    pub(super) rho_i: &'m mut [f64],
    /// Extra memory for the reference's order.
    #[cfg_attr(not(feature = "std"), expect(dead_code, reason = "the reference's order needs std"))]
    pub(super) work: &'m mut [f64],
}

impl Fields<'_, '_> {
    fn set_forcing(&mut self) {
        let grid = self.grid;
        flow::fill(self.platform, &grid, self.forcing, |point| {
            if grid.is_interior(point) { flow::operator_on_solution(&grid, point) } else { [0.0; COMPONENTS] }
        });
    }

    /// Sets the field before the first step, and its residual.
    fn restart(&mut self) {
        let grid = self.grid;
        flow::fill(self.platform, &grid, self.u, |point| flow::first_guess(&grid, point));
        self.derive();
        self.set_residual();
    }

    fn step(&mut self) {
        match self.order {
            Order::Fused => self.fused_step(),
            #[cfg(feature = "std")]
            Order::Reference => reference::lu::step(self),
        }
    }

    fn fused_step(&mut self) {
        self.sweep(Direction::Rising);
        self.sweep(Direction::Falling);
        self.advance();
        self.derive();
        self.set_residual();
    }

    /// Computes the quantities that follow from `u` at each point.
    pub(super) fn derive(&mut self) {
        let (grid, members, u) = (self.grid, self.platform.vcpus(), &*self.u);
        let planes = || ranges(grid.edge, members);
        let lengths = || planes().map(|planes| planes.len() * grid.plane());
        let parts = cut(self.kinetic, lengths()).zip(cut(self.rho_i, lengths())).zip(planes());
        deal(self.platform, parts, |_, ((kinetic, rho_i), planes)| {
            let u = &u[planes.start * grid.plane()..planes.end * grid.plane()];
            for (z, y) in (0..planes.len()).flat_map(|z| (0..grid.edge).map(move |y| (z, y))) {
                let start = grid.place([0, y, z]);
                let row = start..start + grid.edge;
                derive_row(&u[row.clone()], &mut kinetic[row.clone()], &mut rho_i[row]);
            }
        });
    }

    /// Computes rsd = L(u) − forcing.
    fn set_residual(&mut self) {
        let (grid, members) = (self.grid, self.platform.vcpus());
        let flow = Flow { grid, u: self.u, kinetic: self.kinetic, rho_i: self.rho_i };
        let (forcing, factors) = (&*self.forcing, grid.factors());
        let parts = grid.deal_planes(self.rsd, members).zip(grid.dealt(members));
        deal(self.platform, parts, |_, (part, planes)| {
            for (plane, z) in part.chunks_exact_mut(grid.plane()).zip(planes) {
                for y in grid.interior() {
                    let row = &mut plane[y * grid.row() + 1..][..grid.edge - 2];
                    let start = grid.place([1, y, z]);
                    flow.set_residual_row(&factors, y, z, &forcing[start..start + row.len()], row);
                }
            }
        });
    }

    /// Runs one of the two sweeps of a step.
    fn sweep(&mut self, direction: Direction) {
        let grid = self.grid;
        let flow = Flow { grid, u: self.u, kinetic: self.kinetic, rho_i: self.rho_i };
        let relaxation = Relaxation::new(&grid, self.dt, direction);
        let wavefront =
            Wavefront { edge: grid.edge, row_len: grid.row(), plane_len: grid.plane(), members: self.platform.vcpus() };
        for step in 0..wavefront.steps() {
            deal(self.platform, wavefront.fronts(self.rsd, direction, step), |_, front| {
                if let Some(front) = front {
                    relaxation.sweep(&flow, front, direction);
                }
            });
        }
    }

    /// Computes u += rsd / (ω·(2 − ω)) in the interior; on the faces `rsd` is 0.
    pub(super) fn advance(&mut self) {
        const SCALE: f64 = 1.0 / (OMEGA * (2.0 - OMEGA));
        let (grid, members, rsd) = (self.grid, self.platform.vcpus(), &*self.rsd);
        let parts = grid.deal_planes(self.u, members).zip(grid.dealt(members));
        deal(self.platform, parts, |_, (part, planes)| {
            let change = &rsd[planes.start * grid.plane()..planes.end * grid.plane()];
            let numbers = part.as_flattened_mut().iter_mut().zip(change.as_flattened());
            numbers.for_each(|(u, change)| *u += SCALE * change);
        });
    }
}

fn derive_row(u: &[Point], kinetic: &mut [f64], rho_i: &mut [f64]) {
    for ((u, kinetic), rho_i) in u.iter().zip(kinetic).zip(rho_i) {
        *rho_i = 1.0 / u[0];
        *kinetic = 0.5 * (u[1] * u[1] + u[2] * u[2] + u[3] * u[3]) * *rho_i;
    }
}

/// The flow, for reading.
#[derive(Clone, Copy)]
pub(super) struct Flow<'a> {
    pub(super) grid: Grid,
    pub(super) u: &'a [Point],
    pub(super) kinetic: &'a [f64],
    pub(super) rho_i: &'a [f64],
}

/// A run of consecutive points.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    pub(super) u: &'a [Point],
    pub(super) kinetic: &'a [f64],
    pub(super) rho_i: &'a [f64],
}

impl Line<'_> {
    #[inline(always)]
    pub(super) fn state(&self, x: usize) -> State {
        let (u, kinetic, rho_i) = (&self.u[x], self.kinetic[x], self.rho_i[x]);
        State {
            rho_i,
            velocity: [u[1] * rho_i, u[2] * rho_i, u[3] * rho_i],
            kinetic: kinetic * rho_i,
            energy: u[4] * rho_i,
        }
    }
}

/// State of the flow at a point, per mass.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) rho_i: f64,
    pub(super) velocity: [f64; 3],
    pub(super) kinetic: f64,
    pub(super) energy: f64,
}

impl<'a> Flow<'a> {
    pub(super) fn line(&self, start: usize, count: usize) -> Line<'a> {
        let range = start..start + count;
        Line { u: &self.u[range.clone()], kinetic: &self.kinetic[range.clone()], rho_i: &self.rho_i[range] }
    }

    /// Sets the interior of a row to L(u) − forcing.
    fn set_residual_row(&self, factors: &Factors, y: usize, z: usize, forcing: &[Point], row: &mut [Point]) {
        let edge = self.grid.edge;
        // Next to a face the weights along x differ.
        for run in [1..2, 2..3, 3..edge - 3, edge - 3..edge - 2, edge - 2..edge - 1] {
            let part = run.start - 1..run.end - 1;
            self.set_linear(factors, [run.start, y, z], &forcing[part.clone()], &mut row[part]);
        }
        let start = self.grid.place([1, y, z]);
        self.add_flux::<0>(factors, start, row);
        self.add_flux::<1>(factors, start, row);
        self.add_flux::<2>(factors, start, row);
    }

    /// Sets points with equal weights to diffusion and damping minus the forcing. The linear part is the same for
    /// all components, so the points are treated as plain numbers.
    fn set_linear(&self, factors: &Factors, point: [usize; 3], forcing: &[Point], part: &mut [Point]) {
        let start = self.grid.place(point);
        let (forcing, numbers) = (forcing.as_flattened(), part.as_flattened_mut());
        let count = numbers.len();
        let (mut centre, mut weights, mut around) = (0.0, [[0.0; 4]; 3], [[&[][..]; 4]; 3]);
        for axis in 0..3 {
            let stride = self.grid.stride(axis);
            let [two_before, before, here, behind, two_behind] = factors.linear_weights(&self.grid, axis, point[axis]);
            centre += here;
            weights[axis] = [two_before, before, behind, two_behind];
            for (n, strides) in [0, 1, 3, 4].into_iter().enumerate() {
                // A missing neighbour has weight 0, and the point itself stands for it.
                let strides = if weights[axis][n] == 0.0 { 2 } else { strides };
                around[axis][n] = &self.u[start + strides * stride - 2 * stride..].as_flattened()[..count];
            }
        }
        let (here, forcing) = (&self.u[start..].as_flattened()[..count], &forcing[..count]);
        for n in 0..count {
            let mut sum = centre * here[n] - forcing[n];
            for axis in 0..3 {
                let (weights, around) = (&weights[axis], &around[axis]);
                sum += weights[0] * around[0][n] + weights[1] * around[1][n];
                sum += weights[2] * around[2][n] + weights[3] * around[3][n];
            }
            numbers[n] = sum;
        }
    }

    /// Adds the nonlinear differences along an axis to the points from `start` on.
    fn add_flux<const AXIS: usize>(&self, factors: &Factors, start: usize, row: &mut [Point]) {
        let (stride, count) = (self.grid.stride(AXIS), row.len());
        let [before, here, behind] = [start - stride, start, start + stride].map(|start| self.line(start, count));
        let mut viscosity = [factors.velocity; 3];
        viscosity[AXIS] *= OWN_AXIS;
        for (x, sum) in row.iter_mut().enumerate() {
            let (a, b, c) = (before.state(x), here.state(x), behind.state(x));
            let (inflow, outflow) = (flux::<AXIS>(&before, x, &a), flux::<AXIS>(&behind, x, &c));
            for m in 0..COMPONENTS {
                sum[m] -= factors.first * (outflow[m] - inflow[m]);
            }
            for axis in 0..3 {
                sum[axis + 1] +=
                    viscosity[axis] * second_difference(a.velocity[axis], b.velocity[axis], c.velocity[axis]);
            }
            let squared = |state: &State| state.velocity[AXIS] * state.velocity[AXIS];
            sum[4] += factors.kinetic * second_difference(a.kinetic, b.kinetic, c.kinetic)
                + factors.squared * second_difference(squared(&a), squared(&b), squared(&c))
                + factors.energy * second_difference(a.energy, b.energy, c.energy);
        }
    }
}

/// Flux along an axis.
#[inline(always)]
pub(super) fn flux<const AXIS: usize>(line: &Line<'_>, x: usize, state: &State) -> Point {
    let (u, own) = (&line.u[x], state.velocity[AXIS]);
    let pressure = C2 * (u[4] - line.kinetic[x]);
    let mut flux = [u[AXIS + 1], u[1] * own, u[2] * own, u[3] * own, (u[4] + pressure) * own];
    flux[AXIS + 1] += pressure;
    flux
}

#[inline(always)]
fn second_difference(before: f64, here: f64, behind: f64) -> f64 {
    behind - 2.0 * here + before
}

/// A point from its components. Unlike `array::from_fn` it is inlined at each use.
#[inline(always)]
fn point(component: impl Fn(usize) -> f64) -> Point {
    [component(0), component(1), component(2), component(3), component(4)]
}

/// Factors common to the sweeps, with ω and dt multiplied in.
#[derive(Clone, Copy)]
struct Relaxation {
    dt: f64,
    /// Factor of the flux Jacobians in A, B and C.
    first: f64,
    /// Factor of the viscous Jacobians in A, B and C, with the opposite sign in the sweep down.
    second: f64,
    /// Factor of the viscous Jacobians in D.
    diagonal: f64,
}

impl Relaxation {
    fn new(grid: &Grid, dt: f64, direction: Direction) -> Self {
        let factors = grid.factors();
        let sign = if direction == Direction::Rising { 1.0 } else { -1.0 };
        Self {
            dt,
            first: OMEGA * dt * factors.first,
            second: sign * OMEGA * dt * factors.second,
            diagonal: 2.0 * dt * factors.second,
        }
    }

    /// Work of one member in a step of a sweep: its rows in order.
    fn sweep(&self, flow: &Flow<'_>, front: Front<'_, Point>, direction: Direction) {
        let Front { plane, rows, own, mut beside, behind } = front;
        let row_len = flow.grid.row();
        let own_rows = rows.zip(own.chunks_exact_mut(row_len)).zip(behind.chunks_exact(row_len));
        match direction {
            Direction::Rising => own_rows.for_each(|((y, row), behind)| {
                self.sweep_up(&Lines::new(flow, y, plane, direction), row, beside, behind);
                beside = row;
            }),
            Direction::Falling => own_rows.rev().for_each(|((y, row), behind)| {
                self.sweep_down(&Lines::new(flow, y, plane, direction), row, beside, behind);
                beside = row;
            }),
        }
    }

    /// Computes v = D⁻¹·(dt·rsd + the neighbours' contributions) for one row, x rising.
    fn sweep_up(&self, flow: &Lines<'_>, row: &mut [Point], beside: &[Point], behind: &[Point]) {
        let edge = flow.own.u.len();
        let (row, beside, behind) = (&mut row[..edge], &beside[..edge], &behind[..edge]);
        let mut from_x = [0.0; COMPONENTS];
        for x in 1..edge - 1 {
            let from_y = self.product::<1>(&flow.beside.state(x), &beside[x]);
            let from_z = self.product::<2>(&flow.behind.state(x), &behind[x]);
            let state = flow.own.state(x);
            let right = point(|m| self.dt * row[x][m] + (from_y[m] + from_z[m]) + from_x[m]);
            row[x] = self.solve(&state, &right);
            from_x = self.product::<0>(&state, &row[x]);
        }
    }

    /// Computes v −= D⁻¹·(the neighbours' contributions) for one row, x falling.
    fn sweep_down(&self, flow: &Lines<'_>, row: &mut [Point], beside: &[Point], behind: &[Point]) {
        let edge = flow.own.u.len();
        let (row, beside, behind) = (&mut row[..edge], &beside[..edge], &behind[..edge]);
        let mut from_x = [0.0; COMPONENTS];
        for x in (1..edge - 1).rev() {
            let from_y = self.product::<1>(&flow.beside.state(x), &beside[x]);
            let from_z = self.product::<2>(&flow.behind.state(x), &behind[x]);
            let state = flow.own.state(x);
            let change = self.solve(&state, &point(|m| (from_y[m] + from_z[m]) + from_x[m]));
            row[x] = point(|m| row[x][m] - change[m]);
            from_x = self.product::<0>(&state, &row[x]);
        }
    }

    /// Computes (first·F + second·(N + diffusion))·v along an axis: F and N are the Jacobians of the flux and of
    /// the viscous terms. Both depend on v's change of velocity and of energy per mass (times the density); F also
    /// on its change of the pressure.
    #[inline(always)]
    fn product<const AXIS: usize>(&self, state: &State, v: &Point) -> Point {
        let State { rho_i, velocity, kinetic, energy } = *state;
        let change = [v[1] - velocity[0] * v[0], v[2] - velocity[1] * v[0], v[3] - velocity[2] * v[0]];
        let energy_change = v[4] - energy * v[0];
        let work = velocity[0] * change[0] + velocity[1] * change[1] + velocity[2] * change[2];
        let pressure = C2 * (v[4] - kinetic * v[0] - work);

        let diffusion = self.second * DIFFUSION[AXIS];
        let carried = self.first * velocity[AXIS] + diffusion;
        let own = self.first * change[AXIS];
        let viscous = self.second * C3C4 * rho_i;
        let mut product = [0.0; COMPONENTS];
        product[0] = self.first * v[AXIS + 1] + diffusion * v[0];
        for axis in 0..3 {
            product[axis + 1] = carried * v[axis + 1] + velocity[axis] * own + viscous * change[axis];
        }
        product[AXIS + 1] += self.first * pressure + (OWN_AXIS - 1.0) * viscous * change[AXIS];
        let heating = (1.0 - C1345 / C3C4) * work
            + (OWN_AXIS - 1.0) * velocity[AXIS] * change[AXIS]
            + C1345 / C3C4 * energy_change;
        product[4] = carried * v[4]
            + self.first * velocity[AXIS] * pressure
            + (C1 * energy - C2 * kinetic) * own
            + viscous * heating;
        product
    }

    /// Computes D⁻¹·right, from the first component to the last.
    #[inline(always)]
    fn solve(&self, state: &State, right: &Point) -> Point {
        let State { rho_i, velocity, energy, .. } = *state;
        let density = 1.0 + self.diagonal * DIFFUSIONS;
        let momentum = self.diagonal * OWN_AXES * C3C4 * rho_i;
        let heat = self.diagonal * 3.0 * C1345 * rho_i;

        let v0 = right[0] * (1.0 / density);
        let momentum_inverse = 1.0 / (density + momentum);
        let momentum_at = |axis: usize| (right[axis + 1] + momentum * velocity[axis] * v0) * momentum_inverse;
        let (v1, v2, v3) = (momentum_at(0), momentum_at(1), momentum_at(2));
        let work = velocity[0] * (v1 - velocity[0] * v0)
            + velocity[1] * (v2 - velocity[1] * v0)
            + velocity[2] * (v3 - velocity[2] * v0);
        let v4 = (right[4] - (momentum - heat) * work + heat * energy * v0) * (1.0 / (density + heat));
        [v0, v1, v2, v3, v4]
    }
}

/// The flow along a row, and along the two rows that a sweep has passed before.
struct Lines<'a> {
    own: Line<'a>,
    beside: Line<'a>,
    behind: Line<'a>,
}

impl<'a> Lines<'a> {
    fn new(flow: &Flow<'a>, y: usize, z: usize, direction: Direction) -> Self {
        let before = |index: usize| match direction {
            Direction::Rising => index - 1,
            Direction::Falling => index + 1,
        };
        let line = |y, z| flow.line(flow.grid.place([0, y, z]), flow.grid.edge);
        Self { own: line(y, z), beside: line(before(y), z), behind: line(y, before(z)) }
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    #[test]
    fn the_integral_of_a_constant_is_the_surface_of_the_box() {
        let grid = Grid { edge: 11 };
        let u = vec![[1.0, 0.0, 0.0, 0.0, 1.0 / C2]; grid.places()];
        // There are 8, 7 and 7 spacings of 0.1 along x, y and z.
        let surface = 2.0 * (0.8 * 0.7 + 0.8 * 0.7 + 0.7 * 0.7);
        let integral = surface_integral(&grid, &u);
        assert!((integral - surface).abs() < 1e-12, "{integral}");
    }

    /// A flow that differs at every point.
    fn some_flow(place: usize) -> Point {
        let wave = |m: usize| libm::sin((place * (2 * m + 3)) as f64);
        [2.0 + 0.1 * wave(0), wave(1), wave(2), wave(3), 5.0 + wave(4)]
    }

    #[test]
    fn the_residual_is_the_operator_less_the_forcing_everywhere_inside() {
        let grid = Grid { edge: 9 };
        let u: vec::Vec<_> = (0..grid.places()).map(some_flow).collect();
        let (mut kinetic, mut rho_i) = (vec![0.0; u.len()], vec![0.0; u.len()]);
        derive_row(&u, &mut kinetic, &mut rho_i);
        let flow = Flow { grid, u: &u, kinetic: &kinetic, rho_i: &rho_i };
        let forcing: Point = [1.0, 2.0, 3.0, 4.0, 5.0];
        for (y, z) in grid.interior().flat_map(|y| grid.interior().map(move |z| (y, z))) {
            let mut row = [[0.0; COMPONENTS]; 7];
            flow.set_residual_row(&grid.factors(), y, z, &[forcing; 7], &mut row);
            for (found, x) in row.iter().zip(grid.interior()) {
                let expected = flow::operator(&grid, [x, y, z], |offsets| {
                    // Points outside have no weight.
                    let index = |point: usize, offset: f64| (point as f64 + offset).clamp(0.0, 8.0) as usize;
                    u[grid.place([index(x, offsets[0]), index(y, offsets[1]), index(z, offsets[2])])]
                });
                for m in 0..COMPONENTS {
                    let difference = found[m] + forcing[m] - expected[m];
                    assert!(difference.abs() < 1e-10 * (1.0 + expected[m].abs()), "{m} at {x} {y} {z}: {difference}");
                }
            }
        }
    }

    #[test]
    fn solving_undoes_the_viscous_products_along_all_axes() {
        let u = [some_flow(7)];
        let (mut kinetic, mut rho_i) = ([0.0], [0.0]);
        derive_row(&u, &mut kinetic, &mut rho_i);
        let state = Line { u: &u, kinetic: &kinetic, rho_i: &rho_i }.state(0);
        let relaxation = Relaxation { dt: 1.0, first: 0.0, second: 0.7, diagonal: 0.7 };
        let v = some_flow(11);
        let along = [
            relaxation.product::<0>(&state, &v),
            relaxation.product::<1>(&state, &v),
            relaxation.product::<2>(&state, &v),
        ];
        let found = relaxation.solve(&state, &point(|m| v[m] + along[0][m] + along[1][m] + along[2][m]));
        assert!(found.iter().zip(v).all(|(found, v)| (found - v).abs() < 1e-12), "{found:?} is not {v:?}");
    }

    #[test]
    fn products_are_derivatives_of_the_flux() {
        let relaxation = Relaxation { dt: 1.0, first: 1.0, second: 0.0, diagonal: 0.0 };
        let (u, v) = (some_flow(7), some_flow(11));
        let along_y = |u: Point| {
            let (mut kinetic, mut rho_i) = ([0.0], [0.0]);
            derive_row(&[u], &mut kinetic, &mut rho_i);
            let line = Line { u: &[u], kinetic: &kinetic, rho_i: &rho_i };
            (flux::<1>(&line, 0, &line.state(0)), line.state(0))
        };
        const STEP: f64 = 1e-5;
        let (before, behind) = (along_y(point(|m| u[m] - STEP * v[m])).0, along_y(point(|m| u[m] + STEP * v[m])).0);
        let product = relaxation.product::<1>(&along_y(u).1, &v);
        for m in 0..COMPONENTS {
            let slope = (behind[m] - before[m]) / (2.0 * STEP);
            assert!((product[m] - slope).abs() < 1e-7, "component {m}: {} is not {slope}", product[m]);
        }
    }

    #[test]
    fn a_step_gives_the_same_numbers_for_any_number_of_vcpus() {
        let after_a_step = |order, members: usize| {
            let mut words = vec![0; 1 << 17];
            let arena = Arena::from_words(&mut words);
            let problem = problem(Class::S);
            let mut layout = Layout::at(arena.address());
            let places = Places::new(&mut layout, &problem.grid, order, members);
            let mut typed = arena.typed(&layout).expect("class S takes less than a MiB");
            native::run(members, 0, Box::new(|_| ()), |platform| {
                let mut fields = places.take(&mut typed, platform, &problem);
                fields.set_forcing();
                fields.restart();
                fields.step();
                (fields.u.to_vec(), fields.rsd.to_vec())
            })
        };
        for order in [Order::Fused, Order::Reference] {
            let alone = after_a_step(order, 1);
            assert!([2, 3, 11].into_iter().all(|members| after_a_step(order, members) == alone), "{order:?}");
        }
    }

    #[test]
    fn a_wrong_reference_is_found() {
        let mut words = vec![0; 1 << 19];
        let arena = Arena::from_words(&mut words);
        let mut wrong = problem(Class::S);
        wrong.residual[3] *= 1.0 + 3e-8;
        wrong.integral *= 1.0 - 3e-8;
        let end = native::run(1, 0, Box::new(|_| ()), |platform| solve(platform, &arena, wrong, Order::Fused));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 2, checked: CHECKS })), "{end:?}");
    }
}
