//! The kernel's DAMON threads (kdamonds) in sysfs: claimed, set up, read, given back.
//!
//! ```text
//!   admin/kdamonds/nr_kdamonds    0 ──▶ 1 ... 0            not 0: another program's, left alone; but see below
//!     0/contexts/0/targets/N      a process and its ranges (operations "fvaddr")
//!     0/contexts/0/schemes/0      action "stat", every region: what the scheme tried is what the monitor saw
//!     0/state                     on ... update_schemes_tried_regions at each reading ... off
//! ```
//!
//! Target 0 always has the *owner*: the wideleaf process that set the kdamond up. A killed wideleaf process leaves its
//! kdamond behind: off if it monitored itself, on for as long as its guests run. The kdamond is recognised by all the
//! settings of this file and by an owner that is gone, and taken over. Any other kdamond is never touched.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use wideleaf_policies::Hva;

use crate::deadline::ProcessKey;

/// Directory of the kdamonds, below the root.
pub(super) const KDAMONDS: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// File of their number.
const NUMBER_FILE: &str = "nr_kdamonds";
/// Kind of monitoring: fixed ranges of a process.
const OPERATIONS: &str = "fvaddr";
/// Action of its scheme: none but reporting where it applies.
const ACTION: &str = "stat";
/// Files of the intervals, and of the oldest region that the scheme takes.
const SAMPLE_FILE: &str = "contexts/0/monitoring_attrs/intervals/sample_us";
const AGGREGATION_FILE: &str = "contexts/0/monitoring_attrs/intervals/aggr_us";
const AGE_FILE: &str = "contexts/0/schemes/0/access_pattern/age/max";
/// Maximum number of regions read: more than the monitor is allowed to make.
const REGIONS_READ_MAX: usize = 2048;
/// Modules of the kernel that run DAMON alone, each with a parameter `enabled`.
const MODULES: [&str; 3] = ["damon_reclaim", "damon_lru_sort", "damon_stat"];

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
    /// DAMON's files have one user at a time.
    #[error("cannot use DAMON: {by} has {kdamonds} DAMON threads (kdamonds); their settings are left alone")]
    InUse {
        /// Number of threads.
        kdamonds: u64,
        /// Their owner, as far as it is known.
        by: String,
    },
    /// A module of the kernel runs DAMON alone.
    #[error(
        "cannot use DAMON: the kernel's own {0} runs it; if you can do without that, write N to \
         /sys/module/{0}/parameters/enabled"
    )]
    Module(&'static str),
    /// DAMON here cannot monitor the addresses of a process.
    #[error("cannot use DAMON: it monitors {0:?} here, not the addresses of a process, which need CONFIG_DAMON_VADDR")]
    NoProcessAddresses(String),
    /// The monitor's results are not about what it was told to monitor.
    #[error("cannot use DAMON: its results are of {found} ranges of processes instead of {expected}")]
    OtherTargets {
        /// Number of parts in its results.
        found: usize,
        /// Number of parts that it was told to monitor.
        expected: usize,
    },
}

impl DamonError {
    /// Whether another attempt is useless on this kernel and with this process's privileges. The file of the number of
    /// kdamonds is there wherever the kernel has DAMON, and the others come and go with the kdamonds.
    pub(super) fn is_final(&self) -> bool {
        match self {
            DamonError::NoProcessAddresses(_) => true,
            DamonError::File { path, source } => match source.kind() {
                io::ErrorKind::NotFound => path.ends_with(NUMBER_FILE),
                kind => kind == io::ErrorKind::PermissionDenied,
            },
            _ => false,
        }
    }
}

/// A range that the monitor treated as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub start: Hva,
    pub end: Hva,
    /// Number of samples of the latest aggregation that saw an access.
    pub accesses: u64,
}

/// Times and marks that say which part of wideleaf a kdamond belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Time between two looks at a region, in microseconds.
    pub sample_us: u64,
    /// Time after which their results are counted, in microseconds.
    pub aggregation_us: u64,
    /// Whether other processes are monitored. A kdamond of other processes stays on when its owner is killed.
    pub is_external: bool,
}

/// One process and its ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub pid: u32,
    pub regions: Vec<(Hva, Hva)>,
}

/// Everything that a kdamond is told.
pub(super) struct Setup {
    pub kind: Kind,
    /// Minimum and maximum number of regions, of all targets together.
    pub regions: (u64, u64),
    /// The owner's first.
    pub targets: Vec<Target>,
}

/// Directory of the kdamonds.
#[derive(Debug)]
pub(super) struct Kdamonds {
    root: PathBuf,
    directory: PathBuf,
}

/// The kdamonds while wideleaf owns them, until they are dropped.
#[derive(Debug)]
pub(super) struct OwnKdamonds {
    kdamonds: Kdamonds,
    /// Keeps other wideleaf processes away while the settings are incomplete.
    _lock: Flock<File>,
}

