//! The fields of BT and SP, and the right-hand side of their steps: dt · (forcing + L(u)).
//!
//! ```text
//!   u ──derive──▶ us vs ws qs rho_i square (speed)        one number a point each
//!   forcing, u at 13 points, those at 7 ──right_hand_side──▶ rhs ──▶ x, y, z solves (bt, sp) ──▶ u += rhs
//! ```
//!
//! One pass over the interior computes the right-hand side, row by row. First come the terms linear in u with the
//! same weights for every component: for them a row is plain numbers, five a point. Then, for each axis, come the
//! terms that involve velocity and pressure.

use core::array;
use core::ops::Range;

use super::flow::{self, C1, C2, COMPONENTS, Factors, Grid, OWN_AXIS, Point};
use super::order::Order;
use crate::Platform;
use crate::arena::{Layout, Place, Typed};
use crate::parts::{cut, deal, ranges};

/// Index of the velocity along x; those along y and z follow.
pub const VELOCITY: usize = 0;
/// Index of the kinetic energy per mass, the NPB's qs.
pub const QS: usize = 3;
/// Index of the reciprocal of the density, 1/ρ.
pub const RHO_I: usize = 4;
/// Index of the kinetic energy, the NPB's square.
pub const SQUARE: usize = 5;
/// Index of the speed of sound, which only SP has.
pub const SPEED: usize = 6;

/// Places of the fields in the arena.
pub struct FieldPlaces<const SCALARS: usize> {
    order: Order,
    u: Place<f64>,
    rhs: Place<f64>,
    forcing: Place<f64>,
    scalars: [Place<f64>; SCALARS],
}

impl<const SCALARS: usize> FieldPlaces<SCALARS> {
    /// Appends the fields to the layout.
    pub fn new(layout: &mut Layout, grid: &Grid, order: Order) -> Self {
        let (numbers, places) = (grid.numbers(), grid.places() as u64);
        let u = layout.place(numbers);
        match order {
            Order::Fused => {
                let (rhs, forcing) = (layout.place(numbers), layout.place(numbers));
                Self { order, u, rhs, forcing, scalars: [(); SCALARS].map(|()| layout.place(places)) }
            }
            // As in the NPB's common block: this order, and no gaps.
            #[cfg(feature = "std")]
            Order::Reference => {
                let scalars = [(); SCALARS].map(|()| layout.place_behind(places));
                let (rhs, forcing) = (layout.place_behind(numbers), layout.place_behind(numbers));
                Self { order, u, rhs, forcing, scalars }
            }
        }
    }

    /// Takes the fields, all zero.
    pub fn take<'m>(self, typed: &mut Typed<'m>, grid: Grid) -> Fields<'m, SCALARS> {
        let Self { order, u, rhs, forcing, scalars } = self;
        let u = points(typed, u);
        match order {
            Order::Fused => {
                let (rhs, forcing) = (points(typed, rhs), points(typed, forcing));
                Fields { grid, u, rhs, forcing, scalars: scalars.map(|place| typed.take(place)) }
            }
            #[cfg(feature = "std")]
            Order::Reference => {
                let scalars = scalars.map(|place| typed.take(place));
                Fields { grid, u, rhs: points(typed, rhs), forcing: points(typed, forcing), scalars }
            }
        }
    }
}

fn points<'m>(typed: &mut Typed<'m>, place: Place<f64>) -> &'m mut [Point] {
    typed.take(place).as_chunks_mut().0
}

/// The fields of a run.
pub struct Fields<'m, const SCALARS: usize> {
    /// Grid of the fields.
    pub grid: Grid,
    /// State of the flow.
    pub u: &'m mut [Point],
    /// The right-hand side, and at the end the change of `u` in a step. 0 on the faces.
    pub rhs: &'m mut [Point],
    /// Forcing: −L of the known solution. 0 on the faces.
    pub forcing: &'m mut [Point],
    /// Quantities that follow from `u` at each point.
    pub scalars: [&'m mut [f64]; SCALARS],
}

