//! A simulated machine on one page size, and its counts, weighted part by part.

use wideleaf_policies::{Bytes, PageSize};
use wideleaf_simulator::machine::{Replacement, TlbArray, TlbLevel};
use wideleaf_simulator::streams::Access;
use wideleaf_simulator::{AddressSpace, Counts, Machine, Simulator, machine};

use crate::measured::Misses;

/// Results of a run, all of them sums.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Loads and stores that missed the first level of the TLB.
    pub first_level: f64,
    /// Loads and stores that missed all levels of the TLB.
    pub misses: f64,
    /// References of page-table walks that missed the L2.
    pub walk_l2: f64,
    /// Cycles of the second level of the TLB and of walks.
    pub translation_cycles: f64,
    /// Cycles from load to use of all data lines, as if sequential.
    pub data_cycles: f64,
}

impl Sums {
    fn of(counts: &Counts, machine: &Machine) -> Sums {
        let latencies = machine.caches.iter().map(|cache| cache.cycles.value);
        let by_caches: u64 =
            counts.data.caches.iter().zip(latencies).map(|(lines, cycles)| lines * u64::from(cycles)).sum();
        let by_memory = counts.data.memory * u64::from(machine.memory_cycles.value);
        Sums {
            first_level: (counts.tlb_hits[1] + counts.data_misses()) as f64,
            misses: counts.data_misses() as f64,
            walk_l2: counts.references_missed(2) as f64,
            translation_cycles: (counts.cycles_of_tlb + counts.cycles_of_walks) as f64,
            data_cycles: (by_caches + by_memory) as f64,
        }
    }

    fn add(&mut self, more: Sums, weight: f64) {
        self.first_level += more.first_level * weight;
        self.misses += more.misses * weight;
        self.walk_l2 += more.walk_l2 * weight;
        self.translation_cycles += more.translation_cycles * weight;
        self.data_cycles += more.data_cycles * weight;
    }

    /// Sums that the Opteron has counters for.
    pub fn misses(&self) -> Misses {
        Misses { tlb: self.misses, walk_l2: self.walk_l2 }
    }
}

/// The Opteron with this replacement rule for its eight entries for 2 MiB pages. The real rule is not documented; the
/// machine's default is LRU.
pub fn opteron(rule: Replacement) -> &'static Machine {
    let k8 = machine("k8").expect("the Opteron");
    let [first, second] = k8.data_tlb else { panic!("K8 has two levels of TLB") };
    let changed = |mut of: TlbArray| {
        if of.pages == [PageSize::Huge2M] {
            of.array.replacement.value = rule;
        }
        of
    };
    let arrays: Vec<TlbArray> = first.arrays.iter().copied().map(changed).collect();
    let first = TlbLevel { arrays: arrays.leak(), ..*first };
    Box::leak(Box::new(Machine { data_tlb: vec![first, *second].leak(), ..*k8 }))
}

/// A simulator and its sums.
pub struct Arm {
    machine: &'static Machine,
    simulator: Simulator,
    /// Log2 of the divisor of addresses.
    shift: u32,
    sums: Sums,
}

impl Arm {
    /// A cold simulator for an arena of `bytes` on pages of `page`, without a second dimension.
    pub fn new(machine: &'static Machine, bytes: u64, page: PageSize) -> Arm {
        Arm::divided(machine, bytes, page, 0)
    }

    /// A simulator with pages 2^`shift` times as large as `page`. All addresses are divided by that, so that
    /// page numbers, misses and table entries are those of the larger pages. Data lines are not: 2^`shift`
    /// of them become one.
    pub fn divided(machine: &'static Machine, bytes: u64, page: PageSize, shift: u32) -> Arm {
        let space = AddressSpace::native(Bytes::new((bytes >> shift).max(1)), page);
        Arm { machine, simulator: Simulator::new(machine, space), shift, sums: Sums::default() }
    }

    /// Simulates one access; the next [`Arm::sum_up`] counts it.
    #[inline]
    pub fn access(&mut self, access: Access) {
        self.simulator.access_repeated(access.address >> self.shift, access.is_write, access.repeats);
    }

    /// Simulates accesses in their order.
    pub fn run(&mut self, accesses: &[Access]) {
        if self.shift == 0 {
            self.simulator.run(accesses.iter().copied());
        } else {
            accesses.iter().for_each(|access| self.access(*access));
        }
    }

    /// Adds the counts since the last call, multiplied by `weight`.
    pub fn sum_up(&mut self, weight: f64) {
        self.sums.add(Sums::of(self.simulator.counts(), self.machine), weight);
        self.simulator.reset_counts();
    }

    /// Discards the counts since the last [`Arm::sum_up`].
    pub fn forget(&mut self) {
        self.simulator.reset_counts();
    }

    /// Sums of all weighted counts.
    pub fn sums(&self) -> Sums {
        self.sums
    }
}
