//! One VM's part of a snapshot, as the difference from its part of the previous snapshot.

use alloc::vec::Vec;

use super::wire::{Reader, put_moment, put_number, put_time};
use super::{DecodeError, MEMORY_MAX, ROWS_MAX, WINDOW_MAX};
use crate::node::NodeId;
use crate::snapshot::{AccessHistory, Backing, GuestMapping, GuestProgress, MappingStats, VmId, VmSnapshot, WindowRow};
use crate::units::{BASE_PAGES_PER_WINDOW, PageSize, PerTenThousand, WindowIndex};
use crate::window_node::{NodeOfVm, TouchedFrom, WindowNode};

/// Bits of the mask: the parts that differ.
mod differs {
    pub const WINDOWS: u64 = 1 << 0;
    pub const RESIDENT: u64 = 1 << 1;
    pub const BACKING: u64 = 1 << 2;
    pub const IS_HELD: u64 = 1 << 3;
    pub const READY_AT: u64 = 1 << 4;
    pub const ACCESS: u64 = 1 << 5;
    pub const WRITTEN: u64 = 1 << 6;
    pub const ZERO: u64 = 1 << 7;
    pub const GUEST_MAPPING: u64 = 1 << 8;
    pub const MAPPING: u64 = 1 << 9;
    pub const GIVEN_BACK: u64 = 1 << 10;
    pub const GIVEN_BACK_TOLERATED: u64 = 1 << 11;
    /// Not a difference: the readings since the previous snapshot, if there are any.
    pub const PROGRESS: u64 = 1 << 12;
    pub const GUARANTEE: u64 = 1 << 13;
    pub const NODE: u64 = 1 << 14;
    pub const TOUCHED_FROM: u64 = 1 << 15;
    pub const NODES: u64 = 1 << 16;
    pub const ALL: u64 = (1 << 17) - 1;
}

// A recording has the places in these lists. They stay as they are, whatever the order of the enums becomes.
const BACKINGS: [Backing; 4] = [Backing::Unbacked, Backing::Base4K, Backing::Huge2M, Backing::Giant1G];
const HELD: [bool; 2] = [false, true];
const GUEST_MAPPINGS: [GuestMapping; 6] = [
    GuestMapping::Unknown,
    GuestMapping::Unmapped,
    GuestMapping::Base4K,
    GuestMapping::Huge2M,
    GuestMapping::Giant1G,
    GuestMapping::Mixed,
];

/// Differences that are written so far.
struct Differences {
    mask: u64,
    body: Vec<u8>,
}

impl Differences {
    /// Adds a part that is not one value for each row.
    fn part(&mut self, bit: u64, is_different: bool, put: impl FnOnce(&mut Vec<u8>)) {
        if is_different {
            self.mask |= bit;
            put(&mut self.body);
        }
    }

    fn column<T: Copy + PartialEq>(&mut self, bit: u64, now: &[T], before: &[T], put: impl Fn(&mut Vec<u8>, T)) {
        self.part(bit, now != before, |out| put_column(out, now, before, put));
    }
}

/// Appends the differences between `before` and `now`, two snapshots of one VM.
pub(super) fn put_vm(out: &mut Vec<u8>, now: &VmSnapshot, before: Option<&VmSnapshot>) {
    // Destructured completely, so that a new column cannot be forgotten here.
    let VmSnapshot {
        vm,
        windows,
        resident,
        backing,
        is_held,
        ready_at,
        access,
        // It changes with every second, and would be the largest part of a recording.
        access_quality: _,
        written,
        zero,
        guest_mapping,
        given_back,
        node,
        touched_from,
        nodes,
        given_back_tolerated: tolerated,
        guarantee,
        mapping,
        progress,
    } = now;
    let known = before.filter(|before| before.windows == *windows);
    let unseen = known.is_none().then(|| unseen_windows(*vm, windows));
    let before = known.or(unseen.as_ref()).expect("one of them is there");
    let mut differences = Differences { mask: 0, body: Vec::new() };
    differences.part(differs::WINDOWS, known.is_none(), |out| put_windows(out, windows));
    differences.column(differs::RESIDENT, resident, &before.resident, put_count);
    differences.column(differs::BACKING, backing, &before.backing, |out, value| put_place(out, value, &BACKINGS));
    differences.column(differs::IS_HELD, is_held, &before.is_held, |out, value| put_place(out, value, &HELD));
    differences.column(differs::READY_AT, ready_at, &before.ready_at, put_moment);
    differences.column(differs::ACCESS, access, &before.access, put_access);
    differences.column(differs::WRITTEN, written, &before.written, put_pages);
    differences.column(differs::ZERO, zero, &before.zero, put_pages);
    let put_guest_mapping = |out: &mut Vec<u8>, value| put_place(out, value, &GUEST_MAPPINGS);
    differences.column(differs::GUEST_MAPPING, guest_mapping, &before.guest_mapping, put_guest_mapping);
    differences.part(differs::MAPPING, *mapping != before.mapping, |out| put_mapping(out, *mapping));
    differences.column(differs::GIVEN_BACK, given_back, &before.given_back, put_count);
    let is_different = *tolerated != before.given_back_tolerated;
    differences.part(differs::GIVEN_BACK_TOLERATED, is_different, |out| put_count(out, *tolerated));
    differences.part(differs::PROGRESS, !progress.is_empty(), |out| put_progress(out, progress));
    let is_different = *guarantee != before.guarantee;
    differences.part(differs::GUARANTEE, is_different, |out| put_number(out, guarantee.get().into()));
    differences.column(differs::NODE, node, &before.node, put_node);
    differences.column(differs::TOUCHED_FROM, touched_from, &before.touched_from, put_touched_from);
    differences.part(differs::NODES, *nodes != before.nodes, |out| put_nodes(out, nodes));
    put_number(out, vm.0.into());
    put_number(out, differences.mask);
    out.append(&mut differences.body);
}

