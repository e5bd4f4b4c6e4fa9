//! eos: an equation of state in every zone of a [mesh], by Newton's method and lookups in a table, as
//! FLASH does it with the Helmholtz table of Timmes and Swesty.
//!
//! ```text
//!   table, 17 MiB                            mesh
//!   21 arrays of 541 × 201   ◀── lookup ──   zone: ρ, energy, composition ─▶ T such that the energy is right
//!        (electrons)                                                     ─▶ pressure, entropy, Γ, potential, number
//!                                            per lookup: electrons + ions + radiation = energy, heat ─▶ next T
//! ```
//!
//! One zone needs a few lookups, each in all 21 arrays, and these lie 850 KiB apart: more pages of 64 KiB than the
//! first level of many TLBs has entries, and few of 2 MiB. The arithmetic between two lookups is long. So large pages
//! remove almost all misses of the TLB, but little time.
//!
//! A zone's density, temperature and composition follow from its position. Its energy is that of the closed form,
//! and its temperature is found again. Each pass begins at a temperature that is an eighth too high, as if a step of
//! hydrodynamics had changed the zone.

mod electrons;
mod gas;
mod table;

use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use crate::arena::{Layout, Place, Typed};
use crate::kernel::{Kernel, MemoryNeed};
use crate::mesh::{self, Blocks, Shape, report_rate};
use crate::parameters::{Parameter, Parameters};
use crate::report::{self, COMPUTE, Figure, INIT, VERIFY};
use crate::test_pattern::word;
use crate::{Arena, KernelError, Platform};
use gas::{Matter, State};
use table::{POINTS, Table};

/// The equation of state in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("eos"),
    summary: "an equation of state by lookups in a table of 21 arrays, in every zone of a mesh, as in FLASH",
    classes: &[],
    parameters: PARAMETERS,
    quick: "blocks=4 passes=1",
    figure: ZONES,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

/// Solved zones: their temperature, and everything that follows from it.
const ZONES: Figure = Figure::literal("zones", "M/s");

const PARAMETERS: &[Parameter] = &[
    mesh::BLOCKS,
    mesh::CELLS,
    mesh::GUARDS,
    Parameter {
        name: mesh::VARIABLES_NAME,
        default: "12",
        unit: "count",
        meaning: "variables of a cell, 10 to 64; the tenth is the last that is used",
    },
    Parameter { name: "passes", default: "4", unit: "count", meaning: "solutions of every zone, 1 to 1000" },
];

const PASSES: Range<u64> = 1..1001;

/// Variables of a zone: the given ones, which no pass changes, and those that follow from them.
const DENSITY: usize = 0;
const ENERGY: usize = 1;
const NUCLEONS: usize = 2;
const ELECTRONS: usize = 3;
const TEMPERATURE: usize = 4;
const PRESSURE: usize = 5;
const ENTROPY: usize = 6;
const GAMMA: usize = 7;
const POTENTIAL: usize = 8;
const NUMBER: usize = 9;
/// Variables that the kernel uses.
const USED: usize = 10;

/// Factor from the temperature that a pass leaves to the one at which the next begins.
const CHANGE: f64 = 1.125;
/// Newton's method ends when a step changes the temperature by less than this part of it, as in FLASH.
const PRECISION: f64 = 1e-8;
/// Most lookups for a zone. Four are usual; the verification finds a zone that needed more than these.
const LOOKUPS_MAX: u32 = 50;

/// Largest error of a result that passes, relative to the result or to 1. At least four times what is measured.
const TOLERANCES: [(usize, f64); 6] = [
    (TEMPERATURE, 1e-7),
    (PRESSURE, 1e-6),
    (ENTROPY, 1e-7),
    (GAMMA, 2e-6),
    // Interpolated by cubics, and 0 somewhere.
    (POTENTIAL, 1e-4),
    (NUMBER, 1e-7),
];

/// The validated parameters of a run.
struct Plan {
    shape: Shape,
    passes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let passes = parameters.count("passes", PASSES.start, PASSES.end - 1)?.unwrap_or(4);
        Ok(Self { shape: Shape::read(parameters, USED as u64)?, passes })
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let Plan { shape, .. } = Plan::read(parameters)?;
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &shape)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let Plan { shape, passes } = Plan::read(parameters)?;
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &shape);
    let mut typed = report::claim(platform, arena, &layout, Name::literal("zones"))?;
    let (mut star, _) = report::phase(platform, INIT, || Star::new(platform, shape, places, &mut typed));
    let ((done, lookups), ticks) = report::phase(platform, COMPUTE, || star.solve(passes as u32));
    report::time(platform, ticks);
    let zones = shape.all_cells() as u64;
    report_rate(platform, ZONES, zones * done, ticks);
    let per_zone = lookups as f64 / (zones * done) as f64;
    report::result(platform, Name::literal("lookups"), per_zone, Name::literal("per_zone"));
    let (wrong, _) = report::phase(platform, VERIFY, || star.count_wrong() + star.table.count_wrong());
    report::verdict(platform, wrong, zones + POINTS as u64)
}

