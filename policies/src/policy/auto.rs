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
//! in a while earns nothing, even if every sample saw a touch. One so sparse that no number of touches pays for its
//! bloat is sampled once a minute.
//!
//! A window that is nearly full and mapped by the guest adds no bloat and needs no proof. It is promoted after all
//! proven windows, unless its latest sample saw no touch. A sample without a touch that stands for more than four
//! windows says nothing of one of them. Decisions on windows that were never sampled are counted as
//! `planned_on_residency`. While the host is short, the policy adds no page. It then gives up huge windows with a
//! memory that is worth more than their walks (`auto/split.rs`). While huge pages are short, their price decides too
//! (`auto/market.rs`). Pages of 1 GiB are asked for where shorter walks pay for the copy (`auto/giants.rs`). Where the
//! guest reports its progress, a few windows show what the others would gain (`auto/audit.rs`). On a host with several
//! NUMA nodes, a huge page comes from the node that uses it (`auto/nodes.rs`).

use core::ops::ControlFlow;
use core::time::Duration;

use alloc::vec::Vec;

use super::{KeptSmall, Needs, Policy};
use crate::action::{Action, Plan};
use crate::bucket::bucket_of;
use crate::budget::{Budget, Cost};
use crate::candidates::{Turns, is_demotable, is_promotable, missing};
use crate::expectations::Expectations;
use crate::locality;
use crate::market::{Bids, bid};
use crate::node::NodeId;
use crate::outcome::{Outcome, OutcomeResult, Skip};
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::rank::Ranking;
use crate::snapshot::{AccessHistory, Backing, HugePages, Snapshot, VmId, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment, PageSize, WindowIndex};
use crate::walk::cost::WalkCost;
use crate::walk::share::AssumedMisses;
use crate::watermark::Watermark;
use crate::window_memory::WindowMemory;

mod audit;
mod giants;
mod judge;
mod market;
mod memory;
mod nodes;
mod split;

use audit::{Audit, Earnings, Kind};
use giants::Giants;
use judge::{Judge, Prices, cycles_over_ms, may_be_used, milliseconds};
use market::{Buyer, Market};
use memory::{GivenUp, Giving, Memory, is_idle, now_ns};
use nodes::Nodes;
use split::Splits;

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
        "giant",
        0,
        (0, 1),
        "0 or 1",
        "1: asks for pages of 1 GiB too, where shorter walks pay for the copy (the VM is set up for them at its start)",
    ),
    ParameterInfo::number(
        "audit_worth",
        2,
        (0, 100),
        "% of a guest's speed",
        "gain from which on promotions are worth it where a guest reports its progress; 0: gains are assumed (ours: \
         what a manager may cost a guest)",
    ),
    ParameterInfo::number(
        "split_shared",
        0,
        (0, 100),
        "% of a VM's touches",
        "a huge page with that share that several NUMA nodes touch is split; 0: none is (Carrefour-LP: 6)",
    ),
];

/// Number of past decisions assumed before there are any, so that one failure does not double the caution.
const PAST_DECISIONS_ASSUMED: u64 = 8;

/// Longest time between two plans for which a promotion earns: a manager that slept has no sensor data for it.
const EARNING_TIME_MAX: Duration = Duration::from_secs(10);

/// Time in seconds between two samples of a window that is too sparse to be promoted. They are for reports: of hot
/// sparse windows, and of the time that walks take.
const SPARSE_SAMPLED_EVERY_S: u16 = 60;

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
    giving: Giving,
    planned_at: Moment,
    score: Score,
    market: Market,
    splits: Splits,
    giants: Giants,
    audit: Audit,
    nodes: Nodes,
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

impl Auto {
    /// A policy without a past.
    pub fn new(parameters: &Parameters) -> Auto {
        let resident_min = u64::from(BASE_PAGES_PER_WINDOW) * parameters.number("resident_min") / 100;
        Auto {
            prices: Prices::new(parameters),
            resident_min: resident_min as u16,
            shortage: Watermark::of_percent(parameters.number("short_from"), parameters.number("short_to")),
            expectations: Expectations::default(),
            memory: WindowMemory::default(),
            turns: Turns::default(),
            ranking: Ranking::default(),
            bought: Vec::new(),
            giving: Giving::default(),
            planned_at: Moment::START,
            score: Score::default(),
            market: Market::default(),
            splits: Splits::default(),
            giants: Giants::new(parameters.number("giant") == 1),
            audit: Audit::new(parameters.number("audit_worth")),
            nodes: Nodes::new(parameters.number("split_shared")),
        }
    }

