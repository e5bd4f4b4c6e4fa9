//! `mmap(2)`, `munmap(2)`, `mremap(2)`, `madvise(2)` with `MADV_DONTNEED`, and `memfd_create(2)` for guest RAM: an
//! address reservation, the pieces mapped into it, and moves and copies between two of them.

use std::arch::asm;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use wideleaf_policies::{Bytes, Hva, PageSize};

use super::memcpy;

/// Why a mapping could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The size does not fit an address space.
    #[error("{0} do not fit into this process's address space")]
    TooLarge(Bytes),
    /// A system call failed.
    #[error("{call}: {source}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Error of the kernel.
        source: std::io::Error,
    },
}

/// The call that failed under a limit of the process's address space (`setrlimit(2)`).
const LIMITED: &str = "mmap of an address reservation (limited by `ulimit -v`)";

/// Whether there is such a limit. It is read once, by the first reservation: that of guest RAM, before a sandbox
/// forbids the call.
fn is_address_space_limited() -> bool {
    static IS_LIMITED: OnceLock<bool> = OnceLock::new();
    let read = || getrlimit(Resource::RLIMIT_AS).is_ok_and(|(soft, _)| soft != RLIM_INFINITY);
    *IS_LIMITED.get_or_init(read)
}

fn call_error(call: &'static str) -> MapError {
    MapError::Call { call, source: std::io::Error::last_os_error() }
}

/// Flags of anonymous memory for which no space is reserved.
const PRIVATE_ANONYMOUS: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Number of words that are compared with zero at once.
const BLOCK_WORDS: usize = 8;

/// A range of addresses held with `PROT_NONE`, aligned as asked, that pieces can be mapped into. Unmaps everything in
/// it on drop.
#[derive(Debug)]
pub(crate) struct AddressReservation {
    base: usize,
    bytes: usize,
    /// Address that `mmap` returned. The range is up to one alignment larger than asked, so that an aligned
    /// base lies inside.
    mapped_at: usize,
    mapped_bytes: usize,
    /// Use of the words, settled by the first caller that asks for them or shares them with a guest.
    access: OnceLock<WordAccess>,
}

/// Access of this program to the words of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WordAccess {
    /// As atomic words, by any thread; guests may be at work on them.
    Shared,
    /// As plain words, by one owner.
    Exclusively,
}

impl AddressReservation {
    pub(crate) fn new(bytes: Bytes, alignment: PageSize) -> Result<AddressReservation, MapError> {
        let total = bytes.checked_add(alignment.bytes()).ok_or(MapError::TooLarge(bytes))?.as_usize();
        let is_limited = is_address_space_limited();
        // SAFETY: a new private mapping at an address of the kernel's choice; touches no existing memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                total,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(call_error(if is_limited { LIMITED } else { "mmap of an address reservation" }));
        }
        let mapped_at = start as usize;
        let base = mapped_at.next_multiple_of(alignment.bytes().as_usize());
        Ok(AddressReservation {
            base,
            bytes: bytes.as_usize(),
            mapped_at,
            mapped_bytes: total,
            access: OnceLock::new(),
        })
    }

    pub(crate) fn base(&self) -> Hva {
        Hva::new(self.base as u64)
    }

    /// Maps readable and writable memory at `offset` from the base: anonymous, or shared from a file at its own
    /// offset. Space for anonymous memory is not reserved (guests are larger than what they use). For hugetlb it is,
    /// so that a shortage shows here and not as a SIGBUS.
    pub(crate) fn map_at(&self, offset: Bytes, bytes: Bytes, file: Option<(&File, Bytes)>) -> Result<Hva, MapError> {
        let flags = if file.is_some() { libc::MAP_SHARED } else { PRIVATE_ANONYMOUS };
        self.map_with(offset, bytes, flags, file)
    }

    /// Maps a private copy of a part of a file at `offset` from the base, readable and writable: a page is the file's
    /// until it is written (`MAP_PRIVATE`). A file that becomes shorter ends a thread that touches the rest (SIGBUS).
    pub(crate) fn map_copy_at(&self, offset: Bytes, bytes: Bytes, file: (&File, Bytes)) -> Result<Hva, MapError> {
        self.map_with(offset, bytes, libc::MAP_PRIVATE | libc::MAP_NORESERVE, Some(file))
    }

    fn map_with(
        &self,
        offset: Bytes,
        bytes: Bytes,
        flags: c_int,
        file: Option<(&File, Bytes)>,
    ) -> Result<Hva, MapError> {
        let end = offset.checked_add(bytes).ok_or(MapError::TooLarge(bytes))?;
        assert!(end.as_usize() <= self.bytes, "{offset} + {bytes} is behind the reservation");
        let (fd, file_offset) = file.map_or((-1, 0), |(file, at)| (file.as_raw_fd(), at.get() as libc::off_t));
        let address = self.base + offset.as_usize();
        // SAFETY: MAP_FIXED replaces pages of this reservation only (asserted above). Either nothing refers to them
        // (PROT_NONE, or the room of `reserved_frames::frames`, of which no piece is made), or it is a giant's page
        // that is mapped over it with the same contents, while all threads and vCPUs that reach them stand still
        // (`actuators::giant`), or they are atomic words of a guest that has not run yet and of which no page exists
        // (`restore::mapped`).
        let mapped = unsafe {
            libc::mmap(
                address as *mut libc::c_void,
                bytes.as_usize(),
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                file_offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(call_error("mmap of guest RAM"));
        }
        Ok(Hva::new(address as u64))
    }

    /// Excludes an owner of the words from now on; `false` if there is one already.
    pub(crate) fn share(&self) -> bool {
        *self.access.get_or_init(|| WordAccess::Shared) == WordAccess::Shared
    }

    /// A part of the reservation. The caller, which mapped it, passes only ranges that `map_at` mapped.
    ///
    /// # Panics
    /// If it is not inside.
    pub(crate) fn piece(&self, offset: Bytes, bytes: Bytes) -> Piece<'_> {
        assert!((offset + bytes).as_usize() <= self.bytes, "{offset} + {bytes} is behind the reservation");
        Piece { start: self.base() + offset, bytes, of: self }
    }
}

