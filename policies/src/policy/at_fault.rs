//! The largest page that fits, at the first touch of memory and never again (Shimizu's superpages for Linux 2.6).
//! A demoted window stays demoted; nothing is collapsed or compacted.
//!
//! ```text
//!   giant=1   the 1 GiB around the touch is untouched ──▶ one page of 1 GiB, if one is to be had
//!   giant=0, or no such page ───────────────────────────▶ one page of 2 MiB, if one is free ──▶ base pages for good
//!
//!   a page of 1 GiB ── the guest gives back whole windows of it ──▶ pages of 2 MiB, and never 1 GiB again
//! ```
//!
//! Windows lie entirely inside guest RAM, and the policy is asked only while no page of them is present, so a huge
//! page always fits. Whether a giant is untouched is seen where the fault is answered. A huge page is demoted where the
//! guest gives back a part of it ([`crate::given_back`]); only giants need a plan, because their memory is copied.

use core::ops::Range;

use super::{Policy, rows_of_giant};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::snapshot::{Backing, Snapshot, VmId, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment, PageSize, WindowIndex};

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[ParameterInfo::number(
    "giant",
    0,
    (0, 1),
    "0 or 1",
    "1: a page of 1 GiB at the first touch of an untouched giant (Shimizu: every size that the processor has)",
)];

/// Answers each first touch with a large page; plans only the demotion of giants.
#[derive(Clone, Debug)]
pub struct AtFault {
    largest: PageSize,
    expectations: Expectations,
}

impl AtFault {
    /// A policy that has not learnt any cost yet.
    pub fn new(parameters: &Parameters) -> AtFault {
        let largest = if parameters.number("giant") == 1 { PageSize::Giant1G } else { PageSize::Huge2M };
        AtFault { largest, expectations: Expectations::default() }
    }
}

/// Whether the rows are one giant page of which the guest has given back a whole window. A smaller piece stays, as it
/// does in a huge page.
fn is_given_back_in_part(vm: &VmSnapshot, mut rows: Range<usize>, now: Moment) -> bool {
    let is_giant = vm.backing[rows.start] == Backing::Giant1G;
    is_giant
        && rows.clone().all(|row| vm.ready_at[row] <= now)
        && rows.any(|row| vm.given_back[row] == BASE_PAGES_PER_WINDOW)
}

impl Policy for AtFault {
    fn name(&self) -> &'static str {
        "at-fault"
    }

    fn promotes(&self) -> bool {
        false
    }

    fn largest_page(&self) -> PageSize {
        self.largest
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        for vm in &snapshot.vms {
            let mut first = 0;
            while first < vm.len() {
                let rows = rows_of_giant(vm, first);
                first = rows.end;
                if is_given_back_in_part(vm, rows.clone(), now) {
                    let window = vm.windows[rows.start];
                    let demote = Action::Demote { vm: vm.vm, window, to: PageSize::Huge2M };
                    if self.expectations.request(demote, false, budget, plan).is_break() {
                        return; // It is requested again when the budget is full.
                    }
                }
            }
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
    }

    fn decides_at_first_touch(&self) -> bool {
        true
    }

    fn first_touch(&mut self, _vm: VmId, _window: WindowIndex) -> PageSize {
        self.largest
    }
}
