//! The flow that BT, SP and LU compute: its equations, its known solution, the first guess, and the error of a
//! field.
//!
//! ```text
//!   cube, n points along each edge            L(u) = Σ over the axes of  − first difference of the convective flux
//!   u = (ρ, ρ·u, ρ·v, ρ·w, E) at each                                    + second difference of viscous terms and of u
//!                                                                        − fourth difference of u (damping)
//!   known solution ue ─▶ forcing = −L(ue), so that L(u) + forcing = 0 exactly for u = ue
//! ```
//!
//! Fields are stored as the NPB stores them: five numbers a point, then rows along x, planes of rows, and planes
//! behind each other. If the edge is even, rows and planes are one point longer than the edge, so that neighbours
//! along z, a whole plane apart, do not fall into one set of a cache.
//!
//! This module runs before and after the timed part and is written for reading. Source: Bailey et al., "The NAS
//! Parallel Benchmarks", RNR-94-007, section 3, and the NPB 3.4 release.

use core::array;
use core::ops::Range;

use wideleaf_protocol::Name;

use crate::Platform;
use crate::parts::{Results, cut, deal, ranges};
use crate::report::Compared;

/// Numbers at a point: density, momentum along x, y and z, energy.
pub const COMPONENTS: usize = 5;
/// Numbers of a field at one point.
pub type Point = [f64; COMPONENTS];

/// Ratio of specific heats, γ.
pub const C1: f64 = 1.4;
/// The constant γ − 1.
pub const C2: f64 = 0.4;
/// Viscosity: the NPB's c3·c4.
pub const C3C4: f64 = 0.1;
/// γ times the reciprocal of the Prandtl number.
pub const C1C5: f64 = C1 * 1.4;
/// Conductivity: the NPB's c1·c3·c4·c5.
pub const C1345: f64 = C1C5 * C3C4;
/// Extra factor of a velocity's diffusion along its own axis.
pub const OWN_AXIS: f64 = 4.0 / 3.0;
/// Weight of the damping: a quarter of the largest diffusion.
const DAMPING: f64 = 0.25;
/// Diffusion of all components along x, y and z.
pub const DIFFUSION: [f64; 3] = [0.75, 0.75, 1.0];

/// Largest relative error of a norm that the NPB passes.
const TOLERANCE: f64 = 1e-8;

/// The points and their storage layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Points along each edge of the cube.
    pub edge: usize,
}

impl Grid {
    /// Places from one point to the next along y: an odd number.
    pub const fn row(&self) -> usize {
        self.edge / 2 * 2 + 1
    }

    /// Places from one point to the next along z.
    pub const fn plane(&self) -> usize {
        self.row() * self.row()
    }

    /// Places from one point to the next along an axis.
    pub const fn stride(&self, axis: usize) -> usize {
        [1, self.row(), self.plane()][axis]
    }

    /// Places in a field, including the unused ones between rows.
    pub const fn places(&self) -> usize {
        self.plane() * self.edge
    }

    /// Numbers in a field of points.
    pub const fn numbers(&self) -> u64 {
        (self.places() * COMPONENTS) as u64
    }

    /// Place of a point in a field.
    pub const fn place(&self, [x, y, z]: [usize; 3]) -> usize {
        z * self.plane() + y * self.row() + x
    }

    /// Indices along an axis that are not on a face.
    pub const fn interior(&self) -> Range<usize> {
        1..self.edge - 1
    }

    /// Whether a point lies on no face.
    pub fn is_interior(&self, point: [usize; 3]) -> bool {
        point.iter().all(|index| self.interior().contains(index))
    }

    /// Number of points on no face.
    pub const fn interior_points(&self) -> f64 {
        let edge = (self.edge - 2) as f64;
        edge * edge * edge
    }

    /// Position along an axis: 0 at one face, 1 at the other.
    pub fn position(&self, index: usize) -> f64 {
        index as f64 / (self.edge - 1) as f64
    }

    /// The interior of an axis, split among the members.
    pub fn dealt(&self, members: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        ranges(self.edge - 2, members).map(|range| range.start + 1..range.end + 1)
    }

    /// The interior planes of a field, split among the members.
    pub fn deal_planes<'s, T>(
        &self,
        field: &'s mut [T],
        members: usize,
    ) -> impl Iterator<Item = &'s mut [T]> + use<'s, T> {
        let plane = self.plane();
        cut(&mut field[plane..], self.dealt(members).map(move |planes| planes.len() * plane))
    }

    /// Factors of the differences on this grid.
    pub fn factors(&self) -> Factors {
        let per_spacing = (self.edge - 1) as f64;
        let viscous = C3C4 * per_spacing * per_spacing;
        Factors {
            first: per_spacing / 2.0,
            second: per_spacing * per_spacing,
            velocity: viscous,
            kinetic: viscous * (1.0 - C1C5),
            squared: viscous / 6.0,
            energy: viscous * C1C5,
            damping: DAMPING,
        }
    }
}

