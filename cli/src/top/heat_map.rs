//! A VM's windows as a grid that fits a screen: one cell is one window, or a power of two of them.
//!
//! ```text
//!   windows   2 2 2 4 . . . .  1 1 1 1        8 windows of RAM, and 4 above a hole
//!   cells     2   +   .   .                   two windows a cell, a row for each stretch of addresses
//!             1   1
//! ```

use std::collections::BTreeSet;

use wideleaf_control::map::{self, NONE, UNKNOWN, WindowState};
use wideleaf_control::view::{WindowMap, WindowRange};
use wideleaf_policies::PageSize;

/// Letter of a cell with windows of several kinds.
pub const MIXED: char = '+';

/// Column of a map: what its letters say of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Column {
    /// Pages of the host behind it.
    #[default]
    Backing,
    /// State of the window.
    State,
    /// Reason why it is not large.
    Why,
    /// Time until it is tried again.
    Until,
    /// Mapping of KVM.
    SecondLevel,
    /// Page of the guest's own tables.
    Guest,
    /// Share of samples with an access.
    Heat,
    /// Age of the heat.
    HeatAge,
    /// NUMA node of its memory.
    Node,
}

impl Column {
    /// All columns, in the order in which a key steps through them.
    pub const ALL: [Column; 9] = [
        Column::Backing,
        Column::State,
        Column::Why,
        Column::Until,
        Column::SecondLevel,
        Column::Guest,
        Column::Heat,
        Column::HeatAge,
        Column::Node,
    ];

    /// The one after it, for a host with several NUMA nodes or with one: that has no column of nodes.
    pub const fn next(self, has_nodes: bool) -> Column {
        let columns = if has_nodes { Column::ALL.len() } else { Column::Node as usize };
        Column::ALL[(self as usize + 1) % columns]
    }

    /// Title, for people.
    pub const fn title(self) -> &'static str {
        match self {
            Column::Backing => "host's pages",
            Column::State => "state",
            Column::Why => "reason why not large",
            Column::Until => "tried again within",
            Column::SecondLevel => "KVM's mapping",
            Column::Guest => "guest's own pages",
            Column::Heat => "heat",
            Column::HeatAge => "age of the heat",
            Column::Node => "NUMA node",
        }
    }

    /// Whether a note of a map is about this column: the causes of its unknown letters.
    pub fn is_about(self, note: &str) -> bool {
        let beginning = match self {
            Column::SecondLevel => "second level",
            Column::Guest => "guest's pages",
            Column::Heat | Column::HeatAge => "heat",
            Column::Node => "nodes",
            Column::Backing | Column::State | Column::Why | Column::Until => return false,
        };
        note.starts_with(beginning)
    }

    /// Meaning of a letter of it, for a legend.
    pub fn meaning(self, letter: char, map: &WindowMap) -> String {
        let of_time =
            || map::time_of_letter(letter).map_or("unknown".to_owned(), |seconds| format!("up to {seconds} s"));
        let of_reason = || map::reason_of_letter(letter).and_then(|index| map.reasons.get(index));
        match (self, letter) {
            (_, UNKNOWN) => "unknown".to_owned(),
            (_, MIXED) => "mixed".to_owned(),
            (Column::Node, NONE) => "nothing present".to_owned(),
            (Column::Node, _) => meaning_of_node(letter, &map.nodes),
            (Column::Until, NONE) => "not waiting".to_owned(),
            (Column::Why, NONE) => "large".to_owned(),
            (Column::Why, _) => of_reason().map_or("unknown".to_owned(), |reason| reason.name.clone()),
            (Column::Until | Column::HeatAge, _) => of_time(),
            (Column::State, _) => WindowState::of(letter).map_or("unknown", WindowState::meaning).to_owned(),
            (Column::Heat, '0') => "cold".to_owned(),
            (Column::Heat, _) => format!("{letter}0 % of samples"),
            (Column::Guest, 'u') => "not mapped".to_owned(),
            (Column::Guest, 'm') => "several sizes".to_owned(),
            (Column::Backing, 's') => Backing::Split.meaning().to_owned(),
            (_, '.') => "nothing".to_owned(),
            (_, '4' | 'b') => "4 KiB".to_owned(),
            (_, '2' | 'h') => "2 MiB".to_owned(),
            (_, '1' | 'g') => "1 GiB".to_owned(),
            _ => "unknown".to_owned(),
        }
    }

    /// Letter of two parts together. A part that has nothing to say does not count; of times and heat the greater
    /// counts.
    fn together(self, one: char, other: char) -> char {
        let says_nothing = |letter: char| match self {
            Column::Backing | Column::SecondLevel => letter == '.',
            Column::State => letter == 'e',
            Column::Guest => letter == 'u',
            Column::Why | Column::Node => letter == NONE,
            Column::Until | Column::Heat | Column::HeatAge => !letter.is_ascii_alphanumeric(),
        };
        match (one, other) {
            (one, other) if one == other || says_nothing(other) => one,
            (one, other) if says_nothing(one) => other,
            (one, other) if matches!(self, Column::Until | Column::Heat | Column::HeatAge) => one.max(other),
            _ => MIXED,
        }
    }
}

