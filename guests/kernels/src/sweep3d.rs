//! Sweep3D: neutron transport in a cube, direction by direction, by wavefronts (ASCI Sweep3D 2.2b, its input "n n
//! n", S6, P1).
//!
//! ```text
//!   12 × ─▶ source ─▶ 8 octants × 6 angles ─▶ largest change of the flux
//!                     │
//!                     ▼  one line of cells; all angles of a block at once
//!      inflow from j, k ──▶ ▢─▶▢─▶▢─▶▢─▶ … along i    phi = (source + Σ c·inflow) / (Σt + Σ c),   c = 2·cosine / width
//!                           └──▶ outflow to j, k      outflow = 2·phi − inflow, in the last five never less than 0
//! ```
//!
//! A cell waits for its three neighbours upstream. Lines of one diagonal of (j, k) are independent of each other,
//! and are done one diagonal after the other, in blocks of `mk` planes:
//!
//! ```text
//!      k ▲ 3 4 5 6 │         member 0 has these rows j, member 1 those: block b goes through member 0 in step b,
//!        │ 2 3 4 5 │ mk      through member 1 in step b + 1
//!        │ 1 2 3 4 │
//!        └──────────▶ j
//! ```
//!
//! Arrays are those of the reference, i fastest and k slowest: total cross section, external source and previous
//! flux (n³ each), two scattering cross sections (2·n³), flux and source in four moments (4·n³ each), currents
//! through the faces in three directions (3·(n + 1)³). In-flight numbers have the angle fastest, since the angles
//! of a cell are its only independent work. With several vCPUs the face arrays have one more row at each border
//! between two of them, like the parts of the reference's processes.
//!
//! The verification compares the numbers that the reference prints for n = 50 and n = 150, and the balance of
//! neutrons for every n.

use core::array;
use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use crate::arena::{Layout, Place, Typed};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{Results, cut, deal, ranges, split, sum};
use crate::planes::{OwnRows, deal_rows};
use crate::report::{self, COMPUTE, Figure, INIT, VERIFY};
use crate::{Arena, KernelError, Platform};

/// Sweep3D in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("sweep3d"),
    summary: "Sweep3D: neutron transport through a cube by wavefronts",
    classes: &[],
    parameters: PARAMETERS,
    quick: "n=16",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

/// Cells times angles computed per second: the reciprocal of the reference's grind time.
const FIGURE: Figure = Figure::literal("cell_angles", "M/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "n",
        default: "50",
        unit: "count",
        meaning: "cells along an edge, 16 to 400; 50 and 150 are compared with the reference",
    },
    Parameter {
        name: "mk",
        default: "n for one vCPU, 10 for more",
        unit: "count",
        meaning: "planes of a block, 1 to n",
    },
    Parameter { name: "mmi", default: "6", unit: "1, 2, 3 or 6", meaning: "angles of a block" },
];

/// Default planes of a block that several vCPUs share, as in the reference's input for 50 cells.
const MK_SHARED: u64 = 10;
/// Allowed edges: at least one row for each of 16 vCPUs; at most 8 GB.
const EDGES: Range<u64> = VCPUS_MAX as u64..401;
/// Number of source iterations in the reference's input (epsi = −12).
const ITERATIONS: usize = 12;
/// Number of iterations before the first that corrects negative outflows (its last line, −7).
const ITERATIONS_WITHOUT_FIXUP: usize = 7;
/// Number of angles in an octant: S6.
const ANGLES: usize = 6;
/// Number of moments of the flux: P1.
const MOMENTS: usize = 4;
const OCTANTS: usize = 8;
/// Width of a cell in all three directions.
const WIDTH: f64 = 0.1;
/// Cross sections: total, and scattered into moment 1 and into moments 2 to 4.
const SIGMA_TOTAL: f64 = 1.0;
const SIGMA_SCATTER: [f64; 2] = [0.5, 3.0 * 0.2];
/// The reference's rule: ten digits.
const TOLERANCE: f64 = 1e-10;

/// The values that the reference prints for an input.
struct Reference {
    n: usize,
    /// Largest relative change of the flux in each iteration.
    errors: [f64; ITERATIONS],
    /// Cells and angles with a fixup in each iteration.
    fixups: [u64; ITERATIONS],
    source: f64,
    absorption: f64,
    /// Net number of neutrons that leave through each of two opposite sides, along i, j and k.
    leakage: [f64; 3],
}

