//! Common part of the services that answer page faults: the RAM with faults that they receive, the thread that
//! answers until it is stopped, and how a window that may be huge is let go.
//!
//! ```text
//!   ServiceThread ── ends, reads counts ───▶ thread: wait, read, answer, wait ...
//!                                                │
//!   Service    what is done with a touch  ◀──────┤
//!      └─ Faults    window   0    1    2    3    │  Some: registered, and the service's own state of it
//!                          [Some None None Some] ┘  None: let go, the kernel answers
//!                           ▔▔▔▔           ▔▔▔▔  the end unregisters only these: others may be registered elsewhere
//! ```

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use wideleaf_policies::{
    Backing, Bytes, Gpa, GpaRange, Hva, OutcomeResult, PageSize, Refusal, Skip, VmId, WindowIndex,
};

use crate::actuators::collapse::collapse_window;
use crate::giant_page::GIANT;
use crate::host::{Advice, Host};
use crate::region::{GuestRam, RamRange};
use crate::sandboxed::{ThreadWork, thread_starts};
use crate::sensors::host_backing::window_backing;
use crate::sys::userfaultfd::{Message, Mode, Userfaultfd};

/// What a service does with the touches that it receives.
pub(crate) trait Service: Send + 'static {
    /// State of a window on its way.
    type State: Clone + Send;
    /// Counters of the service.
    type Report: ServiceReport;

    /// Registered RAM. Dropped with the service, which lets go of all of it.
    fn faults(&self) -> &Faults<Self::State>;

    /// A thread waits for this page. After the answer, of whatever kind, it no longer waits.
    ///
    /// # Errors
    /// An error after which the service cannot continue and ends.
    fn answer(&mut self, touch: Touch) -> io::Result<()>;

    /// Maximum time without a touch until [`Service::between_answers`] is due.
    fn patience(&self) -> PollTimeout {
        PollTimeout::NONE
    }

    /// Descriptor that becomes readable when another thread has work for [`Service::between_answers`].
    fn has_requests(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Other work, after the answers to touches read together, or at the end of the patience. Threads that touch
    /// memory during it wait.
    fn between_answers(&mut self) {}
}

/// Counters that every service has.
pub(crate) trait ServiceReport: Clone + Default + Send + 'static {
    /// Time from reading a message to the answer, in nanoseconds.
    fn answer_ns(&mut self) -> &mut Histogram<u64>;
    /// Why the service ended before it was stopped, if it did.
    fn gave_up(&mut self) -> &mut Option<String>;
}

/// A histogram without answers yet.
pub(crate) fn answer_times() -> Histogram<u64> {
    /// Maximum recorded time of an answer, in nanoseconds: after a minute the host is hung.
    const ANSWER_NS_MAX: u64 = 60_000_000_000;
    Histogram::new_with_bounds(1, ANSWER_NS_MAX, 3).expect("the bounds are literals")
}

/// A report, shared by the counting service and its readers.
#[derive(Debug)]
pub(crate) struct Counted<R>(Arc<Mutex<R>>);

impl<R> Clone for Counted<R> {
    fn clone(&self) -> Counted<R> {
        Counted(self.0.clone())
    }
}

impl<R: Default> Default for Counted<R> {
    fn default() -> Counted<R> {
        Counted(Arc::default())
    }
}

impl<R: Clone> Counted<R> {
    /// Changes the report.
    pub(crate) fn count(&self, count: impl FnOnce(&mut R)) {
        count(&mut self.0.lock());
    }

    fn now(&self) -> R {
        self.read(R::clone)
    }

    /// Reads a part of the report.
    pub(crate) fn read<T>(&self, part: impl FnOnce(&R) -> T) -> T {
        part(&self.0.lock())
    }
}

