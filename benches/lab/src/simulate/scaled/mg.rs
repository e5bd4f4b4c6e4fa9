//! NPB MG: stencils of 27 points on cubes, of which each next one has half the points along an edge.
//!
//! ```text
//!   u: n³ │ (n/2)³ │ …    v: n³    r: n³ │ (n/2)³ │ …      with a layer of ghosts around each cube
//!
//!   a row:  nine rows around it, in step ─▶ the row itself
//! ```
//!
//! The kernel halves the edge down to two points. Here it is halved three times, so that cubes of more sizes exist;
//! the levels left out have a five-hundredth of the points.

use wideleaf_policies::Bytes;

use super::{Array, LINE, Layout, Part, Runs, Scaled, WORD, WORDS_PER_LINE, largest};

/// MG by its size.
#[derive(Clone, Copy, Debug)]
pub struct Mg {
    /// Number of points along an edge of the finest cube, a multiple of 8.
    pub edge: u64,
}

const LEVELS: usize = 4;
/// Points of all levels below the finest, per point of the second one.
const COARSE_POINTS: f64 = 1.0 + 1.0 / 8.0 + 1.0 / 64.0;
/// Lines of three planes and more, so that what remains of a plane in a TLB is found again.
const LINES: usize = 512 << 10;
const LINES_OF_SHORT_LOOPS: usize = 256 << 10;

/// Words of each loop for a point of the finer cube: a stencil loads nine and updates one.
const STENCIL: f64 = 11.0;
const COPY: f64 = 2.0;
/// An eighth of the loads of four coarse rows, in pairs, and of sixteen accesses to eight fine points.
const INTERPOLATION: f64 = (10.0 + 16.0) / 8.0;
/// An eighth of eighteen loads and a store.
const RESTRICTION: f64 = 19.0 / 8.0;

/// A cube with its ghosts.
#[derive(Clone, Copy)]
struct Cube {
    start: u64,
    /// Points along an edge, two of them ghosts.
    edge: u64,
}

impl Cube {
    const fn row(self, plane: u64, row: u64) -> u64 {
        self.start + (plane * self.edge + row) * self.edge * WORD
    }

    /// Lines of a row, which may begin within a line.
    const fn lines(self, plane: u64, row: u64) -> u64 {
        (self.row(plane, row) % LINE / WORD + self.edge).div_ceil(WORDS_PER_LINE)
    }

    const fn inner(self) -> u64 {
        self.edge - 2
    }
}

/// The cubes of all levels, the finest first.
struct Cubes {
    u: [Cube; LEVELS],
    v: Cube,
    r: [Cube; LEVELS],
    end: u64,
}

impl Mg {
    /// The largest one within a footprint.
    pub fn within(footprint: Bytes) -> Mg {
        Mg { edge: largest(8, footprint, |edge| Mg { edge }.cubes().end) }
    }

    fn cubes(self) -> Cubes {
        let edges: [u64; LEVELS] = std::array::from_fn(|level| (self.edge >> level) + 2);
        let bytes = |edge: u64| edge.pow(3) * WORD;
        let mut layout = Layout::default();
        let mut place = |levels: usize| {
            let mut at = layout.place(edges[..levels].iter().map(|edge| bytes(*edge)).sum());
            edges.map(|edge| {
                let start = at;
                at += bytes(edge);
                Cube { start, edge }
            })
        };
        let (u, [v, ..], r) = (place(LEVELS), place(1), place(LEVELS));
        Cubes { u, v, r, end: layout.end }
    }

    /// Its loops: all of the finest cube, and the stencils of the second one for all coarse ones.
    pub fn scaled(self) -> Scaled {
        let Cubes { u, v, r, end } = self.cubes();
        let points = self.edge.pow(3) as f64;
        let coarse_stencils = (2.0 * STENCIL + INTERPOLATION + RESTRICTION + 1.0) / 2.0 * COARSE_POINTS / 8.0;
        let stencil = |name, words: f64, lines, target: Cube, grid: Cube, copied: Option<Cube>| Part {
            name,
            words: words * points,
            lines,
            accesses: Box::new(Runs::new(Stencil::new(target, grid, copied).into_next())),
        };
        let short = LINES_OF_SHORT_LOOPS;
        let parts = vec![
            stencil("r = v - A·u", 2.0 * (COPY + STENCIL), LINES, r[0], u[0], Some(v)),
            stencil("u += S·r", STENCIL, LINES, u[0], r[0], None),
            Part {
                name: "u += Q·u",
                words: INTERPOLATION * points,
                lines: short,
                accesses: Box::new(Runs::new(interpolation(u[0], u[1]))),
            },
            Part {
                name: "r = P·r",
                words: RESTRICTION * points,
                lines: short,
                accesses: Box::new(Runs::new(restriction(r[1], r[0]))),
            },
            stencil("r -= A·u, coarse", coarse_stencils, short, r[1], u[1], None),
            stencil("u += S·r, coarse", coarse_stencils, short, u[1], r[1], None),
        ];
        Scaled { bytes: Bytes::new(end), parts }
    }
}

/// A place in a loop over the rows of a cube that are no ghosts.
#[derive(Clone, Copy)]
struct Rows {
    inner: u64,
    plane: u64,
    row: u64,
}

impl Rows {
    /// The first row of the middle plane.
    const fn from_middle(inner: u64) -> Rows {
        Rows { inner, plane: inner / 2, row: 1 }
    }

    /// Returns the plane and the row, and goes on to the next one; after the last it begins anew.
    fn advance(&mut self) -> (u64, u64) {
        let now = (self.plane, self.row);
        self.row += 1;
        if self.row > self.inner {
            (self.row, self.plane) = (1, self.plane % self.inner + 1);
        }
        now
    }
}

