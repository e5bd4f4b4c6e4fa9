//! khugepaged with its own defaults and knobs (Linux, admin-guide/mm/transhuge; mm/khugepaged.c): some windows each
//! wake-up, in address order, whatever their benefit.
//!
//! ```text
//!   wake ── look at pages_to_scan / 512 windows behind the cursor ── sleep scan_sleep_ms ── wake …
//!                  └ few enough of its pages missing? promote
//! ```
//!
//! With the defaults that is 16 MiB in 10 s: a gibibyte takes 10 minutes and 40 seconds. Here guest RAM has no swap
//! entries and no sharing, so `max_ptes_swap` and `max_ptes_shared` have no counterpart. khugepaged also wants one
//! referenced page, which costs it nothing to read; here accesses would have to be sampled for that.

use core::time::Duration;

use super::Policy;
use crate::action::Plan;
use crate::budget::Budget;
use crate::candidates::{is_promotable, missing};
use crate::expectations::Expectations;
use crate::outcome::{Outcome, OutcomeResult, Refusal};
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::snapshot::{Snapshot, VmSnapshot};
use crate::units::Moment;

/// Longest sleep, one day in milliseconds; a longer sleep equals the policy `never`.
pub(super) const SLEEP_MS_MAX: u64 = 24 * 3600 * 1000;

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "pages_to_scan",
        4096,
        (512, 1 << 40),
        "base pages",
        "pages scanned each wake-up, 512 a window",
    ),
    ParameterInfo::number("scan_sleep_ms", 10_000, (0, SLEEP_MS_MAX), "ms", "time between two wake-ups"),
    ParameterInfo::number(
        "alloc_sleep_ms",
        60_000,
        (0, SLEEP_MS_MAX),
        "ms",
        "time to the next wake-up if no huge page was available",
    ),
    ParameterInfo::number("max_ptes_none", 511, (0, 511), "base pages", "most pages that a promoted window may lack"),
];

/// Scans guest memory behind a cursor.
#[derive(Clone, Debug)]
pub struct Thp {
    windows_per_wake: u64,
    scan_sleep: Duration,
    alloc_sleep: Duration,
    max_missing: u16,
    wake_at: Moment,
    /// Number of windows that are left of this wake-up; 0 while it sleeps.
    left: u64,
    /// VM and row to look at next.
    cursor: (usize, usize),
    expectations: Expectations,
}

impl Thp {
    /// A scanner at the start of guest memory, awake.
    pub fn new(parameters: &Parameters) -> Thp {
        Thp {
            windows_per_wake: parameters.number("pages_to_scan") / 512,
            scan_sleep: Duration::from_millis(parameters.number("scan_sleep_ms")),
            alloc_sleep: Duration::from_millis(parameters.number("alloc_sleep_ms")),
            max_missing: parameters.number("max_ptes_none") as u16,
            wake_at: Moment::START,
            left: 0,
            cursor: (0, 0),
            expectations: Expectations::default(),
        }
    }

    fn should_promote(&self, vm: &VmSnapshot, row: usize, now: Moment) -> bool {
        is_promotable(vm, row, now) && missing(vm, row) <= self.max_missing
    }
}

/// The row at the cursor, or the first one behind it, continuing from the start at the end. `None` if there
/// are no rows.
fn settle(cursor: (usize, usize), snapshot: &Snapshot) -> Option<(usize, usize)> {
    let (vm, row) = cursor;
    if snapshot.vms.get(vm).is_some_and(|vm| row < vm.len()) {
        return Some(cursor);
    }
    let has_rows = |vm: &usize| !snapshot.vms[*vm].is_empty();
    let next = (vm + 1..snapshot.vms.len()).find(has_rows);
    next.or_else(|| (0..snapshot.vms.len()).find(has_rows)).map(|vm| (vm, 0))
}

impl Policy for Thp {
    fn name(&self) -> &'static str {
        "thp"
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        if now < self.wake_at {
            return;
        }
        let windows = snapshot.vms.iter().map(VmSnapshot::len).sum::<usize>() as u64;
        let left = if self.left == 0 { self.windows_per_wake } else { self.left };
        self.left = left.min(windows);
        while self.left > 0 {
            let Some((at, row)) = settle(self.cursor, snapshot) else {
                return;
            };
            self.cursor = (at, row);
            let vm = &snapshot.vms[at];
            if self.should_promote(vm, row, now) && self.expectations.request_huge(vm, row, budget, plan).is_break() {
                return; // It stays awake, and goes on with this window.
            }
            self.cursor = (at, row + 1);
            self.left -= 1;
        }
        self.wake_at = now + self.scan_sleep;
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        if outcome.result == OutcomeResult::Refused(Refusal::NoHugePage) {
            (self.wake_at, self.left) = (outcome.at + self.alloc_sleep, 0);
        }
    }
}
