//! Pages that the guest gave back, taken out of their reservation.
//!
//! ```text
//!   large       register ─ drop the entry ─▶ reserved, all populated ─┐   the guest's touches wait meanwhile
//!   reserved    ──────────────────────────────────────────────────────┴▶ punch ─▶ map the others again ─▶ wake
//!                  no populated page left: punch the whole window ─▶ untouched: the next touch reserves it anew
//!   let go      punch ─▶ the file is empty there? ─ register ─▶ untouched
//! ```
//!
//! A punched page reads zero at its next touch, which waits for a frame like a first touch. A huge folio with another
//! reference, such as a pin, cannot be split: the kernel clears its part and keeps the frame. So a transfer into a page
//! beside it loses nothing.

use std::io;

use wideleaf_policies::reservations::LeftPages;
use wideleaf_policies::{PageSet, PageSize, VmId, WindowIndex};

use super::frames::GivenBack;
use super::reserving::{Pages, Reserving, State};
use crate::faults::Touch;
use crate::host::{Advice, HostError};
use crate::sensors::host_backing::pages_of;

impl Reserving {
    /// Gives the frames of these pages to the host. After an error they may still be in memory, in part.
    pub(super) fn give_back(&mut self, vm: VmId, window: WindowIndex, pages: PageSet) -> Result<(), HostError> {
        let Some(touch) = self.faults.find_window(vm, window) else {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(HostError { what: "find a window of reserved frames", source });
        };
        let is_large = self.faults.state(touch).is_none() && self.book.is_whole(vm, window);
        if is_large {
            self.demote(touch)?;
        }
        let result = match self.faults.state(touch) {
            Some(State::Reserved(of)) => {
                let of = of.as_ref().clone();
                let left = self.depopulate(touch, of, pages);
                self.map_populated(touch);
                left
            }
            _ => self.punch(touch, pages).and_then(|()| self.await_first_touch(touch)),
        };
        if is_large {
            // Threads that touched the window meanwhile. Their messages are answered too, as touches of mapped pages.
            let woken = self.faults.wake_window(touch);
            woken
                .unwrap_or_else(|error| tracing::warn!("{vm}: cannot wake the threads that wait in {window}: {error}"));
        }
        result
    }

    /// Makes a large window a reserved one with all pages populated and none mapped. The file keeps every page, and
    /// touches wait from now on. After an error the window is large, as before.
    fn demote(&mut self, touch: Touch) -> Result<(), HostError> {
        let (vm, window) = (self.faults.vm(touch), touch.window);
        // Or khugepaged would undo it.
        self.host.advise(touch.start, PageSize::Huge2M.bytes(), Advice::NoHugePage)?;
        let all = Pages { populated: PageSet::ALL, ..Pages::default() };
        let registered = self.faults.take_back(touch, State::Reserved(Box::new(all)));
        registered.map_err(|source| HostError { what: "UFFDIO_REGISTER of a large window", source })?;
        if let Err(source) = self.faults.ram(touch).window(window).discard() {
            self.let_go(touch);
            self.book.end(vm, window);
            return Err(HostError { what: "madvise(MADV_DONTNEED) of a large window", source });
        }
        self.book.demote(vm, window, self.host.now());
        self.counted.count(|report| report.demoted += 1);
        Ok(())
    }

    /// Takes pages out of a reservation of which `of` are the pages.
    fn depopulate(&mut self, touch: Touch, of: Pages, pages: PageSet) -> Result<(), HostError> {
        let (vm, window) = (self.faults.vm(touch), touch.window);
        let with_frame = pages.without(of.absent);
        let populated = of.populated.without(pages);
        // The last page takes the reserved frames with it.
        self.punch(touch, if populated.is_empty() { PageSet::ALL } else { with_frame })?;
        let left = LeftPages {
            populated: with_frame.and(of.populated).len(),
            unpopulated: with_frame.without(of.populated).len(),
        };
        let state = match self.book.depopulate(vm, window, left, self.host.now()) {
            true => State::Reserved(Box::new(Pages { populated, absent: of.absent.with(pages), ..of })),
            false => {
                self.counted.count(|report| report.ended += 1);
                State::Untouched
            }
        };
        self.faults.set_state(touch, state);
        self.count_unpopulated();
        Ok(())
    }

    fn punch(&self, touch: Touch, pages: PageSet) -> Result<(), HostError> {
        let GivenBack { freed, refused } = self.frames.give_back(self.faults.ram(touch), &pages.ranges(touch.window));
        self.counted.count(|report| report.freed_for_guest += freed);
        refused.map_or(Ok(()), |source| Err(HostError { what: "fallocate(FALLOC_FL_PUNCH_HOLE)", source }))
    }

    /// Registers a window without a reservation again if the file is empty there, so that its next touch is a first
    /// one. The kernel may bring a page just now; then the next touch finds the window backed, and lets it go.
    fn await_first_touch(&mut self, touch: Touch) -> Result<(), HostError> {
        let looked = self.frames.has_nothing(self.faults.ram(touch), touch.window);
        if looked.map_err(|source| HostError { what: "lseek(SEEK_DATA) of guest RAM", source })? {
            let registered = self.faults.take_back(touch, State::Untouched);
            registered.map_err(|source| HostError { what: "UFFDIO_REGISTER of an empty window", source })?;
        }
        Ok(())
    }

    /// Maps the populated pages of a reserved window that are not mapped: a demotion drops all entries, and the kernel
    /// drops those of a huge folio that it splits. A page that cannot be mapped now is mapped by its next touch.
    fn map_populated(&self, touch: Touch) {
        let Some(State::Reserved(pages)) = self.faults.state(touch) else { return };
        let mut present = Vec::new();
        if self.host.scan(touch.start, PageSize::Huge2M.bytes(), &mut present).is_err() {
            return;
        }
        let present = pages_of(&present, touch.start, touch.window);
        for run in pages.populated.without(present).ranges(touch.window) {
            let mut at = touch.start + (run.start() - touch.window.start());
            let end = at + run.bytes();
            while at < end {
                let mapped = self.faults.uffd().map_file_pages(at, end - at);
                at = at + mapped.unwrap_or(PageSize::Base4K.bytes());
            }
        }
    }
}
