//! A policy at work on a stream of accesses: a guest of one arena on a simulated host, under the loop of a live manager.
//!
//! ```text
//!   access ──▶ host: is its page there?  ──no──▶ first touch: the policy, reserved frames, or a base page ──┐
//!     │                                                                                                     ▼
//!     │  every `interval` of simulated time                                                    Mmu::remap_host
//!     ▼                                                                                                     ▲
//!   snapshot ──▶ Policy::plan within the budget ──▶ actions ──▶ outcomes ──▶ settle, learn ─────────────────┘
//! ```
//!
//! The policy is the one that runs on a live host, unchanged. What it sees is what sensors would tell it: pages that are
//! present, from the first touch on; whether some windows at a time were touched within an interval, and how soon
//! ([`wideleaf_policies::sampled`]); pages that hold nothing but zeroes, which here are those that only a large page brought; the
//! guest's page size; the host's memory. Columns that it does not ask for stay empty, as on a live host.
//!
//! Time is accesses times a constant, the same on every machine and under every policy: so a policy decides alike on all
//! machines, and what differs between them is their TLBs. Actions take budget and no time of the guest: a live manager
//! works beside it. RAM is anonymous, so that a demotion is a split; nothing is held at 4 KiB. What the loop of a live host
//! does in other places (waiting longer while it is idle, looking more often in a burst) is left out: an interval is an
//! interval, and a look is at 64 windows.

use alloc::boxed::Box;
use core::time::Duration;

use crate::Simulator;
use crate::replay::{Costs, Tally};
use wideleaf_policies::action::Plan;
use wideleaf_policies::budget::{Budget, BudgetLimits};
use wideleaf_policies::policy::Policy;
use wideleaf_policies::snapshot::GuestMapping;
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, WindowIndex};

mod history;
mod host;
mod looks;

pub use history::{History, HistorySample};

use host::StreamHost;

/// Whoever translates the addresses: told of every page of the host that is not a base page.
pub trait Mmu {
    /// The host's page of that window has this size, where there was none before.
    fn map_host(&mut self, window: WindowIndex, to: PageSize);

    /// The host's page of that window has this size from now on, of all its giant where it is 1 GiB; what was cached of the old one is gone.
    fn remap_host(&mut self, window: WindowIndex, to: PageSize);

    /// TLB misses so far, for the history.
    fn misses(&self) -> u64;
}

/// A native process has one page size, so that what the host would do to a guest's RAM is done to that.
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

    fn misses(&self) -> u64 {
        self.counts().data_misses()
    }
}

/// Cycles in a microsecond: 2 GHz on all machines, as CBMM (ATC '22) counts.
const CYCLES_PER_MICROSECOND: u64 = 2_000;

/// How fast simulated time goes: an access takes so many cycles at 2 GHz, walks included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Cycles from one access to the next. More of them let a short stream stand for a long one.
    pub cycles_per_access: u64,
}

impl Default for Clock {
    /// Most accesses hit the first cache and take a cycle or less, a few go to memory and take hundreds. The guests of the demo
    /// make 88 million updates per second, each an access that goes to the table: 23 cycles at 2 GHz; loops over arrays come
    /// closer to one. Ours is between them; only the time policies have depends on it.
    fn default() -> Clock {
        Clock { cycles_per_access: 4 }
    }
}

impl Clock {
    /// The moment at which so many accesses are over.
    pub fn moment(self, accesses: u64) -> Moment {
        let nanoseconds = u128::from(accesses) * u128::from(self.cycles_per_access) * 1000;
        let nanoseconds = nanoseconds / u128::from(CYCLES_PER_MICROSECOND);
        Moment::after_start(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }

    /// The first number of accesses that are not over before `moment`.
    fn accesses_until(self, moment: Moment) -> u64 {
        let cycles = moment.since_start().as_nanos() * u128::from(CYCLES_PER_MICROSECOND) / 1000;
        u64::try_from(cycles.div_ceil(u128::from(self.cycles_per_access.max(1)))).unwrap_or(u64::MAX)
    }
}

/// The host that is simulated.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// The guest's arena: its accesses are below that.
    pub arena: Bytes,
    /// The page size of the guest's own tables.
    pub guest_page: PageSize,
    /// The host's memory.
    pub memory: Bytes,
    /// Giant pages that can be had.
    pub giant_pages: u64,
    /// How fast time goes.
    pub clock: Clock,
    /// Time between two plans.
    pub interval: Duration,
    /// What the manager may do.
    pub limits: BudgetLimits,
    /// What actions cost.
    pub costs: Costs,
}

impl HostConfig {
    /// A host with twice the memory the guest could use, so that it is never short, no giant page, and the manager's own
    /// interval and budget.
    pub fn new(arena: Bytes, guest_page: PageSize) -> HostConfig {
        HostConfig {
            arena,
            guest_page,
            memory: PageSize::Huge2M.bytes() * (2 * windows_of(arena)),
            giant_pages: 0,
            clock: Clock::default(),
            interval: Duration::from_millis(10),
            limits: BudgetLimits::default(),
            costs: Costs::default(),
        }
    }
}

/// Windows an arena of that length is in.
pub fn windows_of(arena: Bytes) -> u64 {
    arena.get().div_ceil(PageSize::Huge2M.bytes().get())
}

/// A policy, the host it manages, and what came of it.
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
    /// A host before the guest's first access, with RAM as the policy wants it to start.
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

    /// The guest accesses `address`, `times` in a row: to be called before the access is translated.
    ///
    /// # Panics
    /// Where the address is not in the arena.
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

    /// The stream is over: the last look, upon which nobody decides.
    pub fn end(&mut self, mmu: &dyn Mmu) {
        let now = self.config.clock.moment(self.accesses);
        let seen = self.host.snapshot(self.policy.needs());
        self.tally.observe(now, &seen);
        self.history.push_last(self.host.sample(now, self.accesses, mmu.misses()));
    }

    /// What the policy did, and what came of it.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// How things went.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// How often the policy planned.
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
            let outcome = self.host.act(planned.action, &seen, clock, mmu);
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

/// What the guest's own tables say of a window they map with that size.
const fn guest_mapping(page: PageSize) -> GuestMapping {
    match page {
        PageSize::Base4K => GuestMapping::Base4K,
        PageSize::Huge2M => GuestMapping::Huge2M,
        PageSize::Giant1G => GuestMapping::Giant1G,
    }
}

const _: () = assert!(BASE_PAGES_PER_WINDOW == 512, "a window's pages are eight words of bits");
