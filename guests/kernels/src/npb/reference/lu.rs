//! LU in the order of the serial NPB 3.3: the blocks of a plane are written out before the plane is relaxed, and
//! the residual is computed line by line, axis after axis.
//!
//! ```text
//!   rsd · dt ─▶ up ─▶ down, both for each plane: u, qs, rho_i ─▶ a b c d, then
//!     up      rsd −= ω·a·rsd(z−1) ─▶ rsd = d⁻¹·(rsd − ω·(b·rsd(y−1) + c·rsd(x−1)))
//!     down    tv = ω·a·rsd(z+1)   ─▶ rsd −= d⁻¹·(tv + ω·(b·rsd(y+1) + c·rsd(x+1)))
//!   u += … ─▶ rsd = −forcing ─▶ along x, y, z: a line's u ─▶ its fluxes ─▶ rsd
//! ```
//!
//! The blocks are four arrays of 25 numbers for each point of a plane: together larger than a plane of all fields.
//! vCPU 0 alone does the two sweeps: the serial program has no wavefront.

use core::ops::Range;
use core::{array, slice};

use super::{Sheet, SheetSolver, solve_across_planes, solve_in_planes, sweep};
use crate::npb::blocks::{self, Block};
use crate::npb::flow::{COMPONENTS, Factors, Grid, OWN_AXIS, Point};
use crate::npb::lu::{Fields, Flow, Line, OMEGA, State, flux};
use crate::wavefront::Direction;

/// Numbers for each point of a plane: four blocks and a vector.
const OF_PLANE: usize = (4 * COMPONENTS + 1) * COMPONENTS;
/// Numbers for each point of a line: the flow and 1/ρ, fluxes, sums.
const OF_LINE: usize = COMPONENTS + 1 + COMPONENTS + COMPONENTS;

/// Numbers of work space, shared by lines and planes in turn.
pub fn work(grid: &Grid, vcpus: usize) -> usize {
    (grid.row() * grid.edge * OF_PLANE).max(vcpus * grid.edge * OF_LINE)
}

/// Runs one step.
pub(in crate::npb) fn step(fields: &mut Fields<'_, '_>) {
    let (grid, dt) = (fields.grid, fields.dt);
    sweep(fields.platform, &grid, fields.rsd, fields.work, |_, rsd| *rsd = rsd.map(|number| dt * number));
    for z in grid.interior() {
        relax(fields, z, Direction::Rising);
    }
    for z in grid.interior().rev() {
        relax(fields, z, Direction::Falling);
    }
    fields.advance();
    set_residual(fields);
}

/// Relaxes a plane.
fn relax(fields: &mut Fields<'_, '_>, z: usize, direction: Direction) {
    let flow = Flow { grid: fields.grid, u: fields.u, kinetic: fields.kinetic, rho_i: fields.rho_i };
    let mut plane = Plane::new(fields.grid, z, direction, fields.work);
    let factors = fields.grid.factors();
    plane.each(|plane, x, y| plane.set_blocks(&flow, &factors, fields.dt, x, y));
    match direction {
        Direction::Rising => plane.each(|plane, x, y| plane.take_behind(fields.rsd, x, y)),
        Direction::Falling => plane.each(|plane, x, y| plane.keep_before(fields.rsd, x, y)),
    }
    plane.each(|plane, x, y| plane.solve(fields.rsd, x, y));
}

/// The blocks of a plane.
struct Plane<'a> {
    grid: Grid,
    z: usize,
    direction: Direction,
    /// Blocks of the neighbours along z, y and x, and of the points themselves.
    blocks: [&'a mut [Block<1>]; 4],
    /// The NPB's tv: the vectors that the sweep down subtracts.
    vectors: &'a mut [Point],
}

const ALONG_Z: usize = 0;
const ALONG_Y: usize = 1;
const ALONG_X: usize = 2;
const DIAGONAL: usize = 3;

impl<'a> Plane<'a> {
    fn new(grid: Grid, z: usize, direction: Direction, work: &'a mut [f64]) -> Self {
        let points = grid.row() * grid.edge;
        let mut parts = work.chunks_exact_mut(points * COMPONENTS * COMPONENTS);
        let blocks = array::from_fn(|_| blocks::of_numbers(parts.next().expect("four parts are blocks")));
        let vectors = parts.into_remainder().as_chunks_mut().0;
        Self { grid, z, direction, blocks, vectors }
    }

    /// Runs `body` at each interior point, in the direction of the sweep.
    fn each(&mut self, mut body: impl FnMut(&mut Self, usize, usize)) {
        let interior = self.grid.interior();
        match self.direction {
            Direction::Rising => interior.clone().for_each(|y| interior.clone().for_each(|x| body(self, x, y))),
            Direction::Falling => {
                interior.clone().rev().for_each(|y| interior.clone().rev().for_each(|x| body(self, x, y)));
            }
        }
    }

