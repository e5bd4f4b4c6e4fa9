//! The simulated host: the recorded guest on the pages that another policy would have made.
//!
//! ```text
//!   recorded row ──▶ without the recorded policy's actions ──▶ with this policy's actions ──▶ simulated row
//! ```

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use core::time::Duration;

use super::costs::Costs;
use super::feasible::{Ram, feasible};
use super::{Tally, Tick, WINDOWS_PER_GIANT, rows_of_page};
use wideleaf_policies::action::Action;
use wideleaf_policies::budget::Cost;
use wideleaf_policies::node::NodeId;
use wideleaf_policies::outcome::{Outcome, OutcomeResult, Skip};
use wideleaf_policies::policy::Policy;
use wideleaf_policies::recording::Header;
use wideleaf_policies::reservations::{LeftPages, ReservationRules, Reservations};
use wideleaf_policies::snapshot::{Backing, Snapshot, VmId, VmSnapshot, WindowRow};
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, Moment, PageSize, WindowIndex};
use wideleaf_policies::window::WindowState;
use wideleaf_policies::window_node::WindowNode;

/// Name in recordings of the mechanism that holds windows at 4 KiB.
const HOLD_MECHANISM: &str = "hold_at_4k";

pub(super) struct SimulatedHost {
    costs: Costs,
    /// Name of the policy that decided in the recording.
    recorded_policy: String,
    /// VMs on pages of the hugetlb pool, which no mechanism promotes.
    of_pool: BTreeSet<VmId>,
    /// VMs on anonymous RAM, which is demoted by splitting a window; all other RAM is demoted by a hold.
    of_anonymous: BTreeSet<VmId>,
    /// VMs that the recording's policy held.
    held_by_recording: BTreeSet<VmId>,
    giant_pages_taken: u64,
    /// Reserved frames, under a policy that reserves.
    reservations: Option<Reservations>,
    windows: BTreeMap<(VmId, WindowIndex), Window>,
}

/// State that the host keeps for a window.
#[derive(Clone, Copy, Default)]
struct Window {
    state: WindowState,
    /// Number of pages present before the recording's policy made it large.
    before_promotion: Option<u16>,
    /// Whether it was present earlier, so that its first touch is over.
    was_touched: bool,
    is_held: bool,
    /// NUMA node to which this policy moved it.
    moved_to: Option<NodeId>,
    /// Number of pages present in the latest snapshot, whatever this policy did.
    recorded: u16,
    pages: Pages,
}

/// Change that the simulated policy made to a window.
#[derive(Clone, Copy, Default)]
enum Pages {
    /// No change; as in the recording.
    #[default]
    AsRecorded,
    /// One large page, or part of one.
    Large(Backing),
    /// `left` base pages remain, until the recording shows another number than `recorded`.
    Released { left: u16, recorded: u16 },
    /// Base pages with all contents of the large page, until the recording shows another number than `recorded`.
    Vacated { recorded: u16 },
}

impl SimulatedHost {
    pub fn new(header: &Header, costs: Costs, reserves: Option<ReservationRules>) -> SimulatedHost {
        let on = |backing| header.vms.iter().filter(move |vm| vm.backing == backing).map(|vm| vm.vm).collect();
        SimulatedHost {
            costs,
            recorded_policy: header.policy.clone(),
            of_pool: on("hugetlb"),
            of_anonymous: on("anon"),
            held_by_recording: BTreeSet::new(),
            giant_pages_taken: 0,
            reservations: reserves.map(Reservations::new),
            windows: BTreeMap::new(),
        }
    }

    /// The snapshot that the sensors would have taken. The policy answers the first touches since the last
    /// snapshot, or reserved frames do, if the policy uses them.
    pub fn see(&mut self, at: Moment, recorded: &Snapshot, policy: &mut dyn Policy, tally: &mut Tally) -> Snapshot {
        let mut seen = Snapshot { host: recorded.host, ..Snapshot::default() };
        if let Some(host) = &mut seen.host {
            host.giant_pages_free = host.giant_pages_free.saturating_sub(self.giant_pages_taken);
        }
        for vm in &recorded.vms {
            let mut rows = VmSnapshot::with_capacity(vm.vm, vm.len());
            rows.mapping = vm.mapping;
            rows.given_back_tolerated = vm.given_back_tolerated;
            rows.guarantee = vm.guarantee;
            rows.nodes.clone_from(&vm.nodes);
            if policy.name() == self.recorded_policy {
                rows.progress.clone_from(&vm.progress);
            }
            for row in (0..vm.len()).map(|row| vm.get(row)) {
                let window = self.windows.entry((vm.vm, row.window)).or_default();
                let mut row = window.without_recorded_policy(row);
                if self.held_by_recording.contains(&vm.vm) {
                    row.is_held = false;
                }
                if row.backing != Backing::Unbacked && !window.was_touched {
                    window.was_touched = true;
                    window.first_touch(vm.vm, row, policy, tally);
                }
                if let Some(reservations) = &mut self.reservations {
                    window.populate(reservations, vm.vm, row, at, tally);
                }
                rows.push(window.with_simulated_policy(row));
            }
            seen.vms.push(rows);
        }
        // All at once: between two ticks the service has had the time.
        let broken = self.reservations.as_mut().map(|reservations| reservations.to_break(recorded.host, usize::MAX));
        broken.iter().flatten().for_each(|_| tally.count_done("break_reservation"));
        seen
    }

