//! The service that maps reserved frames, in its thread. The drawing is in [`super`].

use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::PollTimeout;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Gpa, GpaRange, Moment, OutcomeResult, PageSize, Reservations, VmId, WindowIndex};

use super::ReservedFramesReport;
use super::frames::{Frames, GivenBack};
use crate::faults::{Brought, Counted, Faults, Service, Touch};
use crate::host::{Advice, Host, HostError};
use crate::sensors::host_memory::host_memory;

/// State of a window until it is let go (`Released` in the drawing above).
#[derive(Clone, Debug)]
pub(super) enum State {
    /// It has no page yet.
    Untouched,
    /// It has reserved frames.
    Reserved(Populated),
    /// It has no reservation, but is still registered because it could not be let go.
    Kept,
}

/// Populated base pages of a window, a bit each.
#[derive(Clone, Debug, Default)]
pub(super) struct Populated([u64; BASE_PAGES_PER_WINDOW as usize / 64]);

impl Populated {
    fn contains(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    pub fn insert(&mut self, page: usize) {
        self.0[page / 64] |= 1 << (page % 64);
    }

    /// Runs of unpopulated pages, ascending.
    pub fn holes(&self, window: WindowIndex) -> Vec<GpaRange> {
        let gpa = |page: usize| -> Gpa { window.start() + PageSize::Base4K.bytes() * page as u64 };
        let pages: Vec<usize> = (0..usize::from(BASE_PAGES_PER_WINDOW)).collect();
        let runs = pages.chunk_by(|a, b| self.contains(*a) == self.contains(*b)).filter(|run| !self.contains(run[0]));
        let range = |run: &[usize]| GpaRange::new(gpa(run[0]), PageSize::Base4K.bytes() * run.len() as u64);
        runs.map(|run| range(run).expect("a part of a window of RAM")).collect()
    }
}

/// Interval between two checks of the host's memory while there are reservations to break: at the 5 GiB/s that a
/// guest touches at most, half a gibibyte. One check costs 50 us.
pub(super) const LOOK_AT_HOST_EVERY: Duration = Duration::from_millis(100);
const LOOK_AT_HOST_EVERY_MS: u16 = 100;
const _: () = assert!(LOOK_AT_HOST_EVERY.as_millis() == LOOK_AT_HOST_EVERY_MS as u128, "one time, in two units");

/// Maximum number of reservations broken before touches are answered again: each takes up to a millisecond (256
/// holes), and a guest of 64 GiB may have thousands. The rest waits for its turn between answers, each after a new
/// check of the host.
pub(super) const BREAKS_AT_ONCE: usize = 4;

pub(super) struct Reserving {
    pub host: Arc<dyn Host>,
    pub frames: Box<dyn Frames>,
    pub faults: Faults<State>,
    pub book: Reservations,
    /// Time of the next check; in the past while there is more to break.
    pub next_look_at_host: Moment,
    /// Bytes of broken reservations that could not be given back.
    pub not_given_back: Bytes,
    pub counted: Counted<ReservedFramesReport>,
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
