//! Guest-physical memory by window and time, in three panels with a common time axis: its backing, its inferred
//! second-level mappings, its heat.
//!
//! ```text
//!   backing        GPA ▲ ░░▓▓▓▓▓▓▓          rows: windows, binned if there are more windows than rows
//!                      └─────────▶ s        columns: instants, each until the next
//!   second level   ...
//!   heat           ...
//! ```

use plotters::style::RGBColor;
use plotters::style::text_anchor::HPos;

use super::canvas::{Canvas, LINE, MARGIN, Point, Scale, TEXT_PX, WIDTH, caption_height, legend_height, picture};
use super::palette::{BLACK, BLUE, GREY, INK, ORANGE, PAPER, PURPLE, YELLOW, heat};
use crate::report::MapPlot;
use crate::report::agreement::agreement;
use crate::results::{MapColumn, MemoryMap};

const PANEL: i32 = 170;
/// Width for the numbers on the left, in pixels.
const NUMBERS: i32 = 74;
const AXIS: i32 = 48;
/// Maximum number of rows, each at least two pixels high. More windows are binned.
const ROWS_MAX: usize = (PANEL / 2) as usize;
/// Maximum number of columns, each three pixels wide. More columns are thinned out.
const COLUMNS_MAX: usize = 280;
const WINDOW_MIB: f64 = 2.0;

/// Letters with their meaning, from light to dark. `+` means a row with several sizes.
const LETTERS: [(u8, &str, RGBColor); 6] = [
    (b'.', "nothing", PAPER),
    (b'4', "4 KiB", YELLOW),
    (b'+', "several sizes", ORANGE),
    (b'a', "detached", PURPLE),
    (b'2', "2 MiB", BLUE),
    (b'1', "1 GiB", BLACK),
];

/// Contents of a panel.
struct Panel<'a> {
    title: String,
    /// Shown part of RAM, if the panel does not show all of it.
    above: String,
    legend: Vec<Key>,
    letters: fn(&MapColumn) -> &str,
    /// Colour of a letter; `None` for an unknown value.
    color: fn(u8) -> Option<RGBColor>,
    /// Letter for several windows in one row.
    together: fn(&[u8]) -> u8,
    map: &'a MemoryMap,
}

/// An entry of a legend.
#[derive(Clone)]
struct Key {
    letter: u8,
    meaning: String,
}

/// The picture as SVG.
pub(super) fn draw(plot: &MapPlot) -> String {
    let map = up_to_last_backed(&plot.map);
    let panels = panels(&map, windows_of(&plot.map));
    let heights: Vec<i32> = panels.iter().map(Panel::height).collect();
    let top = caption_height(&plot.caption);
    picture(top + heights.iter().sum::<i32>() + AXIS - 24 + MARGIN, |canvas| {
        canvas.caption(&plot.caption);
        let mut y = top;
        for (panel, height) in panels.iter().zip(&heights) {
            panel.draw(canvas, y);
            y += height;
        }
        canvas.coloured_text(
            (WIDTH / 2, y + 6),
            HPos::Center,
            TEXT_PX,
            GREY,
            "time since the start of the timed part, s",
        );
    })
}

/// Number of windows in a map.
fn windows_of(map: &MemoryMap) -> usize {
    map.columns.iter().map(|column| column.backing.len()).max().unwrap_or(0)
}

/// The map without the windows at the end of RAM that were never backed. Otherwise a kernel that uses 58 of 1024 MiB
/// would be a line at the bottom.
fn up_to_last_backed(map: &MemoryMap) -> MemoryMap {
    let last = |column: &MapColumn| column.backing.bytes().rposition(|letter| !b". ".contains(&letter));
    let windows = map.columns.iter().filter_map(last).max().map_or(usize::MAX, |last| last + 1);
    let mut map = map.clone();
    for column in &mut map.columns {
        for letters in [&mut column.backing, &mut column.second_level, &mut column.heat] {
            letters.truncate(windows);
        }
    }
    map
}

