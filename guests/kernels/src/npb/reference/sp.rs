//! SP in the order of the serial NPB 3.3. For each sheet of lines there are three arrays of five coefficients a
//! point, filled, damped, copied and eliminated in loops over the whole sheet.
//!
//! ```text
//!   rho_i, velocity ─▶ lhs ─▶ + damping ─▶ lhs ∓ speed: lhsp, lhsm
//!   ─▶ down: lhs with rhs 1 – 3 ─▶ lhsp with 4, lhsm with 5 ─▶ up
//!
//!   along x line after line; along y and z (but for the first arrow) all lines of an index before the next:
//!   memory along x either way
//! ```
//!
//! Between the solves, sweeps over the whole grid compute the waves of the next axis.

use core::ops::Range;

use super::{Sheet, SheetSolver, right_hand_side, solve_across_planes, solve_in_planes, sweep};
use crate::Platform;
use crate::npb::flow::{C1C5, C3C4, COMPONENTS, DIFFUSION, Grid, damping_weights};
use crate::npb::rhs::Fields;
use crate::npb::sp::{SCALARS, System};

/// Arrays of coefficients: for waves with the flow, and for waves faster and slower than it by the speed of sound.
const SYSTEMS: usize = 3;
/// Components that each array applies to.
const COMPONENTS_OF: [Range<usize>; SYSTEMS] = [0..3, 3..4, 4..5];

/// Factors of the points two and one before, here, one and two behind.
type Coefficients = [f64; 5];
/// On a face the solution equals the right-hand side.
const FACE: Coefficients = [0.0, 0.0, 1.0, 0.0, 0.0];

/// Numbers of work space: the coefficients of a sheet, and velocity and diffusion of a line.
pub fn work(grid: &Grid) -> usize {
    SYSTEMS * grid.plane() * COMPONENTS + 2 * grid.edge
}

/// Runs one step.
pub fn step(platform: &dyn Platform, fields: &mut Fields<'_, SCALARS>, dt: f64, work: &mut [f64]) {
    right_hand_side(platform, fields, dt, work);
    let (sources, rhs) = fields.for_step(dt);
    let grid = &sources.grid;
    let (along_x, along_y, along_z) =
        (System::<0>::new(&sources), System::<1>::new(&sources), System::<2>::new(&sources));
    sweep(platform, grid, rhs, work, |point, rhs| *rhs = along_x.waves_along_x(grid.place(point), *rhs));
    solve_in_planes::<0>(platform, grid, &along_x, rhs, work);
    sweep(platform, grid, rhs, work, |point, rhs| *rhs = along_x.leave(grid.place(point), *rhs));
    solve_in_planes::<1>(platform, grid, &along_y, rhs, work);
    sweep(platform, grid, rhs, work, |point, rhs| *rhs = along_y.leave(grid.place(point), *rhs));
    solve_across_planes(platform, grid, &along_z, rhs, work);
    sweep(platform, grid, rhs, work, |point, rhs| *rhs = along_z.leave(grid.place(point), *rhs));
    fields.advance(platform);
}

impl<const AXIS: usize> SheetSolver for System<'_, AXIS> {
    fn solve(&self, sheet: &mut impl Sheet, lines: Range<usize>, work: &mut [f64]) {
        let grid = Grid { edge: self.edge };
        let (coefficients, line) = work.split_at_mut(SYSTEMS * grid.plane() * COMPONENTS);
        let mut systems = coefficients
            .chunks_exact_mut(grid.plane() * COMPONENTS)
            .map(|numbers| Matrix::<AXIS> { grid, at: numbers.as_chunks_mut().0 });
        let mut systems: [_; SYSTEMS] = core::array::from_fn(|_| systems.next().expect("there are three"));
        self.fill(sheet, lines.clone(), &mut systems[0], line);
        self.add_damping(lines.clone(), &mut systems[0]);
        self.add_sound(sheet, lines.clone(), &mut systems);
        let [flow, sound @ ..] = &mut systems;
        each::<AXIS>(lines.clone(), 0..self.edge, |line, index| {
            flow.eliminate(sheet, line, index, COMPONENTS_OF[0].clone());
        });
        each::<AXIS>(lines.clone(), 0..self.edge, |line, index| {
            for (system, components) in sound.iter_mut().zip(&COMPONENTS_OF[1..]) {
                system.eliminate(sheet, line, index, components.clone());
            }
        });
        each::<AXIS>(lines, 1..self.edge, |line, from_end| {
            let index = self.edge - 1 - from_end;
            for (system, components) in systems.iter().zip(COMPONENTS_OF) {
                system.substitute(sheet, line, index, components);
            }
        });
    }
}