impl<const SCALARS: usize> Fields<'_, SCALARS> {
    /// Sets the forcing, and the field before the first step.
    pub fn start(&mut self, platform: &dyn Platform) {
        let grid = self.grid;
        flow::fill(platform, &grid, self.forcing, |point| {
            let operator =
                if grid.is_interior(point) { flow::operator_on_solution(&grid, point) } else { [0.0; COMPONENTS] };
            operator.map(|component| -component)
        });
        self.restart(platform);
    }

    /// Sets the field before the first step.
    pub fn restart(&mut self, platform: &dyn Platform) {
        let grid = self.grid;
        flow::fill(platform, &grid, self.u, |point| flow::first_guess(&grid, point));
    }

    /// Computes the scalars of all points from `u`.
    pub fn derive(&mut self, platform: &dyn Platform) {
        let (grid, members, u) = (self.grid, platform.vcpus(), &*self.u);
        let planes = || ranges(grid.edge, members);
        let mut cuts =
            self.scalars.each_mut().map(|scalar| cut(scalar, planes().map(|planes| planes.len() * grid.plane())));
        let parts = planes().map(|planes| {
            (planes, cuts.each_mut().map(|cut| cut.next().expect("there is a part for every range of planes")))
        });
        deal(platform, parts, |_, (planes, mut scalars)| {
            for (z, part_z) in planes.zip(0..) {
                for y in 0..grid.edge {
                    let (from, to) = (grid.place([0, y, z]), grid.place([0, y, part_z]));
                    let row = scalars.each_mut().map(|scalar| &mut scalar[to..to + grid.edge]);
                    derive_row(&u[from..from + grid.edge], row);
                }
            }
        });
    }

    /// Fields that a step of `dt` reads, and `rhs`, which it writes. The scalars must be up to date.
    pub fn for_step(&mut self, dt: f64) -> (Sources<'_, SCALARS>, &mut [Point]) {
        let sources = Sources {
            grid: self.grid,
            u: self.u,
            forcing: self.forcing,
            scalars: self.scalars.each_ref().map(|scalar| &**scalar),
            factors: scaled(self.grid.factors(), dt),
            dt,
        };
        (sources, self.rhs)
    }

    /// Computes the right-hand side of a step of `dt` in the interior. The scalars must be up to date.
    fn right_hand_side(&mut self, platform: &dyn Platform, dt: f64) {
        let (grid, members) = (self.grid, platform.vcpus());
        let (sources, rhs) = self.for_step(dt);
        deal(platform, grid.deal_planes(rhs, members).zip(grid.dealt(members)), |_, (part, planes)| {
            for (plane, z) in part.chunks_exact_mut(grid.plane()).zip(planes) {
                sources.right_hand_side(z, plane);
            }
        });
    }

    /// Adds the solution in `rhs` to `u`.
    pub fn advance(&mut self, platform: &dyn Platform) {
        let (grid, members, rhs) = (self.grid, platform.vcpus(), &*self.rhs);
        let parts = grid.deal_planes(self.u, members).zip(grid.dealt(members));
        deal(platform, parts, |_, (part, planes)| {
            let change = &rhs[planes.start * grid.plane()..planes.end * grid.plane()];
            let numbers = part.as_flattened_mut().iter_mut().zip(change.as_flattened());
            numbers.for_each(|(u, change)| *u += change);
        });
    }

    /// Norms of the residual of the equations, and of the difference from the known solution: the NPB's xcr and
    /// xce.
    pub fn norms(&mut self, platform: &dyn Platform, dt: f64) -> [Point; 2] {
        let error = flow::error_norm(platform, &self.grid, self.u, 0..self.grid.edge);
        self.derive(platform);
        self.right_hand_side(platform, dt);
        let residual = flow::interior_norm(platform, &self.grid, self.rhs).map(|norm| norm / dt);
        [residual, error]
    }
}

fn derive_row<const SCALARS: usize>(u: &[Point], scalars: [&mut [f64]; SCALARS]) {
    for (x, u) in u.iter().enumerate() {
        let rho_i = 1.0 / u[0];
        let velocity = [u[1] * rho_i, u[2] * rho_i, u[3] * rho_i];
        let square = 0.5 * (u[1] * velocity[0] + u[2] * velocity[1] + u[3] * velocity[2]);
        for (axis, velocity) in velocity.into_iter().enumerate() {
            scalars[VELOCITY + axis][x] = velocity;
        }
        scalars[QS][x] = square * rho_i;
        scalars[RHO_I][x] = rho_i;
        scalars[SQUARE][x] = square;
        if SCALARS > SPEED {
            scalars[SPEED][x] = libm::sqrt(C1 * C2 * rho_i * (u[4] - square));
        }
    }
}

fn scaled(factors: Factors, dt: f64) -> Factors {
    let Factors { first, second, velocity, kinetic, squared, energy, damping } = factors;
    Factors {
        first: dt * first,
        second: dt * second,
        velocity: dt * velocity,
        kinetic: dt * kinetic,
        squared: dt * squared,
        energy: dt * energy,
        damping: dt * damping,
    }
}

