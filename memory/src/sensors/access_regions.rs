//! Regions of neighbouring windows that a guest uses alike, for guests so large that a sample of each window takes too
//! long. A round samples one window of each region, so that its cost is bounded by the number of regions and does not
//! grow with the guest. Regions adapt to what the samples show.
//!
//! ```text
//!   samples of a region, by row    - - - - x x x - - -       x: touched
//!   cut around what differs        [- - - -)[x x x)[- - -)   by halves: the border lies between the nearest samples
//!   neighbours that are alike      [- - - -)[- - -)          become one, while there are more regions than needed
//! ```
//!
//! DAMON (mm/damon/core.c) adapts its regions too. It cuts at random places, since it has only a count for each region.
//! Here each sample is of a known window, so that a cut is made where the results differ.

use std::cmp::Reverse;
use std::iter::once;
use std::ops::Range;
use std::time::Duration;

use wideleaf_policies::{AccessHistory, Moment, WindowIndex};

/// Number of samples that a region keeps: as many as a history has.
const SAMPLES_KEPT: usize = AccessHistory::SAMPLES_MAX as usize;

/// Number of the newest of these that say where a region is cut, what it is like, and how often it is touched: after as
/// many rounds a change is known in full.
const NEWEST: usize = 8;

/// Number of a region's newest samples that outweigh an older sample of one of its windows.
const SETTLED_AFTER: usize = 4;

/// Minimum number of samples of two regions that are alike: with fewer, equal results may be chance.
const ALIKE_LEAST: usize = 4;

/// Lower limit of the largest number of regions, whatever a sample costs: a guest of 64 GiB then has regions of half
/// a gibibyte.
const MOST_LEAST: usize = 128;

/// Part of the guest that a region may be after it has grown by another one.
const WIDEST_PART: usize = 64;

/// A sample of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSample {
    /// Row of the window in the guest.
    pub row: usize,
    /// Whether the guest touched the window.
    pub was_touched: bool,
    /// Time to the touch, or to the end of the sample; `None` if the sampler does not measure it.
    pub watched_for: Option<Duration>,
    /// End of the sample.
    pub at: Moment,
}

/// Result for all windows of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionHeat {
    /// Rows of its windows.
    pub rows: Range<usize>,
    /// Samples of its windows, in the order of time.
    pub history: AccessHistory,
    /// End of the newest sample.
    pub newest: Moment,
    /// End of the first of the samples that outweigh a window's own; `None` while there are fewer.
    settled: Option<Moment>,
}

impl RegionHeat {
    /// Whether this is the better result for a window with this newest sample of its own: because it has none, or an
    /// old one and the region differs from it now. Otherwise its own samples tell more of it.
    pub fn is_better_than(&self, own: Option<(bool, Moment)>) -> bool {
        own.is_none_or(|(was_touched, at)| {
            self.history.was_touched() != Some(was_touched) && self.settled.is_some_and(|settled| at < settled)
        })
    }
}

/// All regions of one guest.
#[derive(Clone, Debug)]
pub struct AccessRegions {
    /// They cover all rows without a gap, by ascending row; none is empty.
    regions: Vec<Region>,
    windows: usize,
    /// Largest number of regions.
    most: usize,
    /// The number that [`AccessRegions::most`] moves to, a quarter of the way with each round: the measured cost of a
    /// sample goes up and down.
    wanted_most: usize,
    /// Number of regions that have had their turn in this round.
    next: usize,
}

impl AccessRegions {
    /// Equal regions of a guest of this many windows, half of `most`: the others are for what differs.
    pub fn new(windows: usize, most: usize) -> AccessRegions {
        let most = most.max(MOST_LEAST);
        let all = Region { rows: 0..windows, turns: 0, has_wanted: true, samples: Vec::new() };
        let regions = if windows > 0 { vec![all] } else { Vec::new() };
        let mut regions = AccessRegions { regions, windows, most, wanted_most: most, next: 0 };
        regions.halve();
        regions
    }

    /// Sets the largest number of regions from now on.
    pub fn set_most(&mut self, most: usize) {
        self.wanted_most = most.max(MOST_LEAST);
    }

