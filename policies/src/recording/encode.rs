//! Encodes frames to bytes.

use alloc::vec::Vec;

use super::columns::put_vm;
use super::wire::{put_moment, put_number, put_text, put_time};
use super::{Header, MAGIC, RESULTS, ROWS_MAX, TooManyWindows, VERSION, VmHeader, kind};
use crate::action::{Action, PlannedAction};
use crate::budget::{BudgetLimits, Cost};
use crate::huge_page_price::HugePagePrice;
use crate::node::NodeId;
use crate::outcome::{Outcome, OutcomeResult, Refusal};
use crate::snapshot::{HostMemory, HugePages, Snapshot, VmSnapshot};
use crate::units::{Moment, PageSize};

/// Writes frames. Keeps the latest snapshot, from which the next one is encoded as a difference.
#[derive(Debug)]
pub struct Encoder {
    previous: Vec<VmSnapshot>,
    /// Buffer of the block being written, kept for its capacity.
    block: Vec<u8>,
}

impl Encoder {
    /// Appends the beginning of a recording to `out`, and returns an encoder for its frames.
    ///
    /// # Errors
    /// [`TooManyWindows`] if the VMs have more than [`ROWS_MAX`] of them; nothing is appended.
    pub fn start(header: &Header, out: &mut Vec<u8>) -> Result<Encoder, TooManyWindows> {
        let windows = header.windows();
        if windows > ROWS_MAX {
            return Err(TooManyWindows(windows));
        }
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let mut block = Vec::new();
        put_header(&mut block, header);
        put_block(out, &mut block);
        Ok(Encoder { previous: Vec::new(), block })
    }

    /// Appends a snapshot, and the start of its tick.
    pub fn snapshot(&mut self, at: Moment, snapshot: &Snapshot, out: &mut Vec<u8>) {
        let block = &mut self.block;
        put_moment(block, at);
        put_host(block, snapshot.host);
        put_number(block, snapshot.vms.len() as u64);
        for vm in &snapshot.vms {
            put_vm(block, vm, self.previous.iter().find(|before| before.vm == vm.vm));
        }
        self.previous.clone_from(&snapshot.vms);
        self.put_frame(kind::SNAPSHOT, out);
    }

    /// Appends a plan, and the moment that its policy was given.
    pub fn plan(&mut self, now: Moment, actions: &[PlannedAction], out: &mut Vec<u8>) {
        let block = &mut self.block;
        put_moment(block, now);
        put_number(block, actions.len() as u64);
        for planned in actions {
            put_placed(block, planned.action, planned.node);
            put_cost(block, planned.cost);
        }
        self.put_frame(kind::PLAN, out);
    }

    /// Appends an outcome, and the name of the mechanism.
    pub fn outcome(&mut self, mechanism: &str, outcome: &Outcome, out: &mut Vec<u8>) {
        let Outcome { action, at, cost, unavailable, result } = *outcome;
        let block = &mut self.block;
        put_text(block, mechanism);
        put_action(block, action);
        put_moment(block, at);
        put_cost(block, cost);
        put_time(block, unavailable);
        put_result(block, result);
        self.put_frame(kind::OUTCOME, out);
    }

    /// Appends the mark that the recording was closed.
    pub fn end(mut self, out: &mut Vec<u8>) {
        self.put_frame(kind::END, out);
    }

    fn put_frame(&mut self, kind: u64, out: &mut Vec<u8>) {
        put_number(out, kind);
        put_block(out, &mut self.block);
    }
}

fn put_block(out: &mut Vec<u8>, block: &mut Vec<u8>) {
    put_number(out, block.len() as u64);
    out.append(block);
}

fn put_header(out: &mut Vec<u8>, header: &Header) {
    let Header { policy, limits, vms, facts } = header;
    let BudgetLimits { copy_per_second, cpu_share, burst } = *limits;
    put_text(out, policy);
    put_number(out, copy_per_second.get());
    put_number(out, cpu_share.get().into());
    put_time(out, burst);
    put_number(out, vms.len() as u64);
    for VmHeader { vm, backing, start_page, ranges } in vms {
        put_number(out, vm.0.into());
        put_text(out, backing);
        put_page_size(out, *start_page);
        put_number(out, ranges.len() as u64);
        for range in ranges {
            put_number(out, range.start().get());
            put_number(out, range.bytes().get());
        }
    }
    put_number(out, facts.len() as u64);
    for (name, value) in facts {
        put_text(out, name);
        put_text(out, value);
    }
}

fn put_host(out: &mut Vec<u8>, host: Option<HostMemory>) {
    let Some(HostMemory { total, available, giant_pages_free, huge_pages }) = host else {
        return put_number(out, 0);
    };
    let (kind, more) = match huge_pages {
        HugePages::Plenty => (1, [None; 3]),
        HugePages::Scarce { free } => (2, [Some(free), None, None]),
        HugePages::Priced(HugePagePrice { cycles_per_s, may_vacate, free }) => {
            (3 + u64::from(free.is_some()), [Some(cycles_per_s), Some(may_vacate), free])
        }
    };
    let numbers = [kind, total.get(), available.get(), giant_pages_free].into_iter().chain(more.into_iter().flatten());
    numbers.for_each(|number| put_number(out, number));
}

fn put_page_size(out: &mut Vec<u8>, size: PageSize) {
    put_number(out, size as u64);
}

fn put_action(out: &mut Vec<u8>, action: Action) {
    put_placed(out, action, None);
}

/// Only a promotion has a node of its own choice; that of a move is a part of the action.
fn put_placed(out: &mut Vec<u8>, action: Action, on: Option<NodeId>) {
    let (kind, to, node) = match action {
        Action::Promote { to, .. } => (if on.is_some() { 5 } else { 0 }, Some(to), on),
        Action::Demote { to, .. } => (1, Some(to), None),
        Action::Release { .. } => (2, None, None),
        Action::Vacate { .. } => (3, None, None),
        Action::Move { node, .. } => (4, None, Some(node)),
    };
    put_number(out, kind);
    put_number(out, action.vm().0.into());
    put_number(out, action.window().get());
    if let Some(to) = to {
        put_page_size(out, to);
    }
    if let Some(node) = node {
        put_number(out, node.0.into());
    }
}

fn put_cost(out: &mut Vec<u8>, cost: Cost) {
    put_number(out, cost.copied.get());
    put_time(out, cost.cpu);
}

fn put_result(out: &mut Vec<u8>, result: OutcomeResult) {
    let (known, errno) = match result {
        OutcomeResult::Refused(Refusal::Other(errno)) => (OutcomeResult::Refused(Refusal::Other(0)), errno),
        known => (known, 0),
    };
    let place = RESULTS.iter().position(|of| *of == known).expect("each result is in the list");
    put_number(out, place as u64);
    put_number(out, ((errno << 1) ^ (errno >> 31)) as u32 as u64);
}
