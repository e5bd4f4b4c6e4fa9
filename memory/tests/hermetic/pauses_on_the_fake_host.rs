//! A guest that is paused: its slower sensors rest, and what they know of it grows no older.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::gate::{Gate, GateState, KeptHoles};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::{GuestRam, RamRange};
use wideleaf_memory::second_level::SecondLevel as _;
use wideleaf_memory::sensors::outside_heat::{Heat, HeatRegion, LatestHeat};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_policies::policy::Needs;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, Hva, PageSize, PerTenThousand, Snapshot, VmId};

use crate::watching::{Outside, Sees};

const WINDOWS: u64 = 4;

fn ram() -> GpaRange {
    GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap()
}

fn anonymous() -> BackingConfig {
    BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()
}

/// Runs ticks, one a second.
fn run(work: &mut ManagerLoop, host: &FakeHost, ticks: u32) {
    for _ in 0..ticks {
        work.tick();
        host.sleep(Duration::from_secs(1));
    }
}

#[test]
fn no_sensor_takes_a_sample_of_a_paused_guest_and_all_go_on_after_the_pause() {
    let mapped = GuestRam::map(&[ram()], anonymous()).unwrap();
    let (host, kvm) = (Arc::<FakeHost>::default(), Arc::new(FakeSecondLevel::new(&[ram()])));
    host.make_present(mapped.base(), ram().bytes(), false);
    let needs = Needs { zero: true, written: true, guest_mapping: true, ..Needs::default() };
    let vm = ManagedVm::new(VmId(0), mapped, Some(kvm.clone()));
    let policy = Box::new(Sees { needs, latest: Arc::default() });
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    let samples = |work: &ManagerLoop| {
        let costs = work.report().sensor_costs.iter();
        costs.map(|(name, cost)| (*name, cost.samples)).collect::<BTreeMap<_, _>>()
    };
    run(&mut work, &host, 10);
    let of_running = samples(&work);
    assert!(["zero_pages", "written", "guest_tables"].iter().all(|name| of_running[name] > 0), "{of_running:?}");
    kvm.pause().unwrap();
    run(&mut work, &host, 1); // The sample that was under way ends.
    let at_pause = samples(&work);
    run(&mut work, &host, 600);
    assert_eq!((samples(&work), work.report().ticks_paused), (at_pause.clone(), 601));
    assert!(kvm.slots().iter().all(|slot| !slot.is_dirty_logged));
    kvm.resume().unwrap();
    run(&mut work, &host, 60);
    let later = samples(&work);
    assert!(later.iter().all(|(name, count)| *count > at_pause[name]), "{later:?} after {at_pause:?}");
    assert_eq!(work.report().ticks_paused, 601);
}

/// Knows whether the guest stands still, as that of a QEMU guest does.
#[derive(Default)]
struct StoppedGate(AtomicBool);

impl Gate for StoppedGate {
    fn state(&self) -> GateState {
        GateState::Open
    }

    fn keeps_holes(&self) -> Option<KeptHoles> {
        None
    }

    fn is_paused(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_hot_window_of_a_guest_in_another_process_is_hot_and_no_older_after_a_pause_of_ten_minutes() {
    let at = Hva::new(1 << 40);
    let (host, outside, gate) = (Arc::<FakeHost>::default(), Arc::<Outside>::default(), Arc::<StoppedGate>::default());
    host.make_present(at, ram().bytes(), false);
    let vm = ManagedVm {
        heat: Some(outside.clone()),
        gate: Some(gate.clone()),
        ..ManagedVm::external(VmId(0), vec![RamRange { gpa: ram(), hva: at }], anonymous(), None)
    };
    let latest = Arc::<Mutex<Snapshot>>::default();
    let policy = Box::new(Sees::access(latest.clone()));
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    // Each reading is new: the monitor goes on while the guest is paused.
    let mut number = 0;
    let mut tick = |rate| {
        let heat = HeatRegion { start: at, end: at + ram().bytes(), rate: PerTenThousand::new(rate) };
        let (age, heat) = (Duration::ZERO, Arc::new(Heat::new(vec![heat])));
        *outside.0.lock() = Some(LatestHeat { number, age, heat });
        number += 1;
        run(&mut work, &host, 1);
        let rows = &latest.lock().vms[0];
        (rows.access[0].touched(), rows.access[0].samples(), rows.access_quality[0].age_s)
    };
    let hot = (0xff, 8, 1);
    assert_eq!([10_000, 10_000, 10_000].map(&mut tick)[2], hot);
    gate.0.store(true, Ordering::Relaxed);
    // The third reading was taken at the end of the tick before.
    let hotter = (0xfff, 12, 1);
    for second in 0..600 {
        assert_eq!(tick(0), hotter, "{second}");
    }
    gate.0.store(false, Ordering::Relaxed);
    assert_eq!(tick(0), hotter, "the guest has just gone on");
    assert_eq!(tick(5_000), (0xfff, 12, 2), "a part of the first reading after it is of the pause");
    assert_eq!(tick(10_000), (0xfff, 12, 3));
    assert_eq!(tick(10_000), (0xffff, 16, 1));
}
