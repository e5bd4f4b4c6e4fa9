//! SP: the flow by implicit steps with systems that are diagonal in the components: scalar pentadiagonal systems
//! along every line of x, then y, then z.
//!
//! ```text
//!   rhs = dt · (forcing + L(u))
//!   to the waves along x ─▶ x lines ─▶ along y ─▶ y lines ─▶ along z ─▶ z lines ─▶ back to u      each overwrites rhs
//!   u += rhs
//!
//!   a line, for each of its waves:   a·vᵢ₋₂ + b·vᵢ₋₁ + c·vᵢ + d·vᵢ₊₁ + e·vᵢ₊₂ = rhsᵢ             v = 0 on the faces
//! ```
//!
//! Along an axis with velocity V and speed of sound c there are waves of the speeds V (three of them), V + c and V
//! − c. SP has less arithmetic than BT and as much memory; the lines along y and z reach it with strides of a row
//! and of a plane.

use core::f64::consts::FRAC_1_SQRT_2;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::flow::{C1C5, C2, C3C4, COMPONENTS, DIFFUSION, OWN_AXIS, Point, damping_weights};
use super::lines::{Lanes, LineSolver, Lines, by_component, by_line};
use super::order::Order;
#[cfg(feature = "std")]
use super::reference;
use super::rhs::{Fields, QS, RHO_I, SPEED, Sources, VELOCITY};
use super::steps::{self, Method, Problem};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::report;
use crate::vectors::WIDE;
use crate::{Arena, KernelError, Platform};

/// SP in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.sp"),
    summary: "NPB SP: a flow by scalar pentadiagonal solves along x, y and z",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER, Order::PARAMETER];

/// Number of scalars of each point.
pub(super) const SCALARS: usize = SPEED + 1;
/// Number of different wave speeds, each with its own system.
const SYSTEMS: usize = 3;
/// Index of the system that a component belongs to.
const SYSTEM_OF: [usize; COMPONENTS] = [0, 0, 0, 1, 2];

const fn problem(class: Class) -> Problem {
    match class {
        Class::S => Problem {
            edge: 12,
            steps: 100,
            dt: 0.015,
            residual: [
                0.027_470_315_451_339_48,
                0.010_360_746_705_285_417,
                0.016_235_745_065_095_532,
                0.015_840_557_224_455_615,
                0.034_849_040_609_362_46,
            ],
            error: [
                2.728_925_855_737_722_5e-05,
                1.036_444_664_083_728_5e-05,
                1.615_479_828_716_647e-05,
                1.575_070_499_448_01e-05,
                3.417_766_618_339_053e-05,
            ],
        },
        Class::W => Problem {
            edge: 36,
            steps: 400,
            dt: 0.0015,
            residual: [
                0.001_893_253_733_584,
                0.000_171_707_544_777_5,
                0.000_277_815_335_093_6,
                0.000_288_747_540_998_4,
                0.003_143_611_161_242,
            ],
            error: [
                7.542_088_599_534e-05,
                6.512_852_253_086e-06,
                1.049_092_285_688e-05,
                1.128_838_671_535e-05,
                0.000_121_284_563_977_3,
            ],
        },
        Class::A => Problem {
            edge: 64,
            steps: 400,
            dt: 0.0015,
            residual: [
                2.479_982_239_930_019_5,
                1.127_633_796_436_883_2,
                1.502_897_788_877_049_2,
                1.421_781_621_169_518,
                2.129_211_303_513_828,
            ],
            error: [
                0.000_109_001_402_978_205_5,
                3.734_395_176_928_209e-05,
                5.009_278_540_654_163e-05,
                4.767_109_393_952_825e-05,
                0.000_136_216_133_992_13,
            ],
        },
        Class::B => Problem {
            edge: 102,
            steps: 400,
            dt: 0.001,
            residual: [69.032_935_799_98, 30.951_344_880_84, 41.033_366_470_17, 38.647_690_096_04, 56.434_822_725_96],
            error: [
                0.009_810_006_190_188,
                0.001_022_827_905_67,
                0.001_720_597_911_692,
                0.001_694_479_428_231,
                0.018_474_562_639_81,
            ],
        },
        Class::C => Problem {
            edge: 162,
            steps: 400,
            dt: 0.00067,
            residual: [588.169_158_182_9, 245.441_760_356_9, 329.382_919_185_1, 308.192_497_189_1, 459.722_379_917_6],
            error: [
                0.259_812_050_018_3,
                0.025_908_889_223_15,
                0.051_328_864_163_2,
                0.048_060_734_194_54,
                0.548_337_749_130_1,
            ],
        },
    }
}

