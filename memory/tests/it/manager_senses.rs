//! The loop asks the slower sensors for the inputs of its policy, and releases the windows that the policy names,
//! on the running kernel. If windows cannot be moved these tests are skipped with the reason;
//! `WIDELEAF_REQUIRE=uffd_move` turns the skip into a failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{moves, tick_until};
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{FaultPrice, ManagedVm, ManagerConfig, ManagerLoop, PriceSource};
use wideleaf_memory::second_level::{FaultCounters, Paging, SecondLevel, SlotId};
use wideleaf_memory::sensors::host_backing::window_backing;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_memory::{GuestRam, LinuxHost, Manager};
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{
    Action, Backing, Budget, Bytes, Cost, Gpa, GpaRange, Moment, PageSize, Plan, Snapshot, VmId, VmSnapshot,
    WindowIndex,
};

const WINDOWS: u64 = 8;
/// The last snapshot of a policy that asks for every sensor.
type Seen = Arc<Mutex<Snapshot>>;

struct Watcher {
    seen: Seen,
    needs: Needs,
    releases: Option<WindowIndex>,
    promotes: bool,
    /// Number of windows, from the first one on, with accesses that it would use.
    uses_access_of: usize,
}

impl Policy for Watcher {
    fn name(&self) -> &'static str {
        "watcher"
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn uses_access(&self, _: &VmSnapshot, row: usize) -> bool {
        row < self.uses_access_of
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        *self.seen.lock() = snapshot.clone();
        if let Some(window) = self.releases.take() {
            plan.push(Action::Release { vm: VmId(0), window }, Cost::default());
        }
        let vm = &snapshot.vms[0];
        for row in (0..vm.len()).filter(|row| self.promotes && vm.backing[*row] == Backing::Base4K) {
            plan.push(Action::Promote { vm: VmId(0), window: vm.windows[row], to: PageSize::Huge2M }, Cost::default());
        }
    }
}

fn ram_with_one_word_per_page(kind: BackingKind) -> (Arc<LinuxHost>, Arc<GuestRam>) {
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(kind, PageSize::Base4K).unwrap()).unwrap();
    let host = Arc::new(LinuxHost::open().unwrap());
    host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite).unwrap();
    for page in ram.words(ram.ranges()[0]).chunks(512) {
        page[0].store(1, Ordering::Relaxed);
    }
    (host, ram)
}

fn watched(needs: Needs, releases: Option<WindowIndex>) -> (Seen, Box<dyn Policy>) {
    let seen = Seen::default();
    (seen.clone(), Box::new(Watcher { seen, needs, releases, promotes: false, uses_access_of: WINDOWS as usize }))
}

#[test]
fn a_sensor_begins_and_ends_with_the_policy_that_asks_for_it() {
    if moves::are_missing() {
        return;
    }
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let (host, ram) = ram_with_one_word_per_page(kind);
        let vm = ManagedVm::new(VmId(0), ram.clone(), None);
        let blind = || watched(Needs::default(), None).1;
        let manager = Manager::spawn(host.clone(), vec![vm], blind(), ManagerConfig::default()).unwrap();
        manager.activate();
        for _ in 0..3 {
            let (seen, asks) = watched(Needs { access: true, ..Needs::default() }, None);
            manager.set_policy(asks).wait().unwrap();
            let is_sampled = || seen.lock().vms.first().is_some_and(|vm| vm.access[0].samples() > 0);
            let deadline = Instant::now() + Duration::from_secs(60);
            while !is_sampled() {
                assert!(Instant::now() < deadline, "its first window was not sampled within a minute");
                std::thread::yield_now();
            }
            // Its readings stay if the next policy asks for it as well.
            let (seen, asks) = watched(Needs { access: true, zero: true, ..Needs::default() }, None);
            manager.set_policy(asks).wait().unwrap();
            while seen.lock().vms.is_empty() {
                std::thread::yield_now();
            }
            assert!(is_sampled());
            manager.set_policy(blind()).wait().unwrap();
            let resident = |window| {
                window_backing(host.as_ref(), ram.ranges()[0], None, WindowIndex::new(window)).unwrap().resident
            };
            assert!((0..WINDOWS).all(|window| resident(window) == 512), "{kind:?}: all pages are in place");
        }
        assert!(manager.stop().unanswered.is_empty());
        let words = ram.words(ram.ranges()[0]);
        assert!(words.chunks(512).all(|page| page[0].load(Ordering::Relaxed) == 1), "{kind:?}: a word is lost");
    }
}

#[test]
fn touched_windows_are_distinguished_from_idle_ones_and_no_word_is_lost() {
    if moves::are_missing() {
        return;
    }
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        touched_windows_are_told_from_idle_ones(kind);
    }
}

