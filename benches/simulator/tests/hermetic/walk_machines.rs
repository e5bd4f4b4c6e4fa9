//! The machines agree with `data/tlb_geometry.csv`, and every number has a source.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::gib;
use wideleaf_simulator::machine::{Array, Confidence, TlbLevel};
use wideleaf_simulator::simulator::Options;
use wideleaf_simulator::{AddressSpace, Machine, Paging, Simulator, machine, machines};

/// The names of the machines, in the order of the file's rows.
const ROWS: [&str; 15] = [
    "k8",
    "openmp-opteron",
    "openmp-xeon",
    "nocona",
    "yonah",
    "madison",
    "a64fx",
    "haswell-ep",
    "skylake-sp",
    "ice-lake-sp",
    "sapphire-rapids",
    "granite-rapids",
    "zen2",
    "zen3",
    "zen4",
];

/// Number of entries in a level that loads of a page of `size` may use.
fn entries(level: Option<&TlbLevel>, size: PageSize) -> u32 {
    let arrays = level.map_or(&[] as &[_], |level| level.arrays);
    arrays.iter().filter(|array| array.pages.contains(&size)).map(|array| array.array.entries.value).sum()
}

#[test]
fn entries_are_those_of_the_table() {
    let lines: Vec<&str> = include_str!("../data/tlb_geometry.csv").lines().skip(1).collect();
    assert_eq!(lines.len(), ROWS.len());
    for (line, name) in lines.iter().zip(ROWS) {
        let cells = after_first_cell(line).split(',').take(6);
        let of_table: Vec<u32> = cells.map(|cell| cell.parse().expect("a count")).collect();
        let machine = machine(name).expect("a machine of the table");
        let levels = [machine.data_tlb.first(), machine.data_tlb.get(1)];
        let of_machine: Vec<u32> =
            levels.into_iter().flat_map(|level| PageSize::ALL.map(|size| entries(level, size))).collect();
        // IA-64's first level holds 2 MiB pages in pieces of 4 KiB, which the table counts for both.
        let is_nominal = name == "madison";
        let same =
            of_machine.iter().zip(&of_table).enumerate().all(|(n, (a, b))| a == b || (is_nominal && n != 0 && n != 3));
        assert!(same, "{name}: {of_machine:?}, the table says {of_table:?}");
    }
}

/// The line after its first cell, which may be quoted and contain commas and doubled quotes.
fn after_first_cell(line: &str) -> &str {
    let Some(mut rest) = line.strip_prefix('"') else {
        return line.split_once(',').expect("two cells").1;
    };
    loop {
        let (_, after) = rest.split_once('"').expect("a closing quote");
        match after.strip_prefix('"') {
            Some(more) => rest = more,
            None => return after.trim_start_matches(','),
        }
    }
}

fn arrays(machine: &Machine) -> Vec<Array> {
    let tlbs = machine.data_tlb.iter().chain(machine.instruction_tlb);
    let tlbs = tlbs.flat_map(|level| level.arrays.iter().chain(level.store_arrays).map(|array| array.array));
    let walks = machine.walk_caches.iter().chain(machine.host_walk_caches).map(|cache| cache.array);
    tlbs.chain(walks).chain(machine.nested_tlb).chain(machine.caches.iter().map(|cache| cache.array)).collect()
}

#[test]
fn every_number_has_a_source_and_doubtful_ones_are_marked() {
    for machine in machines() {
        for array in arrays(machine) {
            for source in [array.entries.source, array.ways.source, array.replacement.source] {
                assert!(!source.is_empty(), "{} has a number without a source", machine.name);
            }
        }
    }
    let confidence = |name| entries_confidence(machine(name).expect("a machine"));
    assert_eq!(confidence("k8"), Confidence::High);
    assert_eq!(confidence("openmp-xeon"), Confidence::Doubtful);
    assert_eq!(confidence("sapphire-rapids"), Confidence::Doubtful);
    assert_eq!(confidence("a64fx"), Confidence::Unverified);
}

fn entries_confidence(machine: &Machine) -> Confidence {
    machine.data_tlb[0].arrays[0].array.entries.confidence
}

#[test]
fn names_are_unique() {
    let mut names: Vec<&str> = machines().iter().map(|machine| machine.name).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!([names.len(), all], [16, 16]);
}

