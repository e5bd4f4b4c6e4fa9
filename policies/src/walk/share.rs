//! The estimated share of a CPU's time that a VM spends in page walks: assumed misses times the cost of one. No
//! counter reports misses by window. The measurable quantity is the time from the start of watching a window to its
//! first touch (`auto` uses the same).
//!
//! ```text
//!   misses/s = touches per second × present pages, at most a bound × present/512
//!              or, if no sensor measures the time: an assumed rate × share of samples with an access × present/512
//!   if guest and host both have a large page: one in 512 of them
//! ```

use super::cost::WalkCost;
use super::guest_page;
use crate::snapshot::{AccessHistory, Backing, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, PageSize, PerTenThousand};

/// Assumed miss rate of a window, by its touch frequency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssumedMisses {
    /// Largest rate of a full window, in misses per second, however often it is touched.
    pub most: u64,
    /// Rate of a full window touched in every sample, in misses per second, if no sensor measures the time
    /// to the touch.
    pub per_s: u64,
}

/// Returns [`AssumedMisses::DEFAULT`].
impl Default for AssumedMisses {
    fn default() -> AssumedMisses {
        AssumedMisses::DEFAULT
    }
}

impl AssumedMisses {
    /// Default of `auto`; its parameters `misses_max` and `misses_per_s` document the source.
    pub const DEFAULT: AssumedMisses = AssumedMisses { most: 170_000, per_s: 10_000 };

    /// Misses per second of a window on base pages with `present` pages present.
    pub fn per_s(&self, access: AccessHistory, present: u16) -> u64 {
        match access.touches_per_s() {
            Some(touches) => touches.saturating_mul(u64::from(present)).min(part_of(self.most, present)),
            None if access.touched() == 0 => 0,
            None => {
                let rate = access.rate().unwrap_or_default();
                part_of(self.per_s * u64::from(rate.get()) / 10_000, present)
            }
        }
    }

    /// Largest number of misses per second of a window with `present` pages present, whatever its samples see.
    pub fn most_of(&self, present: u16) -> u64 {
        part_of(self.most.max(self.per_s), present)
    }
}

/// Part of a full window's misses that one with `present` pages has.
fn part_of(misses: u64, present: u16) -> u64 {
    misses * u64::from(present) / u64::from(BASE_PAGES_PER_WINDOW)
}

/// The share of one CPU that walks of these VMs take, at most the whole. `None` if no window has samples yet.
pub fn walk_share(vms: &[VmSnapshot], misses: AssumedMisses, cost: &WalkCost) -> Option<PerTenThousand> {
    let rows = || vms.iter().flat_map(|vm| (0..vm.windows.len()).map(move |row| (vm, row)));
    if !rows().any(|(vm, row)| vm.access[row].samples() > 0) {
        return None;
    }
    let cycles_per_s: u64 = rows().map(|(vm, row)| cycles_of(vm, row, misses, cost)).fold(0, u64::saturating_add);
    let of_cpu = u128::from(cycles_per_s) * 10_000 / (u128::from(cost.per_microsecond()) * 1_000_000);
    Some(PerTenThousand::new(of_cpu.min(10_000) as u32))
}

/// Cycles per second that walks take in a window.
fn cycles_of(vm: &VmSnapshot, row: usize, misses: AssumedMisses, cost: &WalkCost) -> u64 {
    let Some(guest) = guest_page(vm.guest_mapping[row]) else { return 0 };
    let host = match vm.backing[row] {
        Backing::Unbacked => return 0,
        Backing::Base4K => PageSize::Base4K,
        Backing::Huge2M => PageSize::Huge2M,
        Backing::Giant1G => PageSize::Giant1G,
    };
    let is_base = guest == PageSize::Base4K || host == PageSize::Base4K;
    let misses = misses.per_s(vm.access[row], vm.resident[row]) / if is_base { 1 } else { 512 };
    misses.saturating_mul(cost.per_miss(guest, host))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{GuestMapping, VmId, WindowRow};
    use crate::units::WindowIndex;

    const BUSY: AccessHistory = AccessHistory::from_parts(u16::MAX, 16);

    /// A VM of full windows with this access, backing and guest page.
    fn vm(windows: u64, access: AccessHistory, backing: Backing, guest: GuestMapping) -> VmSnapshot {
        let mut vm = VmSnapshot::with_capacity(VmId(0), windows as usize);
        for window in 0..windows {
            vm.push(WindowRow::new(WindowIndex::new(window), 512, backing));
        }
        vm.access.fill(access);
        vm.guest_mapping.fill(guest);
        vm
    }

    fn share(vm: VmSnapshot) -> Option<u32> {
        walk_share(&[vm], AssumedMisses::default(), &WalkCost::PRIOR).map(PerTenThousand::get)
    }

    #[test]
    fn without_samples_the_share_is_unknown() {
        assert_eq!(share(vm(4, AccessHistory::default(), Backing::Base4K, GuestMapping::Huge2M)), None);
    }

    #[test]
    fn busy_base_pages_cost_their_misses_and_large_ones_almost_nothing() {
        // 100 windows, 10 000 misses each, 76 cycles a miss, of 2 * 10^9 cycles: 3.8 %.
        assert_eq!(share(vm(100, BUSY, Backing::Base4K, GuestMapping::Huge2M)), Some(380));
        // One in 512 of them, at 60 cycles.
        assert_eq!(share(vm(100, BUSY, Backing::Huge2M, GuestMapping::Huge2M)), Some(0));
        // The guest's base pages keep the misses; their walks are 76 cycles instead of 96.
        assert_eq!(share(vm(100, BUSY, Backing::Huge2M, GuestMapping::Base4K)), Some(380));
        assert_eq!(share(vm(100, BUSY, Backing::Base4K, GuestMapping::Base4K)), Some(480));
    }

    #[test]
    fn a_share_is_at_most_a_whole_cpu() {
        let touched = BUSY.with_touches_per_s(Some(1_000_000));
        assert_eq!(share(vm(10_000, touched, Backing::Base4K, GuestMapping::Base4K)), Some(10_000));
    }
}
