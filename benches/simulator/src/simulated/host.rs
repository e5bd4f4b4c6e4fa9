//! The simulated host of a stream: the pages that are present, their sizes, and the effects of actions.
//!
//! ```text
//!   touched   a bit for each base page that the guest ever touched
//!   backing   Unbacked ──first touch──▶ Base4K ──promote──▶ Huge2M ──promote──▶ Giant1G
//!   resident  0                         the touched ones    512                 512 of each window
//!                                          ▲                   │
//!                                          ├─ demote, release ─┤   untouched pages are gone
//!                                          └─ vacate ───────────┘   512 base pages, and a block of 2 MiB is free
//! ```

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use super::access_samples::{AccessSamples, PageBits};
use super::history::HistorySample;
use super::nodes::{LOCAL, Nodes};
use super::{HostConfig, Mmu, guest_mapping, windows_of};
use crate::replay::feasible::{Ram, feasible};
use crate::replay::{Costs, Tally, rows_of_page};
use wideleaf_policies::action::{Action, PlannedAction};
use wideleaf_policies::budget::Cost;
use wideleaf_policies::node::NodeId;
use wideleaf_policies::outcome::{Outcome, OutcomeResult, Refusal, Skip};
use wideleaf_policies::policy::{Needs, Policy, RamStart};
use wideleaf_policies::reservations::Reservations;
use wideleaf_policies::snapshot::{
    AccessHistory, Backing, GuestMapping, HostMemory, HugePages, Snapshot, VmId, VmSnapshot, WindowRow,
};
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, WindowIndex};
use wideleaf_policies::window::WindowState;
use wideleaf_policies::window_node::{TouchedFrom, WindowNode};

/// Id of the only guest.
const GUEST: VmId = VmId(0);

pub(super) struct StreamHost {
    backing: Vec<Backing>,
    touched: Vec<PageBits>,
    /// Number of bits set in `touched`, per window.
    touched_pages: Vec<u16>,
    /// Whether a window on base pages has all of them, also the untouched ones: it was vacated.
    is_full: Vec<bool>,
    states: Vec<WindowState>,
    looks: AccessSamples,
    reservations: Option<Reservations>,
    /// Page of the latest access: most accesses go to the same page again.
    latest_page: u64,
    arena: Bytes,
    memory: Bytes,
    giant_pages_free: u64,
    /// Free blocks of 2 MiB; of the second node, if there are two.
    huge_pages_free: u64,
    /// Nodes of the windows, if the host has two.
    nodes: Option<Nodes>,
    guest: GuestMapping,
    costs: Costs,
}

impl StreamHost {
    pub fn new(config: &HostConfig, policy: &dyn Policy, mmu: &mut dyn Mmu) -> StreamHost {
        assert!(config.local_node.is_none() || config.giant_pages == 0, "a giant of two nodes is not simulated");
        let windows = windows_of(config.arena);
        let rows = windows as usize;
        let is_prefaulted = policy.ram_start() == RamStart::HugeAndPrefaulted;
        if is_prefaulted {
            (0..windows).for_each(|window| mmu.map_host(WindowIndex::new(window), PageSize::Huge2M));
        }
        let mut nodes = config.local_node.map(|local| Nodes::new(local, rows));
        let mut of_other_nodes = if is_prefaulted { windows } else { 0 };
        if let Some(nodes) = nodes.as_mut().filter(|_| is_prefaulted) {
            for row in 0..rows {
                let is_local = nodes.take_block();
                nodes.move_huge_page(row, is_local, mmu);
                of_other_nodes -= u64::from(is_local);
            }
        }
        StreamHost {
            backing: vec![if is_prefaulted { Backing::Huge2M } else { Backing::Unbacked }; rows],
            touched: vec![PageBits::default(); rows],
            touched_pages: vec![0; rows],
            is_full: vec![false; rows],
            states: vec![WindowState::default(); rows],
            looks: AccessSamples::new(rows),
            reservations: policy.reserves().map(Reservations::new),
            latest_page: u64::MAX,
            arena: config.arena,
            memory: config.memory,
            giant_pages_free: config.giant_pages,
            huge_pages_free: config.huge_pages.saturating_sub(of_other_nodes),
            nodes,
            guest: guest_mapping(config.guest_page),
            costs: config.costs,
        }
    }

