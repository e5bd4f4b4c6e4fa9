//! HMAT: latency and bandwidth between the cells of a guest (ACPI 6.5, 5.2.28).
//!
//! ```text
//!   header │ a proximity structure for each cell     its own vCPUs are attached to its memory
//!          │ a matrix for each kind of figure        rows: cells with vCPUs; columns: all cells
//! ```
//!
//! Linux shows the row that fits best at each node (`node*/access0/initiators`) and puts nodes into tiers of memory by
//! it. The bytes are written here because `acpi_tables` 0.2 finds an entry by the number of rows instead of columns,
//! which is wrong for a guest with a cell of memory alone.

use crate::cells::{Access, GuestCell};

/// Version of the table: this one counts latencies in picoseconds, and 0 is an unknown entry.
pub(super) const REVISION: u8 = 2;

/// An entry that says nothing. 0xffff would mean that the memory cannot be reached.
const UNKNOWN: u16 = 0;
/// Largest entry that is a figure.
const ENTRY_MAX: u32 = 0xfffe;
/// Picoseconds in a nanosecond, the unit of latencies.
const LATENCY_UNIT_PS: u64 = 1000;

/// Number of bytes of a proximity structure.
const PROXIMITY_BYTES: usize = 40;
/// Number of bytes of a matrix before its lists.
const MATRIX_BYTES: usize = 32;

/// Type of a structure with a matrix.
const SYSTEM_LOCALITY: u16 = 1;

type Figure = fn(&Access) -> u32;

/// What a matrix is about.
#[derive(Clone, Copy)]
struct Kind {
    /// Number of the kind for reads and writes alike; those of reads and of writes follow it.
    number: u8,
    of_reads: Figure,
    of_writes: Figure,
}

const KINDS: [Kind; 2] = [LATENCY, BANDWIDTH];
const LATENCY: Kind = Kind {
    number: 0,
    of_reads: |access| u32::from(access.read_latency_ns),
    of_writes: |access| u32::from(access.write_latency_ns),
};
const BANDWIDTH: Kind =
    Kind { number: 3, of_reads: |access| access.read_bandwidth_mb_s, of_writes: |access| access.write_bandwidth_mb_s };

/// The table's content, if a figure of any cell is known.
pub(super) fn body(cells: &[GuestCell]) -> Option<Vec<u8>> {
    let matrices: Vec<u8> = KINDS.iter().flat_map(|kind| matrices(cells, kind)).collect();
    if matrices.is_empty() {
        return None;
    }
    let mut body = vec![0; 4];
    cells.iter().enumerate().for_each(|(number, cell)| body.extend(proximity(number as u32, cell)));
    body.extend(matrices);
    Some(body)
}

/// The memory of a cell, and its vCPUs as those that are attached to it (ACPI 6.5, 5.2.28.3).
fn proximity(number: u32, cell: &GuestCell) -> [u8; PROXIMITY_BYTES] {
    const HAS_INITIATOR: u8 = 1;
    let mut structure = [0; PROXIMITY_BYTES];
    structure[4] = PROXIMITY_BYTES as u8;
    structure[8] = if cell.vcpus.is_empty() { 0 } else { HAS_INITIATOR };
    structure[12..16].copy_from_slice(&number.to_le_bytes());
    structure[16..20].copy_from_slice(&number.to_le_bytes());
    structure
}

/// The matrix of a kind that reads and writes have in common, or one for each; none without a figure.
fn matrices(cells: &[GuestCell], kind: &Kind) -> Vec<u8> {
    let (of_reads, of_writes) = (kind.of_reads, kind.of_writes);
    let all = || cells.iter().flat_map(|cell| &cell.access);
    let matrix_of = |offset: u8, figure: Figure| {
        let is_known = all().any(|access| figure(access) != 0);
        if is_known { matrix(cells, kind.number + offset, figure) } else { Vec::new() }
    };
    if all().all(|access| of_reads(access) == of_writes(access)) {
        return matrix_of(0, of_reads);
    }
    [matrix_of(1, of_reads), matrix_of(2, of_writes)].concat()
}

/// Figures of one kind from each cell with vCPUs to each cell (ACPI 6.5, 5.2.28.4).
fn matrix(cells: &[GuestCell], number: u8, figure: Figure) -> Vec<u8> {
    let initiators: Vec<usize> = (0..cells.len()).filter(|number| !cells[*number].vcpus.is_empty()).collect();
    let (base_unit, unit) = match number < BANDWIDTH.number {
        true => (LATENCY_UNIT_PS, 1),
        false => bandwidth_unit(cells, figure),
    };
    let bytes = MATRIX_BYTES + 4 * (initiators.len() + cells.len()) + 2 * initiators.len() * cells.len();
    let mut structure = Vec::with_capacity(bytes);
    structure.extend(SYSTEM_LOCALITY.to_le_bytes());
    structure.extend([0; 2]);
    structure.extend((bytes as u32).to_le_bytes());
    // Of memory itself, not of a cache before it; the figures need no size of transfers.
    structure.extend([0, number, 0, 0]);
    structure.extend((initiators.len() as u32).to_le_bytes());
    structure.extend((cells.len() as u32).to_le_bytes());
    structure.extend([0; 4]);
    structure.extend(base_unit.to_le_bytes());
    let lists = initiators.iter().copied().chain(0..cells.len());
    lists.for_each(|cell| structure.extend((cell as u32).to_le_bytes()));
    for from in initiators {
        // A cell without figures has a row of unknown entries.
        let entry = |to: usize| cells[from].access.get(to).map_or(UNKNOWN, |access| entry(figure(access), unit));
        (0..cells.len()).for_each(|to| structure.extend(entry(to).to_le_bytes()));
    }
    assert_eq!(structure.len(), bytes, "a matrix is as long as it says");
    structure
}

