//! What the vCPUs of each cell get from the memory of each cell: figures that the cells name, or those of the host.
//!
//! ```text
//!   latencies=[0@90,1@140]    as written; the way back has the same, unless it has its own
//!   latencies=host            those of the cell's nodes, where the kernel tells them for CPUs of these vCPUs
//!   neither                   unknown: the guest's tables say nothing
//! ```

use wideleaf_memory::numa::access::NodeAccess;
use wideleaf_vmm::cells::{Access, GuestCell, LATENCY_NS_MAX};

use crate::spec::numa::{CellSpec, Figures};

/// Figures of the host from the vCPUs of one cell to the memory of another, if its kernel tells them.
pub(super) type HostFigures<'a> = &'a dyn Fn(usize, usize) -> Option<NodeAccess>;

/// A kind of figures.
struct Kind {
    /// Key of the kind.
    key: &'static str,
    /// Example of a value.
    example: &'static str,
    of: fn(&CellSpec) -> Option<&Figures>,
    /// Figures of reads and writes on the host.
    of_host: fn(&NodeAccess) -> [u32; 2],
    put: fn(&mut Access, [u32; 2]),
}

const KINDS: [Kind; 2] = [
    Kind {
        key: "latencies",
        example: "90",
        of: |cell| cell.latencies_ns.as_ref(),
        of_host: |access| [access.read_latency_ns, access.write_latency_ns],
        put: |access, [read, write]| {
            // The text of a cell has such figures alone; a host with larger ones is as good as unreachable.
            let figure = |ns: u32| u16::try_from(ns).unwrap_or(LATENCY_NS_MAX).min(LATENCY_NS_MAX);
            (access.read_latency_ns, access.write_latency_ns) = (figure(read), figure(write));
        },
    },
    Kind {
        key: "bandwidths",
        example: "40000",
        of: |cell| cell.bandwidths_mb_s.as_ref(),
        of_host: |access| [access.read_bandwidth_mb_s, access.write_bandwidth_mb_s],
        put: |access, [read, write]| (access.read_bandwidth_mb_s, access.write_bandwidth_mb_s) = (read, write),
    },
];

/// Checks that the figures of these cells name cells with vCPUs, and their own memory.
pub(super) fn check(cells: &[CellSpec], guest: &[GuestCell]) -> Result<(), String> {
    for (kind, cell, guest) in each(cells, guest) {
        let (key, id) = (kind.key, cell.id);
        let Some(figures) = (kind.of)(cell) else { continue };
        if guest.vcpus.is_empty() {
            return Err(format!(
                "cell {id} has {key}= and no vCPUs: write {key}= at the cells with the vCPUs that use its memory"
            ));
        }
        let Figures::Cells(list) = figures else { continue };
        if let Some((to, _)) = list.iter().find(|(to, _)| usize::from(*to) >= cells.len()) {
            return Err(format!("cell {id} has {key}= for cell {to}, and the last cell is {}", cells.len() - 1));
        }
        if let Some((to, _)) = list.iter().find(|(to, _)| list.iter().filter(|(other, _)| other == to).count() > 1) {
            return Err(format!("cell {id} has {key}= for cell {to} twice"));
        }
        if !list.iter().any(|(to, _)| *to == id) {
            let example = kind.example;
            return Err(format!("cell {id} has {key}= without its own memory: add {id}@{example}, with its figure"));
        }
    }
    Ok(())
}

/// Gives the cells their figures.
///
/// # Errors
/// The first cell that asks for the host's and gets none of them; all others have theirs.
pub(super) fn fill(cells: &[CellSpec], guest: &mut [GuestCell], host: HostFigures<'_>) -> Result<(), String> {
    let mut filled = Ok(());
    for kind in &KINDS {
        for from in 0..cells.len() {
            if guest[from].vcpus.is_empty() {
                continue;
            }
            let to_each = (0..cells.len()).map(|to| figure(kind, cells, host, from, to));
            let figures: Vec<Option<[u32; 2]>> = to_each.collect();
            if (kind.of)(&cells[from]) == Some(&Figures::Host) && figures.iter().all(Option::is_none) {
                let (key, id, example) = (kind.key, cells[from].id, kind.example);
                let why = format!(
                    "cell {id} has {key}=host, and this host's kernel tells none from the CPUs of its vCPUs to the \
                     node of a cell (node*/access*/initiators in sysfs); write them, as in {key}=[{id}@{example}]"
                );
                filled = filled.and(Err(why));
            }
            if figures.iter().any(Option::is_some) {
                let access = &mut guest[from].access;
                access.resize(cells.len(), Access::default());
                let known = access.iter_mut().zip(figures);
                known.for_each(|(access, figure)| figure.into_iter().for_each(|of| (kind.put)(access, of)));
            }
        }
    }
    filled
}

/// Figures of reads and writes from the vCPUs of one cell to the memory of another.
fn figure(kind: &Kind, cells: &[CellSpec], host: HostFigures<'_>, from: usize, to: usize) -> Option<[u32; 2]> {
    let written = |from: usize, to: usize| match (kind.of)(&cells[from])? {
        Figures::Host => None,
        Figures::Cells(list) => list.iter().find(|(other, _)| usize::from(*other) == to).map(|(_, figure)| *figure),
    };
    if (kind.of)(&cells[from]) == Some(&Figures::Host) {
        return host(from, to).map(|access| (kind.of_host)(&access)).filter(|[read, write]| read + write > 0);
    }
    written(from, to).or_else(|| written(to, from)).map(|figure| [figure; 2])
}

/// Each kind with each cell.
fn each<'a>(
    cells: &'a [CellSpec],
    guest: &'a [GuestCell],
) -> impl Iterator<Item = (&'static Kind, &'a CellSpec, &'a GuestCell)> {
    KINDS.iter().flat_map(move |kind| cells.iter().zip(guest).map(move |(cell, guest)| (kind, cell, guest)))
}
