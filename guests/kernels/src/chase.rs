//! Chains of dependent loads, and the TLB levels that show as steps in the cost of a load.
//!
//! ```text
//!   pages   │·#······│··#·····│···#····│····#···│      one line of each page: TLB entries run out
//!   dense   │####    │                                 as many lines, packed: caches alone run out
//!
//!   ticks a load, pages less dense
//!            miss 2 ┤                  ┌──────────     the difference is translation: each step is a TLB level,
//!            miss 1 ┤      ┌───────────┘               its height the cost of a miss there,
//!                 0 ┤──────┘                           its place the entries of that level
//!                   └──────┴───────────┴─────▶ spots
//! ```
//!
//! The order of a chain is random, so that no prefetcher follows it. The method is that of Calibrator (Manegold,
//! Boncz, Kersten, "Optimizing Main-Memory Join on Modern Hardware", 2002), with the comparison of lmbench's `tlb`
//! instead of its choice of strides.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Platform;
use crate::test_pattern::FACTOR;

/// Cache line in bytes. x86-64 CPUs have no other size.
const LINE_BYTES: u64 = 64;
const LINE_WORDS: u64 = LINE_BYTES / 8;
/// Number of repetitions of a run. The shortest counts, since interruptions only lengthen a run.
const TRIES: u32 = 4;
/// Most doublings of the loads of a run until it is long enough.
const DOUBLINGS_MAX: u32 = 32;

/// Placement of the spots of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// One spot per line, line after line.
    Dense,
    /// One line in every stretch of `stride` bytes, somewhere in its first `page` bytes.
    Pages {
        /// Distance from page to page in bytes, a multiple of the page.
        stride: u64,
        /// Assumed page size in bytes, a power of two, at least a line.
        page: u64,
    },
}

impl Spacing {
    /// Index of the word that is a spot.
    ///
    /// The line within the page moves on by one with each page, and by one more after as many pages as a page has
    /// lines. So the spots fill the sets of every cache evenly if consecutive bits of the address select its sets,
    /// and every cache has as much room for them as for dense lines.
    pub const fn word(self, spot: u64) -> u64 {
        match self {
            Self::Dense => spot * LINE_WORDS,
            Self::Pages { stride, page } => {
                let lines = page / LINE_BYTES;
                spot * (stride / 8) + (spot + spot / lines) % lines * LINE_WORDS
            }
        }
    }

    /// Bytes from the first spot to the end of the last spot's stretch.
    pub const fn bytes(self, spots: u64) -> u64 {
        match self {
            Self::Dense => spots * LINE_BYTES,
            Self::Pages { stride, .. } => spots * stride,
        }
    }
}

/// A cycle of words, each of which holds the index of the next.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'m> {
    words: &'m [AtomicU64],
    spots: u64,
    first: u64,
}

impl<'m> Chain<'m> {
    /// Links that many spots in a random order, which depends on their number only.
    ///
    /// # Panics
    /// Panics if there are no spots, or if they do not fit into the words.
    pub fn link(words: &'m [AtomicU64], spots: u64, spacing: Spacing) -> Self {
        assert!(spots > 0 && spacing.bytes(spots) / 8 <= words.len() as u64, "{spots} spots do not fit");
        let place = |spot| &words[spacing.word(spot) as usize];
        for spot in 0..spots {
            place(spot).store(spacing.word(spot), Ordering::Relaxed);
        }
        // Swapping each spot with a random one before it, and never with itself, gives a single cycle (Sattolo,
        // 1986).
        let mut state = spots;
        for spot in (1..spots).rev() {
            let other = place(random_below(&mut state, spot));
            let one = other.swap(place(spot).load(Ordering::Relaxed), Ordering::Relaxed);
            place(spot).store(one, Ordering::Relaxed);
        }
        Self { words, spots, first: spacing.word(0) }
    }

    /// Follows the chain until it is back at its beginning. Returns the number of loads, at most one more than
    /// there are spots. A number equal to that of the spots means that each was visited once.
    pub fn lap(&self) -> u64 {
        let mut at = self.first;
        (1..=self.spots)
            .find(|_| {
                at = self.next(at);
                at == self.first
            })
            .unwrap_or(self.spots + 1)
    }

    /// Whether a lap visits every spot.
    pub fn is_whole(&self) -> bool {
        self.lap() == self.spots
    }

