//! The cost of a TLB miss, in cycles, by the page sizes of the guest and of the host: the currency of `auto`. A
//! policy receives it, because it depends on the machine: measured there, or a figure for its family of CPUs, or
//! else the prior.
//!
//! ```text
//!   measured here (`wideleaf tlbcost --save`)  ─┐
//!   FAMILIES, by the CPU's CPUID data          ─┼─▶ WalkCost ─▶ per_miss(guest page, host page)
//!   PRIOR: 4 cycles a reference                ─┘                saved_per_miss(guest's mapping, new host page)
//! ```

use core::fmt;
use core::str::FromStr;

use super::{CYCLES_PER_MICROSECOND, CYCLES_PER_REFERENCE, guest_page, references};
use crate::snapshot::GuestMapping;
use crate::units::PageSize;

/// Cells that a measurement may have filled, by guest page and host page, each in the order of [`PageSize::ALL`].
pub type Cells = [[Option<u32>; 3]; 3];

/// Longest walk: 4,096 cycles are 24 references that all miss every cache of a slow machine.
pub const CYCLES_MAX: u32 = 4_096;

/// Suffix of a written table that applies under shadow paging.
const SHADOWED: &str = "/shadow";

/// Cost of a miss by page sizes, and the number of the same cycles in a microsecond. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalkCost {
    cycles: [[u32; 3]; 3],
    per_microsecond: u32,
    is_shadowed: bool,
    remote_extra: u32,
}

impl WalkCost {
    /// The prior, for a machine without a measurement: references of a cold walk, [`CYCLES_PER_REFERENCE`] each.
    pub const PRIOR: WalkCost =
        WalkCost::by_references(24 * CYCLES_PER_REFERENCE as u32, CYCLES_PER_MICROSECOND as u32);

    /// A table in which a walk of 4 KiB pages over 4 KiB pages costs `base_over_base`. The other costs are
    /// proportional to their references.
    pub const fn by_references(base_over_base: u32, per_microsecond: u32) -> WalkCost {
        let all = references(PageSize::Base4K, PageSize::Base4K);
        let mut cycles = [[0; 3]; 3];
        let mut cell = 0;
        while cell < 9 {
            let (guest, host) = (cell / 3, cell % 3);
            let part = references(PageSize::ALL[guest], PageSize::ALL[host]);
            cycles[guest][host] = at_least_one((base_over_base as u64 * part / all) as u32);
            cell += 1;
        }
        WalkCost { cycles, per_microsecond, is_shadowed: false, remote_extra: remote_extra(per_microsecond) }
    }

    /// The same table for guests under shadow paging. There the CPU walks one table, and its entries are the
    /// smaller page of the two: a larger host page under base pages of the guest does not change it.
    #[must_use]
    pub const fn under_shadow_paging(self) -> WalkCost {
        WalkCost { is_shadowed: true, ..self }
    }

    /// The same table for a machine on which a reference to the memory of another NUMA node takes that many cycles more
    /// than one to the own node. `None` if that is more than [`CYCLES_MAX`].
    pub const fn with_remote_extra(self, cycles: u32) -> Option<WalkCost> {
        if cycles > CYCLES_MAX { None } else { Some(WalkCost { remote_extra: cycles, ..self }) }
    }

    /// Cycles that one reference to the memory of another NUMA node takes beyond those of one to the own node: data, an
    /// entry of a guest's table, or one of a host's table.
    pub const fn remote_extra(&self) -> u64 {
        self.remote_extra as u64
    }

    /// Cycles of one miss with tables on another NUMA node. vMitosis (ASPLOS '21) measured that a remote guest table
    /// and a remote host table each cost about one remote reference a walk: the leaves, which caches do not hold.
    pub const fn per_miss_with_remote_tables(
        &self,
        guest: PageSize,
        host: PageSize,
        is_guest_remote: bool,
        is_host_remote: bool,
    ) -> u64 {
        let remote = is_guest_remote as u64 + is_host_remote as u64;
        self.per_miss(guest, host) + remote * self.remote_extra()
    }

    /// Whether KVM shadows the guest's tables.
    pub const fn is_shadowed(&self) -> bool {
        self.is_shadowed
    }

