//! Settings of the host's khugepaged, changed for the time of an experiment. Files and their meaning:
//! Documentation/admin-guide/mm/transhuge.rst.
//!
//! ```text
//!   settings ──▶ lease(new ones) ── in force ──▶ dropped: the former settings
//! ```

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// Amount of scanning, and its interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time between two scans, in milliseconds; 0 means no rest.
    pub scan_sleep_ms: u64,
    /// Number of base pages checked in one scan.
    pub pages_to_scan: u64,
}

impl Settings {
    /// Initial settings of Linux (mm/khugepaged.c).
    pub const DEFAULTS: Settings = Settings { scan_sleep_ms: 10_000, pages_to_scan: 4_096 };
    /// Fastest settings: no rest, and a gibibyte in one scan.
    pub const FASTEST: Settings = Settings { scan_sleep_ms: 0, pages_to_scan: 262_144 };
}

/// Why the settings are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum KhugepagedError {
    /// Two leases at a time would restore each other's settings.
    #[error("cannot change settings of khugepaged: another process has changed them for a time")]
    Leased,
    /// A file is missing, has unexpected contents, or may not be written.
    #[error("cannot use {}: {why}", file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// Error of the kernel, or the problem with the contents.
        why: String,
    },
}

/// Settings of the kernel, or of a captured tree.
#[derive(Clone, Debug)]
pub struct Khugepaged {
    folder: PathBuf,
}

impl Khugepaged {
    const SCAN_SLEEP: &str = "scan_sleep_millisecs";
    const PAGES_TO_SCAN: &str = "pages_to_scan";

    /// Settings of this machine.
    pub fn of_this_machine() -> Khugepaged {
        Khugepaged::at(Path::new("/"))
    }

    /// Settings of the tree under `root` (which holds `sys/`).
    pub fn at(root: &Path) -> Khugepaged {
        Khugepaged { folder: root.join("sys/kernel/mm/transparent_hugepage/khugepaged") }
    }

    /// Settings in force now.
    ///
    /// # Errors
    /// [`KhugepagedError::File`] if the kernel does not report them.
    pub fn settings(&self) -> Result<Settings, KhugepagedError> {
        let read = |name| {
            let file = self.folder.join(name);
            let text = fs::read_to_string(&file).map_err(|error| cannot(&file, &error))?;
            text.trim().parse().map_err(|error| cannot(&file, &error))
        };
        Ok(Settings { scan_sleep_ms: read(Self::SCAN_SLEEP)?, pages_to_scan: read(Self::PAGES_TO_SCAN)? })
    }

    /// Applies other settings until the lease is dropped. One lease at a time: a second one would restore the
    /// settings of the first.
    ///
    /// # Errors
    /// [`KhugepagedError`] if another process has the lease, or the kernel refuses.
    pub fn lease(&self, settings: Settings) -> Result<SettingsLease, KhugepagedError> {
        let file = self.folder.join(Self::SCAN_SLEEP);
        let lock = File::open(&file).map_err(|error| cannot(&file, &error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => KhugepagedError::Leased,
            TryLockError::Error(error) => cannot(&file, &error),
        })?;
        let lease = SettingsLease { of: self.clone(), before: self.settings()?, _lock: lock };
        self.set(settings)?;
        Ok(lease)
    }

    fn set(&self, settings: Settings) -> Result<(), KhugepagedError> {
        let values = [(Self::PAGES_TO_SCAN, settings.pages_to_scan), (Self::SCAN_SLEEP, settings.scan_sleep_ms)];
        values.into_iter().try_for_each(|(name, value)| {
            let file = self.folder.join(name);
            fs::write(&file, value.to_string()).map_err(|error| cannot(&file, &error))
        })
    }
}

fn cannot(file: &Path, why: &dyn fmt::Display) -> KhugepagedError {
    KhugepagedError::File { file: file.to_owned(), why: why.to_string() }
}

/// Settings that are restored on drop, also by a panic. (`SIGKILL` leaves them: a process that may be killed lets a
/// child hold the lease.)
#[derive(Debug)]
pub struct SettingsLease {
    of: Khugepaged,
    before: Settings,
    _lock: File,
}

impl SettingsLease {
    /// Settings before the lease, which will be restored.
    pub fn before(&self) -> Settings {
        self.before
    }
}

impl Drop for SettingsLease {
    fn drop(&mut self) {
        if let Err(error) = self.of.set(self.before) {
            tracing::error!("cannot restore {:?} of khugepaged: {error}", self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIED: Settings = Settings { scan_sleep_ms: 7, pages_to_scan: 9 };

    /// A captured tree with the default settings.
    fn tree() -> (tempfile::TempDir, Khugepaged) {
        let root = tempfile::tempdir().expect("a temporary folder");
        let khugepaged = Khugepaged::at(root.path());
        fs::create_dir_all(&khugepaged.folder).expect("its folder");
        khugepaged.set(Settings::DEFAULTS).expect("its files");
        (root, khugepaged)
    }

    #[test]
    fn settings_hold_as_long_as_the_lease() {
        let (_root, khugepaged) = tree();
        let lease = khugepaged.lease(TRIED).expect("it is free");
        assert_eq!((khugepaged.settings().expect("numbers"), lease.before()), (TRIED, Settings::DEFAULTS));
        drop(lease);
        assert_eq!(khugepaged.settings().expect("numbers"), Settings::DEFAULTS);
    }

    #[test]
    fn a_panic_restores_them() {
        let (_root, khugepaged) = tree();
        let panics = || {
            let _lease = khugepaged.lease(TRIED).expect("it is free");
            panic!("on purpose");
        };
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(khugepaged.settings().expect("numbers"), Settings::DEFAULTS);
    }

    #[test]
    fn there_is_one_lease_at_a_time() {
        let (_root, khugepaged) = tree();
        let _lease = khugepaged.lease(TRIED).expect("it is free");
        let second = khugepaged.lease(Settings::FASTEST).expect_err("the first is alive").to_string();
        assert_eq!(second, "cannot change settings of khugepaged: another process has changed them for a time");
        assert_eq!(khugepaged.settings().expect("numbers"), TRIED);
    }

    #[test]
    fn settings_that_cannot_be_read_are_not_changed() {
        let (_root, khugepaged) = tree();
        fs::remove_file(khugepaged.folder.join(Khugepaged::PAGES_TO_SCAN)).expect("it was there");
        assert!(matches!(khugepaged.lease(TRIED), Err(KhugepagedError::File { .. })));
        let sleep = fs::read_to_string(khugepaged.folder.join(Khugepaged::SCAN_SLEEP)).expect("it is there");
        assert_eq!(sleep, Settings::DEFAULTS.scan_sleep_ms.to_string());
    }
}
