//! Recoveries of real QEMU guests after each event that a monitor can cause, and what they cost. They need QEMU and
//! KVM.
//!
//! The host's own huge pages outlive most events on the source's side, so the tests split them during the event, as a
//! balloon, a restore or memory pressure does. The policy is `thp`, which is slower than any recovery.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wideleaf_attach::find;
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_attach::survey::Survey;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::view::RecoveriesView;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host as _};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Hva, PageSize, PolicyChoice};
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};

use crate::qemu::{Guest, can_run, eventually, listens};
use crate::sessions::{IN_USE, assert_no_byte_was_lost, at_work, split_all, tell};
use crate::userfaultfd::{Postcopy, ask};

/// A policy that takes minutes for the guest's memory.
const SLOW: &str = "thp";

fn policy(name: &str) -> Option<PolicyChoice> {
    Some(PolicyChoice::parse(name).unwrap())
}

/// A guest at work, all of it large, under a policy that would take minutes to make it so again.
struct Recovering {
    guest: Guest,
    attached: Attached,
    /// A monitor for the test.
    monitor: PathBuf,
    _folder: tempfile::TempDir,
}

impl Recovering {
    fn start() -> Recovering {
        let folder = tempfile::tempdir().unwrap();
        let monitor = folder.path().join("second");
        let socket = format!("unix:{},server=on,wait=off", monitor.display());
        let guest = at_work(&["-M", "microvm", "-m", "128M", "-qmp", &socket]);
        let mut settings = Settings { policy: policy("greedy"), qmp: Some(guest.qmp()), ..Settings::default() };
        // On a busy machine a recovery may wait long for a processor.
        settings.recovery.longest = Duration::from_secs(600);
        let mut attached = Attached::start(guest.process(), settings).unwrap();
        eventually("huge pages", || huge(&attached) >= most());
        attached.set_policy(policy(SLOW)).unwrap();
        Recovering { guest, attached, monitor, _folder: folder }
    }

    fn tell(&self, command: Value) {
        tell(&self.monitor, &[command]);
    }

    /// Splits all huge pages while an event is seen. Where that ends by itself, they may be large again before a look.
    fn is_split_in_the_event(&self, event: &str) {
        eventually("the event is seen", || self.attached.is_in_event());
        split_all(&self.guest);
        let is_over = || recoveries(&self.attached, event).is_some_and(|of| of.done > 0);
        eventually("small pages", || huge(&self.attached) < mib(16).get() || is_over());
    }

    /// Waits for the recovery after `event`, and checks the guest's memory.
    fn recovers_from(&self, event: &str) {
        let of = || recoveries(&self.attached, event);
        eventually("the recovery", || of().is_some_and(|of| of.done > 0));
        assert!(huge(&self.attached) >= most(), "{:?}", self.attached.view().backing);
        assert_eq!(of().map(|of| (of.done, of.cut_off)), Some((1, 0)));
        assert_no_byte_was_lost(&self.guest);
    }
}

fn most() -> u64 {
    IN_USE.get() - mib(8).get()
}

fn huge(attached: &Attached) -> u64 {
    attached.view().backing.unwrap().huge_2m
}

fn recoveries(attached: &Attached, event: &str) -> Option<RecoveriesView> {
    attached.view().work.unwrap().recoveries.get(event).copied()
}

#[test]
fn a_guest_that_is_resumed_gets_its_large_pages_back() {
    if can_run() {
        let recovering = Recovering::start();
        recovering.tell(json!({ "execute": "stop" }));
        recovering.is_split_in_the_event("stop");
        recovering.tell(json!({ "execute": "cont" }));
        recovering.recovers_from("stop");
    }
}

#[test]
fn a_guest_that_was_migrated_to_a_file_and_goes_on_gets_its_large_pages_back() {
    if can_run() {
        let recovering = Recovering::start();
        // The guest writes faster than a migration with the usual downtime could copy.
        let fast = json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": 60_000 });
        recovering.tell(json!({ "execute": "migrate-set-parameters", "arguments": fast }));
        recovering.tell(json!({ "execute": "migrate", "arguments": { "uri": "exec:cat>/dev/null" } }));
        // The migration ends with the guest stopped.
        recovering.is_split_in_the_event("migration");
        eventually("the end of the migration", || {
            ask(&recovering.monitor, "query-status", json!({}))["status"] == "postmigrate"
        });
        recovering.tell(json!({ "execute": "cont" }));
        recovering.recovers_from("migration");
    }
}

#[test]
fn a_guest_gets_its_large_pages_back_after_its_migration_was_cancelled() {
    if can_run() {
        let recovering = Recovering::start();
        let slow = json!({ "execute": "migrate-set-parameters", "arguments": { "max-bandwidth": 4096 } });
        recovering.tell(slow);
        recovering.tell(json!({ "execute": "migrate", "arguments": { "uri": "exec:cat>/dev/null" } }));
        recovering.is_split_in_the_event("migration");
        recovering.tell(json!({ "execute": "migrate_cancel" }));
        recovering.recovers_from("migration");
    }
}

#[test]
fn a_guest_gets_its_large_pages_back_after_its_dirty_rate_was_measured() {
    if can_run() {
        let recovering = Recovering::start();
        let measure = json!({ "calc-time": 10, "mode": "dirty-bitmap" });
        recovering.tell(json!({ "execute": "calc-dirty-rate", "arguments": measure }));
        recovering.is_split_in_the_event("dirty_log");
        recovering.recovers_from("dirty_log");
    }
}