const REFERENCES: [Reference; 2] = [
    Reference {
        n: 50,
        errors: [
            1.0,
            1.775_129_752_629_006_6,
            0.659_083_802_218_004_1,
            0.305_348_671_948_976_5,
            0.141_234_079_272_600_12,
            0.062_789_646_139_528_27,
            0.026_695_594_895_489_734,
            0.019_956_304_230_268_73,
            0.005_687_930_117_967_335,
            0.001_854_127_563_340_399,
            0.000_681_074_826_574_155_8,
            0.000_261_752_203_210_804_4,
        ],
        fixups: [0, 0, 0, 0, 0, 0, 0, 12000, 11712, 11664, 11664, 11664],
        source: 4.095_999_999_999_703,
        absorption: 3.343_417_464_828_590_4,
        leakage: [0.125_419_419_635_145, 0.125_419_419_635_145, 0.125_419_421_915_668],
    },
    Reference {
        n: 150,
        errors: [
            1.0,
            197.571_812_853_557_84,
            1.436_835_710_695_054_7,
            0.659_707_702_712_034,
            0.403_871_684_044_252_3,
            0.260_737_026_547_890_05,
            0.169_897_955_140_099_95,
            0.246_048_595_763_034_42,
            0.070_476_154_514_989_56,
            0.043_643_270_502_329_54,
            0.026_730_856_594_580_39,
            0.015_593_167_406_100_984,
        ],
        fixups: [0, 0, 0, 0, 0, 0, 0, 873_936, 835_176, 818_336, 809_760, 804_960],
        source: 125.000_000_000_232_8,
        absorption: 124.346_866_770_809_3,
        leakage: [0.104_657_868_098_36, 0.104_657_868_098_357, 0.104_657_869_207_65],
    },
];

/// Direction cosines along i and j and the weight of each angle of an octant; the cosine along k follows.
const QUADRATURE: [(f64, f64, f64); ANGLES] = {
    const OUTER: f64 = 0.169_446_56 / 8.0;
    const INNER: f64 = 0.163_886_77 / 8.0;
    const SMALL: f64 = 0.230_091_94;
    const MIDDLE: f64 = 0.688_134_32;
    const LARGE: f64 = 0.945_576_76;
    [
        (SMALL, LARGE, OUTER),
        (MIDDLE, MIDDLE, INNER),
        (SMALL, MIDDLE, INNER),
        (LARGE, SMALL, OUTER),
        (MIDDLE, SMALL, INNER),
        (SMALL, SMALL, OUTER),
    ]
};

/// The size of a run.
#[derive(Clone, Copy)]
struct Problem {
    n: usize,
    /// Planes of a block.
    mk: usize,
    /// Angles of a block.
    mmi: usize,
}

impl Problem {
    fn from_parameters<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<Self, KernelError<'a>> {
        const BLOCKS: [usize; 4] = [1, 2, 3, ANGLES];
        let n = parameters.count("n", EDGES.start, EDGES.end - 1)?.unwrap_or(50);
        // The reference has one block on one processor. More of them wait for the first block of each beam.
        let mk = parameters.count("mk", 1, n)?.unwrap_or(if vcpus == 1 { n } else { MK_SHARED });
        let mmi = parameters.choice("mmi", &["1", "2", "3", "6"])?.map_or(ANGLES, |index| BLOCKS[index]);
        Ok(Self { n: n as usize, mk: mk as usize, mmi })
    }

    const fn cells(&self) -> usize {
        self.n * self.n * self.n
    }

    /// Number of blocks of planes; the last one may be shorter.
    const fn blocks(&self) -> usize {
        self.n.div_ceil(self.mk)
    }

    fn reference(&self) -> Option<&'static Reference> {
        REFERENCES.iter().find(|reference| reference.n == self.n)
    }

    /// Number of cell-angle computations in a whole run.
    fn cell_angles(&self) -> f64 {
        (self.cells() * ANGLES * OCTANTS * ITERATIONS) as f64
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let problem = Problem::from_parameters(parameters, vcpus)?;
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &problem, vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let problem = Problem::from_parameters(parameters, platform.vcpus())?;
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &problem, platform.vcpus());
    let mut typed = report::claim(platform, arena, &layout, Name::literal("cells"))?;
    let (mut cube, _) = report::phase(platform, INIT, || Cube::new(platform, problem, places, &mut typed));
    let (found, ticks) = report::phase(platform, COMPUTE, || cube.iterate());
    if let Some(seconds) = report::time(platform, ticks) {
        report::result(platform, Name::literal("grind"), seconds / problem.cell_angles() * 1e9, Name::literal("ns"));
        FIGURE.emit(platform, problem.cell_angles() / seconds / 1e6);
    }
    let (balance, _) = report::phase(platform, VERIFY, || cube.balance());
    found.report(platform);
    balance.report(platform);
    let (wrong, checked) = count_wrong(&found, &balance, problem.reference());
    report::verdict(platform, wrong, checked)
}

/// Results that the iterations print.
struct Found {
    errors: [f64; ITERATIONS],
    fixups: [u64; ITERATIONS],
}

impl Found {
    fn report(&self, platform: &dyn Platform) {
        for (index, error) in self.errors.iter().enumerate() {
            report::numbered_result(platform, "error", index as u64 + 1, *error, Name::literal("1"));
        }
        let fixups: u64 = self.fixups.iter().sum();
        report::result(platform, Name::literal("fixups"), fixups as f64, Name::literal("cell-angles"));
    }
}

/// Sources and sinks of the neutrons of the last iteration.
#[derive(Clone, Copy, Debug)]
struct Balance {
    /// Neutrons from the external source.
    source: f64,
    absorption: f64,
    /// Net flow through the low and the high side along i, j and k; positive along the direction.
    leakage: [[f64; 2]; 3],
    /// All neutrons produced, external and scattered, of which the angles' weights keep 0.99999999.
    made: f64,
    /// All neutrons that collided: absorbed or scattered.
    collided: f64,
}

