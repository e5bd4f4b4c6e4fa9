//! The contract of a policy, and the list of them.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::action::Plan;
use crate::budget::Budget;
use crate::outcome::Outcome;
use crate::parameters::{ParameterInfo, Parameters};
use crate::reservations::ReservationRules;
use crate::snapshot::{Snapshot, VmId};
use crate::units::{Moment, PageSize, WindowIndex};
use crate::walk::cost::WalkCost;

mod aligned;
mod at_fault;
mod auto;
mod coverage;
mod giant;
mod greedy;
mod never;
mod prealloc;
mod reservation;
mod schemes;
mod thp;
mod utilization;

pub use aligned::Aligned;
pub use at_fault::AtFault;
pub use auto::Auto;
pub use coverage::Coverage;
pub use giant::Giant;
pub use greedy::Greedy;
pub use never::Never;
pub use prealloc::Prealloc;
pub use reservation::Reservation;
pub use schemes::Schemes;
pub use thp::Thp;
pub use utilization::Utilization;

/// Decides which windows should be large. One value decides for all VMs of the host.
pub trait Policy: Send {
    /// The name it is chosen by.
    fn name(&self) -> &'static str;

    /// Appends to `plan` what should be done now. Takes from `budget` what each action is expected to cost before
    /// naming it, names only windows that are backed and whose `ready_at` has come, each at most once.
    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan);

    /// Whether [`Policy::first_touch`] should be asked. Asking costs every first touch a round trip, and a privilege
    /// the host may not have (userfaultfd): most policies leave it at `false` and plan over snapshots.
    fn decides_at_first_touch(&self) -> bool {
        false
    }

    /// With which page the first touch of an unbacked window should be answered, where
    /// [`Policy::decides_at_first_touch`]. Asked once a window, while a vCPU waits; never while the policy plans or
    /// learns. The answer is a wish: base pages are what is there if no large page is to be had.
    fn first_touch(&mut self, _vm: VmId, _window: WindowIndex) -> PageSize {
        PageSize::Base4K
    }

    /// By which rules frames are reserved, where windows are to be served from reserved frames. Whoever serves the faults
    /// keeps the [book](crate::reservations::Reservations); the policy is not asked about single pages.
    fn reserves(&self) -> Option<ReservationRules> {
        None
    }

    /// Whether the guest's faults are answered for it, at the touch and not by a plan: it has them all from the guest's first on, or none.
    fn answers_faults(&self) -> bool {
        self.decides_at_first_touch() || self.reserves().is_some()
    }

    /// Which columns of the snapshot it uses beyond those that every snapshot has. Their sensors cost the guest something,
    /// so they run only for who asks. On a host without one the column stays empty.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// How guest RAM should start where the user does not say.
    fn ram_start(&self) -> RamStart {
        RamStart::OnBasePages
    }

    /// Whether it ever plans a promotion. One that does not leaves base pages as they are, for good.
    fn promotes(&self) -> bool {
        true
    }

    /// The largest page it may ever ask for. A VM whose giants may be promoted is set up for that from the start: KVM maps
    /// no page larger than the memslot that holds it.
    fn largest_page(&self) -> PageSize {
        PageSize::Huge2M
    }

    /// What it counted of its own decisions, by name, for reports.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Takes what a TLB miss costs on this machine, before the first plan. Until then the prior holds.
    fn take_walk_cost(&mut self, _cost: &WalkCost) {}

    /// Hears what became of an action it planned.
    fn learn(&mut self, _outcome: &Outcome) {}
}

/// What a policy wants to see beside the host backing; see [`crate::VmSnapshot`] for the columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Whether windows are used.
    pub access: bool,
    /// Pages that hold only zeroes.
    pub zero: bool,
    /// Pages written in an interval. The dearest: meanwhile the guest runs on 4 KiB mappings there, and the first write to
    /// each page is a fault.
    pub written: bool,
    /// The guest's own page sizes.
    pub guest_mapping: bool,
    /// The host's memory.
    pub host_memory: bool,
}

