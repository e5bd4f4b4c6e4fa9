//! Why a window is not huge: one reason for each window that is not, the strongest of those it has.
//!
//! ```text
//!   for ever       can not be huge ─▶ never touched ─▶
//!   the VM         panicked ─▶ left alone ─▶ policy never promotes ─▶
//!   the window     held ─▶ holes ─▶ under way ─▶ backing off ─▶
//!   the decision   budget ─▶ not chosen; where one only looks: manages itself ─▶ unmanaged
//! ```

use std::fmt;

use wideleaf_policies::{GpaRange, Refusal};

use crate::gate::LeftAlone;

/// Why no window of a part of guest RAM can ever be huge, as far as whoever runs the guest leaves it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CannotBeHuge {
    /// Guest-physical address, address in the process and offset in the file are not equal modulo 2 MiB.
    Misaligned,
    /// Its process marked it `MADV_NOHUGEPAGE`.
    Marked,
    /// Its process switched huge pages off for itself (`PR_SET_THP_DISABLE`).
    Disabled,
    /// It is a file on a disk.
    OnDisk,
    /// It is shared memory, and to collapse a window of that stops the whole guest for 15 to 30 ms: nobody asked for it.
    SharedStalls,
}

/// A part of guest RAM that can never be huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barred {
    /// Which part.
    pub range: GpaRange,
    /// Why.
    pub why: CannotBeHuge,
}

/// Why a window is not huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WhyNot {
    /// Whatever anybody does.
    CannotBeHuge(CannotBeHuge),
    /// Nothing of it is present.
    NeverTouched,
    /// An action on its VM panicked.
    Panicked,
    /// Its whole VM is left alone.
    LeftAlone(LeftAlone),
    /// The policy in force promotes nothing.
    PolicyNeverPromotes,
    /// It is on a large page that KVM maps in base pages: a dirty log of ours holds it there.
    Held,
    /// A dirty log that somebody else switched on holds its memslot.
    HeldByOthers,
    /// The guest gave pages of it back, and is not to get them again.
    Holes,
    /// It is part of a giant that is being moved.
    UnderWay,
    /// Its pages are merged with equal ones (KSM).
    Merged,
    /// It was tried, and the kernel refused; for want of a huge page, it or another window.
    BackingOff(Refusal),
    /// The budget was spent when the policy came to it, or before it would have chosen it.
    BudgetSpent,
    /// The policy has not chosen it.
    NotChosen,
    /// Nobody manages its VM.
    Unmanaged,
    /// Its VM is managed by its own process, which knows why.
    ManagesItself,
}

impl CannotBeHuge {
    /// The name in reports and metrics.
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
    /// What is to be said of a window that backs off after this refusal.
    pub const fn backing_off(refusal: Refusal) -> WhyNot {
        match refusal {
            Refusal::Merged => WhyNot::Merged,
            other => WhyNot::BackingOff(other),
        }
    }

    /// The name in reports and metrics.
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
            WhyNot::PolicyNeverPromotes => "policy_never_promotes",
            WhyNot::Held => "held",
            WhyNot::HeldByOthers => "held_by_others",
            WhyNot::Holes => "holes",
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
            WhyNot::BudgetSpent => "budget_spent",
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
                "addresses in guest, process and file differ modulo 2 MiB, so that no large page fits: start the guest with \
                 memory that is aligned (memory-backend-ram, or memory-backend-file with align=2M)"
            }
            CannotBeHuge::Marked => {
                "its process forbids huge pages there (MADV_NOHUGEPAGE): start the guest without that, in QEMU with mem-merge \
                 and THP left at their defaults"
            }
            CannotBeHuge::Disabled => {
                "its process has huge pages switched off (PR_SET_THP_DISABLE): start it without, or with \
                 PR_THP_DISABLE_EXCEPT_ADVISED"
            }
            CannotBeHuge::OnDisk => "it is a file on a disk: start the guest with anonymous memory, or a file on a tmpfs",
            CannotBeHuge::SharedStalls => {
                "it is shared memory, and each window that is collapsed stops the whole guest for 15 to 30 ms: allow it with \
                 collapse-shared, or start the guest with private memory"
            }
        })
    }
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyNot::CannotBeHuge(why) => return why.fmt(f),
            WhyNot::LeftAlone(why) => return write!(f, "the whole VM is left alone: {why}; tried again when that is over"),
            WhyNot::BackingOff(refusal) => of_refusal(*refusal),
            WhyNot::NeverTouched => "nothing of it is present: the guest never touched it, or gave all of it back",
            WhyNot::Panicked => "an action on this VM failed by a mistake of the manager's: see its log, and report it",
            WhyNot::PolicyNeverPromotes => "the policy in force promotes nothing: choose another, auto for instance",
            WhyNot::Held => {
                "it is on a large page, and KVM maps it in base pages under a dirty log of the manager's: the policy lifts it"
            }
            WhyNot::HeldByOthers => {
                "somebody else has a dirty log switched on, a migration perhaps: mapped in base pages until that is over"
            }
            WhyNot::Holes => {
                "the guest gave pages of it back (balloon, free page reporting, virtio-mem), and a large page would take them \
                 again: it is promoted when the guest uses all of it"
            }
            WhyNot::UnderWay => "it is part of a giant that is being moved: over in a moment",
            WhyNot::Merged => {
                "pages of it are merged with equal ones (KSM), and a large page would undo that: switch merging off for this \
                 guest to have large pages"
            }
            WhyNot::BudgetSpent => {
                "the budget was spent before its turn came: wait, or allow more copies per second or more CPU"
            }
            WhyNot::NotChosen => "the policy sees no gain in it yet: it is small, idle, or its turn has not come",
            WhyNot::Unmanaged => "nobody manages this VM, and the kernel has not made it huge: `wideleaf attach` would",
            WhyNot::ManagesItself => "its own manager has not made it huge: the report of `wideleaf run` says why",
        })
    }
}

const fn of_refusal(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::NoHugePage => {
            "no free huge page was to be had: the host's memory is short or fragmented; tried again when one is free, or within a minute"
        }
        Refusal::Busy => {
            "a page of it was locked, pinned or moving, or the limit of a cgroup was met: tried again within a second"
        }
        Refusal::NotEligible => {
            "the kernel says it can not be huge (a mark, a hole, alignment): tried again within a minute"
        }
        Refusal::NotPermitted => "the manager may not: it needs CAP_SYS_NICE and leave to read the process's memory",
        Refusal::NotObserved => "the kernel said yes and did nothing: tried again within a second",
        Refusal::OutrunByWrites => "the guest wrote faster than it could be copied: tried again within 10 s",
        Refusal::Merged => "pages of it are merged with equal ones (KSM): looked at again within a minute",
        Refusal::Gone => "the process has ended",
        Refusal::Other(_) => {
            "the kernel refused for a reason that is not foreseen, see the log: tried again within a minute"
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
    const LEFT_ALONE: [LeftAlone; 7] = [
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
            WhyNot::Holes,
            WhyNot::UnderWay,
            WhyNot::BudgetSpent,
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

    #[test]
    fn a_vm_that_is_left_alone_is_named_as_its_gate_names_it() {
        for why in LEFT_ALONE {
            assert_eq!(WhyNot::LeftAlone(why).name().strip_prefix("left_alone_"), Some(why.name()));
        }
    }
}
