//! What page tables take at the end of the timed part of a run: those of the process with a guest's RAM, and KVM's. A
//! promotion shows as the difference between an arm on base pages and a promoted one.
//!
//! ```text
//!   RAM on base pages     process ▪▪▪▪▪▪▪▪   KVM ▪▪▪▪▪▪▪▪      4 KiB for each window of 2 MiB
//!   promoted              process ▪▪▪▪▪▪▪▪   KVM ▪             the kernel keeps a table for the day of a split
//! ```

use crate::report::{Column, Grid, Section, common_sections};
use crate::results::Results;
use wideleaf_measure::statistics::median;

/// Name under which a run tells the bytes of its process's page tables at the end of its timed part.
pub const PROCESS_TABLES: &str = "process_tables_bytes";
/// Name under which a guest's run tells the bytes of the second-level tables of the whole host at that time.
pub const SECOND_LEVEL_TABLES: &str = "second_level_tables_of_host_bytes";

/// Pages of the guest, each of which has a case of each program.
const GUEST_PAGES: [&str; 3] = ["4k", "2m", "1g"];

const MEANING: &str = "Of a guest's process (VmPTE), and of KVM for all guests of the host (SecPageTables): the kernel \
    has no number for one guest. Medians at the end of the timed part. KVM gives the table of a window back when it \
    maps the window large; the process keeps its own, which the kernel sets aside for a split of the huge page.";

/// A table of each program; `None` if no run tells its tables.
pub(super) fn section(results: &Results, programs: &[&str], arms: &[&str]) -> Option<Section> {
    let tables: Vec<Grid> = programs.iter().filter_map(|program| of_program(results, program, arms)).collect();
    (!tables.is_empty()).then(|| Section {
        title: "Memory of the page tables".into(),
        paragraphs: vec![MEANING.into()],
        tables,
        plots: vec![],
    })
}

fn of_program(results: &Results, program: &str, arms: &[&str]) -> Option<Grid> {
    let cell = |guest: &str, arm: &str| {
        let kib = |name| {
            let told = results.told(&format!("{program}, guest {guest}"), arm, name);
            let bytes: Vec<f64> = told.into_iter().map(|(_, bytes)| bytes).collect();
            (!bytes.is_empty()).then(|| common_sections::decimals(median(bytes) / 1024.0, 0))
        };
        let [process, second_level] = [kib(PROCESS_TABLES), kib(SECOND_LEVEL_TABLES)];
        match (&process, &second_level) {
            (None, None) => None,
            _ => Some([process, second_level].map(|kib| kib.unwrap_or_else(|| "-".into())).join(" | ")),
        }
    };
    let rows = GUEST_PAGES.map(|guest| (guest, arms.iter().map(|arm| cell(guest, arm)).collect::<Vec<_>>()));
    rows.iter().any(|(_, cells)| cells.iter().any(Option::is_some)).then(|| Grid {
        caption: format!("{program}: page tables of the process | of KVM, in KiB"),
        columns: std::iter::once(Column::text("page of the guest or process"))
            .chain(arms.iter().map(|arm| Column::number(*arm)))
            .collect(),
        rows: rows
            .into_iter()
            .map(|(guest, cells)| {
                let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".into()));
                std::iter::once(guest.to_owned()).chain(cells).collect()
            })
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::catalogue::fixture::results_of;
    use crate::definition::HostFacts;
    use crate::metric::Metric;
    use crate::results::RunOutcome;

    #[test]
    fn page_tables_are_shown_for_each_arm_that_tells_them_and_a_process_has_none_of_kvm() {
        let evidence = by_name("evidence").expect("it is in the list");
        let mut results = results_of(evidence.define(&HostFacts::of_a_test()), |_, _, _| Some((Metric::Figure, 1.0)));
        let (program, arms) = ("GUPS 2^25", ["native", "host 4k", "promoted"]);
        assert_eq!(section(&results, &[program], &arms), None);
        for run in results.runs.iter_mut().filter(|run| run.case == "GUPS 2^25, guest 2m") {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let told = match run.arm.as_str() {
                "native" => vec![(PROCESS_TABLES, 700.0)],
                "host 4k" => vec![(PROCESS_TABLES, 856.0), (SECOND_LEVEL_TABLES, 784.0)],
                "promoted" => vec![(PROCESS_TABLES, 864.0), (SECOND_LEVEL_TABLES, 16.0)],
                _ => continue,
            };
            measured.told.extend(told.into_iter().map(|(name, kib)| (name.to_owned(), kib * 1024.0)));
        }
        let shown = section(&results, &[program, "CG A"], &arms).expect("one program tells them");
        let [table] = &shown.tables[..] else { panic!("{shown:?}") };
        assert_eq!(table.rows[0], ["4k", "-", "-", "-"]);
        assert_eq!(table.rows[1], ["2m", "700 | -", "856 | 784", "864 | 16"]);
        let titles: Vec<String> = evidence.sections(&results).into_iter().map(|section| section.title).collect();
        assert!(titles.contains(&shown.title), "{titles:?}");
    }
}
