//! Snapshots on a real file system: written, replaced, damaged and read.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bases;
mod damage;
mod folders;
mod writing;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};
use wideleaf_snapshot::{Base, Caching, Files, NewFiles, Opened, WindowNotes, WindowsWriter, Writing, Written};

const PAGE: usize = 4096;
const WINDOW: usize = 512 * PAGE;
const MACHINE: &[u8] = br#"{"version":1,"cpu":"none"}"#;

/// Stored pages, by window and page.
type Pages = BTreeMap<(u64, u16), Vec<u8>>;

fn gpa(start: Bytes, bytes: Bytes) -> GpaRange {
    GpaRange::new(Gpa::new(0) + start, bytes).unwrap()
}

/// Eight windows in two ranges, with a hole between them.
fn ram() -> Vec<GpaRange> {
    vec![gpa(Bytes::ZERO, mib(8)), gpa(mib(64), mib(8))]
}

/// A page of one byte value.
fn page_of(byte: u8) -> Vec<u8> {
    vec![byte; PAGE]
}

fn notes(window: WindowIndex) -> WindowNotes {
    let page = [PageSize::Base4K, PageSize::Huge2M, PageSize::Giant1G][window.get() as usize % 3];
    WindowNotes { page, heat: 1000 + window.get() as u16, age_s: 70_000 + window.get() as u32 }
}

/// Gives pages to a writer, as one call for each window.
fn put(writer: &WindowsWriter, pages: &Pages) {
    let mut windows: BTreeMap<u64, (PageSet, Vec<u8>)> = BTreeMap::new();
    for ((window, page), bytes) in pages {
        // Bytes of pages that are not named mean nothing.
        let (set, data) = windows.entry(*window).or_insert_with(|| (PageSet::EMPTY, vec![0xee; WINDOW]));
        set.insert(*page);
        data[usize::from(*page) * PAGE..][..PAGE].copy_from_slice(bytes);
    }
    for (window, (set, data)) in windows {
        writer.write(WindowIndex::new(window), &set, &data).unwrap();
    }
}

/// Begins a snapshot, perhaps on a base.
fn begin(folder: &Path, base: Option<&Path>) -> (Writing, NewFiles, WindowsWriter) {
    let files = base.map(|base| Files::open(base, Caching::PageCache).unwrap());
    let writing = Writing::create(folder, files.as_ref()).unwrap();
    let path = base.map(|base| writing.path_to(base).unwrap());
    let base = files.map(|files| Base { opened: Opened::from_files(files).unwrap(), path: path.unwrap() });
    let files = writing.files().unwrap();
    let writer = WindowsWriter::new(files.memory.try_clone().unwrap(), &ram(), base).unwrap();
    (writing, files, writer)
}

/// Ends a snapshot, and puts it in its place.
fn end((writing, files, writer): (Writing, NewFiles, WindowsWriter)) -> Written {
    (&files.machine).write_all(MACHINE).unwrap();
    let written = writer.finish(&files.windows, MACHINE, notes).unwrap();
    writing.finish().unwrap();
    written
}

/// Saves these pages.
fn save(folder: &Path, base: Option<&Path>, pages: &Pages) -> Written {
    let saving = begin(folder, base);
    put(&saving.2, pages);
    end(saving)
}

/// All stored pages of a snapshot, or the error.
fn read(folder: &Path) -> Result<Pages, String> {
    let opened = Opened::open(folder, Caching::PageCache).map_err(|error| error.to_string())?;
    let mut pages = Pages::new();
    let mut buffer = vec![0x55; WINDOW];
    for saved in opened.windows() {
        opened.read(saved.window, &mut buffer).map_err(|error| error.to_string())?;
        let mut alone = vec![0x55; PAGE];
        for page in saved.pages.iter() {
            let bytes = &buffer[usize::from(page) * PAGE..][..PAGE];
            opened.read_page(saved.window, page, &mut alone).map_err(|error| error.to_string())?;
            assert_eq!(alone, bytes, "a page that is read alone is the same");
            pages.insert((saved.window.get(), page), bytes.to_vec());
        }
    }
    assert_eq!((opened.machine(), opened.ram()), (MACHINE, &ram()[..]), "what is read is what was saved");
    for saved in opened.windows() {
        let WindowNotes { page, heat, age_s } = notes(saved.window);
        assert_eq!((saved.page, saved.heat, saved.age_s), (page, heat, age_s));
    }
    Ok(pages)
}

/// Pages at the borders of windows and ranges.
fn some_pages() -> Pages {
    [(0, 0, 1), (0, 1, 2), (1, 511, 3), (3, 511, 4), (32, 0, 5), (35, 7, 6)]
        .map(|(window, page, byte)| ((window, page), page_of(byte)))
        .into()
}

fn open_rw(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}