/// Part of an address reservation. Guests and the kernel access the memory; this program accesses it either as
/// atomic words (`words`) or through one owner (`exclusive_words`), and reads it from outside (`peek`, `copy_to`)
/// regardless of writers.
///
/// The data of an owner is kept, and so is that of a guest. So a caller gives pages back ([`Piece::discard`]) only if
/// they are empty, or zero and out of reach during the call, or kept by a file. A caller that moves pages
/// ([`Piece::move_to`], `UFFDIO_MOVE`) ensures that every thread or vCPU that reaches for them stands still or waits
/// until they are there again. Nothing is copied over an owner's words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    start: Hva,
    bytes: Bytes,
    of: &'a AddressReservation,
}

impl<'a> Piece<'a> {
    pub(crate) fn start(self) -> Hva {
        self.start
    }

    pub(crate) fn bytes(self) -> Bytes {
        self.bytes
    }

    /// Its words. Atomic, so that threads, vCPUs and the kernel's own copying may all access them at the same time.
    ///
    /// # Panics
    /// If the reservation has an owner.
    pub(crate) fn words(self) -> &'a [AtomicU64] {
        assert!(self.of.share(), "the words at {} belong to one owner", self.start);
        let start = self.start.get() as *const AtomicU64;
        // SAFETY: `map_at` mapped the piece readable and writable (`AddressReservation::piece`) and it stays so for
        // as long as the reservation lives; it is page aligned; AtomicU64 allows any bits and any number of writers.
        unsafe { std::slice::from_raw_parts(start, self.count()) }
    }

    /// Its words for one owner; `None` if words of this reservation were requested or shared before.
    pub(crate) fn exclusive_words(self) -> Option<ExclusiveWords<'a>> {
        self.of.access.set(WordAccess::Exclusively).ok()?;
        Some(ExclusiveWords(self))
    }

    /// One of its words at some instant. In assembly, like the guest's and the kernel's own accesses: beside an owner
    /// that writes plain words, a load in Rust would be a data race.
    ///
    /// # Panics
    /// If there is no such word.
    #[inline]
    pub(crate) fn peek(self, index: usize) -> u64 {
        assert!(index < self.count(), "word {index} of {}", self.count());
        let at = self.start.get() as usize + index * size_of::<u64>();
        let word: u64;
        // SAFETY: reads eight aligned bytes inside the piece, which is mapped as for `words`, and writes
        // a register only.
        unsafe {
            asm!(
                "mov {word}, [{at}]",
                word = out(reg) word,
                at = in(reg) at,
                options(nostack, readonly, preserves_flags)
            )
        };
        word
    }

    /// Number of its first words that are zero, each at the time of its latest read.
    pub(crate) fn leading_zeroes(self) -> usize {
        let count = self.count();
        let mut zeroes = 0;
        while zeroes + BLOCK_WORDS <= count && self.is_block_zero(zeroes) {
            zeroes += BLOCK_WORDS;
        }
        while zeroes < count && self.peek(zeroes) == 0 {
            zeroes += 1;
        }
        zeroes
    }

    /// Whether the [`BLOCK_WORDS`] words from `first` on are zero. In assembly for the same reason as [`Piece::peek`].
    /// A giant in search of a word takes seconds to read word by word on an emulated processor.
    ///
    /// # Panics
    /// If not all of these words exist.
    #[inline]
    fn is_block_zero(self, first: usize) -> bool {
        assert!(first + BLOCK_WORDS <= self.count(), "words {first} to {} of {}", first + BLOCK_WORDS, self.count());
        let at = self.start.get() as usize + first * size_of::<u64>();
        let any: u64;
        // SAFETY: reads 64 aligned bytes inside the piece, which is mapped as for `words`, and writes a register
        // only.
        unsafe {
            asm!(
                "mov {any}, [{at}]",
                "or {any}, [{at} + 8]",
                "or {any}, [{at} + 16]",
                "or {any}, [{at} + 24]",
                "or {any}, [{at} + 32]",
                "or {any}, [{at} + 40]",
                "or {any}, [{at} + 48]",
                "or {any}, [{at} + 56]",
                any = out(reg) any,
                at = in(reg) at,
                options(nostack, readonly)
            )
        };
        any == 0
    }

    /// Number of its words.
    fn count(self) -> usize {
        self.bytes.as_usize() / size_of::<u64>()
    }

    /// A part of the piece.
    ///
    /// # Panics
    /// If it is not inside.
    pub(crate) fn part(self, offset: Bytes, bytes: Bytes) -> Piece<'a> {
        assert!(offset + bytes <= self.bytes, "{offset} + {bytes} is behind the piece");
        Piece { start: self.start + offset, bytes, of: self.of }
    }

    /// Gives the pages of mapped, private anonymous memory back (`MADV_DONTNEED`): it reads zero afterwards. The page
    /// table of a whole window goes with them if the kernel reclaims it (Linux 6.14, `CONFIG_PT_RECLAIM`). A file's
    /// pages are only unmapped, and stay in the file.
    ///
    /// In guest RAM the caller discards only empty pages, zero pages that cannot be written during the call, pages
    /// that the file keeps, or pages that no thread uses before their contents have come anew.
    pub(crate) fn discard(self) -> std::io::Result<()> {
        let start = self.start.get() as *mut libc::c_void;
        // SAFETY: the range is inside a reservation that lives through the call and stays mapped. The data of an
        // owner in it is kept: it was zero, or the file has it. For all other users words that become zero are a
        // store like any other.
        let result = unsafe { libc::madvise(start, self.bytes.as_usize(), libc::MADV_DONTNEED) };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Moves the pages of private anonymous memory to `to`, of equal size, in the place of its mapping. The piece
    /// itself stays mapped and is empty afterwards (`MREMAP_DONTUNMAP`, Linux 5.7): its addresses are never free, so
    /// that no other thread's `mmap` can get them.
    pub(crate) fn move_to(self, to: Piece<'_>) -> std::io::Result<()> {
        assert_eq!(self.bytes, to.bytes, "as much goes as comes");
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let (from, target) = (self.start.get() as *mut libc::c_void, to.start.get() as *mut libc::c_void);
        let bytes = self.bytes.as_usize();
        // SAFETY: both pieces are inside reservations that live through the call, and do not overlap (or the kernel
        // refuses). One of them is a side mapping, to which no reference exists. All threads and vCPUs that reach the
        // other one, a giant, stand still until it has its contents again (`actuators::giant`).
        let moved = unsafe { libc::mremap(from, bytes, bytes, flags, target) };
        if moved == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Copies the piece to `to`, of equal size, while other threads may write to either: each word arrives as it
    /// was at some instant of the copy. Bypasses the caches: a window is as large as a core's cache, and the guest
    /// needs that more.
    ///
    /// # Panics
    /// If the two are the same, not made of whole cache lines, or the words of `to` have an owner.
    pub(crate) fn copy_to(self, to: Piece<'_>) {
        assert_eq!(self.bytes, to.bytes, "as much goes as comes");
        assert!(self.start != to.start, "a copy goes to another place");
        assert_ne!(to.of.access.get(), Some(&WordAccess::Exclusively), "the words at {} belong to one owner", to.start);
        let (from, target) = (self.start.get() as *const u8, to.start.get() as *mut u8);
        // SAFETY: both pieces are inside reservations that live through the call. The copy is made in assembly, which
        // may read what an owner writes; what it writes has no owner (asserted above) and is reached as atomic words,
        // if at all. If a piece is not mapped, the copy ends in a SIGSEGV and not in other memory.
        unsafe { memcpy::stream(from, target, self.bytes.as_usize()) };
    }

    /// Copies the piece into memory of the caller while other threads may write to the piece: each byte arrives as it
    /// was at some instant of the copy.
    ///
    /// # Panics
    /// If `into` has another length.
    pub(crate) fn copy_into(self, into: &mut [u8]) {
        assert_eq!(self.bytes.as_usize(), into.len(), "as much goes as comes");
        // SAFETY: reads exactly the piece, which is mapped as for `words`, and writes exactly `into`, which is borrowed
        // mutably and so is not in the piece, to which no reference but of atomic words or of an owner exists. In
        // assembly for the same reason as `peek`. The direction flag is clear on entry, as the ABI has it.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") into.len() => _,
                inout("rsi") self.start.get() => _,
                inout("rdi") into.as_mut_ptr() => _,
                options(nostack, preserves_flags)
            )
        };
    }

    /// Fills the piece with zeroes, past the caches. Missing pages become present.
    ///
    /// # Panics
    /// If it is not made of whole cache lines, or its words have an owner.
    pub(crate) fn clear(self) {
        assert_ne!(
            self.of.access.get(),
            Some(&WordAccess::Exclusively),
            "the words at {} belong to one owner",
            self.start
        );
        // SAFETY: the piece is inside a reservation that lives through the call. Its words have no owner (asserted
        // above) and are reached as atomic words, if at all. If it is not mapped, this ends in a SIGSEGV.
        unsafe { memcpy::stream_zeroes(self.start.get() as *mut u8, self.bytes.as_usize()) };
    }
}

