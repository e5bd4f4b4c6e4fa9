//! Give back: memory that a guest gave to its balloon or reported as free goes to the host, window by window under
//! the rules of [`wideleaf_policies::given_back`].
//!
//! ```text
//!   inflate, report ─▶ claim the window ─▶ look ─▶ decide ─┬─ release ─▶ discard, or punch holes ─▶ book: released
//!   manager, later ──▶   └ claimed, failed: due later      ├─ split ───▶ split, then the same
//!                                                          └─ keep ────▶ inflated: perhaps later   reported: forgotten
//! ```
//!
//! The book is locked from the scan until the pages are gone, so a deflating guest waits for that, and then has pages
//! that stay. Reported pages are decided on before their buffer is returned, and never later: from then on the guest
//! may use them.
//!
//! A pinned page goes like any other that the guest gave back: the guest said that it does not use it. If a guest
//! gives away the target of a transfer, it loses that data and nothing else. The transfer ends in a page that is
//! freed after it.
//!
//! Pages of the pool stay. A released one may be taken by another process at once, and a guest that touches its place
//! again would be killed by `SIGBUS`. Reserved frames go by way of the service that maps them, which demotes the window
//! first where that is needed ([`crate::reserved_frames`]). Their file has room for all of RAM, so a page that is
//! touched again is as good as one that was never touched.

use std::sync::Arc;

use wideleaf_policies::given_back::{Frames, GivenBackWindow, Verdict};
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Gpa, GpaRange, OutcomeResult, PageSet, PageSize, WindowIndex};

use super::split::split_window;
use crate::backing::BackingKind;
use crate::claims::Claimed;
use crate::guest_freed::GivenBackPages;
use crate::host::{Advice, Host, HostError};
use crate::region::{GuestRam, RamHasOwner, RamRange};
use crate::sensors::host_backing::window_pages;

/// Releases what one VM gives back.
#[derive(Clone)]
pub struct GiveBack {
    host: Arc<dyn Host>,
    ram: Arc<GuestRam>,
}

/// Pages that were released.
struct Gone {
    pages: PageSet,
    /// Number of those that were in memory.
    in_memory: u16,
}

impl GiveBack {
    /// For RAM that a guest uses.
    ///
    /// # Errors
    /// [`RamHasOwner`]: an owner's words must not become zero.
    pub fn new(host: Arc<dyn Host>, ram: Arc<GuestRam>) -> Result<GiveBack, RamHasOwner> {
        ram.share()?;
        Ok(GiveBack { host, ram })
    }

    /// RAM of the VM.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// The guest gives these pages to the balloon, and announces it before it uses one again. Pages outside
    /// RAM are counted.
    pub fn inflate(&self, pages: impl IntoIterator<Item = Gpa>) {
        let mut touched = Vec::new();
        for page in pages {
            if self.window_of(page).is_none() {
                self.ram.given_back().book().counters().outside_ram += 1;
                continue;
            }
            if self.ram.given_back().book().inflate(page) {
                touched.push(WindowIndex::containing(page));
            }
        }
        touched.sort_unstable();
        for of_window in touched.chunk_by(|one, other| one == other) {
            self.look_at(of_window[0], PageSet::default(), of_window.len() as u64);
        }
    }

    /// The balloon had these pages in a snapshot, and has them again. Nothing is released now: RAM may still be filled,
    /// and the manager finds what it filled. Pages outside RAM are ignored.
    pub fn inflate_restored(&self, runs: impl IntoIterator<Item = GpaRange>) {
        let page = PageSize::Base4K.bytes();
        for run in runs {
            for ram in self.ram.ranges() {
                let (start, end) = (run.start().max(ram.gpa.start()), run.end().min(ram.gpa.end()));
                let mut book = self.ram.given_back().book();
                let pages = std::iter::successors(Some(start), |at| Some(*at + page)).take_while(|at| *at < end);
                for at in pages.filter(|at| self.window_of(*at).is_some()) {
                    book.inflate(at);
                }
            }
        }
    }

    /// The guest takes these pages from the balloon. After the return none of them is released any more.
    pub fn deflate(&self, pages: impl IntoIterator<Item = Gpa>) {
        for page in pages {
            let is_ram = self.window_of(page).is_some();
            let mut book = self.ram.given_back().book();
            if is_ram {
                book.deflate(page);
            } else {
                book.counters().outside_ram += 1;
            }
        }
    }

