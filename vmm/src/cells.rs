//! NUMA cells of a guest: its nodes as it sees them, each with vCPUs, memory and distances to the others.
//!
//! ```text
//!   cells     [ cell 0 )[ cell 1        )[ cell 2 )            in the order of their numbers, from address zero
//!   RAM       [ 0 …………………………………… 3 GiB )   hole   [ 4 GiB …… )    a cell over the hole has two ranges
//! ```

use wideleaf_policies::{Bytes, CpuList, GpaRange, PageSize};
use wideleaf_protocol::VCPUS_MAX;

/// Maximum number of cells: as many as a guest can have vCPUs.
pub const CELLS_MAX: usize = VCPUS_MAX;

/// Distance from a cell to itself (ACPI 6.5, 5.2.17).
pub const DISTANCE_OWN: u8 = 10;
/// Distance to another cell where none is given: Linux's own default (`REMOTE_DISTANCE`, include/linux/topology.h).
pub const DISTANCE_OTHER: u8 = 20;
/// Largest distance: 255 means that a cell cannot be reached.
pub const DISTANCE_MAX: u8 = 254;

/// Largest latency, in nanoseconds: one more means that a cell cannot be reached (ACPI 6.5, 5.2.28.4).
pub const LATENCY_NS_MAX: u16 = 0xfffe;
/// Largest bandwidth, in MB/s: a thousand times that of today's memory, and in the range of Linux's 32 bits.
pub const BANDWIDTH_MB_S_MAX: u32 = 1_000_000_000;

/// A cell of the guest. Its number is its place in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestCell {
    /// Numbers of its vCPUs; none for a cell of memory alone.
    pub vcpus: CpuList,
    /// Size of its memory.
    pub memory: Bytes,
    /// Distances to all cells, in their order.
    pub distances: Vec<u8>,
    /// What its vCPUs get from the memory of all cells, in their order; empty where nothing of that is known.
    pub access: Vec<Access>,
}

/// What a vCPU gets from the memory of a cell. 0 means that a figure is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Latency of a read, in nanoseconds.
    pub read_latency_ns: u16,
    /// Latency of a write, in nanoseconds.
    pub write_latency_ns: u16,
    /// Bandwidth of reads, in MB/s.
    pub read_bandwidth_mb_s: u32,
    /// Bandwidth of writes, in MB/s.
    pub write_bandwidth_mb_s: u32,
}

/// Why cells do not describe a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellsError {
    /// There are too many of them.
    #[error("{count} cells are too many: a guest has at most {CELLS_MAX}")]
    TooMany {
        /// Number of cells.
        count: usize,
    },
    /// A cell without memory.
    #[error("cell {cell} has no memory: give it some with memory=")]
    NoMemory {
        /// Number of the cell.
        cell: usize,
    },
    /// A cell that ends inside a page.
    #[error("the {memory} of cell {cell} are not a whole number of {page} pages: use {} or {}", .down, .up)]
    NotWholePages {
        /// Number of the cell.
        cell: usize,
        /// Memory of the cell.
        memory: Bytes,
        /// Page of the host, at least a window.
        page: PageSize,
        /// Next smaller size that works.
        down: Bytes,
        /// Next larger size that works.
        up: Bytes,
    },
    /// The cells have another amount of memory than the VM.
    #[error("the cells have {sum} together, and --memory is {memory}")]
    MemorySum {
        /// Memory of all cells.
        sum: Bytes,
        /// Memory of the VM.
        memory: Bytes,
    },
    /// A vCPU that the VM does not have.
    #[error("cell {cell} has vCPU {vcpu}, and the VM has {vcpus} (0-{}): use --vcpus {} or more", vcpus - 1, vcpu + 1)]
    NoSuchVcpu {
        /// Number of the cell.
        cell: usize,
        /// Number of the vCPU.
        vcpu: u16,
        /// Number of vCPUs of the VM.
        vcpus: u32,
    },
    /// A vCPU in two cells.
    #[error("vCPU {vcpu} is in cell {first} and in cell {second}: name it once")]
    VcpuTwice {
        /// Number of the vCPU.
        vcpu: u16,
        /// First cell with it.
        first: usize,
        /// Second cell with it.
        second: usize,
    },
    /// vCPUs in no cell.
    #[error("the vCPUs {missing} of {vcpus} are in no cell: name them with cpus=")]
    VcpusMissing {
        /// Numbers of the vCPUs.
        missing: CpuList,
        /// Number of vCPUs of the VM.
        vcpus: u32,
    },
    /// A distance that the guest would not take.
    #[error(
        "the distance from cell {from} to cell {to} cannot be {distance}: it is {DISTANCE_OWN} to a cell itself, \
         and more than that up to {DISTANCE_MAX} to another"
    )]
    Distance {
        /// Number of the cell at the begin.
        from: usize,
        /// Number of the cell at the end.
        to: usize,
        /// Distance that is refused.
        distance: u8,
    },
}

