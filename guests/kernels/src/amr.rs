//! amr: fields in the blocks of a [mesh], as codes with an adaptive mesh store them.
//!
//! ```text
//!   blocks side by side along i, the last beside the first
//!
//!   pass:  for i, j, k:  guard cells from the neighbours ─▶ each row of each variable one step along it
//!          then each variable summed up over all cells of all blocks
//! ```
//!
//! A step is a second-order upwind scheme with van Leer's idea and the minmod limiter. At Courant number one it is
//! exact: each pass moves every field by one cell along i, j and k. So the initial position of a number determines
//! its final value, without reading memory, and each sum must stay constant. Values are integers, so sums are exact
//! in any order and with any number of vCPUs.

use core::hint::black_box;
use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use crate::arena::{Layout, Place, Typed};
use crate::copy;
use crate::kernel::{Kernel, MemoryNeed};
use crate::mesh::{self, BLOCKS_MAX, Blocks, CELLS_MAX, ROW_MAX, Shape, VARIABLES_MAX, report_rate};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges, sum};
use crate::report::{self, COMPUTE, Figure, INIT, VERIFY};
use crate::test_pattern::word;
use crate::{Arena, KernelError, Platform};

/// The adaptive mesh in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("amr"),
    summary: "blocks of cells with their variables side by side, as in FLASH: large strides over much memory",
    classes: &[],
    parameters: PARAMETERS,
    quick: "blocks=4 variables=5",
    figure: UPDATES,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

/// Steps of one variable of one cell along one direction, including the exchange of guard cells.
const UPDATES: Figure = Figure::literal("updates", "M/s");
/// Strided numbers added up.
const GATHERS: Figure = Figure::literal("gathers", "M/s");

const PARAMETERS: &[Parameter] = &[
    mesh::BLOCKS,
    mesh::CELLS,
    mesh::GUARDS,
    Parameter { name: mesh::VARIABLES_NAME, default: "12", unit: "count", meaning: "variables of a cell, 1 to 64" },
    Parameter { name: "passes", default: "4", unit: "count", meaning: "steps along all three directions, 1 to 1000" },
];

const PASSES: Range<u64> = 1..1001;
/// Number of bits of a value.
const VALUE_BITS: u32 = 20;
const _: () = assert!(
    (BLOCKS_MAX * CELLS_MAX.pow(3)) << VALUE_BITS <= 1 << f64::MANTISSA_DIGITS,
    "sums of a variable must be exact"
);

/// Numbers in the layers at one side of a block that its neighbour along i reads.
const fn side_len(shape: &Shape) -> usize {
    shape.guards * shape.cells * shape.cells * shape.variables
}

/// Numbers in the layers at both sides of a block along i.
const fn sides_len(shape: &Shape) -> usize {
    2 * side_len(shape)
}

/// Value of a variable in a cell of a block after a number of passes: a number unique to one cell, moved along.
fn value(shape: &Shape, variable: usize, block: usize, [i, j, k]: [usize; 3], passes: usize) -> f64 {
    let back = |at: usize, length: usize| (at + length - passes % length) % length;
    let length = shape.blocks * shape.cells;
    let (x, y, z) = (back(block * shape.cells + i, length), back(j, shape.cells), back(k, shape.cells));
    let cell = (z * shape.cells + y) * length + x;
    (word(cell as u64, variable as u64 + 1) >> (64 - VALUE_BITS)) as f64
}

