//! `restore`: how long a restored guest takes until it runs at 99 % of its steady speed, beside what other VMMs do.
//!
//! ```text
//!             never saved │ moved │ in order │ 4k copies │ mapped │ QEMU         arms: one process each, in turn
//!   GUPS           ▲          └─────────┬───────────────────┘        └ its own file
//!   phases      speed to        one snapshot for all arms of a round, warm or cold
//!   CG          compare with
//! ```

use std::time::Duration;

use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job, Work};
use crate::peers::{Guest, QEMU};
use crate::report::Section;
use crate::restoring::{Cache, RestoredGuest, Way};
use crate::results::Results;

mod comparison;
#[cfg(test)]
mod fixture;
mod full_speed;
mod tables;

/// The `restore` experiment of the catalogue.
pub struct Restore;

const ROUNDS: u32 = 6;
/// Time limit without `--rounds` and `--budget`.
const BUDGET: Duration = Duration::from_secs(20 * 60);

/// Names of the arms.
const NEVER_SAVED: &str = "never saved";
const MOVED: &str = "moved";
const IN_ORDER: &str = "moved, in order";
const CACHED: &str = "moved, cached";
const COPIES: &str = "4k copies";
const MAPPED: &str = "mapped";
const IN_QEMU: &str = "QEMU";

/// Arms and their ways. Ratios are to the first.
const ARMS: [(Way, &str, &str); 7] = [
    (Way::NeverSaved, NEVER_SAVED, "wideleaf run, policy auto, from its start: the speed to compare with"),
    (Way::Moved, MOVED, "wideleaf run --restore: 2 MiB read into ready huge pages, moved in; by touch, then by heat"),
    (Way::MovedInOrder, IN_ORDER, "the same in the order of first touches that `--prefetch record` wrote before"),
    (Way::MovedCached, CACHED, "as `moved`, with --restore-reads cached: through the page cache, although it is cold"),
    (
        Way::CopiedByPage,
        COPIES,
        "--restore-pages 4k: userfaultfd, each page of 4 KiB copied alone, by touch and behind it",
    ),
    (
        Way::Mapped,
        MAPPED,
        "--restore-pages mapped: a private mapping of the file, writes copied by 4 KiB; no checksums, no manager",
    ),
    (Way::Qemu, IN_QEMU, "QEMU's microvm with the same image: saved by `migrate`, restored by `-incoming exec:cat`"),
];

/// A workload at one size of RAM.
struct Workload {
    name: &'static str,
    gib: u64,
    kernel: &'static str,
    cmdline: &'static str,
    phase: &'static str,
    hot: &'static [&'static str],
    /// Time for which a guest works in its phase before it is saved, in milliseconds: the manager knows its heat then.
    works_ms: u64,
    /// Time from its start to its save on a slow machine, in milliseconds.
    saved_within_ms: u64,
}

/// Hot sets of half or a quarter of RAM: a restore has to read them, and the whole of a class of CG.
const WORKLOADS: [Workload; 8] = [
    gups("GUPS 1 GiB", 1, "log2_words=26 seconds=3600"),
    phases("phases 1 GiB", 1, "hot=256M range=256M sparse=64M cold=128M constant=64M phases=1 phase_ms=3600000"),
    cg("CG B, 1 GiB", 1, "class=B", 9_000),
    gups("GUPS 4 GiB", 4, "log2_words=28 seconds=3600"),
    phases("phases 4 GiB", 4, "hot=1G range=1G sparse=256M cold=512M constant=256M phases=1 phase_ms=3600000"),
    cg("CG C, 4 GiB", 4, "class=C", 30_000),
    gups("GUPS 8 GiB", 8, "log2_words=29 seconds=3600"),
    phases("phases 8 GiB", 8, "hot=2G range=2G sparse=512M cold=1G constant=512M phases=1 phase_ms=3600000"),
];

/// Time for a guest to fill half of its RAM on base pages, in milliseconds for each GiB of RAM: some Xeons take more
/// than 4 s under shadow paging.
const FILLED_AFTER_MS: u64 = 7_000;

/// Time in its phase before a guest is saved, in milliseconds, where the phase does not end.
const WORKS_MS: u64 = 5_000;

const fn gups(name: &'static str, gib: u64, cmdline: &'static str) -> Workload {
    let saved_within_ms = FILLED_AFTER_MS * gib + WORKS_MS;
    Workload {
        name,
        gib,
        kernel: "gups",
        cmdline,
        phase: "update",
        hot: &["table"],
        works_ms: WORKS_MS,
        saved_within_ms,
    }
}

