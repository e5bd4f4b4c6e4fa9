//! Walks over tables on another NUMA node. vMitosis (ASPLOS '21) states that a remote host table and a remote guest
//! table each cost about one more remote reference a walk. Its artifact has the counters of a Cascade Lake for that.
//!
//! ```text
//!   guest tables   host tables       remote references a walk      cycles of walks a touch, more than local
//!   local          local             0                             -
//!   local          remote            about 1                       179 of counters
//!   remote         local             about 1                       186
//!   remote         remote            about 2                       348
//! ```

use wideleaf_policies::PageSize::{Base4K, Huge2M};
use wideleaf_policies::units::{Bytes, gib};
use wideleaf_simulator::simulator::{Distances, Options};
use wideleaf_simulator::streams::gups;
use wideleaf_simulator::{AddressSpace, Paging, Simulator, machine};

/// Rows of the counters with tables on another node, all of 4 KiB pages: dimensions, their name, and whether the
/// guest's and the host's tables are there. A shadow table counts as the guest's.
const REMOTE: [(&str, &str, [bool; 2]); 4] = [
    ("1", "remote", [true, false]),
    ("2", "host remote", [false, true]),
    ("2", "guest remote", [true, false]),
    ("2", "remote", [true, true]),
];

const TABLE: Bytes = gib(64);
const WARMING: usize = 400_000;
const COUNTED: usize = 250_000;

/// What was counted, by touch or by walk.
#[derive(Clone, Copy, Debug)]
struct Walks {
    cycles_per_touch: f64,
    /// Those in tables of the host.
    host_cycles_per_touch: f64,
    remote_per_walk: f64,
    remote_data_per_touch: f64,
}

fn walks(distances: Distances, page: wideleaf_policies::PageSize) -> Walks {
    walks_in(AddressSpace::nested(TABLE, page, page, Paging::FOUR_LEVELS), distances)
}

fn walks_in(space: AddressSpace, distances: Distances) -> Walks {
    let machine = machine("skylake-sp").unwrap();
    let options = Options { distances, ..Options::default() };
    let mut simulator = Simulator::with_options(machine, space, options);
    let mut touches = gups(TABLE.get() / 8, 1);
    simulator.run(touches.by_ref().take(WARMING));
    simulator.reset_counts();
    simulator.run(touches.take(COUNTED));
    let counts = simulator.counts();
    Walks {
        cycles_per_touch: counts.cycles_of_walks as f64 / COUNTED as f64,
        host_cycles_per_touch: counts.cycles_of_host as f64 / COUNTED as f64,
        remote_per_walk: counts.remote_references as f64 / counts.walks() as f64,
        remote_data_per_touch: counts.remote_data as f64 / COUNTED as f64,
    }
}

fn remote(guest: bool, host: bool, data: bool) -> Distances {
    let distance = |is_remote| if is_remote { Distances::OTHER_SOCKET } else { Distances::LOCAL };
    Distances { guest_tables: distance(guest), host_tables: distance(host), data: distance(data) }
}

/// Cycles of walks a touch by the counters, for 4 KiB pages with tables there: all of them, and those of EPT.
fn published(dimensions: &str, tables: &str) -> (f64, f64) {
    let lines = include_str!("../../../data/published/vmitosis_gups.csv").lines().skip(1);
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    let row = rows.iter().find(|row| row[0] == "4K" && row[2] == dimensions && row[3] == tables).unwrap();
    let [load, store, ept] = [6, 7, 8].map(|column| row[column].parse::<f64>().unwrap());
    (load + store + ept, ept)
}

/// The same by the simulator.
fn simulated(dimensions: &str, [guest, host]: [bool; 2]) -> (f64, f64) {
    let space = match dimensions {
        "1" => AddressSpace::native(TABLE, Base4K),
        _ => AddressSpace::nested(TABLE, Base4K, Base4K, Paging::FOUR_LEVELS),
    };
    let walks = walks_in(space, remote(guest, host, false));
    (walks.cycles_per_touch, walks.host_cycles_per_touch)
}