/// The oldest region that the scheme takes, in aggregations: older than any, and it says when the owner started, since
/// its process id may be used again.
fn age_max(kind: Kind, owner: ProcessKey) -> u32 {
    const OLDER_THAN_ANY: u32 = 1 << 31;
    let started_at = owner.started_at as u32 % OLDER_THAN_ANY;
    if kind.is_external { OLDER_THAN_ANY + started_at } else { u32::MAX }
}

impl Kdamonds {
    pub(super) fn at(root: &Path) -> Kdamonds {
        Kdamonds { root: root.to_owned(), directory: root.join(KDAMONDS) }
    }

    /// Whether no program has a kdamond, except for a wideleaf process that is gone. Says so if one was left behind.
    pub(super) fn check_free(&self, kinds: &[Kind]) -> Result<bool, DamonError> {
        match read_number(&self.directory.join(NUMBER_FILE))? {
            0 => Ok(false),
            1 if kinds.iter().any(|kind| self.is_left_behind(*kind).unwrap_or(false)) => Ok(true),
            kdamonds => Err(self.in_use(kdamonds, kinds)),
        }
    }

    /// Whether the only kdamond has the settings of this kind.
    fn is_of(&self, kind: Kind) -> Result<bool, DamonError> {
        Ok(self.says("contexts/nr_contexts", 1)?
            && self.says("contexts/0/operations", OPERATIONS)?
            && self.says(SAMPLE_FILE, kind.sample_us)?
            && self.says(AGGREGATION_FILE, kind.aggregation_us)?
            && self.says("contexts/0/schemes/nr_schemes", 1)?
            && self.says("contexts/0/schemes/0/action", ACTION)?
            && (kind.is_external || self.says("contexts/0/targets/nr_targets", 1)?))
    }

    /// Whether the only kdamond is of this kind, and its owner is gone. If another process has the owner's id by now,
    /// the kdamond of a process that monitored itself is not taken over until that has ended as well.
    fn is_left_behind(&self, kind: Kind) -> Result<bool, DamonError> {
        let owner = self.first_process()?;
        if !self.is_of(kind)? || owner == 0 {
            return Ok(false);
        }
        let proc = self.root.join("proc");
        if kind.is_external {
            let now = ProcessKey::of(&proc, owner);
            let is_another = || Ok::<_, DamonError>(now.started_at > 0 && !self.says(AGE_FILE, age_max(kind, now))?);
            return Ok(!proc.join(owner.to_string()).exists() || is_another()?);
        }
        Ok(self.says("state", "off")? && !proc.join(owner.to_string()).exists())
    }

    /// Id of the process of the first target.
    fn first_process(&self) -> Result<u32, DamonError> {
        read_number(&self.directory.join("0/contexts/0/targets/0/pid_target"))
            .map(|pid| u32::try_from(pid).unwrap_or(0))
    }

    /// The error for this number of kdamonds, with the owner of the first in words.
    fn in_use(&self, kdamonds: u64, kinds: &[Kind]) -> DamonError {
        let is_ours = kdamonds == 1 && kinds.iter().any(|kind| self.is_of(*kind).unwrap_or(false));
        let operations = read(&self.directory.join("0/contexts/0/operations")).unwrap_or_default();
        let by = match self.first_process() {
            Ok(pid) if is_ours => {
                let name = fs::read_to_string(self.root.join(format!("proc/{pid}/comm"))).unwrap_or_default();
                format!("{} (process {pid})", if name.is_empty() { "a wideleaf process" } else { name.trim() })
            }
            _ if operations.trim().is_empty() => "another program".to_owned(),
            _ => format!("another program (with operations {})", operations.trim()),
        };
        DamonError::InUse { kdamonds, by }
    }

    fn says(&self, file: &str, value: impl fmt::Display) -> Result<bool, DamonError> {
        Ok(read(&self.directory.join("0").join(file))?.trim() == value.to_string())
    }

    fn set(&self, file: &str, value: impl fmt::Display) -> Result<(), DamonError> {
        write(&self.directory.join("0").join(file), value)
    }

    /// Makes a kdamond. The kernel removes an existing one if it is off, and refuses if it runs.
    pub(super) fn claim(root: &Path, kinds: &[Kind]) -> Result<OwnKdamonds, DamonError> {
        let kdamonds = Kdamonds::at(root);
        let number = kdamonds.directory.join(NUMBER_FILE);
        let file = File::open(&number).map_err(file_error(&number))?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EAGAIN)) => {
                return Err(kdamonds.in_use(read_number(&number)?, kinds));
            }
            Err((_, errno)) => return Err(file_error(&number)(errno.into())),
        };
        if kdamonds.check_free(kinds)? {
            // One that is off already refuses; then there is nothing to do.
            let _ = kdamonds.set("state", "off");
        }
        write(&number, 1)?;
        Ok(OwnKdamonds { kdamonds, _lock: lock })
    }
}

