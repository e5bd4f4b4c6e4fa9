//! Promotes where the guest's own page is large, because a larger TLB entry needs both pages to be large (Gemini,
//! EuroSys '23; its guest half, booking and buckets, has no counterpart in the host).
//!
//! ```text
//!   guest      2M, 1G        mixed, unknown        4K           nothing
//!   host 4K    first         then                  last         left alone
//!   host 2M    well-aligned                        misaligned: split first when the host is short
//! ```
//!
//! A split that held a whole memslot at 4 KiB is taken back, and is the last of its VM.

use core::ops::ControlFlow;

use super::{Needs, Policy};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::{Turns, is_demotable, is_promotable};
use crate::demotions::Demotions;
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::rank::Ranking;
use crate::snapshot::{GuestMapping, Snapshot};
use crate::units::{Moment, PageSize};
use crate::watermark::Watermark;

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "populated_min",
        256,
        (1, 512),
        "base pages",
        "minimum of present pages for a promotion (Gemini completes regions from 256)",
    ),
    ParameterInfo::number(
        "misaligned",
        1,
        (0, 1),
        "0 or 1",
        "windows that the guest maps with base pages: 0 never promotes them, 1 promotes them last (Gemini)",
    ),
    ParameterInfo::number(
        "split_from",
        85,
        (1, 100),
        "% of host memory",
        "memory use from which on misaligned huge pages are split",
    ),
    ParameterInfo::number(
        "split_to",
        70,
        (0, 100),
        "% of host memory",
        "memory use below which splitting stops (both marks are HawkEye's)",
    ),
];

/// Decides by the page size of the guest's mapping.
#[derive(Clone, Debug)]
pub struct Aligned {
    populated_min: u16,
    promotes_misaligned: bool,
    shortage: Watermark,
    expectations: Expectations,
    demotions: Demotions,
    turns: Turns,
    ranking: Ranking,
}

impl Aligned {
    /// A policy that has seen no shortage.
    pub fn new(parameters: &Parameters) -> Aligned {
        Aligned {
            populated_min: parameters.number("populated_min") as u16,
            promotes_misaligned: parameters.number("misaligned") == 1,
            shortage: Watermark::of_percent(parameters.number("split_from"), parameters.number("split_to")),
            expectations: Expectations::default(),
            demotions: Demotions::default(),
            turns: Turns::default(),
            ranking: Ranking::default(),
        }
    }

    fn promote(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let (populated_min, promotes_misaligned) = (self.populated_min, self.promotes_misaligned);
        let (ranking, demotions) = (&mut self.ranking, &self.demotions);
        ranking.clear();
        self.turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let is_taken_back = vm.is_held[row] && demotions.held(vm) == Some(row);
            if vm.resident[row] >= populated_min && is_promotable(vm, row, now) && !is_taken_back {
                match rank(vm.guest_mapping[row]) {
                    Some(MISALIGNED) if !promotes_misaligned => {}
                    Some(bucket) => ranking.push(bucket, place),
                    None => {}
                }
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

    fn split_misaligned(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let Aligned { expectations, demotions, turns, .. } = self;
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let is_misaligned = rank(vm.guest_mapping[row]) == Some(MISALIGNED);
            if !is_misaligned || !is_demotable(vm, row, now) || !demotions.may_demote(vm) {
                return ControlFlow::Continue(());
            }
            let demote = Action::Demote { vm: vm.vm, window: vm.windows[row], to: PageSize::Base4K };
            expectations.request(demote, false, budget, plan)?;
            demotions.planned(vm, row);
            ControlFlow::Continue(())
        });
    }
}

/// Rank of windows that the guest maps with base pages.
const MISALIGNED: u16 = 0;

fn rank(guest: GuestMapping) -> Option<u16> {
    match guest {
        GuestMapping::Unmapped => None,
        GuestMapping::Base4K => Some(MISALIGNED),
        GuestMapping::Unknown => Some(1),
        GuestMapping::Mixed => Some(2),
        GuestMapping::Huge2M | GuestMapping::Giant1G => Some(3),
    }
}

impl Policy for Aligned {
    fn name(&self) -> &'static str {
        "aligned"
    }

    fn needs(&self) -> Needs {
        Needs { guest_mapping: true, host_memory: true, ..Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.demotions.observe(snapshot);
        let is_short = self.shortage.update(snapshot.host);
        if self.demotions.take_back(snapshot, now, &self.expectations, budget, plan).is_break() {
            return;
        }
        if is_short {
            self.split_misaligned(snapshot, now, budget, plan);
        } else {
            self.promote(snapshot, now, budget, plan);
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        self.demotions.learn(outcome);
    }
}
