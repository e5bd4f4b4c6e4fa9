//! A wrapper of KVM's side in which calls fail at random, as [`crate::testing::fault_injection`] decides. Each failure
//! leaves what the kernel would leave: nothing, or a dirty log that is cleared already.

use std::sync::Arc;

use wideleaf_policies::MappingStats;

use crate::second_level::{FaultCounters, Paging, PagingMode, SecondLevel, SecondLevelError, Slot, SlotId};
use crate::testing::fault_injection::{Fate, FaultInjection};

/// Wraps a second level; see the module. `resume` never fails: it may do so only if nothing was paused.
pub struct FailingSecondLevel {
    real: Arc<dyn SecondLevel>,
    faults: Arc<FaultInjection>,
}

impl FailingSecondLevel {
    /// `faults` decides which calls to `real` fail.
    pub fn new(real: Arc<dyn SecondLevel>, faults: Arc<FaultInjection>) -> FailingSecondLevel {
        FailingSecondLevel { real, faults }
    }

    fn refuse(&self, what: &'static str, errnos: &[i32]) -> Result<(), SecondLevelError> {
        self.faults.refuse(what, errnos).map_err(|source| SecondLevelError::Ioctl { what, source })
    }
}

impl SecondLevel for FailingSecondLevel {
    fn paging(&self) -> Paging {
        self.real.paging()
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.refuse("mapping_stats", &[libc::EIO])?;
        self.real.mapping_stats()
    }

    fn fault_counters(&self) -> Result<FaultCounters, SecondLevelError> {
        self.refuse("fault_counters", &[libc::EIO])?;
        self.real.fault_counters()
    }

    fn slots(&self) -> Vec<Slot> {
        self.real.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        self.refuse("set_dirty_log", &[libc::ENOMEM])?;
        self.real.set_dirty_log(slot, is_on)
    }

    /// A late failure has cleared the log: `KVM_GET_DIRTY_LOG` copies it out last.
    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let what = "take_dirty_log";
        let source = match self.faults.fate(what, &[libc::EFAULT, libc::ENOMEM]) {
            Fate::Fine => return self.real.take_dirty_log(slot),
            Fate::Early(error) => error,
            Fate::Late(error) => {
                self.real.take_dirty_log(slot)?;
                error
            }
        };
        Err(SecondLevelError::Ioctl { what, source })
    }

    fn start_dirty_log_set(&self, slot: SlotId) -> Result<bool, SecondLevelError> {
        self.refuse("start_dirty_log_set", &[libc::ENOMEM])?;
        self.real.start_dirty_log_set(slot)
    }

    fn read_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        self.refuse("read_dirty_log", &[libc::EFAULT, libc::ENOMEM])?;
        self.real.read_dirty_log(slot)
    }

    fn clear_dirty_log(&self, slot: SlotId, first_page: u64, pages: &[u64]) -> Result<(), SecondLevelError> {
        self.refuse("clear_dirty_log", &[libc::EFAULT])?;
        self.real.clear_dirty_log(slot, first_page, pages)
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        let timed_out = |_| SecondLevelError::PauseTimedOut { vcpu: 0, waited_ms: 0 };
        self.faults.refuse("pause", &[libc::ETIMEDOUT]).map_err(timed_out)?;
        self.real.pause()
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.real.resume()
    }

    fn is_paused(&self) -> bool {
        self.real.is_paused()
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        self.refuse("paging_modes", &[libc::EINTR])?;
        self.real.paging_modes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_second_level::FakeSecondLevel;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    fn real() -> Arc<FakeSecondLevel> {
        Arc::new(FakeSecondLevel::new(&[GpaRange::new(Gpa::new(0), mib(2)).expect("fits")]))
    }

    #[test]
    fn a_refused_switch_or_pause_leaves_everything_as_it_was() {
        let real = real();
        let failing = FailingSecondLevel::new(real.clone(), Arc::new(FaultInjection::new(1, 1)));
        assert!(failing.set_dirty_log(SlotId(0), true).is_err() && failing.pause().is_err());
        assert!(!real.slots()[0].is_dirty_logged && real.resume().is_err(), "nothing is logged, nothing is paused");
    }

    #[test]
    fn a_dirty_log_that_is_refused_late_is_gone() {
        let mut left = [0; 2];
        for seed in 0..64 {
            let real = real();
            real.set_dirty_log(SlotId(0), true).expect("nothing fails there");
            real.write(Gpa::new(0));
            let failing = FailingSecondLevel::new(real.clone(), Arc::new(FaultInjection::new(seed, 1)));
            failing.take_dirty_log(SlotId(0)).expect_err("one call in one fails");
            left[real.take_dirty_log(SlotId(0)).expect("nothing fails there")[0] as usize] += 1;
        }
        assert!(left.iter().all(|times| *times > 8), "{left:?}");
    }
}
