//! Simulates a machine's TLB and caches on the accesses of a kernel, recorded while it runs or generated. Nothing
//! is kept on disk.
//!
//! ```text
//!   kernel, n iterations     ── recorder ── trace ── pipe ──▶ simulator ──▶ counts of n
//!   kernel, n + 1 iterations ── recorder ── trace ── pipe ──▶ simulator ──▶ counts of n + 1
//!                     counts of n, and the difference for each other iteration of the class ──▶ a whole run
//! ```

use std::io::{BufWriter, Read};
use std::time::{Duration, Instant};

use crate::simulate::scaled::{PROGRAMS, Scaled};
use crate::simulate::source::Source;
use wideleaf_experiments::definition::{Accesses, COUNTED_ACCESSES, COUNTED_MISSES, DATA_CYCLES, TRANSLATION_CYCLES};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::{Evidence, Measured};
use wideleaf_kernels::registry::by_name;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_recorder::{RecordError, Request, record};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_simulator::machine::{Replacement, TlbArray};
use wideleaf_simulator::simulator::Options;
use wideleaf_simulator::streams::Access;
use wideleaf_simulator::{AddressSpace, Counts, Machine, Paging, Simulator, machine};
use wideleaf_trace::TraceReader;

/// Variant of a machine: half of a core's entries, beside another thread.
const HALF_A_CORE: &str = "smt";

/// A machine, and its page size.
#[derive(Debug)]
pub(super) struct Place {
    machine: &'static Machine,
    page: PageSize,
    /// Host page under a guest; `None` for a process.
    host_page: Option<PageSize>,
    /// Pages are 2^`shift` times as large as `page`: addresses are divided by that, so that page numbers and tables
    /// are those of the larger pages. Data lines are not: 2^`shift` of them coincide.
    shift: u32,
    /// Whether another thread uses half of the core's entries.
    is_core_shared: bool,
}

impl Place {
    /// Parses the names that a definition uses.
    pub(super) fn parse(name: &str, page: &str, host_page: Option<&str>) -> Result<Place, Failure> {
        let (model, rule) = name.split_once(':').map_or((name, None), |(model, rule)| (model, Some(rule)));
        let machine = machine(model).ok_or_else(|| {
            Failure::Input(format!(
                "cannot simulate {name:?}: there is no such machine; see `wideleaf-lab simulate --machine help`"
            ))
        })?;
        let machine = match rule {
            None => machine,
            Some("tree-plru") => replacing(machine, Replacement::TreePlru),
            Some("random") => replacing(machine, Replacement::Random),
            Some(HALF_A_CORE) if machine.threads.value == 1 => {
                let why = format!("a core of {model} has one thread; leave out :{HALF_A_CORE}");
                return Err(Failure::Input(format!("cannot simulate {name:?}: {why}")));
            }
            Some(HALF_A_CORE) => machine,
            Some(_) => {
                return Err(Failure::Input(format!(
                    "cannot simulate {name:?}: no such variant; use :tree-plru, :random or :{HALF_A_CORE}"
                )));
            }
        };
        let size = |page: &str| {
            PageSize::parse(page).map_err(|why| Failure::Input(format!("cannot simulate pages of {page:?}: {why}")))
        };
        let (page, shift) = match page {
            "64k" => (PageSize::Base4K, 4),
            other => (size(other)?, 0),
        };
        let host_page = host_page.map(size).transpose()?;
        Ok(Place { machine, page, host_page, shift, is_core_shared: rule == Some(HALF_A_CORE) })
    }
}

impl Place {
    /// Memory of a process, or of a guest with tables of four levels on both sides.
    fn space(&self, bytes: Bytes) -> AddressSpace {
        match self.host_page {
            None => AddressSpace::native(bytes, self.page),
            Some(host) => AddressSpace::nested(bytes, self.page, host, Paging::FOUR_LEVELS),
        }
    }

    fn simulator(&self, bytes: Bytes) -> Simulator {
        let options = Options { is_core_shared: self.is_core_shared, ..Options::default() };
        Simulator::with_options(self.machine, self.space(bytes), options)
    }

    fn note(&self) -> String {
        let part = if self.is_core_shared { ", half of a core" } else { "" };
        format!("simulated: {}{part}; a model, the same on any machine", self.machine.title)
    }
}

