//! The address space of another process: an external VMM.
//!
//! ```text
//!   pidfd ───────────── process_madvise: collapse, split by COLD      and: has it ended?
//!   /proc/PID, open ─┬─ pagemap  PAGEMAP_SCAN
//!                    └─ statm, smaps, maps, …  as /proc/self for callers of this host
//! ```
//!
//! The process is held by descriptors, not by its number. Once it has ended, every call fails with `ESRCH`, even if
//! another process has the number by then. Everything but collapse and split is refused (`ENOTSUP`): the kernel takes
//! no other advice from outside, and only the process itself can map and move its memory. A process that executes
//! another program keeps its pidfd and gets new memory. This host then sees the old one, which is empty from then on,
//! and empty windows are not acted on.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use wideleaf_policies::{Bytes, Hva, Moment, NodeId};

use super::linux::{covers, threads_in};
use super::ready_page::ReadyPage;
use super::{Advice, Host, HostError, PageRun};
use crate::sys;

/// Another process's address space; see the module.
#[derive(Debug)]
pub struct ProcessHost {
    pid: u32,
    process: OwnedFd,
    /// Descriptor of `/proc/PID`.
    folder: OwnedFd,
    pagemap: File,
    opened_at: Instant,
    ready_page: ReadyPage,
}

/// Claim of one manager on a process; see [`ProcessHost::claim`]. It ends when it is dropped, or with
/// the claiming process.
#[derive(Debug)]
pub struct Claim {
    _lock: Flock<File>,
}

impl ProcessHost {
    /// Opens the process with this number. That needs the uid of its owner and `CAP_SYS_NICE`, or root: advice
    /// needs `CAP_SYS_NICE` and the right to read the memory (process_madvise(2)), and `/proc/PID/pagemap` belongs
    /// to its owner.
    ///
    /// # Errors
    /// [`HostError`]: `ESRCH` if there is no such process, `EACCES` if its pagemap may not be read.
    pub fn open(pid: u32) -> Result<ProcessHost, HostError> {
        let process = sys::pidfd::pidfd_open(pid).map_err(|source| HostError { what: "pidfd_open", source })?;
        let what = "open /proc/PID";
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = open(&*format!("/proc/{pid}"), flags, Mode::empty());
        let folder = folder.map_err(|errno| HostError { what, source: gone_or(errno.into()) })?;
        let pagemap = open_in(&folder, Path::new("pagemap"))
            .map_err(|source| HostError { what: "open /proc/PID/pagemap", source })?;
        let host =
            ProcessHost { pid, process, folder, pagemap, opened_at: Instant::now(), ready_page: ReadyPage::default() };
        // If it still has this number now, it had it when the folder was opened.
        host.alive(what)?;
        Ok(host)
    }

