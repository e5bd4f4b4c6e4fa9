//! Why a window is not huge: the strongest of its reasons.
//!
//! ```text
//!   for ever       cannot be huge ─▶ never touched ─▶
//!   the VM         panicked ─▶ left alone ─▶ policy never promotes ─▶
//!   the window     held ─▶ shared and watched ─▶ swapped ─▶ holes ─▶ under way ─▶ backing off ─▶
//!   the decision   no huge page ─▶ stalls ─▶ budget ─▶ kept small ─▶ gains nothing ─▶ not chosen
//!                  without a manager here: manages itself ─▶ unmanaged
//! ```

use std::fmt;

use wideleaf_policies::policy::KeptSmall;
use wideleaf_policies::{GpaRange, Refusal};

use crate::gate::{KeptHoles, LeftAlone};

/// Why no window of a part of guest RAM can ever be huge, unless the operator changes how the guest is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CannotBeHuge {
    /// Guest-physical address, address in the process and offset in the file are not equal modulo 2 MiB.
    Misaligned,
    /// The process marked it `MADV_NOHUGEPAGE`.
    Marked,
    /// The process switched huge pages off for itself (`PR_SET_THP_DISABLE`).
    Disabled,
    /// It is a file on a disk.
    OnDisk,
    /// It is shared memory, where collapsing a window stops the whole guest for 15 to 30 ms, and no operator
    /// has allowed that.
    SharedStalls,
}

/// A part of guest RAM that can never be huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barred {
    /// Guest-physical addresses of the part.
    pub range: GpaRange,
    /// Reason for this part.
    pub why: CannotBeHuge,
}

/// Why a window is not huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WhyNot {
    /// It can never be huge.
    CannotBeHuge(CannotBeHuge),
    /// None of its pages is present.
    NeverTouched,
    /// An action on its VM panicked.
    Panicked,
    /// The whole VM is left alone.
    LeftAlone(LeftAlone),
    /// The policy in force promotes nothing.
    PolicyNeverPromotes,
    /// It is on a large page that KVM maps in base pages: the manager's dirty log holds it there.
    Held,
    /// A dirty log that another part switched on holds its memslot.
    HeldByOthers,
    /// More of its pages are swapped out than khugepaged would bring back for a huge page.
    Swapped,
    /// Pages of it are absent, and must stay so for now.
    Holes(KeptHoles),
    /// It is shared memory with an open `userfaultfd(2)`: after a collapse each page would fault once more.
    SharedWatched,
    /// It is part of a giant that is being moved.
    UnderWay,
    /// Its pages are merged with equal ones (KSM).
    Merged,
    /// The kernel refused an attempt; if for want of a huge page, then perhaps for another window.
    BackingOff(Refusal),
    /// Its collapse would stop the whole guest, and the guest's share of such stalls is spent.
    StallBudgetSpent,
    /// The budget was spent before the policy would have chosen it.
    BudgetSpent,
    /// The policy keeps it on base pages until its accesses prove that a huge page pays.
    KeptSmall(KeptSmall),
    /// The guest's own progress showed that promotions of such windows gain it nothing.
    GainsNothing,
    /// The policy has not chosen it.
    NotChosen,
    /// No manager manages its VM.
    Unmanaged,
    /// The VM's own process manages it and knows why.
    ManagesItself,
}

impl CannotBeHuge {
    /// Name in reports and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            CannotBeHuge::Misaligned => "misaligned",
            CannotBeHuge::Marked => "marked_no_huge_page",
            CannotBeHuge::Disabled => "huge_pages_disabled",
            CannotBeHuge::OnDisk => "file_on_disk",
            CannotBeHuge::SharedStalls => "shared_memory_stalls",
        }
    }
}

impl WhyNot {
    /// The reason for a window that backs off after this refusal.
    pub const fn backing_off(refusal: Refusal) -> WhyNot {
        match refusal {
            Refusal::Merged => WhyNot::Merged,
            other => WhyNot::BackingOff(other),
        }
    }

