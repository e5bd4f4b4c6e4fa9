//! Continues a saved VM: its files are opened before the sandbox, its RAM is filled or mapped while the guest already
//! runs.
//!
//! ```text
//!   Restoring::open ──▶ RAM mapped ──▶ the machine built from its state ──▶ sandbox entered
//!                                                                               │ Restoring::begin_filling
//!                                           report ◀── the guest runs ◀─────────┘
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::vm::RestoringView;
use wideleaf_memory::GuestRam;
use wideleaf_memory::restore::mapped::map_saved;
use wideleaf_memory::restore::{
    Background, GuestIsGone, OnFailure, ReadError, RestoreConfig, RestoreReport, Restorer, SavedRam, SavedWindow,
};
use wideleaf_policies::{Bytes, PageSize, PerTenThousand, PolicyChoice, WindowIndex};
use wideleaf_snapshot::Opened;
use wideleaf_vmm::MachineState;

use super::accesses::SavedAccesses;
use super::touches::{self, Recording};
use super::{SavedRun, page_cache, read};
use crate::failure::Failure;
use crate::report::RestoredReport;
use crate::session::SavedSession;
use crate::spec::{Prefetch, RestorePages, RestoreReads, RunSpec};

pub(crate) mod teardown;

/// A VM that is about to continue.
pub struct Restoring {
    folder: PathBuf,
    ram: Arc<StoredRam>,
    /// Windows that are filled first.
    first: Mutex<Vec<WindowIndex>>,
    recording: Option<Recording>,
    /// Speed of what is filled before the guest touches it.
    background: Background,
    pages: RestorePages,
    reads: RestoreReads,
    filling: Mutex<Filling>,
}

/// RAM on its way to its content.
#[derive(Default)]
enum Filling {
    /// It has not begun, or is over.
    #[default]
    Not,
    /// Threads fill it.
    Filled(Restorer),
    /// The kernel reads a page from the file when it is touched. What the snapshot has, in bytes; time to map it.
    Mapped { stored: Bytes, took: Duration },
}

/// Parts of a saved VM for the run that continues it.
pub struct Continued {
    /// State of vCPUs, chips and devices.
    pub machine: MachineState,
    /// What the guest has said.
    pub session: SavedSession,
    /// What the manager knew of the guest's accesses.
    pub(crate) accesses: SavedAccesses,
}

impl Restoring {
    /// Opens the snapshot that the run continues. `takeable`: memory of the host that its RAM can take; `None`: the RAM
    /// has its memory already.
    ///
    /// # Errors
    /// [`Failure::Input`] for a folder that is no snapshot, and for one of another VM than `spec` describes;
    /// [`Failure::Host`] where the host has too little memory for it.
    pub fn open(folder: &Path, spec: &RunSpec, takeable: Option<Bytes>) -> Result<(Restoring, Continued), Failure> {
        let (opened, reads) = page_cache::open(folder, spec)?;
        let saved = read(folder, &opened)?;
        check_same(folder, &saved.spec, spec)?;
        check_policy(folder, &spec.policy)?;
        check_pages(folder, &opened, spec)?;
        takeable.map_or(Ok(()), |takeable| check_memory(folder, opened.windows(), spec.restore_pages, takeable))?;
        let (first, recording) = match spec.prefetch {
            Prefetch::Use => (touches::read(folder, &opened), None),
            Prefetch::Record => (Vec::new(), Some(Recording::open(folder, &opened)?)),
            Prefetch::Off => (Vec::new(), None),
        };
        let restoring = Restoring {
            folder: folder.to_owned(),
            ram: Arc::new(StoredRam(opened)),
            first: Mutex::new(first),
            recording,
            background: spec
                .restore_bytes_per_second
                .map_or(Background::Unlimited, |bytes| Background::PerSecond(Bytes::new(bytes.get()))),
            pages: spec.restore_pages,
            reads,
            filling: Mutex::default(),
        };
        let SavedRun { machine, session, accesses, .. } = saved;
        Ok((restoring, Continued { machine, session, accesses }))
    }

