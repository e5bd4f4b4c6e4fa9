//! A serving thread.
//!
//! ```text
//!   a touch is waiting? ── yes ─▶ answer it ──┐
//!      │ no                                   │
//!   its turn in the background? ─▶ fill ──────┤
//!      │ no                                   │
//!   a ready page is missing? ─▶ make one ─────┤
//!      │ no                                   │
//!   a window to collapse? ─▶ collapse it ─────┤
//!      │ no                                   │
//!   sleep until a touch, or the end ──────────┴──▶ again
//! ```

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_policies::{Hva, Moment, OutcomeResult, PageSize, Refusal, Skip};

use super::background::Background;
use super::filling::{Filling, Placed, in_steps, place_of, wants_huge};
use super::kernel_calls::KernelCalls;
use super::rows::Row;
use super::shared::Shared;
use super::slots::Slots;
use super::window_states::{Claim, Mapping, Settled, Touched, Worker};
use crate::actuators::collapse::collapse_window;
use crate::backing::BackingKind;
use crate::host::Host;
use crate::panicked::{Panicked, caught};
use crate::sandboxed::{ThreadWork, thread_starts};

/// Longest sleep: then the thread looks for reads that are overdue.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Maximum number of errors in a row of reading messages: one may be an accident, many are not.
const READ_ERRORS_MAX: u32 = 20;

/// Maximum number of collapses of a window: a guest that fills its memory keeps a window busy.
const COLLAPSES_MAX: u32 = 5;

/// Starts a serving thread.
pub(super) fn start<D: KernelCalls + 'static>(
    number: Worker,
    shared: Arc<Shared>,
    kernel: Arc<D>,
) -> io::Result<JoinHandle<()>> {
    let name = name(number);
    std::thread::Builder::new().name(name).spawn(move || {
        thread_starts(ThreadWork::Faults);
        Serving { number, shared, kernel, slots: Slots::default(), placing: None, read_errors: 0 }.serve();
    })
}

fn in_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Name of a thread, for messages and debuggers.
fn name(number: Worker) -> String {
    format!("restore-{number}")
}

struct Serving<D: KernelCalls + 'static> {
    number: Worker,
    shared: Arc<Shared>,
    kernel: Arc<D>,
    slots: Slots,
    /// Window with pages that this thread is placing.
    placing: Option<Row>,
    read_errors: u32,
}

/// What is to be done next.
enum Work {
    Answer(Hva),
    Fill(Row, Claim),
    Sleep(Duration),
}

