//! The A64FX as the negative control: FLASH's equation of state and its hydrodynamics, with far fewer TLB misses but
//! almost the same time.
//!
//! ```text
//!   published counters ──▶ cycles by the simulator's latencies ──▶ does the model predict a gain that was not published?
//!   TRACE of amr   ──▶ A64FX on 4 KiB, 64 KiB, 2 MiB       ──▶ misses and cycles, large pages to base pages
//! ```
//!
//! Comparable are the shape of the memory (variables of a cell side by side, blocks of cells), the page sizes (64 KiB
//! base pages, 2 MiB pages of hugetlbfs), and the order of the ratios. Not comparable are counts (`amr` is not FLASH,
//! and makes one pass) and cycles other than those of memory, which are most of the published cycles. The machine's
//! parameters are quoted from memory and not verified.

use comfy_table::Cell;
use wideleaf_benches::scenario::{Ended, Waiting, bar, number, table};
use wideleaf_policies::PageSize;
use wideleaf_simulator::{Machine, machine};

use crate::measured::parse;
use crate::simulated::{Arm, Sums};
use crate::traced::Trace;

/// Name of the kernel that this comparison covers.
pub const KERNEL: &str = "amr";

const EOS: &str = include_str!("../../data/published/a64fx_table4_eos_raw.csv");
const HYDRO: &str = include_str!("../../data/published/a64fx_table6_hydro3d_raw.csv");

/// Columns of both tables with counts on large pages and on base pages, by compiler.
const COMPILERS: [(&str, usize, usize); 2] = [("gcc", 1, 2), ("Fujitsu", 4, 5)];

/// Shift for 64 KiB pages, which are 4 KiB pages of addresses divided by 2^4.
const SHIFT_64K: u32 = 4;
const BASES: [&str; 2] = ["4k", "64k"];

fn a64fx() -> &'static Machine {
    machine("a64fx").expect("the A64FX")
}

/// Ratios of large pages to base pages: misses of the first level of the TLB, misses of all levels, and cycles.
#[derive(Clone, Copy)]
struct Ratios {
    first_level: f64,
    misses: f64,
    cycles: f64,
}

impl Ratios {
    const ALL: [fn(&Ratios) -> f64; 3] = [|it| it.first_level, |it| it.misses, |it| it.cycles];
}

/// Counters of a program with one compiler, on large pages and on base pages.
struct Counters {
    name: String,
    ratios: Ratios,
    instructions: f64,
    /// Predicted saving by large pages, as a share of all cycles on base pages.
    predicted: f64,
}

impl Counters {
    fn read() -> Vec<Counters> {
        let tables = [("EOS", EOS), ("Hydro", HYDRO)];
        tables.into_iter().flat_map(|(name, text)| COMPILERS.map(|columns| Counters::of(name, text, columns))).collect()
    }

    fn of(program: &str, text: &'static str, (compiler, large, base): (&str, usize, usize)) -> Counters {
        let both = |counter: &str| -> [f64; 2] {
            let row = text.lines().map(|line| line.split(',').collect::<Vec<_>>()).find(|cells| cells[0] == counter);
            let row = row.expect("both tables have the counter");
            [parse(row[large]), parse(row[base])]
        };
        let ratio = |[large, base]: [f64; 2]| large / base;
        let saved = |[large, base]: [f64; 2]| base - large;
        let (first_level, misses, cycles) = (both("L1D_TLB_REFILL"), both("L2D_TLB_REFILL"), both("CPU_CYCLES"));
        let second_level_hit = f64::from(a64fx().data_tlb[1].cycles.value);
        // The cost of a walk is the load of one page's entry from memory. The walk caches hardly ever leave more.
        let walk = f64::from(a64fx().memory_cycles.value);
        Counters {
            name: format!("{program}, {compiler}"),
            ratios: Ratios { first_level: ratio(first_level), misses: ratio(misses), cycles: ratio(cycles) },
            instructions: ratio(both("EFFECTIVE_INST_SPEC")),
            predicted: 1.0 - (saved(first_level) * second_level_hit + saved(misses) * walk) / cycles[1],
        }
    }
}

/// Results of a trace on three page sizes.
pub struct Mesh {
    name: String,
    mib: u64,
    /// Sums on 4 KiB pages and on 64 KiB pages.
    bases: [Sums; BASES.len()],
    huge: Sums,
}

