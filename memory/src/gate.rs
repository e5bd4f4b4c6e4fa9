//! Whether a VM may be acted on now. wideleaf's own VMM needs no gate; an external guest may be in an operation that
//! actions would disturb, or be gone.

use std::fmt;

use wideleaf_policies::Moment;
use wideleaf_policies::recovery::Events;

/// Asked before every tick that would act, from the loop's thread: it answers at once, from what it knows.
pub trait Gate: Send + Sync {
    /// Present state of the gate.
    fn state(&self) -> GateState;

    /// Whether absent pages of a window in use are absent on purpose: the guest gave them back (balloon, free page
    /// reporting, virtio-mem), and a promotion of that window would bring them back.
    fn keeps_holes(&self) -> bool;

    /// Events so far that may have made windows small; `now` is the moment of the call. Without them there are no
    /// recoveries.
    fn events(&self, now: Moment) -> Events {
        let _ = now;
        Events::default()
    }
}

/// Permitted actions on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateState {
    /// All actions that the policy wants.
    Open,
    /// No action for now.
    Closed(LeftAlone),
    /// No action any more: the guest has ended.
    Gone,
}

/// Why a whole VM is left alone for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LeftAlone {
    /// It is being migrated: its pages are write-protected and read one by one.
    Migration,
    /// A program measures its dirty rate by a bitmap, for which KVM maps base pages.
    DirtyRate,
    /// Its memory is being saved, or brought back on demand (`userfaultfd`).
    Snapshot,
    /// A device may write to its pages at any time (VFIO): they are pinned, and the kernel moves none.
    Pinned,
    /// Its memory is encrypted (SEV, TDX) and cannot be moved.
    Encrypted,
    /// Its monitor does not answer, so its state is unknown.
    NoAnswer,
    /// An operator asked for it.
    Asked,
}

impl LeftAlone {
    /// Name in reports and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            LeftAlone::Migration => "migration",
            LeftAlone::DirtyRate => "dirty_rate",
            LeftAlone::Snapshot => "snapshot",
            LeftAlone::Pinned => "pinned",
            LeftAlone::Encrypted => "encrypted",
            LeftAlone::NoAnswer => "no_answer",
            LeftAlone::Asked => "asked",
        }
    }
}

impl fmt::Display for LeftAlone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeftAlone::Migration => "it is being migrated",
            LeftAlone::DirtyRate => "its dirty rate is being measured by bitmap",
            LeftAlone::Snapshot => "its memory is being saved or restored",
            LeftAlone::Pinned => "a device has its pages pinned (VFIO)",
            LeftAlone::Encrypted => "its memory is encrypted",
            LeftAlone::NoAnswer => "its monitor does not answer",
            LeftAlone::Asked => "an operator asked for it",
        })
    }
}
