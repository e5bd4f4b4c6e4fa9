//! Commands to a running loop: whether to act, and within which limits. Read at each tick and before each action.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockWriteGuard};

use wideleaf_policies::BudgetLimits;

use super::ManagedVm;
use crate::gate::{GateState, LeftAlone};

/// Commands of the loop's users; see the module.
#[derive(Debug, Default)]
pub(super) struct Steering {
    is_paused: AtomicBool,
    /// New limits that the loop has not taken over yet.
    limits: Mutex<Option<BudgetLimits>>,
    /// Shared by collapses that unmap a window meanwhile, exclusive for callers that need every window in its place.
    collapses: RwLock<()>,
}

impl Steering {
    pub fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }

    pub fn set_limits(&self, limits: BudgetLimits) {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = Some(limits);
    }

    /// Takes the new limits, once.
    pub fn take_limits(&self) -> Option<BudgetLimits> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Calls `collapse` while no caller needs every window in its place. Several threads may collapse at the same time.
    pub fn unseen<T>(&self, collapse: impl FnOnce() -> T) -> T {
        let _turn = self.collapses.read().unwrap_or_else(PoisonError::into_inner);
        collapse()
    }

    /// While the returned value exists, no window is unmapped for its collapse.
    pub fn in_place(&self) -> RwLockWriteGuard<'_, ()> {
        self.collapses.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a VM may be acted on now: its gate's state, or closed while the manager is paused.
    pub fn gate_state(&self, vm: &ManagedVm) -> GateState {
        match vm.gate.as_ref().map_or(GateState::Open, |gate| gate.state()) {
            GateState::Open if self.is_paused.load(Ordering::Relaxed) => GateState::Closed(LeftAlone::Asked),
            state => state,
        }
    }
}
