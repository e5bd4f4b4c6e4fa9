//! Promotes where it pays: benefit over cost, both in cycles (CBMM, ATC '22), from the data on each window.
//!
//! ```text
//!   misses/s  = touches per second × present pages, at most misses_max × present/512
//!               or, if no sensor measures the time: misses_per_s × share of samples with an access × present/512
//!   benefit/s = misses/s × cycles saved per miss      (walk/cost.rs: as measured on this machine, or the prior)
//!   bloat/s   = missing base pages × bloat_price
//!   horizon   = for as long as it has been hot, at most 60 s
//!
//!   promote when (benefit/s - bloat/s) × horizon  ≥  measured cost × hysteresis × caution;  best ratio first
//!                                                                                    ▲
//!   done ─▶ the cost is owed ─▶ benefit earns it back ─▶ paid_back                   │
//!                            └▶ idle for all samples  ─▶ written_off ────────────────┘  raises it
//! ```
//!
//! No counter reports misses by window. The measurable quantity is the time from the start of watching to the first
//! touch. A touch counts as the first of a pass over all present pages, since a stream and a hot page look alike.
//! For a full window the mistake costs a copy; for a sparse one the few pages bound it. A window touched only once
//! in a while earns nothing, even if every sample saw a touch.
//!
//! A window that is nearly full and mapped by the guest adds no bloat and needs no proof. It is promoted after all
//! proven windows, unless its latest sample saw no touch. A sample without a touch that stands for more than four
//! windows says nothing of one of them. Decisions on windows that were never sampled are counted as
//! `planned_on_residency`. While the host is short, the policy adds no page. It then releases zero pages of huge
//! windows that were idle at every sample, where that pays. While huge pages are short, their price decides too
//! (`auto/market.rs`). Where the guest reports its progress, a few windows show what the others would gain
//! (`auto/audit.rs`).

use core::ops::ControlFlow;
use core::time::Duration;

use alloc::vec::Vec;

use super::{Needs, Policy};
use crate::action::{Action, Plan};
use crate::budget::{Budget, Cost};
use crate::candidates::{Turns, is_demotable, is_promotable, missing};
use crate::expectations::Expectations;
use crate::market::Bids;
use crate::outcome::{Outcome, OutcomeResult, Skip};
use crate::parameters::{ParameterInfo, Parameters};
use crate::rank::{Ranking, bucket_of};
use crate::snapshot::{AccessHistory, Backing, GuestMapping, Snapshot, VmId, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment, PageSize, WindowIndex};
use crate::walk::cost::WalkCost;
use crate::walk::share::AssumedMisses;
use crate::watermark::Watermark;
use crate::window_memory::WindowMemory;

mod audit;
mod market;

use audit::{Audit, Earnings, Kind};
use market::Market;

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "misses_max",
        AssumedMisses::DEFAULT.most,
        (1, 1_000_000_000),
        "TLB misses/s",
        "upper limit for a full window, however often it is touched (ours: those of GUPS in a table of 512 MiB)",
    ),
    ParameterInfo::number(
        "misses_per_s",
        AssumedMisses::DEFAULT.per_s,
        (1, 1_000_000_000),
        "TLB misses/s",
        "assumed for a full window touched in every sample, if no sensor measures the time to the touch (ours)",
    ),
    ParameterInfo::number(
        "horizon_s",
        60,
        (1, 3600),
        "s",
        "longest time for which a hot window is expected to stay hot (CBMM's port)",
    ),
    ParameterInfo::number(
        "bloat_price",
        1000,
        (0, 1_000_000),
        "cycles/s",
        "price of each base page added (ours: a gibibyte costs 13 % of a core, and the busiest window of a guest \
         with base pages pays from 71 present pages on; Quicksilver promotes from 64)",
    ),
    ParameterInfo::number("hysteresis", 150, (100, 10_000), "% of the cost", "benefit required for a promotion (ours)"),
    ParameterInfo::number(
        "resident_min",
        90,
        (1, 100),
        "% of a window",
        "present share that suffices without access samples (Ingens' threshold)",
    ),
    ParameterInfo::number(
        "short_from",
        85,
        (1, 100),
        "% of host memory",
        "memory use from which on no page is added (HawkEye)",
    ),
    ParameterInfo::number(
        "short_to",
        70,
        (0, 100),
        "% of host memory",
        "memory use below which pages are added again (HawkEye)",
    ),
    ParameterInfo::number(
        "audit_worth",
        2,
        (0, 100),
        "% of a guest's speed",
        "gain from which on promotions are worth it where a guest reports its progress; 0: gains are assumed (ours: \
         what a manager may cost a guest)",
    ),
];