    /// Whether an access to `address` changes any state: a page is touched for the first time, or a sample is
    /// waiting for it.
    #[inline]
    pub fn needs_attention(&mut self, address: u64) -> bool {
        let (page, row, word, bit) = place(address);
        if page == self.latest_page {
            return false;
        }
        assert!(address < self.arena.get(), "an access at {address} is beyond an arena of {}", self.arena);
        self.latest_page = page;
        self.touched[row][word] & bit == 0 || self.looks.is_watched(row, word, bit)
    }

    /// Performs the access itself.
    pub fn touch(&mut self, address: u64, now: Moment, policy: &mut dyn Policy, tally: &mut Tally, mmu: &mut dyn Mmu) {
        let (_, row, word, bit) = place(address);
        if self.looks.is_watched(row, word, bit) {
            self.looks.touched(row, now);
        }
        if self.touched[row][word] & bit != 0 {
            return;
        }
        self.touched[row][word] |= bit;
        self.touched_pages[row] += 1;
        let window = WindowIndex::new(row as u64);
        if self.backing[row] == Backing::Unbacked {
            self.backing[row] = Backing::Base4K;
            self.nodes.iter_mut().for_each(|nodes| nodes.first_touch(row, mmu));
            if policy.decides_at_first_touch() {
                let is_large = policy.first_touch(GUEST, window) != PageSize::Base4K && self.take_huge_page(row, None);
                if is_large {
                    self.backing[row] = Backing::Huge2M;
                    self.is_on_huge_page(row, None, mmu);
                    mmu.map_host(window, PageSize::Huge2M);
                }
                tally.count_first_touch(if is_large { PageSize::Huge2M } else { PageSize::Base4K }, 0);
            }
            if self.reservations.is_some() && self.take_huge_page(row, None) {
                self.reservations.iter_mut().for_each(|book| book.reserve(GUEST, window, now));
                tally.count_done("reserve_2m");
            }
        }
        self.populate(row, now, tally, mmu);
    }

    /// Populates one more page of a window that has reserved frames.
    fn populate(&mut self, row: usize, now: Moment, tally: &mut Tally, mmu: &mut dyn Mmu) {
        let window = WindowIndex::new(row as u64);
        let Some(book) = &mut self.reservations else { return };
        if book.populated(GUEST, window).is_some() && book.populate(GUEST, window, 1, now) {
            tally.count_in_place(self.touched_pages[row]);
            self.make_huge(row, None, mmu);
        }
    }

    /// Takes a free block of 2 MiB for a window, if there is one on the node that the plan names, or else on its own.
    fn take_huge_page(&mut self, row: usize, node: Option<NodeId>) -> bool {
        if let Some(nodes) = self.nodes.as_mut().filter(|nodes| nodes.is_from_local(row, node)) {
            return nodes.take_block();
        }
        let is_free = self.huge_pages_free > 0;
        self.huge_pages_free -= u64::from(is_free);
        is_free
    }

    /// Notes that a window has the huge page that was taken for it.
    fn is_on_huge_page(&mut self, row: usize, node: Option<NodeId>, mmu: &mut dyn Mmu) {
        if let Some(nodes) = &mut self.nodes {
            let is_local = nodes.is_from_local(row, node);
            nodes.on_huge_page_of(row, is_local, mmu);
        }
    }

    fn make_huge(&mut self, row: usize, node: Option<NodeId>, mmu: &mut dyn Mmu) {
        self.backing[row] = Backing::Huge2M;
        self.is_full[row] = false;
        self.is_on_huge_page(row, node, mmu);
        mmu.remap_host(WindowIndex::new(row as u64), PageSize::Huge2M);
    }