    /// Name in reports and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            WhyNot::CannotBeHuge(why) => why.name(),
            WhyNot::NeverTouched => "never_touched",
            WhyNot::Panicked => "panicked",
            WhyNot::LeftAlone(LeftAlone::Migration) => "left_alone_migration",
            WhyNot::LeftAlone(LeftAlone::DirtyRate) => "left_alone_dirty_rate",
            WhyNot::LeftAlone(LeftAlone::Snapshot) => "left_alone_snapshot",
            WhyNot::LeftAlone(LeftAlone::Pinned) => "left_alone_pinned",
            WhyNot::LeftAlone(LeftAlone::Encrypted) => "left_alone_encrypted",
            WhyNot::LeftAlone(LeftAlone::NoAnswer) => "left_alone_no_answer",
            WhyNot::LeftAlone(LeftAlone::Asked) => "left_alone_asked",
            WhyNot::LeftAlone(LeftAlone::GuestMemfd) => "left_alone_guest_memfd",
            WhyNot::PolicyNeverPromotes => "policy_never_promotes",
            WhyNot::Held => "held",
            WhyNot::HeldByOthers => "held_by_others",
            WhyNot::Holes(KeptHoles::GivenBack) => "holes",
            WhyNot::Holes(KeptHoles::Watched) => "holes_userfaultfd",
            WhyNot::Holes(KeptHoles::HostShort) => "holes_host_short",
            WhyNot::SharedWatched => "shared_userfaultfd",
            WhyNot::Swapped => "swapped",
            WhyNot::UnderWay => "under_way",
            WhyNot::Merged => "merged",
            WhyNot::BackingOff(Refusal::NoHugePage) => "backing_off_no_huge_page",
            WhyNot::BackingOff(Refusal::Busy) => "backing_off_busy",
            WhyNot::BackingOff(Refusal::NotEligible) => "backing_off_not_eligible",
            WhyNot::BackingOff(Refusal::NotPermitted) => "backing_off_not_permitted",
            WhyNot::BackingOff(Refusal::NotObserved) => "backing_off_not_observed",
            WhyNot::BackingOff(Refusal::OutrunByWrites) => "backing_off_outrun_by_writes",
            WhyNot::BackingOff(Refusal::Merged) => "backing_off_merged",
            WhyNot::BackingOff(Refusal::Gone) => "backing_off_gone",
            WhyNot::BackingOff(Refusal::Other(_)) => "backing_off_other",
            WhyNot::StallBudgetSpent => "stall_budget_spent",
            WhyNot::BudgetSpent => "budget_spent",
            WhyNot::KeptSmall(KeptSmall::ZeroPages) => "split_for_zero_pages",
            WhyNot::KeptSmall(KeptSmall::Cold) => "split_when_cold",
            WhyNot::KeptSmall(KeptSmall::Vacated) => "vacated",
            WhyNot::KeptSmall(KeptSmall::NoneOnNode) => "no_huge_page_on_node",
            WhyNot::KeptSmall(KeptSmall::SharedByNodes) => "split_shared_by_nodes",
            WhyNot::GainsNothing => "gains_nothing",
            WhyNot::NotChosen => "not_chosen",
            WhyNot::Unmanaged => "unmanaged",
            WhyNot::ManagesItself => "manages_itself",
        }
    }
}

