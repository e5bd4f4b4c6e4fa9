//! Whether a host could do an action that no recording contains, and its cost. All simulated hosts share this.

use super::costs::Costs;
use super::{WINDOWS_PER_GIANT, rows_of_page};
use wideleaf_policies::action::Action;
use wideleaf_policies::budget::Cost;
use wideleaf_policies::outcome::{OutcomeResult, Refusal, Skip};
use wideleaf_policies::snapshot::{Backing, Snapshot, VmSnapshot, WindowRow};
use wideleaf_policies::units::{PageSize, WindowIndex};
use wideleaf_policies::window_node::WindowNode;

/// Kind of guest RAM, as far as it limits the actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ram {
    /// Pages of the hugetlb pool, which no mechanism promotes.
    OfPool,
    /// Anonymous RAM, which is demoted by splitting a window, and of which windows can be vacated.
    Anonymous,
    /// All other RAM, which is demoted by holding it at 4 KiB.
    Other,
}

/// The result of an action on the window of `row`, planned on `seen`, and its cost.
pub(crate) fn feasible(
    action: Action,
    ram: Ram,
    vm: &VmSnapshot,
    row: WindowRow,
    seen: &Snapshot,
    costs: &Costs,
) -> (OutcomeResult, Cost) {
    let no = |result| (result, Cost::default());
    let no_mechanism = OutcomeResult::Skipped(Skip::NoMechanism);
    let already_done = OutcomeResult::Skipped(Skip::AlreadyDone);
    match action {
        Action::Promote { to: PageSize::Huge2M, .. } if row.is_held => (OutcomeResult::Done, costs.recover),
        Action::Promote { .. } | Action::Release { .. } if ram == Ram::OfPool => no(no_mechanism),
        Action::Promote { .. } | Action::Release { .. } if row.backing == Backing::Unbacked => {
            no(OutcomeResult::Skipped(Skip::NotResident))
        }
        Action::Promote { to: PageSize::Huge2M, .. } if row.backing.is_large() => no(already_done),
        Action::Promote { to: PageSize::Huge2M, .. } if row.given_back > vm.given_back_tolerated => {
            no(OutcomeResult::Skipped(Skip::GivenBack))
        }
        Action::Promote { to: PageSize::Huge2M, .. } => (OutcomeResult::Done, costs.promote_2m),
        Action::Promote { to: PageSize::Giant1G, .. } if row.backing == Backing::Giant1G => no(already_done),
        Action::Promote { to: PageSize::Giant1G, window, .. } => match giant_refusal(vm, window, seen) {
            Some(refusal) => no(OutcomeResult::Refused(refusal)),
            None => (OutcomeResult::Done, costs.promote_1g),
        },
        Action::Demote { to: PageSize::Base4K, .. } if ram == Ram::Anonymous => match row.backing {
            Backing::Huge2M => (OutcomeResult::Done, costs.demote),
            Backing::Base4K => no(already_done),
            Backing::Unbacked => no(OutcomeResult::Skipped(Skip::NotResident)),
            Backing::Giant1G => no(no_mechanism),
        },
        Action::Demote { to: PageSize::Huge2M, .. } if ram == Ram::Anonymous => match row.backing {
            Backing::Giant1G => (OutcomeResult::Done, costs.demote_1g),
            Backing::Huge2M | Backing::Base4K | Backing::Unbacked => no(no_mechanism),
        },
        Action::Demote { to: PageSize::Base4K, .. } if row.is_held => no(already_done),
        Action::Demote { to: PageSize::Base4K, .. } if vm.mapping.is_some() => (OutcomeResult::Done, costs.demote),
        Action::Release { .. } if row.zero.unwrap_or(0) == 0 => no(already_done),
        Action::Release { .. } => (OutcomeResult::Done, costs.release),
        Action::Vacate { .. } if ram == Ram::Anonymous => match row.backing {
            Backing::Huge2M => (OutcomeResult::Done, costs.vacate),
            Backing::Base4K => no(already_done),
            Backing::Unbacked => no(OutcomeResult::Skipped(Skip::NotResident)),
            Backing::Giant1G => no(no_mechanism),
        },
        Action::Move { node, .. } if vm.nodes.iter().any(|row| row.node == node) => match row.backing {
            Backing::Unbacked => no(OutcomeResult::Skipped(Skip::NotResident)),
            _ if row.node == WindowNode::On(node) => no(already_done),
            Backing::Base4K | Backing::Huge2M => (OutcomeResult::Done, costs.move_2m),
            Backing::Giant1G => no(no_mechanism),
        },
        Action::Promote { .. } | Action::Demote { .. } | Action::Vacate { .. } | Action::Move { .. } => {
            no(no_mechanism)
        }
    }
}

/// Reason why a giant cannot become a giant page: part of it is not RAM, or no page is available.
fn giant_refusal(vm: &VmSnapshot, window: WindowIndex, seen: &Snapshot) -> Option<Refusal> {
    if rows_of_page(vm, window, PageSize::Giant1G).len() as u64 != WINDOWS_PER_GIANT {
        return Some(Refusal::NotEligible);
    }
    seen.host.filter(|host| host.giant_pages_free == 0).map(|_| Refusal::NoHugePage)
}
