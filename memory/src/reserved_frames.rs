//! Guest RAM on reserved frames. The first touch of a window reserves 2 MiB of contiguous frames, and each touched
//! page is mapped from them one by one. A window with enough populated pages becomes large in place, without a copy.
//! [`wideleaf_policies::reservations`] decides which window does, and which reservation is broken when the host is
//! short; this module does it (`userfaultfd(2)`, missing and minor faults; `fallocate(2)`).
//!
//! ```text
//!   a thread touches a page that is not mapped, and waits
//!        │
//!        ▼           the file has pages there (touched before the service began), or no memory is available ─────┐
//!   [Untouched] ── fallocate 2 MiB ──▶ [Reserved]  each touched page: UFFDIO_CONTINUE, 4 KiB of the folio        │
//!                                        │     │                                                                 │
//!             the threshold is reached   │     │  the host is short, and it was changed longest ago              │
//!    drop its entries, unregister it,    ▼     ▼  punch holes where nothing was touched                          │
//!    fault it in: one huge entry   [Released] [Released] ◀───────────────────────────────────────────────────────┘
//!                                                the kernel's own faults bring base pages from now on; or, if it
//!                                                cannot be let go, [Kept]: each touched page is allocated and mapped
//! ```
//!
//! The kernel supplies the folio: RAM is a file on a tmpfs of its own that has huge folios
//! ([`crate::BackingConfig::reservable`]), whatever `shmem_enabled` is. `fallocate` takes it in 10 us and clears
//! nothing; mapping its first page clears all of it. On an ordinary memfd everything works too, but the frames are
//! scattered, and promotion copies (`by_collapse`).
//!
//! Only this thread maps pages of a reserved window, and a thread that touches another page waits for it. So the
//! guest has never written an unmapped page, and it can be given back. Other mappings of the file must not exist.
//!
//! No thread may wait for ever. However the service ends, all memory is let go and all waiters are woken; from then
//! on the kernel answers, with reserved frames first.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use nix::poll::PollTimeout;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{
    Bytes, Gpa, GpaRange, Moment, OutcomeResult, PageSize, PerTenThousand, ReservationRules, Reservations, VmId,
    WindowIndex,
};

use crate::backing::BackingConfig;
use crate::faults::{Brought, Counted, Faults, RegisterError, Service, ServiceReport, Serving, Touch, answer_times};
use crate::host::{Advice, Host, HostError, linux::LinuxHost};
use crate::region::GuestRam;
use crate::sensors::host_memory::host_memory;
use crate::sys::userfaultfd::{Mode, Userfaultfd, UserfaultfdError};

/// The service in its thread. See the module.
#[derive(Debug)]
pub struct ReservedFrames(Serving<ReservedFramesReport>);

/// Why frames cannot be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReservedFramesError {
    /// The RAM is of another kind.
    #[error(
        "{0}: cannot reserve frames: only memfd RAM on 4k pages, mapped for it, can have them; use --backing memfd \
         --host-page 4k"
    )]
    NotReservable(VmId),
    /// RAM that this process has not mapped, as on a fake host.
    #[error("{0}: cannot register RAM with userfaultfd that is not mapped in this process")]
    NotMapped(VmId),
    /// No userfaultfd is available.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The kernel refused to pass on a range's faults.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// No thread could be started, or no pipe made to stop it.
    #[error("cannot start the thread that maps reserved frames: {0}")]
    Thread(#[source] io::Error),
}

/// Counters of the service.
#[derive(Clone)]
pub struct ReservedFramesReport {
    /// Number of windows with frames reserved.
    pub reserved: u64,
    /// Number of pages mapped from reserved frames.
    pub populated: u64,
    /// Number of windows that became large, and were seen to be.
    pub promoted: u64,
    /// Number of those for which a collapse was needed after the next fault. It copies if the frames
    /// are not contiguous.
    pub by_collapse: u64,
    /// Number of reservations that were broken because the host was short.
    pub broken: u64,
    /// Bytes given back by that, by the file's own count.
    pub given_back: Bytes,
    /// Reserved bytes without data now: in use for the host, resident in no window. Bytes that could not be given
    /// back are counted as of that time, though the guest may use them by now.
    pub unpopulated: Bytes,
    /// Maximum of `unpopulated` at any time, in bytes.
    pub unpopulated_at_most: Bytes,
    /// Number of windows without a reservation, since they had pages before their first touch was seen.
    pub backed_before: u64,
    /// Number of attempts that failed, by the obstacle.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of touches of a page that was mapped, or of a window that was let go, before they were read.
    pub touched_again: u64,
    /// Number of pages allocated one by one because their window could not be let go.
    pub kept_pages: u64,
    /// Additional wait of a touch, from reading its message to the answer, in nanoseconds.
    pub answer_ns: Histogram<u64>,
    /// Reason for an early end of the service, if any.
    pub gave_up: Option<String>,
}

