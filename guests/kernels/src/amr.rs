//! amr: fields in blocks of cells, stored as codes with an adaptive mesh store them (FLASH on PARAMESH:
//! `unk(variable, i, j, k, block)`).
//!
//! ```text
//!   block 0            block 1            …        blocks side by side along i, the last beside the first
//!   ┌──────────────┐   ┌──────────────┐
//!   │ guard cells  │   │              │            a cell: │ v0 v1 v2 … │   the variables of a cell side by side,
//!   │  ┌────────┐  │   │  ┌────────┐  │                                     so one variable of all cells is strided
//!   │  │ cells³ │  │   │  │        │  │
//!   │  └────────┘  │   │  └────────┘  │
//!   └──────────────┘   └──────────────┘
//!
//!   pass:  for i, j, k:  guard cells from the neighbours ─▶ each row of each variable one step along it
//!          then each variable summed up over all cells of all blocks
//! ```
//!
//! Two strides load the TLB: the variables between two cells, and a whole block between two blocks. A step is a
//! second-order upwind scheme with van Leer's idea and the minmod limiter. At Courant number one it is exact: each
//! pass moves every field by one cell along i, j and k. So the initial position of a number determines its final
//! value, without reading memory, and each sum must stay constant. Values are integers, so sums are exact in any
//! order and with any number of vCPUs.

use core::hint::black_box;
use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use crate::arena::{Layout, Place, Typed};
use crate::moves;
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges, sum};
use crate::platform::ticks_to_seconds;
use crate::registry::{Figure, Kernel, MemoryNeed};
use crate::report::{self, COMPUTE, INIT, VERIFY};
use crate::words::word;
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
    Parameter { name: "blocks", default: "256", unit: "count", meaning: "blocks, 1 to 32768" },
    Parameter { name: "cells", default: "8", unit: "count", meaning: "cells along an edge of a block, 2 to 64" },
    Parameter {
        name: "guards",
        default: "4",
        unit: "count",
        meaning: "layers of guard cells on each side, 2 to 8, no more than cells",
    },
    Parameter { name: "variables", default: "12", unit: "count", meaning: "variables of a cell, 1 to 64" },
    Parameter { name: "passes", default: "4", unit: "count", meaning: "steps along all three directions, 1 to 1000" },
];

/// At most 2^33 cells, with 64³ in each block, so that their sum is still exact.
const BLOCKS: Range<u64> = 1..(1 << 15) + 1;
const CELLS: Range<u64> = 2..65;
/// Layers of guard cells. The scheme reads two cells upstream.
const GUARDS: Range<u64> = 2..9;
const VARIABLES: Range<u64> = 1..65;
const PASSES: Range<u64> = 1..1001;
/// Number of bits of a value.
const VALUE_BITS: u32 = 20;
const _: () = assert!(
    ((BLOCKS.end - 1) * (CELLS.end - 1).pow(3)) << VALUE_BITS <= 1 << f64::MANTISSA_DIGITS,
    "sums of a variable must be exact"
);
/// Cells of the longest row, including guard cells.
const ROW_MAX: usize = (CELLS.end - 1 + 2 * (GUARDS.end - 1)) as usize;

/// Shape of the memory: blocks, cells and variables.
#[derive(Clone, Copy, Debug)]
struct Shape {
    blocks: usize,
    cells: usize,
    guards: usize,
    variables: usize,
}

impl Shape {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let cells = parameters.count("cells", CELLS.start, CELLS.end - 1)?.unwrap_or(8);
        let guards_max = cells.min(GUARDS.end - 1);
        Ok(Self {
            blocks: parameters.count("blocks", BLOCKS.start, BLOCKS.end - 1)?.unwrap_or(256) as usize,
            cells: cells as usize,
            guards: parameters.count("guards", GUARDS.start, guards_max)?.unwrap_or(guards_max.min(4)) as usize,
            variables: parameters.count("variables", VARIABLES.start, VARIABLES.end - 1)?.unwrap_or(12) as usize,
        })
    }

    /// Cells along an edge of a block, including guard cells.
    const fn edge(&self) -> usize {
        self.cells + 2 * self.guards
    }

    /// Numbers from a cell to the next along i, j and k, and to the next block.
    const fn strides(&self) -> [usize; 4] {
        let (v, edge) = (self.variables, self.edge());
        [v, v * edge, v * edge * edge, v * edge * edge * edge]
    }

    const fn block_len(&self) -> usize {
        self.strides()[3]
    }

    /// Numbers in the layers at both sides of a block that its neighbours along i read.
    const fn sides_len(&self) -> usize {
        2 * self.side_len()
    }

    const fn side_len(&self) -> usize {
        self.guards * self.cells * self.cells * self.variables
    }

    /// Cells of all blocks, without guard cells.
    const fn all_cells(&self) -> usize {
        self.blocks * self.cells * self.cells * self.cells
    }

    /// Offsets in a block at which the rows along a direction begin, including guard cells along it. The guard
    /// cells of the other two directions are left out.
    fn rows(self, direction: usize) -> impl Iterator<Item = usize> {
        let strides = self.strides();
        let (one, other) = match direction {
            0 => (strides[1], strides[2]),
            1 => (strides[0], strides[2]),
            _ => (strides[0], strides[1]),
        };
        let inside = self.guards..self.guards + self.cells;
        inside.clone().flat_map(move |b| inside.clone().map(move |a| a * one + b * other))
    }

    /// Offset in a block of each cell that is not a guard cell, with its indices (i, j, k).
    fn inside(self) -> impl Iterator<Item = (usize, [usize; 3])> {
        let [along_i, along_j, along_k, _] = self.strides();
        let (cells, guards) = (self.cells, self.guards);
        (0..cells * cells * cells).map(move |index| {
            let [i, j, k] = [index % cells, index / cells % cells, index / cells / cells];
            ((i + guards) * along_i + (j + guards) * along_j + (k + guards) * along_k, [i, j, k])
        })
    }

    /// Value of a variable in a cell of a block after a number of passes: a number unique to one cell, moved along.
    fn value(&self, variable: usize, block: usize, [i, j, k]: [usize; 3], passes: usize) -> f64 {
        let back = |at: usize, length: usize| (at + length - passes % length) % length;
        let length = self.blocks * self.cells;
        let (x, y, z) = (back(block * self.cells + i, length), back(j, self.cells), back(k, self.cells));
        let cell = (z * self.cells + y) * length + x;
        (word(cell as u64, variable as u64 + 1) >> (64 - VALUE_BITS)) as f64
    }
}