impl fmt::Display for CannotBeHuge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CannotBeHuge::Misaligned => {
                "its addresses in guest, process and file differ modulo 2 MiB, so that no large page fits: start the \
                 guest with memory that is aligned (memory-backend-ram, or memory-backend-file with align=2M)"
            }
            CannotBeHuge::Marked => {
                "its process forbids huge pages there (MADV_NOHUGEPAGE): start the guest without that mark, in QEMU \
                 with mem-merge and THP left at their defaults"
            }
            CannotBeHuge::Disabled => {
                "its process has huge pages switched off (PR_SET_THP_DISABLE): start it without, or with \
                 PR_THP_DISABLE_EXCEPT_ADVISED"
            }
            CannotBeHuge::OnDisk => "it is a file on a disk: start the guest with anonymous memory, or a file on tmpfs",
            CannotBeHuge::SharedStalls => {
                "it is shared memory, where collapsing a window stops the whole guest for 15 to 30 ms: allow it with \
                 collapse-shared, or start the guest with private memory"
            }
        })
    }
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyNot::CannotBeHuge(why) => return why.fmt(f),
            WhyNot::LeftAlone(why) => return write!(f, "the whole VM is left alone: {why}; retried after that"),
            WhyNot::BackingOff(refusal) => of_refusal(*refusal),
            WhyNot::NeverTouched => "none of it is present: the guest never touched it, or gave all of it back",
            WhyNot::Panicked => "an action on this VM failed by a defect of the manager: see its log, and report it",
            WhyNot::PolicyNeverPromotes => "the policy in force promotes nothing: choose another, for instance auto",
            WhyNot::Held => {
                "it is on a large page, but KVM maps it in base pages, since the manager's dirty log is on: the \
                 policy ends that"
            }
            WhyNot::HeldByOthers => {
                "another program has switched a dirty log on, perhaps a migration: mapped in base pages until that ends"
            }
            WhyNot::Holes(KeptHoles::GivenBack) => {
                "the guest gave pages of it back (balloon, free page reporting, virtio-mem), and a large page would \
                 occupy them again: it is promoted when the guest uses all of it"
            }
            WhyNot::Holes(KeptHoles::Watched) => {
                "pages of it are absent while a program provides them on demand (an open userfaultfd: a restore or a \
                 postcopy): it is promoted when all of them are there, or the userfaultfd is closed"
            }
            WhyNot::Holes(KeptHoles::HostShort) => {
                "pages of it are absent and the host is short of memory: it is promoted when the guest uses all of it, \
                 or the host has memory again"
            }
            WhyNot::SharedWatched => {
                "it is shared memory with an open userfaultfd, and after a collapse each page would have to be \
                 provided once more: retried after the userfaultfd is closed"
            }
            WhyNot::Swapped => {
                "more pages of it are swapped out than khugepaged would bring back for a large page \
                 (khugepaged/max_ptes_swap): it is promoted when the guest has used them again"
            }
            WhyNot::UnderWay => "it is part of a 1 GiB range that is being moved, which ends soon",
            WhyNot::Merged => {
                "pages of it are merged with equal ones (KSM), and a large page would undo that: switch merging off \
                 for this guest to have large pages"
            }
            WhyNot::StallBudgetSpent => {
                "it is shared memory, where collapsing a window stops the whole guest for 15 to 30 ms, and the guest \
                 is at work: collapsed when it idles, or when a hundredth of its time allows the stall"
            }
            WhyNot::BudgetSpent => {
                "the budget was spent before its turn: wait, or allow more copies per second or more CPU"
            }
            WhyNot::KeptSmall(KeptSmall::ZeroPages) => {
                "the host was short of memory, and its zero pages were worth more than its page walks: it is promoted \
                 when the guest uses enough of it"
            }
            WhyNot::KeptSmall(KeptSmall::Cold) => {
                "it was idle while the host was short of memory, and was split so that the kernel can reclaim single \
                 pages: it is promoted when the guest uses it again"
            }
            WhyNot::KeptSmall(KeptSmall::Vacated) => {
                "it was idle and gave its huge page to a window that saves more: it is promoted when the guest uses it \
                 again"
            }
            WhyNot::KeptSmall(KeptSmall::NoneOnNode) => {
                "the NUMA node where it is used has no free huge page, and one of another node would make it remote: \
                 it is promoted when that node has one"
            }
            WhyNot::KeptSmall(KeptSmall::SharedByNodes) => {
                "CPUs of several NUMA nodes touched its huge page so often that it was split: it is promoted when one \
                 node alone uses it"
            }
            WhyNot::GainsNothing => {
                "measured to gain nothing: the guest's own progress was the same after the first such windows became \
                 large; tried again after a pause"
            }
            WhyNot::NotChosen => "the policy expects no gain from it yet: it is little used, idle, or not yet due",
            WhyNot::Unmanaged => "this VM is not managed, and the kernel has not made it huge: run `wideleaf attach`",
            WhyNot::ManagesItself => "the VM's own manager has not made it huge: see the report of its `wideleaf run`",
        })
    }
}