impl<D: KernelCalls + 'static> Serving<D> {
    /// Serves until all windows are filled. A panic is named; the thread goes on only if it is the last one.
    fn serve(mut self) {
        loop {
            match caught(|| self.serve_until_the_end()) {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    let why = format!("{} cannot read the touches of guest RAM: {error}", name(self.number));
                    self.shared.lost(why);
                    if self.ends_alone() {
                        break;
                    }
                    self.read_errors = 0;
                }
                Err(panicked) => {
                    self.panicked(&panicked);
                    if self.ends_alone() {
                        break;
                    }
                }
            }
        }
    }

    /// Whether this thread may end, because another one serves.
    fn ends_alone(&self) -> bool {
        self.shared.may_end()
    }

    fn serve_until_the_end(&mut self) -> io::Result<()> {
        while !self.shared.must_end() {
            match self.next_work()? {
                Work::Answer(page) => self.answer(page),
                Work::Fill(row, claim) => self.fill(row, claim, None),
                Work::Sleep(time) => {
                    let now = self.shared.host.now();
                    if !self.slots.refill(self.kernel.as_ref(), now) && !self.collapse_one() {
                        self.sleep(time)?;
                        self.look_for_overdue();
                    }
                }
            }
        }
        if self.shared.is_done() {
            while self.collapse_one() {}
        }
        Ok(())
    }

    fn next_work(&mut self) -> io::Result<Work> {
        match self.kernel.next_touch() {
            Ok(Some(page)) => {
                self.read_errors = 0;
                return Ok(Work::Answer(page));
            }
            Ok(None) => self.read_errors = 0,
            Err(error) if self.read_errors + 1 == READ_ERRORS_MAX => return Err(error),
            Err(_) => {
                self.read_errors += 1;
                return Ok(Work::Sleep(Duration::from_millis(1)));
            }
        }
        let Shared { config, states, host, .. } = self.shared.as_ref();
        if config.background == Background::Off {
            return Ok(Work::Sleep(SLEEP_MAX));
        }
        let now = host.now();
        let waits = self.shared.background_waits(now);
        if !waits.is_zero() {
            return Ok(Work::Sleep(waits.min(SLEEP_MAX)));
        }
        match states.next_of_background(self.number, now, || self.shared.order()) {
            Some((row, claim)) => Ok(Work::Fill(row, claim)),
            None => Ok(Work::Sleep(SLEEP_MAX)),
        }
    }

    fn answer(&mut self, page: Hva) {
        let now = self.shared.host.now();
        let Some(row) = self.shared.rows.row_at(page) else {
            tracing::error!("a touch at {page}, outside of all RAM");
            return;
        };
        let shared = &self.shared;
        if shared.config.is_page_by_page && shared.states.lacks_pages(row) && self.copy_alone(row, page, now) {
            return self.shared.record(self.shared.rows.window(row), now);
        }
        let touched = self.shared.states.touched(row, self.number, now);
        if touched != Touched::Wake {
            self.shared.record(self.shared.rows.window(row), now);
        }
        match touched {
            Touched::Fill(claim) => self.fill(row, claim, Some(now)),
            Touched::LetGo => self.let_go_of_zeroes(row, page),
            Touched::Page => self.answer_page(page),
            Touched::Wake => {
                self.shared.counted.count(|report| report.touched_again += 1);
                self.wake_page(page);
            }
            Touched::Wait => self.shared.counted.count(|report| report.waited += 1),
            Touched::Never => {}
        }
    }

    fn wake_page(&self, page: Hva) {
        if let Err(error) = self.kernel.wake(page, PageSize::Base4K.bytes()) {
            tracing::error!("cannot wake the threads that wait for the page at {page}: {error}");
        }
    }

    /// Answers a page of a window that is filled, or reads zero, and is still registered.
    fn answer_page(&self, page: Hva) {
        self.shared.counted.count(|report| report.zero_pages += 1);
        if self.kernel.zero_page(page).is_err() {
            self.wake_page(page); // it is there
        }
    }

    /// Answers a touch at `now` with a copy of its page alone, while the window still waits. Returns whether that was
    /// done. Otherwise the window is filled whole, which names it if it cannot be read.
    ///
    /// Another thread may fill the window meanwhile, and let it go: a copy never replaces a page, and the kernel
    /// refuses one into a window that is not registered any more (`ENOENT`).
    fn copy_alone(&mut self, row: Row, page: Hva, now: Moment) -> bool {
        let (window, (start, _)) = (self.shared.rows.window(row), self.shared.rows.place(&(row..row + 1)));
        let number = (page - start).pages(PageSize::Base4K) as u16;
        if !self.shared.saved.window(window).pages.contains(number) {
            self.answer_page(page);
            return true;
        }
        let Ok(mut prepared) = self.slots.take(false, window, self.kernel.as_ref(), now) else { return false };
        let read = self.shared.saved.read_page(window, number, &mut prepared.slot.bytes()[place_of(number)]);
        let copy = |pages| self.kernel.copy_in(&prepared.slot, window, pages);
        let is_there = read.is_ok() && in_steps(&self.shared, number..number + 1, copy).is_ok();
        self.slots.give_back(prepared);
        if is_there {
            self.wake_page(page);
            let took = self.shared.host.now().since(now);
            self.shared.counted.count(|report| {
                report.pages_alone += 1;
                report.fault_ns.saturating_record(in_ns(took));
            });
        }
        is_there
    }

    /// A window of which nothing is stored was touched: the kernel answers.
    fn let_go_of_zeroes(&mut self, row: Row, page: Hva) {
        self.placing = Some(row);
        let filling = self.filling(row, true);
        let states = &self.shared.states;
        let may_cut = states.may_cut();
        let is_huge_at_start = self.shared.can_move && self.shared.ram.backing().start_page() != PageSize::Base4K;
        let is_marked = is_huge_at_start && may_cut && self.kernel.allow_huge(filling.window).is_ok();
        let settled = filling.let_go(may_cut, if is_marked { Mapping::Huge } else { Mapping::Base });
        states.settle(row, settled);
        self.placing = None;
        match settled {
            Settled::LetGo(_) => self.shared.ram.claims().filled(self.shared.rows.window(row)),
            Settled::Kept | Settled::Failed => {
                self.answer_page(page);
                self.shared.let_go_if_done(self.kernel.as_ref());
                self.touch_again(row); // for other pages, of which messages came meanwhile
            }
        }
    }

    fn filling(&self, row: Row, is_touched: bool) -> Filling<'_> {
        let window = self.shared.rows.window(row);
        let saved = self.shared.saved.window(window);
        Filling { shared: &self.shared, kernel: self.kernel.as_ref(), row, window, saved, is_touched }
    }

    /// Fills a window that this thread has claimed. `touched`: when a touch of it was read.
    fn fill(&mut self, row: Row, claim: Claim, touched: Option<Moment>) {
        let (shared, kernel) = (Arc::clone(&self.shared), Arc::clone(&self.kernel));
        let window = shared.rows.window(row);
        let saved = shared.saved.window(window);
        let is_touched = touched.is_some();
        let filling = Filling { shared: &shared, kernel: kernel.as_ref(), row, window, saved, is_touched };
        if !is_touched {
            shared.background_began(filling.stored(), shared.host.now());
        }
        let prepared = self.slots.take(filling.is_for_move(), window, kernel.as_ref(), shared.host.now());
        let mut prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return self.cannot_read(row, claim, format!("no memory to read it to: {error}")),
        };
        let has_no_huge_page = filling.is_for_move() && !prepared.is_huge;
        if let Err(error) = shared.saved.read(window, prepared.slot.bytes()) {
            self.slots.give_back(prepared);
            return self.cannot_read(row, claim, error.to_string());
        }
        if !shared.states.begin_placing(row, claim) {
            return self.slots.give_back(prepared); // another thread took over
        }
        self.placing = Some(row);
        match filling.place(&mut prepared) {
            Ok(placed) => self.placed(&filling, placed, touched, has_no_huge_page),
            Err(error) => {
                shared.states.settle(row, Settled::Failed);
                self.placing = None;
                self.fails(row, format!("the host has no memory for it: {error}; give it more, and restore again"));
            }
        }
        self.slots.give_back(prepared);
        shared.finish_if_done(kernel.as_ref());
    }

    /// Settles a window after its pages were placed, and counts it.
    fn placed(&mut self, filling: &Filling<'_>, placed: Placed, touched: Option<Moment>, has_no_huge_page: bool) {
        let Filling { shared, row, .. } = *filling;
        let waiting = shared.states.settle(row, placed.settled);
        self.placing = None;
        match placed.settled {
            Settled::LetGo(_) => shared.ram.claims().filled(filling.window),
            Settled::Kept | Settled::Failed => self.touch_again(row),
        }
        let woken = shared.host.now();
        let is_huge = filling.kernel.is_huge(filling.start()).unwrap_or(false);
        let wants_huge = wants_huge(&filling.saved) && !shared.config.is_page_by_page;
        if touched.is_some() && placed.was_moved {
            shared.was_moved(is_huge);
        }
        if wants_huge && !is_huge && shared.ram.backing().kind() == BackingKind::Anon {
            shared.is_not_huge(row, 0);
        }
        shared.counted.count(|report| {
            report.progress.filled_windows += 1;
            report.progress.filled_bytes += filling.stored();
            report.refused += placed.refused;
            report.no_huge_page += u64::from(has_no_huge_page);
            report.kept += u64::from(placed.settled == Settled::Kept);
            match (is_huge, wants_huge) {
                (true, _) => report.huge += 1,
                (false, true) => report.not_huge += 1,
                (false, false) => report.base += 1,
            }
            match touched {
                Some(_) => report.by_fault += 1,
                None => report.by_background += 1,
            }
            for at in touched.into_iter().chain(waiting) {
                report.fault_ns.saturating_record(in_ns(woken.since(at)));
            }
        });
    }

    fn cannot_read(&self, row: Row, claim: Claim, why: String) {
        if self.shared.states.cannot_read(row, claim) {
            self.fails(row, why);
            self.shared.finish_if_done(self.kernel.as_ref());
        }
    }

    /// Names a window that has failed. Its userfaultfd is never closed, or waiting threads would continue.
    fn fails(&self, row: Row, why: String) {
        std::mem::forget(Arc::clone(&self.kernel));
        self.shared.failed(self.shared.rows.window(row), why);
    }

    /// Names this thread. What it had in hand is filled by another one, or has failed.
    fn panicked(&mut self, panicked: &Panicked) {
        let in_hand = self.shared.states.panicked(self.number, self.placing.take());
        let what = in_hand.map_or("between two windows".to_owned(), |(row, _)| {
            format!("while it restored {}", self.shared.rows.window(row))
        });
        self.shared.lost(format!("{} {panicked}, {what}", name(self.number)));
        self.slots = Slots::default();
        match in_hand {
            Some((row, true)) => {
                self.fails(row, format!("a thread of the restore {panicked}"));
                self.shared.finish_if_done(self.kernel.as_ref());
            }
            Some((row, false)) => self.touch_again(row),
            None => {}
        }
    }

    /// Wakes the threads that wait for a window, which touch it again: another thread reads the message.
    fn touch_again(&self, row: Row) {
        let (start, bytes) = self.shared.rows.place(&(row..row + 1));
        if let Err(error) = self.kernel.wake(start, bytes) {
            tracing::error!("cannot wake the threads that wait for {}: {error}", self.shared.rows.window(row));
        }
    }

    fn look_for_overdue(&self) {
        for overdue in self.shared.states.take_overdue(self.shared.host.now(), self.shared.config.overdue_after) {
            let window = self.shared.rows.window(overdue.row);
            let (thread, waited) = (name(overdue.worker), overdue.waited.as_millis());
            self.shared.lost(format!("{thread} has not returned from reading {window} for {waited} ms"));
            self.touch_again(overdue.row);
        }
    }

    /// Collapses one window that was to be huge, if there is one.
    fn collapse_one(&self) -> bool {
        let Some((row, attempts)) = self.shared.next_to_collapse() else { return false };
        let (window, (_, range)) = (self.shared.rows.window(row), self.shared.rows.range(row));
        // A window that another part works on is that part's from now on.
        let Ok(_claim) = self.shared.ram.claims().window(window) else { return true };
        // A huge page would take again what the guest gave back.
        if self.shared.ram.given_back().book().is_given_back(window) {
            return true;
        }
        match collapse_window(&self.shared.host, range, window).result {
            OutcomeResult::Done | OutcomeResult::Skipped(Skip::AlreadyDone) => {
                self.shared.counted.count(|report| report.collapsed += 1);
            }
            OutcomeResult::Refused(Refusal::Busy) if attempts + 1 < COLLAPSES_MAX => {
                self.shared.host.sleep(Duration::from_millis(1));
                self.shared.is_not_huge(row, attempts + 1);
            }
            other => tracing::debug!("{window} stays on base pages: {other:?}"),
        }
        true
    }

    /// Sleeps until a thread touches, the restore ends, or the time is over.
    fn sleep(&self, time: Duration) -> io::Result<()> {
        let stopped = self.shared.stopped().as_fd();
        let mut fds = [self.kernel.touches(), stopped].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // Rounded up, so that a background that is due soon does not keep a core busy.
        let ms = u16::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        match poll(&mut fds, PollTimeout::from(ms)) {
            Ok(_) | Err(Errno::EINTR | Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests;