    /// A table from measured cells. Cells without a measurement are computed from their references, at the mean
    /// cost of a reference in the measured ones. `None` if no cell was measured, a figure is not a valid cost
    /// (zero, or more than [`CYCLES_MAX`]), or the clock's frequency is impossible for a CPU.
    pub fn measured(cells: &Cells, per_microsecond: u32) -> Option<WalkCost> {
        const MEGAHERTZ: core::ops::RangeInclusive<u32> = 100..=20_000;
        let known = || {
            PageSize::ALL.iter().enumerate().flat_map(|(guest, guest_page)| {
                let host = PageSize::ALL.iter().enumerate();
                host.filter_map(move |(host, host_page)| {
                    Some((cells[guest][host]?, references(*guest_page, *host_page)))
                })
            })
        };
        let is_usable =
            MEGAHERTZ.contains(&per_microsecond) && known().all(|(cycles, _)| (1..=CYCLES_MAX).contains(&cycles));
        let (cycles, references) = known().fold((0, 0), |sum, cell| (sum.0 + u64::from(cell.0), sum.1 + cell.1));
        if !is_usable || references == 0 {
            return None;
        }
        let base_over_base = self::references(PageSize::Base4K, PageSize::Base4K) * cycles / references;
        let mut table = WalkCost::by_references(at_least_one(base_over_base as u32), per_microsecond);
        for (row, known) in table.cycles.iter_mut().zip(cells) {
            for (cell, known) in row.iter_mut().zip(known) {
                *cell = known.unwrap_or(*cell);
            }
        }
        Some(table)
    }

    /// Number of cycles of one miss.
    pub const fn per_miss(&self, guest: PageSize, host: PageSize) -> u64 {
        self.cycles[row(guest)][row(host)] as u64
    }

    /// Number of cycles in a microsecond of CPU time, to compare actions with misses.
    pub const fn per_microsecond(&self) -> u64 {
        self.per_microsecond as u64
    }

    /// Cycles saved for each present TLB miss once the host's page grows from base to `to`. The TLB entry covers
    /// the smaller page of the two. If promotion makes that one grow, the misses themselves go (511 of 512 of
    /// them); otherwise only their walks get shorter (Gemini, EuroSys '23: well-aligned and misaligned pages).
    /// Walks get shorter by at least the references they no longer make, even if a measurement shows less: the
    /// measurement uses tables that fit a cache, where one more entry costs nothing. Zero if the guest is known to
    /// map base pages and its tables are shadowed.
    pub const fn saved_per_miss(&self, guest: GuestMapping, to: PageSize) -> u64 {
        if self.is_shadowed && matches!(guest, GuestMapping::Base4K) {
            return 0;
        }
        let Some(guest) = guest_page(guest) else {
            return 0;
        };
        let before = self.per_miss(guest, PageSize::Base4K);
        let after = match (guest, to) {
            (PageSize::Base4K, _) | (_, PageSize::Base4K) => {
                let by_references = before * references(guest, to) / references(guest, PageSize::Base4K);
                let measured = self.per_miss(guest, to);
                if measured < by_references { measured } else { by_references }
            }
            _ => self.per_miss(guest, to) / 512,
        };
        before.saturating_sub(after)
    }

    /// Cycles of walks saved once host pages grow from `from` to `to`, in memory that has `misses` TLB misses while
    /// the host serves it with base pages. The unit of time is that of `misses`: for misses per second, these are
    /// cycles per second.
    ///
    /// ```text
    ///   misses left = misses / base pages in the smaller of the guest's and the host's page
    ///   saved       = misses left with `from` × its walk  -  misses left with `to` × its walk
    /// ```
    ///
    /// So from 2 MiB to 1 GiB, walks of a guest on base pages get shorter, one in 512 of them where the guest maps
    /// 2 MiB. Nothing is saved where the guest's tables are shadowed and the guest is not known to map larger pages
    /// than `from`: then the one table that the CPU walks stays the same.
    pub fn saved_of(&self, guest: GuestMapping, from: PageSize, to: PageSize, misses: u64) -> u64 {
        match guest_page(guest) {
            None => 0,
            Some(guest) if self.is_shadowed && guest <= from => 0,
            Some(guest) => self.walks_of(guest, from, misses).saturating_sub(self.walks_of(guest, to, misses)),
        }
    }

