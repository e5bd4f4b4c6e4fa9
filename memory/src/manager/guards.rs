//! The guards of an action on a window, in one list. The first that objects decides the result; what a guard took
//! is held until the action is over.
//!
//! ```text
//!   before any action of the tick   exists ─ panicked ─ backing off                       `ManagerLoop::begin`
//!   right before the action         stopping ─ gate ─ watched ─ huge page ─ claim ─ discarding ─ RAM ─ given back
//!                                   ─ merged ─ stall
//! ```
//!
//! A giant has guards of its own, in the order of `ManagerLoop::begin_giant`.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::MutexGuard;
use wideleaf_policies::{Action, OutcomeResult, Refusal, Skip};

use super::attempt::{Attempt, Mechanism, Target};
use super::huge_page_backoff::{Grounds, HugePageBackoff};
use super::managed_vm::ManagedVm;
use super::stall_budget::StallBudget;
use super::steering::Steering;
use crate::claims::PartClaim;
use crate::gate::GateState;
use crate::host::Host;
use crate::region::RamRange;

/// A guarded action, with everything that its guards ask.
pub(super) struct Guarded<'a> {
    pub attempt: Attempt,
    pub target: Target,
    /// Mechanism that the action would use.
    pub mechanism: Mechanism,
    pub host: &'a dyn Host,
    pub vm: &'a ManagedVm,
    pub stalls: &'a StallBudget,
    pub should_stop: &'a AtomicBool,
    pub steering: &'a Steering,
    pub huge_pages: &'a HugePageBackoff,
    /// Whether the acting thread has a huge page that a window of the VM has left.
    pub has_vacated: bool,
}

/// Everything that the guards took for an action. Dropped in the order of the fields.
#[derive(Default)]
pub(super) struct Held<'a> {
    _discarding: Option<MutexGuard<'a, ()>>,
    _claim: Option<PartClaim>,
    /// Range of RAM that contains the window.
    pub range: Option<RamRange>,
    /// Reason why the kernel may be asked for a huge page; the result is to be learned.
    pub grounds: Option<Grounds>,
    /// Whether the whole guest may stall; the stall is to be booked.
    pub may_stall: bool,
}

/// Objection of a guard: the result, and the mechanism under which it is counted.
pub(super) struct Objection {
    pub mechanism: Mechanism,
    pub result: OutcomeResult,
}

impl From<OutcomeResult> for Objection {
    fn from(result: OutcomeResult) -> Objection {
        Objection { mechanism: Mechanism::None, result }
    }
}

impl From<Skip> for Objection {
    fn from(skip: Skip) -> Objection {
        OutcomeResult::Skipped(skip).into()
    }
}

type Guard = for<'a> fn(&Guarded<'a>, &mut Held<'a>) -> Result<(), Objection>;

/// The guards right before an action, in their order.
const GUARDS: [Guard; 10] = [stopping, gate, watched, huge_page, claim, discarding, ram, given_back, merged, stall];

impl<'a> Guarded<'a> {
    /// Asks all guards. Returns what they took, and the first objection.
    pub(super) fn ask(&self) -> (Held<'a>, Option<Objection>) {
        let mut held = Held::default();
        let objection = GUARDS.iter().find_map(|guard| guard(self, &mut held).err());
        (held, objection)
    }

    fn action(&self) -> Action {
        self.attempt.planned.action
    }

    fn is_promotion(&self) -> bool {
        matches!(self.action(), Action::Promote { .. })
    }
}

/// The loop is about to end.
fn stopping<'a>(guarded: &Guarded<'a>, _: &mut Held<'a>) -> Result<(), Objection> {
    if guarded.should_stop.load(Ordering::Relaxed) { Err(Skip::Stopping.into()) } else { Ok(()) }
}

/// The VM's gate has closed since planning.
fn gate<'a>(guarded: &Guarded<'a>, _: &mut Held<'a>) -> Result<(), Objection> {
    let is_open = guarded.steering.gate_state(guarded.vm) == GateState::Open;
    if is_open { Ok(()) } else { Err(Skip::LeftAlone.into()) }
}

/// A program watches the RAM (`userfaultfd(2)`), and the action is not one of those that are safe then: see
/// [`crate::gate`].
fn watched<'a>(guarded: &Guarded<'a>, _: &mut Held<'a>) -> Result<(), Objection> {
    let is_safe = match guarded.is_promotion() {
        true => !(guarded.vm.is_shared() && guarded.vm.is_watched()),
        false => guarded.vm.may_split(),
    };
    if is_safe { Ok(()) } else { Err(Skip::LeftAlone.into()) }
}

/// The host cannot supply a huge page for a copy, and no window has left one.
fn huge_page<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    if guarded.attempt.needs_huge_page() && !guarded.has_vacated {
        let grounds = guarded.huge_pages.may_ask(guarded.host, guarded.attempt.node_of_page());
        held.grounds = Some(grounds.ok_or(Skip::NoHugePage)?);
    }
    Ok(())
}

