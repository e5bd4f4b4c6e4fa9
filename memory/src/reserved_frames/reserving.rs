//! The service that maps reserved frames, in its thread. The drawing is in [`super`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::poll::PollTimeout;
use wideleaf_policies::{Bytes, GpaRange, Moment, OutcomeResult, PageSet, PageSize, Reservations, VmId, WindowIndex};

use super::ReservedFramesReport;
use super::frames::{Frames, GivenBack};
use super::requests::Requests;
use crate::faults::{Counted, Faults, MadeHuge, Service, Touch};
use crate::host::{Advice, Host, HostError};
use crate::sensors::host_memory::host_memory;

/// State of a window until it is let go (`Released` in the drawing above).
#[derive(Clone, Debug)]
pub(super) enum State {
    /// It has no page yet, or none any more.
    Untouched,
    /// It has reserved frames.
    Reserved(Box<Pages>),
    /// It has no reservation, but is still registered because it could not be let go.
    Kept,
}

/// The pages of a window with reserved frames. All others are reserved and hold nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    /// Pages that the guest uses.
    pub populated: PageSet,
    /// Pages that the guest gave back: the file has none there, or one of zeroes.
    pub absent: PageSet,
    /// Whether a given-back page was used again: its frame is not one of those that were reserved together.
    pub has_new_frames: bool,
}

impl Pages {
    /// Runs of reserved pages that hold nothing, ascending.
    pub fn holes(&self, window: WindowIndex) -> Vec<GpaRange> {
        PageSet::ALL.without(self.populated).without(self.absent).ranges(window)
    }
}

/// Interval between two checks of the host's memory while there are reservations to break: at the 5 GiB/s that a
/// guest touches at most, half a gibibyte. One check costs 50 us.
pub(super) const LOOK_AT_HOST_EVERY: Duration = Duration::from_millis(100);
const LOOK_AT_HOST_EVERY_MS: u16 = 100;
const _: () = assert!(LOOK_AT_HOST_EVERY.as_millis() == LOOK_AT_HOST_EVERY_MS as u128, "one time, in two units");

/// Number of attempts at such a collapse: it may meet pages on their way to an LRU list, which each attempt speeds up.
const COLLAPSE_ATTEMPTS: u32 = 4;

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
    /// Dropped after the faults: a requester that finds the service gone finds nothing registered any more.
    pub requests: Requests,
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

    fn has_requests(&self) -> Option<BorrowedFd<'_>> {
        Some(self.requests.as_fd())
    }

    /// Takes pages that the guest gave back, and breaks reservations that the host needs back, a few at a time.
    fn between_answers(&mut self) {
        for request in self.requests.take() {
            let result = self.give_back(request.vm, request.window, request.pages);
            request.answer(result);
        }
        self.break_some();
    }
}

impl Reserving {
    fn break_some(&mut self) {
        let now = self.host.now();
        let is_any_partial = self.book.queue().next().is_some();
        // Without one there is no next look, so the report must say so now.
        if is_any_partial && now < self.next_look_at_host {
            return;
        }
        let by_age = self.book.partial_by_age(now);
        self.counted.count(|report| report.partial_by_age = by_age);
        if !is_any_partial {
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
            self.counted.count(|report| report.p_failures += 1);
            return self.release(touch);
        }
        let (host, faults) = (self.host.as_ref(), &self.faults);
        if self.frames.are_one_page(host, faults.ram(touch), touch.window) == Some(false) {
            self.counted.count(|report| report.p_failures += 1);
            // Scattered frames would be held for nothing: no entry maps them as one page.
            if let Some(source) = self.frames.give_back(self.faults.ram(touch), &[all]).refused {
                self.refused(&HostError { what: "fallocate of a hole", source });
            }
            return self.release(touch);
        }
        self.book.reserve(self.faults.vm(touch), touch.window, self.host.now());
        self.faults.set_state(touch, State::Reserved(Box::default()));
        self.counted.count(|report| report.reserved += 1);
        self.populate(touch)
    }

