//! A policy at work on a stream of accesses: a guest with one arena on a simulated host, under the loop of
//! a live manager.
//!
//! ```text
//!   access ──▶ host: is its page present? ─no──▶ first touch: the policy, reserved frames, or a base page ──┐
//!     │                                                                                                     ▼
//!     │  every `interval` of simulated time                                                    Mmu::remap_host
//!     ▼                                                                                                     ▲
//!   snapshot ──▶ Policy::plan within the budget ──▶ actions ──▶ outcomes ──▶ settle, learn ─────────────────┘
//! ```
//!
//! The policy is the one that runs on a live host, unchanged. It sees what sensors would report:
//! - the pages that are present, from the first touch on;
//! - for some windows at a time, whether they were touched within an interval, and how soon
//!   ([`wideleaf_policies::rotation`]);
//! - the pages that hold only zeroes, which here are those that only a large page added;
//! - the guest's page size, and the host's memory;
//! - the NUMA node of each window, and free blocks by node, if the host has two nodes.
//!
//! Columns that the policy does not request stay empty, as on a live host.
//!
//! Time is the number of accesses times a constant, the same on every machine and under every policy. So a policy
//! decides alike on all machines, and they differ only in their TLBs. Actions take budget but none of the guest's
//! time, because a live manager works beside the guest. RAM is anonymous, so a demotion is a split; no window is
//! held at 4 KiB. Other features of the live loop (waiting longer while idle, sampling more often in a burst) are
//! left out: all intervals have the same length, and a sample covers 64 windows.

use alloc::boxed::Box;
use core::time::Duration;

use crate::Simulator;
use crate::replay::{Costs, Tally};
use wideleaf_policies::action::Plan;
use wideleaf_policies::budget::{Budget, BudgetLimits};
use wideleaf_policies::policy::Policy;
use wideleaf_policies::snapshot::GuestMapping;
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, WindowIndex};

mod access_samples;
mod history;
mod host;
mod nodes;

pub use history::{History, HistorySample};
pub use nodes::LocalNode;

use host::StreamHost;

/// The unit that translates addresses. The host reports to it every page that is not a base page.
pub trait Mmu {
    /// The host maps that window with a page of this size. No translation of it is cached: it was unmapped, or
    /// they were just dropped.
    fn map_host(&mut self, window: WindowIndex, to: PageSize);

    /// The host changes the page of that window to this size; for 1 GiB, the page of its whole giant. Cached
    /// translations of the old page are dropped.
    fn remap_host(&mut self, window: WindowIndex, to: PageSize);

    /// The memory of that window lies on the thread's NUMA node or on another, from now on. A unit without nodes has
    /// nothing to do.
    fn put_on_node(&mut self, _window: WindowIndex, _is_remote: bool) {}

    /// Number of TLB misses to date, for the history.
    fn misses(&self) -> u64;
}

/// A native process has one level of page tables, so changes to a guest's RAM on the host apply to that level.
impl Mmu for Simulator {
    fn map_host(&mut self, window: WindowIndex, to: PageSize) {
        match self.space().is_nested() {
            true => Simulator::map_host(self, window, to),
            false => self.map_guest(window, to),
        }
    }

    fn remap_host(&mut self, window: WindowIndex, to: PageSize) {
        match self.space().is_nested() {
            true => Simulator::remap_host(self, window, to),
            false => self.remap_guest(window, to),
        }
    }

    fn put_on_node(&mut self, window: WindowIndex, is_remote: bool) {
        Simulator::put_on_node(self, window, is_remote);
    }

    fn misses(&self) -> u64 {
        self.counts().data_misses()
    }
}

/// Number of cycles in a microsecond: 2 GHz on all machines, as CBMM (ATC '22) counts.
const CYCLES_PER_MICROSECOND: u64 = 2_000;

/// Speed of simulated time: the number of cycles per access at 2 GHz, walks included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Number of cycles from one access to the next. A higher number lets a short stream stand for a long one.
    pub cycles_per_access: u64,
}

impl Default for Clock {
    /// Most accesses hit the first cache and take a cycle or less; a few go to memory and take hundreds. The guests
    /// of the demo make 88 million updates per second, each one access to the table: 23 cycles at 2 GHz. Loops over
    /// arrays come closer to one. This default lies between them; it affects only the time that policies have.
    fn default() -> Clock {
        Clock { cycles_per_access: 4 }
    }
}

impl Clock {
    /// The moment at which that number of accesses has completed.
    pub fn moment(self, accesses: u64) -> Moment {
        let nanoseconds = u128::from(accesses) * u128::from(self.cycles_per_access) * 1000;
        let nanoseconds = nanoseconds / u128::from(CYCLES_PER_MICROSECOND);
        Moment::after_start(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }

    /// The smallest number of accesses that ends at or after `moment`.
    fn accesses_until(self, moment: Moment) -> u64 {
        let cycles = moment.since_start().as_nanos() * u128::from(CYCLES_PER_MICROSECOND) / 1000;
        u64::try_from(cycles.div_ceil(u128::from(self.cycles_per_access.max(1)))).unwrap_or(u64::MAX)
    }
}

/// Configuration of the simulated host.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// Size of the guest's arena; all accesses are below it.
    pub arena: Bytes,
    /// Page size of the guest's own tables.
    pub guest_page: PageSize,
    /// Size of the host's memory.
    pub memory: Bytes,
    /// Number of giant pages available.
    pub giant_pages: u64,
    /// Number of free blocks of 2 MiB. A huge page takes one, and a window that is vacated gives one back.
    pub huge_pages: u64,
    /// The thread's NUMA node, of two; `None`: the host has one node. With two of them there is no giant page, and
    /// `huge_pages` are those of the other node.
    pub local_node: Option<LocalNode>,
    /// Speed of simulated time.
    pub clock: Clock,
    /// Time between two plans.
    pub interval: Duration,
    /// Budget of the manager.
    pub limits: BudgetLimits,
    /// Costs of the actions.
    pub costs: Costs,
}

