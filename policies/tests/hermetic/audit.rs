//! `auto` beside a simulated guest that reports its progress: in a world where promotions gain what they should, in
//! one where all misses are hidden, and with noise.
//!
//! ```text
//!   speed = 80 M units/s of CPU time × (1 + gain × share of large windows) × (1 ± noise)      a reading every 50 ms
//! ```

use std::ops::RangeInclusive;
use std::time::Duration;

use wideleaf_policies::{
    Action, Backing, GuestMapping, GuestProgress, HostMemory, HugePages, Moment, OutcomeResult, Refusal, Snapshot,
    VmSnapshot,
};

use crate::drawn::{Desk, HOT, samples, vm_with};

/// Time between two plans.
const TICK: Duration = Duration::from_millis(10);

/// Units of work in a second without any large window.
const UNITS_PER_S: f64 = 80e6;

/// A guest and its world.
#[derive(Clone, Copy)]
struct World {
    /// Number of windows.
    windows: usize,
    /// One window, as the scenarios draw it.
    drawn: char,
    /// Gain in speed once all windows are large.
    gain: f64,
    /// Standard deviation of the speed in an interval, as its part.
    noise: f64,
    /// Change of the speed in a second by the guest's own doing, as its part.
    drift: f64,
    /// Time between two readings; `None` for a guest that reports nothing.
    reports_every: Option<Duration>,
    seed: u64,
}

const QUIET: World = World {
    windows: 400,
    drawn: 'f',
    gain: 0.0,
    noise: 0.000_1,
    drift: 0.0,
    reports_every: Some(Duration::from_millis(50)),
    seed: 1,
};

struct Guest {
    world: World,
    desk: Desk,
    large: Vec<bool>,
    now: Duration,
    reported_at: Option<Duration>,
    progress: GuestProgress,
    /// State of the noise: a linear congruential generator (Knuth, TAOCP vol. 2, 3.3.4).
    state: u64,
    huge_pages: HugePages,
    released: Vec<usize>,
    /// Number of releases that are refused before the others are done.
    refuses: usize,
    /// Moment from which on its windows may be promoted.
    ready_at: Moment,
}

impl World {
    fn guest(self) -> Guest {
        Guest {
            world: self,
            desk: Desk::new("auto"),
            large: vec![false; self.windows],
            now: Duration::ZERO,
            reported_at: None,
            progress: GuestProgress::default(),
            state: self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            huge_pages: HugePages::Plenty,
            released: Vec::new(),
            refuses: 0,
            ready_at: Moment::START,
        }
    }
}

