//! What the writer stores.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

#[test]
fn what_was_written_is_read_and_everything_else_stays_as_it_is() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    assert_eq!(read(&folder).unwrap(), some_pages());
    let opened = Opened::open(&folder, Caching::PageCache).unwrap();
    assert_eq!(opened.windows().map(|saved| saved.window.get()).collect::<Vec<_>>(), [0, 1, 3, 32, 35]);
    assert_eq!(opened.stored(), Bytes::new(6 * 4096));
    assert!(opened.window(WindowIndex::new(2)).is_none() && opened.window(WindowIndex::new(u64::MAX)).is_none());
    let mut buffer = vec![0x55; WINDOW];
    opened.read(WindowIndex::new(1), &mut buffer).unwrap();
    assert!(buffer[..511 * PAGE].iter().all(|byte| *byte == 0x55), "pages that are not stored are not written");
    opened.read(WindowIndex::new(2), &mut buffer).unwrap();
    assert!(buffer[..511 * PAGE].iter().all(|byte| *byte == 0x55));
}

#[test]
fn the_file_can_be_read_past_the_page_cache() {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    let opened = match Opened::open(&folder, Caching::Direct) {
        Ok(opened) => opened,
        Err(error) if error.to_string().contains("Invalid argument") => return, // this file system has no O_DIRECT
        Err(error) => panic!("{error}"),
    };
    let mut room = vec![0; WINDOW + PAGE];
    let start = room.as_ptr().align_offset(PAGE);
    let buffer = &mut room[start..start + WINDOW];
    opened.read(WindowIndex::new(0), buffer).unwrap();
    assert!(buffer[..PAGE] == page_of(1) && buffer[PAGE..2 * PAGE] == page_of(2));
}

#[test]
fn the_latest_bytes_of_a_page_count_and_a_page_that_became_zero_leaves_a_hole() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    let saving = begin(&folder, None);
    let all: Pages = (0..512).map(|page| ((2, page), page_of(9))).collect();
    put(&saving.2, &all);
    let zero: Pages = (1..512).map(|page| ((2, page), page_of(0))).collect();
    put(&saving.2, &zero);
    put(&saving.2, &[((2, 0), page_of(7)), ((3, 5), page_of(0))].into());
    let written = end(saving);
    assert_eq!(read(&folder).unwrap(), [((2, 0), page_of(7))].into());
    assert_eq!((written.stored_pages, written.zero_pages), (1, 512));
    assert_eq!((written.own, written.written), (Bytes::new(4096), Bytes::new(513 * 4096)));
    let on_disk = folder.join("memory").metadata().unwrap().blocks() * 512;
    assert!(on_disk <= 64 << 10, "{on_disk} bytes on the disk for one page");
}

#[test]
fn a_window_that_became_zero_is_not_in_the_index() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    let saving = begin(&folder, None);
    put(&saving.2, &some_pages());
    put(&saving.2, &some_pages().into_keys().map(|place| (place, page_of(0))).collect());
    assert_eq!(end(saving).stored_pages, 0);
    assert_eq!(read(&folder).unwrap(), Pages::new());
}

#[test]
fn any_order_of_writes_leaves_the_last_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    for seed in 0..6 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (first, second) = (scratch.path().join(format!("{seed}")), scratch.path().join(format!("{seed}-next")));
        let mut last = Pages::new();
        for (folder, base) in [(&first, None), (&second, Some(first.as_path()))] {
            let saving = begin(folder, base);
            // What a full save on a base sees of pages that did not change since.
            put(&saving.2, &last);
            for _ in 0..random.usize(1..12) {
                let windows = [0, 1, 2, 3, 32, 33];
                let place = |random: &mut fastrand::Rng| (windows[random.usize(0..6)], random.u16(0..512));
                let count = random.usize(1..400);
                let pages: Pages =
                    (0..count).map(|_| (place(&mut random), page_of([0, 1, 2][random.usize(0..3)]))).collect();
                put(&saving.2, &pages);
                last.extend(pages);
            }
            end(saving);
            last.retain(|_, bytes| bytes[0] != 0);
            assert_eq!(read(folder).unwrap(), last, "seed {seed}");
        }
    }
}

#[test]
fn threads_write_side_by_side_also_into_one_window() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    let saving = begin(&folder, None);
    let turn = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for own in 0..4_u16 {
            let (writer, turn) = (&saving.2, &turn);
            scope.spawn(move || {
                for round in 1..=10_u8 {
                    // Each thread has every fourth page of all windows.
                    for window in [0, 1, 33] {
                        let pages = (own..512).step_by(4).map(|page| ((window, page), page_of(round + own as u8)));
                        put(writer, &pages.collect());
                        turn.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    end(saving);
    let expected: Pages = [0, 1, 33]
        .into_iter()
        .flat_map(|window| (0..512).map(move |page| ((window, page), page_of(10 + (page % 4) as u8))))
        .collect();
    assert_eq!((turn.into_inner(), read(&folder).unwrap() == expected), (120, true));
}

#[test]
fn a_full_disk_is_reported_with_its_reason_by_every_later_call_and_the_save_is_over() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let writer = WindowsWriter::new(full, &ram(), None).unwrap();
    let data = vec![1; WINDOW];
    let error = writer.write(WindowIndex::new(0), &PageSet::ALL, &data).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(error.to_string().starts_with("cannot write `memory`: No space left on device"), "{error}");
    let again = writer.write(WindowIndex::new(1), &PageSet::ALL, &data).unwrap_err();
    let first = (error.kind(), error.to_string());
    assert_eq!((again.kind(), again.to_string()), first, "whichever thread is heard first");
    let index = tempfile::tempfile().unwrap();
    let at_the_end = writer.finish(&index, MACHINE, notes).unwrap_err();
    assert_eq!((at_the_end.kind(), at_the_end.to_string()), first);
    assert_eq!(index.metadata().unwrap().len(), 0);
}

#[test]
fn pages_outside_ram_and_layouts_without_a_format_are_refused() {
    let writer = WindowsWriter::new(tempfile::tempfile().unwrap(), &ram(), None).unwrap();
    let error = writer.write(WindowIndex::new(5), &PageSet::ALL, &vec![1; WINDOW]).unwrap_err();
    assert_eq!(error.to_string(), "cannot save pages of window 5: they are not RAM");
    let odd = [gpa(Bytes::ZERO, Bytes::new(5000))];
    assert!(WindowsWriter::new(tempfile::tempfile().unwrap(), &odd, None).is_err());
    assert!(WindowsWriter::new(tempfile::tempfile().unwrap(), &[], None).is_err());
}