/// Factors of the differences between neighbours. The NPB's names are t2, t1 and con2 to con5.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    /// Factor of a first difference, two spacings wide (t2).
    pub first: f64,
    /// Factor of a second difference (t1).
    pub second: f64,
    /// Factor of a second difference of the velocities (con2), without [`OWN_AXIS`].
    pub velocity: f64,
    /// Factor of the kinetic energy per mass (con3).
    pub kinetic: f64,
    /// Factor of the squared velocity along the axis (con4).
    pub squared: f64,
    /// Factor of the energy per mass (con5).
    pub energy: f64,
    /// Factor of the fourth difference that damps (dssp).
    pub damping: f64,
}

impl Factors {
    /// Weights of diffusion and damping along an axis, for the points two and one before, here, one and two behind:
    /// the part that is linear in u and the same for every component.
    pub fn linear_weights(&self, grid: &Grid, axis: usize, index: usize) -> [f64; 5] {
        let diffusion = self.second * DIFFUSION[axis];
        let mut weights = damping_weights(index, grid.edge).map(|weight| -self.damping * weight);
        weights[1] += diffusion;
        weights[2] -= 2.0 * diffusion;
        weights[3] += diffusion;
        weights
    }
}

/// Weights of the damping for the points two and one before, here, one and two behind. Near a face, weights of
/// points outside the cube, and those that would damp the face, are zero.
pub fn damping_weights(index: usize, edge: usize) -> [f64; 5] {
    match (index, edge - 1 - index) {
        (1, _) => [0.0, 0.0, 5.0, -4.0, 1.0],
        (2, _) => [0.0, -4.0, 6.0, -4.0, 1.0],
        (_, 2) => [1.0, -4.0, 6.0, -4.0, 0.0],
        (_, 1) => [1.0, -4.0, 5.0, 0.0, 0.0],
        _ => [1.0, -4.0, 6.0, -4.0, 1.0],
    }
}

/// Coefficients of the known solution: for each component 1, then x, y, z, then their squares, cubes and fourth powers.
const SOLUTION: [[f64; 13]; COMPONENTS] = [
    [2.0, 0.0, 0.0, 4.0, 5.0, 3.0, 0.5, 0.02, 0.01, 0.03, 0.5, 0.4, 0.3],
    [1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.01, 0.03, 0.02, 0.4, 0.3, 0.5],
    [2.0, 2.0, 0.0, 0.0, 0.0, 2.0, 3.0, 0.04, 0.03, 0.05, 0.3, 0.5, 0.4],
    [2.0, 2.0, 0.0, 0.0, 0.0, 2.0, 3.0, 0.03, 0.05, 0.04, 0.2, 0.1, 0.3],
    [5.0, 4.0, 3.0, 2.0, 0.1, 0.4, 0.3, 0.05, 0.04, 0.03, 0.1, 0.3, 0.2],
];

/// The known solution at a position.
pub fn solution(position: [f64; 3]) -> Point {
    SOLUTION.map(|row| {
        let along = |axis: usize| {
            let at = position[axis];
            at * (row[1 + axis] + at * (row[4 + axis] + at * (row[7 + axis] + at * row[10 + axis])))
        };
        row[0] + along(0) + along(1) + along(2)
    })
}

/// The field before the first step: the known solution on the faces, a blend of the faces inside.
pub fn first_guess(grid: &Grid, point: [usize; 3]) -> Point {
    let position = point.map(|index| grid.position(index));
    if !grid.is_interior(point) {
        return solution(position);
    }
    let [x, y, z] = [0, 1, 2].map(|axis| between_faces(position, axis));
    array::from_fn(|m| {
        let (x, y, z) = (x[m], y[m], z[m]);
        x + y + z - x * y - x * z - y * z + x * y * z
    })
}

/// Blend of the values on the two faces across an axis, by the distance from them.
fn between_faces(position: [f64; 3], axis: usize) -> Point {
    let on_face = |at| {
        let mut face = position;
        face[axis] = at;
        solution(face)
    };
    let (near, far, at) = (on_face(0.0), on_face(1.0), position[axis]);
    array::from_fn(|m| (1.0 - at) * near[m] + at * far[m])
}

/// Operator L of the known solution at an interior point. The forcing is its negative.
pub fn operator_on_solution(grid: &Grid, point: [usize; 3]) -> Point {
    operator(grid, point, |offsets| {
        // The fourth difference's weights are 0 for points outside the cube, and the solution is a polynomial,
        // defined there as well.
        solution(array::from_fn(|axis| (point[axis] as f64 + offsets[axis]) / (grid.edge - 1) as f64))
    })
}

