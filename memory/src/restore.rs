//! Restore: guest RAM gets its saved contents while the guest already runs, on huge pages where it had them
//! (`userfaultfd(2)`, missing faults; `UFFDIO_MOVE`, Linux 6.8).
//!
//! ```text
//!   a thread touches a missing page, and waits                    background: recorded order, heat, address
//!        │                                                             │
//!        └─────────────▶ claim the window (window_states.rs: one thread) ◀┘
//!                                  │
//!               large              ▼               sparse
//!        ┌────────────── how was it, is it worth it? ──────────────┐
//!        ▼                                                         ▼
//!   read into a ready huge page, checked                read into a buffer, checked
//!   MADV_HUGEPAGE, drop the empty page table            UFFDIO_COPY of each run of stored pages
//!   UFFDIO_MOVE: the page goes in whole                 holes stay holes
//!        └──────────────▶ let the window go, wake its threads ◀────┘
//! ```
//!
//! **Two traps.** A window that waits must not be marked `MADV_HUGEPAGE`: the kernel would make and clear a huge page
//! at each touch before it asks. But its touch made a page table, under which a huge page would be split. So the window
//! is marked right before its page table is dropped: a second touch in between makes no new table.
//!
//! **Other kernels and memory.**
//!
//! | RAM | pages |
//! |---|---|
//! | anonymous | huge by a move; base by a copy |
//! | anonymous, without `UFFDIO_MOVE` or free huge pages | base by a copy, then collapsed by an idle thread |
//! | anonymous, kernel that keeps empty page tables (before 6.14) | the same for touched windows, a move for others |
//! | memfd | base by a copy; the manager collapses later, in its own time |
//! | hugetlb of 2 MiB | whole pages by a copy |
//! | hugetlb of 1 GiB | refused: a touch would wait for a gibibyte |
//! | reserved frames | refused: that service has the userfaultfd of its RAM |
//!
//! A service that decides first touches ([`crate::first_touch`], [`crate::reserved_frames`]) registers all RAM, so it
//! cannot start before the restore has finished (`EBUSY`), and a restore cannot start after it. Actuators and sensors
//! of the manager leave a window alone that is not filled ([`crate::claims`]).
//!
//! **Page by page.** For comparison, and for hosts without moves, [`RestoreConfig::is_page_by_page`] answers a touch
//! with a copy of its page of 4 KiB alone. Its window still waits, and the background copies the rest of it: a copy
//! never replaces a page that is there. [`mapped`] is another way, without any thread: what the guest writes never
//! becomes huge.
//!
//! **Nothing wrong is ever seen.** Pages become visible only after their checksums were compared. A window that cannot
//! be read is named ([`FillFailure`]), and threads that touch it stay asleep. They must not be woken while a device
//! could still write their memory elsewhere: the process ends with them asleep.
//!
//! **Threads.** All of them answer touches; one at a time also fills the background, and looks for a touch before each
//! window. While the guest waits for a window that this thread fills, a second one fills the next. A thread that panics
//! is named and ends, unless it is the last one; a thread that does not come back from a read is named, and another one
//! reads its window. Each calls [`crate::sandboxed`]'s hook with
//! [`ThreadWork::Faults`](crate::sandboxed::ThreadWork::Faults) and needs no call beyond those of that kind:
//! `ioctl` of the userfaultfd and of the pagemap, `madvise`, `mmap`, `munmap`, `poll`, `read`, and `pread64` for the
//! file. No serving thread touches guest RAM. [`SavedRam::read`] must not, either.

use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use wideleaf_policies::{Bytes, PageSet, PageSize, PerTenThousand, WindowIndex};

use crate::backing::BackingKind;
use crate::host::{Host, HostError};
use crate::region::{GuestRam, RamHasOwner};
pub use crate::sys::userfaultfd::UserfaultfdError;

mod background;
mod filling;
mod kernel_calls;
pub mod mapped;
mod preparing;
mod report;
mod rows;
mod shared;
mod slots;
#[cfg(test)]
mod tests;
mod window_states;
mod worker;

pub use background::Background;
pub use report::{FillFailure, Progress, RestoreReport};

use kernel_calls::LinuxCalls;
use preparing::{Contents, check_backing, open, prepare};
use shared::Shared;

/// What is stored of one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedWindow {
    /// Pages that are stored; all others are zero. Without any, the whole window reads zero.
    pub pages: PageSet,
    /// Whether the window was on a huge page, or on a part of a giant page.
    pub was_huge: bool,
    /// Share of the samples in which the guest touched the window; 0 if it is not known.
    pub heat: PerTenThousand,
    /// Whether RAM has the contents of all other pages already ([`Restorer::start_partial`]): they stay.
    pub has_others: bool,
}

