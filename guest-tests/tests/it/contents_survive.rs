//! No guest may lose a byte because the manager moves its memory. A guest that checks and rewrites every word of
//! its RAM runs while its pages are promoted, its mappings split and recovered, again and again. Needs KVM.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io};

use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::policy::{Needs, Policy, PolicyInfo, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Action, Backing, Budget, Cost, Moment, PageSize, Plan, Snapshot, VmSnapshot};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;
use wideleaf_run::spec::RunSpec;
use wideleaf_testing::chaos::Chaos;
use wideleaf_testing::swaps::{can_swap, keeps_page_tables};
use wideleaf_testing::{has_kvm, pattern_lasts};

/// Promotes all windows at one tick and splits all at the next, until the guest ends.
struct Shuttle {
    splits_next: bool,
    /// Whether it asks for accesses. Where pages can be moved for that, windows are swapped instead of collapsed.
    needs_access: bool,
}

impl Policy for Shuttle {
    fn name(&self) -> &'static str {
        "shuttle"
    }

    fn needs(&self) -> Needs {
        Needs { access: self.needs_access, ..Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, _: &mut Budget, plan: &mut Plan) {
        for vm in &snapshot.vms {
            let ready = (0..vm.len()).filter(|row| vm.ready_at[*row] <= now);
            let actions = ready.filter_map(|row| self.action(vm, row)).take(Plan::BOUND_DEFAULT);
            actions.for_each(|action| plan.push(action, Cost::default()));
        }
        self.splits_next = !self.splits_next;
    }
}

impl Shuttle {
    fn action(&self, vm: &VmSnapshot, row: usize) -> Option<Action> {
        let (vm_id, window) = (vm.vm, vm.windows[row]);
        match (vm.backing[row], vm.is_held[row], self.splits_next) {
            (Backing::Base4K, _, _) | (Backing::Huge2M | Backing::Giant1G, true, false) => {
                Some(Action::Promote { vm: vm_id, window, to: PageSize::Huge2M })
            }
            (Backing::Huge2M | Backing::Giant1G, false, true) => {
                Some(Action::Demote { vm: vm_id, window, to: PageSize::Base4K })
            }
            _ => None,
        }
    }
}

/// Half of the windows are huge, and at each tick they give their huge pages to the other half.
struct Trader {
    promotes_even: bool,
}

impl Policy for Trader {
    fn name(&self) -> &'static str {
        "trader"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, ..Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, _: &mut Budget, plan: &mut Plan) {
        for vm in &snapshot.vms {
            let promotes = |row: usize| row.is_multiple_of(2) == self.promotes_even;
            let with = |backing: Backing, is_for_promotion: bool| {
                let rows = (0..vm.len()).filter(move |row| vm.ready_at[*row] <= now && vm.backing[*row] == backing);
                rows.filter(move |row| promotes(*row) == is_for_promotion).map(|row| vm.windows[row])
            };
            let vacated = with(Backing::Huge2M, false).map(|window| Action::Vacate { vm: vm.vm, window });
            let to = PageSize::Huge2M;
            let promoted = with(Backing::Base4K, true).map(|window| Action::Promote { vm: vm.vm, window, to });
            let actions = vacated.chain(promoted).take(Plan::BOUND_DEFAULT);
            actions.for_each(|action| plan.push(action, Cost::default()));
        }
        self.promotes_even = !self.promotes_even;
    }
}

static TRADER: PolicyInfo = PolicyInfo {
    name: "trader",
    summary: "moves huge pages from one half of the windows to the other and back",
    parameters: &[],
    make: |_| Box::new(Trader { promotes_even: true }),
};

static CHAOS: PolicyInfo = PolicyInfo {
    name: "chaos",
    summary: "asks for random actions",
    parameters: &[],
    make: |_| Box::new(Chaos::new(1)),
};

