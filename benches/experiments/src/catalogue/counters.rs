//! `counters`: every published counter of TLB misses beside the simulator's, in all published sizes and with three
//! replacement rules. Nothing is timed, and the host does not matter.
//!
//! ```text
//!   kernel, one iteration ─▶ recorded ──┐                ┌─ 4 KiB                    ─┐   FreeBSD's counters
//!   GUPS, Sweep3D ─────────▶ generated ─┴─▶ K8, native ──┤                            ├─▶ OpenMP's factors
//!                                                        └─ 2 MiB: LRU, tree, random ─┘
//! ```
//!
//! `freebsd` and `openmp` simulate the rows that take less than a minute, next to their times. This experiment also
//! has the large classes, other orders of loops and of arrays, and the rules.

use crate::catalogue::Catalogued;
use crate::catalogue::programs::program;
use crate::catalogue::versus_published::{cell, mean, millions, value};
use crate::definition::{Accesses, Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::{freebsd, openmp};
use crate::report::common_sections::decimals;
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// The `counters` experiment of the catalogue.
pub struct Counters;

/// Arms with their machine and page size. K8's rule for its eight entries of 2 MiB is not documented.
const ARMS: [(&str, &str, &str, &str); 4] = [
    ("4K", "simulated, K8: 4 KiB pages", "k8", "4k"),
    ("2M", "simulated, K8: 2 MiB pages, entries replaced by LRU", "k8", "2m"),
    ("2M, tree PLRU", "simulated, K8: 2 MiB pages, entries replaced by a tree of bits", "k8:tree-plru", "2m"),
    ("2M, random", "simulated, K8: 2 MiB pages, entries replaced at random", "k8:random", "2m"),
];

/// Source of a row's accesses.
enum AccessSource {
    /// One recorded iteration of a program with this order of loops.
    Recorded(&'static str),
    /// A generated stream, and the factor to a whole run.
    Generated(&'static str, f64),
}

/// A row: its case, the published case, the accesses, and the duration of one simulation in seconds.
struct Row {
    name: &'static str,
    of: &'static str,
    from: AccessSource,
    seconds: f64,
}

const fn recorded(name: &'static str, of: &'static str, order: &'static str, seconds: f64) -> Row {
    Row { name, of, from: AccessSource::Recorded(order), seconds }
}

const fn generated(name: &'static str, of: &'static str, stream: &'static str, scale: f64, seconds: f64) -> Row {
    Row { name, of, from: AccessSource::Generated(stream, scale), seconds }
}

/// HPCC makes four updates for each word in two passes; 2^24 of them are simulated.
const PASSES_AND_UPDATES: f64 = 8.0;
const SWEEP3D_ITERATIONS: f64 = 12.0;

/// All rows, the shortest first, so that a time limit leaves out the longest.
const ROWS: [Row; 22] = [
    generated("GUPS 2^25", "GUPS 2^25", "gups:log2_words=25,updates=16777216", PASSES_AND_UPDATES * 2.0, 6.0),
    generated("GUPS 2^26", "GUPS 2^26", "gups:log2_words=26,updates=16777216", PASSES_AND_UPDATES * 4.0, 6.0),
    generated("GUPS 2^27", "GUPS 2^27", "gups:log2_words=27,updates=16777216", PASSES_AND_UPDATES * 8.0, 6.0),
    generated("GUPS 2^28", "GUPS 2^28", "gups:log2_words=28,updates=16777216", PASSES_AND_UPDATES * 16.0, 6.0),
    recorded("LU A", "LU A", REFERENCE, 15.0),
    recorded("SP A", "SP A", REFERENCE, 22.0),
    recorded("BT A", "BT A", REFERENCE, 28.0),
    recorded("CG A", "CG A", "", 30.0),
    recorded("IS B", "IS B", "", 40.0),
    recorded("MG B", "MG B", "", 40.0),
    generated("Sweep3D 150, adjacent arrays", "Sweep3D 150", "sweep3d:border=64", SWEEP3D_ITERATIONS, 40.0),
    generated("Sweep3D 150, arrays at 1 MiB", "Sweep3D 150", "sweep3d:border=1048576", SWEEP3D_ITERATIONS, 40.0),
    recorded("LU B", "LU B", REFERENCE, 60.0),
    recorded("SP B", "SP B", REFERENCE, 90.0),
    recorded("SP B, own order", "SP B", "", 90.0),
    recorded("BT B", "BT B", REFERENCE, 110.0),
    recorded("BT B, own order", "BT B", "", 110.0),
    recorded("IS C", "IS C", "", 160.0),
    recorded("CG B", "CG B", "", 220.0),
    recorded("LU C", "LU C", REFERENCE, 240.0),
    recorded("BT C", "BT C", REFERENCE, 450.0),
    recorded("CG C", "CG C", "", 590.0),
];
const REFERENCE: &str = "order=reference";

impl Catalogued for Counters {
    fn name(&self) -> &'static str {
        "counters"
    }

    fn summary(&self) -> &'static str {
        "published TLB counters beside simulated ones, all sizes, three replacement rules; nothing is timed"
    }

    fn define(&self, _host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Published counters beside simulated ones".into(),
            question: "Does the simulated Opteron miss its TLB as often as the published one, on 4 KiB and on 2 MiB \
             pages?"
                .into(),
            source: Some("FreeBSD's superpages and OpenMP programs on large pages, both on an Opteron".into()),
            rounds: 1,
            arms: ARMS.map(|(name, summary, ..)| Arm { name: name.into(), summary: summary.into() }).to_vec(),
            cases: ROWS.iter().map(case).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let rows: Vec<RowCounts> =
            ROWS.iter().map(|row| RowCounts::of(results, row)).filter(RowCounts::is_made).collect();
        vec![misses(&rows), walks(&rows), rules(&rows), fall(&rows)]
    }
}

fn case(row: &Row) -> Case {
    let program = program(row.of);
    let cells = ARMS.map(|(_, _, machine, page)| {
        let accesses = match row.from {
            AccessSource::Recorded(order) => program.recorded(order, Some(1)),
            AccessSource::Generated(stream, scale) => Accesses::Generated { stream: stream.into(), scale },
        };
        Cell::of(Job::simulation(accesses, machine, page, row.seconds))
    });
    Case { name: row.name.into(), ..program.case(cells.to_vec()) }
}

/// Misses and L2 misses of walks of a row: simulated by arm, and published on 4 KiB and on 2 MiB pages.
struct RowCounts {
    name: &'static str,
    of: &'static str,
    misses: [Option<f64>; 4],
    walks: [Option<f64>; 4],
    published_misses: [Option<f64>; 2],
    published_walks: [Option<f64>; 2],
}

impl RowCounts {
    fn of(results: &Results, row: &Row) -> RowCounts {
        let simulated = |metric| ARMS.map(|(arm, ..)| value(results, row.name, arm, metric));
        RowCounts {
            name: row.name,
            of: row.of,
            misses: simulated(Metric::DtlbMisses),
            walks: simulated(Metric::WalkL2Misses),
            published_misses: published(row.of, 0),
            published_walks: published(row.of, 1),
        }
    }

    fn is_made(&self) -> bool {
        self.misses.iter().any(Option::is_some)
    }
}

/// Means of a published counter over the runs on 4 KiB and on 2 MiB pages.
fn published(case: &str, counter: usize) -> [Option<f64>; 2] {
    let runs = freebsd::runs();
    [false, true].map(|is_huge| {
        let is_it = |run: &&freebsd::Run| run.case == case && run.is_huge == is_huge;
        mean(&runs.iter().filter(is_it).filter_map(|run| run.counters[counter]).collect::<Vec<_>>())
    })
}

/// Both values of a pair, if both are present.
fn both<const N: usize>(of: &[Option<f64>; N]) -> Option<[f64; 2]> {
    Some([of[0]?, of[1]?])
}

fn ratio(of: Option<f64>, to: Option<f64>) -> String {
    of.zip(to).map_or_else(|| "-".into(), |(of, to)| decimals(of / to, 2))
}

fn grid(caption: &str, numbers: &[&str], rows: Vec<Vec<String>>) -> Grid {
    let numbers = numbers.iter().map(|title| Column::number(*title));
    Grid { caption: caption.into(), columns: [Column::text("program")].into_iter().chain(numbers).collect(), rows }
}

/// Largest factor that counts as near, and the largest error of GUPS in percent that counts as right.
const NEAR_BY: f64 = 2.0;
const GUPS_WITHIN_PERCENT: f64 = 2.0;

/// A count of ours and the published one, for two page sizes.
type Pairs = [(Option<f64>, Option<f64>); 2];

/// Number of counts within [`NEAR_BY`] of the published ones, and of all counts that both have.
fn near(rows: &[RowCounts], of: fn(&RowCounts) -> Pairs) -> (usize, usize) {
    let ratios: Vec<f64> = rows.iter().flat_map(of).filter_map(|(ours, theirs)| Some(ours? / theirs?)).collect();
    (ratios.iter().filter(|ratio| (1.0 / NEAR_BY..=NEAR_BY).contains(*ratio)).count(), ratios.len())
}

fn misses(rows: &[RowCounts]) -> Section {
    let cells = |row: &RowCounts| {
        let page = |n: usize| {
            let (ours, theirs) = (row.misses[n], row.published_misses[n]);
            [millions(ours), millions(theirs), ratio(ours, theirs)]
        };
        let removed = |of: Option<[f64; 2]>| millions(of.map(|[base, huge]| base - huge));
        let rest = |n: usize| millions(row.published_misses[n].zip(row.misses[n]).map(|(theirs, ours)| theirs - ours));
        let of_both = [removed(both(&row.misses)), removed(both(&row.published_misses)), rest(0), rest(1)];
        [row.name.to_owned()].into_iter().chain(page(0)).chain(page(1)).chain(of_both).collect()
    };
    let known: Vec<([f64; 2], [f64; 2])> =
        rows.iter().filter_map(|row| Some((both(&row.misses)?, both(&row.published_misses)?))).collect();
    let same = known.iter().filter(|(ours, theirs)| (ours[1] > ours[0]) == (theirs[1] > theirs[0])).count();
    let pairs = |row: &RowCounts| [0, 1].map(|n| (row.misses[n], row.published_misses[n]));
    let (near, all) = near(rows, pairs);
    let gups = rows.iter().filter(|row| row.name.starts_with("GUPS")).flat_map(pairs);
    let worst = gups.filter_map(|(ours, theirs)| Some((ours? / theirs? - 1.0).abs() * 100.0)).reduce(f64::max);
    let gups = worst.map(|worst| {
        let verdict = if worst <= GUPS_WITHIN_PERCENT { "within" } else { "not within" };
        format!(
            "GUPS is {verdict} {GUPS_WITHIN_PERCENT} % of the published misses: largest error {} %.",
            cell(Some(worst))
        )
    });
    let told = format!(
        "Misses rise or fall from 4 KiB to 2 MiB pages as published in {same} of {} rows. {near} of {all} counts are \
         within a factor of {NEAR_BY}.",
        known.len()
    );
    let titles = [
        "4K, simulated",
        "published",
        "ratio",
        "2M, simulated",
        "published",
        "ratio",
        "removed by 2M, simulated",
        "published",
        "rest on 4K",
        "rest on 2M",
    ];
    let caption = "Misses of both levels of the data TLB, in millions; rest: published but not simulated";
    Section {
        title: "Misses".into(),
        paragraphs: [Some(told), gups, Some(NOTES.into())].into_iter().flatten().collect(),
        tables: vec![grid(caption, &titles, rows.iter().map(cells).collect())],
        plots: vec![],
    }
}

const NOTES: &str = "K8 has eight entries for 2 MiB pages, so more misses on them are no error. Of a recorded program \
    one iteration counts for all iterations of its class. No recording has the stack, the code and the system; they \
    miss on both page sizes alike and cancel in the removed misses. Which arrays of Sweep3D were adjacent is not \
    published.";

fn walks(rows: &[RowCounts]) -> Section {
    let cells = |row: &RowCounts| {
        let page = |n: usize| {
            let (ours, theirs) = (row.walks[n], row.published_walks[n]);
            [millions(ours), millions(theirs), ratio(ours, theirs)]
        };
        [row.name.to_owned()].into_iter().chain(page(0)).chain(page(1)).collect()
    };
    let known: Vec<[f64; 2]> = rows.iter().filter_map(|row| both(&row.walks)).collect();
    let fewer = known.iter().filter(|[base, huge]| huge < base).count();
    let (near, all) = near(rows, |row| [0, 1].map(|n| (row.walks[n], row.published_walks[n])));
    let told = format!(
        "Fewer references of walks miss the L2 on 2 MiB pages in {fewer} of {} rows. {near} of {all} counts are within \
         a factor of {NEAR_BY} of the published ones.",
        known.len()
    );
    let titles = ["4K, simulated", "published", "ratio", "2M, simulated", "published", "ratio"];
    Section {
        title: "Walks".into(),
        paragraphs: vec![told],
        tables: vec![grid("L2 misses of walks, in millions", &titles, rows.iter().map(cells).collect())],
        plots: vec![],
    }
}

fn rules(rows: &[RowCounts]) -> Section {
    let cells = |row: &RowCounts| {
        let ours = [1, 2, 3].map(|arm| millions(row.misses[arm]));
        [row.name.to_owned(), millions(row.published_misses[1])].into_iter().chain(ours).collect()
    };
    let caption = "Misses on 2 MiB pages by the rule that replaces the eight entries, in millions";
    Section {
        title: "Replacement".into(),
        paragraphs: vec!["The rule matters in loops over more than eight pages. It is not documented.".into()],
        tables: vec![grid(caption, &["published", "LRU", "tree PLRU", "random"], rows.iter().map(cells).collect())],
        plots: vec![],
    }
}

/// Factors by which misses fall on 2 MiB pages, beside the OpenMP measurements.
fn fall(rows: &[RowCounts]) -> Section {
    let factor = |of: Option<[f64; 2]>| of.map_or_else(|| "-".into(), |[base, huge]| decimals(base / huge, 2));
    let cells = |row: &RowCounts| {
        let theirs = openmp::fall_of_misses(row.of.strip_suffix(" B")?)?;
        Some(vec![row.name.into(), theirs, factor(both(&row.published_misses)), factor(both(&row.misses))])
    };
    let titles = ["OpenMP's, 4 threads", "FreeBSD's, 1 process", "simulated, 1 thread"];
    Section {
        title: "Beside the OpenMP measurements".into(),
        paragraphs: vec![
            "Both Opterons have the same TLB. The OpenMP text prints factors and no counts; each of its four threads \
             covers a quarter of each array, which a recording of one thread does not show."
                .into(),
        ],
        tables: vec![grid(
            "Times fewer misses on 2 MiB pages, class B",
            &titles,
            rows.iter().filter_map(cells).collect(),
        )],
        plots: vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    #[test]
    fn every_row_is_simulated_in_every_arm_and_needs_nothing_of_the_host() {
        let experiment = Counters.define(&HostFacts { why_no_kvm: Some("no /dev/kvm".into()), ..host() });
        let is_exact = |cell: &Cell| matches!(cell, Cell::Job(job) if job.is_exact);
        assert!(experiment.cases.iter().all(|case| case.cells.len() == ARMS.len() && case.cells.iter().all(is_exact)));
    }

    #[test]
    fn counts_stand_beside_the_published_ones_and_are_judged() {
        let theirs = published("GUPS 2^25", 0);
        let results = results_of(Counters.define(&host()), |case, arm, _| match (case, arm) {
            ("GUPS 2^25", "4K") => Some((Metric::DtlbMisses, theirs[0]? * 1.01)),
            ("GUPS 2^25", "2M") => Some((Metric::DtlbMisses, theirs[1]? * 0.99)),
            ("CG B", "4K") => Some((Metric::DtlbMisses, 85.57e6)),
            ("CG B", "2M") => Some((Metric::DtlbMisses, 1.53e6)),
            ("CG B", "2M, random") => Some((Metric::DtlbMisses, 1.6e6)),
            _ => None,
        });
        let [misses, _, rules, fall] = Counters.sections(&results).try_into().expect("four");
        assert!(misses.paragraphs[0].contains("in 2 of 2 rows. 3 of 4 counts"), "{}", misses.paragraphs[0]);
        assert!(misses.paragraphs[1].starts_with("GUPS is within 2 %"), "{}", misses.paragraphs[1]);
        assert_eq!(rules.tables[0].rows[1][2..], ["1.530", "-", "1.600"]);
        assert_eq!(fall.tables[0].rows, [["CG B", "10 or more", "10.26", "55.93"]]);
    }
}
