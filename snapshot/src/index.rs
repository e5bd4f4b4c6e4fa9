//! The file `windows`, version 1. All numbers are little endian. `docs/snapshot-format.md` has the same table for
//! other readers.
//!
//! ```text
//!   header     magic, version, id, machine.json's length and checksum, base, RAM layout        ── its CRC-32
//!   table      a record of 148 bytes for each window that stores a page, ascending            ── its CRC-32
//!   checksums  a CRC-32 for each stored page, in the order of records and pages (their CRC-32: in the record)
//! ```
//!
//! A reader needs header and table before the guest starts: 148 bytes a window, 1.2 MiB for a guest of 16 GiB. The
//! checksums of pages are read with the pages.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use std::os::unix::ffi::{OsStrExt, OsStringExt};

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

use crate::error::Problem;
use crate::id::SnapshotId;
use crate::layout::{Layout, RANGES_MAX};
use crate::{MACHINE_FILE, VERSION, WINDOWS_FILE};

/// Maximum length of `machine.json`, in bytes: 16 MiB. State of a vCPU is some ten kilobytes of text.
pub const MACHINE_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of bases below a snapshot: reading a page looks into at most 16 files.
pub const DEPTH_MAX: u32 = 15;

/// First bytes of the file. The line feed is lost where a program treats the file as text.
pub(crate) const MAGIC: [u8; 8] = *b"wl-snap\n";
/// Bytes of the header before the ranges.
pub(crate) const FIXED_BYTES: usize = 88;
/// Bytes of a range of RAM.
const RANGE_BYTES: usize = 16;
/// Bytes of a record in the table.
pub(crate) const RECORD_BYTES: usize = 148;
/// Bytes of a checksum.
pub(crate) const SUM_BYTES: usize = 4;
/// Maximum length of a base's path, in bytes (`PATH_MAX`, path_resolution(7)).
const PATH_BYTES_MAX: u32 = 4096;

const FLAG_HUGE: u16 = 1 << 0;
const FLAG_GIANT: u16 = 1 << 1;

/// The snapshot below one that was saved on a base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BaseLink {
    pub id: SnapshotId,
    /// Number of snapshots below, with this one: at least 1.
    pub depth: u32,
    /// Path of its folder, relative to the folder of the snapshot.
    pub path: PathBuf,
}

/// The header of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub id: SnapshotId,
    pub machine_bytes: u64,
    pub machine_sum: u32,
    pub layout: Layout,
    /// Number of records.
    pub records: u64,
    /// Least length of the file `memory`, in bytes: the end of the last page in it.
    pub memory_bytes: u64,
    pub base: Option<BaseLink>,
}

/// What the index has of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub window: WindowIndex,
    pub page: PageSize,
    pub heat: u16,
    pub age_s: u32,
    /// Pages that are not zero.
    pub stored: PageSet,
    /// Those of the stored pages that are in this snapshot's own `memory`. The base has the others.
    pub own: PageSet,
    /// CRC-32 of the checksums of its pages.
    pub sums_sum: u32,
}

