//! Time until a hot set is on large pages again after it was made small: `auto` has 99 % of it back, in the host's
//! tables and in KVM's.
//!
//! ```text
//!   large ████████┐                    ┌████████      guest: always checks and rewrites all words of its hot set
//!                 │  auto observes     │
//!   small         └░░░░░░░░░░░░░░░░░░░░┘
//!                 ▲ made small         ▲ ◀─────▶ time: from the moment auto may act
//! ```
//!
//! | way | cause of the small pages |
//! |---|---|
//! | dirty log | KVM's dirty log over all slots (an abandoned migration); its owner switches it off |
//! | split | each huge page is split, as in a demotion |
//! | release | all pages released before the guest fills them, with an idle manager; timed from the end of the fill |
//!
//! `cargo bench -p wideleaf-benches --bench returns [-- HOT_MIB REPETITIONS]` (default 64 and 5; needs KVM)

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_benches::coverage::{NEARLY_ALL, host_coverage, is_nearly_all_large, windows_mapped_large};
use wideleaf_benches::guest::{Guest, GuestSetup};
use wideleaf_benches::managed::{Managed, Permission, WithPermission, policy};
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting, needs_kvm};
use wideleaf_benches::times_to_event::Times;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::order::arms_of_round;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::release::release_window;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, GpaRange, OutcomeResult, PageSize, Skip};

/// RAM beyond the hot set.
const BESIDE_HOT: Bytes = mib(64);
/// Interval between two measurements of coverage.
const PACE: Duration = Duration::from_millis(5);
/// Pause before and between the ways: `auto` has seen all windows, and its ticks are as far apart as possible.
const STEADY: Duration = Duration::from_secs(3);
/// Time on small pages. It grows with each repetition, so that it ends at different points between two ticks.
const SMALL: Duration = Duration::from_millis(1_000);
const SHIFT: Duration = Duration::from_millis(170);
/// Time in which a plan from before the pause of the policy ends: the budget's burst is 250 ms.
const PLAN_MAX: Duration = Duration::from_millis(300);
/// Time limit for a return.
const LIMIT: Duration = Duration::from_secs(60);

/// Target of the bench.
const RETURN_MAX: Duration = Duration::from_secs(2);

/// The cause of the small pages, and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SmallPageCause {
    DirtyLog,
    Split,
    Release,
}

const CAUSES: [(&str, SmallPageCause); 3] =
    [("dirty log", SmallPageCause::DirtyLog), ("split", SmallPageCause::Split), ("release", SmallPageCause::Release)];

fn setup(hot: Bytes) -> GuestSetup {
    GuestSetup {
        memory: hot + BESIDE_HOT,
        backing: BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages"),
        cmdline: format!("kernel=pattern bytes={} passes=1000000", hot.get()),
        slot_bytes: None,
    }
}

/// A running guest that `auto` has promoted.
struct HotGuest {
    managed: Managed,
    leave: Permission,
    guest: Guest,
    hot: GpaRange,
    /// Number of windows that KVM maps large when all are promoted.
    mapped: u64,
}

impl HotGuest {
    fn start(hot: Bytes, waiting: &Waiting) -> Result<HotGuest, ScenarioError> {
        let setup = setup(hot);
        warm_host_memory(setup.memory).expect("memory to warm");
        let guest = Guest::start(&setup);
        let (auto, leave) = WithPermission::new(policy("auto"));
        let managed = Managed::start(&guest, Box::new(auto));
        guest.begin_of("pass", waiting)?;
        let hot = guest.region("pattern");
        let windows = hot.bytes().pages(PageSize::Huge2M);
        let mut hot_guest = HotGuest { managed, leave, guest, hot, mapped: windows };
        waiting.until("promotion of the hot set", LIMIT, PACE, || hot_guest.is_large())?;
        waiting.pass(STEADY)?;
        hot_guest.mapped = windows_mapped_large(hot_guest.guest.second_level().as_ref());
        Ok(hot_guest)
    }

    fn is_large(&self) -> bool {
        is_nearly_all_large(self.guest.ram(), self.hot, self.guest.second_level().as_ref(), self.mapped)
    }

    /// Makes the hot set small, keeps it so for `small`, and returns the time until it is large again.
    fn come_back(
        &self,
        way: SmallPageCause,
        small: Duration,
        waiting: &Waiting,
    ) -> Result<Option<Duration>, ScenarioError> {
        self.leave.take();
        waiting.pass(PLAN_MAX)?;
        match way {
            SmallPageCause::Split => self.split(),
            _ => self.log_dirty(true),
        }
        waiting.pass(small)?;
        assert!(!self.is_large(), "{way:?} left the hot set large");
        let began = Instant::now();
        if way == SmallPageCause::DirtyLog {
            self.log_dirty(false);
        }
        self.leave.give();
        let is_back = waiting.comes(LIMIT, PACE, || self.is_large())?;
        let took = is_back.then(|| began.elapsed());
        waiting.pass(STEADY)?;
        Ok(took)
    }