/// Fields that a step reads.
pub struct Sources<'a, const SCALARS: usize> {
    /// Grid of the fields.
    pub grid: Grid,
    /// State of the flow.
    pub u: &'a [Point],
    /// Forcing: −L of the known solution.
    pub forcing: &'a [Point],
    /// Quantities that follow from `u` at each point.
    pub scalars: [&'a [f64]; SCALARS],
    /// Factors of the differences, times dt.
    pub factors: Factors,
    /// Length of the step.
    pub dt: f64,
}

impl<const SCALARS: usize> Sources<'_, SCALARS> {
    /// Computes the right-hand side in a plane across z.
    #[inline(always)]
    pub fn right_hand_side(&self, z: usize, plane: &mut [Point]) {
        for y in self.grid.interior() {
            self.row(y, z, &mut plane[y * self.grid.row() + 1..][..self.grid.edge - 2]);
        }
    }

    /// Computes the interior of one row.
    #[inline(always)]
    fn row(&self, y: usize, z: usize, row: &mut [Point]) {
        let edge = self.grid.edge;
        // Next to a face the weights along x differ.
        for run in [1..2, 2..3, 3..edge - 3, edge - 3..edge - 2, edge - 2..edge - 1] {
            let part = &mut row[run.start - 1..run.end - 1];
            self.linear(run, y, z, part);
        }
        let start = self.grid.place([1, y, z]);
        let mut change = [[0.0; INTERIOR_MAX]; COMPONENTS];
        self.add_flux::<0, _>(start, row.len(), &mut change);
        self.add_flux::<1, _>(start, row.len(), &mut change);
        self.add_flux::<2, _>(start, row.len(), &mut change);
        let columns = change.each_ref().map(|column| &column[..row.len()]);
        for (x, point) in row.iter_mut().enumerate() {
            point.iter_mut().zip(columns).for_each(|(number, column)| *number += column[x]);
        }
    }

    /// Computes forcing, diffusion and damping of a run of points with equal weights.
    #[inline(always)]
    fn linear(&self, run: Range<usize>, y: usize, z: usize, part: &mut [Point]) {
        let start = self.grid.place([run.start, y, z]);
        let weights: [[f64; 5]; 3] =
            array::from_fn(|axis| self.factors.linear_weights(&self.grid, axis, [run.start, y, z][axis]));
        let centre: f64 = weights.iter().map(|weights| weights[2]).sum();
        let numbers = part.len() * COMPONENTS;
        // A missing neighbour has weight 0, and the point itself stands for it.
        let around: [[&[f64]; 5]; 3] = array::from_fn(|axis| {
            array::from_fn(|neighbour| {
                let neighbour = if weights[axis][neighbour] == 0.0 { 2 } else { neighbour };
                let from = start + neighbour * self.grid.stride(axis) - 2 * self.grid.stride(axis);
                &self.u[from..].as_flattened()[..numbers]
            })
        });
        let forcing = &self.forcing[start..].as_flattened()[..numbers];
        for (n, number) in part.as_flattened_mut()[..numbers].iter_mut().enumerate() {
            let mut sum = self.dt * forcing[n] + centre * around[0][2][n];
            for (weights, around) in weights.iter().zip(&around) {
                sum += weights[0] * around[0][n] + weights[1] * around[1][n];
                sum += weights[3] * around[3][n] + weights[4] * around[4][n];
            }
            *number = sum;
        }
    }

    /// Adds flux and viscosity along an axis to `change`, for the points from `start` on. As u = ρ·(1, v, …), the
    /// flux of a momentum is its velocity times the flux of mass.
    #[inline(always)]
    pub fn add_flux<const AXIS: usize, const N: usize>(&self, start: usize, count: usize, change: &mut Columns<N>) {
        let (stride, factors) = (self.grid.stride(AXIS), self.factors);
        let scalar = |index: usize| Neighbours::new(self.scalars[index], start, stride, count);
        let velocity = [scalar(VELOCITY), scalar(VELOCITY + 1), scalar(VELOCITY + 2)];
        let (own, qs, rho_i, square) = (&velocity[AXIS], scalar(QS), scalar(RHO_I), scalar(SQUARE));
        let u = Neighbours::new(self.u, start, stride, count);
        let [mass, momentum @ .., energy] = change;
        let momentum = momentum.each_mut().map(|column| &mut column[..count]);
        let (mass, energy) = (&mut mass[..count], &mut energy[..count]);
        for x in 0..count {
            let (mass_before, mass_behind) = (u.before[x][AXIS + 1], u.behind[x][AXIS + 1]);
            let [e_before, e, e_behind] = [u.before[x][4], u.here[x][4], u.behind[x][4]];
            mass[x] -= factors.first * (mass_behind - mass_before);
            for axis in 0..3 {
                let (v, own_axis) = (&velocity[axis], if axis == AXIS { OWN_AXIS } else { 1.0 });
                momentum[axis][x] += factors.velocity * own_axis * (v.behind[x] - 2.0 * v.here[x] + v.before[x])
                    - factors.first * (mass_behind * v.behind[x] - mass_before * v.before[x]);
            }
            let pressure = C2 * ((e_behind - square.behind[x]) - (e_before - square.before[x]));
            momentum[AXIS][x] -= factors.first * pressure;
            let flux_before = (C1 * e_before - C2 * square.before[x]) * own.before[x];
            let flux_behind = (C1 * e_behind - C2 * square.behind[x]) * own.behind[x];
            let squares = [own.before[x] * own.before[x], own.here[x] * own.here[x], own.behind[x] * own.behind[x]];
            let energies = [e_before * rho_i.before[x], e * rho_i.here[x], e_behind * rho_i.behind[x]];
            energy[x] += factors.kinetic * (qs.behind[x] - 2.0 * qs.here[x] + qs.before[x])
                + factors.squared * (squares[2] - 2.0 * squares[1] + squares[0])
                + factors.energy * (energies[2] - 2.0 * energies[1] + energies[0])
                - factors.first * (flux_behind - flux_before);
        }
    }
}

