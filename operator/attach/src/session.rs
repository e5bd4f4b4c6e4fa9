//! An external guest under the manager: one loop for it, and a thread that keeps its gate up to date.
//!
//! ```text
//!   VmProcess ─▶ RAM by kind ─▶ a ManagedVm for each ─▶ Manager over ProcessHost ──▶ Live ─▶ view, explain, windows
//!                               GuestGate ◀── refreshed by caller, or by watcher ┬ RAM has changed ─▶ a new Manager
//!                               KVM's totals, the guest's own tables ◀── asked ──┘
//! ```
//!
//! The guest is never stopped or asked to do anything, and detaching changes none of its pages.

mod answers;
mod error;
mod guest;
mod manager_parts;
mod plan;
mod settings;
mod watcher;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use wideleaf_control::protocol::BidsReport;
use wideleaf_control::view::{Explanation, VmView, Vmm, WindowMap};
use wideleaf_memory::deadline;
use wideleaf_memory::gate::{Gate as _, GateState};
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::recovery::RecoveryLimits;
use wideleaf_policies::{BudgetLimits, HugePagePrice, PolicyChoice};

pub use error::AttachError;
pub use plan::plan;
pub use settings::Settings;

use self::error::silent;
use self::guest::Guest;
use self::settings::check;
use self::watcher::Watcher;
use crate::live_view;
use crate::process::VmProcess;

/// Time that an attach of a small guest may take, or a change of policy: a monitor may need several questions, and the
/// client of a daemon waits for ten seconds. A large guest is attached in more, since its RAM map takes some seconds
/// for each terabyte.
const ATTACH_WITHIN: Duration = Duration::from_secs(8);

/// Time that a guest has to show that it does not hang, less than for a large guest: the daemon has two threads for
/// changes, and libvirt waits for one of them.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Time to wait for the end of a manager. It ends after the present action, some milliseconds later. If its guest
/// hangs, it ends with the guest's process, or when that answers.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// A guest under the manager. A drop ends the management and leaves the pages as they are. That takes at most a
/// second: threads that wait for a process that hangs end when it answers, or ends.
pub struct Attached {
    /// `None` only after the drop.
    parts: Option<(Arc<Guest>, Watcher)>,
}

impl Attached {
    /// Takes a guest under management. It is surveyed before this returns, which is within `ATTACH_WITHIN`, longer for
    /// a large guest.
    ///
    /// # Errors
    /// [`AttachError`]; nothing is then done to the guest.
    pub fn start(process: VmProcess, settings: Settings) -> Result<Attached, AttachError> {
        check(settings.policy.as_ref())?;
        let (pid, key) = (process.pid, process.key());
        if process.vmm == Vmm::Wideleaf {
            return Err(AttachError::ManagesItself(pid));
        }
        if let Some(why) = process.no_answer {
            return Err(AttachError::NoAnswer { pid, why });
        }
        let answers = process.answers(ANSWER_WITHIN);
        let within = process.time_with_mappings(ATTACH_WITHIN);
        let started = answers.and_then(|()| deadline::ask(key, within, move || Attached::start_now(process, settings)));
        started.unwrap_or_else(|no_answer| Err(silent(pid, &no_answer)))
    }

    fn start_now(process: VmProcess, settings: Settings) -> Result<Attached, AttachError> {
        let (guest, ram_watch) = Guest::open(process, settings)?;
        let guest = Arc::new(guest);
        let watcher = Watcher::start(Arc::clone(&guest), ram_watch)?;
        Ok(Attached { parts: Some((guest, watcher)) })
    }

    fn guest(&self) -> &Arc<Guest> {
        &self.parts.as_ref().expect("it is not dropped yet").0
    }

    /// The process of the guest.
    pub fn process(&self) -> &VmProcess {
        &self.guest().process
    }

