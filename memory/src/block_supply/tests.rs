//! The thread of a supply, with the real kernel.

use super::*;
use crate::host::linux::LinuxHost;

/// Rules under which the machine's other work does not stop a supply.
fn at_any_pressure() -> SupplyRules {
    let always = PerTenThousand::new(u32::MAX);
    SupplyRules { cpu: PerTenThousand::ALL, memory_stalls_max: always, cpu_stalls_max: always, ..Default::default() }
}

fn supply() -> BlockSupply {
    BlockSupply::new(Arc::new(LinuxHost::open().expect("/proc is mounted")), at_any_pressure())
}

fn demand(windows: u64) -> SupplyDemand {
    SupplyDemand { windows, ..SupplyDemand::default() }
}

#[test]
fn its_thread_starts_when_windows_wait_and_ends_with_it() {
    let supply = supply();
    supply.want(demand(0)).expect("nothing to do");
    assert!(supply.thread.lock().is_none());
    supply.want(demand(1)).expect("a thread");
    let has_asked = |report: &SupplyReport| report.made + report.found + report.refused > 0;
    let began = std::time::Instant::now();
    while !has_asked(&supply.report()) && began.elapsed() < Duration::from_secs(60) {
        thread::sleep(Duration::from_millis(10));
    }
    let report = supply.report();
    assert!(has_asked(&report) && report.cpu > Duration::ZERO, "{report:?}");
    drop(supply);
}

#[test]
fn a_reserve_alone_starts_its_thread() {
    let supply = supply();
    supply.want(SupplyDemand { keeps_reserve: true, ..SupplyDemand::default() }).expect("a thread");
    assert!(supply.thread.lock().is_some());
}

#[test]
fn counters_have_names_and_those_of_zero_are_left_out() {
    let report = SupplyReport {
        made: 3,
        cpu: Duration::from_micros(1_500),
        stopped: BTreeMap::from([("cpu_pressure", 2)]),
        ..SupplyReport::default()
    };
    let named: Vec<_> = report.by_name().collect();
    let expected = [("made", 3), ("cpu_us", 1_500), ("stopped.cpu_pressure", 2)];
    assert_eq!(named, expected.map(|(name, count)| (name.to_owned(), count)));
}
