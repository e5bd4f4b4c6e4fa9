//! The cost of a two-dimensional walk, counted from walks: `data/walk_cost.csv` row by row, and the
//! formula behind it.
//!
//! ```text
//!   cold                   no level is cached                         (n + 1)(m + 1) - 1
//!   guest's walk cache     only the guest's leaf is read              1 + m + m
//!   and the host's         the host's leaf each time                  1 + 1 + 1
//!   and the nested TLB     the table's page is known, the page not    1 + 0 + 1
//! ```
//!
//! Each column is a machine that has only these caches, brought into that state by accesses alone.

use proptest::prelude::*;
use wideleaf_policies::units::gib;
use wideleaf_policies::walk::references;
use wideleaf_policies::{PageSize, WindowIndex};
use wideleaf_simulator::machine::{Array, Replacement, WalkCache, high};
use wideleaf_simulator::{AddressSpace, Counts, Machine, Paging, Simulator, machine};

const TEST: &str = "made for this test";
const LARGE: Array = array(64);
/// Two entries: the page of the guest's leaf tables, and one of data, which the next access to data evicts.
const TWO: Array = array(2);
const WALK_CACHE: &[WalkCache] = &[WalkCache { levels: &[2, 3, 4, 5], array: LARGE }];

const fn array(entries: u32) -> Array {
    Array { entries: high(entries, TEST), ways: high(entries, TEST), replacement: high(Replacement::Lru, TEST) }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Has {
    Nothing,
    GuestWalkCache,
    HostWalkCache,
    NestedTlb,
}

fn machine_with(has: Has) -> Machine {
    Machine {
        walk_caches: if has >= Has::GuestWalkCache { WALK_CACHE } else { &[] },
        host_walk_caches: if has >= Has::HostWalkCache { WALK_CACHE } else { &[] },
        nested_tlb: (has == Has::NestedTlb).then_some(TWO),
        walk_caches_are_combined: high(false, TEST),
        second_level_holds_pdes: high(false, TEST),
        ..*machine("a64fx").expect("a machine with a TLB for all sizes")
    }
}

/// References and walks of one access.
fn cost_of(simulator: &mut Simulator, address: u64) -> Counts {
    simulator.reset_counts();
    simulator.access(address, false);
    simulator.counts().clone()
}

struct Row {
    guest: PageSize,
    host: PageSize,
    paging: Paging,
    cold: u64,
    native: u64,
    entry: PageSize,
    cached: [u64; 3],
}

fn rows() -> Vec<Row> {
    let size = |text: &str| PageSize::parse(&text.to_lowercase()).expect("a page size");
    let lines = include_str!("../data/walk_cost.csv").lines().skip(1);
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        let number = |n: usize| cells[n].parse::<u64>().expect("a whole number");
        Row {
            paging: Paging { guest_levels: number(0) as u8, host_levels: number(1) as u8 },
            guest: size(cells[2]),
            host: size(cells[3]),
            cold: number(6),
            native: number(7),
            entry: size(cells[8]),
            cached: [number(9), number(10), number(11)],
        }
    };
    let rows: Vec<Row> = lines.map(row).collect();
    assert_eq!(rows.len(), 36);
    rows
}

impl Row {
    fn space(&self) -> AddressSpace {
        AddressSpace::nested(gib(8), self.guest, self.host, self.paging)
    }

    fn name(&self) -> String {
        let Paging { guest_levels, host_levels } = self.paging;
        format!("{} over {}, {guest_levels} + {host_levels} levels", self.guest, self.host)
    }

    /// Number of references of an access on a machine with these caches, after accesses that warmed them
    /// only for it.
    fn warm_cost(&self, has: Has) -> u64 {
        self.warm_counts(&machine_with(has)).references()
    }

    fn warm_counts(&self, machine: &Machine) -> Counts {
        let mut simulator = Simulator::new(machine, self.space());
        let entry = self.entry.bytes().get();
        let address = if self.host > self.guest { 0 } else { entry * 4 };
        let neighbour = address + entry;
        // If one host page holds several of the guest's pages, `elsewhere` is on another host page. The guest's
        // leaf tables for both are on one host page, and the data at `elsewhere` evict the neighbour's page, which
        // is also that of `address`, from the nested TLB.
        let elsewhere = if self.host > self.guest { self.host.bytes().get() } else { neighbour };
        simulator.access(elsewhere, false);
        simulator.access(neighbour, false);
        simulator.access(elsewhere + entry, false);
        let counts = cost_of(&mut simulator, address);
        assert_eq!(counts.walks(), 1, "{}", self.name());
        counts
    }
}

#[test]
fn a_cold_walk_makes_the_references_in_the_table() {
    for row in rows() {
        let mut simulator = Simulator::new(&machine_with(Has::Nothing), row.space());
        let counts = cost_of(&mut simulator, 0);
        assert_eq!(counts.references(), row.cold, "{}", row.name());
        assert_eq!(counts.misses_of(row.entry), 1, "{}", row.name());

        let native = AddressSpace::native_with_levels(gib(8), row.guest, row.paging.guest_levels);
        let mut simulator = Simulator::new(&machine_with(Has::Nothing), native);
        assert_eq!(cost_of(&mut simulator, 0).references(), row.native, "{}", row.name());
    }
}

#[test]
fn a_warm_walk_makes_the_references_in_the_table() {
    for row in rows() {
        let costs = [Has::GuestWalkCache, Has::HostWalkCache, Has::NestedTlb].map(|has| row.warm_cost(has));
        assert_eq!(costs, row.cached, "{}", row.name());
    }
}

