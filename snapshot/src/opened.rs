//! The reader of a snapshot. All that it reads may be hostile: every number is checked before it is used, memory
//! grows only with what was read and checked, and a page arrives whole and as it was saved, or not at all.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use wideleaf_policies::{Bytes, GpaRange, PageSet, PageSize, WindowIndex};

use crate::error::{OpenError, Problem, ReadError, WindowProblem};
use crate::files::{At, Caching, Files, Layer, check_regular, shown};
use crate::id::SnapshotId;
use crate::index::{self, Index, MACHINE_BYTES_MAX, Record, SUM_BYTES};
use crate::pages::{PAGE_BYTES, WINDOW_BYTES, bytes_of, checksum, offset_of, place_of};
use crate::{MACHINE_FILE, MEMORY_FILE, WINDOWS_FILE};

/// Bytes that the index is read by.
const BLOCK_BYTES: usize = 256 << 10;

/// A snapshot that is open for reading, with its bases. Threads may read at the same time.
#[derive(Debug)]
pub struct Opened {
    machine: Vec<u8>,
    /// The snapshot itself, then its base, then the base of that.
    layers: Vec<OpenedLayer>,
}

#[derive(Debug)]
struct OpenedLayer {
    name: String,
    index: Index,
    windows: File,
    memory: File,
}

/// What a snapshot has of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedWindow {
    /// Index of the window.
    pub window: WindowIndex,
    /// Page size of its backing on the host at the save.
    pub page: PageSize,
    /// Heat at the save: higher is hotter. The writer defines the scale.
    pub heat: u16,
    /// Time since the window's latest known use before the save, in seconds.
    pub age_s: u32,
    /// Pages that are stored. All others are zero.
    pub pages: PageSet,
}

impl From<&Record> for SavedWindow {
    fn from(record: &Record) -> SavedWindow {
        let Record { window, page, heat, age_s, stored, .. } = *record;
        SavedWindow { window, page, heat, age_s, pages: stored }
    }
}

impl Opened {
    /// Opens the snapshot in a folder.
    ///
    /// # Errors
    /// [`OpenError`] with the first thing that is wrong.
    pub fn open(folder: &Path, caching: Caching) -> Result<Opened, OpenError> {
        let files = Files::open(folder, caching)?;
        Opened::from_files(files).map_err(|error| OpenError { snapshot: shown(folder), ..error })
    }

    /// Reads and checks `machine.json` and the indexes. Reads no page.
    ///
    /// # Errors
    /// [`OpenError`] with the first thing that is wrong.
    pub fn from_files(files: Files) -> Result<Opened, OpenError> {
        let snapshot = files.layers.first().map_or_else(String::new, |layer| layer.name.clone());
        from_files(files).map_err(|problem| OpenError { snapshot, problem })
    }

    /// Id of the snapshot.
    pub fn id(&self) -> SnapshotId {
        self.top().index.header.id
    }

    /// Bytes of `machine.json`: as long as the index says, with its checksum. The text in it may be hostile.
    pub fn machine(&self) -> &[u8] {
        &self.machine
    }

    /// Ranges of RAM, ascending and apart.
    pub fn ram(&self) -> &[GpaRange] {
        self.top().index.header.layout.ranges()
    }

    /// Number of bases below it.
    pub fn depth(&self) -> u32 {
        self.layers.len() as u32 - 1
    }