/// Reads the output of [`put_vm`]. `rows_left` is the number of rows that the snapshot may still have.
pub(super) fn vm(
    reader: &mut Reader<'_>,
    previous: &[VmSnapshot],
    rows_left: usize,
) -> Result<VmSnapshot, DecodeError> {
    let offset = reader.offset();
    let id = VmId(reader.number_to("VM", u32::MAX.into())? as u32);
    let mask = reader.number_to("mask of columns", differs::ALL)?;
    let mut now = match previous.iter().find(|before| before.vm == id) {
        Some(before) if mask & differs::WINDOWS == 0 => before.clone(),
        _ => unseen_windows(id, &if mask & differs::WINDOWS == 0 { Vec::new() } else { windows(reader, rows_left)? }),
    };
    if now.len() > rows_left {
        return Err(DecodeError::OutOfRange { offset, what: "number of windows", value: now.len() as u64 });
    }
    read_differences(reader, mask, &mut now)?;
    match (0..now.len()).find(|row| (now.resident[*row] == 0) != (now.backing[*row] == Backing::Unbacked)) {
        None => Ok(now),
        Some(row) => Err(DecodeError::OutOfRange {
            offset,
            what: "number of present pages for the backing of its window",
            value: now.resident[row].into(),
        }),
    }
}

/// Reads the parts of the mask, in the order in which [`put_vm`] writes them.
fn read_differences(reader: &mut Reader<'_>, mask: u64, now: &mut VmSnapshot) -> Result<(), DecodeError> {
    let is_there = |bit| mask & bit != 0;
    if is_there(differs::RESIDENT) {
        column(reader, &mut now.resident, |reader| count(reader, "number of present pages"))?;
    }
    if is_there(differs::BACKING) {
        column(reader, &mut now.backing, |reader| reader.one_of("backing", &BACKINGS))?;
    }
    if is_there(differs::IS_HELD) {
        column(reader, &mut now.is_held, |reader| reader.one_of("flag", &HELD))?;
    }
    if is_there(differs::READY_AT) {
        column(reader, &mut now.ready_at, Reader::moment)?;
    }
    if is_there(differs::ACCESS) {
        column(reader, &mut now.access, access)?;
    }
    if is_there(differs::WRITTEN) {
        column(reader, &mut now.written, pages)?;
    }
    if is_there(differs::ZERO) {
        column(reader, &mut now.zero, pages)?;
    }
    if is_there(differs::GUEST_MAPPING) {
        column(reader, &mut now.guest_mapping, |reader| reader.one_of("guest mapping", &GUEST_MAPPINGS))?;
    }
    if is_there(differs::MAPPING) {
        now.mapping = mapping(reader)?;
    }
    if is_there(differs::GIVEN_BACK) {
        column(reader, &mut now.given_back, |reader| count(reader, "number of pages given back"))?;
    }
    if is_there(differs::GIVEN_BACK_TOLERATED) {
        now.given_back_tolerated = reader.number_to("number of pages tolerated", u16::MAX.into())? as u16;
    }
    now.progress = if is_there(differs::PROGRESS) { reader.list("number of readings", progress)? } else { Vec::new() };
    if is_there(differs::GUARANTEE) {
        now.guarantee = PerTenThousand::new(reader.number_to("guarantee", u32::MAX.into())? as u32);
    }
    if is_there(differs::NODE) {
        column(reader, &mut now.node, node)?;
    }
    if is_there(differs::TOUCHED_FROM) {
        column(reader, &mut now.touched_from, touched_from)?;
    }
    if is_there(differs::NODES) {
        now.nodes = reader.list("number of nodes", node_of_vm)?;
    }
    Ok(())
}

