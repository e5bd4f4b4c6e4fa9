//! The speed of a guest between its progress marks, and T99: the time until it runs at 99 % of its steady speed.
//!
//! ```text
//!   speed │        ▁▃ ▇█▇█▇▆█▇█▇█▇█▇█▇█▇█       one bar for each interval between two marks
//!         │ ▁▁▂▁▃▂▅                             steady speed: median of the intervals in the last half of the time
//!         └─┬──────┬───────────────────▶ time since the start of the process
//!      first mark  T99: begin of the first interval of 99 % that begins five with a median of 99 %,
//!                  after which no five fall lower
//! ```
//!
//! **Noise.** A machine that other programs share has intervals below 99 % at any time. So five intervals are judged by
//! their median, which two noisy ones of them do not change. And the five that follow T99 need 99 %, or what the lowest
//! five of steady halves have, if that is less: that share is told with each T99. Of one run alone, the lowest five of
//! all lie before its steady half as often as in it, so that half of all runs would have a T99 without a meaning. The
//! steady halves of all rounds count together.
//!
//! **Time lost.** The time to T99 without the time in which the work done until then is done at the steady speed. What
//! the guest did before its first mark is not known, and counts as nothing.

/// Number of neighbouring intervals that are judged together.
const TOGETHER: usize = 5;

/// Smallest number of intervals of which a steady speed is the median.
const STEADY_MIN: usize = 10;

/// Share of the steady speed that counts as reached.
pub const SHARE: f64 = 0.99;

/// Speeds of a guest, interval by interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speeds {
    /// Time of the first mark, in seconds.
    begin_s: f64,
    /// End in seconds, and units of work per second, of each interval.
    intervals: Vec<(f64, f64)>,
}

/// T99 and what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct T99 {
    /// Time from the start to it, in seconds.
    pub at_s: f64,
    /// Time lost until then, in seconds.
    pub lost_s: f64,
    /// Share of the steady speed that each later five intervals have at least.
    pub kept: f64,
}

impl Speeds {
    /// Speeds between marks: seconds since the start, and units of work done. Marks without time between them are left
    /// out.
    pub fn of(marks: &[(f64, u64)]) -> Speeds {
        let begin_s = marks.first().map_or(0.0, |(at_s, _)| *at_s);
        let interval = |pair: &[(f64, u64)]| {
            let [(from_s, before), (to_s, after)] = *pair else { return None };
            let rate = after.saturating_sub(before) as f64 / (to_s - from_s);
            (to_s > from_s).then_some((to_s, rate))
        };
        Speeds { begin_s, intervals: marks.windows(2).filter_map(interval).collect() }
    }

    /// Speeds of intervals that are known: the time of the first mark, then the end in seconds since the start and the
    /// units of work per second of each interval.
    pub fn of_intervals(begin_s: f64, intervals: Vec<(f64, f64)>) -> Speeds {
        Speeds { begin_s, intervals }
    }

    /// End in seconds since the start, and units of work per second, of each interval.
    pub fn intervals(&self) -> &[(f64, f64)] {
        &self.intervals
    }

    /// Steady speed in units of work per second: the median of the intervals that begin in the last half of the time.
    /// `None` with too few of them.
    pub fn steady(&self) -> Option<f64> {
        let half = &self.intervals[self.first_of_half()..];
        (half.len() >= STEADY_MIN).then(|| median(half)).filter(|steady| *steady > 0.0)
    }

    /// Share of the steady speed that the lowest five intervals of the steady half have, at most 99 %: what the
    /// machine's other programs leave of it. `None` without a steady speed.
    pub fn lowest_steady(&self) -> Option<f64> {
        let shares = self.shares(self.steady()?);
        Some(shares.into_iter().skip(self.first_of_half()).fold(SHARE, f64::min))
    }

    /// T99, after which no five intervals fall below the share `kept` of the steady speed. `None` without a steady
    /// speed, or if the guest has no five intervals of 99 % that are followed by none lower.
    pub fn t99(&self, kept: f64) -> Option<T99> {
        let steady = self.steady()?;
        let shares = self.shares(steady);
        let after_the_last_below = shares.iter().rposition(|share| *share < kept).map_or(0, |last| last + 1);
        let found = (after_the_last_below..shares.len()).find(|first| self.is_fast(*first, steady, &shares))?;
        let at_s = self.begin_of(found);
        Some(T99 { at_s, lost_s: at_s - self.done_before(found) / steady, kept })
    }

    /// Begin of the first interval of 99 % that begins five with a median of 99 %, whatever comes after them. On a
    /// machine with phases of other programs, T99 may be the end of such a phase, and this time is not.
    pub fn first_s(&self) -> Option<f64> {
        let steady = self.steady()?;
        let shares = self.shares(steady);
        (0..shares.len()).find(|first| self.is_fast(*first, steady, &shares)).map(|first| self.begin_of(first))
    }

    /// Whether it was at full speed before the half in which its speed counts as steady.
    pub fn is_fast_before_its_half(&self) -> bool {
        self.first_s().is_some_and(|first_s| first_s < self.begin_of(self.first_of_half()))
    }

    /// Median speed of each five neighbouring intervals, as a share of the steady one.
    fn shares(&self, steady: f64) -> Vec<f64> {
        self.intervals.windows(TOGETHER).map(|five| median(five) / steady).collect()
    }

    fn is_fast(&self, first: usize, steady: f64, shares: &[f64]) -> bool {
        shares[first] >= SHARE && self.intervals[first].1 >= SHARE * steady
    }

