//! Hostile and damaged snapshots: an error with file and place, or the bytes that were saved. Never other bytes.

use std::os::unix::fs::FileExt;

use super::*;

/// A small snapshot, and the path of one of its files.
fn victim(scratch: &Path, file: &str) -> (std::path::PathBuf, File) {
    let folder = scratch.join("s");
    if !folder.exists() {
        let pages = [(0, 0, 1), (0, 1, 2), (1, 0, 3)].map(|(window, page, byte)| ((window, page), page_of(byte)));
        save(&folder, None, &pages.into());
    }
    let file = open_rw(&folder.join(file));
    (folder, file)
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Flips bits of these bytes of a file one after the other, and checks what is read. Returns the number of errors.
fn flip(name: &str, offsets: impl Iterator<Item = u64>, masks: &[u8]) -> usize {
    let scratch = tempfile::tempdir().unwrap();
    let (folder, file) = victim(scratch.path(), name);
    let whole = read(&folder).unwrap();
    let bytes = bytes_of(&file);
    let mut errors = 0;
    for at in offsets {
        let old = bytes[at as usize];
        for mask in masks {
            file.write_all_at(&[old ^ mask], at).unwrap();
            match read(&folder) {
                Ok(pages) => assert!(pages == whole, "{name} byte {at} ^ {mask:#x} gives other pages"),
                Err(error) => {
                    assert_eq!(error.lines().count(), 1, "{error}");
                    assert!(error.starts_with(&format!("cannot restore {}", folder.display())), "{error}");
                    errors += 1;
                }
            }
        }
        file.write_all_at(&[old], at).unwrap();
    }
    assert!(read(&folder).unwrap() == whole);
    errors
}

fn length(name: &str) -> u64 {
    let scratch = tempfile::tempdir().unwrap();
    victim(scratch.path(), name).1.metadata().unwrap().len()
}

#[test]
fn every_flipped_bit_of_the_index_is_an_error() {
    let bytes = length("windows");
    let masks: Vec<u8> = (0..8).map(|bit| 1 << bit).chain([0xff]).collect();
    assert_eq!(flip("windows", 0..bytes, &masks), 9 * bytes as usize);
}

#[test]
fn every_flipped_byte_of_the_machines_state_is_an_error() {
    assert_eq!(flip("machine.json", 0..MACHINE.len() as u64, &[1, 0x80, 0xff]), 3 * MACHINE.len());
}

#[test]
fn every_flipped_byte_of_a_stored_page_is_an_error_and_of_a_hole_has_no_effect() {
    let second = 2 << 20;
    let stored = (0..8192).chain(second..second + 4096);
    assert_eq!(flip("memory", stored, &[0x10]), 3 * 4096);
    assert_eq!(flip("memory", (8192..second).step_by(4093), &[0xff]), 0);
}

#[test]
fn a_file_cut_off_at_any_length_is_an_error() {
    for (name, step) in [("windows", 1), ("machine.json", 1), ("memory", 40_009)] {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, file) = victim(scratch.path(), name);
        let bytes = bytes_of(&file);
        let end = bytes.len();
        for length in (0..end).step_by(step).chain((end - end.min(4096)..end).step_by(step.min(61))) {
            file.set_len(length as u64).unwrap();
            let error = read(&folder).expect_err("it is cut off");
            assert_eq!(error.lines().count(), 1, "{error}");
            file.write_all_at(&bytes[length..], length as u64).unwrap();
        }
        file.write_all_at(b"x", bytes.len() as u64).unwrap();
        // Only `memory` may be longer: it has no end of its own.
        assert_eq!(read(&folder).is_ok(), name == "memory", "{name} is longer");
    }
}

