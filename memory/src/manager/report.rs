//! What the loop counts, from its first tick to its last.
//!
//! ```text
//!   tick ─▶ outcomes, costs, failures ─▶ ManagerReport ─▶ at the end, whole
//!                                             └─ publish ─▶ Live (live.rs), tick by tick
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hdrhistogram::Histogram;
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::{Bytes, MappingStats, Moment, OutcomeResult, VmId};

use super::acting::{Mechanism, Performed};
use super::managed_vm::ManagedVm;
use super::sampling::SensorCosts;
use crate::first_touch::FirstTouchReport;
use crate::recorder::RecorderReport;
use crate::reserved_frames::ReservedFramesReport;
use crate::second_level::SlotId;

/// What was seen of one VM at one tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When.
    pub at: Moment,
    /// Host backing of all its windows together.
    pub host: HostBacking,
    /// KVM's totals.
    pub mapping: Option<MappingStats>,
}

/// The second check of promotion: KVM's own totals. They rise only when the guest touches a window again, so what is
/// missing may still come; what is too much can not be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmCheck {
    /// Large mappings (2 MiB, or 1 GiB as 512 of them) at the first look.
    pub large_at_first: u64,
    /// The most there were at any later look.
    pub large_at_most: u64,
    /// Looks at which KVM had more large mappings than the host had large windows that are not held. KVM maps no
    /// window larger than its backing: such a look means that one of the two sensors is wrong. A difference of
    /// two is allowed, since the guest runs on between the two readings.
    pub contradictions: u64,
}

/// Everything the loop counted.
#[derive(Clone, Debug)]
pub struct ManagerReport {
    /// The policy's name, at the end.
    pub policy: &'static str,
    /// When another took over, and its name. Empty where there was one policy.
    pub policy_changes: Vec<(Moment, &'static str)>,
    /// Ticks.
    pub ticks: u64,
    /// Actions by mechanism and result.
    pub outcomes: BTreeMap<(&'static str, &'static str), u64>,
    /// Sensors that failed, by name.
    pub sensor_failures: BTreeMap<&'static str, u64>,
    /// Times the budget said no.
    pub budget_refusals: u64,
    /// Guest memory copied by promotions.
    pub copied: Bytes,
    /// CPU time of the actions.
    pub action_cpu: Duration,
    /// CPU time of the whole loop, sensing and deciding included.
    pub total_cpu: Duration,
    /// Time of the calls that copied.
    pub copy_time: Duration,
    /// How long each acted-on window (or giant) was unavailable at most, in nanoseconds.
    pub unavailable_ns: Histogram<u64>,
    /// Became resident only because the page is large.
    pub bloat: Bytes,
    /// KVM's totals against the host's backing, by VM in the order given; `None` without a second level, and where another VM before
    /// has the same one.
    pub kvm_checks: Vec<Option<KvmCheck>>,
    /// When the first action was done.
    pub first_done_at: Option<Moment>,
    /// When the last action was done.
    pub last_done_at: Option<Moment>,
    /// What was seen, by VM in the order given; at most [`SAMPLES_KEPT`] each, thinned out evenly.
    pub samples: Vec<(VmId, Vec<Sample>)>,
    /// What was decided at the fault, if the policy decides there.
    pub first_touch: Option<FirstTouchReport>,
    /// What was done with reserved frames, if the policy reserves some.
    pub reserved_frames: Option<ReservedFramesReport>,
    /// What became of the recording, if there is one.
    pub recording: Option<RecorderReport>,
    /// What the sensors that are not asked at every tick did, and what that cost.
    pub sensor_costs: SensorCosts,
    /// Questions of the policy that nothing here can answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Memslots whose dirty log somebody else had switched on at some tick: such a hold is not lifted.
    pub logs_of_others: BTreeSet<(VmId, SlotId)>,
    /// What panicked while it acted, and what is left alone since. None is the rule: each is a mistake of ours.
    pub panics: Vec<String>,
    /// Memory the host got back.
    pub released: Bytes,
    /// What the policy counted of its own decisions, the last one where there were several.
    pub policy_figures: Vec<(&'static str, u64)>,
    /// Ticks at which a VM was left alone, by the reason's name.
    pub ticks_left_alone: BTreeMap<&'static str, u64>,
}

/// A window that was out of reach for longer is counted as this long: a minute is a hung host.
pub(super) const UNAVAILABLE_NS_MAX: u64 = 60_000_000_000;

/// More samples than this say nothing more in a report; when reached, every second one is dropped.
pub const SAMPLES_KEPT: usize = 2048;

impl ManagerReport {
    pub(super) fn new(policy: &'static str, vms: &[ManagedVm]) -> ManagerReport {
        ManagerReport {
            policy,
            policy_changes: Vec::new(),
            ticks: 0,
            outcomes: BTreeMap::new(),
            sensor_failures: BTreeMap::new(),
            budget_refusals: 0,
            copied: Bytes::ZERO,
            action_cpu: Duration::ZERO,
            total_cpu: Duration::ZERO,
            copy_time: Duration::ZERO,
            unavailable_ns: Histogram::new_with_bounds(1, UNAVAILABLE_NS_MAX, 3).expect("the bounds are literals"),
            bloat: Bytes::ZERO,
            kvm_checks: vec![None; vms.len()],
            first_done_at: None,
            last_done_at: None,
            samples: vms.iter().map(|vm| (vm.id, Vec::new())).collect(),
            first_touch: None,
            reserved_frames: None,
            recording: None,
            sensor_costs: SensorCosts::new(),
            unanswered: Vec::new(),
            logs_of_others: BTreeSet::new(),
            panics: Vec::new(),
            released: Bytes::ZERO,
            policy_figures: Vec::new(),
            ticks_left_alone: BTreeMap::new(),
        }
    }

    pub(super) fn count(&mut self, performed: &Performed) {
        let Performed { mechanism, result, at, cost, unavailable, bloat, freed, unswapped } = *performed;
        *self.outcomes.entry((mechanism.name(), result.name())).or_default() += 1;
        if let Some(unswapped) = unswapped {
            *self.outcomes.entry((Mechanism::Swap.name(), unswapped.name())).or_default() += 1;
        }
        self.action_cpu += cost.cpu;
        self.copied += cost.copied;
        self.bloat += bloat;
        self.released += freed;
        if result != OutcomeResult::Done {
            return;
        }
        self.first_done_at.get_or_insert(at);
        self.last_done_at = Some(at);
        if cost.copied > Bytes::ZERO {
            self.copy_time += unavailable;
        }
        if unavailable > Duration::ZERO {
            self.unavailable_ns.saturating_record(u64::try_from(unavailable.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// How many actions of a mechanism were done.
    pub fn done(&self, mechanism: &str) -> u64 {
        self.outcomes.iter().filter(|((m, result), _)| *m == mechanism && *result == "done").map(|(_, n)| n).sum()
    }

    /// Bytes copied per second of the time the copying took.
    pub fn copy_bytes_per_second(&self) -> Option<f64> {
        (self.copy_time > Duration::ZERO).then(|| self.copied.get() as f64 / self.copy_time.as_secs_f64())
    }
}
