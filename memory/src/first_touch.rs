//! Decides at the fault: the first touch of a window waits until a policy has chosen its page size (`userfaultfd(2)`,
//! missing faults of anonymous guest RAM).
//!
//! ```text
//!   a vCPU, a device thread or a native kernel touches a page that is not there, and waits
//!        │
//!        ▼                     it has a page already (touched before the service began): no decision ──────────┐
//!   [Unasked] ── ask, once ─▶ 4k ──────────────────────────────────────────────────────────────────────────────┤
//!        │                                                                                                     │
//!        └─▶ 2m (1g too): MADV_HUGEPAGE, drop the empty page table, let the window go, fault it in, look       │
//!                 │                     │ not huge?                                                            │
//!                 ▼ huge                ▼ collapse it, look again ── refused: MADV_NOHUGEPAGE as before ───────┤
//!            [Released]            [Released]                                                                  ▼
//!                                                                       let the window go: [Released], the kernel's
//!                                                                       own faults bring base pages from now on; or,
//!                                                                       if it cannot be let go, [Kept]: each touched
//!                                                                       page is answered with one zero page
//! ```
//!
//! To let a window go is to unregister it. That wakes its waiters, which touch again and then cause the kernel's own
//! fault. So the service costs one message a window, not one a page, and a window that was let go can be collapsed
//! (the kernel does not fill holes of a registered one). Unregistering cuts the mapping at the window's borders, and
//! the number of mappings of a process is limited (`vm.max_map_count`, 65530 unless changed): hence `Kept`.
//!
//! The page table must go because the waiting fault has made it: in a mapping for base pages, the kernel allocates
//! the table before it asks userfaultfd, and a window with a page table gets no huge page by a fault. A kernel that
//! does not reclaim empty page tables (before 6.14; the service tests it) must not make one: there all windows are
//! marked for huge pages until they are decided. The price is a huge page that the waiting fault allocates, clears
//! and frees again, whatever the answer. Collapsing instead works only for a window at rest: while a guest was
//! filling it, nine of ten collapses were refused as busy.
//!
//! No thread may wait for ever. However the service ends (stopped, dropped, a panic of the policy, a failed call),
//! all memory is let go and all waiters are woken; from then on the kernel answers.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use hdrhistogram::Histogram;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, Hva, OutcomeResult, PageSize, VmId, WindowIndex};

use crate::backing::{BackingConfig, BackingKind};
pub use crate::faults::RegisterError;
use crate::faults::{Brought, Counted, Faults, Service, ServiceReport, Serving, Touch, answer_times};
use crate::host::{Advice, Host, HostError, linux::LinuxHost};
use crate::region::{GuestRam, RamError};
use crate::sensors::host_backing::window_backing;
use crate::sys::pagemap::holds_nothing;
pub use crate::sys::userfaultfd::UserfaultfdError;
use crate::sys::userfaultfd::{Mode, Userfaultfd};

/// The service in its thread. See the module.
#[derive(Debug)]
pub struct FirstTouch(Serving<FirstTouchReport>);

