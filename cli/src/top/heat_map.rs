//! A VM's windows as a grid that fits a screen: one cell is one window, or a power of two of them.
//!
//! ```text
//!   windows   2 2 2 4 . . . .  1 1 1 1        8 windows of RAM, and 4 above a hole
//!   cells     2   +   .   .                   two windows a cell, a row for each stretch of addresses
//!             1   1
//! ```

use wideleaf_control::view::{WindowMap, WindowRange};
use wideleaf_policies::PageSize;

/// Backing of the windows of a cell. Windows without a present page count only if the whole cell consists of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// No present page.
    Nothing,
    /// Base pages only.
    Base,
    /// Huge pages only.
    Huge,
    /// Parts of giant pages.
    Giant,
    /// Large pages that KVM maps in base pages.
    Split,
    /// Several kinds of pages.
    Mixed,
}

impl Backing {
    /// All kinds, in the order of a legend.
    pub const ALL: [Backing; 6] =
        [Backing::Nothing, Backing::Base, Backing::Mixed, Backing::Split, Backing::Huge, Backing::Giant];

    /// Letter on the screen, with the same meaning as the colour.
    pub const fn letter(self) -> char {
        match self {
            Backing::Nothing => '.',
            Backing::Base => '4',
            Backing::Huge => '2',
            Backing::Giant => '1',
            Backing::Split => 's',
            Backing::Mixed => '+',
        }
    }

    /// Meaning, for a legend.
    pub const fn meaning(self) -> &'static str {
        match self {
            Backing::Nothing => "nothing",
            Backing::Base => "4 KiB",
            Backing::Huge => "2 MiB",
            Backing::Giant => "1 GiB",
            Backing::Split => "large, mapped in 4 KiB",
            Backing::Mixed => "mixed",
        }
    }

    /// Backing of one window, from its characters in a [`WindowRange`].
    const fn of(backing: u8, second_level: u8) -> Backing {
        match (backing, second_level) {
            (b'2' | b'1', b'4') => Backing::Split,
            (b'2', _) => Backing::Huge,
            (b'1', _) => Backing::Giant,
            (b'4', _) => Backing::Base,
            _ => Backing::Nothing,
        }
    }

    /// Backing of two parts together.
    const fn and(self, other: Backing) -> Backing {
        match (self, other) {
            (Backing::Nothing, one) | (one, Backing::Nothing) => one,
            (one, other) if one as u8 == other as u8 => one,
            _ => Backing::Mixed,
        }
    }
}

/// Some consecutive windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapCell {
    /// Backing of the windows.
    pub backing: Backing,
    /// Heat of the hottest window, 0 to 9; `None` if no sensor measures it.
    pub heat: Option<u8>,
    /// Whether the backing of one window has changed since the last sample.
    pub has_changed: bool,
}

/// A row of the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Guest-physical address of its first window.
    pub gpa: u64,
    /// Cells of the row.
    pub cells: Vec<MapCell>,
}

/// The grid of a screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of windows per cell; the last cell of a row may have fewer.
    pub windows_per_cell: usize,
    /// Rows, at most the requested number.
    pub rows: Vec<Row>,
    /// Number of rows that did not fit, if there are more stretches of addresses than rows.
    pub rows_left_out: usize,
}

/// Lays a map out on `columns` by `height` cells, with the fewest windows per cell that fit. `before` is the last
/// sample, to mark changes.
pub fn lay_out(map: &WindowMap, before: Option<&WindowMap>, columns: usize, height: usize) -> Grid {
    let columns = columns.max(1);
    let (ranges, before) = (joined(map), before.map(joined).unwrap_or_default());
    let longest = ranges.iter().map(|range| range.backing.len()).max().unwrap_or(0);
    let rows_with = |windows_per_cell: usize| -> usize {
        ranges.iter().map(|range| range.backing.len().div_ceil(windows_per_cell * columns)).sum()
    };
    let mut windows_per_cell = 1;
    // In the end every range has one row, which is the minimum.
    while rows_with(windows_per_cell) > height && windows_per_cell * columns < longest {
        windows_per_cell *= 2;
    }
    let mut rows: Vec<Row> =
        ranges.iter().flat_map(|range| rows_of(range, &before, windows_per_cell, columns)).collect();
    let rows_left_out = rows.len().saturating_sub(height);
    rows.truncate(height);
    Grid { windows_per_cell, rows, rows_left_out }
}

/// Joins ranges without a hole between them: a VM's RAM may be reported in pieces that the guest does not see.
fn joined(map: &WindowMap) -> Vec<WindowRange> {
    let mut ranges: Vec<WindowRange> = Vec::new();
    for range in &map.ranges {
        match ranges.last_mut().filter(|last| end(last) == range.gpa && is_whole(last)) {
            Some(last) => {
                last.backing.push_str(&range.backing);
                last.second_level.push_str(&range.second_level);
                last.heat.push_str(&range.heat);
            }
            None => ranges.push(range.clone()),
        }
    }
    ranges
}

/// The address after its last window.
fn end(range: &WindowRange) -> u64 {
    range.gpa.saturating_add(range.backing.len() as u64 * PageSize::Huge2M.bytes().get())
}

/// Whether its columns have equal lengths, so that joined columns stay aligned.
fn is_whole(range: &WindowRange) -> bool {
    [range.second_level.len(), range.heat.len()] == [range.backing.len(); 2]
}

