//! The counts of each machine are those of `data/counts.csv`, each to the last one: a faster simulator is the same one.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::gib;
use wideleaf_simulator::counts::Served;
use wideleaf_simulator::streams::{Access, Sparse, gups};
use wideleaf_simulator::{AddressSpace, Counts, Paging, Simulator, machines};

const KEPT: &str = include_str!("../data/counts.csv");

/// Pages of the process, or of the guest over those of the host, and their space.
fn spaces() -> [(&'static str, AddressSpace); 4] {
    let nested = |guest, host| AddressSpace::nested(gib(1), guest, host, Paging::FOUR_LEVELS);
    let (base, huge) = (PageSize::Base4K, PageSize::Huge2M);
    [
        ("4k", AddressSpace::native(gib(1), base)),
        ("4k/4k", nested(base, base)),
        ("2m/4k", nested(huge, base)),
        ("4k/2m", nested(base, huge)),
    ]
}

/// Words anywhere, a matrix in rows, words that most levels hold, and words anywhere again.
fn accesses() -> impl Iterator<Item = Access> {
    let far = || gups(gib(1).get() / 8, 3).take(20_000);
    let rows = Sparse { rows: 2_000, row_entries: 20 }.multiply(5).take(20_000);
    let near = gups(1 << 16, 7).take(10_000);
    far().chain(rows).chain(near).chain(far())
}

/// The counts, in the order of the file's columns.
fn numbers(counts: &Counts) -> [u64; 13] {
    let Counts { guest, host_of_tables, host_of_data, data, .. } = counts;
    let read =
        |at: fn(&Served) -> u64| [guest, host_of_tables, host_of_data].map(|part| at(&part.read)).iter().sum::<u64>();
    [
        counts.tlb_hits[0],
        counts.tlb_hits[1],
        counts.walks(),
        read(|served| served.caches[0]),
        read(|served| served.caches[1]),
        read(|served| served.caches[2]),
        read(|served| served.memory),
        data.caches[0],
        data.caches[1],
        data.caches[2],
        data.memory,
        counts.cycles_of_walks,
        counts.cycles_of_host,
    ]
}

#[test]
fn every_machine_counts_what_it_counted_when_the_file_was_made() {
    let mut kept = KEPT.lines().skip(1);
    for machine in machines() {
        for (pages, space) in spaces() {
            let mut simulator = Simulator::new(machine, space);
            simulator.run(accesses());
            let numbers = numbers(simulator.counts()).map(|number| number.to_string());
            let row = format!("{},{pages},{}", machine.name, numbers.join(","));
            // After a change of a machine or of the model, and only then, the new row belongs there.
            assert_eq!(kept.next(), Some(row.as_str()));
        }
    }
    assert_eq!(kept.next(), None);
}
