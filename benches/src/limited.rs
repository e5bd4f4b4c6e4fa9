//! Times of runs that wait for an event, and end at a limit without it.
//!
//! ```text
//!   run 1  ├──────────┤ event                a time
//!   run 2  ├───────────────────────┤ limit   late: counted, and in no median
//! ```

use std::time::Duration;

use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Spread, median};
use wideleaf_measure::table::Cell;

use crate::shown::Shown;

/// Times of the runs of one arm.
#[derive(Clone, Debug)]
pub struct Times {
    seconds: Vec<f64>,
    late: usize,
    limit: Duration,
}

impl Times {
    /// Headings of [`Times::cells`], the median with this name.
    pub fn columns(name: &str) -> [&str; 4] {
        ["runs", "late", name, "range"]
    }

    /// Times of runs; `None` is a run that ended at the limit.
    pub fn of(runs: impl IntoIterator<Item = Option<Duration>>, limit: Duration) -> Times {
        let (mut seconds, mut late) = (Vec::new(), 0);
        for took in runs {
            match took {
                Some(took) => seconds.push(took.as_secs_f64()),
                None => late += 1,
            }
        }
        Times { seconds, late, limit }
    }

    fn runs(&self) -> usize {
        self.seconds.len() + self.late
    }

    /// Number of all runs, number of late ones, median and range of the times of the others.
    pub fn cells(&self) -> [Cell; 4] {
        let range = match Spread::of(&self.seconds) {
            Some(Spread { lowest, highest, .. }) => Cell::range(lowest, highest, 3, "s"),
            None => self.missing(),
        };
        let [runs, late] = [self.runs(), self.late].map(|count| Cell::count(count as u64));
        [runs, late, self.median_of(&self.seconds, 3, "s"), range]
    }

    /// Median of another figure of the runs that are not late, or the reason why there is none.
    pub fn median_of(&self, figures: &[f64], decimals: usize, unit: &str) -> Cell {
        if figures.is_empty() { self.missing() } else { Cell::number(median(figures.to_vec()), decimals, unit) }
    }

    fn missing(&self) -> Cell {
        Cell::missing(format!("no run was done within {} s", self.limit.as_secs()))
    }

    /// Target for the speed in comparison with other runs; `None` if one side has no run. A late run among `theirs`
    /// counts with the limit, so that the ratio is a lower bound. A late run of ours misses the target.
    pub fn speed_bar(&self, what: &str, theirs: &Times, least: f64) -> Option<Bar> {
        let least = Limit::AtLeast(least);
        if self.runs() == 0 || theirs.runs() == 0 {
            return None;
        }
        if self.late > 0 {
            let what = format!("{what}: {} of {} runs were late", self.late, self.runs());
            return Some(Bar::new(what, Cell::missing("a late run has no time"), least));
        }
        let bound = if theirs.late > 0 { " (lower bound)" } else { "" };
        let limit = std::iter::repeat_n(theirs.limit.as_secs_f64(), theirs.late);
        let theirs: Vec<f64> = theirs.seconds.iter().copied().chain(limit).collect();
        Some(Shown::unpaired_ratio(&theirs, &self.seconds).bar(&format!("{what}{bound}"), 2, "times", least))
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
    fn a_late_run_is_counted_and_in_no_median() {
        let cells = times([1, 2, 3], 4).cells().map(|cell| cell.to_string());
        assert_eq!(cells, ["7", "4", "2.000 s", "1.000 - 3.000 s"]);
        let missing = Cell::missing("no run was done within 100 s");
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
