//! What the loop knows of a VM from the start: its RAM, the RAM's ranges and backing, and its sources of data.
//!
//! ```text
//!   ours      GuestRam ────────────▶ ManagedVm ──▶ ManagerLoop
//!   external  ranges, backing ─────▶    ▲
//!                 second level, gate, tables, what is barred
//! ```

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::geometry::is_congruent;
use wideleaf_policies::policy::Needs;
use wideleaf_policies::recording::VmHeader;
use wideleaf_policies::{AccessHistory, NodeSet, PageSize, PerTenThousand, VmId, WindowIndex};

use super::recoveries::SharedRecovery;
use crate::backing::{BackingConfig, BackingKind};
use crate::explain::{Barred, CannotBeHuge};
use crate::gate::{Gate, KeptHoles};
use crate::progress::ProgressReadings;
use crate::region::{GuestRam, RamRange};
use crate::second_level::SecondLevel;
use crate::sensors::guest_tables::TableSource;
use crate::sensors::kernel_flags::MergedPages;
use crate::sensors::outside_heat::HeatSource;

/// Samples of the accesses to a window, taken by another process before the guest continued in this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessesBefore {
    /// Window that was sampled.
    pub window: WindowIndex,
    /// What the samples found.
    pub history: AccessHistory,
    /// Age of the newest sample.
    pub age: Duration,
}

/// One VM under the manager, or one native kernel (which has no second level).
pub struct ManagedVm {
    /// Identifier that the policy sees.
    pub id: VmId,
    /// Ranges of its RAM.
    pub ranges: Vec<RamRange>,
    /// Kind of memory behind its RAM.
    pub backing: BackingConfig,
    /// KVM's side of the VM; `None` for a native kernel.
    pub second_level: Option<Arc<dyn SecondLevel>>,
    /// RAM mapped in this process, kept mapped while the manager may act on it; tests on a fake host have none.
    pub ram: Option<Arc<GuestRam>>,
    /// Gate that says whether the VM may be acted on now; `None`: always.
    pub gate: Option<Arc<dyn Gate>>,
    /// Whether shared memory of another process may be collapsed. The kernel unmaps it page by page, so that the whole
    /// guest stops for 15 to 30 ms for each window; a guest at work stops for at most a hundredth of its time.
    pub may_collapse_shared: bool,
    /// Parts of its RAM that can never be huge. Ranges that are not congruent are found without this list.
    pub barred: Vec<Barred>,
    /// Finds pages that KSM has merged: windows with such pages stay as they are. `None`: promotion may
    /// undo the merging.
    pub merged: Option<MergedPages>,
    /// Reads the guest's own tables where another process has the RAM; `None`: read here, from
    /// `ram` and `second_level`.
    pub guest_tables: Option<Arc<dyn TableSource>>,
    /// Recoveries after events that the gate sees; `None`: the policy alone brings back what was large.
    pub recovery: Option<SharedRecovery>,
    /// Reads which windows are used where another process has the RAM; `None`: sampled here, in `ram`.
    pub heat: Option<Arc<dyn HeatSource>>,
    /// Readings of the guest's own count of its work; `None`: nothing here hears of it.
    pub progress: Option<Arc<ProgressReadings>>,
    /// Samples of accesses that another process took of this guest, which continues here; empty for one that begins.
    /// Their ages count from [`Moment::START`](wideleaf_policies::Moment::START).
    pub accesses_before: Vec<AccessesBefore>,
    /// Share of its present memory that has to stay on large pages, which policies give to no other VM; zero: none.
    pub guarantee: PerTenThousand,
    /// NUMA nodes to which the policy of its memory binds it (mbind(2)); `None`: not bound, or not known.
    pub bound_to: Option<NodeSet>,
    /// Whether the placement of its RAM says where each window lies, so that no policy has a say in it.
    pub fixes_nodes: bool,
}

impl ManagedVm {
    /// A VM of this VMM with the RAM `ram`.
    pub fn new(id: VmId, ram: Arc<GuestRam>, second_level: Option<Arc<dyn SecondLevel>>) -> ManagedVm {
        let (ranges, backing) = (ram.ranges().to_vec(), ram.backing());
        ManagedVm {
            bound_to: ram.placement().bound_to(),
            fixes_nodes: ram.placement().fixes_nodes(),
            ram: Some(ram),
            may_collapse_shared: true,
            ..ManagedVm::external(id, ranges, backing, second_level)
        }
    }