impl Guest {
    /// Nearly normal: the sum of twelve uniform numbers.
    fn noise(&mut self) -> f64 {
        let mut uniform = || {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 11) as f64 / (1_u64 << 53) as f64
        };
        (0..12).map(|_| uniform()).sum::<f64>() - 6.0
    }

    fn promoted(&self) -> usize {
        self.large.iter().filter(|is_large| **is_large).count()
    }

    /// The reading that is due at this tick, if one is: the work since the one before at the present speed.
    fn reading(&mut self) -> Option<GuestProgress> {
        let every = self.world.reports_every?;
        let since = self.reported_at.map(|at| self.now - at);
        if since.is_some_and(|since| since < every) {
            return None;
        }
        let since = since.unwrap_or_default();
        let share = self.promoted() as f64 / self.world.windows as f64;
        let own = 1.0 + self.world.noise * self.noise() + self.world.drift * self.now.as_secs_f64();
        let speed = UNITS_PER_S * (1.0 + self.world.gain * share) * own;
        self.progress.done += (speed * since.as_secs_f64()) as u64;
        self.progress.cpu += since;
        self.reported_at = Some(self.now);
        Some(self.progress)
    }

    fn rows(&mut self) -> VmSnapshot {
        let drawn = String::from(self.world.drawn).repeat(self.world.windows);
        let mut vm = vm_with(0, &drawn, |at, row| {
            (row.guest_mapping, row.ready_at) = (GuestMapping::Huge2M, self.ready_at);
            row.access = samples(HOT).with_touches_per_s(Some(1_000));
            if self.large[at] {
                (row.backing, row.resident, row.zero) = (Backing::Huge2M, 512, Some(20));
            }
        });
        vm.progress.extend(self.reading());
        vm
    }

    /// One plan, and all that it asks for is done. Returns the number of promotions.
    fn tick(&mut self) -> usize {
        let host = HostMemory { huge_pages: self.huge_pages, ..HostMemory::default() };
        let snapshot = Snapshot { host: Some(host), vms: vec![self.rows()] };
        let now = Moment::after_start(self.now);
        let plan = self.desk.plan(&snapshot, now);
        for action in &plan {
            let window = action.window().get() as usize;
            match action {
                Action::Promote { .. } => self.large[window] = true,
                Action::Release { .. } if self.refuses > 0 => {
                    self.refuses -= 1;
                    self.desk.hears(*action, now, OutcomeResult::Refused(Refusal::Busy));
                    continue;
                }
                Action::Release { .. } => {
                    self.large[window] = false;
                    self.released.push(window);
                }
                other => panic!("{other:?} is neither a promotion nor its end"),
            }
            self.desk.hears(*action, now, OutcomeResult::Done);
        }
        self.now += TICK;
        plan.len()
    }

    fn runs(&mut self, time: Duration) {
        (0..time.as_millis() / TICK.as_millis()).for_each(|_| {
            self.tick();
        });
    }

    /// Time until all windows are large.
    fn time_to_all(&mut self, at_most: Duration) -> Option<Duration> {
        while self.promoted() < self.world.windows {
            if self.now > at_most {
                return None;
            }
            self.tick();
        }
        Some(self.now)
    }
}

#[test]
fn a_guest_with_all_its_misses_hidden_gets_one_window_in_twenty() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_secs(20));
    assert!((10..=20).contains(&guest.promoted()), "{} of 400 windows", guest.promoted());
    let figure = |name| guest.desk.figure(name);
    assert_eq!(["audits_kept", "audits_stopped", "audits_undecided"].map(figure), [0, 1, 0]);
    assert_eq!(figure("gain_nothing_now"), 400 - guest.promoted() as u64);
    assert_eq!((figure("paid_back"), figure("written_off")), (0, guest.promoted() as u64), "nothing came back");
    assert!(!guest.desk.0.is_measuring(), "no candidate waits for a measurement any more");
}

#[test]
fn a_guest_that_gains_has_all_its_windows_promoted_after_a_second_and_pays_back_by_measurement() {
    let mut guest = World { gain: 0.12, ..QUIET }.guest();
    let all = guest.time_to_all(Duration::from_secs(20)).expect("all of them");
    assert!(all < Duration::from_millis(1_500), "ten intervals, two and seven, of 50 ms: {all:?}");
    guest.runs(Duration::from_secs(2));
    let figure = |name| guest.desk.figure(name);
    assert_eq!(["audits_kept", "audits_stopped", "gain_nothing_now"].map(figure), [1, 0, 0]);
    // 12 % of 2 * 10^9 cycles for 400 windows: 600 k a second each, against 1.12 M.
    assert_eq!((figure("paid_back_measured"), figure("paid_back_assumed")), (400, 0));
}

#[test]
fn what_a_good_guest_waits_for_is_bounded() {
    let all = |world: World| world.guest().time_to_all(Duration::from_secs(20)).expect("all of them");
    let reporting = |ms| World { gain: 0.12, reports_every: Some(Duration::from_millis(ms)), ..QUIET };
    assert_eq!(all(World { reports_every: None, ..QUIET }), TICK, "without a measure nothing waits");
    assert!(all(reporting(100)) <= Duration::from_millis(2_600));
    assert!(all(reporting(250)) <= Duration::from_millis(600), "too slow to end in time: as soon as that is known");
    assert!(all(reporting(5_000)) <= Duration::from_millis(600), "the count is not live");
    assert!(all(World { noise: 0.02, ..reporting(50) }) <= Duration::from_millis(500), "too noisy");
    let small = World { windows: 59, ..reporting(50) };
    assert!(all(small) <= 3 * TICK, "too few to try");
}

