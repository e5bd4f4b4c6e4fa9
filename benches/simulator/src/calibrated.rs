//! The cost of a TLB miss on a simulated machine, so that a policy there uses the costs of that machine. It is
//! measured as on a real one, by accesses all over a footprint.
//!
//! ```text
//!   guest page × host page ─▶ random loads over the footprint ─▶ cycles of walks ÷ misses ─▶ cell
//!                             (footprint within the TLB's reach: no cell; computed from references)
//! ```
//!
//! The footprint is that of the program: over more memory the tables outgrow the caches, and walks cost more.

use wideleaf_policies::walk::CYCLES_PER_MICROSECOND;
use wideleaf_policies::walk::cost::{CYCLES_MAX, Cells, WalkCost};

use super::Paging;
use super::machine::Machine;
use super::simulator::{Options, Simulator};
use super::space::AddressSpace;
use super::streams::Random;
use wideleaf_policies::units::{Bytes, PageSize, mib};

/// Input of [`walk_cost`].
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    /// Memory that the program accesses, in bytes; at least [`FOOTPRINT_MIN`] is used.
    pub footprint: Bytes,
    /// Number of table levels in both dimensions.
    pub paging: Paging,
    /// Whether there is no second dimension; the table then has the host's page in every row.
    pub is_native: bool,
    /// Whether the core is shared, and the seed of random replacement.
    pub options: Options,
}

/// Five times the reach of the largest TLB in base pages (3072 entries, Zen 4), so that every machine has misses.
/// `wideleaf tlbcost` uses the same size on a real machine.
pub const FOOTPRINT_MIN: Bytes = mib(64);

/// Number of loads that warm the caches, and of those that are measured after them: five times the entries of
/// the largest TLB.
const LOADS: usize = 16 * 1024;

/// Fewest misses in [`LOADS`] that count as a measurement; fewer come from a TLB that holds the footprint.
const MISSES_MIN: u64 = LOADS as u64 / 16;

/// Cost table of `machine`, in the cycles of the simulated clock.
///
/// # Panics
/// As for [`Simulator::new`] and [`AddressSpace::native`]: more levels than the machine walks, or a footprint
/// larger than any arena.
pub fn walk_cost(machine: &Machine, of: &Calibration) -> WalkCost {
    let row = |guest| PageSize::ALL.map(|host| cycles_per_miss(machine, of, guest, host));
    let cells: Cells = if of.is_native { [row(PageSize::Base4K); 3] } else { PageSize::ALL.map(row) };
    WalkCost::measured(&cells, CYCLES_PER_MICROSECOND as u32).unwrap_or(WalkCost::PRIOR)
}

fn cycles_per_miss(machine: &Machine, of: &Calibration, guest: PageSize, host: PageSize) -> Option<u32> {
    let footprint = if of.footprint < FOOTPRINT_MIN { FOOTPRINT_MIN } else { of.footprint };
    let space = if of.is_native {
        AddressSpace::native_with_levels(footprint, host, of.paging.guest_levels)
    } else {
        AddressSpace::nested(footprint, guest, host, of.paging)
    };
    let mut simulator = Simulator::with_options(machine, space, of.options);
    let mut random = Random::new(of.options.seed);
    let mut load = |simulator: &mut Simulator| {
        (0..LOADS).for_each(|_| simulator.access(random.below(footprint.get()), false));
    };
    load(&mut simulator);
    simulator.reset_counts();
    load(&mut simulator);
    let counts = simulator.counts();
    let misses = counts.data_misses();
    let cycles = counts.cycles_of_walks.checked_div(misses).unwrap_or(0);
    (misses >= MISSES_MIN).then(|| u32::try_from(cycles).unwrap_or(CYCLES_MAX).clamp(1, CYCLES_MAX))
}

#[cfg(test)]
mod tests {
    use super::super::machine::machine;
    use super::*;
    use PageSize::{Base4K, Huge2M};

    fn calibrated(name: &str, footprint: Bytes, is_native: bool) -> WalkCost {
        let machine = machine(name).expect("it is in the list");
        let paging = Paging::FOUR_LEVELS;
        walk_cost(machine, &Calibration { footprint, paging, is_native, options: Options::default() })
    }

    #[test]
    fn every_machine_has_its_own_cost_and_a_nested_walk_costs_no_less() {
        for machine in super::super::machines() {
            let [native, nested] = [true, false].map(|is_native| {
                let cost = calibrated(machine.name, mib(64), is_native);
                assert_ne!(cost, WalkCost::PRIOR, "{}", machine.name);
                cost.per_miss(Base4K, Base4K)
            });
            assert!(0 < native && native <= nested, "{}: {native} natively, {nested} in a guest", machine.name);
        }
    }

    #[test]
    fn a_larger_footprint_makes_a_walk_more_expensive() {
        let [small, large] =
            [mib(64), mib(4096)].map(|bytes| calibrated("zen4", bytes, false).per_miss(Base4K, Base4K));
        assert!(small < large, "{small} over 64 MiB, {large} over 4 GiB");
    }

    #[test]
    fn a_native_cost_ignores_the_guest_page() {
        let cost = calibrated("zen4", mib(64), true);
        assert_eq!(cost.per_miss(Base4K, Base4K), cost.per_miss(Huge2M, Base4K));
    }

    #[test]
    fn the_same_machine_has_the_same_cost_each_time() {
        assert_eq!(calibrated("skylake-sp", mib(64), false), calibrated("skylake-sp", mib(64), false));
        assert_eq!(calibrated("k8", Bytes::new(4096), true), calibrated("k8", FOOTPRINT_MIN, true));
    }
}