    /// Performs an action that was planned on `seen`.
    pub fn act(&mut self, action: Action, seen: &Snapshot, tick: &Tick, now: Moment) -> Outcome {
        let skipped = |skip| Outcome {
            action,
            at: now,
            cost: Cost::default(),
            unavailable: Duration::ZERO,
            result: OutcomeResult::Skipped(skip),
        };
        let key = (action.vm(), action.window());
        let found = seen.vm(key.0).and_then(|vm| Some((vm, vm.get(vm.row(key.1)?))));
        let Some((vm, row)) = found else {
            return skipped(Skip::NotResident);
        };
        let Ok(acting) = self.windows.entry(key).or_default().state.begin(now) else {
            return skipped(Skip::BackingOff);
        };
        let outcome = match recorded_outcome(action, row, tick) {
            Some(recorded) => recorded,
            None => {
                let (result, cost) = feasible(action, self.ram(vm.vm), vm, row, seen, &self.costs);
                Outcome { at: now + cost.cpu, cost, unavailable: cost.cpu, result, ..skipped(Skip::NotResident) }
            }
        };
        let next = match outcome.result {
            OutcomeResult::Refused(refusal) => acting.refused(refusal, outcome.at),
            OutcomeResult::Done | OutcomeResult::Skipped(_) => acting.done(),
        };
        self.window(key).state = next.expect("a window that is being acted on may be done or refused");
        if outcome.result == OutcomeResult::Done {
            self.change(action, row);
        }
        outcome
    }

    /// Notes the actions of the recording's policy, to remove their effects from later snapshots.
    pub fn remember(&mut self, tick: &Tick) {
        for recorded in tick.outcomes.iter().filter(|recorded| recorded.outcome.result == OutcomeResult::Done) {
            let action = recorded.outcome.action;
            let Some(vm) = tick.snapshot.vm(action.vm()) else {
                continue;
            };
            if recorded.mechanism == HOLD_MECHANISM {
                self.held_by_recording.insert(vm.vm);
            }
            match action {
                Action::Promote { to, .. } => {
                    for row in rows_of_page(vm, action.window(), to).filter(|row| !vm.backing[*row].is_large()) {
                        self.window((vm.vm, vm.windows[row])).before_promotion = Some(vm.resident[row]);
                    }
                }
                Action::Demote { .. } | Action::Vacate { .. } => {
                    self.window((vm.vm, action.window())).before_promotion = None;
                }
                Action::Release { .. } | Action::Move { .. } => {}
            }
        }
    }

    fn window(&mut self, key: (VmId, WindowIndex)) -> &mut Window {
        self.windows.entry(key).or_default()
    }

    fn ram(&self, vm: VmId) -> Ram {
        if self.of_pool.contains(&vm) {
            Ram::OfPool
        } else if self.of_anonymous.contains(&vm) {
            Ram::Anonymous
        } else {
            Ram::Other
        }
    }

    fn change(&mut self, action: Action, row: WindowRow) {
        let (vm, window) = (action.vm(), action.window());
        match action {
            Action::Promote { to: PageSize::Giant1G, .. } => {
                self.giant_pages_taken += 1;
                self.large_giant(vm, window, Backing::Giant1G);
            }
            Action::Promote { .. } if row.is_held => self.window((vm, window)).is_held = false,
            Action::Promote { .. } => self.window((vm, window)).pages = Pages::Large(Backing::Huge2M),
            Action::Demote { to: PageSize::Huge2M, .. } => {
                self.giant_pages_taken = self.giant_pages_taken.saturating_sub(1);
                self.large_giant(vm, window, Backing::Huge2M);
            }
            Action::Demote { .. } if !self.of_anonymous.contains(&vm) => self.window((vm, window)).is_held = true,
            // Pages that hold only zeroes are gone after a split too.
            Action::Demote { .. } | Action::Release { .. } => {
                let left = row.resident.saturating_sub(row.zero.unwrap_or(0));
                let window = self.window((vm, window));
                window.pages = Pages::Released { left, recorded: window.recorded };
            }
            Action::Vacate { .. } => {
                let window = self.window((vm, window));
                window.pages = Pages::Vacated { recorded: window.recorded };
            }
            Action::Move { node, .. } => self.window((vm, window)).moved_to = Some(node),
        }
    }
}

