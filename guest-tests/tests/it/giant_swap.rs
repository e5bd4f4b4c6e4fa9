//! A gibibyte of a guest's RAM is put onto one giant page and back again, while two vCPUs check and rewrite every
//! word of their pattern in it. No word may be lost, and the pool gets its page back. Needs KVM and a page of 1
//! GiB.

use std::time::Duration;

use crate::pattern_guest::PatternGuest;
use wideleaf_memory::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use wideleaf_memory::{LinuxHost, Paging};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Gpa, OutcomeResult, PageSize};
use wideleaf_testing::{GiantPage, has_kvm};

const TIMES: u32 = 5;
/// Limits for the emulated processors of a lab, which are a hundred times slower than real ones.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };
const GIANT: Gpa = Gpa::new(0);

fn done(swap: GiantSwap) {
    println!("{swap:?}");
    assert_eq!((swap.result, swap.logs_left_on, swap.is_stuck), (OutcomeResult::Done, 0, false), "{swap:?}");
}

#[test]
fn a_writing_guest_survives_giant_pages_and_the_way_back() {
    let Some(page) = GiantPage::of_this_machine().filter(|_| has_kvm()) else { return };
    let giants = GiantPages::new(page.pools().clone(), false, PATIENT);
    let guest = PatternGuest::start(gib(1) + mib(64));
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
        page.assert_given_back();
    }
    guest.stop();
}
