//! Detects which windows were touched lately, through the kernel's own monitor (DAMON,
//! Documentation/admin-guide/mm/damon/usage.rst). It reads the accessed bit of one page in each of some hundred
//! regions, many times a second. It works for any RAM and makes no thread wait, but it is a sample: if a guest uses
//! few base pages of a window, it may read others. Used if there is no userfaultfd, which misses nothing.
//!
//! ```text
//!   admin/kdamonds/nr_kdamonds    0 ──▶ 1 ... 0            not 0: another program's, left alone; but see below
//!     0/contexts/0/targets/0      this process, its guest RAM (operations "fvaddr")
//!     0/contexts/0/schemes/0      action "stat", every region: what the scheme tried is what the monitor saw
//!     0/state                     on ... update_schemes_tried_regions at each finish ... off
//! ```
//!
//! A killed wideleaf process leaves its kdamond behind, switched off since its target is gone. It is recognised by
//! that and by all the settings of this file, and taken over. A kdamond that runs, monitors physical addresses, or
//! belongs to a live process is never touched.
//!
//! The kernel thread bears the cost, which is not in the report: at most 20 000 accessed bits a second.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use crate::host::Host;
use crate::region::RamRange;
use crate::sensors::access_sample::{AccessCost, AccessSample, AccessSampler, Seen};

/// Time between two reads of a region, and between two counts of their results, in microseconds. Ten reads detect a
/// busy window, and 400 regions are 20 000 reads a second.
const SAMPLE_US: u64 = 20_000;
const AGGREGATION_US: u64 = 200_000;
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
/// Maximum number of regions read: more than the monitor is allowed to make.
const REGIONS_READ_MAX: usize = 1024;

/// Why the kernel's monitor is not available.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// The kernel was built without it, or this process may not use it.
    #[error("cannot use {path}: {source}; DAMON needs CONFIG_DAMON_SYSFS and root")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file does not hold a number.
    #[error("cannot use {path}: {text:?} is not a number")]
    NotANumber {
        /// Path of the file.
        path: PathBuf,
        /// Contents of the file.
        text: String,
    },
    /// DAMON has one user at a time.
    #[error("cannot use DAMON: another program has {0} DAMON threads (kdamonds); their settings are left alone")]
    InUse(u64),
    /// DAMON here cannot monitor the addresses of a process.
    #[error("cannot use DAMON: it monitors {0:?} here, not the addresses of a process, which need CONFIG_DAMON_VADDR")]
    NoProcessAddresses(String),
}

/// Whether the monitor seems available, without taking it.
///
/// # Errors
/// [`DamonError`] with its reason.
pub fn probe(root: &Path) -> Result<String, DamonError> {
    Kdamonds { directory: root.join(KDAMONDS) }.check_free(root)?;
    Ok("DAMON is present and not in use; what it can monitor shows when it is set up".into())
}

/// Directory of the kdamonds, below the root.
const KDAMONDS: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// Kind of monitoring: fixed ranges of a process.
const OPERATIONS: &str = "fvaddr";
/// Action of its scheme: none but reporting where it applies.
const ACTION: &str = "stat";

/// A range that the monitor treated as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    start: Hva,
    end: Hva,
    accesses: u64,
}

/// Directory of the kdamonds.
#[derive(Debug)]
struct Kdamonds {
    directory: PathBuf,
}

/// The kdamonds while wideleaf owns them, until they are dropped.
#[derive(Debug)]
struct OwnKdamonds(Kdamonds);

impl Kdamonds {
    /// Whether no program has a kdamond, except for a wideleaf process that is gone.
    fn check_free(&self, root: &Path) -> Result<(), DamonError> {
        match read_number(&self.directory.join("nr_kdamonds"))? {
            0 => Ok(()),
            1 if self.is_left_behind(root).unwrap_or(false) => Ok(()),
            others => Err(DamonError::InUse(others)),
        }
    }

    /// Whether the only kdamond is off, has the settings of [`Kdamonds::monitor`], and belongs to a process that is
    /// gone. Another process may have the id by now: then it is not taken over until that has ended as well.
    fn is_left_behind(&self, root: &Path) -> Result<bool, DamonError> {
        let is_ours = self.says("state", "off")?
            && self.says("contexts/nr_contexts", 1)?
            && self.says("contexts/0/operations", OPERATIONS)?
            && self.says("contexts/0/monitoring_attrs/intervals/sample_us", SAMPLE_US)?
            && self.says("contexts/0/monitoring_attrs/intervals/aggr_us", AGGREGATION_US)?
            && self.says("contexts/0/schemes/nr_schemes", 1)?
            && self.says("contexts/0/schemes/0/action", ACTION)?
            && self.says("contexts/0/targets/nr_targets", 1)?;
        let process = read_number(&self.directory.join("0/contexts/0/targets/0/pid_target"))?;
        Ok(is_ours && process > 0 && !root.join("proc").join(process.to_string()).exists())
    }

