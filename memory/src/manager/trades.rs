//! Brings each promotion together with the window that is vacated for it.
//!
//! ```text
//!   plan    vacate a ─ promote x ─ vacate b ─ vacate c ─ promote y ─ promote z ─ promote w
//!   units   [a, x]     [b, y]      [c, z]     [w]              a unit is the work of one thread
//! ```
//!
//! A thread that copies has ready pages of its own, so the huge page that a window leaves is used at once by the thread
//! that has it, and no thread collects more of them than it has slots. A promotion gets the window of its own VM that
//! was vacated first: pages are moved within the RAM of one VM. What is vacated and wanted by no later promotion of
//! the plan is a unit of its own, and its page goes back to the host. A window that moves to another node gets a
//! page of that node, and none of these.

use std::collections::{BTreeMap, VecDeque};

use wideleaf_policies::VmId;

use super::attempt::Attempt;

/// Actions for one thread, in their order.
pub(super) type Unit = Vec<Attempt>;

/// The copies of a plan as units, in the order of the plan's promotions.
pub(super) fn units(copies: Vec<Attempt>) -> Vec<Unit> {
    let mut vacated: BTreeMap<VmId, VecDeque<Attempt>> = BTreeMap::new();
    let mut units = Vec::with_capacity(copies.len());
    for copy in copies {
        let of_vm = vacated.entry(copy.planned.action.vm()).or_default();
        if copy.is_vacate() {
            of_vm.push_back(copy);
        } else if copy.needs_huge_page() {
            units.push(of_vm.pop_front().into_iter().chain([copy]).collect());
        } else {
            units.push(vec![copy]);
        }
    }
    let for_others = vacated.into_values().flatten().map(|vacate| Attempt { is_for_others: true, ..vacate });
    units.extend(for_others.map(|vacate| vec![vacate]));
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::attempt::Target;
    use wideleaf_policies::window::WindowState;
    use wideleaf_policies::{Action, Cost, Moment, NodeId, PageSize, PlannedAction, WindowIndex};

    fn vacate(vm: u32, window: u64) -> Action {
        Action::Vacate { vm: VmId(vm), window: WindowIndex::new(window) }
    }

    fn promote(vm: u32, window: u64) -> Action {
        Action::Promote { vm: VmId(vm), window: WindowIndex::new(window), to: PageSize::Huge2M }
    }

    /// Units of a plan, by action.
    fn planned(plan: &[Action]) -> Vec<Vec<Action>> {
        let target = Target { vm: 0, row: 0, state: WindowState::Ready, is_held: false };
        let requested = |(position, action): (usize, &Action)| {
            let planned = PlannedAction { action: *action, cost: Cost::default(), node: None };
            let requested = Attempt::requested(planned, position, Moment::START);
            Attempt { target: Some(target), ..requested }
        };
        let units = units(plan.iter().enumerate().map(requested).collect());
        units.into_iter().map(|unit| unit.into_iter().map(|attempt| attempt.planned.action).collect()).collect()
    }

    #[test]
    fn each_promotion_comes_right_behind_the_window_that_was_vacated_for_it() {
        let before = [vacate(0, 1), promote(0, 2), vacate(0, 3), vacate(0, 4)];
        let plan = [before, [promote(0, 5), promote(0, 6), promote(0, 7), promote(0, 8)]];
        let trades = [
            vec![vacate(0, 1), promote(0, 2)],
            vec![vacate(0, 3), promote(0, 5)],
            vec![vacate(0, 4), promote(0, 6)],
            vec![promote(0, 7)],
            vec![promote(0, 8)],
        ];
        assert_eq!(planned(plan.as_flattened()), trades);
    }

    #[test]
    fn a_promotion_gets_no_page_of_another_vm_or_of_a_window_that_is_vacated_later() {
        let plan = [promote(0, 1), vacate(0, 2), promote(1, 3), vacate(1, 4)];
        assert_eq!(planned(&plan), [[promote(0, 1)], [promote(1, 3)], [vacate(0, 2)], [vacate(1, 4)]]);
    }

    #[test]
    fn a_window_that_moves_to_another_node_takes_no_page_of_one_that_is_vacated() {
        let home = Action::Move { vm: VmId(0), window: WindowIndex::new(2), node: NodeId(1) };
        assert_eq!(planned(&[vacate(0, 1), home]), [[home], [vacate(0, 1)]]);
        assert_eq!(planned(&[vacate(0, 1), home, promote(0, 3)]), [vec![home], vec![vacate(0, 1), promote(0, 3)]]);
    }
}
