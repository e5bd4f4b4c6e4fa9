//! NPB and Sweep3D on the Opteron of the FreeBSD measurements: each page size, row by row, and the number of rows
//! that match the measurement.
//!
//! The direction of a row says whether 2 MiB pages miss more or less often than 4 KiB pages. K8 has eight entries for
//! 2 MiB pages, so more misses are not an error.

use comfy_table::Cell;
use wideleaf_benches::scenario::{Ended, Waiting, bar, number, table};
use wideleaf_policies::PageSize;
use wideleaf_simulator::machine::Replacement;

use crate::PAGES;
use crate::measured::{Misses, Opteron};
use crate::simulated::{Arm, Sums, opteron};
use crate::traced::Trace;

/// Maximum factor between simulated and measured counts, and the minimum share of rows within it.
const RATIO_WITHIN: f64 = 2.0;
const NEAR_AT_LEAST: f64 = 0.8;

/// Replacement rules other than LRU for the entries for 2 MiB pages.
const OTHER_RULES: [(&str, Replacement); 2] = [("tree PLRU", Replacement::TreePlru), ("random", Replacement::Random)];

/// Both page sizes with LRU, then 2 MiB pages with the other rules.
pub type Arms = [Arm; 4];

pub fn arms(bytes: u64) -> Arms {
    let by = |rule, page| Arm::new(opteron(rule), bytes, page);
    let [tree, random] = OTHER_RULES.map(|(_, rule)| by(rule, PageSize::Huge2M));
    let [base, huge] = PAGES.map(|page| by(Replacement::Lru, page));
    [base, huge, tree, random]
}

/// A program with simulated and measured misses on both page sizes, 4 KiB first.
pub struct Row {
    pub name: String,
    /// Source of the accesses.
    pub from: String,
    pub scale: String,
    pub simulated: [Misses; 2],
    /// Misses on 2 MiB pages with the other rules.
    pub by_other_rules: [Misses; 2],
    pub measured: Option<[Misses; 2]>,
}

impl Row {
    pub fn simulate(trace: Trace<'_>, measured: &Opteron, waiting: &Waiting) -> Result<Row, Ended> {
        let (name, from, scale) = (trace.name(), trace.variant(), trace.scale());
        let arms = arms(trace.arena_bytes());
        Ok(Row::new(name, from, scale, trace.simulate(arms, waiting)?, measured))
    }

    /// A row from the sums of [`Arms`].
    pub fn new(name: String, from: String, scale: String, sums: [Sums; 4], measured: &Opteron) -> Row {
        let [base, huge, tree, random] = sums.map(|sums| sums.misses());
        let (simulated, by_other_rules) = ([base, huge], [tree, random]);
        Row { measured: measured.of(&name), name, from, scale, simulated, by_other_rules }
    }
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\nNPB and Sweep3D, K8, native; misses in millions, scaled to the iterations of the class");
    let header = [
        "program",
        "accesses",
        "iterations",
        "page",
        "misses",
        "measured",
        "ratio",
        "walk L2 misses",
        "measured",
        "ratio",
    ];
    let mut out = table(&header);
    for row in rows {
        for (n, page) in PAGES.into_iter().enumerate() {
            let (simulated, measured) = (row.simulated[n], row.measured.map(|it| it[n]));
            let cells = |of: fn(&Misses) -> f64| {
                let (simulated, measured) = (of(&simulated), measured.as_ref().map(of));
                let text = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
                [Some(simulated / 1e6), measured.map(|it| it / 1e6), measured.map(|it| simulated / it)]
                    .map(|value| number(text(value)))
            };
            let heading = [Cell::new(&row.name), Cell::new(&row.from), number(&row.scale), Cell::new(page)];
            out.add_row(heading.into_iter().chain(cells(|it| it.tlb)).chain(cells(|it| it.walk_l2)));
        }
    }
    println!("{out}");
    judge(rows);
    print_taken(rows);
    print_rules(rows);
}