impl Default for ReservedFramesReport {
    fn default() -> ReservedFramesReport {
        ReservedFramesReport {
            reserved: 0,
            populated: 0,
            promoted: 0,
            by_collapse: 0,
            broken: 0,
            given_back: Bytes::ZERO,
            unpopulated: Bytes::ZERO,
            unpopulated_at_most: Bytes::ZERO,
            backed_before: 0,
            refused: BTreeMap::new(),
            touched_again: 0,
            kept_pages: 0,
            answer_ns: answer_times(),
            gave_up: None,
        }
    }
}

impl ReservedFramesReport {
    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = [
            ("reserved", self.reserved),
            ("populated", self.populated),
            ("promoted", self.promoted),
            ("by_collapse", self.by_collapse),
            ("broken", self.broken),
            ("given_back_bytes", self.given_back.get()),
            ("unpopulated_bytes", self.unpopulated.get()),
            ("unpopulated_bytes_at_most", self.unpopulated_at_most.get()),
            ("backed_before", self.backed_before),
            ("touched_again", self.touched_again),
            ("kept_pages", self.kept_pages),
            ("gave_up", u64::from(self.gave_up.is_some())),
        ];
        counters.into_iter().chain(self.refused.iter().map(|(name, n)| (*name, *n))).filter(|(_, n)| *n > 0)
    }
}

impl fmt::Debug for ReservedFramesReport {
    /// Shows the counters by name; the histogram alone would be pages of zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()
    }
}

impl ReservedFrames {
    /// Registers all RAM of `vms` and starts the thread that serves it from reserved frames, under `rules`.
    ///
    /// # Errors
    /// [`ReservedFramesError`]; nothing stays registered. Needs [reservable](crate::BackingConfig::reservable) RAM
    /// and a userfaultfd that sees kernel faults and minor ones (Linux 5.14).
    pub fn start(
        host: Arc<dyn Host>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        rules: ReservationRules,
    ) -> Result<ReservedFrames, ReservedFramesError> {
        ReservedFrames::start_with(host, vms, rules, Box::new(FileFrames))
    }

    fn start_with(
        host: Arc<dyn Host>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        rules: ReservationRules,
        frames: Box<dyn Frames>,
    ) -> Result<ReservedFrames, ReservedFramesError> {
        if let Some((vm, _)) = vms.iter().find(|(_, ram)| !ram.backing().is_reservable()) {
            return Err(ReservedFramesError::NotReservable(*vm));
        }
        let uffd = Userfaultfd::open_for_minor_faults()?;
        let counted = Counted::default();
        let service = Reserving {
            faults: Faults::register(uffd, &vms, Mode::MissingOrMinor, State::Untouched)?,
            book: Reservations::new(rules),
            next_look_at_host: host.now() + LOOK_AT_HOST_EVERY,
            not_given_back: Bytes::ZERO,
            counted: counted.clone(),
            host: host.clone(),
            frames,
        };
        let serving = Serving::start("reserved-frames", host, counted, service);
        serving.map(ReservedFrames).map_err(ReservedFramesError::Thread)
    }

    /// Counts so far.
    pub fn report(&self) -> ReservedFramesReport {
        self.0.report()
    }

    /// Lets all memory go, wakes waiting threads, ends the thread, and returns its counts. Reserved frames stay
    /// with the guest.
    pub fn stop(self) -> ReservedFramesReport {
        self.0.stop("the service panicked")
    }
}