/// The machine with another replacement rule for the entries of its first TLB level that hold only 2 MiB pages. It
/// lives as long as the program, like the machines of the table.
fn replacing(machine: &'static Machine, rule: Replacement) -> &'static Machine {
    let changed = |mut of: TlbArray| {
        if of.pages == [PageSize::Huge2M] {
            of.array.replacement.value = rule;
        }
        of
    };
    let mut levels = machine.data_tlb.to_vec();
    if let Some(first) = levels.first_mut() {
        let arrays: Vec<TlbArray> = first.arrays.iter().copied().map(changed).collect();
        first.arrays = arrays.leak();
    }
    Box::leak(Box::new(Machine { data_tlb: levels.leak(), ..*machine }))
}

/// Simulates the whole run; a simulation that takes longer than `timeout` is stopped.
pub(super) fn run(
    accesses: &Accesses,
    place: &Place,
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    let began = Instant::now();
    let is_over = || interrupts.is_set() || began.elapsed() > timeout;
    let measured = match accesses {
        Accesses::Recorded { kernel, parameters, iterations, threads } => {
            let sums = recorded(kernel, parameters, *iterations, *threads as usize, place, &is_over);
            sums.map(|sums| sums.measured(place))
        }
        Accesses::Generated { stream, scale } => {
            generated(stream, *scale, place, &is_over).map(|sums| sums.measured(place))
        }
        Accesses::Scaled { program, footprint_gib } => {
            let footprint = Bytes::new(footprint_gib << 30);
            scaled(program, footprint, place, &is_over).map(|rates| rates.measured(place))
        }
    };
    interrupts.check()?;
    // A run that was stopped at its timeout reports an interrupt.
    match measured {
        Err(Failure::Interrupted) => Err(Failure::took_longer_than(timeout, "the simulation")),
        other => other,
    }
}

/// Simulates a whole run. If only the first iterations are recorded, they are recorded again with one more: each of the
/// others counts like that one. So the counts of what happens once, also in the timed part, are not multiplied.
fn recorded(
    kernel: &str,
    parameters: &str,
    iterations: Option<u32>,
    threads: usize,
    place: &Place,
    is_over: &dyn Fn() -> bool,
) -> Result<Sums, Failure> {
    let known =
        by_name(kernel).ok_or_else(|| Failure::Input(format!("cannot record {kernel:?}: there is no such kernel")))?;
    let part = |iterations| {
        let request = Request { kernel: known, parameters, threads, iterations, phase: None, bytes_max: None };
        recorded_part(&request, place, is_over)
    };
    let first = part(iterations)?;
    let (Some(iterations), true) = (iterations, first.left > 0) else { return Ok(first) };
    Ok(first.extrapolated(&part(Some(iterations + 1))?))
}

/// Records in another process and simulates at the same time.
fn recorded_part(request: &Request<'_>, place: &Place, is_over: &dyn Fn() -> bool) -> Result<Sums, Failure> {
    let cannot = |error: &dyn std::fmt::Display| format!("cannot record {}: {error}", request.kernel.name);
    let (reader, writer) = std::io::pipe().map_err(|error| Failure::Host(cannot(&error)))?;
    std::thread::scope(|scope| {
        let simulator = scope.spawn(move || of_trace(reader, place));
        // The writer is dropped: the pipe ends with the recording, and the simulator with the pipe.
        let recorded = record(request, BufWriter::new(writer), &mut |_| !is_over()).map(drop);
        // If the simulator ended first, its error is the cause.
        let sums = simulator.join().expect("the simulator does not panic");
        match recorded {
            Err(RecordError::Interrupted) => Err(Failure::Interrupted),
            Err(error) => Err(sums.err().unwrap_or_else(|| Failure::Host(cannot(&error)))),
            Ok(()) => sums,
        }
    })
}

/// Simulates a trace to its end.
fn of_trace(trace: impl Read, place: &Place) -> Result<Sums, Failure> {
    let unusable = |error| Failure::Host(format!("cannot read the recorded trace: {error}"));
    let mut reader = TraceReader::open(trace).map_err(unusable)?;
    let header = reader.header().clone();
    let mut counter = Counter::new(place, header.arena_bytes);
    let mut block = Vec::new();
    while reader.next_block(&mut block).map_err(unusable)? {
        counter.run(block.iter().map(|&wideleaf_trace::Access { address, is_write, repeats }| Access {
            address,
            is_write,
            repeats,
        }));
    }
    counter.sum_up(1.0);
    Ok(Sums { left: header.class_iterations.saturating_sub(header.iterations), ..counter.sums })
}

fn generated(stream: &str, scale: f64, place: &Place, is_over: &dyn Fn() -> bool) -> Result<Sums, Failure> {
    let mut blocks = Source::parse(stream)?.open()?;
    let mut counter = Counter::new(place, blocks.info.arena.get());
    let mut block = Vec::new();
    while blocks.next(&mut block)? {
        counter.run(block.iter().map(|&wideleaf_trace::Access { address, is_write, repeats }| Access {
            address,
            is_write,
            repeats,
        }));
        if is_over() {
            return Err(Failure::Interrupted);
        }
    }
    counter.sum_up(scale);
    Ok(counter.sums)
}

/// Number of accesses between two checks for an interrupt.
const UNINTERRUPTED: usize = 1 << 18;

/// Simulates a sample of each loop of a program; as many accesses as count warm the caches before.
fn scaled(program: &str, footprint: Bytes, place: &Place, is_over: &dyn Fn() -> bool) -> Result<Rates, Failure> {
    let of = Scaled::of(program, footprint).ok_or_else(|| {
        let known = PROGRAMS.join(", ");
        Failure::Input(format!("cannot simulate {program:?}: there is no such program; the programs are {known}"))
    })?;
    let mut simulator = place.simulator(of.bytes);
    let all: f64 = of.parts.iter().map(|part| part.words).sum();
    let mut rates = Rates::default();
    for mut part in of.parts {
        for is_counted in [false, true] {
            simulator.reset_counts();
            let mut left = part.lines;
            while left > 0 {
                let now = left.min(UNINTERRUPTED);
                simulator.run(part.accesses.by_ref().take(now));
                left -= now;
                if is_over() {
                    return Err(Failure::Interrupted);
                }
            }
            if is_counted {
                rates.add(simulator.counts(), part.words / all);
            }
        }
    }
    Ok(rates)
}

/// Counts per access, over all loops of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    misses: f64,
    references: f64,
    cycles_of_walks: f64,
    cycles_of_tlb: f64,
    /// Number of misses that were counted, whatever the weight of their loop.
    counted_misses: u64,
    counted_accesses: u64,
}

