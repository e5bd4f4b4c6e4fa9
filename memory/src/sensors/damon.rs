//! Detects which windows were touched lately, through the kernel's own monitor (DAMON,
//! Documentation/admin-guide/mm/damon/usage.rst). It reads the accessed bit of one page in each of some hundred
//! regions, many times a second. It works for any RAM and makes no thread wait, but it is a sample: if a guest uses
//! few base pages of a window, it may read others.
//!
//! ```text
//!   DamonSensor    this process's guest RAM, where there is no userfaultfd, which misses nothing
//!   guests         the RAM of other processes: one kdamond for all of them
//!   kdamonds       the files of the kernel: claimed, set up, read, given back
//! ```
//!
//! The kernel thread bears the cost, which is not in the report: at most 20 000 accessed bits a second of this
//! process's RAM, and 1600 of all other guests together.

#[cfg(test)]
mod fake_tree;
mod guests;
mod kdamonds;

use std::path::Path;

use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

pub use guests::{GuestMonitor, Watch};
pub use kdamonds::DamonError;
use kdamonds::{Kdamonds, Kind, OwnKdamonds, Region, Setup, Target};

use crate::host::Host;
use crate::region::RamRange;
use crate::sensors::access_sample::{AccessCost, AccessSample, AccessSampler, Seen};

/// Times of the monitor of this process's RAM. Ten looks detect a busy window, and 400 regions are 20 000 looks a
/// second.
const KIND: Kind = Kind { sample_us: 20_000, aggregation_us: 200_000, is_external: false };
/// Kinds of kdamonds that a killed wideleaf process may have left behind.
const KINDS: [Kind; 2] = [KIND, guests::KIND];
/// Minimum number of regions: one for each window where the guest has few windows.
const REGIONS_LEAST: std::ops::RangeInclusive<u64> = 10..=100;
/// Maximum number of regions for each of the minimum. The kernel splits regions while there are at most half the
/// maximum, and merges two similar neighbours of together at most RAM divided by the minimum. With a factor
/// below four there may be more than half the maximum without two that are small enough: a large region would then
/// stay for good, whatever is busy in it.
const REGIONS_MOST_FOR_EACH_LEAST: u64 = 4;
/// Minimum part of a window in regions with accesses, in bytes: a region that only reaches into a window says
/// nothing of it.
const COVERED_LEAST: Bytes = kib(512);

/// Whether the monitor seems available, without taking it.
///
/// # Errors
/// [`DamonError`] with its reason.
pub fn probe(root: &Path) -> Result<String, DamonError> {
    Kdamonds::at(root).check_free(&KINDS)?;
    Ok("DAMON is present and not in use; what it can monitor shows when it is set up".into())
}

/// Gives back the monitor that a killed wideleaf process left behind, if there is one. Says whether there was.
///
/// # Errors
/// [`DamonError`]: DAMON is not available, or another program uses it.
pub fn give_back_left_behind(root: &Path) -> Result<bool, DamonError> {
    let is_left_behind = Kdamonds::at(root).check_free(&KINDS)?;
    if is_left_behind {
        drop(Kdamonds::claim(root, &KINDS)?);
    }
    Ok(is_left_behind)
}

/// Reads the monitor for one VM. Dropping it gives the monitor back.
#[derive(Debug)]
pub struct DamonSensor {
    kdamonds: OwnKdamonds,
    ranges: Vec<RamRange>,
    asked: Vec<WindowIndex>,
}

impl DamonSensor {
    /// Starts the monitor for this process's guest RAM. `root` contains `sys/`. It takes some seconds until the
    /// regions are as small as windows.
    ///
    /// # Errors
    /// [`DamonError`]; settings of another program are left alone.
    pub fn start(root: &Path, ranges: &[RamRange]) -> Result<DamonSensor, DamonError> {
        let kdamonds = Kdamonds::claim(root, &KINDS)?;
        kdamonds.monitor(&setup(ranges))?;
        Ok(DamonSensor { kdamonds, ranges: ranges.to_vec(), asked: Vec::new() })
    }

    fn start_of(&self, window: WindowIndex) -> Option<Hva> {
        let range = self.ranges.iter().find(|range| range.gpa.contains(window.start()))?;
        Some(range.hva + (window.start() - range.gpa.start()))
    }

    /// Number of windows in the widest region that reaches into the window: each of them has the result of one page.
    fn shared_by(&self, regions: &Result<Vec<Region>, DamonError>, window: WindowIndex) -> u64 {
        let (Ok(regions), Some(start)) = (regions, self.start_of(window)) else { return 1 };
        let end = start + PageSize::Huge2M.bytes();
        let reaching = regions.iter().filter(|region| region.start < end && start < region.end);
        reaching.map(windows_of).max().unwrap_or(1)
    }

