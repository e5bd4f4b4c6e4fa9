//! Decides at the fault: the first touch of a window waits until a policy has chosen its page size (`userfaultfd(2)`,
//! missing faults of anonymous and memfd guest RAM).
//!
//! ```text
//!   a vCPU, a device thread or a native kernel touches a page that is not there, and waits
//!        │
//!        ▼                     it has a page already (touched before the service began): no decision ──────────┐
//!   [Unasked] ── ask, once ─▶ 4k ──────────────────────────────────────────────────────────────────────────────┤
//!        │                                                                                                     │
//!        ├─▶ 1g, the giant is untouched: [Deferred] until a page of 1 GiB is ready ─▶ map it there: [Released] │
//!        │             │ touched, no page, too late                                                            │
//!        ▼             ▼                                                                                       │
//!        2m: MADV_HUGEPAGE, drop the empty page table, let the window go, fault it in, look                    │
//!                 │                     │ not huge?                                                            │
//!                 ▼ huge                ▼ collapse it, look again ── refused: MADV_NOHUGEPAGE as before ───────┤
//!            [Released]            [Released]                                                                  ▼
//!                                                                       let the window go: [Released], the kernel's
//!                                                                       own faults bring base pages from now on; or,
//!                                                                       if it cannot be let go, [Kept]: each touched
//!                                                                       page is answered by itself
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
//! **memfd RAM.** The page belongs to the file. `fallocate(2)` takes 2 MiB of it first, in one folio where the file is
//! on a tmpfs of huge folios ([`BackingConfig::of_huge_folios`]), and the next fault maps it whole, without a copy. On
//! an ordinary memfd the frames are scattered unless `shmem_enabled` says otherwise, and the collapse copies them
//! (`by_collapse`). A window in which another process has touched the file is no first touch.
//!
//! **Giants.** A page of 1 GiB replaces the mapping of a giant with no page and all windows registered. Only the
//! service could bring a page there, and it brings none in the meantime. Clearing or making the page takes a tenth of
//! a second to seconds, in another thread and without the lock of the mappings: other memory is answered as ever, and
//! after 10 s the waiting touches get pages of 2 MiB. Nothing promotes a giant later, and a demoted one stays demoted.
//!
//! No thread may wait for ever. However the service ends (stopped, dropped, a panic of the policy, a failed call),
//! all memory is let go and all waiters are woken; from then on the kernel answers.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nix::poll::PollTimeout;
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, Hva, OutcomeResult, PageSize, VmId, WindowIndex};

use crate::backing::{BackingConfig, BackingKind};
pub use crate::faults::RegisterError;
use crate::faults::{Counted, Faults, MadeHuge, Service, ServiceThread, Touch};
use crate::host::{Advice, Host as _, HostError, linux::LinuxHost};
use crate::kernel::Kernel;
use crate::page_tables_freed::page_tables_freed;
use crate::region::{GuestRam, RamError};
use crate::sensors::host_backing::window_backing;
use crate::sys::pagemap::holds_nothing;
pub use crate::sys::userfaultfd::UserfaultfdError;
use crate::sys::userfaultfd::{Mode, Userfaultfd};

mod giant_supply;
mod giants;
mod placing;
mod report;

pub use giant_supply::GiantSource;
use giant_supply::GiantSupply;
use giants::Giants;
pub use placing::place_before_loading;
pub use report::{FirstTouchReport, PageCounts, PagesNow, RegionReport};

/// The service in its thread. See the module.
pub struct FirstTouch {
    serving: ServiceThread<FirstTouchReport>,
    host: Arc<dyn Kernel>,
    vms: Vec<(VmId, Arc<GuestRam>)>,
}

/// Why first touches cannot be decided.
#[derive(Debug, thiserror::Error)]
pub enum FirstTouchError {
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

impl FirstTouch {
    /// Registers all RAM of `vms` and starts the thread that answers its first touches by `decide`. Each window is
    /// asked about once while the service lives, and only if it has no page at its first touch.
    ///
    /// The touching thread waits for `decide`: it should take no longer than a fault, and it must not touch RAM of
    /// `vms` (it would wait for itself). No answer changes what the guest reads: zero, at a first touch. `giants`:
    /// where pages for answers of 1g come from; without them, such an answer means 2m.
    ///
    /// # Errors
    /// [`FirstTouchError`]; nothing stays registered. Needs RAM outside the pool that starts with base pages,
    /// `PAGEMAP_SCAN` (Linux 6.7), and a userfaultfd that sees kernel faults ([`UserfaultfdError::NotPermitted`]), for
    /// memfd RAM also minor ones (Linux 5.14).
    pub fn start(
        host: Arc<dyn Kernel>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        giants: Option<GiantSource>,
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
        let has_files = vms.iter().any(|(_, ram)| ram.backing().kind() == BackingKind::Memfd);
        let uffd = if has_files { Userfaultfd::open_for_minor_faults() } else { Userfaultfd::open() }?;
        let mode = |ram: &GuestRam| match ram.backing().kind() {
            BackingKind::Memfd => Mode::MissingOrMinor,
            BackingKind::Anon | BackingKind::Hugetlb => Mode::Missing,
        };
        let faults = Faults::register_each(uffd, &vms, mode, State::Unasked)?;
        let supply = giants.map(|source| GiantSupply::start(host.clone(), source)).transpose();
        let giants = Giants::new(supply.map_err(FirstTouchError::Thread)?);
        let counted = Counted::<FirstTouchReport>::default();
        counted.count(|report| report.begin(&vms));
        let service =
            Deciding { host: host.clone(), pagemap, faults, tables_stay, decide, giants, counted: counted.clone() };
        if tables_stay {
            service.advise_undecided(Advice::HugePage);
        }
        let serving = ServiceThread::start("first-touch", host.clone(), counted, service);
        Ok(FirstTouch { serving: serving.map_err(FirstTouchError::Thread)?, host, vms })
    }

