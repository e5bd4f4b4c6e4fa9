//! The simulated grid as tables and as a picture.
//!
//! ```text
//!   share of the second dimension's cost taken away   ── a table of each footprint: program × machine
//!   misses, references, cycles of a walk, of an access ── a table of each program
//!   cycles of an access                                ── the picture
//! ```

use super::{FOOTPRINTS_GIB, Figure, Figures, MACHINES, PAGES, PROGRAMS, Place, places};
use crate::report::common_sections::{decimals, number};
use crate::report::{BoxOf, Boxes, Column, Grid, Plot, Section, simulated};

/// Fewest counted misses that give a figure more than one digit.
const MISSES_FEW: f64 = 100.0;
/// Mark of a cell with fewer of them.
const FEW: &str = " ?";

/// Both sections: what the grid says, then all its figures.
pub(super) fn sections(figures: &Figures) -> Vec<Section> {
    if figures.0.is_empty() {
        return vec![];
    }
    vec![said(figures), in_full(figures)]
}

fn said(figures: &Figures) -> Section {
    let tables = FOOTPRINTS_GIB.map(|footprint| shares(figures, footprint));
    Section {
        title: "Simulated: guest page by host page".into(),
        paragraphs: vec![HOW.into(), ACCESSES.into(), summary(figures)],
        tables: tables.into(),
        plots: vec![Plot::Boxes(picture(figures))],
    }
}

const HOW: &str = "Every number with ~ comes from the simulator, not from a machine: a model of TLBs, page-walk caches \
    and data caches. A walk has the latencies of the levels that hold its entries, and overlaps with nothing. \
    Sizes of TLBs are documented; walk caches and replacement mostly are not. A native process and a guest of one \
    machine differ only in the second table. Tables have four levels on both sides, the host backs the guest's tables \
    by pages of its size too, and only one thread runs.";

const ACCESSES: &str = "Accesses are steady-state samples: each loop of an iteration of the kernel's timed part, from \
    its middle on, as many accesses to warm the caches as count afterwards, weighted by the words of that loop in an \
    iteration. GUPS updates random words; CG has the row length of class C; MG is the largest cube with an edge \
    divisible by eight, on four levels; STREAM has four loops over three arrays; Sweep3D sweeps two octants. A figure \
    with ? has fewer than 100 counted misses.";

/// The range of shares with large pages on either side and on both, over all places.
fn summary(figures: &Figures) -> String {
    let range = |guest: &str, host: &str| {
        let shares: Vec<f64> = places().filter_map(|place| figures.taken_away(place, guest, host)).collect();
        let [low, high] = [f64::min, f64::max].map(|most| shares.iter().copied().reduce(most).unwrap_or(f64::NAN));
        format!("{} to {} %", decimals(low * 100.0, 0), decimals(high * 100.0, 0))
    };
    format!(
        "In the model, 2 MiB pages of the host alone take away {} of the second dimension's cost, those of the guest \
         alone {}, both together {}; with 1 GiB pages it is {}, {} and {}. A share below zero says that large pages of \
         the guest alone save less than they save a process: the host's small pages limit each entry of a TLB. A share \
         above 100 % says that the guest is faster than a process on its pages: smaller pages of the host split those \
         of 1 GiB, and a TLB has more entries for the parts. Haswell has four of 1 GiB, and Sweep3D misses them; with \
         1 GiB pages on both sides its guest does too, so that its share is low.",
        range("4k", "2m"),
        range("2m", "4k"),
        range("2m", "2m"),
        range("4k", "1g"),
        range("1g", "4k"),
        range("1g", "1g")
    )
}

/// Pages of guest and host, except base pages on both sides.
fn other_pages() -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = PAGES.into_iter().flat_map(|guest| PAGES.into_iter().map(move |host| (guest, host)));
    all.filter(|pages| *pages != ("4k", "4k"))
}

fn shares(figures: &Figures, footprint: u64) -> Grid {
    let columns = ["program", "machine"].map(Column::text).into_iter();
    let numbers = other_pages().map(|(guest, host)| Column::number(format!("{guest} over {host}, %")));
    let of_base = Column::number("cost of 4k over 4k");
    let row = |place: Place| {
        let base = figures.second_dimension(place, "4k", "4k");
        let share = |(guest, host)| {
            let share = figures.taken_away(place, guest, host);
            share.map_or("-".into(), |share| simulated(&decimals(share * 100.0, 1)))
        };
        let head = [PROGRAMS[place.program].1.to_owned(), MACHINES[place.machine].0.to_owned()];
        let base = base.map_or("-".into(), |base| simulated(&format!("{} cycles", number(base))));
        head.into_iter().chain([base]).chain(other_pages().map(share)).collect()
    };
    Grid {
        caption: format!(
            "Simulated, {footprint} GiB: cost of the second dimension in cycles an access (guest minus process on the \
             guest's pages), and the share of it that larger pages take away, guest page over host page"
        ),
        columns: columns.chain([of_base]).chain(numbers).collect(),
        rows: places().filter(|place| place.footprint_gib == footprint).map(row).collect(),
    }
}

fn in_full(figures: &Figures) -> Section {
    let tables = (0..PROGRAMS.len()).map(|program| of_program(figures, program));
    Section {
        title: "Simulated: all figures".into(),
        paragraphs: vec![
            "A cell has the misses of 1000 accesses, the references of a walk, the cycles of a walk, and the cycles \
             of an access (walks, and hits of the second level of the TLB)."
                .into(),
        ],
        tables: tables.collect(),
        plots: vec![],
    }
}

