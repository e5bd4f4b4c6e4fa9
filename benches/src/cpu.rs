//! CPU time that threads have used or waited for, from `/proc/<pid>/schedstat`
//! (Documentation/scheduler/sched-stats.rst). It is in nanoseconds; `stat` has hundredths of a second.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::scenario::ScenarioError;

/// CPU time of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuUse {
    /// Time on a CPU.
    pub ran: Duration,
    /// Time ready to run while other threads had the CPUs. For a thread of low priority on a busy machine this
    /// is most of it.
    pub waited: Duration,
}

impl CpuUse {
    /// Time that the threads would have used on a machine of their own.
    pub fn wanted(self) -> Duration {
        self.ran + self.waited
    }

    /// Difference to an `earlier` measurement.
    pub fn since(self, earlier: CpuUse) -> CpuUse {
        let CpuUse { ran, waited } = earlier;
        CpuUse { ran: self.ran.saturating_sub(ran), waited: self.waited.saturating_sub(waited) }
    }
}

/// A set of threads.
#[derive(Clone, Debug)]
pub struct Threads {
    files: Vec<PathBuf>,
}

impl Threads {
    /// Threads of this process that exist after `start` and did not exist before. No other thread may start
    /// threads in that time.
    pub fn started_by<T>(start: impl FnOnce() -> T) -> (T, Threads) {
        let before = of_this_process();
        let started = start();
        let new = of_this_process().into_iter().filter(|thread| !before.contains(thread));
        (started, Threads { files: new.map(|thread| thread.join("schedstat")).collect() })
    }

    /// The calling thread.
    pub fn this_one() -> Threads {
        Threads { files: vec![PathBuf::from("/proc/thread-self/schedstat")] }
    }

    /// The kernel thread with this name.
    ///
    /// # Errors
    /// [`ScenarioError::Skipped`] if there is no such thread.
    pub fn of_kernel(name: &str) -> Result<Threads, ScenarioError> {
        let is_named = |folder: &PathBuf| fs::read_to_string(folder.join("comm")).is_ok_and(|comm| comm.trim() == name);
        let found = folders(Path::new("/proc")).into_iter().find(is_named);
        let folder =
            found.ok_or_else(|| ScenarioError::Skipped(format!("this kernel runs no thread called {name}")))?;
        Ok(Threads { files: vec![folder.join("schedstat")] })
    }

    /// Total CPU time of the threads so far. A thread that has ended no longer counts.
    ///
    /// # Errors
    /// [`ScenarioError::Skipped`] if the kernel does not report it.
    pub fn cpu_use(&self) -> Result<CpuUse, ScenarioError> {
        let sum = |sum: CpuUse, one: CpuUse| CpuUse { ran: sum.ran + one.ran, waited: sum.waited + one.waited };
        self.files.iter().try_fold(CpuUse::default(), |all, file| Ok(sum(all, cpu_use(file)?)))
    }
}

fn of_this_process() -> BTreeSet<PathBuf> {
    folders(Path::new("/proc/self/task"))
}

fn folders(path: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn cpu_use(file: &Path) -> Result<CpuUse, ScenarioError> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !file.parent().is_some_and(Path::exists) => {
            Ok(CpuUse::default())
        }
        Err(error) => Err(ScenarioError::Skipped(format!("{}: {error}", file.display()))),
        Ok(text) => {
            let mut times = text.split_whitespace().map_while(|ns| ns.parse().ok()).map(Duration::from_nanos);
            let (Some(ran), Some(waited)) = (times.next(), times.next()) else {
                return Err(ScenarioError::Skipped(format!("{}: no two numbers in {text:?}", file.display())));
            };
            Ok(CpuUse { ran, waited })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_is_the_time_on_a_cpu_and_the_second_the_wait_for_one() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("schedstat");
        fs::write(&file, "51951157 15193923354 1595\n").expect("a file");
        let (ran, waited) = (Duration::from_nanos(51_951_157), Duration::from_nanos(15_193_923_354));
        let now = cpu_use(&file).expect("well formed");
        assert_eq!(now, CpuUse { ran, waited });
        assert_eq!(now.since(CpuUse { ran, waited: Duration::ZERO }).wanted(), waited);
        fs::write(&file, "nonsense\n").expect("a file");
        assert!(matches!(cpu_use(&file), Err(ScenarioError::Skipped(_))));
    }

    #[test]
    fn an_ended_thread_no_longer_counts_and_missing_statistics_are_an_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(cpu_use(&folder.path().join("12/schedstat")).expect("the thread ended"), CpuUse::default());
        assert!(matches!(cpu_use(&folder.path().join("schedstat")), Err(ScenarioError::Skipped(_))));
    }

    #[test]
    fn a_new_thread_is_found() {
        let (channel, end) = std::sync::mpsc::channel::<()>();
        let (thread, threads) = Threads::started_by(|| std::thread::spawn(move || end.recv()));
        assert!(!threads.files.is_empty());
        drop(channel);
        assert!(thread.join().is_ok_and(|received| received.is_err()));
    }
}
