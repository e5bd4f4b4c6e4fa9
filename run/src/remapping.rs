//! Watches a guest that goes on here after a snapshot or a migration until KVM maps it large again. The rounds have
//! made KVM's mappings small, while the host's huge pages stayed: KVM maps large again where the guest touches memory.
//!
//! ```text
//!   save ─ rounds: small mappings ─▶ logs off ─▶ looks, until nine tenths are large again or a minute is over
//! ```

use std::time::{Duration, Instant};

use wideleaf_control::vm::RemappedView;
use wideleaf_memory::SecondLevel;
use wideleaf_policies::PageSize;

use crate::past_saves::PastSaves;

/// Time after which a guest is not watched any more: it does not touch the rest.
const WATCHED_FOR: Duration = Duration::from_secs(60);

/// Guest RAM that KVM maps by pages of 2 MiB and more now, in bytes; `None` where KVM does not count it.
pub(crate) fn large_bytes(second_level: &dyn SecondLevel) -> Option<u64> {
    let mapped = second_level.mapping_stats().ok()?;
    Some((mapped.mapped(PageSize::Huge2M) + mapped.mapped(PageSize::Giant1G)).get())
}

/// A guest that is watched.
pub(crate) struct Remapping {
    view: RemappedView,
    began: Instant,
}

impl Remapping {
    /// Begins right after the rounds. `before`: what KVM mapped large before them; `None` if that was nothing, or is
    /// not known.
    pub fn begin(before: Option<u64>, after: Option<u64>) -> Option<Remapping> {
        let view = RemappedView {
            large_before_bytes: before.filter(|bytes| *bytes > 0)?,
            large_after_bytes: after?,
            seconds: None,
        };
        Some(Remapping { view, began: Instant::now() })
    }

    /// What is known so far.
    pub fn view(&self) -> RemappedView {
        self.view
    }

    /// Looks at what KVM maps large, and notes it once that is enough. Returns whether to look again.
    pub fn look(&mut self, second_level: &dyn SecondLevel, past: &PastSaves) -> bool {
        let goes_on = self.see(large_bytes(second_level), self.began.elapsed());
        if self.view.seconds.is_some() {
            past.note_remapped(self.view);
        }
        goes_on
    }

    fn see(&mut self, large: Option<u64>, passed: Duration) -> bool {
        let enough = self.view.large_before_bytes / 10 * 9;
        let is_enough = large.is_some_and(|bytes| bytes >= enough);
        self.view.seconds = is_enough.then_some(passed.as_secs_f64());
        !is_enough && passed < WATCHED_FOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_watched_until_nine_tenths_are_large_again_or_a_minute_is_over() {
        let mut watched = Remapping::begin(Some(100), Some(10)).expect("something was large");
        assert!(watched.see(Some(89), Duration::from_secs(1)));
        assert!(watched.see(None, Duration::from_secs(2)), "this look failed");
        assert_eq!((watched.view().large_after_bytes, watched.view().seconds), (10, None));
        assert!(!watched.see(Some(90), Duration::from_secs(3)));
        assert_eq!(watched.view().seconds, Some(3.0));
        let mut untouched = Remapping::begin(Some(100), Some(10)).expect("something was large");
        assert!(!untouched.see(Some(10), WATCHED_FOR));
        assert_eq!(untouched.view().seconds, None);
    }

    #[test]
    fn a_guest_that_kvm_did_not_map_large_or_does_not_count_is_not_watched() {
        for (before, after) in [(Some(0), Some(0)), (None, Some(5)), (Some(5), None)] {
            assert!(Remapping::begin(before, after).is_none());
        }
    }
}
