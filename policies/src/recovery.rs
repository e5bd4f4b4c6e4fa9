//! What was large before an event (a migration, a dirty log, a balloon …) becomes large again soon after it.
//!
//! ```text
//!   no event           the large windows are remembered, once a later look at the guest has seen no event either
//!   balloon inflated   windows that become large are added
//!   during an event    the memory of them stays as it is
//!   the event is over  a recovery: hottest windows first, within a burst of the budget, until 99 % are large again
//!                        ├─ another event ends meanwhile: it begins anew, with the same memory
//!                        └─ after the longest time allowed: it is cut off, and the policy goes on alone
//! ```
//!
//! A recovery promotes full windows only: memory that the guest gave back, or has not used again yet, does not come
//! back by it, and the host has no less memory afterwards. A window that the policy gives up stays small. Where
//! nothing is known of the time before, as in a process that became the target of a migration, every full window counts
//! as large before.

use core::cmp::Reverse;
use core::ops::ControlFlow;
use core::time::Duration;

use alloc::vec::Vec;

use crate::action::{Action, Plan};
use crate::budget::{Budget, BudgetLimits};
use crate::candidates::{is_promotable, missing};
use crate::expectations::Expectations;
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::{Backing, VmSnapshot};
use crate::units::{Bytes, Moment, PageSize, PerTenThousand, WindowIndex};

/// Event that may have made windows small. Where several come together, the last in this order names them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// The guest's state was unknown for a while, so that an event may have passed unseen.
    Unseen,
    /// A balloon took memory, and gave some back.
    Balloon,
    /// The guest stood still: stopped by an operator, or before it was restored.
    Stop,
    /// A program logged the pages that the guest wrote.
    DirtyLog,
    /// A migration of the guest failed, was cancelled or went to a file, and the guest runs again.
    Migration,
    /// Another process served the guest's page faults (`userfaultfd`): the second half of a postcopy, or a restore.
    FaultsServed,
    /// Its memory was saved or loaded.
    Snapshot,
    /// This process became the target of a migration.
    Arrival,
}

impl Cause {
    /// Name in reports and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Unseen => "unseen",
            Cause::Balloon => "balloon",
            Cause::Stop => "stop",
            Cause::DirtyLog => "dirty_log",
            Cause::Migration => "migration",
            Cause::FaultsServed => "faults_served",
            Cause::Snapshot => "snapshot",
            Cause::Arrival => "arrival",
        }
    }
}

/// Events of one guest so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Number of looks at the guest so far.
    pub looks: u64,
    /// Event that the latest look saw.
    pub present: Option<Cause>,
    /// Number of events that are over.
    pub ended: u64,
    /// The latest event that is over, with the moment of the last look that saw it.
    pub latest: Option<(Cause, Moment)>,
    /// Whether a balloon has memory of the guest.
    pub is_inflated: bool,
}

/// Bounds on a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryLimits {
    /// Factor of the budget's rates during a recovery, from 1 on.
    pub burst: u32,
    /// Longest time from the end of an event to the end of its recovery.
    pub longest: Duration,
}

impl Default for RecoveryLimits {
    /// Twice the budget for at most half a minute: with the default budget a whole core, more than the part of the time
    /// for which windows may be out of reach lets a recovery use.
    fn default() -> RecoveryLimits {
        RecoveryLimits { burst: 2, longest: Duration::from_secs(30) }
    }
}

impl RecoveryLimits {
    /// The budget during a recovery.
    pub fn burst_of(&self, limits: BudgetLimits) -> BudgetLimits {
        let burst = self.burst.max(1);
        BudgetLimits {
            copy_per_second: Bytes::new(limits.copy_per_second.get().saturating_mul(u64::from(burst))),
            cpu_share: PerTenThousand::new(limits.cpu_share.get().saturating_mul(burst)),
            ..limits
        }
    }
}

/// Time for which 99 % must stay large before a recovery is over: a guest that runs again, or gets memory back from a
/// balloon, fills windows for some time.
const SETTLED_FOR: Duration = Duration::from_secs(2);

/// Windows beyond this index are not remembered (128 TiB of guest-physical addresses): the memory is at most 8 MiB, and
/// 64 KiB for a TiB.
const WINDOWS_MAX: u64 = 1 << 26;

/// A set of windows, a bit each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Windows(Vec<u64>);

impl Windows {
    fn add_large(&mut self, vm: &VmSnapshot) {
        let large = vm.windows.iter().zip(&vm.backing).filter(|(_, backing)| backing.is_large());
        large.for_each(|(window, _)| self.add(*window));
    }

