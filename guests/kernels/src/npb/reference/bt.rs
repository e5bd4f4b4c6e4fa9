//! BT in the order of the serial NPB 3.3. For each line it computes the Jacobians of all points, then all blocks,
//! then the way down and up.
//!
//! ```text
//!   u, qs, square, (rho_i) ─▶ flux, viscous of all points ─▶ rows A B C ─▶ down: C, rhs ─▶ up: rhs
//!                             └───────────── work space, one line ────┘     └─ in place ────────┘
//! ```

use core::array;
use core::ops::Range;

use super::{Sheet, SheetSolver, right_hand_side, solve_across_planes, solve_in_planes};
use crate::Platform;
use crate::npb::blocks::{
    Block, Left, State, beside_zero, eliminate, flux, identity, of_numbers, set_block, subtract_product, viscous, zero,
};
use crate::npb::bt::{SCALARS, System};
use crate::npb::flow::{COMPONENTS, Point};
use crate::npb::rhs::{Fields, SQUARE, Sources};

/// Numbers of a block.
const BLOCK: usize = COMPONENTS * COMPONENTS;
/// Numbers of work space for each point of a line: two Jacobians and three blocks.
pub const WORK: usize = 5 * BLOCK;

/// Runs one step.
pub fn step(platform: &dyn Platform, fields: &mut Fields<'_, SCALARS>, dt: f64, work: &mut [f64]) {
    right_hand_side(platform, fields, dt, work);
    let (sources, rhs) = fields.for_step(dt);
    let grid = &sources.grid;
    solve_in_planes::<0>(platform, grid, &Solver::<0>::new(&sources), rhs, work);
    solve_in_planes::<1>(platform, grid, &Solver::<1>::new(&sources), rhs, work);
    solve_across_planes(platform, grid, &Solver::<2>::new(&sources), rhs, work);
    fields.advance(platform);
}

struct Solver<'a, const AXIS: usize> {
    system: System<'a, AXIS>,
    square: &'a [f64],
}

impl<'a, const AXIS: usize> Solver<'a, AXIS> {
    fn new(sources: &Sources<'a, SCALARS>) -> Self {
        Self { system: System::new(sources), square: sources.scalars[SQUARE] }
    }

    /// State from the fields that the NPB uses for its Jacobians: `u`, `qs` and `square`, along x and y also
    /// `rho_i`.
    fn state(&self, place: usize) -> State {
        let u = &self.system.u[place];
        let rho_i = if AXIS == 2 { 1.0 / u[0] } else { self.system.rho_i[place] };
        State {
            velocity: [u[1] * rho_i, u[2] * rho_i, u[3] * rho_i],
            // The NPB reads both arrays, which have the same value here.
            qs: 0.5 * (self.system.qs[place] + self.square[place] * rho_i),
            rho_i,
            energy: u[4] * rho_i,
        }
    }

    fn solve_line(&self, sheet: &mut impl Sheet, line: usize, work: &mut [f64]) {
        let edge = self.system.edge;
        let (jacobians, rows) = work[..edge * WORK].split_at_mut(edge * 2 * BLOCK);
        let (carried, diffused) = jacobians.split_at_mut(edge * BLOCK);
        let (carried, diffused) = (of_numbers(carried), of_numbers(diffused));
        for index in 0..edge {
            let state = [self.state(sheet.place(line, index))];
            carried[index] = flux::<AXIS, _>(self.system.first, &state);
            diffused[index] = viscous::<AXIS, _>(self.system.second, &state);
        }
        let rows: &mut [[Block<1>; 3]] = of_numbers(rows).as_chunks_mut().0;
        (rows[0], rows[edge - 1]) = (FACE, FACE);
        for index in 1..edge - 1 {
            rows[index] = [
                combine(|m, n| -carried[index - 1][m][n][0] - diffused[index - 1][m][n][0]),
                combine(|m, n| f64::from(u8::from(m == n)) + 2.0 * diffused[index][m][n][0]),
                combine(|m, n| carried[index + 1][m][n][0] - diffused[index + 1][m][n][0]),
            ];
        }
        down(sheet, line, rows);
        for index in (0..edge - 1).rev() {
            let known = *sheet.rhs(line, index + 1);
            let rhs = sheet.rhs(line, index);
            for (number, row) in rhs.iter_mut().zip(&rows[index][2]) {
                row.iter().zip(known).for_each(|([c], known)| *number -= c * known);
            }
        }
    }
}

impl<const AXIS: usize> SheetSolver for Solver<'_, AXIS> {
    fn solve(&self, sheet: &mut impl Sheet, lines: Range<usize>, work: &mut [f64]) {
        lines.for_each(|line| self.solve_line(sheet, line, work));
    }
}

/// The row of a face: the solution equals the right-hand side.
const FACE: [Block<1>; 3] = [zero(), identity(), zero()];

/// Leaves B⁻¹·C and B⁻¹·rhs of each point.
fn down(sheet: &mut impl Sheet, line: usize, rows: &mut [[Block<1>; 3]]) {
    let mut last: Left<1> = beside_zero(&[[0.0]; COMPONENTS]);
    for (index, row) in rows.iter_mut().enumerate() {
        let [a, b, c] = row;
        let mut here = beside_zero(&sheet.rhs(line, index).map(|number| [number]));
        subtract_product(b, &mut here, a, &last);
        set_block(&mut here, c);
        eliminate(b, &mut here);
        let (block, vector) = apart(&here);
        (*c, *sheet.rhs(line, index)) = (block, vector);
        last = here;
    }
}

fn combine(number: impl Fn(usize, usize) -> f64) -> Block<1> {
    array::from_fn(|m| array::from_fn(|n| [number(m, n)]))
}

/// Separates a block from the vector beside it.
fn apart(left: &Left<1>) -> (Block<1>, Point) {
    (combine(|m, n| left[m][n][0]), left.map(|row| row[COMPONENTS][0]))
}