impl Mesh {
    pub fn simulate(trace: Trace<'_>, waiting: &Waiting) -> Result<Mesh, Ended> {
        let (name, bytes) = (trace.variant(), trace.arena_bytes());
        let arms = [
            Arm::new(a64fx(), bytes, PageSize::Base4K),
            Arm::divided(a64fx(), bytes, PageSize::Base4K, SHIFT_64K),
            Arm::new(a64fx(), bytes, PageSize::Huge2M),
        ];
        let [base, of_64k, huge] = trace.simulate(arms, waiting)?;
        // Divided addresses give no counts of data lines, so those of an undivided run replace them.
        let of_64k = Sums { data_cycles: huge.data_cycles, ..of_64k };
        Ok(Mesh { name, mib: bytes >> 20, bases: [base, of_64k], huge })
    }

    fn ratios(&self, base: &Sums) -> Ratios {
        let cycles = |sums: &Sums| sums.data_cycles + sums.translation_cycles;
        Ratios {
            first_level: self.huge.first_level / base.first_level,
            misses: self.huge.misses / base.misses,
            cycles: cycles(&self.huge) / cycles(base),
        }
    }
}

pub fn print(meshes: &[Mesh]) {
    let counters = Counters::read();
    print_counters(&counters);
    if !meshes.is_empty() {
        print_meshes(meshes, &counters);
    }
}

fn print_counters(counters: &[Counters]) {
    println!(
        "\nA64FX, 2 MiB pages to 64 KiB pages: published counters, and cycles from their misses and the simulator's \
         latencies"
    );
    let header =
        ["program, compiler", "L1 misses", "TLB misses", "instructions", "cycles", "cycles, predicted", "difference"];
    let mut out = table(&header);
    for row in counters {
        let Ratios { first_level, misses, cycles } = row.ratios;
        let difference = format!("{:+.3}", row.predicted - cycles);
        let digits =
            [first_level, misses, row.instructions, cycles, row.predicted].map(|it| number(format!("{it:.4}")));
        out.add_row([Cell::new(&row.name)].into_iter().chain(digits).chain([number(difference)]));
    }
    println!("{out}");
    let [least, most] = range(counters, |it| it.cycles);
    let within = counters.iter().filter(|row| (least..=most).contains(&row.predicted)).count();
    let all = counters.len();
    println!(
        "{}",
        bar(&format!("predicted within the measured range, {least:.2} - {most:.2}: {within} of {all}"), within == all)
    );
}

/// Range of a measured ratio.
fn range(counters: &[Counters], of: fn(&Ratios) -> f64) -> [f64; 2] {
    let ratios = || counters.iter().map(|row| of(&row.ratios));
    [ratios().fold(f64::INFINITY, f64::min), ratios().fold(0.0, f64::max)]
}

fn print_meshes(meshes: &[Mesh], counters: &[Counters]) {
    println!(
        "\namr on a simulated A64FX (parameters of the machine unverified); misses in thousands, cycles of sequential \
         memory accesses"
    );
    let mut out = table(&[
        "amr",
        "arena",
        "base",
        "L1 misses",
        "on 2m",
        "TLB misses",
        "on 2m",
        "L1 ratio",
        "TLB ratio",
        "cycles",
    ]);
    let ranges = Ratios::ALL.map(|of| range(counters, of));
    let mut within = [0; 3];
    for mesh in meshes {
        for (base, sums) in BASES.into_iter().zip(&mesh.bases) {
            let ratios = mesh.ratios(sums);
            let thousands = |misses: f64| number(format!("{:.1}", misses / 1e3));
            let counts = [sums.first_level, mesh.huge.first_level, sums.misses, mesh.huge.misses].map(thousands);
            let values = Ratios::ALL.map(|of| of(&ratios));
            let head = [Cell::new(&mesh.name), number(format!("{} MiB", mesh.mib)), Cell::new(base)];
            out.add_row(head.into_iter().chain(counts).chain(values.map(|it| number(format!("{it:.4}")))));
            if base == "64k" {
                (0..3).for_each(|n| within[n] += usize::from((ranges[n][0]..=ranges[n][1]).contains(&values[n])));
            }
        }
    }
    println!("{out}");
    let all = meshes.len();
    for (n, what) in ["L1 misses", "TLB misses", "cycles"].into_iter().enumerate() {
        let [least, most] = ranges[n];
        let text = format!(
            "{what}, 2 MiB to 64 KiB, within the measured range, {least:.4} - {most:.4}: {} of {all}",
            within[n]
        );
        println!("{}", bar(&text, within[n] == all));
    }
}
