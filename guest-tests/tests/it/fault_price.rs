//! The price of a second-level fault is measured in a running guest: its first touches are enough. Needs KVM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_guest_image::IMAGE;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerReport, PriceSource};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, Manager, Paging};
use wideleaf_policies::policy::Needs;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Budget, Bytes, Moment, PageSize, Plan, Policy, Snapshot, VmId};
use wideleaf_testing::has_kvm;
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions};

/// Time limit for the guest's first touches, far beyond those of an emulated host.
const TOUCHES_MAX: Duration = Duration::from_secs(120);

/// Asks for writes, so that faults are measured, and plans nothing: no window changes its pages.
struct Watcher;

impl Policy for Watcher {
    fn name(&self) -> &'static str {
        "watcher"
    }

    fn needs(&self) -> Needs {
        Needs { written: true, ..Needs::default() }
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {}
}

/// Kind of the second level, and the report on a guest with `vcpus` vCPUs that has touched `touched` bytes of its RAM.
fn report_of(vcpus: u32, touched: Bytes) -> (Paging, ManagerReport) {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
    options.memory = touched + mib(32);
    options.vcpus = vcpus;
    options.cmdline = format!("kernel=pattern bytes={} passes=1000000", touched.get());
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
    let machine = Machine::start(&config, ram.clone(), Box::new(|_| {})).unwrap();
    let kvm = machine.second_level();
    kvm.pause().unwrap();
    let vm = ManagedVm::new(VmId(0), ram, Some(Arc::clone(&kvm)));
    let host = Arc::new(LinuxHost::open().unwrap());
    let manager = Manager::spawn(host, vec![vm], Box::new(Watcher), ManagerConfig::default()).unwrap();
    manager.activate();
    kvm.resume().unwrap();
    let deadline = Instant::now() + TOUCHES_MAX;
    let resident = || {
        let live = manager.live();
        live.snapshot.vms.first().map_or(0, |vm| vm.resident.iter().map(|pages| u64::from(*pages)).sum())
    };
    while resident() < touched.pages(PageSize::Base4K) {
        assert!(Instant::now() < deadline, "{} pages of {touched} touched", resident());
        std::thread::sleep(Duration::from_millis(5));
    }
    let report = manager.stop();
    assert_eq!(machine.stop(), GuestExit::Stopped);
    (kvm.paging(), report)
}

#[test]
fn after_256_mib_of_first_touches_the_price_is_known() {
    if !has_kvm() {
        return;
    }
    for vcpus in [1, 2] {
        let (paging, report) = report_of(vcpus, mib(256));
        let price = report.fault_prices[&VmId(0)];
        println!("{vcpus} vCPUs: {price:?}");
        assert!((Duration::from_nanos(100)..=Duration::from_millis(1)).contains(&price.time), "{price:?}");
        // With EPT or NPT 65,536 faults may be too short for the ticks of the kernel's clock.
        assert!(price.source != PriceSource::Assumed || paging != Paging::Shadow, "{price:?}");
        assert!(report.sensor_failures.is_empty(), "{:?}", report.sensor_failures);
    }
}