/// Words of one exclusive owner: no other Rust code of this program reads or writes them. Operations on their pages,
/// by the kernel or in assembly, keep the contents.
#[derive(Debug)]
pub struct ExclusiveWords<'a>(Piece<'a>);

impl ExclusiveWords<'_> {
    /// All words, as a slice.
    pub fn as_mut_slice(&mut self) -> &mut [u64] {
        let start = self.0.start.get() as *mut u64;
        // SAFETY: mapped, alive and aligned as in `Piece::words`, which refuses since this exists, as does the making
        // of a second one; `self` is borrowed mutably; any bits are a word.
        unsafe { std::slice::from_raw_parts_mut(start, self.0.count()) }
    }
}

impl Drop for AddressReservation {
    fn drop(&mut self) {
        // SAFETY: this is the range mmap returned; the owner of guest RAM is dropped last (an Arc), so no code uses
        // an address in it any more.
        let result = unsafe { libc::munmap(self.mapped_at as *mut libc::c_void, self.mapped_bytes) };
        // At `vm.max_map_count`, where it is part of a larger mapping, a neighbour's of the same kind.
        if result != 0 {
            let error = std::io::Error::last_os_error();
            tracing::warn!("cannot unmap {:#x} bytes at {:#x}: {error}", self.mapped_bytes, self.mapped_at);
        }
    }
}

/// A memory file of the given size: shmem, or hugetlb pages of `huge`.
pub(crate) fn create_memfd(bytes: Bytes, huge: Option<PageSize>) -> Result<File, MapError> {
    let size_flags = match huge {
        None => 0,
        Some(PageSize::Base4K) => unreachable!("hugetlb has no 4k pages"),
        Some(PageSize::Huge2M) => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        Some(PageSize::Giant1G) => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
    };
    // SAFETY: the name is a NUL-terminated literal; the call has no other pointer.
    let fd: c_int = unsafe { libc::memfd_create(c"wideleaf-guest-ram".as_ptr(), libc::MFD_CLOEXEC | size_flags) };
    if fd < 0 {
        return Err(call_error("memfd_create"));
    }
    // SAFETY: the descriptor is new and nothing else owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(bytes.get()).map_err(|source| MapError::Call { call: "ftruncate of the guest RAM memfd", source })?;
    Ok(file)
}