/// Number of newest samples without a touch that make a window cold: one may miss an access by chance.
const COLD_AFTER_SAMPLES: u8 = 2;

/// Number of past decisions assumed before there are any, so that one failure does not double the caution.
const PAST_DECISIONS_ASSUMED: u64 = 8;

/// Highest return in percent of a window without proof: below the smallest that `hysteresis` allows.
const BLIND_MAX: u64 = 99;

/// Longest time between two plans for which a promotion earns: a manager that slept has no sensor data for it.
const EARNING_TIME_MAX: Duration = Duration::from_secs(10);

/// State that the policy keeps for a window.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    /// Start of the period in which every sample saw a touch.
    hot_since: Option<Moment>,
    /// Cycles that its promotion has cost and not yet earned.
    owed: u64,
    /// Number of base pages present when its promotion was planned.
    resident_before: u16,
    /// Whether it gave its huge page back since its latest promotion: it gets another one by proof only.
    was_vacated: bool,
    /// Kind of candidate that it was when it was planned.
    kind: Kind,
}

/// Decides by benefit and cost.
#[derive(Clone, Debug)]
pub struct Auto {
    prices: Prices,
    resident_min: u16,
    shortage: Watermark,
    expectations: Expectations,
    memory: WindowMemory<Memory>,
    turns: Turns,
    ranking: Ranking,
    /// Promotions done since the last plan, and their costs.
    bought: Vec<(VmId, WindowIndex, Cost)>,
    planned_at: Moment,
    score: Score,
    market: Market,
    audit: Audit,
}

/// Values used to compare benefit and cost.
#[derive(Clone, Copy, Debug)]
struct Prices {
    walk: WalkCost,
    misses: AssumedMisses,
    horizon: Duration,
    bloat_price: u64,
    hysteresis_percent: u64,
}

/// Counts of how decisions turned out.
#[derive(Clone, Copy, Debug, Default)]
struct Score {
    planned_on_access: u64,
    planned_on_residency: u64,
    /// Number of promotions that paid their cost back by cycles that a trial measured.
    paid_back_measured: u64,
    /// Number of those that did by assumed cycles.
    paid_back_assumed: u64,
    written_off: u64,
    released: u64,
    /// Number of hot windows at the latest plan that do not pay for their bloat.
    sparse_now: u64,
    vacated: u64,
    /// Number of windows at the latest plan that pay for their cost, but not the price of a huge page.
    priced_out_now: u64,
}

impl Score {
    /// Factor on the required benefit: from 100 % to nearly 200 %, rising with the promotions written off.
    fn caution_percent(&self) -> u64 {
        100 + 100 * self.written_off / (self.paid_back() + self.written_off + PAST_DECISIONS_ASSUMED)
    }

    fn paid_back(&self) -> u64 {
        self.paid_back_measured + self.paid_back_assumed
    }
}

fn cycles_over(per_second: u64, time: Duration) -> u64 {
    let milliseconds = time.as_secs().saturating_mul(1000).saturating_add(u64::from(time.subsec_millis()));
    per_second.saturating_mul(milliseconds) / 1000
}