/// Panels of a map, for RAM with this number of windows.
fn panels(map: &MemoryMap, windows_of_ram: usize) -> Vec<Panel<'_>> {
    let shown = windows_of(map);
    let mib = |windows: usize| windows as f64 * WINDOW_MIB;
    let above = match shown < windows_of_ram {
        true => format!(", {} of {} (rest never backed)", mib(shown), mib(windows_of_ram)),
        false => String::new(),
    };
    let inferred = match agreement(map) {
        Some(seen) => {
            format!("second level, inferred (at the end {} in 2 MiB; KVM counts {})", seen.inferred_2m, seen.counted_2m)
        }
        None => "second level, inferred".into(),
    };
    let sizes = |title: &str, letters: fn(&MapColumn) -> &str| {
        let legend = letter_keys(map, letters);
        let above = above.clone();
        Panel { title: title.into(), above, legend, letters, color: size_color, together: of_sizes, map }
    };
    let heat = Panel {
        title: "heat: share of samples with an access by the guest".into(),
        above: above.clone(),
        legend: heat_keys(),
        letters: |column| &column.heat,
        color: heat_color,
        together: hottest,
        map,
    };
    let all = [sizes("host backing", |column| &column.backing), sizes(&inferred, |column| &column.second_level), heat];
    let is_there = |panel: &Panel<'_>| map.columns.iter().any(|column| !(panel.letters)(column).trim().is_empty());
    all.into_iter().filter(is_there).collect()
}

/// Only letters in the picture are explained.
fn letter_keys(map: &MemoryMap, letters: fn(&MapColumn) -> &str) -> Vec<Key> {
    let binned: Vec<u8> =
        map.columns.iter().flat_map(|column| rows_of(letters(column), of_sizes, per_row(map))).collect();
    let known = LETTERS.iter().map(|(letter, meaning, _)| (*letter, *meaning)).chain([(b'?', "not known")]);
    known
        .filter(|(letter, _)| binned.contains(letter))
        .map(|(letter, meaning)| Key { letter, meaning: meaning.into() })
        .collect()
}

fn heat_keys() -> Vec<Key> {
    let key = |(digit, meaning): (u8, &str)| Key { letter: digit, meaning: meaning.into() };
    [(b'0', "none"), (b'3', "a third"), (b'6', "two thirds"), (b'9', "all"), (b' ', "not known")].map(key).into()
}

impl Panel<'_> {
    fn entries(&self) -> Vec<String> {
        self.legend.iter().map(|key| key.meaning.clone()).collect()
    }

    fn height(&self) -> i32 {
        LINE + legend_height(&self.entries()) + PANEL + 36
    }

    fn draw(&self, canvas: &Canvas<'_>, y: i32) {
        canvas.text(
            (MARGIN, y + LINE / 2),
            HPos::Left,
            TEXT_PX,
            &format!("{}; vertical: guest-physical MiB{}", self.title, self.above),
        );
        canvas.legend(y + LINE, &self.entries(), |index, from, to| {
            self.cell(canvas, self.legend[index].letter, from, to);
            canvas.frame(from, to, INK);
        });
        let top = y + LINE + legend_height(&self.entries());
        let (left, right, bottom) = (MARGIN + NUMBERS, WIDTH - MARGIN, top + PANEL);
        let columns = kept(self.map);
        let (time, end) = time_scale(&columns, (left, right));
        let windows = columns.iter().map(|column| (self.letters)(column).len()).max().unwrap_or(0);
        let first = self.map.first_window as f64;
        let memory = Scale::new(first * WINDOW_MIB, (first + windows as f64) * WINDOW_MIB, (bottom, top));
        canvas.axis_left(&memory, [left, left + 3]);
        canvas.axis_below(&time, [bottom, bottom + 4], "");
        let ends = columns.iter().skip(1).map(|column| column.at_s).chain([end]);
        for (column, until) in columns.iter().zip(ends) {
            self.draw_column(canvas, column, [time.at(column.at_s), time.at(until)], &memory);
        }
        canvas.frame((left, top), (right, bottom), GREY);
    }

    /// Consecutive equal rows are drawn at once.
    fn draw_column(&self, canvas: &Canvas<'_>, column: &MapColumn, x: [i32; 2], memory: &Scale) {
        let per_row = per_row(self.map);
        let rows = rows_of((self.letters)(column), self.together, per_row);
        let windows = (self.letters)(column).len();
        let at = |row: usize| {
            let window = (row * per_row).min(windows) as u64 + self.map.first_window;
            memory.at(window as f64 * WINDOW_MIB)
        };
        let mut row = 0;
        for alike in rows.chunk_by(|a, b| a == b) {
            self.cell(canvas, alike[0], (x[0], at(row + alike.len())), (x[1], at(row)));
            row += alike.len();
        }
    }

    fn cell(&self, canvas: &Canvas<'_>, letter: u8, from: Point, to: Point) {
        match (self.color)(letter) {
            Some(color) => canvas.rect(from, to, color),
            None => canvas.hatched(from, to),
        }
    }
}