/// Saved RAM of one VM.
pub trait SavedRam: Send + Sync {
    /// What is stored of a window. Called for each window at the start, so it answers from memory.
    fn window(&self, window: WindowIndex) -> SavedWindow;

    /// Reads the stored pages of a window to their places in `into` (2 MiB), checked against their checksums; other
    /// bytes of `into` stay as they are. Called by several threads at the same time, for a window that guests wait
    /// for: it reads guest RAM nowhere, since its own thread would have to answer.
    ///
    /// # Errors
    /// [`ReadError`], with the window and the file. The window is not filled then.
    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError>;

    /// Reads one stored page of a window to `into` (4 KiB), as [`SavedRam::read`] does. Unless it is replaced, it reads
    /// the whole window.
    ///
    /// # Errors
    /// [`ReadError`], as above.
    fn read_page(&self, window: WindowIndex, page: u16, into: &mut [u8]) -> Result<(), ReadError> {
        let mut whole = vec![0; PageSize::Huge2M.bytes().as_usize()];
        self.read(window, &mut whole)?;
        into.copy_from_slice(&whole[filling::place_of(page)]);
        Ok(())
    }
}

/// Why stored pages of a window cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A page does not have the contents that were saved.
    #[error(
        "page {page} of the extent of {window} in {file} is damaged: its checksum is another; restore another copy"
    )]
    Damaged {
        /// Window of the page.
        window: WindowIndex,
        /// Number of the page in its window, 0 to 511.
        page: u16,
        /// Name of the file.
        file: String,
    },
    /// Another process has the pages, and does not send them.
    #[error("{from} does not send its pages: {why}")]
    NotSent {
        /// Window of the pages.
        window: WindowIndex,
        /// Name of the sender.
        from: String,
        /// Reason and remedy.
        why: String,
    },
    /// The file cannot be read.
    #[error("cannot read the extent of {window} from {file}: {source}")]
    Io {
        /// Window of the extent.
        window: WindowIndex,
        /// Name of the file.
        file: String,
        /// Error of the read.
        source: io::Error,
    },
}

/// Called once for each window that cannot be filled.
pub type OnFailure = Box<dyn Fn(&FillFailure) + Send + Sync>;

/// Options of a restore.
pub struct RestoreConfig {
    /// Number of threads that answer touches. One more fills the background, unless that is off.
    pub threads: NonZeroUsize,
    /// Speed at which windows are filled that no thread waits for.
    pub background: Background,
    /// The background begins once this is set; at once without it. Touches are answered before, too.
    pub background_from: Option<Arc<AtomicBool>>,
    /// Windows that the background fills first, in this order: the recorded touches of an earlier restore.
    pub first: Vec<WindowIndex>,
    /// Whether to record the order of first touches ([`Restorer::first_touches`]). The background then begins when no
    /// window was touched for the first time for a second: a window that it fills is not touched first any more.
    pub record: bool,
    /// Whether huge pages may be moved in (`UFFDIO_MOVE`). Without, as on an older kernel, all windows get base pages
    /// by copies, and windows that are to be huge are collapsed by idle threads.
    pub may_move: bool,
    /// Whether pages are copied one by one, each of 4 KiB (`UFFDIO_COPY`), as other VMMs do: a touch is answered with
    /// its page alone, the background copies a window page by page, and no window is made huge. Windows are complete
    /// only with the background.
    pub is_page_by_page: bool,
    /// Time after which a read counts as lost, and another thread reads the window.
    pub overdue_after: Duration,
    /// Called by a serving thread for each window that cannot be filled. It must not wait, and must not touch the RAM.
    pub on_failure: Option<OnFailure>,
}

impl Default for RestoreConfig {
    /// Two threads: while one waits for the disk, the other answers. 5 s: longer than any disk that works takes for
    /// 2 MiB.
    fn default() -> RestoreConfig {
        RestoreConfig {
            threads: NonZeroUsize::new(2).expect("two threads"),
            background: Background::Unlimited,
            background_from: None,
            first: Vec::new(),
            record: false,
            may_move: true,
            is_page_by_page: false,
            overdue_after: Duration::from_secs(5),
            on_failure: None,
        }
    }
}

impl std::fmt::Debug for RestoreConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RestoreConfig { threads, background, first, record, .. } = self;
        write!(f, "RestoreConfig {{ {threads} threads, {background:?}, {} first, record: {record} }}", first.len())
    }
}

