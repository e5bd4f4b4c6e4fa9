//! The caches that table and data lines share, down to memory.
//!
//! ```text
//!   data ──▶ L1 ──miss──▶ L2 ──miss──▶ L3 ──miss──▶ memory       a level that is filled by victims takes what the level
//!             └─evicted──▶ └─evicted──▶                          above evicts, and gives up what it is hit for
//!   walk ──▶ L1, or L2 where the walker does not read through L1
//! ```

use alloc::vec::Vec;

use super::machine::{Fill, Machine};
use super::sets::{Found, Sets};

/// Caches a machine may have.
const LEVELS_MAX: usize = 3;

pub(crate) struct Caches {
    levels: Vec<Level>,
    has_victims: bool,
    /// Cycles by level, then of memory behind the last.
    cycles: [u64; LEVELS_MAX + 1],
}

struct Level {
    sets: Sets,
    takes_victims: bool,
}

/// Where a line was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a cache, counted from 0.
    Cache(usize),
    Memory,
}

impl Caches {
    pub(crate) fn new(machine: &Machine, is_shared: bool, seed: u64) -> Caches {
        assert!(machine.caches.len() <= LEVELS_MAX, "{} has {} caches", machine.name, machine.caches.len());
        let last = machine.caches.len() - 1;
        let levels: Vec<Level> = (machine.caches.iter().enumerate())
            .map(|(n, cache)| Level {
                sets: Sets::new(&cache.array, is_shared && (n < last || last == 0), seed + n as u64),
                takes_victims: cache.fill.value == Fill::Victims,
            })
            .collect();
        let mut cycles = [u64::from(machine.memory_cycles.value); LEVELS_MAX + 1];
        for (cycles, cache) in cycles.iter_mut().zip(machine.caches) {
            *cycles = u64::from(cache.cycles.value);
        }
        Caches { has_victims: levels.iter().any(|level| level.takes_victims), levels, cycles }
    }

    /// Reads the line of `address`, from cache `first` (0 is L1) on.
    #[inline]
    pub(crate) fn read(&mut self, address: u64, first: usize) -> Place {
        let line = address >> 6;
        if self.levels[first].sets.is_newest(line) {
            return Place::Cache(first);
        }
        if self.has_victims { self.read_with_victims(line, first) } else { self.read_through(line, first) }
    }

    /// Reads the last level's set of an address for nothing (see [`Sets::touch`]); the others are small.
    #[inline]
    pub(crate) fn touch(&self, address: u64) {
        if let Some(last) = self.levels.last() {
            last.sets.touch(address >> 6);
        }
    }

    /// Cycles from load to use.
    pub(crate) fn cycles(&self, place: Place) -> u64 {
        match place {
            Place::Cache(level) => self.cycles[level],
            Place::Memory => self.cycles[LEVELS_MAX],
        }
    }

    fn read_through(&mut self, line: u64, first: usize) -> Place {
        for (n, level) in self.levels.iter_mut().enumerate().skip(first) {
            if level.sets.access(line) == Found::Hit {
                return Place::Cache(n);
            }
        }
        Place::Memory
    }

    fn read_with_victims(&mut self, line: u64, first: usize) -> Place {
        let (mut place, mut victim) = (Place::Memory, None);
        for (n, level) in self.levels.iter_mut().enumerate().skip(first) {
            let is_sought = place == Place::Memory;
            let is_hit;
            if level.takes_victims && n > first {
                is_hit = is_sought && level.sets.take(line);
                victim = victim.and_then(|victim| match level.sets.access(victim) {
                    Found::Hit => None,
                    Found::Miss { evicted } => evicted,
                });
            } else if is_sought {
                let found = level.sets.access(line);
                is_hit = found == Found::Hit;
                victim = match found {
                    Found::Miss { evicted } => evicted,
                    // What the level above dropped is in this one, or was.
                    Found::Hit => None,
                };
            } else {
                break;
            }
            if is_hit {
                place = Place::Cache(n);
            }
            if place != Place::Memory && victim.is_none() {
                break;
            }
        }
        place
    }
}
