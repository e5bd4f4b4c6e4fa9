//! A gibibyte of a guest's RAM is put onto one giant page and back again, while two vCPUs check and rewrite every word of
//! their pattern in it: no word may be lost, and the pool gets its page back. Needs KVM and a page of 1 GiB.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wideleaf_guest_image::IMAGE;
use wideleaf_guest_tests::{Need, has_kvm, is_there};
use wideleaf_memory::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, Paging};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Gpa, OutcomeResult, PageSize};
use wideleaf_protocol::{Message, parse};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions};

const TIMES: u32 = 4;
/// The emulated processors of a lab are a hundred times slower than real ones.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };
const WAIT_MAX: Duration = Duration::from_secs(120);
const GIANT: Gpa = Gpa::new(0);

/// A guest whose two vCPUs check and rewrite a pattern until it is stopped, and what it said.
struct PatternGuest {
    ram: Arc<GuestRam>,
    machine: Machine,
    lines: Arc<Mutex<Vec<String>>>,
}

impl PatternGuest {
    fn start() -> PatternGuest {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let options = VmOptions {
            memory: gib(1) + mib(64),
            vcpus: 2,
            cmdline: "kernel=pattern bytes=32M passes=1000000".into(),
            slot_bytes: Some(gib(1)),
            ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing)
        };
        let config = VmConfig::new(options, &HostLimits::none()).unwrap();
        let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let sink = Arc::clone(&lines);
        let sink = move |line: &[u8]| sink.lock().unwrap().push(String::from_utf8_lossy(line).into_owned());
        let machine = Machine::start(&config, Arc::clone(&ram), Box::new(sink)).unwrap();
        PatternGuest { ram, machine, lines }
    }

    /// Whole passes it has reported.
    fn passes(&self) -> u64 {
        let lines = self.lines.lock().unwrap();
        let done = |line: &String| match parse(line)?.ok()? {
            Message::Progress { phase, done, .. } if phase == *"pass" => Some(done),
            _ => None,
        };
        lines.iter().rev().find_map(done).unwrap_or(0)
    }

    /// Waits until every word was checked at least once from now on: the second report ends a pass that began after now.
    fn check_all_words(&self) {
        for _ in 0..2 {
            let (before, deadline) = (self.passes(), Instant::now() + WAIT_MAX);
            while self.passes() == before {
                assert!(Instant::now() < deadline, "no pass in {WAIT_MAX:?}: {:?}", self.lines.lock().unwrap().last());
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    /// Ends the guest, which has found no wrong word: with one it would have ended by itself, and said so.
    fn stop(&self) {
        let exit = self.machine.stop();
        let lines = self.lines.lock().unwrap();
        let is_about_a_loss =
            |line: &String| matches!(parse(line), Some(Ok(Message::Mismatch(_) | Message::Panic { .. })));
        assert_eq!(lines.iter().find(|line| is_about_a_loss(line)), None);
        assert_eq!(exit, GuestExit::Stopped, "{:?}", lines.last());
    }
}

fn done(swap: GiantSwap) {
    println!("{swap:?}");
    assert_eq!((swap.result, swap.logs_left_on, swap.is_stuck), (OutcomeResult::Done, 0, false), "{swap:?}");
}

#[test]
fn a_writing_guest_survives_giant_pages_and_the_way_back() {
    let pools = HugetlbPools::of_this_machine();
    // The kernel may have to move a gibibyte of memory for it: not while the guest waits.
    let lease = match pools.check(PageSize::Giant1G, gib(1)) {
        Ok(()) => Ok(None),
        Err(_) => pools.lease(PageSize::Giant1G, 1).map(Some).map_err(|error| error.to_string()),
    };
    let has_page = lease.as_ref().map(drop).map_err(Clone::clone);
    if !has_kvm() || !is_there(Need::Hugetlb1G, has_page) {
        return;
    }
    let before = pools.status(PageSize::Giant1G).unwrap();
    let mut giants = GiantPages::new(pools.clone(), false, PATIENT);
    let guest = PatternGuest::start();
    let host = LinuxHost::open().unwrap();
    let second_level = guest.machine.second_level();
    let site = SwapSite { host: &host, ram: &guest.ram, second_level: second_level.as_ref() };
    guest.check_all_words();
    for time in 0..TIMES {
        done(giants.promote(site, GIANT));
        guest.check_all_words();
        let stats = second_level.mapping_stats().unwrap();
        println!("on a giant page: {stats:?}");
        match second_level.paging() {
            Paging::Shadow => assert!(stats.pages_2m >= 16, "the pattern is mapped in 2M: {stats:?}"),
            Paging::Ept | Paging::Npt => assert!(stats.pages_1g >= 1, "{stats:?}"),
        }
        let to = if time % 2 == 0 { PageSize::Base4K } else { PageSize::Huge2M };
        done(giants.demote(site, GIANT, to));
        guest.check_all_words();
        assert_eq!(second_level.mapping_stats().unwrap().pages_1g, 0);
        assert_eq!(pools.status(PageSize::Giant1G).unwrap(), before, "the page is back in the pool");
    }
    guest.stop();
}