/// The rows with which columns are compared when there is no previous snapshot.
fn unseen_windows(vm: VmId, windows: &[WindowIndex]) -> VmSnapshot {
    let mut rows = VmSnapshot::with_capacity(vm, windows.len());
    for window in windows {
        rows.push(WindowRow::new(*window, 0, Backing::Unbacked));
    }
    rows
}

fn put_windows(out: &mut Vec<u8>, windows: &[WindowIndex]) {
    let runs: Vec<_> = windows.chunk_by(|a, b| a.get() + 1 == b.get()).collect();
    put_number(out, runs.len() as u64);
    let mut next = 0;
    for run in runs {
        put_number(out, run[0].get() - next);
        put_number(out, run.len() as u64);
        next = run[0].get() + run.len() as u64;
    }
}

fn windows(reader: &mut Reader<'_>, rows_max: usize) -> Result<Vec<WindowIndex>, DecodeError> {
    const _: () = assert!(ROWS_MAX as u64 <= WINDOW_MAX, "the sum of a window and a number of rows fits 64 bits");
    let (mut windows, mut next) = (Vec::new(), 0);
    reader.list("number of runs of windows", |reader| {
        let first = next + reader.number_to("gap between windows", WINDOW_MAX)?;
        let offset = reader.offset();
        let length = reader.number_to("number of windows", (rows_max - windows.len()) as u64)?;
        next = first + length;
        if next > WINDOW_MAX + 1 {
            return Err(DecodeError::OutOfRange { offset, what: "window below 2^52", value: next - 1 });
        }
        windows.extend((first..next).map(WindowIndex::new));
        Ok(())
    })?;
    Ok(windows)
}

fn put_column<T: Copy + PartialEq>(out: &mut Vec<u8>, now: &[T], before: &[T], put: impl Fn(&mut Vec<u8>, T)) {
    let mut row = 0;
    while row < now.len() {
        let same = (row..now.len()).take_while(|row| now[*row] == before[*row]).count();
        if same > 0 {
            put_number(out, 2 * same as u64);
            row += same;
            continue;
        }
        let is_run = |other: &usize| now[*other] == now[row] && now[*other] != before[*other];
        let run = (row..now.len()).take_while(is_run).count();
        put_number(out, 2 * run as u64 + 1);
        put(out, now[row]);
        row += run;
    }
}

