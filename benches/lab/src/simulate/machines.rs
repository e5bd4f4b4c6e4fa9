//! The machines that can be simulated, with the sources of their numbers: `--machine help`.

use serde::Serialize;
use wideleaf::output::Output;
use wideleaf::table::prose_table;
use wideleaf_policies::PageSize;
use wideleaf_run::failure::Failure;
use wideleaf_simulator::machine::{Array, Confidence, Known, Number, TlbLevel};
use wideleaf_simulator::{Machine, machines};

/// List of all machines.
#[derive(Debug, Serialize)]
pub struct MachineList {
    /// Machines, oldest first.
    pub machines: Vec<MachineInfo>,
}

/// Facts about one machine.
#[derive(Debug, Serialize)]
pub struct MachineInfo {
    /// Name for `--machine`.
    pub name: &'static str,
    /// Title of the machine.
    pub title: &'static str,
    /// Source of most numbers.
    pub source: &'static str,
    /// All numbers of the machine.
    pub numbers: Vec<Fact>,
}

/// One number of a machine.
#[derive(Debug, Serialize)]
pub struct Fact {
    /// Meaning of the number.
    pub what: String,
    /// Value, with its shape.
    pub value: String,
    /// Lowest confidence of its parts.
    pub confidence: &'static str,
    /// Source of its size.
    pub source: &'static str,
}

/// Prints or writes the list.
///
/// # Errors
/// [`Failure::Output`] if it could not be written.
pub fn list(output: Output) -> Result<(), Failure> {
    let list = MachineList { machines: machines().iter().map(MachineInfo::of).collect() };
    output.write(&list, MachineList::to_table)
}

impl MachineList {
    /// The list as a table for people.
    pub fn to_table(&self) -> String {
        let mut names = prose_table(&["machine", "what it is", "source"]);
        let mut numbers = prose_table(&["machine", "what", "value", "confidence", "source"]);
        for machine in &self.machines {
            names.add_row([machine.name, machine.title, machine.source]);
            for Fact { what, value, confidence, source } in &machine.numbers {
                numbers.add_row([machine.name, what, value, confidence, source]);
            }
        }
        format!("{names}\n\n{numbers}\n")
    }
}

impl MachineInfo {
    fn of(machine: &Machine) -> MachineInfo {
        let mut numbers = Vec::new();
        for (tlb, levels) in [("data TLB", machine.data_tlb), ("instruction TLB", machine.instruction_tlb)] {
            levels
                .iter()
                .enumerate()
                .for_each(|(n, level)| add_level(&mut numbers, &format!("L{} {tlb}", n + 1), level));
        }
        for cache in machine.walk_caches {
            numbers.push(array(format!("page-walk cache, levels {}", list_of(cache.levels)), &cache.array));
        }
        for cache in machine.host_walk_caches {
            numbers.push(array(format!("page-walk cache of the host, levels {}", list_of(cache.levels)), &cache.array));
        }
        numbers.extend(machine.nested_tlb.iter().map(|nested| array("nested TLB".into(), nested)));
        for (n, cache) in machine.caches.iter().enumerate() {
            numbers.push(array(format!("L{} cache, lines of 64 bytes", n + 1), &cache.array));
            numbers.push(fact(format!("L{} cache, cycles", n + 1), &cache.cycles));
        }
        if machine.second_cache_completes_pairs.value {
            let Known { confidence, source, .. } = machine.second_cache_completes_pairs;
            let what = "L2 cache, lines that a miss brings".to_owned();
            numbers.push(Fact { what, value: "2".to_owned(), confidence: confidence.name(), source });
        }
        numbers.push(fact("cache level that walks read from".into(), &machine.walks_read_from));
        numbers.push(fact("a walk besides its reads, cycles".into(), &machine.walk_cycles));
        numbers.push(fact("memory, cycles".into(), &machine.memory_cycles));
        numbers.push(fact("levels of page tables at most".into(), &machine.levels_max));
        numbers.push(fact("threads of a core".into(), &machine.threads));
        MachineInfo { name: machine.name, title: machine.title, source: machine.source, numbers }
    }
}

fn add_level(numbers: &mut Vec<Fact>, name: &str, level: &TlbLevel) {
    let of = |pages: &[PageSize]| pages.iter().map(|page| page.name()).collect::<Vec<_>>().join(" + ");
    for tlb in level.arrays {
        numbers.push(array(format!("{name}, {}", of(tlb.pages)), &tlb.array));
    }
    for tlb in level.store_arrays {
        numbers.push(array(format!("{name} of stores, {}", of(tlb.pages)), &tlb.array));
    }
    if level.cycles.value > 0 {
        numbers.push(fact(format!("{name}, cycles"), &level.cycles));
    }
}

fn array(what: String, array: &Array) -> Fact {
    let ways = match array.ways.value {
        ways if ways == array.entries.value => "fully associative".to_owned(),
        ways => format!("{ways} ways"),
    };
    let least: Confidence = array.entries.confidence.max(array.ways.confidence).max(array.replacement.confidence);
    Fact {
        what,
        value: format!("{}, {ways}, {:?}", array.entries.value, array.replacement.value),
        confidence: least.name(),
        source: array.entries.source,
    }
}

fn fact(what: String, number: &Number) -> Fact {
    Fact { what, value: number.value.to_string(), confidence: number.confidence.name(), source: number.source }
}

fn list_of(levels: &[u8]) -> String {
    levels.iter().map(u8::to_string).collect::<Vec<_>>().join(", ")
}
