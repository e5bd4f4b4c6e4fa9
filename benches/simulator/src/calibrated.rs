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
use super::options::Options;
use super::simulator::Simulator;
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

/// Number of loads that are measured: five times the entries of the largest TLB. As many at least warm the TLB.
const LOADS: usize = 16 * 1024;

/// Most loads that warm the caches. Over more than 21 GiB of base pages that is less than three for each line of the
/// last tables, and some stay unread: a machine with caches for all of them gets a cost that is too high.
const WARMING_MAX: u64 = 1 << 21;

/// Number of loads that read each line of the last tables three times on average, so that 95 % of the lines were read
/// once, and are in the caches if they fit.
fn warming(footprint: Bytes, page: PageSize) -> usize {
    const ENTRIES_OF_LINE: u64 = 8;
    let lines = footprint.get().div_ceil(page.bytes().get() * ENTRIES_OF_LINE);
    LOADS.max((3 * lines).min(WARMING_MAX) as usize)
}

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
    let footprint = of.footprint.max(FOOTPRINT_MIN);
    let page = if of.is_native { host } else { guest.min(host) };
    after_warming(warming(footprint, page), machine, &Calibration { footprint, ..*of }, guest, host)
}

/// Cost of a miss after `warming` loads.
fn after_warming(warming: usize, machine: &Machine, of: &Calibration, guest: PageSize, host: PageSize) -> Option<u32> {
    let footprint = of.footprint;
    let space = if of.is_native {
        AddressSpace::native_with_levels(footprint, host, of.paging.guest_levels)
    } else {
        AddressSpace::nested(footprint, guest, host, of.paging)
    };
    let mut simulator = Simulator::with_options(machine, space, of.options);
    let mut random = Random::new(of.options.seed);
    let mut load = |simulator: &mut Simulator, loads| {
        (0..loads).for_each(|_| simulator.access(random.below(footprint.get()), false));
    };
    load(&mut simulator, warming);
    simulator.reset_counts();
    load(&mut simulator, LOADS);
    let counts = simulator.counts();
    let misses = counts.data_misses();
    let cycles = counts.cycles_of_walks.checked_div(misses).unwrap_or(0);
    (misses >= MISSES_MIN).then(|| u32::try_from(cycles).unwrap_or(CYCLES_MAX).clamp(1, CYCLES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine;
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
    fn a_cost_over_gibibytes_is_that_of_warm_caches() {
        let machine = machine("skylake-sp").expect("it is in the list");
        let (footprint, paging) = (mib(4096), Paging::FOUR_LEVELS);
        let of = Calibration { footprint, paging, is_native: true, options: Options::default() };
        let warm = after_warming(1 << 20, machine, &of, Base4K, Base4K).expect("it misses");
        let cost = cycles_per_miss(machine, &of, Base4K, Base4K).expect("it misses");
        assert!(cost.abs_diff(warm) * 20 <= warm, "{cost} cycles, {warm} with warm caches");
        let cold = after_warming(LOADS, machine, &of, Base4K, Base4K).expect("it misses");
        assert!(cold * 2 > warm * 3, "{cold} cycles with cold caches, {warm} with warm ones");
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
