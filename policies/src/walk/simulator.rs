//! The simulator: a machine, an address space, and accesses, one after another.
//!
//! ```text
//!   access ─▶ page sizes of its window ─▶ TLB ─miss─▶ walk ─▶ tables' lines ─┐
//!                                                                            ▼
//!          └──────────────────────────────────────────▶ data line ─▶ caches, shared
//! ```
//!
//! Nothing is allocated after [`Simulator::new`], and the same accesses give the same counts. Time does not exist: what
//! comes out is where things were found, and cycles are sums of latencies.

use super::caches::{Caches, Purpose};
use super::counts::Counts;
use super::machine::Machine;
use super::space::AddressSpace;
use super::streams::Access;
use super::tlb::{Level, Translated, translate};
use super::walker::Walker;
use crate::units::{PageSize, WindowIndex};

/// What may be chosen besides machine and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Another thread of the core uses its half of everything the core's threads share.
    pub is_core_shared: bool,
    /// What random replacement starts from.
    pub seed: u64,
    /// Loads and stores go through the caches, as the entries do that walks read. Without them only translation is followed: faster, nothing is
    /// counted of where data are, and the tables have the caches for themselves.
    pub has_data_lines: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { is_core_shared: false, seed: 1, has_data_lines: true }
    }
}

/// A machine at work on a space.
pub struct Simulator {
    data_first: Level,
    data_second: Option<Level>,
    fetch_first: Level,
    fetch_second: Option<Level>,
    /// Fetches use `data_second`.
    second_is_shared: bool,
    has_data_lines: bool,
    walker: Walker,
    caches: Caches,
    space: AddressSpace,
    counts: Counts,
}

impl Simulator {
    /// One thread that has its core for itself; everything is cold.
    ///
    /// # Panics
    /// A machine whose numbers contradict each other, or more levels of table than it walks, are the caller's mistake.
    pub fn new(machine: &Machine, space: AddressSpace) -> Simulator {
        Simulator::with_options(machine, space, Options::default())
    }

    /// As [`Simulator::new`], with other [`Options`].
    ///
    /// # Panics
    /// As [`Simulator::new`].
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
            has_data_lines: options.has_data_lines,
            walker: Walker::new(machine, is_halved, options.seed + 256),
            caches: Caches::new(machine, is_halved, options.seed + 512),
            space,
            counts: Counts::default(),
        }
    }

    /// A load or a store at an address of the arena.
    ///
    /// # Panics
    /// An address outside the arena is the caller's mistake.
    #[inline]
    pub fn access(&mut self, address: u64, is_write: bool) {
        self.translate(address, is_write);
        self.caches.serve(&mut self.counts);
    }

    /// Finds the page of an access, and leaves references to its line and to the entries that a walk reads with the caches.
    #[inline]
    fn translate(&mut self, address: u64, is_write: bool) {
        self.counts.accesses += 1;
        self.counts.writes += u64::from(is_write);
        let size = self.space.pages(address).entry();
        match translate(&mut self.data_first, self.data_second.as_mut(), address, size, is_write) {
            Translated::FirstLevel => self.counts.tlb_hits[0] += 1,
            Translated::SecondLevel => {
                self.counts.tlb_hits[1] += 1;
                self.counts.cycles_of_tlb += self.data_second.as_ref().map_or(0, |level| level.cycles);
            }
            Translated::Missed(size) => {
                self.counts.misses[size as usize] += 1;
                let second = self.data_second.as_mut();
                self.walker.walk(address, &self.space, second, &mut self.caches, &mut self.counts);
            }
        }
        if self.has_data_lines {
            self.caches.refer(address, Purpose::Data);
        }
    }

    /// As many accesses to one line as `repeats` says, with nothing in between; none if it says none. All but the first
    /// hit the first level of everything.
    #[inline]
    pub fn access_repeated(&mut self, address: u64, is_write: bool, repeats: u32) {
        if repeats == 0 {
            return;
        }
        self.translate_repeated(address, is_write, repeats);
        self.caches.serve(&mut self.counts);
    }

    #[inline]
    fn translate_repeated(&mut self, address: u64, is_write: bool, repeats: u32) {
        self.translate(address, is_write);
        let more = u64::from(repeats - 1);
        self.counts.accesses += more;
        self.counts.writes += more * u64::from(is_write);
        self.counts.tlb_hits[0] += more;
        self.counts.data.caches[0] += more * u64::from(self.has_data_lines);
    }

    /// Many accesses in their order: the same as one [`Simulator::access_repeated`] for each, and faster, because their
    /// lines are looked for together.
    ///
    /// # Panics
    /// An address outside the arena is the caller's mistake.
    pub fn run(&mut self, accesses: impl IntoIterator<Item = Access>) {
        for access in accesses.into_iter().filter(|access| access.repeats > 0) {
            self.translate_repeated(access.address, access.is_write, access.repeats);
            if self.caches.must_serve() {
                self.caches.serve(&mut self.counts);
            }
        }
        self.caches.serve(&mut self.counts);
    }

    /// An instruction fetched from an address of the arena. Its line goes through no cache: only its translation is
    /// followed.
    ///
    /// # Panics
    /// An address outside the arena is the caller's mistake.
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
                self.walker.walk(address, &self.space, second.as_mut(), &mut self.caches, &mut self.counts);
            }
        }
        self.caches.serve(&mut self.counts);
    }

    /// The host backs a window by pages of `size` from now on (see [`AddressSpace::set_host`]), and everything the machine
    /// remembers of this guest's translations goes, as KVM's flush of the guest's TLB does it (SDM vol. 3, 29.4.3.1:
    /// INVEPT; APM vol. 2, 15.16: a new ASID). Lines stay in the caches: the window keeps its address here, though a real
    /// promotion may have copied it to another.
    pub fn remap_host(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_host(window, size);
        self.flush();
    }

    /// The guest maps a window by pages of `size` from now on, with the same loss.
    pub fn remap_guest(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_guest(window, size);
        self.flush();
    }

    /// The host backs a window by pages of `size` that had none before (its first touch): there is nothing to forget.
    pub fn map_host(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_host(window, size);
    }

    /// The guest maps a window that it had not mapped before, likewise.
    pub fn map_guest(&mut self, window: WindowIndex, size: PageSize) {
        self.space.set_guest(window, size);
    }

    /// TLBs, walk caches and the nested TLB forget everything.
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

    /// What is mapped how, now.
    pub fn space(&self) -> &AddressSpace {
        &self.space
    }

    /// What was counted since the beginning or the last [`Simulator::reset_counts`].
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Counts from zero again; everything stays as warm as it is.
    pub fn reset_counts(&mut self) {
        self.counts = Counts::default();
    }
}
