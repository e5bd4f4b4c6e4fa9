//! The loop keeps windows out of the guest's reach for no more than the set part of any 100 ms, while it acts on many
//! in a row. On the fake host a collapse takes 0.6 ms, as a release does here, and a split less; else time passes only
//! while a thread sleeps.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop, OutOfReach};
use wideleaf_memory::region::{GuestRam, RamRange};
use wideleaf_memory::testing::fake_host::{COLLAPSE_TIME, FakeHost};
use wideleaf_memory::testing::fake_mover::FakeMover;
use wideleaf_policies::policy::{Needs, Policy, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Budget, BudgetLimits, Cost, Gpa, GpaRange, Hva, Moment, Outcome, PageSize, PerTenThousand, Plan, Snapshot,
    VmId, WindowIndex,
};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u32 = 512;
const INTERVAL: Duration = Duration::from_millis(100);

/// Pages of a window that are zero, in the test of releases, and the one page that is not.
const ZERO_PAGES: Range<u16> = 0..4;
const USED_PAGE: Range<u16> = 4..5;

/// What the loop does with all windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Collapses,
    Splits,
    Releases,
}

impl Work {
    fn policy(self) -> Box<dyn Policy> {
        match self {
            Work::Collapses => by_name("greedy").unwrap().with_defaults(),
            Work::Splits => Box::new(OnAll(|vm, window| Action::Demote { vm, window, to: PageSize::Base4K })),
            Work::Releases => Box::new(OnAll(|vm, window| Action::Release { vm, window })),
        }
    }

    /// A VM with all of its RAM present. Pages are moved for releases alone, and only in RAM of this process.
    fn vm(self, host: &Arc<FakeHost>) -> ManagedVm {
        let gpa = GpaRange::new(Gpa::new(0), mib(2) * u64::from(WINDOWS)).unwrap();
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        if self == Work::Releases {
            let ram = GuestRam::map(&[gpa], backing).unwrap();
            host.make_present(ram.base(), ram.bytes(), false);
            host.move_with(mover_with_zeroes(host));
            return ManagedVm::new(VmId(0), ram, None);
        }
        host.make_present(RAM_AT, gpa.bytes(), self == Work::Splits);
        ManagedVm::external(VmId(0), vec![RamRange { gpa, hva: RAM_AT }], backing, None)
    }
}

/// A mover with zero pages in each window. A move takes as long as a collapse.
fn mover_with_zeroes(host: &Arc<FakeHost>) -> Arc<FakeMover> {
    let mover = Arc::<FakeMover>::default();
    for window in (0..u64::from(WINDOWS)).map(WindowIndex::new) {
        mover.write_zeroes(window, ZERO_PAGES);
        mover.write(window, USED_PAGE);
    }
    // The host has the mover.
    let host = Arc::downgrade(host);
    mover.before_moving(move || host.upgrade().iter().for_each(|host| host.sleep(COLLAPSE_TIME)));
    mover
}

/// Plans this action for each window.
struct OnAll(fn(VmId, WindowIndex) -> Action);

impl Policy for OnAll {
    fn name(&self) -> &'static str {
        "on_all"
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        let vm = &snapshot.vms[0];
        vm.windows.iter().for_each(|window| plan.push((self.0)(vm.vm, *window), Cost::default()));
    }
}

/// A policy that notes when each window was out of reach: from, to.
struct Noting(Box<dyn Policy>, Arc<Mutex<Vec<(Duration, Duration)>>>);

impl Policy for Noting {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn needs(&self) -> Needs {
        self.0.needs()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.0.plan(snapshot, now, budget, plan);
    }

    fn learn(&mut self, outcome: &Outcome) {
        let to = outcome.at.since_start();
        self.1.lock().push((to - outcome.unavailable, to));
        self.0.learn(outcome);
    }
}

fn percent(percent: u32) -> OutOfReach {
    OutOfReach::nearest_to(PerTenThousand::new(percent * 100))
}

/// Times out of reach while a loop with this part does its work.
fn out_of_reach(part: OutOfReach, work: Work) -> Vec<(Duration, Duration)> {
    out_of_reach_after(part, work, |_| {})
}

/// The same, after `change` was made to the loop.
fn out_of_reach_after(part: OutOfReach, work: Work, change: impl FnOnce(&ManagerLoop)) -> Vec<(Duration, Duration)> {
    let (host, seen) = (Arc::<FakeHost>::default(), Arc::default());
    let vm = work.vm(&host);
    let policy = Noting(work.policy(), Arc::clone(&seen));
    let limits = BudgetLimits {
        copy_per_second: mib(1 << 20),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };
    let config = ManagerConfig { limits, out_of_reach: part, ..ManagerConfig::default() };
    let mut work = ManagerLoop::new(host, vec![vm], Box::new(policy), config);
    change(&work);
    let mut done = 0;
    while done < u64::from(WINDOWS) {
        done += work.tick();
    }
    let seen = seen.lock().clone();
    assert!(seen.iter().map(|(from, to)| *to - *from).sum::<Duration>() > INTERVAL * 9 / 10, "most of 100 ms");
    seen
}