impl OwnKdamonds {
    /// Monitors from now on what `setup` says, and nothing else.
    pub(super) fn monitor(&self, setup: &Setup) -> Result<(), DamonError> {
        let kdamonds = &self.kdamonds;
        // One that never ran, or has ended with its processes, refuses.
        let _ = kdamonds.set("state", "off");
        self.check_operations()?;
        kdamonds.set("contexts/0/operations", OPERATIONS)?;
        kdamonds.set(SAMPLE_FILE, setup.kind.sample_us)?;
        kdamonds.set(AGGREGATION_FILE, setup.kind.aggregation_us)?;
        kdamonds.set("contexts/0/monitoring_attrs/nr_regions/max", setup.regions.1)?;
        kdamonds.set("contexts/0/monitoring_attrs/nr_regions/min", setup.regions.0)?;
        self.set_targets(&setup.targets)?;
        self.set_scheme(setup.kind)?;
        kdamonds.set("state", "on").map_err(|error| self.named(error))
    }

    /// Makes a context anew, and checks that it can monitor the addresses of a process.
    fn check_operations(&self) -> Result<(), DamonError> {
        let kdamonds = &self.kdamonds;
        kdamonds.set("contexts/nr_contexts", 1)?;
        let operations = read(&kdamonds.directory.join("0/contexts/0/avail_operations"))?;
        let is_there = operations.split_whitespace().any(|name| name == OPERATIONS);
        if is_there { Ok(()) } else { Err(DamonError::NoProcessAddresses(operations.trim().to_owned())) }
    }

    fn set_targets(&self, targets: &[Target]) -> Result<(), DamonError> {
        let kdamonds = &self.kdamonds;
        kdamonds.set("contexts/0/targets/nr_targets", targets.len())?;
        for (number, Target { pid, regions }) in targets.iter().enumerate() {
            let target = format!("contexts/0/targets/{number}");
            kdamonds.set(&format!("{target}/pid_target"), pid)?;
            kdamonds.set(&format!("{target}/regions/nr_regions"), regions.len())?;
            for (number, (start, end)) in regions.iter().enumerate() {
                kdamonds.set(&format!("{target}/regions/{number}/start"), start.get())?;
                kdamonds.set(&format!("{target}/regions/{number}/end"), end.get())?;
            }
        }
        Ok(())
    }

    fn set_scheme(&self, kind: Kind) -> Result<(), DamonError> {
        let kdamonds = &self.kdamonds;
        kdamonds.set("contexts/0/schemes/nr_schemes", 1)?;
        kdamonds.set("contexts/0/schemes/0/action", ACTION)?;
        let age_max = age_max(kind, ProcessKey::of(&kdamonds.root.join("proc"), std::process::id()));
        for (of, most) in [("sz", i64::MAX), ("nr_accesses", u32::MAX.into()), ("age", age_max.into())] {
            kdamonds.set(&format!("contexts/0/schemes/0/access_pattern/{of}/min"), 0)?;
            kdamonds.set(&format!("contexts/0/schemes/0/access_pattern/{of}/max"), most)?;
        }
        if kind.is_external {
            // A reading then waits for a sample, not for an aggregation.
            kdamonds.set("contexts/0/schemes/0/apply_interval_us", kind.sample_us)?;
        }
        Ok(())
    }

    /// Names the module of the kernel that keeps DAMON from starting, if one does.
    pub(super) fn named(&self, error: DamonError) -> DamonError {
        let enabled = |module: &&&str| {
            let file = self.kdamonds.root.join(format!("sys/module/{module}/parameters/enabled"));
            fs::read_to_string(file).is_ok_and(|text| text.trim() == "Y")
        };
        let is_busy = matches!(&error, DamonError::File { source, .. } if source.raw_os_error() == Some(libc::EBUSY));
        MODULES.iter().filter(|_| is_busy).find(enabled).map_or(error, |module| DamonError::Module(module))
    }

    /// Regions of the monitor's latest aggregation, target by target. Waits until the monitor has passed over them.
    pub(super) fn regions(&self) -> Result<Vec<Region>, DamonError> {
        self.kdamonds.set("state", "update_schemes_tried_regions")?;
        let directory = self.kdamonds.directory.join("0/contexts/0/schemes/0/tried_regions");
        let entries = fs::read_dir(&directory).map_err(file_error(&directory))?;
        let number = |entry: fs::DirEntry| entry.file_name().to_string_lossy().parse::<u64>().ok();
        let entries = entries.filter_map(Result::ok).filter_map(number);
        let mut numbers: Vec<_> = entries.take(REGIONS_READ_MAX).collect();
        numbers.sort_unstable();
        numbers.into_iter().map(|number| region(&directory.join(number.to_string()))).collect()
    }
}

impl Drop for OwnKdamonds {
    fn drop(&mut self) {
        // A kdamond that never ran refuses to be switched off; it only has to be removed.
        let _ = self.kdamonds.set("state", "off");
        if let Err(error) = write(&self.kdamonds.directory.join(NUMBER_FILE), 0) {
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

pub(super) fn file_error(path: &Path) -> impl Fn(io::Error) -> DamonError {
    let path = path.to_owned();
    move |source| DamonError::File { path: path.clone(), source }
}