    fn seen(&self, regions: &Result<Vec<Region>, DamonError>, window: WindowIndex) -> Seen {
        let (Ok(regions), Some(start)) = (regions, self.start_of(window)) else { return Seen::Unknown("refused") };
        let end = start + PageSize::Huge2M.bytes();
        let covered = |regions: &mut dyn Iterator<Item = &Region>| {
            let within = |region: &Region| (region.start.max(start), region.end.min(end));
            regions.map(within).filter(|(from, to)| from < to).map(|(from, to)| to - from).sum::<Bytes>()
        };
        if covered(&mut regions.iter()) == Bytes::ZERO {
            Seen::Unknown("not_monitored")
        } else if covered(&mut regions.iter().filter(|region| region.accesses > 0)) >= COVERED_LEAST {
            Seen::Touched
        } else {
            Seen::Untouched
        }
    }
}

/// Number of windows that such a region covers, at least in part.
fn windows_of(region: &Region) -> u64 {
    (region.end - region.start).get().div_ceil(PageSize::Huge2M.bytes().get())
}

impl AccessSampler for DamonSensor {
    fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
        self.asked = windows.to_vec();
    }

    fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let regions = self.kdamonds.regions();
        if let Err(error) = &regions {
            tracing::warn!("DAMON: {error}");
        }
        let asked = std::mem::take(&mut self.asked);
        let shared = asked.iter().map(|window| (*window, self.shared_by(&regions, *window)));
        let shared_by = shared.filter(|(_, windows)| *windows > 1).collect();
        let rows: Vec<_> = asked.into_iter().map(|window| (window, self.seen(&regions, window))).collect();
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        let cost = AccessCost { windows: rows.len() as u64, events: 0, cpu };
        AccessSample { rows, shared_by, cost, ..AccessSample::default() }
    }
}

/// What the monitor is told for these ranges of this process.
fn setup(ranges: &[RamRange]) -> Setup {
    let windows = ranges.iter().map(|range| range.gpa.windows().len() as u64).sum::<u64>();
    let least = windows.clamp(*REGIONS_LEAST.start(), *REGIONS_LEAST.end());
    let regions = ranges.iter().map(|range| (range.hva, range.hva + range.gpa.bytes())).collect();
    let targets = vec![Target { pid: std::process::id(), regions }];
    Setup { kind: KIND, regions: (least, least * REGIONS_MOST_FOR_EACH_LEAST), targets }
}

#[cfg(test)]
mod tests {
    use super::fake_tree::{BASE, said, say, tree};
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use std::collections::BTreeMap;
    use std::fs;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    /// The state after a wideleaf process was killed: the number of kdamonds is still 1, and that one is off.
    fn left_behind() -> tempfile::TempDir {
        let root = tree("0\n", "vaddr\nfvaddr\n", &[]);
        drop(DamonSensor::start(root.path(), &ranges()).expect("it is free"));
        say(&root, "nr_kdamonds", "1\n");
        say(&root, "0/contexts/0/targets/0/pid_target", "4711\n");
        root
    }

    /// Four windows of RAM.
    fn ranges() -> [RamRange; 1] {
        [RamRange { gpa: GpaRange::new(Gpa::new(0), mib(8)).expect("fits"), hva: Hva::new(BASE) }]
    }

    fn sampled(root: &tempfile::TempDir) -> Vec<Seen> {
        let mut sensor = DamonSensor::start(root.path(), &ranges()).expect("the files are there");
        let host = FakeHost::default();
        sensor.start(&host, &[0, 1, 2, 3].map(WindowIndex::new));
        sensor.finish(&host).rows.into_iter().map(|(_, seen)| seen).collect()
    }

    #[test]
    fn windows_are_touched_where_regions_with_accesses_cover_a_quarter_of_them() {
        //  MiB      0    2    4    6    8
        //  windows  [ 0  ][ 1  ][ 2  ][ 3  ]
        //  regions  [  5    )[ 0 )[ 0 )      the first reaches a quarter of a MiB, none is in the last
        let root = tree("0\n", "vaddr\nfvaddr\npaddr\n", &[(0, 2, "5\n"), (2, 3, "0\n"), (5, 1, "0\n")]);
        assert_eq!(sampled(&root), [Seen::Touched, Seen::Untouched, Seen::Untouched, Seen::Unknown("not_monitored")]);
        let root = tree("0\n", "fvaddr\n", &[(0, 3, "1\n"), (3, 5, "0\n")]);
        assert_eq!(sampled(&root), [Seen::Touched, Seen::Touched, Seen::Untouched, Seen::Untouched]);
    }

    #[test]
    fn a_sample_tells_how_many_windows_share_a_region() {
        let root = tree("0\n", "vaddr\nfvaddr\n", &[(0, 5, "0\n"), (5, 1, "3\n"), (6, 2, "1\n")]);
        let mut sensor = DamonSensor::start(root.path(), &ranges()).expect("the files are there");
        sensor.start(&FakeHost::default(), &[0, 1, 2, 3].map(WindowIndex::new));
        let shared_by = sensor.finish(&FakeHost::default()).shared_by;
        // The first region reaches into the third window.
        assert_eq!(shared_by, BTreeMap::from([0, 1, 2].map(|window| (WindowIndex::new(window), 3))));
    }

