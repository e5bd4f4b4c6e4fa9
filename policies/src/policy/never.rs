//! Base pages only: the lower bound of every comparison.

use super::Policy;
use crate::action::Plan;
use crate::budget::Budget;
use crate::snapshot::Snapshot;
use crate::units::Moment;

/// Plans no action.
#[derive(Clone, Copy, Debug)]
pub struct Never;

impl Policy for Never {
    fn name(&self) -> &'static str {
        "never"
    }

    fn promotes(&self) -> bool {
        false
    }

    fn plan(&mut self, _snapshot: &Snapshot, _now: Moment, _budget: &mut Budget, _plan: &mut Plan) {}
}