    fn log_dirty(&self, is_on: bool) {
        let second_level = self.guest.second_level();
        for slot in second_level.slots().into_iter().filter(|slot| slot.range.overlaps(self.hot)) {
            second_level.set_dirty_log(slot.id, is_on).expect("KVM has a dirty log");
        }
    }

    fn split(&self) {
        let host = LinuxHost::open().expect("/proc is mounted");
        self.managed.with_all_in_place(|| {
            for range in self.guest.ram().ranges().iter().filter_map(|range| range.part(self.hot)) {
                for window in range.gpa.windows() {
                    let split = split_window(&host, BackingKind::Anon, range, window);
                    // The hot set counts as large with 1 % of it on base pages.
                    let is_small =
                        matches!(split.result, OutcomeResult::Done | OutcomeResult::Skipped(Skip::AlreadyDone));
                    assert!(is_small, "{window:?}: {:?}", split.result);
                }
            }
        });
    }

    fn stop(self) {
        self.managed.stop();
        self.guest.stop();
    }
}

/// A new guest with RAM on huge pages that were all released. It fills its hot set while the manager is idle.
fn after_release(hot: Bytes, idle: Duration, waiting: &Waiting) -> Result<Option<Duration>, ScenarioError> {
    let setup = setup(hot);
    warm_host_memory(setup.memory).expect("memory to warm");
    let ram = Guest::map_ram(&setup);
    populate_and_release(&ram);
    let guest = Guest::start_in(&setup, ram);
    guest.pause();
    let managed = Managed::start(&guest, policy("auto"));
    waiting.pass(idle)?;
    guest.resume();
    let began = guest.begin_of("pass", waiting)?;
    let hot = guest.region("pattern");
    let windows = hot.bytes().pages(PageSize::Huge2M);
    let is_large = || is_nearly_all_large(guest.ram(), hot, guest.second_level().as_ref(), windows);
    let took = waiting.comes(LIMIT, PACE, is_large)?.then(|| began.elapsed());
    managed.stop();
    guest.stop();
    Ok(took)
}

/// Populates all RAM with huge pages of zeroes, then releases them.
fn populate_and_release(ram: &Arc<GuestRam>) {
    let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
    let mover = WindowMover::start(host.clone(), ram.clone()).expect("a kernel that moves pages");
    prefault(host.as_ref(), ram.ranges(), 1, &|_| ControlFlow::Continue(())).expect("memory for a guest");
    for range in ram.ranges() {
        for window in range.gpa.windows() {
            assert_eq!(collapse_window(host.as_ref(), *range, window).result, OutcomeResult::Done, "{window:?}");
        }
        assert!(host_coverage(ram, range.gpa) >= NEARLY_ALL);
        for window in range.gpa.windows() {
            let release = release_window(mover.aside(), host.as_ref(), *range, window);
            assert_eq!(release.result, OutcomeResult::Done, "{window:?}");
        }
    }
}

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (hot, repetitions) = (mib(arguments.number(0, 64)?), arguments.count(1, 5)?);
    needs_kvm()?;
    let mut times: [Vec<Option<Duration>>; CAUSES.len()] = Default::default();
    let guest = HotGuest::start(hot, waiting)?;
    for repetition in 0..repetitions {
        for index in
            arms_of_round(CAUSES.len(), repetition + 1).filter(|index| CAUSES[*index].1 != SmallPageCause::Release)
        {
            times[index].push(guest.come_back(CAUSES[index].1, SMALL + SHIFT * repetition, waiting)?);
        }
    }
    guest.stop();
    let release = CAUSES.len() - 1;
    for repetition in 0..repetitions {
        times[release].push(after_release(hot, STEADY + SHIFT * repetition, waiting)?);
    }
    let small_s = SMALL.as_secs_f64();
    Ok(figures(format!("{hot} hot, on small pages for {small_s:.1} s or a little longer"), &times))
}

fn figures(title: String, times: &[Vec<Option<Duration>>; CAUSES.len()]) -> Figures {
    let mut rows = Table::new(["way"], Times::columns("back in"));
    let (mut bars, most) = (Vec::new(), RETURN_MAX.as_secs_f64());
    for ((name, _), times) in CAUSES.iter().zip(times).filter(|(_, times)| !times.is_empty()) {
        rows.row(std::iter::once(Cell::from(*name)).chain(Times::of(times.iter().copied(), LIMIT).cells()));
        let longest = times.iter().map(|took| took.unwrap_or(LIMIT)).max().unwrap_or(LIMIT).as_secs_f64();
        let what = format!("{name}: back in, longest of {}:", times.len());
        bars.push(Bar::new(what, Cell::number(longest, 2, "s"), Limit::AtMost(most)));
    }
    Figures::of(title)
        .table(rows)
        .note(format!("time until 99 % is on 2m in the host and in KVM; late: not within {} s", LIMIT.as_secs()))
        .bars(bars)
}

fn main() -> ExitCode {
    scenario::run("returns", experiment)
}
