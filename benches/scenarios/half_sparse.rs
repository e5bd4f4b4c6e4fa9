//! Policies on a guest with one hot half and one hardly used half: GUPS over the first, one base page of each window
//! of the second. Huge pages everywhere are fastest and waste nearly the whole sparse half. Base pages everywhere
//! waste nothing. A policy that observes the guest should achieve both.
//!
//! ```text
//!   guest RAM   [ table, 2^n words, updated at random ][ ▪    ▪    ▪    ▪    sparse    ▪    ▪ ]
//!
//!   hugetlb  ██████████████████████████  ██████████████████████████   pool pages from the start
//!   thp      ██████████████████████████  ██████████████████████████   MADV_HUGEPAGE from the start, no manager
//!   greedy   ██████████████████████████  ██████████████████████████   base pages at first, promoted
//!   auto     ██████████████████████████  ▪    ▪    ▪    ▪    ▪    ▪   base pages at first, promoted where it pays
//!   never    ░░░░░░░░░░░░░░░░░░░░░░░░░░  ▪    ▪    ▪    ▪    ▪    ▪   base pages
//! ```
//!
//! The guests run on the same machine and take turns of a quarter of a second after promotion is over. Managers
//! continue with all their sensors, also while their guest is paused. Resident memory is the host backing of all
//! guest RAM after the turns.
//!
//! `cargo bench -p wideleaf-benches --bench half_sparse [-- LOG2_WORDS SETS]` (default 26, which is guests of 1 GiB,
//! and 3; needs KVM and the right to lease hugetlb pages)

use std::process::ExitCode;
use std::time::Duration;

use wideleaf_benches::coverage::{NEARLY_ALL, host_backing_of_all, host_coverage};
use wideleaf_benches::guest::{Guest, GuestSetup, take_turns};
use wideleaf_benches::managed::{Managed, policy};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};

/// Maximum number of turns in a set, if the guests have enough work.
const TURNS_MAX: u32 = 16;
/// Duration of a turn, as in `interleaved`.
const SLICE: Duration = Duration::from_millis(250);
/// Memory for the image and its tables, beyond the two halves.
const BESIDE_HALVES: Bytes = mib(16);
/// Words that a guest updates in all rounds together: enough for all turns.
const WORDS_UPDATED: u64 = 3 << 26;
/// Additional updated words while the bench waits for the guest's promotion.
const WORDS_UPDATED_BEFORE: u64 = 5 << 26;
/// Time limit for the promotion of the hot half.
const PROMOTION_MAX: Duration = Duration::from_secs(60);
/// Time without further promotions after which promotion of the sparse half is over, if there is any: two of
/// the manager's longest ticks.
const QUIET: Duration = Duration::from_secs(2);
/// Interval between two checks.
const PACE: Duration = Duration::from_millis(100);

/// Targets: nearly the speed of huge pages from the start, nearly the memory of base pages.
const SPEED_MIN: f64 = 0.98;
const RESIDENT_MAX: f64 = 1.02;

/// An arm: initial backing of the guest's RAM, and its policy.
struct Arm {
    name: &'static str,
    kind: BackingKind,
    page: PageSize,
    policy: Option<&'static str>,
}

const ARMS: [Arm; 5] = [
    Arm { name: "hugetlb", kind: BackingKind::Hugetlb, page: PageSize::Huge2M, policy: None },
    Arm { name: "thp", kind: BackingKind::Anon, page: PageSize::Huge2M, policy: None },
    Arm { name: "greedy", kind: BackingKind::Anon, page: PageSize::Base4K, policy: Some("greedy") },
    Arm { name: "auto", kind: BackingKind::Anon, page: PageSize::Base4K, policy: Some("auto") },
    Arm { name: "never", kind: BackingKind::Anon, page: PageSize::Base4K, policy: Some("never") },
];
const HUGETLB: usize = 0;
const AUTO: usize = 3;
const NEVER: usize = 4;

/// A guest of an arm, with its manager if it has one. The manager ends first, because it acts on the guest's RAM.
struct ManagedGuest {
    managed: Option<Managed>,
    guest: Guest,
}

impl ManagedGuest {
    /// Starts a guest, waits until it updates and its promotion is over, and leaves it paused.
    fn prepare(arm: &Arm, log2_words: u32, waiting: &Waiting) -> Result<ManagedGuest, ScenarioError> {
        let half = half(log2_words);
        let is_promoted = matches!(arm.policy, Some("greedy" | "auto"));
        let words = WORDS_UPDATED + if is_promoted { WORDS_UPDATED_BEFORE } else { 0 };
        let setup = GuestSetup {
            memory: memory(log2_words),
            backing: BackingConfig::new(arm.kind, arm.page).expect("a backing with this page size"),
            cmdline: format!(
                "kernel=gups log2_words={log2_words} sparse={} rounds={} progress_ms=50",
                half.get(),
                (words >> log2_words).max(1)
            ),
            slot_bytes: None,
        };
        warm_host_memory(setup.memory).expect("memory to warm");
        let guest = Guest::start(&setup);
        guest.updates_begin(waiting)?;
        let managed = arm.policy.map(|name| Managed::start(&guest, policy(name)));
        let player = ManagedGuest { managed, guest };
        if is_promoted {
            player.promotion_is_over(waiting)?;
        }
        player.guest.pause();
        Ok(player)
    }