    fn in_plane(&self, x: usize, y: usize) -> usize {
        y * self.grid.row() + x
    }

    /// The neighbour along an axis that the sweep has passed before.
    fn neighbour(&self, x: usize, y: usize, axis: usize) -> usize {
        let (place, stride) = (self.grid.place([x, y, self.z]), self.grid.stride(axis));
        match self.direction {
            Direction::Rising => place - stride,
            Direction::Falling => place + stride,
        }
    }

    fn set_blocks(&mut self, flow: &Flow<'_>, factors: &Factors, dt: f64, x: usize, y: usize) {
        let (first, second) = (dt * factors.first, dt * factors.second);
        let here = [state(flow, self.grid.place([x, y, self.z]))];
        let viscous = [
            blocks::viscous::<0, 1>(second, &here),
            blocks::viscous::<1, 1>(second, &here),
            blocks::viscous::<2, 1>(second, &here),
        ];
        let at = self.in_plane(x, y);
        self.blocks[DIAGONAL][at] = array::from_fn(|m| {
            array::from_fn(|n| {
                let sum: f64 = viscous.iter().map(|block| block[m][n][0]).sum();
                [f64::from(u8::from(m == n)) + 2.0 * sum]
            })
        });
        let first = if self.direction == Direction::Rising { -first } else { first };
        self.blocks[ALONG_Z][at] = beside::<2>(first, second, state(flow, self.neighbour(x, y, 2)));
        self.blocks[ALONG_Y][at] = beside::<1>(first, second, state(flow, self.neighbour(x, y, 1)));
        self.blocks[ALONG_X][at] = beside::<0>(first, second, state(flow, self.neighbour(x, y, 0)));
    }

    /// Sweep up: subtracts the contribution of the plane below from a point.
    fn take_behind(&mut self, rsd: &mut [Point], x: usize, y: usize) {
        let known = rsd[self.neighbour(x, y, 2)];
        let from_z = product(&self.blocks[ALONG_Z][self.in_plane(x, y)], &known);
        let here = &mut rsd[self.grid.place([x, y, self.z])];
        here.iter_mut().zip(from_z).for_each(|(number, from)| *number -= OMEGA * from);
    }

    /// Sweep down: stores the contribution of the plane above.
    fn keep_before(&mut self, rsd: &mut [Point], x: usize, y: usize) {
        let at = self.in_plane(x, y);
        self.vectors[at] = product(&self.blocks[ALONG_Z][at], &rsd[self.neighbour(x, y, 2)]).map(|from| OMEGA * from);
    }

    /// Subtracts the contributions of the neighbours in the plane, then solves with the point's own block.
    fn solve(&mut self, rsd: &mut [Point], x: usize, y: usize) {
        let (at, place) = (self.in_plane(x, y), self.grid.place([x, y, self.z]));
        let from_y = product(&self.blocks[ALONG_Y][at], &rsd[self.neighbour(x, y, 1)]);
        let from_x = product(&self.blocks[ALONG_X][at], &rsd[self.neighbour(x, y, 0)]);
        let from_plane: Point = array::from_fn(|m| OMEGA * (from_y[m] + from_x[m]));
        let diagonal = &self.blocks[DIAGONAL][at];
        match self.direction {
            Direction::Rising => rsd[place] = forward(diagonal, array::from_fn(|m| rsd[place][m] - from_plane[m])),
            Direction::Falling => {
                let change = forward(diagonal, array::from_fn(|m| self.vectors[at][m] + from_plane[m]));
                self.vectors[at] = change;
                rsd[place].iter_mut().zip(change).for_each(|(number, change)| *number -= change);
            }
        }
    }
}

fn state(flow: &Flow<'_>, place: usize) -> blocks::State {
    let State { rho_i, velocity, kinetic, energy } = flow.line(place, 1).state(0);
    blocks::State { velocity, qs: kinetic, rho_i, energy }
}

/// The block of a neighbour along an axis.
fn beside<const AXIS: usize>(first: f64, second: f64, state: blocks::State) -> Block<1> {
    let (flux, viscous) = (blocks::flux::<AXIS, 1>(first, &[state]), blocks::viscous::<AXIS, 1>(second, &[state]));
    array::from_fn(|m| array::from_fn(|n| [flux[m][n][0] - viscous[m][n][0]]))
}

fn product(block: &Block<1>, vector: &Point) -> Point {
    block.each_ref().map(|row| row.iter().zip(vector).map(|([number], component)| number * component).sum())
}

/// Solves a lower triangular block: the viscous Jacobians are zero above their diagonal.
fn forward(block: &Block<1>, right: Point) -> Point {
    let mut solution = [0.0; COMPONENTS];
    for (m, row) in block.iter().enumerate() {
        let known: f64 = row[..m].iter().zip(solution).map(|([number], component)| number * component).sum();
        solution[m] = (right[m] - known) / row[m][0];
    }
    solution
}

