//! Times of runs that wait for an event, and end at a limit without it.
//!
//! ```text
//!   run 1  ├──────────┤ event                a time
//!   run 2  ├───────────────────────┤ limit   late: in the median, as later than all others
//! ```

use std::time::Duration;

use wideleaf_measure::event_times::EventTimes;
use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Spread, median};
use wideleaf_measure::table::Cell;

use crate::spread_median::SpreadMedian;

/// Times of the runs of one arm.
#[derive(Clone, Debug)]
pub struct Times {
    times: EventTimes,
    limit: Duration,
}

impl Times {
    /// Headings of [`Times::cells`], the median with this name.
    pub fn columns(name: &str) -> [&str; 4] {
        ["runs", "late", name, "range"]
    }

    /// Times of runs; `None` is a run that ended at the limit.
    pub fn of(runs: impl IntoIterator<Item = Option<Duration>>, limit: Duration) -> Times {
        Times { times: runs.into_iter().map(|took| Some(took?.as_secs_f64())).collect(), limit }
    }

    /// Number of all runs, number of late ones, median of all, and range of those in time.
    pub fn cells(&self) -> [Cell; 4] {
        let range = match Spread::of(self.times.reached()) {
            Some(Spread { lowest, highest, .. }) => Cell::range(lowest, highest, 3, "s"),
            None => self.missing("no run"),
        };
        let middle = match self.times.middle() {
            Some(middle) => Cell::number(middle, 3, "s"),
            None if self.times.reached().is_empty() => self.missing("no run"),
            None => self.missing("too few runs"),
        };
        let [runs, late] = [self.times.rounds(), self.times.missed()].map(|count| Cell::count(count as u64));
        [runs, late, middle, range]
    }

    /// Median of another figure, which late runs do not have, or the reason why it is missing.
    pub fn median_of(&self, figures: &[f64], decimals: usize, unit: &str) -> Cell {
        if figures.is_empty() { self.missing("no run") } else { Cell::number(median(figures.to_vec()), decimals, unit) }
    }

    fn missing(&self, what: &str) -> Cell {
        Cell::missing(format!("{what} done within {} s", self.limit.as_secs()))
    }

    /// Target for the speed in comparison with other runs; `None` if one side has no run. A late run among `theirs`
    /// counts with the limit, so that the ratio is a lower bound. A late run of ours misses the target.
    pub fn speed_bar(&self, what: &str, theirs: &Times, least: f64) -> Option<Bar> {
        let least = Limit::AtLeast(least);
        let (ours, theirs_late) = (&self.times, theirs.times.missed());
        if ours.rounds() == 0 || theirs.times.rounds() == 0 {
            return None;
        }
        if ours.missed() > 0 {
            let what = format!("{what}: {} of {} runs were late", ours.missed(), ours.rounds());
            return Some(Bar::new(what, Cell::missing("a late run has no time"), least));
        }
        let bound = if theirs_late > 0 { " (lower bound)" } else { "" };
        let limit = std::iter::repeat_n(theirs.limit.as_secs_f64(), theirs_late);
        let theirs: Vec<f64> = theirs.times.reached().iter().copied().chain(limit).collect();
        Some(SpreadMedian::unpaired_ratio(&theirs, ours.reached()).bar(&format!("{what}{bound}"), 2, "times", least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(100);

    fn times<const N: usize>(seconds: [u64; N], late: usize) -> Times {
        let done = seconds.map(|seconds| Some(Duration::from_secs(seconds)));
        Times::of(done.into_iter().chain(std::iter::repeat_n(None, late)), LIMIT)
    }

    #[test]
    fn a_late_run_is_later_than_all_others_in_the_median() {
        let cells = times([1, 2, 3], 2).cells().map(|cell| cell.to_string());
        assert_eq!(cells, ["5", "2", "3.000 s", "1.000 - 3.000 s"]);
        let cells = times([1, 2, 3], 4).cells();
        assert_eq!(cells[2], Cell::missing("too few runs done within 100 s"));
        assert_eq!(cells[3].to_string(), "1.000 - 3.000 s");
        let missing = Cell::missing("no run done within 100 s");
        assert_eq!(times([], 2).cells()[2..], [missing.clone(), missing]);
    }

    #[test]
    fn a_speed_is_a_lower_bound_where_their_runs_were_late_and_missed_where_ours_were() {
        let told = |ours: &Times, theirs: &Times| {
            let bar = ours.speed_bar("speed", theirs, 50.0);
            bar.map_or_else(|| "no bar".to_owned(), |bar| bar.to_string())
        };
        let ours = times([1], 0);
        assert_eq!(told(&ours, &times([60], 0)), "met:    speed 60.00 times, at least 50");
        assert_eq!(told(&ours, &times([], 1)), "met:    speed (lower bound) 100.00 times, at least 50");
        assert_eq!(told(&times([1], 1), &ours), "MISSED: speed: 1 of 2 runs were late -, at least 50");
        // Both at the limit are not thereby equally fast.
        assert_eq!(told(&times([], 1), &times([], 1)), "MISSED: speed: 1 of 1 runs were late -, at least 50");
        assert_eq!(told(&ours, &times([], 0)), "no bar");
    }
}
