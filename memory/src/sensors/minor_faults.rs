//! Detects which windows of memfd and hugetlb RAM the guest touches, for reading or writing. The sensor unmaps a few
//! windows at a time (the file keeps the pages): huge pages whole, and a few pages of a window on base pages
//! ([`wideleaf_policies::sampled_pages`]). The first touch of each is a minor fault that a userfaultfd reports (Linux
//! 5.14). Nothing is copied or moved, and huge pages stay whole.
//!
//! ```text
//!               start: watch, unmap            a touch: unwatch, wake
//!   in place ───────────────────────▶ away ─────────────────────────────▶ touched
//!      ▲                               │ finish: unwatch                     │ finish
//!      └── mapped again from the file ─┴─────────────────────────────────────┘
//! ```
//!
//! The answer to a touch is to stop watching the window, not `UFFDIO_CONTINUE`: that maps memfd memory as base pages
//! whatever its folios, while the kernel's own fault maps a huge folio whole, and so does KVM after it. If the kernel
//! refuses (it may need one mapping more than a process can have), the window is continued. If that fails too, the
//! userfaultfd is closed, which ends all watching. So a vCPU waits for an answer and never for a tick. However the
//! answering thread ends, the userfaultfd is closed and the reason kept.
//!
//! Pages that the file does not have cause no minor faults (swapped-out ones do: mm/shmem.c asks before it swaps in).
//! Whether one was mapped is checked at the end.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, PipeReader, PipeWriter};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex, sampled_pages};

use crate::claims::{Claims, PartClaim};
use crate::host::{Advice, Host, HostError, PageRun};
use crate::mover::{ASIDE_SLOTS, runs_of};
use crate::region::{GuestRam, RamRange};
use crate::sandboxed::{ThreadWork, thread_starts};
use crate::sensors::access_sample::{AccessConfig, AccessCost, AccessSample, AccessSampler, Seen};

mod linux;

pub use linux::{LinuxMinorFaults, MinorFaultsError};

/// Interface to the minor faults of one VM's RAM. Dropping it stops watching every window and wakes all waiting
/// threads.
pub trait MinorFaults: Send + Sync {
    /// From now on a thread that touches a page of the window that is in the file and not mapped waits until
    /// [`MinorFaults::unwatch`].
    ///
    /// # Errors
    /// [`HostError`]; `EBUSY` if another userfaultfd watches it.
    fn watch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Lets the kernel map the window's pages itself again, and wakes waiting threads. Harmless if it is not watched.
    ///
    /// # Errors
    /// [`HostError`]; then no thread is woken.
    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Unmaps pages of the window. The file keeps them.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno; some may be unmapped.
    fn unmap(&self, window: WindowIndex, pages: Range<u16>) -> Result<(), HostError>;

    /// Maps the file's pages of a watched window, and wakes waiting threads.
    ///
    /// # Errors
    /// [`HostError`]; then no thread is woken.
    fn map_from_file(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Appends the windows in which a thread has started to wait since the last call, once for each
    /// thread. Never blocks.
    ///
    /// # Errors
    /// [`HostError`] where the messages cannot be read or understood.
    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError>;
}

/// The unmapped windows, shared by the sensor and the thread that answers touches.
pub struct Watched {
    windows: Mutex<Windows>,
    /// Claims of the RAM: a window with pages that are being given back is not unmapped.
    claims: Arc<Claims>,
}

struct Windows {
    /// Door to the kernel; `None` once closed.
    faults: Option<Arc<dyn MinorFaults>>,
    /// Closed together with the faults: the thread that shares it must wake up, or threads with an already read touch
    /// would wait for ever.
    service: Option<PipeWriter>,
    /// Windows of the present sample, and whether each was touched.
    touched: BTreeMap<WindowIndex, bool>,
    /// Claim on each of these windows.
    claims: BTreeMap<WindowIndex, PartClaim>,
    /// Why it was closed early.
    failed: Option<String>,
}

impl Watched {
    /// A set without unmapped windows. `claims` are those of the RAM behind `faults`.
    pub fn new(faults: Arc<dyn MinorFaults>, claims: Arc<Claims>) -> Watched {
        let (touched, of_windows) = (BTreeMap::new(), BTreeMap::new());
        let windows = Windows { faults: Some(faults), service: None, touched, claims: of_windows, failed: None };
        Watched { windows: Mutex::new(windows), claims }
    }