/// Why first touches cannot be decided.
#[derive(Debug, thiserror::Error)]
pub enum FirstTouchError {
    /// memfd RAM: the file determines the page size of its fault, and other processes can fault it in too.
    #[error(
        "{0}: cannot decide first touches of memfd RAM yet: its pages belong to the file, which other processes fault \
         in too, in the size of shmem_enabled; use --backing anon"
    )]
    Memfd(VmId),
    /// hugetlb RAM: there is nothing to decide.
    #[error("{0}: cannot decide first touches of hugetlb RAM: its pages have one size; use --backing anon")]
    Hugetlb(VmId),
    /// RAM that is huge from the start.
    #[error("{0}: cannot decide first touches of RAM that starts with {1} pages; use --host-page 4k")]
    StartPage(VmId, PageSize),
    /// RAM that this process has not mapped, as on a fake host.
    #[error("{0}: cannot register RAM with userfaultfd that is not mapped in this process")]
    NotMapped(VmId),
    /// No userfaultfd is available.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The kernel refused to pass on a range's faults.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The backing of a window cannot be read, or advice cannot be given.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No memory for testing what the kernel does with page tables.
    #[error("cannot test how first touches are best answered: {0}")]
    Trial(#[source] RamError),
    /// No thread could be started, or no pipe made to stop it.
    #[error("cannot start the thread that answers first touches: {0}")]
    Thread(#[source] io::Error),
}

/// Counters of the service.
#[derive(Clone)]
pub struct FirstTouchReport {
    /// Number of windows that the policy was asked about, once each. The sum of the next two and of all `refused`.
    pub asked: u64,
    /// Number of windows answered 4k.
    pub answered_4k: u64,
    /// Number of windows answered 2m or 1g, and seen to be huge afterwards.
    pub answered_2m: u64,
    /// Number of those where the collapse, not the fault, brought the huge page.
    pub by_collapse: u64,
    /// Number of answers of 1g, which no fault of anonymous memory brings; 2m was tried.
    pub giant_as_2m: u64,
    /// Number of windows answered 2m or 1g that stayed at base pages, by the obstacle.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of windows that were not asked about: they had pages before the first missing page was touched.
    pub backed_before: u64,
    /// Number of touches of a window that was let go before they were read.
    pub touched_again: u64,
    /// Number of pages answered with a zero page because their window could not be let go.
    pub zero_pages: u64,
    /// Number of touches that had no effect because the page or the mapping had changed since. They are retried.
    pub raced: u64,
    /// Additional wait of a touch, from reading its message to the answer, in nanoseconds; includes the decision.
    pub answer_ns: Histogram<u64>,
    /// Reason for an early end of the service, if any.
    pub gave_up: Option<String>,
}

impl Default for FirstTouchReport {
    fn default() -> FirstTouchReport {
        FirstTouchReport {
            asked: 0,
            answered_4k: 0,
            answered_2m: 0,
            by_collapse: 0,
            giant_as_2m: 0,
            refused: BTreeMap::new(),
            backed_before: 0,
            touched_again: 0,
            zero_pages: 0,
            raced: 0,
            answer_ns: answer_times(),
            gave_up: None,
        }
    }
}

impl FirstTouchReport {
    /// Number of windows answered 2m or 1g that are at base pages all the same.
    pub fn huge_refused(&self) -> u64 {
        self.refused.values().sum()
    }

    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = [
            ("asked", self.asked),
            ("answered_4k", self.answered_4k),
            ("answered_2m", self.answered_2m),
            ("by_collapse", self.by_collapse),
            ("giant_as_2m", self.giant_as_2m),
            ("backed_before", self.backed_before),
            ("touched_again", self.touched_again),
            ("zero_pages", self.zero_pages),
            ("raced", self.raced),
            ("gave_up", u64::from(self.gave_up.is_some())),
        ];
        counters.into_iter().chain(self.refused.iter().map(|(name, n)| (*name, *n))).filter(|(_, n)| *n > 0)
    }
}

impl fmt::Debug for FirstTouchReport {
    /// Shows the counters by name; the histogram alone would be pages of zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()
    }
}

impl FirstTouch {
    /// Registers all RAM of `vms` and starts the thread that answers its first touches by `decide`. Each window is
    /// asked about once while the service lives, and only if it has no page at its first touch.
    ///
    /// The touching thread waits for `decide`: it should take no longer than a fault, and it must not touch RAM of
    /// `vms` (it would wait for itself). No answer changes what the guest reads: zero, at a first touch.
    ///
    /// # Errors
    /// [`FirstTouchError`]; nothing stays registered. Needs anonymous RAM that starts with base pages, `PAGEMAP_SCAN`
    /// (Linux 6.7), and a userfaultfd that sees kernel faults ([`UserfaultfdError::NotPermitted`]).
    pub fn start(
        host: Arc<dyn Host>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        decide: impl FnMut(VmId, WindowIndex) -> PageSize + Send + 'static,
    ) -> Result<FirstTouch, FirstTouchError> {
        for (vm, ram) in &vms {
            check_backing(*vm, ram)?;
        }
        let pagemap =
            File::open("/proc/self/pagemap").map_err(|source| HostError { what: "open /proc/self/pagemap", source })?;
        for range in vms.iter().flat_map(|(_, ram)| ram.ranges()) {
            // Only the success of the call matters here, before any thread waits for it.
            let answered = holds_nothing(&pagemap, range.hva, PageSize::Huge2M.bytes());
            answered.map_err(|source| HostError { what: "PAGEMAP_SCAN", source })?;
        }
        let tables_stay = page_tables_stay()?;
        let faults = Faults::register(Userfaultfd::open()?, &vms, Mode::Missing, State::Unasked)?;
        let counted = Counted::default();
        let service = Deciding { host: host.clone(), pagemap, faults, tables_stay, decide, counted: counted.clone() };
        if tables_stay {
            service.advise_undecided(Advice::HugePage);
        }
        Serving::start("first-touch", host, counted, service).map(FirstTouch).map_err(FirstTouchError::Thread)
    }

