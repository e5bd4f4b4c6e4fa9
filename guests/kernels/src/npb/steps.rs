//! A run of BT or SP: timed steps from the first guess towards the known solution, and the norms at the end.
//!
//! ```text
//!   init: forcing, first guess, one step, first guess again ─▶ compute: the steps
//!   ─▶ verify: five residuals, five errors
//! ```

use wideleaf_protocol::Name;

use super::flow::{self, COMPONENTS, ERROR_NAMES, Grid, Point, RESIDUAL_NAMES};
use super::lines::{LineSolver, in_planes, solve_across_planes, solve_plane};
use super::order::Order;
use super::rhs::{FieldPlaces, Fields, Sources};
use crate::arena::{Layout, Place};
use crate::kernel::MemoryNeed;
use crate::report::{self, COMPUTE, INIT, VERIFY};
use crate::vectors::{self, Vectorized};
use crate::{Arena, KernelError, Platform};

/// Number of norms that are compared.
const CHECKS: u64 = 2 * COMPONENTS as u64;

/// Sizes and reference values of a class.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Points along each edge of the cube.
    pub edge: usize,
    /// Number of timed steps.
    pub steps: u32,
    /// Length of a step, dt.
    pub dt: f64,
    /// Norms of the residual, the NPB's xcr.
    pub residual: Point,
    /// Norms of the error, the NPB's xce.
    pub error: Point,
}

impl Problem {
    const fn grid(&self) -> Grid {
        Grid { edge: self.edge }
    }
}

/// The kernel-specific part of a step.
pub struct Method<const SCALARS: usize> {
    /// Order in which the steps go through the fields.
    pub order: Order,
    /// Operations of a step by the NPB's formula: the factors of edge³, edge², edge and 1.
    pub operations: [f64; 4],
    /// Numbers of work space that each member needs.
    pub work: fn(&Grid) -> usize,
    /// Runs one step of `dt`, with the work space of all members.
    pub step: fn(&dyn Platform, &mut Fields<'_, SCALARS>, dt: f64, work: &mut [f64]),
}

impl<const SCALARS: usize> Method<SCALARS> {
    /// Memory of a run.
    pub fn memory(&self, problem: &Problem, vcpus: usize) -> MemoryNeed {
        MemoryNeed::of_layout(|layout| self.place(layout, problem, vcpus))
    }

    /// Appends fields and work space to the layout.
    fn place(&self, layout: &mut Layout, problem: &Problem, vcpus: usize) -> (FieldPlaces<SCALARS>, Place<f64>) {
        let grid = problem.grid();
        let fields = FieldPlaces::new(layout, &grid, self.order);
        (fields, layout.place((vcpus * (self.work)(&grid)) as u64))
    }

    /// Runs the whole problem in this arena.
    pub fn run<'a>(
        &self,
        platform: &dyn Platform,
        arena: &Arena<'_>,
        problem: &Problem,
    ) -> Result<(), KernelError<'a>> {
        let mut layout = Layout::at(arena.address());
        let (fields, work) = self.place(&mut layout, problem, platform.vcpus());
        let mut typed = report::claim(platform, arena, &layout, Name::literal("fields"))?;
        let ((mut fields, work), _) = report::phase(platform, INIT, || {
            let (mut fields, work) = (fields.take(&mut typed, problem.grid()), typed.take(work));
            fields.start(platform);
            (self.step)(platform, &mut fields, problem.dt, work);
            fields.restart(platform);
            (fields, work)
        });
        let ((), ticks) = report::phase(platform, COMPUTE, || {
            report::steps(platform, problem.steps).for_each(|_| (self.step)(platform, &mut fields, problem.dt, work));
        });
        report::rate(platform, self.operations(problem), ticks);
        let (errors, _) = report::phase(platform, VERIFY, || {
            let [residual, error] = fields.norms(platform, problem.dt);
            flow::compare(platform, &RESIDUAL_NAMES, residual, problem.residual)
                + flow::compare(platform, &ERROR_NAMES, error, problem.error)
        });
        report::verdict(platform, errors, CHECKS)
    }

    fn operations(&self, problem: &Problem) -> f64 {
        let edge = problem.edge as f64;
        let per_step = self.operations.iter().fold(0.0, |sum, factor| sum * edge + factor);
        f64::from(problem.steps) * per_step
    }
}

/// Computes the right-hand side of a step and solves along x, y and z, which leaves in `rhs` the change of u. It
/// goes plane by plane, so that a plane is still in the cache for the next sweep. Along z there is no such order.
pub fn sweep<const SCALARS: usize>(
    platform: &dyn Platform,
    sources: &Sources<'_, SCALARS>,
    rhs: &mut [Point],
    work: &mut [f64],
    (along_x, along_y, along_z): (&impl LineSolver, &impl LineSolver, &impl LineSolver),
) {
    let grid = &sources.grid;
    in_planes(platform, grid, rhs, work, |z, plane, work| {
        vectors::run(InPlane { sources, along_x, along_y, z, plane, work });
    });
    solve_across_planes(platform, grid, along_z, rhs, work);
}

/// The right-hand side of a plane, and its lines along x and y.
struct InPlane<'a, X, Y, const SCALARS: usize> {
    sources: &'a Sources<'a, SCALARS>,
    along_x: &'a X,
    along_y: &'a Y,
    z: usize,
    plane: &'a mut [Point],
    work: &'a mut [f64],
}

impl<X: LineSolver, Y: LineSolver, const SCALARS: usize> Vectorized for InPlane<'_, X, Y, SCALARS> {
    #[inline(always)]
    fn run<const W: usize>(self) {
        let Self { sources, along_x, along_y, z, plane, work } = self;
        sources.right_hand_side(z, plane);
        solve_plane::<0, W>(&sources.grid, along_x, z, plane, work);
        solve_plane::<1, W>(&sources.grid, along_y, z, plane, work);
    }
}
