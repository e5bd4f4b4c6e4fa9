//! The gas of electrons, in closed form: its free energy, and what else the table has, with all derivatives.
//!
//! ```text
//!   cold      E·15/16·(√(1 + 16/25·y) − 1)     energy of electrons that no heat moves      y = (ρ/ρ₁)^(2/3)
//!   thermal   −3/2·R·T·ln(1 + T/θ)             θ = 6/π²·T₁·(√(1 + y) − 1)                  T₁ = E/R
//! ```
//!
//! ρ counts grams of matter with one electron per nucleon, E is the electrons' rest energy per gram of it, and ρ₁ the
//! density at which the fastest cold electron has the momentum mc. The cold term is 3/5 of the Fermi energy at low
//! density and 3/4 at high density, both exactly. The thermal energy, 3/2·R·T²/(T + θ), is Sommerfeld's π²/4·R·T²/T_F
//! for T ≪ θ, and that of an ideal gas for T ≫ θ. Both are simpler than the Fermi integrals of real electrons, and have
//! their limits. So every entry of the table, and every result that the table gives, can be checked.
//!
//! Number of electrons and positrons: √((N·ρ)² + 4·Q²), with Q = 2·(mkT/2πħ²)^(3/2)·exp(−T₁/T): their difference is
//! that of the matter, their product that of pairs in equilibrium.
//!
//! Units are those of astrophysics: gram, centimetre, erg, kelvin.

/// Gas constant in erg/(g·K), for matter of one gram per mole.
pub const GAS: f64 = 8.314_462_618e7;
/// Nucleons of a gram.
const AVOGADRO: f64 = 6.022_140_76e23;
/// Rest energy of the electrons of a gram, in erg: N·mc².
const REST_ENERGY: f64 = AVOGADRO * 8.187_105_776_9e-7;
/// Temperature of an electron's rest energy, mc²/k, in K.
const REST_TEMPERATURE: f64 = REST_ENERGY / GAS;
/// Density at which the fastest cold electron has the momentum mc, in g/cm³: 1/(3·π²·N) of a cubed reduced Compton
/// wavelength each.
const RELATIVISTIC_DENSITY: f64 = 9.739_1e5;
/// Scale of the thermal term's temperature: 6/π², by which its energy is Sommerfeld's.
const DEGENERATE: f64 = 6.0 / (core::f64::consts::PI * core::f64::consts::PI);
/// Heat of an ideal gas, in units of R.
const THERMAL: f64 = 1.5 * GAS;
/// Factors of the cold term.
const COLD_ENERGY: f64 = REST_ENERGY * 15.0 / 16.0;
const COLD_SQUARE: f64 = 16.0 / 25.0;
/// 2·(mk/2πħ²)^(3/2) in 1/(cm³·K^(3/2)).
const PAIRS: f64 = 2.0 * 2.414_683e15;

/// Everything that depends on the density alone.
#[derive(Clone, Copy, Debug)]
pub struct AtDensity {
    density: f64,
    /// The cold term and its derivatives by the density.
    cold: [f64; 4],
    /// θ and its derivatives.
    theta: [f64; 4],
}

/// Everything that depends on the temperature alone.
#[derive(Clone, Copy, Debug)]
pub struct AtTemperature {
    temperature: f64,
    /// Q and its derivative.
    pairs: [f64; 2],
}

/// The gas at one density and temperature.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Free energy per gram, `[by density][by temperature]`: the derivatives to the second of each.
    pub free: [[f64; 3]; 3],
    /// dP/dρ, and its derivatives to the first of each.
    pub stiffness: [[f64; 2]; 2],
    /// Chemical potential in units of kT, and its derivatives.
    pub potential: [[f64; 2]; 2],
    /// Electrons and positrons per cm³, and their derivatives.
    pub number: [[f64; 2]; 2],
}

impl AtDensity {
    /// The gas at a density in g/cm³.
    pub fn new(density: f64) -> Self {
        Self {
            density,
            cold: root(density, COLD_SQUARE).map(|term| COLD_ENERGY * term),
            theta: root(density, 1.0).map(|term| DEGENERATE * REST_TEMPERATURE * term),
        }
    }
}

impl AtTemperature {
    /// The gas at a temperature in K.
    pub fn new(temperature: f64) -> Self {
        let of_rest = REST_TEMPERATURE / temperature;
        let pairs = PAIRS * temperature * libm::sqrt(temperature) * libm::exp(-of_rest);
        Self { temperature, pairs: [pairs, pairs * (1.5 + of_rest) / temperature] }
    }
}