impl Header {
    fn to_bytes(&self) -> Vec<u8> {
        let path = self.base.as_ref().map_or(&[][..], |base| base.path.as_os_str().as_bytes());
        let mut bytes = Vec::with_capacity(FIXED_BYTES + path.len() + RANGE_BYTES * self.layout.ranges().len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(self.id.0);
        bytes.extend(self.machine_bytes.to_le_bytes());
        bytes.extend(self.machine_sum.to_le_bytes());
        bytes.extend((self.layout.ranges().len() as u32).to_le_bytes());
        bytes.extend(self.records.to_le_bytes());
        bytes.extend(self.memory_bytes.to_le_bytes());
        bytes.extend(self.base.as_ref().map_or(0, |base| base.depth).to_le_bytes());
        bytes.extend((path.len() as u32).to_le_bytes());
        bytes.extend(self.base.as_ref().map_or([0; 16], |base| base.id.0));
        assert_eq!(bytes.len(), FIXED_BYTES, "the fixed part has its length");
        for range in self.layout.ranges() {
            bytes.extend(range.start().get().to_le_bytes());
            bytes.extend(range.bytes().get().to_le_bytes());
        }
        bytes.extend(path);
        bytes
    }

    /// Reads and checks the header of a file.
    ///
    /// # Errors
    /// [`Problem`] of the first thing that is wrong.
    pub fn read(source: &mut Source<impl Read>) -> Result<Header, Problem> {
        let fixed: [u8; FIXED_BYTES] = match source.array() {
            Err(Problem::Index { .. }) => return Err(Problem::NotASnapshot),
            fixed => fixed?,
        };
        let field = Fields(&fixed);
        if fixed[..MAGIC.len()] != MAGIC {
            return Err(Problem::NotASnapshot);
        }
        if field.u32(8) != VERSION {
            return Err(Problem::Version { found: field.u32(8) });
        }
        let (ranges, depth, path_bytes) = (field.u32(44), field.u32(64), field.u32(68));
        let check = |is_good, at, what| if is_good { Ok(()) } else { Err(Problem::Index { at, what }) };
        check((1..=RANGES_MAX).contains(&ranges), 44, "the number of ranges of RAM")?;
        check(depth <= DEPTH_MAX, 64, "the number of bases")?;
        check(path_bytes <= PATH_BYTES_MAX, 68, "the length of the base's path")?;
        let variable = source.bytes(RANGE_BYTES * ranges as usize + path_bytes as usize)?;
        source.check_sum("the checksum of the header")?;

        check(field.u32(12) == 0, 12, "a reserved field is in use")?;
        check(field.u64(32) <= MACHINE_BYTES_MAX, 32, "the length of `machine.json`")?;
        check((depth == 0) == (path_bytes == 0), 68, "a base without a path, or a path without a base")?;
        let (ranges, path) = variable.split_at(RANGE_BYTES * ranges as usize);
        check(!path.contains(&0), 68, "the path of the base")?;
        let layout = layout_of(ranges).ok_or(Problem::Index { at: FIXED_BYTES as u64, what: "the layout of RAM" })?;
        check(field.u64(48) <= layout.window_count(), 48, "the number of windows")?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(path.to_vec()));
        Ok(Header {
            id: SnapshotId(field.array(16)),
            machine_bytes: field.u64(32),
            machine_sum: field.u32(40),
            layout,
            records: field.u64(48),
            memory_bytes: field.u64(56),
            base: (depth > 0).then(|| BaseLink { id: SnapshotId(field.array(72)), depth, path }),
        })
    }
}

fn layout_of(bytes: &[u8]) -> Option<Layout> {
    let range = |bytes: &[u8]| {
        let field = Fields(bytes);
        GpaRange::new(Gpa::new(field.u64(0)), Bytes::new(field.u64(8)))
    };
    Layout::new(bytes.chunks_exact(RANGE_BYTES).map(range).collect::<Option<Vec<_>>>()?)
}

impl Record {
    fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let flags = match self.page {
            PageSize::Base4K => 0,
            PageSize::Huge2M => FLAG_HUGE,
            PageSize::Giant1G => FLAG_GIANT,
        };
        bytes[..8].copy_from_slice(&self.window.get().to_le_bytes());
        bytes[8..10].copy_from_slice(&flags.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.heat.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.age_s.to_le_bytes());
        put_set(&mut bytes[16..80], self.stored);
        put_set(&mut bytes[80..144], self.own);
        bytes[144..].copy_from_slice(&self.sums_sum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Result<Record, &'static str> {
        let field = Fields(bytes);
        let page = match field.u16(8) {
            0 => PageSize::Base4K,
            FLAG_HUGE => PageSize::Huge2M,
            FLAG_GIANT => PageSize::Giant1G,
            _ => return Err("the flags of a window"),
        };
        Ok(Record {
            window: WindowIndex::new(field.u64(0)),
            page,
            heat: field.u16(10),
            age_s: field.u32(12),
            stored: field.set(16),
            own: field.set(80),
            sums_sum: field.u32(144),
        })
    }

    /// What is wrong with a record that comes behind `last` in the table.
    fn check(&self, header: &Header, last: Option<WindowIndex>) -> Result<(), &'static str> {
        let check = |is_good, what| if is_good { Ok(()) } else { Err(what) };
        check(last.is_none_or(|last| last < self.window), "windows do not ascend")?;
        check(!self.stored.is_empty(), "a window without a page")?;
        check(self.stored.without(header.layout.pages(self.window)).is_empty(), "a page that is not RAM")?;
        check(self.own.without(self.stored).is_empty(), "a page is in `memory` and not stored")?;
        check(header.base.is_some() || self.own == self.stored, "pages of a base, and there is none")?;
        let end = self.own.iter().last().map_or(0, |page| crate::pages::offset_of(self.window, page + 1));
        check(end <= header.memory_bytes, "a page behind the end of `memory`")
    }
}

fn put_set(bytes: &mut [u8], set: PageSet) {
    let words: [u64; 8] = set.into();
    bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
}

/// Header and table of an index, with the place of each window's checksums.
#[derive(Debug)]
pub(crate) struct Index {
    pub header: Header,
    records: Vec<Record>,
    /// Number of stored pages in the records before each one.
    pages_before: Vec<u64>,
    /// Offset of the first checksum of a page in the file.
    sums_at: u64,
}

