//! The gas of a zone: pressures and energies of ions, electrons and radiation add up. Pure arithmetic on one zone's
//! numbers; only the electrons come from the table.

use super::electrons::{AtDensity, AtTemperature, GAS, Point};
use super::table::Electrons;
use crate::npb::logarithm::ln;

/// Radiation constant in erg/(cm³·K⁴).
const RADIATION: f64 = 7.565_733e-15;
/// m·(mk/2πħ²)^(3/2) for a nucleon, in g/(cm³·K^(3/2)): the scale of the entropy of ions.
const ION_SCALE: f64 = 3.120_9e-4;

/// Density and composition of a zone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matter {
    /// Density in g/cm³.
    pub density: f64,
    /// Nucleons of an ion.
    pub nucleons: f64,
    /// Electrons per nucleon.
    pub electrons: f64,
}

/// What follows from density, composition and temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    /// Pressure in erg/cm³.
    pub pressure: f64,
    /// Energy in erg/g.
    pub energy: f64,
    /// Derivative of the energy by temperature, in erg/(g·K).
    pub heat: f64,
    /// Entropy in erg/(g·K).
    pub entropy: f64,
    /// Adiabatic index Γ: d ln P / d ln ρ at constant entropy.
    pub gamma: f64,
    /// Chemical potential of the electrons in units of kT.
    pub potential: f64,
    /// Electrons and positrons per cm³.
    pub number: f64,
}

impl Matter {
    /// The state at a temperature, with electrons at this matter's density of electrons.
    #[inline]
    pub fn state(&self, temperature: f64, electrons: &Electrons) -> State {
        let Self { density, nucleons, electrons: share } = *self;
        let of_electrons = density * share;
        // Ions: an ideal gas.
        let ion = GAS / nucleons;
        let states = ION_SCALE * nucleons * nucleons * libm::sqrt(nucleons) * temperature * libm::sqrt(temperature);
        let ion_entropy = ion * (2.5 + ln(states / density));
        // Radiation: T³, of which energy, pressure and entropy are multiples.
        let radiation = RADIATION * temperature * temperature * temperature;
        let squared = of_electrons * of_electrons;
        let pressure = density * ion * temperature + radiation * temperature / 3.0 + squared * electrons.free_d;
        let energy = 1.5 * ion * temperature
            + radiation * temperature / density
            + share * (electrons.free - temperature * electrons.free_t);
        let heat = 1.5 * ion + 4.0 * radiation / density - share * temperature * electrons.free_tt;
        let entropy = ion_entropy + 4.0 / 3.0 * radiation / density - share * electrons.free_t;
        // Slopes of the pressure, by temperature and by density.
        let by_temperature = density * ion + 4.0 / 3.0 * radiation + squared * electrons.free_dt;
        let by_density = ion * temperature + share * electrons.stiffness;
        let of_heat = temperature * by_temperature * by_temperature / (density * density * heat);
        let gamma = density / pressure * (by_density + of_heat);
        let (potential, number) = (electrons.potential, electrons.number);
        State { pressure, energy, heat, entropy, gamma, potential, number }
    }

    /// The state at a temperature by the closed form, without the table.
    pub fn known_state(&self, temperature: f64) -> State {
        let density = AtDensity::new(self.density * self.electrons);
        let electrons = Point::new(&density, &AtTemperature::new(temperature));
        self.state(temperature, &Electrons::from(electrons))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARBON: Matter = Matter { density: 3e6, nucleons: 12.0, electrons: 0.5 };

    fn state(density: f64, temperature: f64) -> State {
        Matter { density, ..CARBON }.known_state(temperature)
    }

    fn slope(of: impl Fn(f64) -> f64, at: f64) -> f64 {
        (of(at * (1.0 + 1e-5)) - of(at * (1.0 - 1e-5))) / (2e-5 * at)
    }

    #[track_caller]
    fn assert_near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found:e} instead of {expected:e}");
    }

    /// The relations that hold for the sum of parts that each have a free energy.
    #[test]
    fn the_parts_fulfil_the_relations_of_thermodynamics() {
        for (density, temperature) in [(3e6, 2e8), (2e9, 4e9), (1e4, 1e9), (1e7, 5e9)] {
            let here = state(density, temperature);
            let by_t = |of: fn(&State) -> f64| slope(|t| of(&state(density, t)), temperature);
            let by_d = |of: fn(&State) -> f64| slope(|d| of(&state(d, temperature)), density);
            assert_near(here.heat, by_t(|state| state.energy));
            // T·ds/dT = de/dT.
            assert_near(temperature * by_t(|state| state.entropy), here.heat);
            // ρ²·de/dρ = P − T·dP/dT.
            let pressure_t = by_t(|state| state.pressure);
            let expected = here.pressure - temperature * pressure_t;
            let found = density * density * by_d(|state| state.energy);
            assert!((found - expected).abs() < 1e-6 * here.pressure, "{found:e} instead of {expected:e}");
            // Γ along the line of constant entropy: dT/dρ = −(ds/dρ)/(ds/dT).
            let along = -by_d(|state| state.entropy) / by_t(|state| state.entropy);
            assert_near(here.gamma, density / here.pressure * (by_d(|state| state.pressure) + pressure_t * along));
        }
    }

    #[test]
    fn gamma_has_the_limits_of_slow_and_fast_gases() {
        let ideal = Matter { density: 1e-6, nucleons: 1.0, electrons: 1e-6 }.known_state(1e3);
        assert!((ideal.gamma - 5.0 / 3.0).abs() < 1e-3, "{ideal:?}");
        let light = Matter { density: 1.0, ..CARBON }.known_state(1e9);
        assert!((light.gamma - 4.0 / 3.0).abs() < 1e-3, "{light:?}");
        let fast = state(1e13, 1e7);
        assert!((fast.gamma - 4.0 / 3.0).abs() < 1e-2, "{fast:?}");
    }
}