impl Prices {
    /// Cost in cycles, at least one, because it is a divisor.
    fn cycles(&self, cost: Cost) -> u64 {
        let microseconds = u64::try_from(cost.cpu.as_micros()).unwrap_or(u64::MAX);
        microseconds.saturating_mul(self.walk.per_microsecond()).max(1)
    }

    fn benefit_per_s(&self, access: AccessHistory, present: u16, guest: GuestMapping) -> u64 {
        self.misses.per_s(access, present) * self.walk.saved_per_miss(guest, PageSize::Huge2M)
    }

    /// The bucket of a window without proof: nearly full windows that the guest may be using, the aligned ones
    /// first. These buckets lie below those of any required return.
    fn bucket_when_blind(&self, vm: &VmSnapshot, row: usize, resident_min: u16) -> Option<u16> {
        let saved = self.walk.saved_per_miss(vm.guest_mapping[row], PageSize::Huge2M);
        (saved > 0 && vm.resident[row] >= resident_min.max(1)).then(|| bucket_of(saved.min(BLIND_MAX)))
    }

    /// Largest benefit of a window: that of a full one without proof.
    fn benefit_max_per_s(&self, guest: GuestMapping) -> u64 {
        self.misses.most * self.walk.saved_per_miss(guest, PageSize::Huge2M)
    }

    /// Cycles of a core in a second.
    fn core_per_s(&self) -> u64 {
        self.walk.per_microsecond() * 1_000_000
    }

    fn bloat_per_s(&self, missing: u16) -> u64 {
        u64::from(missing) * self.bloat_price
    }

    /// Whether the window's zero pages are worth what their release costs.
    fn pays_to_release(&self, expectations: &Expectations, vm: &VmSnapshot, row: usize) -> bool {
        let action = Action::Release { vm: vm.vm, window: vm.windows[row] };
        let cost = || self.cycles(expectations.cost(action, false));
        vm.zero[row].is_some_and(|zero| {
            self.return_percent(self.bloat_per_s(zero), self.horizon, cost()) >= self.hysteresis_percent
        })
    }

    /// Share of the cost, in cycles, that comes back within the horizon, in percent.
    fn return_percent(&self, per_second: u64, hot_for: Duration, cost: u64) -> u64 {
        let gain = cycles_over(per_second, hot_for.min(self.horizon));
        gain.saturating_mul(100) / cost
    }
}

/// Costs in cycles, and the required return, as of one plan.
#[derive(Clone, Copy, Debug)]
struct Judge {
    prices: Prices,
    copy: u64,
    recovery: u64,
    vacate: u64,
    asked_percent: u64,
    now: Moment,
}

impl Judge {
    /// Cycles per second that a promotion saves beyond its bloat; `None` where the bloat costs more.
    fn net_per_s(&self, vm: &VmSnapshot, row: usize) -> Option<u64> {
        let benefit = self.prices.benefit_per_s(vm.access[row], vm.resident[row], vm.guest_mapping[row]);
        benefit.checked_sub(self.prices.bloat_per_s(missing(vm, row)))
    }

    /// Return of `cost` cycles in percent, if it suffices.
    fn sufficient_percent(&self, per_s: u64, hot_since: Moment, cost: u64) -> Option<u64> {
        let percent = self.prices.return_percent(per_s, self.now.since(hot_since), cost);
        (percent >= self.asked_percent).then_some(percent)
    }
}

impl Auto {
    /// A policy without a past.
    pub fn new(parameters: &Parameters) -> Auto {
        let resident_min = u64::from(BASE_PAGES_PER_WINDOW) * parameters.number("resident_min") / 100;
        Auto {
            prices: Prices {
                walk: WalkCost::PRIOR,
                misses: AssumedMisses {
                    most: parameters.number("misses_max"),
                    per_s: parameters.number("misses_per_s"),
                },
                horizon: Duration::from_secs(parameters.number("horizon_s")),
                bloat_price: parameters.number("bloat_price"),
                hysteresis_percent: parameters.number("hysteresis"),
            },
            resident_min: resident_min as u16,
            shortage: Watermark::of_percent(parameters.number("short_from"), parameters.number("short_to")),
            expectations: Expectations::default(),
            memory: WindowMemory::default(),
            turns: Turns::default(),
            ranking: Ranking::default(),
            bought: Vec::new(),
            planned_at: Moment::START,
            score: Score::default(),
            market: Market::default(),
            audit: Audit::new(parameters.number("audit_worth")),
        }
    }