impl Balance {
    fn report(&self, platform: &dyn Platform) {
        const LEAKAGE: [[Name<'static>; 2]; 3] = [
            [Name::literal("leakage_i_low"), Name::literal("leakage_i_high")],
            [Name::literal("leakage_j_low"), Name::literal("leakage_j_high")],
            [Name::literal("leakage_k_low"), Name::literal("leakage_k_high")],
        ];
        const UNIT: Name<'static> = Name::literal("1/s");
        report::result(platform, Name::literal("source"), self.source, UNIT);
        report::result(platform, Name::literal("absorption"), self.absorption, UNIT);
        for (name, value) in LEAKAGE.iter().flatten().zip(self.leakage.iter().flatten()) {
            report::result(platform, *name, *value, UNIT);
        }
        report::result(platform, Name::literal("imbalance"), self.imbalance(), Name::literal("1"));
    }

    /// Relative difference between produced and lost neutrons.
    fn imbalance(&self) -> f64 {
        let leaked: f64 = self.leakage.iter().map(|[low, high]| high - low).sum();
        (self.made - self.collided - leaked) / self.made
    }
}

/// Number of wrong numbers, and of compared ones.
fn count_wrong(found: &Found, balance: &Balance, reference: Option<&Reference>) -> (u64, u64) {
    let is_near = |value: f64, expected: f64| ((value - expected) / expected).abs() <= TOLERANCE;
    let (mut wrong, mut checked) = (0, 0);
    let mut check = |is_right: bool| {
        wrong += u64::from(!is_right);
        checked += 1;
    };
    check(balance.imbalance().abs() <= TOLERANCE);
    if let Some(reference) = reference {
        found.errors.iter().zip(&reference.errors).for_each(|(value, expected)| check(is_near(*value, *expected)));
        found.fixups.iter().zip(&reference.fixups).for_each(|(value, expected)| check(value == expected));
        check(is_near(balance.source, reference.source));
        check(is_near(balance.absorption, reference.absorption));
        for ([low, high], expected) in balance.leakage.iter().zip(&reference.leakage) {
            check(is_near(*low, -expected));
            check(is_near(*high, *expected));
        }
    }
    (wrong, checked)
}

/// Places of the slices in the arena.
struct Places {
    sigma_total: Place<f64>,
    external: Place<f64>,
    previous: Place<f64>,
    sigma_scatter: Place<f64>,
    flux: Place<f64>,
    source: Place<f64>,
    faces: Place<f64>,
    phi_j: Place<f64>,
    phi_k: Place<f64>,
}

impl Places {
    fn new(layout: &mut Layout, problem: &Problem, members: usize) -> Self {
        let (n, cells) = (problem.n as u64, problem.cells() as u64);
        let phis_of_plane = n * problem.mmi as u64;
        Self {
            sigma_total: layout.place(cells),
            external: layout.place(cells),
            previous: layout.place(cells),
            sigma_scatter: layout.place(2 * cells),
            flux: layout.place(MOMENTS as u64 * cells),
            source: layout.place(MOMENTS as u64 * cells),
            faces: layout.place(3 * (n + 1) * (n + members as u64) * (n + 1)),
            phi_j: layout.place(members as u64 * problem.mk as u64 * phis_of_plane),
            phi_k: layout.place(n * phis_of_plane),
        }
    }
}

/// The arrays of a run.
struct Cube<'p, 'm> {
    platform: &'p dyn Platform,
    problem: Problem,
    sigma_total: &'m mut [f64],
    external: &'m mut [f64],
    previous: &'m mut [f64],
    sigma_scatter: &'m mut [f64],
    /// Flux, moment by moment.
    flux: &'m mut [f64],
    source: &'m mut [f64],
    /// Currents through the faces of cells, along i, j and k. Only the leakage is computed from them.
    faces: &'m mut [f64],
    /// In-flight numbers along j, a block of planes for each member.
    phi_j: &'m mut [f64],
    /// In-flight numbers along k, a plane.
    phi_k: &'m mut [f64],
}

impl<'p, 'm> Cube<'p, 'm> {
    /// Creates a cube without any flux, with a source in the middle third of each direction.
    fn new(platform: &'p dyn Platform, problem: Problem, places: Places, typed: &mut Typed<'m>) -> Self {
        let cube = Self {
            platform,
            problem,
            sigma_total: typed.take(places.sigma_total),
            external: typed.take(places.external),
            previous: typed.take(places.previous),
            sigma_scatter: typed.take(places.sigma_scatter),
            flux: typed.take(places.flux),
            source: typed.take(places.source),
            faces: typed.take(places.faces),
            phi_j: typed.take(places.phi_j),
            phi_k: typed.take(places.phi_k),
        };
        cube.sigma_total.fill(SIGMA_TOTAL);
        let scatter = cube.sigma_scatter.chunks_exact_mut(problem.cells());
        scatter.zip(SIGMA_SCATTER).for_each(|(cells, sigma)| cells.fill(sigma));
        let n = problem.n;
        let third = (n + 1) / 3;
        for (row, cells) in cube.external.chunks_exact_mut(n).enumerate() {
            let is_inside = |index: usize| (third..n - third).contains(&index);
            if is_inside(row % n) && is_inside(row / n) {
                cells[third..n - third].fill(1.0);
            }
        }
        cube
    }

