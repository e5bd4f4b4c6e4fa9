//! A gate with the state and the events that a test sets.

use parking_lot::Mutex;
use wideleaf_memory::gate::{Gate, GateState, KeptHoles};
use wideleaf_policies::Moment;
use wideleaf_policies::recovery::Events;

/// State and events.
pub(crate) struct TestGate(pub(crate) Mutex<(GateState, Events)>);

impl Gate for TestGate {
    fn state(&self) -> GateState {
        self.0.lock().0
    }

    fn keeps_holes(&self) -> Option<KeptHoles> {
        None
    }

    fn events(&self, _: Moment) -> Events {
        self.0.lock().1
    }
}
