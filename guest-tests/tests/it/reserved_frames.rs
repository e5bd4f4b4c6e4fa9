//! A guest that checks and rewrites every word of its RAM runs on reserved frames. Its windows become large while
//! it populates them, or their reservations are broken, and it loses nothing. Needs KVM and a userfaultfd for
//! kernel faults.

use std::time::{Duration, Instant};

use wideleaf_memory::BackingConfig;
use wideleaf_policies::policy::{Policy, PolicyInfo, RamStart, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Budget, Moment, PerTenThousand, Plan, PolicyChoice, ReservationRules, Snapshot};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;
use wideleaf_run::spec::RunSpec;
use wideleaf_testing::{Need, has_kvm, is_there, pattern_lasts};

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
        timeout: Some(Duration::from_secs(300)),
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

#[test]
fn a_guest_survives_broken_reservations_as_it_populates_them() {
    if !can_run() {
        return;
    }
    let report = run((&ALWAYS_SHORT).into());
    assert!(count(&report, "broken") > 0, "{:?}", report.manager.outcomes);
}
