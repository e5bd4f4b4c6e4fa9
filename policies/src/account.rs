//! A VM's memory in numbers: definitions that tests, reports and benches share. *Coverage* is always qualified by
//! the level that it is about.

use crate::snapshot::{Backing, MappingStats, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Bytes, PageSize, PerTenThousand};

/// Guest memory by the page size that the host backs it with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostBacking {
    /// Memory present in base pages.
    pub base_4k: Bytes,
    /// Memory present in huge pages.
    pub huge_2m: Bytes,
    /// Memory present in giant pages.
    pub giant_1g: Bytes,
    /// Memory that is part of a window and not present.
    pub unbacked: Bytes,
}

impl HostBacking {
    /// Counts one window, of which `resident` base pages are present.
    pub fn add_window(&mut self, resident: u16, backing: Backing) {
        let base = PageSize::Base4K.bytes();
        let present = base * u64::from(resident);
        match backing.page_size() {
            None => {}
            Some(PageSize::Base4K) => self.base_4k += present,
            Some(PageSize::Huge2M) => self.huge_2m += present,
            Some(PageSize::Giant1G) => self.giant_1g += present,
        }
        self.unbacked += base * u64::from(BASE_PAGES_PER_WINDOW - resident);
    }

    /// Present memory of all page sizes.
    pub fn resident(self) -> Bytes {
        self.base_4k + self.huge_2m + self.giant_1g
    }
}

/// Adds up the host backing of a VM's windows.
pub fn host_backing(vm: &VmSnapshot) -> HostBacking {
    let mut sum = HostBacking::default();
    for (resident, backing) in vm.resident.iter().zip(&vm.backing) {
        sum.add_window(*resident, *backing);
    }
    sum
}

/// `host_coverage_2m`: the share of present guest memory that the host backs with pages of 2 MiB or more.
pub fn host_coverage_2m(vm: &VmSnapshot) -> PerTenThousand {
    let backing = host_backing(vm);
    PerTenThousand::of((backing.huge_2m + backing.giant_1g).get(), backing.resident().get())
}

/// `kvm_coverage_2m`: the share of the memory mapped by the second level that it maps with 2 MiB or more. Under
/// shadow paging a mapping is never larger than the guest's own page, so 100 % of the host's coverage may be out
/// of reach there.
pub fn kvm_coverage_2m(mapping: MappingStats) -> PerTenThousand {
    let large = mapping.mapped(PageSize::Huge2M) + mapping.mapped(PageSize::Giant1G);
    PerTenThousand::of(large.get(), (large + mapping.mapped(PageSize::Base4K)).get())
}

/// Usage bloat of promoting a window of which `resident_before` base pages were present: the memory that became
/// resident only because the page is large.
pub fn bloat_of_promotion(resident_before: u16) -> Bytes {
    PageSize::Base4K.bytes() * u64::from(BASE_PAGES_PER_WINDOW - resident_before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Backing, VmId, WindowRow};
    use crate::units::{WindowIndex, kib, mib};

    fn snapshot() -> VmSnapshot {
        let mut vm = VmSnapshot::with_capacity(VmId(0), 4);
        vm.push(WindowRow::new(WindowIndex::new(0), 512, Backing::Huge2M));
        vm.push(WindowRow::new(WindowIndex::new(1), 128, Backing::Base4K));
        vm.push(WindowRow::new(WindowIndex::new(2), 0, Backing::Unbacked));
        vm.push(WindowRow::new(WindowIndex::new(3), 512, Backing::Huge2M));
        vm
    }

    #[test]
    fn coverage_counts_present_bytes_not_windows() {
        // 4 MiB of 4.5 MiB
        assert_eq!(host_coverage_2m(&snapshot()), PerTenThousand::new(8_888));
        let backing = host_backing(&snapshot());
        assert_eq!(backing.base_4k, kib(512));
        assert_eq!(backing.unbacked, mib(2) + kib(1536));
    }

    #[test]
    fn kvm_coverage_weighs_mappings_by_their_size() {
        let mapping = MappingStats { pages_4k: 512, pages_2m: 3, pages_1g: 0 };
        assert_eq!(kvm_coverage_2m(mapping), PerTenThousand::new(7_500));
        assert_eq!(kvm_coverage_2m(MappingStats::default()), PerTenThousand::new(0));
    }

    #[test]
    fn bloat_is_the_memory_that_promotion_added() {
        assert_eq!(bloat_of_promotion(512), Bytes::ZERO);
        assert_eq!(bloat_of_promotion(1), kib(4 * 511));
    }
}
