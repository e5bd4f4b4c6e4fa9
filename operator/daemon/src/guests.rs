//! The daemon's door to guests that somebody else started: who they are, and having one of them looked after. Behind it is
//! `wideleaf_attach`; tests have a [`fake`].

use wideleaf_control::protocol::Target;
use wideleaf_control::view::{Explanation, VmView, Vmm, WindowMap};
use wideleaf_memory::deadline::ProcessKey;
use wideleaf_policies::BudgetLimits;

use crate::config::Wanted;

pub mod fake;
pub mod real;

/// One process for ever: a process id may come again, with its start time it does not (proc_pid_stat(5), field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub started_at: u64,
}

/// A guest that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its process.
    pub process: ProcessId,
    /// What it calls itself: a label, which any process may have.
    pub name: String,
    /// The UUID that it gives itself: a label as well.
    pub uuid: Option<String>,
    /// The libvirt domain that it is, by libvirt's own word. Only this is believed where something belongs to a domain.
    pub domain: Option<String>,
    /// Whether another process is the libvirt domain of that name.
    pub is_name_anothers: bool,
    /// Who runs it.
    pub vmm: Vmm,
    /// Why its process says nothing of itself for now, in words that follow "it". Its name is not known then, unless
    /// libvirt knows it.
    pub no_answer: Option<String>,
}

impl Found {
    /// What names its process in questions with a deadline.
    pub fn key(&self) -> ProcessKey {
        ProcessKey { pid: self.process.pid, started_at: self.process.started_at }
    }

    /// The name that the configuration's rules are held against: not that of a libvirt domain that is another process. A guest whose
    /// name is not believed has none, and goes by its process id as others without a name.
    pub fn believed_name(&self) -> String {
        if self.is_name_anothers { self.process.pid.to_string() } else { self.name.clone() }
    }
}

/// The guests of a host.
pub trait Guests: Send + Sync {
    /// All that run now, ours included.
    ///
    /// # Errors
    /// One line: processes can not be listed, and any guest may run.
    fn find(&self) -> Result<Vec<Found>, String>;

    /// The one that is meant.
    ///
    /// # Errors
    /// One line: there is none, there are several, or it can not be told for want of a privilege.
    fn resolve(&self, target: &Target) -> Result<Found, String>;

    /// All about one that nobody manages. It is only looked at.
    ///
    /// # Errors
    /// One line: it is gone, or a privilege is missing.
    fn look(&self, found: &Found) -> Result<VmView, String>;

    /// Why windows of one that nobody manages are not huge.
    ///
    /// # Errors
    /// As [`Guests::look`].
    fn explain(&self, found: &Found) -> Result<Explanation, String>;

    /// What is behind every window of one that nobody manages.
    ///
    /// # Errors
    /// As [`Guests::look`].
    fn windows(&self, found: &Found) -> Result<WindowMap, String>;

    /// Takes it under management, or, where `wanted.policy` is `off`, only looks at it from now on.
    ///
    /// # Errors
    /// One line: what is missing, and what would bring it.
    fn attach(&self, found: &Found, wanted: &Wanted) -> Result<Box<dyn Care>, String>;
}

/// A guest that is looked after. Whatever is asked, the answer comes at once, of what is known.
pub trait Care: Send {
    /// All about it; counters are since it was attached, whatever its policy was meanwhile.
    fn view(&mut self) -> VmView;

    /// Why windows are not huge.
    fn explain(&mut self) -> Explanation;

    /// What is behind every window.
    fn windows(&mut self) -> WindowMap;

    /// The policy from now on. Whether shared memory may be collapsed, and the monitor, stay as they were.
    ///
    /// # Errors
    /// Why that can not be done for this guest; all stays as it was.
    fn apply(&mut self, wanted: &Wanted) -> Result<(), String>;

    /// What it may cost from now on.
    fn set_limits(&mut self, limits: BudgetLimits);

    /// Whether something may be promoted that takes more memory than the guest has now.
    fn set_may_grow(&mut self, may_grow: bool);

    /// Whether the guest is gone.
    fn has_ended(&self) -> bool;

    /// Leaves the guest to itself. Its pages stay as they are.
    fn stop(self: Box<Self>);
}
