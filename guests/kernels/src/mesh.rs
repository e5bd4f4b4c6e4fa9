//! The memory of a code with an adaptive mesh (FLASH on PARAMESH: `unk(variable, i, j, k, block)`): blocks of cells
//! with guard cells around them, distributed to the vCPUs.
//!
//! ```text
//!   block 0            block 1            …        blocks side by side along i
//!   ┌──────────────┐   ┌──────────────┐
//!   │ guard cells  │   │              │            a cell: │ v0 v1 v2 … │   the variables of a cell side by side,
//!   │  ┌────────┐  │   │  ┌────────┐  │                                     so one variable of all cells is strided
//!   │  │ cells³ │  │   │  │        │  │
//!   │  └────────┘  │   │  └────────┘  │            vCPU 0 has the first blocks, vCPU 1 the next, …
//!   └──────────────┘   └──────────────┘
//! ```
//!
//! Two strides load the TLB: the variables between two cells, and a whole block between two blocks.

use core::ops::Range;

use crate::parameters::{Parameter, Parameters};
use crate::parts::{Results, cut, deal, ranges};
use crate::platform::ticks_to_seconds;
use crate::report::Figure;
use crate::{KernelError, Platform};

/// Number of blocks.
pub const BLOCKS: Parameter =
    Parameter { name: "blocks", default: "256", unit: "count", meaning: "blocks, 1 to 32768" };
/// Cells along an edge.
pub const CELLS: Parameter =
    Parameter { name: "cells", default: "8", unit: "count", meaning: "cells along an edge of a block, 2 to 64" };
/// Layers of guard cells.
pub const GUARDS: Parameter = Parameter {
    name: "guards",
    default: "4",
    unit: "count",
    meaning: "layers of guard cells on each side, 2 to 8, no more than cells",
};

/// Name of the parameter for the variables of a cell; each kernel has its own range.
pub const VARIABLES_NAME: &str = "variables";
/// Most variables of a cell.
pub const VARIABLES_MAX: u64 = 64;
const VARIABLES_DEFAULT: u64 = 12;

/// Most blocks, and most cells along an edge: at most 2^33 cells, with 64³ in each block.
pub const BLOCKS_MAX: u64 = 1 << 15;
/// Most cells along an edge of a block, without guard cells.
pub const CELLS_MAX: u64 = 64;
const CELLS_MIN: u64 = 2;
/// Layers of guard cells. The scheme of `amr` reads two cells upstream.
const GUARDS_MIN: u64 = 2;
const GUARDS_MAX: u64 = 8;
/// Cells of the longest row, including guard cells.
pub const ROW_MAX: usize = (CELLS_MAX + 2 * GUARDS_MAX) as usize;

/// Shape of the memory: blocks, cells and variables.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of blocks.
    pub blocks: usize,
    /// Cells along an edge of a block, without guard cells.
    pub cells: usize,
    /// Layers of guard cells on each side.
    pub guards: usize,
    /// Variables of a cell.
    pub variables: usize,
}

impl Shape {
    /// Reads the shape of a mesh with at least `variables_min` variables.
    pub fn read<'a>(parameters: &Parameters<'a>, variables_min: u64) -> Result<Self, KernelError<'a>> {
        let cells = parameters.count(CELLS.name, CELLS_MIN, CELLS_MAX)?.unwrap_or(8);
        let guards_max = cells.min(GUARDS_MAX);
        let variables = parameters.count(VARIABLES_NAME, variables_min, VARIABLES_MAX)?;
        Ok(Self {
            blocks: parameters.count(BLOCKS.name, 1, BLOCKS_MAX)?.unwrap_or(256) as usize,
            cells: cells as usize,
            guards: parameters.count(GUARDS.name, GUARDS_MIN, guards_max)?.unwrap_or(guards_max.min(4)) as usize,
            variables: variables.unwrap_or(VARIABLES_DEFAULT) as usize,
        })
    }

    /// Cells along an edge of a block, including guard cells.
    pub const fn edge(&self) -> usize {
        self.cells + 2 * self.guards
    }

    /// Numbers from a cell to the next along i, j and k, and to the next block.
    pub const fn strides(&self) -> [usize; 4] {
        let (v, edge) = (self.variables, self.edge());
        [v, v * edge, v * edge * edge, v * edge * edge * edge]
    }

    /// Numbers of a block.
    pub const fn block_len(&self) -> usize {
        self.strides()[3]
    }

    /// Numbers of all blocks.
    pub const fn numbers(&self) -> usize {
        self.blocks * self.block_len()
    }

    /// Cells of all blocks, without guard cells.
    pub const fn all_cells(&self) -> usize {
        self.blocks * self.cells * self.cells * self.cells
    }

    /// Offsets in a block at which the rows along a direction begin, including guard cells along it. The guard
    /// cells of the other two directions are left out.
    pub fn rows(self, direction: usize) -> impl Iterator<Item = usize> {
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
    pub fn inside(self) -> impl Iterator<Item = (usize, [usize; 3])> {
        let [along_i, along_j, along_k, _] = self.strides();
        let (cells, guards) = (self.cells, self.guards);
        (0..cells * cells * cells).map(move |index| {
            let [i, j, k] = [index % cells, index / cells % cells, index / cells / cells];
            ((i + guards) * along_i + (j + guards) * along_j + (k + guards) * along_k, [i, j, k])
        })
    }
}

