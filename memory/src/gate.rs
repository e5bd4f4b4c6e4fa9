//! Whether a VM may be acted on now, and which of its windows. wideleaf's own VMM needs no gate; an external guest may
//! be in an operation that actions would disturb, or be gone.
//!
//! ```text
//!                         anonymous memory                           shared memory
//!   Open                  collapse, split                            collapse, where that is allowed
//!   Open, GivenBack       collapse of full windows, split            collapse of full windows
//!   Open, Watched         collapse of full windows                   nothing
//!   Closed, Gone          nothing                                    nothing
//! ```
//!
//! **Watched** is memory with an open `userfaultfd(2)`: a program provides its missing pages (a restore on demand, a
//! postcopy) or observes its writes (a live snapshot). `MADV_COLLAPSE` succeeds there for a window with all of its
//! pages, and fails with `EBUSY` for one with a hole or with a page that is write-protected (mm/khugepaged.c). So a
//! page that arrives during the call is safe. Two actions are not:
//!
//! - A split may map the shared zero page in place of a page of zeroes. Linux 6.12 to 6.17 forgot on the way that the
//!   page was write-protected (`try_to_map_unused_to_zeropage`): a live snapshot would miss the next write.
//! - A collapse of shared memory takes the pages out of the page tables. Where minor faults are watched, each page then
//!   has to be provided once more, which its program may not expect.

use std::fmt;

use wideleaf_policies::Moment;
use wideleaf_policies::recovery::Events;

/// Asked before every tick that would act, from the loop's thread: it answers at once, from what it knows.
pub trait Gate: Send + Sync {
    /// Present state of the gate.
    fn state(&self) -> GateState;

    /// Why absent pages of a window in use must stay absent, so that the window is not promoted; `None` if a
    /// promotion may fill them.
    fn keeps_holes(&self) -> Option<KeptHoles>;

    /// Whether a window may be split now. Asked right before each split: unlike the other answers this one may
    /// take a tenth of a millisecond.
    fn may_split(&self) -> bool {
        self.keeps_holes() != Some(KeptHoles::Watched)
    }

    /// Whether the guest stands still, so that it uses none of its memory.
    fn is_paused(&self) -> bool {
        false
    }

    /// Events so far that may have made windows small; `now` is the moment of the call. Without them there are no
    /// recoveries.
    fn events(&self, now: Moment) -> Events {
        let _ = now;
        Events::default()
    }
}

/// Why absent pages of windows must stay absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeptHoles {
    /// The guest gave them back (balloon, free page reporting, virtio-mem).
    GivenBack,
    /// A program provides or observes the memory's pages by `userfaultfd(2)`.
    Watched,
    /// The host is short of memory.
    HostShort,
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
    /// Its memory is being saved or loaded.
    Snapshot,
    /// A device may write to its pages at any time (VFIO): they are pinned, and the kernel moves none.
    Pinned,
    /// Its memory is encrypted (SEV, TDX) and cannot be moved.
    Encrypted,
    /// Its memory is in a file of KVM (guest_memfd), which is mapped in no process.
    GuestMemfd,
    /// Its monitor does not answer, so its state is unknown.
    NoAnswer,
    /// An operator asked for it.
    Asked,
}

impl fmt::Display for LeftAlone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeftAlone::Migration => "it is being migrated",
            LeftAlone::DirtyRate => "its dirty rate is being measured by bitmap",
            LeftAlone::Snapshot => "its memory is being saved or restored",
            LeftAlone::Pinned => "a device has its pages pinned (VFIO)",
            LeftAlone::Encrypted => "not managed: its memory is encrypted (SEV, TDX), and the kernel moves none of it",
            LeftAlone::GuestMemfd => {
                "not managed: its memory is private to the guest (guest_memfd), and no call makes that huge"
            }
            LeftAlone::NoAnswer => "its monitor does not answer",
            LeftAlone::Asked => "an operator asked for it",
        })
    }
}
