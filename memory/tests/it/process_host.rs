//! Memory of another process, on the running kernel: collapsed and split from outside, and the state after the
//! process ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::gate::{Gate, GateState, KeptHoles};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::kernel::GiantMappings as _;
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig};
use wideleaf_memory::sensors::guest_tables::{ProcessRam, TableMemory};
use wideleaf_memory::sensors::kernel_flags::MergedPages;
use wideleaf_memory::side_mapping::SideContents;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, OutcomeResult, PageSize, Refusal, VmId, WindowIndex, policy};

use crate::other_process::{self, OtherProcess, WINDOWS, full_windows, word_at};
use crate::{collapse_in_some_attempts, wait_until};

#[test]
#[ignore = "it is the other process of the tests here, and they start it"]
fn the_other_process() {
    other_process::be_the_other_process();
}

#[test]
fn a_process_is_claimed_once_until_the_claim_is_given_up() {
    let other = OtherProcess::start();
    let (one, another) = (other.host(), other.host());
    let claim = one.claim().unwrap();
    assert!(claim.is_some());
    assert!(one.claim().unwrap().is_none() && another.claim().unwrap().is_none());
    drop(claim);
    assert!(another.claim().unwrap().is_some());
}

/// A process on base pages: huge ones from the host's THP settings are split.
fn on_base_pages() -> (OtherProcess, ProcessHost) {
    let other = OtherProcess::start();
    let host = other.host();
    for window in (0..WINDOWS).map(WindowIndex::new) {
        split_window(&host, BackingKind::Anon, other.ram(), window);
    }
    assert_eq!(other.huge_windows(&host), 0);
    (other, host)
}

#[test]
fn windows_are_collapsed_and_split_from_outside_and_keep_their_contents() {
    let (mut other, host) = on_base_pages();
    for window in full_windows() {
        let collapse = collapse_in_some_attempts(&host, other.ram(), window.get());
        assert_eq!((collapse.result, collapse.cost.copied), (OutcomeResult::Done, mib(2)), "{window}");
    }
    assert_eq!(other.huge_windows(&host), WINDOWS - 1);
    assert!(other.is_whole());
    let split = split_window(&host, BackingKind::Anon, other.ram(), WindowIndex::new(3));
    assert_eq!((split.result, other.huge_windows(&host)), (OutcomeResult::Done, WINDOWS - 2));
    assert!(other.is_whole());
}

#[test]
fn a_process_that_has_ended_is_gone_in_every_call_before_and_after_it_is_reaped() {
    let (mut other, host) = on_base_pages();
    let ram = other.ram();
    assert!(!host.has_ended());
    other.child.kill().unwrap();
    wait_until(|| host.has_ended());
    for is_reaped in [false, true] {
        if is_reaped {
            other.kill();
        }
        let mut runs = Vec::new();
        let errors = [
            host.scan(ram.hva, mib(2), &mut runs).unwrap_err(),
            host.scan_occupied(ram.hva, mib(2), &mut runs).unwrap_err(),
            host.advise(ram.hva, mib(2), Advice::Collapse).unwrap_err(),
            host.advise(ram.hva, mib(2), Advice::Cold).unwrap_err(),
            host.read_text("/proc/self/statm").unwrap_err(),
            host.is_one_mapping(ram.hva, mib(2)).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.is_gone()), "{errors:?}");
        let collapse = collapse_window(&host, ram, WindowIndex::new(0));
        assert_eq!(collapse.result, OutcomeResult::Refused(Refusal::Gone));
    }
}

#[test]
fn a_number_without_a_process_is_not_opened() {
    // No number is larger: pid_max is 2^22 at most (proc_sys_kernel(5)).
    let error = ProcessHost::open(1 << 23).unwrap_err();
    assert!(error.is_gone(), "{error}");
}

