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
use wideleaf_memory::warming::{hold_host_memory, warm_host_memory};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Bytes, Hva, PageSize, PolicyChoice};
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
    let (memory, in_use) = (with_room_for(gib), mib(gib * 1024));
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
        warm_host_memory(in_use).unwrap();
        tell(&monitor, &[json!({ "execute": "cont" })]);
        Instant::now()
    };
    let target = in_use.get() / 100 * 99;
    if std::env::var_os("KHUGEPAGED").is_some() {
        eventually("huge pages from the start", || large() >= target);
        for round in 1..=5 {
            let before = speed(&guest, Duration::from_secs(4));
            disturb();
            let [first, second] = [(); 2].map(|()| speed(&guest, Duration::from_secs(4)) / before);
            println!(
                "round {round}: {} MiB large 8 s after cont; load {}; speed {before:.3e} before, {first:.2} of it in \
                 the first 4 s, {second:.2} in the next",
                large() >> 20,
                load(),
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
        let so_far = recoveries(&attached, "stop").unwrap_or_default();
        let unavailable = attached.view().work.unwrap().unavailable.sum_s;
        tell(&monitor, &[json!({ "execute": "stop" })]);
        eventually("the stop is seen", || attached.is_in_event());
        split_all_of(guest.pid(), &process);
        let small = large();
        warm_host_memory(in_use).unwrap();
        tell(&monitor, &[json!({ "execute": "cont" })]);
        let first = pages_rewritten(&guest).len();
        let is_over = |of: RecoveriesView| of.done + of.cut_off > so_far.done + so_far.cut_off;
        eventually("the recovery", || recoveries(&attached, "stop").is_some_and(is_over));
        let (of, work) = (recoveries(&attached, "stop").unwrap(), attached.view().work.unwrap());
        let took = of.last_s.unwrap_or(f64::INFINITY);
        println!(
            "round {round}: {} MiB large after the split; 99 % {took:.2} s after cont; load {}; speed {before:.3e} \
             before, {:.2} of it meanwhile, {:.2} after; out of reach {:.3} s in all, p50 {:.2} ms, p99 {:.2} ms so \
             far; {} refusals of the budget so far; {} cut off",
            small >> 20,
            load(),
            speed_from(&guest, first, took) / before,
            speed(&guest, Duration::from_secs(4)) / before,
            work.unavailable.sum_s - unavailable,
            work.unavailable.median_s * 1e3,
            work.unavailable.p99_s * 1e3,
            work.budget_refusals,
            of.cut_off,
        );
    }
    assert_eq!(guest.said().complaint, None);
}

/// A guest of `GIB` gibibytes (1 if it is not set) that arrives by QEMU's postcopy, all of it on base pages. Prints
/// seconds until 99 % of what it uses are large. The host has warm memory ahead of the recovery all the time, unless
/// `COLD` is set: a hypervisor below may take free blocks back sooner than a recovery ends.
#[test]
#[ignore = "a measurement: some minutes"]
fn seconds_until_a_guest_is_large_after_a_postcopy() {
    if !can_run() {
        return;
    }
    let gib: u64 = std::env::var("GIB").map_or(1, |number| number.parse().expect("GIB is a number"));
    let target = mib(gib * 1024).get() / 100 * 99;
    for round in 1..=3 {
        let moving = Postcopy::start(with_room_for(gib), &format!("pattern bytes={gib}G seconds=3600"));
        let process = find::with_pid(&Places::default(), moving.target.pid()).unwrap();
        let settings = Settings { policy: policy(SLOW), qmp: Some(moving.target.qmp()), ..Settings::default() };
        let attached = Attached::start(process, settings).unwrap();
        let pieces = if std::env::var_os("COLD").is_some() { 0 } else { mib(gib * 1024).get() / PIECE.get() };
        let mut held: Vec<_> = (0..pieces).map(|_| hold_host_memory(PIECE).unwrap()).collect();
        moving.finish();
        let over = Instant::now();
        eventually("huge pages", || {
            let large = huge(&attached);
            held.truncate((target.saturating_sub(large + AHEAD.get()) / PIECE.get()) as usize);
            large >= target
        });
        println!(
            "round {round}: 99 % large at most {:.2?} after the end; load {}; {:?}; {:?}",
            over.elapsed(),
            load(),
            attached.view().work.unwrap().recoveries,
            attached.view().work.unwrap().unavailable,
        );
        assert_eq!(moving.target.said().complaint, None);
    }
}

/// Memory that is held until the recovery is near it.
const PIECE: Bytes = mib(256);

/// Warm memory ahead of what is large as of the latest tick.
const AHEAD: Bytes = mib(1536);

/// RAM of a guest that uses this number of gibibytes. The guest uses one range, and the machine has 3 GiB below 4 GiB
/// and the rest above. Unused RAM has no host memory.
fn with_room_for(gib: u64) -> Bytes {
    mib((gib + 3) * 1024 + 176)
}

fn split_all_of(pid: u32, process: &VmProcess) {
    let host = ProcessHost::open(pid).unwrap();
    for piece in Survey::take(process, None).view().ram {
        for start in (piece.hva..piece.hva + piece.bytes).step_by(PageSize::Huge2M.bytes().as_usize()) {
            host.advise(Hva::new(start), kib(4), Advice::Cold).unwrap();
        }
    }
}

/// Processes that ran or waited for a processor, on average over the latest minute.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap();
    text.split(' ').next().unwrap().to_owned()
}

/// Pages that the guest rewrote in a second, over a time from now on.
fn speed(guest: &QemuGuest, time: Duration) -> f64 {
    let first = pages_rewritten(guest).len();
    std::thread::sleep(time);
    speed_from(guest, first, f64::INFINITY)
}

/// Pages that the guest rewrote in a second, from its line with this number on, within this time of its clock.
fn speed_from(guest: &QemuGuest, first: usize, seconds: f64) -> f64 {
    let (lines, hz) = (pages_rewritten(guest), guest.said().tsc_hz as f64);
    let begin = lines[first];
    let last = lines[first..].iter().take_while(|(tsc, _)| (tsc - begin.0) as f64 <= seconds * hz).last();
    let last = last.expect("the first line is one of them");
    (last.1 - begin.1) as f64 / ((last.0 - begin.0) as f64 / hz)
}

/// Ticks of the guest's clock, with the pages that it had rewritten by then: several lines a second.
fn pages_rewritten(guest: &QemuGuest) -> Vec<(u64, u64)> {
    let (mut passes, mut seen) = (0, Vec::new());
    for line in &guest.said().lines {
        let number = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok());
        let (Some(tsc), Some(done), Some(total)) = (number("tsc="), number("done="), number("total=")) else {
            continue;
        };
        if line.contains("phase=pass ") {
            passes = done;
        } else if line.contains("phase=pages ") {
            seen.push((tsc, passes * total + done));
        }
    }
    seen
}