/// The walk cache gives the location of the guest's leaf, so only the page is left to find: all of the host's
/// levels, or only the leaf if the host's walk cache has the rest.
#[test]
fn a_combined_walk_cache_saves_the_hosts_walk_to_the_first_table() {
    for row in rows() {
        let host_levels = u64::from(row.paging.host_levels) - row.host as u64;
        for (has, of_page) in [(Has::GuestWalkCache, host_levels), (Has::HostWalkCache, 1)] {
            let combined = Machine { walk_caches_are_combined: high(true, TEST), ..machine_with(has) };
            let counts = row.warm_counts(&combined);
            let read =
                [counts.guest.read, counts.host_of_tables.read, counts.host_of_data.read].map(|read| read.total());
            assert_eq!(read, [1, 0, of_page], "{}", row.name());
            assert_eq!(counts.host_of_tables.skipped_by_walk_cache, host_levels, "{}", row.name());
        }
    }
}

#[test]
fn an_empty_combined_walk_cache_saves_nothing_of_a_cold_walk() {
    for row in rows() {
        let combined = Machine { walk_caches_are_combined: high(true, TEST), ..machine_with(Has::GuestWalkCache) };
        let counts = cost_of(&mut Simulator::new(&combined, row.space()), 0);
        assert_eq!(counts.references(), row.cold, "{}", row.name());
    }
}

#[test]
fn a_warm_walk_of_small_pages_reads_two_entries_on_intel_and_three_with_guest_physical_walk_caches() {
    let row = &rows()[0];
    let haswell = *machine("haswell-ep").expect("a known machine");
    let guest_physical = Machine { walk_caches_are_combined: high(false, TEST), ..haswell };
    let cost = |machine| row.warm_counts(machine).references();
    assert_eq!([cost(&haswell), cost(&guest_physical)], [2, 3]);
}

#[test]
fn an_entry_covers_the_smaller_page_of_the_two() {
    for row in rows() {
        let mut simulator = Simulator::new(&machine_with(Has::Nothing), row.space());
        let entry = row.entry.bytes().get();
        simulator.access(0, false);
        assert_eq!(cost_of(&mut simulator, entry - 64).walks(), 0, "{}", row.name());
        assert_eq!(cost_of(&mut simulator, entry).walks(), 1, "{}", row.name());
    }
}

fn page_size() -> impl Strategy<Value = PageSize> {
    prop::sample::select(PageSize::ALL.to_vec())
}

proptest! {
    /// `n (m_tables + 1) + m_data`, for any address and any host pages under the tables.
    #[test]
    fn walker_and_formula_agree(
        guest in page_size(),
        tables in page_size(),
        data in page_size(),
        guest_levels in 4u8..=5,
        host_levels in 4u8..=5,
        address in 0..gib(4).get(),
    ) {
        let paging = Paging { guest_levels, host_levels };
        let mut space = AddressSpace::nested(gib(4), guest, tables, paging);
        space.set_host(WindowIndex::new(address >> 21), data);
        let mut simulator = Simulator::new(&machine_with(Has::Nothing), space);
        let counts = cost_of(&mut simulator, address);

        let walked = |levels: u8, size: PageSize| u64::from(levels) - size as u64;
        let (n, m_tables, m_data) =
            (walked(guest_levels, guest), walked(host_levels, tables), walked(host_levels, data));
        prop_assert_eq!(counts.guest.read.total(), n);
        prop_assert_eq!(counts.host_of_tables.read.total(), n * m_tables);
        prop_assert_eq!(counts.host_of_data.read.total(), m_data);
        if tables == data && paging == Paging::FOUR_LEVELS {
            prop_assert_eq!(counts.references(), references(guest, data));
        }
    }

    /// The references that the caches of the walk save and those that are read add up to the cold walk, for every
    /// machine and any accesses.
    #[test]
    fn read_and_skipped_references_add_up_to_a_cold_walk(
        which in 0..wideleaf_simulator::machines().len(),
        guest in page_size(),
        host in page_size(),
        addresses in prop::collection::vec(0..gib(2).get(), 1..200),
    ) {
        let machine = &wideleaf_simulator::machines()[which];
        let space = AddressSpace::nested(gib(2), guest, host, Paging::FOUR_LEVELS);
        let mut simulator = Simulator::new(machine, space);
        for address in addresses {
            simulator.access(address, address % 3 == 0);
        }
        let counts = simulator.counts();
        let (n, m) = (4 - guest as u64, 4 - host as u64);
        prop_assert_eq!(counts.guest.cold(), n * counts.walks());
        prop_assert_eq!(counts.host_of_tables.cold(), m * counts.guest.read.total());
        prop_assert_eq!(counts.host_of_data.cold(), m * counts.walks());
        prop_assert_eq!(counts.tlb_hits.iter().sum::<u64>() + counts.data_misses(), counts.accesses);
        prop_assert_eq!(counts.data.total(), counts.accesses);
    }
}

#[test]
fn tables_on_larger_pages_save_more_of_a_cold_walk_than_data_on_larger_pages() {
    let space = || AddressSpace::nested(gib(1), PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
    let cost = |space| cost_of(&mut Simulator::new(&machine_with(Has::Nothing), space), 0).references();
    let (mut data, mut tables) = (space(), space());
    data.set_host(WindowIndex::new(0), PageSize::Huge2M);
    tables.set_host_of_tables(PageSize::Huge2M);
    assert_eq!([cost(space()), cost(data), cost(tables)], [24, 23, 20]);
}
