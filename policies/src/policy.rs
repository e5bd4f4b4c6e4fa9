//! The contract of a policy, and the list of policies.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::action::Plan;
use crate::budget::Budget;
use crate::market::Bids;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::reservations::ReservationRules;
use crate::snapshot::{Snapshot, VmId, VmSnapshot};
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
    /// The name that selects the policy.
    fn name(&self) -> &'static str;

    /// Appends the actions that should be done now to `plan`. Takes the expected cost of each action from `budget`
    /// before naming it. Names only windows that are backed and ready (`ready_at` has come), each at most once. A giant
    /// is backed if any of its windows is.
    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan);

    /// Whether [`Policy::first_touch`] should be called. Each call costs a first touch one round trip, and
    /// needs a privilege that the host may not have (userfaultfd). Most policies leave it at `false` and
    /// plan over snapshots.
    fn decides_at_first_touch(&self) -> bool {
        false
    }

    /// The page size for the first touch of an unbacked window, if [`Policy::decides_at_first_touch`]. Called once
    /// a window, while a vCPU waits, and never while the policy plans or learns. The answer is a wish: 1 GiB becomes
    /// 2 MiB where the giant around the window was touched or no such page is available, and if no large page is
    /// available, the window gets base pages.
    fn first_touch(&mut self, _vm: VmId, _window: WindowIndex) -> PageSize {
        PageSize::Base4K
    }

    /// Rules for reserving frames, if windows are to be served from reserved frames. The thread that serves
    /// the faults keeps the [reservations](crate::reservations::Reservations); the policy is not asked
    /// about single pages.
    fn reserves(&self) -> Option<ReservationRules> {
        None
    }

    /// Whether the policy serves the guest's page faults at the touch instead of by a plan. It serves all faults
    /// from the guest's first on, or none.
    fn answers_faults(&self) -> bool {
        self.decides_at_first_touch() || self.reserves().is_some()
    }

    /// Columns that the policy uses beyond those that every snapshot has. Their sensors cost the guest something,
    /// so they run only for the policies that use them. On a host without the sensor the column stays empty.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Whether the policy would use a sample of the accesses to this row of `vm`, if it needs accesses. Each sample
    /// costs the guest a wait and faults, so windows that no access can change a decision about are not sampled.
    fn uses_access(&self, _vm: &VmSnapshot, _row: usize) -> bool {
        true
    }

    /// Whether the policy would use counts of zero pages now, if it needs them. They are read from guest memory, which
    /// costs CPU time.
    fn uses_zero(&self) -> bool {
        true
    }

    /// Whether a sample of this row of `vm` is worth more than the sensors' usual budget, since huge pages are short
    /// and it decides where one goes.
    fn hurries(&self, _vm: &VmSnapshot, _row: usize) -> bool {
        false
    }

    /// Whether promotions wait for a measurement, so that the next plan should come soon.
    fn is_measuring(&self) -> bool {
        false
    }

    /// Whether this row of `vm`, at `index` of the latest snapshot, is not promoted because such promotions were
    /// measured to gain the guest nothing.
    fn gains_nothing(&self, _index: usize, _vm: &VmSnapshot, _row: usize) -> bool {
        false
    }

    /// How guest RAM should start if the user does not say.
    fn ram_start(&self) -> RamStart {
        RamStart::OnBasePages
    }

    /// Whether the policy ever plans a promotion. A policy that does not leaves base pages as they are, for good.
    fn promotes(&self) -> bool {
        true
    }

    /// The largest page that the policy may ever request. A VM with giants that may be promoted is set up for that
    /// from the start: KVM maps no page larger than the memslot that holds it.
    fn largest_page(&self) -> PageSize {
        PageSize::Huge2M
    }

    /// Counters of the policy's own decisions, by name, for reports.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Why the window at `row` of this VM, which is on base pages and may be promoted, is kept there; `None` where the
    /// policy has no reason beyond its usual expectations. Rows are those of the latest plan.
    fn why_small(&self, _vm: VmId, _row: usize) -> Option<KeptSmall> {
        None
    }

    /// Takes this machine's cost of a TLB miss, before the first plan. Until then the policy uses the prior.
    fn take_walk_cost(&mut self, _cost: &WalkCost) {}

    /// Bids for huge pages as of the latest plan, over all VMs; `None` while the host has plenty of them
    /// ([`HugePages`](crate::snapshot::HugePages)), and from a policy that does not weigh windows by benefit.
    fn bids(&self) -> Option<&Bids> {
        None
    }

    /// Receives the outcome of an action that it planned.
    fn learn(&mut self, _outcome: &Outcome) {}
}

/// Sensor data that a policy uses beside the host backing; see [`crate::VmSnapshot`] for the columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Accesses to the windows.
    pub access: bool,
    /// Pages that hold only zeroes.
    pub zero: bool,
    /// Pages written in an interval. This is the most expensive sensor: while it runs, the guest uses 4 KiB
    /// mappings there, and the first write to each page is a fault.
    pub written: bool,
    /// Page sizes that the guest itself uses.
    pub guest_mapping: bool,
    /// Memory of the host.
    pub host_memory: bool,
    /// Readings of the guest's own progress. They cost nothing; a policy without them assumes what it would measure.
    pub progress: bool,
}

