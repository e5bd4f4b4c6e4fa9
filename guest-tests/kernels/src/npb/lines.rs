//! Lines of points that lie side by side, solved at once: each step of one waits for the step before, those of two do not.
//!
//! ```text
//!   along x: rows y and y+1        along y and z: columns x and x+1
//!
//!     point 0 │ 1 │ 2 │ …            line 0   line 1
//!   line 0  ▪ │ ▪ │ ▪ │                ▪        ▪      point 0
//!   line 1  ▪ │ ▪ │ ▪ │                ▪        ▪      point 1
//! ```
//!
//! What a solve computes with is a [`Lanes`]: the same number of every line. Arithmetic on it becomes vector instructions.

use core::array;

use super::flow::{COMPONENTS, Grid, Point};

/// The same number of `WIDTH` lines.
pub type Lanes<const WIDTH: usize> = [f64; WIDTH];
/// A point of each of `WIDTH` lines, component by component.
pub type Points<const WIDTH: usize> = [Lanes<WIDTH>; COMPONENTS];

/// Neighbouring lines in a field.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// Place of point 0 of line 0.
    pub start: usize,
    /// From a point to the next.
    pub stride: usize,
    /// From a line to the next.
    pub gap: usize,
}

impl Lines {
    /// The lines along an axis that begin at the face across it, in the plane across z that contains place 0: along x and y `first`
    /// is the first of them, along z it is the first column.
    pub const fn along(grid: &Grid, axis: usize, first: usize) -> Self {
        // Lines along x lie side by side along y, all others along x.
        let gap = grid.stride(if axis == 0 { 1 } else { 0 });
        Self { start: first * gap, stride: grid.stride(axis), gap }
    }

    /// The same lines, so many places further.
    pub const fn moved_by(self, places: usize) -> Self {
        Self { start: self.start + places, ..self }
    }

    /// The places of a point, one for each line.
    #[inline]
    pub fn places<const WIDTH: usize>(&self, index: usize) -> [usize; WIDTH] {
        array::from_fn(|line| self.start + index * self.stride + line * self.gap)
    }
}

/// One number of each place.
#[inline]
pub fn gather<const WIDTH: usize>(field: &[f64], places: [usize; WIDTH]) -> Lanes<WIDTH> {
    places.map(|place| field[place])
}

/// The points of each place.
#[inline]
pub fn gather_points<const WIDTH: usize>(field: &[Point], places: [usize; WIDTH]) -> Points<WIDTH> {
    let points = places.map(|place| &field[place]);
    array::from_fn(|m| points.map(|point| point[m]))
}

/// Writes the points of each place.
#[inline]
pub fn scatter_points<const WIDTH: usize>(field: &mut [Point], places: [usize; WIDTH], points: &Points<WIDTH>) {
    for (line, place) in places.into_iter().enumerate() {
        field[place] = array::from_fn(|m| points[m][line]);
    }
}