/// A service in its thread. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct ServiceThread<R> {
    counted: Counted<R>,
    /// End of the thread's pipe; dropping it is the order to end.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl<R: ServiceReport> ServiceThread<R> {
    /// Starts the thread. If that is not possible, the service is dropped.
    pub(crate) fn start<S: Service<Report = R>>(
        name: &str,
        host: Arc<dyn Host>,
        counted: Counted<R>,
        service: S,
    ) -> io::Result<ServiceThread<R>> {
        let (stopped, stop) = io::pipe()?;
        let of_thread = counted.clone();
        let work = move || {
            thread_starts(ThreadWork::Faults);
            run(host.as_ref(), service, &of_thread, &stopped);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(ServiceThread { counted, stop: Some(stop), thread: Some(thread) })
    }

    /// Counts so far.
    pub(crate) fn report(&self) -> R {
        self.counted.now()
    }

    /// The counters, readable by others.
    pub(crate) fn counted(&self) -> Counted<R> {
        self.counted.clone()
    }

    /// Ends the thread, which lets all memory go, and returns its counts. Waits for the present answer.
    pub(crate) fn stop(mut self, if_it_panicked: &str) -> R {
        if self.end() {
            // The service let go of everything as it unwound.
            self.counted.count(|report| *report.gave_up() = Some(if_it_panicked.to_owned()));
        }
        self.report()
    }
}

impl<R> ServiceThread<R> {
    /// Ends the thread, if it has not ended, and returns whether it panicked (it has printed its message).
    fn end(&mut self) -> bool {
        drop(self.stop.take());
        self.thread.take().is_some_and(|thread| thread.join().is_err())
    }
}

impl<R> Drop for ServiceThread<R> {
    fn drop(&mut self) {
        self.end();
    }
}

fn run<S: Service>(host: &dyn Host, mut service: S, counted: &Counted<S::Report>, stop: &PipeReader) {
    if let Err(error) = serve(host, &mut service, counted, stop) {
        let thread = std::thread::current();
        tracing::error!(
            "{} ends, and the kernel answers faults from now on: {error}",
            thread.name().unwrap_or("a service")
        );
        counted.count(|report| *report.gave_up() = Some(error.to_string()));
    }
}

/// Answers until told to stop.
fn serve<S: Service>(
    host: &dyn Host,
    service: &mut S,
    counted: &Counted<S::Report>,
    stop: &PipeReader,
) -> io::Result<()> {
    let mut messages = Vec::new();
    while wait(&service.faults().uffd, stop, service.has_requests(), service.patience())? {
        service.faults().uffd.read(&mut messages)?;
        for message in messages.drain(..) {
            let (Message::Fault(page) | Message::MinorFault(page)) = message else {
                return Err(io::Error::other(format!("unexpected message {message:?}")));
            };
            let began = host.now();
            let touch = service.faults().find(page)?;
            service.answer(touch)?;
            let took = u64::try_from(host.now().since(began).as_nanos()).unwrap_or(u64::MAX);
            counted.count(|report| report.answer_ns().saturating_record(took));
        }
        service.between_answers();
    }
    Ok(())
}

/// Waits for a message, a request or the end of the time (`true`), or for the order to end (`false`).
fn wait(
    uffd: &Userfaultfd,
    stop: &PipeReader,
    requests: Option<BorrowedFd<'_>>,
    at_most: PollTimeout,
) -> io::Result<bool> {
    let fds = [Some(uffd.as_fd()), Some(stop.as_fd()), requests];
    let mut fds: Vec<_> = fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    match poll(&mut fds, at_most) {
        Ok(_) | Err(Errno::EINTR) => Ok(!fds[1].any().unwrap_or(true)),
        Err(errno) => Err(errno.into()),
    }
}

/// The kernel refused to pass on a range's faults.
#[derive(Debug, thiserror::Error)]
#[error("{vm}: cannot register the RAM at {start} with userfaultfd: {source}")]
pub struct RegisterError {
    /// VM of the RAM.
    pub vm: VmId,
    /// Address at which the RAM is mapped.
    pub start: Hva,
    /// Error of the kernel; `EBUSY` if another userfaultfd has it already.
    pub source: io::Error,
}

