//! What samples tell: histories, ages, shared results, and the end of a sampler.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{AccessHistory, Backing, PerTenThousand, VmId, VmSnapshot, WindowIndex, WindowRow};

use super::super::{ACCESS_COST, ACCESS_LEAST, ACCESS_MOST, AccessSampling};
use super::{Always, on_base_pages, paid, sampling_of};
use crate::host::Host;
use crate::manager::fault_price::FaultPrice;
use crate::manager::managed_vm::AccessesBefore;
use crate::manager::report::ManagerReport;
use crate::manager::sampling::SlowSensor;
use crate::manager::sampling::access::SharedAccess;
use crate::manager::sampling::guest_clock::GuestClock;
use crate::manager::sampling::guest_ran::GuestRan;
use crate::sensors::access::{AccessCost, AccessSample, AccessSampler, Seen};
use crate::sensors::share::{Share, ShareLimits};
use crate::testing::fake_host::FakeHost;
use crate::testing::fake_second_level::FakeSecondLevel;

/// A sensor with a userfaultfd that can no longer be read.
struct Ended;

impl AccessSampler for Ended {
    fn start(&mut self, _: &dyn Host, _: &[WindowIndex]) {
        panic!("a sensor that has ended is not asked");
    }

    fn finish(&mut self, _: &dyn Host) -> AccessSample {
        AccessSample::default()
    }

    fn why_it_ended(&self) -> Option<String> {
        Some("read of a userfaultfd: i/o error".into())
    }
}

#[test]
fn windows_of_a_guest_that_waited_for_a_cpu_are_not_idle() {
    let (host, kvm) = (FakeHost::default(), Arc::new(FakeSecondLevel::new(&[])));
    let (windows, rows) = on_base_pages(ACCESS_LEAST);
    let samples_of = |seen, ran_ms: &[u64]| {
        let mut sampling = AccessSampling {
            guest: GuestRan::new(Some(kvm.clone())),
            ..sampling_of(seen, &windows, paid(&host, Duration::from_secs(1), ACCESS_MOST))
        };
        let mut cpu = Duration::ZERO;
        for ran_ms in ran_ms {
            kvm.set_vcpu_time(cpu);
            sampling.start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
            host.sleep(Duration::from_millis(40));
            cpu += Duration::from_millis(*ran_ms);
            kvm.set_vcpu_time(cpu);
            sampling.finish(&host);
        }
        (sampling.histories[0].samples(), sampling.sampled[0].is_some(), sampling.cost.not_run)
    };
    let not_run = 2 * ACCESS_LEAST as u64;
    assert_eq!(samples_of(Seen::Untouched, &[40, 0, 0, 20]), (2, true, not_run));
    assert_eq!(samples_of(Seen::Touched, &[40, 0, 0, 20]), (4, true, 0), "a touch is a touch");
    assert_eq!(samples_of(Seen::Untouched, &[0, 0, 0, 0]), (4, true, 0), "it is halted");
}

