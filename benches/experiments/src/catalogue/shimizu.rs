//! `shimizu`: average times without and with superpages and the improvement in percent, in the form of the published
//! measurements of superpages on i386, x86-64 and ia64.

use crate::catalogue::Catalogued;
use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, program};
use crate::catalogue::versus_published::{
    self, Pair, PublishedSaving, cell, mean, other_sentences, otherwise, saved, times, values,
};
use crate::definition::{Arm, Case, Experiment, HostFacts};
use crate::metric::Metric;
use crate::published::shimizu::Table;
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// The `shimizu` experiment of the catalogue.
pub struct Shimizu;

/// Published rows of all three architectures in their order, and whether they are run without `--long`. SP of
/// class A represents class B.
const ROWS: [(&str, bool); 18] = [
    ("BT A", true),
    ("BT B", false),
    ("BT C", false),
    ("CG A", true),
    ("CG B", true),
    ("CG C", false),
    ("IS B", true),
    ("IS C", false),
    ("LU A", true),
    ("LU B", false),
    ("LU C", false),
    ("SP A", true),
    ("SP B", false),
    ("GUPS 2^25", true),
    ("GUPS 2^26", true),
    ("GUPS 2^27", false),
    ("GUPS 2^28", false),
    ("Sweep3D 150", true),
];

const DISABLED: &str = "disabled";
const ENABLED: &str = "enabled";
const ARMS: [(&str, &str); 2] =
    [(DISABLED, "4 KiB pages"), (ENABLED, "transparent huge pages of 2 MiB from the start")];

impl Catalogued for Shimizu {
    fn name(&self) -> &'static str {
        "shimizu"
    }

    fn summary(&self) -> &'static str {
        "average times natively and in guests at the first touch, superpages disabled and enabled, percent \
         improvement; compared with x86-64, i386 and ia64"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Average times, superpages disabled and enabled".into(),
            question: "How much less time do NPB, RandomAccess and Sweep3D take on 2 MiB pages, in a process?".into(),
            source: Some(
                "the measurements of transparent superpages on i386, x86-64 and ia64 (average times, percent \
                 improvement)"
                    .into(),
            ),
            rounds: 6,
            arms: [Arm::all(&ARMS), in_guests::arms(MECHANISM)].concat(),
            cases: ROWS.iter().map(|(name, is_run)| case(name, *is_run, host)).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![improvements(results), in_guests(results)]
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        versus_published::lead(results, otherwise(&pairs(results)))
    }
}

/// Superpages at the first touch.
const MECHANISM: &[InGuest] = &[InGuest::AtFault];

fn in_guests(results: &Results) -> Section {
    let of_row = |name: &str| Table::X86_64.row(stands_for(name)).map(|row| row.percent_improvement);
    let rows = ROWS.map(|(name, _)| Published { case: name.into(), saved_percent: of_row(name) });
    in_guests::section(results, MECHANISM, [DISABLED, ENABLED], &rows)
}

fn case(name: &str, is_run: bool, host: &HostFacts) -> Case {
    let program = program(name);
    let is_run = is_run || host.wants_long_runs;
    let cell = |pages| if is_run { program.native(pages, host) } else { program.only_with_long() };
    let guests = in_guests::cells(program, MECHANISM, 1, host);
    program.case([cell(Pages::Base), cell(Pages::Thp)].into_iter().chain(guests).collect())
}