    /// Breaks all due reservations at once: between two plans the service has had the time.
    pub fn break_reservations(&mut self, tally: &mut Tally) {
        let memory = self.host_memory();
        let broken = self.reservations.as_mut().map(|book| book.to_break(Some(memory), usize::MAX));
        broken.iter().flatten().for_each(|_| tally.count_done("break_reservation"));
    }

    pub fn start_look(&mut self, now: Moment) {
        let is_backed = |row: &usize| self.backing[*row] != Backing::Unbacked;
        let backed: Vec<_> =
            (0..self.backing.len()).filter(is_backed).map(|row| WindowIndex::new(row as u64)).collect();
        let present = |row: usize| match (self.backing[row], self.is_full[row]) {
            (Backing::Base4K, false) => Some(self.touched[row]),
            (Backing::Base4K, true) => Some([u64::MAX; 8]),
            (Backing::Unbacked | Backing::Huge2M | Backing::Giant1G, _) => None,
        };
        self.looks.start(&backed, present, now);
        self.latest_page = u64::MAX;
    }

    pub fn finish_look(&mut self, now: Moment) {
        self.looks.finish(now);
    }

    /// The sensor data for a policy with these needs.
    pub fn snapshot(&self, needs: Needs) -> Snapshot {
        let mut vm = VmSnapshot::with_capacity(GUEST, self.backing.len());
        for row in 0..self.backing.len() {
            vm.push(self.row(row, needs));
        }
        vm.nodes = self.nodes.as_ref().map(|nodes| nodes.table(self.huge_pages_free)).unwrap_or_default();
        Snapshot { host: needs.host_memory.then(|| self.host_memory()), vms: Vec::from([vm]) }
    }

    fn row(&self, row: usize, needs: Needs) -> WindowRow {
        let resident = self.resident(row);
        let untouched = resident - self.touched_pages[row].min(resident);
        let node = self.nodes.as_ref().filter(|_| resident > 0).map_or(WindowNode::Unknown, |nodes| nodes.of(row));
        WindowRow {
            node,
            touched_from: self.nodes.as_ref().map_or(TouchedFrom::Unknown, Nodes::touched_from),
            ready_at: self.states[row].ready_at(),
            access: if needs.access { self.looks.history(row) } else { AccessHistory::default() },
            zero: (needs.zero && resident > 0).then_some(untouched),
            guest_mapping: if needs.guest_mapping { self.guest } else { GuestMapping::Unknown },
            ..WindowRow::new(WindowIndex::new(row as u64), resident, self.backing[row])
        }
    }

    fn resident(&self, row: usize) -> u16 {
        match self.backing[row] {
            Backing::Unbacked => 0,
            Backing::Base4K if self.is_full[row] => BASE_PAGES_PER_WINDOW,
            Backing::Base4K => self.touched_pages[row],
            Backing::Huge2M | Backing::Giant1G => BASE_PAGES_PER_WINDOW,
        }
    }

    fn host_memory(&self) -> HostMemory {
        let used = self.resident_pages(|_| true) + self.unpopulated();
        HostMemory {
            total: self.memory,
            available: self.memory.saturating_sub(used),
            giant_pages_free: self.giant_pages_free,
            huge_pages: self.huge_pages(),
        }
    }

    /// Supply of huge pages: plenty until the last one is taken, as there is no compaction here.
    fn huge_pages(&self) -> HugePages {
        match self.huge_pages_free {
            0 => HugePages::Scarce { free: 0 },
            _ => HugePages::Plenty,
        }
    }

    fn unpopulated(&self) -> Bytes {
        self.reservations.as_ref().map_or(Bytes::ZERO, Reservations::unpopulated)
    }

    fn resident_pages(&self, which: impl Fn(Backing) -> bool) -> Bytes {
        let rows = (0..self.backing.len()).filter(|row| which(self.backing[*row]));
        PageSize::Base4K.bytes() * rows.map(|row| u64::from(self.resident(row))).sum::<u64>()
    }