/// Why RAM cannot be filled while its guest runs.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// hugetlb RAM of pages of 1 GiB.
    #[error("cannot restore into hugetlb pages of 1 GiB: a touch would wait for all of it; use --host-page 2m")]
    GiantPages,
    /// hugetlb RAM, page by page.
    #[error("cannot restore into hugetlb pages by copies of 4 KiB: they come whole; use --restore-pages auto")]
    HugetlbByPage,
    /// RAM on reserved frames.
    #[error("cannot restore into reserved frames: another service answers their faults; choose another --policy")]
    ReservedFrames,
    /// RAM with contents, in a file or in a pool.
    #[error("cannot complete RAM while its guest runs: it is not anonymous; use --backing anon")]
    NotAnonymous,
    /// The RAM is in use.
    #[error("cannot restore into RAM that has pages already, in the range from {0}: map new RAM")]
    NotEmpty(WindowIndex),
    /// The words of the RAM have an owner in this process.
    #[error(transparent)]
    Owned(#[from] RamHasOwner),
    /// No userfaultfd is available.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The kernel refused to pass on faults of the RAM.
    #[error(
        "cannot register {bytes} of RAM from {window} on with userfaultfd: {source}; it is busy if a policy decides \
         at the first touch: choose another --policy"
    )]
    Register {
        /// First window of the stretch.
        window: WindowIndex,
        /// Size of the stretch.
        bytes: Bytes,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel refused another call.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No thread could be started, or no pipe made to stop it.
    #[error("cannot start the threads that restore RAM: {0}")]
    Thread(#[source] io::Error),
}

/// A statement of the caller: no vCPU, no device and no other thread of this process reads or writes the RAM any more,
/// not even in a call that has begun. A thread that still did would read zeroes where contents are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestIsGone;

/// A restore in its threads.
///
/// Once it has [finished](Restorer::is_finished), dropping it changes nothing. Before that, the memory of the guest is
/// not complete without it: dropping it leaves every missing window registered with the userfaultfd for as long as the
/// process lives, so that a thread that touches one waits for ever and never reads wrong bytes. A caller that wants
/// such threads to end says so: [`Restorer::abandon`].
pub struct Restorer {
    shared: Arc<Shared>,
    kernel: Weak<LinuxCalls>,
    threads: Vec<JoinHandle<()>>,
}

impl Restorer {
    /// Registers the windows of `ram` with something stored, and starts the threads that fill them. The guest may run
    /// as soon as this returns: after some milliseconds, the more the more windows are registered.
    ///
    /// Nothing may have touched the RAM before. Other processes may not map it: they would read zeroes where contents
    /// are missing. Windows without anything stored are left to the kernel, as far as that takes few mappings.
    ///
    /// # Errors
    /// [`RestoreError`]; the RAM is then as before. Needs a userfaultfd that sees kernel faults
    /// ([`UserfaultfdError::NotPermitted`]) and `PAGEMAP_SCAN` (Linux 6.7).
    pub fn start(
        ram: Arc<GuestRam>,
        saved: Arc<dyn SavedRam>,
        config: RestoreConfig,
    ) -> Result<Restorer, RestoreError> {
        let (shared, kernel) = prepare(ram, saved, config, Contents::None)?;
        Restorer::start_threads(Arc::new(shared), Arc::new(kernel))
    }

    /// The same for anonymous RAM that has contents already, except for the stored pages: what RAM has in their place
    /// is dropped. A window of which all pages are stored is dropped whole, and comes onto a huge page again; of
    /// another one, [`SavedWindow::has_others`] says so, and its other pages can be used while the stored ones are
    /// missing.
    ///
    /// No thread may use the RAM until this returns.
    ///
    /// # Errors
    /// [`RestoreError`]; stored pages then read zero.
    pub fn start_partial(
        ram: Arc<GuestRam>,
        saved: Arc<dyn SavedRam>,
        config: RestoreConfig,
    ) -> Result<Restorer, RestoreError> {
        let (shared, kernel) = prepare(ram, saved, config, Contents::Others)?;
        Restorer::start_threads(Arc::new(shared), Arc::new(kernel))
    }

    /// Whether [`Restorer::start_partial`] works with this RAM on this host, as far as that is known before.
    ///
    /// # Errors
    /// [`RestoreError`], as there.
    pub fn check_partial(ram: &GuestRam) -> Result<(), RestoreError> {
        check_backing(ram)?;
        if ram.backing().kind() != BackingKind::Anon {
            return Err(RestoreError::NotAnonymous);
        }
        open(ram)?;
        Ok(())
    }

    /// Whether [`Restorer::start`] works with RAM of this kind.
    ///
    /// # Errors
    /// [`RestoreError`], as there.
    pub fn check_kind(ram: &GuestRam) -> Result<(), RestoreError> {
        check_backing(ram)
    }

    fn start_threads(shared: Arc<Shared>, kernel: Arc<LinuxCalls>) -> Result<Restorer, RestoreError> {
        let mut restorer = Restorer { shared, kernel: Arc::downgrade(&kernel), threads: Vec::new() };
        if restorer.shared.states.left() == 0 {
            restorer.shared.finish(kernel.as_ref());
        } else {
            for number in 0..restorer.shared.workers() {
                let started = worker::start(number, restorer.shared.clone(), kernel.clone());
                match started {
                    Ok(thread) => restorer.threads.push(thread),
                    Err(error) => {
                        restorer.abandon(GuestIsGone);
                        return Err(RestoreError::Thread(error));
                    }
                }
            }
        }
        let shared = &restorer.shared;
        shared.counted.count(|report| report.start = shared.since_start());
        Ok(restorer)
    }

    /// Counters so far.
    pub fn report(&self) -> RestoreReport {
        self.shared.counted.read(Clone::clone)
    }

    /// Windows and bytes so far.
    pub fn progress(&self) -> Progress {
        self.shared.counted.read(|report| report.progress)
    }

    /// The first window that cannot be filled, if there is one: the guest must end with this message.
    pub fn failure(&self) -> Option<FillFailure> {
        self.shared.counted.read(|report| report.failures.first().cloned())
    }

    /// Windows in the order of their first touches, as far as a thread had to wait for them. Empty unless
    /// [`RestoreConfig::record`] was set.
    pub fn first_touches(&self) -> Vec<WindowIndex> {
        self.shared.first_touches()
    }

    /// Whether every stored window is filled, the userfaultfd is closed and all threads have ended. Never true if a
    /// window has failed.
    pub fn is_finished(&self) -> bool {
        let has_failed = self.progress().failed_windows > 0;
        self.shared.is_done() && !has_failed && self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Whether all of RAM has its contents and no window of it is registered any more. A thread that does not come back
    /// from a read, or that still collapses windows, changes nothing about that, but keeps
    /// [`Restorer::is_finished`] from being true.
    pub fn is_filled(&self) -> bool {
        let Progress { stored_windows, filled_windows, .. } = self.progress();
        self.shared.has_all_let_go() && filled_windows == stored_windows
    }

    /// Ends a restore after its guest, finished or not: lets all RAM go and wakes all threads that wait in it.
    /// They read zeroes where contents are missing.
    pub fn abandon(mut self, _: GuestIsGone) -> RestoreReport {
        self.end();
        let registered = self.shared.states.close();
        if let Some(kernel) = self.kernel.upgrade() {
            self.shared.let_go_of(kernel.as_ref(), &registered);
        }
        registered.iter().for_each(|row| self.shared.ram.claims().filled(self.shared.rows.window(*row)));
        self.shared.has_let_go();
        self.report()
    }

    /// The same, except after a window that could not be filled: threads that touched it must not read zeroes, so they
    /// and all else of this stay as they are until the process ends.
    pub fn abandon_or_leave(self, gone: GuestIsGone) -> RestoreReport {
        if self.failure().is_none() { self.abandon(gone) } else { self.leave() }
    }

    /// Leaves threads that wait in the RAM asleep, and all else of this as it is, until the process ends.
    pub fn leave(self) -> RestoreReport {
        let report = self.report();
        std::mem::forget(self);
        report
    }

    /// Ends the threads, and waits for those that are not in a read that does not end.
    fn end(&mut self) {
        self.shared.stop();
        /// Maximum time for all threads: a thread in a read that does not end is left to the process, and can do
        /// nothing to the RAM any more.
        const ENDS_WITHIN: Duration = Duration::from_secs(5);
        let deadline = self.shared.host.now() + ENDS_WITHIN;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && self.shared.host.now() < deadline {
                self.shared.host.sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // It has reported its panic.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Restorer {
    fn drop(&mut self) {
        // Kept until it is known that no window is registered any more: with the last holder the userfaultfd is closed,
        // and waiting threads would continue with zeroes.
        let kernel = self.kernel.upgrade();
        self.shared.states.close();
        self.end();
        if !self.shared.has_all_let_go() {
            std::mem::forget(kernel);
        }
    }
}

impl std::fmt::Debug for Restorer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Restorer({:?})", self.report())
    }
}
