//! The table of the electrons, and its interpolation.
//!
//! ```text
//!   21 arrays, one behind the other, each 201 rows of one temperature with 541 densities:
//!
//!     free energy, its derivatives to the second by density and by temperature    9    biquintic
//!     dP/dρ, chemical potential, number density, each with 3 derivatives         12    bicubic
//!
//!   a lookup:  row j      … │ i │ i+1 │ …        two pairs of each array, 4,328 bytes apart; 850 KiB to the next
//!              row j + 1  … │ i │ i+1 │ …        array, so 21 pages of 64 KiB or 4 KiB at least, and 9 of 2 MiB
//! ```
//!
//! Values and derivatives at the four corners of a cell give a polynomial. Its value, slopes and curvature continue
//! in the next cell. The derivative of the interpolated free energy gives pressure, entropy and heat, so that these
//! fulfil the relations of thermodynamics exactly, whatever the error of the interpolation.

use core::f64::consts::LN_10;

use super::electrons::{AtDensity, AtTemperature, Point};
use crate::arena::{Layout, Place, Typed};
use crate::npb::logarithm::ln;

/// Densities of the table: 10⁻¹² to 10¹⁵ g/cm³, twenty a decade.
const DENSITIES: usize = 541;
const DENSITY_LOG_MIN: f64 = -12.0;
/// Temperatures of the table: 10³ to 10¹³ K, twenty a decade.
const TEMPERATURES: usize = 201;
const TEMPERATURE_LOG_MIN: f64 = 3.0;
/// Entries of a decade.
const PER_DECADE: f64 = 20.0;

/// Entries of an array.
pub const POINTS: usize = DENSITIES * TEMPERATURES;
/// Number of arrays.
const ARRAYS: usize = 21;
/// The first arrays of the free energy and of the three other quantities; those of one quantity are adjacent.
const FREE: usize = 0;
const STIFFNESS: usize = 9;
const POTENTIAL: usize = 13;
const NUMBER: usize = 17;
const _: () = assert!(NUMBER + 4 == ARRAYS, "nine arrays of one quantity, and four of each of three");

type Array = [f64; POINTS];

/// Places of the table in the arena.
pub struct Places {
    arrays: Place<Array>,
    densities: Place<f64>,
    temperatures: Place<f64>,
}

impl Places {
    /// Appends the table to a layout.
    pub fn new(layout: &mut Layout) -> Self {
        Self {
            arrays: layout.place(ARRAYS as u64),
            densities: layout.place_behind(DENSITIES as u64),
            temperatures: layout.place_behind(TEMPERATURES as u64),
        }
    }
}

/// The table in memory, with the densities and temperatures of its entries.
pub struct Table<'m> {
    arrays: &'m [Array],
    densities: &'m [f64],
    temperatures: &'m [f64],
}

/// The electrons at one density and temperature: the quantities that an equation of state needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Electrons {
    /// Free energy per gram of matter with one electron per nucleon.
    pub free: f64,
    /// Its derivatives, by density, by temperature, by both, and twice by temperature.
    pub free_d: f64,
    /// See `free_d`.
    pub free_t: f64,
    /// See `free_d`.
    pub free_dt: f64,
    /// See `free_d`.
    pub free_tt: f64,
    /// Derivative of the pressure by density at constant temperature.
    pub stiffness: f64,
    /// Chemical potential in units of kT.
    pub potential: f64,
    /// Electrons and positrons per cm³.
    pub number: f64,
}

impl From<Point> for Electrons {
    fn from(Point { free, stiffness, potential, number }: Point) -> Self {
        Self {
            free: free[0][0],
            free_d: free[1][0],
            free_t: free[0][1],
            free_dt: free[1][1],
            free_tt: free[0][2],
            stiffness: stiffness[0][0],
            potential: potential[0][0],
            number: number[0][0],
        }
    }
}

/// The entries of a point, in the order of the arrays.
fn entries(point: &Point) -> [f64; ARRAYS] {
    let mut entries = [0.0; ARRAYS];
    entries[FREE..STIFFNESS].copy_from_slice(point.free.as_flattened());
    entries[STIFFNESS..POTENTIAL].copy_from_slice(point.stiffness.as_flattened());
    entries[POTENTIAL..NUMBER].copy_from_slice(point.potential.as_flattened());
    entries[NUMBER..].copy_from_slice(point.number.as_flattened());
    entries
}