/// A touched page, and its window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    region: usize,
    row: usize,
    pub(crate) window: WindowIndex,
    /// Address at which the window is mapped.
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

/// How a window became huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MadeHuge {
    ByFault,
    ByCollapse,
}

/// Number of attempts at a collapse that fails as "busy": the page that another touch has just brought is still on
/// its way to an LRU list, which the attempt itself speeds up. With one attempt up to a third of the windows that two
/// threads touched at the same time stayed at base pages in the NPT lab (Linux 6.12), with four none did.
const COLLAPSE_ATTEMPTS: u32 = 4;

/// All RAM of some VMs, registered with a userfaultfd until each window is let go. Dropping it lets the rest go.
pub(crate) struct Faults<S> {
    uffd: Userfaultfd,
    regions: Vec<Region<S>>,
}

/// One range of RAM.
struct Region<S> {
    vm: VmId,
    /// RAM of the VM, kept mapped while it is registered.
    ram: Arc<GuestRam>,
    range: RamRange,
    /// Kind of its faults.
    mode: Mode,
    /// State by window of the range, ascending; `None` once it is let go.
    states: Vec<Option<S>>,
}

impl<S: Clone> Faults<S> {
    /// Makes touches of `vms` wait for an answer from now on. Every window begins in the same state.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing stays registered.
    ///
    /// # Panics
    /// If the RAM is not whole windows, as all RAM outside hugetlb is.
    pub(crate) fn register(
        uffd: Userfaultfd,
        vms: &[(VmId, Arc<GuestRam>)],
        mode: Mode,
        state: S,
    ) -> Result<Faults<S>, RegisterError> {
        Faults::register_each(uffd, vms, |_| mode, state)
    }

    /// Like [`Faults::register`], with the kind of faults that each VM's RAM has. Windows on a giant page are let go
    /// from the start: all of them are present.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing stays registered.
    pub(crate) fn register_each(
        uffd: Userfaultfd,
        vms: &[(VmId, Arc<GuestRam>)],
        mode: impl Fn(&GuestRam) -> Mode,
        state: S,
    ) -> Result<Faults<S>, RegisterError> {
        let mut faults = Faults { uffd, regions: Vec::new() };
        for (vm, ram, range) in vms.iter().flat_map(|(vm, ram)| ram.ranges().iter().map(move |range| (vm, ram, range)))
        {
            let windows = range.gpa.windows();
            assert_eq!(PageSize::Huge2M.bytes() * windows.len() as u64, range.gpa.bytes(), "no hugetlb: whole windows");
            let is_let_go = |window| ram.claims().is_on_giant_page(window);
            let states = windows.map(|window| (!is_let_go(window)).then(|| state.clone())).collect();
            let region = Region { vm: *vm, ram: ram.clone(), range: *range, mode: mode(ram), states };
            for (start, bytes) in region.stretches(|_| true) {
                let registered = faults.uffd.register(start, bytes, region.mode);
                registered.map_err(|source| RegisterError { vm: *vm, start, source })?;
            }
            faults.regions.push(region);
        }
        Ok(faults)
    }
}

impl<S> Faults<S> {
    /// Finds the window of a page.
    ///
    /// # Errors
    /// If the page is not RAM: the kernel reported a fault that was not requested.
    pub(crate) fn find(&self, page: Hva) -> io::Result<Touch> {
        let found = self.regions.iter().enumerate().find_map(|(region, Region { range, .. })| {
            let offset = page.get().checked_sub(range.hva.get()).filter(|offset| *offset < range.gpa.bytes().get())?;
            let row = offset / PageSize::Huge2M.bytes().get();
            let start = range.hva + PageSize::Huge2M.bytes() * row;
            let window = WindowIndex::containing(range.gpa.start() + (start - range.hva));
            Some(Touch { region, row: row as usize, window, start, page })
        });
        found.ok_or_else(|| io::Error::other(format!("a fault at {page}, outside of all RAM")))
    }