    /// Ticks of one load: the minimum of several runs of at least `run_ticks` each.
    pub fn ticks_per_load(&self, platform: &dyn Platform, run_ticks: u64) -> f64 {
        let mut loads = self.spots;
        for _ in 0..DOUBLINGS_MAX {
            if self.time(platform, loads) >= run_ticks {
                break;
            }
            loads *= 2;
        }
        let least = (0..TRIES).map(|_| self.time(platform, loads)).min().unwrap_or(0);
        least as f64 / loads as f64
    }

    /// Ticks of that many loads.
    fn time(&self, platform: &dyn Platform, loads: u64) -> u64 {
        let start = platform.now();
        let end = (0..loads).fold(self.first, |at, _| self.next(at));
        // The result must be consumed, or the measured time would not include the loads.
        core::hint::black_box(end);
        platform.now().saturating_sub(start)
    }

    #[inline(always)]
    fn next(&self, at: u64) -> u64 {
        self.words[at as usize].load(Ordering::Relaxed)
    }
}

/// A number below `limit`, from a Weyl sequence with its high bits scrambled by a product.
fn random_below(state: &mut u64, limit: u64) -> u64 {
    *state = state.wrapping_add(FACTOR);
    let mixed = (*state ^ *state >> 32).wrapping_mul(FACTOR);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(FACTOR);
    ((u128::from(mixed) * u128::from(limit)) >> 64) as u64
}

/// Points of a curve in each doubling of the spots: close enough to distinguish 64 from 72 entries.
pub const POINTS_PER_DOUBLING: u64 = 8;
/// Largest number of points of a curve: 2^26 spots, 256 GiB of 4 KiB pages.
pub const POINTS_MAX: usize = 8 * 24;

/// Number of spots at a point: 8, 9, …, 15, 16, 18, …, 30, 32, 36, ….
pub const fn spots_at(point: usize) -> u64 {
    let point = point as u64;
    (POINTS_PER_DOUBLING + point % POINTS_PER_DOUBLING) << (point / POINTS_PER_DOUBLING)
}

/// Cost of a load over a growing number of spots, in ticks, point by point as [`spots_at`].
#[derive(Clone, Copy, Debug)]
pub struct Curve {
    ticks: [f64; POINTS_MAX],
    points: usize,
}

impl Curve {
    /// Creates a curve of up to that many spots, with nothing measured yet.
    pub fn up_to(spots: u64) -> Self {
        let points = (0..POINTS_MAX).take_while(|point| spots_at(*point) <= spots).count();
        Self { ticks: [f64::INFINITY; POINTS_MAX], points }
    }

    /// Creates a curve from measured values.
    pub fn from_ticks(ticks: impl IntoIterator<Item = f64>) -> Self {
        let mut curve = Self { ticks: [f64::INFINITY; POINTS_MAX], points: 0 };
        for (place, ticks) in curve.ticks.iter_mut().zip(ticks) {
            *place = ticks;
            curve.points += 1;
        }
        curve
    }

    /// The measured values.
    pub fn ticks(&self) -> &[f64] {
        &self.ticks[..self.points]
    }

    /// Measures every point once more and keeps the minimum. Returns the number of chains that were not whole.
    fn improve(&mut self, platform: &dyn Platform, words: &[AtomicU64], spacing: Spacing, run_ticks: u64) -> u64 {
        let mut broken = 0;
        for (point, ticks) in self.ticks[..self.points].iter_mut().enumerate() {
            let chain = Chain::link(words, spots_at(point), spacing);
            // This lap warms caches and TLB too.
            broken += u64::from(!chain.is_whole());
            *ticks = ticks.min(chain.ticks_per_load(platform, run_ticks));
        }
        broken
    }

    /// This curve minus another with as many points: the cost of pages beyond that of lines.
    fn less(&self, other: &Self) -> Self {
        Self::from_ticks(self.ticks().iter().zip(other.ticks()).map(|(one, other)| one - other))
    }
}

