//! A guest that checks and rewrites every word of its RAM runs on reserved frames. Its windows become large while
//! it populates them, or their reservations are broken, and it loses nothing. Another one gives memory to its balloon
//! and takes it back: windows get base pages again and become large again. Needs KVM and a userfaultfd for kernel
//! faults.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::host::Host;
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::{BackingConfig, GuestRam, LinuxHost, ReservedFrames};
use wideleaf_policies::policy::{Policy, PolicyInfo, RamStart, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Budget, Bytes, Moment, PageSize, PerTenThousand, Plan, PolicyChoice, ReservationRules, Snapshot, VmId,
};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;
use wideleaf_run::spec::{DeviceSpec, RunSpec};
use wideleaf_testing::{Need, has_kvm, is_there, pattern_lasts};
use wideleaf_vmm::boot::BootImage;
use wideleaf_vmm::devices::SerialOutput;
use wideleaf_vmm::devices::virtio::balloon::Balloon;
use wideleaf_vmm::run_loop::VcpuState;
use wideleaf_vmm::{GuestExit, Hardware, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

const TIMEOUT: Duration = Duration::from_secs(300);

/// A policy that reserves frames for a host that is always short.
struct AlwaysShort;

impl Policy for AlwaysShort {
    fn name(&self) -> &'static str {
        "always_short"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {}

    fn reserves(&self) -> Option<ReservationRules> {
        let always = PerTenThousand::new(0);
        Some(ReservationRules { threshold: 512, break_from: always, break_to: always })
    }

    fn ram_start(&self) -> RamStart {
        RamStart::OnReservableFrames
    }
}

static ALWAYS_SHORT: PolicyInfo = PolicyInfo {
    name: "always_short",
    summary: "breaks every reservation that it sees",
    parameters: &[],
    make: |_| Box::new(AlwaysShort),
};

fn can_run() -> bool {
    let userfaultfd = wideleaf_memory::first_touch::probe().map(drop).map_err(|error| error.to_string());
    has_kvm() && is_there(Need::Userfaultfd, userfaultfd)
}

/// Runs 64 windows of pattern on two vCPUs.
fn run(policy: PolicyChoice) -> RunReport {
    let cmdline = format!("bytes=128M {}", pattern_lasts(2));
    let spec = RunSpec {
        vcpus: 2,
        policy,
        timeout: Some(TIMEOUT),
        ..RunSpec::of_kernel("pattern", cmdline, mib(160), BackingConfig::reservable())
    };
    let report = execute(&spec, &Interrupts::install().unwrap(), Instant::now()).unwrap();
    let verification = report.verification.clone().unwrap();
    assert!(verification.passed && verification.errors == 0, "{verification:?}");
    assert_eq!(count(&report, "gave_up"), 0);
    println!("{:?}", report.manager.outcomes);
    report
}

fn count(report: &RunReport, counter: &str) -> u64 {
    report.manager.outcomes.get(&format!("reserved_frames.{counter}")).copied().unwrap_or(0)
}

/// Asserts that every window that was reserved and filled is large, for the host and for KVM.
fn becomes_large(policy: PolicyChoice) {
    if !can_run() {
        return;
    }
    let report = run(policy);
    let region = &report.regions[0];
    // Pages that the loader or an early vCPU touched before the service began are not reserved.
    assert!(region.windows_host_large + count(&report, "backed_before") >= region.windows, "{region:?}");
    assert!(count(&report, "promoted") >= region.windows / 2, "{:?}", report.manager.outcomes);
    let kvm = report.manager.kvm_check.unwrap();
    assert!(kvm.large_windows_at_most >= region.windows_host_large, "KVM followed: {kvm:?}");
    assert_eq!((kvm.contradictions, report.manager.copied_bytes), (0, 0));
}

#[test]
fn a_guest_s_windows_become_large_as_it_populates_them_with_two_vcpus() {
    becomes_large(by_name("reservation").unwrap().into());
}

#[test]
fn a_guest_s_windows_become_large_with_an_eighth_of_their_pages() {
    becomes_large(PolicyChoice::parse("reservation:threshold=64").unwrap());
}

/// Bytes in use by the guest with a balloon: 32 windows, of which it gives away every other one.
const BALLOON_BYTES: u64 = 64 << 20;
const GIVEN_WINDOWS: u64 = BALLOON_BYTES / (2 << 20) / 2;
const PASSES: u64 = 4;

fn balloon_spec(policy: PolicyChoice) -> RunSpec {
    let cmdline = format!("bytes={BALLOON_BYTES} passes={PASSES}");
    RunSpec {
        policy,
        devices: DeviceSpec { balloon: Some(Bytes::ZERO), ..DeviceSpec::default() },
        timeout: Some(TIMEOUT),
        ..RunSpec::of_kernel("balloon", cmdline, mib(96), BackingConfig::reservable())
    }
}

#[test]
fn a_balloon_takes_whole_windows_from_their_reservations_and_they_are_reserved_anew() {
    if !can_run() {
        return;
    }
    let report =
        execute(&balloon_spec(by_name("reservation").unwrap().into()), &Interrupts::install().unwrap(), Instant::now());
    let report = report.unwrap();
    assert!(report.verification.clone().unwrap().passed, "{:?}", report.verification);
    println!("{:?} {:?} {:?}", report.manager.outcomes, report.devices, report.ram_at_end);
    let given = PASSES * GIVEN_WINDOWS;
    assert_eq!(count(&report, "demoted"), given, "each window, at the first buffer of its pages");
    assert!(count(&report, "ended") >= given, "and at the second one nothing is left");
    assert!(count(&report, "reserved") >= given + 2 * GIVEN_WINDOWS);
    assert!(count(&report, "freed_for_guest_bytes") >= given * (2 << 20), "{:?}", report.manager.outcomes);
    let large = count(&report, "promoted") - count(&report, "demoted");
    let end = report.ram_at_end.unwrap().counters;
    assert!(large >= 2 * GIVEN_WINDOWS, "{large}");
    assert_eq!((end.host_2m_bytes, end.kvm.unwrap().pages_2m), (large * (2 << 20), large));
}

#[test]
fn broken_windows_that_go_to_the_balloon_are_reserved_anew() {
    if !can_run() {
        return;
    }
    let report =
        execute(&balloon_spec((&ALWAYS_SHORT).into()), &Interrupts::install().unwrap(), Instant::now()).unwrap();
    assert!(report.verification.clone().unwrap().passed, "{:?}", report.verification);
    println!("{:?}", report.manager.outcomes);
    assert!(count(&report, "broken") > 0);
    assert!(count(&report, "reserved") >= (PASSES + 2) * GIVEN_WINDOWS, "{:?}", report.manager.outcomes);
}

/// Large windows by three counts: the service's, the process's own (smaps), KVM's.
fn large_by_three(service: &ReservedFrames, machine: &Machine) -> [u64; 3] {
    let report = service.report();
    let smaps = LinuxHost::open().unwrap().read_text("/proc/self/smaps").unwrap();
    let ram: Vec<_> = machine.ram().ranges().iter().map(|range| (range.hva, range.gpa.bytes())).collect();
    let huge = resident_memory(&smaps, &ram).unwrap().guest_ram_thp;
    let kvm = machine.second_level().mapping_stats().unwrap();
    [report.promoted - report.demoted, huge.pages(PageSize::Huge2M), kvm.pages_2m]
}

#[test]
fn promotions_and_demotions_are_the_same_for_the_service_for_smaps_and_for_kvm() {
    if !can_run() {
        return;
    }
    // On one processor, as in a lab, the guest has most of the time all the same.
    let shares = std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
    let (rest, passes) = if shares { (4, PASSES) } else { (1, 4 * PASSES) };
    let options = VmOptions {
        memory: mib(96),
        cmdline: format!("kernel=balloon bytes={BALLOON_BYTES} passes={passes}"),
        ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), BackingConfig::reservable())
    };
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), BackingConfig::reservable()).unwrap();
    let rules = by_name("reservation").unwrap().with_defaults().reserves().unwrap();
    let host = Arc::new(LinuxHost::open().unwrap());
    let service = ReservedFrames::start(host, vec![(VmId(0), ram.clone())], rules).unwrap();
    let balloon = Balloon::new(mib(96), Bytes::ZERO).unwrap();
    let lines = Arc::<Mutex<String>>::default();
    let sink = Arc::clone(&lines);
    let sink = move |line: &[u8]| sink.lock().push_str(&String::from_utf8_lossy(line));
    let hardware = Hardware {
        ram: ram.clone(),
        output: SerialOutput { lines: Box::new(sink), bytes: None },
        devices: vec![Box::new(balloon)],
        sandbox: None,
    };
    let machine = Machine::start_image(&config, &BootImage::read(&config).unwrap(), hardware).unwrap();
    let (mut looks, mut fewest) = (Vec::new(), u64::MAX);
    let deadline = Instant::now() + TIMEOUT;
    while machine.vcpu_states().iter().any(|state| *state != VcpuState::Finished) && Instant::now() < deadline {
        let began = Instant::now();
        let [ours, of_smaps, of_kvm] = large_by_three(&service, &machine);
        looks.push((ours, of_smaps, of_kvm));
        if service.report().demoted > 0 {
            fewest = fewest.min(of_kvm);
        }
        std::thread::sleep((began.elapsed() * rest).max(Duration::from_millis(2)));
    }
    let exit = machine.wait(WaitLimits { timeout: Some(TIMEOUT), stop: None });
    let at_end = large_by_three(&service, &machine);
    drop(machine);
    let report = service.stop();
    println!("{} looks, at the end {at_end:?}, fewest {fewest}; {report:?}", looks.len());
    assert_eq!(exit, GuestExit::ExitPort(0), "{}", lines.lock());
    assert_eq!(report.gave_up, None);
    assert_eq!(report.demoted, passes * GIVEN_WINDOWS);
    assert!(at_end[0] >= 2 * GIVEN_WINDOWS && at_end == [at_end[0]; 3], "{at_end:?}");
    // The three are not read at one instant: in between windows change, one after the other.
    assert!(looks.iter().any(|(ours, of_smaps, of_kvm)| ours == of_smaps && ours == of_kvm && *ours > 0), "{looks:?}");
    assert!(fewest < 2 * GIVEN_WINDOWS, "KVM has fewer large mappings while windows are in the balloon: {looks:?}");
}

#[test]
fn a_guest_survives_broken_reservations_as_it_populates_them() {
    if !can_run() {
        return;
    }
    let report = run((&ALWAYS_SHORT).into());
    assert!(count(&report, "broken") > 0, "{:?}", report.manager.outcomes);
}
