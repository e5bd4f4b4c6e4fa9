//! Accesses of Sweep3D for the simulator, at any size: the sweep of an octant (lines of cells along diagonals of
//! (j, k), all angles at once), and the loops that make the source. Addresses alone are computed; no array exists.
//!
//! ```text
//!   a line: total │ source × 4 │ flux × 4 │ faces × 3 │ in flight along j and k, six angles a cell      in step
//! ```
//!
//! The stream `sweep3d` of `--trace` is the reference's program instead, which follows one angle after another.

use wideleaf_policies::Bytes;

use super::{Array, LINE, Layout, Part, Runs, Scaled, WORD, WORDS_PER_LINE, in_step, largest};

/// Sweep3D by its size.
#[derive(Clone, Copy, Debug)]
pub struct Sweep {
    /// Number of cells along an edge.
    pub n: u64,
}

const ANGLES: u64 = 6;
const OCTANTS: u64 = 8;
const MOMENTS: usize = 4;
/// Number of lines that count in a sweep: those of some diagonals, for two octants each.
const LINES: usize = 256 << 10;
/// Number of lines that count in each other loop.
const LINES_OF_SHORT_LOOPS: usize = 32 << 10;
/// Words of a cell in an octant: total and sources, flux and faces updated, in flight updated.
const CELL: u64 = 1 + 4 + 2 * (4 + 3) + 2 * 2 * ANGLES;

/// Begin of each array.
struct ArrayStarts {
    total: u64,
    external: u64,
    previous: u64,
    scatter: u64,
    flux: [u64; MOMENTS],
    source: [u64; MOMENTS],
    faces: [u64; 3],
    phi_j: u64,
    phi_k: u64,
    end: u64,
}

impl Sweep {
    /// The largest one within a footprint.
    pub fn within(footprint: Bytes) -> Sweep {
        Sweep { n: largest(1, footprint, |n| Sweep { n }.array_starts().end) }
    }

    fn array_starts(self) -> ArrayStarts {
        let (cells, faces) = (self.n.pow(3), (self.n + 1).pow(3));
        // The last line of cells ends within a line of each angle.
        let in_flight = (self.n * self.n).next_multiple_of(WORDS_PER_LINE) * ANGLES + WORDS_PER_LINE * ANGLES;
        let mut layout = Layout::default();
        let mut place = |words: u64| layout.place(words * WORD);
        let (total, external, previous) = (place(cells), place(cells), place(cells));
        let (scatter, flux, source) = (place(2 * cells), place(4 * cells), place(4 * cells));
        let (face, phi_j, phi_k) = (place(3 * faces), place(in_flight), place(in_flight));
        let moments = |start: u64| std::array::from_fn(|moment| start + moment as u64 * cells * WORD);
        ArrayStarts {
            total,
            external,
            previous,
            scatter,
            flux: moments(flux),
            source: moments(source),
            faces: std::array::from_fn(|direction| face + direction as u64 * faces * WORD),
            phi_j,
            phi_k,
            end: layout.end,
        }
    }

    /// Its loops, with their words in an iteration.
    pub fn scaled(self) -> Scaled {
        let ArrayStarts { external, previous, scatter, flux, source, faces, end, .. } = self.array_starts();
        let cells = self.n.pow(3);
        let octants = |name, number| Part {
            name,
            words: (OCTANTS / 2 * cells * CELL) as f64,
            lines: LINES,
            accesses: Box::new(Runs::new(self.lines_of(number))),
        };
        let short = |name, words: u64, length: u64, arrays: Vec<Array>| Part {
            name,
            words: (words * cells) as f64,
            lines: LINES_OF_SHORT_LOOPS,
            accesses: in_step(length, arrays),
        };
        let higher = [Array::load(scatter + cells * WORD), Array::load(flux[1]), Array::store(source[1])];
        let first = [Array::load(external), Array::load(scatter), Array::load(flux[0]), Array::store(source[0])];
        let parts = vec![
            octants("octants, j upwards", 0),
            octants("octants, j downwards", 1),
            short("source 1", 4, cells, first.to_vec()),
            short("sources 2 to 4", 9, cells, higher.to_vec()),
            short("previous flux", 2, cells, vec![Array::load(flux[0]), Array::store(previous)]),
            short("flux cleared", 4, 4 * cells, vec![Array::store(flux[0])]),
            short("faces cleared", 3, 3 * cells, vec![Array::store(faces[0])]),
            short("change", 2, cells, vec![Array::load(flux[0]), Array::load(previous)]),
        ];
        Scaled { bytes: Bytes::new(end), parts }
    }

    /// Lines of an octant that goes upwards along k, and along j in the same direction (0) or the other one (1), from
    /// the longest diagonal on. Lines that run backwards along i visit the same pages.
    fn lines_of(self, octant: u64) -> impl FnMut(&mut Vec<Array>) -> u64 + Send {
        let n = self.n;
        let ArrayStarts { total, flux, source, faces, phi_j, phi_k, .. } = self.array_starts();
        let (mut diagonal, mut k) = (n - 1, 0);
        move |run| {
            let step_j = diagonal - k;
            let j = if octant == 0 { step_j } else { n - 1 - step_j };
            let cell = (k * n + j) * n * WORD;
            let face = |direction: usize, j: u64, k: u64| faces[direction] + (k * (n + 1) + j) * (n + 1) * WORD;
            run.push(Array::load(total + cell));
            run.extend(source.map(|moment| Array::load(moment + cell)));
            run.extend(flux.map(|moment| Array::update(moment + cell)));
            run.extend([face(0, j, k), face(1, j + 1 - octant, k), face(2, j, k + 1)].map(Array::update));
            for row in [phi_j + k * n * ANGLES * WORD, phi_k + j * n * ANGLES * WORD] {
                // Six angles a cell: eight cells have six lines.
                let line = |angle| Array { stride: ANGLES * LINE, ..Array::update(row + angle * LINE) };
                run.extend((0..ANGLES).map(line));
            }
            k += 1;
            if k > diagonal.min(n - 1) {
                diagonal = (diagonal + 1) % (2 * n - 1);
                k = (diagonal + 1).saturating_sub(n);
            }
            n.div_ceil(WORDS_PER_LINE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_of_an_octant_are_swept_once_before_any_again() {
        let sweep = Sweep { n: 16 };
        let total = sweep.array_starts().total;
        for octant in [0, 1] {
            let mut next = sweep.lines_of(octant);
            let mut lines: Vec<u64> = (0..16 * 16)
                .map(|_| {
                    let mut run = vec![];
                    assert_eq!(next(&mut run), 2);
                    (run[0].at - total) / WORD / 16
                })
                .collect();
            assert_eq!(lines[..3], if octant == 0 { [15, 30, 45] } else { [0, 17, 34] });
            lines.sort_unstable();
            assert_eq!(lines, (0..16 * 16).collect::<Vec<_>>());
        }
    }
}
