//! A policy that only watches, and a monitor outside of the guest's process.

use std::sync::Arc;

use parking_lot::Mutex;
use wideleaf_memory::sensors::outside_heat::{Heat, HeatSource, LatestHeat};
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::{Budget, Moment, Plan, Snapshot};

/// Keeps the latest snapshot, and does nothing.
pub struct Sees {
    pub needs: Needs,
    pub latest: Arc<Mutex<Snapshot>>,
}

impl Sees {
    /// Asks which memory is used.
    pub fn access(latest: Arc<Mutex<Snapshot>>) -> Sees {
        Sees { needs: Needs { access: true, ..Needs::default() }, latest }
    }
}

impl Policy for Sees {
    fn name(&self) -> &'static str {
        "sees"
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {
        *self.latest.lock() = snapshot.clone();
    }
}

/// A monitor outside of the guest's process, with the reading that it is given.
#[derive(Default)]
pub struct Outside(pub Mutex<Option<LatestHeat<Arc<Heat>>>>);

impl HeatSource for Outside {
    fn latest(&self) -> Option<LatestHeat<Arc<Heat>>> {
        self.0.lock().clone()
    }

    fn why_not(&self) -> Option<String> {
        None
    }
}
