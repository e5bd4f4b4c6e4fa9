//! One comparison of a guest's speed before and after promotions.
//!
//! ```text
//!                      │ candidates wait                                            │
//!   held       ───────▶│ Baseline ──steady──▶ Treating ──one in 20 is promoted──▶ Comparing ──▶ a finding
//!                      │    └─ unsteady, drifting, too coarse ─▶ unclear            │
//!   alongside  ────── promotions go on ──────────────────────────────────────────▶ Comparing ──▶ faster, or unclear
//!
//!   speeds     b1 b2 b3 b4 │promotions│ a1 a2 a3 a4       pairs: b4 a1, b3 a2, b2 a3, …  the nearest first
//! ```
//!
//! Each pair counts in two [sign tests](super::sign_test). *Faster*: the guest was faster after than before. *No gain*:
//! it gained less than the promotion is worth, and lost less than that: a promotion makes no guest slower, so a slower
//! guest has another reason. A trial alongside never finds *no gain*: the guest chooses its time, and as its data grow
//! it becomes slower just then.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use super::sign_test::{PAIRS_MIN, SignTest};
use super::speed::{MILLION, Speed};
use super::{KINDS, Kind, Scale};
use crate::median::median;
use crate::units::WindowIndex;

/// One candidate in this many is promoted in a trial.
pub(super) const PART: u64 = 20;

/// Number of speeds before a trial: with one pair in twenty the other way, nine in ten trials decide.
pub(super) const BASELINE: usize = 10;

/// Smallest number of candidates of a kind that is worth a trial: fewer cost 34 ms, and one in twenty would be less
/// than three.
pub(super) const CANDIDATES_MIN: u64 = 3 * PART;

/// Number of intervals that a trial needs at least: a baseline, two that are left out, and seven pairs.
pub(super) const INTERVALS_MIN: u32 = (BASELINE + 2 + PAIRS_MIN) as u32;

/// Smallest number of promoted windows that a trial compares.
const TREATED_MIN: u64 = 2;

/// Longest time until the windows of a trial are promoted.
const TREATING_MAX: Duration = Duration::from_millis(500);

/// Longest time that a trial alongside waits for promotions to end: speeds before them are older than that afterwards.
const ALONGSIDE_MAX: Duration = Duration::from_secs(30);

/// Whether speeds are so steady that ten pairs show a difference of `worth` millionths.
pub(super) fn is_steady<'a>(speeds: impl Iterator<Item = &'a Speed> + Clone, worth: u64) -> bool {
    let steps = speeds.clone().zip(speeds.clone().skip(1)).map(|(before, now)| now.gain_on(*before));
    let unsteady = steps.filter(|step| step.unsigned_abs() > worth).count();
    unsteady <= 1 && !is_drifting(speeds.clone()) && speeds.clone().all(|speed| speed.resolves(worth))
}

/// Whether each speed of the second half lies on the same side of its counterpart in the first half.
fn is_drifting<'a>(speeds: impl Iterator<Item = &'a Speed> + Clone) -> bool {
    let steps = || speeds.clone().zip(speeds.clone().skip(BASELINE / 2)).map(|(before, now)| now.gain_on(*before));
    steps().count() >= BASELINE / 2 && (steps().all(|step| step > 0) || steps().all(|step| step < 0))
}

/// Whether the trial of this round promotes the window. Multiples of the golden ratio, modulo one, lie evenly in each
/// stretch of windows (Knuth, TAOCP vol. 3, 6.4), so promoted windows and the others are neighbours.
fn is_treated(window: WindowIndex, round: u64) -> bool {
    let place = window.get().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    (place * PART) >> 32 == round % PART
}

/// Result of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// The guest is faster, by this median gain in millionths.
    Faster(u64),
    /// It gained less than the promotion is worth.
    NoGain,
    /// Too few windows were promoted to compare anything.
    TooFew,
    /// The trial could not decide.
    Unclear,
    /// The guest does other work: what was measured says nothing of it.
    OtherWork,
}

/// Step of a trial that holds its candidates back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Baseline,
    Treating { since: Duration },
    Comparing,
}