impl SimulatedHost {
    /// All windows of a giant get large pages of this kind.
    fn large_giant(&mut self, vm: VmId, window: WindowIndex, backing: Backing) {
        let first = window.giant() * WINDOWS_PER_GIANT;
        for part in (first..first + WINDOWS_PER_GIANT).map(WindowIndex::new) {
            self.window((vm, part)).pages = Pages::Large(backing);
        }
    }
}

/// The row with all pages present; those that were absent hold zeroes.
fn with_all_pages(row: WindowRow, backing: Backing) -> WindowRow {
    let added = BASE_PAGES_PER_WINDOW - row.resident;
    let zero = row.zero.map(|zero| (zero + added).min(BASE_PAGES_PER_WINDOW));
    WindowRow { backing, resident: BASE_PAGES_PER_WINDOW, zero, ..row }
}

/// The recorded outcome of the action, if it was requested at the same tick for a window in the same state.
fn recorded_outcome(action: Action, row: WindowRow, tick: &Tick) -> Option<Outcome> {
    let vm = tick.snapshot.vm(action.vm())?;
    let then = vm.get(vm.row(action.window())?);
    let is_same = (then.backing, then.is_held) == (row.backing, row.is_held);
    tick.outcome_of(action).filter(|_| is_same).copied()
}

impl Window {
    fn without_recorded_policy(&mut self, row: WindowRow) -> WindowRow {
        let Some(resident) = self.before_promotion else {
            return row;
        };
        if !row.backing.is_large() {
            // The kernel split the page, as it would have split the one that this policy made.
            self.before_promotion = None;
            self.pages = Pages::AsRecorded;
            return row;
        }
        let backing = if resident == 0 { Backing::Unbacked } else { Backing::Base4K };
        let zero = row.zero.map(|zero| zero.min(resident));
        WindowRow { backing, resident, zero, ..row }
    }

    fn first_touch(&mut self, vm: VmId, row: WindowRow, policy: &mut dyn Policy, tally: &mut Tally) {
        if !policy.decides_at_first_touch() || row.backing != Backing::Base4K {
            return;
        }
        let page = policy.first_touch(vm, row.window);
        if page != PageSize::Base4K {
            self.pages = Pages::Large(Backing::Huge2M);
        }
        tally.count_first_touch(page, row.resident);
    }

    /// Updates the reservations from the recorded guest, as far as snapshots show it: pages, not their order.
    fn populate(&mut self, book: &mut Reservations, vm: VmId, row: WindowRow, at: Moment, tally: &mut Tally) {
        if self.recorded == 0 && row.backing == Backing::Base4K {
            book.reserve(vm, row.window, at);
            tally.count_done("reserve_2m");
        }
        let Some(before) = book.populated(vm, row.window) else {
            return;
        };
        if row.resident < before {
            let left = LeftPages { populated: before - row.resident, unpopulated: 0 };
            if book.is_whole(vm, row.window) {
                tally.count_done("demote_reserved");
            }
            book.depopulate(vm, row.window, left, at);
            self.pages = Pages::AsRecorded;
            return;
        }
        let more = row.resident - before;
        book.refill(vm, row.window, more.min(book.absent(vm, row.window)));
        if book.populate(vm, row.window, more, at) {
            self.pages = Pages::Large(Backing::Huge2M);
            tally.count_in_place(row.resident);
        }
    }

    fn with_simulated_policy(&mut self, recorded: WindowRow) -> WindowRow {
        let is_gone = match self.pages {
            Pages::AsRecorded => false,
            Pages::Large(_) => recorded.backing == Backing::Unbacked,
            Pages::Released { recorded: then, .. } | Pages::Vacated { recorded: then } => recorded.resident != then,
        };
        if is_gone {
            self.pages = Pages::AsRecorded;
        }
        self.recorded = recorded.resident;
        let node = self.moved_to.map_or(recorded.node, WindowNode::On);
        let row =
            WindowRow { is_held: recorded.is_held || self.is_held, ready_at: self.state.ready_at(), node, ..recorded };
        match self.pages {
            Pages::AsRecorded => row,
            Pages::Large(_) if row.backing == Backing::Giant1G => row,
            Pages::Large(backing) => with_all_pages(row, backing),
            Pages::Vacated { .. } => with_all_pages(row, Backing::Base4K),
            Pages::Released { left: 0, .. } => WindowRow { backing: Backing::Unbacked, resident: 0, zero: None, ..row },
            Pages::Released { left, .. } => {
                WindowRow { backing: Backing::Base4K, resident: left, zero: Some(0), ..row }
            }
        }
    }
}