    /// Cycles of all walks in memory that has `misses` TLB misses while the host serves it with base pages.
    pub fn spent_on(&self, guest: GuestMapping, host: PageSize, misses: u64) -> u64 {
        guest_page(guest).map_or(0, |guest| self.walks_of(guest, host, misses))
    }

    fn walks_of(&self, guest: PageSize, host: PageSize, misses: u64) -> u64 {
        let covered = guest.min(host).bytes().pages(PageSize::Base4K);
        misses.saturating_mul(self.walk(guest, host)) / covered
    }

    /// Cycles of one walk. One to a larger host page is shorter by at least the references that it does not make, as
    /// in [`WalkCost::saved_per_miss`].
    fn walk(&self, guest: PageSize, host: PageSize) -> u64 {
        let smaller = match host {
            PageSize::Base4K => return self.per_miss(guest, host),
            PageSize::Huge2M => PageSize::Base4K,
            PageSize::Giant1G => PageSize::Huge2M,
        };
        let by_references = self.walk(guest, smaller) * references(guest, host) / references(guest, smaller);
        self.per_miss(guest, host).min(by_references)
    }
}

/// `96,76,56,76,60,44,56,44,32@2000`: guest pages row by row, then cycles in a microsecond, then `+150` for a remote
/// reference that is not the assumed one, then `/shadow` under shadow paging. Recordings contain this text.
impl fmt::Display for WalkCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, cycles) in self.cycles.iter().flatten().enumerate() {
            write!(f, "{}{cycles}", if index == 0 { "" } else { "," })?;
        }
        write!(f, "@{}", self.per_microsecond)?;
        if self.remote_extra != remote_extra(self.per_microsecond) {
            write!(f, "+{}", self.remote_extra)?;
        }
        f.write_str(if self.is_shadowed { SHADOWED } else { "" })
    }
}

/// Error: the text is not a cost table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoWalkCost;

/// Parses the text that [`WalkCost`] is displayed as.
impl FromStr for WalkCost {
    type Err = NoWalkCost;

    fn from_str(text: &str) -> Result<WalkCost, NoWalkCost> {
        let (cost, is_shadowed) = text.strip_suffix(SHADOWED).map_or((text, false), |cost| (cost, true));
        let (table, per_microsecond) = cost.split_once('@').ok_or(NoWalkCost)?;
        let mut numbers = table.split(',').map(|number| number.parse().map_err(|_| NoWalkCost));
        let mut cells: Cells = [[None; 3]; 3];
        for cell in cells.iter_mut().flatten() {
            *cell = Some(numbers.next().ok_or(NoWalkCost)??);
        }
        let (per_microsecond, remote) = match per_microsecond.split_once('+') {
            Some((clock, remote)) => (clock, Some(remote.parse().map_err(|_| NoWalkCost)?)),
            None => (per_microsecond, None),
        };
        let per_microsecond = per_microsecond.parse().map_err(|_| NoWalkCost)?;
        if numbers.next().is_some() {
            Err(NoWalkCost)
        } else {
            let cost = WalkCost::measured(&cells, per_microsecond).ok_or(NoWalkCost)?;
            let cost = remote.map_or(Some(cost), |remote| cost.with_remote_extra(remote)).ok_or(NoWalkCost)?;
            Ok(if is_shadowed { cost.under_shadow_paging() } else { cost })
        }
    }
}

impl Default for WalkCost {
    fn default() -> WalkCost {
        WalkCost::PRIOR
    }
}

const fn row(size: PageSize) -> usize {
    match size {
        PageSize::Base4K => 0,
        PageSize::Huge2M => 1,
        PageSize::Giant1G => 2,
    }
}

/// Cycles of a remote reference beyond those of a local one, without a measurement: 88 ns. On a Cascade Lake with two
/// sockets a local one takes 81 ns, and the other socket is 2.1 times as far by its SLIT (21). The counters of
/// vMitosis' artifact say the same: remote tables of one kind add 185 cycles a walk at 2.1 GHz.
const fn remote_extra(per_microsecond: u32) -> u32 {
    const NANOSECONDS: u64 = 88;
    (per_microsecond as u64 * NANOSECONDS / 1000) as u32
}