/// Places of the slices in the arena.
struct Places {
    table: table::Places,
    numbers: Place<f64>,
}

impl Places {
    fn new(layout: &mut Layout, shape: &Shape) -> Self {
        Self { table: table::Places::new(layout), numbers: layout.place(shape.numbers() as u64) }
    }
}

/// The zones of a star, and the table for their electrons.
struct Star<'p, 'm> {
    table: Table<'m>,
    blocks: Blocks<'p, 'm>,
}

impl<'p, 'm> Star<'p, 'm> {
    fn new(platform: &'p dyn Platform, shape: Shape, places: Places, typed: &mut Typed<'m>) -> Self {
        let table = Table::new(places.table, typed);
        let mut blocks = Blocks { platform, shape, numbers: typed.take(places.numbers) };
        blocks.for_each(|index, block| {
            for (place, cell) in shape.inside() {
                let zone = &mut block[place..place + shape.variables];
                let known = KnownZone::of(&shape, index, cell);
                known.given().iter().zip(&mut *zone).for_each(|(number, variable)| *variable = *number);
                zone[TEMPERATURE] = known.temperature * (0.875 + 0.25 * known.share(TEMPERATURE));
                let unused = zone.iter_mut().enumerate().skip(USED);
                unused.for_each(|(variable, number)| *number = known.share(variable));
            }
        });
        Self { table, blocks }
    }

    /// Runs the timed part. Returns the number of passes and of lookups.
    fn solve(&mut self, passes: u32) -> (u64, u64) {
        let (mut done, mut lookups) = (0, 0);
        let (shape, platform) = (self.blocks.shape, self.blocks.platform);
        for _ in report::steps(platform, passes) {
            let table = &self.table;
            let of_members = self.blocks.on_members(|_, numbers| {
                numbers.chunks_exact_mut(shape.block_len()).map(|block| solve_block(table, &shape, block)).sum::<u64>()
            });
            lookups += of_members.into_iter().flatten().sum::<u64>();
            done += 1;
        }
        (done, lookups)
    }

    /// Number of zones with a variable that is wrong.
    fn count_wrong(&self) -> u64 {
        let shape = self.blocks.shape;
        self.blocks.count(|index, block| {
            let is_wrong = |(place, cell): &(usize, [usize; 3])| {
                !KnownZone::of(&shape, index, *cell).is_right(&block[*place..place + shape.variables])
            };
            shape.inside().filter(is_wrong).count() as u64
        })
    }
}

/// Solves all zones of a block, row by row. Returns the number of lookups.
fn solve_block(table: &Table<'_>, shape: &Shape, block: &mut [f64]) -> u64 {
    let mut lookups = 0;
    for row in shape.rows(0) {
        let row = &mut block[row + shape.guards * shape.variables..][..shape.cells * shape.variables];
        for zone in row.chunks_exact_mut(shape.variables) {
            lookups += u64::from(solve_zone(table, zone));
        }
    }
    lookups
}

/// Finds the temperature of a zone, and everything that follows from it. Returns the number of lookups.
fn solve_zone(table: &Table<'_>, zone: &mut [f64]) -> u32 {
    let matter = Matter { density: zone[DENSITY], nucleons: zone[NUCLEONS], electrons: zone[ELECTRONS] };
    let (energy, columns) = (zone[ENERGY], table.columns(matter.density * matter.electrons));
    let (mut temperature, mut lookups) = (zone[TEMPERATURE] * CHANGE, 0);
    let state = loop {
        let state = matter.state(temperature, &table.at(&columns, temperature));
        lookups += 1;
        let next = temperature + (energy - state.energy) / state.heat;
        if (next - temperature).abs() <= PRECISION * temperature || lookups == LOOKUPS_MAX {
            break state;
        }
        // Far from the solution a step may lead to a temperature below zero.
        temperature = next.clamp(temperature / 2.0, temperature * 2.0);
    };
    zone[TEMPERATURE] = temperature;
    state.results().iter().for_each(|(variable, number)| zone[*variable] = *number);
    lookups
}

impl State {
    /// The variables of a zone that follow from its temperature.
    fn results(&self) -> [(usize, f64); 5] {
        [
            (PRESSURE, self.pressure),
            (ENTROPY, self.entropy),
            (GAMMA, self.gamma),
            (POTENTIAL, self.potential),
            (NUMBER, self.number),
        ]
    }
}

/// A zone as its position determines it, without reading memory.
struct KnownZone {
    matter: Matter,
    temperature: f64,
    state: State,
    /// Number of the zone, unique in the mesh.
    number: u64,
}

/// The star's middle is dense and hot. From there to its edge the logarithms of both fall with the square of the
/// distance: g/cm³, then K.
const DENSITY_LOGS: [f64; 2] = [9.3, 4.0];
const TEMPERATURE_LOGS: [f64; 2] = [9.7, 8.0];