fn meaning_of_node(letter: char, nodes: &[u16]) -> String {
    let known = map::node_of_letter(letter).and_then(|(index, elsewhere)| Some((nodes.get(index)?, elsewhere)));
    match known {
        Some((node, false)) => format!("node {node}"),
        Some((node, true)) => format!("node {node} mostly"),
        None => "unknown".to_owned(),
    }
}

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
    letters: [char; Column::ALL.len()],
}

impl MapCell {
    /// A cell of a legend.
    pub const fn of_legend(backing: Backing) -> MapCell {
        MapCell { backing, heat: None, has_changed: false, letters: [UNKNOWN; Column::ALL.len()] }
    }

    /// Its letter in that column.
    pub const fn letter(&self, column: Column) -> char {
        match column {
            Column::Backing => self.backing.letter(),
            _ => self.letters[column as usize],
        }
    }

    fn and(self, other: MapCell) -> MapCell {
        let letter = |column: Column| {
            let at = column as usize;
            column.together(self.letters[at], other.letters[at])
        };
        MapCell {
            backing: self.backing.and(other.backing),
            heat: self.heat.max(other.heat),
            has_changed: self.has_changed || other.has_changed,
            letters: Column::ALL.map(letter),
        }
    }
}

/// A row of the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Guest-physical address of its first window.
    pub gpa: u64,
    /// Cells of the row.
    pub cells: Vec<MapCell>,
}

/// Stretch of addresses without a hole.
struct Stretch {
    gpa: u64,
    windows: Vec<MapCell>,
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

impl Grid {
    /// Columns of which something is known.
    pub fn known_columns(&self) -> impl Iterator<Item = Column> + '_ {
        let is_known = |letter: &char| !matches!(*letter, UNKNOWN | NONE);
        Column::ALL.into_iter().filter(move |column| self.letters(*column).iter().any(is_known))
    }

    /// Letters that occur in a column, in the order of the alphabet.
    pub fn letters(&self, column: Column) -> BTreeSet<char> {
        self.rows.iter().flat_map(|row| &row.cells).map(|cell| cell.letter(column)).collect()
    }
}

/// Lays a map out on `columns` by `height` cells, with the fewest windows per cell that fit. `before` is the last
/// sample, to mark changes.
pub fn lay_out(map: &WindowMap, before: Option<&WindowMap>, columns: usize, height: usize) -> Grid {
    let columns = columns.max(1);
    let stretches = stretches_of(map, before);
    let longest = stretches.iter().map(|stretch| stretch.windows.len()).max().unwrap_or(0);
    let rows_with = |windows_per_cell: usize| -> usize {
        stretches.iter().map(|stretch| stretch.windows.len().div_ceil(windows_per_cell * columns)).sum()
    };
    let mut windows_per_cell = 1;
    // In the end every stretch has one row, which is the minimum.
    while rows_with(windows_per_cell) > height && windows_per_cell * columns < longest {
        windows_per_cell *= 2;
    }
    let mut rows: Vec<Row> = stretches.iter().flat_map(|stretch| rows_of(stretch, windows_per_cell, columns)).collect();
    let rows_left_out = rows.len().saturating_sub(height);
    rows.truncate(height);
    Grid { windows_per_cell, rows, rows_left_out }
}

/// Joins ranges without a hole between them: a VM's RAM may be reported in pieces that the guest does not see.
fn stretches_of(map: &WindowMap, before: Option<&WindowMap>) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for range in &map.ranges {
        let windows = windows_of(range, before);
        match stretches.last_mut().filter(|last| last.end() == range.gpa) {
            Some(last) => last.windows.extend(windows),
            None => stretches.push(Stretch { gpa: range.gpa, windows }),
        }
    }
    stretches
}

impl Stretch {
    /// The address after its last window.
    fn end(&self) -> u64 {
        self.gpa.saturating_add(self.windows.len() as u64 * PageSize::Huge2M.bytes().get())
    }
}

fn rows_of(stretch: &Stretch, windows_per_cell: usize, columns: usize) -> Vec<Row> {
    let per_row = windows_per_cell * columns;
    let together = |windows: &[MapCell]| windows.iter().copied().reduce(MapCell::and);
    let row = |(index, windows): (usize, &[MapCell])| Row {
        gpa: stretch.gpa.saturating_add((index * per_row) as u64 * PageSize::Huge2M.bytes().get()),
        cells: windows.chunks(windows_per_cell).filter_map(together).collect(),
    };
    stretch.windows.chunks(per_row).enumerate().map(row).collect()
}

