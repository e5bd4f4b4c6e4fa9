//! Time for which windows of a guest are out of its reach while their page size changes: at most a set part of any
//! 100 ms.
//!
//! A thread of the guest that touches such a window waits. If it uses all of its memory at random, it touches one at
//! once, so that the guest's speed falls by the part of the time in which any window is out of reach.
//!
//! ```text
//!   credit:  1/15 of the part of 100 ms at most, earned at 14/15 of the part     any 100 ms have the part at most
//!   ─┤copy├──┤copy├────── sleep until there is credit ──────┤copy├──┤copy├─────────────▶
//! ```
//!
//! Windows that are out of reach at the same time count once. The last window before a sleep may exceed the credit;
//! the debt is earned before the next one.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{BudgetLimits, Moment, PerTenThousand};

use crate::sensors::share::nanoseconds;

/// Time in which the part holds.
const INTERVAL: Duration = Duration::from_millis(100);

/// Inverse of the share of an interval's time that can be saved up: 2 ms by default, which the time between two ticks
/// earns. What can be saved up is not earned while windows are copied one after another.
const SAVED_PART: u32 = 15;

/// Time in which the largest debt is earned. Otherwise a process that is stopped while it copies, as by a debugger,
/// would leave its guest on base pages for three times as long once it goes on.
const DEBT_MAX: Duration = Duration::from_secs(1);

/// A shorter sleep costs more than it waits, and its credit would be rounded down to nothing.
const SHORTEST_WAIT: Duration = Duration::from_micros(50);

/// Largest part of any 100 ms for which windows of a VM may be out of the guest's reach: from 1 %, some ten windows a
/// second, to all of it, which is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OutOfReach(PerTenThousand);

impl OutOfReach {
    /// All of the time: windows change their page size one right after another.
    pub const NO_LIMIT: OutOfReach = OutOfReach(PerTenThousand::ALL);

    /// With less, a guest of some gibibytes would stay on base pages for hours.
    const LEAST: PerTenThousand = PerTenThousand::new(100);

    /// The part that is nearest to this one.
    pub fn nearest_to(part: PerTenThousand) -> OutOfReach {
        OutOfReach(part.clamp(OutOfReach::LEAST, PerTenThousand::ALL))
    }

    /// The part of the time.
    pub const fn part(self) -> PerTenThousand {
        self.0
    }

    /// The limits with a shorter burst where the part is smaller than the default one. Otherwise a tick would wait so
    /// much longer for its turns, with a plan that becomes old, while a change of the policy waits for its end.
    pub(super) fn shorten(self, limits: BudgetLimits) -> BudgetLimits {
        let default = OutOfReach::default();
        if self >= default {
            return limits;
        }
        BudgetLimits { burst: limits.burst / default.0.get() * self.0.get(), ..limits }
    }
}

impl Default for OutOfReach {
    /// 30 ms of 100, so that a guest keeps more than half of its speed.
    fn default() -> OutOfReach {
        OutOfReach(PerTenThousand::new(3_000))
    }
}

/// Text that is not an [`OutOfReach`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a part of the time: write a number from 1 to 100 and a %, like \"30%\"")]
pub struct OutOfReachError(String);

/// `30%` or `12.5%`.
impl FromStr for OutOfReach {
    type Err = OutOfReachError;

    fn from_str(text: &str) -> Result<OutOfReach, OutOfReachError> {
        let percent = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
        let part = percent.filter(|percent| (1.0..=100.0).contains(percent));
        let part = part.map(|percent| PerTenThousand::new((percent * 100.0).round() as u32));
        part.map(OutOfReach).ok_or_else(|| OutOfReachError(text.to_owned()))
    }
}

/// The form that [`OutOfReach::from_str`] reads.
impl fmt::Display for OutOfReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.get() / 100, self.0.get() % 100) {
            (whole, 0) => write!(f, "{whole}%"),
            (whole, hundredths) => write!(f, "{whole}.{hundredths:02}%"),
        }
    }
}

/// Account of one VM; see the module.
#[derive(Debug)]
pub(super) struct Reach {
    part: PerTenThousand,
    account: Mutex<Account>,
}

#[derive(Debug, Default)]
struct Account {
    credited_at: Option<Moment>,
    /// Time that is earned and not used, in nanoseconds. Below zero: a debt.
    credit_ns: i64,
    /// End of the latest time that was booked.
    booked_until: Option<Moment>,
}

impl Reach {
    /// With this part of the time, and full credit.
    pub fn new(part: OutOfReach) -> Reach {
        Reach { part: part.part(), account: Mutex::default() }
    }

    /// Changes the part. What is earned, or owed, is at most what it can be with the new one.
    pub fn set_part(&mut self, part: OutOfReach) {
        self.part = part.part();
        let (most, least) = (self.credit_most(), self.credit_least());
        let account = self.account.get_mut();
        account.credit_ns = account.credit_ns.clamp(least, most);
    }

