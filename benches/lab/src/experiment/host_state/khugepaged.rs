//! Settings of the host's khugepaged while a job runs, and the CPU time that it uses. A child holds the settings, and
//! puts the old ones back however this process ends.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use wideleaf::guardian::{self, Held};
use wideleaf_experiments::definition::KhugepagedSettings;
use wideleaf_memory::khugepaged::{Khugepaged, Settings};
use wideleaf_run::failure::Failure;

/// Name of the kernel's thread.
const THREAD: &str = "khugepaged";

/// Arguments of the child that holds khugepaged's settings for an experiment.
#[derive(Debug, Args)]
pub struct HoldKhugepagedArgs {
    /// Milliseconds between two scans
    #[arg(long, value_name = "MS")]
    pub scan_sleep_ms: u64,

    /// Number of base pages in one scan
    #[arg(long, value_name = "N")]
    pub pages_to_scan: u64,

    /// The folder that holds `sys/`
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub root: PathBuf,
}

/// The child: runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] if another process holds other settings, or if the kernel refuses them.
pub fn main(args: &HoldKhugepagedArgs) -> Result<(), Failure> {
    wideleaf_run::guardian::outlive_signals();
    let settings = Settings { scan_sleep_ms: args.scan_sleep_ms, pages_to_scan: args.pages_to_scan };
    let lease = Khugepaged::at(&args.root).lease(settings);
    let _lease = lease.map_err(|error| Failure::Host(error.to_string()))?;
    guardian::until_input_ends("")
}

/// Settings that are held until this is dropped or the process ends.
#[derive(Debug)]
pub(super) struct HeldKhugepaged {
    _held: Held,
    cpu_before: Option<Duration>,
}

impl HeldKhugepaged {
    /// Applies the settings in a child process.
    ///
    /// # Errors
    /// The reason why they cannot be set.
    pub(super) fn lease(settings: KhugepagedSettings) -> Result<HeldKhugepaged, String> {
        let [sleep, pages] = [settings.scan_sleep_ms, settings.pages_to_scan].map(|number| number.to_string());
        let held = Held::start(&["hold-khugepaged", "--scan-sleep-ms", &sleep, "--pages-to-scan", &pages])?;
        Ok(HeldKhugepaged { _held: held, cpu_before: cpu_time() })
    }

    /// CPU time of khugepaged since the settings were applied; `None` if the kernel does not report it.
    pub(super) fn cpu_time(&self) -> Option<Duration> {
        Some(cpu_time()?.saturating_sub(self.cpu_before?))
    }
}

/// CPU time of the kernel's thread: the first number of its `schedstat`, in nanoseconds
/// (Documentation/scheduler/sched-stats.rst).
pub(in crate::experiment) fn cpu_time() -> Option<Duration> {
    let folders = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    let is_it = |folder: &PathBuf| fs::read_to_string(folder.join("comm")).is_ok_and(|name| name.trim_end() == THREAD);
    let text = fs::read_to_string(folders.into_iter().find(is_it)?.join("schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_experiment_means_the_same_settings_as_a_bench() {
        let same = |ours: KhugepagedSettings, theirs: Settings| {
            assert_eq!((ours.scan_sleep_ms, ours.pages_to_scan), (theirs.scan_sleep_ms, theirs.pages_to_scan));
        };
        same(KhugepagedSettings::DEFAULTS, Settings::DEFAULTS);
        same(KhugepagedSettings::FASTEST, Settings::FASTEST);
    }
}