/// How guest RAM starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamStart {
    /// On base pages, as the guest touches it.
    OnBasePages,
    /// On 2 MiB pages, all of them there before the guest runs.
    HugeAndPrefaulted,
    /// On base pages, of RAM whose frames can be set aside 2 MiB at a time and mapped one by one: memfd RAM that is nobody
    /// else's.
    OnReservableFrames,
}

/// One line of the list of policies.
pub struct PolicyInfo {
    /// The name to choose it by.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// What may be set.
    pub parameters: &'static [ParameterInfo],
    /// Makes one.
    pub make: fn(&Parameters) -> Box<dyn Policy>,
}

impl PolicyInfo {
    /// Makes one with the default parameters.
    pub fn with_defaults(&self) -> Box<dyn Policy> {
        (self.make)(&Parameters::defaults(self.parameters))
    }
}

/// Every policy there is.
pub const POLICIES: &[PolicyInfo] = &[
    PolicyInfo {
        name: "never",
        summary: "base pages only: nothing is promoted",
        parameters: &[],
        make: |_| Box::new(Never),
    },
    PolicyInfo {
        name: "prealloc",
        summary: "2 MiB pages, all there before the guest runs; nothing afterwards",
        parameters: &[],
        make: |_| Box::new(Prealloc),
    },
    PolicyInfo {
        name: "at-fault",
        summary: "a 2 MiB page at the first touch of a window if one is free; nothing afterwards",
        parameters: &[],
        make: |_| Box::new(AtFault),
    },
    PolicyInfo {
        name: "greedy",
        summary: "promotes every window that has a page present to 2 MiB, as fast as the budget allows",
        parameters: &[],
        make: |_| Box::new(Greedy::default()),
    },
    PolicyInfo {
        name: "reservation",
        summary: "sets 2 MiB of frames aside at the first touch of a window; large in place once they are populated",
        parameters: reservation::PARAMETERS,
        make: |parameters| Box::new(Reservation::new(parameters)),
    },
    PolicyInfo {
        name: "thp",
        summary: "khugepaged's rule and pace: some windows a wake, in address order",
        parameters: thp::PARAMETERS,
        make: |parameters| Box::new(Thp::new(parameters)),
    },
    PolicyInfo {
        name: "utilization",
        summary: "promotes windows that are nearly full, each VM's share taxed by how idle it is",
        parameters: utilization::PARAMETERS,
        make: |parameters| Box::new(Utilization::new(parameters)),
    },
    PolicyInfo {
        name: "coverage",
        summary: "promotes the most accessed windows first; takes zero pages back when the host gets short",
        parameters: coverage::PARAMETERS,
        make: |parameters| Box::new(Coverage::new(parameters)),
    },
    PolicyInfo {
        name: "aligned",
        summary: "promotes where the guest's own page is large first; splits where it is not when the host gets short",
        parameters: aligned::PARAMETERS,
        make: |parameters| Box::new(Aligned::new(parameters)),
    },
    PolicyInfo {
        name: "schemes",
        summary: "rules of size, access rate and age; the default rules promote what is used and demote what is idle",
        parameters: schemes::PARAMETERS,
        make: |parameters| Box::new(Schemes::new(parameters)),
    },
    PolicyInfo {
        name: "giant",
        summary: "1 GiB pages where a whole giant can be had, then 2 MiB",
        parameters: giant::PARAMETERS,
        make: |parameters| Box::new(Giant::new(parameters)),
    },
    PolicyInfo {
        name: "auto",
        summary: "promotes where the cycles saved in walks pay for it; keeps score of its own decisions",
        parameters: auto::PARAMETERS,
        make: |parameters| Box::new(Auto::new(parameters)),
    },
];

/// The policy of that name.
pub fn by_name(name: &str) -> Option<&'static PolicyInfo> {
    POLICIES.iter().find(|policy| policy.name == name)
}
