//! The simulator: a machine, an address space, and accesses one after another.
//!
//! ```text
//!   access ─▶ page sizes of its window ─▶ TLB ─miss─▶ walk ─▶ tables' lines ─┐
//!                                                                            ▼
//!          └──────────────────────────────────────────▶ data line ─▶ caches, shared
//! ```
//!
//! The simulator allocates no memory after [`Simulator::new`], and the same accesses give the same counts. There is
//! no notion of time: the results say where accesses were found, and cycles are sums of latencies.

use self::block::{Block, Sums};
use super::caches::Caches;
use super::counts::Counts;
use super::machine::Machine;
use super::sets::{Avx2, Vectors, Work, keep, run};
use super::space::AddressSpace;
use super::streams::Access;
use super::tlb::{Level, Translated, find, translate};
use super::walker::Walker;
use wideleaf_policies::units::{PageSize, WindowIndex};

pub use super::options::{Distances, Lines, Options};

pub(crate) mod block;

/// A machine at work on an address space.
pub struct Simulator {
    data_first: Level,
    data_second: Option<Level>,
    fetch_first: Level,
    fetch_second: Option<Level>,
    /// Whether fetches use `data_second`.
    second_is_shared: bool,
    lines: Lines,
    block: Block,
    /// Proof that the work of a block may use AVX2, if it is there.
    avx2: Option<Avx2>,
    walker: Walker,
    caches: Caches,
    space: AddressSpace,
    counts: Counts,
}

impl Simulator {
    /// Makes one thread with a core for itself; all caches are cold.
    ///
    /// # Panics
    /// If the machine's numbers contradict each other, or there are more levels of table than it walks.
    pub fn new(machine: &Machine, space: AddressSpace) -> Simulator {
        Simulator::with_options(machine, space, Options::default())
    }

    /// Does the same as [`Simulator::new`], with other [`Options`].
    ///
    /// # Panics
    /// As for [`Simulator::new`].
    pub fn with_options(machine: &Machine, space: AddressSpace, options: Options) -> Simulator {
        let paging = space.paging();
        let levels = paging.guest_levels.max(paging.host_levels);
        let levels_max = machine.levels_max.value;
        assert!(u32::from(levels) <= levels_max, "{} walks {levels_max} levels of table, not {levels}", machine.name);
        let is_halved = options.is_core_shared;
        let level = |list: &[_], n: usize| {
            list.get(n).map(|level| Level::new(level, n == 0, is_halved, options.seed + 64 * (n as u64 + 1)))
        };
        Simulator {
            data_first: level(machine.data_tlb, 0).expect("a machine has a TLB for data"),
            data_second: level(machine.data_tlb, 1),
            fetch_first: level(machine.instruction_tlb, 0).expect("a machine has a TLB for instructions"),
            fetch_second: level(machine.instruction_tlb, 1),
            second_is_shared: machine.second_level_is_shared.value,
            lines: options.lines,
            block: Block::new(),
            avx2: Avx2::of_this_cpu(),
            walker: Walker::new(machine, options, options.seed + 256),
            caches: Caches::new(machine, space.end() >> 6, options, options.seed + 512),
            space,
            counts: Counts::default(),
        }
    }

    /// Simulates a load or a store at an address of the arena.
    ///
    /// # Panics
    /// If the address is outside the arena.
    #[inline]
    pub fn access(&mut self, address: u64, is_write: bool) {
        self.access_repeated(address, is_write, 1);
    }

    /// Simulates `repeats` successive accesses to one line, with no other access in between; none if it is zero.
    /// All but the first hit the first level of the TLB and of the caches.
    #[inline]
    pub fn access_repeated(&mut self, address: u64, is_write: bool, repeats: u32) {
        self.run([Access { address, is_write, repeats }]);
    }

