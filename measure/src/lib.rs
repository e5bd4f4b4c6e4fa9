//! Common parts of all measurements: experiments, scenario benches and the demo.
//!
//! ```text
//!   order: which arm runs next ──▶ (a run) ──▶ values by round ──▶ statistics: ratios, median, 95 % interval
//!   environment: the machine ────────────────────────────────────▶ beside every result
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`order`] | order of the arms within a round |
//! | [`statistics`] | ratios of pairs, medians and their intervals |
//! | [`environment`] | the machine of a measurement |

pub mod environment;
pub mod order;
pub mod statistics;