static SHUTTLE: PolicyInfo = PolicyInfo {
    name: "shuttle",
    summary: "promotes and splits all windows in turn",
    parameters: &[],
    make: |_| Box::new(Shuttle { splits_next: false, needs_access: false }),
};

static SAMPLING_SHUTTLE: PolicyInfo = PolicyInfo {
    name: "sampling_shuttle",
    summary: "the same, and asks for accesses",
    make: |_| Box::new(Shuttle { splits_next: false, needs_access: true }),
    ..SHUTTLE
};

/// Duration of a guest, in seconds: many times what the manager needs on a quiet machine.
const SECONDS: u64 = 10;

fn run(policy: &'static PolicyInfo, kind: BackingKind, host_page: PageSize, vcpus: u8) -> RunReport {
    let cmdline = format!("bytes=16M {}", pattern_lasts(SECONDS));
    let spec = RunSpec {
        vcpus,
        policy: policy.into(),
        timeout: Some(Duration::from_secs(300)),
        ..RunSpec::of_kernel("pattern", cmdline, mib(32), BackingConfig::new(kind, host_page).unwrap())
    };
    let report = execute(&spec, &Interrupts::install().unwrap(), Instant::now()).unwrap();
    let verification = report.verification.clone().unwrap();
    assert!(verification.passed, "{verification:?}");
    assert_eq!(verification.errors, 0);
    report
}

fn count(report: &RunReport, outcome: &str) -> u64 {
    report.manager.outcomes.get(outcome).copied().unwrap_or(0)
}

fn promoted(kind: BackingKind, vcpus: u8) {
    if !has_kvm() {
        return;
    }
    let report = run(by_name("greedy").unwrap(), kind, PageSize::Base4K, vcpus);
    assert!(count(&report, "collapse.done") >= 8, "{:?}", report.manager.outcomes);
    let region = &report.regions[0];
    assert_eq!(region.windows_host_large, region.windows, "all of its RAM is large in the end");
    let kvm = report.manager.kvm_check.unwrap();
    assert!(kvm.large_windows_at_most >= region.windows, "KVM followed when the guest touched its RAM again: {kvm:?}");
    assert_eq!(kvm.contradictions, 0);
}

fn shuttled(kind: BackingKind, vcpus: u8) {
    if !has_kvm() {
        return;
    }
    let report = run(&SHUTTLE, kind, PageSize::Base4K, vcpus);
    let there_and_back: &[_] = match kind {
        BackingKind::Anon => &["collapse.done", "split.done"],
        _ => &["collapse.done", "hold_at_4k.done", "recover.done"],
    };
    for outcome in there_and_back.iter().copied() {
        assert!(count(&report, outcome) > 0, "{outcome} in {:?}", report.manager.outcomes);
    }
}

/// Samples, promotes and splits the windows of a guest, and asserts that `mechanism` promoted them, and the other one
/// at most those that the kernel split again on the way.
fn shuttled_beside_samples(vcpus: u8, mechanism: &str, other: &str) {
    let report = run(&SAMPLING_SHUTTLE, BackingKind::Anon, PageSize::Base4K, vcpus);
    let outcomes = &report.manager.outcomes;
    println!("{outcomes:?}");
    assert!(report.manager.unanswered.is_empty(), "{:?}", report.manager.unanswered);
    let by = |mechanism: &str| count(&report, &format!("{mechanism}.done"));
    assert!(by(mechanism) >= 8 && by("split") > 0, "{outcomes:?}");
    assert!(by(other) <= count(&report, &format!("{mechanism}.refused_not_observed")), "{outcomes:?}");
}

fn swapped(vcpus: u8) {
    if has_kvm() && can_swap() {
        shuttled_beside_samples(vcpus, "swap", "collapse");
    }
}

#[test]
fn anonymous_ram_survives_swaps_and_splitting_with_one_vcpu() {
    swapped(1);
}

#[test]
fn anonymous_ram_survives_swaps_and_splitting_with_two_vcpus() {
    swapped(2);
}