    /// A window's first page, as if it had been touched; `None` if it is not RAM of this VM.
    pub(crate) fn find_window(&self, vm: VmId, window: WindowIndex) -> Option<Touch> {
        let is_there = |region: &&Region<S>| region.vm == vm && region.range.gpa.contains(window.start());
        let range = self.regions.iter().find(is_there)?.range;
        self.find(range.hva + (window.start() - range.gpa.start())).ok()
    }

    /// State of the window; `None` once it has been let go.
    pub(crate) fn state(&self, touch: Touch) -> Option<&S> {
        self.regions[touch.region].states[touch.row].as_ref()
    }

    /// Sets the state of the window, unless it is let go, which is final.
    pub(crate) fn set_state(&mut self, touch: Touch, state: S) {
        if let Some(before) = self.state_mut(touch) {
            *before = state;
        }
    }

    /// State of the window, to be changed.
    pub(crate) fn state_mut(&mut self, touch: Touch) -> Option<&mut S> {
        self.regions[touch.region].states[touch.row].as_mut()
    }

    pub(crate) fn vm(&self, touch: Touch) -> VmId {
        self.regions[touch.region].vm
    }

    pub(crate) fn ram(&self, touch: Touch) -> &Arc<GuestRam> {
        &self.regions[touch.region].ram
    }

    /// Number of the touched range, in the order in which the ranges were registered.
    pub(crate) fn region(&self, touch: Touch) -> usize {
        touch.region
    }

    /// First guest-physical address of the giant around a touch, if all of it is RAM.
    pub(crate) fn giant(&self, touch: Touch) -> Option<Gpa> {
        let range = self.regions[touch.region].range.gpa;
        let giant = touch.window.start().align_down(PageSize::Giant1G);
        (range.start() <= giant && giant + GIANT <= range.end()).then_some(giant)
    }

    /// Whether no window of a giant was let go, and all fulfil `is_so`.
    pub(crate) fn is_all_of_giant(&self, touch: Touch, giant: Gpa, is_so: impl Fn(&S) -> bool) -> bool {
        let region = &self.regions[touch.region];
        region.states[region.rows_of_giant(giant)].iter().all(|state| state.as_ref().is_some_and(&is_so))
    }

    /// Counts the windows of a giant as let go, because another mapping that was never registered has replaced theirs.
    pub(crate) fn giant_was_replaced(&mut self, touch: Touch, giant: Gpa) {
        let region = &mut self.regions[touch.region];
        let rows = region.rows_of_giant(giant);
        region.states[rows].fill_with(|| None);
    }

    /// Address at which a giant of the touched range is mapped.
    pub(crate) fn giant_start(&self, touch: Touch, giant: Gpa) -> Hva {
        let range = self.regions[touch.region].range;
        range.hva + (giant - range.gpa.start())
    }

    /// Wakes the threads that wait anywhere in a giant; they retry.
    pub(crate) fn wake_giant(&self, touch: Touch, giant: Gpa) -> io::Result<()> {
        self.uffd.wake(self.giant_start(touch, giant), GIANT)
    }

    /// The userfaultfd, for mapping pages and waking threads.
    pub(crate) fn uffd(&self) -> &Userfaultfd {
        &self.uffd
    }

    /// Makes touches of a window that was let go wait for an answer again: from now on of its pages that are missing or
    /// not mapped, and of no others.
    ///
    /// # Errors
    /// Error of the kernel; `EBUSY` if another userfaultfd has the window. It is let go as before then.
    pub(crate) fn take_back(&mut self, touch: Touch, state: S) -> io::Result<()> {
        let region = &mut self.regions[touch.region];
        if region.states[touch.row].is_none() {
            self.uffd.register(touch.start, PageSize::Huge2M.bytes(), region.mode)?;
        }
        region.states[touch.row] = Some(state);
        Ok(())
    }

    /// Wakes the threads that wait anywhere in the window of the touch; they retry.
    pub(crate) fn wake_window(&self, touch: Touch) -> io::Result<()> {
        self.uffd.wake(touch.start, PageSize::Huge2M.bytes())
    }

