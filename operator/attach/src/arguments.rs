//! Arguments of processes that were read once. A process's arguments do not change while they stay where they are, and
//! reading them takes its `mmap_lock`: a guest that hangs later keeps its name.
//!
//! `execve(2)` keeps the process id and the start time, and puts the new arguments elsewhere: their addresses
//! (proc_pid_stat(5), fields 48 and 49) are part of what is remembered.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use wideleaf_memory::deadline::ProcessKey;

/// Arguments in one place of one process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// `/proc`; tests have their own.
    pub proc: PathBuf,
    /// The process.
    pub of: ProcessKey,
    /// First address of the arguments.
    pub start: u64,
    /// First address behind them.
    pub end: u64,
}

/// Longer ones are read each time: a process chooses their length, and a QEMU with a hundred devices needs half of
/// this.
const BYTES_MAX: usize = 64 << 10;

/// Processes whose arguments are kept, 32 MiB at most. When there are more, all are read anew.
const PROCESSES_MAX: usize = 512;

static KNOWN: LazyLock<Mutex<HashMap<Place, Vec<String>>>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, HashMap<Place, Vec<String>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The arguments there, where they were read before.
pub(crate) fn known(place: &Place) -> Option<Vec<String>> {
    all().get(place).cloned()
}

/// Keeps what was read there, in the place of what the process had before.
pub(crate) fn remember(place: Place, arguments: &[String]) {
    if arguments.is_empty() || arguments.iter().map(String::len).sum::<usize>() > BYTES_MAX {
        return;
    }
    let mut all = all();
    if all.len() >= PROCESSES_MAX {
        all.clear();
    }
    all.retain(|other, _| (&other.proc, other.of) != (&place.proc, place.of));
    all.insert(place, arguments.to_vec());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pid: u32, start: u64) -> Place {
        Place { proc: "/a test's".into(), of: ProcessKey { pid, started_at: 1 }, start, end: start + 10 }
    }

    #[test]
    fn arguments_are_known_until_the_process_has_others() {
        let (first, second) = (place(1, 4096), place(1, 8192));
        remember(first.clone(), &["a".into()]);
        assert_eq!((known(&first), known(&second)), (Some(vec!["a".into()]), None));
        remember(second.clone(), &["b".into()]);
        assert_eq!((known(&first), known(&second)), (None, Some(vec!["b".into()])));
    }

    #[test]
    fn arguments_of_a_length_that_only_a_process_with_a_purpose_has_are_not_kept() {
        let place = place(2, 4096);
        remember(place.clone(), &["a".repeat(BYTES_MAX + 1)]);
        assert_eq!(known(&place), None);
    }
}
