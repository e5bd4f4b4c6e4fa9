//! Snapshots on a base: equal pages are not stored again, and a base that is missing or changed is refused by name.

use std::fs;
use std::os::unix::fs::FileExt;

use super::*;

#[test]
fn only_pages_that_changed_are_stored_again() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    let mut pages = some_pages();
    pages.insert((0, 1), page_of(200)); // changed
    pages.insert((2, 2), page_of(201)); // new
    pages.remove(&(35, 7)); // zero now
    let written = save(&next, Some(&base), &pages);
    assert_eq!((written.stored_pages, written.base_pages, written.own), (6, 4, Bytes::new(2 * 4096)));
    assert_eq!((read(&next).unwrap(), read(&base).unwrap()), (pages, some_pages()));
    assert_eq!(Opened::open(&next, Caching::PageCache).unwrap().depth(), 1);
}

#[test]
fn a_page_that_is_again_as_in_the_base_is_taken_from_there() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    let saving = begin(&next, Some(&base));
    put(&saving.2, &some_pages().into_keys().map(|place| (place, page_of(250))).collect());
    put(&saving.2, &some_pages());
    let written = end(saving);
    assert_eq!((written.own, written.written), (Bytes::ZERO, Bytes::new(6 * 4096)));
    assert_eq!(read(&next).unwrap(), some_pages());
}

#[test]
fn pages_with_one_checksum_and_other_bytes_are_not_taken_for_equal() {
    // CRC-32 is linear: a pattern of its polynomial, written over a page, leaves the checksum as it is.
    let mut page = page_of(3);
    let before = crc32fast::hash(&page);
    let polynomial: [u8; 5] = [0x41, 0x06, 0x71, 0xdb, 0x01];
    page[100..105].iter_mut().zip(polynomial).for_each(|(byte, with)| *byte ^= with);
    assert_eq!((crc32fast::hash(&page), page == page_of(3)), (before, false), "two pages of one checksum");
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &[((1, 1), page_of(3))].into());
    let pages: Pages = [((1, 1), page)].into();
    assert_eq!(save(&next, Some(&base), &pages).base_pages, 0);
    assert_eq!(read(&next).unwrap(), pages);
}

#[test]
fn a_chain_of_sixteen_is_read_and_a_longer_one_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = |number: u8| scratch.path().join(format!("s{number}"));
    let mut pages = some_pages();
    save(&folder(0), None, &pages);
    for number in 1..16 {
        pages.insert((1, u16::from(number)), page_of(number + 100));
        let written = save(&folder(number), Some(&folder(number - 1)), &pages);
        assert_eq!(written.own, Bytes::new(4096), "each has one new page");
    }
    assert_eq!(read(&folder(15)).unwrap(), pages);
    let opened = Opened::open(&folder(15), Caching::PageCache).unwrap();
    assert_eq!(opened.depth(), 15);
    let base = Base { opened, path: "../s15".into() };
    let error = WindowsWriter::new(tempfile::tempfile().unwrap(), &ram(), Some(base)).unwrap_err();
    assert_eq!(error.to_string(), "the base has 15 bases already; save without a base");
}

#[test]
fn both_folders_may_move_together() {
    let scratch = tempfile::tempdir().unwrap();
    let [days, base] = ["days", "days/base"].map(|name| scratch.path().join(name));
    fs::create_dir(&days).unwrap();
    save(&base, None, &some_pages());
    save(&days.join("next"), Some(&base), &some_pages());
    fs::rename(&days, scratch.path().join("moved")).unwrap();
    assert_eq!(read(&scratch.path().join("moved/next")).unwrap(), some_pages());
}

#[test]
fn a_base_that_is_missing_changed_or_damaged_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    save(&next, Some(&base), &some_pages());
    let named = next.join("../base");

    open_rw(&base.join("memory")).write_all_at(&[0xaa], 0).unwrap();
    let error = read(&next).unwrap_err();
    let expected = format!("window 0 in `memory` of its base {} does not have the bytes", named.display());
    assert!(error.contains(&expected), "{error}");

    save(&base, None, &some_pages());
    let error = read(&next).unwrap_err();
    assert!(error.contains(&format!("its base {} is another snapshot now: its id is", named.display())), "{error}");
    assert!(error.ends_with("bring the base back to that place, or use a snapshot without a base"), "{error}");

    fs::remove_dir_all(&base).unwrap();
    let error = read(&next).unwrap_err();
    let expected = format!("its base {} cannot be used: `windows`: No such file or directory", named.display());
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_snapshot_does_not_replace_its_own_base() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    save(&next, Some(&base), &some_pages());
    let chain = Files::open(&next, Caching::PageCache).unwrap();
    for folder in [&base, &next] {
        let error = Writing::create(folder, Some(&chain)).unwrap_err().to_string();
        assert!(error.contains("the folder holds the base of the new snapshot, or a base of that"), "{error}");
    }
}

#[test]
fn the_files_of_a_base_must_be_passed_in_order() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    save(&next, Some(&base), &some_pages());
    let open = || Files::open(&next, Caching::PageCache).unwrap();
    let mut files = open();
    files.layers.truncate(1);
    let error = Opened::from_files(files).unwrap_err().to_string();
    assert!(error.contains("it needs 1 bases, and 0 were opened"), "{error}");
    let mut files = open();
    files.layers.reverse();
    assert!(Opened::from_files(files).is_err());
    let mut files = open();
    files.layers.clear();
    assert!(Opened::from_files(files).is_err());
}

#[test]
fn a_base_of_another_machine_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let base = scratch.path().join("base");
    save(&base, None, &some_pages());
    let opened = Opened::open(&base, Caching::PageCache).unwrap();
    let base = Some(Base { opened, path: "../base".into() });
    let error = WindowsWriter::new(tempfile::tempfile().unwrap(), &ram()[..1], base).unwrap_err();
    assert_eq!(error.to_string(), "the base is of a VM with another layout of RAM; save without a base");
}

#[test]
fn a_snapshot_that_is_its_own_base_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let [base, next] = ["base", "next"].map(|name| scratch.path().join(name));
    save(&base, None, &some_pages());
    save(&next, Some(&base), &some_pages());
    // The base's place is taken by the snapshot itself: a circle.
    fs::remove_dir_all(&base).unwrap();
    std::os::unix::fs::symlink("next", &base).unwrap();
    let error = Opened::open(&next, Caching::PageCache).unwrap_err().to_string();
    assert!(error.contains("bases"), "{error}");
}