    fn judge(&self, now: Moment) -> Judge {
        let cycles = |cost| self.prices.cycles(cost);
        let (vm, window) = ANY;
        Judge {
            prices: self.prices,
            copy: cycles(cost_of_promotion(&self.expectations, false)),
            recovery: cycles(cost_of_promotion(&self.expectations, true)),
            vacate: cycles(self.expectations.cost(Action::Vacate { vm, window }, false)),
            asked_percent: self.prices.hysteresis_percent * self.score.caution_percent() / 100,
            now,
        }
    }

    /// Records the costs of actions since the last plan, lets promotions earn, and notes the hot windows.
    fn observe(&mut self, snapshot: &Snapshot, now: Moment) {
        let earning_time = now.since(self.planned_at).min(EARNING_TIME_MAX);
        self.planned_at = now;
        self.memory.fit(snapshot);
        self.book(snapshot);
        self.audit.observe(snapshot, now, self.prices.core_per_s());
        for (index, vm) in snapshot.vms.iter().enumerate() {
            let memory = self.memory.of_vm(index);
            for (row, access) in vm.access.iter().enumerate().filter(|(_, access)| access.samples() > 0) {
                let window = &mut memory[row];
                let is_hot = access.idle_samples() < COLD_AFTER_SAMPLES.min(access.samples());
                window.hot_since = is_hot.then(|| window.hot_since.unwrap_or(now));
                if window.owed > 0 {
                    let assumed = self.prices.benefit_per_s(*access, window.resident_before, vm.guest_mapping[row]);
                    let most = self.prices.benefit_max_per_s(vm.guest_mapping[row]);
                    let earnings = self.audit.earnings(index, window.kind).at_most(most);
                    settle(window, *access, assumed, earnings, earning_time, &mut self.score);
                }
            }
        }
    }

    fn book(&mut self, snapshot: &Snapshot) {
        for (id, window, cost) in self.bought.drain(..) {
            let found = snapshot.vms.iter().position(|vm| vm.vm == id);
            let Some((index, row)) = found.and_then(|index| Some((index, snapshot.vms[index].row(window)?))) else {
                continue; // The VM has gone.
            };
            let memory = &mut self.memory.of_vm(index)[row];
            (memory.owed, memory.was_vacated) = (self.prices.cycles(cost), false);
            self.audit.promoted(index, window, memory.kind);
        }
    }

