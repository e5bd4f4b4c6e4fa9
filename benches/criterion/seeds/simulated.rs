//! A machine at work on one page size, and what it counted, weighted part by part.

use wideleaf_policies::{Bytes, PageSize};
use wideleaf_simulator::machine::{Replacement, TlbArray, TlbLevel};
use wideleaf_simulator::streams::Access;
use wideleaf_simulator::{AddressSpace, Counts, Machine, Simulator, machine};

use crate::measured::Misses;

/// What comes out of a run. All of it is sums.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Loads and stores that missed the first level of the TLB.
    pub first_level: f64,
    /// Those that missed all of it.
    pub misses: f64,
    /// References of their walks that missed the L2.
    pub walk_l2: f64,
    /// Cycles of the second level of the TLB and of walks.
    pub translation_cycles: f64,
    /// Cycles from load to use of all data lines, one after another.
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

    /// Those of them that the Opteron has counters for.
    pub fn misses(&self) -> Misses {
        Misses { tlb: self.misses, walk_l2: self.walk_l2 }
    }
}

/// The Opteron, and how its eight entries for 2 MiB pages make room, of which nothing is documented. The machine's own rule is LRU.
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
    /// Addresses are divided by so much, as a power of two.
    shift: u32,
    sums: Sums,
}

impl Arm {
    /// An arena of `bytes` on pages of `page`, without a second dimension; everything is cold.
    pub fn new(machine: &'static Machine, bytes: u64, page: PageSize) -> Arm {
        Arm::divided(machine, bytes, page, 0)
    }

    /// Pages 2^`shift` times as large as `page`: all addresses are divided by that, so that page numbers, misses and entries of tables
    /// are those of the larger pages. Data lines are not: 2^`shift` of them fall together.
    pub fn divided(machine: &'static Machine, bytes: u64, page: PageSize, shift: u32) -> Arm {
        let space = AddressSpace::native(Bytes::new((bytes >> shift).max(1)), page);
        Arm { machine, simulator: Simulator::new(machine, space), shift, sums: Sums::default() }
    }

    /// One access, counted by the next [`Arm::sum_up`].
    #[inline]
    pub fn access(&mut self, access: Access) {
        self.simulator.access_repeated(access.address >> self.shift, access.is_write, access.repeats);
    }

    /// Many, in their order.
    pub fn run(&mut self, accesses: &[Access]) {
        if self.shift == 0 {
            self.simulator.run(accesses.iter().copied());
        } else {
            accesses.iter().for_each(|access| self.access(*access));
        }
    }

    /// What was counted since the last time counts so many times.
    pub fn sum_up(&mut self, weight: f64) {
        self.sums.add(Sums::of(self.simulator.counts(), self.machine), weight);
        self.simulator.reset_counts();
    }

    /// What was counted since the last [`Arm::sum_up`] counts nothing.
    pub fn forget(&mut self) {
        self.simulator.reset_counts();
    }

    /// All that was summed up.
    pub fn sums(&self) -> Sums {
        self.sums
    }
}