/// Whether a window on this host becomes large without a copy: reserves one of its own, and touches it.
///
/// # Errors
/// The reason why it does not.
pub fn probe() -> Result<String, String> {
    let ram = [GpaRange::new(Gpa::new(0), PageSize::Huge2M.bytes()).expect("one window fits")];
    let ram = GuestRam::map(&ram, BackingConfig::reservable()).map_err(|error| error.to_string())?;
    let host = Arc::new(LinuxHost::open().map_err(|error| error.to_string())?);
    let never = PerTenThousand::new(u32::MAX);
    let rules = ReservationRules { threshold: 1, break_from: never, break_to: never };
    let service = ReservedFrames::start(host.clone(), vec![(VmId(0), ram.clone())], rules);
    let service = service.map_err(|error| error.to_string())?;
    let touched = host.advise(ram.base(), PageSize::Base4K.bytes(), Advice::PopulateWrite);
    let report = service.stop();
    touched.map_err(|error| error.to_string())?;
    match report {
        ReservedFramesReport { promoted: 1, by_collapse: 0, .. } => {
            Ok("contiguous frames, mapped as one huge page of 2 MiB".into())
        }
        ReservedFramesReport { promoted: 1, .. } => {
            Err("reserved windows become large by MADV_COLLAPSE (in place: CAP_SYS_ADMIN, Linux 6.14)".into())
        }
        report => Err(format!("a reserved window does not become large: {report:?}")),
    }
}

/// Source of frames: the file behind guest RAM, or a failing one in tests.
trait Frames: Send {
    /// Whether the file is empty in a window.
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool>;
    /// Reserves frames for these pages.
    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()>;
    /// Gives unused frames back.
    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack;
}

/// Result of giving frames back.
struct GivenBack {
    /// Bytes that became free, even if not all did.
    freed: Bytes,
    /// Error after which the rest was not tried.
    refused: Option<io::Error>,
}

struct FileFrames;

impl Frames for FileFrames {
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool> {
        ram.file_holds_nothing(window)
    }

    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()> {
        ram.allocate(pages)
    }

    /// A huge folio that cannot be split (it has another reference) is cleared there and stays: hence the file's own
    /// count. Pages that the kernel brings in other windows at the same time reduce it a little.
    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack {
        let before = ram.file_bytes();
        let punched = pages.iter().try_for_each(|run| ram.punch(*run));
        let freed = before.and_then(|before| Ok(before.saturating_sub(ram.file_bytes()?)));
        GivenBack { freed: *freed.as_ref().unwrap_or(&Bytes::ZERO), refused: punched.and(freed).err() }
    }
}

/// State of a window until it is let go (`Released` in the drawing above).
#[derive(Clone, Debug)]
enum State {
    /// It has no page yet.
    Untouched,
    /// It has reserved frames.
    Reserved(Populated),
    /// It has no reservation, but is still registered because it could not be let go.
    Kept,
}

/// Populated base pages of a window, a bit each.
#[derive(Clone, Debug, Default)]
struct Populated([u64; BASE_PAGES_PER_WINDOW as usize / 64]);

impl Populated {
    fn contains(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    fn insert(&mut self, page: usize) {
        self.0[page / 64] |= 1 << (page % 64);
    }

    /// Runs of unpopulated pages, ascending.
    fn holes(&self, window: WindowIndex) -> Vec<GpaRange> {
        let gpa = |page: usize| -> Gpa { window.start() + PageSize::Base4K.bytes() * page as u64 };
        let pages: Vec<usize> = (0..usize::from(BASE_PAGES_PER_WINDOW)).collect();
        let runs = pages.chunk_by(|a, b| self.contains(*a) == self.contains(*b)).filter(|run| !self.contains(run[0]));
        let range = |run: &[usize]| GpaRange::new(gpa(run[0]), PageSize::Base4K.bytes() * run.len() as u64);
        runs.map(|run| range(run).expect("a part of a window of RAM")).collect()
    }
}

/// Interval between two checks of the host's memory while there are reservations to break: at the 5 GiB/s that a
/// guest touches at most, half a gibibyte. One check costs 50 us.
const LOOK_AT_HOST_EVERY: Duration = Duration::from_millis(100);
const LOOK_AT_HOST_EVERY_MS: u16 = 100;
const _: () = assert!(LOOK_AT_HOST_EVERY.as_millis() == LOOK_AT_HOST_EVERY_MS as u128, "one time, in two units");

/// Maximum number of reservations broken before touches are answered again: each takes up to a millisecond (256
/// holes), and a guest of 64 GiB may have thousands. The rest waits for its turn between answers, each after a new
/// check of the host.
const BREAKS_AT_ONCE: usize = 4;

struct Reserving {
    host: Arc<dyn Host>,
    frames: Box<dyn Frames>,
    faults: Faults<State>,
    book: Reservations,
    /// Time of the next check; in the past while there is more to break.
    next_look_at_host: Moment,
    /// Bytes of broken reservations that could not be given back.
    not_given_back: Bytes,
    counted: Counted<ReservedFramesReport>,
}

impl Service for Reserving {
    type State = State;
    type Report = ReservedFramesReport;

