//! Guest RAM on the host: an owned mapping, unmapped on drop, placed so that every guest-physical address and
//! its host virtual address are equal modulo 1 GiB. Only then can one page of 2 MiB or 1 GiB back the same range
//! on both levels.
//!
//! ```text
//!   guest     0 ........ 3 GiB            4 GiB .....
//!             [ RAM      )     (hole)     [ RAM     )
//!             |                           |                hva = base + gpa, base a multiple of 1 GiB
//!   host      base                        base + 4 GiB
//!   [ PROT_NONE address reservation ........................ )
//! ```
//!
//! One address reservation spans everything from guest address zero, so the hole stays unmapped and stray accesses
//! fault, and translation is one addition.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use parking_lot::Mutex;
use wideleaf_policies::geometry::is_congruent;
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, NodeSet, PageSize, WindowIndex};

use crate::backing::{BackingConfig, BackingKind, RamFile};
use crate::claims::Claims;
use crate::guest_freed::GivenBack;
use crate::host::linux::LinuxHost;
use crate::host::{Advice, Host, HostError};
use crate::numa::placement::Placement;
pub use crate::ram_range::RamRange;
use crate::reserved_frames::FramesService;
pub use crate::sys::mapping::ExclusiveWords;
use crate::sys::mapping::{AddressReservation, MapError, Piece};

/// Number of 64-bit words of a base page.
pub(crate) const WORDS_PER_PAGE: usize = PageSize::Base4K.bytes().as_usize() / size_of::<u64>();

/// All RAM of one VM (or of one native kernel), mapped in this process.
///
/// RAM of a guest ([`GuestRam::share`]) is reached by address, and by references to atomic words only, because the
/// guest writes it at any time. RAM of a native kernel may be lent to one owner as plain words
/// ([`GuestRam::exclusive_words`]): all operations on its pages keep the owner's data.
#[derive(Debug)]
pub struct GuestRam {
    ranges: Vec<RamRange>,
    backing: BackingConfig,
    /// NUMA nodes of its pages.
    placement: Placement,
    reservation: AddressReservation,
    /// Dropped after the mapping, since it has the pages of giants, which are free when nothing maps them.
    claims: Arc<Claims>,
    given_back: GivenBack,
    /// The memfd, with the ranges one after the other. The VMM's children and an attached debugger find the
    /// RAM through it.
    file: Option<RamFile>,
    /// Way to the service that maps its reserved frames, if one was started.
    frames_service: Mutex<Option<Arc<FramesService>>>,
}

/// RAM that cannot be given to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot give this RAM to a guest: its words belong to one owner, a kernel in this process; map other RAM")]
pub struct RamHasOwner;

/// Why guest RAM could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The layout has no ranges.
    #[error("cannot map guest RAM: the layout is empty")]
    EmptyLayout,
    /// A range does not begin or end at a page of the backing.
    #[error("RAM {start}..{end} is not a whole number of {size} pages")]
    Misaligned {
        /// First address of the range.
        start: Gpa,
        /// First address after the range.
        end: Gpa,
        /// Page size of the backing.
        size: PageSize,
    },
    /// Ranges overlap or descend.
    #[error("RAM ranges must ascend without overlap: {0} comes after {1}")]
    Unordered(Gpa, Gpa),
    /// The kernel refused the mapping.
    #[error("cannot map {bytes} of guest RAM: {source}")]
    Map {
        /// Size of all ranges, in bytes.
        bytes: Bytes,
        /// Error of the mapping.
        source: MapError,
    },
    /// The kernel refused the nodes of a part.
    #[error(
        "cannot place guest RAM {start}..{end} on node {nodes}: {source}; name nodes that this process's cgroup allows"
    )]
    Place {
        /// First address of the part.
        start: Gpa,
        /// First address after the part.
        end: Gpa,
        /// Nodes of the part, as a list.
        nodes: Box<NodeSet>,
        /// Error of `mbind(2)`.
        source: io::Error,
    },
    /// The kernel refused an advice that the backing needs.
    #[error("cannot prepare guest RAM for {size} pages: {source}")]
    Advise {
        /// Page size to start with.
        size: PageSize,
        /// Error of the advice.
        source: HostError,
    },
}

