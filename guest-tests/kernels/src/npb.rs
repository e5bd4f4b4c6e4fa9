//! The NAS Parallel Benchmarks (NPB 3.x): EP, IS, CG and FT in the classes S, W, A, B and C.
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
//! | [`report`] | the phases and the result block as messages |
//!
//! Definitions, what is timed and the reference values are those of the NPB (Bailey et al., "The NAS Parallel Benchmarks", RNR-94-007, and
//! the NPB 3.4 release); Mop/s are counted by its formulas. The code is ours.

pub mod cg;
pub mod classes;
pub mod ep;
pub mod fourier;
pub mod ft;
pub mod is;
pub mod logarithm;
pub mod random;
pub mod report;