/// Longest time out of reach within 100 ms: they are worst where they begin with a window.
fn worst(times: &[(Duration, Duration)]) -> Duration {
    let within = |start: Duration| {
        let end = start + INTERVAL;
        let part = |(from, to): &(Duration, Duration)| (*to).min(end).saturating_sub((*from).max(start));
        times.iter().map(part).sum::<Duration>()
    };
    times.iter().map(|(from, _)| within(*from)).max().unwrap()
}

#[test]
fn windows_are_out_of_reach_for_the_set_part_of_any_100_ms_and_one_window_more_at_most() {
    for part in [10, 30, 60] {
        for work in [Work::Collapses, Work::Splits, Work::Releases] {
            let worst = worst(&out_of_reach(percent(part), work));
            assert!(worst <= INTERVAL * part / 100 + COLLAPSE_TIME, "{work:?}, {part} %: {worst:?}");
            assert!(worst >= INTERVAL * part / 200, "{work:?}, {part} %: the loop may use it, not {worst:?}");
        }
    }
}

#[test]
fn a_part_that_is_set_while_the_loop_runs_holds_as_one_from_the_start() {
    for (before, then) in [(OutOfReach::NO_LIMIT, percent(10)), (percent(10), OutOfReach::NO_LIMIT)] {
        let times = out_of_reach_after(before, Work::Collapses, |work| work.set_out_of_reach(then));
        assert_eq!(worst(&times), worst(&out_of_reach(then, Work::Collapses)));
    }
}

/// Promotes all windows within the default limits. Returns how long each tick took.
fn ticks(part: OutOfReach) -> Vec<Duration> {
    let host = Arc::<FakeHost>::default();
    let config = ManagerConfig { out_of_reach: part, ..ManagerConfig::default() };
    let vm = Work::Collapses.vm(&host);
    let mut work = ManagerLoop::new(host.clone(), vec![vm], Work::Collapses.policy(), config);
    let (mut took, mut done) = (Vec::new(), 0);
    while done < u64::from(WINDOWS) {
        let began = host.now();
        done += work.tick();
        took.push(host.now().since(began));
        host.sleep(ManagerConfig::default().tick_shortest);
    }
    took
}

#[test]
fn a_smaller_part_spreads_the_same_work_over_more_ticks_and_no_tick_takes_longer_for_it() {
    let (usual, small) = (ticks(OutOfReach::default()), ticks(percent(3)));
    let total = |ticks: &[Duration]| ticks.iter().sum::<Duration>();
    assert!(small.len() >= usual.len() * 5, "{} and {} ticks", small.len(), usual.len());
    assert!(total(&small) >= total(&usual) * 5, "{:?} and {:?}", total(&small), total(&usual));
    let longest = |ticks: &[Duration]| ticks.iter().max().copied();
    assert!(longest(&small) <= longest(&usual).map(|time| time * 5 / 4), "{small:?}, {usual:?}");
}

#[test]
fn a_tick_ends_after_a_second_whatever_its_plan_holds_and_the_next_one_does_the_rest() {
    let second = Duration::from_secs(1);
    for work in [Work::Collapses, Work::Splits, Work::Releases] {
        let host = Arc::<FakeHost>::default();
        let limits = BudgetLimits { copy_per_second: mib(1 << 20), burst: second, ..BudgetLimits::default() };
        let config = ManagerConfig { limits, out_of_reach: percent(3), ..ManagerConfig::default() };
        let vm = work.vm(&host);
        let mut manager = ManagerLoop::new(host.clone(), vec![vm], work.policy(), config);
        let (mut done, mut longest, mut ticks) = (0, Duration::ZERO, 0);
        while done < u64::from(WINDOWS) {
            let began = host.now();
            done += manager.tick();
            longest = longest.max(host.now().since(began));
            ticks += 1;
        }
        assert_eq!((done, ticks > 2), (u64::from(WINDOWS), true), "{work:?}: {ticks}");
        assert!(longest > second / 2 && longest < second * 5 / 4, "{work:?}: {longest:?}");
        let outcomes = &manager.report().outcomes;
        assert!(outcomes[&("none", "skipped_next_tick")] > 0, "{work:?}: {outcomes:?}");
    }
}

#[test]
fn without_a_limit_windows_are_copied_one_right_after_another() {
    let times = out_of_reach(OutOfReach::NO_LIMIT, Work::Collapses);
    assert!(worst(&times) > INTERVAL * 9 / 10, "{:?}", worst(&times));
}
