//! Sweep3D by its loops: where ASCI Sweep3D 2.2b goes in one iteration of its input of 150 cells an edge, line of cells by line of cells.
//!
//! ```text
//!   octant ─▶ diagonal of (j, k) ─▶ angle ─▶ line     an angle is one diagonal behind the angle before it, so each line comes six times
//!                                             │
//!     phi = source 1 │ phi += source 2 │ … 4 │ cells: total, in flight along j and k │ flux 1 += phi │ … 4 │ faces along i, j, k
//!     └── one loop ──┘└── one loop ───┘      └────────────── one loop ──────────────┘└── one loop ──┘     └───── one loop ─────┘
//! ```
//!
//! The kernel `sweep3d` computes the same, but all angles of a line at once and in one loop: thirteen arrays in step, where K8 has
//! eight entries for 2 MiB pages. Hence this. Each array is as long as the reference's; its input of 150 cells has
//! one block of planes and of angles, and asks for the currents through faces. No loop needs more pages at once than the first level has
//! entries, so a loop's arrays are followed cache line by cache line instead of word by word: the misses are the same.

use std::sync::atomic::Ordering;

use wideleaf_benches::experiment::{Ended, Waiting};
use wideleaf_policies::walk::streams::Access;

use crate::measured::Opteron;
use crate::opteron::{Arms, Row, arms};

/// Cells along an edge.
const N: u64 = 150;
const ANGLES: u64 = 6;
const OCTANTS: u64 = 8;
/// Of which one octant is simulated: the others do the same in another direction (fixups look again at what is in the cache).
const ITERATIONS: u64 = 12;

const WORD: u64 = 8;
const WORDS_PER_LINE: u64 = 8;

/// Where the arrays lie is not known of the run that was measured. At a MiB each is how an allocator places what is larger than that.
const LAYOUTS: [(&str, u64); 2] = [("generated, arrays in a row", 64), ("generated, arrays at a MiB each", 1 << 20)];

/// The row of the tables that this stands for, for each layout.
pub fn rows(measured: &Opteron, waiting: &Waiting) -> Result<Vec<Row>, Ended> {
    LAYOUTS.iter().map(|(from, border)| row(from, *border, measured, waiting)).collect()
}

fn row(from: &str, border: u64, measured: &Opteron, waiting: &Waiting) -> Result<Row, Ended> {
    let arrays = Arrays::new(border);
    let mut program = Program { arms: arms(arrays.end), arrays };
    program.make_source();
    program.compare_fluxes();
    program.arms.iter_mut().for_each(|arm| arm.sum_up(ITERATIONS as f64));
    let octant = 0;
    program.begin_octant(octant);
    for diagonal in 0..2 * N - 1 + ANGLES - 1 {
        program.sweep_diagonal(octant, diagonal);
        if waiting.flag().load(Ordering::Relaxed) {
            return Err(Ended::Interrupted);
        }
    }
    program.end_octant();
    let sums = program.arms.map(|mut arm| {
        arm.sum_up((ITERATIONS * OCTANTS) as f64);
        arm.sums()
    });
    let scale = format!("1 octant of {}", ITERATIONS * OCTANTS);
    Ok(Row::new("sweep3d 150".into(), from.into(), scale, sums, measured))
}

/// Where each array begins, in bytes.
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
    /// A line of cells: flux, what flows out along i, and 2 / width.
    line: u64,
    outflow: u64,
    widths: u64,
    end: u64,
}

impl Arrays {
    /// Each at a multiple of `border`.
    fn new(border: u64) -> Arrays {
        let mut end = 0;
        let mut place = |words: u64| {
            let start = end;
            end = (end + words * WORD).next_multiple_of(border);
            start
        };
        let (cells, faces, in_flight) = (N.pow(3), (N + 1).pow(3), N * N * ANGLES);
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
            line: place(N),
            outflow: place(N),
            widths: place(N),
            end,
        }
    }
}

/// An array in a loop: where it begins, and whether it is written.
type Stream = (u64, bool);

const fn read(start: u64) -> Stream {
    (start, false)
}

const fn written(start: u64) -> Stream {
    (start, true)
}

/// Bytes from the begin of an array to an element of it.
const fn at(i: u64, j: u64, k: u64, edges: [u64; 2]) -> u64 {
    ((k * edges[1] + j) * edges[0] + i) * WORD
}

const CELLS: [u64; 2] = [N, N];
const FACES: [u64; 2] = [N + 1, N + 1];

struct Program {
    arms: Arms,
    arrays: Arrays,
}

impl Program {
    fn access(&mut self, (address, is_write): Stream, repeats: u64) {
        let access = Access { address: address / 64 * 64, is_write, repeats: repeats as u32 };
        self.arms.iter_mut().for_each(|arm| arm.access(access));
    }

