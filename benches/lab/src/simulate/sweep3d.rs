//! Sweep3D by its loops: the accesses of ASCI Sweep3D 2.2b in an iteration of its input of `n` cells per edge, one
//! line of cells after another.
//!
//! ```text
//!   octant ─▶ diagonal of (j, k) ─▶ angle ─▶ line   an angle is a diagonal behind the one before: each line six times
//!                                             │
//!   phi = source 1 │ phi += source 2 │ … 4 │ cells: total, in flight along j, k │ flux 1 += phi │ … 4 │ faces i, j, k
//!  └── one loop ──┘ └── one loop ───┘       └──────────── one loop ────────────┘ └─ one loop ──┘       └─ one loop ──┘
//! ```
//!
//! The kernel `sweep3d` computes the same, but all angles of a line at once and in one loop: thirteen arrays in
//! step, while K8 has eight entries for 2 MiB pages. That is the reason for this stream. Each array is as long as
//! the reference's. The reference's input of 150 cells has one block of planes and of angles, and requests the
//! currents through faces. No loop needs more pages at once than the first level has entries, so a loop's arrays
//! are followed by cache line instead of by word: the misses are the same. (Fixups read again data that are in the
//! cache.)

use wideleaf_simulator::streams::Access;

const ANGLES: u64 = 6;
/// Sweeps of an iteration: one from each corner of the mesh.
pub const OCTANTS: u64 = 8;

const WORD: u64 = 8;
const WORDS_PER_LINE: u64 = 8;

/// Memory of the program.
#[derive(Clone, Copy, Debug)]
pub struct Sweep3d {
    /// Number of cells along an edge.
    pub n: u64,
    /// Alignment of each array, in bytes. The placement in the published runs is unknown; an allocator aligns
    /// arrays larger than 1 MiB to 1 MiB.
    pub border: u64,
}

impl Sweep3d {
    /// Length of all arrays, in bytes.
    pub fn bytes(self) -> u64 {
        Arrays::new(self).end
    }

    /// Number of accesses of an iteration.
    pub fn length(self) -> u64 {
        let n = self.n;
        let loops: u64 = self.loops_around().iter().map(Loop::accesses).sum();
        let in_flight = Loop::over(n * n * ANGLES, &[read(0)]).accesses() * 3;
        let begin = in_flight + ANGLES * (n * n * 3 + n * (n + 1) * 2);
        let line = 2 + (n + 1) * 28;
        loops + OCTANTS * (begin + ANGLES * n * n * line + in_flight)
    }

    /// An iteration: the source from the flux, the change of the flux, and all octants. At most a diagonal of it is
    /// in memory.
    pub fn iteration(self) -> impl Iterator<Item = Access> + Send {
        self.around().chain((0..OCTANTS).flat_map(move |octant| self.octant(octant)))
    }

    /// The parts before and after the sweeps: the source from the flux, the flux kept, then cleared, as are the
    /// currents; the largest change of the flux.
    pub fn around(self) -> impl Iterator<Item = Access> + Send {
        self.loops_around().into_iter().flat_map(Loop::parts)
    }

    fn loops_around(self) -> Vec<Loop> {
        let Arrays { previous, external, scatter, flux, source, faces, .. } = Arrays::new(self);
        let (cells, borders) = (self.n.pow(3), (self.n + 1).pow(3));
        let first = [Loop::over(cells, &[read(external), read(scatter[0]), read(flux[0]), written(source[0])])];
        let others =
            (1..4).map(|moment| Loop::over(cells, &[read(scatter[1]), read(flux[moment]), written(source[moment])]));
        let kept = [Loop::over(cells, &[read(flux[0]), written(previous)])];
        let cleared = flux.map(|moment| Loop::over(cells, &[written(moment)]));
        let currents = faces.map(|direction| Loop::over(borders, &[written(direction)]));
        let compared = [Loop::over(cells, &[read(flux[0]), read(previous)])];
        first.into_iter().chain(others).chain(kept).chain(cleared).chain(currents).chain(compared).collect()
    }

    /// One of the [`OCTANTS`] sweeps, by its number. They differ only in direction.
    pub fn octant(self, octant: u64) -> impl Iterator<Item = Access> + Send {
        let part = move |of: &dyn Fn(&mut Part)| {
            let mut part = Part { n: self.n, arrays: Arrays::new(self), accesses: vec![] };
            of(&mut part);
            part.accesses
        };
        let diagonals = 2 * self.n - 1 + ANGLES - 1;
        let begin = part(&|part| part.begin_octant(octant));
        let sweep = move |diagonal| part(&|part| part.sweep_diagonal(octant, diagonal));
        begin.into_iter().chain((0..diagonals).flat_map(sweep)).chain(part(&Part::end_octant))
    }
}

