//! The daemon's interface to external guests: finding them and managing them. `wideleaf_attach` implements it;
//! tests have a [`fake`].

use std::collections::BTreeMap;

use wideleaf_control::protocol::{BidsReport, Target};
use wideleaf_control::view::{Explanation, Reason, VmView, Vmm, WindowMap};
use wideleaf_memory::deadline::ProcessKey;
use wideleaf_policies::{BudgetLimits, HugePagePrice};

use crate::config::Wanted;

pub mod fake;
pub mod real;

/// Identity of one process for ever: a process id may come again, but not with the same start time
/// (proc_pid_stat(5), field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ProcessId {
    /// Number of the process.
    pub pid: u32,
    /// Start of the process, in clock ticks since boot.
    pub started_at: u64,
}

/// A running guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Process that runs it.
    pub process: ProcessId,
    /// Its own name for itself: a label that any process may have.
    pub name: String,
    /// Its own UUID, also only a label.
    pub uuid: Option<String>,
    /// Its libvirt domain according to libvirt. Only this decides whether something that belongs to a domain
    /// is its own.
    pub domain: Option<String>,
    /// Whether another process is the libvirt domain of that name.
    pub is_name_anothers: bool,
    /// Program that runs it.
    pub vmm: Vmm,
    /// Reason why its process does not answer for now, in words that follow "it". Its name is then unknown, unless
    /// libvirt knows it.
    pub no_answer: Option<String>,
}

impl Found {
    /// Key of its process in questions with a deadline.
    pub fn key(&self) -> ProcessKey {
        ProcessKey { pid: self.process.pid, started_at: self.process.started_at }
    }

    /// The name for the configuration's rules, unless it is that of a libvirt domain in another process. A guest
    /// without a trusted name has its process id instead, as any other without a name.
    pub fn believed_name(&self) -> String {
        if self.is_name_anothers { self.process.pid.to_string() } else { self.name.clone() }
    }
}

/// Windows of a guest, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowCounts {
    /// Number of windows in large pages; `None` where windows cannot be seen.
    pub large: Option<u64>,
    /// Number of the others, by name of the reason.
    pub reasons: BTreeMap<String, u64>,
}

impl From<&Explanation> for WindowCounts {
    fn from(explanation: &Explanation) -> WindowCounts {
        let mut reasons = BTreeMap::new();
        for Reason { name, windows, .. } in &explanation.reasons {
            *reasons.entry(name.clone()).or_default() += windows;
        }
        WindowCounts { large: explanation.huge, reasons }
    }
}

/// The guests of a host.
pub trait Guests: Send + Sync {
    /// All running guests, those of `wideleaf run` included.
    ///
    /// # Errors
    /// One line: processes cannot be listed, and any guest may run.
    fn find(&self) -> Result<Vec<Found>, String>;

    /// The guest that a client names.
    ///
    /// # Errors
    /// One line: no guest or several have the name, or a privilege is missing.
    fn resolve(&self, target: &Target) -> Result<Found, String>;

    /// Full description of an unmanaged guest, without a change to it.
    ///
    /// # Errors
    /// One line: it has ended, or a privilege is missing.
    fn look(&self, found: &Found) -> Result<VmView, String>;

    /// Reasons why windows of an unmanaged guest are not huge.
    ///
    /// # Errors
    /// Same errors as [`Guests::look`].
    fn explain(&self, found: &Found) -> Result<Explanation, String>;

    /// Backing of every window of an unmanaged guest.
    ///
    /// # Errors
    /// Same errors as [`Guests::look`].
    fn windows(&self, found: &Found) -> Result<WindowMap, String>;

    /// Takes it under management. Where `wanted.policy` is `off`, it is only observed from now on. Where
    /// `is_left_alone`, no page of it is changed until [`Care::leave_alone`] ends that.
    ///
    /// # Errors
    /// One line: what is missing, and what would provide it.
    fn attach(&self, found: &Found, wanted: &Wanted, is_left_alone: bool) -> Result<Box<dyn Care>, String>;
}

/// A managed guest. Every call answers at once, from what is known.
pub trait Care: Send {
    /// Full description; its counters are since it was attached, across all policies.
    fn view(&mut self) -> VmView;

    /// Reasons why windows are not huge.
    fn explain(&mut self) -> Explanation;

    /// Backing of every window.
    fn windows(&mut self) -> WindowMap;

    /// Number of windows in large pages, and of the others by name of the reason.
    fn counts(&mut self) -> WindowCounts;

    /// Bids for huge pages, while the host lacks them.
    fn bids(&mut self) -> Option<BidsReport>;

    /// Sets the policy, the bounds on recoveries and the part of the time out of reach. Whether shared memory may be
    /// collapsed, and the monitor, stay as they were.
    ///
    /// # Errors
    /// Reason why this guest cannot have it; all stays as it was.
    fn apply(&mut self, wanted: &Wanted) -> Result<(), String>;

    /// Sets the limits on the costs.
    fn set_limits(&mut self, limits: BudgetLimits);

    /// Sets whether promotions may take more memory than the guest has now.
    fn set_may_grow(&mut self, may_grow: bool);

    /// Sets the price of huge pages; `None` while they are not short.
    fn set_huge_page_price(&mut self, price: Option<HugePagePrice>);

    /// Tells its manager of free huge pages that `/proc/buddyinfo` does not count.
    fn promise_huge_pages(&mut self, pages: u64);

    /// Leaves the guest alone for now, or ends that.
    fn leave_alone(&mut self, is_asked: bool);

    /// Whether the guest has ended.
    fn has_ended(&self) -> bool;

    /// Ends the management of the guest. Its pages stay as they are.
    fn stop(self: Box<Self>);
}