    /// Number of regions now.
    pub fn number(&self) -> usize {
        self.regions.len()
    }

    /// The next windows to be sampled: at most `number`, each of another region, out of `wanted`, which ascend.
    /// `windows`: all windows by row. A share ends with its round, after which the regions adapt.
    pub fn next_share(&mut self, windows: &[WindowIndex], wanted: &[WindowIndex], number: usize) -> Vec<WindowIndex> {
        let mut share = Vec::with_capacity(number);
        // The rest of a round may have no wanted window: then the next round begins at once.
        for _ in 0..2 {
            while share.len() < number && self.next < self.regions.len() {
                share.extend(self.regions[self.next].choose(windows, wanted));
                self.next += 1;
            }
            if self.next == self.regions.len() {
                self.next = 0;
                self.adapt();
            }
            if !share.is_empty() || number == 0 {
                break;
            }
        }
        share
    }

    /// Adds a sample to the region of its window.
    pub fn add(&mut self, sample: RegionSample) {
        let index = self.index_of(sample.row);
        if let Some(region) = self.regions.get_mut(index) {
            region.add(sample);
        }
    }

    /// Result of the newest sample in the region of a window; `None` before the first.
    pub fn was_touched(&self, row: usize) -> Option<bool> {
        let region = self.regions.get(self.index_of(row))?;
        region.samples.last().map(|sample| sample.was_touched)
    }

    /// Results of all regions that have any.
    pub fn heat(&self) -> impl Iterator<Item = RegionHeat> + '_ {
        self.regions.iter().filter_map(Region::heat)
    }

    fn index_of(&self, row: usize) -> usize {
        self.regions.partition_point(|region| region.rows.end <= row)
    }

    fn adapt(&mut self) {
        self.most = (self.most * 3 + self.wanted_most) / 4;
        while self.merge(usize::MAX, self.windows, |first, second| !first.has_wanted && !second.has_wanted) > 0 {}
        while self.regions.len() > self.most {
            let surplus = self.regions.len() - self.most;
            if self.merge(surplus, self.windows, Region::is_like) == 0 {
                self.merge(surplus, self.windows, |_, _| true);
            }
        }
        let widest = self.windows / WIDEST_PART;
        self.merge(self.regions.len().saturating_sub(self.most / 2), widest, Region::is_like);
        self.cut();
        self.halve();
    }

    /// Merges up to `surplus` pairs of neighbours for which `may` holds, the narrowest first, and none to more than
    /// `widest` windows. Returns the number of pairs.
    fn merge(&mut self, surplus: usize, widest: usize, may: impl Fn(&Region, &Region) -> bool) -> usize {
        let pair_of = |second: usize| {
            let (first, second_region) = (&self.regions[second - 1], &self.regions[second]);
            let width = first.width() + second_region.width();
            (width <= widest && may(first, second_region)).then_some((width, second))
        };
        let mut pairs: Vec<_> = (1..self.regions.len()).filter_map(pair_of).collect();
        pairs.sort_unstable();
        // Whether a region joins the one before it. No region is in two pairs.
        let mut joins = vec![false; self.regions.len() + 1];
        let mut number = 0;
        for (_, second) in pairs {
            if number < surplus && !joins[second - 1] && !joins[second + 1] {
                joins[second] = true;
                number += 1;
            }
        }
        let mut merged: Vec<Region> = Vec::with_capacity(self.regions.len() - number);
        for (region, joins) in std::mem::take(&mut self.regions).into_iter().zip(joins) {
            match merged.last_mut() {
                Some(before) if joins => before.take(region),
                _ => merged.push(region),
            }
        }
        self.regions = merged;
        number
    }

    /// Cuts regions with different results: those first in which a cut tells most of them apart, and of these the
    /// widest.
    fn cut(&mut self) {
        let cut_of = |(index, region): (usize, &Region)| Some((region.best_cut()?, region.width(), index));
        let mut cuts: Vec<_> = self.regions.iter().enumerate().filter_map(cut_of).collect();
        cuts.sort_by_key(|(cut, width, index)| (Reverse(cut.gain), Reverse(*width), *index));
        let mut free = self.most.saturating_sub(self.regions.len());
        let mut rows_of = vec![Vec::new(); self.regions.len()];
        for (cut, _, index) in cuts {
            if cut.rows.len() <= free {
                free -= cut.rows.len();
                rows_of[index] = cut.rows;
            }
        }
        let regions = std::mem::take(&mut self.regions).into_iter().zip(rows_of);
        self.regions = regions.flat_map(|(region, rows)| region.cut_at(&rows)).collect();
    }

    /// Halves the widest regions with wanted windows until there are half of the largest number.
    fn halve(&mut self) {
        while self.regions.len() < self.most / 2 {
            let may = |index: &usize| self.regions[*index].has_wanted && self.regions[*index].width() > 1;
            let widest = (0..self.regions.len()).filter(may).max_by_key(|index| self.regions[*index].width());
            let Some(index) = widest else { return };
            let region = self.regions.remove(index);
            let middle = region.rows.start + region.width() / 2;
            self.regions.splice(index..index, region.cut_at(&[middle]));
        }
    }
}

