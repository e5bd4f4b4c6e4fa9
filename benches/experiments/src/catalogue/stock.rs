//! `stock`: QEMU guests on a host as it is, with Linux's THP and khugepaged, beside the same guests with a wideleafd,
//! after events that take huge pages from them.
//!
//! ```text
//!   clean memory:      start │ saved and restored │ postcopy │ dirty log          one guest each
//!   memory in pieces:  start │ hog ends │ restored beside a hog │ ten guests
//! ```

use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job, KhugepagedSettings, Work};
use crate::disturbance::{DisturbedGuests, Event, PromotionOwner};
use crate::peers::{Guest, QEMU, QemuRam};
use crate::report::Section;
use crate::results::Results;
use std::time::Duration;

mod comparison;
mod tables;

/// The `stock` experiment of the catalogue.
pub struct Stock;

const ROUNDS: u32 = 6;
/// Time limit without `--rounds` and `--budget`.
const BUDGET: Duration = Duration::from_secs(30 * 60);

/// Arm of the host as it is.
const THP: &str = "THP";
/// Arm of the same with a wideleafd.
const WIDELEAFD: &str = "wideleafd";

/// What an arm is made of.
struct ArmSettings {
    name: &'static str,
    summary: &'static str,
    ram: QemuRam,
    keeper: PromotionOwner,
    khugepaged: KhugepagedSettings,
}

const WAYS: [ArmSettings; 5] = [
    ArmSettings {
        name: THP,
        summary: "QEMU as libvirt starts it: MADV_HUGEPAGE on all RAM, khugepaged at Linux's defaults",
        ram: QemuRam::Thp,
        keeper: PromotionOwner::Kernel,
        khugepaged: KhugepagedSettings::DEFAULTS,
    },
    ArmSettings {
        name: WIDELEAFD,
        summary: "as THP, and a wideleafd with its defaults that has each guest attached",
        ram: QemuRam::Thp,
        keeper: PromotionOwner::Daemon,
        khugepaged: KhugepagedSettings::DEFAULTS,
    },
    ArmSettings {
        name: "hugetlb",
        summary: "QEMU on pages of the hugetlb pool, allocated before the guest runs",
        ram: QemuRam::Hugetlb,
        keeper: PromotionOwner::Kernel,
        khugepaged: KhugepagedSettings::DEFAULTS,
    },
    ArmSettings {
        name: NO_THP,
        summary: "as THP, but QEMU is denied huge pages (PR_SET_THP_DISABLE): what they are worth",
        ram: QemuRam::Thp,
        keeper: PromotionOwner::KernelWithoutHugePages,
        khugepaged: KhugepagedSettings::DEFAULTS,
    },
    ArmSettings {
        name: TUNED,
        summary: "as THP, khugepaged without pause: it uses most of a CPU for as long as it runs",
        ram: QemuRam::Thp,
        keeper: PromotionOwner::Kernel,
        khugepaged: KhugepagedSettings::FASTEST,
    },
];
const NO_THP: &str = "no THP";
const TUNED: &str = "THP, tuned";

/// A case: an event and the memory of the host.
struct Situation {
    name: &'static str,
    event: Event,
    is_in_pieces: bool,
    guests: u32,
}

/// Free blocks of 2 MiB in memory that is in pieces. They suffice for one guest, so that one state of the host serves
/// all cases in pieces: it takes up to a minute to make.
const BLOCKS_LEFT: u64 = 128;
/// Blocks that a hog takes for a while: all of them, and those that other processes may have freed.
const HOG_TAKES: u64 = BLOCKS_LEFT + 32;
/// Blocks that a hog takes for good: it leaves 32 blocks, half of the hot set.
const HOG_KEEPS: u64 = BLOCKS_LEFT - 32;

/// Cases in pieces come last, so that memory is broken up once a round.
const SITUATIONS: [Situation; 8] = [
    situation("start", Event::Start, false, 1),
    situation("saved and restored", Event::Restore, false, 1),
    situation("postcopy", Event::Postcopy, false, 1),
    situation("dirty log", Event::DirtyLog, false, 1),
    situation("in pieces", Event::StartBesideHog { hog_pages_2m: HOG_KEEPS }, true, 1),
    situation("in pieces, hog ends", Event::HogEnds { hog_pages_2m: HOG_TAKES }, true, 1),
    situation("in pieces, restored", Event::RestoreBesideHog { hog_pages_2m: HOG_TAKES }, true, 1),
    situation("in pieces, ten guests", Event::Start, true, 10),
];

const fn situation(name: &'static str, event: Event, is_in_pieces: bool, guests: u32) -> Situation {
    Situation { name, event, is_in_pieces, guests }
}