    #[test]
    fn the_monitor_is_given_back_when_the_sensor_goes() {
        let root = tree("0\n", "vaddr\nfvaddr\n", &[]);
        let sensor = DamonSensor::start(root.path(), &ranges()).expect("the files are there");
        assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("1".into(), "on".into()));
        assert_eq!(said(&root, "0/contexts/0/operations"), "fvaddr");
        assert_eq!(said(&root, "0/contexts/0/targets/0/pid_target"), std::process::id().to_string());
        assert_eq!(said(&root, "0/contexts/0/targets/0/regions/0/start"), BASE.to_string());
        assert_eq!(said(&root, "0/contexts/0/targets/0/regions/0/end"), (BASE + (8 << 20)).to_string());
        assert_eq!(said(&root, "0/contexts/0/monitoring_attrs/nr_regions/min"), "10");
        assert_eq!(said(&root, "0/contexts/0/monitoring_attrs/nr_regions/max"), "40");
        drop(sensor);
        assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("0".into(), "off".into()));
    }

    #[test]
    fn settings_of_another_program_are_left_alone() {
        let root = tree("2\n", "fvaddr\n", &[]);
        let refused = DamonSensor::start(root.path(), &ranges()).expect_err("it is in use");
        assert!(matches!(refused, DamonError::InUse { kdamonds: 2, .. }), "{refused}");
        assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("2\n".into(), "0\n".into()));
    }

    #[test]
    fn a_monitor_left_by_a_killed_process_is_taken_over_and_given_back() {
        let root = left_behind();
        assert!(probe(root.path()).is_ok());
        let sensor = DamonSensor::start(root.path(), &ranges()).expect("its process is gone");
        assert_eq!(said(&root, "0/contexts/0/targets/0/pid_target"), std::process::id().to_string());
        assert_eq!(said(&root, "0/state"), "on");
        drop(sensor);
        assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("0".into(), "off".into()));
    }

    #[test]
    fn a_monitor_with_any_other_setting_is_left_alone() {
        for (file, text) in [
            ("nr_kdamonds", "2\n"),
            ("0/state", "on\n"),
            ("0/contexts/nr_contexts", "2\n"),
            ("0/contexts/0/operations", "paddr\n"),
            ("0/contexts/0/monitoring_attrs/intervals/sample_us", "5000\n"),
            ("0/contexts/0/monitoring_attrs/intervals/aggr_us", "100000\n"),
            ("0/contexts/0/schemes/nr_schemes", "2\n"),
            ("0/contexts/0/schemes/0/action", "pageout\n"),
            ("0/contexts/0/targets/nr_targets", "2\n"),
            ("0/contexts/0/targets/0/pid_target", "0\n"),
            ("0/contexts/0/targets/0/pid_target", "init\n"),
        ] {
            let root = left_behind();
            say(&root, file, text);
            let refused = DamonSensor::start(root.path(), &ranges()).expect_err("another program's");
            assert!(matches!(refused, DamonError::InUse { .. }), "{file}: {refused}");
            assert!(probe(root.path()).is_err(), "{file}");
            assert_eq!(said(&root, file), text, "nothing was written");
            assert_ne!(said(&root, "0/contexts/0/targets/0/pid_target"), std::process::id().to_string());
        }
    }

    #[test]
    fn a_monitor_of_a_live_process_is_left_alone() {
        let root = left_behind();
        fs::create_dir_all(root.path().join("proc/4711")).expect("a folder");
        assert!(matches!(DamonSensor::start(root.path(), &ranges()), Err(DamonError::InUse { kdamonds: 1, .. })));
        assert_eq!(said(&root, "0/contexts/0/targets/0/pid_target"), "4711\n");
    }

    #[test]
    fn a_monitor_of_physical_addresses_is_refused_and_given_back() {
        let root = tree("0\n", "paddr\n", &[]);
        let refused = DamonSensor::start(root.path(), &ranges()).expect_err("no process");
        assert!(matches!(&refused, DamonError::NoProcessAddresses(known) if known == "paddr"), "{refused}");
        assert_eq!(said(&root, "nr_kdamonds"), "0");
    }

    #[test]
    fn a_missing_monitor_and_malformed_files_are_different_errors() {
        let nothing = tempfile::tempdir().expect("a temporary folder");
        assert!(matches!(DamonSensor::start(nothing.path(), &ranges()), Err(DamonError::File { .. })));
        let root = tree("many\n", "fvaddr\n", &[]);
        assert!(matches!(DamonSensor::start(root.path(), &ranges()), Err(DamonError::NotANumber { .. })));
        let root = tree("0\n", "fvaddr\n", &[(0, 8, "often\n")]);
        assert_eq!(sampled(&root), [Seen::Unknown("refused"); 4]);
    }
}
