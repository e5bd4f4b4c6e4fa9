//! FLASH on an A64FX, its equation of state and its hydrodynamics in three dimensions, by two compilers: counters on 2 MiB pages (`hp`) and on 64 KiB pages
//! (`nohp`).

use serde::Deserialize;

use super::rows;

/// A counter's ratio, 2 MiB pages to 64 KiB pages.
#[derive(Clone, Debug, Deserialize)]
pub struct Ratio {
    /// `L1D_TLB_REFILL`.
    pub counter: String,
    /// Equation of state, gcc.
    pub eos_gcc: f64,
    /// Equation of state, Fujitsu's compiler.
    pub eos_fujitsu: f64,
    /// Hydrodynamics, gcc.
    pub hydro3d_gcc: f64,
    /// Hydrodynamics, Fujitsu's compiler.
    pub hydro3d_fujitsu: f64,
}

/// A counter.
#[derive(Clone, Debug, Deserialize)]
pub struct Raw {
    /// `CPU_CYCLES`.
    pub counter: String,
    /// On 2 MiB pages, gcc.
    pub gcc_hp: f64,
    /// On 64 KiB pages, gcc.
    pub gcc_nohp: f64,
    /// On 2 MiB pages, Fujitsu's compiler.
    pub fujitsu_hp: f64,
    /// On 64 KiB pages, Fujitsu's compiler.
    pub fujitsu_nohp: f64,
}

/// Their table of ratios.
pub fn ratios() -> Vec<Ratio> {
    rows(include_str!("../../../data/seeds/a64fx_table1_ratios_hp_to_nohp.csv"))
}

/// The equation of state.
pub fn eos() -> Vec<Raw> {
    rows(include_str!("../../../data/seeds/a64fx_table4_eos_raw.csv"))
}

/// Hydrodynamics.
pub fn hydro3d() -> Vec<Raw> {
    rows(include_str!("../../../data/seeds/a64fx_table6_hydro3d_raw.csv"))
}

/// The ratios of a counter, in the order of [`COLUMNS`]. Cycles, which their table of ratios leaves out, are from their counters.
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

/// What the four columns are called.
pub const COLUMNS: [&str; 4] = ["EOS, gcc", "EOS, Fujitsu", "hydro, gcc", "hydro, Fujitsu"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_ratios_are_those_of_the_counters() {
        for (counter, within) in [("L1D_TLB_REFILL", 0.006), ("L1D_CACHE_REFILL", 0.006)] {
            let printed = ratios_of(counter).expect("it is there");
            let eos = eos().into_iter().find(|row| row.counter == counter).expect("it is there");
            assert!((eos.gcc_hp / eos.gcc_nohp - printed[0]).abs() < within, "{counter}");
        }
        let cycles = ratios_of("CPU_CYCLES").expect("counted");
        assert_eq!(cycles.map(|ratio| (ratio * 100.0).round()), [96.0, 94.0, 110.0, 100.0]);
    }
}