    /// The guest does not use this memory now, but may do so as soon as this returns.
    pub fn report(&self, range: GpaRange) {
        let mut in_ram = 0;
        // The windows with a part of it.
        let (start, end) = (range.start().align_down(PageSize::Huge2M), range.end());
        let end = end.checked_align_up(PageSize::Huge2M).unwrap_or(end);
        let windows = GpaRange::new(start, end - start).unwrap_or(range);
        // By ranges of RAM: a report, however long, covers no more windows than those.
        for ram in self.ram.ranges().iter().filter_map(|ram| ram.part(windows)) {
            for window in ram.gpa.windows() {
                let offered = PageSet::of_range(window, range);
                in_ram += u64::from(offered.len());
                if !offered.is_empty() {
                    self.ram.given_back().book().counters().reported += u64::from(offered.len());
                    self.look_at(window, offered, offered.len().into());
                }
            }
        }
        let outside = (range.bytes().get() / PageSize::Base4K.bytes().get()).saturating_sub(in_ram);
        self.ram.given_back().book().counters().outside_ram += outside;
    }

    /// Checks up to `most` windows again, from `from` on: those that are due and, while the host is short, those with
    /// kept pages, if any may go then. Returns the window to continue with; `None`: the first.
    pub fn look_again(&self, from: WindowIndex, most: usize) -> Option<WindowIndex> {
        let given_back = self.ram.given_back();
        // Other memory is not split: its kept pages stay.
        let can_split = self.ram.backing().kind() == BackingKind::Anon || self.ram.frames_service().is_some();
        let windows = given_back.book().to_look_at(from, can_split && given_back.is_short(), most);
        windows.iter().for_each(|window| self.look_at(*window, PageSet::default(), 0));
        let last = windows.last().filter(|_| windows.len() == most)?;
        Some(WindowIndex::new(last.get() + 1))
    }

    /// Decides on one window, and acts. The pages of `offered` are reported, and free until this returns. `new`: the
    /// number of pages that the guest gave just now, offered or inflated.
    fn look_at(&self, window: WindowIndex, offered: PageSet, new: u64) {
        let given_back = self.ram.given_back();
        let Some(range) = self.window_of(window.start()) else { return };
        let claim = self.ram.claims().window_in_place(window);
        let _alone = given_back.discarding();
        let mut book = given_back.book();
        match &claim {
            Ok(_) => {}
            // Due once it is on pages of its own, and has its contents.
            Err(Claimed::OnGiantPage | Claimed::NotFilled) => return keep(&mut book, window, new, true),
            Err(_) => {
                book.counters().busy += 1;
                return keep(&mut book, window, new, true);
            }
        }
        match self.decide(&mut book, range, window, offered) {
            Ok(Some(Gone { pages, in_memory })) => book.mark_released(window, pages, in_memory),
            Ok(None) => keep(&mut book, window, new, false),
            Err(error) => {
                tracing::debug!(%window, %error, "memory that a guest gave back stays where it is");
                book.counters().failed += 1;
                keep(&mut book, window, new, true);
            }
        }
    }

    /// Releases pages, or returns `None` if they are kept.
    fn decide(
        &self,
        book: &mut GivenBackPages,
        range: RamRange,
        window: WindowIndex,
        offered: PageSet,
    ) -> Result<Option<Gone>, HostError> {
        let backing = self.ram.backing();
        let (seen, present) = window_pages(&*self.host, range, backing.fixed_page(), window)?;
        let seen = self.ram.claims().known(seen);
        // On a large page everything is present, also pages that were released before.
        let free = match seen.backing.is_large() {
            true => book.inflated(window).with(offered),
            false => book.kept(window).with(offered),
        };
        if free.is_empty() {
            return Ok(None);
        }
        let is_short = self.ram.given_back().is_short();
        let ask = |frames| GivenBackWindow { backing: seen.backing, frames, pages: free.len() };
        if let Some(service) = self.ram.frames_service()
            && book.rules().decide(ask(Frames::Reserved), is_short) == Verdict::Release
        {
            book.note_release(window, free);
            let gone = self.gone(window, free, present);
            if let Some(given_back) = service.give_back(window, free) {
                return given_back.map(|()| Some(gone));
            }
        }
        // Without a service, or after its end, frames are not reserved any more.
        let frames = if backing.fixed_page().is_some() { Frames::OfPool } else { Frames::Ordinary };
        match book.rules().decide(ask(frames), is_short) {
            Verdict::Keep => return Ok(None),
            Verdict::Split => {
                let split = split_window(&*self.host, backing.kind(), range, window);
                if split.result != OutcomeResult::Done {
                    return Ok(None);
                }
                book.counters().split_windows += 1;
            }
            Verdict::Release => {}
        }
        book.note_release(window, free);
        let gone = self.gone(window, free, present);
        self.release(range, window, free, seen.backing)?;
        Ok(Some(gone))
    }