/// Checks that these cells are all of a VM with `memory` in pages of `page`, and `vcpus`.
///
/// # Errors
/// [`CellsError`], the first that applies.
pub fn check(cells: &[GuestCell], memory: Bytes, page: PageSize, vcpus: u32) -> Result<(), CellsError> {
    if cells.is_empty() {
        return Ok(());
    }
    if cells.len() > CELLS_MAX {
        return Err(CellsError::TooMany { count: cells.len() });
    }
    cells.iter().enumerate().try_for_each(|(number, cell)| check_memory(number, cell, page))?;
    let sum = cells.iter().map(|cell| cell.memory).sum();
    if sum != memory {
        return Err(CellsError::MemorySum { sum, memory });
    }
    check_vcpus(cells, vcpus)?;
    (0..cells.len()).try_for_each(|from| check_distances(cells, from))
}

fn check_memory(number: usize, cell: &GuestCell, page: PageSize) -> Result<(), CellsError> {
    let memory = cell.memory;
    if memory == Bytes::ZERO {
        return Err(CellsError::NoMemory { cell: number });
    }
    let page = page.max(PageSize::Huge2M);
    if memory.is_multiple_of(page) {
        return Ok(());
    }
    let down = page.bytes() * (memory.get() / page.bytes().get());
    Err(CellsError::NotWholePages { cell: number, memory, page, down, up: down + page.bytes() })
}

fn check_vcpus(cells: &[GuestCell], vcpus: u32) -> Result<(), CellsError> {
    for (number, cell) in cells.iter().enumerate() {
        if let Some(vcpu) = cell.vcpus.iter().find(|vcpu| u32::from(*vcpu) >= vcpus) {
            return Err(CellsError::NoSuchVcpu { cell: number, vcpu, vcpus });
        }
        let mut before = cells[..number].iter().enumerate();
        let twice = before.find_map(|(first, other)| {
            let vcpu = other.vcpus.iter().find(|vcpu| cell.vcpus.contains(*vcpu))?;
            Some(CellsError::VcpuTwice { vcpu, first, second: number })
        });
        twice.map_or(Ok(()), Err)?;
    }
    let is_in_none = |vcpu: &u16| !cells.iter().any(|cell| cell.vcpus.contains(*vcpu));
    let missing: CpuList = (0..vcpus as u16).filter(is_in_none).collect();
    if missing.is_empty() { Ok(()) } else { Err(CellsError::VcpusMissing { missing, vcpus }) }
}

fn check_distances(cells: &[GuestCell], from: usize) -> Result<(), CellsError> {
    let distances = &cells[from].distances;
    assert_eq!(distances.len(), cells.len(), "a cell has a distance to each");
    let access = cells[from].access.len();
    assert!(access == 0 || access == cells.len(), "a cell has figures for each or for none");
    let is_valid = |to: usize, distance: u8| match to == from {
        true => distance == DISTANCE_OWN,
        false => (DISTANCE_OWN + 1..=DISTANCE_MAX).contains(&distance),
    };
    let wrong = distances.iter().copied().enumerate().find(|(to, distance)| !is_valid(*to, *distance));
    wrong.map_or(Ok(()), |(to, distance)| Err(CellsError::Distance { from, to, distance }))
}