    /// Maps the touched page of a reserved window, and promotes the window if that page was the last one needed.
    fn populate(&mut self, touch: Touch) -> io::Result<()> {
        let page = (touch.page - touch.start).pages(PageSize::Base4K) as u16;
        let Some(State::Reserved(pages)) = self.faults.state(touch) else {
            unreachable!("only reserved windows are populated");
        };
        let (was_populated, was_absent) = (pages.populated.contains(page), pages.absent.contains(page));
        if was_absent && let Err(source) = self.frames.take(self.faults.ram(touch), touch.gpa()) {
            self.refused(&HostError { what: "fallocate of a page", source });
            self.book.end(self.faults.vm(touch), touch.window);
            self.count_unpopulated();
            return self.release(touch);
        }
        // Mapped already, but a thread waits: two vCPUs touched it at the same time, or the kernel took
        // the entry away.
        if !self.map(touch)? || was_populated {
            self.counted.count(|report| report.touched_again += 1);
            return self.faults.wake(touch);
        }
        if let Some(State::Reserved(pages)) = self.faults.state_mut(touch) {
            pages.populated.insert(page);
            pages.absent.remove(page);
            pages.has_new_frames |= was_absent;
        }
        let vm = self.faults.vm(touch);
        if was_absent {
            self.book.refill(vm, touch.window, 1);
        }
        let is_whole = self.book.populate(vm, touch.window, 1, self.host.now());
        self.counted.count(|report| report.populated += 1);
        self.count_unpopulated();
        if is_whole { self.promote(touch) } else { self.faults.wake(touch) }
    }

    /// Maps one page, and allocates it if the file has none there any more. `false` if the mapping was just changing:
    /// the touch is retried.
    fn map(&self, touch: Touch) -> io::Result<bool> {
        match self.map_from_file(touch) {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                self.frames.take(self.faults.ram(touch), touch.gpa())?;
                self.map_from_file(touch)
            }
            mapped => mapped,
        }
    }

    fn map_from_file(&self, touch: Touch) -> io::Result<bool> {
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
                    report.by_collapse += u64::from(how == MadeHuge::ByCollapse);
                });
                Ok(())
            }
            Err(why) => {
                self.counted.count(|report| *report.refused.entry(why).or_default() += 1);
                self.book.end(self.faults.vm(touch), touch.window);
                self.release(touch)
            }
        }
    }

    /// Drops a window's entries (the file keeps the pages), lets it go, and checks whether the next fault maps it
    /// by one entry. The entries go while all touching threads still wait: a base page mapped in between would keep
    /// the page table.
    fn bring_huge(&mut self, touch: Touch) -> Result<MadeHuge, &'static str> {
        let advised = self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::HugePage);
        advised.map_err(|error| OutcomeResult::from(&error).name())?;
        let is_collapsed = self.collapse_new_frames(touch);
        self.faults.ram(touch).window(touch.window).discard().map_err(|_| "refused_unmap")?;
        let brought = self.faults.let_go_huge(self.host.as_ref(), touch)?;
        Ok(if is_collapsed { MadeHuge::ByCollapse } else { brought })
    }

    /// Collapses a full window with new frames into one folio, while all touching threads still wait: one that maps
    /// pages just then makes the collapse fail. If it fails all the same, it is tried again once the window is let go.
    fn collapse_new_frames(&self, touch: Touch) -> bool {
        let has_new_frames = matches!(self.faults.state(touch), Some(State::Reserved(pages)) if pages.has_new_frames);
        let collapse = |_| self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::Collapse).is_ok();
        has_new_frames && (0..COLLAPSE_ATTEMPTS).any(collapse)
    }

    /// Gives back the unused part of a reservation; the rest stays in place, as base pages.
    fn break_up(&mut self, vm: VmId, window: WindowIndex) {
        let touch = self.faults.find_window(vm, window).expect("what is in the book is RAM");
        let Some(State::Reserved(pages)) = self.faults.state(touch) else {
            unreachable!("what is in the book's queue is reserved");
        };
        let holes = pages.holes(window);
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
    pub(super) fn let_go(&mut self, touch: Touch) -> bool {
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

    pub(super) fn count_unpopulated(&self) {
        let unpopulated = self.book.unpopulated() + self.not_given_back;
        self.counted.count(|report| {
            report.unpopulated = unpopulated;
            report.unpopulated_at_most = report.unpopulated_at_most.max(unpopulated);
        });
    }

    pub(super) fn refused(&self, error: &HostError) {
        tracing::debug!("{error}");
        self.counted.count(|report| *report.refused.entry(OutcomeResult::from(error).name()).or_default() += 1);
    }
}

impl Drop for Reserving {
    /// The report ends with the state at the end.
    fn drop(&mut self) {
        let by_age = self.book.partial_by_age(self.host.now());
        self.counted.count(|report| report.partial_by_age = by_age);
    }
}
