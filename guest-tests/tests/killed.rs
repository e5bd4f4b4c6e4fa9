//! Daemon, guests and libvirtd are killed outright at random while four guests run. No other guest may be lost or
//! changed, no page of the pool kept, and the restarted daemon knows its guests.
//!
//! `WIDELEAF_KILLS_SECONDS` sets the duration (default 20), `WIDELEAF_KILLS_SEED` repeats a run.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod under_libvirt;

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use under_libvirt::{ask, is_running, libvirt_with_hook, passes, start_wideleafd, vms};
use wideleaf_control::protocol::{Answer, Request};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PageSize;
use wideleaf_testing::libvirt::{Domain, Libvirt};
use wideleaf_testing::{has_kvm, number_from_environment};

const BASE: Domain<'static> = Domain { is_on_base_pages: true, ..Domain::PATTERN };
const GUESTS: [Domain<'static>; 4] = [
    Domain { name: "greedy", metadata: "policy='greedy'", ..BASE },
    Domain { name: "auto", metadata: "policy='auto'", ..BASE },
    Domain { name: "ordinary", ..Domain::PATTERN },
    Domain { name: "pool", metadata: "policy='off'", backing: "<hugepages/>", ..Domain::PATTERN },
];

#[test]
fn after_any_process_is_killed_the_other_guests_live_on_unchanged() {
    if !has_kvm() {
        return;
    }
    let Some(libvirt) = libvirt_with_hook() else { return };
    let seconds = number_from_environment("WIDELEAF_KILLS_SECONDS").unwrap_or(20);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = number_from_environment("WIDELEAF_KILLS_SEED").unwrap_or(now);
    println!("WIDELEAF_KILLS_SEED={seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let pool = || HugetlbPools::of_this_machine().status(PageSize::Huge2M).unwrap();
    let pool_before = pool();

    start_wideleafd(&libvirt);
    for guest in GUESTS {
        libvirt.define(&guest);
        start(&libvirt, guest.name);
    }
    let mut killed = BTreeMap::<&str, u32>::new();
    let mut longest_back = Duration::ZERO;
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        // Kill at any point of their work.
        std::thread::sleep(Duration::from_millis(dice.u64(0..1_500)));
        let pids = GUESTS.map(|guest| libvirt.pid(guest.name));
        let (target, victim) = match dice.u8(0..4) {
            0 | 1 => {
                longest_back = longest_back.max(kill_daemon(&libvirt));
                ("wideleafd", None)
            }
            2 => {
                libvirt.kill_libvirtd();
                ("libvirtd", None)
            }
            _ => {
                let victim = dice.usize(0..GUESTS.len());
                kill(&libvirt, pids[victim]);
                libvirt.wait_until("libvirt knows that it has ended", || !is_running(&libvirt, GUESTS[victim].name));
                start(&libvirt, GUESTS[victim].name);
                ("guest", Some(victim))
            }
        };
        *killed.entry(target).or_default() += 1;
        for (index, guest) in GUESTS.iter().enumerate().filter(|(index, _)| Some(*index) != victim) {
            assert_eq!(
                libvirt.pid(guest.name),
                pids[index],
                "{} is another process after {target} was killed",
                guest.name
            );
            assert_goes_on(&libvirt, guest.name);
        }
        libvirt.wait_until("the daemon has all guests", || managed(&libvirt) == GUESTS.len());
    }
    println!("killed: {killed:?}; the daemon was back with its guests within {longest_back:?} at most");
    for guest in GUESTS {
        assert_goes_on(&libvirt, guest.name);
        libvirt.virsh(&["destroy", guest.name]).unwrap();
    }
    libvirt.wait_until("the pool is as it was", || pool() == pool_before);
}

fn start(libvirt: &Libvirt, domain: &str) {
    libvirt.virsh(&["start", domain]).unwrap();
    libvirt.wait_until("the guest works", || passes(libvirt, domain) > 0);
}

fn kill(libvirt: &Libvirt, pid: u32) {
    assert!(libvirt.run(&["kill", "-9", &pid.to_string()]).status.success());
}

/// Kills the daemon and starts it again. Returns the time from its start until it had its earlier guests again.
fn kill_daemon(libvirt: &Libvirt) -> Duration {
    let before = managed(libvirt);
    let Answer::Daemon(daemon) = ask(libvirt, Request::Daemon).unwrap() else { panic!("no daemon") };
    kill(libvirt, daemon.pid);
    libvirt.wait_until("the daemon is dead", || ask(libvirt, Request::Daemon).is_err());
    let began = Instant::now();
    start_wideleafd(libvirt);
    libvirt.wait_until("the daemon has its guests again", || managed(libvirt) >= before);
    began.elapsed()
}

/// Number of guests that libvirt's hook has given to the daemon.
fn managed(libvirt: &Libvirt) -> usize {
    vms(libvirt).iter().filter(|vm| vm.policy.is_some()).count()
}

/// Asserts that the guest has since checked all its words, and found them unchanged.
fn assert_goes_on(libvirt: &Libvirt, domain: &str) {
    let before = passes(libvirt, domain);
    libvirt.wait_until("two more reports of passes", || passes(libvirt, domain) > before + 1);
    let console = libvirt.console(domain);
    assert!(!console.contains("mismatch") && !console.contains("panic"), "{console}");
}
