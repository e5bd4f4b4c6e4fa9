//! Performs the plan of a tick.
//!
//! ```text
//!   plan ─┬─ giants       ─▶ begun, each in a thread of its own (giants.rs)
//!         ├─ copy nothing ─▶ one after the other ──────────┬─▶ in the order of the plan: state of the window,
//!         └─ copy         ─▶ several threads, one list ────┘   budget, report, policy
//!              a promotion comes right behind a window that is vacated for it, in the same thread (trades.rs)
//!
//!   each action:  its turn (reach.rs) ─▶ guards (guards.rs) ─▶ mechanism (mechanisms.rs) ─▶ outcome
//! ```

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::{Action, Moment, Outcome, OutcomeResult, PlannedAction, Refusal, Skip, Snapshot, VmId};

use super::ManagerLoop;
use super::attempt::{Attempt, Mechanism, Target};
use super::guards::Guarded;
use super::huge_page_backoff::HugePageBackoff;
use super::mechanisms::{Site, choose};
use super::reach::Reach;
use super::steering::Steering;
use super::swaps::{SwapHand, Swaps};
use super::trades::{Unit, units};
use super::vm_state::{SharedParts, VmState};
use crate::host::Host;
use crate::panicked::{Panicked, caught};

/// Minimum number of windows, or of trades, for each further thread: a thread takes 0.1 ms to start, a window 0.5 ms.
const COPIES_PER_THREAD_LEAST: usize = 4;

/// Time after which a tick begins no further action: its plan becomes old, and nothing new is published, while a busy
/// host or a small part of the time out of reach makes each action wait.
const ACTING_MAX: Duration = Duration::from_secs(1);

/// Longest sleep of a thread that acts: then it looks whether the loop is to stop.
const STOPS_WITHIN: Duration = Duration::from_millis(5);

/// Everything that actions need; several threads may share it.
struct Means<'a> {
    host: &'a dyn Host,
    began: Moment,
    /// Parts of the VMs, in the order given.
    vms: Vec<SharedParts<'a>>,
    should_stop: &'a AtomicBool,
    steering: &'a Steering,
    huge_pages: &'a HugePageBackoff,
    panics: &'a Mutex<Vec<(VmId, Panicked)>>,
}