/// √(1 + square·y) − 1 with y = (ρ/ρ₁)^(2/3), and its first three derivatives by ρ. No difference of nearly equal
/// numbers is formed, so all digits are right at the lowest density too.
fn root(density: f64, square: f64) -> [f64; 4] {
    let third = libm::cbrt(density / RELATIVISTIC_DENSITY);
    let y = third * third;
    let y1 = y / density * (2.0 / 3.0);
    let y2 = y1 / density * (-1.0 / 3.0);
    let y3 = y2 / density * (-4.0 / 3.0);
    let s = libm::sqrt(1.0 + square * y);
    let by_y1 = square / (2.0 * s);
    let by_y2 = -square * by_y1 / (2.0 * s * s);
    let by_y3 = -3.0 * square * by_y2 / (2.0 * s * s);
    [
        square * y / (s + 1.0),
        by_y1 * y1,
        by_y2 * y1 * y1 + by_y1 * y2,
        by_y3 * y1 * y1 * y1 + 3.0 * by_y2 * y1 * y2 + by_y1 * y3,
    ]
}

/// The thermal term, `[by θ][by T]`.
fn thermal(theta: f64, t: f64) -> [[f64; 3]; 4] {
    let k = THERMAL;
    let w = theta + t;
    let (w2, w3, theta2) = (w * w, w * w * w, theta * theta);
    let log = libm::log1p(t / theta);
    let by_theta3 = 2.0 * k * t * t * (w2 + w * theta + theta2) / (theta2 * theta * w3);
    [
        [-k * t * log, -k * (log + t / w), -k * (theta + w) / w2],
        [k * t * t / (theta * w), k * t * (theta + w) / (theta * w2), 2.0 * k * theta / w3],
        [
            -k * t * t * (theta + w) / (theta2 * w2),
            -k * t * (4.0 * theta2 + 3.0 * theta * t + t * t) / (theta2 * w3),
            2.0 * k * (t - 2.0 * theta) / (w2 * w2),
        ],
        [by_theta3, by_theta3 / t + 6.0 * k * t / (w2 * w2), 0.0],
    ]
}