/// Length of the timed part in seconds of the guest's clock.
const TIMED_S: u64 = 7;
/// The same for a restore beside a hog, which ends some seconds later than other events.
const TIMED_BESIDE_HOG_S: u64 = 9;
/// The same for ten guests: the first works until the last has worked for some seconds, each of which starts in 0.7 s.
const TIMED_OF_TEN_S: u64 = 14;
/// The same with `--long`: khugepaged at its defaults takes 10 s for each 16 MiB.
const TIMED_LONG_S: u64 = 150;
/// Time of a run beyond the timed part, guessed: start, event, and the guest's check of its memory.
const BESIDE_TIMED_S: f64 = 3.5;
/// The same for ten guests.
const BESIDE_TIMED_OF_TEN_S: f64 = 10.0;
/// Share of a run in the time that breaking up memory takes in each round, guessed, in seconds.
const BREAKING_S: f64 = 8.0;

/// RAM of a lone guest in MiB: a table of 128 MiB, 16 MiB of which one page in each window is used, and the image.
const LONE_MIB: u64 = 192;
/// RAM of one of ten guests in MiB: a table of 32 MiB.
const OF_TEN_MIB: u64 = 64;

impl Catalogued for Stock {
    fn name(&self) -> &'static str {
        "stock"
    }

    fn summary(&self) -> &'static str {
        "QEMU guests on a host as it is (THP, khugepaged) and with wideleafd, after events that cost huge pages"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let case = |situation: &Situation| Case {
            name: situation.name.into(),
            unit: "GUP/s".into(),
            working_set_mib: situation.memory_mib(),
            cells: WAYS.iter().map(|way| situation.cell(way, host)).collect(),
        };
        Experiment {
            name: self.name().into(),
            title: "Guests of QEMU on a host as it is".into(),
            question: "Why wideleafd, instead of THP and nothing?".into(),
            source: None,
            rounds: ROUNDS,
            arms: WAYS.iter().map(|way| Arm { name: way.name.into(), summary: way.summary.into() }).collect(),
            cases: SITUATIONS.iter().map(case).collect(),
        }
    }

    fn budget(&self) -> Option<Duration> {
        Some(BUDGET)
    }

    fn figure(&self) -> &'static str {
        "the guests' speed after the event"
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

impl Situation {
    /// RAM of all QEMUs at one time. A migration has two.
    fn memory_mib(&self) -> u64 {
        let copies = if self.event == Event::Postcopy { 2 } else { 1 };
        copies * u64::from(self.guests) * self.guest(TIMED_S).memory_mib
    }

    fn timed_s(&self, host: &HostFacts) -> u64 {
        match self.guests {
            _ if host.wants_long_runs => TIMED_LONG_S,
            1 if matches!(self.event, Event::RestoreBesideHog { .. }) => TIMED_BESIDE_HOG_S,
            1 => TIMED_S,
            _ => TIMED_OF_TEN_S,
        }
    }

    fn guest(&self, seconds: u64) -> Guest {
        // A line on the console takes the guest some ms: each character is an exit to QEMU.
        let line = |table: &str| format!("{table} seconds={seconds} progress_ms=250");
        match self.guests {
            1 => Guest::new("gups", &line("log2_words=24 sparse=16M"), LONE_MIB),
            _ => Guest::new("gups", &line("log2_words=22"), OF_TEN_MIB),
        }
    }

    fn cell(&self, way: &ArmSettings, host: &HostFacts) -> Cell {
        if let Some(why) = self.why_not(way, host) {
            return Cell::Absent(why);
        }
        let seconds = self.timed_s(host);
        let work = DisturbedGuests {
            guest: self.guest(seconds),
            count: self.guests,
            ram: way.ram,
            keeper: way.keeper,
            event: self.event,
        };
        let beside = if self.guests == 1 { BESIDE_TIMED_S } else { BESIDE_TIMED_OF_TEN_S };
        let beside = beside + if self.is_in_pieces { BREAKING_S } else { 0.0 };
        let job = Job::of(Work::Disturbed(work), seconds as f64 + beside).with_khugepaged(way.khugepaged);
        let job = if self.is_in_pieces { job.with_huge_pages_left(BLOCKS_LEFT) } else { job };
        let pages = if way.ram == QemuRam::Hugetlb { self.memory_mib().div_ceil(2) } else { 0 };
        Cell::of(job.with_pool(pages))
    }