/// All blocks, and the vCPUs that share them.
pub struct Blocks<'p, 'm> {
    /// The vCPUs that share the blocks.
    pub platform: &'p dyn Platform,
    /// Shape of the memory.
    pub shape: Shape,
    /// The numbers of all blocks.
    pub numbers: &'m mut [f64],
}

impl Blocks<'_, '_> {
    /// Distributes the blocks to the vCPUs and calls `work(index, block)` for each.
    pub fn for_each(&mut self, work: impl Fn(usize, &mut [f64]) + Sync) {
        let length = self.shape.block_len();
        self.on_members(|blocks, numbers| {
            numbers.chunks_exact_mut(length).zip(blocks).for_each(|(block, index)| work(index, block));
        });
    }

    /// Calls `work(blocks, numbers)` on each vCPU with its own blocks.
    pub fn on_members<R: Send>(&mut self, work: impl Fn(Range<usize>, &mut [f64]) -> R + Sync) -> Results<R> {
        let (members, shape) = (self.platform.vcpus(), self.shape);
        let owned = || ranges(shape.blocks, members);
        let parts = cut(self.numbers, owned().map(|blocks| blocks.len() * shape.block_len()));
        deal(self.platform, parts.zip(owned()), |_, (numbers, blocks)| work(blocks, numbers))
    }

    /// Calls `read(blocks, numbers)` on each vCPU with its own blocks, which stay as they are.
    pub fn read_on_members<R: Send>(&self, read: impl Fn(Range<usize>, &[f64]) -> R + Sync) -> Results<R> {
        let (shape, numbers) = (self.shape, &*self.numbers);
        deal(self.platform, ranges(shape.blocks, self.platform.vcpus()), |_, blocks| {
            let own = &numbers[blocks.start * shape.block_len()..blocks.end * shape.block_len()];
            read(blocks, own)
        })
    }

    /// Number of faults that `count(index, block)` finds in all blocks.
    pub fn count(&self, count: impl Fn(usize, &[f64]) -> u64 + Sync) -> u64 {
        let length = self.shape.block_len();
        let of_members = self.read_on_members(|blocks, numbers| {
            blocks.zip(numbers.chunks_exact(length)).map(|(index, block)| count(index, block)).sum::<u64>()
        });
        of_members.into_iter().flatten().sum()
    }
}

/// Prints the rate in millions per second if the frequency of the counter is known.
pub fn report_rate(platform: &dyn Platform, figure: Figure, numbers: u64, ticks: u64) {
    let hz = platform.tsc_hz();
    if hz > 0 {
        figure.emit(platform, numbers as f64 / ticks_to_seconds(ticks.max(1), hz) / 1e6);
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::native;

    const SMALL: Shape = Shape { blocks: 3, cells: 4, guards: 2, variables: 3 };

    #[test]
    fn a_row_along_each_direction_is_a_stride_apart() {
        let [along_i, along_j, along_k, block] = SMALL.strides();
        assert_eq!([along_i, along_j, along_k, block], [3, 24, 192, 1536]);
        assert_eq!(SMALL.rows(0).take(5).collect::<Vec<_>>(), [432, 456, 480, 504, 624]);
        assert_eq!(SMALL.inside().next(), Some((6 + 48 + 384, [0, 0, 0])));
    }

    #[test]
    fn every_block_has_one_owner_and_is_read_at_its_place() {
        for members in [1, 2, 5] {
            let mut numbers = vec![0.0; SMALL.numbers()];
            native::run(members, 0, Box::new(|_| ()), |platform| {
                let mut blocks = Blocks { platform, shape: SMALL, numbers: &mut numbers };
                blocks.for_each(|index, block| block.iter_mut().for_each(|number| *number += (index + 1) as f64));
                let wrong = |index: usize, block: &[f64]| {
                    block.iter().filter(|number| **number != (index + 1) as f64).count() as u64
                };
                assert_eq!(blocks.count(wrong), 0, "{members} members");
                blocks.numbers[SMALL.block_len()] += 1.0;
                assert_eq!(blocks.count(wrong), 1, "{members} members");
            });
        }
    }
}