/// Fewest points of a plateau: half a doubling.
const PLATEAU_POINTS: usize = 4;
/// Tolerance in ticks within which a plateau is flat. Calibrator takes one cycle of clocks that were as fast as
/// their counters; today's cores are up to twice as fast.
const FLAT_TICKS: f64 = 2.0;
/// Fewest ticks between two plateaus of different levels: the fastest second TLB takes 7 cycles, 5 ticks of such a
/// clock.
const STEP_TICKS: f64 = 3.0;
/// A level still holds the spots if at most this fraction of them misses; see [`Levels::of`].
const HOLDING: f64 = 0.25;
/// Most levels that are reported: CPUs have two, and page tables that leave one cache after the other make more
/// steps.
pub const LEVELS_MAX: usize = 4;

/// A level of the TLB, or of a cache that holds the page tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Largest number of spots that it holds.
    pub entries: u64,
    /// Extra ticks of a load that misses there.
    pub miss_ticks: f64,
    /// Range of the cost of missing loads: from the lowest to the highest point of their plateau, in ticks.
    pub spread_ticks: f64,
}

/// The levels of a curve, from the fastest to the slowest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Levels {
    found: [Option<Level>; LEVELS_MAX],
}

impl Levels {
    /// Finds the levels by this rule:
    /// 1. More spots never cost less, and noise only adds: each point counts as the minimum of itself and all
    ///    behind it.
    /// 2. A plateau is a run of at least four points within two ticks, from left to right, each as long as it can be.
    /// 3. A plateau with a mean less than three ticks above the one before is not a level of its own.
    /// 4. Between two levels, the cost of a miss is the distance of their means. The entries are the spots at the
    ///    last point that is at most a quarter of it above the lower one.
    ///
    /// The reason for a quarter: a level that replaces its oldest entry misses all at once, and one that replaces a
    /// random entry does not. Of n spots in N entries a part m misses, where m = 1 − exp(−m·n/N), and that is a
    /// quarter at n = 1.15·N, a point further.
    pub fn of(curve: &Curve) -> Self {
        let mut ticks = curve.ticks;
        let ticks = &mut ticks[..curve.points];
        let mut least = f64::INFINITY;
        for value in ticks.iter_mut().rev() {
            least = least.min(*value);
            *value = least;
        }
        let mut levels = Self::default();
        let mut places = levels.found.iter_mut();
        let Some(mut below) = Plateau::first(ticks, 0) else { return levels };
        let mut from = below.end;
        while let Some(above) = Plateau::first(ticks, from) {
            from = above.end;
            if above.mean - below.mean < STEP_TICKS {
                continue;
            }
            let Some(place) = places.next() else { break };
            let miss_ticks = above.mean - below.mean;
            let holding = ticks.partition_point(|value| *value <= below.mean + HOLDING * miss_ticks);
            *place = Some(Level { entries: spots_at(holding - 1), miss_ticks, spread_ticks: above.spread });
            below = above;
        }
        levels
    }

    /// The levels, fastest first.
    pub fn iter(&self) -> impl Iterator<Item = Level> {
        self.found.iter().copied().flatten()
    }

    /// Whether two measurements agree: the same number of levels, entries at most one point apart, costs within two
    /// ticks.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let is_near = |(one, other): (Level, Level)| {
            let (less, more) = (one.entries.min(other.entries), one.entries.max(other.entries));
            (more - less) * POINTS_PER_DOUBLING <= more && (one.miss_ticks - other.miss_ticks).abs() <= FLAT_TICKS
        };
        self.iter().count() == other.iter().count() && self.iter().zip(other.iter()).all(is_near)
    }
}

/// Number of rounds in a row that must find the levels of the round before, as libhugetlbfs asks of Calibrator.
const MATCHES: u64 = 3;

/// A measurement of the TLB, repeated in rounds until it agrees with itself.
///
/// ```text
///   round:  every footprint, spots one a page and packed ─▶ keep the least of all rounds ─▶ levels
///           ─▶ those of the round before?
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Survey {
    spacing: Spacing,
    run_ticks: u64,
    pages: Curve,
    dense: Curve,
    levels: Levels,
    rounds: u64,
    matches: u64,
    chains: u64,
    broken: u64,
}

impl Survey {
    /// Creates a survey of up to that many spots, without any round yet; each run takes at least `run_ticks`.
    pub fn new(spacing: Spacing, spots: u64, run_ticks: u64) -> Self {
        let curve = Curve::up_to(spots);
        let levels = Levels::default();
        Self { spacing, run_ticks, pages: curve, dense: curve, levels, rounds: 0, matches: 0, chains: 0, broken: 0 }
    }