/// Prints the misses that 2 MiB pages remove. The stack, the code and the system are in no trace, but they miss
/// equally on both page sizes of the arena and cancel out.
fn print_taken(rows: &[Row]) {
    println!(
        "  misses removed by 2 MiB pages (below 0: added), in millions; rest: measured but not simulated, on either \
         size:"
    );
    let header = [
        "program",
        "accesses",
        "misses",
        "measured",
        "ratio",
        "rest on 4k",
        "rest on 2m",
        "walk L2 misses",
        "measured",
        "ratio",
    ];
    let mut out = table(&header);
    let taken = |misses: &[Misses; 2], of: fn(&Misses) -> f64| of(&misses[0]) - of(&misses[1]);
    for row in rows {
        let Some(measured) = &row.measured else { continue };
        let millions = |misses: f64| number(format!("{:.2}", misses / 1e6));
        let compared = |of: fn(&Misses) -> f64| {
            let (simulated, measured) = (taken(&row.simulated, of), taken(measured, of));
            [millions(simulated), millions(measured), number(format!("{:.2}", simulated / measured))]
        };
        let rest = [0, 1].map(|n| millions(measured[n].tlb - row.simulated[n].tlb));
        let head = [Cell::new(&row.name), Cell::new(&row.from)];
        out.add_row(head.into_iter().chain(compared(|it| it.tlb)).chain(rest).chain(compared(|it| it.walk_l2)));
    }
    println!("{out}");
}

/// Prints the misses by replacement rule. Under loops over more than eight pages the rule matters, and
/// it is not documented.
fn print_rules(rows: &[Row]) {
    println!("  misses on 2 MiB pages, in millions, by the replacement rule of the eight entries (LRU is judged):");
    let [tree, random] = OTHER_RULES.map(|(name, _)| name);
    let mut out = table(&["program", "accesses", "measured", "LRU", tree, random]);
    for row in rows {
        let millions = |misses: Misses| number(format!("{:.2}", misses.tlb / 1e6));
        let [tree, random] = row.by_other_rules.map(millions);
        let measured = row.measured.map_or_else(|| number("-"), |it| millions(it[1]));
        out.add_row([Cell::new(&row.name), Cell::new(&row.from), measured, millions(row.simulated[1]), tree, random]);
    }
    println!("{out}");
}

fn judge(rows: &[Row]) {
    let known: Vec<_> = rows.iter().filter_map(|row| Some((row, row.measured?))).collect();
    let all = known.len();
    if all == 0 {
        println!("  no program is in the tables: nothing is judged");
        return;
    }
    let is_more = |misses: &[Misses; 2]| misses[1].tlb > misses[0].tlb;
    let same = known.iter().filter(|(row, measured)| is_more(&row.simulated) == is_more(measured)).count();
    let what = format!("direction of misses from 4 KiB to 2 MiB as measured: {same} of {all} programs");
    println!("{}", bar(&what, same == all));
    let fewer = known.iter().filter(|(row, _)| row.simulated[1].walk_l2 < row.simulated[0].walk_l2).count();
    let what = format!("fewer walk references miss the L2 with 2 MiB: {fewer} of {all} programs");
    println!("{}", bar(&what, fewer == all));
    judge_ratios("misses", &known, |it| it.tlb);
    judge_ratios("walk L2 misses", &known, |it| it.walk_l2);
}

fn judge_ratios(what: &str, known: &[(&Row, [Misses; 2])], of: fn(&Misses) -> f64) {
    let ratios = known.iter().flat_map(|(row, measured)| (0..2).map(|n| of(&row.simulated[n]) / of(&measured[n])));
    let near = ratios.filter(|ratio| (1.0 / RATIO_WITHIN..=RATIO_WITHIN).contains(ratio)).count();
    let all = 2 * known.len();
    let what = format!(
        "{what} within a factor of {RATIO_WITHIN}: {near} of {all} rows, target {:.0} %",
        100.0 * NEAR_AT_LEAST
    );
    println!("{}", bar(&what, near as f64 >= NEAR_AT_LEAST * all as f64));
}
