//! Promoted pages compared with base pages and with huge pages from the start, on a machine with a speed that changes
//! from second to second. Three guests run on the same machine and take turns of a quarter of a second.
//!
//! ```text
//!   base      ██······██······██······   4 KiB pages, never promoted
//!   promoted  ··██······██······██····   4 KiB pages, collapsed while it ran
//!   hugetlb   ····██······██······██··   2 MiB pages of the pool
//!             └ turn ┘                   rates within a turn are compared; the other guests are paused
//! ```
//!
//! A rate is updates per second of the guest's clock between the first and the last progress line within a slice, so
//! it includes neither a pause nor the switch. Each set has new guests, because memory differs as well. This is not a
//! criterion bench: pairs count, not single times.
//!
//! `cargo bench -p wideleaf-benches --bench interleaved [-- LOG2_WORDS]` (default 25; needs KVM and the right
//! to lease hugetlb pages)

use std::process::ExitCode;
use std::time::Duration;

use wideleaf_benches::guest::{Guest, GuestSetup, take_turns};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::spread_median::{SpreadMedian, columns, spread_in_words};
use wideleaf_measure::figures::{Figures, Limit};
use wideleaf_measure::table::Table;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, OutcomeResult, PageSize, Skip};

/// Number of sets, each with new guests and new memory.
const SETS: usize = 7;
/// Maximum number of turns in a set, if the guests have enough work.
const TURNS_MAX: u32 = 16;
/// Duration of a turn: long enough for at least three progress lines, short enough that the machine is the
/// same for three turns.
const SLICE: Duration = Duration::from_millis(250);
/// Words that a guest updates in all rounds together. HPCC's updates are repeated for smaller tables, so that there
/// is work for all turns.
const WORDS_UPDATED: u64 = 3 << 25;
/// Maximum number of attempts to collapse a window.
const COLLAPSE_TRIES_MAX: usize = 20;

/// Target: as good as huge pages from the start, but for the 2 % that count as equal in reports.
const SPEED_MIN: f64 = 0.98;

/// An arm: initial backing of the guest's RAM, and whether it is promoted.
struct Arm {
    name: &'static str,
    kind: BackingKind,
    page: PageSize,
    is_promoted: bool,
}

const ARMS: [Arm; 3] = [
    Arm { name: "base", kind: BackingKind::Anon, page: PageSize::Base4K, is_promoted: false },
    Arm { name: "promoted", kind: BackingKind::Anon, page: PageSize::Base4K, is_promoted: true },
    Arm { name: "hugetlb", kind: BackingKind::Hugetlb, page: PageSize::Huge2M, is_promoted: false },
];
const BASE: usize = 0;
const PROMOTED: usize = 1;
const HUGETLB: usize = 2;

/// Starts a guest, lets it fill its table and begin to update, promotes it if the arm says so, and leaves it paused.
fn prepare(arm: &Arm, log2_words: u32, waiting: &Waiting) -> Result<Guest, ScenarioError> {
    let rounds = (WORDS_UPDATED >> log2_words).max(1);
    let setup = GuestSetup {
        memory: memory(log2_words),
        backing: BackingConfig::new(arm.kind, arm.page).expect("a backing with this page size"),
        cmdline: format!("kernel=gups log2_words={log2_words} rounds={rounds} progress_ms=50"),
        slot_bytes: None,
    };
    warm_host_memory(setup.memory).expect("memory to warm");
    let guest = Guest::start(&setup);
    guest.updates_begin(waiting)?;
    if arm.is_promoted {
        promote(guest.ram());
    }
    guest.pause();
    Ok(guest)
}

/// Collapses all resident windows while the guest runs, like the manager.
fn promote(ram: &GuestRam) {
    let host = LinuxHost::open().expect("/proc is mounted");
    for range in ram.ranges() {
        for window in range.gpa.windows() {
            let is_over = (0..COLLAPSE_TRIES_MAX).any(|_| {
                let result = collapse_window(&host, *range, window).result;
                matches!(result, OutcomeResult::Done | OutcomeResult::Skipped(Skip::NotResident | Skip::AlreadyDone))
            });
            assert!(is_over, "{window:?} cannot be collapsed: the machine is short of huge pages");
        }
    }
}

/// RAM for the table and for the rest of the guest.
fn memory(log2_words: u32) -> Bytes {
    Bytes::new(8 << log2_words) + mib(256)
}

/// Rates in each turn in which all guests had work.
fn run_set(log2_words: u32, waiting: &Waiting) -> Result<Vec<Vec<f64>>, ScenarioError> {
    let guests = ARMS.iter().map(|arm| prepare(arm, log2_words, waiting)).collect::<Result<Vec<_>, _>>()?;
    let in_turn: Vec<&Guest> = guests.iter().collect();
    let turns = take_turns(&in_turn, TURNS_MAX, SLICE, waiting)?;
    in_turn.iter().for_each(|guest| guest.resume());
    guests.into_iter().try_for_each(|guest| guest.finish(waiting))?;
    Ok(turns)
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let log2_words = arguments.number(0, 25)?;
    needs_kvm()?;
    let pages = memory(log2_words).pages(PageSize::Huge2M);
    let lease = HugetlbPools::of_this_machine().lease(PageSize::Huge2M, pages);
    let _lease = lease.map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let sets = (0..SETS).map(|_| run_set(log2_words, waiting)).collect::<Result<Vec<_>, _>>()?;
    if sets.iter().all(Vec::is_empty) {
        return Err(ScenarioError::Skipped(
            "the guests ended their updates before the first turn: use a larger table".into(),
        ));
    }
    Ok(figures(log2_words, &sets))
}

fn figures(log2_words: u32, sets: &[Vec<Vec<f64>>]) -> Figures {
    let turns: usize = sets.iter().map(Vec::len).sum();
    let set_count = sets.iter().filter(|set| !set.is_empty()).count();
    let mut rates = Table::new(["arm"], columns("updates", set_count));
    for (index, arm) in ARMS.iter().enumerate() {
        let of_arm: Vec<Vec<f64>> = sets.iter().map(|set| set.iter().map(|turn| turn[index] / 1e6).collect()).collect();
        rates.row([vec![arm.name.into()], SpreadMedian::of_sets(&of_arm).cells(2, "M/s")].concat());
    }
    let mut ratios = Table::new(["ratio within a turn"], columns("speed", set_count));
    for (a, b) in [(PROMOTED, BASE), (PROMOTED, HUGETLB), (HUGETLB, BASE)] {
        let name = format!("{} : {}", ARMS[a].name, ARMS[b].name);
        ratios.row([vec![name.into()], SpreadMedian::ratio_within_turns(sets, a, b).cells(3, "")].concat());
    }
    let (slice_ms, spread) = (SLICE.as_millis(), spread_in_words(set_count));
    let promoted = SpreadMedian::ratio_within_turns(sets, PROMOTED, HUGETLB);
    Figures::of(format!("GUPS, 2^{log2_words} words, {SETS} sets of guests, slices of {slice_ms} ms"))
        .table(rates)
        .table(ratios)
        .note(format!("medians of {turns} turns in {set_count} sets, {spread}; all tables verified"))
        .bars([promoted.bar("promoted : hugetlb", 3, "", Limit::AtLeast(SPEED_MIN))])
}

fn main() -> ExitCode {
    scenario::run("interleaved", experiment)
}
