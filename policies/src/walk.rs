//! What a TLB miss costs, by the page sizes of the guest and of the host. A constant table for now: references are
//! arithmetic, cycles per reference are a prior until a machine is measured.
//!
//! ```text
//!                 host 4K   2M   1G       cold references, 4 + 4 levels: (n + 1)(m + 1) - 1
//!   guest 4K        24      19   14       n, m: levels walked in the guest's and the host's tables
//!   guest 2M        19      15   11       (Bhargava et al., ASPLOS '08: 24 for 4 K over 4 K)
//!   guest 1G        14      11    8
//! ```

pub(crate) mod caches;
pub mod counts;
pub mod machine;
pub mod machines;
pub(crate) mod sets;
pub mod simulator;
pub mod space;
pub mod streams;
pub(crate) mod tlb;
pub(crate) mod walker;

pub use counts::Counts;
pub use machine::{Machine, machine, machines};
pub use simulator::Simulator;
pub use space::{AddressSpace, Paging};

use crate::snapshot::GuestMapping;
use crate::units::PageSize;

/// Cycles per reference of a walk. Most references hit the caches of the walk or the L1; CBMM (ATC '22) counts 50 cycles
/// for a whole native walk of 4, which is 12 a reference; the cold count above is twice to three times what a warm walk
/// makes (two to five references in steady state), so we take 4. Twice as much doubles every benefit.
pub const CYCLES_PER_REFERENCE: u64 = 4;

/// Cycles in a microsecond, to compare CPU time with walks: CBMM's 2 GHz, so that both sides err alike on all machines.
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

/// Cycles that each TLB miss of today costs less once the host's page grows from base to `to`. The TLB entry covers the
/// smaller page of the two; where promotion makes that one grow, the misses themselves go (511 of 512 of them), else
/// only their walks get shorter (Gemini, EuroSys '23: well-aligned and misaligned pages).
pub const fn cycles_saved_per_miss(guest: GuestMapping, to: PageSize) -> u64 {
    let Some(guest) = guest_page(guest) else {
        return 0;
    };
    let before = references(guest, PageSize::Base4K);
    let after = match (guest, to) {
        (PageSize::Base4K, _) | (_, PageSize::Base4K) => references(guest, to),
        _ => references(guest, to) / 512,
    };
    (before - after) * CYCLES_PER_REFERENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_those_of_the_literature() {
        let table = PageSize::ALL.map(|guest| PageSize::ALL.map(|host| references(guest, host)));
        assert_eq!(table, [[24, 19, 14], [19, 15, 11], [14, 11, 8]]);
    }

    #[test]
    fn an_aligned_page_saves_the_miss_and_a_misaligned_one_a_part_of_its_walk() {
        let saved = |guest| cycles_saved_per_miss(guest, PageSize::Huge2M);
        assert_eq!(saved(GuestMapping::Huge2M), 19 * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Base4K), (24 - 19) * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Unknown), saved(GuestMapping::Base4K));
        assert_eq!(saved(GuestMapping::Unmapped), 0);
    }
}