    /// A loop over `words` words of each stream, in step, a cache line's length at a time.
    fn run(&mut self, words: u64, is_forward: bool, streams: &[Stream]) {
        let steps = words.div_ceil(WORDS_PER_LINE);
        for step in 0..steps {
            let first = WORDS_PER_LINE * if is_forward { step } else { steps - 1 - step };
            for (start, is_write) in streams {
                self.access((start + first * WORD, *is_write), WORDS_PER_LINE.min(words - first));
            }
        }
        let last = if is_forward { words - 1 } else { 0 };
        for (start, is_write) in streams {
            self.access((start + last * WORD, *is_write), 1);
        }
    }

    /// The source from the flux, the flux kept, then cleared, as are the currents.
    fn make_source(&mut self) {
        let Arrays { previous, external, scatter, flux, source, faces, .. } = self.arrays;
        let cells = N.pow(3);
        self.run(cells, true, &[read(external), read(scatter[0]), read(flux[0]), written(source[0])]);
        for moment in 1..4 {
            self.run(cells, true, &[read(scatter[1]), read(flux[moment]), written(source[moment])]);
        }
        self.run(cells, true, &[read(flux[0]), written(previous)]);
        flux.iter().for_each(|moment| self.run(cells, true, &[written(*moment)]));
        faces.iter().for_each(|direction| self.run((N + 1).pow(3), true, &[written(*direction)]));
    }

    /// Nothing flows in; what flows through the outer faces along i and j is added up.
    fn begin_octant(&mut self, octant: u64) {
        let Arrays { faces, phi_i, phi_j, phi_k, .. } = self.arrays;
        [phi_k, phi_i, phi_j].iter().for_each(|phi| self.run(N * N * ANGLES, true, &[written(*phi)]));
        let [i, j, _] = directions(octant).map(|is_forward| if is_forward { 0 } else { N });
        for angle in 0..ANGLES {
            for k in 0..N {
                for row in 0..N {
                    self.access(read(phi_i + at(row, k, angle, CELLS)), 1);
                    self.access(written(faces[0] + at(i, row, k, FACES)), 2);
                }
            }
            for k in 0..N {
                self.run(N, true, &[read(phi_j + at(0, k, angle, CELLS)), written(faces[1] + at(0, j, k, FACES))]);
            }
        }
    }

    /// The lines of a diagonal: of the first angle those whose distances from the corner along j and k have that sum, of each further
    /// angle those of one diagonal before.
    fn sweep_diagonal(&mut self, octant: u64, diagonal: u64) {
        for angle in 0..ANGLES {
            let Some(sum) = diagonal.checked_sub(angle) else { break };
            for step_k in (sum + 1).saturating_sub(N)..N.min(sum + 1) {
                self.sweep_line(octant, angle, [sum - step_k, step_k]);
            }
        }
    }

    fn sweep_line(&mut self, octant: u64, angle: u64, steps: [u64; 2]) {
        let Arrays { total, flux, source, faces, phi_i, phi_j, phi_k, line, outflow, widths, .. } = self.arrays;
        let [is_forward_i, is_forward_j, is_forward_k] = directions(octant);
        let place = |is_forward, step| if is_forward { step } else { N - 1 - step };
        let (j, k) = (place(is_forward_j, steps[0]), place(is_forward_k, steps[1]));
        let cells = at(0, j, k, CELLS);
        let phi_i = phi_i + at(j, steps[1], angle, CELLS);
        let (phi_j, phi_k) = (phi_j + at(0, steps[1], angle, CELLS), phi_k + at(0, j, angle, CELLS));

        self.access(read(phi_i), 1);
        self.run(N, true, &[read(source[0] + cells), written(line)]);
        source[1..].iter().for_each(|moment| self.run(N, true, &[read(moment + cells), written(line)]));
        let solved =
            [read(widths), read(total + cells), written(line), written(outflow), written(phi_j), written(phi_k)];
        self.run(N, is_forward_i, &solved);
        flux.iter().for_each(|moment| self.run(N, true, &[read(line), written(moment + cells)]));
        let [beyond_i, beyond_j, beyond_k] = directions(octant).map(u64::from);
        let currents = [
            read(outflow),
            written(faces[0] + at(beyond_i, j, k, FACES)),
            read(phi_j),
            written(faces[1] + at(0, j + beyond_j, k, FACES)),
            read(phi_k),
            written(faces[2] + at(0, j, k + beyond_k, FACES)),
        ];
        self.run(N, true, &currents);
        self.access(written(phi_i), 1);
    }

    /// What flows out is added up.
    fn end_octant(&mut self) {
        let Arrays { phi_i, phi_j, phi_k, .. } = self.arrays;
        [phi_i, phi_j, phi_k].iter().for_each(|phi| self.run(N * N * ANGLES, true, &[read(*phi)]));
    }

    /// The largest change of the flux.
    fn compare_fluxes(&mut self) {
        let Arrays { previous, flux, .. } = self.arrays;
        self.run(N.pow(3), true, &[read(flux[0]), read(previous)]);
    }
}

/// Whether an octant goes forward along i, j and k. k changes with each, then j, then i.
const fn directions(octant: u64) -> [bool; 3] {
    [octant & 4 != 0, octant & 2 != 0, octant & 1 != 0]
}