/// Candidates that wait for a trial.
#[derive(Clone, Debug)]
struct Held {
    kind: Kind,
    round: u64,
    step: Step,
    /// Number of candidates when the trial began.
    candidates: u64,
    /// Gain in millionths that the promotion of all of them is worth.
    worth: u64,
    /// Number of windows that the trial let pass at the latest plan.
    asked: u64,
}

/// A trial; see the module.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    /// `None`: alongside.
    held: Option<Held>,
    began_at: Duration,
    before: VecDeque<Speed>,
    /// Number of windows promoted, by kind.
    promoted: [u64; KINDS],
    /// Windows to which promotion added pages.
    added: Vec<WindowIndex>,
    faster: SignTest,
    no_gain: SignTest,
    gains: Vec<u64>,
}

impl Trial {
    fn new(held: Option<Held>, began_at: Duration) -> Trial {
        Trial {
            held,
            began_at,
            before: VecDeque::new(),
            promoted: [0; KINDS],
            added: Vec::new(),
            faster: SignTest::default(),
            no_gain: SignTest::default(),
            gains: Vec::new(),
        }
    }

    /// A trial of a kind with that number of candidates, which wait. The promotion of all is worth `worth` millionths.
    pub fn held(kind: Kind, round: u64, candidates: u64, worth: u64, now: Duration) -> Trial {
        Trial::new(Some(Held { kind, round, step: Step::Baseline, candidates, worth, asked: 0 }), now)
    }

    /// A trial of promotions that go on. `before`: speeds before the first.
    pub fn alongside(before: VecDeque<Speed>, now: Duration) -> Trial {
        Trial { before, ..Trial::new(None, now) }
    }

    /// Whether candidates wait for it.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Whether speeds are those before its promotions.
    pub fn takes_baseline(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.step == Step::Baseline)
    }

    /// Whether speeds are those after its promotions.
    pub fn compares(&self) -> bool {
        self.held.as_ref().is_none_or(|held| held.step == Step::Comparing)
    }

    /// Number of further intervals without which candidates have waited for nothing, with `known` speeds so far.
    pub fn intervals_left(&self, known: usize) -> u32 {
        match self.held.as_ref().map(|held| held.step) {
            Some(Step::Baseline) => INTERVALS_MIN - known.min(BASELINE) as u32,
            Some(Step::Treating { .. }) => INTERVALS_MIN - BASELINE as u32,
            Some(Step::Comparing) | None => 0,
        }
    }

    /// Whether it has promoted a window, so that speeds before it are those before another promotion.
    pub fn has_promoted(&self) -> bool {
        self.promoted.iter().any(|windows| *windows > 0)
    }

    /// Number of windows promoted, by kind.
    pub fn promoted_by_kind(&self) -> &[u64; KINDS] {
        &self.promoted
    }

    /// Number of candidates that wait for it, when it began.
    pub fn candidates(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.candidates)
    }

    /// The kind that waits for it.
    pub fn kind(&self) -> Option<Kind> {
        self.held.as_ref().map(|held| held.kind)
    }

    /// Speeds before its promotions that no pair has used.
    pub fn take_before(&mut self) -> VecDeque<Speed> {
        core::mem::take(&mut self.before)
    }

    /// Windows to which promotion added pages.
    pub fn take_added(&mut self) -> Vec<WindowIndex> {
        core::mem::take(&mut self.added)
    }

    /// Notes a promotion.
    pub fn note(&mut self, window: WindowIndex, kind: Kind, has_added: bool) {
        self.promoted[kind.index()] += 1;
        if has_added && self.is_held() {
            self.added.push(window);
        }
    }

    /// Whether a candidate may be promoted while others wait.
    pub fn admits(&mut self, window: WindowIndex, kind: Kind) -> bool {
        let promoted = self.promoted[kind.index()];
        let Some(held) = &mut self.held else { return true };
        let is_turn = held.kind == kind && matches!(held.step, Step::Treating { .. });
        let has_room = promoted + held.asked < held.candidates / PART;
        let admits = is_turn && has_room && is_treated(window, held.round);
        held.asked += u64::from(admits);
        admits
    }

    /// Goes to the next step of a held trial where it can. `speeds`: those since the latest promotion. Returns what to
    /// conclude at once, if anything.
    pub fn advance(&mut self, now: Duration, speeds: &VecDeque<Speed>) -> Option<Finding> {
        let Some(held) = &mut self.held else {
            return (now.saturating_sub(self.began_at) > ALONGSIDE_MAX).then_some(Finding::Unclear);
        };
        let (asked, promoted) = (core::mem::take(&mut held.asked), self.promoted[held.kind.index()]);
        match held.step {
            Step::Baseline if !is_steady(speeds.iter(), held.worth / PART) => return Some(Finding::Unclear),
            Step::Baseline if speeds.len() >= BASELINE => {
                held.step = Step::Treating { since: now };
                self.before.clone_from(speeds);
            }
            Step::Treating { .. } if asked == 0 && promoted >= TREATED_MIN => held.step = Step::Comparing,
            Step::Treating { since } if now.saturating_sub(since) > TREATING_MAX => return Some(Finding::Unclear),
            Step::Baseline | Step::Treating { .. } | Step::Comparing => {}
        }
        None
    }

    /// Pairs the speed after with the nearest one before that is left. Returns the finding, if it is the last pair.
    pub fn pair(&mut self, after: Speed) -> Option<Finding> {
        if !self.is_held() && self.gains.is_empty() {
            if self.promoted.iter().sum::<u64>() < CANDIDATES_MIN {
                return Some(Finding::TooFew);
            }
            if is_drifting(self.before.iter()) {
                return Some(Finding::Unclear);
            }
        }
        let Some(before) = self.before.pop_back() else { return Some(Finding::Unclear) };
        let gain = after.gain_on(before);
        self.faster.add(gain > 0);
        self.gains.push(u64::try_from(gain).unwrap_or(0));
        if let Some(worth) = self.worth_of_promoted() {
            self.no_gain.add(gain.unsigned_abs() < worth);
        }
        if self.faster.is_decided() {
            Some(Finding::Faster(self.median_gain()))
        } else if self.no_gain.is_decided() {
            Some(Finding::NoGain)
        } else {
            self.before.is_empty().then_some(Finding::Unclear)
        }
    }

    /// Gain in millionths that the windows promoted by a held trial are worth, as their part of the candidates.
    fn worth_of_promoted(&self) -> Option<u64> {
        let held = self.held.as_ref()?;
        Some(held.worth * self.promoted[held.kind.index()] / held.candidates.max(1))
    }

    fn median_gain(&mut self) -> u64 {
        median(&mut self.gains, Ord::cmp, u64::midpoint).unwrap_or(0)
    }
}