/// Operator L at an interior point of a field. `at(offsets)` is the field's value at that many points further along
/// x, y and z.
pub fn operator(grid: &Grid, point: [usize; 3], at: impl Fn([f64; 3]) -> Point) -> Point {
    let factors = grid.factors();
    let mut sum = [0.0; COMPONENTS];
    for axis in 0..3 {
        let line = [-2.0, -1.0, 0.0, 1.0, 2.0].map(|offset| {
            let mut offsets = [0.0; 3];
            offsets[axis] = offset;
            at(offsets)
        });
        let part = along(&factors, axis, &line, damping_weights(point[axis], grid.edge));
        sum = array::from_fn(|m| sum[m] + part[m]);
    }
    sum
}

/// Contribution of one axis to L, from five neighbouring points with the point itself as the third.
fn along(factors: &Factors, axis: usize, line: &[Point; 5], damping: [f64; 5]) -> Point {
    let [_, before, here, behind, _] = line;
    let (flux_before, flux_behind) = (flux(axis, before), flux(axis, behind));
    let [viscous_before, viscous, viscous_behind] = [before, here, behind].map(|u| viscous(factors, axis, u));
    array::from_fn(|m| {
        let damped: f64 = line.iter().zip(damping).map(|(u, weight)| weight * u[m]).sum();
        factors.second * DIFFUSION[axis] * (behind[m] - 2.0 * here[m] + before[m])
            - factors.first * (flux_behind[m] - flux_before[m])
            + (viscous_behind[m] - 2.0 * viscous[m] + viscous_before[m])
            - factors.damping * damped
    })
}

/// Flux along an axis.
fn flux(axis: usize, u: &Point) -> Point {
    let velocity = u[axis + 1] / u[0];
    let kinetic = kinetic_energy(u);
    let mut flux = u.map(|component| component * velocity);
    flux[0] = u[axis + 1];
    flux[axis + 1] += C2 * (u[4] - kinetic);
    flux[4] = (C1 * u[4] - C2 * kinetic) * velocity;
    flux
}

/// Quantities of which viscosity and conduction take the second difference.
fn viscous(factors: &Factors, axis: usize, u: &Point) -> Point {
    let mut viscous = u.map(|component| factors.velocity * component / u[0]);
    viscous[0] = 0.0;
    viscous[axis + 1] *= OWN_AXIS;
    let velocity = u[axis + 1] / u[0];
    viscous[4] = factors.kinetic * kinetic_energy(u) / u[0]
        + factors.squared * velocity * velocity
        + factors.energy * u[4] / u[0];
    viscous
}

/// Kinetic energy at a point.
pub fn kinetic_energy(u: &Point) -> f64 {
    (u[1] * u[1] + u[2] * u[2] + u[3] * u[3]) / (2.0 * u[0])
}

/// Sets every point of a field, except the places between the rows.
pub fn fill(platform: &dyn Platform, grid: &Grid, field: &mut [Point], value: impl Fn([usize; 3]) -> Point + Sync) {
    let members = platform.vcpus();
    let planes = || ranges(grid.edge, members);
    let parts = cut(field, planes().map(|planes| planes.len() * grid.plane())).zip(planes());
    deal(platform, parts, |_, (part, planes)| {
        for (plane, z) in part.chunks_exact_mut(grid.plane()).zip(planes) {
            for (row, y) in plane.chunks_exact_mut(grid.row()).take(grid.edge).zip(0..) {
                row.iter_mut().take(grid.edge).zip(0..).for_each(|(point, x)| *point = value([x, y, z]));
            }
        }
    });
}

/// Norm of the difference from the known solution over the points with all indices in `indices` (xce).
pub fn error_norm(platform: &dyn Platform, grid: &Grid, field: &[Point], indices: Range<usize>) -> Point {
    norm(platform, grid, indices, |point| {
        let (known, found) = (solution(point.map(|index| grid.position(index))), &field[grid.place(point)]);
        array::from_fn(|m| found[m] - known[m])
    })
}

/// Norm of a field over the interior (xcr, if the field is the residual of the equations).
pub fn interior_norm(platform: &dyn Platform, grid: &Grid, field: &[Point]) -> Point {
    norm(platform, grid, grid.interior(), |point| field[grid.place(point)])
}

/// Root of the sum of squares of `value`, divided by the number of interior points regardless of which points are
/// summed.
fn norm(
    platform: &dyn Platform,
    grid: &Grid,
    indices: Range<usize>,
    value: impl Fn([usize; 3]) -> Point + Sync,
) -> Point {
    let first = indices.start;
    let planes = ranges(indices.len(), platform.vcpus()).map(|range| range.start + first..range.end + first);
    let sums: Results<Point> = deal(platform, planes, |_, planes| {
        let mut sum = [0.0; COMPONENTS];
        for z in planes {
            for y in indices.clone() {
                for x in indices.clone() {
                    let value = value([x, y, z]);
                    sum = array::from_fn(|m| sum[m] + value[m] * value[m]);
                }
            }
        }
        sum
    });
    array::from_fn(|m| {
        let sum: f64 = sums.iter().flatten().map(|sum| sum[m]).sum();
        libm::sqrt(sum / grid.interior_points())
    })
}