fn of_program(figures: &Figures, program: usize) -> Grid {
    let head = ["footprint", "machine", "guest page"].map(Column::text).into_iter();
    let hosts = [None].into_iter().chain(PAGES.map(Some));
    let titles = hosts.clone().map(|host| host.map_or("native".to_owned(), |host| format!("host {host}")));
    let mut rows = vec![];
    for place in places().filter(|place| place.program == program) {
        for guest in PAGES {
            let head = [format!("{} GiB", place.footprint_gib), MACHINES[place.machine].0.into(), guest.into()];
            let cells = hosts.clone().map(|host| figures.at(place, guest, host).map_or("-".into(), cell));
            rows.push(head.into_iter().chain(cells).collect());
        }
    }
    Grid {
        caption: format!(
            "Simulated, {}: misses of 1000 accesses | references of a walk | cycles of a walk | cycles of an access",
            PROGRAMS[program].1
        ),
        columns: head.chain(titles.map(Column::number)).collect(),
        rows,
    }
}

fn cell(figure: &Figure) -> String {
    let of_walk = |value: Option<f64>, places| value.map_or("-".to_owned(), |value| decimals(value, places));
    let few = if figure.counted_misses < MISSES_FEW { FEW } else { "" };
    let text = format!(
        "{}{few} | {} | {} | {}",
        short(figure.misses_per_1000),
        of_walk(figure.references_per_walk, 1),
        of_walk(figure.cycles_per_walk, 0),
        short(figure.cycles_per_access)
    );
    simulated(&text)
}

/// A number with three significant digits; a tiny one as "<0.001".
fn short(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        value if value < 0.001 => "<0.001".into(),
        value if value < 1.0 => decimals(value, 3),
        value if value < 10.0 => decimals(value, 2),
        value if value < 100.0 => decimals(value, 1),
        value => decimals(value, 0),
    }
}

/// Shares of the legend, and what a shade stands for besides: the picture has no darker and no lighter one.
const SHADES: [(f64, &str); 5] = [(0.0, " or less"), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, " or more")];

fn picture(figures: &Figures) -> Boxes {
    let rows = (0..PROGRAMS.len()).flat_map(|program| FOOTPRINTS_GIB.map(|footprint_gib| (program, footprint_gib)));
    let group = |(program, footprint_gib): (usize, u64)| {
        let of_machine = |machine: usize| {
            let place = Place { program, footprint_gib, machine };
            PAGES.map(|guest| PAGES.map(|host| box_of(figures, place, guest, host))).concat()
        };
        let name = format!("{} {footprint_gib} GiB", PROGRAMS[program].1);
        (name, (0..MACHINES.len()).map(of_machine).collect())
    };
    Boxes {
        name: "grid".into(),
        caption:
            "Simulated: cycles of address translation an access, guest page (down) by host page (across); darker: \
                  more of the second dimension's cost taken away, compared with 4k over 4k"
                .into(),
        columns: MACHINES.map(|(_, title)| title.into()).into(),
        inner: PAGES.map(Into::into).into(),
        legend: SHADES.map(|(share, beyond)| (format!("{:.0} %{beyond} taken away", share * 100.0), share)).into(),
        rows: rows.map(group).collect(),
        is_simulated: true,
    }
}

fn box_of(figures: &Figures, place: Place, guest: &str, host: &str) -> Option<BoxOf> {
    let figure = figures.at(place, guest, Some(host))?;
    Some(BoxOf {
        text: short(figure.cycles_per_access),
        shade: figures.taken_away(place, guest, host)?.clamp(0.0, 1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::grid::FIGURES;

    #[test]
    fn every_number_of_the_grid_is_marked_as_simulated() {
        let sections = sections(&Figures::read(FIGURES));
        let mut cells = 0;
        for grid in sections.iter().flat_map(|section| &section.tables) {
            assert!(grid.caption.starts_with("Simulated, "), "{}", grid.caption);
            for row in &grid.rows {
                for (cell, column) in row.iter().zip(&grid.columns).filter(|(_, column)| column.is_number) {
                    assert!(cell.starts_with('~') || cell == "-", "{}: {cell}", column.title);
                    cells += 1;
                }
            }
        }
        assert_eq!(cells, 3 * 20 * 9 + 5 * 36 * 4);
        let words: String = sections.iter().flat_map(|section| section.paragraphs.clone()).collect();
        assert!(!words.contains("measured"), "{words}");
    }

    #[test]
    fn shares_beyond_the_shades_are_explained_and_the_legend_has_them_too() {
        let figures = Figures::read(FIGURES);
        let mut above = Vec::new();
        for (guest, host) in other_pages() {
            let is_above = |place: &Place| figures.taken_away(*place, guest, host).is_some_and(|share| share > 1.001);
            above.extend(places().filter(is_above).map(Place::name));
        }
        // The text names these alone.
        assert!(above.iter().all(|name| name.starts_with("Sweep3D ") && name.ends_with(", haswell-ep")), "{above:?}");
        assert_eq!(above.len(), 4);
        let said = summary(&figures);
        for range in ["64 to 100 %", "-8472 to 419 %", "16 to 100 %"] {
            assert!(said.contains(range), "{range}: {said}");
        }
        let legend: Vec<String> = picture(&figures).legend.into_iter().map(|(text, _)| text).collect();
        assert_eq!((&*legend[0], &*legend[4]), ("0 % or less taken away", "100 % or more taken away"));
    }

    #[test]
    fn numbers_have_three_digits_and_tiny_ones_are_not_zero() {
        assert_eq!(
            [0.0, 0.0004, 0.1234, 1.234, 45.67, 987.6].map(short),
            ["0", "<0.001", "0.123", "1.23", "45.7", "988"]
        );
    }
}
