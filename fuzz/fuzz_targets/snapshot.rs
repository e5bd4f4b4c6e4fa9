//! The files of a snapshot: as they are, and with lengths and checksums corrected by the format, so that the code
//! behind them is reached.
//!
//! Input: length of the index (u16), the index, length of `machine.json` (u8), its bytes, and the rest is `memory`.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;

use libfuzzer_sys::fuzz_target;
use wideleaf_policies::{GpaRange, PageSet, WindowIndex};
use wideleaf_snapshot::{Files, Layer, Opened};

const PAGE: usize = 4096;
const WINDOW: usize = 512 * PAGE;
/// Length of the header of `docs/snapshot-format.md` before the ranges of RAM, in bytes.
const FIXED: usize = 88;
/// Length of the record of a window in its table, in bytes.
const RECORD: usize = 148;
/// Length of `memory`: pages of the first windows can be read.
const MEMORY_BYTES: u64 = 4 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Some((windows, machine, memory)) = parts(bytes) else { return };
    let mut whole = memory.to_vec();
    whole.resize(MEMORY_BYTES as usize, 0);
    let _ = read(windows, machine, memory, &whole);
    let _ = mended(windows, machine, &whole).map(|windows| read(&windows, machine, memory, &whole));
});

fn parts(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (windows, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let (length, rest) = rest.split_first()?;
    let (machine, memory) = rest.split_at_checked(usize::from(*length))?;
    Some((windows, machine, &memory[..memory.len().min(MEMORY_BYTES as usize)]))
}

fn file_of(bytes: &[u8], length: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(length).unwrap();
    file
}

/// `whole` has the bytes of `memory` up to its length.
fn read(windows: &[u8], machine: &[u8], memory: &[u8], whole: &[u8]) -> Result<(), String> {
    let layer = Layer {
        name: "s".to_owned(),
        windows: file_of(windows, windows.len() as u64),
        memory: file_of(memory, MEMORY_BYTES),
    };
    let files = Files { machine: file_of(machine, machine.len() as u64), layers: vec![layer] };
    let one_line = |error: String| if error.lines().count() == 1 { error } else { panic!("{error:?}") };
    let opened = Opened::from_files(files).map_err(|error| one_line(error.to_string()))?;
    assert_eq!(opened.machine(), machine);
    let mut last = None;
    let mut buffer = vec![0x55; WINDOW];
    for saved in opened.windows() {
        assert!(last < Some(saved.window) && !saved.pages.is_empty(), "windows ascend, and each has a page");
        last = Some(saved.window);
        assert!(saved.pages.without(in_ram(opened.ram(), saved.window)).is_empty(), "pages are RAM");
        assert_eq!(opened.window(saved.window), Some(saved));
        buffer.fill(0x55);
        match opened.read(saved.window, &mut buffer) {
            Ok(()) => {
                let start = saved.window.start().get() as usize;
                for page in 0..512_usize {
                    let (found, at) = (&buffer[page * PAGE..][..PAGE], start + page * PAGE);
                    let is_right = match saved.pages.contains(page as u16) {
                        true => *found == whole[at..at + PAGE],
                        false => *found == [0x55; PAGE],
                    };
                    assert!(is_right, "page {page} of {}", saved.window);
                }
            }
            Err(error) => drop(one_line(error.to_string())),
        }
    }
    Ok(())
}

fn in_ram(ram: &[GpaRange], window: WindowIndex) -> PageSet {
    ram.iter().fold(PageSet::EMPTY, |pages, range| pages.with(PageSet::of_range(window, *range)))
}

/// The index with its lengths and checksums correct by `docs/snapshot-format.md`; `None` if it is too short for that.
fn mended(windows: &[u8], machine: &[u8], memory: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = windows.to_vec();
    put(&mut bytes, 0, b"wl-snap\n")?;
    put(&mut bytes, 8, &1_u32.to_le_bytes())?;
    put(&mut bytes, 12, &[0; 4])?;
    put(&mut bytes, 32, &(machine.len() as u64).to_le_bytes())?;
    put(&mut bytes, 40, &crc32fast::hash(machine).to_le_bytes())?;
    put(&mut bytes, 56, &MEMORY_BYTES.to_le_bytes())?;
    put(&mut bytes, 64, &[0; 8])?;
    let ranges = u32::from_le_bytes(*bytes.get(44..)?.first_chunk()?) as usize % 4;
    put(&mut bytes, 44, &(ranges as u32).to_le_bytes())?;
    let table = FIXED + 16 * ranges + 4;
    let records = bytes.len().checked_sub(table + 4)? / RECORD;
    put(&mut bytes, 48, &(records as u64).to_le_bytes())?;
    let sum = crc32fast::hash(&bytes[..table - 4]);
    put(&mut bytes, table - 4, &sum.to_le_bytes())?;
    let end = table + records * RECORD;
    bytes.truncate(end);
    let mut all_sums = Vec::new();
    for record in 0..records {
        let at = table + record * RECORD;
        let window = u64::from_le_bytes(*bytes[at..].first_chunk()?);
        let stored: Vec<u8> = bytes[at + 16..at + 80].to_vec();
        put(&mut bytes, at + 80, &stored)?; // no base has any
        let mut sums = Vec::new();
        for page in (0..512_usize).filter(|page| stored[page / 8] >> (page % 8) & 1 == 1) {
            let start = usize::try_from(window).ok().and_then(|window| window.checked_mul(WINDOW));
            let start = start.and_then(|start| start.checked_add(page * PAGE)).unwrap_or(usize::MAX);
            let page = memory.get(start..).and_then(|rest| rest.get(..PAGE)).unwrap_or(&[]);
            sums.extend(crc32fast::hash(page).to_le_bytes());
        }
        put(&mut bytes, at + 144, &crc32fast::hash(&sums).to_le_bytes())?;
        all_sums.extend(sums);
    }
    let sum = crc32fast::hash(&bytes[table..end]);
    bytes.extend(sum.to_le_bytes());
    bytes.extend(all_sums);
    Some(bytes)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) -> Option<()> {
    bytes.get_mut(at..at + value.len())?.copy_from_slice(value);
    Some(())
}