    /// Performs an action that was planned on `seen`.
    pub fn act(&mut self, planned: &PlannedAction, seen: &Snapshot, now: Moment, mmu: &mut dyn Mmu) -> Outcome {
        let PlannedAction { action, node, .. } = *planned;
        let skipped = |skip| Outcome {
            action,
            at: now,
            cost: Cost::default(),
            unavailable: Duration::ZERO,
            result: OutcomeResult::Skipped(skip),
        };
        let row = action.window().get() as usize;
        let Some(vm) = seen.vm(action.vm()).filter(|vm| row < vm.len()) else {
            return skipped(Skip::NotResident);
        };
        let Ok(acting) = self.states[row].begin(now) else {
            return skipped(Skip::BackingOff);
        };
        let (result, cost) = feasible(action, Ram::Anonymous, vm, vm.get(row), seen, &self.costs);
        // The plan may request more pages than the snapshot shows, and a policy may not have checked.
        let is_to_be_had = match action {
            Action::Promote { to: PageSize::Giant1G, .. } => self.giant_pages_free > 0,
            Action::Promote { .. } => self.has_huge_page(row, node),
            Action::Move { node, .. } => self.has_room_to_move(row, node),
            Action::Demote { .. } | Action::Release { .. } | Action::Vacate { .. } => true,
        };
        let (result, cost) = match is_to_be_had || result != OutcomeResult::Done {
            true => (result, cost),
            false => (OutcomeResult::Refused(Refusal::NoHugePage), Cost::default()),
        };
        let at = now + cost.cpu;
        let next = match result {
            OutcomeResult::Refused(refusal) => acting.refused(refusal, at),
            OutcomeResult::Done | OutcomeResult::Skipped(_) => acting.done(),
        };
        self.states[row] = next.expect("a window that is being acted on may be done or refused");
        if result == OutcomeResult::Done {
            self.change(planned, vm, mmu);
        }
        Outcome { at, cost, unavailable: cost.cpu, result, ..skipped(Skip::NotResident) }
    }

    /// Whether a huge page is free for a window, as [`StreamHost::take_huge_page`] takes it.
    fn has_huge_page(&self, row: usize, node: Option<NodeId>) -> bool {
        match self.nodes.as_ref().filter(|nodes| nodes.is_from_local(row, node)) {
            Some(nodes) => nodes.has_block(),
            None => self.huge_pages_free > 0,
        }
    }

    /// Whether that node has room for the window's pages.
    fn has_room_to_move(&self, row: usize, node: NodeId) -> bool {
        let is_huge = self.backing[row] == Backing::Huge2M;
        match &self.nodes {
            Some(_) if is_huge => self.has_huge_page(row, Some(node)),
            Some(nodes) => node != LOCAL || nodes.has_memory(),
            None => true,
        }
    }

    fn change(&mut self, planned: &PlannedAction, vm: &VmSnapshot, mmu: &mut dyn Mmu) {
        let PlannedAction { action, node, .. } = *planned;
        let row = action.window().get() as usize;
        match action {
            Action::Promote { to: PageSize::Giant1G, window, .. } => {
                self.giant_pages_free -= 1;
                for row in rows_of_page(vm, window, PageSize::Giant1G) {
                    self.free_huge_page(row);
                    self.backing[row] = Backing::Giant1G;
                }
                mmu.remap_host(WindowIndex::new(row as u64), PageSize::Giant1G);
            }
            Action::Promote { .. } => {
                self.take_huge_page(row, node);
                self.make_huge(row, node, mmu);
            }
            Action::Vacate { .. } => {
                self.free_huge_page(row);
                self.is_on_base_pages(row);
                self.backing[row] = Backing::Base4K;
                self.is_full[row] = true;
                mmu.remap_host(WindowIndex::new(row as u64), PageSize::Base4K);
            }
            Action::Move { node, .. } => self.move_to(row, node, mmu),
            Action::Demote { to: PageSize::Huge2M, window, .. } => {
                self.giant_pages_free += 1;
                for (nth, row) in rows_of_page(vm, window, PageSize::Giant1G).enumerate() {
                    let (window, size) = (WindowIndex::new(row as u64), self.leave_giant(row));
                    // One flush is enough for all of them.
                    match nth {
                        0 => mmu.remap_host(window, size),
                        _ => mmu.map_host(window, size),
                    }
                }
            }
            Action::Demote { .. } | Action::Release { .. } => {
                let is_empty = self.touched_pages[row] == 0;
                match (self.backing[row], is_empty) {
                    // All of its memory is free.
                    (Backing::Huge2M, true) => self.free_huge_page(row),
                    (Backing::Huge2M, false) => self.is_on_base_pages(row),
                    (_, true) => self.nodes.iter_mut().for_each(|nodes| nodes.leave_base_pages(row)),
                    (_, false) => {}
                }
                self.is_full[row] = false;
                self.backing[row] = if is_empty { Backing::Unbacked } else { Backing::Base4K };
                mmu.remap_host(WindowIndex::new(row as u64), PageSize::Base4K);
            }
        }
    }

