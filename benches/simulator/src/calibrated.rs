//! What a TLB miss costs on a machine of the simulator, so that a policy there counts by the machine it is on: found as on a real one, by
//! accesses all over a footprint.
//!
//! ```text
//!   guest page × host page ─▶ random loads over the footprint ─▶ cycles of walks ÷ misses ─▶ cell
//!                             (all of it within the TLB's reach: no cell; it follows by its references)
//! ```
//!
//! The footprint is the program's own: over more memory the tables outgrow caches, and walks cost more.

use wideleaf_policies::walk::CYCLES_PER_MICROSECOND;
use wideleaf_policies::walk::cost::{CYCLES_MAX, Cells, WalkCost};

use super::Paging;
use super::machine::Machine;
use super::simulator::{Options, Simulator};
use super::space::AddressSpace;
use super::streams::Random;
use wideleaf_policies::units::{Bytes, PageSize, mib};

/// What [`walk_cost`] is asked of.
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    /// Bytes that the program goes over. Less than [`FOOTPRINT_MIN`] is taken for that.
    pub footprint: Bytes,
    /// Levels of table in both dimensions.
    pub paging: Paging,
    /// No second dimension: the table then has the host's page in every row.
    pub is_native: bool,
    /// Whether the core is shared, and what random replacement starts from.
    pub options: Options,
}

/// Five times what the largest TLB there is reaches in base pages (3072 entries, Zen 4): there are misses on every machine, and as many bytes
/// as `wideleaf tlbcost` goes over on a real one.
pub const FOOTPRINT_MIN: Bytes = mib(64);

/// Loads that warm everything, and as many that count: five times the entries of the largest TLB.
const LOADS: usize = 16 * 1024;

/// Less than so many misses in [`LOADS`] are those of a TLB that holds the footprint, and no measurement.
const MISSES_MIN: u64 = LOADS as u64 / 16;

/// The table of `machine`, in the cycles of the simulated clock.
///
/// # Panics
/// As [`Simulator::new`] and [`AddressSpace::native`]: more levels than the machine walks, or a footprint that no arena has.
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
    fn every_machine_has_a_cost_of_its_own_and_a_nested_walk_costs_more() {
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
    fn a_larger_footprint_makes_a_walk_dearer() {
        let [small, large] =
            [mib(64), mib(4096)].map(|bytes| calibrated("zen4", bytes, false).per_miss(Base4K, Base4K));
        assert!(small < large, "{small} over 64 MiB, {large} over 4 GiB");
    }

    #[test]
    fn natively_there_is_no_guests_page() {
        let cost = calibrated("zen4", mib(64), true);
        assert_eq!(cost.per_miss(Base4K, Base4K), cost.per_miss(Huge2M, Base4K));
    }

    #[test]
    fn the_same_machine_has_the_same_cost_each_time() {
        assert_eq!(calibrated("skylake-sp", mib(64), false), calibrated("skylake-sp", mib(64), false));
        assert_eq!(calibrated("k8", Bytes::new(4096), true), calibrated("k8", FOOTPRINT_MIN, true));
    }
}
