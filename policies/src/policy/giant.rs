//! 1 GiB pages where the host has them, then 2 MiB pages, then base pages (Trident, MICRO '21).
//!
//! ```text
//!   giant 0 [ 512 windows of guest RAM, enough present, a 1 GiB page free ] ─▶ one giant page
//!   giant 1 [ no 1 GiB page free, or it refused and backs off              ] ─▶ its windows, one by one, to 2 MiB
//! ```
//!
//! A huge window may become part of a giant later, so 2 MiB is a step on the way. One giant costs more than a burst
//! of the default budget, so it is borrowed and paid back, and then a plan names at most one. Trident scans a fixed
//! amount each wake-up; here the budget sets the pace.

use super::{Needs, Policy, WINDOWS_PER_GIANT, rows_of_giant};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::{is_promotable, missing};
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::snapshot::{Backing, Snapshot, VmSnapshot};
use crate::units::{Moment, PageSize};

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "max_none_1g",
        262_143,
        (0, 262_143),
        "base pages",
        "most pages that a promoted giant may lack (Trident: 262143, one present page is enough)",
    ),
    ParameterInfo::number(
        "max_none_2m",
        511,
        (0, 511),
        "base pages",
        "most pages that a promoted window may lack (Linux: 511)",
    ),
];

const BASE_PAGES_PER_GIANT: u32 = 262_144;

/// Promotes giants first.
#[derive(Clone, Debug)]
pub struct Giant {
    missing_max_1g: u32,
    missing_max_2m: u16,
    expectations: Expectations,
}

impl Giant {
    /// A policy that has not learnt any cost yet.
    pub fn new(parameters: &Parameters) -> Giant {
        Giant {
            missing_max_1g: parameters.number("max_none_1g") as u32,
            missing_max_2m: parameters.number("max_none_2m") as u16,
            expectations: Expectations::default(),
        }
    }

    /// Whether the rows of one giant may become one page.
    fn may_be_giant(&self, vm: &VmSnapshot, rows: core::ops::Range<usize>, now: Moment) -> bool {
        let is_whole = rows.len() == WINDOWS_PER_GIANT;
        let is_giant = vm.backing[rows.start] == Backing::Giant1G;
        // Check every row: another actor may be working on a part of the giant (a log, an action that backs off).
        if !is_whole || is_giant || vm.ready_at[rows.clone()].iter().any(|ready_at| *ready_at > now) {
            return false;
        }
        if rows.clone().any(|row| vm.is_given_back(row)) {
            return false;
        }
        let present: u32 = vm.resident[rows].iter().map(|resident| u32::from(*resident)).sum();
        BASE_PAGES_PER_GIANT - present <= self.missing_max_1g
    }
}

impl Policy for Giant {
    fn name(&self) -> &'static str {
        "giant"
    }

    fn needs(&self) -> Needs {
        Needs { host_memory: true, ..Needs::default() }
    }

    fn largest_page(&self) -> PageSize {
        PageSize::Giant1G
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let mut giants_free = snapshot.host.map_or(0, |host| host.giant_pages_free);
        for vm in &snapshot.vms {
            let mut first = 0;
            while first < vm.len() {
                let rows = rows_of_giant(vm, first);
                first = rows.end;
                if giants_free > 0 && self.may_be_giant(vm, rows.clone(), now) {
                    let window = vm.windows[rows.start];
                    let promote = Action::Promote { vm: vm.vm, window, to: PageSize::Giant1G };
                    if self.expectations.request(promote, false, budget, plan).is_break() {
                        return; // It is requested again when the budget is full.
                    }
                    giants_free -= 1;
                    continue;
                }
                for row in rows {
                    if missing(vm, row) > self.missing_max_2m || !is_promotable(vm, row, now) {
                        continue;
                    }
                    if self.expectations.request_huge(vm, row, budget, plan).is_break() {
                        return;
                    }
                }
            }
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
    }
}