/// Windows with one result.
#[derive(Clone, Debug)]
struct Region {
    rows: Range<usize>,
    /// Number of windows chosen so far.
    turns: u32,
    /// Whether one of its windows was wanted at its latest turn, or it had none yet.
    has_wanted: bool,
    /// Latest samples of its windows, the newest last.
    samples: Vec<RegionSample>,
}

/// Places at which to cut a region.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    /// Number of samples that are in a part with others like them only after the cut.
    gain: usize,
    /// Rows at which the second and the third part begin.
    rows: Vec<usize>,
}

impl Region {
    fn width(&self) -> usize {
        self.rows.len()
    }

    /// One of the wanted windows. Steps of the golden ratio: any number of turns in a row is spread over all of them.
    fn choose(&mut self, windows: &[WindowIndex], wanted: &[WindowIndex]) -> Option<WindowIndex> {
        const GOLDEN: u32 = 0x9e37_79b9;
        let (first, last) = (*windows.get(self.rows.start)?, *windows.get(self.rows.end - 1)?);
        let begin = wanted.partition_point(|window| *window < first);
        let end = wanted.partition_point(|window| *window <= last);
        // Regions of the same width begin at different places.
        let step = self.turns.wrapping_add(self.rows.start as u32).wrapping_mul(GOLDEN);
        let at = (u64::from(step) * (end - begin) as u64) >> u32::BITS;
        let window = wanted[begin..end].get(at as usize).copied();
        self.has_wanted = window.is_some();
        self.turns = self.turns.wrapping_add(u32::from(self.has_wanted));
        window
    }

    fn add(&mut self, sample: RegionSample) {
        self.samples.push(sample);
        self.keep_the_newest();
    }

    fn keep_the_newest(&mut self) {
        let surplus = self.samples.len().saturating_sub(SAMPLES_KEPT);
        self.samples.drain(..surplus);
    }

    fn newest(&self) -> &[RegionSample] {
        &self.samples[self.samples.len().saturating_sub(NEWEST)..]
    }

    fn heat(&self) -> Option<RegionHeat> {
        let newest = self.samples.last()?.at;
        let add = |history: AccessHistory, sample: &RegionSample| history.with(sample.was_touched);
        let history = self.samples.iter().fold(AccessHistory::default(), add);
        let history = history.with_touches_per_s(touches_per_s(self.newest()));
        let settled = self.samples.len().checked_sub(SETTLED_AFTER).map(|index| self.samples[index].at);
        Some(RegionHeat { rows: self.rows.clone(), history, newest, settled })
    }

    /// Whether both have no touches, or both have them about as often.
    fn is_like(&self, other: &Region) -> bool {
        let (mine, others) = (self.newest(), other.newest());
        if mine.len().min(others.len()) < ALIKE_LEAST {
            return false;
        }
        let (mine_touched, others_touched) = (touched(mine), touched(others));
        if mine_touched == 0 || others_touched == 0 {
            return mine_touched == others_touched;
        }
        let difference = (mine_touched * others.len()).abs_diff(others_touched * mine.len());
        let is_as_often = match (touches_per_s(mine), touches_per_s(others)) {
            (Some(mine), Some(others)) => mine.max(others) <= mine.min(others).max(1).saturating_mul(4),
            _ => true,
        };
        difference * 4 <= mine.len() * others.len() && is_as_often
    }