#[test]
fn a_guest_too_noisy_to_measure_is_promoted_as_assumed_and_the_figures_say_so() {
    let mut guest = World { noise: 0.02, ..QUIET }.guest();
    guest.runs(Duration::from_secs(5));
    let figure = |name| guest.desk.figure(name);
    assert_eq!((guest.promoted(), figure("audits_stopped")), (400, 0));
    assert!(figure("audits_undecided") >= 1);
    assert!(figure("paid_back_assumed") > 0);
}

/// Its speeds differ by 3 %, so that nothing waits; then all of it is promoted, and 30 % show.
#[test]
fn a_gain_that_noise_hides_in_a_trial_shows_once_all_windows_are_promoted() {
    let mut guest = World { noise: 0.03, gain: 0.3, ..QUIET }.guest();
    guest.ready_at = Moment::after_start(Duration::from_millis(1_500));
    let all = guest.time_to_all(Duration::from_secs(5)).expect("all of them");
    assert!(all <= Duration::from_millis(1_550), "{all:?}");
    guest.runs(Duration::from_secs(3));
    let figure = |name| guest.desk.figure(name);
    assert_eq!(["audits_kept", "audits_stopped", "audits_undecided"].map(figure), [1, 0, 1]);
    // 30 % of 2 * 10^9 cycles for 400 windows: 1.5 M a second each, against 1.12 M.
    assert_eq!((figure("paid_back_measured"), figure("paid_back_assumed")), (400, 0));
}

/// Number of guests among `seeds`, with that gain and noise, that were stopped or kept by their first trial.
fn verdicts(gain: f64, noise: f64, seeds: RangeInclusive<u64>) -> [u64; 2] {
    let mut found = [0; 2];
    for seed in seeds {
        let mut guest = World { windows: 100, gain, noise, seed, ..QUIET }.guest();
        let figure = |guest: &Guest, name| guest.desk.figure(name) > 0;
        let names = ["audits_stopped", "audits_kept", "audits_undecided"];
        while !names.iter().any(|name| figure(&guest, name)) {
            guest.tick();
        }
        found[0] += u64::from(figure(&guest, names[0]));
        found[1] += u64::from(figure(&guest, names[1]));
    }
    found
}

/// A guest of 100 windows gets 5 of them, and 2 % in all make 0.1 % in the trial. With exactly that gain, whether a
/// pair says less is a fair coin; with none, whether a pair says more is one. 3.44 % of 200 are 7, and 15 are three
/// standard deviations more.
#[test]
fn noise_alone_stops_or_keeps_no_more_often_than_the_stated_bound() {
    for noise in [0.000_1, 0.000_3] {
        let [stopped, _] = verdicts(0.02, noise, 1..=200);
        assert!(stopped <= 15, "{stopped} of 200 guests that gain 2 % were stopped, with noise of {noise}");
        let [_, kept] = verdicts(0.0, noise, 1..=200);
        assert!(kept <= 15, "{kept} of 200 guests that gain nothing were kept, with noise of {noise}");
    }
}

#[test]
fn most_guests_that_gain_nothing_are_stopped_where_the_noise_allows_it() {
    let [stopped, kept] = verdicts(0.0, 0.000_2, 1..=100);
    assert!(stopped >= 80, "{stopped} stopped, {kept} kept");
}

#[test]
fn a_stop_is_a_pause_and_each_further_trial_promotes_other_windows() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_secs(20));
    let first = guest.promoted();
    guest.runs(Duration::from_secs(280));
    assert_eq!(guest.desk.figure("audits_stopped"), 2, "once a hundredth of the time has paid for another trial");
    assert!((first + 8..=first + 20).contains(&guest.promoted()), "{} after {first}", guest.promoted());
    guest.world.gain = 0.2;
    guest.runs(Duration::from_secs(600));
    assert_eq!(guest.promoted(), 400, "misses that begin to cost are found by the next trial");
}

