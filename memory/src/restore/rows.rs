//! The windows of all RAM as rows of one table, and the stretches of rows that are registered.
//!
//! ```text
//!   stored      x x . x . . . . x x x        two stretches at most: the smallest gap is closed,
//!   registered [x x z x]. . . .[x x x]       and its windows (z) are registered though nothing is stored
//! ```

use std::ops::Range;

use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use crate::region::RamRange;

/// Maximum number of stretches that are registered at the start. Each costs a system call, a few microseconds, and up
/// to two mappings of the process.
pub(super) const STRETCHES_MAX: usize = 1024;

/// Row of a window, counted over all ranges of RAM.
pub(super) type Row = usize;

/// Windows of all RAM, range by range.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Ranges with their first rows.
    ranges: Vec<(Row, RamRange)>,
    count: usize,
}

impl Rows {
    /// The windows of these ranges, which are whole windows.
    pub(super) fn of(ranges: &[RamRange]) -> Rows {
        let mut count = 0;
        let with_rows = |range: &RamRange| {
            let first = count;
            count += range.gpa.windows().len();
            (first, *range)
        };
        Rows { ranges: ranges.iter().map(with_rows).collect(), count }
    }

    /// Number of windows.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Windows in the order of their rows.
    pub(super) fn windows(&self) -> impl Iterator<Item = WindowIndex> + '_ {
        self.ranges.iter().flat_map(|(_, range)| range.gpa.windows())
    }

    /// The window of a row.
    pub(super) fn window(&self, row: Row) -> WindowIndex {
        let (first, range) = self.range(row);
        WindowIndex::containing(range.gpa.start() + PageSize::Huge2M.bytes() * (row - first) as u64)
    }

    /// The row of a window, if that is RAM.
    pub(super) fn row(&self, window: WindowIndex) -> Option<Row> {
        let start = window.start();
        let (first, range) = self.ranges.iter().find(|(_, range)| range.gpa.contains(start))?;
        Some(first + (start - range.gpa.start()).get() as usize / PageSize::Huge2M.bytes().as_usize())
    }

    /// The row of an address of this process, if that is RAM.
    pub(super) fn row_at(&self, address: Hva) -> Option<Row> {
        self.ranges.iter().find_map(|(first, range)| {
            let offset = address.get().checked_sub(range.hva.get()).filter(|of| *of < range.gpa.bytes().get())?;
            Some(first + (offset / PageSize::Huge2M.bytes().get()) as usize)
        })
    }

    /// The range of a row, with the first row of that range.
    pub(super) fn range(&self, row: Row) -> (Row, RamRange) {
        *self.ranges.iter().rev().find(|(first, _)| *first <= row).expect("a row of this table")
    }

    /// Address and size of a stretch, which lies in one range.
    pub(super) fn place(&self, stretch: &Range<Row>) -> (Hva, Bytes) {
        let (first, range) = self.range(stretch.start);
        let window = PageSize::Huge2M.bytes();
        (range.hva + window * (stretch.start - first) as u64, window * stretch.len() as u64)
    }

    /// Stretches of rows with `is_in`, of one range each, ascending.
    pub(super) fn stretches(&self, is_in: impl Fn(Row) -> bool) -> Vec<Range<Row>> {
        let mut stretches: Vec<Range<Row>> = Vec::new();
        for (first, range) in &self.ranges {
            let rows = *first..first + range.gpa.windows().len();
            for row in rows.filter(|row| is_in(*row)) {
                match stretches.last_mut().filter(|last| last.end == row && last.start >= *first) {
                    Some(last) => last.end += 1,
                    None => stretches.push(row..row + 1),
                }
            }
        }
        stretches
    }

    /// Stretches that contain all rows of `stored`: at most `most` of them, or one for each range of RAM. The smallest
    /// gaps between them are closed.
    pub(super) fn registered(&self, stored: impl Fn(Row) -> bool, most: usize) -> Vec<Range<Row>> {
        let stretches = self.stretches(stored);
        let Some(too_many) = stretches.len().checked_sub(most.max(1)).filter(|number| *number > 0) else {
            return stretches;
        };
        let is_one_range = |pair: &[Range<Row>]| self.range(pair[0].start).0 == self.range(pair[1].start).0;
        let gap = |pair: &[Range<Row>]| pair[1].start - pair[0].end;
        let mut gaps: Vec<(usize, usize)> = stretches
            .windows(2)
            .enumerate()
            .filter(|(_, pair)| is_one_range(pair))
            .map(|(number, pair)| (gap(pair), number + 1))
            .collect();
        gaps.sort_unstable();
        let mut closed: Vec<usize> = gaps.into_iter().take(too_many).map(|(_, number)| number).collect();
        closed.sort_unstable();
        let mut joined: Vec<Range<Row>> = Vec::new();
        let mut closed = closed.into_iter().peekable();
        for (number, stretch) in stretches.into_iter().enumerate() {
            match joined.last_mut().filter(|_| closed.next_if_eq(&number).is_some()) {
                Some(last) => last.end = stretch.end,
                None => joined.push(stretch),
            }
        }
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    /// Two ranges, of four and of three windows: rows 0 to 3 are windows 0 to 3, rows 4 to 6 are windows 8 to 10.
    fn rows() -> Rows {
        let range = |start: u64, windows: u64| {
            let gpa = GpaRange::new(Gpa::new(0) + mib(2) * start, mib(2) * windows).expect("fits");
            RamRange { gpa, hva: Hva::new(1 << 40) + mib(2) * start }
        };
        Rows::of(&[range(0, 4), range(8, 3)])
    }

    #[test]
    fn rows_windows_and_addresses_belong_together() {
        let rows = rows();
        let windows: Vec<u64> = rows.windows().map(WindowIndex::get).collect();
        assert_eq!(windows, [0, 1, 2, 3, 8, 9, 10]);
        for (row, window) in windows.into_iter().map(WindowIndex::new).enumerate() {
            assert_eq!((rows.window(row), rows.row(window)), (window, Some(row)));
            let (start, bytes) = rows.place(&(row..row + 1));
            assert_eq!((rows.row_at(start), bytes), (Some(row), mib(2)));
            assert_eq!(rows.row_at(start + mib(1)), Some(row));
        }
        assert_eq!((rows.count(), rows.row(WindowIndex::new(4)), rows.row_at(Hva::new(5))), (7, None, None));
    }

    #[test]
    fn a_stretch_ends_with_its_range_and_the_smallest_gaps_are_closed() {
        let rows = rows();
        assert_eq!(rows.stretches(|_| true), [0..4, 4..7]);
        let stored = |row: Row| [0, 3, 4, 6].contains(&row);
        assert_eq!(rows.registered(stored, 4), [0..1, 3..4, 4..5, 6..7]);
        assert_eq!(rows.registered(stored, 3), [0..1, 3..4, 4..7]);
        assert_eq!(rows.registered(stored, 1), [0..4, 4..7], "a gap between two ranges stays");
        assert_eq!(rows.registered(|_| false, 4), [] as [Range<Row>; 0]);
    }

    proptest! {
        #[test]
        fn all_stored_windows_are_registered_in_as_few_stretches_as_asked(
            stored in prop::collection::vec(any::<bool>(), 7),
            most in 2_usize..6,
        ) {
            let rows = rows();
            let stretches = rows.registered(|row| stored[row], most);
            prop_assert!(stretches.len() <= most);
            prop_assert!(stretches.windows(2).all(|pair| pair[0].end <= pair[1].start));
            for (row, _) in stored.iter().enumerate().filter(|(_, is_stored)| **is_stored) {
                prop_assert!(stretches.iter().any(|stretch| stretch.contains(&row)));
            }
            let ends: Vec<Row> = stretches.iter().flat_map(|stretch| [stretch.start, stretch.end - 1]).collect();
            prop_assert!(ends.into_iter().all(|row| stored[row]), "none is longer than necessary");
        }
    }
}
