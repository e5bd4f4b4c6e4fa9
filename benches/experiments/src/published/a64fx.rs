//! FLASH on an A64FX: its equation of state and its three-dimensional hydrodynamics, built by two compilers. Counters
//! on 2 MiB pages (`hp`) and on 64 KiB pages (`nohp`).

use serde::Deserialize;

use super::rows;

/// Ratio of a counter on 2 MiB pages to 64 KiB pages.
#[derive(Clone, Debug, Deserialize)]
pub struct Ratio {
    /// Name of the counter: `L1D_TLB_REFILL`.
    pub counter: String,
    /// Ratio in the equation of state with gcc.
    pub eos_gcc: f64,
    /// Ratio in the equation of state with Fujitsu's compiler.
    pub eos_fujitsu: f64,
    /// Ratio in hydrodynamics with gcc.
    pub hydro3d_gcc: f64,
    /// Ratio in hydrodynamics with Fujitsu's compiler.
    pub hydro3d_fujitsu: f64,
}

/// Values of a counter.
#[derive(Clone, Debug, Deserialize)]
pub struct Raw {
    /// Name of the counter: `CPU_CYCLES`.
    pub counter: String,
    /// Value on 2 MiB pages with gcc.
    pub gcc_hp: f64,
    /// Value on 64 KiB pages with gcc.
    pub gcc_nohp: f64,
    /// Value on 2 MiB pages with Fujitsu's compiler.
    pub fujitsu_hp: f64,
    /// Value on 64 KiB pages with Fujitsu's compiler.
    pub fujitsu_nohp: f64,
}

/// Published table of ratios.
pub fn ratios() -> Vec<Ratio> {
    rows(include_str!("../../../data/published/a64fx_table1_ratios_hp_to_nohp.csv"))
}

/// Published counters of the equation of state.
pub fn eos() -> Vec<Raw> {
    rows(include_str!("../../../data/published/a64fx_table4_eos_raw.csv"))
}

/// Published counters of hydrodynamics.
pub fn hydro3d() -> Vec<Raw> {
    rows(include_str!("../../../data/published/a64fx_table6_hydro3d_raw.csv"))
}

/// Ratios of a counter, in the order of [`COLUMNS`]. The published table of ratios has no cycles; their ratios come
/// from the published counters.
pub fn ratios_of(counter: &str) -> Option<[f64; 4]> {
    let printed = ratios().into_iter().find(|row| row.counter == counter);
    let printed = printed.map(|row| [row.eos_gcc, row.eos_fujitsu, row.hydro3d_gcc, row.hydro3d_fujitsu]);
    let of = |rows: Vec<Raw>| {
        let row = rows.into_iter().find(|row| row.counter == counter)?;
        Some([row.gcc_hp / row.gcc_nohp, row.fujitsu_hp / row.fujitsu_nohp])
    };
    let counted = || {
        let ([a, b], [c, d]) = (of(eos())?, of(hydro3d())?);
        Some([a, b, c, d])
    };
    printed.or_else(counted)
}

/// Cycles of a hit in the second level of the simulated A64FX's TLB; not verified.
pub const SECOND_LEVEL_HIT_CYCLES: f64 = 7.0;
/// Cycles of a walk: the load of one page's entry from the simulated A64FX's memory. Its walk caches hardly ever leave
/// more; not verified.
pub const WALK_CYCLES: f64 = 286.0;

/// Cycles on 2 MiB pages relative to 64 KiB pages as the published misses and those latencies predict them, in the
/// order of [`COLUMNS`]; `None` if a counter is not published.
pub fn predicted_cycles() -> Option<[f64; 4]> {
    let of = |rows: &[Raw]| {
        let counter = |name: &str| rows.iter().find(|row| row.counter == name);
        let (first, second, cycles) = (counter("L1D_TLB_REFILL")?, counter("L2D_TLB_REFILL")?, counter("CPU_CYCLES")?);
        let saved = |of: fn(&Raw) -> f64| of(first) * SECOND_LEVEL_HIT_CYCLES + of(second) * WALK_CYCLES;
        let gcc = saved(|row| row.gcc_nohp - row.gcc_hp) / cycles.gcc_nohp;
        let fujitsu = saved(|row| row.fujitsu_nohp - row.fujitsu_hp) / cycles.fujitsu_nohp;
        Some([1.0 - gcc, 1.0 - fujitsu])
    };
    let ([a, b], [c, d]) = (of(&eos())?, of(&hydro3d())?);
    Some([a, b, c, d])
}

/// Titles of the four columns.
pub const COLUMNS: [&str; 4] = ["EOS, gcc", "EOS, Fujitsu", "hydro, gcc", "hydro, Fujitsu"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_ratios_are_those_of_the_counters() {
        for (counter, within) in [("L1D_TLB_REFILL", 0.006), ("L1D_CACHE_REFILL", 0.006)] {
            let printed = ratios_of(counter).expect("the row exists");
            let eos = eos().into_iter().find(|row| row.counter == counter).expect("the row exists");
            assert!((eos.gcc_hp / eos.gcc_nohp - printed[0]).abs() < within, "{counter}");
        }
        let predicted = predicted_cycles().expect("counted");
        assert_eq!(predicted.map(|ratio| (ratio * 100.0).round()), [92.0, 91.0, 99.0, 99.0]);
        let cycles = ratios_of("CPU_CYCLES").expect("counted");
        assert_eq!(cycles.map(|ratio| (ratio * 100.0).round()), [96.0, 94.0, 110.0, 100.0]);
    }
}