const fn phases(name: &'static str, gib: u64, cmdline: &'static str) -> Workload {
    let saved_within_ms = FILLED_AFTER_MS * gib + WORKS_MS;
    let hot = &["hot_range", "constant"];
    Workload { name, gib, kernel: "phases", cmdline, phase: "hot0", hot, works_ms: WORKS_MS, saved_within_ms }
}

/// The matrix is made before the timed part, which takes most of the time before the save. The timed part ends: on a
/// fast machine a class B that was saved 9 s after its start had not 8 s left.
const fn cg(name: &'static str, gib: u64, cmdline: &'static str, saved_within_ms: u64) -> Workload {
    let (kernel, phase, hot, works_ms) = ("npb.cg", "compute", &["matrix"], 1_000);
    Workload { name, gib, kernel, cmdline, phase, hot, works_ms, saved_within_ms }
}

/// Interval of progress marks in milliseconds: the resolution of T99. A mark is one exit of the guest.
const MARKS_MS: u64 = 20;
/// The same in QEMU, where a mark takes some ms: each character is an exit.
const MARKS_IN_QEMU_MS: u64 = 100;

/// Memory of the host beside two copies of a guest's RAM: of the guest, and of its file in the page cache.
const BESIDE_MIB: u64 = 2 << 10;

/// Time of a run beside what it watches, guessed, in seconds.
const BESIDE_S: f64 = 1.5;

impl Catalogued for Restore {
    fn name(&self) -> &'static str {
        "restore"
    }

    fn summary(&self) -> &'static str {
        "how soon a restored guest is at full speed: huge pages moved in, 4 KiB copies, a mapped file, QEMU"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Restored guests, until they are at full speed".into(),
            question: "How long does a restored guest take until it runs at 99 % of its steady speed?".into(),
            source: None,
            rounds: ROUNDS,
            arms: ARMS
                .iter()
                .map(|(_, name, summary)| Arm { name: (*name).into(), summary: (*summary).into() })
                .collect(),
            cases: WORKLOADS.iter().flat_map(|workload| workload.cases(host)).collect(),
        }
    }

    fn budget(&self) -> Option<Duration> {
        Some(BUDGET)
    }

    fn figure(&self) -> &'static str {
        "the guest's steady speed"
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

impl Workload {
    /// Cold after warm, so that both use one snapshot. Larger sizes only with `--long`.
    fn cases(&self, host: &HostFacts) -> Vec<Case> {
        if self.gib > 1 && !host.wants_long_runs {
            return Vec::new();
        }
        let case = |(cache, word)| Case {
            name: format!("{}, {word}", self.name),
            unit: if self.kernel == "npb.cg" { "gradients/s" } else { "updates/s" }.into(),
            working_set_mib: self.gib << 10,
            cells: ARMS.iter().map(|(way, ..)| self.cell(*way, cache, host)).collect(),
        };
        [(Cache::Warm, "warm"), (Cache::Cold, "cold")].map(case).into()
    }

    fn cell(&self, way: Way, cache: Cache, host: &HostFacts) -> Cell {
        if let Some(why) = self.why_not(way, cache, host) {
            return Cell::Absent(why);
        }
        let restored = RestoredGuest {
            guest: self.guest(way),
            phase: self.phase.into(),
            hot: self.hot.iter().map(|name| (*name).into()).collect(),
            way,
            cache,
            works_ms: self.works_ms,
            saved_within_ms: self.saved_within_ms,
            watched_ms: self.watched_ms(way),
        };
        let seconds = restored.watched_ms as f64 / 1e3 + BESIDE_S + self.share_of_save_s(way);
        Cell::of(Job::of(Work::Restored(restored), seconds))
    }

    fn guest(&self, way: Way) -> Guest {
        let marks = if way == Way::Qemu { MARKS_IN_QEMU_MS } else { MARKS_MS };
        Guest::new(self.kernel, &format!("{} progress_ms={marks}", self.cmdline), self.gib << 10)
    }

    /// At least three times what the way was seen to take, so that the last half of it is steady.
    fn watched_ms(&self, way: Way) -> u64 {
        match way {
            // From its start, with what it does before its phase.
            Way::NeverSaved => self.saved_within_ms + 1_000,
            Way::Moved | Way::MovedInOrder | Way::MovedCached => 2_000 + 1_500 * self.gib,
            // A fault for each page of 4 KiB.
            Way::CopiedByPage | Way::Mapped => 2_000 + 6_000 * self.gib,
            Way::Qemu => 3_000 + 2_500 * self.gib,
        }
    }

