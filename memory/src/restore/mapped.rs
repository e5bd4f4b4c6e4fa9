//! Guest RAM as a private mapping of a snapshot's file, as VMMs with a file backend have it: the kernel reads a page of
//! 4 KiB when the guest touches it, and copies it when the guest writes it (`mmap(2)`, `MAP_PRIVATE`).
//!
//! ```text
//!   file    │ stored │ hole │ stored │ other bytes │ stored │ end
//!   RAM     └──────── one private mapping ─────────┘        │
//!             page cache, zeroes       anonymous: zeroes    anonymous: zeroes
//! ```
//!
//! It starts at once and needs no thread. In exchange no page that was written is huge or can become so (what is only
//! read may be in large folios of the page cache); no checksum is compared; and the file must stay as it is for as long
//! as the guest runs. It is there for comparison and for hosts without a userfaultfd.
//!
//! No actuator, sensor or balloon works on such RAM: they would drop pages that then read as the file instead of zero.
//! So its windows count as not filled ([`crate::claims`]) for as long as it exists.

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

use super::preparing::{check_empty, host_error};
use super::{RestoreError, SavedRam};
use crate::backing::BackingKind;
use crate::region::{GuestRam, RamError, RamRange};
use crate::sys::mapping::MapError;

const PAGE: Bytes = PageSize::Base4K.bytes();

/// Maximum number of stretches that are mapped without the file, because it has other bytes there. A quarter of the
/// mappings that a process may have (`vm.max_map_count`, 65530).
const STRETCHES_MAX: usize = 16_384;