    fn judge(&self, now: Moment) -> Judge {
        let (vm, window) = ANY;
        let cycles = |action, is_held| self.prices.cycles(self.expectations.cost(action, is_held));
        let promotion = |to| Action::Promote { vm, window, to };
        let demotion = |to| Action::Demote { vm, window, to };
        Judge {
            prices: self.prices,
            copy: cycles(promotion(PageSize::Huge2M), false),
            recovery: cycles(promotion(PageSize::Huge2M), true),
            vacate: cycles(Action::Vacate { vm, window }, false),
            release: cycles(Action::Release { vm, window }, false),
            split: cycles(demotion(PageSize::Base4K), false),
            giant: cycles(promotion(PageSize::Giant1G), false),
            giant_back: cycles(demotion(PageSize::Huge2M), false),
            move_2m: cycles(Action::Move { vm, window, node: NodeId(0) }, false),
            asked_percent: self.prices.hysteresis_percent * self.score.caution_percent() / 100,
            now,
            now_ns: now_ns(now),
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
            let windows = self.memory.of_vm(index).iter_mut().zip(&vm.access).zip(&vm.zero);
            let sampled = windows.enumerate().filter(|(_, ((_, access), _))| access.samples() > 0);
            for (row, ((window, access), zero)) in sampled {
                window.note_heat(*access, now);
                window.note_zeroes(zero.unwrap_or(0), now);
                if window.owed > 0 {
                    let assumed = self.prices.benefit_per_s(*access, window.resident_before, vm.guest_mapping[row]);
                    let most = self.prices.benefit_max_per_s(vm.guest_mapping[row]);
                    let earnings = self.audit.earnings(index, window.kind).at_most(most);
                    settle(window, *access, assumed, earnings, earning_time, &mut self.score);
                }
            }
        }
    }

    /// Notes what was done since the last plan, in VMs that are still there.
    fn book(&mut self, snapshot: &Snapshot) {
        let find = |id: VmId, window: WindowIndex| {
            let index = snapshot.vms.iter().position(|vm| vm.vm == id)?;
            Some((index, snapshot.vms[index].row(window)?))
        };
        for (id, window, given) in self.giving.take_done() {
            if let Some((index, row)) = find(id, window) {
                let memory = &mut self.memory.of_vm(index)[row];
                (memory.given_up, memory.resident_after) = (given.given_up, given.used);
            }
        }
        for (id, window, cost) in self.bought.drain(..) {
            if let Some((index, row)) = find(id, window) {
                let memory = &mut self.memory.of_vm(index)[row];
                (memory.owed, memory.given_up) = (self.prices.cycles(cost), GivenUp::No);
                self.audit.promoted(index, window, memory.kind);
            }
        }
    }