#[test]
fn while_a_guest_is_paused_its_samples_grow_no_older_and_afterwards_it_has_run_as_much_as_it_did_before() {
    let (host, kvm) = (FakeHost::default(), Arc::new(FakeSecondLevel::new(&[])));
    let (windows, rows) = on_base_pages(ACCESS_LEAST);
    let shared = SharedAccess::new(AccessSampling {
        guest: GuestRan::new(Some(kvm.clone())),
        ..sampling_of(Seen::Untouched, &windows, paid(&host, Duration::from_secs(1), ACCESS_MOST))
    });
    let (mut cpu, mut clock) = (Duration::ZERO, GuestClock::default());
    // Of each second, a sample has 40 ms, in which the guest runs for `ran_us`, and in the rest of it for `usual_ms`.
    let mut second = |ran_us, usual_ms| {
        kvm.set_vcpu_time(cpu);
        shared.lock().start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
        host.sleep(Duration::from_millis(40));
        cpu += Duration::from_micros(ran_us);
        kvm.set_vcpu_time(cpu);
        shared.lock().finish(&host);
        host.sleep(Duration::from_millis(960));
        cpu += Duration::from_millis(usual_ms);
        shared.lock().histories[0].samples()
    };
    let aged = || {
        let mut filled = [WindowRow::new(windows[0], 512, Backing::Base4K)];
        shared.fill(&mut filled, host.now());
        filled[0].access_quality.age_s
    };
    assert_eq!([second(900, 10), second(900, 10)], [1, 2]);
    host.sleep(Duration::from_secs(6));
    assert_eq!(aged(), 6);
    for is_paused in [true, true, true, false] {
        clock.tick(is_paused, host.now());
        shared.clone().follow(clock);
        assert_eq!(aged(), 6);
        host.sleep(Duration::from_secs(if is_paused { 200 } else { 2 }));
    }
    assert_eq!(aged(), 8);
    // 10 ms a second are 400 us in 40 ms: with the pause in it, the time before would be as good as none.
    assert_eq!(second(10, 10), 2, "the guest waited for a CPU");
    assert_eq!(second(900, 10), 3);
}

#[test]
fn samples_of_another_process_grow_older_until_a_window_is_sampled_here() {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(ACCESS_LEAST);
    let mut sampling = sampling_of(Seen::Untouched, &windows, paid(&host, Duration::ZERO, ACCESS_LEAST));
    let history = AccessHistory::from_parts(0b1101, 4).with_touches_per_s(Some(100));
    let elsewhere = WindowIndex::new(1 << 20);
    let before = |window| AccessesBefore { window, history, age: Duration::from_secs(7) };
    sampling.begin_with(&[before(windows[1]), before(elsewhere)]);
    host.sleep(Duration::from_secs(3));
    let shared = SharedAccess::new(sampling);
    let filled = |shared: &SharedAccess| {
        let mut filled: Vec<_> = windows.iter().map(|window| WindowRow::new(*window, 512, Backing::Base4K)).collect();
        shared.fill(&mut filled, host.now());
        filled.iter().map(|row| (row.access, row.access_quality.age_s)).collect::<Vec<_>>()
    };
    let unknown = (AccessHistory::default(), 0);
    assert_eq!(filled(&shared), [unknown, (history, 10), unknown, unknown]);
    shared.lock().start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
    shared.lock().finish(&host);
    let seen = filled(&shared);
    assert_eq!((seen[1].0.touched(), seen[1].0.samples(), seen[1].1), (0b11010, 5, 0));
}

#[test]
fn a_result_that_windows_share_has_their_number_as_its_error() {
    let host = FakeHost::default();
    let (windows, rows) = on_base_pages(ACCESS_LEAST);
    let share = paid(&host, Duration::ZERO, ACCESS_LEAST);
    let sampler = Box::new(Always { seen: Seen::Untouched, shared_by: 80, sample: Vec::new() });
    let shared =
        SharedAccess::new(AccessSampling::of_sampler(VmId(0), "access_damon", sampler, windows.clone(), share));
    shared.lock().start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
    shared.lock().finish(&host);
    let mut filled: Vec<_> = (0..windows.len()).map(|row| rows.get(row)).collect();
    shared.fill(&mut filled, host.now());
    assert!(filled.iter().all(|row| row.access.samples() == 1 && row.access_quality.windows == 80), "{filled:?}");
}

/// A sensor that sees a touch of these windows alone, and needs a third of a millisecond for each.
struct Partly {
    hot: std::ops::Range<u64>,
    sample: Vec<WindowIndex>,
}

