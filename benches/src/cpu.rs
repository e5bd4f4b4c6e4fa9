//! CPU time that threads have used, from `/proc/<pid>/schedstat` (Documentation/scheduler/sched-stats.rst): nanoseconds,
//! where `stat` counts hundredths of a second.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::experiment::Ended;

/// Some threads.
#[derive(Clone, Debug)]
pub struct Threads {
    files: Vec<PathBuf>,
}

impl Threads {
    /// The threads of this process that are there after `start` and were not before: nobody else starts any meanwhile.
    pub fn started_by<T>(start: impl FnOnce() -> T) -> (T, Threads) {
        let before = of_this_process();
        let started = start();
        let new = of_this_process().into_iter().filter(|thread| !before.contains(thread));
        (started, Threads { files: new.map(|thread| thread.join("schedstat")).collect() })
    }

    /// The kernel's thread of that name.
    ///
    /// # Errors
    /// [`Ended::Skipped`] where there is none.
    pub fn of_kernel(name: &str) -> Result<Threads, Ended> {
        let is_named = |folder: &PathBuf| fs::read_to_string(folder.join("comm")).is_ok_and(|comm| comm.trim() == name);
        let found = folders(Path::new("/proc")).into_iter().find(is_named);
        let folder = found.ok_or_else(|| Ended::Skipped(format!("this kernel runs no thread called {name}")))?;
        Ok(Threads { files: vec![folder.join("schedstat")] })
    }

    /// What they have used so far, all together. A thread that has ended counts no more.
    ///
    /// # Errors
    /// [`Ended::Skipped`] where the kernel does not say.
    pub fn cpu_time(&self) -> Result<Duration, Ended> {
        self.files.iter().map(|file| cpu_time(file)).sum()
    }
}

fn of_this_process() -> BTreeSet<PathBuf> {
    folders(Path::new("/proc/self/task"))
}

fn folders(path: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn cpu_time(file: &Path) -> Result<Duration, Ended> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !file.parent().is_some_and(Path::exists) => {
            Ok(Duration::ZERO)
        }
        Err(error) => Err(Ended::Skipped(format!("{}: {error}", file.display()))),
        Ok(text) => {
            let ns = text.split_whitespace().next().and_then(|number| number.parse().ok());
            let ns = ns.ok_or_else(|| Ended::Skipped(format!("{}: no number in {text:?}", file.display())))?;
            Ok(Duration::from_nanos(ns))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_is_the_time_on_a_cpu() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("schedstat");
        fs::write(&file, "51951157 15193923354 1595\n").expect("a file");
        assert_eq!(cpu_time(&file).expect("well formed"), Duration::from_nanos(51_951_157));
        fs::write(&file, "nonsense\n").expect("a file");
        assert!(matches!(cpu_time(&file), Err(Ended::Skipped(_))));
    }

    #[test]
    fn a_thread_that_has_ended_counts_no_more_and_a_kernel_that_says_nothing_is_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(cpu_time(&folder.path().join("12/schedstat")).expect("it ended"), Duration::ZERO);
        assert!(matches!(cpu_time(&folder.path().join("schedstat")), Err(Ended::Skipped(_))));
    }

    #[test]
    fn a_thread_that_was_just_started_is_found() {
        let (channel, end) = std::sync::mpsc::channel::<()>();
        let (thread, threads) = Threads::started_by(|| std::thread::spawn(move || end.recv()));
        assert!(!threads.files.is_empty());
        drop(channel);
        assert!(thread.join().is_ok_and(|received| received.is_err()));
    }
}