/// The validated parameters of a run.
struct Plan {
    shape: Shape,
    passes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let passes = parameters.count("passes", PASSES.start, PASSES.end - 1)?.unwrap_or(4);
        Ok(Self { shape: Shape::read(parameters, 1)?, passes })
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
    let mut typed = report::claim(platform, arena, &layout, Name::literal("blocks"))?;
    let (mut mesh, _) = report::phase(platform, INIT, || Mesh::new(platform, shape, places, &mut typed));
    let (found, ticks) = report::phase(platform, COMPUTE, || mesh.advance(passes as u32));
    report::time(platform, ticks);
    let numbers = (shape.all_cells() * shape.variables) as u64 * passes;
    report_rate(platform, UPDATES, 3 * numbers, found.update_ticks);
    report_rate(platform, GATHERS, numbers, found.gather_ticks);
    let (wrong_values, _) = report::phase(platform, VERIFY, || mesh.count_wrong(passes as usize));
    let sums = passes * shape.variables as u64;
    report::verdict(platform, wrong_values + found.wrong_sums, (shape.all_cells() * shape.variables) as u64 + sums)
}

/// Places of the slices in the arena.
struct Places {
    numbers: Place<f64>,
    sides: Place<f64>,
}

impl Places {
    fn new(layout: &mut Layout, shape: &Shape) -> Self {
        Self {
            numbers: layout.place(shape.numbers() as u64),
            sides: layout.place((shape.blocks * sides_len(shape)) as u64),
        }
    }
}

/// Errors found in the timed part.
#[derive(Default)]
struct Found {
    update_ticks: u64,
    gather_ticks: u64,
    wrong_sums: u64,
}

/// All blocks of the mesh.
struct Mesh<'p, 'm> {
    blocks: Blocks<'p, 'm>,
    /// For each block, its outermost cells on the low and on the high side along i.
    sides: &'m mut [f64],
    /// The sum of each variable.
    sums: [f64; VARIABLES_MAX as usize],
}

impl<'p, 'm> Mesh<'p, 'm> {
    fn new(platform: &'p dyn Platform, shape: Shape, places: Places, typed: &mut Typed<'m>) -> Self {
        let (numbers, sides) = (typed.take(places.numbers), typed.take(places.sides));
        let blocks = Blocks { platform, shape, numbers };
        let mut mesh = Self { blocks, sides, sums: [0.0; VARIABLES_MAX as usize] };
        mesh.blocks.for_each(|index, block| {
            for (place, cell) in shape.inside() {
                let variables = block[place..place + shape.variables].iter_mut().enumerate();
                variables.for_each(|(variable, number)| *number = value(&shape, variable, index, cell, 0));
            }
        });
        for variable in 0..shape.variables {
            mesh.sums[variable] = mesh.sum_of_values(variable);
        }
        mesh
    }

    /// The sum of a variable by its definition, without reading memory.
    fn sum_of_values(&self, variable: usize) -> f64 {
        let (shape, platform) = (self.blocks.shape, self.blocks.platform);
        sum(deal(platform, ranges(shape.blocks, platform.vcpus()), |_, blocks| {
            blocks
                .flat_map(|block| shape.inside().map(move |(_, cell)| value(&shape, variable, block, cell, 0)))
                .sum::<f64>()
        }))
    }

    /// Runs the timed part.
    fn advance(&mut self, passes: u32) -> Found {
        let mut found = Found::default();
        for _ in report::steps(self.blocks.platform, passes) {
            let start = self.blocks.platform.now();
            (0..3).for_each(|direction| self.step(direction));
            let middle = self.blocks.platform.now();
            let sums = 0..self.blocks.shape.variables;
            found.wrong_sums += sums.filter(|variable| self.gather(*variable) != self.sums[*variable]).count() as u64;
            found.update_ticks += middle.saturating_sub(start);
            found.gather_ticks += self.blocks.platform.now().saturating_sub(middle);
        }
        found
    }

    /// The sum of a variable over all cells of all blocks.
    fn gather(&self, variable: usize) -> f64 {
        let (shape, numbers) = (self.blocks.shape, &*self.blocks.numbers);
        let (cells, along_i) = (shape.cells, shape.strides()[0]);
        sum(deal(self.blocks.platform, ranges(shape.blocks, self.blocks.platform.vcpus()), |_, blocks| {
            let own = &numbers[blocks.start * shape.block_len()..blocks.end * shape.block_len()];
            let rows = own
                .chunks_exact(shape.block_len())
                .flat_map(|block| shape.rows(0).map(|start| &block[start + shape.guards * along_i + variable..]));
            rows.map(|row| row.iter().step_by(along_i).take(cells).sum::<f64>()).sum()
        }))
    }