    /// Wakes the threads that wait for the touched page; they retry.
    pub(crate) fn wake(&self, touch: Touch) -> io::Result<()> {
        self.uffd.wake(touch.page, PageSize::Base4K.bytes())
    }

    /// Neighbouring windows that are not let go and fulfil `is_so`, as one range of addresses each.
    pub(crate) fn stretches(&self, is_so: impl Fn(&S) -> bool + Copy) -> impl Iterator<Item = (Hva, Bytes)> {
        self.regions.iter().flat_map(move |region| region.stretches(is_so))
    }

    /// Lets the kernel answer the window's touches from now on, and wakes waiting threads. Harmless if
    /// it does already.
    pub(crate) fn let_go(&mut self, touch: Touch) -> io::Result<()> {
        let state = &mut self.regions[touch.region].states[touch.row];
        if state.is_some() {
            self.uffd.unregister(touch.start, PageSize::Huge2M.bytes())?;
            *state = None;
        }
        Ok(())
    }

    /// Lets a window go that should get a huge page at its next fault, and checks whether it did.
    ///
    /// # Errors
    /// The name under which a failure is counted.
    pub(crate) fn let_go_huge(&mut self, host: &dyn Host, touch: Touch) -> Result<MadeHuge, &'static str> {
        self.let_go(touch).map_err(|_| "refused_release")?;
        // A write by the touch itself would do; but a read brings the huge zero page, which older kernels split at
        // the first write. Besides, the page must be there before it can be checked.
        if let Err(error) = host.advise(touch.page, PageSize::Base4K.bytes(), Advice::PopulateWrite) {
            tracing::debug!("{}: {error}", touch.window);
        }
        let range = self.regions[touch.region].range;
        if window_backing(host, range, None, touch.window).is_ok_and(|now| now.backing == Backing::Huge2M) {
            return Ok(MadeHuge::ByFault);
        }
        let busy = OutcomeResult::Refused(Refusal::Busy);
        let mut attempts = (0..COLLAPSE_ATTEMPTS).map(|_| collapse_window(host, range, touch.window).result);
        match attempts.find(|result| *result != busy).unwrap_or(busy) {
            OutcomeResult::Done => Ok(MadeHuge::ByCollapse),
            OutcomeResult::Skipped(Skip::AlreadyDone) => Ok(MadeHuge::ByFault),
            refused => Err(refused.name()),
        }
    }

    /// Unregisters only what is not yet let go. Before Linux 6.17, unregistering more would take it from the
    /// userfaultfd that has registered it since, and from 6.17 on it would be refused. Wakes all waiting threads,
    /// also those of a touch that was on its way when its window was let go. Closing the descriptor would do the
    /// same, but only once no forked child holds a copy of it.
    fn let_all_go(&mut self) {
        for region in &mut self.regions {
            for (start, bytes) in region.stretches(|_| true) {
                if let Err(error) = self.uffd.unregister(start, bytes) {
                    tracing::warn!("{}: cannot unregister {bytes} at {start} from userfaultfd: {error}", region.vm);
                }
            }
            region.states.fill_with(|| None);
            if let Err(error) = self.uffd.wake(region.range.hva, region.range.gpa.bytes()) {
                tracing::warn!(
                    "{}: cannot wake the threads that wait in {}: {error}",
                    region.vm,
                    region.range.gpa.start()
                );
            }
        }
    }
}

impl<S> Drop for Faults<S> {
    fn drop(&mut self) {
        self.let_all_go();
    }
}

impl<S> Region<S> {
    /// Rows of the windows of a giant that lies wholly in the range.
    fn rows_of_giant(&self, giant: Gpa) -> std::ops::Range<usize> {
        let first = (giant - self.range.gpa.start()).pages(PageSize::Huge2M) as usize;
        first..first + GIANT.pages(PageSize::Huge2M) as usize
    }

