//! FreeBSD's superpages: NPB, HPCC RandomAccess and ASCI Sweep3D on an Opteron (K8), a process alone, with and without them. Counters are those of
//! whole processes.

use serde::Deserialize;

use super::rows;

/// A run of a benchmark of NPB.
#[derive(Clone, Debug, Deserialize)]
pub struct Npb {
    /// `NAS BT`.
    pub benchmark: String,
    /// `A`.
    pub class: String,
    /// `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// `fastest`, `slowest`, `only run listed`, `fastest/slowest`.
    pub run: String,
    /// Its time.
    pub time_s: f64,
    /// Operations as NPB counts them, in millions a second.
    pub mops: f64,
    /// Loads and stores that missed both levels of the data TLB.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of their walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
    /// Accesses to data that missed it.
    pub l2_miss_dc_fill: f64,
}

/// A run of RandomAccess.
#[derive(Clone, Debug, Deserialize)]
pub struct Gups {
    /// `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// Words of the table, as a power of two.
    pub log2_words: u32,
    /// Time of the updates.
    pub real_time_s: f64,
    /// Updates a second, in 10^9.
    pub gups: f64,
    /// Loads and stores that missed both levels of the data TLB, in both passes over the table.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of their walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
}

/// A run of Sweep3D with 150 cells an edge.
#[derive(Clone, Debug, Deserialize)]
pub struct Sweep3d {
    /// `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// `fastest`, `slowest`.
    pub run: String,
    /// Its time.
    pub elapsed_s: f64,
    /// Loads and stores that missed both levels of the data TLB.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of their walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
    /// Accesses to data that missed it.
    pub l2_miss_dc_fill: f64,
}

/// A run, whatever its benchmark is: a row of the table that ours stands beside.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// As our cases are called: `BT A`, `GUPS 2^25`, `Sweep3D 150`.
    pub case: String,
    /// With superpages.
    pub is_huge: bool,
    /// `fastest`, `slowest`, or what else was printed.
    pub run: String,
    /// Its time.
    pub seconds: f64,
    /// Mop/s of NPB, GUP/s of RandomAccess; none was printed for Sweep3D.
    pub figure: Option<f64>,
    /// Loads and stores that missed both levels of the data TLB, references of walks that missed the L2, accesses to data that missed it.
    pub counters: [Option<f64>; 3],
}

/// NPB.
pub fn npb() -> Vec<Npb> {
    rows(include_str!("../../../data/seeds/freebsd_npb.csv"))
}

/// RandomAccess.
pub fn gups() -> Vec<Gups> {
    rows(include_str!("../../../data/seeds/freebsd_gups.csv"))
}

/// Sweep3D.
pub fn sweep3d() -> Vec<Sweep3d> {
    rows(include_str!("../../../data/seeds/freebsd_sweep3d.csv"))
}

/// All runs, in the order of the tables.
pub fn runs() -> Vec<Run> {
    let npb = npb().into_iter().map(|row| Run {
        case: format!("{} {}", row.benchmark.trim_start_matches("NAS "), row.class),
        is_huge: is_huge(&row.page_setting),
        run: row.run,
        seconds: row.time_s,
        figure: Some(row.mops),
        counters: [row.dtlb_l1_and_l2_miss, row.l2_miss_tlb_reload, row.l2_miss_dc_fill].map(Some),
    });
    let gups = gups().into_iter().map(|row| Run {
        case: format!("GUPS 2^{}", row.log2_words),
        is_huge: is_huge(&row.page_setting),
        run: "only run listed".into(),
        seconds: row.real_time_s,
        figure: Some(row.gups),
        counters: [Some(row.dtlb_l1_and_l2_miss), Some(row.l2_miss_tlb_reload), None],
    });
    let sweep3d = sweep3d().into_iter().map(|row| Run {
        case: "Sweep3D 150".into(),
        is_huge: is_huge(&row.page_setting),
        run: row.run,
        seconds: row.elapsed_s,
        figure: None,
        counters: [row.dtlb_l1_and_l2_miss, row.l2_miss_tlb_reload, row.l2_miss_dc_fill].map(Some),
    });
    npb.chain(gups).chain(sweep3d).collect()
}

fn is_huge(page_setting: &str) -> bool {
    page_setting != "4KB"
}
