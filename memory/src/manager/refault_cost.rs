//! Cost to the guest of a window that was aside and came back. KVM had to drop its mappings there, and the guest
//! pays a second-level fault for each page that it touches again. A window in base pages costs hundreds of them,
//! more than the wait for it.
//!
//! ```text
//!   aside ─▶ KVM drops 512 leaves of 4 KiB or one of 2 MiB ─▶ touched: back whole, one wait ─▶ up to 512 faults or one
//! ```
//!
//! The price of a fault is measured: `fault_price.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::{Backing, VmSnapshot, WindowIndex};

/// Number of faults that the windows of one sample may cause, and their price.
#[derive(Debug, Default)]
pub(super) struct RefaultCost {
    fault: Duration,
    mappings: BTreeMap<WindowIndex, u16>,
}

impl RefaultCost {
    /// Maximum cost of each of these windows, if all are touched: their mean. `fault`: price of one fault.
    pub(super) fn of_each(windows: &[WindowIndex], rows: &VmSnapshot, fault: Duration) -> Duration {
        let faults: u64 = windows.iter().filter_map(|window| mappings(*window, rows)).map(u64::from).sum();
        let mean = faults.checked_div(windows.len() as u64).unwrap_or(0);
        fault * u32::try_from(mean).unwrap_or(u32::MAX)
    }

    /// Notes the windows that go aside, and the price of a fault.
    pub(super) fn expect(&mut self, share: &[WindowIndex], rows: &VmSnapshot, fault: Duration) {
        self.fault = fault;
        self.mappings = share.iter().filter_map(|window| Some((*window, mappings(*window, rows)?))).collect();
    }

    /// Maximum cost for such a window, if it was touched.
    pub(super) fn cost(&self, window: WindowIndex) -> Duration {
        self.fault * u32::from(self.mappings.get(&window).copied().unwrap_or(0))
    }
}

/// Number of mappings that KVM can have for a window of the snapshot.
fn mappings(window: WindowIndex, rows: &VmSnapshot) -> Option<u16> {
    let row = rows.row(window)?;
    Some(if rows.backing[row] == Backing::Base4K { rows.resident[row] } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::{VmId, WindowRow};

    #[test]
    fn a_window_costs_one_fault_per_base_page_or_one_for_a_huge_page() {
        const FAULT: Duration = Duration::from_micros(5);
        let [base, huge, other] = [0, 1, 2].map(WindowIndex::new);
        let mut rows = VmSnapshot::with_capacity(VmId(0), 2);
        rows.push(WindowRow::new(base, 301, Backing::Base4K));
        rows.push(WindowRow::new(huge, 512, Backing::Huge2M));
        let mut refills = RefaultCost::default();
        refills.expect(&[base, huge], &rows, FAULT);
        assert_eq!([base, huge, other].map(|window| refills.cost(window)), [FAULT * 301, FAULT, Duration::ZERO]);
        assert_eq!(RefaultCost::of_each(&[base, huge], &rows, FAULT), FAULT * 151);
        assert_eq!(RefaultCost::of_each(&[], &rows, FAULT), Duration::ZERO);
        refills.expect(&[base], &rows, Duration::ZERO);
        assert_eq!(refills.cost(base), Duration::ZERO, "a process has its pages back with the window");
    }
}