    /// Visits all windows once: bids for them while the market is open, and ranks those that may be promoted, the
    /// proven ones before the others. Returns the number of proven ones.
    fn rank(&mut self, snapshot: &Snapshot, now: Moment, is_short: bool) -> usize {
        let judge = self.judge(now);
        let Auto { prices, splits, memory, ranking, score, resident_min, market, turns, audit, nodes, .. } = self;
        let mut proven = 0;
        score.sparse_now = 0;
        ranking.clear();
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let window = &memory.of_vm(place.vm as usize)[row];
            let is_released = || is_short && splits.of_release(&judge, window, vm, row).is_some();
            if market.may_offer(vm, row, now) && !is_released() {
                market.hold(judge.worth_of_large(window, vm, row), place);
            }
            let is_fought_over =
                || window.given_up == GivenUp::Shared && nodes.is_fought_over(place.vm as usize, vm, row);
            let may_be_large = is_promotable(vm, row, now) && !splits.is_taken_back(vm, row);
            if !may_be_large || (is_short && missing(vm, row) > 0) || is_fought_over() {
                return ControlFlow::Continue(());
            }
            let proof = judge.proof(window, vm, row, &mut score.sparse_now);
            let may_guess = !window.was_given_up() && may_be_used(vm, row);
            let guessed = || prices.bucket_when_blind(vm, row, *resident_min).filter(|_| may_guess);
            let Some(bucket) = proof.map(|proof| bucket_of(proof.return_percent)).or_else(guessed) else {
                return ControlFlow::Continue(());
            };
            // One that is only held has its huge page.
            let (needs_page, kind) = (!vm.backing[row].is_large(), Kind::of(vm, row));
            let per_s = proof.map(|proof| proof.per_s);
            // A window that waits for a trial bids as well: with a price, none waits.
            if let Some(per_s) = per_s.filter(|_| needs_page && !audit.is_stopped(place.vm as usize, kind)) {
                market.want(per_s, || judge.pays_for_vacate(window, vm, row, per_s));
            }
            let assumed_per_s = per_s.unwrap_or_else(|| prices.benefit_max_per_s(vm.guest_mapping[row]));
            if needs_page && !market.admits(audit, place, vm.windows[row], kind, assumed_per_s) {
                return ControlFlow::Continue(());
            }
            if !needs_page || market.could_serve(per_s) {
                proven += usize::from(proof.is_some());
                ranking.push(bucket, place);
            }
            ControlFlow::Continue(())
        });
        proven
    }

    /// Plans the promotions, best first. Each that needs a huge page has a window before it that gives one back, as far
    /// as the market allows. What is vacated beyond that is for other VMs of the host.
    /// Where free pages suffice, but not on the NUMA node of a window, it gets the page of a cold window of that node.
    /// Not while the host is short of memory: those may be split for it.
    fn promote(
        &mut self,
        snapshot: &Snapshot,
        (proven, is_short): (usize, bool),
        budget: &mut Budget,
        plan: &mut Plan,
    ) {
        let judge = self.judge(self.planned_at);
        let Auto { expectations, memory, ranking, score, market, nodes, giving, .. } = self;
        let mut vacating = market.vacating(snapshot);
        let (mut pages, (mut trades, for_others)) = (market.pages(), market.to_vacate());
        for (rank, place) in ranking.best_first().enumerate() {
            let (vm, row) = place.of(snapshot);
            let needs_page = !vm.backing[row].is_large();
            let buyer = Buyer { vm: place.vm, node: locality::node_of_page(vm, row) };
            if needs_page && pages == 0 && (trades == 0 || !vacating.has_one_for(buyer)) {
                continue;
            }
            let mut is_served = || match rank < proven {
                true => market.serves(|| judge.seen_per_s(&memory.of_vm(place.vm as usize)[row], vm, row)),
                false => market.serves_without_proof(),
            };
            if needs_page && !is_served() {
                continue;
            }
            let window = &mut memory.of_vm(place.vm as usize)[row];
            let mut given = if needs_page && trades > 0 { vacating.next_for(buyer) } else { None };
            trades = trades.saturating_sub(given.is_some().into());
            if given.is_none() && needs_page && rank < proven && !is_short && nodes.lacks_block(buyer.node) {
                let per_s = judge.seen_per_s(window, vm, row);
                let per_s = per_s.filter(|per_s| judge.pays_for_vacate(window, vm, row, *per_s));
                given = per_s.and_then(|per_s| vacating.next_of(buyer, market.givers_to(bid(per_s))));
            }
            let placed = match (needs_page, given) {
                (true, None) => nodes.place(window, vm, row),
                (true, Some(_)) => ControlFlow::Continue(buyer.node),
                (false, _) => ControlFlow::Continue(None),
            };
            let ControlFlow::Continue(node) = placed else { continue };
            if needs_page && given.is_none() {
                let Some(left) = pages.checked_sub(1) else { continue };
                pages = left;
            }
            let to = PageSize::Huge2M;
            let promote = (node, Action::Promote { vm: vm.vm, window: vm.windows[row], to }, vm.is_held[row]);
            let vacate = given.map(|given| (None, market::vacate(given, snapshot), false));
            // Together or not at all: what is vacated for no promotion counts as given to another VM.
            let requested = match vacate {
                Some(vacate) => expectations.request_all(&[vacate, promote], budget, plan),
                None => expectations.request_all(&[promote], budget, plan),
            };
            if requested.is_break() {
                return;
            }
            if let Some(given) = given {
                let (vm, row) = given.of(snapshot);
                giving.planned(vm, row, GivenUp::Vacated);
            }
            let is_known = vm.access[row].samples() > 0;
            *(if is_known { &mut score.planned_on_access } else { &mut score.planned_on_residency }) += 1;
            let planned = &mut memory.of_vm(place.vm as usize)[row];
            (planned.resident_before, planned.kind) = (vm.resident[row], Kind::of(vm, row));
        }
        let _full_or_spent =
            core::iter::from_fn(|| vacating.next_for_others()).take(for_others).try_for_each(|given| {
                expectations.request(market::vacate(given, snapshot), false, budget, plan)?;
                let (vm, row) = given.of(snapshot);
                giving.planned(vm, row, GivenUp::Vacated);
                ControlFlow::Continue(())
            });
    }

    /// Releases the zero pages that a trial added for nothing, once a sensor has found them.
    fn undo(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let Auto { audit, expectations, .. } = self;
        audit.added_for_nothing().retain(|(id, window)| {
            let Some(vm) = snapshot.vm(*id) else { return false };
            let Some(row) = vm.row(*window).filter(|row| vm.backing[*row] == Backing::Huge2M) else { return false };
            let is_named = || {
                plan.actions().iter().any(|planned| (planned.action.vm(), planned.action.window()) == (*id, *window))
            };
            match vm.zero[row] {
                Some(0) => false,
                Some(_) if is_demotable(vm, row, now) && !is_named() => {
                    let action = Action::Release { vm: *id, window: *window };
                    let _full_or_spent = expectations.request(action, false, budget, plan);
                    true // Until it is done: the guest may use the window for input and output now.
                }
                _ => true,
            }
        });
    }
}