impl GuestRam {
    /// Maps RAM for the ranges of `layout` (ascending, disjoint, whole pages of the backing). Nothing is populated
    /// yet: see [`crate::actuators::prefault`].
    ///
    /// # Errors
    /// [`RamError`]; nothing stays mapped.
    pub fn map(layout: &[GpaRange], backing: BackingConfig) -> Result<Arc<GuestRam>, RamError> {
        GuestRam::map_on(layout, backing, Placement::default())
    }

    /// The same, with pages on the nodes of `placement`.
    ///
    /// # Errors
    /// [`RamError`]; nothing stays mapped.
    pub fn map_on(
        layout: &[GpaRange],
        backing: BackingConfig,
        placement: Placement,
    ) -> Result<Arc<GuestRam>, RamError> {
        check_layout(layout, backing)?;
        let end = layout.last().ok_or(RamError::EmptyLayout)?.end();
        let total: Bytes = layout.iter().map(|range| range.bytes()).sum();
        let map_error = |source| RamError::Map { bytes: total, source };

        let reservation = AddressReservation::new(end - Gpa::new(0), PageSize::Giant1G).map_err(map_error)?;
        let file = backing.create_file(total).map_err(map_error)?;
        let mut file_offset = Bytes::ZERO;
        let mut ranges = Vec::with_capacity(layout.len());
        for gpa in layout.iter().copied() {
            let hva = reservation
                .map_at(gpa.start() - Gpa::new(0), gpa.bytes(), file.as_ref().map(|of| (&of.file, file_offset)))
                .map_err(map_error)?;
            assert!(is_congruent(gpa.start(), hva, PageSize::Giant1G), "{hva} must equal {} modulo 1 GiB", gpa.start());
            file_offset += gpa.bytes();
            ranges.push(RamRange { gpa, hva });
        }
        let (claims, given_back, frames_service) = (Arc::default(), GivenBack::default(), Mutex::default());
        let ram = GuestRam { ranges, backing, placement, reservation, claims, given_back, file, frames_service };
        ram.ranges.iter().try_for_each(|range| ram.place(range.gpa))?;
        // The pool's pages have their size already.
        if backing.kind() != BackingKind::Hugetlb {
            let not_advised = |source| RamError::Advise { size: backing.start_page(), source };
            let host = LinuxHost::open().map_err(not_advised)?;
            for range in &ram.ranges {
                ram.mark_for_start(&host, range.gpa).map_err(not_advised)?;
            }
        }
        Ok(Arc::new(ram))
    }

    /// Ranges of the RAM, ascending.
    pub fn ranges(&self) -> &[RamRange] {
        &self.ranges
    }

    /// Kind of memory behind the RAM.
    pub fn backing(&self) -> BackingConfig {
        self.backing
    }

    /// NUMA nodes of its pages.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Sets the memory policy of a new mapping at these addresses, before a page is there.
    pub(crate) fn place(&self, gpa: GpaRange) -> Result<(), RamError> {
        self.placement.pieces(gpa).try_for_each(|piece| {
            let start = self.base() + (piece.gpa.start() - Gpa::new(0));
            piece.policy.apply(start, piece.gpa.bytes()).map_err(|source| RamError::Place {
                start: piece.gpa.start(),
                end: piece.gpa.end(),
                nodes: Box::new(piece.policy.nodes),
                source,
            })
        })
    }

    /// Marks a part of RAM outside the pool for the pages that it starts with, before a page is there.
    pub(crate) fn mark_for_start(&self, host: &dyn Host, gpa: GpaRange) -> Result<(), HostError> {
        let hva = |gpa: GpaRange| self.base() + (gpa.start() - Gpa::new(0));
        self.backing.advise_at_start(host, hva(gpa), gpa.bytes())?;
        let starts_small = self.backing.start_page() == PageSize::Base4K;
        let mut pieces = self.placement.huge_pieces(gpa).filter(|_| starts_small);
        pieces.try_for_each(|piece| host.advise(hva(piece), piece.bytes(), Advice::HugePage))
    }