fn touched_windows_are_told_from_idle_ones(kind: BackingKind) {
    let (host, ram) = ram_with_one_word_per_page(kind);
    let (seen, policy) = watched(Needs { access: true, ..Needs::default() }, None);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The lower half is in use all the time.
        let writer = scope.spawn(|| {
            let mut rounds = 0;
            while !is_over.load(Ordering::Relaxed) {
                rounds += 1;
                let words = ram.words(ram.ranges()[0]);
                for page in words[..words.len() / 2].chunks(512) {
                    assert_eq!(page[0].fetch_add(1, Ordering::Relaxed), rounds, "a word is lost");
                }
            }
        });
        let vm = ManagedVm::new(VmId(0), ram.clone(), None);
        let manager = Manager::spawn(host.clone(), vec![vm], policy, ManagerConfig::default()).unwrap();
        manager.activate();
        // A writer that gets no CPU for a whole sample touches nothing in it.
        let is_known = |row: usize| {
            let seen = seen.lock();
            let history = seen.vms.first().map(|vm| &vm.access[row]);
            let is_idle = row >= WINDOWS as usize / 2;
            history.is_some_and(|history| history.samples() >= 2 && (is_idle || history.touched().count_ones() >= 2))
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !(0..WINDOWS as usize).all(is_known) {
            assert!(Instant::now() < deadline, "not every window was sampled twice within a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
        let all_there = manager.with_all_in_place(|| {
            let resident = |window| {
                window_backing(host.as_ref(), ram.ranges()[0], None, WindowIndex::new(window)).unwrap().resident
            };
            (0..WINDOWS).all(|window| resident(window) == 512)
        });
        assert!(all_there, "no window is aside during the check");
        let report = manager.stop();
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        let cost = report.sensor_costs["access"];
        assert!(cost.windows >= 2 * WINDOWS && cost.waits >= WINDOWS, "{cost:?}");
        assert!(report.unanswered.is_empty(), "{:?}", report.unanswered);
    });
    let access = seen.lock().vms[0].access.clone();
    for (row, history) in access.iter().enumerate() {
        assert_eq!(history.touched() > 0, row < WINDOWS as usize / 2, "window {row}: {history:?}");
    }
}

#[test]
fn windows_with_accesses_of_no_use_are_not_sampled() {
    if moves::are_missing() {
        return;
    }
    let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
    let needs = Needs { access: true, ..Needs::default() };
    let seen = Seen::default();
    let policy = Watcher { seen: seen.clone(), needs, releases: None, promotes: false, uses_access_of: 3 };
    let vm = ManagedVm::new(VmId(0), ram, None);
    let mut work = ManagerLoop::new(host, vec![vm], Box::new(policy), ManagerConfig::default());
    let samples = || seen.lock().vms[0].access.iter().map(|access| access.samples()).collect::<Vec<_>>();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        work.tick();
        if samples()[..3].iter().all(|samples| *samples >= 2) {
            break;
        }
        assert!(Instant::now() < deadline, "its windows were not sampled twice within a minute: {:?}", samples());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(samples()[3..], [0; WINDOWS as usize - 3]);
}

#[test]
fn windows_are_swapped_under_a_writer_if_they_can_be_moved() {
    if moves::are_missing() {
        return;
    }
    const TICKS: u64 = 20;
    let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
    let needs = Needs { access: true, ..Needs::default() };
    let policy =
        Watcher { seen: Seen::default(), needs, releases: None, promotes: true, uses_access_of: WINDOWS as usize };
    let policy = Box::new(policy);
    let vm = ManagedVm::new(VmId(0), ram.clone(), None);
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    let is_over = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut rounds = 0;
            while !is_over.load(Ordering::Relaxed) {
                rounds += 1;
                for page in ram.words(ram.ranges()[0]).chunks(512) {
                    assert_eq!(page[0].fetch_add(1, Ordering::Relaxed), rounds, "a word is lost");
                }
            }
        });
        // A refused window backs off. As of the tick's own look: a window that is aside for a sample afterwards looks
        // unbacked.
        tick_until(&mut work, |work| {
            let are_huge = |vm: &VmSnapshot| vm.backing.iter().all(|backing| *backing == Backing::Huge2M);
            work.report().ticks >= TICKS && work.live().snapshot.vms.iter().all(are_huge)
        });
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        work.finish()
    });
    let large = |window| {
        let row = window_backing(host.as_ref(), ram.ranges()[0], None, WindowIndex::new(window)).unwrap();
        (row.resident, row.backing) == (512, Backing::Huge2M)
    };
    assert_eq!((0..WINDOWS).filter(|window| large(*window)).count() as u64, WINDOWS, "{:?}", report.outcomes);
    let swapped = report.done("swap");
    // A kernel that keeps empty page tables cannot; there collapse makes them large.
    assert!(
        swapped == WINDOWS || report.outcomes.contains_key(&("swap", "refused_not_observed")),
        "{:?}",
        report.outcomes
    );
    assert_eq!(report.bloat, Bytes::ZERO);
}

