//! The writer of a snapshot's pages and of its index. Pages arrive in any order, from several threads, and again
//! whenever the guest has written them; what arrived last counts.
//!
//! ```text
//!   page arrives ─┬─ zero ────────────────────────▶ forgotten: out of the mask, a hole in `memory`
//!                 ├─ as in the base, byte by byte ─▶ stored, not own: a hole in `memory`
//!                 └─ other ────────────────────────▶ stored and own: written to its place in `memory`
//! ```
//!
//! Masks and checksums stay in memory until the end: 2 KiB for each window that stores a page.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, GpaRange, PageSet, PageSize, WindowIndex};

use crate::id::SnapshotId;
use crate::index::{self, BaseLink, DEPTH_MAX, Header, Record, sum_of_sums};
use crate::layout::Layout;
use crate::opened::Opened;
use crate::pages::{PAGE_BYTES, WINDOW_BYTES, bytes_of, checksum, is_zero, offset_of, place_of};

thread_local! {
    /// Bytes of a window of the base, to compare. Kept, since mapping 2 MiB anew takes longer than reading a page.
    static OF_BASE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The snapshot that a new one is saved on. Pages that are equal there are not written again.
#[derive(Debug)]
pub struct Base {
    /// The open base, by [`Caching::PageCache`](crate::Caching): pages are compared one by one.
    pub opened: Opened,
    /// Path of its folder, relative to the folder of the new snapshot.
    pub path: PathBuf,
}

/// What an index says of a window apart from its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowNotes {
    /// Page size of the window's backing on the host.
    pub page: PageSize,
    /// Heat of the window: higher is hotter.
    pub heat: u16,
    /// Time since the window's latest known use, in seconds.
    pub age_s: u32,
}

/// What a writer has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of stored pages, with those that the base has.
    pub stored_pages: u64,
    /// Those of the stored pages that the base has.
    pub base_pages: u64,
    /// Number of times that an arriving page was zero.
    pub zero_pages: u64,
    /// Size of the pages in the file `memory`, in bytes.
    pub own: Bytes,
    /// Bytes written into `memory` in total, with pages that were written again.
    pub written: Bytes,
    /// Length of the index, in bytes.
    pub index: Bytes,
}

/// Takes the pages of RAM and writes them; see the module.
#[derive(Debug)]
pub struct WindowsWriter {
    id: SnapshotId,
    layout: Layout,
    memory: File,
    base: Option<Base>,
    /// For each range of the layout, its first window and the place of that window's pages in `windows`.
    starts: Vec<(WindowIndex, usize)>,
    windows: Vec<Mutex<Option<Box<Pages>>>>,
    /// The first write that failed: its kind of error and its words, for all threads.
    failure: OnceLock<(io::ErrorKind, String)>,
    /// Whether the file system makes holes in files.
    makes_holes: AtomicBool,
    zero_pages: AtomicU64,
    written_pages: AtomicU64,
}

/// What is stored of a window.
#[derive(Clone, Debug)]
struct Pages {
    stored: PageSet,
    own: PageSet,
    /// Checksums of the stored pages, by page.
    sums: [u32; BASE_PAGES_PER_WINDOW as usize],
}

/// Arriving pages of a window, by what becomes of them.
#[derive(Default)]
struct Arrived {
    zero: PageSet,
    in_base: PageSet,
    to_write: PageSet,
}