    /// Claims of threads on parts of it, and the giants on giant pages.
    pub fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// Record of the memory that its guest gave back.
    pub fn given_back(&self) -> &GivenBack {
        &self.given_back
    }

    /// Size of all ranges, in bytes.
    pub fn bytes(&self) -> Bytes {
        self.ranges.iter().map(|range| range.gpa.bytes()).sum()
    }

    /// Mapping of guest address zero; every range is at this plus its guest address.
    pub fn base(&self) -> Hva {
        self.reservation.base()
    }

    /// Excludes an owner of the words for good: a VMM does this before it gives the RAM to a guest.
    ///
    /// # Errors
    /// [`RamHasOwner`] after [`GuestRam::exclusive_words`].
    pub fn share(&self) -> Result<(), RamHasOwner> {
        if self.reservation.share() { Ok(()) } else { Err(RamHasOwner) }
    }

    /// The words of one range, for any number of threads of this process.
    ///
    /// # Panics
    /// If the RAM has an owner, or has no such range.
    pub fn words(&self, range: RamRange) -> &[AtomicU64] {
        self.piece(range).words()
    }

    /// The words of a part of a range, like [`GuestRam::words`].
    ///
    /// # Panics
    /// If the RAM has an owner, or the part is not wholly RAM.
    pub(crate) fn words_of(&self, gpa: GpaRange) -> &[AtomicU64] {
        let is_ram = |range: &RamRange| range.part(gpa).is_some_and(|part| part.gpa == gpa);
        assert!(self.ranges.iter().any(is_ram), "{gpa:?} is not RAM");
        self.reservation.piece(gpa.start() - Gpa::new(0), gpa.bytes()).words()
    }

