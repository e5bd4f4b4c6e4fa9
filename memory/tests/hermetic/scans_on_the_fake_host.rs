//! How often the windows of a guest in another process are scanned, and that no change is missed for it. On the fake
//! host a scan takes 9 us for each window, as the kernel's does in base pages; else time passes in actions, and while a
//! thread sleeps.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::gate::{GateState, LeftAlone};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_policies::policy::by_name;
use wideleaf_policies::recovery::{Cause, Events};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{
    Action, Budget, BudgetLimits, Bytes, Cost, Gpa, GpaRange, Hva, Moment, PageSize, PerTenThousand, Plan, Policy,
    Snapshot, VmId,
};

use crate::test_gate::TestGate;

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 1000;
const OF_WINDOW: Duration = Duration::from_micros(9);
/// Time that a scan of all windows takes.
const OF_ALL: Duration = Duration::from_millis(9);

/// A policy that promotes the first small window of each tick, if there is one, as one with little to do.
struct OneATick;

impl Policy for OneATick {
    fn name(&self) -> &'static str {
        "one_a_tick"
    }

    fn promotes(&self) -> bool {
        true
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        let vm = &snapshot.vms[0];
        let small = (0..vm.len()).find(|row| vm.resident[*row] > 0 && !vm.backing[*row].is_large());
        if let Some(row) = small {
            let (vm, window, to) = (vm.vm, vm.windows[row], PageSize::Huge2M);
            plan.push(Action::Promote { vm, window, to }, Cost::default());
        }
    }
}

/// A guest in another process, with one page in each window.
struct Guest {
    host: Arc<FakeHost>,
    gate: Arc<TestGate>,
    work: ManagerLoop,
}

impl Guest {
    fn under(policy: Box<dyn Policy>) -> Guest {
        let host = Arc::<FakeHost>::default();
        host.be_of_another_process();
        (0..WINDOWS).for_each(|window| host.make_present(RAM_AT + mib(2) * window, kib(4), false));
        host.take_for_scans(OF_WINDOW);
        set_in_use(&host, 100_000);
        let gate = Arc::new(TestGate(Mutex::new((GateState::Open, Events::default()))));
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: RAM_AT };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let vm = ManagedVm { gate: Some(gate.clone()), ..ManagedVm::external(VmId(0), vec![range], backing, None) };
        let limits = BudgetLimits {
            copy_per_second: mib(1 << 20),
            cpu_share: PerTenThousand::new(1_000_000),
            burst: Duration::from_secs(1),
        };
        let config = ManagerConfig { limits, ..ManagerConfig::for_external_guests() };
        let work = ManagerLoop::new(host.clone(), vec![vm], policy, config);
        let mut guest = Guest { host, gate, work };
        assert!(guest.tick_scans(), "the first one sees all");
        guest
    }

    fn observed() -> Guest {
        Guest::under(by_name("never").unwrap().with_defaults())
    }

    fn scanned_by_a_tick(&mut self) -> Bytes {
        let before = self.host.scanned();
        self.work.tick();
        self.host.scanned() - before
    }

    /// Whether a tick scans all windows.
    fn tick_scans(&mut self) -> bool {
        self.scanned_by_a_tick() >= mib(2) * WINDOWS
    }

    fn resident(&self, window: usize) -> u16 {
        self.work.live().snapshot.vms[0].resident[window]
    }

    fn huge(&self) -> usize {
        self.work.live().snapshot.vms[0].backing.iter().filter(|backing| backing.is_large()).count()
    }
}

fn set_in_use(host: &FakeHost, pages: u64) {
    host.set_text("/proc/self/statm", &format!("9000000 {pages} 700 400 0 30000 0\n"));
}

/// Number of ticks of `ticks` that scan all windows, with this time between two.
fn scans(guest: &mut Guest, ticks: u32, between: Duration) -> u32 {
    let mut scans = 0;
    for _ in 0..ticks {
        guest.host.sleep(between);
        scans += u32::from(guest.tick_scans());
    }
    scans
}

#[test]
fn a_guest_that_uses_no_more_memory_is_scanned_for_a_four_hundredth_of_the_time() {
    let mut guest = Guest::observed();
    assert_eq!(scans(&mut guest, 3_600, Duration::from_secs(1)), 3_600 / 4, "9 ms each 4 s, at the next second");
}

#[test]
fn a_guest_that_fills_its_memory_is_scanned_for_a_tenth_of_the_time() {
    let mut guest = Guest::observed();
    for window in 0..100_u32 {
        guest.host.make_present(RAM_AT + mib(2) * u64::from(window), mib(2), false);
        set_in_use(&guest.host, 100_000 + 512 * u64::from(window + 1));
        guest.host.sleep(OF_ALL * 10);
        assert!(guest.tick_scans());
        assert_eq!(guest.resident(window as usize), 512);
    }
    guest.host.sleep(OF_ALL * 10);
    assert!(!guest.tick_scans(), "it has come to rest");
}