const OPERATIONS: [f64; 4] = [881.174, -4683.91, 11484.5, -19272.4];

const fn method(order: Order) -> Method<SCALARS> {
    match order {
        Order::Fused => Method { order, operations: OPERATIONS, work: |grid| grid.edge * LEFT * WIDE, step },
        #[cfg(feature = "std")]
        Order::Reference => {
            Method { order, operations: OPERATIONS, work: reference::sp::work, step: reference::sp::step }
        }
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let method = method(Order::from_parameters(parameters)?);
    Ok(method.memory(&problem(Class::from_parameters(parameters)?), vcpus))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let method = method(Order::from_parameters(parameters)?);
    let problem = problem(class);
    report::problem(platform, class, &[problem.edge; 3], problem.steps);
    method.run(platform, arena, &problem)
}

fn step(platform: &dyn Platform, fields: &mut Fields<'_, SCALARS>, dt: f64, work: &mut [f64]) {
    fields.derive(platform);
    let (sources, rhs) = fields.for_step(dt);
    let along_x = System::<0>::new(&sources);
    let along_y = System::<1>::new(&sources);
    let along_z = System::<2>::new(&sources);
    steps::sweep(platform, &sources, rhs, work, (&along_x, &along_y, &along_z));
    fields.advance(platform);
}

/// The systems of the lines along an axis.
pub(super) struct System<'a, const AXIS: usize> {
    pub(super) edge: usize,
    pub(super) velocity: [&'a [f64]; 3],
    qs: &'a [f64],
    pub(super) rho_i: &'a [f64],
    pub(super) speed: &'a [f64],
    /// Factor of the speeds, dt · t2.
    pub(super) first: f64,
    /// Factor of the diffusion, dt · t1.
    pub(super) second: f64,
    /// Factor of the damping.
    pub(super) damping: f64,
}

/// Contributions of points to the systems.
#[derive(Clone, Copy)]
struct Waves<const W: usize> {
    /// Wave speeds of each system.
    speeds: [Lanes<W>; SYSTEMS],
    diffusion: Lanes<W>,
}

impl<const W: usize> Waves<W> {
    const NONE: Self = Self { speeds: [[0.0; W]; SYSTEMS], diffusion: [0.0; W] };
}

// With the flow's constants the energy always diffuses most: its factor of 1/ρ is the largest.
const _: () = assert!(C1C5 >= OWN_AXIS && C1C5 >= 1.0);

/// A row after the way down: d, e and right-hand sides, divided by c.
type Left<const W: usize> = [Lanes<W>; LEFT];
/// Index of the systems' d in a row.
const D: usize = 0;
/// Index of the systems' e in a row.
const E: usize = SYSTEMS;
/// Index of the right-hand sides in a row.
const RHS: usize = 2 * SYSTEMS;
const LEFT: usize = RHS + COMPONENTS;

impl<'a, const AXIS: usize> System<'a, AXIS> {
    pub(super) fn new(sources: &Sources<'a, SCALARS>) -> Self {
        let Sources { grid, scalars, factors, .. } = sources;
        Self {
            edge: grid.edge,
            velocity: [scalars[VELOCITY], scalars[VELOCITY + 1], scalars[VELOCITY + 2]],
            qs: scalars[QS],
            rho_i: scalars[RHO_I],
            speed: scalars[SPEED],
            first: factors.first,
            second: factors.second,
            damping: sources.factors.damping,
        }
    }

    #[inline(always)]
    fn waves<const W: usize>(&self, places: [usize; W]) -> Waves<W> {
        let mut waves = Waves::NONE;
        for (line, place) in places.into_iter().enumerate() {
            let velocity = self.first * self.velocity[AXIS][place];
            let sound = self.first * self.speed[place];
            waves.speeds[0][line] = velocity;
            waves.speeds[1][line] = velocity + sound;
            waves.speeds[2][line] = velocity - sound;
            // The NPB takes the largest diffusion of any component.
            waves.diffusion[line] = self.second * (DIFFUSION[AXIS] + C1C5 * C3C4 * self.rho_i[place]);
        }
        waves
    }

    /// Eliminates the two points before from a row, which has only right-hand sides yet. `waves` are those of the
    /// point before, here and behind.
    #[inline(always)]
    fn eliminate<const W: usize>(
        &self,
        index: usize,
        row: &mut Left<W>,
        waves: &[Waves<W>; 3],
        two_before: &Left<W>,
        before: &Left<W>,
    ) {
        let weights = damping_weights(index, self.edge).map(|weight| self.damping * weight);
        let mut scales = [[0.0; W]; SYSTEMS];
        let mut bs = scales;
        for system in 0..SYSTEMS {
            for line in 0..W {
                let b = weights[1]
                    - waves[0].speeds[system][line]
                    - waves[0].diffusion[line]
                    - weights[0] * two_before[D + system][line];
                let c = 1.0 + weights[2] + 2.0 * waves[1].diffusion[line]
                    - weights[0] * two_before[E + system][line]
                    - b * before[D + system][line];
                let d = weights[3] + waves[2].speeds[system][line]
                    - waves[2].diffusion[line]
                    - b * before[E + system][line];
                let scale = 1.0 / c;
                row[D + system][line] = d * scale;
                row[E + system][line] = weights[4] * scale;
                bs[system][line] = b;
                scales[system][line] = scale;
            }
        }
        for (m, system) in SYSTEM_OF.into_iter().enumerate() {
            for line in 0..W {
                let known = weights[0] * two_before[RHS + m][line] + bs[system][line] * before[RHS + m][line];
                row[RHS + m][line] = (row[RHS + m][line] - known) * scales[system][line];
            }
        }
    }

    /// Input of the lines: along x the waves are computed here; along y and z the lines before have computed them.
    #[inline(always)]
    fn enter(&self, place: usize, rhs: Point) -> Point {
        if AXIS == 0 { self.waves_along_x(place, rhs) } else { rhs }
    }

    /// Output of the lines: the waves along the next axis, after z the change of u.
    #[inline(always)]
    pub(super) fn leave(&self, place: usize, v: Point) -> Point {
        match AXIS {
            0 => waves_from_x_to_y(v),
            1 => waves_from_y_to_z(v),
            _ => self.change_from_z(place, v),
        }
    }

    /// The NPB's txinvr: change of variables before x.
    #[inline(always)]
    pub(super) fn waves_along_x(&self, place: usize, [r1, r2, r3, r4, r5]: Point) -> Point {
        let [u, v, w] = [self.velocity[0][place], self.velocity[1][place], self.velocity[2][place]];
        let (rho_i, speed) = (self.rho_i[place], self.speed[place]);
        let t1 = C2 / (speed * speed) * (self.qs[place] * r1 - u * r2 - v * r3 - w * r4 + r5);
        let t2 = FRAC_1_SQRT_2 * rho_i * (u * r1 - r2);
        let t3 = FRAC_1_SQRT_2 * rho_i * speed * t1;
        [r1 - t1, -rho_i * (w * r1 - r4), rho_i * (v * r1 - r3), t3 - t2, t3 + t2]
    }

    /// The NPB's tzetar: change of variables after z.
    #[inline(always)]
    fn change_from_z(&self, place: usize, [r1, r2, r3, r4, r5]: Point) -> Point {
        let [u, v, w] = [self.velocity[0][place], self.velocity[1][place], self.velocity[2][place]];
        let (rho_i, speed) = (self.rho_i[place], self.speed[place]);
        let rho_per_speed = 1.0 / (rho_i * speed);
        let rho = rho_per_speed * speed;
        let t1 = FRAC_1_SQRT_2 * rho_per_speed * (r4 + r5);
        let t2 = r3 + t1;
        let t3 = FRAC_1_SQRT_2 * rho * (r4 - r5);
        let energy = rho * (v * r1 - u * r2) + self.qs[place] * t2 + (1.0 / C2) * speed * speed * t1 + w * t3;
        [t2, u * t2 - rho * r2, v * t2 + rho * r1, w * t2 + t3, energy]
    }
}

impl<const AXIS: usize> LineSolver for System<'_, AXIS> {
    const LINES_MAX: usize = WIDE;

    #[inline(always)]
    fn down<const W: usize>(&self, lines: Lines, work: &mut [f64], rhs: impl Fn(usize) -> [Point; W]) {
        let left: &mut [Left<W>] = work.as_chunks_mut().0.as_chunks_mut().0;
        // The two rows before the first.
        left[..2].fill([[0.0; W]; LEFT]);
        // All inputs of the lines are loaded first: loads that miss the cache then overlap, and do not wait for the
        // elimination.
        for index in 1..self.edge - 1 {
            let mut points = rhs(index);
            for (point, place) in points.iter_mut().zip(lines.places::<W>(index)) {
                *point = self.enter(place, *point);
            }
            left[index + 1][RHS..].copy_from_slice(&by_component(points));
        }
        let waves = |index| self.waves(lines.places::<W>(index));
        let mut three = [Waves::NONE, waves(0), waves(1)];
        // On the faces v = 0: they contribute nothing to the rows behind, nor the last one to the row before.
        for index in 1..self.edge - 1 {
            three = [three[1], three[2], waves(index + 1)];
            let [.., two_before, before, row] = &mut left[..index + 2] else { unreachable!("there are three") };
            self.eliminate(index, row, &three, two_before, before);
        }
    }

    #[inline(always)]
    fn up<const W: usize>(&self, lines: Lines, work: &[f64], mut store: impl FnMut(usize, [Point; W])) {
        let left: &[Left<W>] = work.as_chunks().0.as_chunks().0;
        let (mut behind, mut two_behind) = ([[0.0; W]; COMPONENTS], [[0.0; W]; COMPONENTS]);
        for index in (1..self.edge - 1).rev() {
            let row = &left[index + 1];
            let mut v = behind;
            for (m, system) in SYSTEM_OF.into_iter().enumerate() {
                for line in 0..W {
                    v[m][line] = row[RHS + m][line]
                        - row[D + system][line] * behind[m][line]
                        - row[E + system][line] * two_behind[m][line];
                }
            }
            let mut points = by_line(&v);
            points
                .iter_mut()
                .zip(lines.places::<W>(index))
                .for_each(|(point, place)| *point = self.leave(place, *point));
            store(index, points);
            (two_behind, behind) = (behind, v);
        }
    }
}