/// The figure in this unit, rounded to the nearest; one that is known stays known.
fn entry(figure: u32, unit: u32) -> u16 {
    match figure {
        0 => UNKNOWN,
        known => (known.saturating_add(unit / 2) / unit).clamp(1, ENTRY_MAX) as u16,
    }
}

/// Smallest power of ten, in MB/s, in which all bandwidths fit an entry; twice, for the table and for the division.
fn bandwidth_unit(cells: &[GuestCell], figure: Figure) -> (u64, u32) {
    let largest = cells.iter().flat_map(|cell| &cell.access).map(figure).max().unwrap_or_default();
    let mut unit = 1;
    while largest / unit > ENTRY_MAX {
        unit *= 10;
    }
    (u64::from(unit), unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::gib;

    /// An access with equal figures for reads and writes.
    fn access(latency_ns: u16, bandwidth_mb_s: u32) -> Access {
        Access {
            read_latency_ns: latency_ns,
            write_latency_ns: latency_ns,
            read_bandwidth_mb_s: bandwidth_mb_s,
            write_bandwidth_mb_s: bandwidth_mb_s,
        }
    }

    fn cell(vcpus: &str, access: &[Access]) -> GuestCell {
        let vcpus = vcpus.parse().unwrap();
        GuestCell { vcpus, memory: gib(1), distances: Vec::new(), access: access.to_vec() }
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Kind, base unit, initiators, targets and entries of a matrix.
    type Matrix = (u8, u64, Vec<u32>, Vec<u32>, Vec<u16>);

    /// The matrices behind `cells` proximity structures.
    fn read(body: &[u8], cells: usize) -> Vec<Matrix> {
        let mut rest = &body[4 + PROXIMITY_BYTES * cells..];
        let mut all = Vec::new();
        while !rest.is_empty() {
            assert_eq!((rest[..4].to_vec(), rest[8], rest[10]), (vec![1, 0, 0, 0], 0, 0));
            let (structure, next) = rest.split_at(u32_at(rest, 4) as usize);
            let (rows, columns) = (u32_at(structure, 12) as usize, u32_at(structure, 16) as usize);
            let base_unit = u64::from_le_bytes(structure[24..32].try_into().unwrap());
            let (lists, entries) = structure[32..].split_at(4 * (rows + columns));
            let numbers: Vec<u32> = (0..rows + columns).map(|i| u32_at(lists, 4 * i)).collect();
            let entries: Vec<u16> = entries.chunks(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect();
            assert_eq!(entries.len(), rows * columns);
            all.push((structure[9], base_unit, numbers[..rows].to_vec(), numbers[rows..].to_vec(), entries));
            rest = next;
        }
        all
    }

    #[test]
    fn cells_without_figures_have_no_table() {
        assert_eq!(body(&[]), None);
        assert_eq!(body(&[cell("0", &[]), cell("1", &[])]), None);
        assert_eq!(body(&[cell("0", &[access(0, 0)])]), None);
    }

    #[test]
    fn each_cell_has_its_own_vcpus_attached_and_a_cell_of_memory_has_none() {
        let body = body(&[cell("0", &[access(90, 0), access(250, 0)]), cell("", &[])]).unwrap();
        let (first, second) = (&body[4..44], &body[44..84]);
        assert_eq!(first[..20], [0, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(second[..20], [0, 0, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
        assert!(first[20..].iter().chain(&second[20..]).all(|byte| *byte == 0), "the rest is reserved");
    }

    #[test]
    fn rows_are_cells_with_vcpus_and_columns_are_all_cells() {
        // Cells 0 and 2 have vCPUs, cell 1 has memory alone: two rows of three entries.
        let first = [access(90, 40_000), access(250, 20_000), access(140, 30_000)];
        let third = [access(141, 30_001), access(251, 20_001), access(91, 40_001)];
        let cells = [cell("0", &first), cell("", &[]), cell("1", &third)];
        let (rows, columns) = (vec![0, 2], vec![0, 1, 2]);
        let latencies = (0, 1000, rows.clone(), columns.clone(), vec![90, 250, 140, 141, 251, 91]);
        let bandwidths = (3, 1, rows, columns, vec![40_000, 20_000, 30_000, 30_001, 20_001, 40_001]);
        assert_eq!(read(&body(&cells).unwrap(), 3), [latencies, bandwidths]);
    }

    #[test]
    fn reads_and_writes_that_differ_have_a_matrix_each_and_what_is_unknown_is_zero() {
        let differ = Access { read_latency_ns: 80, write_latency_ns: 95, ..access(0, 0) };
        let cells = [cell("0", &[differ, access(0, 0)]), cell("1", &[])];
        let read = read(&body(&cells).unwrap(), 2);
        let entries: Vec<_> = read.iter().map(|(kind, _, _, _, entries)| (*kind, entries.clone())).collect();
        assert_eq!(entries, [(1, vec![80, 0, 0, 0]), (2, vec![95, 0, 0, 0])]);
    }

    #[test]
    fn bandwidths_beyond_an_entry_have_a_larger_unit() {
        let of = |bandwidth| {
            let body = body(&[cell("0", &[access(0, bandwidth), access(0, 4)]), cell("", &[])]).unwrap();
            let (_, base_unit, .., entries) = read(&body, 2).remove(0);
            (base_unit, entries)
        };
        assert_eq!(of(65_534), (1, vec![65_534, 4]));
        // 4 MB/s would round to none of ten.
        assert_eq!(of(409_600), (10, vec![40_960, 1]));
        assert_eq!(of(65_535), (10, vec![6554, 1]));
        assert_eq!(of(4_000_000), (100, vec![40_000, 1]));
    }
}
