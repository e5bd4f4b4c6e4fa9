//! What services that answer page faults have in common: a thread that ends when told to, RAM by window, and how a window
//! that may be huge is let go.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_policies::{Backing, GpaRange, Hva, OutcomeResult, PageSize, Refusal, Skip, VmId, WindowIndex};

use crate::actuators::collapse::collapse_window;
use crate::host::{Advice, Host};
use crate::region::{GuestRam, RamRange};
use crate::sensors::host_backing::window_backing;
use crate::sys::userfaultfd::Userfaultfd;

/// A thread that answers faults. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct FaultThread {
    /// Dropping it is the order to end.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl FaultThread {
    /// Runs `work` with what becomes readable when the thread has to end.
    pub(crate) fn spawn(name: &str, work: impl FnOnce(&PipeReader) + Send + 'static) -> io::Result<FaultThread> {
        let (stopped, stop) = io::pipe()?;
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&stopped))?;
        Ok(FaultThread { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends the thread, if it has not ended, and says whether it panicked (it has printed its message).
    pub(crate) fn end(&mut self) -> bool {
        drop(self.stop.take());
        self.thread.take().is_some_and(|thread| thread.join().is_err())
    }
}

impl Drop for FaultThread {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits for a message or until the time is over (`true`), or for the order to end (`false`).
pub(crate) fn wait(uffd: &Userfaultfd, stop: &PipeReader, at_most: PollTimeout) -> io::Result<bool> {
    let mut fds = [uffd.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    match poll(&mut fds, at_most) {
        Ok(_) | Err(Errno::EINTR) => Ok(!fds[1].any().unwrap_or(true)),
        Err(errno) => Err(errno.into()),
    }
}

/// One range of RAM, and the state of each of its windows.
pub(crate) struct Watched<S> {
    pub(crate) vm: VmId,
    /// Keeps the mapping alive while it is registered.
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) range: RamRange,
    /// Whether it is ours to unregister: before Linux 6.17 any userfaultfd could unregister another's.
    pub(crate) is_registered: bool,
    /// By window of the range, ascending.
    pub(crate) states: Vec<S>,
}

impl<S: Clone> Watched<S> {
    /// Every range of `ram`, all windows in the same state, not registered yet.
    pub(crate) fn all(vm: VmId, ram: &Arc<GuestRam>, state: S) -> impl Iterator<Item = Watched<S>> {
        ram.ranges().iter().map(move |range| {
            let windows = range.gpa.windows().len();
            assert_eq!(PageSize::Huge2M.bytes() * windows as u64, range.gpa.bytes(), "no hugetlb: whole windows");
            Watched { vm, ram: ram.clone(), range: *range, is_registered: false, states: vec![state.clone(); windows] }
        })
    }
}

/// A touched page, and its window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    pub(crate) region: usize,
    pub(crate) row: usize,
    pub(crate) window: WindowIndex,
    /// Where the window is mapped.
    pub(crate) start: Hva,
    pub(crate) page: Hva,
}

impl Touch {
    /// The touched page as the guest sees it.
    pub(crate) fn gpa(&self) -> GpaRange {
        let start = self.window.start() + (self.page - self.start);
        GpaRange::new(start, PageSize::Base4K.bytes()).expect("a page of RAM does not reach the end of 64 bits")
    }
}

/// Which window of which region a page is of.
///
/// # Errors
/// Where it is no RAM: the kernel says what was not asked for.
pub(crate) fn find<S>(regions: &[Watched<S>], page: Hva) -> io::Result<Touch> {
    let found = regions.iter().enumerate().find_map(|(region, Watched { range, .. })| {
        let offset = page.get().checked_sub(range.hva.get()).filter(|offset| *offset < range.gpa.bytes().get())?;
        let row = offset / PageSize::Huge2M.bytes().get();
        let start = range.hva + PageSize::Huge2M.bytes() * row;
        let window = WindowIndex::containing(range.gpa.start() + (start - range.hva));
        Some(Touch { region, row: row as usize, window, start, page })
    });
    found.ok_or_else(|| io::Error::other(format!("a fault at {page}, outside of all RAM")))
}

/// Unregisters all that is registered and wakes whoever waits. Closing the descriptor would do the same, but only once no
/// child that was forked holds a copy of it.
pub(crate) fn let_all_go<S>(uffd: &Userfaultfd, regions: &[Watched<S>]) {
    for region in regions.iter().filter(|region| region.is_registered) {
        let (start, bytes) = (region.range.hva, region.range.gpa.bytes());
        if let Err(error) = uffd.unregister(start, bytes).and_then(|()| uffd.wake(start, bytes)) {
            tracing::warn!("{}: unregistering {start} from userfaultfd: {error}", region.vm);
        }
    }
}

/// What made a window huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Brought {
    ByFault,
    ByCollapse,
}

/// How often a collapse is tried that is answered "busy": the page that another toucher has just brought is still on
/// its way to an LRU list, which the attempt itself speeds up. With one attempt up to a third of the windows that
/// two threads touched at once stayed at base pages in the NPT lab (Linux 6.12), with four none did.
const COLLAPSE_ATTEMPTS: u32 = 4;

/// Lets a window go whose next fault should bring a huge page, and looks whether it did.
///
/// # Errors
/// The name under which it is counted that the window is not huge.
pub(crate) fn let_go_huge(
    host: &dyn Host,
    uffd: &Userfaultfd,
    range: RamRange,
    touch: Touch,
) -> Result<Brought, &'static str> {
    uffd.unregister(touch.start, PageSize::Huge2M.bytes()).map_err(|_| "refused_release")?;
    // The touch itself would do, if it is a write: a read brings the huge zero page, which older kernels split at the
    // first write. And somebody has to wait until the page is there before it can be looked for.
    if let Err(error) = host.advise(touch.page, PageSize::Base4K.bytes(), Advice::PopulateWrite) {
        tracing::debug!("{}: {error}", touch.window);
    }
    if window_backing(host, range, None, touch.window).is_ok_and(|now| now.backing == Backing::Huge2M) {
        return Ok(Brought::ByFault);
    }
    let busy = OutcomeResult::Refused(Refusal::Busy);
    let mut attempts = (0..COLLAPSE_ATTEMPTS).map(|_| collapse_window(host, range, touch.window).result);
    match attempts.find(|result| *result != busy).unwrap_or(busy) {
        OutcomeResult::Done => Ok(Brought::ByCollapse),
        OutcomeResult::Skipped(Skip::AlreadyDone) => Ok(Brought::ByFault),
        refused => Err(refused.name()),
    }
}
