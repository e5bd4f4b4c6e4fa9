//! The host's khugepaged: what it may do, borrowed for an experiment. Files and their meaning:
//! Documentation/admin-guide/mm/transhuge.rst.
//!
//! ```text
//!   settings ──▶ lease(others) ── they hold ──▶ dropped: the settings of before
//! ```

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// How much it scans, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Milliseconds between two scans; with 0 it never rests.
    pub scan_sleep_ms: u64,
    /// Base pages looked at in one scan.
    pub pages_to_scan: u64,
}

impl Settings {
    /// What Linux starts with (mm/khugepaged.c).
    pub const DEFAULTS: Settings = Settings { scan_sleep_ms: 10_000, pages_to_scan: 4_096 };
    /// As fast as it goes: no rest, and a gibibyte in one scan.
    pub const FASTEST: Settings = Settings { scan_sleep_ms: 0, pages_to_scan: 262_144 };
}

/// Why its settings are as they were.
#[derive(Debug, thiserror::Error)]
pub enum KhugepagedError {
    /// Two leases at a time would put back each other's settings.
    #[error("somebody else tries other settings of khugepaged")]
    Leased,
    /// A file of its is not there, or has something else in it, or may not be written.
    #[error("{}: {why}", file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// What the kernel says, or what is wrong with it.
        why: String,
    },
}

/// Its settings, or those of a captured tree.
#[derive(Clone, Debug)]
pub struct Khugepaged {
    folder: PathBuf,
}

impl Khugepaged {
    const SCAN_SLEEP: &str = "scan_sleep_millisecs";
    const PAGES_TO_SCAN: &str = "pages_to_scan";

    /// Of this machine.
    pub fn of_this_machine() -> Khugepaged {
        Khugepaged::at(Path::new("/"))
    }

    /// Of the tree under `root` (which holds `sys/`).
    pub fn at(root: &Path) -> Khugepaged {
        Khugepaged { folder: root.join("sys/kernel/mm/transparent_hugepage/khugepaged") }
    }

    /// What holds now.
    ///
    /// # Errors
    /// [`KhugepagedError::File`] where the kernel does not say.
    pub fn settings(&self) -> Result<Settings, KhugepagedError> {
        let read = |name| {
            let file = self.folder.join(name);
            let text = fs::read_to_string(&file).map_err(|error| cannot(&file, &error))?;
            text.trim().parse().map_err(|error| cannot(&file, &error))
        };
        Ok(Settings { scan_sleep_ms: read(Self::SCAN_SLEEP)?, pages_to_scan: read(Self::PAGES_TO_SCAN)? })
    }

    /// Other settings, until the lease is dropped. One lease at a time: the second would put back what the first had set.
    ///
    /// # Errors
    /// [`KhugepagedError`] where somebody has it, or the kernel does not let us.
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

/// Settings that are put back on drop, also by a panic. (`SIGKILL` leaves them: who may be
/// killed lets a child hold the lease.)
#[derive(Debug)]
pub struct SettingsLease {
    of: Khugepaged,
    before: Settings,
    _lock: File,
}

impl SettingsLease {
    /// What held before, and will again.
    pub fn before(&self) -> Settings {
        self.before
    }
}

impl Drop for SettingsLease {
    fn drop(&mut self) {
        if let Err(error) = self.of.set(self.before) {
            tracing::error!("cannot put {:?} of khugepaged back: {error}", self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIED: Settings = Settings { scan_sleep_ms: 7, pages_to_scan: 9 };

    /// A captured tree.
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
        let lease = khugepaged.lease(TRIED).expect("nobody else has it");
        assert_eq!((khugepaged.settings().expect("numbers"), lease.before()), (TRIED, Settings::DEFAULTS));
        drop(lease);
        assert_eq!(khugepaged.settings().expect("numbers"), Settings::DEFAULTS);
    }

    #[test]
    fn a_panic_puts_them_back() {
        let (_root, khugepaged) = tree();
        let panics = || {
            let _lease = khugepaged.lease(TRIED).expect("nobody else has it");
            panic!("on purpose");
        };
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(khugepaged.settings().expect("numbers"), Settings::DEFAULTS);
    }

    #[test]
    fn there_is_one_lease_at_a_time() {
        let (_root, khugepaged) = tree();
        let _lease = khugepaged.lease(TRIED).expect("nobody else has it");
        let second = khugepaged.lease(Settings::FASTEST).expect_err("the first is alive").to_string();
        assert_eq!(second, "somebody else tries other settings of khugepaged");
        assert_eq!(khugepaged.settings().expect("numbers"), TRIED);
    }

    #[test]
    fn what_cannot_be_read_is_not_changed() {
        let (_root, khugepaged) = tree();
        fs::remove_file(khugepaged.folder.join(Khugepaged::PAGES_TO_SCAN)).expect("it was there");
        assert!(matches!(khugepaged.lease(TRIED), Err(KhugepagedError::File { .. })));
        let sleep = fs::read_to_string(khugepaged.folder.join(Khugepaged::SCAN_SLEEP)).expect("it is there");
        assert_eq!(sleep, Settings::DEFAULTS.scan_sleep_ms.to_string());
    }
}