    fn faults(&self) -> &Faults<State> {
        &self.faults
    }

    fn answer(&mut self, touch: Touch) -> io::Result<()> {
        match self.faults.state(touch) {
            // The touch was on its way when the window was let go: only this call wakes it.
            None => {
                self.counted.count(|report| report.touched_again += 1);
                self.faults.wake(touch)
            }
            Some(State::Kept) => self.bring_one_page(touch),
            Some(State::Untouched) => self.begin(touch),
            Some(State::Reserved(_)) => self.populate(touch),
        }
    }

    fn patience(&self) -> PollTimeout {
        match self.book.queue().next() {
            None => PollTimeout::NONE,
            Some(_) if self.next_look_at_host <= self.host.now() => PollTimeout::ZERO,
            Some(_) => LOOK_AT_HOST_EVERY_MS.into(),
        }
    }

    /// Breaks reservations that the host needs back, a few at a time.
    fn between_answers(&mut self) {
        let now = self.host.now();
        if now < self.next_look_at_host || self.book.queue().next().is_none() {
            return;
        }
        let memory = host_memory(self.host.as_ref()).inspect_err(|error| self.refused(error)).ok();
        let broken = self.book.to_break(memory, BREAKS_AT_ONCE);
        for (vm, window) in &broken {
            self.break_up(*vm, *window);
        }
        let is_more = broken.len() == BREAKS_AT_ONCE;
        self.next_look_at_host = if is_more { now } else { now + LOOK_AT_HOST_EVERY };
    }
}

impl Reserving {
    /// Answers the first touch of a window: a reservation, if it is empty (FreeBSD makes none beside a page
    /// of the object).
    fn begin(&mut self, touch: Touch) -> io::Result<()> {
        if !self.frames.has_nothing(self.faults.ram(touch), touch.window)? {
            self.counted.count(|report| report.backed_before += 1);
            return self.release(touch);
        }
        let all = GpaRange::new(touch.window.start(), PageSize::Huge2M.bytes()).expect("a window of RAM");
        if let Err(source) = self.frames.take(self.faults.ram(touch), all) {
            self.refused(&HostError { what: "fallocate of a window", source });
            return self.release(touch);
        }
        self.book.reserve(self.faults.vm(touch), touch.window, self.host.now());
        self.faults.set_state(touch, State::Reserved(Populated::default()));
        self.counted.count(|report| report.reserved += 1);
        self.populate(touch)
    }

    /// Maps the touched page of a reserved window, and promotes the window if that page was the last one needed.
    fn populate(&mut self, touch: Touch) -> io::Result<()> {
        let is_mapped = self.map(touch)?;
        let Some(State::Reserved(populated)) = self.faults.state_mut(touch) else {
            unreachable!("only reserved windows are populated");
        };
        let page = (touch.page - touch.start).pages(PageSize::Base4K) as usize;
        // Mapped already, but a thread waits: two vCPUs touched it at the same time, or the kernel took
        // the entry away.
        if !is_mapped || populated.contains(page) {
            self.counted.count(|report| report.touched_again += 1);
            return self.faults.wake(touch);
        }
        populated.insert(page);
        let is_whole = self.book.populate(self.faults.vm(touch), touch.window, 1, self.host.now());
        self.counted.count(|report| report.populated += 1);
        self.count_unpopulated();
        if is_whole { self.promote(touch) } else { self.faults.wake(touch) }
    }