    /// Wakes all waiting threads, and records their windows as touched.
    ///
    /// # Errors
    /// [`HostError`] if the waiting threads cannot be determined; then everything is closed.
    pub fn serve(&self) -> Result<(), HostError> {
        self.windows().serve()
    }

    /// Why it was closed early, if it was.
    pub fn why_it_failed(&self) -> Option<String> {
        self.windows().failed.clone()
    }

    /// Closes it for this reason, unless it is closed.
    fn fail(&self, why: &dyn fmt::Display) {
        self.windows().fail(why);
    }

    /// Closes it: waiting threads continue, and nothing is watched any more.
    pub fn close(&self) {
        self.windows().close();
    }

    /// Unmaps pages of a window. On an error, named as in reports, some may be unmapped; then the claim on the window
    /// comes with it.
    fn take(&self, window: WindowIndex, pages: &[Range<u16>]) -> Result<(), (&'static str, Option<PartClaim>)> {
        let mut windows = self.windows();
        let faults = windows.faults.clone().ok_or((ENDED, None))?;
        let claim = self.claims.window_aside(window).map_err(|_| (BUSY, None))?;
        faults.watch(window).map_err(|_| (REFUSED, None))?;
        windows.touched.insert(window, false);
        windows.claims.insert(window, claim);
        if pages.iter().try_for_each(|run| faults.unmap(window, run.clone())).is_err() {
            windows.let_go(window);
            windows.touched.remove(&window);
            return Err((REFUSED, windows.claims.remove(&window)));
        }
        Ok(())
    }

    /// Stops watching a window. Returns whether it was touched, as far as reported, and the claim on it.
    fn give_back(&self, window: WindowIndex) -> (Result<bool, &'static str>, Option<PartClaim>) {
        let mut windows = self.windows();
        // If this fails, all is closed, and no thread waits.
        let _ = windows.serve();
        windows.let_go(window);
        let touched = windows.touched.remove(&window).filter(|_| windows.faults.is_some());
        (touched.ok_or(ENDED), windows.claims.remove(&window))
    }

    fn windows(&self) -> MutexGuard<'_, Windows> {
        // A thread that panicked under this lock left at most one window watched; its touch is answered all the same.
        self.windows.lock()
    }
}

impl Windows {
    fn serve(&mut self) -> Result<(), HostError> {
        let Some(faults) = self.faults.clone() else { return Ok(()) };
        let mut touches = Vec::new();
        let read = faults.read_touches(&mut touches);
        for window in touches {
            if let Some(touched) = self.touched.get_mut(&window) {
                *touched = true;
            }
            self.let_go(window);
        }
        read.inspect_err(|error| self.fail(error))
    }

    /// Stops watching by any means: a guest that waits for ever is worse than the loss of the sensor.
    fn let_go(&mut self, window: WindowIndex) {
        let Some(faults) = &self.faults else { return };
        if let Err(error) = faults.unwatch(window)
            && let Err(second) = faults.map_from_file(window)
        {
            self.fail(&format_args!(
                "cannot stop watching {window} other than by closing the userfaultfd: {error}; {second}"
            ));
        }
    }

    fn fail(&mut self, why: &dyn fmt::Display) {
        if self.faults.is_some() {
            tracing::error!("sampling of accesses has ended: {why}");
            self.failed = Some(why.to_string());
        }
        self.close();
    }

    fn close(&mut self) {
        self.faults = None;
        self.service = None;
    }
}

const PAGE: Bytes = PageSize::Base4K.bytes();

/// Names of reasons in a sample, the same as in `access.rs`.
const ENDED: &str = "service_ended";
const REFUSED: &str = "refused";
/// Pages of the window are being given back.
const BUSY: &str = "busy";

/// Minor faults that were opened.
pub struct OpenMinorFaults {
    /// Calls that watch, unmap and map pages.
    pub faults: Arc<dyn MinorFaults>,
    /// Descriptor that becomes readable when a thread touches an unmapped page.
    pub touches: Arc<LinuxMinorFaults>,
    /// Claims of the RAM.
    pub claims: Arc<Claims>,
}

impl OpenMinorFaults {
    /// Opens the real minor faults of this RAM.
    ///
    /// # Errors
    /// The same as for [`LinuxMinorFaults::open`].
    pub fn of(ram: Arc<GuestRam>) -> Result<OpenMinorFaults, MinorFaultsError> {
        let claims = ram.claims().clone();
        let touches = Arc::new(LinuxMinorFaults::open(ram)?);
        Ok(OpenMinorFaults { faults: touches.clone(), touches, claims })
    }
}