    fn why_not(&self, way: &ArmSettings, host: &HostFacts) -> Option<String> {
        let is = |is_so: bool, why: &str| is_so.then(|| why.to_owned());
        let is_pool = way.ram == QemuRam::Hugetlb;
        (host.why_no_kvm.clone())
            .or_else(|| is(!host.is_root, "needs root, to change khugepaged's settings and to attach"))
            .or_else(|| is(!host.has_qemu, &format!("{QEMU} is not installed")))
            .or_else(|| {
                let is_missing = way.keeper == PromotionOwner::Daemon && !host.has_daemon;
                is(is_missing, "wideleafd is not in the directory of this program: build or install it")
            })
            .or_else(|| host.why_no_pool_2m.clone().filter(|_| is_pool))
            .or_else(|| is(is_pool && self.is_in_pieces, "a pool cannot grow in memory that is in pieces"))
            .or_else(|| {
                let is_repeated = way.name == NO_THP && self.event != Event::Start;
                is(is_repeated || way.name == NO_THP && self.is_in_pieces, "without huge pages, no event takes any")
            })
            .or_else(|| {
                let is_repeated = is_pool && matches!(self.event, Event::Restore | Event::DirtyLog);
                let is_long = is_repeated || way.name == TUNED;
                is(is_long && !host.wants_long_runs, "left out for time; `--long` runs it")
            })
    }
}

/// Situations and settings that are not in the experiment, with the reasons.
const LEFT_OUT: [(&str, &str); 6] = [
    (
        "THP `always`",
        "QEMU advises MADV_HUGEPAGE for all guest RAM, so that `madvise` and `always` treat it alike; only other \
         processes would change, and the setting is the whole host's",
    ),
    (
        "a balloon cycle",
        "the image's driver of the balloon belongs to a kernel that gives its own pages and takes them back, with no \
         other work to measure",
    ),
    (
        "`virsh migrate` to itself",
        "libvirt refuses a migration to its own host, and QEMU's target of a precopy fills its RAM as a restore does",
    ),
    ("DAMON's `ethp` scheme", "needs a kernel with DAMON for virtual addresses, which only the labs have"),
    ("a Linux guest", "an emulated lab says nothing about speed"),
    (
        "the time of khugepaged at its defaults",
        "takes minutes for one guest, so that only a lower bound is known; `--long` waits for it",
    ),
];

#[cfg(test)]
mod tests {
    use super::super::fixture::host;
    use super::*;
    use crate::schedule;

    #[test]
    fn every_situation_runs_in_both_main_arms_with_the_same_guest() {
        let experiment = Stock.define(&host());
        assert_eq!([0, 1].map(|arm| experiment.arms[arm].name.as_str()), [THP, WIDELEAFD]);
        for (case, situation) in SITUATIONS.iter().enumerate() {
            let of = |arm: usize| match &experiment.job(case, arm).expect("both run").work {
                Work::Disturbed(guests) => guests.clone(),
                other => panic!("{other:?}"),
            };
            let (thp, ours) = (of(0), of(1));
            assert_eq!(ours, DisturbedGuests { keeper: PromotionOwner::Daemon, ..thp }, "{}", situation.name);
        }
    }

    #[test]
    fn the_default_fits_its_time_and_breaks_memory_up_once_a_round() {
        let experiment = Stock.define(&host());
        let turns = schedule::turns(&experiment);
        assert!(schedule::expected_of_all(&experiment, &[], &turns) <= BUDGET);
        let first: Vec<_> = turns.iter().filter(|turn| turn.round == 1).collect();
        let is_in_pieces = first.iter().map(|turn| {
            experiment.job(turn.case, turn.arm).expect("a turn has a job").host.huge_pages_left == Some(BLOCKS_LEFT)
        });
        let mut states: Vec<bool> = is_in_pieces.collect();
        states.dedup();
        assert_eq!(states, [false, true]);
    }

    #[test]
    fn a_cell_that_the_host_cannot_run_has_its_reason() {
        let absent = |host: &HostFacts, case: usize, arm: usize| match &Stock.define(host).cases[case].cells[arm] {
            Cell::Absent(why) => why.clone(),
            Cell::Job(_) => String::new(),
        };
        let without_daemon = HostFacts { has_daemon: false, ..host() };
        assert!(absent(&without_daemon, 0, 1).contains("wideleafd is not"));
        assert_eq!(absent(&without_daemon, 0, 0), "");
        assert!(absent(&host(), 4, 2).contains("in pieces"));
        assert!(absent(&host(), 2, 3).contains("without huge pages"));
        assert!(absent(&host(), 0, 4).contains("--long") && absent(&host(), 3, 2).contains("--long"));
        let long = HostFacts { wants_long_runs: true, ..host() };
        assert_eq!([absent(&long, 0, 4), absent(&long, 3, 2)], ["", ""]);
        assert_eq!(schedule::turns(&Stock.define(&HostFacts { is_root: false, ..host() })), []);
    }

    #[test]
    fn the_pool_has_a_page_for_each_2_mib_of_both_sides_of_a_migration() {
        let experiment = Stock.define(&host());
        let pages = |case: usize| experiment.job(case, 2).expect("it runs").host.pool_pages_2m;
        assert_eq!([pages(0), pages(2)], [96, 192]);
    }
}
