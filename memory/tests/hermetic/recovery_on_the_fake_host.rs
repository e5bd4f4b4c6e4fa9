//! Recoveries after events of a guest, under a policy that plans nothing by itself.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::gate::{GateState, LeftAlone};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop, SharedRecovery};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_policies::policy::Policy;
use wideleaf_policies::recovery::{Cause, Events};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Budget, BudgetLimits, Gpa, GpaRange, Hva, Moment, Outcome, PageSize, PerTenThousand, Plan, Snapshot, VmId,
};

use crate::test_gate::TestGate;

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 8;

/// A policy that would promote, but chooses no window.
struct Undecided;

impl Policy for Undecided {
    fn name(&self) -> &'static str {
        "undecided"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {}

    fn learn(&mut self, _: &Outcome) {}
}

struct Guest {
    host: Arc<FakeHost>,
    gate: Arc<TestGate>,
    work: ManagerLoop,
}

impl Guest {
    /// A guest on huge pages that has run in peace for some ticks.
    fn in_peace(limits: BudgetLimits) -> Guest {
        let host = Arc::new(FakeHost::default());
        host.make_present(RAM_AT, mib(2) * WINDOWS, true);
        let gate = Arc::new(TestGate(Mutex::new((GateState::Open, Events::default()))));
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: RAM_AT };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let vm = ManagedVm {
            gate: Some(gate.clone()),
            recovery: Some(SharedRecovery::default()),
            ..ManagedVm::external(VmId(0), vec![range], backing, None)
        };
        let config = ManagerConfig { limits, ..ManagerConfig::for_external_guests() };
        let work = ManagerLoop::new(host.clone(), vec![vm], Box::new(Undecided), config);
        let mut guest = Guest { host, gate, work };
        for _ in 0..3 {
            guest.change(|_, events| events.looks += 1);
            guest.tick();
        }
        guest
    }

    fn change(&self, change: impl FnOnce(&mut GateState, &mut Events)) {
        let (state, events) = &mut *self.gate.0.lock();
        change(state, events);
    }

    /// An event begins, and splits the huge pages.
    fn is_split_by(&mut self, cause: Cause, why: LeftAlone) {
        self.change(|state, events| {
            *state = GateState::Closed(why);
            events.looks += 1;
            events.present = Some(cause);
        });
        self.host.make_present(RAM_AT, mib(2) * WINDOWS, false);
        self.tick();
    }

    fn event_ends(&self, cause: Cause) {
        let now = self.host.now();
        self.change(|state, events| {
            *state = GateState::Open;
            *events = Events { looks: events.looks + 1, present: None, ended: events.ended + 1, ..*events };
            events.latest = Some((cause, now));
        });
    }

    /// A tick, and a tenth of a second until the next one.
    fn tick(&mut self) -> u64 {
        let done = self.work.tick();
        self.host.sleep(Duration::from_millis(100));
        done
    }
}

fn plenty() -> BudgetLimits {
    let (copy_per_second, cpu_share) = (mib(1 << 20), PerTenThousand::new(1_000_000));
    BudgetLimits { copy_per_second, cpu_share, burst: Duration::from_secs(1) }
}

#[test]
fn what_an_event_split_is_large_again_after_it_although_the_policy_chooses_nothing() {
    let mut guest = Guest::in_peace(plenty());
    guest.is_split_by(Cause::Migration, LeftAlone::Migration);
    assert_eq!((guest.tick(), guest.host.huge_windows()), (0, 0), "the guest is left alone");
    guest.event_ends(Cause::Migration);
    assert_eq!((guest.tick(), guest.host.huge_windows()), (WINDOWS, WINDOWS));
    let progress = guest.work.live().vms[0].recovering.expect("it is not settled yet");
    assert_eq!((progress.cause, progress.small), (Cause::Migration, WINDOWS));
    for _ in 0..25 {
        guest.tick();
    }
    let live = guest.work.live();
    assert_eq!(live.vms[0].recovering, None);
    let counts = live.recoveries["migration"];
    assert_eq!((counts.done, counts.cut_off), (1, 0));
    assert!(counts.last.is_some_and(|last| last >= Duration::from_millis(100) && last < Duration::from_millis(300)));
}

