//! Hand-made results for tests: two cases, three arms (one absent), a failed run, lines over time, a map.

use std::collections::BTreeMap;

use crate::definition::{Arm, Case, Cell, Experiment, Job};
use crate::metric::Metric;
use crate::results::{Actions, Environment, FORMAT, MapColumn, Measured, MemoryMap, Results, Run, RunOutcome, Sample};

/// Number of rounds of each job.
const ROUNDS: u32 = 7;
/// Number of windows in the map: 512 MiB.
const WINDOWS: usize = 256;

/// The results. `auto` is 1.5 times as fast as `base`, within one percent.
pub(crate) fn results() -> Results {
    let experiment = experiment();
    let mut runs = Vec::new();
    for round in 1..=ROUNDS {
        for case in &experiment.cases {
            for arm in ["base", "auto"] {
                runs.push(run(&case.name, arm, round));
            }
        }
    }
    runs[5].outcome = RunOutcome::Failed("the guest found 3 wrong words or results".into());
    Results {
        wideleaf_experiment: FORMAT,
        experiment,
        environment: Environment { paging: "shadow".into(), cpus: 2, is_virtual: true, ..Environment::default() },
        started: "2026-01-02T03:04:05Z".into(),
        ended: "2026-01-02T03:24:05Z".into(),
        elapsed_s: 1200.0,
        is_complete: true,
        runs,
    }
}

fn experiment() -> Experiment {
    let arm = |name: &str, summary: &str| Arm { name: name.into(), summary: summary.into() };
    let case = |name: &str| Case {
        name: name.into(),
        unit: "Mop/s".into(),
        working_set_mib: 640,
        cells: vec![
            Cell::of(Job::run(&["npb.cg", "--policy", "never"], 3.0)),
            Cell::of(Job::run(&["npb.cg", "--policy", "auto"], 3.0).with_map()),
            Cell::Absent("no free page of 1 GiB".into()),
        ],
    };
    Experiment {
        name: "made-by-hand".into(),
        title: "Made by hand".into(),
        question: "Is auto faster than base & by how much?".into(),
        source: None,
        rounds: ROUNDS,
        arms: vec![arm("base", "base pages"), arm("auto", "promoted"), arm("hugetlb-1g", "giant pages")],
        cases: vec![case("CG A"), case("IS <A>")],
    }
}

fn run(case: &str, arm: &str, round: u32) -> Run {
    let is_auto = arm == "auto";
    // The order differs from that of the rounds, and is the same for both arms within one percent.
    let of_round = 10.0 + f64::from(round * 3 % ROUNDS);
    let figure = if is_auto { of_round * (1.5 + f64::from(round % 3) * 0.005) } else { of_round };
    let metrics = BTreeMap::from([
        (Metric::Figure, figure),
        (Metric::Seconds, 100.0 / figure),
        (Metric::ResidentMib, if is_auto { 530.0 } else { 520.0 }),
        (Metric::CoveragePercent, if is_auto { 98.0 } else { 0.0 }),
        (Metric::BloatMib, 0.0),
    ]);
    let measured = Measured {
        metrics,
        series: series(is_auto, figure),
        map: (is_auto && round == 1).then(map),
        actions: if is_auto { actions(round) } else { BTreeMap::new() },
        notes: vec![],
        ..Measured::default()
    };
    let at_s = f64::from(round) * 10.0;
    let outcome = RunOutcome::Measured(measured);
    Run { case: case.into(), arm: arm.into(), round, at_s, took_s: 4.0, load_1m: 0.5, outcome }
}

fn series(is_auto: bool, figure: f64) -> Vec<Sample> {
    let sample = |step: u32| {
        let part = if is_auto { (f64::from(step) / 20.0).min(1.0) } else { 0.0 };
        let speed = figure * 1e6 * (0.7 + 0.3 * part) * (1.0 + f64::from(step % 4) * 0.01);
        Sample {
            at_s: f64::from(step) * 0.1 - 0.2,
            base_mib: 512.0 * (1.0 - part),
            huge_mib: 512.0 * part,
            giant_mib: 0.0,
            rate_per_s: (step > 2).then_some(speed),
        }
    };
    (0..50).map(sample).collect()
}

fn actions(round: u32) -> BTreeMap<String, Actions> {
    let recorded = |value: f64| (round == 1).then_some(value);
    let actions = |count, cpu_ms, longest_us| Actions {
        count,
        cpu_ms: recorded(cpu_ms),
        unavailable_max_us: recorded(longest_us),
    };
    BTreeMap::from([
        ("collapse.done".into(), actions(250, 160.0, 1900.0)),
        ("collapse.refused_busy".into(), actions(3, 0.4, 12.0)),
    ])
}

/// Heat is highest in the middle, and promotion spreads from there. The last eighth is never touched; the guest's own
/// 4 KiB tables are in the first.
fn map() -> MemoryMap {
    let column = |step: usize| {
        let large = |window: usize| window.abs_diff(WINDOWS / 2) < step * 5;
        let letter = |window: usize| match window {
            window if window >= WINDOWS * 7 / 8 => '.',
            window if large(window) => '2',
            _ => '4',
        };
        let backing: String = (0..WINDOWS).map(letter).collect();
        let second_level: String =
            backing.chars().enumerate().map(|(window, c)| if window < 32 && c == '2' { '4' } else { c }).collect();
        let heat = |window: usize| match window {
            window if window >= WINDOWS * 7 / 8 => ' ',
            window => char::from(b'0' + (9 - (window.abs_diff(WINDOWS / 2) / 14).min(9)) as u8),
        };
        let pages_2m = second_level.bytes().filter(|letter| *letter == b'2').count() as u64;
        MapColumn {
            at_s: step as f64 * 0.12,
            heat: (0..WINDOWS).map(heat).collect(),
            kvm_pages: Some([0, pages_2m.saturating_sub(2), 0]),
            backing,
            second_level,
        }
    };
    MemoryMap { first_window: 0, columns: (0..40).map(column).collect() }
}
