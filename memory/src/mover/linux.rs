//! The real mover: a userfaultfd on one VM's anonymous RAM, and an area of addresses beside it, with slots for windows
//! aside, for huge pages and for base pages that are ready. Pages move between guest RAM and slots, and none is lost: a
//! call that fails leaves each page in one of the two places.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use super::{ASIDE_SLOTS, BASE_SLOTS, Mover, Place, PlaceBacking, TRIAL_SLOT};
use crate::backing::BackingKind;
use crate::host::{Advice, HostError, PageRun};
use crate::numa::placement::Source;
use crate::region::GuestRam;
use crate::sensors::zero_pages::read_in_search_of_use;
use crate::sys::mapping::{AddressReservation, MapError, Piece};
use crate::sys::userfaultfd::{MESSAGES_PER_READ, Message, Mode, Userfaultfd, UserfaultfdError};
use crate::sys::{madvise::madvise, pagemap};
use crate::thp_settings::is_thp_never;

/// Moves pages of one VM's anonymous RAM.
#[derive(Debug)]
pub struct LinuxMover {
    uffd: Userfaultfd,
    pagemap: File,
    ram: Arc<GuestRam>,
    /// Slots: first those aside, then the ready ones, then those for base pages.
    area: AddressReservation,
    /// Source by which each slot is placed now, as far as it is.
    placed: Mutex<BTreeMap<Place, Source>>,
}

