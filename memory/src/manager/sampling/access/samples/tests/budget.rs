//! When windows are sampled: what samples may cost, bursts, and windows that the policy hurries for.

use std::time::Duration;

use wideleaf_policies::sampled_pages::SAMPLED_PAGES;

use super::super::{ACCESS_LEAST, ACCESS_MOST, AccessSampling, URGENT_MOST};
use super::{earning, on_base_pages, paid, sampling_of};
use crate::host::Host;
use crate::manager::fault_price::{FaultMeter, FaultPrice};
use crate::manager::sampling::SAMPLING_BURST;
use crate::second_level::{FaultCounters, Paging};
use crate::sensors::access::Seen;
use crate::testing::fake_host::FakeHost;

#[test]
fn a_burst_lasts_until_every_window_was_sampled_once_without_news() {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(4 * ACCESS_LEAST);
    // A sample is a quarter of the windows, and costs nothing.
    let mut sampling = sampling_of(Seen::Untouched, &windows, paid(&host, Duration::from_secs(1), ACCESS_LEAST));
    let mut sample = || {
        sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
        sampling.finish(&host);
        sampling.share.is_bursting()
    };
    // The first sample of each window is news: four samples, each of which restarts the burst. The next four
    // bring none, and the burst ends with the last of them.
    let bursting: Vec<bool> = (0..8).map(|_| sample()).collect();
    assert_eq!(bursting, [true, true, true, true, true, true, true, false]);
}

/// Number of windows in base pages that are sampled in ten minutes, on a host on which a fault takes this time.
/// The guest's first touches come before the first sample.
fn sampled_where_a_fault_takes(fault: Duration) -> u64 {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(64);
    let mut sampling = earning(&host, &windows, Duration::ZERO);
    let (mut meter, mut counters) = (FaultMeter::new(Some(Paging::Shadow)), FaultCounters::default());
    let mut touch = |faults: u64, new_pages: u64| {
        counters.faults += faults;
        counters.exits += faults;
        counters.system_time += fault * faults as u32;
        meter.record(counters, new_pages, faults - new_pages);
        meter.price()
    };
    touch(0, 0);
    (0..16).for_each(|_| {
        touch(2_048, 2_048);
    });
    let (mut sampled, mut refaults) = (0, 0);
    for _ in 0..600 {
        sampling.share.changed(); // no slower tempo
        sampling.start_share(&host, &windows, &rows, false, touch(refaults * u64::from(SAMPLED_PAGES), 0));
        host.sleep(Duration::from_secs(1));
        sampling.finish(&host);
        refaults = std::mem::take(&mut sampling.cost).windows;
        sampled += refaults;
    }
    sampled
}

#[test]
fn where_a_fault_takes_five_times_as_long_five_times_fewer_windows_are_sampled() {
    let [fast, slow] = [100, 500].map(|us| sampled_where_a_fault_takes(Duration::from_micros(us)));
    // A window costs 0.4 or 2 ms of the 3 s that ten minutes earn.
    assert!((7_300..=7_600).contains(&fast), "{fast}");
    assert!((slow * 24 / 5..=slow * 26 / 5).contains(&fast), "{fast} and {slow}");
}

#[test]
fn nothing_is_sampled_before_it_is_earned_at_the_price_of_its_faults() {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(64);
    let mut sampling = earning(&host, &windows, SAMPLING_BURST);
    let began = host.now();
    while !sampling.is_under_way {
        sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(Some(Paging::Shadow)));
        host.sleep(Duration::from_millis(10));
    }
    // Four windows of 4 faults of 5 us, and 330 us of the manager each: 1.4 ms, of which a second earns 5 ms.
    let earned_after = host.now().since(began);
    assert!((280..=300).contains(&earned_after.as_millis()), "{earned_after:?}");
}

#[test]
fn urgent_windows_are_sampled_out_of_turn_once_their_own_budget_pays_for_a_large_sample() {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(2 * URGENT_MOST);
    let mut sampling = sampling_of(Seen::Untouched, &windows, paid(&host, Duration::ZERO, ACCESS_MOST));
    let fault = FaultPrice::assumed(None);
    let samples = |sampling: &AccessSampling| sampling.histories.iter().map(|of| of.samples()).collect::<Vec<_>>();
    // 16 windows of 0.33 ms are 5.28 ms: 4 % of a core earn them in 132 ms.
    let mut begins_after = |ms| {
        host.sleep(Duration::from_millis(ms));
        let begins = sampling.start_urgent(&host, &windows, &rows, fault);
        sampling.finish(&host);
        (begins, samples(&sampling))
    };
    let once = |first: usize, second: usize| [vec![1; first], vec![0; second]].concat();
    assert_eq!(begins_after(130), (false, once(0, 2 * URGENT_MOST)), "and the usual budget is not used");
    assert_eq!(begins_after(3), (true, once(URGENT_MOST, URGENT_MOST)));
    assert_eq!(begins_after(133), (true, once(2 * URGENT_MOST, 0)), "each has its turn");
    assert!(!sampling.start_urgent(&host, &[], &rows, fault), "no window is urgent any more");
}