    /// Time to wait before a window may be out of reach again; zero if it may be now.
    pub fn wait(&self, now: Moment) -> Duration {
        let mut account = self.lock();
        let most = self.credit_most();
        let earned = match account.credited_at {
            Some(at) => self.part_of(now.since(at)) / i64::from(SAVED_PART) * i64::from(SAVED_PART - 1),
            None => most,
        };
        account.credit_ns = account.credit_ns.saturating_add(earned).min(most);
        account.credited_at = Some(now);
        if account.credit_ns > 0 || self.part >= PerTenThousand::ALL {
            return Duration::ZERO;
        }
        let missing_ns = account.credit_ns.unsigned_abs();
        let per_ns = u64::from(self.part.get().max(1)) * u64::from(SAVED_PART - 1);
        Duration::from_nanos((missing_ns * 10_000 * u64::from(SAVED_PART)).div_ceil(per_ns)).max(SHORTEST_WAIT)
    }

    /// Books a window that was out of reach for this time, until now.
    pub fn was_out(&self, time: Duration, now: Moment) {
        let mut account = self.lock();
        let not_booked = account.booked_until.map_or(time, |until| time.min(now.since(until)));
        let credit = account.credit_ns.saturating_sub(nanoseconds(not_booked));
        let least = self.credit_least();
        if credit < least {
            account.credited_at = account.credited_at.max(Some(now));
        }
        account.credit_ns = credit.max(least);
        account.booked_until = account.booked_until.max(Some(now));
    }

    /// Most that can be saved up.
    fn credit_most(&self) -> i64 {
        self.part_of(INTERVAL) / i64::from(SAVED_PART)
    }

    /// The largest debt, below zero.
    fn credit_least(&self) -> i64 {
        -(self.part_of(DEBT_MAX) / i64::from(SAVED_PART) * i64::from(SAVED_PART - 1))
    }

