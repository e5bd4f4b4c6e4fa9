//! Two guests on a host without free huge pages, recorded under a policy and replayed: the policy decides as it did
//! live.
//!
//! ```text
//!   cold guest   H H H H   idle                            a huge page that a window leaves is free for another one;
//!   hot guest    f f f f   touched, one page short         without a free one the kernel refuses
//! ```

use std::time::Duration;

use wideleaf_policies::recording::{Encoder, Header, VmHeader};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::window::WindowState;
use wideleaf_policies::{
    AccessHistory, Action, Backing, Budget, BudgetLimits, Cost, GuestMapping, HostMemory, HugePages, Moment, Outcome,
    OutcomeResult, PageSize, Plan, Policy, PolicyChoice, Refusal, Skip, Snapshot, VmId, VmSnapshot, WindowIndex,
    WindowRow,
};
use wideleaf_simulator::replay::{Recording, Tally};

const COLD: VmId = VmId(0);
const HOT: VmId = VmId(1);

/// Number of windows of each guest.
const WINDOWS: usize = 4;

/// Without proof, no window is promoted that is one page short of full.
const AUTO: &str = "auto:resident_min=100";

const DONE: OutcomeResult = OutcomeResult::Done;

/// The actions planned at each tick.
type Plans = Vec<Vec<Action>>;

struct LiveHost {
    /// Number of free huge pages; `None`: plenty.
    free: Option<u64>,
    /// Backing and state of each window of the two guests.
    windows: [[(Backing, WindowState); WINDOWS]; 2],
}

impl LiveHost {
    fn new(free: Option<u64>) -> LiveHost {
        let all = |backing| [(backing, WindowState::Ready); WINDOWS];
        LiveHost { free, windows: [all(Backing::Huge2M), all(Backing::Base4K)] }
    }

    fn snapshot(&self) -> Snapshot {
        let huge_pages = self.free.map_or(HugePages::Plenty, |free| HugePages::Scarce { free });
        let host = HostMemory { total: gib(100), available: gib(50), giant_pages_free: 0, huge_pages };
        Snapshot { host: Some(host), vms: vec![self.vm(COLD), self.vm(HOT)] }
    }

    fn vm(&self, vm: VmId) -> VmSnapshot {
        let is_hot = vm == HOT;
        let access = (0..16).fold(AccessHistory::default(), |history, _| history.with(is_hot));
        let access = access.with_touches_per_s(Some(if is_hot { 1000 } else { 0 }));
        let mut rows = VmSnapshot::with_capacity(vm, WINDOWS);
        for (window, (backing, state)) in (0..).zip(self.windows[vm.0 as usize]) {
            let resident = if is_hot && !backing.is_large() { 511 } else { 512 };
            rows.push(WindowRow {
                access,
                guest_mapping: GuestMapping::Base4K,
                ready_at: state.ready_at(),
                ..WindowRow::new(WindowIndex::new(window), resident, backing)
            });
        }
        rows
    }

    fn act(&mut self, action: Action, now: Moment) -> Outcome {
        let LiveHost { free, windows } = self;
        let (backing, state) = &mut windows[action.vm().0 as usize][action.window().get() as usize];
        let nothing = Cost::default();
        let ended = |result, cost: Cost| Outcome { action, at: now + cost.cpu, cost, unavailable: cost.cpu, result };
        let Ok(acting) = state.begin(now) else { return ended(OutcomeResult::Skipped(Skip::BackingOff), nothing) };
        let (to, left) = match (action, *backing, *free) {
            (Action::Promote { .. }, Backing::Base4K, Some(0)) => {
                *state = acting.refused(Refusal::NoHugePage, now).expect("it was begun");
                return ended(OutcomeResult::Refused(Refusal::NoHugePage), nothing);
            }
            (Action::Promote { .. }, Backing::Base4K, free) => (Backing::Huge2M, free.map(|free| free - 1)),
            (Action::Vacate { .. }, Backing::Huge2M, free) => (Backing::Base4K, free.map(|free| free + 1)),
            other => panic!("{other:?}"),
        };
        (*backing, *free, *state) = (to, left, acting.done().expect("it was begun"));
        ended(DONE, Cost { copied: mib(2), cpu: Duration::from_micros(560) })
    }

    /// Number of large windows of the cold guest and of the hot one.
    fn large(&self) -> [usize; 2] {
        self.windows.map(|windows| windows.iter().filter(|(backing, _)| backing.is_large()).count())
    }
}

