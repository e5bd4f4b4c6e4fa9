//! The totals of a policy's actions, the same for a recorded and a simulated policy.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use super::rows_of_page;
use wideleaf_policies::account::{bloat_of_promotion, host_backing};
use wideleaf_policies::action::Action;
use wideleaf_policies::outcome::{Outcome, OutcomeResult};
use wideleaf_policies::snapshot::{Snapshot, VmId};
use wideleaf_policies::units::{Bytes, Moment, PageSize, PerTenThousand, WindowIndex};

/// Actions of a policy and their results, over all VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of actions by kind and result.
    pub actions: BTreeMap<(&'static str, &'static str), u64>,
    /// Guest memory copied, in bytes.
    pub copied: Bytes,
    /// CPU time of the actions.
    pub cpu: Duration,
    /// Memory that became resident only because the page is large, from the snapshot that the action
    /// was planned on.
    pub bloat: Bytes,
    /// Zero pages that were released, in bytes.
    pub released: Bytes,
    /// Number of refusals by the budget; a recording does not contain it for its own policy.
    pub budget_refusals: Option<u64>,
    /// `host_coverage_2m` of all VMs together: each change of the value, with its moment.
    pub coverage: Vec<(Moment, PerTenThousand)>,
    /// Coverage times time: the time for which all present memory would have to be large to reach the same.
    pub coverage_area: Duration,
    /// Time from the first snapshot to the last.
    pub length: Duration,
    /// Present memory at the last snapshot.
    pub resident_at_end: Bytes,
    observed_at: Option<Moment>,
}

impl Tally {
    /// `host_coverage_2m` at the last snapshot.
    pub fn coverage_at_end(&self) -> PerTenThousand {
        self.coverage.last().map_or(PerTenThousand::default(), |(_, share)| *share)
    }

    /// Mean of `host_coverage_2m` over time: the area divided by the length.
    pub fn coverage_mean(&self) -> PerTenThousand {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        PerTenThousand::of(milliseconds(self.coverage_area), milliseconds(self.length))
    }

    /// Number of actions of a kind with a result.
    pub fn count_of(&self, action: &str, result: &str) -> u64 {
        self.actions.iter().filter(|((a, r), _)| (*a, *r) == (action, result)).map(|(_, n)| n).sum()
    }

    pub(crate) fn observe(&mut self, at: Moment, snapshot: &Snapshot) {
        let since = at.since(self.observed_at.unwrap_or(at));
        self.length += since;
        self.coverage_area += since * self.coverage_at_end().get() / PerTenThousand::ALL.get();
        self.observed_at = Some(at);
        let (mut large, mut resident) = (Bytes::ZERO, Bytes::ZERO);
        for backing in snapshot.vms.iter().map(host_backing) {
            large += backing.huge_2m + backing.giant_1g;
            resident += backing.resident();
        }
        let coverage = PerTenThousand::of(large.get(), resident.get());
        if self.coverage.last().is_none_or(|(_, last)| *last != coverage) {
            self.coverage.push((at, coverage));
        }
        self.resident_at_end = resident;
    }

    /// Counts the outcome of an action that was planned on `seen`.
    pub(crate) fn count(&mut self, outcome: &Outcome, seen: &Snapshot) {
        *self.actions.entry((action_name(outcome.action), outcome.result.name())).or_default() += 1;
        self.copied += outcome.cost.copied;
        self.cpu += outcome.cost.cpu;
        if outcome.result != OutcomeResult::Done {
            return;
        }
        match outcome.action {
            Action::Promote { vm, window, to } => self.bloat += promotion_bloat(vm, window, to, seen),
            Action::Release { .. } => self.released += zero_pages(outcome.action, seen),
            Action::Demote { .. } | Action::Vacate { .. } | Action::Move { .. } => {}
        }
    }

    pub(crate) fn count_first_touch(&mut self, page: PageSize, resident: u16) {
        let name = match page {
            PageSize::Base4K => "first_touch_4k",
            PageSize::Huge2M | PageSize::Giant1G => {
                self.bloat += bloat_of_promotion(resident);
                "first_touch_2m"
            }
        };
        self.count_done(name);
    }

    /// Counts a window that became large in place with `resident` of its pages populated.
    pub(crate) fn count_in_place(&mut self, resident: u16) {
        self.bloat += bloat_of_promotion(resident);
        self.count_done("promote_in_place_2m");
    }

    /// Counts an event without a plan.
    pub(crate) fn count_done(&mut self, name: &'static str) {
        *self.actions.entry((name, OutcomeResult::Done.name())).or_default() += 1;
    }
}

/// The name of an action in reports.
pub const fn action_name(action: Action) -> &'static str {
    match action {
        Action::Promote { to: PageSize::Base4K, .. } => "promote_4k",
        Action::Promote { to: PageSize::Huge2M, .. } => "promote_2m",
        Action::Promote { to: PageSize::Giant1G, .. } => "promote_1g",
        Action::Demote { to: PageSize::Base4K, .. } => "demote_4k",
        Action::Demote { to: PageSize::Huge2M, .. } => "demote_2m",
        Action::Demote { to: PageSize::Giant1G, .. } => "demote_1g",
        Action::Release { .. } => "release",
        Action::Vacate { .. } => "vacate",
        Action::Move { .. } => "move",
    }
}

fn promotion_bloat(vm: VmId, window: WindowIndex, to: PageSize, seen: &Snapshot) -> Bytes {
    let Some(vm) = seen.vm(vm) else {
        return Bytes::ZERO;
    };
    rows_of_page(vm, window, to).map(|row| bloat_of_promotion(vm.resident[row])).sum()
}

fn zero_pages(action: Action, seen: &Snapshot) -> Bytes {
    let zero = seen.vm(action.vm()).and_then(|vm| vm.zero[vm.row(action.window())?]);
    PageSize::Base4K.bytes() * zero.unwrap_or(0).into()
}
