//! The common part of BT, SP and LU in [`Order::Reference`](super::order::Order): the right-hand side term by term,
//! and sheets of lines.
//!
//! ```text
//!   derive ─▶ rhs = forcing ─▶ x: flux, damping plane by plane ─▶ y: the same ─▶ z: flux ─▶ z: damping ─▶ rhs · dt
//!
//!   sheet      along x, y: a plane across z          along z: the rows of one y in all planes
//!              line ─┬─▶ index                       line 0, 1, … along x, index along z
//!                    └─ both count from the faces
//! ```
//!
//! The order of the loops and the arrays that each of them touches are those of the serial NPB 3.3 (`rhs.f`,
//! `x_solve.f`, …). A flux reads `u` and six scalars at three points each and adds to `rhs`, one point after the
//! other and never two at once. Those are more concurrent arrays than small TLBs have entries.

pub mod bt;
pub mod lu;
pub mod sp;

use core::ops::Range;

use super::flow::{COMPONENTS, Grid, Point};
use super::lines::{in_planes, in_rows};
use super::rhs::{Fields, Sources};
use crate::Platform;
use crate::planes::OwnRows;

/// Computes the scalars, and the right-hand side of a step of `dt` in the interior.
pub fn right_hand_side<const SCALARS: usize>(
    platform: &dyn Platform,
    fields: &mut Fields<'_, SCALARS>,
    dt: f64,
    work: &mut [f64],
) {
    fields.derive(platform);
    fields.rhs.copy_from_slice(fields.forcing);
    let (sources, rhs) = fields.for_step(1.0);
    let grid = &sources.grid;
    in_planes(platform, grid, rhs, work, |z, plane, _| {
        each_point(grid, z, plane, |point, rhs| add_flux::<0, _>(&sources, point, rhs));
        each_point(grid, z, plane, |point, rhs| add_damping::<0, _>(&sources, point, rhs));
    });
    in_planes(platform, grid, rhs, work, |z, plane, _| {
        each_point(grid, z, plane, |point, rhs| add_flux::<1, _>(&sources, point, rhs));
        each_point(grid, z, plane, |point, rhs| add_damping::<1, _>(&sources, point, rhs));
    });
    sweep(platform, grid, rhs, work, |point, rhs| add_flux::<2, _>(&sources, point, rhs));
    sweep(platform, grid, rhs, work, |point, rhs| add_damping::<2, _>(&sources, point, rhs));
    sweep(platform, grid, rhs, work, |_, rhs| *rhs = rhs.map(|number| dt * number));
}

/// Runs `body` at each interior point of a field, in storage order.
pub fn sweep(
    platform: &dyn Platform,
    grid: &Grid,
    field: &mut [Point],
    work: &mut [f64],
    body: impl Fn([usize; 3], &mut Point) + Sync,
) {
    in_planes(platform, grid, field, work, |z, plane, _| each_point(grid, z, plane, &body));
}

fn each_point(grid: &Grid, z: usize, plane: &mut [Point], body: impl Fn([usize; 3], &mut Point)) {
    for y in grid.interior() {
        let row = &mut plane[y * grid.row()..][..grid.edge];
        grid.interior().for_each(|x| body([x, y, z], &mut row[x]));
    }
}

/// Adds flux and viscosity along an axis.
fn add_flux<const AXIS: usize, const SCALARS: usize>(
    sources: &Sources<'_, SCALARS>,
    point: [usize; 3],
    rhs: &mut Point,
) {
    let mut change = [[0.0]; COMPONENTS];
    sources.add_flux::<AXIS, 1>(sources.grid.place(point), 1, &mut change);
    rhs.iter_mut().zip(change).for_each(|(number, [change])| *number += change);
}

/// Adds diffusion and damping along an axis.
fn add_damping<const AXIS: usize, const SCALARS: usize>(
    sources: &Sources<'_, SCALARS>,
    point: [usize; 3],
    rhs: &mut Point,
) {
    let Sources { grid, u, factors, .. } = sources;
    let (place, stride) = (grid.place(point), grid.stride(AXIS));
    for (n, weight) in factors.linear_weights(grid, AXIS, point[AXIS]).into_iter().enumerate() {
        // A missing neighbour has weight 0.
        if weight != 0.0 {
            let from = &u[place + n * stride - 2 * stride];
            rhs.iter_mut().zip(from).for_each(|(number, from)| *number += weight * from);
        }
    }
}

/// Neighbouring lines along an axis.
pub trait Sheet {
    /// Place of a point of a line in a field.
    fn place(&self, line: usize, index: usize) -> usize;

    /// The right-hand side at a point of a line.
    fn rhs(&mut self, line: usize, index: usize) -> &mut Point;
}

/// Solves the systems of all lines of a sheet along one axis.
pub trait SheetSolver: Sync {
    /// Solves the systems and replaces the right-hand side by the solution.
    fn solve(&self, sheet: &mut impl Sheet, lines: Range<usize>, work: &mut [f64]);
}

/// Solves all lines along x or y, plane by plane.
pub fn solve_in_planes<const AXIS: usize>(
    platform: &dyn Platform,
    grid: &Grid,
    solver: &impl SheetSolver,
    rhs: &mut [Point],
    work: &mut [f64],
) {
    in_planes(platform, grid, rhs, work, |z, plane, work| {
        solver.solve(&mut Plane::<AXIS> { grid, z, rhs: plane }, grid.interior(), work);
    });
}

/// Solves all lines along z, row by row. Every member has its rows of every plane and its own part of `work`.
pub fn solve_across_planes(
    platform: &dyn Platform,
    grid: &Grid,
    solver: &impl SheetSolver,
    rhs: &mut [Point],
    work: &mut [f64],
) {
    in_rows(platform, grid, rhs, work, |y, own, work| {
        solver.solve(&mut AcrossPlanes { grid, y, rhs: own }, grid.interior(), work);
    });
}

struct Plane<'a, const AXIS: usize> {
    grid: &'a Grid,
    z: usize,
    rhs: &'a mut [Point],
}

impl<const AXIS: usize> Plane<'_, AXIS> {
    fn in_plane(&self, line: usize, index: usize) -> usize {
        line * self.grid.stride(1 - AXIS) + index * self.grid.stride(AXIS)
    }
}

impl<const AXIS: usize> Sheet for Plane<'_, AXIS> {
    fn place(&self, line: usize, index: usize) -> usize {
        self.z * self.grid.plane() + self.in_plane(line, index)
    }

    fn rhs(&mut self, line: usize, index: usize) -> &mut Point {
        let place = self.in_plane(line, index);
        &mut self.rhs[place]
    }
}

struct AcrossPlanes<'a, 's> {
    grid: &'a Grid,
    y: usize,
    rhs: &'a mut OwnRows<'s, Point>,
}

impl Sheet for AcrossPlanes<'_, '_> {
    fn place(&self, line: usize, index: usize) -> usize {
        self.grid.place([line, self.y, index])
    }

    fn rhs(&mut self, line: usize, index: usize) -> &mut Point {
        &mut self.rhs.row_mut(index, self.y)[line]
    }
}