    /// Runs the timed part.
    fn iterate(&mut self) -> Found {
        let mut found = Found { errors: [0.0; ITERATIONS], fixups: [0; ITERATIONS] };
        for step in report::steps(self.platform, ITERATIONS as u32) {
            let iteration = step as usize - 1;
            self.make_source();
            found.fixups[iteration] = self.sweep_all(iteration >= ITERATIONS_WITHOUT_FIXUP);
            found.errors[iteration] = self.largest_change();
        }
        found
    }

    /// Computes the source, external and scattered, from the flux, and clears the flux.
    fn make_source(&mut self) {
        let (platform, members, cells) = (self.platform, self.platform.vcpus(), self.problem.cells());
        let (first, second) = self.sigma_scatter.split_at(cells);
        let (external, flux) = (&*self.external, &*self.flux);
        let (source, higher_sources) = self.source.split_at_mut(cells);
        let (flux, higher_fluxes) = flux.split_at(cells);
        let parts = split(source, members).zip(split(self.previous, members)).zip(ranges(cells, members));
        deal(platform, parts, |_, ((source, previous), range)| {
            let flux = &flux[range.clone()];
            let cells = source.iter_mut().zip(flux).zip(&external[range.clone()]).zip(&first[range]);
            cells.for_each(|(((source, flux), external), sigma)| *source = external + sigma * flux);
            previous.copy_from_slice(flux);
        });
        for (source, flux) in higher_sources.chunks_exact_mut(cells).zip(higher_fluxes.chunks_exact(cells)) {
            deal(platform, split(source, members).zip(ranges(cells, members)), |_, (source, range)| {
                let cells = source.iter_mut().zip(&flux[range.clone()]).zip(&second[range]);
                cells.for_each(|((source, flux), sigma)| *source = sigma * flux);
            });
        }
        deal(platform, split(self.flux, members).zip(split(self.faces, members)), |_, (flux, faces)| {
            flux.fill(0.0);
            faces.fill(0.0);
        });
    }

    /// Sweeps all octants and angles. Returns the number of cell-angles with a fixup.
    fn sweep_all(&mut self, has_fixups: bool) -> u64 {
        match (self.problem.mmi, has_fixups) {
            (1, false) => self.sweep_blocks::<1, false>(),
            (1, true) => self.sweep_blocks::<1, true>(),
            (2, false) => self.sweep_blocks::<2, false>(),
            (2, true) => self.sweep_blocks::<2, true>(),
            (3, false) => self.sweep_blocks::<3, false>(),
            (3, true) => self.sweep_blocks::<3, true>(),
            (_, false) => self.sweep_blocks::<ANGLES, false>(),
            (_, true) => self.sweep_blocks::<ANGLES, true>(),
        }
    }

    /// Sweeps all octants and angles with `M` angles of a block.
    fn sweep_blocks<const M: usize, const FIXUP: bool>(&mut self) -> u64 {
        let (platform, problem) = (self.platform, self.problem);
        let given = Given { problem, sigma_total: self.sigma_total, source: self.source };
        let mut states = members::<M>(problem, platform.vcpus(), self.flux, self.faces, self.phi_k);
        let phi_j = self.phi_j.as_chunks_mut::<M>().0;
        let mut fixups = 0;
        for octant in Octant::ALL {
            for first_angle in (0..ANGLES).step_by(M) {
                let beam = Beam::<M>::new(octant, first_angle);
                fixups += pipeline::<M, FIXUP>(platform, &given, &beam, &mut states, phi_j);
            }
        }
        fixups
    }

    /// Largest relative change of the flux.
    fn largest_change(&self) -> f64 {
        let cells = self.problem.cells();
        let (flux, previous) = (&self.flux[..cells], &*self.previous);
        let change = |(flux, previous): (&f64, &f64)| if *flux == 0.0 { 0.0 } else { ((flux - previous) / flux).abs() };
        let largest: Results<f64> = deal(self.platform, ranges(cells, self.platform.vcpus()), |_, range| {
            flux[range.clone()].iter().zip(&previous[range]).map(change).fold(0.0, f64::max)
        });
        largest.into_iter().flatten().fold(0.0, f64::max)
    }

    /// Neutron balance of the last iteration.
    fn balance(&self) -> Balance {
        let (platform, cells) = (self.platform, self.problem.cells());
        let volume = WIDTH * WIDTH * WIDTH;
        let (flux, total) = (&self.flux[..cells], &*self.sigma_total);
        let (scatter, made, external) = (&self.sigma_scatter[..cells], &self.source[..cells], &*self.external);
        let integral = |density: &(dyn Fn(usize) -> f64 + Sync)| {
            let parts = ranges(cells, platform.vcpus());
            volume * sum(deal(platform, parts, |_, range| range.map(density).sum()))
        };
        let kept: f64 = QUADRATURE.iter().map(|(_, _, weight)| weight).sum::<f64>() * OCTANTS as f64;
        Balance {
            source: integral(&|cell| external[cell]),
            absorption: integral(&|cell| (total[cell] - scatter[cell]) * flux[cell]),
            leakage: self.leakage(),
            made: kept * integral(&|cell| made[cell]),
            collided: integral(&|cell| total[cell] * flux[cell]),
        }
    }

