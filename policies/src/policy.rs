//! The contract of a policy, and the list of them.

use alloc::boxed::Box;

use crate::action::Plan;
use crate::budget::Budget;
use crate::outcome::Outcome;
use crate::snapshot::{Snapshot, VmId};
use crate::units::{Moment, PageSize, WindowIndex};

mod greedy;
mod never;

pub use greedy::Greedy;
pub use never::Never;

/// Decides which windows should be large. One value decides for all VMs of the host.
pub trait Policy: Send {
    /// The name it is chosen by.
    fn name(&self) -> &'static str;

    /// Appends to `plan` what should be done now. Takes from `budget` what each action is expected to cost before
    /// naming it, names only windows that are backed and whose `ready_at` has come, each at most once.
    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan);

    /// Whether [`Policy::first_touch`] should be asked. Asking costs every first touch a round trip, and a privilege
    /// the host may not have (userfaultfd): most policies leave it at `false` and plan over snapshots.
    fn decides_at_first_touch(&self) -> bool {
        false
    }

    /// With which page the first touch of an unbacked window should be answered, where
    /// [`Policy::decides_at_first_touch`]. Asked once a window, while a vCPU waits; never while the policy plans or
    /// learns. The answer is a wish: base pages are what is there if no large page is to be had.
    fn first_touch(&mut self, _vm: VmId, _window: WindowIndex) -> PageSize {
        PageSize::Base4K
    }

    /// Hears what became of an action it planned.
    fn learn(&mut self, _outcome: &Outcome) {}
}

/// One line of the list of policies.
pub struct PolicyInfo {
    /// The name to choose it by.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Makes one.
    pub make: fn() -> Box<dyn Policy>,
}

/// Every policy there is.
pub const POLICIES: &[PolicyInfo] = &[
    PolicyInfo { name: "never", summary: "base pages only: nothing is promoted", make: || Box::new(Never) },
    PolicyInfo {
        name: "greedy",
        summary: "promotes every window that has a page present to 2 MiB, as fast as the budget allows",
        make: || Box::new(Greedy::new()),
    },
];

/// The policy of that name.
pub fn by_name(name: &str) -> Option<&'static PolicyInfo> {
    POLICIES.iter().find(|policy| policy.name == name)
}