impl AccessSampler for Partly {
    fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
        self.sample = windows.to_vec();
    }

    fn finish(&mut self, _: &dyn Host) -> AccessSample {
        let seen = |window: &WindowIndex| match self.hot.contains(&window.get()) {
            true => Seen::Touched,
            false => Seen::Untouched,
        };
        let rows: Vec<_> = self.sample.iter().map(|window| (*window, seen(window))).collect();
        let watched = |(window, seen): &(WindowIndex, Seen)| {
            (*window, Duration::from_millis(if *seen == Seen::Touched { 1 } else { 100 }))
        };
        let windows = std::mem::take(&mut self.sample).len() as u64;
        let cost = AccessCost { windows, events: 0, cpu: ACCESS_COST * windows as u32 };
        let watched_for = rows.iter().map(watched).collect();
        AccessSample { rows, watched_for, cost, ..AccessSample::default() }
    }
}

#[test]
fn of_64_gib_each_window_has_a_result_of_the_last_minutes_at_half_a_per_cent_of_a_core() {
    const WINDOWS: usize = 32 << 10;
    const HOT: std::ops::Range<u64> = 10_000..14_000;
    let host = FakeHost::default();
    let windows: Vec<_> = (0..WINDOWS as u64).map(WindowIndex::new).collect();
    let mut rows = VmSnapshot::with_capacity(VmId(0), WINDOWS);
    windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, Backing::Huge2M)));
    let limits =
        ShareLimits { budget: PerTenThousand::new(50), burst: Duration::ZERO, least: ACCESS_LEAST, most: ACCESS_MOST };
    let share = Share::new(limits, ACCESS_COST, host.now()).beginning_with_nothing();
    let sampler = Box::new(Partly { hot: HOT, sample: Vec::new() });
    let sampling = AccessSampling::of_sampler(VmId(0), "access", sampler, windows.clone(), share);
    let shared = SharedAccess::new(sampling);
    let cost_of_minutes = |minutes: u32| {
        let mut sampling = shared.lock();
        for _ in 0..minutes * 60 {
            sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
            host.sleep(Duration::from_secs(1));
            sampling.finish(&host);
        }
        std::mem::take(&mut sampling.cost)
    };
    let filled = || {
        let mut filled: Vec<_> = (0..WINDOWS).map(|row| rows.get(row)).collect();
        shared.fill(&mut filled, host.now());
        filled
    };
    let cost = cost_of_minutes(1);
    assert!((850..=910).contains(&cost.windows), "{cost:?}");
    let after_a_minute = filled();
    assert!(after_a_minute.iter().all(|row| row.access.samples() > 0 && row.access_quality.age_s <= 60));
    let of_one_window = after_a_minute.iter().filter(|row| row.access_quality.windows == 1).count();
    assert!(of_one_window <= 910, "{of_one_window}: the others share the result of their region");
    // Half a per cent of ten minutes, and what was saved for a largest sample.
    let cost = cost_of_minutes(10);
    assert!(cost.cpu <= Duration::from_millis(3_000 + 20), "{cost:?}");
    let is_right = |row: &&WindowRow| row.access.was_touched() == Some(HOT.contains(&row.window.get()));
    let right = filled().iter().filter(is_right).count();
    assert!(right >= WINDOWS * 99 / 100, "{right}");
    // Fewer windows, as after a balloon took most of them: each is sampled again.
    shared.lock().start_share(&host, &windows[..1_000], &rows, false, FaultPrice::assumed(None));
    assert!(shared.lock().regions.is_none());
}

#[test]
fn a_sensor_that_has_ended_is_reported_once_with_its_reason_and_not_used_again() {
    let (host, windows) = (FakeHost::default(), vec![WindowIndex::new(0)]);
    let share = paid(&host, Duration::from_secs(1), ACCESS_MOST);
    let mut sampling = AccessSampling::of_sampler(VmId(3), "access", Box::new(Ended), windows.clone(), share);
    let mut report = ManagerReport::new("never", &[]);
    let mut rows = VmSnapshot::with_capacity(VmId(3), 1);
    rows.push(WindowRow::new(windows[0], 512, Backing::Base4K));
    for _ in 0..2 {
        sampling.finish(&host);
        sampling.tell(&mut report);
        sampling.start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
    }
    let told = "vm 3: which windows are used, from then on: read of a userfaultfd: i/o error";
    assert_eq!(report.unanswered, [told]);
}