/// The published table with our columns in front. Averages are means, as published. Our percentages are from
/// pairs, with their interval.
fn improvements(results: &Results) -> Section {
    let head = ["disabled, s", "enabled, s", "improvement by the averages, %", "by pairs: median (95 %)"];
    let theirs = Table::ALL.map(|table| Column::number(format!("{}, %", table.title())));
    let mut grid = Grid {
        caption: "Average times and percent improvement: ours, then published as printed".into(),
        columns: [Column::text("benchmark")].into_iter().chain(head.map(Column::number)).chain(theirs).collect(),
        rows: vec![],
    };
    for (name, _) in ROWS {
        let [disabled, enabled] = [DISABLED, ENABLED].map(|arm| mean(&values(results, name, arm, Metric::Seconds)));
        let by_averages = disabled.zip(enabled).map(|(disabled, enabled)| (1.0 - enabled / disabled) * 100.0);
        let ours = times(results, name, ENABLED, DISABLED);
        let theirs = Table::ALL.map(|table| table.row(name).map(|row| row.percent_improvement));
        let by_pairs = ours.as_ref().map_or_else(|| "-".into(), saved);
        let row = [name.to_owned(), cell(disabled), cell(enabled), cell(by_averages), by_pairs];
        grid.rows.push(row.into_iter().chain(theirs.map(cell)).collect());
    }
    Section {
        title: "Percent improvement, compared with the published one".into(),
        paragraphs: [other_sentences(&pairs(results)), vec![NOTES.into()]].concat(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Comparisons with the column x86-64.
fn pairs(results: &Results) -> Vec<Pair> {
    let pair = |(name, _): (&str, bool)| {
        let theirs = PublishedSaving::percent(Table::X86_64.row(stands_for(name))?.percent_improvement);
        let case = match stands_for(name) {
            theirs if theirs == name => name.to_owned(),
            theirs => format!("{name} (published: {theirs})"),
        };
        Some(Pair { case, theirs, ours: times(results, name, ENABLED, DISABLED) })
    };
    ROWS.into_iter().filter_map(pair).collect()
}

/// Published case that our case is compared with.
fn stands_for(name: &str) -> &str {
    if name == "SP A" { "SP B" } else { name }
}

const NOTES: &str = "Sentences compare with the column x86-64; SP of class A with the published SP of class B. Times \
    are those of the kernel's timed part. = means that the interval contains 0 %, which shows no difference, but \
    does not prove equality; ? that there are fewer than six pairs. The seconds of the publication, and its i386 and \
    ia64, are of other machines: only its percentages stand here. The ia64 table with four levels names the row of \
    Sweep3D 15, with the times of 150.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    #[test]
    fn averages_are_means_and_percentages_of_pairs_stand_beside_the_published_ones() {
        let experiment = Shimizu.define(&host());
        // GUPS 2^26 takes 10 s on base pages, and 7 or 8 s on large pages.
        let results = results_of(experiment, |case, arm, round| match (case, arm) {
            ("GUPS 2^26", DISABLED) => Some((Metric::Seconds, 10.0)),
            ("GUPS 2^26", _) => Some((Metric::Seconds, if round % 2 == 0 { 7.0 } else { 8.0 })),
            _ => None,
        });
        let [section, _] = Shimizu.sections(&results).try_into().expect("two");
        let row = section.tables[0].rows.iter().find(|row| row[0] == "GUPS 2^26").expect("it was run");
        assert_eq!(row[..4], ["GUPS 2^26", "10.00", "7.500", "25.00"]);
        assert_eq!(row[5..8], ["26.22", "16.89", "28.66"], "x86-64, i386, i386 PAE");
        let begin = "Same sign as published; whether the amount is the same within 2 % is not decided: GUPS 2^26 (26.2";
        assert!(section.paragraphs[0].starts_with(begin), "20 to 30 % here: {:?}", section.paragraphs);
        assert_eq!(Shimizu.lead(&results), ["Measured in a process: 1 of 18 rows; in guests: 0."]);
        let left_out = section.tables[0].rows.iter().find(|row| row[0] == "CG C").expect("all published rows exist");
        assert_eq!(left_out[1..6], ["-", "-", "-", "-", "73.06"]);
    }

    #[test]
    fn every_row_of_x86_64_is_a_case() {
        for row in Table::X86_64.rows() {
            assert!(ROWS.iter().any(|(name, _)| *name == row.case()), "{}", row.benchmark);
        }
    }
}