    /// Counts so far, with the pages that are there now.
    pub fn report(&self) -> FirstTouchReport {
        seen(self.serving.report(), self.host.as_ref(), &self.vms)
    }

    /// Lets all memory go, wakes waiting threads, ends the thread, and returns its counts. Waits for
    /// the present answer.
    pub fn stop(self) -> FirstTouchReport {
        let FirstTouch { serving, host, vms } = self;
        seen(serving.stop("the policy panicked"), host.as_ref(), &vms)
    }
}

impl std::fmt::Debug for FirstTouch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FirstTouch").field(&self.serving).finish()
    }
}

fn seen(report: FirstTouchReport, host: &dyn Kernel, vms: &[(VmId, Arc<GuestRam>)]) -> FirstTouchReport {
    let mut report = report;
    report.look(host, |of| vms.iter().find(|(vm, _)| *vm == of).map(|(_, ram)| ram.as_ref()));
    report
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
    let range = GpaRange::new(Gpa::new(0), window * 2).expect("two windows fit");
    let ram = GuestRam::map(&[range], backing).map_err(FirstTouchError::Trial)?;
    let [used, fresh] = [0, 1].map(WindowIndex::new);
    let fault_in = |of: WindowIndex| {
        host.advise(ram.base() + window * of.get(), PageSize::Base4K.bytes(), Advice::PopulateWrite)?;
        window_backing(&host, ram.ranges()[0], None, of).map(|seen| seen.backing == Backing::Huge2M)
    };
    fault_in(used)?;
    host.advise(ram.base(), ram.bytes(), Advice::HugePage)?;
    ram.discard(used).map_err(|source| HostError { what: "madvise(MADV_DONTNEED)", source })?;
    let are_huge = [fault_in(used)?, fault_in(fresh)?];
    Ok(judge_page_tables(are_huge, || page_tables_freed(Path::new("/")).is_ok()))
}

/// Whether page tables stay, by whether a fault made a huge page of a window with one and of one without. If neither is
/// huge, the host has no huge page, and the number of page tables decides.
fn judge_page_tables(are_huge: [bool; 2], are_freed: impl FnOnce() -> bool) -> bool {
    match are_huge {
        [true, _] => false,
        [false, true] => true,
        [false, false] => !are_freed(),
    }
}

fn check_backing(vm: VmId, ram: &GuestRam) -> Result<(), FirstTouchError> {
    match (ram.backing().kind(), ram.backing().start_page()) {
        (BackingKind::Hugetlb, _) => Err(FirstTouchError::Hugetlb(vm)),
        (BackingKind::Anon | BackingKind::Memfd, PageSize::Base4K) => Ok(()),
        (BackingKind::Anon | BackingKind::Memfd, size) => Err(FirstTouchError::StartPage(vm, size)),
    }
}

/// State of a window until it is let go (`Released` in the drawing above).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The policy was not asked yet.
    Unasked,
    /// Answered 1g; it waits for a page of 1 GiB, and gets 2 MiB if none comes.
    Deferred,
    /// Decided, but still registered because it could not be let go.
    Kept,
}

struct Deciding<D> {
    host: Arc<dyn Kernel>,
    pagemap: File,
    faults: Faults<State>,
    /// Whether undecided windows are marked `MADV_HUGEPAGE`, because the kernel keeps empty page tables.
    tables_stay: bool,
    decide: D,
    giants: Giants,
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
        for (start, bytes) in self.faults.stretches(|state| *state != State::Kept) {
            self.advise(start, bytes, advice);
        }
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) {
        if let Err(error) = self.host.advise(start, bytes, advice) {
            tracing::warn!("cannot give {advice:?} for {bytes} at {start}: {error}");
        }
    }

    /// Counts the first page of the touched window, or of the giant around it.
    fn count_first(&self, touch: Touch, size: PageSize, also: impl FnOnce(&mut FirstTouchReport)) {
        let start = touch.window.start().align_down(if size == PageSize::Base4K { PageSize::Huge2M } else { size });
        self.counted.count(|report| {
            report.regions[self.faults.region(touch)].begin(start, size);
            also(report);
        });
    }
}