    /// Counts so far.
    pub fn report(&self) -> FirstTouchReport {
        self.0.report()
    }

    /// Lets all memory go, wakes waiting threads, ends the thread, and returns its counts. Waits for
    /// the present answer.
    pub fn stop(self) -> FirstTouchReport {
        self.0.stop("the policy panicked")
    }
}

/// Whether this host would let the service run: opens a userfaultfd and closes it. Returns the way it was opened.
///
/// # Errors
/// [`UserfaultfdError`] with what to change.
pub fn probe() -> Result<&'static str, UserfaultfdError> {
    Userfaultfd::open().map(|uffd| uffd.opened_by())
}

/// Whether the kernel keeps the page table of a window that was given back: then no fault brings a huge page there.
fn page_tables_stay() -> Result<bool, FirstTouchError> {
    let (host, window) = (LinuxHost::open()?, PageSize::Huge2M.bytes());
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let range = GpaRange::new(Gpa::new(0), window).expect("one window fits");
    let ram = GuestRam::map(&[range], backing).map_err(FirstTouchError::Trial)?;
    let fault_in = || host.advise(ram.base(), PageSize::Base4K.bytes(), Advice::PopulateWrite);
    fault_in()?;
    host.advise(ram.base(), window, Advice::HugePage)?;
    ram.discard(WindowIndex::new(0)).map_err(|source| HostError { what: "madvise(MADV_DONTNEED)", source })?;
    fault_in()?;
    let seen = window_backing(&host, ram.ranges()[0], None, WindowIndex::new(0))?;
    Ok(seen.backing != Backing::Huge2M)
}

fn check_backing(vm: VmId, ram: &GuestRam) -> Result<(), FirstTouchError> {
    match (ram.backing().kind(), ram.backing().start_page()) {
        (BackingKind::Memfd, _) => Err(FirstTouchError::Memfd(vm)),
        (BackingKind::Hugetlb, _) => Err(FirstTouchError::Hugetlb(vm)),
        (BackingKind::Anon, PageSize::Base4K) => Ok(()),
        (BackingKind::Anon, size) => Err(FirstTouchError::StartPage(vm, size)),
    }
}

/// State of a window until it is let go (`Released` in the drawing above).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The policy was not asked yet.
    Unasked,
    /// Decided, but still registered because it could not be let go.
    Kept,
}

struct Deciding<D> {
    host: Arc<dyn Host>,
    pagemap: File,
    faults: Faults<State>,
    /// Whether undecided windows are marked `MADV_HUGEPAGE`, because the kernel keeps empty page tables.
    tables_stay: bool,
    decide: D,
    counted: Counted<FirstTouchReport>,
}

impl<D> Drop for Deciding<D> {
    fn drop(&mut self) {
        if self.tables_stay {
            self.advise_undecided(Advice::NoHugePage);
        }
    }
}

impl<D> Deciding<D> {
    /// Best effort: a failed advice costs huge pages or control over them, nothing else.
    fn advise_undecided(&self, advice: Advice) {
        for (start, bytes) in self.faults.stretches(|state| *state == State::Unasked) {
            self.advise(start, bytes, advice);
        }
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) {
        if let Err(error) = self.host.advise(start, bytes, advice) {
            tracing::warn!("cannot give {advice:?} for {bytes} at {start}: {error}");
        }
    }
}

