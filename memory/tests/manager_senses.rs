//! The loop asks the slower sensors for what its policy needs, and releases what the policy names, on the kernel this runs
//! on. Where windows cannot be moved these tests are skipped with the reason; `WIDELEAF_REQUIRE=uffd_move` turns the skip
//! into a failure.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod moves;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::sensors::host_backing::window_backing;
use wideleaf_memory::{GuestRam, LinuxHost, Manager};
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{
    Action, Backing, Budget, Bytes, Cost, Gpa, GpaRange, Moment, PageSize, Plan, Snapshot, VmId, WindowIndex,
};

const WINDOWS: u64 = 8;
/// What a policy that is told everything saw last; and the window it releases, if any.
type Seen = Arc<Mutex<Snapshot>>;

struct Watcher {
    seen: Seen,
    needs: Needs,
    releases: Option<WindowIndex>,
    promotes: bool,
}

impl Policy for Watcher {
    fn name(&self) -> &'static str {
        "watcher"
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        *self.seen.lock().unwrap() = snapshot.clone();
        if let Some(window) = self.releases.take() {
            plan.push(Action::Release { vm: VmId(0), window }, Cost::default());
        }
        let vm = &snapshot.vms[0];
        for row in (0..vm.len()).filter(|row| self.promotes && vm.backing[*row] == Backing::Base4K) {
            plan.push(Action::Promote { vm: VmId(0), window: vm.windows[row], to: PageSize::Huge2M }, Cost::default());
        }
    }
}

fn ram_with_one_word_per_page() -> (Arc<LinuxHost>, Arc<GuestRam>) {
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let host = Arc::new(LinuxHost::open().unwrap());
    host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite).unwrap();
    for page in ram.words(ram.ranges()[0]).chunks(512) {
        page[0].store(1, Ordering::Relaxed);
    }
    (host, ram)
}

fn watched(needs: Needs, releases: Option<WindowIndex>) -> (Seen, Box<dyn Policy>) {
    let seen = Seen::default();
    (seen.clone(), Box::new(Watcher { seen, needs, releases, promotes: false }))
}

#[test]
fn touched_windows_are_told_from_idle_ones_and_nobody_loses_a_word() {
    if moves::are_missing() {
        return;
    }
    let (host, ram) = ram_with_one_word_per_page();
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
        let samples = |row: usize| {
            let seen = seen.lock().unwrap();
            seen.vms.first().map_or(0, |vm| vm.access[row].samples())
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while (0..WINDOWS as usize).any(|row| samples(row) < 2) {
            assert!(Instant::now() < deadline, "not every window was sampled twice within a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
        let all_there = manager.with_all_in_place(|| {
            let resident = |window| {
                window_backing(host.as_ref(), ram.ranges()[0], None, WindowIndex::new(window)).unwrap().resident
            };
            (0..WINDOWS).all(|window| resident(window) == 512)
        });
        assert!(all_there, "while somebody looks no window is aside");
        let report = manager.stop();
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        let cost = report.sensor_costs["access"];
        assert!(cost.windows >= 2 * WINDOWS && cost.waits >= WINDOWS, "{cost:?}");
        assert!(report.unanswered.is_empty(), "{:?}", report.unanswered);
    });
    let access = seen.lock().unwrap().vms[0].access.clone();
    for (row, history) in access.iter().enumerate() {
        assert_eq!(history.was_touched(), Some(row < WINDOWS as usize / 2), "window {row}: {history:?}");
    }
}

#[test]
fn windows_are_swapped_under_a_writer_where_they_can_be_moved() {
    if moves::are_missing() {
        return;
    }
    let (host, ram) = ram_with_one_word_per_page();
    let needs = Needs { access: true, ..Needs::default() };
    let policy = Box::new(Watcher { seen: Seen::default(), needs, releases: None, promotes: true });
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
        for _ in 0..20 {
            work.tick();
            std::thread::sleep(Duration::from_millis(15)); // a refused window backs off for 10 ms at first
        }
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
    // A kernel that keeps empty page tables cannot; then it is collapse that makes them large.
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
    let (host, ram) = ram_with_one_word_per_page();
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
        let seen = seen.lock().unwrap();
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
fn what_nobody_can_answer_is_said_with_its_reason() {
    let range = GpaRange::new(Gpa::new(0), mib(8)).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap()).unwrap();
    let (_, policy) = watched(Needs { access: true, guest_mapping: true, ..Needs::default() }, None);
    let host = Arc::new(LinuxHost::open().unwrap());
    let vm = ManagedVm::new(VmId(0), ram, None);
    let work = ManagerLoop::new(host, vec![vm], policy, ManagerConfig::default());
    let unanswered = work.finish().unanswered;
    assert_eq!(unanswered.len(), 2, "{unanswered:?}");
    assert!(unanswered[0].starts_with("vm 0: which windows are used: "), "{unanswered:?}");
    assert!(unanswered[1].contains("a process has no guest's tables"), "{unanswered:?}");
}
