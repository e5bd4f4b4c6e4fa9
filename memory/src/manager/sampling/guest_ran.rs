//! Whether a guest ran while it was sampled. Of a guest that waited for a CPU a sample sees no touch, not even of its
//! hot windows.
//!
//! ```text
//!   vCPUs' CPU time   ──┐ in the second or more before: the guest's usual part of a CPU
//!                       ├─▶ in this sample at least a quarter of that, or a millisecond ─▶ no touch is a result
//!   in this sample    ──┘ less ─▶ no touch says nothing
//! ```
//!
//! A guest at rest uses little of a CPU in every sample, so its windows are known to be idle all the same.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::Moment;

use crate::second_level::SecondLevel;

/// CPU time in which a guest touches what it uses all the time: four pages of a window of 512 in 0.6 ms, at the 200 000
/// touches a second of a table of 256 MiB.
const ENOUGH: Duration = Duration::from_millis(1);

/// Time between two readings that tell the usual part: a guest does not wait for a CPU as long.
const USUAL_OVER: Duration = Duration::from_secs(1);

/// Part of its usual time that a guest must run during a sample.
const USUAL_PART: u32 = 4;

/// CPU time of a guest at the begin of its samples. It needs a second level that knows it.
pub(super) struct GuestRan {
    second_level: Option<Arc<dyn SecondLevel>>,
    /// Two readings at least [`USUAL_OVER`] apart, the earlier one first, at the begin of earlier samples.
    before: Option<[Reading; 2]>,
    /// Reading at the begin of this sample.
    began: Option<Reading>,
}

#[derive(Clone, Copy)]
struct Reading {
    at: Moment,
    cpu: Duration,
}

impl Reading {
    /// Time and CPU time from another reading to this one.
    fn since(self, earlier: Reading) -> (Duration, Duration) {
        (self.at.since(earlier.at), self.cpu.saturating_sub(earlier.cpu))
    }
}

impl GuestRan {
    /// Without a second level, every result counts.
    pub fn new(second_level: Option<Arc<dyn SecondLevel>>) -> GuestRan {
        GuestRan { second_level, before: None, began: None }
    }

    /// A sample begins.
    pub fn begin(&mut self, now: Moment) {
        self.began = self.read(now);
        self.before = self.began.map(|began| match self.before {
            None => [began; 2],
            Some([_, later]) if began.at.since(later.at) >= USUAL_OVER => [later, began],
            Some(before) => before,
        });
    }

    /// Whether windows that were not touched in the sample that ends now are idle, as far as the guest's CPU time says.
    pub fn has_run(&self, now: Moment) -> bool {
        let (Some([before, _]), Some(began), Some(ended)) = (self.before, self.began, self.read(now)) else {
            return true;
        };
        let ((usual_time, usual_cpu), (time, cpu)) = (began.since(before), ended.since(began));
        let usual_ns = usual_cpu.as_nanos() * time.as_nanos() / usual_time.as_nanos().max(1);
        cpu >= ENOUGH || cpu.as_nanos() * u128::from(USUAL_PART) >= usual_ns
    }

    /// Another guest runs from now on.
    pub fn forget(&mut self) {
        (self.before, self.began) = (None, None);
    }

    fn read(&self, at: Moment) -> Option<Reading> {
        let cpu = self.second_level.as_ref()?.vcpu_time().ok()?;
        Some(Reading { at, cpu })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_second_level::FakeSecondLevel;

    /// Whether a sample counts, of 40 ms in which the guest ran for `ran_us`, after a second in which it ran for
    /// `usual_ms`.
    fn counts(usual_ms: u64, ran_us: u64) -> bool {
        let kvm = Arc::new(FakeSecondLevel::new(&[]));
        let mut guest = GuestRan::new(Some(kvm.clone()));
        let at = |ms| Moment::after_start(Duration::from_millis(ms));
        let mut cpu = Duration::from_secs(5);
        kvm.set_vcpu_time(cpu);
        guest.begin(at(0));
        cpu += Duration::from_millis(usual_ms);
        kvm.set_vcpu_time(cpu);
        guest.begin(at(1000));
        kvm.set_vcpu_time(cpu + Duration::from_micros(ran_us));
        guest.has_run(at(1040))
    }

    #[test]
    fn a_busy_guest_has_run_after_a_millisecond() {
        assert_eq!([0, 500, 999, 1000, 40_000].map(|ran_us| counts(1000, ran_us)), [false, false, false, true, true]);
        assert_eq!([999, 1000].map(|ran_us| counts(300, ran_us)), [false, true], "on a third of a CPU as well");
    }

    #[test]
    fn a_guest_at_rest_runs_a_quarter_of_what_it_usually_does() {
        // 10 ms a second are 400 us in 40 ms.
        assert_eq!([0, 99, 100].map(|ran_us| counts(10, ran_us)), [false, false, true]);
        assert!(counts(0, 0), "a guest that is halted touches nothing");
    }

    #[test]
    fn what_is_not_known_is_no_reason_to_drop_a_sample() {
        let now = Moment::after_start(Duration::from_secs(1));
        let kvm = Arc::new(FakeSecondLevel::new(&[])); // without the vCPUs' time
        for second_level in [None, Some(kvm as Arc<dyn SecondLevel>)] {
            let mut guest = GuestRan::new(second_level);
            (0..2).for_each(|_| guest.begin(now));
            assert!(guest.has_run(now));
        }
        let kvm = Arc::new(FakeSecondLevel::new(&[]));
        kvm.set_vcpu_time(Duration::ZERO);
        let mut guest = GuestRan::new(Some(kvm));
        guest.begin(now);
        assert!(guest.has_run(now), "it is the first sample");
    }
}
