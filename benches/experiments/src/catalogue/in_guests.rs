//! The published programs in guests: on base pages, by the mechanism of the publication, under `auto`, and on large
//! pages from the start. Their savings stand beside those of the process and the published ones.
//!
//! ```text
//!   process   4 KiB pages ── pairs ── 2 MiB pages
//!   guest     never       ── pairs ── the publication's mechanism │ auto │ hugetlb
//! ```

use crate::catalogue::programs::{InGuest, Program};
use crate::catalogue::versus_published::{cell, saved, sentence, times};
use crate::definition::{Arm, Cell, HostFacts};
use crate::report::common_sections::decimals;
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::statistics::Comparison;

/// Difference between the savings of a guest and of the process from which the text names it, in percent of the time.
const NAMED_FROM_PERCENT: f64 = 3.0;

/// How guests run for a publication with these mechanisms, an arm each: first on base pages.
fn ways(mechanisms: &[InGuest]) -> Vec<InGuest> {
    let mut ways = [&[InGuest::Never][..], mechanisms, &[InGuest::Auto]].concat();
    if !mechanisms.contains(&InGuest::Hugetlb) {
        ways.push(InGuest::Hugetlb);
    }
    ways
}

/// Arms of guests, for the end of a list of arms.
pub(super) fn arms(mechanisms: &[InGuest]) -> Vec<Arm> {
    Arm::all(&ways(mechanisms).iter().map(|way| (way.arm(), way.summary())).collect::<Vec<_>>())
}

/// Cells of a program in guests, in the order of [`arms`].
pub(super) fn cells(program: &Program, mechanisms: &[InGuest], threads: u32, host: &HostFacts) -> Vec<Cell> {
    ways(mechanisms).into_iter().map(|way| program.in_guest(way, threads, host)).collect()
}

/// Cells of a case that has no guests.
pub(super) fn absent(mechanisms: &[InGuest], why: &Cell) -> Vec<Cell> {
    ways(mechanisms).iter().map(|_| why.clone()).collect()
}

/// A row of the table: a case and the published saving of large pages, in percent of the time, if there is one.
pub(super) struct Published {
    pub case: String,
    pub saved_percent: Option<f64>,
}

