//! A guest does nothing: its manager does not wake, and still sees at once what the guest touches next. A program of
//! its own, since it counts its process's CPU time.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize, PolicyChoice, VmId};

/// Ticks come only because memory came into use.
const NO_TICK: Duration = Duration::from_secs(3600);
const GIVES_UP_AFTER: Duration = Duration::from_secs(20);
/// Times that a manager without pulses sleeps within a second, and a few more: with pulses it sleeps twenty times.
const SLEEPS_MAX: u64 = 5;

/// Times that the manager's thread has slept.
fn sleeps() -> u64 {
    let of = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        status.starts_with("Name:\tmanager\n").then_some(())?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted");
    tasks.filter_map(|task| of(task.ok()?)).next().expect("the manager has a thread")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < GIVES_UP_AFTER, "{what}: not after {GIVES_UP_AFTER:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_manager_sleeps_while_its_process_does_nothing_and_scans_what_is_touched_then() {
    let range = GpaRange::new(Gpa::new(0), mib(64)).expect("small");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let ram = GuestRam::map(&[range], backing).expect("memory");
    let vm = ManagedVm::new(VmId(0), ram.clone(), None);
    let config = ManagerConfig { tick_shortest: NO_TICK, tick_longest: NO_TICK, ..ManagerConfig::default() };
    let never = PolicyChoice::parse("never").expect("it exists").make();
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let manager = Manager::spawn(host, vec![vm], never, config).expect("a thread");
    manager.activate();
    until("the first tick", || manager.live().ticks > 0);
    for windows in [8, 32] {
        until("a second without a pulse", || {
            let before = sleeps();
            thread::sleep(Duration::from_secs(1));
            sleeps() - before <= SLEEPS_MAX
        });
        // The guest touches the windows, and then runs on.
        let is_seen = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let words = ram.words(ram.ranges()[0]);
                words[..windows << 18].iter().step_by(512).for_each(|word| word.store(1, Ordering::Relaxed));
                while !is_seen.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let began = Instant::now();
            let resident = || manager.live().snapshot.vms[0].resident.iter().filter(|pages| **pages == 512).count();
            // What comes into use after a scan brings the next one only if it is a window's worth.
            while resident() < windows - 1 && began.elapsed() < GIVES_UP_AFTER {
                thread::sleep(Duration::from_millis(1));
            }
            is_seen.store(true, Ordering::Relaxed);
            println!("{windows} windows seen after {:?}", began.elapsed());
            assert!(resident() >= windows - 1, "{} of {windows} windows were seen", resident());
        });
    }
}