/// Gain in millionths of a guest's speed that the promotion of some windows is worth, by the cycles per second that it
/// is assumed to save: a 32nd of what is assumed, and at most the policy's parameter. GUPS gains a thirteenth of what
/// is assumed of it, since the assumption is an upper limit.
pub(super) fn worth(assumed_per_s: u64, scale: Scale) -> u64 {
    const PART_OF_ASSUMED: u128 = 32;
    let assumed = u128::from(assumed_per_s) * u128::from(MILLION) / u128::from(scale.core_per_s.max(1));
    u64::try_from(assumed / PART_OF_ASSUMED).unwrap_or(u64::MAX).min(scale.worth_max)
}

const _: () = assert!(BASELINE > PAIRS_MIN, "a trial may lose a pair and still decide");

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind::new(true, true);

    fn speeds(values: impl IntoIterator<Item = u64>) -> VecDeque<Speed> {
        values.into_iter().map(|value| Speed { value, counted: MILLION }).collect()
    }

    fn level(count: usize) -> VecDeque<Speed> {
        speeds(core::iter::repeat_n(1_000_000, count))
    }

    #[test]
    fn one_window_in_twenty_is_treated_and_they_lie_evenly() {
        let treated = |from: u64, round| (from..from + 200).filter(|n| is_treated(WindowIndex::new(*n), round)).count();
        for (from, round) in [(0, 0), (7, 1), (123_456, 19), (1 << 40, 5)] {
            assert!((8..=12).contains(&treated(from, round)), "{} from {from}", treated(from, round));
        }
        let rounds = |window| (0..PART).filter(|round| is_treated(WindowIndex::new(window), *round)).count();
        assert!((0..1000).all(|window| rounds(window) == 1), "each window has its turn in exactly one round");
    }

    #[test]
    fn speeds_are_steady_within_the_worth_and_without_a_drift() {
        assert!(is_steady(level(10).iter(), 100));
        let steps = |step: u64| speeds((0..10).map(|n| 1_000_000 + n % 2 * step));
        assert_eq!([100, 102].map(|step| is_steady(steps(step).iter(), 100)), [true, false]);
        assert!(!is_steady(speeds((0..10).map(|n| 1_000_000 + 50 * n)).iter(), 100), "each step is small, the sum not");
        let coarse = Speed { value: 1_000_000, counted: 19_999 };
        assert!(!is_steady([coarse; 10].iter(), 100), "one unit more would be half of the worth");
    }

    /// Baseline, then one in twenty of 200 candidates with an assumed worth of 2 %: a tenth of a per cent of the speed.
    fn compared(gain: i64) -> Option<Finding> {
        let mut trial = Trial::held(KIND, 0, 200, MILLION / 50, Duration::ZERO);
        let before = level(BASELINE);
        let admitted = |trial: &mut Trial| (0..200).filter(|n| trial.admits(WindowIndex::new(*n), KIND)).count();
        assert_eq!((trial.advance(Duration::ZERO, &before), admitted(&mut trial)), (None, 10), "after the baseline");
        (0..10).for_each(|n| trial.note(WindowIndex::new(n), KIND, false));
        assert_eq!(trial.advance(Duration::ZERO, &before), None, "those were asked for at this plan");
        assert_eq!((admitted(&mut trial), trial.compares()), (0, false), "all of the part are promoted");
        assert_eq!((trial.advance(Duration::ZERO, &before), trial.compares()), (None, true));
        let after = Speed { value: (1_000_000 + gain) as u64, counted: MILLION };
        (0..BASELINE).find_map(|_| trial.pair(after))
    }

    #[test]
    fn a_gain_and_a_gain_below_the_worth_are_found() {
        assert_eq!(compared(1_500), Some(Finding::Faster(1_500)));
        assert_eq!(compared(1), Some(Finding::Faster(1)), "a small gain is one: the copy costs less");
        assert_eq!([compared(0), compared(-300)], [Some(Finding::NoGain); 2]);
        assert_eq!(compared(-20_000), Some(Finding::Unclear), "no promotion makes a guest slower");
    }

    #[test]
    fn a_trial_alongside_never_stops_anything() {
        let slower = Speed { value: 900_000, counted: MILLION };
        let faster = Speed { value: 1_100_000, counted: MILLION };
        let found = |promoted, before, after| {
            let mut trial = Trial::alongside(before, Duration::ZERO);
            (0..promoted).for_each(|n| trial.note(WindowIndex::new(n), KIND, true));
            (0..16).find_map(|_| trial.pair(after))
        };
        assert_eq!(found(60, level(16), slower), Some(Finding::Unclear));
        assert_eq!(found(60, level(16), faster), Some(Finding::Faster(100_000)));
        assert_eq!(found(59, level(16), faster), Some(Finding::TooFew));
        let rising = speeds((0..16).map(|n| 1_000_000 + n));
        assert_eq!(found(60, rising, faster), Some(Finding::Unclear), "it became faster before as well");
    }

    #[test]
    fn a_guest_without_steady_speed_or_with_windows_that_refuse_is_unclear() {
        let noisy = speeds([1_000_000, 1_010_000, 1_000_000]);
        let mut trial = Trial::held(KIND, 0, 200, MILLION / 50, Duration::ZERO);
        assert_eq!(trial.advance(Duration::ZERO, &noisy), Some(Finding::Unclear));
        let mut trial = Trial::held(KIND, 0, 200, MILLION / 50, Duration::ZERO);
        assert_eq!(trial.advance(Duration::ZERO, &level(BASELINE)), None);
        assert_eq!(trial.advance(Duration::from_millis(501), &level(BASELINE)), Some(Finding::Unclear));
    }

    #[test]
    fn the_worth_is_a_32nd_of_the_assumed_gain_and_at_most_the_parameter() {
        const CORE: u64 = 2_000_000_000;
        let scale = Scale { core_per_s: CORE, worth_max: 20_000 };
        assert_eq!([0, CORE / 100, CORE, u64::MAX].map(|per_s| worth(per_s, scale)), [0, 312, 20_000, 20_000]);
    }
}
