//! The map of a VM's windows as text: a block for each column of which something is known.

use std::fmt::Write as _;

use wideleaf_control::view::WindowMap;
use wideleaf_policies::PageSize;
use wideleaf_run::text::clean;

use super::tables;
use crate::top::heat_map::lay_out;

/// Cells in a row, and rows of a block at most: a screenful.
const COLUMNS: usize = 64;
const ROWS: usize = 16;

/// Text of `wideleaf vm SOCKET windows`.
pub fn text(map: &WindowMap) -> String {
    let grid = lay_out(map, None, COLUMNS, ROWS);
    let cell = tables::bytes(PageSize::Huge2M.bytes().get() * grid.windows_per_cell as u64);
    let (name, windows, scanned) = (clean(&map.name), map.windows(), tables::scanned(map.scan_age_s));
    let mut out = format!("{name}: {windows} windows of 2 MiB, a letter={cell}, {scanned}\n");
    for column in grid.known_columns() {
        let meaning = |letter: char| format!("{letter}={}", clean(&column.meaning(letter, map)));
        let legend: Vec<String> = grid.letters(column).into_iter().map(meaning).collect();
        let _ = writeln!(out, "\n{}: {}", column.title(), legend.join("  "));
        for row in &grid.rows {
            let letters: String = row.cells.iter().map(|cell| cell.letter(column)).collect();
            let _ = writeln!(out, "{:#012x} {letters}", row.gpa);
        }
    }
    if grid.rows_left_out > 0 {
        let _ = writeln!(out, "{} more stretches of addresses are left out: use --format json", grid.rows_left_out);
    }
    if !map.notes.is_empty() {
        out.push('\n');
    }
    map.notes.iter().for_each(|note| {
        let _ = writeln!(out, "  {}", clean(note));
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_control::view::WindowRange;

    #[test]
    fn each_known_column_has_a_legend_and_each_note_a_line() {
        let range = WindowRange {
            gpa: 4 << 30,
            backing: "24".into(),
            second_level: "??".into(),
            heat: "??".into(),
            state: "lr".into(),
            ..WindowRange::default()
        };
        let notes = vec!["heat: no sensor".to_owned()];
        let map = WindowMap { name: "web".into(), ranges: vec![range], notes, ..WindowMap::default() };
        let map = WindowMap { scan_age_s: Some(72.4), ..map };
        let expected = "web: 2 windows of 2 MiB, a letter=2 MiB, scanned 72 s ago\n\n\
                        host's pages: 2=2 MiB  4=4 KiB\n0x0100000000 24\n\n\
                        state: l=large  r=ready\n0x0100000000 lr\n\n  heat: no sensor\n";
        assert_eq!(text(&map), expected);
    }
}
