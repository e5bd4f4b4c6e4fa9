//! The running libvirtd, identified by its process id and start time: a process id may be reused, but not with the
//! same start (proc_pid_stat(5)).

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Daemons that run QEMU's hooks: libvirtd, or virtqemud on hosts with one daemon per driver.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// Clock ticks per second in /proc: USER_HZ, which is 100 on x86-64 whatever the kernel's own clock.
const TICKS_PER_SECOND: f64 = 100.0;
/// Most processes between a libvirtd and its hook's program: the shell, and those that an administrator's own
/// script may add.
const ANCESTORS_MAX: usize = 8;

/// A libvirtd process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Libvirtd {
    /// Process id of the libvirtd.
    pub pid: u32,
    /// Start time, in clock ticks since boot.
    pub started_at: u64,
}

/// The running libvirtd; if there are several, the one that started last.
pub fn running(proc: &Path) -> Option<Libvirtd> {
    let processes = fs::read_dir(proc).ok()?.flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    let daemons = pids.filter_map(|pid| Process::read(proc, pid)?.as_libvirtd());
    daemons.max_by_key(|daemon| (daemon.started_at, daemon.pid))
}

/// The libvirtd among the ancestors of this process: it has called the hook.
pub fn caller(proc: &Path) -> Option<Libvirtd> {
    let mut pid = std::process::id();
    for _ in 0..ANCESTORS_MAX {
        let process = Process::read(proc, pid)?;
        if let Some(libvirtd) = process.as_libvirtd() {
            return Some(libvirtd);
        }
        pid = process.parent;
    }
    None
}

impl Libvirtd {
    /// Wall-clock time of its start.
    pub fn started(self, proc: &Path, now: SystemTime) -> Option<SystemTime> {
        let uptime = fs::read_to_string(proc.join("uptime")).ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        let age = uptime - self.started_at as f64 / TICKS_PER_SECOND;
        now.checked_sub(Duration::try_from_secs_f64(age.max(0.0)).ok()?)
    }
}

/// Fields of a process's stat file.
struct Process {
    pid: u32,
    name: String,
    parent: u32,
    started_at: u64,
}

impl Process {
    /// The second field is the name, in parentheses, and may contain any character. The 4th is the parent, the 22nd
    /// the start.
    fn read(proc: &Path, pid: u32) -> Option<Process> {
        let stat = fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?;
        let (head, rest) = stat.rsplit_once(") ")?;
        let (_, name) = head.split_once(" (")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let (parent, started_at) = (fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?);
        Some(Process { pid, name: name.to_owned(), parent, started_at })
    }

    fn as_libvirtd(&self) -> Option<Libvirtd> {
        let is_one = DAEMONS.contains(&self.name.as_str());
        is_one.then_some(Libvirtd { pid: self.pid, started_at: self.started_at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/proc` with processes (number, name, parent), all started 100 s after boot.
    fn proc(processes: &[(u32, &str, u32)]) -> tempfile::TempDir {
        let proc = tempfile::tempdir().expect("a temporary folder");
        for (pid, name, parent) in processes {
            let folder = proc.path().join(pid.to_string());
            fs::create_dir(&folder).expect("a process");
            let zeroes = "0 ".repeat(17);
            fs::write(folder.join("stat"), format!("{pid} ({name}) S {parent} {zeroes}10000 55\n")).expect("a file");
        }
        proc
    }

    #[test]
    fn the_caller_of_the_hook_is_found_behind_its_shell() {
        let me = std::process::id();
        let calling = |name: &'static str| proc(&[(me, "wideleaf", me + 1), (me + 1, "sh", 1), (1, name, 0)]);
        assert_eq!(caller(calling("libvirtd").path()), Some(Libvirtd { pid: 1, started_at: 10_000 }));
        assert_eq!(caller(calling("systemd").path()), None);
        assert_eq!(caller(proc(&[(me, "wideleaf", me)]).path()), None, "a cycle ends");
    }
}