/// Takes samples of one VM, one at a time. Dropping it stops all watching; the next touch maps what is unmapped.
pub struct MinorFaultSensor {
    watched: Arc<Watched>,
    ranges: Vec<RamRange>,
    config: AccessConfig,
    /// The present sample: of each window what was taken, or why it was not.
    taken: Vec<(WindowIndex, Result<Taken, &'static str>)>,
    cost: AccessCost,
    /// Number of windows taken so far.
    turns: u64,
    /// Kept until the sensor ends.
    _service: Option<Service>,
}

impl MinorFaultSensor {
    /// Opens a userfaultfd for the RAM and starts the answering thread. Nothing is watched until a sample starts.
    ///
    /// # Errors
    /// [`MinorFaultsError`]: only memfd RAM and hugetlb RAM of 2 MiB pages has such faults, on a kernel
    /// that reports them.
    pub fn start(ram: Arc<GuestRam>, config: AccessConfig) -> Result<MinorFaultSensor, MinorFaultsError> {
        let ranges = ram.ranges().to_vec();
        MinorFaultSensor::start_on(OpenMinorFaults::of(ram)?, ranges, config)
    }

    /// Starts the answering thread over minor faults that are open, for RAM at `ranges`.
    ///
    /// # Errors
    /// [`MinorFaultsError::Thread`].
    pub fn start_on(
        OpenMinorFaults { faults, touches, claims }: OpenMinorFaults,
        ranges: Vec<RamRange>,
        config: AccessConfig,
    ) -> Result<MinorFaultSensor, MinorFaultsError> {
        let watched = Arc::new(Watched::new(faults, claims));
        let service = Service::start(watched.clone(), touches).map_err(MinorFaultsError::Thread)?;
        let mut sensor = MinorFaultSensor::served_elsewhere(watched, ranges, config);
        sensor._service = Some(service);
        Ok(sensor)
    }

    /// A sensor with touches that are answered elsewhere, by [`Watched::serve`].
    pub fn served_elsewhere(watched: Arc<Watched>, ranges: Vec<RamRange>, config: AccessConfig) -> MinorFaultSensor {
        let (taken, cost) = (Vec::new(), AccessCost::default());
        MinorFaultSensor { watched, ranges, config, taken, cost, turns: 0, _service: None }
    }

    /// Unmaps pages of a window.
    fn take(&self, host: &dyn Host, window: WindowIndex) -> Result<Taken, &'static str> {
        let mapped = self.mapped(host, window).map_err(|_| REFUSED)?;
        let all = mapped.number();
        let unmapped = match mapped.is_huge {
            true => mapped.pages,
            false => runs_of(sampled_pages::choose(&mapped.pages, self.turns)),
        };
        if unmapped.is_empty() {
            return Err("not_resident");
        }
        match self.watched.take(window, &unmapped) {
            Ok(()) => Ok(Taken { left: all - number_of(&unmapped), unmapped }),
            Err((reason, claim)) => {
                claim.iter().for_each(|_| self.map_again(host, window, &unmapped));
                Err(reason)
            }
        }
    }

    /// Maps pages of a window that is claimed. A page that cannot be mapped now is mapped by the next touch; until then
    /// it counts as absent.
    fn map_again(&self, host: &dyn Host, window: WindowIndex, pages: &[Range<u16>]) {
        for run in pages {
            let (start, bytes) = (self.hva(window) + PAGE * u64::from(run.start), PAGE * run.len() as u64);
            if let Err(error) = host.advise(start, bytes, Advice::PopulateRead) {
                tracing::warn!("cannot map {window} before its next touch: {error}");
                return;
            }
        }
    }

    fn put_back(&self, host: &dyn Host, window: WindowIndex, Taken { unmapped, left }: &Taken) -> Seen {
        // Before the end of watching: until then only a page without a minor fault can have been mapped.
        let mapped = self.mapped(host, window);
        // Claimed until its pages are mapped again: those that the guest gives back must not come back by that.
        let (told, _claim) = self.watched.give_back(window);
        self.map_again(host, window, unmapped);
        match (told, mapped) {
            (Err(reason), _) => Seen::Unknown(reason),
            (Ok(true), _) => Seen::Touched,
            (Ok(false), Ok(mapped)) if mapped.number() > *left => Seen::Touched,
            (Ok(false), Ok(_)) => Seen::Untouched,
            (Ok(false), Err(_)) => Seen::Unknown(REFUSED),
        }
    }

