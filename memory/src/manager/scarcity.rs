//! Whether the kernel is asked for another huge page, on a host that has none. A question that ends in a no is dear: the kernel compacts
//! its memory, 20 to 40 ms of CPU each (`experiment run fragmented`, a host of 24 GiB), and may move pages of guests.
//!
//! ```text
//!           no huge page to be had
//!   Plenty ───────────────────────▶ Scarce   asked for as many windows as blocks of 2 MiB have become free since,
//!     ▲                               │      and once in a while for one all the same: after 500 times what
//!     └─── that one had its page: ────┘      the question took, twice that, … a minute
//!          compaction makes some
//! ```
//!
//! khugepaged waits too, a minute after each failure (`alloc_sleep_millisecs`, Documentation/admin-guide/mm/transhuge.rst). What a question
//! takes depends on the kernel: one that has just compacted in vain says no at once, for a while (mm/compaction.c, `defer_compaction`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wideleaf_policies::{Moment, OutcomeResult, Refusal};

use crate::host::Host;
use crate::sensors::free_blocks::{BUDDYINFO, free_huge_pages};

/// The wait after the first refusal, in times of the CPU time it took: 0.2 % of a core go into such questions at most. It doubles with each.
const PAUSE_TIMES: u32 = 500;
const PAUSE_SHORTEST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(60);

/// Shared by the threads that copy.
#[derive(Debug, Default)]
pub(super) struct Scarcity(Mutex<Option<Scarce>>);

/// What is known of a host that had no huge page.
#[derive(Clone, Copy, Debug)]
struct Scarce {
    /// From one attempt to the next.
    pause: Duration,
    /// When it is asked in spite of that.
    next_attempt: Moment,
    /// Huge pages in free blocks that were not to be had: the kernel's reserves, or those of another node.
    kept: u64,
    /// How many more may be asked for at this tick; `None` before the first question.
    left: Option<u64>,
}

/// Why the kernel may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grounds {
    /// Nothing speaks against it.
    Plenty,
    /// A block is free.
    FreeBlock,
    /// It is time to try.
    Attempt,
}

impl Scarcity {
    /// Free blocks are counted anew.
    pub fn begin_tick(&self) {
        if let Some(scarce) = &mut *self.lock() {
            scarce.left = None;
        }
    }

    /// Whether the kernel may be asked for a huge page, one.
    pub fn may_ask(&self, host: &dyn Host) -> Option<Grounds> {
        match &mut *self.lock() {
            None => Some(Grounds::Plenty),
            Some(scarce) => scarce.may_ask(host),
        }
    }

