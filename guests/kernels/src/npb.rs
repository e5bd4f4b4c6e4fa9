//! The NAS Parallel Benchmarks (NPB 3.x): BT, CG, EP, FT, IS, LU, MG and SP in the classes S, W, A, B and C.
//!
//! ```text
//!   class=A ─▶ problem ─▶ Layout ─ too little RAM? ─▶ init ─▶ compute (timed) ─▶ verify ─▶ results
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`classes`] | the sizes of a problem |
//! | [`random`] | the generator that all of them share |
//! | [`logarithm`] | the natural logarithm, in lanes |
//! | [`ep`] | pairs of Gaussian deviates: arithmetic, hardly any memory |
//! | [`is`] | ranking integers: random increments of a table |
//! | [`cg`] | conjugate gradients on a random sparse matrix: gathers from a vector |
//! | [`ft`] | a partial differential equation by Fourier transforms of a cube: strides of a row and of a plane |
//! | [`fourier`] | the transforms of blocks of lines |
//! | [`mg`] | multigrid: stencils of 27 points on grids of many sizes |
//! | [`lu`] | relaxation of a flow: sweeps that need three neighbours |
//! | [`bt`] | the flow by block-tridiagonal solves along x, y and z |
//! | [`sp`] | the flow by scalar pentadiagonal solves along x, y and z |
//! | [`blocks`] | Jacobians of the flow and elimination, for BT and LU |
//! | [`flow`] | the flow that BT, SP and LU compute: operator, known solution, norms |
//! | [`rhs`] | fields and right-hand side of BT and SP |
//! | [`steps`] | a run of BT or SP |
//! | [`order`] | fused sweeps, or the reference's separate ones |
//! | [`mod@reference`] | the sweeps of the reference |
//! | [`lines`] | neighbouring lines of points, solved side by side |
//!
//! Definitions, what is timed and the reference values are those of the NPB (Bailey et al., "The NAS Parallel
//! Benchmarks", RNR-94-007, and the NPB 3.4 release); Mop/s are counted by its formulas. The code is ours.

pub mod blocks;
pub mod bt;
pub mod cg;
pub mod classes;
pub mod ep;
pub mod flow;
pub mod fourier;
pub mod ft;
pub mod is;
pub mod lines;
pub mod logarithm;
pub mod lu;
pub mod mg;
pub mod order;
pub mod random;
#[cfg(feature = "std")]
pub mod reference;
pub mod rhs;
pub mod sp;
pub mod steps;
