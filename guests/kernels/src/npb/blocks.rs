//! Blocks of 5 × 5 numbers: the Jacobians of the flow, and elimination.
//!
//! ```text
//!   state of a point ─▶ flux, viscous ─▶ A B C of a row      B │ C r  ─eliminate─▶  1 │ B⁻¹·C B⁻¹·r
//! ```
//!
//! Each number stands for `W` adjacent lines, which are computed at once.

use super::flow::{C1, C2, C3C4, C1345, COMPONENTS, DIFFUSION, OWN_AXIS};
use super::lines::{Lanes, PointLanes};
use crate::vectors::NARROW;

/// A block of each of `W` lines.
pub type Block<const W: usize = NARROW> = [[Lanes<W>; COMPONENTS]; COMPONENTS];
/// A block and a vector, row by row.
pub type Row<const W: usize = NARROW> = [Lanes<W>; COMPONENTS + 1];
/// A block with a vector beside it.
pub type Left<const W: usize = NARROW> = [Row<W>; COMPONENTS];

/// The quantities at a point from which the Jacobians are built.
#[derive(Clone, Copy, Default)]
pub struct State {
    /// Velocity along x, y and z.
    pub velocity: [f64; 3],
    /// Kinetic energy per mass.
    pub qs: f64,
    /// Reciprocal of the density, 1/ρ.
    pub rho_i: f64,
    /// Total energy per mass.
    pub energy: f64,
}

/// `first` times the Jacobian of the flux along an axis.
// Inlined: out of line the block, mostly constants, is cleared and copied in memory, 8 % of BT's instructions.
#[inline(always)]
pub fn flux<const AXIS: usize, const W: usize>(first: f64, states: &[State; W]) -> Block<W> {
    let mut flux = zero();
    for (line, state) in states.iter().enumerate() {
        let velocity = state.velocity.map(|velocity| first * velocity);
        let (own, plain_own) = (velocity[AXIS], state.velocity[AXIS]);
        let (qs, enthalpy) = (C2 * state.qs, C1 * state.energy);
        flux[0][AXIS + 1][line] = first;
        for axis in 0..3 {
            flux[axis + 1][0][line] = -plain_own * velocity[axis];
            flux[axis + 1][AXIS + 1][line] += velocity[axis];
            flux[axis + 1][axis + 1][line] += own;
            flux[AXIS + 1][axis + 1][line] -= C2 * velocity[axis];
            flux[4][axis + 1][line] = -C2 * plain_own * velocity[axis];
        }
        flux[AXIS + 1][0][line] += first * qs;
        flux[AXIS + 1][4][line] = first * C2;
        flux[4][0][line] = (2.0 * qs - enthalpy) * own;
        flux[4][AXIS + 1][line] += first * (enthalpy - qs);
        flux[4][4][line] = C1 * own;
    }
    flux
}

/// `second` times the Jacobian of the viscous terms and the diffusion along an axis.
// Inlined: out of line the block, mostly constants, is cleared and copied in memory, 8 % of BT's instructions.
#[inline(always)]
pub fn viscous<const AXIS: usize, const W: usize>(second: f64, states: &[State; W]) -> Block<W> {
    let mut viscous = zero();
    let diffusion = second * DIFFUSION[AXIS];
    for (line, state) in states.iter().enumerate() {
        let rho_i = second * state.rho_i;
        let mut heat = C1345 * state.energy;
        viscous[0][0][line] = diffusion;
        for (axis, velocity) in state.velocity.into_iter().enumerate() {
            let viscosity = if axis == AXIS { OWN_AXIS * C3C4 } else { C3C4 };
            viscous[axis + 1][0][line] = -viscosity * rho_i * velocity;
            viscous[axis + 1][axis + 1][line] = viscosity * rho_i + diffusion;
            viscous[4][axis + 1][line] = (viscosity - C1345) * rho_i * velocity;
            heat += (viscosity - C1345) * velocity * velocity;
        }
        viscous[4][0][line] = -rho_i * heat;
        viscous[4][4][line] = C1345 * rho_i + diffusion;
    }
    viscous
}

