//! Count of the snapshots and migrations of a run, for its control socket and for wideleafd.

use std::sync::Arc;

use parking_lot::Mutex;
use wideleaf_control::vm::{PastSavesView, SavedView};

/// Time for which no guest ran when the VM came here, in milliseconds, once that is known.
pub type ArrivalDowntime = Arc<dyn Fn() -> Option<f64> + Send + Sync>;

/// Snapshots and migrations of a run that are over.
#[derive(Clone, Default)]
pub struct PastSaves {
    counted: Arc<Mutex<Option<PastSavesView>>>,
    /// Of a VM that came from another run.
    arrival: Option<ArrivalDowntime>,
}

impl PastSaves {
    /// Nothing is over yet. `arrival` is asked at each look, and must not wait.
    pub fn new(arrival: Option<ArrivalDowntime>) -> PastSaves {
        PastSaves { arrival, ..PastSaves::default() }
    }

    /// A snapshot is written.
    pub fn count_snapshot(&self, saved: &SavedView) {
        self.count(|past| {
            past.snapshots += 1;
            past.last_pause_ms = Some(saved.pause_ms);
            past.last_before_pause = saved.before_pause;
        });
    }

    /// A snapshot has failed.
    pub fn count_failed_snapshot(&self) {
        self.count(|past| past.snapshots_failed += 1);
    }

    /// A migration has failed.
    pub fn count_failed_migration(&self) {
        self.count(|past| past.migrations_failed += 1);
    }

    fn count(&self, add: impl FnOnce(&mut PastSavesView)) {
        add(self.counted.lock().get_or_insert_default());
    }

    /// All of them; `None` before the first.
    pub fn view(&self) -> Option<PastSavesView> {
        let counted = self.counted.lock().clone();
        match self.arrival.as_ref().and_then(|downtime_ms| downtime_ms()) {
            None => counted,
            came => Some(PastSavesView { arrival_downtime_ms: came, ..counted.unwrap_or_default() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_fails_keeps_the_figures_of_the_one_before() {
        let past = PastSaves::new(None);
        assert_eq!(past.view(), None);
        let saved = SavedView {
            stored_bytes: 4096,
            written_bytes: 4096,
            rounds: 1,
            pause_ms: 2.5,
            seconds: 0.5,
            was_paused: false,
            before_pause: None,
        };
        past.count_snapshot(&saved);
        past.clone().count_failed_snapshot();
        past.count_failed_migration();
        let view = past.view().expect("they are counted");
        assert_eq!((view.snapshots, view.snapshots_failed, view.migrations_failed), (1, 1, 1));
        assert_eq!((view.last_pause_ms, view.arrival_downtime_ms), (Some(2.5), None));
    }

    #[test]
    fn a_vm_that_came_from_another_run_says_how_long_no_guest_ran_once_the_source_has_said_it() {
        let view = |downtime_ms: Option<f64>| PastSaves::new(Some(Arc::new(move || downtime_ms))).view();
        assert_eq!(view(None), None);
        assert_eq!(view(Some(40.0)).and_then(|view| view.arrival_downtime_ms), Some(40.0));
    }
}
