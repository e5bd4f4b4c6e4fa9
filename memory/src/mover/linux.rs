//! The real mover: a userfaultfd, and an area for what is aside and what is ready.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use super::{ASIDE_SLOTS, Look, Mover, Place, TRIAL_SLOT};
use crate::backing::BackingKind;
use crate::host::{Advice, HostError, PageRun};
use crate::region::GuestRam;
use crate::sensors::zero_pages::read_in_search_of_use;
use crate::sys::mapping::{AddressReservation, MapError, Piece};
use crate::sys::userfaultfd::{Message, Mode, Userfaultfd, UserfaultfdError};
use crate::sys::{madvise::madvise, pagemap};

/// Moves pages of one VM's anonymous RAM.
#[derive(Debug)]
pub struct LinuxMover {
    uffd: Userfaultfd,
    pagemap: File,
    ram: Arc<GuestRam>,
    /// First the slots aside, then the ready ones.
    area: AddressReservation,
}

/// Why windows can not be moved.
#[derive(Debug, thiserror::Error)]
pub enum MoverError {
    /// The pages of a file are the file's.
    #[error("only anonymous memory can be moved, not {}: use --backing anon", .0.name())]
    NotAnonymous(BackingKind),
    /// No userfaultfd to be had, or none that moves.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// No addresses to be had.
    #[error("cannot map a place to move windows to: {0}")]
    Area(#[from] MapError),
    /// The kernel refused something else.
    #[error(transparent)]
    Host(#[from] HostError),
}

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const PAGE: Bytes = PageSize::Base4K.bytes();

impl LinuxMover {
    /// Opens a userfaultfd and maps the area: addresses, no memory yet. Nothing of `ram` is watched.
    ///
    /// # Errors
    /// [`MoverError`].
    pub fn open(ram: Arc<GuestRam>) -> Result<LinuxMover, MoverError> {
        if ram.backing().kind() != BackingKind::Anon {
            return Err(MoverError::NotAnonymous(ram.backing().kind()));
        }
        let uffd = Userfaultfd::open_for_moves()?;
        let pagemap = File::open("/proc/self/pagemap").map_err(host_error("open /proc/self/pagemap"))?;
        let (aside, ready) = (WINDOW * u64::from(ASIDE_SLOTS), WINDOW * u64::from(TRIAL_SLOT + 1));
        let area = AddressReservation::new(aside + ready, PageSize::Huge2M)?;
        let start = area.map_at(Bytes::ZERO, aside + ready, None)?;
        madvise(start + aside, ready, Advice::HugePage).map_err(host_error("madvise(MADV_HUGEPAGE)"))?;
        uffd.register(start, aside, Mode::Missing).map_err(host_error("UFFDIO_REGISTER"))?;
        Ok(LinuxMover { uffd, pagemap, ram, area })
    }

    fn piece(&self, place: Place, pages: &Range<u16>) -> Piece<'_> {
        let slot = |number: u16| self.area.piece(WINDOW * u64::from(number), WINDOW);
        let window = match place {
            Place::Guest(window) => self.ram.window(window),
            Place::Aside(number) => {
                assert!(number < ASIDE_SLOTS, "there are {ASIDE_SLOTS} slots");
                slot(number)
            }
            Place::Ready(number) => slot(ASIDE_SLOTS + number),
        };
        window.part(PAGE * u64::from(pages.start), PAGE * pages.len() as u64)
    }

    fn window(&self, window: WindowIndex) -> (Hva, Bytes) {
        (self.ram.window(window).start(), WINDOW)
    }

    /// The pages that are present, the shared zero page not counted.
    fn present(&self, place: Place) -> Result<Vec<PageRun>, HostError> {
        let piece = self.piece(place, &super::ALL_PAGES);
        let mut runs = Vec::new();
        let scanned = pagemap::scan(&self.pagemap, piece.start(), piece.bytes(), &mut runs);
        scanned.map_err(host_error("PAGEMAP_SCAN"))?;
        Ok(runs)
    }
}

fn host_error(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| HostError { what, source }
}

fn page_count(bytes: Bytes) -> u16 {
    u16::try_from(bytes.pages(PageSize::Base4K)).expect("a window has 512 pages")
}

impl Mover for LinuxMover {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.register(start, bytes, Mode::Missing).map_err(host_error("UFFDIO_REGISTER"))
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.unregister(start, bytes).map_err(host_error("UFFDIO_UNREGISTER"))?;
        // Unregistering wakes before it lets go: who touched in between waits again, and is woken here.
        self.wake(window)
    }

    fn wake(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.wake(start, bytes).map_err(host_error("UFFDIO_WAKE"))
    }

    fn move_pages(&self, from: Place, to: Place, pages: Range<u16>) -> Result<u16, HostError> {
        let moved = self.uffd.move_pages(self.piece(from, &pages), self.piece(to, &pages));
        moved.map(page_count).map_err(host_error("UFFDIO_MOVE"))
    }

    fn copy_page(&self, from: Place, to: Place, page: u16) -> Result<(), HostError> {
        let pages = page..page + 1;
        let copied = self.uffd.copy_pages(self.piece(from, &pages), self.piece(to, &pages));
        copied.map(drop).map_err(host_error("UFFDIO_COPY"))
    }

    fn copy_all(&self, from: Place, to: Place) -> Result<(), HostError> {
        for pages in self.held(from)? {
            self.piece(from, &pages).copy_to(self.piece(to, &pages));
        }
        Ok(())
    }

