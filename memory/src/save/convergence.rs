//! When the pages that are left are few enough for a pause, and when more rounds do not help.
//!
//! ```text
//!   after a round: pages left × time per page × 1.5 + time of the logs  ≤ pause − state ?
//!     yes ─▶ pause
//!     no  ─▶ rounds shrink? ─ yes ─▶ another round
//!                            └ no, or too many rounds ─▶ refuse, pause for longer, or leave the pages to the caller
//!   in the pause: pages left × time per page ≤ pause − state, and ≤ what is left of the pause ?
//!     no  ─▶ broken off: the guest runs on, another round; refuse, or pause for longer, after the third time;
//!            or leave the pages to the caller, if the pause is not over
//! ```

use std::time::Duration;

use super::{BeyondBound, SaveError, SaveLimits, SaveRound};

/// Number of rounds in a row that leave hardly fewer pages, after which more rounds do not help.
const FLAT_ROUNDS_MAX: u32 = 3;
/// Number of pauses that are broken off. The guest wrote much while it was being stopped, and will again.
const BROKEN_OFF_MAX: u32 = 3;
/// Share of the expected time by which the estimate before a pause is longer.
const MARGIN: f64 = 0.5;
/// Rounds of fewer pages say little about the time of a page: threads start, and the first write of a file is slow.
const PAGES_FOR_SPEED: u64 = 256;

/// What comes after a round.
#[derive(Debug)]
pub(super) enum NextStep {
    /// Another round while the guest runs.
    Round,
    /// The pause, with the pages that are left.
    Pause,
    /// The end of the save.
    Refuse(SaveError),
}

/// What comes in a pause that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InPause {
    /// The pages are written.
    Write,
    /// The guest runs on, and another round comes.
    BreakOff,
    /// The pages are left to the caller.
    Leave,
}

/// The rounds so far, and what they say of the pause.
#[derive(Debug)]
pub(super) struct Convergence<'a> {
    limits: &'a SaveLimits,
    rounds: Vec<SaveRound>,
    /// Number of pages that were left after the last round.
    left: Option<u64>,
    /// Number of rounds in a row after which hardly fewer pages were left than before.
    flat: u32,
    /// Number of pauses that were broken off.
    broken_off: u32,
    /// Whether the pause after the latest round was broken off, or did not begin.
    goes_on: bool,
    /// Most pages of a pause that was broken off.
    too_many: u64,
    /// Time that the latest pause that was broken off had lasted before its pages, where that is the reason.
    too_late: Option<Duration>,
    /// Whether the pause may be longer than its bound.
    may_be_longer: bool,
}

