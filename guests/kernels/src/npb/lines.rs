//! Neighbouring lines of points, solved together. A step along a line waits for the step before, but two lines are
//! independent, and the same arithmetic on both becomes vector instructions.
//!
//! ```text
//!   along x: rows y and y+1        along y and z: columns x and x+1
//!
//!     point 0 │ 1 │ 2 │ …            line 0   line 1
//!   line 0  ▪ │ ▪ │ ▪ │                ▪        ▪      point 0
//!   line 1  ▪ │ ▪ │ ▪ │                ▪        ▪      point 1
//! ```

use core::array;

use super::flow::{COMPONENTS, Grid, Point};
use crate::Platform;
use crate::parts::deal;
use crate::planes::{OwnRows, deal_rows};

/// Lines that are solved together: two numbers fill a vector register of the baseline instruction set. An even edge
/// has an even number of interior lines, so no line is left over.
pub const WIDTH: usize = 2;

/// One number of each line.
pub type Lanes<const W: usize = WIDTH> = [f64; W];
/// A point of each line, by component.
pub type Lined<const W: usize = WIDTH> = [Lanes<W>; COMPONENTS];

/// Converts from line-major to component-major order.
#[inline]
pub fn by_component(points: [Point; WIDTH]) -> Lined {
    array::from_fn(|m| array::from_fn(|line| points[line][m]))
}

/// Converts from component-major to line-major order.
#[inline]
pub fn by_line(points: &Lined) -> [Point; WIDTH] {
    array::from_fn(|line| array::from_fn(|m| points[m][line]))
}

/// Neighbouring lines in a field.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// Place of point 0 of line 0.
    start: usize,
    /// Places from one point to the next.
    stride: usize,
    /// Places from one line to the next.
    gap: usize,
}

impl Lines {
    /// Lines along an axis: along x from row `first` of plane 0 on, along y and z from column `first` on.
    const fn along(grid: &Grid, axis: usize, first: usize) -> Self {
        let gap = grid.stride(if axis == 0 { 1 } else { 0 });
        Self { start: first * gap, stride: grid.stride(axis), gap }
    }

    /// The same lines, moved by `places`.
    const fn moved_by(self, places: usize) -> Self {
        Self { start: self.start + places, ..self }
    }

    /// The places of a point, one for each line.
    #[inline]
    pub fn places(&self, index: usize) -> [usize; WIDTH] {
        array::from_fn(|line| self.start + index * self.stride + line * self.gap)
    }
}

/// The points at these places.
#[inline]
fn gather(field: &[Point], places: [usize; WIDTH]) -> [Point; WIDTH] {
    let mut points = [[0.0; COMPONENTS]; WIDTH];
    for (point, place) in points.iter_mut().zip(places) {
        *point = field[place];
    }
    points
}

/// Solves the systems of lines along one axis.
pub trait LineSolver: Sync {
    /// Goes down the lines: reads `rhs` at each interior index and leaves in `work` what the way up needs.
    fn down(&self, lines: Lines, work: &mut [f64], rhs: impl Fn(usize) -> [Point; WIDTH]);

    /// Goes up the lines and passes the solution to `store`.
    fn up(&self, lines: Lines, work: &[f64], store: impl FnMut(usize, [Point; WIDTH]));
}

/// Runs `body(z, plane, work)` on every interior plane of `rhs`. Every member has its own planes and its own part
/// of `work`.
pub fn in_planes(
    platform: &dyn Platform,
    grid: &Grid,
    rhs: &mut [Point],
    work: &mut [f64],
    body: impl Fn(usize, &mut [Point], &mut [f64]) + Sync,
) {
    let members = platform.vcpus();
    let works = work.chunks_exact_mut(work.len() / members);
    let parts = grid.deal_planes(rhs, members).zip(grid.dealt(members)).zip(works);
    deal(platform, parts, |_, ((part, planes), work)| {
        for (plane, z) in part.chunks_exact_mut(grid.plane()).zip(planes) {
            body(z, plane, work);
        }
    });
}

/// Solves all lines of a plane of `rhs` along x or y.
pub fn solve_plane<const AXIS: usize>(
    grid: &Grid,
    solver: &impl LineSolver,
    z: usize,
    plane: &mut [Point],
    work: &mut [f64],
) {
    for first in grid.interior().step_by(WIDTH) {
        let here = Lines::along(grid, AXIS, first);
        let lines = here.moved_by(z * grid.plane());
        solver.down(lines, work, |index| gather(plane, here.places(index)));
        solver.up(lines, work, |index, points| {
            here.places(index).into_iter().zip(points).for_each(|(place, point)| plane[place] = point);
        });
    }
}

/// Solves all lines of `rhs` along z. Every member has its rows of every plane and its own part of `work`.
pub fn solve_across_planes(
    platform: &dyn Platform,
    grid: &Grid,
    solver: &impl LineSolver,
    rhs: &mut [Point],
    work: &mut [f64],
) {
    in_rows(platform, grid, rhs, work, |y, own, work| {
        for x in grid.interior().step_by(WIDTH) {
            let lines = Lines::along(grid, 2, x).moved_by(y * grid.row());
            solver.down(lines, work, |z| {
                let mut points = [[0.0; COMPONENTS]; WIDTH];
                points.copy_from_slice(&own.row(z, y)[x..x + WIDTH]);
                points
            });
            solver.up(lines, work, |z, points| own.row_mut(z, y)[x..x + WIDTH].copy_from_slice(&points));
        }
    });
}

/// Calls `body` with each interior y and its rows of every plane. Every member has its own rows and its own part of
/// `work`.
pub fn in_rows(
    platform: &dyn Platform,
    grid: &Grid,
    field: &mut [Point],
    work: &mut [f64],
    body: impl Fn(usize, &mut OwnRows<'_, Point>, &mut [f64]) + Sync,
) {
    let members = platform.vcpus();
    let works = work.chunks_exact_mut(work.len() / members);
    let parts = deal_rows(field, grid.row(), grid.row(), grid.dealt(members)).zip(works);
    deal(platform, parts, |_, (mut own, work)| {
        for y in own.rows() {
            body(y, &mut own, work);
        }
    });
}