    /// Begins to fill `ram`; the guest may run from then on. `on_failure` is called for a window that cannot be read:
    /// the guest must end then.
    ///
    /// # Errors
    /// One line.
    pub fn begin_filling(&self, ram: Arc<GuestRam>, on_failure: OnFailure) -> Result<(), String> {
        let layout: Vec<_> = ram.ranges().iter().map(|range| range.gpa).collect();
        if layout != self.ram.0.ram() {
            return Err(format!("cannot restore {}: its RAM lies elsewhere in the guest", self.folder.display()));
        }
        if self.pages == RestorePages::Mapped {
            let began = Instant::now();
            let file = self.ram.0.whole_memory().expect("it was checked when it was opened");
            map_saved(&ram, &*self.ram, file).map_err(|error| error.to_string())?;
            *self.lock() = Filling::Mapped { stored: self.ram.0.stored(), took: began.elapsed() };
            return Ok(());
        }
        let config = RestoreConfig {
            is_page_by_page: self.pages == RestorePages::Base,
            first: std::mem::take(&mut *self.first.lock()),
            record: self.recording.is_some(),
            background: self.background,
            on_failure: Some(on_failure),
            ..RestoreConfig::default()
        };
        let restorer = Restorer::start(ram, self.ram.clone(), config).map_err(|error| error.to_string())?;
        *self.lock() = Filling::Filled(restorer);
        Ok(())
    }

    /// Fails where RAM is a mapping of the snapshot's file: none of it can be saved or moved. `what`: what was asked
    /// for, `save` or `migrate`.
    ///
    /// # Errors
    /// One line.
    pub(crate) fn check_not_mapped(&self, what: &str) -> Result<(), String> {
        if self.pages != RestorePages::Mapped {
            return Ok(());
        }
        Err(format!(
            "cannot {what} the VM: its RAM is mapped from a snapshot; restore it with --restore-pages auto to {what} it"
        ))
    }

    /// Whether all of RAM has its content, or never will: a part of it cannot be read, and the guest is about to end.
    pub fn is_over(&self) -> bool {
        match &*self.lock() {
            Filling::Filled(restorer) => restorer.is_filled() || restorer.failure().is_some(),
            Filling::Not | Filling::Mapped { .. } => true,
        }
    }

    /// Progress until all of RAM has its content; `None` where it is mapped.
    pub(crate) fn progress(&self) -> Option<RestoringView> {
        match &*self.lock() {
            Filling::Filled(restorer) if !restorer.is_filled() => {
                let progress = restorer.progress();
                let [filled_bytes, stored_bytes] = [progress.filled_bytes, progress.stored_bytes].map(Bytes::get);
                Some(RestoringView { filled_bytes, stored_bytes })
            }
            Filling::Filled(_) | Filling::Not | Filling::Mapped { .. } => None,
        }
    }

    /// Whether a part of RAM cannot be read. Threads that touched it sleep until the process ends: a device that woke
    /// would write zeroes elsewhere, so neither the guest's devices nor this may be taken apart.
    pub fn has_failed(&self) -> bool {
        matches!(&*self.lock(), Filling::Filled(restorer) if restorer.failure().is_some())
    }

    /// Ends it after the guest, whether all of its RAM was filled or not.
    pub fn end(&self) -> Option<RestoredReport> {
        let restorer = match std::mem::take(&mut *self.lock()) {
            Filling::Not => return None,
            Filling::Mapped { stored, took } => return Some(self.report_of_mapping(stored, took)),
            Filling::Filled(restorer) => restorer,
        };
        let touches_recorded = self.record(&restorer);
        let report = restorer.abandon_or_leave(GuestIsGone);
        Some(RestoredReport { touches_recorded, ..self.report(&report) })
    }

    /// Records the order of first touches, if that was asked for, and returns their number. A restore that has failed,
    /// or a guest that touched nothing, leaves the older order.
    fn record(&self, restorer: &Restorer) -> u64 {
        let touches = restorer.first_touches();
        let is_whole = restorer.failure().is_none() && !touches.is_empty();
        let Some(recording) = self.recording.as_ref().filter(|_| is_whole) else { return 0 };
        match recording.write(&touches) {
            Ok(()) => touches.len() as u64,
            Err(error) => {
                tracing::warn!("cannot record first touches in {}: {error}", self.folder.display());
                0
            }
        }
    }

