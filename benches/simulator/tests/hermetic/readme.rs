//! The table of page walks in README.md, against the simulator: a change of a machine or of the simulator that changes
//! a number there fails here.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::{Bytes, gib};
use wideleaf_simulator::streams::gups;
use wideleaf_simulator::{AddressSpace, Paging, Simulator, machine};

const README: &str = include_str!("../../../../README.md");
const HEADING: &str = "\n## What a page walk costs in a guest\n";
const TABLE: Bytes = gib(64);
/// Touches that warm the caches, and those that count: fewer than the command under the table makes, for the same
/// result within one part in a hundred.
const WARMING: usize = 400_000;
const COUNTED: usize = 250_000;

fn page(text: &str) -> Option<PageSize> {
    match text {
        "4 KiB" => Some(PageSize::Base4K),
        "2 MiB" => Some(PageSize::Huge2M),
        "1 GiB" => Some(PageSize::Giant1G),
        _ => None,
    }
}

/// Pages of the host in a column; the inner `None` is a process, the outer one another column.
fn host(heading: &str) -> Option<Option<PageSize>> {
    match heading.strip_prefix("host ") {
        Some(size) => page(size).map(Some),
        None => (heading == "process").then_some(None),
    }
}

fn cells(line: &str) -> Vec<&str> {
    line.trim_matches('|').split('|').map(str::trim).collect()
}

/// Cycles of walks of a touch.
fn cycles(page: PageSize, host: Option<PageSize>) -> f64 {
    let space = match host {
        None => AddressSpace::native(TABLE, page),
        Some(host) => AddressSpace::nested(TABLE, page, host, Paging::FOUR_LEVELS),
    };
    let mut simulator = Simulator::new(machine("skylake-sp").unwrap(), space);
    let mut touches = gups(TABLE.get() / 8, 1);
    simulator.run(touches.by_ref().take(WARMING));
    simulator.reset_counts();
    simulator.run(touches.take(COUNTED));
    simulator.counts().cycles_of_walks as f64 / COUNTED as f64
}

#[test]
fn the_readmes_cycles_of_walks_are_those_of_the_simulator() {
    let section = README.split_once(HEADING).unwrap().1;
    let section = section.split("\n## ").next().unwrap();
    let mut rows = section.lines().filter(|line| line.starts_with('|')).map(cells);
    let hosts: Vec<_> = rows.next().unwrap().into_iter().map(host).collect();
    let mut compared = 0;
    for row in rows {
        let Some(guest) = page(row[0]) else { continue };
        for (cell, host) in row.iter().zip(&hosts).skip(1) {
            let number = cell.split(' ').next().and_then(|number| number.parse::<f64>().ok());
            let (Some(told), Some(host)) = (number, host) else { continue };
            let ours = cycles(guest, *host);
            println!("{guest}, host {host:?}: {ours:.1}, told {told}");
            // Half a cycle is rounding.
            assert!((ours - told).abs() <= 0.5 + told / 100.0, "{guest}, host {host:?}: {ours:.1}, told {told}");
            compared += 1;
        }
    }
    assert!(compared >= 8, "{compared} numbers");
}