    fn says(&self, file: &str, value: impl fmt::Display) -> Result<bool, DamonError> {
        Ok(read(&self.directory.join("0").join(file))?.trim() == value.to_string())
    }

    /// Makes a kdamond. The kernel removes an existing one if it is off, and refuses if it runs.
    fn claim(root: &Path) -> Result<OwnKdamonds, DamonError> {
        let kdamonds = Kdamonds { directory: root.join(KDAMONDS) };
        kdamonds.check_free(root)?;
        write(&kdamonds.directory.join("nr_kdamonds"), 1)?;
        Ok(OwnKdamonds(kdamonds))
    }

    fn set(&self, file: &str, value: impl fmt::Display) -> Result<(), DamonError> {
        write(&self.directory.join("0").join(file), value)
    }

    /// Monitors these ranges of this process from now on.
    fn monitor(&self, ranges: &[RamRange]) -> Result<(), DamonError> {
        self.set("contexts/nr_contexts", 1)?;
        let operations = read(&self.directory.join("0/contexts/0/avail_operations"))?;
        if !operations.split_whitespace().any(|name| name == OPERATIONS) {
            return Err(DamonError::NoProcessAddresses(operations.trim().to_owned()));
        }
        self.set("contexts/0/operations", OPERATIONS)?;
        self.set("contexts/0/monitoring_attrs/intervals/sample_us", SAMPLE_US)?;
        self.set("contexts/0/monitoring_attrs/intervals/aggr_us", AGGREGATION_US)?;
        let windows = ranges.iter().map(|range| range.gpa.windows().len() as u64).sum::<u64>();
        let least = windows.clamp(*REGIONS_LEAST.start(), *REGIONS_LEAST.end());
        self.set("contexts/0/monitoring_attrs/nr_regions/max", least * REGIONS_MOST_FOR_EACH_LEAST)?;
        self.set("contexts/0/monitoring_attrs/nr_regions/min", least)?;
        self.set("contexts/0/targets/nr_targets", 1)?;
        self.set("contexts/0/targets/0/pid_target", std::process::id())?;
        self.set("contexts/0/targets/0/regions/nr_regions", ranges.len())?;
        for (number, range) in ranges.iter().enumerate() {
            let region = format!("contexts/0/targets/0/regions/{number}");
            self.set(&format!("{region}/start"), range.hva.get())?;
            self.set(&format!("{region}/end"), (range.hva + range.gpa.bytes()).get())?;
        }
        self.set("contexts/0/schemes/nr_schemes", 1)?;
        self.set("contexts/0/schemes/0/action", ACTION)?;
        for (of, most) in [("sz", i64::MAX), ("nr_accesses", u32::MAX.into()), ("age", u32::MAX.into())] {
            self.set(&format!("contexts/0/schemes/0/access_pattern/{of}/min"), 0)?;
            self.set(&format!("contexts/0/schemes/0/access_pattern/{of}/max"), most)?;
        }
        self.set("state", "on")
    }

    /// Regions of the monitor's latest aggregation. Waits for the end of one.
    fn regions(&self) -> Result<Vec<Region>, DamonError> {
        self.set("state", "update_schemes_tried_regions")?;
        let directory = self.directory.join("0/contexts/0/schemes/0/tried_regions");
        let entries = fs::read_dir(&directory).map_err(file_error(&directory))?;
        let numbered = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().parse::<u64>().is_ok();
        let entries = entries.filter_map(Result::ok).filter(numbered).take(REGIONS_READ_MAX);
        entries.map(|entry| region(&entry.path())).collect()
    }
}

impl Drop for OwnKdamonds {
    fn drop(&mut self) {
        let OwnKdamonds(kdamonds) = self;
        // A kdamond that never ran refuses to be switched off; it only has to be removed.
        let _ = kdamonds.set("state", "off");
        if let Err(error) = write(&kdamonds.directory.join("nr_kdamonds"), 0) {
            tracing::warn!("cannot give DAMON back: {error}");
        }
    }
}

fn region(directory: &Path) -> Result<Region, DamonError> {
    let number = |file: &str| read_number(&directory.join(file));
    Ok(Region { start: Hva::new(number("start")?), end: Hva::new(number("end")?), accesses: number("nr_accesses")? })
}

fn read(path: &Path) -> Result<String, DamonError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn read_number(path: &Path) -> Result<u64, DamonError> {
    let text = read(path)?;
    text.trim().parse().map_err(|_| DamonError::NotANumber { path: path.to_owned(), text })
}