#[test]
fn reading_proc_self_reads_the_files_of_the_process() {
    let (other, host) = on_base_pages();
    let status = host.read_text("/proc/self/status").unwrap();
    let pid = format!("Pid:\t{}\n", other.child.id());
    assert!(status.contains(&pid), "{status}");
    assert!(host.read_text("/proc/meminfo").unwrap().contains("MemAvailable"));
    assert!(host.is_one_mapping(other.ram().hva, mib(2) * WINDOWS).unwrap());
    assert!(!host.is_one_mapping(other.ram().hva, mib(1 << 20)).unwrap());
}

#[test]
fn only_its_page_sizes_are_changed_from_outside() {
    let (mut other, host) = on_base_pages();
    let start = other.ram().hva;
    for advice in [Advice::HugePage, Advice::NoHugePage, Advice::PopulateRead, Advice::PopulateWrite] {
        let error = host.advise(start, mib(2), advice).unwrap_err();
        assert_eq!(error.source.raw_os_error(), Some(libc::ENOTSUP), "{error}");
    }
    assert!(host.map_aside(SideContents::Nothing).is_err() && host.create_giant().is_err());
    assert_eq!((host.is_own(), other.huge_windows(&host)), (false, 0));
    assert!(other.is_whole());
}

#[test]
fn its_words_are_read_table_by_table_and_not_beyond_its_ram() {
    let (mut other, host) = on_base_pages();
    let ram = ProcessRam::open(&host, vec![other.ram()]).unwrap();
    let mut entries = [0; 512];
    for table in [0, 3, 700] {
        assert!(ram.read_table(Gpa::new(table * 4096), &mut entries));
        let first = table as usize * 512;
        assert!(entries.iter().enumerate().all(|(index, entry)| *entry == word_at(first + index)), "table {table}");
    }
    assert!(!ram.read_table(other.ram().gpa.end(), &mut entries));
    other.kill();
    assert!(!ram.read_table(Gpa::new(0), &mut entries), "there is no memory left to read");
}

#[test]
fn no_page_is_merged_without_a_request() {
    let (other, host) = on_base_pages();
    let merged = match MergedPages::open(&host) {
        Ok(merged) => merged,
        Err(error) => return skip("kpageflags", &error.to_string()),
    };
    for window in full_windows() {
        assert_eq!(merged.of_window(other.ram().hva + (window.start() - Gpa::new(0))).unwrap(), 0);
    }
}

/// Prints why a test cannot run here; fails if `WIDELEAF_REQUIRE` names the need.
fn skip(needs: &str, why: &str) {
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == needs), "{needs} is required: {why}");
    eprintln!("skipped: {why}");
}

/// A guest with a balloon: its holes are to stay.
struct Ballooned;

impl Gate for Ballooned {
    fn state(&self) -> GateState {
        GateState::Open
    }

    fn keeps_holes(&self) -> Option<KeptHoles> {
        Some(KeptHoles::GivenBack)
    }
}

#[test]
fn a_manager_makes_the_memory_of_another_process_huge_keeps_its_holes_and_ends_with_it() {
    let (mut other, host) = on_base_pages();
    let host = Arc::new(host);
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let vm = ManagedVm::external(VmId(0), vec![other.ram()], backing, None);
    let vm = ManagedVm { gate: Some(Arc::new(Ballooned)), ..vm };
    let greedy = policy::by_name("greedy").unwrap().with_defaults();
    // So short that the end is seen soon: no result depends on its length.
    let config = ManagerConfig { tick_longest: Duration::from_millis(50), ..ManagerConfig::for_external_guests() };
    let manager = Manager::spawn(host.clone(), vec![vm], greedy, config).unwrap();
    manager.activate();
    wait_until(|| manager.live().outcomes.get(&("collapse", "done")) == Some(&(WINDOWS - 1)));
    assert_eq!(manager.live().vms[0].why_not, BTreeMap::from([(WhyNot::Holes(KeptHoles::GivenBack), 1)]));
    assert!(other.is_whole());
    assert_eq!(other.huge_windows(&host), WINDOWS - 1);
    other.kill();
    wait_until(|| manager.has_ended());
    assert_eq!(manager.live().vms[0].gate, GateState::Gone);
    let report = manager.stop();
    assert_eq!((report.panics.len(), report.sensor_failures.len(), report.bloat), (0, 0, Bytes::ZERO));
}