/// Reason why a policy keeps a window on base pages until its accesses prove that a huge page pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeptSmall {
    /// Its huge page was split for its zero pages, while the host was short of memory.
    ZeroPages,
    /// It was cold while the host was short of memory, and was split so that the kernel can reclaim single pages.
    Cold,
    /// It gave its huge page to a window that saves more.
    Vacated,
    /// The NUMA node that uses it has no huge page, and a page of another node would make its memory remote.
    NoneOnNode,
    /// Several NUMA nodes touched its huge page so often that it was split.
    SharedByNodes,
}

/// Starting state of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamStart {
    /// On base pages, as the guest touches it.
    OnBasePages,
    /// On 2 MiB pages, all of them present before the guest runs.
    HugeAndPrefaulted,
    /// On base pages, of RAM with frames that can be reserved 2 MiB at a time and mapped one by one: memfd RAM that
    /// no other process shares.
    OnReservableFrames,
}

/// One entry of the list of policies.
pub struct PolicyInfo {
    /// Name that selects the policy.
    pub name: &'static str,
    /// What the policy does, in one line.
    pub summary: &'static str,
    /// Parameters that a user may set.
    pub parameters: &'static [ParameterInfo],
    /// Constructor from a set of parameters.
    pub make: fn(&Parameters) -> Box<dyn Policy>,
}

impl PolicyInfo {
    /// Makes a policy with the default parameters.
    pub fn with_defaults(&self) -> Box<dyn Policy> {
        (self.make)(&Parameters::defaults(self.parameters))
    }
}

/// List of all policies.
pub const POLICIES: &[PolicyInfo] = &[
    PolicyInfo {
        name: "never",
        summary: "base pages only: the manager promotes no window",
        parameters: &[],
        make: |_| Box::new(Never),
    },
    PolicyInfo {
        name: "prealloc",
        summary: "2 MiB pages, all present before the guest runs; no promotion afterwards",
        parameters: &[],
        make: |_| Box::new(Prealloc),
    },
    PolicyInfo {
        name: "at-fault",
        summary: "a 2 MiB page (giant=1: 1 GiB) at the first touch if one is free; no promotion afterwards",
        parameters: at_fault::PARAMETERS,
        make: |parameters| Box::new(AtFault::new(parameters)),
    },
    PolicyInfo {
        name: "greedy",
        summary: "promotes every window that has a page present to 2 MiB, as fast as the budget allows",
        parameters: &[],
        make: |_| Box::new(Greedy::default()),
    },
    PolicyInfo {
        name: "reservation",
        summary: "reserves 2 MiB of frames at the first touch of a window; promotes in place once they are populated",
        parameters: reservation::PARAMETERS,
        make: |parameters| Box::new(Reservation::new(parameters)),
    },
    PolicyInfo {
        name: "thp",
        summary: "khugepaged's rule and pace: some windows each wake-up, in address order",
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
        summary: "promotes the most accessed windows first; releases zero pages when host memory gets short",
        parameters: coverage::PARAMETERS,
        make: |parameters| Box::new(Coverage::new(parameters)),
    },
    PolicyInfo {
        name: "aligned",
        summary: "promotes first where the guest's own page is large; splits the others when host memory gets short",
        parameters: aligned::PARAMETERS,
        make: |parameters| Box::new(Aligned::new(parameters)),
    },
    PolicyInfo {
        name: "schemes",
        summary: "rules of size, access rate and age; the default rules promote used windows and demote idle ones",
        parameters: schemes::PARAMETERS,
        make: |parameters| Box::new(Schemes::new(parameters)),
    },
    PolicyInfo {
        name: "giant",
        summary: "1 GiB pages where the host has them, then 2 MiB pages",
        parameters: giant::PARAMETERS,
        make: |parameters| Box::new(Giant::new(parameters)),
    },
    PolicyInfo {
        name: "auto",
        summary: "promotes where the cycles saved in page walks pay for the cost; reports how its decisions turned out",
        parameters: auto::PARAMETERS,
        make: |parameters| Box::new(Auto::new(parameters)),
    },
];

/// Number of windows of a giant.
const WINDOWS_PER_GIANT: usize = 512;

/// The rows from `first` on that lie in the same giant.
fn rows_of_giant(vm: &VmSnapshot, first: usize) -> core::ops::Range<usize> {
    let giant = vm.windows[first].giant();
    let longest = &vm.windows[first..vm.len().min(first + WINDOWS_PER_GIANT)];
    first..first + longest.partition_point(|window| window.giant() == giant)
}

/// The policy with that name.
pub fn by_name(name: &str) -> Option<&'static PolicyInfo> {
    POLICIES.iter().find(|policy| policy.name == name)
}