    /// The words of one range for one owner, a kernel that runs in this process instead of in a guest. `None` if
    /// words of this RAM were requested before, or if a guest has it. The manager may work on it all the same:
    /// it moves pages through the kernel, which keeps their contents, and reads words from outside, as it does
    /// with a guest's.
    ///
    /// # Panics
    /// If the RAM has no such range.
    pub fn exclusive_words(&self, range: RamRange) -> Option<ExclusiveWords<'_>> {
        self.piece(range).exclusive_words()
    }

    /// The memory of one range.
    ///
    /// # Panics
    /// If the RAM has no such range.
    pub(crate) fn piece(&self, range: RamRange) -> Piece<'_> {
        assert!(self.ranges.contains(&range), "{range:?} is not a range of this RAM");
        self.reservation.piece(range.gpa.start() - Gpa::new(0), range.gpa.bytes())
    }

    /// Gives back the memory of a window of anonymous RAM: it reads zero afterwards. The caller ensures that the
    /// guest has no data there.
    pub(crate) fn discard(&self, window: WindowIndex) -> std::io::Result<()> {
        assert_eq!(self.backing.kind(), BackingKind::Anon, "other RAM keeps its contents when it is unmapped");
        self.window(window).discard()
    }

    /// The memory of a window.
    ///
    /// # Panics
    /// If the window is not wholly RAM.
    pub(crate) fn window(&self, window: WindowIndex) -> Piece<'_> {
        let (start, bytes) = (window.start(), PageSize::Huge2M.bytes());
        let is_ram = |range: &RamRange| range.gpa.contains(start) && start + bytes <= range.gpa.end();
        assert!(self.ranges.iter().any(is_ram), "{window} is not RAM");
        self.reservation.piece(start - Gpa::new(0), bytes)
    }

    /// Gives back base pages of anonymous RAM: they read zero afterwards. The caller ensures that they hold zeroes
    /// and cannot be written during the call, or that the guest gave them back.
    pub(crate) fn discard_pages(&self, pages: GpaRange) -> std::io::Result<()> {
        assert_eq!(self.backing.kind(), BackingKind::Anon, "other RAM keeps its contents when it is unmapped");
        self.reservation.piece(pages.start() - Gpa::new(0), pages.bytes()).discard()
    }

    /// Allocates memory for missing pages of file-backed RAM (`fallocate(2)`); maps nothing. An empty whole window of
    /// [reservable](BackingConfig::reservable) RAM gets one folio.
    pub(crate) fn allocate(&self, pages: GpaRange) -> io::Result<()> {
        let (file, offset) = self.in_file(pages.start());
        Ok(fallocate(file, FallocateFlags::empty(), offset, pages.bytes().get() as libc::off_t)?)
    }

    /// Gives the memory of pages of file-backed RAM back: they read zero afterwards. The caller ensures that the
    /// guest has no data there, and that no thread can write there during the call.
    pub(crate) fn punch(&self, pages: GpaRange) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (file, offset) = self.in_file(pages.start());
        Ok(fallocate(file, flags, offset, pages.bytes().get() as libc::off_t)?)
    }

    /// Whether the file is empty in a window: it has no page that was ever touched, present or swapped
    /// out (`lseek(2)`, `SEEK_DATA`).
    pub(crate) fn file_holds_nothing(&self, window: WindowIndex) -> io::Result<bool> {
        let (file, offset) = self.in_file(window.start());
        match lseek(file, offset, Whence::SeekData) {
            Ok(data) => Ok(data - offset >= PageSize::Huge2M.bytes().get() as libc::off_t),
            Err(Errno::ENXIO) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Those parts of a stretch of file-backed RAM that the file has, ascending: everything else reads zero. A file
    /// of huge pages does not say (`lseek(2)`, `SEEK_DATA`), and has all.
    pub(crate) fn in_file_of(&self, gpa: GpaRange) -> io::Result<Vec<GpaRange>> {
        if self.backing.kind() == BackingKind::Hugetlb {
            return Ok(vec![gpa]);
        }
        let (file, start) = self.in_file(gpa.start());
        let end = start + gpa.bytes().get() as libc::off_t;
        let (mut parts, mut at) = (Vec::new(), start);
        while at < end {
            let data = match lseek(file, at, Whence::SeekData) {
                Err(Errno::ENXIO) => break,
                data => data?.min(end),
            };
            at = lseek(file, data, Whence::SeekHole).map_or(end, |hole| hole.min(end));
            let part = |from: libc::off_t| gpa.start() + Bytes::new((from - start) as u64);
            parts.extend(GpaRange::new(part(data), part(at) - part(data)).filter(|part| part.bytes() > Bytes::ZERO));
        }
        Ok(parts)
    }

    /// Memory that the file has now.
    pub(crate) fn file_bytes(&self) -> io::Result<Bytes> {
        /// Unit of `st_blocks` (`stat(3type)`), in bytes.
        const BLOCK_BYTES: u64 = 512;
        Ok(Bytes::new(self.file().metadata()?.blocks() * BLOCK_BYTES))
    }

    /// The file, and the offset of a guest address in it.
    fn in_file(&self, gpa: Gpa) -> (&File, libc::off_t) {
        let before = self.ranges.iter().take_while(|range| range.gpa.end() <= gpa);
        let offset: Bytes = before.clone().map(|range| range.gpa.bytes()).sum();
        let range = self.ranges[before.count()];
        assert!(range.gpa.contains(gpa), "{gpa} is not RAM");
        (self.file(), (offset + (gpa - range.gpa.start())).get() as libc::off_t)
    }

    fn file(&self) -> &File {
        &self.file.as_ref().expect("only file-backed RAM has a file").file
    }

    /// Whether its file allocates an empty window as one folio, as long as the host has one.
    pub(crate) fn supplies_huge_folios(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.supplies_huge_folios)
    }

    /// Maps a window's part of the file a second time, over all of `room`, a reservation of one window.
    pub(crate) fn map_again(&self, window: WindowIndex, room: &AddressReservation) -> Result<Hva, MapError> {
        let (file, offset) = self.in_file(window.start());
        room.map_at(Bytes::ZERO, PageSize::Huge2M.bytes(), Some((file, Bytes::new(offset as u64))))
    }

    /// Maps a private copy of a file's bytes at the same offsets over anonymous RAM; without a file, new anonymous
    /// memory, which reads zero. No page of that RAM may exist, and its guest must not run yet.
    pub(crate) fn map_over(&self, gpa: GpaRange, file: Option<&File>) -> Result<(), MapError> {
        assert_eq!(self.backing.kind(), BackingKind::Anon, "other RAM has a file of its own");
        assert!(self.ranges.iter().any(|range| range.part(gpa).is_some_and(|part| part.gpa == gpa)), "{gpa:?} is RAM");
        let offset = gpa.start() - Gpa::new(0);
        match file {
            Some(file) => self.reservation.map_copy_at(offset, gpa.bytes(), (file, offset)),
            None => self.reservation.map_at(offset, gpa.bytes(), None),
        }
        .map(drop)
    }

    /// Way to the service that maps its reserved frames. The service may have ended since.
    pub(crate) fn frames_service(&self) -> Option<Arc<FramesService>> {
        self.frames_service.lock().clone()
    }

    /// Sets the way to the service that maps its reserved frames from now on.
    pub(crate) fn set_frames_service(&self, service: FramesService) {
        *self.frames_service.lock() = Some(Arc::new(service));
    }

    /// The giants that are wholly RAM with one memory policy, ascending: each could be one giant page.
    pub fn giants(&self) -> impl Iterator<Item = Gpa> + '_ {
        let giant = PageSize::Giant1G.bytes();
        let is_one = move |start: &Gpa| GpaRange::new(*start, giant).is_some_and(|all| self.placement.is_one(all));
        self.ranges.iter().flat_map(move |range| {
            let first = range.gpa.start().checked_align_up(PageSize::Giant1G).unwrap_or(range.gpa.end());
            let whole = range.gpa.end().get().saturating_sub(first.get()) / giant.get();
            (0..whole).map(move |i| first + giant * i).filter(is_one)
        })
    }

    /// Whether a base page reads zero all over now.
    pub(crate) fn is_zero(&self, page: Gpa) -> bool {
        let page = self.reservation.piece(page - Gpa::new(0), PageSize::Base4K.bytes());
        page.leading_zeroes() == WORDS_PER_PAGE
    }

    /// The address reservation that holds all of it.
    pub(crate) fn reservation(&self) -> &AddressReservation {
        &self.reservation
    }

    /// The window of an address of this process, if that is RAM.
    pub(crate) fn window_at(&self, address: Hva) -> Option<WindowIndex> {
        let offset = |start: Hva| address.get().checked_sub(start.get()).map(Bytes::new);
        self.ranges.iter().find_map(|range| {
            let offset = offset(range.hva).filter(|offset| *offset < range.gpa.bytes())?;
            Some(WindowIndex::containing(range.gpa.start() + offset))
        })
    }

    /// Copies RAM into memory of the caller while the guest may write it.
    ///
    /// # Panics
    /// If the stretch is not wholly RAM, or `into` has another length.
    pub(crate) fn copy_into(&self, gpa: GpaRange, into: &mut [u8]) {
        let is_ram = |range: &RamRange| range.part(gpa).is_some_and(|part| part.gpa == gpa);
        assert!(self.ranges.iter().any(is_ram), "{gpa:?} is not RAM");
        self.reservation.piece(gpa.start() - Gpa::new(0), gpa.bytes()).copy_into(into);
    }

    /// Mapping of a guest address, if that is RAM.
    pub fn hva(&self, gpa: Gpa) -> Option<Hva> {
        self.ranges.iter().find(|range| range.gpa.contains(gpa)).map(|range| range.hva + (gpa - range.gpa.start()))
    }
}