impl WindowsWriter {
    /// A writer into the empty file `memory`, for a VM with this RAM.
    ///
    /// # Errors
    /// If the layout has no range, more than 64, or one that is not whole base pages below 16 TiB; if the base belongs
    /// to another layout; if the kernel has no random numbers.
    pub fn new(memory: File, ram: &[GpaRange], base: Option<Base>) -> io::Result<WindowsWriter> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        let layout = Layout::new(ram.to_vec());
        let layout = layout.ok_or_else(|| invalid("cannot save RAM with this layout: it has no format"))?;
        if base.as_ref().is_some_and(|base| *base.opened.layout() != layout) {
            return Err(invalid("the base is of a VM with another layout of RAM; save without a base"));
        }
        if base.as_ref().is_some_and(|base| base.opened.depth() >= DEPTH_MAX) {
            return Err(invalid("the base has 15 bases already; save without a base"));
        }
        let mut starts: Vec<(WindowIndex, usize)> = Vec::new();
        let mut count = 0;
        let mut next = None;
        for window in layout.windows() {
            if next != Some(window) {
                starts.push((window, count));
            }
            (next, count) = (Some(WindowIndex::new(window.get() + 1)), count + 1);
        }
        Ok(WindowsWriter {
            id: SnapshotId::random()?,
            layout,
            memory,
            base,
            starts,
            windows: std::iter::repeat_with(Mutex::default).take(count).collect(),
            failure: OnceLock::new(),
            makes_holes: AtomicBool::new(true),
            zero_pages: AtomicU64::new(0),
            written_pages: AtomicU64::new(0),
        })
    }

    /// Stores these pages of a window, in place of what was stored of them. `data` has the bytes of the whole window;
    /// those of other pages are not looked at.
    ///
    /// # Errors
    /// The kernel's error of the first write that failed, with the file's name. Every later call fails with it, without
    /// writing, and so does [`WindowsWriter::finish`].
    ///
    /// # Panics
    /// If `data` is not 2 MiB long.
    pub fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        assert_eq!(data.len(), WINDOW_BYTES, "a window is 2 MiB");
        self.check()?;
        let done = self.store(window, pages, data);
        done.inspect_err(|error| {
            // Kept only if it is the first.
            let _ = self.failure.set((error.kind(), error.to_string()));
        })
    }

    /// The first failure, if there is one. Several threads write, and any one of them may be heard first.
    fn check(&self) -> io::Result<()> {
        self.failure.get().map_or(Ok(()), |(kind, words)| Err(io::Error::new(*kind, words.clone())))
    }

    fn store(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        if !pages.without(self.layout.pages(window)).is_empty() {
            let what = format!("cannot save pages of {window}: they are not RAM");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let mut slot = self.slot(window);
        let zero: PageSet = pages.iter().filter(|page| is_zero(&data[place_of(*page)])).collect();
        self.zero_pages.fetch_add(u64::from(zero.len()), Ordering::Relaxed);
        if slot.is_none() && zero == *pages {
            return Ok(());
        }
        let entry = slot.get_or_insert_with(Box::default);
        pages.without(zero).iter().for_each(|page| entry.sums[usize::from(page)] = checksum(&data[place_of(page)]));
        let in_base = self.in_base(window, pages.without(zero), &entry.sums, data);
        let arrived = Arrived { zero, in_base, to_write: pages.without(zero).without(in_base) };
        self.put(window, entry, &arrived, data)?;
        if entry.stored.is_empty() {
            *slot = None;
        }
        Ok(())
    }

    fn put(&self, window: WindowIndex, entry: &mut Pages, arrived: &Arrived, data: &[u8]) -> io::Result<()> {
        for run in arrived.to_write.runs() {
            self.memory.write_all_at(&data[bytes_of(&run)], offset_of(window, run.start)).map_err(cannot_write)?;
        }
        self.written_pages.fetch_add(u64::from(arrived.to_write.len()), Ordering::Relaxed);
        let left = arrived.zero.with(arrived.in_base);
        for run in entry.own.and(left).runs() {
            self.punch(window, run)?;
        }
        entry.own = entry.own.without(left).with(arrived.to_write);
        entry.stored = entry.stored.without(arrived.zero).with(arrived.in_base).with(arrived.to_write);
        Ok(())
    }

    /// Those of these pages that the base has with the same bytes. Equal checksums only say where to look: two pages
    /// can have one CRC-32, and a guest can make such pages.
    fn in_base(&self, window: WindowIndex, pages: PageSet, sums: &[u32; 512], data: &[u8]) -> PageSet {
        let Some(base) = &self.base else { return PageSet::EMPTY };
        // A damaged base has no page that is known to be equal: all are written.
        let Ok(Some(of_base)) = base.opened.sums(window) else { return PageSet::EMPTY };
        let alike: PageSet = pages.iter().filter(|page| of_base.of(*page) == Some(sums[usize::from(*page)])).collect();
        if alike.is_empty() {
            return PageSet::EMPTY;
        }
        OF_BASE.with_borrow_mut(|there| {
            there.resize(WINDOW_BYTES, 0);
            if base.opened.read_pages(window, &alike, there).is_err() {
                return PageSet::EMPTY;
            }
            alike.iter().filter(|page| there[place_of(*page)] == data[place_of(*page)]).collect()
        })
    }

    /// Gives the space of pages back to the file system, where it can.
    fn punch(&self, window: WindowIndex, run: Range<u16>) -> io::Result<()> {
        if !self.makes_holes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let bytes = bytes_of(&run).len() as i64;
        match fallocate(&self.memory, flags, offset_of(window, run.start) as i64, bytes) {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
                self.makes_holes.store(false, Ordering::Relaxed);
                Ok(())
            }
            done => done.map_err(|errno| cannot_write(errno.into())),
        }
    }

    /// Writes the index into the empty file `windows`. `machine` has the bytes that `machine.json` has or will get, and
    /// `notes` is asked once for each window that stores a page, ascending. This takes some 10 ms a GiB, and
    /// the guest may run again meanwhile: the bytes of `machine` are its state at the pause.
    ///
    /// # Errors
    /// The kernel's error, or that of the first write that failed. The files are then no snapshot.
    pub fn finish(
        self,
        windows: &File,
        machine: &[u8],
        notes: impl FnMut(WindowIndex) -> WindowNotes,
    ) -> io::Result<Written> {
        if machine.len() as u64 > index::MACHINE_BYTES_MAX {
            let what = format!("the machine's state has {} bytes, more than the format's 16 MiB", machine.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let (records, sums) = self.records(notes);
        self.check()?;
        let stored_pages: u64 = records.iter().map(|record| u64::from(record.stored.len())).sum();
        let own_pages: u64 = records.iter().map(|record| u64::from(record.own.len())).sum();
        let header = self.header(machine, &records);
        let mut target = BufWriter::new(windows);
        index::write(&mut target, &header, &records, sums).and_then(|()| target.flush()).map_err(cannot_write_index)?;
        let index = windows.metadata().map_err(cannot_write_index)?.len();
        let page = PageSize::Base4K.bytes();
        Ok(Written {
            stored_pages,
            base_pages: stored_pages - own_pages,
            zero_pages: self.zero_pages.into_inner(),
            own: page * own_pages,
            written: page * self.written_pages.into_inner(),
            index: Bytes::new(index),
        })
    }

    fn header(&self, machine: &[u8], records: &[Record]) -> Header {
        let end = |record: &Record| record.own.iter().last().map(|page| offset_of(record.window, page + 1));
        let link =
            |base: &Base| BaseLink { id: base.opened.id(), depth: base.opened.depth() + 1, path: base.path.clone() };
        Header {
            id: self.id,
            machine_bytes: machine.len() as u64,
            machine_sum: crc32fast::hash(machine),
            layout: self.layout.clone(),
            records: records.len() as u64,
            memory_bytes: records.iter().rev().find_map(end).unwrap_or(0),
            base: self.base.as_ref().map(link),
        }
    }

    /// The records, ascending, and the checksums of all stored pages.
    fn records(&self, mut notes: impl FnMut(WindowIndex) -> WindowNotes) -> (Vec<Record>, impl Iterator<Item = u32>) {
        let entries: Vec<(WindowIndex, Box<Pages>)> =
            self.layout.windows().filter_map(|window| Some((window, self.slot(window).take()?))).collect();
        let record = |(window, pages): &(WindowIndex, Box<Pages>)| {
            let WindowNotes { page, heat, age_s } = notes(*window);
            let (stored, own, sums_sum) = (pages.stored, pages.own, sum_of_sums(pages.stored_sums()));
            Record { window: *window, page, heat, age_s, stored, own, sums_sum }
        };
        let records = entries.iter().map(record).collect();
        (records, entries.into_iter().flat_map(|(_, pages)| pages.stored_sums().collect::<Vec<_>>()))
    }

    /// The pages of a window in the layout; locked.
    fn slot(&self, window: WindowIndex) -> MutexGuard<'_, Option<Box<Pages>>> {
        let after = self.starts.partition_point(|(start, _)| *start <= window);
        let (start, place) = self.starts[after - 1];
        let slot = &self.windows[place + (window.get() - start.get()) as usize];
        slot.lock().unwrap_or_else(|poisoned: PoisonError<_>| {
            // A write that panicked may have written a part of its pages.
            let _ = self.failure.set((io::ErrorKind::Other, format!("a thread panicked while it wrote {window}")));
            poisoned.into_inner()
        })
    }
}

impl Default for Pages {
    fn default() -> Pages {
        Pages { stored: PageSet::EMPTY, own: PageSet::EMPTY, sums: [0; BASE_PAGES_PER_WINDOW as usize] }
    }
}

impl Pages {
    fn stored_sums(&self) -> impl Iterator<Item = u32> + '_ {
        self.stored.iter().map(|page| self.sums[usize::from(page)])
    }
}

fn cannot_write(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write `memory`: {error}"))
}

fn cannot_write_index(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write `windows`: {error}"))
}

const _: () = assert!(PAGE_BYTES == 4096, "pages of the format are base pages");
