//! What policies decide, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod audit;
mod auto;
mod drawn;
mod geometry;
mod giants;
mod invariants;
mod memory_short;
mod nodes;
mod purity;
mod readme;
mod recording;
mod reservations;
mod scarcity;
mod scenarios;