const fn of_refusal(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::NoHugePage => {
            "no huge page was free: the host's memory is short or fragmented; retried when one is free, or within a \
             minute"
        }
        Refusal::Busy => {
            "a page of it was locked, pinned or moving, or the limit of a cgroup was reached: retried within a second"
        }
        Refusal::NotEligible => {
            "the kernel says that it cannot be huge (a mark, a hole, alignment): retried within a minute"
        }
        Refusal::NotPermitted => "the manager needs CAP_SYS_NICE and the right to read the process's memory",
        Refusal::NotObserved => "the kernel reported success and did nothing: retried within a second",
        Refusal::OutrunByWrites => "the guest wrote faster than the manager could copy: retried within 10 min",
        Refusal::Merged => "pages of it are merged with equal ones (KSM): checked again within a minute",
        Refusal::Gone => "the process has ended",
        Refusal::Other(_) => {
            "the kernel refused for a reason that wideleaf does not know, see the log: retried within a minute"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const REFUSALS: [Refusal; 9] = [
        Refusal::NoHugePage,
        Refusal::Busy,
        Refusal::NotEligible,
        Refusal::NotPermitted,
        Refusal::NotObserved,
        Refusal::OutrunByWrites,
        Refusal::Merged,
        Refusal::Gone,
        Refusal::Other(7),
    ];
    const LEFT_ALONE: [LeftAlone; 8] = [
        LeftAlone::GuestMemfd,
        LeftAlone::Migration,
        LeftAlone::DirtyRate,
        LeftAlone::Snapshot,
        LeftAlone::Pinned,
        LeftAlone::Encrypted,
        LeftAlone::NoAnswer,
        LeftAlone::Asked,
    ];
    const CANNOT: [CannotBeHuge; 5] = [
        CannotBeHuge::Misaligned,
        CannotBeHuge::Marked,
        CannotBeHuge::Disabled,
        CannotBeHuge::OnDisk,
        CannotBeHuge::SharedStalls,
    ];

    fn all() -> Vec<WhyNot> {
        let mut all = vec![
            WhyNot::NeverTouched,
            WhyNot::Panicked,
            WhyNot::PolicyNeverPromotes,
            WhyNot::Held,
            WhyNot::HeldByOthers,
            WhyNot::Holes(KeptHoles::GivenBack),
            WhyNot::Holes(KeptHoles::Watched),
            WhyNot::Holes(KeptHoles::HostShort),
            WhyNot::SharedWatched,
            WhyNot::Swapped,
            WhyNot::UnderWay,
            WhyNot::StallBudgetSpent,
            WhyNot::BudgetSpent,
            WhyNot::KeptSmall(KeptSmall::ZeroPages),
            WhyNot::KeptSmall(KeptSmall::Cold),
            WhyNot::KeptSmall(KeptSmall::Vacated),
            WhyNot::KeptSmall(KeptSmall::NoneOnNode),
            WhyNot::KeptSmall(KeptSmall::SharedByNodes),
            WhyNot::GainsNothing,
            WhyNot::NotChosen,
            WhyNot::Unmanaged,
            WhyNot::ManagesItself,
        ];
        all.extend(REFUSALS.map(WhyNot::backing_off));
        all.extend(LEFT_ALONE.map(WhyNot::LeftAlone));
        all.extend(CANNOT.map(WhyNot::CannotBeHuge));
        all
    }

    #[test]
    fn every_reason_has_a_name_and_a_sentence_of_its_own() {
        let (names, texts): (BTreeSet<_>, BTreeSet<_>) =
            all().into_iter().map(|why| (why.name(), why.to_string())).unzip();
        assert_eq!((names.len(), texts.len()), (all().len(), all().len()));
        assert!(names.contains("merged"), "a refusal for KSM is the same reason as merged pages: {names:?}");
    }
}