    /// Part of the save, which the first run of a snapshot makes for all, in the time of each of two cases.
    fn share_of_save_s(&self, way: Way) -> f64 {
        let save = (self.saved_within_ms as f64 / 1e3 + self.gib as f64) / 2.0;
        match way {
            Way::Moved | Way::Qemu => save,
            // The run that records.
            Way::MovedInOrder => (self.watched_ms(way) as f64 / 1e3 + BESIDE_S) / 2.0,
            Way::NeverSaved | Way::MovedCached | Way::CopiedByPage | Way::Mapped => 0.0,
        }
    }

    fn why_not(&self, way: Way, cache: Cache, host: &HostFacts) -> Option<String> {
        let needed = 2 * (self.gib << 10) + BESIDE_MIB;
        let is = |is_so: bool, why: String| is_so.then_some(why);
        let is_as_moved = way == Way::MovedCached && cache == Cache::Warm;
        (host.why_no_kvm.clone())
            .or_else(|| is(!host.is_root, "needs root, to look at the guest's pages".into()))
            .or_else(|| is(is_as_moved, "`moved` reads through the page cache too".into()))
            .or_else(|| is(way == Way::Qemu && !host.has_qemu, format!("{QEMU} is not installed")))
            .or_else(|| is(host.memory_available_mib < needed, format!("needs {needed} MiB of available memory")))
    }
}

/// What is not in the experiment, with the reasons.
const LEFT_OUT: [(&str, &str); 5] = [
    (
        "copies of 4 KiB without a background",
        "answer touches alone, and so take longer than `4k copies`, which is the stronger comparison",
    ),
    (
        "the pause at a limited dirty rate",
        "these guests write their memory as fast as they can: the pause of their save is told, and no target for it",
    ),
    (
        "the guests' own verification",
        "takes as long as their work; tests restore and check every word. `mapped` compares no checksum",
    ),
    ("CG at 8 GiB", "its largest class needs 0.5 GiB, and is restored at 4 GiB as it would be at 8 GiB"),
    ("postcopy, khugepaged tuned", "are in `stock`"),
];

#[cfg(test)]
mod tests {
    use super::super::fixture::host;
    use super::*;
    use crate::schedule;

    fn work(experiment: &Experiment, case: usize, arm: usize) -> RestoredGuest {
        match &experiment.job(case, arm).expect("it runs").work {
            Work::Restored(of) => of.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn three_rounds_fit_the_default_time_and_larger_guests_are_asked_for() {
        let experiment = Restore.define(&host());
        let names: Vec<&str> = experiment.cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), 6);
        assert!(names.iter().all(|name| name.contains("1 GiB")), "{names:?}");
        let a_round = schedule::expected_of_all(&experiment, &[], &schedule::turns(&experiment)) / ROUNDS;
        assert!(3 * a_round <= BUDGET, "a round takes {a_round:?}");
        let long = Restore.define(&HostFacts { wants_long_runs: true, ..host() });
        assert_eq!(long.cases.len(), 2 * WORKLOADS.len());
    }

    #[test]
    fn warm_and_cold_cases_have_the_same_guest_so_that_they_use_one_snapshot() {
        let experiment = Restore.define(&host());
        let arms = (0..ARMS.len()).filter(|arm| ARMS[*arm].1 != CACHED); // it has cold cases alone
        for arm in arms {
            for case in [0, 2, 4] {
                let (warm, cold) = (work(&experiment, case, arm), work(&experiment, case + 1, arm));
                assert_eq!(cold, RestoredGuest { cache: Cache::Cold, ..warm });
            }
        }
        let guests = [1, 2, 3, 4, 5].map(|arm| work(&experiment, 1, arm).guest);
        assert!(guests.iter().all(|guest| *guest == guests[0]), "all ways of ours restore the same snapshot");
    }

    #[test]
    fn a_guest_that_does_not_fit_or_has_no_qemu_is_absent_with_the_reason() {
        let absent = |host: &HostFacts, case: usize, arm: usize| match &Restore.define(host).cases[case].cells[arm] {
            Cell::Absent(why) => why.clone(),
            Cell::Job(_) => String::new(),
        };
        let small = HostFacts { memory_available_mib: 4 << 10, wants_long_runs: true, ..host() };
        assert_eq!(absent(&small, 0, 1), "");
        assert_eq!(absent(&small, 6, 1), "needs 10240 MiB of available memory");
        assert!(absent(&HostFacts { has_qemu: false, ..host() }, 0, 6).contains("is not installed"));
        assert_eq!(schedule::turns(&Restore.define(&HostFacts { is_root: false, ..host() })), []);
    }
}