/// Calls `each(index, entries)` for every entry of the arrays.
fn for_each_point(densities: &[f64], temperatures: &[f64], mut each: impl FnMut(usize, [f64; ARRAYS])) {
    for (column, density) in densities.iter().enumerate() {
        let at_density = AtDensity::new(*density);
        for (row, temperature) in temperatures.iter().enumerate() {
            let point = Point::new(&at_density, &AtTemperature::new(*temperature));
            each(row * DENSITIES + column, entries(&point));
        }
    }
}

/// 10 to the power of `log`, and to those of the next entries.
fn fill_with_powers(numbers: &mut [f64], log: f64) {
    for (index, number) in numbers.iter_mut().enumerate() {
        *number = libm::exp(LN_10 * (log + index as f64 / PER_DECADE));
    }
}

impl<'m> Table<'m> {
    /// Fills the table.
    pub fn new(places: Places, typed: &mut Typed<'m>) -> Self {
        let arrays = typed.take(places.arrays);
        let (densities, temperatures) = (typed.take(places.densities), typed.take(places.temperatures));
        fill_with_powers(densities, DENSITY_LOG_MIN);
        fill_with_powers(temperatures, TEMPERATURE_LOG_MIN);
        for_each_point(densities, temperatures, |index, entries| {
            arrays.iter_mut().zip(entries).for_each(|(array, entry)| array[index] = entry);
        });
        Self { arrays, densities, temperatures }
    }

    /// Number of points at which an array differs from the closed form.
    pub fn count_wrong(&self) -> u64 {
        let mut wrong = 0;
        for_each_point(self.densities, self.temperatures, |index, entries| {
            let is_right = self.arrays.iter().zip(entries).all(|(array, entry)| array[index] == entry);
            wrong += u64::from(!is_right);
        });
        wrong
    }

    /// The columns beside a density, with their weights.
    pub fn columns(&self, density: f64) -> Columns {
        let (column, z, step) = position(self.densities, density, DENSITY_LOG_MIN);
        Columns { column, quintic: Quintic::new(z, step), cubic: cubic(z, step) }
    }

    /// The electrons at the density of `columns`, by one lookup in all arrays.
    #[inline]
    pub fn at(&self, columns: &Columns, temperature: f64) -> Electrons {
        let (row, z, step) = position(self.temperatures, temperature, TEMPERATURE_LOG_MIN);
        let (by_t, at) = (Quintic::new(z, step), row * DENSITIES + columns.column);
        let mut of = Electrons::default();
        for order in 0..3 {
            for corner in 0..2 {
                let (mut value, mut slope) = (0.0, 0.0);
                for d_order in 0..3 {
                    let pair = self.pair(FREE + 3 * d_order + order, at + corner * DENSITIES);
                    value += dot(pair, columns.quintic.value[d_order]);
                    slope += dot(pair, columns.quintic.slope[d_order]);
                }
                of.free += value * by_t.value[order][corner];
                of.free_t += value * by_t.slope[order][corner];
                of.free_tt += value * by_t.curvature[order][corner];
                of.free_d += slope * by_t.value[order][corner];
                of.free_dt += slope * by_t.slope[order][corner];
            }
        }
        let by_t = cubic(z, step);
        let of_four = |first: usize| {
            let mut sum = 0.0;
            for (order, weights) in by_t.iter().enumerate() {
                for (corner, weight) in weights.iter().enumerate() {
                    let of = |d_order: usize| {
                        dot(self.pair(first + 2 * d_order + order, at + corner * DENSITIES), columns.cubic[d_order])
                    };
                    sum += (of(0) + of(1)) * weight;
                }
            }
            sum
        };
        Electrons { stiffness: of_four(STIFFNESS), potential: of_four(POTENTIAL), number: of_four(NUMBER), ..of }
    }

    #[inline(always)]
    fn pair(&self, array: usize, at: usize) -> [f64; 2] {
        let array = &self.arrays[array];
        [array[at], array[at + 1]]
    }
}