impl Point {
    /// The gas at a density and a temperature.
    pub fn new(at_density: &AtDensity, at_temperature: &AtTemperature) -> Self {
        let AtDensity { density, cold, theta } = *at_density;
        let AtTemperature { temperature, pairs } = *at_temperature;
        let of_theta = thermal(theta[0], temperature);
        // The chain rule, from θ to the density. The third derivative is needed to the first by temperature.
        let mut by_density = [[0.0; 3]; 4];
        for by_temperature in 0..3 {
            let h = |order: usize| of_theta[order][by_temperature];
            by_density[0][by_temperature] = h(0);
            by_density[1][by_temperature] = h(1) * theta[1];
            by_density[2][by_temperature] = h(2) * theta[1] * theta[1] + h(1) * theta[2];
            by_density[3][by_temperature] =
                h(3) * theta[1] * theta[1] * theta[1] + 3.0 * h(2) * theta[1] * theta[2] + h(1) * theta[3];
        }
        for (sum, cold) in by_density.iter_mut().zip(cold) {
            sum[0] += cold;
        }
        let [f0, f1, f2, f3] = by_density;
        // P = ρ²·df/dρ, so dP/dρ = 2·ρ·df/dρ + ρ²·d²f/dρ².
        let stiffness = |t: usize| 2.0 * density * f1[t] + density * density * f2[t];
        let stiffness_slope = |t: usize| 2.0 * f1[t] + 4.0 * density * f2[t] + density * density * f3[t];
        // The chemical potential of a mole is f + ρ·df/dρ.
        let rt = GAS * temperature;
        let potential = (f0[0] + density * f1[0]) / rt;
        let potential_slope = (2.0 * f1[0] + density * f2[0]) / rt;
        let [pairs, pairs_slope] = pairs;
        let of_matter = AVOGADRO * density;
        let number = libm::sqrt(of_matter * of_matter + 4.0 * pairs * pairs);
        let (number_d, number_t) = (AVOGADRO * of_matter / number, 4.0 * pairs * pairs_slope / number);
        Self {
            free: [f0, f1, f2],
            stiffness: [[stiffness(0), stiffness(1)], [stiffness_slope(0), stiffness_slope(1)]],
            potential: [
                [potential, (f0[1] + density * f1[1]) / rt - potential / temperature],
                [potential_slope, (2.0 * f1[1] + density * f2[1]) / rt - potential_slope / temperature],
            ],
            number: [[number, number_t], [number_d, -number_d * number_t / number]],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Densities and temperatures over the whole table.
    const PLACES: [(f64, f64); 7] =
        [(1e-9, 1e4), (1.0, 1e5), (1e4, 3e9), (2e6, 1e7), (1e9, 1e9), (3e12, 1e11), (1e-3, 1e10)];

    fn point(density: f64, temperature: f64) -> Point {
        Point::new(&AtDensity::new(density), &AtTemperature::new(temperature))
    }

    /// Derivative by a symmetric difference of both neighbours, relative step 10⁻⁴: its error is about 10⁻⁸ of the
    /// third derivative's scale.
    fn slope(of: impl Fn(f64) -> f64, at: f64) -> f64 {
        let step = 1e-4 * at;
        let difference = |steps: f64| (of(at + steps * step) - of(at - steps * step)) / (2.0 * steps * step);
        (4.0 * difference(1.0) - difference(2.0)) / 3.0
    }

    #[track_caller]
    fn assert_near(found: f64, expected: f64, scale: f64, what: &str) {
        let error = (found - expected).abs() / expected.abs().max(scale);
        assert!(error < 1e-7, "{what}: {found:e} instead of {expected:e}");
    }

    #[test]
    fn every_derivative_is_the_slope_of_the_one_before() {
        for (d, t) in PLACES {
            let here = point(d, t);
            for order in 0..3 {
                for next in 0..2 {
                    let what = std::format!("free energy at {d:e}, {t:e}, orders {order} and {next}");
                    let (by_d, by_t) =
                        (slope(|d| point(d, t).free[next][order], d), slope(|t| point(d, t).free[order][next], t));
                    let (size_d, size_t) = (here.free[next][order].abs() / d, here.free[order][next].abs() / t);
                    assert_near(here.free[next + 1][order], by_d, 1e-3 * size_d, &what);
                    assert_near(here.free[order][next + 1], by_t, 1e-3 * size_t, &what);
                }
            }
            for (name, of) in [
                ("stiffness", (|point| point.stiffness) as fn(Point) -> [[f64; 2]; 2]),
                ("potential", |point| point.potential),
                ("number", |point| point.number),
            ] {
                let what = std::format!("{name} at {d:e}, {t:e}");
                let [[value, by_t], [by_d, by_both]] = of(here);
                let (size_d, size_t) = (1e-3 * (value / d).abs(), 1e-3 * (value / t).abs());
                assert_near(by_d, slope(|d| of(point(d, t))[0][0], d), size_d, &what);
                assert_near(by_t, slope(|t| of(point(d, t))[0][0], t), size_t, &what);
                let both = slope(|d| of(point(d, t))[0][1], d);
                assert_near(by_both, both, 1e-3 * (by_t / d).abs().max((by_d / t).abs()), &what);
            }
        }
    }

    #[test]
    fn the_stiffness_is_the_slope_of_the_pressure() {
        for (d, t) in PLACES {
            let pressure = |d: f64| d * d * point(d, t).free[1][0];
            assert_near(point(d, t).stiffness[0][0], slope(pressure, d), 0.0, "dP/dρ");
        }
    }

    #[test]
    fn the_limits_are_those_of_electrons() {
        // Cold and slow: the pressure is 2/5 of the Fermi energy's. Cold and fast: 1/4.
        let fermi = |d: f64| REST_ENERGY * root(d, 1.0)[0];
        for (d, share) in [(1e-3, 0.4), (1e14, 0.25)] {
            let pressure = d * point(d, 1e-6 * REST_TEMPERATURE * root(d, 1.0)[0]).free[1][0];
            assert!((pressure / fermi(d) / share - 1.0).abs() < 3e-3, "{d:e}: {}", pressure / fermi(d));
        }
        // Hot and thin: P = ρ·R·T, and a heat of 3/2·R.
        let hot = point(1e-6, 1e7);
        assert!((1e-6 * hot.free[1][0] / (GAS * 1e7) - 1.0).abs() < 1e-4);
        assert!((-1e7 * hot.free[0][2] / (1.5 * GAS) - 1.0).abs() < 1e-4);
        // Far below the rest energy there are no pairs, far above it hardly anything else.
        assert_eq!(point(1.0, 1e6).number[0][0], AVOGADRO);
        assert!(point(1.0, 1e10).number[0][0] > 1e5 * AVOGADRO);
    }
}
