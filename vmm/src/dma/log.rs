//! A bit for each base page that a device wrote, like KVM's dirty log of vCPUs (KVM API, 4.8 `KVM_GET_DIRTY_LOG`).
//!
//! The log is always on: an `or` into a word that is mostly cached already costs less than a check whether the
//! log is needed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};
use wideleaf_policies::PageSize;

const PAGE_BYTES: usize = PageSize::Base4K.bytes().as_usize();
const BITS: usize = u64::BITS as usize;

/// The pages of one range of RAM.
#[derive(Debug, Default)]
pub struct DeviceLog {
    words: Box<[AtomicU64]>,
}

/// The same log for a writer with offsets from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLogSlice<'a> {
    words: &'a [AtomicU64],
    base: usize,
}

impl DeviceLog {
    /// Fetches and clears the bits of some pages, lowest first. The first page's number must be a multiple of 64,
    /// or bits of other pages would be lost: memslots begin at multiples of 2 MiB.
    pub fn take(&self, pages: Range<usize>) -> Vec<u64> {
        debug_assert!(pages.start.is_multiple_of(BITS), "page {} does not begin a word", pages.start);
        let words = pages.start / BITS..pages.end.div_ceil(BITS);
        // Acquire: a thread that copies the page now sees the writes made before its bit was set.
        self.words[words].iter().map(|word| word.swap(0, Ordering::AcqRel)).collect()
    }
}

impl Bitmap for DeviceLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.slice_at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> DeviceLogSlice<'_> {
        DeviceLogSlice { words: &self.words, base: offset }
    }
}

impl Bitmap for DeviceLogSlice<'_> {
    /// Marks pages. `vm-memory` calls this after it has written: a log that is fetched in between lacks the bit,
    /// and the next one has it.
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let start = self.base.saturating_add(offset);
        let last = start.saturating_add(len - 1) / PAGE_BYTES;
        for page in start / PAGE_BYTES..=last {
            let Some(word) = self.words.get(page / BITS) else { return };
            word.fetch_or(1 << (page % BITS), Ordering::AcqRel);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.base.saturating_add(offset) / PAGE_BYTES;
        self.words.get(page / BITS).is_some_and(|word| word.load(Ordering::Acquire) >> (page % BITS) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> Self {
        DeviceLogSlice { words: self.words, base: self.base.saturating_add(offset) }
    }
}

impl NewBitmap for DeviceLog {
    fn with_len(len: usize) -> DeviceLog {
        let words = len.div_ceil(PAGE_BYTES * BITS);
        DeviceLog { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl<'a> WithBitmapSlice<'a> for DeviceLog {
    type S = DeviceLogSlice<'a>;
}

impl WithBitmapSlice<'_> for DeviceLogSlice<'_> {
    type S = Self;
}

impl BitmapSlice for DeviceLogSlice<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_page_is_reported_once() {
        let log = DeviceLog::with_len(200 * PAGE_BYTES);
        log.mark_dirty(PAGE_BYTES - 1, 2);
        log.mark_dirty(130 * PAGE_BYTES, 0);
        assert!(log.dirty_at(0) && log.dirty_at(PAGE_BYTES) && !log.dirty_at(2 * PAGE_BYTES));
        assert_eq!(log.take(0..200), [0b11, 0, 0, 0]);
        assert_eq!(log.take(0..200), [0; 4]);
    }

    #[test]
    fn a_slice_marks_pages_at_its_own_offset() {
        let log = DeviceLog::with_len(200 * PAGE_BYTES);
        log.slice_at(100 * PAGE_BYTES).slice_at(PAGE_BYTES).mark_dirty(0, 3 * PAGE_BYTES);
        assert_eq!(log.take(64..128), [0b111 << 37]);
        assert!(!log.dirty_at(101 * PAGE_BYTES));
    }

    #[test]
    fn offsets_beyond_the_range_are_ignored() {
        let log = DeviceLog::with_len(PAGE_BYTES);
        log.mark_dirty(usize::MAX - 1, 64);
        log.mark_dirty(64 * PAGE_BYTES, 1);
        assert_eq!(log.take(0..1), [0]);
    }
}