impl Index {
    /// Reads header and table, and compares the length of the file, in bytes, with what they need. Memory grows with
    /// what was read and checked, not with what the file claims.
    ///
    /// # Errors
    /// [`Problem`] of the first thing that is wrong.
    pub fn read(source: impl Read, length: u64) -> Result<Index, Problem> {
        let mut source = Source::new(source);
        let header = Header::read(&mut source)?;
        let (mut records, mut pages_before, mut pages): (Vec<Record>, Vec<u64>, u64) = (vec![], vec![], 0);
        for _ in 0..header.records {
            let at = source.at;
            let damaged = |what| Problem::Index { at, what };
            let record = Record::from_bytes(&source.array()?).map_err(damaged)?;
            record.check(&header, records.last().map(|record| record.window)).map_err(damaged)?;
            pages_before.push(pages);
            pages += u64::from(record.stored.len());
            records.push(record);
        }
        source.check_sum("the checksum of the table of windows")?;
        let sums_at = source.at;
        let expected = sums_at + pages * SUM_BYTES as u64;
        if length != expected {
            return Err(Problem::Length { file: WINDOWS_FILE, found: length, expected });
        }
        Ok(Index { header, records, pages_before, sums_at })
    }

    /// Windows with a stored page, ascending.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The record of a window, and the offset of its checksums in the file.
    pub fn find(&self, window: WindowIndex) -> Option<(&Record, u64)> {
        let at = self.records.binary_search_by_key(&window, |record| record.window).ok()?;
        Some((&self.records[at], self.sums_at + self.pages_before[at] * SUM_BYTES as u64))
    }
}

/// Writes an index: records ascending, with the checksums of the stored pages of each.
pub(crate) fn write(
    target: &mut impl Write,
    header: &Header,
    records: &[Record],
    sums: impl Iterator<Item = u32>,
) -> io::Result<()> {
    write_summed(target, std::iter::once(header.to_bytes()))?;
    write_summed(target, records.iter().map(|record| record.to_bytes()))?;
    sums.into_iter().try_for_each(|sum| target.write_all(&sum.to_le_bytes()))
}

/// Writes pieces, and the CRC-32 of all of them.
fn write_summed(target: &mut impl Write, mut pieces: impl Iterator<Item = impl AsRef<[u8]>>) -> io::Result<()> {
    let mut sum = crc32fast::Hasher::new();
    pieces.try_for_each(|piece| {
        sum.update(piece.as_ref());
        target.write_all(piece.as_ref())
    })?;
    target.write_all(&sum.finalize().to_le_bytes())
}

/// CRC-32 of the bytes of some checksums.
pub(crate) fn sum_of_sums(sums: impl Iterator<Item = u32>) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sums.for_each(|of_page| sum.update(&of_page.to_le_bytes()));
    sum.finalize()
}

/// Path of the base's folder for a snapshot in `folder`.
pub(crate) fn base_folder(folder: &Path, link: &BaseLink) -> PathBuf {
    folder.join(&link.path)
}

/// Checks length and checksum of `machine.json`.
///
/// # Errors
/// [`Problem::Length`], [`Problem::MachineChecksum`].
pub(crate) fn check_machine(header: &Header, machine: &[u8]) -> Result<(), Problem> {
    let found = machine.len() as u64;
    if found != header.machine_bytes {
        return Err(Problem::Length { file: MACHINE_FILE, found, expected: header.machine_bytes });
    }
    if crc32fast::hash(machine) == header.machine_sum { Ok(()) } else { Err(Problem::MachineChecksum) }
}

/// The file while it is read: counts the bytes, and sums those since the last checksum.
pub(crate) struct Source<R> {
    inner: R,
    at: u64,
    sum: crc32fast::Hasher,
}

impl<R: Read> Source<R> {
    pub fn new(inner: R) -> Source<R> {
        Source { inner, at: 0, sum: crc32fast::Hasher::new() }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Problem> {
        self.inner.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => Problem::Index { at: self.at, what: "the file ends too early" },
            _ => Problem::Io { file: WINDOWS_FILE, source },
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        self.sum.update(&bytes);
        Ok(bytes)
    }

    /// The caller bounds the length.
    fn bytes(&mut self, length: usize) -> Result<Vec<u8>, Problem> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        self.sum.update(&bytes);
        Ok(bytes)
    }

    /// Compares the next four bytes with the checksum of those since the last one.
    fn check_sum(&mut self, what: &'static str) -> Result<(), Problem> {
        let at = self.at;
        let expected = std::mem::take(&mut self.sum).finalize();
        let mut bytes = [0; SUM_BYTES];
        self.fill(&mut bytes)?;
        if u32::from_le_bytes(bytes) == expected { Ok(()) } else { Err(Problem::Index { at, what }) }
    }
}

/// Little-endian numbers at fixed offsets of a buffer that has them.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.array(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }

    fn set(&self, at: usize) -> PageSet {
        std::array::from_fn(|word| self.u64(at + 8 * word)).into()
    }
}
