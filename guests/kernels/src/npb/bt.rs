//! BT: the flow by implicit steps, which solve a block-tridiagonal system of 5 × 5 blocks along every line of x, then
//! y, then z.
//!
//! ```text
//!   rhs = dt · (forcing + L(u))         for every line along x, then y, then z:
//!   three sweeps, each overwrites rhs      Aᵢ·vᵢ₋₁ + Bᵢ·vᵢ + Cᵢ·vᵢ₊₁ = rhsᵢ      v = 0 on the faces
//!   u += rhs                               down: Cᵢ ← Bᵢ⁻¹·Cᵢ, rhsᵢ ← Bᵢ⁻¹·rhsᵢ      up: vᵢ = rhsᵢ − Cᵢ·vᵢ₊₁
//! ```
//!
//! Most of the time is in the blocks, which stay in the first-level cache. The sweeps along y and z reach the fields
//! with strides of a row and of a plane.

use core::slice;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::blocks::{
    Block, Left, State, beside_zero, eliminate, flux, identity, set_block, subtract_multiple, subtract_product,
    viscous, zero,
};
use super::classes::Class;
use super::flow::{COMPONENTS, Point};
use super::lines::{LineSolver, Lines, by_component, by_line};
use super::order::Order;
#[cfg(feature = "std")]
use super::reference;
use super::rhs::{Fields, QS, RHO_I, Sources, VELOCITY};
use super::steps::{self, Method, Problem};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::report;
use crate::vectors::NARROW;
use crate::{Arena, KernelError, Platform};

/// BT in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.bt"),
    summary: "NPB BT: a flow by block-tridiagonal solves along x, y and z",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER, Order::PARAMETER];

/// Scalars of each point: all but the speed of sound.
pub(super) const SCALARS: usize = 6;
/// Numbers that the way down stores for the way up at each point of the lines: C and the right-hand side.
const LEFT: usize = COMPONENTS * (COMPONENTS + 1) * NARROW;

const fn problem(class: Class) -> Problem {
    match class {
        Class::S => Problem {
            edge: 12,
            steps: 60,
            dt: 0.01,
            residual: [
                0.170_342_837_095_413_12,
                0.012_975_252_070_034_096,
                0.032_527_926_989_486_054,
                0.026_436_421_275_166_8,
                0.192_117_841_317_444_3,
            ],
            error: [
                0.000_499_769_133_458_115_8,
                4.519_566_678_296_193e-05,
                7.397_376_517_292_135e-05,
                7.382_123_863_243_973e-05,
                0.000_892_696_309_874_914_5,
            ],
        },
        Class::W => Problem {
            edge: 24,
            steps: 200,
            dt: 0.0008,
            residual: [112.559_040_934_4, 11.800_075_957_31, 27.103_297_678_46, 24.691_749_376_69, 263.842_787_431_7],
            error: [4.419_655_736_008, 0.463_853_126_000_2, 1.011_551_749_967, 0.923_587_872_994_4, 10.180_458_377_18],
        },
        Class::A => Problem {
            edge: 64,
            steps: 200,
            dt: 0.0008,
            residual: [
                108.063_467_146_372_64,
                11.319_730_901_220_813,
                25.974_354_511_582_465,
                23.665_622_544_678_91,
                252.789_632_117_483_45,
            ],
            error: [
                4.234_841_604_052_502_5,
                0.443_902_824_969_957,
                0.966_924_801_363_456_5,
                0.883_020_630_397_654_8,
                9.737_990_177_082_928,
            ],
        },
        Class::B => Problem {
            edge: 102,
            steps: 200,
            dt: 0.0003,
            residual: [
                1_423.359_722_928_725_4,
                99.330_522_590_150_24,
                356.460_256_445_352_85,
                324.854_479_590_840_9,
                3_270.754_125_465_936_3,
            ],
            error: [
                52.969_847_140_936_86,
                4.463_289_611_567_067,
                13.122_573_342_210_174,
                12.006_925_323_559_145,
                124.595_761_510_359_86,
            ],
        },
        Class::C => Problem {
            edge: 162,
            steps: 200,
            dt: 0.0001,
            residual: [
                6_239.811_655_176_461_5,
                507.932_391_904_239_64,
                1_542.353_009_301_359_6,
                1_330.238_792_929_119,
                11_604.087_428_436_455,
            ],
            error: [
                164.620_083_690_912_65,
                11.497_107_903_824_313,
                41.207_446_207_461_51,
                37.087_651_059_694_17,
                362.110_530_518_412_65,
            ],
        },
    }
}

const OPERATIONS: [f64; 4] = [3478.8, -17655.7, 28023.7, 0.0];