    fn stretches(&self, is_so: impl Fn(&S) -> bool + Copy) -> impl Iterator<Item = (Hva, Bytes)> {
        let is_so = move |state: &Option<S>| state.as_ref().is_some_and(is_so);
        let mut next = self.range.hva;
        self.states.chunk_by(move |a, b| is_so(a) == is_so(b)).filter_map(move |run| {
            let (start, bytes) = (next, PageSize::Huge2M.bytes() * run.len() as u64);
            next = start + bytes;
            is_so(&run[0]).then_some((start, bytes))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use wideleaf_policies::units::mib;

    const VM: VmId = VmId(3);

    fn ram(windows: u64) -> Arc<GuestRam> {
        let range = GpaRange::new(Gpa::new(0), mib(2) * windows).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        GuestRam::map(&[range], backing).expect("memory")
    }

    /// RAM of which these windows are let go.
    fn faults(ram: &Arc<GuestRam>, let_go: &[u64]) -> Option<Faults<()>> {
        let uffd = Userfaultfd::open().inspect_err(|error| println!("skipped: {error}")).ok()?;
        let mut faults = Faults::register(uffd, &[(VM, ram.clone())], Mode::Missing, ()).expect("it is free");
        for window in let_go {
            let touch = faults.find_window(VM, WindowIndex::new(*window)).expect("it is RAM");
            faults.let_go(touch).expect("it is registered");
        }
        Some(faults)
    }

    #[test]
    fn windows_that_are_not_let_go_are_found_in_stretches() {
        // window  0  1  2  3  4  5
        //         x  -  -  x  x  -      -: let go
        let ram = ram(6);
        let Some(faults) = faults(&ram, &[1, 2, 5]) else { return };
        let stretches: Vec<_> = faults.stretches(|()| true).collect();
        assert_eq!(stretches, [(ram.base(), mib(2)), (ram.base() + mib(6), mib(4))]);
        assert_eq!(faults.stretches(|()| false).count(), 0);
        assert!(
            faults.find_window(VmId(4), WindowIndex::new(0)).is_none() && faults.find(ram.base() + mib(12)).is_err()
        );
    }

    #[test]
    fn a_window_that_was_let_go_is_taken_back_unless_another_has_it() {
        let (ram, page) = (ram(3), PageSize::Base4K.bytes());
        let Some(mut first) = faults(&ram, &[0, 1]) else { return };
        let second = Userfaultfd::open().expect("the first was available");
        second.register(ram.base() + mib(2), mib(2), Mode::Missing).expect("it was let go");
        let at = |faults: &Faults<()>, window| faults.find_window(VM, WindowIndex::new(window)).expect("it is RAM");
        let (free, of_second) = (at(&first, 0), at(&first, 1));
        first.take_back(free, ()).expect("nothing else has it");
        let busy = first.take_back(of_second, ()).expect_err("the second has it");
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
        assert!(first.state(free).is_some() && first.state(of_second).is_none());
        first.uffd().zero_page(ram.base(), page).expect("it is registered here");
        second.zero_page(ram.base() + mib(2), page).expect("it is registered there still");
        drop(first);
        second.register(ram.base(), mib(2), Mode::Missing).expect("the first has let go of it");
    }

    #[test]
    fn a_window_registered_elsewhere_after_it_was_let_go_stays_registered() {
        // window     0    1    2    3
        // first     [x]   -    -   [x]     let go at the end
        // second          [x   x]          still registered then
        let (ram, page) = (ram(4), PageSize::Base4K.bytes());
        let Some(mut first) = faults(&ram, &[1, 2]) else { return };
        let others = || Userfaultfd::open().expect("the first was available");
        let second = others();
        second.register(ram.base() + mib(2), mib(4), Mode::Missing).expect("it was let go");
        first.let_all_go();
        second.zero_page(ram.base() + mib(2), page).expect("it is registered there still");
        second.zero_page(ram.base() + mib(4), page).expect("it is registered there still");
        for start in [ram.base(), ram.base() + mib(6)] {
            others().register(start, mib(2), Mode::Missing).expect("the first has let go of it");
        }
    }
}