    /// A VM with RAM that another process has mapped at `ranges` (ascending guest-physical addresses), for a loop over
    /// that process's [`ProcessHost`](crate::host::process::ProcessHost). Shared memory is not collapsed, and the
    /// VM has no gate, unless the fields say so.
    ///
    /// KVM's totals cover a whole VM. A VM with RAM of several kinds is several of these with one `second_level`;
    /// its counts are compared with all of them together.
    pub fn external(
        id: VmId,
        ranges: Vec<RamRange>,
        backing: BackingConfig,
        second_level: Option<Arc<dyn SecondLevel>>,
    ) -> ManagedVm {
        ManagedVm {
            id,
            ranges,
            backing,
            second_level,
            ram: None,
            gate: None,
            may_collapse_shared: false,
            barred: Vec::new(),
            merged: None,
            guest_tables: None,
            recovery: None,
            heat: None,
            progress: None,
            accesses_before: Vec::new(),
            guarantee: PerTenThousand::new(0),
            bound_to: None,
            fixes_nodes: false,
        }
    }

    /// Description of the VM in a recording.
    pub(super) fn recorded_header(&self) -> VmHeader {
        VmHeader {
            vm: self.id,
            backing: self.backing.kind().name().to_owned(),
            start_page: self.backing.start_page(),
            ranges: self.ranges.iter().map(|range| range.gpa).collect(),
        }
    }

    /// Line for the report, if a policy with these needs cannot measure what its promotions gain.
    pub(super) fn why_gains_are_assumed(&self, needs: Needs) -> Option<String> {
        let is_unknown = needs.progress && self.progress.is_none();
        let why = "nothing here hears of the guest's progress, so that its misses are assumed";
        is_unknown.then(|| format!("{}: what a promotion gains: {why}", self.id))
    }

    /// Whether the guest stands still, as far as its gate or its second level knows.
    pub(super) fn is_paused(&self) -> bool {
        let by_gate = self.gate.as_ref().is_some_and(|gate| gate.is_paused());
        by_gate || self.second_level.as_ref().is_some_and(|kvm| kvm.is_paused())
    }

    /// Why pages that are absent from a window in use must stay absent.
    pub(super) fn keeps_holes(&self) -> Option<KeptHoles> {
        self.gate.as_ref()?.keeps_holes()
    }

    /// Whether a program provides or observes pages of its RAM (`userfaultfd(2)`), according to the gate.
    pub(super) fn is_watched(&self) -> bool {
        self.keeps_holes() == Some(KeptHoles::Watched)
    }

    /// Whether the RAM is of a kind that must not be collapsed while it is watched.
    pub(super) fn is_shared(&self) -> bool {
        self.backing.kind() != BackingKind::Anon
    }

    /// Whether the gate permits splits at this moment.
    pub(super) fn may_split(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.may_split())
    }

    /// Whether the whole guest stops while a window is collapsed: shared memory that this process cannot unmap before.
    pub(super) fn stalls_in_collapses(&self) -> bool {
        self.backing.kind() == BackingKind::Memfd && self.ram.is_none()
    }

    /// Reason why a window can never be huge, by window. Empty where all windows can.
    pub(super) fn barred_windows(&self) -> Vec<Option<CannotBeHuge>> {
        let is_shared = self.backing.kind() == BackingKind::Memfd && !self.may_collapse_shared;
        let of_range = |range: &RamRange| {
            let is_congruent = is_congruent(range.gpa.start(), range.hva, PageSize::Huge2M);
            let shared = is_shared.then_some(CannotBeHuge::SharedStalls);
            if is_congruent { shared } else { Some(CannotBeHuge::Misaligned) }
        };
        let of_window = |window: WindowIndex| {
            let barred = self.barred.iter().find(|barred| barred.range.contains(window.start()));
            barred.map(|barred| barred.why)
        };
        let windows = |range: &RamRange| {
            let of_range = of_range(range);
            range.gpa.windows().map(move |window| of_window(window).or(of_range))
        };
        let barred: Vec<_> = self.ranges.iter().flat_map(windows).collect();
        if barred.iter().any(Option::is_some) { barred } else { Vec::new() }
    }
}
