//! Promotes by access coverage, the most used windows first, and takes bloat back when the host gets short of
//! memory (HawkEye, ASPLOS '19).
//!
//! ```text
//!   bucket   0     1     2   …    9        accessed base pages: 0–49, 50–99, …, 450–512
//!            └ never ┘   ◀── promoted from here down ──┘      VMs in turn within a bucket
//!   host memory used ≥ 85 %: no promotion; zero pages of huge pages go back, idlest VM first, until it is < 70 %
//! ```
//!
//! HawkEye counts accessed bits of base pages once in 30 s. The sensors here sample more often whether a window was
//! touched, and sometimes count its written pages: accessed = max(present × share of samples with an access,
//! written). Without samples, present pages count as accessed. HawkEye recovers from the process with the least
//! time in walks; without that counter, this policy uses the VM with the smallest share of touched windows.

use core::ops::ControlFlow;

use alloc::vec::Vec;

use super::{Needs, Policy};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::{Turns, is_demotable, is_promotable};
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::rank::Ranking;
use crate::snapshot::{Snapshot, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment};
use crate::watermark::Watermark;

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "lowest_bucket",
        1,
        (0, 9),
        "bucket of 50 base pages",
        "lowest bucket that is promoted (ours; HawkEye promotes all)",
    ),
    ParameterInfo::number(
        "recover_from",
        85,
        (1, 100),
        "% of host memory",
        "memory use from which on bloat is taken back (HawkEye)",
    ),
    ParameterInfo::number(
        "recover_to",
        70,
        (0, 100),
        "% of host memory",
        "memory use below which taking back stops (HawkEye)",
    ),
    ParameterInfo::number(
        "zero_pages_min",
        256,
        (1, 512),
        "base pages",
        "minimum of zero pages that makes a huge page bloat (ours: half)",
    ),
];

/// Number of base pages in a bucket; the last of the ten has 62.
const PAGES_PER_BUCKET: u16 = 50;
const BUCKET_LAST: u16 = 9;

/// Decides by buckets of accessed pages.
#[derive(Clone, Debug)]
pub struct Coverage {
    lowest_bucket: u16,
    zero_pages_min: u16,
    shortage: Watermark,
    expectations: Expectations,
    turns: Turns,
    ranking: Ranking,
    idlest_first: Vec<(u64, usize)>,
}

impl Coverage {
    /// A policy that has seen no shortage.
    pub fn new(parameters: &Parameters) -> Coverage {
        Coverage {
            lowest_bucket: parameters.number("lowest_bucket") as u16,
            zero_pages_min: parameters.number("zero_pages_min") as u16,
            shortage: Watermark::of_percent(parameters.number("recover_from"), parameters.number("recover_to")),
            expectations: Expectations::default(),
            turns: Turns::default(),
            ranking: Ranking::default(),
            idlest_first: Vec::new(),
        }
    }

    fn promote(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let (lowest, ranking) = (self.lowest_bucket, &mut self.ranking);
        ranking.clear();
        self.turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let bucket = (accessed(vm, row) / PAGES_PER_BUCKET).min(BUCKET_LAST);
            if bucket >= lowest && is_promotable(vm, row, now) {
                ranking.push(bucket, place);
            }
            ControlFlow::Continue(())
        });
        for place in self.ranking.best_first() {
            let (vm, row) = place.of(snapshot);
            if self.expectations.request_huge(vm, row, budget, plan).is_break() {
                return;
            }
        }
    }

    fn recover(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.idlest_first.clear();
        self.idlest_first.extend(snapshot.vms.iter().enumerate().map(|(index, vm)| (touched_windows(vm), index)));
        self.idlest_first.sort_unstable();
        for (_, index) in &self.idlest_first {
            let vm = &snapshot.vms[*index];
            for row in 0..vm.len() {
                let is_bloat = vm.zero[row].is_some_and(|zero| zero >= self.zero_pages_min);
                if !is_bloat || !is_demotable(vm, row, now) {
                    continue;
                }
                let release = Action::Release { vm: vm.vm, window: vm.windows[row] };
                if self.expectations.request(release, false, budget, plan).is_break() {
                    return;
                }
            }
        }
    }
}

/// Number of a window's base pages in use, according to the sensors.
fn accessed(vm: &VmSnapshot, row: usize) -> u16 {
    let present = vm.resident[row];
    let touched = match vm.access[row].rate() {
        None => present,
        Some(rate) => (u32::from(present) * rate.get() / 10_000) as u16,
    };
    touched.max(vm.written[row].unwrap_or(0)).min(BASE_PAGES_PER_WINDOW)
}

/// Touched windows per ten thousand of the VM's windows.
fn touched_windows(vm: &VmSnapshot) -> u64 {
    let touched = vm.access.iter().filter(|access| access.was_touched() == Some(true)).count() as u64;
    touched * 10_000 / (vm.len() as u64).max(1)
}

impl Policy for Coverage {
    fn name(&self) -> &'static str {
        "coverage"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, zero: true, host_memory: true, ..Needs::default() }
    }

    fn uses_zero(&self) -> bool {
        self.shortage.is_near()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        if self.shortage.update(snapshot.host) {
            self.recover(snapshot, now, budget, plan);
        } else {
            self.promote(snapshot, now, budget, plan);
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
    }
}