    /// Maps one page that the file has. `false` if the mapping was just changing: the touch is retried.
    fn map(&self, touch: Touch) -> io::Result<bool> {
        match self.faults.uffd().map_file_pages(touch.page, PageSize::Base4K.bytes()) {
            Ok(_) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EEXIST) => Ok(true),
                Some(libc::EAGAIN | libc::ENOENT) => Ok(false),
                _ => Err(error),
            },
        }
    }

    fn promote(&mut self, touch: Touch) -> io::Result<()> {
        match self.bring_huge(touch) {
            Ok(how) => {
                self.counted.count(|report| {
                    report.promoted += 1;
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

    /// Drops a window's entries (the file keeps the pages), lets it go, and checks whether the next fault maps it
    /// by one entry. The entries go while all touching threads still wait: a base page mapped in between would keep
    /// the page table.
    fn bring_huge(&mut self, touch: Touch) -> Result<Brought, &'static str> {
        let advised = self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::HugePage);
        advised.map_err(|error| OutcomeResult::from(&error).name())?;
        self.faults.ram(touch).window(touch.window).discard().map_err(|_| "refused_unmap")?;
        self.faults.let_go_huge(self.host.as_ref(), touch)
    }

    /// Gives back the unused part of a reservation; the rest stays in place, as base pages.
    fn break_up(&mut self, vm: VmId, window: WindowIndex) {
        let touch = self.faults.find_window(vm, window).expect("what is in the book is RAM");
        let Some(State::Reserved(populated)) = self.faults.state(touch) else {
            unreachable!("what is in the book's queue is reserved");
        };
        let holes = populated.holes(window);
        let GivenBack { freed, refused } = self.frames.give_back(self.faults.ram(touch), &holes);
        self.not_given_back += holes.iter().map(|hole| hole.bytes()).sum::<Bytes>().saturating_sub(freed);
        self.counted.count(|report| {
            report.broken += u64::from(refused.is_none());
            report.given_back += freed;
        });
        if let Some(source) = refused {
            self.refused(&HostError { what: "fallocate of holes", source });
        }
        self.count_unpopulated();
        self.let_go(touch);
    }

    /// Lets a window go to base pages; if that is refused, answers the one page.
    fn release(&mut self, touch: Touch) -> io::Result<()> {
        if self.let_go(touch) { Ok(()) } else { self.bring_one_page(touch) }
    }

    /// Hands a window over to the kernel, with the advice of RAM that starts with base pages. Returns
    /// whether that worked.
    fn let_go(&mut self, touch: Touch) -> bool {
        let advised = self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::NoHugePage);
        advised.unwrap_or_else(|error| tracing::warn!("{} at {}: {error}", touch.window, touch.start));
        let Err(refused) = self.faults.let_go(touch) else { return true };
        tracing::debug!("{} stays registered: {refused}", touch.window);
        self.faults.set_state(touch, State::Kept);
        false
    }

    /// Answers a touch of a window that stays registered without a reservation.
    fn bring_one_page(&mut self, touch: Touch) -> io::Result<()> {
        self.frames.take(self.faults.ram(touch), touch.gpa())?;
        self.map(touch)?;
        self.counted.count(|report| report.kept_pages += 1);
        self.faults.wake(touch)
    }

    fn count_unpopulated(&self) {
        let unpopulated = self.book.unpopulated() + self.not_given_back;
        self.counted.count(|report| {
            report.unpopulated = unpopulated;
            report.unpopulated_at_most = report.unpopulated_at_most.max(unpopulated);
        });
    }

    fn refused(&self, error: &HostError) {
        tracing::debug!("{error}");
        self.counted.count(|report| *report.refused.entry(OutcomeResult::from(error).name()).or_default() += 1);
    }
}

impl ServiceReport for ReservedFramesReport {
    fn answer_ns(&mut self) -> &mut Histogram<u64> {
        &mut self.answer_ns
    }

    fn gave_up(&mut self) -> &mut Option<String> {
        &mut self.gave_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use wideleaf_policies::units::kib;

    #[test]
    fn holes_are_the_unpopulated_pages() {
        // page    0  1 ... 9  10  11 ... 510  511
        //         x  -     -   x   -       -   x
        let window = WindowIndex::new(3);
        let mut populated = Populated::default();
        [0, 10, 511].into_iter().for_each(|page| populated.insert(page));
        let hole =
            |first: u64, pages: u64| GpaRange::new(window.start() + kib(4) * first, kib(4) * pages).expect("fits");
        assert_eq!(populated.holes(window), [hole(1, 9), hole(11, 500)]);
        assert_eq!(Populated::default().holes(window), [hole(0, 512)]);
        (0..512).for_each(|page| populated.insert(page));
        assert_eq!(populated.holes(window), []);
    }

    /// The file behind guest RAM, with one kind of call that always fails.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Failing {
        Look,
        TakeWindow,
        GiveBack,
    }

    impl Failing {
        fn fail(self, at: Failing) -> io::Result<()> {
            if self == at { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        }
    }

    impl Frames for Failing {
        fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool> {
            self.fail(Failing::Look)?;
            FileFrames.has_nothing(ram, window)
        }

        fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()> {
            self.fail(Failing::TakeWindow)?;
            FileFrames.take(ram, pages)
        }

        fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack {
            match self.fail(Failing::GiveBack) {
                Ok(()) => FileFrames.give_back(ram, pages),
                // Some of several holes are given back before it fails; a single one is not.
                Err(error) => {
                    let (first, _) = pages.split_at(pages.len() / 2);
                    GivenBack { refused: Some(error), ..FileFrames.give_back(ram, first) }
                }
            }
        }
    }

    /// Rules: large with all pages populated; the host is always short.
    const ALWAYS_SHORT: ReservationRules =
        ReservationRules { threshold: 512, break_from: PerTenThousand::new(0), break_to: PerTenThousand::new(0) };

    fn ram(windows: u64) -> Arc<GuestRam> {
        let range = GpaRange::new(Gpa::new(0), PageSize::Huge2M.bytes() * windows).expect("fits");
        GuestRam::map(&[range], BackingConfig::reservable()).expect("memory")
    }

    #[test]
    fn a_shortage_breaks_a_few_reservations_between_answers_and_the_oldest_first() {
        const WINDOWS: u64 = BREAKS_AT_ONCE as u64 * 2 + 2;
        let ram = ram(WINDOWS);
        let uffd = match Userfaultfd::open_for_minor_faults() {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped: {error}"),
        };
        let host = Arc::new(LinuxHost::open().expect("there is /proc"));
        let mut service = Reserving {
            faults: Faults::register(uffd, &[(VmId(0), ram)], Mode::MissingOrMinor, State::Untouched).expect("free"),
            book: Reservations::new(ALWAYS_SHORT),
            next_look_at_host: host.now(),
            not_given_back: Bytes::ZERO,
            counted: Counted::default(),
            host,
            frames: Box::new(FileFrames),
        };
        for window in (0..WINDOWS).rev().map(WindowIndex::new) {
            let touch = service.faults.find_window(VmId(0), window).expect("it is RAM");
            service.answer(touch).expect("there is memory");
        }
        for left in [BREAKS_AT_ONCE + 2, 2, 0] {
            assert_eq!(service.patience(), PollTimeout::ZERO, "it continues as soon as waiting threads are answered");
            service.between_answers();
            let queue: Vec<_> = service.book.queue().map(|(_, window)| window.get() as usize).collect();
            assert_eq!(queue, (0..left).rev().collect::<Vec<_>>(), "reserved last to first, and broken in that order");
        }
        assert_eq!(service.patience(), PollTimeout::NONE, "nothing is left to break");
    }

    /// Touches the first page of a window of such a service, and waits until it has broken the reservation, if
    /// there is one.
    fn touched_with(failing: Failing) -> Option<ReservedFramesReport> {
        let ram = ram(1);
        let host = Arc::new(LinuxHost::open().expect("there is /proc"));
        let vms = vec![(VmId(0), ram.clone())];
        let service = match ReservedFrames::start_with(host, vms, ALWAYS_SHORT, Box::new(failing)) {
            Ok(service) => service,
            Err(error) => {
                println!("skipped: {error}");
                return None;
            }
        };
        let word = &ram.words(ram.ranges()[0])[0];
        let touch = |word: &AtomicU64| word.swap(42, Ordering::Relaxed);
        assert_eq!(std::thread::scope(|scope| scope.spawn(|| touch(word)).join()).expect("it writes"), 0);
        /// A minute, in milliseconds: a thread that waits longer waits for ever.
        const LOOKS_MAX: usize = 60_000;
        let is_over = || failing != Failing::GiveBack || !service.report().refused.is_empty();
        assert!((0..LOOKS_MAX).any(|_| is_over() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
        let report = service.stop();
        assert_eq!(word.load(Ordering::Relaxed), 42);
        Some(report)
    }

    #[test]
    fn without_free_frames_base_pages_are_used() {
        let Some(report) = touched_with(Failing::TakeWindow) else { return };
        assert_eq!((report.reserved, report.refused["refused_no_huge_page"], report.gave_up), (0, 1, None));
    }

    #[test]
    fn a_file_that_cannot_be_read_ends_the_service_and_no_thread_waits() {
        let Some(report) = touched_with(Failing::Look) else { return };
        assert!(report.gave_up.is_some_and(|why| why.contains("os error 12")));
    }

    #[test]
    fn frames_that_cannot_be_given_back_are_counted_and_the_window_is_let_go() {
        let Some(report) = touched_with(Failing::GiveBack) else { return };
        assert_eq!((report.reserved, report.broken, report.refused["refused_no_huge_page"]), (1, 0, 1), "{report:?}");
        // One page was touched, and the hole after it was not given back: it still counts as in use.
        assert_eq!((report.given_back, report.unpopulated), (Bytes::ZERO, kib(4) * 511), "{report:?}");
    }
}
