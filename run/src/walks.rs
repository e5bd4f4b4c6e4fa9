//! Page walks that the CPU counts while a guest or a native kernel runs.

use serde::{Deserialize, Serialize};

/// Page walks as the CPU counts them: in a guest, or in the threads of a native kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Walks {
    /// Cycles of the core.
    pub cycles: u64,
    /// Number of walks for data.
    pub walks: u64,
    /// Cycles of busy page-miss handlers, each on its own; `None` if the CPU does not count them.
    pub walk_cycles: Option<u64>,
}

impl Walks {
    /// Busy page-miss handlers on average: at most 1 for each that the core has.
    pub fn share(&self) -> Option<f64> {
        (self.cycles > 0).then_some(self.walk_cycles? as f64 / self.cycles as f64)
    }
}