    /// Leakage: nothing comes in through the outer faces, so the currents there are the leakage.
    fn leakage(&self) -> [[f64; 2]; 3] {
        let columns = self.problem.n + 1;
        let rows = self.problem.n + self.platform.vcpus();
        let mut leakage = [[0.0; 2]; 3];
        for (direction, faces) in self.faces.chunks_exact(columns * rows * columns).enumerate() {
            for (index, current) in faces.iter().enumerate() {
                let (place, last) = match direction {
                    0 => (index % columns, columns - 1),
                    1 => (index / columns % rows, rows - 1),
                    _ => (index / columns / rows, columns - 1),
                };
                leakage[direction][0] += if place == 0 { WIDTH * WIDTH * current } else { 0.0 };
                leakage[direction][1] += if place == last { WIDTH * WIDTH * current } else { 0.0 };
            }
        }
        leakage
    }
}

/// Direction of a beam along i, j and k.
#[derive(Clone, Copy)]
struct Octant {
    is_forward: [bool; 3],
}

impl Octant {
    /// All octants in the reference's order: k changes with each, then j, then i.
    const ALL: [Self; OCTANTS] = {
        let mut all = [Self { is_forward: [false; 3] }; OCTANTS];
        let mut index = 0;
        while index < OCTANTS {
            all[index].is_forward = [index & 4 != 0, index & 2 != 0, index & 1 != 0];
            index += 1;
        }
        all
    };

    /// Step `step` of `0..count` along a direction, as an index.
    const fn index(self, direction: usize, step: usize, count: usize) -> usize {
        if self.is_forward[direction] { step } else { count - 1 - step }
    }
}

/// `M` angles of an octant, in the form that cells need. Angle by angle in every array.
struct Beam<const M: usize> {
    octant: Octant,
    /// The slopes 2·cosine / width along i, j and k.
    slopes: [[f64; M]; 3],
    /// Direction cosines with the octant's signs: moments 2 to 4 of the source.
    cosines: [[f64; M]; 3],
    /// Weight of phi in each moment of the flux.
    flux_weights: [[f64; M]; MOMENTS],
    /// Weight of an outflow in the current along i, j and k.
    face_weights: [[f64; M]; 3],
}

impl<const M: usize> Beam<M> {
    fn new(octant: Octant, first_angle: usize) -> Self {
        let angle = |m: usize| {
            let (along_i, along_j, weight) = QUADRATURE[first_angle + m];
            ([along_i, along_j, libm::sqrt(1.0 - along_i * along_i - along_j * along_j)], weight)
        };
        let sign = |direction: usize| if octant.is_forward[direction] { 1.0 } else { -1.0 };
        let weights = array::from_fn(|m| angle(m).1);
        let slopes = array::from_fn(|d| array::from_fn(|m| angle(m).0[d] * (2.0 / WIDTH)));
        let cosines: [[f64; M]; 3] = array::from_fn(|d| array::from_fn(|m| sign(d) * angle(m).0[d]));
        let face_weights = cosines.map(|cosine| times(cosine, weights));
        let [i, j, k] = face_weights;
        Self { octant, slopes, cosines, flux_weights: [weights, i, j, k], face_weights }
    }
}

/// Input that all members read.
struct Given<'s> {
    problem: Problem,
    sigma_total: &'s [f64],
    source: &'s [f64],
}

/// A member's own part: its rows j in every plane k.
struct Member<'s, const M: usize> {
    rows: Range<usize>,
    flux: [OwnRows<'s, f64>; MOMENTS],
    faces: [OwnRows<'s, f64>; 3],
    /// In-flight numbers along k, row by row.
    phi_k: &'s mut [[f64; M]],
}

/// Splits the arrays between the members.
fn members<'s, const M: usize>(
    problem: Problem,
    count: usize,
    flux: &'s mut [f64],
    faces: &'s mut [f64],
    phi_k: &'s mut [f64],
) -> [Option<Member<'s, M>>; VCPUS_MAX] {
    let (n, face_rows) = (problem.n, problem.n + count);
    let rows = || ranges(n, count);
    let own_face_rows = || rows().enumerate().map(|(member, rows)| rows.start + member..rows.end + member + 1);
    let mut moments = flux.chunks_exact_mut(problem.cells()).map(|moment| deal_rows(moment, n, n, rows()));
    let mut directions = faces
        .chunks_exact_mut((n + 1) * face_rows * (n + 1))
        .map(|faces| deal_rows(faces, face_rows, n + 1, own_face_rows()));
    let mut moments: [_; MOMENTS] = array::from_fn(|_| moments.next().expect("the flux has four moments"));
    let mut directions: [_; 3] = array::from_fn(|_| directions.next().expect("faces have three directions"));
    let mut phis = cut(phi_k.as_chunks_mut::<M>().0, rows().map(move |rows| rows.len() * n));
    let mut all_rows = rows();
    array::from_fn(|_| {
        Some(Member {
            rows: all_rows.next()?,
            flux: moments.each_mut().map(|rows| rows.next().expect("rows for every member")),
            faces: directions.each_mut().map(|rows| rows.next().expect("rows for every member")),
            phi_k: phis.next().expect("rows for every member"),
        })
    })
}