    /// What a release of these pages frees, of a window of which those of `present` are mapped. A file may have pages
    /// that are not mapped.
    fn gone(&self, window: WindowIndex, pages: PageSet, present: PageSet) -> Gone {
        let is_all_known = self.ram.backing().kind() == BackingKind::Anon || pages.without(present).is_empty();
        let whole = GpaRange::new(window.start(), PageSize::Huge2M.bytes()).filter(|_| !is_all_known);
        // A count alone: the release does not fail with it.
        let in_file = whole.map(|whole| self.ram.in_file_of(whole).unwrap_or_default()).unwrap_or_default();
        let in_file = in_file.into_iter().map(|part| PageSet::of_range(window, part));
        let in_memory = in_file.fold(present, PageSet::with).and(pages).len();
        Gone { pages, in_memory }
    }

    fn release(&self, range: RamRange, window: WindowIndex, pages: PageSet, backing: Backing) -> Result<(), HostError> {
        let is_whole = pages.len() == BASE_PAGES_PER_WINDOW;
        let start = range.hva + (window.start() - range.gpa.start());
        if !is_whole && backing != Backing::Unbacked && self.ram.backing().kind() == BackingKind::Anon {
            // khugepaged fills holes of memory marked for it, by default up to 511 in a window. Without a mark, at the
            // limit of mappings, the pages go all the same.
            if let Err(error) = self.host.advise(start, PageSize::Huge2M.bytes(), Advice::NoHugePage) {
                tracing::debug!(%window, %error, "khugepaged may fill its holes");
            }
        }
        for run in pages.ranges(window) {
            let (what, done) = match self.ram.backing().kind() {
                BackingKind::Anon => ("madvise(MADV_DONTNEED)", self.ram.discard_pages(run)),
                BackingKind::Memfd | BackingKind::Hugetlb => ("fallocate(FALLOC_FL_PUNCH_HOLE)", self.ram.punch(run)),
            };
            done.map_err(|source| HostError { what, source })?;
        }
        Ok(())
    }

    /// The range of RAM that holds the whole window of an address.
    fn window_of(&self, page: Gpa) -> Option<RamRange> {
        let range = self.ram.ranges().iter().find(|range| range.gpa.contains(page))?;
        let start = WindowIndex::containing(page).start();
        let is_whole = range.gpa.start() <= start && start + PageSize::Huge2M.bytes() <= range.gpa.end();
        is_whole.then_some(*range)
    }
}

/// Leaves a window as it is, with `new` further pages that the guest gave.
fn keep(book: &mut GivenBackPages, window: WindowIndex, new: u64, is_due: bool) {
    book.counters().kept += new;
    book.set_due(window, is_due);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::BackingConfig;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::Bytes;
    use wideleaf_policies::units::{kib, mib};

    fn fake_host_and_ram(bytes: Bytes) -> (Arc<FakeHost>, Arc<GuestRam>) {
        let range = GpaRange::new(Gpa::new(0), bytes).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("valid");
        (Arc::default(), GuestRam::map(&[range], backing).expect("some mebibytes"))
    }

    #[test]
    fn pages_that_could_not_be_released_go_at_the_next_check() {
        let (host, ram) = fake_host_and_ram(mib(2));
        host.make_present(ram.base(), mib(2), false);
        let give_back = GiveBack::new(host.clone(), ram).expect("it has no owner");
        host.fail_call(0, libc::EIO);
        give_back.inflate((0..10).map(|page| Gpa::new(0) + kib(4) * page));
        let seen = || {
            let counters = give_back.ram().given_back().counters();
            (counters.failed, counters.released, counters.kept, counters.kept_now)
        };
        assert_eq!(seen(), (1, 0, 10, 10));
        assert_eq!(give_back.look_again(WindowIndex::new(0), 64), None);
        assert_eq!(seen(), (1, 10, 10, 0));
    }

    #[test]
    fn only_pages_that_were_in_memory_count_as_released() {
        let (host, ram) = fake_host_and_ram(mib(4));
        // Pages 4 to 9 of window 0; none of window 1.
        host.make_present(ram.base() + kib(16), kib(24), false);
        let give_back = GiveBack::new(host, ram).expect("it has no owner");
        let page = |page: u64| Gpa::new(0) + kib(4) * page;
        let seen = || {
            let counters = give_back.ram().given_back().counters();
            (counters.released, counters.kept, counters.kept_now)
        };
        give_back.inflate((0..8).map(page));
        assert_eq!(seen(), (4, 0, 0), "pages 4 to 7");
        give_back.report(GpaRange::new(page(8), kib(4)).expect("fits"));
        assert_eq!(seen(), (5, 0, 0), "page 8");
        give_back.inflate((512..1024).map(page));
        assert_eq!(seen(), (5, 0, 0), "none of window 1");
        assert_eq!(give_back.ram().given_back().counters().inflated_now, 520);
    }
}
