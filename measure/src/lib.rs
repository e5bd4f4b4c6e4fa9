//! Common parts of all measurements: experiments, scenario benches and the demo.
//!
//! ```text
//!   order: next arm ─▶ (a run) ─▶ values by round ─▶ statistics: ratios, median, 95 % interval ─▶ figures, tables
//!   environment: the machine ──────────────────────────────────────────────────────────────────▶ beside every result
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`order`] | order of the arms within a round |
//! | [`statistics`] | ratios of pairs, medians and their intervals |
//! | [`event_times`] | times to an event that some rounds do not reach |
//! | [`environment`] | the machine of a measurement |
//! | [`table`] | a table with typed cells, and its text form |
//! | [`figures`] | a bench's result: tables, targets, notes and the machine |

pub mod environment;
pub mod event_times;
pub mod figures;
pub mod order;
pub mod statistics;
pub mod table;
