//! The largest page that fits, at the first touch of a window and never again (Shimizu's superpages for Linux 2.6).
//! A demoted window stays demoted; nothing is collapsed or compacted.
//!
//! Windows lie entirely inside guest RAM, and the policy is asked only while no page of them is present, so a huge
//! page always fits. If no huge page is free, the window gets base pages for good.

use super::Policy;
use crate::action::Plan;
use crate::budget::Budget;
use crate::snapshot::{Snapshot, VmId};
use crate::units::{Moment, PageSize, WindowIndex};

/// Answers each first touch with a huge page; plans no action.
#[derive(Clone, Copy, Debug)]
pub struct AtFault;

impl Policy for AtFault {
    fn name(&self) -> &'static str {
        "at-fault"
    }

    fn promotes(&self) -> bool {
        false
    }

    fn plan(&mut self, _snapshot: &Snapshot, _now: Moment, _budget: &mut Budget, _plan: &mut Plan) {}

    fn decides_at_first_touch(&self) -> bool {
        true
    }

    fn first_touch(&mut self, _vm: VmId, _window: WindowIndex) -> PageSize {
        PageSize::Huge2M
    }
}