    fn report_of_mapping(&self, stored: Bytes, took: Duration) -> RestoredReport {
        RestoredReport {
            folder: self.folder.clone(),
            stored_bytes: stored.get(),
            prepared_ms: took.as_secs_f64() * 1e3,
            pages: self.pages,
            reads: self.reads,
            ..RestoredReport::default()
        }
    }

    fn report(&self, report: &RestoreReport) -> RestoredReport {
        RestoredReport { folder: self.folder.clone(), pages: self.pages, reads: self.reads, ..figures(report) }
    }

    fn lock(&self) -> MutexGuard<'_, Filling> {
        self.filling.lock()
    }
}

/// Figures of the restore for the report of the run.
fn figures(report: &RestoreReport) -> RestoredReport {
    let us = |ns: u64| ns as f64 / 1e3;
    let waits = &report.fault_ns;
    let filled = report.all_filled.filter(|_| report.progress.failed_windows == 0);
    RestoredReport {
        stored_bytes: report.progress.stored_bytes.get(),
        filled_bytes: report.progress.filled_bytes.get(),
        windows_by_touch: report.by_fault,
        windows_in_background: report.by_background,
        windows_huge: report.huge_now(),
        windows_not_huge: report.not_huge_now(),
        wait_p50_us: us(waits.value_at_quantile(0.5)),
        wait_p99_us: us(waits.value_at_quantile(0.99)),
        wait_max_us: us(waits.max()),
        prepared_ms: report.start.as_secs_f64() * 1e3,
        pages_by_touch: report.pages_alone,
        lost_threads: report.lost_threads.clone(),
        filled_s: filled.map(|time| time.as_secs_f64()),
        ..RestoredReport::default()
    }
}

/// Checks that the run describes the VM that was saved: devices are checked with their state.
fn check_same(folder: &Path, saved: &RunSpec, spec: &RunSpec) -> Result<(), Failure> {
    let differs = [
        ("memory_bytes", saved.memory != spec.memory),
        ("vcpus", saved.vcpus != spec.vcpus),
        ("backing", saved.backing != spec.backing),
        ("guest_page", saved.guest_page != spec.guest_page),
        ("workload", saved.workload_name() != spec.workload_name()),
    ];
    match differs.iter().find(|(_, differs)| *differs) {
        None => Ok(()),
        Some((what, _)) => {
            let folder = folder.display();
            Err(Failure::Input(format!("cannot restore {folder}: its {what} is another; take it from the snapshot")))
        }
    }
}

/// A policy that answers faults has the userfaultfd of RAM from the start, and so has the fill.
fn check_policy(folder: &Path, policy: &PolicyChoice) -> Result<(), Failure> {
    if !policy.make().answers_faults() {
        return Ok(());
    }
    let folder = folder.display();
    Err(Failure::Usage(format!(
        "cannot restore {folder} with --policy {policy}: it decides at the first touch of a page, and the restore \
         answers these; use another policy, for example --policy auto"
    )))
}

/// Checks that the RAM can be mapped, if it is to be.
fn check_pages(folder: &Path, opened: &Opened, spec: &RunSpec) -> Result<(), Failure> {
    if spec.restore_pages != RestorePages::Mapped {
        return Ok(());
    }
    let folder = folder.display();
    if opened.whole_memory().is_none() {
        return Err(Failure::Input(format!(
            "cannot map {folder}: it is saved on a base, so its pages are in several files; use --restore-pages auto"
        )));
    }
    if spec.restore_reads == RestoreReads::Direct || spec.prefetch == Prefetch::Record {
        return Err(Failure::Usage(format!(
            "cannot map {folder} with --restore-reads direct or --prefetch record: the kernel reads it through its \
             page cache, at touches that it does not tell; omit them, or use --restore-pages auto"
        )));
    }
    Ok(())
}