impl Rates {
    /// Adds the counts of a loop that makes this share of all accesses.
    fn add(&mut self, counts: &Counts, share: f64) {
        let per_access = |count: u64| count as f64 / counts.accesses.max(1) as f64 * share;
        self.misses += per_access(counts.data_misses());
        self.references += per_access(counts.references());
        self.cycles_of_walks += per_access(counts.cycles_of_walks);
        self.cycles_of_tlb += per_access(counts.cycles_of_tlb);
        self.counted_misses += counts.data_misses();
        self.counted_accesses += counts.accesses;
    }

    fn measured(self, place: &Place) -> Measured {
        let mut metrics = vec![
            (Metric::MissesPerThousand, self.misses * 1000.0),
            (Metric::TranslationCyclesPerAccess, self.cycles_of_walks + self.cycles_of_tlb),
        ];
        if self.misses > 0.0 {
            metrics.push((Metric::ReferencesPerWalk, self.references / self.misses));
            metrics.push((Metric::WalkCycles, self.cycles_of_walks / self.misses));
        }
        let told = [(COUNTED_MISSES, self.counted_misses), (COUNTED_ACCESSES, self.counted_accesses)];
        Measured {
            evidence: Evidence::Simulated,
            metrics: metrics.into_iter().collect(),
            told: told.map(|(name, count)| (name.to_owned(), count as f64)).into(),
            notes: vec![place.note()],
            ..Measured::default()
        }
    }
}

/// A simulator, and its counts so far.
struct Counter {
    simulator: Simulator,
    machine: &'static Machine,
    shift: u32,
    sums: Sums,
}

/// Counts, weighted part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    dtlb_l1: f64,
    dtlb: f64,
    walk_l2: f64,
    data_l2: f64,
    /// Cycles of the second level of the TLB and of walks.
    translation_cycles: f64,
    /// Cycles from load to use of all data lines, as if sequential.
    data_cycles: f64,
    /// Number of iterations of the class that were not recorded.
    left: u32,
}