/// Colour of a page size. Outside guest RAM there is no size.
fn size_color(letter: u8) -> Option<RGBColor> {
    let letter = if letter == b' ' { b'.' } else { letter };
    LETTERS.iter().find(|(known, ..)| *known == letter).map(|(.., color)| *color)
}

fn heat_color(digit: u8) -> Option<RGBColor> {
    digit.is_ascii_digit().then(|| heat(digit - b'0'))
}

/// Columns that are drawn, always including the last.
fn kept(map: &MemoryMap) -> Vec<&MapColumn> {
    let step = map.columns.len().div_ceil(COLUMNS_MAX).max(1);
    let mut kept: Vec<&MapColumn> = map.columns.iter().rev().step_by(step).collect();
    kept.reverse();
    kept
}

/// Time from the first instant to one mean step after the last.
fn time_scale(columns: &[&MapColumn], pixels: (i32, i32)) -> (Scale, f64) {
    let (first, last) = (columns.first().map_or(0.0, |c| c.at_s), columns.last().map_or(0.0, |c| c.at_s));
    let step = if columns.len() > 1 { (last - first) / (columns.len() - 1) as f64 } else { 1.0 };
    let end = last + step;
    (Scale::new(first, end, pixels), end)
}

fn per_row(map: &MemoryMap) -> usize {
    let windows = map.columns.iter().map(|column| column.backing.len()).max().unwrap_or(0);
    windows.div_ceil(ROWS_MAX).max(1)
}

fn rows_of(letters: &str, together: fn(&[u8]) -> u8, per_row: usize) -> Vec<u8> {
    letters.as_bytes().chunks(per_row).map(together).collect()
}

/// The size in a row if it is the only one. Unbacked windows do not count.
fn of_sizes(windows: &[u8]) -> u8 {
    let mut sizes = windows.iter().copied().filter(|letter| !b". ".contains(letter));
    match sizes.next() {
        Some(size) if sizes.all(|other| other == size) => size,
        Some(_) => b'+',
        None => windows[0],
    }
}

fn hottest(windows: &[u8]) -> u8 {
    windows.iter().copied().max().unwrap_or(b' ')
}

#[cfg(test)]
mod tests {
    use super::super::palette::luminance;
    use super::*;

    #[test]
    fn page_sizes_are_distinguishable_in_grey_print() {
        let lightness = |color| luminance(color).cbrt(); // approximate perceived lightness (CIE L*)
        let pairs = LETTERS.windows(2);
        for pair in pairs {
            assert!(lightness(pair[0].2) > lightness(pair[1].2) + 0.07, "{} and {}", pair[0].1, pair[1].1);
        }
    }

    #[test]
    fn a_map_ends_with_the_last_window_that_was_ever_backed() {
        let column = |backing: &str| MapColumn {
            backing: backing.into(),
            second_level: backing.into(),
            heat: "0".repeat(backing.len()),
            ..MapColumn::default()
        };
        let map = MemoryMap {
            columns: vec![column("44......"), column("4.2....."), column("........")],
            ..MemoryMap::default()
        };
        let drawn = up_to_last_backed(&map);
        let backing: Vec<&str> = drawn.columns.iter().map(|column| &*column.backing).collect();
        assert_eq!(backing, ["44.", "4.2", "..."]);
        assert!(drawn.columns.iter().all(|column| column.heat.len() == 3 && column.second_level.len() == 3));
        assert!(panels(&drawn, 8)[0].above.contains("6 of 16 (rest never backed)"));
        let none = MemoryMap { columns: vec![column("...")], ..MemoryMap::default() };
        assert_eq!(windows_of(&up_to_last_backed(&none)), 3);
        assert_eq!(panels(&none, 3)[0].above, "");
    }

    #[test]
    fn a_heat_digit_has_no_colour_of_a_page_size() {
        let heats: Vec<RGBColor> = (b'0'..=b'9').filter_map(heat_color).collect();
        assert_eq!(heats.len(), 10);
        assert!(LETTERS.iter().all(|(.., color)| !heats.contains(color)), "{heats:?}");
        assert_eq!([b' ', b'?', b'.'].map(heat_color), [None; 3]);
    }

    #[test]
    fn a_row_with_two_sizes_shows_several_and_one_size_with_unbacked_windows_shows_that_size() {
        assert_eq!([&b"24"[..], b"2.", b"..", b"??", b" ."].map(of_sizes), [b'+', b'2', b'.', b'?', b' ']);
        assert_eq!([&b" 3"[..], b"93", b"  "].map(hottest), [b'3', b'9', b' ']);
    }
}
