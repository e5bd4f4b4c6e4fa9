//! `scarce`: guests on a host with fewer huge pages than their hot sets need, after cold data took all of them. Does
//! the manager put huge pages where they save most, and does every guest keep its speed?
//!
//! ```text
//!   each guest   cold set: filled, read for a while │ hot set: filled ─▶ updated at random, which is the figure
//!   the host     blocks of 2 MiB for half of the sum of the hot sets ─▶ the cold sets have them when the figure begins
//!
//!   best placement   those blocks on the hot sets of half of the guests, from their first touch on
//! ```

use crate::catalogue::Catalogued;
use crate::definition::{
    Arm, BudgetOf, Case, Cell, Experiment, GuestAmongOthers, GuestInQemu, HostFacts, Job, KhugepagedSettings, Work,
};
use crate::peers::{Guest, QEMU};
use crate::report::Section;
use crate::results::Results;
use std::time::Duration;

mod comparison;
mod tables;

/// The `scarce` experiment of the catalogue.
pub struct Scarce;

const ROUNDS: u32 = 6;
/// Time limit without `--rounds` and `--budget`.
const BUDGET: Duration = Duration::from_secs(20 * 60);

/// Size of each guest's hot set, and of the cold set that was hot before it, in MiB. It is so large that the tables of
/// its base pages do not stay in the caches either: GUPS on a table of this size has 1.3 of its speed on huge pages
/// (`evidence`, shadow paging).
const SET_MIB: u64 = 256;
/// RAM of each guest in MiB: both sets, the guest image, and what the image leaves free.
const GUEST_MIB: u64 = 2 * SET_MIB + 64;
/// Time for which a guest reads its cold set in milliseconds: a manager then has seen that it is hot.
const COLD_MS: u64 = 1500;
/// Minimum duration of the updates in milliseconds, in whole passes.
const HOT_MS: u64 = 7000;
/// Guessed duration of a run in seconds: start, both fills, both parts, the check of all words.
const SECONDS_GUESS: f64 = 11.0;
/// Share of a run in the time that breaking up memory takes in each round, guessed, in seconds.
const BREAKING_S: f64 = 2.0;

/// Number of guests where each has a CPU, and smallest number of CPUs for which that is so.
const GUESTS: u64 = 4;
/// Number of guests on a smaller host. Four vCPUs and their managers would take turns on two CPUs, and a figure would
/// be that of the scheduler.
const GUESTS_ON_FEW_CPUS: u64 = 2;

/// Memory that the host keeps available beside the guests in MiB: breaking up memory refuses to begin with less than 2
/// GiB and takes 256 MiB for a moment.
const BESIDE_GUESTS_MIB: u64 = 3 * 1024;

const NEVER: &str = "never";
const GREEDY: &str = "greedy";
const AUTO: &str = "auto";
/// The arm that is judged.
const ONE_HOST: &str = "auto, one host";
const HOST_THP: &str = "host THP, tuned";
const COVERAGE: &str = "coverage";
const UTILIZATION: &str = "utilization";
const QEMU_THP: &str = "QEMU THP";
const BEST: &str = "best placement";

/// Arms: name, description, options of each guest, owner of the budget. [`BEST`] has options for each guest, and
/// [`QEMU_THP`] runs no `wideleaf run`.
const ARMS: [(&str, &str, &[&str], BudgetOf); 9] = [
    (NEVER, "base pages only", &["--policy", "never"], BudgetOf::Each),
    (GREEDY, "greedy in each guest, each with its own budget", &["--policy", "greedy"], BudgetOf::Each),
    (AUTO, "auto in each guest, each with its own budget", &["--policy", "auto"], BudgetOf::Each),
    (
        ONE_HOST,
        "auto in each guest, all registered with one wideleafd, which decides for the host",
        &["--policy", "auto"],
        BudgetOf::All,
    ),
    (
        HOST_THP,
        "no manager; MADV_HUGEPAGE on all RAM, khugepaged without a pause; its CPU counts as the managers'",
        &["--host-page", "2m", "--policy", "never"],
        BudgetOf::Each,
    ),
    (COVERAGE, "most accessed windows first, as HawkEye; in each guest", &["--policy", "coverage"], BudgetOf::Each),
    (UTILIZATION, "nearly full windows, as Ingens; in each guest", &["--policy", "utilization"], BudgetOf::Each),
    (
        QEMU_THP,
        "QEMU's microvm with the same image on memory-backend-ram, khugepaged at Linux's defaults",
        &[],
        BudgetOf::Each,
    ),
    (
        BEST,
        "no manager's choice: half of the guests touch their hot set first, at-fault, and have all huge pages there \
         from the start; the other guests have base pages. A lone guest has them on half of its hot set",
        &[],
        BudgetOf::Each,
    ),
];