    /// Measures every point once more, in these words.
    ///
    /// # Panics
    /// Panics if the spots do not fit into them.
    pub fn add_round(&mut self, platform: &dyn Platform, words: &[AtomicU64]) {
        self.broken += self.pages.improve(platform, words, self.spacing, self.run_ticks);
        self.broken += self.dense.improve(platform, words, Spacing::Dense, self.run_ticks);
        self.chains += (self.pages.points + self.dense.points) as u64;
        self.take_levels(Levels::of(&self.pages.less(&self.dense)));
    }

    /// Takes over the levels after another round.
    fn take_levels(&mut self, levels: Levels) {
        let is_match = self.rounds > 0 && levels.agrees_with(&self.levels);
        self.matches = if is_match { self.matches + 1 } else { 0 };
        self.rounds += 1;
        self.levels = levels;
    }

    /// Whether each of the last three rounds agreed with the round before it.
    pub const fn is_settled(&self) -> bool {
        self.matches >= MATCHES
    }

    /// Curve of loads of spots, one a page.
    pub const fn pages(&self) -> &Curve {
        &self.pages
    }

    /// Curve of loads of as many lines, packed.
    pub const fn dense(&self) -> &Curve {
        &self.dense
    }

    /// The levels of the minimum curves so far.
    pub const fn levels(&self) -> &Levels {
        &self.levels
    }

    /// Number of rounds so far.
    pub const fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Number of rounds in a row, up to the last, that agreed with the one before.
    pub const fn matches(&self) -> u64 {
        self.matches
    }

    /// Number of chains that were followed.
    pub const fn chains(&self) -> u64 {
        self.chains
    }

    /// Chains that did not visit every spot, which means that the memory is at fault.
    pub const fn broken(&self) -> u64 {
        self.broken
    }
}

/// A flat piece of a curve that never falls.
struct Plateau {
    /// Index behind its last point.
    end: usize,
    mean: f64,
    spread: f64,
}