/// A guest of `GIB` gibibytes (1 if it is not set) that is resumed after all its huge pages were split, with a manager
/// or, if `KHUGEPAGED` is set, with khugepaged alone. Prints seconds until 99 % are large again, and the guest's speed
/// before, meanwhile and after.
#[test]
#[ignore = "a measurement: some minutes"]
fn seconds_until_a_guest_is_large_again() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let monitor = folder.path().join("second");
    let gib: u64 = std::env::var("GIB").map_or(1, |number| number.parse().expect("GIB is a number"));
    let (memory, in_use) = (mib(gib * 1024 + 176), mib(gib * 1024));
    let kernel = format!("pattern bytes={gib}G seconds=3600");
    let mut setup = QemuSetup::new("recovery", memory, QemuRam::Anonymous, &kernel);
    setup.more = vec!["-qmp".into(), format!("unix:{},server=on,wait=off", monitor.display())];
    let guest = QemuGuest::start(&setup).unwrap();
    eventually("its monitor", || listens(&guest.qmp()) && listens(&monitor));
    eventually("a pass", || guest.said().marks.len() > 2);
    let process = find::with_pid(&Places::default(), guest.pid()).unwrap();
    let large = || Survey::take(&process, None).view().backing.unwrap().huge_2m;
    let disturb = || {
        tell(&monitor, &[json!({ "execute": "stop" })]);
        split_all_of(guest.pid(), &process);
        tell(&monitor, &[json!({ "execute": "cont" })]);
        Instant::now()
    };
    let target = in_use.get() / 100 * 99;
    if std::env::var_os("KHUGEPAGED").is_some() {
        eventually("huge pages from the start", || large() >= target);
        for round in 1..=5 {
            let before = speed(&guest, Duration::from_secs(4));
            disturb();
            let [first, second] = [(); 2].map(|()| speed(&guest, Duration::from_secs(4)));
            println!(
                "round {round}: {} MiB large 8 s after cont; speed {before:.3e} before, {first:.3e} in the first 4 s, \
                 {second:.3e} in the next",
                large() >> 20
            );
        }
        let began = disturb();
        while large() < target && began.elapsed() < Duration::from_secs(900) {
            std::thread::sleep(Duration::from_secs(1));
        }
        return println!("khugepaged alone: {} MiB large after {:?}", large() >> 20, began.elapsed());
    }
    let settings = Settings { policy: policy("greedy"), qmp: Some(guest.qmp()), ..Settings::default() };
    let mut attached = Attached::start(process.clone(), settings).unwrap();
    eventually("huge pages", || huge(&attached) >= target);
    attached.set_policy(policy(SLOW)).unwrap();
    for round in 1..=5 {
        let before = speed(&guest, Duration::from_secs(4));
        let done = recoveries(&attached, "stop").map_or(0, |of| of.done);
        tell(&monitor, &[json!({ "execute": "stop" })]);
        eventually("the stop is seen", || attached.is_in_event());
        split_all_of(guest.pid(), &process);
        let small = large();
        tell(&monitor, &[json!({ "execute": "cont" })]);
        let [first, second] = [(); 2].map(|()| speed(&guest, Duration::from_secs(4)));
        eventually("the recovery", || recoveries(&attached, "stop").is_some_and(|of| of.done > done));
        let of = recoveries(&attached, "stop").unwrap();
        println!(
            "round {round}: {} MiB large after the split; 99 % {:.2} s after cont; speed {before:.3e} before, \
             {first:.3e} in the first 4 s, {second:.3e} in the next; {:?}",
            small >> 20,
            of.last_s.unwrap(),
            attached.view().work.unwrap().unavailable,
        );
    }
    assert_eq!(guest.said().complaint, None);
}

/// A guest of `GIB` gibibytes (1 if it is not set) that arrives by QEMU's postcopy, all of it on base pages. Prints
/// seconds until 99 % of what it uses are large.
#[test]
#[ignore = "a measurement: some minutes"]
fn seconds_until_a_guest_is_large_after_a_postcopy() {
    if !can_run() {
        return;
    }
    let gib: u64 = std::env::var("GIB").map_or(1, |number| number.parse().expect("GIB is a number"));
    let target = mib(gib * 1024).get() / 100 * 99;
    for round in 1..=3 {
        let moving = Postcopy::start(mib(gib * 1024 + 176), &format!("pattern bytes={gib}G seconds=3600"));
        let process = find::with_pid(&Places::default(), moving.target.pid()).unwrap();
        let settings = Settings { policy: policy(SLOW), qmp: Some(moving.target.qmp()), ..Settings::default() };
        let attached = Attached::start(process, settings).unwrap();
        moving.finish();
        let over = Instant::now();
        eventually("huge pages", || huge(&attached) >= target);
        println!(
            "round {round}: 99 % large at most {:.2?} after the end; {:?}; {:?}",
            over.elapsed(),
            attached.view().work.unwrap().recoveries,
            attached.view().work.unwrap().unavailable,
        );
        assert_eq!(moving.target.said().complaint, None);
    }
}

fn split_all_of(pid: u32, process: &VmProcess) {
    let host = ProcessHost::open(pid).unwrap();
    for piece in Survey::take(process, None).view().ram {
        for start in (piece.hva..piece.hva + piece.bytes).step_by(PageSize::Huge2M.bytes().as_usize()) {
            host.advise(Hva::new(start), kib(4), Advice::Cold).unwrap();
        }
    }
}

/// Words per second over a time.
fn speed(guest: &QemuGuest, time: Duration) -> f64 {
    let first = guest.said().marks.len().saturating_sub(1);
    std::thread::sleep(time);
    guest.said().rate_from(first).unwrap_or_default()
}