    fn mapped(&self, host: &dyn Host, window: WindowIndex) -> Result<MappedPages, HostError> {
        let (start, mut runs) = (self.hva(window), Vec::new());
        host.scan(start, PageSize::Huge2M.bytes(), &mut runs)?;
        let number = |bytes: Bytes| bytes.pages(PageSize::Base4K) as u16;
        let pages = |run: &PageRun| number(run.start - start)..number(run.start - start) + number(run.bytes);
        Ok(MappedPages { pages: runs.iter().map(pages).collect(), is_huge: runs.iter().any(|run| run.is_huge) })
    }

    fn hva(&self, window: WindowIndex) -> Hva {
        let range = self.ranges.iter().find(|range| range.gpa.contains(window.start()));
        range.map(|range| range.hva + (window.start() - range.gpa.start())).expect("only windows of RAM are sampled")
    }
}

/// Mapped pages of a window, as runs that ascend.
struct MappedPages {
    pages: Vec<Range<u16>>,
    is_huge: bool,
}

impl MappedPages {
    fn number(&self) -> usize {
        number_of(&self.pages)
    }
}

fn number_of(pages: &[Range<u16>]) -> usize {
    pages.iter().map(Range::len).sum()
}

/// What a sample took from a window.
struct Taken {
    unmapped: Vec<Range<u16>>,
    /// Number of pages that stayed mapped.
    left: usize,
}

impl AccessSampler for MinorFaultSensor {
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]) {
        self.finish(host);
        let began_cpu = host.thread_cpu_time();
        let used = || host.thread_cpu_time().saturating_sub(began_cpu);
        for (number, window) in windows.iter().enumerate() {
            let is_paid = number < usize::from(ASIDE_SLOTS) && used() < self.config.cpu_max;
            let taken = if is_paid { self.take(host, *window) } else { Err("over_budget") };
            let is_taken = taken.is_ok();
            self.taken.push((*window, taken));
            if is_taken {
                self.turns += 1;
                self.cost.windows += 1;
                host.sleep(self.config.pace);
            }
        }
        self.cost.cpu += used();
    }

    fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let mut cost = std::mem::take(&mut self.cost);
        let rows: Vec<_> = std::mem::take(&mut self.taken)
            .into_iter()
            .map(|(window, taken)| {
                (window, taken.map_or_else(Seen::Unknown, |taken| self.put_back(host, window, &taken)))
            })
            .collect();
        cost.events = rows.iter().filter(|(_, seen)| *seen == Seen::Touched).count() as u64;
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
        AccessSample { rows, cost, ..AccessSample::default() }
    }

    fn why_it_ended(&self) -> Option<String> {
        self.watched.why_it_failed()
    }
}

impl Drop for MinorFaultSensor {
    fn drop(&mut self) {
        self.watched.close();
    }
}

/// The thread that answers touches. It ends when `watched` is closed, also by dropping this.
struct Service {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    fn start(watched: Arc<Watched>, faults: Arc<LinuxMinorFaults>) -> io::Result<Service> {
        let (stopped, stop) = io::pipe()?;
        watched.windows().service = Some(stop);
        let closes = CloseAtTheEnd(watched.clone());
        let thread = std::thread::Builder::new().name("minor-faults".into()).spawn(move || {
            // Moved into the thread, so that it is dropped, and the descriptor closed, however the thread ends.
            let (closes, faults) = (closes, faults);
            thread_starts(ThreadWork::Faults);
            if let Err(error) = answer_until(&stopped, &closes.0, &faults) {
                closes.0.fail(&error);
            }
        })?;
        Ok(Service { watched, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.watched.close();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that answered minor faults panicked");
        }
    }
}

/// Closes everything however the thread ends: stopped, failed or panicked.
struct CloseAtTheEnd(Arc<Watched>);

impl Drop for CloseAtTheEnd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(&"the thread that answers minor faults panicked");
        }
        self.0.close();
    }
}

