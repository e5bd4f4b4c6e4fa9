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
//!
//! Two lines or, with AVX2, four ([`crate::vectors`]).

use core::ops::Range;

use super::flow::{COMPONENTS, Grid, Point};
use crate::Platform;
use crate::parts::deal;
use crate::planes::{OwnRows, deal_rows};
use crate::vectors::{self, NARROW, Vectorized};

/// One number of each line.
pub type Lanes<const W: usize = NARROW> = [f64; W];
/// A point of each line, by component.
pub type PointLanes<const W: usize = NARROW> = [Lanes<W>; COMPONENTS];

/// Converts from line-major to component-major order.
#[inline(always)]
pub fn by_component<const W: usize>(points: [Point; W]) -> PointLanes<W> {
    let mut lined = [[0.0; W]; COMPONENTS];
    for (line, point) in points.iter().enumerate() {
        for (lanes, number) in lined.iter_mut().zip(point) {
            lanes[line] = *number;
        }
    }
    lined
}

/// Converts from component-major to line-major order.
#[inline(always)]
pub fn by_line<const W: usize>(points: &PointLanes<W>) -> [Point; W] {
    let mut by_line = [[0.0; COMPONENTS]; W];
    for (m, lanes) in points.iter().enumerate() {
        for (point, number) in by_line.iter_mut().zip(lanes) {
            point[m] = *number;
        }
    }
    by_line
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
    #[inline(always)]
    pub fn places<const W: usize>(&self, index: usize) -> [usize; W] {
        let mut places = [self.start + index * self.stride; W];
        for (line, place) in places.iter_mut().enumerate() {
            *place += line * self.gap;
        }
        places
    }
}

/// The points at these places.
#[inline(always)]
fn gather<const W: usize>(field: &[Point], places: [usize; W]) -> [Point; W] {
    let mut points = [[0.0; COMPONENTS]; W];
    for (point, place) in points.iter_mut().zip(places) {
        *point = field[place];
    }
    points
}

/// Solves the systems of `W` lines along one axis. Functions that are inlined are compiled for wider registers too
/// ([`Vectorized`]).
pub trait LineSolver: Sync {
    /// Most lines that are worth solving together.
    const LINES_MAX: usize;

    /// Goes down the lines: reads `rhs` at each interior index and leaves in `work` what the way up needs.
    fn down<const W: usize>(&self, lines: Lines, work: &mut [f64], rhs: impl Fn(usize) -> [Point; W]);

    /// Goes up the lines and passes the solution to `store`.
    fn up<const W: usize>(&self, lines: Lines, work: &[f64], store: impl FnMut(usize, [Point; W]));
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

/// Solves all lines of a plane of `rhs` along x or y, at most `W` together.
#[inline(always)]
pub fn solve_plane<const AXIS: usize, const W: usize>(
    grid: &Grid,
    solver: &impl LineSolver,
    z: usize,
    plane: &mut [Point],
    work: &mut [f64],
) {
    let (wide, rest) = in_groups(grid, W, solver);
    for first in wide.step_by(W) {
        solve_in_plane::<AXIS, W>(grid, solver, z, first, plane, work);
    }
    // An even edge has an even number of interior lines, so no line is left.
    for first in rest.step_by(NARROW) {
        solve_in_plane::<AXIS, NARROW>(grid, solver, z, first, plane, work);
    }
}

#[inline(always)]
fn solve_in_plane<const AXIS: usize, const W: usize>(
    grid: &Grid,
    solver: &impl LineSolver,
    z: usize,
    first: usize,
    plane: &mut [Point],
    work: &mut [f64],
) {
    let here = Lines::along(grid, AXIS, first);
    let lines = here.moved_by(z * grid.plane());
    solver.down::<W>(lines, work, |index| gather(plane, here.places::<W>(index)));
    solver.up::<W>(lines, work, |index, points| {
        here.places::<W>(index).into_iter().zip(points).for_each(|(place, point)| plane[place] = point);
    });
}

/// The lines of an axis that are solved in groups of `width`, and those that are left.
#[inline(always)]
fn in_groups<S: LineSolver>(grid: &Grid, width: usize, _: &S) -> (Range<usize>, Range<usize>) {
    let interior = grid.interior();
    let grouped = if width <= S::LINES_MAX { interior.len() / width * width } else { 0 };
    let border = interior.start + grouped;
    (interior.start..border, border..interior.end)
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
        vectors::run(AcrossPlanes { grid, solver, y, own, work });
    });
}

/// The lines along z through the points of one y.
struct AcrossPlanes<'a, 'm, S> {
    grid: &'a Grid,
    solver: &'a S,
    y: usize,
    own: &'a mut OwnRows<'m, Point>,
    work: &'a mut [f64],
}

impl<S: LineSolver> Vectorized for AcrossPlanes<'_, '_, S> {
    #[inline(always)]
    fn run<const W: usize>(mut self) {
        let (wide, rest) = in_groups(self.grid, W, self.solver);
        for x in wide.step_by(W) {
            self.solve::<W>(x);
        }
        for x in rest.step_by(NARROW) {
            self.solve::<NARROW>(x);
        }
    }
}

impl<S: LineSolver> AcrossPlanes<'_, '_, S> {
    /// Solves `W` lines from column `x` on.
    #[inline(always)]
    fn solve<const W: usize>(&mut self, x: usize) {
        let Self { grid, solver, y, own, work } = self;
        let lines = Lines::along(grid, 2, x).moved_by(*y * grid.row());
        solver.down::<W>(lines, work, |z| {
            let mut points = [[0.0; COMPONENTS]; W];
            points.copy_from_slice(&own.row(z, *y)[x..x + W]);
            points
        });
        solver.up::<W>(lines, work, |z, points| own.row_mut(z, *y)[x..x + W].copy_from_slice(&points));
    }
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