    fn rank_promotions(&mut self, snapshot: &Snapshot, now: Moment, is_short: bool) {
        let judge = self.judge(now);
        let Auto { prices, memory, ranking, score, resident_min, market, audit, .. } = self;
        (score.sparse_now, score.priced_out_now) = (0, 0);
        ranking.clear();
        self.turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let is_addition = missing(vm, row) > 0;
            if !is_promotable(vm, row, now) || (is_short && is_addition) {
                return ControlFlow::Continue(());
            }
            let access = vm.access[row];
            let Memory { hot_since, was_vacated, .. } = memory.of_vm(place.vm as usize)[row];
            // One that is only held has its huge page.
            let needs_page = !vm.backing[row].is_large();
            let mut assumed_per_s = prices.benefit_max_per_s(vm.guest_mapping[row]);
            let proven = hot_since.and_then(|hot_since| {
                let Some(per_s) = judge.net_per_s(vm, row) else {
                    score.sparse_now += 1;
                    return None;
                };
                let cost = if vm.is_held[row] { judge.recovery } else { judge.copy };
                let percent = judge.sufficient_percent(per_s, hot_since, cost)?;
                let is_served = !needs_page || market.serves(per_s);
                score.priced_out_now += u64::from(!is_served);
                assumed_per_s = per_s;
                is_served.then(|| bucket_of(percent))
            });
            // A window with a touch in its latest sample is no worse than one without samples. Nor is one that shares
            // its result with many others.
            let may_be_used = access.was_touched().unwrap_or(true) || !vm.access_quality[row].is_of_this_window();
            let may_guess = may_be_used && !was_vacated && (!needs_page || !market.has_price());
            let guessed = || prices.bucket_when_blind(vm, row, *resident_min).filter(|_| may_guess);
            let kind = Kind::of(vm, row);
            if let Some(bucket) = proven.or_else(guessed)
                && (!needs_page || audit.admits(place.vm as usize, vm.windows[row], kind, assumed_per_s))
            {
                memory.of_vm(place.vm as usize)[row].kind = kind;
                ranking.push(bucket, place);
            }
            ControlFlow::Continue(())
        });
    }

    /// Plans the promotions, best first. Each that needs a huge page has one before it that gives one back, as far as
    /// the market allows. What it allows beyond that is for other VMs of the host.
    fn promote(&mut self, snapshot: &Snapshot, budget: &mut Budget, plan: &mut Plan) {
        let mut vacating = self.coldest(snapshot).into_iter();
        let Auto { expectations, memory, ranking, score, .. } = self;
        for place in ranking.best_first() {
            let (vm, row) = place.of(snapshot);
            let given = if vm.backing[row].is_large() { None } else { vacating.next() };
            if given.is_some_and(|given| market::vacate(given, snapshot, expectations, memory, budget, plan).is_break())
                || expectations.request_huge(vm, row, budget, plan).is_break()
            {
                return;
            }
            let is_known = vm.access[row].samples() > 0;
            *(if is_known { &mut score.planned_on_access } else { &mut score.planned_on_residency }) += 1;
            memory.of_vm(place.vm as usize)[row].resident_before = vm.resident[row];
        }
        let _full_or_spent =
            vacating.try_for_each(|given| market::vacate(given, snapshot, expectations, memory, budget, plan));
    }

    /// Releases the zero pages that a trial added for nothing, once a sensor has found them.
    fn undo(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let Auto { audit, expectations, .. } = self;
        audit.added_for_nothing().retain(|(id, window)| {
            let Some(vm) = snapshot.vm(*id) else { return false };
            let Some(row) = vm.row(*window).filter(|row| vm.backing[*row] == Backing::Huge2M) else { return false };
            let is_named = || plan.actions().iter().any(|planned| planned.action.window() == *window);
            match vm.zero[row] {
                Some(0) => false,
                Some(_) if is_demotable(vm, row, now) && !is_named() => {
                    let action = Action::Release { vm: *id, window: *window };
                    expectations.request(action, false, budget, plan).is_break()
                }
                _ => true,
            }
        });
    }

    /// Releases zero pages of windows that were idle at all samples, where that is worth more than it costs.
    fn release(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let Auto { prices, expectations, turns, .. } = self;
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            if !prices.pays_to_release(expectations, vm, row) || !is_idle(vm.access[row]) || !is_demotable(vm, row, now)
            {
                return ControlFlow::Continue(());
            }
            let action = Action::Release { vm: vm.vm, window: vm.windows[row] };
            expectations.request(action, false, budget, plan)
        });
    }
}

/// Any window: the expected cost of an action is the same for all.
const ANY: (VmId, WindowIndex) = (VmId(0), WindowIndex::new(0));

fn cost_of_promotion(expectations: &Expectations, is_held: bool) -> Cost {
    let (vm, window) = ANY;
    expectations.cost(Action::Promote { vm, window, to: PageSize::Huge2M }, is_held)
}