impl Means<'_> {
    /// Acts, unless the action was refused when it was begun. A panic counts as a refusal: its thread first returns
    /// the window that it holds, and claims end with their guards. `hands`: by VM.
    fn attempt(&self, requested: Attempt, hands: &mut [Option<SwapHand<'_>>]) -> Attempt {
        let Some(target) = requested.target else {
            return Attempt { at: self.host.now(), ..requested };
        };
        // A panic can leave only this VM in an inconsistent state; the loop leaves it
        // alone (`VmState::is_left_alone`).
        caught(|| self.guarded(requested, target, hands)).unwrap_or_else(|panicked| {
            let panicked = (requested.planned.action.vm(), panicked);
            self.panics.lock().push(panicked);
            let refused = OutcomeResult::Refused(Refusal::Other(0));
            Attempt { result: refused, at: self.host.now(), ..requested }
        })
    }

    /// Whether the tick has no time for further actions.
    fn is_late(&self) -> bool {
        self.host.now().since(self.began) >= ACTING_MAX
    }

    /// Waits until the guest has had enough time with all of its windows in reach, or the loop is to stop.
    fn wait_for_reach(&self, reach: &Reach) {
        loop {
            let wait = reach.wait(self.host.now());
            if wait.is_zero() || self.should_stop.load(Ordering::Relaxed) {
                return;
            }
            self.host.sleep(wait.min(STOPS_WITHIN));
        }
    }

    /// Waits for its turn, asks all guards, then performs the action.
    fn guarded(&self, attempt: Attempt, target: Target, hands: &mut [Option<SwapHand<'_>>]) -> Attempt {
        let Means { host, should_stop, steering, huge_pages, .. } = *self;
        let SharedParts { managed: vm, releasing, collapsing, stalls, reach } = self.vms[target.vm];
        let hand = hands.get_mut(target.vm).and_then(Option::as_mut);
        let is_paused = hand.as_ref().is_some_and(|hand| hand.is_paused(host.now()));
        if is_paused && attempt.is_vacate() {
            // Without a mechanism, a policy would not ask again.
            return attempt.ended(Mechanism::Vacate, OutcomeResult::Skipped(Skip::BackingOff));
        }
        let hand = hand.filter(|_| !is_paused);
        let mechanism = choose(vm, attempt.planned.action, target.is_held, hand.is_some());
        if mechanism.takes_out_of_reach() {
            self.wait_for_reach(reach);
        }
        let has_vacated = hand.as_ref().is_some_and(|hand| hand.has_vacated());
        let guarded =
            Guarded { attempt, target, mechanism, host, vm, stalls, should_stop, steering, huge_pages, has_vacated };
        let (held, objection) = guarded.ask();
        let is_refused = objection.is_some();
        let ended = match (objection, held.range) {
            (Some(objection), _) => attempt.ended(objection.mechanism, objection.result),
            (None, None) => attempt,
            (None, Some(range)) => {
                Site { host, vm, range, releasing, collapsing, steering, hand }.perform(attempt, mechanism)
            }
        };
        let ended = Attempt { at: host.now(), ..ended };
        reach.was_out(ended.unavailable, ended.at);
        if held.may_stall {
            stalls.stalled(ended.unavailable);
        }
        let grounds = held.grounds;
        drop(held);
        match grounds {
            // Otherwise a window that is always refused would take each permission, since it comes first each time.
            Some(grounds) if is_refused => huge_pages.return_unused(host, ended.node_of_page(), grounds),
            Some(grounds) => {
                huge_pages.learn(host, ended.node_of_page(), grounds, ended.result, ended.cost.cpu);
            }
            None => {}
        }
        ended
    }
}

impl ManagerLoop {
    /// Performs the plan: begins the moves of giants, does the actions that copy nothing, then copies windows, in
    /// several threads if there are enough of them, for [`ACTING_MAX`]. Results are recorded in the order of the plan.
    /// Returns the number of actions done or begun.
    pub(super) fn act(&mut self, planned: &[PlannedAction], snapshot: &Snapshot) -> u64 {
        let began = self.host.now();
        let (mut giants_begun, mut windows) = (0, Vec::new());
        // Giants first, wherever they stand in the plan: a giant's first window holds its state, and no other
        // action may end that.
        for (position, planned) in planned.iter().enumerate() {
            match self.giant_request(planned, snapshot) {
                Some(request) => giants_begun += u64::from(self.begin_giant(request)),
                None => windows.push((position, planned)),
            }
        }
        let windows = windows.into_iter().map(|(position, planned)| self.begin(position, *planned, snapshot));
        let (copies, others): (Vec<_>, Vec<_>) = windows.partition(Attempt::is_copy);
        let means = self.means(began);
        let in_time = |requested: Attempt| match means.is_late() {
            true => requested.put_off(means.host.now()),
            false => means.attempt(requested, &mut []),
        };
        let mut ended: Vec<_> = others.into_iter().map(in_time).collect();
        ended.extend(self.copy(&units(copies), began));
        self.vms.iter_mut().filter_map(|vm| vm.swaps.as_mut()).for_each(Swaps::give_back_vacated);
        ended.sort_unstable_by_key(|attempt| attempt.position);
        self.leave_alone_what_panicked();
        let untold = self.vms.iter().filter_map(|vm| vm.releasing.take_untold(vm.managed.id));
        self.report.unanswered.extend(untold);
        giants_begun + ended.iter().filter(|attempt| self.end(attempt)).count() as u64
    }

    /// Puts a window into the state of being acted on, if it exists and may be acted on.
    fn begin(&self, position: usize, planned: PlannedAction, snapshot: &Snapshot) -> Attempt {
        let begin = |(vm, row): (usize, usize)| {
            if self.vms[vm].is_left_alone {
                return Err(Skip::NoMechanism);
            }
            let state = self.vms[vm].windows[row].begin(self.host.now()).map_err(|_| Skip::BackingOff)?;
            Ok(Target { vm, row, state, is_held: snapshot.vms[vm].is_held[row] })
        };
        let found = self.find(planned.action, snapshot);
        if found.is_none() {
            // Only a defective policy names a window that does not exist; the guest must not suffer for it.
            tracing::error!("the policy named {:?}, which is not in its snapshot", planned.action);
        }
        let requested = Attempt::requested(planned, position, self.host.now());
        match found.ok_or(Skip::NotResident).and_then(begin) {
            Ok(target) => Attempt { target: Some(target), ..requested },
            Err(skip) => Attempt { result: OutcomeResult::Skipped(skip), ..requested },
        }
    }

    fn means(&self, began: Moment) -> Means<'_> {
        let ManagerLoop { host, vms, should_stop, steering, huge_pages, panics, .. } = self;
        let vms = vms.iter().map(VmState::shared_parts).collect();
        Means { host: host.as_ref(), began, vms, should_stop, steering, huge_pages, panics }
    }

    fn leave_alone_what_panicked(&mut self) {
        let panics = std::mem::take(self.panics.get_mut());
        for (vm, panicked) in panics {
            self.leave_alone(vm, &format!("an action {panicked}"));
        }
    }

    /// Stops all actions and sensors of this VM that a policy asks for: a panic may have left any state behind.
    pub(super) fn leave_alone(&mut self, vm: VmId, why: &str) {
        let told = format!("{vm} is left alone from now on: {why}");
        tracing::error!("{told}");
        self.report.panics.push(told);
        for state in self.vms.iter_mut().filter(|state| state.managed.id == vm) {
            state.is_left_alone = true;
            state.swaps = None;
        }
    }

    /// Copies windows; each thread takes the next unit from the list. A tick that is late only ends the units' actions,
    /// but that of the first: others may take all of its time.
    fn copy(&mut self, units: &[Unit], began: Moment) -> Vec<Attempt> {
        let ManagerLoop { host, vms, should_stop, steering, huge_pages, config, panics, .. } = self;
        let (vms, mut hands): (_, Vec<_>) = vms.iter_mut().map(VmState::parts_for_copies).unzip();
        let means = Means { host: host.as_ref(), began, vms, should_stop, steering, huge_pages, panics };
        let threads = usize::from(config.copy_threads).min(units.len() / COPIES_PER_THREAD_LEAST).max(1);
        let mut of_thread = || hands.iter_mut().map(|hands| hands.as_mut().and_then(Iterator::next)).collect();
        let next = AtomicUsize::new(0);
        let work = |mut hands: Vec<Option<SwapHand<'_>>>| {
            let mut ended = Vec::new();
            loop {
                let position = next.fetch_add(1, Ordering::Relaxed);
                let Some(unit) = units.get(position) else { return ended };
                let is_late = position > 0 && means.is_late();
                ended.extend(unit.iter().map(|requested| match is_late {
                    true => requested.put_off(means.host.now()),
                    false => means.attempt(*requested, &mut hands),
                }));
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| of_thread()).collect();
            let others: Vec<_> = others.into_iter().map(|hands| scope.spawn(|| work(hands))).collect();
            let mut ended = work(of_thread());
            for other in others {
                ended.extend(other.join().expect("what panics in an attempt is caught there"));
            }
            ended
        })
    }

    /// Records the result of an action. Returns whether it was done.
    fn end(&mut self, attempt: &Attempt) -> bool {
        if let Some(Target { vm, row, state, .. }) = attempt.target {
            let vm = &mut self.vms[vm];
            vm.swaps.take_if(|swaps| !swaps.remains_possible(attempt));
            let next = match attempt.result {
                OutcomeResult::Refused(refusal) => state.refused(refusal, attempt.at),
                OutcomeResult::Done | OutcomeResult::Skipped(_) => state.done(),
            };
            vm.kernel_work.acted(row, attempt.planned.action, attempt.result);
            if matches!(attempt.planned.action, Action::Move { .. }) {
                vm.node_sight.forget(row);
            }
            vm.windows[row] = next.expect("a window that is being acted on may be done or refused");
        }
        if attempt.is_for_others && attempt.result == OutcomeResult::Done {
            self.steering.vacated();
        }
        self.publisher.remember(attempt);
        self.record(attempt);
        attempt.result == OutcomeResult::Done
    }

    /// VM (in the order given) and row of the window that an action is about.
    pub(super) fn find(&self, action: Action, snapshot: &Snapshot) -> Option<(usize, usize)> {
        let index = self.managed_vms().position(|vm| vm.id == action.vm())?;
        Some((index, snapshot.vms[index].row(action.window())?))
    }

    /// Counts an outcome, settles its cost with the budget and reports it to the policy.
    pub(super) fn record(&mut self, attempt: &Attempt) {
        let Attempt { planned, mechanism, result, at, cost, unavailable, .. } = *attempt;
        self.budget.settle(planned.cost, cost);
        self.report.count(attempt);
        let outcome = Outcome { action: planned.action, at, cost, unavailable, result };
        if let Some(recorder) = &mut self.recorder {
            recorder.outcome(mechanism.name(), &outcome);
        }
        self.policy.lock().learn(&outcome);
        self.learn_for_recovery(&outcome);
    }
}
