//! No guest may lose a byte because the manager takes its windows away for a while. A guest that checks and
//! rewrites every word of its RAM runs while its windows are sampled and swapped. Needs KVM and `UFFDIO_MOVE`.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, AccessSensor};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::units::mib;
use wideleaf_policies::{OutcomeResult, PageSize, Refusal, WindowIndex};
use wideleaf_testing::swaps::can_swap;
use wideleaf_testing::{Need, has_kvm, is_there, pattern_lasts};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

const TIMEOUT: Duration = Duration::from_secs(300);

/// Actions of the mover while the guest ran.
#[derive(Debug, Default)]
struct Moved {
    sampled: u64,
    touched: u64,
    swapped: u64,
    not_observed: u64,
}

/// Samples a share of the windows and swaps one, again and again, until the guest ends.
fn move_windows(ram: &Arc<GuestRam>, is_over: &AtomicBool) -> Moved {
    let host = Arc::new(LinuxHost::open().unwrap());
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    let mut sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
    let mut swapper = Swapper::new(mover.aside().clone());
    let windows: Vec<WindowIndex> = ram.ranges().iter().flat_map(|range| range.gpa.windows()).collect();
    let (mut to_sample, mut to_swap) = (Rotation::default(), Rotation::default());
    let mut moved = Moved::default();
    while !is_over.load(Ordering::Relaxed) {
        sensor.start(host.as_ref(), &to_sample.next_share(&windows, 8));
        let sample = sensor.finish(host.as_ref());
        moved.sampled += sample.cost.windows;
        moved.touched += sample.cost.events;
        let swap = swapper.swap(host.as_ref(), to_swap.next_share(&windows, 1)[0]);
        moved.swapped += u64::from(swap.result == OutcomeResult::Done);
        moved.not_observed += u64::from(swap.result == OutcomeResult::Refused(Refusal::NotObserved));
    }
    moved
}

fn moved_under_a_pattern(vcpus: u32) {
    if !has_kvm() || !is_there(Need::UffdMove, probe().map(drop)) {
        return;
    }
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
    options.memory = mib(64);
    options.vcpus = vcpus;
    options.cmdline = format!("kernel=pattern bytes=48M {}", pattern_lasts(6));
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
    prefault(&LinuxHost::open().unwrap(), ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
    let lines = Arc::new(Mutex::new(String::new()));
    let sink = {
        let lines = lines.clone();
        Box::new(move |line: &[u8]| lines.lock().push_str(&String::from_utf8_lossy(line)))
    };
    let machine = Machine::start(&config, ram.clone(), sink).unwrap();
    let is_over = AtomicBool::new(false);
    let (exit, moved) = std::thread::scope(|scope| {
        let mover = scope.spawn(|| move_windows(&ram, &is_over));
        let exit = machine.wait(WaitLimits { timeout: Some(TIMEOUT), stop: None });
        is_over.store(true, Ordering::Relaxed);
        (exit, mover.join().unwrap())
    });
    println!("{moved:?}");
    // The guest ends with 0 only if no word was ever wrong.
    assert_eq!(exit, GuestExit::ExitPort(0), "{}", lines.lock());
    assert!(moved.touched > 0, "{moved:?}");
    assert!(moved.swapped >= 16 && moved.not_observed == 0 || !can_swap(), "{moved:?}");
}

#[test]
fn anonymous_ram_survives_samples_and_swaps_with_one_vcpu() {
    moved_under_a_pattern(1);
}

#[test]
fn anonymous_ram_survives_samples_and_swaps_with_two_vcpus() {
    moved_under_a_pattern(2);
}