/// Any window: the expected cost of an action is the same for all.
const ANY: (VmId, WindowIndex) = (VmId(0), WindowIndex::new(0));

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
    window.owed = window.owed.saturating_sub(cycles_over_ms(per_s, milliseconds(time)));
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

    fn largest_page(&self) -> PageSize {
        if self.giants.may_ask { PageSize::Giant1G } else { PageSize::Huge2M }
    }

    /// A window that a promotion cannot help is never promoted. One that cannot pay for its bloat is not promoted
    /// either, so its samples only tell how busy it is. Large windows earn their cost back, and are released.
    fn uses_access(&self, vm: &VmSnapshot, row: usize) -> bool {
        if vm.backing[row].is_large() {
            return true;
        }
        let is_due = || vm.access[row].samples() == 0 || vm.access_quality[row].age_s >= SPARSE_SAMPLED_EVERY_S;
        self.prices.saved_per_miss(vm.guest_mapping[row]) > 0 && (self.prices.may_pay_for_bloat(vm, row) || is_due())
    }

    fn uses_zero(&self) -> bool {
        self.shortage.is_near() || self.audit.has_to_undo()
    }

    fn hurries(&self, vm: &VmSnapshot, row: usize) -> bool {
        self.market.hurries(vm, row)
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.observe(snapshot, now);
        self.splits.observe(snapshot);
        self.nodes.open(snapshot);
        let is_short = self.shortage.update(snapshot.host);
        let huge_pages = snapshot.host.map_or(HugePages::Plenty, |host| host.huge_pages);
        self.market.open(huge_pages);
        let proven = self.rank(snapshot, now, is_short);
        let spare = snapshot.vms.iter().map(market::spare_of).fold(0, u64::saturating_add);
        self.market.set_price(huge_pages, spare, now);
        self.take_back(snapshot, now, budget, plan);
        if is_short {
            self.split(snapshot, now, budget, plan);
        }
        self.promote(snapshot, (proven, is_short), budget, plan);
        self.undo(snapshot, now, budget, plan);
        self.go_home(snapshot, now, budget, plan);
        self.move_giants(snapshot, now, is_short, budget, plan);
    }

    fn why_small(&self, vm: VmId, row: usize) -> Option<KeptSmall> {
        let window = self.memory.of(vm)?.get(row)?;
        match window.given_up {
            GivenUp::ZeroPages => Some(KeptSmall::ZeroPages),
            GivenUp::Cold => Some(KeptSmall::Cold),
            GivenUp::Shared => Some(KeptSmall::SharedByNodes),
            GivenUp::Vacated => Some(KeptSmall::Vacated),
            GivenUp::No => self.nodes.why_small(window),
        }
    }

    fn is_measuring(&self) -> bool {
        self.audit.is_waiting()
    }

    fn gains_nothing(&self, index: usize, vm: &VmSnapshot, row: usize) -> bool {
        self.audit.is_stopped(index, Kind::of(vm, row))
    }

    fn take_walk_cost(&mut self, cost: &WalkCost) {
        self.prices = self.prices.with_walk(*cost);
    }

    fn bids(&self) -> Option<&Bids> {
        self.market.bids()
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        self.splits.learn(outcome);
        self.giving.learn(outcome);
        self.giants.learn(outcome);
        self.audit.learn(outcome);
        match (outcome.action, outcome.result) {
            // What is on a giant page is not sampled on every host, so it would never earn its cost back.
            (Action::Promote { to: PageSize::Giant1G, .. }, _) => {}
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
            ("priced_out_now", self.market.priced_out()),
            ("huge_page_price", self.market.price()),
            ("split_in_use", self.splits.in_use),
            ("demoted", self.splits.demoted),
            ("giants_asked", self.giants.asked),
            ("giants_promoted", self.giants.promoted),
            ("giants_given_back", self.giants.given_back),
            ("audits_kept", findings.kept),
            ("audits_stopped", findings.stopped),
            ("audits_undecided", findings.undecided),
            ("waiting_for_audit_now", findings.waiting_now),
            ("gain_nothing_now", findings.stopped_now),
            ("waiting_for_node_now", self.nodes.waiting),
            ("promoted_home", self.nodes.promoted_home),
            ("moved_home", self.nodes.moved),
            ("split_shared", self.nodes.split),
        ])
    }
}
