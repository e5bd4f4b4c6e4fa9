//! The cost of a TLB miss, by the page sizes of the guest and of the host. Memory references follow from arithmetic
//! and are computed here. Cycles depend on the machine, and a [`cost::WalkCost`] holds them.
//!
//! ```text
//!                 host 4K   2M   1G       cold references, 4 + 4 levels: (n + 1)(m + 1) - 1
//!   guest 4K        24      19   14       n, m: levels walked in the guest's and the host's tables
//!   guest 2M        19      15   11       (Bhargava et al., ASPLOS '08: 24 for 4 K over 4 K)
//!   guest 1G        14      11    8
//! ```

use crate::snapshot::GuestMapping;
use crate::units::PageSize;

pub mod cost;
pub mod share;

/// Cycles per reference of a walk. Most references hit the caches of the walk or the L1. CBMM (ATC '22) counts 50
/// cycles for a whole native walk of 4 references, 12 a reference. The cold count above is two to three times that
/// of a warm walk (two to five references in steady state), so this is 4. Twice the value doubles every benefit.
/// This is only the prior, from which [`cost::WalkCost::PRIOR`] is made.
pub const CYCLES_PER_REFERENCE: u64 = 4;

/// Cycles in a microsecond, to compare CPU time with walks if neither was measured: CBMM's 2 GHz, so that both
/// sides have the same error.
pub const CYCLES_PER_MICROSECOND: u64 = 2_000;

/// Number of table levels that a walk passes to reach a page, with four-level tables (SDM vol. 3, 4.5).
const fn levels(size: PageSize) -> u64 {
    match size {
        PageSize::Base4K => 4,
        PageSize::Huge2M => 3,
        PageSize::Giant1G => 2,
    }
}

/// Number of memory references of a cold two-dimensional walk.
pub const fn references(guest: PageSize, host: PageSize) -> u64 {
    (levels(guest) + 1) * (levels(host) + 1) - 1
}

/// The page size that a guest mapping counts as. Unknown and mixed mappings count as base pages,
/// which promise least.
const fn guest_page(mapping: GuestMapping) -> Option<PageSize> {
    match mapping {
        GuestMapping::Unmapped => None,
        GuestMapping::Unknown | GuestMapping::Base4K | GuestMapping::Mixed => Some(PageSize::Base4K),
        GuestMapping::Huge2M => Some(PageSize::Huge2M),
        GuestMapping::Giant1G => Some(PageSize::Giant1G),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_those_of_the_literature() {
        let table = PageSize::ALL.map(|guest| PageSize::ALL.map(|host| references(guest, host)));
        assert_eq!(table, [[24, 19, 14], [19, 15, 11], [14, 11, 8]]);
    }
}
