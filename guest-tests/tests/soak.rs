//! The soak test: two vCPUs check and rewrite every word of their RAM while a policy asks for random actions and
//! system calls fail at random. No word may be lost, no vCPU may be left waiting, and the machine gets everything
//! back.
//!
//! ```text
//!   one guest after another, and while it runs, a manager after another:
//!
//!   guest     ████████████████████████████████████████████████████  no wrong word
//!   manager      ▒▒ calm ▒▒    ▒▒ storm ▒▒    ▒▒ rough ▒▒
//!   between    ▲            ▲              ▲              ▲         all vCPUs run, all words are right
//!   at the end                                                   ▲  threads, files, mappings, memory as before
//! ```
//!
//! Takes a minute; `WIDELEAF_SOAK_SECONDS` sets the duration. `WIDELEAF_SOAK_SEED` repeats the random numbers of a
//! run, not its timing. Needs KVM.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::ManagedVm;
use wideleaf_memory::testing::failing_host::FailingHost;
use wideleaf_memory::testing::failing_second_level::FailingSecondLevel;
use wideleaf_memory::testing::fault_injection::{FaultInjection, RandomNumbers};
use wideleaf_memory::{BackingKind, LinuxHost, Manager, ManagerConfig, ManagerReport};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, VmId};
use wideleaf_testing::chaos::Chaos;
use wideleaf_testing::holdings::Holdings;
use wideleaf_testing::pattern_guest::PatternGuest;
use wideleaf_testing::swaps::can_swap;
use wideleaf_testing::{has_kvm, number_from_environment};

const SECONDS_DEFAULT: u64 = 60;
const KINDS: [BackingKind; 2] = [BackingKind::Anon, BackingKind::Memfd];
/// RAM of 32 windows in eight memslots: the policy acts on all of them several times a second.
const MEMORY: Bytes = mib(64);
const SLOT_BYTES: Bytes = mib(8);
/// Memory that every second guest checks. The rest stays zero and can be released; the other guests check all of
/// it.
const PART_CHECKED: Bytes = mib(40);

/// Working time of one manager: in a second it can act on all of these windows.
const ROUND: Duration = Duration::from_secs(1);
/// Time limit for a manager's first tick. Beside other work a thread may wait longer than a round for a processor.
const TICKS_WITHIN: Duration = Duration::from_secs(120);
/// Number of managers per guest. Huge pages of a memfd stay huge: a second manager would find nothing to promote.
const fn rounds_per_guest(kind: BackingKind) -> u32 {
    match kind {
        BackingKind::Anon => 4,
        BackingKind::Memfd | BackingKind::Hugetlb => 1,
    }
}
/// One call in N fails; N is chosen at random for each round. Rarely: most actions succeed, and one failure comes
/// at a time. Often: error handling fails as well. Or not at all.
const ONE_IN: [u64; 4] = [0, 400, 50, 12];

/// Maximum factor by which the test may exceed its duration until it has met everything it must.
const LONGER_AT_MOST: u32 = 5;

/// Maximum number of copy threads, more than the manager has by itself: they compete for the same locks.
const COPY_THREADS_MAX: u64 = 4;

/// Mappings that may remain: stacks and arenas that the C library keeps for the next thread, of which there are a
/// dozen.
const MAPPINGS_KEPT_MAX: u64 = 24;
/// Memory that may stay resident: stacks, arenas, and the allocator's free lists. A window lost in a round would be
/// 2 MiB each.
const RESIDENT_KEPT_MAX: Bytes = mib(4);
/// Time until a joined thread is gone from `/proc`.
const THREADS_GONE_WITHIN: Duration = Duration::from_secs(10);

/// Results of all rounds together.
#[derive(Debug, Default)]
struct Tally {
    /// Whether this kernel can swap windows.
    can_swap: bool,
    guests: u64,
    rounds: u64,
    ticks: u64,
    passes: u64,
    outcomes: BTreeMap<String, u64>,
    sensor_samples: BTreeMap<&'static str, u64>,
    failed_calls: BTreeMap<&'static str, u64>,
}

impl Tally {
    fn add(&mut self, report: &ManagerReport, faults: &FaultInjection) {
        self.rounds += 1;
        self.ticks += report.ticks;
        for ((mechanism, result), count) in &report.outcomes {
            *self.outcomes.entry(format!("{mechanism}.{result}")).or_default() += count;
        }
        for (sensor, cost) in &report.sensor_costs {
            *self.sensor_samples.entry(sensor).or_default() += cost.samples;
        }
        for (call, count) in faults.counts() {
            *self.failed_calls.entry(call).or_default() += count;
        }
    }

    fn done(&self, mechanism: &str) -> u64 {
        self.outcomes.get(&format!("{mechanism}.done")).copied().unwrap_or(0)
    }

    /// Events that a soak must meet and that this one has not met yet.
    fn missing(&self, kind: BackingKind) -> Vec<&'static str> {
        let back: [&str; 2] = if kind == BackingKind::Anon { ["release", "split"] } else { ["hold_at_4k", "recover"] };
        let mut missing: Vec<_> = back.into_iter().filter(|mechanism| self.done(mechanism) == 0).collect();
        // Windows of a memfd are never swapped.
        let can_swap = self.can_swap && kind == BackingKind::Anon;
        if can_swap {
            missing.extend(["swap", "vacate"].into_iter().filter(|mechanism| self.done(mechanism) == 0));
        }
        if !can_swap && self.done("collapse") == 0 {
            missing.push("collapse");
        }
        if self.failed_calls.len() <= 3 {
            missing.push("failed calls of several kinds");
        }
        missing
    }
}

