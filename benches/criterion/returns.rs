//! How soon a hot set is large again after something made it small: time until `auto` has 99 % of it back, in the host's
//! tables and in KVM's.
//!
//! ```text
//!   large ████████┐                    ┌████████      guest: checks and rewrites every word of its hot set, all the time
//!                 │  auto looks on     │
//!   small         └░░░░░░░░░░░░░░░░░░░░┘
//!                 ▲ made small         ▲ ◀─────▶ time: from the moment auto may act
//! ```
//!
//! | ended | what made it small |
//! |---|---|
//! | dirty log, by its owner | KVM's dirty log over all slots (a migration that is given up); its owner switches it off |
//! | dirty log, by auto | the same, left on: `auto` recovers the slots |
//! | split | each huge page split, as a demotion does |
//! | release | all pages zero and given back before the guest fills them; the manager was idle; from the end of the fill on |
//!
//! `cargo bench -p wideleaf-benches --bench returns [-- HOT_MIB REPETITIONS]` (default 64 and 5; needs KVM)

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_benches::coverage::{NEARLY_ALL, host_coverage, is_nearly_all_large, windows_mapped_large};
use wideleaf_benches::experiment::{self, Arguments, Ended, Waiting, bar, machine, needs_kvm, number, table};
use wideleaf_benches::guest::{Guest, GuestSetup};
use wideleaf_benches::managed::{Leave, Managed, OnLeave, policy};
use wideleaf_experiments::statistics::median;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::release::release_window;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::aside::WindowMover;
use wideleaf_memory::host::linux::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, GpaRange, OutcomeResult, PageSize};

/// RAM beside the hot set.
const BESIDE_HOT: Bytes = mib(64);
/// How often coverage is looked at.
const PACE: Duration = Duration::from_millis(5);
/// Before and between: auto has seen all windows, and its ticks are as far apart as they get.
const STEADY: Duration = Duration::from_secs(3);
/// How long it is small. Each time a little longer, so that it ends at another point between two ticks.
const SMALL: Duration = Duration::from_millis(1_000);
const SHIFT: Duration = Duration::from_millis(170);
/// A plan that was made before leave was taken is over by then: the budget's burst is 250 ms.
const PLAN_MAX: Duration = Duration::from_millis(300);
/// What takes longer is not waited for.
const LIMIT: Duration = Duration::from_secs(60);

/// The promise.
const RETURN_MAX: Duration = Duration::from_secs(2);

/// What made it small, and how that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    LogEndedByOwner,
    LogEndedByAuto,
    Split,
    Release,
}

const WAYS: [(&str, Way); 4] = [
    ("dirty log, by its owner", Way::LogEndedByOwner),
    ("dirty log, by auto", Way::LogEndedByAuto),
    ("split", Way::Split),
    ("release", Way::Release),
];

fn setup(hot: Bytes) -> GuestSetup {
    GuestSetup {
        memory: hot + BESIDE_HOT,
        backing: BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages"),
        cmdline: format!("kernel=pattern bytes={} passes=1000000", hot.get()),
    }
}

/// A guest at work that `auto` has promoted.
struct HotGuest {
    managed: Managed,
    leave: Leave,
    guest: Guest,
    hot: GpaRange,
    /// Windows that KVM maps large when all is well.
    mapped: u64,
}

impl HotGuest {
    fn start(hot: Bytes, waiting: &Waiting) -> Result<HotGuest, Ended> {
        let setup = setup(hot);
        warm_host_memory(setup.memory).expect("memory to warm");
        let guest = Guest::start(&setup);
        let (auto, leave) = OnLeave::new(policy("auto"));
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

    /// Makes the hot set small, keeps it so for `small`, and says how long it took to come back.
    fn come_back(&self, way: Way, small: Duration, waiting: &Waiting) -> Result<Option<Duration>, Ended> {
        self.leave.take();
        waiting.pass(PLAN_MAX)?;
        match way {
            Way::Split => self.split(),
            _ => self.log_dirty(true),
        }
        waiting.pass(small)?;
        assert!(!self.is_large(), "{way:?} made nothing small");
        let began = Instant::now();
        if way == Way::LogEndedByOwner {
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
                    assert_eq!(split.result, OutcomeResult::Done, "{window:?}");
                }
            }
        });
    }

    fn stop(self) {
        self.managed.stop();
        self.guest.stop();
    }
}

/// A new guest whose RAM was on huge pages that were all released; it fills its hot set while the manager idles.
fn after_release(hot: Bytes, idle: Duration, waiting: &Waiting) -> Result<Option<Duration>, Ended> {
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

/// Huge pages of zeroes everywhere, and then nothing.
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

fn experiment(arguments: &Arguments, waiting: &Waiting) -> Result<(), Ended> {
    let (hot, repetitions) = (mib(arguments.number(0, 64)?), arguments.number(1, 5)?);
    needs_kvm()?;
    let mut times: [Vec<Option<Duration>>; WAYS.len()] = Default::default();
    let guest = HotGuest::start(hot, waiting)?;
    for repetition in 0..repetitions {
        for (index, (_, way)) in WAYS.into_iter().enumerate().filter(|(_, (_, way))| *way != Way::Release) {
            times[index].push(guest.come_back(way, SMALL + SHIFT * repetition, waiting)?);
        }
    }
    guest.stop();
    let release = WAYS.len() - 1;
    for repetition in 0..repetitions {
        times[release].push(after_release(hot, STEADY + SHIFT * repetition, waiting)?);
    }
    println!("returns: {hot} hot, small for {:.1} s and a little more each time", SMALL.as_secs_f64());
    report(&times);
    Ok(())
}

fn report(times: &[Vec<Option<Duration>>; WAYS.len()]) {
    let mut rows = table(&["ended", "runs", "back", "median", "longest"]);
    let mut bars = Vec::new();
    for ((name, _), times) in WAYS.iter().zip(times).filter(|(_, times)| !times.is_empty()) {
        let seconds: Vec<f64> = times.iter().map(|took| took.unwrap_or(LIMIT).as_secs_f64()).collect();
        let longest = seconds.iter().copied().fold(0.0, f64::max);
        rows.add_row([
            (*name).into(),
            number(times.len()),
            number(times.iter().flatten().count()),
            number(format!("{:.3} s", median(seconds))),
            number(format!("{longest:.3} s")),
        ]);
        let what = format!("{name}: back in {longest:.2} s, at most {} s", RETURN_MAX.as_secs());
        bars.push(bar(&what, longest <= RETURN_MAX.as_secs_f64()));
    }
    println!("{rows}");
    println!(
        "  until 99 % of it is on 2m in the host and in KVM; nothing was waited for longer than {} s",
        LIMIT.as_secs()
    );
    bars.iter().for_each(|bar| println!("{bar}"));
    println!("  {}", machine());
}

fn main() -> ExitCode {
    experiment::run("returns", experiment)
}
