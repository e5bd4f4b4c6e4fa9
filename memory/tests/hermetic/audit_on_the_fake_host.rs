//! A guest's progress on its way to the policy, and the reason of windows that were measured to gain nothing.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::host::Host;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::progress::ProgressReadings;
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_policies::policy;
use wideleaf_policies::units::mib;
use wideleaf_policies::{BudgetLimits, Gpa, GpaRange, GuestProgress, Hva, PageSize, PerTenThousand, VmId};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 200;

/// Full windows on base pages.
fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.make_present(RAM_AT, mib(2) * WINDOWS, false);
    host.forbid_huge(RAM_AT, mib(2) * WINDOWS);
    Arc::new(host)
}

fn work(host: &Arc<FakeHost>, progress: Option<Arc<ProgressReadings>>) -> ManagerLoop {
    let ram = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).expect("it fits"), hva: RAM_AT };
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("it exists");
    let vm = ManagedVm { progress, ..ManagedVm::external(VmId(0), vec![ram], backing, None) };
    let limits = BudgetLimits {
        copy_per_second: mib(1 << 20),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };
    let auto = policy::by_name("auto").expect("it exists").with_defaults();
    ManagerLoop::new(host.clone(), vec![vm], auto, ManagerConfig { limits, ..ManagerConfig::default() })
}

#[test]
fn a_guest_that_gains_nothing_keeps_most_windows_small_and_explain_says_why() {
    let (host, readings) = (host(), Arc::<ProgressReadings>::default());
    let mut work = work(&host, Some(readings.clone()));
    for reading in 0..100_u64 {
        let (done, cpu) = (reading * 4_000_000, Duration::from_millis(50) * reading as u32);
        readings.add(GuestProgress { phase: 0, done, cpu });
        work.tick();
        host.sleep(Duration::from_millis(50));
    }
    let live = work.live();
    let small = live.vms[0].why_not[&WhyNot::GainsNothing];
    assert_eq!(small + host.huge_windows(), WINDOWS);
    assert!((1..=WINDOWS / 20).contains(&host.huge_windows()), "{}", host.huge_windows());
    assert_eq!(live.unanswered.iter().filter(|line| line.contains("what a promotion gains")).count(), 0);
    assert!(work.finish().policy_figures.contains(&("audits_stopped", 1)));
}

#[test]
fn readings_are_in_the_snapshot_of_one_tick() {
    let (host, readings) = (host(), Arc::<ProgressReadings>::default());
    let mut work = work(&host, Some(readings.clone()));
    let reading = GuestProgress { phase: 3, done: 7, cpu: Duration::from_secs(1) };
    readings.add(reading);
    work.tick();
    assert_eq!(work.live().snapshot.vms[0].progress, [reading]);
    work.tick();
    assert_eq!(work.live().snapshot.vms[0].progress, []);
}

#[test]
fn without_progress_all_windows_are_promoted_and_the_report_says_that_gains_are_assumed() {
    let host = host();
    let mut work = work(&host, None);
    assert_eq!(work.tick(), WINDOWS);
    let told = "vm 0: what a promotion gains: nothing here hears of the guest's progress, so that its misses are \
                assumed";
    assert!(work.report().unanswered.iter().any(|line| line == told), "{:?}", work.report().unanswered);
}