    /// Moves all cells one step along a direction.
    fn step(&mut self, direction: usize) {
        let shape = self.blocks.shape;
        // The compiler must not know the Courant number, or it would remove the computation.
        let courant = black_box(1.0);
        if direction == 0 {
            self.exchange_sides();
        } else {
            self.blocks.for_each(|_, block| wrap_guards(&shape, direction, block));
        }
        let stride = shape.strides()[direction];
        self.blocks.for_each(|_, block| {
            let mut cells = [0.0; ROW_MAX];
            let cells = &mut cells[..shape.edge()];
            for start in shape.rows(direction) {
                for variable in 0..shape.variables {
                    step_row(&shape, &mut block[start + variable..], stride, courant, cells);
                }
            }
        });
    }

    /// Fills the guard cells along i from the neighbouring blocks, through a copy of their sides: only the owner of
    /// a block writes to it.
    fn exchange_sides(&mut self) {
        let (platform, shape) = (self.blocks.platform, self.blocks.shape);
        let (side_len, sides_len) = (side_len(&shape), sides_len(&shape));
        let (numbers, owned) = (&*self.blocks.numbers, || ranges(shape.blocks, platform.vcpus()));
        let parts = cut(self.sides, owned().map(|blocks| blocks.len() * sides_len));
        deal(platform, parts.zip(owned()), |_, (sides, blocks)| {
            let blocks = numbers[blocks.start * shape.block_len()..].chunks_exact(shape.block_len());
            for (sides, block) in sides.chunks_exact_mut(sides_len).zip(blocks) {
                let (low, high) = sides.split_at_mut(side_len);
                copy_layers(&shape, shape.guards, block, low);
                copy_layers(&shape, shape.cells, block, high);
            }
        });
        let sides = core::mem::take(&mut self.sides);
        self.blocks.for_each(|index, block| {
            let of_block = |index: usize| sides[index * sides_len..][..sides_len].split_at(side_len);
            let (_, before) = of_block((index + shape.blocks - 1) % shape.blocks);
            let (behind, _) = of_block((index + 1) % shape.blocks);
            set_layers(&shape, 0, block, before);
            set_layers(&shape, shape.guards + shape.cells, block, behind);
        });
        self.sides = sides;
    }

    /// Number of values that differ from the expected ones.
    fn count_wrong(&self, passes: usize) -> u64 {
        let shape = self.blocks.shape;
        self.blocks.count(|index, block| count_wrong_in(&shape, index, block, passes))
    }
}

fn count_wrong_in(shape: &Shape, index: usize, block: &[f64], passes: usize) -> u64 {
    let wrong_in_cell = |(place, cell): (usize, [usize; 3])| {
        let variables = block[place..place + shape.variables].iter().enumerate();
        variables.filter(|(variable, number)| **number != value(shape, *variable, index, cell, passes)).count() as u64
    };
    shape.inside().map(wrong_in_cell).sum()
}

/// Copies as many layers as there are guard layers out of a block, from cell `first` along i on.
fn copy_layers(shape: &Shape, first: usize, block: &[f64], layers: &mut [f64]) {
    let length = shape.guards * shape.variables;
    for (start, layer) in shape.rows(0).zip(layers.chunks_exact_mut(length)) {
        copy::copy(&block[start + first * shape.variables..][..length], layer);
    }
}

/// Copies such layers into a block.
fn set_layers(shape: &Shape, first: usize, block: &mut [f64], layers: &[f64]) {
    let length = shape.guards * shape.variables;
    for (start, layer) in shape.rows(0).zip(layers.chunks_exact(length)) {
        copy::copy(layer, &mut block[start + first * shape.variables..][..length]);
    }
}