fn check_layout(layout: &[GpaRange], backing: BackingConfig) -> Result<(), RamError> {
    let size = backing.granule();
    for range in layout {
        if !(range.start().is_aligned_to(size) && range.end().is_aligned_to(size)) || range.bytes() == Bytes::ZERO {
            return Err(RamError::Misaligned { start: range.start(), end: range.end(), size });
        }
    }
    for pair in layout.windows(2) {
        if pair[1].start() < pair[0].end() {
            return Err(RamError::Unordered(pair[1].start(), pair[0].start()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::units::mib;

    fn two_mib() -> Arc<GuestRam> {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous memory has base pages");
        GuestRam::map(&[range], backing).expect("2 MiB can be mapped")
    }

    #[test]
    fn words_have_one_exclusive_owner() {
        let ram = two_mib();
        let mut words = ram.exclusive_words(ram.ranges()[0]).expect("they were not requested before");
        words.as_mut_slice()[7] = 8;
        assert_eq!((words.as_mut_slice().len(), words.as_mut_slice()[7]), (1 << 18, 8));
        assert!(ram.exclusive_words(ram.ranges()[0]).is_none(), "they are lent once");
    }

    #[test]
    fn words_that_have_an_owner_can_still_be_read_from_outside() {
        let ram = two_mib();
        let mut words = ram.exclusive_words(ram.ranges()[0]).expect("they were not requested before");
        words.as_mut_slice()[WORDS_PER_PAGE + 3] = 8;
        let piece = ram.piece(ram.ranges()[0]);
        assert_eq!((piece.leading_zeroes(), piece.peek(WORDS_PER_PAGE + 3)), (WORDS_PER_PAGE + 3, 8));
        let page = |index| Gpa::new(0) + PageSize::Base4K.bytes() * index;
        assert_eq!([0, 1, 2].map(|index| ram.is_zero(page(index))), [true, false, true]);
    }

    #[test]
    fn the_first_word_that_is_not_zero_is_found_at_every_place() {
        let ram = two_mib();
        let piece = ram.piece(ram.ranges()[0]);
        let words = ram.words(ram.ranges()[0]);
        assert_eq!(piece.leading_zeroes(), words.len());
        for place in (0..80).chain(words.len() - 80..words.len()) {
            words[place].store(1 << (place % 64), Ordering::Relaxed);
            assert_eq!(piece.leading_zeroes(), place);
            words[place].store(0, Ordering::Relaxed);
        }
    }

    #[test]
    #[should_panic(expected = "word 262144 of 262144")]
    fn a_word_behind_the_piece_is_not_read() {
        let ram = two_mib();
        ram.piece(ram.ranges()[0]).peek(1 << 18);
    }

    #[test]
    #[should_panic(expected = "belong to one owner")]
    fn words_that_have_an_owner_are_not_shared() {
        let ram = two_mib();
        let _words = ram.exclusive_words(ram.ranges()[0]).expect("they were not requested before");
        ram.words(ram.ranges()[0]);
    }

    #[test]
    fn words_that_are_shared_get_no_owner() {
        let ram = two_mib();
        ram.words(ram.ranges()[0])[7].store(8, Ordering::Relaxed);
        assert!(ram.exclusive_words(ram.ranges()[0]).is_none());
    }

    #[test]
    fn a_guest_gets_no_ram_that_has_an_owner_and_a_guests_ram_gets_none() {
        let (owned, shared) = (two_mib(), two_mib());
        let _words = owned.exclusive_words(owned.ranges()[0]).expect("they were not requested before");
        assert_eq!(owned.share(), Err(RamHasOwner));
        assert_eq!((shared.share(), shared.share()), (Ok(()), Ok(())), "a second VM may have it too");
        assert!(shared.exclusive_words(shared.ranges()[0]).is_none());
        assert_eq!(shared.words(shared.ranges()[0])[7].load(Ordering::Relaxed), 0);
    }

    #[test]
    #[should_panic(expected = "belong to one owner")]
    fn nothing_is_copied_over_words_that_have_an_owner() {
        let (from, to) = (two_mib(), two_mib());
        let _words = to.exclusive_words(to.ranges()[0]).expect("they were not requested before");
        from.piece(from.ranges()[0]).copy_to(to.piece(to.ranges()[0]));
    }

    #[test]
    fn the_part_of_a_range_moves_both_addresses() {
        // range [2M---------8M)   asked [0---4M)   [6M---9M)   [8M-9M)
        let gpa = |start, bytes| GpaRange::new(Gpa::new(0) + mib(start), mib(bytes)).expect("fits");
        let range = RamRange { gpa: gpa(2, 6), hva: Hva::new(1 << 40) };
        assert_eq!(range.part(gpa(0, 4)), Some(RamRange { gpa: gpa(2, 2), hva: Hva::new(1 << 40) }));
        assert_eq!(range.part(gpa(6, 3)), Some(RamRange { gpa: gpa(6, 2), hva: Hva::new(1 << 40) + mib(4) }));
        assert_eq!(range.part(gpa(8, 1)), None);
    }
}