/// Checks that the host has memory for what is filled, whether the guest touches it or not. If it has not, no read
/// fails: the kernel kills processes, and not only this one.
fn check_memory(
    folder: &Path,
    windows: impl Iterator<Item = wideleaf_snapshot::SavedWindow>,
    pages: RestorePages,
    takeable: Bytes,
) -> Result<(), Failure> {
    let (mut stored, mut large) = (Bytes::ZERO, Bytes::ZERO);
    for window in windows {
        let in_use = PageSize::Base4K.bytes() * u64::from(window.pages.len());
        stored += in_use;
        large += if window.page == PageSize::Base4K { in_use } else { PageSize::Huge2M.bytes() };
    }
    let (takes, remedy) = match pages {
        RestorePages::Auto if stored <= takeable => (large, "use --restore-pages 4k, which takes less"),
        RestorePages::Auto => (large, "free memory"),
        RestorePages::Base => (stored, "free memory"),
        RestorePages::Mapped => return Ok(()),
    };
    if takes <= takeable {
        return Ok(());
    }
    let folder = folder.display();
    Err(Failure::Host(format!(
        "cannot restore {folder}: its RAM takes {takes}, and the host has {takeable} with free swap; {remedy}"
    )))
}

/// RAM as the snapshot has it.
struct StoredRam(Opened);

impl SavedRam for StoredRam {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        self.0.window(window).map_or_else(SavedWindow::default, |saved| SavedWindow {
            pages: saved.pages,
            was_huge: saved.page != PageSize::Base4K,
            heat: PerTenThousand::new(saved.heat.into()),
            has_others: false,
        })
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        self.0.read(window, into).map_err(|error| unreadable(window, &error))
    }

    fn read_page(&self, window: WindowIndex, page: u16, into: &mut [u8]) -> Result<(), ReadError> {
        self.0.read_page(window, page, into).map_err(|error| unreadable(window, &error))
    }
}

fn unreadable(window: WindowIndex, error: &wideleaf_snapshot::ReadError) -> ReadError {
    let file = error.file.clone();
    ReadError::Io { window, file, source: io::Error::other(error.problem.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::PageSet;
    use wideleaf_policies::units::{kib, mib};

    #[test]
    fn a_restore_that_would_take_more_memory_than_the_host_has_is_refused_with_what_would_fit() {
        // Two windows that were huge, of one page each, and a full one on base pages.
        let one = PageSet::from_iter([0]);
        let windows = [(PageSize::Huge2M, one), (PageSize::Huge2M, one), (PageSize::Base4K, PageSet::ALL)];
        let check = |pages, takeable| {
            let saved = windows.iter().zip(0..).map(|((page, pages), window)| wideleaf_snapshot::SavedWindow {
                window: WindowIndex::new(window),
                page: *page,
                heat: 0,
                age_s: 0,
                pages: *pages,
            });
            check_memory(Path::new("monday"), saved, pages, takeable).map_err(|error| error.to_string())
        };
        assert_eq!(check(RestorePages::Auto, mib(6)), Ok(()));
        let refused = check(RestorePages::Auto, mib(5)).expect_err("it takes 6 MiB");
        let words = "its RAM takes 6 MiB, and the host has 5 MiB with free swap; use --restore-pages 4k";
        assert!(refused.contains(words), "{refused}");
        assert_eq!(check(RestorePages::Base, mib(5)), Ok(()));
        let refused = check(RestorePages::Base, mib(2) + kib(7)).expect_err("it takes 8 KiB more than 2 MiB");
        assert!(refused.ends_with("free memory"), "{refused}");
        let refused = check(RestorePages::Auto, mib(2)).expect_err("it takes 6 MiB");
        assert!(refused.ends_with("free memory"), "{refused}");
        assert_eq!(check(RestorePages::Mapped, Bytes::ZERO), Ok(()));
    }

    #[test]
    fn a_window_that_a_collapse_made_huge_counts_as_huge_and_a_restore_with_a_failure_was_never_filled() {
        let all_filled = Some(Duration::from_secs(2));
        let mut report = RestoreReport { huge: 1, not_huge: 5, collapsed: 4, all_filled, ..RestoreReport::default() };
        let whole = figures(&report);
        assert_eq!((whole.windows_huge, whole.windows_not_huge, whole.filled_s), (5, 1, Some(2.0)));
        report.progress.failed_windows = 1;
        assert_eq!(figures(&report).filled_s, None);
    }
}