    /// Simulates many accesses in order, like one [`Simulator::access_repeated`] for each. This is faster, because
    /// their lines are looked up together.
    ///
    /// # Panics
    /// If an address is outside the arena.
    pub fn run(&mut self, accesses: impl IntoIterator<Item = Access>) {
        let mut accesses = accesses.into_iter();
        loop {
            let (space, first) = (&self.space, &mut self.data_first);
            let seek = |address, is_store| first.seek(address, space.pages(address).entry_index(), is_store);
            let (seeking, sums) = self.block.fill(&mut accesses, seek);
            if sums.accesses == 0 {
                return;
            }
            self.follow(seeking, sums);
        }
    }

    /// Simulates the accesses of a block, `seeking` of which look up their page.
    fn follow(&mut self, seeking: usize, sums: Sums) {
        let walking = self.translate(seeking);
        let hits = sums.accesses + sums.repeats - seeking as u64;
        self.counts.accesses += sums.accesses + sums.repeats;
        self.counts.writes += sums.writes;
        self.counts.tlb_hits[0] += hits;
        self.counts.data.caches[0] += sums.repeats * u64::from(self.lines == Lines::All);
        let avx2 = self.avx2;
        run(Walks { of: self, number: walking }, avx2);
        // Where most accesses stay on the page that was the newest of its set, they often stay on the line.
        self.caches.serve(2 * seeking as u64 <= sums.accesses, avx2, &mut self.counts);
    }

    /// Looks up the pages of a block in the TLB. Returns the number that missed both levels.
    fn translate(&mut self, seeking: usize) -> usize {
        let (block, counts) = (&mut self.block, &mut self.counts);
        let Block { addresses, seekers, .. } = block;
        let seekers = &mut seekers[..seeking];
        let Some(second) = &mut self.data_second else {
            let missed = self.data_first.sift_first(seekers, self.avx2);
            counts.tlb_hits[0] += (seeking - missed) as u64;
            return missed;
        };
        let (mut missed_first, missed);
        if second.takes_victims() {
            missed_first = 0;
            missed = keep(seekers, |seeker| {
                let address = addresses[seeker.access as usize];
                let found = find(&mut self.data_first, Some(second), address, *seeker);
                missed_first += usize::from(found != Translated::FirstLevel);
                let is_missing = matches!(found, Translated::Missed(_));
                seeker.has_pde = is_missing && self.walker.finds_pde(address, &self.space, Some(second));
                is_missing
            });
        } else {
            missed_first = self.data_first.sift_first(seekers, self.avx2);
            let seekers = &mut seekers[..missed_first];
            missed = if self.walker.second_level_holds_pdes {
                keep(seekers, |seeker| {
                    let address = addresses[seeker.access as usize];
                    let is_missing = !second.second(address, seeker);
                    seeker.has_pde = is_missing && self.walker.finds_pde(address, &self.space, Some(second));
                    is_missing
                })
            } else {
                second.sift_second(seekers, addresses, self.avx2)
            };
        }
        counts.tlb_hits[0] += (seeking - missed_first) as u64;
        let hits = (missed_first - missed) as u64;
        counts.tlb_hits[1] += hits;
        counts.cycles_of_tlb += hits * second.cycles;
        missed
    }

    /// Simulates an instruction fetch from an address of the arena. Its line goes through no cache: only its
    /// translation is simulated.
    ///
    /// # Panics
    /// If the address is outside the arena.
    pub fn fetch(&mut self, address: u64) {
        self.counts.fetches += 1;
        let size = self.space.pages(address).entry();
        let second = if self.second_is_shared { &mut self.data_second } else { &mut self.fetch_second };
        match translate(&mut self.fetch_first, second.as_mut(), address, size, false) {
            Translated::FirstLevel => self.counts.fetch_tlb_hits[0] += 1,
            Translated::SecondLevel => {
                self.counts.fetch_tlb_hits[1] += 1;
                self.counts.cycles_of_tlb += second.as_ref().map_or(0, |level| level.cycles);
            }
            Translated::Missed(size) => {
                self.counts.fetch_misses[size as usize] += 1;
                let has_pde = self.walker.finds_pde(address, &self.space, second.as_mut());
                self.walker.walk(address, has_pde, &self.space, &mut self.caches, &mut self.counts);
            }
        }
        self.caches.serve(false, self.avx2, &mut self.counts);
    }