    /// Windows with a stored page, ascending.
    pub fn windows(&self) -> impl ExactSizeIterator<Item = SavedWindow> + '_ {
        self.top().index.records().iter().map(SavedWindow::from)
    }

    /// What is stored of a window; `None` if it is all zeroes.
    pub fn window(&self, window: WindowIndex) -> Option<SavedWindow> {
        self.top().index.find(window).map(|(record, _)| SavedWindow::from(record))
    }

    /// Size of all stored pages, in bytes, with those of bases.
    pub fn stored(&self) -> Bytes {
        let pages: u64 = self.windows().map(|window| u64::from(window.pages.len())).sum();
        PageSize::Base4K.bytes() * pages
    }

    /// Reads the stored pages of a window to their places in `into`, the bytes of the whole window. Other bytes of
    /// `into` stay as they are.
    ///
    /// # Errors
    /// [`ReadError`] with the window and the file. The places of the stored pages then have any bytes.
    ///
    /// # Panics
    /// If `into` is not 2 MiB long.
    pub fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        self.read_pages(window, &PageSet::ALL, into)
    }

    /// Reads one stored page of a window to `into`, 4 KiB. A page that is not stored leaves `into` as it is.
    ///
    /// # Errors
    /// [`ReadError`] as for [`Opened::read`].
    ///
    /// # Panics
    /// If `into` is not 4 KiB long.
    pub fn read_page(&self, window: WindowIndex, page: u16, into: &mut [u8]) -> Result<(), ReadError> {
        assert_eq!(into.len(), PAGE_BYTES, "a page is 4 KiB");
        let found = self.top().index.find(window).filter(|(record, _)| record.stored.contains(page));
        let Some((record, sums_at)) = found else { return Ok(()) };
        let sums = self.read_sums(record, sums_at)?;
        let has_page = |layer: &OpenedLayer| layer.index.find(window).is_some_and(|(of, _)| of.own.contains(page));
        let depth = self.layers.iter().position(has_page);
        let depth = depth.expect("the bases were checked for all pages when they were opened");
        let fail = |problem| self.error(window, depth, MEMORY_FILE, problem);
        let memory = &self.layers[depth].memory;
        memory.read_exact_at(into, offset_of(window, page)).map_err(|error| fail(error.into()))?;
        if Some(checksum(into)) == sums.of(page) { Ok(()) } else { Err(fail(WindowProblem::Checksum)) }
    }

    /// The file that has every stored page at its guest-physical address; `None` for a snapshot on a base, which has
    /// some of its pages elsewhere.
    pub fn whole_memory(&self) -> Option<&File> {
        (self.depth() == 0).then(|| &self.top().memory)
    }

    /// Reads those of the stored pages that are in `wanted`, as [`Opened::read`] does.
    pub(crate) fn read_pages(&self, window: WindowIndex, wanted: &PageSet, into: &mut [u8]) -> Result<(), ReadError> {
        assert_eq!(into.len(), WINDOW_BYTES, "a window is 2 MiB");
        let Some((record, sums_at)) = self.top().index.find(window) else { return Ok(()) };
        let sums = self.read_sums(record, sums_at)?;
        let mut left = record.stored.and(*wanted);
        for (depth, layer) in self.layers.iter().enumerate() {
            let own = layer.index.find(window).map_or(PageSet::EMPTY, |(record, _)| record.own.and(left));
            let fail = |problem| self.error(window, depth, MEMORY_FILE, problem);
            layer.read_own(window, own, into).map_err(fail)?;
            if own.iter().any(|page| Some(checksum(&into[place_of(page)])) != sums.of(page)) {
                return Err(fail(WindowProblem::Checksum));
            }
            left = left.without(own);
        }
        assert!(left.is_empty(), "the bases were checked for all pages when they were opened");
        Ok(())
    }

    /// The checksums of a window's pages, as far as they are what was saved.
    pub(crate) fn sums(&self, window: WindowIndex) -> Result<Option<Sums>, ReadError> {
        self.top().index.find(window).map(|(record, sums_at)| self.read_sums(record, sums_at)).transpose()
    }

    fn read_sums(&self, record: &Record, sums_at: u64) -> Result<Sums, ReadError> {
        let fail = |problem| self.error(record.window, 0, WINDOWS_FILE, problem);
        let mut bytes = vec![0; usize::from(record.stored.len()) * SUM_BYTES];
        self.top().windows.read_exact_at(&mut bytes, sums_at).map_err(|error| fail(error.into()))?;
        if crc32fast::hash(&bytes) != record.sums_sum {
            return Err(fail(WindowProblem::Checksum));
        }
        Ok(Sums { stored: record.stored, bytes })
    }

    pub(crate) fn layout(&self) -> &crate::layout::Layout {
        &self.top().index.header.layout
    }

    fn top(&self) -> &OpenedLayer {
        &self.layers[0]
    }

    fn error(&self, window: WindowIndex, depth: usize, file: &str, problem: WindowProblem) -> ReadError {
        let file = match depth {
            0 => format!("`{file}`"),
            _ => format!("`{file}` of its base {}", self.layers[depth].name),
        };
        ReadError { snapshot: self.top().name.clone(), window, file, problem }
    }
}

