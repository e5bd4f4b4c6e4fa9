//! What policies decide, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod audit;
mod geometry;
mod giants;
mod invariants;
mod memory_short;
mod nodes;
mod purity;
mod readme;
mod recording;
mod scarcity;
mod scenarios;