    fn add(&mut self, window: WindowIndex) {
        if window.get() >= WINDOWS_MAX {
            return;
        }
        let word = (window.get() / 64) as usize;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (window.get() % 64);
    }

    fn remove(&mut self, window: WindowIndex) {
        if let Some(word) = self.0.get_mut((window.get() / 64) as usize) {
            *word &= !(1 << (window.get() % 64));
        }
    }

    fn contains(&self, window: WindowIndex) -> bool {
        self.0.get((window.get() / 64) as usize).is_some_and(|word| word & (1 << (window.get() % 64)) != 0)
    }
}

/// A recovery that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Event before it.
    pub cause: Cause,
    /// Time from the end of the event until 99 % were large again; `None`: it was cut off before, by the longest time
    /// allowed or by another event.
    pub took: Option<Duration>,
    /// Largest number of small windows that were to become large.
    pub lost: u64,
}

/// State of a recovery under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Event before it.
    pub cause: Cause,
    /// Number of windows that are large again.
    pub large: u64,
    /// Number of full windows that are still small.
    pub small: u64,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    cause: Cause,
    since: Moment,
    progress: Progress,
    lost: u64,
    /// Moment from which on 99 % have been large.
    reached: Option<Moment>,
}

/// The recoveries of one guest.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    limits: RecoveryLimits,
    before: Option<Windows>,
    /// Large windows of a tick, and the number of looks then: remembered once a later look saw no event.
    newer: Option<(u64, Windows)>,
    /// Windows that were given up while nothing was known of the time before.
    given_up: Windows,
    ended: u64,
    running: Option<Running>,
    expectations: Expectations,
}

impl Recovery {
    /// Recoveries within these bounds, of a guest of which nothing is known yet.
    pub fn new(limits: RecoveryLimits) -> Recovery {
        Recovery { limits, ..Recovery::default() }
    }

    /// Changes the bounds from now on.
    pub fn set_limits(&mut self, limits: RecoveryLimits) {
        self.limits = limits;
    }

    /// Bounds on a recovery.
    pub fn limits(&self) -> RecoveryLimits {
        self.limits
    }

    /// Takes the events and the windows of a tick into account, before a plan is made. `may_act`: whether the guest
    /// may be acted on now; otherwise a recovery waits, and its time goes on. Returns the recoveries that are over.
    pub fn see(&mut self, events: &Events, vm: &VmSnapshot, now: Moment, may_act: bool) -> Vec<Recovered> {
        let mut over = Vec::new();
        if events.ended > self.ended {
            self.ended = events.ended;
            over.extend(self.running.take().map(|running| running.over(None)));
            self.running = events.latest.map(|(cause, since)| Running::new(cause, since));
        }
        over.extend(self.advance(vm, now, may_act));
        self.remember(events, vm);
        over
    }

    fn advance(&mut self, vm: &VmSnapshot, now: Moment, may_act: bool) -> Option<Recovered> {
        let mut running = self.running?;
        if may_act {
            running.look(self.progress(running.cause, vm), now);
        }
        let is_late = now.since(running.since) > self.limits.longest;
        let is_settled = running.reached.is_some_and(|at| now.since(at) >= SETTLED_FOR);
        let is_over = is_late || (may_act && is_settled);
        self.running = (!is_over).then_some(running);
        is_over.then(|| running.over(running.reached))
    }

    fn progress(&self, cause: Cause, vm: &VmSnapshot) -> Progress {
        let rows = (0..vm.len()).filter(|row| self.was_large(vm, *row));
        let mut progress = Progress { cause, large: 0, small: 0 };
        for row in rows {
            progress.large += u64::from(vm.backing[row].is_large());
            progress.small += u64::from(is_full_and_small(vm, row));
        }
        progress
    }

    fn was_large(&self, vm: &VmSnapshot, row: usize) -> bool {
        let window = vm.windows[row];
        self.before.as_ref().map_or_else(|| !self.given_up.contains(window), |before| before.contains(window))
    }

    fn remember(&mut self, events: &Events, vm: &VmSnapshot) {
        let is_quiet = self.running.is_none() && events.present.is_none();
        match (is_quiet, events.is_inflated, &mut self.before) {
            (true, true, Some(before)) => before.add_large(vm),
            (true, ..) => {
                if self.newer.as_ref().is_some_and(|(looks, _)| *looks < events.looks) {
                    self.before = self.newer.take().map(|(_, windows)| windows);
                }
                let mut windows = Windows::default();
                windows.add_large(vm);
                self.newer.get_or_insert((events.looks, windows));
                return;
            }
            (false, ..) => {}
        }
        self.newer = None;
    }