const fn method(order: Order) -> Method<SCALARS> {
    match order {
        Order::Fused => Method { order, operations: OPERATIONS, work: |grid| grid.edge * LEFT, step },
        #[cfg(feature = "std")]
        Order::Reference => Method {
            order,
            operations: OPERATIONS,
            work: |grid| grid.edge * reference::bt::WORK,
            step: reference::bt::step,
        },
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
    pub(super) u: &'a [Point],
    velocity: [&'a [f64]; 3],
    pub(super) qs: &'a [f64],
    pub(super) rho_i: &'a [f64],
    /// Factor of the flux, dt · t2.
    pub(super) first: f64,
    /// Factor of diffusion, dt · t1.
    pub(super) second: f64,
}

/// Contributions of a point to its own row of the system and to its neighbours'.
struct Blocks<const W: usize> {
    /// Block A of the next row.
    a: Block<W>,
    /// Block B of its own row.
    b: Block<W>,
    /// Block C of the previous row.
    c: Block<W>,
}

impl<'a, const AXIS: usize> System<'a, AXIS> {
    pub(super) fn new(sources: &Sources<'a, SCALARS>) -> Self {
        let Sources { grid, u, scalars, factors, .. } = sources;
        Self {
            edge: grid.edge,
            u,
            velocity: [scalars[VELOCITY], scalars[VELOCITY + 1], scalars[VELOCITY + 2]],
            qs: scalars[QS],
            rho_i: scalars[RHO_I],
            first: factors.first,
            second: factors.second,
        }
    }

    /// The blocks of the points at these places: the Jacobians of the flux along the axis and of the viscous terms.
    fn blocks<const W: usize>(&self, places: [usize; W]) -> Blocks<W> {
        let mut states = [State::default(); W];
        states.iter_mut().zip(places).for_each(|(state, place)| *state = self.state(place));
        let (flux, viscous) = (flux::<AXIS, _>(self.first, &states), viscous::<AXIS, _>(self.second, &states));
        let mut blocks = Blocks { a: zero(), b: identity(), c: zero() };
        for row in 0..COMPONENTS {
            for column in 0..COMPONENTS {
                let both = flux[row][column].into_iter().zip(viscous[row][column]);
                for (line, (flux, viscous)) in both.enumerate() {
                    blocks.a[row][column][line] = -flux - viscous;
                    blocks.b[row][column][line] += 2.0 * viscous;
                    blocks.c[row][column][line] = flux - viscous;
                }
            }
        }
        blocks
    }

    #[inline]
    fn state(&self, place: usize) -> State {
        let [u, v, w] = &self.velocity;
        State {
            velocity: [u[place], v[place], w[place]],
            qs: self.qs[place],
            rho_i: self.rho_i[place],
            energy: self.u[place][4] * self.rho_i[place],
        }
    }
}

impl<const AXIS: usize> LineSolver for System<'_, AXIS> {
    // Four lines' blocks do not fit into the registers.
    const LINES_MAX: usize = NARROW;

    /// Leaves B⁻¹·C and B⁻¹·rhs of each interior point. On the faces v = 0, so the row of the first face is
    /// arbitrary as long as it does not affect the next row, and C of the last row is arbitrary as well.
    fn down<const W: usize>(&self, lines: Lines, work: &mut [f64], rhs: impl Fn(usize) -> [Point; W]) {
        let left: &mut [Left<W>] = work.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0;
        let (mut a, mut b) = (zero(), identity());
        for index in 1..self.edge - 1 {
            let [.., last, here] = &mut left[..=index] else { unreachable!("there are at least two") };
            let blocks = self.blocks(lines.places::<W>(index));
            set_block(last, &blocks.c);
            eliminate(&mut b, last);
            *here = beside_zero(&by_component(rhs(index)));
            b = blocks.b;
            subtract_product(&mut b, here, &a, last);
            a = blocks.a;
        }
        eliminate(&mut b, &mut left[self.edge - 2]);
    }

    fn up<const W: usize>(&self, _: Lines, work: &[f64], mut store: impl FnMut(usize, [Point; W])) {
        let left: &[Left<W>] = work.as_chunks().0.as_chunks().0.as_chunks().0;
        let mut v = [[0.0; W]; COMPONENTS];
        for index in (1..self.edge - 1).rev() {
            v = left[index].each_ref().map(|row| {
                let [c @ .., rhs] = row;
                let mut rest = *rhs;
                c.iter()
                    .zip(&v)
                    .for_each(|(c, v)| subtract_multiple(slice::from_mut(&mut rest), c, slice::from_ref(v)));
                rest
            });
            store(index, by_line(&v));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    #[test]
    fn a_wrong_norm_is_found() {
        let mut words = vec![0; 1 << 16];
        let arena = Arena::from_words(&mut words);
        let mut wrong = problem(Class::S);
        wrong.error[2] *= 1.0 + 1e-7;
        let end = native::run(1, 0, Box::new(|_| ()), |platform| method(Order::Fused).run(platform, &arena, &wrong));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 10 })), "{end:?}");
    }
}