    /// Sets the policy; `None`: the guest is only observed. Counters continue.
    ///
    /// # Errors
    /// [`AttachError`]; all is then as it was.
    pub fn set_policy(&mut self, policy: Option<PolicyChoice>) -> Result<(), AttachError> {
        check(policy.as_ref())?;
        let (guest, key) = (Arc::clone(self.guest()), self.guest().process.key());
        // The thread that makes the change decides that it is made, or this one that it is too late: the first counts.
        let is_made = Arc::new(OnceLock::new());
        let decided = Arc::clone(&is_made);
        let change = move || {
            let _one_at_a_time = guest.changing.lock();
            let ram = Arc::clone(&guest.now().ram);
            guest.go_on_with(ram, policy, || decided.set(true).is_ok())
        };
        // A guest that hangs has one manager that waits for it, and gets no second.
        let answers = self.guest().process.answers(ANSWER_WITHIN);
        let changed = answers.and_then(|()| deadline::ask(key, ATTACH_WITHIN, change));
        changed.unwrap_or_else(|no_answer| match is_made.set(false) {
            Ok(()) => Err(silent(key.pid, &no_answer)),
            Err(_) => Ok(()), // the end of the manager before is what takes long
        })
    }

    /// Sets the limits on the costs.
    pub fn set_limits(&mut self, limits: BudgetLimits) {
        let mut now = self.guest().now();
        now.settings.limits = limits;
        now.manager.set_limits(limits);
    }

    /// Sets the largest part of the time for which windows may be out of the guest's reach.
    pub fn set_out_of_reach(&mut self, part: OutOfReach) {
        let mut now = self.guest().now();
        now.settings.out_of_reach = part;
        now.manager.set_out_of_reach(part);
    }

    /// Bids for huge pages, while the host lacks them.
    pub fn bids(&self) -> Option<BidsReport> {
        live_view::bids(&self.guest().now().manager.live())
    }

    /// Sets the price of huge pages on this host. No window of an external guest can give its huge page back.
    pub fn set_huge_page_price(&self, price: Option<HugePagePrice>) {
        self.guest().now().manager.set_huge_page_price(price);
    }

    /// Tells the manager of free huge pages that `/proc/buddyinfo` does not count.
    pub fn promise_huge_pages(&self, pages: u64) {
        self.guest().now().manager.promise_huge_pages(pages);
    }

    /// Whether the guest is in an event that a recovery follows: a migration, a dirty log, a stop and the like, as of
    /// the latest look at it.
    pub fn is_in_event(&self) -> bool {
        self.guest().gate.is_in_event()
    }

    /// Sets the bounds on recoveries from now on.
    pub fn set_recovery(&mut self, recovery: RecoveryLimits) {
        let guest = self.guest();
        guest.now().settings.recovery = recovery;
        guest.recoveries.set_limits(recovery);
    }

    /// Leaves the guest alone for now, or ends that.
    pub fn leave_alone(&self, is_asked: bool) {
        self.guest().gate.leave_alone(is_asked);
    }

    /// Whether promotions may make absent pages resident, which they should not where the host is short.
    pub fn set_may_grow(&self, may_grow: bool) {
        self.guest().gate.keep_holes(!may_grow);
    }

    /// Whether the guest has ended.
    pub fn has_ended(&self) -> bool {
        self.guest().now().manager.has_ended() || self.guest().gate.state() == GateState::Gone
    }

    /// Full description, as of the end of the latest tick.
    pub fn view(&self) -> VmView {
        self.guest().view()
    }

    /// Reasons why windows are not huge.
    pub fn explain(&self) -> Explanation {
        self.guest().explain()
    }

    /// The map of all its windows.
    pub fn windows(&self) -> WindowMap {
        self.guest().windows()
    }

    /// Ends the management of the guest.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let Some((guest, watcher)) = self.parts.take() else { return };
        let end = move || {
            drop(watcher);
            drop(guest);
        };
        deadline::leave_behind("leaving", STOP_WITHIN, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;

    #[test]
    fn a_vmm_that_manages_its_guest_itself_is_refused() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["/usr/bin/wideleaf", "run", "gups"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let refused = Attached::start(process, Settings::default()).err().expect("refused");
        assert!(matches!(refused, AttachError::ManagesItself(7)), "{refused}");
    }
}
