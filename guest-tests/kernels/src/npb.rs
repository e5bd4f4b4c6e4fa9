//! The NAS Parallel Benchmarks (NPB 3.x): EP, IS, CG, MG and LU in the classes S, W, A, B and C.
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
//! | [`mg`] | multigrid: stencils of 27 points on grids of many sizes |
//! | [`lu`] | relaxation of a flow: sweeps that need three neighbours |
//! | [`flow`] | the flow that BT, SP and LU compute: operator, known solution, norms |
//! | [`report`] | the phases and the result block as messages; other kernels use it too |
//!
//! Definitions, what is timed and the reference values are those of the NPB (Bailey et al., "The NAS Parallel Benchmarks", RNR-94-007, and
//! the NPB 3.4 release); Mop/s are counted by its formulas. The code is ours.

pub use crate::report;

pub mod cg;
pub mod classes;
pub mod ep;
pub mod flow;
pub mod is;
pub mod logarithm;
pub mod lu;
pub mod mg;
pub mod random;