#[test]
fn windows_acted_on_are_seen_at_the_next_tick_and_the_others_are_not_scanned_for_them() {
    let mut guest = Guest::under(Box::new(OneATick));
    for done in 1..100 {
        guest.host.sleep(Duration::from_millis(10));
        // The action looks at its window before and after, and the tick at that of the one before.
        assert!(guest.scanned_by_a_tick() <= mib(2) * 5);
        assert!((done..=done + 1).contains(&guest.huge()), "{} after {done}", guest.huge());
    }
    assert_eq!(guest.host.huge_windows() as usize, guest.huge());
}

#[test]
fn a_window_that_the_kernel_has_made_large_costs_a_skipped_action_and_is_counted_as_the_kernels() {
    let mut guest = Guest::under(Box::new(OneATick));
    guest.host.make_present(RAM_AT + mib(2), mib(2), true);
    for _ in 0..3 {
        guest.host.sleep(Duration::from_millis(10));
        assert!(!guest.tick_scans());
    }
    let report = guest.work.report();
    assert_eq!(report.outcomes[&("collapse", "skipped_already_done")], 1, "{:?}", report.outcomes);
    assert_eq!(guest.work.live().vms[0].kernel_work.named(), [("at_fault", 0), ("collapsed", 1), ("split", 0)]);
}

#[test]
fn an_event_that_begins_or_ends_and_a_gate_that_opens_make_the_next_tick_scan() {
    let mut guest = Guest::observed();
    let set = |guest: &Guest, state, present, ended| {
        *guest.gate.0.lock() = (state, Events { present, ended, ..Events::default() });
        guest.host.sleep(Duration::from_millis(10));
    };
    let (closed, stop) = (GateState::Closed(LeftAlone::Asked), Some(Cause::Stop));
    for (state, present, ended, is_due) in [
        (GateState::Open, None, 0, false),
        (GateState::Open, stop, 0, true),
        (GateState::Open, stop, 0, false),
        (GateState::Open, None, 1, true),
        (GateState::Open, None, 1, false),
        (GateState::Open, None, 2, true), // one that the loop did not see
        (closed, None, 2, false),
        (GateState::Open, None, 2, true),
    ] {
        set(&guest, state, present, ended);
        assert_eq!(guest.tick_scans(), is_due, "{state:?}, {present:?}, {ended}");
    }
}

#[test]
fn a_published_state_tells_when_the_latest_scan_began_also_while_windows_are_acted_on() {
    let mut guest = Guest::under(Box::new(OneATick));
    let scanned_at = |guest: &Guest| guest.work.live().scanned_at().expect("the first tick has scanned");
    let first = scanned_at(&guest);
    assert_eq!(first, Moment::START, "it began before the rows were read");
    for _ in 0..3 {
        guest.host.sleep(Duration::from_millis(10));
        assert!(!guest.tick_scans());
        assert_eq!(scanned_at(&guest), first);
    }
    guest.host.sleep(OF_ALL * 400);
    let before = guest.host.now();
    assert!(guest.tick_scans());
    assert_eq!(scanned_at(&guest), before);
}

#[test]
fn a_scan_that_fails_leaves_the_age_of_the_one_before() {
    let mut guest = Guest::observed();
    let first = guest.work.live().scanned_at();
    guest.host.sleep(OF_ALL * 400);
    guest.host.fail_call(1, libc::EIO); // after the memory in use is read
    guest.work.tick();
    assert_eq!(guest.work.report().sensor_failures["host_backing"], 1);
    assert_eq!(guest.work.live().scanned_at(), first);
}

#[test]
fn memory_that_is_swapped_out_is_looked_for_in_scans_alone_and_stays_known_between_them() {
    let mut guest = Guest::observed();
    guest.host.swap_out(RAM_AT + kib(4), kib(2044));
    guest.host.set_text("/proc/self/status", "VmSwap:\t2044 kB\n");
    set_in_use(&guest.host, 90_000);
    guest.host.sleep(OF_ALL * 10);
    assert_eq!(guest.scanned_by_a_tick(), mib(2) * WINDOWS * 2, "once for the pages present, once for the others");
    for _ in 0..3 {
        guest.host.sleep(Duration::from_millis(10));
        assert_eq!(guest.scanned_by_a_tick(), mib(0));
        assert_eq!(guest.work.live().vms[0].swapped, Some(kib(2044)));
    }
}

#[test]
fn a_process_that_no_longer_tells_its_memory_in_use_is_scanned_which_shows_its_end() {
    let mut guest = Guest::observed();
    guest.host.sleep(OF_ALL * 10);
    assert!(!guest.tick_scans());
    guest.host.fail_call(0, libc::ESRCH);
    assert!(guest.tick_scans());
}