impl<D: FnMut(VmId, WindowIndex) -> PageSize + Send + 'static> Service for Deciding<D> {
    type State = State;
    type Report = FirstTouchReport;

    fn faults(&self) -> &Faults<State> {
        &self.faults
    }

    fn answer(&mut self, touch: Touch) -> io::Result<()> {
        match self.faults.state(touch) {
            // The touch was on its way when the window was let go. Or its thread was woken, touched again and was on
            // its way once more before the kernel had finished letting go. Only this call wakes it.
            None => {
                self.counted.count(|report| report.touched_again += 1);
                self.faults.wake(touch)
            }
            Some(State::Kept) => self.release(touch),
            Some(State::Unasked) => self.decide(touch),
        }
    }
}

impl<D: FnMut(VmId, WindowIndex) -> PageSize> Deciding<D> {
    fn decide(&mut self, touch: Touch) -> io::Result<()> {
        if !holds_nothing(&self.pagemap, touch.start, PageSize::Huge2M.bytes())? {
            self.counted.count(|report| report.backed_before += 1);
            return self.release(touch);
        }
        let size = (self.decide)(self.faults.vm(touch), touch.window);
        self.counted.count(|report| report.asked += 1);
        if size == PageSize::Base4K {
            self.counted.count(|report| report.answered_4k += 1);
            return self.release(touch);
        }
        if size == PageSize::Giant1G {
            self.counted.count(|report| report.giant_as_2m += 1);
        }
        match self.bring_huge(touch) {
            Ok(how) => {
                self.counted.count(|report| {
                    report.answered_2m += 1;
                    report.by_collapse += u64::from(how == Brought::ByCollapse);
                });
                Ok(())
            }
            Err(why) => {
                self.counted.count(|report| *report.refused.entry(why).or_default() += 1);
                self.release(touch)
            }
        }
    }

    /// Lets an empty window go, so that a huge page comes, and checks whether it did.
    ///
    /// The advice comes first: a fault after it leaves no page table behind. While the window is registered, only
    /// this service can bring a page into an empty one, so the discard cannot lose any.
    fn bring_huge(&mut self, touch: Touch) -> Result<Brought, &'static str> {
        let advised = self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::HugePage);
        advised.map_err(|error| OutcomeResult::from(&error).name())?;
        if let Err(error) = self.faults.ram(touch).discard(touch.window) {
            tracing::debug!("{}: its page table stays, so a collapse is needed: {error}", touch.window);
        }
        self.faults.let_go_huge(self.host.as_ref(), touch)
    }

    /// Lets a window go to base pages; if that is refused, answers the one page. The mark is that of RAM that starts
    /// with base pages; windows that should not or could not be huge keep it.
    fn release(&mut self, touch: Touch) -> io::Result<()> {
        self.advise(touch.start, PageSize::Huge2M.bytes(), Advice::NoHugePage);
        let Err(refused) = self.faults.let_go(touch) else { return Ok(()) };
        tracing::debug!("{} stays registered: {refused}", touch.window);
        self.faults.set_state(touch, State::Kept);
        let page = PageSize::Base4K.bytes();
        match self.faults.uffd().zero_page(touch.page, page).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => {
                self.counted.count(|report| report.zero_pages += 1);
                Ok(())
            }
            // Already present, being changed, or no longer registered: the touch finds out which.
            Err((Some(libc::EEXIST | libc::EAGAIN | libc::ENOENT), _)) => {
                self.counted.count(|report| report.raced += 1);
                self.faults.wake(touch)
            }
            Err((_, error)) => Err(error),
        }
    }
}

impl ServiceReport for FirstTouchReport {
    fn answer_ns(&mut self) -> &mut Histogram<u64> {
        &mut self.answer_ns
    }

    fn gave_up(&mut self) -> &mut Option<String> {
        &mut self.gave_up
    }
}