/// Changes `rows` from their previous values to the current ones.
fn column<'a, T: Copy>(
    reader: &mut Reader<'a>,
    rows: &mut [T],
    get: impl Fn(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<(), DecodeError> {
    let mut row = 0;
    while row < rows.len() {
        let offset = reader.offset();
        let run = reader.number()?;
        let length = run / 2;
        if length == 0 || length > (rows.len() - row) as u64 {
            return Err(DecodeError::OutOfRange { offset, what: "length of a run of rows", value: length });
        }
        let end = row + length as usize;
        if run % 2 == 1 {
            rows[row..end].fill(get(reader)?);
        }
        row = end;
    }
    Ok(())
}

fn put_place<T: PartialEq>(out: &mut Vec<u8>, value: T, values: &[T]) {
    let place = values.iter().position(|of| *of == value).expect("each value of the type is in its list");
    put_number(out, place as u64);
}

fn put_access(out: &mut Vec<u8>, access: AccessHistory) {
    put_number(out, access.samples().into());
    put_number(out, access.touched().into());
    put_number(out, access.touches_per_s().map_or(0, |touches| touches + 1));
}

fn access(reader: &mut Reader<'_>) -> Result<AccessHistory, DecodeError> {
    let samples = reader.number_to("number of samples", AccessHistory::SAMPLES_MAX.into())? as u8;
    let touched = reader.number_to("access history", (1 << samples) - 1)? as u16;
    let touches = reader.number_to("touches per second", AccessHistory::TOUCHES_PER_S_MAX + 1)?;
    Ok(AccessHistory::from_parts(touched, samples).with_touches_per_s(touches.checked_sub(1)))
}

fn put_count(out: &mut Vec<u8>, pages: u16) {
    put_number(out, pages.into());
}

/// A number of pages of a window.
fn count(reader: &mut Reader<'_>, what: &'static str) -> Result<u16, DecodeError> {
    Ok(reader.number_to(what, BASE_PAGES_PER_WINDOW.into())? as u16)
}

fn put_pages(out: &mut Vec<u8>, pages: Option<u16>) {
    put_number(out, pages.map_or(0, |pages| u64::from(pages) + 1));
}

fn pages(reader: &mut Reader<'_>) -> Result<Option<u16>, DecodeError> {
    let number = reader.number_to("number of pages", u64::from(BASE_PAGES_PER_WINDOW) + 1)?;
    Ok(number.checked_sub(1).map(|pages| pages as u16))
}

fn put_mapping(out: &mut Vec<u8>, mapping: Option<MappingStats>) {
    put_number(out, mapping.is_some().into());
    if let Some(MappingStats { pages_4k, pages_2m, pages_1g }) = mapping {
        [pages_4k, pages_2m, pages_1g].into_iter().for_each(|pages| put_number(out, pages));
    }
}

fn mapping(reader: &mut Reader<'_>) -> Result<Option<MappingStats>, DecodeError> {
    if !reader.one_of("flag", &HELD)? {
        return Ok(None);
    }
    let mut leaves = |size: PageSize| reader.number_to("number of mappings", MEMORY_MAX / size.bytes().get());
    Ok(Some(MappingStats {
        pages_4k: leaves(PageSize::Base4K)?,
        pages_2m: leaves(PageSize::Huge2M)?,
        pages_1g: leaves(PageSize::Giant1G)?,
    }))
}

fn put_progress(out: &mut Vec<u8>, progress: &[GuestProgress]) {
    put_number(out, progress.len() as u64);
    for GuestProgress { phase, done, cpu } in progress {
        put_number(out, *phase);
        put_number(out, *done);
        put_time(out, *cpu);
    }
}

fn progress(reader: &mut Reader<'_>) -> Result<GuestProgress, DecodeError> {
    Ok(GuestProgress { phase: reader.number()?, done: reader.number()?, cpu: reader.time()? })
}

fn put_node(out: &mut Vec<u8>, node: WindowNode) {
    let (kind, node) = match node {
        WindowNode::Unknown => return put_number(out, 0),
        WindowNode::On(node) => (1, node),
        WindowNode::Spread(node) => (2, node),
    };
    put_number(out, kind);
    put_number(out, node.0.into());
}

fn node(reader: &mut Reader<'_>) -> Result<WindowNode, DecodeError> {
    Ok(match reader.number_to("kind of node", 2)? {
        0 => WindowNode::Unknown,
        1 => WindowNode::On(node_id(reader)?),
        _ => WindowNode::Spread(node_id(reader)?),
    })
}

pub(super) fn node_id(reader: &mut Reader<'_>) -> Result<NodeId, DecodeError> {
    Ok(NodeId(reader.number_to("number of a node", u16::MAX.into())? as u16))
}

fn put_touched_from(out: &mut Vec<u8>, touched_from: TouchedFrom) {
    match touched_from {
        TouchedFrom::Unknown => put_number(out, 0),
        TouchedFrom::Node(node) => {
            put_number(out, 1);
            put_number(out, node.0.into());
        }
        TouchedFrom::Several { most, share } => {
            put_number(out, 2);
            put_number(out, most.0.into());
            put_number(out, share.get().into());
        }
    }
}

fn touched_from(reader: &mut Reader<'_>) -> Result<TouchedFrom, DecodeError> {
    Ok(match reader.number_to("kind of touches", 2)? {
        0 => TouchedFrom::Unknown,
        1 => TouchedFrom::Node(node_id(reader)?),
        _ => TouchedFrom::Several {
            most: node_id(reader)?,
            share: PerTenThousand::new(reader.number_to("share of touches", 10_000)? as u32),
        },
    })
}

fn put_nodes(out: &mut Vec<u8>, nodes: &[NodeOfVm]) {
    put_number(out, nodes.len() as u64);
    for NodeOfVm { node, may_use, vcpus, free_2m, free_1g } in nodes {
        put_number(out, node.0.into());
        put_number(out, (*may_use).into());
        put_number(out, (*vcpus).into());
        put_number(out, *free_2m);
        put_number(out, *free_1g);
    }
}

fn node_of_vm(reader: &mut Reader<'_>) -> Result<NodeOfVm, DecodeError> {
    Ok(NodeOfVm {
        node: node_id(reader)?,
        may_use: reader.one_of("flag", &HELD)?,
        vcpus: reader.number_to("number of vCPUs", u16::MAX.into())? as u16,
        free_2m: reader.number()?,
        free_1g: reader.number()?,
    })
}