impl Counter {
    /// A process with `bytes` of memory; all caches are cold.
    fn new(place: &Place, bytes: u64) -> Counter {
        let bytes = Bytes::new((bytes >> place.shift).max(1));
        Counter { simulator: place.simulator(bytes), machine: place.machine, shift: place.shift, sums: Sums::default() }
    }

    fn run(&mut self, accesses: impl Iterator<Item = Access>) {
        let shift = self.shift;
        self.simulator.run(accesses.map(|access| Access { address: access.address >> shift, ..access }));
    }

    /// Adds the counts since the last call, multiplied by `weight`.
    fn sum_up(&mut self, weight: f64) {
        let counts: &Counts = self.simulator.counts();
        let misses = counts.data_misses();
        self.sums.dtlb_l1 += (counts.tlb_hits[1] + misses) as f64 * weight;
        self.sums.dtlb += misses as f64 * weight;
        self.sums.walk_l2 += counts.references_missed(2) as f64 * weight;
        self.sums.data_l2 += counts.data.missed(2) as f64 * weight;
        self.sums.translation_cycles += (counts.cycles_of_tlb + counts.cycles_of_walks) as f64 * weight;
        let latencies = self.machine.caches.iter().map(|cache| u64::from(cache.cycles.value));
        let by_caches: u64 = counts.data.caches.iter().zip(latencies).map(|(lines, cycles)| lines * cycles).sum();
        let by_memory = counts.data.memory * u64::from(self.machine.memory_cycles.value);
        self.sums.data_cycles += (by_caches + by_memory) as f64 * weight;
        self.simulator.reset_counts();
    }
}

impl Sums {
    /// Counts of a whole run. `longer` has those of one more iteration, which stands for all that are left.
    fn extrapolated(self, longer: &Sums) -> Sums {
        let whole = |count: f64, longer: f64| count + (longer - count).max(0.0) * f64::from(self.left);
        Sums {
            dtlb_l1: whole(self.dtlb_l1, longer.dtlb_l1),
            dtlb: whole(self.dtlb, longer.dtlb),
            walk_l2: whole(self.walk_l2, longer.walk_l2),
            data_l2: whole(self.data_l2, longer.data_l2),
            translation_cycles: whole(self.translation_cycles, longer.translation_cycles),
            data_cycles: whole(self.data_cycles, longer.data_cycles),
            left: self.left,
        }
    }