impl<'a> Convergence<'a> {
    pub fn new(limits: &'a SaveLimits) -> Convergence<'a> {
        Convergence {
            limits,
            rounds: Vec::new(),
            left: None,
            flat: 0,
            broken_off: 0,
            goes_on: false,
            too_many: 0,
            too_late: None,
            may_be_longer: false,
        }
    }

    /// Decides after a round that left some pages. `asking` is the time that all logs took.
    pub fn after(&mut self, round: SaveRound, left: u64, asking: Duration) -> NextStep {
        self.rounds.push(round);
        self.goes_on = false;
        let is_flat = self.left.is_some_and(|before| left > before / 10 * 9);
        self.flat = if is_flat { self.flat + 1 } else { 0 };
        self.left = Some(left);
        let needed = self.time_of(left).mul_f64(1.0 + MARGIN) + asking;
        let is_calm = self.broken_off < BROKEN_OFF_MAX;
        if is_calm && needed <= self.for_pages() {
            return NextStep::Pause;
        }
        let rounds = self.rounds.len() as u32;
        let may_leave =
            matches!(self.limits.beyond, BeyondBound::Leave { after_rounds: Some(most) } if rounds >= most.get());
        if !may_leave && is_calm && rounds < self.limits.rounds_max && self.flat < FLAT_ROUNDS_MAX {
            return NextStep::Round;
        }
        let bound = self.limits.pause;
        match (self.limits.beyond, self.too_late) {
            (BeyondBound::PauseLonger, _) => {
                self.may_be_longer = true;
                NextStep::Pause
            }
            (_, Some(took)) if !is_calm => NextStep::Refuse(SaveError::StateTooLong { bound, took }),
            (BeyondBound::Leave { .. }, _) => NextStep::Pause,
            (BeyondBound::Refuse, _) => {
                // What was found in a pause is what the next one would find.
                let pages = left.max(self.too_many);
                let needed = self.time_of(pages).mul_f64(1.0 + MARGIN) + asking + self.limits.state;
                NextStep::Refuse(SaveError::PauseTooLong { bound, rounds, pages, needed })
            }
        }
    }

    /// Decides about this many pages in the pause that began this long ago.
    pub fn in_pause(&mut self, pages: u64, lasted: Duration) -> InPause {
        let is_over = lasted > self.limits.pause;
        let needed = self.time_of(pages);
        let (fits, fits_in_time) = (needed <= self.for_pages(), needed <= self.limits.pause.saturating_sub(lasted));
        match self.limits.beyond {
            _ if self.may_be_longer || fits && fits_in_time && !is_over => return InPause::Write,
            BeyondBound::Leave { .. } if !is_over => return InPause::Leave,
            _ => {}
        }
        self.break_off((fits || is_over).then_some(lasted));
        self.too_many = self.too_many.max(pages);
        InPause::BreakOff
    }

    /// The pause is broken off; `too_late`: how long it had lasted, where that is the reason.
    pub fn break_off(&mut self, too_late: Option<Duration>) {
        self.goes_on = true;
        self.broken_off += 1;
        self.too_late = too_late;
    }

    /// The pause does not begin: the caller has done something that took a while, and the guest ran.
    pub fn put_off(&mut self) {
        self.goes_on = true;
        // More pages than before say nothing of the guest's speed. Those that are to be left to the caller still are.
        if !matches!(self.limits.beyond, BeyondBound::Leave { .. }) {
            self.left = None;
        }
    }

    /// Whether the pause after the latest round was broken off, or did not begin.
    pub fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Number of pauses that were broken off.
    pub fn broken_off(&self) -> u32 {
        self.broken_off
    }

    /// Part of the pause for pages.
    fn for_pages(&self) -> Duration {
        self.limits.pause.saturating_sub(self.limits.state)
    }

    /// Expected time to write some pages: by the slowest time per page of the latest two rounds with enough pages. That
    /// has their sleep for a limit of bytes per second, although the pause has no limit: what a connection takes beyond
    /// its limit is not known, since a short write is done once it is in the kernel's buffer.
    fn time_of(&self, pages: u64) -> Duration {
        let usable = || self.rounds.iter().rev().filter(|round| round.pages >= PAGES_FOR_SPEED).take(2);
        let per_page = |round: &SaveRound| round.duration.as_secs_f64() / round.pages as f64;
        let slowest = usable().map(per_page).fold(0.0, f64::max);
        Duration::from_secs_f64(slowest * pages as f64)
    }

    pub fn into_rounds(self) -> Vec<SaveRound> {
        self.rounds
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn round(pages: u64, ms: u64) -> SaveRound {
        SaveRound { pages, windows: 1, duration: Duration::from_millis(ms) }
    }

    #[test]
    fn the_pause_comes_when_what_is_left_fits() {
        // 1000 pages in 10 ms are 10 us a page, 15 us as expected in the pause; 15 ms of it are for pages.
        let limits = SaveLimits::default();
        let mut convergence = Convergence::new(&limits);
        assert!(matches!(convergence.after(round(1000, 10), 1001, Duration::ZERO), NextStep::Round));
        assert!(matches!(convergence.after(round(1000, 10), 999, Duration::from_millis(1)), NextStep::Round));
        assert!(matches!(convergence.after(round(1000, 10), 900, Duration::from_millis(1)), NextStep::Pause));
    }

    #[test]
    fn a_slow_round_counts_more_than_a_fast_one() {
        let limits = SaveLimits::default();
        let mut convergence = Convergence::new(&limits);
        convergence.after(round(1000, 100), 100_000, Duration::ZERO);
        assert!(matches!(convergence.after(round(1000, 1), 900, Duration::ZERO), NextStep::Round));
        // A round of a few pages does not push the slow one out.
        assert!(matches!(convergence.after(round(10, 0), 900, Duration::ZERO), NextStep::Round));
        assert!(matches!(convergence.after(round(1000, 1), 900, Duration::ZERO), NextStep::Pause));
    }

    #[test]
    fn after_pauses_that_were_broken_off_the_error_tells_the_time_that_they_would_have_taken() {
        let limits = SaveLimits::default();
        let mut convergence = Convergence::new(&limits);
        for pages in [100_000, 50_000, 60_000] {
            assert!(matches!(convergence.after(round(1000, 10), 100, Duration::ZERO), NextStep::Pause));
            assert_eq!(convergence.in_pause(pages, Duration::ZERO), InPause::BreakOff);
        }
        let refused = convergence.after(round(1000, 10), 100, Duration::ZERO);
        let NextStep::Refuse(SaveError::PauseTooLong { pages, needed, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(pages, 100_000);
        assert!(needed >= Duration::from_secs(1), "10 us a page: {needed:?}");
    }

    /// A save of which each pause had lasted for 25 ms before its last pages, of 10 us each; how it ends.
    fn late(beyond: BeyondBound, pages: u64) -> (u32, NextStep, InPause) {
        let limits = SaveLimits { beyond, ..SaveLimits::default() };
        let mut convergence = Convergence::new(&limits);
        let mut next = convergence.after(round(1000, 10), 100, Duration::ZERO);
        let mut in_pause = InPause::BreakOff;
        while matches!(next, NextStep::Pause) && in_pause == InPause::BreakOff {
            in_pause = convergence.in_pause(pages, Duration::from_millis(25));
            next = convergence.after(round(1000, 10), 100, Duration::ZERO);
        }
        (convergence.broken_off(), next, in_pause)
    }

    #[test]
    fn a_pause_that_is_over_before_its_pages_is_broken_off_and_the_error_tells_what_took_the_time() {
        let leave = BeyondBound::Leave { after_rounds: None };
        for (beyond, pages) in [(BeyondBound::Refuse, 100), (leave, 100), (leave, 100_000)] {
            let (broken_off, next, _) = late(beyond, pages);
            let NextStep::Refuse(error @ SaveError::StateTooLong { .. }) = next else { panic!("{next:?}") };
            assert_eq!(broken_off, 3);
            let expected = "cannot save within a pause of 20ms: the devices were at rest and their disks flushed only \
                            after 25ms; allow a longer pause, or let the guest write less to its disks";
            assert_eq!(error.to_string(), expected);
        }
        let (broken_off, _, in_pause) = late(BeyondBound::PauseLonger, 100);
        assert_eq!((broken_off, in_pause), (3, InPause::Write));
    }

    #[test]
    fn pages_get_what_is_left_of_a_pause() {
        let limits = SaveLimits::default();
        let mut convergence = Convergence::new(&limits);
        convergence.after(round(1000, 10), 100, Duration::ZERO);
        // 8 ms.
        assert_eq!(convergence.in_pause(800, Duration::from_millis(12)), InPause::Write);
        assert_eq!(convergence.in_pause(800, Duration::from_millis(13)), InPause::BreakOff);
        let limits = SaveLimits { beyond: BeyondBound::Leave { after_rounds: None }, ..limits };
        let mut convergence = Convergence::new(&limits);
        convergence.after(round(1000, 10), 100, Duration::ZERO);
        assert_eq!(convergence.in_pause(800, Duration::from_millis(13)), InPause::Leave);
    }

    #[test]
    fn more_pages_after_a_pause_that_was_put_off_are_not_the_guests_speed() {
        let limits = SaveLimits::default();
        let mut convergence = Convergence::new(&limits);
        assert!(matches!(convergence.after(round(1000, 10), 1600, Duration::ZERO), NextStep::Round));
        assert!(matches!(convergence.after(round(1000, 5), 1600, Duration::ZERO), NextStep::Round));
        assert!(matches!(convergence.after(round(1000, 5), 1600, Duration::ZERO), NextStep::Pause));
        convergence.put_off();
        assert!(convergence.goes_on() && convergence.broken_off() == 0);
        assert!(matches!(convergence.after(round(1000, 5), 90_000, Duration::ZERO), NextStep::Round));
    }

    #[test]
    fn rounds_that_do_not_shrink_are_refused_or_end_in_a_longer_pause() {
        let outcome = |beyond| {
            let limits = SaveLimits { beyond, ..SaveLimits::default() };
            let mut convergence = Convergence::new(&limits);
            let mut rounds = 0;
            loop {
                rounds += 1;
                match convergence.after(round(100_000, 1000), 100_000 - rounds, Duration::ZERO) {
                    NextStep::Round => assert!(rounds < 100, "it ends"),
                    next => break (rounds, next),
                }
            }
        };
        let (rounds, next) = outcome(BeyondBound::Refuse);
        let NextStep::Refuse(error) = next else { panic!("{next:?}") };
        assert_eq!(rounds, 4);
        let expected = "cannot save within a pause of 20ms: after 4 rounds, 99996 pages that the guest keeps writing \
                        need about 1.50494s; allow a longer pause, or save to a faster disk";
        assert_eq!(error.to_string(), expected);
        assert!(matches!(outcome(BeyondBound::PauseLonger), (4, NextStep::Pause)));
    }

    #[test]
    fn pages_are_left_after_the_rounds_that_were_asked_for_unless_they_fit() {
        let after = |after_rounds, left| {
            let beyond = BeyondBound::Leave { after_rounds };
            let limits = SaveLimits { beyond, ..SaveLimits::default() };
            let mut convergence = Convergence::new(&limits);
            let mut rounds = 1;
            while matches!(convergence.after(round(100_000, 1000), left, Duration::ZERO), NextStep::Round) {
                rounds += 1;
            }
            (rounds, convergence.in_pause(left, Duration::ZERO), convergence.broken_off())
        };
        assert_eq!(after(NonZeroU32::new(1), 50_000), (1, InPause::Leave, 0));
        assert_eq!(after(NonZeroU32::new(3), 50_000), (3, InPause::Leave, 0));
        assert_eq!(after(NonZeroU32::new(3), 100), (1, InPause::Write, 0));
        assert_eq!(after(None, 50_000), (4, InPause::Leave, 0), "more rounds do not help");
    }

    #[test]
    fn rounds_that_shrink_slowly_are_bounded() {
        let limits = SaveLimits { rounds_max: 7, ..SaveLimits::default() };
        let mut convergence = Convergence::new(&limits);
        let mut left = 1_000_000;
        for number in 1..7 {
            left = left * 8 / 10;
            assert!(matches!(convergence.after(round(left, left), left, Duration::ZERO), NextStep::Round), "{number}");
        }
        assert!(matches!(convergence.after(round(left, left), left * 8 / 10, Duration::ZERO), NextStep::Refuse(_)));
        assert_eq!(convergence.into_rounds().len(), 7);
    }
}
