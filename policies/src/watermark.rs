//! Whether the host is short of memory. Two marks prevent a value near a mark from switching a policy on and off
//! (HawkEye, ASPLOS '19: recover from 85 % used down to 70 %; DAMON, "watermarks").
//!
//! ```text
//!   used   70 %            85 %
//!   ───────┼───────────────┼──────▶
//!     off  │   as it was   │  on
//!          └─ near: data that is needed once it is on may be collected
//! ```

use crate::snapshot::HostMemory;
use crate::units::PerTenThousand;

/// A switch that depends on the share of host memory in use.
#[derive(Clone, Copy, Debug)]
pub struct Watermark {
    on_from: PerTenThousand,
    off_below: PerTenThousand,
    is_on: bool,
    is_near: bool,
}

impl Watermark {
    /// A switch that is off: on from `on_from`, off again below `off_below` (or below `on_from`, if that is lower).
    pub fn new(on_from: PerTenThousand, off_below: PerTenThousand) -> Watermark {
        Watermark { on_from, off_below: off_below.min(on_from), is_on: false, is_near: false }
    }

    /// A switch that is off, with marks in percent.
    pub fn of_percent(on_from: u64, off_below: u64) -> Watermark {
        Watermark::new(PerTenThousand::of(on_from, 100), PerTenThousand::of(off_below, 100))
    }

    /// Updates the switch from the host's memory; `None` changes nothing.
    pub fn update(&mut self, host: Option<HostMemory>) -> bool {
        if let Some(host) = host {
            let used = PerTenThousand::of(host.total.saturating_sub(host.available).get(), host.total.get());
            self.is_near = used >= self.off_below;
            self.is_on = if self.is_on { self.is_near } else { used >= self.on_from };
        }
        self.is_on
    }

    /// Whether the switch is on, or could be soon.
    pub fn is_near(&self) -> bool {
        self.is_near
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::gib;

    #[test]
    fn it_switches_on_at_one_mark_and_off_at_the_other() {
        let mut mark = Watermark::of_percent(85, 70);
        let used = |gibibytes: u64| {
            Some(HostMemory { total: gib(100), available: gib(100 - gibibytes), ..HostMemory::default() })
        };
        let seen = [60, 84, 85, 71, 70, 69, 84].map(|gibibytes| (mark.update(used(gibibytes)), mark.is_near()));
        let (off, near, on) = ((false, false), (false, true), (true, true));
        assert_eq!(seen, [off, near, on, on, on, off, near]);
        assert!(!mark.update(None));
    }
}