/// Adds the stencil of `grid` to `target`; before each plane, copies it from `copied`.
struct Stencil {
    target: Cube,
    grid: Cube,
    copied: Option<Cube>,
    rows: Rows,
    /// Row that is updated next: its neighbours were loaded.
    pending: Option<(u64, u64)>,
    /// Plane that was copied last.
    plane: u64,
}

impl Stencil {
    fn new(target: Cube, grid: Cube, copied: Option<Cube>) -> Stencil {
        Stencil { target, grid, copied, rows: Rows::from_middle(target.inner()), pending: None, plane: 0 }
    }

    fn into_next(mut self) -> impl FnMut(&mut Vec<Array>) -> u64 + Send {
        move |run| self.next(run)
    }

    fn next(&mut self, run: &mut Vec<Array>) -> u64 {
        if let Some((plane, row)) = self.pending.take() {
            run.push(Array::update(self.target.row(plane, row)));
            return self.target.lines(plane, row);
        }
        let Rows { plane, .. } = self.rows;
        if let Some(copied) = self.copied.filter(|_| plane != self.plane) {
            self.plane = plane;
            run.extend([Array::load(copied.row(plane, 0)), Array::store(self.target.row(plane, 0))]);
            return (copied.edge * copied.edge).div_ceil(WORDS_PER_LINE);
        }
        let (plane, row) = self.rows.advance();
        self.pending = Some((plane, row));
        load_around(self.grid, plane, row, run)
    }
}

/// Loads the nine rows around a row.
fn load_around(grid: Cube, plane: u64, row: u64, run: &mut Vec<Array>) -> u64 {
    for plane in [plane - 1, plane, plane + 1] {
        run.extend([row - 1, row, row + 1].map(|row| Array::load(grid.row(plane, row))));
    }
    grid.edge.div_ceil(WORDS_PER_LINE)
}

/// Full weighting: a coarse row from nine fine ones.
fn restriction(coarse: Cube, fine: Cube) -> impl FnMut(&mut Vec<Array>) -> u64 + Send {
    let mut rows = Rows::from_middle(coarse.inner());
    let mut pending = None;
    move |run| {
        if let Some((plane, row)) = pending.take() {
            run.push(Array::store(coarse.row(plane, row)));
            return coarse.lines(plane, row);
        }
        let (plane, row) = rows.advance();
        pending = Some((plane, row));
        load_around(fine, 2 * plane, 2 * row, run)
    }
}

/// Accesses to a line of a fine row of an interpolation, which half a line of each coarse row belongs to.
const COARSE_LINE: u64 = LINE / 2;

/// Trilinear interpolation: four fine rows from up to four coarse ones, one after another. Ghosts are points too.
fn interpolation(fine: Cube, coarse: Cube) -> impl FnMut(&mut Vec<Array>) -> u64 + Send {
    let mut rows = Rows::from_middle(coarse.edge - 1);
    let mut left = 0..0;
    let mut at = (0, 0);
    move |run| {
        let step = left.next().unwrap_or_else(|| {
            let (plane, row) = rows.advance();
            at = (plane - 1, row - 1);
            left = 1..4;
            0
        });
        let (plane, row) = at;
        let (is_odd_plane, is_odd_row) = (step / 2, step % 2);
        // The first row loads two neighbouring points of one coarse row, the others one of each coarse row.
        let repeats = if step == 0 { WORDS_PER_LINE } else { WORDS_PER_LINE / 2 } as u32;
        for plane in plane..=plane + is_odd_plane {
            for row in row..=row + is_odd_row {
                run.push(Array { stride: COARSE_LINE, repeats, ..Array::load(coarse.row(plane, row)) });
            }
        }
        let (plane, row) = (2 * plane + is_odd_plane, 2 * row + is_odd_row);
        run.push(Array::update(fine.row(plane, row)));
        fine.edge.div_ceil(WORDS_PER_LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(next: &mut impl FnMut(&mut Vec<Array>) -> u64) -> (Vec<u64>, u64) {
        let mut arrays = vec![];
        let lines = next(&mut arrays);
        (arrays.iter().map(|array| array.at / WORD).collect(), lines)
    }

    #[test]
    fn a_stencil_copies_its_plane_loads_nine_rows_and_updates_the_one_in_their_middle() {
        let cube = |start| Cube { start, edge: 10 };
        let mut next = Stencil::new(cube(0), cube(8000), Some(cube(16000))).into_next();
        assert_eq!(run(&mut next), (vec![2000 + 400, 400], 13), "plane 4 of ten by ten words");
        let (around, _) = run(&mut next);
        assert_eq!(around, [300, 310, 320, 400, 410, 420, 500, 510, 520].map(|word| 1000 + word));
        assert_eq!(run(&mut next), (vec![410], 2));
        let (around, _) = run(&mut next);
        assert_eq!(around[4], 1000 + 420, "the next row");
    }

    #[test]
    fn an_interpolation_updates_four_fine_rows_for_a_coarse_one() {
        let (fine, coarse) = (Cube { start: 0, edge: 10 }, Cube { start: 8000, edge: 6 });
        let mut next = interpolation(fine, coarse);
        let runs: Vec<Vec<u64>> = (0..4).map(|_| run(&mut next).0).collect();
        // Coarse planes are 1 and 2 of 6 by 6 words; fine ones 2 and 3 of 10 by 10.
        assert_eq!(runs[0], [1036, 200]);
        assert_eq!(runs[1], [1036, 1042, 210]);
        assert_eq!(runs[2], [1036, 1072, 300]);
        assert_eq!(runs[3], [1036, 1042, 1072, 1078, 310]);
    }
}
