//! The manager of a session's guest, as the rest of the run steers it. Before a manager is attached, and after its end,
//! a call does nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wideleaf_memory::Manager;
use wideleaf_memory::manager::{Live, ManagerReport, OutOfReach, PolicyAnswer, RestAnswer, SwitchError};
use wideleaf_policies::{BudgetLimits, HugePagePrice, MappingStats, Policy};

use super::Session;

impl Session {
    /// Ends the manager and returns its report; `None` the second time, or if none was attached.
    pub fn stop_manager(&self) -> Option<ManagerReport> {
        let manager = self.attached.get()?.manager.lock().take();
        manager.map(|(manager, _noted)| manager.stop())
    }

    /// The manager's state at its latest tick, and KVM's totals now; `None` after the manager has ended, or if none
    /// was attached.
    pub fn seen(&self) -> Option<(Arc<Live>, Option<MappingStats>)> {
        let live = self.live()?;
        let second_level = self.attached.get()?.second_level.as_ref();
        Some((live, second_level.and_then(|kvm| kvm.mapping_stats().ok())))
    }

    /// The manager's state at its latest tick; `None` after the manager has ended, or if none was attached.
    pub fn live(&self) -> Option<Arc<Live>> {
        self.with_manager(Manager::live)
    }

    /// Sets the limits on the cost of actions from now on.
    pub fn set_limits(&self, limits: BudgetLimits) {
        self.with_manager(|manager| manager.set_limits(limits));
    }

    /// Sets the largest part of the time for which windows may be out of the guest's reach.
    pub fn set_out_of_reach(&self, part: OutOfReach) {
        self.with_manager(|manager| manager.set_out_of_reach(part));
    }

    /// Sets the price of huge pages on this host; `None`: the policy finds its own.
    pub fn set_huge_page_price(&self, price: Option<HugePagePrice>) {
        self.with_manager(|manager| manager.set_huge_page_price(price));
    }

    /// Whether a daemon makes free blocks of 2 MiB for all guests of this host.
    pub fn set_supplied(&self, is_supplied: bool) {
        self.with_manager(|manager| manager.set_supplied(is_supplied));
    }

    /// Tells the manager of free huge pages that `/proc/buddyinfo` does not count.
    pub fn promise_huge_pages(&self, pages: u64) {
        self.with_manager(|manager| manager.promise_huge_pages(pages));
    }

    /// Switches the policy off or on. With a delay, it acts again after the guest's next sign of progress.
    pub fn set_off(&self, is_off: bool) {
        self.with_manager(|manager| {
            self.is_off.store(is_off, Ordering::Relaxed);
            match (is_off, self.policy_delay) {
                (true, _) => manager.pause(),
                (false, None) => manager.activate(),
                (false, Some(_)) => {}
            }
        });
    }

    /// Replaces the policy; it is on or off like the one before.
    ///
    /// # Errors
    /// [`SwitchError`]; the previous policy stays.
    pub fn set_policy(&self, policy: Box<dyn Policy>) -> Result<(), SwitchError> {
        // Waits for the answer outside the lock: a vCPU's line may need the lock, and a giant promotion in progress
        // waits for that vCPU.
        let answer = self.with_manager(|manager| manager.set_policy(policy));
        answer.map_or(Err(SwitchError::Ended), PolicyAnswer::wait)
    }

    /// Asks the manager to rest, if there is one.
    pub fn ask_to_rest(&self) -> Option<RestAnswer> {
        self.with_manager(Manager::ask_to_rest)
    }

    pub(super) fn activate(&self) {
        self.with_manager(|manager| {
            if !self.is_off.load(Ordering::Relaxed) {
                manager.activate();
            }
        });
    }

    pub(super) fn with_manager<T>(&self, tell: impl FnOnce(&Manager) -> T) -> Option<T> {
        self.attached.get()?.manager.lock().as_ref().map(|(manager, _)| tell(manager))
    }
}