/// Arms that are left out for time.
const WITH_LONG: [&str; 3] = [COVERAGE, UTILIZATION, QEMU_THP];

/// Kernel parameters that fill the cold set first, as in all arms but [`BEST`].
const COLD_FIRST: &str = "cold";
/// Kernel parameters that fill the hot set first.
const HOT_FIRST: &str = "hot";

/// Sets of the guests, by the names that their kernel gives them.
const HOT: &str = "hot_range";
const COLD: &str = "cold";

/// Name of a case with as many huge pages as the guests can use.
const PLENTY: &str = "plenty";
/// Name of the case with one guest.
const ONE_GUEST: &str = "one guest";

/// A case: its guests, and the huge pages of the host.
struct Situation {
    name: &'static str,
    guests: u64,
    /// Blocks of 2 MiB that are left whole; `None` for memory as it is.
    blocks_left: Option<u64>,
    /// Number of these that a hog takes.
    hog: u64,
}

impl Situation {
    /// All situations. Those in pieces have the same state of the host, so that memory is broken up once a round.
    fn all(host: &HostFacts) -> [Situation; 3] {
        let guests = guests(host);
        let needed = blocks_for_half(guests);
        let name = if guests == GUESTS { "four guests" } else { "two guests" };
        let hog = needed - blocks_for_half(1);
        [
            Situation { name, guests, blocks_left: Some(needed), hog: 0 },
            Situation { name: ONE_GUEST, guests: 1, blocks_left: Some(needed), hog },
            Situation { name: PLENTY, guests, blocks_left: None, hog: 0 },
        ]
    }

    fn memory_mib(&self) -> u64 {
        self.guests * GUEST_MIB
    }

    fn case(&self, host: &HostFacts) -> Case {
        Case {
            name: self.name.into(),
            unit: "updates/s".into(),
            working_set_mib: self.memory_mib(),
            cells: ARMS.iter().map(|(arm, _, options, budget)| self.cell(arm, options, *budget, host)).collect(),
        }
    }

    fn cell(&self, arm: &str, options: &[&str], budget: BudgetOf, host: &HostFacts) -> Cell {
        if let Some(why) = self.why_not(arm, budget, host) {
            return Cell::Absent(why);
        }
        let numbers = 0..self.guests;
        let work = match arm {
            QEMU_THP => Work::TogetherInQemu { guests: numbers.map(guest_in_qemu).collect() },
            _ => Work::Together { guests: numbers.map(|number| self.guest(number, arm, options)).collect(), budget },
        };
        let beside = if self.blocks_left.is_some() { BREAKING_S } else { 0.0 };
        let job = Job::of(work, SECONDS_GUESS + beside).beside_hog(self.hog);
        let job = match arm {
            HOST_THP => job.with_khugepaged(KhugepagedSettings::FASTEST),
            QEMU_THP => job.with_khugepaged(KhugepagedSettings::DEFAULTS),
            _ => job,
        };
        Cell::of(match self.blocks_left {
            Some(left) => job.with_huge_pages_left(left),
            None => job,
        })
    }