const fn at_least_one(cycles: u32) -> u32 {
    if cycles == 0 { 1 } else { cycles }
}

/// Vendor and model of a CPU: leaf 0, and family and model of leaf 1 with their extensions (SDM vol. 2, CPUID; APM
/// vol. 3, E.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu<'a> {
    /// Vendor string: `GenuineIntel`, `AuthenticAMD`, ….
    pub vendor: &'a str,
    /// Display family of CPUID.
    pub family: u32,
    /// Display model of CPUID.
    pub model: u32,
}

/// A family of CPUs, and the cost of a miss on them without a measurement.
#[derive(Debug)]
pub struct CpuFamily {
    /// Common name of the family.
    pub name: &'static str,
    /// Vendor string of CPUID.
    pub vendor: &'static str,
    /// Display family of CPUID.
    pub family: u32,
    /// Display models, from and to.
    pub models: &'static [(u32, u32)],
    /// Cycles of a walk of 4 KiB pages over 4 KiB pages, with the tables in the core's own caches.
    pub base_over_base: u32,
    /// Number of cycles in a microsecond, of the same clock.
    pub per_microsecond: u32,
    /// Source of the figures.
    pub source: &'static str,
}

impl CpuFamily {
    /// The family of this CPU, if the table has it.
    pub fn of(cpu: Cpu<'_>) -> Option<&'static CpuFamily> {
        let is_it = |kind: &&CpuFamily| {
            let is_model = kind.models.iter().any(|(from, to)| (*from..=*to).contains(&cpu.model));
            kind.vendor == cpu.vendor && kind.family == cpu.family && is_model
        };
        FAMILIES.iter().find(is_it)
    }

    /// Cost table of this family.
    pub const fn walk_cost(&self) -> WalkCost {
        WalkCost::by_references(self.base_over_base, self.per_microsecond)
    }
}

/// Families of CPUs with a figure that was published or measured by this project. All others use the prior: a guess
/// by name would look like knowledge.
pub const FAMILIES: &[CpuFamily] = &[CpuFamily {
    name: "Zen 4",
    vendor: "AuthenticAMD",
    family: 0x19,
    models: &[(0x10, 0x1f), (0x60, 0x7f), (0xa0, 0xaf)],
    base_over_base: 75,
    per_microsecond: 2_600,
    source: "29 ns a miss of the TLB's second level at 4 KiB, 30 in a guest, on an EPYC that is itself a VM (bench \
             `kernels -- tlb`)",
}];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prior_is_four_cycles_a_reference() {
        for guest in PageSize::ALL {
            for host in PageSize::ALL {
                assert_eq!(WalkCost::PRIOR.per_miss(guest, host), references(guest, host) * CYCLES_PER_REFERENCE);
            }
        }
        assert_eq!(WalkCost::PRIOR.per_microsecond(), CYCLES_PER_MICROSECOND);
    }