/// Begin of each array, in bytes.
#[derive(Clone, Copy)]
struct Arrays {
    total: u64,
    previous: u64,
    external: u64,
    scatter: [u64; 2],
    flux: [u64; 4],
    source: [u64; 4],
    /// Currents through the faces of cells along i, j and k, one more in each direction than there are cells.
    faces: [u64; 3],
    /// In flight between lines: (j, k), (i, k) and (i, j) for each angle.
    phi_i: u64,
    phi_j: u64,
    phi_k: u64,
    /// A line of cells: flux, outflow along i, and 2 / width.
    line: u64,
    outflow: u64,
    widths: u64,
    end: u64,
}

impl Arrays {
    fn new(Sweep3d { n, border }: Sweep3d) -> Arrays {
        let mut end = 0;
        let mut place = |words: u64| {
            let start = end;
            end = (end + words * WORD).next_multiple_of(border);
            start
        };
        let (cells, faces, in_flight) = (n.pow(3), (n + 1).pow(3), n * n * ANGLES);
        Arrays {
            total: place(cells),
            previous: place(cells),
            external: place(cells),
            scatter: [(); 2].map(|()| place(cells)),
            flux: [(); 4].map(|()| place(cells)),
            source: [(); 4].map(|()| place(cells)),
            faces: [(); 3].map(|()| place(faces)),
            phi_i: place(in_flight),
            phi_j: place(in_flight),
            phi_k: place(in_flight),
            line: place(n),
            outflow: place(n),
            widths: place(n),
            end,
        }
    }
}

/// An array in a loop: its begin, and whether it is written.
type Stream = (u64, bool);

const fn read(start: u64) -> Stream {
    (start, false)
}

const fn written(start: u64) -> Stream {
    (start, true)
}

/// A loop over `words` words of each stream, in step, one cache line at a time.
struct Loop {
    words: u64,
    streams: Vec<Stream>,
}

/// Number of lines in a part of a loop.
const PART: u64 = 4096;

impl Loop {
    fn over(words: u64, streams: &[Stream]) -> Loop {
        Loop { words, streams: streams.to_vec() }
    }

    fn accesses(&self) -> u64 {
        (self.words + 1) * self.streams.len() as u64
    }

    /// All of it, one part at a time.
    fn parts(self) -> impl Iterator<Item = Access> + Send {
        let lines = self.words.div_ceil(WORDS_PER_LINE);
        (0..lines.div_ceil(PART)).flat_map(move |part| {
            let mut accesses = vec![];
            self.run(part * PART..lines.min((part + 1) * PART), true, &mut accesses);
            accesses
        })
    }

    /// Its lines of these numbers, from the end for a backward loop; after the last line comes the last word again.
    fn run(&self, lines: std::ops::Range<u64>, is_forward: bool, accesses: &mut Vec<Access>) {
        let all = self.words.div_ceil(WORDS_PER_LINE);
        let is_at_end = lines.end == all;
        for step in lines {
            let first = WORDS_PER_LINE * if is_forward { step } else { all - 1 - step };
            let words = WORDS_PER_LINE.min(self.words - first);
            accesses
                .extend(self.streams.iter().map(|(start, is_write)| access((start + first * WORD, *is_write), words)));
        }
        if is_at_end {
            let last = if is_forward { self.words - 1 } else { 0 };
            accesses.extend(self.streams.iter().map(|(start, is_write)| access((start + last * WORD, *is_write), 1)));
        }
    }
}

fn access((address, is_write): Stream, repeats: u64) -> Access {
    Access { address: address / 64 * 64, is_write, repeats: repeats as u32 }
}

/// Bytes from the begin of an array to an element of it.
const fn at(i: u64, j: u64, k: u64, edges: [u64; 2]) -> u64 {
    ((k * edges[1] + j) * edges[0] + i) * WORD
}

/// Some accesses of an octant.
struct Part {
    n: u64,
    arrays: Arrays,
    accesses: Vec<Access>,
}

impl Part {
    fn access(&mut self, stream: Stream, repeats: u64) {
        self.accesses.push(access(stream, repeats));
    }

    fn run(&mut self, words: u64, is_forward: bool, streams: &[Stream]) {
        let all = Loop::over(words, streams);
        all.run(0..words.div_ceil(WORDS_PER_LINE), is_forward, &mut self.accesses);
    }