#[inline(always)]
fn dot(pair: [f64; 2], weights: [f64; 2]) -> f64 {
    pair[0] * weights[0] + pair[1] * weights[1]
}

/// The cell that holds a value: the index of its lower end, the place in it from 0 to 1, and its length. Values beyond
/// the table belong to its last cells.
#[inline(always)]
fn position(ends: &[f64], value: f64, log_min: f64) -> (usize, f64, f64) {
    let steps = (ln(value) / LN_10 - log_min) * PER_DECADE;
    let index = (steps as usize).min(ends.len() - 2);
    let step = ends[index + 1] - ends[index];
    (index, (value - ends[index]) / step, step)
}

/// Two columns of the table beside a density, and their weights.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    column: usize,
    quintic: Quintic,
    cubic: [[f64; 2]; 2],
}

/// Weights of quintic Hermite interpolation, `[order of the derivative][corner]`: for the interpolated value, its
/// slope and its curvature.
#[derive(Clone, Copy, Debug)]
struct Quintic {
    value: [[f64; 2]; 3],
    slope: [[f64; 2]; 3],
    curvature: [[f64; 2]; 3],
}

impl Quintic {
    /// The weights at place `z` of a cell of this length.
    #[inline(always)]
    fn new(z: f64, step: f64) -> Self {
        let (low, high) = (Self::of_low_corner(z), Self::of_low_corner(1.0 - z));
        // Mirrored, odd derivatives change their sign. Each order brings a factor of the length, each differentiation
        // takes one.
        let scale = [1.0 / (step * step), 1.0 / step, 1.0, step, step * step];
        let weights = |differentiated: usize| {
            core::array::from_fn(|order| {
                let sign = if (order + differentiated).is_multiple_of(2) { 1.0 } else { -1.0 };
                let scale = scale[2 + order - differentiated];
                [low[differentiated][order] * scale, sign * high[differentiated][order] * scale]
            })
        };
        Self { value: weights(0), slope: weights(1), curvature: weights(2) }
    }

    /// The three polynomials of the lower corner, with their first and second derivatives: of each order one is 1 at
    /// z = 0, and everything else of it 0 at both ends.
    #[inline(always)]
    fn of_low_corner(z: f64) -> [[f64; 3]; 3] {
        let u = 1.0 - z;
        let u2 = u * u;
        [
            [u2 * u * (1.0 + 3.0 * z + 6.0 * z * z), z * u2 * u * (1.0 + 3.0 * z), 0.5 * z * z * u2 * u],
            [-30.0 * z * z * u2, u2 * (1.0 - 3.0 * z) * (1.0 + 5.0 * z), 0.5 * z * u2 * (2.0 - 5.0 * z)],
            [-60.0 * z * u * (1.0 - 2.0 * z), -12.0 * z * u * (3.0 - 5.0 * z), u * (1.0 - 8.0 * z + 10.0 * z * z)],
        ]
    }
}

