//! Count of the snapshots and migrations of a run, for its control socket and for wideleafd.

use std::sync::Arc;

use parking_lot::Mutex;
use wideleaf_control::vm::{BeforePauseView, PastSavesView, RemappedView, SavedView};

/// Figures of the source of a VM that came here.
#[derive(Clone, Copy)]
pub struct Arrival {
    /// Time for which no guest ran, in milliseconds.
    pub downtime_ms: f64,
    /// What KVM did for the guest there before that.
    pub before_pause: Option<BeforePauseView>,
}

/// Asks for these figures, once they are known.
pub type AskArrival = Arc<dyn Fn() -> Option<Arrival> + Send + Sync>;

/// Snapshots and migrations of a run that are over.
#[derive(Clone, Default)]
pub struct PastSaves {
    counted: Arc<Mutex<Option<PastSavesView>>>,
    /// Of a VM that came from another run.
    arrival: Option<AskArrival>,
}

impl PastSaves {
    /// Nothing is over yet. `arrival` is asked at each look, and must not wait.
    pub fn new(arrival: Option<AskArrival>) -> PastSaves {
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

    /// A snapshot has failed, after its guest paid this.
    pub fn count_failed_snapshot(&self, paid: Option<BeforePauseView>) {
        self.count(|past| {
            past.snapshots_failed += 1;
            past.last_failed = paid;
        });
    }

    /// The VM runs here and came from another run.
    pub fn count_arrival(&self) {
        self.count(|past| past.migrations += 1);
    }

    /// A migration has failed, after its guest paid this.
    pub fn count_failed_migration(&self, paid: Option<BeforePauseView>) {
        self.count(|past| {
            past.migrations_failed += 1;
            past.last_failed = paid;
        });
    }

    /// KVM's large mappings after the latest of them.
    pub fn note_remapped(&self, remapped: RemappedView) {
        self.count(|past| past.last_remapped = Some(remapped));
    }

    fn count(&self, add: impl FnOnce(&mut PastSavesView)) {
        add(self.counted.lock().get_or_insert_default());
    }

    /// All of them; `None` before the first.
    pub fn view(&self) -> Option<PastSavesView> {
        let counted = self.counted.lock().clone();
        match self.arrival.as_ref().and_then(|arrival| arrival()) {
            None => counted,
            Some(Arrival { downtime_ms, before_pause }) => Some(PastSavesView {
                arrival_downtime_ms: Some(downtime_ms),
                arrival_before_pause: before_pause,
                ..counted.unwrap_or_default()
            }),
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
        past.clone().count_failed_snapshot(None);
        let view = past.view().expect("they are counted");
        assert_eq!((view.snapshots, view.snapshots_failed, view.migrations), (1, 1, 0));
        assert_eq!((view.last_pause_ms, view.last_failed, view.arrival_downtime_ms), (Some(2.5), None, None));
    }

    #[test]
    fn what_the_guest_paid_for_a_save_is_kept_until_the_next_one_that_fails() {
        let past = PastSaves::new(None);
        let paid = BeforePauseView { seconds: 1.5, system_ms: 90.0, faults: 700, exits: 800 };
        past.count_failed_migration(Some(paid));
        past.count_arrival();
        let view = past.view().expect("they are counted");
        assert_eq!((view.migrations, view.migrations_failed, view.last_failed), (1, 1, Some(paid)));
        past.count_failed_snapshot(None);
        assert_eq!(past.view().expect("they are counted").last_failed, None, "this one failed before it began");
    }

    #[test]
    fn a_vm_that_came_from_another_run_says_what_the_guest_paid_once_the_source_has_said_it() {
        let view = |arrival: Option<Arrival>| PastSaves::new(Some(Arc::new(move || arrival))).view();
        assert_eq!(view(None), None);
        let before_pause = Some(BeforePauseView { faults: 7, ..BeforePauseView::default() });
        let told = view(Some(Arrival { downtime_ms: 40.0, before_pause })).expect("it is known");
        assert_eq!((told.arrival_downtime_ms, told.arrival_before_pause), (Some(40.0), before_pause));
    }
}