impl KnownZone {
    fn of(shape: &Shape, block: usize, [i, j, k]: [usize; 3]) -> Self {
        let length = shape.blocks * shape.cells;
        let along = block * shape.cells + i;
        let number = ((k * shape.cells + j) * length + along) as u64;
        let share = |variable: usize| share(number, variable);
        let distance = along as f64 / length as f64;
        let profile = |[middle, edge]: [f64; 2]| {
            libm::exp(core::f64::consts::LN_10 * (middle + (edge - middle) * distance * distance))
        };
        // No two zones are the same, so that a zone at the place of another one is found.
        let matter = Matter {
            density: profile(DENSITY_LOGS) * (1.0 + 0.05 * share(DENSITY)),
            nucleons: 12.0 + 4.0 * share(NUCLEONS),
            electrons: 0.48 + 0.02 * share(ELECTRONS),
        };
        let temperature = profile(TEMPERATURE_LOGS) * (1.0 + 0.2 * share(ENERGY));
        Self { matter, temperature, state: matter.known_state(temperature), number }
    }

    /// A number from 0 to 1, unique to the zone and the variable.
    fn share(&self, variable: usize) -> f64 {
        share(self.number, variable)
    }

    /// The variables that no pass changes, the first of a zone.
    fn given(&self) -> [f64; 4] {
        [self.matter.density, self.state.energy, self.matter.nucleons, self.matter.electrons]
    }

    /// Whether all variables of a zone are right: given and unused ones exactly, the others within their tolerances.
    fn is_right(&self, zone: &[f64]) -> bool {
        let mut results = [(TEMPERATURE, self.temperature); 6];
        results[1..].copy_from_slice(&self.state.results());
        let are_results_right = results.iter().zip(TOLERANCES).all(|((variable, number), (of, most))| {
            *variable == of && (zone[of] - number).abs() <= most * number.abs().max(1.0)
        });
        let are_unused_right = (USED..zone.len()).all(|variable| zone[variable] == self.share(variable));
        zone[..TEMPERATURE] == self.given() && are_unused_right && are_results_right
    }
}

/// A number from 0 to 1, unique to a zone and a variable.
fn share(zone: u64, variable: usize) -> f64 {
    (word(zone, variable as u64 + 1) >> 32) as f64 / (1u64 << 32) as f64
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    const SMALL: Shape = Shape { blocks: 60, cells: 4, guards: 2, variables: 11 };

    /// Makes a star on two threads.
    fn with_star<R>(body: impl FnOnce(&mut Star<'_, '_>) -> R) -> R {
        let mut words = vec![u64::MAX; 6 << 19];
        let arena = Arena::from_words(&mut words);
        native::run(2, 0, Box::new(|_| ()), |platform| {
            let mut layout = Layout::at(arena.address());
            let places = Places::new(&mut layout, &SMALL);
            let mut typed = arena.typed(&layout).expect("24 MiB hold a small star");
            body(&mut Star::new(platform, SMALL, places, &mut typed))
        })
    }

    #[test]
    fn every_zone_is_wrong_before_the_first_pass_and_right_after_each() {
        with_star(|star| {
            assert_eq!(star.count_wrong(), SMALL.all_cells() as u64);
            for pass in 1..4 {
                let (_, lookups) = star.solve(1);
                let per_zone = lookups as f64 / SMALL.all_cells() as f64;
                assert!((2.0..6.0).contains(&per_zone), "pass {pass}: {per_zone} lookups");
                assert_eq!(star.count_wrong(), 0, "pass {pass}");
            }
        });
    }

    #[test]
    fn a_change_of_any_variable_is_found_in_its_zone() {
        with_star(|star| {
            star.solve(1);
            let (place, _) = SMALL.inside().nth(9).expect("a block has 64 zones");
            let zone = SMALL.block_len() + place;
            for variable in 0..SMALL.variables {
                let before = star.blocks.numbers[zone + variable];
                star.blocks.numbers[zone + variable] *= 1.0 + 1e-3;
                assert_eq!(star.count_wrong(), 1, "variable {variable}");
                star.blocks.numbers[zone + variable] = before;
            }
            assert_eq!(star.count_wrong(), 0);
        });
    }

    #[test]
    fn the_errors_are_a_quarter_of_their_tolerances_at_most() {
        with_star(|star| {
            star.solve(2);
            for (variable, most) in TOLERANCES {
                let mut worst = 0.0_f64;
                for (index, block) in star.blocks.numbers.chunks_exact(SMALL.block_len()).enumerate() {
                    for (place, cell) in SMALL.inside() {
                        let known = KnownZone::of(&SMALL, index, cell);
                        let results = known.state.results();
                        let of = results.iter().find(|(of, _)| *of == variable).map_or(known.temperature, |of| of.1);
                        worst = worst.max((block[place + variable] - of).abs() / of.abs().max(1.0));
                    }
                }
                assert!(worst <= most / 4.0, "variable {variable}: {worst:e}");
            }
        });
    }
}