/// Whether a full history has no touch at any sample.
fn is_idle(access: AccessHistory) -> bool {
    access.idle_samples() == AccessHistory::SAMPLES_MAX
}

/// Lets a promoted window earn its cost back, by what a trial measured or else by what is assumed of its accesses. An
/// idle window earns nothing, whatever others of its kind do.
fn settle(
    window: &mut Memory,
    access: AccessHistory,
    assumed: u64,
    earnings: Earnings,
    time: Duration,
    score: &mut Score,
) {
    let (per_s, paid_back) = match earnings {
        Earnings::Pending => (0, &mut score.paid_back_assumed),
        Earnings::Assumed => (assumed, &mut score.paid_back_assumed),
        Earnings::Measured(per_s) => (if assumed == 0 { 0 } else { per_s }, &mut score.paid_back_measured),
    };
    window.owed = window.owed.saturating_sub(cycles_over(per_s, time));
    if window.owed == 0 {
        *paid_back += 1;
    } else if is_idle(access) || earnings == Earnings::Measured(0) {
        window.owed = 0;
        score.written_off += 1;
    }
}

impl Policy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, zero: true, guest_mapping: true, host_memory: true, progress: true, ..Needs::default() }
    }

    /// A window that a promotion cannot help is never promoted. Large windows earn their cost back, and are released.
    fn uses_access(&self, vm: &VmSnapshot, row: usize) -> bool {
        vm.backing[row].is_large() || self.prices.walk.saved_per_miss(vm.guest_mapping[row], PageSize::Huge2M) > 0
    }

    fn hurries(&self, vm: &VmSnapshot, row: usize) -> bool {
        self.market.hurries(vm, row)
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.observe(snapshot, now);
        let is_short = self.shortage.update(snapshot.host);
        if is_short {
            self.release(snapshot, now, budget, plan);
        }
        self.go_to_market(snapshot, now, is_short);
        self.rank_promotions(snapshot, now, is_short);
        self.promote(snapshot, budget, plan);
        self.undo(snapshot, now, budget, plan);
    }

    fn is_measuring(&self) -> bool {
        self.audit.is_waiting()
    }

    fn gains_nothing(&self, index: usize, vm: &VmSnapshot, row: usize) -> bool {
        self.audit.is_stopped(index, Kind::of(vm, row))
    }

    fn take_walk_cost(&mut self, cost: &WalkCost) {
        self.prices.walk = *cost;
    }

    fn bids(&self) -> Option<&Bids> {
        self.market.bids()
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        match (outcome.action, outcome.result) {
            (Action::Promote { vm, window, .. }, OutcomeResult::Done) => self.bought.push((vm, window, outcome.cost)),
            (Action::Release { .. }, OutcomeResult::Done) => self.score.released += 1,
            (Action::Vacate { .. }, OutcomeResult::Done) => self.score.vacated += 1,
            (Action::Vacate { vm, .. }, OutcomeResult::Skipped(Skip::NoMechanism)) => self.market.cannot_vacate(vm),
            _ => {}
        }
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        let (score, findings) = (self.score, self.audit.findings());
        Vec::from([
            ("planned_on_access", score.planned_on_access),
            ("planned_on_residency", score.planned_on_residency),
            ("paid_back", score.paid_back()),
            ("paid_back_measured", score.paid_back_measured),
            ("paid_back_assumed", score.paid_back_assumed),
            ("written_off", score.written_off),
            ("released", score.released),
            ("sparse_now", score.sparse_now),
            ("caution_percent", score.caution_percent()),
            ("vacated", score.vacated),
            ("priced_out_now", score.priced_out_now),
            ("huge_page_price", self.market.price()),
            ("audits_kept", findings.kept),
            ("audits_stopped", findings.stopped),
            ("audits_undecided", findings.undecided),
            ("waiting_for_audit_now", findings.waiting_now),
            ("gain_nothing_now", findings.stopped_now),
        ])
    }
}