    /// Requests the windows that are to become large, the hottest first where heat is known, else in address order.
    pub fn plan(&self, vm: &VmSnapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        if self.running.is_none() {
            return;
        }
        let is_due =
            |row: &usize| self.was_large(vm, *row) && is_full_and_small(vm, *row) && is_promotable(vm, *row, now);
        let mut rows: Vec<usize> = (0..vm.len()).filter(is_due).collect();
        rows.sort_by_key(|row| Reverse(vm.access[*row].rate().map_or(0, PerTenThousand::get)));
        let _ = rows
            .into_iter()
            .try_for_each(|row| -> ControlFlow<()> { self.expectations.request_huge(vm, row, budget, plan) });
    }

    /// Learns the cost of an action. A window that the policy gives up stays small.
    pub fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        let (Action::Demote { window, to: PageSize::Base4K, .. }
        | Action::Vacate { window, .. }
        | Action::Release { window, .. }) = outcome.action
        else {
            return;
        };
        if outcome.result != OutcomeResult::Done {
            return;
        }
        if let Some((_, newer)) = &mut self.newer {
            newer.remove(window);
        }
        match &mut self.before {
            Some(before) => before.remove(window),
            None => self.given_up.add(window),
        }
    }

    /// Ends a recovery under way, because the guest has ended.
    pub fn end(&mut self) {
        self.running = None;
    }

    /// The recovery under way.
    pub fn running(&self) -> Option<Progress> {
        self.running.map(|running| running.progress)
    }

    /// Whether a recovery is under way, and windows are still to become large.
    pub fn has_work(&self) -> bool {
        self.running.is_some_and(|running| running.reached.is_none())
    }
}

impl Running {
    fn new(cause: Cause, since: Moment) -> Running {
        Running { cause, since, progress: Progress { cause, large: 0, small: 0 }, lost: 0, reached: None }
    }

    fn look(&mut self, progress: Progress, now: Moment) {
        self.progress = progress;
        self.lost = self.lost.max(progress.small);
        let is_reached = progress.small * 100 <= progress.large + progress.small;
        self.reached = is_reached.then(|| self.reached.unwrap_or(now));
    }

    fn over(self, reached: Option<Moment>) -> Recovered {
        Recovered { cause: self.cause, took: reached.map(|at| at.since(self.since)), lost: self.lost }
    }
}