/// Weights of cubic Hermite interpolation, `[order of the derivative][corner]`.
#[inline(always)]
fn cubic(z: f64, step: f64) -> [[f64; 2]; 2] {
    let of_low_corner = |z: f64| [(1.0 - z) * (1.0 - z) * (1.0 + 2.0 * z), z * (1.0 - z) * (1.0 - z)];
    let (low, high) = (of_low_corner(z), of_low_corner(1.0 - z));
    [[low[0], high[0]], [low[1] * step, -high[1] * step]]
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;
    use crate::Arena;

    fn with_table<R>(body: impl FnOnce(&mut Table<'_>) -> R) -> R {
        let mut words = vec![u64::MAX; 5 << 19];
        let arena = Arena::from_words(&mut words);
        let mut layout = Layout::at(arena.address());
        let places = Places::new(&mut layout);
        let mut typed = arena.typed(&layout).expect("20 MiB hold the table");
        body(&mut Table::new(places, &mut typed))
    }

    #[test]
    fn the_weights_reproduce_a_polynomial_of_their_degree_and_its_derivatives() {
        // Coefficients of 1, x, x², …; a cell from 3 to 3.5.
        let coefficients = [1.0, -2.0, 0.5, 1.5, -0.25, 0.125];
        let of = |degree: usize, differentiated: u32, x: f64| {
            let term = |n: usize| {
                let factors: f64 = (0..differentiated).map(|k| n as f64 - f64::from(k)).product();
                if factors == 0.0 { 0.0 } else { factors * coefficients[n] * x.powi(n as i32 - differentiated as i32) }
            };
            (0..=degree).map(term).sum::<f64>()
        };
        for z in [0.0, 0.3, 1.0] {
            let x = 3.0 + 0.5 * z;
            let quintic = Quintic::new(z, 0.5);
            for (differentiated, weights) in [quintic.value, quintic.slope, quintic.curvature].iter().enumerate() {
                let corners = |order: usize| [of(5, order as u32, 3.0), of(5, order as u32, 3.5)];
                let found: f64 = (0..3).map(|order| dot(corners(order), weights[order])).sum();
                let expected = of(5, differentiated as u32, x);
                assert!((found - expected).abs() < 1e-11 * expected.abs(), "{z}, {differentiated}: {found} {expected}");
            }
            let corners = |order: usize| [of(3, order as u32, 3.0), of(3, order as u32, 3.5)];
            let found: f64 = (0..2).map(|order| dot(corners(order), cubic(z, 0.5)[order])).sum();
            assert!((found - of(3, 0, x)).abs() < 1e-12 * found.abs(), "{z}: {found}");
        }
    }

    #[test]
    fn a_lookup_is_the_closed_form_at_the_corners_and_near_it_between_them() {
        with_table(|table| {
            for (density, temperature) in [(1e-7, 2.2e4), (3.3e2, 1e6), (4.7e6, 3e8), (1.9e9, 5.1e9), (1e13, 7e11)] {
                let exact = |d: f64, t: f64| Electrons::from(Point::new(&AtDensity::new(d), &AtTemperature::new(t)));
                let numbers = |of: Electrons| {
                    let Electrons { free, free_d, free_t, free_dt, free_tt, stiffness, potential, number } = of;
                    [free, free_d, free_t, free_dt, free_tt, stiffness, potential, number]
                };
                let assert_near = |d: f64, t: f64, most: [f64; 8]| {
                    let (found, exact) = (numbers(table.at(&table.columns(d), t)), numbers(exact(d, t)));
                    for ((found, exact), most) in found.iter().zip(exact).zip(most) {
                        let error = (found / exact - 1.0).abs();
                        assert!(error < most, "at {d:e}, {t:e}: {found:e} instead of {exact:e}, {error:e}");
                    }
                };
                let column = table.columns(density).column;
                let row = position(table.temperatures, temperature, TEMPERATURE_LOG_MIN).0;
                assert_near(table.densities[column], table.temperatures[row], [1e-11; 8]);
                assert_near(density, temperature, [1e-7, 1e-6, 1e-6, 1e-5, 1e-4, 1e-5, 1e-4, 1e-4]);
            }
        });
    }

    #[test]
    fn values_beyond_the_table_are_taken_from_its_last_cells() {
        with_table(|table| {
            assert_eq!(table.columns(1e-13).column, 0);
            assert_eq!(table.columns(1e20).column, DENSITIES - 2);
            assert!(table.at(&table.columns(1e15), 1e13).free.is_finite());
        });
    }

    #[test]
    fn a_wrong_entry_of_any_array_is_found() {
        let mut words = vec![0; 5 << 19];
        let arena = Arena::from_words(&mut words);
        let mut layout = Layout::at(arena.address());
        let places = Places::new(&mut layout);
        let mut typed = arena.typed(&layout).expect("20 MiB hold the table");
        let table = Table::new(places, &mut typed);
        assert_eq!(table.count_wrong(), 0);
        for array in [0, ARRAYS - 1] {
            let mut arrays = table.arrays.to_vec();
            arrays[array][POINTS - 1] += arrays[array][POINTS - 1] * 1e-12 + 1e-300;
            let damaged = Table { arrays: &arrays, ..table };
            assert_eq!(damaged.count_wrong(), 1, "array {array}");
        }
    }
}