impl Plateau {
    /// The first plateau at or behind a point.
    fn first(ticks: &[f64], from: usize) -> Option<Self> {
        (from..ticks.len()).find_map(|start| {
            let lowest = ticks[start];
            let flat = &ticks[start..start + ticks[start..].partition_point(|value| *value <= lowest + FLAT_TICKS)];
            let highest = *flat.last()?;
            (flat.len() >= PLATEAU_POINTS).then(|| Self {
                end: start + flat.len(),
                mean: flat.iter().sum::<f64>() / flat.len() as f64,
                spread: highest - lowest,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::native;

    const FOUR_KIB: Spacing = Spacing::Pages { stride: 4096, page: 4096 };

    /// A curve up to 16384 spots with this cost of a load.
    fn curve(cost: impl Fn(u64) -> f64) -> Curve {
        let points = Curve::up_to(16384).points;
        Curve::from_ticks((0..points).map(|point| cost(spots_at(point))))
    }

    fn levels(cost: impl Fn(u64) -> f64) -> Vec<Level> {
        Levels::of(&curve(cost)).iter().collect()
    }

    #[test]
    fn the_points_are_eighths_of_a_doubling() {
        let spots: Vec<_> = (0..18).map(spots_at).collect();
        assert_eq!(spots, [8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36]);
        assert_eq!(Curve::up_to(64).points, 25);
        assert_eq!(Curve::up_to(71).points, 25);
    }

    #[test]
    fn a_chain_visits_every_spot_once_wherever_the_spots_are() {
        let words: Vec<_> = (0..512 * 100).map(AtomicU64::new).collect();
        for spacing in [Spacing::Dense, FOUR_KIB, Spacing::Pages { stride: 8192, page: 4096 }] {
            for spots in [1, 2, 3, 50] {
                assert!(Chain::link(&words, spots, spacing).is_whole(), "{spots} spots, {spacing:?}");
            }
        }
    }

    #[test]
    fn a_chain_that_lost_a_link_is_not_whole() {
        let words: Vec<_> = (0..512 * 8).map(AtomicU64::new).collect();
        let chain = Chain::link(&words, 8, FOUR_KIB);
        words[FOUR_KIB.word(5) as usize].store(FOUR_KIB.word(5), Ordering::Relaxed);
        assert!(!chain.is_whole());
    }

    #[test]
    fn spots_of_pages_are_one_a_page_and_fill_cache_sets_evenly() {
        // A cache of 1024 sets of lines: 1024 spots fall into different sets, although the page number determines
        // only four of their ten bits.
        let mut used = vec![0; 1024];
        for spot in 0..1024 {
            let word = FOUR_KIB.word(spot);
            assert_eq!(word / 512, spot);
            used[(word / LINE_WORDS % 1024) as usize] += 1;
        }
        assert_eq!(used, vec![1; 1024]);
    }

    #[test]
    fn a_curve_is_measured_and_its_chains_are_whole() {
        let words: Vec<_> = (0..512 * 32).map(AtomicU64::new).collect();
        native::run(1, 0, Box::new(|_| ()), |platform| {
            let mut curve = Curve::up_to(32);
            assert_eq!(curve.improve(platform, &words, FOUR_KIB, 1000), 0);
            assert_eq!(curve.points, 17);
            assert!(curve.ticks().iter().all(|ticks| *ticks > 0.0 && ticks.is_finite()), "{curve:?}");
        });
    }

    #[test]
    fn two_sharp_steps_are_two_levels() {
        let found = levels(|spots| match spots {
            0..=72 => 0.2,
            73..=3072 => 6.0,
            _ => 30.5,
        });
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].entries, found[1].entries), (72, 3072));
        assert!((found[0].miss_ticks - 5.8).abs() < 1e-9 && (found[1].miss_ticks - 24.5).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn the_entries_of_a_slope_are_where_a_quarter_misses() {
        // From 1024 spots on a growing part of them misses, until all do at 2048.
        let found = levels(|spots| 20.0 * (spots as f64 / 1024.0 - 1.0).clamp(0.0, 1.0));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].entries, 1280);
        assert!((found[0].miss_ticks - 20.0).abs() < FLAT_TICKS, "{found:?}");
    }

    #[test]
    fn random_replacement_moves_the_entries_by_a_point_at_most() {
        let missing = |spots: u64| {
            // The fixed point of m = 1 - exp(-m n/N), from above.
            let ratio = spots as f64 / 3072.0;
            (0..10_000).fold(1.0_f64, |m, _| 1.0 - libm::exp(-m * ratio))
        };
        let found = levels(|spots| 5.0 + 40.0 * missing(spots));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!([3072, 3328, 3584].contains(&found[0].entries), "{found:?}");
    }

    #[test]
    fn a_disturbed_point_is_not_a_level() {
        let found = levels(|spots| match spots {
            256 => 300.0,
            288 => 40.0,
            0..=1024 => 0.0,
            _ => 9.0,
        });
        assert_eq!(found.iter().map(|level| level.entries).collect::<Vec<_>>(), [1024]);
    }

    #[test]
    fn a_flat_curve_and_an_empty_one_have_no_level() {
        assert_eq!(levels(|_| 4.0), []);
        assert_eq!(levels(|spots| 2.9 * f64::from(u8::from(spots > 100))), []);
        assert_eq!(Levels::of(&Curve::up_to(7)).iter().count(), 0);
    }

    #[test]
    fn a_survey_is_settled_when_three_rounds_in_a_row_agree_with_the_one_before() {
        let of = |entries: u64| Levels::of(&curve(|spots| if spots > entries { 9.0 } else { 0.0 }));
        let mut survey = Survey::new(FOUR_KIB, 64, 0);
        let settled = [64, 64, 64, 512, 512, 512, 512].map(|entries| {
            survey.take_levels(of(entries));
            survey.is_settled()
        });
        assert_eq!(settled, [false, false, false, false, false, false, true]);
        assert_eq!((survey.rounds(), survey.matches()), (7, 3));
    }

    #[test]
    fn measurements_agree_within_a_point_and_two_ticks() {
        let of = |entries: u64, ticks: f64| Levels::of(&curve(|spots| if spots > entries { ticks } else { 0.0 }));
        assert!(of(64, 10.0).agrees_with(&of(72, 11.9)));
        assert!(!of(64, 10.0).agrees_with(&of(80, 10.0)));
        assert!(!of(64, 10.0).agrees_with(&of(64, 12.5)));
        assert!(!of(64, 10.0).agrees_with(&of(64, 0.0)));
    }
}