/// Names of five norms and of their published values.
pub type NormNames = [[Name<'static>; 2]; COMPONENTS];

/// Names of the NPB's xcr.
pub const RESIDUAL_NAMES: NormNames = [
    [Name::literal("residual_1"), Name::literal("residual_1_reference")],
    [Name::literal("residual_2"), Name::literal("residual_2_reference")],
    [Name::literal("residual_3"), Name::literal("residual_3_reference")],
    [Name::literal("residual_4"), Name::literal("residual_4_reference")],
    [Name::literal("residual_5"), Name::literal("residual_5_reference")],
];

/// Names of the NPB's xce.
pub const ERROR_NAMES: NormNames = [
    [Name::literal("error_1"), Name::literal("error_1_reference")],
    [Name::literal("error_2"), Name::literal("error_2_reference")],
    [Name::literal("error_3"), Name::literal("error_3_reference")],
    [Name::literal("error_4"), Name::literal("error_4_reference")],
    [Name::literal("error_5"), Name::literal("error_5_reference")],
];

/// Prints five norms beside the published ones. Returns the number of wrong ones.
pub fn compare(platform: &dyn Platform, names: &NormNames, found: Point, published: Point) -> u64 {
    let compared = names.iter().zip(found.into_iter().zip(published));
    compared
        .map(|(&[name, reference_name], (value, reference))| {
            let check = Compared { name, reference_name, value, reference, tolerance: TOLERANCE };
            check.emit(platform);
            u64::from(!check.is_right())
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::string::ToString;
    use std::sync::Mutex;
    use std::vec;

    use wideleaf_protocol::{Message, parse};

    use super::*;
    use crate::native;

    #[test]
    fn damping_weights_add_up_to_zero_except_next_to_a_face() {
        let sum = |index| damping_weights(index, 12).iter().sum::<f64>();
        assert!((3..=8).all(|index| sum(index) == 0.0));
        assert_eq!([1, 2, 9, 10].map(sum), [2.0, -1.0, -1.0, 2.0]);
    }

    #[test]
    fn the_first_guess_is_the_solution_on_faces_and_not_inside() {
        let grid = Grid { edge: 12 };
        let known = |point: [usize; 3]| solution(point.map(|index| grid.position(index)));
        for face in [[0, 3, 4], [5, 11, 2], [7, 8, 0], [11, 11, 11]] {
            assert_eq!(first_guess(&grid, face), known(face));
        }
        assert_ne!(first_guess(&grid, [5, 5, 5]), known([5, 5, 5]));
    }

    #[test]
    fn the_operator_of_a_field_at_rest_is_zero_away_from_faces() {
        let rest = |_| [1.0, 0.0, 0.0, 0.0, 2.0];
        assert_eq!(operator(&Grid { edge: 12 }, [5, 6, 7], rest), [0.0; COMPONENTS]);
    }

    #[test]
    fn the_error_of_the_solution_is_zero_for_any_number_of_members() {
        let grid = Grid { edge: 12 };
        let mut field = vec![[f64::NAN; COMPONENTS]; grid.places()];
        for members in [1, 3] {
            let norm = native::run(members, 0, Box::new(|_| ()), |platform| {
                fill(platform, &grid, &mut field, |point| solution(point.map(|index| grid.position(index))));
                error_norm(platform, &grid, &field, 0..grid.edge)
            });
            assert_eq!(norm, [0.0; COMPONENTS], "{members} members");
        }
    }

    #[test]
    fn norms_that_are_no_numbers_are_wrong_and_print_no_line_that_a_host_cannot_read() {
        const NAMES: NormNames = [[Name::literal("residual"), Name::literal("residual_reference")]; COMPONENTS];
        let found = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0, 2.0];
        let lines = Mutex::new(vec![]);
        let sink =
            Box::new(|message: &Message<'_>| lines.lock().expect("no test thread panics").push(message.to_string()));
        let wrong = native::run(1, 0, sink, |platform| compare(platform, &NAMES, found, [1.0; COMPONENTS]));
        assert_eq!(wrong, 4);
        let lines = lines.into_inner().expect("no test thread panics");
        assert_eq!(lines.len(), 2 + COMPONENTS, "two norms and each reference: {lines:?}");
        assert!(lines.iter().all(|line| matches!(parse(line), Some(Ok(_)))), "{lines:?}");
    }
}