    /// The next region becomes a part of this one.
    fn take(&mut self, next: Region) {
        self.rows.end = next.rows.end;
        self.turns = self.turns.max(next.turns);
        self.has_wanted |= next.has_wanted;
        self.samples.extend(next.samples);
        self.samples.sort_by_key(|sample| sample.at);
        self.keep_the_newest();
    }

    /// Whether its results differ only before and after one moment: the guest may use all of it otherwise since then,
    /// which the next samples show.
    fn has_changed_once(&self) -> bool {
        let newest = self.newest();
        newest.len() > SETTLED_AFTER
            && newest.windows(2).filter(|pair| pair[0].was_touched != pair[1].was_touched).count() == 1
    }

    /// The cut into two or three parts after which most samples are with others like them; `None` if no cut helps.
    fn best_cut(&self) -> Option<Cut> {
        if self.has_changed_once() {
            return None;
        }
        let mut samples = self.newest().to_vec();
        samples.sort_by_key(|sample| sample.row);
        let number = samples.len();
        // Samples in a part that differ from most of it.
        let odd = |part: Range<usize>| {
            let touched = touched(&samples[part.clone()]);
            touched.min(part.len() - touched)
        };
        // A part begins between two samples, and no window is cut.
        let may_begin = |at: usize| at == 0 || at == number || samples[at - 1].row < samples[at].row;
        let begin = |at: usize| (samples[at - 1].row + samples[at].row).div_ceil(2);
        let cut = |(first, second): (usize, usize)| {
            let left = odd(0..first) + odd(first..second) + odd(second..number);
            let inner = [first, second].into_iter().filter(|at| (1..number).contains(at));
            Cut { gain: odd(0..number) - left, rows: inner.map(begin).collect() }
        };
        let parts = (0..number).flat_map(|first| (first + 1..=number).map(move |second| (first, second)));
        let parts = parts.filter(|(first, second)| may_begin(*first) && may_begin(*second));
        let helps = |cut: &Cut| cut.gain > 0;
        parts.map(cut).filter(helps).max_by_key(|cut| (cut.gain, Reverse(cut.rows.len())))
    }

    /// Parts that begin at these rows, each with its own samples.
    fn cut_at(self, rows: &[usize]) -> Vec<Region> {
        let begins = once(self.rows.start).chain(rows.iter().copied());
        let ends = rows.iter().copied().chain(once(self.rows.end));
        let part = |(begin, end): (usize, usize)| Region {
            rows: begin..end,
            turns: self.turns,
            has_wanted: self.has_wanted,
            samples: self.samples.iter().copied().filter(|sample| (begin..end).contains(&sample.row)).collect(),
        };
        begins.zip(ends).map(part).collect()
    }
}

fn touched(samples: &[RegionSample]) -> usize {
    samples.iter().filter(|sample| sample.was_touched).count()
}

