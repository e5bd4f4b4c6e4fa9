//! Cost of a page walk, for several reports: from the CPU's counters, and from a pointer chase over 2 MiB pages.
//!
//! ```text
//!   timed part of a run ─▶ cycles, walks, cycles of walks, those of the second level ─▶ ratios within a run ─▶ median
//! ```

use crate::definition::{COUNTED_WALK_CYCLES, COUNTED_WALKS, HostFacts};
use crate::report::common_sections;
use crate::results::Results;
use wideleaf_measure::statistics::median;

/// Name of the figure of a run that has the cycles of its timed part, if the CPU counted walks in that part.
pub const COUNTED_CYCLES: &str = "counted_cycles";
/// Name of the figure of a run that has the cycles of walks in the second level's tables.
pub const COUNTED_SECOND_LEVEL_CYCLES: &str = "counted_second_level_walk_cycles";

/// Option of a run that counts walks in its timed part.
pub(super) const COUNT: &str = "--count-walks";

/// One figure of a run divided by another, as the median over the runs of an arm; `None` if no run has both.
pub(super) fn ratio(results: &Results, case: &str, arm: &str, [number, to]: [&str; 2]) -> Option<f64> {
    let bases = results.told(case, arm, to);
    let base = |round: u32| bases.iter().find(|(of, base)| *of == round && *base > 0.0).map(|(_, base)| *base);
    let numbers = results.told(case, arm, number).into_iter();
    let ratios: Vec<f64> = numbers.filter_map(|(round, number)| Some(number / base(round)?)).collect();
    (!ratios.is_empty()).then(|| median(ratios))
}

/// Walks and their cycles relative to the other number, and the second level's share of these cycles, as a cell; `None`
/// if no walks were counted.
pub(super) fn cell(results: &Results, case: &str, arm: &str, to: &str, scale: f64) -> Option<String> {
    let relative = |name: &str| Some(common_sections::number(ratio(results, case, arm, [name, to])? * scale));
    let walks = relative(COUNTED_WALKS)?;
    let cycles = relative(COUNTED_WALK_CYCLES).unwrap_or_else(|| "-".into());
    let share = ratio(results, case, arm, [COUNTED_SECOND_LEVEL_CYCLES, COUNTED_WALK_CYCLES]);
    let share = share.map_or_else(|| "-".into(), |share| format!("{:.1} %", 100.0 * share));
    Some(format!("{walks} | {cycles} | {share}"))
}

/// Meaning of the last two parts of such a cell.
pub(super) const MEANING: &str = "Cycles are those of each page-miss handler. The host's share of them is counted on \
    Skylake-SP, Cascade Lake and client CPUs from Skylake to Comet Lake alone, and includes walks for instructions. A \
    \"-\" stands for a number that the CPU does not count.";

/// Memory of a chase that misses all levels of the TLB on 2 MiB pages, with what a guest has beside it. No known TLB
/// holds more than 6 GiB.
const CHASE_2M_MIB: u64 = 10 << 10;

/// Options of `tlbcost` for a chase on 2 MiB entries, or the reason why this host has too little memory for one. The
/// footprint is larger than the TLB: a chase inside the TLB causes no walk. Under shadow paging, which walks one
/// table, it is the default: the large one takes minutes that are better spent on rounds.
pub(super) fn chase_2m(host: &HostFacts) -> Result<&'static [&'static str], String> {
    if host.paging == "shadow" {
        return Ok(&[]);
    }
    let available = host.memory_available_mib;
    if available < CHASE_2M_MIB {
        return Err(format!(
            "a chase over more 2 MiB pages than a TLB holds needs {CHASE_2M_MIB} MiB: this host has {available} MiB \
             available"
        ));
    }
    Ok(&["--bytes", "8G"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};
    use crate::definition::{Arm, Case, Cell, Experiment, Job};
    use crate::metric::Metric;
    use crate::results::RunOutcome;

    #[test]
    fn a_ratio_is_of_the_same_run_and_its_median_that_of_all_runs() {
        let (case, arm) = ("GUPS", "guest");
        let cells = vec![Cell::of(Job::run(&["gups"], 1.0))];
        let (name, unit) = (case.to_owned(), "GUP/s".to_owned());
        let experiment = Experiment {
            name: "e".into(),
            title: "E".into(),
            question: String::new(),
            source: None,
            rounds: 3,
            arms: Arm::all(&[(arm, "")]),
            cases: vec![Case { name, unit, working_set_mib: 1, cells }],
        };
        let mut results = results_of(experiment, |_, _, _| Some((Metric::Figure, 1.0)));
        assert_eq!((ratio(&results, case, arm, ["a", "b"]), cell(&results, case, arm, "b", 1.0)), (None, None));
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let round = f64::from(run.round);
            let told = [("a", 10.0 * round * round), ("b", round), ("none", 0.0)];
            measured.told.extend(told.map(|(name, value)| (name.to_owned(), value)));
        }
        assert_eq!(ratio(&results, case, arm, ["a", "b"]), Some(20.0));
        assert_eq!(ratio(&results, case, arm, ["a", "none"]), None, "nothing is relative to zero");
    }

    #[test]
    fn a_chase_on_2_mib_pages_is_larger_than_any_tlb_or_is_not_made() {
        assert_eq!(chase_2m(&host()), Ok(&["--bytes", "8G"][..]));
        assert_eq!(chase_2m(&HostFacts { paging: "shadow".into(), ..host() }), Ok(&[][..]), "one table is walked");
        let why = chase_2m(&HostFacts { memory_available_mib: 8_000, ..host() }).expect_err("too little memory");
        assert!(why.contains("needs 10240 MiB: this host has 8000 MiB available"), "{why}");
    }
}