#[test]
fn zero_pages_are_counted_and_released_when_the_policy_says_so() {
    // Both need a userfaultfd that sees the kernel's faults.
    if moves::are_missing() {
        return;
    }
    let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
    let third = WindowIndex::new(3);
    for page in ram.words(ram.ranges()[0])[3 * (2 << 20 >> 3)..].chunks(512).take(100) {
        page[0].store(0, Ordering::Relaxed);
    }
    let needs = Needs { zero: true, host_memory: true, ..Needs::default() };
    let (seen, policy) = watched(needs, None);
    let vm = ManagedVm::new(VmId(0), ram.clone(), None);
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    work.tick();
    work.tick();
    {
        let seen = seen.lock();
        assert_eq!((seen.vms[0].zero[3], seen.vms[0].zero[2]), (Some(100), Some(0)));
        assert!(seen.host.is_some_and(|memory| memory.total > memory.available && memory.available > Bytes::ZERO));
    }
    drop(work);

    let (_, policy) = watched(Needs::default(), Some(third));
    let vm = ManagedVm::new(VmId(0), ram.clone(), None);
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    work.tick();
    let report = work.finish();
    assert_eq!(report.done("release"), 1, "{:?}", report.outcomes);
    assert_eq!(report.released, kib(400));
    let left = window_backing(host.as_ref(), ram.ranges()[0], None, third).unwrap();
    assert_eq!((left.resident, left.backing), (412, Backing::Base4K));
}

#[test]
fn written_pages_are_counted_between_ticks_and_never_in_slots_logged_by_another_user() {
    let slots: Vec<_> = (0..4).map(|slot| GpaRange::new(Gpa::new(0) + mib(4) * slot, mib(4)).unwrap()).collect();
    let guest = Arc::new(FakeSecondLevel::new(&slots));
    guest.set_dirty_log(SlotId(1), true).unwrap();
    let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
    let (seen, policy) = watched(Needs { written: true, ..Needs::default() }, None);
    let vm = ManagedVm::new(VmId(0), ram, Some(guest.clone()));
    let mut work = ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default());
    work.tick();
    let logged = || guest.slots().iter().filter(|slot| slot.is_dirty_logged).map(|slot| slot.id.0).collect::<Vec<_>>();
    assert_eq!(logged(), [0, 1, 2], "two at a time, and the one that is held");
    for page in [0, 1, 512, 1024, 2048] {
        guest.write(Gpa::new(0) + kib(4) * page);
    }
    work.tick();
    assert_eq!(seen.lock().vms[0].is_held, [false, false, true, true, false, false, false, false]);
    let written = seen.lock().vms[0].written.clone();
    assert_eq!(written, [Some(2), Some(1), None, None, Some(1), Some(0), None, None]);
    let report = work.finish();
    assert_eq!(logged(), [1], "and all logs are as before");
    let cost = report.sensor_costs["written"];
    assert_eq!((cost.samples, cost.windows, cost.waits), (2, 8, 4), "the second one ended with the loop");
    assert!(report.sensor_failures.is_empty(), "{:?}", report.sensor_failures);
}

/// A loop over a guest with this second level, and a policy that asks for `needs`.
fn loop_over(guest: &Arc<FakeSecondLevel>, needs: Needs) -> ManagerLoop {
    let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
    let (_, policy) = watched(needs, None);
    let vm = ManagedVm::new(VmId(0), ram, Some(guest.clone()));
    ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default())
}

/// Ticks of a guest that has 4096 faults of 25 us before each.
fn ticks_with_faults(work: &mut ManagerLoop, guest: &FakeSecondLevel, ticks: std::ops::Range<u64>) {
    for tick in ticks {
        let faults = tick * 4096;
        let system_time = Duration::from_micros(faults * 25);
        guest.set_fault_counters(FaultCounters { faults, exits: faults, system_time, ..FaultCounters::default() });
        work.tick();
    }
}