/// Sends one beam through the cube: the blocks go from member to member. Returns the number of cell-angles with a
/// fixup.
fn pipeline<const M: usize, const FIXUP: bool>(
    platform: &dyn Platform,
    given: &Given<'_>,
    beam: &Beam<M>,
    states: &mut [Option<Member<'_, M>>; VCPUS_MAX],
    phi_j: &mut [[f64; M]],
) -> u64 {
    let (count, blocks) = (platform.vcpus(), given.problem.blocks());
    let block_len = given.problem.mk * given.problem.n;
    let mut fixups = 0;
    for step in 0..blocks + count - 1 {
        // The in-flight numbers along j stay with their block: block b has buffer b modulo the number of members.
        let mut buffers: [_; VCPUS_MAX] = array::from_fn(|_| None);
        buffers.iter_mut().zip(phi_j.chunks_exact_mut(block_len)).for_each(|(place, phi_j)| *place = Some(phi_j));
        let parts = states.iter_mut().flatten().enumerate().map(|(member, state)| {
            let position = beam.octant.index(1, member, count);
            let block = step.checked_sub(position).filter(|block| *block < blocks);
            let phi_j = buffers[(step + count - position) % count].take().expect("positions are all different");
            (state, block, phi_j, position == 0)
        });
        fixups += deal(platform, parts, |_, (state, block, phi_j, is_first)| {
            let Some(block) = block else { return 0 };
            if is_first {
                phi_j.fill([0.0; M]);
            }
            if block == 0 {
                state.phi_k.fill([0.0; M]);
            }
            state.sweep_block::<FIXUP>(given, beam, block, phi_j)
        })
        .into_iter()
        .flatten()
        .sum::<u64>();
    }
    fixups
}

impl<const M: usize> Member<'_, M> {
    /// Sweeps a block of planes of the own rows, diagonal by diagonal.
    fn sweep_block<const FIXUP: bool>(
        &mut self,
        given: &Given<'_>,
        beam: &Beam<M>,
        block: usize,
        phi_j: &mut [[f64; M]],
    ) -> u64 {
        let (n, mk, rows) = (given.problem.n, given.problem.mk, self.rows.len());
        let planes = mk.min(n - block * mk);
        let mut fixups = 0;
        for diagonal in 0..rows + planes - 1 {
            let first = (diagonal + 1).saturating_sub(rows);
            for plane in first..planes.min(diagonal + 1) {
                let j = self.rows.start + beam.octant.index(1, diagonal - plane, rows);
                let k = beam.octant.index(2, block * mk + plane, n);
                let phi_j = &mut phi_j[plane * n..(plane + 1) * n];
                fixups += self.sweep_line::<FIXUP>(given, beam, (j, k), phi_j);
            }
        }
        fixups
    }

    /// Sweeps the line of cells at (j, k).
    fn sweep_line<const FIXUP: bool>(
        &mut self,
        given: &Given<'_>,
        beam: &Beam<M>,
        (j, k): (usize, usize),
        phi_j: &mut [[f64; M]],
    ) -> u64 {
        let n = given.problem.n;
        let cells = given.problem.cells();
        let start = (k * n + j) * n;
        let row = j - self.rows.start;
        let [_, is_forward_j, is_forward_k] = beam.octant.is_forward.map(usize::from);
        let face_row = self.faces[0].rows().start + row;
        let [face_i, face_j, face_k] = &mut self.faces;
        let line = Line {
            sigma_total: &given.sigma_total[start..start + n],
            source: array::from_fn(|moment| &given.source[moment * cells + start..moment * cells + start + n]),
            flux: self.flux.each_mut().map(|moment| moment.row_mut(k, j)),
            face_i: face_i.row_mut(k, face_row),
            face_j: &mut face_j.row_mut(k, face_row + is_forward_j)[..n],
            face_k: &mut face_k.row_mut(k + is_forward_k, face_row)[..n],
            phi_j,
            phi_k: &mut self.phi_k[row * n..(row + 1) * n],
        };
        if beam.octant.is_forward[0] { line.sweep::<FIXUP, true>(beam) } else { line.sweep::<FIXUP, false>(beam) }
    }
}