/// Every window of a range as a separate cell.
fn windows_of(range: &WindowRange, before: Option<&WindowMap>) -> Vec<MapCell> {
    let windows = range.windows();
    let before = before.and_then(|map| map.ranges.iter().find(|known| known.gpa == range.gpa));
    let character = |text: &str, index: usize| text.as_bytes().get(index).copied().unwrap_or(b'?');
    let window = |(index, backing): (usize, &u8)| {
        let [second_level, heat] = [&range.second_level, &range.heat].map(|text| character(text, index));
        let mut letters = [UNKNOWN; Column::ALL.len()];
        letters[Column::Backing as usize] = char::from(*backing);
        letters[Column::SecondLevel as usize] = char::from(second_level);
        letters[Column::Heat as usize] = char::from(heat);
        MapCell {
            backing: Backing::of(*backing, second_level),
            heat: digit(heat),
            has_changed: before.is_some_and(|before| character(&before.backing, index) != *backing),
            letters,
        }
    };
    let mut cells: Vec<MapCell> = range.backing.as_bytes().iter().enumerate().map(window).collect();
    let shortened = [
        (Column::State, &range.state),
        (Column::Why, &range.why),
        (Column::Until, &range.until),
        (Column::Guest, &range.guest),
        (Column::HeatAge, &range.heat_age),
        (Column::Node, &range.node),
    ];
    for (column, text) in shortened {
        for (cell, letter) in cells.iter_mut().zip(map::letters(text, windows)) {
            cell.letters[column as usize] = if letter.is_ascii_graphic() { letter } else { UNKNOWN };
        }
    }
    cells
}

fn digit(character: u8) -> Option<u8> {
    character.is_ascii_digit().then(|| character - b'0')
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_control::map::MapReason;

    fn range(gpa: u64, backing: &str, second_level: &str, heat: &str) -> WindowRange {
        WindowRange {
            gpa,
            backing: backing.into(),
            second_level: second_level.into(),
            heat: heat.into(),
            ..WindowRange::default()
        }
    }

    fn map(ranges: Vec<WindowRange>) -> WindowMap {
        WindowMap { name: "web".into(), ranges, ..WindowMap::default() }
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
    fn a_cell_of_several_windows_has_what_they_share_or_what_is_greatest() {
        let columns = WindowRange {
            state: "l2rw".into(),
            why: "-2AB".into(),
            until: "-3c".into(),
            guest: "hubb".into(),
            heat_age: "ab?2".into(),
            node: "a-bB".into(),
            ..range(0, "2244", "2244", "09?3")
        };
        let map = map(vec![columns]);
        let of = |column: Column| {
            let grid = lay_out(&map, None, 2, 1);
            grid.rows[0].cells.iter().map(|cell| cell.letter(column)).collect::<String>()
        };
        assert_eq!((of(Column::Backing), of(Column::State), of(Column::Why)), ("24".into(), "l+".into(), "-+".into()));
        assert_eq!((of(Column::Until), of(Column::Heat), of(Column::HeatAge)), ("-c".into(), "93".into(), "b?".into()));
        assert_eq!(of(Column::Guest), "hb", "a window that is not mapped says nothing");
        assert_eq!(of(Column::Node), "a+", "a window without memory says nothing");
    }

    #[test]
    fn every_letter_of_every_column_has_a_meaning() {
        let reasons = vec![MapReason { name: "not_chosen".into(), text: String::new() }];
        let of = WindowMap { reasons, nodes: vec![0, 2], ..WindowMap::default() };
        let letters = [
            (Column::Backing, ".4+s21"),
            (Column::State, "lrwhmkane+?"),
            (Column::Until, "az-?"),
            (Column::SecondLevel, ".421?+"),
            (Column::Guest, "bhgmu?+"),
            (Column::Heat, "0123456789?"),
            (Column::HeatAge, "az?"),
            (Column::Node, "abAB-?+"),
        ];
        for (column, letters) in letters {
            for letter in letters.chars().filter(|letter| *letter != UNKNOWN) {
                let meaning = column.meaning(letter, &of);
                assert!(!meaning.is_empty() && meaning != "unknown", "{column:?} {letter}: {meaning:?}");
            }
        }
        let node = |letter| Column::Node.meaning(letter, &of);
        assert_eq!([node('b'), node('A'), node('c')], ["node 2", "node 0 mostly", "unknown"]);
        let why = |letter| Column::Why.meaning(letter, &of);
        assert_eq!((why('A'), why('B'), why('-')), ("not_chosen".into(), "unknown".into(), "large".into()));
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
