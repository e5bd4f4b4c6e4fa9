//! FreeBSD's superpages: NPB, HPCC RandomAccess and ASCI Sweep3D on an Opteron (K8), each as a process alone, with
//! and without superpages. The counters are those of whole processes.

use serde::Deserialize;

use super::rows;

/// A run of an NPB benchmark.
#[derive(Clone, Debug, Deserialize)]
pub struct Npb {
    /// Name of the benchmark: `NAS BT`.
    pub benchmark: String,
    /// Problem class: `A`.
    pub class: String,
    /// Page setting: `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// Kind of run: `fastest`, `slowest`, `only run listed`, `fastest/slowest`.
    pub run: String,
    /// Time in seconds.
    pub time_s: f64,
    /// Operations as counted by NPB, in millions per second.
    pub mops: f64,
    /// Loads and stores that missed both levels of the data TLB.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of page-table walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
    /// Accesses to data that missed the L2.
    pub l2_miss_dc_fill: f64,
}

/// A run of RandomAccess.
#[derive(Clone, Debug, Deserialize)]
pub struct Gups {
    /// Page setting: `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// Number of words in the table, as a power of two.
    pub log2_words: u32,
    /// Time of the updates in seconds.
    pub real_time_s: f64,
    /// Updates per second, in 10^9.
    pub gups: f64,
    /// Loads and stores that missed both levels of the data TLB, in both passes over the table.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of page-table walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
}

/// A run of Sweep3D with 150 cells per edge.
#[derive(Clone, Debug, Deserialize)]
pub struct Sweep3d {
    /// Page setting: `4KB` or `4KB+2MB`.
    pub page_setting: String,
    /// Kind of run: `fastest` or `slowest`.
    pub run: String,
    /// Time in seconds.
    pub elapsed_s: f64,
    /// Loads and stores that missed both levels of the data TLB.
    pub dtlb_l1_and_l2_miss: f64,
    /// References of page-table walks that missed the L2.
    pub l2_miss_tlb_reload: f64,
    /// Accesses to data that missed the L2.
    pub l2_miss_dc_fill: f64,
}

/// A published run of any benchmark, for the row beside our own.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the case as in our experiments: `BT A`, `GUPS 2^25`, `Sweep3D 150`.
    pub case: String,
    /// Whether the run had superpages.
    pub is_huge: bool,
    /// Kind of run: `fastest`, `slowest`, or another printed kind.
    pub run: String,
    /// Time in seconds.
    pub seconds: f64,
    /// Mop/s of NPB or GUP/s of RandomAccess; `None` for Sweep3D, which has no printed figure.
    pub figure: Option<f64>,
    /// Loads and stores that missed both levels of the data TLB, references of walks that missed the L2, and accesses
    /// to data that missed the L2.
    pub counters: [Option<f64>; 3],
}

/// Published runs of NPB.
pub fn npb() -> Vec<Npb> {
    rows(include_str!("../../../data/published/freebsd_npb.csv"))
}

/// Published runs of RandomAccess.
pub fn gups() -> Vec<Gups> {
    rows(include_str!("../../../data/published/freebsd_gups.csv"))
}

/// Published runs of Sweep3D.
pub fn sweep3d() -> Vec<Sweep3d> {
    rows(include_str!("../../../data/published/freebsd_sweep3d.csv"))
}

/// All published runs, in the order of the tables.
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
