//! Large pages from the start and no action afterwards, as with hugetlbfs (Linux, admin-guide/mm/hugetlbpage;
//! Omni/SCASH maps all shared data that way at program start). The reference for every other policy.

use super::{Policy, RamStart};
use crate::action::Plan;
use crate::budget::Budget;
use crate::snapshot::Snapshot;
use crate::units::Moment;

/// Plans no action: all is done before the guest runs, with [`RamStart::HugeAndPrefaulted`].
#[derive(Clone, Copy, Debug)]
pub struct Prealloc;

impl Policy for Prealloc {
    fn name(&self) -> &'static str {
        "prealloc"
    }

    fn ram_start(&self) -> RamStart {
        RamStart::HugeAndPrefaulted
    }

    fn promotes(&self) -> bool {
        false
    }

    fn plan(&mut self, _snapshot: &Snapshot, _now: Moment, _budget: &mut Budget, _plan: &mut Plan) {}
}