/// The bars are those of `walk_nested.rs`: a quarter for cycles, a tenth for ratios, 0.05 for shares.
#[test]
fn walks_over_remote_tables_cost_what_the_counters_of_a_cascade_lake_say() {
    let local = |dimensions| (simulated(dimensions, [false; 2]), published(dimensions, "local"));
    let [shadow, nested] = ["1", "2"].map(local);
    let mut missed = Vec::new();
    let mut compare = |name: String, ours: f64, theirs: f64, is_within: bool| {
        println!("{name}: simulated {ours:.3}, measured {theirs:.3}, {:+.1} %", 100.0 * (ours / theirs - 1.0));
        if !is_within {
            missed.push(name);
        }
    };
    let mut all = Vec::new();
    for (dimensions, tables, is_remote) in REMOTE {
        let (ours, theirs) = (simulated(dimensions, is_remote), published(dimensions, tables));
        let (our_local, their_local) = if dimensions == "1" { shadow } else { nested };
        let name = |what: &str| format!("{dimensions}-D, {tables}: {what}");
        let near = |ours: f64, theirs: f64, within: f64| (ours / theirs - 1.0).abs() <= within;
        compare(name("cycles"), ours.0, theirs.0, near(ours.0, theirs.0, 0.25));
        let of_local = (ours.0 / our_local.0, theirs.0 / their_local.0);
        compare(name("to local"), of_local.0, of_local.1, near(of_local.0, of_local.1, 0.1));
        let shares = (ours.1 / ours.0, theirs.1 / theirs.0);
        if dimensions == "2" {
            compare(name("share of EPT"), shares.0, shares.1, (shares.0 - shares.1).abs() <= 0.05);
        }
        all.push((ours.0, theirs.0));
    }
    // Both tables on the other node, in two dimensions and in one.
    let [ours, theirs] = [all[3].0 / all[0].0, all[3].1 / all[0].1];
    compare("2-D : 1-D, remote".into(), ours, theirs, (ours / theirs - 1.0).abs() <= 0.1);
    assert!(missed.is_empty(), "too far from the counters: {missed:?}");
}

#[test]
fn a_remote_guest_table_and_a_remote_host_table_each_cost_about_one_remote_reference_a_walk() {
    let of = |guest, host| walks(remote(guest, host, false), Base4K).remote_per_walk;
    let [none, guest, host, both] = [of(false, false), of(true, false), of(false, true), of(true, true)];
    println!("remote references a walk: guest tables {guest:.2}, host tables {host:.2}, both {both:.2}");
    assert!(none == 0.0 && (0.75..1.25).contains(&guest) && (0.75..1.25).contains(&host));
    assert!((both - guest - host).abs() < 0.01);
}

#[test]
fn the_cycles_that_remote_tables_add_are_near_those_of_the_counters() {
    let cycles = |guest, host| walks(remote(guest, host, false), Base4K).cycles_per_touch;
    let local = cycles(false, false);
    for (tables, guest, host) in [("guest remote", true, false), ("host remote", false, true), ("remote", true, true)] {
        let (ours, theirs) = (cycles(guest, host) - local, published("2", tables).0 - published("2", "local").0);
        println!("{tables}: simulated {ours:.0} cycles more a touch, measured {theirs:.0}");
        assert!((ours / theirs - 1.0).abs() < 0.25, "{tables}: {ours:.0} and {theirs:.0}");
    }
}

#[test]
fn walks_of_huge_pages_pay_less_for_remote_tables_and_remote_data_is_no_cost_of_walks() {
    let (local, tables) = (walks(remote(false, false, false), Huge2M), walks(remote(true, true, false), Huge2M));
    let added = |page| {
        walks(remote(true, true, false), page).cycles_per_touch
            - walks(remote(false, false, false), page).cycles_per_touch
    };
    assert!(10.0 * added(Huge2M) < added(Base4K), "entries of huge pages are few and stay in caches");
    assert!(tables.remote_per_walk < 0.1, "{tables:?}");
    let data = walks(remote(false, false, true), Huge2M);
    assert_eq!(data.cycles_per_touch, local.cycles_per_touch);
    assert!((0.9..=1.1).contains(&data.remote_data_per_touch), "{data:?}");
}