/// Why windows cannot be moved.
#[derive(Debug, thiserror::Error)]
pub enum MoverError {
    /// The pages belong to a file.
    #[error("cannot move windows of {} memory: only anonymous memory can be moved; use --backing anon", .0.name())]
    NotAnonymous(BackingKind),
    /// No userfaultfd is available, or none that can move pages.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// No addresses are available.
    #[error("cannot map an area for windows: {0}")]
    Area(#[from] MapError),
    /// The kernel refused another call.
    #[error(transparent)]
    Host(#[from] HostError),
}

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const PAGE: Bytes = PageSize::Base4K.bytes();
const WORDS_PER_PAGE: usize = 4096 / size_of::<u64>();
/// Number of the first slot for base pages, behind the trial slot.
const BASE_FIRST: u16 = ASIDE_SLOTS + TRIAL_SLOT + 1;
/// Maximum number of reads of messages at a time: 1024 messages, more than a VM has threads.
const READS_MAX: usize = 64;

/// A mover that was opened.
pub struct OpenMover {
    /// Calls that move pages.
    pub mover: Arc<dyn Mover>,
    /// Descriptor that becomes readable when a thread touches a missing page.
    pub touches: Arc<dyn AsFd + Send + Sync>,
}

impl OpenMover {
    /// Opens the real mover of this RAM.
    ///
    /// # Errors
    /// The same as for [`LinuxMover::open`].
    pub fn of(ram: Arc<GuestRam>) -> Result<OpenMover, MoverError> {
        let mover = Arc::new(LinuxMover::open(ram)?);
        Ok(OpenMover { mover: mover.clone(), touches: mover })
    }
}

impl LinuxMover {
    /// Opens a userfaultfd and maps the area: addresses, no memory yet. Watches nothing of `ram`.
    ///
    /// # Errors
    /// [`MoverError`] with its reason.
    pub fn open(ram: Arc<GuestRam>) -> Result<LinuxMover, MoverError> {
        if ram.backing().kind() != BackingKind::Anon {
            return Err(MoverError::NotAnonymous(ram.backing().kind()));
        }
        let uffd = Userfaultfd::open_for_moves()?;
        let pagemap = File::open("/proc/self/pagemap").map_err(host_error("open /proc/self/pagemap"))?;
        let (aside, ready) = (WINDOW * u64::from(ASIDE_SLOTS), WINDOW * u64::from(TRIAL_SLOT + 1));
        let base = WINDOW * u64::from(BASE_SLOTS);
        let area = AddressReservation::new(aside + ready + base, PageSize::Huge2M)?;
        let start = area.map_at(Bytes::ZERO, aside + ready + base, None)?;
        madvise(start + aside, ready, Advice::HugePage).map_err(host_error("madvise(MADV_HUGEPAGE)"))?;
        madvise(start + aside + ready, base, Advice::NoHugePage).map_err(host_error("madvise(MADV_NOHUGEPAGE)"))?;
        if let Some(policy) = ram.placement().policy_of_all() {
            policy.apply(start, aside).map_err(host_error("mbind"))?;
        }
        uffd.register(start, aside, Mode::Missing).map_err(host_error("UFFDIO_REGISTER"))?;
        Ok(LinuxMover { uffd, pagemap, ram, area, placed: Mutex::default() })
    }

    /// Has the pages of an empty slot come from this source from now on. Each change of a mapping holds the lock of all
    /// mappings, so it is made only if it is one.
    fn place(&self, place: Place, source: Source) -> Result<(), HostError> {
        let Some(policy) = self.ram.placement().policy_of(source) else { return Ok(()) };
        let mut placed = self.placed.lock();
        if placed.get(&place) != Some(&source) {
            policy.apply(self.piece(place, &super::ALL_PAGES).start(), WINDOW).map_err(host_error("mbind"))?;
            placed.insert(place, source);
        }
        Ok(())
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
            Place::Base(number) => slot(BASE_FIRST + number),
        };
        window.part(PAGE * u64::from(pages.start), PAGE * pages.len() as u64)
    }

    fn window(&self, window: WindowIndex) -> (Hva, Bytes) {
        (self.ram.window(window).start(), WINDOW)
    }

    /// Populates a ready slot; `is_never`: whether no fault makes a huge page on this host.
    fn populate_under(&self, slot: u16, from: Source, is_never: impl Fn() -> bool) -> Result<(), HostError> {
        let place = Place::Ready(slot);
        self.place(place, from)?;
        // By a touch, which holds only the mapping's own lock: MADV_POPULATE_WRITE holds the whole process's
        // (`mmap_lock`) while the kernel clears the page, and other threads that want to watch a window would
        // wait for that.
        let piece = self.piece(place, &super::ALL_PAGES);
        piece.words()[0].store(0, Ordering::Relaxed);
        // The setting does not count for a collapse, which also frees the slot's page table: one that the kernel keeps
        // is noticed only when a huge page arrives in a window.
        if !self.look(place)?.is_huge && is_never() {
            madvise(piece.start(), WINDOW, Advice::Collapse).map_err(host_error("madvise(MADV_COLLAPSE)"))?;
        }
        Ok(())
    }

    /// The present pages, without the shared zero page.
    fn present(&self, place: Place) -> Result<Vec<PageRun>, HostError> {
        let piece = self.piece(place, &super::ALL_PAGES);
        let mut runs = Vec::new();
        let scanned = pagemap::scan(&self.pagemap, piece.start(), piece.bytes(), &mut runs);
        scanned.map_err(host_error("PAGEMAP_SCAN"))?;
        Ok(runs)
    }
}

/// Kernel calls for letting go of a range.
trait Watch {
    fn unregister(&self, start: Hva, bytes: Bytes) -> io::Result<()>;
    fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()>;
}

impl Watch for Userfaultfd {
    fn unregister(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        Userfaultfd::unregister(self, start, bytes)
    }

    fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        Userfaultfd::wake(self, start, bytes)
    }
}

