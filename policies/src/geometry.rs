//! Ranges of guest-physical memory and the windows in them. All ranges are half-open: `[start, start + bytes)`.
//!
//! ```text
//!   range      |--------------------------------------------------|
//!   2 MiB      |      .      |      |      |      |      |    .
//!   windows           [  w   )[ w+1  )[      …          )
//!   left over  [......)                                  [....)      mapped with base pages, never promoted
//! ```

use crate::units::{Bytes, Gpa, Hva, PageSize, WindowIndex};

/// A half-open range of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpaRange {
    start: Gpa,
    bytes: Bytes,
}

impl GpaRange {
    /// The range `[start, start + bytes)`, or `None` if its end would not fit 64 bits.
    pub const fn new(start: Gpa, bytes: Bytes) -> Option<GpaRange> {
        match start.checked_add(bytes) {
            Some(_) => Some(GpaRange { start, bytes }),
            None => None,
        }
    }

    /// First address of the range.
    pub const fn start(self) -> Gpa {
        self.start
    }

    /// First address behind the range.
    pub fn end(self) -> Gpa {
        self.start + self.bytes
    }

    /// Length of the range.
    pub const fn bytes(self) -> Bytes {
        self.bytes
    }

    /// Whether `gpa` lies in the range.
    pub fn contains(self, gpa: Gpa) -> bool {
        self.start <= gpa && gpa < self.end()
    }

    /// Whether the two ranges share an address.
    pub fn overlaps(self, other: GpaRange) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// The indices of the windows that lie entirely in the range.
    pub fn windows(self) -> impl ExactSizeIterator<Item = WindowIndex> {
        let first = self
            .start
            .checked_align_up(PageSize::Huge2M)
            .map_or(u64::MAX, |gpa| gpa.get() / PageSize::Huge2M.bytes().get());
        let end = self.end().align_down(PageSize::Huge2M).get() / PageSize::Huge2M.bytes().get();
        let count = usize::try_from(end.saturating_sub(first)).unwrap_or(usize::MAX);
        (0..count).map(move |i| WindowIndex::new(first + i as u64))
    }

    /// Cuts the range into the largest naturally aligned pieces, no piece larger than `largest`. Second-level
    /// tables could map these pieces if host memory allowed it.
    pub fn pieces(self, largest: PageSize) -> impl Iterator<Item = (Gpa, PageSize)> {
        let mut at = self.start;
        let end = self.end();
        core::iter::from_fn(move || {
            let left = end - at;
            let size = PageSize::ALL
                .into_iter()
                .rev()
                .find(|size| *size <= largest && at.is_aligned_to(*size) && left >= size.bytes())?;
            let piece = (at, size);
            at = at + size.bytes();
            Some(piece)
        })
    }
}

/// Whether a host page of `size` could back guest memory at this placement. Both addresses must be equal in the low
/// bits; otherwise no huge page covers the same range on both levels (KVM API, `KVM_SET_USER_MEMORY_REGION`).
pub const fn is_congruent(gpa: Gpa, hva: Hva, size: PageSize) -> bool {
    gpa.get() % size.bytes().get() == hva.get() % size.bytes().get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{gib, kib, mib};
    use alloc::vec::Vec;

    fn range(start: Bytes, bytes: Bytes) -> GpaRange {
        GpaRange::new(Gpa::new(start.get()), bytes).expect("test ranges fit")
    }

    #[test]
    fn only_whole_windows_count() {
        // [1M ........ 7M)  holds [2M,4M) and [4M,6M)
        let windows: Vec<u64> = range(mib(1), mib(6)).windows().map(WindowIndex::get).collect();
        assert_eq!(windows, [1, 2]);
    }

    #[test]
    fn a_range_inside_one_window_has_no_window() {
        assert_eq!(range(mib(1), kib(64)).windows().len(), 0);
        assert_eq!(range(mib(3), mib(2)).windows().len(), 0);
    }

    #[test]
    fn pieces_are_the_largest_that_fit() {
        // [1022M, 1022M + 2M + 1G + 4K): one huge page up to 1G, one giant page, one base page
        let pieces: Vec<(u64, PageSize)> = range(mib(1022), mib(2) + gib(1) + kib(4))
            .pieces(PageSize::Giant1G)
            .map(|(gpa, size)| (gpa.get(), size))
            .collect();
        assert_eq!(
            pieces,
            [(mib(1022).get(), PageSize::Huge2M), (gib(1).get(), PageSize::Giant1G), (gib(2).get(), PageSize::Base4K)]
        );
    }

    #[test]
    fn congruence_looks_at_the_low_bits_only() {
        let gpa = Gpa::new(mib(4).get());
        assert!(is_congruent(gpa, Hva::new(0x7f00_0000_0000), PageSize::Huge2M));
        assert!(!is_congruent(gpa, Hva::new(0x7f00_0000_1000), PageSize::Huge2M));
        assert!(!is_congruent(gpa, Hva::new(0x7f00_0000_0000), PageSize::Giant1G));
    }
}