fn answer_until(stop: &PipeReader, watched: &Watched, faults: &LinuxMinorFaults) -> io::Result<()> {
    loop {
        let mut fds = [faults.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
        if fds[1].any().unwrap_or(true) {
            return Ok(());
        }
        watched.serve().map_err(io::Error::other)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::claims::Claimed;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_minor_faults::FakeMinorFaults;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange};

    const WINDOWS: [WindowIndex; 3] = [WindowIndex::new(0), WindowIndex::new(1), WindowIndex::new(2)];

    struct Bed {
        host: Arc<FakeHost>,
        faults: Arc<FakeMinorFaults>,
        watched: Arc<Watched>,
        claims: Arc<Claims>,
        sensor: MinorFaultSensor,
    }

    impl Bed {
        /// Three windows: base pages, one huge page, and a quarter of base pages.
        fn new() -> Bed {
            let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(6)).expect("fits"), hva: Hva::new(1 << 40) };
            let host = Arc::<FakeHost>::default();
            host.make_present(range.hva, mib(2), false);
            host.advise(range.hva + mib(2), mib(2), Advice::HugePage).expect("the fake agrees");
            host.make_present(range.hva + mib(2), mib(2), true);
            host.make_present(range.hva + mib(4) + mib(1), kib(512), false);
            let faults = Arc::new(FakeMinorFaults::new(host.clone(), range));
            let claims = Arc::<Claims>::default();
            let watched = Arc::new(Watched::new(FakeMinorFaults::open(&faults), claims.clone()));
            let sensor = MinorFaultSensor::served_elsewhere(watched.clone(), vec![range], AccessConfig::default());
            Bed { host, faults, watched, claims, sensor }
        }

        fn start(&mut self, windows: &[WindowIndex]) {
            self.sensor.start(self.host.as_ref(), windows);
        }

        fn finish(&mut self) -> Vec<Seen> {
            self.sensor.finish(self.host.as_ref()).rows.into_iter().map(|(_, seen)| seen).collect()
        }

        fn pages(&self) -> Vec<(usize, bool)> {
            let mapped = |window| self.sensor.mapped(self.host.as_ref(), window).expect("the fake answers");
            WINDOWS.map(mapped).iter().map(|mapped| (mapped.number(), mapped.is_huge)).collect()
        }
    }

    const ALL_THERE: [(usize, bool); 3] = [(512, false), (512, true), (128, false)];

    #[test]
    fn touched_and_idle_windows_are_distinguished_and_mapped_again_as_before() {
        let mut bed = Bed::new();
        bed.start(&WINDOWS);
        assert_eq!(bed.pages(), [(508, false), (0, false), (124, false)], "four base pages, or all of a huge page");
        assert!(bed.faults.touch(WINDOWS[1]), "a thread that touches it waits");
        assert!(bed.faults.touch(WINDOWS[1]), "and a second one with it");
        bed.watched.serve().expect("the fake answers");
        assert_eq!(bed.faults.waiting(), 0);
        assert!(!bed.faults.touch(WINDOWS[1]), "the next one does not wait");
        assert_eq!(bed.finish(), [Seen::Untouched, Seen::Touched, Seen::Untouched]);
        assert_eq!(bed.pages(), ALL_THERE);
        assert!(!bed.faults.is_anything_watched());
    }

    #[test]
    fn a_window_with_pages_that_are_given_back_is_not_sampled_and_a_sampled_one_gives_none_back() {
        let mut bed = Bed::new();
        let given_back = bed.claims.window_in_place(WINDOWS[0]).expect("free");
        bed.start(&WINDOWS[..2]);
        assert_eq!(bed.pages()[..2], [(512, false), (0, false)], "the first one is in place");
        assert_eq!(bed.claims.window_in_place(WINDOWS[1]).expect_err("it is sampled"), Claimed::Aside);
        assert_eq!(bed.finish(), [Seen::Unknown("busy"), Seen::Untouched]);
        drop(given_back);
        assert!(bed.claims.window_in_place(WINDOWS[1]).is_ok(), "its pages are mapped again");
        assert_eq!(bed.claims.parts_in_work(), 0);
    }

    #[test]
    fn an_unanswered_touch_is_counted_at_the_end() {
        let mut bed = Bed::new();
        bed.start(&WINDOWS);
        bed.faults.touch(WINDOWS[0]);
        assert_eq!(bed.finish(), [Seen::Touched, Seen::Untouched, Seen::Untouched]);
        assert_eq!(bed.faults.waiting(), 0);
    }

    #[test]
    fn a_page_that_was_mapped_without_a_minor_fault_is_a_touch() {
        let mut bed = Bed::new();
        bed.start(&WINDOWS);
        bed.host.make_present(Hva::new(1 << 40) + mib(4), kib(4), false); // a hole of the file is filled
        assert_eq!(bed.finish(), [Seen::Untouched, Seen::Untouched, Seen::Touched]);
    }

    #[test]
    fn a_window_without_pages_is_not_taken() {
        let mut bed = Bed::new();
        bed.host.make_absent(Hva::new(1 << 40), mib(2));
        bed.start(&WINDOWS[..1]);
        assert_eq!(bed.finish(), [Seen::Unknown("not_resident")]);
    }

    #[test]
    fn after_any_failed_call_no_thread_waits_and_nothing_stays_watched() {
        /// Upper bound on the calls of a sample of three windows with two touches.
        const CALLS_MAX: u64 = 40;
        for errno in [libc::ENOMEM, libc::EBUSY, libc::EIO] {
            for (call, times) in (0..CALLS_MAX).flat_map(|call| [(call, 1), (call, 2)]) {
                let mut bed = Bed::new();
                bed.faults.fail_calls(call, times, errno);
                bed.start(&WINDOWS);
                bed.faults.touch(WINDOWS[1]);
                // Called as the service does.
                let _ = bed.watched.serve();
                bed.faults.touch(WINDOWS[2]);
                bed.finish();
                assert_eq!(bed.faults.waiting(), 0, "call {call}, {errno}");
                assert_eq!(bed.pages(), ALL_THERE, "call {call}, {errno}: all that was mapped is mapped");
                bed.start(&WINDOWS);
                bed.faults.touch(WINDOWS[0]);
                bed.finish();
                assert_eq!((bed.faults.waiting(), bed.pages()), (0, ALL_THERE.to_vec()), "call {call}, {errno}");
                drop(bed.sensor);
                drop(bed.watched);
                assert!(!bed.faults.is_anything_watched(), "call {call}, {errno}");
            }
        }
    }

    #[test]
    fn a_read_that_fails_ends_the_sensor_with_the_reason() {
        let mut bed = Bed::new();
        bed.start(&WINDOWS);
        bed.faults.touch(WINDOWS[1]);
        bed.faults.fail_calls(0, 1, libc::EIO);
        assert_eq!(bed.finish(), [Seen::Unknown("service_ended"); 3]);
        assert_eq!(bed.faults.waiting(), 0);
        let why = bed.sensor.why_it_ended().expect("it has ended");
        assert!(why.contains(&format!("os error {}", libc::EIO)), "{why}");
    }

    #[test]
    fn after_any_failed_call_of_the_host_the_next_sample_works() {
        // Three scans at the start; a scan and a mapping for each window at the end.
        for call in 0..9 {
            let mut bed = Bed::new();
            bed.host.fail_call(call, libc::ENOMEM);
            bed.start(&WINDOWS);
            bed.faults.touch(WINDOWS[1]);
            bed.finish();
            assert_eq!(bed.faults.waiting(), 0, "call {call}");
            // The guest continues; its next touch maps what is not mapped yet.
            bed.faults.map_all();
            bed.start(&WINDOWS);
            bed.faults.touch(WINDOWS[2]);
            assert_eq!(bed.finish()[2], Seen::Touched, "call {call}");
        }
    }

    #[test]
    fn closing_ends_the_thread_with_the_descriptor() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("memfd has base pages");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let sensor = match MinorFaultSensor::start(ram, AccessConfig::default()) {
            Ok(sensor) => sensor,
            Err(error) => return println!("skipped: {error}"),
        };
        sensor.watched.close();
        let service = sensor._service.as_ref().expect("it has one of its own");
        let thread = service.thread.as_ref().expect("it is joined at the end");
        /// A minute: a thread that sleeps longer sleeps for ever.
        const LOOKS_MAX: usize = 60_000;
        assert!((0..LOOKS_MAX).any(|_| thread.is_finished() || {
            std::thread::sleep(std::time::Duration::from_millis(1));
            false
        }));
    }

    #[test]
    fn a_closed_sensor_says_so_and_takes_nothing() {
        let mut bed = Bed::new();
        bed.start(&WINDOWS);
        bed.faults.touch(WINDOWS[0]);
        bed.watched.close();
        assert_eq!(bed.faults.waiting(), 0, "closing lets go");
        assert_eq!(bed.finish(), [Seen::Unknown("service_ended"); 3]);
        bed.start(&WINDOWS);
        assert_eq!(bed.finish(), [Seen::Unknown("service_ended"); 3]);
        assert_eq!(bed.pages(), ALL_THERE);
    }
}