/// Ranges of RAM of each part with these sizes, in order; a part over the hole has two. Sizes beyond the RAM have none.
pub fn split(ram: &[GpaRange], sizes: impl IntoIterator<Item = Bytes>) -> Vec<Vec<GpaRange>> {
    let mut ranges = ram.iter().copied();
    let mut rest = ranges.next();
    let mut take = |mut size: Bytes| {
        let mut parts = Vec::new();
        while let Some(range) = rest.filter(|_| size > Bytes::ZERO) {
            let bytes = range.bytes().min(size);
            parts.extend(GpaRange::new(range.start(), bytes));
            size = size.saturating_sub(bytes);
            let left = range.bytes().saturating_sub(bytes);
            rest = match left {
                Bytes::ZERO => ranges.next(),
                left => GpaRange::new(range.start() + bytes, left),
            };
        }
        parts
    };
    sizes.into_iter().map(&mut take).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::ram_ranges;
    use wideleaf_policies::units::{gib, kib, mib};

    fn cell(vcpus: &str, memory: Bytes, distances: &[u8]) -> GuestCell {
        let (vcpus, distances) = (vcpus.parse().expect("a list"), distances.to_vec());
        GuestCell { vcpus, memory, distances, access: Vec::new() }
    }

    fn two(first: (&str, Bytes), second: (&str, Bytes)) -> [GuestCell; 2] {
        [cell(first.0, first.1, &[10, 20]), cell(second.0, second.1, &[20, 10])]
    }

    fn refused(cells: &[GuestCell], memory: Bytes, vcpus: u32) -> String {
        check(cells, memory, PageSize::Huge2M, vcpus).expect_err("it is refused").to_string()
    }

    #[test]
    fn cells_that_cover_the_vm_are_accepted() {
        assert_eq!(check(&[], gib(1), PageSize::Huge2M, 4), Ok(()));
        let cells = two(("0-1", gib(1)), ("2,3", gib(3)));
        assert_eq!(check(&cells, gib(4), PageSize::Giant1G, 4), Ok(()));
        let memory_alone = two(("0-3", gib(1)), ("", gib(3)));
        assert_eq!(check(&memory_alone, gib(4), PageSize::Huge2M, 4), Ok(()));
    }

    #[test]
    fn memory_that_is_not_the_vms_is_refused_with_the_numbers() {
        assert_eq!(
            refused(&two(("0", gib(1)), ("1", gib(2))), gib(4), 2),
            "the cells have 3 GiB together, and --memory is 4 GiB"
        );
        assert_eq!(
            refused(&two(("0", gib(1) + kib(4)), ("1", gib(1))), gib(2), 2),
            "the 1.00 GiB of cell 0 are not a whole number of 2m pages: use 1 GiB or 1026 MiB"
        );
        let none = refused(&two(("0", Bytes::ZERO), ("1", gib(1))), gib(1), 2);
        assert_eq!(none, "cell 0 has no memory: give it some with memory=");
    }

    #[test]
    fn a_vcpu_is_in_one_cell_exactly() {
        let cells = |first, second| two((first, gib(1)), (second, gib(1)));
        let of = |first, second, vcpus| refused(&cells(first, second), gib(2), vcpus);
        assert_eq!(of("0-1", "1-3", 4), "vCPU 1 is in cell 0 and in cell 1: name it once");
        assert_eq!(of("0", "2", 4), "the vCPUs 1,3 of 4 are in no cell: name them with cpus=");
        assert_eq!(of("0", "1-2", 2), "cell 1 has vCPU 2, and the VM has 2 (0-1): use --vcpus 3 or more");
    }

    #[test]
    fn a_distance_is_ten_to_itself_and_more_to_others() {
        let with = |distances: &[u8]| [cell("0", gib(1), distances), cell("1", gib(1), &[20, 10])];
        for (wrong, what) in [([11, 20], "to cell 0 cannot be 11"), ([10, 10], "to cell 1 cannot be 10")] {
            assert!(refused(&with(&wrong), gib(2), 2).contains(what));
        }
        assert!(refused(&with(&[10, 255]), gib(2), 2).contains("up to 254"));
        let many = vec![cell("", mib(2), &[10; 17]); 17];
        assert_eq!(refused(&many, mib(34), 1), "17 cells are too many: a guest has at most 16");
    }

    #[test]
    fn a_cell_over_the_hole_has_two_ranges() {
        let ranges = split(&ram_ranges(gib(5)), [gib(2), gib(2), gib(1)]);
        let numbers: Vec<Vec<(u64, u64)>> = ranges
            .iter()
            .map(|of| of.iter().map(|range| (range.start().get() >> 30, range.end().get() >> 30)).collect())
            .collect();
        assert_eq!(numbers, [vec![(0, 2)], vec![(2, 3), (4, 5)], vec![(5, 6)]]);
    }
}