    #[test]
    fn an_aligned_page_saves_the_miss_and_a_misaligned_one_a_part_of_its_walk() {
        let saved = |guest| WalkCost::PRIOR.saved_per_miss(guest, PageSize::Huge2M);
        assert_eq!(saved(GuestMapping::Huge2M), 19 * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Base4K), (24 - 19) * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Unknown), saved(GuestMapping::Base4K));
        assert_eq!(saved(GuestMapping::Unmapped), 0);
    }

    #[test]
    fn under_shadow_paging_nothing_is_saved_where_the_guest_maps_base_pages() {
        let saved = |cost: WalkCost, guest| cost.saved_per_miss(guest, PageSize::Huge2M);
        let shadowed = WalkCost::PRIOR.under_shadow_paging();
        assert_eq!(saved(shadowed, GuestMapping::Base4K), 0);
        for guest in [GuestMapping::Unknown, GuestMapping::Mixed, GuestMapping::Huge2M, GuestMapping::Giant1G] {
            assert_eq!(saved(shadowed, guest), saved(WalkCost::PRIOR, guest), "{guest:?}");
        }
    }

    #[test]
    fn from_huge_to_giant_pages_the_smaller_page_of_the_two_decides_what_is_saved() {
        let saved = |guest| WalkCost::PRIOR.saved_of(guest, PageSize::Huge2M, PageSize::Giant1G, 512 * 512);
        // Every walk is 19 - 14 references shorter.
        assert_eq!(saved(GuestMapping::Base4K), 512 * 512 * 5 * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Mixed), saved(GuestMapping::Base4K));
        // One of 512 walks is left, and is 15 - 11 references shorter.
        assert_eq!(saved(GuestMapping::Huge2M), 512 * 4 * CYCLES_PER_REFERENCE);
        // One of 512 walks becomes one of 512 × 512.
        assert_eq!(saved(GuestMapping::Giant1G), 512 * 11 * CYCLES_PER_REFERENCE - 8 * CYCLES_PER_REFERENCE);
        assert_eq!(saved(GuestMapping::Unmapped), 0);
    }

    #[test]
    fn from_base_to_huge_pages_as_much_is_saved_as_per_miss() {
        for guest in [GuestMapping::Base4K, GuestMapping::Unknown, GuestMapping::Huge2M, GuestMapping::Giant1G] {
            let saved = WalkCost::PRIOR.saved_of(guest, PageSize::Base4K, PageSize::Huge2M, 512);
            let left = if guest == GuestMapping::Huge2M { 60 } else { 44 };
            let rounded = if matches!(guest, GuestMapping::Huge2M | GuestMapping::Giant1G) { left } else { 0 };
            assert_eq!(saved + rounded, 512 * WalkCost::PRIOR.saved_per_miss(guest, PageSize::Huge2M), "{guest:?}");
        }
    }

    #[test]
    fn under_shadow_paging_a_giant_page_saves_walks_only_of_giant_pages_of_the_guest() {
        let shadowed = WalkCost::PRIOR.under_shadow_paging();
        let saved = |guest| shadowed.saved_of(guest, PageSize::Huge2M, PageSize::Giant1G, 1 << 40);
        let small = [GuestMapping::Unknown, GuestMapping::Base4K, GuestMapping::Mixed, GuestMapping::Huge2M];
        assert_eq!(small.map(saved), [0; 4]);
        assert!(saved(GuestMapping::Giant1G) > 0);
    }

    #[test]
    fn a_giant_page_without_a_measured_gain_still_saves_its_references() {
        let saved = |giant| {
            let cells = [[Some(96), Some(76), Some(giant)], [None; 3], [None; 3]];
            let table = WalkCost::measured(&cells, 2_600).expect("three cells are known");
            table.saved_of(GuestMapping::Base4K, PageSize::Huge2M, PageSize::Giant1G, 1)
        };
        // 19 references become 14.
        assert_eq!([saved(90), saved(76), saved(30)], [20, 20, 46]);
    }

    #[test]
    fn measured_cells_stay_and_the_others_follow_by_their_references() {
        // 4K over 4K 240 and 2M over 2M 60 cycles: 300 of 24 + 15 references, 7.7 each.
        let cells = [[Some(240), None, None], [None, Some(60), None], [None; 3]];
        let table = WalkCost::measured(&cells, 2_600).expect("two cells are known");
        assert_eq!(table.per_miss(PageSize::Base4K, PageSize::Base4K), 240);
        assert_eq!(table.per_miss(PageSize::Huge2M, PageSize::Huge2M), 60);
        // 24 references at that price are 184; 19 of 24 of it.
        assert_eq!(table.per_miss(PageSize::Huge2M, PageSize::Base4K), 184 * 19 / 24);
        assert_eq!(table.per_microsecond(), 2_600);
    }

    #[test]
    fn an_impossible_measurement_is_refused() {
        let one = |cycles| [[Some(cycles), None, None], [None; 3], [None; 3]];
        assert_eq!(WalkCost::measured(&[[None; 3]; 3], 2_600), None);
        assert_eq!(WalkCost::measured(&one(0), 2_600), None);
        assert_eq!(WalkCost::measured(&one(CYCLES_MAX + 1), 2_600), None);
        assert_eq!(WalkCost::measured(&one(30), 0), None);
        assert!(WalkCost::measured(&one(30), 2_600).is_some());
    }

    #[test]
    fn a_table_is_written_and_read_again() {
        let text = "96,76,56,76,60,44,56,44,32@2000";
        assert_eq!(alloc::format!("{}", WalkCost::PRIOR), text);
        assert_eq!(text.parse(), Ok(WalkCost::PRIOR));
        let shadowed = alloc::format!("{}", WalkCost::PRIOR.under_shadow_paging());
        assert_eq!(
            (shadowed.as_str(), shadowed.parse()),
            ("96,76,56,76,60,44,56,44,32@2000/shadow", Ok(WalkCost::PRIOR.under_shadow_paging()))
        );
        for wrong in [
            "",
            "/shadow",
            "@2000",
            "1,2,3@2000",
            "96,76,56,76,60,44,56,44,32,1@2000",
            "96,76,56,76,60,44,56,44,0@2000",
        ] {
            assert_eq!(wrong.parse::<WalkCost>(), Err(NoWalkCost), "{wrong}");
        }
    }

    #[test]
    fn remote_tables_cost_one_remote_reference_each_and_the_figure_of_a_machine_is_kept_in_the_text() {
        let miss =
            |guest, host| WalkCost::PRIOR.per_miss_with_remote_tables(PageSize::Base4K, PageSize::Base4K, guest, host);
        assert_eq!([miss(false, false), miss(true, false), miss(false, true), miss(true, true)], [96, 272, 272, 448]);
        let machine = WalkCost::PRIOR.with_remote_extra(187).expect("a possible figure");
        let text = "96,76,56,76,60,44,56,44,32@2000+187";
        assert_eq!((alloc::format!("{machine}").as_str(), text.parse()), (text, Ok(machine)));
        let shadowed = machine.under_shadow_paging();
        assert_eq!(alloc::format!("{shadowed}").parse(), Ok(shadowed));
        assert_eq!(WalkCost::PRIOR.with_remote_extra(CYCLES_MAX + 1), None);
        for wrong in ["96,76,56,76,60,44,56,44,32@2000+", "96,76,56,76,60,44,56,44,32@2000+9999"] {
            assert_eq!(wrong.parse::<WalkCost>(), Err(NoWalkCost), "{wrong}");
        }
    }

    #[test]
    fn a_larger_page_without_a_measured_gain_still_saves_its_references() {
        let saved = |huge| {
            let cells = [[Some(48), Some(huge), None], [None; 3], [None; 3]];
            let table = WalkCost::measured(&cells, 2_600).expect("two cells are known");
            table.saved_per_miss(GuestMapping::Base4K, PageSize::Huge2M)
        };
        // 24 references become 19.
        assert_eq!([saved(60), saved(48), saved(20)], [10, 10, 28]);
    }

    #[test]
    fn a_cpu_is_found_by_vendor_family_and_model_or_not_at_all() {
        let found = |vendor, family, model| CpuFamily::of(Cpu { vendor, family, model }).map(|kind| kind.name);
        assert_eq!(found("AuthenticAMD", 0x19, 0x11), Some("Zen 4"));
        assert_eq!(found("AuthenticAMD", 0x19, 0x01), None);
        assert_eq!(found("GenuineIntel", 0x19, 0x11), None);
        assert_eq!(found("GenuineIntel", 6, 0x3f), None);
        assert_eq!(found("GenuineIntel", 6, 0x8f), None);
    }

    #[test]
    fn no_two_kinds_claim_a_model_and_every_figure_is_a_cost() {
        for kind in FAMILIES {
            assert!((1..=CYCLES_MAX).contains(&kind.base_over_base) && !kind.source.is_empty(), "{}", kind.name);
            for model in kind.models.iter().flat_map(|(from, to)| [*from, *to]) {
                let first = CpuFamily::of(Cpu { vendor: kind.vendor, family: kind.family, model });
                assert_eq!(first.map(|first| first.name), Some(kind.name), "{model:#x}");
            }
        }
    }
}