fn write(path: &Path, value: impl fmt::Display) -> Result<(), DamonError> {
    // Not `fs::write`, which would create a missing file.
    let file = fs::OpenOptions::new().write(true).truncate(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, value.to_string().as_bytes())).map_err(file_error(path))
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> DamonError {
    let path = path.to_owned();
    move |source| DamonError::File { path: path.clone(), source }
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
        let kdamonds = Kdamonds::claim(root)?;
        kdamonds.0.monitor(ranges)?;
        Ok(DamonSensor { kdamonds, ranges: ranges.to_vec(), asked: Vec::new() })
    }

    fn start_of(&self, window: WindowIndex) -> Option<Hva> {
        let range = self.ranges.iter().find(|range| range.gpa.contains(window.start()))?;
        Some(range.hva + (window.start() - range.gpa.start()))
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

impl AccessSampler for DamonSensor {
    fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
        self.asked = windows.to_vec();
    }

    fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let regions = self.kdamonds.0.regions();
        if let Err(error) = &regions {
            tracing::warn!("DAMON: {error}");
        }
        let asked = std::mem::take(&mut self.asked);
        let rows: Vec<_> = asked.into_iter().map(|window| (window, self.seen(&regions, window))).collect();
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        let cost = AccessCost { windows: rows.len() as u64, events: 0, cpu };
        AccessSample { rows, watched_for: BTreeMap::new(), cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    const BASE: u64 = 1 << 40;

    /// The files of one kdamond as the kernel makes them, with these regions in the scheme.
    fn tree(nr_kdamonds: &str, operations: &str, regions: &[(u64, u64, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        let put = |file: &str, text: &str| {
            let path = root.path().join(KDAMONDS).join(file);
            fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        put("nr_kdamonds", nr_kdamonds);
        put("0/contexts/0/avail_operations", operations);
        for file in [
            "0/state",
            "0/contexts/nr_contexts",
            "0/contexts/0/operations",
            "0/contexts/0/monitoring_attrs/intervals/sample_us",
            "0/contexts/0/monitoring_attrs/intervals/aggr_us",
            "0/contexts/0/monitoring_attrs/nr_regions/min",
            "0/contexts/0/monitoring_attrs/nr_regions/max",
            "0/contexts/0/targets/nr_targets",
            "0/contexts/0/targets/0/pid_target",
            "0/contexts/0/targets/0/regions/nr_regions",
            "0/contexts/0/targets/0/regions/0/start",
            "0/contexts/0/targets/0/regions/0/end",
            "0/contexts/0/schemes/nr_schemes",
            "0/contexts/0/schemes/0/action",
            "0/contexts/0/schemes/0/tried_regions/total_bytes",
        ] {
            put(file, "0\n");
        }
        for of in ["sz", "nr_accesses", "age"] {
            put(&format!("0/contexts/0/schemes/0/access_pattern/{of}/min"), "0\n");
            put(&format!("0/contexts/0/schemes/0/access_pattern/{of}/max"), "0\n");
        }
        for (number, (start, bytes, accesses)) in regions.iter().enumerate() {
            let region = format!("0/contexts/0/schemes/0/tried_regions/{number}");
            put(&format!("{region}/start"), &format!("{}\n", BASE + (start << 20)));
            put(&format!("{region}/end"), &format!("{}\n", BASE + ((start + bytes) << 20)));
            put(&format!("{region}/nr_accesses"), accesses);
        }
        root
    }

    /// The state after a wideleaf process was killed: the number of kdamonds is still 1, and that one is off.
    fn left_behind() -> tempfile::TempDir {
        let root = tree("0\n", "vaddr\nfvaddr\n", &[]);
        drop(DamonSensor::start(root.path(), &ranges()).expect("it is free"));
        say(&root, "nr_kdamonds", "1\n");
        say(&root, "0/contexts/0/targets/0/pid_target", "4711\n");
        root
    }

    fn say(root: &tempfile::TempDir, file: &str, text: &str) {
        fs::write(root.path().join(KDAMONDS).join(file), text).expect("the file is there");
    }

    fn said(root: &tempfile::TempDir, file: &str) -> String {
        fs::read_to_string(root.path().join(KDAMONDS).join(file)).expect("a file")
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
        assert!(matches!(refused, DamonError::InUse(2)), "{refused}");
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
            assert!(matches!(refused, DamonError::InUse(_)), "{file}: {refused}");
            assert!(probe(root.path()).is_err(), "{file}");
            assert_eq!(said(&root, file), text, "nothing was written");
            assert_ne!(said(&root, "0/contexts/0/targets/0/pid_target"), std::process::id().to_string());
        }
    }

    #[test]
    fn a_monitor_of_a_live_process_is_left_alone() {
        let root = left_behind();
        fs::create_dir_all(root.path().join("proc/4711")).expect("a folder");
        assert!(matches!(DamonSensor::start(root.path(), &ranges()), Err(DamonError::InUse(1))));
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
