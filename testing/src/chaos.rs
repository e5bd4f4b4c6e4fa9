//! A policy for tests that asks for random actions on random windows, with every sensor enabled. It keeps no budget
//! and expects nothing.

use wideleaf_memory::testing::fault_injection::RandomNumbers;
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::{Action, Budget, Cost, Moment, NodeId, PageSize, Plan, Snapshot, VmId, WindowIndex};

/// A seeded random policy.
#[derive(Clone, Debug)]
pub struct Chaos {
    random: RandomNumbers,
}

impl Chaos {
    /// Creates a policy. The same seed plans the same actions for the same snapshots.
    pub fn new(seed: u64) -> Chaos {
        Chaos { random: RandomNumbers::new(seed) }
    }

    /// The action for one window, if any.
    fn action(&mut self, vm: VmId, window: WindowIndex) -> Option<Action> {
        match self.random.below(6) {
            0 => Some(Action::Promote { vm, window, to: PageSize::Huge2M }),
            1 => Some(Action::Demote { vm, window, to: PageSize::Base4K }),
            2 => Some(Action::Release { vm, window }),
            3 => Some(Action::Vacate { vm, window }),
            4 => Some(Action::Move { vm, window, node: NodeId(0) }),
            _ => None,
        }
    }
}

impl Policy for Chaos {
    fn name(&self) -> &'static str {
        "chaos"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, zero: true, written: true, guest_mapping: true, host_memory: true, progress: true }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, _: &mut Budget, plan: &mut Plan) {
        for vm in &snapshot.vms {
            for row in (0..vm.len()).filter(|row| vm.ready_at[*row] <= now && vm.resident[*row] > 0) {
                if let Some(action) = self.action(vm.vm, vm.windows[row]).filter(|_| !plan.is_full()) {
                    plan.push(action, Cost::default());
                }
            }
        }
    }
}
