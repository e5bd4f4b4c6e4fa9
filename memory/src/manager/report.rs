//! Counts of the loop, from its first tick to its last.
//!
//! ```text
//!   tick ─▶ outcomes, costs, failures ─▶ ManagerReport ─▶ at the end, whole
//!                                             └─ publish ─▶ Live (live.rs), tick by tick
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::{Bytes, MappingStats, Moment, OutcomeResult, VmId};

use super::attempt::{Attempt, Mechanism};
use super::fault_price::FaultPrice;
use super::managed_vm::ManagedVm;
use super::recoveries::RecoveriesByCause;
use super::sensor_cost::SensorCosts;
use crate::block_supply::SupplyReport;
use crate::first_touch::FirstTouchReport;
use crate::recorder::RecorderReport;
use crate::reserved_frames::ReservedFramesReport;
use crate::second_level::SlotId;

/// State of one VM at one tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Moment of the sample.
    pub at: Moment,
    /// Host backing of all its windows together.
    pub host: HostBacking,
    /// KVM's totals of mappings by size.
    pub mapping: Option<MappingStats>,
}

/// Second check of promotions, by KVM's own totals. They rise only when the guest touches a window again: missing
/// mappings may still come, but there can never be too many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmCheck {
    /// Large mappings (2 MiB, or 1 GiB counted as 512 of them) at the first look.
    pub large_at_first: u64,
    /// Maximum number of large mappings at any later look.
    pub large_at_most: u64,
    /// Number of looks at which KVM had more large mappings than the host had large windows that are not held. KVM
    /// maps no window larger than its backing, so such a look means that one of the two sensors is wrong. A
    /// difference of two is allowed, since the guest runs on between the two readings.
    pub contradictions: u64,
}

/// Everything that the loop counted.
#[derive(Clone, Debug)]
pub struct ManagerReport {
    /// Name of the policy at the end.
    pub policy: &'static str,
    /// Moment of each change of policy, and the new policy's name. Empty where there was one policy.
    pub policy_changes: Vec<(Moment, &'static str)>,
    /// Number of ticks.
    pub ticks: u64,
    /// Number of actions by mechanism and result.
    pub outcomes: BTreeMap<(&'static str, &'static str), u64>,
    /// Number of failures of each sensor, by name.
    pub sensor_failures: BTreeMap<&'static str, u64>,
    /// Number of requests that the budget refused.
    pub budget_refusals: u64,
    /// Guest memory copied by promotions.
    pub copied: Bytes,
    /// CPU time of the actions.
    pub action_cpu: Duration,
    /// CPU time of the whole loop, sensing and deciding included.
    pub total_cpu: Duration,
    /// Total duration of the calls that copied.
    pub copy_time: Duration,
    /// Longest time that each window (or giant) was unavailable during an action, in nanoseconds.
    ///
    /// To one per cent. It grows with what it records, up to 31 KiB: fifty guests in one daemon have one each.
    pub unavailable_ns: Arc<Histogram<u64>>,
    /// Bytes that became resident only because the page is large.
    pub bloat: Bytes,
    /// KVM's totals compared with the host's backing, by VM in the order given; `None` without a second level, and
    /// where an earlier VM has the same one.
    pub kvm_checks: Vec<Option<KvmCheck>>,
    /// Moment at which the first action was done.
    pub first_done_at: Option<Moment>,
    /// Moment at which the last action was done.
    pub last_done_at: Option<Moment>,
    /// Samples by VM in the order given; [`super::ManagerConfig::samples_kept`] each, thinned out evenly.
    pub samples: Vec<(VmId, Vec<Sample>)>,
    /// Decisions at the fault, if the policy decides there.
    pub first_touch: Option<FirstTouchReport>,
    /// Use of reserved frames, if the policy reserves some.
    pub reserved_frames: Option<ReservedFramesReport>,
    /// State of the recording, if there is one.
    pub recording: Option<RecorderReport>,
    /// Work and cost of the sensors that do not run at every tick.
    pub sensor_costs: SensorCosts,
    /// Price of a second-level fault, by VM. Only of VMs with a sensor that causes such faults.
    pub fault_prices: BTreeMap<VmId, FaultPrice>,
    /// Questions of the policy that no sensor here can answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Memslots with a dirty log that another part of the VMM had switched on; the manager does not lift such a hold.
    pub foreign_logs: BTreeSet<(VmId, SlotId)>,
    /// Panics during actions, and what is left alone since. Normally empty: each is a defect of wideleaf.
    pub panics: Vec<String>,
    /// Guest memory released to the host, in bytes.
    pub released: Bytes,
    /// Counters of the policy's own decisions; of the last policy where there were several.
    pub policy_figures: Vec<(&'static str, u64)>,
    /// Number of ticks at which a VM was paused, so that its slower sensors rested; of all VMs together.
    pub ticks_paused: u64,
    /// Recoveries by event.
    pub recoveries: RecoveriesByCause,
    /// Counters of the loop's own supply of free blocks, if it had one.
    pub supply: Option<SupplyReport>,
}

/// Maximum recorded time out of reach, in nanoseconds: after a minute the host is hung.
const UNAVAILABLE_NS_MAX: u64 = 60_000_000_000;

/// Samples kept of a VM for the report at the end of its run. More would add nothing to it.
pub(super) const SAMPLES_KEPT: usize = 2048;

/// The same for an external guest, of which a daemon looks at the latest state alone: 2048 samples of each of fifty
/// guests would be 11 MiB after some hours.
pub(super) const SAMPLES_KEPT_OUTSIDE: usize = 16;

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
            unavailable_ns: Arc::new(Histogram::new(2).expect("two digits are in its range")),
            bloat: Bytes::ZERO,
            kvm_checks: vec![None; vms.len()],
            first_done_at: None,
            last_done_at: None,
            samples: vms.iter().map(|vm| (vm.id, Vec::new())).collect(),
            first_touch: None,
            reserved_frames: None,
            recording: None,
            sensor_costs: SensorCosts::new(),
            fault_prices: BTreeMap::new(),
            unanswered: Vec::new(),
            foreign_logs: BTreeSet::new(),
            panics: Vec::new(),
            released: Bytes::ZERO,
            policy_figures: Vec::new(),
            ticks_paused: 0,
            recoveries: BTreeMap::new(),
            supply: None,
        }
    }

    pub(super) fn count(&mut self, attempt: &Attempt) {
        let Attempt { mechanism, result, at, cost, unavailable, bloat, freed, unswapped, .. } = *attempt;
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
            let unavailable_ns = u64::try_from(unavailable.as_nanos()).unwrap_or(u64::MAX).min(UNAVAILABLE_NS_MAX);
            let recorded = Arc::make_mut(&mut self.unavailable_ns).record(unavailable_ns);
            recorded.expect("it grows with what it records");
        }
    }

    /// Number of actions of a mechanism that were done.
    pub fn done(&self, mechanism: &str) -> u64 {
        self.outcomes.iter().filter(|((m, result), _)| *m == mechanism && *result == "done").map(|(_, n)| n).sum()
    }

    /// Bytes copied per second of copying time.
    pub fn copy_bytes_per_second(&self) -> Option<f64> {
        (self.copy_time > Duration::ZERO).then(|| self.copied.get() as f64 / self.copy_time.as_secs_f64())
    }
}