/// Visits all indices of all lines, in storage order.
fn each<const AXIS: usize>(lines: Range<usize>, indices: Range<usize>, mut body: impl FnMut(usize, usize)) {
    if AXIS == 0 {
        lines.for_each(|line| indices.clone().for_each(|index| body(line, index)));
    } else {
        indices.for_each(|index| lines.clone().for_each(|line| body(line, index)));
    }
}

impl<const AXIS: usize> System<'_, AXIS> {
    fn fill(&self, sheet: &impl Sheet, lines: Range<usize>, to: &mut Matrix<'_, AXIS>, work: &mut [f64]) {
        let edge = self.edge;
        let (velocity, diffusion) = work.split_at_mut(edge);
        for line in lines {
            for index in 0..edge {
                let place = sheet.place(line, index);
                velocity[index] = self.first * self.velocity[AXIS][place];
                diffusion[index] = self.second * (DIFFUSION[AXIS] + C1C5 * C3C4 * self.rho_i[place]);
            }
            (*to.get(line, 0), *to.get(line, edge - 1)) = (FACE, FACE);
            for index in 1..edge - 1 {
                *to.get(line, index) = [
                    0.0,
                    -velocity[index - 1] - diffusion[index - 1],
                    1.0 + 2.0 * diffusion[index],
                    velocity[index + 1] - diffusion[index + 1],
                    0.0,
                ];
            }
        }
    }

    fn add_damping(&self, lines: Range<usize>, to: &mut Matrix<'_, AXIS>) {
        each::<AXIS>(lines, 1..self.edge - 1, |line, index| {
            let weights = damping_weights(index, self.edge);
            to.get(line, index).iter_mut().zip(weights).for_each(|(number, weight)| *number += self.damping * weight);
        });
    }

    fn add_sound(&self, sheet: &impl Sheet, lines: Range<usize>, systems: &mut [Matrix<'_, AXIS>; SYSTEMS]) {
        let [flow, faster, slower] = systems;
        for line in lines.clone() {
            for index in [0, self.edge - 1] {
                (*faster.get(line, index), *slower.get(line, index)) = (FACE, FACE);
            }
        }
        each::<AXIS>(lines, 1..self.edge - 1, |line, index| {
            let [a, b, c, d, e] = *flow.get(line, index);
            let [before, behind] =
                [index - 1, index + 1].map(|index| self.first * self.speed[sheet.place(line, index)]);
            *faster.get(line, index) = [a, b - before, c, d + behind, e];
            *slower.get(line, index) = [a, b + before, c, d - behind, e];
        });
    }
}

/// The coefficients of the lines of a sheet.
struct Matrix<'a, const AXIS: usize> {
    grid: Grid,
    at: &'a mut [Coefficients],
}

impl<const AXIS: usize> Matrix<'_, AXIS> {
    const fn place(&self, line: usize, index: usize) -> usize {
        if AXIS == 0 { line * self.grid.row() + index } else { index * self.grid.row() + line }
    }

    fn get(&mut self, line: usize, index: usize) -> &mut Coefficients {
        &mut self.at[self.place(line, index)]
    }

    /// Divides a row by its middle and eliminates it from the two rows behind it, if they exist.
    fn eliminate(&mut self, sheet: &mut impl Sheet, line: usize, index: usize, components: Range<usize>) {
        let row = self.get(line, index);
        let scale = 1.0 / row[2];
        row[3] *= scale;
        row[4] *= scale;
        let [.., d, e] = *row;
        let rhs = sheet.rhs(line, index);
        components.clone().for_each(|m| rhs[m] *= scale);
        let known = *rhs;
        for distance in 1..(self.grid.edge - index).min(3) {
            let below = self.get(line, index + distance);
            let factor = below[2 - distance];
            below[3 - distance] -= factor * d;
            below[4 - distance] -= factor * e;
            let rhs = sheet.rhs(line, index + distance);
            components.clone().for_each(|m| rhs[m] -= factor * known[m]);
        }
    }

    /// Computes the solution at an index from those behind it.
    fn substitute(&self, sheet: &mut impl Sheet, line: usize, index: usize, components: Range<usize>) {
        let [.., d, e] = self.at[self.place(line, index)];
        let behind = *sheet.rhs(line, index + 1);
        let two_behind = if index + 2 < self.grid.edge { *sheet.rhs(line, index + 2) } else { [0.0; COMPONENTS] };
        let rhs = sheet.rhs(line, index);
        components.for_each(|m| rhs[m] -= d * behind[m] + e * two_behind[m]);
    }
}