    /// Changes the host's backing of a window to pages of `size` (see [`AddressSpace::set_host`]), and drops all of
    /// the guest's cached translations, as KVM's flush of the guest's TLB does (SDM vol. 3, 29.4.3.1: INVEPT; APM
    /// vol. 2, 15.16: a new ASID). Lines stay in the caches: the window keeps its address here, though a real
    /// promotion may have copied it to another.
    pub fn remap_host(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_host(window, size);
        self.flush();
    }

    /// Changes the guest's mapping of a window to pages of `size`, and drops all cached translations.
    pub fn remap_guest(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_guest(window, size);
        self.flush();
    }

    /// Makes the host back an unbacked window by pages of `size` (its first touch): there is no
    /// translation to drop.
    pub fn map_host(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_host(window, size);
    }

    /// Makes the guest map an unmapped window by pages of `size`: there is no translation to drop.
    pub fn map_guest(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_guest(window, size);
    }

    /// Drops all entries of the TLBs, walk caches and the nested TLB.
    pub fn flush(&mut self) {
        for level in [&mut self.data_first, &mut self.fetch_first] {
            level.clear();
        }
        for level in [&mut self.data_second, &mut self.fetch_second].into_iter().flatten() {
            level.clear();
        }
        self.walker.clear();
        self.counts.flushes += 1;
    }

    /// The data of that window lie on another node than the thread's from now on, or on its own. Lines that a cache
    /// holds are as near as ever.
    pub fn put_on_node(&mut self, window: WindowIndex, is_remote: bool) {
        self.caches.put_on_node(window, is_remote);
    }

    /// The current mappings of both dimensions.
    pub fn space(&self) -> &AddressSpace {
        &self.space
    }

    /// Counts since the beginning or the last [`Simulator::reset_counts`].
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Resets the counts to zero; all caches stay warm.
    pub fn reset_counts(&mut self) {
        self.counts = Counts::default();
    }
}

/// The walks of a block, which begin with the first seekers, and the data of all its accesses: their references, in the
/// order of the accesses.
struct Walks<'a> {
    of: &'a mut Simulator,
    number: usize,
}

impl Work for Walks<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: impl Vectors) {
        let Simulator { lines, block, walker, caches, space, counts, .. } = self.of;
        let has_data = *lines == Lines::All;
        let mut next = 0;
        for seeker in &block.seekers[..self.number] {
            let n = seeker.access as usize;
            if has_data {
                caches.refer_data(&block.addresses()[next..n]);
            }
            next = n;
            counts.misses[seeker.size() as usize] += 1;
            walker.walk(block.addresses()[n], seeker.has_pde, space, caches, counts);
        }
        if has_data {
            caches.refer_data(&block.addresses()[next..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::machines;
    use crate::space::Paging;
    use crate::streams::{Sparse, gups};
    use wideleaf_policies::units::gib;

    #[test]
    fn a_processor_without_avx2_counts_the_same_on_every_machine() {
        let accesses = || {
            let far = || gups(gib(1).get() / 8, 3).take(6_000);
            far().chain(Sparse { rows: 500, row_entries: 20 }.multiply(5).take(6_000)).chain(far())
        };
        for machine in machines() {
            for guest in [PageSize::Base4K, PageSize::Huge2M] {
                let count = |may_use_avx2: bool| {
                    let space = AddressSpace::nested(gib(1), guest, PageSize::Base4K, Paging::FOUR_LEVELS);
                    let mut simulator = Simulator::new(machine, space);
                    simulator.avx2 = simulator.avx2.filter(|_| may_use_avx2);
                    simulator.run(accesses());
                    simulator.counts().clone()
                };
                assert_eq!(count(true), count(false), "{} with a guest on {guest} pages", machine.name);
            }
        }
    }
}