    fn measured(self, place: &Place) -> Measured {
        let mut metrics = vec![
            (Metric::DtlbL1Misses, self.dtlb_l1),
            (Metric::DtlbMisses, self.dtlb),
            (Metric::WalkL2Misses, self.walk_l2),
        ];
        let mut told = vec![(TRANSLATION_CYCLES, self.translation_cycles)];
        // Divided addresses are no data lines.
        if place.shift == 0 {
            metrics.push((Metric::DataL2Misses, self.data_l2));
            told.push((DATA_CYCLES, self.data_cycles));
        }
        let mut notes = vec![place.note()];
        if self.left > 0 {
            let left = self.left;
            notes.push(format!("extrapolated: the last {left} iterations count like the first of them"));
        }
        Measured {
            evidence: Evidence::Simulated,
            metrics: metrics.into_iter().collect(),
            told: told.into_iter().map(|(name, cycles)| (name.to_owned(), cycles)).collect(),
            notes,
            ..Measured::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_trace::{Header, TraceWriter};

    fn k8(page: &str) -> Place {
        Place::parse("k8", page, None).expect("there is one")
    }

    /// A trace that first touches each of 64 pages in `init`, and of 64 others in `compute`.
    fn trace(iterations: u32, class_iterations: u32) -> Vec<u8> {
        let header = Header {
            kernel: "npb.cg".into(),
            class: "S".into(),
            parameters: String::new(),
            arena_bytes: 128 << 12,
            iterations,
            class_iterations,
        };
        let mut writer = TraceWriter::create(Vec::new(), &header).expect("a header");
        for (phase, first) in [("init", 0), ("compute", 64)] {
            writer.phase(phase).expect("a phase");
            for page in first..first + 64 {
                let access = wideleaf_trace::Access { address: page << 12, is_write: true, repeats: 1 };
                writer.push(&access).expect("in the arena");
            }
        }
        writer.finish(false).expect("an end").1
    }

    #[test]
    fn one_more_iteration_stands_for_all_that_are_left() {
        let sums = |iterations| of_trace(trace(iterations, 15).as_slice(), &k8("4k")).expect("a whole trace");
        let (one, all) = (sums(1), sums(15));
        assert_eq!((one.dtlb, one.left, all.left), (128.0, 14, 0));
        let more = Sums { dtlb: one.dtlb + 50.0, ..one };
        assert_eq!(one.extrapolated(&more).dtlb, 128.0 + 14.0 * 50.0);
        let notes = |sums: Sums| sums.measured(&k8("4k")).notes;
        assert_eq!(notes(one)[1], "extrapolated: the last 14 iterations count like the first of them");
        assert_eq!(notes(all).len(), 1);
    }

    #[test]
    fn the_set_up_within_the_timed_part_counts_once() {
        for kernel in ["npb.ft", "npb.mg"] {
            let misses = |iterations| {
                let sums = recorded(kernel, "class=S", iterations, 1, &k8("4k"), &|| false);
                sums.expect("it runs anywhere").dtlb_l1
            };
            let (extrapolated, all) = (misses(Some(1)), misses(None));
            assert!((extrapolated / all - 1.0).abs() < 0.02, "{kernel}: {extrapolated}, in all {all}");
        }
    }

    #[test]
    fn pages_of_64_kib_are_missed_once_for_sixteen_of_4_kib() {
        let sums = |page| of_trace(trace(1, 1).as_slice(), &k8(page)).expect("a whole trace");
        assert_eq!((sums("4k").dtlb, sums("64k").dtlb, sums("2m").dtlb), (128.0, 8.0, 1.0));
        let has_data = |page| sums(page).measured(&k8(page)).metrics.contains_key(&Metric::DataL2Misses);
        assert!(has_data("4k") && !has_data("64k"));
        assert_eq!(sums("4k").measured(&k8("4k")).evidence, Evidence::Simulated);
    }

    /// Cells of the grid: each program, each machine, in one dimension and in two.
    const GRID_CELLS: [&str; 5] = [
        "gups,64,zen4,4k,4k,",
        "cg,8,haswell-ep,4k,none,",
        "mg,8,sapphire-rapids,2m,4k,",
        "stream,64,zen2,2m,2m,",
        "sweep3d,64,haswell-ep,1g,2m,",
    ];

    #[test]
    fn the_grids_stored_figures_are_those_of_this_simulator_to_four_digits() {
        const GRID: &str = include_str!("../../../../data/grid.csv");
        const METRICS: [Metric; 4] = [
            Metric::MissesPerThousand,
            Metric::ReferencesPerWalk,
            Metric::WalkCycles,
            Metric::TranslationCyclesPerAccess,
        ];
        for cell in GRID_CELLS {
            let row = GRID.lines().find(|row| row.starts_with(cell)).expect("it is a cell of the grid");
            let fields: Vec<&str> = row.split(',').collect();
            let [program, footprint_gib, machine, guest, host, figures @ .., misses] = &fields[..] else {
                panic!("{row}: ten fields")
            };
            let place = Place::parse(machine, guest, Some(*host).filter(|host| *host != "none")).expect("a machine");
            let footprint = Bytes::new(footprint_gib.parse::<u64>().expect("a number") << 30);
            let now = scaled(program, footprint, &place, &|| false).expect("a program").measured(&place);
            for (metric, stored) in METRICS.into_iter().zip(figures) {
                let (now, stored) = (now.metrics[&metric], stored.parse::<f64>().expect("a number"));
                let why = "run benches/grid --again";
                assert!((now / stored - 1.0).abs() < 1e-4, "{cell} {metric}: {now}, stored {stored}: {why}");
            }
            assert_eq!(now.told[COUNTED_MISSES], misses.parse::<f64>().expect("a number"), "{cell}");
        }
    }

    #[test]
    fn generated_accesses_are_scaled_to_a_whole_run() {
        let misses = |scale| {
            let sums = generated("stride:log2_bytes=30,stride=4096,loads=100000", scale, &k8("4k"), &|| false);
            sums.expect("a stream").dtlb
        };
        assert_eq!((misses(1.0), misses(2.5)), (1e5, 2.5e5));
    }

    #[test]
    fn a_trace_that_ends_early_and_unknown_names_are_refused() {
        let whole = trace(1, 15);
        let failure = of_trace(&whole[..whole.len() - 9], &k8("4k")).expect_err("it is cut");
        assert!(failure.to_string().starts_with("cannot read the recorded trace: "), "{failure}");
        assert!(Place::parse("z80", "4k", None).is_err_and(|why| why.to_string().contains("cannot simulate \"z80\"")));
        assert!(Place::parse("k8", "3k", None).is_err() && Place::parse("k8:fifo", "4k", None).is_err());
        let alone = Place::parse("k8:smt", "4k", None).expect_err("a core of one thread").to_string();
        assert!(alone.ends_with("a core of k8 has one thread; leave out :smt"), "{alone}");
        let ended = generated("gups", 1.0, &k8("4k"), &|| true);
        assert!(matches!(ended, Err(Failure::Interrupted)));
    }

    #[test]
    fn a_simulation_that_takes_too_long_names_its_limit_and_no_option() {
        let accesses = Accesses::Generated { stream: "gups".into(), scale: 1.0 };
        let interrupts = Interrupts::install().expect("installed");
        let failure = run(&accesses, &k8("4k"), Duration::ZERO, &interrupts).expect_err("it has no time");
        assert_eq!((failure.exit_code(), failure.to_string()), (6, "the simulation did not end within 0ns".to_owned()));
    }

    #[test]
    fn published_counters_are_weighed_by_the_simulators_latencies() {
        use wideleaf_experiments::published::a64fx::{SECOND_LEVEL_HIT_CYCLES, WALK_CYCLES};
        let a64fx = machine("a64fx").expect("there is one");
        let latencies = [a64fx.data_tlb[1].cycles.value, a64fx.memory_cycles.value].map(f64::from);
        assert_eq!(latencies, [SECOND_LEVEL_HIT_CYCLES, WALK_CYCLES]);
    }

    #[test]
    fn a_replacement_rule_changes_the_misses_of_2_mib_pages_alone() {
        // Sixteen pages of 2 MiB in a loop: LRU misses with eight entries, a random entry is sometimes right.
        let misses = |machine: &str, page: &str| {
            let place = Place::parse(machine, page, None).expect("there is one");
            generated("stride:log2_bytes=25,stride=2097152,loads=90000", 1.0, &place, &|| false).expect("a stream").dtlb
        };
        assert_eq!(misses("k8", "2m"), 90_000.0);
        assert!(misses("k8:random", "2m") < 90_000.0);
        assert_eq!(misses("k8:random", "4k"), misses("k8", "4k"));
    }

    #[test]
    fn half_a_core_has_half_of_the_entries() {
        // 128 pages fit the Xeon's TLB, and not half of it.
        let misses = |machine: &str| {
            let place = Place::parse(machine, "4k", None).expect("there is one");
            generated("stride:log2_bytes=19,stride=4096,loads=12800", 1.0, &place, &|| false).expect("a stream").dtlb
        };
        assert_eq!((misses("openmp-xeon"), misses("openmp-xeon:smt")), (128.0, 12_800.0));
    }

    #[test]
    fn the_first_of_four_threads_misses_less_than_one_thread_that_does_all() {
        let misses = |threads| {
            let sums = recorded("npb.cg", "class=S", Some(1), threads, &k8("4k"), &|| false);
            sums.expect("it runs anywhere").dtlb_l1
        };
        let (one, four) = (misses(1), misses(4));
        assert!(four > 0.0 && four < one / 2.0, "{four} of {one}");
    }

    #[test]
    fn a_kernel_is_recorded_and_simulated_without_a_file() {
        let sums = |page| recorded("npb.is", "class=S", Some(1), 1, &k8(page), &|| false).expect("it runs anywhere");
        let (base, huge) = (sums("4k"), sums("2m"));
        assert!(base.dtlb > huge.dtlb && huge.dtlb > 0.0, "{base:?} {huge:?}");
        assert!(base.dtlb_l1 >= base.dtlb);
        assert!(recorded("no.such", "", None, 1, &k8("4k"), &|| false).is_err());
    }
}