/// Whether all base pages of a window are there, and no larger page.
fn is_full_and_small(vm: &VmSnapshot, row: usize) -> bool {
    vm.backing[row] == Backing::Base4K && missing(vm, row) == 0 && !vm.is_given_back(row)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::budget::Cost;
    use crate::outcome::Refusal;
    use crate::snapshot::{AccessHistory, VmId, WindowRow};
    use crate::units::mib;

    const PLENTY: BudgetLimits = BudgetLimits {
        copy_per_second: mib(1 << 20),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };

    fn at(ms: u64) -> Moment {
        Moment::after_start(Duration::from_millis(ms))
    }

    /// A window for each character: `2` huge, `4` full of base pages, `h` with a hole, `.` nothing.
    fn vm(windows: &str) -> VmSnapshot {
        let mut vm = VmSnapshot::with_capacity(VmId(0), windows.len());
        for (index, character) in windows.chars().enumerate() {
            let (resident, backing) = match character {
                '2' => (512, Backing::Huge2M),
                '4' => (512, Backing::Base4K),
                'h' => (300, Backing::Base4K),
                _ => (0, Backing::Unbacked),
            };
            vm.push(WindowRow::new(WindowIndex::new(index as u64), resident, backing));
        }
        vm
    }

    fn quiet(looks: u64) -> Events {
        Events { looks, ..Events::default() }
    }

    fn ended(looks: u64, number: u64, cause: Cause, ms: u64) -> Events {
        Events { looks, ended: number, latest: Some((cause, at(ms))), ..Events::default() }
    }

    /// A recovery that has seen `windows` in peace for long enough to remember them.
    fn after_peace(windows: &str) -> Recovery {
        let mut recovery = Recovery::new(RecoveryLimits::default());
        for looks in 0..3 {
            assert_eq!(recovery.see(&quiet(looks), &vm(windows), at(looks), true), []);
        }
        recovery
    }

    fn planned(recovery: &Recovery, vm: &VmSnapshot, budget: &mut Budget) -> Vec<u64> {
        let mut plan = Plan::default();
        recovery.plan(vm, at(5_000), budget, &mut plan);
        plan.actions().iter().map(|planned| planned.action.window().get()).collect()
    }

    #[test]
    fn only_full_windows_that_were_large_before_come_back_after_each_event() {
        for cause in [
            Cause::Unseen,
            Cause::Balloon,
            Cause::Stop,
            Cause::DirtyLog,
            Cause::Migration,
            Cause::FaultsServed,
            Cause::Snapshot,
            Cause::Arrival,
        ] {
            let mut recovery = after_peace("22224422");
            let during = Events { looks: 4, present: Some(cause), ..Events::default() };
            recovery.see(&during, &vm("44h.4422"), at(10), true);
            assert_eq!(planned(&recovery, &vm("44h.4422"), &mut Budget::new(PLENTY, at(0))), [], "it is not over");
            recovery.see(&ended(5, 1, cause, 1_000), &vm("44h.4422"), at(1_100), true);
            assert_eq!(planned(&recovery, &vm("44h.4422"), &mut Budget::new(PLENTY, at(0))), [0, 1], "{cause:?}");
            assert_eq!(recovery.see(&ended(6, 1, cause, 1_000), &vm("22h.4422"), at(1_500), true), []);
            let over = recovery.see(&ended(7, 1, cause, 1_000), &vm("22h.4422"), at(3_500), true);
            assert_eq!(over, [Recovered { cause, took: Some(Duration::from_millis(500)), lost: 2 }]);
            assert_eq!(recovery.running(), None);
        }
    }

    #[test]
    fn windows_that_were_damaged_before_the_event_was_seen_come_back_too() {
        let mut recovery = after_peace("2222");
        // A tick between the begin of the event and the look that sees it.
        recovery.see(&quiet(3), &vm("4444"), at(4), true);
        recovery.see(
            &Events { looks: 4, present: Some(Cause::Migration), ..Events::default() },
            &vm("4444"),
            at(5),
            true,
        );
        recovery.see(&ended(5, 1, Cause::Migration, 6), &vm("4444"), at(7), true);
        assert_eq!(planned(&recovery, &vm("4444"), &mut Budget::new(PLENTY, at(0))), [0, 1, 2, 3]);
    }

    #[test]
    fn the_hottest_windows_come_first_and_the_budget_bounds_them() {
        let mut recovery = after_peace("22222");
        recovery.see(&ended(4, 1, Cause::Stop, 4), &vm("44444"), at(5), true);
        let mut hot = vm("44444");
        hot.access[3] = AccessHistory::default().with(true);
        hot.access[1] = AccessHistory::default().with(true).with(false);
        let limits = BudgetLimits { copy_per_second: mib(6), ..PLENTY };
        assert_eq!(planned(&recovery, &hot, &mut Budget::new(limits, at(0))), [3, 1, 0]);
        let Some(Progress { small: 5, large: 0, .. }) = recovery.running() else { panic!("{recovery:?}") };
    }

    #[test]
    fn an_event_during_a_recovery_begins_it_anew_with_the_memory_of_the_first() {
        let mut recovery = after_peace("2222");
        recovery.see(&ended(4, 1, Cause::Migration, 4), &vm("4444"), at(10), true);
        let over = recovery.see(&ended(5, 2, Cause::Balloon, 20), &vm("2444"), at(30), true);
        assert_eq!(over, [Recovered { cause: Cause::Migration, took: None, lost: 4 }]);
        assert_eq!(planned(&recovery, &vm("2444"), &mut Budget::new(PLENTY, at(0))), [1, 2, 3]);
    }

    #[test]
    fn events_between_two_ticks_are_one_and_none_is_lost() {
        let mut recovery = after_peace("22");
        recovery.see(&ended(9, 3, Cause::Snapshot, 4), &vm("44"), at(5), true);
        assert_eq!(recovery.running().map(|progress| (progress.cause, progress.small)), Some((Cause::Snapshot, 2)));
    }

    #[test]
    fn a_recovery_that_cannot_end_is_cut_off_and_the_memory_is_that_of_the_next_peace() {
        let mut recovery = after_peace("2222");
        recovery.see(&ended(4, 1, Cause::Stop, 0), &vm("4444"), at(10), true);
        assert_eq!(recovery.see(&ended(5, 1, Cause::Stop, 0), &vm("4444"), at(30_000), true), []);
        let over = recovery.see(&ended(6, 1, Cause::Stop, 0), &vm("4444"), at(30_001), true);
        assert_eq!(over, [Recovered { cause: Cause::Stop, took: None, lost: 4 }]);
        recovery.see(&ended(7, 1, Cause::Stop, 0), &vm("4442"), at(30_002), true);
        recovery.see(&ended(8, 1, Cause::Stop, 0), &vm("4442"), at(30_003), true);
        recovery.see(&ended(9, 2, Cause::Stop, 30_004), &vm("4444"), at(30_005), true);
        assert_eq!(planned(&recovery, &vm("4444"), &mut Budget::new(PLENTY, at(0))), [3]);
    }

    #[test]
    fn a_recovery_waits_while_the_guest_is_left_alone() {
        let mut recovery = after_peace("22");
        for ms in [10, 5_000, 20_000] {
            assert_eq!(recovery.see(&ended(4, 1, Cause::Stop, 0), &vm("22"), at(ms), false), []);
        }
        assert!(recovery.has_work());
        recovery.end();
        assert!(!recovery.has_work() && recovery.running().is_none(), "the guest has ended");
    }

    #[test]
    fn without_a_time_before_every_full_window_counts() {
        let mut recovery = Recovery::new(RecoveryLimits::default());
        let during = Events { looks: 1, present: Some(Cause::Arrival), ..Events::default() };
        recovery.see(&during, &vm("...."), at(1), false);
        recovery.see(&ended(2, 1, Cause::Arrival, 2), &vm("44h."), at(3), true);
        assert_eq!(planned(&recovery, &vm("44h."), &mut Budget::new(PLENTY, at(0))), [0, 1]);
    }

    #[test]
    fn a_window_that_the_policy_gives_up_is_not_promoted_again_by_a_recovery() {
        let (id, window) = (VmId(0), WindowIndex::new(1));
        let of_event = |mut recovery: Recovery| {
            recovery.see(&ended(4, 1, Cause::Migration, 4), &vm("4444"), at(5), true);
            recovery
        };
        for action in [
            Action::Demote { vm: id, window, to: PageSize::Base4K },
            Action::Vacate { vm: id, window },
            Action::Release { vm: id, window },
        ] {
            for before in [after_peace("2222"), Recovery::new(RecoveryLimits::default())] {
                for (result, left) in
                    [(OutcomeResult::Done, vec![0, 2, 3]), (OutcomeResult::Refused(Refusal::Busy), vec![0, 1, 2, 3])]
                {
                    let mut recovery = of_event(before.clone());
                    let cost = Cost { copied: Bytes::ZERO, cpu: Duration::ZERO };
                    recovery.learn(&Outcome { action, at: at(6), cost, unavailable: Duration::ZERO, result });
                    assert_eq!(planned(&recovery, &vm("4444"), &mut Budget::new(PLENTY, at(0))), left, "{action:?}");
                }
            }
        }
    }

    #[test]
    fn a_balloon_that_stays_inflated_keeps_the_memory_of_what_was_large_before() {
        let mut recovery = after_peace("2244");
        let inflated = Events { looks: 4, is_inflated: true, ..Events::default() };
        recovery.see(&inflated, &vm(".h44"), at(10), true);
        recovery.see(&Events { looks: 5, ..inflated }, &vm(".h24"), at(20), true);
        recovery.see(&Events { is_inflated: true, ..ended(6, 1, Cause::Balloon, 30) }, &vm("4444"), at(40), true);
        assert_eq!(planned(&recovery, &vm("4444"), &mut Budget::new(PLENTY, at(0))), [0, 1, 2]);
    }

    #[test]
    fn memory_that_the_guest_gave_back_meanwhile_stays_with_the_host() {
        let mut recovery = after_peace("2222");
        recovery.see(&ended(4, 1, Cause::Balloon, 4), &vm("4h.4"), at(5), true);
        let mut given_back = vm("4h.4");
        given_back.given_back[3] = 1;
        let mut plan = Plan::default();
        recovery.plan(&given_back, at(6), &mut Budget::new(PLENTY, at(0)), &mut plan);
        let windows: Vec<_> = plan.actions().iter().map(|planned| planned.action).collect();
        let to = PageSize::Huge2M;
        assert_eq!(windows, [Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to }]);
    }

    #[test]
    fn a_burst_is_a_multiple_of_the_budget() {
        let limits = RecoveryLimits { burst: 3, ..RecoveryLimits::default() }.burst_of(BudgetLimits::default());
        assert_eq!((limits.copy_per_second, limits.cpu_share.get()), (mib(6 << 10), 15_000));
        let none = RecoveryLimits { burst: 0, ..RecoveryLimits::default() };
        assert_eq!(none.burst_of(PLENTY), PLENTY);
    }
}