    /// Index of the first interval that begins in the last half of the time.
    fn first_of_half(&self) -> usize {
        let end_s = self.intervals.last().map_or(self.begin_s, |(end_s, _)| *end_s);
        let middle_s = self.begin_s.midpoint(end_s);
        (0..self.intervals.len()).find(|index| self.begin_of(*index) >= middle_s).unwrap_or(self.intervals.len())
    }

    fn begin_of(&self, index: usize) -> f64 {
        index.checked_sub(1).map_or(self.begin_s, |before| self.intervals[before].0)
    }

    /// Units of work of the intervals before this one.
    fn done_before(&self, end: usize) -> f64 {
        (0..end).map(|index| (self.intervals[index].0 - self.begin_of(index)) * self.intervals[index].1).sum()
    }
}

fn median(intervals: &[(f64, f64)]) -> f64 {
    wideleaf_measure::statistics::median(intervals.iter().map(|(_, rate)| *rate).collect())
}

/// Highest T99 that is allowed: 1.3 times the time in which the hot set is read, and 50 ms.
pub fn limit_s(hot_bytes: f64, read_bytes_per_s: f64) -> f64 {
    1.3 * hot_bytes / read_bytes_per_s + 0.05
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks 0.1 s apart from `begin_s` on, with these speeds in units per 0.1 s.
    fn marks(begin_s: f64, speeds: &[u64]) -> Vec<(f64, u64)> {
        let mut done = 1000;
        let later = speeds.iter().enumerate().map(|(index, speed)| {
            done += speed;
            (begin_s + 0.1 * (index + 1) as f64, done)
        });
        [(begin_s, 1000)].into_iter().chain(later).collect()
    }

    fn with_slow_begin(steady: &[u64]) -> Speeds {
        Speeds::of(&marks(0.25, &[&[10, 20, 500][..], steady].concat()))
    }

    /// T99 by the noise of these speeds alone.
    fn alone(speeds: &Speeds) -> Option<T99> {
        speeds.t99(speeds.lowest_steady()?)
    }

    #[test]
    fn t99_is_the_begin_of_the_first_five_intervals_at_full_speed() {
        let t99 = alone(&with_slow_begin(&[1000; 37])).expect("it comes to full speed");
        // The five that begin with the second interval have a median of 1000 already, but it is slow itself.
        assert_eq!((t99.at_s * 100.0).round(), 55.0);
        // Of 0.55 s, the work of 530 units took 0.053 s at 10000 units/s.
        assert_eq!((t99.lost_s * 1e4).round(), 4970.0);
        assert_eq!(t99.kept, SHARE);
    }

    #[test]
    fn single_noisy_intervals_change_nothing_and_a_later_slow_part_counts() {
        let mut steady = [1000; 37];
        (steady[8], steady[20], steady[30]) = (400, 0, 700);
        let at = |speeds: &Speeds| alone(speeds).map(|t99| (t99.at_s * 100.0).round());
        assert_eq!(at(&with_slow_begin(&steady)), Some(55.0));
        steady[10..14].fill(500);
        // The interval after the four slow ones, which are 13 to 16 of all.
        let slow_later = with_slow_begin(&steady);
        assert_eq!(at(&slow_later), Some(195.0));
        let told_again = Speeds::of_intervals(0.25, slow_later.intervals().to_vec());
        assert_eq!(
            (told_again.first_s().map(|first_s| (first_s * 100.0).round()), told_again),
            (Some(55.0), slow_later)
        );
    }

    #[test]
    fn a_noisy_machine_lowers_what_has_to_be_kept_and_says_so() {
        let mut steady = [1000; 37];
        steady[25..28].fill(950); // in the steady half
        steady[5..8].fill(960); // before it
        let t99 = alone(&with_slow_begin(&steady)).expect("it is not lower than in the steady half");
        assert_eq!([t99.kept, t99.at_s].map(|of| (of * 100.0).round()), [95.0, 55.0]);
        steady[5..8].fill(940);
        let slower = with_slow_begin(&steady);
        let at = |kept| slower.t99(kept).map(|t99| (t99.at_s * 100.0).round());
        assert_eq!(
            (at(0.95), at(0.94)),
            (Some(135.0), Some(55.0)),
            "another round had five of 94 % in its steady half"
        );
    }

    #[test]
    fn a_guest_that_becomes_faster_all_the_time_reaches_99_percent_late_and_one_without_marks_never() {
        let growing: Vec<u64> = (1..=40).map(|speed| speed * 100).collect();
        let speeds = Speeds::of(&marks(0.0, &growing));
        assert!(alone(&speeds).is_some_and(|t99| t99.at_s > 2.5), "{:?}", alone(&speeds));
        for few in [&[][..], &[(0.5, 3)], &[(0.5, 3), (0.5, 4)]] {
            assert_eq!((Speeds::of(few).lowest_steady(), Speeds::of(few).t99(SHARE)), (None, None));
        }
        assert_eq!(Speeds::of(&marks(0.0, &[0; 40])).t99(SHARE), None, "a guest that stands still has no speed");
    }

    #[test]
    fn a_limit_is_in_proportion_to_the_hot_set_and_begins_at_50_ms() {
        assert_eq!(limit_s(0.0, 1e9), 0.05);
        assert_eq!((limit_s(1e9, 2e9) * 1e3).round(), 700.0);
    }
}