    /// Nothing flows in; the flow through the outer faces along i and j is added up.
    fn begin_octant(&mut self, octant: u64) {
        let (n, Arrays { faces, phi_i, phi_j, phi_k, .. }) = (self.n, self.arrays);
        let (cells, borders) = ([n; 2], [n + 1; 2]);
        [phi_k, phi_i, phi_j].iter().for_each(|phi| self.run(n * n * ANGLES, true, &[written(*phi)]));
        let [i, j, _] = directions(octant).map(|is_forward| if is_forward { 0 } else { n });
        for angle in 0..ANGLES {
            for k in 0..n {
                for row in 0..n {
                    self.access(read(phi_i + at(row, k, angle, cells)), 1);
                    self.access(written(faces[0] + at(i, row, k, borders)), 2);
                }
            }
            for k in 0..n {
                self.run(n, true, &[read(phi_j + at(0, k, angle, cells)), written(faces[1] + at(0, j, k, borders))]);
            }
        }
    }

    /// The lines of a diagonal: for the first angle, those with that sum of distances from the corner along j
    /// and k; for each further angle, those of the previous diagonal.
    fn sweep_diagonal(&mut self, octant: u64, diagonal: u64) {
        let n = self.n;
        for angle in 0..ANGLES {
            let Some(sum) = diagonal.checked_sub(angle) else { break };
            for step_k in (sum + 1).saturating_sub(n)..n.min(sum + 1) {
                self.sweep_line(octant, angle, [sum - step_k, step_k]);
            }
        }
    }

    fn sweep_line(&mut self, octant: u64, angle: u64, steps: [u64; 2]) {
        let n = self.n;
        let (edges, borders) = ([n; 2], [n + 1; 2]);
        let Arrays { total, flux, source, faces, phi_i, phi_j, phi_k, line, outflow, widths, .. } = self.arrays;
        let [is_forward_i, is_forward_j, is_forward_k] = directions(octant);
        let place = |is_forward, step| if is_forward { step } else { n - 1 - step };
        let (j, k) = (place(is_forward_j, steps[0]), place(is_forward_k, steps[1]));
        let cells = at(0, j, k, edges);
        let phi_i = phi_i + at(j, steps[1], angle, edges);
        let (phi_j, phi_k) = (phi_j + at(0, steps[1], angle, edges), phi_k + at(0, j, angle, edges));

        self.access(read(phi_i), 1);
        self.run(n, true, &[read(source[0] + cells), written(line)]);
        source[1..].iter().for_each(|moment| self.run(n, true, &[read(moment + cells), written(line)]));
        let solved =
            [read(widths), read(total + cells), written(line), written(outflow), written(phi_j), written(phi_k)];
        self.run(n, is_forward_i, &solved);
        flux.iter().for_each(|moment| self.run(n, true, &[read(line), written(moment + cells)]));
        let [beyond_i, beyond_j, beyond_k] = directions(octant).map(u64::from);
        let currents = [
            read(outflow),
            written(faces[0] + at(beyond_i, j, k, borders)),
            read(phi_j),
            written(faces[1] + at(0, j + beyond_j, k, borders)),
            read(phi_k),
            written(faces[2] + at(0, j, k + beyond_k, borders)),
        ];
        self.run(n, true, &currents);
        self.access(written(phi_i), 1);
    }

    /// The outflow is added up.
    fn end_octant(&mut self) {
        let (n, Arrays { phi_i, phi_j, phi_k, .. }) = (self.n, self.arrays);
        [phi_i, phi_j, phi_k].iter().for_each(|phi| self.run(n * n * ANGLES, true, &[read(*phi)]));
    }
}

/// Whether an octant goes forward along i, j and k. k changes with each, then j, then i.
const fn directions(octant: u64) -> [bool; 3] {
    [octant & 4 != 0, octant & 2 != 0, octant & 1 != 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_solves_each_cell_for_each_angle_in_each_octant() {
        let sweep = Sweep3d { n: 16, border: 1 << 20 };
        let total = Arrays::new(sweep).total;
        let is_of_total = |access: &Access| (total..total + 16 * 16 * 16 * WORD).contains(&access.address);
        let loads: u64 = sweep.iteration().filter(is_of_total).map(|access| u64::from(access.repeats)).sum();
        // Also the last word of each line once more, as in every loop.
        assert_eq!(loads, OCTANTS * ANGLES * 16 * 16 * (16 + 1));
    }

    #[test]
    fn arrays_have_the_requested_alignment() {
        let bytes = |border| Sweep3d { n: 150, border }.bytes();
        assert_eq!(bytes(1 << 20) % (1 << 20), 0);
        // 433.6 MB is the size of all fields and faces of the reference with 150 cells. The data in flight are extra.
        assert!((433_600_000..440_000_000).contains(&bytes(64)) && bytes(1 << 20) > bytes(64), "{}", bytes(64));
    }
}
