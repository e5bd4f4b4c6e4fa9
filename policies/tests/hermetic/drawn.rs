//! Small drawn cases for tests of policies, and a policy that plans for them.
//!
//! One character is one window, from window 0 on:
//!
//! ```text
//!   .  no page present        f  full, base pages        H  huge page        h  huge page, held at 4 KiB
//!   s  1 page present         n  460 pages present       m  256 present      q  64 present
//! ```

use std::time::Duration;

use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    AccessHistory, Action, Backing, Budget, BudgetLimits, Cost, HostMemory, Moment, Outcome, OutcomeResult, PageSize,
    PerTenThousand, Plan, Policy, PolicyChoice, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

pub(crate) fn seconds(n: u64) -> Moment {
    Moment::after_start(Duration::from_secs(n))
}

pub(crate) fn row(window: u64, drawn: char) -> WindowRow {
    let (resident, backing, is_held) = match drawn {
        '.' => (0, Backing::Unbacked, false),
        's' => (1, Backing::Base4K, false),
        'q' => (64, Backing::Base4K, false),
        'm' => (256, Backing::Base4K, false),
        'n' => (460, Backing::Base4K, false),
        'f' => (512, Backing::Base4K, false),
        'H' => (512, Backing::Huge2M, false),
        'h' => (512, Backing::Huge2M, true),
        other => panic!("{other} is not drawn above"),
    };
    WindowRow { is_held, ..WindowRow::new(WindowIndex::new(window), resident, backing) }
}

/// A VM as drawn; `change` adjusts each row.
pub(crate) fn vm_with(id: u32, drawn: &str, change: impl Fn(usize, &mut WindowRow)) -> VmSnapshot {
    let mut vm = VmSnapshot::with_capacity(VmId(id), drawn.len());
    for (at, window) in drawn.chars().enumerate() {
        let mut row = row(at as u64, window);
        change(at, &mut row);
        vm.push(row);
    }
    vm
}

pub(crate) fn vm(id: u32, drawn: &str) -> VmSnapshot {
    vm_with(id, drawn, |_, _| {})
}

pub(crate) fn of(vms: Vec<VmSnapshot>) -> Snapshot {
    Snapshot { host: None, vms }
}

/// A host with 100 GiB, of which `gibibytes` are in use.
pub(crate) fn used(gibibytes: u64) -> Option<HostMemory> {
    Some(HostMemory { total: gib(100), available: gib(100 - gibibytes), giant_pages_free: 0, ..HostMemory::default() })
}

/// Samples as drawn, the oldest first: `x` touched, `-` not.
pub(crate) fn samples(drawn: &str) -> AccessHistory {
    drawn.chars().fold(AccessHistory::default(), |history, sample| history.with(sample == 'x'))
}

pub(crate) const PLENTY: BudgetLimits =
    BudgetLimits { copy_per_second: gib(64), cpu_share: PerTenThousand::new(1_000_000), burst: Duration::from_secs(1) };

/// A policy, of which a test reads the plans.
pub(crate) struct Desk(pub(crate) Box<dyn Policy>);

impl Desk {
    pub(crate) fn new(choice: &str) -> Desk {
        Desk(PolicyChoice::parse(choice).expect("a policy").make())
    }

    pub(crate) fn plan_within(&mut self, snapshot: &Snapshot, now: Moment, limits: BudgetLimits) -> Vec<Action> {
        let mut plan = Plan::default();
        self.0.plan(snapshot, now, &mut Budget::new(limits, now), &mut plan);
        plan.actions().iter().map(|planned| planned.action).collect()
    }

    pub(crate) fn plan(&mut self, snapshot: &Snapshot, now: Moment) -> Vec<Action> {
        self.plan_within(snapshot, now, PLENTY)
    }

    /// VM and window of each promotion; the plan may contain no other action.
    pub(crate) fn promotions(&mut self, snapshot: &Snapshot, now: Moment) -> Vec<(u32, u64)> {
        let promotion = |action| match action {
            Action::Promote { vm, window, to: PageSize::Huge2M } => (vm.0, window.get()),
            other => panic!("{other:?} is not a promotion to 2 MiB"),
        };
        self.plan(snapshot, now).into_iter().map(promotion).collect()
    }

    pub(crate) fn hears(&mut self, action: Action, at: Moment, result: OutcomeResult) {
        let cost = Cost { copied: mib(2), cpu: Duration::from_micros(560) };
        self.0.learn(&Outcome { action, at, cost, unavailable: cost.cpu, result });
    }

    pub(crate) fn figure(&self, name: &str) -> u64 {
        self.0.figures().into_iter().find(|(known, _)| *known == name).expect("it counts that").1
    }
}

pub(crate) fn promote(window: u64) -> Action {
    Action::Promote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Huge2M }
}

pub(crate) const HOT: &str = "xxxxxxxxxxxxxxxx";
pub(crate) const IDLE: &str = "----------------";

/// Under this choice only a full window is promoted without proof.
pub(crate) const PROOF: &str = "auto:resident_min=100";
