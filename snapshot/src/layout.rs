//! The ranges of guest-physical space that are RAM, and the windows in them.

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

/// Maximum number of ranges of RAM: a PC has two, and each further hole of devices adds one.
pub(crate) const RANGES_MAX: u32 = 64;
/// Maximum end of RAM: 16 TiB, as the largest file of ext4. It bounds the number of records that a reader accepts.
pub(crate) const RAM_END_MAX: Bytes = Bytes::new(1 << 44);

/// Validated ranges of RAM: ascending, apart, of whole base pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    ranges: Vec<GpaRange>,
}

impl Layout {
    /// `None` if the ranges are not such a layout.
    pub fn new(ranges: Vec<GpaRange>) -> Option<Layout> {
        let is_page = |gpa: Gpa| gpa.is_aligned_to(PageSize::Base4K);
        let is_range = |range: &GpaRange| range.bytes() > Bytes::ZERO && is_page(range.start()) && is_page(range.end());
        let ascend = ranges.windows(2).all(|pair| pair[0].end() <= pair[1].start());
        let ends_in_bounds = ranges.last().is_some_and(|last| last.end() - Gpa::new(0) <= RAM_END_MAX);
        let are_few = ranges.len() <= RANGES_MAX as usize;
        (ranges.iter().all(is_range) && ascend && ends_in_bounds && are_few).then_some(Layout { ranges })
    }

    pub fn ranges(&self) -> &[GpaRange] {
        &self.ranges
    }

    /// Windows with at least one page of RAM, ascending.
    pub fn windows(&self) -> impl Iterator<Item = WindowIndex> + '_ {
        let mut next = 0;
        self.ranges.iter().flat_map(move |range| {
            let (first, last) = (WindowIndex::containing(range.start()).get().max(next), last_window(range).get());
            next = last + 1;
            (first..=last).map(WindowIndex::new)
        })
    }

    /// Number of windows with at least one page of RAM.
    pub fn window_count(&self) -> u64 {
        let mut next = 0;
        self.ranges.iter().fold(0, |count, range| {
            let (first, last) = (WindowIndex::containing(range.start()).get().max(next), last_window(range).get());
            next = last + 1;
            count + (last + 1).saturating_sub(first)
        })
    }

    /// The pages of a window that are RAM.
    pub fn pages(&self, window: WindowIndex) -> PageSet {
        if window.get() >= RAM_END_MAX.pages(PageSize::Huge2M) {
            return PageSet::EMPTY;
        }
        let end = window.start() + PageSize::Huge2M.bytes();
        let near = self.ranges.iter().filter(|range| range.start() < end && window.start() < range.end());
        near.fold(PageSet::EMPTY, |pages, range| pages.with(part_of(window, *range)))
    }
}

fn last_window(range: &GpaRange) -> WindowIndex {
    WindowIndex::containing(Gpa::new(range.end().get() - 1))
}

fn part_of(window: WindowIndex, range: GpaRange) -> PageSet {
    let is_whole = range.start() <= window.start() && window.start() + PageSize::Huge2M.bytes() <= range.end();
    if is_whole { PageSet::ALL } else { PageSet::of_range(window, range) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, kib, mib};

    fn range(start: Bytes, bytes: Bytes) -> GpaRange {
        GpaRange::new(Gpa::new(0) + start, bytes).expect("fits")
    }

    #[test]
    fn a_window_that_two_ranges_share_is_one_window() {
        // window     0          1          2
        //        [0 .... 2M+8K)[2M+16K .. 4M)   [5M..6M)
        let layout = Layout::new(vec![
            range(Bytes::ZERO, mib(2) + kib(8)),
            range(mib(2) + kib(16), mib(2) - kib(16)),
            range(mib(5), mib(1)),
        ]);
        let layout = layout.expect("it ascends");
        assert_eq!(layout.windows().map(WindowIndex::get).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(layout.window_count(), 3);
        let hole = PageSet::ALL.without(layout.pages(WindowIndex::new(1)));
        assert_eq!(hole.iter().collect::<Vec<_>>(), [2, 3]);
        let last = layout.pages(WindowIndex::new(2));
        assert!(last.iter().eq(256..512));
        assert!(layout.pages(WindowIndex::new(3)).is_empty() && layout.pages(WindowIndex::new(u64::MAX)).is_empty());
    }

    #[test]
    fn ranges_that_are_no_layout_are_refused() {
        let good = range(mib(2), mib(2));
        let bad: [Vec<GpaRange>; 6] = [
            vec![],
            vec![good, good],
            vec![range(mib(4), mib(2)), good],
            vec![range(mib(2), Bytes::new(100))],
            vec![range(Bytes::ZERO, RAM_END_MAX + kib(4))],
            (0..65).map(|at| range(gib(at), mib(2))).collect(),
        ];
        assert!(bad.into_iter().all(|ranges| Layout::new(ranges).is_none()));
        assert!(Layout::new(vec![good]).is_some());
    }
}