    fn guest(&self, number: u64, arm: &str, options: &[&str]) -> GuestAmongOthers {
        let is_chosen = number < self.guests.div_ceil(2);
        let (first, options) = match (arm, is_chosen) {
            (BEST, true) => (HOT_FIRST, &["--policy", "at-fault"][..]),
            (BEST, false) => (COLD_FIRST, &["--policy", "never"][..]),
            _ => (COLD_FIRST, options),
        };
        let more = options.iter().map(|word| (*word).to_owned());
        GuestAmongOthers {
            name: name(number),
            is_judged: true,
            arguments: phases(first).arguments().into_iter().chain(more).collect(),
        }
    }

    fn why_not(&self, arm: &str, budget: BudgetOf, host: &HostFacts) -> Option<String> {
        let is = |is_so: bool, why: &str| is_so.then(|| why.to_owned());
        let is_scarce = self.blocks_left.is_some();
        let wanted_mib = self.memory_mib() + BESIDE_GUESTS_MIB;
        let available_mib = host.memory_available_mib;
        (host.why_no_kvm.clone())
            .or_else(|| is(is_scarce && !host.is_root, "needs root, to hold that many pages in pipes"))
            .or_else(|| {
                let changes_khugepaged = [HOST_THP, QEMU_THP].contains(&arm);
                is(changes_khugepaged && !host.is_root, "needs root, to change khugepaged's settings")
            })
            .or_else(|| (arm == QEMU_THP && !host.has_qemu).then(|| format!("{QEMU} is not installed")))
            .or_else(|| {
                let is_missing = budget == BudgetOf::All && !host.has_daemon;
                is(is_missing, "wideleafd is not in the directory of this program: build or install it")
            })
            .or_else(|| {
                let why = format!("needs {wanted_mib} MiB of available memory; this host has {available_mib} MiB");
                (available_mib < wanted_mib).then_some(why)
            })
            .or_else(|| {
                let is_left_out = WITH_LONG.contains(&arm) && !host.wants_long_runs;
                is(is_left_out, "left out for time; `--long` runs it")
            })
            .or_else(|| is(!is_scarce && arm == BEST, "where huge pages suffice, there is nothing to place"))
            .or_else(|| {
                let is_asked = is_scarce || host.wants_long_runs || [NEVER, AUTO, ONE_HOST].contains(&arm);
                is(!is_asked, "only auto is asked whether a guest loses where huge pages suffice; `--long` runs it")
            })
    }
}

/// Number of guests that run at the same time.
fn guests(host: &HostFacts) -> u64 {
    if u64::from(host.cpus) >= GUESTS { GUESTS } else { GUESTS_ON_FEW_CPUS }
}

/// Blocks of 2 MiB for half of the hot sets of this number of guests.
const fn blocks_for_half(guests: u64) -> u64 {
    guests * SET_MIB / 2 / 2
}

fn name(number: u64) -> String {
    format!("guest {}", number + 1)
}

/// The guest of all arms, with the set that is filled first.
fn phases(first: &str) -> Guest {
    Guest::new("phases", &parameters(first), GUEST_MIB)
}

fn guest_in_qemu(number: u64) -> GuestInQemu {
    GuestInQemu { name: name(number), guest: phases(COLD_FIRST) }
}

/// Parameters of the kernel, with the set that is filled first.
fn parameters(first: &str) -> String {
    format!(
        "hot={SET_MIB}M range={SET_MIB}M sparse=0 cold={SET_MIB}M constant=0 cold_ms={COLD_MS} first={first} phases=1 \
         phase_ms={HOT_MS}"
    )
}