    /// What came of it, in that much time of a CPU.
    pub fn learn(&self, host: &dyn Host, grounds: Grounds, result: OutcomeResult, cpu: Duration) {
        let mut state = self.lock();
        match (result, grounds) {
            (OutcomeResult::Refused(Refusal::NoHugePage), _) => {
                // Several threads may have asked before the first of them was refused: theirs are one refusal.
                let before = state.filter(|_| grounds != Grounds::Plenty).map_or(Duration::ZERO, |scarce| scarce.pause);
                let pause = (before * 2).max(cpu.saturating_mul(PAUSE_TIMES)).clamp(PAUSE_SHORTEST, PAUSE_LONGEST);
                let next_attempt = host.now() + pause;
                *state = Some(Scarce { pause, next_attempt, kept: free_now(host), left: Some(0) });
            }
            (OutcomeResult::Done, Grounds::Attempt) => *state = None,
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Scarce>> {
        // Replaced as a whole, or in one field that a tick resets.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scarce {
    fn may_ask(&mut self, host: &dyn Host) -> Option<Grounds> {
        let left = *self.left.get_or_insert_with(|| {
            let free = free_now(host);
            self.kept = self.kept.min(free);
            free - self.kept
        });
        if left > 0 {
            self.left = Some(left - 1);
            return Some(Grounds::FreeBlock);
        }
        let now = host.now();
        let is_due = now >= self.next_attempt;
        if is_due {
            // Whatever becomes of this one, the next one waits.
            self.next_attempt = now + self.pause;
        }
        is_due.then_some(Grounds::Attempt)
    }
}

/// None where the kernel does not say.
fn free_now(host: &dyn Host) -> u64 {
    host.read_text(BUDDYINFO).map_or(0, |text| free_huge_pages(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::FakeHost;

    const NO: OutcomeResult = OutcomeResult::Refused(Refusal::NoHugePage);

    /// A question that takes so little that the wait is the shortest.
    const CHEAP: Duration = Duration::from_millis(1);

    fn set_free(host: &FakeHost, huge_pages: u64) {
        host.set_text(BUDDYINFO, &format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {huge_pages} 0\n"));
    }

    /// A host that had a huge page too few a moment ago, with so many in free blocks that nobody can have.
    fn scarce(kept: u64) -> (FakeHost, Scarcity) {
        let (host, scarcity) = (FakeHost::default(), Scarcity::default());
        set_free(&host, kept);
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Plenty));
        scarcity.learn(&host, Grounds::Plenty, NO, CHEAP);
        (host, scarcity)
    }

    #[test]
    fn nothing_is_held_back_before_a_refusal_for_want_of_a_page() {
        let (host, scarcity) = (FakeHost::default(), Scarcity::default());
        for result in [OutcomeResult::Done, OutcomeResult::Refused(Refusal::Busy)] {
            assert_eq!(scarcity.may_ask(&host), Some(Grounds::Plenty));
            scarcity.learn(&host, Grounds::Plenty, result, CHEAP);
        }
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Plenty));
        assert_eq!(host.calls(), 0, "and nothing is looked at");
    }

    #[test]
    fn after_it_as_many_are_asked_for_as_blocks_have_become_free_since() {
        let (host, scarcity) = scarce(3);
        assert_eq!(scarcity.may_ask(&host), None);
        set_free(&host, 5);
        assert_eq!(scarcity.may_ask(&host), None, "counted once a tick");
        scarcity.begin_tick();
        assert_eq!(
            [(); 3].map(|()| scarcity.may_ask(&host)),
            [Some(Grounds::FreeBlock), Some(Grounds::FreeBlock), None]
        );
        // They were had, and one of those that the kernel kept: it has fewer to keep now.
        set_free(&host, 2);
        scarcity.learn(&host, Grounds::FreeBlock, OutcomeResult::Done, CHEAP);
        scarcity.begin_tick();
        assert_eq!(scarcity.may_ask(&host), None);
        set_free(&host, 3);
        scarcity.begin_tick();
        assert_eq!([(); 2].map(|()| scarcity.may_ask(&host)), [Some(Grounds::FreeBlock), None]);
    }

    #[test]
    fn blocks_that_are_free_and_not_to_be_had_are_not_asked_for_again() {
        let (host, scarcity) = scarce(0);
        set_free(&host, 7);
        scarcity.begin_tick();
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::FreeBlock));
        scarcity.learn(&host, Grounds::FreeBlock, NO, CHEAP);
        for _ in 0..3 {
            assert_eq!(scarcity.may_ask(&host), None);
            scarcity.begin_tick();
        }
    }

    #[test]
    fn one_is_asked_for_all_the_same_at_growing_intervals() {
        let (host, scarcity) = scarce(0);
        let mut asked_at = Vec::new();
        for second in 0..200 {
            if let Some(grounds) = scarcity.may_ask(&host) {
                assert_eq!((grounds, scarcity.may_ask(&host)), (Grounds::Attempt, None), "one at a time");
                scarcity.learn(&host, grounds, NO, CHEAP);
                asked_at.push(second);
            }
            scarcity.begin_tick();
            host.sleep(Duration::from_secs(1));
        }
        assert_eq!(asked_at, [1, 3, 7, 15, 31, 63, 123, 183]);
    }

    #[test]
    fn the_dearer_a_question_the_longer_the_wait_and_a_minute_at_most() {
        for (cpu_ms, second_attempt) in [(20, 10), (40, 20), (1000, 60)] {
            let (host, scarcity) = (FakeHost::default(), Scarcity::default());
            scarcity.learn(&host, Grounds::Plenty, NO, Duration::from_millis(cpu_ms));
            host.sleep(Duration::from_millis(second_attempt * 1000 - 1));
            assert_eq!(scarcity.may_ask(&host), None, "{cpu_ms} ms");
            host.sleep(Duration::from_millis(1));
            assert_eq!(scarcity.may_ask(&host), Some(Grounds::Attempt), "{cpu_ms} ms");
        }
    }

    #[test]
    fn an_attempt_that_was_not_made_is_not_repeated_at_once_and_no_refusal() {
        let (host, scarcity) = scarce(0);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Attempt));
        scarcity.learn(&host, Grounds::Attempt, OutcomeResult::Refused(Refusal::Busy), CHEAP);
        assert_eq!(scarcity.may_ask(&host), None);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Attempt));
    }

    #[test]
    fn when_compaction_makes_pages_again_nothing_is_held_back() {
        let (host, scarcity) = scarce(0);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Attempt));
        scarcity.learn(&host, Grounds::Attempt, OutcomeResult::Done, CHEAP);
        assert_eq!([(); 2].map(|()| scarcity.may_ask(&host)), [Some(Grounds::Plenty); 2]);
    }

    #[test]
    fn threads_that_were_refused_together_wait_as_for_one() {
        let (host, scarcity) = scarce(0);
        (0..8).for_each(|_| scarcity.learn(&host, Grounds::Plenty, NO, CHEAP));
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(scarcity.may_ask(&host), Some(Grounds::Attempt));
    }
}