impl HostConfig {
    /// A host with twice the memory that the guest could use, so that it is never short, also of free blocks of 2 MiB.
    /// It has no giant page, and uses the manager's own interval and budget.
    pub fn new(arena: Bytes, guest_page: PageSize) -> HostConfig {
        HostConfig {
            arena,
            guest_page,
            memory: PageSize::Huge2M.bytes() * (2 * windows_of(arena)),
            giant_pages: 0,
            huge_pages: u64::MAX,
            local_node: None,
            clock: Clock::default(),
            interval: Duration::from_millis(10),
            limits: BudgetLimits::default(),
            costs: Costs::default(),
        }
    }
}

/// Number of windows that an arena of that length covers.
pub fn windows_of(arena: Bytes) -> u64 {
    arena.get().div_ceil(PageSize::Huge2M.bytes().get())
}

/// A policy, the host that it manages, and the results.
pub struct Managed {
    config: HostConfig,
    policy: Box<dyn Policy>,
    host: StreamHost,
    budget: Budget,
    plan: Plan,
    tally: Tally,
    history: History,
    accesses: u64,
    next_plan: u64,
    plans: u64,
}

impl Managed {
    /// A host before the guest's first access, with RAM in the starting state that the policy requests.
    pub fn new(config: HostConfig, policy: Box<dyn Policy>, mmu: &mut dyn Mmu) -> Managed {
        let host = StreamHost::new(&config, policy.as_ref(), mmu);
        let mut managed = Managed {
            budget: Budget::new(config.limits, Moment::START),
            config,
            policy,
            host,
            plan: Plan::default(),
            tally: Tally::default(),
            history: History::default(),
            accesses: 0,
            next_plan: 0,
            plans: 0,
        };
        managed.schedule();
        managed
    }

    /// Records that the guest accesses `address`, `times` in a row. Call it before the access is translated.
    ///
    /// # Panics
    /// If the address is not in the arena.
    #[inline]
    pub fn access(&mut self, address: u64, times: u32, mmu: &mut dyn Mmu) {
        if self.host.needs_attention(address) {
            let now = self.config.clock.moment(self.accesses);
            self.host.touch(address, now, self.policy.as_mut(), &mut self.tally, mmu);
        }
        self.accesses += u64::from(times);
        if self.accesses >= self.next_plan {
            self.interval_is_over(mmu);
        }
    }

    /// Ends the stream: takes the last snapshot, on which the policy does not decide.
    pub fn end(&mut self, mmu: &dyn Mmu) {
        let now = self.config.clock.moment(self.accesses);
        let seen = self.host.snapshot(self.policy.needs());
        self.tally.observe(now, &seen);
        self.history.push_last(self.host.sample(now, self.accesses, mmu.misses()));
    }

    /// What the policy did, and the results.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// How the run developed over time.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Number of plans that the policy made.
    pub fn plans(&self) -> u64 {
        self.plans
    }

    /// The policy, for its figures.
    pub fn policy(&self) -> &dyn Policy {
        self.policy.as_ref()
    }

    fn interval_is_over(&mut self, mmu: &mut dyn Mmu) {
        let now = self.config.clock.moment(self.accesses);
        self.host.finish_look(now);
        self.host.break_reservations(&mut self.tally);
        let seen = self.host.snapshot(self.policy.needs());
        self.tally.observe(now, &seen);
        self.budget.refill(now);
        self.plan.clear();
        self.policy.plan(&seen, now, &mut self.budget, &mut self.plan);
        let mut clock = now;
        for planned in self.plan.actions() {
            let outcome = self.host.act(planned, &seen, clock, mmu);
            clock = outcome.at;
            self.budget.settle(planned.cost, outcome.cost);
            self.tally.count(&outcome, &seen);
            self.policy.learn(&outcome);
        }
        self.tally.budget_refusals = Some(self.budget.refusals());
        self.plans += 1;
        if self.policy.needs().access {
            self.host.start_look(now);
        }
        self.history.push(self.host.sample(now, self.accesses, mmu.misses()));
        self.schedule();
    }

    fn schedule(&mut self) {
        let due = self.config.clock.moment(self.accesses) + self.config.interval;
        self.next_plan = self.config.clock.accesses_until(due).max(self.accesses + 1);
    }
}

/// The guest mapping reported for a window that the guest's own tables map with that size.
const fn guest_mapping(page: PageSize) -> GuestMapping {
    match page {
        PageSize::Base4K => GuestMapping::Base4K,
        PageSize::Huge2M => GuestMapping::Huge2M,
        PageSize::Giant1G => GuestMapping::Giant1G,
    }
}

const _: () = assert!(BASE_PAGES_PER_WINDOW == 512, "a window's pages are eight words of bits");