/// A line of cells along i: inputs, accumulated outputs, and in-flight numbers. All of one length, the faces along
/// i one longer.
struct Line<'s, const M: usize> {
    sigma_total: &'s [f64],
    source: [&'s [f64]; MOMENTS],
    flux: [&'s mut [f64]; MOMENTS],
    face_i: &'s mut [f64],
    face_j: &'s mut [f64],
    face_k: &'s mut [f64],
    phi_j: &'s mut [[f64; M]],
    phi_k: &'s mut [[f64; M]],
}

impl<const M: usize> Line<'_, M> {
    /// Sweeps cell after cell. Returns the number of angles with a fixup.
    fn sweep<const FIXUP: bool, const FORWARD: bool>(self, beam: &Beam<M>) -> u64 {
        let Self { sigma_total, source, flux, face_i, face_j, face_k, phi_j, phi_k } = self;
        let n = sigma_total.len();
        // The face behind a cell is its outflow face.
        let face_i = if FORWARD { &mut face_i[1..] } else { &mut face_i[..n] };
        let [source0, source1, source2, source3] = source.map(|moment| &moment[..n]);
        let [flux0, flux1, flux2, flux3] = flux.map(|moment| &mut moment[..n]);
        let (face_i, face_j, face_k) = (&mut face_i[..n], &mut face_j[..n], &mut face_k[..n]);
        let (phi_j, phi_k) = (&mut phi_j[..n], &mut phi_k[..n]);
        let mut phi_i = [0.0; M];
        let mut fixups = 0;
        for step in 0..n {
            let i = if FORWARD { step } else { n - 1 - step };
            let inflow = [phi_i, phi_j[i], phi_k[i]];
            let made = beam.source([source0[i], source1[i], source2[i], source3[i]]);
            let mut cell = Solved::new(beam, sigma_total[i], made, &inflow);
            if FIXUP && cell.has_negative_outflow() {
                fixups += cell.fix(beam, sigma_total[i], made, &inflow);
            }
            let [weights0, weights1, weights2, weights3] = &beam.flux_weights;
            flux0[i] += dot(weights0, &cell.phi);
            flux1[i] += dot(weights1, &cell.phi);
            flux2[i] += dot(weights2, &cell.phi);
            flux3[i] += dot(weights3, &cell.phi);
            let [outflow_i, outflow_j, outflow_k] = cell.outflow;
            face_i[i] += dot(&beam.face_weights[0], &outflow_i);
            face_j[i] += dot(&beam.face_weights[1], &outflow_j);
            face_k[i] += dot(&beam.face_weights[2], &outflow_k);
            (phi_i, phi_j[i], phi_k[i]) = (outflow_i, outflow_j, outflow_k);
        }
        fixups
    }
}

impl<const M: usize> Beam<M> {
    /// Source of a cell in each angle, from its four moments.
    #[inline(always)]
    fn source(&self, moments: [f64; MOMENTS]) -> [f64; M] {
        let [i, j, k] = &self.cosines;
        array::from_fn(|m| moments[0] + i[m] * moments[1] + j[m] * moments[2] + k[m] * moments[3])
    }
}

/// A cell in `M` angles: the flux in its middle, and its outflow along i, j and k.
struct Solved<const M: usize> {
    phi: [f64; M],
    outflow: [[f64; M]; 3],
}

impl<const M: usize> Solved<M> {
    /// Solves by diamond differences: the middle is the mean of inflow and outflow in each direction.
    #[inline(always)]
    fn new(beam: &Beam<M>, sigma_total: f64, made: [f64; M], inflow: &[[f64; M]; 3]) -> Self {
        let [slope_i, slope_j, slope_k] = &beam.slopes;
        let [in_i, in_j, in_k] = inflow;
        let phi: [f64; M] = array::from_fn(|m| {
            let inverse = 1.0 / (sigma_total + slope_i[m] + slope_j[m] + slope_k[m]);
            (made[m] + slope_j[m] * in_j[m] + slope_k[m] * in_k[m] + slope_i[m] * in_i[m]) * inverse
        });
        Self { phi, outflow: inflow.map(|inflow| array::from_fn(|m| 2.0 * phi[m] - inflow[m])) }
    }

    /// Whether a fixup is possible: −0 counts too, and needs no fixup.
    #[inline(always)]
    fn has_negative_outflow(&self) -> bool {
        let [i, j, k] = &self.outflow;
        let signs = (0..M).fold(0, |signs, m| signs | i[m].to_bits() | j[m].to_bits() | k[m].to_bits());
        signs >> 63 == 1
    }

    /// Sets negative outflows to 0. Returns the number of angles that had any.
    #[cold]
    fn fix(&mut self, beam: &Beam<M>, sigma_total: f64, made: [f64; M], inflow: &[[f64; M]; 3]) -> u64 {
        (0..M)
            .filter(|m| {
                let of_angle = |values: &[[f64; M]; 3]| [values[0][*m], values[1][*m], values[2][*m]];
                let (slopes, inflow) = (of_angle(&beam.slopes), of_angle(inflow));
                let mut angle = Angle { phi: self.phi[*m], outflow: of_angle(&self.outflow) };
                let is_fixed = angle.fix(sigma_total, made[*m], slopes, inflow);
                self.phi[*m] = angle.phi;
                self.outflow.iter_mut().zip(angle.outflow).for_each(|(all, one)| all[*m] = one);
                is_fixed
            })
            .count() as u64
    }
}

/// One angle of a cell.
struct Angle {
    phi: f64,
    outflow: [f64; 3],
}

impl Angle {
    /// While an outflow is negative, sets the first negative one to 0 and solves the rest again, which may make
    /// another negative. At most three times, since an outflow that was set to 0 stays so.
    fn fix(&mut self, sigma_total: f64, made: f64, slopes: [f64; 3], inflow: [f64; 3]) -> bool {
        let mut divisor = sigma_total + slopes.iter().sum::<f64>();
        let mut dividend = made + slopes.iter().zip(&inflow).map(|(slope, inflow)| slope * inflow).sum::<f64>();
        let mut is_fixed = false;
        while let Some(negative) = self.outflow.iter().position(|outflow| *outflow < 0.0) {
            divisor -= slopes[negative];
            dividend -= 0.5 * slopes[negative] * inflow[negative];
            self.phi = dividend / divisor;
            self.outflow[negative] = 0.0;
            for (outflow, inflow) in self.outflow.iter_mut().zip(&inflow).filter(|(outflow, _)| **outflow != 0.0) {
                *outflow = 2.0 * self.phi - inflow;
            }
            is_fixed = true;
        }
        is_fixed
    }
}