#[test]
fn a_recovery_has_a_multiple_of_the_budget_and_only_while_it_has_work() {
    let limits = BudgetLimits { copy_per_second: mib(10), burst: Duration::from_millis(200), ..plenty() };
    let mut guest = Guest::in_peace(limits);
    guest.is_split_by(Cause::DirtyLog, LeftAlone::DirtyRate);
    assert_eq!(guest.work.live().limits, limits);
    guest.event_ends(Cause::DirtyLog);
    guest.tick();
    assert_eq!(guest.work.live().limits.copy_per_second, mib(20));
    // 20 MiB a second are one window a tick.
    let ticks = (0..50).take_while(|_| guest.tick() > 0 || guest.host.huge_windows() < WINDOWS).count();
    assert!((4..=10).contains(&ticks), "{ticks}");
    guest.tick();
    assert_eq!(guest.work.live().limits, limits);
}

#[test]
fn a_second_event_during_a_recovery_cuts_it_off_and_the_next_one_ends_its_work() {
    let limits = BudgetLimits { copy_per_second: mib(10), burst: Duration::from_millis(200), ..plenty() };
    let mut guest = Guest::in_peace(limits);
    guest.is_split_by(Cause::Stop, LeftAlone::Migration);
    guest.event_ends(Cause::Stop);
    guest.tick();
    assert!(guest.host.huge_windows() < WINDOWS);
    guest.is_split_by(Cause::Snapshot, LeftAlone::Snapshot);
    guest.event_ends(Cause::Snapshot);
    for _ in 0..60 {
        guest.tick();
    }
    let recoveries = guest.work.live().recoveries.clone();
    assert_eq!((recoveries["stop"].done, recoveries["stop"].cut_off), (0, 1));
    assert_eq!((recoveries["snapshot"].done, guest.host.huge_windows()), (1, WINDOWS));
}

#[test]
fn memory_that_the_guest_gave_back_during_the_event_is_not_filled() {
    let mut guest = Guest::in_peace(plenty());
    guest.is_split_by(Cause::Balloon, LeftAlone::Snapshot);
    guest.host.make_absent(RAM_AT, mib(2));
    guest.host.make_absent(RAM_AT + mib(3), mib(1));
    guest.event_ends(Cause::Balloon);
    for _ in 0..30 {
        guest.tick();
    }
    assert_eq!(guest.host.huge_windows(), WINDOWS - 2);
    assert!(!guest.host.has_page(RAM_AT, mib(2)) && !guest.host.has_page(RAM_AT + mib(3), mib(1)));
    assert_eq!(guest.work.live().recoveries["balloon"].done, 1, "what is there is large");
    assert_eq!(guest.work.report().bloat, mib(0));
}

#[test]
fn a_guest_that_ends_in_the_middle_of_a_recovery_ends_it() {
    let mut guest = Guest::in_peace(BudgetLimits { copy_per_second: mib(10), ..plenty() });
    guest.is_split_by(Cause::Arrival, LeftAlone::Migration);
    guest.event_ends(Cause::Arrival);
    guest.tick();
    assert!(guest.work.live().vms[0].recovering.is_some());
    guest.change(|state, _| *state = GateState::Gone);
    guest.tick();
    assert_eq!(guest.work.live().vms[0].recovering, None);
    assert!(guest.work.has_ended());
}

#[test]
fn any_call_may_fail_during_a_recovery_and_it_still_ends() {
    for errno in [libc::ENOMEM, libc::EAGAIN, libc::EBUSY] {
        for call in (0..60).step_by(3) {
            let mut guest = Guest::in_peace(plenty());
            guest.is_split_by(Cause::FaultsServed, LeftAlone::Snapshot);
            guest.event_ends(Cause::FaultsServed);
            guest.host.fail_call(guest.host.calls() + call, errno);
            for _ in 0..200 {
                guest.tick();
            }
            assert_eq!(guest.host.huge_windows(), WINDOWS, "call {call} failed with {errno}");
            assert_eq!(guest.work.live().recoveries["faults_served"].done, 1, "call {call}, {errno}");
        }
    }
}
