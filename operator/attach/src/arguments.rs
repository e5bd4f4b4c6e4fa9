//! Cache of process arguments. A process's arguments do not change while they stay in place, and reading them takes
//! its `mmap_lock`. With the cache a guest that hangs later keeps its name.
//!
//! `execve(2)` keeps the process id and the start time, and puts the new arguments elsewhere. The key therefore
//! includes their addresses (proc_pid_stat(5), fields 48 and 49).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::deadline::ProcessKey;

/// Place of the arguments in one process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// `/proc`; tests have their own.
    pub proc: PathBuf,
    /// Process that has them.
    pub of: ProcessKey,
    /// First address of the arguments.
    pub start: u64,
    /// First address after the arguments.
    pub end: u64,
}

/// Upper bound on cached arguments, in bytes. Longer ones are read each time: a process chooses their length, and a
/// QEMU with a hundred devices needs half of this.
const BYTES_MAX: usize = 64 << 10;

/// Upper bound on cached processes, 32 MiB in all. Beyond it the cache starts empty again.
const PROCESSES_MAX: usize = 512;

static KNOWN: LazyLock<Mutex<HashMap<Place, Vec<String>>>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, HashMap<Place, Vec<String>>> {
    KNOWN.lock()
}

/// The cached arguments of that place.
pub(crate) fn known(place: &Place) -> Option<Vec<String>> {
    all().get(place).cloned()
}

/// Caches the arguments of that place, and drops the earlier ones of the process.
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
    fn arguments_of_malicious_length_are_not_cached() {
        let place = place(2, 4096);
        remember(place.clone(), &["a".repeat(BYTES_MAX + 1)]);
        assert_eq!(known(&place), None);
    }
}
