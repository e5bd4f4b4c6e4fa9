//! Fault injection at random, for long tests on the real kernel. [`FailingHost`], [`FailingMover`] and
//! [`FailingSecondLevel`] wrap the real ones and make some calls fail, with errors that the real ones return.
//!
//! ```text
//!                                     ┌─ Fine ──▶ the real call
//!   manager ──▶ a wrapper ──▶ at random ─ Early ─▶ an error; the real call is not made
//!                                     └─ Late ──▶ a part of the real call, if the contract allows that, then an error
//! ```
//!
//! A failure never hides an effect: the contract of a failed call holds for injected failures as well.
//!
//! [`FailingHost`]: crate::testing::failing_host::FailingHost
//! [`FailingMover`]: crate::testing::failing_mover::FailingMover
//! [`FailingSecondLevel`]: crate::testing::failing_second_level::FailingSecondLevel

use std::collections::BTreeMap;
use std::io;

use parking_lot::{Mutex, MutexGuard};

/// Decides which calls fail. Shared by the interfaces of one manager, from any thread. The same seed gives the same
/// numbers; which call gets which number depends on the threads.
#[derive(Debug)]
pub struct FaultInjection {
    one_in: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: RandomNumbers,
    counts: BTreeMap<&'static str, u64>,
}

/// Course of one call.
#[derive(Debug)]
pub(crate) enum Fate {
    /// The real call is made.
    Fine,
    /// The real call is not made.
    Early(io::Error),
    /// The real call is made, perhaps in part.
    Late(io::Error),
}

impl FaultInjection {
    /// Makes one call in `one_in` fail; none for zero.
    pub fn new(seed: u64, one_in: u64) -> FaultInjection {
        FaultInjection {
            one_in,
            state: Mutex::new(State { random: RandomNumbers::new(seed), counts: BTreeMap::new() }),
        }
    }

    /// Number of failed calls so far, by name.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.state().counts.clone()
    }

    /// Chooses the course of a call that may fail early or late, with one of `errnos`.
    pub(crate) fn fate(&self, call: &'static str, errnos: &[i32]) -> Fate {
        let mut state = self.state();
        if self.one_in == 0 || !state.random.number().is_multiple_of(self.one_in) {
            return Fate::Fine;
        }
        *state.counts.entry(call).or_default() += 1;
        let errno = errnos[state.random.below(errnos.len() as u64) as usize];
        let error = io::Error::from_raw_os_error(errno);
        if state.random.number().is_multiple_of(2) { Fate::Early(error) } else { Fate::Late(error) }
    }

    /// Chooses it for a call that changes nothing on a failure.
    pub(crate) fn refuse(&self, call: &'static str, errnos: &[i32]) -> io::Result<()> {
        match self.fate(call, errnos) {
            Fate::Fine => Ok(()),
            Fate::Early(error) | Fate::Late(error) => Err(error),
        }
    }

    /// Whether a call that may do only a part of its work does so this time.
    pub(crate) fn is_short(&self, call: &'static str) -> bool {
        let mut state = self.state();
        let is_short = self.one_in > 0 && state.random.number().is_multiple_of(self.one_in);
        *state.counts.entry(call).or_default() += u64::from(is_short);
        is_short
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Pseudo-random numbers from a seed: xorshift (Marsaglia, "Xorshift RNGs", 2003).
#[derive(Clone, Debug)]
pub struct RandomNumbers(u64);

impl RandomNumbers {
    /// Accepts any seed; zero, for which xorshift would return only zeroes, is replaced.
    pub fn new(seed: u64) -> RandomNumbers {
        /// 2^64 over the golden ratio: close seeds get distant starts (Knuth, TAOCP 3, 6.4).
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut random = RandomNumbers(seed.wrapping_add(1).wrapping_mul(SPREAD).max(1));
        random.number();
        random
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number below `end`, which must not be zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requested_share_of_calls_fails_and_each_is_counted() {
        let faults = FaultInjection::new(7, 10);
        let failed = (0..10_000).filter(|_| faults.refuse("a", &[libc::EBUSY]).is_err()).count() as u64;
        assert!((800..1200).contains(&failed), "{failed} of 10000 calls, one in ten");
        assert_eq!(faults.counts(), BTreeMap::from([("a", failed)]));
        assert!((0..10_000).all(|_| FaultInjection::new(7, 0).refuse("a", &[libc::EBUSY]).is_ok()), "none");
    }

    #[test]
    fn each_errno_and_each_fate_occurs() {
        let faults = FaultInjection::new(1, 1);
        let errnos = [libc::EBUSY, libc::ENOMEM];
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            match faults.fate("a", &errnos) {
                Fate::Fine => panic!("one call in one fails"),
                Fate::Early(error) => early.extend(error.raw_os_error()),
                Fate::Late(error) => late.extend(error.raw_os_error()),
            }
        }
        for found in [early, late] {
            assert!(errnos.iter().all(|errno| found.contains(errno)), "{found:?}");
        }
    }

    #[test]
    fn a_seed_repeats_its_numbers_and_another_one_differs() {
        let three = |seed| [(); 3].map(|()| RandomNumbers::new(seed).number());
        assert_eq!(three(5), three(5));
        assert!((0..100).all(|seed| RandomNumbers::new(seed).number() != 0 && three(seed) != three(seed + 1)));
        assert_ne!(RandomNumbers::new(u64::MAX).number(), 0);
    }
}
