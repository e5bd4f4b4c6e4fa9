//! Accesses of memfd and hugetlb RAM under a live guest. It checks and rewrites every word of its pattern on two
//! vCPUs while its windows are unmapped and mapped again, and KVM has its large mappings back afterwards. Needs
//! KVM, minor faults, and for hugetlb RAM pages of the pool.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, Seen};
use wideleaf_memory::sensors::minor_faults::MinorFaultSensor;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, RamRange};
use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::units::mib;
use wideleaf_policies::{OutcomeResult, PageSize, WindowIndex};
use wideleaf_testing::{Need, has_kvm, is_there, pattern_lasts};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

const TIMEOUT: Duration = Duration::from_secs(300);
/// Size of the guest's RAM, a third of which is its pattern.
const RAM_MIB: u64 = 48;
const WINDOWS: u64 = RAM_MIB / 2;
const PATTERN_WINDOWS: u64 = 8;
/// Rounds over all windows, while the guest works.
const ROUNDS: u64 = 12;
/// Number of windows in a sample.
const SHARE: usize = 6;

/// Collapses a window. A page that another thread just inspects is busy for an instant.
fn collapse(host: &LinuxHost, range: RamRange, window: WindowIndex) {
    const ATTEMPTS: usize = 50;
    let mut is_done = (0..ATTEMPTS).map(|_| collapse_window(host, range, window).result == OutcomeResult::Done);
    assert!(is_done.any(|done| done), "{window} does not become huge");
}

#[derive(Debug, Default)]
struct SampleCounts {
    touched: u64,
    untouched: u64,
    /// Number of windows by reason.
    unknown: BTreeMap<&'static str, u64>,
    cpu: Duration,
}

/// Samples every window several times, a share at a time.
fn sample_all(sensor: &mut MinorFaultSensor, host: &LinuxHost, windows: &[WindowIndex]) -> SampleCounts {
    let mut rotation = Rotation::default();
    let mut counted = SampleCounts::default();
    for _ in 0..ROUNDS * WINDOWS / SHARE as u64 {
        sensor.start(host, &rotation.next_share(windows, SHARE));
        std::thread::sleep(Duration::from_millis(10));
        let sample = sensor.finish(host);
        counted.cpu += sample.cost.cpu;
        for (_, seen) in sample.rows {
            match seen {
                Seen::Touched => counted.touched += 1,
                Seen::Untouched => counted.untouched += 1,
                Seen::Unknown(reason) => *counted.unknown.entry(reason).or_default() += 1,
            }
        }
    }
    counted
}

fn large_mappings(machine: &Machine) -> u64 {
    machine.second_level().mapping_stats().unwrap().pages_2m
}

/// Waits for large mappings: the guest touches its pattern again and again, and KVM then maps it large again.
fn wait_for_large_mappings(machine: &Machine) {
    let began = Instant::now();
    while large_mappings(machine) < PATTERN_WINDOWS {
        let states = machine.vcpu_states();
        assert!(began.elapsed() < TIMEOUT, "{} large mappings, {states:?}", large_mappings(machine));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn sampled_under_a_pattern(kind: BackingKind) {
    if !has_kvm() {
        return;
    }
    let page = if kind == BackingKind::Hugetlb { PageSize::Huge2M } else { PageSize::Base4K };
    let lease = (kind == BackingKind::Hugetlb).then(|| HugetlbPools::of_this_machine().lease(page, WINDOWS));
    let lease = lease.transpose().map_err(|error| error.to_string());
    if !is_there(Need::Hugetlb, lease.as_ref().map(|_| ()).map_err(Clone::clone)) {
        return;
    }
    let backing = BackingConfig::new(kind, page).unwrap();
    let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
    options.memory = mib(RAM_MIB);
    options.vcpus = 2;
    options.cmdline = format!("kernel=pattern bytes={}M {}", PATTERN_WINDOWS * 2, pattern_lasts(8));
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
    let host = LinuxHost::open().unwrap();
    prefault(&host, ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
    let windows: Vec<WindowIndex> = ram.ranges().iter().flat_map(|range| range.gpa.windows()).collect();
    if kind == BackingKind::Memfd {
        windows.iter().for_each(|window| collapse(&host, ram.ranges()[0], *window));
    }
    // CPU time includes time that the machine's own host takes away: a sample is to end by itself, not by its
    // budget.
    let unhurried = AccessConfig { cpu_max: TIMEOUT, ..AccessConfig::default() };
    let sensor = MinorFaultSensor::start(ram.clone(), unhurried);
    let mut sensor = match sensor {
        Ok(sensor) => sensor,
        Err(error) => {
            is_there(Need::UffdMinor, Err(error.to_string()));
            return;
        }
    };
    let lines = Arc::new(Mutex::new(String::new()));
    let sink = {
        let lines = lines.clone();
        Box::new(move |line: &[u8]| lines.lock().push_str(&String::from_utf8_lossy(line)))
    };
    let machine = Machine::start(&config, ram, sink).unwrap();
    wait_for_large_mappings(&machine);
    let counted = sample_all(&mut sensor, &host, &windows);
    wait_for_large_mappings(&machine);
    let exit = machine.wait(WaitLimits { timeout: Some(TIMEOUT), stop: None });
    println!("{}: {counted:?}", kind.name());
    // The guest ends with 0 only if no word was ever wrong.
    assert_eq!(exit, GuestExit::ExitPort(0), "{}", lines.lock());
    assert!(counted.unknown.is_empty(), "{counted:?}");
    assert!(counted.touched >= PATTERN_WINDOWS, "{counted:?}");
    assert!(counted.untouched >= WINDOWS, "most of its RAM is idle: {counted:?}");
    drop(lease);
}

#[test]
fn memfd_ram_survives_samples_and_kvm_maps_it_large_again() {
    sampled_under_a_pattern(BackingKind::Memfd);
}

#[test]
fn hugetlb_ram_survives_samples_and_kvm_maps_it_large_again() {
    sampled_under_a_pattern(BackingKind::Hugetlb);
}