/// Views numbers as blocks of one line each.
pub fn of_numbers(numbers: &mut [f64]) -> &mut [Block<1>] {
    numbers.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0
}

/// A block of zeros.
pub const fn zero<const W: usize>() -> Block<W> {
    [[[0.0; W]; COMPONENTS]; COMPONENTS]
}

/// The identity block.
pub const fn identity<const W: usize>() -> Block<W> {
    let mut block = zero();
    let mut index = 0;
    while index < COMPONENTS {
        block[index][index] = [1.0; W];
        index += 1;
    }
    block
}

/// This vector beside a block of zeros.
pub fn beside_zero<const W: usize>(vector: &PointLanes<W>) -> Left<W> {
    vector.map(|last| {
        let mut row = [[0.0; W]; COMPONENTS + 1];
        row[COMPONENTS] = last;
        row
    })
}

/// Sets the block and keeps the vector beside it.
pub fn set_block<const W: usize>(left: &mut Left<W>, block: &Block<W>) {
    for (row, from) in left.iter_mut().zip(block) {
        row[..COMPONENTS].copy_from_slice(from);
    }
}

/// Computes b ← b − a·(block) and (vector of `here`) ← itself − a·(vector), with block and vector of `last`.
pub fn subtract_product<const W: usize>(b: &mut Block<W>, here: &mut Left<W>, a: &Block<W>, last: &Left<W>) {
    for ((a, b), here) in a.iter().zip(b).zip(here) {
        for (factor, from) in a.iter().zip(last) {
            subtract_multiple(b, factor, &from[..COMPONENTS]);
            subtract_multiple(&mut here[COMPONENTS..], factor, &from[COMPONENTS..]);
        }
    }
}

/// Computes left ← b⁻¹·left, by elimination without pivoting. Overwrites `b`.
pub fn eliminate<const W: usize>(b: &mut Block<W>, left: &mut Left<W>) {
    for pivot in 0..COMPONENTS {
        let scale = b[pivot][pivot].map(|number| 1.0 / number);
        multiply(&mut b[pivot][pivot + 1..], &scale);
        multiply(&mut left[pivot], &scale);
        let (pivot_b, pivot_left) = (b[pivot], left[pivot]);
        for row in (0..COMPONENTS).filter(|row| *row != pivot) {
            let factor = b[row][pivot];
            subtract_multiple(&mut b[row][pivot + 1..], &factor, &pivot_b[pivot + 1..]);
            subtract_multiple(&mut left[row], &factor, &pivot_left);
        }
    }
}

#[inline]
fn multiply<const W: usize>(row: &mut [Lanes<W>], factor: &Lanes<W>) {
    for number in row {
        number.iter_mut().zip(factor).for_each(|(number, factor)| *number *= factor);
    }
}

/// Computes row ← row − factor·from.
#[inline]
pub fn subtract_multiple<const W: usize>(row: &mut [Lanes<W>], factor: &Lanes<W>, from: &[Lanes<W>]) {
    for (number, from) in row.iter_mut().zip(from) {
        number.iter_mut().zip(factor.iter().zip(from)).for_each(|(number, (factor, from))| *number -= factor * from);
    }
}

#[cfg(test)]
mod tests {
    use core::array;

    use super::*;

    #[test]
    fn the_result_of_elimination_solves_the_block() {
        let number =
            |row: usize, column: usize| ((3 * row + 7 * column) % 5) as f64 + if row == column { 9.0 } else { 0.0 };
        let block: Block = array::from_fn(|row| array::from_fn(|column| [number(row, column), number(column, row)]));
        let right: Left = array::from_fn(|row| array::from_fn(|column| [row as f64, column as f64 - 2.0]));
        let mut left = right;
        eliminate(&mut block.clone(), &mut left);
        for (row, right) in block.iter().zip(right) {
            let mut rest = right;
            row.iter().zip(left).for_each(|(factor, from)| subtract_multiple(&mut rest, factor, &from));
            assert!(rest.as_flattened().iter().all(|number| number.abs() < 1e-14), "{rest:?}");
        }
    }
}