/// The window is part of a giant that is being moved, or on a giant page. Recovery concerns the slot, not pages, and
/// is also possible for windows on a giant page.
fn claim<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    let Some(ram) = &guarded.vm.ram else { return Ok(()) };
    let (claims, window) = (ram.claims(), guarded.action().window());
    let is_recovery = guarded.target.is_held && guarded.is_promotion();
    if !is_recovery {
        held._claim = Some(claims.window(window).map_err(|claimed| claimed.result())?);
    } else if claims.is_under_way(window) {
        // The log that holds the window is that of the move.
        return Err(Skip::GiantUnderWay.into());
    }
    Ok(())
}

/// A release relies on the zero pages that it saw: it keeps every other thread from discarding pages.
fn discarding<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    if matches!(guarded.action(), Action::Release { .. }) {
        held._discarding = guarded.vm.ram.as_ref().map(|ram| ram.given_back().discarding());
    }
    Ok(())
}

/// The window is outside the VM's RAM.
fn ram<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    let start = guarded.action().window().start();
    held.range = guarded.vm.ranges.iter().find(|range| range.gpa.contains(start)).copied();
    held.range.map(|_| ()).ok_or(Skip::NoMechanism.into())
}

/// A promotion would occupy again what the guest gave back. No policy plans it, but the guest may have given back
/// more since.
fn given_back<'a>(guarded: &Guarded<'a>, _: &mut Held<'a>) -> Result<(), Objection> {
    // Reserved frames are never promoted, and a recovery maps the page that is there.
    let may_occupy = guarded.is_promotion()
        && guarded.mechanism != Mechanism::Recover
        && !guarded.vm.backing.is_reservable()
        && guarded.vm.is_given_back(guarded.action().window());
    if may_occupy { Err(Skip::GivenBack.into()) } else { Ok(()) }
}

/// Pages of the window are merged, or the merged pages cannot be counted.
fn merged<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    let copies = matches!(guarded.mechanism, Mechanism::Swap | Mechanism::Collapse | Mechanism::MoveToNode);
    let (Some(merged), Some(range), true) = (&guarded.vm.merged, held.range, copies) else { return Ok(()) };
    let start = range.hva + (guarded.action().window().start() - range.gpa.start());
    let result = match merged.of_window(start) {
        Ok(0) => return Ok(()),
        Ok(_) => OutcomeResult::Refused(Refusal::Merged),
        Err(error) => error.into(),
    };
    Err(Objection { mechanism: Mechanism::Collapse, result })
}

/// The whole guest would stall, and its share of stalls is spent.
fn stall<'a>(guarded: &Guarded<'a>, held: &mut Held<'a>) -> Result<(), Objection> {
    if guarded.mechanism == Mechanism::Collapse && guarded.vm.stalls_in_collapses() {
        held.may_stall = guarded.stalls.may_stall(guarded.host);
        return if held.may_stall { Ok(()) } else { Err(Skip::StallBudget.into()) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::sensors::free_blocks::BUDDYINFO;
    use crate::testing::fake_host::FakeHost;
    use std::time::Duration;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::window::WindowState;
    use wideleaf_policies::{Cost, Gpa, GpaRange, Hva, Moment, PageSize, PlannedAction, VmId, WindowIndex};

    #[test]
    fn on_a_host_without_huge_pages_only_a_promotion_onto_the_page_of_a_vacated_window_is_tried() {
        let (host, huge_pages) = (FakeHost::default(), HugePageBackoff::default());
        host.set_text(BUDDYINFO, "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 0 0\n");
        let refused = OutcomeResult::Refused(Refusal::NoHugePage);
        huge_pages.learn(&host, None, Grounds::Plenty, refused, Duration::ZERO);
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2)).expect("fits"), hva: Hva::new(1 << 40) };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let vm = ManagedVm::external(VmId(0), vec![range], backing, None);
        let action = Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Huge2M };
        let target = Target { vm: 0, row: 0, state: WindowState::Ready, is_held: false };
        let attempt = Attempt::requested(PlannedAction { action, cost: Cost::default(), node: None }, 0, Moment::START);
        let (stalls, should_stop, steering) = (StallBudget::default(), AtomicBool::new(false), Steering::default());
        let objection = |has_vacated| {
            let guarded = Guarded {
                attempt: Attempt { target: Some(target), ..attempt },
                target,
                mechanism: Mechanism::Swap,
                host: &host,
                vm: &vm,
                stalls: &stalls,
                should_stop: &should_stop,
                steering: &steering,
                huge_pages: &huge_pages,
                has_vacated,
            };
            let (held, objection) = guarded.ask();
            assert_eq!(held.grounds, None, "whatever becomes of it says nothing about the host's pages");
            objection.map(|objection| objection.result)
        };
        assert_eq!(objection(false), Some(OutcomeResult::Skipped(Skip::NoHugePage)));
        assert_eq!(objection(true), None);
    }
}
