//! Published tables: misses of a program on each page size, as the mean of its runs.

use wideleaf_policies::PageSize;

const NPB: &str = include_str!("../../data/published/freebsd_npb.csv");
const SWEEP3D: &str = include_str!("../../data/published/freebsd_sweep3d.csv");

/// Misses, and references of page-table walks that missed the L2.
#[derive(Clone, Copy, Debug, Default)]
pub struct Misses {
    pub tlb: f64,
    pub walk_l2: f64,
}

impl Misses {
    pub fn times(self, factor: f64) -> Misses {
        Misses { tlb: self.tlb * factor, walk_l2: self.walk_l2 * factor }
    }
}

/// FreeBSD's measurements of a program on one page size.
struct Measured {
    name: String,
    huge: bool,
    misses: Misses,
    runs: f64,
}

/// All rows of NPB and Sweep3D, by the names of their traces.
pub struct Opteron(Vec<Measured>);

impl Opteron {
    pub fn read() -> Opteron {
        let runs = |text: &'static str| text.lines().skip(1).map(|line| line.split(',').collect::<Vec<_>>());
        let of_npb = runs(NPB).map(|cells| (npb_name(cells[0], cells[1]), cells[2], cells[8], cells[9]));
        let of_sweep3d = runs(SWEEP3D).map(|cells| ("sweep3d 150".to_owned(), cells[1], cells[7], cells[8]));
        let mut rows: Vec<Measured> = Vec::new();
        for (name, page, tlb, walk_l2) in of_npb.chain(of_sweep3d) {
            let huge = page_of(page) == PageSize::Huge2M;
            let run = Misses { tlb: parse(tlb), walk_l2: parse(walk_l2) };
            match rows.iter_mut().find(|row| row.name == name && row.huge == huge) {
                Some(row) => {
                    row.misses.tlb += run.tlb;
                    row.misses.walk_l2 += run.walk_l2;
                    row.runs += 1.0;
                }
                None => rows.push(Measured { name, huge, misses: run, runs: 1.0 }),
            }
        }
        Opteron(rows)
    }

    /// Misses on 4 KiB pages and on 2 MiB pages; `None` for a program without rows.
    pub fn of(&self, name: &str) -> Option<[Misses; 2]> {
        let of = |huge| {
            let row = self.0.iter().find(|row| row.name == name && row.huge == huge)?;
            Some(row.misses.times(1.0 / row.runs))
        };
        Some([of(false)?, of(true)?])
    }
}

/// Name of a trace from a published row: `NAS CG`, `A` is `npb.cg A`.
fn npb_name(benchmark: &str, class: &str) -> String {
    format!("npb.{} {class}", benchmark.trim_start_matches("NAS ").to_lowercase())
}

pub fn page_of(setting: &str) -> PageSize {
    match setting {
        "4KB" => PageSize::Base4K,
        _ => PageSize::Huge2M,
    }
}

pub fn parse(cell: &str) -> f64 {
    cell.parse().expect("the tables have numbers there")
}