/// Ends the watch of a range; afterwards no thread waits there. Unregistering wakes before it lets go
/// (`userfaultfd_unregister` in fs/userfaultfd.c): a thread that faults in between, under the lock of the mapping
/// alone, waits again, and is woken by the second call.
fn let_go(watch: &impl Watch, start: Hva, bytes: Bytes) -> Result<(), HostError> {
    watch.unregister(start, bytes).map_err(host_error("UFFDIO_UNREGISTER"))?;
    watch.wake(start, bytes).map_err(host_error("UFFDIO_WAKE"))
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
        let_go(&self.uffd, start, bytes)
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

    fn clear(&self, place: Place) -> Result<(), HostError> {
        self.piece(place, &super::ALL_PAGES).clear();
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

    fn occupied(&self, place: Place) -> Result<u16, HostError> {
        let piece = self.piece(place, &super::ALL_PAGES);
        let mut runs = Vec::new();
        let scanned = pagemap::scan_occupied(&self.pagemap, piece.start(), piece.bytes(), &mut runs);
        scanned.map_err(host_error("PAGEMAP_SCAN"))?;
        Ok(runs.iter().map(|run| page_count(run.bytes)).sum())
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

    fn look(&self, place: Place) -> Result<PlaceBacking, HostError> {
        let runs = self.present(place)?;
        let count = |of: fn(&&PageRun) -> bool| runs.iter().filter(of).map(|run| page_count(run.bytes)).sum::<u16>();
        Ok(PlaceBacking { resident: count(|_| true), is_huge: count(|run| run.is_huge) == BASE_PAGES_PER_WINDOW })
    }

    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        madvise(start, bytes, Advice::HugePage).map_err(host_error("madvise(MADV_HUGEPAGE)"))
    }

    fn forbid_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        madvise(start, bytes, Advice::NoHugePage).map_err(host_error("madvise(MADV_NOHUGEPAGE)"))
    }

    fn source_of(&self, window: WindowIndex) -> Source {
        self.ram.placement().source_of(window)
    }

    fn populate_base(&self, slot: u16, from: Source) -> Result<(), HostError> {
        self.place(Place::Base(slot), from)?;
        // By touches, for the same reason as below.
        let words = self.piece(Place::Base(slot), &super::ALL_PAGES).words();
        words.iter().step_by(WORDS_PER_PAGE).for_each(|word| word.store(0, Ordering::Relaxed));
        Ok(())
    }

    fn populate(&self, slot: u16, from: Source) -> Result<(), HostError> {
        self.populate_under(slot, from, || is_thp_never(Path::new("/")))
    }

    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        let mut messages = Vec::new();
        // One read takes 16 messages; more threads may wait, and all touched windows must be known.
        for reads in 1..=READS_MAX {
            self.uffd.read(&mut messages).map_err(host_error("read of a userfaultfd"))?;
            if messages.len() < reads * MESSAGES_PER_READ {
                break;
            }
        }
        let window = |message: &Message| match message {
            Message::Fault(page) => self.ram.window_at(*page),
            Message::MinorFault(_) | Message::Other(_) => None,
        };
        // Known messages are passed on whatever else there is: a thread waits for each.
        touches.extend(messages.iter().filter_map(window));
        match messages.iter().find(|message| window(message).is_none()) {
            None => Ok(()),
            Some(other) => Err(host_error("read of a userfaultfd")(io::Error::other(format!("unexpected: {other:?}")))),
        }
    }
}

impl AsFd for LinuxMover {
    /// Readable when a thread waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::BackingConfig;
    use crate::mover::ALL_PAGES;
    use std::cell::Cell;
    use std::os::fd::AsRawFd as _;
    use wideleaf_policies::{Gpa, GpaRange};

    const GUEST: Place = Place::Guest(WindowIndex::new(0));