#[test]
fn errors_name_the_window_the_file_and_the_remedy() {
    let scratch = tempfile::tempdir().unwrap();
    let (folder, file) = victim(scratch.path(), "memory");
    file.write_all_at(&[0xaa], (2 << 20) + 17).unwrap();
    let expected = format!(
        "cannot restore {}: window 1 in `memory` does not have the bytes that were saved (checksum); the file was \
         changed after the save, or its disk is damaged: use another snapshot",
        folder.display()
    );
    assert_eq!(read(&folder).unwrap_err(), expected);
    let opened = Opened::open(&folder, Caching::PageCache).unwrap();
    opened.read(WindowIndex::new(0), &mut vec![0; WINDOW]).unwrap();
    let mut alone = page_of(0x55);
    opened.read_page(WindowIndex::new(1), 5, &mut alone).unwrap();
    assert_eq!(alone, page_of(0x55), "a page that is not stored changes nothing");
    opened.read_page(WindowIndex::new(0), 1, &mut alone).unwrap();
    assert_eq!(alone, page_of(2), "another window is damaged");
    let error = opened.read_page(WindowIndex::new(1), 0, &mut alone).unwrap_err();
    assert!(error.to_string().contains("window 1 in `memory` does not have the bytes"), "{error}");
    file.set_len(2 << 20).unwrap();
    let error = opened.read(WindowIndex::new(1), &mut vec![0; WINDOW]).unwrap_err();
    assert!(error.to_string().contains("window 1 in `memory` is cut off: the file is too short"), "{error}");
    let error = read(&folder).unwrap_err();
    assert!(error.contains("`memory` has 2097152 bytes, and 2101248 were saved"), "{error}");
}

#[test]
fn what_is_no_snapshot_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let error = |folder: &Path| Opened::open(folder, Caching::PageCache).unwrap_err().to_string();
    let missing = error(&scratch.path().join("missing"));
    assert!(missing.contains("`machine.json`: No such file or directory"), "{missing}");
    let (folder, file) = victim(scratch.path(), "windows");
    let bytes = bytes_of(&file);
    file.write_all_at(&2_u32.to_le_bytes(), 8).unwrap();
    assert!(error(&folder).contains("`windows` has version 2, and this program reads version 1"));
    file.write_all_at(b"ELF", 0).unwrap();
    assert!(error(&folder).contains("it is not a snapshot: `windows` does not begin with \"wl-snap\""));
    file.write_all_at(&bytes, 0).unwrap();
    let memory = folder.join("memory");
    std::fs::remove_file(&memory).unwrap();
    std::fs::create_dir(&memory).unwrap();
    assert!(error(&folder).contains("`memory` is not a regular file"), "{}", error(&folder));
    std::fs::remove_dir(&memory).unwrap();
    // A FIFO without a writer would block an ordinary open.
    nix::unistd::mkfifo(&memory, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(error(&folder).contains("`memory` is not a regular file"));
    std::fs::remove_file(&memory).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &memory).unwrap();
    assert!(error(&folder).contains("`memory`: Too many levels of symbolic links"));
}

#[test]
fn an_index_that_claims_much_is_refused_without_memory_for_it() {
    // The header is whole and claims eight windows; the table has none of them.
    let scratch = tempfile::tempdir().unwrap();
    let (folder, file) = victim(scratch.path(), "windows");
    let mut bytes = bytes_of(&file);
    bytes[48..56].copy_from_slice(&8_u64.to_le_bytes());
    let header_end = 88 + 2 * 16;
    let sum = crc32fast::hash(&bytes[..header_end]);
    bytes[header_end..header_end + 4].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&bytes, 0).unwrap();
    let error = read(&folder).unwrap_err();
    assert!(error.contains("`windows` is damaged at byte"), "{error}");
    // More windows than RAM has.
    bytes[48..56].copy_from_slice(&9_u64.to_le_bytes());
    let sum = crc32fast::hash(&bytes[..header_end]);
    bytes[header_end..header_end + 4].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&bytes, 0).unwrap();
    let error = read(&folder).unwrap_err();
    assert!(error.contains("`windows` is damaged at byte 48: the number of windows"), "{error}");
}