/// Compacts the host's memory again and again while this exists, so that pages are in migration when they are moved.
struct Compacting {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Compacting {
    /// Only root may write the file.
    fn begin() -> io::Result<Compacting> {
        let compact = || fs::write("/proc/sys/vm/compact_memory", "1");
        compact()?;
        let (ends, end) = channel();
        let thread = thread::spawn(move || {
            while end.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
                compact().unwrap();
            }
        });
        Ok(Compacting { ends: Some(ends), thread: Some(thread) })
    }
}

impl Drop for Compacting {
    fn drop(&mut self) {
        drop(self.ends.take());
        drop(self.thread.take().map(JoinHandle::join));
    }
}

#[test]
fn anonymous_ram_is_swapped_while_the_kernel_compacts_memory() {
    if !has_kvm() || !can_swap() {
        return;
    }
    match Compacting::begin() {
        Ok(_compacting) => shuttled_beside_samples(1, "swap", "collapse"),
        Err(error) => println!("skipped: cannot compact the host's memory: {error}"),
    }
}

#[test]
fn anonymous_ram_survives_trades_of_huge_pages_with_two_vcpus() {
    if has_kvm() && can_swap() {
        let report = run(&TRADER, BackingKind::Anon, PageSize::Base4K, 2);
        let outcomes = &report.manager.outcomes;
        println!("{outcomes:?}");
        assert!(count(&report, "vacate.done") >= 8 && count(&report, "swap.done") >= 8, "{outcomes:?}");
    }
}

#[test]
fn anonymous_ram_survives_the_fallback_to_collapse_and_splitting_with_two_vcpus() {
    if has_kvm() && keeps_page_tables() {
        shuttled_beside_samples(2, "collapse", "swap");
    }
}

#[test]
fn anonymous_ram_survives_promotion_with_one_vcpu() {
    promoted(BackingKind::Anon, 1);
}

#[test]
fn anonymous_ram_survives_promotion_with_two_vcpus() {
    promoted(BackingKind::Anon, 2);
}

#[test]
fn memfd_ram_survives_promotion_with_two_vcpus() {
    promoted(BackingKind::Memfd, 2);
}

#[test]
fn anonymous_ram_survives_splitting_and_recovery_with_one_vcpu() {
    shuttled(BackingKind::Anon, 1);
}

#[test]
fn anonymous_ram_survives_splitting_and_recovery_with_two_vcpus() {
    shuttled(BackingKind::Anon, 2);
}

fn anything_anywhere(kind: BackingKind) {
    if !has_kvm() {
        return;
    }
    let report = run(&CHAOS, kind, PageSize::Base4K, 2);
    let promoted = count(&report, "swap.done") + count(&report, "collapse.done");
    let demoted = if kind == BackingKind::Anon { "split.done" } else { "hold_at_4k.done" };
    assert!(promoted > 0 && count(&report, demoted) > 0, "{:?}", report.manager.outcomes);
    println!("{:?}", report.manager.outcomes);
    for sensor in ["zero_pages", "written", "guest_tables"] {
        assert!(report.manager.sensors[sensor].samples > 0, "{sensor}: {:?}", report.manager.sensors);
    }
    let can_sample = report.manager.unanswered.is_empty();
    let sampled = report.manager.sensors.iter().filter(|(name, _)| name.starts_with("access"));
    let sampled: u64 = sampled.map(|(_, sensor)| sensor.windows).sum();
    assert!(!can_sample || sampled > 0, "{:?}", report.manager.sensors);
}

#[test]
fn anonymous_ram_survives_anything_anywhere_with_two_vcpus() {
    anything_anywhere(BackingKind::Anon);
}

#[test]
fn memfd_ram_survives_anything_anywhere_with_two_vcpus() {
    anything_anywhere(BackingKind::Memfd);
}

#[test]
fn memfd_ram_survives_splitting_and_recovery_with_two_vcpus() {
    shuttled(BackingKind::Memfd, 2);
}