impl OpenedLayer {
    fn open(layer: Layer) -> Result<OpenedLayer, Problem> {
        let Layer { name, windows, memory } = layer;
        let length = check_regular(&windows, WINDOWS_FILE)?;
        let index = Index::read(std::io::BufReader::with_capacity(BLOCK_BYTES, At::start(&windows)), length)?;
        let (found, expected) = (check_regular(&memory, MEMORY_FILE)?, index.header.memory_bytes);
        if found < expected {
            return Err(Problem::Length { file: MEMORY_FILE, found, expected });
        }
        Ok(OpenedLayer { name, index, windows, memory })
    }

    fn read_own(&self, window: WindowIndex, own: PageSet, into: &mut [u8]) -> Result<(), WindowProblem> {
        for run in own.runs() {
            self.memory.read_exact_at(&mut into[bytes_of(&run)], offset_of(window, run.start))?;
        }
        Ok(())
    }
}

fn from_files(files: Files) -> Result<Opened, Problem> {
    let mut layers: Vec<OpenedLayer> = Vec::new();
    for layer in files.layers {
        let name = layer.name.clone();
        let opened = OpenedLayer::open(layer).map_err(|problem| match layers.is_empty() {
            true => problem,
            false => Problem::Base { base: name, problem: Box::new(problem) },
        })?;
        if let Some(above) = layers.last() {
            check_base(above, &opened)?;
        }
        layers.push(opened);
    }
    let needed = layers.last().and_then(|last| last.index.header.base.as_ref()).map_or(0, |base| base.depth as usize);
    let is_whole = !layers.is_empty() && needed == 0;
    let found = layers.len().saturating_sub(1);
    if !is_whole {
        return Err(Problem::BaseCount { needed: found + needed, found });
    }
    let machine = read_machine(&files.machine)?;
    index::check_machine(&layers[0].index.header, &machine)?;
    Ok(Opened { machine, layers })
}

/// Checks that a layer is the base of the one above, and has the pages that it needs.
fn check_base(above: &OpenedLayer, below: &OpenedLayer) -> Result<(), Problem> {
    let base = || below.name.clone();
    let (upper, lower) = (&above.index.header, &below.index.header);
    let depth = lower.base.as_ref().map_or(0, |base| base.depth) + 1;
    let Some(link) = upper.base.as_ref() else { return Err(Problem::BaseCount { needed: 0, found: 1 }) };
    if link.id != lower.id {
        return Err(Problem::BaseChanged { base: base(), found: lower.id, expected: link.id });
    }
    if link.depth != depth {
        return Err(Problem::BaseCount { needed: link.depth as usize, found: depth as usize });
    }
    for record in above.index.records() {
        let there = below.index.find(record.window).map_or(PageSet::EMPTY, |(record, _)| record.stored);
        if !record.stored.without(record.own).without(there).is_empty() {
            return Err(Problem::BasePages { base: base(), window: record.window });
        }
    }
    Ok(())
}

fn read_machine(file: &File) -> Result<Vec<u8>, Problem> {
    let length = check_regular(file, MACHINE_FILE)?;
    if length > MACHINE_BYTES_MAX {
        return Err(Problem::Length { file: MACHINE_FILE, found: length, expected: MACHINE_BYTES_MAX });
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|source| Problem::Io { file: MACHINE_FILE, source })?;
    Ok(bytes)
}

/// Checksums of the stored pages of a window.
pub(crate) struct Sums {
    stored: PageSet,
    bytes: Vec<u8>,
}

impl Sums {
    /// Checksum of a page; `None` if it is not stored.
    pub fn of(&self, page: u16) -> Option<u32> {
        let words: [u64; 8] = self.stored.into();
        let (word, bit) = (usize::from(page / 64), page % 64);
        let below = |words: &[u64]| words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let rank = below(&words[..word]) + (words[word] & ((1 << bit) - 1)).count_ones() as usize;
        let bytes = self.bytes.get(rank * SUM_BYTES..)?.first_chunk()?;
        self.stored.contains(page).then(|| u32::from_le_bytes(*bytes))
    }
}

const _: () = assert!(WINDOW_BYTES == 512 * PAGE_BYTES, "a window has 512 pages");