#[test]
fn a_stop_ends_when_the_guest_does_other_work() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_secs(5));
    assert_eq!(guest.desk.figure("audits_stopped"), 1);
    guest.progress = GuestProgress { phase: 1, done: 0, ..guest.progress };
    guest.world.gain = 0.12;
    assert!(guest.time_to_all(Duration::from_secs(10)).is_some(), "{} windows", guest.promoted());
}

#[test]
fn a_trial_that_other_work_interrupts_is_repeated_with_that_work() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_millis(600));
    guest.progress = GuestProgress { phase: 1, done: 0, ..guest.progress };
    guest.runs(Duration::from_secs(2));
    assert_eq!([guest.desk.figure("audits_undecided"), guest.desk.figure("audits_stopped")], [1, 1]);
    assert!(guest.promoted() <= 2 * 400 / 20, "{} windows that gain nothing", guest.promoted());
}

#[test]
fn a_guest_that_slows_down_by_itself_is_not_stopped() {
    let mut guest = World { drift: -0.002, ..QUIET }.guest();
    guest.runs(Duration::from_secs(5));
    assert_eq!((guest.promoted(), guest.desk.figure("audits_stopped")), (400, 0));
}

#[test]
fn a_guest_that_becomes_slower_during_the_trial_is_not_stopped() {
    let mut guest = QUIET.guest();
    while guest.promoted() == 0 {
        guest.tick();
    }
    guest.world.gain = -1.0; // 5 % slower, as if a neighbour had come
    guest.runs(Duration::from_secs(5));
    assert_eq!((guest.promoted(), guest.desk.figure("audits_stopped")), (400, 0));
}

#[test]
fn pages_that_a_trial_added_for_nothing_are_released() {
    let mut guest = World { drawn: 'n', ..QUIET }.guest();
    guest.runs(Duration::from_secs(5));
    assert_eq!(guest.desk.figure("audits_stopped"), 1);
    assert!((10..=20).contains(&guest.released.len()), "{:?}", guest.released);
    assert_eq!(guest.promoted(), 0);
    let mut gains = World { drawn: 'n', gain: 0.12, ..QUIET }.guest();
    gains.runs(Duration::from_secs(5));
    assert_eq!((gains.promoted(), gains.released.len()), (400, 0));
}

#[test]
fn pages_that_a_trial_added_for_nothing_are_released_later_where_the_guest_uses_them_now() {
    let mut guest = World { drawn: 'n', ..QUIET }.guest();
    guest.refuses = 30;
    guest.runs(Duration::from_secs(5));
    assert_eq!((guest.desk.figure("audits_stopped"), guest.refuses), (1, 0));
    assert_eq!(guest.promoted(), 0);
    assert!(!guest.desk.0.uses_zero(), "nothing is left to release");
}

#[test]
fn windows_that_gain_nothing_do_not_bid_for_huge_pages() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_secs(5));
    guest.huge_pages = HugePages::Scarce { free: 0 };
    guest.tick();
    let wanted = guest.desk.0.bids().expect("the market is open").wanted();
    assert_eq!(wanted, 0);
}

#[test]
fn windows_that_wait_for_a_trial_bid_for_huge_pages() {
    let mut guest = QUIET.guest();
    guest.runs(Duration::from_millis(300));
    assert!(guest.promoted() <= 20, "{} are promoted while the others wait", guest.promoted());
    guest.huge_pages = HugePages::Scarce { free: 0 };
    guest.tick();
    let wanted = guest.desk.0.bids().expect("the market is open").wanted();
    assert_eq!(wanted, 400 - guest.promoted() as u64);
}

#[test]
fn without_an_audit_nothing_waits_and_nothing_is_measured() {
    let mut guest = QUIET.guest();
    guest.desk = Desk::new("auto:audit_worth=0");
    assert_eq!(guest.tick(), 400);
    guest.runs(Duration::from_secs(2));
    assert_eq!((guest.desk.figure("paid_back_assumed"), guest.desk.figure("audits_undecided")), (400, 0));
}

#[test]
fn the_same_readings_give_the_same_plans() {
    let run = || {
        let mut guest = World { noise: 0.000_5, gain: 0.05, ..QUIET }.guest();
        (0..300).map(|_| guest.tick()).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}
