//! What a TLB miss costs, by the page sizes of the guest and of the host. References are arithmetic and here; cycles belong to a
//! machine, and a [`cost::WalkCost`] has them.
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

/// Cycles per reference of a walk. Most references hit the caches of the walk or the L1; CBMM (ATC '22) counts 50 cycles
/// for a whole native walk of 4, which is 12 a reference; the cold count above is twice to three times what a warm walk
/// makes (two to five references in steady state), so we take 4. Twice as much doubles every benefit. Only the prior:
/// [`cost::WalkCost::PRIOR`] is what it makes.
pub const CYCLES_PER_REFERENCE: u64 = 4;

/// Cycles in a microsecond, to compare CPU time with walks, where neither was measured: CBMM's 2 GHz, so that both sides err alike.
pub const CYCLES_PER_MICROSECOND: u64 = 2_000;

/// Levels of table a walk goes through to reach a page, with four-level tables (SDM vol. 3, 4.5).
const fn levels(size: PageSize) -> u64 {
    match size {
        PageSize::Base4K => 4,
        PageSize::Huge2M => 3,
        PageSize::Giant1G => 2,
    }
}

/// Memory references of a cold two-dimensional walk.
pub const fn references(guest: PageSize, host: PageSize) -> u64 {
    (levels(guest) + 1) * (levels(host) + 1) - 1
}

/// What the guest's mapping counts as. Unknown counts as base pages, which promises least; several sizes as well.
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