/// Touches over the time watched; `None` without samples that measure it.
fn touches_per_s(samples: &[RegionSample]) -> Option<u64> {
    let watched = samples.iter().map(|sample| sample.watched_for).sum::<Option<Duration>>()?;
    let touches = touched(samples) as u64;
    (touches * 1_000_000_000).checked_div(u64::try_from(watched.as_nanos()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_policies::PerTenThousand;

    /// Number of windows in 64 GiB.
    const WINDOWS: usize = 32 << 10;
    /// What half a per cent of a core pays for in a minute, at a third of a millisecond each.
    const SAMPLES_A_MINUTE: usize = 900;
    const SAMPLES_A_SECOND: usize = SAMPLES_A_MINUTE / 60;
    /// Time for which a window is watched.
    const WATCHED: Duration = Duration::from_millis(100);

    fn at(second: u64) -> Moment {
        Moment::after_start(Duration::from_secs(second))
    }

    fn all_windows(number: usize) -> Vec<WindowIndex> {
        (0..number as u64).map(WindowIndex::new).collect()
    }

    /// A guest that touches each window at random times, a given number of times a second.
    struct Guest {
        touches_per_s: Vec<u32>,
        random: u64,
    }

    impl Guest {
        fn new(hot: &[(Range<usize>, u32)]) -> Guest {
            let mut guest = Guest { touches_per_s: Vec::new(), random: 0x2545_f491_4f6c_dd1d };
            guest.work_on(hot);
            guest
        }

        fn work_on(&mut self, hot: &[(Range<usize>, u32)]) {
            self.touches_per_s = vec![0; WINDOWS];
            hot.iter().for_each(|(rows, touches)| self.touches_per_s[rows.clone()].fill(*touches));
        }

        /// Above zero, and at most one.
        fn random(&mut self) -> f64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            ((self.random >> 11) + 1) as f64 / (1_u64 << 53) as f64
        }

        fn sample(&mut self, row: usize, second: u64) -> RegionSample {
            let touched_after = -self.random().ln() / f64::from(self.touches_per_s[row]);
            let was_touched = touched_after < WATCHED.as_secs_f64();
            let watched_for = if was_touched { Duration::from_secs_f64(touched_after) } else { WATCHED };
            RegionSample { row, was_touched, watched_for: Some(watched_for), at: at(second) }
        }
    }

    /// A sensor of a guest of 64 GiB.
    struct Bed {
        guest: Guest,
        regions: AccessRegions,
        windows: Vec<WindowIndex>,
        second: u64,
        samples: usize,
        rounds: usize,
    }

    impl Bed {
        fn new(hot: &[(Range<usize>, u32)]) -> Bed {
            Bed {
                guest: Guest::new(hot),
                regions: AccessRegions::new(WINDOWS, SAMPLES_A_MINUTE),
                windows: all_windows(WINDOWS),
                second: 0,
                samples: 0,
                rounds: 0,
            }
        }

        /// Samples for a minute. Returns the number of samples, and of rounds that began.
        fn minute(&mut self) -> (usize, usize) {
            let before = (self.samples, self.rounds);
            for _ in 0..60 {
                self.second += 1;
                let share = self.regions.next_share(&self.windows, &self.windows, SAMPLES_A_SECOND);
                self.rounds += usize::from(self.regions.next == 0);
                self.samples += share.len();
                for window in share {
                    let sample = self.guest.sample(window.get() as usize, self.second);
                    self.regions.add(sample);
                }
            }
            (self.samples - before.0, self.rounds - before.1)
        }

        /// What the sensor says of each window: touches per second of its region.
        fn seen(&self) -> Vec<u32> {
            let mut seen = vec![0; WINDOWS];
            for heat in self.regions.heat() {
                let touches = heat.history.touches_per_s().expect("this guest's samples are timed");
                seen[heat.rows].fill(u32::try_from(touches).expect("few enough"));
            }
            seen
        }
    }

    /// Rank of each value among all, counted in halves so that equal ones share the middle of their places.
    fn ranks(values: &[u32]) -> Vec<f64> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        let rank = |value: &u32| {
            let (below, up_to) = (sorted.partition_point(|of| of < value), sorted.partition_point(|of| of <= value));
            (below + up_to) as f64 / 2.0
        };
        values.iter().map(rank).collect()
    }

    /// Spearman's rank correlation.
    fn spearman(first: &[u32], second: &[u32]) -> f64 {
        let (first, second) = (ranks(first), ranks(second));
        let mean = first.len() as f64 / 2.0;
        let product = |one: &[f64], other: &[f64]| -> f64 {
            one.iter().zip(other).map(|(one, other)| (one - mean) * (other - mean)).sum()
        };
        product(&first, &second) / (product(&first, &first) * product(&second, &second)).sqrt()
    }

    const HOT: [(Range<usize>, u32); 3] = [(1_000..3_000, 300), (9_000..9_040, 1_000), (20_000..26_000, 30)];

    #[test]
    fn sixty_four_gibibytes_are_seen_once_a_minute_by_nine_hundred_samples() {
        let mut bed = Bed::new(&HOT);
        for minute in 0..20 {
            let (samples, rounds) = bed.minute();
            assert!(samples <= SAMPLES_A_MINUTE && rounds >= 1, "minute {minute}: {samples} samples, {rounds} rounds");
            let seen: usize = bed.regions.heat().map(|heat| heat.rows.len()).sum();
            assert!(seen > WINDOWS * 99 / 100, "minute {minute}: {seen} windows have a result");
            assert!(bed.regions.number() <= SAMPLES_A_MINUTE);
        }
    }

    #[test]
    fn windows_are_ranked_as_the_guest_uses_them() {
        let mut bed = Bed::new(&HOT);
        (0..10).for_each(|_| {
            bed.minute();
        });
        let ranked_alike = spearman(&bed.guest.touches_per_s, &bed.seen());
        assert!(ranked_alike >= 0.9, "{ranked_alike}");
    }

    #[test]
    fn a_hot_range_of_400_mib_is_found_and_regions_become_narrow_at_its_borders() {
        /// A region is 64 or 128 windows at first.
        const WITHIN: usize = 32;
        let mut bed = Bed::new(&[(9_000..9_200, 1_000)]);
        (0..10).for_each(|_| {
            bed.minute();
        });
        let is_hot = |heat: &RegionHeat| heat.history.rate() >= Some(PerTenThousand::of(1, 2));
        let rows: Vec<_> = bed.regions.heat().filter(is_hot).map(|heat| heat.rows).collect();
        let (first, last) = (rows.first().expect("it is found").start, rows.last().expect("it is found").end);
        assert!(first.abs_diff(9_000) <= WITHIN && last.abs_diff(9_200) <= WITHIN, "{rows:?}");
    }

    #[test]
    fn regions_follow_a_guest_that_works_elsewhere_within_a_minute() {
        let mut bed = Bed::new(&[(1_000..5_000, 300)]);
        (0..5).for_each(|_| {
            bed.minute();
        });
        bed.guest.work_on(&[(25_000..29_000, 300)]);
        bed.minute();
        let is_in_use = |heat: &RegionHeat| heat.history.was_touched() == Some(true);
        let in_use: Vec<_> = bed.regions.heat().filter(is_in_use).map(|heat| heat.rows).collect();
        assert!(in_use.iter().all(|rows| rows.end > 25_000 && rows.start < 29_000), "{in_use:?}");
        // One region at each border is hot in part.
        let windows: usize = in_use.iter().map(Range::len).sum();
        assert!((4_000 - 1_024..=4_000 + 1_024).contains(&windows), "{windows} windows");
    }

    #[test]
    fn windows_that_are_touched_by_chance_do_not_use_up_what_pays_for_a_round() {
        // Half of the samples see a touch.
        let mut bed = Bed::new(&[(0..WINDOWS, 7)]);
        for minute in 0..20 {
            let (_, rounds) = bed.minute();
            assert!(rounds >= 1 && bed.regions.number() <= SAMPLES_A_MINUTE, "minute {minute}: {rounds} rounds");
        }
    }

    #[test]
    fn a_region_is_cut_around_the_samples_that_differ_and_no_window_is_cut() {
        let region = |samples: &[(usize, bool)]| {
            let sample = |(second, &(row, was_touched)): (usize, &(usize, bool))| RegionSample {
                row,
                was_touched,
                watched_for: None,
                at: at(second as u64),
            };
            let samples = samples.iter().enumerate().map(sample).collect();
            Region { rows: 0..100, turns: 0, has_wanted: true, samples }
        };
        let cut = |samples: &[(usize, bool)]| region(samples).best_cut().map(|cut| (cut.gain, cut.rows));
        assert_eq!(cut(&[]), None);
        assert_eq!(cut(&[(10, true), (20, true)]), None, "all are alike");
        assert_eq!(cut(&[(70, true), (10, false), (30, false), (90, true)]), Some((2, vec![50])));
        assert_eq!(cut(&[(50, true), (10, false), (30, false), (81, false)]), Some((1, vec![40, 66])));
        assert_eq!(cut(&[(30, true), (31, false), (31, false)]), Some((1, vec![31])));
        assert_eq!(cut(&[(30, true), (30, false), (30, false)]), None, "it is one window");
        let moved = [(10, false), (30, false), (80, false), (50, false), (20, true)];
        assert_eq!(cut(&moved), None, "it may have been touched everywhere since");
        assert_eq!(cut(&[&moved[..], &[(70, false)]].concat()), Some((1, vec![15, 25])), "it was not");
        let parts = region(&[(50, true), (10, false), (30, false), (81, false)]).cut_at(&[40, 66]);
        let parts: Vec<_> = parts.into_iter().map(|part| (part.rows.clone(), part.samples.len())).collect();
        assert_eq!(parts, [(0..40, 2), (40..66, 1), (66..100, 1)]);
    }

    #[test]
    fn a_window_keeps_its_own_result_until_four_newer_samples_of_its_region_and_the_newest_differs() {
        let mut regions = AccessRegions::new(1, 0);
        let add = |regions: &mut AccessRegions, second: u64, was_touched| {
            regions.add(RegionSample { row: 0, was_touched, watched_for: None, at: at(second) });
        };
        (10..13).for_each(|second| add(&mut regions, second, true));
        let is_better =
            |regions: &AccessRegions, own| regions.heat().next().expect("it has samples").is_better_than(own);
        assert!(is_better(&regions, None), "it has no sample of its own");
        assert!(!is_better(&regions, Some((false, at(5)))), "three samples");
        add(&mut regions, 13, true);
        assert!(is_better(&regions, Some((false, at(5)))));
        assert!(!is_better(&regions, Some((false, at(10)))), "its own is one of the four");
        assert!(!is_better(&regions, Some((true, at(5)))), "they agree");
    }

    #[test]
    fn only_wanted_windows_are_chosen_and_regions_become_narrow_where_they_are() {
        let windows = all_windows(1_000);
        let wanted: Vec<_> = windows.iter().copied().filter(|window| window.get() % 200 < 3).collect();
        let mut regions = AccessRegions::new(windows.len(), MOST_LEAST);
        assert_eq!(regions.number(), 64);
        for _ in 0..20 {
            let share = regions.next_share(&windows, &wanted, 1_000);
            assert!(share.iter().all(|window| wanted.binary_search(window).is_ok()), "{share:?}");
            assert!(share.windows(2).all(|pair| pair[0] < pair[1]), "each of another region");
        }
        assert_eq!(regions.next_share(&windows, &wanted, 1_000), wanted, "each has a region of its own");
        assert!(regions.next_share(&windows, &[], 10).is_empty());
        assert!(regions.next_share(&windows, &wanted, 0).is_empty());
    }

    #[test]
    fn with_less_to_spend_there_are_fewer_regions_after_some_rounds() {
        let mut bed = Bed::new(&HOT);
        (0..5).for_each(|_| {
            bed.minute();
        });
        bed.regions.set_most(300);
        (0..20).for_each(|_| {
            bed.minute();
        });
        assert!(bed.regions.number() <= 303, "{}", bed.regions.number());
        assert!(spearman(&bed.guest.touches_per_s, &bed.seen()) >= 0.85);
    }

    proptest! {
        #[test]
        fn regions_always_cover_each_window_once(windows in 0_usize..600, most in 0_usize..300,
            shares in prop::collection::vec((1_usize..64, any::<u64>(), 0_usize..400), 0..40)) {
            let all = all_windows(windows);
            let mut regions = AccessRegions::new(windows, most);
            for (second, (number, touched, most)) in shares.into_iter().enumerate() {
                regions.set_most(most);
                for window in regions.next_share(&all, &all, number) {
                    let row = window.get() as usize;
                    let was_touched = touched >> (row % 64) & 1 == 1;
                    regions.add(RegionSample { row, was_touched, watched_for: None, at: at(second as u64) });
                }
                let borders: Vec<_> = regions.regions.iter().map(|region| region.rows.clone()).collect();
                prop_assert!(borders.iter().all(|rows| !rows.is_empty()));
                prop_assert!(borders.windows(2).all(|pair| pair[0].end == pair[1].start));
                prop_assert_eq!(borders.iter().map(Range::len).sum::<usize>(), windows);
                let are_theirs = |region: &Region| region.samples.iter().all(|of| region.rows.contains(&of.row));
                prop_assert!(regions.regions.iter().all(are_theirs));
                prop_assert!(regions.number() <= 400);
            }
        }
    }
}