/// Why saved RAM cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapSavedError {
    /// RAM of another kind.
    #[error("cannot map a snapshot over {} RAM: only anonymous RAM can be a copy; use --restore-pages auto", .0.name())]
    Backing(BackingKind),
    /// The file has bytes at too many places that read zero.
    #[error(
        "cannot map the snapshot: its file has other bytes at more than {STRETCHES_MAX} places where RAM is zero, \
         since its file system makes no holes; use --restore-pages auto"
    )]
    TooManyPlaces,
    /// The RAM is in use, or a call of the kernel failed.
    #[error(transparent)]
    Ram(#[from] RestoreError),
    /// A mapping failed.
    #[error("cannot map the snapshot: {0}")]
    Map(#[source] MapError),
    /// The kernel refused the nodes of a part.
    #[error("cannot map the snapshot: {0}")]
    Place(#[source] RamError),
    /// The file cannot be examined.
    #[error("cannot find the holes of the snapshot's file: {0}")]
    Holes(#[source] io::Error),
}

/// Maps `file`, which has each stored page at its guest-physical address, over `ram`. `saved` says which pages are
/// stored; all others read zero. The guest must not run yet.
///
/// # Errors
/// [`MapSavedError`]; a guest must not run in the RAM then.
pub fn map_saved(ram: &GuestRam, saved: &dyn SavedRam, file: &File) -> Result<(), MapSavedError> {
    if ram.backing().kind() != BackingKind::Anon {
        return Err(MapSavedError::Backing(ram.backing().kind()));
    }
    ram.share().map_err(RestoreError::from)?;
    let pagemap = File::open("/proc/self/pagemap").map_err(host_error("open /proc/self/pagemap"));
    check_empty(ram, &pagemap.map_err(RestoreError::from)?)?;
    ram.claims().begin_filling(ram.ranges().iter().flat_map(|range| range.gpa.windows()));
    let file_end = file.metadata().map_err(MapSavedError::Holes)?.len();
    let mut stretches = 0;
    for RamRange { gpa, .. } in ram.ranges() {
        let Some(in_file) = begin_of(*gpa, file_end) else { continue };
        ram.map_over(in_file, Some(file)).map_err(MapSavedError::Map)?;
        for zeroes in places_of_zeroes(saved, file, in_file)? {
            stretches += 1;
            if stretches > STRETCHES_MAX {
                return Err(MapSavedError::TooManyPlaces);
            }
            ram.map_over(zeroes, None).map_err(MapSavedError::Map)?;
        }
        // The new mappings have no memory policy yet.
        ram.place(*gpa).map_err(MapSavedError::Place)?;
    }
    Ok(())
}

/// The part of a range for which the file has whole pages.
fn begin_of(gpa: GpaRange, file_end: u64) -> Option<GpaRange> {
    let pages = file_end.checked_sub(gpa.start().get())? / PAGE.get();
    let bytes = (PAGE * pages).min(gpa.bytes());
    GpaRange::new(gpa.start(), bytes).filter(|_| bytes > Bytes::ZERO)
}

/// Pages in the range that are not stored although the file has bytes there.
fn places_of_zeroes(saved: &dyn SavedRam, file: &File, range: GpaRange) -> Result<Vec<GpaRange>, MapSavedError> {
    let mut places = Vec::new();
    for data in data_of(file, range).map_err(MapSavedError::Holes)? {
        let last_page = data.start() + (data.bytes() - PAGE);
        let (first, last) = (WindowIndex::containing(data.start()), WindowIndex::containing(last_page));
        for window in (first.get()..=last.get()).map(WindowIndex::new) {
            let stored = saved.window(window).pages;
            places.extend(PageSet::of_range(window, data).without(stored).ranges(window));
        }
        if places.len() > STRETCHES_MAX {
            return Err(MapSavedError::TooManyPlaces);
        }
    }
    Ok(places)
}

/// Parts of the range that are no holes of the file (`lseek(2)`, `SEEK_DATA`), as whole pages.
fn data_of(file: &File, range: GpaRange) -> io::Result<Vec<GpaRange>> {
    let (mut parts, mut at, end) = (Vec::new(), range.start().get(), range.end().get());
    while at < end {
        let data = match lseek(file, at as libc::off_t, Whence::SeekData) {
            Err(Errno::ENXIO) => break,
            data => (data? as u64 / PAGE.get() * PAGE.get()).min(end),
        };
        let hole = lseek(file, data as libc::off_t, Whence::SeekHole)? as u64;
        at = hole.next_multiple_of(PAGE.get()).clamp(data, end);
        parts.extend(GpaRange::new(Gpa::new(data), Bytes::new(at - data)).filter(|part| part.bytes() > Bytes::ZERO));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::{ReadError, SavedWindow};
    use super::*;
    use crate::backing::BackingConfig;
    use crate::numa::placement::{MemoryMode, NodePolicy, PlacedPart, Placement};
    use wideleaf_policies::units::mib;

    /// Windows 0 and 1 have every second page; all others are zero.
    struct EverySecond;

    impl SavedRam for EverySecond {
        fn window(&self, window: WindowIndex) -> SavedWindow {
            let pages = if window.get() < 2 { (0..512).step_by(2).collect() } else { PageSet::EMPTY };
            SavedWindow { pages, ..SavedWindow::default() }
        }

        fn read(&self, _: WindowIndex, _: &mut [u8]) -> Result<(), ReadError> {
            unreachable!("the kernel reads the file")
        }
    }

    fn ram(kind: BackingKind) -> Arc<GuestRam> {
        let backing = BackingConfig::new(kind, PageSize::Base4K).expect("it has base pages");
        GuestRam::map(&[GpaRange::new(Gpa::new(0), mib(8)).expect("fits")], backing).expect("addresses")
    }

    #[test]
    fn stored_pages_are_the_files_all_others_are_zero_and_a_write_stays_private() {
        let file = tempfile::tempfile().expect("a file");
        // Window 0 has bytes at all its pages, window 1 at the stored ones, and the file ends in it.
        for page in (0..512).chain((512..1000).step_by(2)) {
            file.write_all_at(&[page as u8 | 1; 4096], page * 4096).expect("room");
        }
        let ram = ram(BackingKind::Anon);
        map_saved(&ram, &EverySecond, &file).expect("the kernel maps it");
        let words = ram.words(ram.ranges()[0]);
        let read = |page: usize| words[page * 512 + 7].load(Ordering::Relaxed);
        for page in 0..2048 {
            let expected = if page < 1000 && page % 2 == 0 { u64::from_ne_bytes([page as u8 | 1; 8]) } else { 0 };
            assert_eq!(read(page), expected, "page {page}");
        }
        for page in [0, 1, 998, 2047] {
            words[page * 512 + 7].store(5, Ordering::Relaxed);
            assert_eq!(read(page), 5, "page {page}");
        }
        let mut byte = [0];
        file.read_exact_at(&mut byte, 998 * 4096 + 56).expect("it is there");
        assert_eq!(byte, [998_u64 as u8 | 1], "the file is as before");
        assert!(ram.claims().is_filling(), "actuators and balloons stay away");
    }

    #[test]
    fn mappings_of_the_file_and_of_zeroes_keep_the_nodes_of_ram() {
        if !std::path::Path::new("/proc/self/numa_maps").exists() {
            eprintln!("skipped: this kernel has no NUMA policies");
            return;
        }
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&vec![1; 1000 * 4096], 0).expect("room");
        let range = GpaRange::new(Gpa::new(0), mib(8)).expect("fits");
        let nodes = "0".parse().expect("a list");
        let policy = NodePolicy { mode: MemoryMode::Bind, nodes };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("it has base pages");
        let placement = Placement::of(vec![PlacedPart { gpa: range, policy }]);
        let ram = GuestRam::map_on(&[range], backing, placement).expect("addresses");
        map_saved(&ram, &EverySecond, &file).expect("the kernel maps it");
        let is_in_ram = |line: &&str| {
            let start = line.split(' ').next().and_then(|word| u64::from_str_radix(word, 16).ok());
            start.is_some_and(|start| (ram.base().get()..(ram.base() + mib(8)).get()).contains(&start))
        };
        let maps = std::fs::read_to_string("/proc/self/numa_maps").expect("it exists");
        let policies: Vec<&str> = maps.lines().filter(is_in_ram).filter_map(|line| line.split(' ').nth(1)).collect();
        assert!(policies.len() > 2 && policies.iter().all(|policy| *policy == "bind:0"), "{policies:?}");
    }

    #[test]
    fn other_memory_and_memory_in_use_are_refused() {
        let file = tempfile::tempfile().expect("a file");
        let error = map_saved(&ram(BackingKind::Memfd), &EverySecond, &file).expect_err("it has a file of its own");
        assert!(error.to_string().contains("memfd"), "{error}");
        let used = ram(BackingKind::Anon);
        used.words(used.ranges()[0])[9].store(1, Ordering::Relaxed);
        let error = map_saved(&used, &EverySecond, &file).expect_err("a page exists");
        assert!(error.to_string().contains("map new RAM"), "{error}");
    }

    #[test]
    fn a_part_of_the_file_that_is_no_whole_page_is_not_mapped() {
        let range = GpaRange::new(Gpa::new(0) + mib(2), mib(2)).expect("fits");
        assert_eq!(begin_of(range, (2 << 20) + 4095), None);
        assert_eq!(begin_of(range, 0), None);
        assert_eq!(begin_of(range, (2 << 20) + 8193).map(|part| part.bytes()), Some(Bytes::new(8192)));
        assert_eq!(begin_of(range, 1 << 40), Some(range));
    }
}