/// Fills guard cells from the other end of the same block.
fn wrap_guards(shape: &Shape, direction: usize, block: &mut [f64]) {
    let (stride, variables) = (shape.strides()[direction], shape.variables);
    for start in shape.rows(direction) {
        let mut copy =
            |from: usize, to: usize| copy::copy_within(block, start + from * stride, start + to * stride, variables);
        for layer in 0..shape.guards {
            copy(shape.cells + layer, layer);
            copy(shape.guards + layer, shape.guards + shape.cells + layer);
        }
    }
}

/// Moves one variable of a row one step along it: `new = u − c·(F(right) − F(left))`. `cells` has room for the row.
fn step_row(shape: &Shape, row: &mut [f64], stride: usize, courant: f64, cells: &mut [f64]) {
    cells.iter_mut().zip(row.iter().step_by(stride)).for_each(|(cell, number)| *cell = *number);
    let inside = shape.guards..shape.guards + shape.cells;
    let mut left = flow_right(&cells[inside.start - 2..], courant);
    let numbers = row.iter_mut().step_by(stride).skip(shape.guards);
    for (number, upstream) in numbers.zip(cells[inside.start - 1..inside.end + 1].windows(3)) {
        let right = flow_right(upstream, courant);
        *number = upstream[1] - courant * (right - left);
        left = right;
    }
}

/// Flux over the right face of the middle one of three cells: its value there after half a time step, by the lesser
/// of the two slopes beside it.
#[inline(always)]
fn flow_right(cells: &[f64], courant: f64) -> f64 {
    let (before, behind) = (cells[1] - cells[0], cells[2] - cells[1]);
    let slope = if before * behind <= 0.0 {
        0.0
    } else if before.abs() < behind.abs() {
        before
    } else {
        behind
    };
    cells[1] + 0.5 * (1.0 - courant) * slope
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    const SMALL: Shape = Shape { blocks: 3, cells: 4, guards: 2, variables: 3 };

    /// Makes a mesh on two threads.
    fn with_mesh<R>(shape: Shape, body: impl FnOnce(&mut Mesh<'_, '_>) -> R) -> R {
        let mut words = vec![u64::MAX; 1 << 16];
        let arena = Arena::from_words(&mut words);
        native::run(2, 0, Box::new(|_| ()), |platform| {
            let mut layout = Layout::at(arena.address());
            let places = Places::new(&mut layout, &shape);
            let mut typed = arena.typed(&layout).expect("512 KiB hold a small mesh");
            body(&mut Mesh::new(platform, shape, places, &mut typed))
        })
    }

    #[test]
    fn fields_move_by_one_cell_a_pass_and_their_sums_stay() {
        for shape in [SMALL, Shape { blocks: 1, cells: 2, guards: 2, variables: 1 }] {
            with_mesh(shape, |mesh| {
                assert_eq!(mesh.count_wrong(0), 0);
                assert_eq!(mesh.advance(7).wrong_sums, 0);
                assert_eq!(mesh.count_wrong(7), 0);
                assert_ne!(mesh.count_wrong(6), 0, "each cell has a different value");
            });
        }
    }

    #[test]
    fn a_lost_number_is_found_by_the_sum_and_at_its_place() {
        with_mesh(SMALL, |mesh| {
            let (place, _) = SMALL.inside().nth(9).expect("a block has 64 cells");
            mesh.blocks.numbers[SMALL.block_len() + place + 2] += 1.0;
            assert_eq!(mesh.advance(2).wrong_sums, 2, "one variable, in each pass");
            assert_eq!(mesh.count_wrong(2), 1);
        });
    }

    #[test]
    fn at_half_a_step_a_ramp_moves_by_half_its_slope() {
        let shape = Shape { blocks: 1, cells: 4, guards: 2, variables: 1 };
        let mut row = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0];
        step_row(&shape, &mut row, 1, 0.5, &mut [0.0; ROW_MAX][..shape.edge()]);
        assert_eq!(row, [0.0, 2.0, 3.0, 5.0, 7.0, 9.0, 12.0, 14.0]);
    }
}
