//! Cost to the guest of a window that was aside and came back. KVM had to drop its mappings there, and the guest
//! pays a second-level fault for each page that it touches again. A window in base pages costs hundreds of them,
//! more than the wait for it.
//!
//! ```text
//!   aside ─▶ KVM drops 512 leaves of 4 KiB or one of 2 MiB ─▶ touched: back whole, one wait ─▶ up to 512 faults or one
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::{Backing, VmSnapshot, WindowIndex};

use crate::second_level::Paging;

/// Cost of a fault for which KVM combines both tables into one. GUPS in a window of base pages lost 2.1 ms each
/// time the window was aside, 0.3 ms of it the wait; EP lost 3 ms (kvm_pvm on a fourth-generation EPYC).
const SHADOW_FAULT: Duration = Duration::from_micros(5);
/// Cost of a fault that only fills an EPT or NPT entry, exit and entry included; not measured on hardware yet.
const TDP_FAULT: Duration = Duration::from_micros(1);

/// Number of faults that the windows of one sample may cause.
#[derive(Debug)]
pub(super) struct RefaultCost {
    fault: Duration,
    mappings: BTreeMap<WindowIndex, u16>,
}

impl RefaultCost {
    /// For a guest with this paging. A process without a second level has its pages back together with the window.
    pub(super) fn new(paging: Option<Paging>) -> RefaultCost {
        let fault = match paging {
            None => Duration::ZERO,
            Some(Paging::Shadow) => SHADOW_FAULT,
            Some(Paging::Ept | Paging::Npt) => TDP_FAULT,
        };
        RefaultCost { fault, mappings: BTreeMap::new() }
    }

    /// Notes the windows that go aside.
    pub(super) fn expect(&mut self, share: &[WindowIndex], rows: &VmSnapshot) {
        let mappings = |window: &WindowIndex| {
            let row = rows.row(*window)?;
            Some((*window, if rows.backing[row] == Backing::Base4K { rows.resident[row] } else { 1 }))
        };
        self.mappings = share.iter().filter_map(mappings).collect();
    }

    /// Maximum cost for such a window, if it was touched.
    pub(super) fn cost(&self, window: WindowIndex) -> Duration {
        self.fault * u32::from(self.mappings.get(&window).copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::{VmId, WindowRow};

    #[test]
    fn a_window_costs_one_fault_per_base_page_or_one_for_a_huge_page() {
        let [base, huge, other] = [0, 1, 2].map(WindowIndex::new);
        let mut rows = VmSnapshot::with_capacity(VmId(0), 2);
        rows.push(WindowRow::new(base, 300, Backing::Base4K));
        rows.push(WindowRow::new(huge, 512, Backing::Huge2M));
        let mut refills = RefaultCost::new(Some(Paging::Shadow));
        refills.expect(&[base, huge], &rows);
        assert_eq!(
            [base, huge, other].map(|window| refills.cost(window)),
            [SHADOW_FAULT * 300, SHADOW_FAULT, Duration::ZERO]
        );
        let mut native = RefaultCost::new(None);
        native.expect(&[base], &rows);
        assert_eq!(native.cost(base), Duration::ZERO);
    }
}
