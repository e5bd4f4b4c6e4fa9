//! Daemons that are killed at random moments, over and over, under a guest that checks its memory.

use std::env;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::place::{Place, eventually};
use crate::wideleafd::has_qemu;
use nix::sys::signal::Signal;
use wideleaf_attach::find;
use wideleaf_attach::survey::Survey;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::client::ask;
use wideleaf_control::protocol::{Request, Settings, Target};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Hva, PageSize};
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::{Need, has_kvm, is_there};

/// Number of daemons that are killed if `MINUTES` is not set.
const KILLS: u32 = 12;

/// A daemon that manages the guest after this time has begun to collapse windows.
const KILLED_WITHIN_MS: u32 = 400;

/// `MINUTES=60 cargo test -p wideleaf-daemon --test it killed::` kills daemons for an hour, and compares the machine's
/// settings.
#[test]
fn daemons_that_are_killed_at_random_leave_the_guest_and_the_machine_as_they_were() {
    if !has_kvm() || !is_there(Need::Qemu, has_qemu()) {
        return;
    }
    let minutes = env::var("MINUTES").ok().map(|minutes| minutes.parse::<u64>().unwrap());
    let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
    let setup = QemuSetup::new("killed", mib(128), QemuRam::Anonymous, "pattern bytes=64M seconds=36000");
    let mut guest = QemuGuest::start(&setup).unwrap();
    guest.check_all_words();
    let process = find::with_pid(&Places::default(), guest.pid()).unwrap();
    let (place, before, mut kills) = (Place::new(), settings(), 0);
    while until.map_or(kills < KILLS, |until| Instant::now() < until) {
        split_all_of(&process);
        let daemon = place.start();
        let settings = Settings { policy: Some("greedy".into()), ..Settings::default() };
        // From the second daemon on it may be managed already.
        let _ = ask(&place.socket(), Request::Attach { target: Target::Pid(guest.pid()), settings });
        thread::sleep(Duration::from_millis(u64::from(at_random() % KILLED_WITHIN_MS)));
        assert!(!daemon.end(Signal::SIGKILL).success());
        kills += 1;
    }
    guest.check_all_words();
    // Other tests change some of them for a moment; a run of minutes is alone.
    assert!(until.is_none() || settings() == before, "{before:?}");
    let daemon = place.start();
    eventually("the guest is managed again, and on huge pages", || {
        daemon.managed().first().and_then(|vm| vm.backing).is_some_and(|backing| backing.huge_2m >= mib(64).get())
    });
    assert!(daemon.end(Signal::SIGTERM).success());
    guest.check_all_words();
    println!("{kills} daemons were killed; the guest reported {} passes", guest.said().marks.len());
}

fn at_random() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_micros()
}

/// Splits all huge pages of the guest, so that the next daemon has work.
fn split_all_of(process: &VmProcess) {
    let host = ProcessHost::open(process.pid).unwrap();
    for piece in Survey::take(process, None).view().ram {
        for start in (piece.hva..piece.hva + piece.bytes).step_by(PageSize::Huge2M.bytes().as_usize()) {
            host.advise(Hva::new(start), kib(4), Advice::Cold).unwrap();
        }
    }
}

/// Settings of the machine that a daemon could leave changed: THP, khugepaged, the pool, and kdamonds.
fn settings() -> Vec<(String, String)> {
    const OF: [(&str, &[&str]); 4] = [
        ("/sys/kernel/mm/transparent_hugepage", &["enabled", "defrag", "shmem_enabled"]),
        ("/sys/kernel/mm/transparent_hugepage/khugepaged", &["scan_sleep_millisecs", "pages_to_scan", "defrag"]),
        ("/proc/sys/vm", &["nr_overcommit_hugepages"]),
        ("/sys/kernel/mm/damon/admin/kdamonds", &["nr_kdamonds"]),
    ];
    let files = OF.iter().flat_map(|(folder, names)| names.iter().map(|name| Path::new(folder).join(name)));
    files.map(|file| (file.display().to_string(), fs::read_to_string(file).unwrap_or_default())).collect()
}