/// Savings of time: published, in a process, and in guests. `process` are the arms on base and on large pages.
pub(super) fn section(results: &Results, mechanisms: &[InGuest], process: [&str; 2], rows: &[Published]) -> Section {
    let large = &ways(mechanisms)[1..];
    let guests = large.iter().map(|way| Column::number(way.arm()));
    let head = [Column::text("program"), Column::number("published, %"), Column::number("process")];
    let mut grid = Grid {
        caption: "Time saved, against base pages of the same process or guest: medians of pairs (95 %)".into(),
        columns: head.into_iter().chain(guests).collect(),
        rows: vec![],
    };
    let (mut far, mut near) = (vec![], vec![]);
    for Published { case, saved_percent } in rows {
        let in_process = times(results, case, process[1], process[0]);
        let in_guests: Vec<_> = large.iter().map(|way| times(results, case, way.arm(), InGuest::Never.arm())).collect();
        if in_guests.iter().all(Option::is_none) {
            continue;
        }
        for (way, guest) in large.iter().zip(&in_guests) {
            let Some(points) = in_process.as_ref().zip(guest.as_ref()).map(|(a, b)| percent(b) - percent(a)) else {
                continue;
            };
            let text = format!("{case}, {} ({} points)", way.arm(), decimals(points, 1));
            if points.abs() > NAMED_FROM_PERCENT { far.push(text) } else { near.push(text) }
        }
        let texts = [&in_process].into_iter().chain(&in_guests);
        let texts = texts.map(|times| times.as_ref().map_or_else(|| "-".into(), saved));
        grid.rows.push([case.clone(), cell(*saved_percent)].into_iter().chain(texts).collect());
    }
    let told = [
        sentence("A guest saves over 3 percent of its time more or less than the process does, by the medians", &far),
        sentence("Within 3 percent of the time", &near),
        grid.rows.is_empty().then(|| "No guest was measured yet.".to_owned()),
        Some(NOTES.to_owned()),
    ];
    Section {
        title: "In a guest, by the same mechanism and by auto".into(),
        paragraphs: told.into_iter().flatten().collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Saving in percent, from a ratio of times.
fn percent(times: &Comparison) -> f64 {
    (1.0 - times.interval.median) * 100.0
}

const NOTES: &str = "Guests use 2 MiB pages in their own tables in all arms. The arms differ in the host's pages, and \
    in what backs the RAM: a memfd under `reservation`, the pool under `hugetlb`, anonymous memory otherwise. A guest \
    with a wrong result has no figure. Coverage, bloat and KVM's mappings are in the tables of figures, the actions of \
    the managers in those of actions.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};
    use crate::catalogue::programs::{Pages, program};
    use crate::definition::Experiment;
    use crate::metric::Metric;

    const PROCESS: [&str; 2] = ["base", "huge"];

    fn experiment(mechanism: InGuest) -> Experiment {
        experiment_of(&[mechanism])
    }

    fn experiment_of(mechanisms: &[InGuest]) -> Experiment {
        let of_process = PROCESS.map(|name| Arm { name: name.into(), summary: String::new() });
        let program = program("CG B");
        let host = HostFacts { wants_long_runs: true, ..host() };
        let native = [Pages::Base, Pages::Thp].map(|pages| program.native(pages, &host));
        Experiment {
            name: "made-up".into(),
            title: String::new(),
            question: String::new(),
            source: None,
            rounds: 6,
            arms: of_process.into_iter().chain(arms(mechanisms)).collect(),
            cases: vec![program.case(native.into_iter().chain(cells(program, mechanisms, 1, &host)).collect())],
        }
    }

    fn commands(experiment: &Experiment) -> Vec<String> {
        let of_guests = experiment.cases[0].cells.iter().skip(2);
        of_guests.map(|cell| if let Cell::Job(job) = cell { format!("{job:?}") } else { String::new() }).collect()
    }

    #[test]
    fn the_arms_differ_in_the_hosts_pages_their_backing_and_their_policy() {
        let reservation = experiment(InGuest::Reservation);
        let names: Vec<&str> = reservation.arms.iter().map(|arm| &*arm.name).collect();
        assert_eq!(names[2..], ["guest never", "guest reservation", "guest auto", "guest hugetlb"]);
        let hugetlb = experiment(InGuest::Hugetlb);
        assert_eq!(hugetlb.arms.len(), 5, "hugetlb is there once");
        for (command, policy) in commands(&reservation).iter().zip(["never", "reservation", "auto", "never"]) {
            assert!(command.contains("npb.cg") && command.contains(&format!("\"{policy}\"")), "{command}");
            assert!(!command.contains("--native"), "{command}");
        }
        for (command, backing) in commands(&reservation).iter().zip(["anon", "memfd", "anon", "hugetlb"]) {
            assert!(command.contains(&format!("\"--backing\", \"{backing}\"")), "{command}");
        }
        let both = commands(&experiment_of(&[InGuest::Hugetlb, InGuest::Thp]));
        let is_thp = |command: &String| command.contains("\"anon\", \"--host-page\", \"2m\", \"--policy\", \"never\"");
        assert_eq!(both.iter().map(is_thp).collect::<Vec<_>>(), [false, false, true, false], "{both:?}");
        let [short, long] = ["CG A", "CG B"].map(|name| cells(program(name), &[InGuest::AtFault], 1, &host()));
        assert!(short.iter().all(|cell| matches!(cell, Cell::Job(_))), "{short:?}");
        assert_eq!(long, absent(&[InGuest::AtFault], &Cell::Absent("only with --long: a run takes about 32 s".into())));
    }

    #[test]
    fn a_guest_that_saves_otherwise_than_the_process_is_named_first() {
        let results = results_of(experiment(InGuest::AtFault), |_, arm, round| {
            let seconds = match arm {
                "base" | "guest never" => 10.0,
                "huge" | "guest at-fault" => 8.0,
                "guest auto" => 9.0,
                _ => 8.1,
            };
            Some((Metric::Seconds, seconds + f64::from(round) / 1000.0))
        });
        let rows = [Published { case: "CG B".into(), saved_percent: Some(45.9) }];
        let section = section(&results, &[InGuest::AtFault], PROCESS, &rows);
        let row = &section.tables[0].rows[0];
        assert_eq!(row[..2], ["CG B", "45.90"]);
        let saves = row[2..].iter().map(|text| text.split_once(" % (").map(|(median, _)| median));
        assert_eq!(saves.collect::<Vec<_>>(), [Some("20.0"), Some("20.0"), Some("10.0"), Some("19.0")]);
        let [far, near, _] = &section.paragraphs[..] else { panic!("{:?}", section.paragraphs) };
        assert!(far.contains("CG B, guest auto (-10.0 points)") && !far.contains("at-fault"), "{far}");
        assert!(near.contains("CG B, guest at-fault (0.0 points)") && near.contains("hugetlb (-1.0 points)"), "{near}");
    }
}