#[test]
fn the_price_of_a_fault_is_measured_where_a_sensor_causes_faults() {
    let slots = [GpaRange::new(Gpa::new(0), mib(16)).unwrap()];
    let guest = Arc::new(FakeSecondLevel::new(&slots));
    guest.set_paging(Paging::Shadow);
    let mut work = loop_over(&guest, Needs { written: true, ..Needs::default() });
    // The first tick has nothing to compare with, and each later one has the faults of two batches.
    ticks_with_faults(&mut work, &guest, 1..3);
    let price = work.report().fault_prices[&VmId(0)];
    assert_eq!((price.time, price.source), (Duration::from_micros(5), PriceSource::Assumed));
    ticks_with_faults(&mut work, &guest, 3..4);
    let (time, source) = (Duration::from_micros(25), PriceSource::Refaults);
    let measured = FaultPrice { time, source, faults: 2 * 4096, faults_per_512: 512 };
    assert_eq!(work.finish().fault_prices[&VmId(0)], measured);

    let mut work = loop_over(&guest, Needs { zero: true, ..Needs::default() });
    ticks_with_faults(&mut work, &guest, 5..10);
    assert!(work.finish().fault_prices.is_empty(), "no sensor causes faults");
}

#[test]
fn the_price_stays_assumed_where_kvm_has_no_such_counts() {
    let guest = Arc::new(FakeSecondLevel::new(&[GpaRange::new(Gpa::new(0), mib(16)).unwrap()]));
    let mut work = loop_over(&guest, Needs { written: true, ..Needs::default() });
    for _ in 0..3 {
        work.tick();
    }
    let report = work.finish();
    let price = report.fault_prices[&VmId(0)];
    assert_eq!((price.time, price.source, price.faults), (Duration::from_micros(1), PriceSource::Assumed, 0));
    assert!(report.sensor_failures.is_empty(), "{:?}", report.sensor_failures);
}

#[test]
fn counters_that_cannot_be_read_are_counted_and_read_again_at_the_next_tick() {
    let guest = Arc::new(FakeSecondLevel::new(&[GpaRange::new(Gpa::new(0), mib(16)).unwrap()]));
    let mut work = loop_over(&guest, Needs { written: true, ..Needs::default() });
    ticks_with_faults(&mut work, &guest, 0..1);
    // A tick ends the sample of writes with two calls, asks for KVM's totals, and then for the faults.
    guest.fail_call(3, libc::EIO);
    ticks_with_faults(&mut work, &guest, 1..7);
    let report = work.finish();
    assert_eq!(report.sensor_failures.get("fault_price"), Some(&1), "{:?}", report.sensor_failures);
    let price = report.fault_prices[&VmId(0)];
    assert_eq!((price.time, price.source), (Duration::from_micros(25), PriceSource::Refaults));
    assert_eq!(price.faults, 4 * 4096, "no interval reaches over the tick without counters");
}

#[test]
fn a_write_sensor_that_fails_is_counted_and_leaves_no_slot_logged() {
    let slots = [GpaRange::new(Gpa::new(0), mib(16)).unwrap()];
    for call in 0..9 {
        let guest = Arc::new(FakeSecondLevel::new(&slots));
        let (host, ram) = ram_with_one_word_per_page(BackingKind::Anon);
        let (_, policy) = watched(Needs { written: true, ..Needs::default() }, None);
        let vm = ManagedVm::new(VmId(0), ram, Some(guest.clone()));
        let mut work = ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default());
        guest.fail_call(call, libc::EIO);
        work.tick();
        work.tick();
        let report = work.finish();
        assert!(!guest.slots()[0].is_dirty_logged, "call {call}");
        // Each reading of the statistics is followed by three calls of the sensor: on, take, off.
        let name = if call.is_multiple_of(4) { "kvm_stats" } else { "written" };
        assert_eq!(report.sensor_failures.get(name), Some(&1), "call {call}: {:?}", report.sensor_failures);
    }
}

#[test]
fn unanswerable_questions_are_reported_with_their_reason() {
    let range = GpaRange::new(Gpa::new(0), mib(8)).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let (_, policy) = watched(Needs { access: true, written: true, guest_mapping: true, ..Needs::default() }, None);
    let host = Arc::new(LinuxHost::open().unwrap());
    let vm = ManagedVm { ram: None, ..ManagedVm::new(VmId(0), ram.clone(), None) };
    let work = ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default());
    let unanswered = work.finish().unanswered;
    assert_eq!(unanswered.len(), 3, "{unanswered:?}");
    assert!(unanswered[0].starts_with("vm 0: which windows are used: "), "{unanswered:?}");
    assert!(unanswered[1].contains("a process has no dirty log"), "{unanswered:?}");
    assert!(unanswered[2].contains("only RAM that is mapped in this process can be read"), "{unanswered:?}");
}