    fn discard(&self, place: Place, pages: Range<u16>) -> Result<(), HostError> {
        self.piece(place, &pages).discard().map_err(host_error("madvise(MADV_DONTNEED)"))
    }

    fn held(&self, place: Place) -> Result<Vec<Range<u16>>, HostError> {
        let piece = self.piece(place, &super::ALL_PAGES);
        let mut runs: Vec<PageRun> = Vec::new();
        let scanned = pagemap::scan_held(&self.pagemap, piece.start(), piece.bytes(), &mut runs);
        scanned.map_err(host_error("PAGEMAP_SCAN"))?;
        let pages = |run: PageRun| {
            let first = page_count(run.start - piece.start());
            first..first + page_count(run.bytes)
        };
        Ok(runs.into_iter().map(pages).collect())
    }

    fn zero_pages(&self, place: Place) -> Result<(Vec<Range<u16>>, Bytes), HostError> {
        let piece = self.piece(place, &super::ALL_PAGES);
        let mut read = Bytes::ZERO;
        let mut is_zero = |page: &u16| {
            let (is_zero, bytes) = read_in_search_of_use(piece.part(PAGE * u64::from(*page), PAGE));
            read += bytes;
            is_zero
        };
        let pages = |run: &PageRun| {
            let first = page_count(run.start - piece.start());
            first..first + page_count(run.bytes)
        };
        let runs = super::runs_of(self.present(place)?.iter().flat_map(pages).filter(&mut is_zero));
        Ok((runs, read))
    }

    fn look(&self, place: Place) -> Result<Look, HostError> {
        let runs = self.present(place)?;
        let count = |of: fn(&&PageRun) -> bool| runs.iter().filter(of).map(|run| page_count(run.bytes)).sum::<u16>();
        Ok(Look { resident: count(|_| true), is_huge: count(|run| run.is_huge) == BASE_PAGES_PER_WINDOW })
    }

    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        madvise(start, bytes, Advice::HugePage).map_err(host_error("madvise(MADV_HUGEPAGE)"))
    }

    fn populate(&self, slot: u16) -> Result<(), HostError> {
        // By a touch, which holds no lock but the mapping's own: MADV_POPULATE_WRITE has all of the process's (`mmap_lock`)
        // while the kernel clears the page, and whoever else wants to watch a window waits for that.
        self.piece(Place::Ready(slot), &super::ALL_PAGES).words()[0].store(0, Ordering::Relaxed);
        Ok(())
    }

    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        let mut messages = Vec::new();
        self.uffd.read(&mut messages).map_err(host_error("read of a userfaultfd"))?;
        let window = |message: &Message| match message {
            Message::Fault(page) => self.ram.window_at(*page),
            Message::MinorFault(_) | Message::Other(_) => None,
        };
        // All that are ours are passed on, whatever else there is: somebody waits for each.
        touches.extend(messages.iter().filter_map(window));
        match messages.iter().find(|message| window(message).is_none()) {
            None => Ok(()),
            Some(other) => Err(host_error("read of a userfaultfd")(io::Error::other(format!("not ours: {other:?}")))),
        }
    }
}

impl AsFd for LinuxMover {
    /// Readable when somebody waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::BackingConfig;
    use crate::mover::ALL_PAGES;
    use wideleaf_policies::{Gpa, GpaRange};

    const GUEST: Place = Place::Guest(WindowIndex::new(0));

    /// A mover of one window, or a reason to skip.
    fn mover() -> Option<LinuxMover> {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), WINDOW).expect("fits")], backing).expect("memory");
        LinuxMover::open(ram).inspect_err(|error| println!("skipped: {error}")).ok()
    }

    #[test]
    fn a_page_aside_can_be_copied_back_where_it_is_missing_and_nowhere_else() {
        let Some(mover) = mover() else { return };
        let word = |page: u16| &mover.piece(GUEST, &(page..page + 1)).words()[3];
        [5, 6].into_iter().for_each(|page| word(page).store(u64::from(page) + 100, Ordering::Relaxed));
        mover.watch(WindowIndex::new(0)).expect("nobody else watches");
        let mut first = 0;
        while first < BASE_PAGES_PER_WINDOW {
            first += mover.move_pages(GUEST, Place::Aside(0), first..BASE_PAGES_PER_WINDOW).expect("it moves");
        }
        let held = |place| mover.held(place).expect("scan").into_iter().flatten().collect::<Vec<u16>>();
        assert_eq!((held(GUEST), held(Place::Aside(0))), (vec![], vec![5, 6]));

        mover.copy_page(Place::Aside(0), GUEST, 5).expect("it is missing");
        assert_eq!(word(5).load(Ordering::Relaxed), 105);
        let errno = |refused: Result<u16, HostError>| refused.expect_err("it is there").source.raw_os_error();
        assert_eq!(errno(mover.copy_page(Place::Aside(0), GUEST, 5).map(|()| 1)), Some(libc::EEXIST));
        assert_eq!(errno(mover.move_pages(Place::Aside(0), GUEST, 5..6)), Some(libc::EEXIST));
        assert_eq!(mover.move_pages(Place::Aside(0), GUEST, 6..7).expect("it moves"), 1);
        assert_eq!(word(6).load(Ordering::Relaxed), 106);
        mover.discard(Place::Aside(0), ALL_PAGES).expect("it is ours");
        mover.unwatch(WindowIndex::new(0)).expect("it is watched");
        assert_eq!(word(7).load(Ordering::Relaxed), 0, "a hole reads zero again");
    }
}