    /// Moves a window from its giant page onto a huge one, or base pages if no block is free. Zeroes are not copied.
    /// Returns the size of its pages.
    fn leave_giant(&mut self, row: usize) -> PageSize {
        self.is_full[row] = false;
        let is_touched = self.touched_pages[row] > 0;
        self.backing[row] = match is_touched && self.take_huge_page(row, None) {
            true => Backing::Huge2M,
            false if is_touched => Backing::Base4K,
            false => Backing::Unbacked,
        };
        if self.backing[row] == Backing::Huge2M { PageSize::Huge2M } else { PageSize::Base4K }
    }

    /// Frees the block of 2 MiB of a window that is about to leave its huge page, if it has one.
    fn free_huge_page(&mut self, row: usize) {
        let is_huge = self.backing[row] == Backing::Huge2M;
        let is_of_local = is_huge && self.nodes.as_mut().is_some_and(|nodes| nodes.free_block(row));
        self.huge_pages_free = self.huge_pages_free.saturating_add(u64::from(is_huge && !is_of_local));
    }

    /// Notes that a window leaves its huge page for base pages.
    fn is_on_base_pages(&mut self, row: usize) {
        self.nodes.iter_mut().for_each(|nodes| nodes.on_base_pages(row));
    }

    /// Moves the pages of a window to a node that has room for them. On a host with one node they are there.
    fn move_to(&mut self, row: usize, node: NodeId, mmu: &mut dyn Mmu) {
        if self.nodes.is_none() {
            return;
        }
        if self.backing[row] == Backing::Huge2M {
            self.take_huge_page(row, Some(node));
            self.free_huge_page(row);
        }
        let is_huge = self.backing[row] == Backing::Huge2M;
        let Some(nodes) = &mut self.nodes else { return };
        match is_huge {
            true => nodes.move_huge_page(row, node == LOCAL, mmu),
            false => nodes.move_base_pages(row, node, mmu),
        }
    }

    pub fn sample(&self, at: Moment, accesses: u64, misses: u64) -> HistorySample {
        let touched = self.touched_pages.iter().map(|pages| u64::from(*pages)).sum::<u64>();
        HistorySample {
            at,
            accesses,
            misses,
            resident: self.resident_pages(|_| true),
            large: self.resident_pages(Backing::is_large),
            touched: PageSize::Base4K.bytes() * touched,
            reserved: self.unpopulated(),
        }
    }
}

/// Position of an address: its page, its window, and its bit within the window.
#[inline]
fn place(address: u64) -> (u64, usize, usize, u64) {
    let page = address / PageSize::Base4K.bytes().get();
    let in_window = page % u64::from(BASE_PAGES_PER_WINDOW);
    let row = (page / u64::from(BASE_PAGES_PER_WINDOW)) as usize;
    (page, row, (in_window / 64) as usize, 1 << (in_window % 64))
}
