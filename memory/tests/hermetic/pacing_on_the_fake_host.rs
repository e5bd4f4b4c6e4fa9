//! The loop keeps windows out of the guest's reach for no more than the set part of any 100 ms, while it acts on many
//! in a row. On the fake host a collapse takes 0.6 ms and a split less; else time passes only while a thread sleeps.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::{COLLAPSE_TIME, FakeHost};
use wideleaf_policies::policy::{Needs, Policy, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Backing, Budget, BudgetLimits, Cost, Gpa, GpaRange, Hva, Moment, Outcome, PageSize, PerTenThousand, Plan,
    Snapshot, VmId,
};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u32 = 512;
const INTERVAL: Duration = Duration::from_millis(100);

/// Demotes all that is huge.
struct Splits;

impl Policy for Splits {
    fn name(&self) -> &'static str {
        "splits"
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        let vm = &snapshot.vms[0];
        let huge = (0..vm.len()).filter(|row| vm.backing[*row] == Backing::Huge2M);
        huge.map(|row| Action::Demote { vm: vm.vm, window: vm.windows[row], to: PageSize::Base4K })
            .for_each(|action| plan.push(action, Cost::default()));
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

fn greedy() -> Box<dyn Policy> {
    by_name("greedy").unwrap().with_defaults()
}

/// Times out of reach while a loop with this part changes the page size of all windows in one tick.
fn out_of_reach(part: PerTenThousand, policy: Box<dyn Policy>, are_huge: bool) -> Vec<(Duration, Duration)> {
    let (host, seen) = (Arc::<FakeHost>::default(), Arc::default());
    let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * u64::from(WINDOWS)).unwrap(), hva: RAM_AT };
    host.make_present(RAM_AT, range.gpa.bytes(), are_huge);
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let vm = ManagedVm::external(VmId(0), vec![range], backing, None);
    let policy = Noting(policy, Arc::clone(&seen));
    let limits = BudgetLimits {
        copy_per_second: mib(1 << 20),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };
    let config = ManagerConfig { limits, out_of_reach: part, ..ManagerConfig::default() };
    let done = ManagerLoop::new(host, vec![vm], Box::new(policy), config).tick();
    assert_eq!(done, u64::from(WINDOWS));
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
    for percent in [10, 30, 60] {
        let part = PerTenThousand::new(percent * 100);
        for (policy, are_huge) in [(greedy(), false), (Box::new(Splits) as Box<dyn Policy>, true)] {
            let worst = worst(&out_of_reach(part, policy, are_huge));
            assert!(worst <= INTERVAL * percent / 100 + COLLAPSE_TIME, "{percent} %: {worst:?}, splits: {are_huge}");
            assert!(worst >= INTERVAL * percent / 200, "{percent} %: the loop may use it, and used {worst:?}");
        }
    }
}

#[test]
fn without_a_limit_windows_are_copied_one_right_after_another() {
    let times = out_of_reach(PerTenThousand::ALL, greedy(), false);
    assert!(worst(&times) > INTERVAL * 9 / 10, "{:?}", worst(&times));
}
