//! Samples which windows the guest uses: a rotating share of them goes aside, and the touched ones come back.
//!
//! ```text
//!   share of the windows ── aside ─▶ touched: back at once ─▶ history and frequency of each, by row
//!                              └───── untouched: back at the next tick
//! ```
//!
//! Windows that the policy hurries for have turns and a budget of their own. A large window goes aside and comes back
//! as one huge page. Of a guest so large that all windows would take longer than ten minutes, a share has a window of
//! each region instead, so that all of the guest is seen once a minute.
//!
//! This file has the sensor as the loop and the swaps share it: a caller that needs every window in its place waits for
//! swaps under way, and ends the sample. [`samples`] decides what is sampled and keeps the results; [`samplers`] has
//! the kernel's means.

mod samplers;
mod samples;

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
use wideleaf_policies::{Moment, PerTenThousand, WindowIndex, WindowRow};

use self::samples::{ACCESS_COST, ACCESS_LEAST, ACCESS_MOST, AccessSampling};
use super::guest_clock::GuestClock;
use super::outside_heat::OutsideHeat;
use super::{EndOfTick, Kind, SlowSensor};
use crate::actuators::swap::Swapper;
use crate::host::Host;
use crate::manager::report::ManagerReport;

pub(super) const KIND: Kind = Kind {
    question: "which windows are used",
    // Last, since a window that is aside cannot be scanned.
    turn: 3,
    is_needed: |needs| needs.access,
    shares_budget: true,
    causes_faults: true,
    start: |starting| {
        if let Some(source) = &starting.vm.heat {
            return Ok(Box::new(OutsideHeat::start(source, starting)));
        }
        let share = starting.share(ACCESS_LEAST, ACCESS_MOST, ACCESS_COST, starting.burst);
        let sampling = AccessSampling::start(starting, share.beginning_with_nothing())?;
        Ok(Box::new(SharedAccess::new(sampling)))
    },
};

/// Access sensor of a VM, shared with callers that need every window in its place.
#[derive(Clone)]
pub(in crate::manager) struct SharedAccess(Arc<AccessAndSwaps>);

struct AccessAndSwaps {
    /// Shared by swaps, exclusive for callers that need every window in its place. Taken before `sampling`.
    swaps: RwLock<()>,
    sampling: Mutex<AccessSampling>,
}

/// While this exists, no window is aside or on its way.
pub(in crate::manager) struct InPlace<'a> {
    sampling: MutexGuard<'a, AccessSampling>,
    _no_swap: RwLockWriteGuard<'a, ()>,
}

impl SharedAccess {
    fn new(sampling: AccessSampling) -> SharedAccess {
        SharedAccess(Arc::new(AccessAndSwaps { swaps: RwLock::default(), sampling: Mutex::new(sampling) }))
    }

    /// A sensor that samples nothing, for tests of the swaps beside it.
    #[cfg(test)]
    pub(in crate::manager) fn of_no_windows(aside: Arc<crate::detached::Aside>) -> SharedAccess {
        SharedAccess::new(AccessSampling::of_no_windows(aside))
    }

    /// Brings every window back. No window is aside while the returned value exists.
    pub(in crate::manager) fn in_place(&self, host: &dyn Host) -> InPlace<'_> {
        let no_swap = self.0.swaps.write();
        let mut sampling = self.lock();
        sampling.finish(host);
        InPlace { sampling, _no_swap: no_swap }
    }

    /// Swappers, one for each thread. `None` where windows are not moved.
    pub(in crate::manager) fn swappers(&self, threads: u16) -> Option<Vec<Swapper>> {
        self.lock().swappers(threads)
    }

    /// Calls `swap` while no caller needs every window in its place. Several threads may swap at the same time.
    pub(in crate::manager) fn unseen<T>(&self, swap: impl FnOnce() -> T) -> T {
        let _turn = self.0.swaps.read();
        swap()
    }

    fn lock(&self) -> MutexGuard<'_, AccessSampling> {
        // A thread that panicked half-way leaves windows aside. The mover brings them back, and no
        // sample reports them.
        self.0.sampling.lock()
    }
}

impl SlowSensor for SharedAccess {
    fn start(&mut self, tick: &EndOfTick<'_>, _: &mut ManagerReport) {
        self.lock().start_next(tick);
    }

    fn finish(&mut self, host: &dyn Host, _: &[WindowIndex], report: &mut ManagerReport) {
        self.in_place(host).sampling.tell(report);
    }

    fn fill(&self, rows: &mut [WindowRow], now: Moment) {
        self.lock().fill(rows, now);
    }

    fn forget(&mut self) {
        self.lock().forget();
    }

    fn follow(&mut self, clock: GuestClock) {
        self.lock().clock = clock;
    }

    fn set_budget(&mut self, budget: PerTenThousand) {
        self.lock().share.set_budget(budget);
    }

    fn is_bursting(&self) -> bool {
        self.lock().share.is_bursting()
    }

    fn is_urgent(&self, now: Moment) -> bool {
        self.lock().is_urgent(now)
    }

    fn take_refilled(&mut self) -> u64 {
        std::mem::take(&mut self.lock().refilled)
    }

    fn access(&self) -> Option<SharedAccess> {
        Some(self.clone())
    }
}