/// Combines two arrays element by element.
#[inline(always)]
fn times<const M: usize>(one: [f64; M], other: [f64; M]) -> [f64; M] {
    array::from_fn(|m| one[m] * other[m])
}

/// The sum of the products, by pairs, since two numbers fill a register.
#[inline(always)]
fn dot<const M: usize>(one: &[f64; M], other: &[f64; M]) -> f64 {
    let products = times(*one, *other);
    let (pairs, rest) = products.as_chunks::<2>();
    let sums = pairs.iter().copied().reduce(|sums, pair| [sums[0] + pair[0], sums[1] + pair[1]]).unwrap_or_default();
    rest.iter().fold(sums[0] + sums[1], |sum, last| sum + last)
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    /// Solves `n` cells an edge in blocks of `mk` planes and `mmi` angles.
    fn solve(members: usize, n: usize, mk: usize, mmi: usize) -> (Found, Balance) {
        let problem = Problem { n, mk, mmi };
        let mut words = vec![u64::MAX; 1 << 21];
        let arena = Arena::from_words(&mut words);
        native::run(members, 0, Box::new(|_| ()), |platform| {
            let mut layout = Layout::at(arena.address());
            let places = Places::new(&mut layout, &problem, members);
            let mut typed = arena.typed(&layout).expect("16 MiB hold a small cube");
            let mut cube = Cube::new(platform, problem, places, &mut typed);
            (cube.iterate(), cube.balance())
        })
    }

    #[test]
    fn blocks_and_members_change_nothing_but_the_rounding() {
        let (expected, balance) = solve(1, 20, 20, 6);
        assert!(balance.imbalance().abs() < TOLERANCE, "{balance:?}");
        assert!(expected.fixups[ITERATIONS - 1] > 0, "the last iterations have fixups");
        for (members, mk, mmi) in [(1, 7, 6), (1, 20, 3), (2, 20, 2), (1, 3, 1)] {
            let (found, balance) = solve(members, 20, mk, mmi);
            assert_eq!(found.fixups, expected.fixups, "{members} members, mk {mk}, mmi {mmi}");
            for (found, expected) in found.errors.iter().zip(&expected.errors) {
                assert!((found - expected).abs() <= TOLERANCE * expected, "{members} members, mk {mk}, mmi {mmi}");
            }
            assert!(balance.imbalance().abs() < TOLERANCE, "{balance:?}");
        }
    }

    #[test]
    fn members_alone_change_not_even_the_rounding() {
        let ((one, _), (other, _)) = (solve(1, 16, 9, 6), solve(2, 16, 9, 6));
        assert_eq!(one.errors, other.errors);
    }

    #[test]
    fn a_wrong_number_and_a_lost_neutron_are_found() {
        let reference = &REFERENCES[0];
        let [i, j, k] = reference.leakage.map(|leakage| [-leakage, leakage]);
        let found = || Found { errors: reference.errors, fixups: reference.fixups };
        let leaked: f64 = reference.leakage.iter().map(|leakage| 2.0 * leakage).sum();
        let balance = Balance {
            source: reference.source,
            absorption: reference.absorption,
            leakage: [i, j, k],
            made: 7.0 + leaked,
            collided: 7.0,
        };
        assert_eq!(count_wrong(&found(), &balance, Some(reference)), (0, 33));
        let fixup = Found { fixups: [1; ITERATIONS], ..found() };
        assert_eq!(count_wrong(&fixup, &balance, Some(reference)), (12, 33));
        let lost = Balance { collided: 7.0 + 1e-8, ..balance };
        assert_eq!(count_wrong(&found(), &lost, Some(reference)), (1, 33));
        assert_eq!(count_wrong(&found(), &lost, None), (1, 1));
    }

    #[test]
    fn negative_outflows_are_made_0_one_after_the_other() {
        // No source, and the inflow along j and k is much larger than the flux in the middle.
        let (slopes, inflow) = ([20.0, 2.0, 2.0], [0.1, 0.9, 0.9]);
        let phi = (20.0 * 0.1 + 2.0 * 0.9 * 2.0) / 25.0;
        let mut angle = Angle { phi, outflow: inflow.map(|inflow| 2.0 * phi - inflow) };
        assert!(angle.outflow[1] < 0.0 && angle.outflow[2] < 0.0, "{:?}", angle.outflow);
        assert!(angle.fix(1.0, 0.0, slopes, inflow));
        assert!(angle.outflow.iter().all(|outflow| *outflow >= 0.0), "{:?}", angle.outflow);
        // The inflow either flows out or collides, with c/2 times each flow.
        let flows: f64 = (0..3).map(|d| slopes[d] / 2.0 * (inflow[d] - angle.outflow[d])).sum();
        assert!((flows - angle.phi).abs() < 1e-15, "{flows} {}", angle.phi);
    }
}