/// Computes rsd = L(u) − forcing, axis after axis.
fn set_residual(fields: &mut Fields<'_, '_>) {
    fields.rsd.iter_mut().zip(&*fields.forcing).for_each(|(rsd, forcing)| *rsd = forcing.map(|number| -number));
    fields.derive();
    let (grid, platform, factors) = (fields.grid, fields.platform, fields.grid.factors());
    let flow = Flow { grid, u: fields.u, kinetic: fields.kinetic, rho_i: fields.rho_i };
    let (rsd, work) = (&mut *fields.rsd, &mut *fields.work);
    solve_in_planes::<0>(platform, &grid, &Terms::<0> { flow, factors }, rsd, work);
    solve_in_planes::<1>(platform, &grid, &Terms::<1> { flow, factors }, rsd, work);
    solve_across_planes(platform, &grid, &Terms::<2> { flow, factors }, rsd, work);
}

/// Terms of L along an axis.
struct Terms<'a, const AXIS: usize> {
    flow: Flow<'a>,
    factors: Factors,
}

impl<const AXIS: usize> SheetSolver for Terms<'_, AXIS> {
    fn solve(&self, sheet: &mut impl Sheet, lines: Range<usize>, work: &mut [f64]) {
        let edge = self.flow.grid.edge;
        let (flows, work) = work.split_at_mut(edge * (COMPONENTS + 1));
        let (fluxes, sums) = work[..2 * edge * COMPONENTS].split_at_mut(edge * COMPONENTS);
        let (flows, fluxes, sums) = (flows.as_chunks_mut().0, fluxes.as_chunks_mut().0, sums.as_chunks_mut().0);
        lines.for_each(|line| self.add(sheet, line, flows, fluxes, sums));
    }
}

impl<const AXIS: usize> Terms<'_, AXIS> {
    fn add(
        &self,
        sheet: &mut impl Sheet,
        line: usize,
        flows: &mut [[f64; COMPONENTS + 1]],
        fluxes: &mut [Point],
        sums: &mut [Point],
    ) {
        let (grid, factors) = (&self.flow.grid, &self.factors);
        for (index, flow) in flows.iter_mut().enumerate() {
            let place = sheet.place(line, index);
            flow[..COMPONENTS].copy_from_slice(&self.flow.u[place]);
            flow[COMPONENTS] = self.flow.rho_i[place];
        }
        for (index, (flow, carried)) in flows.iter().zip(&mut *fluxes).enumerate() {
            let [u @ .., rho_i] = flow;
            let kinetic = self.flow.kinetic[sheet.place(line, index)];
            let line = Line { u: slice::from_ref(u), kinetic: &[kinetic], rho_i: slice::from_ref(rho_i) };
            *carried = flux::<AXIS>(&line, 0, &line.state(0));
        }
        for index in grid.interior() {
            let (rsd, before, behind) = (sheet.rhs(line, index), &fluxes[index - 1], &fluxes[index + 1]);
            sums[index] = array::from_fn(|m| rsd[m] - factors.first * (behind[m] - before[m]));
        }
        for index in 1..grid.edge {
            let (before, here) = (self.drag(&flows[index - 1]), self.drag(&flows[index]));
            fluxes[index] = array::from_fn(|m| here[m] - before[m]);
        }
        for index in grid.interior() {
            let (before, behind) = (&fluxes[index], &fluxes[index + 1]);
            sums[index]
                .iter_mut()
                .zip(behind.iter().zip(before))
                .for_each(|(sum, (behind, before))| *sum += behind - before);
        }
        for index in grid.interior() {
            let mut sum = sums[index];
            for (n, weight) in factors.linear_weights(grid, AXIS, index).into_iter().enumerate() {
                // A missing neighbour has weight 0.
                if weight != 0.0 {
                    sum.iter_mut().zip(&flows[index + n - 2]).for_each(|(sum, u)| *sum += weight * u);
                }
            }
            *sheet.rhs(line, index) = sum;
        }
    }

    /// Quantities of which viscosity and conduction take the second difference.
    fn drag(&self, &[_, u, v, w, energy, rho_i]: &[f64; COMPONENTS + 1]) -> Point {
        let (factors, velocity) = (&self.factors, [u * rho_i, v * rho_i, w * rho_i]);
        let kinetic = 0.5 * velocity.iter().map(|velocity| velocity * velocity).sum::<f64>();
        let mut momenta = velocity.map(|velocity| factors.velocity * velocity);
        momenta[AXIS] *= OWN_AXIS;
        let heat = factors.kinetic * kinetic
            + factors.squared * velocity[AXIS] * velocity[AXIS]
            + factors.energy * energy * rho_i;
        [0.0, momenta[0], momenta[1], momenta[2], heat]
    }
}