impl<D: FnMut(VmId, WindowIndex) -> PageSize + Send + 'static> Service for Deciding<D> {
    type State = State;
    type Report = FirstTouchReport;

    fn faults(&self) -> &Faults<State> {
        &self.faults
    }

    fn answer(&mut self, touch: Touch) -> io::Result<()> {
        self.counted.count(|report| report.regions[self.faults.region(touch)].faults += 1);
        match self.faults.state(touch) {
            // The touch was on its way when the window was let go. Or its thread was woken, touched again and was on
            // its way once more before the kernel had finished letting go. Only this call wakes it.
            None => {
                self.counted.count(|report| report.touched_again += 1);
                self.faults.wake(touch)
            }
            Some(State::Kept) => self.release(touch),
            Some(State::Unasked | State::Deferred) if self.is_awaited(touch) => {
                self.counted.count(|report| report.waited_for_giant += 1);
                Ok(())
            }
            Some(State::Deferred) => self.answer_huge(touch),
            Some(State::Unasked) => self.decide(touch),
        }
    }

    fn patience(&self) -> PollTimeout {
        self.giants.look_every_ms().map_or(PollTimeout::NONE, PollTimeout::from)
    }

    fn between_answers(&mut self) {
        self.look_for_giant();
    }
}

impl<D: FnMut(VmId, WindowIndex) -> PageSize> Deciding<D> {
    fn decide(&mut self, touch: Touch) -> io::Result<()> {
        if !self.is_empty(touch)? {
            self.count_first(touch, PageSize::Base4K, |report| report.backed_before += 1);
            return self.release(touch);
        }
        let size = (self.decide)(self.faults.vm(touch), touch.window);
        self.counted.count(|report| report.asked += 1);
        match size {
            PageSize::Base4K => {
                self.count_first(touch, PageSize::Base4K, |report| report.answered_4k += 1);
                self.release(touch)
            }
            PageSize::Giant1G if self.await_giant(touch) => Ok(()),
            PageSize::Huge2M | PageSize::Giant1G => self.answer_huge(touch),
        }
    }

    /// Whether the window has no page at all, neither present nor swapped out.
    fn is_empty(&self, touch: Touch) -> io::Result<bool> {
        match self.faults.ram(touch).backing().kind() {
            BackingKind::Memfd => self.faults.ram(touch).file_holds_nothing(touch.window),
            BackingKind::Anon | BackingKind::Hugetlb => {
                holds_nothing(&self.pagemap, touch.start, PageSize::Huge2M.bytes())
            }
        }
    }

    fn answer_huge(&mut self, touch: Touch) -> io::Result<()> {
        match self.bring_huge(touch) {
            Ok(how) => {
                self.count_first(touch, PageSize::Huge2M, |report| {
                    report.answered_2m += 1;
                    report.by_collapse += u64::from(how == MadeHuge::ByCollapse);
                });
                Ok(())
            }
            Err(why) => {
                let region = self.faults.region(touch);
                self.count_first(touch, PageSize::Base4K, |report| {
                    *report.refused.entry(why).or_default() += 1;
                    *report.regions[region].refused.entry(why).or_default() += 1;
                });
                self.release(touch)
            }
        }
    }

    /// Lets an empty window go, so that a huge page comes, and checks whether it did.
    ///
    /// The advice comes first: a fault after it leaves no page table behind. While the window is registered, only
    /// this service can bring a page into an empty one, so the discard cannot lose any; a file keeps its pages.
    fn bring_huge(&mut self, touch: Touch) -> Result<MadeHuge, &'static str> {
        let advised = self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::HugePage);
        advised.map_err(|error| OutcomeResult::from(&error).name())?;
        let ram = self.faults.ram(touch);
        if ram.backing().kind() == BackingKind::Memfd {
            let window = GpaRange::new(touch.window.start(), PageSize::Huge2M.bytes()).expect("a window of RAM");
            let taken = ram.allocate(window).map_err(|source| HostError { what: "fallocate of a window", source });
            taken.map_err(|error| OutcomeResult::from(&error).name())?;
        }
        if let Err(error) = ram.window(touch.window).discard() {
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
        self.bring_one_page(touch)
    }

    /// Answers one page of a window that could not be let go: a zero page, or a page of the file.
    fn bring_one_page(&mut self, touch: Touch) -> io::Result<()> {
        let (uffd, page) = (self.faults.uffd(), PageSize::Base4K.bytes());
        let ram = self.faults.ram(touch);
        let brought = match ram.backing().kind() {
            BackingKind::Memfd => {
                ram.allocate(touch.gpa()).and_then(|()| uffd.map_file_pages(touch.page, page).map(drop))
            }
            BackingKind::Anon | BackingKind::Hugetlb => uffd.zero_page(touch.page, page),
        };
        match brought.map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => {
                self.counted.count(|report| report.zero_pages += 1);
                self.faults.wake(touch)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_huge_page_is_no_kernel_that_keeps_page_tables() {
        let asked = || -> bool { unreachable!("the faults have shown it") };
        assert!(judge_page_tables([false, true], asked));
        assert!(!judge_page_tables([true, true], asked) && !judge_page_tables([true, false], asked));
        assert!(!judge_page_tables([false, false], || true) && judge_page_tables([false, false], || false));
    }
}