/// Misses of the third round over `pages` pages, one access each.
fn misses_of_a_round(machine: &Machine, pages: u64, options: Options) -> u64 {
    let space = AddressSpace::nested(gib(1), PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
    let mut simulator = Simulator::with_options(machine, space, options);
    for round in 0..3 {
        if round == 2 {
            simulator.reset_counts();
        }
        (0..pages).for_each(|page| simulator.access(page * 4096, false));
    }
    simulator.counts().data_misses()
}

#[test]
fn every_machine_holds_the_pages_of_its_larger_level_and_half_of_them_on_a_shared_core() {
    for machine in machines() {
        let reach = machine.data_tlb.iter().map(|level| entries(Some(level), PageSize::Base4K)).max().expect("a level");
        let (alone, shared) = (Options::default(), Options { is_core_shared: true, ..Options::default() });
        let pages = u64::from(reach);
        // One way of each set is left for the PDEs, which some second levels also hold.
        let fitting = pages - pages / 4;
        assert_eq!(misses_of_a_round(machine, fitting, alone), 0, "{}", machine.name);
        assert!(misses_of_a_round(machine, 2 * pages, alone) > pages, "{}", machine.name);
        assert_eq!(misses_of_a_round(machine, fitting / 2, shared), 0, "{}", machine.name);
        assert!(misses_of_a_round(machine, pages, shared) > pages / 2, "{}", machine.name);
    }
}

#[test]
fn the_second_level_of_madison_holds_whole_pages_of_2_mib() {
    let misses = |machine: &Machine, windows: u64| {
        let mut simulator = Simulator::new(machine, AddressSpace::native(gib(1), PageSize::Huge2M));
        for round in 0..3 {
            if round == 2 {
                simulator.reset_counts();
            }
            (0..windows * 512).for_each(|page| simulator.access(page * 4096, false));
        }
        simulator.counts().misses
    };
    let madison = machine("madison").expect("a machine");
    assert_eq!([misses(madison, 128), misses(madison, 129)], [[0; 3], [0, 129, 0]]);
}

#[test]
fn accesses_give_the_same_counts_one_by_one_and_all_at_once() {
    use wideleaf_simulator::streams::{Access, gups};
    for machine in machines() {
        let accesses: Vec<Access> =
            gups(1 << 24, 7).take(5_000).map(|access| Access { repeats: 2, ..access }).collect();
        let simulator = || {
            let space = AddressSpace::nested(gib(1), PageSize::Huge2M, PageSize::Base4K, Paging::FOUR_LEVELS);
            Simulator::new(machine, space)
        };
        let (mut at_once, mut one_by_one) = (simulator(), simulator());
        at_once.run(accesses.iter().copied());
        for access in &accesses {
            one_by_one.access(access.address, access.is_write);
            one_by_one.access(access.address, access.is_write);
        }
        assert_eq!(at_once.counts(), one_by_one.counts(), "{}", machine.name);
        assert_eq!(at_once.counts().accesses, 10_000);
    }
}

#[test]
fn with_fewer_lines_translation_is_the_same() {
    use wideleaf_simulator::counts::References;
    use wideleaf_simulator::simulator::Lines;
    use wideleaf_simulator::streams::{Access, gups};
    for machine in machines() {
        let counts = |lines| {
            let space = AddressSpace::nested(gib(1), PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
            let options = Options { lines, ..Options::default() };
            let mut simulator = Simulator::with_options(machine, space, options);
            simulator.run(gups(1 << 24, 7).take(50_000).map(|access| Access { repeats: 2, ..access }));
            simulator.counts().clone()
        };
        let (with, without) = (counts(Lines::All), counts(Lines::OfTables));
        assert_eq!((with.accesses, with.tlb_hits, with.misses), (without.accesses, without.tlb_hits, without.misses));
        assert_eq!(with.references(), without.references(), "{}", machine.name);
        assert_eq!((with.data.total(), without.data.total()), (100_000, 0), "{}", machine.name);
        assert!(without.cycles_of_walks < with.cycles_of_walks, "{}", machine.name);

        let alone = counts(Lines::None);
        assert_eq!((with.accesses, with.tlb_hits, with.misses), (alone.accesses, alone.tlb_hits, alone.misses));
        for (all, none) in [
            (&with.guest, &alone.guest),
            (&with.host_of_tables, &alone.host_of_tables),
            (&with.host_of_data, &alone.host_of_data),
        ] {
            let skipped = |part: &References| (part.skipped_by_walk_cache, part.skipped_by_nested_tlb);
            assert_eq!((all.read.total(), skipped(all)), (none.read.unplaced, skipped(none)), "{}", machine.name);
            assert_eq!(none.read.total(), none.read.unplaced, "{}", machine.name);
        }
        assert_eq!((alone.data.total(), alone.cycles_of_walks), (0, 0));
        assert_eq!(alone.cycles_of_tlb, with.cycles_of_tlb);
    }
}

#[test]
fn promotion_by_the_host_drops_translations_and_widens_entries() {
    use wideleaf_policies::WindowIndex;
    let machine = machine("skylake-sp").expect("a machine");
    let space = AddressSpace::nested(gib(1), PageSize::Huge2M, PageSize::Base4K, Paging::FOUR_LEVELS);
    let mut simulator = Simulator::new(machine, space);
    let window = |simulator: &mut Simulator| {
        simulator.reset_counts();
        (0..512).for_each(|page| simulator.access(page * 4096, false));
        simulator.counts().data_misses()
    };
    assert_eq!([window(&mut simulator), window(&mut simulator)], [512, 0]);
    simulator.remap_host(WindowIndex::new(0), PageSize::Huge2M);
    assert_eq!(simulator.counts().flushes, 1);
    assert_eq!([window(&mut simulator), window(&mut simulator)], [1, 0]);
}

#[test]
fn a_smaller_page_within_a_giant_leaves_the_rest_of_it_at_2_mib() {
    use wideleaf_policies::WindowIndex;
    let mut space = AddressSpace::nested(gib(2), PageSize::Base4K, PageSize::Giant1G, Paging::FOUR_LEVELS);
    space.set_host(WindowIndex::new(3), PageSize::Base4K);
    let sizes = [0, 3, 511, 512].map(|window| space.host(WindowIndex::new(window)));
    assert_eq!(sizes, [PageSize::Huge2M, PageSize::Base4K, PageSize::Huge2M, PageSize::Giant1G]);
}

#[test]
fn fetches_use_a_second_level_they_share_with_data() {
    let machine = machine("skylake-sp").expect("a machine");
    let space = AddressSpace::nested(gib(1), PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
    let mut simulator = Simulator::new(machine, space);
    simulator.access(0, false);
    simulator.fetch(64);
    simulator.fetch(128);
    let counts = simulator.counts();
    assert_eq!([counts.fetch_tlb_hits, [counts.fetches, counts.walks()]], [[1, 1], [2, 1]]);
}

/// Loads 64 bytes apart, each once: the second line of a pair is there when it is loaded, and counts once.
#[test]
fn the_second_line_of_a_pair_comes_with_the_first() {
    use wideleaf_simulator::machine::high;
    use wideleaf_simulator::streams::strided;
    let with = *machine("skylake-sp").expect("a machine");
    let without = Machine { second_cache_completes_pairs: high(false, "made for this test"), ..with };
    let data = |machine: &Machine, stride| {
        let space = AddressSpace::native(gib(1), PageSize::Huge2M);
        let mut simulator = Simulator::new(machine, space);
        simulator.run(strided(gib(1).get(), stride).take(10_000));
        simulator.counts().data
    };
    assert_eq!((data(&with, 64).caches, data(&with, 64).memory), ([0, 5_000, 0], 5_000));
    assert_eq!((data(&without, 64).caches, data(&without, 64).memory), ([0, 0, 0], 10_000));
    assert_eq!(data(&with, 128).memory, 10_000);
}

#[test]
fn a_walk_costs_its_reads_and_its_start() {
    use wideleaf_simulator::machine::high;
    use wideleaf_simulator::streams::gups;
    let machine = *machine("skylake-sp").expect("a machine");
    let counts = |cycles| {
        let machine = Machine { walk_cycles: high(cycles, "made for this test"), ..machine };
        let space = AddressSpace::nested(gib(1), PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
        let mut simulator = Simulator::new(&machine, space);
        simulator.run(gups(1 << 24, 7).take(10_000));
        simulator.counts().clone()
    };
    let (none, ten) = (counts(0), counts(10));
    assert_eq!(ten.cycles_of_walks, none.cycles_of_walks + 10 * none.walks());
    assert_eq!(ten.cycles_of_host, none.cycles_of_host);
    assert!(0 < none.cycles_of_host && none.cycles_of_host < none.cycles_of_walks);
}