/// Twenty seconds under a policy.
struct Run {
    host: LiveHost,
    plans: Plans,
    recording: Vec<u8>,
}

impl Run {
    fn live(choice: &str, free: Option<u64>) -> Run {
        let (mut policy, limits) = (PolicyChoice::parse(choice).unwrap().make(), BudgetLimits::default());
        let of = |vm| VmHeader { vm, backing: "anon".into(), start_page: PageSize::Base4K, ranges: Vec::new() };
        let header = Header { policy: policy.name().into(), limits, vms: vec![of(COLD), of(HOT)], facts: Vec::new() };
        let mut recording = Vec::new();
        let mut encoder = Encoder::start(&header, &mut recording).unwrap();
        let (mut host, mut plans) = (LiveHost::new(free), Plans::new());
        let mut budget = Budget::new(limits, Moment::START);
        for second in 0..20 {
            let (now, seen, mut plan) =
                (Moment::after_start(Duration::from_secs(second)), host.snapshot(), Plan::default());
            budget.refill(now);
            policy.plan(&seen, now, &mut budget, &mut plan);
            encoder.snapshot(now, &seen, &mut recording);
            encoder.plan(now, plan.actions(), &mut recording);
            let mut clock = now;
            for planned in plan.actions() {
                let outcome = host.act(planned.action, clock);
                clock = outcome.at;
                budget.settle(planned.cost, outcome.cost);
                encoder.outcome("swap", &outcome, &mut recording);
                policy.learn(&outcome);
            }
            plans.push(actions(&plan));
        }
        encoder.end(&mut recording);
        Run { host, plans, recording }
    }

    fn recorded(&self) -> Recording<'_> {
        Recording::read(&self.recording).unwrap()
    }

    /// Plans of this policy on the recording, and their results.
    fn replayed(&self, choice: &str) -> (Plans, Tally) {
        let mut noting = Noting { policy: PolicyChoice::parse(choice).unwrap().make(), plans: Plans::new() };
        let tally = self.recorded().replay(&mut noting);
        (noting.plans, tally)
    }
}

fn actions(plan: &Plan) -> Vec<Action> {
    plan.actions().iter().map(|planned| planned.action).collect()
}

/// A policy that keeps its plans.
struct Noting {
    policy: Box<dyn Policy>,
    plans: Plans,
}

impl Policy for Noting {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.policy.plan(snapshot, now, budget, plan);
        self.plans.push(actions(plan));
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.policy.learn(outcome);
    }
}

#[test]
fn each_policy_decides_on_its_recording_of_two_guests_as_it_did_live() {
    for choice in [AUTO, "utilization", "coverage"] {
        for free in [None, Some(0), Some(2)] {
            let run = Run::live(choice, free);
            let (plans, mut tally) = run.replayed(choice);
            assert!(plans.iter().any(|plan| !plan.is_empty()), "{choice}, {free:?} free");
            assert_eq!(plans, run.plans, "{choice}, {free:?} free");
            tally.budget_refusals = None; // which a recording does not contain
            assert_eq!(tally, run.recorded().recorded(), "{choice}, {free:?} free");
        }
    }
}

#[test]
fn in_a_shortage_auto_gives_the_hot_guest_what_the_cold_one_does_not_use() {
    let run = |free| {
        let run = Run::live(AUTO, free);
        (run.recorded().recorded().count_of("vacate", "done"), run.host.large())
    };
    assert_eq!([None, Some(0), Some(1)].map(run), [(0, [4, 4]), (4, [0, 4]), (3, [1, 4])]);
}

#[test]
fn a_shortage_changes_no_plan_of_policies_that_know_of_none_and_the_hot_guest_gets_nothing() {
    for choice in ["utilization", "coverage"] {
        let [plenty, short] = [None, Some(0)].map(|free| Run::live(choice, free));
        assert_eq!(plenty.plans[0], short.plans[0], "{choice}");
        assert_eq!([plenty.host.large(), short.host.large()], [[4, 4], [4, 0]], "{choice}");
        let refused = short.recorded().recorded().count_of("promote_2m", "refused_no_huge_page");
        assert!(refused > 4, "{choice}: asked again and again, {refused} times");
    }
}

#[test]
fn a_recording_of_another_policy_shows_what_auto_would_have_done_in_its_shortage() {
    for (free, vacated) in [(None, 0), (Some(0), 4)] {
        let (_, tally) = Run::live("never", free).replayed(AUTO);
        assert_eq!((tally.count_of("vacate", "done"), tally.count_of("promote_2m", "done")), (vacated, 4), "{free:?}");
    }
}