/// Runs one manager for a round.
fn manage(guest: &PatternGuest, faults: &Arc<FaultInjection>, chaos: Chaos, config: ManagerConfig) -> ManagerReport {
    let machine = guest.machine();
    let host = FailingHost::new(LinuxHost::open().unwrap(), faults.clone());
    let second_level = FailingSecondLevel::new(machine.second_level(), faults.clone());
    let vm = ManagedVm::new(VmId(0), machine.ram().clone(), Some(Arc::new(second_level)));
    let manager = Manager::spawn(Arc::new(host), vec![vm], Box::new(chaos), config).unwrap();
    manager.activate();
    std::thread::sleep(ROUND);
    let deadline = Instant::now() + TICKS_WITHIN;
    while manager.live().ticks == 0 && !manager.has_ended() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    manager.stop()
}

/// Makes all of RAM present, so that each manager finds memory to promote and zero pages to release.
fn populate(guest: &PatternGuest) {
    let host = LinuxHost::open().unwrap();
    for range in guest.machine().ram().ranges() {
        host.advise(range.hva, range.gpa.bytes(), Advice::PopulateWrite).unwrap();
    }
}

/// Runs one guest, and one manager after another, at least one: a guest that just began has checked nothing yet,
/// and if its start takes seconds (the lab beside other work) the deadline may be over by then.
fn soak_one_guest(
    kind: BackingKind,
    checked: Option<Bytes>,
    deadline: Instant,
    random: &mut RandomNumbers,
    tally: &mut Tally,
) {
    let guest = PatternGuest::start(kind, MEMORY, SLOT_BYTES, checked);
    for round in 0..rounds_per_guest(kind) {
        if round > 0 && Instant::now() >= deadline {
            break;
        }
        populate(&guest);
        let one_in = ONE_IN[random.below(ONE_IN.len() as u64) as usize];
        let copy_threads = 1 + random.below(COPY_THREADS_MAX) as u16;
        println!("{}: one call in {one_in} fails, {copy_threads} threads copy", kind.name());
        let faults = Arc::new(FaultInjection::new(random.number(), one_in));
        let config = ManagerConfig { copy_threads, ..ManagerConfig::default() };
        let report = manage(&guest, &faults, Chaos::new(random.number()), config);
        assert!(report.ticks > 0, "the manager lives");
        tally.add(&report, &faults);
        guest.assert_all_vcpus_run();
        guest.check_all_words();
    }
    tally.guests += 1;
    tally.passes += guest.passes();
    assert!(guest.checked() >= checked.unwrap_or(MEMORY - SLOT_BYTES), "{} is checked", guest.checked());
    guest.stop();
}

/// Runs one guest after another for the given time, every second one with memory that it does not check. On a slow
/// machine (the lab beside other work ticks once a second) it continues until it has met everything a soak must
/// meet, within a limit.
fn soak(kind: BackingKind, lasts: Duration, random: &mut RandomNumbers, can_swap: bool) -> Tally {
    let start = Instant::now();
    let mut tally = Tally { can_swap, ..Tally::default() };
    for checked in [Some(PART_CHECKED), None].into_iter().cycle() {
        let lasted = start.elapsed();
        if lasted >= lasts && (tally.missing(kind).is_empty() || lasted >= lasts * LONGER_AT_MOST) {
            break;
        }
        let deadline = start + if lasted < lasts { lasts } else { lasts * LONGER_AT_MOST };
        soak_one_guest(kind, checked, deadline, random, &mut tally);
    }
    tally
}

fn assert_nothing_is_kept(before: Holdings) {
    let deadline = Instant::now() + THREADS_GONE_WITHIN;
    while Holdings::now().threads > before.threads && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let after = Holdings::now();
    println!("before: {before:?}\nafter:  {after:?}");
    assert_eq!((after.threads, after.files, after.hugetlb), (before.threads, before.files, before.hugetlb));
    assert!(after.mappings <= before.mappings + MAPPINGS_KEPT_MAX, "mappings");
    assert!(after.resident <= before.resident + RESIDENT_KEPT_MAX, "resident memory");
}

#[test]
fn whatever_fails_no_data_is_lost_and_all_resources_are_given_back() {
    if !has_kvm() {
        return;
    }
    // Errors of the manager fail the test; its warnings are caused by the injected failures.
    tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).with_test_writer().init();
    let seconds = number_from_environment("WIDELEAF_SOAK_SECONDS").unwrap_or(SECONDS_DEFAULT);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_environment("WIDELEAF_SOAK_SEED").unwrap_or_else(now);
    println!("WIDELEAF_SOAK_SEED={seed}");
    let mut random = RandomNumbers::new(seed);
    // Resources that are made once and kept (the library's arenas, the stacks of threads) exist after a first
    // guest.
    let can_swap = can_swap();
    soak(BackingKind::Anon, Duration::from_secs(1), &mut random, can_swap);
    let before = Holdings::now();
    for kind in KINDS {
        let tally = soak(kind, Duration::from_secs(seconds) / KINDS.len() as u32, &mut random, can_swap);
        println!("{}: {tally:#?}", kind.name());
        assert!(tally.missing(kind).is_empty(), "not met: {:?}", tally.missing(kind));
    }
    assert_nothing_is_kept(before);
}