impl Catalogued for Scarce {
    fn name(&self) -> &'static str {
        "scarce"
    }

    fn summary(&self) -> &'static str {
        "cold data of guests took the host's last huge pages: do these go where they save most, does a guest lose"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Scarce huge pages".into(),
            question: "Where huge pages are scarce, does the manager put them where they save most, and does every \
             guest keep its speed?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: ARMS.map(|(name, summary, ..)| Arm { name: name.into(), summary: summary.into() }).to_vec(),
            cases: Situation::all(host).iter().map(|situation| situation.case(host)).collect(),
        }
    }

    fn budget(&self) -> Option<Duration> {
        Some(BUDGET)
    }

    fn figure(&self) -> &'static str {
        "the total speed of all guests"
    }

    fn has_all_figures(&self) -> bool {
        true
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        comparison::lead(results)
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        tables::sections(results)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{host, results_of};
    use super::*;
    use crate::each_guest::{self, OfGuest};
    use crate::metric::Metric;
    use crate::results::RunOutcome;
    use crate::schedule;

    /// Results with a figure of each guest by case, arm and guest.
    pub(super) fn made_up(figure: impl Fn(&str, &str, &str) -> f64) -> Results {
        let experiment = Scarce.define(&host());
        let mut results = results_of(experiment, |_, _, _| Some((Metric::Figure, 0.0)));
        for run in &mut results.runs {
            let case = results.experiment.cases.iter().find(|case| case.name == run.case).expect("a case");
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let guests = each_guest::names(case).into_iter();
            let figures: Vec<(String, f64)> =
                guests.map(|guest| (guest.clone(), figure(&run.case, &run.arm, &guest))).collect();
            measured.metrics.insert(Metric::Figure, figures.iter().map(|(_, figure)| figure).sum());
            measured.told = figures.into_iter().map(|(guest, figure)| (OfGuest::Figure.name(&guest), figure)).collect();
        }
        results
    }

    fn large_host() -> HostFacts {
        HostFacts { cpus: 16, memory_available_mib: 64 << 10, ..host() }
    }

    fn why_absent(host: &HostFacts, case: usize, arm: &str) -> String {
        let arm = ARMS.iter().position(|(name, ..)| *name == arm).expect("an arm");
        match &Scarce.define(host).cases[case].cells[arm] {
            Cell::Absent(why) => why.clone(),
            Cell::Job(_) => String::new(),
        }
    }

    fn guests_in(host: &HostFacts, case: usize, arm: &str) -> Vec<GuestAmongOthers> {
        let arm = ARMS.iter().position(|(name, ..)| *name == arm).expect("an arm");
        match Scarce.define(host).job(case, arm).expect("it runs").work.clone() {
            Work::Together { guests, .. } => guests,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_rounds_fit_the_time_and_break_memory_up_once_a_round() {
        for host in [host(), large_host()] {
            let experiment = Scarce.define(&host);
            let turns = schedule::turns(&experiment);
            assert!(schedule::expected_of_all(&experiment, &[], &turns) <= BUDGET);
            let left = turns
                .iter()
                .filter(|turn| turn.round == 1)
                .map(|turn| experiment.job(turn.case, turn.arm).expect("a turn has a job").host.huge_pages_left);
            let mut left: Vec<Option<u64>> = left.collect();
            left.dedup();
            assert_eq!(left, [Some(blocks_for_half(guests(&host))), None]);
        }
    }

    #[test]
    fn four_guests_run_where_each_has_a_cpu_and_two_elsewhere() {
        let names = |host: &HostFacts| {
            let cases = Scarce.define(host).cases;
            cases.iter().map(|case| (case.name.clone(), each_guest::names(case).len())).collect::<Vec<_>>()
        };
        let expected = |several: &str, count| {
            [(several, count), (ONE_GUEST, 1), (PLENTY, count)].map(|(name, count)| (name.to_owned(), count))
        };
        assert_eq!(names(&host()), expected("two guests", 2));
        assert_eq!(names(&large_host()), expected("four guests", 4));
        assert_eq!(names(&HostFacts { cpus: 3, ..host() }), expected("two guests", 2));
    }

    #[test]
    fn huge_pages_are_left_for_half_of_the_hot_sets_and_a_hog_takes_those_of_the_missing_guests() {
        for (host, count) in [(host(), 2), (large_host(), 4)] {
            let experiment = Scarce.define(&host);
            let state = |case: usize| experiment.job(case, 0).expect("it runs").host.clone();
            let blocks = |case: usize| state(case).huge_pages_left.map(|left| left - state(case).hog_pages_2m);
            // 128 MiB, half of 256 MiB, in pages of 2 MiB.
            assert_eq!([0, 1, 2].map(blocks), [Some(count * 64), Some(64), None]);
        }
    }

    #[test]
    fn guests_differ_between_arms_by_their_policy_alone_except_for_the_best_placement() {
        for host in [host(), large_host()].map(|host| HostFacts { wants_long_runs: true, ..host }) {
            for case in 0..2 {
                let program = |guest: GuestAmongOthers| guest.arguments[..5].join(" ");
                let never: Vec<String> = guests_in(&host, case, NEVER).into_iter().map(program).collect();
                for (arm, ..) in ARMS.iter().filter(|(arm, ..)| ![BEST, QEMU_THP].contains(arm)) {
                    let of_arm: Vec<String> = guests_in(&host, case, arm).into_iter().map(program).collect();
                    assert_eq!(of_arm, never, "{arm}");
                }
                let best = guests_in(&host, case, BEST);
                let hot_first = best.iter().filter(|guest| guest.arguments[4].contains("first=hot")).count();
                let at_fault = best.iter().filter(|guest| guest.arguments.ends_with(&["at-fault".to_owned()])).count();
                assert_eq!((hot_first, at_fault), (best.len().div_ceil(2), best.len().div_ceil(2)));
                // All other parameters are the same.
                let replaced = |guest: GuestAmongOthers| program(guest).replace("first=hot", "first=cold");
                assert_eq!(best.into_iter().map(replaced).collect::<Vec<_>>(), never);
                let arm = ARMS.iter().position(|(arm, ..)| *arm == QEMU_THP).expect("an arm");
                let experiment = Scarce.define(&host);
                let Work::TogetherInQemu { guests } = &experiment.job(case, arm).expect("it runs").work else {
                    panic!("guests of QEMU")
                };
                let in_qemu: Vec<String> = guests.iter().map(|of| of.guest.arguments().join(" ")).collect();
                assert_eq!(in_qemu, never, "the same kernel, parameters and memory");
                let names: Vec<&str> = guests.iter().map(|of| &*of.name).collect();
                assert_eq!(names, each_guest::names(&experiment.cases[case]));
            }
        }
    }

    #[test]
    fn a_cell_that_the_host_cannot_run_has_its_reason() {
        let long = HostFacts { wants_long_runs: true, ..host() };
        for (arm, ..) in ARMS {
            assert_eq!([0, 1].map(|case| why_absent(&long, case, arm)), ["", ""], "{arm}");
            let is_left_out = [0, 1].map(|case| why_absent(&host(), case, arm).contains("--long"));
            assert_eq!(is_left_out, [WITH_LONG.contains(&arm); 2], "{arm}");
        }
        let user = HostFacts { is_root: false, ..host() };
        assert!(why_absent(&user, 0, NEVER).contains("needs root") && why_absent(&user, 2, NEVER).is_empty());
        let long_user = HostFacts { wants_long_runs: true, ..user };
        assert!(why_absent(&long_user, 2, HOST_THP).contains("khugepaged's settings"));
        let without_qemu = HostFacts { has_qemu: false, ..long.clone() };
        assert_eq!(why_absent(&without_qemu, 0, QEMU_THP), format!("{QEMU} is not installed"));
        let without_daemon = HostFacts { has_daemon: false, ..host() };
        assert!(why_absent(&without_daemon, 0, ONE_HOST).contains("wideleafd is not"));
        assert_eq!(why_absent(&without_daemon, 0, AUTO), "");
        let small = HostFacts { memory_available_mib: 4000, ..host() };
        assert!(why_absent(&small, 0, NEVER).contains("needs 4224 MiB") && why_absent(&small, 1, NEVER).is_empty());
        assert!(why_absent(&host(), 2, GREEDY).contains("--long"));
        assert_eq!(why_absent(&HostFacts { wants_long_runs: true, ..host() }, 2, GREEDY), "");
        assert!(why_absent(&host(), 2, BEST).contains("nothing to place"));
        let no_kvm = HostFacts { why_no_kvm: Some("no /dev/kvm".into()), ..host() };
        assert_eq!(schedule::turns(&Scarce.define(&no_kvm)), []);
    }
}