/// The validated parameters of a run.
struct Plan {
    shape: Shape,
    passes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let passes = parameters.count("passes", PASSES.start, PASSES.end - 1)?.unwrap_or(4);
        Ok(Self { shape: Shape::read(parameters)?, passes })
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

/// Prints the rate in millions per second if the frequency of the counter is known.
fn report_rate(platform: &dyn Platform, figure: Figure, numbers: u64, ticks: u64) {
    let hz = platform.tsc_hz();
    if hz > 0 {
        figure.emit(platform, numbers as f64 / ticks_to_seconds(ticks.max(1), hz) / 1e6);
    }
}

/// Places of the slices in the arena.
struct Places {
    numbers: Place<f64>,
    sides: Place<f64>,
}

impl Places {
    fn new(layout: &mut Layout, shape: &Shape) -> Self {
        Self {
            numbers: layout.place((shape.blocks * shape.block_len()) as u64),
            sides: layout.place((shape.blocks * shape.sides_len()) as u64),
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
    platform: &'p dyn Platform,
    shape: Shape,
    numbers: &'m mut [f64],
    /// For each block, its outermost cells on the low and on the high side along i.
    sides: &'m mut [f64],
    /// The sum of each variable.
    sums: [f64; VARIABLES.end as usize],
}

impl<'p, 'm> Mesh<'p, 'm> {
    fn new(platform: &'p dyn Platform, shape: Shape, places: Places, typed: &mut Typed<'m>) -> Self {
        let (numbers, sides) = (typed.take(places.numbers), typed.take(places.sides));
        let mut mesh = Self { platform, shape, numbers, sides, sums: [0.0; VARIABLES.end as usize] };
        mesh.for_each_block(|index, block| {
            for (place, cell) in shape.inside() {
                let variables = block[place..place + shape.variables].iter_mut().enumerate();
                variables.for_each(|(variable, number)| *number = shape.value(variable, index, cell, 0));
            }
        });
        for variable in 0..shape.variables {
            mesh.sums[variable] = mesh.sum_of_values(variable);
        }
        mesh
    }

    /// The sum of a variable by its definition, without reading memory.
    fn sum_of_values(&self, variable: usize) -> f64 {
        let shape = self.shape;
        sum(deal(self.platform, ranges(shape.blocks, self.platform.vcpus()), |_, blocks| {
            blocks
                .flat_map(|block| shape.inside().map(move |(_, cell)| shape.value(variable, block, cell, 0)))
                .sum::<f64>()
        }))
    }

    /// Distributes the blocks to the vCPUs and calls `work(index, block)` for each.
    fn for_each_block(&mut self, work: impl Fn(usize, &mut [f64]) + Sync) {
        let (members, shape) = (self.platform.vcpus(), self.shape);
        let owned = || ranges(shape.blocks, members);
        let parts = cut(self.numbers, owned().map(|blocks| blocks.len() * shape.block_len()));
        deal(self.platform, parts.zip(owned()), |_, (numbers, blocks)| {
            numbers.chunks_exact_mut(shape.block_len()).zip(blocks).for_each(|(block, index)| work(index, block));
        });
    }

    /// Runs the timed part.
    fn advance(&mut self, passes: u32) -> Found {
        let mut found = Found::default();
        for _ in report::steps(self.platform, passes) {
            let start = self.platform.now();
            (0..3).for_each(|direction| self.step(direction));
            let middle = self.platform.now();
            let sums = 0..self.shape.variables;
            found.wrong_sums += sums.filter(|variable| self.gather(*variable) != self.sums[*variable]).count() as u64;
            found.update_ticks += middle.saturating_sub(start);
            found.gather_ticks += self.platform.now().saturating_sub(middle);
        }
        found
    }

    /// The sum of a variable over all cells of all blocks.
    fn gather(&self, variable: usize) -> f64 {
        let (shape, numbers) = (self.shape, &*self.numbers);
        let (cells, along_i) = (shape.cells, shape.strides()[0]);
        sum(deal(self.platform, ranges(shape.blocks, self.platform.vcpus()), |_, blocks| {
            let own = &numbers[blocks.start * shape.block_len()..blocks.end * shape.block_len()];
            let rows = own
                .chunks_exact(shape.block_len())
                .flat_map(|block| shape.rows(0).map(|start| &block[start + shape.guards * along_i + variable..]));
            rows.map(|row| row.iter().step_by(along_i).take(cells).sum::<f64>()).sum()
        }))
    }

    /// Moves all cells one step along a direction.
    fn step(&mut self, direction: usize) {
        let shape = self.shape;
        // The compiler must not know the Courant number, or it would remove the computation.
        let courant = black_box(1.0);
        if direction == 0 {
            self.exchange_sides();
        } else {
            self.for_each_block(|_, block| wrap_guards(&shape, direction, block));
        }
        let stride = shape.strides()[direction];
        self.for_each_block(|_, block| {
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
        let (members, shape) = (self.platform.vcpus(), self.shape);
        let (numbers, owned) = (&*self.numbers, || ranges(shape.blocks, members));
        let parts = cut(self.sides, owned().map(|blocks| blocks.len() * shape.sides_len()));
        deal(self.platform, parts.zip(owned()), |_, (sides, blocks)| {
            let blocks = numbers[blocks.start * shape.block_len()..].chunks_exact(shape.block_len());
            for (sides, block) in sides.chunks_exact_mut(shape.sides_len()).zip(blocks) {
                let (low, high) = sides.split_at_mut(shape.side_len());
                copy_layers(&shape, shape.guards, block, low);
                copy_layers(&shape, shape.cells, block, high);
            }
        });
        let sides = core::mem::take(&mut self.sides);
        self.for_each_block(|index, block| {
            let of_block =
                |index: usize| sides[index * shape.sides_len()..][..shape.sides_len()].split_at(shape.side_len());
            let (_, before) = of_block((index + shape.blocks - 1) % shape.blocks);
            let (behind, _) = of_block((index + 1) % shape.blocks);
            set_layers(&shape, 0, block, before);
            set_layers(&shape, shape.guards + shape.cells, block, behind);
        });
        self.sides = sides;
    }

    /// Number of values that differ from the expected ones.
    fn count_wrong(&mut self, passes: usize) -> u64 {
        let (shape, numbers) = (self.shape, &*self.numbers);
        let counts = deal(self.platform, ranges(shape.blocks, self.platform.vcpus()), |_, blocks| {
            blocks
                .map(|index| count_wrong_in(&shape, index, &numbers[index * shape.block_len()..], passes))
                .sum::<u64>()
        });
        counts.into_iter().flatten().sum()
    }
}

fn count_wrong_in(shape: &Shape, index: usize, block: &[f64], passes: usize) -> u64 {
    let wrong_in_cell = |(place, cell): (usize, [usize; 3])| {
        let variables = block[place..place + shape.variables].iter().enumerate();
        variables.filter(|(variable, number)| **number != shape.value(*variable, index, cell, passes)).count() as u64
    };
    shape.inside().map(wrong_in_cell).sum()
}

/// Copies as many layers as there are guard layers out of a block, from cell `first` along i on.
fn copy_layers(shape: &Shape, first: usize, block: &[f64], layers: &mut [f64]) {
    let length = shape.guards * shape.variables;
    for (start, layer) in shape.rows(0).zip(layers.chunks_exact_mut(length)) {
        moves::copy(&block[start + first * shape.variables..][..length], layer);
    }
}

/// Copies such layers into a block.
fn set_layers(shape: &Shape, first: usize, block: &mut [f64], layers: &[f64]) {
    let length = shape.guards * shape.variables;
    for (start, layer) in shape.rows(0).zip(layers.chunks_exact(length)) {
        moves::copy(layer, &mut block[start + first * shape.variables..][..length]);
    }
}

/// Fills guard cells from the other end of the same block.
fn wrap_guards(shape: &Shape, direction: usize, block: &mut [f64]) {
    let (stride, variables) = (shape.strides()[direction], shape.variables);
    for start in shape.rows(direction) {
        let mut copy =
            |from: usize, to: usize| moves::copy_within(block, start + from * stride, start + to * stride, variables);
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
            mesh.numbers[SMALL.block_len() + place + 2] += 1.0;
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

    #[test]
    fn a_row_along_each_direction_is_a_stride_apart() {
        let [along_i, along_j, along_k, block] = SMALL.strides();
        assert_eq!([along_i, along_j, along_k, block], [3, 24, 192, 1536]);
        assert_eq!(SMALL.rows(0).take(5).collect::<std::vec::Vec<_>>(), [432, 456, 480, 504, 624]);
        assert_eq!(SMALL.inside().next(), Some((6 + 48 + 384, [0, 0, 0])));
    }
}