/// Neighbouring points of a row component by component: their numbers are adjacent, as vector instructions need
/// them.
pub type Columns<const N: usize> = [[f64; N]; COMPONENTS];

/// Interior of the largest class's edge, which has 162 points. Slicing would panic on a longer row.
const INTERIOR_MAX: usize = 160;

/// `count` elements of a field, and those one stride before and behind.
struct Neighbours<'a, T> {
    before: &'a [T],
    here: &'a [T],
    behind: &'a [T],
}

impl<'a, T> Neighbours<'a, T> {
    #[inline(always)]
    fn new(field: &'a [T], start: usize, stride: usize, count: usize) -> Self {
        let from = |start: usize| &field[start..][..count];
        Self { before: from(start - stride), here: from(start), behind: from(start + stride) }
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::super::reference;
    use super::*;
    use crate::{Arena, native};

    #[test]
    fn the_right_hand_side_is_the_operator_for_any_number_of_members_and_any_order() {
        let (grid, dt) = (Grid { edge: 12 }, 0.5);
        for (order, members) in [(Order::Fused, 1), (Order::Fused, 3), (Order::Reference, 1), (Order::Reference, 3)] {
            let mut words = vec![0; 1 << 16];
            let arena = Arena::from_words(&mut words);
            let mut layout = Layout::at(arena.address());
            let places = FieldPlaces::<6>::new(&mut layout, &grid, order);
            let mut typed = arena.typed(&layout).expect("512 KiB hold 21 numbers for each of 2028 places");
            let mut fields = places.take(&mut typed, grid);
            native::run(members, 0, Box::new(|_| ()), |platform| {
                fields.start(platform);
                match order {
                    Order::Fused => {
                        fields.derive(platform);
                        fields.right_hand_side(platform, dt);
                    }
                    Order::Reference => reference::right_hand_side(platform, &mut fields, dt, &mut [0.0; 3]),
                }
            });
            for point in [[1, 1, 1], [2, 10, 9], [5, 6, 7], [10, 2, 1], [9, 9, 10]] {
                let operator = flow::operator(&grid, point, |offsets| {
                    let moved = array::from_fn(|axis| (point[axis] as f64 + offsets[axis]).clamp(0.0, 11.0) as usize);
                    fields.u[grid.place(moved)]
                });
                let place = grid.place(point);
                let expected = fields.forcing[place].into_iter().zip(operator).map(|(forcing, l)| dt * (forcing + l));
                for (found, expected) in fields.rhs[place].into_iter().zip(expected) {
                    assert!((found - expected).abs() < 1e-10, "{order:?} {point:?}: {found} is not {expected}");
                }
            }
            assert_eq!(fields.rhs[grid.place([0, 5, 5])], [0.0; COMPONENTS], "nothing is written on the faces");
        }
    }
}
