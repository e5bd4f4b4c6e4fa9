//! Cost to the guest of a window that was aside and came back. KVM had to drop its mappings there, and the guest
//! pays a second-level fault for each page that it touches again. So only a few base pages of a window go aside, or one
//! huge page.
//!
//! ```text
//!   aside ─▶ KVM drops four leaves of 4 KiB or one of 2 MiB ─▶ touched: all back, one wait ─▶ up to four faults or one
//! ```
//!
//! The price of a fault is measured: `fault_price.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::sampled_pages::SAMPLED_PAGES;
use wideleaf_policies::{Backing, VmSnapshot, WindowIndex};

use super::fault_price::FaultPrice;

/// Number of faults that the windows of one sample may cause, and their price.
#[derive(Debug)]
pub(super) struct RefaultCost {
    fault: FaultPrice,
    mappings: BTreeMap<WindowIndex, u16>,
}

impl RefaultCost {
    /// For a sensor that has not taken a window aside yet.
    pub(super) fn of_nothing() -> RefaultCost {
        RefaultCost { fault: FaultPrice::assumed(None), mappings: BTreeMap::new() }
    }

    /// Maximum cost of each of these windows, if all are touched: their mean. `fault`: price of one fault.
    pub(super) fn of_each(windows: &[WindowIndex], rows: &VmSnapshot, fault: FaultPrice) -> Duration {
        let mappings: u64 = windows.iter().filter_map(|window| mappings(*window, rows)).map(u64::from).sum();
        fault.of_mappings(mappings.checked_div(windows.len() as u64).unwrap_or(0))
    }

    /// Notes the windows that go aside, and the price of a fault.
    pub(super) fn expect(&mut self, share: &[WindowIndex], rows: &VmSnapshot, fault: FaultPrice) {
        self.fault = fault;
        self.mappings = share.iter().filter_map(|window| Some((*window, mappings(*window, rows)?))).collect();
    }

    /// Number of mappings that KVM had for such a window, at most.
    pub(super) fn mappings(&self, window: WindowIndex) -> u64 {
        self.mappings.get(&window).copied().unwrap_or(0).into()
    }

    /// Maximum cost for such a window, if it was touched.
    pub(super) fn cost(&self, window: WindowIndex) -> Duration {
        self.fault.of_mappings(self.mappings(window))
    }
}

/// Number of mappings that KVM can have for what goes aside of a window of the snapshot.
fn mappings(window: WindowIndex, rows: &VmSnapshot) -> Option<u16> {
    let row = rows.row(window)?;
    Some(if rows.backing[row] == Backing::Base4K { rows.resident[row].min(SAMPLED_PAGES) } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::second_level::Paging;
    use wideleaf_policies::{VmId, WindowRow};

    #[test]
    fn a_window_costs_one_fault_per_sampled_page_or_one_for_a_huge_page() {
        const FAULT: Duration = Duration::from_micros(5);
        let price = FaultPrice::assumed(Some(Paging::Shadow));
        let [base, huge, few, other] = [0, 1, 2, 3].map(WindowIndex::new);
        let mut rows = VmSnapshot::with_capacity(VmId(0), 3);
        rows.push(WindowRow::new(base, 301, Backing::Base4K));
        rows.push(WindowRow::new(huge, 512, Backing::Huge2M));
        rows.push(WindowRow::new(few, 2, Backing::Base4K));
        let mut refills = RefaultCost::of_nothing();
        refills.expect(&[base, huge, few], &rows, price);
        let costs = [base, huge, few, other].map(|window| refills.cost(window));
        assert_eq!(costs, [FAULT * 4, FAULT, FAULT * 2, Duration::ZERO]);
        assert_eq!(RefaultCost::of_each(&[base, few], &rows, price), FAULT * 3);
        assert_eq!(RefaultCost::of_each(&[], &rows, price), Duration::ZERO);
        refills.expect(&[base], &rows, FaultPrice::assumed(None));
        assert_eq!(refills.cost(base), Duration::ZERO, "a process has its pages back with the window");
    }
}