/// The NPB's ninvr: change of variables from x to y.
#[inline(always)]
fn waves_from_x_to_y([r1, r2, r3, r4, r5]: Point) -> Point {
    let (t1, t2) = (FRAC_1_SQRT_2 * r3, 0.5 * (r4 + r5));
    [-r2, r1, FRAC_1_SQRT_2 * (r4 - r5), t2 - t1, t2 + t1]
}

/// The NPB's pinvr: change of variables from y to z.
#[inline(always)]
fn waves_from_y_to_z([r1, r2, r3, r4, r5]: Point) -> Point {
    let (t1, t2) = (FRAC_1_SQRT_2 * r1, 0.5 * (r4 + r5));
    [FRAC_1_SQRT_2 * (r4 - r5), -r3, r2, t2 - t1, t2 + t1]
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::super::flow::Grid;
    use super::super::lines::solve_plane;
    use super::super::rhs::FieldPlaces;
    use super::*;
    use crate::arena::Layout;
    use crate::native;
    use crate::vectors::NARROW;

    /// The system of a line of one point.
    fn system<const AXIS: usize>(scalars: &[[f64; 1]; SCALARS]) -> System<'_, AXIS> {
        let [u, v, w, qs, rho_i, _, speed] = scalars.each_ref().map(|scalar| scalar.as_slice());
        System { edge: 1, velocity: [u, v, w], qs, rho_i, speed, first: 1.0, second: 1.0, damping: 1.0 }
    }

    #[test]
    fn changing_to_the_waves_of_each_axis_and_back_changes_nothing() {
        let (velocity, rho_i, speed) = ([0.3_f64, -0.2, 0.7], 0.8, 1.1);
        let qs = velocity.map(|v| v * v).iter().sum::<f64>() / 2.0;
        let scalars = [[velocity[0]], [velocity[1]], [velocity[2]], [qs], [rho_i], [qs / rho_i], [speed]];
        let before = [1.0, -2.0, 3.0, 0.5, 7.0];
        let waves = system::<0>(&scalars).enter(0, before);
        let waves = system::<0>(&scalars).leave(0, waves);
        let waves = system::<1>(&scalars).leave(0, system::<1>(&scalars).enter(0, waves));
        let after = system::<2>(&scalars).leave(0, system::<2>(&scalars).enter(0, waves));
        assert!(before.iter().zip(after).all(|(before, after)| (before - after).abs() < 1e-13), "{after:?}");
    }

    #[test]
    fn four_lines_at_once_give_the_same_bits_as_two() {
        let grid = Grid { edge: 12 };
        let mut words = vec![0; 1 << 16];
        let arena = Arena::from_words(&mut words);
        let mut layout = Layout::at(arena.address());
        let places = FieldPlaces::<SCALARS>::new(&mut layout, &grid, Order::Fused);
        let mut typed = arena.typed(&layout).expect("512 KiB hold 22 numbers for each of 2028 places");
        let mut fields = places.take(&mut typed, grid);
        native::run(1, 0, Box::new(|_| ()), |platform| fields.start(platform));
        native::run(1, 0, Box::new(|_| ()), |platform| fields.derive(platform));
        let (sources, _) = fields.for_step(0.1);
        let system = System::<0>::new(&sources);
        let solved = |solve: &dyn Fn(&mut [Point], &mut [f64])| {
            let mut plane = vec![[1.0, 2.0, -3.0, 0.5, 4.0]; grid.plane()];
            solve(&mut plane, &mut vec![0.0; grid.edge * LEFT * WIDE]);
            plane
        };
        let four = solved(&|plane, work| solve_plane::<0, WIDE>(&grid, &system, 5, plane, work));
        let two = solved(&|plane, work| solve_plane::<0, NARROW>(&grid, &system, 5, plane, work));
        assert_eq!(four, two);
    }

    #[test]
    fn a_wrong_norm_is_found() {
        let mut words = vec![0; 1 << 16];
        let arena = Arena::from_words(&mut words);
        let mut wrong = problem(Class::S);
        wrong.residual[4] *= 1.0 - 1e-7;
        let end = native::run(1, 0, Box::new(|_| ()), |platform| method(Order::Fused).run(platform, &arena, &wrong));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 10 })), "{end:?}");
    }
}
