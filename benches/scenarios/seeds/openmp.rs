//! The OpenMP paper's Opteron 270, which has K8's TLB: reduction of misses by 2 MiB pages, compared with
//! FreeBSD's counters and ours.
//!
//! ```text
//!   the paper   class B, 4 threads on 4 cores, all shared data in hugetlbfs from the start, code and stacks on 4 KiB
//!   FreeBSD     class B, 1 process, superpages created by the kernel
//!   simulated   1 thread, the whole arena on either size: equal to the data of both set-ups
//! ```
//!
//! The paper gives factors and no counts. A trace is of one thread. Each of four threads covers a quarter
//! of each array with its own TLB, which a trace of one thread does not show. Classes other than B are
//! printed and not judged.

use comfy_table::Cell;
use wideleaf_benches::scenario::{bar, number, table};

use crate::measured::{Misses, Opteron};
use crate::opteron::Row;

const CLAIMS: &str = include_str!("../../data/published/openmp_claims.csv");

/// Published minimum and maximum factor by which misses fall.
struct Claim {
    program: String,
    text: &'static str,
    factors: [f64; 2],
}

/// All rows "DTLB misses reduced by factor", program by program.
fn claims() -> Vec<Claim> {
    let rows = CLAIMS.lines().skip(1).map(|line| line.split(',').collect::<Vec<_>>());
    rows.filter(|cells| cells[5] == "DTLB misses reduced by factor")
        .flat_map(|cells| cells[1].split(' ').map(move |program| Claim::new(program, cells[6])))
        .collect()
}

impl Claim {
    /// A claim from its text: `10 or more`, `2-3`.
    fn new(program: &str, text: &'static str) -> Claim {
        let number = |text: &str| text.parse::<f64>().expect("the table has numbers there");
        let factors = match (text.strip_suffix(" or more"), text.split_once('-')) {
            (Some(least), _) => [number(least), f64::INFINITY],
            (None, Some((least, most))) => [number(least), number(most)],
            (None, None) => panic!("{text:?} is not a claim of the table"),
        };
        Claim { program: format!("npb.{}", program.to_lowercase()), text, factors }
    }

    /// Whether a factor is within a factor of two of the claim: the paper rounds ("approximately").
    fn is_met(&self, factor: f64) -> bool {
        (self.factors[0] / 2.0..=self.factors[1] * 2.0).contains(&factor)
    }
}

const CLASS: &str = "B";

/// Misses on 4 KiB pages divided by those on 2 MiB pages.
fn fall(misses: [Misses; 2]) -> f64 {
    misses[0].tlb / misses[1].tlb
}

pub fn print(rows: &[Row], measured: &Opteron) {
    println!(
        "\nFactor by which misses fall on 2 MiB pages (below 1: rise), Opteron 270; OpenMP's: class {CLASS}, 4 threads"
    );
    let mut out = table(&["program", "OpenMP's", "FreeBSD's, class B", "simulated, 1 thread", "class", "accesses"]);
    let (mut seeds, mut ours) = ([0, 0], [0, 0]);
    for claim in claims() {
        let of_freebsd = measured.of(&format!("{} {CLASS}", claim.program)).map(fall);
        let text = |factor: Option<f64>| number(factor.map_or("-".into(), |factor| format!("{factor:.2}")));
        if let Some(factor) = of_freebsd {
            seeds[0] += u32::from(claim.is_met(factor));
            seeds[1] += 1;
        }
        let of_program = |row: &&Row| row.name.split_once(' ').is_some_and(|(program, _)| program == claim.program);
        let traced: Vec<_> = rows.iter().filter(of_program).collect();
        let head = [Cell::new(&claim.program), number(claim.text), text(of_freebsd)];
        if traced.is_empty() {
            out.add_row(head.clone().into_iter().chain([number("-"), number("-"), Cell::new("no trace")]));
        }
        for row in traced {
            let class = row.name.rsplit(' ').next().unwrap_or_default();
            let factor = fall(row.simulated);
            if class == CLASS {
                ours[0] += u32::from(claim.is_met(factor));
                ours[1] += 1;
            }
            out.add_row(head.clone().into_iter().chain([text(Some(factor)), Cell::new(class), Cell::new(&row.from)]));
        }
    }
    println!("{out}");
    println!(
        "  the two measurements agree, within a factor of two, in {} of {} programs that both have",
        seeds[0], seeds[1]
    );
    if ours[1] > 0 {
        let what = format!(
            "simulated within a factor of two of OpenMP's: {} of {} programs of class {CLASS}",
            ours[0], ours[1]
        );
        println!("{}", bar(&what, ours[0] == ours[1]));
    }
}