    fn promotion_is_over(&self, waiting: &Waiting) -> Result<(), ScenarioError> {
        let table = self.guest.region("table");
        let is_large = || host_coverage(self.guest.ram(), table) >= NEARLY_ALL;
        waiting.until("promotion of the table", PROMOTION_MAX, PACE, is_large)?;
        loop {
            let before = self.backing();
            waiting.pass(QUIET)?;
            if self.backing() == before {
                return Ok(());
            }
        }
    }

    fn backing(&self) -> HostBacking {
        let look = || host_backing_of_all(self.guest.ram());
        self.managed.as_ref().map_or_else(look, |managed| managed.with_all_in_place(look))
    }

    /// Ends the manager and lets the guest run to its end.
    fn retire(self) -> Guest {
        self.managed.map(Managed::stop);
        self.guest.resume();
        self.guest
    }
}

fn half(log2_words: u32) -> Bytes {
    Bytes::new(8 << log2_words)
}

fn memory(log2_words: u32) -> Bytes {
    half(log2_words) * 2 + BESIDE_HALVES
}

/// Results of a set of guests.
struct Set {
    /// Rates in each turn in which all guests had work.
    turns: Vec<Vec<f64>>,
    /// Host backing, by arm.
    backings: Vec<HostBacking>,
}

fn run_set(log2_words: u32, waiting: &Waiting) -> Result<Set, ScenarioError> {
    let players =
        ARMS.iter().map(|arm| ManagedGuest::prepare(arm, log2_words, waiting)).collect::<Result<Vec<_>, _>>()?;
    let guests: Vec<&Guest> = players.iter().map(|player| &player.guest).collect();
    let turns = take_turns(&guests, TURNS_MAX, SLICE, waiting)?;
    let backings = players.iter().map(ManagedGuest::backing).collect();
    let guests: Vec<Guest> = players.into_iter().map(ManagedGuest::retire).collect();
    guests.into_iter().try_for_each(|guest| guest.finish(waiting))?;
    Ok(Set { turns, backings })
}

fn in_mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / mib(1).get() as f64
}

/// Median over the sets, in MiB.
fn over_sets(sets: &[Set], of: impl Fn(&[HostBacking]) -> Bytes) -> f64 {
    median(sets.iter().map(|set| in_mib(of(&set.backings))).collect())
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (log2_words, sets) = (arguments.number(0, 26)?, arguments.count(1, 3)?);
    needs_kvm()?;
    let pages = memory(log2_words).pages(PageSize::Huge2M);
    let lease = HugetlbPools::of_this_machine().lease(PageSize::Huge2M, pages);
    let _lease = lease.map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let sets = (0..sets).map(|_| run_set(log2_words, waiting)).collect::<Result<Vec<_>, _>>()?;
    if sets.iter().all(|set| set.turns.is_empty()) {
        return Err(ScenarioError::Skipped(
            "the guests ended their updates before the first turn: use a larger table".into(),
        ));
    }
    Ok(figures(log2_words, &sets))
}

fn figures(log2_words: u32, sets: &[Set]) -> Figures {
    let turns: Vec<Vec<Vec<f64>>> = sets.iter().map(|set| set.turns.clone()).collect();
    let set_count = turns.iter().filter(|set| !set.is_empty()).count();
    let spread_columns =
        [vec!["updates"], columns(": hugetlb", set_count), vec!["resident", "on 2m", "bloat"]].concat();
    let mut rows = Table::new(["arm"], spread_columns);
    let resident = |arm: usize| over_sets(sets, |backings| backings[arm].resident());
    for (index, arm) in ARMS.iter().enumerate() {
        let rates = turns.iter().flatten().map(|turn| turn[index] / 1e6).collect();
        let mut cells = vec![arm.name.into(), Cell::number(median(rates), 2, "M/s")];
        cells.extend(SpreadMedian::ratio_within_turns(&turns, index, HUGETLB).cells(3, ""));
        cells.extend([
            Cell::number(resident(index), 1, "MiB"),
            Cell::number(over_sets(sets, |backings| backings[index].huge_2m), 0, "MiB"),
            Cell::number(resident(index) - resident(NEVER), 1, "MiB"),
        ]);
        rows.row(cells);
    }
    let count: usize = turns.iter().map(Vec::len).sum();
    let (slice_ms, spread) = (SLICE.as_millis(), spread_in_words(set_count));
    Figures::of(format!("GUPS over {} of {} of RAM, the rest sparse", half(log2_words), memory(log2_words)))
        .table(rows)
        .note(format!(
            "medians of {count} turns of {slice_ms} ms in {set_count} sets of guests, {spread}; all memory verified"
        ))
        .bars(bars(sets, &turns))
}

fn bars(sets: &[Set], turns: &[Vec<Vec<f64>>]) -> [Bar; 2] {
    let resident = |set: &Set, arm: usize| in_mib(set.backings[arm].resident());
    let grown: Vec<f64> = sets.iter().map(|set| resident(set, AUTO) / resident(set, NEVER)).collect();
    let speed = SpreadMedian::ratio_within_turns(turns, AUTO, HUGETLB);
    [
        speed.bar("auto : hugetlb", 3, "", Limit::AtLeast(SPEED_MIN)),
        SpreadMedian::of(&grown).bar("resident auto : never", 3, "", Limit::AtMost(RESIDENT_MAX)),
    ]
}

fn main() -> ExitCode {
    scenario::run("half_sparse", experiment)
}