fn rows_of(range: &WindowRange, before: &[WindowRange], windows_per_cell: usize, columns: usize) -> Vec<Row> {
    let windows = windows_of(range, before);
    let per_row = windows_per_cell * columns;
    let row = |(index, windows): (usize, &[MapCell])| Row {
        gpa: range.gpa.saturating_add((index * per_row) as u64 * PageSize::Huge2M.bytes().get()),
        cells: windows.chunks(windows_per_cell).map(together).collect(),
    };
    windows.chunks(per_row).enumerate().map(row).collect()
}

/// Every window of a range as a separate cell.
fn windows_of(range: &WindowRange, before: &[WindowRange]) -> Vec<MapCell> {
    let before = before.iter().find(|known| known.gpa == range.gpa);
    let character = |text: &str, index: usize| text.as_bytes().get(index).copied().unwrap_or(b'?');
    let window = |(index, backing): (usize, &u8)| MapCell {
        backing: Backing::of(*backing, character(&range.second_level, index)),
        heat: digit(character(&range.heat, index)),
        has_changed: before.is_some_and(|before| character(&before.backing, index) != *backing),
    };
    range.backing.as_bytes().iter().enumerate().map(window).collect()
}

fn together(windows: &[MapCell]) -> MapCell {
    let none = MapCell { backing: Backing::Nothing, heat: None, has_changed: false };
    windows.iter().fold(none, |all, window| MapCell {
        backing: all.backing.and(window.backing),
        heat: all.heat.max(window.heat),
        has_changed: all.has_changed || window.has_changed,
    })
}

fn digit(character: u8) -> Option<u8> {
    character.is_ascii_digit().then(|| character - b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(gpa: u64, backing: &str, second_level: &str, heat: &str) -> WindowRange {
        WindowRange { gpa, backing: backing.into(), second_level: second_level.into(), heat: heat.into() }
    }

    fn map(ranges: Vec<WindowRange>) -> WindowMap {
        WindowMap { name: "web".into(), ranges }
    }

    fn letters(grid: &Grid) -> Vec<String> {
        grid.rows.iter().map(|row| row.cells.iter().map(|cell| cell.backing.letter()).collect()).collect()
    }

    #[test]
    fn a_map_that_fits_has_a_cell_for_each_window_and_a_row_for_each_stretch() {
        let map = map(vec![range(0, "2224....", "2244????", "99??????"), range(4 << 30, "11", "11", "??")]);
        let grid = lay_out(&map, None, 8, 4);
        assert_eq!(grid.windows_per_cell, 1);
        assert_eq!(letters(&grid), ["22s4....", "11"]);
        assert_eq!(grid.rows[1].gpa, 4 << 30);
    }

    #[test]
    fn pieces_with_no_hole_between_them_are_one_stretch() {
        let window = PageSize::Huge2M.bytes().get();
        let map = map(vec![range(0, "2", "2", "9"), range(window, "44", "44", "00"), range(4 * window, "1", "1", "?")]);
        let grid = lay_out(&map, None, 8, 4);
        assert_eq!(letters(&grid), ["244", "1"]);
        assert_eq!(grid.rows[0].cells[1].heat, Some(0));
    }

    #[test]
    fn a_map_that_does_not_fit_is_binned_until_it_does() {
        // 8 windows in 2 columns are 4 rows; with two windows a cell 2.
        let map = map(vec![range(0, "222.4...", "????????", "12345678")]);
        let grid = lay_out(&map, None, 2, 2);
        assert_eq!(grid.windows_per_cell, 2);
        assert_eq!(letters(&grid), ["22", "4."]);
        assert_eq!(grid.rows[0].cells[1].heat, Some(4), "the hottest of the two");
        assert_eq!(grid.rows[1].gpa, 4 * PageSize::Huge2M.bytes().get());
    }

    #[test]
    fn a_cell_of_base_and_huge_pages_is_mixed() {
        assert_eq!(letters(&lay_out(&map(vec![range(0, "24", "??", "??")]), None, 1, 1)), ["+"]);
    }

    #[test]
    fn every_window_of_a_large_map_is_in_one_cell() {
        let many = map(vec![range(0, &"2".repeat(16_384), "", "")]);
        for (columns, height) in [(64, 16), (1, 1), (7, 3), (512, 32)] {
            let grid = lay_out(&many, None, columns, height);
            let cells: usize = grid.rows.iter().map(|row| row.cells.len()).sum();
            assert_eq!(cells, 16_384_usize.div_ceil(grid.windows_per_cell), "{columns} x {height}");
            assert!(grid.rows.len() <= height && grid.rows_left_out == 0);
        }
    }

    #[test]
    fn more_stretches_than_rows_are_counted() {
        let ranges = (0..5).map(|n| range(n << 32, "2222", "2222", "????")).collect();
        let grid = lay_out(&map(ranges), None, 2, 3);
        assert_eq!((grid.rows.len(), grid.rows_left_out), (3, 2));
    }

    #[test]
    fn a_change_since_the_last_sample_is_marked() {
        let before = map(vec![range(0, "44", "44", "??")]);
        let now = map(vec![range(0, "42", "42", "??")]);
        let cells = &lay_out(&now, Some(&before), 2, 1).rows[0].cells;
        assert!(!cells[0].has_changed && cells[1].has_changed);
    }

    #[test]
    fn a_map_of_nothing_has_no_rows() {
        assert_eq!(
            lay_out(&map(Vec::new()), None, 0, 0),
            Grid { windows_per_cell: 1, rows: Vec::new(), rows_left_out: 0 }
        );
    }
}