    /// Number of the process, also after its end.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process has ended. A zombie has.
    pub fn has_ended(&self) -> bool {
        let mut process = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        poll(&mut process, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Claims the process for one manager, in whatever process that runs: `None` if another one has it. Two would
    /// undo each other's work, and the guest would wait for both. The claim is a lock on `/proc/PID/pagemap`, which
    /// only a process that may read it can take. Each mount of `/proc` has files of its own: managers in containers
    /// with other mounts do not see the claim.
    ///
    /// # Errors
    /// [`HostError`] if the kernel does not lock that file.
    pub fn claim(&self) -> Result<Option<Claim>, HostError> {
        match Flock::lock(self.open_file("pagemap")?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(Claim { _lock: lock })),
            Err((_, Errno::EAGAIN)) => Ok(None),
            Err((_, errno)) => Err(HostError { what: "flock of /proc/PID/pagemap", source: errno.into() }),
        }
    }

    /// Claims the calling process: a VMM that manages its guest itself, under any program name, keeps other managers
    /// away. `None` if it is claimed already.
    ///
    /// # Errors
    /// The same as for [`ProcessHost::claim`].
    pub fn claim_this_one() -> Result<Option<Claim>, HostError> {
        ProcessHost::open(std::process::id())?.claim()
    }

    /// Opens a file of the process's folder in `/proc`.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno; `ESRCH` once the process has ended.
    pub fn open_file(&self, name: &str) -> Result<File, HostError> {
        open_in(&self.folder, Path::new(name)).map_err(|source| HostError { what: "open a file of /proc/PID", source })
    }

    /// Fails once the process has ended: its page tables then look empty, which is not a result.
    fn alive(&self, what: &'static str) -> Result<(), HostError> {
        if self.has_ended() { Err(HostError { what, source: errno(libc::ESRCH) }) } else { Ok(()) }
    }
}

/// Refuses an operation that is not possible from outside.
pub(crate) fn unsupported<T>(what: &'static str) -> Result<T, HostError> {
    Err(HostError { what, source: errno(libc::ENOTSUP) })
}

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Turns a missing folder of `/proc` into a missing process.
fn gone_or(error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(libc::ENOENT) { errno(libc::ESRCH) } else { error }
}

fn open_in(folder: &OwnedFd, name: &Path) -> io::Result<File> {
    let file = openat(folder, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    Ok(File::from(file))
}

impl Host for ProcessHost {
    fn is_own(&self) -> bool {
        false
    }

    fn now(&self) -> Moment {
        Moment::after_start(self.opened_at.elapsed())
    }

    fn thread_cpu_time(&self) -> Duration {
        sys::clock::thread_cpu_time()
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        let what = match advice {
            Advice::Collapse => "process_madvise(MADV_COLLAPSE)",
            Advice::Cold => "process_madvise(MADV_COLD)",
            Advice::HugePage | Advice::NoHugePage | Advice::PopulateWrite | Advice::PopulateRead => {
                return unsupported("advice other than MADV_COLLAPSE and MADV_COLD to another process");
            }
        };
        let advised = sys::madvise::process_madvise(self.process.as_fd(), start, bytes, advice);
        advised.map_err(|source| HostError { what, source })
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        let what = "PAGEMAP_SCAN of /proc/PID/pagemap";
        sys::pagemap::scan(&self.pagemap, start, bytes, runs).map_err(|source| HostError { what, source })?;
        self.alive(what)
    }

    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        let what = "PAGEMAP_SCAN of /proc/PID/pagemap";
        sys::pagemap::scan_occupied(&self.pagemap, start, bytes, runs).map_err(|source| HostError { what, source })?;
        self.alive(what)
    }

    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError> {
        Ok(covers(&self.read_text("/proc/self/maps")?, start.get(), (start + bytes).get()))
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        let what = "read a kernel file";
        let Some(name) = path.strip_prefix("/proc/self/") else {
            return std::fs::read_to_string(path).map_err(|source| HostError { what, source });
        };
        let mut text = String::new();
        let read = open_in(&self.folder, Path::new(name)).and_then(|mut file| file.read_to_string(&mut text));
        read.map_err(|source| HostError { what, source })?;
        self.alive(what)?;
        Ok(text)
    }

    /// The call takes the process by its number, so the process must still be there afterwards.
    fn nodes_of(&self, pages: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> Result<(), HostError> {
        let what = "move_pages";
        let asked = sys::page_nodes::nodes_of(self.pid, pages, nodes);
        self.alive(what)?;
        asked.map_err(|source| HostError { what, source })
    }

    /// As for [`ProcessHost::nodes_of`]; if the process ends meanwhile and another one gets its number, the pages
    /// of that one keep their contents too.
    fn move_to_node(&self, pages: &[Hva], node: NodeId) -> Result<(), HostError> {
        let what = "move_pages";
        self.alive(what)?;
        let moved = sys::page_nodes::move_to(self.pid, pages, node);
        self.alive(what)?;
        moved.map_err(|source| HostError { what, source })
    }

    fn threads(&self) -> Result<Vec<u32>, HostError> {
        let threads = threads_in(Path::new(&format!("/proc/{}/task", self.pid)));
        self.alive("read /proc/PID/task")?;
        threads
    }

    fn make_huge_page_ready(&self, _: Hva) {
        if let Err(error) = self.ready_page.make(None) {
            tracing::debug!("no huge page was made ready for a collapse: {error}");
        }
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