    /// A mover of one window, or a reason to skip.
    fn mover() -> Option<LinuxMover> {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), WINDOW).expect("fits")], backing).expect("memory");
        LinuxMover::open(ram).inspect_err(|error| println!("skipped: {error}")).ok()
    }

    #[test]
    fn base_pages_are_made_as_such_and_a_cleared_place_reads_zero() {
        let Some(mover) = mover() else { return };
        mover.populate_base(3, Source::default()).expect("memory");
        let base = Place::Base(3);
        assert_eq!(mover.look(base).expect("scan"), PlaceBacking { resident: BASE_PAGES_PER_WINDOW, is_huge: false });
        assert_eq!(mover.look(Place::Base(2)).expect("scan").resident, 0, "its neighbour has none");
        let words = mover.piece(base, &ALL_PAGES).words();
        words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        mover.clear(base).expect("it is present");
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_ready_slot_becomes_huge_by_collapse_where_faults_make_no_huge_page() {
        let Some(mover) = mover() else { return };
        // Mapped anew, so that it has no mark: under `madvise`, as under `never`, a touch makes a base page.
        let slot = Place::Ready(0);
        let offset = mover.piece(slot, &ALL_PAGES).start() - mover.area.base();
        mover.area.map_at(offset, WINDOW, None).expect("it is its own");
        match mover.populate_under(0, Source::default(), || true) {
            Ok(()) => assert!(mover.look(slot).expect("scan").is_huge),
            Err(error) => println!("skipped: this host has no huge page: {error}"),
        }
    }

    #[test]
    fn the_shared_zero_page_is_held_and_occupies_nothing() {
        let Some(mover) = mover() else { return };
        let word = |page: u16| &mover.piece(GUEST, &(page..page + 1)).words()[3];
        word(5).store(1, Ordering::Relaxed);
        assert_eq!(word(6).load(Ordering::Relaxed), 0);
        let held: Vec<u16> = mover.held(GUEST).expect("scan").into_iter().flatten().collect();
        assert_eq!((held, mover.occupied(GUEST).expect("scan")), (vec![5, 6], 1));
    }

    /// A kernel in which unregistering wakes before it lets go; a thread faults in between.
    #[derive(Default)]
    struct LateToucher {
        is_registered: Cell<bool>,
        is_waiting: Cell<bool>,
    }

    impl Watch for LateToucher {
        fn unregister(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
            self.wake(start, bytes)?;
            self.is_waiting.set(self.is_registered.get());
            self.is_registered.set(false);
            Ok(())
        }

        fn wake(&self, _: Hva, _: Bytes) -> io::Result<()> {
            self.is_waiting.set(false);
            Ok(())
        }
    }

    #[test]
    fn a_thread_that_touches_a_window_during_let_go_does_not_wait_for_ever() {
        let late = LateToucher { is_registered: Cell::new(true), is_waiting: Cell::new(true) };
        let_go(&late, Hva::new(0), WINDOW).expect("nothing fails");
        assert!(!late.is_registered.get() && !late.is_waiting.get());
    }

    #[test]
    fn every_waiting_thread_is_known_for_any_number_of_them() {
        const WAITERS: u64 = 40; // of one page each, more than one read of messages takes
        let Some(mover) = mover() else { return };
        let window = WindowIndex::new(0);
        let word = |page: u64| &mover.piece(GUEST, &(page as u16..page as u16 + 1)).words()[3];
        (0..WAITERS).for_each(|page| word(page).store(page + 1, Ordering::Relaxed));
        mover.watch(window).expect("nothing else watches");
        let mut first = 0;
        while first < BASE_PAGES_PER_WINDOW {
            first += mover.move_pages(GUEST, Place::Aside(0), first..BASE_PAGES_PER_WINDOW).expect("it moves");
        }
        std::thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..WAITERS).map(|page| scope.spawn(move || word(page).load(Ordering::Relaxed))).collect();
            while pending(&mover) < WAITERS {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let mut touches = Vec::new();
            mover.read_touches(&mut touches).expect("it is open");
            let mut back = 0;
            while back < BASE_PAGES_PER_WINDOW {
                back += mover.move_pages(Place::Aside(0), GUEST, back..BASE_PAGES_PER_WINDOW).expect("it moves");
            }
            mover.unwatch(window).expect("it is watched");
            assert_eq!(touches, [window; WAITERS as usize]);
            let found: Vec<u64> = waiters.into_iter().map(|waiter| waiter.join().expect("it reads")).collect();
            assert!(found.into_iter().eq(1..=WAITERS));
        });
    }

    /// Number of waiting threads with an unread message (`pending:` in /proc/PID/fdinfo/FD; proc_pid_fdinfo(5)).
    fn pending(mover: &LinuxMover) -> u64 {
        let path = format!("/proc/self/fdinfo/{}", mover.as_fd().as_raw_fd());
        let text = std::fs::read_to_string(path).expect("it is open");
        let line = text.lines().find_map(|line| line.strip_prefix("pending:")).expect("a userfaultfd has it");
        line.trim().parse().expect("a number")
    }

    #[test]
    fn a_page_aside_can_be_copied_back_where_it_is_missing_and_nowhere_else() {
        let Some(mover) = mover() else { return };
        let word = |page: u16| &mover.piece(GUEST, &(page..page + 1)).words()[3];
        [5, 6].into_iter().for_each(|page| word(page).store(u64::from(page) + 100, Ordering::Relaxed));
        mover.watch(WindowIndex::new(0)).expect("nothing else watches");
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
        mover.discard(Place::Aside(0), ALL_PAGES).expect("it belongs to this mover");
        mover.unwatch(WindowIndex::new(0)).expect("it is watched");
        assert_eq!(word(7).load(Ordering::Relaxed), 0, "a hole reads zero again");
    }
}