    fn part_of(&self, time: Duration) -> i64 {
        nanoseconds(time).saturating_mul(i64::from(self.part.get())) / 10_000
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        // Every change is complete after each statement, so the account is consistent after a panic elsewhere.
        self.account.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(percent: u32) -> OutOfReach {
        OutOfReach::nearest_to(PerTenThousand::new(percent * 100))
    }

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    /// Intervals out of reach, in microseconds, of windows that take `window_us` each and are copied for a second.
    fn copies(reach: &Reach, window_us: u64) -> Vec<(u64, u64)> {
        let (mut now, mut out) = (Duration::ZERO, Vec::new());
        while now < Duration::from_secs(1) {
            now += reach.wait(Moment::after_start(now));
            let began = now;
            now += Duration::from_micros(window_us);
            reach.was_out(now - began, Moment::after_start(now));
            out.push((began.as_micros() as u64, now.as_micros() as u64));
        }
        out
    }

    /// The most microseconds of any 100 ms that lie in `out`.
    fn most_in_100_ms(out: &[(u64, u64)]) -> u64 {
        let within = |from: u64| {
            out.iter().map(|(began, ended)| (*ended).min(from + 100_000).saturating_sub((*began).max(from))).sum()
        };
        out.iter().map(|(began, _)| within(*began)).max().unwrap_or(0)
    }

    #[test]
    fn windows_are_out_of_reach_for_the_part_of_any_100_ms_and_one_window() {
        for window_us in [250, 700, 3_000] {
            let out = copies(&Reach::new(OutOfReach::default()), window_us);
            let most = most_in_100_ms(&out);
            assert!(most <= 30_000 + window_us, "{most} us with windows of {window_us} us");
            let all: u64 = out.iter().map(|(began, ended)| ended - began).sum();
            assert!(all >= 270_000, "the part is used: {all} us of a second with windows of {window_us} us");
        }
    }

    #[test]
    fn a_long_time_without_work_saves_up_no_more_than_a_fifteenth_of_the_part() {
        let reach = Reach::new(OutOfReach::default());
        assert_eq!(reach.wait(Moment::after_start(Duration::ZERO)), Duration::ZERO);
        let later = Duration::from_secs(100);
        assert_eq!(reach.wait(Moment::after_start(later)), Duration::ZERO);
        reach.was_out(ms(1), Moment::after_start(later + ms(1)));
        assert_eq!(reach.wait(Moment::after_start(later)), Duration::ZERO, "1 ms of 2");
        reach.was_out(ms(1), Moment::after_start(later + ms(2)));
        assert!(reach.wait(Moment::after_start(later)) > Duration::ZERO);
    }

    #[test]
    fn windows_that_are_out_of_reach_at_the_same_time_count_once() {
        let reach = Reach::new(OutOfReach::default());
        let at = |time| Moment::after_start(ms(time));
        assert_eq!(reach.wait(at(1000)), Duration::ZERO);
        for _ in 0..10 {
            reach.was_out(ms(1), at(1001));
        }
        assert_eq!(reach.wait(at(1000)), Duration::ZERO, "1 ms of 2");
        reach.was_out(ms(4), at(1003));
        assert!(reach.wait(at(1000)) > Duration::ZERO, "3 ms");
    }

    #[test]
    fn after_the_time_to_wait_a_window_may_be_out_of_reach_and_not_before() {
        let reach = Reach::new(OutOfReach::default());
        assert_eq!(reach.wait(Moment::after_start(Duration::ZERO)), Duration::ZERO);
        let now = ms(40);
        reach.was_out(now, Moment::after_start(now));
        let wait = reach.wait(Moment::after_start(now));
        assert!(reach.wait(Moment::after_start(now + wait / 2)) > Duration::ZERO);
        // Each look at the account rounds down, and the shortest wait makes up for that.
        let at_the_end = reach.wait(Moment::after_start(now + wait));
        assert!(at_the_end <= SHORTEST_WAIT);
        assert_eq!(reach.wait(Moment::after_start(now + wait + SHORTEST_WAIT)), Duration::ZERO);
    }

    #[test]
    fn a_window_that_was_out_for_an_hour_holds_up_the_next_one_for_a_second() {
        let reach = Reach::new(OutOfReach::default());
        assert_eq!(reach.wait(Moment::after_start(Duration::ZERO)), Duration::ZERO);
        let hour = Duration::from_secs(3_600);
        reach.was_out(hour, Moment::after_start(hour));
        assert_eq!(reach.wait(Moment::after_start(hour)), DEBT_MAX);
        assert_eq!(reach.wait(Moment::after_start(hour + DEBT_MAX + SHORTEST_WAIT)), Duration::ZERO);
    }

    #[test]
    fn all_of_the_time_is_no_limit() {
        let reach = Reach::new(OutOfReach::NO_LIMIT);
        reach.was_out(ms(900), Moment::after_start(ms(900)));
        assert_eq!(reach.wait(Moment::after_start(ms(900))), Duration::ZERO);
    }

    #[test]
    fn a_debt_of_a_larger_part_is_earned_within_a_second_of_the_new_one() {
        let mut reach = Reach::new(percent(100));
        reach.was_out(ms(900), Moment::after_start(ms(900)));
        reach.set_part(percent(1));
        let wait = reach.wait(Moment::after_start(ms(900)));
        assert!(wait > DEBT_MAX * 9 / 10 && wait <= DEBT_MAX, "{wait:?}");
        reach.set_part(percent(100));
        assert_eq!(reach.wait(Moment::after_start(ms(900))), Duration::ZERO);
    }

    #[test]
    fn what_a_larger_part_saved_up_is_lost_with_it() {
        let mut reach = Reach::new(percent(60));
        assert_eq!(reach.wait(Moment::after_start(ms(0))), Duration::ZERO);
        reach.set_part(percent(6));
        reach.was_out(ms(2), Moment::after_start(ms(2)));
        assert!(reach.wait(Moment::after_start(ms(2))) > Duration::ZERO, "10 ms were saved up, and 1 ms may be");
    }

    #[test]
    fn a_part_is_a_percentage_from_1_to_100() {
        let parsed = |text: &str| text.parse::<OutOfReach>().ok().map(|part| part.part().get());
        let good = ["1%", "30%", "12.5%", "99.99%", "100%"].map(parsed);
        assert_eq!(good, [100, 3_000, 1_250, 9_999, 10_000].map(Some));
        for wrong in ["", "%", "30", "0%", "0.99%", "100.01%", "-1%", "NaN%", "inf%", "a%", "30 %", "30%%"] {
            let error = wrong.parse::<OutOfReach>().expect_err(wrong).to_string();
            assert!(error.contains(&format!("{wrong:?}")) && error.contains("from 1 to 100 and a %"), "{error}");
        }
        for text in ["1%", "30%", "12.50%", "100%"] {
            assert_eq!(text.parse::<OutOfReach>().expect("it is a part").to_string(), text);
        }
        assert_eq!(OutOfReach::default().to_string(), "30%");
        let nearest = [0, 50_000].map(|part| OutOfReach::nearest_to(PerTenThousand::new(part)).to_string());
        assert_eq!(nearest, ["1%", "100%"]);
    }

    #[test]
    fn a_smaller_part_than_the_default_has_a_shorter_burst_and_no_other_part_changes_the_limits() {
        let limits = BudgetLimits { burst: ms(300), ..BudgetLimits::default() };
        let bursts = [1, 10, 29, 30, 31, 100].map(|part| percent(part).shorten(limits).burst);
        assert_eq!(bursts, [10, 100, 290, 300, 300, 300].map(ms));
        assert_eq!(BudgetLimits { burst: limits.burst, ..percent(10).shorten(limits) }, limits);
    }
}
